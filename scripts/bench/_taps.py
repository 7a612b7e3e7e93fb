"""One rank of the taps' part of accuracy.py: each tap against separate backward passes over the same groups.

Started by torchrun on 1, 2 and 4 ranks; rank 0 prints one JSON line for each tap and task with the largest relative
differences. The reference runs on an unwrapped copy of the model, which gets the trained parameters before each step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from equivalence import Masked, recipe
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from adabatch import data, distributed, gradients
from adabatch.data.structure import cut
from adabatch.noise import Measurement
from adabatch.plan import BatchLimits, BatchPlan, split

Loss = Callable[[nn.Module, Any], tuple[Tensor, Any]]
Group = list[tuple[Any, int]]  # micro-batches and their samples

MICRO_BATCH, GLOBAL_BATCH, STEPS = 5, 36, 4

# By number of ranks: how the model is wrapped, the tap, and which groups it delivers.
TAPS = {
    1: [("plain", "hooks", "micro-batches"), ("plain", "examples", "samples")],
    2: [
        ("ddp", "hooks", "micro-batches"),
        ("ddp", "ddp", "ranks"),
        ("ddp", "examples", "samples"),
        ("fsdp, each", "fsdp", "micro-batches"),
        ("fsdp, last", "fsdp", "ranks"),
    ],
    4: [("hsdp 2x2, each", "fsdp", "micro-batches"), ("hsdp 2x2, last", "fsdp", "ranks")],
}
NORMALISATIONS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def task_of(name: str) -> tuple[nn.Module, Any, Loss]:
    """Model, data set and loss by name."""
    torch.manual_seed(3)
    if name == "digits":
        return recipe("image", "model").ConvNet(), recipe("image", "data").load()[0], recipe("image", "model").loss
    models, sequences = recipe("lm", "model"), recipe("lm", "data").load().train
    dataset = Masked(sequences) if name == "lm, token weights" else sequences
    return models.build("0.1M"), dataset, models.loss


def reference(
    model: nn.Module, groups: list[Group], loss_fn: Loss, parameters: list[nn.Parameter]
) -> dict[str, tuple[float, float]]:
    """|mean gradient|^2, G^2 and S from one backward pass for each group, put together in double precision.

    Each with the size that a difference is relative to; gradients of ``parameters`` only.
    """
    sums, weights = [], []
    for group in groups:
        model.zero_grad(set_to_none=True)
        total = 0.0
        for batch, samples in group:
            loss, weight = loss_fn(model, batch)
            weight = float(samples if weight is None else weight)
            if weight == 0:
                continue
            (loss * weight).backward()
            total += weight
        if total > 0:
            weights.append(total)
            sums.append(torch.cat([parameter.grad.double().flatten() for parameter in parameters]))
    weight = sum(weights)
    share = sum(one * one for one in weights) / weight**2
    mean_square = (torch.stack(sums).sum(0) / weight).square().sum().item()
    group_square = sum((one / weight).square().sum().item() for one in sums)
    signal = (mean_square - group_square) / (1 - share)
    samples = sum(count for group in groups for _, count in group)
    # Differences of squares are compared on the scale of what they are differences of.
    size = (mean_square + group_square) / (1 - share)
    return {
        "mean_square": (mean_square, mean_square),
        "signal": (signal, size),
        "noise": (samples * (mean_square - signal), samples * size),
    }


def every_piece(dataset: Any, world: int, plan: BatchPlan) -> list[Group]:
    """The micro-batches of every rank in this step."""
    ranks = []
    for rank in range(world):
        stream = data.stream(dataset, seed=1, start=plan.first_sample, rank=rank, world=world, micro_batch=MICRO_BATCH)
        with stream:
            ranks.append([(piece.data, piece.samples) for piece in stream.take(plan) if piece.samples])
    return ranks


def wrapped(model: nn.Module, wrapping: str, ranks: int) -> nn.Module:
    """The model spread over the ranks."""
    if wrapping == "plain":
        return model
    if wrapping == "ddp":
        return DistributedDataParallel(model)
    sizes, names = ((2, ranks // 2), ("replicate", "shard")) if wrapping.startswith("hsdp") else ((ranks,), ("shard",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@torch.no_grad()
def copied(source: nn.Module, target: nn.Module) -> None:
    """Give an unwrapped copy the parameters of now."""
    for here, there in zip(source.parameters(), target.parameters(), strict=True):
        there.copy_(here.full_tensor() if isinstance(here, DTensor) else here)


def grouped(pieces: list[Group], groups: str) -> list[Group]:
    """All ranks' micro-batches as the groups that a tap delivers."""
    if groups == "ranks":
        return pieces
    alone = [piece for rank in pieces for piece in rank]
    if groups == "micro-batches":
        return [[piece] for piece in alone]
    return [[(cut(batch, i, i + 1), 1)] for batch, samples in alone for i in range(samples)]


