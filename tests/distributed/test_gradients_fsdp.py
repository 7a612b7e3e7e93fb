"""Taps and windows under FSDP2 and HSDP, over real gloo processes: they measure what any other tap does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import fsdp_cases as sharding
import gradient_cases as cases
import pytest
import ranks
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adabatch import distributed, gradients
from adabatch.noise import Measurement

# Micro-batches of each rank, by number of ranks.
SIZES = {1: [[3, 1, 4]], 2: [[3, 1, 4], [2, 2, 5]], 4: [[3, 2], [2, 1], [4, 1], [1, 5]]}

# Ranks, shards, what is synchronised, and the type of everything: FSDP2 where there are as many shards as ranks, HSDP
# elsewhere. Gradients in double precision are divided before their reduction.
SETTINGS = [
    (2, 2, "each", torch.float32),
    (2, 2, "last", torch.float32),
    (4, 4, "each", torch.float64),
    (4, 4, "last", torch.float32),
    (4, 2, "each", torch.float32),
    (4, 2, "last", torch.float64),
    (1, 1, "each", torch.float64),
]
NAMES = [f"{world}-{shards}-{sync}-{str(dtype)[6:]}" for world, shards, sync, dtype in SETTINGS]


@functools.cache
def results(function: Callable[..., Any], world: int) -> list[dict[Any, Any]]:
    """What each rank found in each setting with so many ranks, which start once for all of them."""
    return ranks.run(function, world, [setting for setting in SETTINGS if setting[0] == world])


def pieces_of(world: int, dtype: torch.dtype) -> list[list[cases.Piece]]:
    return cases.pieces_of(SIZES[world], tokens=True, dtype=dtype)


def reference(world: int, sync: str, dtype: torch.dtype) -> Measurement:
    everyone = pieces_of(world, dtype)
    groups = everyone if sync == "last" else [[piece] for mine in everyone for piece in mine]
    return cases.reference(cases.network(dtype), groups)


def tolerance(dtype: torch.dtype) -> float:
    return 1e-6 if dtype == torch.float32 else 1e-13


# -- the passive tap


def _passive(settings: list[tuple[Any, ...]]) -> dict[Any, tuple[list[Measurement], bool]]:
    return {setting: _tapped_and_not(*setting) for setting in settings}


def _tapped_and_not(world: int, shards: int, sync: str, dtype: torch.dtype) -> tuple[list[Measurement], bool]:
    """Two windows of a loop that knows nothing of adabatch, and whether its gradients are the same without the tap."""
    everyone = pieces_of(world, dtype)
    mine, total = everyone[distributed.rank()], sharding.total(everyone)
    model, untapped = (sharding.sharded(cases.network(dtype), shards) for _ in range(2))
    measured, same = [], True
    tap = gradients.attach(model)
    for _ in range(2):
        for either in (model, untapped):
            either.zero_grad()
        sharding.backwards(model, mine, total, sync, lambda piece, loss: tap.note(piece.samples, piece.weight, loss))
        measured.append(tap.read().read())
        sharding.backwards(untapped, mine, total, sync)
        pairs = zip(sharding.shards_of(model), sharding.shards_of(untapped), strict=True)
        same &= all(torch.equal(one, other) for one, other in pairs)
    return measured, same


@pytest.mark.parametrize("setting", SETTINGS, ids=NAMES)
def test_the_passive_tap_agrees_and_leaves_every_byte_alone(setting: tuple[int, int, str, torch.dtype]) -> None:
    world, _, sync, dtype = setting
    expected = reference(world, sync, dtype)
    found = [rank[setting] for rank in results(_passive, world)]
    for measured, same in found:
        assert same
        assert measured == found[0][0], "ranks measured differently"
        assert max(cases.difference(one, expected) for one in measured) < tolerance(dtype)


# -- windows


def _windows(settings: list[tuple[Any, ...]]) -> dict[Any, tuple[list[Measurement], Tensor]]:
    return {setting: _two_windows(*setting) for setting in settings}


def _two_windows(world: int, shards: int, sync: str, dtype: torch.dtype) -> tuple[list[Measurement], Tensor]:
    model = sharding.sharded(cases.network(dtype), shards)
    mine = pieces_of(world, dtype)[distributed.rank()]
    measured = []
    with gradients.attach(model, sync=sync) as tap:
        for _ in range(2):
            model.zero_grad()
            measured.append(sharding.one_window(tap, model, mine, SIZES[world]).measurement.read())
    return measured, sharding.whole(model)


@pytest.mark.parametrize("setting", SETTINGS, ids=NAMES)
def test_windows_agree_with_the_reference(setting: tuple[int, int, str, torch.dtype]) -> None:
    world, _, sync, dtype = setting
    expected = reference(world, sync, dtype)
    big_batch = cases.gradient(cases.network(dtype), [cases.joined(sum(pieces_of(world, dtype), []))])
    for rank in results(_windows, world):
        measured, gradient = rank[setting]
        assert max(cases.difference(one, expected) for one in measured) < tolerance(dtype)
        assert torch.dist(gradient, big_batch) / big_batch.norm() < tolerance(dtype)


# -- the same four groups, whoever holds them

FOUR = [3, 1, 4, 2]


def _four(world: int, wrapper: str, shards: int, dtype: torch.dtype) -> Measurement:
    """Four groups of samples, a share of them on each rank, one micro-batch each."""
    share = 4 // world
    sizes = [FOUR[rank * share : (rank + 1) * share] for rank in range(world)]
    model: nn.Module = cases.network(dtype)
    model = DistributedDataParallel(model) if wrapper == "ddp" else model
    model = sharding.sharded(model, shards) if wrapper == "fsdp" else model
    mine = cases.pieces(FOUR, tokens=False, dtype=dtype)[distributed.rank() * share :][:share]
    tap = gradients.attach(model, kind="hooks" if wrapper == "ddp" and share > 1 else "auto")
    return sharding.one_window(tap, model, mine, sizes).measurement.read()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("world", "wrapper", "shards"), [(2, "ddp", 1), (4, "ddp", 1), (2, "fsdp", 2), (4, "fsdp", 4), (4, "fsdp", 2)]
)
def test_noise_and_signal_are_the_same_under_every_wrapper(
    world: int, wrapper: str, shards: int, dtype: torch.dtype
) -> None:
    groups = [[piece] for piece in cases.pieces(FOUR, tokens=False, dtype=dtype)]
    expected = cases.reference(cases.network(dtype), groups)
    # The noise is a difference of squared lengths: single precision leaves it right to their rounding.
    rounding = tolerance(dtype) * expected.mean_square
    for measured in [_four(1, "none", 1, dtype), *ranks.run(_four, world, world, wrapper, shards, dtype)]:
        assert measured.groups == 4
        assert measured.noise == pytest.approx(expected.noise, abs=rounding * expected.samples)
        assert measured.signal == pytest.approx(expected.signal, abs=rounding)
