"""Each rank's stream of micro-batches, over a plain torch DataLoader.

Rank r of W reads the positions p = r (mod W) from ``start`` on, in chunks of ``micro_batch`` samples that workers fetch
ahead without knowing any batch size. ``take`` cuts a plan's micro-batches out of them, so a batch may change at every
step, at once, whatever was prefetched. What is fetched and never taken is simply forgotten: the cursor is the plan's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from adabatch.data import structure
from adabatch.data.fetch import Chunks
from adabatch.data.iterables import IterableAdapter, IterableChunks
from adabatch.data.order import SampleOrder
from adabatch.plan import BatchPlan

_FIRST_BLOCK, _LARGEST_BLOCK = 64, 4096  # positions whose order is computed at once


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward/backward on one rank.

    Attributes:
        data: the collated samples. A filler, which keeps ranks in step, carries one real sample to run through the
            model with weight 0; it is not consumed.
        samples: how many samples count; 0 for a filler.
        positions: their positions in the sample order.
    """

    data: Any
    samples: int
    positions: range


def stream(
    dataset: Any,
    *,
    seed: int,
    start: int = 0,
    rank: int = 0,
    world: int = 1,
    micro_batch: int,
    workers: int = 0,
    prefetch: int = 2,
    collate: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool = False,
    shuffle: bool = True,
    timeout_seconds: float = 0,
    context: str | None = None,
) -> Stream:
    """The stream of ``rank`` from position ``start`` on; the same samples for any workers, prefetch and micro-batch.

    Args:
        dataset: map-style data set, or the result of ``iterable``. See ``adabatch.data.fetch`` for what it may declare.
        seed: of the sample order and of the randomness inside samples.
        start: samples that the run has consumed so far, over all ranks.
        rank, world: this rank and the number of ranks.
        micro_batch: samples fetched at a time; plans usually take as many per micro-batch, and then nothing is copied.
        workers: processes that fetch; 0 fetches in this one.
        prefetch: chunks that each worker fetches ahead.
        collate: list of samples -> batch, samples along dimension 0; by default torch's ``default_collate``. It must
            not draw random numbers.
        pin_memory: fetch into page-locked memory, where CUDA is present.
        shuffle: ``False`` keeps the data set's own order in each epoch.
        timeout_seconds: longest wait for a worker's chunk; 0 waits for ever.
        context: how worker processes are started (``fork``, ``forkserver``, ``spawn``); by default torch's choice.

    Raises:
        ValueError: for an empty or iterable data set, or arguments out of range.
    """
    _require("micro_batch", micro_batch, 1)
    _require("start", start, 0)
    _require("world", world, 1)
    _require("workers", workers, 0)
    _require("prefetch", prefetch, 1)
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, {world}), got {rank}")
    collate = collate or default_collate
    if isinstance(dataset, IterableAdapter):
        _require_one_reader(workers)
        requests = None
        chunks = IterableChunks(
            dataset.dataset, seed=seed, start=start, rank=rank, world=world, micro_batch=micro_batch, collate=collate
        )
    else:
        order = SampleOrder(_size(dataset), seed, shuffle=shuffle)
        chunks = Chunks(dataset, seed, collate)
        requests = _Requests(order, _first_position(start, rank, world), world, micro_batch)
    loader = DataLoader(
        chunks,
        batch_size=None,
        sampler=requests,
        collate_fn=_unchanged,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        worker_init_fn=_start_worker,
        pin_memory=pin_memory and torch.cuda.is_available(),
        # A loader draws a seed for its workers; from a generator of its own, so that the global one does not move.
        generator=torch.Generator().manual_seed(0),
        timeout=timeout_seconds if workers else 0,
        multiprocessing_context=context if workers else None,
    )
    return Stream(loader, start=start, rank=rank, world=world, micro_batch=micro_batch)


