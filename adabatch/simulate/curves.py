"""Truths that are known as a curve: the critical batch against the progress made, whatever batches made it.

Progress x is counted in *efficient samples*: a step of B samples makes dx = B / (1 + B / B_crit) of it, as many as tiny
batches would have needed (arXiv 1812.06162, section 2.3). As a function of x the critical batch does not depend on the
batches that a run uses, as long as each has a learning rate that suits it; learning rates do not matter here. Then

    E_min = x    and    S_min = the integral of dx / B_crit(x).
"""

from __future__ import annotations

import bisect
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from adabatch.ledger import Ledger
from adabatch.noise import Measurement
from adabatch.plan import BatchPlan, data_efficiency
from adabatch.policies import Curve
from adabatch.report.tradeoff import Needs, Part, parts_of
from adabatch.runlog import Metrics, read_metrics, text
from adabatch.simulate.windows import Groups, Moment, drawn_window


class Law(Protocol):
    """A curve: the critical batch and the loss after ``clock`` efficient samples."""

    def critical(self, clock: float) -> float: ...

    def loss(self, clock: float) -> float | None: ...


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """B_crit = scale (x / at) ^ exponent, and at least ``least``.

    Critical batches of language models go with the 0.47th power of the samples seen (arXiv 2410.21676).

    Raises:
        ValueError: when scale, at or least is not above 0.
    """

    scale: float
    at: float
    exponent: float = 0.47
    least: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(scale=self.scale, at=self.at, least=self.least)

    def critical(self, clock: float) -> float:
        return max(self.least, self.scale * (clock / self.at) ** self.exponent) if clock > 0 else self.least

    def loss(self, clock: float) -> None:
        return None


@dataclass(frozen=True, slots=True)
class LossLaw:
    """B_crit = scale (loss / at) ^ -exponent, while the loss falls as floor + (start - floor) (1 + x / knee) ^ -slope.

    An exponent of 1 / 0.21 is that of arXiv 2001.08361 (Kaplan et al.).

    Raises:
        ValueError: when scale, at, knee or slope is not above 0, or the loss does not start above a floor of 0 or more.
    """

    scale: float
    at: float
    exponent: float = 4.76
    start: float = 5.0
    floor: float = 0.0
    knee: float = 1000.0
    slope: float = 0.2

    def __post_init__(self) -> None:
        _require_positive(scale=self.scale, at=self.at, knee=self.knee, slope=self.slope)
        if not 0 <= self.floor < self.start:
            raise ValueError(f"truth.floor must be at least 0 and below truth.start, got {self.floor} and {self.start}")

    def critical(self, clock: float) -> float:
        return self.scale * (self.loss(clock) / self.at) ** -self.exponent

    def loss(self, clock: float) -> float:
        return self.floor + (self.start - self.floor) * (1 + clock / self.knee) ** -self.slope


