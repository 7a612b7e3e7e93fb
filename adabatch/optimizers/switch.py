"""Brings optimizers to a plan's scales in one transaction: everything is worked out and checked before the first change.

The momentum factor of SGD and Muon stays: what it adds up is no average, and shortening it would lower the learning
rate with it. So does beta1 unless the scales say otherwise (see ``adabatch.scaling``). What becomes of the optimizer's
state: ``optimizers.state``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adabatch.optimizers import state
from adabatch.optimizers.configured import (
    BASE,
    BASE_BETAS,
    BATCH,
    CARRIED,
    KIND,
    KINDS,
    LR,
    Optimizers,
    each,
    kind,
    number,
    prepare,
    require_untouched,
)
from adabatch.plan import BatchPlan, Scales


@dataclass(frozen=True, slots=True)
class _Change:
    """What becomes of one parameter group."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    batch: int
    scales: Scales
    treated_as: str
    values: dict[str, float]
    betas: tuple[float, float] | None


@torch.no_grad()
def apply(plan: BatchPlan, optimizer: Optimizers, *, assume: str | None = None) -> None:
    """Bring the optimizers to where ``plan`` wants them. Applying the same plan again changes nothing.

    A parameter group may carry ``adabatch_kind``: one of ``KINDS`` says how it is treated, where an optimizer holds
    groups of several kinds; any name of ``plan.by_kind`` gives it those scales.

    Args:
        plan: its ``schedule`` and scales are applied: ``plan.by_kind`` where it knows a group's or an optimizer's kind,
            otherwise ``plan.scales``.
        optimizer: one optimizer or several.
        assume: how to treat an optimizer that we do not know: like ``adam``, ``sgd`` or ``muon``.

    Raises:
        ValueError: when something else has set a learning rate since the last time, when an unknown optimizer would
            have to be scaled or lacks what its kind needs, or for scales and values that are not legal. Then no value
            of any optimizer is changed.
    """
    _require_legal(plan)
    if assume is not None and assume not in KINDS:
        raise ValueError(f"assume must be one of {', '.join(KINDS)}, got {assume!r}")
    prepare(optimizer)
    every = each(optimizer)
    for one in every:
        require_untouched(one)
    changes = [_change(plan, one, index, assume) for one in every for index in range(len(one.param_groups))]
    for change in changes:
        _carry_out(change)


def _change(plan: BatchPlan, optimizer: torch.optim.Optimizer, index: int, assume: str | None) -> _Change:
    group = optimizer.param_groups[index]
    name, treated_as = _kind_of(plan, optimizer, index, assume)
    scales = plan.by_kind.get(name, plan.scales)
    values = {"lr": group[BASE["lr"]] * plan.schedule * scales.lr}
    # Weight decay is kept per sample where it acts as a decay, at the rate lr x weight_decay; not as Adam's L2 term.
    if BASE["weight_decay"] in group and (treated_as != "adam" or group.get("decoupled_weight_decay", True)):
        values["weight_decay"] = group[BASE["weight_decay"]] * scales.weight_decay
    betas = None
    if treated_as == "adam":
        _require_adam(optimizer, index)
        values["eps"] = group[BASE["eps"]] * scales.eps
        betas = _betas(group, (scales.beta1_exponent, scales.beta2_exponent))
    for key, value in values.items():
        _require_value(optimizer, index, key, value)
    return _Change(optimizer, group, plan.global_batch, scales, treated_as, values, betas)


def _carry_out(change: _Change) -> None:
    group, scales = change.group, change.scales
    ratios = {name: getattr(scales, name) / group[key] for name, key in CARRIED.items() if group[key]}
    if group[BATCH]:
        ratios["second_moment"] = (change.batch / group[BATCH]) ** scales.second_moment
    if change.treated_as == "sgd":
        state.carry_buffers(change.optimizer, group, ratios)
    if change.betas is not None:
        state.carry_moments(change.optimizer, group, ratios, change.betas[0])
        _put_betas(group, change.betas)
    for key, value in change.values.items():
        _put(group, key, value)
    carried = {key: getattr(scales, name) for name, key in CARRIED.items()}
    group.update({LR: number(group["lr"]), BATCH: float(change.batch)} | carried)


