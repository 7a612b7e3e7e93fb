"""Where a step has a price: the square root of price times critical batch, against brute force."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adabatch.noise import Estimate
from adabatch.policies import Facts, Price, StepPrice, Wanted, WallClock
from adabatch.progress import Progress

RESOLVED = Estimate(
    signal=0.5, noise=200.0, scale=400.0, low=100.0, high=900.0, resolved=True, samples=4096, steps=64, memory=4096
)
UNRESOLVED = replace(RESOLVED, signal=-0.1, scale=math.inf, low=36.0, high=math.inf, resolved=False)


def wants(policy: WallClock | StepPrice, estimate: Estimate | None, price: Price | None = None) -> Wanted | None:
    return policy.value(policy.init(), Facts(Progress(), 16, estimate, price=price))


def test_the_batch_is_the_root_with_both_intervals() -> None:
    wanted = wants(WallClock(), RESOLVED, Price(100.0, 81.0, 121.0))
    assert wanted == Wanted(
        200.0,
        90.0,
        330.0,
        "noise scale 400 [100, 900] (uncalibrated), a step costs as much as 100 samples [81, 121]",
    )


@given(st.floats(0.5, 1e4), st.floats(0.5, 1e6), st.floats(0.2, 5.0))
def test_no_other_batch_is_faster(price: float, scale: float, calibration: float) -> None:
    """Seconds for the same progress go with (1 + price/B)(1 + B/B_crit)."""
    estimate = replace(RESOLVED, scale=scale, low=scale, high=scale)
    wanted = wants(StepPrice(price, calibration), estimate)
    assert wanted is not None

    def seconds(batch: float) -> float:
        return (1 + price / batch) * (1 + batch / (calibration * scale))

    assert all(seconds(wanted.batch) <= seconds(wanted.batch * factor) + 1e-9 for factor in (0.5, 0.9, 1.1, 2.0))


def test_a_price_that_is_not_resolved_counts_as_its_lower_bound() -> None:
    wanted = wants(WallClock(), RESOLVED, Price(math.inf, 25.0, math.inf))
    assert wanted is not None
    assert (wanted.batch, wanted.low, wanted.high, wanted.resolved) == (100.0, 50.0, math.inf, False)
    assert wanted.reason.endswith("25 samples or more (not resolved)")


def test_nothing_known_of_price_and_noise_bounds_nothing() -> None:
    wanted = wants(WallClock(), UNRESOLVED, Price(0.0, 0.0, 0.0))
    assert wanted is not None
    assert (wanted.low, wanted.high) == (0.0, math.inf)


def test_without_price_or_estimate_nothing_is_wanted() -> None:
    assert wants(WallClock(), RESOLVED) is None
    assert wants(WallClock(), None, Price(1.0, 1.0, 1.0)) is None
    assert wants(StepPrice(100.0), None) is None


@pytest.mark.parametrize("price", [0.0, -1.0, math.inf, math.nan])
def test_a_price_out_of_range_is_refused(price: float) -> None:
    with pytest.raises(ValueError, match="policy.price is the samples that a step is worth, above 0"):
        StepPrice(price)


@pytest.mark.parametrize("calibration", [0.0, -1.0, math.inf, math.nan])
def test_a_calibration_out_of_range_is_refused(calibration: float) -> None:
    with pytest.raises(ValueError, match="policy.calibration must be above 0"):
        WallClock(calibration)
    with pytest.raises(ValueError, match="policy.calibration must be above 0"):
        StepPrice(100.0, calibration)
