"""The literature's rules, against their own statistics on drawn gradients, their own steps, and published figures."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from adabatch.noise import Estimate
from adabatch.plan import BatchLimits
from adabatch.policies import (
    Cabs,
    CosineTest,
    Damping,
    Facts,
    InnerProductTest,
    LossLaw,
    NormTest,
    Policy,
    Situation,
    Wanted,
)
from adabatch.progress import Progress
from adabatch.schedules import Schedule
from adabatch.verdicts import verdict

RESOLVED = Estimate(
    signal=0.5, noise=200.0, scale=400.0, low=100.0, high=900.0, resolved=True, samples=4096, steps=64, memory=4096
)
UNRESOLVED = replace(RESOLVED, signal=-0.1, scale=math.inf, low=36.0, high=math.inf, resolved=False)


def wants(
    policy: Policy, estimate: Estimate | None = None, *, batch: int = 16, loss: float | None = None, at: int = 0
) -> Wanted:
    wanted = policy.value(policy.init(), Facts(Progress(0, at), batch, estimate, loss))
    assert wanted is not None
    return wanted


def drawn(batch: int, noise: float, dimensions: int, draws: random.Random) -> list[float]:
    """The mean gradient of ``batch`` samples: the true one is (1, 0, 0, ...)."""
    spread = math.sqrt(noise / dimensions / batch)
    return [float(not index) + draws.gauss(0.0, spread) for index in range(dimensions)]


def dot(one: list[float], other: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other))


# -- the norm test


@pytest.mark.parametrize("tolerance", [0.275, 0.5, 0.7, 0.9])
def test_the_norm_test_rests_where_the_papers_own_steps_do(tolerance: float) -> None:
    """b <- S / (tolerance^2 |g|^2), with |g|^2 = G^2 + S/b as a batch of b has it."""
    batch = 4.0
    for _ in range(400):
        batch = RESOLVED.noise / (tolerance**2 * (RESOLVED.signal + RESOLVED.noise / batch))
    wanted = wants(NormTest(tolerance), RESOLVED)
    assert wanted.batch == pytest.approx(batch)
    assert 1 / (1 + wanted.batch / RESOLVED.scale) == pytest.approx(tolerance**2), "the data efficiency"
    assert (wanted.low, wanted.high) == pytest.approx((batch / 4, batch * 900 / 400))


def test_the_norm_test_passes_on_drawn_gradients_from_the_wanted_batch_on() -> None:
    noise, dimensions, draws = 60.0, 100, random.Random(3)
    estimate = replace(RESOLVED, signal=1.0, noise=noise, scale=noise, low=noise, high=noise)
    wanted = round(wants(NormTest(0.6), estimate).batch)
    for batch, passes in ((wanted // 2, False), (wanted * 2, True)):
        gradients = [drawn(batch, noise, dimensions, draws) for _ in range(200)]
        mean_square = math.fsum(dot(gradient, gradient) for gradient in gradients) / len(gradients)
        assert (noise / batch <= 0.6**2 * mean_square) == passes


def test_the_reason_shows_the_test_and_the_tolerance_as_an_efficiency() -> None:
    assert wants(NormTest(0.5), RESOLVED, batch=400).reason == (
        "noise scale 400 [100, 900]: noise is 0.5 of |g|^2 at batch 400, the norm test at 0.5 allows 0.25 "
        "(data efficiency 0.25, uncalibrated),"
    )


@pytest.mark.parametrize("policy", [NormTest(0.5), InnerProductTest(0.9), CosineTest(0.3)])
def test_an_unresolved_scale_counts_as_its_lower_bound(policy: Policy) -> None:
    wanted, scaled = wants(policy, UNRESOLVED), wants(policy, RESOLVED)
    assert wanted.batch == wanted.low == pytest.approx(scaled.batch * 36 / 400)
    assert not wanted.resolved
    assert policy.value(policy.init(), Facts(Progress(), 16)) is None


# -- the inner-product test


def test_the_inner_product_test_passes_on_drawn_gradients_at_the_wanted_batch_even_where_all_noise_is_along() -> None:
    """Noise along the gradient alone is the worst case, in which the bound is tight up to the noise in |g|."""
    tolerance, noise, draws = 0.6, 60.0, random.Random(4)
    estimate = replace(RESOLVED, signal=1.0, noise=noise, scale=noise, low=noise, high=noise)
    wanted = round(wants(InnerProductTest(tolerance), estimate).batch)
    for dimensions in (1, 50):
        means = [drawn(wanted, noise, dimensions, draws) for _ in range(4000)]
        along = noise / dimensions  # of one sample, in every direction
        variance = math.fsum(along * dot(mean, mean) for mean in means) / len(means) / wanted
        fourth = (math.fsum(dot(mean, mean) for mean in means) / len(means)) ** 2
        assert variance <= tolerance**2 * fourth * 1.02
    assert wanted == round(wants(NormTest(tolerance), estimate).batch)
    reason = wants(InnerProductTest(0.6), estimate).reason
    assert "the inner-product test at 0.6, bounded by the norm test, allows 0.36" in reason


# -- the cosine test


@pytest.mark.parametrize("similarity", [0.1, 1 / 3, 0.8])
def test_the_two_halves_of_the_wanted_batch_have_the_cosine(similarity: float) -> None:
    noise, dimensions, draws = 40.0, 300, random.Random(5)
    estimate = replace(RESOLVED, signal=1.0, noise=noise, scale=noise, low=noise, high=noise)
    wanted = wants(CosineTest(similarity), estimate)
    half = round(wanted.batch / 2)
    cosines = []
    for _ in range(300):
        one, other = (drawn(half, noise, dimensions, draws) for _ in range(2))
        cosines.append(dot(one, other) / math.sqrt(dot(one, one) * dot(other, other)))
    assert math.fsum(cosines) / len(cosines) == pytest.approx(similarity, abs=0.025)
    assert 1 / (1 + wanted.batch / noise) == pytest.approx((1 - similarity) / (1 + similarity))


def test_the_cosine_at_the_present_batch_is_in_the_reason() -> None:
    reason = wants(CosineTest(0.5), RESOLVED, batch=200).reason
    assert "cosine of two halves is about 0.2 at batch 200, 0.5 is aimed for" in reason
    assert "(data efficiency 0.33, uncalibrated)" in reason


# -- noise over loss


def test_cabs_is_rate_times_noise_over_loss() -> None:
    wanted = wants(Cabs(0.1), RESOLVED, loss=2.0)
    assert wanted == Wanted(10.0, 10.0, 10.0, "learning rate 0.1 x noise 200 / loss 2, data efficiency 0.98")
    unresolved = wants(Cabs(0.1), UNRESOLVED, loss=2.0)
    assert (unresolved.batch, unresolved.low, unresolved.high) == (10.0, 10.0, math.inf)


def test_cabs_follows_the_schedule() -> None:
    policy = Cabs(0.1, Schedule("linear", horizon=1000))
    assert wants(policy, RESOLVED, loss=2.0, at=750).batch == pytest.approx(2.5)
    assert wants(policy, RESOLVED, loss=2.0, at=1000).batch == 0.0


@pytest.mark.parametrize("policy", [Cabs(0.1), LossLaw(64, 3.0)])
@pytest.mark.parametrize("loss", [0.0, -1.0, math.nan, math.inf])
def test_no_batch_follows_from_a_loss_that_is_not_above_0(policy: Policy, loss: float) -> None:
    found = verdict(
        wants(policy, RESOLVED, loss=loss), Situation(16, 10**6, 0, warming_up=False), Damping(), BatchLimits(1, 4)
    )
    assert (found.batch, found.kind, found.wanted) == (16, "invalid", None)
    assert found.reason == f"hold 16: training loss {loss:.4g} is not above 0 and finite; no batch follows from that"


@pytest.mark.parametrize("policy", [Cabs(0.1), LossLaw(64, 3.0)])
def test_without_a_loss_nothing_is_wanted(policy: Policy) -> None:
    assert policy.value({}, Facts(Progress(), 16, RESOLVED)) is None
    assert Cabs(0.1).value({}, Facts(Progress(), 16, None, 2.0)) is None


# -- the loss law


@pytest.mark.parametrize(("loss", "millions"), [(4.0, 0.27), (3.0, 1.07), (2.2, 4.7)])
def test_the_law_of_language_models(loss: float, millions: float) -> None:
    """B* / L^(1/0.21) with B* = 2e8 tokens (arXiv 2001.08361)."""
    law = LossLaw(200_000_000, 1.0, exponent=1 / 0.21)
    assert wants(law, loss=loss).batch / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize(("loss", "millions"), [(1.98, 32), (1.77, 64), (1.58, 128)])
def test_the_stages_of_minimax(loss: float, millions: float) -> None:
    law = LossLaw(16_000_000, 2.22, exponent=6.1)
    assert wants(law, loss=loss).batch / 1e6 == pytest.approx(millions, rel=0.02)


def test_a_loss_near_0_asks_for_more_than_floats_hold() -> None:
    assert wants(LossLaw(64, 3.0), loss=1e-300).batch == math.inf
    assert wants(LossLaw(64, 3.0), loss=1e300).batch == 0.0


# -- what is refused


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NormTest(1.0), r"policy.tolerance .* \(tolerance of 1 or more passes at every batch\), got 1.0"),
        (lambda: NormTest(math.nan), "got nan"),
        (lambda: InnerProductTest(0.0), "got 0.0"),
        (lambda: CosineTest(1.0), "similarity of 1 needs an infinite batch"),
        (lambda: Cabs(0.0), "above 0, got 0.0; set it to optimizer.lr"),
        (lambda: Cabs(math.inf), "got inf"),
        (lambda: LossLaw(0, 3.0), "must be above 0, got 0, 3, 4.76; take the first two from"),
        (lambda: LossLaw(64, math.nan), "got 64, nan"),
        (lambda: LossLaw(64, 3.0, exponent=-1.0), "got 64, 3, -1"),
    ],
)
def test_settings_out_of_range_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
