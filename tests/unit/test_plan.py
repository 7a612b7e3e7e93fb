"""Which batches the ranks can make, and how a step is split over them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adabatch.plan import (
    ROUNDINGS,
    BatchLimits,
    BatchPlan,
    Scales,
    data_efficiency,
    samples_in,
    split,
    step_efficiency,
    steps_at,
)

WORLDS = st.integers(1, 7)
MICRO_BATCHES = st.integers(1, 9)


def plan_of(world: int, micro_batch: int, global_batch: int, first_sample: int = 0, measure: bool = True) -> BatchPlan:
    limits = BatchLimits(world, micro_batch, rounding="none")
    return split(step=0, first_sample=first_sample, global_batch=global_batch, limits=limits, measure=measure)


def makeable(limits: BatchLimits, most: int) -> list[int]:
    """All batches up to ``most`` by the definition of the rounding."""
    full = limits.world * limits.micro_batch
    if limits.rounding == "none":
        return list(range(1, most + 1))
    by_world = list(range(limits.world, most + 1, limits.world))
    if limits.rounding == "whole":
        return [b for b in by_world if b % full == 0]
    return [b for b in by_world if limits.rounding == "world" or b < full or b % full == 0]


@st.composite
def some_limits(draw: st.DrawFn) -> BatchLimits:
    world, micro_batch = draw(WORLDS), draw(MICRO_BATCHES)
    rounding = draw(st.sampled_from(ROUNDINGS))
    candidates = makeable(BatchLimits(world, micro_batch, rounding=rounding), 300)
    inside = draw(st.sampled_from(candidates))
    return BatchLimits(world, micro_batch, draw(st.integers(1, inside)), draw(st.integers(inside, 300)), rounding)


# -- limits


@given(some_limits(), st.floats(0.01, 1e4))
def test_realise_is_the_nearest_batch_within_the_bounds(limits: BatchLimits, wanted: float) -> None:
    allowed = [b for b in makeable(limits, 300) if limits.min_batch <= b <= limits.max_batch]
    nearest = min(abs(math.log(b / wanted)) for b in allowed)
    realised = limits.realise(wanted)
    assert realised in allowed
    assert abs(math.log(realised / wanted)) == pytest.approx(nearest, abs=1e-12)
    assert limits.realise(realised) == realised
    assert limits.require(realised, "batch") == realised


@given(some_limits(), st.floats(0.01, 1e4), st.floats(1.0, 10.0))
def test_realise_never_falls_when_more_is_wanted(limits: BatchLimits, wanted: float, factor: float) -> None:
    assert limits.realise(wanted) <= limits.realise(wanted * factor)


@given(some_limits(), st.floats(0.01, 290.0))
def test_floor_and_ceil_bracket_the_batch(limits: BatchLimits, batch: float) -> None:
    candidates = makeable(limits, 600)
    assert limits.floor(batch) == max((b for b in candidates if b <= batch), default=0)
    assert limits.ceil(batch) == min(b for b in candidates if b >= batch)


@given(some_limits(), st.integers(1, 320))
def test_require_accepts_exactly_what_can_be_made(limits: BatchLimits, batch: int) -> None:
    if batch in makeable(limits, 320) and limits.min_batch <= batch <= limits.max_batch:
        assert limits.require(batch, "batch") == batch
    else:
        with pytest.raises(ValueError, match=f"batch={batch}"):
            limits.require(batch, "batch")


def test_a_batch_between_two_quanta_is_rounded_on_a_logarithmic_scale() -> None:
    limits = BatchLimits(world=3, micro_batch=8)  # multiples of 24
    assert (limits.floor(100), limits.ceil(100)) == (96, 120)
    assert limits.realise(100) == 96
    assert [limits.realise(wanted) for wanted in (33, 34, 36)] == [24, 48, 48]  # the geometric mean is 33.9


def test_below_one_micro_batch_per_rank_the_ranks_share_smaller_ones() -> None:
    limits = BatchLimits(world=2, micro_batch=8, min_batch=4, max_batch=64)
    assert [limits.realise(wanted) for wanted in (1, 4, 5.5, 13, 15.5, 20, 30, 1e9)] == [4, 4, 6, 14, 16, 16, 32, 64]


def test_infinite_wants_end_at_the_upper_bound() -> None:
    assert BatchLimits(world=3, micro_batch=8, max_batch=100).realise(math.inf) == 96


def test_a_batch_that_cannot_be_made_names_all_numbers_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"batch=256 .* 7 ranks x micro-batch 2 .* 252 or 266, or .*rounding=none"):
        BatchLimits(world=7, micro_batch=2).require(256, "batch")


def test_bounds_that_hold_no_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[100, 110\] .* 3 ranks x micro-batch 8 .* 96 or 120"):
        BatchLimits(world=3, micro_batch=8, min_batch=100, max_batch=110)
    with pytest.raises(ValueError, match=r"4 ranks .* nearest that can: 4$"):
        BatchLimits(world=4, micro_batch=8, max_batch=3)
    with pytest.raises(ValueError, match="min_batch=9 is above limits.max_batch=8"):
        BatchLimits(min_batch=9, max_batch=8)


@pytest.mark.parametrize("name", ["world", "micro_batch", "min_batch", "max_batch"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8"])
def test_limits_are_whole_numbers(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"limits.{name} must be a whole number"):
        BatchLimits(**{name: value})  # type: ignore[arg-type]


def test_an_unknown_rounding_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="micro_batch, whole, world, none, got 'up'"):
        BatchLimits(rounding="up")


@pytest.mark.parametrize("batch", [0, -8, 16.0, True])
def test_require_takes_whole_numbers_only(batch: object) -> None:
    with pytest.raises(ValueError, match="start must be a whole number"):
        BatchLimits().require(batch, "start")  # type: ignore[arg-type]


# -- splitting


@given(WORLDS, MICRO_BATCHES, st.integers(1, 200), st.integers(0, 10**13), st.booleans())
def test_every_rank_takes_its_share_in_as_many_pieces(
    world: int, micro_batch: int, global_batch: int, first_sample: int, measure: bool
) -> None:
    plan = plan_of(world, micro_batch, global_batch, first_sample, measure)
    shares = [plan.share(rank) for rank in range(world)]
    pieces = [plan.pieces(rank) for rank in range(world)]
    assert sum(shares) == global_batch
    assert max(shares) - min(shares) <= 1
    assert [sum(piece) for piece in pieces] == shares
    assert {len(piece) for piece in pieces} == {plan.micro_batches}
    assert all(0 <= size <= micro_batch for piece in pieces for size in piece)
    assert any(piece[-1] > 0 for piece in pieces), "no micro-batch is empty on all ranks"
    assert plan.last_sample == first_sample + global_batch


@given(WORLDS, st.integers(1, 200), st.integers(0, 1000))
def test_a_rank_takes_the_positions_that_leave_its_number(world: int, global_batch: int, first_sample: int) -> None:
    plan = plan_of(world, 8, global_batch, first_sample)
    positions = range(first_sample, first_sample + global_batch)
    assert [plan.share(rank) for rank in range(world)] == [
        sum(position % world == rank for position in positions) for rank in range(world)
    ]


@given(WORLDS, MICRO_BATCHES, st.integers(2, 200), st.integers(0, 1000))
def test_a_measured_step_has_two_groups_to_compare(
    world: int, micro_batch: int, global_batch: int, first_sample: int
) -> None:
    plan = plan_of(world, micro_batch, global_batch, first_sample)
    assert sum(size > 0 for rank in range(world) for size in plan.pieces(rank)) >= 2


def test_a_window_of_one_micro_batch_is_halved_to_be_measured_and_only_then() -> None:
    assert plan_of(1, 8, 7).pieces(0) == (4, 3)
    assert plan_of(1, 8, 7, measure=False).pieces(0) == (7,)
    assert plan_of(1, 8, 12).pieces(0) == (8, 4)
    assert plan_of(2, 8, 14).pieces(0) == (7,)


@pytest.mark.parametrize(("world", "accumulation"), [(1, 8), (2, 4), (4, 2)])
def test_the_same_batch_comes_out_on_any_number_of_ranks(world: int, accumulation: int) -> None:
    plan = plan_of(world, 4, 32)
    assert plan.micro_batches == accumulation
    assert all(plan.pieces(rank) == (4,) * accumulation for rank in range(world))


def test_a_rank_with_fewer_samples_fills_up_with_empty_micro_batches() -> None:
    plan = plan_of(2, 4, 9)
    assert (plan.pieces(0), plan.pieces(1)) == ((4, 1), (4, 0))
    assert plan_of(4, 8, 2).pieces(3) == (0,)


@pytest.mark.parametrize("rounding", ["none", "whole"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_smallest_alignable_batch_and_all_above_have_sets_of_two_sizes_with_a_rest(
    world: int, rounding: str
) -> None:
    limits = BatchLimits(world, 4, rounding=rounding)
    fewest = limits.fewest_alignable
    for batch in range(fewest, 60):
        if limits.floor(batch) != batch:
            continue
        plan = split(step=0, first_sample=7, global_batch=batch, limits=limits, measure=True, align=True)
        ranks = [[size for size in plan.pieces(rank) if size] for rank in range(world)]
        singles = [size for sizes in ranks for size in sizes]
        assert sum(singles) == batch and len(singles) >= 3
        shares_differ_from_groups = any(len(sizes) > 1 for sizes in ranks)
        assert shares_differ_from_groups or world >= 3  # there the rest of a share is mapped, too
    assert fewest == {"none": {1: 3, 2: 4, 3: 3, 5: 5}, "whole": {1: 12, 2: 16, 3: 12, 5: 20}}[rounding][world]


def test_a_plan_carries_what_it_was_given() -> None:
    scales = Scales(kappa=2.0, lr=1.5)
    plan = split(
        step=3, first_sample=48, global_batch=16, limits=BatchLimits(2, 8), measure=False, schedule=0.25, scales=scales
    )
    assert plan == BatchPlan(3, 48, 16, 2, 8, 1, measure=False, schedule=0.25, scales=scales)


# -- arithmetic of batches


def test_at_the_critical_batch_half_of_the_samples_and_half_of_the_steps_count() -> None:
    assert data_efficiency(400, 400) == step_efficiency(400, 400) == 0.5
    assert data_efficiency(100, 400) == 0.8
    assert step_efficiency(100, 400) == 0.2
    assert data_efficiency(100, math.inf) == 1.0
    assert data_efficiency(100, 0.0) == 0.0


def test_a_last_partial_batch_is_a_step() -> None:
    assert steps_at(125, 4) == 32
    assert steps_at(124, 4) == 31
    assert samples_in(31, 4) == 124
