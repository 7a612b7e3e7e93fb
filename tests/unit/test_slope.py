"""The slope from a part's noise scale to the whole model's: what it finds, how sure it is, and when it is unknown."""

from __future__ import annotations

import json
import math
import random

import pytest

from adabatch.noise import Estimate, Measurement
from adabatch.slope import FEWEST_BLOCKS, MOST_BLOCKS, Slope, SlopeFit


def window(signal: float, noise: float, samples: int = 64, groups: int = 8) -> Measurement:
    """A measurement that reads exactly these numbers as G^2 and S, to rounding, from equal groups."""
    mean_square = signal + noise / samples
    return Measurement(samples, groups, mean_square, mean_square - signal * (1 - 1 / groups), 1 / groups, samples, 0.0)


def pairs(
    seed: int, windows: int, *, error: float = 0.5, part: float = 2.0, whole: float = 3.0, shared: float = 0.5
) -> list[tuple[Measurement, Measurement]]:
    """Windows of a part with G^2 = 1, S = 100 part and a whole with G^2 = 4, S = 400 whole, so a slope of whole / part.

    G^2 has this relative error, of which the share ``shared`` is the same on both sides; S has a tenth of it.
    """
    rng = random.Random(seed)
    found = []
    for _ in range(windows):
        common = rng.gauss(0, math.sqrt(shared))
        own = [rng.gauss(0, math.sqrt(1 - shared)) for _ in range(2)]
        sides = []
        for signal, noise, mine in ((1.0, 100 * part, own[0]), (4.0, 400 * whole, own[1])):
            sides.append(window(signal * (1 + error * (common + mine)), noise * rng.gauss(1, 0.1 * error)))
        found.append((sides[0], sides[1]))
    return found


def fit(windows: list[tuple[Measurement, Measurement]], slope: Slope | None = None) -> SlopeFit:
    slope = slope or Slope()
    state = slope.init()
    for part, whole in windows:
        state = slope.update(state, part, whole)
    value = slope.value(state)
    assert value is not None
    return value


def estimate(scale: float, low: float, high: float) -> Estimate:
    return Estimate(1.0, scale, scale, low, high, high < math.inf, 1000, 10, 1000)


def test_exact_windows_have_an_exact_slope() -> None:
    found = fit(pairs(0, 64, error=0.0))
    assert (found.signal, found.noise, found.scale) == pytest.approx((4.0, 6.0, 1.5))
    assert (found.low, found.high) == pytest.approx((1.5, 1.5))
    assert found.known and found.unknown == ""


def test_the_slope_is_a_ratio_of_sums_over_the_newest_half() -> None:
    """By definition, with windows of unequal samples; a regression through the origin would be flatter."""
    rng = random.Random(3)
    windows = [
        (window(rng.gauss(1, 0.8), 100, samples := rng.choice([16, 64, 256])), window(rng.gauss(3, 1), 500, samples))
        for _ in range(40)
    ]
    total = sum(part.samples for part, _ in windows)
    newest: list[tuple[Measurement, Measurement]] = []
    while sum(part.samples for part, _ in newest) < total / 2:
        newest.insert(0, windows[len(windows) - 1 - len(newest)])
    found = fit(windows)
    assert found.samples >= total / 2
    # a block may hold several windows, so the oldest that is kept may reach further back
    kept: list[tuple[Measurement, Measurement]] = []
    while sum(part.samples for part, _ in kept) < found.samples:
        kept.insert(0, windows[len(windows) - 1 - len(kept)])
    assert sum(part.samples for part, _ in kept) == found.samples and len(kept) - len(newest) <= 3
    signal = sum(w.samples * w.signal for _, w in kept) / sum(p.samples * p.signal for p, _ in kept)
    assert found.signal == pytest.approx(signal)
    assert found.noise == pytest.approx(5.0)
    assert found.scale == pytest.approx(5.0 / signal)


@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_the_interval_covers_the_truth_and_is_unbiased(shared: float) -> None:
    found = [fit(pairs(seed, 300, shared=shared)) for seed in range(300)]
    assert all(one.known for one in found)
    covered = sum(one.low <= 1.5 <= one.high for one in found) / len(found)
    assert 0.92 <= covered <= 0.98
    assert sum(one.scale for one in found) / len(found) == pytest.approx(1.5, rel=0.015)


def test_errors_that_both_sides_share_do_not_widen_the_interval() -> None:
    widths = [
        [math.log(one.high / one.low) for one in (fit(pairs(seed, 300, shared=shared)) for seed in range(20))]
        for shared in (0.0, 0.9)
    ]
    assert sum(widths[1]) < 0.5 * sum(widths[0])


