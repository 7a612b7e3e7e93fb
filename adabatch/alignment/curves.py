"""Averaged curves a(m), the scale that fits them best, and the scales that their scatter lets stand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Shapes s of the curve: the fitted one, and those that bound what is met.
SHAPE, SHAPES = 1.0, (0.5, 1.0, 2.0)
# Sets are alike when their samples are, to this fraction of a factor of two.
BINS = 4
# Trial scales per factor of two, and how far they reach beyond the measured m on both sides.
TRIALS, MARGIN = 4, 1024.0

# What a block holds of each size of set: sums over windows of N, N ln m, N a(m)/sqrt(m), and of the pairs.
WEIGHT, LOGARITHM, VALUE, PAIRS = range(4)

Row = list[float]
Block = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """a(m) averaged over the memory.

    Attributes:
        samples: m.
        alignment, error: a(m) and its standard error; the error is inf with fewer than two blocks.
        pairs: how many sets were compared.
    """

    samples: float
    alignment: float
    error: float
    pairs: int


@dataclass(frozen=True, slots=True)
class Curves:
    """The averaged curves of all kinds of windows, one entry for each kind and size of set.

    Attributes:
        kinds: for each kind, where its entries begin and end.
        sizes: m.
        weights: sums of N.
        values: sums of N a(m) / sqrt(m).
        pairs: sets that were compared.
        scatter: by block, the block's values less its share of all.
    """

    kinds: tuple[tuple[int, int], ...]
    sizes: tuple[float, ...]
    weights: tuple[float, ...]
    values: tuple[float, ...]
    pairs: tuple[int, ...]
    scatter: tuple[tuple[float, ...], ...]

    @property
    def largest(self) -> float:
        """The largest measured m."""
        return max(self.sizes)

    def fitted(self) -> tuple[float, float]:
        """Inverse scale of the best fit by least squares, 0 for a curve that does not bend; and a(m)/sqrt(m) for small
        m."""
        trials = [0.0, *self._trials()]
        best = min(range(len(trials)), key=lambda i: self._misfit(trials[i]))
        inverse = _minimum(self._misfit, trials[max(best - 1, 0)], trials[min(best + 1, len(trials) - 1)])
        # Below the first trial the bend is rounding.
        inverse = inverse if inverse >= trials[1] and self._misfit(inverse) < self._misfit(0.0) else 0.0
        curve = list(self._roots(inverse, SHAPE))
        steepness = sum(v * r for v, r in zip(self.values, curve)) / sum(w * r * r for w, r in zip(self.weights, curve))
        return inverse, max(steepness, 0.0)

    def interval(self, fitted: float, quantile: float) -> tuple[float, float]:
        """The smallest and the largest scale between which no test drops one, for any shape, around the fitted one.

        Args:
            fitted: inverse scale of the best fit.
            quantile: of Student's t, beyond which a trial is dropped.
        """
        larger = [trial for trial in self._trials() if trial > fitted]
        smaller = [trial for trial in reversed(self._trials()) if trial < fitted] + [0.0]
        tops = [_end(fitted, larger, lambda trial, s=shape: -self.score(trial, s), quantile) for shape in SHAPES]
        bottoms = [_end(fitted, smaller, lambda trial, s=shape: self.score(trial, s), quantile) for shape in SHAPES]
        return 0.0 if None in tops else _inverse(max(tops)), math.inf if None in bottoms else _inverse(min(bottoms))

    def score(self, inverse: float, shape: float) -> float:
        """Student's statistic of the values against the curve of a trial; positive when they bend more than it."""
        contrast = self._contrast(inverse, shape)
        count = len(self.scatter)
        excess = math.fsum(c * v for c, v in zip(contrast, self.values))
        square = math.fsum(math.fsum(c * v for c, v in zip(contrast, row)) ** 2 for row in self.scatter)
        error = math.sqrt(square * count / (count - 1))
        return excess / error if error > 0.0 else math.copysign(math.inf, excess) if excess else 0.0

    def points(self) -> list[Point]:
        """a(m) by growing m, over all kinds."""
        bins: dict[int, list[int]] = {}
        for i, size in enumerate(self.sizes):
            bins.setdefault(binned(size), []).append(i)
        return [self._point(bins[key]) for key in sorted(bins)]

    def _point(self, entries: Sequence[int]) -> Point:
        weight, count = sum(self.weights[i] for i in entries), len(self.scatter)
        samples = math.exp(sum(self.weights[i] * math.log(self.sizes[i]) for i in entries) / weight)
        square = sum(sum(row[i] for i in entries) ** 2 for row in self.scatter)
        error = math.sqrt(square * count / (count - 1)) if count > 1 else math.inf
        return Point(
            samples=samples,
            alignment=sum(self.values[i] for i in entries) / weight * math.sqrt(samples),
            error=error / weight * math.sqrt(samples),
            pairs=sum(self.pairs[i] for i in entries),
        )

    def _trials(self) -> list[float]:
        """Inverse scales to try, by growing size, far beyond the measured m on both sides."""
        first, last = 1.0 / (MARGIN * self.largest), MARGIN / min(self.sizes)
        count = math.ceil(TRIALS * math.log2(last / first))
        return [first * (last / first) ** (i / count) for i in range(count + 1)]

    def _roots(self, inverse: float, shape: float) -> Iterator[float]:
        """sqrt(e(m)): a(m)/sqrt(m) over its limit for small m."""
        for size in self.sizes:
            x = size * inverse
            yield math.sqrt((1.0 + shape * x) / (1.0 + 2.0 * shape * x + x * x))

    def _contrast(self, inverse: float, shape: float) -> list[float]:
        """The part of the curve's change with the inverse scale that no a_inf can make up for, kind by kind."""
        curve, change = list(self._roots(inverse, shape)), []
        for size, root in zip(self.sizes, curve):
            x = size * inverse
            slope = -(shape + 2.0 * x + shape * x * x) / (1.0 + 2.0 * shape * x + x * x) ** 2
            change.append(0.5 * slope * size / self.largest / root)
        contrast = []
        for first, last in self.kinds:
            r, v = curve[first:last], change[first:last]
            common = sum(a * b for a, b in zip(r, v)) / sum(a * a for a in r)
            contrast += [b - common * a for a, b in zip(r, v)]
        return contrast

    def _misfit(self, inverse: float) -> float:
        """Sum of squares left over by the curve of shape 1, less that of the values themselves."""
        curve = list(self._roots(inverse, SHAPE))
        explained = 0.0
        for first, last in self.kinds:
            product = sum(v * r for v, r in zip(self.values[first:last], curve[first:last]))
            length = sum(w * r * r for w, r in zip(self.weights[first:last], curve[first:last]))
            explained += max(product, 0.0) ** 2 / length
        return -explained


