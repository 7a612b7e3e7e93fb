"""Lengths of the gradient in the optimizer's geometry, by layer and by parameter group, in one process."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import geometry_cases as geometries
import gradient_cases as cases
import pytest
import torch
from torch import Tensor, nn

from adabatch import gradients
from adabatch.gradients import geometry, preconditioned, rulers
from adabatch.gradients.layout import survey
from adabatch.noise import Measurement

SIZES = [3, 1, 4, 2]
BOTH = ["adam", "adam_sqrt"]


def step(
    tap: gradients.Tap, model: nn.Module, groups: Sequence[cases.Piece], optimizers: Sequence[Any], **finish: Any
) -> Measurement:
    """One window of the groups, and a step."""
    with gradients.accumulate(tap, cases.plan([piece.samples for piece in groups])) as window:
        for piece in groups:
            with window.micro_batch():
                loss = cases.mean_loss(model, piece)
                window.backward(loss, samples=piece.samples, weight=piece.weight, scaler=finish.get("scaler"))
    outcome = window.finish(optimizers, **finish)
    outcome.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return outcome.measurement.read()


def pieces(seed: int, dtype: torch.dtype = torch.float32) -> list[cases.Piece]:
    return cases.pieces(SIZES, tokens=True, seed=seed, dtype=dtype)


def tap_of(model: nn.Module, optimizers: Sequence[Any], names: Sequence[str] = BOTH, **options: Any) -> gradients.Tap:
    return gradients.attach(model, rulers=geometry.rulers_for(names, optimizers, survey(model)), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", geometries.MAKERS)
def test_views_are_those_of_the_state_before_the_step(name: str, dtype: torch.dtype) -> None:
    """Over real steps with clipping: from the sixth window on, and with the P that was there when it began."""
    model = cases.network(dtype)
    optimizers = geometries.MAKERS[name](model)
    tap = tap_of(model, optimizers)
    for number in range(9):
        before, p = geometries.frozen(model, optimizers)
        groups = pieces(number, dtype)
        measured = step(tap, model, groups, optimizers, max_norm=0.5)
        expected = geometries.views(before, p, [[piece] for piece in groups]) if number >= 5 else {}
        assert measured.groups == len(SIZES)
        assert measured.clipped
        if number < 5:
            assert measured.views == {}
        else:
            # In single precision the gradients themselves differ: micro-batches are added up in another order.
            assert geometries.difference(measured, expected) < (3e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("name", BOTH)
def test_one_form_alone_is_the_same(name: str) -> None:
    measured = []
    for names in (BOTH, [name]):
        model = cases.network()
        optimizers = geometries.MAKERS["adamw"](model)
        tap = tap_of(model, optimizers, names)
        measured.append([step(tap, model, pieces(number), optimizers) for number in range(7)][-1])
    assert list(measured[1].views) == [name]
    assert measured[1].views[name] == measured[0].views[name]


def test_the_euclidean_numbers_and_the_training_are_the_same_bytes_with_and_without() -> None:
    found = []
    for names in (BOTH, []):
        model = cases.network()
        optimizers = geometries.MAKERS["adamw"](model)
        tap = tap_of(model, optimizers, names)
        measured = [step(tap, model, pieces(number), optimizers) for number in range(7)]
        found.append(([(one.mean_square, one.group_square) for one in measured], list(model.parameters())))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_the_passive_tap_reads_the_state_after_its_read() -> None:
    """read() ends a window before the step: the next window's P is the one that the step leaves."""
    model = cases.network()
    optimizers = geometries.MAKERS["adamw"](model)
    tap = tap_of(model, optimizers)
    for number in range(8):
        before, p = geometries.frozen(model, optimizers)
        groups = pieces(number)
        total = sum(piece.weight for piece in groups)
        for piece in groups:
            (cases.mean_loss(model, piece) * (piece.weight / total)).backward()
            tap.note(piece.samples, piece.weight)
        measured = tap.read().read()
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert geometries.difference(measured, geometries.views(before, p, [[piece] for piece in groups])) < 1e-6


