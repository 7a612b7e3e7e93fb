"""Reading late: the mean gradient measured when backward ends, and what is noticed of a read that comes too late."""

from __future__ import annotations

import copy
from collections.abc import Callable

import gradient_cases as cases
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adabatch import gradients
from adabatch.noise import Measurement

SIZES = [3, 1, 4, 2]


def backwards(
    model: nn.Module, groups: list[cases.Piece], tap: gradients.Tap, coefficient: float | None = None
) -> None:
    """The window's backward passes: by each piece's share of the weight, or all by one coefficient."""
    total = sum(piece.weight for piece in groups)
    for piece in groups:
        loss = cases.mean_loss(model, piece)
        share = piece.weight / total if coefficient is None else coefficient
        (loss * share).backward()
        tap.note(piece.samples, piece.weight if coefficient is None else coefficient, loss)


def expected(model: nn.Module, groups: list[cases.Piece]) -> Measurement:
    return cases.reference(model, [[piece] for piece in groups])


def counted(tap: gradients.Tap, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for every time that the mean gradient is measured."""
    taken: list[None] = []
    measure = tap._lengths
    monkeypatch.setattr(tap, "_lengths", lambda: (taken.append(None), measure())[1])
    return taken


# -- early


@pytest.mark.parametrize("told", [False, True])
def test_read_may_come_after_clipping_the_step_and_zero_grad(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cases.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    groups = cases.pieces(SIZES, tokens=True)
    passes = iter([False, False, False, True] * 3)
    last = (lambda: next(passes)) if told else None
    with gradients.attach(model, optimizer, early=True, last=last) as tap:
        taken = counted(tap, monkeypatch)
        for _ in range(3):
            should = expected(model, groups)
            backwards(model, groups, tap)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            assert cases.difference(tap.read().read(), should) < 1e-6
    assert len(taken) == 3 * (1 if told else 4)


def test_early_changes_no_byte_and_leaves_no_hook() -> None:
    model, groups = cases.network(), cases.pieces(SIZES, tokens=True)
    untouched = copy.deepcopy(model)
    hooks = [parameter._post_accumulate_grad_hooks for parameter in model.parameters()]
    assert not any(hooks)
    with gradients.attach(model, early=True) as tap:
        backwards(model, groups, tap)
        tap.read()
        tap.measure(False)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        tap.measure(True)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    total = sum(piece.weight for piece in groups)
    for piece in groups:
        (cases.mean_loss(untouched, piece) * (piece.weight / total)).backward()
    assert torch.equal(cases.flat(model), cases.flat(untouched))


def test_autograd_hands_its_tensors_over_as_without() -> None:
    model = nn.Linear(300, 200)
    arrived: dict[str, int] = {}
    with gradients.attach(model, early=True) as tap:
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: arrived.update({name: gradient.data_ptr()}))
        model(torch.randn(4, 300)).square().mean().backward()
        tap.note(4)
    assert arrived == {name: parameter.grad.data_ptr() for name, parameter in model.named_parameters()}


class Wide:
    """The squared length in ``wide.weight`` and ``narrow.weight`` alone."""

    name = "wide"

    def __init__(self, model: nn.Module) -> None:
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.places = {names.index("wide.weight"), names.index("narrow.weight")}

    def open(self) -> None: ...

    def square(self, index: int, gradient: Tensor) -> Tensor | None:
        return gradient.double().square().sum() if index in self.places else None


@pytest.mark.parametrize("coefficient", [None, 0.125])
def test_views_and_drift_are_taken_early_too(coefficient: float | None) -> None:
    model = cases.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
    groups = cases.pieces([2, 2, 2], tokens=False)
    factor = 1.0 if coefficient is None else None
    with gradients.attach(model, optimizer, rulers=[Wide(model)], early=True) as tap:
        for number in range(4):
            exact = copy.deepcopy(model).double()
            mean = cases.gradient(model, groups)
            squares = [[parameter.square().sum() for parameter in _wide(exact, [group])] for group in groups]
            momentum = _momentum(model, optimizer)
            backwards(model, groups, tap, coefficient)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            measured = tap.read(drift=number > 0, factor=factor).read()
            mean_square = sum(parameter.square().sum() for parameter in _wide(exact, groups)).item()
            group_square = sum(map(sum, squares)).item() / 9
            assert measured.views["wide"] == pytest.approx((mean_square, group_square), rel=1e-5)
            if number < 2:
                assert measured.drift is None, "not asked for, and asked for too late"
            else:
                assert measured.drift == pytest.approx(0.5 * torch.dot(mean, momentum).item(), rel=1e-4)


def _wide(model: nn.Module, groups: list[cases.Piece]) -> list[Tensor]:
    model.zero_grad()
    total = sum(piece.weight for piece in groups)
    sum(cases.mean_loss(model, cases.exactly(piece)) * (piece.weight / total) for piece in groups).backward()
    return [model.wide.weight.grad, model.narrow.weight.grad]


def _momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    states = [optimizer.state.get(parameter, {}) for parameter in model.parameters() if parameter.requires_grad]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat(
        [
            state.get("momentum_buffer", torch.zeros_like(parameter)).double().reshape(-1)
            for state, parameter in zip(states, trained)
        ]
    )


@pytest.mark.parametrize(("half", "tolerance"), [(False, 1e-6), (True, 2e-2)])
def test_a_scale_in_force_is_taken_out(half: bool, tolerance: float) -> None:
    model = cases.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    groups = cases.pieces(SIZES, tokens=True)
    total = sum(piece.weight for piece in groups)
    with gradients.attach(model, optimizer, early=True) as tap:
        for scale in (1024.0, 2048.0):
            should = expected(model, groups)
            for piece in groups:
                with torch.autocast("cpu", torch.float16, enabled=half):
                    loss = cases.mean_loss(model, piece)
                scaler.scale(loss * (piece.weight / total)).backward()
                tap.note(piece.samples, piece.weight, loss)
            assert scaler.get_scale() == scale
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            optimizer.zero_grad()
            measured = tap.read(scaler=scaler, drift=True).read()
            scaler.update()
            assert cases.difference(measured, should) < tolerance


def test_an_overflow_is_no_measurement() -> None:
    model = cases.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with gradients.attach(model, optimizer, early=True) as tap:
        for piece in cases.pieces([2, 2], tokens=False):
            scaler.scale(cases.mean_loss(model, piece) * torch.tensor(1e38)).backward()
            tap.note(piece.samples)
        scaler.step(optimizer)
        measured = tap.read(scaler=scaler).read()
    assert not measured.finite and not measured.measurable


def test_a_backward_that_fails_is_forgotten() -> None:
    model, groups = cases.network(), cases.pieces(SIZES, tokens=True)

    def fail(gradient: Tensor) -> None:
        raise MemoryError

    with gradients.attach(model, early=True) as tap:
        hidden = model.wide(model.first(groups[0].inputs))
        handle = model.first.weight.register_hook(fail)
        with pytest.raises(MemoryError):
            (model.again(model.narrow(hidden)).sum() * 100).backward()
        handle.remove()
        model.zero_grad()
        tap._open(summing=False)
        backwards(model, groups, tap)
        model.zero_grad()
        assert cases.difference(tap.read().read(), expected(model, groups)) < 1e-6


def test_reentrant_checkpoints_end_with_the_whole_backward() -> None:
    """Each of them is a backward of its own inside the other one."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    inputs = torch.randn(2, 3, 4)

    def backward(number: int) -> None:
        hidden = layers[0](inputs[number])
        for layer in layers[1:3]:
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        (layers[3](hidden).square().mean() / 2).backward()

    with gradients.attach(layers, early=True) as tap:
        for number in range(2):
            backward(number)
            tap.note(3)
        square = cases.flat(layers).square().sum().item()
        layers.zero_grad()
        assert tap.read().read().mean_square == pytest.approx(square, rel=1e-6)


@pytest.mark.parametrize("answers", [[False, False], [True, False]])
def test_a_last_backward_that_was_not_told_of_is_an_error(answers: list[bool]) -> None:
    model = cases.network()
    told = iter(answers)
    with gradients.attach(model, early=True, last=lambda: next(told)) as tap:
        backwards(model, cases.pieces([2, 2], tokens=False), tap)
        with pytest.raises(ValueError, match="early=True.*`last` was not true"):
            tap.read()


def test_resting_costs_no_norm_and_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, groups = cases.network(), cases.pieces(SIZES, tokens=False)
    with gradients.attach(model, early=True) as tap:
        taken = counted(tap, monkeypatch)
        tap.measure(False)
        backwards(model, groups, tap)
        assert not taken
        with pytest.raises(ValueError, match="tap.measure\\(False\\) was in force"):
            tap.read()


@pytest.mark.parametrize("early", [False, True])
def test_windows_are_not_looked_at_twice(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, groups = cases.network(), cases.pieces(SIZES, tokens=False)
    with gradients.attach(model, early=early) as tap:
        taken = counted(tap, monkeypatch)
        measured = cases.one_window(tap, model, groups, [SIZES]).measurement.read()
    assert len(taken) == 1
    assert cases.difference(measured, expected(model, groups)) < 1e-6


def test_last_is_for_early_only() -> None:
    with pytest.raises(ValueError, match="last is for early=True"):
        gradients.attach(cases.network(), last=lambda: True)


# -- reads that come too late


def _by_foreach(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e9, foreach=True)


def _by_loop(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)


def _by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.1)


def _by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def _by_dividing(model: nn.Module) -> None:
    torch._foreach_div_([parameter.grad for parameter in model.parameters() if parameter.grad is not None], 2.0)


def _to_zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def _to_none(model: nn.Module) -> None:
    model.zero_grad()


def _one_parameter(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_([model.first.weight], 0.1)


CHANGES = [_by_foreach, _by_loop, _by_value, _by_hand, _by_dividing, _to_zero, _to_none, _one_parameter]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("noted", ["before", "after"])
def test_a_gradient_that_was_changed_is_not_read(change: Callable[[nn.Module], None], noted: str) -> None:
    """Hugging Face calls nobody between the last backward and its clipping, so that ``note`` comes after it."""
    model, (first, last) = cases.network(), cases.pieces([2, 2], tokens=False)
    with gradients.attach(model) as tap:
        backwards(model, [first], tap)
        cases.mean_loss(model, last).backward()
        if noted == "before":
            tap.note(2)
        change(model)
        if noted == "after":
            tap.note(2)
        with pytest.raises(ValueError, match="changed between the window's last backward and read.*early=True"):
            tap.read()


def test_a_gradient_that_was_unscaled_is_read_and_one_that_was_clipped_then_is_not() -> None:
    model, groups = cases.network(), cases.pieces(SIZES, tokens=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with gradients.attach(model, optimizer) as tap:
        for clipped in (False, True):
            model.zero_grad()
            for piece in groups:
                scaler.scale(cases.mean_loss(model, piece) * (piece.weight / 10)).backward()
                tap.note(piece.samples)
            scaler.unscale_(optimizer)
            if not clipped:
                mean_square = tap.read(scaler=scaler).read().mean_square
                assert mean_square == pytest.approx(expected(model, groups).mean_square, rel=1e-5)
            else:
                _by_foreach(model)
                with pytest.raises(ValueError, match="changed between"):
                    tap.read(scaler=scaler)
            scaler.update()


def test_the_optimizer_and_other_gradients_may_do_as_they_like() -> None:
    """A step reads gradients only, and a backward that reaches neither of those that are watched is followed, too."""
    model = nn.ModuleDict({name: nn.Linear(3, 1) for name in ("first", "middle", "last")})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    other = nn.Linear(3, 1)
    inputs = torch.randn(2, 3)
    with gradients.attach(model) as tap:
        for _ in range(3):
            optimizer.zero_grad()
            sum(model[name](inputs) for name in model).mean().backward()
            tap.note(2)
            model["middle"](inputs).mean().backward()
            tap.note(2)
            other(inputs).mean().backward()
            nn.utils.clip_grad_norm_(other.parameters(), 0.1)
            optimizer.step()
            assert tap.read(factor=0.5).read().groups == 2


def test_clipping_every_micro_batch_is_no_late_read() -> None:
    model, groups = cases.network(), cases.pieces(SIZES, tokens=False)
    with gradients.attach(model) as tap:
        for piece in groups:
            _by_foreach(model) if model.first.weight.grad is not None else None
            cases.mean_loss(model, piece).backward()
            tap.note(piece.samples)
        tap.read(factor=None)
