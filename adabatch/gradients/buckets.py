"""DDP's communication hook: each rank's accumulated gradient is a group, seen bucket by bucket before the reduction."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from adabatch.gradients.layout import Layout
from adabatch.gradients.norms import each, together
from adabatch.gradients.rulers import Instrument, Readings, Ruler, instruments

CommunicationHook = Callable[[Any, dist.GradBucket], torch.futures.Future]


@dataclass(slots=True)
class _Exchange:
    """State of the communication hook of one DistributedDataParallel module.

    Attributes:
        group, world: the ranks that it reduces over.
        elements: real numbers in all gradients that it reduces.
        inner: the user's (state, hook) that does the communication, if any.
        attached: whether a tap uses it; DDP cannot unregister a hook, so it stays behind as a plain all-reduce.
        measuring: whether norms are taken.
        summing: whether the division by the world size is left to the caller, who divides anyhow.
        places: each trainable parameter's number in the layout, by identity.
        parts, seen: norms by parameter, and real numbers, taken in this window's first synchronisation.
        views: takes views beside the Euclidean one, while its tap is there. DDP holds on to this state where no garbage
            collector looks, and instruments know the model: a strong reference would keep both for ever, and gloo's
            threads with them, on which the interpreter aborts at its exit.
        synchronised: synchronisations since the window began.
    """

    group: dist.ProcessGroup
    world: int
    elements: int
    places: dict[int, int] = field(default_factory=dict)
    inner: tuple[Any, CommunicationHook] | None = None
    attached: bool = False
    measuring: bool = False
    summing: bool = False
    parts: dict[int, Tensor] = field(default_factory=dict)
    views: weakref.ref[Readings] | None = None
    seen: int = 0
    synchronised: int = 0

    @property
    def readings(self) -> Readings:
        """The views of the present window; none without a tap."""
        return (self.views() if self.views is not None else None) or Readings()

    def forget(self) -> None:
        self.parts = {}
        self.readings.clear()
        self.seen = self.synchronised = 0

    def squares(self) -> Tensor:
        """Squared lengths of this rank's gradient, (views,), from all buckets seen, whatever was in which bucket."""
        parts = _in_order(self.parts)
        square = together(parts, parts[0].device).square()
        return torch.cat([square.reshape(1), self.readings.totals()])

    def take(self, bucket: dist.GradBucket) -> None:
        """Take lengths, gradient by gradient: DDP fills its buckets anew after the first step of every launch."""
        places = [self.places[id(parameter)] for parameter in bucket.parameters()]
        gradients = bucket.gradients()
        norms = each(gradients)
        self.parts.update(zip(places, norms, strict=True))
        self.readings.see(places, gradients, norms)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future:
        """The bucket's way over the ranks: the user's, or DDP's own, which multiplies by 1/world before the sum."""
        if self.inner is not None:
            state, hook = self.inner
            return hook(state, bucket)
        buffer = bucket.buffer()
        if not self.summing:
            buffer.mul_(1.0 / self.world)
        return dist.all_reduce(buffer, group=self.group, async_op=True).get_future().then(_first)


def communicate(exchange, bucket):  # no annotations: DDP compares them with classes, and these would be strings
    """DDP's communication hook: take the norm of this rank's bucket, then let it be summed over the ranks."""
    if not exchange.synchronised:
        exchange.seen += _reals(bucket.buffer())
        if exchange.measuring:
            exchange.take(bucket)
    future = exchange.reduce(bucket)
    if bucket.is_last():
        exchange.synchronised += 1
    return future


