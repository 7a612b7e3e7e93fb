"""What every registered policy keeps to whatever it is told: bounds, damping, reasons, and that it is never stuck."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import astuple, replace
from itertools import pairwise
from typing import Any

import canonical
import pytest
from canonical import DAMPINGS, LIMITS, Scripted, Timed, changes, check_reason, controller_for, policy, scale, train
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import Trace, simulate

from adabatch.controller import Controller
from adabatch.ledger import Decision, Ledger
from adabatch.noise import Estimate
from adabatch.policies import POLICIES, Facts, Policy, Price, Replay, Situation
from adabatch.progress import Budget, Progress
from adabatch.scaling import RULES
from adabatch.throughput import Lap
from adabatch.verdicts import verdict

every_policy = pytest.mark.parametrize("name", sorted(POLICIES))

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
# Of the whole, and of the part before the last micro-batch.
SECONDS = st.one_of(st.sampled_from([math.nan, math.inf, -1.0, 0.0]), st.floats(-9, 6).map(lambda power: 10.0**power))
LAPS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=10)
THERMOMETRIC = {"drift": -1.0, "clipped": True}


@every_policy
@settings(max_examples=20)
@given(
    script=scripts,
    losses=st.lists(ANY_FLOAT, min_size=1, max_size=10),
    laps=LAPS,
    guards=st.sampled_from([{}, THERMOMETRIC]),
    rule=st.sampled_from(sorted(RULES)),
    damping=st.sampled_from(sorted(DAMPINGS)),
)
def test_no_evidence_leads_a_run_astray(
    name: str,
    script: tuple[Estimate | None, ...],
    losses: list[float],
    laps: list[tuple[float, float]],
    guards: dict[str, Any],
    rule: str,
    damping: str,
) -> None:
    subject = policy(name)
    noise, budget = Scripted(script), Budget(samples=100_000)
    controller = controller_for(subject, canonical.RULES[rule], damping, noise=noise, budget=budget)
    said = itertools.cycle(losses)
    trace = simulate(
        controller,
        scale,
        steps=150,
        seen=lambda measurement: replace(measurement, **guards),
        loss=lambda sample: next(said),
        lap=(lambda plan: Timed(Lap(*laps[plan.step % len(laps)]))) if "price" in subject.needs else None,
    )
    check_bounds(trace, subject)
    check_scales(trace)
    for change in changes(controller):
        check_reason(change)
    if subject.closed_loop:
        check_damping(changes(controller), controller)
    assert Ledger.from_dict(json.loads(controller.ledger.dumps())) == controller.ledger
    json.dumps(controller.state_dict(), allow_nan=False)


def check_bounds(trace: Trace, subject: Policy) -> None:
    if isinstance(subject, Replay):
        assert trace.batches == [subject.ledger.scheduled_batch(plan.first_sample) for plan in trace.plans]
    else:
        assert all(LIMITS.require(batch, "batch") == batch for batch in trace.batches)


def check_scales(trace: Trace) -> None:
    for plan in trace.plans:
        assert all(math.isfinite(value) and value > 0 for value in astuple(replace(plan.scales, second_moment=1.0)))


def check_damping(changes: list[Decision], controller: Controller) -> None:
    damping, needs = controller.damping, controller.policy.needs
    for earlier, later in pairwise(changes):
        assert later.sample - earlier.sample >= damping.dwell, "at most one change, and so one reversal, in a dwell"
    for since, change in zip([0, *(change.sample for change in changes)], changes):
        # From 16, there is no batch below 32.
        assert change.batch <= max(change.previous * damping.growth, LIMITS.ceil(change.previous + 1))
        assert change.batch >= min(change.previous / damping.growth, LIMITS.floor(change.previous - 1))
        assert change.batch > change.previous or not damping.monotone
        if "noise" in needs:
            assert change.estimate is not None
            renewed = change.sample - since >= change.estimate["memory"]
            # Where a price is not resolved, the wish is not either.
            assert renewed or not change.estimate["resolved"] or "price" in needs, "renewed in between"
            supported = change.estimate["resolved"] or change.batch > change.previous
            assert supported or not damping.interval_gate, "unresolved never shrinks"


AT_LEAST_0 = ANY_FLOAT.filter(lambda value: value >= 0)


@st.composite
def facts(draw: st.DrawFn) -> Facts:
    """Anything that could be known, of runs of any length: losses of any kind, prices down to 0 and up to inf."""
    batch = draw(st.sampled_from([4, 10, 16, 48, 192]))
    samples = draw(st.integers(0, 10**12))
    estimate, loss = draw(st.one_of(st.none(), sound_estimates())), draw(st.one_of(st.none(), ANY_FLOAT))
    low, value, high = sorted(draw(st.tuples(AT_LEAST_0, AT_LEAST_0, AT_LEAST_0)))
    price = Price(value, low, high) if draw(st.booleans()) else None
    return Facts(Progress(samples // batch, samples, samples), batch, estimate, loss, price)


@every_policy
@settings(max_examples=60)
@given(known=facts(), damping=st.sampled_from(sorted(DAMPINGS)), since=st.sampled_from([0, 199, 200, 10**6]))
def test_whatever_is_known_the_batch_can_be_made_and_the_reason_be_read(
    name: str, known: Facts, damping: str, since: int
) -> None:
    subject = policy(name)
    state = subject.update(subject.init(), known, known.batch)
    wanted = subject.value(state, known)
    if not subject.closed_loop:
        assert wanted is None or (math.isfinite(wanted.batch) and wanted.batch >= 1 and wanted.reason)
        return
    gates = DAMPINGS[damping]
    found = verdict(wanted, Situation(known.batch, since, 0, warming_up=False), gates, LIMITS)
    assert LIMITS.require(found.batch, "batch") == found.batch
    assert found.wanted is None or math.isfinite(found.wanted)
    assert found.reason.startswith(("grow ", "shrink ", "hold "))
    assert len(found.reason.split()) > 4
    if found.batch != known.batch:
        assert since >= gates.dwell
        assert f"{known.batch} to {found.batch}: " in found.reason
        assert wanted is not None and not math.isnan(wanted.batch)


# -- never stuck

LOSS, PRICE = 1.7, Price(48.0, 40.0, 60.0)
CLOSED_LOOP = sorted(name for name, kind in POLICIES.items() if kind.closed_loop)
BY_SCALE = [name for name in CLOSED_LOOP if POLICIES[name].needs == {"noise"}]
every_scale = pytest.mark.parametrize("scale_now", [0.0, 1e-3, 3.0, 21.0, 77.0, 160.0, 1e4, 1e12])


def resolved(scale_now: float) -> Estimate:
    return Estimate(1.0, scale_now, scale_now, 0.9 * scale_now, 1.1 * scale_now, True, 512, 16, 64)


def settled(name: str, estimate: Estimate) -> tuple[int, float]:
    """The batch that a run ends at under one estimate for ever, and the one that its policy wanted at first."""
    subject = policy(name)
    wanted = subject.value(subject.init(), Facts(Progress(), 10, estimate))
    controller = controller_for(subject, noise=Scripted((estimate,)), budget=Budget(), schedule=canonical.Schedule())
    simulate(controller, scale, steps=600)
    assert wanted is not None
    return controller.batch, wanted.batch


@pytest.mark.parametrize("name", BY_SCALE)
@every_scale
def test_a_resolved_scale_is_reached_in_a_run(name: str, scale_now: float) -> None:
    batch, wanted = settled(name, resolved(scale_now))
    assert LIMITS.realise(wanted) / 1.5 <= batch <= LIMITS.realise(wanted) * 1.5


@pytest.mark.parametrize("name", CLOSED_LOOP)
@pytest.mark.parametrize("damping", sorted(DAMPINGS))
@every_scale
def test_what_is_wanted_for_ever_is_reached_from_above_and_below(name: str, damping: str, scale_now: float) -> None:
    """In two hundred decisions, each a dwell and a memory after the one before."""
    subject = policy(name)
    for start_batch in (4, 10, 192):
        batch = start_batch
        for _ in range(200):
            known = Facts(Progress(1, 10**6), batch, resolved(scale_now), LOSS, PRICE)
            wanted = subject.value(subject.init(), known)
            batch = verdict(wanted, Situation(batch, 10**6, 64, warming_up=False), DAMPINGS[damping], LIMITS).batch
        assert wanted is not None
        aim = LIMITS.realise(wanted.batch)
        if damping == "monotone":
            aim = max(aim, start_batch)
        inside = wanted.low <= batch <= wanted.high and DAMPINGS[damping].interval_gate
        assert inside or aim / 1.5 <= batch <= aim * 1.5


@pytest.mark.parametrize("name", BY_SCALE)
@pytest.mark.parametrize("low", [3.0, 21.0, 77.0, 160.0, 1e4])
@pytest.mark.parametrize("memory", [64, 10**12])
def test_an_unresolved_scale_is_followed_as_far_as_its_lower_bound(name: str, low: float, memory: int) -> None:
    estimate = Estimate(-0.1, low, math.inf, low, math.inf, False, 512, 16, memory)
    batch, wanted = settled(name, estimate)
    assert max(10, LIMITS.realise(wanted) / 1.5) <= batch <= max(10, LIMITS.realise(wanted) * 1.5)


@pytest.mark.parametrize("name", [name for name in CLOSED_LOOP if "noise" not in POLICIES[name].needs])
def test_what_needs_no_noise_runs_without_measuring_it(name: str) -> None:
    measured, unmeasured = (controller_for(policy(name), noise=noise) for noise in (canonical.NoiseEstimator(), None))
    assert train(measured).batches == train(unmeasured).batches
    assert len(changes(unmeasured)) > 2
