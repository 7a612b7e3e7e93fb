"""The square-root allocation against brute force, and the forecast that it goes by."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adabatch.ledger import Decision, Ledger
from adabatch.noise import Estimate
from adabatch.policies import Curve, Facts, TargetEfficiency
from adabatch.policies.forecast import Growth, growth, remember, square_root_ratio
from adabatch.progress import Progress

RESOLVED = Estimate(
    signal=0.5, noise=50.0, scale=100.0, low=80.0, high=140.0, resolved=True, samples=4096, steps=64, memory=4096
)


def with_scale(scale: float) -> Estimate:
    return replace(RESOLVED, scale=scale, low=scale, high=scale)


# -- the optimum


def test_without_growth_the_square_root_is_the_proportional_batch() -> None:
    # The rest yields 500 of 1,000 samples: B / B_crit = 1 at every moment.
    assert square_root_ratio([1.0] * 8, 500.0, 1000.0, cap=2.0) == pytest.approx(1.0)


def test_growth_is_worth_more_now_than_later() -> None:
    # sum_i c / sqrt(factor_i) = 2 x 1, with 1/sqrt = 1 and 1/2: c = 4/3.
    assert square_root_ratio([1.0, 4.0], 500.0, 1000.0, cap=9.0) == pytest.approx(4 / 3)
    # Under a cap of 1.2 the first moment gives 0.8 less than it would; the ratio is the cap.
    assert square_root_ratio([1.0, 4.0], 500.0, 1000.0, cap=1.2) == pytest.approx(1.2)


def test_a_later_moment_at_the_cap_leaves_more_for_now() -> None:
    # B_crit falls to a quarter: sqrt gives c = 2/3 now and 4/3 then. With a cap of 1.1 then, 0.9 is left for now.
    assert square_root_ratio([1.0, 0.25], 500.0, 1000.0, cap=1.1) == pytest.approx(0.9)


def test_the_ends_of_what_can_be_spent() -> None:
    assert square_root_ratio([1.0], 500.0, 400.0, cap=2.0) == 0.0, "even tiny batches are not efficient enough"
    assert square_root_ratio([], 0.0, 400.0, cap=2.0) == 2.0, "all that is left may be wasted"
    assert square_root_ratio([1.0, 2.0], 1.0, 400.0, cap=2.0) == 2.0, "more than the cap can spend"


@given(
    st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12),
    st.floats(0.05, 0.95),
    st.floats(0.1, 20.0),
)
def test_the_capped_root_spends_what_there_is(factors: list[float], efficiency: float, cap: float) -> None:
    ratio = square_root_ratio(factors, 1000 * efficiency, 1000.0, cap)
    spare = 1 / efficiency - 1

    def spent(c: float) -> float:
        return sum(min(c / math.sqrt(factor), cap) for factor in factors) / len(factors)

    # ratio is min(c, cap): by bisection for c over the whole range. Where the cap spends too little, c has no bound.
    if cap <= spare:
        assert ratio == cap
        return
    low, high = 0.0, cap * math.sqrt(max(factors)) * 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) < spare else (low, middle)
    assert ratio == pytest.approx(min(low, cap), rel=1e-6)


@given(st.floats(2.0, 1000.0), st.floats(0.3, 0.9))
def test_no_other_split_of_two_halves_takes_fewer_steps(factor: float, efficiency: float) -> None:
    """Steps of half a clock: (1 / B_crit + 1 / B) dx. The root's are fewest among splits that spend as much."""
    spare = 1 / efficiency - 1
    first = square_root_ratio([1.0, factor], 1000 * efficiency, 1000.0, cap=1e9)

    def steps(now: float) -> float:
        later = (2 * spare - now) * factor  # in batches of today's critical one
        return 1 / now + 1 / later

    assert all(steps(first) <= steps(first * change) + 1e-12 for change in (0.9, 0.99, 1.01, 1.1) if first * change < 2 * spare)


# -- the forecast


def test_growth_is_read_from_a_history_that_shows_it() -> None:
    history: list[list[float]] = []
    for step in range(1, 41):
        history = remember(history, 100.0 * 1.5**step, with_scale(3.0 * (100.0 * 1.5**step) ** 0.8))
    found = growth(history)
    assert found.exponent == pytest.approx(0.8, abs=0.01)
    assert found.error < 0.05
    assert found.factor(100.0, 1600.0) == pytest.approx(16**found.exponent)
    assert found.describe().startswith("growth ~ samples^0.8")


def test_without_a_history_the_prior_holds() -> None:
    assert growth([]) == Growth(pytest.approx(0.47), pytest.approx(0.5))
    one = remember([], 1000.0, RESOLVED)
    assert growth(one) == Growth(pytest.approx(0.47), pytest.approx(0.5))


