"""The step-time model, fitted to step times made up from known costs."""

from __future__ import annotations

import pytest

from adabatch.throughput import StepTime, fit_step_time


def test_two_accumulation_counts_give_both_costs() -> None:
    model = fit_step_time([(1, 10, 6.0), (4, 10, 9.0)])  # 0.6 s and 0.9 s per step
    assert model is not None
    assert (model.fixed, model.per_micro_batch) == (pytest.approx(0.5), pytest.approx(0.1))
    assert model.seconds(16) == pytest.approx(2.1)


def test_stalls_do_not_move_the_fit() -> None:
    usual = [(count, 5, 5 * (0.2 + 0.3 * count)) for count in (1, 2, 4) for _ in range(5)]
    stalled = [(1, 5, 90.0), (2, 5, 300.0), (4, 5, 60.0)]
    model = fit_step_time(usual + stalled)
    assert model is not None
    assert (model.fixed, model.per_micro_batch) == (pytest.approx(0.2), pytest.approx(0.3))


def test_counts_with_more_steps_weigh_more() -> None:
    # Off the line through the others: 1 micro-batch in 2 s, 2 in 3 s, 3 in 5 s.
    few = fit_step_time([(1, 100, 200.0), (2, 100, 300.0), (3, 1, 5.0)])
    many = fit_step_time([(1, 100, 200.0), (2, 100, 300.0), (3, 100, 500.0)])
    assert few is not None and many is not None
    assert few.per_micro_batch == pytest.approx(1.0, abs=0.05)
    assert many.per_micro_batch == pytest.approx(1.5)


@pytest.mark.parametrize(
    "observations", [[], [(2, 10, 5.0)], [(2, 10, 5.0), (2, 20, 11.0)], [(1, 0, 1.0), (2, 5, 1.0)]]
)
def test_one_accumulation_count_tells_nothing_apart(observations: list[tuple[float, float, float]]) -> None:
    assert fit_step_time(observations) is None


def test_costs_are_never_negative() -> None:
    # Slopes of -0.5 and of 3 with a fixed cost of -2: both are noise.
    assert fit_step_time([(1, 1, 2.0), (2, 1, 1.5)]) == StepTime(fixed=1.75, per_micro_batch=0.0)
    superlinear = fit_step_time([(1, 1, 1.0), (2, 1, 4.0)])
    assert superlinear is not None
    assert superlinear.fixed == pytest.approx(0.0)
    assert superlinear.per_micro_batch == pytest.approx(2.5 / 1.5)
