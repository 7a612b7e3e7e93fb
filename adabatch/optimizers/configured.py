"""The configured values of optimizers, kept beside those that are applied.

Values are always computed from the configured ones (``base x schedule x scale``) and never multiplied in place. The
configured values and what was applied last are kept as plain numbers in the parameter groups, under ``adabatch_*``, so
they travel with the optimizer's state dict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

KINDS = ("adam", "sgd", "muon")

# Keys in the parameter groups. What the state of a group to which nothing was applied yet belongs to is 0.
BASE = {"lr": "adabatch_base_lr", "eps": "adabatch_base_eps", "weight_decay": "adabatch_base_weight_decay"}
BASE_BETAS = ("adabatch_base_beta1", "adabatch_base_beta2")
LR = "adabatch_lr"
CARRIED = {name: f"adabatch_{name}" for name in ("step_counter", "momentum_buffer")}
# The global batch of the last step, to which the noise in the state belongs, whatever the reference batch is.
BATCH = "adabatch_batch"
# A key that users may set themselves.
KIND = "adabatch_kind"

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def kind(optimizer: torch.optim.Optimizer) -> str | None:
    """``adam`` (Adam, AdamW), ``sgd``, ``muon``, or ``None`` for an optimizer whose scaling we do not know."""
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return "adam"
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd"
    muon = getattr(torch.optim, "Muon", None)
    return "muon" if muon is not None and isinstance(optimizer, muon) else None


def each(optimizer: Optimizers) -> Sequence[torch.optim.Optimizer]:
    """One optimizer or several, as several."""
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer


def prepare(optimizer: Optimizers) -> None:
    """Take the present learning rates and the rest as the configured ones, once per parameter group.

    ``apply`` does it too. Do it right after building the optimizers when a checkpoint is to be loaded: torch's
    distributed checkpoints load only keys that are there already.

    Raises:
        ValueError: when a torch learning-rate scheduler is attached, or a group is ``differentiable``. Then nothing is
            changed.
    """
    every = each(optimizer)
    for one in every:
        for index, group in enumerate(one.param_groups):
            if LR not in group:
                _refuse_scheduler(one, index)
                _refuse_differentiable(one, index)
    for group in _groups(every):
        if LR not in group:
            group.update(_present(group), **{LR: number(group["lr"])}, **dict.fromkeys((BATCH, *CARRIED.values()), 0.0))


def bases(optimizer: Optimizers) -> list[dict[str, float]]:
    """The configured values of each parameter group, for ``rebase`` after a checkpoint was loaded over them."""
    prepare(optimizer)
    keys = (*BASE.values(), *BASE_BETAS)
    return [{key: group[key] for key in keys if key in group} for group in _groups(each(optimizer))]


def rebase(optimizer: Optimizers, configured: Sequence[Mapping[str, float]] | None = None) -> None:
    """Make other values the configured ones: those of ``bases``, or the present learning rates and the rest.

    What was applied last (the batch that the moments belong to) stays. Takes effect with the next ``apply``.

    Raises:
        ValueError: when ``configured`` has another number of parameter groups.
    """
    prepare(optimizer)
    groups = _groups(each(optimizer))
    configured = [_present(group) for group in groups] if configured is None else configured
    if len(configured) != len(groups):
        raise ValueError(f"{len(configured)} groups of configured values for an optimizer with {len(groups)}")
    for group, values in zip(groups, configured):
        group.update(values, **{LR: number(group["lr"])})


def number(lr: float | Tensor) -> float:
    """A learning rate as a number; NaN for a tensor on a device that the host would have to wait for."""
    return math.nan if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr)


def require_untouched(optimizer: torch.optim.Optimizer) -> None:
    """Check that nobody else has set a learning rate since the last ``apply``.

    Raises:
        ValueError: with both values and the ways out.
    """
    for index, group in enumerate(optimizer.param_groups):
        last, now = group[LR], number(group["lr"])
        if last != now and not (math.isnan(last) or math.isnan(now)):
            raise ValueError(
                f"the learning rate of {type(optimizer).__name__}'s parameter group {index} is {now}, but {last} was "
                f"set last: something else sets it too. {_REMEDY}, or make it the configured one with "
                f"adabatch.optimizers.rebase(optimizer)"
            )


def _groups(every: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for one in every for group in one.param_groups]


def _present(group: Mapping[str, Any]) -> dict[str, float]:
    """The group's values of now, under the keys of the configured ones."""
    values = {base: float(group[key]) for key, base in BASE.items() if key in group}
    if "betas" in group:
        values |= {base: float(beta) for base, beta in zip(BASE_BETAS, group["betas"])}
    return values


def _refuse_scheduler(optimizer: torch.optim.Optimizer, index: int) -> None:
    """A scheduler's constructor has overwritten the configured learning rate by its first value already."""
    group = optimizer.param_groups[index]
    if "initial_lr" in group:
        raise ValueError(
            f"a torch learning-rate scheduler is attached to {type(optimizer).__name__} (parameter group {index}: lr "
            f"{number(group['lr'])}, initial_lr {number(group['initial_lr'])}). {_REMEDY}"
        )


def _refuse_differentiable(optimizer: torch.optim.Optimizer, index: int) -> None:
    """Moments are carried over in place, which nothing can be differentiated through."""
    if optimizer.param_groups[index].get("differentiable"):
        raise ValueError(
            f"parameter group {index} of {type(optimizer).__name__} is differentiable=True, but its state is changed "
            f"in place when the batch changes, and no gradient can pass through that; use differentiable=False"
        )


_REMEDY = (
    "Hand the schedule to the controller, which counts in samples (a torch scheduler as adabatch.optimizers.TorchSchedule)"
)
