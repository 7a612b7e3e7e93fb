"""The noise estimator: what one window says, what many say together, and what it must never claim."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import pytest

from adabatch import noise
from adabatch.noise import Estimate, Measurement, NoiseEstimator, student_quantile
from adabatch.plan import data_efficiency, step_efficiency


def measure(gradients, samples, weights=None):
    """The measurement of one window by definition: the groups' mean gradients, their samples and loss weights."""
    weights = list(samples if weights is None else weights)
    shares = [weight / sum(weights) for weight in weights]
    mean = [sum(p * g for p, g in zip(shares, column, strict=True)) for column in zip(*gradients, strict=True)]
    squares = [sum(x * x for x in gradient) for gradient in gradients]
    return Measurement(
        samples=sum(samples),
        groups=sum(weight > 0 for weight in weights),
        mean_square=sum(x * x for x in mean),
        group_square=sum(p * p * square for p, square in zip(shares, squares, strict=True)),
        weight_square=sum(p * p for p in shares),
        weight=sum(weights),
        loss=0.0,
    )


def window(signal, sample_noise, samples=64, groups=4):
    """A measurement that reads exactly ``signal`` as G^2 and ``sample_noise`` as S (to rounding), from equal groups."""
    mean_square = signal + sample_noise / samples
    group_square = mean_square - signal * (1 - 1 / groups)
    return Measurement(samples, groups, mean_square, group_square, 1 / groups, samples, 0.0)


def stream(seed, steps, ratio=1.0, samples=64, groups=4, dimension=300):
    """Windows with |G|^2 = 1 and a noise scale of ``ratio`` times ``samples``, with the variances of Gaussian noise."""
    rng = random.Random(seed)
    signal_error = math.sqrt(4 * ratio / dimension + 2 * ratio**2 / dimension * groups / (groups - 1))
    noise_error = math.sqrt(2 / dimension / (groups - 1))
    scale = ratio * samples
    for _ in range(steps):
        yield window(rng.gauss(1, signal_error), scale * rng.gauss(1, noise_error), samples, groups)


def feed(estimator, windows, state=None):
    state = estimator.init() if state is None else state
    for measurement in windows:
        state = estimator.update(state, measurement)
    return state


class TestOneWindow:
    def test_two_groups_of_four(self):
        measurement = measure([(3, 0), (1, 0)], [4, 4])
        assert measurement.signal == pytest.approx(3)
        assert measurement.noise == pytest.approx(8)
        estimate = NoiseEstimator().value(feed(NoiseEstimator(), [measurement]))
        assert estimate.scale == pytest.approx(8 / 3)
        assert (estimate.samples, estimate.steps, estimate.resolved) == (8, 1, False)

    def test_four_groups_of_two(self):
        measurement = measure([(3, 0), (1, 0), (2, 1), (2, -1)], [2, 2, 2, 2])
        assert measurement.signal == pytest.approx(11 / 3)
        assert measurement.noise == pytest.approx(8 / 3)

    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    def test_the_order_of_groups_does_not_matter(self, order):
        gradients, samples, weights = [(3.0, 1.0), (1.0, -2.0), (0.5, 0.5)], [4, 2, 7], [10.0, 3.0, 30.0]
        there = measure(gradients, samples, weights)
        here = measure([gradients[i] for i in order], [samples[i] for i in order], [weights[i] for i in order])
        assert (here.signal, here.noise) == pytest.approx((there.signal, there.noise))

    def test_groups_of_weight_zero_drop_out(self):
        with_empty = measure([(3, 0), (9, 9), (1, 0)], [4, 0, 4])
        assert (with_empty.signal, with_empty.noise, with_empty.groups) == (pytest.approx(3), pytest.approx(8), 2)

    def test_sums_instead_of_means_give_the_same_scale(self):
        means, sums = measure([(3, 0), (1, 0)], [4, 4]), measure([(12, 0), (4, 0)], [4, 4])
        assert sums.noise / sums.signal == pytest.approx(means.noise / means.signal)

    def test_equal_groups_never_have_negative_noise(self):
        rng = random.Random(3)
        for _ in range(200):
            gradients = [[rng.gauss(0, 1) for _ in range(3)] for _ in range(rng.randint(2, 6))]
            assert measure(gradients, [5] * len(gradients)).noise >= -1e-12

    def test_identical_groups_have_no_noise(self):
        assert measure([(2, 1)] * 4, [3] * 4).noise == pytest.approx(0, abs=1e-12)

    @pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 5), (7, 1, 1)])
    def test_unbiased_for_any_weights_by_enumeration(self, weights):
        # Group k has the mean gradient G + s_k * (one of 4 corners of a square): every outcome is enumerated.
        true, spreads, samples = (1.0, 0.5), (0.7, 2.0, 1.3), [2, 3, 4]
        corners = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
        signals, noises = [], []
        for outcome in itertools.product(corners, repeat=3):
            gradients = [[t + s * c for t, c in zip(true, o)] for s, o in zip(spreads, outcome, strict=True)]
            measurement = measure(gradients, samples, weights)
            signals.append(measurement.signal)
            noises.append(measurement.noise)
        variance = sum((w / sum(weights)) ** 2 * 2 * s * s for w, s in zip(weights, spreads, strict=True))
        assert sum(signals) / len(signals) == pytest.approx(1.25)
        assert sum(noises) / len(noises) == pytest.approx(sum(samples) * variance)
        assert min(signals) < 0  # single windows are not clipped

    @pytest.mark.parametrize(
        "change",
        [
            {"groups": 1, "weight_square": 1.0},
            {"groups": 0, "weight_square": 0.0},
            {"finite": False},
            {"mean_square": math.nan},
            {"group_square": math.inf},
            {"mean_square": 1e300},
        ],
    )
    def test_what_cannot_be_measured_changes_nothing(self, change):
        estimator = NoiseEstimator()
        state = feed(estimator, stream(1, 20))
        assert estimator.update(state, replace(window(1, 64), **change)) is state


