"""How right, how steady and how dear are other libraries' noise scales? The same samples through each of them.

AdaptDL, fairscale's AdaScale, gns-pytorch, torch-gqc and BackPACK run in an environment of their own, which this
script makes in ``.cache/peers_env`` (torch for the CPU, about 1 GB), beside the passive tap of this repository. All
see the same windows of 64 samples at frozen weights, whose G and Sigma are known (``_peers_problems.py``), and each is
driven through its public interface (``_peers_arms.py``).

- Value: what a library says over the second half of a run, every tenth step, against the truth: the ratio of its mean
  S to its mean G^2 where it tells them apart, with its standard error over repeats, and the median of its scale.
- Spread: half of the range that holds the middle 68 % of what it says, relative to the truth.
- Cost: its step over the plain loop's with as many micro-batches, in rounds of alternating order, with a 95 % interval.
- Mean G^2 <= 0: two problems without a finite scale, the second with a G^2 below 0 in every window.
- Two ranks (gloo) under DistributedDataParallel and FSDP2.

    python scripts/bench/peers.py [--quick] [--write]
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from _common import Table, Target, verdict, write_result
from _peers_arms import KINDS
from _peers_jobs import FULL, INSTALLS, QUICK, Mode, Results, collect, collect_streams, environment, is_error
from _peers_problems import PROBLEMS, SEED, problem

LOW, HIGH = 0.98, 1.02
# Of the readings that claim an interval, so many may miss the truth: twice the nominal 2.5 % on this side.
MISSES = 0.05
BESIDE = ("adabatch-long", "adaptdl", "adascale", "gns-pytorch", "gns-pytorch-all", "torch-gqc", "backpack")


# -- figures


@dataclass(frozen=True)
class Figures:
    """What one arm says about one problem, over all repeats."""

    ratio: float | None  # mean S / mean G^2 over the true scale
    error: float
    median: float  # of the scale, in samples
    spread: float  # half of the middle 68 %, in samples
    lowest: float
    highest: float
    finite: float  # share of readings with a scale above 0 and below inf
    claimed: float | None  # share that gives an upper bound
    missed: float | None  # share that gives one and does not hold the truth
    words: str  # of the last reading


def summarise(repeats: list[list[dict[str, Any]]], truth: float) -> Figures:
    """Figures from the readings of each repeat; ``truth`` is the true scale in samples."""
    rows = [row for repeat in repeats for row in repeat]
    scales = sorted(row["scale"] for row in rows)
    low, high = (scales[round(share * (len(scales) - 1))] for share in (0.16, 0.84))
    ratio, error = None, math.nan
    if rows[0]["signal"] is not None:
        parts = [[statistics.fmean(row[key] for row in repeat) for key in ("noise", "signal")] for repeat in repeats]
        ratio, error = (value / truth for value in ratio_of_sums(parts))
    claimed = missed = None
    if rows[0]["low"] is not None:
        claims = [row for row in rows if row["high"] < math.inf]
        claimed = len(claims) / len(rows)
        missed = sum(not row["low"] <= truth <= row["high"] for row in claims) / len(rows)
    return Figures(
        ratio, error, statistics.median(scales), (high - low) / 2, scales[0], scales[-1],
        sum(0 < scale < math.inf for scale in scales) / len(scales), claimed, missed, rows[-1]["words"],
    )  # fmt: skip


def ratio_of_sums(parts: list[list[float]]) -> tuple[float, float]:
    """Ratio of the sums of two columns, and its standard error to first order from the rows' scatter about it."""
    top, bottom = (sum(column) for column in zip(*parts, strict=True))
    if bottom <= 0:
        return math.inf, math.nan
    squares = sum((noise - signal * top / bottom) ** 2 for noise, signal in parts)
    return top / bottom, math.sqrt(squares * len(parts) / (len(parts) - 1)) / bottom


def interval(rounds: list[dict[str, float]], arm: str) -> tuple[float, float]:
    """Geometric mean of ``arm`` over plain, and the half-width of its 95 % interval (12 rounds or more)."""
    logs = [math.log(times[arm] / times["plain"]) for times in rounds]
    ratio = math.exp(statistics.fmean(logs))
    return ratio, ratio * 2.2 * statistics.stdev(logs) / math.sqrt(len(logs))


