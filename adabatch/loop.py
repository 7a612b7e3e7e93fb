"""The reference training loop: plan, accumulate, measure, clip, step, commit; with evaluation, logging and saving.

    while not controller.done:
        plan = controller.plan()                        which samples, how split, at which scales
        accumulate: one forward/backward a micro-batch  no synchronisation before the last
        finish: normalise once, measure, clip           one small collective, shared by several steps
        apply(plan), optimizer step                     skipped when the gradient is not finite
        controller.commit(plan, measurement)            the ledger grows; the next batch is decided
        log | evaluate | save | stop                    at step or sample counts that all ranks share

The host waits for the device only on steps that decide, log, evaluate or save.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from adabatch import distributed, gradients, optimizers, stepping
from adabatch import plan as planning
from adabatch.checkpoint import CheckpointError, Checkpoints
from adabatch.controller import Controller, Readable, TooManySkipped
from adabatch.data import Stream, stream
from adabatch.ledger import Decision
from adabatch.plan import BatchLimits, BatchPlan, data_efficiency
from adabatch.policies import supported_scale
from adabatch.runlog import RunLog
from adabatch.stepping import PRECISIONS, LossFunction, to_device
from adabatch.stopwatch import Stopwatch

# Numbers of several steps travel over the ranks together, but no later than this after a rank was told to stop.
PATIENCE_SECONDS = 0.5

# Reasons for which a run ends for good; any other is the name of a signal.
ENDS = ("budget", "seconds", "loss")


class Metrics(Protocol):
    """Held-out metrics of a micro-batch as (sum, count) pairs; one of them is named ``loss``."""

    def __call__(self, model: nn.Module, data: Any) -> Mapping[str, tuple[torch.Tensor, float]]: ...


@dataclass(frozen=True, slots=True)
class Settings:
    """Cadences and bounds of the loop.

    Args:
        log_every: steps between two records.
        evaluate_every: samples between two held-out evaluations; ``None`` evaluates at the end only.
        save_every: samples between two checkpoints; ``None`` saves at the end only.
        max_seconds: training seconds after which the run stops, two steps or half a second later.
        target_loss: held-out loss at or below which the run stops.
        clip_norm: gradient-norm threshold at the reference batch.
        precision: ``fp32``, ``bf16`` or ``fp16``.
    """

    log_every: int = 10
    evaluate_every: int | None = None
    save_every: int | None = None
    max_seconds: float | None = None
    target_loss: float | None = None
    clip_norm: float | None = None
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        for name in ("log_every", "evaluate_every", "save_every", "max_seconds", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")


@dataclass(slots=True)
class HeldOut:
    """``samples`` of a held-out data set in keyed order, always the same ones on any number of ranks."""

    dataset: Any
    metrics: Metrics
    samples: int
    micro_batch: int

    def evaluate(self, model: nn.Module, world: distributed.World) -> dict[str, float]:
        """Mean of every metric over the held-out samples, which the ranks share like a training window."""
        count = min(self.samples, len(self.dataset))
        limits = BatchLimits(world.size, self.micro_batch, rounding="none")
        plan = planning.split(step=0, first_sample=0, global_batch=count, limits=limits, measure=False)
        totals: dict[str, torch.Tensor] = {}
        was_training = model.training
        model.eval()
        with (
            torch.no_grad(),
            # In keyed order, for the first samples of a data set are often alike; the seed makes them always the same.
            stream(self.dataset, seed=0, rank=world.rank, world=world.size, micro_batch=plan.micro_batch) as samples,
        ):
            for micro_batch in samples.take(plan):
                counted = 1.0 if micro_batch.samples else 0.0
                for name, (total, number) in self.metrics(model, to_device(micro_batch.data, world.device)).items():
                    pair = torch.stack([total.detach().double(), torch.full_like(total, number).double()]) * counted
                    totals[name] = totals[name] + pair if name in totals else pair
        model.train(was_training)
        return _means(totals)


@dataclass(slots=True)
class Meter:
    """Losses since the last record, unread until the record is due."""

    unread: list[Any] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)

    def add(self, measurement: Any) -> None:
        self.unread.append(measurement)

    def read(self) -> None:
        """Read the pending losses; waits for the device."""
        for pending in self.unread:
            measurement = pending.read()
            if measurement.finite:
                self.losses.append([measurement.loss, measurement.weight])
        self.unread = []

    def take(self) -> float | None:
        """Weighted mean loss since the last time, or ``None`` when every window was skipped."""
        self.read()
        losses, self.losses = self.losses, []
        total = math.fsum(weight for _, weight in losses)
        return math.fsum(loss * weight for loss, weight in losses) / total if total else None


@dataclass(slots=True)
class Probes:
    """What calibrations inside the run have taken beside training.

    Attributes:
        tried_at: samples that the run had consumed when the last was made or refused.
        samples: read by their branches, and to be trained on all the same.
        seconds: none of them training's.
    """

    tried_at: int = 0
    samples: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Clock:
    """Training seconds: evaluation and saving are left out, and a resumed run counts on."""

    elapsed: float = 0.0
    started: float | None = None

    def start(self) -> None:
        self.started = time.perf_counter()

    def seconds(self) -> float:
        return self.elapsed + (time.perf_counter() - self.started if self.started is not None else 0.0)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.elapsed, self.started = self.seconds(), None
        yield
        self.start()


class Interrupt:
    """Turns SIGTERM and Ctrl-C into a flag; Ctrl-C again after three seconds interrupts at once."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._first = 0.0

    def __enter__(self) -> Interrupt:
        self._old = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # A launcher forwards the signal that its group has had already, so the first seconds count as one signal.
        if self.received and number == signal.SIGINT and now - self._first > 3:
            raise KeyboardInterrupt
        self._first = self._first if self.received else now
        self.received = signal.Signals(number).name


