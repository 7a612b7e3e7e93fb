"""The passive tap in one process: what it measures, what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy

import gradient_cases as cases
import pytest
import torch
from torch import nn

from adabatch import gradients
from adabatch.gradients import hooks
from adabatch.noise import Measurement

SIZES = [3, 1, 4, 2]


def measure(model: nn.Module, groups: list[cases.Piece], tap: gradients.Tap) -> Measurement:
    """A loop that owns everything and divides by the total weight itself."""
    total = sum(piece.weight for piece in groups)
    for piece in groups:
        loss = cases.mean_loss(model, piece)
        (loss * (piece.weight / total)).backward()
        tap.note(piece.samples, piece.weight, loss)
    return tap.read().read()


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_agrees_with_separate_backward_passes(tokens: bool, dtype: torch.dtype, tolerance: float) -> None:
    model = cases.network(dtype)
    groups = cases.pieces(SIZES, tokens=tokens, dtype=dtype)
    with gradients.attach(model) as tap:
        assert tap.source.kind == "hooks"
        for _ in range(2):
            model.zero_grad()
            measured = measure(model, groups, tap)
            assert cases.difference(measured, cases.reference(model, [[piece] for piece in groups])) < tolerance


def test_gradients_held_for_one_kernel_measure_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does with small gradients."""
    monkeypatch.setattr(hooks, "_held", lambda layout: frozenset(range(0, len(layout.parameters), 2)))
    model = cases.network()
    groups = cases.pieces(SIZES, tokens=True)
    with gradients.attach(model) as tap:
        measured = measure(model, groups, tap)
    assert cases.difference(measured, cases.reference(model, [[piece] for piece in groups])) < 1e-6


def test_what_is_held_is_bounded() -> None:
    model = nn.ParameterList([nn.Parameter(torch.empty(size)) for size in (600_000, 10, 600_000, 300_000)])
    layout = gradients.attach(model).layout
    assert hooks._held(layout) == frozenset()

    class OnGpu:
        parameters = layout.parameters
        device = torch.device("cuda")

    assert hooks._held(OnGpu()) == {1, 3, 0}


def test_gradients_are_the_same_bytes_with_and_without() -> None:
    model = cases.network()
    groups = cases.pieces(SIZES, tokens=True)
    untouched = copy.deepcopy(model)
    with gradients.attach(model) as tap:
        measure(model, groups, tap)
    total = sum(piece.weight for piece in groups)
    for piece in groups:
        (cases.mean_loss(untouched, piece) * (piece.weight / total)).backward()
    for one, other in zip(model.parameters(), untouched.parameters()):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_no_gradient_is_kept_or_copied() -> None:
    """autograd hands its tensor over to ``.grad`` only when nobody else holds it."""
    model = nn.Linear(300, 200)
    arrived: dict[str, int] = {}
    with gradients.attach(model) as tap:
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: arrived.update({name: gradient.data_ptr()}))
        model(torch.randn(4, 300)).square().mean().backward()
        tap.note(4)
    assert arrived == {name: parameter.grad.data_ptr() for name, parameter in model.named_parameters()}


def test_hooks_are_gone_afterwards() -> None:
    model = cases.network()
    mine = model.first.bias.register_hook(lambda gradient: None)
    before = cases.hooks_on(model)
    tap = gradients.attach(model)
    assert cases.hooks_on(model) == before + len(tap.layout.parameters)
    tap.measure(False)
    assert cases.hooks_on(model) == before
    tap.measure(True)
    tap.detach()
    assert cases.hooks_on(model) == before
    with pytest.raises(KeyError), gradients.attach(model):
        raise KeyError
    assert cases.hooks_on(model) == before
    mine.remove()


