"""The fit of the critical batch: closed forms, coverage over simulated branches, and what is not resolved."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from adabatch.calibrate.fitting import Bound, exponent, fit, foreseen, ratio, relative
from adabatch.noise import student_quantile

SAMPLES, SMALLEST, LARGER = 8192, 8, (32, 128, 512)
LENGTHS = [SAMPLES >> halving for halving in range(6)]


def loss(samples: float) -> float:
    return 2.0 + 1.5 * (samples / 256 + 4) ** -0.3


def simulated(
    critical: float, noise: float, pairs: int, generator: random.Random
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """Branches of a smooth loss: what all branches of a pair share, and noise of each one's own."""
    shared = [generator.gauss(0, 0.02) for _ in range(pairs)]

    def noisy(value: float) -> list[float]:
        return [value + one + generator.gauss(0, noise) for one in shared]

    lengths = {samples: noisy(loss(samples)) for samples in LENGTHS}
    needed = {batch: SAMPLES * (1 + SMALLEST / critical) / (1 + batch / critical) for batch in LARGER}
    return lengths, {batch: noisy(loss(samples)) for batch, samples in needed.items()}


def linear(slope: float = -0.1, pairs: int = 3) -> dict[int, list[float]]:
    """A loss that is linear in the log of its samples, where interpolation is exact."""
    return {samples: [3.0 + 0.01 * pair + slope * math.log2(samples) for pair in range(pairs)] for samples in LENGTHS}


def with_noise(losses: list[float], *noise: float) -> list[float]:
    return [one + more for one, more in zip(losses, noise, strict=True)]


# -- closed forms


@pytest.mark.parametrize("critical", [20.0, 150.0, 1000.0])
def test_losses_without_noise_give_the_critical_batch_back(critical: float) -> None:
    lengths = linear()
    branches = {
        batch: [one - 0.1 * math.log2(relative(batch, SMALLEST, critical)) for one in lengths[SAMPLES]]
        for batch in LARGER
    }
    found = fit(lengths, branches, smallest=SMALLEST)
    assert found.batch.value == pytest.approx(critical, rel=1e-4)
    assert found.batch.resolved and found.reason == ""
    # Not narrower than the form is trusted.
    assert found.batch.high / found.batch.low == pytest.approx(1.05**2, rel=1e-3)
    for batch in LARGER:
        expected = (1 + SMALLEST / critical) / (1 + batch / critical)
        assert found.efficiencies[batch].value == pytest.approx(expected, rel=1e-6)
        assert found.fitted[batch] == pytest.approx(expected, rel=1e-3)


def test_an_efficiency_has_students_interval_where_the_curve_is_linear() -> None:
    lengths, noise = linear(), (0.004, -0.006, 0.002)
    branches = {batch: with_noise([one + 0.1 for one in lengths[SAMPLES]], *noise) for batch in LARGER}
    found = fit(lengths, branches, smallest=SMALLEST).efficiencies[32]
    width = student_quantile(0.975, 2.0) * statistics.stdev(noise) / math.sqrt(3) / 0.1
    assert found.value == pytest.approx(0.5)
    assert found.low == pytest.approx(0.5 * 2**-width, rel=1e-6)
    assert found.high == pytest.approx(0.5 * 2**width, rel=1e-6)


def test_exponents_are_slopes_with_students_interval() -> None:
    rates = {8: 1e-3, 32: 2e-3, 128: 4e-3}
    # A shift of one octave at the largest against the smallest, four octaves away, is a slope of a quarter.
    found = exponent(rates, {8: (0.0, 0.0, 0.0), 32: (0.0, 0.0, 0.0), 128: (-0.4, 0.0, 0.4)})
    width = student_quantile(0.975, 2.0) * 0.1 / math.sqrt(3)
    assert found.value == pytest.approx(0.5)
    assert (found.low, found.high) == pytest.approx((0.5 - width, 0.5 + width))
    assert exponent({8: 1e-3}, {8: (0.0, 0.0)}) == Bound(None, None, None)


def test_a_ratio_has_the_errors_of_both() -> None:
    found = ratio(Bound(200.0, 100.0, 400.0), Bound(100.0, 50.0, 200.0))
    assert found.value == pytest.approx(2.0)
    width = 2 ** math.sqrt(2)
    assert (found.low, found.high) == pytest.approx((2 / width, 2 * width))
    exact = ratio(Bound(200.0, 100.0, 800.0), Bound(100.0, 100.0, 100.0))
    assert (exact.low, exact.high) == pytest.approx((1.0, 8.0))


@pytest.mark.parametrize(
    ("critical", "scale", "expected"),
    [
        (Bound(200.0, 100.0, None), Bound(100.0, 100.0, 100.0), Bound(2.0, 1.0, None)),
        (Bound(200.0, 200.0, 200.0), Bound(100.0, 50.0, None), Bound(2.0, 0.0, 4.0)),
        (Bound(None, 300.0, None), Bound(100.0, 50.0, 150.0), Bound(None, 2.0, None)),
        (Bound(None, 0.0, 30.0), Bound(100.0, 50.0, 150.0), Bound(None, None, 0.6)),
        (Bound(None, None, None), Bound(100.0, 50.0, 150.0), Bound(None, None, None)),
    ],
)
def test_an_open_end_of_either_stays_open(critical: Bound, scale: Bound, expected: Bound) -> None:
    found = ratio(critical, scale)
    for ours, theirs in zip((found.value, found.low, found.high), (expected.value, expected.low, expected.high)):
        assert ours == (None if theirs is None else pytest.approx(theirs))


# -- over simulated branches


