"""Where single examples cannot be seen by the normalisation layers, and what is said then."""

from __future__ import annotations

from collections.abc import Callable

import example_cases as cases
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adabatch.gradients import layout as layouts
from adabatch.gradients.examples import ExampleSource
from adabatch.gradients.normalisation import NORMALISATIONS


def source_of(model: nn.Module) -> ExampleSource:
    source = ExampleSource(layouts.survey(model), model)
    source.measure(True)
    source.open()
    return source


def one_micro_batch(model: nn.Module, inputs: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> float:
    source = source_of(model)
    (call or model)(inputs).square().mean().backward()
    source.close_micro_batch(float(len(inputs)), examples=len(inputs))
    return source.collect().item()


class Functional(nn.Module):
    """Uses its layer's parameters without calling it, in place of a call or beside one."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.mixed, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.beside = beside

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.mixed(inputs)
        direct = F.layer_norm(hidden, (6,), self.norm.weight, self.norm.bias)
        return torch.sin(direct) + (self.norm(2 * hidden.cos()) if self.beside else 0)


def test_a_model_without_trained_normalisation_layers() -> None:
    with pytest.raises(ValueError, match="Linear has no LayerNorm, RMSNorm, GroupNorm .* measure with kind='hooks'"):
        source_of(nn.Linear(6, 6))
    frozen = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6).requires_grad_(False))
    with pytest.raises(ValueError, match="has no LayerNorm"):
        source_of(frozen)


class Shifted(nn.LayerNorm):
    """A kind of its own: its weight is an offset from 1."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.layer_norm(inputs, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class Renamed(nn.LayerNorm):
    """The same layer under another name."""


def test_a_subclass_counts_when_it_computes_the_same() -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="has no LayerNorm"):
        source_of(nn.Sequential(nn.Linear(6, 6), Shifted(6)))
    assert one_micro_batch(nn.Sequential(nn.Linear(6, 6), Renamed(6)), cases.batch(3)) > 0


def test_parameters_that_are_used_without_calling_the_layer() -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"LayerNorm \(norm\) has a gradient, but its hook did not fire"):
        one_micro_batch(Functional(beside=False), cases.batch(3))


def test_parameters_that_are_also_used_outside_of_the_layer() -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"parameter 'norm\.(weight|bias)' add up to something else than its gradient"):
        one_micro_batch(Functional(beside=True), cases.batch(3))


def test_backward_that_did_not_reach_the_model() -> None:
    model = cases.sequences()
    source = source_of(model)
    with pytest.raises(
        ValueError, match=r"no gradient arrived at any of the 4 normalisation layers .*LayerNorm \(first"
    ):
        source.close_micro_batch(3.0, examples=3)


def test_backward_twice() -> None:
    model = cases.sequences()
    source = source_of(model)
    loss = cases.mean_loss(model, cases.batch(3))
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(ValueError, match=r"the gradient arrived twice at LayerNorm \(scaled\)"):
        source.close_micro_batch(3.0, examples=3)
    for _ in range(2):
        cases.mean_loss(model, cases.batch(3)).backward()
    with pytest.raises(ValueError, match="arrived twice in one micro-batch; call note\\(\\) after each backward"):
        source.close_micro_batch(3.0, examples=3)


def test_micro_batches_of_several_sizes_in_one() -> None:
    model = cases.sequences()
    source = source_of(model)
    (cases.mean_loss(model, cases.batch(3)) + cases.mean_loss(model, cases.batch(2))).backward()
    with pytest.raises(ValueError, match="ran with inputs of [23] and of [23] samples in one micro-batch"):
        source.close_micro_batch(5.0, examples=5)


def test_batch_normalisation_couples_samples() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.LayerNorm(6))
    with pytest.raises(ValueError, match=r"BatchNorm1d \(1\) is in training mode"):
        source_of(model)
    model[1].eval()
    inputs = cases.batch(4, (6,))
    truth = cases.squares_of(cases.gradients_of(model, inputs, {"2.weight", "2.bias"}), torch.ones(4))
    source = source_of(model)
    cases.mean_loss(model, inputs).backward()
    source.close_micro_batch(4.0, examples=4)
    assert source.collect().item() == pytest.approx(truth[0], rel=1e-6)
    model.train()
    with pytest.raises(ValueError, match="in training mode"):
        source.open()
    source.measure(False)
    source.open()


class Copying(nn.LayerNorm):
    """A layer that keeps a copy of its input for backward, as one in half precision does under autocast on a GPU."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.clone())


def test_an_input_that_is_changed_after_the_layer_has_run() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Copying(6)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = inputs.clone()
            normed = self.norm(hidden)
            hidden += 1
            return normed * hidden

    model, inputs = Residual(), cases.batch(3)
    model(inputs).square().mean().backward()
    kinds = {Copying: NORMALISATIONS[nn.LayerNorm]}
    ExampleSource(layouts.survey(model), model, normalisations=kinds).measure(True)
    loss = model(inputs).square().mean()
    with pytest.raises(ValueError, match=r"the input of Copying \(norm\) was changed in place .* x = x \+ y"):
        loss.backward()


@pytest.fixture
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
class TestCompiled:
    # torch's compiler looks at it where a graph goes on after a break
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    def test_attached_before_the_first_forward_pass(self) -> None:
        model, inputs = cases.sequences(), cases.batch(3)
        truth = cases.squares_of(cases.gradients_of(model, inputs, cases.norm_names(model)), torch.ones(3))
        source = source_of(model)
        compiled = torch.compile(model, backend="aot_eager")
        for on in (False, True, False, True):
            source.measure(on)
            source.open()
            cases.mean_loss(compiled, inputs).backward()
            source.close_micro_batch(3.0, examples=3)
            square = source.collect()
            assert (square.item() if square is not None else None) == (
                pytest.approx(truth[0], rel=1e-6) if on else None
            )

    def test_compiled_before_it_was_attached(self) -> None:
        model, inputs = cases.sequences(), cases.batch(3)
        compiled = torch.compile(model, backend="aot_eager")
        cases.mean_loss(compiled, inputs).backward()
        source = source_of(model)
        cases.mean_loss(compiled, inputs).backward()
        with pytest.raises(
            ValueError, match="its hook did not fire: .* torch.compile had compiled it .* before the first"
        ):
            source.close_micro_batch(3.0, examples=3)

    def test_a_full_graph_is_refused_by_the_compiler(self) -> None:
        model = cases.sequences()
        source_of(model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="use kind='hooks'"):
            compiled(cases.batch(3))
