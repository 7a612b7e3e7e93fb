"""The passive tap: looks at a model's gradients, and leaves synchronisation, scale and ``.grad`` alone.

For trainers that own backward, synchronisation, clipping and the step:

    tap = adabatch.gradients.attach(model)
    for micro_batch in ...:
        loss.backward()
        tap.note(samples=len(micro_batch))
    measurement = tap.read()        # before clipping and the step
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from adabatch import distributed
from adabatch.gradients import layout as layouts
from adabatch.gradients.buckets import BucketSource, CommunicationHook
from adabatch.gradients.hooks import HookSource
from adabatch.gradients.layout import Layout
from adabatch.gradients.norms import gradient_norm
from adabatch.gradients.outbox import Letter, Outbox
from adabatch.gradients.rulers import Ruler, lengths
from adabatch.gradients.statistics import SQUARES, Pending, Tally, checked, entries, summarise

KINDS = ("auto", "hooks", "ddp")


class Source(Protocol):
    """Where the group gradients' lengths come from; see ``hooks.HookSource`` and ``buckets.BucketSource``."""

    kind: str
    groups: str
    by_rank: bool

    @property
    def measuring(self) -> bool: ...
    @property
    def reduction(self) -> int: ...
    def measure(self, on: bool) -> None: ...
    def open(self, summing: bool = False) -> None: ...
    def close_micro_batch(self, weight: float | Tensor, last: bool | None = None) -> None: ...
    def collect(self) -> Tensor | None: ...
    def detach(self) -> None: ...


