"""The report as one HTML page: no script, nothing loaded from elsewhere, everything that it shows escaped."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adabatch.report import history, recommend_text
from adabatch.report.drawing import Key, Plot
from adabatch.report.markup import Markup, element, joined
from adabatch.report.plots import plots, trade_off
from adabatch.report.recommend import NotMeasured, recommendation
from adabatch.report.style import STYLE
from adabatch.report.summary import summary
from adabatch.runlog import Metrics, read_metrics, text
from adabatch.runlog.reader import Record

_ROWS = 250  # most rows of one table; a page must stay small however long the run was
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # the browser, too, refuses to load anything


def write_report(run_folder: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run, finished or not, and return its path.

    Args:
        run_folder: the run folder; its ``metrics.jsonl`` is all that is read.
        output: the HTML file to write; ``report.html`` in the run folder when ``None``. It is replaced whole.

    Raises:
        FileNotFoundError: when the folder has no metrics.
        ValueError: when its metrics file holds no records.
    """
    metrics = read_metrics(run_folder)
    target = Path(output) if output is not None else metrics.path.parent / "report.html"
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    aside.write_text(_page(metrics), encoding="utf-8", errors="replace")
    os.replace(aside, target)
    return target


def _page(metrics: Metrics) -> str:
    facts = summary(metrics)
    name = metrics.path.resolve().parent.name
    body = element(
        "main",
        _header(metrics, facts, name),
        _numbers(facts),
        element("ul", *(element("li", _unbroken(sentence)) for sentence in facts["sentences"]), class_="words"),
        _caveats(facts),
        _which_batch(metrics),
        _figures(plots(metrics, facts)),
        _decisions(metrics),
        _schedule(metrics),
        _resumes(metrics),
        _controls(metrics),
        _calibrations(metrics),
        _configuration(metrics),
    )
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        element("title", f"{name}: adabatch report"),
        element("style", Markup(STYLE)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', body), lang='en')}\n"


def _header(metrics: Metrics, facts: Mapping[str, Any], name: str) -> Markup:
    ended = facts["ended"]
    pill = element(
        "span", f"ended: {ended}" if ended else "no end record", class_=f"pill {'good' if ended else 'warn'}"
    )
    begun = metrics.start.get("time") if metrics.start else None
    started = f"started {datetime.fromtimestamp(begun, UTC):%Y-%m-%d %H:%M} UTC" if begun else None
    program = metrics.start.get("program") if metrics.start else None
    under = " · ".join(str(fact) for fact in (program, started) if fact)
    return element("header", element("h1", name), element("p", pill, f" {under}", class_="under"))


def _unbroken(words: str) -> str:
    """``words`` without line breaks between a number and its unit."""
    return re.sub(
        r"(?<=\d) (?=(?:%|ms|s|min|h|d|times)(?!\w))|(?<=min) (?=\d)|(?<=batch) (?=\d)", "\N{NO-BREAK SPACE}", words
    )


def _numbers(facts: Mapping[str, Any]) -> Markup | None:
    if not facts["steps"]:
        return None
    cards: list[tuple[str, str, str] | None] = [
        _steps_card(facts),
        _efficiency_card(facts),
        _seconds_card(facts),
        _loss_card(facts),
    ]
    cards += [_batch_card(facts), _noise_card(facts)]
    return element("dl", *(_card(*card) for card in cards if card), class_="numbers")


def _card(title: str, value: str, about: str) -> Markup:
    value_line, about_line = (
        element("div", _unbroken(value), class_="value"),
        element("div", _unbroken(about), class_="about"),
    )
    return element("div", element("dt", title), element("dd", value_line, about_line))


def _steps_card(facts: Mapping[str, Any]) -> tuple[str, str, str]:
    planned = facts["steps_at_start_batch"]
    about = f"batch {facts['start_batch']:,} would have taken {planned:,}" if planned else "batch unknown"
    return "Optimizer steps", f"{facts['steps']:,}", about


def _efficiency_card(facts: Mapping[str, Any]) -> tuple[str, str, str]:
    if facts["efficiency"] is None:
        return "Data efficiency spent", "unknown", "no noise scale was measured"
    notes = [] if facts["target_efficiency"] is None else [f"target {text.percent(facts['target_efficiency'])}"]
    notes += [] if facts["calibrated"] else ["uncalibrated"]
    mark = "" if facts["calibrated"] else "*"
    return "Data efficiency spent", text.percent(facts["efficiency"]) + mark, ", ".join(notes) or "calibrated"


def _seconds_card(facts: Mapping[str, Any]) -> tuple[str, str, str]:
    statement, saved, predicted = facts["time_statement"], facts["seconds_saved"], facts["seconds_at_start_batch"]
    took = f"took {text.duration(facts['seconds'])}"
    if saved is not None:
        value = "none" if statement.startswith("none") else text.duration(saved)
        return "Time saved here", value, f"{took}; batch {facts['start_batch']:,} about {text.duration(predicted)}"
    value, _, reason = statement.partition(": ") if ": " in statement else statement.partition(", because ")
    return "Time saved here", value, f"{took}; {reason}"


def _loss_card(facts: Mapping[str, Any]) -> tuple[str, str, str]:
    if facts["held_out"] is None:
        return "Training loss", text.loss(facts["loss"]), "at the end; nothing was held out"
    return "Held-out loss", text.loss(facts["held_out"]), f"lowest {text.loss(facts['lowest_held_out'])}"


def _batch_card(facts: Mapping[str, Any]) -> tuple[str, str, str] | None:
    if not facts["start_batch"]:
        return None
    changes, start, final = facts["changes"], facts["start_batch"], facts["final_batch"]
    value = f"{start:,} → {final:,}" if changes or start != final else f"{start:,}"
    return "Global batch", value, f"{changes} change{'' if changes == 1 else 's'}" if changes else "never changed"


def _noise_card(facts: Mapping[str, Any]) -> tuple[str, str, str]:
    if facts["resolved"] is None:
        return "Noise scale", "unknown", "it was not measured"
    if facts["resolved"]:
        low, high = text.quantity(facts["scale_low"]), text.quantity(facts["scale_high"])
        return "Noise scale at the end", text.quantity(facts["scale"]), f"between {low} and {high} samples"
    low = facts["scale_low"]
    return "Noise scale at the end", f"> {text.quantity(low)}" if low else "unresolved", "unresolved: no upper end"


def _caveats(facts: Mapping[str, Any]) -> Markup | None:
    if not facts["caveats"]:
        return None
    notes = element("ul", *(element("li", _unbroken(note)) for note in facts["caveats"]))
    return element("section", element("h3", "To keep in mind"), notes, class_="caveats")


def _which_batch(metrics: Metrics) -> Markup | None:
    """What the run recommends; nothing when it has measured nothing."""
    try:
        advice = recommendation(metrics)
    except NotMeasured:
        return None
    head = tuple(title.strip().replace("\n", " ") for title in recommend_text.CHOICE_COLUMNS)
    now, over, _, *others = recommend_text.measured(advice)  # the efficiency stands above
    words = [now, over, *others, *recommend_text.costs(advice)]
    return joined(
        element("h2", "Which batch?"),
        element("ul", *(element("li", _unbroken(sentence)) for sentence in words), class_="words"),
        _table(head, recommend_text.choice_rows(advice), strong=2),
        element("div", _figure(trade_off(advice)), class_="plots alone"),
        *(element("p", _unbroken(note), class_="note") for note in recommend_text.notes(advice)),
    )


def _figures(drawn: list[Plot]) -> Markup | None:
    if not drawn:
        return None
    return joined(element("h2", "Curves"), element("div", *map(_figure, drawn), class_="plots"))


def _figure(plot: Plot) -> Markup:
    legend = element("ul", *(element("li", _swatch(key), key.words) for key in plot.legend), class_="legend")
    caption = element("figcaption", element("h3", plot.title), legend if plot.legend else None)
    note = element("p", plot.note, class_="note") if plot.note else None
    picture = Markup(plot.svg.replace('aria-hidden="true"', f'role="img" aria-label="{_quoted(plot.spoken)}"', 1))
    return element("figure", caption, picture, note)


def _quoted(words: str) -> str:
    return element("i", words)[3:-4]


def _swatch(key: Key) -> Markup:
    colour = f"var(--{key.colour})"
    shapes = {
        "line": f'<path d="M0 5H22" stroke="{colour}" stroke-width="2.4"/>',
        "thin": f'<path d="M11 0V10" stroke="{colour}" stroke-width="1"/>',
        "dashed": f'<path d="M0 5H22" stroke="{colour}" stroke-width="1.8" stroke-dasharray="5 3"/>',
        "dotted": f'<path d="M0 5H22" stroke="{colour}" stroke-width="2" stroke-dasharray="2 2.5"/>',
        "band": f'<path d="M0 5H22" stroke="{colour}" stroke-width="10" opacity=".25"/>'
        f'<path d="M0 5H22" stroke="{colour}" stroke-width="2"/>',
        "dot": f'<circle cx="11" cy="5" r="4" fill="{colour}"/>',
        "ring": f'<circle cx="11" cy="5" r="3.4" fill="none" stroke="{colour}" stroke-width="1.4"/>',
        "arrow": f'<path d="M11 0.5l4.5 8h-9z" fill="{colour}"/>',
    }
    return Markup(f'<svg viewBox="0 0 22 10" aria-hidden="true">{shapes[key.mark]}</svg>')


def _decisions(metrics: Metrics) -> Markup:
    changed = history.changes(metrics)
    held = [record for record in metrics.decisions if not history.is_change(record)]
    return joined(
        element("h2", "Decisions"),
        _decision_table(changed) if changed else element("p", "No decision changed the batch.", class_="under"),
        element(
            "details",
            element("summary", f"{len(held):,} decision{'' if len(held) == 1 else 's'} that held the batch"),
            _decision_table(held),
            class_="quiet",
        )
        if held
        else None,
    )


def _decision_table(decisions: list[Record]) -> Markup:
    rows = [
        (
            _count(record["samples"]),
            _count(record["step"]),
            f"{record.get('previous')} → {record.get('batch')}" if history.is_change(record) else record.get("batch"),
            text.noise_scale(record) or "not measured",
            record.get("reason") or "no reason recorded",
        )
        for record in decisions
    ]
    return _table(("at samples", "step", "global batch", "noise scale", "reason"), rows, strong=2, left=(4,))


def _schedule(metrics: Metrics) -> Markup | None:
    """How each batch was made and what it cost: ranks, micro-batches, step times."""
    run = history.stretches(metrics)
    if not run:
        return None
    timed = {timing.shape: timing for timing in history.timings(metrics)}
    rows = []
    for stretch in run:
        shape, timing = stretch.shape, timed.get(stretch.shape) if stretch.shape else None
        split = f"{shape.world} × {shape.micro_batches} × {shape.micro_batch}" if shape else "unknown"
        step_time = text.duration(timing.median) if timing else "not timed"
        speed = text.quantity(timing.samples_per_second) if timing else "not timed"
        rows.append(
            (_count(stretch.first_sample), _count(stretch.steps), _count(stretch.global_batch), split, step_time, speed)
        )
    head = ("from sample", "steps", "global batch", "ranks × micro-batches × size", "time per step", "samples/s")
    return joined(element("h2", "Schedule"), _table(head, rows, strong=2))


def _resumes(metrics: Metrics) -> Markup | None:
    if not metrics.resumes:
        return None
    parts: list[Markup] = [element("h2", "Resumes")]
    for record in metrics.resumes:
        where = f"From step {_count(record.get('from_step') or record['step'])}, {_count(record['samples'])} samples"
        changes = _changes(record)
        parts.append(element("p", where + ("." if changes else "; the configuration was the same.")))
        parts += [changes] if changes else []
    return joined(*parts)


def _controls(metrics: Metrics) -> Markup | None:
    """What the run was asked to change while it ran, and what came of it."""
    if not metrics.controls:
        return None
    parts: list[Markup] = [element("h2", "Changed while it ran")]
    for record in metrics.controls:
        changes = _changes(record)
        outcome = "taken" if changes else "taken, though all of it was so already"
        if record.get("outcome") != "taken":
            outcome = f"refused: {record.get('reason')}"
        where = f"At step {_count(record['step'])}, {_count(record['samples'])} samples"
        parts.append(element("p", f"{where}, a request was {outcome}."))
        parts += [changes] if changes else []
    return joined(*parts)


def _calibrations(metrics: Metrics) -> Markup | None:
    """What the run measured of its critical batch while it ran, and what came of it."""
    if not metrics.calibrations:
        return None
    parts: list[Markup] = [element("h2", "Calibrated while it ran")]
    for record in metrics.calibrations:
        changes, cost = _changes(record), record.get("cost") or {}
        where = f"At step {_count(record['step'])}, {_count(record['samples'])} samples"
        took = f"{_count(cost.get('samples') or 0)} samples in branches, not counted as training"
        outcome = "taken" if record.get("outcome") == "taken" else "refused"
        parts.append(element("p", f"{where}, {outcome}: {record.get('reason')} ({took})."))
        parts += [changes] if changes else []
    return joined(*parts)


def _changes(record: Mapping[str, Any]) -> Markup | None:
    """A table of the settings that changed."""
    changes = [change for change in record.get("changes") or [] if isinstance(change, Mapping)]
    rows = [
        (change.get("key"), _value(change.get("old")), _value(change.get("new")), change.get("outcome", "applied"))
        for change in changes
    ]
    head = ("setting", "before", "from here on", "outcome")
    return _table(head, rows, strong=0, left=(3,), kind="settings") if rows else None


def _configuration(metrics: Metrics) -> Markup | None:
    start = metrics.start
    if not start:
        return None
    command = shlex.join([str(start.get("program") or "unknown"), *map(str, start.get("arguments") or [])])
    versions = ", ".join(f"{name} {version}" for name, version in (start.get("versions") or {}).items())
    config = "\n".join(f"{key}: {_value(value)}" for key, value in _flat(start.get("config") or {}))
    return joined(
        element("h2", "How it was run"),
        _folded("Command", command, "wrap"),
        _folded("Configuration", config or "none recorded"),
        element("footer", versions) if versions else None,
    )


def _folded(title: str, content: str, class_: str | None = None) -> Markup:
    return element("details", element("summary", title), element("pre", content, class_=class_))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Settings under the dotted names by which they are overridden on the command line."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _count(value: int) -> str:
    return f"{value:,}"


def _table(
    head: tuple[str, ...], rows: list[tuple[Any, ...]], *, strong: int, left: tuple[int, ...] = (), kind: str = "counts"
) -> Markup:
    """A table whose rows turn into small blocks on a phone. Of very many rows the first and the last are shown."""
    shown = rows if len(rows) <= _ROWS else [*rows[: _ROWS // 2], *rows[-_ROWS // 2 :]]
    titles = [element("th", title, class_="left" if column in left else None) for column, title in enumerate(head)]
    lines = [
        element("tr", *(_cell(cell, column, head, strong, left) for column, cell in enumerate(row))) for row in shown
    ]
    table = element("table", element("thead", element("tr", *titles)), element("tbody", *lines), class_=f"rows {kind}")
    cut = f"{len(rows) - len(shown):,} of {len(rows):,} rows in the middle are left out; metrics.jsonl has them all."
    note = element("p", cut, class_="note") if len(shown) < len(rows) else None
    return joined(element("div", table, class_="scroll"), note)


def _cell(value: Any, column: int, head: tuple[str, ...], strong: int, left: tuple[int, ...]) -> Markup:
    class_ = "left" if column in left else "strong" if column == strong else "nowrap"
    return element("td", value, class_=class_, data_label=head[column])
