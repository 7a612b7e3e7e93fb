"""The one stateful joint: planning, committing, deciding when due, saving and going on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from simulated_run import Ready, gaussian_window, not_finite, simulate

from adabatch.alignment import Alignment, AlignmentEstimator, Reading
from adabatch.controller import Controller, TooManySkipped
from adabatch.ledger import Ledger
from adabatch.noise import Measurement, NoiseEstimator
from adabatch.plan import BatchLimits
from adabatch.policies import Damping, Fixed, Observe, Policy, Replay, Stages, TargetEfficiency
from adabatch.progress import Budget, Progress
from adabatch.scaling import Scaling
from adabatch.schedules import Schedule


def controller(policy: Policy | None = None, *, world: int = 1, micro_batch: int = 8, **more: Any) -> Controller:
    defaults = {"start_batch": 16, "noise": NoiseEstimator(), "limits": BatchLimits(world, micro_batch)}
    return Controller(policy or TargetEfficiency(0.5), **{**defaults, **more})


def flat(samples: int) -> float:
    return 200.0


def restored(saved: Controller, into: Controller) -> Controller:
    """``into``, gone on from what ``saved`` wrote."""
    state = json.loads(json.dumps(saved.state_dict(), allow_nan=False))
    into.load_state_dict(state, Ledger.from_dict(json.loads(saved.ledger.dumps())))
    return into


@dataclass(slots=True)
class Watched:
    """A measurement that notes when it was read."""

    value: Measurement
    log: list[int] = field(default_factory=list)
    step: int = 0

    def read(self) -> Measurement:
        self.log.append(self.step)
        return self.value


# -- plan, then commit


def test_a_plan_stays_the_same_until_it_is_committed() -> None:
    run = controller(Fixed(16))
    plan = run.plan()
    assert run.plan() is plan
    assert (plan.step, plan.first_sample, plan.global_batch) == (0, 0, 16)
    run.commit(plan)
    assert (run.plan().step, run.plan().first_sample) == (1, 16)
    assert (run.ledger.steps, run.ledger.samples, run.progress) == (1, 16, Progress(1, 16))


def test_commit_refuses_what_is_not_the_current_plan() -> None:
    run, other = controller(Fixed(16)), controller(Fixed(16))
    plan = run.plan()
    for foreign in (other.plan(), replace(plan), replace(plan, global_batch=8)):
        with pytest.raises(ValueError, match="plan of step 0 that plan"):
            run.commit(foreign)
    assert run.progress == Progress()
    run.commit(plan)
    with pytest.raises(ValueError, match="plan of step 1 .* not one of step 0"):
        run.commit(plan)
    assert run.progress == Progress(1, 16)


def test_a_plan_that_was_not_committed_never_happened() -> None:
    run = controller(Fixed(16))
    run.commit(run.plan())
    run.plan()
    again = restored(run, controller(Fixed(16)))
    assert again.plan() == run.plan()
    assert again.ledger == run.ledger


def test_the_last_window_ends_at_the_budget() -> None:
    run = controller(Fixed(16), budget=Budget(samples=40))
    trace = simulate(run, flat)
    assert trace.batches == [16, 16, 8]
    assert [(s.global_batch, s.partial) for s in run.ledger.segments] == [(16, False), (8, True)]
    assert run.done
    with pytest.raises(RuntimeError, match="the run is done"):
        run.plan()


def test_a_budget_in_tokens_takes_whole_samples() -> None:
    run = controller(Fixed(16), budget=Budget(tokens=1000), tokens_per_sample=48)
    assert simulate(run, flat).batches == [16, 5]  # 1000 / 48 = 20.8
    assert run.progress == Progress(2, 21, 1008)


@pytest.mark.parametrize("batch", [2, 8, 16, 64])
def test_what_remains_does_not_depend_on_the_batch(batch: int) -> None:
    # 300 of 1000 samples taken at batch 2; whatever the batch afterwards, 700 are left.
    first = controller(Fixed(2), budget=Budget(samples=1000))
    simulate(first, flat, steps=150)
    second = restored(first, controller(Fixed(batch), budget=Budget(samples=1000)))
    assert sum(simulate(second, flat).batches) == 700


def test_the_schedule_is_read_in_the_middle_of_the_window() -> None:
    run = controller(Fixed(16), schedule=Schedule("linear", 64, warmup=16))
    assert [plan.schedule for plan in simulate(run, flat, steps=4).plans] == pytest.approx([0.5, 5 / 6, 0.5, 1 / 6])
    tokens = controller(Fixed(16), schedule=Schedule("linear", 640, unit="tokens"), tokens_per_sample=10)
    assert [plan.schedule for plan in simulate(tokens, flat, steps=2).plans] == pytest.approx([0.875, 0.625])


def test_scales_belong_to_the_realised_batch() -> None:
    run = controller(Fixed(16), scaling=Scaling("sqrt", 4), budget=Budget(samples=17))
    assert [(plan.scales.kappa, plan.scales.lr) for plan in simulate(run, flat).plans] == [(4.0, 2.0), (0.25, 0.5)]


def test_a_window_of_one_sample_is_not_measured() -> None:
    run = controller(Fixed(16), budget=Budget(samples=17))
    assert [plan.measure for plan in simulate(run, flat).plans] == [True, False]
    assert not controller(Fixed(16), noise=None).plan().measure


# -- when decisions are made


def test_decisions_are_made_on_due_dates_only() -> None:
    run = controller(decide_every=10)
    steps_when_due = []
    for _ in range(400):
        due, plan = run.due, run.plan()
        decision = run.commit(plan, Ready(gaussian_window(plan.global_batch, 200.0, plan.step)))
        assert (decision is not None) == due
        if decision is not None:
            assert (decision.step, decision.sample) == (plan.step + 1, plan.last_sample)
            steps_when_due.append(plan.step + 1)
    assert steps_when_due == list(range(10, 401, 10))
    assert sum(decision.count for decision in run.ledger.decisions) == 40


def test_the_device_is_read_when_a_decision_is_due_and_in_order() -> None:
    run, log = controller(decide_every=4), []
    for step in range(9):
        run.commit(run.plan(), Watched(gaussian_window(16, 200.0, step), log, step))
        assert log == list(range((step + 1) // 4 * 4))
    run.read()
    assert log == list(range(9))
    run.read()
    assert log == list(range(9))


@pytest.mark.parametrize("policy", [TargetEfficiency(0.5), Stages.parse("0:16, 1k:32, 2k:64")])
def test_every_rank_follows_what_the_first_one_decided(policy: Policy) -> None:
    messages: list[str] = []

    def tell(value: Any) -> Any:
        messages.append(json.dumps(value))
        return value

    first = controller(policy, decide_every=8, scaling=Scaling("adascale", 16), agree=tell)
    second = controller(
        policy, decide_every=8, scaling=Scaling("adascale", 16), agree=lambda value: json.loads(messages.pop(0))
    )
    for step in range(300):
        for rank, run in enumerate((first, second)):
            plan = run.plan()
            run.commit(plan, Ready(gaussian_window(plan.global_batch, 200.0, (rank, step))))
        assert first.plan() == second.plan()
        assert not messages, "both ranks ask for agreement at the same steps"
    assert first.batch > 16
    assert first.ledger == second.ledger


def test_a_decision_says_what_was_wanted_and_why() -> None:
    run = controller(damping=Damping(dwell=0))
    changed = next(decision for decision in simulate(run, flat, steps=200).decisions if decision.changed)
    assert (changed.previous, changed.batch, changed.kind, changed.policy) == (16, 32, "grow", "target_efficiency")
    assert changed.reason.startswith("grow 16 to 32: noise scale")
    assert changed.reason.endswith("at most x2 per decision")
    assert changed.estimate is not None and changed.wanted == pytest.approx(changed.estimate["scale"], rel=1.0)
    assert json.loads(run.ledger.dumps())["decisions"]


def test_open_loop_policies_decide_where_the_schedule_changes() -> None:
    run = controller(Stages.parse("0:16, 1k:32, 4k:64"))
    trace = simulate(run, flat, steps=200)
    assert [batch for plan, batch in zip(trace.plans, trace.batches) if plan.first_sample < 1000] == [16] * 63
    assert [(d.sample, d.previous, d.batch, d.kind) for d in trace.decisions] == [
        (1008, 16, 32, "schedule"),
        (4016, 32, 64, "schedule"),
    ]
    assert trace.decisions[0].reason == "stage from 1,000 samples: batch 32"


def test_observe_measures_and_never_moves() -> None:
    run = controller(Observe())
    trace = simulate(run, flat, steps=300)
    assert set(trace.batches) == {16}
    assert trace.decisions == []
    assert run.estimate is not None
    assert 100 < run.estimate.scale < 400


def test_the_controller_runs_alone_on_numbers() -> None:
    run = controller(decide_every=1, damping=Damping())
    # Two equal groups with |g_bar|^2 = 1 + 2/B and sum p^2 |g|^2 = 1/2 + 2/B: G^2 = 1 and S = 2 at every batch.
    for _ in range(200):
        batch = run.plan().global_batch
        run.commit(run.plan(), Ready(Measurement(batch, 2, 1 + 2 / batch, 0.5 + 2 / batch, 0.5, batch, 0.0)))
    assert run.estimate is not None
    assert (run.estimate.scale, run.batch) == (pytest.approx(2.0), 2)


def test_a_closed_loop_never_shrinks_to_what_it_cannot_measure() -> None:
    run = controller(damping=Damping())
    simulate(run, lambda samples: 0.2, steps=3000)
    assert run.batch == 2
    simulate(run, lambda samples: 100.0, steps=3000)
    assert run.batch > 20


def test_rounding_overshoots_neither_the_growth_nor_the_lower_bound() -> None:
    # From 14 on, twice as much is 28; with multiples of 16 the nearest, 32, would be more.
    run = controller(world=2, start_batch=14, damping=Damping())
    trace = simulate(run, lambda samples: 5000.0, steps=400)
    changes = [(d.previous, d.batch) for d in trace.decisions if d.changed]
    assert changes[0] == (14, 16)
    assert all(batch <= 2 * previous for previous, batch in changes)
    # Where the ranks can make nothing in between, the next batch is taken, instead of none for ever.
    slow = controller(world=2, start_batch=16, damping=Damping(growth=1.5))
    assert sorted(set(simulate(slow, lambda samples: 5000.0, steps=400).batches))[:4] == [16, 32, 48, 64]


def test_no_growth_during_the_warm_up_of_the_learning_rate() -> None:
    run = controller(schedule=Schedule(warmup=5000), damping=Damping())
    trace = simulate(run, flat, steps=600)
    first = next(decision for decision in trace.decisions if decision.changed)
    assert first.sample >= 5000 - 16 * 16
    assert any(decision.kind == "warmup" for decision in run.ledger.decisions)


# -- windows that are not finite


def test_skipped_windows_are_marked_and_their_samples_are_consumed() -> None:
    run = controller(Observe(), decide_every=8)
    simulate(run, flat, steps=16, spoiled=frozenset({2, 3, 9}))
    assert [(skip.step, skip.sample) for skip in run.ledger.skipped] == [(2, 32), (3, 48), (9, 144)]
    assert run.progress.samples == 256
    assert run.estimate is not None and run.estimate.steps == 13


@pytest.mark.parametrize("policy", [TargetEfficiency(0.5), Fixed(16), Observe()])
def test_five_skipped_windows_in_a_row_end_the_run(policy: Policy) -> None:
    run = controller(policy, decide_every=4)
    simulate(run, flat, steps=8, spoiled=frozenset({0, 1, 2, 3, 5, 6, 7}))
    assert len(run.ledger.skipped) == 7
    with pytest.raises(TooManySkipped, match="5 windows in a row, the last at step 9; .* max_skipped=5"):
        simulate(run, flat, steps=4, spoiled=frozenset({8, 9}))
    assert [skip.step for skip in run.ledger.skipped] == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_a_row_of_skipped_windows_is_counted_over_a_restart() -> None:
    run = controller(decide_every=4)
    simulate(run, flat, steps=3, spoiled=frozenset({0, 1, 2}))
    again = restored(run, controller(decide_every=4))
    assert len(again.ledger.skipped) == 3
    with pytest.raises(TooManySkipped, match="the last at step 4"):
        simulate(again, flat, steps=8, spoiled=frozenset({3, 4}))


def test_what_was_not_read_when_a_run_ended_can_still_be_read() -> None:
    run, log = controller(decide_every=8, max_skipped=2), []
    for step in range(7):
        value = not_finite(16) if step < 2 else gaussian_window(16, 200.0, step)
        run.commit(run.plan(), Watched(value, log, step))
    with pytest.raises(TooManySkipped):
        run.read()
    run.read()
    assert log == list(range(7))
    assert run.estimate is not None and run.estimate.steps == 5


def test_tokens_of_skipped_windows_are_consumed() -> None:
    run = controller(Fixed(16), decide_every=1)
    for value in (replace(gaussian_window(16, 1.0, 0), weight=900.0), replace(not_finite(16), weight=800.0)):
        run.commit(run.plan(), Ready(value))
    assert run.progress.tokens == 1700


# -- going on


def test_a_run_goes_on_at_its_batch() -> None:
    run = controller(damping=Damping())
    simulate(run, flat, steps=300)
    again = restored(run, controller(damping=Damping()))
    assert again.plan() == run.plan()
    assert again.batch == run.batch > 64


def test_an_edited_schedule_is_read_at_the_consumed_samples() -> None:
    run = controller(Stages.parse("0:20, 4k:32"), micro_batch=4)
    simulate(run, flat, steps=150)
    assert run.progress.samples == 3000
    again = restored(run, controller(Stages.parse("0:20, 2k:64"), micro_batch=4))
    assert (again.plan().global_batch, again.plan().first_sample) == (64, 3000)
    assert (again.ledger.decisions[-1].sample, again.ledger.decisions[-1].batch) == (3000, 64)
    assert again.ledger.segments == run.ledger.segments, "the past is not rewritten"


def test_new_limits_apply_from_the_restored_sample_on() -> None:
    run = controller(damping=Damping())
    simulate(run, flat, steps=300)
    again = restored(run, controller(limits=BatchLimits(1, 8, max_batch=32), damping=Damping()))
    assert again.plan().global_batch == 32
    last = again.ledger.decisions[-1]
    assert (last.kind, last.previous, last.batch) == ("limits", run.batch, 32)
    assert last.reason == f"the limits from here on cannot make {run.batch}: nearest 32"


def test_a_run_goes_on_on_any_number_of_ranks() -> None:
    run = controller(world=2)
    simulate(run, flat, steps=10)
    with pytest.raises(ValueError, match="limits.start_batch=16 cannot be made from 3 ranks"):
        controller(world=3).plan()
    again = restored(run, controller(world=3))
    assert (again.plan().global_batch, again.plan().first_sample) == (15, 160)
    assert again.plan().world == 3


def test_the_batches_of_a_schedule_are_refused_before_the_first_step() -> None:
    with pytest.raises(ValueError, match=r"a batch of policy stages=32 cannot be made from 3 ranks .* 24 or 48"):
        controller(Stages.parse("0:24, 1k:32"), world=3)
    with pytest.raises(ValueError, match="a batch of policy fixed=64 is outside"):
        controller(Fixed(64), limits=BatchLimits(1, 8, max_batch=32))


def test_another_policy_begins_with_a_fresh_account() -> None:
    run = controller(Fixed(16))
    simulate(run, flat, steps=500)
    again = restored(run, controller(damping=Damping()))
    decided = simulate(again, flat, steps=40).decisions[-1].sample
    assert again.state_dict()["policy"]["state"]["samples"] == decided - 8000


def test_the_same_policy_goes_on_with_its_account() -> None:
    run = controller(TargetEfficiency(0.5), decide_every=16)
    simulate(run, flat, steps=32)
    again = restored(run, controller(TargetEfficiency(0.8), decide_every=16))
    decided = simulate(again, flat, steps=40).decisions[-1].sample
    assert again.state_dict()["policy"]["state"]["samples"] == decided


def test_a_state_that_does_not_fit_is_refused() -> None:
    run = controller(Fixed(16))
    simulate(run, flat, steps=4)
    state = run.state_dict()
    with pytest.raises(ValueError, match="step 4, sample 64, but its ledger ends at step 0, sample 0"):
        controller(Fixed(16)).load_state_dict(state, Ledger())
    with pytest.raises(ValueError, match="version 99"):
        controller(Fixed(16)).load_state_dict({**state, "version": 99}, run.ledger)


def test_a_splice_is_noted_in_the_ledger() -> None:
    run = controller(Fixed(16))
    simulate(run, flat, steps=3)
    run.splice([{"key": "policy", "old": "fixed", "new": "observe"}])
    assert [(splice.step, splice.sample) for splice in run.ledger.splices] == [(3, 48)]


def test_a_replay_is_not_rounded_and_scales_as_recorded() -> None:
    scaling = Scaling("adascale", 16)
    original = controller(scaling=scaling, budget=Budget(samples=20_003), damping=Damping())
    plans = simulate(original, flat).plans
    replay = controller(
        Replay(original.ledger), world=1, scaling=scaling, budget=Budget(samples=20_003), start_batch=None, noise=None
    )
    replayed = simulate(replay, flat).plans
    assert not any(plan.measure or plan.drift for plan in replayed)
    assert replayed == [replace(plan, measure=False, drift=False) for plan in plans]
    split_on_three = controller(Replay(original.ledger), world=3, noise=None)
    assert simulate(split_on_three, flat, steps=len(plans)).batches == [plan.global_batch for plan in plans]


def test_a_replay_takes_the_last_of_two_changes_at_one_sample() -> None:
    # The run grows, is stopped at that very sample, and goes on under limits that take the growth back.
    scaling = Scaling("adascale", 8)
    run = controller(damping=Damping(), scaling=scaling, decide_every=1)
    while run.batch == 16:
        simulate(run, flat, steps=1)
    again = restored(
        run, controller(limits=BatchLimits(1, 8, max_batch=16), damping=Damping(), scaling=scaling, decide_every=1)
    )
    after = simulate(again, flat, steps=3).plans[0]
    replay = controller(Replay(again.ledger), scaling=scaling, noise=None)
    replayed = simulate(replay, flat, steps=again.progress.steps).plans[after.step]
    assert (replayed.global_batch, replayed.scales) == (after.global_batch, after.scales)
    assert after.scales.lr > 1.0, "the gain of the recorded estimate, not that of none"


# -- tokens that are known when measurements are read


def counted(batch: int, step: int) -> Measurement:
    return replace(gaussian_window(batch, 200.0, step), weight=float(batch * (30 + step % 7)))


def run_with_tokens(look: Callable[[Controller], object], steps: int = 120) -> tuple[list[int], Progress]:
    run = controller(Stages.parse("0:16, 10k:24, 40k:32", unit="tokens"), budget=Budget(tokens=80_000), decide_every=8)
    batches = []
    while not run.done and len(batches) < steps:
        plan = run.plan()
        run.commit(plan, Ready(counted(plan.global_batch, plan.step)))
        batches.append(plan.global_batch)
        look(run)
    return batches, run.progress


def test_reading_or_saving_between_due_dates_changes_no_plan() -> None:
    batches, progress = run_with_tokens(lambda run: None)
    assert run_with_tokens(lambda run: run.read())[0] == batches
    assert run_with_tokens(lambda run: run.state_dict())[0] == batches
    assert sorted(set(batches)) == [16, 24, 32]
    assert 80_000 <= progress.tokens < 80_000 + 8 * 32 * 36


def test_a_schedule_in_tokens_needs_their_number_beforehand() -> None:
    with pytest.raises(ValueError, match="needs tokens_per_sample"):
        controller(Fixed(16), schedule=Schedule(warmup=100, unit="tokens"))


# -- settings


@pytest.mark.parametrize(
    ("policy", "arguments", "message"),
    [
        (TargetEfficiency(0.5), {"noise": None}, "target_efficiency follows the noise scale, and noise=None"),
        (TargetEfficiency(0.5), {"start_batch": None}, "target_efficiency needs a start_batch"),
        (Observe(), {"start_batch": None}, "observe needs a start_batch"),
        (TargetEfficiency(0.5), {"start_batch": 1}, "a global batch of 1 .* limits.max_batch to 2 or more"),
        (Fixed(16), {"decide_every": 0}, "decide_every must be at least 1, got 0"),
        (Fixed(16), {"measure_every": 0}, "measure_every must be at least 1, got 0"),
        (Fixed(16), {"max_skipped": 0}, "max_skipped must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(policy: Policy, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        controller(policy, **arguments)


def test_a_start_batch_is_checked_before_the_first_step() -> None:
    with pytest.raises(ValueError, match="limits.start_batch=20 cannot be made from 2 ranks .* 16 or 32"):
        controller(start_batch=20, world=2).plan()
    assert controller(start_batch=20, limits=BatchLimits(2, 8, rounding="none")).plan().global_batch == 20


def test_nothing_decides_by_an_estimate_that_is_no_number() -> None:
    run = controller(decide_every=1)
    run.commit(run.plan(), Ready(replace(gaussian_window(16, 1.0, 0), mean_square=1e308, group_square=-1e308)))
    assert run.estimate is None or math.isfinite(run.estimate.noise)
    assert run.batch == 16
    run.ledger.dumps()


def test_measuring_every_tenth_step_spans_the_steps_between() -> None:
    covered = 0
    for seed in range(20):
        run = controller(measure_every=10, budget=Budget(samples=16_000))
        plans = simulate(run, flat, seed=seed).plans
        assert [plan.step for plan in plans if plan.measure] == list(range(0, len(plans), 10))
        assert run.estimate is not None
        assert run.estimate.span >= 9 * run.estimate.samples
        covered += run.estimate.low < 200 < run.estimate.high
    assert covered >= 17, "flat is 200, and the interval holds it 19 times of 20"


def test_a_second_view_is_measured_and_not_followed() -> None:
    def seen(found: Measurement) -> Measurement:
        return replace(found, views={"adam": (found.mean_square, found.group_square / 2)})

    alone = controller(budget=Budget(samples=16_000))
    both = controller(
        noise=[NoiseEstimator(), NoiseEstimator(geometry="adam")], budget=Budget(samples=16_000)
    )
    simulate(alone, flat)
    simulate(both, flat, seen=seen)
    assert both.ledger == alone.ledger
    assert both.views["adam"].geometry == "adam" and both.views["adam"].scale < both.estimate.scale
    assert not alone.views
    again = restored(both, controller(noise=[NoiseEstimator(), NoiseEstimator(geometry="adam")]))
    assert again.views == both.views
    swapped = restored(both, controller(noise=[NoiseEstimator(geometry="adam"), NoiseEstimator(geometry="new")]))
    assert swapped.estimate == both.views["adam"] and not swapped.views


# -- alignments


def aligned(samples: int, scale: float) -> Alignment:
    """The curve of a sign method without noise: a(m) = 1 / sqrt(1 + scale / m)."""
    sets = [samples / 4, samples / 2, 3 * samples / 4]
    return Alignment(samples, tuple(Reading(m, 1 / math.sqrt(1 + scale / m), 1.0, 1) for m in sets))


def step_aligned(run: Controller, scale: float = 100.0) -> None:
    plan = run.plan()
    found = gaussian_window(plan.global_batch, 40.0, plan.step)
    run.commit(plan, Ready(replace(found, alignments={"sign": aligned(plan.global_batch, scale)} if plan.align else {})))


def test_decisions_go_by_alignments_where_they_come_first() -> None:
    run = controller(Observe(), noise=[AlignmentEstimator(geometry="sign"), NoiseEstimator()], align_every=4)
    plans = []
    for _ in range(64):
        plans.append(run.plan())
        step_aligned(run)
    run.read()
    assert [plan.step for plan in plans if plan.align] == list(range(0, 64, 4))
    assert {plan.micro_batches for plan in plans if plan.align} == {4}
    assert {plan.micro_batches for plan in plans if not plan.align} == {2}
    assert run.estimate.geometry == "sign"
    assert run.estimate.scale == pytest.approx(100.0, rel=1e-3)
    assert run.views.keys() == {"euclidean"}
    # Half of the run so far, of which every fourth window is measured.
    assert run.estimate.memory == pytest.approx(0.5 * 61 * 16, rel=0.05)
    assert run.estimate.span == pytest.approx(4 * run.estimate.samples, rel=0.01)


def test_alignments_go_on_from_a_saved_state_as_if_nothing_had_been() -> None:
    def fresh() -> Controller:
        views = [NoiseEstimator(), AlignmentEstimator(geometry="sign")]
        return controller(Observe(), noise=views, align_every=3)

    whole, first = fresh(), fresh()
    for _ in range(50):
        step_aligned(whole)
    for _ in range(20):
        step_aligned(first)
    second = restored(first, fresh())
    for _ in range(30):
        step_aligned(second)
    assert second.state_dict() == whole.state_dict()
    assert second.views["sign"] == whole.views["sign"]


def test_a_batch_without_sets_of_two_sizes_cannot_be_decided_by_alignments() -> None:
    noise = [AlignmentEstimator(geometry="sign"), NoiseEstimator()]
    with pytest.raises(ValueError, match="global batch of 2 has too few groups .* to 3 or more"):
        controller(noise=noise, start_batch=2)
    assert not controller(Fixed(2), noise=noise).plan().align
    with pytest.raises(ValueError, match="align_every must be at least 1, got 0"):
        controller(align_every=0)
