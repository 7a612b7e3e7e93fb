"""Batches that are decided beforehand: ramps, the seesaw with the learning rate, late switches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adabatch.controller import Controller
from adabatch.plan import BatchLimits
from adabatch.policies import Facts, LateSwitch, Policy, Ramp, Seesaw, Stages
from adabatch.progress import Budget, Progress
from adabatch.scaling import Scaling
from adabatch.schedules import Schedule


def batch_at(policy: Policy, position: int, unit: str = "samples") -> float:
    wanted = policy.value(policy.init(), Facts(Progress(1, **{unit: position}), 1))
    assert wanted is not None
    return wanted.batch


def run(policy: Policy, samples: int, schedule: Schedule | None = None, **limits: int | str) -> Controller:
    """A run that measures nothing, to its end."""
    controller = Controller(
        policy,
        limits=BatchLimits(**{"world": 1, "micro_batch": 4, "rounding": "none", **limits}),  # type: ignore[arg-type]
        schedule=schedule or Schedule(),
        scaling=Scaling("sqrt", policy.batches[0]),
        budget=Budget(samples=samples),
        decide_every=10**6,
    )
    while not controller.done:
        controller.commit(controller.plan())
    return controller


# -- stages


def test_a_window_takes_the_batch_of_the_stage_in_which_it_begins_and_straddles_a_threshold_once() -> None:
    segments = run(Stages.parse("0:16, 1k:32, 4k:64"), 5_000).ledger.segments
    found = [(segment.global_batch, segment.first_sample) for segment in segments]
    assert found[:3] == [(16, 0), (32, 1008), (64, 4016)]
    stages = Stages.parse("0:16, 1k:32, 4k:64")
    assert [batch_at(stages, samples) for samples in (999, 1000)] == [16, 32]


@pytest.mark.parametrize(("text", "thresholds"), [
    ("0:768 250B:1536", (0, 250 * 10**9)),
    ("0:1 1K:2 1M:3 1B:4 1T:5", (0, 10**3, 10**6, 10**9, 10**12)),
    ("0:1, 1.5k:2, 2m:3", (0, 1_500, 2_000_000)),
])  # fmt: skip
def test_suffixes_of_thresholds(text: str, thresholds: tuple[int, ...]) -> None:
    assert tuple(start for start, _ in Stages.parse(text, "tokens").stages) == thresholds


# -- the ramp


def megatron(first: int, final: int, increment: int, length: int, consumed: int) -> int:
    """What ``--rampup-batch-size first increment length`` runs at, as its documentation describes it: the increments
    spread evenly over the length, and the final batch from then on."""
    if consumed > length:
        return final
    per_increment = length / ((final - first) / increment)
    return min(first + math.floor(consumed / per_increment) * increment, final)


def test_the_documented_example_of_a_ramp() -> None:
    """256, in increments of 128, to 1024 over 50 M samples: six increments."""
    ramp = Ramp(256, 1024, 128, 50_000_000)
    sixth = 50_000_000 / 6
    places = [0, math.floor(sixth), math.ceil(sixth), math.ceil(3 * sixth), 49_999_999, 50_000_000, 10**12]
    assert [batch_at(ramp, place) for place in places] == [256, 256, 384, 640, 896, 1024, 1024]
    assert ramp.batches == (256, 384, 512, 640, 768, 896, 1024)


@given(st.integers(1, 512), st.integers(1, 64), st.integers(1, 40), st.integers(0, 2000))
def test_a_ramp_is_that_of_megatron(first: int, increment: int, increments: int, place: int) -> None:
    length = 1024 * increments  # so that floats are exact
    final = first + increments * increment
    for unit in ("samples", "tokens"):
        ramp = Ramp(first, final, increment, length, unit)
        assert batch_at(ramp, place * 37, unit) == megatron(first, final, increment, length, place * 37)


# -- the seesaw


@dataclass(frozen=True, slots=True)
class QuarterWave:
    """A cosine that falls over a quarter of its wave, to 0."""

    horizon: int
    warmup: int = 0
    unit: str = "samples"

    def value(self, position: float) -> float:
        if position < self.warmup:
            return position / self.warmup
        return max(math.cos(math.pi / 2 * (position - self.warmup) / (self.horizon - self.warmup)), 0.0)


SAMPLES, FIRST = 400_000, 32


@pytest.mark.parametrize(
    ("schedule", "share"), [(QuarterWave(SAMPLES), 1 - 2 / math.pi), (Schedule("cosine", horizon=SAMPLES), 0.5)]
)
def test_the_seesaw_saves_the_share_of_steps_that_the_schedule_loses(schedule: Schedule, share: float) -> None:
    steps = run(Seesaw(FIRST, schedule, cap=1000.0), SAMPLES, schedule).ledger.steps
    assert 1 - steps * FIRST / SAMPLES == pytest.approx(share, abs=0.005)


def test_under_a_cap_it_saves_what_the_capped_schedule_does() -> None:
    schedule, cap = QuarterWave(SAMPLES), 4.0
    steps = run(Seesaw(FIRST, schedule, cap), SAMPLES, schedule).ledger.steps
    reached = math.acos(1 / cap)  # there 1/cos is the cap
    expected = 2 / math.pi * (math.sin(reached) + (math.pi / 2 - reached) / cap)
    assert steps * FIRST / SAMPLES == pytest.approx(expected, abs=0.005)


def test_under_the_square_root_rule_the_rate_falls_by_the_root() -> None:
    schedule = Schedule("cosine", horizon=SAMPLES, warmup=SAMPLES // 10)
    controller = Controller(
        Seesaw(FIRST, schedule, cap=8.0),
        limits=BatchLimits(1, 4, rounding="none"),
        schedule=schedule,
        scaling=Scaling("sqrt", FIRST),
        budget=Budget(samples=SAMPLES),
        decide_every=10**6,
    )
    while not controller.done:
        plan = controller.plan()
        controller.commit(plan)
        rate, share = plan.schedule * plan.scales.lr, plan.schedule
        if plan.first_sample < schedule.warmup or share > 0.999:
            assert (plan.global_batch, rate) == (FIRST, share)
        elif share > 1 / 8 and not controller.done:
            assert rate == pytest.approx(math.sqrt(share), rel=0.01)
            assert plan.global_batch == pytest.approx(FIRST / share, rel=0.02)
        elif not controller.done:
            assert rate == pytest.approx(share * math.sqrt(plan.global_batch / FIRST))
            assert plan.global_batch <= 8 * FIRST


def test_in_steps_of_a_factor_the_batch_doubles_where_the_schedule_has_halved() -> None:
    schedule = Schedule("linear", horizon=1024)
    seesaw = Seesaw(FIRST, schedule, cap=16.0, factor=2.0)
    places = [0, 511, 512, 767, 768, 896, 960, 1000, 1024]
    assert [batch_at(seesaw, place) for place in places] == [32, 32, 64, 64, 128, 256, 512, 512, 512]
    assert batch_at(Seesaw(FIRST, schedule, cap=5.0, factor=2.0), 1024) == 128


def test_the_seesaw_reads_the_schedule_in_its_own_unit() -> None:
    seesaw = Seesaw(FIRST, Schedule("linear", horizon=1000, warmup=100, unit="tokens"))
    assert batch_at(seesaw, 550, "tokens") == pytest.approx(2 * FIRST)
    assert batch_at(seesaw, 550, "samples") == FIRST


def test_what_the_ranks_make_of_it_is_said() -> None:
    schedule = Schedule("linear", horizon=1000)
    ledger = run(Seesaw(FIRST, schedule), 1000, schedule, rounding="micro_batch", micro_batch=16).ledger
    change = next(decision for decision in ledger.decisions if decision.changed)
    assert change.wanted is not None and change.batch % 16 == 0 != change.wanted % 16
    assert f"of its peak: batch {change.wanted:,.6g}; the ranks can make {change.batch}" in change.reason


# -- the late switch


def test_the_batch_switches_once() -> None:
    ledger = run(LateSwitch(32, 80, at=3_000), 4_000).ledger
    found = [(segment.global_batch, segment.first_sample) for segment in ledger.segments]
    assert found[:2] == [(32, 0), (80, 3008)]
    assert batch_at(LateSwitch(32, 80, at=3_000, unit="tokens"), 3_000, "tokens") == 80
    reasons = [decision.reason for decision in ledger.decisions if decision.batch == 80]
    assert reasons == ["from 3,000 samples: batch 80"]


# -- what is refused


@dataclass(frozen=True, slots=True)
class Nothing:
    """A learning rate of 0."""

    warmup: int = 10
    unit: str = "samples"

    def value(self, position: float) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Ramp(16, 60, 16, 100), "final_batch=60 .*first_batch=16 .*increments of 16: 48 or 64 would be"),
        (lambda: Ramp(16, 16, 16, 100), "32 or 48 would be"),
        (lambda: Ramp(64, 16, 16, 100), "80 or 96 would be"),
        (lambda: Ramp(0, 16, 16, 100), "must be at least 1, got 0, 16 and 100"),
        (lambda: Ramp(16, 32, 16, 0), "got 16, 16 and 0"),
        (lambda: Ramp(16, 32, 16, 100, "steps"), "samples or tokens, got 'steps'"),
        (lambda: Seesaw(0, Schedule()), "first_batch must be at least 1, got 0"),
        (lambda: Seesaw(16, Schedule(), cap=1.0), "got 1.0 and None"),
        (lambda: Seesaw(16, Schedule(), cap=math.inf), "got inf and None"),
        (lambda: Seesaw(16, Schedule(), cap=4.0, factor=8.0), "at most the cap .or null., got 4.0 and 8.0"),
        (lambda: Seesaw(16, Nothing()), "there it is 0.0; give a schedule that is above 0 at 10 samples"),
        (lambda: LateSwitch(16, 32, 0), "got 16, 32 and 0; for one batch throughout there is policy=fixed"),
        (lambda: LateSwitch(16, 0, 100), "got 16, 0 and 100"),
        (lambda: LateSwitch(16, 32, 100, "steps"), "got 'steps'"),
    ],
)
def test_schedules_that_are_none_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