class TestAverages:
    def test_nothing_measured_yet(self):
        assert NoiseEstimator().value(NoiseEstimator().init()) is None

    def test_signal_and_noise_are_averaged_apart(self):
        # A batch within three times the first one changes no weight; the last window weighs what it has.
        windows = [window(1.0, 10.0, 8), window(-0.5, 40.0, 24), window(0.9, 20.0, 16), window(0.6, 30.0, 32)]
        estimate = NoiseEstimator().value(feed(NoiseEstimator(), windows))
        assert estimate.signal == pytest.approx((8 * (1 - 0.5 + 0.9) + 32 * 0.6) / 56)
        assert estimate.noise == pytest.approx((8 * (10 + 40 + 20) + 32 * 30) / 56)
        assert estimate.scale == pytest.approx(estimate.noise / estimate.signal)
        assert (estimate.samples, estimate.steps) == (80, 4)

    def test_weights_follow_a_batch_that_falls(self):
        windows = [window(1.0, 10.0, 24), window(-0.5, 40.0, 8), window(0.9, 20.0, 7), window(0.6, 30.0, 20)]
        estimate = NoiseEstimator().value(feed(NoiseEstimator(), windows))
        assert estimate.signal == pytest.approx((24 * (1 - 0.5) + 7 * (0.9 + 0.6)) / 62)

    def test_means_are_unbiased_while_the_memory_adapts(self):
        # At a noise scale of 20 batches the memory moves most between its 16th and 128th step.
        estimates = [NoiseEstimator().value(feed(NoiseEstimator(), stream(i, 96, ratio=20))) for i in range(240)]
        signals = [estimate.signal for estimate in estimates]
        mean = sum(signals) / 240
        error = math.sqrt(sum((x - mean) ** 2 for x in signals) / 240 / 240)
        assert abs(mean - 1) < 3 * error < 0.07
        assert sum(estimate.noise for estimate in estimates) / 240 == pytest.approx(20 * 64, rel=0.005)

    def test_finite_data_shifts_the_inverse_scale(self):
        windows = list(stream(5, 100, ratio=3))
        plain, finite = NoiseEstimator(), NoiseEstimator(dataset_size=1000)
        state = feed(plain, windows)
        a, b = plain.value(state), finite.value(state)
        assert b.signal == pytest.approx(a.signal + a.noise / 1000)
        for name in ("scale", "low", "high"):
            assert 1 / getattr(b, name) == pytest.approx(1 / getattr(a, name) + 1 / 1000)

    @pytest.mark.parametrize("factor", [2.0**-100, 0.125, 3.0, 1e8])
    def test_a_scaled_loss_changes_no_scale(self, factor):
        estimator, windows = NoiseEstimator(), list(stream(6, 150, ratio=10))
        scaled = [
            replace(m, mean_square=m.mean_square * factor**2, group_square=m.group_square * factor**2) for m in windows
        ]
        a, b = estimator.value(feed(estimator, windows)), estimator.value(feed(estimator, scaled))
        assert (b.scale, b.low, b.high) == pytest.approx((a.scale, a.low, a.high))
        assert (b.samples, b.memory) == (a.samples, a.memory)

    def test_json_state_continues_bit_identically(self):
        estimator, windows = NoiseEstimator(horizon=40_000), list(stream(7, 300, ratio=10))
        straight = stopped = estimator.init()
        for measurement in windows:
            straight = estimator.update(straight, measurement)
            stopped = json.loads(json.dumps(estimator.update(stopped, measurement)))
            assert stopped == straight
        assert estimator.value(stopped) == estimator.value(straight)

    def test_updates_leave_earlier_states_alone(self):
        estimator, states, copies = NoiseEstimator(), [NoiseEstimator().init()], []
        for measurement in stream(8, 200, ratio=20):
            copies.append(json.dumps(states[-1]))
            states.append(estimator.update(states[-1], measurement))
        assert [json.dumps(state) for state in states[:-1]] == copies


