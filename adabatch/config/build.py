"""From a configuration to the parts of a run: here and in ``launching`` alone, configuration objects are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from adabatch import data, distributed, gradients, optimizers
from adabatch.alignment import AlignmentEstimator
from adabatch.config.compose import ConfigError
from adabatch.config.deciding import (
    build_budget,
    build_count,
    build_damping,
    build_policy,
    build_scaling,
    build_schedule,
    first_batch,
)
from adabatch.controller import Budget, Controller
from adabatch.data.structure import cut
from adabatch.evidence import Estimator
from adabatch.gradients import aligned, contaminants, geometry
from adabatch.gradients.updates import UPDATES
from adabatch.loop import Metrics, Settings
from adabatch.noise import NoiseEstimator
from adabatch.optimizers import Optimizers
from adabatch.plan import BatchLimits, split
from adabatch.stepping import LossFunction, to_device


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
        hidden: names, as in ``fnmatch``, of the matrices inside the network, which Muon steps; ``None`` leaves the
            choice to ``optimizers.hidden_matrices``.
    """

    model: nn.Module
    train_data: Any
    held_out: Any
    loss: LossFunction
    metrics: Metrics
    tokens_per_sample: int | None = None
    hidden: tuple[str, ...] | None = None


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
        self.optimizer = build_optimizer(config, self.plain_model, task.hidden)  # sharding made parameters anew
        optimizers.prepare(self.optimizer)
        self.reference_batch = config.scaling.reference_batch or first_batch(
            self.policy, self.limits, config.limits.start_batch
        )
        config.scaling.reference_batch = self.reference_batch
        kinds = map(optimizers.kind, optimizers.each(self.optimizer))
        self.scaling = {kind: build_scaling(config, kind, self.reference_batch) for kind in kinds}
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
            align_every=config.noise.align_every,
            max_skipped=config.max_skipped,
            agree=distributed.agree,
            slowest=distributed.largest,
        )
        self.tap = gradients.attach(
            self.model,
            self.optimizer,
            kind=config.noise.tap,
            rulers=measured.rulers,
            examples=measured.examples,
            sync=config.parallelism.get("sync"),
        )
        self.aligned = gradients.AlignmentTaps(measured.aligned, self.optimizer, self.tap) if measured.aligned else None

    def describe(self) -> str:
        """What the run is made of, and its next step."""
        parameters = sum(p.numel() for p in self.plain_model.parameters() if p.requires_grad)
        return (
            f"{parameters:,} trainable parameters, {len(self.task.train_data):,} training samples; "
            f"policy {self.policy.name}, scaling {self._rules()}, reference batch {self.reference_batch}; "
            f"{self._next_step()}"
        )

    def _rules(self) -> str:
        rules = {kind: one.rule for kind, one in self.scaling.items()}
        return rules.popitem()[1] if len(rules) == 1 else ", ".join(f"{kind} {rule}" for kind, rule in rules.items())

    def _next_step(self) -> str:
        if self.controller.done:
            return "no step left within stop.samples or stop.tokens"
        plan = self.controller.plan()
        return (
            f"step {plan.step:,} with a global batch of {plan.global_batch} = {plan.world} ranks x "
            f"{plan.micro_batches} micro-batches of at most {plan.micro_batch}"
        )

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


@dataclass(frozen=True, slots=True)
class Views:
    """The lengths in which gradients are measured, and the steps whose alignments are.

    Args:
        names: of all; decisions go by the first.
        rulers: what measures lengths beside the Euclidean one.
        examples: whether single examples are measured.
        aligned: those of the names that are alignments.
    """

    names: tuple[str, ...]
    rulers: tuple[gradients.Instrument, ...]
    examples: bool
    aligned: tuple[str, ...] = ()


