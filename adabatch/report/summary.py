"""A run in numbers and in plain sentences, with what has to be said about them."""

from __future__ import annotations

from typing import Any

from adabatch.plan import steps_at
from adabatch.report import history
from adabatch.report.history import MIN_TIMED, Timing
from adabatch.runlog import Metrics, text

_NOTICEABLE = 0.03  # differences in time below 3 % are not told from the noise of step times


def summary(metrics: Metrics) -> dict[str, Any]:
    """The key numbers of a run as JSON data; what is unknown is ``None``.

    Counts: ``steps, samples, tokens, seconds, samples_per_second, start_batch, final_batch, largest_batch, changes,
    steps_at_start_batch, resumes, skipped, superseded``. Efficiency: ``efficiency`` (sample-weighted mean),
    ``efficiency_share`` (share of the samples for which it is known), ``target_efficiency, calibrated``. Time:
    ``step_time`` (``fixed`` and ``per_micro_batch`` seconds), ``seconds_at_start_batch``, ``seconds_saved`` and
    ``time_statement``, which says what was saved, "none" or "not measurable"; ``speedup`` is samples per second at the
    largest timed batch over those at the starting batch. Loss: ``loss, held_out, lowest_held_out``. Noise: ``scale,
    scale_low, scale_high, resolved, unresolved_share``. Words: ``ended, sentences, caveats``.
    """
    facts = _counts(metrics) | _efficiency(metrics) | _losses(metrics) | _noise(metrics)
    facts |= _time(metrics, facts)
    return facts | {"sentences": _sentences(facts), "caveats": _caveats(metrics, facts)}


def held_out_names(metrics: Metrics) -> list[str]:
    """Names of the held-out metrics besides the loss, in the order of their first appearance."""
    names = (name for record in metrics.evaluations for name in text.held_out_metrics(record))
    return [name for name in dict.fromkeys(names) if name != "loss"]


def _counts(metrics: Metrics) -> dict[str, Any]:
    last = metrics.last or {}
    samples, seconds = last.get("samples", 0), last.get("seconds") or 0.0
    start = history.start_batch(metrics)
    batches = [stretch.global_batch for stretch in history.stretches(metrics)]
    latest_start = metrics.start or {}
    in_force = history.latest_control(metrics) or latest_start
    return {
        "ended": text.ending(metrics.end) if metrics.end else None,
        "world": (metrics.steps[-1].get("world") if metrics.steps else None) or latest_start.get("world"),
        "steps": last.get("step", 0),
        "samples": samples,
        "tokens": last.get("tokens") or 0,
        "seconds": seconds,
        "samples_per_second": samples / seconds if seconds else None,
        "start_batch": start,
        "final_batch": history.final_batch(metrics),
        "largest_batch": max(batches, default=None),
        "changes": len(history.changes(metrics)),
        "steps_at_start_batch": steps_at(samples, start) if start and samples else None,
        "resumes": len(metrics.resumes),
        "skipped": max((record.get("skipped") or 0 for record in metrics.steps), default=0),
        "superseded": metrics.superseded,
        "target_efficiency": in_force.get("target_efficiency"),
        "calibrated": bool(in_force.get("calibrated")),
    }


def _efficiency(metrics: Metrics) -> dict[str, Any]:
    efficiency, share = history.efficiency_spent(metrics) or (None, 0.0)
    return {"efficiency": efficiency, "efficiency_share": share}


def _losses(metrics: Metrics) -> dict[str, Any]:
    held_out = [record for record in metrics.evaluations if record.get("loss") is not None]
    lowest = min(held_out, key=lambda record: record["loss"], default=None)
    return {
        "loss": metrics.steps[-1].get("loss") if metrics.steps else None,
        "first_held_out": held_out[0]["loss"] if held_out else None,
        "held_out": held_out[-1]["loss"] if held_out else None,
        "lowest_held_out": lowest["loss"] if lowest else None,
        "lowest_held_out_at": lowest["samples"] if lowest else None,
    }


def _noise(metrics: Metrics) -> dict[str, Any]:
    measured = [record for record in metrics.steps if text.noise_scale(record)]
    last = measured[-1] if measured else {}
    unresolved = sum(not text.is_resolved(record) for record in measured)
    return {
        **{key: last.get(key) for key in ("scale", "scale_low", "scale_high")},
        "resolved": text.is_resolved(last) if measured else None,
        "unresolved_share": unresolved / len(measured) if measured else None,
    }


