"""Changes of the batch after which the loss regressed: what is called so, what is not, and what the controller does."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from simulated_run import Trace, simulate

from adabatch import regression
from adabatch.controller import Controller
from adabatch.ledger import Ledger
from adabatch.noise import Measurement, NoiseEstimator
from adabatch.plan import BatchLimits
from adabatch.policies import Damping, Replay, TargetEfficiency
from adabatch.progress import Budget
from adabatch.scaling import Scaling

WINDOWS = 16


def watched(
    loss: Callable[[int], float],
    *,
    noise: float = 2.0,
    before: int = 12,
    since: int = 12,
    batches: tuple[int, int] = (16, 32),
    seed: object = 0,
) -> regression.State:
    """The state after so many blocks with a batch, and then with another; a sample's loss has the given noise."""
    draws = random.Random(repr(seed))
    state, position = regression.init(), 0
    for index, batch in enumerate(batches):
        if index:
            state = regression.changed(state, batches[0], {"scale": 7.0})
        for _ in range((before, since)[index]):
            for _ in range(WINDOWS):
                state = regression.update(state, loss(position) + draws.gauss(0, noise / math.sqrt(batch)), batch)
                position += batch
            state = regression.close(state)
    return state


CHANGE = 12 * WINDOWS * 16


def falling(position: int) -> float:
    return 2 + 3 * math.exp(-position / 5_000)


def test_a_step_up_is_found_and_described() -> None:
    found = regression.value(watched(lambda at: 3.0 + 0.5 * (at >= CHANGE)))
    assert found is not None
    assert (found.previous, found.estimate, found.samples) == (16, {"scale": 7.0}, 12 * WINDOWS * 32)
    assert found.expected == pytest.approx(3.0, abs=0.15)
    assert found.loss == pytest.approx(3.5, abs=0.1)
    assert found.expected < found.limit < found.loss
    assert found.sentence(32).startswith("go back from 32 to 16: the mean training loss of the 6,144 samples since")


@pytest.mark.parametrize(
    ("loss", "most"),
    [
        (lambda at: 3.0, 2),
        (falling, 0),
        (lambda at: falling(min(at, CHANGE)), 10),  # progress stops at the change, and a line misses the curve before
        (lambda at: 3.0 + at / 500, 2),  # it rose before, and goes on rising
        (lambda at: 3.0 - 0.5 * (at >= CHANGE), 0),
    ],
)
def test_what_is_no_regression_is_hardly_ever_called_so(loss: Callable[[int], float], most: int) -> None:
    assert sum(regression.value(watched(loss, seed=seed)) is not None for seed in range(200)) <= most


def test_the_limit_is_exceeded_as_often_as_its_level_says() -> None:
    """Of a steady loss, at a level at which there is something to count: 5 % of 1000 runs are 50 ± 7."""
    above, quantile = 0, regression.student_quantile
    patch = pytest.MonkeyPatch()
    patch.setattr(regression, "student_quantile", lambda level, freedom: quantile(0.95, freedom))
    for seed in range(1000):
        above += regression.value(watched(lambda at: 3.0, before=8, since=8, seed=seed)) is not None
    patch.undo()
    assert 30 <= above <= 80


def test_a_small_step_needs_many_samples() -> None:
    def step(at: int) -> float:
        return 3.0 + 0.12 * (at >= CHANGE)

    early = sum(regression.value(watched(step, since=4, seed=seed)) is not None for seed in range(50))
    late = sum(regression.value(watched(step, since=15, seed=seed)) is not None for seed in range(50))
    assert early < late


def test_few_blocks_say_nothing() -> None:
    def loss(at: int) -> float:
        return 3.0 + 50.0 * (at >= 3 * WINDOWS * 16)

    assert regression.value(watched(loss, before=3)) is None
    assert regression.value(watched(lambda at: 3.0 + 50.0 * (at >= CHANGE), since=3)) is None


def test_a_change_that_was_watched_to_the_end_stands() -> None:
    state = watched(lambda at: 3.0 + 0.5 * (at >= CHANGE), since=regression.BLOCKS)
    assert state["previous"] is None and regression.value(state) is None
    assert len(state["before"]) == regression.BLOCKS and state["since"] == []


def test_without_noise_rounding_is_no_regression() -> None:
    for level in (0.1, 1.7, 3e5):
        assert regression.value(watched(lambda at: level, noise=0.0)) is None


def test_losses_that_are_no_numbers_count_for_nothing() -> None:
    state = regression.update(regression.init(), 2.0, 16)
    for loss in (math.nan, math.inf):
        assert regression.update(state, loss, 16) == state
    assert regression.close(regression.init()) == regression.init()


def test_waits_double_while_changes_are_undone_in_a_row() -> None:
    state, waits = regression.init(), []
    for sample in (1_000, 2_000, 3_000):
        state = regression.undone(regression.changed(state, 16, None), sample, 100)
        waits.append(state["hold_until"] - sample)
    assert waits == [100, 200, 400]
    stood = watched(falling, since=regression.BLOCKS)
    assert stood["waits"] == 0


