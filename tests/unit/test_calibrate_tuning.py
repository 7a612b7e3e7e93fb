"""The search for the best learning rate: grids, their widening and refinement, and what each pair says there."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from adabatch.calibrate.tuning import tune


class Counted:
    """A loss of octaves and pair that counts where it was asked."""

    def __init__(self, loss: Callable[[float, int], float]) -> None:
        self.loss, self.asked = loss, []

    def __call__(self, octaves: float, pair: int) -> float:
        assert (octaves, pair) not in self.asked, "no branch is run twice"
        self.asked.append((octaves, pair))
        return self.loss(octaves, pair)


@pytest.mark.parametrize("best", [-3.3, -1.0, 0.1, 0.49, 2.6])
def test_the_vertex_of_a_parabola_is_found_exactly(best: float) -> None:
    branch = Counted(lambda octaves, pair: 2.0 + 0.01 * (octaves - best) ** 2 + 0.1 * pair)
    tuned = tune(branch, 3)
    assert tuned.interior and tuned.smooth
    assert tuned.octaves == pytest.approx(best)
    assert tuned.losses == pytest.approx((2.0, 2.1, 2.2))
    assert tuned.shifts == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)


def test_pairs_with_optima_of_their_own_share_one_place_and_tell_how_far_theirs_is() -> None:
    own = (-0.3, 0.0, 0.3)
    tuned = tune(Counted(lambda octaves, pair: (octaves - own[pair]) ** 2), 3)
    assert tuned.octaves == pytest.approx(0.0, abs=1e-12)
    assert tuned.losses == pytest.approx((0.09, 0.0, 0.09))
    assert tuned.shifts == pytest.approx(own)


def test_the_other_pairs_are_run_around_the_first_ones_optimum_only() -> None:
    branch = Counted(lambda octaves, pair: (octaves - 3.0) ** 2)
    tuned = tune(branch, 4)
    assert tuned.octaves == pytest.approx(3.0)
    assert {octaves for octaves, pair in branch.asked if pair} == {2.0, 3.0, 4.0}
    assert len(branch.asked) == 6 + 9


def test_the_grid_moves_on_where_the_first_pair_misled() -> None:
    own = (0.0, 2.0, 2.0, 2.0)
    tuned = tune(Counted(lambda octaves, pair: (octaves - own[pair]) ** 2), 4)
    assert tuned.interior and tuned.octaves == pytest.approx(1.5)


def test_a_grid_that_ends_before_its_optimum_says_so() -> None:
    branch = Counted(lambda octaves, pair: -octaves + pair)
    tuned = tune(branch, 2, widest=3.0)
    assert not tuned.interior and not tuned.smooth
    assert tuned.octaves == 3.0 and tuned.losses == (-3.0, -2.0)
    assert max(octaves for octaves, _ in branch.asked) == 4.0


def test_the_search_may_begin_elsewhere_and_is_bounded_from_there() -> None:
    tuned = tune(Counted(lambda octaves, pair: (octaves - 7.0) ** 2), 2, start=5.0, widest=3.0)
    assert tuned.interior and tuned.octaves == pytest.approx(7.0)


def test_divergence_beside_the_optimum_is_not_extrapolated() -> None:
    def loss(octaves: float, pair: int) -> float:
        return 1.0 - 0.01 * octaves if octaves <= 2.2 else math.nan

    tuned = tune(Counted(loss), 2)
    assert tuned.interior and not tuned.smooth
    assert tuned.octaves == 2.0 and tuned.losses == pytest.approx((0.98, 0.98))


def test_a_much_higher_neighbour_asks_for_a_finer_grid() -> None:
    """A loss that is nearly flat up to an edge: the parabola of the coarse grid would be far below it."""

    def loss(octaves: float, pair: int) -> float:
        return 0.01 * (octaves - 0.2) ** 2 + (10.0 * (octaves - 0.6) if octaves > 0.6 else 0.0)

    tuned = tune(Counted(loss), 2)
    assert min(tuned.losses) > -1e-3
    assert abs(tuned.octaves - 0.2) <= 0.5


def test_a_search_that_begins_where_everything_diverges_goes_down() -> None:
    tuned = tune(Counted(lambda octaves, pair: (octaves + 3.0) ** 2 if octaves < -1.5 else math.inf), 2)
    assert tuned.interior and tuned.octaves == pytest.approx(-3.0)


def test_no_finite_loss_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite at any learning rate"):
        tune(Counted(lambda octaves, pair: math.nan), 2, widest=2.0)


def test_every_point_tried_is_told() -> None:
    tuned = tune(Counted(lambda octaves, pair: (octaves - 1.0) ** 2 + pair), 3)
    assert dict(tuned.tried) == pytest.approx({-1.0: 4.0, 0.0: 2.0, 1.0: 1.0, 2.0: 2.0})
