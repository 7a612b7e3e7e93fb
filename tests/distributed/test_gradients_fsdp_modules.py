"""FSDP2 as people set it up: modules that share a unit or are frozen, placements, views, taps that come and go."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import fsdp_cases as sharding
import gradient_cases as cases
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from adabatch import distributed, gradients
from adabatch.gradients import layout as layouts
from adabatch.gradients.shards import ShardSource
from adabatch.noise import Measurement

SIZES = [[3, 1, 4], [2, 2, 5]]


def _everyone(dtype: torch.dtype = torch.float64) -> list[list[cases.Piece]]:
    return cases.pieces_of(SIZES, tokens=True, dtype=dtype)


# -- modules and placements


def _by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else None


def _tied_group(network: nn.Module) -> nn.Module:
    """Two modules that share a weight in one unit, and the rest in the root's."""
    mesh = sharding.mesh(distributed.size())
    fully_shard([network.first, network.again], mesh=mesh)
    return fully_shard(network, mesh=mesh)


def _frozen_unit(network: nn.Module) -> nn.Module:
    network.wide.requires_grad_(False)
    network.narrow.bias.requires_grad_(False)
    return sharding.sharded(network, distributed.size())


def _columns(network: nn.Module) -> nn.Module:
    return sharding.sharded(network, distributed.size(), shard_placement_fn=_by_columns)


def _kept_whole(network: nn.Module) -> nn.Module:
    """Parameters stay whole from forward to backward, and one forward pass was without a backward."""
    model = sharding.sharded(network, distributed.size(), reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(2, 6))
    return model


class Recomputed(nn.Module):
    """A module whose activations are computed anew in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.inner, inputs, use_reentrant=False)


def _recomputed(network: nn.Module) -> nn.Module:
    network.wide = Recomputed(network.wide)
    return sharding.sharded(network, distributed.size())


def _inside(network: nn.Module) -> nn.Module:
    """The sharded model is a part of a module that is not."""
    return nn.Sequential(sharding.sharded(network, distributed.size()))


def _one_window(make: Callable[[nn.Module], nn.Module]) -> tuple[Measurement, Measurement, Tensor]:
    """A window before which the model was evaluated, and a passive one; in single precision."""
    everyone = _everyone(torch.float32)
    mine = everyone[distributed.rank()]
    model = make(cases.network())
    tap = gradients.attach(model)
    with torch.no_grad():
        model(torch.ones(2, 6))
    measured = sharding.one_window(tap, model, mine, SIZES).measurement.read()
    gradient = sharding.whole(model)
    model.zero_grad()
    for piece in mine:
        (cases.mean_loss(model, piece) * (piece.weight / sharding.total(everyone) * 2)).backward()
        tap.note(piece.samples, piece.weight)
    return measured, tap.read().read(), gradient


@pytest.mark.parametrize("make", [_tied_group, _frozen_unit, _columns, _kept_whole, _recomputed, _inside])
def test_modules_are_sharded_in_many_ways(make: Callable[[nn.Module], nn.Module]) -> None:
    everyone = _everyone(torch.float32)
    network = cases.network()
    if make is _frozen_unit:
        network.wide.requires_grad_(False)
        network.narrow.bias.requires_grad_(False)
    expected = cases.reference(network, [[piece] for mine in everyone for piece in mine])
    big_batch = cases.gradient(network, sum(everyone, []))
    for measured, passive, gradient in ranks.run(_one_window, 2, make):
        assert cases.difference(measured, expected) < 1e-6
        assert passive.group_square == pytest.approx(expected.group_square, rel=1e-6)
        assert passive.mean_square == pytest.approx(expected.mean_square, rel=1e-6)
        assert torch.dist(gradient, big_batch) / big_batch.norm() < 1e-6


# -- views


class Weighed:
    """A view in which element i of every gradient counts i + 1 times, and which leaves one parameter out."""

    name = "weighed"

    def __init__(self, left_out: int) -> None:
        self.left_out = left_out

    def open(self) -> None:
        """Nothing to take from an optimizer."""

    def square(self, index: int, gradient: Tensor) -> Tensor | None:
        if index == self.left_out:
            return None
        flat = gradient.reshape(-1).double()
        return (flat.square() * torch.arange(1, len(flat) + 1)).sum()


def _views(make: Callable[[nn.Module], nn.Module]) -> list[float]:
    """Squared lengths of all groups over all ranks in the Euclidean and the weighed view."""
    everyone = _everyone()
    model = make(cases.network(torch.float64))
    source = ShardSource(layouts.survey(model), [Weighed(2)])
    source.measure(True)
    source.open()

    def close(piece: cases.Piece, loss: Tensor) -> None:
        source.close_micro_batch(piece.weight)

    sharding.backwards(model, everyone[distributed.rank()], sharding.total(everyone), "each", close)
    squares = source.collect()
    dist.all_reduce(squares)
    return (squares / 4).tolist()


@pytest.mark.parametrize("make", [_tied_group, _columns])
def test_views_see_every_parameters_whole_gradient(make: Callable[[nn.Module], nn.Module]) -> None:
    everyone = _everyone()
    network = cases.network(torch.float64)
    expected = [0.0, 0.0]
    for piece in sum(everyone, []):
        exact = copy.deepcopy(network)
        (cases.mean_loss(exact, piece) * (piece.weight / sharding.total(everyone))).backward()
        trained = [parameter for parameter in exact.parameters() if parameter.requires_grad]
        for index, parameter in enumerate(trained):
            square = parameter.grad.square().reshape(-1)
            expected[0] += square.sum().item()
            expected[1] += 0.0 if index == 2 else (square * torch.arange(1, len(square) + 1)).sum().item()
    for squares in ranks.run(_views, 2, make):
        assert squares == pytest.approx(expected, rel=1e-12)


class Part:
    """The Euclidean length of one parameter's gradient, which can be added up shard by shard."""

    name = "part"

    def __init__(self, index: int) -> None:
        self.index = index

    def open(self) -> None:
        """Nothing to take from an optimizer."""

    def square(self, index: int, gradient: Tensor) -> Tensor | None:
        return gradient.double().square().sum() if index == self.index else None


