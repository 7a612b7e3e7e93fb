"""What a measured window reads when the truth is known: drawn with the right variances, or exactly.

For a true gradient G and the noise covariance Sigma of one sample, a window of N samples in K groups needs two sums of
squares. Both are drawn from what Gaussian gradients would give, without making a gradient:

    |g_bar|^2          the squared norm of a draw from N(G, Sigma / N)
    sum p_k^2 |g_k|^2  from the spread of the groups about g_bar, a chi-squared number of (K - 1) d degrees of freedom

with d = tr(Sigma)^2 / tr(Sigma^2), the effective dimension. Then G^2 is unbiased with the variance
4 G'Sigma G / N + 2 tr(Sigma^2) / (N^2 (1 - sum p_k^2)), and S with 2 tr(Sigma^2) / (K - 1), as those of a real window.
The cost does not depend on the number of groups.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from adabatch.noise import Measurement
from adabatch.plan import BatchPlan

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of samples of one window: how many hold samples, and sum(p_k^2) over their shares p_k."""

    count: int
    weight_square: float

    @classmethod
    def of(cls, plan: BatchPlan) -> Groups:
        """Each micro-batch of each rank is a group. Shares differ by one sample at most, so ranks are of two kinds."""
        share, larger = divmod(plan.global_batch, plan.world)
        count = squares = 0
        for ranks, samples in ((larger, share + 1), (plan.world - larger, share)):
            full, rest = divmod(samples, plan.micro_batch)
            count += ranks * (full + (rest > 0))
            squares += ranks * (full * plan.micro_batch**2 + rest**2)
        return cls(count, squares / plan.global_batch**2)


@dataclass(frozen=True, slots=True)
class Moment:
    """What is true now.

    Attributes:
        signal: |G|^2.
        noise: tr(Sigma), the noise of one sample.
        critical: the critical batch, in samples.
        dimensions: tr(Sigma)^2 / tr(Sigma^2).
        loss: the expected loss; ``None`` where the truth has none.
    """

    signal: float
    noise: float
    critical: float
    dimensions: float
    loss: float | None


@dataclass(frozen=True, slots=True)
class Ready(Generic[_Value]):
    """A measurement or a lap that can be read at once."""

    value: _Value

    def read(self) -> _Value:
        return self.value


class Diverged(ValueError):
    """The parameters of a simulated run are no longer finite."""


class Truth(Protocol):
    """What the gradients of a simulated run are like, and how training changes them."""

    @property
    def moment(self) -> Moment: ...

    def step(self, plan: BatchPlan, groups: Groups, draws: random.Random) -> Measurement | None:
        """Carry ``plan`` out. Returns the window as it would be measured; ``None`` when nothing is measured."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def drawn_window(moment: Moment, samples: int, groups: Groups, draws: random.Random) -> Measurement:
    """A window under isotropic noise in ``moment.dimensions`` dimensions."""
    variance = moment.noise / (moment.dimensions * samples)
    along = math.sqrt(moment.signal) + math.sqrt(variance) * draws.gauss(0.0, 1.0)
    mean_square = along**2 + variance * chi_square(draws, moment.dimensions - 1)
    return grouped(moment, samples, groups, mean_square, draws)


def grouped(moment: Moment, samples: int, groups: Groups, mean_square: float, draws: random.Random) -> Measurement:
    """The window whose mean gradient has the squared norm ``mean_square``, with the groups' spread drawn."""
    effective = 1 / groups.weight_square  # equal groups that would weigh as these do
    freedom = (effective - 1) * moment.dimensions
    spread = moment.noise / (moment.dimensions * samples) * effective * chi_square(draws, freedom)
    return _window(moment, samples, groups, mean_square, (mean_square + spread / effective) / effective)


def exact_window(moment: Moment, samples: int, groups: Groups) -> Measurement:
    """A window that reads G^2 and S without error."""
    mean_square = moment.signal + moment.noise / samples
    group_square = mean_square - moment.signal * (1 - groups.weight_square)
    return _window(moment, samples, groups, mean_square, group_square)


def unmeasured_window(moment: Moment, samples: int) -> Measurement:
    """A window whose loss alone is known."""
    return _window(moment, samples, Groups(1, 1.0), moment.signal, moment.signal)


def chi_square(draws: random.Random, freedom: float) -> float:
    """A chi-squared number; 0 for no degrees of freedom."""
    return draws.gammavariate(freedom / 2, 2.0) if freedom > 0 else 0.0


def _window(moment: Moment, samples: int, groups: Groups, mean_square: float, group_square: float) -> Measurement:
    return Measurement(
        samples=samples,
        groups=groups.count,
        mean_square=mean_square,
        group_square=group_square,
        weight_square=groups.weight_square,
        weight=float(samples),
        loss=0.0 if moment.loss is None else moment.loss,
    )
