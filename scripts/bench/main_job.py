"""The main job against fixed batches: does one adaptive run match the best fixed batch without a sweep?

The language model recipe is trained at several fixed batches and adaptively from a small one, on the same samples.
Every arm's learning rate is tuned by the same rule: on the first seed, a grid of factors of two around a square-root
guess, widened until the best is interior; the other seeds run at the winner only. Seeds are paired (same parameters,
same sample order). The adaptive arm is the real main job on two ranks; fixed arms run on one rank, two at a time, which
gives the same gradients. At equal samples the adaptive run's held-out loss is compared with the fixed arms'
interpolated in log B at its own average batch samples/steps: it may be worse by at most twice the seed spread (the
largest standard deviation over seeds, of the difference or of any fixed arm's loss). The last column turns the loss
into steps: the fixed batch that reaches it at the same samples.

    python scripts/bench/main_job.py            full: 3 seeds
    python scripts/bench/main_job.py --quick    small model, one seed, about a minute: shows that it runs

Every run is cached under --cache by its settings, so the bench can be stopped and started again.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from _common import Table, Target, verdict, write_result

from adabatch.ledger import Ledger
from adabatch.plan import steps_at
from adabatch.runlog import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "recipes" / "lm" / "train.py"


@dataclass(frozen=True)
class Arm:
    """A fixed batch, or the adaptive job that starts from ``start``."""

    name: str
    overrides: tuple[str, ...]
    guess: float
    ranks: int = 1


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    loss: float
    steps: int
    samples: int
    seconds: float
    folder: Path


class Bench:
    """Starts runs, or takes them from the cache."""

    def __init__(self, cache: Path, common: Sequence[str]) -> None:
        self.cache, self.common = cache, tuple(common)
        self.cost = 0.0

    def run(self, arm: Arm, lr: float, seed: int) -> Outcome:
        overrides = [
            *self.common,
            *arm.overrides,
            f"optimizer.lr={lr:.6g}",
            f"seed={seed}",
            f"order_seed={seed}",
        ]
        key = hashlib.sha256(json.dumps([overrides, arm.ranks]).encode()).hexdigest()[:16]
        folder = self.cache / f"{arm.name}-{seed}-{lr:.4g}-{key}"
        if not (folder / "done").exists():
            subprocess.run(["rm", "-rf", str(folder)], check=True)
            self._start(arm, [*overrides, f"run_folder={folder}"])
            (folder / "done").touch()
        outcome = read_outcome(folder)
        self.cost += outcome.seconds * arm.ranks
        print(
            f"  {arm.name:>12} lr {lr:.2e} seed {seed}: loss {outcome.loss:.4f}, {outcome.steps} steps", flush=True
        )
        return outcome

    def _start(self, arm: Arm, overrides: list[str]) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arm.ranks)]
        command = [*launcher, str(PROGRAM)] if arm.ranks > 1 else [sys.executable, str(PROGRAM)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *overrides], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join([*command, *overrides])} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def read_outcome(folder: Path) -> Outcome:
    metrics = read_metrics(folder)
    last = metrics.evaluations[-1]
    return Outcome(last["loss"], last["step"], last["samples"], last["seconds"], folder)


def tune(bench: Bench, arm: Arm, widest: int) -> float:
    """The best learning rate of ``arm`` on seed 0: factors of two around the guess, until the best is interior."""
    tried: dict[int, float] = {}
    wanted = [-1, 0, 1]
    while wanted:
        losses = run_all([lambda power=power: bench.run(arm, arm.guess * 2.0**power, 0).loss for power in wanted], arm)
        tried.update({power: loss if math.isfinite(loss) else math.inf for power, loss in zip(wanted, losses)})
        best = min(tried, key=tried.__getitem__)
        wanted = [power for power in (best - 1, best + 1) if power not in tried and abs(power) <= widest]
    return arm.guess * 2.0**best


def run_all(jobs: Sequence[Callable[[], object]], arm: Arm) -> list:
    """Run jobs, as many at a time as leaves each rank a core."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // arm.ranks)) as pool:
        return list(pool.map(lambda job: job(), jobs))


def frontier(fixed: dict[int, Outcome], batch: float) -> float:
    """Held-out loss of the fixed arms at ``batch``, linear in log B between the two that bracket it."""
    sizes = sorted(fixed)
    batch = min(max(batch, sizes[0]), sizes[-1])
    above = next(size for size in sizes if size >= batch)
    if above == batch:
        return fixed[above].loss
    below = max(size for size in sizes if size < batch)
    share = math.log(batch / below) / math.log(above / below)
    return (1 - share) * fixed[below].loss + share * fixed[above].loss


def growth(folder: Path, decay_from: float) -> tuple[int, int, float]:
    """Batch at the start, largest batch, and largest batch before sample ``decay_from``."""
    ledger = Ledger.load(folder)
    whole = [segment for segment in ledger.segments if not segment.partial]
    early = [segment.global_batch for segment in whole if segment.first_sample < decay_from]
    return whole[0].global_batch, max(segment.global_batch for segment in whole), max(early)


