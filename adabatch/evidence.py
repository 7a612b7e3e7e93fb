"""What a run has measured so far: the noise scale by every view, and what the guards see."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adabatch.alignment import Alignment, AlignmentEstimator
from adabatch.guards import GuardReport, Guards
from adabatch.noise import NORM_LAYERS, Estimate, Measurement, NoiseEstimator
from adabatch.plan import BatchPlan
from adabatch.slope import Slope, SlopeFit

State = dict[str, Any]
Estimator = NoiseEstimator | AlignmentEstimator


@dataclass(frozen=True, slots=True)
class Reading:
    """All that is known at one moment.

    Attributes:
        estimate: the noise scale that decisions go by; ``None`` as long as there is none that can be decided by.
        views: the noise scale by other lengths of the gradient, and by alignments, for the record.
        guards: what the guards see; ``None`` before anything was measured.
        slope: how the whole model's noise scale follows from the normalisation layers'; ``None`` where they are not
            measured.
    """

    estimate: Estimate | None = None
    views: Mapping[str, Estimate] = field(default_factory=dict)
    guards: GuardReport | None = None
    slope: SlopeFit | None = None


class Evidence:
    """Takes measured windows in: pure ``init``, ``update`` and ``value`` over a state of plain JSON data.

    Args:
        estimators: one for each view, of lengths or of alignments; decisions go by the first. When that is the
            normalisation layers', they go by what the slope makes of it, and there is no estimate while the slope is
            unknown.

    Raises:
        ValueError: when two estimators have the same view.
    """

    def __init__(self, estimators: Sequence[Estimator]) -> None:
        names = [estimator.geometry for estimator in estimators]
        if len(set(names)) < len(names):
            raise ValueError(f"every view of the noise scale needs a name of its own, got {', '.join(names)}")
        self.estimators = tuple(estimators)
        self.guards = Guards()
        self.slope = Slope() if NORM_LAYERS in names else None

    @property
    def aligned(self) -> bool:
        """Whether alignments are asked for."""
        return any(isinstance(estimator, AlignmentEstimator) for estimator in self.estimators)

    @property
    def decides_by_alignment(self) -> bool:
        """Whether decisions go by them."""
        return isinstance(self.estimators[0], AlignmentEstimator)

    def init(self) -> State:
        """The state before anything was measured."""
        views = {estimator.geometry: estimator.init() for estimator in self.estimators}
        slope = self.slope.init() if self.slope else None
        return {"views": views, "guards": self.guards.init(), "slope": slope, "lr_multiplier": 1.0}

    def restored(self, saved: Mapping[str, Any] | None) -> State:
        """A saved state under these estimators: views that are new begin afresh, and those that are gone are dropped."""
        state = self.init()
        if saved:
            views = {name: saved["views"].get(name, fresh) for name, fresh in state["views"].items()}
            slope = saved["slope"] or state["slope"] if self.slope else None
            state = {**saved, "views": views, "slope": slope}
        return state

    def update(self, state: State, measurement: Measurement, plan: BatchPlan) -> State:
        """The state after the window of ``plan``; the guards look back over the memory of the first view."""
        views = dict(state["views"])
        for estimator in self.estimators:
            name = estimator.geometry
            views[name] = _updated(estimator, views[name], measurement, plan.last_sample)
        memory = self.estimators[0].memory(views[self.estimators[0].geometry])
        slope = state["slope"]
        if self.slope is not None and measurement.examples is not None:
            slope = self.slope.update(slope, measurement.examples, measurement)
        return {
            "views": views,
            "guards": self.guards.update(state["guards"], measurement, memory),
            "slope": slope,
            "lr_multiplier": plan.schedule * plan.scales.lr,
        }

    def value(self, state: State) -> Reading:
        """What is known now."""
        found = {estimator.geometry: estimator.value(state["views"][estimator.geometry]) for estimator in self.estimators}
        sound = {name: estimate for name, estimate in found.items() if estimate and _is_sound(estimate)}
        slope = self.slope.value(state["slope"]) if self.slope else None
        first = self.estimators[0].geometry
        estimate = sound.pop(first, None)
        if estimate is not None and first == NORM_LAYERS:
            sound[first] = estimate
            estimate = slope.whole(estimate) if slope else None
        return Reading(
            estimate=estimate,
            views=sound,
            guards=self.guards.value(
                state["guards"],
                scale=estimate.scale if estimate and estimate.resolved else None,
                lr_multiplier=state["lr_multiplier"],
            ),
            slope=slope,
        )


def _updated(estimator: Estimator, state: State, measurement: Measurement, last_sample: int) -> State:
    if isinstance(estimator, NoiseEstimator):
        return estimator.update(state, measurement.seen_in(estimator.geometry), last_sample)
    nothing = Alignment(measurement.samples)
    return estimator.update(state, measurement.alignments.get(estimator.geometry, nothing), last_sample)


def _is_sound(estimate: Estimate) -> bool:
    """Whether its numbers can be compared and recorded: squares that overflow leave some that cannot."""
    bounded = math.isfinite(estimate.scale) and math.isfinite(estimate.high)
    numbers = all(map(math.isfinite, (estimate.signal, estimate.noise, estimate.low)))
    ordered = 0 <= estimate.low <= estimate.high and estimate.scale >= 0
    return numbers and ordered and (bounded if estimate.resolved else math.isinf(estimate.high))
