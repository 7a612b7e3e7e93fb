"""A training run without a model: a controller fed with the exact statistics of Gaussian gradients.

The true gradient G has |G|^2 = 1 and a sample's gradient is G + N(0, (S/d) I) in d dimensions, so that the true noise
scale is S and the participation ratio of the noise is d. For K groups of n samples, N = K n, the two sums that a window
needs are then

    |g_bar|^2            = (1 + s z)^2 + s^2 chi2(d - 1)      with s^2 = S / (d N), z standard normal
    sum p_k^2 |g_k|^2    = (K |g_bar|^2 + s^2 K chi2((K - 1) d)) / K^2

with independent draws, so no gradient has to be made. The draws of a step depend on (seed, step) alone: a resumed run
sees what the straight run saw.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from adabatch.controller import Controller
from adabatch.ledger import Decision
from adabatch.noise import Measurement
from adabatch.plan import BatchPlan
from adabatch.throughput import ReadableLap

GROUPS = 8
DIMENSIONS = 300


@dataclass(frozen=True, slots=True)
class Ready:
    """A measurement that can be read at once."""

    value: Measurement

    def read(self) -> Measurement:
        return self.value


@dataclass(slots=True)
class Trace:
    """What a simulated run did."""

    plans: list[BatchPlan] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def batches(self) -> list[int]:
        return [plan.global_batch for plan in self.plans]

    def efficiency(self, scale: Callable[[int], float], since: int = 0) -> float:
        """The delivered data efficiency against the true scale, weighted by samples, from sample ``since`` on."""
        kept = [plan for plan in self.plans if plan.first_sample >= since]
        worth = math.fsum(plan.global_batch / (1 + plan.global_batch / scale(plan.first_sample)) for plan in kept)
        return worth / sum(plan.global_batch for plan in kept)


def gaussian_window(
    batch: int,
    noise: float,
    seed: object,
    *,
    signal: float = 1.0,
    groups: int = GROUPS,
    dimensions: int = DIMENSIONS,
    loss: float = 1.0,
) -> Measurement:
    """One window of ``groups`` equal groups with true G^2 ``signal`` and true S ``noise``."""
    draws = random.Random(repr((seed, batch)))
    variance = noise / (dimensions * batch)
    along = math.sqrt(signal) + math.sqrt(variance) * draws.gauss(0.0, 1.0)
    mean_square = along**2 + variance * _chi_square(draws, dimensions - 1)
    spread = variance * groups * _chi_square(draws, (groups - 1) * dimensions)
    return Measurement(
        samples=batch,
        groups=groups,
        mean_square=mean_square,
        group_square=(groups * mean_square + spread) / groups**2,
        weight_square=1 / groups,
        weight=float(batch),
        loss=loss,
    )


def simulate(
    controller: Controller,
    scale: Callable[[int], float],
    *,
    seed: object = 0,
    steps: int | None = None,
    spoiled: frozenset[int] = frozenset(),
    seen: Callable[[Measurement], Measurement] = lambda measurement: measurement,
    loss: Callable[[int], float] = lambda sample: 1.0,
    lap: Callable[[BatchPlan], ReadableLap] | None = None,
) -> Trace:
    """Run ``controller`` until it is done, or for ``steps`` steps, at the true noise scale ``scale(samples)``.

    The gradients of the steps in ``spoiled`` are not finite; ``seen`` may add to what was measured; ``loss`` is that of
    the training by samples, and ``lap`` what a step takes.
    """
    trace = Trace()
    for plan in _plans(controller, steps):
        first = plan.first_sample
        measurement = seen(gaussian_window(plan.global_batch, scale(first), (seed, plan.step), loss=loss(first)))
        if plan.step in spoiled:
            measurement = not_finite(plan.global_batch)
        if not plan.measure:
            measurement = replace(measurement, groups=0)
        decision = controller.commit(plan, Ready(measurement), lap(plan) if lap else None)
        trace.plans.append(plan)
        if decision is not None:
            trace.decisions.append(decision)
    return trace


def not_finite(batch: int) -> Measurement:
    """The measurement of a window that was skipped."""
    return Measurement(batch, GROUPS, math.nan, math.nan, 1 / GROUPS, float(batch), math.nan, finite=False)


def _plans(controller: Controller, steps: int | None) -> Iterator[BatchPlan]:
    taken = 0
    while not controller.done and (steps is None or taken < steps):
        yield controller.plan()
        taken += 1


def _chi_square(draws: random.Random, freedom: int) -> float:
    return draws.gammavariate(freedom / 2, 2.0)
