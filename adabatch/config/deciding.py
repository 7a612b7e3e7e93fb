"""From a configuration to the parts that decide: budget, schedule, policy, damping, scaling. None needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable

from omegaconf import DictConfig

from adabatch.config.compose import ConfigError
from adabatch.ledger import Ledger
from adabatch.plan import BatchLimits
from adabatch.policies import (
    POLICIES,
    Cabs,
    CosineTest,
    Curve,
    Damping,
    Facts,
    Fixed,
    InnerProductTest,
    LateSwitch,
    LossLaw,
    NormTest,
    Observe,
    Policy,
    Ramp,
    Replay,
    Seesaw,
    Stages,
    StepPrice,
    TargetEfficiency,
    WallClock,
)
from adabatch.progress import Budget, Progress, parse_count
from adabatch.scaling import DEFAULT_RULES, Scaling
from adabatch.schedules import Schedule


def build_policy(config: DictConfig, budget: Budget) -> Policy:
    """The policy by its registered name."""
    policy = config.policy
    builders: dict[str, Callable[[], Policy]] = {
        "target_efficiency": lambda: _target_efficiency(policy, budget),
        "wall_clock": lambda: WallClock(policy.calibration),
        "step_price": lambda: StepPrice(policy.price, policy.calibration),
        "norm_test": lambda: NormTest(policy.tolerance),
        "inner_product_test": lambda: InnerProductTest(policy.tolerance),
        "cosine_test": lambda: CosineTest(policy.similarity),
        "cabs": lambda: _cabs(config, budget),
        "loss_law": lambda: LossLaw(policy.reference_batch, policy.reference_loss, policy.exponent),
        "ramp": lambda: _ramp(policy),
        "seesaw": lambda: Seesaw(policy.first_batch, build_schedule(config, budget), policy.cap, policy.factor),
        "late_switch": lambda: _late_switch(policy, budget),
        "fixed": lambda: Fixed(policy.global_batch),
        "observe": lambda: Observe(),
        "stages": lambda: Stages.parse(policy.stages, policy.unit),
        "replay": lambda: Replay(Ledger.load(policy.ledger)),
    }
    assert set(builders) == set(POLICIES), "every registered policy can be configured"
    try:
        return builders[policy.name]()
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy={policy.name}: {error}") from error


def _target_efficiency(policy: DictConfig, budget: Budget) -> TargetEfficiency:
    curve = Curve.from_ledger(Ledger.load(policy.forecast), policy.calibration) if policy.forecast else None
    return TargetEfficiency(
        policy.target_efficiency,
        policy.calibration,
        policy.repay,
        allocation=policy.allocation,
        cap=policy.cap,
        horizon=budget.samples,
        curve=curve,
    )


def _cabs(config: DictConfig, budget: Budget) -> Cabs:
    if config.scaling.rule != "none":
        raise ConfigError(
            f"policy=cabs: it chooses the batch by the learning rate, and scaling.rule={config.scaling.rule} moves the "
            f"learning rate with the batch; set scaling=none"
        )
    return Cabs(config.optimizer.lr, build_schedule(config, budget))


def _ramp(policy: DictConfig) -> Ramp:
    length = parse_count(policy.length)
    return Ramp(policy.first_batch, policy.final_batch, policy.increment, length, policy.unit)


def _late_switch(policy: DictConfig, budget: Budget) -> LateSwitch:
    horizon = budget.samples if policy.unit == "samples" else budget.tokens
    at = _count_or_share(policy.at, horizon, "policy.at", f"stop.{policy.unit}")
    return LateSwitch(policy.first_batch, policy.final_batch, at, policy.unit)


def first_batch(policy: Policy, limits: BatchLimits, start_batch: int | None) -> int:
    """The batch that a run begins with: the policy's own where it names one before anything is measured."""
    wanted = policy.value(policy.init(), Facts(Progress(), batch=0))
    return int(wanted.batch) if wanted is not None else limits.require(start_batch, "limits.start_batch")


def build_budget(config: DictConfig) -> Budget:
    budget = Budget(build_count(config.stop.samples, "stop.samples"), build_count(config.stop.tokens, "stop.tokens"))
    if budget == Budget() and config.stop.seconds is None and config.stop.loss is None:
        raise ConfigError("the run would never end: set stop.samples, stop.tokens, stop.seconds or stop.loss")
    return budget


def build_schedule(config: DictConfig, budget: Budget) -> Schedule:
    schedule = config.lr_schedule
    horizon = build_count(schedule.horizon, "lr_schedule.horizon") or budget.samples or budget.tokens
    return Schedule(
        shape=schedule.shape,
        horizon=horizon,
        warmup=_count_or_share(
            schedule.warmup, horizon, "lr_schedule.warmup", "stop.samples, stop.tokens or lr_schedule.horizon"
        ),
        final=schedule.final,
        decay_share=schedule.decay_share,
        unit="tokens" if budget.samples is None and budget.tokens is not None else "samples",
    )


def build_damping(config: DictConfig, reference_batch: int) -> Damping:
    """The gates; an unset dwell is the memory of the optimizer's slowest average, in samples."""
    damping = config.damping
    optimizer = config.optimizer
    slowest = optimizer.momentum if optimizer.name == "sgd" else optimizer.get("adamw", optimizer).beta2
    dwell = damping.dwell if damping.dwell is not None else math.ceil(reference_batch / (1 - slowest))
    return Damping(
        dwell=dwell,
        warmup_guard=damping.warmup_guard,
        monotone=damping.monotone,
        interval_gate=damping.interval_gate,
        growth=damping.growth,
        dead_band=damping.dead_band,
        rollback=damping.rollback,
    )


def build_scaling(config: DictConfig, kind: str, reference_batch: int) -> Scaling:
    """The rule, by default that of the kind of optimizer; betas and epsilon are Adam's alone."""
    scaling = config.scaling
    rule = DEFAULT_RULES[kind] if scaling.rule == "auto" else scaling.rule
    adam = kind == "adam"
    return Scaling(
        rule=rule,
        reference_batch=reference_batch,
        exponent=scaling.exponent,
        beta1=scaling.beta1 and adam,
        beta2=scaling.beta2 and adam,
        eps=scaling.eps and adam,
        weight_decay=scaling.weight_decay,
        clip=scaling.clip,
    )


def _count_or_share(text: str, horizon: int | None, name: str, known_by: str) -> int:
    """A count, or a share of the horizon; ``known_by`` are the settings that would tell it."""
    if not text.endswith("%"):
        return build_count(text, name) or 0
    if horizon is None:
        raise ConfigError(
            f"{name}={text} is a share of a horizon, and none is known: set {known_by}, or give it as a count"
        )
    return round(float(text[:-1]) / 100 * horizon)


def build_count(text: str | None, name: str) -> int | None:
    """A count as it is configured, such as 1.5k; ``name`` is that of the setting."""
    try:
        return None if text is None else parse_count(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
