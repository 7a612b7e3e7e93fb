"""Is the noise scale right? Thousands of repeats of ``adabatch.noise`` on gradients whose G and Sigma are known.

Simulation. Windows of 4 groups are drawn as ``_accuracy_windows.py`` describes: equal groups, unequal groups, and
groups weighted by tokens. A run starts with 64 samples per window and a noise scale of 0.1 to 100 times that, and

- |G|^2 stays at 1, or falls like (1 + s / 1,024)^-1/2 over s samples of training, so that the noise scale grows like
  the square root of the samples: 1.4 times in the first 16 windows of 64 samples, 8 times in the first 1,024;
- B stays at 64, or it goes to the noise scale ("-> scale"): every 16 steps it becomes what the estimate says (the lower
  bound, if that is above the present batch, where the estimate is unresolved), within a factor of 2 of what it was, in
  multiples of 4. Or it goes to that share of the noise scale with which the run starts ("-> share"), so that the
  estimate stays as noisy as it was. Neither loop has any of the gates that a controller has. The targets of the second
  end at a tenth of the noise scale, which is a data efficiency of 0.91; what it does beyond is reported;
- every step is measured, or every 10th.

Each run is read three times. The truth is the ratio of the same weighted sums of the true S and G^2: over the windows
that were averaged, with the weights that they had. The width compares with an oracle that averages the same windows,
knows the variances, and uses the normal quantile. The lag is the current noise scale over that truth.

The mean of G^2 is that of a few thousand repeats whose standard deviation is up to several times the truth. What its
chance comes from is known: sums of the windows' errors over a fixed number of windows, with weights that were known
before, have mean 0. The part of the mean that regresses on them (control variates) is taken off; what is left is what
choosing windows and weights does.

Preconditioned. The same for the lengths in Adam's geometry, ``adam`` and ``adam_sqrt``, in which every window has a P
of its own, made from the windows before: ``_accuracy_preconditioned.py``. The truth is the ratio of the weighted sums
of the true S and G^2 in each window's P. The windows' numbers are compared with those of a real tap and torch's Adam on
real tensors: ``_accuracy_tensors.py``.

Taps. Each tap on real models against separate backward passes over the same groups: ``_taps.py``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import _accuracy_preconditioned as preconditioned
import _accuracy_runs as runs
import _accuracy_tensors as tensors
import _accuracy_windows as windows
import numpy as np
from _accuracy_preconditioned import VIEWS, streams
from _accuracy_runs import FIELDS, PIECE, RATIOS, SEED, TO_SHARE, Case, cases
from _accuracy_windows import KINDS
from _common import Table, Target, cached, essence, verdict, write_result

from adabatch import noise

QUICK, FULL = 200, 4000
# The share of the noise scale, as a factor, up to which the loop without gates is held to the targets.
JUDGED = 10.0
# Standard error up to which a mean without controls is held to its target: a fourth of the tolerance.
SHARP = 0.005
FIGURES = ["scale/B at first", "read at", "then", "averaged", "lag", "S", "G²", "S/G²", "±"]
FIGURES += ["covered %", "below %", "above %", "unresolved %", "width/oracle", "error²/variance"]


def piece(first: int) -> dict[str, Any]:
    """One cached piece of the simulation."""
    sources = [essence(Path(module.__file__).read_text()) for module in (noise, runs, windows)]
    return cached("accuracy", [first, *sources], partial(runs.repeats, first))


def preconditioned_piece(first: int) -> dict[str, Any]:
    """One cached piece of the preconditioned simulation."""
    sources = [essence(Path(module.__file__).read_text()) for module in (noise, runs, windows, preconditioned)]
    key = [first, *sources, *VIEWS, preconditioned.WARM_STEPS]
    return cached("accuracy", key, partial(preconditioned.repeats, first))


@dataclass(frozen=True)
class Cell:
    """The figures of one case and reading over all repeats; the fields' means are in ``mean``."""

    case: Case
    steps: int
    count: int
    mean: dict[str, float]
    signal: float  # mean G^2 over the true one, without what the controls explain
    signal_error: float  # standard error of that
    plain: float  # the same with everything
    plain_error: float
    width: float  # median of the width of the interval of 1/scale over the oracle's

    @property
    def noise(self) -> float:
        """Mean S over the true one."""
        return self.mean["noise"] / self.mean["true_noise"]

    @property
    def ratio(self) -> float:
        """Mean S over mean G^2, over the truth."""
        return self.noise / self.signal

    @property
    def error(self) -> float:
        """Standard error of the ratio."""
        spread = self.mean["noise_square"] / self.mean["noise"] ** 2 - 1.0
        return math.sqrt(max(spread, 0.0) / self.count + self.signal_error**2)

    @property
    def judged(self) -> bool:
        """Whether the targets hold here."""
        return self.case.batch != TO_SHARE or self.case.ratio <= JUDGED

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
        signal_error=math.sqrt(left / count) / mean["true_signal"],
        plain=1.0 + means[0] / mean["true_signal"],
        plain_error=math.sqrt(spread[0, 0] / count) / mean["true_signal"],
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
    beyond = max((cell for cell in cells if not cell.judged), key=lambda cell: abs(cell.ratio - 1.0))
    body = (
        f"{count:,} repeats per cell, seed {SEED}, {spent}. Beyond the targets, where the batch is kept at less than "
        f"1/{JUDGED:g} of the estimate without gates, the worst ratio of means is {beyond.ratio:.3f} ± "
        f"{beyond.error:.3f} (at 1/{beyond.case.ratio:g}, where {100 * beyond.mean['unresolved']:.0f} % of the estimates "
        f"are unresolved). The current noise scale is up to {max(cell.mean['lag'] for cell in cells):.2f} times the "
        f"averaged one where G drifts."
        f"\n\n{simulation_table(cells)}\n\n{variance_table(steps)}"
    )
    return body, simulation_targets(cells, steps)


