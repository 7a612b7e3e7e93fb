"""The order in which samples are consumed: a keyed bijection, one epoch after another.

Position p of a run is sample ``index(p)`` of the data set. Each epoch visits every sample once, in an order of its own
that depends on (seed, epoch) alone, and nothing of the size of the data set is ever stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from hashlib import shake_128
from typing import TypeVar

import torch
from torch import Tensor

MAX_SIZE = 2**60

_ROUNDS = 16  # with fewer, orders of five to ten samples are measurably uneven
_BLOCK = 2**15  # positions computed at a time; temporaries of this length stay in the processor's cache
_MASK = 2**32 - 1

Whole = TypeVar("Whole", int, Tensor)


class SampleOrder:
    """Maps positions of a run to indices of a data set.

    The bijection is a generalised Feistel network: an index is a cell of an a x b table with a and b near the square
    root of the size (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, sections 4 and 5). In turn, each
    coordinate is shifted by a keyed hash of the other, and the few cells beyond the size are walked through. All
    arithmetic is on whole numbers below 2**63, so the order is the same on every platform.

    Args:
        size: samples in the data set.
        seed: any whole number.
        shuffle: ``False`` keeps the data set's own order in each epoch.

    Raises:
        ValueError: when the data set is empty or has more than 2**60 samples.
    """

    def __init__(self, size: int, seed: int = 0, *, shuffle: bool = True) -> None:
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"an order needs a data set of 1 to 2**60 samples, got size={size}")
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self._rows = math.isqrt(size - 1) + 1
        # An even number of columns, since the rounds would otherwise make even permutations only.
        self._columns = 2 * -(-size // (2 * self._rows))

    def epoch(self, position: int) -> int:
        """The epoch, from 0, that ``position`` belongs to."""
        return position // self.size

    def index(self, position: int) -> int:
        """The data set's index of the sample at ``position``."""
        if position < 0:
            raise ValueError(f"positions start at 0, got {position}")
        epoch, offset = divmod(position, self.size)
        if not self.shuffle:
            return offset
        keys = _epoch_keys(self.seed, epoch)
        index = self._permute(offset, keys)
        while index >= self.size:
            index = self._permute(index, keys)
        return index

    def indices(self, positions: Tensor) -> Tensor:
        """The indices of the samples at ``positions``: an int64 tensor in, one of the same shape out."""
        if positions.dtype != torch.int64:
            raise ValueError(f"positions must be an int64 tensor, got {positions.dtype}")
        if positions.numel() and int(positions.min()) < 0:
            raise ValueError(f"positions start at 0, got {int(positions.min())}")
        if not self.shuffle:
            return positions % self.size
        blocks = [self._block(block) for block in positions.reshape(-1).split(_BLOCK)]
        return torch.cat(blocks).reshape(positions.shape)

    def _block(self, positions: Tensor) -> Tensor:
        """``indices`` of a flat tensor, all at once."""
        if not positions.numel():
            return positions
        epochs = positions // self.size
        keys = self._keys_of(epochs)
        index = self._permute(positions - epochs * self.size, keys)
        outside = (index >= self.size).nonzero().squeeze(1)
        while outside.numel():
            chosen = [key[outside] if isinstance(key, Tensor) else key for key in keys]
            index[outside] = self._permute(index[outside], chosen)
            outside = outside[index[outside] >= self.size]
        return index

    def _keys_of(self, epochs: Tensor) -> Sequence[int] | Sequence[Tensor]:
        """The round keys for positions of these epochs: numbers for a single epoch, else one tensor per key."""
        first = int(epochs[0])
        if bool((epochs == first).all()):
            return _epoch_keys(self.seed, first)
        distinct, inverse = torch.unique(epochs, return_inverse=True)
        table = torch.tensor([_epoch_keys(self.seed, epoch) for epoch in distinct.tolist()])
        return [column[inverse] for column in table.T]

    def _permute(self, cell: Whole, keys: Sequence[int] | Sequence[Tensor]) -> Whole:
        """One pass of the network over cells of the table."""
        row, column = cell // self._columns, cell % self._columns
        for turn in range(0, 2 * _ROUNDS, 4):
            row = _shift(row, _hash(column, keys[turn], keys[turn + 1]), self._rows)
            column = _shift(column, _hash(row, keys[turn + 2], keys[turn + 3]), self._columns)
        return row * self._columns + column


def _shift(coordinate: Whole, hashed: Whole, length: int) -> Whole:
    """Move a coordinate around its axis by a 32-bit hash scaled to the axis' length."""
    moved = coordinate + ((hashed * length) >> 32)
    return moved - (moved >= length) * length


def _hash(value: Whole, first_key: int | Tensor, second_key: int | Tensor) -> Whole:
    """A keyed 32-bit mix of shifts and odd multipliers below 2**31, so that no product leaves 63 bits."""
    value = value ^ first_key
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & _MASK
    value = value ^ second_key
    value = ((value ^ (value >> 15)) * 0x21F0AAAD) & _MASK
    return value ^ (value >> 16)


@lru_cache(maxsize=1024)
def _epoch_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Two 32-bit keys per round, from a cryptographic hash of (seed, epoch)."""
    digest = shake_128(f"order {int(seed)} {epoch}".encode()).digest(8 * _ROUNDS)
    return tuple(int.from_bytes(digest[at : at + 4], "little") for at in range(0, 8 * _ROUNDS, 4))
