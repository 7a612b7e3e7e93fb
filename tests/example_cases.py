"""Models with normalisation layers, and what is true of single examples' gradients, for the tests of taps on them.

The reference knows nothing of hooks: every example has a backward pass of its own through a double precision copy.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


class Sequences(nn.Module):
    """(samples, length, 6) -> the same: LayerNorm, RMSNorm, a frozen weight, and a layer that runs twice."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.first = nn.LayerNorm(6)
        self.mixed = nn.Linear(6, 6)
        self.twice = nn.RMSNorm(6, eps=1e-6)
        self.shifted = nn.LayerNorm(6)
        self.shifted.weight.requires_grad_(False)
        self.scaled = nn.LayerNorm(6, bias=False)
        self.plain = nn.LayerNorm(6, elementwise_affine=False)
        # None: no checkpointing; otherwise whether it is the reentrant kind
        self.checkpointed = checkpointed
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.twice(inputs + torch.tanh(self.mixed(self.first(inputs))))
        if self.checkpointed is None:
            return self.inner(hidden)
        return checkpoint(self.inner, hidden, use_reentrant=self.checkpointed)

    def inner(self, hidden: Tensor) -> Tensor:
        return self.scaled(torch.sin(self.shifted(self.plain(hidden) + self.twice(hidden.cos()))))


class Images(nn.Module):
    """(samples, 3, 8, 8) -> (samples, 5), with ReLUs that work in place on what GroupNorm gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.GroupNorm(4, 8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 12, 3, stride=2, groups=2),
            nn.GroupNorm(1, 12),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.LayerNorm(12),
            nn.Linear(12, 5),
        )
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def sequences(checkpointed: bool | None = None) -> Sequences:
    torch.manual_seed(0)
    return Sequences(checkpointed)


def images() -> Images:
    torch.manual_seed(0)
    return Images()


def batch(samples: int, shape: Sequence[int] = (4, 6), seed: int = 1) -> Tensor:
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(seed))


def losses(model: nn.Module, inputs: Tensor) -> Tensor:
    """Each example's loss, (samples,)."""
    outputs = model(inputs)
    target = torch.linspace(-1, 1, outputs[0].numel(), dtype=outputs.dtype).view(outputs[0].shape)
    return (outputs - target).square().flatten(1).mean(1)


def mean_loss(model: nn.Module, inputs: Tensor, weights: Tensor | None = None) -> Tensor:
    """The examples' losses, averaged with these weights."""
    each = losses(model, inputs)
    return each.mean() if weights is None else (each * weights).sum() / weights.sum()


def norm_names(model: nn.Module) -> set[str]:
    """Names of the trained parameters of normalisation layers."""
    return {
        f"{name}.{attribute}".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, NORMS)
        for attribute, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }


def gradients_of(
    model: nn.Module, inputs: Tensor, names: Collection[str], loss: Callable[..., Tensor] = mean_loss
) -> Tensor:
    """Every example's own gradient in the named parameters, (samples, elements), in double precision."""
    exact = copy.deepcopy(model).double()
    rows = []
    for example in inputs:
        exact.zero_grad()
        own = example[None].double() if example.is_floating_point() else example[None]
        loss(exact, own).backward()
        found = [p.grad.flatten() for name, p in exact.named_parameters() if name in names and p.grad is not None]
        rows.append(torch.cat(found).clone())
    return torch.stack(rows)


def squares_of(gradients: Tensor, shares: Tensor) -> tuple[float, float]:
    """sum(|p_i g_i|^2), and the squared length of sum(p_i g_i)."""
    parts = gradients * (shares.double() / shares.sum())[:, None]
    return parts.square().sum().item(), parts.sum(0).square().sum().item()


def language_model() -> ModuleType:
    """The recipe's GPT: recipes are programs, loaded by path."""
    path = Path(__file__).parents[1] / "recipes" / "lm" / "model.py"
    spec = importlib.util.spec_from_file_location("lm_model_of_examples", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy over a batch of token ids (samples, length + 1)."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
