"""Alignments in one process: what is measured, what is left alone, what it costs, and what is refused."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator
from typing import Any

import alignment_cases as truth
import gradient_cases as cases
import pytest
import torch
from torch import Tensor, nn

from adabatch import gradients
from adabatch.alignment import Alignment
from adabatch.gradients.alignment import AlignmentTap
from adabatch.gradients.updates import orthogonalised

SIZES = [3, 1, 4, 2, 5, 3, 2, 6]


class Signum(torch.optim.SGD):
    """Known by its name."""


def signum(model: nn.Module) -> Signum:
    return Signum([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)


def measure(align: AlignmentTap, model: nn.Module, groups: list[cases.Piece], **read: Any) -> Alignment:
    """A loop that owns everything and divides by the total weight itself."""
    model.zero_grad()
    total = sum(piece.weight for piece in groups)
    for piece in groups:
        (cases.mean_loss(model, piece) * (piece.weight / total)).backward()
        align.note(piece.samples, piece.weight)
    return align.read(**read).read()


def sign_reference(model: nn.Module, groups: list[cases.Piece]) -> dict[tuple[float, int], tuple[float, float]]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return truth.reference(model, [groups], parameters, truth.sign)


@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize("tokens", [False, True])
def test_signs_agree_with_sets_written_out(tokens: bool, count: int) -> None:
    model = cases.network(torch.float64)
    groups = cases.pieces(SIZES[:count], tokens=tokens, dtype=torch.float64)
    with AlignmentTap(model, signum(model)) as align:
        for _ in range(2):
            measured = measure(align, model, groups)
            assert measured.samples == sum(SIZES[:count])
            assert truth.difference(measured, sign_reference(model, groups)) < 1e-12


def test_single_precision_agrees_too() -> None:
    model, groups = cases.network(), cases.pieces(SIZES, tokens=True)
    with AlignmentTap(model, signum(model)) as align:
        assert truth.difference(measure(align, model, groups), sign_reference(model, groups)) < 1e-6


def test_orthogonal_factors_agree_with_sets_written_out() -> None:
    model = cases.network(torch.float64)
    groups = cases.pieces(SIZES, tokens=True, dtype=torch.float64)
    chosen = truth.matrices(model)
    with AlignmentTap(model, torch.optim.SGD(chosen, lr=0.1), update=truth.polar) as align:
        expected = truth.reference(model, [groups], chosen, truth.polar)
        assert truth.difference(measure(align, model, groups), expected) < 1e-9


def test_muon_is_measured_by_its_own_step() -> None:
    """Its orthogonalisation rounds to bfloat16, so that two ways to add up differ."""
    model = cases.network(torch.float64)
    groups = cases.pieces(SIZES, tokens=False, dtype=torch.float64)
    chosen = truth.matrices(model)

    def newton_schulz(gradient: Tensor) -> Tensor:
        tall = gradient.shape[0] > gradient.shape[1]
        mapped = gradient.T if tall else gradient
        mapped = mapped / mapped.norm()
        for _ in range(5):
            gram = mapped @ mapped.T
            mapped = 3.4445 * mapped + (2.0315 * gram @ gram - 4.7750 * gram) @ mapped
        stretched = math.sqrt(max(1.0, gradient.shape[0] / gradient.shape[1]))
        return (mapped.T if tall else mapped) * stretched

    with AlignmentTap(model, torch.optim.Muon(chosen, lr=0.1)) as align:
        assert align.geometry == "muon"
        expected = truth.reference(model, [groups], chosen, newton_schulz)
        assert truth.difference(measure(align, model, groups), expected) < 0.02


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(4, 7), (9, 3)])
def test_orthogonalised_is_what_a_muon_step_does(shape: tuple[int, int], adjust: str | None) -> None:
    torch.manual_seed(0)
    parameter, gradient = nn.Parameter(torch.randn(shape)), torch.randn(shape)
    before = parameter.detach().clone()
    optimizer = torch.optim.Muon([parameter], lr=0.5, weight_decay=0.0, momentum=0.0, ns_steps=4, adjust_lr_fn=adjust)
    parameter.grad = gradient.clone()
    optimizer.step()
    update = orthogonalised(gradient, optimizer.param_groups[0])
    assert torch.allclose(before - 0.5 * update, parameter.detach(), atol=1e-6)


def test_a_linear_map_measures_the_squared_gradient() -> None:
    """With u(g) = g and equal groups, a(m) of single groups is what an ordinary tap calls G^2."""
    model = cases.network(torch.float64)
    groups = cases.pieces([3] * 4, tokens=False, dtype=torch.float64)
    # The map is given what a group adds to the mean gradient: a quarter of its own.
    align = AlignmentTap(model, signum(model), update=lambda gradient, group: 4 * gradient)
    with align, gradients.attach(model) as tap:
        for piece in groups:
            (cases.mean_loss(model, piece) / 4).backward()
            tap.note(piece.samples)
            align.note(piece.samples)
        measured, alignment = tap.read().read(), align.read().read()
    assert cases.difference(measured, cases.reference(model, [[piece] for piece in groups])) < 1e-12
    assert alignment.readings[0].alignment == pytest.approx(measured.signal, rel=1e-12)
    assert alignment.readings[0].own == pytest.approx(4 * measured.group_square, rel=1e-12)


def test_in_an_accumulating_window_beside_its_tap() -> None:
    """The same numbers whatever the window's own units, and gradients that are bit for bit those without a tap."""
    model, plain = cases.network(torch.float64), cases.network(torch.float64)
    groups = cases.pieces(SIZES[:4], tokens=True, dtype=torch.float64)
    cases.one_window(gradients.attach(plain), plain, groups, [SIZES[:4]])
    optimizer = signum(model)
    with gradients.attach(model) as tap, AlignmentTap(model, optimizer, tap=tap) as align:
        with gradients.accumulate(tap, cases.plan(SIZES[:4])) as window:
            for piece in groups:
                with window.micro_batch():
                    window.backward(cases.mean_loss(model, piece), samples=piece.samples, weight=piece.weight)
                    align.note(piece.samples, piece.weight)
        alignment = align.read(window=window).read()
        outcome = window.finish(optimizer)
        assert cases.difference(outcome.measurement.read(), cases.reference(model, [[one] for one in groups])) < 1e-12
        assert truth.difference(alignment, sign_reference(model, groups)) < 1e-12
        assert torch.equal(cases.flat(model), cases.flat(plain))
        with pytest.raises(ValueError, match="before window.finish"):
            model.zero_grad()
            cases.mean_loss(model, groups[0]).backward()
            align.note(1)
            align.read(window=window)


