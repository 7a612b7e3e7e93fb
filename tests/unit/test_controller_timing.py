"""Step times in the controller: read at due dates, of the slowest rank, and splits varied to learn a price."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from simulated_run import Ready, gaussian_window

from adabatch.controller import VARY_EVERY, Controller
from adabatch.ledger import Decision, Ledger
from adabatch.noise import NoiseEstimator
from adabatch.plan import BatchLimits, BatchPlan
from adabatch.policies import Damping, Observe, Policy, WallClock
from adabatch.throughput import Lap


@dataclass(slots=True)
class Machine:
    """Steps whose times follow the law exactly, and what was read of them."""

    fixed: float
    per_micro_batch: float = 0.002
    per_sample: float = 0.001
    read: list[int] = field(default_factory=list)

    def lap(self, plan: BatchPlan) -> Any:
        pieces = [self.per_micro_batch + self.per_sample * n for n in plan.pieces(plan.first_sample % plan.world)]
        return _Unread(self, plan.step, Lap(self.fixed + sum(pieces), sum(pieces[1:-1])))


@dataclass(frozen=True, slots=True)
class _Unread:
    machine: Machine
    step: int
    lap: Lap

    def read(self) -> Lap:
        self.machine.read.append(self.step)
        return self.lap


def controller(policy: Policy | None = None, **more: Any) -> Controller:
    settings = {
        "limits": BatchLimits(world=2, micro_batch=8, max_batch=4096),
        "start_batch": 16,
        "noise": NoiseEstimator(),
        "damping": Damping(),
        "decide_every": 16,
    }
    return Controller(policy or WallClock(), **{**settings, **more})


def train(
    run: Controller, machine: Machine, steps: int, scale: float = 400.0
) -> tuple[list[BatchPlan], list[Decision]]:
    """Windows of a known noise scale and steps of known times."""
    plans, decisions = [], []
    for _ in range(steps):
        plan = run.plan()
        decision = run.commit(plan, Ready(gaussian_window(plan.global_batch, scale, plan.step)), machine.lap(plan))
        plans.append(plan)
        decisions += [decision] if decision else []
    return plans, decisions


def test_step_times_are_read_when_a_decision_is_due_and_on_no_other_step() -> None:
    run, machine = controller(Observe()), Machine(0.05)
    train(run, machine, 15)
    run.state_dict()
    run.read()
    assert machine.read == [] and run.price is None
    train(run, machine, 1)
    assert machine.read == list(range(16)) and run.price is not None


def test_the_times_of_all_steps_travel_at_once_and_the_slowest_rank_counts() -> None:
    calls: list[list[float]] = []

    def slowest(values: list[float]) -> list[float]:
        """Another rank needs 0.014 s for each of the 2 quiet micro-batches; both wait for the end of the step."""
        calls.append(values)
        others = [0.09] * 16 + [2 * 0.014] if len(calls) % 2 else [2 * 0.014] * 16
        return [max(pair) for pair in zip(values, others, strict=True)]

    alone = controller(Observe(), start_batch=64)
    with_a_slower_one = controller(Observe(), start_batch=64, slowest=slowest)
    for run in (alone, with_a_slower_one):
        train(run, Machine(0.05), 32)
    assert [len(values) for values in calls] == [17, 16, 17, 16]
    assert calls[1] == [-math.inf] * 16, "this rank is not the slowest, and has nothing to say about its quiet times"
    assert alone.step_time.fixed == pytest.approx(0.05, rel=1e-3)
    # A step of 4 micro-batches takes 0.05 + 4 x 0.01 s: with micro-batches of 0.014 s the fixed part is less.
    assert with_a_slower_one.step_time.of_micro_batch(8) == pytest.approx(0.014, rel=1e-3)
    assert with_a_slower_one.step_time.fixed == pytest.approx(0.09 - 4 * 0.014, rel=1e-3)


def test_a_policy_that_asks_for_the_price_varies_the_split_until_it_is_known() -> None:
    run = controller(start_batch=16)
    plans, decisions = train(run, Machine(0.09), 400)
    varied = [plan for plan in plans if plan.varied]
    assert varied and all(plan.step % VARY_EVERY == VARY_EVERY // 2 for plan in varied)
    first = varied[0]
    assert first.step > 16 and (first.global_batch, first.micro_batch, first.micro_batches) == (16, 2, 4)
    assert sorted(n for rank in range(2) for n in first.pieces(rank)) == [2] * 8
    price = run.price
    assert price.value == pytest.approx(0.09 / 0.01 * 16, rel=0.01) and price.resolved
    # sqrt(144 x 400) = 240, within the rounding to 16 and the dead band of 1.2
    assert 240 / 1.25 < run.batch < 240 * 1.25
    assert not any(plan.varied for plan in plans[-100:])
    assert "price not resolved" in decisions[0].reason


def test_the_samples_of_a_varied_step_are_those_of_any_other() -> None:
    plans, _ = train(controller(), Machine(0.09), 100)
    assert [plan.first_sample for plan in plans[1:]] == [plan.last_sample for plan in plans[:-1]]


def test_nothing_is_varied_where_nobody_asks() -> None:
    run = controller(Observe())
    plans, _ = train(run, Machine(0.09), 100)
    assert not any(plan.varied for plan in plans)
    assert run.price.high == math.inf and run.batch == plans[0].global_batch


@pytest.mark.parametrize(
    ("limits", "start", "telling", "price"),
    [
        (BatchLimits(2, 8, rounding="whole", max_batch=4096), 16, 48, 0.09 / 0.01 * 16),
        (BatchLimits(2, 2, max_batch=4096), 4, 12, 0.09 / 0.004 * 4),
        (BatchLimits(2, 1, max_batch=4096), 2, 6, 0.09 / 0.003 * 2),
        (BatchLimits(2, 8, max_batch=4096), 4, 6, 0.09 / 0.01 * 16),
    ],
    ids=["whole micro-batches", "of two", "of one", "two samples on a rank"],
)
def test_a_batch_whose_steps_cannot_tell_the_price_grows_to_one_that_can(
    limits: BatchLimits, start: int, telling: int, price: float
) -> None:
    run = controller(limits=limits, start_batch=start)
    plans, decisions = train(run, Machine(0.09), 600)
    first = decisions[0]
    assert start < first.batch <= telling
    assert f"steps of {start} do not tell what is paid once per step, and those of {telling} will" in first.reason
    assert run.price.resolved and run.price.value == pytest.approx(price, rel=0.02)
    wanted = math.sqrt(price * 400)
    assert wanted / 1.25 < run.batch < wanted * 1.25


def test_a_bound_below_the_batch_that_would_tell_the_price_is_where_it_ends() -> None:
    run = controller(limits=BatchLimits(2, 8, rounding="whole", max_batch=16))
    _, decisions = train(run, Machine(0.09), 100)
    assert run.batch == 16 and not run.price.resolved
    assert "price not resolved" in decisions[-1].reason


def test_a_resumed_run_goes_on_with_the_same_splits_and_price() -> None:
    straight, cut = controller(), controller()
    whole, _ = train(straight, Machine(0.09), 160)
    before, _ = train(cut, Machine(0.09), 32)
    resumed = controller()
    state = json.loads(json.dumps(cut.state_dict(), allow_nan=False))
    resumed.load_state_dict(state, Ledger.from_dict(json.loads(cut.ledger.dumps())))
    assert resumed.price == cut.price
    after, _ = train(resumed, Machine(0.09), 16)
    assert [(p.step, p.micro_batch, p.varied) for p in before + after] == [
        (p.step, p.micro_batch, p.varied) for p in whole[:48]
    ]
    assert any(plan.varied for plan in after)


def test_on_another_number_of_ranks_times_are_taken_anew() -> None:
    run = controller(Observe(), start_batch=64)
    train(run, Machine(0.09), 32)
    state = json.loads(json.dumps(run.state_dict()))
    other = controller(Observe(), start_batch=64, limits=BatchLimits(4, 8))
    other.load_state_dict(state, run.ledger)
    assert run.price is not None and other.price is None


def test_a_state_from_before_there_were_step_times_can_be_gone_on_from() -> None:
    run = controller(Observe(), start_batch=64)
    train(run, Machine(0.09), 32)
    state = {key: value for key, value in run.state_dict().items() if key != "timed"}
    run.load_state_dict(state, run.ledger)
    assert run.price is None


def test_one_rank_that_measures_halves_small_windows_and_its_price_says_so() -> None:
    run = controller(Observe(), limits=BatchLimits(1, 8), start_batch=4)
    train(run, Machine(0.09), 64)
    assert run.price.high == math.inf  # two micro-batches of 2 samples, always: nothing tells their parts apart
    still = Damping(monotone=True, growth=1.5, dead_band=1.5)
    run = controller(WallClock(), limits=BatchLimits(1, 8), start_batch=4, damping=still)
    plans, _ = train(run, Machine(0.09), 128, scale=1e-3)
    assert any(plan.varied and plan.micro_batches == 4 for plan in plans)
    assert run.batch == 4 and run.price.value == pytest.approx((0.09 + 2 * 0.002) / 0.001, rel=0.02)


def test_a_policy_that_goes_by_the_price_refuses_steps_without_their_times() -> None:
    run = controller()
    with pytest.raises(ValueError, match=r"policy wall_clock goes by the time of each step, and step 0 came without"):
        run.commit(run.plan(), Ready(gaussian_window(16, 400.0, 0)))
    assert run.progress.steps == 0