def equal_batch(fixed: dict[int, Outcome], loss: float) -> float | None:
    """The fixed batch that reaches ``loss`` at the same samples, by the same interpolation; ``None`` beyond the arms."""
    sizes = sorted(fixed)
    for below, above in itertools.pairwise(sizes):
        low, high = fixed[below].loss, fixed[above].loss
        if low <= loss <= high:
            return below * (above / below) ** ((loss - low) / (high - low))
    return None


def fixed_arm(batch: int) -> Arm:
    overrides = ("policy=fixed", f"policy.global_batch={batch}", "noise=off")
    return Arm(f"fixed-{batch}", overrides, 1e-3 * (batch / 8) ** 0.5)


def adaptive_arm(start: int, overrides: Sequence[str]) -> Arm:
    return Arm(f"adaptive-{start}", (f"limits.start_batch={start}", *overrides), 1e-3 * (start / 8) ** 0.5, 2)


def against_frontier(fixed: dict[int, list[Outcome]], outcomes: Sequence[Outcome]) -> list[float]:
    """Held-out loss of each seed's adaptive run minus that of the same seed's fixed arms at its average batch."""
    return [
        outcome.loss - frontier({batch: runs[seed] for batch, runs in fixed.items()}, outcome.samples / outcome.steps)
        for seed, outcome in enumerate(outcomes)
    ]


def judge(start: int, fixed: dict[int, list[Outcome]], outcomes: Sequence[Outcome], decay_from: float) -> list[Target]:
    """The targets of one adaptive arm."""
    differences = against_frontier(fixed, outcomes)
    spread = max(_spread(differences), *(_spread([run.loss for run in runs]) for runs in fixed.values()))
    mean = statistics.mean(differences)
    first, largest, early = (min(values) for values in zip(*(growth(run.folder, decay_from) for run in outcomes)))
    return [
        Target(f"loss against the frontier, from {start}", f"{mean:+.4f}", f"<= {2 * spread:.4f}", mean <= 2 * spread),
        Target(f"growth from {start}", f"{largest / first:.1f}x", ">= 4x", largest >= 4 * first),
        Target("part of it before the decay", f"{early / first:.1f}x", "> 1x", early > first),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "main_job")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--model", default="gpt_small")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--starts", type=int, nargs="+", default=[16])
    parser.add_argument("adaptive", nargs="*", help="overrides of the adaptive arms")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.samples, options.model = 1, 6_000, "gpt_tiny"
        options.batches, options.starts = [8, 32], [8]
    common = [
        f"model={options.model}",
        f"stop.samples={options.samples}",
        f"lr_schedule.warmup={options.samples // 30}",
        "logger=quiet",
        "evaluation.every=1000000",
        "evaluation.samples=2048",
        "checkpoint.every=null",
    ]
    bench = Bench(options.cache, common)
    widest, seeds = 0 if options.quick else 4, range(options.seeds)
    table = Table(["arm", "tuned lr", "steps", "average batch", "loss by seed", "mean", "fixed batch of equal loss"])
    fixed: dict[int, list[Outcome]] = {}
    for batch in options.batches:
        arm = fixed_arm(batch)
        lr = tune(bench, arm, widest)
        fixed[batch] = run_all([lambda seed=seed: bench.run(arm, lr, seed) for seed in seeds], arm)
        table.add(f"fixed {batch}", f"{lr:.2e}", fixed[batch][0].steps, batch, *_losses(fixed[batch]), "")
    targets: list[Target] = []
    for start in options.starts:
        arm = adaptive_arm(start, options.adaptive)
        lr = tune(bench, arm, widest)
        outcomes = [bench.run(arm, lr, seed) for seed in seeds]
        average = statistics.mean(outcome.samples / outcome.steps for outcome in outcomes)
        means = {batch: _mean_of(runs) for batch, runs in fixed.items()}
        equal = equal_batch(means, statistics.mean(outcome.loss for outcome in outcomes))
        steps = ", ".join(str(outcome.steps) for outcome in outcomes)
        table.add(f"adaptive from {start}", f"{lr:.2e}", steps, f"{average:.0f}", *_losses(outcomes), _equal(equal, options))
        targets += judge(start, fixed, outcomes, 0.8 * options.samples)
    body = (
        f"{options.samples:,} samples, {options.model}, seeds 0 to {options.seeds - 1}; held-out loss of 2,048 samples. "
        f"Total cost {bench.cost / 3600:.2f} core-hours of training.\n\n{table}\n\n{verdict(targets)}"
    )
    if not options.quick:
        command = shlex.join(["python", "scripts/bench/main_job.py", *sys.argv[1:]])
        write_result("main_job", "The main job against fixed batches", body, command)
    print(body)
    return 0 if all(target.holds for target in targets) else 1


def _equal(batch: float | None, options: argparse.Namespace) -> str:
    return "beyond the arms" if batch is None else f"{batch:.0f} ({steps_at(options.samples, batch)} steps)"


def _mean_of(runs: Sequence[Outcome]) -> Outcome:
    return replace(runs[0], loss=statistics.mean(run.loss for run in runs))


def _losses(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    losses = [outcome.loss for outcome in outcomes]
    return ", ".join(f"{loss:.4f}" for loss in losses), f"{statistics.mean(losses):.4f}"


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    sys.exit(main())
