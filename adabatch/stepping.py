"""One optimizer step's two halves, for whoever trains: backward of a micro-batch, and from a full window to the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from adabatch import gradients, optimizers
from adabatch.plan import BatchPlan

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class LossFunction(Protocol):
    """Mean loss of a micro-batch and its weight: samples (``None``), or tokens for a mean over tokens."""

    def __call__(self, model: nn.Module, data: Any) -> tuple[torch.Tensor, float | torch.Tensor | None]: ...


def backward(
    window: gradients.Window,
    micro_batch: Any,
    *,
    model: nn.Module,
    loss: LossFunction,
    device: torch.device,
    precision: str = "fp32",
    scaler: torch.amp.GradScaler | None = None,
) -> float | torch.Tensor | None:
    """Forward and backward of one micro-batch of a stream, within its window; returns its weight."""
    dtype = PRECISIONS[precision]
    with window.micro_batch():
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            mean_loss, weight = loss(model, to_device(micro_batch.data, device))
        weight = weight if micro_batch.samples else 0
        window.backward(mean_loss, samples=micro_batch.samples, weight=weight, scaler=scaler)
    return weight


def finish(
    window: gradients.Window,
    plan: BatchPlan,
    optimizer: optimizers.Optimizers,
    *,
    clip_norm: float | None,
    scaler: torch.amp.GradScaler | None = None,
    exchange: bool = True,
    pause: int = 0,
) -> gradients.Outcome:
    """Normalise, measure and clip a full window, and step at the plan's scales; gradients are dropped then.

    Args:
        clip_norm: gradient-norm threshold at the reference batch.
        scaler, exchange, pause: as for ``window.finish``.
    """
    outcome = window.finish(
        optimizer,
        max_norm=clip_norm * plan.scales.clip if clip_norm else None,
        scaler=scaler,
        exchange=exchange,
        pause=pause,
    )
    optimizers.apply(plan, optimizer)
    outcome.step()
    for one in optimizers.each(optimizer):
        one.zero_grad()
    return outcome


def to_device(data: Any, device: torch.device) -> Any:
    """``data``, a tensor or a nest of tuples, lists and dicts of tensors, on ``device``."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, Mapping):
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        return type(data)(to_device(value, device) for value in data)
    return data
