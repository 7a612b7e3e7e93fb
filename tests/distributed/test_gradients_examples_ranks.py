"""The tap on normalisation layers on several ranks: every rank sees its own examples before anything is reduced."""

from __future__ import annotations

import contextlib

import example_cases as cases
import pytest
import ranks
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from adabatch import distributed
from adabatch.gradients import layout as layouts
from adabatch.gradients.examples import ExampleSource

# Samples of the micro-batches of each rank.
SIZES = [[3, 2], [1, 4]]


def micro_batches() -> list[list[Tensor]]:
    return [
        [cases.batch(size, seed=10 * rank + place) for place, size in enumerate(mine)]
        for rank, mine in enumerate(SIZES)
    ]


def wrapped(wrapper: str, checkpointed: bool) -> nn.Module:
    model = cases.sequences(False if checkpointed else None)
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (distributed.size(),))
    fully_shard(model.twice, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _window(wrapper: str, checkpointed: bool) -> tuple[float, float]:
    """sum(|p_i g_i|^2) over all ranks, and the squared length of the mean gradient from what is in ``.grad``."""
    mine = micro_batches()[distributed.rank()]
    model = wrapped(wrapper, checkpointed)
    layout = layouts.survey(model)
    source = ExampleSource(layout, model)
    source.measure(True)
    total = sum(map(sum, SIZES))
    for _ in range(2):
        model.zero_grad()
        source.open()
        for place, inputs in enumerate(mine):
            quiet = wrapper == "ddp" and place + 1 < len(mine)
            with model.no_sync() if quiet else contextlib.nullcontext():
                (cases.mean_loss(model, inputs) * (len(inputs) / total)).backward()
            source.close_micro_batch(float(len(inputs)), examples=len(inputs))
        square = source.collect()
    assert square is not None
    mean_square = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for index, parameter in enumerate(layout.parameters):
            if parameter.grad is not None:
                whole = parameter.grad.full_tensor() if layout.sharded else parameter.grad
                length = source.ruler.square(index, whole)
                mean_square += 0 if length is None else length
    group_square = distributed.all_reduce_sum(square, layout.group).item()
    return group_square, mean_square.item() * source.reduction**2


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_ranks_agree_with_one_backward_for_each_example(wrapper: str, checkpointed: bool) -> None:
    inputs = torch.cat([batch for mine in micro_batches() for batch in mine])
    model = cases.sequences()
    truth = cases.squares_of(cases.gradients_of(model, inputs, cases.norm_names(model)), torch.ones(len(inputs)))
    for found in ranks.run(_window, 2, wrapper, checkpointed):
        assert found == pytest.approx(truth, rel=1e-6)
