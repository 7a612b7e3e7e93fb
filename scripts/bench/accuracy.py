"""Is the noise scale right? Thousands of repeats of ``adabatch.noise`` on gradients whose G and Sigma are known.

Simulation. Windows of 4 groups are drawn as ``_windows.py`` describes: equal groups, unequal groups, and groups weighted
by tokens. A run starts with 64 samples per window and a noise scale of 0.1 to 100 times that, and

- |G|^2 stays at 1, or falls like (1 + s / 1,024)^-1/2 over s samples of training, so that the noise scale grows like the
  square root of the samples: by 16 % in the first 16 windows, 8 times in 1,024 windows of 64 samples;
- B stays at 64, or it goes to the noise scale ("-> scale"): 16 steps after the last decision it becomes what the
  estimate says (the lower bound where that supports more and nothing else is resolved), within a factor of 2 of what it
  was, in multiples of 4. Or it goes to that share of the noise scale with which the run starts ("-> share"), so that the
  estimate stays as noisy as it was: a loop without any of the gates that a controller has;
- every step is measured, or every 10th.

Each run is read three times. The truth is the ratio of the same weighted sums of the true S and G^2: over the windows
that were averaged, with the weights that they had. The width compares with an oracle that averages the same windows,
knows the variances, and uses the normal quantile. The lag is the current noise scale over that truth.

The mean of G^2 is that of a few thousand repeats whose standard deviation is up to several times the truth. What its
chance comes from is known: sums of the windows' errors over a fixed number of windows, with weights that were known
before, have mean 0. The part of the mean that regresses on them (control variates) is taken off; what is left is what
choosing windows and weights does.

All cases of a repeat share one pool of 1,024 drawn windows of each kind, each starting elsewhere in it; repeats share
nothing.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import _windows
import numpy as np
from _common import Table, Target, cached, essence, verdict, write_result
from _windows import GROUPS, KINDS, SAMPLES, Windows

from adabatch import noise

SEED = 20240607
RATIOS = (0.1, 1.0, 3.0, 10.0, 30.0, 100.0)
FIXED, TO_SCALE, TO_SHARE = "fixed", "-> scale", "-> share"
POOL = 1024
PIECE = 100  # repeats that are simulated and cached together
FULL = 4000
DECIDE_EVERY = 16
# What is known of each reading; the mean over the repeats is taken of all.
FIELDS = ("noise", "true_noise", "signal", "true_signal", "below", "above", "unresolved", "averaged", "now", "lag")
FIELDS = (*FIELDS, "variance", "formula")


@dataclass(frozen=True)
class Case:
    """One kind of run: groups, noise scale over the first batch, drift, what the batch does, and measured steps."""

    kind: str
    ratio: float
    drifting: bool
    batch: str
    every: int = 1

    @property
    def readings(self) -> tuple[int, int, int]:
        """Measured windows after which the run is read; it ends with the last."""
        if self.batch == FIXED:
            return 16, 64, {30.0: 1024, 100.0: 512}.get(self.ratio, 128) if self.every == 1 else 128
        return 48, 112, 512 if self.batch == TO_SHARE and self.ratio >= 30.0 else 192

    def signal(self, position: int) -> float:
        """The true |G|^2 after ``position`` samples of training."""
        return (1.0 + position / (16 * SAMPLES)) ** -0.5 if self.drifting else 1.0


def cases() -> list[Case]:
    """All cases: the full grid, and a few more for the loop at a share and for steps that are not measured."""
    grid = itertools.product(KINDS, RATIOS, (False, True), (FIXED, TO_SCALE))
    shares = itertools.product(("equal",), (3.0, 10.0, 30.0, 100.0), (False, True), (TO_SHARE,))
    rare = itertools.product(("equal",), (1.0, 30.0), (False, True), (FIXED, TO_SCALE), (10,))
    return [Case(*values) for values in (*grid, *shares, *rare)]


@dataclass
class Run:
    """What happened so far: per measured window its batch, weight, true G^2 and the error of its G^2."""

    batch: list[int]
    weight: list[float]
    signal: list[float]
    error: list[float]


def simulate(case: Case, windows: Windows, first: int) -> list[tuple[list[float], float, list[float]]]:
    """One run on the windows from ``first`` on: its three readings."""
    estimator = noise.NoiseEstimator()
    state, run, found = estimator.init(), Run([], [], [], []), []
    batch, position, waited, sample_noise = SAMPLES, 0, 0, case.ratio * SAMPLES
    for count, numbers in enumerate(_windows.numbers(windows, first, case.readings[-1]), start=1):
        position += batch * (case.every if count > 1 else 1)
        signal = case.signal(position)
        measurement = measure(batch, signal, sample_noise / batch, *numbers)
        state = estimator.update(state, measurement, position)
        run.batch.append(batch)
        run.weight.append(state["last"][1])
        run.signal.append(signal)
        run.error.append(measurement.signal - signal)
        if count in case.readings:
            found.append(reading(run, estimator.value(state), windows, first, sample_noise))
        waited += case.every
        if case.batch != FIXED and waited >= DECIDE_EVERY:
            share = case.ratio if case.batch == TO_SHARE else 1.0
            batch, waited = decide(batch, estimator.value(state), share), 0
    return found


def measure(
    batch: int, signal: float, noise_share: float, along: float, across: float, own_along: float, own: float, square: float
) -> noise.Measurement:
    """The measurement of a drawn window for |G|^2 = ``signal`` and S / N = ``noise_share``."""
    mixed = 2.0 * math.sqrt(signal * noise_share)
    mean_square = signal + mixed * along + noise_share * across
    group_square = signal * square + mixed * own_along + noise_share * own
    return noise.Measurement(batch, GROUPS, mean_square, group_square, square, batch, 0.0)


def decide(batch: int, estimate: noise.Estimate, share: float) -> int:
    """The next batch: the noise scale over ``share``, within a factor of 2 of the present batch."""
    wanted = estimate.scale / share if estimate.resolved else max(estimate.low / share, batch)
    return max(4, 4 * round(min(max(wanted, batch / 2), batch * 2) / 4))


def reading(
    run: Run, estimate: noise.Estimate, windows: Windows, first: int, sample_noise: float
) -> tuple[list[float], float, list[float]]:
    """All ``FIELDS`` of a reading, the width of its interval over the oracle's, and its error with the controls."""
    count = len(run.batch)
    chosen = slice(count - estimate.steps, count)
    batch, signal = np.array(run.batch[chosen]), np.array(run.signal[chosen])
    weight = np.array(run.weight[chosen]) / sum(run.weight[chosen])
    order = np.arange(first + chosen.start, first + chosen.stop) % POOL
    terms = np.stack([signal * sample_noise / batch, (sample_noise / batch) ** 2])
    spread = windows.spread[order]
    variance = (weight**2 * (spread[:, 0] * terms.T).sum(1)).sum()
    noise_variance = (weight**2 * batch**2 * ((spread[:, 1] * terms.T).sum(1) + windows.extra * terms[1])).sum()
    both = (weight**2 * batch * (spread[:, 2] * terms.T).sum(1)).sum()
    formula = (weight**2 * (windows.formula[order] * terms.T).sum(1)).sum()
    true_signal = float(weight @ signal)
    truth, error = sample_noise / true_signal, estimate.signal - true_signal
    values = dict(
        noise=estimate.noise,
        true_noise=sample_noise,
        signal=estimate.signal,
        true_signal=true_signal,
        below=estimate.high < truth,
        above=estimate.low > truth,
        unresolved=not estimate.resolved,
        averaged=estimate.steps,
        now=run.batch[-1] * run.signal[-1] / sample_noise,
        lag=true_signal / run.signal[-1],
        variance=error**2 / variance,
        formula=error**2 / formula,
    )
    oracle = oracle_width(estimate.signal, estimate.noise, variance, noise_variance, both)
    width = 1.0 / max(estimate.low, 1e-300) - 1.0 / estimate.high
    return [float(values[name]) for name in FIELDS], width / oracle, [error, *controls(run)]


