"""What moves with the batch: learning rate, beta2, Adam's state, epsilon, weight decay, clipping; as pure numbers.

Everything is relative to the *reference batch*, the global batch at which the configured values hold. With
kappa = batch / reference batch and the gain r of the rule:

    learning rate   eta * r
    beta2           beta2 ** kappa               (constant memory in samples; Adam only)
    step counter    t / kappa                    (so that beta2 ** t, its bias correction, stays; Adam only)
    second moment   noise part / kappa           (see ``adabatch.optimizers.state``; Adam only)
    momentum buffer b / r                        (what past gradients still have to move stays; SGD only)
    epsilon         eps / sqrt(kappa)            (Malladi et al. 2022, arXiv 2205.10287; Adam only)
    weight decay    lambda * kappa / r           (constant decay per sample; Wang & Aitchison 2024, arXiv 2405.13698)
    clip threshold  c * sqrt((1 + B_noise / B) / (1 + B_noise / B_ref))    (the expected gradient norm's ratio)

The gain of AdaScale (arXiv 2007.05105) equals McCandlish et al.'s learning-rate ratio (arXiv 1812.06162, eq. 2.6):
r = (1 + B_noise / B_ref) / (1 + B_noise / B). The best learning rate of sign-like steps such as Adam's is
eta_max / (0.5 (sqrt(B_noise / B) + sqrt(B / B_noise))) (Li et al. 2024, arXiv 2405.14578), with its maximum at B_noise:
relative to the reference batch that is r = sqrt(kappa) (B_noise + B_ref) / (B_noise + B), the rule ``surge``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from adabatch.plan import Scales


def gain(batch: float, reference: float, noise_scale: float | None) -> float:
    """AdaScale's gain: how many reference-batch steps one step of ``batch`` is worth, between 1 and kappa.

    An unbounded noise scale gives kappa. Without any estimate the more cautious of both limits is used.
    """
    kappa = batch / reference
    if noise_scale is None:
        return min(1.0, kappa)
    if math.isinf(noise_scale):
        return kappa
    return (1 + noise_scale / reference) / (1 + noise_scale / batch)


def _none(batch: float, reference: float, noise_scale: float | None, exponent: float) -> float:
    return 1.0


def _linear(batch: float, reference: float, noise_scale: float | None, exponent: float) -> float:
    return batch / reference


def _sqrt(batch: float, reference: float, noise_scale: float | None, exponent: float) -> float:
    return math.sqrt(batch / reference)


def _adascale(batch: float, reference: float, noise_scale: float | None, exponent: float) -> float:
    return gain(batch, reference, noise_scale)


def _gain_power(batch: float, reference: float, noise_scale: float | None, exponent: float) -> float:
    return gain(batch, reference, noise_scale) ** exponent


def _surge(batch: float, reference: float, noise_scale: float | None, exponent: float) -> float:
    """The square root far below the noise scale, falling above it; without an estimate it does not rise."""
    root = math.sqrt(batch / reference)
    if noise_scale is None:
        return min(1.0, root)
    return root if math.isinf(noise_scale) else root * ((noise_scale + reference) / (noise_scale + batch))


RULES: dict[str, Callable[[float, float, float | None, float], float]] = {
    "none": _none,
    "linear": _linear,
    "sqrt": _sqrt,
    "adascale": _adascale,
    "gain_power": _gain_power,
    "surge": _surge,
}

# The rule for each kind of optimizer that we know; an unknown one is observed only.
DEFAULT_RULES = {"adam": "sqrt", "sgd": "adascale", "muon": "sqrt"}


@dataclass(frozen=True, slots=True)
class Scaling:
    """A learning-rate rule with its companions.

    Args:
        rule: one of ``none``, ``linear``, ``sqrt``, ``adascale``, ``gain_power``, ``surge``.
        reference_batch: global batch at which the configured learning rate, beta2 and weight decay hold.
        exponent: power of the gain for ``gain_power``: 1 for SGD, 0.5 for Adam.
        beta1, beta2, eps, weight_decay, clip: whether each companion moves with the batch. Betas and epsilon concern
            Adam-like optimizers only; the momentum factor of SGD and Muon stays, and so does Adam's by default (both were
            compared in docs/results/beta1.md).

    Raises:
        ValueError: for an unknown rule, a reference batch below 1 or an exponent outside (0, 1].
    """

    rule: str
    reference_batch: int
    exponent: float = 0.5
    beta1: bool = False
    beta2: bool = True
    eps: bool = True
    weight_decay: bool = True
    clip: bool = True

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"scaling.rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        if self.reference_batch < 1:
            raise ValueError(f"scaling.reference_batch must be at least 1, got {self.reference_batch}")
        if not 0 < self.exponent <= 1:
            raise ValueError(f"scaling.exponent must be in (0, 1], got {self.exponent}")

    def scales(self, batch: int, noise_scale: float | None) -> Scales:
        """The multipliers at ``batch``, with the noise scale recorded at the last change of the batch.

        A noise scale that is negative or no number counts as none.
        """
        noise_scale = noise_scale if noise_scale is not None and noise_scale >= 0 else None
        kappa = batch / self.reference_batch
        if self.rule == "none":
            return Scales(kappa=kappa)
        lr = RULES[self.rule](batch, self.reference_batch, noise_scale, self.exponent)
        return Scales(
            kappa=kappa,
            lr=lr,
            beta1_exponent=kappa if self.beta1 else 1.0,
            beta2_exponent=kappa if self.beta2 else 1.0,
            eps=1 / math.sqrt(kappa) if self.eps else 1.0,
            weight_decay=kappa / lr if self.weight_decay else 1.0,
            clip=self._clip(batch, noise_scale) if self.clip else 1.0,
            second_moment=1.0,
            step_counter=kappa if self.beta2 else 1.0,
            momentum_buffer=lr,
        )

    def _clip(self, batch: int, noise_scale: float | None) -> float:
        if noise_scale is None:
            return 1.0
        if math.isinf(noise_scale):
            return math.sqrt(self.reference_batch / batch)
        return math.sqrt((1 + noise_scale / batch) / (1 + noise_scale / self.reference_batch))


def scales_of(
    scaling: Scaling | Mapping[str, Scaling] | None, batch: int, noise_scale: float | None
) -> tuple[Scales, dict[str, Scales]]:
    """What ``BatchPlan`` takes as ``scales`` and ``by_kind``: of one rule for everything, or of several by kind.

    Of several the first holds for what has no kind among them, and for clipping.
    """
    if isinstance(scaling, Scaling):
        return scaling.scales(batch, noise_scale), {}
    by_kind = {kind: one.scales(batch, noise_scale) for kind, one in (scaling or {}).items()}
    first = next(iter(by_kind.values()), Scales())
    return first, by_kind if len(by_kind) > 1 else {}


def decay_for(decay: float, kappa: float) -> float:
    """A per-step decay such as an EMA's, kept constant per sample: ``decay ** kappa`` (0.999 at 4x is 0.996006)."""
    if not 0 <= decay < 1 or kappa <= 0:
        raise ValueError(f"a decay is in [0, 1) and kappa above 0, got {decay=} {kappa=}")
    return decay**kappa
