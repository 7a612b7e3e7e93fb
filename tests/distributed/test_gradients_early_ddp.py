"""Reading late on several ranks: after DDP's reduction has ended, after clipping, and what is noticed of it."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import gradient_cases as cases
import pytest
import ranks
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from adabatch import distributed, gradients
from adabatch.noise import Measurement

SIZES = cases.LAYOUTS["several"]

# What DDP does when a backward ends differs in each.
WRAPPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def _sizes(wrapper: str) -> list[list[int]]:
    """Each rank's micro-batches. DDP's static graph takes no accumulation in its first window (torch 2.13)."""
    return cases.LAYOUTS["one each" if wrapper == "static" else "several"]


def _backward(model: nn.Module, piece: cases.Piece, coefficient: float, last: bool) -> torch.Tensor:
    with contextlib.nullcontext() if last else model.no_sync():
        loss = cases.mean_loss(model, piece)
        (loss * coefficient).backward()
    return loss


def _coefficients(everyone: list[list[cases.Piece]], how: str) -> list[list[float]]:
    """What a loop with DDP's mean over ranks multiplies by: token means over all ranks or over each one's, or means."""
    if how == "means":
        return [[1 / 3 for _ in mine] for mine in everyone]
    total = [sum(piece.weight for piece in mine) for mine in everyone]
    if how == "across":
        return [[piece.weight / sum(total) * len(everyone) for piece in mine] for mine in everyone]
    return [[piece.weight / whole for piece in mine] for mine, whole in zip(everyone, total)]


def _reference(everyone: list[list[cases.Piece]], coefficients: list[list[float]], by_rank: bool) -> list[float]:
    """|mean|^2 and the groups' sum(p^2 |g|^2) and sum(p^2), from a backward pass for each micro-batch."""
    model = cases.network()
    parts = [
        torch.stack([share * cases.gradient(model, [piece]) for piece, share in zip(mine, shares)])
        for mine, shares in zip(everyone, coefficients)
    ]
    total = sum(map(sum, coefficients))
    groups = torch.stack([part.sum(dim=0) for part in parts]) if by_rank else torch.cat(parts)
    weights = [sum(mine) for mine in coefficients] if by_rank else [one for mine in coefficients for one in mine]
    mean_square = groups.sum(dim=0).square().sum().item() / total**2
    return [mean_square, groups.square().sum().item() / total**2, sum(weight**2 for weight in weights) / total**2]


def _late(kind: str, wrapper: str, how: str) -> list[Measurement]:
    """Three windows, each read after clipping, the step of nothing, and zero_grad."""
    everyone = cases.pieces_of(_sizes(wrapper), tokens=True, dtype=torch.float32)
    mine, coefficients = everyone[distributed.rank()], _coefficients(everyone, how)[distributed.rank()]
    model = DistributedDataParallel(cases.network(), bucket_cap_mb=0.05, **WRAPPERS[wrapper])
    measured = []
    with gradients.attach(model, kind=kind, early=True) as tap:
        for _ in range(3):
            for piece, coefficient in zip(mine, coefficients):
                loss = _backward(model, piece, coefficient, last=piece is mine[-1])
                if piece is not mine[-1]:
                    tap.note(piece.samples, coefficient, loss)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            tap.note(mine[-1].samples, coefficients[-1], loss)
            model.zero_grad()
            measured.append(tap.read(factor=None).read())
    return measured


@pytest.mark.parametrize(
    ("kind", "wrapper", "how"),
    [
        *(("hooks", "plain", how) for how in ("across", "own", "means")),
        *(("ddp", wrapper, "own") for wrapper in WRAPPERS),
        ("hooks", "static", "own"),
    ],
)
def test_a_late_read_measures_what_the_last_backward_left(kind: str, wrapper: str, how: str) -> None:
    everyone = cases.pieces_of(_sizes(wrapper), tokens=True, dtype=torch.float32)
    should = _reference(everyone, _coefficients(everyone, how), by_rank=kind == "ddp")
    for measured in ranks.run(_late, 2, kind, wrapper, how):
        for one in measured:
            found = [one.mean_square, one.group_square, one.weight_square]
            assert found == pytest.approx(should, rel=1e-6)
            assert one.samples == sum(map(sum, _sizes(wrapper)))


