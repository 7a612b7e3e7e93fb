"""The deciding half as a whole, on the exact statistics of Gaussian gradients with a known noise scale."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulated_run import Trace, simulate

from adabatch.controller import Controller
from adabatch.noise import NoiseEstimator
from adabatch.plan import BatchLimits
from adabatch.policies import Damping, TargetEfficiency
from adabatch.progress import Budget

SEEDS = range(3)
DWELL = 800


def follow(
    target: float, scale: Callable[[int], float], samples: int, *, seed: int, start: int = 8, horizon: int | None = None
) -> tuple[Trace, Controller]:
    controller = Controller(
        TargetEfficiency(target),
        BatchLimits(world=8, micro_batch=8, rounding="world"),
        start_batch=start,
        noise=NoiseEstimator(horizon=horizon),
        budget=Budget(samples=samples),
        damping=Damping(dwell=DWELL),
    )
    return simulate(controller, scale, seed=seed), controller


def sixty(samples: int) -> float:
    return 60.0


def growing(samples: int) -> float:
    """From 40 to 800 over 100,000 samples."""
    return 40.0 * 20.0 ** (samples / 100_000)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_small_start_grows_to_the_critical_batch(seed: int) -> None:
    trace, controller = follow(0.5, sixty, 60_000, seed=seed, horizon=60_000)
    assert 40 <= controller.batch <= 90
    assert max(trace.batches) <= 2.2 * 60, "the lag is paid back by at most a factor of 2"
    assert trace.efficiency(sixty) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("target", [0.5, 0.8])
def test_the_delivered_efficiency_is_the_target_while_the_scale_grows(target: float, seed: int) -> None:
    trace, controller = follow(target, growing, 100_000, seed=seed, horizon=100_000)
    assert trace.efficiency(growing) == pytest.approx(target, abs=0.03)
    assert trace.efficiency(growing, since=50_000) == pytest.approx(target, abs=0.05)
    wanted = (1 / target - 1) * growing(100_000)
    assert wanted / 2 < controller.batch < wanted * 2


@pytest.mark.parametrize("seed", SEEDS)
def test_the_batch_follows_a_scale_that_falls(seed: int) -> None:
    _, controller = follow(0.5, lambda samples: 400.0 if samples < 50_000 else 40.0, 100_000, seed=seed, start=256)
    assert 20 <= controller.batch <= 80


@pytest.mark.parametrize("horizon", [None, 2_000_000])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_unresolved_start_grows_by_its_lower_bound(seed: int, horizon: int | None) -> None:
    trace, _ = follow(0.5, lambda samples: 20_000.0, 2_000_000, seed=seed, start=16, horizon=horizon)
    first = next(decision for decision in trace.decisions if decision.changed)
    assert first.estimate is not None and not first.estimate["resolved"]
    assert "as far as the lower bound supports" in first.reason
    reached = next(plan for plan in trace.plans if plan.global_batch >= 10_000)
    assert reached.step < 800, "half of the critical batch, from a 1250th of it"
    assert max(trace.batches) < 2.2 * 20_000
    assert trace.efficiency(lambda samples: 20_000.0) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("seed", SEEDS)
def test_changes_keep_their_distance_and_their_size(seed: int) -> None:
    trace, _ = follow(0.5, growing, 100_000, seed=seed)
    changes = [decision for decision in trace.decisions if decision.changed]
    assert len(changes) >= 8
    assert all(later.sample - earlier.sample >= DWELL for earlier, later in zip(changes, changes[1:]))
    assert all(max(d.batch / d.previous, d.previous / d.batch) <= 2.0 for d in changes)
    for change in changes:  # the account moves what is wanted by at most a factor of 2 against the estimate
        assert change.batch < change.previous or change.previous < 2 * change.estimate["low"]
        assert change.batch > change.previous or change.previous > change.estimate["high"] / 2