def _time(metrics: Metrics, facts: dict[str, Any]) -> dict[str, Any]:
    measured = history.timings(metrics)
    model = history.step_time_model(metrics, measured)
    first = _start_timing(measured, facts)
    step_seconds, why_not = _start_step_seconds(metrics, measured, facts)
    predicted = step_seconds * facts["steps_at_start_batch"] if step_seconds else None
    saved = predicted - facts["seconds"] if predicted is not None and facts["changes"] else None
    timed = [
        timing
        for timing in measured
        if timing.intervals >= MIN_TIMED and first and timing.shape.world == first.shape.world
    ]
    largest = max(timed, key=lambda timing: timing.shape.global_batch, default=None)
    speedup = largest.samples_per_second / first.samples_per_second if first and largest else None
    return {
        "step_time": {
            "fixed": model[0].fixed,
            "per_micro_batch": model[0].of_micro_batch(model[1]),
            "micro_batch": model[1],
        }
        if model
        else None,
        "seconds_at_start_batch": predicted,
        "seconds_saved": saved,
        "time_statement": _time_statement(facts, predicted, saved, why_not),
        "speedup": speedup,
        "speedup_batch": largest.shape.global_batch if largest else None,
    }


def _start_timing(measured: list[Timing], facts: dict[str, Any]) -> Timing | None:
    """Step times at the starting batch, when enough were recorded."""
    found = [t for t in measured if t.shape.global_batch == facts["start_batch"] and t.intervals >= MIN_TIMED]
    return max(found, key=lambda timing: timing.steps, default=None)


def _start_step_seconds(
    metrics: Metrics, measured: list[Timing], facts: dict[str, Any]
) -> tuple[float | None, str | None]:
    """Seconds of a step at the starting batch, measured or else from the step-time model, or why there are none."""
    worlds = {record["world"] for record in metrics.steps if record.get("world")}
    if len(worlds) > 1:
        return None, "the number of ranks changed during the run"
    first, model = _start_timing(measured, facts), history.step_time_model(metrics, measured)
    if first:
        return first.median, None
    shape = next((history.shape_of(record) for record in metrics.steps), None)
    if model and shape and shape.global_batch == facts["start_batch"] and shape.micro_batch == model[1]:
        return model[0].seconds(shape.micro_batches, shape.global_batch / shape.world), None
    return None, "too few step times were recorded to tell what a step of the starting batch costs"


def _time_statement(facts: dict[str, Any], predicted: float | None, saved: float | None, why_not: str | None) -> str:
    if not facts["changes"]:
        return "none, because the batch never changed"
    if predicted is None or saved is None:
        return f"not measurable: {why_not}"
    share = saved / predicted
    compared = f"{text.duration(facts['seconds'])} instead of about {text.duration(predicted)}"
    if share >= _NOTICEABLE:
        return f"{text.duration(saved)}, {text.percent(share)} ({compared})"
    if share <= -_NOTICEABLE:
        return f"none: the run took {text.duration(-saved)} longer ({compared})"
    return f"none ({compared})"


def _sentences(facts: dict[str, Any]) -> list[str]:
    if not facts["steps"]:
        return ["No step has been recorded yet."]
    sentences = [_sentence_of_run(facts), _sentence_of_steps(facts), _sentence_of_efficiency(facts)]
    sentences += [f"Seconds saved on this hardware: {facts['time_statement']}.", _sentence_of_speed(facts)]
    sentences += [_sentence_of_loss(facts), _sentence_of_noise(facts)]
    return [sentence for sentence in sentences if sentence]


def _sentence_of_run(facts: dict[str, Any]) -> str:
    ranks = f" on {facts['world']} rank{'' if facts['world'] == 1 else 's'}" if facts["world"] else ""
    speed = f" ({text.quantity(facts['samples_per_second'])} samples/s)" if facts["samples_per_second"] else ""
    return (
        f"{facts['samples']:,} samples in {facts['steps']:,} steps and {text.duration(facts['seconds'])}{ranks}{speed}."
    )


def _sentence_of_steps(facts: dict[str, Any]) -> str:
    start, planned = facts["start_batch"], facts["steps_at_start_batch"]
    if not start or not planned:
        return ""
    if not facts["changes"] and facts["largest_batch"] == start:
        return f"The global batch stayed at {start:,}: {planned:,} steps for these samples, none saved."
    ratio = planned / facts["steps"]
    compared = f"{ratio:.2g} times as many" if ratio >= 1.05 else "about as many" if ratio > 0.95 else "fewer"
    changes = f"{facts['changes']} change{'' if facts['changes'] == 1 else 's'}"
    return (
        f"The global batch went from {start:,} to {facts['final_batch']:,} in {changes}; "
        f"the starting batch would have taken {planned:,} steps for the same samples, {compared}."
    )


