"""From a configuration to the parts of a run: here and in ``launching`` alone, configuration objects are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from adabatch import data, distributed, gradients, optimizers
from adabatch.config.compose import ConfigError
from adabatch.controller import Budget, Controller
from adabatch.data.structure import cut
from adabatch.gradients import contaminants, geometry
from adabatch.ledger import Ledger
from adabatch.loop import LossFunction, Metrics, Settings, to_device
from adabatch.noise import NoiseEstimator
from adabatch.plan import BatchLimits, split
from adabatch.policies import (
    POLICIES,
    Curve,
    Damping,
    Facts,
    Fixed,
    Observe,
    Policy,
    Replay,
    Stages,
    StepPrice,
    TargetEfficiency,
    WallClock,
)
from adabatch.progress import Progress, parse_count
from adabatch.scaling import DEFAULT_RULES, Scaling
from adabatch.schedules import Schedule


@dataclass(frozen=True, slots=True)
class Task:
    """What a recipe supplies.

    Args:
        model: the module, on the CPU and unwrapped.
        train_data: map-style data set of training samples.
        held_out: map-style data set of held-out samples.
        loss: mean loss of a micro-batch and its weight.
        metrics: held-out metrics as sums and counts.
        tokens_per_sample: where samples have a fixed number of tokens.
    """

    model: nn.Module
    train_data: Any
    held_out: Any
    loss: LossFunction
    metrics: Metrics
    tokens_per_sample: int | None = None


class Assembly:
    """The parts of a run, built from its configuration."""

    def __init__(self, config: DictConfig, task: Task, world: distributed.World) -> None:
        self.config, self.task, self.world = config, task, world
        self.limits = build_limits(config, world.size, task.model)
        self.budget = build_budget(config)
        self.policy = build_policy(config, self.budget)
        self.schedule = build_schedule(config, self.budget)
        self.settings = build_settings(config)
        self.calibration = config.policy.get("calibration", 1.0)
        self.plain_model = task.model.to(world.device)
        self.model = wrap(self.plain_model, config, world)
        self.optimizer = build_optimizer(config, self.plain_model)  # sharding has made the parameters anew
        optimizers.prepare(self.optimizer)
        self.reference_batch = config.scaling.reference_batch or self._first_batch()
        config.scaling.reference_batch = self.reference_batch
        self.scaling = build_scaling(config, self.optimizer, self.reference_batch)
        measured = build_views(config, self.model, self.optimizer)
        self.noise = build_noise(config, self.budget, task, measured.names)
        self.controller = Controller(
            self.policy,
            limits=self.limits,
            start_batch=config.limits.start_batch,
            noise=self.noise,
            scaling=self.scaling,
            schedule=self.schedule,
            damping=build_damping(config, self.reference_batch),
            budget=self.budget,
            tokens_per_sample=task.tokens_per_sample,
            decide_every=config.noise.decide_every,
            measure_every=config.noise.measure_every,
            max_skipped=config.max_skipped,
            agree=distributed.agree,
        )
        self.tap = gradients.attach(
            self.model,
            self.optimizer,
            kind=config.noise.tap,
            rulers=measured.rulers,
            examples=measured.examples,
            sync=config.parallelism.get("sync"),
        )

    def describe(self) -> str:
        """What the run is made of, and its next step."""
        parameters = sum(p.numel() for p in self.plain_model.parameters() if p.requires_grad)
        return (
            f"{parameters:,} trainable parameters, {len(self.task.train_data):,} training samples; "
            f"policy {self.policy.name}, scaling {self.scaling.rule}, reference batch {self.reference_batch}; "
            f"{self._next_step()}"
        )

    def _next_step(self) -> str:
        if self.controller.done:
            return "no step left within stop.samples or stop.tokens"
        plan = self.controller.plan()
        return (
            f"step {plan.step:,} with a global batch of {plan.global_batch} = {plan.world} ranks x "
            f"{plan.micro_batches} micro-batches of at most {plan.micro_batch}"
        )

    def _first_batch(self) -> int:
        wanted = self.policy.value(self.policy.init(), Facts(Progress(), batch=0))
        if wanted is not None:
            return int(wanted.batch)
        return self.limits.require(self.config.limits.start_batch, "limits.start_batch")


def build_limits(config: DictConfig, world: int, model: nn.Module) -> BatchLimits:
    """The limits; batch normalisation needs whole micro-batches, whose statistics the model is trained with."""
    limits = config.limits
    normalised = contaminants.batch_normalised(model)
    if limits.rounding == "auto":
        limits.rounding = "whole" if normalised else "micro_batch"
    if normalised and limits.rounding != "whole":
        raise ConfigError(
            f"limits.rounding={limits.rounding} lets micro-batches differ in size, and {normalised[0]} normalises by "
            f"each one's statistics, so the gradient would depend on the split; use limits.rounding=whole"
        )
    return BatchLimits(world, limits.micro_batch, limits.min_batch, limits.max_batch, limits.rounding)


def require_mean(config: DictConfig, task: Task, world: distributed.World) -> None:
    """Look at one micro-batch, when noise is measured: is the loss a mean over independent samples?

    Raises:
        ConfigError: when it is not.
    """
    if not (config.noise.enabled and config.noise.require_mean):
        return
    half = min(config.limits.micro_batch, len(task.train_data)) // 2
    if half == 0:
        return
    limits = BatchLimits(1, 2 * half)
    plan = split(step=0, first_sample=0, global_batch=2 * half, limits=limits, measure=False)
    with data.stream(task.train_data, seed=config.order_seed, rank=0, world=1, micro_batch=2 * half) as samples:
        whole = to_device(next(iter(samples.take(plan))).data, world.device)
    halves = [cut(whole, 0, half), cut(whole, half, 2 * half)]
    try:
        contaminants.require_mean(task.model.to(world.device), task.loss, halves, whole)
    except contaminants.NotAMean as error:
        raise ConfigError(str(error)) from error


def build_policy(config: DictConfig, budget: Budget) -> Policy:
    """The policy by its registered name."""
    policy = config.policy
    builders: dict[str, Callable[[], Policy]] = {
        "target_efficiency": lambda: _target_efficiency(policy, budget),
        "wall_clock": lambda: WallClock(policy.calibration),
        "step_price": lambda: StepPrice(policy.price, policy.calibration),
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


def build_budget(config: DictConfig) -> Budget:
    budget = Budget(_count(config.stop.samples, "stop.samples"), _count(config.stop.tokens, "stop.tokens"))
    if budget == Budget() and config.stop.seconds is None and config.stop.loss is None:
        raise ConfigError("the run would never end: set stop.samples, stop.tokens, stop.seconds or stop.loss")
    return budget


def build_schedule(config: DictConfig, budget: Budget) -> Schedule:
    schedule = config.lr_schedule
    horizon = _count(schedule.horizon, "lr_schedule.horizon") or budget.samples or budget.tokens
    return Schedule(
        shape=schedule.shape,
        horizon=horizon,
        warmup=_warmup(schedule.warmup, horizon),
        final=schedule.final,
        decay_share=schedule.decay_share,
        unit="tokens" if budget.samples is None and budget.tokens is not None else "samples",
    )


@dataclass(frozen=True, slots=True)
class Views:
    """The lengths in which gradients are measured.

    Args:
        names: of all; decisions go by the first.
        rulers: what measures those beside the Euclidean one.
        examples: whether single examples are measured.
    """

    names: tuple[str, ...]
    rulers: tuple[gradients.Instrument, ...]
    examples: bool


def build_views(config: DictConfig, model: nn.Module, optimizer: torch.optim.Optimizer) -> Views:
    """The configured geometry first, then the Euclidean one, which costs nothing, and what was asked for beside."""
    noise = config.noise
    if not noise.enabled:
        return Views(("euclidean",), (), False)
    layout = gradients.survey(model)
    first = geometry.suggested(optimizer, layout) if noise.geometry == "auto" else noise.geometry
    wanted = dict.fromkeys((first, *noise.views))
    rulers = geometry.rulers_for(
        [name for name in wanted if name not in ("euclidean", "norm_layers")], optimizer, layout
    )
    measured = [name for ruler in rulers for name in ruler.names]
    examples = "norm_layers" in wanted
    names = dict.fromkeys((first, "euclidean", *measured, *(("norm_layers",) if examples else ())))
    return Views(tuple(names), rulers, examples)


def build_noise(config: DictConfig, budget: Budget, task: Task, views: tuple[str, ...]) -> list[NoiseEstimator] | None:
    """An estimator for each view; their memory is capped by the budget in samples where there is one."""
    noise = config.noise
    if not noise.enabled:
        return None
    horizon = budget.samples
    if horizon is None and budget.tokens is not None and task.tokens_per_sample:
        horizon = math.ceil(budget.tokens / task.tokens_per_sample)
    return [
        NoiseEstimator(
            relative_error=noise.relative_error,
            confidence=noise.confidence,
            horizon=horizon,
            dataset_size=len(task.train_data) if noise.finite_data else None,
            geometry=view,
        )
        for view in views
    ]


def build_settings(config: DictConfig) -> Settings:
    return Settings(
        log_every=config.logger.every,
        evaluate_every=_count(config.evaluation.every, "evaluation.every"),
        save_every=_count(config.checkpoint.every, "checkpoint.every"),
        max_seconds=config.stop.seconds,
        target_loss=config.stop.loss,
        clip_norm=config.clip_norm,
        precision=config.precision,
    )


def build_damping(config: DictConfig, reference_batch: int) -> Damping:
    """The gates; an unset dwell is the memory of the optimizer's slowest average, in samples."""
    damping = config.damping
    optimizer = config.optimizer
    slowest = optimizer.beta2 if optimizer.name == "adamw" else optimizer.momentum
    dwell = damping.dwell if damping.dwell is not None else math.ceil(reference_batch / (1 - slowest))
    return Damping(
        dwell=dwell,
        warmup_guard=damping.warmup_guard,
        monotone=damping.monotone,
        interval_gate=damping.interval_gate,
        growth=damping.growth,
        dead_band=damping.dead_band,
    )


