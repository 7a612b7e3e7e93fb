"""Is the noise scale of sign methods and of Muon right? ``adabatch.alignment`` on gradients whose a(m) is known.

Simulation. A window has 64 samples in 16 groups, whose mean gradients are G plus noise really drawn. Sets of 1, 2, 4 and
8 groups are mapped and multiplied with the mean of the rest, and the rest of each quarter with the quarter, as
``adabatch.gradients.alignment`` does in one process. The gradients:

- sign, 1,000 coordinates, with noise of variances j^-0.6: ``equal`` ratios of signal to noise in all coordinates;
  ``gaussian`` ratios; ``lognormal`` squared ratios, with a standard deviation of 1.5;
- Muon's map (five Newton-Schulz steps with torch's coefficients, here in single precision), 16 x 24 matrices:
  ``gaussian`` entries under isotropic noise; ``steep``, singular values j^-0.5 under noise that falls as i^-0.3 over the
  rows.

The truth. The scale is the batch of half data efficiency (``adabatch.alignment``). For the sign a(m) is known in closed
form, sum |G_i| erf(|G_i| sqrt(m/2) / sigma_i). For Muon it is the mean over 8,000 noise matrices, each used with both
signs. G is scaled so that the true scale is 1 to 100 times the window.

A repeat is a run of 4,096 windows that are all remembered, read after 256 windows and at its end. The noise of a repeat
is the same for all true scales. For the table of a(m), every second window is used with both signs of its
noise and less the a(m) of the noise alone: an expectation of 0, which takes most of the variance away and changes
nothing else. The estimator sees the windows as they are.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import Table, Target, cached, essence, verdict, write_result
from torch import Tensor, nn

from adabatch import alignment
from adabatch.gradients.alignment import AlignmentTap

SEED = 20240611
CASES = (("sign", "equal"), ("sign", "gaussian"), ("sign", "lognormal"), ("muon", "gaussian"), ("muon", "steep"))
# The spectrum that lies outside of what the fitted curve is made for.
STRESS = ("sign", "lognormal")
RATIOS = (1.0, 3.0, 10.0, 30.0, 100.0)
SAMPLES, GROUPS, CHUNK = 64, 16, 16
PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # m over the window
DIMENSION, MATRIX = 1000, (16, 24)
TRUTH_DRAWS = 8_000
PIECE = 2  # repeats that are simulated and cached together
FULL, QUICK = 4096, 512
FIELDS = ("scale", "low", "high", "resolved")

Map = Callable[[Tensor], Tensor]


def newton_schulz(gradients: Tensor) -> Tensor:
    """Muon's map of (..., rows, columns), rows <= columns, with the coefficients of torch.optim.Muon."""
    mapped = gradients / torch.linalg.matrix_norm(gradients, keepdim=True)
    for _ in range(5):
        gram = mapped @ mapped.mT
        mapped = 3.4445 * mapped + (2.0315 * gram @ gram - 4.7750 * gram) @ mapped
    return mapped


def update_map(geometry: str) -> Map:
    return torch.sign if geometry == "sign" else newton_schulz


def problem(geometry: str, spectrum: str) -> tuple[Tensor, Tensor]:
    """Signal G of any size and the standard deviations of one sample's noise, of one shape, in double precision."""
    rng = np.random.default_rng(SEED)
    if geometry == "muon":
        draw = torch.from_numpy(rng.standard_normal(MATRIX))
        if spectrum == "gaussian":
            return draw, torch.ones(MATRIX, dtype=torch.float64)
        left, _, right = torch.linalg.svd(draw, full_matrices=False)
        fall = torch.arange(1, MATRIX[0] + 1, dtype=torch.float64)
        return left @ torch.diag(fall**-0.5) @ right, (fall**-0.3)[:, None].expand(MATRIX)
    deviation = torch.arange(1, DIMENSION + 1, dtype=torch.float64) ** -0.3
    places = torch.from_numpy(rng.permutation(DIMENSION)).double()
    normal = math.sqrt(2.0) * torch.erfinv(2.0 * (places + 0.5) / DIMENSION - 1.0)
    ratios = {"equal": torch.ones_like(normal), "gaussian": normal, "lognormal": torch.exp(0.75 * normal)}[spectrum]
    return deviation * ratios, deviation


