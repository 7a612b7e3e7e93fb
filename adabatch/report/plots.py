"""The plots of a report as inline SVG. Colours are CSS variables of the page, so that light, dark and print all fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from adabatch.report import history
from adabatch.report.drawing import COLOURS, Key, Plot, columns, label_axes, to_svg
from adabatch.report.recommend import Recommendation
from adabatch.report.summary import held_out_names
from adabatch.report.tradeoff import Tradeoff
from adabatch.runlog import Metrics, text
from adabatch.runlog.reader import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Item = TypeVar("_Item")
_POINTS = 400


def plots(metrics: Metrics, facts: dict[str, Any]) -> list[Plot]:
    """All plots for which the run has records."""
    made: Iterable[Plot | None] = (
        _batch_and_noise(metrics),
        _efficiency(metrics, facts),
        _loss(metrics, "samples"),
        _loss(metrics, "step"),
        _learning_rate(metrics),
        _step_time(metrics),
        *(_held_out_metric(metrics, name) for name in held_out_names(metrics)[:4]),
    )
    return [plot for plot in made if plot]


def _loss(metrics: Metrics, axis: str) -> Plot | None:
    points = [(record[axis], record["loss"]) for record in metrics.steps if record.get("loss") is not None]
    held_out = [(record[axis], record["loss"]) for record in metrics.evaluations if record.get("loss") is not None]
    if len(points) + len(held_out) < 2:
        return None

    def draw(axes: Axes) -> None:
        axes.plot(*columns(_bucketed(points, _POINTS)), color=COLOURS["train"], linewidth=0.7, alpha=0.45)
        axes.plot(*columns(_bucketed(points, 40)), color=COLOURS["train"], linewidth=1.4)
        axes.plot(*columns(_bucketed(held_out, 60)), color=COLOURS["held"], marker="o", markersize=2.6, linewidth=1)
        _marks(axes, metrics, axis)
        _focus(axes, [value for _, value in _bucketed(points, 40) + held_out])
        label_axes(axes, "steps" if axis == "step" else "samples", "loss")

    legend = [Key("train", "line", "training (thin: as recorded)")]
    legend += [Key("held", "dot", "held-out")] if held_out else []
    unit = "steps" if axis == "step" else "samples"
    spoken = f"Loss over {unit}, ending at {text.loss((points or held_out)[-1][1])}."
    return Plot(f"Loss over {unit}", to_svg(draw, f"loss-{axis}"), spoken, legend + _mark_keys(metrics))


def _held_out_metric(metrics: Metrics, name: str) -> Plot | None:
    points = [(r["samples"], r[name]) for r in metrics.evaluations if isinstance(r.get(name), (int, float))]
    if len(points) < 2:
        return None

    def draw(axes: Axes) -> None:
        axes.plot(*columns(points), color=COLOURS["held"], marker="o", markersize=2.6, linewidth=1)
        _marks(axes, metrics, "samples")
        label_axes(axes, "samples", name)

    spoken = f"Held-out {name} over samples, ending at {text.loss(points[-1][1])}."
    legend = [Key("held", "dot", "held-out"), *_mark_keys(metrics)]
    return Plot(f"Held-out {name}", to_svg(draw, f"held-{name}"), spoken, legend)


def _batch_and_noise(metrics: Metrics) -> Plot | None:
    run = history.stretches(metrics)
    if not run:
        return None
    measured = _thinned([record for record in metrics.steps if text.noise_scale(record)], _POINTS)
    resolved = [record if text.is_resolved(record) else None for record in measured]
    bounds = [record if record.get("scale_low") and not text.is_resolved(record) else None for record in measured]

    def draw(axes: Axes) -> None:
        axes.set_yscale("log")
        x = [record["samples"] for record in measured]
        low, scale, high = (_values(resolved, key) for key in ("scale_low", "scale", "scale_high"))
        axes.fill_between(x, low, high, color=COLOURS["noise"], alpha=0.22, linewidth=0)
        axes.plot(x, scale, color=COLOURS["noise"], linewidth=1.4)
        below = _values(bounds, "scale_low")
        axes.plot(x, below, color=COLOURS["noise"], linewidth=1, linestyle=(0, (3, 2)))
        axes.plot(
            *columns(_arrows(bounds, run[-1].first_sample + run[-1].samples)),
            color=COLOURS["noise"],
            marker="^",
            markersize=3.5,
            linestyle="none",
        )
        _draw_schedule(axes, run, metrics)
        _marks(axes, metrics, "samples", changes=False)
        _batch_axis(axes, [s.global_batch for s in run], [v for v in (*low, *scale, *below) if v], high)
        label_axes(axes, "samples", "samples")

    legend = [Key("batch", "line", "global batch")]
    legend += [Key("batch", "dot", "a decision changed it")] if history.changes(metrics) else []
    legend += [Key("noise", "band", "noise scale with its interval")] if any(resolved) else []
    legend += [Key("noise", "arrow", "unresolved: above this bound")] if any(bounds) else []
    spoken = f"Global batch from {run[0].global_batch} to {run[-1].global_batch}, and the noise scale, over samples."
    return Plot(
        "Global batch and noise scale", to_svg(draw, "batch"), spoken, legend + _mark_keys(metrics, changes=False)
    )


def _draw_schedule(axes: Axes, run: list[history.Stretch], metrics: Metrics) -> None:
    edges = [stretch.first_sample for stretch in run] + [run[-1].first_sample + run[-1].samples]
    batches = [stretch.global_batch for stretch in run]
    axes.step(edges, [*batches, batches[-1]], where="post", color=COLOURS["batch"], linewidth=1.7)
    dots = [(record["samples"], record["batch"]) for record in history.changes(metrics)]
    style: dict[str, Any] = {"markeredgecolor": COLOURS["card"], "markeredgewidth": 0.8, "linestyle": "none"}
    axes.plot(*columns(dots), color=COLOURS["batch"], marker="o", markersize=5, zorder=5, **style)


def _arrows(bounds: Sequence[Record | None], end: int) -> list[tuple[float, float]]:
    """A few upward marks along the lower bounds."""
    apart = end / 30
    marked: list[tuple[float, float]] = []
    for record in bounds:
        if record and (not marked or record["samples"] - marked[-1][0] >= apart):
            marked.append((record["samples"], record["scale_low"]))
    return marked


def _batch_axis(axes: Axes, batches: list[int], scales: list[float], highs: list[float]) -> None:
    """Limits that show the batch and the bulk of the interval; labels at powers of 2."""
    top = max([*batches, *_quantile(highs, 0.9), *_quantile(scales, 0.98)])
    bottom = max(min([*batches, *_quantile(scales, 0.02)]), min(batches) / 32)
    axes.set_ylim(bottom / 1.4, top * 1.4)
    first, last = math.ceil(math.log2(bottom / 1.4)), math.floor(math.log2(top * 1.4))
    stride = max(math.ceil((last - first + 1) / 7), 1)
    axes.set_yticks([2.0**power for power in range(first, last + 1, stride)])
    axes.yaxis.set_major_formatter(lambda value, _: text.count(value) if value >= 1 else f"{value:g}")
    axes.minorticks_off()


def _quantile(values: Iterable[float], share: float) -> list[float]:
    ordered = sorted(value for value in values if math.isfinite(value) and value > 0)
    return [ordered[round(share * (len(ordered) - 1))]] if ordered else []


def _learning_rate(metrics: Metrics) -> Plot | None:
    points = [(record["samples"], record["lr"]) for record in metrics.steps if record.get("lr") is not None]
    if len(points) < 2:
        return None

    def draw(axes: Axes) -> None:
        axes.plot(*columns(_thinned(points, _POINTS)), color=COLOURS["rate"], linewidth=1.4)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        _marks(axes, metrics, "samples")
        label_axes(axes, "samples", "learning rate")

    spoken = f"Learning rate over samples, ending at {points[-1][1]:.3g}."
    return Plot(
        "Learning rate", to_svg(draw, "rate"), spoken, [Key("rate", "line", "first group"), *_mark_keys(metrics)]
    )


def _efficiency(metrics: Metrics, facts: dict[str, Any]) -> Plot | None:
    points = [(record, history.efficiency_of(record)) for record in _thinned(metrics.steps, _POINTS)]
    if sum(value is not None for _, value in points) < 2:
        return None
    target = facts["target_efficiency"]
    x = [record["samples"] for record, _ in points]

    def draw(axes: Axes) -> None:
        for wanted, style in ((True, "solid"), (False, "dotted")):
            y = [value if value is not None and text.is_resolved(r) is wanted else math.nan for r, value in points]
            axes.plot(x, y, color=COLOURS["spent"], linewidth=1.4, linestyle=style)
        if target is not None:
            axes.axhline(target, color=COLOURS["ink"], linewidth=1, linestyle=(0, (4, 3)))
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        _marks(axes, metrics, "samples")
        label_axes(axes, "samples", "data efficiency")

    legend = [Key("spent", "line", "at the batch in force")]
    if any(value is not None and not text.is_resolved(record) for record, value in points):
        legend.append(Key("spent", "dotted", "noise scale unresolved"))
    legend += [Key("ink", "dashed", f"target {text.percent(target)}")] if target is not None else []
    title = "Data efficiency" + ("" if facts["calibrated"] else " (uncalibrated)")
    spoken = f"{title} over samples; {text.percent(facts['efficiency'])} on the whole."
    return Plot(title, to_svg(draw, "efficiency"), spoken, legend + _mark_keys(metrics))


def _step_time(metrics: Metrics) -> Plot | None:
    measured = [timing for timing in history.timings(metrics) if timing.intervals >= history.MIN_TIMED]
    fitted = history.step_time_model(metrics, measured)
    if len({timing.shape.micro_batches for timing in measured}) < 2:
        return None
    model, full = fitted if fitted else (None, max(timing.shape.micro_batch for timing in measured))

    def draw(axes: Axes) -> None:
        for timing in measured:
            fill = COLOURS["batch"] if timing.shape.micro_batch == full else COLOURS["card"]
            x, spread = timing.shape.micro_batches, ([timing.median - timing.low], [timing.high - timing.median])
            style: dict[str, Any] = {"ecolor": COLOURS["batch"], "elinewidth": 1, "capsize": 2.5}
            axes.errorbar(x, timing.median, yerr=spread, fmt="o", color=COLOURS["batch"], mfc=fill, ms=4.5, **style)
        end = max(timing.shape.micro_batches for timing in measured)
        if model:
            line = [model.seconds(count, count * full) for count in (0, end)]
            axes.plot([0, end], line, color=COLOURS["held"], linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        axes.set_xlim(0, end * 1.06)
        axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", integer=True)
        label_axes(axes, "micro-batches per rank and step", "seconds per step")

    partial = any(timing.shape.micro_batch != full for timing in measured)
    legend = [Key("batch", "dot", f"median and quartiles, micro-batch {full}")]
    legend += [Key("batch", "ring", "smaller micro-batches")] if partial else []
    note = ""
    if model:
        legend.append(Key("held", "dashed", "fixed + per micro-batch"))
        each = text.duration(model.of_micro_batch(full))
        costs = f"{text.duration(model.fixed)} per step + {each} per micro-batch"
        note = f"Fitted: {costs}. Growing the batch on the same ranks saves only the first part."
    return Plot("Time per step", to_svg(draw, "time"), f"Seconds per step against micro-batches. {note}", legend, note)


def trade_off(advice: Recommendation) -> Plot:
    """Steps against samples of fixed batches, both as multiples of the run's own, with the recommended ones marked."""
    known = advice.run.critical.value is not None
    marked = _marked_batches(advice)
    legend = [Key("batch", "ring", "this run")]
    legend += [Key("held", "dot", "data efficiency: batch")] if marked else []
    legend.append(Key("noise", "band", "fixed batches, interval" if known else "fixed batches: somewhere in here"))
    title = "Steps against samples, predicted" + ("" if advice.calibrated else " (uncalibrated)")
    spoken = f"{title}, of fixed batches from {advice.curve[0].global_batch:,} to {advice.curve[-1].global_batch:,}."
    spoken += "".join(f" Batch {batch:,} for a data efficiency of {words}." for batch, words in marked.items())
    svg = to_svg(lambda axes: _draw_trade_off(axes, advice.run.tradeoff, advice), "trade-off")
    return Plot(title, svg, spoken, legend)


