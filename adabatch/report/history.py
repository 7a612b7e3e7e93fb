"""What happened in a run, worked out from its records: stretches of one batch, step times, efficiency spent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from adabatch.plan import data_efficiency, samples_in
from adabatch.runlog import Metrics, text
from adabatch.runlog.reader import Record
from adabatch.throughput import Observation, StepTime, fit, typical

MIN_TIMED = 3  # intervals behind a median step time


@dataclass(frozen=True, slots=True)
class Shape:
    """How a step was carried out: ``world`` ranks, each running ``micro_batches`` of ``micro_batch`` samples."""

    global_batch: int
    world: int
    micro_batch: int
    micro_batches: int


@dataclass(slots=True)
class Stretch:
    """Consecutive steps of one global batch. ``shape`` is that of its last record, ``None`` when it has none."""

    global_batch: int
    first_step: int
    first_sample: int
    steps: int = 0
    samples: int = 0
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Step times of one shape: the median and quartiles in seconds per step, over ``intervals`` between records.

    ``variance`` is that of the median.
    """

    shape: Shape
    median: float
    low: float
    high: float
    intervals: int
    steps: int
    variance: float

    @property
    def samples_per_second(self) -> float:
        return self.shape.global_batch / self.median


def shape_of(record: Record) -> Shape | None:
    """The shape of a ``step`` record's step, ``None`` when the record does not say all of it."""
    found: list[Any] = [record.get(key) for key in ("global_batch", "world", "micro_batch", "micro_batches")]
    return Shape(*found) if all(isinstance(value, int) and value > 0 for value in found) else None


def changes(metrics: Metrics) -> list[Record]:
    """The decisions that changed the batch."""
    return [record for record in metrics.decisions if is_change(record)]


def is_change(decision: Record) -> bool:
    return bool(decision.get("changed", decision.get("previous") != decision.get("batch")))


def taken_controls(metrics: Metrics) -> list[Record]:
    """The requests to the running job that changed something."""
    return [record for record in metrics.controls if record.get("outcome") == "taken" and record.get("changes")]


def taken_calibrations(metrics: Metrics) -> list[Record]:
    """The calibrations inside the run that it went on by."""
    return [record for record in metrics.calibrations if record.get("outcome") == "taken"]


def latest_control(metrics: Metrics) -> Record | None:
    """The last change of the running job, calibrations among them, that no later launch stands above."""
    started = (metrics.start or {}).get("step", 0)
    found = [record for record in (*taken_controls(metrics), *taken_calibrations(metrics)) if record["step"] > started]
    return max(found, key=lambda record: record["step"], default=None)


def start_batch(metrics: Metrics) -> int | None:
    """The global batch of the first step: what the first decision found, or that of the first record."""
    first_step = metrics.steps[0] if metrics.steps else None
    first = metrics.decisions[0] if metrics.decisions else None
    if first and first.get("previous") and (first_step is None or first["step"] <= first_step["step"]):
        return int(first["previous"])
    return first_step.get("global_batch") if first_step else None


def stretches(metrics: Metrics) -> list[Stretch]:
    """The schedule as it was run. Changes are placed exactly, by the decisions' own sample counts."""
    found: list[Stretch] = []
    step = sample = 0
    for mark in _marks(metrics):
        steps, samples = mark.step - step, mark.sample - sample
        before = _steps_before_the_last(found, steps, samples, mark.global_batch)
        if before:
            _extend(found[-1], before, samples - mark.global_batch)
            steps, samples = 1, mark.global_batch
        if steps and (not found or found[-1].global_batch != mark.global_batch):
            found.append(Stretch(mark.global_batch, mark.step - steps, mark.sample - samples))
        if found:
            _extend(found[-1], steps, samples)
            found[-1].shape = mark.shape or found[-1].shape
        step, sample = mark.step, mark.sample
    return found


@dataclass(frozen=True, slots=True)
class _Mark:
    """A point of the run that is known exactly, and the global batch of the step that ended there."""

    step: int
    sample: int
    global_batch: int
    shape: Shape | None = None


def _marks(metrics: Metrics) -> list[_Mark]:
    """Step records, changes and the end of the run by step; a change comes after the record of the same step."""
    marks = [
        _Mark(r["step"], r["samples"], r["global_batch"], shape_of(r)) for r in metrics.steps if r.get("global_batch")
    ]
    marks += [_Mark(r["step"], r["samples"], r["previous"]) for r in changes(metrics) if r.get("previous")]
    marks.sort(key=lambda mark: mark.step)
    last, in_force = metrics.last, _batch_in_force(metrics)
    if marks and last and in_force and last["step"] > marks[-1].step:
        whole = samples_in(last["step"] - marks[-1].step - 1, in_force)
        left = last["samples"] - marks[-1].sample - whole
        marks.append(_Mark(last["step"], last["samples"], left if 0 < left < in_force else in_force))
    return marks


def _batch_in_force(metrics: Metrics) -> int | None:
    """The global batch after the last step record and the last change."""
    steps, changed = metrics.steps[-1:], changes(metrics)[-1:]
    if changed and (not steps or changed[0]["step"] >= steps[0]["step"]):
        return changed[0].get("batch")
    return steps[0].get("global_batch") if steps else None


