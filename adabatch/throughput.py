"""How long a step takes, from the step times that a run sees, and what that makes a step worth in samples.

    seconds of a step = fixed + micro_batches x per_micro_batch + samples x per_sample

of the slowest rank. Accumulation on the same hardware saves time only through the fixed part (exposed communication,
optimizer, launches), which is paid once per step. The parts are told apart by steps of different splits and, inside a
step, by its quiet micro-batches, those between the first and the last: they synchronise nothing, and find caches and
gradients as one more micro-batch would.

One law and one fit serve a running estimate and the records of a finished run. There is nothing here but sums,
products, quotients and square roots, which IEEE 754 rounds the same everywhere: ranks that hold the same step times
come to the same answer, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from adabatch.plan import BatchLimits, BatchPlan, samples_in
from adabatch.policies.protocol import Price

# Step times kept of each split of a step; their median is what counts, so that stalls and pauses do not.
KEPT = 64
# Fewer step times than this make no median with an interval.
FEWEST = 8
# The first steps of each split in a process are set aside: they compile, allocate and warm up.
WARMING = 2
# A split that was not run for so many steps counts half (its variance is twice as large), and after these not at all.
FADING, FORGOTTEN = 512, 4096
# Normal quantile of the 95 % intervals.
QUANTILE = 1.959964
# Micro-batches of a step inside which its parts are told apart.
TELLING = 3
# Relative standard error below which no median of step times is believed.
FINEST = 1e-4

State = dict[str, Any]
Vector = Sequence[float]
Shape = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Lap:
    """The times of one step on one rank.

    Attributes:
        seconds: of the whole step, from the end of the one before; inf when something else lay between.
        quiet: of its micro-batches after the first and before the last, each with the loading of the next one's data; 0
            where there are none.
    """

    seconds: float
    quiet: float


class ReadableLap(Protocol):
    """A lap that may still be on the device; ``read`` may wait for it."""

    def read(self) -> Lap: ...


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: ``fixed``, ``per_micro_batch`` of a rank whatever its size, and ``per_sample`` of a rank."""

    fixed: float
    per_micro_batch: float
    per_sample: float

    def of_micro_batch(self, samples: float) -> float:
        """Seconds of one more micro-batch of ``samples``."""
        return self.per_micro_batch + self.per_sample * samples

    def seconds(self, micro_batches: float, samples: float) -> float:
        """Seconds of a step in which the slowest rank runs ``samples`` in ``micro_batches``."""
        return self.fixed + self.per_micro_batch * micro_batches + self.per_sample * samples


@dataclass(frozen=True, slots=True)
class Observation:
    """Seconds that ``fixed`` (0 or 1) fixed costs, ``micro_batches`` and ``samples`` took together.

    ``variance`` is that of ``seconds`` as a measurement of the typical time.
    """

    seconds: float
    variance: float
    fixed: int
    micro_batches: int
    samples: int


@dataclass(frozen=True, slots=True)
class Fit:
    """The step time as far as it is known.

    Attributes:
        micro_batch: samples of a full micro-batch.
        costs: seconds of: the fixed part, a full micro-batch, the samples of a full micro-batch alone. Not bounded: an
            estimate below 0 is noise.
        covariance: of the three.
        step_time: the model, with no cost below 0.
    """

    micro_batch: int
    costs: Vector
    covariance: Sequence[Vector]
    step_time: StepTime

    def price(self, world: int) -> Price:
        """Fixed seconds of a step over seconds of one more sample of the global batch, in full micro-batches."""
        return self._ratio((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), world)

    def price_below(self, world: int, micro_batches: int) -> Price:
        """The same where micro-batches are not full: more samples then make them larger, and not more of them."""
        return self._ratio((1.0, micro_batches, -micro_batches), (0.0, 0.0, 1.0), world)

    def _ratio(self, over: Vector, under: Vector, world: int) -> Price:
        """The ratio of two combinations of the costs with Fieller's interval, in samples of the global batch."""
        unit = samples_in(world, self.micro_batch)
        top, bottom = _dot(over, self.costs), _dot(under, self.costs)
        low, high = _fieller(
            top,
            bottom,
            _form(over, self.covariance, over),
            _form(over, self.covariance, under),
            _form(under, self.covariance, under),
        )
        value = max(top, 0.0) / bottom if bottom > 0.0 else math.inf
        return Price(unit * min(max(value, low), high), unit * low, unit * high)


