"""The passive tap: looks at a model's gradients, and leaves synchronisation, scale and ``.grad`` alone.

For trainers that own backward, synchronisation, clipping and the step:

    tap = adabatch.gradients.attach(model)
    for micro_batch in ...:
        loss.backward()
        tap.note(samples=len(micro_batch))
    measurement = tap.read()        # before clipping and the step

Where a trainer clips before it asks anybody, ``attach(..., early=True)`` measures when backward ends, and ``read`` may
come later.
"""

from __future__ import annotations

import atexit
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from adabatch import distributed
from adabatch.gradients import layout as layouts
from adabatch.gradients.buckets import BucketSource, CommunicationHook
from adabatch.gradients.contaminants import refuse_shared_statistics, require_own_dropout
from adabatch.gradients.drift import product
from adabatch.gradients.early import Early, Lengths, Unchanged, require_early
from adabatch.gradients.examples import ExampleSource
from adabatch.gradients.hooks import HookSource
from adabatch.gradients.layout import Layout
from adabatch.gradients.norms import gradient_norms, together
from adabatch.gradients.outbox import Letter, Outbox
from adabatch.gradients.rulers import Instrument, Readings, Ruler, instruments, names, share
from adabatch.gradients.shards import ShardSource
from adabatch.gradients.statistics import (
    SQUARES,
    Pending,
    Tally,
    checked,
    entries,
    summarise,
    summarise_examples,
)
from adabatch.gradients.synchronising import Synchroniser
from adabatch.gradients.weights import example_weights

KINDS = ("auto", "hooks", "ddp", "fsdp")

# After so many windows of one group, and none of more, somebody should know.
FEW_WINDOWS = 3


class OneGroupWarning(UserWarning):
    """Every window so far had one group only, so that no noise scale can be measured."""


# Hooks on parameters keep a DDP model alive, since its reducer holds on to them where no garbage collector looks, and
# with it gloo's threads, on which the interpreter aborts at its exit. So taps that nobody detached are, before that.
_attached: weakref.WeakSet[Tap] = weakref.WeakSet()


def _detach_all() -> None:
    for tap in list(_attached):
        tap.detach()


