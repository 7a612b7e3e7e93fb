"""Applies a plan's scales to real optimizers: learning rates, betas, epsilon, weight decay, moments, step counters.

Values are always computed from the configured ones (``base x schedule x scale``) and never multiplied in place. The
configured values and what was applied last are kept as plain numbers in the parameter groups, under ``adabatch_*``, so
they travel with the optimizer's state dict. When the batch changes, Adam's state is carried over:

- step counter t -> t / (new exponent of beta2 / old one), so that beta2 ** t, the bias correction, is unchanged; the
  first moment is multiplied by the change of its own correction 1 - beta1 ** t, so that m_hat is unchanged, too;
- when the batch falls to a share r, v_hat -> m_hat^2 + max(v_hat - m_hat^2, 0) / r: the noise part of the second moment
  grows at once, where otherwise the learning rate would be too high for 1/(1 - beta2) steps.

The momentum of SGD and Muon stays: it is no average, and shortening it would lower the learning rate with it. So does
beta1 unless the scales say otherwise (see ``adabatch.scaling``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adabatch.plan import BatchPlan, Scales

KINDS = ("adam", "sgd", "muon")

# Keys in the parameter groups. The kappa of a group to which nothing was applied yet is 0.
_BASE = {"lr": "adabatch_base_lr", "eps": "adabatch_base_eps", "weight_decay": "adabatch_base_weight_decay"}
_BASE_BETAS = ("adabatch_base_beta1", "adabatch_base_beta2")
_LR, _KAPPA, _EXPONENT, _MOVED = "adabatch_lr", "adabatch_kappa", "adabatch_beta2_exponent", "adabatch_moved"

# Betas stay below 1, which they must not reach by rounding.
_LARGEST_BETA = math.nextafter(1.0, 0.0)

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def kind(optimizer: torch.optim.Optimizer) -> str | None:
    """``adam`` (Adam, AdamW), ``sgd``, ``muon``, or ``None`` for an optimizer whose scaling we do not know."""
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return "adam"
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd"
    muon = getattr(torch.optim, "Muon", None)
    return "muon" if muon is not None and isinstance(optimizer, muon) else None


def prepare(optimizer: Optimizers) -> None:
    """Take the present learning rates and the rest as the configured ones, once per parameter group.

    ``apply`` does it too. Do it right after building the optimizer when a checkpoint is to be loaded: torch's
    distributed checkpoints load only keys that are there already.

    Raises:
        ValueError: when a torch learning-rate scheduler is attached.
    """
    for one in _each(optimizer):
        for index, group in enumerate(one.param_groups):
            if _LR not in group:
                _refuse_scheduler(one, index)
                group.update(_present(group), **{_LR: _number(group["lr"]), _KAPPA: 0.0, _EXPONENT: 1.0, _MOVED: 0.0})


def bases(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """The configured values of each parameter group, for ``rebase`` after a checkpoint was loaded over them."""
    prepare(optimizer)
    keys = (*_BASE.values(), *_BASE_BETAS)
    return [{key: group[key] for key in keys if key in group} for group in optimizer.param_groups]


def rebase(optimizer: torch.optim.Optimizer, configured: Sequence[Mapping[str, float]] | None = None) -> None:
    """Make other values the configured ones: those of ``bases``, or the present learning rates and the rest.

    What was applied last (the batch that the moments belong to) stays. Takes effect with the next ``apply``.

    Raises:
        ValueError: when ``configured`` has another number of parameter groups.
    """
    prepare(optimizer)
    groups = optimizer.param_groups
    configured = [_present(group) for group in groups] if configured is None else configured
    if len(configured) != len(groups):
        raise ValueError(f"{len(configured)} groups of configured values for an optimizer with {len(groups)}")
    for group, values in zip(groups, configured):
        group.update(values, **{_LR: _number(group["lr"])})


@torch.no_grad()
def apply(plan: BatchPlan, optimizer: Optimizers, *, assume: str | None = None) -> None:
    """Bring the optimizer to where ``plan`` wants it. Applying the same plan again changes nothing.

    Args:
        plan: its ``schedule`` and ``scales`` are applied.
        optimizer: one optimizer or several.
        assume: how to treat an optimizer that we do not know: like ``adam``, ``sgd`` or ``muon``.

    Raises:
        ValueError: when something else has set a learning rate since the last time, when an unknown optimizer would
            have to be scaled, or for scales that are not above 0 and finite. Then nothing is changed.
    """
    _require_legal(plan)
    if assume is not None and assume not in KINDS:
        raise ValueError(f"assume must be one of {', '.join(KINDS)}, got {assume!r}")
    prepare(optimizer)
    every = _each(optimizer)
    kinds = [kind(one) or assume or _observed(one, plan.scales) for one in every]
    for one in every:
        _require_untouched(one)
    for one, treated_as in zip(every, kinds):
        for group in one.param_groups:
            if treated_as == "adam":
                _carry_moments(one, group, plan.scales)
            _set_values(group, plan, treated_as)


# -- values


def _set_values(group: dict[str, Any], plan: BatchPlan, treated_as: str) -> None:
    scales = plan.scales
    _put(group, "lr", group[_BASE["lr"]] * plan.schedule * scales.lr)
    # Weight decay is kept per sample where it acts as a decay, at the rate lr x weight_decay; not as Adam's L2 term.
    if _BASE["weight_decay"] in group and (treated_as != "adam" or group.get("decoupled_weight_decay", True)):
        _put(group, "weight_decay", group[_BASE["weight_decay"]] * scales.weight_decay)
    if treated_as == "adam":
        _put(group, "eps", group[_BASE["eps"]] * scales.eps)
        _put_betas(group, (scales.beta1_exponent, scales.beta2_exponent))
    group.update({_LR: _number(group["lr"]), _KAPPA: scales.kappa, _EXPONENT: scales.beta2_exponent})
    group[_MOVED] = float(_moves(scales))


def _put(group: dict[str, Any], key: str, value: float) -> None:
    """Set a value; a tensor is filled and stays the same object."""
    if isinstance(group[key], Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def _put_betas(group: dict[str, Any], exponents: tuple[float, float]) -> None:
    betas = [min(group[key] ** exponent, _LARGEST_BETA) for key, exponent in zip(_BASE_BETAS, exponents)]
    if any(isinstance(beta, Tensor) for beta in group["betas"]):
        for tensor, beta in zip(group["betas"], betas):
            tensor.fill_(beta)
    else:
        group["betas"] = tuple(betas)


def _present(group: Mapping[str, Any]) -> dict[str, float]:
    """The group's values of now, under the keys of the configured ones."""
    values = {base: float(group[key]) for key, base in _BASE.items() if key in group}
    if "betas" in group:
        values |= {base: float(beta) for base, beta in zip(_BASE_BETAS, group["betas"])}
    return values


