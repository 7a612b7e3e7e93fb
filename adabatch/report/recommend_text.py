"""A recommendation as words, as tables for a terminal, and as JSON data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adabatch.report.recommend import Choice, Outlook, Prediction, Recommendation
from adabatch.report.tables import table
from adabatch.report.tradeoff import Quantity
from adabatch.runlog import text


def to_text(advice: Recommendation, *, curve: bool = True) -> str:
    """What ``adabatch recommend`` prints: what was measured, the batches, the trade-off and its reading."""
    blocks = [headline(advice), *measured(advice), "", _choices(advice), ""]
    if curve:
        blocks += [_curve(advice), "", *reading(advice)]
    return "\n".join([*blocks, *costs(advice), *caveats(advice)])


_MODEL = (
    "Predicted, not run: steps = S_min (1 + C/B) and samples = E_min (1 + B/C) for a batch B and the critical batch C "
    "(arXiv 1812.06162), each batch at a learning rate that suits it."
)
_ALIGNMENTS = {
    "sign": "alignment of sign steps",
    "muon": "alignment of Muon's steps of the hidden matrices",
}
CHOICE_COLUMNS = (
    "data\nefficiency",
    "batch\nnow",
    "batch\nover the run",
    "\nsteps",
    "\nsamples",
    "\nranks",
    "time\non them",
)


# -- sentences


def headline(advice: Recommendation) -> str:
    """Which run this is about, and how far it is."""
    facts = advice.facts
    policy = f"policy {facts['policy']} on " if facts["policy"] else ""
    seconds = f" and {text.duration(facts['seconds'])}" if facts["seconds"] else ""
    return (
        f"{facts['run']}: {policy}{_ranks(facts['world'])}, {facts['samples']:,} samples in {facts['steps']:,} steps"
        f"{seconds}, now at batch {facts['global_batch']:,}"
    )


def measured(advice: Recommendation) -> list[str]:
    """The noise scale now and over the run, and the data efficiency that the run had."""
    geometry = advice.facts["geometry"]
    about = [] if geometry in (None, "euclidean") else [_seen_by(geometry)]
    about += [f"the critical batch is {advice.calibration:.3g} x it"] if advice.calibrated else []
    at = "noise scale" + (f" ({', '.join(about)})" if about else "")
    spent = advice.run.tradeoff.efficiency
    return [
        f"The {at} now: {_scale(advice.now.scale)}.",
        f"Over the run: {_scale(advice.run.scale)}, weighted by the progress that each stretch of samples made.",
        f"Data efficiency of the run: {interval(spent, text.percent)}{'' if advice.calibrated else ' (uncalibrated)'}.",
        *_calibration(advice),
        *_other_views(advice),
    ]


def _calibration(advice: Recommendation) -> list[str]:
    """Where the critical batch over the noise scale was measured, and its interval."""
    found = advice.facts["measured"]
    if found is None:
        return []
    return [
        f"Critical batch over noise scale, as calibrated at step {found['step']:,}, sample {found['sample']:,}: "
        f"{found['value']:.3g} [{found['low']:.3g}, {found['high']:.3g}]; the other intervals take it as exact."
    ]


def _seen_by(view: str) -> str:
    return _ALIGNMENTS.get(view, f"{view} geometry")


def _other_views(advice: Recommendation) -> list[str]:
    """What else is measured of the whole model; parts of it (``layer:``, ``group:``) are in the metrics."""
    found = []
    for name, view in advice.facts.get("views", {}).items():
        record = {"resolved": view["resolved"], "scale": view["scale"]}
        record |= {"scale_low": view["low"], "scale_high": view["high"]}
        if ":" not in name and (scale := text.noise_scale(record)):
            found.append(f"{_seen_by(name)} {scale}")
    return [f"By other views now, for the record: {'; '.join(found)}."] if found else []


def reading(advice: Recommendation) -> list[str]:
    """How the trade-off table is to be read."""
    facts = advice.facts
    return [
        _progress_read(advice),
        f"From now on: as multiples of what batch {facts['global_batch']:,} needs from here, by the noise scale now.",
        _ranks_read(advice),
    ]


def _progress_read(advice: Recommendation) -> str:
    took = advice.run.tradeoff
    return (
        f"Steps and samples: those of the batch over the run for the same progress, as multiples of the {took.steps:,} "
        f"steps and {took.samples:,} samples that the run took."
    )


def _ranks_read(advice: Recommendation) -> str:
    return (
        f"Ranks: the most that still have a full micro-batch of {advice.facts['micro_batch']:,} each. The time on them "
        f"assumes that a step with as many micro-batches takes no longer on more ranks."
    )


def costs(advice: Recommendation) -> list[str]:
    """What is known about seconds, and what is not."""
    known, here = advice.costs, _ranks(advice.costs.world)
    if known.model is not None:
        fastest = known.fastest(advice.run.critical)
        assert fastest is not None
        return [
            f"A step on {here} takes {text.duration(known.model.fixed)} + "
            f"{text.duration(known.model.of_micro_batch(known.model_micro_batch))} per micro-batch of "
            f"{known.model_micro_batch}; the fewest seconds on {here}: batch {interval(fastest)}."
        ]
    said = [f"Seconds on {here} at batches that were not timed are not known: {known.why_not}."]
    share, choice = known.own_share(), advice.run.choices[0]
    if share and choice.global_batch and known.of_one_micro_batch() is None:
        samples, seconds = share
        ranks = max(round(choice.global_batch / samples), 1)
        took = advice.run.tradeoff.steps_at(ranks * samples).times(seconds)
        said.append(
            f"With {samples:g} samples a rank as in this run, a step takes {text.duration(seconds)}: batch "
            f"{round(ranks * samples):,} on {_ranks(ranks)} would take {interval(took, text.duration)}, if a step takes no "
            f"longer on more ranks."
        )
    return said


def notes(advice: Recommendation) -> list[str]:
    """How the recommended batches and what is predicted of them are to be read, where the table stands alone."""
    said = f"Intervals cover {text.percent(advice.confidence)}. {_progress_read(advice)} {_ranks_read(advice)}"
    return [note for note in (_thermometric(advice), said, _MODEL) if note]


def caveats(advice: Recommendation) -> list[str]:
    """What the recommendation rests on, and what it leaves out."""
    return [note for note in (*_caveats_of_scale(advice), *_caveats_of_prediction(advice)) if note]


def _caveats_of_scale(advice: Recommendation) -> list[str]:
    whole = advice.run.tradeoff
    share = whole.unresolved / whole.samples
    counted = "the value takes their lower bounds" if whole.valued else "that is too wide for a single value"
    return [
        ""
        if advice.calibrated
        else "Uncalibrated: the critical batch is taken to be the noise scale itself. They can differ severalfold, and "
        "every batch here with them.",
        _thermometric(advice),
        ""
        if advice.now.scale.bounded
        else "Unresolved now: the interval of the noise scale has no upper end, so only a lower bound of each batch is "
        "known. More samples at this batch, or a larger batch, resolve it.",
        f"The noise scale was unresolved for {text.percent(share)} of the samples: the interval over the run covers "
        f"them, and {counted}."
        if share
        else "",
        f"For {text.percent(1 - advice.measured)} of the samples no noise scale was known; 'over the run' leaves them "
        f"out."
        if advice.measured < 0.995
        else "",
    ]


def _thermometric(advice: Recommendation) -> str:
    reason = advice.facts["thermometric"]
    if not reason:
        return ""
    return (
        f"Thermometric now: {reason}. The noise scale then follows the learning rate, and says little about the batch "
        f"that is useful."
    )


def _caveats_of_prediction(advice: Recommendation) -> list[str]:
    return [
        _MODEL,
        "" if advice.facts["ended"] else "The run has no end record: it is still going on, or it was killed.",
    ]


def interval(quantity: Quantity, words: Callable[[float], str] = text.quantity) -> str:
    """``97 [88, 109]``; without a value ``88 to 109``; without an upper end ``above 88``, or ``unresolved``."""
    low = words(quantity.low)
    if not quantity.bounded:
        return f"above {low}" if quantity.low > 0 else "unresolved"
    high = words(quantity.high)
    if quantity.value is None:
        return f"{low} to {high}" if low != high else low
    value = words(quantity.value)
    return f"{value} [{low}, {high}]" if low != high else value


def _scale(scale: Quantity) -> str:
    if scale.bounded:
        return f"{interval(scale)} samples"
    return f"{interval(scale)} samples, unresolved" if scale.low > 0 else "unresolved"


def factor(value: float) -> str:
    """A multiple of what the run took: ``0.53``, ``4.7``, ``47``."""
    return f"{value:.2f}" if value < 1.995 else f"{value:.1f}" if value < 9.95 else text.quantity(value)


def _ranks(number: int) -> str:
    return f"{number:,} rank{'' if number == 1 else 's'}"


# -- tables


def _choices(advice: Recommendation) -> str:
    here = _ranks(advice.costs.world)
    title = f"Which batch? {text.percent(advice.confidence)} intervals; -> the nearest that {here} can make"
    return table(title, CHOICE_COLUMNS, choice_rows(advice))


def choice_rows(advice: Recommendation) -> list[tuple[str, ...]]:
    """For each data efficiency the batches, and what the one over the run predicts for the run's own progress."""
    predicted = {prediction.global_batch: prediction for prediction in advice.curve}
    rows = []
    for now, over in zip(advice.now.choices, advice.run.choices):
        found = predicted.get(over.global_batch) if over.global_batch else None
        costs = _costs_of(found) if found else ("-",) * 4
        rows.append((f"{over.efficiency:g}", _choice(now), _choice(over), *costs))
    return rows


