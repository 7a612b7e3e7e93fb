"""Guards: signs that a noise scale reads the training's temperature rather than its progress. They only report.

At a constant learning rate and batch, gradients end up bouncing around a valley whose walls they no longer descend.
Then |G|^2 is set by the learning rate, and the noise scale is a thermometer of it (arXiv 1812.06162, appendix C): it
rises when the rate falls, and a plateau of it says nothing about the useful batch. What tells the two apart:

- drift: does the gradient still point where the gradients of the last steps pointed? The product of the mean gradient
  with the optimizer's momentum, over G^2: 1 while both show the same signal, 0 or less while training oscillates.
- clip rate: the share of windows that were clipped. Clipped often, the optimizer is another one than was measured.
- the noise scale normalised by the learning rate in force: what it would read if it only followed the temperature.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from adabatch.noise import Measurement, student_quantile

# A drift whose interval lies below this is no drift.
LEAST_DRIFT = 0.2
# A share of clipped windows above this is too much.
MOST_CLIPPED = 0.2
# Blocks that the windows are summed into, and the fewest of them that make an interval.
BLOCKS, FEWEST_BLOCKS = 16, 4

# Sums over the windows of a block: samples, windows that could be clipped, those that were; and of those whose drift was
# measured, their number, samples x product with the momentum, samples x G^2.
SAMPLES, CLIPPABLE, CLIPPED, SEEN, PRODUCT, SIGNAL = range(6)

State = list[list[float]]


@dataclass(frozen=True, slots=True)
class GuardReport:
    """What the guards see.

    Attributes:
        drift: product of mean gradient and momentum over G^2; ``None`` while it is unknown.
        drift_low, drift_high: its 95 % interval; ``None`` without one.
        clip_rate: share of windows whose gradient was clipped; ``None`` where nothing clips.
        lr_scale: noise scale x learning rate in force / configured learning rate, in samples; ``None`` when unresolved.
        thermometric: why the noise scale is a thermometer; ``None`` when nothing says so.
    """

    drift: float | None
    drift_low: float | None
    drift_high: float | None
    clip_rate: float | None
    lr_scale: float | None
    thermometric: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


class Guards:
    """Running sums for the guards over the estimate's memory: pure ``init``, ``update`` and ``value``."""

    def init(self) -> State:
        """The state before anything was measured."""
        return []

    def update(self, state: State, measurement: Measurement, memory: float) -> State:
        """The state after one more window; about ``memory`` samples are looked back over."""
        if not measurement.finite:
            return state
        row = _row(measurement)
        if state and state[-1][SAMPLES] < memory / BLOCKS:
            blocks = [*state[:-1], [a + b for a, b in zip(state[-1], row)]]
        else:
            blocks = [*state, row]
        total = sum(block[SAMPLES] for block in blocks)
        while len(blocks) > 1 and total - blocks[0][SAMPLES] >= memory:
            total -= blocks[0][SAMPLES]
            blocks = blocks[1:]
        return blocks

    def value(self, state: State, *, scale: float | None, lr_multiplier: float) -> GuardReport | None:
        """What the guards see, or ``None`` before anything was measured.

        Args:
            scale: the noise scale where it is resolved, in samples.
            lr_multiplier: the learning rate in force over the configured one.
        """
        if not state:
            return None
        drift, low, high = _drift([block for block in state if block[SEEN] > 0])
        clippable = sum(block[CLIPPABLE] for block in state)
        clip_rate = sum(block[CLIPPED] for block in state) / clippable if clippable else None
        return GuardReport(
            drift=drift,
            drift_low=low,
            drift_high=high,
            clip_rate=clip_rate,
            lr_scale=None if scale is None else scale * lr_multiplier,
            thermometric=_reason(drift, high, clip_rate),
        )


def _row(measurement: Measurement) -> list[float]:
    samples = measurement.samples
    row = [samples, float(measurement.clipped is not None), float(measurement.clipped or False), 0, 0.0, 0.0]
    if measurement.drift is not None and measurement.measurable:
        row[SEEN:] = [1, samples * measurement.drift, samples * measurement.signal]
    return row


def _drift(blocks: State) -> tuple[float | None, float | None, float | None]:
    """Ratio of the summed products to the summed G^2, and its interval from the spread of blocks around that ratio."""
    signal = math.fsum(block[SIGNAL] for block in blocks)
    if not signal > 0:
        return None, None, None
    ratio = math.fsum(block[PRODUCT] for block in blocks) / signal
    if len(blocks) < FEWEST_BLOCKS:
        return ratio, None, None
    residuals = math.fsum((block[PRODUCT] - ratio * block[SIGNAL]) ** 2 for block in blocks)
    freedom = len(blocks) - 1
    error = math.sqrt(residuals * len(blocks) / freedom) / signal
    width = student_quantile(0.975, freedom) * error
    return ratio, ratio - width, ratio + width


def _reason(drift: float | None, high: float | None, clip_rate: float | None) -> str | None:
    if drift is not None and high is not None and high < LEAST_DRIFT:
        return f"gradients no longer drift along the momentum: {drift:.2g}, at most {high:.2g}, of G^2"
    if clip_rate is not None and clip_rate > MOST_CLIPPED:
        return f"{clip_rate:.0%} of the windows were clipped"
    return None
