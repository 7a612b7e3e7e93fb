"""The few numbers that a window sends over the ranks, and the measurement that they become when somebody reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adabatch.distributed import Wait
from adabatch.noise import Measurement

# What is summed over the ranks, in double precision.
GROUP_SQUARE, WEIGHT, WEIGHT_SQUARE, SAMPLES, GROUPS, LOSS, STOP = range(7)
# What joins it afterwards, the same on every rank.
NORM, SCALE = 7, 8


@dataclass(slots=True)
class Tally:
    """What a rank noted in one window.

    Attributes:
        samples: independent units so far.
        weights: loss weight of each micro-batch; tensors stay on the device.
        loss: sum of weight times mean loss, on the device; ``None`` while no loss was given.
    """

    device: torch.device
    samples: int = 0
    weights: list[float | Tensor] = field(default_factory=list)
    loss: Tensor | None = None

    def add(self, samples: int, weight: float | Tensor, loss: Tensor | None) -> None:
        """Count one micro-batch. A loss of weight 0 is left out: a mean over nothing is not a number."""
        self.samples += samples
        self.weights.append(weight)
        if loss is None:
            return
        if self.loss is None:
            self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        if isinstance(weight, Tensor):
            self.loss += torch.where(weight > 0, loss.double() * weight, 0.0)
        elif weight > 0:
            self.loss.add_(loss, alpha=weight)


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


def summarise(tally: Tally, *, measured: bool, by_rank: bool, stop: bool) -> Tensor:
    """This rank's numbers, a vector in double precision on the device, without waiting for it; no squared norm yet.

    Args:
        measured: whether a squared norm will be put in; without it there are no groups.
        by_rank: whether the rank is one group, or each of its micro-batches.
        stop: whether this rank asks all to stop.
    """
    if any(isinstance(weight, Tensor) for weight in tally.weights):
        numbers = _summary_on_device(tally, by_rank)
    else:
        numbers = _summary_on_host(tally, by_rank)
    if not measured:
        numbers[GROUPS] = 0.0
    numbers[LOSS] = math.nan if tally.loss is None else tally.loss
    if stop:
        numbers[STOP] = 1.0
    return numbers


def _summary_on_host(tally: Tally, by_rank: bool) -> Tensor:
    weights = [sum(tally.weights)] if by_rank else tally.weights
    numbers = [0.0] * 7
    numbers[WEIGHT] = sum(weights)
    numbers[WEIGHT_SQUARE] = sum(weight * weight for weight in weights)
    numbers[SAMPLES] = tally.samples
    numbers[GROUPS] = sum(weight > 0 for weight in weights)
    return _sent(numbers, tally.device)


def _summary_on_device(tally: Tally, by_rank: bool) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64, device=tally.device)
    weights = torch.stack([zero + weight for weight in tally.weights])
    weights = weights.sum().reshape(1) if by_rank else weights
    numbers = torch.zeros(7, dtype=torch.float64, device=tally.device)
    numbers[WEIGHT] = weights.sum()
    numbers[WEIGHT_SQUARE] = weights.square().sum()
    numbers[SAMPLES] = float(tally.samples)
    numbers[GROUPS] = (weights > 0).sum()
    return numbers


def _sent(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Numbers as a vector on the device. To a GPU they travel from pinned memory: from other memory the host waits."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.float64, device=device)
    return torch.tensor(numbers, dtype=torch.float64, pin_memory=True).to(device, non_blocking=True)


class Pending:
    """One window's measurement, still on the device and on its way: ``read`` waits for it, nothing else does."""

    def __init__(
        self,
        numbers: Tensor,
        arrive: Wait,
        facts: Sequence[Tensor],
        *,
        share: float,
        over_weight: bool,
        planned: tuple[int, int] | None = None,
        assumed: bool = False,
    ) -> None:
        """
        Args:
            numbers: the vector that is summed over the ranks, and what waits for the sum.
            facts: scalars that all ranks have: the norm of the mean gradient, and the loss scale if there is one.
            share: what a group's gradient is multiplied by to be its part p_k g_k of the mean gradient.
            over_weight: whether that is to be divided by the window's weight, which only the sum tells.
            planned: step and global batch of the plan that was to be carried out, if there was one.
            assumed: whether the gradient was divided by the planned samples, as the weights seemed to be samples.
        """
        self._share = share
        self._over_weight = over_weight
        self._planned = planned
        self._assumed = assumed
        self._values: list[float] | None = None
        if numbers.device.type == "cuda":
            # There the wait is the stream's. Copied as soon as it is there, so that reading waits for this window and
            # not for what was queued after.
            arrive()
            copy = torch.empty(len(numbers) + len(facts), dtype=numbers.dtype, pin_memory=True)
            copy.copy_(torch.cat((numbers, torch.stack(list(facts)))), non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            numbers, arrive, facts = copy, copied.synchronize, ()
        self._numbers, self._arrive, self._facts = numbers, arrive, facts

    def read(self) -> Measurement:
        """The measurement; waits for the device on the first call.

        A window of which nothing was measured, or a group of which was not finite, has 0 groups.

        Raises:
            ValueError: when the window's samples, over all ranks, were not the plan's, or some micro-batches had
                weights of their own and others not.
        """
        values = self.values()
        self._require_planned(round(values[SAMPLES]), values[WEIGHT])
        weight = values[WEIGHT]
        share = self._share / (weight or math.nan) if self._over_weight else self._share
        scale = values[SCALE] if len(values) > SCALE else 1.0
        group_square = values[GROUP_SQUARE] * (share / scale) ** 2
        measured = math.isfinite(group_square)
        return Measurement(
            samples=round(values[SAMPLES]),
            groups=round(values[GROUPS]) if measured else 0,
            mean_square=values[NORM] * values[NORM],
            group_square=group_square if measured else 0.0,
            weight_square=values[WEIGHT_SQUARE] / (weight * weight or math.nan),
            weight=weight,
            loss=values[LOSS] / (weight or math.nan),
            finite=math.isfinite(values[NORM]),
        )

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

    @property
    def stop(self) -> bool:
        """Whether any rank asked to stop; waits for the device on the first call."""
        return self.values()[STOP] > 0

    def values(self) -> list[float]:
        """The raw numbers, in the order of this module's constants."""
        if self._values is None:
            self._arrive()
            self._values = self._numbers.tolist() + [fact.item() for fact in self._facts]
        return self._values