def _choice(choice: Choice) -> str:
    return interval(choice.wanted) + (f" -> {choice.global_batch:,}" if choice.global_batch else "")


def _costs_of(found: Prediction) -> tuple[str, ...]:
    return f"x {_value(found.steps, factor)}", f"x {_value(found.samples, factor)}", *_elsewhere(found)


def _elsewhere(found: Prediction) -> tuple[str, str]:
    """On how many ranks the batch is one full micro-batch each, and how long it takes there."""
    seconds = found.seconds_on_ranks
    return (
        f"{found.ranks:,}" if found.ranks else "none full",
        _value(seconds, text.duration) if seconds else "not known",
    )


def _curve(advice: Recommendation) -> str:
    head = (
        "global\nbatch",
        "data\nefficiency",
        "steps\nover the run",
        "samples\nover the run",
        "steps\nfrom now on",
        "samples\nfrom now on",
        f"time on\n{_ranks(advice.costs.world)}",
        "\nranks",
        "time\non them",
    )
    rows = [_row(prediction, advice.facts["global_batch"]) for prediction in advice.curve]
    return table("Trade-off of fixed batches (* the batch in force)", head, rows)


def _row(prediction: Prediction, in_force: int) -> tuple[str, ...]:
    here = prediction.seconds
    return (
        f"{prediction.global_batch:,}{'*' if prediction.global_batch == in_force else ' '}",
        _value(prediction.efficiency, lambda share: f"{share:.2f}"),
        interval(prediction.steps, factor),
        interval(prediction.samples, factor),
        _value(prediction.steps_now, factor),
        _value(prediction.samples_now, factor),
        _value(here, text.duration) if here else "not known",
        *_elsewhere(prediction),
    )


