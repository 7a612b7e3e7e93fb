"""What every registered policy keeps to, under every registered rule and under estimates of any kind."""

from __future__ import annotations

import copy
import functools
import json
import math
from dataclasses import astuple
from itertools import pairwise

import canonical
import pytest
from canonical import DWELL, LIMITS, SAMPLES, Scripted, controller_for, saved_and_restored, scale
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import Trace, simulate

from adabatch.controller import Controller
from adabatch.ledger import Decision, Ledger
from adabatch.noise import Estimate
from adabatch.policies import POLICIES, Facts, Policy, Price, Replay
from adabatch.progress import Budget, Progress
from adabatch.scaling import RULES

every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
every_rule = pytest.mark.parametrize("rule", sorted(RULES))

ESTIMATE = Estimate(
    signal=1.0, noise=50.0, scale=50.0, low=40.0, high=65.0, resolved=True, samples=512, steps=16, memory=64
)
FACTS = Facts(Progress(16, 384), 24, ESTIMATE, loss=2.5, price=Price(30.0, 20.0, 50.0))


def policy(name: str) -> Policy:
    assert name in canonical.POLICIES, f"policy {name!r} is registered and has no canonical setting in canonical.py"
    return canonical.POLICIES[name]()


def run(name: str, rule: str) -> tuple[Trace, Controller]:
    controller = controller_for(policy(name), canonical.RULES[rule])
    return simulate(controller, scale), controller


straight_run = functools.cache(run)


def test_every_policy_and_every_rule_has_a_canonical_setting() -> None:
    assert set(canonical.POLICIES) == set(POLICIES)
    assert set(canonical.RULES) == set(RULES)


@every_policy
def test_a_policy_goes_by_its_registered_name(name: str) -> None:
    assert isinstance(policy(name), POLICIES[name])
    assert policy(name).name == name


@every_policy
def test_the_functions_of_a_policy_are_pure_and_its_state_is_json(name: str) -> None:
    subject = policy(name)
    first = subject.init()
    before = copy.deepcopy(first)
    second = subject.update(first, FACTS, 384)
    wanted = subject.value(second, FACTS)
    assert first == before == subject.init()
    for state in (first, second):
        assert json.loads(json.dumps(state, allow_nan=False)) == state
    assert subject.update(first, FACTS, 384) == second
    assert subject.value(second, FACTS) == wanted


@every_policy
@every_rule
def test_a_run_is_determined_by_its_settings(name: str, rule: str) -> None:
    (one, first), (other, second) = straight_run(name, rule), run(name, rule)
    assert one == other
    assert first.state_dict() == second.state_dict()
    assert sum(one.batches) == SAMPLES


@every_policy
@every_rule
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(name: str, rule: str) -> None:
    straight, ended = straight_run(name, rule)
    for share in (0.1, 0.7):
        steps = int(share * len(straight.plans))
        first = controller_for(policy(name), canonical.RULES[rule])
        head = simulate(first, scale, steps=steps)
        first.plan()
        second = saved_and_restored(first, controller_for(policy(name), canonical.RULES[rule]))
        tail = simulate(second, scale)
        assert head.plans + tail.plans == straight.plans
        assert head.decisions + tail.decisions == straight.decisions
        assert second.ledger.dumps() == ended.ledger.dumps()
        assert second.state_dict() == ended.state_dict()


@every_policy
def test_saving_what_was_restored_gives_the_same_bytes(name: str) -> None:
    first = controller_for(policy(name))
    simulate(first, scale, steps=50)
    text = json.dumps(first.state_dict())
    second = saved_and_restored(first, controller_for(policy(name)))
    assert json.dumps(second.state_dict()) == text
    assert second.ledger.dumps() == first.ledger.dumps()


@every_policy
@every_rule
def test_the_replay_of_a_ledger_plans_the_same_steps_at_the_same_scales(name: str, rule: str) -> None:
    original, controller = straight_run(name, rule)
    replay = controller_for(Replay(Ledger.from_dict(json.loads(controller.ledger.dumps()))), canonical.RULES[rule])
    replayed = simulate(replay, scale)
    assert replayed.plans == original.plans
    assert replay.ledger.diff(controller.ledger) == []
    # Half of the run replayed, and then the other half: the same again.
    half = controller_for(Replay(controller.ledger), canonical.RULES[rule])
    head = simulate(half, scale, steps=len(original.plans) // 2)
    tail = simulate(saved_and_restored(half, controller_for(Replay(controller.ledger), canonical.RULES[rule])), scale)
    assert head.plans + tail.plans == original.plans


# -- estimates of any kind

ANY_FLOAT = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 5e-324, 1e308]),
    st.floats(-6, 12).map(lambda power: 10.0**power),
)


