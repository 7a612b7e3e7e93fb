"""Taps and windows under DistributedDataParallel, over real gloo processes."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import gradient_cases as cases
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adabatch import distributed, gradients
from adabatch.gradients.statistics import SQUARES
from adabatch.noise import Measurement

# Numbers that a window sends over the ranks: the last one is its groups' squared length.
NUMBERS = SQUARES + 1

def _windows(
    sizes: list[list[int]], tokens: bool, kind: str, dtype: torch.dtype
) -> tuple[list[Measurement], torch.Tensor, str]:
    """Three windows, because DDP builds its buckets anew after the first."""
    model = DistributedDataParallel(cases.network(dtype), bucket_cap_mb=0.05)
    mine = cases.pieces_of(sizes, tokens=tokens, dtype=dtype)[distributed.rank()]
    measured = []
    with gradients.attach(model, kind=kind) as tap:
        for _ in range(3):
            model.zero_grad()
            measured.append(cases.one_window(tap, model, mine, sizes).measurement.read())
    return measured, cases.flat(model.module), tap.source.kind


@pytest.mark.parametrize("kind", ["hooks", "ddp"])
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("name", cases.LAYOUTS)
def test_windows_agree_with_the_reference(name: str, tokens: bool, kind: str) -> None:
    sizes = cases.LAYOUTS[name]
    for dtype, tolerance, exact in ((torch.float32, 1e-6, 1e-5), (torch.float64, 1e-12, 1e-12)):
        results = ranks.run(_windows, len(sizes), sizes, tokens, kind, dtype)
        everyone = cases.pieces_of(sizes, tokens=tokens, dtype=dtype)
        groups = everyone if kind == "ddp" else [[piece] for mine in everyone for piece in mine]
        model = cases.network(dtype)
        expected = cases.reference(model, groups)
        big_batch = cases.gradient(model, [cases.joined([piece for mine in everyone for piece in mine])])
        for measured, gradient, used in results:
            assert used == kind
            assert measured == results[0][0], "ranks measured differently"
            assert max(cases.difference(one, expected) for one in measured) < tolerance
            assert torch.dist(gradient, big_batch) / big_batch.norm() < exact


def _passive(kind: str, accumulation: bool) -> tuple[Measurement, list[torch.Tensor], list[torch.Tensor]]:
    """A loop that owns synchronisation and divides by itself, beside the same loop without a tap."""
    sizes = cases.LAYOUTS["several"] if accumulation else cases.LAYOUTS["one each"]
    everyone = cases.pieces_of(sizes, tokens=True, dtype=torch.float32)
    total = sum(piece.weight for mine in everyone for piece in mine)
    mine = everyone[distributed.rank()]
    found = []
    for tapped in (True, False):
        model = DistributedDataParallel(cases.network())
        tap = gradients.attach(model, kind=kind) if tapped else None
        for index, piece in enumerate(mine):
            model.require_backward_grad_sync = index == len(mine) - 1
            # DDP takes the mean over ranks, so the loop multiplies by their number
            loss = cases.mean_loss(model, piece)
            (loss * (piece.weight / total * 2)).backward()
            if tap:
                tap.note(piece.samples, piece.weight, loss)
        if tap:
            measured = tap.read().read()
            tap.detach()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    return measured, found[0], found[1]


@pytest.mark.parametrize("kind", ["hooks", "ddp"])
@pytest.mark.parametrize("accumulation", [False, True])
def test_the_passive_tap_agrees_and_leaves_every_byte_alone(kind: str, accumulation: bool) -> None:
    sizes = cases.LAYOUTS["several" if accumulation else "one each"]
    everyone = cases.pieces_of(sizes, tokens=True, dtype=torch.float32)
    groups = everyone if kind == "ddp" else [[piece] for mine in everyone for piece in mine]
    expected = cases.reference(cases.network(), groups)
    for measured, tapped, untapped in ranks.run(_passive, 2, kind, accumulation):
        assert cases.difference(measured, expected) < 1e-6
        assert all(torch.equal(one, other) for one, other in zip(tapped, untapped, strict=True))


def _tokens_by_hand() -> float:
    """Rank 0: 4 tokens of gradient 1; rank 1: 1 token of gradient 5."""
    parameter = nn.Parameter(torch.zeros((), dtype=torch.float64))
    model = DistributedDataParallel(Scalar(parameter))
    tap = gradients.attach(model)
    weight, slope = [(4, 1.0), (1, 5.0)][distributed.rank()]
    with gradients.accumulate(tap, cases.plan([[4], [1]])) as window, window.micro_batch():
        window.backward(model(slope), samples=weight)
    window.finish(torch.optim.SGD([parameter], lr=0.1))
    return parameter.grad.item()


class Scalar(nn.Module):
    """One parameter; output = parameter x slope."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.parameter = parameter

    def forward(self, slope: float) -> torch.Tensor:
        return self.parameter * slope