def test_weight_zero_is_no_group() -> None:
    model = cases.network(torch.float64)
    groups = cases.pieces(SIZES[:4], tokens=False, dtype=torch.float64)
    with AlignmentTap(model, signum(model)) as align:
        for place in (0, 2, 4):
            model.zero_grad()
            for i, piece in enumerate([*groups[:place], None, *groups[place:]]):
                if piece is None:
                    (cases.mean_loss(model, groups[0]) * 0.0).backward()
                    align.note(0)
                else:
                    (cases.mean_loss(model, piece) * (piece.weight / sum(SIZES[:4]))).backward()
                    align.note(piece.samples)
            assert truth.difference(align.read().read(), sign_reference(model, groups)) < 1e-12


@pytest.mark.parametrize("unscaled", [True, False])
def test_a_gradient_scaler_changes_nothing(unscaled: bool) -> None:
    model = cases.network(torch.float64)
    groups = cases.pieces(SIZES[:4], tokens=False, dtype=torch.float64)
    optimizer, scaler = signum(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with gradients.attach(model) as tap, AlignmentTap(model, optimizer, tap=tap) as align:
        if unscaled:
            for piece in groups:
                scaler.scale(cases.mean_loss(model, piece) * (piece.weight / sum(SIZES[:4]))).backward()
                align.note(piece.samples)
            scaler.unscale_(optimizer)
            measured = align.read(scaler=scaler)
        else:
            with gradients.accumulate(tap, cases.plan(SIZES[:4])) as window:
                for piece in groups:
                    with window.micro_batch():
                        loss = cases.mean_loss(model, piece)
                        window.backward(loss, samples=piece.samples, scaler=scaler)
                        align.note(piece.samples)
            measured = align.read(window=window)
        assert truth.difference(measured.read(), sign_reference(model, groups)) < 1e-12


def test_the_factor_of_a_loop_that_adds_up_means() -> None:
    model = cases.network(torch.float64)
    groups = cases.pieces([2, 2, 2, 2], tokens=False, dtype=torch.float64)
    with AlignmentTap(model, signum(model)) as align:
        for piece in groups:
            cases.mean_loss(model, piece).backward()
            align.note(piece.samples)
        measured = align.read(factor=0.25).read()
    assert truth.difference(measured, sign_reference(model, groups)) < 1e-12


def test_parameters_count_by_their_learning_rates() -> None:
    model = cases.network(torch.float64)
    groups = cases.pieces(SIZES[:2], tokens=False, dtype=torch.float64)
    parts = [[model.wide.weight], [model.narrow.weight]]
    optimizer = Signum([{"params": parts[0], "lr": 0.1}, {"params": parts[1], "lr": 0.4}])
    with AlignmentTap(model, optimizer) as align:
        (measured,) = measure(align, model, groups).readings
    apart = [truth.reference(model, [groups], some, truth.sign)[2.0, 2][0] for some in parts]
    assert measured.alignment == pytest.approx(apart[0] / 4 + apart[1], rel=1e-12)


def test_a_parameter_that_is_not_used_every_time_counts_as_zero() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 1, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)])
    inputs = torch.randn(2, 5, 3, dtype=torch.float64)
    with AlignmentTap(model, Signum(model.parameters(), lr=0.1)) as align:
        for i in range(2):
            (0.5 * model[i](inputs[i]).square().mean()).backward()
            align.note(5)
        (measured,) = align.read().read().readings
    assert abs(measured.alignment) < 1e-12
    assert measured.own == pytest.approx(sum(p.grad.abs().sum().item() for p in model.parameters()), rel=1e-12)


