"""The Hessian-weighted noise scale against closed forms and against explicit Hessians."""

from __future__ import annotations

import importlib.util
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adabatch.gradients.curvature import CurvatureEstimate, hessian_noise_scale, mean_ratio

ROOT = Path(__file__).parents[2]
MicroBatches = list[tuple[Any, int]]


class Point(nn.Module):
    """Weights alone, in double precision; losses are functions of them."""

    def __init__(self, weights: Sequence[float] | Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.as_tensor(weights, dtype=torch.float64))


def split(samples: Tensor, size: int) -> MicroBatches:
    return [(piece, len(piece)) for piece in samples.split(size)]


def standard_errors(estimates: Sequence[float], truth: float) -> float:
    """How far the mean of independent estimates is from the truth, in its standard errors."""
    values = torch.tensor(estimates, dtype=torch.float64)
    return abs(values.mean().item() - truth) / (values.std().item() / math.sqrt(len(values)))


# -- closed forms

CURVATURE = torch.linspace(0.7, 1.6, 40, dtype=torch.float64)
SPREAD = torch.linspace(3.0, 1.0, 40, dtype=torch.float64)
OFFSET = torch.linspace(0.0, 2.0, 40, dtype=torch.float64)


def quadratic(model: nn.Module, points: Tensor) -> tuple[Tensor, None]:
    """Mean of (w - x)' A (w - x) / 2, whose gradient is A (w - x) and whose Hessian is A."""
    return 0.5 * (CURVATURE * (model.weights - points).square()).sum(1).mean(), None


