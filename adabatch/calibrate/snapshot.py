"""Where a run stands, held in memory: model, optimizer and random generators, to be put back bit by bit.

The data's position needs no copy, since branches read streams of their own; a controller takes no part in them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adabatch import optimizers
from adabatch.checkpoint import rng


class Snapshot:
    """A copy of a model, its optimizer and this process's random generators, taken when it is made.

    Args:
        model: the plain module; its parameters and all its buffers are copied, and whether modules train.
        optimizer: one or several; their states and parameter groups.
    """

    def __init__(self, model: nn.Module, optimizer: optimizers.Optimizers) -> None:
        self._tensors = [(live, live.detach().clone()) for live in (*model.parameters(), *model.buffers())]
        self._training = [(module, module.training) for module in model.modules()]
        self._optimizers = [_Copy(one) for one in optimizers.each(optimizer)]
        self._random = rng.take()

    @torch.no_grad()
    def restore(self) -> None:
        """Bring all of it back, as often as wanted. Tensors stay the same objects; gradients are dropped."""
        for live, copy in self._tensors:
            live.copy_(copy)
        for module, training in self._training:
            module.training = training
        for copy in self._optimizers:
            copy.restore()
        rng.put(self._random)


class _Copy:
    """One optimizer's state and groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [_copied({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
        self._state = {parameter: _copied(state) for parameter, state in optimizer.state.items()}

    def restore(self) -> None:
        for group, copy in zip(self._optimizer.param_groups, self._groups, strict=True):
            _put(group, {**copy, "params": group["params"]})
        live = self._optimizer.state
        for parameter in live.keys() - self._state.keys():
            del live[parameter]
        for parameter, copy in self._state.items():
            _put(live[parameter], copy)
        self._optimizer.zero_grad()


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in values.items()}


def _put(live: dict[str, Any], copy: dict[str, Any]) -> None:
    for key in live.keys() - copy.keys():
        del live[key]
    for key, value in copy.items():
        present = live.get(key)
        if present is value:
            continue
        if isinstance(value, Tensor) and isinstance(present, Tensor) and present.shape == value.shape:
            present.copy_(value)
        else:
            live[key] = value.clone() if isinstance(value, Tensor) else value