@dataclass(slots=True)
class Trainer:
    """Everything a run is made of, and the loop over it. ``model`` is the wrapped, ``plain_model`` the inner module.

    ``control`` is called when a decision was due, on all ranks at the same step, and may change what the run goes by.
    So may ``calibrate``, which is called after every step but the last, and is told how to ask whether this rank was
    told to stop; it returns whether the run should be saved.
    """

    model: nn.Module
    plain_model: nn.Module
    optimizer: optimizers.Optimizers
    loss: LossFunction
    controller: Controller
    stream: Stream
    tap: gradients.Tap
    world: distributed.World
    log: RunLog
    checkpoints: Checkpoints
    ledger_file: Path
    settings: Settings
    held_out: HeldOut | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    calibration: float = 1.0
    scaler: torch.amp.GradScaler | None = None
    aligned: gradients.AlignmentTaps | None = None
    clock: Clock = field(default_factory=Clock)
    meter: Meter = field(default_factory=Meter)
    last_record: tuple[int, float] = (0, 0.0)
    carried_out: BatchPlan | None = None
    outcome: gradients.Outcome | None = None
    evaluated_at: int | None = None
    pause: int = 1
    kept_back: int = 0
    control: Callable[[Trainer], None] | None = None
    calibrate: Callable[[Trainer, Callable[[], bool]], bool] | None = None
    probes: Probes = field(default_factory=Probes)
    stopwatch: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        self.stopwatch = Stopwatch(self.world.device)

    def train(self) -> str:
        """Run until the budget is used up or something stops the run; returns the reason.

        Raises:
            TooManySkipped: from the controller, when several windows in a row were not finite; the ledger is saved.
        """
        with Interrupt() as interrupt:
            if self.held_out and self.controller.progress.steps == 0:
                self.evaluate()
            self.clock.start()
            self.stopwatch.restart()
            reason = None
            try:
                while reason is None:
                    reason = self._next(interrupt)
                self._conclude(reason)
            except TooManySkipped:
                self.save_ledger()
                raise
        return reason

    def _conclude(self, reason: str) -> None:
        """The last record, evaluation and checkpoint. A run that a signal stopped goes on as if it had not been."""
        self.controller.read()
        if reason in ENDS:
            if self.carried_out is not None and self.last_record[0] != self.controller.progress.samples:
                self._record_step(self.carried_out, self.outcome)
            if self.held_out and self.evaluated_at != self.controller.progress.samples:
                self.evaluate()
        self.save()

    def state_dict(self) -> dict[str, Any]:
        """What the loop itself has to remember, as plain data."""
        self.meter.read()
        return {
            "seconds": self.clock.seconds(),
            "losses": self.meter.losses,
            "last_record": list(self.last_record),
            "probes": asdict(self.probes),
            "scaler": self.scaler.state_dict() if self.scaler else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clock = Clock(elapsed=state["seconds"])
        self.meter = Meter(losses=[list(pair) for pair in state["losses"]])
        self.last_record = tuple(state["last_record"])
        self.probes = Probes(**state.get("probes", {}))
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    # -- one step

    def _next(self, interrupt: Interrupt) -> str | None:
        """Take one step and do what is due after it; returns why the run ends here, if it does."""
        if self.controller.done:
            return "budget"
        before = self.controller.progress.samples
        plan = self.controller.plan()
        # Asked for a stop one step late: by then the answer is there, and the host need not wait for the step just run.
        previous = self.outcome if self.outcome is not None and self.outcome.measurement.travelled else None
        outcome, measured = self._step(plan, interrupt)
        self.carried_out, self.outcome = plan, outcome
        deciding = self.controller.due
        decision = self.controller.commit(plan, measured, self.stopwatch.lap())
        self.meter.add(outcome.measurement)
        if decision is not None:
            self.record_decision(decision)
        if self.controller.progress.steps % self.settings.log_every == 0:
            self._record_step(plan, outcome)
        if self.held_out and _crossed(before, self.controller.progress.samples, self.settings.evaluate_every):
            loss = self.evaluate()["loss"]
            if self.settings.target_loss is not None and loss <= self.settings.target_loss:
                return "loss"
        if previous is not None and previous.stop_requested() and not self.controller.done:
            # Without a word of its own, rank 0 stops because another rank was told to.
            return distributed.agree(interrupt.received or ("seconds" if self._out_of_time() else signal.SIGTERM.name))
        if deciding and self.control is not None and not self.controller.done:
            self.control(self)
        due = _crossed(before, self.controller.progress.samples, self.settings.save_every)
        if self.calibrate is not None and not self.controller.done:
            due |= self.calibrate(self, lambda: interrupt.received is not None)
        if due and not self.controller.done:  # the end of the run saves in any case
            self.save()
        return None

    def _step(self, plan: BatchPlan, interrupt: Interrupt) -> tuple[gradients.Outcome, Readable]:
        """Carry the plan out: what was stepped with, and the measurement with all that belongs to it."""
        aligned = self.aligned
        if aligned is not None:
            aligned.measure(plan.align)
        with gradients.accumulate(self.tap, plan) as window:
            if interrupt.received is not None or self._out_of_time():
                window.request_stop()
            for micro_batch in self.stream.take(plan):
                self.stopwatch.micro_batch(plan)
                weight = stepping.backward(
                    window,
                    micro_batch,
                    model=self.model,
                    loss=self.loss,
                    device=self.world.device,
                    precision=self.settings.precision,
                    scaler=self.scaler,
                )
                if aligned is not None:
                    aligned.note(micro_batch.samples, weight)
        alignments = aligned.read(window) if aligned is not None else {}
        outcome = stepping.finish(
            window,
            plan,
            self.optimizer,
            clip_norm=self.settings.clip_norm,
            scaler=self.scaler,
            exchange=self._exchanges(),
            pause=self._patience(),
        )
        return outcome, gradients.Aligned(outcome.measurement, alignments) if alignments else outcome.measurement

    def _exchanges(self) -> bool:
        """Whether this step's numbers travel now: they are read after it, or a word to stop has waited long enough."""
        self.kept_back += 1
        logged = (self.controller.progress.steps + 1) % self.settings.log_every == 0
        if logged or self.kept_back >= self.pause or self.controller.due:
            self.kept_back = 0
            return True
        return False

    def _patience(self) -> int:
        """Steps that may pass between two exchanges by this rank's clock; all ranks take rank 0's, at each record."""
        samples, seconds = self.last_record
        steps = planning.steps_at(self.controller.progress.samples - samples, self.controller.batch)
        elapsed = self.clock.seconds() - seconds
        return max(1, min(self.settings.log_every, int(PATIENCE_SECONDS * steps / max(elapsed, 1e-9))))

    def _out_of_time(self) -> bool:
        """Rank 0's clock decides; the stop flag rides in the step's collective."""
        bound = self.settings.max_seconds
        return bound is not None and self.world.rank == 0 and self.clock.seconds() >= bound

    # -- what is due after a step

    def evaluate(self) -> dict[str, float]:
        """Held-out metrics, logged."""
        assert self.held_out is not None
        with self.clock.paused():
            values = self.held_out.evaluate(self.plain_model, self.world)
            self.log.evaluation({**self.where(), **values})
        self.stopwatch.restart()
        self.evaluated_at = self.controller.progress.samples
        return values

    def save(self) -> None:
        """Write a checkpoint and the ledger. A failed save is reported, and training goes on."""
        with self.clock.paused():
            progress = self.controller.progress
            extra = {
                **self.extra,
                "controller": self.controller.state_dict(),
                "ledger": self.controller.ledger.to_dict(),
                "loop": self.state_dict(),
            }
            try:
                path = self.checkpoints.save(
                    step=progress.steps,
                    samples=progress.samples,
                    model=self.plain_model,
                    optimizer=self.optimizer,
                    extra=extra,
                )
                self.log.checkpoint({**self.where(), "path": str(path)})
            except CheckpointError as error:
                if self.world.rank == 0:
                    print(f"adabatch: saving failed, training goes on: {error}", file=sys.stderr, flush=True)
            self.save_ledger()
        self.stopwatch.restart()

    def save_ledger(self) -> None:
        """Write the ledger into the run folder, on rank 0. A failure is reported, and training goes on."""
        if self.world.rank != 0:
            return
        try:
            self.controller.ledger.save(self.ledger_file)
        except OSError as error:
            print(f"adabatch: the ledger was not saved, training goes on: {error}", file=sys.stderr, flush=True)

    def where(self) -> dict[str, Any]:
        """How far the run is, for a record."""
        progress = self.controller.progress
        return {
            "step": progress.steps,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "seconds": self.clock.seconds(),
        }

    def record_decision(self, decision: Decision) -> None:
        """Log a decision; one that changed the batch goes to the ledger's file at once."""
        self.log.decision(
            {
                **self.where(),
                **self._noise(),
                "previous": decision.previous,
                "batch": decision.batch,
                "changed": decision.changed,
                "wanted": decision.wanted,
                "reason": decision.reason,
                "policy": decision.policy,
            }
        )
        if decision.changed:
            self.save_ledger()

    def _record_step(self, plan: BatchPlan, outcome: gradients.Outcome) -> None:
        where = self.where()
        samples, seconds = self.last_record
        self.last_record = (where["samples"], where["seconds"])
        last = outcome.measurement.read()
        self.pause = max(1, outcome.measurement.pause)
        self.log.step(
            {
                **where,
                **self._noise(),
                "loss": self.meter.take(),
                "last_loss": last.loss,
                "global_batch": plan.global_batch,
                "micro_batch": plan.micro_batch,
                "micro_batches": plan.micro_batches,
                "world": plan.world,
                "lr": float(optimizers.each(self.optimizer)[0].param_groups[0]["lr"]),
                "grad_norm": math.sqrt(last.mean_square) if last.finite else None,
                "efficiency": self._efficiency(plan.global_batch),
                "step_time": self._step_time(),
                "samples_per_second": (where["samples"] - samples) / max(where["seconds"] - seconds, 1e-9),
                "skipped": len(self.controller.ledger.skipped),
            }
        )

    def _noise(self) -> dict[str, Any]:
        estimate = self.controller.estimate
        if estimate is None:
            return {}
        return {
            "scale": estimate.scale,
            "scale_low": estimate.low,
            "scale_high": estimate.high,
            "resolved": estimate.resolved,
            "signal": estimate.signal,
            "noise": estimate.noise,
            "geometry": estimate.geometry,
            "views": {name: view.to_dict() for name, view in self.controller.views.items()},
            "guards": self.controller.guards.to_dict() if self.controller.guards else None,
            "slope": asdict(self.controller.slope) if self.controller.slope else None,
        }

    def _step_time(self) -> dict[str, Any] | None:
        """What a step costs, in seconds and as a price in samples; an interval without an end has None there."""
        price, step_time = self.controller.price, self.controller.step_time
        if price is None or step_time is None:
            return None
        ends = {"price": price.value, "price_low": price.low, "price_high": price.high}
        return asdict(step_time) | {name: end if math.isfinite(end) else None for name, end in ends.items()}

    def _efficiency(self, global_batch: int) -> float | None:
        estimate = self.controller.estimate
        if estimate is None or not estimate.resolved:
            return None
        return data_efficiency(global_batch, self.calibration * supported_scale(estimate))


def _means(totals: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Metric sums over counts, over all ranks."""
    names = sorted(totals)
    summed = distributed.all_reduce_sum(torch.stack([totals[name] for name in names]))
    return {name: (total / number).item() for name, (total, number) in zip(names, summed)}


def _crossed(before: int, after: int, every: int | None) -> bool:
    """Whether a multiple of ``every`` samples lies in (before, after]."""
    return every is not None and after // every > before // every
