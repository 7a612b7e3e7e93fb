"""From a configuration to a run: the one place where configuration objects are read and parts are put together."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adabatch import data, distributed, gradients, optimizers
from adabatch.checkpoint import CheckpointError, Checkpoints
from adabatch.checkpoint import rng as random_states
from adabatch.config import folders
from adabatch.config.compose import ConfigError, plain
from adabatch.config.resume import Change, as_records, changes_since, resumed, save_snapshot, to_text
from adabatch.controller import Budget, Controller, TooManySkipped
from adabatch.ledger import Decision, Ledger
from adabatch.loop import HeldOut, LossFunction, Metrics, Settings, Trainer
from adabatch.noise import NoiseEstimator
from adabatch.plan import BatchLimits
from adabatch.policies import POLICIES, Damping, Fixed, Observe, Policy, Replay, Stages, TargetEfficiency
from adabatch.progress import parse_count
from adabatch.report import summary, write_report
from adabatch.runlog import RunLog, read_metrics
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


def launch(
    config: DictConfig, arguments: Sequence[str], *, name: str, make_task: Callable[[DictConfig], Task]
) -> int:
    """Run ``config``: train, or validate it; returns the exit status.

    Args:
        config: the composed configuration.
        arguments: the overrides that made it.
        name: its root, which a resumed run must share.
        make_task: builds the recipe's model and data.
    """
    overrides = list(arguments)
    if config.resume is not None:
        source = Path(config.resume).absolute()
        config, overrides = resumed(name, source, arguments)
        config.resume = config.run_folder = str(source)
    if config.threads:
        torch.set_num_threads(config.threads)
    with ExitStack() as closing:
        with _refusals():
            world = distributed.start(
                device=config.device,
                backend=config.parallelism.backend,
                timeout_seconds=config.parallelism.timeout_seconds,
            )
            closing.callback(distributed.stop)
            torch.manual_seed(config.seed)
            run = Assembly(config, _on_every_rank(world, lambda: make_task(config)), world)
            if config.job == "validate":
                _validate(run)
                return 0
            # The same parameters on every rank, but not the same dropout.
            random_states.seed_all(random_states.derive(config.seed, world.rank, 0))
            trainer, folder = _open(run, name, overrides, closing)
        _train(trainer, folder)
    return 0


@contextmanager
def _refusals() -> Iterator[None]:
    """While parts are put together, a value that one of them does not take is an error of the configuration."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, CheckpointError) as error:
        raise ConfigError(str(error)) from error


def _on_every_rank(world: distributed.World, action: Callable[[], Task]) -> Task:
    """What ``action`` returns, when it succeeds on every rank; the first rank that it fails on says why."""
    task, refusal = None, None
    try:
        with _refusals():
            task = action()
    except ConfigError as error:
        refusal = error
    failed = torch.zeros(world.size, device=distributed.control_device())
    failed[world.rank] = float(refusal is not None)
    first = next(iter(distributed.all_reduce_sum(failed).nonzero().flatten().tolist()), None)
    if first is not None:
        raise ConfigError(f"{refusal or f'rank {first} has refused it'}", rank=first)
    assert task is not None
    return task


class Assembly:
    """The parts of a run, built from its configuration."""

    def __init__(self, config: DictConfig, task: Task, world: distributed.World) -> None:
        self.config, self.task, self.world = config, task, world
        self.limits = build_limits(config, world.size)
        self.policy = build_policy(config)
        self.budget = build_budget(config)
        self.schedule = build_schedule(config, self.budget)
        self.noise = build_noise(config, self.budget, task)
        self.settings = build_settings(config)
        self.calibration = config.policy.get("calibration", 1.0)
        self.plain_model = task.model.to(world.device)
        self.optimizer = build_optimizer(config, self.plain_model)
        optimizers.prepare(self.optimizer)
        self.model = wrap(self.plain_model, config, world)
        self.reference_batch = config.scaling.reference_batch or self._first_batch()
        config.scaling.reference_batch = self.reference_batch
        self.scaling = build_scaling(config, self.optimizer, self.reference_batch)
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
            max_skipped=config.max_skipped,
            agree=distributed.agree,
        )
        self.tap = gradients.attach(self.model, self.optimizer, kind=config.noise.tap)

    def describe(self) -> str:
        """What the run is made of, and its next step."""
        parameters = sum(p.numel() for p in self.plain_model.parameters() if p.requires_grad)
        return (
            f"{parameters:,} trainable parameters, {len(self.task.train_data):,} training samples; policy "
            f"{self.policy.name}, {self._next_step()}, reference batch {self.reference_batch}, scaling {self.scaling.rule}"
        )

    def _next_step(self) -> str:
        if self.controller.done:
            return "no step left within stop.samples or stop.tokens"
        plan = self.controller.plan()
        return (
            f"step {plan.step:,} with a global batch of {plan.global_batch} = {plan.world} ranks x {plan.micro_batches} "
            f"micro-batches of at most {plan.micro_batch}"
        )

    def _first_batch(self) -> int:
        if isinstance(self.policy, Fixed):
            return self.policy.global_batch
        if isinstance(self.policy, Stages):
            return self.policy.stages[0][1]
        if isinstance(self.policy, Replay):
            return self.policy.ledger.segments[0].global_batch
        return self.limits.require(self.config.limits.start_batch, "limits.start_batch")


