"""A window whose gradient is not finite leaves parameters, moments and step counters alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import gradient_cases as cases
import pytest
import torch
from torch import Tensor, nn

from adabatch import gradients
from adabatch.gradients import outcomes
from adabatch.noise import Measurement

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5, fused=True),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5, foreach=True),
    "adamw plain": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5, foreach=False),
    "adam amsgrad fused": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5),
    "sgd fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5, fused=True),
    "sgd fused dampened": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, dampening=0.5, fused=True
    ),
    "sgd fused without momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5, fused=True),
    "adagrad fused": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, fused=True),
    "muon": lambda parameters: torch.optim.Muon(parameters, lr=0.1),
}

GOOD = 1.0


def train(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    slopes: list[float],
    step: Callable[[gradients.Outcome], None],
) -> tuple[nn.Module, torch.optim.Optimizer, list[Measurement]]:
    """Windows whose gradients are multiples of these slopes."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    optimizer = make(list(model.parameters()))
    inputs = torch.randn(len(slopes), 2, 4, generator=torch.Generator().manual_seed(1))
    measured = []
    with gradients.attach(model, optimizer) as tap:
        for slope, samples in zip(slopes, inputs):
            with gradients.accumulate(tap, cases.plan([2])) as window, window.micro_batch():
                window.backward(model(samples).square().mean() * slope, samples=2)
            outcome = window.finish(optimizer, max_norm=1.0)
            step(outcome)
            optimizer.zero_grad()
            measured.append(outcome.measurement.read())
    return model, optimizer, measured


def host_step(outcome: gradients.Outcome) -> None:
    outcome.step()


def device_step(outcome: gradients.Outcome) -> None:
    """As ``Outcome.step`` does on a GPU."""
    for optimizer in outcome._optimizers:
        outcomes.step_unless(outcome._skip, optimizer, on_device=True)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {
        f"{index}.{key}": value.clone()
        for index, values in copy.deepcopy(optimizer.state_dict()["state"]).items()
        for key, value in values.items()
        if value is not None
    }
    return {**{name: value.clone() for name, value in model.state_dict().items()}, **state}


@pytest.mark.parametrize("step", [host_step, device_step])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_window_never_happened(name: str, step: Callable[[gradients.Outcome], None], bad: float) -> None:
    make = OPTIMIZERS[name]
    for slopes in ([GOOD, GOOD, bad], [bad, GOOD], [GOOD, bad, bad, GOOD]):
        # The same windows with the bad ones' steps left out by hand.
        bad_ones = iter([slope is bad for slope in slopes])
        model, optimizer, measured = train(make, slopes, step)
        good = [GOOD if slope is bad else slope for slope in slopes]
        expected_model, expected_optimizer, _ = train(make, good, lambda outcome: next(bad_ones) or outcome.step())
        assert [one.finite for one in measured] == [slope is not bad for slope in slopes]
        after, expected = everything(model, optimizer), everything(expected_model, expected_optimizer)
        for key, value in expected.items():
            assert torch.equal(after[key], value), key


def test_fused_optimizers_skip_on_the_device() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2))]
    skipping = {name for name, make in OPTIMIZERS.items() if outcomes.skips_by_itself(make(parameters))}
    assert skipping == {name for name in OPTIMIZERS if "fused" in name}
    # no gradient yet, so nothing to spoil; but a first gradient would make buffers of uninitialised memory
    parameters[0].grad = torch.ones(2, 2)
    optimizer = OPTIMIZERS["sgd fused"](parameters)
    assert not outcomes.skips_by_itself(optimizer)
    optimizer.step()
    assert outcomes.skips_by_itself(optimizer)


def test_found_inf_is_taken_back() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = OPTIMIZERS["adamw fused"]([parameter])
    outcomes.step_unless(torch.tensor(False), optimizer, on_device=True)
    assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")


def test_a_norm_beyond_single_precision_is_flagged_and_not_zeroed() -> None:
    """Every element is finite; clipping by an infinite norm would make the update 0 and nobody would know."""
    parameter = nn.Parameter(torch.zeros(3))
    tap = gradients.attach(nn.ParameterList([parameter]))
    with gradients.accumulate(tap, cases.plan([1])) as window, window.micro_batch():
        window.backward((parameter * torch.tensor([1e20, 1.0, 1.0])).sum(), samples=1)
    outcome = window.finish(torch.optim.SGD([parameter], lr=1.0), max_norm=1.0)
    outcome.step()
    assert outcome.skipped() and not outcome.measurement.read().measurable
    assert parameter.grad.isnan().all()
    assert torch.equal(parameter.detach(), torch.zeros(3))


@pytest.mark.parametrize("name", ["sgd fused", "sgd fused dampened", "sgd", "adamw fused", "adamw foreach"])
def test_with_a_scaler_even_the_first_window_may_overflow(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    before = model.weight.detach().clone()
    tap = gradients.attach(model)
    scales = []
    for slope in (math.inf, 1.0, math.nan, 1.0):
        with gradients.accumulate(tap, cases.plan([2])) as window, window.micro_batch():
            window.backward(model(torch.ones(2, 4)).square().mean() * slope, samples=2, scaler=scaler)
        window.finish(optimizer, max_norm=1.0, scaler=scaler).step()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if slope == math.inf:
            assert torch.equal(model.weight, before)
    assert scales == [8.0, 8.0, 4.0, 4.0]
    assert (model.weight - before).abs().max() < 1.0 and not torch.equal(model.weight, before)
