"""Lengths of sums of outer products, one sum for every example, without writing down more of them than pays.

The gradient of a weight that is multiplied with something is, for one example, a sum of outer products over its
positions. The squared length of sum_t a_t b_t' is sum_{t,u} (a_t . a_u) (b_t . b_u), which is cheaper for few
positions; for many it is cheaper to add the products up (arXiv 2411.00999).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Numbers in double precision that are held at a time: 32 MB.
CHUNK = 2**22


@dataclass(frozen=True, slots=True)
class Outer:
    """For every example the sum over its positions of left x right, a matrix (p, q).

    Attributes:
        left: (examples, positions, p); or whole numbers (examples, positions) that say which row right is added to.
        right: (examples, positions, q).
    """

    left: Tensor
    right: Tensor

    @property
    def by_row(self) -> bool:
        """Whether ``left`` holds row numbers."""
        return self.left.dim() == 2

    @property
    def positions(self) -> int:
        """Positions of an example."""
        return self.left.shape[1]

    def part(self, start: int, stop: int) -> Outer:
        """Some of the examples, in double precision."""
        left = self.left[start:stop]
        return Outer(left if self.by_row else left.double(), self.right[start:stop].double())


def squared_lengths(terms: Sequence[Outer], shape: tuple[int, int]) -> Tensor:
    """Squared length of each example's sum of all ``terms``, matrices of this ``shape``: (examples,), in fp64."""
    if all(term.by_row for term in terms):
        return _by_row(terms, shape)
    direct, gram = _costs(terms, shape)
    held = [shape[0] * shape[1]] if direct <= gram else [2 * sum(term.positions for term in terms) ** 2]
    held += [term.right[0].numel() + term.left[0].numel() for term in terms]
    size = max(1, CHUNK // max(max(held), 1))
    lengths = [_direct(part, shape) if direct <= gram else _gram(part) for part in _parts(terms, size)]
    return torch.cat(lengths)


def probe(terms: Sequence[Outer], rows: Tensor, columns: Tensor) -> Tensor:
    """``rows`` (p,) x the sum of ``terms`` over all examples x ``columns`` (q,), all in double precision: a scalar."""
    total = torch.zeros((), dtype=torch.float64, device=rows.device)
    for term in terms:
        left = rows[term.left] if term.by_row else term.left.double() @ rows
        total += (left * (term.right.double() @ columns)).sum()
    return total


def _costs(terms: Sequence[Outer], shape: tuple[int, int]) -> tuple[int, int]:
    """Multiplications for one example: all products added up, and all pairs of positions."""
    p, q = shape
    positions = sum(term.positions for term in terms)
    direct = p * q + sum(term.positions * q * (1 if term.by_row else p) for term in terms)
    return direct, positions * positions * (p + q)


def _parts(terms: Sequence[Outer], size: int) -> Iterator[list[Outer]]:
    """``size`` examples at a time; none at all are one part, too."""
    for start in range(0, max(len(terms[0].left), 1), size):
        yield [term.part(start, start + size) for term in terms]


def _direct(terms: Sequence[Outer], shape: tuple[int, int]) -> Tensor:
    p, q = shape
    examples = len(terms[0].right)
    total = terms[0].right.new_zeros(examples, p, q)
    for term in terms:
        if term.by_row:
            total.view(-1, q).index_add_(0, _distinct(term.left, p).flatten(), term.right.flatten(0, 1))
        else:
            total.baddbmm_(term.left.mT, term.right)
    return total.square().sum((1, 2))


def _gram(terms: Sequence[Outer]) -> Tensor:
    total = terms[0].right.new_zeros(len(terms[0].right))
    for place, one in enumerate(terms):
        for other in terms[: place + 1]:
            products = (_left_products(one, other) * (one.right @ other.right.mT)).sum((1, 2))
            total += products if one is other else 2 * products
    return total


def _left_products(one: Outer, other: Outer) -> Tensor:
    """Scalar products of the left factors at all pairs of positions, (examples, positions of one, of the other)."""
    if one.by_row and other.by_row:
        return one.left[:, :, None] == other.left[:, None, :]
    if other.by_row:
        return _left_products(other, one).mT
    if one.by_row:
        rows = one.left[:, :, None].expand(-1, -1, other.positions)
        return other.left.mT.gather(1, rows)
    return one.left @ other.left.mT


def _by_row(terms: Sequence[Outer], shape: tuple[int, int]) -> Tensor:
    """Rows that an example uses are summed up one by one: other rows are 0, and as many as a vocabulary has words."""
    p, q = shape
    keys = torch.cat([_distinct(term.left, p) for term in terms], dim=1)
    used, places = keys.unique(return_inverse=True)
    rows = torch.zeros(len(used), q, dtype=torch.float64, device=keys.device)
    right = torch.cat([term.right for term in terms], dim=1)
    rows.index_add_(0, places.flatten(), right.flatten(0, 1).double())
    lengths = torch.zeros(len(keys), dtype=torch.float64, device=keys.device)
    return lengths.index_add_(0, used // p, rows.square().sum(1))


def _distinct(rows: Tensor, p: int) -> Tensor:
    """Row numbers (examples, positions), made different for different examples."""
    return rows + p * torch.arange(len(rows), device=rows.device)[:, None]
