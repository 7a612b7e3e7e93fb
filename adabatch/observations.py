"""What a run has seen so far: its measurements and step times, handed over unread, and what they come to once read.

Reading waits for the device, so it happens when a decision is due and not before. All that is remembered is plain JSON
data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol

from adabatch import plan as planning
from adabatch import regression
from adabatch.evidence import Estimator, Evidence, Reading
from adabatch.ledger import Decision
from adabatch.noise import Measurement
from adabatch.plan import BatchLimits, BatchPlan
from adabatch.policies import Price
from adabatch.throughput import ReadableLap, StepTime, Throughput, of_slowest
from adabatch.verdicts import Verdict

# Of so many measured windows, one is compared with the optimizer's momentum.
DRIFT_EVERY = 8
# The loss that policies see is averaged over so many decisions.
LOSS_DECISIONS = 4
# A loss above this is left out, as one that was not given: sums would leave the range of floats.
LARGEST_LOSS = 1e120
# Of so many steps, one is split into smaller micro-batches while a policy lacks the price of a step.
VARY_EVERY = 8


class Readable(Protocol):
    """A measurement that may still be on the device; ``read`` may wait for it."""

    def read(self) -> Measurement: ...


class TooManySkipped(RuntimeError):
    """Several windows in a row had a gradient that was not finite."""


@dataclass(slots=True)
class Losses:
    """What the losses of the windows come to, in plain numbers.

    Attributes:
        skipped_in_a_row: windows with a non-finite gradient, up to now.
        loss, loss_weight: exponentially weighted sum of the training loss, and of its weights.
        regression: what the loss did before and since the last change of the batch.
    """

    skipped_in_a_row: int = 0
    loss: float = 0.0
    loss_weight: float = 0.0
    regression: Mapping[str, Any] = field(default_factory=regression.init)

    @property
    def mean(self) -> float | None:
        """Of the last windows; ``None`` before the first."""
        return self.loss / self.loss_weight if self.loss_weight else None

    def take_in(self, loss: float, samples: int, decide_every: int) -> None:
        """Average the loss of one more window over ``LOSS_DECISIONS`` decisions."""
        if not abs(loss) < LARGEST_LOSS:
            return
        kept = math.exp(-samples / planning.samples_in(LOSS_DECISIONS * decide_every, samples))
        self.loss = kept * self.loss + loss * samples
        self.loss_weight = kept * self.loss_weight + samples
        self.regression = regression.update(self.regression, loss, samples)

    def require_few_skipped(self, most: int, step: int, sample: int) -> None:
        """The run can go on after the window of ``step``, which was skipped.

        Args:
            most: windows skipped in a row that end the run.
            sample: where the run is.

        Raises:
            TooManySkipped: when there were so many.
        """
        if self.skipped_in_a_row >= most:
            raise TooManySkipped(
                f"the gradient was not finite in {self.skipped_in_a_row} windows in a row, the last at step {step}; "
                f"lower the learning rate, look for bad samples before sample {sample}, or raise max_skipped={most}"
            )


# How a saved state names them, among what else lies between two decisions.
LOSSES = frozenset(one.name for one in fields(Losses))


class Observations:
    """Takes in what the steps of a run measured and how long they took.

    Args:
        noise: the estimator, or several, of which decisions go by the first; ``None`` measures nothing.
        limits: world size, micro-batch and rounding; the bounds do not matter here.
        measure_every: steps between two measured ones.
        align_every: steps between two whose alignments are measured, where an estimator asks for them.

    Attributes:
        reading: what the measurements come to, as of the last one that was read.
        losses: what their losses come to.
        price: what a step costs beside its samples; ``None`` before enough steps were timed.
        telling_batch: the global batch whose steps would tell the price, where the present one's cannot.
    """

    def __init__(
        self,
        noise: Estimator | Sequence[Estimator] | None,
        limits: BatchLimits,
        *,
        measure_every: int,
        align_every: int,
    ) -> None:
        self._limits = limits
        self._measure_every, self._align_every = measure_every, align_every
        self._evidence: Evidence | None = None
        self._measured: dict[str, Any] | None = None
        if noise is not None:
            self._evidence = Evidence(noise if isinstance(noise, Sequence) else [noise])
            self._measured = self._evidence.init()
        halved = self._evidence is not None and measure_every == 1 and planning.halved_alone(limits)
        self._throughput = Throughput(limits, fewest=2 if halved else 1)
        self._timed: Mapping[str, Any] = self._throughput.init()
        self._unread: list[tuple[BatchPlan, Readable]] = []
        self._laps: list[tuple[BatchPlan, ReadableLap]] = []
        self.reading = Reading()
        self.losses = Losses()
        self.price: Price | None = None
        self.telling_batch: int | None = None

    # -- before a step

    @property
    def by_alignment(self) -> bool:
        """Whether the estimate that decisions go by comes from alignments."""
        return self._evidence is not None and self._evidence.decides_by_alignment

    def asked(self, step: int, batch: int) -> dict[str, bool]:
        """What is to be measured in ``step`` with ``batch`` samples, as ``plan.split`` takes it."""
        if self._evidence is None:
            return {"measure": False, "drift": False, "align": False}
        measure = batch >= self._limits.fewest_measurable and step % self._measure_every == 0
        align = batch >= self._limits.fewest_alignable and step % self._align_every == 0
        return {
            "measure": measure,
            "drift": measure and step % (self._measure_every * DRIFT_EVERY) == 0,
            "align": align and self._evidence.aligned,
        }

    def varied(self, plan: BatchPlan) -> BatchPlan:
        """The same step, now and then, in smaller micro-batches: while these can tell a price that is not resolved."""
        if self.price is None or self.price.resolved or plan.step % VARY_EVERY != VARY_EVERY // 2:
            return plan
        varied = planning.varied(plan, self._limits)
        return varied if self._throughput.teaches(self._timed, varied) else plan

    # -- after it

    def hand_over(self, plan: BatchPlan, measurement: Readable | None, timing: ReadableLap | None) -> None:
        """Keep what came of the step until it is read."""
        if measurement is not None:
            self._unread.append((plan, measurement))
        if timing is not None:
            self._laps.append((plan, timing))

    def read(self, decide_every: int) -> Iterator[tuple[BatchPlan, Measurement]]:
        """Each measurement that was handed over, as it is read and taken in; waits for the device."""
        if not self._unread:
            return
        while self._unread:
            plan, pending = self._unread.pop(0)
            measurement = pending.read()
            self._take_in(plan, measurement, decide_every)
            yield plan, measurement
        self._evaluate()

    def read_laps(self, slowest: Callable[[list[float]], list[float]], batch: int) -> None:
        """Take in the times of all steps so far, of the slowest rank; waits for the device, and for the other ranks.

        Args:
            slowest: gives every rank the largest over the ranks of each number in a list.
            batch: global batch that the price is for.
        """
        if not self._laps:
            return
        laps, self._laps = self._laps, []
        plans = [plan for plan, _ in laps]
        for plan, lap in zip(plans, of_slowest(plans, [lap.read() for _, lap in laps], slowest), strict=True):
            self._timed = self._throughput.update(self._timed, plan, lap)
        self.find_price(batch)

    def find_price(self, batch: int) -> None:
        """Set the price to that of a step of ``batch`` samples, by the times that were taken in."""
        self.price = self._throughput.price(self._timed, batch)
        self.telling_batch = self._throughput.telling_batch(self._timed, batch)

    def step_time(self) -> StepTime | None:
        """How long a step takes, by the same times."""
        known = self._throughput.value(self._timed)
        return known.step_time if known else None

    # -- what is recorded with a decision

    def estimate_dict(self) -> dict[str, Any] | None:
        """The estimate that decisions go by, as plain numbers."""
        return self.reading.estimate.to_dict() if self.reading.estimate else None

    def beside(self, found: Verdict) -> Verdict:
        """The same with what it goes by, and a word where the noise scale may only be read as a thermometer."""
        guards = self.reading.guards
        caution = f" (thermometric: {guards.thermometric})" if guards and guards.thermometric else ""
        return replace(
            found,
            reason=found.reason + caution,
            estimate=self.estimate_dict(),
            guards=guards.to_dict() if guards else None,
        )

    # -- whether a change was a mistake

    def end_block(self) -> None:
        """End a block of losses, as every decision does."""
        self.losses.regression = regression.close(self.losses.regression)

    def regressed(self) -> regression.Regression | None:
        """The last change of the batch, when the loss is significantly worse since."""
        return regression.value(self.losses.regression)

    def changed(self, decision: Decision, in_force: Mapping[str, Any] | None) -> None:
        """Watch what comes of ``decision``, a change from a batch that the estimate ``in_force`` had led to."""
        self.losses.regression = regression.changed(self.losses.regression, decision.previous, in_force)
        self.find_price(decision.batch)

    # -- saving and going on

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON data; what is still unread is not in it."""
        return {"measured": self._measured, "timed": self._timed, "memory": asdict(self.losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, of which further keys and memories are another's; the price is left as it is."""
        if self._evidence is not None:
            self._measured = self._evidence.restored(state["measured"])
        self._evaluate()
        self._timed = self._throughput.restored(state.get("timed"))
        self.losses = Losses(**{name: value for name, value in state["memory"].items() if name in LOSSES})
        self._unread, self._laps = [], []

    # -- inside

    def _take_in(self, plan: BatchPlan, measurement: Measurement, decide_every: int) -> None:
        if not measurement.finite:
            self.losses.skipped_in_a_row += 1
            return
        self.losses.skipped_in_a_row = 0
        self.losses.take_in(measurement.loss, plan.global_batch, decide_every)
        if self._evidence is not None:
            self._measured = self._evidence.update(self._measured, measurement, plan)

    def _evaluate(self) -> None:
        if self._evidence is not None:
            self.reading = self._evidence.value(self._measured)
