"""The batch that delivers a target data efficiency, at every step or over the whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from adabatch.plan import data_efficiency
from adabatch.policies import forecast
from adabatch.policies.protocol import Facts, State, Wanted, describe_scale, supported_scale

ALLOCATIONS = ("proportional", "sqrt")
# Moments at which the rest of a run is looked at; more change the batch by less than a percent.
_MOMENTS = 64
# In the last share of the run its division stays as it is: to settle the account within a few windows would be a leap.
_SETTLED_REST = 0.02


@dataclass(frozen=True, slots=True)
class TargetEfficiency:
    """Follow the critical batch so that the run's data efficiency is ``target``.

    B_crit = calibration x noise scale. The efficiency already delivered (sample-weighted) is kept account of against
    the target in force at the time, and the lag that damping causes is paid back.

    - ``proportional`` holds the efficiency at every step, B = B_crit (1/e - 1): the one asked for now settles the
      account over as many samples again, the batch staying within ``repay`` times the undisturbed one.
    - ``sqrt`` settles it by the end of the run, with B ~ sqrt(B_crit), which takes the fewest steps
      (arXiv 1812.06162, appendix D). It spends more early, when the noise scale is small against what it will be, so it
      needs a forecast: the noise scale's growth so far, or the curve of an earlier run. A forecast that was wrong is
      made good by later decisions.

    Args:
        target: data efficiency in (0, 1); 0.5 is the critical batch itself.
        calibration: critical batch over measured noise scale.
        repay: the largest factor by which a debt may raise (``proportional`` only) or lower the batch.
        allocation: ``proportional`` or ``sqrt``.
        cap: the largest batch over the critical one, for ``sqrt``.
        horizon: samples of the whole run, for ``sqrt``.
        curve: the noise scale of an earlier run against its efficient samples, to forecast by.

    Raises:
        ValueError: for a target outside (0, 1), a calibration not above 0, a repay factor below 1, an unknown
            allocation, a ``sqrt`` without a horizon, or a cap that the target cannot be reached under.
    """

    target: float = 0.5
    calibration: float = 1.0
    repay: float = 2.0
    allocation: str = "proportional"
    cap: float = 2.0
    horizon: int | None = None
    curve: forecast.Curve | None = None
    name: ClassVar[str] = "target_efficiency"
    closed_loop: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"noise"})
    batches: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ValueError(f"policy.target_efficiency must lie strictly between 0 and 1, got {self.target}")
        if not self.calibration > 0 or not self.repay >= 1:
            raise ValueError(
                f"policy.calibration must be above 0 and policy.repay at least 1, "
                f"got {self.calibration} and {self.repay}"
            )
        if self.allocation not in ALLOCATIONS:
            raise ValueError(f"policy.allocation must be one of {', '.join(ALLOCATIONS)}, got {self.allocation!r}")
        if self.allocation == "sqrt":
            self._require_sqrt()

    def _require_sqrt(self) -> None:
        if self.horizon is None:
            raise ValueError(
                "policy.allocation=sqrt divides the samples of the whole run, and their number is not known: "
                "set stop.samples, or use policy.allocation=proportional"
            )
        if not self.cap >= self._undisturbed:
            raise ValueError(
                f"policy.cap={self.cap:g} keeps the batch below the {self._undisturbed:g} critical batches that "
                f"policy.target_efficiency={self.target:g} needs on average; raise the cap to {2 * self._undisturbed:g}"
            )

    @property
    def _undisturbed(self) -> float:
        """Batch over critical batch at the target efficiency."""
        return 1 / self.target - 1

    def init(self) -> State:
        rest = {"from": 0, "surplus": 0.0, "efficient": 0.0}
        return {"samples": 0, "surplus": 0.0, "efficient": 0.0, "history": [], "rest": rest}

    def update(self, state: State, facts: Facts, samples: int) -> State:
        """Account for ``samples`` consumed at the present batch, at the efficiency that the estimate supports."""
        if facts.estimate is None:
            return state
        efficiency = data_efficiency(facts.batch, self.calibration * supported_scale(facts.estimate))
        surplus = state["surplus"] + (efficiency - self.target) * samples
        efficient = state["efficient"] + efficiency * samples
        consumed, rest = facts.progress.samples, state["rest"]
        if self.horizon is None or consumed <= (1 - _SETTLED_REST) * self.horizon:
            rest = {"from": consumed, "surplus": surplus, "efficient": efficient}
        return {
            "samples": state["samples"] + samples,
            "surplus": surplus,
            "efficient": efficient,
            "history": forecast.remember(state["history"], efficient, facts.estimate),
            "rest": rest,
        }

    def value(self, state: State, facts: Facts) -> Wanted | None:
        estimate = facts.estimate
        if estimate is None:
            return None
        plan, note = (self._by_root(state) if self.allocation == "sqrt" else (self._by_share(state), ""))
        # A lower bound supports no batch beyond the undisturbed one.
        most = math.inf if estimate.resolved else self._undisturbed
        ratio = min(max(plan, self._undisturbed / self.repay), most) * self.calibration
        uncalibrated = " (uncalibrated)" if self.calibration == 1 else ""
        return Wanted(
            batch=ratio * supported_scale(estimate),
            low=ratio * estimate.low,
            high=ratio * estimate.high,
            reason=f"{describe_scale(estimate)} at target efficiency {self.target:g}{uncalibrated}{note}",
        )

    def _by_share(self, state: State) -> float:
        """Wanted batch over critical batch, with the account taken in."""
        most = self._undisturbed * self.repay
        asked = self.target - (state["surplus"] / state["samples"] if state["samples"] else 0.0)
        return min(1 / asked - 1, most) if asked > 0 else most

    def _by_root(self, state: State) -> tuple[float, str]:
        """Wanted batch over critical batch when the rest of the run is divided by the square root."""
        assert self.horizon is not None
        rest = state["rest"]
        samples = max(self.horizon - rest["from"], 0)
        clock = self.target * samples - rest["surplus"]
        growth = self.curve or forecast.growth(state["history"])
        now = rest["efficient"]
        moments = (now + clock * (index + 0.5) / _MOMENTS for index in range(_MOMENTS))
        factors = [growth.factor(now, moment) for moment in moments] if clock > 0 else []
        ratio = forecast.square_root_ratio(factors, clock, samples, self.cap)
        return ratio, f", square-root allocation, {growth.describe()}"
