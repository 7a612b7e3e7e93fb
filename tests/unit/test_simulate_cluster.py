"""The cluster's times against numbers worked out by hand, and its stragglers against as many draws as ranks."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from adabatch.plan import BatchLimits, BatchPlan, split
from adabatch.simulate import Cluster

LINKS = dict(bandwidth=10.0, latency=0.5, node_ranks=4, node_bandwidth=100.0, node_latency=0.25)


def planned(batch: int, world: int = 1, micro_batch: int = 8) -> BatchPlan:
    limits = BatchLimits(world, micro_batch, rounding="none")
    return split(step=0, first_sample=0, global_batch=batch, limits=limits, measure=False)


def test_a_single_rank_reduces_nothing() -> None:
    assert Cluster(gradient_bytes=1e9, **LINKS).all_reduce(1) == 0.0


def test_within_a_node_the_ring_sends_all_but_a_share_twice() -> None:
    # 2 * 3 messages of 400 / 4 bytes at 100 bytes a second, each a quarter of a second late.
    assert Cluster(ranks=4, gradient_bytes=400.0, **LINKS).all_reduce(4) == pytest.approx(6 * (0.25 + 1.0))


def test_over_nodes_each_rank_sends_its_own_share() -> None:
    # Within the nodes as above; over 3 nodes 2 * 2 messages of a third of 400 / 4 bytes at 10 a second.
    expected = 6 * (0.25 + 1.0) + 4 * (0.5 + 100 / 3 / 10)
    assert Cluster(ranks=12, gradient_bytes=400.0, **LINKS).all_reduce(12) == pytest.approx(expected)


def test_a_step_is_its_micro_batches_the_exposed_reduction_and_the_optimizer() -> None:
    cluster = Cluster(ranks=4, per_sample=0.1, per_micro_batch=0.2, optimizer=3.0, gradient_bytes=400.0, **LINKS)
    lap = cluster.lap(planned(80, world=4))  # 20 samples on a rank: 8, 8 and 4
    assert lap.seconds == pytest.approx(3 * 0.2 + 20 * 0.1 + 7.5 + 3.0)
    assert lap.quiet == pytest.approx(0.2 + 8 * 0.1), "the micro-batches after the first and before the last"
    assert cluster.lap(planned(64, world=4)).quiet == 0.0


@pytest.mark.parametrize(("overlap", "exposed"), [(0.0, 7.5), (0.5, 7.5 - 0.3), (1.0, 7.5 - 0.6)])
def test_the_last_micro_batch_hides_some_of_the_reduction(overlap: float, exposed: float) -> None:
    cluster = Cluster(ranks=4, per_sample=0.1, per_micro_batch=0.2, gradient_bytes=400.0, overlap=overlap, **LINKS)
    assert cluster.step_time(planned(80, world=4)).fixed == pytest.approx(exposed)


def test_what_is_hidden_altogether_costs_nothing() -> None:
    cluster = Cluster(ranks=4, per_sample=10.0, gradient_bytes=400.0, overlap=1.0, **LINKS)
    assert cluster.step_time(planned(80, world=4)).fixed == 0.0


def test_the_price_of_a_step() -> None:
    # 3 seconds a step; a sample more is 1/16 of a micro-batch on each of 2 ranks, which takes 0.2 + 8 * 0.1 seconds.
    cluster = Cluster(ranks=2, per_sample=0.1, per_micro_batch=0.2, optimizer=3.0, node_latency=0.0)
    assert cluster.price(planned(64, world=2)) == pytest.approx(3.0 / (1.0 / 16))


def test_without_a_time_for_a_sample_there_are_no_times() -> None:
    assert Cluster(optimizer=1.0).lap(planned(16)) is None
    assert Cluster(optimizer=1.0).price(planned(16)) is None


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_all_ranks_wait_for_the_slowest(ranks: int) -> None:
    cluster = Cluster(ranks=ranks, per_sample=1.0, spread=0.3, node_latency=0.0, latency=0.0)
    draws, plan = random.Random(3), planned(8 * ranks, world=ranks)
    drawn = sorted(cluster.lap(plan, draws).seconds / 8 for _ in range(4000))
    slowest = sorted(max(math.exp(0.3 * draws.gauss(0, 1)) for _ in range(ranks)) for _ in range(4000))
    assert statistics.fmean(drawn) == pytest.approx(statistics.fmean(slowest), rel=0.02)
    assert drawn[400] == pytest.approx(slowest[400], rel=0.04)
    assert drawn[3600] == pytest.approx(slowest[3600], rel=0.04)
    assert cluster.lap(plan).seconds / 8 == pytest.approx(slowest[2000], rel=0.02), "the median, where none is drawn"


@pytest.mark.parametrize(("batch", "ranks"), [(1, 4), (32, 4), (63, 4), (64, 8), (100, 12), (10_000, 20)])
def test_an_elastic_cluster_grows_with_the_batch_up_to_its_bound(batch: int, ranks: int) -> None:
    cluster = Cluster(ranks=4, most_ranks=22, per_sample=1.0)
    limits = BatchLimits(4, 8, rounding="none")
    placed = cluster.placed(planned(batch, world=4), limits)
    assert placed.world == cluster.ranks_for(batch, 8) == ranks
    assert sum(placed.share(rank) for rank in range(ranks)) == batch


def test_a_fixed_cluster_keeps_the_plan() -> None:
    plan = planned(1000, world=4)
    assert Cluster(ranks=4).placed(plan, BatchLimits(4, 8, rounding="none")) is plan


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(ranks=0), "cluster.ranks must be at least 1"),
        (dict(ranks=8, most_ranks=4), "at most cluster.most_ranks"),
        (dict(per_sample=0.0), "cluster.per_sample must be above 0"),
        (dict(overlap=1.5), "cluster.overlap in [0, 1]"),
        (dict(optimizer=-1.0), "optimizer=-1.0 must be at least 0"),
    ],
)
def test_an_impossible_cluster_is_refused(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        Cluster(**wrong)
    assert words in str(caught.value)
