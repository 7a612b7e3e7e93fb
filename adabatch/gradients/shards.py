"""FSDP2's reduce-scatter: each rank's whole gradient is seen before the reduction, one flat buffer per module.

When every micro-batch is synchronised, every micro-batch of every rank is a group; when only the last one is, FSDP2 has
added them up, and a rank's window is one group. Which of the two it was is seen from when the reduce-scatters came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adabatch.gradients.layout import Layout
from adabatch.gradients.norms import pieces, together
from adabatch.gradients.rulers import Instrument, Readings, Ruler, instruments, names
from adabatch.gradients.sharding import Shards, Unit

REMEDIES = (
    "call the model itself (not its .forward or a part of it), let the window's last backward synchronise "
    "(set_requires_gradient_sync(True)), and call note() after each backward"
)


class _Listener:
    """In place of one unit's reduce-scatter: shows the buffer to the source, then does what was done before.

    On a single rank torch leaves the reduce-scatter out, and this is the unit's all-reduce hook instead.
    """

    def __init__(self, source: ShardSource, place: int, inner: Any) -> None:
        self.source = source
        self.place = place
        self.inner = inner

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.source._see(self.place, input_tensor)
        return self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op)

    def look(self, reduced: Tensor) -> None:
        self.source._see(self.place, reduced)


class ShardSource:
    """FSDP2's reduce-scatter, which sees this rank's gradient before the reduction.

    A group is a micro-batch of a rank when each is synchronised, and a rank's whole window when only the last one is;
    ``by_rank`` says which it was in the window that was collected last.
    """

    kind = "fsdp"
    groups = "one group per synchronised backward of every rank"

    def __init__(self, layout: Layout, rulers: Sequence[Ruler | Instrument] = ()) -> None:
        """
        Raises:
            ValueError: when the model is not sharded, or another tap is attached to it.
        """
        if layout.shards is None:
            raise ValueError("kind='fsdp' is for models that fully_shard() was called on; use kind='auto'")
        self._shards: Shards = layout.shards
        self._units = layout.shards.units
        self._rulers = instruments(rulers)
        self._names = names(self._rulers)
        self._device = layout.device
        self._measuring = False
        self.by_rank = False
        shape = (len(self._units), 1 + len(self._names))
        # Written on FSDP2's streams, one line per unit, and read on the current one: nothing is handed from the memory
        # of one stream to the other's.
        self._squares = torch.zeros(shape, dtype=torch.float64, device=self._device)
        self._total = torch.zeros(shape[1], dtype=torch.float64, device=self._device)
        self._listeners = [self._listen(place, unit) for place, unit in enumerate(self._units)]
        self._forget()

    @property
    def measuring(self) -> bool:
        """Whether lengths are taken."""
        return self._measuring

    @property
    def reduction(self) -> float:
        """What a gradient is divided by, relative to the sum over all groups: FSDP2 takes the mean over the ranks, or
        divides by ``set_gradient_divide_factor``."""
        return self._shards.divisor

    def measure(self, on: bool) -> None:
        """Take lengths from now on, or let the buffers pass unseen."""
        if on and not self._measuring:
            self._forget()
        self._measuring = on

    def open(self, summing: bool = False) -> None:
        """Begin a window: forget what was seen outside of it. FSDP2's division fuses with its reduction: it stays."""
        self._forget()

    def close_micro_batch(self, weight: float | Tensor, last: bool | None = None) -> None:
        """Take in the micro-batch whose backward is done.

        Raises:
            ValueError: when a module was reduced twice in it, or some of its parameters had no gradient.
        """
        if not self._measuring:
            return
        self._raise_problem()
        self._blank &= not isinstance(weight, Tensor) and weight == 0
        self._synchronised.append(any(self._seen))
        if not self._synchronised[-1]:
            return
        for event in self._events:
            torch.get_device_module(self._device).current_stream().wait_event(event)
        if not self._blank:
            self._total += self._squares.sum(dim=0)
        self._forget_micro_batch()

    def collect(self) -> Tensor | None:
        """Squared lengths, (views,), summed over this rank's groups of the window; ``None`` when not measured.

        Raises:
            ValueError: when no reduce-scatter was seen, not every module's was, or only some micro-batches before the
                last were synchronised.
        """
        if not self._measuring:
            return None
        for unit, listener in zip(self._units, self._listeners):
            self._require_listening(unit, listener)
            self._require_reduced(unit)
        self.by_rank = _by_rank(self._synchronised, self._units[0].name)
        return self._total.clone()

    def detach(self) -> None:
        """Put back the reduce-scatter that was there before."""
        self._measuring = False
        for unit, listener in zip(self._units, self._listeners):
            if self._shards.ranks == 1:
                unit.module.set_all_reduce_hook(None)
            elif unit.inner._reduce_scatter_comm is listener:
                unit.module.set_custom_reduce_scatter(listener.inner)

    # -- for the listeners

    def _see(self, place: int, buffer: Tensor) -> None:
        """A unit's buffer, on the stream that reduces it; errors wait for the end of the micro-batch, as FSDP2 does not
        get over them here."""
        if not self._measuring:
            return
        self._seen[place] += 1
        if self._seen[place] > 1:
            return
        unit = self._units[place]
        squares = together([pieces(buffer)], buffer.device).square()
        if self._rulers:
            squares = torch.cat((squares.reshape(1), self._views(unit, buffer)))
        before = unit.divided_before(buffer.dtype, self._shards.ranks)
        self._squares[place] = squares if before == 1.0 else squares * before**2
        if buffer.device.type != "cpu":
            self._events.append(torch.get_device_module(buffer.device).current_stream().record_event())

    def _views(self, unit: Unit, buffer: Tensor) -> Tensor:
        """Squared lengths in the views beside the Euclidean one, parameter by parameter."""
        rows = buffer.view(self._shards.ranks // self._shards.replicas, -1)
        if rows.shape[1] != unit.columns:
            self._incomplete = unit.name
            return torch.zeros(len(self._names), dtype=torch.float64, device=buffer.device)
        readings = Readings(self._rulers, buffer.device)
        blocks = rows.split([placed.columns for placed in unit.parameters], dim=1)
        for placed, block in zip(unit.parameters, blocks):
            gradient = placed.gradient(block)
            readings.see((placed.index,), (gradient,), (pieces(gradient),))
        return readings.totals()

    def _listen(self, place: int, unit: Unit) -> _Listener:
        inner, hook = unit.inner._reduce_scatter_comm, unit.inner._all_reduce_hook
        if isinstance(inner, _Listener) or isinstance(getattr(hook, "__self__", None), _Listener):
            raise ValueError(f"another tap is attached to the FSDP2 module {unit.name!r}; call its detach() first")
        if hook is not None:
            raise ValueError(
                f"the FSDP2 module {unit.name!r} has an all-reduce hook of its own, so its gradients are reduced over "
                f"ranks that its mesh does not name; use a 2-D mesh (replicate, shard) instead of set_all_reduce_hook()"
            )
        listener = _Listener(self, place, inner)
        if self._shards.ranks == 1:
            unit.module.set_all_reduce_hook(listener.look)
        else:
            unit.module.set_custom_reduce_scatter(listener)
        return listener

    def _require_listening(self, unit: Unit, listener: _Listener) -> None:
        if self._shards.ranks == 1:
            listening = unit.inner._all_reduce_hook == listener.look
        else:
            listening = unit.inner._reduce_scatter_comm is listener and unit.inner._all_reduce_hook is None
        if not listening:
            raise ValueError(
                f"the reduce-scatter or all-reduce hook of the FSDP2 module {unit.name!r} was replaced after attach(), "
                f"so its gradients are not seen; call set_custom_reduce_scatter() and the like before attach()"
            )

    def _require_reduced(self, unit: Unit) -> None:
        if any(self._synchronised) and unit.unreduced:
            raise ValueError(
                f"the FSDP2 module {unit.name!r} holds gradients that it has not reduced, while other modules have: "
                f"{REMEDIES}"
            )

    def _raise_problem(self) -> None:
        for unit, times in zip(self._units, self._seen):
            if times > 1:
                raise ValueError(
                    f"FSDP2 reduced the gradients of module {unit.name!r} {times} times in one micro-batch, in parts "
                    f"whose sum has no known length: {REMEDIES}; add the losses up for one backward, and call each "
                    f"module of one fully_shard([...]) once per forward pass"
                )
        if self._incomplete is not None:
            raise ValueError(
                f"some parameters of the FSDP2 module {self._incomplete!r} had no gradient in this micro-batch, and "
                f"then its buffer cannot be told apart by parameter, as the views "
                f"{', '.join(self._names)} need it; call set_reduce_scatter_unused_params(True) on the "
                f"model (torch 2.13), freeze what is not used, or measure without these views"
            )

    def _forget_micro_batch(self) -> None:
        self._seen = [0] * len(self._units)
        self._events: list[Any] = []
        self._incomplete: str | None = None
        self._blank = True
        self._squares.zero_()

    def _forget(self) -> None:
        self._forget_micro_batch()
        self._synchronised: list[bool] = []
        self._total.zero_()


def _by_rank(synchronised: Sequence[bool], first: str) -> bool:
    """Whether only the last micro-batch was synchronised; not that, all of them were."""
    if all(synchronised) and synchronised:
        return False
    if synchronised and synchronised[-1] and not any(synchronised[:-1]):
        return True
    if not any(synchronised):
        raise ValueError(
            f"FSDP2 reduced no gradient in this window of {len(synchronised)} micro-batches (first module: {first!r}): "
            f"{REMEDIES}"
        )
    when = [number for number, was in enumerate(synchronised, start=1) if was]
    raise ValueError(
        f"FSDP2 reduced gradients in the micro-batches {when} of {len(synchronised)}: synchronise either each of them "
        f"or the last one only (set_requires_gradient_sync)"
    )