def test_half_precision_is_summed_in_single() -> None:
    model = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    torch.manual_seed(0)
    inputs = torch.randn(8, 2, 4, dtype=torch.bfloat16)
    with AlignmentTap(model, Signum(model.parameters(), lr=0.1)) as align:
        increments = []
        for one in inputs:
            model.zero_grad()
            model(one).square().mean().backward()
            increments.append(model.weight.grad.double())
            align.note(2)
        model.weight.grad = torch.stack(increments).sum(0).to(torch.bfloat16)
        measured = align.read(factor=1 / 8).read().readings[1]
    pairs = torch.stack(increments).view(4, 2, 3, 4).sum(1)
    assert measured.own == pytest.approx(pairs.abs().sum().item() / 8, rel=1e-6)


def test_a_gradient_that_is_not_finite_leaves_no_reading() -> None:
    model, groups = cases.network(), cases.pieces(SIZES[:2], tokens=False)
    with AlignmentTap(model, signum(model)) as align:
        (cases.mean_loss(model, groups[0]) * math.inf).backward()
        align.note(groups[0].samples)
        cases.mean_loss(model, groups[1]).backward()
        align.note(groups[1].samples)
        measured = align.read().read()
    assert (measured.samples, measured.readings, measured.measurable) == (4, (), False)


