"""What taps and windows under DistributedDataParallel refuse, notice, or get along with: hooks, wrappers, misuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradient_cases as cases
import pytest
import ranks
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from adabatch import distributed, gradients


def _wrapped() -> nn.Module:
    return DistributedDataParallel(cases.network())


def _forward_outside() -> str:
    model = _wrapped()
    tap = gradients.attach(model)
    piece = cases.pieces([2], tokens=False)[0]
    try:
        with gradients.accumulate(tap, cases.plan([[2, 2], [2, 2]])) as window:
            loss = cases.mean_loss(model, piece)
            with window.micro_batch():
                window.backward(loss, samples=2)
    except ValueError as error:
        return str(error)
    return "went on"


def test_a_forward_pass_outside_of_the_micro_batch_is_an_error() -> None:
    for message in ranks.run(_forward_outside, 2):
        assert "synchronised before the window's last micro-batch" in message


def _around_the_wrapper() -> str:
    model = _wrapped()
    tap = gradients.attach(model)
    try:
        cases.one_window(tap, model.module, cases.pieces([2], tokens=False), [[2], [2]])
    except ValueError as error:
        return str(error)
    return "went on"


def test_a_hook_that_did_not_fire_is_an_error() -> None:
    for message in ranks.run(_around_the_wrapper, 2):
        assert "ran 0 times in this window" in message and "not through its .module" in message


def _synchronise_each() -> str:
    model = _wrapped()
    tap = gradients.attach(model)
    for piece in cases.pieces([2, 2], tokens=False):
        cases.mean_loss(model, piece).backward()
        tap.note(2)
    try:
        tap.read()
    except ValueError as error:
        return str(error)
    return "went on"


def test_synchronising_every_micro_batch_is_an_error_for_the_bucket_tap() -> None:
    for message in ranks.run(_synchronise_each, 2):
        assert "ran 2 times in this window instead of once" in message


def _unfreeze() -> str:
    network = cases.network()
    network.wide.weight.requires_grad_(False)
    model = DistributedDataParallel(network)
    network.wide.weight.requires_grad_(True)
    tap = gradients.attach(model)
    try:
        cases.one_window(tap, model, cases.pieces([2], tokens=False), [[2], [2]])
    except ValueError as error:
        return str(error)
    return "went on"


def test_a_parameter_unfrozen_after_wrapping_is_an_error() -> None:
    for message in ranks.run(_unfreeze, 2):
        assert "unfrozen or added after wrapping" in message


def _user_hook(handed_over: bool) -> Any:
    model = _wrapped()
    if not handed_over:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        try:
            gradients.attach(model)
        except ValueError as error:
            return str(error)
        return "went on"
    tap = gradients.attach(model, comm_hook=(None, default_hooks.allreduce_hook))
    everyone = cases.pieces_of(cases.LAYOUTS["several"], tokens=True, dtype=torch.float32)
    measured = cases.one_window(tap, model, everyone[distributed.rank()], cases.LAYOUTS["several"]).measurement.read()
    return measured, cases.flat(model.module)


def test_a_users_hook_is_wrapped_when_handed_over() -> None:
    everyone = cases.pieces_of(cases.LAYOUTS["several"], tokens=True, dtype=torch.float32)
    model = cases.network()
    expected = cases.reference(model, everyone)
    for measured, gradient in ranks.run(_user_hook, 2, True):
        assert cases.difference(measured, expected) < 1e-6
        assert torch.allclose(gradient, cases.gradient(model, sum(everyone, [])), rtol=1e-4, atol=1e-5)


def test_a_hook_that_is_there_already_is_refused_with_the_way_out() -> None:
    for message in ranks.run(_user_hook, 2, False):
        assert "allreduce_hook" in message and "attach(model, comm_hook=(state, hook))" in message


def _attach_again() -> list[Any]:
    """A second tap while the first is on, then after it; and a plain step between them."""
    model = _wrapped()
    everyone = cases.pieces_of(cases.LAYOUTS["one each"], tokens=True, dtype=torch.float32)
    mine = everyone[distributed.rank()]
    first = gradients.attach(model)
    try:
        gradients.attach(model)
        message = "went on"
    except ValueError as error:
        message = str(error)
    first.detach()
    cases.mean_loss(model, mine[0]).backward()
    between = cases.flat(model.module)
    model.zero_grad()
    second = gradients.attach(model)
    measured = cases.one_window(second, model, mine, cases.LAYOUTS["one each"]).measurement.read()
    return [message, between, measured]


def test_detaching_leaves_an_ordinary_reduction_and_a_place_for_the_next_tap() -> None:
    everyone = cases.pieces_of(cases.LAYOUTS["one each"], tokens=True, dtype=torch.float32)
    model = cases.network()
    mean = (cases.gradient(model, everyone[0]) + cases.gradient(model, everyone[1])) / 2
    for message, between, measured in ranks.run(_attach_again, 2):
        assert "another tap is attached" in message
        assert torch.allclose(between, mean, rtol=1e-4, atol=1e-5)
        assert cases.difference(measured, cases.reference(model, everyone)) < 1e-6


def _refuse(make: Callable[[], nn.Module]) -> str:
    try:
        gradients.attach(make())
    except ValueError as error:
        return str(error)
    return "went on"


def _plain() -> nn.Module:
    return cases.network()


def _partly_wrapped() -> nn.Module:
    return nn.ModuleDict({"wrapped": DistributedDataParallel(nn.Linear(2, 2)), "bare": nn.Linear(2, 2)})


def _doubly_wrapped() -> nn.Module:
    return DistributedDataParallel(nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)))


def _tensor_parallel() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (2,))))
    return model


@pytest.mark.parametrize(
    ("make", "messages"),
    [
        (_plain, ["Tied is a plain module in a process group of 2 ranks", "wrap it in"]),
        (_partly_wrapped, ["'bare.weight' is not synchronised over the 2 ranks"]),
        (_doubly_wrapped, ["inside another one", "kind='hooks'"]),
        (_tensor_parallel, ["'weight' is a DTensor"]),
    ],
)
def test_unsupported_models_are_refused(make: Callable[[], nn.Module], messages: list[str]) -> None:
    for said in ranks.run(_refuse, 2, make):
        for message in messages:
            assert message in said
