"""The map from a gradient to the direction of an optimizer's step, for optimizers whose steps have their own length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adabatch.gradients.layout import Layout

# A gradient and its parameter group to the step over -lr, of the gradient's shape.
Update = Callable[[Tensor, Mapping[str, Any]], Tensor]

SIGN_METHODS = ("SignSGD", "Signum", "Lion")


def sign(gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The step of SignSGD."""
    return gradient.sign()


def orthogonalised(gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The step of torch.optim.Muon without momentum, its adjustment of the rate to the shape included.

    It is that optimizer's own step, of a parameter that is 0.
    """
    names = ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn") if "ns_coefficients" in group else ()
    settings = {name: group[name] for name in names}
    scratch = nn.Parameter(torch.zeros_like(gradient))
    scratch.grad = gradient
    torch.optim.Muon([scratch], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()
    return scratch.detach().neg_()


UPDATES: dict[str, Update] = {"sign": sign, "muon": orthogonalised}


def chosen(optimizer: torch.optim.Optimizer, update: str | Update | None) -> tuple[str, Update]:
    """Name and function of what was asked for, or of what the optimizer does.

    Raises:
        ValueError: when that is not known.
    """
    if callable(update):
        return getattr(update, "__name__", "custom"), update
    kind = type(optimizer).__name__
    if update is None:
        muon = getattr(torch.optim, "Muon", None)
        update = "muon" if muon is not None and isinstance(optimizer, muon) else None
        update = "sign" if kind in SIGN_METHODS else update
    if update not in UPDATES:
        what = f"{kind} has none that is known" if update is None else f"{update!r} is not known"
        raise ValueError(
            f"alignments need the map from a gradient to the optimizer's step, and {what}: hand over update="
            f"{' or '.join(map(repr, UPDATES))}, or a function of a gradient and its parameter group. Without it: "
            f"torch.optim.Muon, and optimizers named {', '.join(SIGN_METHODS)}"
        )
    return update, UPDATES[update]


def trained(
    layout: Layout, optimizer: torch.optim.Optimizer, geometry: str
) -> list[tuple[str, nn.Parameter, dict[str, Any]]]:
    """Name, parameter and parameter group of all that the optimizer trains, in its order.

    Raises:
        ValueError: for a parameter that the update does not take, and when there is none.
    """
    names = {id(parameter): name for name, parameter in zip(layout.names, layout.parameters)}
    pairs = [(one, group) for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    found = [(names[id(parameter)], parameter, group) for parameter, group in pairs]
    for name, parameter, _ in found:
        if parameter.is_complex():
            raise ValueError(f"parameter {name!r} is complex, and {geometry} steps are of real parameters")
        if geometry == "muon" and parameter.dim() != 2:
            raise ValueError(
                f"parameter {name!r} has shape {tuple(parameter.shape)}, and Muon's step is of matrices: give it to "
                f"another optimizer, whose noise scale has a geometry of its own"
            )
    if not found:
        raise ValueError(f"{type(optimizer).__name__} trains no parameter that needs a gradient")
    return found