@pytest.mark.parametrize("passive", [False, True])
def test_the_loss_scale_does_not_show(passive: bool) -> None:
    model = cases.network()
    optimizers = geometries.MAKERS["adamw"](model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    tap = tap_of(model, optimizers)
    for number in range(8):
        before, p = geometries.frozen(model, optimizers)
        groups = pieces(number)
        if not passive:
            measured = step(tap, model, groups, optimizers, scaler=scaler, max_norm=1.0)
            continue
        total = sum(piece.weight for piece in groups)
        for piece in groups:
            scaler.scale(cases.mean_loss(model, piece) * (piece.weight / total)).backward()
            tap.note(piece.samples, piece.weight)
        scaler.unscale_(optimizers[0])
        measured = tap.read(scaler=scaler).read()
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()
    assert scaler.get_scale() > 2.0**14
    assert geometries.difference(measured, geometries.views(before, p, [[piece] for piece in groups])) < 1e-6


def test_a_window_that_is_not_finite_has_no_views_and_the_next_one_does() -> None:
    model = cases.network()
    optimizers = geometries.MAKERS["adamw"](model)
    tap = tap_of(model, optimizers)
    bad = pieces(9)
    bad[1].inputs[0, 0] = math.inf
    windows = [bad, *(pieces(number) for number in range(5)), bad, pieces(6)]
    measured = [step(tap, model, groups, optimizers) for groups in windows]
    assert [bool(one.views) for one in measured] == [False] * 7 + [True]
    assert [one.finite for one in measured] == [False] + [True] * 5 + [False, True]


def test_one_view_that_overflows_takes_no_other_with_it() -> None:
    model = cases.network()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.0)]
    tap = tap_of(model, optimizers)
    for number in range(5):
        step(tap, model, pieces(number), optimizers)
    optimizers[0].state[model.wide.weight]["exp_avg_sq"].fill_(1e-44)
    optimizers[0].param_groups[0]["eps"] = 1e-30
    measured = step(tap, model, pieces(6), optimizers)
    assert list(measured.views) == ["adam_sqrt"]
    assert measured.groups == len(SIZES) and measured.group_square > 0


def test_gaps_of_measuring_change_nothing() -> None:
    model = cases.network()
    optimizers = geometries.MAKERS["adamw"](model)
    tap = tap_of(model, optimizers)
    for number in range(9):
        before, p = geometries.frozen(model, optimizers)
        groups = pieces(number)
        plan = cases.plan(SIZES, measure=number % 4 == 0)
        with gradients.accumulate(tap, plan) as window:
            for piece in groups:
                with window.micro_batch():
                    window.backward(cases.mean_loss(model, piece), samples=piece.samples, weight=piece.weight)
        outcome = window.finish(optimizers)
        outcome.step()
        optimizers[0].zero_grad()
    assert (
        geometries.difference(outcome.measurement.read(), geometries.views(before, p, [[one] for one in groups])) < 1e-6
    )