def build_views(config: DictConfig, model: nn.Module, optimizer: Optimizers) -> Views:
    """The configured geometry first, then the Euclidean one, which costs nothing, and what was asked for beside.

    Where decisions go by Muon's alignments, what other optimizers train has a view of its own: the preconditioned length
    of Adam's parameters, or that of each parameter group.
    """
    noise = config.noise
    if not noise.enabled:
        return Views(("euclidean",), (), False)
    layout = gradients.survey(model)
    quadratic = geometry.suggested(optimizer, layout)
    first = (aligned.suggested(optimizer, layout) or quadratic) if noise.geometry == "auto" else noise.geometry
    companions = len(optimizers.each(optimizer)) > 1 and first == "muon"
    own = ("groups" if quadratic == "euclidean" else quadratic,) if companions else ()
    wanted = dict.fromkeys((first, *own, *noise.views))
    by_alignment = tuple(name for name in wanted if name in UPDATES)
    lengths = [name for name in wanted if name not in ("euclidean", "norm_layers", *UPDATES)]
    rulers = geometry.rulers_for(lengths, optimizer, layout)
    measured = [name for ruler in rulers for name in ruler.names]
    examples = "norm_layers" in wanted
    names = dict.fromkeys((first, "euclidean", *measured, *by_alignment, *(("norm_layers",) if examples else ())))
    return Views(tuple(names), rulers, examples, by_alignment)


def build_noise(config: DictConfig, budget: Budget, task: Task, views: tuple[str, ...]) -> list[Estimator] | None:
    """An estimator for each view; their memory is capped by the budget in samples where there is one."""
    noise = config.noise
    if not noise.enabled:
        return None
    horizon = budget.samples
    if horizon is None and budget.tokens is not None and task.tokens_per_sample:
        horizon = math.ceil(budget.tokens / task.tokens_per_sample)
    common = {
        "confidence": noise.confidence,
        "horizon": horizon,
        "dataset_size": len(task.train_data) if noise.finite_data else None,
    }
    return [
        AlignmentEstimator(geometry=view, **common)
        if view in UPDATES
        else NoiseEstimator(geometry=view, relative_error=noise.relative_error, **common)
        for view in views
    ]


def build_settings(config: DictConfig) -> Settings:
    return Settings(
        log_every=config.logger.every,
        evaluate_every=build_count(config.evaluation.every, "evaluation.every"),
        save_every=build_count(config.checkpoint.every, "checkpoint.every"),
        max_seconds=config.stop.seconds,
        target_loss=config.stop.loss,
        clip_norm=config.clip_norm,
        precision=config.precision,
    )


def build_optimizer(config: DictConfig, model: nn.Module, hidden: Sequence[str] | None = None) -> Optimizers:
    """The optimizer by name, or several; ``hidden`` are patterns of the matrices that Muon steps.

    Raises:
        ConfigError: for settings that contradict one another, and where there is no matrix for Muon.
    """
    optimizer = config.optimizer
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if optimizer.name == "adamw":
        return _adamw(optimizer, list(trainable.values()))
    if optimizer.name == "sgd":
        if optimizer.nesterov and not optimizer.momentum:
            raise ConfigError("optimizer.nesterov=true needs an optimizer.momentum above 0")
        return torch.optim.SGD(
            trainable.values(),
            lr=optimizer.lr,
            momentum=optimizer.momentum,
            nesterov=optimizer.nesterov,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
    names = _muons(model, hidden)
    muon = torch.optim.Muon(
        [trainable.pop(name) for name in names],
        lr=optimizer.lr,
        momentum=optimizer.momentum,
        nesterov=optimizer.nesterov,
        weight_decay=optimizer.weight_decay,
        ns_steps=optimizer.ns_steps,
        adjust_lr_fn=optimizer.adjust,
    )
    return [muon, _adamw(optimizer.adamw, list(trainable.values()))] if trainable else muon


def _muons(model: nn.Module, hidden: Sequence[str] | None) -> list[str]:
    try:
        names = optimizers.hidden_matrices(model, hidden)
    except ValueError as error:
        raise ConfigError(f"optimizer=muon: the recipe's Task(hidden=...): {error}") from error
    if not names:
        raise ConfigError(
            "optimizer=muon: the model has no matrix between two hidden layers (a two-dimensional parameter that is "
            "neither an embedding's nor the output layer's); name some in Task(hidden=...), or use optimizer=adamw"
        )
    return names


def _adamw(optimizer: DictConfig, trainable: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """Matrices decay, vectors and scalars do not."""
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
