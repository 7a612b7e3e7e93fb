"""What the policies are worth on paper: the real controller against truths that are known, in simulation.

The critical batch grows exponentially with the progress, 10, 100 and 1000 times, over a run of a few thousand steps at
least; a fixed batch takes about as many steps wherever it is set. "Followed": the truth is measured without error and
taken at every step, as the theory does (damping=off). "Default": as in training, damping and all, with the noise scale
known exactly or measured in 300 effective dimensions. Product is (steps/S_min - 1)(samples/E_min - 1) by the true
critical batch: 1 for every fixed batch (arXiv 1812.06162, section 2.3).

- proportional: B = c B_crit lands on the fixed batches' frontier, product 1;
- sqrt: B ~ sqrt(B_crit) reaches gamma = 4 (sqrt R - 1) / ((sqrt R + 1) ln R) with the true curve for a forecast and no
  cap; with its own forecast and the default cap, product and delivered efficiency are reported;
- the delivered efficiency is the target;
- wall_clock: for 50 pairs of noise scale and overhead, step times and all measured in the run, its last batch against
  the fastest of a ladder of factors of sqrt(2) by brute force, and its time for a unit of progress against that one's.

    python scripts/bench/simulation.py [--quick]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import inspect
import math
import statistics
import sys
import time

from _common import ROOT, Table, Target, cached, essence, verdict, write_result

from adabatch.config.simulation import Setting, composed
from adabatch.policies import Curve
from adabatch.simulate import Exponential
from adabatch.simulate.run import Simulation

GROWTHS = (10, 100, 1000)
FOLLOWED = ["exact=true", "damping=off", "noise.decide_every=1", "limits.rounding=none"]
START = 64.0
LADDER = 2**0.5
NOISES = (30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
PRICES = (3, 30, 300, 3_000, 30_000)

Figures = dict[str, float]


def gamma(growth: float) -> float:
    """The product of the square-root allocation, (integral of sqrt(B_crit))^2 / (S_min E_min).

    Source: arXiv 1812.06162, appendix D, with B_crit = R ^ (s / S_min).
    """
    root = math.sqrt(growth)
    return 4 * (root - 1) / ((root + 1) * math.log(growth))


@functools.cache
def code() -> str:
    """What the figures depend on, as a digest."""
    package = ROOT / "adabatch"
    files = [package / f"{name}.py" for name in ("controller", "noise", "plan", "throughput", "verdicts")]
    files += [package / "simulate" / f"{name}.py" for name in ("cluster", "curves", "run", "windows")]
    files += (package / "policies").glob("*.py")
    texts = [path.read_text(encoding="utf-8") for path in sorted(files)]
    texts += map(inspect.getsource, (growing, fastest_of, judged))
    return hashlib.sha256("".join(map(essence, texts)).encode()).hexdigest()


def growing(growth: int, least_steps: int, target: float, *more: str, known: bool = False) -> Figures:
    """A run along which the critical batch grows by ``growth``, whose progress needs ``least_steps`` at least.

    ``known``: the true curve is what the policy forecasts.
    """
    over = least_steps * START * (growth - 1) / math.log(growth)
    overrides = [
        f"truth.growth={growth}",
        f"truth.start={START}",
        f"truth.over={round(over)}",
        f"stop.samples={round(over / target)}",
        f"policy.target_efficiency={target}",
        f"limits.max_batch={2**30}",
        *more,
    ]

    def compute() -> Figures:
        setting = Setting(composed(overrides))
        if known:
            law = Exponential(START, growth, over)
            clocks = tuple(over * 1e6 ** (index / 500 - 1) for index in range(511))
            curve = Curve(clocks, tuple(map(law.critical, clocks)))
            setting.policy = dataclasses.replace(setting.policy, curve=curve)
        outcome = setting.start().run()
        return {"steps": outcome.steps, "efficiency": outcome.efficiency, "product": outcome.product}

    return cached("simulation", [code(), overrides, known], compute)


def mean(runs: list[Figures]) -> Figures:
    return {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}


class Bench:
    """Rows and targets as they come."""

    def __init__(self, least_steps: int, seeds: int) -> None:
        self.least_steps, self.seeds = least_steps, seeds
        self.table = Table(["policy", "growth", "target", "how", "steps", "efficiency", "product", "theory"])
        self.targets: list[Target] = []

    def row(self, policy: str, growth: int, target: float, how: str, figures: Figures, theory: float) -> None:
        cells = [
            f"{figures['steps']:,.0f}",
            f"{figures['efficiency']:.4f}",
            f"{figures['product']:.4f}",
            f"{theory:.3f}",
        ]
        self.table.add(policy, growth, target, how, *cells)

    def by_default(self, growth: int, target: float, *more: str) -> tuple[Figures, Figures]:
        """With default damping: the noise scale known, and measured (mean over the seeds)."""
        known = growing(growth, self.least_steps, target, "exact=true", *more)
        seeds = [growing(growth, self.least_steps, target, f"seed={seed}", *more) for seed in range(self.seeds)]
        return known, mean(seeds)

    def proportional(self) -> None:
        products, efficiencies = [], []
        for growth in GROWTHS:
            followed = growing(growth, self.least_steps, 0.5, *FOLLOWED)
            products.append(followed["product"])
            self.row("proportional", growth, 0.5, "followed", followed, 1.0)
            for target in (0.5, 0.8):
                known, measured = self.by_default(growth, target)
                efficiencies.append((known["efficiency"], target))
                self.row("proportional", growth, target, "default, known", known, 1.0)
                self.row("proportional", growth, target, "default, measured", measured, 1.0)
        worst = max(products, key=lambda product: abs(product - 1))
        self.targets.append(
            Target("proportional, worst product", f"{worst:.4f}", "0.99 to 1.01", abs(worst - 1) <= 0.01)
        )
        self.delivered("default damping, known noise scale", efficiencies)

    def delivered(self, name: str, efficiencies: list[tuple[float, float]]) -> None:
        reached, target = max(efficiencies, key=lambda pair: abs(pair[0] - pair[1]))
        holds = abs(reached - target) <= 0.02
        self.targets.append(
            Target(f"{name}, worst delivered efficiency", f"{reached:.4f} of {target}", "± 0.02", holds)
        )

    def square_root(self) -> None:
        errors = []
        sqrt = ["policy.allocation=sqrt"]
        for growth in GROWTHS:
            followed = growing(growth, self.least_steps, 0.5, *FOLLOWED, *sqrt, "policy.cap=1e9", known=True)
            errors.append(followed["product"] - gamma(growth))
            self.row("sqrt", growth, 0.5, "followed, true curve, no cap", followed, gamma(growth))
            capped = growing(growth, self.least_steps, 0.5, *FOLLOWED, *sqrt, known=True)
            self.row("sqrt", growth, 0.5, "followed, true curve, cap 2", capped, gamma(growth))
            for target in (0.5, 0.8):
                known, measured = self.by_default(growth, target, *sqrt)
                self.row("sqrt", growth, target, "default, own forecast, known", known, gamma(growth))
                self.row("sqrt", growth, target, "default, own forecast, measured", measured, gamma(growth))
        worst = max(errors, key=abs)
        self.targets.append(Target("sqrt, worst product - gamma", f"{worst:+.4f}", "± 0.02", abs(worst) <= 0.02))


def fastest_of(noise: float, price: float, *, quick: bool, seed: int | None) -> Figures:
    """``policy=wall_clock`` where the critical batch stays at ``noise`` and a step costs ``price`` samples."""
    best = math.sqrt(noise * price)
    overrides = [
        "policy=wall_clock",
        f"truth.start={noise}",
        "truth.growth=1",
        f"stop.samples={round(max(best, 16.0) * (400 if quick else 1500))}",
        f"limits.max_batch={2**30}",
        "cluster.per_sample=1e-3",
        f"cluster.optimizer={price / 1000}",
        *(["exact=true"] if seed is None else [f"seed={seed}", "cluster.spread=0.05"]),
    ]

    def compute() -> Figures:
        run = Setting(composed(overrides)).start()
        run.run()
        return judged(run, noise, price)

    return cached("simulation", [code(), overrides], compute)


def judged(run: Simulation, noise: float, price: float) -> Figures:
    """The last batch of a run against the fastest on the ladder, by the time for a unit of progress."""

    def seconds(batch: float) -> float:
        return (1 + price / batch) * (1 + batch / noise)

    ladder = [LADDER**exponent for exponent in range(80)]
    fastest = min(ladder, key=seconds)
    batch = run.controller.batch
    return {
        "batch": batch,
        "fastest": fastest,
        "off": abs(math.log(batch / fastest) / math.log(LADDER)),
        "time": seconds(batch) / seconds(fastest),
    }


def wall_clock(quick: bool) -> tuple[Table, str, list[Target]]:
    """All pairs, with everything known and with everything measured."""
    table = Table(["noise scale", "price", "fastest", "known: batch", "time", "measured: batch", "time "])
    known, measured = [], []
    for noise in NOISES:
        for price in PRICES:
            known.append(fastest_of(noise, price, quick=quick, seed=None))
            measured.append(fastest_of(noise, price, quick=quick, seed=0))
            one, other = known[-1], measured[-1]
            cells = [f"{one['fastest']:,.0f}", f"{one['batch']:,}", f"{one['time']:.4f}"]
            table.add(f"{noise:,}", f"{price:,}", *cells, f"{other['batch']:,}", f"{other['time']:.4f}")
    off = max(run["off"] for run in known)
    targets = [Target(f"wall_clock, {len(known)} pairs known: most ladder steps off", f"{off:.2f}", "<= 1", off <= 1)]
    for name, runs in (("known", known), ("measured", measured)):
        slow = max(run["time"] for run in runs)
        of = f"wall_clock, {len(runs)} pairs {name}: longest time over brute force's"
        targets.append(Target(of, f"{slow:.4f}", "<= 1.02", slow <= 1.02))
    pairs = [(noise, price) for noise in NOISES for price in PRICES]
    far = [
        f"{noise:,} / {price:,} ({run['batch']:,} for {run['fastest']:,.0f})"
        for (noise, price), run in zip(pairs, measured, strict=True)
        if run["off"] > 1
    ]
    note = (
        f"Measured, {len(measured) - len(far)} of {len(measured)} end within one step of the ladder; the others, as "
        f"noise scale / price, end on {', '.join(far)}."
    )
    return table, note, targets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs and one seed")
    options = parser.parse_args()
    began = time.perf_counter()
    bench = Bench(*((1_000, 1) if options.quick else (4_000, 3)))
    bench.proportional()
    bench.square_root()
    pairs, note, targets = wall_clock(options.quick)
    targets = [*bench.targets, *targets]
    body = (
        f"Runs whose progress takes {bench.least_steps:,} steps at least; seeds 0 to {bench.seeds - 1}, whose means "
        f"are shown.\n\n{bench.table}\n\n"
        f"wall_clock, times as multiples of the fastest batch's on the ladder:\n\n{pairs}\n\n{note}\n\n"
        f"{verdict(targets)}"
    )
    if not options.quick:
        write_result("simulation", "Policies in simulation", body, " ".join(["python", *sys.argv]))
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    print(body)
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