def _marked_batches(advice: Recommendation) -> dict[int, str]:
    """The recommended batches, each with the data efficiencies that it is for."""
    marked: dict[int, str] = {}
    for choice in advice.run.choices:
        if choice.global_batch:
            before = marked.get(choice.global_batch)
            marked[choice.global_batch] = f"{before}, {choice.efficiency:g}" if before else f"{choice.efficiency:g}"
    return marked


def _draw_trade_off(axes: Axes, whole: Tradeoff, advice: Recommendation) -> None:
    first, last = advice.curve[0].global_batch, advice.curve[-1].global_batch
    grid = [first * (last / first) ** (i / 80) for i in range(81)]

    def place(batch: float, end: str) -> tuple[float, float]:
        samples, steps = getattr(whole.samples_at(batch), end), getattr(whole.steps_at(batch), end)
        return samples / whole.samples, steps / whole.steps

    axes.set_xscale("log")
    axes.set_yscale("log")
    edge = [place(batch, "low") for batch in grid] + [place(batch, "high") for batch in reversed(grid)]
    axes.fill(*columns(edge), color=COLOURS["noise"], alpha=0.22, linewidth=0)
    if advice.run.critical.value is not None:
        axes.plot(*columns([place(batch, "value") for batch in grid]), color=COLOURS["noise"], linewidth=1.4)
    style: dict[str, Any] = {"linestyle": "none", "marker": "o", "zorder": 5, "markersize": 5}
    for batch, words in _marked_batches(advice).items():
        spot = place(batch, "value")
        axes.plot(*spot, color=COLOURS["held"], **style)
        axes.annotate(f"{words}: {batch:,}", spot, (5, 4), textcoords="offset points", color=COLOURS["ink"])
    axes.plot(1.0, 1.0, color=COLOURS["batch"], mfc=COLOURS["card"], mew=1.4, **style)
    _multiples(axes)
    label_axes(axes, "samples, as multiples of the run's", "steps, as multiples of the run's")


