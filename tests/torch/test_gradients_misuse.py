"""What the accumulating window says to those who use it wrongly."""

from __future__ import annotations

from collections.abc import Sequence

import gradient_cases as cases
import pytest
import torch
from torch import nn

from adabatch import gradients


def window_of(sizes: Sequence[int], run: Sequence[int], **finish: object) -> gradients.Outcome:
    model = nn.Linear(2, 1)
    tap = gradients.attach(model)
    with gradients.accumulate(tap, cases.plan(sizes)) as window:
        for size in run:
            with window.micro_batch():
                window.backward(model(torch.ones(1, 2)).mean(), samples=size)
    return window.finish(torch.optim.SGD(model.parameters(), lr=0.1), **finish)


def test_fewer_or_more_micro_batches_than_planned() -> None:
    with pytest.raises(ValueError, match="2 micro-batches ran where the plan of step 0 has 3"):
        window_of([1, 1, 1], [1, 1])
    with pytest.raises(ValueError, match="has 2 micro-batches, and this is one more"):
        window_of([1, 1], [1, 1, 1])


def test_other_samples_than_planned() -> None:
    outcome = window_of([2, 2], [2, 1])
    with pytest.raises(ValueError, match="step 0 ran 3 samples over all ranks, but its plan has 4"):
        outcome.measurement.read()


def test_backward_is_called_once_inside_each_micro_batch() -> None:
    model = nn.Linear(2, 1)
    tap = gradients.attach(model)
    inputs = torch.ones(1, 2)
    with (
        pytest.raises(ValueError, match="backward\\(\\) belongs inside"),
        gradients.accumulate(tap, cases.plan([1])) as window,
    ):
        window.backward(model(inputs).mean(), samples=1)
    with (
        pytest.raises(ValueError, match="once per micro-batch"),
        gradients.accumulate(tap, cases.plan([1])) as window,
        window.micro_batch(),
    ):
        window.backward(model(inputs).mean(), samples=1)
        window.backward(model(inputs).mean(), samples=1)
    with (
        pytest.raises(ValueError, match="ended without window.backward"),
        gradients.accumulate(tap, cases.plan([1])) as window,
        window.micro_batch(),
    ):
        model(inputs)
    # and after all that a window still works
    with gradients.accumulate(tap, cases.plan([1])) as window, window.micro_batch():
        window.backward(model(inputs).mean(), samples=1)
    assert window.finish(torch.optim.SGD(model.parameters(), lr=0.1)).measurement.read().samples == 1


def test_a_loss_that_is_no_number_is_refused() -> None:
    model = nn.Linear(2, 1)
    tap = gradients.attach(model)
    with (
        pytest.raises(ValueError, match="one number, got a tensor of shape \\(3, 1\\)"),
        gradients.accumulate(tap, cases.plan([3])) as window,
        window.micro_batch(),
    ):
        window.backward(model(torch.ones(3, 2)), samples=3)


def test_finish_comes_once_and_afterwards() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tap = gradients.attach(model)
    with gradients.accumulate(tap, cases.plan([1])) as window:
        with window.micro_batch():
            window.backward(model(torch.ones(1, 2)).mean(), samples=1)
        with pytest.raises(ValueError, match="finish\\(\\) comes once"):
            window.finish(optimizer)
    window.finish(optimizer)
    with pytest.raises(ValueError, match="finish\\(\\) comes once"):
        window.finish(optimizer)


def test_the_plan_must_be_for_these_ranks() -> None:
    tap = gradients.attach(nn.Linear(2, 1))
    with pytest.raises(ValueError, match="is for 2 ranks, but 1 share"):
        gradients.accumulate(tap, cases.plan([[1], [1]]))


def test_backward_and_finish_take_the_same_scaler() -> None:
    with pytest.raises(ValueError, match="finish\\(\\) takes the scaler that backward"):
        window_of([1], [1], scaler=torch.amp.GradScaler("cpu"))


def test_parameters_that_the_tap_does_not_know_are_an_error() -> None:
    model = nn.Linear(2, 1)
    tap = gradients.attach(model)
    stranger = nn.Parameter(torch.zeros(3))
    with gradients.accumulate(tap, cases.plan([1])) as window, window.micro_batch():
        window.backward(model(torch.ones(1, 2)).mean(), samples=1)
    with pytest.raises(ValueError, match="group 1 of SGD.*shape \\(3,\\)"):
        window.finish(torch.optim.SGD([{"params": model.parameters()}, {"params": [stranger]}], lr=0.1))


def test_a_parameter_unfrozen_later_is_an_error() -> None:
    model = cases.network()
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    tap = gradients.attach(model)
    model.frozen.requires_grad_(True)
    with gradients.accumulate(tap, cases.plan([1])) as window, window.micro_batch():
        window.backward(model(torch.ones(1, 6)).mean(), samples=1)
    with pytest.raises(ValueError, match="unfrozen after attach"):
        window.finish(optimizer)