def _part(index: int, shards: int, sync: str) -> tuple[float, float]:
    sizes = SIZES * (distributed.size() // 2)
    mine = cases.pieces_of(sizes, tokens=True, dtype=torch.float64)[distributed.rank()]
    model = sharding.sharded(cases.network(torch.float64), shards)
    tap = gradients.attach(model, rulers=[Part(index)], sync=sync)
    return sharding.one_window(tap, model, mine, sizes).measurement.read().views["part"]


@pytest.mark.parametrize(("world", "shards", "sync"), [(2, 2, "last"), (4, 2, "each"), (4, 4, "each")])
def test_a_view_of_one_parameter_is_measured_in_windows(world: int, shards: int, sync: str) -> None:
    """Of narrow.weight, which has 6 rows: on 4 ranks the last one has none of it."""
    sizes = SIZES * (world // 2)
    everyone = cases.pieces_of(sizes, tokens=True, dtype=torch.float64)
    groups = everyone if sync == "last" else [[piece] for mine in everyone for piece in mine]
    network = cases.network(torch.float64)
    for other in network.parameters():
        other.requires_grad_(other is network.narrow.weight)
    expected = cases.reference(network, groups)
    trained = [name for name, parameter in cases.network().named_parameters() if parameter.requires_grad]
    index = trained.index("narrow.weight")
    for mean_square, group_square in ranks.run(_part, world, index, shards, sync):
        assert mean_square == pytest.approx(expected.mean_square, rel=1e-12)
        assert group_square == pytest.approx(expected.group_square, rel=1e-12)


# -- coming and going


def _in_turns() -> tuple[bool, bool, list[Measurement], list[int]]:
    """A tap that measures every other window, leaves, and makes room for the next."""
    model = sharding.sharded(cases.network(), 2)
    mine = _everyone(torch.float32)[distributed.rank()]
    comms = [module._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm for module in _modules(model)]
    tap = gradients.attach(model)
    measured, groups = [], []
    for step in range(4):
        model.zero_grad()
        tap.measure(step % 2 == 0)
        for piece in mine:
            cases.mean_loss(model, piece).backward()
            tap.note(piece.samples, piece.weight)
        groups.append(tap.read().read().groups)
    tap.detach()
    left = [module._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm for module in _modules(model)]
    model.zero_grad()
    sharding.backwards(model, mine, 1.0, "each")
    with gradients.attach(model) as second:
        measured.append(sharding.one_window(second, model, mine, SIZES).measurement.read())
    return comms == left, len(comms) == 3, measured, groups


def _modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "set_custom_reduce_scatter")]


def test_a_tap_measures_at_times_and_leaves_everything_as_it_was() -> None:
    for restored, all_modules, (measured,), groups in ranks.run(_in_turns, 2):
        assert restored and all_modules
        assert groups == [6, 0, 6, 0]
        assert measured.groups == 6
