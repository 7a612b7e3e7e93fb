"""How much each example counts where every example is a group."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def example_weights(
    weight: float | Tensor, samples: int, sample_weights: Tensor | None = None
) -> tuple[float | Tensor, float | Tensor]:
    """Number of groups in a micro-batch whose groups are its examples, and the sum of their squared weights.

    Args:
        weight: of the micro-batch's mean loss; 0 for a filler, which has no groups.
        samples: in it, all of the same weight unless ``sample_weights`` says otherwise.
        sample_weights: how much each example counts in the mean, (examples,), such as its tokens; only ratios matter.

    Returns:
        Numbers, or scalars on the device when a weight is there.

    Raises:
        ValueError: for weights that are not one per example, or, where the host can see it, negative or all 0.
    """
    if not isinstance(weight, Tensor) and weight == 0:
        return 0.0, 0.0
    if sample_weights is None:
        groups, share = float(samples), 1.0 / max(samples, 1)
    else:
        groups, share = _shares(sample_weights)
    if isinstance(weight, Tensor):
        return groups * (weight > 0), share * weight.square()
    return groups, share * weight * weight


def _shares(sample_weights: Tensor) -> tuple[float | Tensor, float | Tensor]:
    """How many weights are above 0, and the sum of the squared weights when all sum to 1; 0 on a device for no sum."""
    if sample_weights.dim() != 1:
        raise ValueError(f"sample_weights must have shape (examples,), got {tuple(sample_weights.shape)}")
    weights = sample_weights.detach().double()
    total, square, groups = weights.sum(), weights.square().sum(), (weights > 0).sum()
    if weights.device.type != "cpu":
        return groups, torch.where(total > 0, square / total.square(), 0.0)
    if not ((weights >= 0).all() and 0 < total < math.inf):
        raise ValueError(f"sample_weights must be finite, 0 or more and not all 0, got {sample_weights.tolist()}")
    return groups.item(), (square / total.square()).item()
