"""The map from a gradient to the direction of an optimizer's step, for optimizers whose steps have their own length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch.optim.Muon, where torch has it."""
    muon = getattr(torch.optim, "Muon", None)
    return muon is not None and isinstance(optimizer, muon)


def chosen(optimizers: Sequence[torch.optim.Optimizer], update: str | Update | None) -> tuple[str, Update]:
    """Name and function of what was asked for, or of what all of the optimizers do.

    Raises:
        ValueError: when that is not known, or they differ in it.
    """
    if callable(update):
        return getattr(update, "__name__", "custom"), update
    if update is None:
        own = {"muon" if is_muon(one) else "sign" if type(one).__name__ in SIGN_METHODS else None for one in optimizers}
        update = own.pop() if len(own) == 1 else None
    if update not in UPDATES:
        kinds = " with ".join(type(one).__name__ for one in optimizers)
        what = f"{kinds} has none that is known" if update is None else f"{update!r} is not known"
        raise ValueError(
            f"alignments need the map from a gradient to the optimizer's step, and {what}: hand over update="
            f"{' or '.join(map(repr, UPDATES))}, or a function of a gradient and its parameter group. Without it: "
            f"torch.optim.Muon, and optimizers named {', '.join(SIGN_METHODS)}"
        )
    return update, UPDATES[update]


def trained(
    layout: Layout, optimizers: Sequence[torch.optim.Optimizer], geometry: str
) -> list[tuple[str, nn.Parameter, dict[str, Any]]]:
    """Name, parameter and parameter group of all that the optimizers train, in their order.

    Raises:
        ValueError: for a parameter that the update does not take, and when there is none.
    """
    names = {id(parameter): name for name, parameter in zip(layout.names, layout.parameters)}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    pairs = [(one, group) for group in groups for one in group["params"] if one.requires_grad]
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
        kinds = " with ".join(type(one).__name__ for one in optimizers)
        raise ValueError(f"{kinds} trains no parameter that needs a gradient")
    return found