class Tokens(nn.Module):
    """Rows of an embedding, by token; (n,) -> (n, 40)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(300, 40)
        self.out = nn.Linear(40, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embedding(tokens))


def _token_window(tap: gradients.Tap, model: nn.Module, optimizer: Any, tokens: Sequence[int]) -> Measurement:
    with gradients.accumulate(tap, cases.plan([2, 2])) as window:
        for pair in (tokens[:2], tokens[2:]):
            with window.micro_batch():
                window.backward(model(torch.tensor(pair)).square().mean(), samples=2)
    outcome = window.finish(optimizer)
    outcome.step()
    optimizer.zero_grad()
    return outcome.measurement.read()


def test_a_token_seen_for_the_first_time_does_not_outweigh_the_rest() -> None:
    model = Tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tap = tap_of(model, [optimizer])
    for _ in range(6):
        usual = _token_window(tap, model, optimizer, [1, 2, 3, 4])
    assert (optimizer.state[model.embedding.weight]["exp_avg_sq"][9] == 0).all()
    rare = _token_window(tap, model, optimizer, [1, 2, 3, 9])
    for name in BOTH:
        assert 0.1 < rare.views[name][1] / usual.views[name][1] < 10, name


def test_a_second_moment_that_loses_all_its_digits_is_noticed() -> None:
    """v is not looked through in every window; when it underflows to 0 the next look finds it."""
    model = Tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.5))
    tap = tap_of(model, [optimizer])
    for _ in range(6):
        _token_window(tap, model, optimizer, [1, 2, 3, 4])
    optimizer.state[model.embedding.weight]["exp_avg_sq"].add_(1e-12)
    _token_window(tap, model, optimizer, [1, 2, 3, 4])
    for _ in range(preconditioned.WINDOWS_BETWEEN_LOOKS + 120):
        usual = _token_window(tap, model, optimizer, [1, 2, 3, 4])
    assert optimizer.state[model.embedding.weight]["exp_avg_sq"][9].max() == 0
    rare = _token_window(tap, model, optimizer, [1, 2, 3, 9])
    assert rare.views["adam"][1] < 10 * usual.views["adam"][1]


@pytest.mark.parametrize("name", BOTH)
def test_a_constant_preconditioner_leaves_the_noise_scale_alone(name: str) -> None:
    model = cases.network(torch.float64)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.0)]
    tap = tap_of(model, optimizers)
    for number in range(6):
        for state in optimizers[0].state.values():
            state["exp_avg_sq"].fill_(0.3)
        measured = step(tap, model, pieces(number, torch.float64), optimizers)
    seen = measured.seen_in(name)
    assert seen.noise / seen.signal == pytest.approx(measured.noise / measured.signal, rel=1e-10)


def test_known_noise_and_signal_are_found_without_bias() -> None:
    """1,500 windows of 4 groups of Gaussian gradients, whose Sigma and G are known, in a fixed P."""
    torch.manual_seed(3)
    dimension, samples = 60, [3, 5, 2, 6]
    signal = torch.randn(dimension, dtype=torch.float64) * 0.1
    deviation = torch.rand(dimension, dtype=torch.float64) + 0.1
    parameter = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))
    model = nn.ParameterList([parameter])
    optimizer = torch.optim.AdamW([parameter], lr=0.0)
    optimizer.state[parameter] = {
        "step": torch.tensor(50.0),
        "exp_avg": torch.zeros_like(parameter.detach()),
        "exp_avg_sq": torch.rand(dimension, dtype=torch.float64) * deviation**2,
    }
    p = geometries.preconditioner(model, [optimizer])
    tap = tap_of(model, [optimizer])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in BOTH}
    for _ in range(1500):
        parameter.grad = None
        with gradients.accumulate(tap, cases.plan(samples)) as window:
            for size in samples:
                drawn = signal + deviation * size**-0.5 * torch.randn(dimension, dtype=torch.float64)
                with window.micro_batch():
                    window.backward(parameter @ drawn, samples=size)
        measured = window.finish(optimizer).measurement.read()
        for name in BOTH:
            seen = measured.seen_in(name)
            found[name].append((seen.signal, seen.noise))
    for name, q in (("adam", p * p), ("adam_sqrt", p)):
        values = torch.tensor(found[name], dtype=torch.float64)
        truth = torch.stack([(q * signal**2).sum(), (q * deviation**2).sum()])
        z = (values.mean(0) - truth) / (values.std(0) / len(values) ** 0.5)
        assert z.abs().max() < 4, (name, z)
        assert (values.std(0) / len(values) ** 0.5 < 0.05 * truth).all(), "the test sees nothing"


# -- what parameters are like


def test_channels_last_and_mixed_memory_orders() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 80, 3), nn.Flatten(), nn.Linear(80 * 4, 5)).to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tap = tap_of(model, [optimizer])
    inputs = torch.randn(6, 8, 4, 4)
    for number in range(7):
        reference = copy.deepcopy(model).double()
        p = geometries.preconditioner(model, [optimizer])
        with gradients.accumulate(tap, cases.plan([2, 4])) as window:
            for part in (inputs[:2], inputs[2:]):
                with window.micro_batch():
                    window.backward((model(part + number) ** 2).mean(), samples=len(part))
        outcome = window.finish(optimizer)
        outcome.step()
        optimizer.zero_grad()
    groups = []
    for part in (inputs[:2], inputs[2:]):
        reference.zero_grad()
        (reference(part.double() + number) ** 2).mean().backward()
        groups.append(cases.flat(reference))
    mean = (2 * groups[0] + 4 * groups[1]) / 6
    measured = outcome.measurement.read().views["adam"]
    expected = (
        (mean * p).square().sum(),
        (4 * (groups[0] * p).square().sum() + 16 * (groups[1] * p).square().sum()) / 36,
    )
    assert measured == pytest.approx([one.item() for one in expected], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_half_precision_and_complex_parameters(dtype: torch.dtype) -> None:
    """Of real and imaginary parts each has its own second moment, as in torch's Adam."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size).to(dtype)) for size in (7, 90_000)]
    model = nn.ParameterList(parameters)
    optimizer = torch.optim.Adam(parameters, lr=0.0)
    tap = tap_of(model, [optimizer])
    for _ in range(6):
        slopes = [[torch.randn(len(one)).to(dtype) for one in parameters] for _ in range(2)]
        with gradients.accumulate(tap, cases.plan([1, 1])) as window:
            for pair in slopes:
                with window.micro_batch():
                    loss = sum((one * slope.conj()).real.float().sum() for one, slope in zip(parameters, pair))
                    window.backward(loss, samples=1)
        before = copy.deepcopy(optimizer.state_dict()["state"])
        outcome = window.finish(optimizer)
        outcome.step()
        optimizer.zero_grad()
    real = torch.view_as_real if dtype.is_complex else lambda tensor: tensor
    adam = 0.0
    for index in range(2):
        v = real(before[index]["exp_avg_sq"]).double() / (1 - 0.999**5)
        for pair in slopes:
            adam += ((real(pair[index]).double() / 2 / (v.sqrt() + 1e-8)) ** 2).sum().item()
    assert outcome.measurement.read().views["adam"][1] == pytest.approx(adam, rel=1e-6)


