"""The moment when backward ends: the mean gradient is measured then, or at least noticed when it is changed later.

Some trainers clip before anybody is asked (Hugging Face's does). What a tap reads after that is a clipped mean beside
groups that are not, and nothing in the numbers tells. ``Early`` takes the mean gradient's lengths as soon as the
window's last backward is over; ``Unchanged`` finds out whether a gradient is still what backward has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adabatch.gradients.layout import Layout

# Where a gradient lies, and how often it was written to.
State = tuple[int, int] | None


class Lengths(NamedTuple):
    """What is measured of the mean gradient, on the device.

    Attributes:
        norm: of ``.grad``.
        squares: squared length in every view, the Euclidean one first.
        along: product with the optimizer's average past gradient; ``None`` where it was not taken.
    """

    norm: Tensor
    squares: list[Tensor]
    along: Tensor | None


class _Ends:
    """Calls ``ended`` at the end of every backward that reached a parameter and that ``begun`` says yes to.

    The end is that of the whole backward, with DDP's reduction copied back into ``.grad``: DDP asks for its own last
    turn late in backward, and under ``static_graph`` one turn later still, so this takes its turn twice.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], begun: Callable[[], bool], ended: Callable[[], None]
    ) -> None:
        self._parameters = parameters
        self._begun = begun
        self._ended = ended
        self._backward = -1
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def listen(self, on: bool) -> None:
        """Put the hooks on the parameters, or take them off."""
        if on and not self._handles:
            self._handles = [one.register_post_accumulate_grad_hook(self._arrived) for one in self._parameters]
        elif not on:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def _arrived(self, _: Tensor) -> None:
        # Told by its number, since one that fails never ends.
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return
        self._backward = backward
        if self._begun():
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._ended))


class Early:
    """Takes the mean gradient's lengths when a window's last backward ends.

    Args:
        layout: of the model.
        take: measures ``.grad`` as it is now, with its product with the momentum or without.
        last: whether the backward that is running is its window's last. ``None``: under DDP, whether it synchronises;
            without DDP each one may be, and the last one stands.

    Attributes:
        drift: whether the product with the momentum is taken.
    """

    def __init__(self, layout: Layout, take: Callable[[bool], Lengths], last: Callable[[], bool] | None) -> None:
        self.drift = False
        self._take = take
        self._last = last or _synchronising(layout)
        self._lengths: Lengths | None = None
        self._on = True
        self._ends = _Ends(layout.parameters, self._begun, self._ended)

    def listen(self, on: bool) -> None:
        """Put a hook on every parameter, or take them off."""
        self._ends.listen(on)
        if not on:
            self._lengths = None

    def open(self, on: bool) -> None:
        """Begin a window; with ``on`` false, one that is not going to be read."""
        self._on = on
        self._lengths = None

    def noted(self) -> None:
        """A micro-batch was noted."""

    def lengths(self, drift: bool) -> Lengths:
        """What was taken. The product with the momentum is, from the window after the first that asked for it.

        Raises:
            ValueError: when nothing was.
        """
        self.drift |= drift
        if self._lengths is None:
            raise ValueError(
                "with early=True the mean gradient is measured when the window's last backward ends, and it was not: "
                "`last` was not true during that backward (by default: DDP did not synchronise in it), it reached no "
                "parameter of the model, or tap.measure(False) was in force"
            )
        return self._lengths if drift else self._lengths._replace(along=None)

    def _begun(self) -> bool:
        # What an earlier backward has left is not the window's gradient any more.
        self._lengths = None
        return self._on and self._last()

    @torch.no_grad()
    def _ended(self) -> None:
        self._lengths = self._take(self.drift)


class Unchanged:
    """Whether the gradients are still what the window's last backward has left.

    torch counts how often a tensor was written to. The count of two gradients is remembered when a backward ends, and
    in ``note()`` when that backward reached neither of the two. ``GradScaler.unscale_`` does not count (torch 2.13); a
    clip does, also when it multiplies by 1. Under FSDP2 nothing is noticed: a clip of DTensors leaves the count alone.
    """

    def __init__(self, layout: Layout, take: Callable[[bool], Lengths]) -> None:
        self._take = take
        ends = dict.fromkeys((layout.parameters[0], layout.parameters[-1]))
        self._watched = () if layout.sharded else tuple(ends)
        self._seen = False
        self._on = True
        self._left: list[State] | None = None
        self._ends = _Ends(self._watched, lambda: self._on, self._ended)

    def listen(self, on: bool) -> None:
        """Put the hooks on, or take them off."""
        self._ends.listen(on)
        if not on:
            self._left, self._seen = None, False

    def open(self, on: bool) -> None:
        """Begin a window; with ``on`` false, one that is not going to be read."""
        self._on = on
        self._left, self._seen = None, False

    def noted(self) -> None:
        """A micro-batch was noted."""
        if not self._seen:
            self._left = self._now()
        self._seen = False

    def lengths(self, drift: bool) -> Lengths:
        """What ``.grad`` measures now.

        Raises:
            ValueError: when it is not what the last backward has left.
        """
        if self._left is not None and self._left != self._now():
            raise ValueError(
                "the gradients were changed between the window's last backward and read(), as by clipping, scaling or "
                "zero_grad(), so that they cannot be compared with what was seen in backward; call read() right after "
                "the last backward, or attach(..., early=True), which measures when backward ends"
            )
        return self._take(drift)

    def _ended(self) -> None:
        self._left, self._seen = self._now(), True

    def _now(self) -> list[State]:
        return [_state(parameter.grad) for parameter in self._watched]


def require_early(layout: Layout) -> None:
    """
    Raises:
        ValueError: where gradients cannot be measured early.
    """
    if layout.sharded:
        raise ValueError(
            "early=True is not supported under FSDP2, where the gradients of sharded parameters arrive outside of "
            "autograd; call read() after the last backward and before clipping"
        )


def _state(gradient: Tensor | None) -> State:
    return None if gradient is None else (gradient.data_ptr(), gradient._version)


def _synchronising(layout: Layout) -> Callable[[], bool]:
    # DDP's own flag, which no_sync() takes down.
    return lambda: all(module.require_backward_grad_sync for module in layout.parallel)
