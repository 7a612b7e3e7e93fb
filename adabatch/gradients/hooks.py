"""A hook on every trainable parameter: each micro-batch of every rank is a group.

The hook of a leaf fires once per backward with the whole increment, before it is added to ``.grad``: also under DDP,
where it is this rank's own, and also when a parameter is used in several places. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adabatch.gradients.layout import HALF, Layout
from adabatch.gradients.norms import pieces, together
from adabatch.gradients.rulers import Instrument, Readings, Ruler, instruments, names

# On a GPU every norm is a kernel launch, so small gradients are held until their micro-batch ends and taken by one.
# Held ones are bounded in all: 4 MB in single precision. On a CPU holding buys nothing (measured), it costs a copy.
HELD_ELEMENTS = 1_000_000


class HookSource:
    """A hook on every trainable parameter, which sees each backward's whole increment: every micro-batch is a group."""

    kind = "hooks"
    groups = "one group per micro-batch of every rank"
    by_rank = False

    def __init__(self, layout: Layout, rulers: Sequence[Ruler | Instrument] = ()) -> None:
        self._layout = layout
        self._views = len(names(rulers))
        self._readings = Readings(instruments(rulers), layout.device)
        self._held_from = _held(layout)
        self._handles: list[RemovableHandle] = []
        self._seen = bytearray(len(layout.parameters))
        self._repeated: int | None = None
        self._parts: list[Tensor] = []
        self._held: dict[int, Tensor] = {}
        self._squares: Tensor | None = None

    @property
    def measuring(self) -> bool:
        """Whether the hooks are on."""
        return bool(self._handles)

    @property
    def reduction(self) -> int:
        """What a gradient is divided by, relative to the sum over all groups: DDP takes the mean over ranks."""
        return self._layout.world if self._layout.parallel else 1

    def measure(self, on: bool) -> None:
        """Put the hooks on, or take them off so that they cost nothing."""
        if on and not self._handles:
            self._handles = [
                parameter.register_hook(self._hook(index)) for index, parameter in enumerate(self._layout.parameters)
            ]
        elif not on:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def open(self, summing: bool = False) -> None:
        """Begin a window: forget what was seen outside of it. The sum over ranks is DDP's business here."""
        self._forget()
        self._squares = None

    def close_micro_batch(self, weight: float | Tensor, last: bool | None = None) -> None:
        """Take in the micro-batch whose backward is done; one of weight 0 is no group.

        Raises:
            ValueError: when no hook fired, or backward ran twice.
        """
        if not self._handles:
            return
        if self._repeated is not None:
            name = self._layout.names[self._repeated]
            raise ValueError(
                f"the gradient of parameter {name!r} arrived twice in one micro-batch: call note() after each "
                f"backward, add the losses up for one backward, and use use_reentrant=False in activation checkpointing"
            )
        if not any(self._seen) and not _is_zero(weight):
            raise ValueError(
                f"no gradient arrived at any of the {len(self._seen)} parameters (first: {self._layout.names[0]!r}): "
                f"backward did not reach the tapped model, its parameters were replaced after attach(), or note() came "
                f"before backward"
            )
        if not _is_zero(weight):
            squares = self._lengths()
            self._squares = squares if self._squares is None else self._squares + squares
        self._forget()

    def collect(self) -> Tensor | None:
        """Squared lengths, (views,), summed over the window's groups on this rank; ``None`` when not measured."""
        squares, self._squares = self._squares, None
        if self.measuring and squares is None:
            squares = torch.zeros(1 + self._views, dtype=torch.float64, device=self._layout.device)
        return squares

    def detach(self) -> None:
        """Remove every hook."""
        self.measure(False)

    def _lengths(self) -> Tensor:
        """Squared lengths of the micro-batch's gradient, (views,)."""
        parts = self._parts
        if self._held:
            held = list(self._held.values())
            norms = torch._foreach_norm(held, 2, _accumulator(held[0].dtype))
            self._readings.see(list(self._held), held, norms)
            parts = [*parts, *norms]
        square = together(parts, self._layout.device).square()
        return torch.cat([square.reshape(1), self._readings.totals()])

    def _forget(self) -> None:
        self._seen[:] = bytes(len(self._seen))
        self._repeated = None
        self._parts.clear()
        self._held.clear()
        self._readings.clear()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        seen, parts, held, readings = self._seen, self._parts, self._held, self._readings
        hold = index in self._held_from

        def hook(gradient: Tensor) -> None:
            if seen[index]:
                self._repeated = index
                return
            seen[index] = 1
            if hold and gradient.layout == torch.strided:
                held[index] = gradient
            else:
                norm = pieces(gradient)
                parts.append(norm)
                readings.see((index,), (gradient,), (norm,))

        return hook


def _is_zero(weight: float | Tensor) -> bool:
    return not isinstance(weight, Tensor) and weight == 0


def _accumulator(dtype: torch.dtype) -> torch.dtype | None:
    return torch.float32 if dtype in HALF else None


def _held(layout: Layout) -> frozenset[int]:
    """Which parameters' gradients are held until the micro-batch ends: the smallest ones of one dtype, on a GPU."""
    if layout.device.type == "cpu":
        return frozenset()
    sizes = sorted(
        (parameter.numel(), index)
        for index, parameter in enumerate(layout.parameters)
        if parameter.dtype == layout.parameters[0].dtype
    )
    room = list(accumulate(size for size, _ in sizes))
    return frozenset(index for (_, index), total in zip(sizes, room) if total <= HELD_ELEMENTS)
