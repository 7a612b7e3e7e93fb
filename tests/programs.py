"""The recipes' programs as modules, without running them; what they compose, and tiny runs of them."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from adabatch.config import ConfigError, Task, compose, launch
from adabatch.config.compose import config_folder, register

ROOT = Path(__file__).parents[1]
RECIPES = ("image", "lm")

# A run of a dozen steps, which needs no data.
SMALL = (
    "stop.samples=256",
    "lr_schedule.warmup=0",
    "evaluation.samples=8",
    "evaluation.every=128",
    "logger=quiet",
    "noise.decide_every=2",
)


def load(name: str) -> ModuleType:
    """The module ``recipes/<name>/train.py``; its own ``data`` and ``model`` stay its own."""
    full_name = f"program_{name}"
    if full_name not in sys.modules:
        folder = ROOT / "recipes" / name
        outside = {module: sys.modules.pop(module, None) for module in ("data", "model")}
        sys.path.insert(0, str(folder))
        try:
            spec = importlib.util.spec_from_file_location(full_name, folder / "train.py")
            sys.modules[full_name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[full_name])
        finally:
            sys.path.remove(str(folder))
            for module, before in outside.items():
                sys.modules.pop(module, None)
                if before is not None:
                    sys.modules[module] = before
    return sys.modules[full_name]


def composed(name: str, *overrides: str) -> DictConfig:
    """The configuration that the program ``name`` would compose."""
    register(name, load(name).SCHEMAS)
    return compose(name, overrides)


def refusal(name: str, *overrides: str) -> str:
    """What the program ``name`` says against such a configuration."""
    with pytest.raises(ConfigError) as caught:
        composed(name, *overrides)
    return str(caught.value)


def nodes(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, DictConfig]]:
    """The configuration and its sections, each with its dotted name."""
    yield prefix, config
    for key in config:
        if not OmegaConf.is_missing(config, key) and OmegaConf.is_dict(config[key]):
            yield from nodes(config[key], f"{prefix}.{key}".lstrip("."))


def own_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the YAML files that a test may edit, in the place of the real ones."""
    shutil.copytree(config_folder(), folder)
    # The package's own name for the module is its function of the same name.
    monkeypatch.setattr(importlib.import_module("adabatch.config.compose"), "config_folder", lambda: folder)
    return folder


def tiny_task(config: DictConfig) -> Task:
    """A straight line through 64 points."""
    points = torch.arange(64.0).view(64, 1)
    dataset = torch.utils.data.TensorDataset(points, points)

    def loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, None]:
        return (model(batch[0] / 64) - batch[1] / 64).square().mean(), None

    def metrics(model: torch.nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, float]]:
        return {"loss": (loss(model, batch)[0] * len(batch[0]), len(batch[0]))}

    return Task(torch.nn.Linear(1, 1), dataset, dataset, loss, metrics, tokens_per_sample=1)


def start(*arguments: str, name: str = "lm") -> int:
    """Launch a tiny run in this process, with the command line's ``arguments``."""
    return launch(composed(name, *arguments), arguments, name=name, make_task=tiny_task)
