"""Is the noise scale right? Thousands of repeats of ``adabatch.noise`` on gradients whose G and Sigma are known.

Simulation. Gradients have d = 1,000 coordinates, in the eigenbasis of Sigma, with eigenvalues j^-0.6 (effective
dimension 327, the largest 63 times the smallest); G is aligned with the noise, G_j = +-sqrt(lambda_j), and |G| = 1. A
window has 64 samples in 4 groups, and group k has the mean gradient G + s_k e_k, where e_k is a vector really drawn
from N(0, Sigma / tr Sigma) and s_k^2 is the group's share of noise:

- equal:   4 groups of 16 samples, s_k^2 = tr Sigma / 16;
- unequal: 6, 10, 16 and 32 samples, s_k^2 = tr Sigma / n_k;
- tokens:  4 groups of 16 sequences, the loss a mean over tokens. Lengths are drawn anew in every window (log-normal,
  median 55, 4 to 1,024). Tokens of a sequence correlate by 0.2, so that its summed gradient has n (1 + 0.2 (n - 1))
  times the noise of a token. A group weighs what its tokens do.

The noise scale of one sample is 0.1 to 30 times the 64 samples of a window. Everything that the estimator reads of a
window is |g_bar|^2 and sum p_k^2 |g_k|^2, and both follow from the products e_k.e_l and G.e_k. These do not depend on
the size of the noise, so they are computed once per drawn window, exactly, and scaled. Each repeat draws 1,024 windows.
The highest noise scale takes them all (eight times its memory). The five others take 128 each, out of those that the
highest uses for sizing its memory but does not average, so that no figures of two cells come from the same windows.
Repeats share nothing.

Every repeat is read three times, after 16 and 64 steps and at its end, and the targets are for each of these readings.
The width compares with an oracle that averages the same windows, knows the variances, and uses the normal quantile.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from _common import Table, Target, cached, essence, verdict, write_result

from adabatch import noise

SEED = 20240607
KINDS = ("equal", "unequal", "tokens")
RATIOS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
DIMENSION, SAMPLES, GROUPS = 1000, 64, 4
LONG, SHORT = 1024, 128
CORRELATION = 0.2
READINGS = ("16 steps", "64 steps", "end")
PIECE = 100  # repeats that are simulated and cached together
FIELDS = ("signal", "noise", "low", "high", "steps")


def eigenvalues() -> np.ndarray:
    """The spectrum of Sigma, (d,), with trace 1."""
    values = np.arange(1, DIMENSION + 1) ** -0.6
    return values / values.sum()


def products(rng: np.random.Generator, buffer: np.ndarray, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw noise vectors; return e_k.e_l (windows, K, K) and G.e_k (windows, K) for a fresh G of length 1."""
    root = np.sqrt(eigenvalues()).astype(np.float32)
    direction = root * rng.choice(np.array([-1, 1], np.float32), DIMENSION)
    between, along = np.empty((windows, GROUPS, GROUPS)), np.empty((windows, GROUPS))
    for i in range(0, windows, len(buffer)):
        rng.standard_normal(dtype=np.float32, out=buffer)
        buffer *= root
        between[i : i + len(buffer)] = buffer @ buffer.transpose(0, 2, 1)
        along[i : i + len(buffer)] = (buffer.reshape(-1, DIMENSION) @ direction).reshape(-1, GROUPS)
    return between, along


