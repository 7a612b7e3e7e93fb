"""Numbers on their way over the ranks: windows put theirs in, and several windows' numbers travel together.

A small collective costs as much as a large one, so numbers that nobody needs yet wait on their rank until some are
needed. Every rank's numbers go to every rank and are added up there, in rank order: the sum is the same to the last
bit whatever travelled together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from adabatch import distributed
from adabatch.distributed import Wait

# One window's numbers on one rank; tensors are scalars on the device, which the host does not wait for.
Row = Sequence[float | Tensor]


class Outbox:
    """Letters that have not travelled yet."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._waiting: list[tuple[Row, Letter]] = []

    def put(self, row: Row) -> Letter:
        """Put one window's numbers in; all rows have the same length."""
        letter = Letter(self)
        self._waiting.append((row, letter))
        return letter

    def send(self) -> None:
        """Let everything that waits travel, without waiting for it. Every rank calls it after the same windows."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        gathered, arrive = distributed.start_gather(_matrix([row for row, _ in waiting], self._device), self._group)
        delivery = _Delivery(gathered, arrive)
        for place, (_, letter) in enumerate(waiting):
            letter._delivery, letter._place = delivery, place


class Letter:
    """One window's numbers, from this rank's own to the sums over all ranks."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._delivery: _Delivery | None = None
        self._place = 0

    @property
    def travelled(self) -> bool:
        """Whether it is on its way or there, so that reading it is no collective."""
        return self._delivery is not None

    def on_device(self) -> Tensor:
        """The sums as a vector in double precision on the device. Collective when the letter has not travelled."""
        return self._delivered().sums()[self._place]

    def read(self) -> list[float]:
        """The sums; waits for the device. Collective when the letter has not travelled."""
        return self._delivered().read()[self._place]

    def _delivered(self) -> _Delivery:
        if self._delivery is None:
            self._outbox.send()
        assert self._delivery is not None
        return self._delivery


class _Delivery:
    """Letters that travelled together."""

    def __init__(self, gathered: Tensor, arrive: Wait) -> None:
        self._gathered: Tensor | None = gathered
        self._arrive = arrive
        self._sums: Tensor | None = None
        self._values: list[list[float]] | None = None
        self._copy: Copy | None = None
        if gathered.device.type == "cuda":
            # There the wait is the stream's, not the host's. Copied at once, so that reading waits for these windows
            # and not for what was queued after them.
            self._copy = Copy(self.sums())

    def sums(self) -> Tensor:
        """Sums over the ranks, (letters, numbers)."""
        if self._sums is None:
            self._arrive()
            self._sums, self._gathered = self._gathered.sum(0), None
        return self._sums

    def read(self) -> list[list[float]]:
        if self._values is None:
            self._values = self._copy.read() if self._copy else self.sums().tolist()
        return self._values


class Copy:
    """A tensor on its way to the host; begun at once on a GPU, where reading waits for no more than this."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list:
        """The tensor as (nested) lists of numbers."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


def _matrix(rows: Sequence[Row], device: torch.device) -> Tensor:
    """Rows as one tensor in double precision on the device."""
    numbers = [[0.0 if isinstance(number, Tensor) else number for number in row] for row in rows]
    matrix = _sent(torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda"), device)
    flat = [number for row in rows for number in row]
    places = [place for place, number in enumerate(flat) if isinstance(number, Tensor)]
    if places:
        values = torch.stack([flat[place].double() for place in places])
        where = _sent(torch.tensor(places, pin_memory=device.type == "cuda"), device)
        matrix.view(-1).index_put_((where,), values)
    return matrix


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """To a GPU from pinned memory: from other memory the host waits."""
    return tensor.to(device, non_blocking=True)