def oracle_width(signal: float, sample_noise: float, variance: float, noise_variance: float, both: float) -> float:
    """Width of Fieller's interval of 1/scale, cut at 0, for somebody who knows the variances."""
    z2 = 1.959964**2
    leading = sample_noise**2 - z2 * noise_variance
    cross = sample_noise * signal - z2 * both
    root = math.sqrt(max(cross**2 - leading * (signal**2 - z2 * variance), 0.0))
    return (cross + root) / leading - max((cross - root) / leading, 0.0)


def controls(run: Run) -> list[float]:
    """Sums of the errors of the last 16, 32, ... windows, and of as many as a memory can hold, by their weights.

    A weight is known before the window's error, and so is the first weight, by which they are divided: all have mean 0.
    """
    count = len(run.batch)
    spans = [16 * 2**i for i in range(7) if 16 * 2**i < count]
    values = []
    for span in (*spans, longest(count)):
        weight, error = np.array(run.weight[-span:]), np.array(run.error[-span:])
        values.append(float(weight @ error) / weight[0] / span)
    return values


@lru_cache(maxsize=None)
def longest(count: int) -> int:
    """Windows that are averaged after ``count`` equal ones when no memory is too long."""
    estimator = noise.NoiseEstimator()
    state = estimator.init()
    for _ in range(count):
        state = estimator.update(state, noise.Measurement(1, 2, 0.0, 1.0, 0.5, 1.0, 0.0))
    return estimator.value(state).steps


