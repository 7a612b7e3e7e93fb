"""Scales applied to real optimizers: values, Adam's carried moments, and who else may set a learning rate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

from adabatch import optimizers
from adabatch.controller import Controller
from adabatch.ledger import Ledger, Segment
from adabatch.plan import BatchLimits, BatchPlan, Scales
from adabatch.policies import Replay
from adabatch.scaling import Scaling

ADAMS: dict[str, dict[str, object]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def plan(kappa: float, *, schedule: float = 1.0, scales: Scales | None = None) -> BatchPlan:
    """A plan with the square-root rule and all companions at ``kappa`` reference batches."""
    root = math.sqrt(kappa)
    moves = {"second_moment": 1.0, "step_counter": kappa}
    scales = scales or Scales(kappa, lr=root, beta2_exponent=kappa, eps=1 / root, weight_decay=root, **moves)
    return BatchPlan(0, 0, round(8 * kappa), 1, 8, 1, True, schedule, scales)


def trained(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 20) -> torch.optim.Optimizer:
    """An optimizer that has taken steps with noisy gradients. The first coordinates' came late and are steady, so that
    their squared mean is above their mean square."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(10, 2))]
    optimizer = make(parameters)
    optimizers.apply(plan(1), optimizer)
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad[:3] = float(step >= steps // 2)
        optimizer.step()
    return optimizer


def adam(**options: object) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **options)


def hats(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, torch.Tensor, float, float]]:
    """Bias-corrected moments of each parameter, and the bias corrections themselves."""
    found = []
    for group in optimizer.param_groups:
        beta1, beta2 = map(float, group["betas"])
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            one, two = 1 - beta1 ** float(state["step"]), 1 - beta2 ** float(state["step"])
            found.append((state["exp_avg"].double() / one, state["exp_avg_sq"].double() / two, one, two))
    return found


# -- values


def test_kinds() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    assert optimizers.kind(torch.optim.Adam(parameters)) == "adam"
    assert optimizers.kind(torch.optim.AdamW(parameters)) == "adam"
    assert optimizers.kind(torch.optim.SGD(parameters)) == "sgd"
    assert optimizers.kind(torch.optim.Muon(parameters)) == "muon"
    assert optimizers.kind(torch.optim.NAdam(parameters)) is None
    assert optimizers.kind(torch.optim.RMSprop(parameters)) is None


def test_values_are_configured_times_schedule_times_scale() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW(
        [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.05, "weight_decay": 0.0}],
        lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.2,
    )
    for _ in range(3):
        optimizers.apply(plan(4, schedule=0.5), optimizer)
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"]) == pytest.approx((0.1, 0.05))
    assert first["betas"] == pytest.approx((0.9, 0.99**4))
    assert (first["eps"], first["weight_decay"], second["weight_decay"]) == pytest.approx((5e-7, 0.4, 0.0))
    optimizers.apply(plan(1), optimizer)
    assert (first["lr"], second["lr"], first["betas"], first["eps"], first["weight_decay"]) == (
        0.1, 0.05, (0.9, 0.99), 1e-6, 0.2
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.2),
        lambda parameters: torch.optim.Muon(parameters, lr=0.1, weight_decay=0.2),
    ],
)
def test_the_momentum_factor_of_sgd_and_muon_stays(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    parameters = [nn.Parameter(torch.ones(3, 3))]
    optimizer = make(parameters)
    optimizers.apply(plan(4), optimizer)
    parameters[0].grad = torch.ones(3, 3)
    optimizer.step()
    group, buffer = optimizer.param_groups[0], optimizer.state[parameters[0]]["momentum_buffer"].clone()
    momentum, eps = group["momentum"], group.get("eps")
    for kappa in (1, 0.25, 16):
        optimizers.apply(plan(kappa), optimizer)  # its scales leave the buffers alone
        assert (group["momentum"], group.get("eps")) == (momentum, eps)
        assert torch.equal(optimizer.state[parameters[0]]["momentum_buffer"], buffer)
        assert (group["lr"], group["weight_decay"]) == pytest.approx((0.1 * kappa**0.5, 0.2 * kappa**0.5))


def test_adams_l2_term_is_no_decay() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    coupled = torch.optim.Adam(parameters, weight_decay=0.1)
    decoupled = torch.optim.Adam(parameters, weight_decay=0.1, decoupled_weight_decay=True)
    optimizers.apply(plan(4), [coupled, decoupled])
    assert coupled.param_groups[0]["weight_decay"] == 0.1
    assert decoupled.param_groups[0]["weight_decay"] == 0.2


@pytest.mark.parametrize("options", [{"foreach": False}, {"capturable": True, "foreach": False}, {"fused": True}])
def test_a_tensor_learning_rate_stays_the_same_object(options: dict[str, object]) -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=rate, **options)
    for kappa in (1, 2, 4, 4, 0.5, 1, 3, 8, 8, 1):
        optimizers.apply(plan(kappa), optimizer)
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(0.1 * kappa**0.5)


