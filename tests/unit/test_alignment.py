"""The scale from alignments: its definition, the fit, the interval, and what it must never claim."""

from __future__ import annotations

import json
import math
import random

import pytest

from adabatch.alignment import Alignment, AlignmentEstimator, Reading, fixed_rate_efficiency
from adabatch.alignment.curves import SHAPES
from adabatch.noise import Estimate
from adabatch.plan import data_efficiency

SETS = (4, 8, 16, 32, 48)


def hyperbola(m, scale, largest=1.0):
    return largest / math.sqrt(1 + scale / m)


def window(curve, sets=SETS, samples=64, own=0.0):
    """A window whose alignments are exactly those of ``curve``."""
    return Alignment(samples, tuple(Reading(m, curve(m), own, 1) for m in sets))


def stream(seed, steps, scale, error=0.1, own_error=0.1, sets=SETS, samples=64, largest=1.0):
    """Windows with errors that all sizes of sets share, in proportion to sqrt(m), and some of their own."""
    rng = random.Random(seed)
    steepness = largest / math.sqrt(scale)
    for _ in range(steps):
        common = rng.gauss(0, error)
        curve = {
            m: hyperbola(m, scale, largest) + steepness * math.sqrt(m) * (common + rng.gauss(0, own_error))
            for m in sets
        }
        yield window(curve.__getitem__, sets, samples)


def feed(estimator, windows, state=None):
    state = estimator.init() if state is None else state
    for one in windows:
        state = estimator.update(state, one)
    return state


def estimate(windows, **settings) -> Estimate:
    estimator = AlignmentEstimator(**settings)
    return estimator.value(feed(estimator, windows))


class TestTheCurve:
    @pytest.mark.parametrize("m", [0.1, 1.0, 7.0, 300.0])
    @pytest.mark.parametrize("variance", [0.02, 0.5])
    def test_gaussian_ratios_of_signal_to_noise_make_it_for_the_sign(self, m, variance):
        """sum G erf(G sqrt(m/2) / sigma) integrated over G ~ N(0, variance sigma^2), by the midpoint rule."""
        deviation, points = math.sqrt(variance), 4000
        steps = [deviation * 16 * ((i + 0.5) / points - 0.5) for i in range(points)]
        density = [math.exp(-0.5 * x * x / variance) for x in steps]
        exact = sum(p * x * math.erf(x * math.sqrt(m / 2)) for p, x in zip(density, steps)) / sum(density)
        largest = deviation * math.sqrt(2 / math.pi)
        assert exact == pytest.approx(hyperbola(m, 1 / variance, largest), rel=1e-5)

    @pytest.mark.parametrize("batch", [0.1, 5.0, 64.0, 900.0])
    def test_efficiency_at_the_best_rate_is_the_house_s(self, batch):
        """Progress per sample at the best rate, a(m)^2/m, over that of a tiny batch."""
        tiny = 1e-9
        progress = [hyperbola(m, 64.0) ** 2 / m for m in (batch, tiny)]
        assert progress[0] / progress[1] == pytest.approx(data_efficiency(batch, 64.0), rel=1e-9)
        assert data_efficiency(64.0, 64.0) == 0.5

    def test_efficiency_at_a_fixed_rate(self):
        for batch in (1.0, 10.0, 1000.0):
            expected = (hyperbola(batch, 50.0) / batch) / (hyperbola(2.0, 50.0) / 2.0)
            assert fixed_rate_efficiency(batch, 2.0, 50.0) == pytest.approx(expected, rel=1e-12)
        assert fixed_rate_efficiency(4.0, 1.0, 1e9) == pytest.approx(0.5, rel=1e-6)


