"""What every registered learning-rate rule keeps to."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import canonical
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adabatch.plan import Scales
from adabatch.scaling import DEFAULT_RULES, RULES, Scaling

every_rule = pytest.mark.parametrize("rule", sorted(RULES))

# Rules whose rate falls again, above the noise scale.
PEAKED = {"surge"}

BATCHES = st.integers(1, 10**9)
NOISE_SCALES = st.one_of(st.sampled_from([None, 0.0, 5e-324, 1e-300, 1e300, math.inf]), st.floats(0, 1e12))


def setting(rule: str, reference: int = 16) -> Scaling:
    assert rule in canonical.RULES, f"rule {rule!r} is registered and has no canonical setting in canonical.py"
    return replace(canonical.RULES[rule], reference_batch=reference)


def test_the_default_of_every_optimizer_is_registered() -> None:
    assert set(DEFAULT_RULES.values()) <= set(RULES)


@every_rule
@given(batch=BATCHES, noise_scale=NOISE_SCALES)
def test_at_the_reference_batch_nothing_moves(rule: str, batch: int, noise_scale: float | None) -> None:
    configured = Scales(second_moment=float(rule != "none"))
    assert astuple(setting(rule, batch).scales(batch, noise_scale)) == pytest.approx(astuple(configured))


@every_rule
@given(batch=BATCHES, reference=BATCHES, noise_scale=NOISE_SCALES)
def test_all_multipliers_are_positive_numbers(
    rule: str, batch: int, reference: int, noise_scale: float | None
) -> None:
    scales = setting(rule, reference).scales(batch, noise_scale)
    assert all(math.isfinite(value) and value > 0 for value in astuple(replace(scales, second_moment=1.0)))
    assert scales == setting(rule, reference).scales(batch, noise_scale)
    assert scales.kappa == batch / reference


@every_rule
@given(batch=BATCHES, reference=BATCHES, noise_scale=NOISE_SCALES)
def test_the_rate_moves_at_most_in_proportion_to_the_batch(
    rule: str, batch: int, reference: int, noise_scale: float | None
) -> None:
    scales = setting(rule, reference).scales(batch, noise_scale)
    if rule in PEAKED:
        bound = max(scales.kappa, 1 / scales.kappa) ** 0.5 * (1 + 1e-9)
        assert 1 / bound <= scales.lr <= bound
        return
    assert min(1.0, scales.kappa) * (1 - 1e-9) <= scales.lr <= max(1.0, scales.kappa) * (1 + 1e-9)
    larger = setting(rule, reference).scales(2 * batch, noise_scale)
    assert larger.lr >= scales.lr * (1 - 1e-9)


@every_rule
@given(batch=BATCHES, reference=BATCHES, noise_scale=NOISE_SCALES)
def test_a_sample_decays_the_weights_by_the_same_amount_at_every_batch(
    rule: str, batch: int, reference: int, noise_scale: float | None
) -> None:
    scales = setting(rule, reference).scales(batch, noise_scale)
    if rule == "none":
        assert scales == Scales(kappa=scales.kappa)
    else:
        assert scales.lr * scales.weight_decay == pytest.approx(scales.kappa)
