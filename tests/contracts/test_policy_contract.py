"""What every registered policy keeps to, under every registered rule, every damping and any number of ranks."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import canonical
import pytest
from canonical import (
    DAMPINGS,
    LIMITS,
    SAMPLES,
    changes,
    check_reason,
    controller_for,
    policy,
    saved_and_restored,
    train,
)
from simulated_run import Trace

from adabatch.controller import Controller
from adabatch.ledger import Ledger
from adabatch.noise import Estimate, Measurement
from adabatch.plan import BatchLimits, BatchPlan
from adabatch.policies import POLICIES, Facts, Price, Replay
from adabatch.progress import Progress
from adabatch.scaling import RULES

every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
# Open-loop policies pass no gate.
every_run = pytest.mark.parametrize(
    ("name", "damping"),
    [
        (name, damping)
        for name in sorted(POLICIES)
        for damping in DAMPINGS
        if POLICIES[name].closed_loop or damping == "default"
    ],
)

ESTIMATE = Estimate(
    signal=1.0, noise=50.0, scale=50.0, low=40.0, high=65.0, resolved=True, samples=512, steps=16, memory=64
)
FACTS = Facts(Progress(16, 384), 24, ESTIMATE, loss=2.5, price=Price(30.0, 20.0, 50.0))


@functools.cache
def straight_run(name: str, rule: str, damping: str = "default") -> tuple[Trace, Controller]:
    controller = controller_for(policy(name), canonical.RULES[rule], damping)
    return train(controller), controller


def test_every_policy_and_every_rule_has_a_canonical_setting() -> None:
    assert set(canonical.POLICIES) == set(POLICIES)
    assert set(canonical.RULES) == set(RULES)


@pytest.mark.parametrize("name", sorted(name for name in POLICIES if name not in ("observe", "fixed")))
def test_the_canonical_run_changes_its_batch(name: str) -> None:
    assert len(set(straight_run(name, "sqrt")[0].batches)) > 1


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
def test_what_a_policy_says_that_it_needs_is_what_it_cannot_do_without(name: str) -> None:
    subject = policy(name)
    given = {"noise": {"estimate": ESTIMATE}, "loss": {"loss": 2.5}, "price": {"price": FACTS.price}}
    enough = {key: value for need in subject.needs for key, value in given[need].items()}
    bare = subject.value(subject.init(), Facts(Progress(16, 384), 24, **enough))
    assert bare == subject.value(subject.init(), FACTS)
    assert (bare is None) == (name == "observe")
    for need in subject.needs:
        lacking = {key: value for key, value in enough.items() if key not in given[need]}
        assert subject.value(subject.init(), Facts(Progress(16, 384), 24, **lacking)) is None


@every_run
@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_run_that_is_stopped_twice_goes_on_as_if_it_had_not_been(name: str, damping: str, rule: str) -> None:
    def fresh() -> Controller:
        return controller_for(policy(name), canonical.RULES[rule], damping)

    straight, ended = straight_run(name, rule, damping)
    assert sum(straight.batches) == SAMPLES
    controller, plans, decisions = fresh(), [], []
    # A new process warms up again before its steps are timed: a price that is not known yet is known later then, splits
    # are varied at other steps, and the price has another interval.
    timed = "price" in controller.policy.needs
    for share in (0.7, 0.8, 1.0) if timed else (0.1, 0.7, 1.0):
        part = train(controller, steps=int(share * len(straight.plans)) - len(plans))
        plans, decisions = plans + part.plans, decisions + part.decisions
        if not controller.done:
            controller.plan()
            controller = saved_and_restored(controller, fresh())
    if timed:
        assert [unvaried(plan) for plan in plans] == [unvaried(plan) for plan in straight.plans]
    else:
        assert plans == straight.plans
        assert decisions == straight.decisions
        assert controller.ledger.dumps() == ended.ledger.dumps()
        assert controller.state_dict() == ended.state_dict()


def untimed(controller: Controller) -> dict[str, Any]:
    return {key: value for key, value in controller.state_dict().items() if key != "timed"}


@every_policy
def test_saving_what_was_restored_gives_the_same_bytes(name: str) -> None:
    first = controller_for(policy(name))
    train(first, steps=50)
    text = json.dumps(untimed(first))
    second = saved_and_restored(first, controller_for(policy(name)))
    assert json.dumps(untimed(second)) == text
    assert second.ledger.dumps() == first.ledger.dumps()


@every_run
@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_replay_of_a_ledger_plans_the_same_steps_at_the_same_scales(name: str, damping: str, rule: str) -> None:
    """Replayed to the half, restored, and replayed to the end."""
    original, controller = straight_run(name, rule, damping)
    ledger = Ledger.from_dict(json.loads(controller.ledger.dumps()))

    def replay() -> Controller:
        return controller_for(Replay(ledger), canonical.RULES[rule], damping)

    half = replay()
    head = train(half, steps=len(original.plans) // 2)
    whole = saved_and_restored(half, replay())
    replayed = head.plans + train(whole).plans
    if "price" in policy(name).needs:  # the splits by which it learns the price are no part of the schedule
        assert [unvaried(plan) for plan in replayed] == [unvaried(plan) for plan in original.plans]
    else:
        assert replayed == original.plans
    assert whole.ledger.diff(controller.ledger) == []


def unvaried(plan: BatchPlan) -> BatchPlan:
    """The plan, however it is split."""
    return replace(plan, micro_batch=0, micro_batches=0, varied=False)


# -- several ranks


class Ranks:
    """What passes between simulated ranks that run one after another: rank 0's word, and the times of the slowest."""

    def __init__(self) -> None:
        self.words: list[Any] = []
        self.times: list[list[float]] = []

    def joined(self, name: str, damping: str, rank: int) -> Controller:
        words, times = iter(self.words), iter(self.times)
        agree: Callable[[Any], Any] = (lambda _: next(words)) if rank else self._say
        slowest: Callable[[list[float]], list[float]] = (lambda _: next(times)) if rank else self._time
        return controller_for(policy(name), canonical.RULES["adascale"], damping, agree=agree, slowest=slowest)

    def _say(self, word: Any) -> Any:
        self.words.append(word)
        return json.loads(json.dumps(word))

    def _time(self, times: list[float]) -> list[float]:
        self.times.append(times)
        return times


