"""Lengths in the optimizer's geometry and by layer over several ranks, in real gloo processes."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import fsdp_cases
import geometry_cases as geometries
import gradient_cases as cases
import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adabatch import distributed, gradients
from adabatch.gradients import geometry
from adabatch.gradients.layout import survey
from adabatch.noise import Measurement

BOTH = ["adam", "adam_sqrt"]
SIZES = cases.LAYOUTS["several"]


def _everyone(number: int) -> list[list[cases.Piece]]:
    return [cases.pieces(mine, tokens=True, seed=100 * number + rank) for rank, mine in enumerate(SIZES)]


def _attach(model: nn.Module, optimizers: Any, kind: str, names: list[str]) -> gradients.Tap:
    return gradients.attach(model, kind=kind, rulers=geometry.rulers_for(names, optimizers, survey(model)))


def _steps(kind: str, name: str) -> list[tuple[Measurement, dict[str, tuple[float, float]]]]:
    """Eight steps with clipping; each window's measurement and, from the seventh on, its reference on this rank."""
    network = cases.network()
    model = DistributedDataParallel(network, bucket_cap_mb=0.05)
    optimizers = geometries.MAKERS[name](network)
    found = []
    with _attach(model, optimizers, kind, BOTH) as tap:
        for number in range(8):
            before, p = geometries.frozen(network, optimizers)
            everyone = _everyone(number)
            with gradients.accumulate(tap, cases.plan(SIZES)) as window:
                for piece in everyone[distributed.rank()]:
                    with window.micro_batch():
                        window.backward(cases.mean_loss(model, piece), samples=piece.samples, weight=piece.weight)
            outcome = window.finish(optimizers, max_norm=0.5)
            outcome.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            groups = everyone if kind == "ddp" else [[piece] for mine in everyone for piece in mine]
            expected = geometries.views(before, p, groups) if number >= 6 else {}
            found.append((outcome.measurement.read(), expected))
    return found


@pytest.mark.parametrize("kind", ["hooks", "ddp"])
@pytest.mark.parametrize("name", ["adamw", "two"])
def test_views_agree_with_the_reference_over_steps(name: str, kind: str) -> None:
    results = ranks.run(_steps, 2, kind, name)
    assert [measured for measured, _ in results[0]] == [measured for measured, _ in results[1]]
    assert [bool(measured.views) for measured, _ in results[0]] == [False] * 5 + [True] * 3
    for measured, expected in results[0]:
        if expected:
            assert measured.clipped
            assert geometries.difference(measured, expected) < 1e-6


def _new_buckets(kind: str) -> list[Measurement]:
    """The same window three times: DDP builds its buckets anew after the first. And once at another bucket size."""
    network = cases.network()
    optimizers = geometries.MAKERS["adamw"](network)
    for number in range(6):
        loss = cases.mean_loss(network, _everyone(number)[0][0])
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    measured = []
    for megabytes in (0.05, 25):
        model = DistributedDataParallel(network, bucket_cap_mb=megabytes)
        with _attach(model, optimizers, kind, BOTH + ["layers"]) as tap:
            for _ in range(3):
                model.zero_grad()
                mine = _everyone(7)[distributed.rank()]
                measured.append(cases.one_window(tap, model, mine, SIZES).measurement.read())
    return measured


@pytest.mark.parametrize("kind", ["hooks", "ddp"])
def test_views_are_the_same_bits_whatever_is_in_which_bucket(kind: str) -> None:
    for measured in ranks.run(_new_buckets, 2, kind):
        assert measured[0].views["layer:wide"][0] > 0, "names hold nothing of the wrapper"
        assert all(one == measured[0] for one in measured)


def _not_finite_on_one(kind: str) -> list[Measurement]:
    network = cases.network()
    model = DistributedDataParallel(network)
    optimizers = geometries.MAKERS["adamw"](network)
    measured = []
    with _attach(model, optimizers, kind, BOTH) as tap:
        for number in range(8):
            mine = _everyone(number)[distributed.rank()]
            if number in (0, 6) and distributed.rank() == 1:
                mine[1].inputs[0, 0] = math.nan
            outcome = cases.one_window(tap, model, mine, SIZES)
            if not outcome.skipped():
                optimizers[0].step()
            optimizers[0].zero_grad()
            measured.append(outcome.measurement.read())
    return measured


