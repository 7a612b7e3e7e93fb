"""Several optimizers and parameter groups in one transaction, and optimizers in all the ways that torch computes them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from adabatch import optimizers
from adabatch.gradients import drift
from adabatch.plan import BatchPlan, Scales
from adabatch.scaling import RULES, Scaling, scales_of

ROOT_RULE = Scaling("sqrt", 8)
GAIN_RULE = Scaling("linear", 8, beta2=False, eps=False)


def plan(scaling: Scaling | dict[str, Scaling], kappa: float, *, schedule: float = 1.0) -> BatchPlan:
    scales, by_kind = scales_of(scaling, round(8 * kappa), math.inf)
    return BatchPlan(0, 0, round(8 * kappa), 1, 8, 1, True, schedule, scales, by_kind=by_kind)


def stepped(optimizer: torch.optim.Optimizer, steps: int = 20, seed: int = 0) -> torch.optim.Optimizer:
    """The optimizer after some steps with noise for gradients."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return optimizer


def pair() -> list[torch.optim.Optimizer]:
    """Muon and AdamW with some steps behind them."""
    muon = torch.optim.Muon([nn.Parameter(torch.ones(4, 3))], lr=0.02, weight_decay=0.1, momentum=0.95, ns_steps=1)
    adam = torch.optim.AdamW([nn.Parameter(torch.ones(5))], lr=1e-3, weight_decay=0.1, eps=1e-8)
    both = [muon, adam]
    optimizers.apply(plan(ROOT_RULE, 1), both)
    return [stepped(muon, 2), stepped(adam)]


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*both) for both in zip(one, other))
    return one == other


def snapshot(several: list[torch.optim.Optimizer]) -> list[dict[str, object]]:
    return copy.deepcopy([one.state_dict() for one in several])


# -- several optimizers


def test_each_optimizer_follows_the_rule_of_its_kind() -> None:
    muon, adam = pair()
    optimizers.apply(plan({"muon": ROOT_RULE, "adam": GAIN_RULE}, 4), [muon, adam])
    group = muon.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == pytest.approx((0.02 * 2, 0.1 * 2))
    assert (group["momentum"], group["eps"]) == (0.95, 1e-7)
    group = adam.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["eps"]) == pytest.approx((4e-3, 0.1, 1e-8))
    assert group["betas"] == (0.9, 0.999)


def test_one_rule_serves_every_kind() -> None:
    muon, adam = pair()
    optimizers.apply(plan(ROOT_RULE, 4), [muon, adam])
    assert [one.param_groups[0]["lr"] for one in (muon, adam)] == pytest.approx([0.04, 2e-3])
    assert adam.param_groups[0]["betas"] == pytest.approx((0.9, 0.999**4))
    assert {float(state["step"]) for state in adam.state.values()} == {5.0}


def spoilt_rate(several: list[torch.optim.Optimizer]) -> BatchPlan:
    several[-1].param_groups[0]["lr"] = 7.0
    return plan(ROOT_RULE, 0.25)


def unknown(several: list[torch.optim.Optimizer]) -> BatchPlan:
    several.append(torch.optim.RMSprop([nn.Parameter(torch.zeros(2))]))
    return plan(ROOT_RULE, 0.25)


def unknown_name(several: list[torch.optim.Optimizer]) -> BatchPlan:
    several[-1].param_groups[0]["adabatch_kind"] = "embedding"
    return plan({"adam": ROOT_RULE, "embeddings": GAIN_RULE}, 0.25)


def no_adam(several: list[torch.optim.Optimizer]) -> BatchPlan:
    several.append(torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(2))], "adabatch_kind": "adam"}], lr=0.1))
    return plan(ROOT_RULE, 0.25)


def too_much(several: list[torch.optim.Optimizer]) -> BatchPlan:
    rate = torch.tensor(1e4, dtype=torch.float16)
    several.append(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=rate))
    return plan(GAIN_RULE, 8)


def illegal_scales(several: list[torch.optim.Optimizer]) -> BatchPlan:
    return replace(plan({"muon": ROOT_RULE, "adam": ROOT_RULE}, 0.25), by_kind={"adam": Scales(lr=math.nan)})