def fit(observations: Iterable[Observation], micro_batch: int) -> Fit | None:
    """Weighted least squares of the three costs; what the observations cannot tell keeps an unbounded interval.

    Of the cost of a micro-batch between 0 and all is taken to depend on its size, where nothing tells. Where the
    observations contradict one another by more than their variances allow, these are raised (the Birge ratio).

    Args:
        micro_batch: samples of a full micro-batch.

    Returns:
        The fit, or ``None`` without observations.
    """
    seen = [one for one in observations if one.seconds > 0.0]
    if not seen:
        return None
    unit = max(one.seconds for one in seen)
    piece, size = min((one.seconds / unit / one.micro_batches, one.samples / one.micro_batches) for one in seen)
    share = size / micro_batch
    rows = [
        (
            (float(one.fixed), float(one.micro_batches), one.samples / micro_batch - one.micro_batches),
            one.seconds / unit,
            max(one.variance / unit**2, (FINEST * one.seconds / unit) ** 2),
        )
        for one in seen
    ]
    # Costs are within ten times the longest step, and of a micro-batch the samples' part is half, give or take half.
    vague = [((1.0, 0.0, 0.0), 0.0, 100.0), ((0.0, -0.5, (share + 1) / 2), 0.0, piece**2 / 4)]
    costs, covariance = _solve(rows + vague)
    excess = sum((y - _dot(x, costs)) ** 2 / variance for x, y, variance in rows) / max(len(rows) - 3, 1)
    if len(rows) > 3 and excess > 1.0:
        rows = [(x, y, variance * excess) for x, y, variance in rows]
        costs, covariance = _solve(rows + vague)
    bounded = costs if costs[0] >= 0.0 else _solve([*rows, vague[1], ((1.0, 0.0, 0.0), 0.0, 1e-12)])[0]
    return Fit(
        micro_batch=micro_batch,
        costs=tuple(unit * cost for cost in costs),
        covariance=tuple(tuple(unit * unit * one for one in row) for row in covariance),
        step_time=_step_time(bounded, unit, micro_batch),
    )


def typical(values: Sequence[float]) -> tuple[float, float]:
    """The median and its variance, which comes from the order statistics that bound it: any distribution will do."""
    ordered = sorted(values)
    count = len(ordered)
    middle, reach = (count - 1) / 2, QUANTILE * math.sqrt(count) / 2
    low, high = max(math.floor(middle - reach), 0), min(math.ceil(middle + reach), count - 1)
    error = (ordered[high] - ordered[low]) / (2 * QUANTILE)
    return (ordered[math.floor(middle)] + ordered[math.ceil(middle)]) / 2, error * error


