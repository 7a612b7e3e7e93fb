"""Times the steps of a loop on one rank, without waiting for the device: marks are set now and read when a decision is.

    stopwatch.restart()                     when training begins, and after evaluating or saving
    while ...:
        for micro_batch in ...:
            stopwatch.micro_batch(plan)     the marks that count are those of the second and of the last
            ...
        optimizer.step()
        controller.commit(plan, measurement, stopwatch.lap())

A lap runs from the end of one step to the end of the next, so it has everything in it that a step costs: data, the
optimizer, logging. On a GPU the marks are events of its current stream.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from adabatch.plan import BatchPlan
from adabatch.throughput import Lap

# A moment: seconds of the host's clock, or an event in the device's stream.
Mark = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class PendingLap:
    """One step's marks on this rank; ``begin`` is ``None`` when something else lay before the step.

    ``second`` and ``last`` are where its second and its last micro-batch began, where it has three or more.
    """

    begin: Mark | None
    second: Mark | None
    last: Mark | None
    end: Mark

    def read(self) -> Lap:
        """The times; on a GPU this waits until the step has run."""
        if self.begin is None:
            return Lap(math.inf, 0.0)
        quiet = 0.0 if self.second is None or self.last is None else _between(self.second, self.last)
        return Lap(_between(self.begin, self.end), quiet)


class Stopwatch:
    """Marks the steps of a run on ``device``."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        cuda = torch.device(device).type == "cuda"
        self._now: Callable[[], Mark] = _event if cuda else time.perf_counter
        self._begin: Mark | None = None
        self._begun = 0
        self._second: Mark | None = None
        self._last: Mark | None = None

    def restart(self) -> None:
        """The next step begins here: what went on since the last one is no part of it."""
        self._begin = self._now()
        self._begun, self._second, self._last = 0, None, None

    def micro_batch(self, plan: BatchPlan) -> None:
        """One of the plan's micro-batches begins."""
        self._begun += 1
        if plan.micro_batches < 3:
            return
        if self._begun == 2:
            self._second = self._now()
        elif self._begun == plan.micro_batches:
            self._last = self._now()

    def lap(self) -> PendingLap:
        """The step ends here, and the next one begins."""
        ended = PendingLap(self._begin, self._second, self._last, self._now())
        self._begin = ended.end
        self._begun, self._second, self._last = 0, None, None
        return ended


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Mark, end: Mark) -> float:
    """Seconds from one mark to the other."""
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1000
