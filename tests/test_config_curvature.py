"""``job=curvature``: which checkpoint and which samples it takes, what it prints, what it refuses and never touches."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import programs
import pytest
import torch

from adabatch.checkpoint import Checkpoints
from adabatch.config import ConfigError
from adabatch.data import SampleOrder

BATCH = ("policy=fixed", "policy.global_batch=16", "limits.micro_batch=4")
SETTINGS = ("curvature.samples=48", "curvature.per_group=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 16 steps, with checkpoints at 8 and 16."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert programs.start(*programs.SMALL, *BATCH, "checkpoint.every=128", f"run_folder={folder}") == 0
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def asked(folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    capsys.readouterr()
    assert programs.start(f"resume={folder}", "job=curvature", *SETTINGS, *overrides) == 0
    return capsys.readouterr().out


def refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        programs.start(f"resume={folder}", "job=curvature", *overrides)
    return str(caught.value)


def by_hand(folder: Path, step: int, samples: int) -> dict[str, float]:
    """G'HG and tr(H Sigma) of a line y = w x + b with squared errors, from its closed forms, set by set."""
    path = Checkpoints(folder / "checkpoints").at_steps()[step]
    line = torch.nn.Linear(1, 1)
    Checkpoints(folder / "checkpoints").load_model(path, model=line)
    weights = torch.cat([line.weight.detach().flatten(), line.bias.detach()]).double()
    first = step * 16
    order = SampleOrder(64, seed=0)
    inputs = torch.tensor([order.index(first + i) for i in range(samples)]).double() / 64
    rows = torch.stack([inputs, torch.ones_like(inputs)], dim=1)
    signals, noises = [], []
    for start in range(0, samples, 12):
        one, two, three = rows[start : start + 12].split(4)
        g, f = (2 * part.T @ (part @ weights - part[:, 0]) / 4 for part in (one, two))
        curved = 2 * three.T @ three / 4
        cross = (g @ curved @ f).item()
        signals.append(cross)
        noises.append(8 * 0.25 * ((g @ curved @ g).item() + (f @ curved @ f).item() - 2 * cross))
    return {"signal": sum(signals) / len(signals), "noise": sum(noises) / len(noises)}


@pytest.mark.parametrize("step", [8, 16])
def test_it_takes_the_samples_that_come_next_at_the_weights_of_the_checkpoint(
    step: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)
    which = () if step == 16 else (f"curvature.step={step}",)
    found = json.loads(asked(folder, capsys, "curvature.json=true", *which))
    assert (found["run"], found["step"], found["sample"]) == ("run", step, 16 * step)
    assert (found["sets"], found["samples"], found["curvature_samples"]) == (4, 32, 16)
    expected = by_hand(folder, step, 48)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert found["state"] == "unresolved" and "8 sets" in found["reason"]
    assert contents(folder) == before


def test_it_prints_a_block_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = asked(folder, capsys, "curvature.confidence=0.9")
    title, signal, noise, scale, simple, samples, state = out.splitlines()
    assert title == "run: curvature at step 16, samples from 256 on"
    names = [line.split("  ")[1].strip() for line in (signal, noise, scale, simple, samples)]
    assert names == ["G'HG", "tr(H Sigma)", "B_noise", "B_simple", "samples"]
    assert "32 + 16" in samples and "in 4 sets" in samples
    assert state.startswith("  unresolved: an interval takes 8 sets")


def test_what_it_asks_for_is_no_part_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert programs.start(f"resume={folder}", "job=validate", "curvature.samples=32") == 0
    assert "nothing changed" in capsys.readouterr().out


@pytest.mark.parametrize(("parallelism", "how"), [("ddp", "DistributedDataParallel"), ("fsdp", "FSDP2 shards")])
def test_several_ranks_are_refused_before_they_meet(
    parallelism: str, how: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # and nothing else that a process group needs
    said = refused(folder, f"parallelism={parallelism}", *SETTINGS)
    assert f"2 ranks were started ({how}); start it without torchrun: adabatch curvature {folder}" in said


def test_a_model_without_a_second_derivative_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient

    whole = programs.tiny_task

    def task(config):
        made = whole(config)
        return dataclasses.replace(made, loss=lambda model, batch: (Once.apply(made.loss(model, batch)[0]), None))

    monkeypatch.setattr(programs, "tiny_task", task)
    assert "uses Once" in (said := refused(folder, *SETTINGS)) and "curvature.custom_functions=true" in said
    assert programs.start(f"resume={folder}", "job=curvature", *SETTINGS, "curvature.custom_functions=true") == 0


def test_refusals(folder: Path, tmp_path: Path) -> None:
    assert "no complete checkpoint of step 7" in (said := refused(folder, "curvature.step=7")) and "8, 16" in said
    assert "more than the 64 training samples" in refused(folder, "curvature.samples=65")
    assert "do not fill one micro-batch of 4" in refused(folder, "curvature.samples=3")
    assert "1 whole sets of 9 micro-batches" in refused(folder, "curvature.samples=40")
    with pytest.raises(ConfigError, match="about a checkpoint of a run: give resume="):
        programs.start(*programs.SMALL, *BATCH, "job=curvature")
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("config.yaml", "launches.json"):
        (empty / name).write_bytes((folder / name).read_bytes())
    assert "no complete checkpoint in" in refused(empty)
    assert list(empty.glob("checkpoints")) == []