def test_betas_stay_below_one_at_tiny_batches() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], betas=(0.0, 0.999999999))
    optimizers.apply(plan(1e-9), optimizer)
    group = optimizer.param_groups[0]
    assert group["betas"][0] == 0.0 and 0.999999999 < group["betas"][1] < 1
    assert group["eps"] > 0


@pytest.mark.parametrize(
    "scales",
    [
        Scales(lr=0.0),
        Scales(lr=math.inf),
        Scales(eps=math.nan),
        Scales(kappa=-1.0),
        Scales(beta1_exponent=0.0),
        Scales(beta2_exponent=0.0),
        Scales(second_moment=math.nan),
        Scales(second_moment=0.5),
        Scales(step_counter=math.inf),
    ],
)
def test_illegal_scales_change_nothing(scales: Scales) -> None:
    optimizer = trained(adam())
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="must be above 0 and finite|must be 0 or 1"):
        optimizers.apply(plan(1, scales=scales), optimizer)
    assert same(before, optimizer.state_dict())


def test_a_schedule_of_minus_something_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule is -0.5"):
        optimizers.apply(plan(1, schedule=-0.5), torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))


def same(one: object, other: object) -> bool:
    """Whether two nests of dicts, lists, tensors and plain values are equal."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other))
    return one == other


# -- Adam's moments


@pytest.mark.parametrize("options", ADAMS.values(), ids=ADAMS)
@pytest.mark.parametrize("kappa", [4.0, 0.25])
@pytest.mark.parametrize("beta1_moves", [False, True])
def test_bias_corrected_moments_are_unchanged_at_the_switch(
    options: dict[str, object], kappa: float, beta1_moves: bool
) -> None:
    optimizer = trained(adam(**options))
    before = hats(optimizer)
    scales = replace(plan(kappa).scales, beta1_exponent=kappa if beta1_moves else 1.0)
    optimizers.apply(plan(kappa, scales=scales), optimizer)
    for (m, _, _, two), (new_m, _, _, new_two) in zip(before, hats(optimizer)):
        assert new_two == pytest.approx(two, rel=1e-5)
        assert torch.allclose(new_m, m, rtol=1e-5)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {20 / kappa}


@pytest.mark.parametrize("options", ADAMS.values(), ids=ADAMS)
@pytest.mark.parametrize("kappa", [4.0, 0.25])
@pytest.mark.parametrize("betas_move", [True, False])
def test_the_noise_part_of_the_second_moment_follows_the_batch(
    options: dict[str, object], kappa: float, betas_move: bool
) -> None:
    """v_hat -> s + (v_hat - s) / kappa, with and without betas that move; 20 gradients weigh in m_hat."""
    optimizer = trained(adam(**options))
    before = hats(optimizer)
    scales = None if betas_move else Scales(kappa, lr=kappa**0.5, second_moment=1.0)
    optimizers.apply(plan(kappa, scales=scales), optimizer)
    weights = torch.tensor([0.1 * 0.9**age for age in range(20)], dtype=torch.float64)
    share = float((weights / weights.sum()).square().sum())
    pure = mixed = 0
    for (m, v, _, _), (new_m, new_v, _, _) in zip(before, hats(optimizer)):
        signal = torch.clamp((m.square() - share * v) / (1 - share), min=0).minimum(v)
        expected = signal + (v - signal) / kappa
        assert torch.allclose(new_m, m, rtol=1e-5)
        assert torch.allclose(new_v, expected, rtol=1e-5)
        assert (new_v >= 0).all()
        pure += int((signal == v).sum())
        mixed += int(((signal > 0) & (signal < v)).sum())
    assert pure > 0 and mixed > 0, "the cases without which the formula could be simpler"


def test_the_signal_and_the_noise_of_a_second_moment_are_told_apart() -> None:
    """Coordinates of known signal and noise: v_hat becomes what the new batch would have made it, on the average."""
    signal, noise, kappa = 3.0, 1.0, 4.0
    parameter = nn.Parameter(torch.zeros(4000, dtype=torch.float64))
    optimizer = torch.optim.AdamW([parameter], betas=(0.9, 0.99))
    optimizers.apply(plan(1), optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(600):
        parameter.grad = signal + noise * torch.randn(4000, generator=generator, dtype=torch.float64)
        optimizer.step()
    optimizers.apply(plan(kappa), optimizer)
    found = hats(optimizer)[0][1].mean().item()
    assert found == pytest.approx(signal**2 + noise**2 / kappa, rel=0.02)


def test_complex_parameters_are_carried_over_by_parts() -> None:
    parameter = nn.Parameter(torch.zeros(6, dtype=torch.complex64))
    optimizer = torch.optim.Adam([parameter])
    optimizers.apply(plan(1), optimizer)
    for _ in range(5):
        parameter.grad = torch.randn(6, dtype=torch.complex64)
        optimizer.step()
    state = optimizer.state[parameter]
    m, v = (torch.view_as_real(state[key]).clone() for key in ("exp_avg", "exp_avg_sq"))
    optimizers.apply(plan(0.5), optimizer)
    weights = torch.tensor([0.1 * 0.9**age for age in range(5)])
    share = float((weights / weights.sum()).square().sum())
    mean_square = m.square() * (1 - 0.999**5) / (1 - 0.9**5) ** 2
    signal = torch.clamp((mean_square - share * v) / (1 - share), min=0).minimum(v)
    assert torch.allclose(torch.view_as_real(state["exp_avg_sq"]), signal + (v - signal) / 0.5, rtol=1e-4)


def test_applying_twice_is_applying_once() -> None:
    optimizer = trained(adam())
    optimizers.apply(plan(0.25), optimizer)
    once = copy.deepcopy(optimizer.state_dict())
    optimizers.apply(plan(0.25), optimizer)
    assert same(once, optimizer.state_dict())


def test_nothing_moves_without_scaling() -> None:
    """The batch changes and the rule is ``none``: values, counters and moments stay."""
    optimizer = trained(adam())
    before = copy.deepcopy(optimizer.state_dict())
    for kappa in (0.25, 4.0):
        optimizers.apply(plan(kappa, scales=Scales(kappa, clip=0.3)), optimizer)
        after = copy.deepcopy(optimizer.state_dict())
        assert same(before["state"], after["state"])
        [group], [configured] = after["param_groups"], before["param_groups"]
        assert same(group, {**configured, "adabatch_batch": 8 * kappa}), "but for the batch that is remembered"


@pytest.mark.parametrize("rule_before", ["none", "sqrt"])
def test_another_rule_or_reference_batch_at_the_same_batch_leaves_the_second_moment_alone(rule_before: str) -> None:
    """As when a run is resumed with them; from then on it follows the batch, from the one that it really had."""

    def at(batch: int, rule: str, reference: int) -> BatchPlan:
        return BatchPlan(0, 0, batch, 1, 8, 1, scales=Scaling(rule, reference, beta2=False).scales(batch, None))

    optimizer = trained(adam())
    optimizers.apply(at(64, rule_before, 8), optimizer)
    before = hats(optimizer)
    optimizers.apply(at(64, "sqrt", 32), optimizer)
    for (_, v, _, _), (_, new_v, _, _) in zip(before, hats(optimizer)):
        assert torch.allclose(new_v, v, rtol=1e-5)
    other = trained(adam())
    optimizers.apply(at(64, rule_before, 8), other)
    optimizers.apply(at(128, "sqrt", 32), optimizer)
    optimizers.apply(at(128, "sqrt", 8), other)
    for (_, one, _, _), (_, two, _, _), (_, v, _, _) in zip(hats(optimizer), hats(other), before):
        assert torch.allclose(one, two, rtol=1e-4) and (one < 0.8 * v).any()


def test_a_skipped_first_step_leaves_zero_moments_at_zero() -> None:
    """Fused Adam makes its state in a skipped step, with 0 steps behind it."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), math.nan)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizers.apply(plan(1), optimizer)
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale
    optimizers.apply(plan(0.25), optimizer)
    state = optimizer.state[parameter]
    assert torch.equal(state["exp_avg_sq"], torch.zeros(3)) and float(state["step"]) == 0


