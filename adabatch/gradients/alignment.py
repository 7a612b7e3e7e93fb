"""Held-out alignments: how well the update of a set of groups fits the gradient of the others, for sets of many sizes.

For optimizers whose step has a length of its own (the sign; Muon's orthogonalisation) no length of the gradient tells
how much a batch achieves, but a(m) = E<u(g_m), g'> does: see ``adabatch.alignment``. Here every micro-batch of every
rank is a group, and sets of 1, 2, 4, ... groups of one rank are compared with all the rest of the window:

    align = AlignmentTap(model, optimizer)
    for micro_batch in ...:
        loss.backward()
        align.note(samples=len(micro_batch))
    pending = align.read()          # before clipping and the step
    alignment = pending.read()      # an ``adabatch.alignment.Alignment``

The rest is the window's gradient, which the ranks have reduced anyway, less the set's own: besides that only a few
numbers go over the ranks. In turn, u of the rest of the window is multiplied with what it is the rest of: a rank's share,
or a quarter of the window where there are one or two ranks and 2^n micro-batches on each. That reaches beyond half a
window, and about halves the standard error of the fitted scale (simulated).

What is measured is u of the window's own gradient. Momentum is left out: a step whose direction is mostly past gradients
says little about this batch. With momentum mu a step averages over about (1 + mu)/(1 - mu) batches, and the batch at
which efficiency is lost is smaller by up to that factor; how much of it is left to calibration.

Cost of a measured window with K micro-batches on each rank: about 2 K maps, and up to 2 log2(K) + 8 copies of the
chosen parameters' gradients, in single precision at least. Windows that are not measured cost nothing (``measure``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from adabatch.alignment import Alignment, Reading
from adabatch.gradients import layout as layouts
from adabatch.gradients.layout import HALF
from adabatch.gradients.outbox import Letter, Outbox
from adabatch.gradients.sets import (
    COLUMNS,
    OWN,
    PRODUCT,
    REST,
    SAMPLES,
    SETS,
    SIZES,
    WEIGHT,
    Gradients,
    Groups,
    Sets,
)
from adabatch.gradients.statistics import checked
from adabatch.gradients.taps import Tap, scale_of
from adabatch.gradients.updates import Update, chosen, trained
from adabatch.gradients.windows import Window

# A rest that weighs less than this share of the window is none.
LEAST = 1e-9


class AlignmentTap:
    """A tap that measures alignments, and a context manager that detaches at its end.

    It measures until told otherwise, and works beside an ordinary tap on the same model, in the same windows.

    Args:
        model: the module that the loop calls: plain, or in DistributedDataParallel; compiled or not.
        optimizer: whose parameters are looked at; or several, whose steps are of one kind. Where it is torch.optim.Muon
            these are the hidden matrices; what else the model has belongs to its companion, and to the companion's
            geometry. Groups count in proportion to their learning rates.
        update: ``sign``, ``muon``, or a function from a gradient and its parameter group to the step's direction, whose
            length must not depend on the gradient's; by default what the optimizer does (``updates.chosen``).
        tap: the ordinary tap on the same model, if there is one: under its windows gradients may be summed over the
            ranks and not averaged.

    Raises:
        ValueError: for an optimizer or update that is not known, sharded models, parameters that the update does not
            take, and models that are not supported, naming what is.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        update: str | Update | None = None,
        tap: Tap | None = None,
    ) -> None:
        self.layout = layouts.survey(getattr(model, "_orig_mod", model)) if tap is None else tap.layout
        if self.layout.sharded:
            raise ValueError(
                "alignments are not measured under FSDP2 (fully_shard), where no rank has a whole gradient of its "
                "own; use DistributedDataParallel, or the Euclidean noise scale"
            )
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        layouts.require_covered(self.layout, optimizers)
        self.geometry, self._update = chosen(optimizers, update)
        found = trained(self.layout, optimizers, self.geometry)
        self._names = [name for name, _, _ in found]
        self._parameters = [parameter for _, parameter, _ in found]
        self._groups = [group for _, _, group in found]
        self._tap = tap
        self._outbox = Outbox(self.layout.group, self.layout.device)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.measure(True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    @property
    def measuring(self) -> bool:
        """Whether the hooks are on."""
        return bool(self._handles)

    def measure(self, on: bool) -> None:
        """Measure the window that begins now, and those that follow, or not: then there are no hooks. The same on
        every rank."""
        if on and not self._handles:
            self._handles = [parameter.register_hook(self._hook(i)) for i, parameter in enumerate(self._parameters)]
        elif not on:
            for handle in self._handles:
                handle.remove()
            self._handles = []
        self._open()

    def detach(self) -> None:
        """Remove all hooks."""
        self.measure(False)

    def note(self, samples: int, weight: float | Tensor | None = None) -> None:
        """Take in one micro-batch; call it after the micro-batch's backward, with what the ordinary tap is told.

        Args:
            samples: independent units in it; 0 for a filler.
            weight: loss weight of its gradient; its samples by default. One of weight 0 is no group.

        Raises:
            ValueError: when no gradient came, or it came twice; for a weight that is negative or not finite.
        """
        if not self.measuring:
            return
        weight = checked(samples, weight)
        held, self._held = self._held, {}
        if self._repeated is not None:
            raise ValueError(
                f"the gradient of parameter {self._names[self._repeated]!r} arrived twice in one micro-batch: call "
                f"note() after each backward, and measure(True) before a window where backward ran outside of one"
            )
        is_filler = not isinstance(weight, Tensor) and weight == 0
        if not held and not is_filler:
            raise ValueError(
                f"no gradient arrived at any of the {len(self._parameters)} parameters (first: {self._names[0]!r}): "
                f"backward did not reach them, or note() came before it"
            )
        self._noted = True
        if not is_filler:
            with torch.no_grad():
                self._sets.take(Groups([_single(held.get(i)) for i in range(len(self._parameters))], weight, samples))

    def read(
        self,
        *,
        factor: float = 1.0,
        scaler: torch.amp.GradScaler | None = None,
        window: Window | None = None,
    ) -> PendingAlignment | None:
        """End the window: its alignments, on their way over the ranks; ``None`` when it was not measured. Collective.

        In a loop of its own, call it after the last backward and ``scaler.unscale_``, before clipping and the step. For
        a window of ``accumulate``, call it after its block and before ``finish``, which divides the gradient.

        Args:
            factor: what ``.grad`` must be multiplied by to be the window's mean gradient, as for ``Tap.read``.
            scaler: the gradient scaler that was in force during backward, in a loop of its own.
            window: the window, which knows both of these.

        Raises:
            ValueError: before any ``note``, and for a window that is finished.
        """
        if not self.measuring:
            return None
        if not self._noted:
            raise ValueError("read() came before any note(): call note() after each micro-batch's backward")
        if window is not None and window.measurement is not None:
            raise ValueError("read(window=...) comes before window.finish(), which divides the gradient by its weight")
        scaler = scaler if window is None else window._scaler
        scale = None if scaler is None or not scaler.is_enabled() else scale_of(scaler, self.layout.device)
        reduction = self._reduction()
        to_sum = reduction if scale is None or window is not None else reduction * scale
        with torch.no_grad():
            row = self._sets.numbers([_single(parameter.grad) for parameter in self._parameters], to_sum)
        letter = self._outbox.put([*row, self._sets.weight, float(self._sets.samples)])
        self._outbox.send()
        self._open()
        unit = factor / reduction if window is None else window._unit
        return PendingAlignment(letter, unit, over_weight=window is not None, scale=scale)

    def _open(self) -> None:
        self._held: dict[int, Tensor] = {}
        self._repeated: int | None = None
        self._noted = False
        self._rates: list[float] | None = None
        self._sets = Sets(self._updated, self.layout.world, self.layout.device)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if index in self._held:
                self._repeated = index
            # A gradient that somebody holds is not taken over as .grad, and later changed: torch copies it.
            self._held[index] = gradient

        return hook

    def _reduction(self) -> int:
        if self._tap is not None:
            return self._tap.source.reduction
        return self.layout.world if self.layout.parallel else 1

    def _updated(self, gradients: Gradients) -> Gradients:
        """The updates of all parameters, in proportion to their learning rates; the largest rate is 1."""
        if self._rates is None:
            rates = [float(group["lr"]) for group in self._groups]
            self._rates = [rate / max(rates) if max(rates) > 0 else 1.0 for rate in rates]
        updates = [None if one is None else self._update(one, group) for one, group in zip(gradients, self._groups)]
        return [one if one is None or rate == 1.0 else one * rate for one, rate in zip(updates, self._rates)]


class PendingAlignment:
    """The alignments of one window, on their way: ``read`` waits for them, nothing else does."""

    def __init__(self, letter: Letter, unit: float, *, over_weight: bool, scale: Tensor | None) -> None:
        """
        Args:
            letter: the numbers that are summed over the ranks.
            unit: what a group's addition to the gradient is multiplied by to be its part of the mean gradient.
            over_weight: whether that is to be divided by the window's weight, which only the sum tells.
            scale: the loss scale that was in force, if there was one.
        """
        self._letter = letter
        self._unit = unit
        self._over_weight = over_weight
        self._scale = scale
        self._alignment: Alignment | None = None

    def read(self) -> Alignment:
        """The alignments; waits for the device on the first call. There are none when something was not finite."""
        if self._alignment is None:
            self._alignment = self._made()
        return self._alignment

    def _made(self) -> Alignment:
        *numbers, weight, samples = self._letter.read()
        unit = self._unit / (weight or math.nan) if self._over_weight else self._unit
        unit = unit if self._scale is None else unit / self._scale.item()
        if not all(map(math.isfinite, [*numbers, unit])):
            return Alignment(round(samples))
        sizes = [numbers[i * COLUMNS : (i + 1) * COLUMNS] for i in range(SIZES)]
        for column, whole in ((WEIGHT, weight), (SAMPLES, samples)):
            sizes[REST][column] = sizes[REST][SETS] * whole - sizes[REST][column]
        found = [reading for size in sizes if (reading := _reading(size, weight, unit))]
        return Alignment(round(samples), tuple(sorted(found, key=lambda reading: reading.samples)))


def _reading(size: Sequence[float], weight: float, unit: float) -> Reading | None:
    """The average over the sets of one size, each weighing what its rest does, so that sums are all it takes."""
    sets, share = size[SETS], size[WEIGHT] / (weight or math.nan)
    # No sets, or none that has a rest.
    if not sets - share > LEAST * sets:
        return None
    return Reading(
        samples=size[SAMPLES] / sets,
        alignment=unit * size[PRODUCT] / (sets - share),
        own=unit * size[OWN] / share,
        pairs=round(sets),
    )


def _single(gradient: Tensor | None) -> Tensor | None:
    """In single precision at least: sums of half-precision gradients lose more than what is measured."""
    return gradient.float() if gradient is not None and gradient.dtype in HALF else gradient
