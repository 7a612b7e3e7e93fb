"""Randomness and statistics that ranks share, over real gloo processes."""

from __future__ import annotations

import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adabatch import distributed, gradients
from adabatch.plan import BatchLimits, split


def _first_window(seed_by_rank: bool, dropout: float) -> str | None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1)))
    if seed_by_rank:
        torch.manual_seed(100 + distributed.rank())
    plan = split(step=0, first_sample=0, global_batch=4, limits=BatchLimits(2, 2), measure=True)
    try:
        tap = gradients.attach(model)
        with gradients.accumulate(tap, plan) as window, window.micro_batch():
            window.backward(model(torch.ones(2, 4)).mean(), samples=2)
        window.finish(torch.optim.SGD(model.parameters(), lr=0.1))
    except ValueError as error:
        return str(error)
    return None


def test_ranks_that_drop_the_same_units_are_refused() -> None:
    for message in ranks.run(_first_window, 2, False, 0.5):
        assert message is not None and "ranks 0 and 1 have the same random state" in message


@pytest.mark.parametrize(("seed_by_rank", "dropout"), [(True, 0.5), (False, 0.0)])
def test_ranks_of_their_own_or_without_dropout_pass(seed_by_rank: bool, dropout: float) -> None:
    assert ranks.run(_first_window, 2, seed_by_rank, dropout) == [None, None]


def _shared_statistics() -> str:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    model.module[1] = nn.SyncBatchNorm(8)
    try:
        gradients.attach(model)
    except ValueError as error:
        return str(error)
    return ""


def test_shared_batch_statistics_are_refused_by_name() -> None:
    for message in ranks.run(_shared_statistics, 2):
        assert "module.1 is a SyncBatchNorm" in message
