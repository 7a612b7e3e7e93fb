"""The product of gradient and average past gradient, against its definition on the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adabatch.gradients.drift import product

CPU = torch.device("cpu")


def average_of_the_past(gradients: list[torch.Tensor], beta: float) -> torch.Tensor:
    """Weights beta^age, summing to 1, in double precision."""
    weights = [beta ** (len(gradients) - 1 - age) for age in range(len(gradients))]
    wide = [one.to(torch.complex128 if one.is_complex() else torch.float64) for one in gradients]
    return sum(weight * one for weight, one in zip(weights, wide)) / sum(weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_adams_first_moment_without_its_bias(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(400, dtype=dtype))
    optimizer = torch.optim.AdamW([parameter], betas=(0.9, 0.99))
    past = []
    assert product([optimizer], CPU) is None
    for _ in range(5):
        parameter.grad = torch.randn(400, dtype=dtype)
        past.append(parameter.grad.clone())
        optimizer.step()
    parameter.grad = torch.randn(400, dtype=dtype) + 0.5
    found = product([optimizer], CPU)
    gradient = parameter.grad.to(torch.complex128 if dtype.is_complex else torch.float64)
    expected = (gradient.conj() * average_of_the_past(past, 0.9)).real.sum()
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(expected.item(), rel=2e-2 if dtype == torch.bfloat16 else 1e-5, abs=1e-6)


def test_sgds_buffer_times_one_minus_mu() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    for _ in range(200):  # by then the buffer's weights sum to 1 / (1 - mu)
        parameter.grad = torch.tensor([1.0, 2.0, 3.0])
        optimizer.step()
    assert product([optimizer], CPU).item() == pytest.approx(14.0, rel=1e-5)
