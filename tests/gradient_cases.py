"""Models, micro-batches and reference measurements for the tests of ``adabatch.gradients``.

The reference knows nothing of taps: every group's gradient comes from a backward pass of its own through a double
precision copy of the model, and all sums are taken in double precision.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from adabatch import gradients
from adabatch.noise import Measurement
from adabatch.plan import BatchPlan

# Micro-batches of each rank.
LAYOUTS = {
    "one each": [[3], [5]],
    "several": [[3, 1, 4], [2, 2, 5]],
    "three ranks": [[2, 3], [1, 4], [5, 1]],
}


@dataclass(frozen=True)
class Piece:
    """One micro-batch of one rank; the loss of sample i counts ``tokens[i]`` times."""

    inputs: Tensor
    tokens: Tensor
    samples: int
    weight: float


def plan(pieces: Sequence[int] | Sequence[Sequence[int]], *, measure: bool = True, step: int = 0) -> BatchPlan:
    """A plan whose ranks run micro-batches of these sizes, as far as shares and numbers go."""
    ranks = [pieces] if isinstance(pieces[0], int) else pieces
    return BatchPlan(
        step=step,
        first_sample=0,
        global_batch=sum(map(sum, ranks)),
        world=len(ranks),
        micro_batch=max(map(max, ranks)),
        micro_batches=len(ranks[0]),
        measure=measure,
    )


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A small network with a weight used in two places, a frozen parameter and a large one."""
    torch.manual_seed(seed)
    return Tied().to(dtype)


class Tied(nn.Module):
    """inputs (n, 6) -> outputs (n, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.wide = nn.Linear(6, 4000)
        self.narrow = nn.Linear(4000, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs)) + self.frozen
        return self.again(self.narrow(torch.tanh(self.wide(hidden))))


def pieces(sizes: Sequence[int], *, tokens: bool, seed: int = 1, dtype: torch.dtype = torch.float32) -> list[Piece]:
    """Micro-batches of these sizes; with ``tokens`` their samples weigh 1 to 40, otherwise 1 each."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for size in sizes:
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64).to(dtype)
        weights = torch.randint(1, 41, (size,), generator=generator) if tokens else torch.ones(size, dtype=torch.int64)
        made.append(Piece(inputs, weights, size, float(weights.sum())))
    return made


def pieces_of(sizes: list[list[int]], *, tokens: bool, dtype: torch.dtype) -> list[list[Piece]]:
    """Each rank's micro-batches."""
    return [pieces(mine, tokens=tokens, seed=10 + rank, dtype=dtype) for rank, mine in enumerate(sizes)]


def one_window(
    tap: gradients.Tap, model: nn.Module, mine: list[Piece], sizes: list[list[int]], **finish: Any
) -> gradients.Outcome:
    """This rank's window, finished and not stepped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradients.accumulate(tap, plan(sizes)) as window:
        for piece in mine:
            with window.micro_batch():
                window.backward(mean_loss(model, piece), samples=piece.samples, weight=piece.weight)
    return window.finish(optimizer, **finish)


def mean_loss(model: nn.Module, piece: Piece) -> Tensor:
    """Mean over the piece's tokens."""
    per_sample = model(piece.inputs).square().sum(dim=1)
    return (per_sample * piece.tokens.to(per_sample.dtype)).sum() / piece.weight


def exactly(piece: Piece) -> Piece:
    """The piece with inputs in double precision."""
    return replace(piece, inputs=piece.inputs.double())


def joined(groups: Sequence[Piece]) -> Piece:
    """All samples in one micro-batch."""
    return Piece(
        torch.cat([piece.inputs for piece in groups]),
        torch.cat([piece.tokens for piece in groups]),
        sum(piece.samples for piece in groups),
        sum(piece.weight for piece in groups),
    )


def gradient(model: nn.Module, groups: Sequence[Piece]) -> Tensor:
    """Gradient of the mean loss over all the pieces' tokens, flat, in double precision."""
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    weight = sum(piece.weight for piece in groups)
    for piece in groups:
        (mean_loss(exact, exactly(piece)) * (piece.weight / weight)).backward()
    return flat(exact)


def flat(model: nn.Module) -> Tensor:
    """All gradients of the model as one vector in double precision; zeros where there is none."""
    return torch.cat(
        [
            (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).double().reshape(-1)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
    )


def reference(model: nn.Module, groups: Sequence[Sequence[Piece]]) -> Measurement:
    """What a tap with these groups must measure."""
    weights = torch.tensor([sum(piece.weight for piece in group) for group in groups], dtype=torch.float64)
    shares = weights / weights.sum()
    gradients = torch.stack([gradient(model, group) for group in groups])
    mean = (shares[:, None] * gradients).sum(dim=0)
    every = [piece for group in groups for piece in group]
    exact = copy.deepcopy(model).double()
    losses = [mean_loss(exact, exactly(piece)).item() * piece.weight for piece in every]
    return Measurement(
        samples=sum(piece.samples for piece in every),
        groups=len(groups),
        mean_square=mean.square().sum().item(),
        group_square=(shares.square() * gradients.square().sum(dim=1)).sum().item(),
        weight_square=shares.square().sum().item(),
        weight=weights.sum().item(),
        loss=sum(losses) / weights.sum().item(),
    )


def difference(measured: Measurement, expected: Measurement) -> float:
    """Largest relative difference of the two, over all fields."""
    assert measured.finite == expected.finite
    pairs = [
        (measured.samples, expected.samples),
        (measured.groups, expected.groups),
        (measured.mean_square, expected.mean_square),
        (measured.group_square, expected.group_square),
        (measured.weight_square, expected.weight_square),
        (measured.weight, expected.weight),
        (measured.loss, expected.loss),
    ]
    return max(abs(one - other) / abs(other) for one, other in pairs)


def hooks_on(model: nn.Module) -> int:
    """How many hooks are registered on the model's parameters."""
    return sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())