@st.composite
def sound_estimates(draw: st.DrawFn) -> Estimate:
    """Estimates as the estimator makes them, of a scale that may jump by any factor."""
    value = 10.0 ** draw(st.floats(-2, 7))
    width = draw(st.floats(1.0, 3.0))
    if draw(st.booleans()):
        signal, top, resolved = draw(st.floats(-1, 1)), math.inf, False
        point = value * 2 if signal > 0 else math.inf
    else:
        signal, point, top, resolved = 1.0, value, value * width, True
    memory = draw(st.sampled_from([16, 640, 10**9]))
    return Estimate(signal, value, point, value / width, top, resolved, 512, 16, memory)


@st.composite
def senseless_estimates(draw: st.DrawFn) -> Estimate:
    return Estimate(*(draw(ANY_FLOAT) for _ in range(5)), draw(st.booleans()), 512, 16, 64)


scripts = st.lists(st.one_of(st.none(), sound_estimates(), senseless_estimates()), min_size=1, max_size=30).map(tuple)


@every_policy
@settings(max_examples=25)
@given(script=scripts, rule=st.sampled_from(sorted(RULES)))
def test_no_estimate_leads_a_run_astray(name: str, script: tuple[Estimate | None, ...], rule: str) -> None:
    subject = policy(name)
    controller = controller_for(subject, canonical.RULES[rule], noise=Scripted(script), budget=Budget(samples=100_000))
    trace = simulate(controller, scale, steps=150)
    check_bounds(trace, subject)
    check_scales(trace)
    changes = [decision for decision in controller.ledger.decisions if decision.changed]
    for change in changes:
        check_reason(change)
    if subject.closed_loop:
        check_damping(changes)
    assert Ledger.from_dict(json.loads(controller.ledger.dumps())) == controller.ledger
    json.dumps(controller.state_dict(), allow_nan=False)


def check_bounds(trace: Trace, subject: Policy) -> None:
    if isinstance(subject, Replay):
        assert trace.batches == [subject.ledger.scheduled_batch(plan.first_sample) for plan in trace.plans]
    else:
        assert all(LIMITS.require(batch, "batch") == batch for batch in trace.batches)


def check_scales(trace: Trace) -> None:
    for plan in trace.plans:
        assert all(math.isfinite(value) and value > 0 for value in astuple(plan.scales))


def check_reason(change: Decision) -> None:
    words = change.reason.split()
    assert len(words) >= 4, "a sentence"
    assert "\n" not in change.reason
    assert "nan" not in change.reason
    assert any(str(number) in change.reason.replace(",", "") for number in (change.batch, change.sample))


def check_damping(changes: list[Decision]) -> None:
    for earlier, later in pairwise(changes):
        assert later.sample - earlier.sample >= DWELL, "at most one change, and so one reversal, in a dwell"
    for since, change in zip([0, *(change.sample for change in changes)], changes):
        assert change.estimate is not None
        if change.estimate["resolved"]:
            assert change.sample - since >= change.estimate["memory"], "the estimate is renewed in between"
        else:
            assert change.batch > change.previous, "unresolved never shrinks"
        assert change.batch / change.previous <= 2.0
        assert change.previous / change.batch <= 2.0


# Those that follow the noise scale alone.
CLOSED_LOOP = sorted(name for name, kind in POLICIES.items() if kind.closed_loop and kind.needs == {"noise"})


def settled(name: str, estimate: Estimate) -> tuple[int, float]:
    """The batch that a policy ends at under one estimate for ever, and the one that it wanted at first."""
    subject = policy(name)
    wanted = subject.value(subject.init(), Facts(Progress(), 10, estimate))
    controller = controller_for(subject, noise=Scripted((estimate,)), budget=Budget(), schedule=canonical.Schedule())
    simulate(controller, scale, steps=600)
    assert wanted is not None
    return controller.batch, wanted.batch


@pytest.mark.parametrize("name", CLOSED_LOOP)
@pytest.mark.parametrize("scale_now", [0.0, 1e-3, 3.0, 21.0, 77.0, 160.0, 1e4, 1e12])
def test_a_resolved_scale_is_reached_from_above_and_below(name: str, scale_now: float) -> None:
    estimate = Estimate(1.0, scale_now, scale_now, 0.9 * scale_now, 1.1 * scale_now, True, 512, 16, 64)
    batch, wanted = settled(name, estimate)
    assert LIMITS.realise(wanted) / 1.5 <= batch <= LIMITS.realise(wanted) * 1.5


@pytest.mark.parametrize("name", CLOSED_LOOP)
@pytest.mark.parametrize("low", [3.0, 21.0, 77.0, 160.0, 1e4])
@pytest.mark.parametrize("memory", [64, 10**12])
def test_an_unresolved_scale_is_followed_as_far_as_its_lower_bound(name: str, low: float, memory: int) -> None:
    estimate = Estimate(-0.1, low, math.inf, low, math.inf, False, 512, 16, memory)
    batch, wanted = settled(name, estimate)
    assert max(10, LIMITS.realise(wanted) / 1.5) <= batch <= max(10, LIMITS.realise(wanted) * 1.5)
