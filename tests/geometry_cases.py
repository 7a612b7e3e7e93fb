"""Optimizers, and what they divide a gradient by, for the tests of preconditioned lengths.

The reference writes out each optimizer's divisor by hand, in double precision, from a copy of its state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import gradient_cases as cases
import torch
from torch import Tensor, nn

from adabatch.noise import Measurement

Optimizers = Sequence[torch.optim.Optimizer]


def _halves(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups with an eps and a beta2 of their own."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": trained[::2], "eps": 1e-3, "betas": (0.9, 0.99)},
        {"params": trained[1::2], "weight_decay": 0.0},
    ]


def _two(model: nn.Module) -> Optimizers:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [torch.optim.AdamW(trained[:2], lr=1e-3), torch.optim.RMSprop(trained[2:], lr=1e-4, alpha=0.9)]


MAKERS: dict[str, Callable[[nn.Module], Optimizers]] = {
    "adamw": lambda model: [torch.optim.AdamW(_halves(model), lr=1e-3, weight_decay=0.1)],
    "adam": lambda model: [torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.7), weight_decay=0.1)],
    "amsgrad": lambda model: [torch.optim.AdamW(_halves(model), lr=1e-3, amsgrad=True)],
    "fused": lambda model: [torch.optim.AdamW(_halves(model), lr=1e-3, fused=True)],
    "one by one": lambda model: [torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)],
    "tensors": lambda model: [
        torch.optim.Adam(
            model.parameters(), lr=torch.tensor(1e-3), betas=(torch.tensor(0.9), torch.tensor(0.999)), foreach=False
        )
    ],
    "rmsprop": lambda model: [torch.optim.RMSprop(model.parameters(), lr=1e-4, alpha=0.9, momentum=0.5)],
    "centered": lambda model: [torch.optim.RMSprop(model.parameters(), lr=1e-4, alpha=0.9, centered=True)],
    "adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=1e-3)],
    "adagrad from 1": lambda model: [torch.optim.Adagrad(model.parameters(), lr=1e-3, initial_accumulator_value=1.0)],
    "two": _two,
}


def preconditioner(model: nn.Module, optimizers: Optimizers) -> Tensor:
    """P of every trained coordinate, flat, in double precision; 0 where v is 0 and where no optimizer holds it."""
    held = {
        id(parameter): _of_one(optimizer, group, optimizer.state[parameter])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in optimizer.state
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat(
        [
            held.get(id(parameter), torch.zeros(parameter.shape, dtype=torch.float64)).reshape(-1)
            for parameter in trained
        ]
    )


def _of_one(optimizer: torch.optim.Optimizer, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    if isinstance(optimizer, torch.optim.RMSprop):
        v = state["square_avg"].double()
        if group["centered"]:
            v = (v - state["grad_avg"].double() ** 2).clamp(min=0)
    elif isinstance(optimizer, torch.optim.Adagrad):
        v = state["sum"].double()
    else:
        v = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].double()
        v = v / (1 - float(group["betas"][1]) ** float(state["step"]))
    return torch.where(v > 0, 1 / (v.sqrt() + group["eps"]), 0.0)


def views(model: nn.Module, p: Tensor, groups: Sequence[Sequence[cases.Piece]]) -> dict[str, tuple[float, float]]:
    """|P g|^2 and g^T P g of the mean gradient, and their weighted sums over the groups, from separate backwards."""
    weights = torch.tensor([sum(piece.weight for piece in group) for group in groups], dtype=torch.float64)
    shares = weights / weights.sum()
    gradients = torch.stack([cases.gradient(model, group) for group in groups])
    mean = shares @ gradients
    return {
        name: ((mean**2 * q).sum().item(), (shares**2 @ (gradients**2 * q).sum(1)).item())
        for name, q in (("adam", p * p), ("adam_sqrt", p))
    }


def frozen(model: nn.Module, optimizers: Optimizers) -> tuple[nn.Module, Tensor]:
    """The model and P as they are before a window."""
    return copy.deepcopy(model), preconditioner(model, optimizers)


def difference(measured: Measurement, expected: dict[str, tuple[float, float]]) -> float:
    """Largest relative difference of the views; they must be the expected ones and no others."""
    assert measured.views.keys() == expected.keys(), f"measured {list(measured.views)}, expected {list(expected)}"
    return max(
        abs(one - other) / abs(other)
        for name, pair in expected.items()
        for one, other in zip(measured.views[name], pair, strict=True)
    )