def test_a_history_keeps_one_point_for_each_root_of_two() -> None:
    history: list[list[float]] = []
    for clock in range(1, 4097):
        history = remember(history, float(clock), RESOLVED)
    assert len(history) <= 2 * 12 + 1
    assert history[-1][0] == pytest.approx(math.log(4096))
    assert remember(history, 5000.0, replace(RESOLVED, resolved=False, high=math.inf)) == history


def test_a_curve_is_interpolated_and_ends_flat() -> None:
    curve = Curve((10.0, 1000.0), (2.0, 200.0))
    assert [curve.at(clock) for clock in (1.0, 10.0, 100.0, 1000.0, 1e9)] == pytest.approx([2.0, 2.0, 20.0, 200.0, 200.0])
    assert curve.factor(10.0, 100.0) == pytest.approx(10.0)


def decision(sample: int, batch: int, scale: float, *, resolved: bool = True) -> Decision:
    estimate = replace(with_scale(scale), resolved=resolved).to_dict()
    return Decision(sample, sample, batch, batch, None, "", "target_efficiency", "grow", estimate)


def test_a_ledger_gives_its_curve_against_efficient_samples() -> None:
    ledger = Ledger(decisions=[decision(100, 100, 100.0), decision(150, 50, 9e9, resolved=False), decision(200, 50, 150.0)])
    # 100 samples at efficiency 1/2; then 100 at 1 / (1 + 50/150).
    curve = Curve.from_ledger(ledger)
    assert (curve.clocks, curve.scales) == (pytest.approx((50.0, 125.0)), (100.0, 150.0))
    with pytest.raises(ValueError, match="no resolved noise scale"):
        Curve.from_ledger(Ledger())


@pytest.mark.parametrize(("clocks", "scales"), [((), ()), ((1.0, 1.0), (1.0, 1.0)), ((0.0,), (1.0,)), ((1.0,), (0.0,))])
def test_a_curve_that_is_none_is_refused(clocks: tuple[float, ...], scales: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="a curve needs clocks that rise"):
        Curve(clocks, scales)


# -- the policy


def test_a_known_curve_gives_the_square_root_over_the_whole_run() -> None:
    """Walked through in small steps, the batch is c sqrt(B_crit) with one c, and the total efficiency is the target."""
    clocks = tuple(float(x) for x in range(1, 6001, 20))
    curve = Curve(clocks, tuple(100 * math.exp(math.log(100) * x / 5000) for x in clocks))
    policy = TargetEfficiency(0.5, allocation="sqrt", cap=100.0, repay=100.0, horizon=10_000, curve=curve)
    state, samples, ratios = policy.init(), 0, []
    while samples < 10_000:
        truth = curve.at(max(state["efficient"], 1.0))
        wanted = policy.value(state, Facts(Progress(0, samples), 1, with_scale(truth)))
        assert wanted is not None
        ratios.append(wanted.batch / math.sqrt(truth))
        samples += 10
        state = policy.update(state, Facts(Progress(0, samples), round(wanted.batch), with_scale(truth)), 10)
    assert state["efficient"] / samples == pytest.approx(0.5, abs=0.005)
    assert max(ratios[:-50]) / min(ratios[:-50]) < 1.03
    assert max(ratios) / min(ratios) < 1.1, "no leap at the end"


def test_an_unresolved_scale_is_no_reason_to_spend_early() -> None:
    policy = TargetEfficiency(0.5, allocation="sqrt", horizon=10_000)
    unresolved = replace(RESOLVED, scale=math.inf, low=30.0, high=math.inf, resolved=False)
    wanted = policy.value(policy.init(), Facts(Progress(), 16, unresolved))
    assert wanted is not None
    assert wanted.batch == wanted.low <= 30.0


def test_the_reason_tells_the_forecast() -> None:
    policy = TargetEfficiency(0.5, allocation="sqrt", horizon=10_000)
    wanted = policy.value(policy.init(), Facts(Progress(), 16, RESOLVED))
    assert wanted is not None
    assert wanted.reason == (
        "noise scale 100 [80, 140] at target efficiency 0.5 (uncalibrated), square-root allocation, "
        "growth ~ samples^0.47 [-0.51, 1.4]"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"allocation": "root"}, "one of proportional, sqrt, got 'root'"),
        ({"allocation": "sqrt"}, "set stop.samples, or use policy.allocation=proportional"),
        ({"allocation": "sqrt", "horizon": 100, "target": 0.2}, "raise the cap to 8"),
    ],
)
def test_a_square_root_that_cannot_be_had_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TargetEfficiency(**arguments)  # type: ignore[arg-type]
