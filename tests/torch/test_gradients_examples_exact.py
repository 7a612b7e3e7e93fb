"""The exact lengths of every example's gradient, against a backward pass for each example."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import example_cases as cases
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adabatch.gradients import outer
from adabatch.gradients.outer import Outer
from adabatch.gradients.per_example import per_example_norms


def truth(model: nn.Module, inputs: Tensor, loss: Callable[..., Tensor], left_out: Sequence[str] = ()) -> Tensor:
    """|g_i / n|^2 of every example, in double precision."""
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad} - set(left_out)
    return (cases.gradients_of(model, inputs, names, loss) / len(inputs)).square().sum(1)


def off(found: Tensor, expected: Tensor) -> float:
    """Largest relative difference."""
    assert found.shape == expected.shape and found.dtype == torch.float64
    return ((found - expected).abs() / expected).max().item()


def seen(model: nn.Module, inputs: Tensor, loss: Callable[..., Tensor] = cases.mean_loss, **options: object) -> Tensor:
    model.zero_grad()
    with per_example_norms(model, **options) as norms:
        loss(model, inputs).backward()
    return norms.squares


class Chain(nn.Sequential):
    """Layers whose output is flattened, so that any shape has a loss."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).flatten(1)


CONVOLUTIONS = {
    "padded": lambda: nn.Conv2d(6, 8, 3, padding=1),
    "strided groups": lambda: nn.Conv2d(6, 8, 3, groups=2, stride=2, padding=(1, 0)),
    "dilated, same size, reflected": lambda: nn.Conv2d(
        6, 6, (3, 2), dilation=2, padding="same", padding_mode="reflect"
    ),
    "depthwise without bias": lambda: nn.Conv2d(6, 12, 3, groups=6, bias=False, padding="valid"),
    "rectangular": lambda: nn.Conv2d(6, 5, (1, 5), stride=(1, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_images(name: str) -> None:
    torch.manual_seed(0)
    model = Chain(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(inplace=True), CONVOLUTIONS[name](), nn.Tanh())
    inputs = cases.batch(5, (3, 11, 12))
    assert off(seen(model, inputs), truth(model, inputs, cases.mean_loss)) < 1e-6


@pytest.mark.parametrize("options", [{"padding": 2}, {"groups": 3, "stride": 2, "dilation": 2}, {"padding": "same"}])
def test_convolutions_of_sequences(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = Chain(nn.Conv1d(2, 6, 3), nn.Tanh(), nn.Conv1d(6, 9, 5, **options), nn.Tanh())
    inputs = cases.batch(5, (2, 20))
    assert off(seen(model, inputs), truth(model, inputs, cases.mean_loss)) < 1e-6


@pytest.mark.parametrize("shape", [(6,), (40, 6), (2, 3, 6)])
def test_linear_and_normalisation_layers(shape: tuple[int, ...]) -> None:
    """40 positions are added up, fewer are taken pair by pair."""
    torch.manual_seed(0)
    layers = (
        nn.Linear(6, 7),
        nn.LayerNorm(7),
        nn.Tanh(),
        nn.Linear(7, 5, bias=False),
        nn.RMSNorm(5, eps=1e-6),
        nn.Linear(5, 4),
    )
    model, inputs = Chain(*layers), cases.batch(5, shape)
    model[3].weight.requires_grad_(False)
    assert off(seen(model, inputs), truth(model, inputs, cases.mean_loss)) < 1e-6


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("length", [6, 48])
def test_the_language_model(tied: bool, length: int) -> None:
    """With tied embeddings a weight is looked up in and multiplied with: its examples' gradients have cross terms."""
    lm = cases.language_model()
    torch.manual_seed(0)
    model = lm.build("0.1M", sequence_length=length, tied=tied)
    tokens = torch.randint(0, 256, (4, length + 1))
    with pytest.raises(ValueError, match="not known for position_embedding; covered are .* partial=True"):
        seen(model, tokens, cases.token_loss)
    with per_example_norms(model, partial=True) as norms:
        cases.token_loss(model, tokens).backward()
    assert norms.uncovered == ("position_embedding",)
    assert off(norms.squares, truth(model, tokens, cases.token_loss, norms.uncovered)) < 1e-6
    assert ("head" in norms.modules) != tied
    assert torch.stack(list(norms.modules.values())).sum(0) == pytest.approx(norms.squares)
    names = {"blocks.1.mlp_in.weight", "blocks.1.mlp_in.bias"}
    one_layer = (cases.gradients_of(model, tokens, names, cases.token_loss) / 4).square().sum(1)
    assert off(norms.modules["blocks.1.mlp_in"], one_layer) < 1e-6


class Repeated(nn.Module):
    """(samples, length) words -> (samples, length, 5): padding, an embedding used twice, a layer that runs twice."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5, padding_idx=0)
        self.again, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)
        self.checkpointed = checkpointed

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words) + self.words((words * 3) % 7).cos()
        for _ in range(2):
            hidden = checkpoint(self.step, hidden, use_reentrant=False) if self.checkpointed else self.step(hidden)
        return hidden

    def step(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.again(self.norm(hidden)))


@pytest.mark.parametrize("length", [3, 30])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_modules_that_run_several_times(length: int, checkpointed: bool) -> None:
    torch.manual_seed(0)
    model, words = Repeated(checkpointed), torch.randint(0, 7, (6, length))
    expected = truth(model, words, cases.mean_loss)
    assert off(seen(model, words), expected) < 1e-6


def test_the_smallest_number_that_a_layer_adds_is_that_of_its_own_precision() -> None:
    """RMSNorm without eps takes the one of its input's precision."""
    torch.manual_seed(0)
    model, inputs = Chain(nn.Linear(6, 6), nn.RMSNorm(6)), 1e-4 * cases.batch(3)
    model[0].bias.data.zero_()
    explicit = Chain(model[0], nn.RMSNorm(6, eps=torch.finfo(torch.float32).eps))
    assert off(seen(model, inputs), truth(explicit, inputs, cases.mean_loss)) < 1e-6


def test_images() -> None:
    model, inputs = cases.images(), cases.batch(5, (3, 8, 8))
    assert off(seen(model, inputs), truth(model, inputs, cases.mean_loss)) < 1e-6


def test_weights_of_the_examples_are_in_the_squares() -> None:
    model, inputs = cases.images(), cases.batch(3, (3, 8, 8))
    weights = torch.tensor([1.0, 5.0, 2.0])
    gradients = cases.gradients_of(model, inputs, set(dict(model.named_parameters())))
    expected = (gradients * (weights / 8).double()[:, None]).square().sum(1)
    assert off(seen(model, inputs, lambda net, batch: cases.mean_loss(net, batch, weights)), expected) < 1e-6


def test_gradients_are_the_same_to_the_last_bit_and_no_hook_stays() -> None:
    plain, watched, inputs = cases.images(), cases.images(), cases.batch(5, (3, 8, 8))
    cases.mean_loss(plain, inputs).backward()
    seen(watched, inputs)
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(plain.parameters(), watched.parameters()))
    assert not any(module._forward_hooks for module in watched.modules())
    assert not any(parameter._backward_hooks for parameter in watched.parameters())


class TestRefused:
    def test_modules_that_are_not_covered(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Bilinear(6, 6, 6), nn.Embedding(3, 2, scale_grad_by_freq=True))
        with pytest.raises(ValueError, match=r"not known for 1\.weight, 1\.bias, 2\.weight; covered are .* Linear"):
            seen(model, cases.batch(3))

    def test_a_weight_that_is_also_used_outside_of_its_module(self) -> None:
        class Head(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.words, self.mixed = nn.Embedding(9, 6), nn.Linear(6, 6)

            def forward(self, words: Tensor) -> Tensor:
                return F.linear(self.mixed(self.words(words)), self.words.weight)

        torch.manual_seed(0)
        model, words = Head(), torch.randint(0, 9, (4, 5))
        with pytest.raises(ValueError, match=r"gradients of words\.weight do not come from their modules' calls alone"):
            seen(model, words)
        with per_example_norms(model, partial=True) as norms:
            cases.mean_loss(model, words).backward()
        assert norms.uncovered == ("words.weight",)
        assert off(norms.squares, truth(model, words, cases.mean_loss, norms.uncovered)) < 1e-6

    def test_a_module_that_is_used_without_being_called(self) -> None:
        torch.manual_seed(0)
        model = nn.MultiheadAttention(6, 2, batch_first=True)
        loss = lambda net, inputs: net(inputs, inputs, inputs)[0].square().mean()  # noqa: E731
        with pytest.raises(ValueError, match="not known for in_proj_weight, in_proj_bias"):
            seen(model, cases.batch(3), loss)
        model.in_proj_weight.requires_grad_(False)
        model.in_proj_bias.requires_grad_(False)
        with pytest.raises(ValueError, match=r"gradients of out_proj\.weight, out_proj\.bias do not come"):
            seen(model, cases.batch(3), loss)

    def test_examples_that_are_not_along_dimension_0(self) -> None:
        class Positions(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.places, self.mixed = nn.Embedding(4, 6), nn.Linear(6, 6)

            def forward(self, inputs: Tensor) -> Tensor:
                return self.mixed(inputs + self.places(torch.arange(4)))

        torch.manual_seed(0)
        with pytest.raises(ValueError, match=r"Embedding \(places\) has 4 rows along dimension 0 in a batch of 3"):
            seen(Positions(), cases.batch(3))
        with pytest.raises(ValueError, match=r"Linear \(mixed\) has 4 rows .* in a batch of 2 samples"):
            seen(Positions(), cases.batch(4), samples=2)
        with pytest.raises(ValueError, match=r"Linear \(0\) has shape \(6,\), without a dimension for samples"):
            seen(nn.Sequential(nn.Linear(6, 6)), torch.ones(6), lambda net, inputs: net(inputs).sum())

    def test_no_backward_or_two(self) -> None:
        model, inputs = cases.images(), cases.batch(3, (3, 8, 8))
        with pytest.raises(ValueError, match="run forward and backward inside"), per_example_norms(model):
            model(inputs)
        loss = cases.mean_loss(model, inputs)
        with pytest.raises(ValueError, match="gradients of .* forward ran before"), per_example_norms(model):
            loss.backward()
        loss = cases.mean_loss(model, inputs)
        with pytest.raises(ValueError, match="no parameter is left"), per_example_norms(model, partial=True):
            loss.backward()
        with pytest.raises(ValueError, match="once more after it was complete"), per_example_norms(model):
            cases.mean_loss(model, inputs).backward()
            cases.mean_loss(model, inputs).backward()

    def test_batch_normalisation(self) -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False))
        with pytest.raises(ValueError, match=r"BatchNorm1d \(1\) is in training mode"):
            seen(model, cases.batch(3, (6,)))
        model.eval()
        inputs = cases.batch(3, (6,))
        assert off(seen(model, inputs), truth(model, inputs, cases.mean_loss)) < 1e-6

    def test_an_exception_is_passed_on_and_takes_the_hooks_away(self) -> None:
        model = cases.images()
        with pytest.raises(RuntimeError, match="mine"), per_example_norms(model):
            raise RuntimeError("mine")
        assert not any(module._forward_hooks for module in model.modules())


class TestOuterProducts:
    """Pair by pair, added up, and row by row: three ways to the same lengths."""

    P, Q = 7, 5

    def terms(self, kinds: Sequence[str], positions: int = 4, examples: int = 6) -> list[Outer]:
        generator = torch.Generator().manual_seed(0)
        made = []
        for kind in kinds:
            right = torch.randn(examples, positions, self.Q, generator=generator)
            rows = torch.randint(0, self.P, (examples, positions), generator=generator)
            left = rows if kind == "rows" else torch.randn(examples, positions, self.P, generator=generator)
            made.append(Outer(left, right))
        return made

    def matrices(self, terms: Sequence[Outer]) -> Tensor:
        total = torch.zeros(len(terms[0].right), self.P, self.Q, dtype=torch.float64)
        for term in terms:
            left = F.one_hot(term.left, self.P) if term.by_row else term.left
            total += torch.einsum("ntp,ntq->npq", left.double(), term.right.double())
        return total

    @pytest.mark.parametrize("kinds", [["rows"], ["dense"], ["rows", "dense"], ["dense", "rows", "dense", "rows"]])
    def test_all_ways_agree(self, kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        terms = self.terms(kinds)
        expected = self.matrices(terms).square().sum((1, 2))
        exact = [term.part(0, 6) for term in terms]
        assert off(outer._gram(exact), expected) < 1e-12
        assert off(outer._direct(exact, (self.P, self.Q)), expected) < 1e-12
        for chunk in (1, 100, 2**22):
            monkeypatch.setattr(outer, "CHUNK", chunk)
            assert off(outer.squared_lengths(terms, (self.P, self.Q)), expected) < 1e-12

    def test_the_cheaper_way_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        taken: list[str] = []
        gram, direct = outer._gram, outer._direct
        monkeypatch.setattr(outer, "_gram", lambda *a: taken.append("pairs") or gram(*a))
        monkeypatch.setattr(outer, "_direct", lambda *a: taken.append("sums") or direct(*a))
        for positions in (1, 2, 3, 20):
            outer.squared_lengths(self.terms(["dense"], positions), (self.P, self.Q))
        # T^2 (7 + 5) against T 35 + 35
        assert taken == ["pairs", "pairs", "pairs", "sums"]

    def test_a_probe_is_a_projection_of_the_sum(self) -> None:
        terms = self.terms(["rows", "dense"])
        rows, columns = torch.randn(self.P, dtype=torch.float64), torch.randn(self.Q, dtype=torch.float64)
        expected = rows @ self.matrices(terms).sum(0) @ columns
        assert outer.probe(terms, rows, columns).item() == pytest.approx(expected.item())
