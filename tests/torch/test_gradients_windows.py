"""The accumulating window in one process: one big batch's gradient, its measurement, and clipping."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import gradient_cases as cases
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from adabatch import gradients
from adabatch.gradients import statistics, windows

SIZES = [3, 1, 4, 2]


def run(
    model: nn.Module,
    groups: Sequence[cases.Piece],
    *,
    measure: bool = True,
    max_norm: float | None = None,
) -> gradients.Outcome:
    """One window over the groups, without a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradients.attach(model) as tap:
        with gradients.accumulate(tap, cases.plan([piece.samples for piece in groups], measure=measure)) as window:
            for piece in groups:
                with window.micro_batch():
                    window.backward(cases.mean_loss(model, piece), samples=piece.samples, weight=piece.weight)
        outcome = window.finish(optimizer, max_norm=max_norm)
    assert window.measurement is outcome.measurement
    return outcome


def scalar(
    groups: Sequence[tuple[int, float, float]], *, max_norm: float | None = None
) -> tuple[float, gradients.Outcome]:
    """A one-parameter model: micro-batches of (samples, weight, gradient of the mean loss)."""
    parameter = nn.Parameter(torch.zeros((), dtype=torch.float64))
    model = nn.ParameterList([parameter])
    tap = gradients.attach(model)
    with gradients.accumulate(tap, cases.plan([samples for samples, _, _ in groups])) as window:
        for samples, weight, slope in groups:
            with window.micro_batch():
                window.backward(parameter * slope + 2.0, samples=samples, weight=weight)
    outcome = window.finish(torch.optim.SGD(model.parameters(), lr=1.0), max_norm=max_norm)
    return parameter.grad.item(), outcome


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_measures_what_separate_backward_passes_give(tokens: bool, dtype: torch.dtype, tolerance: float) -> None:
    model = cases.network(dtype)
    groups = cases.pieces(SIZES, tokens=tokens, dtype=dtype)
    expected = cases.reference(model, [[piece] for piece in groups])
    assert cases.difference(run(model, groups).measurement.read(), expected) < tolerance


@pytest.mark.parametrize("tokens", [False, True])
def test_the_gradient_is_one_big_batchs(tokens: bool) -> None:
    model = cases.network(torch.float64)
    groups = cases.pieces(SIZES, tokens=tokens, dtype=torch.float64)
    expected = cases.gradient(model, [cases.joined(groups)])
    run(model, groups)
    assert torch.dist(cases.flat(model), expected) / expected.norm() < 1e-12


@pytest.mark.parametrize(
    ("groups", "right"),
    [
        ([(4, 4, 1.0), (1, 1, 5.0)], 1.8),  # tokens 4 and 1: not the mean of means 3, not the sum 9
        ([(2, 9, 1.0), (2, 1, 11.0)], 2.0),  # samples say 6
        ([(1, 1, 1.0)] * 4, 1.0),  # not 1/4 + 1/16 + ...
        ([(2, 2, 3.0), (2, 2, 1.0)] * 5, 2.0),
        ([(3, 3, 7.0)], 7.0),
    ],
)
def test_weights_by_hand(groups: list[tuple[int, float, float]], right: float) -> None:
    gradient, outcome = scalar(groups)
    assert gradient == pytest.approx(right, rel=1e-14)
    assert math.sqrt(outcome.measurement.read().mean_square) == pytest.approx(right, rel=1e-14)


@pytest.mark.parametrize("accumulation", [1, 4, 32])
def test_loss_and_norm_do_not_depend_on_the_number_of_micro_batches(accumulation: int) -> None:
    _, outcome = scalar([(2, 50, 3.0)] * accumulation)
    measured = outcome.measurement.read()
    assert (measured.loss, math.sqrt(measured.mean_square)) == pytest.approx((2.0, 3.0))
    assert measured.weight == 50 * accumulation


