"""What spoils a measurement without an error: randomness that ranks share, and losses that are no means over samples."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from adabatch import distributed
from adabatch.gradients.layout import Layout

# How far the gradient of a mean may be from the mean of the gradients of its halves, relative to its length: single
# precision leaves 1e-5, and batch statistics make whole tenths.
TOLERANCE = 1e-2


class NotAMean(ValueError):
    """The loss of a micro-batch is not the mean of its samples' losses."""


MeanLoss = Callable[[nn.Module, Any], tuple[Tensor, float | Tensor | None]]


def batch_normalised(model: nn.Module) -> list[str]:
    """Names of the modules that normalise by statistics of the micro-batch while they train."""
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]


def refuse_shared_statistics(model: nn.Module, layout: Layout) -> None:
    """Groups must be independent, and SyncBatchNorm lets every rank's samples into every rank's gradient.

    Raises:
        ValueError: naming the first such module.
    """
    for name, module in model.named_modules():
        if layout.world > 1 and isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"{name or 'the model'} is a SyncBatchNorm: its statistics are shared by all {layout.world} ranks, so "
                f"their gradients are not independent and cannot be compared; use BatchNorm with rounding='whole', or "
                f"a normalisation of single samples (GroupNorm, LayerNorm)"
            )


def require_own_dropout(model: nn.Module, layout: Layout) -> None:
    """On several ranks, dropout must not drop the same units everywhere. Collective: every rank calls it.

    Raises:
        ValueError: on every rank, when two ranks' random states are equal and the model drops units.
    """
    drops = any(isinstance(module, _DropoutNd) and module.training and module.p > 0 for module in model.modules())
    if not drops or layout.world == 1:
        return
    state = torch.cuda.get_rng_state(layout.device) if layout.device.type == "cuda" else torch.get_rng_state()
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=6).digest()
    mine = torch.tensor([int.from_bytes(digest)], device=layout.device)
    states, arrive = distributed.start_gather(mine, layout.group)
    arrive()
    ranks: dict[int, int] = {}
    for rank, (state,) in enumerate(states.tolist()):
        if state in ranks:
            raise ValueError(
                f"ranks {ranks[state]} and {rank} have the same random state, so their dropout drops the same units and "
                f"their gradients look more alike than they are; seed every rank differently after the model is made, "
                f"such as torch.manual_seed(seed + rank)"
            )
        ranks[state] = rank


def require_mean(model: nn.Module, loss: MeanLoss, halves: Sequence[Any], whole: Any) -> float:
    """Check that the loss is a mean over independent samples: one gradient of all is the mean of the halves' gradients.

    A contrastive loss or an auxiliary loss over the batch fails. The model runs in evaluation mode, where two runs of
    one sample agree; its mode and gradients are left as they were.

    Args:
        model: the plain module; nothing is synchronised.
        loss: mean loss of a micro-batch and what the mean was taken over (``None``: samples, and equal halves).
        halves: the micro-batch in two equal parts.
        whole: the same samples at once.

    Returns:
        The relative difference of the two gradients.

    Raises:
        NotAMean: when it is above ``TOLERANCE``, with the remedies.
    """
    kept = [parameter.grad for parameter in model.parameters()]
    was_training = model.training
    model.eval()
    try:
        together, _ = _gradient(model, loss, whole)
        parts = [_gradient(model, loss, half) for half in halves]
    finally:
        model.train(was_training)
        for parameter, gradient in zip(model.parameters(), kept):
            parameter.grad = gradient
    total = sum(weight for _, weight in parts)
    if not total > 0:
        return 0.0
    apart = [sum(gradient[i] * (weight / total) for gradient, weight in parts) for i in range(len(together))]
    length = math.sqrt(sum(gradient.square().sum().item() for gradient in together))
    difference = math.sqrt(sum((a - b).square().sum().item() for a, b in zip(together, apart)))
    relative = difference / length if length > 0 else 0.0
    if relative > TOLERANCE:
        raise NotAMean(
            f"the gradient of a micro-batch is not the mean of its halves' gradients: they differ by {relative:.0%}. The "
            f"loss is no mean over independent samples (contrastive or auxiliary terms over the batch, or a weight that "
            f"is not what the mean was taken over), so splitting a batch changes the gradient and its noise cannot be "
            f"measured; return the right weight, or train with policy=fixed, noise=off and noise.require_mean=false"
        )
    return relative


def _gradient(model: nn.Module, loss: MeanLoss, data: Any) -> tuple[list[Tensor], float]:
    """Gradient by parameter in double precision, and the weight of the mean."""
    model.zero_grad(set_to_none=True)
    mean_loss, weight = loss(model, data)
    mean_loss.backward()
    gradients = [
        torch.zeros_like(parameter, dtype=torch.float64) if parameter.grad is None else parameter.grad.double()
        for parameter in model.parameters()
    ]
    return gradients, 1.0 if weight is None else float(weight)
