"""The tap on normalisation layers: every example is a group, seen in those layers' parameters."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence

import example_cases as cases
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from adabatch.gradients import layout as layouts
from adabatch.gradients.examples import ExampleSource
from adabatch.gradients.normalisation import NORMALISATIONS, Keeper
from adabatch.gradients.weights import example_weights
from adabatch.noise import Measurement


def source_of(model: nn.Module, **options: object) -> ExampleSource:
    source = ExampleSource(layouts.survey(model), model, **options)
    source.measure(True)
    source.open()
    return source


def window(
    model: nn.Module, micro_batches: Sequence[Tensor], weights: Sequence[Tensor] | None = None, **options: object
) -> tuple[float, float]:
    """sum(|p_i g_i|^2) and |sum(p_i g_i)|^2 of a window, both as the source and its ruler see them."""
    source = source_of(model, **options)
    model.zero_grad()
    weights = weights or [torch.ones(len(inputs)) for inputs in micro_batches]
    total = sum(weight.sum().item() for weight in weights)
    for inputs, weight in zip(micro_batches, weights):
        (cases.mean_loss(model, inputs, weight) * (weight.sum().item() / total)).backward()
        source.close_micro_batch(weight.sum().item(), examples=len(inputs))
    square = source.collect()
    assert square is not None and square.shape == (1,) and square.dtype == torch.float64
    found = [
        source.ruler.square(index, parameter.grad)
        for index, parameter in enumerate(layouts.survey(model).parameters)
        if parameter.grad is not None
    ]
    source.detach()
    return square.item(), sum(length.item() for length in found if length is not None)


def expected(
    model: nn.Module, micro_batches: Sequence[Tensor], weights: Sequence[Tensor] | None = None
) -> tuple[float, float]:
    inputs = torch.cat(list(micro_batches))
    shares = torch.cat(list(weights)) if weights else torch.ones(len(inputs))
    return cases.squares_of(cases.gradients_of(model, inputs, cases.norm_names(model)), shares)


@pytest.mark.parametrize("checkpointed", [None, False])
def test_sequences_agree_with_one_backward_for_each_example(checkpointed: bool | None) -> None:
    """A frozen weight, layers without one of the two, and a layer that runs twice; also under checkpointing."""
    inputs = [cases.batch(5), cases.batch(3, seed=2)]
    plain = cases.sequences()
    assert window(cases.sequences(checkpointed), inputs) == pytest.approx(expected(plain, inputs), rel=1e-6)


def test_reentrant_checkpointing() -> None:
    """It runs a backward pass inside of backward; a layer that runs inside and outside gets two gradients then."""
    model, inputs = cases.sequences(checkpointed=True), [cases.batch(5)]
    with pytest.raises(ValueError, match="parameter 'twice.weight' arrived twice .* use_reentrant=False"):
        window(model, inputs)
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6), nn.RMSNorm(6, eps=1e-6))

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.LayerNorm(6), block

        def forward(self, inputs: Tensor) -> Tensor:
            return checkpoint(self.block, self.first(inputs), use_reentrant=True)

    once = Once()
    assert window(once, inputs) == pytest.approx(expected(once, inputs), rel=1e-6)


def test_images_agree_although_their_activations_are_changed_in_place() -> None:
    inputs = [cases.batch(6, (3, 8, 8)), cases.batch(2, (3, 8, 8), seed=4)]
    assert window(cases.images(), inputs) == pytest.approx(expected(cases.images(), inputs), rel=1e-6)


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6)])
def test_any_number_of_positions(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.RMSNorm(shape[-2:], eps=1e-6))
    assert window(model, [cases.batch(4, shape)]) == pytest.approx(expected(model, [cases.batch(4, shape)]), rel=1e-6)


def test_a_weight_that_two_layers_share() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6))
    model[2].weight = model[0].weight
    inputs = [cases.batch(4)]
    # named once, as the model's parameters are
    names = {"0.weight", "0.bias", "2.bias"}
    truth = cases.squares_of(cases.gradients_of(model, inputs[0], names), torch.ones(4))
    assert window(model, inputs) == pytest.approx(truth, rel=1e-6)


def test_the_language_model() -> None:
    lm = cases.language_model()
    torch.manual_seed(0)
    model = lm.build("0.1M", sequence_length=12)
    tokens = torch.randint(0, 256, (6, 13))
    truth = cases.squares_of(
        cases.gradients_of(model, tokens, cases.norm_names(model), cases.token_loss), torch.ones(6)
    )
    source = source_of(model)
    cases.token_loss(model, tokens).backward()
    source.close_micro_batch(6, examples=6)
    assert source.collect().item() == pytest.approx(truth[0], rel=1e-6)


def test_the_gradient_is_the_same_to_the_last_bit() -> None:
    found = []
    for tapped in (False, True):
        model = cases.images()
        source = source_of(model) if tapped else None
        cases.mean_loss(model, cases.batch(6, (3, 8, 8))).backward()
        if source is not None:
            source.close_micro_batch(6.0, examples=6)
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class TestWeights:
    """Token weights: what an example counts differs."""

    def test_the_squares_carry_the_weights(self) -> None:
        inputs = [cases.batch(3), cases.batch(4, seed=2)]
        weights = [torch.tensor([5.0, 1.0, 0.0]), torch.tensor([2.0, 9.0, 1.0, 4.0])]
        model = cases.sequences()
        assert window(model, inputs, weights) == pytest.approx(expected(model, inputs, weights), rel=1e-6)

    def test_groups_and_their_squared_weights(self) -> None:
        assert example_weights(12.0, 4) == (4.0, pytest.approx(4 * 3.0**2))
        groups, square = example_weights(15.0, 3, torch.tensor([5, 10, 0, 15]))
        assert (groups, square) == (3.0, pytest.approx(2.5**2 + 5.0**2 + 7.5**2))
        assert example_weights(0.0, 0) == (0.0, 0.0)
        assert example_weights(0.0, 2, torch.zeros(2)) == (0.0, 0.0)

    def test_weights_that_stay_on_the_device(self) -> None:
        groups, square = example_weights(torch.tensor(12.0, dtype=torch.float64), 4)
        assert (groups.item(), square.item()) == (4.0, 36.0)
        groups, square = example_weights(torch.tensor(0.0), 4)
        assert (groups.item(), square.item()) == (0.0, 0.0)
        groups, square = example_weights(torch.tensor(8.0), 2, torch.tensor([1.0, 3.0]))
        assert (float(groups), float(square)) == (2.0, pytest.approx(2.0**2 + 6.0**2))

    @pytest.mark.parametrize("bad", [[-1.0, 2.0], [0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
    def test_impossible_weights(self, bad: list[float]) -> None:
        with pytest.raises(ValueError, match="finite, 0 or more and not all 0"):
            example_weights(2.0, 2, torch.tensor(bad))
        with pytest.raises(ValueError, match=r"shape \(examples,\), got \(2, 1\)"):
            example_weights(2.0, 2, torch.ones(2, 1))

    def test_a_measurement_of_them_is_the_mean_over_pairs_of_examples(self) -> None:
        """G^2 by definition: the weighted mean of g_i . g_j over all pairs of different examples."""
        inputs = [cases.batch(3), cases.batch(4, seed=2)]
        weights = [torch.tensor([5.0, 1.0, 3.0]), torch.tensor([2.0, 9.0, 1.0, 4.0])]
        model = cases.sequences()
        group_square, mean_square = window(model, inputs, weights)
        counted = [example_weights(weight.sum().item(), len(weight), weight) for weight in weights]
        total = sum(weight.sum().item() for weight in weights)
        measured = Measurement(
            samples=7,
            groups=round(sum(groups for groups, _ in counted)),
            mean_square=mean_square,
            group_square=group_square,
            weight_square=sum(square for _, square in counted) / total**2,
            weight=total,
            loss=0.0,
        )
        gradients = cases.gradients_of(model, torch.cat(inputs), cases.norm_names(model))
        shares = torch.cat(weights).double() / total
        pairs = list(itertools.permutations(range(7), 2))
        signal = sum((shares[i] * shares[j] * gradients[i].dot(gradients[j])).item() for i, j in pairs)
        assert measured.groups == 7
        assert measured.signal == pytest.approx(
            signal / sum((shares[i] * shares[j]).item() for i, j in pairs), rel=1e-5
        )


class TestWhereSamplesAre:
    def test_sequences_first(self) -> None:
        class First(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attention = nn.MultiheadAttention(6, 2)
                self.norm = nn.LayerNorm(6)

            def forward(self, inputs: Tensor) -> Tensor:
                hidden = inputs.transpose(0, 1)
                return self.norm(hidden + self.attention(hidden, hidden, hidden)[0]).transpose(0, 1)

        torch.manual_seed(0)
        model = First()
        with pytest.raises(ValueError, match=r"MultiheadAttention \(attention\) has batch_first=False"):
            source_of(model)
        inputs = [cases.batch(5)]
        assert window(model, inputs, sample_dimension=1) == pytest.approx(expected(model, inputs), rel=1e-6)
        with pytest.raises(ValueError, match=r"LayerNorm \(norm\) has 4 samples along dimension 0 .* of 5"):
            window(model, inputs, sample_dimension=0)

    def test_flattened_to_rows(self) -> None:
        class Flat(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.before, self.after = nn.LayerNorm(6), nn.RMSNorm(6, eps=1e-6)
                self.mixed = nn.Linear(6, 6)

            def forward(self, inputs: Tensor) -> Tensor:
                return self.after(self.mixed(self.before(inputs.flatten(0, 1)))).view_as(inputs)

        torch.manual_seed(0)
        model, inputs = Flat(), [cases.batch(5)]
        rows = {"before": 4, "after": 4}
        assert window(model, inputs, rows=rows) == pytest.approx(expected(model, inputs), rel=1e-6)
        with pytest.raises(ValueError, match=r"LayerNorm \(before\) has 20 samples .* \(rows=\{'before': \.\.\.\}\)"):
            window(model, inputs)
        with pytest.raises(ValueError, match=r"RMSNorm \(after\) has an input of size 20 .* no multiple of its rows=3"):
            window(model, inputs, rows={"before": 4, "after": 3})
        with pytest.raises(
            ValueError, match=r"rows names \['other'\], but the trained layers are \['before', 'after'\]"
        ):
            source_of(model, rows={"other": 4})
        with pytest.raises(ValueError, match="rows must be 1 or more"):
            source_of(model, rows={"before": 0})

    def test_padding_counts_as_samples_of_weight_0(self) -> None:
        inputs, weights = [cases.batch(4)], [torch.tensor([1.0, 1.0, 1.0, 0.0])]
        model = cases.sequences()
        assert window(model, inputs, weights) == pytest.approx(expected(model, [inputs[0][:3]]), rel=1e-6)


class Scaled(nn.Module):
    """A normalisation of somebody else's: x / max|x| x weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, inputs: Tensor) -> Tensor:
        return scaled(self, inputs) * self.weight


