"""Calibration inside a run, within a stated number of samples, and only where these can tell c to a factor of 2.

What it is for: a trainer between two steps, at a sample count that its user chose. Two pairs of branches come first; by
their scatter it is foreseen what the allowance can resolve. The branches read samples that the run is still to train
on, and cost time only: the run goes on bit by bit as if nothing had been.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from adabatch.calibrate.branches import Bench
from adabatch.calibrate.calibration import Calibration, Place, Settings, calibrate, choose
from adabatch.calibrate.fitting import foreseen
from adabatch.noise import Estimate
from adabatch.plan import samples_in

# A c that is known to less is of no use: a target efficiency of 0.8 would become 0.67 or 0.89.
WITHIN = 2.0
# Learning rates tried for the first pair, and for each further one; about, for a grid may have to be widened.
FIRST, FURTHER = 5, 3
# Pairs that are run to foresee what more of them would tell.
SCOUTS = 2


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no calibration was made, and the samples that finding out has cost."""

    reason: str
    samples: int


def expected_cost(bench: Bench, settings: Settings, present: int) -> int:
    """Samples that a calibration will take, about: branches, their shorter versions, and the noise scales."""
    batches, _ = choose(bench.limits, settings, present)
    # The halvings of the smallest batch's branches add up to less than one more of its own.
    branches = samples_in(len(batches) + 1, settings.samples)
    return (FIRST + FURTHER * (settings.pairs - 1)) * branches + settings.noise_samples


def calibrate_within(
    bench: Bench,
    settings: Settings,
    *,
    allowance: int,
    present: int,
    geometry: str,
    dataset_size: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Calibration | Refusal:
    """Calibrate with as many of the ``settings``' pairs as the ``allowance`` of samples pays for, or refuse.

    Every rank calls it, between two steps; afterwards everything is as before.

    Args:
        allowance: samples that all of it may take.
        present: the run's present batch.
        geometry: in which c is wanted to a factor of 2.
        dataset_size, say: as for ``calibrate``.

    Raises:
        ValueError, Cancelled: as ``calibrate`` does.
    """
    costs = {
        pairs: expected_cost(bench, replace(settings, pairs=pairs), present)
        for pairs in range(SCOUTS, settings.pairs + 1)
    }
    affordable = max((pairs for pairs, cost in costs.items() if cost <= allowance), default=0)
    if not affordable:
        return Refusal(
            f"{SCOUTS} pairs of branches would take about {costs[SCOUTS]:,} samples, and {allowance:,} are allowed: "
            f"lower calibrate.samples or the number of batches, or allow more",
            0,
        )
    known: dict[Place, float] = {}
    scouted = replace(settings, pairs=SCOUTS)
    found = calibrate(
        bench, scouted, present=present, geometry=geometry, dataset_size=dataset_size, say=say, known=known
    )
    if reason := _hopeless(found, settings, affordable, allowance, geometry):
        return Refusal(reason, found.samples)
    if affordable == SCOUTS:
        return found
    whole = calibrate(
        bench,
        replace(settings, pairs=affordable),
        present=present,
        geometry=geometry,
        dataset_size=dataset_size,
        say=say,
        known=known,
        noise=found.noise,
    )
    return replace(whole, samples=found.samples + whole.samples, seconds=found.seconds + whole.seconds)


def _hopeless(found: Calibration, settings: Settings, pairs: int, allowance: int, geometry: str) -> str:
    """Why so many pairs will not tell c to a factor of 2; empty where they may."""
    noise = found.noise.get(geometry)
    if noise is None or not noise.resolved or not noise.low > 0:
        return f"the noise scale ({geometry}) is not resolved over {settings.noise_samples:,} samples"
    factor = foreseen(
        {samples: one.losses for samples, one in found.short.items()},
        {batch: one.losses for batch, one in found.large.items()},
        smallest=found.batches[0],
        pairs=pairs,
        confidence=settings.confidence,
    )
    if factor is None:
        return found.critical.reason or "the branches of two pairs cannot be fitted"
    both = math.exp(math.hypot(math.log(factor), math.log(_factor(noise))))
    if both <= WITHIN:
        return ""
    return (
        f"{pairs} pairs, which {allowance:,} samples pay for, would tell c to a factor of {both:.2g} only (critical "
        f"batch {factor:.2g}, noise scale {_factor(noise):.2g}), and a factor of {WITHIN:g} is wanted"
    )


def _factor(noise: Estimate) -> float:
    return max(noise.high / noise.scale, noise.scale / noise.low)
