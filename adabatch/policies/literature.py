"""Rules for the batch from the literature, for comparison, read from the unbiased estimate.

The gradient tests ask whether the noise in a window's mean gradient g is small against it. They were written for
|g|^2 itself, which is G^2 + S/B on average, and so count the noise as signal. Their papers grow the batch in steps
until the test passes; here the batch at which that comes to rest is wanted at once, and damping sets the pace. (The
papers never shrink the batch again: ``damping.monotone``.) With noise scale C = S/G^2, a resting place B = x C delivers
the data efficiency 1/(1 + x), whatever C is, which is said in every reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from adabatch.plan import data_efficiency
from adabatch.policies.protocol import Facts, Stateless, Wanted, describe_scale, exactly, supported_scale

if TYPE_CHECKING:
    from adabatch.noise import Estimate
    from adabatch.schedules import ScheduleLike


@dataclass(frozen=True, slots=True)
class NormTest(Stateless):
    """Noise at most a share of the gradient: S/B <= tolerance^2 |g|^2 (Byrd et al. 2012; arXiv 2402.11215).

    With |g|^2 = G^2 + S/B, the biased square that the papers use, the test passes from B = C (1/tolerance^2 - 1) on:
    data efficiency tolerance^2.

    Args:
        tolerance: eta in (0, 1).

    Raises:
        ValueError: for a tolerance outside (0, 1).
    """

    tolerance: float
    name: ClassVar[str] = "norm_test"
    closed_loop: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"noise"})

    def __post_init__(self) -> None:
        _require_tolerance(self.tolerance, "tolerance", "of 1 or more passes at every batch")

    def value(self, state: object, facts: Facts) -> Wanted | None:
        if facts.estimate is None:
            return None
        return _by_noise_share(facts.estimate, facts.batch, self.tolerance, f"the norm test at {self.tolerance:g}")


@dataclass(frozen=True, slots=True)
class InnerProductTest(Stateless):
    """Noise along the gradient at most a share of it: Var(<g_i, g>)/B <= tolerance^2 |g|^4 (arXiv 1710.11258).

    The variance along g is not in the norms of more than two groups, and so not in an estimate. What is, bounds it:
    Var(<g_i, g>) <= S |g|^2. So the test passes for certain where the norm test of the same tolerance does, and that
    batch is wanted. The companion test across the gradient, with its usual tolerance of 5.84, passes there, too.

    Args:
        tolerance: theta in (0, 1); the paper's is 0.9.

    Raises:
        ValueError: for a tolerance outside (0, 1).
    """

    tolerance: float
    name: ClassVar[str] = "inner_product_test"
    closed_loop: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"noise"})

    def __post_init__(self) -> None:
        _require_tolerance(self.tolerance, "tolerance", "of 1 or more passes at every batch")

    def value(self, state: object, facts: Facts) -> Wanted | None:
        if facts.estimate is None:
            return None
        test = f"the inner-product test at {self.tolerance:g}, bounded by the norm test,"
        return _by_noise_share(facts.estimate, facts.batch, self.tolerance, test)


@dataclass(frozen=True, slots=True)
class CosineTest(Stateless):
    """A cosine between the gradients of the batch's two halves (SimiGrad, NeurIPS 2021).

    Each half's square is G^2 + 2S/B on average and their product G^2, so the cosine is about 1/(1 + 2C/B) and reaches
    ``similarity`` at B = 2C similarity/(1 - similarity): data efficiency (1 - similarity)/(1 + similarity).

    Args:
        similarity: the cosine that is aimed for, in (0, 1).

    Raises:
        ValueError: for a similarity outside (0, 1).
    """

    similarity: float
    name: ClassVar[str] = "cosine_test"
    closed_loop: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"noise"})

    def __post_init__(self) -> None:
        _require_tolerance(self.similarity, "similarity", "of 1 needs an infinite batch, and one of 0 none")

    def value(self, state: object, facts: Facts) -> Wanted | None:
        estimate = facts.estimate
        if estimate is None:
            return None
        now = 1 - data_efficiency(facts.batch, 2 * supported_scale(estimate))
        ratio = 2 * self.similarity / (1 - self.similarity)
        aim = f"the cosine of two halves is about {now:.3g} at batch {facts.batch}, {self.similarity:g} is aimed for"
        return _at_ratio(estimate, ratio, aim)


@dataclass(frozen=True, slots=True)
class Cabs(Stateless):
    """The batch that goes with a learning rate: B = rate x S / loss (arXiv 1612.05086).

    Derived for SGD without momentum, a loss whose minimum is 0, the Euclidean length of the gradient, and a rate that
    does not itself follow the batch. S does not need a resolved signal; without one the batch may grow, and never
    shrinks.

    Args:
        learning_rate: at the peak of the schedule.
        schedule: of the learning rate; ``None`` for a constant one.

    Raises:
        ValueError: for a learning rate not above 0.
    """

    learning_rate: float
    schedule: ScheduleLike | None = None
    name: ClassVar[str] = "cabs"
    closed_loop: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"noise", "loss"})

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"policy.learning_rate is the peak rate of the run, above 0, got {self.learning_rate}; "
                f"set it to optimizer.lr"
            )

    def value(self, state: object, facts: Facts) -> Wanted | None:
        estimate, loss = facts.estimate, facts.loss
        if estimate is None or loss is None:
            return None
        if not 0 < loss < math.inf:
            return _speechless(loss)
        rate = self._rate(facts)
        batch = rate * max(estimate.noise, 0.0) / loss
        efficiency = f", data efficiency {data_efficiency(batch, estimate.scale):.2g}" if estimate.resolved else ""
        return Wanted(
            batch=batch,
            low=batch,
            high=batch if estimate.resolved else math.inf,
            reason=f"learning rate {rate:.3g} x noise {estimate.noise:.3g} / loss {loss:.4g}{efficiency}",
        )

    def _rate(self, facts: Facts) -> float:
        if self.schedule is None:
            return self.learning_rate
        return self.learning_rate * self.schedule.value(facts.progress.in_unit(self.schedule.unit))


@dataclass(frozen=True, slots=True)
class LossLaw(Stateless):
    """A critical batch that is a power of the training loss: B = reference_batch (reference_loss / loss)^exponent.

    Exponent 4.76 for language models, the batch in tokens (arXiv 2001.08361); the stages of MiniMax-01
    (arXiv 2501.08313) follow 6.1. Nothing is measured but the loss.

    Args:
        reference_batch: samples at the reference loss.
        reference_loss: in the unit of the training loss.
        exponent: of the power.

    Raises:
        ValueError: for a setting not above 0.
    """

    reference_batch: int
    reference_loss: float
    exponent: float = 4.76
    name: ClassVar[str] = "loss_law"
    closed_loop: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"loss"})

    def __post_init__(self) -> None:
        settings = (self.reference_batch, self.reference_loss, self.exponent)
        if not all(0 < setting < math.inf for setting in settings):
            raise ValueError(
                f"policy.reference_batch, policy.reference_loss and policy.exponent must be above 0, got "
                f"{', '.join(f'{setting:g}' for setting in settings)}; take the first two from a run at its best batch"
            )

    def value(self, state: object, facts: Facts) -> Wanted | None:
        loss = facts.loss
        if loss is None:
            return None
        if not 0 < loss < math.inf:
            return _speechless(loss)
        power = self.exponent * (math.log(self.reference_loss) - math.log(loss))
        return exactly(
            self.reference_batch * math.exp(power) if power < _LARGEST_EXPONENT else math.inf,
            f"loss {loss:.4g} against {self.reference_loss:g} at batch {self.reference_batch}, "
            f"power {self.exponent:g},",
        )


# Of e, before the power leaves the range of floats.
_LARGEST_EXPONENT = 600.0


def _require_tolerance(value: float, setting: str, why: str) -> None:
    if not 0 < value < 1:
        raise ValueError(f"policy.{setting} must lie strictly between 0 and 1 ({setting} {why}), got {value}")


def _by_noise_share(estimate: Estimate, batch: int, tolerance: float, test: str) -> Wanted:
    """The batch from which on S/B is at most tolerance^2 of G^2 + S/B; that share is the data efficiency."""
    share = data_efficiency(batch, supported_scale(estimate))
    aim = f"noise is {share:.3g} of |g|^2 at batch {batch}, {test} allows {tolerance * tolerance:.3g}"
    return _at_ratio(estimate, (1 / tolerance) * (1 / tolerance) - 1, aim)


def _at_ratio(estimate: Estimate, ratio: float, aim: str) -> Wanted:
    """The batch that is ``ratio`` noise scales."""
    return Wanted(
        batch=ratio * supported_scale(estimate),
        low=ratio * estimate.low,
        high=ratio * estimate.high,
        reason=f"{describe_scale(estimate)}: {aim} (data efficiency {1 / (1 + ratio):.2g}, uncalibrated),",
    )


def _speechless(loss: float) -> Wanted:
    """A wish for no batch at all."""
    return exactly(math.nan, f"training loss {loss:.4g} is not above 0 and finite")
