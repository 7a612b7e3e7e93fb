"""What the memory spans when not every step is measured, and when the batch follows the estimate."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable

import pytest
from test_noise import feed, stream, window

from adabatch.noise import Estimate, Measurement, NoiseEstimator

BATCH = 64


def feed_every(
    estimator: NoiseEstimator, windows: Iterable[Measurement], every: int, start: int = 0, state: dict | None = None
) -> dict:
    """The state after windows of which each is the last of ``every`` steps, the run having come from ``start``."""
    state, end = state or estimator.init(), start
    for measurement in windows:
        end += every * measurement.samples
        state = estimator.update(state, measurement, end)
    return state


def read(estimator: NoiseEstimator, windows: Iterable[Measurement], every: int) -> Estimate:
    estimate = estimator.value(feed_every(estimator, windows, every))
    assert estimate is not None
    return estimate


class TestStepsNotMeasured:
    @pytest.mark.parametrize("ratio", [1.0, 30.0])
    def test_they_change_what_is_looked_back_over_and_nothing_else(self, ratio):
        windows = list(stream(3, 400, ratio))
        plain, rare = (read(NoiseEstimator(), windows, every) for every in (1, 10))
        for name in ("signal", "noise", "scale", "low", "high", "samples", "steps"):
            assert getattr(rare, name) == getattr(plain, name)
        assert plain.span == plain.samples == plain.steps * BATCH
        assert (rare.span, rare.memory) == (10 * plain.span, 10 * plain.memory)

    def test_windows_without_a_position_come_one_after_another(self):
        windows = list(stream(4, 100))
        assert feed(NoiseEstimator(), windows) == feed_every(NoiseEstimator(), windows, 1)

    def test_the_first_window_stands_for_itself_alone(self):
        estimator = NoiseEstimator()
        first = estimator.update(estimator.init(), window(1.0, 64.0), 1_000_000)
        assert estimator.value(first).span == BATCH
        assert estimator.value(estimator.update(first, window(1.0, 64.0), 1_000_640)).span == BATCH + 640

    def test_windows_that_could_not_be_measured_are_training_all_the_same(self):
        estimator, lost = NoiseEstimator(), Measurement(BATCH, 0, 0.0, 0.0, 0.0, float(BATCH), 0.0, finite=False)
        state = estimator.update(estimator.init(), window(1.0, 64.0), BATCH)
        assert estimator.update(state, lost, 2 * BATCH) is state
        estimate = estimator.value(estimator.update(state, window(1.0, 64.0), 3 * BATCH))
        assert (estimate.samples, estimate.steps, estimate.span) == (2 * BATCH, 2, 3 * BATCH)

    def test_a_position_that_falls_back_counts_the_window_itself(self):
        estimator = NoiseEstimator()
        state = estimator.update(estimator.init(), window(1.0, 64.0), 6400)
        assert estimator.value(estimator.update(state, window(1.0, 64.0), 640)).span == 2 * BATCH

    @pytest.mark.parametrize("every", [1, 10])
    def test_the_cap_is_a_share_of_the_training(self, every):
        horizon = BATCH * 10_000
        windows = stream(5, 10_000 // every, ratio=200)
        estimate = read(NoiseEstimator(horizon=horizon), windows, every)
        assert 0.8 * 0.05 * horizon <= estimate.span <= 0.05 * horizon
        assert estimate.samples == pytest.approx(estimate.span / every)
        assert estimate.memory == pytest.approx(0.05 * horizon, rel=0.01)

    def test_sixteen_measured_windows_win_against_the_cap(self):
        estimate = read(NoiseEstimator(horizon=BATCH * 1000), stream(5, 100, ratio=0.1), 10)
        assert (estimate.steps, estimate.samples, estimate.span) == (16, 16 * BATCH, 160 * BATCH)
        assert estimate.memory == 160 * BATCH, "a change of the batch waits until none of its windows is older"

    def test_the_first_half_of_the_training_is_left_out(self):
        estimate = read(NoiseEstimator(), stream(6, 200, ratio=300), 10)
        assert 0.8 * 1000 * BATCH <= estimate.span <= 1000 * BATCH

    def test_the_memory_goes_on_when_the_steps_in_between_change(self):
        estimator = NoiseEstimator()
        windows = list(stream(7, 1400, ratio=20))
        often = feed_every(estimator, windows[:1000], 1)
        rare = feed_every(estimator, windows[1000:], 10, start=1000 * BATCH, state=often)
        plain = estimator.value(feed(estimator, windows))
        estimate = estimator.value(rare)
        assert (estimate.signal, estimate.steps) == (plain.signal, plain.steps)
        assert estimate.span == 10 * plain.span

    def test_json_state_continues_bit_identically(self):
        estimator, end = NoiseEstimator(horizon=400_000), 0
        straight = stopped = estimator.init()
        for i, measurement in enumerate(stream(7, 300, ratio=10)):
            end += BATCH * (1 + i % 7)
            straight = estimator.update(straight, measurement, end)
            stopped = json.loads(json.dumps(estimator.update(stopped, measurement, end)))
            assert stopped == straight

    def test_older_ledgers_have_no_span(self):
        values = read(NoiseEstimator(), stream(1, 20), 1).to_dict()
        del values["span"]
        assert Estimate.from_dict(values).span == 0


class TestBatchThatFollows:
    def follow(self, seed: int, ratio: float, steps: int) -> tuple[float, float]:
        """The averaged G^2, and the mean of the last 16 windows', where B = estimate / ratio every 16 steps."""
        rng, estimator, batch, read_off = random.Random(seed), NoiseEstimator(), BATCH, []
        state, dimension, groups = estimator.init(), 300, 4
        for step in range(1, steps + 1):
            share = ratio * BATCH / batch
            error = math.sqrt(4 * share / dimension + 2 * share**2 / dimension * groups / (groups - 1))
            read_off.append(rng.gauss(1.0, error))
            sample_noise = ratio * BATCH * rng.gauss(1.0, math.sqrt(2 / dimension / (groups - 1)))
            state = estimator.update(state, window(read_off[-1], sample_noise, batch))
            if step % 16 == 0:
                estimate = estimator.value(state)
                wanted = estimate.scale / ratio if estimate.resolved else max(estimate.low / ratio, batch)
                batch = max(4, 4 * round(min(max(wanted, batch / 2), 2 * batch) / 4))
        return estimator.value(state).signal, sum(read_off[-16:]) / 16

    def test_the_average_is_not_drawn_by_its_own_errors(self):
        # The plain mean of a fixed number of windows has no bias whatever the batches: no window's error is known when
        # its batch is chosen. Weights by samples, over a memory in samples, differ by 0.03 here.
        pairs = [self.follow(seed, 10.0, 96) for seed in range(700)]
        differences = [averaged - plain for averaged, plain in pairs]
        mean = sum(differences) / len(pairs)
        error = math.sqrt(sum((x - mean) ** 2 for x in differences)) / len(pairs)
        assert error < 0.004
        assert abs(mean) < 0.012

    def test_windows_of_a_batch_that_wavers_weigh_the_same(self):
        rng = random.Random(3)
        windows = [window(rng.gauss(1, 0.1), 640.0, rng.randrange(48, 96)) for _ in range(16)]
        estimate = NoiseEstimator().value(feed(NoiseEstimator(), windows))
        assert estimate.signal == pytest.approx(sum(m.signal for m in windows) / 16)
        assert estimate.samples == sum(m.samples for m in windows)

    def test_the_memory_holds_as_many_windows_of_a_batch_that_wavers(self):
        def steps(batches: list[int]) -> int:
            parts = [window_of(seed, b) for seed, b in enumerate(batches)]
            return NoiseEstimator().value(feed(NoiseEstimator(), parts)).steps

        def window_of(seed: int, batch: int) -> Measurement:
            return next(iter(stream(seed, 1, 20 * BATCH / batch, batch)))

        assert steps([64] * 400) == steps([64] * 300 + [40] * 50 + [100] * 50)