def build_scaling(config: DictConfig, optimizer: torch.optim.Optimizer, reference_batch: int) -> Scaling:
    scaling = config.scaling
    kind = optimizers.kind(optimizer)
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


def build_optimizer(config: DictConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer by name; matrices decay, vectors and scalars do not."""
    optimizer = config.optimizer
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer.name == "sgd":
        if optimizer.nesterov and not optimizer.momentum:
            raise ConfigError("optimizer.nesterov=true needs an optimizer.momentum above 0")
        return torch.optim.SGD(
            trainable,
            lr=optimizer.lr,
            momentum=optimizer.momentum,
            nesterov=optimizer.nesterov,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        fused=True,
    )


def wrap(model: nn.Module, config: DictConfig, world: distributed.World) -> nn.Module:
    """Compile and spread the model as configured."""
    if world.size > 1 and config.parallelism.name == "fsdp":
        model = shard(model, world, config.parallelism.replicas)
    if config.compile:
        model = torch.compile(model)
    if world.size == 1 or config.parallelism.name == "fsdp":
        return model
    devices = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def shard(model: nn.Module, world: distributed.World, replicas: int) -> nn.Module:
    """FSDP2 over the ranks, in place: every block of a list of blocks by itself, then what is left.

    Raises:
        ConfigError: when the ranks cannot be divided into that many replicas.
    """
    if world.size % replicas:
        raise ConfigError(f"parallelism.replicas={replicas} is no divisor of {world.size} ranks")
    if replicas == 1:
        mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    else:
        sizes = (replicas, world.size // replicas)
        mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=("replicate", "shard"))
    blocks = (child for parent in model.modules() if isinstance(parent, nn.ModuleList) for child in parent.children())
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _warmup(text: str, horizon: int | None) -> int:
    """A count, or a share of the horizon."""
    if not text.endswith("%"):
        return _count(text, "lr_schedule.warmup") or 0
    if horizon is None:
        raise ConfigError(
            f"lr_schedule.warmup={text} is a share of a horizon, and none is known: set stop.samples, stop.tokens or "
            f"lr_schedule.horizon, or give the warm-up as a count"
        )
    return round(float(text[:-1]) / 100 * horizon)


def _count(text: str | None, name: str) -> int | None:
    try:
        return None if text is None else parse_count(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
