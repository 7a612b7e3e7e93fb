"""Did the loss regress when the batch changed? Pure functions over plain JSON state, for rolling a change back.

The training loss is summed in blocks, one for each decision. After a change the mean loss of the blocks since is
compared with the trend of the blocks before: the value of its least-squares line at the change, carried on where it
rises for certain and not where it falls, for a fall that slows down is no regression. The noise of a block comes from the
differences of successive blocks (von Neumann 1941), which a steady trend hardly touches, in units of one sample, so
that blocks of different batches go together. After enough blocks the change stands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from adabatch.noise import student_quantile

# Blocks that are remembered before a change and watched after it, and the fewest that a verdict needs of either.
BLOCKS, FEWEST = 16, 4
# One-sided; high, for it is looked at in every decision.
CONFIDENCE = 0.999
# Differences of successive blocks tell a variance as well as 2/3 as many independent values.
EFFICIENCY = 2 / 3
ROUNDING = 1e-9

# Samples, and loss summed over them.
Block = Sequence[float]
State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Regression:
    """A change after which the loss regressed.

    Attributes:
        previous: the batch before it.
        estimate: the noise estimate that was recorded with that batch.
        loss: mean training loss since.
        expected: what the trend before allows to expect.
        limit: above which the loss is significantly worse.
        samples: since the change.
    """

    previous: int
    estimate: Mapping[str, Any] | None
    loss: float
    expected: float
    limit: float
    samples: int

    def sentence(self, batch: int) -> str:
        """The reason for going back from ``batch``."""
        return (
            f"go back from {batch} to {self.previous}: the mean training loss of the {self.samples:,} samples since the "
            f"change is {self.loss:.5g}, above {self.limit:.5g}, up to where it may be by chance when {self.expected:.5g} "
            f"is expected"
        )


def init() -> State:
    """Nothing seen. ``previous`` is a batch while its change is watched; ``waits`` counts changes undone in a row."""
    return {
        "open": [0, 0.0], "before": [], "since": [], "previous": None, "estimate": None, "waits": 0, "hold_until": 0
    }  # fmt: skip


def update(state: State, loss: float, samples: int) -> State:
    """Take one window in; a loss that is no number counts for nothing."""
    if not math.isfinite(loss):
        return state
    count, total = state["open"]
    return {**state, "open": [count + samples, total + loss * samples]}


def close(state: State) -> State:
    """End the block; a change that was watched for ``BLOCKS`` blocks stands from then on."""
    if not state["open"][0]:
        return state
    watched = state["previous"] is not None
    name = "since" if watched else "before"
    state = {**state, "open": [0, 0.0], name: [*state[name], state["open"]][-BLOCKS:]}
    if watched and len(state["since"]) == BLOCKS:
        return {**state, "before": state["since"], "since": [], "previous": None, "estimate": None, "waits": 0}
    return state


def changed(state: State, previous: int, estimate: Mapping[str, Any] | None) -> State:
    """The batch was changed from ``previous``, which had been decided by ``estimate``; watch what comes of it."""
    before = [*state["before"], *state["since"]][-BLOCKS:]
    return {**state, "before": before, "since": [], "previous": previous, "estimate": estimate}


def undone(state: State, sample: int, dwell: int) -> State:
    """The change was rolled back at ``sample``: the next attempt waits twice as long as after the last one undone.

    Args:
        dwell: samples that the first such wait lasts.
    """
    waits = state["waits"] + 1
    hold_until = sample + dwell * 2 ** (waits - 1)
    # The blocks in between belong to a batch that is no longer there.
    return {**state, "since": [], "previous": None, "estimate": None, "waits": waits, "hold_until": hold_until}


def value(state: State) -> Regression | None:
    """The change that is watched, if the loss is above what the interval allows; otherwise ``None``."""
    before, since = state["before"], state["since"]
    if state["previous"] is None or min(len(before), len(since)) < FEWEST:
        return None
    squares = [*_differences(before), *_differences(since)]
    variance = math.fsum(squares) / len(squares)
    samples = sum(count for count, _ in since)
    loss = math.fsum(total for _, total in since) / samples
    quantile = student_quantile(CONFIDENCE, EFFICIENCY * len(squares))
    expected, share = _trend(before, samples / 2, quantile * math.sqrt(variance))
    # Rounding is no regression of a loss without noise.
    limit = expected + quantile * math.sqrt(variance * (share + 1 / samples)) + ROUNDING * abs(expected)
    if not loss > limit:
        return None
    return Regression(state["previous"], state["estimate"], loss, expected, limit, samples)


def _differences(blocks: Sequence[Block]) -> list[float]:
    """Squared differences of successive blocks' means, each an estimate of the variance of one sample."""
    return [
        (total / count - other_total / other) ** 2 / (1 / count + 1 / other)
        for (count, total), (other, other_total) in pairwise(blocks)
    ]


def _trend(blocks: Sequence[Block], ahead: float, certain: float) -> tuple[float, float]:
    """The line through ``blocks`` at their end, and its variance in that of one sample.

    It is taken ``ahead`` samples later where it rises by more than ``certain`` times what it does by chance when a
    sample's standard deviation is 1.
    """
    weight = math.fsum(count for count, _ in blocks)
    centres, end = [], 0.0
    for count, _ in blocks:
        centres.append(end + count / 2)
        end += count
    centre = math.fsum(count * at for (count, _), at in zip(blocks, centres)) / weight
    mean = math.fsum(total for _, total in blocks) / weight
    spread = math.fsum(count * (at - centre) ** 2 for (count, _), at in zip(blocks, centres))
    slope = math.fsum((total - mean * count) * (at - centre) for (count, total), at in zip(blocks, centres)) / spread
    distance = end - centre + (ahead if slope * math.sqrt(spread) > certain else 0)
    return mean + slope * distance, 1 / weight + distance**2 / spread
