"""What spoils a measurement is refused by name: losses that are no means, and batch statistics that ranks share."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from adabatch import gradients
from adabatch.gradients import contaminants
from adabatch.gradients.layout import survey
from adabatch.plan import BatchLimits, split


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))


def samples(count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 4, (count,), generator=generator)


def halves(data):
    inputs, targets = data
    middle = len(inputs) // 2
    return (inputs[:middle], targets[:middle]), (inputs[middle:], targets[middle:])


def mean(model: nn.Module, data):
    return cross_entropy(model(data[0]), data[1]), None


def tokens(model: nn.Module, data):
    """A mean over the targets that are not 0, weighted by their number."""
    counted = data[1] > 0
    return cross_entropy(model(data[0])[counted], data[1][counted]), counted.sum()


def forgotten_tokens(model: nn.Module, data):
    return tokens(model, data)[0], None


def contrastive(model: nn.Module, data):
    outputs = nn.functional.normalize(model(data[0]), dim=1)
    return cross_entropy(outputs @ outputs.T / 0.1, torch.arange(len(outputs))), None


@pytest.mark.parametrize("loss", [mean, tokens])
def test_means_pass_and_leave_no_trace(loss) -> None:
    model = classifier()
    before = [parameter.grad for parameter in model.parameters()]
    state = torch.get_rng_state()
    assert contaminants.require_mean(model, loss, halves(samples()), samples()) < 1e-5
    assert [parameter.grad for parameter in model.parameters()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


@pytest.mark.parametrize("loss", [contrastive, forgotten_tokens])
def test_what_is_no_mean_over_samples_is_refused(loss) -> None:
    inputs, targets = samples()
    targets[:4] = torch.tensor([0, 0, 0, 1])  # unequal counts in the two halves
    with pytest.raises(ValueError, match="not the mean of its halves' gradients: they differ by .*%"):
        contaminants.require_mean(classifier(), loss, halves((inputs, targets)), (inputs, targets))


def test_batch_normalisation_is_found_by_name() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GroupNorm(2, 8))
    assert contaminants.batch_normalised(model) == ["1"]
    assert contaminants.batch_normalised(model.eval()) == []


def test_one_rank_shares_nothing() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.SyncBatchNorm(8), nn.Dropout(0.5))
    contaminants.refuse_shared_statistics(model, survey(model))
    contaminants.require_own_dropout(model, survey(model))


class LowRank(nn.Module):
    """A frozen layer with an adapter whose second factor starts at 0, so that the first one has no gradient at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(6, 4).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 6))
        self.up = nn.Parameter(torch.zeros(4, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.frozen(inputs) + inputs @ self.down.T @ self.up.T


def measured(model: nn.Module, called: nn.Module, steps: int) -> list[tuple[float, float, float, float]]:
    """|g_bar|^2 and sum p_k^2 |g_k|^2 of windows of two groups, each beside what separate backward passes say."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = split(step=0, first_sample=0, global_batch=8, limits=BatchLimits(1, 4), measure=True)
    found = []
    with gradients.attach(called, optimizer) as tap:
        for _ in range(steps):
            apart = []
            for half in halves(samples()):
                model.zero_grad(set_to_none=True)
                mean(model, half)[0].backward()
                apart.append(torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]))
            model.zero_grad(set_to_none=True)
            with gradients.accumulate(tap, plan) as window:
                for half in halves(samples()):
                    with window.micro_batch():
                        window.backward(mean(called, half)[0], samples=4)
            read = window.finish(optimizer).measurement.read()
            whole = sum(apart) / 2
            groups = sum(one.square().sum() for one in apart) / 4
            found.append((read.mean_square, whole.square().sum().item(), read.group_square, groups.item()))
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_factors_that_start_at_zero_are_measured_from_the_first_step() -> None:
    model = LowRank()
    for mean_square, mean_truth, group_square, group_truth in measured(model, model, 3):
        assert mean_square == pytest.approx(mean_truth, rel=1e-6)
        assert group_square == pytest.approx(group_truth, rel=1e-6)


def test_a_compiled_model_is_measured_the_same() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    torch.compiler.reset()
    try:
        for mean_square, mean_truth, group_square, group_truth in measured(model, torch.compile(model, backend="aot_eager"), 2):
            assert mean_square == pytest.approx(mean_truth, rel=1e-5)
            assert group_square == pytest.approx(group_truth, rel=1e-5)
    finally:
        torch.compiler.reset()


def test_whole_micro_batches_keep_batch_normalisation_as_it_was_trained() -> None:
    """With every micro-batch full, a window of two is the mean of two windows of one, whatever else is in the window."""
    limits = BatchLimits(1, 4, rounding="whole")
    sizes = {limits.realise(wanted) for wanted in range(1, 60)}
    assert all(set(split(step=0, first_sample=0, global_batch=size, limits=limits, measure=True).pieces(0)) == {4} for size in sizes)