def aligned(left: Tensor, right: Tensor) -> Tensor:
    """Inner products over the last dimensions that a gradient has, summed over sets too: (windows, ...) -> (windows,)."""
    return (left * right).flatten(1).sum(1)


def curves(groups: Tensor, mapping: Map) -> Tensor:
    """a(m) of windows of equal groups, (windows, groups, ...) -> (windows, sizes), in the order of ``PARTS``."""
    total, sets, part = groups.mean(1), groups / GROUPS, 1.0 / GROUPS
    found = []
    while sets.shape[1] > 1:
        mapped = mapping(sets)
        found.append((aligned(mapped.sum(1), total) - aligned(mapped, sets)) / (sets.shape[1] * (1.0 - part)))
        if sets.shape[1] == 4:
            rest = aligned(mapping(total[:, None] - sets), sets)
        sets, part = sets[:, 0::2] + sets[:, 1::2], 2.0 * part
    return torch.stack([*found, rest], 1)


def response(geometry: str, signal: Tensor, deviation: Tensor, strength: float) -> float:
    """E<u(Z + strength * G), G> for noise Z of one sample: a(m) at ``strength`` = sqrt(m)."""
    if geometry == "sign":
        size = signal.abs()
        return float((size * torch.erf(strength * size / deviation / math.sqrt(2.0))).sum())
    generator = torch.Generator().manual_seed(SEED)
    total, small = 0.0, signal.float()
    for _ in range(TRUTH_DRAWS // 500):
        noise = torch.randn(500, *MATRIX, generator=generator) * deviation.float()
        odd = newton_schulz(noise + strength * small) - newton_schulz(noise - strength * small)
        total += float((odd * small).sum(dtype=torch.float64)) / 2.0
    return total / (TRUTH_DRAWS // 500 * 500)


def truth(geometry: str, spectrum: str) -> dict[str, Any]:
    """The true scale of ``problem``, and a(m) for the windows of every ratio, (ratios, sizes), for |G| as it is there."""
    began = time.process_time()
    of = partial(response, geometry, *problem(geometry, spectrum))
    scale = unit_scale(of, 1e-3 if geometry == "sign" else 0.02)
    alignments = [[of(math.sqrt(scale * part / ratio)) for part in PARTS] for ratio in RATIOS]
    return {"scale": scale, "alignments": alignments, "seconds": time.process_time() - began}


def unit_scale(of: Callable[[float], float], tiny: float) -> float:
    """The m at which (a(m)/sqrt(m))^2 is half of what it is at sqrt(m) = ``tiny``, by bisection."""
    wanted = math.sqrt(0.5) * of(tiny) / tiny
    low, high = tiny, tiny
    while of(high) / high > wanted:
        low, high = high, 4.0 * high
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if of(middle) / middle > wanted else (low, middle)
    return low * high


def simulate(case: tuple[str, str], scale: float, first: int, repeats: int, windows: int) -> dict[str, Any]:
    """Repeats of one case: per ratio the readings, and sums over batches of windows of their mean a(m)."""
    torch.set_num_threads(1)
    began = time.process_time()
    mapping = update_map(case[0])
    signal, deviation = (values.float() for values in problem(*case))
    signals = [signal * math.sqrt(scale / (ratio * SAMPLES)) for ratio in RATIOS]
    deviation = deviation / math.sqrt(SAMPLES / GROUPS)
    read: list[list[Any]] = [[] for _ in RATIOS]
    means, squares = (torch.zeros(len(RATIOS), len(PARTS), dtype=torch.float64) for _ in range(2))
    count = 0
    for repeat in range(first, first + repeats):
        generator = torch.Generator().manual_seed(SEED + 1000 * CASES.index(case) + repeat)
        rows, held = [], []
        for chunk in range(windows // CHUNK):
            noise = torch.randn(CHUNK, GROUPS, *signal.shape, generator=generator) * deviation
            rows.append(torch.stack([curves(noise + mean, mapping) for mean in signals]).double())
            if chunk % 2 == 0:
                mirrored = torch.stack([curves(mean - noise, mapping) for mean in signals]).double()
                held.append(0.5 * (rows[-1] + mirrored) - curves(noise, mapping).double())
        seen, batches = torch.cat(rows, 1), torch.stack([one.mean(1) for one in held])
        means, squares = means + batches.sum(0), squares + batches.square().sum(0)
        count += len(batches)
        for i in range(len(RATIOS)):
            read[i].append(readings(seen[i].tolist()))
    sums = {"means": means.tolist(), "squares": squares.tolist(), "batches": count}
    return {"readings": read, **sums, "seconds": time.process_time() - began}


def readings(windows: list[list[float]]) -> list[list[float]]:
    """Feed the windows to the estimator and read it twice: FIELDS each."""
    estimator = alignment.AlignmentEstimator(memory=SAMPLES * len(windows))
    # As if as many windows had gone by unmeasured: the estimator does not look back over the first half of a run.
    state, rows = {**estimator.init(), "span": 2 * SAMPLES * len(windows)}, []
    for step, values in enumerate(windows, start=1):
        found = [alignment.Reading(SAMPLES * part, value, 0.0, 1) for part, value in zip(PARTS, values, strict=True)]
        state = estimator.update(state, alignment.Alignment(SAMPLES, tuple(found)))
        if step in (256, len(windows)):
            estimate = estimator.value(state)
            rows.append([min(float(getattr(estimate, name)), 1e30) for name in FIELDS])
    return rows


def known(case: tuple[str, str]) -> dict[str, Any]:
    """The cached truth of one case."""
    parts = (newton_schulz, problem, response, truth, unit_scale)
    key = [*case, RATIOS, PARTS, TRUTH_DRAWS, SEED, *(essence(inspect.getsource(part)) for part in parts)]
    return cached("alignment", key, partial(truth, *case))


def piece(task: tuple[tuple[str, str], float, int, int, int]) -> dict[str, Any]:
    """One cached piece of the simulation."""
    parts = (newton_schulz, problem, aligned, curves, simulate, readings)
    sources = [inspect.getsource(part) for part in parts]
    sources += [path.read_text() for path in sorted(Path(alignment.__file__).parent.glob("*.py"))]
    return cached("alignment", [*task, RATIOS, PARTS, SEED, *map(essence, sources)], partial(simulate, *task))


@dataclass(frozen=True)
class Cell:
    """The figures of one case, ratio and reading over all repeats; scales over the true one."""

    median: float
    within: float  # share of fitted scales within a factor of 1.5
    low: float  # median lower end
    valid: float  # share of lower ends that are not above the truth
    covered: float  # share of intervals that hold the truth
    resolved: float
    repeats: int


def summarise(ratio: float, rows: np.ndarray) -> Cell:
    """Figures of one cell from its readings (repeats, FIELDS)."""
    scale, low, high, resolved = rows.T
    scale, low, high = scale / (ratio * SAMPLES), low / (ratio * SAMPLES), high / (ratio * SAMPLES)
    return Cell(
        median=float(np.median(scale)),
        within=float(((scale < 1.5) & (scale > 1 / 1.5)).mean()),
        low=float(np.median(low)),
        valid=float((low <= 1.0).mean()),
        covered=float(((low <= 1.0) & (high >= 1.0)).mean()),
        resolved=float(resolved.mean()),
        repeats=len(rows),
    )


def simulation(repeats: int, windows: int, jobs: int) -> tuple[str, list[Target]]:
    """The simulated tables, as Markdown, and their targets."""
    began = time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        truths = dict(zip(CASES, pool.map(known, CASES), strict=True))
        tasks = [
            (case, truths[case]["scale"], first, min(PIECE, repeats - first), windows)
            for first in range(0, repeats, PIECE)
            for case in CASES
        ]
        pieces = list(zip(tasks, pool.map(piece, tasks), strict=True))
    by_case = {case: [found for (of, *_), found in pieces if of == case] for case in CASES}
    cells = {
        (case, ratio, step): summarise(ratio, np.array([one[k] for part in parts for one in part["readings"][i]]))
        for case, parts in by_case.items()
        for i, ratio in enumerate(RATIOS)
        for k, step in enumerate((256, windows))
    }
    cost = sum(found["seconds"] for _, found in pieces) + sum(one["seconds"] for one in truths.values())
    table, unbiased = alignments(by_case, truths, 0.0 if windows >= FULL else 3.0)
    spent = f"{cost:.0f} s of processor time, cached pieces included; {time.monotonic() - began:.0f} s just now"
    body = (
        f"{repeats} repeats of {windows:,} windows of {SAMPLES} samples per case, seed {SEED}, {spent}.\n\n"
        f"Averaged a(m) over the true one, B the samples of a window, with the largest standard error:\n\n{table}\n\n"
        f"The fitted scale, and the lower end of its 95 % interval:\n\n{scale_table(cells)}"
    )
    return body, [unbiased, *scale_targets(cells)]


def alignments(
    by_case: dict[tuple[str, str], list[dict[str, Any]]],
    truths: dict[tuple[str, str], dict[str, Any]],
    slack: float,
) -> tuple[Table, Target]:
    """Averaged a(m) over the true one, and the target for m up to half a window, with ``slack`` standard errors."""
    table = Table(["map", "spectrum", "scale/window", *(f"m = {part:.4g} B" for part in PARTS), "largest error"])
    worst, excess = 1.0, 0.0
    for case, parts in by_case.items():
        true, scale = np.array(truths[case]["alignments"]), truths[case]["scale"]
        for i, ratio in enumerate(RATIOS):
            true_here = true[i] * math.sqrt(scale / (ratio * SAMPLES))
            count = sum(part["batches"] for part in parts)
            mean = sum(np.array(part["means"][i]) for part in parts) / count
            square = sum(np.array(part["squares"][i]) for part in parts) / count
            error = np.sqrt((square - mean**2) / (count - 1)) / true_here
            figures = mean / true_here
            worst = max([worst, *figures[:-1]], key=lambda value: abs(value - 1.0))
            excess = max(excess, float((abs(figures - 1.0) - slack * error)[:-1].max()))
            table.add(*case, f"{ratio:g}", *(f"{value:.4f}" for value in figures), f"{error.max():.4f}")
    goal = f"within 2 %{f' and {slack:g} standard errors' if slack else ''}"
    return table, Target("a(m)/true, m <= B/2, worst", f"{worst:.4f}", goal, excess <= 0.02)


def scale_table(cells: dict[tuple[tuple[str, str], float, int], Cell]) -> Table:
    table = Table(
        ["map", "spectrum", "scale/window", "windows", "median scale/true", "within 1.5 %", "median low/true"]
        + ["low/window", "low valid %", "covered %", "resolved %"]
    )
    for (case, ratio, step), cell in cells.items():
        shares = [f"{100 * share:.0f}" for share in (cell.valid, cell.covered, cell.resolved)]
        median = f"{cell.median:.3f}" if cell.median < 1e9 else "inf"
        bound = [f"{cell.low:.3f}", f"{cell.low * ratio:.2f}"]
        table.add(*case, f"{ratio:g}", step, median, f"{100 * cell.within:.0f}", *bound, *shares)
    return table


def scale_targets(cells: dict[tuple[tuple[str, str], float, int], Cell]) -> list[Target]:
    """Targets for the fit at the end of the repeats, and for the lower bound at every reading.

    The few windows of the quick mode resolve no more than three times a window, and bound no more than thirty.
    """
    end = max(step for *_, step in cells)
    fitted, bounded = (10.0, 100.0) if end >= FULL else (3.0, 30.0)
    near = {key: cell for key, cell in cells.items() if key[1] <= fitted and key[2] == end}
    targets = []
    for name, held in (
        ("", [cell for key, cell in near.items() if key[0] != STRESS]),
        (", lognormal sign", [cell for key, cell in near.items() if key[0] == STRESS]),
    ):
        worst = max((cell.median for cell in held), key=lambda value: abs(math.log(value)))
        holds = abs(math.log(worst)) <= math.log(1.5)
        targets.append(Target(f"median fitted/true to {fitted:g} B{name}", f"{worst:.3g}", "within 1.5", holds))
    for ratio in RATIOS:
        some = [cell for (_, one, _), cell in cells.items() if one == ratio]
        valid = sum(cell.valid * cell.repeats for cell in some) / sum(cell.repeats for cell in some)
        targets.append(Target(f"lower bound valid at {ratio:g} B", f"{100 * valid:.1f} %", ">= 95 %", valid >= 0.95))
    least = min(cell.low * ratio for (_, ratio, step), cell in cells.items() if step == end and ratio <= bounded)
    targets.append(Target(f"least median lower bound to {bounded:g} B", f"{least:.2f} B", "> 0", least > 0.0))
    return targets


def cost(pairs: int) -> str:
    """What a measured window costs beside one that is not, on a small transformer, as Markdown."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    layer = partial(nn.TransformerEncoderLayer, 128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(layer(), layer())
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    inputs = torch.randn(8, 8, 64, 128)
    table = Table(["map", "parameters", "micro-batches", "plain window ms", "measured / plain", "every 20th step"])
    for name, optimizer in (
        ("sign", torch.optim.SGD(model.parameters(), lr=0.1)),
        ("muon", torch.optim.Muon(matrices, lr=0.1)),
    ):
        with AlignmentTap(model, optimizer, update=name) as align:
            seconds = {on: [window_seconds(align, model, inputs, on) for _ in range(pairs + 1)][1:] for on in (0, 1)}
        plain, measured = (float(np.median(seconds[on])) for on in (0, 1))
        count = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
        each = [f"{1e3 * plain:.0f}", f"{measured / plain:.2f}", f"{1.0 + (measured / plain - 1.0) / 20.0:.3f}"]
        table.add(name, f"{count:,}", len(inputs), *each)
    return f"Medians of {pairs} windows each, on one thread: forward and backward, without the optimizer's step.\n\n{table}"


def window_seconds(align: AlignmentTap, model: nn.Module, inputs: Tensor, on: bool) -> float:
    """Time of one window, without the optimizer's step."""
    model.zero_grad()
    align.measure(bool(on))
    began = time.perf_counter()
    for micro_batch in inputs:
        model(micro_batch).square().mean().backward()
        align.note(len(micro_batch))
    pending = align.read(factor=1.0 / len(inputs))
    if pending is not None:
        pending.read()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 repeats of 512 windows: about a minute on 2 cores")
    parser.add_argument("--repeats", type=int, help="repeats of 4,096 windows (20)")
    parser.add_argument("--jobs", type=int, help="processes (1; with --quick as many as there are cores, at most 2)")
    parser.add_argument("--write", action="store_true", help="write docs/results/alignment.md with --quick, too")
    options = parser.parse_args()
    jobs = options.jobs or (min(2, os.cpu_count() or 1) if options.quick else 1)
    repeats, windows = (2, QUICK) if options.quick else (options.repeats or 20, FULL)
    body, targets = simulation(repeats, windows, jobs)
    body = f"## Simulated repeats\n\n{body}\n\n## Cost of a measured window\n\n{cost(5 if options.quick else 30)}"
    print(body, end="\n\n", flush=True)
    if options.write or not options.quick:
        command = shlex.join(["python", "scripts/bench/alignment.py", *sys.argv[1:]])
        write_result("alignment", "Noise scale of sign methods and Muon", f"{body}\n\n{verdict(targets)}", command)
    print(verdict(targets))
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
