"""A drawing of the report as inline SVG, in colours that are CSS variables of the page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adabatch.report.markup import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What matplotlib draws with, and the CSS variable that each stands for.
COLOURS = {
    "ink": "#010101",
    "soft": "#020202",
    "grid": "#030303",
    "train": "#040404",
    "held": "#050505",
    "batch": "#060606",
    "noise": "#070707",
    "rate": "#080808",
    "spent": "#090909",
    "card": "#0a0a0a",
}
_SIZE = (4.2, 2.4)  # inches; the page scales it to its column


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a legend: a CSS colour name, how it is drawn, and what it is."""

    colour: str
    mark: str  # line, thin, dashed, band, dot, arrow
    words: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure of the report. ``spoken`` describes it to those who cannot see it."""

    title: str
    svg: Markup
    spoken: str
    legend: list[Key] = field(default_factory=list)
    note: str = ""


def label_axes(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if x in ("samples", "steps"):
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda value, _: _short(value))


def _short(value: float) -> str:
    """A tick label: 0.5, 64, 20k, 1.5M."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"


def columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def to_svg(draw: Callable[[Axes], None], name: str) -> Markup:
    """Draw one set of axes and return it as an ``<svg>`` element without external references or shared ids."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(_style() | {"svg.hashsalt": f"adabatch-{name}"}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(True)
        axes.set_axisbelow(True)
        draw(axes)
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(file)
    return Markup(_inline(file.getvalue(), name))


def _style() -> dict[str, Any]:
    soft = {
        f"{axis}tick.{key}": COLOURS[colour]
        for axis in "xy"
        for key, colour in (("color", "grid"), ("labelcolor", "soft"))
    }
    return soft | {
        "svg.fonttype": "none",
        "font.family": "DejaVu Sans",
        "font.size": 7.8,
        "axes.labelsize": 7.8,
        "axes.labelcolor": COLOURS["soft"],
        "axes.edgecolor": COLOURS["grid"],
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.use_mathtext": False,
        "axes.formatter.useoffset": False,
        "text.parse_math": False,
        "figure.facecolor": "none",
        "grid.color": COLOURS["grid"],
        "grid.linewidth": 0.5,
        "axes.linewidth": 0.6,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
        "path.simplify": True,
    }


def _inline(document: str, name: str) -> str:
    """The ``<svg>`` element alone: page colours, page font, ids of its own, no metadata and no namespaces."""
    svg = document[document.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg).replace("xlink:href", "href")
    svg = re.sub(r"(?<=font: )([\d.]+)px [^;\"]*", r"\1px var(--font)", svg)
    for colour, value in COLOURS.items():
        svg = svg.replace(value, f"var(--{colour})")
    return re.sub(r"\n\s*", " ", svg)