def _multiples(axes: Axes) -> None:
    """Labels at 1, 2 and 5 times the powers of ten."""
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        axis.set_ticks([tick for tick in ticks if low <= tick <= high])
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()


def _marks(axes: Axes, metrics: Metrics, axis: str, *, changes: bool = True) -> None:
    """Thin vertical lines where the batch changed, dashed ones where the run was resumed, told to change or calibrated."""
    for record in history.changes(metrics)[:100] if changes else []:
        axes.axvline(record[axis], color=COLOURS["soft"], linewidth=0.6, alpha=0.55, zorder=0)
    breaks = (*metrics.resumes, *history.taken_controls(metrics), *history.taken_calibrations(metrics))
    for record in breaks[:50]:
        axes.axvline(record[axis], color=COLOURS["held"], linewidth=0.9, linestyle=(0, (1, 1.5)), zorder=0)


def _mark_keys(metrics: Metrics, *, changes: bool = True) -> list[Key]:
    keys = [Key("soft", "thin", "batch changed")] if changes and history.changes(metrics) else []
    breaks = (
        ("resumed", metrics.resumes),
        ("told to change", history.taken_controls(metrics)),
        ("calibrated", history.taken_calibrations(metrics)),
    )
    words = [word for word, found in breaks if found]
    return keys + ([Key("held", "dotted", " or ".join(words))] if words else [])


def _focus(axes: Axes, values: list[float]) -> None:
    """Keep single spikes from flattening the curve: the axis ends a little beyond the smoothed values."""
    if values:
        low, high = min(values), max(values)
        margin = 0.06 * (high - low or abs(high) or 1)
        axes.set_ylim(low - margin, high + margin)


def _values(records: Sequence[Record | None], key: str) -> list[float]:
    return [math.nan if record is None else record[key] for record in records]


def _bucketed(points: list[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """At most ``limit`` points, each the mean of as many neighbours; the first and the last point stay."""
    if len(points) <= limit:
        return points
    cuts = [round(index * len(points) / limit) for index in range(limit + 1)]
    means = [_mean(points[first:last]) for first, last in pairwise(cuts)]
    return [(points[0][0], means[0][1]), *means[1:-1], (points[-1][0], means[-1][1])]


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def _thinned(items: Sequence[_Item], limit: int) -> list[_Item]:
    """At most ``limit`` of the items, evenly spread, the last one among them."""
    if len(items) <= limit:
        return list(items)
    return [items[round(index * (len(items) - 1) / (limit - 1))] for index in range(limit)]
