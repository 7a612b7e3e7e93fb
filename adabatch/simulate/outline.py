"""What a schedule of batches means: every stretch of equal steps with its split, scales, samples and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adabatch.noise import Estimate
from adabatch.plan import BatchLimits, BatchPlan, samples_in, split, steps_at
from adabatch.policies import Facts, Policy, Replay, Stages, supported_scale
from adabatch.progress import Progress
from adabatch.scaling import Scaling
from adabatch.schedules import Schedule
from adabatch.simulate.cluster import Cluster

# A schedule in more stretches than this is no table any more.
MOST_STRETCHES = 10_000


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps of one batch, one after another.

    Attributes:
        plan: the first of them.
        steps: how many.
        rates: multipliers of the configured learning rate in the first and the last step, by schedule and batch.
        seconds: of all of them; ``None`` where times are not known.
        partial: whether it is the one step that was shortened to end the run.
    """

    plan: BatchPlan
    steps: int
    rates: tuple[float, float]
    seconds: float | None = None
    partial: bool = False

    @property
    def samples(self) -> int:
        return samples_in(self.steps, self.plan.global_batch)


def outline(
    policy: Policy,
    limits: BatchLimits,
    *,
    samples: int | None,
    scaling: Scaling | None = None,
    schedule: Schedule | None = None,
    tokens_per_sample: int | None = None,
    cluster: Cluster | None = None,
    seconds: Callable[[int], float | None] | None = None,
) -> list[Stretch]:
    """The stretches of an open-loop policy over ``samples``, without walking through every step.

    Args:
        policy: one that follows no measurement.
        limits: ranks, micro-batch and bounds.
        samples: length of the run; ``None`` for that of a ledger.
        scaling, schedule: what moves with the batch, and the learning rate.
        tokens_per_sample: for what is counted in tokens.
        cluster: where the steps run, which may give them more ranks and a time.
        seconds: time of a step by its global batch, in the place of the cluster's.

    Raises:
        ValueError: for a policy that follows measurements, a batch that cannot be made, an unknown length, or more than
            10,000 stretches.
    """
    if policy.closed_loop or policy.needs:
        raise ValueError(
            f"policy {policy.name} follows what a run measures, so there is no schedule beforehand; see what it would "
            f"do by: adabatch simulate policy={policy.name}"
        )
    for batch in policy.batches:
        limits.require(batch, f"a batch of policy {policy.name}")
    if samples is None:
        if not isinstance(policy, Replay):
            raise ValueError("the length of the run is not known: set stop.samples")
        samples = policy.ledger.samples
    planner = _Planner(policy, limits, samples, scaling, schedule or Schedule(), tokens_per_sample or 0)
    stretches: list[Stretch] = []
    progress = Progress()
    while progress.samples < samples:
        if len(stretches) >= MOST_STRETCHES:
            raise ValueError(
                f"the schedule has more than {MOST_STRETCHES:,} stretches up to sample {progress.samples:,}"
            )
        plan, steps = planner.stretch(progress)
        partial = steps == 1 and plan.last_sample == samples and plan.global_batch < planner.batch_at(progress)
        rates = (
            planner.rate(plan.first_sample, plan),
            planner.rate(planner.after(progress, plan, steps - 1).samples, plan),
        )
        placed = cluster.placed(plan, limits) if cluster else plan
        time = seconds(plan.global_batch) if seconds else _seconds(cluster, placed)
        stretches.append(Stretch(placed, steps, rates, None if time is None else steps * time, partial))
        progress = planner.after(progress, plan, steps)
    return stretches


def _seconds(cluster: Cluster | None, plan: BatchPlan) -> float | None:
    lap = cluster.lap(plan) if cluster else None
    return lap.seconds if lap else None


@dataclass(frozen=True, slots=True)
class _Planner:
    """Reads an open-loop policy forward, in strides of equal batches."""

    policy: Policy
    limits: BatchLimits
    samples: int
    scaling: Scaling | None
    schedule: Schedule
    tokens_per_sample: int

    def batch_at(self, progress: Progress) -> int:
        """The batch of a step that begins at ``progress``."""
        wanted = self.policy.value(self.policy.init(), Facts(progress, batch=0))
        if wanted is None:
            raise ValueError(f"policy {self.policy.name} names no batch; see what it would do by: adabatch simulate")
        return int(wanted.batch) if self.policy.exact else self.limits.realise(wanted.batch)

    def stretch(self, progress: Progress) -> tuple[BatchPlan, int]:
        """The step at ``progress``, and how many like it follow one another."""
        wanted = self.batch_at(progress)
        batch = min(wanted, self.samples - progress.samples)
        plan = split(
            step=progress.steps,
            first_sample=progress.samples,
            global_batch=batch,
            limits=self.limits,
            measure=False,
            schedule=self.schedule.value(self._middle(progress.samples, batch)),
            scales=self.scaling.scales(batch, self._recorded_scale(progress)) if self.scaling else None,
        )
        if batch < wanted:
            return plan, 1
        end = self._edge(progress)
        return plan, self._lasting(progress, plan, max(1, steps_at(end - progress.samples, batch)))

    def after(self, progress: Progress, plan: BatchPlan, steps: int) -> Progress:
        samples = samples_in(steps, plan.global_batch)
        return Progress(
            progress.steps + steps, progress.samples + samples, progress.tokens + samples * self.tokens_per_sample
        )

    def rate(self, first_sample: int, plan: BatchPlan) -> float:
        """The learning rate's multiplier in a step like ``plan`` that begins at ``first_sample``."""
        return self.schedule.value(self._middle(first_sample, plan.global_batch)) * plan.scales.lr

    def _lasting(self, progress: Progress, plan: BatchPlan, most: int) -> int:
        """How many of at most ``most`` steps keep the batch: between two edges a schedule rises or falls throughout."""
        whole = (self.samples - progress.samples) // plan.global_batch
        low, high = 1, min(most, whole) + 1
        if self._keeps(progress, plan, high - 1):
            return high - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._keeps(progress, plan, middle - 1) else (low, middle)
        return low

    def _keeps(self, progress: Progress, plan: BatchPlan, steps: int) -> bool:
        return self.batch_at(self.after(progress, plan, steps)) == plan.global_batch

    def _edge(self, progress: Progress) -> int:
        """The next sample at which the schedule may change its direction; the end of the run where it never does."""
        return min((edge for edge in self._edges() if edge > progress.samples), default=self.samples)

    def _edges(self) -> Sequence[int]:
        if isinstance(self.policy, Replay):
            return [segment.last_sample for segment in self.policy.ledger.segments]
        if isinstance(self.policy, Stages):
            each = 1 if self.policy.unit == "samples" else self.tokens_per_sample
            return [math.ceil(start / each) for start, _ in self.policy.stages if each]
        return []

    def _middle(self, first_sample: int, batch: int) -> float:
        return (first_sample + batch / 2) * (1 if self.schedule.unit == "samples" else self.tokens_per_sample)

    def _recorded_scale(self, progress: Progress) -> float | None:
        """The noise scale that a ledger has recorded, by which some rules move the learning rate."""
        if not isinstance(self.policy, Replay):
            return None
        estimate = self.policy.recorded_estimate(progress.samples)
        return supported_scale(Estimate.from_dict(estimate)) if estimate else None
