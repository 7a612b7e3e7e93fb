"""The noisy quadratic against the closed forms of SGD on it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from adabatch.controller import Controller
from adabatch.noise import NoiseEstimator
from adabatch.plan import BatchLimits
from adabatch.policies import Fixed, Policy, TargetEfficiency
from adabatch.progress import Budget
from adabatch.scaling import Scaling
from adabatch.simulate import Simulation, compare
from adabatch.simulate.quadratic import Quadratic
from adabatch.simulate.windows import Diverged

CURVATURES, NOISES, START = [1.0, 0.5, 0.1], [2.0, 1.0, 4.0], [3.0, -2.0, 5.0]


def simulation(
    lr: float, batch: int, steps: int, *, momentum: float = 0.0, seed: int = 0, policy: Policy | None = None
) -> Simulation:
    samples = batch * steps
    controller = Controller(
        policy or Fixed(batch),
        BatchLimits(micro_batch=8),
        start_batch=batch,
        noise=NoiseEstimator(horizon=samples),
        scaling=Scaling("adascale", reference_batch=batch),
        budget=Budget(samples),
    )
    return Simulation(controller, Quadratic(CURVATURES, NOISES, START, lr=lr, momentum=momentum), seed=seed)


def test_what_is_true_at_first() -> None:
    moment = Quadratic(CURVATURES, NOISES, START, lr=0.1).moment
    assert moment.signal == pytest.approx(9 + 1 + 0.25)
    assert (moment.noise, moment.dimensions) == (7.0, pytest.approx(49 / 21))
    assert moment.loss == pytest.approx(0.5 * (9 + 0.5 * 4 + 0.1 * 25))
    assert moment.critical == pytest.approx((2 + 0.5 + 0.4) / (9 + 0.5 + 0.025)), "tr(H Sigma) / G'HG"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_mean_path_is_that_of_gradient_descent_and_the_loss_that_of_many_paths(momentum: float) -> None:
    ends, losses = [], []
    for seed in range(300):
        run = simulation(0.05, 4, 12, momentum=momentum, seed=seed)
        run.run()
        ends.append(run.truth.theta)
        losses.append(0.5 * float(np.array(CURVATURES) @ run.truth.theta**2))
    assert np.mean(losses) == pytest.approx(run.truth.moment.loss, abs=4 * np.std(losses) / len(losses) ** 0.5)
    assert np.std(losses) / len(losses) ** 0.5 < 0.05 * np.mean(losses)
    theta, velocity = np.array(START), np.zeros(3)
    for _ in range(12):
        velocity = momentum * velocity + np.array(CURVATURES) * theta
        theta = theta - 0.05 * velocity
    error = np.std(ends, axis=0) / np.sqrt(len(ends))
    assert (np.abs(np.mean(ends, axis=0) - theta) < 4 * error).all()
    assert (error < 0.1).all()


def test_in_the_end_the_gradient_is_as_large_as_the_learning_rate_makes_it() -> None:
    lr, batch = 0.2, 4
    run = simulation(lr, batch, 6_000)
    run.run(steps=500)
    squares = []
    while not run.controller.done:
        run.step()
        squares.append((np.array(CURVATURES) * run.truth.theta) ** 2)
    h, s = np.array(CURVATURES), np.array(NOISES)
    expected = lr * h * s / (batch * (2 - lr * h))  # E[G_i^2] of stationary SGD
    assert np.mean(squares, axis=0) == pytest.approx(expected, rel=0.2)


def test_what_is_measured_is_the_truth_of_the_same_step() -> None:
    run = simulation(1e-9, 64, 400)  # parameters that hardly move: their average over all paths is where they are
    run.run()
    estimate, moment = run.controller.estimate, run.truth.moment
    assert estimate.noise == pytest.approx(moment.noise, rel=0.1)
    assert estimate.signal == pytest.approx(moment.signal, rel=0.1)


def test_a_resumed_quadratic_is_the_straight_one() -> None:
    def fresh() -> Simulation:
        return simulation(0.02, 16, 300, momentum=0.8, policy=TargetEfficiency(0.8))

    straight, first, second = fresh(), fresh(), fresh()
    expected = straight.run()
    first.run(77)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.run() == expected
    assert (second.truth.theta == straight.truth.theta).all()


def test_too_large_a_learning_rate_is_named() -> None:
    with pytest.raises(Diverged, match=r"diverged at step \d+ with learning rate 5 .*lower optimizer.lr"):
        simulation(5.0, 8, 500).run()


def test_every_arm_gets_its_best_learning_rate() -> None:
    factors: list[tuple[int | None, float]] = []

    def start(policy: Fixed | None, factor: float) -> Simulation:
        factors.append((policy.global_batch if policy else None, factor))
        return simulation(4.0 * factor, 16, 100, policy=policy or TargetEfficiency(0.8))  # 4.0 alone diverges

    found = compare(start, by_loss=True)
    assert found.lr_factor < 1
    assert found.outcome.loss < 1.0
    assert {batch for batch, _ in factors} >= {batch for batch, _ in found.arms}
    own = [factor for batch, factor in factors if batch is None]
    assert min(own) < found.lr_factor < max(own), "tried on either side"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(curvatures=[1.0]), "as many curvatures as noises"),
        (dict(curvatures=[1.0, -1.0, 1.0]), "curvatures above 0"),
        (dict(noises=[0.0, 0.0, 0.0]), "not all 0"),
        (dict(lr=0.0), "optimizer.lr must be above 0"),
    ],
)
def test_an_impossible_quadratic_is_refused(changed: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Quadratic(**{**dict(curvatures=CURVATURES, noises=NOISES, start=START, lr=0.1), **changed})
