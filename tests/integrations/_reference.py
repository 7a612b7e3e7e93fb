"""What the programs of this folder share: real data, and a reference that knows nothing of taps or trainers.

The reference takes one backward pass per micro-batch through a fresh model with the window's parameters, and compares
the gradients pair by pair, in double precision.
"""

from __future__ import annotations

import json
import pathlib
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adabatch.noise import Measurement

Batch = Mapping[str, Tensor]
Numbers = dict[str, float]
IGNORED = -100


@dataclass
class Window:
    """One optimizer step of one rank, as a reference needs it.

    Attributes:
        state: the parameters that it began with.
        batches: its micro-batches.
    """

    state: dict[str, Tensor]
    batches: list[dict[str, Tensor]] = field(default_factory=list)


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """The module's state, as it is now."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def texts(samples: int, context: int = 24) -> list[dict[str, Tensor]]:
    """Stretches of the standard library's source, as bytes. Spaces are no targets, so samples differ in tokens."""
    source = b"".join(file.read_bytes() for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("a*.py")))
    ids = torch.tensor(list(source[: samples * 97 + context])).unfold(0, context, 97)[:samples].clone()
    return [{"input_ids": row, "labels": row.masked_fill(row == ord(" "), IGNORED)} for row in ids]


def tokens(batch: Batch) -> Tensor:
    """Targets of a causal language model, a scalar: the first one has nothing to be predicted from."""
    return (batch["labels"][..., 1:] != IGNORED).sum()


def everyone(window: Window) -> list[list[dict[str, Tensor]]]:
    """The micro-batches of every rank."""
    if not dist.is_initialized():
        return [window.batches]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, window.batches)
    return gathered


def agreed(numbers: Numbers) -> bool:
    """Whether all ranks hold the same numbers, to the last bit."""
    if not dist.is_initialized():
        return True
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, json.dumps(numbers))
    return len(set(gathered)) == 1


def expected(
    mean_gradient: Callable[[Batch], Tensor],
    shares: list[list[float]],
    batches: list[list[dict[str, Tensor]]],
    by_rank: bool,
) -> Numbers:
    """What a window must measure.

    Args:
        mean_gradient: the gradient of one micro-batch's mean loss, flat.
        shares: each micro-batch's share of the window's mean gradient, by rank.
        batches: the micro-batches, by rank.
        by_rank: whether a rank is one group, or each of its micro-batches.
    """
    parts = [
        [share * mean_gradient(batch) for share, batch in zip(mine, held, strict=True)]
        for mine, held in zip(shares, batches, strict=True)
    ]
    if by_rank:
        parts = [[torch.stack(mine).sum(dim=0)] for mine in parts]
        shares = [[sum(mine)] for mine in shares]
    everything = torch.stack([part for mine in parts for part in mine])
    share = torch.tensor([one for mine in shares for one in mine], dtype=torch.float64)
    products = everything @ everything.T
    samples = sum(len(batch["labels"]) for mine in batches for batch in mine)
    numbers = {"samples": samples, "groups": len(share), "mean_square": products.sum().item()}
    if len(share) > 1:
        signal = (products.sum() - products.trace()).item() / (1.0 - share.square().sum().item())
        numbers |= {"signal": signal, "noise": samples * (numbers["mean_square"] - signal)}
    return numbers


def gradient(loss: Tensor, model: nn.Module) -> Tensor:
    """The gradient of a loss, flat, in double precision; ``.grad`` is left alone."""
    return torch.cat([one.double().reshape(-1) for one in torch.autograd.grad(loss, list(model.parameters()))])


def told(measured: Measurement) -> Numbers:
    """A measurement's numbers, under the names that ``expected`` uses."""
    numbers = {"samples": measured.samples, "groups": measured.groups, "mean_square": measured.mean_square}
    return numbers | ({"signal": measured.signal, "noise": measured.noise} if measured.measurable else {})
