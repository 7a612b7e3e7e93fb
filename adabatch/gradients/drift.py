"""The product of the mean gradient with the optimizer's momentum: does training still go where it went?

The momentum is an average of past gradients, whose noise is independent of the present window's. The expected product
is therefore the part of |G|^2 that persists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from adabatch.gradients.rulers import summed
from adabatch.gradients.sharding import local

# Elements that are multiplied at once.
PART = 262_144


def product(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> Tensor | None:
    """Sum of gradient times average past gradient over all parameters that have both, a scalar in double precision.

    The average past gradient is Adam's first moment over 1 - beta1^t, and (1 - mu) times SGD's or Muon's momentum
    buffer, whose weights sum to 1/(1 - mu); with ``maximize`` they average the negative. ``None`` when no optimizer keeps a momentum (yet), on all ranks alike.
    """
    products = [
        _dot(_flat(gradient), _flat(momentum)) * scale
        for optimizer in optimizers
        for gradient, momentum, scale in _pairs(optimizer)
    ]
    return summed([one.double() for one in products], device) if products else None


def _pairs(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor, float | Tensor]]:
    """Gradient, momentum, and what makes the momentum an average."""
    for group in optimizer.param_groups:
        sign = -1 if group.get("maximize") else 1
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if parameter.grad is None:
                continue
            if "exp_avg" in state and "step" in state:
                yield local(parameter.grad), local(state["exp_avg"]), sign / (1 - group["betas"][0] ** state["step"])
            elif state.get("momentum_buffer") is not None:
                yield local(parameter.grad), local(state["momentum_buffer"]), sign * (1 - group["momentum"])


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """In parts, which need no memory to speak of; by sums, as in ``preconditioned``, and not by BLAS."""
    parts = [(one * other).sum() for one, other in zip(left.split(PART), right.split(PART))]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _flat(tensor: Tensor) -> Tensor:
    """All real numbers of a tensor in a row, in single precision at least: half-precision sums would lose the product."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).to(torch.promote_types(real.dtype, torch.float32))
