"""Which global batch a run's own noise scale recommends, and what other batches would have cost it.

Everything is worked out from the records of the run folder, of a run of any policy that measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adabatch.plan import ROUNDINGS, BatchLimits
from adabatch.report import history
from adabatch.report.costs import StepCosts, step_costs
from adabatch.report.tradeoff import Part, Quantity, Tradeoff, parts_of, scale_of
from adabatch.runlog import Metrics, calibrations, text
from adabatch.runlog.reader import Record

EFFICIENCIES = (0.5, 0.8, 0.9)
# The table of the trade-off spans this factor around the critical batch, and around the batches of the run.
_SPAN = 4.0


class NotMeasured(ValueError):
    """The records hold no noise scale, and so there is nothing to recommend by."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The batch for a data efficiency: B = C (1/e - 1), and the nearest one that the run's ranks can make.

    ``global_batch`` is ``None`` where ``wanted`` has no value.
    """

    efficiency: float
    wanted: Quantity
    global_batch: int | None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What follows from the noise scale at one point of the run, or over all of it.

    Attributes:
        scale: the noise scale, in samples.
        critical: the critical batch: the noise scale times the calibration.
        tradeoff: what fixed batches need for the same progress.
        choices: the batches for ``EFFICIENCIES``.
    """

    scale: Quantity
    critical: Quantity
    tradeoff: Tradeoff
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A fixed batch: what it would have needed for the progress of the run, and needs from here on.

    Attributes:
        global_batch: a batch that the run's ranks can make.
        efficiency: its data efficiency over the run.
        steps, samples: as multiples of those that the run took.
        steps_now, samples_now: as multiples of those that the batch in force needs from here on.
        seconds: of all steps on the run's own ranks, or ``None`` where the time of a step is not known.
        ranks: the most ranks with one full micro-batch each.
        seconds_on_ranks: of all steps on these, or ``None``; assumes that a step takes no longer on more ranks.
    """

    global_batch: int
    efficiency: Quantity
    steps: Quantity
    samples: Quantity
    steps_now: Quantity
    samples_now: Quantity
    seconds: Quantity | None
    ranks: int
    seconds_on_ranks: Quantity | None


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Everything that ``adabatch recommend`` says about a run.

    Attributes:
        facts: ``run, policy, world, micro_batch, global_batch`` (in force), ``steps, samples, seconds``, ``ended``, and
            of the noise scale now its ``geometry``, the other ``views`` and why it is ``thermometric``, if it is; and
            where the calibration was ``measured``: ``step, sample, value, low, high``, or ``None``.
        calibration: critical batch over noise scale; 1 is uncalibrated.
        confidence: coverage of the intervals.
        now: by the newest noise scale, against the batch in force.
        run: by the noise scale over the run, weighted by the progress that each stretch of samples made.
        measured: share of the run's samples for which there was an estimate, which ``run`` is about.
        costs: what is known about the time of a step.
        curve: the trade-off, by rising batch.
    """

    facts: dict[str, Any]
    calibration: float
    confidence: float
    now: Outlook
    run: Outlook
    measured: float
    costs: StepCosts
    curve: tuple[Prediction, ...]

    @property
    def calibrated(self) -> bool:
        return self.calibration != 1.0 or self.facts["measured"] is not None


def recommendation(metrics: Metrics, calibration: float | None = None) -> Recommendation:
    """Recommend a global batch by the noise scale that a run, finished or not, has measured.

    Args:
        metrics: the run's records.
        calibration: critical batch over noise scale; by default what was measured at the run's furthest checkpoint
            (``calibrations.json``) in the geometry that decides, and else the one that the run was configured with.

    Raises:
        NotMeasured: when there is no estimate in the records, with the likely reason, or the calibrations beside them
            cannot be read.
        ValueError: for a calibration that is not above 0.
    """
    config = (metrics.start or {}).get("config") or {}
    measured = _measured(metrics) if calibration is None else None
    if calibration is None:
        configured = float(_section(config, "policy").get("calibration") or 1.0)
        calibration = measured["value"] if measured else configured
    if not (calibration > 0.0 and math.isfinite(calibration)):
        raise ValueError(f"calibration must be above 0, got {calibration}")
    parts = parts_of(metrics, calibration)
    in_force = history.final_batch(metrics)
    if not parts or in_force is None:
        raise NotMeasured(_why_not_measured(metrics, config))
    limits = _limits(metrics, config)
    newest = next(record for record in reversed(metrics.steps) if text.noise_scale(record) is not None)
    scale, whole = scale_of(newest), Tradeoff.of(parts)
    now = _outlook(scale, Tradeoff.of([Part(in_force, 1, scale.times(calibration))]), limits)
    run = _outlook(whole.critical_batch.times(1.0 / calibration), whole, limits)
    costs = step_costs(metrics, limits)
    return Recommendation(
        facts=_facts(metrics, limits, in_force) | _marks(newest) | {"measured": measured},
        calibration=calibration,
        confidence=float(_section(config, "noise").get("confidence") or 0.95),
        now=now,
        run=run,
        measured=whole.samples / metrics.steps[-1]["samples"],
        costs=costs,
        curve=tuple(_predict(batch, now, run, costs) for batch in _batches(now, run, in_force, limits)),
    )


