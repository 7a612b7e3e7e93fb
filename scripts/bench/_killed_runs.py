"""Starts the program of resume.py, kills it at chosen moments, and resumes it until it is done."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from _common import ROOT

PROGRAM = ROOT / "scripts" / "bench" / "_resume_task.py"
SAMPLES, ORDER_SEED = 2411, 5
# The look at one micro-batch before training (noise.require_mean) would be noted as samples consumed.
SETTINGS = f"""
    model=gpt_tiny model.dropout=0.1 order_seed={ORDER_SEED} data=text data.pattern=*.py data.sequence_length=32
    stop.samples={SAMPLES} limits.start_batch=24 limits.micro_batch=4 limits.max_batch=96 lr_schedule.warmup=0
    policy.target_efficiency=0.2 damping=off damping.growth=1.5 noise.decide_every=4 noise.require_mean=false
    logger=quiet logger.every=4 evaluation.every=300 evaluation.samples=24 checkpoint.every=250
""".split()
REFUSALS = ("there is nothing to go on from", "is no run folder")
PATIENCE = 300.0


@dataclass(frozen=True)
class Aim:
    """When to kill: ``delay`` seconds after ``share`` of what is left of ``phase`` has begun."""

    phase: str
    share: float
    delay: float


@dataclass(frozen=True)
class Spec:
    """One run: ranks and data workers of its attempts, in turn, and when to kill them.

    ``spare`` is a kill more for a run that had to be started anew, so that every run is resumed in the end.
    """

    number: int
    ranks: tuple[int, ...]
    workers: tuple[int, ...]
    aims: tuple[Aim, ...]
    spare: Aim


@dataclass
class Attempt:
    """One launch: the samples consumed before it, where it noted its own, what it printed and how it ended."""

    trace: Path
    ranks: int
    start: int = 0
    began: float = 0.0
    output: str = ""
    status: int | None = None
    killed_in: str | None = None

    def notes(self, rank: int) -> list[str]:
        """The complete lines that a rank has noted so far."""
        try:
            return Path(f"{self.trace}-{rank}").read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []


@dataclass
class History:
    """The attempts in a run folder, what was killed on the way, and how often the run was started anew."""

    folder: Path
    attempts: list[Attempt] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)
    anew: int = 0
    clear: bool = True


@dataclass(frozen=True)
class Pace:
    """Of a run without a kill: how often it entered each phase, and the seconds before its first step."""

    phases: Counter[str]
    startup: float


def command(ranks: int, folder: Path, *, resume: bool, workers: int) -> list[str]:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    library = Path(sysconfig.get_path("stdlib"), "email")
    settings = [f"resume={folder}"] if resume else [f"run_folder={folder}", f"data.path={library}", *SETTINGS]
    return [*launcher, str(PROGRAM), f"workers={workers}", *settings]


@contextlib.contextmanager
def launched(attempt: Attempt, arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The attempt's process; at the end it is gone, and its output and exit status are noted."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RESUME_TRACE": str(attempt.trace)}
    log = attempt.trace.with_suffix(".log")
    attempt.began = time.time()
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process
        finally:
            if process.poll() is None:
                kill(process)
    attempt.output, attempt.status = log.read_text(errors="replace"), process.returncode


def launch(attempt: Attempt, arguments: list[str], aim: Aim | None, pace: Pace) -> None:
    """Run one attempt to its end, or kill it where ``aim`` says."""
    with launched(attempt, arguments) as process:
        if aim is None:
            process.wait(PATIENCE)
        elif await_moment(aim, attempt, process, pace):
            kill(process)
            last = [line for line in attempt.notes(0) if line.startswith("phase ")][-1:]
            attempt.killed_in = last[0][6:] if last else "start-up"
    refused = any(words in attempt.output for words in REFUSALS)
    if attempt.status and not attempt.killed_in and not refused:
        raise RuntimeError(f"{' '.join(arguments)} ended with {attempt.status}:\n{attempt.output[-6000:]}")


def await_moment(aim: Aim, attempt: Attempt, process: subprocess.Popen[bytes], pace: Pace) -> bool:
    """Wait for the moment to kill; False when the attempt ended before."""
    began = time.monotonic()
    while not is_reached(aim, attempt, pace, time.monotonic() - began):
        if process.poll() is not None or time.monotonic() - began > PATIENCE:
            return False
        time.sleep(0.002)
    time.sleep(aim.delay)
    return process.poll() is None


def is_reached(aim: Aim, attempt: Attempt, pace: Pace, seconds: float) -> bool:
    """Whether rank 0 has come as far as the aim says."""
    if aim.phase == "start-up":
        return seconds >= aim.share * pace.startup
    notes = attempt.notes(0)
    if aim.phase == "anywhere":
        done = sum(line.count(":") for line in notes if line.startswith("samples "))
        return done * attempt.ranks >= aim.share * (SAMPLES - attempt.start)
    expected = pace.phases[aim.phase] * (1 - attempt.start / SAMPLES)
    return notes.count(f"phase {aim.phase}") >= max(1, round(aim.share * expected))


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for a launcher and its ranks, not for data workers. Stopped first, a launcher starts no more ranks."""
    process.send_signal(signal.SIGSTOP)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [int(pid) for pid in children if is_rank(int(pid))]
    process.kill()
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    while any(map(is_alive, ranks)):
        time.sleep(0.001)


def is_rank(pid: int) -> bool:
    """Whether a child was started by torchrun as a rank."""
    try:
        return b"\0LOCAL_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_alive(pid: int) -> bool:
    """Whether a process still runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def carry_out(spec: Spec, folder: Path, pace: Pace) -> History:
    """Start, kill and resume until the run is done; without a checkpoint to go on from it is started anew."""
    history, aims = History(folder / "run0"), list(spec.aims)
    for number, ranks, workers in zip(itertools.count(), itertools.cycle(spec.ranks), itertools.cycle(spec.workers)):
        start = resume_point(history.folder)
        resume = bool(history.attempts)
        attempt = Attempt(folder / f"trace{number}", ranks, start or 0)
        aim = aims.pop(0) if aims and (start is not None or not resume) else None
        arguments = command(ranks, history.folder, resume=resume, workers=workers)
        launch(attempt, arguments, aim, pace)
        history.attempts.append(attempt)
        if attempt.killed_in:
            history.kills.append(attempt.killed_in)
        elif attempt.status == 0:
            return history
        else:
            clear = history.clear and start is None
            history = History(folder / f"run{number + 1}", [], history.kills, history.anew + 1, clear)
            aims.append(spec.spare)
    raise AssertionError("unreachable")


def resume_point(folder: Path) -> int | None:
    """Samples consumed at the checkpoint to go on from, read from the files themselves; ``None`` without one."""
    checkpoints = folder / "checkpoints"
    names = sorted(path.name for path in checkpoints.glob("step-*"))
    with contextlib.suppress(FileNotFoundError):
        names.append((checkpoints / "latest").read_text().strip())
    if not names:
        return None
    # One whose successor of the same step was just to take its place waits beside it.
    found = [checkpoints / names[-1], *checkpoints.glob(f".{names[-1]}.replaced-*")]
    manifest = next(path / "manifest.json" for path in found if path.exists())
    return json.loads(manifest.read_text())["samples"]