# -- tables


def number(value: float) -> str:
    if math.isnan(value):  # both ends of a range are infinite
        return ""
    return "inf" if math.isinf(value) else f"{value:.3g}" if abs(value) < 1e4 else f"{value:.1e}"


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}"


def values_table(name: str, figures: dict[str, Figures]) -> str:
    """One problem with a finite truth."""
    truth = problem(name).truth()
    columns = ["library", "mean S / mean G²", "±", "median scale", "spread", "0 or inf %", "bounded %", "wrong %"]
    table = Table(columns)
    for arm, found in figures.items():
        ratio = ["", ""] if found.ratio is None else [f"{found.ratio:.3f}", f"{found.error:.3f}"]
        relative = [f"{found.median / truth.scale:.3g}", number(found.spread / truth.scale)]
        table.add(
            KINDS[arm].name, *ratio, *relative, share(1 - found.finite), share(found.claimed), share(found.missed)
        )
    return f"**{name}**: |G|² {truth.signal:.4g}, tr Σ {truth.noise:.5g}, scale {truth.scale:.5g} samples.\n\n{table}"


def endless_table(name: str, figures: dict[str, Figures]) -> str:
    """One problem without a finite truth: what is returned there, in samples."""
    table = Table(["library", "lowest scale", "median", "highest", "0 or inf %", "bounded %", "it also says"])
    for arm, found in figures.items():
        scales = map(number, (found.lowest, found.median, found.highest))
        table.add(KINDS[arm].name, *scales, share(1 - found.finite), share(found.claimed), found.words)
    return f"**{name}**, scales in samples.\n\n{table}"


def cost_table(costs: Results) -> Table:
    sizes = list(next(iter(costs.values())))
    table = Table(["library", "micro-batches", *(f"{size} {what}" for size in sizes for what in ("ratio", "±", "A/A"))])
    for arm, found in costs.items():
        cells = []
        for size in sizes:
            if is_error(found[size]):
                cells += [found[size]["error"], "", ""]
                continue
            ratio, width = interval(found[size], "arm")
            cells += [f"{ratio:.3f}", f"{width:.3f}", f"{interval(found[size], 'plain again')[0]:.3f}"]
        table.add(KINDS[arm].name, KINDS[arm].micro_batches, *cells)
    return table


def parallel_table(results: Results, truth: float) -> Table:
    wraps = list(next(iter(results.values())))
    table = Table(["library", *(f"under {'FSDP2' if wrap == 'fsdp2' else wrap.upper()}" for wrap in wraps)])
    for arm, found in results.items():
        table.add(KINDS[arm].name, *(outcome(found[wrap], truth) for wrap in wraps))
    return table


def outcome(found: Any, truth: float) -> str:
    """In words: the error, the constant, or the last reading relative to the truth."""
    if is_error(found):
        text = found["error"].replace("|", "/")
        return f"raises {text[:110]}{'...' if len(text) > 110 else ''}"
    scales = [row["scale"] for row in found]
    if len(set(scales)) == 1:
        return f"silent: scale {scales[0]:.3g} for ever"
    return f"{scales[-1] / truth:.3f} of the true scale"


# -- targets


def value_target(name: str, found: Figures, mode: Mode) -> Target:
    """Right where most readings are resolved, and not wrong where they are not."""
    assert found.claimed is not None and found.missed is not None
    if found.claimed > 0.5:
        assert found.ratio is not None
        slack = 3 * found.error if mode is QUICK else 0.0
        goal = f"{LOW}..{HIGH}{' within 3 standard errors' if slack else ''}"
        return Target(name, f"{found.ratio:.3f}", goal, LOW - slack <= found.ratio <= HIGH + slack)
    goal = f"<= {100 * MISSES:.0f} %"
    return Target(f"{name}: wrongly bounded", f"{100 * found.missed:.1f} %", goal, found.missed <= MISSES)


def parallel_target(wrap: str, found: Any, truth: float, mode: Mode) -> Target:
    if is_error(found):
        return Target(f"under {wrap}", outcome(found, truth), f"{LOW}..{HIGH}", False)
    last = found[-1]
    ratio = last["scale"] / truth
    if mode is QUICK:
        holds = last["low"] <= truth <= last["high"]
        return Target(f"under {wrap}", f"{ratio:.3f}", "the truth in its interval", holds)
    return Target(f"under {wrap}", f"{ratio:.3f}", f"{LOW}..{HIGH}", LOW <= ratio <= HIGH)


