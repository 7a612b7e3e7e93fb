"""The few numbers that a window sends over the ranks, and the measurement that they become when somebody reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from adabatch.gradients.outbox import Copy, Letter
from adabatch.noise import NORM_LAYERS, Measurement

# What is summed over the ranks, in double precision. The squared lengths come last: of the groups in every view, of
# the mean gradient in every view but the Euclidean one, and where the ranks hold shards of it, of those shards.
WEIGHT, WEIGHT_SQUARE, SAMPLES, GROUPS, LOSS, STOP, PAUSE, SQUARES = range(8)


@dataclass(slots=True)
class Tally:
    """What a rank noted in one window.

    Attributes:
        samples: independent units so far.
        weights: loss weight of each micro-batch; tensors stay on the device.
        loss: sum of weight times mean loss, on the device where that is not the CPU; ``None`` while no loss was given.
        examples: groups and their summed squared weights in each micro-batch, where every example is a group.
    """

    device: torch.device
    samples: int = 0
    weights: list[float | Tensor] = field(default_factory=list)
    loss: float | Tensor | None = None
    examples: list[tuple[float | Tensor, float | Tensor]] = field(default_factory=list)

    def add(self, samples: int, weight: float | Tensor, loss: Tensor | None) -> None:
        """Count one micro-batch. A loss of weight 0 is left out: a mean over nothing is not a number."""
        self.samples += samples
        self.weights.append(weight)
        if loss is None:
            return
        if free_to_ask(self.device):
            share = loss.item() * weight if weight > 0 else 0.0
        elif isinstance(weight, Tensor):
            share = torch.where(weight > 0, loss.double() * weight, 0.0)
        else:
            share = loss.double() * weight if weight > 0 else 0.0
        self.loss = share if self.loss is None else self.loss + share


def free_to_ask(device: torch.device) -> bool:
    """Whether the host may ask for a number without waiting for anything; then numbers are cheaper than tensors."""
    return device.type == "cpu"


def checked(samples: int, weight: float | Tensor | None) -> float | Tensor:
    """The loss weight of a micro-batch: by default its samples; a CPU tensor becomes a number.

    Raises:
        ValueError: for negative samples, or a weight that is negative or not finite.
    """
    if samples < 0:
        raise ValueError(f"samples must be 0 or more, got {samples}")
    if weight is None:
        return float(samples)
    if isinstance(weight, Tensor) and weight.device.type != "cpu":
        return weight.detach().reshape(())
    weight = float(weight)
    if not 0 <= weight < math.inf:
        raise ValueError(f"the weight of a micro-batch must be finite and 0 or more, got {weight}")
    return weight


def summarise(
    tally: Tally, squares: Tensor | None, *, views: int, by_rank: bool, stop: bool, pause: int
) -> list[float | Tensor]:
    """This rank's numbers, in the order of this module's constants, without waiting for the device.

    Args:
        squares: squared lengths of this rank's group gradients, (views,); ``None`` when there are no groups.
        by_rank: whether the rank is one group, or each of its micro-batches.
        stop: whether this rank asks all to stop.
        pause: windows that may pass before the next numbers travel, as rank 0 wishes; 0 on the others.
    """
    weights = tally.weights
    if any(isinstance(weight, Tensor) for weight in weights):
        zero = torch.zeros((), dtype=torch.float64, device=tally.device)
        stacked = torch.stack([zero + weight for weight in weights])
        stacked = stacked.sum().reshape(1) if by_rank else stacked
        counted = [stacked.sum(), stacked.square().sum(), (stacked > 0).sum()]
    else:
        weights = [sum(weights)] if by_rank else weights
        counted = [sum(weights), sum(weight * weight for weight in weights), sum(weight > 0 for weight in weights)]
    groups = counted[2] if squares is not None else 0.0
    loss = math.nan if tally.loss is None else tally.loss
    numbers = [counted[0], counted[1], float(tally.samples), groups, loss, float(stop), float(pause)]
    return numbers + ([0.0] * views if squares is None else entries(squares))


def summarise_examples(tally: Tally, square: Tensor | None) -> list[float | Tensor]:
    """The same for groups of one example: their number, summed squared weights, and summed squared lengths."""
    if square is None:
        return [0.0, 0.0, 0.0]
    groups, weight_squares = zip(*tally.examples)
    return [sum(groups), sum(weight_squares), *entries(square)]


def entries(vector: Tensor) -> list[float | Tensor]:
    """The elements of a vector: numbers where asking is free, scalars on the device elsewhere."""
    return vector.tolist() if free_to_ask(vector.device) else list(vector.unbind())


class Pending:
    """One window's measurement, still on the device and on its way: ``read`` waits for it, nothing else does.

    A window whose numbers were kept back (``finish(exchange=False)``) sends them when it is first read, together with
    all others that wait: then every rank must read, at the same point of its program.
    """

    def __init__(
        self,
        letter: Letter,
        norm: Tensor,
        *,
        views: Sequence[tuple[str, Tensor]] = (),
        scale: Tensor | None = None,
        along: Tensor | None = None,
        max_norm: float | None = None,
        share: float,
        over_weight: bool,
        mean_over_weight: bool = False,
        planned: tuple[int, int] | None = None,
        assumed: bool = False,
        examples: int | None = None,
    ) -> None:
        """
        Args:
            letter: the numbers that are summed over the ranks.
            norm: norm of the mean gradient, which all ranks have.
            views: names of the views that follow the Euclidean one, and what the sum of the ranks' shares of their
                squared length is multiplied by to be the mean gradient's.
            scale: the loss scale, if there is one.
            along: product of the mean gradient with the average past gradient, where it was taken.
            max_norm: norm above which the gradient was clipped, if it was to be.
            share: what a group's gradient is multiplied by to be its part p_k g_k of the mean gradient.
            over_weight: whether that is to be divided by the window's weight, which only the sum tells.
            mean_over_weight: whether norm, views and product are to be, too.
            planned: step and global batch of the plan that was to be carried out, if there was one.
            assumed: whether the gradient was divided by the planned samples, as the weights seemed to be samples.
            examples: where the numbers of groups of one example begin, if there are any.
        """
        self._letter = letter
        self._views = [name for name, _ in views]
        given = [torch.full_like(norm, neutral) if fact is None else fact for fact, neutral in ((scale, 1), (along, 0))]
        self._facts = Copy(torch.stack([norm, *given, *(factor for _, factor in views)]))
        self._drift = along is not None
        self._max_norm = max_norm
        self._share = share
        self._over_weight = over_weight
        self._mean_over_weight = mean_over_weight
        self._planned = planned
        self._assumed = assumed
        self._examples = examples
        self._measurement: Measurement | None = None

    def read(self) -> Measurement:
        """The measurement; waits for the device on the first call.

        A window of which nothing was measured, or a group of which was not finite, has 0 groups; a view in which that
        is so (or that cannot be measured yet) is left out.

        Raises:
            ValueError: when the window's samples, over all ranks, were not the plan's, or some micro-batches had
                weights of their own and others not.
        """
        if self._measurement is None:
            self._measurement = self._made()
        return self._measurement

    @property
    def travelled(self) -> bool:
        """Whether the numbers have been sent, so that reading them is no collective; the same on every rank."""
        return self._letter.travelled

    @property
    def stop(self) -> bool:
        """Whether any rank asked to stop; waits for the device on the first call."""
        return self._letter.read()[STOP] > 0

    @property
    def pause(self) -> int:
        """Windows that may pass before the next numbers travel, as rank 0 wishes."""
        return round(self._letter.read()[PAUSE])

    def _made(self) -> Measurement:
        numbers = self._letter.read()
        norm, scale, along, *factors = self._facts.read()
        after = SQUARES + 1 + len(factors)
        mean_squares = [shares * factor for shares, factor in zip(numbers[after:], factors)]
        weight = numbers[WEIGHT]
        self._require_planned(round(numbers[SAMPLES]), weight)
        share = self._share / (weight or math.nan) if self._over_weight else self._share
        if self._mean_over_weight:
            norm, along = norm / (weight or math.nan), along / (weight or math.nan)
            mean_squares = [square / (weight or math.nan) ** 2 for square in mean_squares]
        group_squares = [square * (share / scale) ** 2 for square in numbers[SQUARES:after]]
        measured = math.isfinite(group_squares[0])
        views = zip(self._views, mean_squares, group_squares[1:])
        found = Measurement(
            samples=round(numbers[SAMPLES]),
            groups=round(numbers[GROUPS]) if measured else 0,
            mean_square=norm * norm,
            group_square=group_squares[0] if measured else 0.0,
            weight_square=numbers[WEIGHT_SQUARE] / (weight * weight or math.nan),
            weight=weight,
            loss=numbers[LOSS] / (weight or math.nan),
            finite=math.isfinite(norm),
            views={view: (mean, group) for view, mean, group in views if measured and math.isfinite(mean + group)},
            drift=along if self._drift and math.isfinite(along) else None,
            clipped=None if self._max_norm is None else norm > self._max_norm,
        )
        return self._with_examples(found, numbers, share / scale)

    def _with_examples(self, found: Measurement, numbers: Sequence[float], share: float) -> Measurement:
        """The same window once more, with one group per example, in the view of the normalisation layers."""
        if self._examples is None or NORM_LAYERS not in found.views:
            return found
        groups, weight_square, square = numbers[self._examples : self._examples + 3]
        alone = replace(
            found,
            groups=round(groups) if math.isfinite(square) else 0,
            mean_square=found.views[NORM_LAYERS][0],
            group_square=square * share**2 if math.isfinite(square) else 0.0,
            weight_square=weight_square / (found.weight * found.weight or math.nan),
            views={},
        )
        return replace(found, examples=alone)

    def _require_planned(self, samples: int, weight: float) -> None:
        step, global_batch = self._planned or (0, samples)
        if samples != global_batch:
            raise ValueError(
                f"the window of step {step} ran {samples} samples over all ranks, but its plan has {global_batch}; "
                f"each rank takes micro-batches of plan.pieces(rank) samples, as stream.take(plan) gives them"
            )
        if self._assumed and weight != samples:
            raise ValueError(
                f"the window of step {step} has weight {weight} in {samples} samples: some of its micro-batches were "
                f"given a weight and others not; give it to backward() in all of them, on all ranks, or in none"
            )
