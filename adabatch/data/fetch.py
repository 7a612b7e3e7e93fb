"""From positions to samples: reads the data set, with randomness keyed by (seed, position).

A data set may declare how it can be read:

- ``deterministic = True``: a sample depends on its index alone, so nothing is seeded; with a ``__getitems__`` it is
  read a batch at a time, and with ``collated = True`` that method's result is the batch;
- ``at(index, seed)``: makes the sample from its own seed;
- otherwise the global generators of torch, random and numpy are seeded before each ``dataset[index]``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy
import torch
from torch.utils.data import Subset, TensorDataset, get_worker_info


def sample_seed(seed: int, position: int | str) -> int:
    """The seed, in [0, 2**63), of the randomness inside the sample at ``position``."""
    digest = blake2b(f"sample {int(seed)} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(value: int) -> None:
    """Seed the CPU generators that code inside a sample draws from; accelerators' generators are left alone."""
    torch.default_generator.manual_seed(value)
    random.seed(value)
    numpy.random.seed([value & 0xFFFFFFFF, value >> 32])


@contextmanager
def generators_restored() -> Iterator[None]:
    """Give the global generators back as they were; in a worker, whose generators nobody else uses, do nothing."""
    if get_worker_info() is not None:
        yield
        return
    of_torch, of_python, of_numpy = torch.default_generator.get_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


class Chunks:
    """A data set seen through requests ``(positions, indices)``: the collated samples of each.

    Args:
        dataset: map-style data set.
        seed: of the randomness inside samples.
        collate: list of samples -> batch. It must not draw random numbers.
    """

    def __init__(self, dataset: Any, seed: int, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate = collate
        self._deterministic = is_deterministic(dataset)

    def __getitem__(self, request: tuple[Sequence[int], list[int]]) -> Any:
        positions, indices = request
        if not self._deterministic:
            with generators_restored():
                return self.collate([self._keyed(index, at) for index, at in zip(indices, positions, strict=True)])
        if not hasattr(self.dataset, "__getitems__"):
            return self.collate([self._read(index) for index in indices])
        samples = self.dataset.__getitems__(indices)
        return samples if getattr(self.dataset, "collated", False) else self.collate(samples)

    def _keyed(self, index: int, position: int) -> Any:
        seed = sample_seed(self.seed, position)
        if hasattr(self.dataset, "at"):
            with _naming(index, position):
                return self.dataset.at(index, seed)
        seed_generators(seed)
        return self._read(index, position)

    def _read(self, index: int, position: int | None = None) -> Any:
        with _naming(index, position):
            return self.dataset[index]


def is_deterministic(dataset: Any) -> bool:
    """Whether a sample is a function of its index alone, as the data set declares."""
    if isinstance(dataset, Subset):
        return is_deterministic(dataset.dataset)
    return bool(getattr(dataset, "deterministic", isinstance(dataset, TensorDataset)))


@contextmanager
def _naming(index: int, position: int | None) -> Iterator[None]:
    """Say in an error of the data set which sample it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while reading sample {index}" + ("" if position is None else f" for position {position}"))
        raise
