"""From the noise scale of a part of a model to that of the whole: a slope that is fitted in the run.

The normalisation layers' noise scale is cheap to measure and moves with the whole model's (arXiv 2411.00999), but it is
not the same number. Where both are measured in the same windows, G^2 and S of the whole are taken to be proportional
to those of the part. Everything here is pure; the state is a dict of numbers and lists that JSON keeps unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import mul
from statistics import StatisticsError, correlation
from typing import Any

from adabatch.noise import Estimate, Measurement, student_quantile

# Blocks of neighbouring windows that sums are kept for: fewer make Student's quantile wide, and more buy nothing.
MOST_BLOCKS = 32
# With fewer, the slope's variance is too uncertain to tell an interval.
FEWEST_BLOCKS = 8

# A block holds sums over neighbouring windows: of N, and of N G^2 and N S of the part and of the whole.
SAMPLES, PART_SIGNAL, PART_NOISE, WHOLE_SIGNAL, WHOLE_NOISE = range(5)
NAMES = {
    "G^2 of the whole model": WHOLE_SIGNAL,
    "G^2 of the part": PART_SIGNAL,
    "S of the whole model": WHOLE_NOISE,
    "S of the part": PART_NOISE,
}

Block = list[float]
State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SlopeFit:
    """How the whole model's numbers follow from a part's.

    Attributes:
        signal, noise, scale: whole / part of G^2, S and S / G^2. NaN where a sum is not above 0.
        low, high: confidence interval of ``scale``; 0 and inf while it is unknown.
        signal_correlation, noise_correlation, scale_correlation: Pearson's correlation of part and whole over blocks
            of windows, of G^2, of S, and of the logarithm of S / G^2 where all are above 0; ``None`` for fewer than 3
            blocks, or equal ones.
        samples: that the fit is from.
        unknown: why the slope is not known; empty when it is.
    """

    signal: float
    noise: float
    scale: float
    low: float
    high: float
    signal_correlation: float | None
    noise_correlation: float | None
    scale_correlation: float | None
    samples: int
    unknown: str = ""

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return not self.unknown

    def whole(self, part: Estimate) -> Estimate | None:
        """The whole model's estimate from the part's; ``None`` while the slope is unknown.

        The intervals of both are put together on the logarithms, side by side of the estimate: the squares of the two
        distances add up (Zou and Donner's MOVER, Statistics in Medicine 27, 2008). An end at 0 or inf stays.
        """
        if not self.known:
            return None
        scale = part.scale * self.scale
        low, high = part.low * self.low, part.high * self.high
        if 0.0 < part.scale < math.inf:
            low = scale * _together(part.low / part.scale, self.low / self.scale)
        if 0.0 < part.scale and part.high < math.inf:
            high = scale / _together(part.scale / part.high, self.scale / self.high)
        return replace(
            part,
            signal=part.signal * self.signal,
            noise=part.noise * self.noise,
            scale=scale,
            low=low,
            high=high,
            geometry=f"{part.geometry} x slope",
        )


class Slope:
    """A running fit of the slope: pure ``init``, ``update`` and ``value`` with explicit state.

    A slope is a ratio of sums over windows, weighted by samples: unbiased readings are averaged first and divided last.
    A regression of one reading on the other would be too flat, since both are noisy. Sums are kept for up to 32 blocks
    of neighbouring windows, of which the newest that hold half of all samples count, so that a slope that changes in
    training is followed. The interval is the logarithm's, with the variance from successive differences of blocks: it
    covers that both sides are measured on the same samples.

    Args:
        confidence: coverage of the interval.

    Raises:
        ValueError: for a confidence that is not between 0 and 1.
    """

    def __init__(self, *, confidence: float = 0.95) -> None:
        if not 0.0 < confidence < 1.0:
            raise ValueError(f"the slope's confidence must lie between 0 and 1, got {confidence!r}")
        self.confidence = confidence

    def init(self) -> State:
        """The state before anything was measured."""
        return {"samples": 0, "blocks": []}

    def update(self, state: State, part: Measurement, whole: Measurement) -> State:
        """The state after a window in which both were measured; ``state`` itself when one of them was not.

        Raises:
            ValueError: for measurements of different windows.
        """
        if not (part.measurable and whole.measurable):
            return state
        if part.samples != whole.samples:
            raise ValueError(
                f"a slope is fitted on windows that measured both: one measurement has {part.samples} samples and the "
                f"other {whole.samples}"
            )
        values = (1.0, part.signal, part.noise, whole.signal, whole.noise)
        row = [part.samples * value for value in values]
        samples = state["samples"] + part.samples
        blocks = _joined(state["blocks"], row, 0.5 * samples / MOST_BLOCKS)
        kept = sum(block[SAMPLES] for block in blocks)
        while kept - blocks[0][SAMPLES] >= 0.5 * samples:
            kept -= blocks.pop(0)[SAMPLES]
        return {"samples": samples, "blocks": _compact(blocks)}

    def value(self, state: State) -> SlopeFit | None:
        """The fit, or None before anything was measured."""
        blocks: list[Block] = state["blocks"]
        if not blocks:
            return None
        totals = _totals(blocks)
        signal = _ratio(totals[WHOLE_SIGNAL], totals[PART_SIGNAL])
        noise = _ratio(totals[WHOLE_NOISE], totals[PART_NOISE])
        scale = _ratio(noise, signal)
        unknown = self._doubt(blocks)
        factor = math.inf if unknown else math.exp(self._half_width(blocks, _log_scale_influence(totals)))
        return SlopeFit(
            signal=signal,
            noise=noise,
            scale=scale,
            low=0.0 if unknown else scale / factor,
            high=math.inf if unknown else scale * factor,
            signal_correlation=_correlation(_averages(blocks, PART_SIGNAL, WHOLE_SIGNAL)),
            noise_correlation=_correlation(_averages(blocks, PART_NOISE, WHOLE_NOISE)),
            scale_correlation=_correlation(_log_scales(blocks)),
            samples=round(totals[SAMPLES]),
            unknown=unknown,
        )

    def _doubt(self, blocks: Sequence[Block]) -> str:
        """Why the slope is not known; a ratio has an interval where all its parts are above 0 beyond their errors."""
        if len(blocks) < FEWEST_BLOCKS:
            return f"{len(blocks)} blocks of windows, of which {FEWEST_BLOCKS} are needed"
        totals = _totals(blocks)
        for name, column in NAMES.items():
            mean = totals[column] / totals[SAMPLES]
            error = self._half_width(blocks, [float(place == column) for place in range(len(totals))])
            if not mean > error:
                return f"{name} is {mean:.3g} +- {error:.3g} so far, not yet above 0"
        return ""

    def _half_width(self, blocks: Sequence[Block], influence: Sequence[float]) -> float:
        """Half the width of the interval of a sum of averages, each multiplied by its ``influence``."""
        sizes = [block[SAMPLES] for block in blocks]
        readings = [sum(map(mul, block, influence)) / block[SAMPLES] for block in blocks]
        variance, freedom = _mean_variance(sizes, readings)
        return student_quantile(0.5 + 0.5 * self.confidence, freedom) * math.sqrt(variance)


def _totals(blocks: Sequence[Block]) -> Block:
    return [sum(column) for column in zip(*blocks, strict=True)]


def _ratio(whole: float, part: float) -> float:
    """whole / part; NaN where they are not both above 0."""
    return whole / part if whole > 0.0 and part > 0.0 else math.nan


def _log_scale_influence(totals: Block) -> list[float]:
    """By how much log((S_whole / S_part) / (G^2_whole / G^2_part)) moves with each average; with samples it does not.

    Divided by the averages themselves, since a logarithm moves by relative changes.
    """
    signs = {WHOLE_NOISE: 1.0, PART_NOISE: -1.0, WHOLE_SIGNAL: -1.0, PART_SIGNAL: 1.0}
    return [0.0] + [signs[column] * totals[SAMPLES] / totals[column] for column in range(1, len(totals))]


def _mean_variance(sizes: Sequence[float], readings: Sequence[float]) -> tuple[float, float]:
    """Variance of the size-weighted mean of readings, and its degrees of freedom, from successive differences.

    Neighbours differ little by drift, so that a trend does not pass for noise. Readings of n and m samples differ with
    variance c (1/n + 1/m); the freedom is Satterthwaite's with the correlation of neighbouring differences.
    """
    pairs = list(zip(sizes, sizes[1:]))
    weighted = sum(n * m * (b - a) ** 2 for (n, m), a, b in zip(pairs, readings, readings[1:]))
    mass = sum(n + m for n, m in pairs)
    overlap = sum(2.0 * sizes[place - 1] * sizes[place + 1] for place in range(1, len(sizes) - 1))
    return weighted / (mass * sum(sizes)), mass**2 / (sum((n + m) ** 2 for n, m in pairs) + overlap)


def _correlation(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Pearson's correlation of pairs; None for fewer than 3, or where one side is constant."""
    pairs = list(pairs)
    try:
        return correlation(*zip(*pairs, strict=True)) if len(pairs) >= 3 else None
    except StatisticsError:
        return None


def _averages(blocks: Sequence[Block], part: int, whole: int) -> Iterator[tuple[float, float]]:
    return ((block[part] / block[SAMPLES], block[whole] / block[SAMPLES]) for block in blocks)


def _log_scales(blocks: Sequence[Block]) -> Iterator[tuple[float, float]]:
    for _, part_signal, part_noise, whole_signal, whole_noise in blocks:
        if min(part_signal, part_noise, whole_signal, whole_noise) > 0.0:
            yield math.log(part_noise / part_signal), math.log(whole_noise / whole_signal)


def _together(one: float, other: float) -> float:
    """Two factors of at most 1 put together: the squares of their logarithms add up."""
    if one <= 0.0 or other <= 0.0:
        return 0.0
    return math.exp(-math.hypot(math.log(one), math.log(other)))


def _joined(blocks: Sequence[Block], row: Block, size: float) -> list[Block]:
    """The blocks with one more at the end, put into the newest while that has fewer than ``size`` samples."""
    if blocks and blocks[-1][SAMPLES] < size:
        return [*blocks[:-1], _totals([blocks[-1], row])]
    return [*blocks, row]


def _compact(blocks: list[Block]) -> list[Block]:
    """The blocks, put together in pairs when they are too many; the newest, which is still filling, stays as it is."""
    if len(blocks) <= MOST_BLOCKS:
        return blocks
    *closed, newest = blocks
    odd = len(closed) % 2
    pairs = zip(closed[odd::2], closed[odd + 1 :: 2], strict=True)
    return [*closed[:odd], *(_totals(pair) for pair in pairs), newest]
