"""Alignment taps in a loop: whose parameters each view looks at, and what joins the window's measurement."""

from __future__ import annotations

import alignment_cases as truth
import gradient_cases as cases
import programs
import pytest
import torch
from torch import nn

from adabatch import distributed, gradients, optimizers
from adabatch.alignment import AlignmentEstimator
from adabatch.config import ConfigError
from adabatch.config.build import Assembly
from adabatch.gradients import aligned
from adabatch.gradients.alignment import AlignmentTap
from adabatch.gradients.updates import orthogonalised
from adabatch.noise import Measurement, NoiseEstimator

SIZES = [3, 1, 4, 2]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = truth.matrices(model)
    others = [one for one in model.parameters() if one.requires_grad and one.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.01)]


def windows(views: list[str], steps: list[bool]) -> tuple[list[Measurement], nn.Module]:
    """What a loop reads of windows that are aligned or not, with Muon and AdamW, which never step."""
    model = cases.network(torch.float64)
    every = muon_and_adamw(model)
    found = []
    with gradients.attach(model, every) as tap, gradients.AlignmentTaps(views, every, tap) as taps:
        for align in steps:
            model.zero_grad()
            with gradients.accumulate(tap, cases.plan(SIZES)) as window:
                taps.measure(align)
                for piece in cases.pieces(SIZES, tokens=True, dtype=torch.float64):
                    with window.micro_batch():
                        window.backward(cases.mean_loss(model, piece), samples=piece.samples, weight=piece.weight)
                    taps.note(piece.samples, piece.weight)
            pending = taps.read(window)
            assert set(pending) == (set(views) if align else set())
            found.append(gradients.Aligned(window.finish(every).measurement, pending).read())
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    return found, model


def test_muon_is_measured_of_its_matrices_and_the_sign_of_the_companion_s_parameters() -> None:
    found, model = windows(["muon", "sign"], [True, False, True])
    pieces = cases.pieces(SIZES, tokens=True, dtype=torch.float64)
    matrices = truth.matrices(model)
    others = [one for one in model.parameters() if one.requires_grad and one.dim() != 2]
    settings = torch.optim.Muon(matrices, lr=1.0).param_groups[0]
    expected = {
        "muon": truth.reference(model, [pieces], matrices, lambda gradient: orthogonalised(gradient, settings)),
        "sign": truth.reference(model, [pieces], others, truth.sign),
    }
    for one in (found[0], found[2]):
        # Muon's own steps are taken in bfloat16, where sums that come in another order differ.
        assert truth.difference(one.alignments["muon"], expected["muon"]) < 0.02
        assert truth.difference(one.alignments["sign"], expected["sign"]) < 1e-12
    assert found[1].alignments == {}
    assert [one.mean_square for one in found] == [found[0].mean_square] * 3


def test_several_optimizers_of_one_kind_are_looked_at_together() -> None:
    model = cases.network(torch.float64)
    every = [one for one in model.parameters() if one.requires_grad]
    pieces = cases.pieces(SIZES, tokens=False, dtype=torch.float64)
    halves = [torch.optim.SGD(every[:3], lr=0.1), torch.optim.SGD(every[3:], lr=0.1)]
    with AlignmentTap(model, halves, update="sign") as align:
        total = sum(piece.weight for piece in pieces)
        for piece in pieces:
            (cases.mean_loss(model, piece) * (piece.weight / total)).backward()
            align.note(piece.samples, piece.weight)
        found = align.read().read()
    assert truth.difference(found, truth.reference(model, [pieces], every, truth.sign)) < 1e-12


def test_what_is_not_one_kind_of_step_is_refused() -> None:
    model = cases.network()
    with pytest.raises(ValueError, match="Muon with AdamW has none that is known"):
        AlignmentTap(model, muon_and_adamw(model))
    with gradients.attach(model) as tap:
        with pytest.raises(ValueError, match="of sign and muon, not of sing"):
            gradients.AlignmentTaps(["sing"], muon_and_adamw(model), tap)
        with pytest.raises(ValueError, match="Muon's step is of matrices"):
            gradients.AlignmentTaps(["muon"], torch.optim.AdamW(model.parameters()), tap)


def test_the_geometry_of_muon_is_its_own_unless_parameters_are_sharded() -> None:
    model = cases.network()
    layout = gradients.survey(model)
    assert aligned.suggested(muon_and_adamw(model), layout) == "muon"
    assert aligned.suggested(muon_and_adamw(model)[1], layout) is None


# -- as configured


def assembly(*overrides: str) -> Assembly:
    config = programs.composed("lm", "model=gpt_tiny", "limits.micro_batch=4", *overrides)
    torch.manual_seed(0)
    task = programs.load("lm").make_task(config)
    return Assembly(config, task, distributed.World(0, 1, 0, 1, torch.device("cpu")))


def kinds(run: Assembly) -> dict[str, type]:
    return {one.geometry: type(one) for one in run.noise}


def test_the_configured_views_become_taps_and_estimators() -> None:
    run = assembly("noise.views=[sign]", "noise.align_every=5", "stop.samples=4k")
    assert kinds(run) == {"adam_sqrt": NoiseEstimator, "euclidean": NoiseEstimator, "sign": AlignmentEstimator}
    assert run.noise[-1].longest == 1000
    assert run.controller.plan().align and run.controller.align_every == 5
    assert kinds(assembly("noise.geometry=sign")) == {"sign": AlignmentEstimator, "euclidean": NoiseEstimator}
    assert assembly().aligned is None
    with pytest.raises(ValueError, match="Muon's step is of matrices"):
        assembly("noise.views=[muon]")
    with pytest.raises(ValueError, match="too few groups .* 3 or more"):
        assembly("noise.geometry=sign", "limits.start_batch=2")


def test_muon_goes_by_its_own_alignments_and_its_companion_has_a_view_of_its_own_parameters() -> None:
    run = assembly("optimizer=muon")
    assert kinds(run) == {"muon": AlignmentEstimator, "euclidean": NoiseEstimator, "adam_sqrt": NoiseEstimator}
    every = optimizers.each(run.optimizer)
    own = [one for group in every[1].param_groups for one in group["params"]]
    plan = run.controller.plan()
    for step in range(20):
        states = [every[1].state[one] for one in own if one in every[1].state]
        moments = [state["exp_avg_sq"].double() / (1 - 0.99 ** state["step"].item()) for state in states]
        run.model.zero_grad()
        with gradients.accumulate(run.tap, plan) as window:
            for number in range(plan.micro_batches):
                with window.micro_batch():
                    data = run.task.train_data.__getitems__([16 * step + 4 * number + i for i in range(4)])
                    loss, weight = run.task.loss(run.model, data)
                    window.backward(loss, samples=4, weight=weight)
        outcome = window.finish(every)
        views = outcome.measurement.read().views
        assert set(views) == ({"adam_sqrt"} if views else set())
        if views:
            break
        outcome.step()
    parts = zip((one.grad.double() for one in own), moments, strict=True)
    # Rows of the embedding that no gradient has come to have no second moment, and are left out.
    lengths = (gradient.square() / (moment.sqrt() + 1e-8) * (moment > 0) for gradient, moment in parts)
    expected = sum(length.sum().item() for length in lengths)
    assert views["adam_sqrt"][0] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ConfigError):
        programs.composed("lm", "noise.geometry=lion")