def test_a_micro_batch_of_weight_0_changes_nothing() -> None:
    """Not even when its mean over no tokens is not a number."""
    torch.manual_seed(0)
    model = nn.Linear(5, 9)
    real, ignored = torch.tensor([1, 2, 8]), torch.tensor([-100, -100, -100])
    inputs = torch.randn(3, 5)
    measured = []
    for targets in ([real], [real, ignored], [ignored, real]):
        model.zero_grad()
        tap = gradients.attach(model)
        sizes = [3 if target is real else 0 for target in targets]
        with gradients.accumulate(tap, cases.plan(sizes)) as window:
            for target in targets:
                with window.micro_batch():
                    loss = nn.functional.cross_entropy(model(inputs), target)
                    window.backward(loss, samples=3 if target is real else 0)
        outcome = window.finish(torch.optim.SGD(model.parameters(), lr=0.1))
        tap.detach()
        measured.append((outcome.measurement.read(), cases.flat(model)))
    assert measured[0][0] == measured[1][0] == measured[2][0]
    assert measured[0][0].groups == 1 and measured[0][0].finite
    assert torch.equal(measured[0][1], measured[1][1]) and torch.equal(measured[0][1], measured[2][1])


def test_a_window_without_any_weight_is_skipped() -> None:
    gradient, outcome = scalar([(2, 0, 3.0), (1, 0, 1.0)])
    measured = outcome.measurement.read()
    assert (measured.finite, measured.weight, measured.groups, measured.samples) == (False, 0.0, 0, 3)
    assert outcome.skipped() and math.isnan(gradient)


@pytest.mark.parametrize("factor", [0.1, 0.999, 1.0, 10.0])
def test_clips_like_torch(factor: float) -> None:
    model = cases.network(torch.float64)
    groups = cases.pieces(SIZES, tokens=True, dtype=torch.float64)
    plain = copy.deepcopy(model)
    for piece in groups:
        (cases.mean_loss(plain, piece) * piece.weight / sum(other.weight for other in groups)).backward()
    threshold = factor * cases.flat(plain).norm().item()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), threshold)
    outcome = run(model, groups, max_norm=threshold)
    assert torch.dist(cases.flat(model), cases.flat(plain)) / cases.flat(plain).norm() < 1e-12
    assert math.sqrt(outcome.measurement.read().mean_square) == pytest.approx(norm.item(), rel=1e-12)


def test_the_norm_is_measured_before_clipping() -> None:
    gradient, outcome = scalar([(1, 1, 3.0), (1, 1, 5.0)], max_norm=0.5)
    measured = outcome.measurement.read()
    assert gradient == pytest.approx(0.5, rel=1e-5)
    assert (measured.mean_square, measured.group_square) == pytest.approx((16.0, 8.5))


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_gradients_are_the_same_bytes_whether_measured_or_not(max_norm: float | None) -> None:
    groups = cases.pieces(SIZES, tokens=True)
    models = [cases.network(), cases.network()]
    for model, measure in zip(models, (True, False)):
        outcome = run(model, groups, measure=measure, max_norm=max_norm)
        assert outcome.measurement.read().measurable == measure
    for one, other in zip(models[0].parameters(), models[1].parameters()):
        assert one.grad is None and other.grad is None or torch.equal(one.grad, other.grad)


def test_an_unmeasured_window_still_knows_norm_and_loss() -> None:
    model = cases.network()
    groups = cases.pieces(SIZES, tokens=True)
    expected = cases.reference(model, [[piece] for piece in groups])
    measured = run(model, groups, measure=False).measurement.read()
    assert (measured.groups, measured.group_square) == (0, 0.0)
    assert measured.loss == pytest.approx(expected.loss, rel=1e-6)
    assert measured.mean_square == pytest.approx(expected.mean_square, rel=1e-6)


def test_unmeasured_windows_have_no_hooks() -> None:
    model = nn.Linear(2, 1)
    tap = gradients.attach(model)
    for measure in (True, False, False, True):
        with gradients.accumulate(tap, cases.plan([1], measure=measure)) as window, window.micro_batch():
            assert cases.hooks_on(model) == (2 if measure else 0)
            window.backward(model(torch.ones(1, 2)).mean(), samples=1)
        window.finish(torch.optim.SGD(model.parameters(), lr=0.1))


