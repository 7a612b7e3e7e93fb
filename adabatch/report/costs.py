"""What a step would cost at other batches and on other ranks, from the step times of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adabatch.plan import BatchLimits, samples_in
from adabatch.report import history
from adabatch.report.history import Timing
from adabatch.report.tradeoff import Quantity
from adabatch.runlog import Metrics, text
from adabatch.throughput import StepTime


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Step times on ``world`` ranks, as far as they can be told.

    Attributes:
        world: ranks of the run at its end.
        micro_batch: samples of one full micro-batch.
        timed: step times of this many ranks, by global batch.
        model: seconds of a step, where full micro-batches have ``model_micro_batch`` samples; ``None`` when the fixed
            cost cannot be told from that of a micro-batch, and ``why_not`` says why.
    """

    world: int
    micro_batch: int
    timed: dict[int, Timing]
    model: StepTime | None
    model_micro_batch: int
    why_not: str

    def of_step(self, global_batch: int) -> float | None:
        """Seconds of a step of ``global_batch`` on the run's own ranks: measured, or by the model, or unknown.

        Below one full micro-batch per rank the model knows nothing.
        """
        if global_batch in self.timed:
            return self.timed[global_batch].median
        full = samples_in(self.world, self.model_micro_batch)
        if self.model is None or global_batch < full:
            return None
        return self.of_micro_batches(math.ceil(global_batch / full))

    def of_micro_batches(self, count: int) -> float:
        """Seconds of a step of ``count`` full micro-batches a rank, by the model."""
        assert self.model is not None
        return self.model.seconds(count, samples_in(count, self.model_micro_batch))

    def of_one_micro_batch(self) -> float | None:
        """Seconds of a step in which every rank runs one full micro-batch."""
        seen = self.timed.get(samples_in(self.world, self.micro_batch))
        if seen and (seen.shape.micro_batch, seen.shape.micro_batches) == (self.micro_batch, 1):
            return seen.median
        known = self.model is not None and self.model_micro_batch == self.micro_batch
        return self.of_micro_batches(1) if known else None

    def ranks(self, global_batch: float) -> int:
        """The most ranks that have a full micro-batch each; 0 when not even one has."""
        return int(global_batch // self.micro_batch)

    def on_ranks(self, global_batch: int) -> float | None:
        """Seconds of a step on ``ranks(global_batch)`` ranks, if a step takes no longer there than on the run's own.

        A batch that is no multiple of the micro-batch leaves some ranks more than one.
        """
        ranks = self.ranks(global_batch)
        count = math.ceil(global_batch / samples_in(ranks, self.micro_batch)) if ranks else 0
        if count == 1:
            return self.of_one_micro_batch()
        known = count > 1 and self.model is not None and self.model_micro_batch == self.micro_batch
        return self.of_micro_batches(count) if known else None

    def own_share(self) -> tuple[float, float] | None:
        """Samples per rank and seconds of a step, at the batch that was timed longest."""
        longest = max(self.timed.values(), key=lambda timing: timing.steps, default=None)
        return (longest.shape.global_batch / self.world, longest.median) if longest else None

    def fastest(self, critical: Quantity) -> Quantity | None:
        """The batch of the fewest seconds on the run's own ranks, for a critical batch that stays.

        sqrt(r C) with r = fixed seconds per second of a sample (theory: arXiv 1812.06162, appendix D, with seconds as
        the price), but no less than one full micro-batch per rank, below which the cost of a step is not known.
        """
        if self.model is None:
            return None
        full = samples_in(self.world, self.model_micro_batch)
        # A fixed cost of nothing may come out as a rounding error below 0.
        price = max(self.model.fixed, 0.0) / self.model.of_micro_batch(self.model_micro_batch) * full
        return critical.through(lambda one: max(math.sqrt(price * one) if price else 0.0, float(full)))


def step_costs(metrics: Metrics, limits: BatchLimits) -> StepCosts:
    """The costs of a run on the ranks that it had at its end, ``limits.world``."""
    measured = [
        timing
        for timing in history.timings(metrics)
        if timing.shape.world == limits.world and timing.intervals >= history.MIN_TIMED
    ]
    fitted = history.step_time_model(metrics, measured)
    timed: dict[int, Timing] = {}
    for timing in sorted(measured, key=lambda timing: timing.steps):
        timed[timing.shape.global_batch] = timing  # of two splits of one batch, the one that was run longer
    return StepCosts(
        world=limits.world,
        micro_batch=limits.micro_batch,
        timed=timed,
        model=fitted[0] if fitted else None,
        model_micro_batch=fitted[1] if fitted else limits.micro_batch,
        why_not="" if fitted else _why_not(measured),
    )


def _why_not(measured: list[Timing]) -> str:
    if not measured:
        return "too few step times were recorded"
    shapes = {(timing.shape.micro_batch, timing.shape.micro_batches) for timing in measured}
    if len({count for _, count in shapes}) == 1:
        size, count = max(shapes)
        split = f"{count} micro-batch{'' if count == 1 else 'es'} of {size} a rank"
        return f"every timed step had {split}, so its fixed cost cannot be told from that of a micro-batch"
    return (
        f"the steps timed ({', '.join(_timed(timing) for timing in measured)}) do not tell a fixed cost from that of a "
        f"micro-batch"
    )


def _timed(timing: Timing) -> str:
    return f"{text.duration(timing.median)} at batch {timing.shape.global_batch:,}"
