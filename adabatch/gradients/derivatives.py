"""First and second derivatives of a model's loss along vectors, for diagnostics; what has none is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from adabatch.gradients.layout import survey

# How PyTorch words it when an operation's backward has no derivative.
_ONCE_ONLY = (
    "is not implemented",
    "does not currently support double backward",
    "ouble backward",
    "differentiate twice",
    "not compatible with .grad()",
)

Loss = Callable[[nn.Module, Any], tuple[Tensor, float | Tensor | None]]
MicroBatch = tuple[Any, int]
Gradient = Sequence[Tensor]


class Subject:
    """A model and its loss as functions of the trainable parameters."""

    def __init__(self, model: nn.Module, loss: Loss, custom_functions: bool) -> None:
        self.model = getattr(model, "_orig_mod", model)
        self.loss = loss
        self.trusted = custom_functions
        self.checked = False
        layout = survey(self.model)
        if layout.world > 1 or layout.parallel or layout.sharded:
            raise ValueError(
                f"{type(self.model).__name__} is distributed, and Hessian-vector products are taken of a plain module "
                f"in one process: hand over the module inside DistributedDataParallel, or load the checkpoint into a "
                f"model without fully_shard()"
            )
        for name, parameter in zip(layout.names, layout.parameters, strict=True):
            if parameter.is_complex():
                raise ValueError(f"parameter {name!r} is complex, and its second derivative is not supported")
        self.parameters = layout.parameters

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Evaluation mode, gradients on, and operations that have second derivatives."""
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                yield
        except RuntimeError as error:
            if not any(phrase in str(error) for phrase in _ONCE_ONLY):
                raise
            raise ValueError(
                f"{type(self.model).__name__} or its loss cannot be differentiated twice: "
                f"{str(error).strip().splitlines()[0]}. Replace that operation for this measurement by one that can"
            ) from error
        finally:
            for module, training in modes.items():
                module.training = training

    def mean_loss(self, micro_batch: MicroBatch) -> tuple[Tensor, float]:
        """The mean loss of a micro-batch, with a graph, and its weight."""
        data, samples = micro_batch
        value, weight = self.loss(self.model, data)
        if not value.requires_grad:
            raise ValueError(f"the loss {value.tolist()} does not depend on the trainable parameters")
        if not self.trusted:
            _refuse_custom_functions(value)
            self.trusted = True
        return value, float(samples if weight is None else weight)

    def gradient(self, value: Tensor, *, again: bool = False) -> Gradient:
        """The gradient; with ``again`` it can be differentiated once more."""
        return torch.autograd.grad(value, self.parameters, create_graph=again, materialize_grads=True)

    def curve(self, along: Tensor) -> Gradient:
        """The gradient of a product with the gradient: H times that vector; 0 where the gradient is constant."""
        if not along.requires_grad:
            return [torch.zeros_like(parameter) for parameter in self.parameters]
        if not self.checked:
            _refuse_once_differentiable(along)
            self.checked = True
        return torch.autograd.grad(along, self.parameters, retain_graph=True, materialize_grads=True)


def along(gradient: Gradient, vector: Gradient) -> Tensor:
    """The product of a gradient, which has a graph, with a vector, which has none."""
    parts = [(one * other).sum() for one, other in zip(gradient, vector, strict=True)]
    return torch.stack([part.to(parts[0].dtype) for part in parts]).sum()


def dot(left: Gradient, right: Gradient) -> float:
    """The product of two vectors, summed in double precision."""
    parts = [(one.detach() * other).sum(dtype=torch.float64) for one, other in zip(left, right, strict=True)]
    return torch.stack(parts).sum().item()


def wide(parameter: Tensor) -> torch.dtype:
    """The parameter's dtype, and single precision for a half one."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _nodes(value: Tensor) -> Iterator[Node]:
    """Every function in the graph behind ``value``."""
    waiting, seen = [value.grad_fn], {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            yield node


def _refuse_custom_functions(value: Tensor) -> None:
    found = {
        type(node).__name__.removesuffix("Backward") for node in _nodes(value) if isinstance(node, BackwardCFunction)
    }
    if found:
        raise ValueError(
            f"the model or its loss uses {', '.join(sorted(found))}, and PyTorch cannot tell whether the backward of a "
            f"custom function has a derivative: without one its curvature is silently left out. Replace it for this "
            f"measurement, or pass custom_functions=True (curvature.custom_functions=true) if it has one"
        )


def _refuse_once_differentiable(along: Tensor) -> None:
    """Look for the node that PyTorch puts in the place of a backward marked once_differentiable.

    Asked for the gradient of parameters, it passes by that node, which no parameter is behind, and says nothing.
    """
    if any(node.name().endswith("::Error") for node in _nodes(along)):
        raise ValueError(
            "the model or its loss uses a custom function whose backward is marked once_differentiable; replace it for "
            "this measurement"
        )
