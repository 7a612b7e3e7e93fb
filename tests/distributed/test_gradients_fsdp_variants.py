"""FSDP2 as people set it up: precision policies, fillers, clipping, skipped windows."""

from __future__ import annotations

import math

import fsdp_cases as sharding
import gradient_cases as cases
import pytest
import ranks
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from adabatch import distributed, gradients
from adabatch.noise import Measurement

SIZES = [[3, 1, 4], [2, 2, 5]]


def _everyone(dtype: torch.dtype = torch.float64) -> list[list[cases.Piece]]:
    return cases.pieces_of(SIZES, tokens=True, dtype=dtype)


# -- fillers


def _fillers(sync: str, weights: list[list[int]]) -> tuple[Measurement, Tensor]:
    model = sharding.sharded(cases.network(torch.float64), 2)
    tap = gradients.attach(model, sync=sync)
    rank = distributed.rank()
    mine = cases.pieces_of([[2, 2, 2]] * 2, tokens=False, dtype=torch.float64)[rank]
    plan = cases.plan([[2 if weight else 0 for weight in each] for each in weights])
    with gradients.accumulate(tap, plan) as window:
        for piece, weight in zip(mine, weights[rank]):
            with window.micro_batch():
                window.backward(cases.mean_loss(model, piece), samples=2 if weight else 0, weight=weight)
    outcome = window.finish(torch.optim.SGD(model.parameters(), lr=0.1))
    return outcome.measurement.read(), sharding.whole(model)


@pytest.mark.parametrize("sync", ["each", "last"])
def test_fillers_drop_out_wherever_they_come(sync: str) -> None:
    """Also as the last micro-batch, whose reduction then carries what the others have added up."""
    weights = [[2, 0, 2], [2, 2, 0]]
    everyone = cases.pieces_of([[2, 2, 2]] * 2, tokens=False, dtype=torch.float64)
    real = [[piece for piece, weight in zip(*pair) if weight] for pair in zip(everyone, weights)]
    groups = real if sync == "last" else [[piece] for mine in real for piece in mine]
    model = cases.network(torch.float64)
    for measured, gradient in ranks.run(_fillers, 2, sync, weights):
        assert measured.groups == len(groups)
        assert cases.difference(measured, cases.reference(model, groups)) < 1e-12
        assert torch.dist(gradient, cases.gradient(model, sum(real, []))) < 1e-10


# -- precision