@every_run
def test_all_ranks_do_what_rank_0_decides_whatever_they_read_themselves(name: str, damping: str) -> None:
    ranks = Ranks()
    first = ranks.joined(name, damping, 0)
    trace = train(first)
    assert trace.plans == straight_run(name, "adascale", damping)[0].plans
    for rank in (3, 1):
        other = ranks.joined(name, damping, rank)

        def seen(measurement: Measurement, factor: float = 1.0 + 0.2 * rank) -> Measurement:
            return replace(measurement, group_square=measurement.group_square * factor, loss=measurement.loss * factor)

        assert train(other, seen=seen).plans == trace.plans
        assert other.ledger.dumps() == first.ledger.dumps()


RANKS = 16_384


@every_policy
def test_16384_ranks(name: str) -> None:
    unit = RANKS // LIMITS.world
    limits = BatchLimits(RANKS, LIMITS.micro_batch, 3 * unit, 200 * unit)
    controller = controller_for(policy(name, unit), canonical.RULES["none"], unit=unit, limits=limits)
    trace = train(controller, unit)
    assert sum(trace.batches) == SAMPLES * unit
    assert controller.policy.exact or all(limits.require(batch, "batch") for batch in trace.batches[:-1])
    for plan in {plan.global_batch: plan for plan in trace.plans}.values():
        shares = [plan.share(rank) for rank in range(RANKS)]
        assert sum(shares) == plan.global_batch and max(shares) - min(shares) <= 1
        assert plan.pieces(RANKS - 1)[0] <= LIMITS.micro_batch
    for change in changes(controller):
        check_reason(change)