def scaled(module: nn.Module, inputs: Tensor) -> Tensor:
    return inputs / inputs.abs().amax(-1, keepdim=True)


def test_other_kinds_of_layers_can_be_added() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Scaled(6), nn.Tanh())
    with pytest.raises(
        ValueError, match="Sequential has no LayerNorm, RMSNorm, GroupNorm with a trained weight or bias"
    ):
        source_of(model)
    inputs = cases.batch(4)
    truth = cases.squares_of(cases.gradients_of(model, inputs, {"1.weight"}), torch.ones(4))
    found = window(model, [inputs], normalisations={**NORMALISATIONS, Scaled: scaled})
    assert found == pytest.approx(truth, rel=1e-6)


class TestPrecision:
    @pytest.mark.parametrize("model", [cases.sequences, cases.images])
    def test_autocast(self, model: type) -> None:
        inputs = cases.batch(6, (3, 8, 8) if model is cases.images else (4, 6))
        network = model()
        truth = expected(network, [inputs])
        source = source_of(network)
        with torch.autocast("cpu", torch.bfloat16):
            loss = cases.mean_loss(network, inputs)
        loss.float().backward()
        source.close_micro_batch(6.0, examples=6)
        assert source.collect().item() == pytest.approx(truth[0], rel=0.05)

    def test_half_parameters_are_measured_in_single_precision(self) -> None:
        """Equal examples: rounding would show as a difference between n^2 sum|g_i|^2/n and |g|^2."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).bfloat16()
        example = torch.randn(1, 64).bfloat16()
        source = source_of(model)
        outputs = model(example.expand(8, 64))
        direction = torch.randn(1, 64).bfloat16()
        (outputs * direction).sum().backward()
        source.close_micro_batch(8.0, examples=8)
        inputs = model[0](example).float()
        each = (F.layer_norm(inputs, (64,)) * direction.float()).square().sum() + direction.float().square().sum()
        assert source.collect().item() == pytest.approx(8 * each.item(), rel=1e-6)

    def test_a_gradient_that_overflows_is_not_finite(self) -> None:
        model = cases.sequences()
        source = source_of(model)
        (cases.mean_loss(model, cases.batch(3)) * math.inf).backward()
        source.close_micro_batch(3.0, examples=3)
        assert not math.isfinite(source.collect().item())


class TestMemory:
    def test_inputs_are_let_go_when_backward_is_done(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
        source = source_of(model)
        alive: list[StorageWeakRef] = []
        model[0].register_forward_hook(lambda m, a, output: alive.append(StorageWeakRef(output.untyped_storage())))
        loss = cases.mean_loss(model, cases.batch(3))
        assert not alive[0].expired()
        loss.backward()
        assert alive[0].expired()
        source.close_micro_batch(3.0, examples=3)
        # and with the graph, when there is no backward
        loss = cases.mean_loss(model, cases.batch(3))
        del loss
        assert alive[1].expired()

    def test_checkpointing_still_drops_them_in_forward(self) -> None:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())
        model = nn.Sequential(nn.Linear(6, 6), block)
        source = source_of(model)
        alive: list[StorageWeakRef] = []
        block[0].register_forward_hook(lambda m, a, output: alive.append(StorageWeakRef(output.untyped_storage())))
        inputs = cases.batch(3)
        loss = checkpoint(block, model[0](inputs), use_reentrant=False).square().sum()
        assert alive[0].expired()
        loss.backward()
        source.close_micro_batch(3.0, examples=3)
        assert len(alive) == 2 and alive[1].expired()
        assert source.collect().item() > 0

    def test_what_is_kept_is_no_copy(self) -> None:
        inputs = torch.randn(4)
        taken = Keeper().keep(inputs)()
        assert taken.data_ptr() == inputs.data_ptr() and not taken.requires_grad


class TestMeasuringAndNot:
    def test_off_nothing_is_seen(self) -> None:
        model = cases.sequences()
        source = source_of(model)
        source.measure(False)
        source.open()
        cases.mean_loss(model, cases.batch(3)).backward()
        source.close_micro_batch(3.0, examples=3)
        assert source.collect() is None and not source.measuring

    def test_detached_it_leaves_no_hook_behind(self) -> None:
        model = cases.sequences()
        before = copy.deepcopy([dict(module._forward_hooks) for module in model.modules()])
        source = source_of(model)
        assert any(module._forward_hooks for module in model.modules())
        source.detach()
        assert [dict(module._forward_hooks) for module in model.modules()] == before
        assert not any(parameter._backward_hooks for parameter in model.parameters())

    def test_a_window_forgets_what_was_seen_before_it(self) -> None:
        model, inputs = cases.sequences(), cases.batch(3)
        source = source_of(model)
        cases.mean_loss(model, cases.batch(5, seed=7)).backward()
        source.open()
        with torch.no_grad():
            model(cases.batch(9))
        model.zero_grad()
        cases.mean_loss(model, inputs).backward()
        source.close_micro_batch(3.0, examples=3)
        assert source.collect().item() == pytest.approx(expected(model, [inputs])[0], rel=1e-6)

    def test_a_filler_is_no_group(self) -> None:
        model, inputs = cases.sequences(), cases.batch(3)
        source = source_of(model)
        cases.mean_loss(model, inputs).backward()
        source.close_micro_batch(3.0, examples=3)
        (cases.mean_loss(model, cases.batch(2)) * math.nan).backward()
        source.close_micro_batch(0.0, examples=0)
        assert source.collect().item() == pytest.approx(expected(model, [inputs])[0], rel=1e-6)

    def test_a_layer_may_be_left_out_of_a_micro_batch(self) -> None:
        class Chosen(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one, self.other = nn.LayerNorm(6), nn.LayerNorm(6)
                self.choice = 0

            def forward(self, inputs: Tensor) -> Tensor:
                return torch.sin((self.one, self.other)[self.choice](inputs))

        model, inputs = Chosen(), cases.batch(4)
        truth = []
        for model.choice, name in enumerate(("one", "other")):
            names = {f"{name}.weight", f"{name}.bias"}
            truth.append(cases.squares_of(cases.gradients_of(model, inputs, names), torch.ones(4))[0])
        source = source_of(model)
        for model.choice in (0, 1):
            cases.mean_loss(model, inputs).backward()
            source.close_micro_batch(4.0, examples=4)
        assert source.collect().item() == pytest.approx(sum(truth), rel=1e-6)
