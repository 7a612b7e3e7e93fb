"""Marks on the host's clock and, with stand-ins for CUDA's events, on a device's."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

from adabatch.plan import BatchLimits, BatchPlan, split
from adabatch.stopwatch import Stopwatch


def plan_of(micro_batches: int) -> BatchPlan:
    limits = BatchLimits(1, 4)
    return split(step=0, first_sample=0, global_batch=4 * micro_batches, limits=limits, measure=False)


class Ticking:
    """A clock that shows the next of the given times whenever it is looked at."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def __call__(self) -> float:
        return self.times.pop(0)


def watch(monkeypatch: pytest.MonkeyPatch, *times: float) -> Stopwatch:
    monkeypatch.setattr(time, "perf_counter", Ticking(*times))
    return Stopwatch("cpu")


def step(stopwatch: Stopwatch, plan: BatchPlan) -> Any:
    for _ in range(plan.micro_batches):
        stopwatch.micro_batch(plan)
    return stopwatch.lap()


def test_a_lap_runs_from_the_end_of_a_step_to_the_end_of_the_next(monkeypatch) -> None:
    # begins at 10; micro-batches 2 and 4 at 11 and 14; ends at 16; and the next step, of 3
    stopwatch = watch(monkeypatch, 10.0, 11.0, 14.0, 16.0, 18.0, 18.5, 21.0)
    stopwatch.restart()
    first, second = step(stopwatch, plan_of(4)), step(stopwatch, plan_of(3))
    assert (first.read().seconds, first.read().quiet) == (6.0, 3.0)
    assert (second.read().seconds, second.read().quiet) == (5.0, 0.5)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_two_micro_batches_have_none_in_between_and_need_no_look_at_the_clock(monkeypatch, micro_batches) -> None:
    stopwatch = watch(monkeypatch, 10.0, 14.0)
    stopwatch.restart()
    lap = step(stopwatch, plan_of(micro_batches)).read()
    assert (lap.seconds, lap.quiet) == (4.0, 0.0)


def test_what_lies_before_a_restart_is_no_part_of_the_step(monkeypatch) -> None:
    stopwatch = watch(monkeypatch, 10.0, 14.0, 100.0, 103.0)
    stopwatch.restart()
    step(stopwatch, plan_of(1))
    stopwatch.restart()
    assert step(stopwatch, plan_of(1)).read().seconds == 3.0


def test_a_step_without_a_beginning_has_no_time(monkeypatch) -> None:
    stopwatch = watch(monkeypatch, 1.0, 2.0)
    assert step(stopwatch, plan_of(1)).read().seconds == math.inf
    assert step(stopwatch, plan_of(1)).read().seconds == 1.0


class Event:
    """Stands in for a CUDA event: a device whose time passes as it is told, and which is waited for when read."""

    now = 0.0
    waits = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing, "events without timing have no times"

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        Event.waits += 1

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at - self.at)


def test_on_a_gpu_the_marks_are_events_that_are_waited_for_when_they_are_read(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.now, Event.waits = 1.0, 0
    stopwatch, plan = Stopwatch("cuda"), plan_of(3)
    stopwatch.restart()
    for Event.now in (1.25, 1.5, 2.75):
        stopwatch.micro_batch(plan)
    Event.now = 4.0
    lap = stopwatch.lap()
    assert Event.waits == 0
    assert (lap.read().seconds, lap.read().quiet) == (3.0, 1.25)
    assert Event.waits > 0


def test_marking_a_step_costs_less_than_20_microseconds() -> None:
    stopwatch, plan = Stopwatch("cpu"), plan_of(4)
    stopwatch.restart()
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(200):
            step(stopwatch, plan)
        best = min(best, (time.perf_counter() - began) / 200)
    assert best < 20e-6
