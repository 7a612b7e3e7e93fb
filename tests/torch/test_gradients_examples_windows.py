"""Groups of one example beside the window's own groups, through ``attach(examples=True)``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adabatch import gradients
from adabatch.noise import NORM_LAYERS, Measurement
from adabatch.plan import BatchLimits, split

SIZES = [3, 2]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3), nn.RMSNorm(3)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    counts = torch.tensor([4.0, 1.0, 7.0, 2.0, 6.0], dtype=torch.float64)
    return torch.randn(5, 5, generator=generator, dtype=torch.float64), counts


def losses(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().sum(1)


def reference(model: nn.Module, shares: torch.Tensor) -> tuple[float, float]:
    """|g_bar|^2 and sum p_i^2 |g_i|^2 in the normalisation layers, one backward pass for each example."""
    layers = [parameter for module in (model[1], model[4]) for parameter in module.parameters()]
    inputs, _ = data()
    apart = []
    for example, share in zip(inputs, shares):
        loss = losses(model, example[None]).sum() * share
        apart.append(torch.cat([one.flatten() for one in torch.autograd.grad(loss, layers)]))
    return sum(apart).square().sum().item(), sum(one.square().sum() for one in apart).item()


def window(model: nn.Module, tap: gradients.Tap, tokens: bool, sizes: list[int]) -> Measurement:
    inputs, counts = data()
    limits = BatchLimits(1, max(sizes))
    plan = split(step=0, first_sample=0, global_batch=sum(sizes), limits=limits, measure=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tap.measure(True)
    with gradients.accumulate(tap, _measuring(plan, len(sizes))) as opened:
        start = 0
        for size in sizes:
            mine, counted = inputs[start : start + size], counts[start : start + size]
            start += size
            with opened.micro_batch():
                if tokens:
                    mean = (losses(model, mine) * counted).sum() / counted.sum()
                    opened.backward(mean, samples=size, weight=counted.sum(), sample_weights=counted)
                else:
                    opened.backward(losses(model, mine).mean(), samples=size)
    return opened.finish(optimizer, max_norm=0.1).measurement.read()


def _measuring(plan, micro_batches):
    import dataclasses

    return dataclasses.replace(plan, measure=True, micro_batches=micro_batches)


@pytest.mark.parametrize("tokens", [False, True])
def test_single_examples_are_measured_beside_micro_batches(tokens: bool) -> None:
    model = network()
    _, counts = data()
    shares = counts / counts.sum() if tokens else torch.full((5,), 0.2, dtype=torch.float64)
    with gradients.attach(model, examples=True) as tap:
        found = window(model, tap, tokens, SIZES)
    mean_square, group_square = reference(model, shares)
    alone = found.examples
    assert alone is not None
    assert (alone.groups, alone.samples, found.groups) == (5, 5, 2)
    assert alone.weight_square == pytest.approx(shares.square().sum().item(), rel=1e-12)
    assert alone.mean_square == pytest.approx(mean_square, rel=1e-9)
    assert alone.group_square == pytest.approx(group_square, rel=1e-9)
    assert found.views[NORM_LAYERS][0] == pytest.approx(mean_square, rel=1e-9)


def test_one_micro_batch_on_one_rank_has_examples_to_compare() -> None:
    model = network()
    with gradients.attach(model, examples=True) as tap:
        found = window(model, tap, False, [5])
    assert not found.measurable
    assert found.examples is not None and found.examples.measurable


def test_options_go_on_to_the_source_and_nothing_is_seen_without() -> None:
    model = network()
    with gradients.attach(model) as tap:
        assert window(model, tap, False, SIZES).examples is None
    with pytest.raises(ValueError, match="nowhere"):
        gradients.attach(model, examples={"rows": {"nowhere": 2}})


def test_unmeasured_windows_have_none() -> None:
    model = network()
    with gradients.attach(model, examples=True) as tap:
        inputs, _ = data()
        plan = split(step=0, first_sample=0, global_batch=5, limits=BatchLimits(1, 3), measure=False)
        with gradients.accumulate(tap, plan) as opened:
            for mine in (inputs[:3], inputs[3:]):
                with opened.micro_batch():
                    opened.backward(losses(model, mine).mean(), samples=len(mine))
        found = opened.finish(torch.optim.SGD(model.parameters(), lr=0.1)).measurement.read()
    assert found.examples is None and not found.measurable