def simulation_table(cells: Sequence[Cell]) -> Table:
    table = Table(["groups", "B", "G", "measured", *FIGURES])
    for cell in cells:
        case = cell.case
        table.add(*described(case), "every step" if case.every == 1 else f"every {case.every}th", *figures(cell))
    return table


def described(case: Case) -> tuple[str, str, str]:
    """Groups, batch and drift in words."""
    return case.kind, case.batch, "drifts" if case.drifting else "stays"


def figures(cell: Cell) -> list[object]:
    """The row's part under ``FIGURES``."""
    mean = cell.mean
    percent = [f"{100 * x:.1f}" for x in (cell.coverage, mean["below"], mean["above"], mean["unresolved"])]
    ratios = [f"{value:.4f}" for value in (cell.noise, cell.signal, cell.ratio, cell.error)]
    sizes = [f"{1.0 / mean['now']:.3g}", f"{mean['averaged']:.1f}", f"{mean['lag']:.2f}"]
    spreads = [f"{cell.width:.2f}", f"{mean['variance']:.2f}"]
    return [f"{cell.case.ratio:g}", cell.steps, *sizes, *ratios, *percent, *spreads]


def variance_table(steps: np.ndarray) -> str:
    """Mean squared error of one window's G^2 over the variance by two formulas."""
    table = Table(["groups", "scale/B", "error² of one window's G² / exact variance", "/ section 9's"])
    for i, kind in enumerate(KINDS):
        for j, ratio in enumerate(RATIOS):
            table.add(kind, f"{ratio:g}", *(f"{value:.3f}" for value in steps[i, j]))
    return str(table)


def simulation_targets(cells: Sequence[Cell], steps: np.ndarray) -> list[Target]:
    """Targets over all judged cells. Fewer repeats than the full mode's widen them by three standard errors."""
    judged = [cell for cell in cells if cell.judged]
    shared = [cell for cell in judged if cell.case.batch == TO_SHARE]
    targets = [
        ratio_target("ratio of means, B fixed or -> scale", [cell for cell in judged if cell not in shared]),
        ratio_target(f"ratio of means, B -> share down to 1/{JUDGED:g}", shared),
        *common_targets(judged),
    ]
    for k, name in enumerate(("the exact variance", "section 9's")):
        worst = float(steps[:, :, k].max())
        targets.append(Target(f"error² of one G² over {name}, worst cell", f"{worst:.3f}", "<= 1.05", worst <= 1.05))
    return targets


def common_targets(cells: Sequence[Cell], what: str = "") -> list[Target]:
    """Targets of intervals and variances over cells, whose names begin with ``what``."""
    width = max(cell.width for cell in cells)
    pooled = float(np.mean([cell.mean["variance"] for cell in cells]))
    return [
        coverage_target(f"{what}coverage, stationary", [c for c in cells if not c.case.drifting], 0.93, 0.97),
        coverage_target(f"{what}coverage, drifting", [c for c in cells if c.case.drifting], 0.93, 0.99),
        Target(f"{what}median width/oracle, worst cell", f"{width:.2f}", "<= 1.20", width <= 1.2),
        Target(f"{what}error² of the averaged G² over its variance", f"{pooled:.3f}", "<= 1.05", pooled <= 1.05),
    ]


def widening(cells: Sequence[Cell]) -> float:
    """Standard errors by which fewer repeats than the full mode's widen a target."""
    return 0.0 if cells[0].count >= FULL else 3.0


def ratio_target(name: str, cells: Sequence[Cell]) -> Target:
    """The worst ratio of means against 0.98 to 1.02."""
    errors = widening(cells)
    worst = max(cells, key=lambda cell: abs(cell.ratio - 1.0) - errors * cell.error)
    holds = abs(worst.ratio - 1.0) <= 0.02 + errors * worst.error
    return Target(f"{name}, worst cell", f"{worst.ratio:.4f} ± {worst.error:.4f}", "0.98 to 1.02", holds)


