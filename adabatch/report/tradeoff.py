"""The trade-off between optimizer steps and samples that a measured noise scale predicts for other batches.

At global batch B and critical batch C a unit of progress costs 1 + C/B steps and B + C samples (arXiv 1812.06162,
section 2.3 and appendix D). A stretch of n samples that was run at batch B' and critical batch C' therefore made
n / (B' + C') units, and a run as a whole needs, for its progress at a fixed batch B,

    S_min = sum n / (B' + C')        E_min = sum n C' / (B' + C')
    steps = S_min + E_min / B        samples = E_min + S_min B

whatever C' did on the way. E_min / S_min is the critical batch of the run as a whole: C', weighted by progress. With
one constant C' these are (steps/S_min - 1)(samples/E_min - 1) = 1 and E_min / S_min = C'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from adabatch.plan import data_efficiency, samples_in
from adabatch.runlog import Metrics, text

# A value is given as long as the parts that are unresolved, at their bounds or at infinity, move the critical batch of
# the whole by no more than this factor; beyond that only the interval is.
MOST_MOVED = 1.2


@dataclass(frozen=True, slots=True)
class Quantity:
    """An estimate with its interval.

    ``value`` is ``None`` when the data support the interval alone. When that has no upper end, ``high`` is inf and
    ``low`` is a bound.
    """

    value: float | None
    low: float
    high: float

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.high)

    def times(self, factor: float) -> Quantity:
        return Quantity(None if self.value is None else self.value * factor, self.low * factor, self.high * factor)

    def through(self, rising: Callable[[float], float]) -> Quantity:
        """The quantity's image under a function that rises."""
        return Quantity(None if self.value is None else rising(self.value), rising(self.low), rising(self.high))

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: an upper end that does not exist is ``None``."""
        return {"value": self.value, "low": self.low, "high": self.high if self.bounded else None}


@dataclass(frozen=True, slots=True)
class Part:
    """``samples`` that were consumed in ``steps`` steps while the critical batch was ``critical``."""

    samples: int
    steps: int
    critical: Quantity


@dataclass(frozen=True, slots=True)
class Needs:
    """The least steps and the least samples of some progress: those of a huge batch and of a tiny one."""

    steps: float = 0.0
    samples: float = 0.0

    @classmethod
    def of(cls, part: Part, critical: float) -> Needs:
        """Those of the progress that ``part`` made if the critical batch was ``critical``, which may be inf."""
        batch = part.samples / part.steps
        return cls(part.samples / (batch + critical), part.samples * data_efficiency(batch, critical))

    def __add__(self, other: Needs) -> Needs:
        return Needs(self.steps + other.steps, self.samples + other.samples)

    @property
    def critical_batch(self) -> float:
        return self.samples / self.steps if self.steps > 0.0 else math.inf

    def steps_at(self, global_batch: float) -> float:
        return self.steps + self.samples / global_batch

    def samples_at(self, global_batch: float) -> float:
        return self.samples + samples_in(self.steps, global_batch)


@dataclass(frozen=True, slots=True)
class Ends:
    """What is needed with every critical batch at its low end, at its value, and at its high end.

    Without a value, the low end stands for it in ``value``, and the high end in ``most``.
    """

    low: Needs = Needs()
    value: Needs = Needs()
    most: Needs = Needs()
    high: Needs = Needs()

    @classmethod
    def of(cls, part: Part) -> Ends:
        critical = part.critical
        value, most = (end if critical.value is None else critical.value for end in (critical.low, critical.high))
        return cls(*(Needs.of(part, one) for one in (critical.low, value, most, critical.high)))

    def __add__(self, other: Ends) -> Ends:
        return Ends(self.low + other.low, self.value + other.value, self.most + other.most, self.high + other.high)


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """What fixed batches would need for the progress of some parts of a run.

    Intervals take all parts at the lower or all at the upper end of their own: errors that partly cancel over a run
    make the truth better known than that, never worse. Values take unresolved parts at their lower bounds.

    Attributes:
        steps, samples: what the parts themselves took.
        unresolved: samples of parts whose critical batch has no upper end.
    """

    steps: int
    samples: int
    unresolved: int
    _needs: tuple[tuple[float, Ends], ...]

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Tradeoff:
        """Sum up the parts, those of one batch together: their intervals point the same way at any other batch."""
        needs: dict[float, Ends] = {}
        steps = samples = unresolved = 0
        for part in parts:
            steps, samples = steps + part.steps, samples + part.samples
            unresolved += 0 if part.critical.bounded else part.samples
            batch = part.samples / part.steps
            needs[batch] = needs.get(batch, Ends()) + Ends.of(part)
        return cls(steps, samples, unresolved, tuple(needs.items()))

    @property
    def critical_batch(self) -> Quantity:
        """The critical batch of the whole, E_min / S_min; it rises with each part's."""
        total = self._total
        return Quantity(self._stated(total.value.critical_batch), total.low.critical_batch, total.high.critical_batch)

    @property
    def least_steps(self) -> Quantity:
        """S_min; it falls with the critical batch."""
        total = self._total
        return Quantity(self._stated(total.value.steps), total.high.steps, total.low.steps)

    @property
    def least_samples(self) -> Quantity:
        """E_min; it rises with the critical batch."""
        total = self._total
        return Quantity(self._stated(total.value.samples), total.low.samples, total.high.samples)

    def steps_at(self, global_batch: float) -> Quantity:
        return self._at(lambda needs: needs.steps_at(global_batch))

    def samples_at(self, global_batch: float) -> Quantity:
        return self._at(lambda needs: needs.samples_at(global_batch))

    def efficiency_at(self, global_batch: float) -> Quantity:
        """The data efficiency of a fixed batch over the whole."""
        return self.critical_batch.through(lambda critical: data_efficiency(global_batch, critical))

    @property
    def efficiency(self) -> Quantity:
        """The data efficiency that the parts themselves had: E_min over their samples."""
        return self.least_samples.times(1.0 / self.samples)

    @property
    def valued(self) -> bool:
        """Whether values are given, and not intervals alone."""
        total = self._total
        return total.most.critical_batch <= MOST_MOVED * total.value.critical_batch < math.inf

    @property
    def _total(self) -> Ends:
        return sum((ends for _, ends in self._needs), Ends())

    def _at(self, cost: Callable[[Needs], float]) -> Quantity:
        """Costs at another batch rise with the critical batch below a part's own batch, and fall above it."""
        low = value = high = 0.0
        for _, ends in self._needs:
            at_low, at_high = cost(ends.low), cost(ends.high)
            low, value, high = low + min(at_low, at_high), value + cost(ends.value), high + max(at_low, at_high)
        return Quantity(self._stated(value), low, high)

    def _stated(self, value: float) -> float | None:
        return value if self.valued else None


def parts_of(metrics: Metrics, calibration: float = 1.0) -> list[Part]:
    """The run from record to record, each with the noise scale recorded at its end, times ``calibration``.

    What came before the first estimate is left out.
    """
    parts: list[Part] = []
    step = sample = 0
    for record in metrics.steps:
        steps, samples = record["step"] - step, record["samples"] - sample
        step, sample = record["step"], record["samples"]
        if steps > 0 and samples > 0 and text.noise_scale(record) is not None:
            parts.append(Part(samples, steps, scale_of(record).times(calibration)))
    return parts


def scale_of(record: dict[str, Any]) -> Quantity:
    """The noise scale of a record, in samples; of an unresolved one the lower bound alone."""
    if text.is_resolved(record):
        return Quantity(record["scale"], record["scale_low"], record["scale_high"])
    return Quantity(None, record.get("scale_low") or 0.0, math.inf)