def build_limits(config: DictConfig, world: int) -> BatchLimits:
    limits = config.limits
    return BatchLimits(world, limits.micro_batch, limits.min_batch, limits.max_batch, limits.rounding)


def build_policy(config: DictConfig) -> Policy:
    """The policy by its registered name."""
    policy = config.policy
    builders: dict[str, Callable[[], Policy]] = {
        "target_efficiency": lambda: TargetEfficiency(policy.target_efficiency, policy.calibration, policy.repay),
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
        warmup=_count(schedule.warmup, "lr_schedule.warmup") or 0,
        final=schedule.final,
        decay_share=schedule.decay_share,
        unit="tokens" if budget.samples is None and budget.tokens is not None else "samples",
    )


def build_noise(config: DictConfig, budget: Budget, task: Task) -> NoiseEstimator | None:
    """The estimator; its memory is capped by the budget in samples where there is one."""
    noise = config.noise
    if not noise.enabled:
        return None
    horizon = budget.samples
    if horizon is None and budget.tokens is not None and task.tokens_per_sample:
        horizon = math.ceil(budget.tokens / task.tokens_per_sample)
    return NoiseEstimator(
        relative_error=noise.relative_error,
        confidence=noise.confidence,
        horizon=horizon,
        dataset_size=len(task.train_data) if noise.finite_data else None,
    )


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
    if config.parallelism.name != "ddp":
        raise ConfigError(f"parallelism.name must be ddp, got {config.parallelism.name!r}")
    if config.compile:
        model = torch.compile(model)
    if world.size == 1:
        return model
    devices = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def _count(text: str | None, name: str) -> int | None:
    try:
        return None if text is None else parse_count(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _open(run: Assembly, name: str, overrides: list[str], closing: ExitStack) -> tuple[Trainer, Path]:
    """The trainer, restored where the run is resumed, and its folder, which no other launch uses until ``closing``."""
    config, world = run.config, run.world
    folder, lock = folders.claim(config)
    if lock is not None:
        closing.enter_context(lock)
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=config.checkpoint.keep_last, run=folder.name)
    if world.rank == 0:
        checkpoints.clean()
    distributed.barrier()  # nobody looks for a checkpoint before that is done
    fingerprint = data.fingerprint(run.task.train_data)
    trainer = _trainer(run, folder, checkpoints, fingerprint, resumed=config.resume is not None)
    for part in (trainer.stream, trainer.tap, trainer.log):
        closing.enter_context(part)
    changes: list[Change] = []
    decisions: list[Decision] = []
    if config.resume is not None:
        loop, changes, decisions = _restore(run, checkpoints, fingerprint)
        trainer.load_state_dict(loop)
    if world.rank == 0:
        launch = {
            "program": str(Path(sys.argv[0]).absolute()),
            "directory": str(Path.cwd()),
            "config": name,
            "overrides": overrides,
            "world": world.size,
        }
        save_snapshot(folder, plain(config), launch)
    _announce(run, trainer, changes, decisions, overrides)
    return trainer, folder


def _train(trainer: Trainer, folder: Path) -> None:
    """Train, and write the summary and the report, also when too many windows were skipped."""
    try:
        reason = trainer.train()
    except TooManySkipped:
        _finish(trainer, folder, "skipped")
        raise
    _finish(trainer, folder, reason)


def _trainer(
    run: Assembly, folder: Path, checkpoints: Checkpoints, fingerprint: dict[str, Any], *, resumed: bool
) -> Trainer:
    config, world, controller = run.config, run.world, run.controller
    start = _consumed(checkpoints) if resumed else 0
    left = run.budget.left(controller.progress, run.task.tokens_per_sample)
    log = RunLog(
        folder,
        loggers=config.logger.names,
        total_samples=int(left) if math.isfinite(left) else None,
        main=world.rank == 0,
        resumed_at=start if resumed else None,
        calibrated=run.calibration != 1,
        target_efficiency=config.policy.get("target_efficiency"),
    )
    stream = data.stream(
        run.task.train_data,
        seed=config.order_seed,
        start=start,
        rank=world.rank,
        world=world.size,
        micro_batch=config.limits.micro_batch,
        workers=config.workers,
        pin_memory=world.device.type == "cuda",
    )
    return Trainer(
        model=run.model,
        plain_model=run.plain_model,
        optimizer=run.optimizer,
        loss=run.task.loss,
        controller=controller,
        stream=stream,
        tap=run.tap,
        world=world,
        log=log,
        checkpoints=checkpoints,
        ledger_file=folder / "ledger.json",
        settings=run.settings,
        held_out=HeldOut(run.task.held_out, run.task.metrics, config.evaluation.samples, config.limits.micro_batch),
        extra={"data": fingerprint, "run": {"world": world.size, "config": to_text(plain(config))}},
        calibration=run.calibration,
        scaler=torch.amp.GradScaler(world.device.type) if config.precision == "fp16" else None,
    )


