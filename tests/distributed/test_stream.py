"""Streams on real ranks: together they take what one rank would."""

from __future__ import annotations

import ranks
import torch
import torch.distributed as dist

from adabatch.data import stream
from adabatch.plan import BatchLimits, split


class Noisy:
    """Sample i with noise from the global generator."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(torch.rand(()))])


def consume(first: int, last: int, batches: list[int]) -> torch.Tensor:
    """Samples [first, last) in the order of their positions, as this rank knows them after a sum over ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(rank)  # must not matter
    found = torch.zeros(last - first, 3)
    limits, cursor = BatchLimits(world, 4, rounding="none"), first
    with stream(Noisy(), seed=5, start=first, rank=rank, world=world, micro_batch=4) as samples:
        for step, batch in enumerate(batches):
            plan = split(step=step, first_sample=cursor, global_batch=batch, limits=limits, measure=True)
            taken = list(samples.take(plan))
            assert len(taken) == plan.micro_batches  # so that collectives pair up
            for micro in taken:
                for position, sample in zip(micro.positions, micro.data, strict=False):
                    found[position - first] += torch.tensor([*sample, 1.0])
            cursor = plan.last_sample
    assert cursor == last
    if world > 1:
        dist.all_reduce(found)
    return found.tolist()


def test_ranks_share_the_samples_of_one_and_resume_as_more() -> None:
    whole = consume(0, 57, [57])
    assert [count for _, _, count in whole] == [1.0] * 57
    begun = ranks.run(consume, 2, 0, 20, [7, 8, 5])
    ended = ranks.run(consume, 3, 20, 57, [1, 16, 20])
    for rank in begun:
        assert rank == whole[:20]
    for rank in ended:
        assert rank == whole[20:]