def _value(quantity: Quantity, words: Callable[[float], str]) -> str:
    """The value alone, or the interval where there is none."""
    return interval(quantity, words) if quantity.value is None else words(quantity.value)


# -- data


def to_dict(advice: Recommendation) -> dict[str, Any]:
    """The recommendation as JSON data. Intervals are ``{value, low, high}``; ``high`` is null when there is none."""
    share = advice.costs.own_share()
    fastest = advice.costs.fastest(advice.run.critical)
    model = advice.costs.model
    return {
        **advice.facts,
        "calibration": advice.calibration,
        "calibrated": advice.calibrated,
        "confidence": advice.confidence,
        "measured_share": advice.measured,
        "now": _outlook(advice.now),
        "over_the_run": _outlook(advice.run) | _needs(advice.run),
        "curve": [_prediction(prediction) for prediction in advice.curve],
        "time": {
            "fixed": model.fixed if model else None,
            "per_micro_batch": model.of_micro_batch(advice.costs.model_micro_batch) if model else None,
            "micro_batch": advice.costs.model_micro_batch if model else None,
            "why_not": advice.costs.why_not or None,
            "one_micro_batch": advice.costs.of_one_micro_batch(),
            "fastest_batch": fastest.to_dict() if fastest else None,
            "own_share": {"samples_per_rank": share[0], "seconds": share[1]} if share else None,
        },
        "caveats": caveats(advice),
    }


def _outlook(outlook: Outlook) -> dict[str, Any]:
    choices = [
        {"efficiency": one.efficiency, "wanted": one.wanted.to_dict(), "global_batch": one.global_batch}
        for one in outlook.choices
    ]
    return {
        "noise_scale": outlook.scale.to_dict(),
        "critical_batch": outlook.critical.to_dict(),
        "resolved": outlook.critical.bounded,
        "batches": choices,
    }


def _needs(outlook: Outlook) -> dict[str, Any]:
    tradeoff = outlook.tradeoff
    return {
        "steps": tradeoff.steps,
        "samples": tradeoff.samples,
        "least_steps": tradeoff.least_steps.to_dict(),
        "least_samples": tradeoff.least_samples.to_dict(),
        "efficiency": tradeoff.efficiency.to_dict(),
        "unresolved_share": tradeoff.unresolved / tradeoff.samples,
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    quantities = {
        name: getattr(prediction, name)
        for name in ("efficiency", "steps", "samples", "steps_now", "samples_now", "seconds", "seconds_on_ranks")
    }
    plain = {name: quantity.to_dict() if quantity else None for name, quantity in quantities.items()}
    return {"global_batch": prediction.global_batch, "ranks": prediction.ranks, **plain}