def cloud(samples: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return SPREAD * torch.randn(samples, 40, generator=generator, dtype=torch.float64)


def test_a_quadratic_has_its_closed_form() -> None:
    signal = (CURVATURE**3 * OFFSET**2).sum().item()
    noise = (CURVATURE**3 * SPREAD**2).sum().item()
    found = [hessian_noise_scale(Point(OFFSET), quadratic, split(cloud(12 * 3 * 4, seed), 4)) for seed in range(40)]
    assert standard_errors([one.signal for one in found], signal) < 3
    assert standard_errors([one.noise for one in found], noise) < 3
    large = hessian_noise_scale(Point(OFFSET), quadratic, split(cloud(200 * 3 * 100, 999), 100))
    assert (large.state, large.sets, large.samples, large.curvature_samples) == ("resolved", 200, 40_000, 20_000)
    assert large.scale == pytest.approx(noise / signal, rel=0.05)
    assert large.low < noise / signal < large.high
    assert large.high / large.low < 1.12
    simple = (CURVATURE**2 * SPREAD**2).sum().item() / (CURVATURE**2 * OFFSET**2).sum().item()
    assert large.simple == pytest.approx(simple, rel=0.05)
    assert abs(simple / (noise / signal) - 1) > 0.15, "the two scales must differ for this to tell them apart"


def regression(model: nn.Module, batch: Tensor) -> tuple[Tensor, None]:
    return 0.5 * (batch[:, :-1] @ model.weights - batch[:, -1]).square().mean(), None


def regression_samples(samples: int, seed: int, variances: Tensor, target: float) -> Tensor:
    """Inputs and targets of pure noise: the best weights are 0."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(samples, len(variances) + 1, generator=generator, dtype=torch.float64)
    return draws * torch.cat([variances.sqrt(), torch.tensor([target**0.5], dtype=torch.float64)])


def test_linear_regression_has_its_closed_form_though_samples_have_hessians_of_their_own() -> None:
    """Of two samples each: a Hessian from a gradient's own samples would read several times too much."""
    variances = torch.tensor([2.0, 1.0, 0.5, 0.5], dtype=torch.float64)
    offset = torch.tensor([0.5, 0.5, -1.0, 1.0], dtype=torch.float64)
    target = 0.7
    spread = (variances * offset**2).sum().item() + target
    signal = (variances**3 * offset**2).sum().item()
    noise = spread * (variances**2).sum().item() + signal
    rows = [
        hessian_noise_scale(Point(offset), regression, split(regression_samples(180, seed, variances, target), 2))
        for seed in range(40)
    ]
    assert standard_errors([one.signal for one in rows], signal) < 3
    assert standard_errors([one.noise for one in rows], noise) < 3
    shared_samples = 4 * noise
    assert standard_errors([one.noise for one in rows], shared_samples) > 10


# -- a transformer against its explicit Hessian


def lm() -> Any:
    spec = importlib.util.spec_from_file_location("lm_model_of_curvature", ROOT / "recipes" / "lm" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ATTENTION = ("blocks.0.attention_out.weight", "blocks.0.attention_norm.weight", "blocks.0.mlp_out.bias", "norm.bias")
LAST = ("head.weight", "norm.bias")


def small_gpt(trained: Sequence[str] = ATTENTION) -> nn.Module:
    """A GPT of which about a hundred parameters are trainable, with weights large enough to matter."""
    torch.manual_seed(3)
    model = lm().GPT(vocabulary=11, sequence_length=6, width=8, depth=1, heads=2).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
        parameter.data.mul_(2.0)
    return model


def sequences(samples: int, seed: int = 0) -> Tensor:
    return torch.randint(11, (samples, 7), generator=torch.Generator().manual_seed(seed))


class Explicit:
    """Gradient and Hessian of a model's loss as a vector and a matrix, by functional transforms."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], tuple[Tensor, Any]]) -> None:
        self.model, self.loss = model, loss
        self.named = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.flat = torch.cat([value.detach().flatten() for value in self.named.values()])

    def value(self, flat: Tensor, data: Any) -> Tensor:
        sizes = [value.numel() for value in self.named.values()]
        parts = [part.view(value.shape) for part, value in zip(flat.split(sizes), self.named.values(), strict=True)]
        values = dict(zip(self.named, parts, strict=True))

        class Bound(nn.Module):
            def forward(_, *inputs: Tensor) -> Tensor:
                return torch.func.functional_call(self.model, values, inputs)

        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return self.loss(Bound(), data)[0]

    def gradient(self, data: Any) -> Tensor:
        return torch.autograd.functional.jacobian(lambda flat: self.value(flat, data), self.flat)

    def hessian(self, data: Any) -> Tensor:
        return torch.autograd.functional.hessian(lambda flat: self.value(flat, data), self.flat)


def test_a_gpt_agrees_with_its_explicit_hessian_set_by_set() -> None:
    model, loss = small_gpt(), lm().loss
    explicit = Explicit(model, loss)
    pieces = split(sequences(60), 5)
    found = hessian_noise_scale(model, loss, pieces, per_group=2, per_hessian=2)
    assert (found.sets, found.samples, found.curvature_samples) == (2, 40, 20)
    signals, noises = [], []
    for begin in range(0, 12, 6):
        data = [piece for piece, _ in pieces[begin : begin + 6]]
        first, second = (explicit.gradient(torch.cat(half)) for half in (data[:2], data[2:4]))
        hessian = explicit.hessian(torch.cat(data[4:]))
        mean, cross = (first + second) / 2, first @ hessian @ second
        signals.append(cross)
        noises.append(20 * (mean @ hessian @ mean - cross))
    assert found.signal == pytest.approx(sum(signals).item() / 2, rel=1e-9)
    assert found.noise == pytest.approx(sum(noises).item() / 2, rel=1e-9)


def test_a_gpt_has_the_scale_of_its_data_set() -> None:
    """Of the last layer, whose Hessian is positive semi-definite but for the norm's share."""
    model, loss = small_gpt(LAST), lm().loss
    explicit, population = Explicit(model, loss), sequences(24, seed=8)
    gradients = torch.stack([explicit.gradient(one[None]) for one in population])
    mean, hessian = gradients.mean(0), explicit.hessian(population)
    signal = (mean @ hessian @ mean).item()
    noise = ((gradients - mean) @ hessian * (gradients - mean)).sum(1).mean().item()
    chosen = torch.randint(24, (2400,), generator=torch.Generator().manual_seed(5))
    found = hessian_noise_scale(model, loss, split(population[chosen], 16), per_group=2)
    assert found.state == "resolved"
    assert found.low < noise / signal < found.high
    assert found.scale == pytest.approx(noise / signal, rel=0.15)


def masked(samples: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(samples, 6, generator=generator) < 0.5
    mask[0] = True
    return {"tokens": sequences(samples, seed), "mask": mask}


def test_token_weights_and_unequal_groups_follow_the_window_formula() -> None:
    """V = m'Hm - G'HG for the token-weighted mean m, and the noise of a sample is V times the samples."""
    model, loss = small_gpt(), lm().loss
    explicit = Explicit(model, loss)
    sizes = [3, 5, 4, 2, 7, 4]
    data = [masked(size, seed) for seed, size in enumerate(sizes)]
    found = hessian_noise_scale(model, loss, list(zip(data, sizes, strict=True)))
    signal = noise = 0.0
    for begin in (0, 3):
        first, second = (explicit.gradient(one) for one in data[begin : begin + 2])
        hessian = explicit.hessian(data[begin + 2])
        weights = [one["mask"].sum().double() for one in data[begin : begin + 2]]
        mean = (weights[0] * first + weights[1] * second) / sum(weights)
        cross = first @ hessian @ second
        signal += cross.item() / 2
        noise += (sizes[begin] + sizes[begin + 1]) * (mean @ hessian @ mean - cross).item() / 2
    assert found.signal == pytest.approx(signal, rel=1e-9)
    assert found.noise == pytest.approx(noise, rel=1e-9)


def test_a_filler_of_weight_0_counts_for_nothing() -> None:
    def loss(model: nn.Module, points: Tensor) -> tuple[Tensor, float]:
        return quadratic(model, points)[0], float(len(points))

    pieces = split(cloud(24, 0), 4)
    filled = [*pieces[:1], (cloud(0, 0), 0), *pieces[1:2], (cloud(0, 0), 0), *pieces[2:3], (cloud(0, 0), 0)]
    filled += [*pieces[3:4], (cloud(0, 0), 0), *pieces[4:5], (cloud(0, 0), 0), *pieces[5:6], (cloud(0, 0), 0)]
    plain = hessian_noise_scale(Point(OFFSET), loss, pieces)
    assert hessian_noise_scale(Point(OFFSET), loss, filled, per_group=2, per_hessian=2) == plain


# -- states


def test_a_linear_loss_is_undefined() -> None:
    def loss(model: nn.Module, points: Tensor) -> tuple[Tensor, None]:
        return (points @ model.weights).mean(), None

    found = hessian_noise_scale(Point(OFFSET), loss, split(cloud(120, 0), 4))
    assert (found.state, found.signal, found.noise) == ("undefined", 0.0, 0.0)
    assert "linear" in found.reason
    assert math.isnan(found.scale) and math.isnan(found.low) and math.isnan(found.high)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["scale"] is None


def test_a_loss_that_curves_downwards_is_undefined() -> None:
    def loss(model: nn.Module, points: Tensor) -> tuple[Tensor, None]:
        return -quadratic(model, points)[0], None

    found = hessian_noise_scale(Point(10 * OFFSET), loss, split(cloud(240, 0), 4))
    assert (found.state, math.isnan(found.scale)) == ("undefined", True)
    assert "downwards" in found.reason
    assert found.signal < 0


def test_noise_that_lowers_the_loss_is_undefined() -> None:
    """Curved upwards along the gradient, and downwards where the noise is."""
    signs = torch.cat([torch.ones(1), -torch.ones(39)]).double()

    def loss(model: nn.Module, points: Tensor) -> tuple[Tensor, None]:
        return 0.5 * (signs * (model.weights - points).square()).sum(1).mean(), None

    found = hessian_noise_scale(Point(20 * (signs > 0)), loss, split(cloud(240, 0), 4))
    assert (found.state, math.isnan(found.scale)) == ("undefined", True)
    assert "gradient noise" in found.reason
    assert found.signal > 0 > found.noise


def test_without_a_gradient_the_scale_is_unresolved_and_bounded_from_below() -> None:
    found = hessian_noise_scale(Point(torch.zeros(40)), quadratic, split(cloud(2400, 1), 4))
    assert (found.state, found.high) == ("unresolved", math.inf)
    assert "distinguishable" in found.reason
    assert found.low > 10


def test_few_sets_close_no_interval_and_a_single_one_is_refused() -> None:
    found = hessian_noise_scale(Point(10 * OFFSET), quadratic, split(cloud(7 * 3 * 50, 0), 50))
    assert (found.state, found.sets, found.high) == ("unresolved", 7, math.inf)
    assert "8 sets" in found.reason
    with pytest.raises(ValueError, match="1 whole sets of 3 micro-batches .* 2 are the least"):
        hessian_noise_scale(Point(OFFSET), quadratic, split(cloud(20, 0), 4))


def test_what_remains_after_the_last_whole_set_is_not_used() -> None:
    pieces = split(cloud(160, 0), 4)
    assert hessian_noise_scale(Point(OFFSET), quadratic, pieces[:39]) == hessian_noise_scale(
        Point(OFFSET), quadratic, iter(pieces)
    )


def test_fieller_intervals_cover_the_ratio_of_means() -> None:
    """Correlated normal rows, 16 sets, signal 3 standard errors above 0."""
    generator, covered, bounded = random.Random(4), 0, 0
    for _ in range(2000):
        rows = []
        for _ in range(16):
            shared = generator.gauss(0, 1)
            rows.append((1 + 1.3 * shared, 5 + 0.8 * shared + generator.gauss(0, 1)))
        *_, low, high = mean_ratio(rows, 0.95)
        covered += low <= 5 <= high
        bounded += high < math.inf
    assert 0.93 < covered / 2000 < 0.97
    assert 0.5 < bounded / 2000 < 1


@pytest.mark.parametrize("size", [1e-140, 1e140])
def test_tiny_and_huge_values_scale_out(size: float) -> None:
    generator = random.Random(1)
    rows = [(1 + generator.gauss(0, 0.5), 5 + generator.gauss(0, 1)) for _ in range(16)]
    plain, scaled = mean_ratio(rows, 0.9), mean_ratio([(size * one, size * other) for one, other in rows], 0.9)
    assert scaled[2:] == pytest.approx(plain[2:], rel=1e-9)
    assert scaled[0] / size == pytest.approx(plain[0], rel=1e-9)


# -- the model is left alone, and what cannot be measured is refused


class Noisy(nn.Module):
    """Dropout, a batch norm, and one layer that is held in training mode on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1))
        self.inner[0].eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)


def square(model: nn.Module, inputs: Tensor) -> tuple[Tensor, None]:
    return (model(inputs) - 1).square().mean(), None


def inputs_of(samples: int) -> Tensor:
    return torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))


def test_it_runs_in_evaluation_mode_and_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = Noisy()
    square(model, inputs_of(8))[0].backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        found = hessian_noise_scale(model, square, split(inputs_of(96), 4))
    assert found == hessian_noise_scale(model, square, split(inputs_of(96), 4)), "dropout was on"
    assert found == hessian_noise_scale(model.eval(), square, split(inputs_of(96), 4))
    assert modes == [True, True, False, True, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(parameter.grad, old) for parameter, old in zip(model.parameters(), gradients, strict=True))


def test_modes_come_back_after_an_error_too() -> None:
    def loss(model: nn.Module, inputs: Tensor) -> tuple[Tensor, None]:
        raise RuntimeError("out of memory")

    model = Noisy()
    with pytest.raises(RuntimeError, match="out of memory"):
        hessian_noise_scale(model, loss, split(inputs_of(96), 4))
    assert [module.training for module in model.modules()] == [True, True, False, True, True, True, True]


def test_unused_frozen_and_half_precision_parameters() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1), "frozen": nn.Linear(3, 1)})
    model["frozen"].requires_grad_(False)

    def loss(model: nn.Module, inputs: Tensor) -> tuple[Tensor, None]:
        inputs = inputs.to(model["used"].weight.dtype)
        return (model["used"](inputs) + model["frozen"](inputs) - 1).float().square().mean(), None

    full = hessian_noise_scale(model, loss, split(inputs_of(960), 10))
    half = hessian_noise_scale(model.bfloat16(), loss, split(inputs_of(960), 10))
    assert full.state == half.state == "resolved"
    assert half.scale == pytest.approx(full.scale, rel=0.1)


class Once(torch.autograd.Function):
    """A square whose backward may not be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def test_what_cannot_be_differentiated_twice_is_refused_by_name() -> None:
    def loss(model: nn.Module, points: Tensor) -> tuple[Tensor, None]:
        return Once.apply(model.weights - points).square().mean(), None

    pieces = split(cloud(120, 0), 4)
    with pytest.raises(ValueError, match="uses Once, and PyTorch cannot tell .* custom_functions=True"):
        hessian_noise_scale(Point(OFFSET), loss, pieces)
    with pytest.raises(ValueError, match="backward is marked once_differentiable"):
        hessian_noise_scale(Point(OFFSET), loss, pieces, custom_functions=True)


class Again(torch.autograd.Function):
    """A square whose backward has a derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def test_custom_functions_with_a_derivative_are_taken_on_request() -> None:
    def loss(model: nn.Module, points: Tensor) -> tuple[Tensor, None]:
        return 0.5 * (CURVATURE * Again.apply(model.weights - points)).sum(1).mean(), None

    found = hessian_noise_scale(Point(OFFSET), loss, split(cloud(120, 0), 4), custom_functions=True)
    assert found.scale == pytest.approx(hessian_noise_scale(Point(OFFSET), quadratic, split(cloud(120, 0), 4)).scale)


def test_fused_attention_is_only_refused_where_it_is_forced() -> None:
    """Inside, attention runs on the math kernel; the fused one for the CPU has no second derivative."""
    model, loss = small_gpt(), lm().loss
    assert math.isfinite(hessian_noise_scale(model, loss, split(sequences(30), 5)).signal)

    def forced(model: nn.Module, tokens: Tensor) -> tuple[Tensor, None]:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return loss(model, tokens)

    with pytest.raises(ValueError, match="GPT or its loss cannot be differentiated twice: .*flash_attention"):
        hessian_noise_scale(model, forced, split(sequences(30), 5))


def test_a_compiled_model_is_measured_uncompiled() -> None:
    model = nn.Linear(3, 1)
    assert hessian_noise_scale(
        torch.compile(model, backend="eager"), square, split(inputs_of(96), 4)
    ) == hessian_noise_scale(model, square, split(inputs_of(96), 4))


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_wrapped_models_are_refused(process_group: None) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    with pytest.raises(ValueError, match="DistributedDataParallel is distributed.* hand over the module inside"):
        hessian_noise_scale(model, square, split(inputs_of(96), 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_group": 0}, "per_group must be at least 1 micro-batch, got 0"),
        ({"per_hessian": -1}, "per_hessian must be at least 1 micro-batch, got -1"),
        ({"confidence": 1.0}, "confidence must lie between 0 and 1, got 1.0"),
    ],
)
def test_arguments_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hessian_noise_scale(Point(OFFSET), quadratic, split(cloud(120, 0), 4), **changes)


def test_values_that_are_not_finite_and_constant_losses_are_refused() -> None:
    bad = cloud(120, 0)
    bad[50, 2] = math.nan
    with pytest.raises(ValueError, match="8 \\+ 4 samples is not finite"):
        hessian_noise_scale(Point(OFFSET), quadratic, split(bad, 4))
    with pytest.raises(ValueError, match="does not depend on the trainable parameters"):
        hessian_noise_scale(Point(OFFSET), lambda model, points: (points.mean(), None), split(cloud(120, 0), 4))
    with pytest.raises(ValueError, match="weight 0.0; leave out empty ones, or raise per_group"):
        hessian_noise_scale(
            Point(OFFSET), lambda model, points: (quadratic(model, points)[0], 0.0), split(cloud(120, 0), 4)
        )
    with pytest.raises(ValueError, match="'weights' is complex"):
        model = Point(OFFSET)
        model.weights = nn.Parameter(torch.ones(5, dtype=torch.complex128))
        hessian_noise_scale(model, quadratic, split(cloud(120, 0), 4))


def test_the_estimate_is_plain_data() -> None:
    found = hessian_noise_scale(Point(torch.zeros(40)), quadratic, split(cloud(240, 1), 4))
    assert isinstance(found, CurvatureEstimate)
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["high"] is None
    assert values["sets"] == 20