def repeats(first: int) -> dict[str, Any]:
    """Repeats ``first`` to ``first + PIECE`` of all cases: sums over the repeats, the widths, and one window's moments."""
    began = time.process_time()
    found: list[list[Any]] = [[] for _ in cases()]
    steps = []
    for repeat in range(first, first + PIECE):
        pool = _windows.draw(np.random.Generator(np.random.SFC64([SEED, repeat])), POOL)
        steps.append([[window_variance(pool[kind], ratio) for ratio in RATIOS] for kind in KINDS])
        for i, case in enumerate(cases()):
            found[i].append(simulate(case, pool[case.kind], 37 * i % POOL))
    readings = [[summed([run[k] for run in runs]) for k in range(3)] for runs in found]
    return {"readings": readings, "steps": np.mean(steps, 0).tolist(), "seconds": time.process_time() - began}


def window_variance(windows: Windows, ratio: float) -> tuple[float, float]:
    """The squared error of one window's G^2 at |G|^2 = 1 and S / N = ``ratio``, over the exact and section 9's variance."""
    mixed = 2.0 * math.sqrt(ratio) * (windows.mean[:, 0] - windows.group[:, 0])
    error = (mixed + ratio * (windows.mean[:, 1] - windows.group[:, 1])) / (1.0 - windows.weight_square)
    powers = np.array([ratio, ratio**2])
    exact, formula = (windows.spread[:, 0] @ powers).mean(), (windows.formula @ powers).mean()
    return float((error**2).mean() / exact), float((error**2).mean() / formula)


def summed(rows: Sequence[tuple[list[float], float, list[float]]]) -> dict[str, Any]:
    """Sums over repeats of the fields, products of (1, error, controls), and all widths."""
    errors = np.array([[1.0, *error] for _, _, error in rows])
    return {
        "fields": np.sum([fields for fields, _, _ in rows], axis=0).tolist(),
        "products": (errors.T @ errors).tolist(),
        "widths": [round(width, 3) for _, width, _ in rows],
    }


def piece(first: int) -> dict[str, Any]:
    """One cached piece of the simulation."""
    parts = (Case, cases, simulate, measure, decide, reading, oracle_width, controls, longest, repeats, window_variance)
    sources = [Path(module.__file__).read_text() for module in (noise, _windows)]
    sources += [inspect.getsource(part) for part in (*parts, summed)]
    return cached("accuracy", [first, PIECE, SEED, RATIOS, POOL, DECIDE_EVERY, *map(essence, sources)], partial(repeats, first))


@dataclass(frozen=True)
class Cell:
    """The figures of one case and reading over all repeats; the fields' means are in ``mean``."""

    case: Case
    steps: int
    count: int
    mean: dict[str, float]
    signal: float  # mean G^2 over the true one, without what the controls explain
    error: float  # standard error of that
    width: float  # median of the width of the interval of 1/scale over the oracle's

    @property
    def ratio(self) -> float:
        """Mean S over mean G^2, over the truth."""
        return self.mean["noise"] / self.mean["true_noise"] / self.signal

    @property
    def coverage(self) -> float:
        return 1.0 - self.mean["below"] - self.mean["above"]


