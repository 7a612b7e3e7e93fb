"""The windows of ``_accuracy_preconditioned.py`` once more on real tensors: a tap, an Adam, and the ruler under test.

A model whose loss is the product of its parameters with a given vector has that vector as its gradient. So groups with
the gradients g_k of a simulated window go through backward passes, the hooks tap, the preconditioned ruler and torch's
Adam, in single precision; and what the tap then reads is compared with what the simulation has.
"""

from __future__ import annotations

import math

import _accuracy_preconditioned as simulated
import _accuracy_windows as drawn
import numpy as np
import torch
from _accuracy_preconditioned import BETA2, EPS, GROUP_SQUARE, MEAN_SQUARE, VIEWS, WARM_STEPS
from _accuracy_runs import SEED
from _accuracy_windows import DIMENSION, KINDS, SAMPLES
from torch import Tensor, nn

from adabatch import gradients
from adabatch.gradients import geometry, survey
from adabatch.noise import Measurement
from adabatch.plan import BatchPlan

RATIO, WINDOWS = 10.0, 40
# So that some parameters are measured together as small ones, and others each for itself.
SHAPES = ((5, 40), (200,), (10, 20), (2, 10, 10), (200,))


class Linear(nn.Module):
    """The product of all parameters, (d,), with a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(shape) for shape in SHAPES])

    def forward(self, vector: Tensor) -> Tensor:
        pieces = vector.split([math.prod(shape) for shape in SHAPES])
        return sum((part.flatten() * piece).sum() for part, piece in zip(self.parts, pieces, strict=True))


def agreement() -> tuple[float, int]:
    """The largest difference over the windows of all kinds of groups, and how many there were.

    Compared are |g_bar|^2, sum p_k^2 |g_k|^2, and G^2 and S on the scale of what they are differences of.
    """
    rng = np.random.Generator(np.random.SFC64([SEED, WINDOWS]))
    noises = simulated.vectors(rng, WINDOWS)
    shares = [drawn.shares(kind, rng, WINDOWS) for kind in KINDS]
    pool = simulated.pooled(noises, shares)
    differences = [difference for kind in range(len(KINDS)) for difference in compare(kind, noises, shares, pool)]
    return max(differences), len(differences)


def compare(
    kind: int, noises: np.ndarray, shares: list[tuple[np.ndarray, np.ndarray]], pool: simulated.Pool
) -> list[float]:
    """The largest difference of each window of one run in which G drifts."""
    model = Linear()
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, BETA2), eps=EPS)
    case = simulated.Stream(KINDS[kind], RATIO, True, "fixed")
    size, direction = simulated.noise_share(RATIO), np.sqrt(simulated.direction_square())
    second, beta2, found = np.zeros((1, DIMENSION), np.float32), np.array([BETA2]), []
    rulers = geometry.rulers_for(VIEWS, optimizer, survey(model))
    with gradients.attach(model, optimizer, kind="hooks", rulers=rulers) as tap:
        for row in range(WINDOWS):
            signal = case.signal((row + 1) * SAMPLES)
            weights, sizes = (column[row] for column in shares[kind])
            groups = math.sqrt(signal) * direction + np.sqrt(size * sizes)[:, None] * noises[row]
            measured = window(tap, model, optimizer, weights, groups)
            mean, square = pool.gradients(*(np.array([one]) for one in (kind, row, signal, size)))
            if row >= WARM_STEPS:
                p = simulated.preconditioner(second, beta2, row)
                facts = simulated.lengths(p, mean**2, square)[0]
                found.append(max(difference(measured, view, lines) for view, lines in zip(VIEWS, facts, strict=True)))
            elif measured.views:
                raise RuntimeError(f"window {row} was measured with a P of {row} squares; {WARM_STEPS} are needed")
            second += np.float32(1.0 - BETA2) * (mean**2 - second)
    return found


def window(
    tap: gradients.Tap, model: nn.Module, optimizer: torch.optim.Optimizer, weights: np.ndarray, groups: np.ndarray
) -> Measurement:
    """One window of groups with these gradients, (K, d), and a step."""
    count = len(groups)
    plan = BatchPlan(
        step=0,
        first_sample=0,
        global_batch=SAMPLES,
        world=1,
        micro_batch=SAMPLES // count,
        micro_batches=count,
        measure=True,
    )
    with gradients.accumulate(tap, plan) as accumulated:
        for weight, group in zip(weights.tolist(), torch.tensor(groups, dtype=torch.float32), strict=True):
            with accumulated.micro_batch():
                accumulated.backward(model(group), samples=SAMPLES // count, weight=weight)
    outcome = accumulated.finish(optimizer)
    outcome.step()
    optimizer.zero_grad()
    return outcome.measurement.read()


def difference(measured: Measurement, view: str, facts: np.ndarray) -> float:
    """The largest relative difference of one window in one view."""
    seen = measured.seen_in(view)
    rest = 1.0 - seen.weight_square
    mean_square, group_square = float(facts[MEAN_SQUARE]), float(facts[GROUP_SQUARE])
    signal, size = (mean_square - group_square) / rest, (mean_square + group_square) / rest
    pairs = [
        (seen.mean_square, mean_square, mean_square),
        (seen.group_square, group_square, group_square),
        (seen.signal, signal, size),
        (seen.noise, SAMPLES * (mean_square - signal), SAMPLES * size),
    ]
    return max(abs(one - other) / scale for one, other, scale in pairs)