def _steps_before_the_last(found: list[Stretch], steps: int, samples: int, batch: int) -> int:
    """How many of ``steps`` belong to the stretch before, when only the last of them had ``batch``.

    Records of every n-th step hide that; it is how a run ends when its last step is cut short. The samples tell.
    """
    if not found or steps < 2 or samples != samples_in(steps - 1, found[-1].global_batch) + batch:
        return 0
    return steps - 1


def _extend(stretch: Stretch, steps: int, samples: int) -> None:
    stretch.steps += steps
    stretch.samples += samples


def final_batch(metrics: Metrics) -> int | None:
    """The batch in force at the end; a last step that was cut short to end the run does not count."""
    run = stretches(metrics)
    decided = {record["step"] for record in changes(metrics)}
    if len(run) > 1 and run[-1].steps == 1 and run[-1].first_step not in decided:
        return run[-2].global_batch
    return run[-1].global_batch if run else None


def timings(metrics: Metrics) -> list[Timing]:
    """Step times by shape, in the order of global batch, from pairs of records with nothing in between."""
    seen: dict[Shape, list[tuple[float, int]]] = {}
    for shape, steps, seconds in _timed_intervals(metrics):
        seen.setdefault(shape, []).append((seconds / steps, steps))
    return sorted(
        (_timing(shape, values) for shape, values in seen.items()), key=lambda timing: timing.shape.global_batch
    )


def _timing(shape: Shape, values: list[tuple[float, int]]) -> Timing:
    seconds = sorted(value for value, _ in values)
    median, variance = typical(seconds)
    low, high = seconds[len(seconds) // 4], seconds[(3 * len(seconds)) // 4]
    return Timing(shape, median, low, high, len(seconds), sum(steps for _, steps in values), variance)


def _timed_intervals(metrics: Metrics) -> Iterator[tuple[Shape, int, float]]:
    """(shape, steps, seconds) between neighbouring step records that one process wrote at one batch."""
    breaks = [record.get("from_step", record["step"]) for record in metrics.resumes]
    for before, after in pairwise(metrics.steps):
        steps, shape = after["step"] - before["step"], shape_of(after)
        if steps < 1 or shape is None or None in (before.get("seconds"), after.get("seconds")):
            continue
        one_batch = after["samples"] - before["samples"] == samples_in(steps, shape.global_batch)
        restarted = any(before["step"] <= step < after["step"] for step in breaks)
        seconds = after["seconds"] - before["seconds"]
        if one_batch and not restarted and seconds > 0:
            yield shape, steps, seconds


def step_time_model(metrics: Metrics, measured: list[Timing]) -> tuple[StepTime, int] | None:
    """What a step costs on the largest number of ranks with step times, and the size of a full micro-batch there.

    As the run itself found, which saw the times inside of its steps, or else by the same law from the step times in its
    records. ``None`` when the fixed cost cannot be told from that of a micro-batch.
    """
    usable = [timing for timing in measured if timing.intervals >= MIN_TIMED]
    if not usable:
        return None
    world = max(usable, key=lambda timing: timing.steps).shape.world
    there = [timing for timing in usable if timing.shape.world == world]
    micro_batch = max(timing.shape.micro_batch for timing in there)
    found = fit(map(_observation, there), micro_batch)
    fitted = found.step_time if found is not None and found.price(world).resolved else None
    model = _recorded_step_time(metrics, world) or fitted
    return (model, micro_batch) if model is not None else None


def _recorded_step_time(metrics: Metrics, world: int) -> StepTime | None:
    """The last step time that the run told on ``world`` ranks, when it could tell the fixed cost."""
    known = [record.get("step_time") for record in metrics.steps if record.get("world") == world]
    told = next((one for one in reversed(known) if one), None)
    if told is None or told.get("price_high") is None:
        return None
    return StepTime(told["fixed"], told["per_micro_batch"], told["per_sample"])


def _observation(timing: Timing) -> Observation:
    samples = math.ceil(timing.shape.global_batch / timing.shape.world)
    return Observation(timing.median, timing.variance, 1, timing.shape.micro_batches, samples)


def efficiency_of(record: Record) -> float | None:
    """Data efficiency of a step record: as recorded, or from its batch and resolved noise scale, or ``None``."""
    if record.get("efficiency") is not None:
        return float(record["efficiency"])
    if not record.get("global_batch") or not text.is_resolved(record):
        return None
    return data_efficiency(record["global_batch"], record["scale"])


def efficiency_spent(metrics: Metrics) -> tuple[float, float] | None:
    """Sample-weighted mean data efficiency, and the share of the recorded samples for which it is known.

    A record stands for the samples since the record before it.
    """
    weighted = known = sample = 0.0
    for record in metrics.steps:
        efficiency, samples = efficiency_of(record), record["samples"] - sample
        sample = record["samples"]
        if efficiency is not None:
            weighted += samples * efficiency
            known += samples
    return (weighted / known, known / sample) if known else None