class TestTheFit:
    @pytest.mark.parametrize("scale", [0.5, 30.0, 64.0, 640.0])
    def test_a_curve_without_noise_is_found_again(self, scale):
        found = estimate([window(lambda m: hyperbola(m, scale, 3.0))] * 40)
        assert found.scale == pytest.approx(scale, rel=1e-4)
        assert found.low <= scale / 1.09
        assert found.high >= scale * 1.09
        assert found.noise / found.signal == pytest.approx(found.scale, rel=1e-9)
        assert found.signal == pytest.approx(9.0 / scale**2, rel=1e-3)

    @pytest.mark.parametrize("factor", [1e-30, 1e30])
    def test_units_do_not_matter(self, factor):
        plain = estimate(stream(1, 64, 100.0))
        scaled = estimate(stream(1, 64, 100.0, largest=factor))
        for name in ("scale", "low", "high"):
            assert getattr(scaled, name) == pytest.approx(getattr(plain, name), rel=1e-6)

    def test_alignments_that_fade_as_training_goes_on_do_not_bend_the_curve(self):
        """All a(m) of a window shrink together, and later windows have larger batches: nothing is read off that."""
        rng = random.Random(3)
        windows = []
        for step in range(200):
            largest = math.exp(-step / 60 + rng.gauss(0, 0.1))
            doubled = 1 if step < 150 else 2
            sets = [m * doubled for m in SETS] if step % 2 else [*SETS, 96][:: 1 if doubled == 2 else -1]
            windows.append(window(lambda m, a=largest: hyperbola(m, 80.0, a), sorted(sets), 64 * doubled))
        assert estimate(windows).scale == pytest.approx(80.0, rel=1e-3)

    def test_noise_is_averaged_out(self):
        found = [estimate(stream(seed, 2000, 64.0)) for seed in range(5)]
        assert all(one.resolved for one in found)
        assert sum(one.scale for one in found) / 5 == pytest.approx(64.0, rel=0.1)

    def test_the_averaged_curve_and_its_errors(self):
        estimator = AlignmentEstimator()
        state = feed(estimator, stream(5, 4096, 64.0))
        points = estimator.curve(state)
        assert [point.samples for point in points] == pytest.approx(SETS)
        steps = estimator.value(state).steps
        for point in points:
            assert point.error == pytest.approx(math.sqrt(0.02 * point.samples / 64.0 / steps), rel=0.4)
            assert abs(point.alignment - hyperbola(point.samples, 64.0)) < 4 * point.error
            assert point.pairs == steps
        assert estimator.curve(estimator.init()) == []

    def test_sampling_without_replacement_is_made_up_for(self):
        """In a data set of D samples the rest's mean is (D G - m g) / (D - m) on average, given the set's mean g."""
        size, own = 200, 5.0

        def seen(m):
            return (size * hyperbola(m, 60.0) - m * own) / (size - m)

        assert estimate([window(seen, own=own)] * 40, dataset_size=size).scale == pytest.approx(60.0, rel=1e-3)
        assert abs(estimate([window(seen, own=own)] * 40).scale / 60.0 - 1.0) > 0.2


class TestTheInterval:
    def test_it_covers_and_bounds(self):
        """At true/B = 1 nearly all runs are resolved, at 100 nearly none; the lower bound holds and is no empty one."""
        for scale, resolved in ((64.0, True), (6400.0, False)):
            found = [estimate(stream(seed, 400, scale, own_error=0.05)) for seed in range(60)]
            assert sum(one.low <= scale <= one.high for one in found) >= 57
            assert sum(one.low > 0.0 for one in found) >= 57
            assert sum(one.resolved == resolved for one in found) >= 50
            assert all((one.high < math.inf) == one.resolved for one in found)

    @pytest.mark.parametrize("shape", [0.6, 0.81, 1.8])
    def test_it_holds_for_curves_that_bend_earlier_or_later(self, shape):
        """Without noise, and from far below the scale: the case in which nothing tells how the curve goes on."""

        def curve(m):
            x = m / 640.0
            return math.sqrt(m * (1 + shape * x) / (1 + 2 * shape * x + x * x))

        rng = random.Random(1)
        found = estimate([window(lambda m: curve(m) * (1 + rng.gauss(0, 1e-5))) for _ in range(64)])
        assert found.resolved
        assert min(SHAPES) <= shape <= max(SHAPES)
        assert found.low < 640.0 < found.high
        assert found.scale == pytest.approx(640.0 / shape, rel=0.15)

    def test_a_scale_beyond_the_fit_s_reach_is_not_claimed(self):
        found = estimate([window(lambda m: hyperbola(m, 1e4))] * 40)
        assert found.scale == pytest.approx(1e4, rel=1e-2)
        assert (found.resolved, found.high) == (False, math.inf)
        assert 48 <= found.low <= 32 * 48 * (1 + 1e-9)

    def test_a_curve_that_bends_upward_has_no_scale(self):
        found = estimate([window(lambda m: m**0.6)] * 40)
        assert (found.scale, found.high, found.resolved, found.signal) == (math.inf, math.inf, False, 0.0)
        assert 48 <= found.low <= 32 * 48 * (1 + 1e-9)

    def test_noise_alone_says_nothing(self):
        rng = random.Random(7)
        found = [estimate([window(lambda m: rng.gauss(0, 1)) for _ in range(100)]) for _ in range(40)]
        assert sum(one.resolved for one in found) <= 3
        assert sum(one.low == 0.0 for one in found) >= 30

    def test_few_windows_close_no_interval(self):
        one = estimate([window(lambda m: hyperbola(m, 64.0))])
        assert (one.steps, one.low, one.high, one.resolved) == (1, 0.0, math.inf, False)
        assert not estimate(stream(1, 7, 64.0, 0.01, 0.001)).resolved
        assert estimate(stream(1, 16, 64.0, 0.01, 0.001)).resolved

    def test_a_memory_that_is_not_full_has_blocks_to_compare(self):
        """A run that was measured late: a few windows of a long memory."""
        estimator = AlignmentEstimator(memory=64 * 4096)
        state = {**estimator.init(), "span": 64 * 10000}
        for count in (16, 100, 300):
            state = feed(estimator, stream(count, count, 64.0, 0.01, 0.001), state)
            assert 12 <= len(state["blocks"]) <= 33
            assert estimator.value(state).resolved