def summarise(case: Case, index: int, parts: Sequence[dict[str, Any]]) -> Cell:
    """The cell of the reading ``index`` from its pieces."""
    products = np.sum([part["products"] for part in parts], axis=0)
    count = products[0, 0]
    mean = dict(zip(FIELDS, np.sum([part["fields"] for part in parts], axis=0) / count, strict=True))
    means = products[0, 1:] / count
    spread = products[1:, 1:] / count - np.outer(means, means)
    slopes = np.linalg.pinv(spread[1:, 1:], rcond=1e-10, hermitian=True) @ spread[1:, 0]
    left = max(spread[0, 0] - slopes @ spread[1:, 0], 0.0)
    return Cell(
        case=case,
        steps=case.readings[index],
        count=int(count),
        mean=mean,
        signal=1.0 + (means[0] - slopes @ means[1:]) / mean["true_signal"],
        error=math.sqrt(left / count) / mean["true_signal"],
        width=float(np.median(np.concatenate([part["widths"] for part in parts]))),
    )


def simulation(count: int, jobs: int) -> tuple[str, list[Target]]:
    """The simulated tables, as Markdown, and their targets."""
    began = time.monotonic()
    firsts = range(0, count, PIECE)
    with ProcessPoolExecutor(jobs) as pool:
        pieces = list(pool.map(piece, firsts))
    cells = [
        summarise(case, k, [part["readings"][i][k] for part in pieces])
        for i, case in enumerate(cases())
        for k in range(3)
    ]
    steps = np.mean([part["steps"] for part in pieces], axis=0)
    cost = sum(part["seconds"] for part in pieces)
    spent = f"{cost:.0f} s of processor time, cached pieces included; {time.monotonic() - began:.0f} s just now"
    body = f"{count:,} repeats per cell, seed {SEED}, {spent}.\n\n{simulation_table(cells)}\n\n{variance_table(steps)}"
    return body, simulation_targets(cells, steps)


def simulation_table(cells: Sequence[Cell]) -> Table:
    table = Table(
        ["groups", "B", "G", "measured", "scale/B at first", "read at", "then", "averaged", "lag", "S", "G²", "±"]
        + ["S/G²", "covered %", "below %", "above %", "unresolved %", "width/oracle", "error²/variance"]
    )
    for cell in cells:
        case, mean = cell.case, cell.mean
        percent = [f"{100 * x:.1f}" for x in (cell.coverage, mean["below"], mean["above"], mean["unresolved"])]
        ratios = [f"{mean['noise'] / mean['true_noise']:.4f}", f"{cell.signal:.4f}", f"{cell.error:.4f}"]
        table.add(
            *(case.kind, case.batch, "drifts" if case.drifting else "stays"),
            *("every step" if case.every == 1 else f"every {case.every}th", f"{case.ratio:g}", cell.steps),
            *(f"{1.0 / mean['now']:.3g}", f"{mean['averaged']:.1f}", f"{mean['lag']:.2f}", *ratios, f"{cell.ratio:.4f}"),
            *(*percent, f"{cell.width:.2f}", f"{mean['variance']:.2f}"),
        )
    return table


def variance_table(steps: np.ndarray) -> str:
    """Mean squared error of one window's G^2 over the variance by two formulas."""
    table = Table(["groups", "scale/B", "error² of one window's G² / exact variance", "/ section 9's"])
    for i, kind in enumerate(KINDS):
        for j, ratio in enumerate(RATIOS):
            table.add(kind, f"{ratio:g}", *(f"{value:.3f}" for value in steps[i, j]))
    return str(table)