def test_the_noise_of_two_and_four_groups_by_hand() -> None:
    """Groups of 4 with gradients (3, 0) and (1, 0); the same samples in groups of 2."""
    for vectors, noise, signal in (
        ([(3.0, 0.0), (1.0, 0.0)], 8.0, 3.0),
        ([(3.0, 0.0), (1.0, 0.0), (2.0, 1.0), (2.0, -1.0)], 8 / 3, 11 / 3),
    ):
        for convention in ("sum", "mean"):
            model = nn.Linear(2, 1, bias=False)
            with gradients.attach(model) as tap:
                for vector in vectors:
                    share = 1 / len(vectors) if convention == "mean" else 1.0
                    (model(torch.tensor(vector)).sum() * share).backward()
                    tap.note(8 // len(vectors))
                factor = 1.0 if convention == "mean" else 1 / len(vectors)
                measured = tap.read(factor=factor).read()
            assert (measured.noise, measured.signal) == pytest.approx((noise, signal))


def test_a_parameter_without_gradient_counts_as_zero() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1), "sometimes": nn.Linear(3, 1)})
    inputs = torch.randn(2, 3)
    with gradients.attach(model) as tap:
        model["used"](inputs).mean().mul(0.5).backward()
        tap.note(2)
        (model["used"](inputs) + model["sometimes"](inputs)).mean().mul(0.5).backward()
        tap.note(2)
        measured = tap.read().read()
    one = inputs.mean(dim=0).square().sum().item() + 1
    assert measured.group_square == pytest.approx(0.25 * one + 0.25 * 2 * one)
    assert measured.mean_square == pytest.approx(one + 0.25 * one)
    assert model["unused"].weight.grad is None


def test_complex_gradients_count_both_parts() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    model = nn.ParameterList([parameter, nn.Parameter(torch.zeros(20_000, dtype=torch.complex64))])
    with gradients.attach(model) as tap:
        for _ in range(2):
            (parameter * torch.tensor([3 + 4j]).conj()).real.sum().mul(0.5).backward()
            tap.note(1)
        measured = tap.read().read()
    assert measured.mean_square == pytest.approx(25.0)
    assert measured.group_square == pytest.approx(12.5)


@pytest.mark.parametrize(
    ("dtype", "values", "norm"), [(torch.float16, [300.0], 300.0), (torch.bfloat16, [1.0] * 2048, 2048**0.5)]
)
def test_half_precision_gradients_are_squared_in_single_precision(
    dtype: torch.dtype, values: list[float], norm: float
) -> None:
    parameter = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    with gradients.attach(nn.ParameterList([parameter])) as tap:
        (parameter * torch.tensor(values, dtype=dtype)).sum().backward()
        tap.note(1)
        measured = tap.read().read()
    assert measured.mean_square == pytest.approx(norm**2, rel=1e-6)
    assert measured.group_square == pytest.approx(norm**2, rel=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_large_gradient_is_summed_exactly(transposed: bool) -> None:
    """Single precision alone is 3e-4 off at five million elements."""
    shape = (2048, 1500)
    parameter = nn.Parameter(torch.zeros(shape))
    value = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    value = value.t().contiguous().t() if transposed else value
    with gradients.attach(nn.ParameterList([parameter])) as tap:
        (parameter * value).sum().backward()
        tap.note(1)
        measured = tap.read().read()
    exact = value.double().square().sum().item()
    assert measured.group_square == pytest.approx(exact, rel=5e-7)
    assert measured.mean_square == pytest.approx(exact, rel=5e-7)


def test_a_compiled_module_is_unwrapped() -> None:
    model = cases.network()
    compiled = torch.compile(model, backend="eager")
    groups = cases.pieces(SIZES, tokens=False)
    with gradients.attach(compiled) as tap:
        measured = measure(compiled, groups, tap)
    assert cases.difference(measured, cases.reference(model, [[piece] for piece in groups])) < 1e-6


def test_a_scaled_loss_measures_the_same() -> None:
    model = cases.network()
    groups = cases.pieces(SIZES, tokens=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    total = sum(piece.weight for piece in groups)
    with gradients.attach(model, optimizer) as tap:
        for piece in groups:
            loss = cases.mean_loss(model, piece)
            scaler.scale(loss * (piece.weight / total)).backward()
            tap.note(piece.samples, piece.weight, loss)
        scaler.unscale_(optimizer)
        measured = tap.read(scaler=scaler).read()
    assert cases.difference(measured, cases.reference(model, [[piece] for piece in groups])) < 1e-6


# -- hooks that did not fire, and other misuse


def test_backward_that_did_not_reach_the_model_is_an_error() -> None:
    model, other = cases.network(), cases.network()
    with gradients.attach(model) as tap:
        other(torch.randn(2, 6)).mean().backward()
        with pytest.raises(ValueError, match="no gradient arrived.*first.weight.*replaced after attach"):
            tap.note(2)


def test_note_before_backward_is_an_error() -> None:
    with gradients.attach(cases.network()) as tap, pytest.raises(ValueError, match="note\\(\\) came before backward"):
        tap.note(2)


def test_two_backward_passes_in_one_micro_batch_are_an_error() -> None:
    model = cases.network()
    with gradients.attach(model) as tap:
        for _ in range(2):
            model(torch.randn(2, 6)).mean().backward()
        with pytest.raises(ValueError, match="arrived twice.*note\\(\\) after each backward"):
            tap.note(4)


def test_read_before_note_is_an_error() -> None:
    with gradients.attach(cases.network()) as tap, pytest.raises(ValueError, match="before any note"):
        tap.read()


def test_a_parameter_unfrozen_later_is_an_error() -> None:
    model = cases.network()
    with gradients.attach(model) as tap:
        model.frozen.requires_grad_(True)
        model(torch.randn(2, 6)).mean().backward()
        tap.note(2)
        with pytest.raises(ValueError, match="'frozen' was added, replaced or unfrozen.*attach\\(\\) again"):
            tap.read()


def test_a_parameter_group_added_later_is_an_error() -> None:
    model = cases.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradients.attach(model, optimizer) as tap:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7))]})
        model(torch.randn(2, 6)).mean().backward()
        tap.note(2)
        with pytest.raises(ValueError, match="group 1 of SGD.*\\(7,\\)"):
            tap.read()


