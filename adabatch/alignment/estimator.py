"""Measured alignments of windows -> running noise scale with a confidence interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from adabatch.alignment.curves import Block, Curves, Point, Row, binned, curves, summed
from adabatch.noise import Estimate, student_quantile

# Blocks of the memory: fewer make Student's quantile wide, and more buy nothing.
MOST_BLOCKS = 32
# With fewer, their variance is too uncertain to close an interval.
FEWEST_BLOCKS = 8
# A scale more than so many times the largest measured m is not claimed: there e(m) has fallen by 3 % only, and what
# else bends the curve by as much is not known.
REACH = 32.0
# The curve is not trusted to this share of the scale, however small its errors.
FIT_ERROR = 0.1
# The memory is at most this share of a run. That is five times what noise.py allows: where the scale is several batches,
# a curve takes hundreds of windows.
LARGEST_SHARE = 0.25
# Numbers above this would leave the range of floats when squared.
LARGEST = 1e120

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """a(m) in one window.

    Attributes:
        samples: m, samples in a set whose gradient is mapped; their average where sets differ.
        alignment: average of <u(g_set), g_rest> over the sets, g_rest the mean gradient of the rest of the window.
        own: average of <u(g_set), g_set>.
        pairs: how many sets there were.
    """

    samples: float
    alignment: float
    own: float
    pairs: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """The curve of one window of ``samples`` samples, over all ranks; no readings where nothing was measured."""

    samples: int
    readings: tuple[Reading, ...] = ()

    @property
    def measurable(self) -> bool:
        """Whether there are two sizes of sets to compare, and finite numbers to compare them by."""
        numbers = [abs(one.alignment) + abs(one.own) for one in self.readings]
        return len({one.samples for one in self.readings}) >= 2 and all(number < LARGEST for number in numbers)


class AlignmentEstimator:
    """A running noise scale from alignments: pure ``init``, ``update`` and ``value`` with explicit state.

    a(m) is averaged over a sliding memory, weighted by samples, and never over the first half of a run so far. Windows
    whose sets have other sizes are kept apart, each kind with an a_inf of its own: only their bend is common.

    The interval inverts a test, as Fieller's does: a trial scale is dropped when the averaged a(m) differ from its curve,
    in the direction in which the curve changes with the scale, by more than Student's quantile of what their blocks
    scatter. That needs no a_inf, holds at any noise, and does not mistake a drift of a_inf for noise.

    Args:
        confidence: coverage of the interval.
        memory: samples of training to look back over at most; ``None``: half of the run so far.
        horizon: samples of the whole run; the memory is capped at a quarter of it. None: no cap.
        dataset_size: samples D of a data set that is read by epochs, without replacement; the alignment with the mean
            gradient of the whole set is then ((D - m) a(m) + m <u(g_m), g_m>) / D. ``None``: every sample is new.
        geometry: name of the view; only passed on to the estimates.

    Raises:
        ValueError: when an argument is outside its range.
    """

    def __init__(
        self,
        *,
        confidence: float = 0.95,
        memory: int | None = None,
        horizon: int | None = None,
        dataset_size: int | None = None,
        geometry: str = "sign",
    ) -> None:
        if not 0.0 < confidence < 1.0:
            raise ValueError(f"alignment.confidence must lie between 0 and 1, got {confidence!r}")
        for name, count in (("memory", memory), ("horizon", horizon), ("dataset_size", dataset_size)):
            if count is not None and not count >= 1:
                raise ValueError(f"alignment.{name} must be at least 1 sample, or None, got {count!r}")
        self.confidence = confidence
        share = math.inf if horizon is None else LARGEST_SHARE * horizon
        self.longest = min(share, math.inf if memory is None else memory)
        self.inverse_size = 0.0 if dataset_size is None else 1.0 / dataset_size
        self.geometry = geometry

    def init(self) -> State:
        """The state before anything was measured."""
        return {"last": None, "span": 0, "blocks": []}

    def update(self, state: State, measurement: Alignment, last_sample: int | None = None) -> State:
        """The state after one more window; ``state`` itself when the window cannot be measured.

        Args:
            last_sample: samples of training up to the end of this window. What went by since the measured window
                before it counts as looked back over, too. None: this window came right after that one.
        """
        if not measurement.measurable:
            return state
        samples, end = measurement.samples, state["last"]
        last_sample = (end or 0) + samples if last_sample is None else last_sample
        span = samples if end is None else max(last_sample - end, samples)
        seen = state["span"] + span
        aim = self._aim(seen)
        block = {"samples": samples, "steps": 1, "span": span, "kinds": dict([self._row(measurement)])}
        held = sum(block["span"] for block in state["blocks"])
        blocks = _slid(_added(state["blocks"], block, min(held, aim) / MOST_BLOCKS), aim)
        return {"last": last_sample, "span": seen, "blocks": _compact(blocks)}

    def value(self, state: State) -> Estimate | None:
        """The estimate, or None before anything was measured.

        Its signal and noise are a_inf^2/b^2 and a_inf^2/b, in squared units of alignment per sample: only their ratio,
        the scale, means the same as elsewhere.
        """
        blocks = state["blocks"]
        if not blocks:
            return None
        samples, steps, span = (sum(block[name] for block in blocks) for name in ("samples", "steps", "span"))
        averaged = curves(blocks)
        inverse, steepness = averaged.fitted()
        low, high = self._interval(averaged, inverse) if len(blocks) >= 2 else (0.0, math.inf)
        scale = 1.0 / inverse if inverse > 0.0 else math.inf
        aim = self.memory(state)
        furthest = REACH * averaged.largest
        resolved = len(blocks) >= FEWEST_BLOCKS and high < math.inf and scale <= furthest
        return Estimate(
            signal=steepness**2 * inverse,
            noise=steepness**2,
            scale=scale,
            low=min(low, scale / (1.0 + FIT_ERROR), furthest),
            high=max(high, scale * (1.0 + FIT_ERROR)) if resolved else math.inf,
            resolved=resolved,
            samples=samples,
            steps=steps,
            memory=round(aim if len(blocks) > FEWEST_BLOCKS else max(aim, span)),
            geometry=self.geometry,
            span=span,
        )

    def memory(self, state: State) -> float:
        """Samples of training, measured or not, that the state aims to look back over; 0 before the first window."""
        return self._aim(state["span"])

    def _aim(self, seen: int) -> float:
        return min(self.longest, 0.5 * seen)

    def curve(self, state: State) -> list[Point]:
        """The averaged a(m), by growing m."""
        blocks = state["blocks"]
        return curves(blocks).points() if blocks else []

    def _row(self, measurement: Alignment) -> tuple[str, list[Row]]:
        """Which kind of window it is, and what a block holds of it."""
        readings = sorted(measurement.readings, key=lambda one: one.samples)
        kind = ",".join(str(binned(one.samples)) for one in readings)
        weight = float(measurement.samples)
        rows = []
        for one in readings:
            held_out = one.alignment + one.samples * self.inverse_size * (one.own - one.alignment)
            value = held_out / math.sqrt(one.samples)
            rows.append([weight, weight * math.log(one.samples), weight * value, one.pairs])
        return kind, rows

    def _interval(self, averaged: Curves, inverse: float) -> tuple[float, float]:
        quantile = student_quantile(0.5 + 0.5 * self.confidence, float(len(averaged.scatter) - 1))
        return averaged.interval(inverse, quantile)


def fixed_rate_efficiency(batch: float, reference: float, scale: float) -> float:
    """Progress per sample at ``batch`` over that at ``reference`` at one learning rate: (a(B)/B) / (a(R)/R).

    It falls as the square root of the batch even where noise is all there is, since a step's length stays the same:
    the reason why rates move with the root of the batch, and why the scale is defined by the best rate.
    """
    return math.sqrt(reference * (reference + scale) / (batch * (batch + scale)))


def _added(blocks: list[Block], block: Block, size: float) -> list[Block]:
    """The blocks with one more at the end, joined to the newest while that spans fewer than ``size`` samples."""
    if blocks and blocks[-1]["span"] < size:
        return [*blocks[:-1], _joined(blocks[-1], block)]
    return [*blocks, block]


def _slid(blocks: list[Block], aim: float) -> list[Block]:
    """The newest blocks: as few as span ``aim`` samples, or all where a step more or less decides."""
    span, first = sum(block["span"] for block in blocks), 0
    while len(blocks) - first > FEWEST_BLOCKS and span - blocks[first]["span"] >= aim:
        span -= blocks[first]["span"]
        first += 1
    return blocks[first:]


def _compact(blocks: list[Block]) -> list[Block]:
    """The blocks, joined in pairs when they are too many; the newest, which is still filling, stays as it is."""
    if len(blocks) <= MOST_BLOCKS:
        return blocks
    *closed, newest = blocks
    odd = len(closed) % 2
    return [*closed[:odd], *map(_joined, closed[odd::2], closed[odd + 1 :: 2]), newest]


def _joined(left: Block, right: Block) -> Block:
    names = dict.fromkeys([*left["kinds"], *right["kinds"]])
    kinds = {name: summed([one["kinds"][name] for one in (left, right) if name in one["kinds"]]) for name in names}
    return {**{name: left[name] + right[name] for name in ("samples", "steps", "span")}, "kinds": kinds}