@pytest.fixture
def young() -> Iterator[None]:
    """All that lives now is left out of ``gc.get_objects``."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("count", [16, 23, 32])
def test_few_gradients_live_at_once(count: int, young: None) -> None:
    """About 2 log2(K) of them, not K."""
    shape, most = (7, 13), 0
    model = nn.Linear(13, 7, bias=False)

    def update(gradient: Tensor, group: object) -> Tensor:
        nonlocal most
        most = max(most, sum(type(one) is Tensor and one.shape == shape for one in gc.get_objects()))
        return gradient.sign()

    with AlignmentTap(model, torch.optim.SGD(model.parameters(), lr=0.1), update=update) as align:
        for _ in range(count):
            model(torch.randn(2, 13)).square().mean().backward()
            align.note(2)
        align.read()
    assert 4 < most <= 2 * math.log2(count) + 8


def test_windows_that_are_not_measured_have_no_hooks() -> None:
    model, groups = cases.network(torch.float64), cases.pieces(SIZES[:4], tokens=False, dtype=torch.float64)
    with AlignmentTap(model, signum(model)) as align:
        hooked = cases.hooks_on(model)
        align.measure(False)
        assert hooked > 0
        assert cases.hooks_on(model) == 0
        cases.mean_loss(model, groups[0]).backward()
        align.note(3)
        assert align.read() is None
        align.measure(True)
        assert truth.difference(measure(align, model, groups), sign_reference(model, groups)) < 1e-12
    assert cases.hooks_on(model) == 0


def test_backward_outside_of_a_window_is_forgotten_by_measure() -> None:
    model, groups = cases.network(torch.float64), cases.pieces(SIZES[:4], tokens=False, dtype=torch.float64)
    with AlignmentTap(model, signum(model)) as align:
        cases.mean_loss(model, groups[0]).backward()
        align.measure(True)
        assert truth.difference(measure(align, model, groups), sign_reference(model, groups)) < 1e-12


def test_misuse_is_refused_by_name() -> None:
    model, groups = cases.network(), cases.pieces(SIZES[:2], tokens=False)
    with AlignmentTap(model, signum(model)) as align:
        with pytest.raises(ValueError, match="read\\(\\) came before any note"):
            align.read()
        with pytest.raises(ValueError, match="no gradient arrived at any of the .*'first.weight'"):
            align.note(3)
        cases.mean_loss(model, groups[0]).backward()
        cases.mean_loss(model, groups[0]).backward()
        with pytest.raises(ValueError, match="arrived twice in one micro-batch"):
            align.note(3)


def test_what_has_no_known_step_is_refused_by_name() -> None:
    model = cases.network()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trainable, lr=0.1)
    with pytest.raises(ValueError, match="AdamW has none that is known.*'sign' or 'muon'.*torch.optim.Muon"):
        AlignmentTap(model, adam)
    with pytest.raises(ValueError, match="'lars' is not known"):
        AlignmentTap(model, adam, update="lars")
    with pytest.raises(ValueError, match=r"'first.bias' has shape \(6,\).*another optimizer"):
        AlignmentTap(model, adam, update="muon")
    assert AlignmentTap(model, adam, update="sign").geometry == "sign"
    with pytest.raises(ValueError, match="trains no parameter that needs a gradient"):
        AlignmentTap(model, torch.optim.SGD([model.frozen], lr=0.1), update="sign")
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(ValueError, match="added, replaced or unfrozen"):
        AlignmentTap(model, stranger, update="sign")
    strange = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match="'weight' is complex"):
        AlignmentTap(strange, Signum(strange.parameters(), lr=0.1))


def test_shards_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cases.network()
    tap = gradients.attach(copy.deepcopy(model))
    monkeypatch.setattr(type(tap.layout), "sharded", True)
    with pytest.raises(ValueError, match="not measured under FSDP2.*DistributedDataParallel"):
        AlignmentTap(model, signum(model), tap=tap)