class Source(Protocol):
    """Where the group gradients' lengths come from; see ``hooks.HookSource`` and ``buckets.BucketSource``."""

    kind: str
    groups: str
    by_rank: bool

    @property
    def measuring(self) -> bool: ...
    @property
    def reduction(self) -> float: ...
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
        synchroniser: when gradients travel over the ranks.
        rulers: what measures views beside the Euclidean one.
        views: their names.
        examples: measures groups of one example beside them, in the normalisation layers.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        source: Source,
        synchroniser: Synchroniser,
        optimizers: Sequence[torch.optim.Optimizer],
        rulers: Sequence[Ruler | Instrument] = (),
        *,
        examples: ExampleSource | None = None,
        early: bool = False,
        last: Callable[[], bool] | None = None,
    ) -> None:
        self.model = model
        self.layout = layout
        self.source = source
        self.examples = examples
        self.synchroniser = synchroniser
        self.rulers = instruments(rulers)
        self.views = names(self.rulers)
        self._share = share(layout)
        self._optimizers = optimizers
        self._tally = Tally(layout.device)
        self._outbox = Outbox(layout.group, layout.device)
        self._weight_per_sample: float | None = None
        self._looked_at_dropout = False
        self._ordered = _ordered(layout)
        self._lonely_windows: int | None = 0
        self._backward = Early(layout, self._take, last) if early else Unchanged(layout, self._take)
        self.measure(True)
        self._open(summing=False)
        if not _attached:
            # Anew each time, so that it comes before what was registered earlier: the last one is called first.
            atexit.unregister(_detach_all)
            atexit.register(_detach_all)
        _attached.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def measure(self, on: bool) -> None:
        """Measure from the next window on, or not. Off, the hooks are removed (``hooks``) or idle (``ddp``)."""
        self.source.measure(on)
        if self.examples is not None:
            self.examples.measure(on)
        self._backward.listen(on)

    def note(
        self,
        samples: int,
        weight: float | Tensor | None = None,
        loss: Tensor | None = None,
        *,
        sample_weights: Tensor | None = None,
    ) -> None:
        """Count one micro-batch; call it after the micro-batch's backward, and before the next one's.

        Args:
            samples: independent units in it; 0 for a filler.
            weight: how much its mean loss counts, such as tokens for a mean over tokens; its samples by default. Only
                ratios matter, unless ``read(factor=None)`` is to find the mean gradient by it: then it is the number
                that the mean loss was multiplied by before backward.
            loss: its mean loss, not multiplied by anything, for the window's weighted mean.
            sample_weights: how much each example counts in the mean, (examples,), padding included, where they differ
                and ``attach(examples=...)`` measures single ones; only ratios matter.

        Raises:
            ValueError: when no gradient came, or it came twice; for a weight that is negative or not finite.
        """
        weight = checked(samples, weight)
        self._tally.add(samples, weight, None if loss is None else loss.detach())
        self._close_micro_batch(samples, weight, sample_weights)
        self._backward.noted()

    def read(
        self,
        *,
        factor: float | None = 1.0,
        scaler: torch.amp.GradScaler | None = None,
        drift: bool = False,
        exchange: bool = True,
    ) -> Pending:
        """End the window: its measurement, pending on the device. Every rank must call it.

        Call it after the last backward, after ``scaler.unscale_(optimizer)`` where there is a scaler, and before
        clipping and the step. With ``attach(..., early=True)`` it may come after them, and after ``zero_grad()``, but
        before the next backward and before ``scaler.update()``. ``.grad`` must be the sum of the groups' gradients over
        R, where R is the number of ranks under DDP's averaging and 1 otherwise.

        Args:
            factor: what ``.grad`` must be multiplied by to be the window's mean gradient: 1 when the loop divides by
                the window's weight itself, 1/K when it adds up K plain means. ``None`` when the weights are what the
                mean losses were multiplied by: ``.grad`` is sum(w_k g_k) / R then, and the mean is R / sum(w_k) of it,
                with the sum over all ranks. 1/A for each of A or fewer micro-batches is such a weight, and so is
                tokens / (all tokens) x R.
            scaler: the gradient scaler in force during backward.
            drift: take the gradient's product with the momentum of the optimizer that ``attach`` was given, too. With
                ``early=True`` the window that asks first goes without it.
            exchange: let the numbers travel over the ranks now, with those kept back before; with ``False`` they wait
                until another window's do, or until every rank reads this one.

        Raises:
            ValueError: before any ``note``, when the hooks did not fire, when gradients were clipped or scaled since
                backward, or for parameters added or unfrozen since; in the first window, when ranks drop the same
                units.

        Warns:
            OneGroupWarning: once, after a few windows that had one group each.
        """
        if not self._tally.weights:
            raise ValueError("read() came before any note(): call note() after each micro-batch's backward")
        if self._optimizers:
            layouts.require_covered(self.layout, self._optimizers)
        else:
            layouts.require_current(self.layout, self.model)
        with torch.no_grad():
            groups = self.source.collect()  # first, since it knows why there may be no gradient to measure
            norm, mean_squares, along = self._backward.lengths(drift)
            letter = self._post(groups, stop=False, pause=0, mean_squares=mean_squares, along=along)
            if exchange or self.layout.sharded:
                self._outbox.send()
            if self.layout.sharded:
                norm, along = self._joined(letter, along is not None)
            scale = None if scaler is None else scale_of(scaler, self.layout.device)
            multiple = self.source.reduction if factor is None else factor
            to_mean = torch.full_like(norm, multiple)
            if scale is not None and isinstance(self._backward, Early):
                to_mean = to_mean / scale
            pending = Pending(
                letter,
                norm * to_mean,
                views=self._in_views(to_mean),
                scale=scale,
                along=None if along is None else along * to_mean,
                share=multiple / self.source.reduction,
                over_weight=factor is None,
                mean_over_weight=factor is None,
                examples=self._examples_at,
            )
        self._warn_of_one_group()
        self._open(summing=False)
        return pending

    def detach(self) -> None:
        """Remove all hooks. A communication hook cannot be removed from DDP: it stays as a plain all-reduce."""
        _attached.discard(self)
        self.source.detach()
        if self.examples is not None:
            self.examples.detach()
        self._backward.listen(False)

    # -- for the layer above

    def _open(self, summing: bool) -> None:
        self._tally = Tally(self.layout.device)
        self.source.open(summing)
        if self.examples is not None:
            self.examples.open()
        self._backward.open(not summing)
        if self.source.measuring:
            for ruler in self.rulers:
                ruler.open()

    def _close_micro_batch(
        self, samples: int, weight: float | Tensor, sample_weights: Tensor | None, last: bool | None = None
    ) -> None:
        self.source.close_micro_batch(weight, last)
        if self.examples is not None and self.examples.measuring:
            examples = samples if sample_weights is None else len(sample_weights)
            self.examples.close_micro_batch(weight, last, examples=examples)
            self._tally.examples.append(example_weights(weight, samples, sample_weights))

    def _lengths(self) -> tuple[Tensor, list[Tensor]]:
        """The norm of ``.grad``, of this rank's shard where there are shards, and squared lengths: of the same in the
        Euclidean view, and of this rank's share of it in the others, as ``rulers.share`` has it."""
        gradients, norms = gradient_norms(self.layout.alike)
        norm = together(norms, self.layout.device)
        if not self.rulers or not self.source.measuring:
            return norm, [norm.square()]
        readings = Readings(self.rulers, self.layout.device)
        places = (place for place, parameter in self._ordered if parameter.grad is not None)
        found = zip(places, gradients, norms, strict=True)
        if mine := [one for one in found if one[0] in self._share]:
            readings.see(*zip(*mine))
        return norm, [norm.square(), *readings.totals().unbind()]

    def _take(self, drift: bool) -> Lengths:
        """What is measured of the mean gradient, as ``.grad`` is now."""
        return Lengths(*self._lengths(), product(self._optimizers if drift else (), self.layout.device))

    def _warn_of_one_group(self) -> None:
        """Once, when a few windows have had one group each from the start."""
        if self._lonely_windows is None or self.examples is not None or not self.source.measuring:
            return
        groups = self.layout.world * (1 if self.source.by_rank else len(self._tally.weights))
        self._lonely_windows = self._lonely_windows + 1 if groups == 1 else None
        if self._lonely_windows == FEW_WINDOWS:
            self._lonely_windows = None
            warnings.warn(
                f"each of the first {FEW_WINDOWS} windows had one group ({self.source.groups}), and one has nothing to "
                f"be compared with, so no noise scale is measured; accumulate 2 or more micro-batches per step, "
                f"or measure single examples with attach(examples=True)",
                OneGroupWarning,
                stacklevel=3,
            )

    def _post(
        self, groups: Tensor | None, *, stop: bool, pause: int, mean_squares: Sequence[Tensor], along: Tensor | None
    ) -> Letter:
        """Put the window's numbers into the outbox; ``groups`` is what the source has collected."""
        if not self._looked_at_dropout:
            require_own_dropout(self.model, self.layout)
            self._looked_at_dropout = True
        row = summarise(
            self._tally,
            groups,
            views=1 + len(self.views),
            by_rank=self.source.by_rank,
            stop=stop,
            pause=pause,
        )
        whole, *shares = mean_squares
        row += entries(torch.stack(shares)) if shares else [0.0] * len(self.views)
        if self.examples is not None:
            row += summarise_examples(self._tally, self.examples.collect())
        if self.layout.sharded:
            row += entries(torch.stack([whole, torch.zeros_like(whole) if along is None else along]))
        return self._outbox.put(row)

    def _joined(self, letter: Letter, drift: bool) -> tuple[Tensor, Tensor | None]:
        """Norm and product with the momentum of the whole mean gradient, from those of the shards."""
        square, along = (letter.on_device()[self._after_groups :] / self.layout.replicas).unbind()
        return square.sqrt(), along if drift else None

    def _in_views(self, to_mean: Tensor) -> list[tuple[str, Tensor]]:
        """The measured views, and what the sum over the ranks of their shares is multiplied by."""
        factor = to_mean.square() / self.layout.replicas
        return [(view, factor) for view in self.views] if self.source.measuring else []

    @property
    def _examples_at(self) -> int | None:
        """Where the numbers of groups of one example begin, if there are any."""
        return None if self.examples is None else SQUARES + 1 + 2 * len(self.views)

    @property
    def _after_groups(self) -> int:
        """Where the squared lengths of shards begin, if there are any."""
        return SQUARES + 1 + 2 * len(self.views) + (0 if self.examples is None else 3)

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
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    kind: str = "auto",
    *,
    comm_hook: tuple[Any, CommunicationHook] | None = None,
    rulers: Sequence[Ruler | Instrument] = (),
    examples: bool | Mapping[str, Any] = False,
    sync: str | None = None,
    early: bool = False,
    last: Callable[[], bool] | None = None,
) -> Tap:
    """Tap a model's gradients.

    Args:
        model: the module that the loop calls, wrapped as it is: plain in one process, in DistributedDataParallel, or
            sharded by ``fully_shard``; compiled or not.
        optimizer: one or several, whose parameters are checked, at each ``read``, to be the tapped ones; without it
            the model's are.
        kind: ``hooks`` (groups are the micro-batches of every rank), ``ddp`` (groups are the ranks), ``fsdp`` (either,
            by what is synchronised), or ``auto``: ``fsdp`` for sharded models, ``ddp`` for DDP on two ranks or more.
        comm_hook: (state, hook) of the communication hook that DDP would be given otherwise; it must return the mean
            over ranks, and is called after each bucket's norm was taken.
        rulers: what measures views beside the Euclidean one, as ``geometry.rulers_for`` makes them.
        examples: measure groups of one example, too, in the trained normalisation layers (``Measurement.examples``):
            also where there is nothing else to compare, on one rank with one micro-batch. A mapping has the options of
            ``examples.ExampleSource``.
        sync: what ``accumulate`` synchronises under FSDP2: ``each`` micro-batch, which needs the least memory and is
            the default there, or the ``last`` one only, which communicates less.
        early: measure the mean gradient as soon as the window's last backward ends, so that ``read`` may come after
            clipping, the step and ``zero_grad()``. For trainers that clip before they call anybody; not under FSDP2.
        last: with ``early``, whether the backward that is running is its window's last. By default the one that DDP
            synchronises; without DDP the mean is measured in each, and the last one stands.

    Raises:
        ValueError: for wrappers, parameters and combinations that are not supported, naming what is.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if last is not None and not early:
        raise ValueError(
            "last is for early=True, which measures when a window's last backward ends; give both, or none"
        )
    model = _uncompiled(model)
    layout = layouts.survey(model)
    refuse_shared_statistics(model, layout)
    if early:
        require_early(layout)
    synchroniser = Synchroniser(layout, sync)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    layouts.require_covered(layout, optimizers)
    single = None
    if examples is not False:
        single = ExampleSource(layout, model, **({} if examples is True else examples))
        rulers = (*rulers, single.ruler)
    source = _source(kind, layout, comm_hook, rulers)
    return Tap(model, layout, source, synchroniser, optimizers, rulers, examples=single, early=early, last=last)


def _source(
    kind: str, layout: Layout, comm_hook: tuple[Any, CommunicationHook] | None, rulers: Sequence[Ruler | Instrument]
) -> Source:
    if kind == "auto":
        kind = "ddp" if layout.world > 1 or comm_hook is not None else "hooks"
        kind = "fsdp" if layout.sharded else kind
    if kind != "fsdp" and layout.sharded:
        raise ValueError(f"kind={kind!r} sees nothing under FSDP2, where parameters are sharded; use kind='fsdp'")
    if kind != "ddp" and comm_hook is not None:
        raise ValueError(f"comm_hook is for kind='ddp'; with kind={kind!r} register it with the wrapper yourself")
    if kind == "fsdp":
        return ShardSource(layout, rulers)
    return HookSource(layout, rulers) if kind == "hooks" else BucketSource(layout, comm_hook, rulers)


def scale_of(scaler: torch.amp.GradScaler, device: torch.device) -> Tensor:
    """The scale in force, on the device, in double precision: asking for the number would make the host wait."""
    return scaler.scale(torch.ones((), device=device)).double()


def _ordered(layout: Layout) -> tuple[tuple[int, nn.Parameter], ...]:
    """The parameters with their numbers, in the order of ``norms.gradient_norms``."""
    places = {id(parameter): place for place, parameter in enumerate(layout.parameters)}
    ordered = (parameter for alike in layout.alike for parameter in (*alike.small, *alike.large))
    return tuple((places[id(parameter)], parameter) for parameter in ordered)


def _uncompiled(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` wrapped."""
    return getattr(model, "_orig_mod", model)
