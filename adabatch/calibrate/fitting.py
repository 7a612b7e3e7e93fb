"""From the losses of branches to the critical batch, each with an interval over the pairs.

The smallest batch b was run at several lengths: D(n) is its loss after n samples less that after all N. A branch of
batch B over N samples has the loss D(N e(B)), where e(B) is its data efficiency against b,

    e(B) = (1 + b/B_crit) / (1 + B/B_crit)

(samples to the same loss grow as 1 + B/B_crit: arXiv 1812.06162, section 2). B_crit is fitted by weighted least squares
of the losses. Its interval inverts a test, as Fieller's does: a trial B_crit is dropped when the residuals, weighed by
how much each batch's loss depends on B_crit, differ from 0 over the pairs by more than Student's quantile. For a given
trial they are linear in each pair's losses, so that nothing has to be linearised, and data that resolve nothing give a
bound instead of an interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adabatch.noise import student_quantile
from adabatch.plan import data_efficiency

# Trial values of B_crit go this far beyond the smallest and the largest batch; what lies further is not told apart.
REACH = 64.0
# Trial values per factor of 2.
FINE = 8
# The curve between the lengths and the form of e(B) are not trusted to this share of B_crit, however small the scatter.
TRUST = 0.05
# Fewer batches than this leave nothing to see the form of e(B) by.
FEWEST_BATCHES = 3

Losses = Sequence[float]


@dataclass(frozen=True, slots=True)
class Bound:
    """A value with its interval; ``None`` where there is no finite value or end."""

    value: float | None
    low: float | None
    high: float | None

    @property
    def resolved(self) -> bool:
        """Whether both ends are finite and above 0."""
        return self.value is not None and self.high is not None and bool(self.low)


@dataclass(frozen=True, slots=True)
class Critical:
    """What the branches say about the critical batch.

    Attributes:
        batch: B_crit in samples; its low end is 0, or its high end ``None``, where it is only bounded or not even that.
        efficiencies: by batch: the samples that the smallest batch needs for the same loss, over those that were used.
        fitted: the same by B_crit.
        reason: why it is not resolved; empty where it is.
    """

    batch: Bound
    efficiencies: dict[int, Bound]
    fitted: dict[int, float]
    reason: str = ""


UNKNOWN = Bound(None, None, None)


def fit(
    lengths: dict[int, Losses], branches: dict[int, Losses], *, smallest: int, confidence: float = 0.95
) -> Critical:
    """Fit the critical batch.

    Args:
        lengths: losses of the smallest batch by the samples that it was given, one for each pair; the longest length
            is that of all branches.
        branches: losses of the larger batches after as many samples, by batch.
        smallest: the smallest batch.
        confidence: of every interval.

    Raises:
        ValueError: for fewer than 2 pairs or lengths, or no larger batch.
    """
    pairs = {len(losses) for losses in (*lengths.values(), *branches.values())}
    if len(pairs) != 1 or min(pairs) < 2 or len(lengths) < 2 or not branches or min(branches) <= smallest:
        raise ValueError(
            f"a fit needs 2 or more pairs, the same for all (got {sorted(pairs)}), 2 or more lengths of the smallest "
            f"batch {smallest} (got {sorted(lengths)}), and larger batches (got {sorted(branches)})"
        )
    quantile = student_quantile(0.5 + 0.5 * confidence, min(pairs) - 1.0)
    curve = _Curve(lengths)
    if (problem := curve.problem(quantile)) is not None:
        return Critical(UNKNOWN, {}, {}, f"the held-out loss of batch {smallest} {problem}")
    over = {batch: curve.over_longest(losses) for batch, losses in sorted(branches.items())}
    efficiencies = {batch: _efficiency(curve, losses, quantile) for batch, losses in over.items()}
    within = {batch: losses for batch, losses in over.items() if efficiencies[batch].value is not None}
    if len(within) + 1 < FEWEST_BATCHES:
        lost = ", ".join(str(batch) for batch in over if batch not in within)
        return Critical(UNKNOWN, efficiencies, {}, f"batches {lost} do not reach the loss of the shortest branch")
    model = _Model(curve, within, smallest)
    batch = model.interval(model.best(), quantile)
    fitted = {} if batch.value is None else {one: relative(one, smallest, batch.value) for one in over}
    reason = "" if batch.resolved else _open_end(batch)
    return Critical(batch, efficiencies, fitted, reason)


def foreseen(
    lengths: dict[int, Losses], branches: dict[int, Losses], *, smallest: int, pairs: int, confidence: float = 0.95
) -> float | None:
    """The factor to which so many ``pairs`` would tell B_crit, by the scatter of the few that were run.

    The half width of the interval in log B_crit: Student's quantile times the standard error of the weighed residuals,
    over how fast they change with B_crit at the fit. ``None`` where the few pairs cannot be fitted at all.

    Args:
        lengths, branches, smallest, confidence: as for ``fit``, of 2 or more pairs.
        pairs: how many there could be.
    """
    curve = _Curve(lengths)
    over = {batch: curve.over_longest(losses) for batch, losses in sorted(branches.items())}
    within = {batch: losses for batch, losses in over.items() if curve.inverse(statistics.fmean(losses)) is not None}
    falls = all(left > right for left, right in zip(curve.means, curve.means[1:]))
    if not falls or len(within) + 1 < FEWEST_BATCHES:
        return None
    model = _Model(curve, within, smallest)
    slope, scatter = model.steepness(model.best())
    quantile = student_quantile(0.5 + 0.5 * confidence, pairs - 1.0)
    return max(2.0 ** min(quantile * scatter / math.sqrt(pairs) / slope, 100.0), 1 + TRUST) if slope else None


def relative(batch: float, smallest: float, critical: float) -> float:
    """Data efficiency at ``batch`` over that at ``smallest``: (1 + b/B_crit) / (1 + B/B_crit)."""
    return data_efficiency(batch, critical) / data_efficiency(smallest, critical)


def exponent(rates: dict[int, float], shifts: dict[int, Losses], *, confidence: float = 0.95) -> Bound:
    """d log(best learning rate) / d log(batch) by least squares, with Student's interval over the pairs.

    Args:
        rates: the best learning rate by batch.
        shifts: by how many octaves each pair's own optimum differs from it, by batch.
    """
    if len(rates) < 2:
        return UNKNOWN
    logs = {batch: math.log2(batch) for batch in rates}
    mean = statistics.fmean(logs.values())
    spread = math.fsum((one - mean) ** 2 for one in logs.values())
    weights = {batch: (one - mean) / spread for batch, one in logs.items()}
    value = math.fsum(weights[batch] * math.log2(rate) for batch, rate in rates.items())
    pairs = len(next(iter(shifts.values())))
    slopes = [math.fsum(weights[batch] * shifts[batch][pair] for batch in rates) for pair in range(pairs)]
    quantile = student_quantile(0.5 + 0.5 * confidence, pairs - 1.0)
    width = quantile * statistics.stdev(slopes) / math.sqrt(pairs)
    return Bound(value, value - width, value + width)


def ratio(critical: Bound, scale: Bound) -> Bound:
    """Critical batch over noise scale, with the errors of both.

    The ends are those of a difference of logarithms from the intervals of its two parts (the MOVER of Zou and Donner
    2008, doi:10.1002/sim.3095): distances to the estimate add up in squares, end by end. An open end stays open.
    """
    if not critical.value or not scale.value:
        low = critical.low / scale.high if critical.low and scale.high else None
        return Bound(None, low, critical.high / scale.low if critical.high and scale.low else None)
    centre = math.log(critical.value / scale.value)
    down = math.hypot(_distance(critical.low, critical.value), _distance(scale.value, scale.high))
    up = math.hypot(_distance(critical.value, critical.high), _distance(scale.low, scale.value))
    return Bound(math.exp(centre), math.exp(centre - down), math.exp(centre + up) if up < math.inf else None)


class _Curve:
    """D(n) of every pair, linear in log n between the lengths and beyond them."""

    def __init__(self, lengths: dict[int, Losses]) -> None:
        self.samples = sorted(lengths)
        self._longest = list(lengths[self.samples[-1]])
        self._logs = [math.log2(samples) for samples in self.samples]
        self._rows = [self.over_longest(lengths[samples]) for samples in self.samples]
        self.means = [statistics.fmean(row) for row in self._rows]

    def over_longest(self, losses: Losses) -> list[float]:
        """Each pair's loss less that of the longest branch."""
        return [loss - longest for loss, longest in zip(losses, self._longest, strict=True)]

    def problem(self, quantile: float) -> str | None:
        """Why the curve cannot be read backwards, if it cannot."""
        listed = ", ".join(f"{mean:+.4f} after {samples:,}" for samples, mean in zip(self.samples, self.means))
        if any(left <= right for left, right in zip(self.means, self.means[1:])):
            return f"does not fall all the way with its samples (less the last: {listed})"
        if _student(self._rows[0]) < quantile:
            return f"falls by no more than its scatter (less the last: {listed})"
        return None

    def at(self, log: float) -> list[float]:
        """D of every pair after 2^``log`` samples."""
        place = self._place(log)
        left, right = self._logs[place], self._logs[place + 1]
        share = (log - left) / (right - left)
        return [(1 - share) * a + share * b for a, b in zip(self._rows[place], self._rows[place + 1])]

    def slope(self, log: float) -> float:
        """Change of the mean D with log2 of the samples."""
        place = self._place(log)
        return (self.means[place + 1] - self.means[place]) / (self._logs[place + 1] - self._logs[place])

    def inverse(self, mean: float) -> float | None:
        """log2 of the samples after which the mean D is this; ``None`` above that of the shortest length."""
        if mean > self.means[0]:
            return None
        place = next((i for i, value in enumerate(self.means[1:]) if value <= mean), len(self.means) - 2)
        slope = (self.means[place + 1] - self.means[place]) / (self._logs[place + 1] - self._logs[place])
        return self._logs[place] + (mean - self.means[place]) / slope

    @property
    def last(self) -> float:
        return self._logs[-1]

    def _place(self, log: float) -> int:
        return max(0, min(sum(one <= log for one in self._logs) - 1, len(self._logs) - 2))


