"""A gradient's length in the geometry of Adam and its kin: P is what multiplies a gradient in the optimizer's step.

``adam`` is |P g|^2, whose noise scale is tr(P Sigma P) / |P G|^2 (arXiv 2008.12260, equation 5); ``adam_sqrt`` is
g^T P g, whose noise scale is tr(P Sigma) / (G^T P G). P = 1 / (sqrt(v_hat) + eps) is the one of the step before: the
window's own gradients must not choose their ruler.

P is stored nowhere. It is computed again for each gradient, in chunks that stay in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import Tensor

from adabatch.gradients import norms
from adabatch.gradients.layout import HALF, Layout

VIEWS = ("adam", "adam_sqrt")

# A second moment of n squares estimates the variance of a Gaussian gradient as chi^2_n / n does, and its inverse, which
# is what P^2 has, has a variance of its own from n = 5 on.
WARM_STEPS = 5

# Elements of one chunk. On a CPU three chunks of 128 KB stay in the cache, and single precision adds one up right to
# 2e-7 (measured); on a GPU sums are in double precision, and a kernel's launch costs more than memory.
CHUNK, CHUNK_ON_GPU = 32_768, 4_194_304

# Gradients up to this size are kept until the pass ends, and measured as one; at most a chunk of them in all.
SMALL, SMALL_ON_GPU = 4_096, 262_144

# A second moment without a 0 can only get one by underflow, after hundreds of steps without a gradient. So it is not
# looked through in every window.
WINDOWS_BETWEEN_LOOKS = 64


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family of torch's optimizers keeps its second moment; ``corrected`` when its bias is, by 1 - beta2^t."""

    optimizer: type[torch.optim.Optimizer]
    second: str
    corrected: bool


FAMILIES = (
    Family(torch.optim.Adam, "exp_avg_sq", True),
    Family(torch.optim.AdamW, "exp_avg_sq", True),
    Family(torch.optim.RMSprop, "square_avg", False),
    Family(torch.optim.Adagrad, "sum", False),
)


def family(optimizer: torch.optim.Optimizer) -> Family | None:
    """How the optimizer keeps its second moment; ``None`` for one that has none, or one that we do not know."""
    return next((known for known in FAMILIES if isinstance(optimizer, known.optimizer)), None)


