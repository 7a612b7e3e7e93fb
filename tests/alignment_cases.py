"""Reference alignments for the tests of ``adabatch.gradients.alignment``: every set and every rest written out.

The reference knows nothing of taps, trees and reductions: each group's gradient comes from a backward pass of its own
through a double precision copy, and every mean is taken over the groups that it is the mean of.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence

import gradient_cases as cases
import torch
from torch import Tensor, nn

from adabatch.alignment import Alignment

Map = Callable[[Tensor], Tensor]


def polar(gradient: Tensor, group: object = None) -> Tensor:
    """The orthogonal factor of a matrix, 0 where the matrix is: one sample's gradient has rank 1."""
    left, sizes, right = torch.linalg.svd(gradient, full_matrices=False)
    return left @ torch.diag((sizes > 1e-10 * sizes[0]).to(sizes.dtype)) @ right


def sign(gradient: Tensor) -> Tensor:
    return torch.where(gradient > 0, 1.0, torch.where(gradient < 0, -1.0, 0.0)).to(gradient.dtype)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() == 2]


def gradients(model: nn.Module, piece: cases.Piece, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradient of the piece's mean loss in double precision."""
    exact = copy.deepcopy(model).double()
    places = {id(parameter): i for i, parameter in enumerate(model.parameters())}
    copies = [list(exact.parameters())[places[id(parameter)]] for parameter in parameters]
    return list(torch.autograd.grad(cases.mean_loss(exact, cases.exactly(piece)), copies))


def reference(
    model: nn.Module, ranks: Sequence[Sequence[cases.Piece]], parameters: Sequence[nn.Parameter], mapping: Map
) -> dict[tuple[float, int], tuple[float, float]]:
    """(m, pairs) -> (alignment, own), of all sizes that a tap must measure."""
    pieces = [piece for mine in ranks for piece in mine if piece.weight > 0]
    found = [gradients(model, piece, parameters) for piece in pieces]

    def mean(indices: Sequence[int]) -> list[Tensor]:
        total = sum(pieces[i].weight for i in indices)
        return [sum(pieces[i].weight / total * found[i][k] for i in indices) for k in range(len(parameters))]

    def product(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
        return sum((one * other).sum().item() for one, other in zip(left, right, strict=True))

    weight = sum(piece.weight for piece in pieces)
    measured = {}
    for sets in families(ranks, len(pieces)):
        rests = [[i for i in range(len(pieces)) if i not in one] for one in sets]
        shares = [sum(pieces[i].weight for i in one) / weight for one in sets]
        updates = [[mapping(gradient) for gradient in mean(one)] for one in sets]
        held_out = [product(update, mean(rest)) for update, rest in zip(updates, rests, strict=True)]
        own = [product(update, mean(one)) for update, one in zip(updates, sets, strict=True)]
        samples = sum(pieces[i].samples for one in sets for i in one) / len(sets)
        measured[samples, len(sets)] = (
            sum(a * (1 - p) for a, p in zip(held_out, shares)) / sum(1 - p for p in shares),
            sum(a * p for a, p in zip(own, shares)) / sum(shares),
        )
    return measured


def families(ranks: Sequence[Sequence[cases.Piece]], count: int) -> Iterator[list[list[int]]]:
    """The sets of each size, by the numbers of their groups; none is the whole window."""
    shares, first = [], 0
    for mine in ranks:
        groups = sum(piece.weight > 0 for piece in mine)
        shares.append(list(range(first, first + groups)))
        first += groups
    size = 1
    while size <= count:
        # A rank's whole share is a size of its own.
        blocks = [share[i : i + size] for share in shares for i in range(0, len(share) - size + 1, size)]
        blocks = [block for block in blocks if block not in shares]
        if blocks:
            yield blocks
        size *= 2
    shares = [share for share in shares if share]
    if len(ranks) > 1:
        yield shares
    pieces = {1: 4, 2: 2}.get(len(ranks), 1)
    parts = [part for share in shares for part in cut(share, pieces)]
    if parts:
        yield [[i for i in range(count) if i not in part] for part in parts]


def cut(share: list[int], pieces: int) -> list[list[int]]:
    """A share of 2^n groups in equal pieces; none where that does not work out."""
    if pieces == 1:
        return [share]
    if len(share) < pieces or math.log2(len(share)) % 1:
        return []
    size = len(share) // pieces
    return [share[i : i + size] for i in range(0, len(share), size)]


def difference(measured: Alignment, expected: dict[tuple[float, int], tuple[float, float]]) -> float:
    """Largest difference of alignments and products with oneself, over the largest of each; of the same sizes."""
    found = {(one.samples, one.pairs): (one.alignment, one.own) for one in measured.readings}
    assert len(found) == len(measured.readings)
    assert sorted(found) == sorted(expected)
    sizes = [max(abs(values[i]) for values in expected.values()) for i in range(2)]
    return max(abs(found[key][i] - expected[key][i]) / sizes[i] for key in expected for i in range(2))
