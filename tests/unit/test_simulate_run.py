"""Simulated runs against closed forms: the hyperbola of fixed batches, power-law integrals, resuming, comparisons."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from recorded_run import SyntheticRun

from adabatch.controller import Controller
from adabatch.ledger import Ledger
from adabatch.noise import NoiseEstimator
from adabatch.plan import BatchLimits
from adabatch.policies import Damping, Fixed, Policy, StepPrice, TargetEfficiency, WallClock
from adabatch.progress import Budget
from adabatch.runlog import read_metrics
from adabatch.simulate import Cluster, CurveTruth, Exponential, LossLaw, PowerLaw, Recorded, Simulation, compare
from adabatch.simulate.curves import Law


def simulation(
    policy: Policy,
    law: Law,
    samples: int,
    *,
    exact: bool = False,
    seed: int = 0,
    cluster: Cluster | None = None,
    damping: Damping | None = None,
    calibration: float = 1.0,
    start: int = 16,
) -> Simulation:
    cluster = cluster or Cluster()
    controller = Controller(
        policy,
        BatchLimits(cluster.ranks, micro_batch=8, rounding="world"),
        start_batch=start * cluster.ranks,
        noise=NoiseEstimator(horizon=samples) if policy.needs else None,
        damping=damping or Damping(dwell=800),
        budget=Budget(samples),
    )
    return Simulation(controller, CurveTruth(law, calibration), cluster, seed, exact)


STEADY = Exponential(start=100.0, growth=1.0, over=1.0)


# -- closed forms


@pytest.mark.parametrize("batch", [10, 100, 400])
def test_a_fixed_batch_at_a_steady_critical_batch_lies_on_the_hyperbola(batch: int) -> None:
    outcome = simulation(Fixed(batch), STEADY, 40_000).run()
    assert outcome.efficiency == pytest.approx(1 / (1 + batch / 100))
    assert outcome.needs.samples == pytest.approx(40_000 / (1 + batch / 100))
    assert outcome.steps / outcome.needs.steps == pytest.approx(1 + 100 / batch)
    assert outcome.product == pytest.approx(1.0)


def test_the_least_steps_under_a_power_law_are_its_integral() -> None:
    law = PowerLaw(scale=64.0, at=10_000.0, exponent=0.5, least=1e-9)
    outcome = simulation(Fixed(1), law, 10_000).run()
    x = outcome.needs.samples
    # S_min = integral of dx / (64 sqrt(x / 10,000)) = 2 sqrt(x) * 100 / 64
    assert outcome.needs.steps == pytest.approx(2 * math.sqrt(x) * 100 / 64, rel=0.02)
    # E = x + S_min, for a batch of 1
    assert x + 2 * math.sqrt(x) * 100 / 64 == pytest.approx(10_000, rel=0.001)


def test_exponential_growth_in_least_steps_is_what_it_says() -> None:
    run = simulation(Fixed(2), Exponential(start=50.0, growth=20.0, over=10_000.0), 20_000)
    places = []
    while not run.controller.done and run.tally.least_samples < 10_000:
        run.step()
        places.append((run.tally.least_steps, run.truth.moment.critical))
    total = 10_000 * math.log(20) / (50 * 19)  # S_min = over ln(R) / (start (R - 1))
    assert run.tally.least_steps == pytest.approx(total, rel=0.01)
    for least_steps, critical in places[:: len(places) // 7]:
        assert critical == pytest.approx(50 * 20 ** (least_steps / total), rel=0.02)


def test_the_loss_law_ties_the_critical_batch_to_the_loss() -> None:
    law = LossLaw(scale=200.0, at=3.0, exponent=4.0, start=6.0, floor=1.0, knee=1000.0, slope=0.5)
    assert (law.loss(0), law.loss(3000)) == (pytest.approx(6.0), pytest.approx(1 + 5 / 2))
    assert law.critical(3000) == pytest.approx(200 * (3.0 / 3.5) ** 4)
    outcome = simulation(Fixed(8), law, 40_000).run()
    end = law.loss(outcome.needs.samples)
    assert end < outcome.loss < 1.05 * end


def test_following_the_critical_batch_lands_on_the_hyperbola_and_its_root_beyond() -> None:
    law = Exponential(start=60.0, growth=10.0, over=200_000.0)
    free = Damping(growth=1e9, dead_band=1.0, interval_gate=False, warmup_guard=False)
    run = simulation(TargetEfficiency(0.5), law, 400_000, exact=True, damping=free, start=60)
    run.controller.decide_every = 1
    outcome = run.run()
    assert outcome.product == pytest.approx(1.0, abs=0.01)
    assert outcome.efficiency == pytest.approx(0.5, abs=0.01)
    run = simulation(StepPrice(200.0), law, 400_000, exact=True, damping=free, start=110)
    run.controller.decide_every = 1
    root = math.sqrt(10)
    assert run.run().product == pytest.approx(4 * (root - 1) / ((root + 1) * math.log(10)), abs=0.015)


def test_a_calibration_parts_the_critical_batch_from_the_noise_scale() -> None:
    run = simulation(TargetEfficiency(0.5, calibration=4.0), STEADY, 60_000, exact=True, calibration=4.0)
    outcome = run.run()
    assert run.controller.estimate.scale == pytest.approx(25.0)
    assert outcome.efficiency == pytest.approx(0.5, abs=0.02)
    assert 80 <= outcome.final_batch <= 125


# -- time


def test_seconds_and_cost_are_those_of_the_steps() -> None:
    cluster = Cluster(ranks=4, per_sample=0.01, optimizer=0.5, node_latency=0.0)
    outcome = simulation(Fixed(64), STEADY, 6_400, cluster=cluster).run()
    assert outcome.seconds == pytest.approx(100 * (0.5 + 16 * 0.01))
    assert outcome.cost == pytest.approx(4 * outcome.seconds)
    assert simulation(Fixed(64), STEADY, 6_400).run().seconds is None


def test_the_run_times_its_own_steps_for_the_fastest_batch() -> None:
    run = simulation(WallClock(), STEADY, 400_000, exact=True, cluster=Cluster(per_sample=0.001, optimizer=0.4))
    run.run()
    assert run.controller.price.value == pytest.approx(400.0, rel=0.01)
    assert run.controller.batch == pytest.approx(math.sqrt(400 * 100), rel=0.2)


def test_sixteen_thousand_ranks_cost_no_more_than_one() -> None:
    cluster = Cluster(ranks=16_384, per_sample=0.01, optimizer=0.1, gradient_bytes=1e9, spread=0.1)
    law = Exponential(start=1e6, growth=3.0, over=1e9)
    controller = Controller(
        TargetEfficiency(0.5),
        BatchLimits(16_384, micro_batch=8),
        start_batch=8 * 16_384,
        noise=NoiseEstimator(horizon=10**9),
        budget=Budget(10**9),
    )
    outcome = Simulation(controller, CurveTruth(law), cluster).run()
    assert outcome.final_batch % 16_384 == 0
    assert outcome.efficiency == pytest.approx(0.5, abs=0.1)
    assert outcome.cost == pytest.approx(16_384 * outcome.seconds)


# -- determinism


def adaptive(seed: int = 0) -> Simulation:
    cluster = Cluster(ranks=2, per_sample=0.001, optimizer=0.01, spread=0.1)
    return simulation(TargetEfficiency(0.5), Exponential(40.0, 10.0, 20_000.0), 40_000, seed=seed, cluster=cluster)


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    runs = [adaptive(), adaptive(), adaptive(seed=1)]
    outcomes = [run.run() for run in runs]
    assert outcomes[0] == outcomes[1] != outcomes[2]
    assert runs[0].points == runs[1].points


@pytest.mark.parametrize("steps", [1, 130, 500])
def test_a_resumed_run_is_the_straight_one(steps: int) -> None:
    straight = adaptive()
    expected = straight.run()
    first, second = adaptive(), adaptive()
    first.run(steps)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.run() == expected
    assert second.controller.ledger == straight.controller.ledger
    assert second.points == straight.points


def test_a_run_needs_an_end() -> None:
    run = simulation(Fixed(8), STEADY, 800)
    run.controller.budget = Budget()
    with pytest.raises(ValueError, match=r"set stop\.samples"):
        run.run()
    assert run.run(steps=3).steps == 3


# -- comparisons


def test_the_match_is_the_fixed_batch_of_the_same_progress_and_samples() -> None:
    law = Exponential(start=60.0, growth=10.0, over=50_000.0)
    cluster = Cluster(per_sample=0.001, optimizer=0.2)

    def start(policy: Fixed | None, factor: float) -> Simulation:
        return simulation(policy or TargetEfficiency(0.5), law, 100_000, exact=True, cluster=cluster)

    found = compare(start, by_loss=False)
    needs = found.outcome.needs
    batch = (100_000 - needs.samples) / needs.steps  # E = E_min + S_min B
    assert found.match.global_batch == pytest.approx(batch, rel=0.01)
    assert found.match.steps == pytest.approx(100_000 / batch, rel=0.01)
    assert found.match.seconds == pytest.approx(100 + 0.2 * 100_000 / batch, rel=0.01)
    small, large = found.arms[0][1], found.arms[-1][1]
    assert large.needs.samples < needs.samples < small.needs.samples
    # The fastest: the smallest of (S_min + E_min / B) (0.2 + 0.001 B) over all batches.
    fastest = min((needs.steps + needs.samples / b) * (0.2 + 0.001 * b) for b in range(1, 4096))
    assert found.fastest.seconds == pytest.approx(fastest, rel=0.02)
    assert found.fastest.seconds >= fastest


# -- recorded curves


def test_a_recorded_run_gives_its_noise_scale_by_efficient_samples(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", start=16, top=16, samples=40_000)
    with run.log() as log:
        log.start(run.start_record())
        run.train(log, run.samples)
    law = Recorded.load(tmp_path / "run")
    # At a fixed batch of 16: dx = dE / (1 + 16 / C) with C = 14 + 100 (E / 40,000) ^ 0.8, up to the recorded noise.
    clock, samples = 0.0, 0
    for samples in range(0, 40_000, 16):
        critical = 14 + 100 * ((samples + 8) / 40_000) ** 0.8
        clock += 16 / (1 + 16 / critical)
        if samples % 8_000 == 0 and samples >= 16_000:
            assert law.critical(clock) == pytest.approx(critical, rel=0.2)
    assert law.critical(10 * clock) == pytest.approx(114, rel=0.2), "constant beyond the end"
    assert law.loss(clock) < law.loss(0.1 * clock)
    metrics = read_metrics(tmp_path / "run")
    late = [{**record, "scale": None, "scale_low": None} for record in metrics.steps[:100]] + metrics.steps[100:]
    cut = Recorded.from_metrics(dataclasses.replace(metrics, steps=late))
    known = law.curve.clocks[-len(cut.curve.clocks)]
    assert known < cut.curve.clocks[0] < 6_400, "6,400 samples before the first noise scale count by that one"
    assert cut.losses[0][1] == metrics.steps[100]["loss"]
    assert Recorded.load(tmp_path / "run", calibration=3.0).critical(10 * clock) == pytest.approx(342, rel=0.2)


def test_a_ledger_is_a_recorded_curve_too(tmp_path: Path) -> None:
    run = simulation(TargetEfficiency(0.5), Exponential(60.0, 10.0, 50_000.0), 100_000, exact=True)
    outcome = run.run()
    run.controller.ledger.save(tmp_path / "ledger.json")
    law = Recorded.load(tmp_path / "ledger.json")
    assert law.critical(outcome.needs.samples) == pytest.approx(600.0, rel=0.1)
    again = simulation(TargetEfficiency(0.5), law, 100_000, exact=True).run()
    assert again.needs.samples == pytest.approx(outcome.needs.samples, rel=0.03)


def test_a_run_without_a_noise_scale_has_no_curve(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.record_step(8)
    ledger.save(tmp_path / "ledger.json")
    with pytest.raises(ValueError, match="no resolved noise scale"):
        Recorded.load(tmp_path / "ledger.json")
