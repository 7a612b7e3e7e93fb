"""Sharded models and passive windows for the tests of ``adabatch.gradients`` under FSDP2 and HSDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradient_cases as cases
import torch
from gradient_cases import Piece
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from adabatch import distributed, gradients


def mesh(shards: int) -> DeviceMesh:
    """A mesh of all ranks: 1-D when every rank has a shard of its own, otherwise (replicate, shard)."""
    world = distributed.size()
    if shards == world:
        return init_device_mesh("cpu", (world,))
    return init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicate", "shard"))


def sharded(network: nn.Module, shards: int, policy: MixedPrecisionPolicy | None = None, **options: Any) -> nn.Module:
    """The network of ``gradient_cases``, two of its layers sharded by themselves and the rest with the root."""
    options["mesh"] = mesh(shards)
    options["mp_policy"] = policy or MixedPrecisionPolicy()
    for layer in (network.wide, network.narrow):
        fully_shard(layer, **options)
    return fully_shard(network, **options)


def total(everyone: list[list[Piece]]) -> float:
    """Weight of all pieces on all ranks."""
    return sum(piece.weight for mine in everyone for piece in mine)


def backwards(
    model: nn.Module, mine: list[Piece], weight: float, sync: str, after: Callable[[Piece, Tensor], None] | None = None
) -> None:
    """A window as loops without adabatch run it: losses in proportion to their share of ``weight``, that of all ranks,
    so that FSDP2's mean over the ranks is the mean over all."""
    for index, piece in enumerate(mine):
        model.set_requires_gradient_sync(sync == "each" or index == len(mine) - 1)
        loss = cases.mean_loss(model, piece)
        (loss * (piece.weight / weight * distributed.size())).backward()
        if after is not None:
            after(piece, loss)


def shards_of(model: nn.Module) -> list[Tensor]:
    """This rank's shards of all gradients."""
    return [parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None]


def whole(model: nn.Module) -> Tensor:
    """All gradients as one vector in double precision; collective."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([parameter.grad.full_tensor().double().reshape(-1) for parameter in trained])


def one_window(
    tap: gradients.Tap, model: nn.Module, mine: list[Piece], sizes: list[list[int]], **finish: Any
) -> gradients.Outcome:
    """This rank's window, finished and not stepped, also where the model holds whole parameters at the moment."""
    optimizer = torch.optim.SGD(tap.layout.parameters, lr=0.1)
    with gradients.accumulate(tap, cases.plan(sizes)) as window:
        for piece in mine:
            with window.micro_batch():
                window.backward(cases.mean_loss(model, piece), samples=piece.samples, weight=piece.weight)
    return window.finish(optimizer, **finish)