@dataclass(slots=True)
class _Moment:
    """The second moment v of one parameter, from which P = root / (sqrt(v) + floor).

    Attributes:
        family, optimizer, group: who keeps it.
        state: v as the optimizer has it.
        second: the same in real numbers, as a vector.
        order: that vector's order, where it is not the usual one: the dimensions from the outermost on.
        first: what a centred RMSprop squares and takes off v.
        gaps: whether v is 0 somewhere; ``None`` when nobody has looked.
        root: square root of the bias correction. ``None`` while v is made of too few squares, and NaN where only the
            device knows that.
        floor: eps times root.
    """

    family: Family
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    state: Tensor | None = None
    second: Tensor = field(default_factory=lambda: torch.zeros(0))
    order: tuple[int, ...] | None = None
    first: Tensor | None = None
    gaps: bool | None = None
    root: float | Tensor | None = None
    floor: float | Tensor = 0.0

    def take(self, state: dict[str, Any], root: float | Tensor) -> None:
        """Take the optimizer's state of a parameter as the window's."""
        kept = state["max_exp_avg_sq" if self.group.get("amsgrad") else self.family.second]
        if kept is not self.state or self.order is not None:
            if kept is not self.state:
                self.state, self.gaps = kept, None
            real = _real(kept)
            order = tuple(sorted(range(real.dim()), key=real.stride, reverse=True))
            self.order = None if real.is_contiguous() else order
            self.second = self.flat(kept)
        self.first = self.flat(state["grad_avg"]) if self.group.get("centered") else None
        self.root, self.floor = root, root * self.group["eps"]

    def flat(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as a vector in the order of ``second``; a view where it lies like that."""
        real = _real(tensor)
        return (real if self.order is None else real.permute(self.order)).reshape(-1)


class Preconditioned:
    """``adam``, ``adam_sqrt`` or both, as an ``Instrument``.

    Each parameter is measured by its own optimizer and parameter group, with the eps and beta2 in force; learning rates
    and weight decay play no part. A parameter that none of the optimizers holds is not moved by them, and left out. So
    is a coordinate whose second moment is 0: it had no gradient yet, and a P of 1 / eps would let a token that is seen
    for the first time outweigh all the rest. A window is not measured while a second moment that it needs is made of
    fewer than ``WARM_STEPS`` squares.

    Args:
        views: of ``VIEWS``.
        optimizers: parameters of those without a ``family`` are left out.
        layout: the model's.
    """

    def __init__(self, views: Sequence[str], optimizers: Sequence[torch.optim.Optimizer], layout: Layout) -> None:
        self.names = tuple(views)
        self._optimizers = tuple(optimizers)
        self._layout = layout
        self._held = 0
        self._moments: dict[int, _Moment] = {}
        self._fresh = False
        self._windows = 0
        on_cpu = layout.device.type == "cpu"
        chunk = CHUNK if on_cpu else CHUNK_ON_GPU
        self.chunk = min(chunk, 2 * max(one.numel() for one in layout.parameters))
        self.small = _small(layout, SMALL if on_cpu else SMALL_ON_GPU, chunk)

    def open(self) -> None:
        """A window begins. The optimizer's step may still be to come, so its state is read with the first gradient."""
        self._fresh = False

    def reading(self) -> _Reading:
        """Begin to add up one gradient of the whole model."""
        return _Reading(self, self._layout.device)

    def moments(self) -> dict[int, _Moment]:
        """The window's moments by parameter."""
        if not self._fresh:
            self._fresh = True
            self._find_holders()
            self._freeze()
            self._look_for_gaps()
        return self._moments

    def _find_holders(self) -> None:
        """Which group holds which parameter; anew when the groups have grown."""
        held = sum(len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups)
        if held == self._held:
            return
        self._held = held
        holders = {
            id(parameter): (known, optimizer, group)
            for optimizer in self._optimizers
            if (known := family(optimizer)) is not None
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        parameters = self._layout.parameters
        self._moments = {
            index: _Moment(*holders[id(parameter)])
            for index, parameter in enumerate(parameters)
            if id(parameter) in holders
        }

    def _freeze(self) -> None:
        parameters = self._layout.parameters
        states = {index: moment.optimizer.state.get(parameters[index]) for index, moment in self._moments.items()}
        roots = _roots({index: state["step"] for index, state in states.items() if state}, self._moments)
        for index, moment in self._moments.items():
            moment.root = None
            if roots.get(index) is not None:
                moment.take(states[index], roots[index])

    def _look_for_gaps(self) -> None:
        """Find out where v is 0 somewhere. A GPU is not asked, as the host would have to wait for it."""
        again = self._windows % WINDOWS_BETWEEN_LOOKS == 0
        self._windows += 1
        if self._layout.device.type == "cpu":
            for index, moment in self._moments.items():
                if moment.root is not None and index not in self.small and (moment.gaps is None or again):
                    moment.gaps = moment.first is not None or not bool(moment.second.min() > 0)


class _Reading:
    """One gradient of the whole model on its way through ``Preconditioned``."""

    def __init__(self, ruler: Preconditioned, device: torch.device) -> None:
        self._ruler = ruler
        self._device = device
        self._cold = False
        self._small: dict[int, Tensor] = {}
        self._large: dict[int, list[tuple[Tensor, ...]]] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}

    def see(self, indices: Sequence[int], gradients: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
        """Take gradients in; the small ones are copied, the large ones multiplied out at once."""
        moments = self._ruler.moments()
        small: dict[int, Tensor] = {}
        for index, gradient in zip(indices, gradients):
            moment = moments.get(index)
            if moment is None:
                continue
            if gradient.requires_grad:
                gradient = gradient.detach()
            if moment.root is None:
                self._cold = True
            elif index in self._ruler.small:
                small[index] = moment.flat(gradient)
            else:
                self._large[index] = self._multiplied(moment.flat(gradient), moment)
        if small:
            joined = torch.cat(list(small.values()))
            self._small.update(zip(small, joined.split([gradient.numel() for gradient in small.values()])))

    def total(self) -> Tensor:
        """Squared lengths, (views,); NaN when a second moment could not be used yet."""
        self._scratch = {}
        totals = torch.zeros(len(self._ruler.names), dtype=torch.float64, device=self._device)
        if self._cold:
            return totals.fill_(math.nan)
        if self._large:
            totals += self._of_large()
        if self._small:
            totals += self._of_small()
        return totals

    def _multiplied(self, gradient: Tensor, moment: _Moment) -> list[tuple[Tensor, ...]]:
        """A large gradient's products in all views without the roots, chunk by chunk."""
        chunk = self._ruler.chunk
        if gradient.numel() <= chunk:
            return [self._products(gradient, moment.second, moment.first, moment)]
        firsts = repeat(None) if moment.first is None else moment.first.split(chunk)
        parts = zip(gradient.split(chunk), moment.second.split(chunk), firsts)
        return [self._products(*part, moment) for part in parts]

    def _products(self, gradient: Tensor, second: Tensor, first: Tensor | None, moment: _Moment) -> tuple[Tensor, ...]:
        gradient = _single(gradient)
        room = self._scratch.get(gradient.dtype)
        if room is None:
            # Once per gradient and not per chunk: the memory of a fresh tensor has to be mapped first.
            room = torch.empty(self._ruler.chunk, dtype=gradient.dtype, device=self._device)
            self._scratch[gradient.dtype] = room
        room = room if second.numel() == room.numel() else room[: second.numel()]
        return _dots(
            self._ruler.names,
            gradient,
            _quotient(gradient, second, first, moment.floor, moment.gaps is not False, room),
        )

    def _of_large(self) -> Tensor:
        order = sorted(self._large)
        roots = _spread(
            [self._ruler.moments()[index].root for index in order],
            [len(self._large[index]) for index in order],
            self._device,
        )
        columns = zip(*(products for index in order for products in self._large[index]))
        return torch.stack(
            [
                (torch.stack(column).double() * (roots * roots if view == "adam" else roots)).sum()
                for view, column in zip(self._ruler.names, columns)
            ]
        )

    def _of_small(self) -> Tensor:
        """The small gradients, as if they were one; in the parameters' order."""
        order = sorted(self._small)
        moments = [self._ruler.moments()[index] for index in order]
        sizes = [moment.second.numel() for moment in moments]
        second, first = torch.cat([moment.second for moment in moments]), None
        if any(moment.first is not None for moment in moments):
            first = torch.cat([torch.zeros_like(one.second) if one.first is None else one.first for one in moments])
        roots = _spread([moment.root for moment in moments], sizes, self._device)
        floors = _spread([moment.floor for moment in moments], sizes, self._device)
        gradient = _single(torch.cat([self._small[index] for index in order]))
        self._small.clear()
        quotient = _quotient(gradient, second, first, floors, gaps=True, out=torch.empty_like(gradient)).mul_(roots)
        return torch.stack(_dots(self._ruler.names, gradient, quotient)).double()


def _quotient(
    gradient: Tensor, second: Tensor, first: Tensor | None, floor: float | Tensor, gaps: bool, out: Tensor
) -> Tensor:
    """g / (sqrt(v - first^2) + floor), and 0 where the root is 0; all are vectors."""
    if first is None and second.dtype == out.dtype:
        torch.sqrt(second, out=out)
    else:
        out.copy_(second)
        if first is not None:
            out.addcmul_(first.to(out.dtype), first.to(out.dtype), value=-1).clamp_(min=0)
        out.sqrt_()
    if gaps:
        torch.threshold_(out, 0.0, math.inf)
    return torch.div(gradient, out.add_(floor), out=out)


def _dots(views: Sequence[str], gradient: Tensor, quotient: Tensor) -> tuple[Tensor, ...]:
    """A gradient's products in all views; overwrites ``quotient``.

    By sums, whose bits do not depend on where a vector begins in memory, as those of BLAS do on some processors: MKL's
    sdot was seen 6e-6 apart. Gradients lie elsewhere in DDP's buckets after a resume.
    """
    wide = torch.float32 if quotient.device.type == "cpu" and quotient.dtype == torch.float32 else torch.float64
    products = {}
    if "adam" in views:
        products["adam"] = norms.pieces(quotient).square().sum(dtype=wide)
    if "adam_sqrt" in views:
        products["adam_sqrt"] = quotient.mul_(gradient).sum(dtype=wide)
    return tuple(products[view] for view in views)


def _single(gradient: Tensor) -> Tensor:
    return gradient.float() if gradient.dtype in HALF else gradient


def _spread(values: Sequence[float | Tensor], counts: Sequence[int], device: torch.device) -> float | Tensor:
    """Each value as often as ``counts`` says, a vector in double precision; one number where all are the same."""
    if not isinstance(values[0], Tensor) and all(value == values[0] for value in values):
        return values[0]
    often = _vector(counts, device).long()
    return torch.repeat_interleave(_vector(values, device), often, output_size=sum(counts))


def _roots(steps: Mapping[int, float | Tensor], moments: Mapping[int, _Moment]) -> dict[int, float | Tensor | None]:
    """Square roots of the bias corrections by parameter. After too few steps ``None``, or NaN where the step counters
    are on the device and the host does not wait for them."""
    apart = {index: step for index, step in steps.items() if not _known_to_the_host(step)}
    known: dict[tuple[int, float], float | None] = {}
    found: dict[int, float | Tensor | None] = {}
    for index, step in steps.items():
        if index not in apart:
            key = (id(moments[index].group), float(step))
            if key not in known:
                known[key] = _root(key[1], float(_beta2(moments[index])))
            found[index] = known[key]
    if apart:
        device = next(iter(apart.values())).device
        taken = _vector(list(apart.values()), device)
        corrections = 1 - _vector([_beta2(moments[index]) for index in apart], device) ** taken
        found |= zip(apart, torch.where(taken >= WARM_STEPS, corrections.sqrt(), math.nan).unbind())
    return found


def _known_to_the_host(number: float | Tensor) -> bool:
    return not isinstance(number, Tensor) or number.device.type == "cpu"


def _root(steps: float, beta2: float) -> float | None:
    return math.sqrt(1 - beta2**steps) if steps >= WARM_STEPS else None


def _beta2(moment: _Moment) -> float | Tensor:
    """beta2, and 0, which corrects nothing, where the optimizer does not."""
    return moment.group["betas"][1] if moment.family.corrected else 0.0


def _vector(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Numbers and scalars as one vector in double precision. To a GPU from pinned memory: else the host waits."""
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])
    vector = torch.tensor(values, dtype=torch.float64, pin_memory=device.type == "cuda")
    return vector.to(device, non_blocking=True)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _small(layout: Layout, each: int, total: int) -> frozenset[int]:
    """The smallest parameters, up to ``each`` elements, and ``total`` in all."""
    sizes = sorted((parameter.numel(), index) for index, parameter in enumerate(layout.parameters))
    room = accumulate(size for size, _ in sizes)
    return frozenset(index for (size, index), so_far in zip(sizes, room) if size <= each and so_far <= total)