def simulation_targets(cells: Sequence[Cell], steps: np.ndarray) -> list[Target]:
    """Targets over all cells. Fewer repeats than the full mode's widen them by three standard errors."""
    full = cells[0].count >= FULL
    judged = [cell for cell in cells if cell.case.batch != TO_SHARE or cell.case.ratio <= 10.0]
    noises = max((cell.mean["noise"] / cell.mean["true_noise"] for cell in cells), key=lambda value: abs(value - 1.0))
    targets = [Target("S/true, worst cell", f"{noises:.4f}", "within 1 %", abs(noises - 1.0) <= 0.01)]
    for name, chosen in (
        ("B fixed or -> scale", [cell for cell in judged if cell.case.batch != TO_SHARE]),
        ("B -> share up to 10", [cell for cell in judged if cell.case.batch == TO_SHARE]),
    ):
        targets.append(ratio_target(f"ratio of means, {name}", chosen, 0.0 if full else 3.0))
    for name, drifting, low, high in (("stationary", False, 0.93, 0.97), ("drifting", True, 0.93, 0.99)):
        covered = [cell.coverage for cell in judged if cell.case.drifting == drifting]
        slack = 0.0 if full else 3.0 * math.sqrt(0.95 * 0.05 / cells[0].count)
        low, high = low - slack, min(high + slack, 1.0)
        figure = f"{100 * min(covered):.1f} to {100 * max(covered):.1f} %"
        goal = f"{100 * low:.1f} to {100 * high:.1f} %"
        targets.append(Target(f"coverage, {name}", figure, goal, low <= min(covered) and max(covered) <= high))
    width = max(cell.width for cell in judged)
    targets.append(Target("median width/oracle, worst cell", f"{width:.2f}", "<= 1.20", width <= 1.2))
    pooled = float(np.mean([cell.mean["variance"] for cell in judged]))
    targets.append(Target("squared error of the averaged G² over its variance", f"{pooled:.3f}", "<= 1.05", pooled <= 1.05))
    for k, name in enumerate(("exact formula", "theory.md section 9")):
        worst = float(steps[:, :, k].max())
        targets.append(Target(f"variance of one G² over the {name}, worst", f"{worst:.3f}", "<= 1.05", worst <= 1.05))
    return targets


def ratio_target(name: str, cells: Sequence[Cell], errors: float) -> Target:
    """The worst ratio of means against 0.98 to 1.02, widened by ``errors`` standard errors."""
    worst = max(cells, key=lambda cell: abs(cell.ratio - 1.0) - errors * cell.error)
    holds = abs(worst.ratio - 1.0) <= 0.02 + errors * worst.error
    return Target(f"{name}, worst cell", f"{worst.ratio:.4f} ± {worst.error:.4f}", "0.98 to 1.02", holds)


def taps() -> tuple[str, list[Target]]:
    """The taps on real models, on one rank and on two, against separate backward passes over the same groups."""
    table = Table(["tap", "ranks", "task", "|mean gradient|²", "G²", "S"])
    worst = 0.0
    for ranks in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command.append(str(Path(__file__).with_name("_taps.py")))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-3000:]}")
        for line in done.stdout.splitlines():
            found = json.loads(line)
            differences = [found[name] for name in ("mean_square", "signal", "noise")]
            worst = max(worst, *differences)
            table.add(found["tap"], found["ranks"], found["task"], *(f"{value:.1e}" for value in differences))
    body = f"Largest relative differences in single precision over four steps of training.\n\n{table}"
    return body, [Target("taps against a reference", f"{worst:.1e}", "<= 1e-6", worst <= 1e-6)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="300 repeats instead of 4,000: about a minute on 2 cores")
    parser.add_argument("--jobs", type=int, help="processes (1; with --quick as many as there are cores, at most 2)")
    parser.add_argument("--write", action="store_true", help="write docs/results/accuracy.md with --quick, too")
    options = parser.parse_args()
    jobs = options.jobs or (min(2, os.cpu_count() or 1) if options.quick else 1)
    # Each section is a function that returns Markdown and its targets.
    sections = {"Simulated repeats": partial(simulation, 300 if options.quick else FULL, jobs), "Taps": taps}
    bodies, targets = [], []
    for heading, section in sections.items():
        body, found = section()
        bodies.append(f"## {heading}\n\n{body}")
        targets += found
        print(bodies[-1], end="\n\n", flush=True)
    if options.write or not options.quick:
        command = shlex.join(["python", "scripts/bench/accuracy.py", *sys.argv[1:]])
        write_result("accuracy", "Accuracy of the noise scale", "\n\n".join([*bodies, verdict(targets)]), command)
    print(verdict(targets))
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