def test_unequal_ranks_without_accumulation() -> None:
    assert ranks.run(_tokens_by_hand, 2) == pytest.approx([1.8, 1.8], rel=1e-14)


def _filler(kind: str, weights: list[list[int]]) -> tuple[Measurement, torch.Tensor]:
    model = DistributedDataParallel(cases.network(torch.float64))
    tap = gradients.attach(model, kind=kind)
    rank = distributed.rank()
    everyone = cases.pieces_of([[2] * len(mine) for mine in weights], tokens=False, dtype=torch.float64)
    plan = cases.plan([[2 if weight else 0 for weight in mine] for mine in weights])
    with gradients.accumulate(tap, plan) as window:
        for piece, weight in zip(everyone[rank], weights[rank]):
            with window.micro_batch():
                window.backward(cases.mean_loss(model, piece), samples=2 if weight else 0, weight=weight)
    return window.finish(torch.optim.SGD(model.parameters(), lr=0.1)).measurement.read(), cases.flat(model.module)


@pytest.mark.parametrize(("kind", "groups"), [("hooks", 3), ("ddp", 2)])
def test_fillers_and_ranks_of_weight_0_drop_out(kind: str, groups: int) -> None:
    weights = [[2, 2], [2, 0], [0, 0]]
    everyone = cases.pieces_of([[2, 2]] * 3, tokens=False, dtype=torch.float64)
    real = [everyone[0], everyone[1][:1]] if kind == "ddp" else [[piece] for piece in (*everyone[0], everyone[1][0])]
    model = cases.network(torch.float64)
    expected = cases.reference(model, real)
    for measured, gradient in ranks.run(_filler, 3, kind, weights):
        assert measured.groups == groups
        assert cases.difference(measured, expected) < 1e-12
        assert torch.dist(gradient, cases.gradient(model, [cases.joined(sum(real, []))])) < 1e-10


# -- synchronisation


