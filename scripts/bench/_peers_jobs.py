"""The environment of peers.py, the jobs that it runs there, and their cache."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import ROOT, cached, describe_machine, essence
from _peers_arms import KINDS
from _peers_problems import PROBLEMS, TIMED

HERE = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".cache" / "peers_env"
TORCH = "torch==2.13.0"
# AdaptDL imports pkg_resources, which setuptools 81 dropped, and requests, which it does not declare; fairscale's
# build wants the torch that is there; BackPACK asks for torchvision, and with it for another torch, without needing it.
INSTALLS = (
    (TORCH, "numpy==2.4.6", "setuptools==80.10.2", "wheel"),
    ("gns-pytorch==0.1.5",),
    ("adaptdl==0.2.11", "requests==2.34.2"),
    ("--no-build-isolation", "--no-deps", "fairscale==0.4.13"),
    ("--no-deps", "backpack-for-pytorch==1.7.1"),
    ("unfoldNd==0.2.3", "einops==0.8.2"),
    ("torch-gqc==0.10.4",),
)
# Problems whose answer shows in fewer repeats, with their share of them.
SHARES = {"regression: scale 320 B": 0.5, "regression at its optimum": 0.5, "opposed pairs": 0.125}
# A problem in which a ratio to 2 % takes so many times the repeats; the others' need not be known so well.
FINER, TIMES = "regression: scale 10 B", 4
# Arms that take minutes for what the others do in seconds, with their share of the repeats.
SLOW = {"gns-pytorch-all": 0.25}


@dataclass(frozen=True)
class Mode:
    """How much is run."""

    steps: int
    repeats: int
    seconds: float
    sizes: tuple[str, ...]
    parallel_steps: int
    wraps: tuple[str, ...]
    # Arms in one process: quicker, but one that fails hard takes the others with it.
    together: bool


FULL = Mode(600, 16, 12.0, tuple(TIMED), 4000, ("ddp", "fsdp2"), together=False)
QUICK = Mode(60, 2, 1.0, ("0.4M",), 60, ("fsdp2",), together=True)

Results = dict[str, dict[str, Any]]


def environment() -> Path:
    """The interpreter of the peers' environment, made anew when what belongs in it has changed."""
    wanted = json.dumps(INSTALLS)
    marker, python = ENVIRONMENT / "installed.json", ENVIRONMENT / "bin" / "python"
    if marker.exists() and marker.read_text() == wanted:
        return python
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    constraints = ENVIRONMENT / "constraints.txt"
    constraints.write_text(f"{TORCH}\n")
    for packages in INSTALLS:
        print(f"pip install {shlex.join(packages)}", flush=True)
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, "--constraint", str(constraints), *packages], check=True)
    marker.write_text(wanted)
    return python


def run(job: str, arms: Sequence[str], names: Sequence[str], *numbers: float, seconds: float) -> Results:
    """What a job prints, or the end of what it complains about for every arm and name."""
    python = [str(environment())]
    if job == "parallel":
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*python, str(HERE / "_peers_worker.py"), job, ",".join(arms), ",".join(names), *map(str, numbers)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=seconds)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        complaint = f"no end after {seconds:.0f} s"
    except (IndexError, json.JSONDecodeError):
        complaint = " ".join(done.stderr.split())[-200:]
    return {arm: {name: {"error": complaint} for name in names} for arm in arms}


def sources(arm: str) -> list[str]:
    """The code that an arm's figures come from."""
    paths = [HERE / f"_peers_{part}.py" for part in ("arms", "problems", "worker")]
    if arm.startswith("adabatch"):
        paths += [ROOT / "adabatch" / "noise.py", *sorted((ROOT / "adabatch" / "gradients").glob("*.py"))]
    return [essence(path.read_text()) for path in paths]


def collect(
    job: str, arms: Sequence[str], names: Sequence[str], *numbers: float, mode: Mode, seconds: float
) -> Results:
    """The job's results by arm and name; one process and one piece of the cache for each pair, unless together."""
    if mode.together:
        return run(job, arms, names, *numbers, seconds=seconds)
    return {arm: {name: one(job, arm, name, *numbers, seconds=seconds) for name in names} for arm in arms}


def collect_streams(mode: Mode) -> Results:
    """The readings of every arm on every problem."""
    if mode.together:
        return run("stream", list(KINDS), list(PROBLEMS), 0, mode.repeats, mode.steps, seconds=1500.0)
    return {arm: {name: one_stream(arm, name, mode) for name in PROBLEMS} for arm in KINDS}


def one_stream(arm: str, name: str, mode: Mode) -> Any:
    """The readings of one arm on one problem, in pieces of as many repeats as the mode has."""
    repeats = max(2, round(mode.repeats * SHARES.get(name, 1.0) * SLOW.get(arm, 1.0)))
    rounds = TIMES if name == FINER and arm.startswith("adabatch") else 1
    found: list[Any] = []
    for number in range(rounds):
        piece = one("stream", arm, name, number * repeats, repeats, mode.steps, seconds=1500.0)
        if is_error(piece):
            return piece
        found += piece
    return found


class Failed(Exception):
    """Carries a result that is an error, past the cache."""


def one(job: str, arm: str, name: str, *numbers: float, seconds: float) -> Any:
    """The result of one job for one arm and name, from the cache if it is there; errors are not kept."""
    key = [job, arm, name, *numbers, INSTALLS, sources(arm), describe_machine() if job == "cost" else ""]

    def compute() -> Any:
        found = run(job, [arm], [name], *numbers, seconds=seconds)[arm][name]
        if is_error(found):
            raise Failed(found)
        return found

    begun = time.monotonic()
    try:
        found = cached("peers", key, compute)
    except Failed as failure:
        found = failure.args[0]
    print(f"{job}, {arm}, {name}: {time.monotonic() - begun:.0f} s", flush=True)
    return found


def is_error(found: Any) -> bool:
    return isinstance(found, dict)
