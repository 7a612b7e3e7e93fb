"""The accumulating window in reduced precision: autocast, half-precision parameters, and gradient scalers."""

from __future__ import annotations

import copy
import math

import gradient_cases as cases
import pytest
import torch
from torch import nn

from adabatch import gradients
from adabatch.noise import Measurement


def test_autocast_to_bfloat16() -> None:
    model = cases.network()
    groups = cases.pieces([3, 1, 4, 2], tokens=True)
    expected = cases.reference(model, [[piece] for piece in groups])
    tap = gradients.attach(model)
    with gradients.accumulate(tap, cases.plan([piece.samples for piece in groups])) as window:
        for piece in groups:
            with window.micro_batch():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = cases.mean_loss(model, piece)
                window.backward(loss, samples=piece.samples, weight=piece.weight)
    measured = window.finish(torch.optim.SGD(model.parameters(), lr=0.1)).measurement.read()
    assert measured.mean_square == pytest.approx(expected.mean_square, rel=0.05)
    assert measured.group_square == pytest.approx(expected.group_square, rel=0.05)


def test_bfloat16_parameters_measure_in_single_precision() -> None:
    """Equal micro-batches have no noise: rounding of norms would show as some."""
    torch.manual_seed(0)
    model = nn.Linear(40, 40).bfloat16()
    piece = torch.randn(4, 40).bfloat16()
    tap = gradients.attach(model)
    with gradients.accumulate(tap, cases.plan([4, 4])) as window:
        for _ in range(2):
            with window.micro_batch():
                window.backward(model(piece).square().mean(), samples=4)
    measured = window.finish(torch.optim.SGD(model.parameters(), lr=0.1)).measurement.read()
    assert abs(measured.noise) < 1e-6 * measured.mean_square
    assert measured.mean_square > 0


def fp16_run(init_scale: float, *, steps: int, weight: float = 1.0) -> tuple[nn.Module, list[Measurement], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)
    tap = gradients.attach(model)
    inputs = torch.randn(steps, 2, 4, 6, generator=torch.Generator().manual_seed(3))
    measured, scales = [], []
    for step in range(steps):
        with gradients.accumulate(tap, cases.plan([4, 4])) as window:
            for half in inputs[step]:
                with window.micro_batch():
                    with torch.autocast("cpu", torch.float16):
                        loss = (model(half) - half.sum(dim=1, keepdim=True)).square().mean()
                    window.backward(loss, samples=4, weight=4 * weight, scaler=scaler)
        outcome = window.finish(optimizer, max_norm=1.0, scaler=scaler)
        outcome.step()
        optimizer.zero_grad()
        measured.append(outcome.measurement.read())
        scales.append(scaler.get_scale())
    return model, measured, scales


def test_fp16_with_a_gradient_scaler_trains_like_fp32() -> None:
    model, measured, scales = fp16_run(1024.0, steps=5)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    norms = []
    for inputs in torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(3)):
        (plain(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(one, other, atol=3e-3)
    assert [math.sqrt(one.mean_square) for one in measured] == pytest.approx(norms, rel=2e-2)
    assert scales == [1024.0] * 5


def test_fp16_overflow_skips_and_lowers_the_scale() -> None:
    model, measured, scales = fp16_run(2.0**24, steps=16)
    finite = [one.finite for one in measured]
    assert not finite[0] and finite[-1]
    assert scales[0] == 2.0**23 and scales[-1] == 2.0 ** (24 - finite.count(False))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_fp16_scales_do_not_depend_on_the_unit_of_the_weights() -> None:
    """Token weights are hundreds of times larger than samples; gradients in fp16 must not be."""
    _, by_samples, scales = fp16_run(4096.0, steps=3)
    _, by_tokens, token_scales = fp16_run(4096.0, steps=3, weight=512.0)
    assert all(one.finite for one in by_tokens) and token_scales == scales
    for one, other in zip(by_samples, by_tokens):
        assert other.mean_square == pytest.approx(one.mean_square, rel=1e-5)


def test_a_disabled_scaler_is_none() -> None:
    model = nn.Linear(2, 1)
    tap = gradients.attach(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    before = copy.deepcopy(model.state_dict())
    with gradients.accumulate(tap, cases.plan([1])) as window, window.micro_batch():
        window.backward(model(torch.full((1, 2), math.nan)).mean(), samples=1, scaler=scaler)
    window.finish(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler).step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