@contextlib.contextmanager
def _counted() -> Iterator[tuple[list[int], list[int]]]:
    """Elements of every reduction and of every gathering."""
    reductions: list[int] = []
    gatherings: list[int] = []
    reduce, gather = dist.all_reduce, distributed._gather_single

    def reducing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reductions.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    def gathering(gathered: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gatherings.append(tensor.numel())
        return gather(gathered, tensor, *args, **kwargs)

    dist.all_reduce, distributed._gather_single = reducing, gathering
    try:
        yield reductions, gatherings
    finally:
        dist.all_reduce, distributed._gather_single = reduce, gather


def _count_collectives(make: Callable[[], nn.Module], accumulation: int) -> tuple[list[int], list[int], int]:
    model = make()
    tap = gradients.attach(model)
    pieces = cases.pieces([1] * accumulation, tokens=False, seed=distributed.rank())
    with _counted() as (reductions, gatherings):
        for _ in range(3):
            reductions.clear()
            gatherings.clear()
            model.zero_grad()
            cases.one_window(tap, model, pieces, [[1] * accumulation] * 2)
    return reductions, gatherings, len(tap.layout.parallel)


def _one_module() -> nn.Module:
    return DistributedDataParallel(cases.network())


def _two_modules() -> nn.Module:
    """Wrapped parts inside a plain module."""
    return nn.Sequential(DistributedDataParallel(cases.network()), DistributedDataParallel(nn.Linear(6, 2)))


@pytest.mark.parametrize(("make", "modules"), [(_one_module, 1), (_two_modules, 2)])
def test_one_reduction_per_bucket_and_one_small_collective(make: Callable[[], nn.Module], modules: int) -> None:
    for reductions, gatherings, parallel in ranks.run(_count_collectives, 2, make, 8):
        assert parallel == modules
        assert len(reductions) == modules
        assert gatherings == [NUMBERS]


def _kept_back(together: int) -> tuple[list[Measurement], list[int], list[bool]]:
    """Six windows, of which every ``together``-th lets the numbers travel; the last one's is read without."""
    model = DistributedDataParallel(cases.network())
    tap = gradients.attach(model)
    sizes = [[2, 1], [1, 1], [1, 2]]
    mine = cases.pieces(sizes[distributed.rank()], tokens=False, seed=distributed.rank())
    pending = []
    with _counted() as (_, gatherings):
        for number in range(1, 7):
            model.zero_grad()
            kept = number % together != 0 or number == 6
            stop = number == 2 and distributed.rank() == 1
            with gradients.accumulate(tap, cases.plan(sizes)) as window:
                for piece in mine:
                    with window.micro_batch():
                        window.backward(cases.mean_loss(model, piece), samples=piece.samples)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            pending.append(window.finish(optimizer, exchange=not kept, stop=stop).measurement)
        measured = [one.read() for one in pending]
    return measured, gatherings, [one.stop for one in pending]


def test_windows_that_are_kept_back_travel_together_and_measure_the_same() -> None:
    expected = ranks.run(_kept_back, 3, 1)[0][0]
    for together, gathered in ((2, [2, 2, 2]), (4, [4, 2]), (7, [6])):
        for measured, gatherings, stops in ranks.run(_kept_back, 3, together):
            assert measured == expected, "to the last bit"
            assert gatherings == [windows * NUMBERS for windows in gathered]
            assert stops == [False, True, False, False, False, False]


def _weights_of_their_own() -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Token weights, kept back: the division needs their sum at once."""
    model = DistributedDataParallel(cases.network())
    tap = gradients.attach(model)
    sizes = [[2, 1], [1, 1]]
    everyone = cases.pieces_of(sizes, tokens=True, dtype=torch.float32)
    with _counted() as (_, gatherings):
        cases.one_window(tap, model, everyone[distributed.rank()], sizes, exchange=False)
    plain = cases.network()
    big_batch = cases.gradient(plain, [cases.joined([piece for mine in everyone for piece in mine])])
    return gatherings, cases.flat(model.module), big_batch


def test_weights_of_their_own_are_never_kept_back() -> None:
    for gatherings, gradient, big_batch in ranks.run(_weights_of_their_own, 2):
        assert gatherings == [NUMBERS]
        assert torch.dist(gradient, big_batch) / big_batch.norm() < 1e-5


# -- parameters of all kinds


class OnOneRank(nn.Module):
    """``special`` has gradient ``slope`` on rank 0 and is not used on rank 1; ``idle`` is used nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Parameter(torch.zeros(()))
        self.special = nn.Parameter(torch.zeros(()))
        self.idle = nn.Parameter(torch.zeros(()))

    def forward(self, slope: float) -> torch.Tensor:
        used = self.common * 0.0
        return used + self.special * slope if distributed.rank() == 0 else used


def _unused(kind: str) -> tuple[float, float, float, bool]:
    network = OnOneRank()
    model = DistributedDataParallel(network, find_unused_parameters=True)
    tap = gradients.attach(model, kind=kind)
    with gradients.accumulate(tap, cases.plan([[1], [1]])) as window, window.micro_batch():
        window.backward(model(2.0), samples=1)
    measured = window.finish(torch.optim.SGD(model.parameters(), lr=0.1)).measurement.read()
    return network.special.grad.item(), measured.mean_square, measured.group_square, network.idle.grad is None


@pytest.mark.parametrize("kind", ["hooks", "ddp"])
def test_a_parameter_used_on_one_rank_only(kind: str) -> None:
    """Gradients 2 and none: mean 1, squares 4 and 0, each with weight 1/4."""
    assert ranks.run(_unused, 2, kind) == [(1.0, 1.0, 1.0, True)] * 2


def _complex(kind: str) -> tuple[float, float]:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    model = DistributedDataParallel(Rotated(parameter))
    tap = gradients.attach(model, kind=kind)
    with gradients.accumulate(tap, cases.plan([[1], [1]])) as window, window.micro_batch():
        window.backward(model(3 + 4j if distributed.rank() == 0 else 1j), samples=1)
    measured = window.finish(torch.optim.SGD([parameter], lr=0.1)).measurement.read()
    return measured.mean_square, measured.group_square


class Rotated(Scalar):
    def forward(self, slope: complex) -> torch.Tensor:
        return (self.parameter[0] * torch.tensor(slope).conj()).real


@pytest.mark.parametrize("kind", ["hooks", "ddp"])
def test_complex_parameters(kind: str) -> None:
    """Groups 3+4i and i: mean 1.5+2.5i."""
    for mean_square, group_square in ranks.run(_complex, 2, kind):
        assert (mean_square, group_square) == pytest.approx((8.5, 6.5))


# -- all ranks together


def _not_finite_on_one_rank(fused: bool) -> tuple[bool, bool]:
    model = _one_module()
    tap = gradients.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    before = copy.deepcopy(model.state_dict())
    with gradients.accumulate(tap, cases.plan([[2], [2]])) as window, window.micro_batch():
        loss = cases.mean_loss(model, cases.pieces([2], tokens=False)[0])
        window.backward(loss * (math.nan if distributed.rank() == 1 else 1.0), samples=2)
    outcome = window.finish(optimizer, max_norm=1.0)
    outcome.step()
    return outcome.skipped(), all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("fused", [False, True])
def test_one_bad_rank_skips_on_all(fused: bool) -> None:
    assert ranks.run(_not_finite_on_one_rank, 2, fused) == [(True, True)] * 2


def _stop_on_one_rank(kind: str, late: bool) -> list[bool]:
    """Rank 1 asks in the second of four windows."""
    model = _one_module()
    tap = gradients.attach(model, kind=kind)
    piece = cases.pieces([2], tokens=False)[0]
    asked = []
    for number in range(4):
        ask = distributed.rank() == 1 and number == 1
        with gradients.accumulate(tap, cases.plan([[2], [2]])) as window:
            if ask and not late:
                window.request_stop()
            with window.micro_batch():
                window.backward(cases.mean_loss(model, piece), samples=2)
        outcome = window.finish(torch.optim.SGD(model.parameters(), lr=0.1), stop=ask and late)
        asked.append(outcome.stop_requested())
    return asked


@pytest.mark.parametrize("kind", ["hooks", "ddp"])
@pytest.mark.parametrize("late", [False, True])
def test_one_rank_stops_all(kind: str, late: bool) -> None:
    assert ranks.run(_stop_on_one_rank, 2, kind, late) == [[number == 1 for number in range(4)]] * 2


def _fp16() -> list[tuple[float, bool]]:
    """Token weights, a scale that overflows at first, and one rank that starts with a filler."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1000)
    tap = gradients.attach(model)
    rank = distributed.rank()
    sizes = [[0, 4], [4, 4]]
    found = []
    for step in range(6):
        inputs = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(100 * rank + step))
        with gradients.accumulate(tap, cases.plan(sizes)) as window:
            for size, half in zip(sizes[rank], inputs):
                with window.micro_batch():
                    with torch.autocast("cpu", torch.float16):
                        loss = (model(half) - half.sum(dim=1, keepdim=True)).square().mean()
                    window.backward(loss, samples=size, weight=300.0 * size, scaler=scaler)
        outcome = window.finish(optimizer, max_norm=1.0, scaler=scaler)
        outcome.step()
        optimizer.zero_grad()
        found.append((scaler.get_scale(), outcome.skipped()))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return found


def test_fp16_with_token_weights_loses_no_more_windows_than_with_plain_means() -> None:
    first, second = ranks.run(_fp16, 2)
    assert first == second
    assert sum(skipped for _, skipped in first) <= 2
    assert not first[-1][1]


def _single() -> str:
    """One rank wrapped in DistributedDataParallel has nothing to compare with but its micro-batches."""
    dist.init_process_group("gloo", init_method="env://")
    model = DistributedDataParallel(cases.network())
    with gradients.attach(model) as tap:
        measured = cases.one_window(tap, model, cases.pieces([2, 3], tokens=True), [[2, 3]]).measurement.read()
    dist.destroy_process_group()
    expected = cases.reference(cases.network(), [[piece] for piece in cases.pieces([2, 3], tokens=True)])
    assert cases.difference(measured, expected) < 1e-6
    return tap.source.kind


def test_ddp_on_one_rank_uses_hooks() -> None:
    assert ranks.run(_single, 1) == ["hooks"]


def _weights_of_some(kind: str) -> str:
    """Rank 1 gives token weights, rank 0 leaves them out."""
    model = _one_module()
    tap = gradients.attach(model, kind=kind)
    weight = 40.0 if distributed.rank() == 1 else None
    with gradients.accumulate(tap, cases.plan([[2], [2]])) as window, window.micro_batch():
        window.backward(cases.mean_loss(model, cases.pieces([2], tokens=False)[0]), samples=2, weight=weight)
    outcome = window.finish(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        outcome.measurement.read()
    except ValueError as error:
        return str(error)
    return "went on" if weight is None else "waited"


@pytest.mark.parametrize("kind", ["hooks", "ddp"])
def test_weights_on_some_ranks_only_are_an_error(kind: str) -> None:
    first, second = ranks.run(_weights_of_some, 2, kind)
    assert "weight 42.0 in 4 samples: some of its micro-batches were given a weight" in first
    assert second == "waited"


def _every_third_step() -> list[Measurement]:
    """A passive loop that measures now and then, and reads nothing in between."""
    sizes = cases.LAYOUTS["one each"]
    everyone = cases.pieces_of(sizes, tokens=False, dtype=torch.float32)
    piece = everyone[distributed.rank()][0]
    model = DistributedDataParallel(cases.network())
    measured = []
    with gradients.attach(model) as tap:
        for step in range(6):
            tap.measure(step % 3 == 0)
            model.zero_grad()
            (cases.mean_loss(model, piece) * (piece.weight / 8 * 2)).backward()
            if step % 3 == 0:
                tap.note(piece.samples, loss=cases.mean_loss(model, piece))
                measured.append(tap.read().read())
    return measured


def test_the_passive_tap_may_rest_between_measurements() -> None:
    everyone = cases.pieces_of(cases.LAYOUTS["one each"], tokens=False, dtype=torch.float32)
    expected = cases.reference(cases.network(), everyone)
    for measured in ranks.run(_every_third_step, 2):
        assert len(measured) == 2
        assert max(cases.difference(one, expected) for one in measured) < 1e-6
