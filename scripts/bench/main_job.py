"""The main job against fixed batches: does one adaptive run match the best fixed batch without a sweep?

The language model recipe is trained at several fixed batches and adaptively from a small one, on the same samples.
Every arm's learning rate is tuned by the same rule: on the first seed, a grid of factors of two around a square-root
guess, widened until the best is interior; the other seeds run at the winner only. Seeds are paired (same parameters,
same sample order). The adaptive arm is the real main job on two ranks; fixed arms run on one rank, two at a time, which
gives the same gradients. At equal samples the adaptive run's held-out loss is compared with the fixed arms'
interpolated in log B at its own average batch samples/steps: it may be worse by at most twice the seed spread (the
standard deviation over seeds of the difference's own pairs, floored by the fixed arms').

    python scripts/bench/main_job.py            full: 3 seeds
    python scripts/bench/main_job.py --quick    small model, one seed, about a minute: shows that it runs

Every run is cached under --cache by its settings, so the bench can be stopped and started again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from _common import write_result

from adabatch.ledger import Ledger
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "main_job")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--model", default="gpt_small")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--starts", type=int, nargs="*", default=[16])
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
    widest = 0 if options.quick else 4
    seeds = range(options.seeds)

    fixed: dict[int, list[Outcome]] = {}
    rates: dict[str, float] = {}
    for batch in options.batches:
        arm = Arm(f"fixed-{batch}", ("policy=fixed", f"policy.global_batch={batch}", "noise=off"), 1e-3 * (batch / 8) ** 0.5)
        rates[arm.name] = tune(bench, arm, widest)
        fixed[batch] = run_all([lambda s=s: bench.run(arm, rates[arm.name], s) for s in seeds], arm)

    lines = [
        "| arm | tuned lr | steps | average batch | held-out loss (per seed) | mean | frontier at these steps | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for batch, outcomes in fixed.items():
        lines.append(
            f"| fixed {batch} | {rates[f'fixed-{batch}']:.2e} | {outcomes[0].steps} | {batch} | "
            f"{_losses(outcomes)} | {statistics.mean(o.loss for o in outcomes):.4f} | | |"
        )
    fixed_spread = max(_spread([o.loss for o in outcomes]) for outcomes in fixed.values())
    good = True
    verdicts = []
    decay_from = 0.8 * options.samples
    for start in options.starts:
        arm = Arm(f"adaptive-{start}", (f"limits.start_batch={start}", *options.adaptive), 1e-3 * (start / 8) ** 0.5, 2)
        rates[arm.name] = tune(bench, arm, widest)
        outcomes = [bench.run(arm, rates[arm.name], seed) for seed in seeds]
        differences, averages = [], []
        for seed, outcome in zip(seeds, outcomes):
            averages.append(outcome.samples / outcome.steps)
            differences.append(outcome.loss - frontier({b: runs[seed] for b, runs in fixed.items()}, averages[-1]))
        spread = max(_spread(differences), fixed_spread)
        first, largest, early = (min(values) for values in zip(*(growth(o.folder, decay_from) for o in outcomes)))
        difference = statistics.mean(differences)
        lines.append(
            f"| adaptive from {start} | {rates[arm.name]:.2e} | {', '.join(str(o.steps) for o in outcomes)} | "
            f"{statistics.mean(averages):.1f} | {_losses(outcomes)} | {statistics.mean(o.loss for o in outcomes):.4f} | "
            f"{statistics.mean(o.loss for o in outcomes) - difference:.4f} | {difference:+.4f} (spread {spread:.4f}) |"
        )
        holds = difference <= 2 * spread and largest >= 4 * first and early > first
        good &= holds
        verdicts.append(
            f"from {start}: difference {difference:+.4f} against at most {2 * spread:.4f}; batch grew {first} to "
            f"{largest} (at least fourfold wanted), to {early} before the decay from sample {decay_from:,.0f}"
        )
    verdict = "; ".join(verdicts) + (" -> holds" if good else " -> falls short")
    body = "\n".join(lines) + f"\n\nTotal cost {bench.cost / 3600:.2f} core-hours of training. Held-out spread of the " \
        f"fixed arms over seeds: {fixed_spread:.4f}.\n\n{verdict}"
    if not options.quick:
        write_result("main_job", "The main job against fixed batches", body, " ".join(["python", *sys.argv]))
    print(body)
    return 0 if good else 1


def _losses(outcomes: Sequence[Outcome]) -> str:
    return ", ".join(f"{outcome.loss:.4f}" for outcome in outcomes)


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    sys.exit(main())