def _outlook(scale: Quantity, tradeoff: Tradeoff, limits: BatchLimits) -> Outlook:
    critical = tradeoff.critical_batch
    choices = []
    for efficiency in EFFICIENCIES:
        wanted = critical.times(1.0 / efficiency - 1.0)
        choices.append(Choice(efficiency, wanted, limits.realise(wanted.value) if wanted.value is not None else None))
    return Outlook(scale, critical, tradeoff, tuple(choices))


def _predict(global_batch: int, now: Outlook, run: Outlook, costs: StepCosts) -> Prediction:
    steps = run.tradeoff.steps_at(global_batch)
    here, there = costs.of_step(global_batch), costs.on_ranks(global_batch)
    return Prediction(
        global_batch=global_batch,
        efficiency=run.tradeoff.efficiency_at(global_batch),
        steps=steps.times(1.0 / run.tradeoff.steps),
        samples=run.tradeoff.samples_at(global_batch).times(1.0 / run.tradeoff.samples),
        steps_now=now.tradeoff.steps_at(global_batch).times(1.0 / now.tradeoff.steps),
        samples_now=now.tradeoff.samples_at(global_batch).times(1.0 / now.tradeoff.samples),
        seconds=None if here is None else steps.times(here),
        ranks=costs.ranks(global_batch),
        seconds_on_ranks=None if there is None else steps.times(there),
    )


def _batches(now: Outlook, run: Outlook, in_force: int, limits: BatchLimits) -> list[int]:
    """The batch in force, the recommended ones, and others by factors of 2 around them."""
    named = [in_force, *(choice.global_batch for one in (now, run) for choice in one.choices if choice.global_batch)]
    centres = [float(in_force), *(_centre(one.critical) for one in (now, run))]
    low, high = min(centres) / _SPAN, max(centres) * _SPAN
    doubled = (2.0**power for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1))
    return sorted({*named, *(limits.realise(batch) for batch in doubled)})


def _centre(critical: Quantity) -> float:
    """Where to draw around: the critical batch, or the bound that is known of it."""
    return max(critical.low if critical.value is None else critical.value, 1.0)


def _measured(metrics: Metrics) -> dict[str, Any] | None:
    """The calibration that was measured in the geometry of the newest noise scale, and where."""
    newest = next((record for record in reversed(metrics.steps) if text.noise_scale(record) is not None), {})
    try:
        found = calibrations.latest(metrics.path.parent, newest.get("geometry"))
    except ValueError as error:
        raise NotMeasured(str(error)) from None
    return found and {"step": found["step"], "sample": found["sample"], **found["ratios"][newest["geometry"]]}


def _limits(metrics: Metrics, config: Mapping[str, Any]) -> BatchLimits:
    """What the run's ranks can make; its bounds are left out, since a recommendation may lie beyond them."""
    configured, last = _section(config, "limits"), metrics.steps[-1]
    seen = max((record.get("micro_batch") or 1 for record in metrics.steps), default=1)
    rounding = configured.get("rounding")
    return BatchLimits(
        world=last.get("world") or (metrics.start or {}).get("world") or 1,
        micro_batch=configured.get("micro_batch") or seen,
        rounding=rounding if rounding in ROUNDINGS else "micro_batch",
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _facts(metrics: Metrics, limits: BatchLimits, in_force: int) -> dict[str, Any]:
    last = metrics.last or metrics.steps[-1]
    return {
        "run": metrics.path.resolve().parent.name,
        "policy": _section((metrics.start or {}).get("config") or {}, "policy").get("name"),
        "world": limits.world,
        "micro_batch": limits.micro_batch,
        "global_batch": in_force,
        "steps": last["step"],
        "samples": last["samples"],
        "seconds": last.get("seconds"),
        "ended": text.ending(metrics.end) if metrics.end else None,
    }


def _marks(newest: Record) -> dict[str, Any]:
    """What the newest record says about its noise scale."""
    return {
        "geometry": newest.get("geometry"),
        "views": newest.get("views") or {},
        "thermometric": _section(newest, "guards").get("thermometric"),
    }


def _why_not_measured(metrics: Metrics, config: Mapping[str, Any]) -> str:
    where, noise = metrics.path.parent, _section(config, "noise")
    if noise.get("enabled") is False:
        return f"{where} measures no noise scale, since it runs with noise.enabled=false; run it with noise=default"
    step, due = (metrics.last or {}).get("step", 0), noise.get("decide_every") or 16
    first = f"the first estimate comes after {due:,} steps (noise.decide_every)"
    if metrics.end is None and step <= 2 * due:
        return f"{where} has no noise scale yet, after {step:,} steps: {first}; try again later"
    return (
        f"{where} holds no noise scale, after {step:,} steps: {first}, and a step is measured when it has two groups "
        f"of samples (micro-batches or ranks) with finite gradients to compare"
    )
