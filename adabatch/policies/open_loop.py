"""Batches that are decided beforehand, as functions of the progress: one number, stages, a recorded ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from adabatch.ledger import Ledger
from adabatch.policies.protocol import Facts, State, Stateless, Wanted, exactly
from adabatch.progress import parse_count


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

    A window takes the batch of the stage in which it begins. ``Stages.parse`` reads "0:16, 1k:32, 4k:64".

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
        if self.unit not in ("samples", "tokens"):
            raise ValueError(f"policy.unit must be samples or tokens, got {self.unit!r}")
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