def shares(kind: str, rng: np.random.Generator, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights p_k and noise s_k^2, both (windows, K), the latter such that one sample's noise S is 1 on average."""
    if kind == "tokens":
        weights, noises = token_shares(rng, windows)
        return weights, noises / token_noise()
    sizes = np.full(GROUPS, SAMPLES / GROUPS) if kind == "equal" else np.array([6.0, 10.0, 16.0, 32.0])
    return np.tile(sizes / SAMPLES, (windows, 1)), np.tile(1.0 / sizes, (windows, 1))


def token_shares(rng: np.random.Generator, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and noise of groups of sequences of random lengths, for tokens of noise 1."""
    draws = rng.normal(4.0, 1.0, (windows, GROUPS, SAMPLES // GROUPS))
    lengths = np.clip(np.exp(draws), 4.0, 1024.0).round()
    tokens = lengths.sum(2)
    noises = (lengths * (1.0 + CORRELATION * (lengths - 1.0))).sum(2) / tokens**2
    return tokens / tokens.sum(1, keepdims=True), noises


@lru_cache(maxsize=1)
def token_noise() -> float:
    """S for tokens of noise 1: the mean of N sum p_k^2 s_k^2 over the lengths, known to 0.03 %."""
    rng = np.random.default_rng(SEED)
    batches = [token_shares(rng, 10_000) for _ in range(50)]
    return float(np.mean([SAMPLES * (p * p * s).sum(1).mean() for p, s in batches]))


def squares(
    ratio: float, between: np.ndarray, along: np.ndarray, weights: np.ndarray, noises: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """|g_bar|^2, sum p_k^2 |g_k|^2 and sum p_k^2 of windows whose noise scale is ``ratio`` times their samples."""
    size = np.sqrt(noises * ratio * SAMPLES)
    parts = weights * size
    mean_square = 1.0 + 2.0 * (parts * along).sum(1) + np.einsum("tk,tkl,tl->t", parts, between, parts)
    own = np.einsum("tkk->tk", between)
    group_square = (weights**2 * (1.0 + 2.0 * size * along + size**2 * own)).sum(1)
    return mean_square, group_square, (weights**2).sum(1)


def readings(mean_square: np.ndarray, group_square: np.ndarray, weight_square: np.ndarray) -> list[list[float]]:
    """Feed the windows to the estimator, one after another, and read it three times."""
    estimator = noise.NoiseEstimator()
    state, rows, count = estimator.init(), [], len(mean_square)
    numbers = zip(mean_square.tolist(), group_square.tolist(), weight_square.tolist(), strict=True)
    for step, (mean, group, weight) in enumerate(numbers, start=1):
        measurement = noise.Measurement(SAMPLES, GROUPS, mean, group, weight, SAMPLES, 0.0)
        state = estimator.update(state, measurement)
        if step in (16, 64, count):
            estimate = estimator.value(state)
            rows.append([getattr(estimate, name) for name in FIELDS])
    return rows


def moments(mean_square: np.ndarray, group_square: np.ndarray, weight_square: np.ndarray) -> list[float]:
    """Means over the windows of G^2, S, G^2 G^2, S S and G^2 S: what an oracle knows about one step."""
    signal = (mean_square - group_square) / (1.0 - weight_square)
    sample_noise = SAMPLES * (mean_square - signal)
    products_of = (signal, sample_noise, signal**2, sample_noise**2, signal * sample_noise)
    return [float(values.mean()) for values in products_of]


def simulate(kind: str, first: int) -> dict[str, Any]:
    """Repeats ``first`` to ``first + PIECE`` of one kind: per noise scale all readings and the steps' moments."""
    began = time.process_time()
    buffer = np.empty((64, GROUPS, DIMENSION), np.float32)
    read: list[list[Any]] = [[] for _ in RATIOS]
    known: list[list[Any]] = [[] for _ in RATIOS]
    for repeat in range(first, first + PIECE):
        rng = np.random.Generator(np.random.SFC64([SEED, KINDS.index(kind), repeat]))
        between, along = products(rng, buffer, LONG)
        weights, noises = shares(kind, rng, LONG)
        for i, ratio in enumerate(RATIOS):
            part = slice(0, LONG) if ratio == max(RATIOS) else slice(SHORT * (i + 1), SHORT * (i + 2))
            numbers = squares(ratio, between[part], along[part], weights[part], noises[part])
            read[i].append(readings(*numbers))
            known[i].append(moments(*numbers))
    steps = [np.mean(values, axis=0).tolist() for values in known]
    return {"readings": read, "moments": steps, "seconds": time.process_time() - began}


def piece(task: tuple[str, int]) -> dict[str, Any]:
    """One cached piece of the simulation."""
    parts = (eigenvalues, products, shares, token_shares, token_noise, squares, readings, moments, simulate)
    sources = [Path(noise.__file__).read_text(), *(inspect.getsource(part) for part in parts)]
    return cached("accuracy", [*task, PIECE, SEED, *map(essence, sources)], partial(simulate, *task))


@dataclass(frozen=True)
class Cell:
    """The figures of one kind, noise scale and reading over all repeats."""

    noise: float  # mean S over the true one
    signal: float  # mean G^2 over the true one
    z: float  # of the mean G^2
    error: float  # standard deviation of the averaged G^2
    ratio: float  # mean S / mean G^2 over the true scale
    below: float  # share of intervals wholly below the truth
    above: float  # share wholly above it
    unresolved: float
    width: float  # median of the width of the interval of 1/scale over the oracle's
    steps: float

    @property
    def coverage(self) -> float:
        return 1.0 - self.below - self.above


def summarise(ratio: float, rows: np.ndarray, steps: np.ndarray) -> Cell:
    """Figures of one cell from its readings (repeats, 5) and the moments of one step."""
    truth = ratio * SAMPLES
    signal, sample_noise, low, high, count = rows.T
    inverse_low, inverse_high = 1.0 / np.maximum(low, 1e-300), 1.0 / high
    return Cell(
        noise=sample_noise.mean() / truth,
        signal=signal.mean(),
        z=(signal.mean() - 1.0) / (signal.std(ddof=1) / math.sqrt(len(signal))),
        error=signal.std(ddof=1),
        ratio=sample_noise.mean() / signal.mean() / truth,
        below=float((high < truth).mean()),
        above=float((low > truth).mean()),
        unresolved=float(np.isinf(high).mean()),
        width=float(np.median((inverse_low - inverse_high) / oracle_widths(signal, sample_noise, count, steps))),
        steps=count.mean(),
    )


def oracle_widths(signal: np.ndarray, sample_noise: np.ndarray, count: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Widths of Fieller's interval of 1/scale, cut at 0, for somebody who knows the variances."""
    z2 = 1.959964**2 / count
    spread = steps[2] - steps[0] ** 2, steps[3] - steps[1] ** 2, steps[4] - steps[0] * steps[1]
    leading = sample_noise**2 - z2 * spread[1]
    cross = sample_noise * signal - z2 * spread[2]
    root = np.sqrt(np.maximum(cross**2 - leading * (signal**2 - z2 * spread[0]), 0.0))
    return (cross + root) / leading - np.maximum((cross - root) / leading, 0.0)


def chi_square_tail(value: float, freedom: int) -> float:
    """P(chi^2 > value) for an even number of degrees of freedom, in closed form."""
    assert freedom % 2 == 0
    terms = np.cumprod([1.0, *(0.5 * value / i for i in range(1, freedom // 2))])
    return float(math.exp(-0.5 * value) * terms.sum())


def simulation(repeats: int, jobs: int) -> tuple[str, list[Target]]:
    """The simulated table, as Markdown, and its targets."""
    tasks = [(kind, first) for kind in KINDS for first in range(0, repeats, PIECE)]
    began = time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        pieces = dict(zip(tasks, pool.map(piece, tasks), strict=True))
    cells = {}
    for kind in KINDS:
        parts = [pieces[kind, first] for first in range(0, repeats, PIECE)]
        for i, ratio in enumerate(RATIOS):
            rows = np.concatenate([np.array(part["readings"][i]) for part in parts])
            steps = np.mean([part["moments"][i] for part in parts], axis=0)
            for k, reading in enumerate(READINGS):
                cells[kind, ratio, reading] = summarise(ratio, rows[:, k], steps)
    cost = sum(part["seconds"] for part in pieces.values())
    spent = f"{cost:.0f} s of processor time, cached pieces included; {time.monotonic() - began:.0f} s just now"
    body = f"{repeats:,} repeats per cell, seed {SEED}, {spent}.\n\n{simulation_table(cells)}"
    return body, simulation_targets(cells, repeats)


def simulation_table(cells: dict[tuple[str, float, str], Cell]) -> Table:
    table = Table(
        ["groups", "scale/batch", "read at", "steps", "S", "G²", "z of G²", "sd of G²", "S/G²", "covered %"]
        + ["below %", "above %", "unresolved %", "width/oracle"]
    )
    for (kind, ratio, reading), cell in cells.items():
        percent = [f"{100 * x:.1f}" for x in (cell.coverage, cell.below, cell.above, cell.unresolved)]
        ratios = [f"{cell.noise:.4f}", f"{cell.signal:.4f}", f"{cell.z:.2f}", f"{cell.error:.3f}", f"{cell.ratio:.4f}"]
        table.add(kind, ratio, reading, f"{cell.steps:.1f}", *ratios, *percent, f"{cell.width:.2f}")
    return table


def simulation_targets(cells: dict[tuple[str, float, str], Cell], repeats: int) -> list[Target]:
    """Targets over all cells. Fewer repeats than the full mode's widen the coverage by three binomial errors."""
    slack = 0.0 if repeats >= 4000 else 3.0 * math.sqrt(0.95 * 0.05 / repeats)
    noises = max((cell.noise for cell in cells.values()), key=lambda value: abs(value - 1.0))
    covered = [cell.coverage for cell in cells.values()]
    low, high = 0.92 - slack, min(0.98 + slack, 1.0)
    targets = [
        Target("S/true, worst cell", f"{noises:.4f}", "within 1 %", abs(noises - 1.0) <= 0.01),
        Target(
            "coverage",
            f"{100 * min(covered):.1f} to {100 * max(covered):.1f} %",
            f"{100 * low:.1f} to {100 * high:.1f} %",
            low <= min(covered) and max(covered) <= high,
        ),
    ]
    for reading in READINGS:
        scores = [cell.z for (_, _, at), cell in cells.items() if at == reading]
        tail = chi_square_tail(sum(z * z for z in scores), len(scores))
        targets.append(Target(f"p of chi^2 of G² at {reading}", f"{tail:.3f}", "> 0.001", tail > 0.001))
    return targets


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
    parser.add_argument("--quick", action="store_true", help="400 repeats instead of 4,000: about a minute on 2 cores")
    parser.add_argument("--jobs", type=int, help="processes (1; with --quick as many as there are cores, at most 2)")
    parser.add_argument("--write", action="store_true", help="write docs/results/accuracy.md with --quick, too")
    options = parser.parse_args()
    jobs = options.jobs or (min(2, os.cpu_count() or 1) if options.quick else 1)
    # Each section is a function that returns Markdown and its targets.
    sections = {"Simulated repeats": partial(simulation, 400 if options.quick else 4000, jobs), "Taps": taps}
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