@pytest.mark.parametrize("kind", ["hooks", "ddp"])
def test_all_ranks_leave_out_the_same_views(kind: str) -> None:
    """The first step is skipped on all ranks, so that the views begin one window later."""
    for measured in ranks.run(_not_finite_on_one, 2, kind):
        assert [one.finite for one in measured] == [False] + [True] * 5 + [False, True]
        assert [bool(one.views) for one in measured] == [False] * 7 + [True]


class _Branches(nn.Module):
    """The second layer is used on the ranks whose inputs begin with a positive number, in later windows only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.second(hidden) if both else hidden


def _unused() -> list[Measurement]:
    network = _Branches()
    model = DistributedDataParallel(network, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    measured = []
    with _attach(model, [optimizer], "hooks", BOTH) as tap:
        for number in range(12):
            both = number >= 6 and distributed.rank() == 1
            inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(2 * number + distributed.rank()))
            with gradients.accumulate(tap, cases.plan([[3], [3]])) as window, window.micro_batch():
                window.backward(model(inputs, both).square().mean(), samples=3)
            outcome = window.finish(optimizer)
            outcome.step()
            optimizer.zero_grad()
            measured.append(outcome.measurement.read())
    return measured


def test_a_second_moment_that_one_rank_needs_is_missed_by_all() -> None:
    """Windows 6 to 10 use a layer on rank 1 only whose second moment is new there."""
    results = ranks.run(_unused, 2)
    assert results[0] == results[1]
    assert [bool(one.views) for one in results[0]] == [False] * 5 + [True] + [False] * 5 + [True]


def _sharded() -> tuple[str, list[str], dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
    whole = DistributedDataParallel(cases.network())
    sharded = fsdp_cases.sharded(cases.network(), shards=2)
    optimizer = torch.optim.AdamW([one for one in sharded.parameters() if one.requires_grad], lr=1e-3)
    layout = survey(sharded)
    with pytest.raises(
        ValueError, match="adam and adam_sqrt under FSDP2 .*'euclidean', 'layers' or 'groups'"
    ) as refusal:
        geometry.rulers_for(BOTH, optimizer, layout)
    auto = [view for one in geometry.rulers_for(["auto", "groups"], optimizer, layout) for view in one.names]
    mine = _everyone(1)[distributed.rank()]
    views = []
    for model, kind in ((whole, "hooks"), (sharded, "fsdp")):
        adam = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
        tap = _attach(model, adam, kind, ["layers", "groups"])
        window = fsdp_cases.one_window if kind == "fsdp" else cases.one_window
        views.append(window(tap, model, copy.deepcopy(mine), SIZES).measurement.read().views)
        tap.detach()
    return str(refusal.value), auto, *views


def test_sharded_models_have_parts_and_no_second_moments() -> None:
    for _, auto, whole, sharded in ranks.run(_sharded, 2):
        assert auto == ["group:0"]
        assert list(whole) == ["layer:first", "layer:wide", "layer:narrow", "layer:again", "group:0"]
        assert whole.keys() == sharded.keys()
        for name, pair in whole.items():
            assert sharded[name] == pytest.approx(pair, rel=1e-6), name


def _left_behind() -> bool:
    """Whether the model is gone once nobody needs it."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    with _attach(model, optimizer, "ddp", ["adam_sqrt", "layers"]) as tap:
        model(torch.ones(3, 6)).sum().backward()
        tap.note(3)
        tap.read()
    module = weakref.ref(model.module)
    del model, optimizer, tap
    gc.collect()
    return module() is None


def test_a_model_can_be_collected_after_its_tap_was_detached() -> None:
    """DDP holds its hook's state in C++: what leads from there to the model would keep gloo's threads alive at exit."""
    assert ranks.run(_left_behind, 2) == [True, True]
