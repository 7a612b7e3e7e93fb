"""What measuring costs in time: loops with adabatch in them against a plain hand-written loop, on two ranks.

Per cell (a model and a number of micro-batches) the plain loop runs beside a second copy of itself (A/A: what the
measurement can resolve) and beside:

- the reference loop (``adabatch.loop``), which runs the closed-loop policy with its batch held fixed, measures the
  noise in every step, decides every 16 steps and logs every 10;
- the plain loop with a passive tap (by kind of tap and geometry), measured in every step or every 10th, its numbers
  exchanged and read every 16.

All have the same model, data, optimizer and clipping; the plain loop accumulates under ``no_sync``, and logs its loss
and gradient norm every 10 steps too. FSDP2's tap runs against a plain FSDP2 loop.

A round is one block of steps of each, in random order. A ratio is the geometric mean over rounds, relative to both
copies of the plain loop, with a 95 % interval by Student's quantile; rounds go on until every interval's half-width is small enough, or the time for the cell is over,
which is then said. A target falls short when the interval lies wholly above it. Memory is what tensors hold between
backward and clipping beyond the plain loop's, relative to the parameters.

    python scripts/bench/overhead.py [--quick] [--cells 0.5M-1,5M-4] [--seconds 300]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _common import Table, Target, cached, describe_machine, verdict, write_result
from _overhead_loops import ARMS, RANKS, SEED, Lap, Plain, Task, arms_of, held_bytes

CELLS = {
    "0.5M-1": Task("0.5M", 8, 1),
    "0.5M-4": Task("0.5M", 8, 4),
    "5M-1": Task("5M", 8, 1),
    "5M-4": Task("5M", 8, 4),
    "convnet-1": Task("convnet", 64, 1),
    "convnet-4": Task("convnet", 64, 4),
    "fsdp-0.5M-1": Task("0.5M", 8, 1, sharded=True),
    "fsdp-5M-1": Task("5M", 8, 1, sharded=True),
    "fsdp-5M-4": Task("5M", 8, 4, sharded=True),
}
BLOCK_SECONDS, FEWEST_ROUNDS = 0.25, 12
MOST_MEMORY = 0.01


@dataclass(frozen=True)
class Mode:
    """How long a cell is measured: until the half-widths are reached, at most for so many seconds."""

    half_width: float
    seconds: float
    profiled_steps: int


FULL, QUICK = Mode(0.005, 1200.0, 48), Mode(0.02, 40.0, 16)


# -- timing, on every rank


def measure(task: Task, mode: Mode) -> dict[str, Any]:
    """One cell: ratios per round, bytes held and a profile, the same on both ranks."""
    from adabatch import distributed

    dataset = task.data()
    with tempfile.TemporaryDirectory() as name:
        loops: dict[str, Any] = {arm: Plain(task, dataset, Path(name)) for arm in ("plain", "plain again")}
        for number, arm in enumerate(arms_of(task)):
            folder = Path(name) / str(number)
            folder.mkdir(exist_ok=True)
            loops[arm] = ARMS[arm][0](task, dataset, folder)
        for _ in range(2):
            for loop in loops.values():
                timed(loop.step, 3)
        seconds = distributed.agree(timed(loops["plain"].step, 5) / 5)
        steps = max(1, round(BLOCK_SECONDS / seconds))
        # rank 0's clock, between barriers; the steps of a block and the order are the same on both ranks
        rounds: list[dict[str, float]] = []
        order, draws = list(loops), random.Random(SEED)
        while True:
            draws.shuffle(order)
            rounds.append({arm: timed(loops[arm].step, steps) / steps for arm in order})
            if distributed.agree(enough(rounds, steps, mode)):
                break
        profile = {arm: profiled(loop, mode.profiled_steps) for arm, loop in loops.items()}
        held = {arm: memory_of(task, dataset, Path(name), arm) for arm in ("plain", *arms_of(task))}
    return {"rounds": rounds, "steps": steps, "profile": profile, "held": held}


def memory_of(task: Task, dataset: Any, folder: Path, arm: str) -> float | None:
    """What a loop holds over its parameters; the reference loop and loops that mostly rest are not asked."""
    if arm == "reference loop" or "every 10th" in arm:
        return None
    make = Plain if arm == "plain" else ARMS[arm][0]
    held, own = held_bytes(lambda: make(task, dataset, folder))
    return held / own


def timed(step: Callable[[], None], steps: int) -> float:
    """Seconds of so many steps, both ranks beginning and ending together."""
    from adabatch import distributed

    distributed.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    distributed.barrier()
    return time.perf_counter() - begun


def enough(rounds: list[dict[str, float]], steps: int, mode: Mode) -> bool:
    """Whether the intervals are narrow enough, after some rounds at least, or the time is over."""
    spent = steps * sum(sum(times.values()) for times in rounds)
    if len(rounds) < FEWEST_ROUNDS:
        return len(rounds) >= 3 and spent > 2 * mode.seconds
    widths = [interval(rounds, arm)[1] for arm in rounds[0] if arm != "plain"]
    return spent > mode.seconds or max(widths) <= mode.half_width


def profiled(loop: Any, steps: int) -> dict[str, float]:
    """Median seconds per part of a step."""
    step: Callable[[Lap], None] = getattr(loop, "profiled_step", loop.step)
    parts: list[dict[str, float]] = []
    for _ in range(steps):
        laps: dict[str, float] = {}
        last = [time.perf_counter()]

        def lap(name: str) -> None:
            now = time.perf_counter()
            laps[name] = laps.get(name, 0.0) + now - last[0]
            last[0] = now

        step(lap)
        parts.append(laps)
    return {name: statistics.median(laps.get(name, 0.0) for laps in parts) for name in parts[0]}


def interval(rounds: list[dict[str, float]], arm: str) -> tuple[float, float]:
    """Geometric mean of ``arm`` over plain, and the half-width of its 95 % interval.

    The plain time of a round is the geometric mean of both copies'; for the second copy it is the first one's.
    """
    copies = ["plain"] if arm == "plain again" else ["plain", "plain again"]
    logs = [math.log(times[arm]) - statistics.fmean(math.log(times[copy]) for copy in copies) for times in rounds]
    spread = statistics.stdev(logs) / math.sqrt(len(logs))
    ratio = math.exp(statistics.fmean(logs))
    return ratio, ratio * student(len(logs) - 1) * spread


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by the expansion in 1/freedom (right to 1 % from 4 on)."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2) + (
        3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
    ) / (384 * freedom**3)


# -- the table


def run_cell(name: str, mode: Mode) -> dict[str, Any]:
    """Measure one cell in two processes that torchrun starts."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        arguments = ["--worker", name, "--result", str(result), "--seconds", str(mode.seconds)]
        arguments += ["--quick"] if mode.half_width == QUICK.half_width else []
        threads = str(max(1, (os.cpu_count() or RANKS) // RANKS))
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        subprocess.run([*command, str(Path(__file__)), *arguments], check=True, env=environment)
        return json.loads(result.read_text())


def work(name: str, result: Path, mode: Mode) -> None:
    from adabatch import distributed

    world = distributed.start(device="cpu", timeout_seconds=300.0)
    found = measure(CELLS[name], mode)
    if world.is_first:
        result.write_text(json.dumps(found))
    distributed.stop()


def report(cells: dict[str, dict[str, Any]], mode: Mode) -> tuple[str, list[Target]]:
    """Markdown and targets."""
    table = Table(["cell", "plain ms", "loop", "ratio", "±", "target", "rounds", "memory %"])
    targets = []
    for name, found in cells.items():
        rounds, held = found["rounds"], found["held"]
        plain = 1000 * statistics.median(times["plain"] for times in rounds)
        for arm in (arm for arm in rounds[0] if arm != "plain"):
            ratio, width = interval(rounds, arm)
            goal = ARMS[arm][1] if arm in ARMS else None
            extra = None if held.get(arm) is None else held[arm] - held["plain"]
            memory = "" if extra is None else f"{100 * extra:.2f}"
            table.add(name, f"{plain:.1f}", arm, f"{ratio:.4f}", f"{width:.4f}", goal or "A/A", len(rounds), memory)
            if goal is not None:
                figure = f"{ratio:.4f} ± {width:.4f}"
                targets.append(Target(f"{name} {arm}", figure, f"<= {goal}", ratio - width <= goal))
            if width > mode.half_width:
                targets.append(Target(f"{name} {arm} half-width", f"{width:.4f}", f"<= {mode.half_width}", False))
            if extra is not None:
                targets.append(Target(f"{name} {arm} memory", f"{extra:.2%}", f"<= {MOST_MEMORY:.0%}", extra <= MOST_MEMORY))
    profiles = [f"{name}, median ms per step on rank 0:\n\n{profile_table(found)}" for name, found in cells.items()]
    return "\n\n".join([str(table), "What remains:", *profiles]), targets


def profile_table(found: dict[str, Any]) -> Table:
    """Parts of a step, by loop."""
    profile = found["profile"]
    arms = [arm for arm in profile if arm != "plain again" and "every 10th" not in arm]
    table = Table(["part", *arms])
    for part in dict.fromkeys(part for arm in arms for part in profile[arm]):
        table.add(part, *(f"{1000 * profile[arm].get(part, 0.0):.3f}" for arm in arms))
    table.add("all", *(f"{1000 * sum(profile[arm].values()):.3f}" for arm in arms))
    return table


def selected(names: str) -> Iterator[str]:
    for name in names.split(","):
        if name not in CELLS:
            raise SystemExit(f"--cells takes some of {','.join(CELLS)}, got {name!r}")
        yield name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half-width 0.02 instead of 0.005: minutes on 2 cores")
    parser.add_argument("--cells", default=",".join(CELLS), help="some of %(default)s")
    parser.add_argument("--seconds", type=float, help="the longest that a cell is timed")
    parser.add_argument("--write", action="store_true", help="write docs/results/overhead.md with --quick, too")
    parser.add_argument("--fresh", action="store_true", help="measure anew what a stopped run has measured already")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    mode = QUICK if options.quick else FULL
    mode = replace(mode, seconds=options.seconds or mode.seconds)
    if options.worker:
        work(options.worker, options.result, mode)
        return 0
    begun = time.monotonic()
    cells = {}
    for name in selected(options.cells):
        if options.quick or options.fresh:
            cells[name] = run_cell(name, mode)
        else:
            key = {"cell": name, "machine": describe_machine(), "half_width": mode.half_width, "seconds": mode.seconds}
            cells[name] = cached("overhead", key, lambda name=name: run_cell(name, mode))
        rounds = cells[name]["rounds"]
        ratios = (f"{arm} {interval(rounds, arm)[0]:.3f}" for arm in sorted(rounds[0]) if arm != "plain")
        print(f"{name}: {', '.join(ratios)}", flush=True)
    body, targets = report(cells, mode)
    body += f"\n\n{time.monotonic() - begun:.0f} s, seed {SEED}; at most {mode.seconds:.0f} s of timing per cell."
    print(f"\n{body}\n")
    if options.write or not options.quick:
        command = shlex.join(["python", "scripts/bench/overhead.py", *sys.argv[1:]])
        write_result("overhead", "Time of a step against a plain loop", f"{body}\n\n{verdict(targets)}", command)
    print(verdict(targets))
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
