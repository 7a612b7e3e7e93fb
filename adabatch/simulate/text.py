"""A simulated run and its fixed batches as a table for a terminal, and as JSON data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from adabatch.report.tables import table
from adabatch.runlog import text
from adabatch.simulate.comparison import Comparison
from adabatch.simulate.outline import Stretch
from adabatch.simulate.run import Outcome

UNKNOWN = "-"


def to_text(found: Comparison, title: str) -> str:
    """What ``adabatch simulate`` prints: the run, the fixed batches around it, and what the policy gained or lost."""
    run = found.outcome
    timed = run.seconds is not None
    head = ["", "batch", "steps", "samples", "data\nefficiency", "product", "changes"]
    head += ["time", "rank-hours", "ranks"] if timed else []
    head += ["loss"] if run.loss is not None else []
    batches = [point.global_batch for point in found.run.points]
    rows = [["policy", _span(min(batches), max(batches)), *_cells(run, timed)]]
    rows += [["fixed", f"{batch:,}", *_cells(arm, timed)] for batch, arm in found.arms]
    return "\n".join([table(title, head, rows), "", *readings(found)])


def readings(found: Comparison) -> list[str]:
    """How the run compares, in sentences."""
    run, match, fastest = found.outcome, found.match, found.fastest
    lines = ["Data efficiency and product, (steps/S_min - 1)(samples/E_min - 1), go by the true critical batch."]
    if match is None:
        lines.append("No fixed batch within the limits gets as far on the same samples.")
    else:
        reach = "ends at that loss" if found.by_loss else "gets as far"
        lines.append(
            f"On the same samples a fixed batch of {match.global_batch:,.0f} {reach}, in {match.steps:,.0f} steps: the "
            f"policy takes {_change(run.steps / match.steps, 'steps')}{_change_of_time(run.seconds, match.seconds)}."
        )
    if fastest is not None and run.seconds is not None:
        lines.append(
            f"The fastest fixed batch for the same progress is {fastest.global_batch:,}, in "
            f"{text.duration(fastest.seconds)} and {fastest.samples:,.0f} samples: the policy takes "
            f"{_change(run.seconds / fastest.seconds, 'time')}."
        )
    if found.run.price == 0.0:
        lines.append(
            "No wall-clock gain per sample: a step has no cost of its own on this cluster, whatever its batch."
        )
    if found.lr_factor != 1.0:
        best = f"The policy's best learning rate is {found.lr_factor:g} times the configured one"
        lines.append(f"{best}; each fixed batch had its own.")
    return lines


def to_dict(found: Comparison) -> dict[str, Any]:
    """The same as JSON data, with the points of the run."""
    return {
        "policy": asdict(found.outcome),
        "lr_factor": found.lr_factor,
        "fixed": [{"global_batch": batch, **asdict(arm)} for batch, arm in found.arms],
        "match": asdict(found.match) if found.match else None,
        "fastest": asdict(found.fastest) if found.fastest else None,
        "points": [asdict(point) for point in found.run.points],
    }


def outline_text(stretches: Sequence[Stretch], title: str) -> str:
    """What ``adabatch plan`` prints: a row for every stretch of equal steps."""
    timed = any(stretch.seconds is not None for stretch in stretches)
    head = ["from\nsample", "batch", "ranks x micro-batches\nx samples", "steps", "samples", "lr x"]
    companions = _moving(stretches)
    head += [name.replace("_", " ") + " x" for name in companions] + (["a step", "duration"] if timed else [])
    rows = [
        [
            f"{stretch.plan.first_sample:,}",
            f"{stretch.plan.global_batch:,}",
            f"{stretch.plan.world:,} x {stretch.plan.micro_batches:,} x {stretch.plan.micro_batch:,}",
            f"{stretch.steps:,}",
            f"{stretch.samples:,}",
            _span(*(float(f"{rate:.4g}") for rate in stretch.rates)),
            *(f"{getattr(stretch.plan.scales, name):.4g}" for name in companions),
            *(_times(stretch) if timed else []),
        ]
        for stretch in stretches
    ]
    steps, samples = sum(stretch.steps for stretch in stretches), sum(stretch.samples for stretch in stretches)
    total = f"{steps:,} steps, {samples:,} samples"
    if timed and all(stretch.seconds is not None for stretch in stretches):
        total += f", {text.duration(sum(stretch.seconds or 0.0 for stretch in stretches))}"
    if stretches[-1].partial:
        total += "; the last step is shortened to end the run"
    return "\n".join([table(title, head, rows), "", total])


def outline_dict(stretches: Sequence[Stretch]) -> list[dict[str, Any]]:
    """The same as JSON data."""
    return [
        {
            "first_sample": stretch.plan.first_sample,
            "global_batch": stretch.plan.global_batch,
            "world": stretch.plan.world,
            "micro_batches": stretch.plan.micro_batches,
            "micro_batch": stretch.plan.micro_batch,
            "steps": stretch.steps,
            "samples": stretch.samples,
            "lr": list(stretch.rates),
            "scales": asdict(stretch.plan.scales),
            "seconds": stretch.seconds,
            "partial": stretch.partial,
        }
        for stretch in stretches
    ]


def _cells(outcome: Outcome, timed: bool) -> list[str]:
    cells = [f"{outcome.steps:,}", f"{outcome.samples:,}", f"{outcome.efficiency:.3f}", f"{outcome.product:.3f}"]
    cells.append(f"{outcome.changes}")
    if timed:
        seconds, cost = outcome.seconds or 0.0, outcome.cost or 0.0
        cells += [text.duration(seconds), f"{cost / 3600:,.3g}", f"{outcome.most_ranks:,}"]
    return cells + ([f"{outcome.loss:.4g}"] if outcome.loss is not None else [])


def _span(low: float, high: float) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _change(ratio: float, what: str) -> str:
    if abs(ratio - 1) < 0.0005:
        return f"as much {what}" if what == "time" else f"as many {what}"
    less = "less" if what == "time" else "fewer"
    return f"{abs(ratio - 1):.1%} {less if ratio < 1 else 'more'} {what}"


def _change_of_time(seconds: float | None, other: float | None) -> str:
    return f" and {_change(seconds / other, 'time')}" if seconds is not None and other else ""


def _moving(stretches: Sequence[Stretch]) -> list[str]:
    """The companions of the learning rate that are not left alone everywhere."""
    names = ("beta1_exponent", "beta2_exponent", "eps", "weight_decay", "clip")
    return [name for name in names if any(getattr(stretch.plan.scales, name) != 1.0 for stretch in stretches)]


def _times(stretch: Stretch) -> list[str]:
    if stretch.seconds is None:
        return [UNKNOWN, UNKNOWN]
    return [text.duration(stretch.seconds / stretch.steps), text.duration(stretch.seconds)]