def test_training_through_switches_stays_sound() -> None:
    parameter = nn.Parameter(torch.full((20,), 3.0))
    optimizer = torch.optim.AdamW([parameter], lr=0.05)
    generator = torch.Generator().manual_seed(0)
    for step in range(120):
        optimizers.apply(plan([1, 8, 0.5, 2][step // 10 % 4]), optimizer)
        parameter.grad = parameter.detach() + 0.3 * torch.randn(20, generator=generator)
        optimizer.step()
        assert (optimizer.state[parameter]["exp_avg_sq"] >= 0).all()
    assert parameter.abs().max() < 1.0


# -- state dicts


def test_state_dict_round_trip_goes_on_exactly() -> None:
    optimizer = trained(adam())
    optimizers.apply(plan(4), optimizer)
    fresh = torch.optim.AdamW(
        [nn.Parameter(parameter.detach().clone()) for parameter in optimizer.param_groups[0]["params"]], lr=7.0
    )
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, fresh):
        optimizers.apply(plan(0.5, schedule=0.5), one)
        for parameter in one.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        one.step()
    assert same(optimizer.state_dict(), fresh.state_dict())
    for one, other in zip(optimizer.param_groups[0]["params"], fresh.param_groups[0]["params"]):
        assert torch.equal(one, other)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_distributed_checkpoint_round_trip(name: str, flatten: bool) -> None:
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flatten)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}]
        if name == "adamw":
            return model, torch.optim.AdamW(groups, lr=0.01)
        return model, torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    model, optimizer = build()
    for kappa in (1, 4):
        optimizers.apply(plan(kappa), optimizer)
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    saved = dcp.get_optimizer_state_dict(model, optimizer, options=options)
    other_model, other = build()
    optimizers.prepare(other)
    other_model.load_state_dict(model.state_dict())
    # as a distributed checkpoint does: the fresh optimizer's state dict says what is loaded
    target = dcp.get_optimizer_state_dict(other_model, other, options=options)
    assert target.keys() == saved.keys()
    dcp.set_optimizer_state_dict(other_model, other, copy.deepcopy(saved), options=options)
    for one, its_model in ((optimizer, model), (other, other_model)):
        optimizers.apply(plan(0.5), one)
        one.zero_grad()
        its_model(torch.ones(2, 3)).square().sum().backward()
        one.step()
    assert same(optimizer.state_dict()["state"], other.state_dict()["state"])
    assert [group["lr"] for group in other.param_groups] == pytest.approx([0.01 * 0.5**0.5, 0.02 * 0.5**0.5])
    assert same(model.state_dict(), other_model.state_dict())


