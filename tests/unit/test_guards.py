"""Guards: drift, clip rate and the normalised scale, against streams whose truth is known."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from simulated_run import gaussian_window

from adabatch.guards import BLOCKS, Guards
from adabatch.noise import Measurement


def window(step: int, drift: float | None, clipped: bool | None = None, batch: int = 32) -> Measurement:
    return replace(gaussian_window(batch, 50.0, step), drift=drift, clipped=clipped)


def fed(windows: list[Measurement], memory: float = 32 * 200) -> list[list[float]]:
    guards = Guards()
    state = guards.init()
    for measurement in windows:
        state = guards.update(json.loads(json.dumps(state)), measurement, memory)
    return state


def report(state, scale=100.0, lr_multiplier=1.0):
    return Guards().value(state, scale=scale, lr_multiplier=lr_multiplier)


@pytest.mark.parametrize("truth", [1.0, 0.5, 0.0, -0.3])
def test_the_drift_is_the_persistent_share_of_the_signal(truth: float) -> None:
    """|G|^2 is 1, so the mean product is the ratio; the intervals of 100 streams hold it 95 times or about."""
    covered = 0
    for stream in range(100):
        draws = random.Random(stream)
        windows = [
            replace(gaussian_window(32, 50.0, (stream, step)), drift=draws.gauss(truth, 1.0)) for step in range(200)
        ]
        found = report(fed(windows))
        covered += found.drift_low < truth < found.drift_high
    assert 88 <= covered <= 100
    assert found.drift == pytest.approx(truth, abs=0.35)
    assert (found.thermometric is None) == (found.drift_high >= 0.2)


def test_no_drift_makes_a_thermometer_with_its_reason() -> None:
    found = report(fed([window(step, 0.02 * (-1) ** step) for step in range(100)]))
    assert "no longer drift along the momentum" in found.thermometric
    assert report(fed([window(step, 1.0) for step in range(100)])).thermometric is None


def test_too_few_windows_say_nothing() -> None:
    assert report([]) is None
    few = report(fed([window(0, 0.0)]))
    assert few.drift_low is None and few.thermometric is None
    unknown = report(fed([window(step, None) for step in range(50)]))
    assert unknown.drift is None and unknown.clip_rate is None and unknown.thermometric is None


def test_the_clip_rate_counts_windows_that_could_be_clipped() -> None:
    windows = [window(step, None, clipped=step % 4 == 0) for step in range(40)]
    found = report(fed(windows, memory=1e9))
    assert found.clip_rate == 0.25
    assert found.thermometric == "25% of the windows were clipped"
    assert report(fed([window(step, None, clipped=step == 0) for step in range(40)], memory=1e9)).thermometric is None


def test_the_scale_is_normalised_by_the_rate_in_force() -> None:
    state = fed([window(0, None)])
    assert report(state, scale=400.0, lr_multiplier=0.1).lr_scale == pytest.approx(40.0)
    assert report(state, scale=None).lr_scale is None


def test_the_memory_bounds_what_is_looked_back_over() -> None:
    state = fed([window(step, 0.0, clipped=step < 500) for step in range(600)], memory=32 * 80)
    assert len(state) <= BLOCKS + 1
    assert 32 * 80 <= sum(block[0] for block in state) <= 32 * 80 * (1 + 2 / BLOCKS)
    assert report(state).clip_rate == 0.0


def test_skipped_windows_do_not_count() -> None:
    state = fed([window(0, 1.0)])
    assert Guards().update(state, replace(window(1, 1.0), finite=False), 100.0) is state