def curves(blocks: Sequence[Block]) -> Curves:
    """The averages over blocks, each a dict whose ``kinds`` holds a table of rows by kind of window."""
    names = list(dict.fromkeys(name for block in blocks for name in block["kinds"]))
    total = {name: summed([block["kinds"][name] for block in blocks if name in block["kinds"]]) for name in names}
    entries = [row for name in names for row in total[name]]
    ends = [sum(len(total[name]) for name in names[: i + 1]) for i in range(len(names))]
    nothing = {name: [[0.0] * 4] * len(total[name]) for name in names}
    scatter = []
    for block in blocks:
        rows = [row for name in names for row in block["kinds"].get(name, nothing[name])]
        pairs = zip(rows, entries)
        scatter.append(tuple(row[VALUE] - row[WEIGHT] / whole[WEIGHT] * whole[VALUE] for row, whole in pairs))
    return Curves(
        kinds=tuple(zip([0, *ends], ends)),
        sizes=tuple(math.exp(row[LOGARITHM] / row[WEIGHT]) for row in entries),
        weights=tuple(row[WEIGHT] for row in entries),
        values=tuple(row[VALUE] for row in entries),
        pairs=tuple(round(row[PAIRS]) for row in entries),
        scatter=tuple(scatter),
    )


def binned(samples: float) -> int:
    """Which size of set this counts as."""
    return round(BINS * math.log2(samples))


def summed(tables: Sequence[list[Row]]) -> list[Row]:
    """Sum of tables of one shape."""
    return [[math.fsum(column) for column in zip(*rows)] for rows in zip(*tables)]


def _inverse(number: float) -> float:
    return 1.0 / number if number > 0.0 else math.inf


def _end(start: float, trials: Iterable[float], score: Callable[[float], float], bound: float) -> float | None:
    """Where, going from ``start`` over ``trials``, ``score`` first rises above ``bound``; None when it nowhere does."""
    inside = start
    for trial in trials:
        if score(trial) > bound:
            return _crossing(lambda one: score(one) - bound, inside, trial)
        inside = trial
    return None


def _crossing(function: Callable[[float], float], inside: float, outside: float) -> float:
    """Where ``function`` rises above 0 between a trial inside and one outside, by bisection; the trial inside when it
    is above 0 there already."""
    if function(inside) > 0.0:
        return inside
    for _ in range(30):
        middle = 0.5 * (inside + outside)
        if function(middle) > 0.0:
            outside = middle
        else:
            inside = middle
    return 0.5 * (inside + outside)


def _minimum(function: Callable[[float], float], left: float, right: float) -> float:
    """Where ``function`` is smallest between two trials around a minimum, by thirds."""
    for _ in range(80):
        third = (right - left) / 3.0
        if function(left + third) <= function(right - third):
            right -= third
        else:
            left += third
    return 0.5 * (left + right)
