"""A controller that goes on under another policy, limits or damping, as if it had been saved and resumed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from adabatch.controller import Controller
from adabatch.ledger import Ledger
from adabatch.noise import Measurement, NoiseEstimator
from adabatch.plan import BatchLimits, BatchPlan
from adabatch.policies import Damping, Fixed, Stages, TargetEfficiency
from adabatch.progress import Budget
from adabatch.scaling import Scaling

LIMITS = BatchLimits(world=2, micro_batch=4, min_batch=8, max_batch=512)
EAGER = Damping(dwell=0, interval_gate=False, growth=4.0, dead_band=1.0)


class Seen:
    """A window's measurement with a noise scale near 100, drawn for its step: the same in every run."""

    def __init__(self, plan: BatchPlan) -> None:
        draw = random.Random(plan.step)
        signal, noise = 1 + draw.gauss(0, 0.2), 100 * (1 + draw.gauss(0, 0.1))
        share = signal + noise * plan.world / plan.global_batch
        self.measurement = Measurement(
            samples=plan.global_batch,
            groups=plan.world,
            mean_square=signal + noise / plan.global_batch,
            group_square=share / plan.world,
            weight_square=1 / plan.world,
            weight=plan.global_batch,
            loss=1.0,
        )

    def read(self) -> Measurement:
        return self.measurement


def controller(**changed: Any) -> Controller:
    parts = {
        "policy": TargetEfficiency(0.5),
        "limits": LIMITS,
        "start_batch": 16,
        "noise": NoiseEstimator(horizon=100_000),
        "scaling": Scaling("sqrt", reference_batch=16),
        "damping": EAGER,
        "budget": Budget(samples=100_000),
        "tokens_per_sample": 1,
        "decide_every": 4,
    }
    return Controller(**{**parts, **changed})


def steps(run: Controller, count: int) -> None:
    for _ in range(count):
        plan = run.plan()
        run.commit(plan, Seen(plan))


def saved(run: Controller) -> tuple[Any, Ledger]:
    state, ledger = json.loads(json.dumps([run.state_dict(), run.ledger.to_dict()]))
    return state, Ledger.from_dict(ledger)


CHANGES = {
    "another target": {"policy": TargetEfficiency(0.8)},
    "limits below the present batch": {"limits": BatchLimits(2, 4, 8, 24)},
    "limits above it": {"limits": BatchLimits(2, 4, 256, 512)},
    "a fixed batch": {"policy": Fixed(72)},
    "stages": {"policy": Stages(((0, 16), (2_000, 40)))},
    "damping": {"damping": Damping(dwell=4_000)},
    "decisions": {"decide_every": 3},
    "all of it": {"policy": TargetEfficiency(0.3), "limits": BatchLimits(2, 4, 8, 24), "damping": Damping(dwell=500)},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("at", [12, 14], ids=["when due", "between"])
def test_a_live_change_is_a_resume_under_the_change(change: dict[str, Any], at: int) -> None:
    live = controller()
    steps(live, at)
    state, ledger = saved(live)
    past = list(ledger.segments)
    live.adopt(**change)
    resumed = controller(**change)
    resumed.load_state_dict(state, ledger)
    assert live.batch == resumed.batch
    for run in (live, resumed):
        steps(run, 60)
    assert saved(live) == saved(resumed)
    steady = controller()
    steps(steady, at + 60)
    assert live.ledger.segments != steady.ledger.segments or "decide_every" in change, "the change changes something"
    assert [live.ledger.batch_at_step(step) for step in range(at)] == [Ledger(past).batch_at_step(s) for s in range(at)]


def decided(run: Controller) -> int:
    return sum(decision.count for decision in run.ledger.decisions)


@pytest.mark.parametrize("resumed", [False, True], ids=["live", "resumed"])
@pytest.mark.parametrize(
    ("change", "steps_apart", "batch"),
    [({"limits": BatchLimits(2, 4, 8, 24)}, 8, 24), ({"decide_every": 2}, 2, 512)],
    ids=["a smaller batch", "more often"],
)
def test_the_next_decision_is_no_further_away_than_the_new_settings_say(
    change: dict[str, Any], steps_apart: int, batch: int, resumed: bool
) -> None:
    more = {"limits": BatchLimits(2, 4, 512, 512), "start_batch": 512, "decide_every": 8}
    run = controller(**more)
    steps(run, 9)
    if resumed:
        state = saved(run)
        run = controller(**{**more, **change})
        run.load_state_dict(*state)
    else:
        run.adopt(**change)
    before, since = decided(run), run.progress.samples
    steps(run, steps_apart - 1)
    assert decided(run) == before
    steps(run, 1)
    assert decided(run) == before + 1
    assert run.progress.samples == since + steps_apart * batch


def test_a_policy_there_and_back_begins_afresh() -> None:
    run = controller()
    steps(run, 40)
    account = saved(run)[0]["policy"]["state"]
    run.adopt(policy=Fixed(16))
    run.adopt(policy=TargetEfficiency(0.5))
    fresh = saved(run)[0]
    assert fresh["policy"]["state"] == TargetEfficiency(0.5).init() != account
    assert fresh["memory"]["accounted"] == run.progress.samples


def test_a_plan_that_was_not_carried_out_is_planned_again() -> None:
    run = controller()
    steps(run, 8)
    old = run.plan()
    run.adopt(policy=Fixed(72))
    assert run.plan().global_batch == 72
    with pytest.raises(ValueError, match="not one of step|takes the plan"):
        run.commit(old)


REFUSED = {
    "outside the bounds": ({"policy": Fixed(1024)}, "outside limits.min_batch=8 .. limits.max_batch=512"),
    "not makeable": ({"policy": Fixed(18)}, "cannot be made from 2 ranks"),
    "another micro-batch": ({"limits": BatchLimits(2, 8, 8, 512)}, "the micro-batch and the rounding stay"),
    "no decisions": ({"decide_every": 0}, "at least 1, got 0"),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_changes_nothing(change: dict[str, Any], words: str) -> None:
    run, other = controller(), controller()
    steps(run, 12)
    steps(other, 12)
    with pytest.raises(ValueError, match=words):
        run.adopt(**{"damping": Damping(dwell=10**6), **change})
    for one in (run, other):
        steps(one, 40)
    assert saved(run) == saved(other)


def test_a_policy_that_needs_a_measurement_is_refused_where_there_is_none() -> None:
    unmeasured = controller(policy=Fixed(16), noise=None)
    with pytest.raises(ValueError, match="noise=None measures none"):
        unmeasured.adopt(policy=TargetEfficiency(0.5))
    single = controller(policy=Fixed(1), limits=BatchLimits(1, 4, 1, 512), start_batch=1)
    steps_of_one = single.plan()
    single.commit(steps_of_one)
    with pytest.raises(ValueError, match="a global batch of 1 is one group"):
        single.adopt(policy=TargetEfficiency(0.5))
    assert single.policy == Fixed(1) and single.plan().global_batch == 1