def _put(group: dict[str, Any], key: str, value: float) -> None:
    """Set a value; a tensor is filled and stays the same object."""
    if isinstance(group[key], Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def _put_betas(group: dict[str, Any], betas: tuple[float, float]) -> None:
    if any(isinstance(beta, Tensor) for beta in group["betas"]):
        for tensor, beta in zip(group["betas"], betas):
            tensor.fill_(beta)
    else:
        group["betas"] = betas


def _betas(group: Mapping[str, Any], exponents: tuple[float, float]) -> tuple[float, float]:
    """Both betas; they stay below 1, which they must not reach by rounding."""
    one, two = (
        min(group[key] ** exponent, _largest_beta(beta))
        for key, exponent, beta in zip(BASE_BETAS, exponents, group["betas"])
    )
    return one, two


def _largest_beta(beta: float | Tensor) -> float:
    """The largest number below 1 of a beta's type."""
    return 1 - torch.finfo(beta.dtype if isinstance(beta, Tensor) else torch.float64).eps / 2


# -- checks


def _kind_of(
    plan: BatchPlan, optimizer: torch.optim.Optimizer, index: int, assume: str | None
) -> tuple[str, str]:
    """The name by which a group's scales are found, and how it is treated."""
    named = optimizer.param_groups[index].get(KIND)
    if named is not None and named not in plan.by_kind and named not in KINDS:
        known = ", ".join(dict.fromkeys((*KINDS, *plan.by_kind)))
        raise ValueError(
            f"parameter group {index} of {type(optimizer).__name__} has {KIND}={named!r}; the plan's scales know {known}"
        )
    treated_as = named if named in KINDS else kind(optimizer) or assume
    name = named or treated_as or ""
    if treated_as is None:
        _require_still(optimizer, plan.by_kind.get(name, plan.scales))
    return name, treated_as or "observed"


def _require_still(optimizer: torch.optim.Optimizer, scales: Scales) -> None:
    """In an optimizer that we do not know, only the schedule acts on the learning rate."""
    acting = (scales.lr, scales.beta1_exponent, scales.beta2_exponent, scales.eps, scales.weight_decay)
    if any(scale != 1 for scale in acting):
        raise ValueError(
            f"how {type(optimizer).__name__} should follow the batch is not known, but the plan's scales are {scales}; "
            f"use scaling=none, or say what it is like with apply(..., assume=...): one of {', '.join(KINDS)}"
        )


def _require_legal(plan: BatchPlan) -> None:
    for scales in (plan.scales, *plan.by_kind.values()):
        for name in Scales.__dataclass_fields__:
            value = getattr(scales, name)
            if name == "second_moment" and value not in (0, 1):
                raise ValueError(f"the plan's scale {name}={value} must be 0 or 1")
            if name != "second_moment" and not 0 < value < math.inf:
                raise ValueError(f"the plan's scale {name}={value} must be above 0 and finite")
    if not 0 <= plan.schedule < math.inf:
        raise ValueError(f"the plan's learning-rate schedule is {plan.schedule}; it must be 0 or more and finite")


def _require_adam(optimizer: torch.optim.Optimizer, index: int) -> None:
    group = optimizer.param_groups[index]
    lacking = [key for key in ("betas", "eps") if key not in group]
    lacking += [key for key in state.MOMENTS if any(key not in one for one in state.stepped(optimizer, group))]
    if lacking:
        raise ValueError(
            f"parameter group {index} of {type(optimizer).__name__} cannot be treated like Adam: it has no "
            f"{', '.join(lacking)}; choose another kind of {', '.join(KINDS)}, or scaling=none"
        )


def _require_value(optimizer: torch.optim.Optimizer, index: int, key: str, value: float) -> None:
    """A finite number in the type that it is kept in; configured values are the user's own."""
    held = optimizer.param_groups[index][key]
    largest = torch.finfo(held.dtype).max if isinstance(held, Tensor) else math.inf
    if not (math.isfinite(value) and abs(value) <= largest):
        raise ValueError(
            f"{key} of {type(optimizer).__name__}'s parameter group {index} would become {value}; bring the batch nearer "
            f"to the reference batch, or the configured value down"
        )