def coverage_target(name: str, cells: Sequence[Cell], low: float, high: float) -> Target:
    """The range of the coverage against a goal."""
    covered = [cell.coverage for cell in cells]
    slack = widening(cells) * math.sqrt(0.95 * 0.05 / cells[0].count)
    low, high = low - slack, min(high + slack, 1.0)
    figure = f"{100 * min(covered):.1f} to {100 * max(covered):.1f} %"
    goal = f"{100 * low:.1f} to {100 * high:.1f} %"
    return Target(name, figure, goal, low <= min(covered) and max(covered) <= high)


def preconditioned_simulation(count: int, jobs: int) -> tuple[str, list[Target]]:
    """The preconditioned table, as Markdown, with the agreement with real tensors, and each view's targets."""
    began = time.monotonic()
    difference, windows_compared = tensors.agreement()
    with ProcessPoolExecutor(jobs) as pool:
        pieces = list(pool.map(preconditioned_piece, range(0, count, PIECE)))
    cells = {
        view: [
            summarise(case, k, [part["readings"][i][k][v] for part in pieces])
            for i, case in enumerate(streams())
            for k in range(3)
        ]
        for v, view in enumerate(VIEWS)
    }
    cost = sum(part["seconds"] for part in pieces)
    body = (
        f"{count:,} repeats per cell, seed {SEED}, {cost:.0f} s of processor time, cached pieces included; "
        f"{time.monotonic() - began:.0f} s just now. In {windows_compared} windows the simulated numbers differ from "
        f"those of the hooks tap and torch's Adam on real tensors by {difference:.1e} of their size at most. G² is "
        f"without what the controls explain, and plain G² with it.\n\n"
        f"{preconditioned_table(cells)}"
    )
    agreed = Target("simulated P against real tensors", f"{difference:.1e}", "<= 1e-6", difference <= 1e-6)
    return body, [*preconditioned_targets(cells), agreed]


def preconditioned_table(cells: Mapping[str, Sequence[Cell]]) -> Table:
    table = Table(["view", "groups", "B", "G", "beta2", *FIGURES, "plain G²", "plain ±"])
    for view, rows in cells.items():
        for cell in rows:
            plain = f"{cell.plain:.4f}", f"{cell.plain_error:.4f}"
            table.add(view, *described(cell.case), f"{cell.case.beta2:g}", *figures(cell), *plain)
    return table


def preconditioned_targets(cells: Mapping[str, Sequence[Cell]]) -> list[Target]:
    """The targets of the Euclidean grid, for each view."""
    targets = []
    for view, rows in cells.items():
        targets += [ratio_target(f"{view}: ratio of means", rows), plain_target(f"{view}: plain G²", rows)]
        targets += common_targets(rows, f"{view}: ")
    return targets


def plain_target(name: str, cells: Sequence[Cell]) -> Target:
    """The worst mean of G^2 over the true one against 0.98 to 1.02, where its standard error is small against that."""
    errors, sharp = widening(cells), [cell for cell in cells if cell.plain_error <= SHARP]
    worst = max(sharp, key=lambda cell: abs(cell.plain - 1.0) - errors * cell.plain_error)
    holds = abs(worst.plain - 1.0) <= 0.02 + errors * worst.plain_error
    figure = f"{worst.plain:.4f} ± {worst.plain_error:.4f}"
    return Target(f"{name}, worst of {len(sharp)} of {len(cells)} cells", figure, "0.98 to 1.02", holds)


def taps() -> tuple[str, list[Target]]:
    """The taps on real models, on one to four ranks, against separate backward passes over the same groups."""
    table = Table(["tap", "model", "groups", "ranks", "task", "|mean gradient|²", "G²", "S"])
    worst = 0.0
    for ranks in (1, 2, 4):
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
            names = [found[name] for name in ("tap", "wrapping", "groups", "ranks", "task")]
            table.add(*names, *(f"{value:.1e}" for value in differences))
    body = f"Largest relative differences in single precision over four steps of training.\n\n{table}"
    return body, [Target("taps against a reference", f"{worst:.1e}", "<= 1e-6", worst <= 1e-6)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK} repeats instead of {FULL:,}: a minute and a quarter on 2 cores"
    )
    parser.add_argument("--jobs", type=int, help="processes (1; with --quick as many as there are cores, at most 2)")
    parser.add_argument("--write", action="store_true", help="write docs/results/accuracy.md with --quick, too")
    options = parser.parse_args()
    jobs = options.jobs or (min(2, os.cpu_count() or 1) if options.quick else 1)
    # Each section is a function that returns Markdown and its targets.
    count = QUICK if options.quick else FULL
    sections = {
        "Simulated repeats": partial(simulation, count, jobs),
        "Preconditioned, simulated repeats": partial(preconditioned_simulation, count, jobs),
        "Taps": taps,
    }
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
