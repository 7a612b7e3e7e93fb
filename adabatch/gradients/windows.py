"""The accumulating window: the gradient of one big batch from many micro-batches, measured on the way.

Every micro-batch adds weight x (gradient of its mean loss); weights are summed over micro-batches and ranks, and the
gradient is divided by the sum once, in the same pass that clips it. Nothing here makes the host wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from adabatch.gradients.drift import product
from adabatch.gradients.layout import HALF, require_covered
from adabatch.gradients.outcomes import Outcome
from adabatch.gradients.statistics import WEIGHT, Pending, checked
from adabatch.gradients.taps import Tap, scale_of
from adabatch.plan import BatchPlan

DOUBLE = (torch.float64, torch.complex128)

# torch.nn.utils.clip_grad_norm_ adds it to the norm that it divides by.
CLIP_EPS = 1e-6


def accumulate(tap: Tap, plan: BatchPlan) -> Window:
    """A context for one optimizer step: ``with accumulate(tap, plan) as window: ...``, then ``window.finish``.

    Measures when ``plan.measure`` says so.

    Raises:
        ValueError: when the plan was made for another number of ranks, and, at the end of the context, when fewer
            micro-batches ran than planned.
    """
    return Window(tap, plan)


class Window:
    """All micro-batches of one optimizer step on this rank; made by ``accumulate``.

    Attributes:
        plan: the step's plan.
        measurement: after ``finish``, the pending measurement: ``measurement.read()`` may wait for the device.
    """

    def __init__(self, tap: Tap, plan: BatchPlan) -> None:
        if plan.world != tap.layout.world:
            raise ValueError(
                f"the plan of step {plan.step} is for {plan.world} ranks, but {tap.layout.world} share this model's "
                f"gradients; make BatchLimits(world=...) with that number"
            )
        self.plan = plan
        self.measurement: Pending | None = None
        self._tap = tap
        self._unit = tap._unit(plan.global_batch)
        self._begun = 0
        self._inside = False
        self._scaler: torch.amp.GradScaler | None = None
        self._complete = False
        self._by_samples = self._by_weight = False
        self._stop = False

    def __enter__(self) -> Self:
        self._tap.measure(self.plan.measure)
        self._tap._open(summing=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._tap._open(summing=False)
        elif self._begun != self.plan.micro_batches:
            self._tap._open(summing=False)
            raise ValueError(
                f"{self._begun} micro-batches ran where the plan of step {self.plan.step} has "
                f"{self.plan.micro_batches}; every rank runs all of them, and fillers of weight 0 when its samples are "
                f"used up"
            )
        else:
            self._complete = True

    def micro_batch(self) -> MicroBatch:
        """A context for one micro-batch's forward and backward; gradients are synchronised in the last one only.

        Raises:
            ValueError: for more micro-batches than planned, and, at the context's end, when it ran no backward.
        """
        return MicroBatch(self)

    def backward(
        self,
        mean_loss: Tensor,
        *,
        samples: int,
        weight: float | Tensor | None = None,
        scaler: torch.amp.GradScaler | None = None,
        sample_weights: Tensor | None = None,
    ) -> None:
        """Add one micro-batch's share of the gradient: ``weight`` times the gradient of ``mean_loss``.

        Args:
            mean_loss: scalar mean loss of the micro-batch.
            samples: independent units in it; 0 for a filler.
            weight: what the mean was taken over: samples by default, tokens for a mean over tokens; 0 for a filler. A
                tensor on the device stays there. Give it in all micro-batches on all ranks, or in none: with none, no
                rank waits for the others' weights.
            scaler: gradient scaler for fp16; hand the same one to ``finish``.
            sample_weights: how much each example counts in the mean, as in ``Tap.note``.

        Raises:
            ValueError: outside ``micro_batch()``, for a loss that is no scalar or a weight that is negative or not
                finite, and when the gradient did not arrive as planned.
        """
        if not self._inside:
            raise ValueError("backward() belongs inside `with window.micro_batch():`, once per micro-batch")
        if mean_loss.numel() != 1:
            raise ValueError(f"mean_loss must be one number, got a tensor of shape {tuple(mean_loss.shape)}")
        self._inside = False
        scaler = _enabled(scaler)
        self._by_samples |= weight is None and samples > 0
        self._by_weight |= weight is not None and samples > 0
        weight = checked(samples, weight)
        loss = mean_loss.float() if mean_loss.dtype in HALF else mean_loss
        self._remember(scaler, samples, weight)
        scaled = loss if scaler is None else scaler.scale(loss)
        last = self._begun == self.plan.micro_batches
        with torch.no_grad():
            self._tap._tally.add(samples, weight, mean_loss.detach().reshape(()))
        scaled.backward(_factor(weight, self._unit, scaled))
        self._tap._close_micro_batch(samples, weight, sample_weights, last)

    def request_stop(self) -> None:
        """Ask all ranks to stop; they see it in this window's outcome."""
        self._stop = True

    @torch.no_grad()
    def finish(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        stop: bool = False,
        exchange: bool = True,
        pause: int = 0,
    ) -> Outcome:
        """Divide the gradient by the window's weight, measure it, and clip it, in one pass.

        Args:
            optimizer: the optimizer of the model's parameters, or several that share them.
            max_norm: threshold of the mean gradient's norm, as in ``torch.nn.utils.clip_grad_norm_``.
            scaler: the scaler of ``backward``; gradients stay scaled, and ``outcome.step`` unscales them.
            stop: whether this rank asks all to stop, as ``request_stop``.
            exchange: let the window's numbers travel over the ranks now, with those kept back before. ``False`` saves
                the collective where nobody reads this window soon; whoever reads it then (or asks it for a stop) does
                so on every rank. Weights of their own (tokens) and shards are exchanged in each window in any case.
            pause: on rank 0, a wish that travels along, for ``outcome.measurement.pause`` to tell every rank.

        Returns:
            What to step with. When the gradient is not finite (or nothing had weight), it is set to NaN and
            ``outcome.step`` skips.

        Raises:
            ValueError: before the window is complete, twice, for parameters that the tap does not know, and when no
                parameter has a gradient.
        """
        scaler = _enabled(scaler)
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._require_finishable(optimizers, scaler)
        tap, layout = self._tap, self._tap.layout
        rank_pause = pause if layout.rank == 0 else 0
        groups = tap.source.collect()  # first, since it knows why there may be no gradient to measure
        norm, mean_squares = tap._lengths()
        along = product(optimizers, layout.device) if self.plan.drift else None
        letter = tap._post(groups, stop=self._stop or stop, pause=rank_pause, mean_squares=mean_squares, along=along)
        assumed = self._by_samples and not self._by_weight
        if exchange or layout.sharded or not assumed:
            tap._outbox.send()
        if layout.sharded:
            norm, along = tap._joined(letter, along is not None)
        unit = self._unit * tap.source.reduction
        weight = self.plan.global_batch if assumed else letter.on_device()[WEIGHT]
        factor = torch.full_like(norm, unit) / weight
        scale = None if scaler is None else scale_of(scaler, layout.device)
        to_mean = factor if scale is None else factor / scale
        mean_norm = norm * to_mean
        skip = ~torch.isfinite(mean_norm)
        self._multiply(factor if max_norm is None else factor * _clip(mean_norm, max_norm), skip)
        self.measurement = Pending(
            letter,
            mean_norm,
            views=tap._in_views(to_mean),
            scale=scale,
            along=None if along is None else along * to_mean,
            max_norm=max_norm,
            share=self._unit,
            over_weight=True,
            planned=(self.plan.step, self.plan.global_batch),
            assumed=assumed,
            examples=tap._examples_at,
        )
        tap._open(summing=False)
        return Outcome(optimizers, self.measurement, skip, scaler)

    def _multiply(self, factor: Tensor, skip: Tensor) -> None:
        """One pass over all gradients. One that is not finite becomes NaN: clipped, it would be 0, and silently so."""
        factor = torch.where(skip, math.nan, factor)
        single = factor.float()
        for parameters in self._tap.layout.alike:
            small, large = parameters.gradients()
            if small or large:
                torch._foreach_mul_(small + large, factor if parameters.dtype in DOUBLE else single)

    def _remember(self, scaler: torch.amp.GradScaler | None, samples: int, weight: float | Tensor) -> None:
        if self._begun > 1 and scaler is not self._scaler:
            raise ValueError("all micro-batches of a window take the same scaler, or none")
        self._scaler = scaler
        if scaler is not None and self._begun == 1:
            self._tap._learn_weight(samples, weight)
            self._unit = self._tap._unit(self.plan.global_batch)

    def _require_finishable(
        self, optimizers: Sequence[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None
    ) -> None:
        if not self._complete or self.measurement is not None:
            raise ValueError("finish() comes once, after the `with accumulate(...)` block has ended")
        if scaler is not self._scaler:
            raise ValueError("finish() takes the scaler that backward() was given, or none when it was given none")
        layout = self._tap.layout
        require_covered(layout, optimizers)
        if any(parameter.requires_grad for parameter in layout.frozen):
            raise ValueError("a parameter was unfrozen after attach(); call detach() and attach() again")


class MicroBatch:
    """The context of one micro-batch; made by ``Window.micro_batch``."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._travelling = window._tap.synchroniser.micro_batch(window._begun + 1 == window.plan.micro_batches)

    def __enter__(self) -> None:
        window = self._window
        if window._begun == window.plan.micro_batches:
            raise ValueError(
                f"the plan of step {window.plan.step} has {window.plan.micro_batches} micro-batches, and this is one "
                f"more"
            )
        window._begun += 1
        window._inside = True
        self._travelling.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._travelling.__exit__(None, None, None)
        if kind is None and self._window._inside:
            raise ValueError("a micro-batch ended without window.backward(...); a filler runs it too, with weight 0")


def _enabled(scaler: torch.amp.GradScaler | None) -> torch.amp.GradScaler | None:
    """A disabled scaler steps whatever the gradient is, so it counts as none."""
    return scaler if scaler is not None and scaler.is_enabled() else None


def _factor(weight: float | Tensor, unit: float, loss: Tensor) -> Tensor | None:
    """What the loss's gradient begins with, in place of 1."""
    if isinstance(weight, Tensor):
        return (weight / unit).to(loss.dtype).reshape(loss.shape)
    return None if weight == unit else torch.full_like(loss, weight / unit)


def _clip(norm: Tensor, max_norm: float) -> Tensor:
    """Factor that brings ``norm`` down to ``max_norm``; 1 below it."""
    return torch.clamp(max_norm / (norm + CLIP_EPS), max=1.0)