class _Model:
    """Residuals of the batches' losses under a trial B_crit."""

    def __init__(self, curve: _Curve, over: dict[int, list[float]], smallest: int) -> None:
        self._curve, self._over, self._smallest = curve, over, smallest
        variances = {batch: statistics.variance(losses) for batch, losses in over.items()}
        pooled = statistics.fmean(variances.values()) or 1.0
        # A variance from a few pairs is uncertain itself, so it counts half.
        self._weights = {batch: 1.0 / (variance + pooled) for batch, variance in variances.items()}
        self.low, self.high = math.log2(smallest / REACH), math.log2(max(over) * REACH)

    def best(self) -> float:
        """log2 of the B_crit of least squares."""
        trials = _grid(self.low, self.high)
        place = min(range(len(trials)), key=lambda i: self._squares(trials[i]))
        left, right = trials[max(place - 1, 0)], trials[min(place + 1, len(trials) - 1)]
        for _ in range(40):
            third = (right - left) / 3
            if self._squares(left + third) < self._squares(right - third):
                right -= third
            else:
                left += third
        return 0.5 * (left + right)

    def steepness(self, log: float) -> tuple[float, float]:
        """How fast the mean weighed residual changes with log2 B_crit, its weights held; and the scatter over pairs."""
        step = 0.5 / FINE
        weights = {batch: self._weight(batch, log) for batch in self._over}
        means = [
            math.fsum(weights[batch] * statistics.fmean(self._residuals(batch, at)) for batch in self._over)
            for at in (log - step, log + step)
        ]
        return abs(means[1] - means[0]) / (2 * step), statistics.stdev(self._scores(log))

    def interval(self, best: float, quantile: float) -> Bound:
        """``best`` with all trial values around it that the test does not drop."""

        def kept(log: float) -> bool:
            return abs(_student(self._scores(log))) <= quantile

        low, high = _reach(kept, best, self.low), _reach(kept, best, self.high)
        at_an_end = min(best - self.low, self.high - best) < 2.0 / FINE
        return Bound(
            None if at_an_end else 2.0**best,
            0.0 if low is None else min(2.0**low, 2.0**best / (1 + TRUST)),
            None if high is None else max(2.0**high, 2.0**best * (1 + TRUST)),
        )

    def _after(self, batch: int, log: float) -> float:
        return self._curve.last + math.log2(relative(batch, self._smallest, 2.0**log))

    def _residuals(self, batch: int, log: float) -> list[float]:
        predicted = self._curve.at(self._after(batch, log))
        return [loss - one for loss, one in zip(self._over[batch], predicted)]

    def _squares(self, log: float) -> float:
        means = {batch: statistics.fmean(self._residuals(batch, log)) for batch in self._over}
        return math.fsum(self._weights[batch] * mean * mean for batch, mean in means.items())

    def _scores(self, log: float) -> list[float]:
        """Each pair's residuals, weighed by how the batches' losses change with B_crit."""
        total = [0.0] * len(next(iter(self._over.values())))
        for batch in self._over:
            weight = self._weight(batch, log)
            total = [one + weight * residual for one, residual in zip(total, self._residuals(batch, log))]
        return total

    def _weight(self, batch: int, log: float) -> float:
        critical = 2.0**log
        gained = batch / (critical + batch) - self._smallest / (critical + self._smallest)
        return -self._curve.slope(self._after(batch, log)) * gained * self._weights[batch]


