"""Runs of ``adabatch.noise`` on simulated windows, for accuracy.py: what they read, and what is true.

All cases of a repeat share one pool of drawn windows of each kind, and each starts elsewhere in it. Repeats share
nothing.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import _accuracy_windows as drawn
import numpy as np
from _accuracy_windows import GROUPS, KINDS, SAMPLES, Windows

from adabatch import noise

SEED = 20240607
RATIOS = (0.1, 1.0, 3.0, 10.0, 30.0, 100.0)
FIXED, TO_SCALE, TO_SHARE = "fixed", "-> scale", "-> share"
POOL = 1024
PIECE = 100  # repeats that are simulated and cached together
DECIDE_EVERY = 16
# What is known of each reading; the mean over the repeats is taken of all.
FIELDS = ("noise", "noise_square", "true_noise", "true_signal", "below", "above", "unresolved", "averaged")
FIELDS = (*FIELDS, "now", "lag", "variance")


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
    for count, numbers in enumerate(drawn.numbers(windows, first, case.readings[-1]), start=1):
        position += batch * (case.every if count > 1 else 1)
        signal = case.signal(position)
        measurement = measure(batch, signal, sample_noise / batch, numbers)
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


def measure(batch: int, signal: float, noise_share: float, numbers: tuple[float, ...]) -> noise.Measurement:
    """The measurement of a drawn window for |G|^2 = ``signal`` and S / N = ``noise_share``."""
    along, across, own_along, own, square = numbers
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
    true_signal = float(weight @ signal)
    truth, error = sample_noise / true_signal, estimate.signal - true_signal
    values = {
        "noise": estimate.noise,
        "noise_square": estimate.noise**2,
        "true_noise": sample_noise,
        "true_signal": true_signal,
        "below": estimate.high < truth,
        "above": estimate.low > truth,
        "unresolved": not estimate.resolved,
        "averaged": estimate.steps,
        "now": run.batch[-1] * run.signal[-1] / sample_noise,
        "lag": true_signal / run.signal[-1],
        "variance": error**2 / variance,
    }
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


@cache
def longest(count: int) -> int:
    """Windows that are averaged after ``count`` equal ones when no memory is too long."""
    estimator = noise.NoiseEstimator()
    state = estimator.init()
    for _ in range(count):
        state = estimator.update(state, noise.Measurement(1, 2, 0.0, 1.0, 0.5, 1.0, 0.0))
    return estimator.value(state).steps


def repeats(first: int) -> dict[str, Any]:
    """Repeats ``first`` to ``first + PIECE`` of all cases: their readings summed up, and the errors of one window."""
    began = time.process_time()
    found: list[list[Any]] = [[] for _ in cases()]
    steps = []
    for repeat in range(first, first + PIECE):
        pool = drawn.draw(np.random.Generator(np.random.SFC64([SEED, repeat])), POOL)
        steps.append([[window_variance(pool[kind], ratio) for ratio in RATIOS] for kind in KINDS])
        for i, case in enumerate(cases()):
            found[i].append(simulate(case, pool[case.kind], 37 * i % POOL))
    readings = [[summed([run[k] for run in runs]) for k in range(3)] for runs in found]
    return {"readings": readings, "steps": np.mean(steps, 0).tolist(), "seconds": time.process_time() - began}


def window_variance(windows: Windows, ratio: float) -> tuple[float, float]:
    """Squared error of one window's G^2 at |G|^2 = 1 and S / N = ``ratio``, over its exact and section 9's variance."""
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
