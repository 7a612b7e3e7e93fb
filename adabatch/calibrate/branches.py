"""Short continuations of a run from one point: so many samples at one fixed batch and learning rate, then annealed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adabatch import distributed, gradients, optimizers, stepping
from adabatch import plan as planning
from adabatch.calibrate.snapshot import Snapshot
from adabatch.checkpoint import rng
from adabatch.controller import Controller
from adabatch.data import Stream, stream
from adabatch.loop import HeldOut
from adabatch.optimizers.configured import BASE
from adabatch.plan import BatchLimits, BatchPlan
from adabatch.scaling import Scaling, scales_of
from adabatch.stepping import LossFunction

# The schedule may have ended near 0; branches begin from this share of the configured rate at least.
LEAST_SCHEDULE = 0.1


class Cancelled(Exception):
    """A bench was told to run no further branch."""


@dataclass(slots=True)
class Bench:
    """What branches of a run are made of.

    Attributes:
        model, plain_model: the wrapped and the inner module, at the point to branch from.
        optimizer: at the same point.
        loss, tap, world: as the run has them; the tap accumulates, and measures nothing in branches.
        held_out: what branches are compared by.
        train_data, order_seed: the training samples and their order.
        limits: what batches are made by; bounds do not count here.
        scaling: the rule, or the rules, by which learning rate and companions follow the batch, as the controller's.
        start: samples that the run has consumed.
        schedule: the learning-rate schedule's value there.
        seed: of the branches' dropout.
        clip_norm, precision: as the run has them.
        cancelled: asked on rank 0 after each branch: whether to end here, with ``Cancelled``.
        consumed: samples that branches and noise scales have read so far.

    Raises:
        ValueError: under FSDP2 and in fp16.
    """

    model: nn.Module
    plain_model: nn.Module
    optimizer: optimizers.Optimizers
    loss: LossFunction
    tap: gradients.Tap
    world: distributed.World
    held_out: HeldOut
    train_data: Any
    order_seed: int
    limits: BatchLimits
    scaling: Scaling | Mapping[str, Scaling] | None
    start: int
    schedule: float = 1.0
    seed: int = 0
    clip_norm: float | None = None
    precision: str = "fp32"
    cancelled: Callable[[], bool] = lambda: False
    consumed: int = 0

    def __post_init__(self) -> None:
        if self.tap.layout.sharded:
            raise ValueError(
                "calibration is not made under FSDP2 (fully_shard), where no rank has the whole of a group's gradient; "
                "a checkpoint fits either wrapper: use parallelism=ddp for it"
            )
        if self.precision == "fp16":
            raise ValueError("calibration is made in fp32 or bf16: precision=fp16 would need a loss scale per branch")
        self.limits = BatchLimits(self.limits.world, self.limits.micro_batch, rounding=self.limits.rounding)

    @classmethod
    def at(cls, controller: Controller, **parts: Any) -> Bench:
        """Where ``controller`` stands, between two of its steps; ``parts`` are what it does not know.

        A rate that the schedule has brought below a tenth of the configured one counts as a tenth.
        """
        schedule, progress = controller.schedule, controller.progress
        position = progress.samples if schedule.unit == "samples" else progress.tokens
        return cls(
            limits=controller.limits,
            scaling=controller.scaling,
            start=progress.samples,
            schedule=max(schedule.value(position), LEAST_SCHEDULE),
            **parts,
        )

    def rate(self, batch: int, noise_scale: float | None) -> float:
        """The first parameter group's learning rate at ``batch``, by the run's rule."""
        scales, _ = scales_of(self.scaling, batch, noise_scale)
        return optimizers.bases(self.optimizer)[0][BASE["lr"]] * self.schedule * scales.lr


@dataclass(frozen=True, slots=True)
class Branch:
    """One continuation.

    Attributes:
        batch: global batch.
        samples: how many it consumes; a last batch may be smaller.
        first_sample: its first position in the sample order.
        octaves: log2 of its learning rate over the rule's.
        cooldown: last share of its samples over which the learning rate falls to 0 linearly.
        noise_scale: what a rule that needs a noise scale goes by.
    """

    batch: int
    samples: int
    first_sample: int
    octaves: float = 0.0
    cooldown: float = 0.3
    noise_scale: float | None = None

    def anneal(self, position: float) -> float:
        """Share of the learning rate at ``position`` of its samples."""
        return min(1.0, (self.samples - position) / (self.cooldown * self.samples))


def run(bench: Bench, branch: Branch, snapshot: Snapshot) -> float:
    """Held-out loss at the end of ``branch``, the same on every rank; then everything is as in ``snapshot`` again.

    Raises:
        Cancelled: on all ranks, when the bench says so.
    """
    snapshot.restore()
    # The same dropout for all branches over the same samples, and another on each rank.
    rng.seed_all(rng.derive(bench.seed, bench.world.rank, branch.first_sample))
    try:
        bench.model.train()
        with opened(bench, branch.first_sample) as samples:
            for plan in plans(bench, branch):
                _step(bench, plan, samples, last=plan.last_sample == branch.first_sample + branch.samples)
        loss = bench.held_out.evaluate(bench.plain_model, bench.world)["loss"]
    finally:
        snapshot.restore()
    bench.consumed += branch.samples
    # As text, for JSON has no infinities.
    text, cancelled = distributed.agree([repr(loss), bench.cancelled()])
    if cancelled:
        raise Cancelled
    return float(text)


def plans(bench: Bench, branch: Branch) -> Iterator[BatchPlan]:
    """The steps of a branch."""
    end, step, at = branch.first_sample + branch.samples, 0, branch.first_sample
    scales, by_kind = scales_of(bench.scaling, branch.batch, branch.noise_scale)
    while at < end:
        batch = min(branch.batch, end - at)
        yield planning.split(
            step=step,
            first_sample=at,
            global_batch=batch,
            limits=bench.limits,
            measure=False,
            schedule=bench.schedule * 2.0**branch.octaves * branch.anneal(at - branch.first_sample + 0.5 * batch),
            scales=scales,
            by_kind=by_kind,
        )
        step, at = step + 1, at + batch


@contextlib.contextmanager
def opened(bench: Bench, first_sample: int) -> Iterator[Stream]:
    """A stream of the training samples of its own."""
    with stream(
        bench.train_data,
        seed=bench.order_seed,
        start=first_sample,
        rank=bench.world.rank,
        world=bench.world.size,
        micro_batch=bench.limits.micro_batch,
    ) as samples:
        yield samples


def backward(bench: Bench, window: gradients.Window, micro_batch: Any) -> float | torch.Tensor | None:
    """Forward and backward of one micro-batch; returns its weight."""
    return stepping.backward(
        window,
        micro_batch,
        model=bench.model,
        loss=bench.loss,
        device=bench.world.device,
        precision=bench.precision,
    )


def _step(bench: Bench, plan: BatchPlan, samples: Stream, last: bool) -> None:
    with gradients.accumulate(bench.tap, plan) as window:
        for micro_batch in samples.take(plan):
            backward(bench, window, micro_batch)
    stepping.finish(window, plan, bench.optimizer, clip_norm=bench.clip_norm, exchange=last)
