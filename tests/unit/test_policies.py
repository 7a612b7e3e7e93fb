"""Which batch is wanted, and what the gates let through."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adabatch.ledger import Decision, Ledger
from adabatch.noise import Estimate
from adabatch.policies import (
    Damping,
    Facts,
    Fixed,
    Observe,
    Proposal,
    Replay,
    Situation,
    Stages,
    TargetEfficiency,
    Wanted,
    describe_scale,
    supported_scale,
)
from adabatch.progress import Progress

RESOLVED = Estimate(
    signal=0.5, noise=50.0, scale=100.0, low=80.0, high=140.0, resolved=True, samples=4096, steps=64, memory=4096
)
UNRESOLVED = replace(RESOLVED, signal=-0.1, scale=math.inf, low=30.0, high=math.inf, resolved=False)


def wants(policy: TargetEfficiency, estimate: Estimate, state: dict[str, float] | None = None) -> Wanted:
    wanted = policy.value(state or policy.init(), Facts(Progress(), 16, estimate))
    assert wanted is not None
    return wanted


# -- target efficiency


@pytest.mark.parametrize(("target", "batch"), [(0.5, 100.0), (0.8, 25.0), (0.9, 100 / 9), (0.2, 400.0)])
def test_the_target_sets_the_batch_against_the_critical_one(target: float, batch: float) -> None:
    wanted = wants(TargetEfficiency(target), RESOLVED)
    assert (wanted.batch, wanted.low, wanted.high) == pytest.approx((batch, 0.8 * batch, 1.4 * batch))
    assert wanted.resolved


def test_calibration_turns_the_noise_scale_into_the_critical_batch() -> None:
    assert wants(TargetEfficiency(0.5, calibration=2.0), RESOLVED).batch == pytest.approx(200.0)
    assert "(uncalibrated)" in wants(TargetEfficiency(0.5), RESOLVED).reason
    assert "(uncalibrated)" not in wants(TargetEfficiency(0.5, calibration=2.0), RESOLVED).reason


def test_an_unresolved_scale_counts_as_its_lower_bound() -> None:
    wanted = wants(TargetEfficiency(0.5), UNRESOLVED)
    assert (wanted.batch, wanted.low, wanted.high, wanted.resolved) == (30.0, 30.0, math.inf, False)
    assert supported_scale(UNRESOLVED) == 30.0
    assert describe_scale(UNRESOLVED) == "noise scale above 30 (unresolved)"
    assert describe_scale(RESOLVED) == "noise scale 100 [80, 140]"


def test_without_an_estimate_nothing_is_wanted_and_nothing_is_accounted() -> None:
    policy = TargetEfficiency(0.5)
    assert policy.value(policy.init(), Facts(Progress(), 16, None)) is None
    assert policy.update(policy.init(), Facts(Progress(), 16, None), 256) == policy.init()


def test_samples_spent_too_efficiently_are_paid_back() -> None:
    # Batch 82 at noise scale 100 has efficiency 100/182. To average 1/2 over as many samples again, 82/182 is asked
    # for, which is the batch 100 * 100/82.
    policy = TargetEfficiency(0.5)
    state = policy.update(policy.init(), Facts(Progress(), 82, RESOLVED), 1000)
    assert wants(policy, RESOLVED, state).batch == pytest.approx(10_000 / 82)
    state = policy.update(state, Facts(Progress(), 82, RESOLVED), 500)
    assert wants(policy, RESOLVED, state).batch == pytest.approx(10_000 / 82), "the account is a mean"
    state = policy.update(policy.init(), Facts(Progress(), 100, RESOLVED), 1000)
    assert wants(policy, RESOLVED, state).batch == pytest.approx(100.0)


@pytest.mark.parametrize(("batch", "wanted"), [(1, 200.0), (10_000, 50.0)])
def test_a_debt_moves_the_batch_by_a_bounded_factor(batch: int, wanted: float) -> None:
    policy = TargetEfficiency(0.5)
    state = policy.update(policy.init(), Facts(Progress(), batch, RESOLVED), 1000)
    assert wants(policy, RESOLVED, state).batch == pytest.approx(wanted)
    steady = TargetEfficiency(0.5, repay=1.0)
    assert wants(steady, RESOLVED, state).batch == pytest.approx(100.0)


def test_a_surplus_that_cannot_be_spent_within_the_same_samples_moves_it_as_far_as_allowed() -> None:
    policy = TargetEfficiency(0.2)  # the batch 1 has 0.99: to average 0.2, less than nothing is asked for
    state = policy.update(policy.init(), Facts(Progress(), 1, RESOLVED), 1000)
    assert wants(policy, RESOLVED, state).batch == pytest.approx(2 * 400.0)


def test_no_debt_moves_an_unresolved_batch_beyond_what_its_lower_bound_supports() -> None:
    policy = TargetEfficiency(0.5)
    state = policy.update(policy.init(), Facts(Progress(), 1, UNRESOLVED), 1000)
    assert wants(policy, UNRESOLVED, state).low == 30.0
    state = policy.update(policy.init(), Facts(Progress(), 10_000, UNRESOLVED), 1000)
    assert wants(policy, UNRESOLVED, state).low == 15.0


def test_another_target_does_not_reckon_up_the_past() -> None:
    before, after = TargetEfficiency(0.5), TargetEfficiency(0.8)
    state = before.update(before.init(), Facts(Progress(), 100, RESOLVED), 100_000)
    assert wants(after, RESOLVED, state).batch == pytest.approx(25.0)


@given(st.floats(0.05, 0.95), st.floats(0.1, 10.0), st.integers(1, 10**5), st.floats(1.0, 1e6))
def test_the_wanted_batch_delivers_the_target(target: float, calibration: float, samples: int, scale: float) -> None:
    policy = TargetEfficiency(target, calibration)
    estimate = replace(RESOLVED, scale=scale, low=scale, high=scale)
    batch = wants(policy, estimate).batch
    assert 1 / (1 + batch / (calibration * scale)) == pytest.approx(target)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": 0.0}, "strictly between 0 and 1, got 0.0"),
        ({"target": 1.0}, "got 1.0"),
        ({"calibration": 0.0}, "got 0.0 and 2.0"),
        ({"repay": 0.5}, "got 1.0 and 0.5"),
        ({"target": math.nan}, "got nan"),
    ],
)
def test_target_settings_out_of_range_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TargetEfficiency(**arguments)


# -- open-loop policies


def test_stages_are_read_and_begin_at_their_thresholds() -> None:
    policy = Stages.parse("0:16, 1k:32 4k:64")
    assert policy.stages == ((0, 16), (1000, 32), (4000, 64))
    assert policy.batches == (16, 32, 64)

    def batch_at(samples: int) -> float:
        return policy.value({}, Facts(Progress(1, samples), 1, None)).batch

    assert [batch_at(samples) for samples in (0, 999, 1000, 3999, 4000, 10**12)] == [16, 16, 32, 32, 64, 64]


def test_stages_in_tokens_go_by_tokens() -> None:
    policy = Stages.parse("0:768, 250B:1536", unit="tokens")
    early, late = Progress(1, 10**9, 250 * 10**9 - 1), Progress(1, 10**9, 250 * 10**9)
    assert policy.value({}, Facts(early, 1, None)).batch == 768
    assert policy.value({}, Facts(late, 1, None)).batch == 1536


@pytest.mark.parametrize(
    ("text", "unit", "message"),
    [
        ("", "samples", r"must begin at 0 and rise strictly, got thresholds \[\]"),
        ("1k:16", "samples", r"thresholds \[1000\]"),
        ("0:16, 2k:32, 1k:64", "samples", r"thresholds \[0, 2000, 1000\]"),
        ("0:16, 0:32", "samples", r"thresholds \[0, 0\]"),
        ("0:16, 1k:0", "samples", r"at least 1, got \[0\]"),
        ("0:16, 1k", "samples", "'1k' is no pair of threshold:batch"),
        ("0:16, x:32", "samples", "cannot read 'x' as a count"),
        ("0:16", "steps", "samples or tokens, got 'steps'"),
    ],
)
def test_stages_that_are_no_schedule_are_refused(text: str, unit: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Stages.parse(text, unit)


def test_fixed_and_observe() -> None:
    assert Fixed(48).value({}, Facts(Progress(), 16, UNRESOLVED)).batch == 48
    assert Fixed(48).batches == (48,)
    assert Observe().value({}, Facts(Progress(), 16, RESOLVED)) is None


def test_replay_follows_the_ledger_and_its_recorded_estimates() -> None:
    ledger = Ledger()
    for batch in (10, 10, 13):
        ledger.record_step(batch)
    estimate = RESOLVED.to_dict()
    ledger.record_decision(Decision(2, 20, 10, 13, 13.0, "grown", "target_efficiency", "grow", estimate))
    policy = Replay(ledger)
    batches = [policy.value({}, Facts(Progress(0, s), 1, None)).batch for s in (0, 19, 20, 33, 999)]
    assert batches == [10, 10, 13, 13, 13]
    assert (policy.recorded_estimate(19), policy.recorded_estimate(20)) == (None, estimate)
    with pytest.raises(ValueError, match="no step to replay"):
        Replay(Ledger())


# -- gates


def pass_through(
    wanted: Wanted, *, batch: int = 64, since: int = 10**6, memory: int = 0, warming_up: bool = False, **damping: float
) -> Proposal:
    return Damping(**damping).propose(wanted, Situation(batch, since, memory, warming_up))  # type: ignore[arg-type]


def supported(batch: float, width: float = 1.1) -> Wanted:
    return Wanted(batch, batch / width, batch * width, "the scale")


def unresolved(low: float) -> Wanted:
    return Wanted(low, low, math.inf, "the scale")


def test_a_supported_change_goes_through() -> None:
    assert pass_through(supported(100)) == Proposal(100, most=128, least=32)
    assert pass_through(supported(40)) == Proposal(40, most=128, least=32)


def test_one_decision_moves_by_a_bounded_factor() -> None:
    up, down = pass_through(supported(1000)), pass_through(supported(1))
    assert (up.batch, up.notes) == (128, ("at most x2 per decision",))
    assert (down.batch, down.notes) == (32, ("at most x2 per decision",))
    assert pass_through(supported(1000), growth=1.5).batch == 96
    assert pass_through(supported(math.inf)).batch == 128
    assert pass_through(supported(0)).batch == 32


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        (supported(76), "dead_band"),
        (supported(54), "dead_band"),
        (supported(100, width=1.6), "interval"),
        (supported(40, width=1.65), "interval"),
        (unresolved(64), "unresolved"),
        (unresolved(0), "unresolved"),
        (unresolved(70), "dead_band"),
        (Wanted(math.nan, 90, 110, ""), "invalid"),
        (Wanted(100, math.nan, 110, ""), "invalid"),
        (Wanted(-5, -10, 0, ""), "invalid"),
    ],
)
def test_what_the_evidence_does_not_support_is_held(wanted: Wanted, kind: str) -> None:
    proposal = pass_through(wanted)
    assert proposal.batch == 64
    assert proposal.held is not None
    assert proposal.held[0] == kind


def test_unresolved_grows_to_its_lower_bound_and_is_not_rounded_above_it() -> None:
    proposal = pass_through(unresolved(90))
    assert (proposal.batch, proposal.most, proposal.held) == (90, 90, None)
    assert proposal.notes == ("as far as the lower bound supports",)
    assert pass_through(unresolved(5000)).batch == 128


@given(st.floats(0, 1e9), st.integers(2, 10**6))
def test_unresolved_never_shrinks(low: float, batch: int) -> None:
    assert pass_through(unresolved(low), batch=batch).batch >= batch


def test_without_the_interval_gate_the_point_is_followed() -> None:
    assert pass_through(supported(100, width=10), interval_gate=False).batch == 100


def test_a_change_waits_for_the_dwell() -> None:
    held = pass_through(supported(100), since=999, dwell=1000).held
    assert held == ("dwell", "within 1,000 samples of the last change")
    assert pass_through(supported(100), since=1000, dwell=1000).held is None


def test_a_resolved_estimate_is_renewed_before_the_next_change() -> None:
    assert pass_through(supported(100), since=1999, memory=2000, dwell=1000).held is not None
    assert pass_through(supported(100), since=2000, memory=2000, dwell=1000).held is None


def test_growth_from_the_lower_bound_does_not_wait_for_the_memory() -> None:
    # The memory that an unresolved estimate aims for has no bound; waiting for it would never leave a small batch.
    assert pass_through(unresolved(100), since=1000, memory=10**9, dwell=1000).batch == 100
    assert pass_through(unresolved(100), since=999, memory=10**9, dwell=1000).held is not None


def test_no_growth_while_the_learning_rate_warms_up() -> None:
    held = pass_through(supported(100), warming_up=True).held
    assert held is not None and held[0] == "warmup"
    assert pass_through(supported(40), warming_up=True).batch == 40
    assert pass_through(supported(100), warming_up=True, warmup_guard=False).batch == 100


def test_monotone_runs_never_shrink() -> None:
    held = pass_through(supported(40), monotone=True).held
    assert held is not None and held[0] == "monotone"
    assert pass_through(supported(100), monotone=True).batch == 100


@pytest.mark.parametrize("arguments", [{"growth": 1.4}, {"growth": math.inf}, {"dead_band": 0.9}, {"dead_band": 2.5}, {"dwell": -1}])
def test_damping_out_of_range_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=" ".join(f"{name} {value}" for name, value in arguments.items())):
        Damping(**arguments)  # type: ignore[arg-type]