@pytest.mark.parametrize(("samples", "weight"), [(-1, None), (1, -2.0), (1, float("nan")), (1, float("inf"))])
def test_impossible_counts_are_refused(samples: int, weight: float | None) -> None:
    with gradients.attach(cases.network()) as tap, pytest.raises(ValueError, match="must be"):
        tap.note(samples, weight)


# -- what is refused


class Sharded(nn.Linear):
    """A wrapper that we do not know, with the method that all of them have."""

    def no_sync(self) -> None: ...


def _frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def _known_by_name(name: str) -> nn.Module:
    return type(name, (nn.Linear,), {})(2, 2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.DataParallel(nn.Linear(2, 2)), "DataParallel.*splits every batch"),
        (_known_by_name("FullyShardedDataParallel"), "FullyShardedDataParallel.*FSDP1"),
        (Sharded(2, 2), "Sharded.*does not know"),
        (nn.Sequential(nn.Embedding(5, 2, sparse=True)), "Embedding \\(0\\).*sparse=False"),
        (nn.LazyLinear(3), "'weight' has no shape yet"),
        (_frozen(), "Linear has no trainable parameter: 2 are frozen"),
        (nn.ReLU(), "ReLU has no trainable parameter"),
    ],
)
def test_unsupported_models_are_refused_by_name(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gradients.attach(model)


def test_a_gradient_that_turns_out_sparse_is_refused() -> None:
    table = nn.Parameter(torch.randn(5, 2))
    with gradients.attach(nn.ParameterList([table])), pytest.raises(ValueError, match="sparse"):
        nn.functional.embedding(torch.tensor([1, 3]), table, sparse=True).sum().backward()


def test_parameters_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="several devices \\(cpu, meta\\)"):
        gradients.attach(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")]))


def test_kinds_that_do_not_fit_are_refused() -> None:
    model = cases.network()
    with pytest.raises(ValueError, match="kind must be one of auto, hooks, ddp"):
        gradients.attach(model, kind="deepspeed")
    with pytest.raises(ValueError, match="kind='fsdp' is for models that fully_shard"):
        gradients.attach(model, kind="fsdp")
    with pytest.raises(ValueError, match="kind='ddp' compares ranks"):
        gradients.attach(model, kind="ddp")
    with pytest.raises(ValueError, match="comm_hook is for kind='ddp'"):
        gradients.attach(model, kind="hooks", comm_hook=(None, print))
