"""What a controller does not go on without; each refusal says the numbers and the way out."""

from __future__ import annotations

from dataclasses import replace

from adabatch.ledger import Ledger
from adabatch.plan import BatchLimits, BatchPlan
from adabatch.policies import Policy
from adabatch.progress import Progress
from adabatch.schedules import ScheduleLike


def require_counts(**counts: int) -> None:
    """Every count is at least 1.

    Raises:
        ValueError: naming the first that is not.
    """
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def require_length(schedule: ScheduleLike, tokens_per_sample: int | None) -> None:
    """The schedule is in a unit that can be told beforehand.

    Raises:
        ValueError: when it is in tokens, and samples have no common number of them.
    """
    if schedule.unit == "tokens" and tokens_per_sample is None:
        raise ValueError("a learning-rate schedule in tokens needs tokens_per_sample; give its lengths in samples")


def require_possible(policy: Policy, limits: BatchLimits, *, measured: bool) -> None:
    """What the policy follows is measured, and the batches that it names can be made.

    Raises:
        ValueError: when it needs a noise scale that is not ``measured``, or for the first batch that cannot be made.
    """
    if "noise" in policy.needs and not measured:
        raise ValueError(f"policy {policy.name} follows the noise scale, and noise=None measures none")
    for batch in policy.batches:
        limits.require(batch, f"a batch of policy {policy.name}")


def require_measurable(policy: Policy, limits: BatchLimits, batch: int, *, by_alignment: bool) -> None:
    """A policy that follows the noise scale finds one at ``batch``.

    Args:
        by_alignment: whether the noise scale comes from alignments, which need more groups of samples.

    Raises:
        ValueError: when ``batch`` has too few groups of samples.
    """
    if "noise" not in policy.needs:
        return
    if batch < limits.fewest_measurable:
        raise ValueError(
            f"a global batch of {batch} is one group of samples, and the noise scale needs two to compare; set "
            f"limits.start_batch and limits.max_batch to {limits.fewest_measurable} or more"
        )
    if by_alignment and batch < limits.fewest_alignable:
        raise ValueError(
            f"a global batch of {batch} has too few groups of samples for the alignment scale, which compares sets of "
            f"two sizes with their rest; set limits.start_batch, limits.min_batch and limits.max_batch to "
            f"{limits.fewest_alignable} or more"
        )


def require_start(policy: Policy, start_batch: int | None) -> int:
    """The batch that a run begins with under a policy that does not name it.

    Raises:
        ValueError: when it is not given.
    """
    if start_batch is None:
        raise ValueError(f"policy {policy.name} needs a start_batch")
    return start_batch


def require_current(plan: BatchPlan, current: BatchPlan | None, progress: Progress) -> None:
    """What is committed is the plan that was made last.

    Raises:
        ValueError: when it is another.
    """
    if plan is not current:
        raise ValueError(
            f"commit() takes the plan of step {progress.steps} that plan() returned last, "
            f"not one of step {plan.step}; commit each plan once, in order"
        )


def require_timed(policy: Policy, step: int, *, timed: bool) -> None:
    """A policy that goes by the price of a step is told how long each took.

    Raises:
        ValueError: when ``step`` is not ``timed``.
    """
    if "price" in policy.needs and not timed:
        raise ValueError(
            f"policy {policy.name} goes by the time of each step, and step {step} came without: call "
            f"commit(plan, measurement, stopwatch.lap()) with a stopwatch of adabatch.stopwatch, and on several "
            f"ranks give the controller slowest=adabatch.distributed.largest"
        )


def require_same_end(progress: Progress, ledger: Ledger) -> None:
    """A saved state belongs to its ledger.

    Raises:
        ValueError: when they end at different places.
    """
    if (progress.steps, progress.samples) != (ledger.steps, ledger.samples):
        raise ValueError(
            f"the controller stopped at step {progress.steps}, sample {progress.samples}, but its ledger ends at "
            f"step {ledger.steps}, sample {ledger.samples}"
        )


def require_same_ranks(before: BatchLimits, after: BatchLimits) -> None:
    """A running job's limits differ in the bounds of the batch alone.

    Raises:
        ValueError: when they differ in anything else.
    """
    if replace(after, min_batch=before.min_batch, max_batch=before.max_batch) != before:
        raise ValueError(
            f"adopt() changes the bounds of the batch; the world, the micro-batch and the rounding stay those of "
            f"the ranks and their streams: {before}, not {after}"
        )
