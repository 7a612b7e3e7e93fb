"""An adapter for iterable data sets, which have no random access: what can be kept is kept, the rest is said."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from adabatch.data.fetch import generators_restored, sample_seed, seed_generators

_NOT_PROMISED = (
    "an iterable data set is read in its own order, which adabatch cannot shuffle. Ranks stay disjoint (rank r takes "
    "every sample whose count is r modulo the number of ranks), but every rank reads all samples. A resumed run skips "
    "what was consumed by reading it again, and continues with the same samples only if the data set yields the same "
    "sequence each time it is iterated. A map-style data set has none of these limits."
)


class IterableAdapter:
    """An iterable data set that ``stream`` accepts; made by ``iterable``.

    Attributes:
        dataset: yields one sample at a time and is iterated anew for each epoch, after ``set_epoch(epoch)`` where it
            has such a method.
        not_promised: what holds for a map-style data set and does not hold here.
    """

    not_promised = _NOT_PROMISED

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset


def iterable(dataset: Any) -> IterableAdapter:
    """Adapt an ``IterableDataset``, or anything that can be iterated again and again, for ``stream``.

    Warns:
        UserWarning: with what cannot be promised.

    Raises:
        ValueError: when ``dataset`` is an iterator, which is used up after one epoch.
    """
    if not hasattr(dataset, "__iter__") or iter(dataset) is dataset:
        raise ValueError(
            f"{type(dataset).__name__} cannot be iterated once per epoch; pass a data set whose __iter__ makes a new "
            f"iterator each time"
        )
    warnings.warn(_NOT_PROMISED, stacklevel=2)
    return IterableAdapter(dataset)


class IterableChunks(IterableDataset):
    """The collated chunks of one rank: its samples from position ``start`` on, epoch after epoch."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        start: int,
        rank: int,
        world: int,
        micro_batch: int,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.start = start
        self.rank = rank
        self.world = world
        self.micro_batch = micro_batch
        self.collate = collate

    def __iter__(self) -> Iterator[Any]:
        samples: list[Any] = []
        for position, sample in enumerate(self._all_samples()):
            if position < self.start or position % self.world != self.rank:
                continue
            samples.append(sample)
            if len(samples) == self.micro_batch:
                yield self.collate(samples)
                samples = []

    def _all_samples(self) -> Iterator[Any]:
        """Every sample from position 0 on; the global generators are seeded by position before each is made."""
        position = 0
        for epoch in itertools.count():
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            samples = self._keyed(f"epoch {epoch}", lambda: iter(self.dataset))
            first = position
            while (sample := self._keyed(position, lambda: next(samples, _END))) is not _END:
                yield sample
                position += 1
            if position == first:
                raise ValueError(f"{type(self.dataset).__name__} yielded no sample in epoch {epoch}")

    def _keyed(self, key: int | str, make: Callable[[], Any]) -> Any:
        with generators_restored():
            seed_generators(sample_seed(self.seed, key))
            return make()


_END = object()