def test_the_correlation_tells_whether_both_move_together() -> None:
    drifting = []
    for step in range(200):
        level = 2.0 ** (step / 40)
        drifting.append((window(1.0, 100 * level), window(4.0, 800 * level)))
    found = fit(drifting)
    assert found.noise_correlation == pytest.approx(1.0) and found.scale_correlation == pytest.approx(1.0)
    apart = fit(pairs(5, 400, shared=0.0))
    assert apart.signal_correlation is not None and abs(apart.signal_correlation) < 0.5
    assert fit([(window(0.0, 64.0), window(1.0, 1.0))] * 9).noise_correlation is None
    opposed = [(window(1.0, 100 * 2.0 ** (step % 5)), window(1.0, 100 / 2.0 ** (step % 5))) for step in range(20)]
    assert fit(opposed).scale_correlation == pytest.approx(-1.0)


def test_a_slope_that_changes_is_followed() -> None:
    found = fit(pairs(0, 300, whole=3.0) + pairs(1, 400, whole=6.0))
    assert found.scale == pytest.approx(3.0, rel=0.1)


def test_the_slope_is_unknown_at_first_and_while_a_signal_is_not_seen() -> None:
    slope = Slope()
    assert slope.value(slope.init()) is None
    early = fit(pairs(0, FEWEST_BLOCKS // 2))
    assert not early.known and "blocks of windows" in early.unknown
    assert (early.low, early.high) == (0.0, math.inf)
    unseen = fit(pairs(0, 40, error=40.0))
    assert not unseen.known and "G^2" in unseen.unknown and "not yet above 0" in unseen.unknown
    assert unseen.whole(estimate(100.0, 50.0, 200.0)) is None
    negative = fit([(window(1.0, 10.0), window(-1.0, 10.0)) for _ in range(30)])
    assert math.isnan(negative.scale) and not negative.known


def test_the_whole_models_estimate() -> None:
    found = fit(pairs(0, 300))
    part = estimate(100.0, 80.0, 125.0)
    whole = found.whole(part)
    assert whole is not None
    assert whole.scale == pytest.approx(100.0 * found.scale)
    assert (whole.signal, whole.noise) == pytest.approx((found.signal, 100.0 * found.noise))
    assert whole.scale == pytest.approx(whole.noise / whole.signal)
    up = math.hypot(math.log(1.25), math.log(found.high / found.scale))
    down = math.hypot(math.log(0.8), math.log(found.low / found.scale))
    assert whole.high == pytest.approx(whole.scale * math.exp(up))
    assert whole.low == pytest.approx(whole.scale * math.exp(-down))
    assert whole.geometry != part.geometry and whole.resolved


def test_an_unresolved_part_stays_unresolved() -> None:
    found = fit(pairs(0, 300))
    one_sided = found.whole(estimate(100.0, 60.0, math.inf))
    assert one_sided is not None and one_sided.high == math.inf and not one_sided.resolved
    assert 0.0 < one_sided.low < 60.0 * found.scale
    no_signal = found.whole(estimate(math.inf, 60.0, math.inf))
    assert no_signal is not None and no_signal.scale == math.inf and no_signal.low == pytest.approx(60.0 * found.low)
    nothing = found.whole(estimate(100.0, 0.0, math.inf))
    assert nothing is not None and nothing.low == 0.0


def test_the_whole_models_interval_covers() -> None:
    """The part's estimate is exact to a known logarithmic error, the slope's is its own."""
    rng = random.Random(9)
    covered = 0
    for seed in range(300):
        factor = math.exp(rng.gauss(0, 0.1))
        scale, z = 200.0 * factor, math.exp(1.96 * 0.1)
        whole = fit(pairs(1000 + seed, 200)).whole(estimate(scale, scale / z, scale * z))
        covered += whole is not None and whole.low <= 300.0 <= whole.high
    assert 0.92 <= covered / 300 <= 0.98


def test_windows_that_one_side_did_not_measure_are_left_out() -> None:
    slope = Slope()
    state = slope.update(slope.init(), *pairs(0, 1)[0])
    single = Measurement(64, 1, 1.0, 1.0, 1.0, 64, 0.0)
    assert slope.update(state, single, window(1.0, 1.0)) is state
    assert slope.update(state, window(1.0, 1.0), single) is state
    with pytest.raises(ValueError, match="64 samples and the other 32"):
        slope.update(state, window(1.0, 1.0), window(1.0, 1.0, samples=32))


def test_updates_are_pure_and_states_are_json() -> None:
    slope, windows = Slope(), pairs(2, 150)
    state = slope.init()
    for part, whole in windows[:100]:
        state = slope.update(state, part, whole)
    before = json.dumps(state)
    continued = again = state
    for part, whole in windows[100:]:
        continued = slope.update(continued, part, whole)
    assert json.dumps(state) == before
    again = json.loads(before)
    for part, whole in windows[100:]:
        again = slope.update(again, part, whole)
    assert again == continued
    assert slope.value(again) == slope.value(continued)
    assert len(continued["blocks"]) <= MOST_BLOCKS


def test_a_wider_confidence_is_wider() -> None:
    narrow, wide = (fit(pairs(0, 200), Slope(confidence=confidence)) for confidence in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high
    with pytest.raises(ValueError, match="between 0 and 1, got 1.0"):
        Slope(confidence=1.0)