def _sentence_of_efficiency(facts: dict[str, Any]) -> str:
    if facts["efficiency"] is None:
        return "Data efficiency spent: unknown, because no noise scale was measured."
    notes = [] if facts["calibrated"] else ["uncalibrated"]
    if facts["target_efficiency"] is not None:
        notes.append(f"target {text.percent(facts['target_efficiency'])}")
    inside = f" ({', '.join(notes)})" if notes else ""
    return (
        f"Data efficiency spent: {text.percent(facts['efficiency'])}{inside}; by the measured noise scale, "
        f"very small batches would have come as far with that share of the samples."
    )


def _sentence_of_speed(facts: dict[str, Any]) -> str:
    if facts["speedup"] is None or facts["speedup_batch"] == facts["start_batch"]:
        return ""
    batches = f"batch {facts['start_batch']:,} and batch {facts['speedup_batch']:,}"
    if facts["speedup"] >= 1 + _NOTICEABLE:
        return f"Between {batches}, samples per second rose to {facts['speedup']:.2f} times as many."
    trend = "is the same" if facts["speedup"] > 1 - _NOTICEABLE else f"fell to {facts['speedup']:.2f} times as many"
    return (
        f"No wall-clock gain per sample: samples per second {trend} at {batches}. Accumulation alone does not make "
        f"samples cheaper; a larger batch then buys fewer steps and synchronisations, or use of more ranks."
    )


def _sentence_of_loss(facts: dict[str, Any]) -> str:
    if facts["held_out"] is None:
        return f"Training loss at the end: {text.loss(facts['loss'])}; no held-out evaluation was recorded."
    words = f"Held-out loss went from {text.loss(facts['first_held_out'])} to {text.loss(facts['held_out'])}"
    if facts["lowest_held_out"] < facts["held_out"]:
        words += f"; the lowest was {text.loss(facts['lowest_held_out'])} at {facts['lowest_held_out_at']:,} samples"
    return words + "."


def _sentence_of_noise(facts: dict[str, Any]) -> str:
    noise = text.noise_scale(facts)
    return f"Noise scale at the end: {noise} samples." if noise else "The noise scale was not measured."


def _caveats(metrics: Metrics, facts: dict[str, Any]) -> list[str]:
    return [note for note in (*_caveats_of_numbers(facts), *_caveats_of_records(metrics, facts)) if note]


def _caveats_of_numbers(facts: dict[str, Any]) -> list[str]:
    uncalibrated = facts["efficiency"] is not None and not facts["calibrated"]
    partly = facts["efficiency"] is not None and facts["efficiency_share"] < 0.995
    return [
        "Uncalibrated: the critical batch is taken to be the noise scale itself. They can differ severalfold, and the "
        "data efficiency with them."
        if uncalibrated
        else "",
        f"The data efficiency covers {text.percent(facts['efficiency_share'])} of the samples; for the others no noise "
        f"scale was known."
        if partly
        else "",
        f"The noise scale was unresolved in {text.percent(facts['unresolved_share'])} of the records: its interval has "
        f"no upper end there, only the lower end can be relied on, and the data efficiency is uncertain."
        if facts["unresolved_share"]
        else "",
        "Steps and seconds are compared at equal samples with the starting batch's predicted run. No such run was "
        "made, so nothing here says which loss it would have reached."
        if facts["changes"]
        else "",
    ]


def _caveats_of_records(metrics: Metrics, facts: dict[str, Any]) -> list[str]:
    skipped, damaged = facts["skipped"], len(metrics.damaged)
    lines = ", ".join(map(str, metrics.damaged[:5])) + (", ..." if damaged > 5 else "")
    return [
        f"{skipped:,} window{' was' if skipped == 1 else 's were'} skipped because the gradient was not finite; the "
        f"samples count as consumed."
        if skipped
        else "",
        "The run has no end record: it is still going on, or it was killed." if metrics.end is None else "",
        f"{metrics.superseded:,} records written before a resume were superseded by it and are not shown."
        if metrics.superseded
        else "",
        f"{damaged} line{' is' if damaged == 1 else 's are'} unreadable in {metrics.path.name} (line {lines}), as a "
        f"process that is killed while writing leaves behind."
        if damaged
        else "",
    ]
