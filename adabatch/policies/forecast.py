"""How the noise scale will go on: from its own growth, or from the ledger of an earlier run.

The clock is *efficient samples*: each sample counts by its data efficiency, so a tiny batch's samples count in full. As a
function of this clock the critical batch does not depend on the batches that a run has used (arXiv 1812.06162,
section 2.3 and appendix D), which makes one run's curve serve for another's.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from adabatch.ledger import Ledger
from adabatch.plan import data_efficiency

if TYPE_CHECKING:
    from adabatch.noise import Estimate

# One point of a run's own history for each factor of this in the clock: a later estimate replaces one of the same bin,
# with which it shares most of its memory.
_BIN = 2**0.5
# Before a run's own growth is known, noise scale ~ clock ** 0.47 +- 0.5: the exponent that critical batches of language
# models follow in the samples seen (arXiv 2410.21676), and room for none and for one twice as large.
_PRIOR_EXPONENT, _PRIOR_DEVIATION = 0.47, 0.5
# Estimates differ from any power law by more than their intervals say.
_MODEL_DEVIATION = 0.2
_NORMAL_95 = 1.96

History = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Growth:
    """The noise scale as a power of the clock: the exponent, and its standard error."""

    exponent: float
    error: float

    def factor(self, clock: float, later: float) -> float:
        """The noise scale at ``later`` over the one at ``clock``."""
        return (later / clock) ** self.exponent if clock > 0 else 1.0

    def describe(self) -> str:
        spread = _NORMAL_95 * self.error
        low, high = self.exponent - spread, self.exponent + spread
        return f"growth ~ samples^{self.exponent:.2g} [{low:.2g}, {high:.2g}]"


@dataclass(frozen=True, slots=True)
class Curve:
    """A known noise scale at rising clocks, log-linear in between and constant beyond both ends.

    Raises:
        ValueError: when there is no point, clocks do not rise strictly from above 0, or a noise scale is not above 0.
    """

    clocks: tuple[float, ...]
    scales: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip((0.0, *self.clocks), self.clocks))
        positive = all(0 < scale < math.inf for scale in self.scales)
        if not (self.clocks and len(self.clocks) == len(self.scales) and rising and positive):
            raise ValueError(
                f"a curve needs clocks that rise from above 0 and as many noise scales above 0, got "
                f"{len(self.clocks)} clocks and {len(self.scales)} scales"
            )

    @classmethod
    def from_ledger(cls, ledger: Ledger, calibration: float = 1.0) -> Self:
        """What a ledger's decisions have recorded, against the efficient samples up to each of them.

        Raises:
            ValueError: when no decision has recorded a resolved noise scale.
        """
        clocks, scales = [], []
        clock, accounted = 0.0, 0
        for decision in ledger.decisions:
            estimate = decision.estimate
            if not estimate or not estimate["resolved"]:
                continue
            scale = float(estimate["scale"])
            sample = decision.sample if decision.until_sample is None else decision.until_sample
            clock += data_efficiency(decision.previous, calibration * scale) * (sample - accounted)
            accounted = sample
            if scale > 0 and clock > (clocks[-1] if clocks else 0):
                clocks.append(clock)
                scales.append(scale)
        if not clocks:
            raise ValueError("policy.forecast: the ledger has recorded no resolved noise scale to forecast from")
        return cls(tuple(clocks), tuple(scales))

    def at(self, clock: float) -> float:
        """The noise scale at ``clock``."""
        right = bisect.bisect_right(self.clocks, clock)
        if right in (0, len(self.clocks)):
            return self.scales[max(right - 1, 0)]
        left = right - 1
        share = math.log(clock / self.clocks[left]) / math.log(self.clocks[right] / self.clocks[left])
        return self.scales[left] * (self.scales[right] / self.scales[left]) ** share

    def factor(self, clock: float, later: float) -> float:
        """The noise scale at ``later`` over the one at ``clock``."""
        return self.at(later) / self.at(clock)

    def describe(self) -> str:
        return "growth as in the earlier ledger"


def remember(history: History, clock: float, estimate: Estimate) -> list[list[float]]:
    """``history`` with a resolved estimate at ``clock``: triples of log clock, log noise scale, and its variance."""
    if clock <= 0 or not estimate.resolved or not 0 < estimate.low <= estimate.scale < math.inf:
        return [list(point) for point in history]
    deviation = (math.log(estimate.high) - math.log(estimate.low)) / (2 * _NORMAL_95)
    point = [math.log(clock), math.log(estimate.scale), deviation**2 + _MODEL_DEVIATION**2]
    kept = [list(one) for one in history if _bin(one[0]) != _bin(point[0])]
    return [*kept, point]


def growth(history: History) -> Growth:
    """The exponent that ``history`` shows, by weighted least squares of the logarithms, with a prior."""
    precision, product = _PRIOR_DEVIATION**-2, _PRIOR_EXPONENT * _PRIOR_DEVIATION**-2
    total = math.fsum(1 / variance for _, _, variance in history)
    if total > 0:
        mean_x = math.fsum(x / variance for x, _, variance in history) / total
        mean_y = math.fsum(y / variance for _, y, variance in history) / total
        precision += math.fsum((x - mean_x) ** 2 / variance for x, _, variance in history)
        product += math.fsum((x - mean_x) * (y - mean_y) / variance for x, y, variance in history)
    return Growth(product / precision, precision**-0.5)


def _bin(log_clock: float) -> int:
    return math.floor(log_clock / math.log(_BIN))


def square_root_ratio(factors: Sequence[float], clock: float, samples: float, cap: float) -> float:
    """The wanted batch over the critical one, now, when the rest of a run takes B = c sqrt(B_crit).

    Among all ways to spend the rest of the samples at a given total efficiency this one takes the fewest steps
    (arXiv 1812.06162, appendix D). A clock tick dx costs (1 + B/B_crit) dx samples, so c solves
    sum_i min(c / sqrt(factor_i), cap) dx = samples - clock.

    Args:
        factors: the critical batch over today's, at equally spaced moments of the rest of the clock.
        clock: efficient samples to be had from the rest.
        samples: samples that are left.
        cap: the largest B / B_crit.

    Returns:
        c over the root of today's critical batch, at most ``cap``; 0 where even tiny batches would not be efficient
        enough.
    """
    if clock <= 0:
        return cap
    spare = samples / clock - 1  # the mean of B / B_crit over the clock
    if spare <= 0:
        return 0.0
    roots = sorted((1 / math.sqrt(factor) for factor in factors), reverse=True)
    left = math.fsum(roots)
    for capped, root in enumerate(roots):
        # With the ``capped`` moments of the smallest critical batches at the cap, the others share what is left.
        ratio = (spare * len(roots) - cap * capped) / left
        if ratio * root <= cap:
            return min(ratio, cap)
        left -= root
    return cap