def scheduled(several: list[torch.optim.Optimizer]) -> BatchPlan:
    several.append(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
    torch.optim.lr_scheduler.ConstantLR(several[-1])
    return plan(ROOT_RULE, 0.25)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoilt_rate, "group 0 is 7.0, but 0.001 was set last"),
        (unknown, "how RMSprop should follow the batch is not known"),
        (unknown_name, "adabatch_kind='embedding'; the plan's scales know adam, sgd, muon, embeddings"),
        (no_adam, "group 0 of SGD cannot be treated like Adam: it has no betas, eps"),
        (too_much, "lr of SGD's parameter group 0 would become 80000"),
        (illegal_scales, "scale lr=nan must be above 0 and finite"),
        (scheduled, "a torch learning-rate scheduler is attached to SGD"),
    ],
)
def test_when_one_refuses_none_is_changed(
    spoil: Callable[[list[torch.optim.Optimizer]], BatchPlan], message: str
) -> None:
    several = pair()
    switch = spoil(several)
    before = snapshot(several[:2])
    with pytest.raises(ValueError, match=message):
        optimizers.apply(switch, several)
    assert same(before, snapshot(several[:2]))


def test_a_parameter_group_may_have_a_rule_of_its_own() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "adabatch_kind": "embeddings"}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.99))
    optimizers.apply(plan({"adam": ROOT_RULE, "embeddings": Scaling("none", 8)}, 4), optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.1])
    assert [group["betas"][1] for group in optimizer.param_groups] == pytest.approx([0.99**4, 0.99])


class Combined(torch.optim.Optimizer):
    """Somebody's optimizer that steps some groups by momentum and others like Adam."""

    def __init__(self, groups: list[dict[str, object]]) -> None:
        super().__init__(groups, {"lr": 0.1, "weight_decay": 0.1})


def test_an_optimizer_may_hold_groups_of_several_kinds() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = Combined(
        [
            {"params": parameters[:1], "adabatch_kind": "muon", "momentum": 0.9},
            {"params": parameters[1:], "adabatch_kind": "adam", "betas": (0.9, 0.99), "eps": 1e-8},
        ]
    )
    optimizers.apply(plan({"muon": GAIN_RULE, "adam": ROOT_RULE}, 4), optimizer)
    one, other = optimizer.param_groups
    assert (one["lr"], one["momentum"], other["lr"], other["eps"]) == pytest.approx((0.4, 0.9, 0.2, 5e-9))
    assert other["betas"] == pytest.approx((0.9, 0.99**4))


def test_configured_values_of_several_optimizers_go_together() -> None:
    several = pair()
    configured = optimizers.bases(several)
    assert [one["adabatch_base_lr"] for one in configured] == [0.02, 1e-3]
    optimizers.rebase(several, [{**one, "adabatch_base_lr": 1.0} for one in configured])
    optimizers.apply(plan(ROOT_RULE, 4), several)
    assert [one.param_groups[0]["lr"] for one in several] == pytest.approx([2.0, 2.0])


# -- Adam in all its ways


def adam_states(kappa: float, **options: object) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    parameter = nn.Parameter(torch.zeros(400))
    optimizer = torch.optim.AdamW([parameter], **options)
    optimizers.apply(plan(ROOT_RULE, 1), optimizer)
    stepped(optimizer)
    before = copy.deepcopy(optimizer.state[parameter])
    optimizers.apply(plan(ROOT_RULE, kappa), optimizer)
    return before, optimizer.state[parameter], 20


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
@pytest.mark.parametrize("kappa", [0.125, 8])
def test_amsgrads_maximum_is_carried(kappa: float, implementation: str) -> None:
    """It never forgets: after growth the noise of the small batch would hold the steps down for ever."""
    before, after, steps = adam_states(kappa, amsgrad=True, **{implementation: True})
    correction1, correction2 = 1 - 0.9**steps, 1 - 0.999**steps
    share = sum((0.1 * 0.9**age / correction1) ** 2 for age in range(steps))
    v_hat = before["exp_avg_sq"] / correction2
    signal = ((before["exp_avg"] / correction1).square() - share * v_hat).clamp(min=0).div(1 - share).minimum(v_hat)
    for name in ("exp_avg_sq", "max_exp_avg_sq"):
        hat = before[name] / correction2
        expected = (signal + (hat - signal) / kappa) * correction2
        assert torch.allclose(after[name], expected, rtol=1e-4)
    assert (after["max_exp_avg_sq"] >= after["exp_avg_sq"]).all()
    assert (after["max_exp_avg_sq"].mean() < before["max_exp_avg_sq"].mean()) == (kappa > 1)