def test_host_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything up to the step, except reading the measurement, and except asking an optimizer that needs it."""
    monkeypatch.setattr(statistics, "free_to_ask", lambda device: False)

    class NoWaiting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._local_scalar_dense.default:
                raise AssertionError("the host asked for a number")
            return function(*args, **(kwargs or {}))

    model = cases.network()
    groups = cases.pieces(SIZES, tokens=True)
    with NoWaiting():
        outcome = run(model, groups, max_norm=1.0)
        with pytest.raises(AssertionError, match="asked for a number"):
            outcome.step()
    assert outcome.measurement.read().finite


def test_weights_that_are_on_the_device_count_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device tensors go another way, so that nobody waits for them; the numbers must agree."""
    for by_rank in (False, True):
        vectors = []
        for convert, free in ((float, True), (lambda weight: torch.tensor(float(weight)), False)):
            monkeypatch.setattr(statistics, "free_to_ask", lambda device, free=free: free)
            tally = statistics.Tally(torch.device("cpu"))
            for samples, weight in ((3, 5), (0, 0), (2, 7.5)):
                tally.add(samples, convert(weight), torch.tensor(math.nan if weight == 0 else 2.0 * weight))
            squares = torch.tensor([3.0, 4.0], dtype=torch.float64)
            row = statistics.summarise(tally, squares, views=2, by_rank=by_rank, stop=True, pause=7)
            vectors.append([float(number) for number in row])
        assert vectors[0] == vectors[1]
        weight_square, count = (12.5**2, 1) if by_rank else (5**2 + 7.5**2, 2)
        assert vectors[0] == [12.5, weight_square, 5.0, count, 2 * 5**2 + 2 * 7.5**2, 1.0, 7.0, 3.0, 4.0]


def test_a_tensor_weight_is_taken() -> None:
    parameter = nn.Parameter(torch.zeros(()))
    tap = gradients.attach(nn.ParameterList([parameter]))
    with gradients.accumulate(tap, cases.plan([2, 2])) as window:
        for weight, slope in ((9, 1.0), (1, 11.0)):
            with window.micro_batch():
                window.backward(parameter * slope, samples=2, weight=torch.tensor(weight))
    window.finish(torch.optim.SGD([parameter], lr=1.0))
    assert parameter.grad.item() == pytest.approx(2.0)


def test_backward_takes_a_weight_tensor_without_asking_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: ``checked`` leaves the tensor where it is."""
    monkeypatch.setattr(windows, "checked", lambda samples, weight: weight)
    parameter = nn.Parameter(torch.zeros(()))
    tap = gradients.attach(nn.ParameterList([parameter]))
    with gradients.accumulate(tap, cases.plan([2, 2])) as window:
        for weight, slope in ((9, 1.0), (1, 11.0)):
            with window.micro_batch():
                window.backward(parameter * slope, samples=2, weight=torch.tensor(weight))
    outcome = window.finish(torch.optim.SGD([parameter], lr=1.0))
    assert parameter.grad.item() == pytest.approx(2.0)
    assert outcome.measurement.read().group_square == pytest.approx(0.81 + 0.01 * 121)


def test_several_optimizers_share_the_model() -> None:
    model = cases.network()
    matrices = [parameter for parameter in (model.wide.weight, model.narrow.weight)]
    others = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.1)]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    tap = gradients.attach(model)
    with gradients.accumulate(tap, cases.plan([2])) as window, window.micro_batch():
        window.backward(model(torch.randn(2, 6)).square().mean(), samples=2)
    window.finish(optimizers).step()
    changed = [not torch.equal(one, other) for one, other in zip(before, model.parameters())]
    assert changed == [parameter.requires_grad for parameter in model.parameters()]


def test_any_rank_can_ask_to_stop() -> None:
    model = nn.Linear(2, 1)
    tap = gradients.attach(model)
    for stop in (False, True):
        with gradients.accumulate(tap, cases.plan([1])) as window, window.micro_batch():
            window.backward(model(torch.ones(1, 2)).mean(), samples=1)
        assert window.finish(torch.optim.SGD(model.parameters(), lr=0.1), stop=stop).stop_requested() is stop


def test_backward_outside_of_windows_is_not_counted() -> None:
    """A probe of the user's between two windows, with gradients thrown away."""
    model = cases.network()
    groups = cases.pieces(SIZES, tokens=False)
    expected = cases.reference(model, [[piece] for piece in groups])
    tap = gradients.attach(model)
    for _ in range(3):
        cases.mean_loss(model, groups[0]).backward()
    model.zero_grad()
    with gradients.accumulate(tap, cases.plan(SIZES)) as window:
        for piece in groups:
            with window.micro_batch():
                window.backward(cases.mean_loss(model, piece), samples=piece.samples)
    measured = window.finish(torch.optim.SGD(model.parameters(), lr=0.1)).measurement.read()
    assert cases.difference(measured, expected) < 1e-6
