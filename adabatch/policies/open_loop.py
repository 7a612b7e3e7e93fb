"""Batches that are decided beforehand, as functions of the progress: one number, schedules, a recorded ledger.

A window takes the batch of the place at which it begins. Damping has no part in this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from adabatch.ledger import Ledger
from adabatch.policies.protocol import Facts, State, Stateless, Wanted, exactly
from adabatch.progress import parse_count

if TYPE_CHECKING:
    from adabatch.schedules import ScheduleLike

UNITS = ("samples", "tokens")
# A step that is due by less than this is due: powers of the factor are not exact.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Fixed(Stateless):
    """One global batch for the whole run."""

    global_batch: int
    name: ClassVar[str] = "fixed"

    @property
    def batches(self) -> tuple[int, ...]:
        return (self.global_batch,)

    def value(self, state: State, facts: Facts) -> Wanted:
        return exactly(self.global_batch, f"fixed batch {self.global_batch}")


@dataclass(frozen=True, slots=True)
class Observe(Stateless):
    """Measure only: the batch stays where it is, whatever the noise scale."""

    name: ClassVar[str] = "observe"

    def value(self, state: State, facts: Facts) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Stages(Stateless):
    """A schedule of thresholds and batches, in samples or tokens: ``((0, 16), (1000, 32), (4000, 64))``.

    ``Stages.parse`` reads "0:16, 1k:32, 4k:64".

    Raises:
        ValueError: when the thresholds do not begin at 0 and rise strictly, or a batch is below 1.
    """

    stages: tuple[tuple[int, int], ...]
    unit: str = "samples"
    name: ClassVar[str] = "stages"

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.stages]
        if not starts or starts[0] != 0 or any(b <= a for a, b in zip(starts, starts[1:])):
            raise ValueError(f"policy.stages must begin at 0 and rise strictly, got thresholds {starts}")
        _require_unit(self.unit)
        if bad := [batch for _, batch in self.stages if batch < 1]:
            raise ValueError(f"every batch of policy.stages must be at least 1, got {bad}")

    @classmethod
    def parse(cls, text: str, unit: str = "samples") -> Stages:
        """Read ``"0:16, 1k:32 4k:64"``: pairs of threshold and batch, with suffixes K, M, B, T."""
        stages = []
        for pair in text.replace(",", " ").split():
            start, colon, batch = pair.partition(":")
            if not colon:
                raise ValueError(f"policy.stages: {pair!r} is no pair of threshold:batch, such as '1k:32'")
            stages.append((parse_count(start), parse_count(batch)))
        return cls(tuple(stages), unit)

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(batch for _, batch in self.stages)

    def value(self, state: State, facts: Facts) -> Wanted:
        position = facts.progress.in_unit(self.unit)
        start, wanted = [stage for stage in self.stages if stage[0] <= position][-1]
        return exactly(wanted, f"stage from {start:,} {self.unit}: batch {wanted}")


@dataclass(frozen=True, slots=True)
class Ramp(Stateless):
    """From one batch to another in equal increments, each held for as long: ``--rampup-batch-size`` of Megatron-LM.

    Args:
        first_batch: where it begins.
        final_batch: where it ends, and stays.
        increment: samples by which the batch grows each time.
        length: of the whole ramp, in ``unit``.
        unit: ``samples`` or ``tokens``.

    Raises:
        ValueError: when the batches do not rise by whole increments, or the ramp has no length.
    """

    first_batch: int
    final_batch: int
    increment: int
    length: int
    unit: str = "samples"
    name: ClassVar[str] = "ramp"

    def __post_init__(self) -> None:
        _require_unit(self.unit)
        if not (self.first_batch >= 1 and self.increment >= 1 and self.length >= 1):
            raise ValueError(
                f"policy.first_batch, policy.increment and policy.length must be at least 1, got "
                f"{self.first_batch}, {self.increment} and {self.length}"
            )
        rise = self.final_batch - self.first_batch
        if rise < 1 or rise % self.increment:
            nearest = self.first_batch + max(rise // self.increment, 1) * self.increment
            raise ValueError(
                f"policy.final_batch={self.final_batch} must be policy.first_batch={self.first_batch} and some whole "
                f"increments of {self.increment}: {nearest} or {nearest + self.increment} would be"
            )

    @property
    def _increments(self) -> int:
        return (self.final_batch - self.first_batch) // self.increment

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(range(self.first_batch, self.final_batch + 1, self.increment))

    def value(self, state: State, facts: Facts) -> Wanted:
        taken = min(facts.progress.in_unit(self.unit) * self._increments // self.length, self._increments)
        wanted = self.first_batch + taken * self.increment
        increment = f"increment {taken} of {self._increments}"
        return exactly(wanted, f"ramp over {self.length:,} {self.unit}, {increment}: batch {wanted}")


@dataclass(frozen=True, slots=True)
class Seesaw(Stateless):
    """Where the learning rate would fall to a share, the batch rises by one over it, and the rate falls by its root.

    From arXiv 2510.14717, after the warm-up: B = first_batch x peak / schedule. The root is what the ``sqrt`` scaling
    rule makes of it: schedule x sqrt(B / first_batch) = sqrt(schedule). At a cosine over a quarter wave this saves
    1 - 2/pi of the steps, the paper's limit; at one over a half wave, as of ``Schedule("cosine")``, 1/2. It holds below
    the critical batch, so set the cap by that.

    Args:
        first_batch: during warm-up and at the peak.
        schedule: of the learning rate, which also says where warm-up ends.
        cap: largest batch over the first one; from there on the rate falls as the schedule does.
        factor: the batch moves by powers of it; ``None`` for any batch that the ranks can make.

    Raises:
        ValueError: for a first batch below 1, a cap or factor not above 1, or a schedule that is 0 where warm-up ends.
    """

    first_batch: int
    schedule: ScheduleLike
    cap: float = 16.0
    factor: float | None = None
    name: ClassVar[str] = "seesaw"

    def __post_init__(self) -> None:
        if self.first_batch < 1:
            raise ValueError(f"policy.first_batch must be at least 1, got {self.first_batch}")
        if not (1 < self.cap < math.inf and (self.factor is None or 1 < self.factor <= self.cap)):
            raise ValueError(
                f"policy.cap must be above 1 and finite, and policy.factor above 1 and at most the cap (or null), got "
                f"{self.cap} and {self.factor}"
            )
        if not 0 < self._peak < math.inf:
            raise ValueError(
                f"policy=seesaw weighs the learning rate against its peak at the end of warm-up, and there it is "
                f"{self._peak}; give a schedule that is above 0 at {self.schedule.warmup:,} {self.schedule.unit}"
            )

    @property
    def _peak(self) -> float:
        return self.schedule.value(self.schedule.warmup)

    @property
    def batches(self) -> tuple[int, ...]:
        return (self.first_batch,)

    def value(self, state: State, facts: Facts) -> Wanted:
        position = facts.progress.in_unit(self.schedule.unit)
        share = self.schedule.value(position) / self._peak if position > self.schedule.warmup else 1.0
        growth = self._stepped(min(max(1 / share, 1.0), self.cap) if share > 0 else self.cap)
        wanted = self.first_batch * growth
        return exactly(wanted, f"learning-rate schedule at {share:.3g} of its peak: batch {wanted:,.6g}")

    def _stepped(self, growth: float) -> float:
        if self.factor is None:
            return growth
        return self.factor ** math.floor(math.log(growth) / math.log(self.factor) + _ROUNDING)


@dataclass(frozen=True, slots=True)
class LateSwitch(Stateless):
    """One batch for most of the run, and a larger one for the rest (arXiv 2602.14208).

    Args:
        first_batch: up to the switch.
        final_batch: from there on.
        at: where that is, in ``unit``.
        unit: ``samples`` or ``tokens``.

    Raises:
        ValueError: for a batch or position below 1.
    """

    first_batch: int
    final_batch: int
    at: int
    unit: str = "samples"
    name: ClassVar[str] = "late_switch"

    def __post_init__(self) -> None:
        _require_unit(self.unit)
        if not min(self.first_batch, self.final_batch, self.at) >= 1:
            raise ValueError(
                f"policy.first_batch, policy.final_batch and policy.at must be at least 1, got "
                f"{self.first_batch}, {self.final_batch} and {self.at}; for one batch throughout there is policy=fixed"
            )

    @property
    def batches(self) -> tuple[int, ...]:
        return (self.first_batch, self.final_batch)

    def value(self, state: State, facts: Facts) -> Wanted:
        late = facts.progress.in_unit(self.unit) >= self.at
        wanted = self.final_batch if late else self.first_batch
        return exactly(wanted, f"{'from' if late else 'until'} {self.at:,} {self.unit}: batch {wanted}")


@dataclass(frozen=True, slots=True)
class Replay(Stateless):
    """A recorded or hand-edited ledger, batch by batch, without rounding; past its end, its last batch."""

    ledger: Ledger
    name: ClassVar[str] = "replay"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.ledger.segments:
            raise ValueError("policy.ledger has no step to replay")

    def value(self, state: State, facts: Facts) -> Wanted:
        wanted = self.ledger.scheduled_batch(facts.progress.samples)
        return exactly(wanted, f"replayed from the ledger at sample {facts.progress.samples:,}")

    def recorded_estimate(self, samples: int) -> Mapping[str, Any] | None:
        """The estimate recorded with the last change of the batch at or before ``samples``."""
        decision = self.ledger.decision_before(samples)
        return decision.estimate if decision else None


def _require_unit(unit: str) -> None:
    if unit not in UNITS:
        raise ValueError(f"policy.unit must be {' or '.join(UNITS)}, got {unit!r}")