def _weighted_alike() -> Measurement:
    """No weights of coefficients: the loop divides by all tokens, and says so by factor=1."""
    everyone = cases.pieces_of(SIZES, tokens=True, dtype=torch.float32)
    total = sum(piece.weight for mine in everyone for piece in mine)
    mine = everyone[distributed.rank()]
    model = DistributedDataParallel(cases.network())
    with gradients.attach(model, early=True, last=lambda: model.require_backward_grad_sync) as tap:
        for piece in mine:
            loss = _backward(model, piece, piece.weight / total * 2, last=piece is mine[-1])
            tap.note(piece.samples, piece.weight, loss)
        model.zero_grad()
        return tap.read().read()


def test_a_late_read_of_a_mean() -> None:
    everyone = cases.pieces_of(SIZES, tokens=True, dtype=torch.float32)
    expected = cases.reference(cases.network(), everyone)
    for measured in ranks.run(_weighted_alike, 2):
        assert cases.difference(dataclasses.replace(measured), expected) < 1e-6


def _synchronised_each(early: bool) -> str:
    """Two reductions: what the first one's end left behind is not the window's gradient."""
    piece = cases.pieces([2], tokens=False)[0]
    model = DistributedDataParallel(cases.network())
    with gradients.attach(model, kind="hooks", early=early) as tap:
        for last in (True, False):
            _backward(model, piece, 1.0, last)
            tap.note(2)
        try:
            tap.read()
        except ValueError as error:
            return str(error)
    return "went on"


def test_a_last_backward_that_did_not_synchronise_is_an_error() -> None:
    for said in ranks.run(_synchronised_each, 2, True):
        assert "DDP did not synchronise in it" in said


# -- reads that come too late


def _changed(kind: str, wrapper: str) -> dict[str, str]:
    """What read() says, window after window: nothing, or the beginning of its error."""
    everyone = cases.pieces_of(_sizes(wrapper), tokens=False, dtype=torch.float32)
    mine = everyone[distributed.rank()]
    model = DistributedDataParallel(cases.network(), bucket_cap_mb=0.05, **WRAPPERS[wrapper])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    changes = {
        "nothing": lambda: None,
        "again": lambda: None,
        "foreach": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9, foreach=True),
        "loop": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False),
        "unscale": lambda: scaler.unscale_(optimizer),
        "clip unscaled": lambda: (scaler.unscale_(optimizer), nn.utils.clip_grad_norm_(model.parameters(), 0.1)),
        "step": optimizer.step,
    }
    said = {}
    with gradients.attach(model, kind=kind) as tap:
        for change, make in changes.items():
            for noted_late in (False, True):
                optimizer.zero_grad()
                scaled = scaler if "unscale" in change else None
                scale = 8.0 if scaled else 1.0
                if scaled:
                    scaler.scale(torch.ones(()))
                for piece in mine:
                    _backward(model, piece, scale / 3, last=piece is mine[-1])
                    if piece is not mine[-1] or not noted_late:
                        tap.note(piece.samples)
                make()
                if noted_late:
                    tap.note(mine[-1].samples)
                try:
                    tap.read(factor=1.0, scaler=scaled)
                    said[f"{change} {noted_late}"] = "read"
                except ValueError as error:
                    said[f"{change} {noted_late}"] = str(error)[:25]
                    tap._open(summing=False)
                if scaled:
                    scaler.update()
    return said