class Stream:
    """A rank's place in the sample order; made by ``stream``. Close it, or use it in a ``with`` statement."""

    def __init__(self, loader: Iterable[Any], *, start: int, rank: int, world: int, micro_batch: int) -> None:
        self.rank = rank
        self.world = world
        self.micro_batch = micro_batch
        self._loader = loader
        self._chunks: Iterator[Any] | None = None
        self._cursor = start
        self._position = _first_position(start, rank, world)  # the next of this rank's
        self._chunk: Any = None
        self._used = micro_batch  # samples of the chunk that are taken; no chunk is held yet
        self._inside: str | None = None
        self._closed = False

    @property
    def cursor(self) -> int:
        """Samples consumed so far over all ranks, which is where the next plan has to begin."""
        return self._cursor

    def take(self, plan: BatchPlan) -> Iterator[MicroBatch]:
        """This rank's micro-batches of ``plan``, of exactly the sizes ``plan.pieces(rank)``.

        Take all of them: the cursor moves on when the last is handed out.

        Raises:
            ValueError: when the plan does not begin at the cursor or is for another number of ranks.
            RuntimeError: when an earlier plan was left half-way, the stream is closed, or a worker died.
        """
        self._check(plan)
        return self._micro_batches(plan)

    def close(self) -> None:
        """Stop the workers and forget what they fetched."""
        self._closed = True
        self._chunk = None
        chunks, self._chunks = self._chunks, None
        if hasattr(chunks, "_shutdown_workers"):
            chunks._shutdown_workers()  # the loader's own end, now and not when the iterator happens to be collected

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check(self, plan: BatchPlan) -> None:
        if self._closed:
            raise RuntimeError("the stream is closed; open a new one with start= the samples consumed so far")
        if self._inside is not None:
            raise RuntimeError(
                f"the stream stands inside {self._inside}, whose micro-batches were not all taken; open a new stream "
                f"with start={self._cursor} to take the step again"
            )
        if plan.world != self.world:
            raise ValueError(f"the plan is for {plan.world} ranks and the stream for {self.world}")
        if plan.first_sample != self._cursor:
            raise ValueError(
                f"the plan begins at sample {plan.first_sample}, but the stream's cursor is at {self._cursor}; take "
                f"plans in order, or open a stream with start={plan.first_sample}"
            )
        if sum(plan.pieces(self.rank)) != plan.share(self.rank):
            raise ValueError(
                f"{plan.micro_batches} micro-batches of {plan.micro_batch} cannot hold rank {self.rank}'s share of "
                f"{plan.share(self.rank)} samples"
            )

    def _micro_batches(self, plan: BatchPlan) -> Iterator[MicroBatch]:
        self._check(plan)
        pieces = plan.pieces(self.rank)
        for number, size in enumerate(pieces):
            self._inside = f"step {plan.step} after {number} of its {len(pieces)} micro-batches"
            micro_batch = self._next(size) if size else self._filler()
            if number + 1 == len(pieces):
                self._inside = None
                self._cursor = plan.last_sample
            yield micro_batch

    def _next(self, size: int) -> MicroBatch:
        """Take ``size`` samples: a whole chunk as it is, or cuts of one or several joined."""
        parts, missing = [], size
        while missing:
            self._hold_chunk()
            stop = min(self._used + missing, self.micro_batch)
            whole = stop - self._used == self.micro_batch
            parts.append(self._chunk if whole else structure.cut(self._chunk, self._used, stop))
            missing -= stop - self._used
            self._used = stop
        positions = range(self._position, self._position + size * self.world, self.world)
        self._position = positions.stop
        return MicroBatch(structure.join(parts), size, positions)

    def _filler(self) -> MicroBatch:
        """The next sample, left in its place."""
        self._hold_chunk()
        data = structure.cut(self._chunk, self._used, self._used + 1)
        return MicroBatch(data, 0, range(self._position, self._position))

    def _hold_chunk(self) -> None:
        """Fetch the next chunk when every sample of the one in hand is taken."""
        if self._used < self.micro_batch:
            return
        chunk = self._fetch()
        if structure.length(chunk) != self.micro_batch:
            raise ValueError(
                f"collate made a batch of {structure.length(chunk)} from {self.micro_batch} samples; it must keep one "
                f"entry per sample along dimension 0"
            )
        self._chunk, self._used = chunk, 0

    def _fetch(self) -> Any:
        if self._chunks is None:
            self._chunks = iter(self._loader)
        try:
            return next(self._chunks)
        except RuntimeError as error:
            if not str(error).startswith(_LOADER_FAILURES):
                raise
            raise RuntimeError(
                f"a data worker of rank {self.rank} failed while position {self._position} was waited for: {error} "
                f"A worker that dies without an error of its own was mostly killed for memory or crashed in native "
                f"code; try fewer workers or a smaller micro_batch, or workers=0 to see it happen"
            ) from error


# How torch's loader begins to report a worker that died or was too slow.
_LOADER_FAILURES = ("DataLoader worker (pid", "DataLoader timed out")


def _first_position(start: int, rank: int, world: int) -> int:
    """The first position from ``start`` on that is ``rank``'s."""
    return start + (rank - start) % world


def _size(dataset: Any) -> int:
    """The length of a map-style data set."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{type(dataset).__name__} has no random access or no length; wrap it: stream(iterable(dataset), ...)"
        )
    if not len(dataset):
        raise ValueError(f"the data set ({type(dataset).__name__}) is empty; check its path and its filters")
    return len(dataset)


def _require_one_reader(workers: int) -> None:
    if workers > 1:
        raise ValueError(f"an iterable data set is read by at most one worker, in its own order; got workers={workers}")


class _Requests:
    """Endless chunks of a rank's positions with their indices."""

    def __init__(self, order: SampleOrder, first: int, world: int, micro_batch: int) -> None:
        self._order = order
        self._first = first
        self._world = world
        self._micro_batch = micro_batch

    def __iter__(self) -> Iterator[tuple[range, list[int]]]:
        size, world, first = self._micro_batch, self._world, self._first
        for block in itertools.chain((_FIRST_BLOCK,), itertools.repeat(_LARGEST_BLOCK)):
            length = size * max(1, block // size)
            positions = range(first, first + length * world, world)
            indices = self._order.indices(torch.arange(first, positions.stop, world)).tolist()
            for at in range(0, length, size):
                yield positions[at : at + size], indices[at : at + size]
            first = positions.stop


def _start_worker(worker_id: int) -> None:
    """Leave the rank's process group: a signal to the group is the rank's to handle, and it needs its workers to."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


def _unchanged(data: Any) -> Any:
    return data


def _require(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