class BucketSource:
    """DDP's communication hook, which sees this rank's accumulated gradient before the reduction: a rank is a group."""

    kind = "ddp"
    groups = "one group per rank"
    by_rank = True

    def __init__(
        self,
        layout: Layout,
        inner: tuple[Any, CommunicationHook] | None = None,
        rulers: Sequence[Ruler | Instrument] = (),
    ) -> None:
        _require_ranks(layout, inner)
        self._layout = layout
        self._summing = False
        for module in layout.parallel:
            _require_free(module)
        self._exchanges = [_exchange(module, layout, inner) for module in layout.parallel]
        self._readings = [Readings(instruments(rulers), layout.device) for _ in self._exchanges]
        for exchange, readings in zip(self._exchanges, self._readings):
            exchange.views = weakref.ref(readings)

    @property
    def measuring(self) -> bool:
        """Whether norms are taken."""
        return self._exchanges[0].measuring

    @property
    def reduction(self) -> int:
        """What a gradient is divided by, relative to the sum over all groups. The user's own hook takes the mean."""
        return 1 if self._summing and self._exchanges[0].inner is None else self._layout.world

    def measure(self, on: bool) -> None:
        """Take norms from now on, or not."""
        for exchange in self._exchanges:
            if on and not exchange.measuring:
                exchange.forget()
            exchange.measuring = on

    def open(self, summing: bool = False) -> None:
        """Begin a window; with ``summing``, its gradients are summed over the ranks and not divided."""
        self._summing = summing
        for exchange in self._exchanges:
            exchange.summing = summing
            exchange.forget()

    def close_micro_batch(self, weight: float | Tensor, last: bool | None = None) -> None:
        """Check that gradients were not synchronised before the window's last micro-batch, if that one is known.

        Raises:
            ValueError: when they were synchronised before.
        """
        if last is False and any(exchange.synchronised for exchange in self._exchanges):
            raise ValueError(
                "gradients were synchronised before the window's last micro-batch: forward and backward must both run "
                "inside window.micro_batch() (DDP decides in the forward pass)"
            )

    def collect(self) -> Tensor | None:
        """Squared lengths of this rank's accumulated gradient, (views,); ``None`` when not measured.

        Raises:
            ValueError: when the communication hook did not fire once for all parameters in this window.
        """
        for exchange in self._exchanges:
            _require_one_synchronisation(exchange)
        squares = None
        if self.measuring:
            squares = torch.stack([exchange.squares() for exchange in self._exchanges]).sum(0)
        for exchange in self._exchanges:
            exchange.forget()
        return squares

    def detach(self) -> None:
        """Leave plain all-reduces behind: DDP has no way to take a communication hook off."""
        self.measure(False)
        self.open()
        for exchange in self._exchanges:
            exchange.attached = False


def _require_ranks(layout: Layout, inner: tuple[Any, CommunicationHook] | None) -> None:
    if layout.world == 1:
        raise ValueError(
            "kind='ddp' compares ranks, and there is one (or no DistributedDataParallel); use kind='hooks', which "
            "compares micro-batches"
        )
    if any(other is not module for module in layout.parallel for other in _inside(module)):
        raise ValueError(
            "a DistributedDataParallel module lies inside another one, so its gradients are reduced twice; "
            "use kind='hooks', or wrap once"
        )
    if inner is not None and len(layout.parallel) > 1:
        raise ValueError(
            f"comm_hook is one hook, but the model holds {len(layout.parallel)} DistributedDataParallel modules"
        )


def _inside(module: DistributedDataParallel) -> Iterator[DistributedDataParallel]:
    return (other for other in module.modules() if isinstance(other, DistributedDataParallel))


def _require_one_synchronisation(exchange: _Exchange) -> None:
    if exchange.synchronised != 1:
        raise ValueError(
            f"DDP's communication hook ran {exchange.synchronised} times in this window instead of once: the last "
            f"backward (and only it) must synchronise, its forward must go through the DistributedDataParallel module "
            f"and not through its .module, and the window is read before the next one begins"
        )
    if exchange.seen != exchange.elements:
        raise ValueError(
            f"DDP synchronised {exchange.seen} gradient elements, but {exchange.elements} are trainable: parameters "
            f"were unfrozen or added after wrapping; wrap the model in DistributedDataParallel anew"
        )


def _exchange(
    module: DistributedDataParallel,
    layout: Layout,
    inner: tuple[Any, CommunicationHook] | None,
) -> _Exchange:
    """The module's exchange: the one that a former tap left behind, or a newly registered one."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    elements = sum(map(_reals, trainable))
    left_behind = _left_behind(module)
    exchange = left_behind or _Exchange(module.process_group, layout.world, elements)
    exchange.inner, exchange.elements, exchange.attached = inner, elements, True
    exchange.places = {id(parameter): place for place, parameter in enumerate(layout.parameters)}
    if not left_behind:
        module.register_comm_hook(exchange, communicate)
    return exchange


def _left_behind(module: DistributedDataParallel) -> _Exchange | None:
    # DDP has no public way to ask for its hooks.
    return next((state for hook, state in module._comm_hooks if hook is communicate), None)


def _require_free(module: DistributedDataParallel) -> None:
    """The module's one place for a communication hook must be empty, or ours and not in use."""
    left_behind = _left_behind(module)
    if left_behind and left_behind.attached:
        raise ValueError("another tap is attached to this DistributedDataParallel module; call its detach() first")
    name = module._get_ddp_logging_data().get("comm_hook")
    if not left_behind and (module._comm_hooks or name):
        raise ValueError(
            f"this DistributedDataParallel module has the communication hook {name!r} already, and DDP takes only one; "
            f"do not register it, hand it over as attach(model, comm_hook=(state, hook)), or use kind='hooks'"
        )


def _in_order(by_place: dict[int, Tensor]) -> list[Tensor]:
    return [by_place[place] for place in sorted(by_place)]


def _reals(tensor: Tensor) -> int:
    """Elements as real numbers: DDP's buckets hold complex gradients as such (torch 2.13), or not."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _first(future: torch.futures.Future) -> Tensor:
    return future.value()[0]
