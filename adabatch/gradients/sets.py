"""Sets of 1, 2, 4, ... groups, their updates and what these have in common with the rest of the window.

Groups come one after another, and sets are put together like the digits of a binary number, so that few gradients live
at once. The updates of all sets of one size are added up and multiplied once with the sum of the window's gradient; each
set's product with itself is taken off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adabatch.gradients.rulers import summed
from adabatch.gradients.statistics import entries

# Sets of 2^level groups of one rank, then a rank's whole share, and the rest of a part of the window.
LEVELS = 24
SHARE, REST, SIZES = LEVELS, LEVELS + 1, LEVELS + 2
# A rank's numbers for one size. The product is with the rest; in place of a rest's weight and samples stand those of the
# part that it is the rest of, since a rank does not know the whole.
PRODUCT, OWN, SETS, WEIGHT, SAMPLES, COLUMNS = range(6)

# One tensor for each parameter; None is 0.
Gradients = list[Tensor | None]


@dataclass(slots=True)
class Groups:
    """A set of groups of one rank.

    Attributes:
        gradients: the sum of what they added to the gradient.
        weight, samples: theirs together.
        parts: the two sets that this was put together from, as long as they are kept.
    """

    gradients: Gradients
    weight: float | Tensor
    samples: int
    parts: tuple[Groups, ...] = ()


@dataclass(slots=True)
class _Size:
    """The sets of one size: the sum of their updates, their products with themselves, and their number."""

    updates: Gradients
    own: list[Tensor] = field(default_factory=list)
    sets: float | Tensor = 0.0
    weight: float | Tensor = 0.0
    samples: float = 0.0

    def count(self, one: Groups) -> None:
        weight = one.weight
        self.sets = self.sets + ((weight > 0).double() if isinstance(weight, Tensor) else 1.0)
        self.weight = self.weight + weight
        self.samples += one.samples


class Sets:
    """The sets of one rank in one window.

    Args:
        update: a set's gradients to its updates; their lengths do not matter to it.
        world: ranks that share the window.
        device: where gradients live.
    """

    def __init__(self, update: Callable[[Gradients], Gradients], world: int, device: torch.device) -> None:
        self.weight: float | Tensor = 0.0
        self.samples = 0
        self._update = update
        self._world = world
        self._device = device
        self._sizes: dict[int, _Size] = {}
        self._pending: dict[int, Groups] = {}
        # The only pending set is all there is so far. It is compared when another group comes, as it then has a rest.
        self._first_waits = False

    def take(self, group: Groups) -> None:
        """Put one group to the others."""
        self.weight, self.samples = self.weight + group.weight, self.samples + group.samples
        if self._first_waits:
            ((level, first),) = self._pending.items()
            self._compare(level, first)
            _drop_parts_of(first.parts)
            # Its halves are quarters when it becomes half of the window.
            first.parts = first.parts if self._world == 1 else ()
        one, level = group, 0
        while level in self._pending:
            self._compare(level, one)
            one, level = _joined(self._pending.pop(level), one), level + 1
        self._first_waits = not self._pending
        if not self._first_waits:
            self._compare(level, one)
            one.parts = ()
        self._pending[level] = one

    def numbers(self, window: Gradients, to_sum: float | Tensor) -> list[float | Tensor]:
        """The columns of all sizes, one after another, in units of what the groups added.

        Args:
            window: the window's gradient, reduced over the ranks.
            to_sum: what it must be multiplied by to be the sum of what all groups of all ranks added.
        """
        share = _all(list(self._pending.values())) if self._world > 1 and self._pending else None
        parts = self._parts(share)
        if share is not None:
            self._compare(SHARE, share)
        row: list[float | Tensor] = []
        for index in range(REST):
            size = self._sizes.get(index)
            row += [0.0] * COLUMNS if size is None else self._columns(size, window, to_sum)
        return row + (self._rests(parts, window, to_sum) if parts else [0.0] * COLUMNS)

    def _compare(self, index: int, one: Groups) -> None:
        """Map a set, and add its update to those of its size."""
        size = self._sizes.setdefault(index, _Size([None] * len(one.gradients)))
        updates = self._update(one.gradients)
        size.own.append(self._product(updates, one.gradients))
        size.updates = [_plus(total, update) for total, update in zip(size.updates, updates)]
        size.count(one)

    def _columns(self, size: _Size, window: Gradients, to_sum: float | Tensor) -> list[float | Tensor]:
        own = torch.stack(size.own).sum()
        product = self._product(size.updates, window) * to_sum - own
        return [*entries(torch.stack([product, own])), size.sets, size.weight, size.samples]

    def _parts(self, share: Groups | None) -> Sequence[Groups]:
        """The parts of the window on this rank whose rest is mapped: each about a quarter of it, or less."""
        if share is not None and self._world >= 3:
            return (share,)
        if not self._first_waits:
            return ()
        (first,) = self._pending.values()
        return first.parts if self._world == 2 else [quarter for half in first.parts for quarter in half.parts]

    def _rests(self, parts: Sequence[Groups], window: Gradients, to_sum: float | Tensor) -> list[float | Tensor]:
        size, products = _Size([]), []
        for part in parts:
            scaled = (None if one is None else one * to_sum for one in window)
            rest = [_plus(one, other, -1.0) for one, other in zip(scaled, part.gradients)]
            updates = self._update(rest)
            products.append(self._product(updates, part.gradients))
            size.own.append(self._product(updates, rest))
            size.count(part)
        both = torch.stack([torch.stack(products).sum(), torch.stack(size.own).sum()])
        return [*entries(both), size.sets, size.weight, size.samples]

    def _product(self, left: Gradients, right: Gradients) -> Tensor:
        """The inner product, a scalar: products in the gradients' precision, sums in double."""
        pairs = [(one, other) for one, other in zip(left, right) if one is not None and other is not None]
        return summed([(one * other).sum(dtype=torch.float64) for one, other in pairs], self._device)


def _joined(left: Groups, right: Groups) -> Groups:
    _drop_parts_of((*left.parts, *right.parts))
    gradients = [_plus(one, other) for one, other in zip(left.gradients, right.gradients)]
    return Groups(gradients, left.weight + right.weight, left.samples + right.samples, (left, right))


def _all(sets: Sequence[Groups]) -> Groups:
    one, *others = sets
    for other in others:
        one = _joined(one, other)
    return one


def _drop_parts_of(sets: Sequence[Groups]) -> None:
    for one in sets:
        one.parts = ()


def _plus(one: Tensor | None, other: Tensor | None, factor: float = 1.0) -> Tensor | None:
    """one + factor * other, without changing either: backward may have given two parameters the same tensor."""
    if other is None:
        return one
    return other * factor if one is None else torch.add(one, other, alpha=factor)
