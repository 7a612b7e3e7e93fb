"""Alignments in a training loop: a tap for each view, told together, and read together with the window's measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, Self

import torch
from torch import Tensor

from adabatch.gradients.alignment import AlignmentTap, PendingAlignment
from adabatch.gradients.layout import Layout
from adabatch.gradients.taps import Tap
from adabatch.gradients.updates import UPDATES, is_muon
from adabatch.gradients.windows import Window
from adabatch.noise import Measurement

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class _Readable(Protocol):
    def read(self) -> Measurement: ...


class AlignmentTaps:
    """Alignment taps on one model, beside its ordinary tap; off until ``measure``. A context manager that detaches.

        with accumulate(tap, plan) as window:
            aligned.measure(plan.align)
            for micro_batch in ...:
                with window.micro_batch():
                    window.backward(loss, samples=samples, weight=weight)
                aligned.note(samples, weight)
        pending = aligned.read(window)              # before finish, which divides the gradient
        measured = Aligned(window.finish(optimizer).measurement, pending)

    Args:
        views: of ``UPDATES``. ``muon`` looks at the parameters of Muon where there is one; ``sign`` at those of all
            other optimizers, or at all where there is no other. Each of both has the unit of its own learning rates.
        optimizers: of the model's parameters.
        tap: the ordinary tap.

    Raises:
        ValueError: for an unknown view, and as ``AlignmentTap`` does.
    """

    def __init__(self, views: Sequence[str], optimizers: Optimizers, tap: Tap) -> None:
        if unknown := [view for view in views if view not in UPDATES]:
            raise ValueError(f"alignments are measured of {' and '.join(UPDATES)}, not of {', '.join(unknown)}")
        every = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self._taps: dict[str, AlignmentTap] = {}
        for view in views:
            judged = [one for one in every if is_muon(one) == (view == "muon")] or every
            self._taps[view] = AlignmentTap(tap.model, judged, update=view, tap=tap)
        self.measure(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.measure(False)

    def measure(self, on: bool) -> None:
        """Measure the window that begins now, or not; the same on every rank."""
        for tap in self._taps.values():
            if on or tap.measuring:
                tap.measure(on)

    def note(self, samples: int, weight: float | Tensor | None = None) -> None:
        """Take in one micro-batch, after its backward."""
        for tap in self._taps.values():
            tap.note(samples, weight)

    def read(self, window: Window) -> dict[str, PendingAlignment]:
        """End the window, after its block and before ``finish``: its alignments by view, none when it was not measured.
        Collective."""
        found = {view: tap.read(window=window) for view, tap in self._taps.items()}
        return {view: pending for view, pending in found.items() if pending is not None}


class Aligned:
    """One window's measurement together with its alignments; ``read`` waits for both."""

    def __init__(self, measurement: _Readable, alignments: Mapping[str, PendingAlignment]) -> None:
        self._measurement = measurement
        self._alignments = alignments

    def read(self) -> Measurement:
        """The measurement; waits for the device on the first call."""
        found = {view: pending.read() for view, pending in self._alignments.items()}
        return replace(self._measurement.read(), alignments=found)


def suggested(optimizers: Optimizers, layout: Layout) -> str | None:
    """``muon`` where torch.optim.Muon steps the hidden matrices; ``None`` for other optimizers, and under FSDP2."""
    every = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    return "muon" if any(map(is_muon, every)) and not layout.sharded else None
