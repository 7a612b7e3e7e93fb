"""The best learning rate of a branch, over several pairs: a grid that is widened until its optimum lies inside.

Losses are read at the vertex of the parabola through the three grid points around the lowest mean. Its place is the
same for all pairs, so that each pair's loss at the optimum is a fixed mixture of its three: differences between
batches stay paired, and an error of the place enters squared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Grid points are counted in half octaves of the learning rate; the search goes in whole ones.
PER_OCTAVE, COARSE = 2, 2
# A vertex this far from the middle, as a share of the spacing, asks for a finer grid: one neighbour is much higher.
LOPSIDED = 0.35
# Beyond this the parabola is not trusted, and the lowest point stands for itself.
TRUSTED = 0.45

# The held-out loss of one pair at a number of octaves from the rule's learning rate.
Branch = Callable[[float, int], float]


@dataclass(frozen=True, slots=True)
class Tuned:
    """The optimum over learning rates of one batch and length.

    Attributes:
        octaves: log2 of the best learning rate over the one that the scaling rule gives.
        interior: whether the optimum lies inside of the grid; otherwise the losses are those of its lowest end.
        smooth: whether the parabola through the three points is trusted.
        losses: of each pair, at the optimum.
        shifts: how far each pair's own optimum is from the common one, in octaves, to first order; their mean is 0.
        tried: octaves and mean loss of every point, over the pairs that were run there.
    """

    octaves: float
    interior: bool
    smooth: bool
    losses: tuple[float, ...]
    shifts: tuple[float, ...]
    tried: tuple[tuple[float, float], ...]


def tune(branch: Branch, pairs: int, *, start: float = 0.0, widest: float = 4.0) -> Tuned:
    """Find the best learning rate: on the first pair by widening, on the others around its optimum, until that holds.

    Args:
        branch: runs one; a loss that is not finite counts as infinitely high.
        pairs: how many there are.
        start: where the search begins, in octaves.
        widest: octaves from ``start`` beyond which the grid is not widened.

    Raises:
        ValueError: when no learning rate of the grid gives a finite loss.
    """
    points = _Points(branch, pairs)
    centre, most = round(start * PER_OCTAVE), round(widest * PER_OCTAVE)
    middle, spacing = centre, COARSE
    for loss in (points.first, points.mean, points.mean):
        middle, inside = _lowest(loss, middle, spacing, centre, most)
        if not inside:
            return points.at_the_end(middle)
        middle, spacing = _refined(loss, middle, spacing)
    return points.at_the_vertex(middle, spacing)


class _Points:
    """What was tried: losses by grid point and pair."""

    def __init__(self, branch: Branch, pairs: int) -> None:
        self._branch, self._pairs = branch, pairs
        self._losses: dict[int, dict[int, float]] = {}

    def loss(self, point: int, pair: int) -> float:
        row = self._losses.setdefault(point, {})
        if pair not in row:
            loss = self._branch(point / PER_OCTAVE, pair)
            row[pair] = loss if math.isfinite(loss) else math.inf
        return row[pair]

    def first(self, point: int) -> float:
        return self.loss(point, 0)

    def all(self, point: int) -> list[float]:
        return [self.loss(point, pair) for pair in range(self._pairs)]

    def mean(self, point: int) -> float:
        return statistics.fmean(self.all(point))

    def at_the_end(self, point: int) -> Tuned:
        losses = self.all(point)
        if not all(map(math.isfinite, losses)):
            raise ValueError(
                f"the loss is not finite at any learning rate down to 2^{point / PER_OCTAVE:g} times the rule's; "
                f"look for the cause in the run itself"
            )
        return Tuned(point / PER_OCTAVE, False, False, tuple(losses), (0.0,) * self._pairs, self._tried())

    def at_the_vertex(self, middle: int, spacing: int) -> Tuned:
        columns = list(zip(*(self.all(point) for point in (middle - spacing, middle, middle + spacing))))
        vertex = _vertex(*(statistics.fmean(row) for row in zip(*columns)))
        smooth = abs(vertex) <= TRUSTED
        at = vertex if smooth else 0.0
        octave = spacing / PER_OCTAVE
        return Tuned(
            octaves=middle / PER_OCTAVE + at * octave,
            interior=True,
            smooth=smooth,
            losses=tuple(_parabola(at, *row) for row in columns) if smooth else tuple(row[1] for row in columns),
            shifts=tuple(shift * octave for shift in _shifts(columns, at)) if smooth else (0.0,) * self._pairs,
            tried=self._tried(),
        )

    def _tried(self) -> tuple[tuple[float, float], ...]:
        rows = sorted(self._losses.items())
        return tuple((point / PER_OCTAVE, statistics.fmean(row.values())) for point, row in rows)


def _lowest(
    loss: Callable[[int], float], middle: int, spacing: int, centre: int, most: int
) -> tuple[int, bool]:
    """The grid point below both its neighbours, going down from ``middle``; or where the widening ended, and False."""
    while True:
        around = (middle - spacing, middle, middle + spacing)
        best = min((middle, *around), key=loss)
        if best == middle and math.isfinite(loss(middle)):
            return middle, True
        # Where nothing is finite, smaller rates are what may help.
        best = best if math.isfinite(loss(best)) else around[0]
        if abs(best - centre) > most:
            return middle, False
        middle = best


def _refined(loss: Callable[[int], float], middle: int, spacing: int) -> tuple[int, int]:
    """A grid of half the spacing around the optimum, where the coarse one has a neighbour that is much higher."""
    vertex = _vertex(*(loss(point) for point in (middle - spacing, middle, middle + spacing)))
    if abs(vertex) <= LOPSIDED or spacing == 1:
        return middle, spacing
    half = spacing // 2
    between = middle + (half if vertex > 0 else -half)
    return (between if loss(between) <= loss(middle) else middle), half


def _vertex(left: float, middle: float, right: float) -> float:
    """Where the parabola through -1, 0 and 1 is lowest, for a middle that is below both: in [-1/2, 1/2]."""
    bend = left + right - 2.0 * middle
    if bend <= 0.0:
        return 0.0
    if math.isinf(bend):
        return 0.0 if left == right else math.copysign(0.5, left - right)
    return 0.5 * (left - right) / bend


def _parabola(at: float, left: float, middle: float, right: float) -> float:
    return middle + 0.5 * at * (right - left) + 0.5 * at * at * (left + right - 2.0 * middle)


def _shifts(columns: Sequence[tuple[float, ...]], at: float) -> list[float]:
    """How far each pair's slope at the common optimum moves its own, to first order."""
    bends = [left + right - 2.0 * middle for left, middle, right in columns]
    slopes = [0.5 * (row[2] - row[0]) + at * bend for row, bend in zip(columns, bends)]
    mean = statistics.fmean(bends)
    return [-slope / mean if mean > 0 else 0.0 for slope in slopes]