@pytest.mark.parametrize(("pairs", "noise", "critical"), [(3, 0.004, 150), (4, 0.012, 800), (4, 0.012, 40)])
def test_the_interval_covers_the_truth(pairs: int, noise: float, critical: float) -> None:
    generator, repeats = random.Random(5), 60
    inside = 0
    for _ in range(repeats):
        found = fit(*simulated(critical, noise, pairs, generator), smallest=SMALLEST).batch
        inside += (found.low or 0.0) <= critical <= (found.high or math.inf)
    # Three standard errors around 95 %; well below 1 for an interval that would be worth nothing.
    assert inside / repeats >= 0.85


def test_estimates_lie_around_the_truth() -> None:
    generator = random.Random(6)
    found = [fit(*simulated(150, 0.004, 4, generator), smallest=SMALLEST).batch.value for _ in range(20)]
    assert statistics.median(found) == pytest.approx(150, rel=0.05)


def test_more_noise_is_a_wider_interval() -> None:
    widths = []
    for noise in (0.004, 0.02):
        found = [fit(*simulated(150, noise, 4, random.Random(seed)), smallest=SMALLEST).batch for seed in range(8)]
        widths.append(statistics.median(math.log(one.high / one.low) for one in found if one.resolved))
    assert widths[1] > 2.5 * widths[0]


@pytest.mark.parametrize(("noise", "pairs"), [(0.006, 4), (0.02, 8)])
def test_what_a_few_pairs_foresee_is_what_more_of_them_find(noise: float, pairs: int) -> None:
    """In the median: the scatter of three pairs is uncertain itself."""
    told, found = [], []
    for seed in range(12):
        lengths, branches = simulated(150, noise, pairs, random.Random(seed))
        few = ({key: losses[:3] for key, losses in one.items()} for one in (lengths, branches))
        factor = foreseen(*few, smallest=SMALLEST, pairs=pairs)
        told.append(math.inf if factor is None else math.log(factor))
        batch = fit(lengths, branches, smallest=SMALLEST).batch
        found.append(0.5 * math.log(batch.high / batch.low) if batch.resolved else math.inf)
    assert 0.5 < statistics.median(told) / statistics.median(found) < 2.0


def test_nothing_is_foreseen_where_nothing_can_be_fitted() -> None:
    lengths = linear(slope=0.1)
    assert foreseen(lengths, {b: lengths[SAMPLES] for b in LARGER}, smallest=SMALLEST, pairs=4) is None


# -- what is not resolved


def test_batches_that_lose_nothing_give_a_lower_bound() -> None:
    lengths = linear()
    branches = {batch: with_noise(lengths[SAMPLES], 0.01, -0.012, 0.001) for batch in LARGER}
    found = fit(lengths, branches, smallest=SMALLEST)
    assert found.batch.high is None and found.batch.low > SMALLEST and not found.batch.resolved
    assert "too little to be told apart" in found.reason


def test_a_loss_that_does_not_fall_with_its_samples_resolves_nothing() -> None:
    lengths = linear()
    lengths[LENGTHS[2]] = [one + 1.0 for one in lengths[LENGTHS[2]]]
    found = fit(lengths, {batch: lengths[SAMPLES] for batch in LARGER}, smallest=SMALLEST)
    assert (found.batch.value, found.batch.low, found.batch.high) == (None, None, None)
    assert "does not fall all the way" in found.reason and found.efficiencies == {}


def test_nor_does_one_that_falls_by_less_than_its_scatter() -> None:
    lengths = linear(slope=-1e-4)
    lengths[LENGTHS[-1]] = with_noise(lengths[LENGTHS[-1]], 0.5, -0.5, 0.01)
    found = fit(lengths, {batch: lengths[SAMPLES] for batch in LARGER}, smallest=SMALLEST)
    assert found.batch.value is None and "no more than its scatter" in found.reason


def test_batches_beyond_the_shortest_length_are_told_as_a_bound_and_left_out() -> None:
    lengths = linear()
    branches = {
        batch: [one - 0.1 * math.log2(relative(batch, SMALLEST, 100.0)) for one in lengths[SAMPLES]] for batch in LARGER
    }
    branches[4096] = [one + 5.0 for one in lengths[SAMPLES]]
    found = fit(lengths, branches, smallest=SMALLEST)
    assert found.efficiencies[4096] == Bound(None, 0.0, 1 / 32)
    assert found.batch.value == pytest.approx(100.0, rel=1e-3)


def test_too_few_batches_within_reach_resolve_nothing() -> None:
    lengths = linear()
    far = [one + 5.0 for one in lengths[SAMPLES]]
    found = fit(lengths, {32: far, 128: far, 512: lengths[SAMPLES]}, smallest=SMALLEST)
    assert found.batch.value is None and "32, 128 do not reach" in found.reason


@pytest.mark.parametrize(
    ("lengths", "branches"),
    [
        ({64: [1.0], 128: [0.5]}, {32: [1.0]}),
        ({64: [1.0, 1.0], 128: [0.5, 0.5]}, {32: [1.0, 1.0, 1.0]}),
        ({128: [0.5, 0.5]}, {32: [1.0, 1.0]}),
        ({64: [1.0, 1.0], 128: [0.5, 0.5]}, {4: [1.0, 1.0]}),
        ({64: [1.0, 1.0], 128: [0.5, 0.5]}, {}),
    ],
)
def test_what_cannot_be_fitted_is_refused(lengths: dict, branches: dict) -> None:
    with pytest.raises(ValueError, match="a fit needs 2 or more pairs"):
        fit(lengths, branches, smallest=SMALLEST)