def test_the_state_is_plain_json_and_the_functions_are_pure() -> None:
    state = watched(falling, since=5)
    text = json.dumps(state, allow_nan=False)
    assert json.loads(text) == state
    for step in (regression.close, lambda one: regression.update(one, 3.0, 8), lambda one: regression.undone(one, 9, 9)):
        step(state)
    assert json.dumps(state) == text


# -- in the controller

SAMPLES = 30_000
DWELL = 1_500


def run(*, rollback: bool = True, worse: float = 0.5, from_batch: int = 48, **more: Any) -> tuple[Controller, Trace]:
    """A run whose loss is worse at batches from ``from_batch`` on."""
    controller = built(rollback=rollback, **more)
    return controller, simulate(controller, lambda at: 400.0, seen=harmed(worse, from_batch))


def built(*, rollback: bool = True, **more: Any) -> Controller:
    settings: dict[str, Any] = {
        "limits": BatchLimits(1, 8),
        "start_batch": 16,
        "noise": NoiseEstimator(horizon=SAMPLES),
        "scaling": Scaling("adascale", 16),
        "damping": Damping(dwell=DWELL, rollback=rollback),
        "budget": Budget(samples=SAMPLES),
        "decide_every": 4,
    }
    return Controller(TargetEfficiency(0.5), **{**settings, **more})


def harmed(worse: float, from_batch: int) -> Callable[[Measurement], Measurement]:
    def seen(measurement: Measurement) -> Measurement:
        draws = random.Random(repr(measurement.mean_square))
        loss = 3.0 + worse * (measurement.samples >= from_batch) + draws.gauss(0, 1.0 / math.sqrt(measurement.samples))
        return replace(measurement, loss=loss)

    return seen


def test_a_change_that_harms_is_rolled_back_with_its_scales() -> None:
    controller, trace = run()
    back = [decision for decision in trace.decisions if decision.kind == "rollback"]
    assert len(back) >= 2
    for decision in back:
        assert (decision.previous, decision.changed, decision.wanted) == (64, True, None) and decision.batch == 32
        assert decision.reason.startswith("go back from 64 to 32: the mean training loss of the ")
    at = {plan.first_sample: plan for plan in trace.plans}
    # The scales are those of the plans before the change that was undone.
    for decision in back:
        change = max(
            one.sample for one in trace.decisions if one.changed and one.sample < decision.sample and one.batch == 64
        )
        before = max(sample for sample in at if sample < change)
        assert at[decision.sample].scales == at[before].scales


def test_the_next_attempt_waits_twice_as_long() -> None:
    _, trace = run()
    changes = [decision for decision in trace.decisions if decision.changed]
    waits = [
        later.sample - earlier.sample for earlier, later in zip(changes, changes[1:]) if earlier.kind == "rollback"
    ]
    assert len(waits) >= 2
    assert all(later > 1.5 * earlier for earlier, later in zip(waits, waits[1:]))
    assert any("since a change was rolled back" in decision.reason for decision in trace.decisions)


def test_it_is_off_by_default_and_changes_nothing_where_nothing_harms() -> None:
    assert not Damping().rollback
    _, off = run(rollback=False)
    assert "rollback" not in {decision.kind for decision in off.decisions}
    _, harmless = run(worse=0.0)
    _, harmless_off = run(worse=0.0, rollback=False)
    assert harmless.plans == harmless_off.plans


def test_a_resumed_run_rolls_back_as_the_straight_one() -> None:
    straight, trace = run()
    steps = next(index for index, plan in enumerate(trace.plans) if plan.global_batch == 64) + 6
    first = built()
    head = simulate(first, lambda at: 400.0, seen=harmed(0.5, 48), steps=steps)
    second = built()
    state = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    second.load_state_dict(state, Ledger.from_dict(json.loads(first.ledger.dumps())))
    tail = simulate(second, lambda at: 400.0, seen=harmed(0.5, 48))
    assert head.plans + tail.plans == trace.plans
    assert second.ledger.dumps() == straight.ledger.dumps()


def test_a_replay_follows_rollbacks_at_the_same_scales() -> None:
    controller, trace = run()
    replay = Controller(
        Replay(controller.ledger),
        limits=BatchLimits(1, 8),
        noise=NoiseEstimator(horizon=SAMPLES),
        scaling=Scaling("adascale", 16),
        budget=Budget(samples=SAMPLES),
        decide_every=4,
    )
    assert simulate(replay, lambda at: 400.0).plans == trace.plans


def test_a_batch_that_the_limits_no_longer_allow_is_not_gone_back_to() -> None:
    controller = built()
    while controller.batch < 64:
        simulate(controller, lambda at: 400.0, seen=harmed(0.5, 48), steps=1)
    controller.adopt(limits=BatchLimits(1, 8, min_batch=48))
    trace = simulate(controller, lambda at: 400.0, seen=harmed(0.5, 48))
    assert min(trace.batches) >= 48
    assert "rollback" not in {decision.kind for decision in trace.decisions}