def test_a_new_configured_rate_after_loading() -> None:
    """0.1 was configured and 0.02 is now; the multiplier of 2 stays, and groups keep their ratio."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]

    def build(rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": rate * 10}], lr=rate)

    old = build(0.1)
    optimizers.apply(plan(4), old)
    new = build(0.02)
    configured = optimizers.bases(new)
    new.load_state_dict(old.state_dict())
    optimizers.apply(plan(4), new)
    assert [group["lr"] for group in new.param_groups] == pytest.approx([0.2, 2.0])
    optimizers.rebase(new, configured)
    optimizers.apply(plan(4), new)
    assert [group["lr"] for group in new.param_groups] == pytest.approx([0.04, 0.4])
    with pytest.raises(ValueError, match="1 groups of configured values for an optimizer with 2"):
        optimizers.rebase(new, configured[:1])


# -- who else sets learning rates


def test_a_learning_rate_set_by_somebody_else_is_an_error() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    optimizers.apply(plan(4), optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    for _ in range(2):
        with pytest.raises(ValueError, match="group 0 is 0.05, but 0.2 was set last.*Hand the schedule"):
            optimizers.apply(plan(4), optimizer)
    optimizers.rebase(optimizer)
    optimizers.apply(plan(4), optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_tensor_rate_set_by_somebody_else_is_an_error() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=rate)
    optimizers.apply(plan(4), optimizer)
    rate.fill_(0.05)
    with pytest.raises(ValueError, match="was set last"):
        optimizers.apply(plan(4), optimizer)


def test_a_torch_scheduler_is_refused_before_and_after() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
    with pytest.raises(ValueError, match="scheduler is attached to SGD .parameter group 0: lr 0.01.*, initial_lr 0.1."):
        optimizers.apply(plan(1), optimizer)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    optimizers.apply(plan(4), optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
    optimizer.step()
    scheduler.step()
    with pytest.raises(ValueError, match="something else sets it too. Hand the schedule to the controller"):
        optimizers.apply(plan(4), optimizer)


# -- optimizers that we do not know


def test_an_unknown_optimizer_follows_the_schedule_only() -> None:
    optimizer = torch.optim.RMSprop([nn.Parameter(torch.zeros(2))], lr=0.1, eps=1e-4)
    optimizers.apply(plan(1, scales=Scales(4.0, clip=0.5), schedule=0.5), optimizer)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["eps"]) == (0.05, 1e-4)


def test_scaling_an_unknown_optimizer_must_be_asked_for() -> None:
    optimizer = torch.optim.RMSprop([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match="how RMSprop should follow.*scaling=none.*assume"):
        optimizers.apply(plan(4), optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizers.apply(plan(4), optimizer, assume="sgd")
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    with pytest.raises(ValueError, match="assume must be one of adam, sgd, muon, got 'lion'"):
        optimizers.apply(plan(4), optimizer, assume="lion")


def test_a_group_added_later_starts_from_its_own_rate() -> None:
    optimizer = trained(adam())
    optimizers.apply(plan(4), optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": 0.5})
    optimizers.apply(plan(4), optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2e-3, 1.0])


# -- torch's own schedulers


def test_a_torch_scheduler_ticks_once_per_reference_batch_of_samples() -> None:
    schedule = optimizers.TorchSchedule(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5), reference_batch=16)
    later = schedule.value(47.9)
    assert [schedule.value(position) for position in (0, 15.9, 16, 32)] == [1.0, 1.0, 0.5, 0.25]
    assert later == 0.25
    for sizes in ([16] * 6, [32] * 3, [96]):
        controller = Controller(
            Replay(Ledger([Segment(0, sizes[0], len(sizes))])), limits=BatchLimits(), schedule=schedule
        )
        while controller.progress.samples < 96 - sizes[-1]:
            controller.commit(controller.plan())
        assert controller.plan().schedule == 0.5 ** ((96 - sizes[-1] / 2) // 16)


def test_a_scheduler_that_follows_a_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="follows a metric"):
        optimizers.TorchSchedule(torch.optim.lr_scheduler.ReduceLROnPlateau, reference_batch=16)