def _efficiency(curve: _Curve, over: list[float], quantile: float) -> Bound:
    """Samples that the smallest batch needs for the same loss, over those that were used."""

    def kept(log: float) -> bool:
        return abs(_student([loss - one for loss, one in zip(over, curve.at(log))])) <= quantile

    best = curve.inverse(statistics.fmean(over))
    if best is None:
        return Bound(None, 0.0, 2.0 ** (math.log2(curve.samples[0]) - curve.last))
    low, high = _reach(kept, best, best - 8.0), _reach(kept, best, best + 8.0)
    return Bound(
        2.0 ** (best - curve.last),
        0.0 if low is None else 2.0 ** (low - curve.last),
        None if high is None else 2.0 ** (high - curve.last),
    )


def _reach(kept: Callable[[float], bool], best: float, end: float) -> float | None:
    """The last value from ``best`` towards ``end`` that is kept, by bisection; ``None`` when ``end`` is, too."""
    inside = best
    for trial in _grid(best, end)[1:]:
        if not kept(trial):
            outside = trial
            break
        inside = trial
    else:
        return None
    for _ in range(30):
        middle = 0.5 * (inside + outside)
        inside, outside = (middle, outside) if kept(middle) else (inside, middle)
    return inside


def _grid(first: float, last: float) -> list[float]:
    count = max(1, math.ceil(abs(last - first) * FINE))
    return [first + (last - first) * i / count for i in range(count + 1)]


def _student(values: Losses) -> float:
    """The mean over its standard error; a scatter of 0 leaves no doubt."""
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    return mean / error if error > 0 else math.copysign(math.inf, mean) if mean else 0.0


def _distance(low: float | None, high: float | None) -> float:
    return math.log(high / low) if low and high else math.inf


def _open_end(batch: Bound) -> str:
    if batch.low and batch.high is None:
        return f"larger batches lose too little to be told apart from none: B_crit is at least {batch.low:.3g}"
    if not batch.low and batch.high is not None:
        return f"B_crit is at most {batch.high:.3g}, and not told apart from 0"
    return "the losses of the pairs scatter too much"