class Tap:
    """A tap on a model's gradients; made by ``attach``, and a context manager that detaches at its end.

    Attributes:
        model: the module that was handed over.
        layout: its parameters and ranks.
        source: where lengths come from; ``source.groups`` says which groups it delivers.
        rulers: the views that are measured beside the Euclidean one.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        source: Source,
        optimizer: torch.optim.Optimizer | None,
        rulers: Sequence[Ruler] = (),
    ) -> None:
        self.model = model
        self.layout = layout
        self.source = source
        self.rulers = tuple(rulers)
        self._optimizer = optimizer
        self._tally = Tally(layout.device)
        self._outbox = Outbox(layout.group, layout.device)
        self._weight_per_sample: float | None = None
        source.measure(True)
        self._open(summing=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def measure(self, on: bool) -> None:
        """Measure from the next window on, or not. Off, the hooks are removed (``hooks``) or idle (``ddp``)."""
        self.source.measure(on)

    def note(self, samples: int, weight: float | Tensor | None = None, loss: Tensor | None = None) -> None:
        """Count one micro-batch; call it after the micro-batch's backward.

        Args:
            samples: independent units in it; 0 for a filler.
            weight: loss weight of its gradient, such as tokens for a mean over tokens; its samples by default.
            loss: its mean loss, for the window's weighted mean.

        Raises:
            ValueError: when no gradient came, or it came twice; for a weight that is negative or not finite.
        """
        weight = checked(samples, weight)
        self._tally.add(samples, weight, None if loss is None else loss.detach())
        self.source.close_micro_batch(weight)

    def read(self, *, factor: float = 1.0, scaler: torch.amp.GradScaler | None = None) -> Pending:
        """End the window: its measurement, pending on the device. Every rank must call it.

        Call it after the last backward, after ``scaler.unscale_(optimizer)`` where there is a scaler, and before
        clipping and the step. ``.grad`` must be the sum of the groups' gradients over R, where R is the number of ranks
        under DDP's averaging and 1 otherwise.

        Args:
            factor: what ``.grad`` must be multiplied by to be the window's mean gradient: 1 when the loop divides by
                the window's weight itself, 1/K when it adds up K plain means.
            scaler: the gradient scaler in force during backward.

        Raises:
            ValueError: before any ``note``, when the hooks did not fire, or for parameters added or unfrozen since.
        """
        if not self._tally.weights:
            raise ValueError("read() came before any note(): call note() after each micro-batch's backward")
        if self._optimizer is not None:
            layouts.require_covered(self.layout, [self._optimizer])
        else:
            layouts.require_current(self.layout, self.model)
        with torch.no_grad():
            norm, mean_squares = self._lengths()
            letter = self._post(stop=False, pause=0, mean_squares=mean_squares)
            self._outbox.send()
            if self.layout.sharded:
                norm, mean_squares = self._joined(letter)
            pending = Pending(
                letter,
                norm * factor,
                views=[(ruler.name, square * factor**2) for ruler, square in zip(self.rulers, mean_squares[1:])],
                scale=None if scaler is None else scale_of(scaler, self.layout.device),
                share=factor / self.source.reduction,
                over_weight=False,
            )
        self._open(summing=False)
        return pending

    def detach(self) -> None:
        """Remove all hooks. A communication hook cannot be removed from DDP: it stays as a plain all-reduce."""
        self.source.detach()

    # -- for the layer above

    def _open(self, summing: bool) -> None:
        self._tally = Tally(self.layout.device)
        self.source.open(summing)
        if self.source.measuring:
            for ruler in self.rulers:
                ruler.open()

    def _lengths(self) -> tuple[Tensor, list[Tensor]]:
        """The norm of ``.grad``, and its squared length in every view, of this rank's shard where there are shards."""
        norm = gradient_norm(self.layout.alike, self.layout.device)
        rulers = self.rulers if self.source.measuring else ()
        views = lengths(rulers, self.layout.parameters, self.layout.device) if rulers else []
        return norm, [norm.square(), *views]

    def _post(self, *, stop: bool, pause: int, mean_squares: Sequence[Tensor]) -> Letter:
        """Put the window's numbers into the outbox."""
        row = summarise(
            self._tally,
            self.source.collect(),
            views=1 + len(self.rulers),
            by_rank=self.source.by_rank,
            stop=stop,
            pause=pause,
        )
        if self.layout.sharded:
            missing = 1 + len(self.rulers) - len(mean_squares)
            row += entries(torch.stack(list(mean_squares))) + [0.0] * missing
        return self._outbox.put(row)

    def _joined(self, letter: Letter) -> tuple[Tensor, list[Tensor]]:
        """Norm and squared lengths of the whole mean gradient, from those of the shards."""
        squares = letter.on_device()[SQUARES + 1 + len(self.rulers) :] / self.layout.replicas
        return squares[0].sqrt(), list(squares.unbind())

    def _unit(self, global_batch: int) -> float:
        """About the weight of one rank's window, a power of two so that dividing by it rounds nothing."""
        weight = global_batch * (self._weight_per_sample or 1.0) / self.layout.world
        return 2.0 ** round(math.log2(weight))

    def _learn_weight(self, samples: int, weight: float | Tensor) -> None:
        """Find out once how much one sample weighs, so that loss-scaled gradients have the size of a mean's.

        All ranks learn the same, from their first micro-batches; the host waits for the device this once.
        """
        if self._weight_per_sample is None:
            pair = torch.tensor([float(weight), samples], dtype=torch.float64, device=self.layout.device)
            total, count = distributed.all_reduce_sum(pair, self.layout.group).tolist()
            self._weight_per_sample = total / count if total > 0 and count > 0 else None


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    kind: str = "auto",
    *,
    comm_hook: tuple[Any, CommunicationHook] | None = None,
    rulers: Sequence[Ruler] = (),
) -> Tap:
    """Tap a model's gradients.

    Args:
        model: the module that the loop calls, wrapped as it is: plain in one process, or in DistributedDataParallel;
            compiled or not.
        optimizer: whose parameters are checked, at each ``read``, to be the tapped ones; without it the model's are.
        kind: ``hooks`` (groups are the micro-batches of every rank), ``ddp`` (groups are the ranks), or ``auto``: the
            latter for DDP on two ranks or more.
        comm_hook: (state, hook) of the communication hook that DDP would be given otherwise; it must return the mean
            over ranks, and is called after each bucket's norm was taken.
        rulers: views to measure beside the Euclidean one.

    Raises:
        ValueError: for wrappers, parameters and combinations that are not supported, naming what is.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    model = _uncompiled(model)
    layout = layouts.survey(model)
    if kind == "auto":
        kind = "ddp" if layout.world > 1 or comm_hook is not None else "hooks"
    if kind == "hooks" and comm_hook is not None:
        raise ValueError("comm_hook is for kind='ddp'; with kind='hooks' register it with DDP yourself")
    source: Source
    source = HookSource(layout, rulers) if kind == "hooks" else BucketSource(layout, comm_hook, rulers)
    if optimizer is not None:
        layouts.require_covered(layout, [optimizer])
    return Tap(model, layout, source, optimizer, rulers)


def scale_of(scaler: torch.amp.GradScaler, device: torch.device) -> Tensor:
    """The scale in force, on the device, in double precision: asking for the number would make the host wait."""
    return scaler.scale(torch.ones((), device=device)).double()


def _uncompiled(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` wrapped."""
    return getattr(model, "_orig_mod", model)
