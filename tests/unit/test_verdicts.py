"""What comes of a wish: batches that the ranks can make, and in which what decisions go by can still be measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from simulated_run import Ready, gaussian_window

from adabatch.alignment import Alignment, AlignmentEstimator, Reading
from adabatch.controller import Controller
from adabatch.noise import NoiseEstimator
from adabatch.plan import BatchLimits
from adabatch.policies import Damping, LossLaw, Situation, TargetEfficiency, Wanted
from adabatch.verdicts import limited, scheduled, verdict

FREE = Damping(interval_gate=False, growth=1e6, dead_band=1.0)


def shrunk(limits: BatchLimits, *, by_alignment: bool) -> int:
    """Where a batch of 240 ends when next to nothing is wanted."""
    situation = Situation(240, 10**6, 0, warming_up=False)
    return verdict(Wanted(0.5, 0.5, 0.5, "r"), situation, FREE, limits, by_alignment=by_alignment).batch


@pytest.mark.parametrize(
    ("world", "micro_batch", "rounding", "fewest", "aligned"),
    [
        (1, 8, "micro_batch", 2, 3),
        (1, 2, "micro_batch", 2, 4),  # a batch of 3 would be one and a half micro-batches
        (2, 8, "micro_batch", 2, 4),
        (4, 8, "micro_batch", 4, 4),
        (2, 8, "none", 2, 4),
        (8, 1, "none", 2, 8),
        (1, 8, "whole", 16, 24),
        (2, 8, "whole", 16, 32),
    ],
)
def test_a_batch_shrinks_no_further_than_it_can_be_measured(
    world: int, micro_batch: int, rounding: str, fewest: int, aligned: int
) -> None:
    limits = BatchLimits(world=world, micro_batch=micro_batch, rounding=rounding)
    assert shrunk(limits, by_alignment=False) == fewest
    assert shrunk(limits, by_alignment=True) == aligned


def test_bounds_above_that_stay_in_force() -> None:
    assert shrunk(BatchLimits(world=2, micro_batch=8, min_batch=10), by_alignment=True) == 10


# -- a controller whose decisions go by alignments


def seen(samples: int) -> Alignment:
    """The alignments of a window with a noise scale of a tenth of a sample, where every batch is too large."""
    return Alignment(samples, tuple(Reading(m, 1 / math.sqrt(1 + 0.1 / m), 1.0, 1) for m in (samples / 4, samples / 2)))


def smallest(policy: TargetEfficiency | LossLaw, noise: list[AlignmentEstimator | NoiseEstimator]) -> int:
    """The smallest batch of a run that wants ever smaller ones."""
    run = Controller(policy, BatchLimits(), 64, noise=noise, damping=FREE, decide_every=4, align_every=1)
    batches = []
    for _ in range(200):
        plan = run.plan()
        window = gaussian_window(plan.global_batch, 0.1, plan.step)
        run.commit(plan, Ready(replace(window, alignments={"sign": seen(plan.global_batch)} if plan.align else {})))
        batches.append(plan.global_batch)
    return min(batches)


def test_a_run_that_goes_by_alignments_keeps_measuring_them() -> None:
    lengths, alignments = NoiseEstimator(), AlignmentEstimator(geometry="sign")
    assert smallest(TargetEfficiency(0.9), [alignments, lengths]) == 3
    # Where they are for the record, or nothing goes by any noise scale, they hold nobody up.
    assert smallest(TargetEfficiency(0.9), [lengths, alignments]) == 2
    assert smallest(LossLaw(1, 1.0), [alignments, lengths]) == 2


def test_bounds_in_which_alignments_cannot_be_measured_are_not_adopted() -> None:
    def run(noise: AlignmentEstimator | NoiseEstimator) -> Controller:
        return Controller(TargetEfficiency(0.5), BatchLimits(), 64, noise=noise)

    narrow = BatchLimits(max_batch=2)
    by_alignment = run(AlignmentEstimator(geometry="sign"))
    with pytest.raises(ValueError, match="batch of 2 has too few groups .* limits.max_batch to 3 or more"):
        by_alignment.adopt(limits=narrow)
    assert (by_alignment.batch, by_alignment.limits) == (64, BatchLimits())
    by_length = run(NoiseEstimator())
    by_length.adopt(limits=narrow)
    assert by_length.batch == 2


# -- what passes no gate


def test_what_was_decided_beforehand_is_rounded_unless_it_is_exact() -> None:
    limits = BatchLimits(world=2, micro_batch=4)
    wanted = Wanted(21.0, 21.0, 21.0, "stage 2")
    rounded = scheduled(wanted, 16, limits, exact=False)
    assert rounded is not None
    assert (rounded.batch, rounded.kind, rounded.reason) == (24, "schedule", "stage 2; the ranks can make 24")
    exact = scheduled(wanted, 16, limits, exact=True)
    assert exact is not None
    assert (exact.batch, exact.reason) == (21, "stage 2")
    assert scheduled(wanted, 24, limits, exact=False) is None
    assert scheduled(None, 16, limits, exact=True) is None


def test_new_limits_change_a_batch_that_they_cannot_make() -> None:
    limits = BatchLimits(world=2, micro_batch=4, max_batch=32)
    found = limited(48, limits)
    assert found is not None
    assert (found.batch, found.wanted, found.kind) == (32, 48, "limits")
    assert limited(24, limits) is None