def _mixed(reduce_dtype: torch.dtype, sync: str) -> tuple[Measurement, float]:
    """A passive window in bfloat16, and the squared length of its gradient."""
    everyone = _everyone(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = sharding.sharded(cases.network(), 2, policy)
    tap = gradients.attach(model)

    def note(piece: cases.Piece, loss: Tensor) -> None:
        tap.note(piece.samples, piece.weight)

    sharding.backwards(model, everyone[distributed.rank()], sharding.total(everyone), sync, note)
    return tap.read().read(), sharding.whole(model).square().sum().item()


def _half_square(groups: list[list[cases.Piece]], total: float, reduce_dtype: torch.dtype) -> float:
    """Sum of the groups' squared lengths, each added up from gradients in bfloat16 in the type of the reduction."""
    square = 0.0
    for group in groups:
        added = None
        for piece in group:
            model = cases.network().to(torch.bfloat16)
            half = cases.replace(piece, inputs=piece.inputs.to(torch.bfloat16))
            (cases.mean_loss(model, half) * (piece.weight / total * 2)).backward()
            grads = [parameter.grad.to(reduce_dtype) for parameter in model.parameters() if parameter.requires_grad]
            added = grads if added is None else [one + other for one, other in zip(added, grads)]
        square += sum(gradient.double().square().sum().item() for gradient in added)
    return square


@pytest.mark.parametrize("sync", ["each", "last"])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_measured_in_single(reduce_dtype: torch.dtype, sync: str) -> None:
    everyone = _everyone(torch.float32)
    groups = everyone if sync == "last" else [[piece] for mine in everyone for piece in mine]
    expected = _half_square(groups, sharding.total(everyone), reduce_dtype) / 4
    # torch adds up to 16384 squares in single precision, which is right to 5e-6 on numbers with so few digits.
    for measured, mean_square in ranks.run(_mixed, 2, reduce_dtype, sync):
        assert measured.group_square == pytest.approx(expected, rel=5e-6)
        assert measured.mean_square == pytest.approx(mean_square, rel=5e-6)


def _identical(policy: MixedPrecisionPolicy) -> Measurement:
    model = sharding.sharded(cases.network(), 2, policy)
    piece = cases.pieces([4], tokens=False)[0]
    return sharding.one_window(gradients.attach(model), model, [piece, piece], [[4, 4], [4, 4]]).measurement.read()


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_identical_groups_have_no_noise(reduce_dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for measured in ranks.run(_identical, 2, policy):
        assert abs(measured.noise) < 1e-6 * measured.samples * measured.mean_square


# -- what gradients are divided by


def _divided(factor: float, dtype: torch.dtype, shards: int) -> tuple[Measurement, Tensor]:
    everyone = cases.pieces_of(SIZES * (distributed.size() // 2), tokens=True, dtype=dtype)
    model = sharding.sharded(cases.network(dtype), shards)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(factor)
            # gloo has no reduction that multiplies first
            module.set_force_sum_reduction_for_comms(True)
    tap = gradients.attach(model)
    outcome = sharding.one_window(tap, model, everyone[distributed.rank()], SIZES * (distributed.size() // 2))
    return outcome.measurement.read(), sharding.whole(model)


@pytest.mark.parametrize(("dtype", "world", "shards"), [(torch.float32, 2, 2), (torch.float64, 4, 2)])
def test_a_factor_of_the_users_own_changes_nothing(dtype: torch.dtype, world: int, shards: int) -> None:
    everyone = cases.pieces_of(SIZES * (world // 2), tokens=True, dtype=dtype)
    model = cases.network(dtype)
    expected = cases.reference(model, [[piece] for mine in everyone for piece in mine])
    close = 1e-6 if dtype == torch.float32 else 1e-12
    for measured, gradient in ranks.run(_divided, world, 300.0, dtype, shards):
        assert cases.difference(measured, expected) < close
        big_batch = cases.gradient(model, sum(everyone, []))
        assert torch.dist(gradient, big_batch) / big_batch.norm() < close


# -- clipping, skipping, stepping


def _clipped(max_norm: float, shards: int) -> tuple[Tensor, Tensor, float, Measurement]:
    """Clipped by a window, and by torch."""
    sizes = SIZES * (distributed.size() // 2)
    everyone = cases.pieces_of(sizes, tokens=True, dtype=torch.float64)
    mine = everyone[distributed.rank()]
    model, plain = (sharding.sharded(cases.network(torch.float64), shards) for _ in range(2))
    outcome = sharding.one_window(gradients.attach(model), model, mine, sizes, max_norm=max_norm)
    sharding.backwards(plain, mine, sharding.total(everyone), "each")
    norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm).full_tensor().item()
    return sharding.whole(model), sharding.whole(plain), norm, outcome.measurement.read()


@pytest.mark.parametrize(("world", "shards"), [(2, 2), (4, 2)])
def test_clipping_is_torchs_and_comes_after_measuring(world: int, shards: int) -> None:
    for clipped, expected, norm, measured in ranks.run(_clipped, world, 0.5, shards):
        assert norm > 0.5
        assert clipped.norm().item() == pytest.approx(0.5, rel=1e-5)
        assert torch.dist(clipped, expected) < 1e-10
        assert measured.mean_square == pytest.approx(norm**2, rel=1e-12)


def _not_finite(bad: float, scaled: bool) -> tuple[bool, bool, int, bool, list[float]]:
    """One rank has one bad sample; then a sound window follows."""
    model = sharding.sharded(cases.network(), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    tap = gradients.attach(model, optimizer)
    before = [parameter.detach().full_tensor().clone() for parameter in model.parameters()]
    steps, scales = [], []
    for window_number in range(2):
        mine = _everyone(torch.float32)[distributed.rank()]
        if window_number == 0 and distributed.rank() == 1:
            mine[0].inputs[0, 0] = bad
        with gradients.accumulate(tap, cases.plan(SIZES)) as window:
            for piece in mine:
                with window.micro_batch():
                    loss = cases.mean_loss(model, piece)
                    window.backward(loss, samples=piece.samples, weight=piece.weight, scaler=scaler)
        outcome = window.finish(optimizer, max_norm=1.0, scaler=scaler)
        outcome.step()
        model.zero_grad()
        after = [parameter.detach().full_tensor() for parameter in model.parameters()]
        steps.append(any(not torch.equal(one, other) for one, other in zip(before, after)))
        scales.append(scaler.get_scale() if scaler else 1.0)
    measured = outcome.measurement.read()
    sound = all(bool(parameter.isfinite().all()) for parameter in after)
    return steps[0], steps[1], measured.groups, sound, scales


@pytest.mark.parametrize(("bad", "scaled"), [(math.nan, False), (math.inf, True)])
def test_a_window_that_is_not_finite_on_one_rank_is_skipped_on_all(bad: float, scaled: bool) -> None:
    for first, second, groups, sound, scales in ranks.run(_not_finite, 2, bad, scaled):
        assert not first and second and sound
        assert groups == 6
        assert scales == ([2.0**9, 2.0**9] if scaled else [1.0, 1.0])