class TestTheMemory:
    def test_the_first_half_of_a_run_is_left_out(self):
        early = [window(lambda m: hyperbola(m, 10.0))] * 100
        late = [window(lambda m: hyperbola(m, 200.0))] * 110
        assert estimate([*early, *late]).scale == pytest.approx(200.0, rel=1e-2)

    def test_it_is_bounded(self):
        estimator = AlignmentEstimator(memory=6400)
        state = feed(estimator, stream(1, 1000, 64.0))
        found = estimator.value(state)
        assert 100 <= found.steps <= 108
        assert found.span == found.samples == 64 * found.steps
        assert found.memory == 6400
        assert len(state["blocks"]) <= 33

    def test_windows_between_count_as_looked_back_over(self):
        estimator = AlignmentEstimator(memory=6400)
        state = estimator.init()
        for i, one in enumerate(stream(1, 200, 64.0), start=1):
            state = estimator.update(state, one, last_sample=640 * i)
        found = estimator.value(state)
        assert 10 <= found.steps <= 12
        assert found.span == 640 * found.steps

    def test_states_are_json_and_never_changed(self):
        estimator = AlignmentEstimator()
        state = feed(estimator, stream(1, 100, 64.0))
        before = json.dumps(state)
        restored = json.loads(before)
        rest = list(stream(2, 100, 64.0, sets=(4, 8, 16)))
        assert feed(estimator, rest, state) == feed(estimator, rest, restored)
        assert json.dumps(state) == before
        assert Estimate.from_dict(json.loads(json.dumps(estimator.value(state).to_dict()))) == estimator.value(state)

    @pytest.mark.parametrize(
        "one",
        [
            Alignment(64),
            Alignment(64, (Reading(4.0, 1.0, 1.0, 3),)),
            Alignment(64, (Reading(4.0, 1.0, 1.0, 3), Reading(8.0, math.nan, 1.0, 3))),
            Alignment(64, (Reading(4.0, 1.0, 1.0, 3), Reading(8.0, 1e200, 1.0, 3))),
        ],
    )
    def test_what_cannot_be_measured_is_left_out(self, one):
        estimator = AlignmentEstimator()
        state = estimator.init()
        assert not one.measurable
        assert estimator.update(state, one) is state
        assert estimator.value(state) is None

    def test_windows_that_overlap_count_with_their_own_samples(self):
        """As in noise.py: a trainer that repeats samples after a restart is still measured."""
        estimator = AlignmentEstimator()
        state = estimator.update(estimator.init(), window(math.sqrt), 64)
        found = estimator.value(estimator.update(state, window(math.sqrt), 100))
        assert (found.samples, found.span, found.steps) == (128, 128, 2)

    def test_a_quarter_of_the_run_is_the_most(self):
        estimator = AlignmentEstimator(horizon=64 * 400)
        states = [feed(estimator, stream(1, steps, 64.0)) for steps in (100, 400)]
        assert [estimator.memory(state) for state in states] == [64 * 50, 64 * 100]
        assert estimator.memory(estimator.init()) == 0
        assert 100 <= estimator.value(states[1]).steps <= 108

    def test_a_short_memory_says_how_far_it_really_looks_back(self):
        """Fewer than eight windows make no interval, whatever the cap."""
        estimator = AlignmentEstimator(horizon=1000)
        state = estimator.init()
        for i, one in enumerate(stream(1, 40, 64.0), start=1):
            state = estimator.update(state, one, last_sample=512 * i)
        found = estimator.value(state)
        assert (found.steps, found.span, found.memory) == (8, 8 * 512, 8 * 512)
        assert estimator.memory(state) == 250

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"confidence": 1.0}, "confidence must lie between 0 and 1, got 1.0"),
            ({"memory": 0}, "memory must be at least 1 sample, or None, got 0"),
            ({"horizon": 0}, "horizon must be at least 1 sample, or None, got 0"),
            ({"dataset_size": -5}, "dataset_size must be at least 1 sample, or None, got -5"),
        ],
    )
    def test_bad_settings_are_refused(self, settings, words):
        with pytest.raises(ValueError, match=f"alignment.{words}"):
            AlignmentEstimator(**settings)