@dataclass(frozen=True, slots=True)
class Exponential:
    """A critical batch that grows exponentially with the progress in least steps, by ``growth`` until x = ``over``.

    A tiny step ds of such progress takes dx = B_crit ds, so that the critical batch is linear in x:
    B_crit = start (1 + (growth - 1) x / over).

    Raises:
        ValueError: when an argument is not above 0.
    """

    start: float
    growth: float
    over: float

    def __post_init__(self) -> None:
        _require_positive(start=self.start, growth=self.growth, over=self.over)

    def critical(self, clock: float) -> float:
        return self.start * max(1 + (self.growth - 1) * clock / self.over, min(self.growth, 1.0))

    def loss(self, clock: float) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Recorded:
    """The noise scale that a run has recorded, times ``calibration``, and its loss where it is known.

    Log-linear in between, constant beyond both ends.
    """

    curve: Curve
    losses: tuple[tuple[float, float], ...] = ()

    @classmethod
    def load(cls, run: str | os.PathLike[str], calibration: float = 1.0) -> Self:
        """The curve of a run folder, by its metrics, or of a ledger, by its decisions.

        Raises:
            FileNotFoundError: when there is nothing.
            ValueError: when no resolved noise scale was recorded.
        """
        path = Path(run)
        if path.is_file() and path.suffix == ".json":
            return cls(_times(Curve.from_ledger(Ledger.load(path), calibration), calibration))
        return cls.from_metrics(read_metrics(path), calibration)

    @classmethod
    def from_metrics(cls, metrics: Metrics, calibration: float = 1.0) -> Self:
        """The same from a run's records: a stretch between two of them stands at its middle.

        What came before the first noise scale counts by that one.
        """
        parts = parts_of(metrics, calibration)
        clocks, scales, losses = [], [], []
        clock = _before(metrics, parts)
        measured = [record for record in metrics.steps if text.noise_scale(record) is not None]
        for part, record in zip(parts, measured, strict=False):
            worth = _worth(part, part.samples, part.steps)
            middle, clock = clock + worth / 2, clock + worth
            if part.critical.value is not None and worth > 0:
                clocks.append(middle)
                scales.append(part.critical.value)
            if record.get("loss") is not None:
                losses.append((middle, record["loss"]))
        if not clocks:
            raise ValueError(
                f"{metrics.path} has recorded no resolved noise scale; a longer run, or one that measures it, has one"
            )
        return cls(Curve(tuple(clocks), tuple(scales)), tuple(losses))

    def critical(self, clock: float) -> float:
        return self.curve.at(clock)

    def loss(self, clock: float) -> float | None:
        return _between(self.losses, clock) if self.losses else None


@dataclass(slots=True)
class CurveTruth:
    """Gradients of |G|^2 = 1 whose noise scale follows a curve, with isotropic noise in ``dimensions`` dimensions.

    Args:
        law: the critical batch against efficient samples.
        calibration: critical batch over noise scale; what is measured is the noise scale.
        dimensions: tr(Sigma)^2 / tr(Sigma^2) of the noise, at least 1: the fewer, the noisier is a measured |G|^2.

    Raises:
        ValueError: for a calibration not above 0, or less than one dimension.
    """

    law: Law
    calibration: float = 1.0
    dimensions: float = 300.0
    clock: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        _require_positive(calibration=self.calibration)
        if not self.dimensions >= 1:
            raise ValueError(f"truth.dimensions must be at least 1, got {self.dimensions}")

    @property
    def moment(self) -> Moment:
        critical = self.law.critical(self.clock)
        return Moment(1.0, critical / self.calibration, critical, self.dimensions, self.law.loss(self.clock))

    def step(self, plan: BatchPlan, groups: Groups, draws: random.Random) -> Measurement | None:
        moment = self.moment
        self.clock += data_efficiency(plan.global_batch, moment.critical) * plan.global_batch
        measured = plan.measure and groups.count > 1
        return drawn_window(moment, plan.global_batch, groups, draws) if measured else None

    def state_dict(self) -> dict[str, Any]:
        return {"clock": self.clock}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clock = state["clock"]


def _worth(part: Part, samples: int, steps: int) -> float:
    """Efficient samples of so many at the part's critical batch, or at its lower bound where that is all."""
    critical = part.critical.low if part.critical.value is None else part.critical.value
    return Needs.of(Part(samples, steps, part.critical), critical).samples


def _before(metrics: Metrics, parts: Sequence[Part]) -> float:
    """Efficient samples before the first of the parts."""
    if not parts:
        return 0.0
    samples = metrics.steps[-1]["samples"] - sum(part.samples for part in parts)
    steps = metrics.steps[-1]["step"] - sum(part.steps for part in parts)
    return _worth(parts[0], samples, steps) if steps > 0 else 0.0


def _times(curve: Curve, factor: float) -> Curve:
    return Curve(curve.clocks, tuple(factor * scale for scale in curve.scales))


def _between(points: Sequence[tuple[float, float]], place: float) -> float:
    """Linear between the points, constant beyond both ends."""
    right = bisect.bisect_right(points, place, key=lambda point: point[0])
    if right in (0, len(points)):
        return points[max(right - 1, 0)][1]
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (place - x0) / (x1 - x0)


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"truth.{name} must be above 0, got {value}")
