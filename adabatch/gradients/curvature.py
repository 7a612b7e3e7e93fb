"""The Hessian-weighted noise scale tr(H Sigma) / (G'HG) of one model state, by Hessian-vector products.

An offline diagnostic, for a checkpoint: a simple noise scale equals this one only where the Hessian is a multiple of
the identity. Micro-batches are used up in sets. Of each set, two groups give a gradient each, and the micro-batches
after them, which neither gradient has seen, give the Hessian:

    pieces = ((piece.data, piece.samples) for piece in stream.take(plan))
    estimate = hessian_noise_scale(model, loss, pieces, per_group=4)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from adabatch.gradients.derivatives import Gradient, Loss, MicroBatch, Subject, along, dot, wide
from adabatch.noise import student_quantile

# With fewer sets than this, their variance is too uncertain to close an interval.
FEWEST_SETS = 8

_LINEAR = "all products with the Hessian are 0: the loss is linear in the parameters here"


@dataclass(frozen=True, slots=True)
class CurvatureEstimate:
    """The Hessian-weighted noise scale of one model state.

    Attributes:
        signal: G'HG, the curvature along the mean gradient.
        noise: tr(H Sigma) for the gradient covariance Sigma of one sample.
        scale: noise / signal in samples; inf while unresolved without a signal above 0, NaN where undefined.
        low, high: confidence interval of the scale, cut to [0, inf]; high is inf while unresolved.
        state: ``resolved``, ``unresolved`` (more samples may tell) or ``undefined`` (there is no such scale here).
        reason: why it is not resolved; empty where it is.
        simple: tr(Sigma) / |G|^2 of the same gradients, for comparison; inf when its |G|^2 is not above 0.
        samples: samples that the gradients were taken of.
        curvature_samples: samples that the Hessian was taken of.
        sets: independent sets of micro-batches that were averaged over.
    """

    signal: float
    noise: float
    scale: float
    low: float
    high: float
    state: str
    reason: str
    simple: float
    samples: int
    curvature_samples: int
    sets: int

    def to_dict(self) -> dict[str, Any]:
        """A dict for JSON, which has no infinity and no NaN: both are written as None."""
        values = asdict(self).items()
        return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values}


def hessian_noise_scale(
    model: nn.Module,
    loss: Loss,
    micro_batches: Iterable[MicroBatch],
    *,
    per_group: int = 1,
    per_hessian: int = 1,
    confidence: float = 0.95,
    custom_functions: bool = False,
) -> CurvatureEstimate:
    """Estimate B_noise = tr(H Sigma) / (G'HG) at the model's present weights (arXiv 1812.06162, section 2.2).

    A set's groups have the mean gradients g and f, of n samples each. With a Hessian from other samples, g'Hf is
    unbiased for G'HG, and g'Hg for G'HG + tr(H Sigma) / n; were the Hessian taken of the same samples, it would
    correlate with their gradients. Both are averaged over sets and divided last. The interval is Fieller's, from the
    scatter of the sets, which are independent when no sample comes twice.

    The relative error of tr(H Sigma) is about sqrt(2 / (d sets)) with d = (tr H Sigma)^2 / tr(H Sigma H Sigma). That of
    G'HG falls with the root of the number of sets, too, and with the size of the groups itself as long as they are
    smaller than the noise scale: of many samples, make 16 to 64 sets by raising ``per_group``. A set costs
    2 ``per_group`` backward passes and about four times as much for each of the ``per_hessian``. Memory: two gradients,
    the graph of one backward pass with its own gradient, and one Hessian-vector product.

    The model runs in evaluation mode, so that dropout is off and batch norms use their running statistics; its modes,
    parameters and ``.grad`` are left as they were. Attention runs on PyTorch's math kernel, the others have no second
    derivative. Piecewise linear models have the Hessian of their linear pieces, without the kinks.

    Args:
        model: a plain module in one process, compiled or not.
        loss: mean loss of a micro-batch and its weight, as in the training loop; ``None`` weighs samples.
        micro_batches: (data, samples) of each; what is left after the last whole set is not used.
        per_group: micro-batches of each of a set's two gradients.
        per_hessian: micro-batches of a set's Hessian.
        confidence: coverage of the interval.
        custom_functions: go on with the model's own ``torch.autograd.Function``s. PyTorch cannot tell whether their
            backward has a derivative: where it is a kernel of its own, their curvature is silently left out.

    Raises:
        ValueError: for fewer than two sets, wrapped models, arguments outside their range, values that are not
            finite, and models or losses that cannot be differentiated twice or that hold functions of their own.
    """
    for name, value in (("per_group", per_group), ("per_hessian", per_hessian)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1 micro-batch, got {value}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    subject = Subject(model, loss, custom_functions)
    source, sets = iter(micro_batches), []
    with subject.prepared():
        while (one := _one_set(subject, source, per_group, per_hessian)) is not None:
            sets.append(one)
    if len(sets) < 2:
        raise ValueError(
            f"{len(sets)} whole sets of {2 * per_group + per_hessian} micro-batches came in, and 2 are the least (an "
            f"interval takes {FEWEST_SETS}); give more micro-batches, or lower per_group={per_group} or "
            f"per_hessian={per_hessian}"
        )
    return _estimate(sets, confidence)


@dataclass(frozen=True, slots=True)
class _Group:
    """Some micro-batches: the gradient of their weighted mean loss, their weight and samples."""

    gradient: Gradient
    weight: float
    samples: int


@dataclass(frozen=True, slots=True)
class _Set:
    """What one set says: (signal, noise) with the Hessian and without, and its samples."""

    curved: tuple[float, float]
    plain: tuple[float, float]
    samples: int
    curvature_samples: int


def _one_set(subject: Subject, source: Iterator[MicroBatch], per_group: int, per_hessian: int) -> _Set | None:
    """What the next micro-batches say; ``None`` when there are not enough."""
    groups = []
    for _ in range(2):
        if (taken := _take(source, per_group)) is None:
            return None
        groups.append(_mean_gradient(subject, taken))
    if (taken := _take(source, per_hessian)) is None:
        return None
    first, second = (group.gradient for group in groups)
    curved = _signal_and_noise(groups, *_curved_products(subject, taken, first, second))
    plain = _signal_and_noise(groups, dot(first, first), dot(second, second), dot(first, second))
    samples, curvature_samples = sum(group.samples for group in groups), sum(samples for _, samples in taken)
    if not all(map(math.isfinite, (*curved, *plain))):
        raise ValueError(
            f"a set of {samples} + {curvature_samples} samples is not finite: G'HG {curved[0]}, tr(H Sigma) "
            f"{curved[1]}, |G|^2 {plain[0]}, tr(Sigma) {plain[1]}"
        )
    return _Set(curved, plain, samples, curvature_samples)


def _take(source: Iterator[MicroBatch], count: int) -> list[MicroBatch] | None:
    taken = list(islice(source, count))
    return taken if len(taken) == count else None


def _signal_and_noise(
    groups: Sequence[_Group], own_first: float, own_second: float, cross: float
) -> tuple[float, float]:
    """G'MG and tr(M Sigma) for a matrix M, from g'Mg, f'Mf and g'Mf of two groups' gradients.

    As a window of training is measured: with p the groups' shares of the weight and m = p_1 g + p_2 f, V = m'Mm - G'MG
    is the noise of m, and N V that of one sample.
    """
    weight, samples = sum(group.weight for group in groups), sum(group.samples for group in groups)
    first, second = (group.weight / weight for group in groups)
    return cross, samples * (first**2 * (own_first - cross) + second**2 * (own_second - cross))


def _mean_gradient(subject: Subject, micro_batches: Sequence[MicroBatch]) -> _Group:
    total = [torch.zeros_like(parameter, dtype=wide(parameter)) for parameter in subject.parameters]
    weight = 0.0
    for micro_batch in micro_batches:
        value, own = subject.mean_loss(micro_batch)
        if own == 0.0:  # a mean over nothing is not a number
            continue
        for part, gradient in zip(total, subject.gradient(value), strict=True):
            part.add_(gradient, alpha=own)
        weight += own
    for part in total:
        part.div_(_positive(weight, "per_group"))
    return _Group(total, weight, sum(samples for _, samples in micro_batches))


def _curved_products(
    subject: Subject, micro_batches: Sequence[MicroBatch], first: Gradient, second: Gradient
) -> tuple[float, float, float]:
    """g'Hg, f'Hf and g'Hf with the Hessian of the weighted mean loss."""
    sums, weight = [0.0, 0.0, 0.0], 0.0
    for micro_batch in micro_batches:
        value, own = subject.mean_loss(micro_batch)
        if own == 0.0:
            continue
        gradient = subject.gradient(value, again=True)
        curved = subject.curve(along(gradient, first))
        sums[0] += own * dot(curved, first)
        sums[2] += own * dot(curved, second)
        curved = subject.curve(along(gradient, second))
        sums[1] += own * dot(curved, second)
        weight += own
    own_first, own_second, cross = (total / _positive(weight, "per_hessian") for total in sums)
    return own_first, own_second, cross


def _positive(weight: float, count: str) -> float:
    if not 0.0 < weight < math.inf:
        raise ValueError(f"micro-batches in a row have the weight {weight}; leave out empty ones, or raise {count}")
    return weight


def _estimate(sets: Sequence[_Set], confidence: float) -> CurvatureEstimate:
    signal, noise, low, high = mean_ratio([one.curved for one in sets], confidence)
    curved = any(one.curved != (0.0, 0.0) for one in sets)
    state, reason = _judged(signal, noise, high, len(sets)) if curved else ("undefined", _LINEAR)
    scale = math.inf if signal <= 0.0 else max(noise, 0.0) / signal
    plain_signal, plain_noise, *_ = mean_ratio([one.plain for one in sets], confidence)
    return CurvatureEstimate(
        signal=signal,
        noise=noise,
        scale=math.nan if state == "undefined" else scale,
        low=math.nan if state == "undefined" else low,
        high=high if state == "resolved" else math.nan if state == "undefined" else math.inf,
        state=state,
        reason=reason,
        simple=max(plain_noise, 0.0) / plain_signal if plain_signal > 0.0 else math.inf,
        samples=sum(one.samples for one in sets),
        curvature_samples=sum(one.curvature_samples for one in sets),
        sets=len(sets),
    )


def _judged(signal: float, noise: float, high: float, sets: int) -> tuple[str, str]:
    """The state of an estimate, and why it is not resolved."""
    if math.isnan(high):
        return "undefined", f"G'HG = {signal:.3g} is below 0: the loss curves downwards along its gradient"
    if high == 0.0:
        return "undefined", f"tr(H Sigma) = {noise:.3g} is below 0: the loss curves downwards along its gradient noise"
    if sets < FEWEST_SETS:
        return "unresolved", f"an interval takes {FEWEST_SETS} sets, and there are {sets}; give more micro-batches"
    if math.isinf(high):
        return "unresolved", "G'HG is not distinguishable from 0; give more micro-batches and raise per_group"
    return "resolved", ""


def mean_ratio(rows: Sequence[tuple[float, float]], confidence: float) -> tuple[float, float, float, float]:
    """Means of independent (signal, noise), and Fieller's interval of the ratio of expected noise to expected signal.

    Args:
        rows: two or more.
        confidence: coverage of the interval, by Student's quantile.

    Returns:
        Mean signal, mean noise, and the interval's ends, cut to [0, inf]. The upper end is inf when the signal may be
        0: then the lower one bounds the ratio of a signal above 0. Both are NaN when the signal is below 0 for certain.
    """
    count = len(rows)
    unit = max(abs(value) for row in rows for value in row) or 1.0
    scaled = [(signal / unit, noise / unit) for signal, noise in rows]
    signal, noise = (math.fsum(column) / count for column in zip(*scaled, strict=True))
    spread = count * (count - 1)
    signal_variance = math.fsum((one - signal) ** 2 for one, _ in scaled) / spread
    noise_variance = math.fsum((one - noise) ** 2 for _, one in scaled) / spread
    covariance = math.fsum((one - signal) * (other - noise) for one, other in scaled) / spread
    t2 = student_quantile(0.5 + 0.5 * confidence, count - 1) ** 2
    if signal < 0.0 and signal * signal > t2 * signal_variance:
        return signal * unit, noise * unit, math.nan, math.nan
    low, high = _fieller(max(signal, 0.0), noise, t2 * signal_variance, t2 * noise_variance, t2 * covariance)
    return signal * unit, noise * unit, low, high


def _fieller(
    signal: float, noise: float, signal_margin: float, noise_margin: float, both: float
) -> tuple[float, float]:
    """The ratios R >= 0 with (noise - R signal)^2 within its margin, noise_margin - 2 R both + R^2 signal_margin."""
    cross = noise * signal - both
    signal_left = signal * signal - signal_margin
    noise_left = noise * noise - noise_margin
    root = math.sqrt(max(cross * cross - signal_left * noise_left, 0.0))
    if signal_left > 0.0:
        return max((cross - root) / signal_left, 0.0), max((cross + root) / signal_left, 0.0)
    if noise <= 0.0 or noise_left <= 0.0 or cross + root <= 0.0:
        return 0.0, math.inf
    return noise_left / (cross + root), math.inf
