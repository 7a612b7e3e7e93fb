"""One rank of the taps' part of accuracy.py: each tap against separate backward passes over the same groups.

Started by torchrun; rank 0 prints one JSON line for each tap and task with the largest relative differences.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from equivalence import Masked, recipe
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adabatch import data, distributed, gradients
from adabatch.noise import Measurement
from adabatch.plan import BatchLimits, BatchPlan, split

Loss = Callable[[nn.Module, Any], tuple[Tensor, Any]]
Group = list[tuple[Any, int]]  # micro-batches and their samples

MICRO_BATCH, GLOBAL_BATCH, STEPS = 5, 36, 4


def task_of(name: str) -> tuple[nn.Module, Any, Loss]:
    """Model, data set and loss by name."""
    torch.manual_seed(3)
    if name == "digits":
        return recipe("image", "model").ConvNet(), recipe("image", "data").load()[0], recipe("image", "model").loss
    models, sequences = recipe("lm", "model"), recipe("lm", "data").load().train
    dataset = Masked(sequences) if name == "lm, token weights" else sequences
    return models.build("0.1M"), dataset, models.loss


def reference(
    model: nn.Module, groups: list[Group], loss_fn: Loss
) -> dict[str, tuple[float, float]]:
    """|mean gradient|^2, G^2 and S from one backward pass for each group, put together in double precision.

    Each with the size that a difference is relative to.
    """
    sums, weights = [], []
    for group in groups:
        model.zero_grad(set_to_none=True)
        total = 0.0
        for batch, samples in group:
            loss, weight = loss_fn(model, batch)
            weight = float(samples if weight is None else weight)
            (loss * weight).backward()
            total += weight
        weights.append(total)
        sums.append(torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()]))
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
                window.backward(loss, samples=piece.samples, weight=weight if piece.samples else 0)
    return window.finish(optimizer, max_norm=1.0).measurement.read()


def compare(kind: str, task: str, world: distributed.World) -> dict[str, float]:
    """The largest relative difference of each quantity over some steps of training."""
    plain, dataset, loss_fn = task_of(task)
    model = DistributedDataParallel(plain) if world.size > 1 else plain
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    limits = BatchLimits(world.size, MICRO_BATCH, rounding="none")
    worst = {"mean_square": 0.0, "signal": 0.0, "noise": 0.0}
    tap = gradients.attach(model, optimizer, kind=kind)
    with tap, data.stream(dataset, seed=1, rank=world.rank, world=world.size, micro_batch=MICRO_BATCH) as stream:
        for step in range(STEPS):
            plan = split(step=step, first_sample=step * GLOBAL_BATCH, global_batch=GLOBAL_BATCH, limits=limits, measure=True)
            ranks = every_piece(dataset, world.size, plan)
            groups = ranks if kind == "ddp" else [[piece] for rank in ranks for piece in rank]
            wanted = reference(plain, groups, loss_fn)
            plain.zero_grad(set_to_none=True)
            found = measured(tap, model, optimizer, stream, plan, loss_fn)
            for name, (value, size) in wanted.items():
                worst[name] = max(worst[name], abs(getattr(found, name) - value) / size)
            optimizer.step()
            optimizer.zero_grad()
    return worst


def main() -> None:
    torch.set_num_threads(1)
    world = distributed.start(device="cpu", timeout_seconds=120)
    for kind in ("hooks", "ddp") if world.size > 1 else ("hooks",):
        for task in ("digits", "lm", "lm, token weights"):
            worst = compare(kind, task, world)
            if world.rank == 0:
                print(json.dumps({"tap": kind, "ranks": world.size, "task": task, **worst}), flush=True)
    distributed.stop()


if __name__ == "__main__":
    sys.exit(main())