class Throughput:
    """A running step-time model: pure ``init``, ``update`` and ``value`` over a state of plain JSON data.

    Of each split of a step (micro-batches, samples of the rank that has most, those of its first and its last
    micro-batch) the newest 64 step times are kept, and their medians count. That makes stalls and the pauses of an
    evaluation harmless as long as they touch less than half of the steps; the first two steps of a split in a process,
    which compile and warm up, are not taken at all. A split that is no longer run fades: its variance is twice as large
    after 512 steps, nine times after 4,096, and then it is forgotten.

    Args:
        limits: the ranks and micro-batches that batches are made from.
        fewest: micro-batches that a rank runs in the smallest step: 2 where one rank measures alone, else 1.
    """

    def __init__(self, limits: BatchLimits, fewest: int = 1) -> None:
        self.limits = limits
        self.fewest = fewest

    def init(self) -> State:
        """The state before anything was timed."""
        return {"world": self.limits.world, "splits": []}

    def restored(self, saved: Mapping[str, Any] | None) -> State:
        """A saved state in a new process, which warms up again; on another number of ranks it begins anew."""
        if not saved or saved["world"] != self.limits.world:
            return self.init()
        return {**saved, "splits": [{**split, "warmed": 0} for split in saved["splits"]]}

    def update(self, state: State, plan: BatchPlan, lap: Lap) -> State:
        """The state after one more step, whose times are those of the slowest rank."""
        if not (math.isfinite(lap.seconds) and lap.seconds > lap.quiet >= 0.0):
            return state
        shape = list(_shape(plan))
        known = [split for split in state["splits"] if split["shape"] == shape]
        split = known[0] if known else {"shape": shape, "warmed": 0, "laps": []}
        laps = split["laps"]
        if split["warmed"] >= WARMING:
            laps = [*laps, [lap.seconds, lap.quiet]][-KEPT:]
        split = {**split, "warmed": min(split["warmed"] + 1, WARMING), "laps": laps, "step": plan.step}
        others = [
            one for one in state["splits"] if one["shape"] != shape and plan.step - one["step"] < FORGOTTEN
        ]
        return {**state, "splits": [*others, split]}

    def value(self, state: State) -> Fit | None:
        """The fit, or ``None`` before enough steps were timed."""
        newest = max((split["step"] for split in state["splits"]), default=0)
        usable = [split for split in state["splits"] if len(split["laps"]) >= FEWEST]
        observations = [one for split in usable for one in _observations(split, newest - split["step"])]
        return fit(observations, self.limits.micro_batch)

    def price(self, state: State, batch: int) -> Price | None:
        """What a step is worth at a global batch of ``batch``, in samples; ``None`` before enough steps were timed.

        Above a full micro-batch on every rank more samples are more micro-batches, and below it larger ones. At the
        full micro-batch itself growing has the one price and shrinking the other, and the interval holds both.
        """
        known = self.value(state)
        if known is None:
            return None
        above, full = known.price(self.limits.world), samples_in(self.limits.world, self.limits.micro_batch)
        brim = full * self.fewest
        if batch > brim or self.limits.rounding == "whole":
            return above
        below = known.price_below(self.limits.world, self.fewest)
        return below if batch < brim else Price(above.value, min(above.low, below.low), max(above.high, below.high))

    def telling_batch(self, state: State, batch: int) -> int | None:
        """The global batch whose steps would tell the price, where those of ``batch`` cannot; otherwise ``None``.

        The parts of a step are told apart inside it from three micro-batches on a rank, which may be single samples
        unless only whole micro-batches are allowed. (Two micro-batches of one sample against one of two leave open what
        a sample costs.)
        """
        price = self.price(state, batch)
        if price is None or price.resolved or price.low > 0.0:
            return None
        divisible = self.limits.micro_batch > 2 and self.limits.rounding != "whole"
        telling = samples_in(self.limits.world, TELLING if divisible else TELLING * self.limits.micro_batch)
        return telling if batch < telling else None

    def teaches(self, state: State, plan: BatchPlan) -> bool:
        """Whether steps split as in ``plan`` would still add something: they were timed less often than is kept."""
        shape = list(_shape(plan))
        return all(len(split["laps"]) < KEPT for split in state["splits"] if split["shape"] == shape)


def of_slowest(
    plans: Sequence[BatchPlan], laps: Sequence[Lap], slowest: Callable[[list[float]], list[float]]
) -> list[Lap]:
    """The laps of the ranks that the others wait for: all of a step, and the quiet part of the typically slowest rank.

    A step takes as long on every rank. Its quiet part does not; the rank whose median is the largest tells it, among
    steps of the same split. (The largest of each step would be the worst luck among all ranks, and not what one more
    micro-batch costs; luck is part of what a step costs in waiting.)

    Args:
        plans, laps: the same steps on every rank, and this rank's times.
        slowest: gives every rank the largest over the ranks of each number in a list. It is called twice.
    """
    shapes = [_shape(plan) for plan in plans]
    usual = {shape: _usual_quiet(shape, shapes, laps) for shape in dict.fromkeys(shapes)}
    told = slowest([lap.seconds for lap in laps] + list(usual.values()))
    largest = dict(zip(usual, told[len(laps) :], strict=True))
    mine = [lap.quiet if usual[shape] == largest[shape] else -math.inf for shape, lap in zip(shapes, laps)]
    return [Lap(seconds, quiet) for seconds, quiet in zip(told, slowest(mine))]


def _usual_quiet(shape: Shape, shapes: Sequence[Shape], laps: Sequence[Lap]) -> float:
    quiet = [lap.quiet for one, lap in zip(shapes, laps, strict=True) if one == shape and math.isfinite(lap.seconds)]
    return typical(quiet)[0] if quiet else 0.0


