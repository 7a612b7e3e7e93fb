"""Learning-rate schedules as closed forms of samples or tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adabatch.schedules import SHAPES, Schedule

TRILLION = 10**12


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    horizon = draw(st.integers(2, TRILLION))
    return Schedule(
        shape=draw(st.sampled_from(SHAPES)),
        horizon=horizon,
        warmup=draw(st.integers(0, horizon - 1)),
        final=draw(st.floats(0, 1)),
        decay_share=draw(st.floats(0.01, 1)),
    )


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Schedule("cosine", 100), {0: 1.0, 25: (2 + math.sqrt(2)) / 4, 50: 0.5, 100: 0.0, 110: 0.0, 120: 0.0}),
        (Schedule("cosine", 100, final=0.1), {0: 1.0, 50: 0.55, 100: 0.1, 110: 0.1, 10**15: 0.1}),
        (Schedule("cosine", 110, warmup=10), {0: 0.0, 5: 0.5, 10: 1.0, 60: 0.5, 110: 0.0}),
        (Schedule("linear", 100, final=0.2), {0: 1.0, 25: 0.8, 75: 0.4, 100: 0.2, 101: 0.2}),
        (Schedule("linear", 120, warmup=20), {10: 0.5, 20: 1.0, 70: 0.5, 120: 0.0}),
        (Schedule("wsd", 1000), {0: 1.0, 800: 1.0, 900: 0.5, 1000: 0.0, 1100: 0.0}),
        (Schedule("wsd", 1000, warmup=900), {450: 0.5, 900: 1.0, 950: 0.5, 1000: 0.0}),
        (Schedule("wsd", 1000, final=0.1, decay_share=0.5), {500: 1.0, 750: 0.55, 1000: 0.1}),
        (Schedule("constant", warmup=8), {0: 0.0, 4: 0.5, 8: 1.0, 10**15: 1.0}),
        (Schedule(), {0: 1.0, 5: 1.0}),
    ],
)
def test_values_by_hand(schedule: Schedule, values: dict[int, float]) -> None:
    assert {position: schedule.value(position) for position in values} == pytest.approx(values, abs=1e-15)


def test_positions_are_exact_at_a_trillion() -> None:
    linear, cosine = Schedule("linear", TRILLION), Schedule("cosine", TRILLION)
    assert linear.value(TRILLION - 1) == 1e-12
    assert linear.value(TRILLION // 4) == 0.75
    assert cosine.value(TRILLION // 4) == pytest.approx((2 + math.sqrt(2)) / 4, abs=1e-12)
    assert cosine.value(TRILLION - 10) == pytest.approx((math.pi / 2 * 1e-11) ** 2, rel=1e-12)
    assert linear.value(TRILLION) == cosine.value(TRILLION) == 0.0


@given(schedules(), st.floats(0, 2e12))
def test_a_value_lies_between_the_final_one_and_the_configured_rate(schedule: Schedule, position: float) -> None:
    lowest = 0.0 if position < schedule.warmup else 1.0 if schedule.shape == "constant" else schedule.final
    assert lowest - 1e-12 <= schedule.value(position) <= 1.0 + 1e-12


@given(schedules(), st.floats(0, 1e12), st.floats(0, 1e12))
def test_it_rises_in_the_warm_up_and_never_again(schedule: Schedule, position: float, further: float) -> None:
    first, second = sorted((schedule.warmup + position, schedule.warmup + position + further))
    assert schedule.value(second) <= schedule.value(first) + 1e-12


def test_the_decay_has_a_beginning() -> None:
    wsd, cosine = Schedule("wsd", 1000, warmup=100), Schedule("cosine", 1000, warmup=100)
    assert [wsd.decaying(position) for position in (50, 800, 801, 2000)] == [False, False, True, True]
    assert [cosine.decaying(position) for position in (50, 100, 101)] == [False, False, True]
    assert not Schedule("constant", 1000).decaying(2000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": "step"}, "constant, cosine, linear, wsd, got 'step'"),
        ({"unit": "steps"}, r"samples or tokens \(steps change length\), got 'steps'"),
        ({"shape": "cosine"}, "none is known: set stop.samples"),
        ({"shape": "cosine", "horizon": 100, "warmup": 100}, r"warmup=100 must lie in \[0, horizon=100\)"),
        ({"warmup": -1}, "warmup=-1"),
        ({"final": 1.5}, "got 1.5 and 0.2"),
        ({"decay_share": 0.0}, "got 0.0 and 0.0"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**arguments)  # type: ignore[arg-type]