@pytest.mark.parametrize("kind", ["hooks", "ddp"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_ddp_does_to_gradients_is_no_change_and_clipping_is_one(kind: str, wrapper: str) -> None:
    expected = dict.fromkeys(["nothing", "again", "unscale", "step"], "read")
    expected |= dict.fromkeys(["foreach", "loop", "clip unscaled"], "the gradients were change")
    for said in ranks.run(_changed, 2, kind, wrapper):
        assert said == {f"{change} {late}": what for change, what in expected.items() for late in (False, True)}


class Heads(nn.Module):
    """A body and three heads; the watched parameters are the first head's and the last one's."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 1)
        self.body = nn.Linear(3, 3)
        self.middle = nn.Linear(3, 1)
        self.right = nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor, head: str) -> torch.Tensor:
        return getattr(self, head)(self.body(inputs))


def _unused(early: bool, views: bool) -> list[float]:
    """Heads that a rank has no gradient for in this backward, and gets one from the other rank's."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Heads(), find_unused_parameters=True, gradient_as_bucket_view=views)
    inputs = torch.randn(2, 3)
    squares = []
    with gradients.attach(model, early=early) as tap:
        for heads in (["left", "middle"], ["right", "middle"], ["middle", "right"]):
            model.zero_grad()
            for number, head in enumerate(heads):
                with contextlib.nullcontext() if number else model.no_sync():
                    (model(inputs, head if distributed.rank() == 0 else "left").mean() / 2).backward()
                tap.note(2)
            squares.append(tap.read().read().mean_square - cases.flat(model.module).square().sum().item())
    return squares


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_gradients_from_other_ranks_are_no_change(early: bool, views: bool) -> None:
    for off in ranks.run(_unused, 2, early, views):
        assert off == pytest.approx([0.0] * 3, abs=1e-6)


# -- FSDP2, and models that nobody synchronises


def _sharded() -> str:
    model = cases.network()
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.size(),)))
    try:
        gradients.attach(model, early=True)
    except ValueError as error:
        gradients.attach(model).detach()
        return str(error)
    return "went on"


def test_early_is_refused_under_fsdp2_and_leaves_nothing_behind() -> None:
    for said in ranks.run(_sharded, 2):
        assert "early=True is not supported under FSDP2" in said and "before clipping" in said


def _shards(kind: str) -> Measurement:
    """FSDP2's mean over the ranks, and weights that the losses were multiplied by."""
    everyone = cases.pieces_of(SIZES, tokens=True, dtype=torch.float32)
    mine, coefficients = everyone[distributed.rank()], _coefficients(everyone, "own")[distributed.rank()]
    model = fully_shard(cases.network(), mesh=init_device_mesh("cpu", (2,)))
    with gradients.attach(model) as tap:
        for piece, coefficient in zip(mine, coefficients):
            model.set_requires_gradient_sync(kind == "hooks" or piece is mine[-1])
            (cases.mean_loss(model, piece) * coefficient).backward()
            tap.note(piece.samples, coefficient)
        return tap.read(factor=None).read()


@pytest.mark.parametrize("kind", ["hooks", "ddp"])
def test_weights_that_the_losses_were_multiplied_by_under_fsdp2(kind: str) -> None:
    everyone = cases.pieces_of(SIZES, tokens=True, dtype=torch.float32)
    should = _reference(everyone, _coefficients(everyone, "own"), by_rank=kind == "ddp")
    for one in ranks.run(_shards, 2, kind):
        assert [one.mean_square, one.group_square, one.weight_square] == pytest.approx(should, rel=1e-6)


def _unwrapped() -> str:
    try:
        gradients.attach(cases.network())
    except ValueError as error:
        return str(error)
    return "went on"


def test_an_unwrapped_model_is_refused_with_the_trainers_names_for_the_wrapped_one() -> None:
    for said in ranks.run(_unwrapped, 2):
        assert "trainer.model_wrapped in Hugging Face, trainer.strategy.model in Lightning" in said
