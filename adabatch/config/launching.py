"""One launch of a program: start the ranks, put the run together, restore it where it is resumed, train, report."""

from __future__ import annotations

import math
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from adabatch import data, distributed, optimizers
from adabatch.checkpoint import CheckpointError, Checkpoints
from adabatch.checkpoint import rng as random_states
from adabatch.config import calibrating, curvature, folders
from adabatch.config.build import Assembly, Task, require_mean
from adabatch.config.compose import ConfigError, plain
from adabatch.config.in_run import InRunCalibration, spent
from adabatch.config.live import LiveControl
from adabatch.config.resume import Change, as_records, changes_since, resumed, save_snapshot, to_text
from adabatch.controller import TooManySkipped
from adabatch.ledger import Decision, Ledger
from adabatch.loop import HeldOut, Trainer
from adabatch.report import recommend_text, summary, write_report
from adabatch.report.recommend import NotMeasured, recommendation
from adabatch.runlog import Metrics, RunLog, read_metrics

# Policies that leave the batch alone: what these runs have measured is reported as a recommendation at the end.
_MEASURE_ONLY = ("fixed", "observe")


def launch(
    config: DictConfig, arguments: Sequence[str], *, name: str, make_task: Callable[[DictConfig], Task]
) -> int:
    """Run ``config``: train, validate it, diagnose a checkpoint or calibrate at some (``job``); returns the exit status.

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
            if config.job == "curvature":
                curvature.require_one_process(config)
            world = distributed.start(
                device=config.device,
                backend=config.parallelism.backend,
                timeout_seconds=config.parallelism.timeout_seconds,
            )
            closing.callback(distributed.stop)
            torch.manual_seed(config.seed)
            task = _on_every_rank(world, lambda: make_task(config))
            if config.job == "curvature":
                curvature.report(config, curvature.diagnose(config, task, world))
                return 0
        require_mean(config, task, world)  # an error within the recipe's loss is none of the configuration
        with _refusals():
            run = Assembly(config, task, world)
            if config.job == "calibrate":
                calibrating.report(run, lambda *where: _restore(run, *where))
                return 0
            calibration = InRunCalibration(run) if config.calibrate.times else None
            if config.job == "validate":
                _validate(run)
                return 0
            # The same parameters on every rank, but not the same dropout.
            random_states.seed_all(random_states.derive(config.seed, world.rank, 0))
            trainer, folder = _open(run, name, overrides, closing)
            trainer.calibrate = calibration
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
    for part in (trainer.stream, trainer.tap, *([trainer.aligned] if trainer.aligned else []), trainer.log):
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
    trainer.control = LiveControl(name, folder, config)
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
        aligned=run.aligned,
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
    run: Assembly, checkpoints: Checkpoints, fingerprint: dict[str, Any], path: Path | None = None
) -> tuple[dict[str, Any], list[Change], list[Decision]]:
    """Bring every part to a checkpoint, by default the latest.

    Returns:
        The state of the loop; what changes from there on, the number of ranks included; and the change of batch that
        comes of it.
    """
    path = _latest(checkpoints) if path is None else path
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
                f"{run.controller.batch}: model, optimizer, generators, controller and ledger restored; "
                f"{_listed(changes)}",
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
    metrics = replace(read_metrics(folder), end=end) if (folder / "metrics.jsonl").exists() else None
    if metrics is not None:
        end["summary"] = _or_say_why_not("summary", lambda: summary(metrics))
    trainer.log.end(end)
    trainer.log.close()
    if metrics is not None and trainer.controller.policy.name in _MEASURE_ONLY:
        print(_or_say_why_not("recommendation", lambda: _recommended(metrics, folder)) or "no recommendation")
    if beside := spent(trainer):
        print(beside)
    print(f"ended by {reason} after {trainer.controller.progress.samples:,} samples; run folder: {folder}")
    if reason.startswith("SIG"):
        print(f"go on with resume={folder}")
    if metrics is None:
        print("no report: it is drawn from what the logger jsonl writes", flush=True)
        return
    report = _or_say_why_not("report", lambda: write_report(folder))
    print(f"report: {report}" if report else f"no report; try again with: adabatch report {folder}", flush=True)


def _or_say_why_not(what: str, action: Callable[[], Any]) -> Any:
    """What ``action`` returns; ``None`` and a traceback when it fails, for the training before it did not."""
    try:
        return action()
    except Exception:
        print(f"adabatch: the run is complete and saved, but its {what} failed:", file=sys.stderr)
        traceback.print_exc()
        return None


def _recommended(metrics: Metrics, folder: Path) -> str:
    """Which batch the run recommends, or why none."""
    try:
        advice = recommendation(metrics)
    except NotMeasured as reason:
        return f"no recommendation: {reason}"
    return f"{recommend_text.to_text(advice, curve=False)}\nthe whole trade-off: adabatch recommend {folder}"
