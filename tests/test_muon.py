"""``optimizer=muon``: two optimizers in one run, built from a configuration, measured, clipped, stepped, saved, resumed."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from programs import composed, tiny_task
from torch import nn

from adabatch import distributed, gradients, optimizers
from adabatch.checkpoint import CheckpointError, Checkpoints, tensors
from adabatch.config import ConfigError, Task, launch
from adabatch.config.build import Assembly
from adabatch.ledger import Ledger

RUN = (
    "optimizer=muon",
    "optimizer.ns_steps=1",
    "stop.samples=648",
    "lr_schedule.warmup=0",
    "lr_schedule.shape=constant",
    "evaluation.samples=8",
    "evaluation.every=10k",
    "logger.names=[jsonl]",
    "noise.decide_every=2",
    "limits.start_batch=8",
    "limits.micro_batch=4",
    "policy=stages",
    "policy.stages='0:8 200:32 400:16'",
)
CPU = distributed.World(0, 1, 0, 1, torch.device("cpu"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


def make_task(config: DictConfig) -> Task:
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(7)
    tokens, labels = (torch.randint(high, (200,), generator=generator) for high in (12, 3))
    dataset = torch.utils.data.TensorDataset(tokens, labels)

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, None]:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]), None

    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, float]]:
        return {"loss": (loss(model, batch)[0] * len(batch[0]), len(batch[0]))}

    return Task(Net(), dataset, dataset, loss, metrics)


def start(*arguments: str) -> int:
    return launch(composed("image", *arguments), arguments, name="image", make_task=make_task)


def contents(path: Path) -> dict[str, torch.Tensor]:
    """Model and optimizer tensors of a checkpoint."""
    found = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype) for name, stored in tensors.describe(path).items()
    }
    tensors.read(path, found)
    return found


def assembly(*overrides: str) -> Assembly:
    config = composed("image", *RUN, *overrides)
    return Assembly(config, make_task(config), CPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run through two changes of the batch, saved in between."""
    folder = tmp_path_factory.mktemp("muon") / "run"
    assert start(*RUN, f"run_folder={folder}", "checkpoint.every=300") == 0
    return folder


def test_muon_steps_the_matrices_inside_and_adamw_the_rest() -> None:
    run = assembly("optimizer.lr=0.02", "optimizer.adamw.lr=0.003", "optimizer.adamw.beta2=0.95")
    muon, adamw = run.optimizer
    names = {id(parameter): name for name, parameter in run.plain_model.named_parameters()}
    held = [[[names[id(one)] for one in group["params"]] for group in opt.param_groups] for opt in (muon, adamw)]
    assert held == [
        [["body.0.weight", "body.2.weight"]],
        [["embedding.weight", "head.weight"], ["body.0.bias", "body.2.bias", "head.bias"]],
    ]
    assert (type(muon), type(adamw)) == (torch.optim.Muon, torch.optim.AdamW)
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.02, 0.003)
    assert adamw.param_groups[0]["betas"] == (0.9, 0.95)
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.1, 0.0]
    assert "scaling muon sqrt, adam sqrt" in run.describe()


def test_a_recipe_may_name_the_matrices() -> None:
    config = composed("image", *RUN)
    task = replace(make_task(config), hidden=("embedding.*", "body.2.*"))
    muon, adamw = Assembly(config, task, CPU).optimizer
    assert sum(one.numel() for one in muon.param_groups[0]["params"]) == 12 * 6 + 6 * 8
    assert sum(one.numel() for group in adamw.param_groups for one in group["params"]) == 8 * 6 + 8 + 6 + 3 * 6 + 3


def test_without_a_hidden_matrix_the_configuration_is_refused() -> None:
    config = composed("lm", *RUN)
    with pytest.raises(ConfigError, match="no matrix between two hidden layers.*or use optimizer=adamw"):
        Assembly(config, tiny_task(config), CPU)
    with pytest.raises(ConfigError, match=r"Task\(hidden=...\): 'blocks.\*' matches no trainable matrix"):
        Assembly(config, replace(make_task(config), hidden=("blocks.*",)), CPU)


