"""The outline of a schedule against the controller's own walk through it, step by step."""

from __future__ import annotations

import math
from itertools import groupby

import pytest

from adabatch.controller import Controller
from adabatch.ledger import Decision, Ledger
from adabatch.plan import BatchLimits, BatchPlan
from adabatch.policies import Fixed, LateSwitch, Observe, Policy, Ramp, Replay, Seesaw, Stages, TargetEfficiency
from adabatch.progress import Budget
from adabatch.scaling import Scaling
from adabatch.schedules import Schedule
from adabatch.simulate import Cluster
from adabatch.simulate.outline import outline

COSINE = Schedule("cosine", horizon=20_000, warmup=1_000, final=0.1)


def recorded() -> Ledger:
    """Up, for a moment down, up again, and shortened to end: with the noise scale that a decision has recorded."""
    ledger = Ledger()
    estimate = dict(
        signal=1.0, noise=70.0, scale=70.0, low=60.0, high=90.0, resolved=True, samples=1, steps=1, memory=1
    )
    for batch, steps in ((16, 100), (48, 60), (16, 2), (48, 100), (80, 90)):
        if ledger.segments:
            place = ledger.steps, ledger.samples
            previous = ledger.segments[-1].global_batch
            ledger.record_decision(Decision(*place, previous, batch, 1.0, "so", "target_efficiency", "grow", estimate))
        for _ in range(steps):
            ledger.record_step(batch)
    ledger.record_step(33, partial=True)
    return ledger


POLICIES: dict[str, Policy] = {
    "fixed": Fixed(48),
    "stages": Stages.parse("0:16 1k:32 1016:16 4k:64 4100:32 19990:64"),
    "stages in tokens": Stages.parse("0:16 33000:32 40k:64", unit="tokens"),
    "ramp": Ramp(16, 64, 16, 7_000),
    "seesaw": Seesaw(16, COSINE, cap=16.0),
    "seesaw in powers": Seesaw(16, COSINE, cap=16.0, factor=2.0),
    "late switch": LateSwitch(16, 64, 15_000),
    "replay": Replay(recorded()),
}


def walked(policy: Policy, limits: BatchLimits, samples: int, rule: str) -> list[list[BatchPlan]]:
    """All plans of the run, in stretches of equal batches."""
    scaling = Scaling(rule, reference_batch=16)
    controller = Controller(
        policy, limits, scaling=scaling, schedule=COSINE, budget=Budget(samples), tokens_per_sample=7
    )
    plans = []
    while not controller.done:
        plans.append(controller.plan())
        controller.commit(plans[-1])
    return [list(equal) for _, equal in groupby(plans, key=lambda plan: (plan.global_batch, plan.scales))]


@pytest.mark.parametrize("rule", ["sqrt", "adascale"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_outline_is_the_walk(policy: Policy, rule: str) -> None:
    limits, samples = BatchLimits(4, micro_batch=4, max_batch=128), 20_000
    stretches = outline(
        policy, limits, samples=samples, scaling=Scaling(rule, 16), schedule=COSINE, tokens_per_sample=7
    )
    expected = walked(policy, limits, samples, rule)
    merged = [list(equal) for _, equal in groupby(stretches, key=lambda one: (one.plan.global_batch, one.plan.scales))]
    assert [sum(one.steps for one in equal) for equal in merged] == [len(plans) for plans in expected]
    for equal, plans in zip(merged, expected, strict=True):
        assert equal[0].plan == plans[0]
        assert equal[0].rates[0] == pytest.approx(plans[0].schedule * plans[0].scales.lr)
        assert equal[-1].rates[1] == pytest.approx(plans[-1].schedule * plans[-1].scales.lr)
    assert sum(one.samples for one in stretches) == samples


@pytest.mark.parametrize(("world", "micro_batches"), [(1, 8), (2, 4), (4, 2)])
def test_the_same_batch_on_other_ranks_is_split_into_fewer_micro_batches(world: int, micro_batches: int) -> None:
    (one,) = outline(Fixed(32), BatchLimits(world, micro_batch=4), samples=320)
    assert (one.plan.micro_batches, one.plan.micro_batch, one.steps) == (micro_batches, 4, 10)


def test_a_stage_begins_with_the_first_window_that_begins_in_it() -> None:
    stretches = outline(Stages.parse("0:16, 1k:32, 4k:64"), BatchLimits(), samples=8_000)
    found = [(one.plan.first_sample, one.plan.global_batch, one.steps) for one in stretches]
    assert found[:2] == [(0, 16, 63), (1008, 32, 94)], "sample 999 belongs to a window of 16 that began before 1000"
    assert found[2][:2] == (4016, 64)


def test_a_schedule_of_trillions_of_samples_takes_no_walk() -> None:
    stages = Stages.parse("0:768 250B:1536")
    first, second, last = outline(stages, BatchLimits(96, micro_batch=8, max_batch=4096), samples=10**12)
    assert first.steps == math.ceil(250e9 / 768)
    assert last.partial and first.samples + second.samples + last.samples == 10**12


def test_a_ledger_has_a_length_of_its_own_and_may_be_lengthened() -> None:
    ledger = recorded()
    limits = BatchLimits(3, micro_batch=8)
    own = outline(Replay(ledger), limits, samples=None)
    assert sum(one.samples for one in own) == ledger.samples
    assert [one.plan.global_batch for one in own] == [segment.global_batch for segment in ledger.segments]
    longer = outline(Replay(ledger), limits, samples=ledger.samples + 160)
    assert (longer[-1].plan.global_batch, longer[-1].samples) == (80, 160)


def test_times_are_the_clusters_or_those_handed_in() -> None:
    cluster = Cluster(ranks=2, per_sample=0.5, optimizer=1.0, node_latency=0.0)
    (one,) = outline(Fixed(16), BatchLimits(2, micro_batch=8), samples=160, cluster=cluster)
    assert one.seconds == pytest.approx(10 * (1.0 + 8 * 0.5))
    (one,) = outline(Fixed(16), BatchLimits(2, micro_batch=8), samples=160, seconds=lambda batch: batch / 4)
    assert one.seconds == 40.0
    (one,) = outline(Fixed(16), BatchLimits(2, micro_batch=8), samples=160)
    assert one.seconds is None


@pytest.mark.parametrize(
    ("policy", "samples", "words"),
    [
        (TargetEfficiency(), 1000, "adabatch simulate policy=target_efficiency"),
        (Observe(), 1000, "names no batch"),
        (Fixed(9), 1000, "cannot be made from 2 ranks x micro-batch 4"),
        (Fixed(8), None, "set stop.samples"),
    ],
)
def test_what_is_no_schedule_is_refused(policy: Policy, samples: int | None, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        outline(policy, BatchLimits(2, micro_batch=4), samples=samples)
    assert words in str(caught.value)