def _number(lr: float | Tensor) -> float:
    """A learning rate as a number; NaN for a tensor on a device that the host would have to wait for."""
    return math.nan if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr)


# -- Adam's state


def _carry_moments(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], scales: Scales) -> None:
    """Make Adam's state fit the new batch and betas; called while the group still holds the old ones."""
    if group[_KAPPA] == 0:
        return
    states = [state for parameter in group["params"] if (state := optimizer.state.get(parameter)) and "step" in state]
    share = scales.kappa / group[_KAPPA]
    if share < 1 and (group[_MOVED] or _moves(scales)):
        for state in states:
            _raise_noise(state, share, *(float(beta) for beta in group["betas"]))
    ratio = scales.beta2_exponent / group[_EXPONENT]
    if ratio == 1:
        return
    beta1 = float(group["betas"][0])
    new_beta1 = min(group[_BASE_BETAS[0]] ** scales.beta1_exponent, _LARGEST_BETA)
    for state in states:
        _recount(state, ratio, beta1, new_beta1)


def _recount(state: Mapping[str, Any], ratio: float, beta1: float, new_beta1: float) -> None:
    """Divide the step counter by ``ratio``, and make up for it in the first moment: m_hat stays as it is."""
    correction = 1 - beta1 ** state["step"].double()
    state["step"].div_(ratio)
    factor = (1 - new_beta1 ** state["step"].double()) / correction
    # Before the first step there is no moment to correct.
    state["exp_avg"].mul_(torch.where(correction > 0, factor, 1.0).to(state["exp_avg"].device))


def _raise_noise(state: Mapping[str, Any], share: float, beta1: float, beta2: float) -> None:
    """Divide the noise part of the second moment by ``share``. Without bias corrections, with t steps:

    v -> f + max(v - f, 0) / share, where f = m^2 (1 - beta2^t) / (1 - beta1^t)^2 is m_hat^2 in v's scale.
    """
    steps = state["step"].to(state["exp_avg"].device, torch.float64)
    corrected = (1 - beta2**steps) / (1 - beta1**steps).square()
    # Before the first step both moments are 0, and so stays v.
    corrected = torch.where(steps > 0, corrected, 0.0)
    m, v = _real(state["exp_avg"]), _real(state["exp_avg_sq"])
    floor = m.square() * corrected
    v.copy_(floor + (v - floor).clamp_(min=0) / share)
    if "max_exp_avg_sq" in state:
        largest = _real(state["max_exp_avg_sq"])
        largest.copy_(torch.maximum(largest, v))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# -- checks