class TestMemory:
    def sizes(self, estimator, windows):
        state, seen = estimator.init(), []
        for measurement in windows:
            state = estimator.update(state, measurement)
            seen.append((state["memory"], estimator.value(state)))
        return seen

    def test_moves_by_powers_of_two(self):
        windows = [*stream(1, 400, ratio=30), *stream(2, 400, ratio=1), *stream(3, 400, ratio=50)]
        levels = {math.log2(memory / (16 * 64)) for memory, _ in self.sizes(NoiseEstimator(), windows)}
        assert all(level == int(level) for level in levels)
        assert len(levels) > 3

    def test_grows_with_the_square_of_the_scale(self):
        # (2 / 300) ratio^2 4/3 / 0.25^2 steps: 57 at a ratio of 20, 228 at 40, and the floor of 16 at 1.
        steps = {r: NoiseEstimator().value(feed(NoiseEstimator(), stream(9, 2000, ratio=r))).steps for r in (1, 20, 40)}
        assert steps[1] == 16
        assert 32 <= steps[20] <= 128
        assert 128 <= steps[40] <= 512

    def test_is_capped_at_a_share_of_the_run(self):
        estimator = NoiseEstimator(horizon=64 * 1000)
        estimates = [estimate for _, estimate in self.sizes(estimator, stream(4, 1000, ratio=100))]
        assert max(estimate.samples for estimate in estimates) <= 0.05 * 64 * 1000
        assert estimates[-1].memory == 0.05 * 64 * 1000
        assert estimates[-1].steps >= 40

    def test_never_falls_below_sixteen_steps(self):
        estimates = [e for _, e in self.sizes(NoiseEstimator(horizon=640), stream(4, 200, ratio=0.1))]
        assert {estimate.steps for estimate in estimates[16:]} == {16}
        assert {estimate.memory for estimate in estimates[16:]} == {16 * 64}

    def test_state_stays_small(self):
        state = feed(NoiseEstimator(), stream(2, 5000, ratio=1000))
        assert max(len(state["recent"]), len(state["older"])) <= noise.MOST_BLOCKS
        assert len(json.dumps(state)) < 10_000

    def test_history_beyond_eight_memories_is_forgotten(self):
        state = feed(NoiseEstimator(), stream(2, 1000, ratio=1))
        assert state["total"][0] == sum(block[0] for block in state["recent"] + state["older"])
        assert 7 * state["memory"] < state["total"][0] <= 8.25 * state["memory"]

    def test_the_start_of_a_run_is_forgotten(self):
        windows = [window(1000.0, 6400.0), *stream(5, 60, ratio=100)]
        estimate = NoiseEstimator().value(feed(NoiseEstimator(), windows))
        assert abs(estimate.signal) < 10

    @pytest.mark.parametrize("batches", [(16, 32, 64), (64, 32, 16)])
    def test_follows_changes_of_the_batch(self, batches):
        covered, signals, steps = 0, [], []
        for seed in range(60):
            # A noise scale of 320 samples at every batch; groups of 4 samples, so that their number changes, too.
            parts = [stream(seed * 3 + i, 120, 320 / b, b, b // 4) for i, b in enumerate(batches)]
            estimate = NoiseEstimator().value(feed(NoiseEstimator(), itertools.chain(*parts)))
            covered += estimate.low <= 320 <= estimate.high
            signals.append(estimate.signal)
            steps.append(estimate.steps)
        groups = batches[-1] // 4
        wanted = max((2 / 300) * (320 / batches[-1]) ** 2 * groups / (groups - 1) / 0.25**2, 16)
        assert sum(steps) / 60 == pytest.approx(wanted, rel=0.3)
        assert covered >= 51
        assert sum(signals) / 60 == pytest.approx(1, abs=0.15)


class TestInterval:
    def test_by_hand(self):
        # G^2 alternates by 1 around 6 in 16 blocks of one step and S is 640: differences of 2, a variance of 2 per
        # block, and 2 * 15^2 / 44 = 10.23 degrees of freedom. 1/scale is then G^2 / 640 with t * sqrt(2 / 16) / 640.
        estimate = NoiseEstimator().value(feed(NoiseEstimator(), [window(6 + (-1) ** i, 640.0) for i in range(16)]))
        half = student_quantile(0.975, 450 / 44) * math.sqrt(2 / 16)
        assert (estimate.low, estimate.high) == pytest.approx((640 / (6 + half), 640 / (6 - half)))

    @pytest.mark.parametrize(
        ("mean", "inverse_high"),
        [
            (0.63, 0.0),  # not even above the one-sided quantile, 0.639
            (0.70, 0.0606),  # less the one-sided quantile
            (1.30, 0.6394),  # that ends where the one-sided quantile is
            (1.50, 0.7146),  # less the two-sided quantile, 0.785
        ],
    )
    def test_near_zero_by_hand(self, mean, inverse_high):
        # The standard error is sqrt(2 / 16) with 10.23 degrees of freedom: tables give 1.808 and 2.221 of these.
        windows = [window(mean + (-1) ** i, 640.0) for i in range(16)]
        estimate = NoiseEstimator().value(feed(NoiseEstimator(), windows))
        assert 640 / estimate.high == pytest.approx(inverse_high, abs=2e-4)
        assert 640 / estimate.low == pytest.approx(mean + 0.7854, abs=2e-4)

    def test_what_cannot_be_resolved_is_not_covered_too_often(self):
        covered = 0
        for seed in range(2000):
            estimate = NoiseEstimator().value(feed(NoiseEstimator(), stream(seed, 16, ratio=200)))
            covered += estimate.low <= 200 * 64 <= estimate.high
        assert 0.935 < covered / 2000 < 0.965  # two-sided quantiles: 97.5 %

    def test_unbounded_set_is_unresolved(self):
        rng = random.Random(2)
        estimator = NoiseEstimator()
        estimate = estimator.value(feed(estimator, [window(rng.gauss(0.1, 5), 640) for _ in range(40)]))
        assert not estimate.resolved
        assert estimate.high == math.inf
        assert 0 < estimate.low < estimate.scale

    def test_negative_signal_is_a_bound_and_no_scale(self):
        rng = random.Random(4)
        windows = [window(rng.gauss(-1, 1), 640) for _ in range(40)]
        negative = NoiseEstimator().value(feed(NoiseEstimator(), windows))
        zero = NoiseEstimator().value(
            feed(NoiseEstimator(), [window(m.signal - negative.signal, 640) for m in windows])
        )
        assert (negative.scale, negative.high, negative.resolved) == (math.inf, math.inf, False)
        # However negative, it bounds no more than a signal of zero does.
        assert negative.low == pytest.approx(zero.low, rel=0.3)

    def test_few_steps_resolve_nothing(self):
        estimator = NoiseEstimator()
        for steps in range(1, 8):
            estimate = estimator.value(feed(estimator, stream(1, steps, ratio=0.1)))
            assert not estimate.resolved
            assert estimate.low <= estimate.scale
        assert estimator.value(feed(estimator, stream(1, 8, ratio=0.1))).resolved

    def test_windows_without_noise(self):
        estimate = NoiseEstimator().value(feed(NoiseEstimator(), [measure([(3, 4)] * 2, [4, 4])] * 20))
        assert (estimate.scale, estimate.low, estimate.high) == pytest.approx((0, 0, 0), abs=1e-12)

    def test_windows_of_zeros(self):
        estimate = NoiseEstimator().value(feed(NoiseEstimator(), [measure([(0, 0)] * 2, [4, 4])] * 20))
        assert (estimate.scale, estimate.low, estimate.high) == (math.inf, 0, math.inf)

    @pytest.mark.parametrize(("ratio", "steps"), [(0.1, 32), (3.0, 32), (30.0, 24)])
    def test_covers_the_truth(self, ratio, steps):
        estimator, repeats = NoiseEstimator(), 400
        estimates = [estimator.value(feed(estimator, stream(i, steps, ratio))) for i in range(repeats)]
        covered = sum(estimate.low <= ratio * 64 <= estimate.high for estimate in estimates)
        assert 0.91 < covered / repeats <= 0.99

    def test_a_wider_confidence_is_a_wider_interval(self):
        state = feed(NoiseEstimator(), stream(3, 100, ratio=3))
        narrow, wide = (NoiseEstimator(confidence=c).value(state) for c in (0.8, 0.99))
        assert wide.low < narrow.low < narrow.scale < narrow.high < wide.high

    def test_drift_does_not_pass_for_noise(self):
        rng = random.Random(1)
        trend = [window(2 - i / 64, 64 * rng.gauss(1, 0.01)) for i in range(64)]
        spread = noise._spread([64] * 64, [m.signal for m in trend], [m.noise for m in trend])
        assert math.sqrt(spread.signal) < 0.01  # the standard error with which the mean is known, not 0.29 / 8

    def test_variances_from_successive_differences(self):
        rng = random.Random(5)
        sizes = [rng.choice([1, 2, 4]) for _ in range(24)]
        repeats = []
        for _ in range(1500):
            x = [rng.gauss(0, 1) / math.sqrt(n) for n in sizes]
            y = [0.5 * a + rng.gauss(0, 1) / math.sqrt(n) for a, n in zip(x, sizes, strict=True)]
            repeats.append(noise._spread(sizes, x, y))
        true, mean = 1 / sum(sizes), sum(r.signal for r in repeats) / 1500
        assert mean == pytest.approx(true, rel=0.05)
        assert sum(r.both for r in repeats) / 1500 == pytest.approx(0.5 * true, rel=0.08)
        assert sum(r.noise for r in repeats) / 1500 == pytest.approx(1.25 * true, rel=0.05)
        # The relative variance of a variance with f degrees of freedom is 2 / f.
        relative = sum((r.signal / mean - 1) ** 2 for r in repeats) / 1500
        assert repeats[0].freedom == pytest.approx(2 / relative, rel=0.15)

    @pytest.mark.parametrize("blocks", [2, 3, 16, 32])
    def test_degrees_of_freedom_of_equal_blocks(self, blocks):
        values = [float(i) for i in range(blocks)]
        spread = noise._spread([8] * blocks, values, values)
        assert spread.freedom == pytest.approx(2 * (blocks - 1) ** 2 / (3 * blocks - 4))


class TestStudent:
    @pytest.mark.parametrize(
        ("probability", "freedom", "value"),
        [
            (0.975, 1, 12.7062),
            (0.975, 2, 4.30265),
            (0.975, 5, 2.57058),
            (0.975, 10, 2.22814),
            (0.975, 15, 2.13145),
            (0.975, 30, 2.04227),
            (0.95, 5, 2.01505),
            (0.995, 4, 4.60409),
            (0.9995, 20, 3.84952),
            (0.975, 1e7, 1.95996),
            (0.5, 7, 0.0),
        ],
    )
    def test_against_tables(self, probability, freedom, value):
        assert student_quantile(probability, freedom) == pytest.approx(value, rel=4e-6)

    def test_is_monotone_between_whole_numbers(self):
        values = [student_quantile(0.975, 1 + i / 4) for i in range(80)]
        assert values == sorted(values, reverse=True)

    @pytest.mark.parametrize(("probability", "freedom"), [(0.4, 5), (1.0, 5), (0.9, 0.5)])
    def test_refuses_what_it_cannot(self, probability, freedom):
        with pytest.raises(ValueError, match="freedom"):
            student_quantile(probability, freedom)


class TestSurface:
    @pytest.mark.parametrize("ratio", [1.0, 200.0])
    def test_estimates_survive_json(self, ratio):
        estimate = NoiseEstimator(geometry="adam").value(feed(NoiseEstimator(), stream(1, 50, ratio=ratio)))
        assert Estimate.from_dict(json.loads(json.dumps(estimate.to_dict(), allow_nan=False))) == estimate

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"relative_error": 0}, "relative_error.*0"),
            ({"confidence": 95}, "confidence.*95"),
            ({"horizon": 0}, "horizon.*0"),
            ({"dataset_size": -1}, "dataset_size.*-1"),
        ],
    )
    def test_settings_are_checked(self, settings, text):
        with pytest.raises(ValueError, match=text):
            NoiseEstimator(**settings)

    @pytest.mark.parametrize(
        ("batch", "scale", "data", "step"),
        [(10, 10, 0.5, 0.5), (10, 30, 0.75, 0.25), (8, math.inf, 1, 0), (8, 0, 0, 1)],
    )
    def test_efficiencies(self, batch, scale, data, step):
        assert data_efficiency(batch, scale) == pytest.approx(data)
        assert step_efficiency(batch, scale) == pytest.approx(step)
