"""Rulers: other lengths of a gradient than the Euclidean one, whose noise scale is measured in the same windows.

Every such length is a quadratic form, so that the same unbiased formulas hold for it: a squared length of the mean
gradient, and the sum of the groups' squared lengths.

A view that a window cannot be measured in has the length NaN: it spreads to all ranks with the sums, and the window's
measurement then comes without that view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from adabatch.gradients.layout import Layout


class Ruler(Protocol):
    """A way to measure gradients, one at a time; one view of each window.

    Attributes:
        name: the view's name, as ``Measurement.views`` and an estimate's geometry say it.
    """

    name: str

    def open(self) -> None:
        """A window begins: what is needed from the optimizer is taken anew, when the window's first gradient comes."""

    def square(self, index: int, gradient: Tensor) -> Tensor | None:
        """Squared length of the gradient of parameter ``index`` (of ``Layout.parameters``), a scalar; ``None`` where
        this view does not look."""


class Instrument(Protocol):
    """Rulers that share their work: several views from one pass over the gradients.

    Attributes:
        names: the views' names.
    """

    names: tuple[str, ...]

    def open(self) -> None:
        """As ``Ruler.open``."""

    def reading(self) -> Reading:
        """Begin to add up one gradient of the whole model, which comes in parts."""


class Reading(Protocol):
    """One gradient of the whole model on its way through an instrument."""

    def see(
        self,
        indices: Sequence[int],
        gradients: Sequence[Tensor],
        norms: Sequence[Tensor],
    ) -> None:
        """Take gradients of parameters in, each parameter's once; they may change afterwards.

        Args:
            norms: each one's Euclidean norm, as ``norms.pieces`` gives it.
        """

    def total(self) -> Tensor:
        """Squared lengths, (views,), in double precision; the same to the last bit in whatever order they came."""


def instruments(rulers: Iterable[Ruler | Instrument]) -> tuple[Instrument, ...]:
    """Everything as instruments, in the same order."""
    return tuple(_Single(ruler) if hasattr(ruler, "square") else ruler for ruler in rulers)


def names(rulers: Iterable[Ruler | Instrument]) -> tuple[str, ...]:
    """The views' names.

    Raises:
        ValueError: for one that comes twice.
    """
    found = [name for instrument in instruments(rulers) for name in instrument.names]
    for name in found:
        if found.count(name) > 1:
            raise ValueError(f"two rulers measure the view {name!r}, of {', '.join(found)}; leave one of them away")
    return tuple(found)


class Readings:
    """One gradient of the whole model, seen by every instrument."""

    def __init__(self, used: Sequence[Instrument] = (), device: torch.device | None = None) -> None:
        self._used = used
        self._device = device
        self._readings: list[Reading] = []
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._readings = [instrument.reading() for instrument in self._used]

    def see(self, indices: Sequence[int], gradients: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
        """As ``Reading.see``."""
        for reading in self._readings:
            reading.see(indices, gradients, norms)

    def totals(self) -> Tensor:
        """Squared lengths in all views, (views,), in double precision on the device."""
        if not self._readings:
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        return torch.cat([reading.total().to(self._device) for reading in self._readings])


def share(layout: Layout) -> frozenset[int]:
    """The parameters whose part of the mean gradient this rank measures, about as many elements on each rank.

    All ranks have the same mean gradient, so each measures a part of it, and the numbers are added up with those that
    travel anyhow. Where ranks have shards, each measures its own.
    """
    if layout.sharded:
        return frozenset(range(len(layout.parameters)))
    sizes = sorted(((one.numel(), index) for index, one in enumerate(layout.parameters)), reverse=True)
    shares: list[list[int]] = [[] for _ in range(layout.world)]
    room = [0] * layout.world
    for size, index in sizes:
        smallest = room.index(min(room))
        shares[smallest].append(index)
        room[smallest] += size
    return frozenset(shares[layout.rank])


def summed(squares: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of scalars, in double precision; 0 for none."""
    if not squares:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(list(squares)).sum(dtype=torch.float64)


class _Single:
    """A ruler as an instrument of one view."""

    def __init__(self, ruler: Ruler) -> None:
        self.names = (ruler.name,)
        self.open = ruler.open
        self._ruler = ruler

    def reading(self) -> Reading:
        return _Squares(self._ruler)


class _Squares:
    """Squared lengths by parameter, added up in the parameters' order."""

    def __init__(self, ruler: Ruler) -> None:
        self._ruler = ruler
        self._squares: dict[int, Tensor] = {}
        self._device = torch.device("cpu")

    def see(
        self,
        indices: Sequence[int],
        gradients: Sequence[Tensor],
        norms: Sequence[Tensor],
    ) -> None:
        for index, gradient in zip(indices, gradients):
            self._device = gradient.device
            square = self._ruler.square(index, gradient)
            if square is not None:
                self._squares[index] = square

    def total(self) -> Tensor:
        return summed([self._squares[index] for index in sorted(self._squares)], self._device).reshape(1)