# -- SGD's momentum


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"nesterov": True}, {"dampening": 0.1}])
@pytest.mark.parametrize("kappa", [0.25, 8])
def test_what_past_gradients_still_have_to_move_stays(options: dict[str, object], kappa: float) -> None:
    """After a last gradient, the way that SGD goes on without any: lr x momentum / (1 - momentum) x buffer."""

    def moved(batch: float) -> torch.Tensor:
        parameter = nn.Parameter(torch.zeros(5))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, **options)
        optimizers.apply(plan(GAIN_RULE, 1), optimizer)
        stepped(optimizer)
        before = parameter.detach().clone()
        optimizers.apply(plan(GAIN_RULE, batch), optimizer)
        for _ in range(200):
            parameter.grad = torch.zeros(5)
            optimizer.step()
        return parameter.detach() - before

    assert moved(1).abs().min() > 0.01
    assert torch.allclose(moved(kappa), moved(1), rtol=1e-4, atol=1e-6)


def test_sgd_without_momentum_and_muon_have_nothing_to_carry() -> None:
    muon = torch.optim.Muon([nn.Parameter(torch.ones(4, 3))], lr=0.1, ns_steps=1)
    plain = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    optimizers.apply(plan(ROOT_RULE, 1), [muon, plain])
    held = copy.deepcopy(stepped(muon, 2).state_dict()["state"])
    stepped(plain, 2)
    optimizers.apply(plan(ROOT_RULE, 4), [muon, plain])
    assert same(held, muon.state_dict()["state"])


@pytest.mark.parametrize("kappa", [0.25, 4])
def test_maximising_is_minimising_the_negative_through_a_switch(kappa: float) -> None:
    def trained(maximize: bool, sign: float) -> tuple[torch.Tensor, torch.Tensor]:
        parameter = nn.Parameter(torch.zeros(30))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, maximize=maximize)
        generator = torch.Generator().manual_seed(3)
        along = torch.zeros(())
        for step in range(12):
            optimizers.apply(plan(ROOT_RULE, kappa if step >= 6 else 1), optimizer)
            parameter.grad = sign * (1 + torch.randn(30, generator=generator))
            if step:
                along = drift.product([optimizer], parameter.device)
            optimizer.step()
        return parameter.detach(), along

    minimised, along = trained(False, 1.0)
    maximised, along_too = trained(True, -1.0)
    assert torch.equal(minimised, maximised)
    assert along.item() == pytest.approx(along_too.item())
    assert along.item() > 0


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Muon])
def test_the_drift_of_a_maximised_momentum_has_the_right_sign(make: type[torch.optim.Optimizer]) -> None:
    parameter = nn.Parameter(torch.zeros(3, 3))
    options = {"maximize": True} if make is torch.optim.SGD else {"ns_steps": 1}
    optimizer = make([parameter], lr=0.1, momentum=0.9, **options)
    for _ in range(3):
        parameter.grad = torch.ones(3, 3)
        optimizer.step()
    assert drift.product([optimizer], parameter.device).item() > 0


def test_differentiable_optimizers_are_refused() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))], differentiable=True)
    with pytest.raises(ValueError, match="group 0 of Adam is differentiable=True.*use differentiable=False"):
        optimizers.prepare(optimizer)
    assert "adabatch_lr" not in optimizer.param_groups[0]


def test_single_precision_betas_stay_below_one() -> None:
    """0.9999 ** 1e-4 is 1 in single precision, and its bias correction would be 0."""
    parameter = nn.Parameter(torch.ones(4))
    betas = (torch.tensor(0.9), torch.tensor(0.9999))
    optimizer = torch.optim.AdamW([parameter], betas=betas)
    reference = 80_000
    for batch in (reference, 8):
        scales = Scaling("sqrt", reference, beta1=True).scales(batch, math.inf)
        optimizers.apply(BatchPlan(0, 0, batch, 1, batch, 1, scales=scales), optimizer)
        stepped(optimizer, 3)
        assert all(0 <= beta.item() < 1 for beta in betas)
        assert all(held is given for held, given in zip(optimizer.param_groups[0]["betas"], betas))
        assert torch.isfinite(parameter).all()


