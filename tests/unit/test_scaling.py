"""What moves with the batch, against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adabatch.plan import Scales
from adabatch.scaling import DEFAULT_RULES, RULES, Scaling, decay_for, gain

BATCHES = st.integers(1, 10**6)
NOISE_SCALES = st.floats(0.0, 1e9)


@pytest.mark.parametrize(
    ("rule", "lr"),
    [
        ("none", 1.0),
        ("linear", 4.0),
        ("sqrt", 2.0),
        ("adascale", 2.5),
        ("gain_power", math.sqrt(2.5)),
        ("surge", 1.25),
    ],
)
def test_learning_rate_at_four_times_the_reference_batch(rule: str, lr: float) -> None:
    # gain: (1 + 64/16) / (1 + 64/64) = 5 / 2; surge: half of sqrt(64/16) + sqrt(16/64) = 1.25, over 1 at the peak
    assert Scaling(rule, 16).scales(64, noise_scale=64.0).lr == pytest.approx(lr)


def test_the_rule_follows_the_kind_of_optimizer() -> None:
    assert {kind: Scaling(rule, 16).scales(64, math.inf).lr for kind, rule in DEFAULT_RULES.items()} == {
        "adam": 2.0,
        "sgd": 4.0,
        "muon": 2.0,
    }


def test_adascale_gain_of_the_published_example() -> None:
    # Variance 2 and squared norm 3 of a reference-batch gradient, scale 2: (2 + 3) / (2/2 + 3) = 1.25.
    assert gain(2, 1, 2 / 3) == pytest.approx(1.25)
    assert gain(64, 32, 32 * 2 / 3) == pytest.approx(1.25)


def test_the_gain_has_both_limits() -> None:
    assert gain(64, 16, 0.0) == 1.0
    assert gain(64, 16, math.inf) == gain(4, 1, math.inf) == 4.0
    assert gain(64, 16, 1e15) == pytest.approx(4.0)
    assert gain(4, 16, math.inf) == 0.25


def test_without_an_estimate_the_cautious_limit_holds() -> None:
    assert gain(64, 16, None) == 1.0
    assert gain(4, 16, None) == 0.25


@given(BATCHES, BATCHES, NOISE_SCALES)
def test_the_gain_lies_between_one_and_kappa(batch: int, reference: int, noise_scale: float) -> None:
    kappa = batch / reference
    value = gain(batch, reference, noise_scale)
    assert min(1.0, kappa) * (1 - 1e-12) <= value <= max(1.0, kappa) * (1 + 1e-12)
    assert value * gain(reference, batch, noise_scale) == pytest.approx(1.0)


@given(BATCHES, BATCHES, NOISE_SCALES)
def test_the_gain_rises_with_the_batch(batch: int, reference: int, noise_scale: float) -> None:
    assert gain(2 * batch, reference, noise_scale) >= gain(batch, reference, noise_scale) * (1 - 1e-12)


def surge(batch: float, noise_scale: float) -> float:
    """The published curve (arXiv 2405.14578), of height 1 at its peak."""
    return 1 / (0.5 * (math.sqrt(noise_scale / batch) + math.sqrt(batch / noise_scale)))


@given(BATCHES, BATCHES, st.floats(1e-6, 1e9))
def test_surge_is_the_published_curve_over_its_value_at_the_reference_batch(
    batch: int, reference: int, noise_scale: float
) -> None:
    lr = Scaling("surge", reference).scales(batch, noise_scale).lr
    assert lr == pytest.approx(surge(batch, noise_scale) / surge(reference, noise_scale))


def test_surge_peaks_at_the_noise_scale_and_has_both_limits() -> None:
    rates = {batch: Scaling("surge", 16).scales(batch, 64.0).lr for batch in range(1, 400)}
    assert max(rates, key=rates.__getitem__) == 64
    assert Scaling("surge", 16).scales(64, math.inf).lr == 2.0
    assert Scaling("surge", 16).scales(64, 0.0).lr == 0.5
    assert Scaling("surge", 16).scales(64, None).lr == 1.0
    assert Scaling("surge", 16).scales(4, None).lr == 0.5


@pytest.mark.parametrize("rule", RULES)
@given(
    st.floats(-4, 4),
    st.one_of(
        st.sampled_from([None, 0.0, math.inf, math.nan, -math.inf, -3.0, 5e-324, 1.7e308]), st.floats(0, 1e308)
    ),
    st.sampled_from([1.0, 0.5, 1e-3]),
)
def test_no_rule_has_an_illegal_value(rule: str, power: float, noise_scale: float | None, exponent: float) -> None:
    """From 1e-4 to 1e4 reference batches, at any noise scale: multipliers are positive, betas stay in [0, 1)."""
    reference = 10**6
    batch = max(1, round(reference * 10**power))
    scaling = Scaling(rule, reference, exponent, beta1=True)
    scales = scaling.scales(batch, noise_scale)
    assert all(math.isfinite(value) and value > 0 for value in astuple(replace(scales, second_moment=1.0)))
    bound = max(scales.kappa, 1 / scales.kappa) * (1 + 1e-9)
    assert 1 / bound <= scales.lr <= bound
    for exponent_ in (scales.beta1_exponent, scales.beta2_exponent):
        assert all(0 <= decay_for(beta, exponent_) < 1 for beta in (0.0, 0.9, 0.999))


def test_companions_of_the_square_root_rule() -> None:
    scales = Scaling("sqrt", 16).scales(64, noise_scale=None)
    moved = {"beta2_exponent": 4.0, "eps": 0.5, "weight_decay": 2.0}
    carried = {"second_moment": 1.0, "step_counter": 4.0, "momentum_buffer": 2.0}
    assert scales == Scales(kappa=4.0, lr=2.0, clip=1.0, **moved, **carried)


def test_weight_decay_per_sample_is_constant() -> None:
    # lr * weight_decay is what a step decays; over kappa times as many samples it has to be kappa times as much.
    for rule in ("linear", "sqrt", "adascale", "gain_power"):
        scales = Scaling(rule, 16).scales(56, noise_scale=40.0)
        assert scales.lr * scales.weight_decay == pytest.approx(3.5)
    assert Scaling("linear", 16).scales(64, 40.0).weight_decay == 1.0


def test_the_clipping_threshold_follows_the_expected_norm() -> None:
    # E|g|^2 = |G|^2 (1 + scale/B): (1 + 30/40) / (1 + 30/10) = 1.75 / 4
    assert Scaling("sqrt", 10).scales(40, 30.0).clip == pytest.approx(math.sqrt(1.75 / 4))
    assert Scaling("sqrt", 10).scales(40, math.inf).clip == 0.5
    assert Scaling("sqrt", 10).scales(40, 0.0).clip == 1.0


def test_none_moves_nothing() -> None:
    assert Scaling("none", 16).scales(64, 100.0) == Scales(kappa=4.0)


def test_companions_can_be_left_alone() -> None:
    still = Scaling("linear", 16, beta2=False, eps=False, weight_decay=False, clip=False)
    assert still.scales(64, 100.0) == Scales(kappa=4.0, lr=4.0, second_moment=1.0, momentum_buffer=4.0)


@pytest.mark.parametrize("rule", RULES)
def test_at_the_reference_batch_everything_is_as_configured(rule: str) -> None:
    configured = Scales(second_moment=float(rule != "none"))
    assert Scaling(rule, 24).scales(24, 77.0) == configured
    assert Scaling(rule, 24).scales(24, None) == configured


def test_a_decay_keeps_its_memory_in_samples() -> None:
    assert decay_for(0.999, 4) == pytest.approx(0.996006, abs=1e-6)
    assert decay_for(0.0, 4) == 0.0
    for decay, kappa in ((1.0, 2), (-0.1, 2), (0.9, 0)):
        with pytest.raises(ValueError, match="decay"):
            decay_for(decay, kappa)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "cube", "reference_batch": 16}, "none, linear, sqrt, adascale, gain_power, surge, got 'cube'"),
        ({"rule": "sqrt", "reference_batch": 0}, "reference_batch must be at least 1, got 0"),
        ({"rule": "gain_power", "reference_batch": 1, "exponent": 1.5}, r"exponent must be in \(0, 1\], got 1.5"),
        ({"rule": "gain_power", "reference_batch": 1, "exponent": 0.0}, "got 0.0"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scaling(**arguments)  # type: ignore[arg-type]