def _each(optimizer: Optimizers) -> Sequence[torch.optim.Optimizer]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer


def _moves(scales: Scales) -> bool:
    """Whether the scales move anything in an optimizer."""
    return any(
        scale != 1
        for scale in (scales.lr, scales.beta1_exponent, scales.beta2_exponent, scales.eps, scales.weight_decay)
    )


def _observed(optimizer: torch.optim.Optimizer, scales: Scales) -> str:
    """The treatment of an optimizer that we do not know: only the schedule acts on its learning rate."""
    if _moves(scales):
        raise ValueError(
            f"how {type(optimizer).__name__} should follow the batch is not known, but the plan's scales are {scales}; "
            f"use scaling=none, or say what it is like with apply(..., assume=...): one of {', '.join(KINDS)}"
        )
    return "observed"


def _require_legal(plan: BatchPlan) -> None:
    scales = plan.scales
    for name in ("kappa", "lr", "beta1_exponent", "beta2_exponent", "eps", "weight_decay"):
        value = getattr(scales, name)
        if not 0 < value < math.inf:
            raise ValueError(f"the plan's scale {name}={value} must be above 0 and finite")
    if not 0 <= plan.schedule < math.inf:
        raise ValueError(f"the plan's learning-rate schedule is {plan.schedule}; it must be 0 or more and finite")


def _require_untouched(optimizer: torch.optim.Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups):
        last, now = group[_LR], _number(group["lr"])
        if last != now and not (math.isnan(last) or math.isnan(now)):
            raise ValueError(
                f"the learning rate of {type(optimizer).__name__}'s parameter group {index} is {now}, but {last} was "
                f"set last: something else sets it too. {_REMEDY}, or make it the configured one with "
                f"adabatch.optimizers.rebase(optimizer)"
            )


def _refuse_scheduler(optimizer: torch.optim.Optimizer, index: int) -> None:
    """A scheduler's constructor has overwritten the configured learning rate by its first value already."""
    group = optimizer.param_groups[index]
    if "initial_lr" in group:
        raise ValueError(
            f"a torch learning-rate scheduler is attached to {type(optimizer).__name__} (parameter group {index}: lr "
            f"{_number(group['lr'])}, initial_lr {_number(group['initial_lr'])}). {_REMEDY}"
        )


_REMEDY = (
    "Hand the schedule to the controller, which counts in samples (a torch scheduler as adabatch.optimizers.TorchSchedule)"
)


# -- torch's own schedulers


class TorchSchedule:
    """A torch learning-rate scheduler, read as a function of samples for ``Controller(schedule=...)``.

    The scheduler runs on a shadow optimizer with learning rate 1 and no parameters of the model, one tick for each
    reference batch of samples; its learning rate is the multiplier. So it means the same at every batch, and a resumed
    run needs nothing of it.

    Args:
        make: builds the scheduler for an optimizer, such as ``lambda optimizer: CosineAnnealingLR(optimizer, 1000)``.
        reference_batch: samples of one tick.
        warmup: samples during which the batch must not grow; the scheduler itself does not say.

    Raises:
        ValueError: for a scheduler that follows a metric, or a reference batch below 1.
    """

    unit = "samples"

    def __init__(
        self,
        make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
        *,
        reference_batch: int,
        warmup: int = 0,
    ) -> None:
        if reference_batch < 1:
            raise ValueError(f"reference_batch must be at least 1, got {reference_batch}")
        self.warmup = warmup
        self._reference_batch = reference_batch
        self._optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=1.0)
        self._scheduler = make(self._optimizer)
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau follows a metric and is no function of samples; use another scheduler")
        self._values = [self._rate()]

    def value(self, position: float) -> float:
        """The multiplier at ``position`` samples: the scheduler's value after ``position // reference_batch`` ticks."""
        tick = int(position // self._reference_batch)
        while len(self._values) <= tick:
            self._optimizer.step()  # of nothing; torch warns when a scheduler steps before its optimizer
            self._scheduler.step()
            self._values.append(self._rate())
        return self._values[tick]

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])