# -- the page


def measure(mode: Mode) -> tuple[str, list[Target]]:
    """Run everything; Markdown and targets."""
    streams = collect_streams(mode)
    costs = collect("cost", list(KINDS), list(mode.sizes), mode.seconds, mode=mode, seconds=300.0)
    parallel = collect("parallel", BESIDE, mode.wraps, mode.parallel_steps, mode=mode, seconds=400.0)
    parts, targets = [installed()], []
    for name in PROBLEMS:
        truth = problem(name).truth().scale
        broken = {arm: found[name] for arm, found in streams.items() if is_error(found[name])}
        figures = {arm: summarise(found[name], truth) for arm, found in streams.items() if arm not in broken}
        parts.append((values_table if truth < math.inf else endless_table)(name, figures))
        parts += [f"{KINDS[arm].name} {outcome(found, truth)}" for arm, found in broken.items()]
        if "adabatch" in broken:
            targets.append(Target(name, outcome(broken["adabatch"], truth), f"{LOW}..{HIGH}", False))
        else:
            targets.append(value_target(name, figures["adabatch"], mode))
    truth = problem("classification").truth().scale
    parts += ["## Time of a step over the plain loop's", str(cost_table(costs)), COST_NOTE]
    parts += [f"## Two ranks, classification, {mode.parallel_steps} steps", str(parallel_table(parallel, truth))]
    ours = parallel["adabatch-long"]
    return "\n\n".join(parts), targets + [parallel_target(wrap, ours[wrap], truth, mode) for wrap in mode.wraps]


def installed() -> str:
    lines = "\n".join(f"    pip install {shlex.join(packages)}" for packages in INSTALLS)
    return f"{INSTALL_NOTE}\n\n{lines}\n\n{VALUE_NOTE}"


INSTALL_NOTE = """\
## What ran

All five install on this torch without a patch, in this order, with torch held where it is:"""

VALUE_NOTE = """\
AdaptDL asks for `pkg_resources` and `requests` without saying so, and BackPACK for torchvision without using it.

- AdaptDL: its class `GradientNoiseScale` on DistributedDataParallel of one rank, since its own loader chooses the
  accumulation itself; with one micro-batch it compares successive steps.
- gns-pytorch: every tenth step, smoothed as in its README (0.9 of the old); with its defaults (a quarter of the batch,
  at most 10 parameter tensors) and with everything, the latter in a quarter of the repeats.
- torch-gqc: its scale is in draws and has been multiplied by the samples of one. It is read after seven of eight.
- BackPACK gives per-example norms and no noise scale; the formula and plain averages over the run are ours.
- adabatch averages over no more steps than a relative error of 25 % of G² needs; with 1 % it uses half of the run, about
  what AdaptDL's and fairscale's moving averages span. It has four times the repeats at a scale of 10 B.

## Value and spread, relative to the truth

"0 or inf": readings that are 0, negative or infinite; "bounded": readings with an upper bound; "wrong": bounded ones
that do not hold the truth. Half of the repeats at a scale of 320 B and at the optimum, two of the opposed pairs."""

COST_NOTE = """\
One thread; each library against the plain loop with as many micro-batches as its own. gns-pytorch works in every tenth
step here and in every hundredth in its README, which costs a tenth of the excess. adabatch measures and updates its
estimate in every step."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute once the environment exists")
    parser.add_argument("--write", action="store_true", help="write docs/results/peers.md with --quick, too")
    options = parser.parse_args()
    mode = QUICK if options.quick else FULL
    torch.set_num_threads(1)
    environment()
    begun = time.monotonic()
    body, targets = measure(mode)
    seconds = time.monotonic() - begun
    body += f"\n\n{mode.repeats} repeats of {mode.steps} steps; seed {SEED}; {seconds:.0f} s just now."
    print(f"\n{body}\n")
    if options.write or not options.quick:
        command = shlex.join(["python", "scripts/bench/peers.py", *sys.argv[1:]])
        write_result("peers", "Other libraries' noise scales", f"{body}\n\n{verdict(targets)}", command)
    print(verdict(targets))
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