def _shape(plan: BatchPlan) -> Shape:
    """Micro-batches, samples, and samples of the first and the last micro-batch, on the rank that has most samples."""
    pieces = plan.pieces(plan.first_sample % plan.world)
    return len(pieces), sum(pieces), pieces[0], pieces[-1]


def _observations(split: Mapping[str, Any], age: int) -> list[Observation]:
    """What the steps of one split say: of the quiet micro-batches and the rest, or of the whole if none are quiet."""
    micro_batches, samples, first, last = split["shape"]
    faded = 1 + age / FADING
    if micro_batches <= 2:
        seconds, variance = typical([seconds for seconds, _ in split["laps"]])
        return [Observation(seconds, faded * variance, 1, micro_batches, samples)]
    quiet, quiet_variance = typical([quiet for _, quiet in split["laps"]])
    rest, rest_variance = typical([seconds - quiet for seconds, quiet in split["laps"]])
    return [
        Observation(quiet, faded * quiet_variance, 0, micro_batches - 2, samples - first - last),
        Observation(rest, faded * rest_variance, 1, 2, first + last),
    ]


def _step_time(costs: Vector, unit: float, micro_batch: int) -> StepTime:
    """The model in seconds, every cost at 0 or above and a full micro-batch at what it is."""
    full = max(costs[1], 0.0)
    by_size = min(max(costs[2], 0.0), full)
    return StepTime(unit * max(costs[0], 0.0), unit * (full - by_size), unit * by_size / micro_batch)


def _solve(rows: Iterable[tuple[Vector, float, float]]) -> tuple[Vector, Sequence[Vector]]:
    """Weighted least squares from rows of (coefficients, value, variance): the solution and its covariance.

    By Givens rotations of the rows into a triangle, and not from the normal equations: these lose everything beside an
    observation that is known far better than the rest, and variances come out negative.
    """
    triangle = [[0.0] * 4 for _ in range(3)]
    for coefficients, value, variance in rows:
        weight = 1.0 / math.sqrt(variance)
        row = [weight * one for one in (*coefficients, value)]
        for i in range(3):
            if row[i] != 0.0:
                length = math.sqrt(triangle[i][i] * triangle[i][i] + row[i] * row[i])
                cosine, sine = triangle[i][i] / length, row[i] / length
                triangle[i], row = (
                    [cosine * a + sine * b for a, b in zip(triangle[i], row)],
                    [cosine * b - sine * a for a, b in zip(triangle[i], row)],
                )
    inverse = _inverse(triangle)
    solution = [_dot(row, [one[3] for one in triangle]) for row in inverse]
    return solution, [[_dot(row, other) for other in inverse] for row in inverse]


def _inverse(triangle: Sequence[Vector]) -> list[list[float]]:
    """Of the upper triangular matrix in the first three columns."""
    inverse = [[0.0] * 3 for _ in range(3)]
    for j in range(3):
        for i in range(j, -1, -1):
            rest = sum(triangle[i][k] * inverse[k][j] for k in range(i + 1, j + 1))
            inverse[i][j] = ((1.0 if i == j else 0.0) - rest) / triangle[i][i]
    return inverse


def _fieller(top: float, bottom: float, var_top: float, covariance: float, var_bottom: float) -> tuple[float, float]:
    """Interval of top/bottom, for a ratio that is not negative; the upper end is inf where there is none.

    The ratios r with (top - r bottom)^2 <= q^2 Var(top - r bottom).
    """
    square = QUANTILE * QUANTILE
    a, b, c = (
        bottom * bottom - square * var_bottom,
        top * bottom - square * covariance,
        top * top - square * var_top,
    )
    root = math.sqrt(max(b * b - a * c, 0.0))
    if bottom <= 0.0 or a <= 0.0:
        # The set is all numbers, or all but a bounded gap: beyond the gap's positive end, if that is there.
        supported = top > 0.0 and c > 0.0 and a < 0.0
        return (max((b - root) / a, 0.0) if supported else 0.0), math.inf
    low, high = (b - root) / a, (b + root) / a
    return max(low, 0.0), max(high, 0.0)


def _form(left: Vector, matrix: Sequence[Vector], right: Vector) -> float:
    return _dot(left, [_dot(row, right) for row in matrix])


def _dot(left: Vector, right: Vector) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
