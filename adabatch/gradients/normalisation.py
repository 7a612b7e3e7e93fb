"""Gradients of a normalisation layer's weight and bias, one for every example, from its input and delta.

With y = gamma * x_hat + beta and delta the gradient at y, example i has the gradient sum(delta * x_hat) for gamma and
sum(delta) for beta, over the positions of that example (arXiv 2411.00999).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from adabatch.gradients.layout import HALF, Layout

# From a module and its input to x_hat, the output without weight and bias, as a tensor of its own.
Normalise = Callable[[nn.Module, Tensor], Tensor]


def _layer_norm(module: nn.LayerNorm, inputs: Tensor) -> Tensor:
    # On a CPU torch 2.13 takes nearly twice as long without weight and bias (measured).
    neutral = _neutral(module.normalized_shape, inputs.dtype) if inputs.device.type == "cpu" else (None, None)
    return F.layer_norm(inputs, module.normalized_shape, *neutral, module.eps)


@lru_cache(maxsize=64)
def _neutral(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight and a bias that change nothing."""
    return torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)


def _rms_norm(module: nn.RMSNorm, inputs: Tensor) -> Tensor:
    return F.rms_norm(inputs, module.normalized_shape, eps=module.eps)


def _group_norm(module: nn.GroupNorm, inputs: Tensor) -> Tensor:
    return F.group_norm(inputs, module.num_groups, eps=module.eps)


NORMALISATIONS: Mapping[type[nn.Module], Normalise] = {
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
}


@dataclass(frozen=True, slots=True)
class NormLayer:
    """A normalisation layer that is trained.

    Attributes:
        indices: where its parameters are in ``Layout.parameters``, by attribute.
        dimension, rows: which dimension of its input counts examples, and how many neighbours along it are one.
    """

    name: str
    module: nn.Module
    normalise: Normalise
    indices: Mapping[str, int]
    dimension: int
    rows: int

    def __str__(self) -> str:
        return title(self.name, self.module)


def title(name: str, module: nn.Module) -> str:
    """How messages name a module."""
    return f"{type(module).__name__} ({name or 'the model itself'})"


def normalise_of(module: nn.Module, known: Mapping[type[nn.Module], Normalise]) -> Normalise | None:
    """How to normalise as ``module`` does; ``None`` for a module of another kind, or one with a forward of its own."""
    for kind, normalise in known.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return normalise
    return None


def affine_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weight and the bias of a normalisation layer, as far as they exist and are trained."""
    found = {name: getattr(module, name, None) for name in ("weight", "bias")}
    return {name: parameter for name, parameter in found.items() if parameter is not None and parameter.requires_grad}


def widened(tensor: Tensor) -> Tensor:
    """The tensor, in single precision when it was in half."""
    return tensor.float() if tensor.dtype in HALF else tensor


def affine_gradients(
    module: nn.Module,
    normalise: Normalise,
    inputs: Tensor | None,
    delta: Tensor,
    *,
    dimension: int = 0,
    rows: int = 1,
) -> dict[str, Tensor]:
    """The gradients of a normalisation layer's trained weight and bias, (examples, *parameter) each, at least fp32.

    Args:
        inputs: the layer's input; not looked at when the weight is not trained.
        delta: the loss's gradient at the layer's output, of the same shape.
        dimension: which one of ``delta`` counts examples.
        rows: how many neighbours along it are one example.
    """
    gradients = {}
    for name in affine_parameters(module):
        values = widened(delta)
        if name == "weight":
            # x_hat is a tensor of its own, so that its product with delta needs no other.
            normalised = normalise(module, widened(inputs))
            values = normalised.to(torch.promote_types(normalised.dtype, values.dtype)).mul_(values)
        gradients[name] = _per_example(module, values, dimension, rows)
    return gradients


def _per_example(module: nn.Module, values: Tensor, dimension: int, rows: int) -> Tensor:
    """``values`` summed over the positions of each example."""
    if isinstance(module, nn.GroupNorm):
        # It has a weight for each channel, which is dimension 1; the others have one for each of the last elements.
        values = values.flatten(2).movedim(1, -1) if values.dim() > 2 else values
    values = values.movedim(dimension, 0) if dimension else values
    values = values.unflatten(0, (len(values) // rows, rows)) if rows > 1 else values
    positions = tuple(range(1, values.dim() - module.weight.dim()))
    return values.sum(positions) if positions else values


def norm_layers(
    layout: Layout,
    model: nn.Module,
    dimension: int,
    rows: Mapping[str, int],
    normalisations: Mapping[type[nn.Module], Normalise],
) -> list[NormLayer]:
    """The model's trained normalisation layers.

    Raises:
        ValueError: when there is none, or ``rows`` names others.
    """
    places = {id(parameter): index for index, parameter in enumerate(layout.parameters)}
    layers = []
    for name, module in model.named_modules():
        normalise = normalise_of(module, normalisations)
        trained = affine_parameters(module) if normalise else {}
        if normalise and trained:
            indices = {attribute: places[id(parameter)] for attribute, parameter in trained.items()}
            along = 0 if isinstance(module, nn.GroupNorm) else dimension
            layers.append(NormLayer(name, module, normalise, indices, along, rows.get(name, 1)))
    kinds = ", ".join(kind.__name__ for kind in normalisations)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no {kinds} with a trained weight or bias, so no sample's gradient can be seen "
            f"in one; measure with kind='hooks'"
        )
    if unknown := sorted(rows.keys() - {layer.name for layer in layers}):
        raise ValueError(f"rows names {unknown}, but the trained layers are {[layer.name for layer in layers]}")
    if bad := {name: number for name, number in rows.items() if number < 1}:
        raise ValueError(f"rows must be 1 or more for each layer, got {bad}")
    return layers


def require_batch_first(model: nn.Module) -> None:
    """Refuse a model that may have its samples along another dimension than 0.

    Raises:
        ValueError: naming the first module that says ``batch_first=False``.
    """
    for name, module in model.named_modules():
        if getattr(module, "batch_first", True) is False:
            raise ValueError(
                f"{title(name, module)} has batch_first=False, so samples may be along dimension 1 of the "
                f"normalisation layers' inputs; say which with sample_dimension=1 or sample_dimension=0"
            )


def require_independent(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse BatchNorm in training mode among named modules.

    Raises:
        ValueError: naming it.
    """
    for name, module in modules:
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(
                f"{title(name, module)} is in training mode, where every sample's output depends on all the others, so "
                f"that no sample has a gradient of its own; put it in eval mode, replace it by GroupNorm, or measure "
                f"with kind='hooks'"
            )


class Keeper:
    """Keeps layers' inputs until backward as autograd keeps them: not as copies, and under checkpointing not at all.

    A tensor that a hook holds on to would stay in memory where activation checkpointing means to drop it. One that is
    saved by a node of the graph is dropped, computed again, or moved as all others are.
    """

    def __init__(self) -> None:
        self._anchor = torch.zeros(0, requires_grad=True)

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Keep ``tensor``, with gradients on; the returned function gives it back, once, during backward."""
        kept = [_Keep.apply(self._anchor, tensor.detach())]
        return lambda: kept.pop().grad_fn.saved_tensors[0]


class _Keep(torch.autograd.Function):
    """A node beside the graph that is never run: it saves a tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.new_empty(0)