def test_a_dwell_is_that_of_the_slowest_average() -> None:
    assert assembly("optimizer.adamw.beta2=0.95").controller.damping.dwell == math.ceil(8 / 0.05)


def test_both_optimizers_follow_the_batch(folder: Path) -> None:
    saved = json.loads((Checkpoints(folder / "checkpoints").latest() / "optimizer.json").read_text())
    assert saved["class"] == "Muon + AdamW"
    muon, *adamw = saved["groups"]
    # At the end the batch is twice the reference batch.
    assert muon["lr"] == pytest.approx(1e-3 * 2**0.5)
    assert muon["weight_decay"] == pytest.approx(0.1 * 2**0.5)
    assert [group["lr"] for group in adamw] == pytest.approx([1e-3 * 2**0.5] * 2)
    assert adamw[0]["betas"]["$tuple"] == pytest.approx([0.9, 0.99**2])
    assert adamw[0]["eps"] == pytest.approx(1e-8 / 2**0.5)
    assert (muon["momentum"], muon["eps"]) == (0.95, 1e-7)


def test_a_resumed_run_equals_the_straight_one(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    last = Checkpoints(copy / "checkpoints").latest()
    shutil.rmtree(last)
    (copy / "checkpoints" / "latest").unlink()
    assert len(Checkpoints(copy / "checkpoints").paths()) == 2
    assert start(f"resume={copy}") == 0
    again = Checkpoints(copy / "checkpoints").latest()
    assert again.name == last.name
    straight, resumed = contents(Checkpoints(folder / "checkpoints").latest()), contents(again)
    assert any("momentum_buffer" in name for name in straight) and any("exp_avg_sq" in name for name in straight)
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert Ledger.load(copy).segments == Ledger.load(folder).segments


def test_another_pair_of_optimizers_does_not_load_it(folder: Path) -> None:
    run = assembly()
    checkpoints = Checkpoints(folder / "checkpoints")
    muon, adamw = run.optimizer
    with pytest.raises(CheckpointError, match="has the state of Muon . AdamW, and this run's optimizer is AdamW"):
        checkpoints.load(checkpoints.latest(), model=run.plain_model, optimizer=adamw)
    with pytest.raises(CheckpointError, match="parameters are held by more than one optimizer"):
        checkpoints.load(checkpoints.latest(), model=run.plain_model, optimizer=[muon, adamw, adamw])


def test_clipping_and_skipping_concern_both() -> None:
    """The norm is that of the whole gradient, and a gradient that is not finite moves neither part of the model."""
    run = assembly("clip_norm=null")
    plan = run.controller.plan()
    tokens, labels = torch.arange(8) % 12, torch.arange(8) % 3

    def finish(max_norm: float | None, spoil: float = 1.0) -> tuple[Any, torch.Tensor]:
        with gradients.accumulate(run.tap, plan) as window:
            for at, size in zip(accumulate(plan.pieces(0), initial=0), plan.pieces(0)):
                with window.micro_batch():
                    found = nn.functional.cross_entropy(run.model(tokens[at : at + size]), labels[at : at + size])
                    window.backward(spoil * found, samples=size)
        outcome = window.finish(run.optimizer, max_norm=max_norm)
        norms = [parameter.grad.norm() for parameter in run.plain_model.parameters()]
        return outcome, torch.stack(norms).norm()

    assert finish(1e-2)[1].item() == pytest.approx(1e-2, rel=1e-3)
    for one in optimizers.each(run.optimizer):
        one.zero_grad()
    before = {name: value.clone() for name, value in run.plain_model.state_dict().items()}
    outcome, _ = finish(None, spoil=math.nan)
    optimizers.apply(plan, run.optimizer)
    outcome.step()
    assert outcome.skipped()
    assert all(torch.equal(before[name], value) for name, value in run.plain_model.state_dict().items())
    assert not any(one.state for one in run.optimizer)