def _consumed(checkpoints: Checkpoints) -> int:
    """Samples consumed at the checkpoint that a resumed run goes on from."""
    return checkpoints.read_extra(_latest(checkpoints))["controller"]["progress"]["samples"]


def _latest(checkpoints: Checkpoints) -> Path:
    path = checkpoints.latest()
    if path is None:
        raise ConfigError(
            f"there is nothing to go on from: the run ended before its first checkpoint was complete (there is none in "
            f"{checkpoints.folder}); start it anew, with the same arguments and another run_folder"
        )
    return path


def _restore(
    run: Assembly, checkpoints: Checkpoints, fingerprint: dict[str, Any]
) -> tuple[dict[str, Any], list[Change], list[Decision]]:
    """Bring every part to the latest checkpoint.

    Returns:
        The state of the loop; what changes from there on, the number of ranks included; and the change of batch that
        comes of it.
    """
    path = _latest(checkpoints)
    data.check_fingerprint(checkpoints.read_extra(path)["data"], fingerprint)
    configured = optimizers.bases(run.optimizer)
    extra = checkpoints.load(path, model=run.plain_model, optimizer=run.optimizer)
    optimizers.rebase(run.optimizer, configured)
    run.controller.load_state_dict(extra["controller"], Ledger.from_dict(extra["ledger"], source=f"{path}: ledger"))
    changes = changes_since(extra["run"]["config"], run.config)
    if extra["run"]["world"] != run.world.size:
        changes = [*changes, Change("ranks", extra["run"]["world"], run.world.size)]
    if changes:
        run.controller.splice(as_records(changes))
    return extra["loop"], changes, run.controller.ledger.decisions[len(extra["ledger"]["decisions"]) :]


def _validate(run: Assembly) -> None:
    """Say what the run would do; one that is to be resumed is restored for that. Nothing is written."""
    changes: list[Change] = []
    if run.config.resume is not None:
        checkpoints = Checkpoints(Path(run.config.resume, "checkpoints"))
        _, changes, _ = _restore(run, checkpoints, data.fingerprint(run.task.train_data))
    if run.world.rank == 0:
        print(f"valid: {run.describe()}")
        if run.config.resume is not None:
            print(f"against the checkpoint: {_listed(changes)}")


def _listed(changes: Sequence[Change]) -> str:
    listed = (f"{change.key}: {change.old} -> {change.new} ({change.outcome})" for change in changes)
    return "; ".join(listed) or "nothing changed"


def _announce(
    run: Assembly,
    trainer: Trainer,
    changes: Sequence[Change],
    decisions: Sequence[Decision],
    overrides: Sequence[str],
) -> None:
    """Log the launch; a resumed run says what was restored and what changed, the batch included."""
    progress = run.controller.progress
    where = {**progress.to_dict(), "step": progress.steps, "seconds": trainer.clock.seconds()}
    where.pop("steps")
    if run.config.resume is not None:
        trainer.log.resume({**where, "from_step": progress.steps, "changes": as_records(changes)})
        if run.world.rank == 0:
            print(
                f"resumed {run.config.resume} at step {progress.steps:,}, sample {progress.samples:,}, batch "
                f"{run.controller.batch}: model, optimizer, generators, controller and ledger restored; {_listed(changes)}",
                flush=True,
            )
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    trainer.log.start(
        {
            **where,
            "world": run.world.size,
            "config": plain(run.config),
            "program": sys.argv[0],
            "arguments": list(overrides),
            "versions": versions,
        }
    )
    for decision in decisions:
        trainer.record_decision(decision)
    trainer.save_ledger()


def _finish(trainer: Trainer, folder: Path, reason: str) -> None:
    """Close the log with a summary and write the report, on rank 0. Without metrics on disk there is neither."""
    if trainer.world.rank != 0:
        return
    end = {**trainer.where(), "reason": reason}
    logged = (folder / "metrics.jsonl").exists()
    if logged:
        end["summary"] = summary(replace(read_metrics(folder), end=end))
    trainer.log.end(end)
    trainer.log.close()
    print(f"ended by {reason} after {trainer.controller.progress.samples:,} samples; run folder: {folder}")
    if reason.startswith("SIG"):
        print(f"go on with resume={folder}")
    report = f"report: {write_report(folder)}" if logged else "no report: it is drawn from what the logger jsonl writes"
    print(report, flush=True)
