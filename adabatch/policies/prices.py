"""The batch that is fastest where a step has a price of its own: B = sqrt(price x B_crit).

Progress per second, (1 + price/B)(1 + B/B_crit) at its smallest (arXiv 1812.06162, appendix D; the closed form of the
goodput of arXiv 2008.12260). A noise scale or a price that is wrong by a factor of 2 costs 3 % of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from adabatch.policies.protocol import Facts, Price, State, Stateless, Wanted, describe_scale, exactly, supported_scale


@dataclass(frozen=True, slots=True)
class WallClock(Stateless):
    """For fixed hardware: the price of a step is what its fixed cost is worth in samples, measured in the run.

    Args:
        calibration: critical batch over measured noise scale.

    Raises:
        ValueError: for a calibration not above 0.
    """

    calibration: float = 1.0
    name: ClassVar[str] = "wall_clock"
    closed_loop: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"noise", "price"})

    def __post_init__(self) -> None:
        _require_calibration(self.calibration)

    def value(self, state: State, facts: Facts) -> Wanted | None:
        price = facts.price
        if price is None or facts.estimate is None:
            return None
        # "0 or more" says nothing; without the interval gate, it would pass for a step that is free.
        if not (price.resolved or price.low > 0):
            if facts.telling_batch is not None:
                return exactly(
                    facts.telling_batch,
                    f"price not resolved: steps of {facts.batch} do not tell what is paid once per step, and those of "
                    f"{facts.telling_batch} will",
                )
            return exactly(math.nan, "price not resolved: the steps so far do not tell what is paid once per step")
        return _fastest(facts, price, self.calibration)


@dataclass(frozen=True, slots=True)
class StepPrice(Stateless):
    """For hardware that grows with the batch: the user says what a step is worth in samples.

    Args:
        price: samples that one step less may cost.
        calibration: critical batch over measured noise scale.

    Raises:
        ValueError: for a price or a calibration not above 0.
    """

    price: float
    calibration: float = 1.0
    name: ClassVar[str] = "step_price"
    closed_loop: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"noise"})

    def __post_init__(self) -> None:
        _require_calibration(self.calibration)
        if not 0 < self.price < math.inf:
            raise ValueError(f"policy.price is the samples that a step is worth, above 0, got {self.price}")

    def value(self, state: State, facts: Facts) -> Wanted | None:
        return _fastest(facts, Price(self.price, self.price, self.price), self.calibration)


def _require_calibration(calibration: float) -> None:
    if not 0 < calibration < math.inf:
        raise ValueError(f"policy.calibration must be above 0, got {calibration}")


def _fastest(facts: Facts, price: Price, calibration: float) -> Wanted | None:
    estimate = facts.estimate
    if estimate is None:
        return None
    uncalibrated = " (uncalibrated)" if calibration == 1 else ""
    return Wanted(
        batch=math.sqrt(_supported(price) * calibration * supported_scale(estimate)),
        low=math.sqrt(price.low * calibration * estimate.low),
        high=_root(price.high, calibration * estimate.high),
        reason=f"{describe_scale(estimate)}{uncalibrated}, a step costs as much as {_describe(price)}",
    )


def _root(price: float, critical: float) -> float:
    """The root of the product; 0 and inf together say nothing, and so bound nothing."""
    return math.inf if math.isinf(price) or math.isinf(critical) else math.sqrt(price * critical)


def _supported(price: Price) -> float:
    return price.value if price.resolved else price.low


def _describe(price: Price) -> str:
    if price.low == price.high:
        return f"{price.value:,.3g} samples"
    if price.resolved:
        return f"{price.value:,.3g} samples [{price.low:,.3g}, {price.high:,.3g}]"
    return f"{price.low:,.3g} samples or more (not resolved)"
