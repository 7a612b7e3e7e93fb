"""Learning-rate schedules as functions of samples or tokens: multipliers of the configured rate, between 0 and 1.

A schedule is a closed form of how far the run has come, never of the number of steps, so that it means the same at
every batch. Past its horizon it stays at its final value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from adabatch.progress import Progress

SHAPES = ("constant", "cosine", "linear", "wsd")
SCHEDULE_UNITS = ("samples", "tokens")


class ScheduleLike(Protocol):
    """What the controller asks of a schedule; ``adabatch.optimizers.TorchSchedule`` is another one."""

    unit: str
    warmup: int

    def value(self, position: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up, then a shape that ends at ``final`` times the configured rate.

    Args:
        shape: ``constant``; ``cosine`` or ``linear`` decay from the end of warm-up to the horizon; ``wsd``
            (warm-up, stable, linear decay over the last ``decay_share`` of the horizon).
        horizon: where the decay ends, in ``unit``; may be ``None`` for ``constant``.
        warmup: length of the linear warm-up, in ``unit``.
        final: multiplier at the horizon.
        decay_share: share of the horizon that ``wsd`` decays over.
        unit: ``samples`` or ``tokens``.

    Raises:
        ValueError: for an unknown shape or unit, or lengths that do not fit one another.
    """

    shape: str = "constant"
    horizon: int | None = None
    warmup: int = 0
    final: float = 0.0
    decay_share: float = 0.2
    unit: str = "samples"

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"lr_schedule.shape must be one of {', '.join(SHAPES)}, got {self.shape!r}")
        if self.unit not in SCHEDULE_UNITS:
            raise ValueError(f"lr_schedule.unit must be samples or tokens (steps change length), got {self.unit!r}")
        if self.horizon is None and self.shape != "constant":
            raise ValueError(
                f"lr_schedule.shape={self.shape} decays towards a horizon, and none is known: set stop.samples, "
                f"stop.tokens or lr_schedule.horizon, or use shape=constant"
            )
        if self.warmup < 0 or (self.horizon is not None and self.warmup >= self.horizon):
            raise ValueError(f"lr_schedule.warmup={self.warmup} must lie in [0, horizon={self.horizon})")
        if not 0 <= self.final <= 1 or not 0 < self.decay_share <= 1:
            raise ValueError(
                f"lr_schedule.final must be in [0, 1] and decay_share in (0, 1], "
                f"got {self.final} and {self.decay_share}"
            )

    def value(self, position: float) -> float:
        """The multiplier at ``position`` samples or tokens."""
        if position < self.warmup:
            return position / self.warmup
        if self.shape == "constant" or self.horizon is None:
            return 1.0
        return self.final + (1 - self.final) * self._remaining(min(position, self.horizon))

    def decaying(self, position: float) -> bool:
        """Whether the decay has begun at ``position``."""
        return self.horizon is not None and self.shape != "constant" and position > self._decay_start()

    def _decay_start(self) -> float:
        assert self.horizon is not None
        return max(self.warmup, self.horizon * (1 - self.decay_share)) if self.shape == "wsd" else self.warmup

    def _remaining(self, position: float) -> float:
        """1 where the decay starts, 0 at the horizon; measured from the horizon, so that the end is exact."""
        assert self.horizon is not None
        start = self._decay_start()
        left = (self.horizon - max(position, start)) / (self.horizon - start)
        return math.sin(0.5 * math.pi * left) ** 2 if self.shape == "cosine" else left


def middle_of_window(progress: Progress, batch: int, unit: str, tokens_per_sample: int | None) -> float:
    """The position of the middle of the next ``batch`` samples, in ``unit``; tokens need ``tokens_per_sample``."""
    if unit == "samples":
        return progress.samples + batch / 2
    assert tokens_per_sample is not None
    return progress.tokens + batch * tokens_per_sample / 2