def test_step_counters_on_a_device_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturable and fused optimizers on a GPU count there. Here the tensors are on the CPU, and not asked either."""
    monkeypatch.setattr(preconditioned, "_known_to_the_host", lambda number: not isinstance(number, Tensor))
    for name in ("adamw", "amsgrad", "two", "tensors"):
        model = cases.network()
        optimizers = geometries.MAKERS[name](model)
        tap = tap_of(model, optimizers)
        measured = []
        for number in range(7):
            before, p = geometries.frozen(model, optimizers)
            measured.append(step(tap, model, pieces(number), optimizers))
        assert [bool(one.views) for one in measured] == [False] * 5 + [True] * 2
        expected = geometries.views(before, p, [[piece] for piece in pieces(6)])
        assert geometries.difference(measured[-1], expected) < 1e-6


def test_a_parameter_without_a_gradient_needs_no_second_moment() -> None:
    model = cases.network()
    model.unused = nn.Parameter(torch.randn(5))
    optimizers = geometries.MAKERS["adam"](model)
    tap = tap_of(model, optimizers)
    for number in range(7):
        before, p = geometries.frozen(model, optimizers)
        groups = pieces(number)
        measured = step(tap, model, groups, optimizers)
    assert geometries.difference(measured, geometries.views(before, p, [[piece] for piece in groups])) < 1e-6


def test_a_group_that_is_added_later_is_picked_up() -> None:
    model = cases.network()
    late = [model.narrow.weight, model.narrow.bias]
    first = [one for one in model.parameters() if one.requires_grad and all(one is not other for other in late)]
    optimizers = [torch.optim.AdamW(first, lr=1e-3)]
    tap = tap_of(model, optimizers)
    present = []
    for number in range(14):
        if number == 7:
            optimizers[0].add_param_group({"params": late, "eps": 1e-4})
        before, p = geometries.frozen(model, optimizers)
        groups = pieces(number)
        measured = step(tap, model, groups, optimizers)
        for parameter in late:
            parameter.grad = None
        present.append(bool(measured.views))
        if measured.views:
            expected = geometries.views(before, p, [[piece] for piece in groups])
            assert geometries.difference(measured, expected) < 1e-6, number
    assert present == [False] * 5 + [True] * 2 + [False] * 5 + [True] * 2


def test_a_loaded_state_is_seen() -> None:
    model = cases.network()
    optimizers = geometries.MAKERS["adamw"](model)
    tap = tap_of(model, optimizers)
    for number in range(6):
        step(tap, model, pieces(number), optimizers)
    state = copy.deepcopy(optimizers[0].state_dict())
    for one in state["state"].values():
        one["exp_avg_sq"].mul_(7.0)
    optimizers[0].load_state_dict(state)
    before, p = geometries.frozen(model, optimizers)
    measured = step(tap, model, pieces(6), optimizers)
    assert geometries.difference(measured, geometries.views(before, p, [[piece] for piece in pieces(6)])) < 1e-6


# -- parts


def test_layers_and_groups_add_up_to_the_whole() -> None:
    model = cases.network(torch.float64)
    optimizers = geometries.MAKERS["adamw"](model)
    tap = tap_of(model, optimizers, ["layers", "groups"])
    groups = pieces(1, torch.float64)
    measured = step(tap, model, groups, optimizers)
    assert list(measured.views) == ["layer:first", "layer:wide", "layer:narrow", "layer:again", "group:0", "group:1"]
    for kind in ("layer", "group"):
        pairs = [pair for name, pair in measured.views.items() if name.startswith(kind)]
        total = [sum(column) for column in zip(*pairs)]
        assert total == pytest.approx([measured.mean_square, measured.group_square], rel=1e-12)
    fresh = cases.network(torch.float64)
    every = torch.stack([cases.gradient(fresh, [piece]) for piece in groups])
    shares = torch.tensor([piece.weight for piece in groups]) / sum(piece.weight for piece in groups)
    wide = slice(42, 42 + 28_000)  # behind first: 36 + 6
    expected = [(shares.double() @ every)[wide].square().sum(), shares.double() ** 2 @ every[:, wide].square().sum(1)]
    assert measured.views["layer:wide"] == pytest.approx([one.item() for one in expected], rel=1e-7)


def test_a_layer_without_a_gradient_has_none() -> None:
    model = cases.network()
    model.unused = nn.Linear(3, 3)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    measured = step(tap_of(model, optimizers, ["layers"]), model, pieces(1), optimizers)
    assert measured.views["layer:unused"] == (0.0, 0.0)


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (1, ["position", "blocks.0", "blocks.1", "head"]),
        (2, ["position", "blocks.0.norm", "blocks.0.mlp.0", "blocks.0.mlp.1", "blocks.1.norm", "head"]),
    ],
)
def test_names_of_layers(depth: int, expected: list[str]) -> None:
    model = nn.Module()
    model.position = nn.Parameter(torch.zeros(3))
    model.blocks = nn.ModuleList([nn.Module(), nn.Module()])
    model.blocks[0].norm = nn.LayerNorm(2)
    model.blocks[0].mlp = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.blocks[1].norm = nn.LayerNorm(2)
    model.head = nn.Linear(2, 2)
    assert geometry.layers(survey(model), depth).names == tuple(f"layer:{name}" for name in expected)


def test_layers_of_a_bare_sequence_and_a_single_layer() -> None:
    sequence = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert geometry.layers(survey(sequence)).names == ("layer:0", "layer:1.0")
    assert geometry.layers(survey(nn.Linear(2, 2))).names == ("layer:weight", "layer:bias")
    with pytest.raises(ValueError, match="depth of layers must be 1 or more, got 0"):
        geometry.layers(survey(sequence), 0)


def test_groups_of_several_optimizers() -> None:
    model = cases.network()
    optimizers = geometries.MAKERS["two"](model)
    assert geometry.parameter_groups(optimizers, survey(model)).names == ("group:0.0", "group:1.0")


class Weighted:
    """A ruler as a user may write one: some parameters, each with a factor."""

    def __init__(self, name: str, factors: dict[int, float]) -> None:
        self.name = name
        self.factors = factors
        self.windows = 0

    def open(self) -> None:
        self.windows += 1

    def square(self, index: int, gradient: Tensor) -> Tensor | None:
        return gradient.double().square().sum() * self.factors[index] if index in self.factors else None


def test_rulers_of_ones_own_stand_beside_the_others() -> None:
    model = cases.network(torch.float64)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    own = [Weighted("double", dict.fromkeys(range(7), 2.0)), Weighted("wide", {2: 1.0, 3: 1.0})]
    layers = geometry.layers(survey(model))
    tap = gradients.attach(model, rulers=[own[0], layers, own[1]])
    assert tap.views == ("double", *layers.names, "wide")
    opened = own[0].windows
    measured = step(tap, model, pieces(1, torch.float64), optimizers)
    expected = [2 * measured.mean_square, 2 * measured.group_square]
    assert measured.views["double"] == pytest.approx(expected, rel=1e-12)
    assert measured.views["wide"] == pytest.approx(measured.views["layer:wide"], rel=1e-12)
    assert own[0].windows > opened


@pytest.mark.parametrize("world", [1, 2, 3, 20])
def test_each_part_of_the_mean_gradient_is_measured_on_one_rank(world: int) -> None:
    layout = survey(nn.Sequential(*(nn.Linear(size, 30) for size in (50, 40, 40, 30, 10, 70))))
    shares = [rulers.share(dataclasses.replace(layout, world=world, rank=rank)) for rank in range(world)]
    assert sorted(index for one in shares for index in one) == list(range(len(layout.parameters)))
    sizes = [sum(layout.parameters[index].numel() for index in one) for one in shares]
    assert max(sizes) <= max(1.2 * sum(sizes) / world, 70 * 30)


# -- which one


def test_what_an_optimizer_suggests() -> None:
    model = cases.network()
    layout = survey(model)
    adam, sgd = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    muon = torch.optim.Muon([model.wide.weight], lr=0.1)
    unknown = torch.optim.Adamax(model.parameters())
    suggestions = {
        "adam_sqrt": [adam, torch.optim.RMSprop(model.parameters()), [adam, muon]],
        "euclidean": [sgd, unknown, [adam, sgd], muon],
    }
    for name, every in suggestions.items():
        for optimizers in every:
            assert geometry.suggested(optimizers, layout) == name
            made = geometry.rulers_for("auto", optimizers, layout)
            assert [view for one in made for view in one.names] == ([] if name == "euclidean" else [name])


def test_muons_parameters_are_left_out() -> None:
    model = cases.network()
    matrices = [model.wide.weight, model.narrow.weight]
    rest = [one for one in model.parameters() if one.requires_grad and all(one is not other for other in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]
    tap = tap_of(model, optimizers)
    for number in range(7):
        before, p = geometries.frozen(model, optimizers[1:])
        groups = pieces(number)
        measured = step(tap, model, groups, optimizers)
    assert (p == 0).sum() == sum(one.numel() for one in matrices)
    assert geometries.difference(measured, geometries.views(before, p, [[piece] for piece in groups])) < 1e-6


@pytest.mark.parametrize("name", BOTH)
def test_refusals_name_the_optimizer_and_the_way_out(name: str) -> None:
    model = cases.network()
    layout = survey(model)
    adam, sgd = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    for optimizers, words in (
        (sgd, rf"{name} needs an optimizer with a second moment \(Adam, .*trained by SGD.*'euclidean'"),
        ([adam, sgd], "trained by AdamW, SGD"),
        (torch.optim.Adamax(model.parameters()), "trained by Adamax"),
        (torch.optim.Muon([model.wide.weight]), "trained by Muon"),
        ([], "trained by none"),
    ):
        with pytest.raises(ValueError, match=words):
            geometry.rulers_for(name, optimizers, layout)
    with pytest.raises(ValueError, match=rf"{name}: the optimizers hold none .*first: 'first.weight'"):
        geometry.rulers_for(name, torch.optim.AdamW(nn.Linear(2, 2).parameters()), layout)


def test_unknown_and_repeated_names() -> None:
    model = cases.network()
    layout, adam = survey(model), torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="auto, euclidean, adam, adam_sqrt, layers, groups, got 'adamw'"):
        geometry.rulers_for("adamw", adam, layout)
    assert [one.names for one in geometry.rulers_for(["auto", "adam_sqrt", "adam"], adam, layout)] == [
        ("adam", "adam_sqrt")
    ]
    twice = [*geometry.rulers_for("adam", adam, layout), *geometry.rulers_for(BOTH, adam, layout)]
    with pytest.raises(ValueError, match="two rulers measure the view 'adam'"):
        gradients.attach(model, rulers=twice)
