"""How long a step takes: a fixed cost per step plus a cost per micro-batch, fitted to the step times of a run.

seconds per step = fixed + micro_batches * per_micro_batch. Accumulation on the same hardware saves time only through
the fixed part (exposed communication, optimizer, launches), which is paid once per step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: ``fixed`` per step and ``per_micro_batch`` for each micro-batch of a rank."""

    fixed: float
    per_micro_batch: float

    def seconds(self, micro_batches: float) -> float:
        return self.fixed + self.per_micro_batch * micro_batches


def fit_step_time(observations: Iterable[tuple[float, float, float]]) -> StepTime | None:
    """Fit the step time from ``(micro_batches, steps, seconds for these steps)``.

    Observations are reduced to the median seconds per step at each number of micro-batches, which stalls and
    evaluation pauses do not move; the line through the medians is weighted by the steps behind each. A fitted fixed
    cost below 0 is noise and is reported as 0.

    Returns:
        The model, or ``None`` when fewer than two different numbers of micro-batches were seen: the two costs cannot
        then be told apart.
    """
    by_count: dict[float, list[tuple[float, float]]] = {}
    for micro_batches, steps, seconds in observations:
        if steps > 0 and seconds > 0:
            by_count.setdefault(micro_batches, []).append((seconds / steps, steps))
    if len(by_count) < 2:
        return None
    points = [
        (count, statistics.median(value for value, _ in seen), sum(steps for _, steps in seen))
        for count, seen in sorted(by_count.items())
    ]
    total = sum(weight for _, _, weight in points)
    mean_x = sum(weight * x for x, _, weight in points) / total
    mean_y = sum(weight * y for _, y, weight in points) / total
    spread = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    slope = sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points) / spread
    slope = min(max(slope, 0.0), mean_y / mean_x)  # keeps both costs at 0 or above, on the weighted mean
    return StepTime(fixed=mean_y - slope * mean_x, per_micro_batch=slope)