def measured(
    tap: gradients.Tap,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stream: data.Stream,
    plan: BatchPlan,
    loss_fn: Loss,
) -> Measurement:
    """One window through the tap."""
    with gradients.accumulate(tap, plan) as window:
        for piece in stream.take(plan):
            with window.micro_batch():
                loss, weight = loss_fn(model, piece.data)
                each = piece.data["mask"].sum(1) if isinstance(piece.data, dict) and piece.samples else None
                weight = weight if piece.samples else 0
                window.backward(loss, samples=piece.samples, weight=weight, sample_weights=each)
    return window.finish(optimizer, max_norm=1.0).measurement.read()


def compare(wrapping: str, kind: str, groups: str, task: str, world: distributed.World) -> dict[str, float]:
    """The largest relative difference of each quantity over some steps of training."""
    plain, dataset, loss_fn = task_of(task)
    apart, _, _ = task_of(task)
    model = wrapped(plain, wrapping, world.size)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    limits = BatchLimits(world.size, MICRO_BATCH, rounding="none")
    worst = {"mean_square": 0.0, "signal": 0.0, "noise": 0.0}
    examples = kind == "examples"
    layers = [module for module in apart.modules() if isinstance(module, NORMALISATIONS)]
    parameters = [one for module in layers for one in module.parameters()] if examples else list(apart.parameters())
    tap = gradients.attach(
        model,
        optimizer,
        kind="hooks" if examples else kind,
        examples=examples,
        sync=wrapping.partition(", ")[2] or None,
    )
    with tap, data.stream(dataset, seed=1, rank=world.rank, world=world.size, micro_batch=MICRO_BATCH) as stream:
        for step in range(STEPS):
            plan = split(step=step, first_sample=step * GLOBAL_BATCH, global_batch=GLOBAL_BATCH, limits=limits, measure=True)
            copied(plain, apart)
            wanted = reference(apart, grouped(every_piece(dataset, world.size, plan), groups), loss_fn, parameters)
            found = measured(tap, model, optimizer, stream, plan, loss_fn)
            found = found.examples if examples else found
            for name, (value, size) in wanted.items():
                worst[name] = max(worst[name], abs(getattr(found, name) - value) / size)
            optimizer.step()
            optimizer.zero_grad()
    return worst


def main() -> None:
    torch.set_num_threads(1)
    world = distributed.start(device="cpu", timeout_seconds=120)
    for wrapping, kind, groups in TAPS[world.size]:
        for task in ("digits", "lm", "lm, token weights"):
            if kind == "examples" and task == "digits":
                continue  # it has no normalisation layer
            worst = compare(wrapping, kind, groups, task, world)
            if world.rank == 0:
                names = {"tap": kind, "wrapping": wrapping, "groups": groups, "ranks": world.size, "task": task}
                print(json.dumps({**names, **worst}), flush=True)
    distributed.stop()


if __name__ == "__main__":
    sys.exit(main())
