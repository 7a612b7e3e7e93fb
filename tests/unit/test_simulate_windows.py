"""What a simulated window reads: groups as the ranks would hold them, unbiased numbers with the right variances."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from adabatch.plan import BatchLimits, BatchPlan, split
from adabatch.simulate.windows import Groups, Moment, drawn_window, exact_window, unmeasured_window

MOMENT = Moment(signal=2.0, noise=600.0, critical=300.0, dimensions=50.0, loss=1.5)


def planned(batch: int, world: int, micro_batch: int, first_sample: int = 0) -> BatchPlan:
    limits = BatchLimits(world, micro_batch, rounding="none")
    return split(step=0, first_sample=first_sample, global_batch=batch, limits=limits, measure=True)


@pytest.mark.parametrize(
    ("batch", "world", "micro_batch", "first"),
    [
        (64, 4, 8, 0),
        (65, 4, 8, 3),
        (7, 4, 8, 2),
        (3, 4, 8, 1),
        (100, 3, 8, 5),
        (16, 1, 16, 0),
        (1, 1, 8, 0),
        (250, 7, 9, 11),
    ],
)
def test_the_groups_are_those_of_all_ranks(batch: int, world: int, micro_batch: int, first: int) -> None:
    plan = planned(batch, world, micro_batch, first)
    pieces = [size for rank in range(world) for size in plan.pieces(rank) if size]
    groups = Groups.of(plan)
    assert groups.count == len(pieces)
    assert groups.weight_square == pytest.approx(sum((size / batch) ** 2 for size in pieces))


def test_many_ranks_are_not_looped_over() -> None:
    groups = Groups.of(planned(16_384 * 24, 16_384, 16))
    assert groups.count == 2 * 16_384
    assert groups.weight_square == pytest.approx(16_384 * (16**2 + 8**2) / (16_384 * 24) ** 2)


@pytest.mark.parametrize("plan", [planned(64, 4, 8), planned(100, 3, 8, 5)], ids=["equal", "unequal"])
def test_drawn_windows_have_the_mean_and_the_variance_of_gaussian_gradients(plan: BatchPlan) -> None:
    groups, samples = Groups.of(plan), plan.global_batch
    draws = random.Random(7)
    windows = [drawn_window(MOMENT, samples, groups, draws) for _ in range(20_000)]
    signals, noises = [one.signal for one in windows], [one.noise for one in windows]
    square = MOMENT.noise**2 / MOMENT.dimensions  # tr(Sigma^2)
    along = MOMENT.noise / MOMENT.dimensions * MOMENT.signal  # G' Sigma G
    variance = 4 * along / samples + 2 * square / (samples**2 * (1 - groups.weight_square))
    error = math.sqrt(variance / len(windows))
    assert statistics.fmean(signals) == pytest.approx(MOMENT.signal, abs=4 * error)
    assert statistics.variance(signals) == pytest.approx(variance, rel=0.06)
    assert statistics.fmean(noises) == pytest.approx(MOMENT.noise, rel=0.01)
    assert statistics.variance(noises) == pytest.approx(2 * square / (1 / groups.weight_square - 1), rel=0.06)


@pytest.mark.parametrize("plan", [planned(64, 4, 8), planned(100, 3, 8, 5)], ids=["equal", "unequal"])
def test_an_exact_window_reads_the_truth(plan: BatchPlan) -> None:
    window = exact_window(MOMENT, plan.global_batch, Groups.of(plan))
    assert (window.signal, window.noise) == (pytest.approx(MOMENT.signal), pytest.approx(MOMENT.noise))
    assert (window.loss, window.measurable) == (1.5, True)


def test_a_window_that_was_not_measured_has_its_loss_alone() -> None:
    window = unmeasured_window(MOMENT, 64)
    assert (window.loss, window.weight, window.measurable) == (1.5, 64.0, False)