@pytest.mark.parametrize("kappa", [0.25, 4])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_captured_optimizer_is_switched_without_a_look_at_the_device(kappa: float, amsgrad: bool) -> None:
    """Tensors without data stand for those on a device: reading one fails. The same objects are filled."""
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(1e-3), amsgrad=amsgrad, capturable=True)
    optimizers.prepare(optimizer)
    group = optimizer.param_groups[0]
    group["lr"] = torch.tensor(1e-3, device="meta")
    group["adabatch_lr"] = math.nan
    names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
    optimizer.state[parameter] = {"step": torch.tensor(20.0, device="meta")} | {
        name: torch.zeros(3, device="meta") for name in names
    }
    held = {"lr": group["lr"], **optimizer.state[parameter]}
    for batch in (1, kappa, 1):
        optimizers.apply(plan(ROOT_RULE, batch), optimizer)
    assert all(now is held[name] for name, now in {"lr": group["lr"], **optimizer.state[parameter]}.items())
    assert group["adabatch_batch"] == 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captured optimizers step on GPUs only")
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_captured_optimizer_steps_like_a_plain_one(amsgrad: bool) -> None:
    def trained(device: str, **options: object) -> torch.Tensor:
        parameter = nn.Parameter(torch.zeros(40, device=device))
        rate = torch.tensor(1e-2, device=device) if options else 1e-2
        optimizer = torch.optim.AdamW([parameter], lr=rate, amsgrad=amsgrad, **options)
        generator = torch.Generator().manual_seed(0)
        for step in range(30):
            optimizers.apply(plan(ROOT_RULE, (1, 8, 0.5)[step // 10]), optimizer)
            parameter.grad = torch.randn(40, generator=generator).to(device)
            optimizer.step()
        return parameter.detach().cpu()

    assert torch.allclose(trained("cpu"), trained("cuda", capturable=True), rtol=1e-4, atol=1e-6)


# -- any rule, any switch

MAKES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adam amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4),
    "muon": lambda parameters: torch.optim.Muon(parameters, lr=1e-3, ns_steps=1),
}


@pytest.mark.parametrize("name", MAKES)
@settings(max_examples=25)
@given(
    rule=st.sampled_from(sorted(RULES)),
    beta1=st.booleans(),
    powers=st.lists(st.floats(-4, 4), min_size=1, max_size=5),
    noise_scales=st.lists(st.one_of(st.none(), st.just(math.inf), st.floats(0, 1e12)), min_size=5, max_size=5),
)
def test_no_switch_makes_an_illegal_value(
    name: str, rule: str, beta1: bool, powers: list[float], noise_scales: list[float | None]
) -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = MAKES[name]([parameter])
    scaling = Scaling(rule, 10**5, beta1=beta1)
    for power, noise_scale in zip([0.0, *powers], [None, *noise_scales]):
        batch = max(10, round(10**5 * 10**power))
        scales = scaling.scales(batch, noise_scale)
        optimizers.apply(BatchPlan(0, 0, batch, 1, batch, 1, scales=scales), optimizer)
        stepped(optimizer, 1 if name == "muon" else 2)  # of half-precision products, which are slow on CPUs
        group = optimizer.param_groups[0]
        assert all(0 < group[key] < math.inf for key in ("lr", "eps") if key in group)
        assert 0 <= group["weight_decay"] < math.inf
        assert all(0 <= beta < 1 for beta in group.get("betas", ()))
        for state in optimizer.state.values():
            assert all(torch.isfinite(value).all() for value in state.values())
            assert "step" not in state or state["step"] > 0
            assert "exp_avg_sq" not in state or (state["exp_avg_sq"] >= 0).all()
        assert torch.isfinite(parameter).all()


# -- which matrices are hidden


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(4, 6))
        self.embedding = nn.Embedding(9, 6)
        self.body = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.attention = nn.MultiheadAttention(6, 2)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 9, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


HIDDEN = ["body.0.weight", "body.1.weight", "attention.in_proj_weight", "attention.out_proj.weight"]


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_between_hidden_layers_are_found(tied: bool) -> None:
    assert optimizers.hidden_matrices(Net(tied)) == HIDDEN


def test_frozen_matrices_are_none() -> None:
    model = Net()
    model.body.requires_grad_(False)
    assert optimizers.hidden_matrices(model) == HIDDEN[2:]


def test_a_recipe_may_name_the_matrices_itself() -> None:
    assert optimizers.hidden_matrices(Net(), ["body.*", "positions"]) == ["positions", *HIDDEN[:2]]
    with pytest.raises(ValueError, match="'blocks.*' matches no trainable matrix; there are positions, embedding.weight"):
        optimizers.hidden_matrices(Net(), ["body.*", "blocks.*"])
