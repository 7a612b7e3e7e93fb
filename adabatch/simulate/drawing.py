"""A simulated run as a picture: the batch against the truth, and where it stands among fixed batches."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

from adabatch.report.drawing import label_axes
from adabatch.simulate.comparison import Comparison
from adabatch.simulate.run import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Colours that colour-blind readers tell apart, after Okabe and Ito: those of the report.
BATCH, TRUTH, FIXED, INK = "#0072b2", "#c98a00", "#d55e00", "#1d2126"
SUFFIXES = (".png", ".svg", ".pdf", ".html")


def require_drawable(path: Path) -> None:
    """Raise ``ValueError`` when ``path`` has another suffix than .png, .svg, .pdf or .html."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot writes {', '.join(SUFFIXES)}, not {path.name!r}")


def draw(found: Comparison, path: Path, title: str) -> Path:
    """Write the picture to ``path``, in the format of its suffix.

    Raises:
        ValueError: for another suffix than .png, .svg, .pdf or .html.
    """
    require_drawable(path)
    figure = _figure(found, title)
    if path.suffix == ".html":
        file = io.StringIO()
        figure.savefig(file, format="svg")
        svg = file.getvalue()
        head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        path.write_text(f"{head}{svg[svg.index('<svg') :]}</html>\n", encoding="utf-8")
    else:
        figure.savefig(path, dpi=150)
    return path


def _figure(found: Comparison, title: str) -> Figure:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        figure.suptitle(title, fontsize=10, color=INK)
        _draw_batches(left, found)
        (_draw_losses if found.by_loss else _draw_frontier)(right, found)
    return figure


def _draw_batches(axes: Axes, found: Comparison) -> None:
    points = found.run.points
    samples = [point.samples for point in points]
    ends = [*samples[1:], found.outcome.samples]
    axes.set_yscale("log")
    axes.plot(samples, [point.critical for point in points], color=TRUTH, label="true critical batch")
    _draw_interval(axes, points)
    axes.stairs(
        [point.global_batch for point in points], [0, *ends], baseline=None, color=BATCH, linewidth=1.6, label="batch"
    )
    if found.match:
        reach = "as low a loss" if found.by_loss else "as far"
        label = f"fixed batch that gets {reach}: {found.match.global_batch:,.0f}"
        axes.axhline(found.match.global_batch, color=FIXED, linestyle="--", linewidth=1, label=label)
    _log_ticks(axes.yaxis, *axes.get_ylim())
    _finish(axes, "samples", "samples of a step")


def _draw_interval(axes: Axes, points: list[Point]) -> None:
    known = [(point.samples, point.low, point.high) for point in points if point.low and point.high is not None]
    if known:
        axes.fill_between(
            *zip(*known, strict=True), color=TRUTH, alpha=0.2, linewidth=0, label="noise scale as measured, 95 %"
        )


def _draw_frontier(axes: Axes, found: Comparison) -> None:
    """Steps and samples as multiples of the least of either: all fixed batches lie on one hyperbola."""
    run = found.outcome

    def place(steps: float, samples: float) -> tuple[float, float]:
        return samples / run.needs.samples, steps / run.needs.steps

    x, y = place(run.steps, run.samples)
    reach = max(4.0, 1.3 * (x - 1), 1.3 * (y - 1), 1.3 / (x - 1), 1.3 / (y - 1))
    grid = [reach ** (index / 50 - 1) for index in range(101)]
    axes.plot(
        [1 + 1 / one for one in grid], [1 + one for one in grid], color=FIXED, label="fixed batches, same progress"
    )
    axes.plot(x, y, "o", color=BATCH, label="this run")
    if found.match:
        axes.plot(
            *place(found.match.steps, run.samples), "s", color=FIXED, mfc="none", label="fixed batch, same samples"
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    _log_ticks(axes.xaxis, *axes.get_xlim())
    _log_ticks(axes.yaxis, *axes.get_ylim())
    _finish(axes, "samples / least samples", "steps / least steps")


def _draw_losses(axes: Axes, found: Comparison) -> None:
    """The final loss of the fixed batches against their steps, and that of the run."""
    arms = [arm for _, arm in found.arms if arm.loss is not None]
    axes.plot(
        [arm.steps for arm in arms],
        [arm.loss for arm in arms],
        "s-",
        color=FIXED,
        mfc="none",
        label="fixed batches, same samples",
    )
    if found.outcome.loss is not None:
        axes.plot(found.outcome.steps, found.outcome.loss, "o", color=BATCH, label="this run")
    _finish(axes, "optimizer steps", "final loss")


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set_axisbelow(True)
    axes.grid(True, which="major", color="#e1e4e8", linewidth=0.5)
    label_axes(axes, x, y)
    axes.legend(frameon=False)


def _log_ticks(axis: Axis, low: float, high: float) -> None:
    axis.set_ticks(_ticks(low, high))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")
    axis.axes.minorticks_off()


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers within the bounds, the more of each power of ten the fewer powers there are."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    decades = math.log10(high / low)
    digits = (1, 1.2, 1.5, 2, 3, 5, 7) if decades < 1 else (1, 2, 5) if decades < 3 else (1,)
    return [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
