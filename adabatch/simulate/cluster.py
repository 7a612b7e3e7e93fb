"""How long a step takes on a cluster, and what it costs: a model in closed form, from 1 rank to many thousands.

A step is its micro-batches, the part of the gradient's all-reduce that no computation hides, and the optimizer. The
all-reduce is a ring within every node and then one over the nodes, by which each rank of a node moves its own share:

    ring of n ranks over b bytes:  2 (n - 1) (latency + b / (n bandwidth))

(Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). All ranks wait for the slowest: with each rank's computing
time spread log-normally, its quantile is drawn at once, and no rank is looped over.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from adabatch.plan import BatchLimits, BatchPlan, samples_in, split
from adabatch.throughput import Lap, StepTime

_NORMAL = NormalDist()
_MOST_RANKS = 2**20


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks, what they compute and what they send. Times are in seconds, sizes in bytes, bandwidths in bytes a second.

    Args:
        ranks: how many there are, or the fewest of an elastic cluster.
        most_ranks: the most that an elastic cluster grows to with the batch; ``None`` for a fixed one.
        per_sample: a rank's time for the forward and backward pass of one more sample; ``None``: no times are known.
        per_micro_batch: a rank's time for a micro-batch, whatever its size.
        optimizer: all that is done once a step beside the all-reduce.
        gradient_bytes: what is reduced over the ranks.
        bandwidth, latency: of a rank's link to ranks of other nodes.
        node_ranks: ranks of a node.
        node_bandwidth, node_latency: of a rank's link within its node.
        overlap: share of a step's last micro-batch behind which the all-reduce can hide.
        spread: standard deviation of the logarithm of a rank's computing time, from step to step.

    Raises:
        ValueError: for a negative time or size, a bandwidth of 0, an overlap above 1, or ranks out of range.
    """

    ranks: int = 1
    most_ranks: int | None = None
    per_sample: float | None = None
    per_micro_batch: float = 0.0
    optimizer: float = 0.0
    gradient_bytes: float = 0.0
    bandwidth: float = 25e9
    latency: float = 1e-5
    node_ranks: int = 8
    node_bandwidth: float = 200e9
    node_latency: float = 3e-6
    overlap: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        least = {"per_micro_batch", "optimizer", "gradient_bytes", "latency", "node_latency", "spread"}
        if bad := [f"{name}={getattr(self, name)}" for name in sorted(least) if not getattr(self, name) >= 0]:
            raise ValueError(f"cluster: {', '.join(bad)} must be at least 0")
        if self.per_sample is not None and not self.per_sample > 0:
            raise ValueError(f"cluster.per_sample must be above 0, got {self.per_sample}")
        if not (self.bandwidth > 0 and self.node_bandwidth > 0 and 0 <= self.overlap <= 1):
            raise ValueError(
                f"cluster.bandwidth and cluster.node_bandwidth must be above 0 and cluster.overlap in [0, 1], got "
                f"{self.bandwidth}, {self.node_bandwidth} and {self.overlap}"
            )
        most = self.ranks if self.most_ranks is None else self.most_ranks
        if not (1 <= self.ranks <= most <= _MOST_RANKS and self.node_ranks >= 1):
            raise ValueError(
                f"cluster.ranks must be at least 1 and at most cluster.most_ranks and {_MOST_RANKS:,}, and "
                f"cluster.node_ranks at least 1, got {self.ranks}, {self.most_ranks} and {self.node_ranks}"
            )

    def ranks_for(self, global_batch: int, micro_batch: int) -> int:
        """Ranks that a step runs on: on an elastic cluster, as many times the fewest as have full micro-batches."""
        if self.most_ranks is None:
            return self.ranks
        wanted = global_batch // samples_in(micro_batch, self.ranks)
        return self.ranks * max(1, min(wanted, self.most_ranks // self.ranks))

    def placed(self, plan: BatchPlan, limits: BatchLimits) -> BatchPlan:
        """``plan`` on the ranks that it runs on here."""
        ranks = self.ranks_for(plan.global_batch, limits.micro_batch)
        if ranks == plan.world:
            return plan
        return split(
            step=plan.step,
            first_sample=plan.first_sample,
            global_batch=plan.global_batch,
            limits=BatchLimits(ranks, limits.micro_batch, rounding="none"),
            measure=plan.measure,
            schedule=plan.schedule,
            scales=plan.scales,
        )

    def all_reduce(self, ranks: int) -> float:
        """Seconds of the gradient's all-reduce over ``ranks``."""
        within = min(ranks, self.node_ranks)
        nodes = math.ceil(ranks / within)
        near = _ring(within, self.gradient_bytes, self.node_bandwidth, self.node_latency)
        return near + _ring(nodes, self.gradient_bytes / within, self.bandwidth, self.latency)

    def step_time(self, plan: BatchPlan) -> StepTime | None:
        """The law of the step's time on ranks that are all equally fast; ``None`` where no times are known."""
        if self.per_sample is None:
            return None
        last = self.per_micro_batch + self.per_sample * _slowest(plan)[-1]
        exposed = max(self.all_reduce(plan.world) - self.overlap * last, 0.0)
        return StepTime(self.optimizer + exposed, self.per_micro_batch, self.per_sample)

    def lap(self, plan: BatchPlan, draws: random.Random | None = None) -> Lap | None:
        """The times of one step on the slowest rank, drawn or the median ones; ``None`` where none are known."""
        law = self.step_time(plan)
        if law is None:
            return None
        pieces = _slowest(plan)
        slow = self._slowness(plan.world, draws.random() if draws else 0.5) if self.spread else 1.0
        computing = slow * (law.seconds(len(pieces), sum(pieces)) - law.fixed)
        quiet = slow * sum(map(law.of_micro_batch, pieces[1:-1]))
        return Lap(law.fixed + computing, quiet)

    def price(self, plan: BatchPlan) -> float | None:
        """Fixed seconds of a step over seconds of one more sample, in micro-batches as large as these, in samples.

        ``None`` on an elastic cluster, where more samples bring more ranks, and where no times are known.
        """
        law = self.step_time(plan) if self.most_ranks is None else None
        return (
            None
            if law is None
            else law.fixed / law.of_micro_batch(plan.micro_batch) * samples_in(plan.world, plan.micro_batch)
        )

    def _slowness(self, ranks: int, share: float) -> float:
        """A quantile of the largest of ``ranks`` log-normal factors, whose distribution function is one's ^ ranks."""
        one = max(share, 1e-12) ** (1 / ranks)
        return math.exp(self.spread * _NORMAL.inv_cdf(min(one, 1 - 1e-16)))


def _ring(ranks: int, size: float, bandwidth: float, latency: float) -> float:
    return 2 * (ranks - 1) * (latency + size / (ranks * bandwidth))


def _slowest(plan: BatchPlan) -> tuple[int, ...]:
    """The micro-batches of a rank that has the most samples."""
    return plan.pieces(plan.first_sample % plan.world)
