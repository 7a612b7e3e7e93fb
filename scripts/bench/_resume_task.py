"""The program that resume.py starts, kills and starts again: a small GPT whose samples tell who they are.

Each sample carries its index and the seed that it was made from. The backward pass appends both to a file of its rank,
``$RESUME_TRACE-<rank>``, so that what went through the model is known without any of the library's own counters. The
file also has a line for each phase that the rank enters, which tells where a kill hit.

    RESUME_TRACE=trace torchrun ... scripts/bench/_resume_task.py stop.samples=2000 ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("RANK", "0"))
TRACE = os.open(f"{os.environ['RESUME_TRACE']}-{RANK}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(line: str) -> None:
    """Append a line in one write, which a kill leaves whole or does not leave."""
    os.write(TRACE, f"{line}\n".encode())


note("phase start-up")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes" / "lm"))

import torch  # noqa: E402
import train as recipe  # noqa: E402
from omegaconf import DictConfig  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from adabatch.checkpoint import Checkpoints  # noqa: E402
from adabatch.config import Task, launch, launching, program  # noqa: E402
from adabatch.controller import Controller  # noqa: E402
from adabatch.loop import HeldOut, Trainer  # noqa: E402

SAMPLES = 701  # of the training set, so that a run sees several epochs


class Tagged:
    """Sequences with some tokens blanked by the sample's own seed, and with index and seed beside them."""

    def __init__(self, sequences: Any) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return SAMPLES

    def at(self, index: int, seed: int) -> dict[str, Tensor]:
        tokens = self.sequences[index]
        blank = torch.rand(len(tokens), generator=torch.Generator().manual_seed(seed)) < 0.1
        return {"tokens": tokens.masked_fill(blank, 0), "tag": torch.tensor([index, seed])}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.at(index, 0)


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The recipe's loss; its backward notes the samples, and whether their gradient counts (a filler's does not)."""
    mean, weight = recipe.models.loss(model, batch["tokens"])
    tags = " ".join(f"{index}:{seed}" for index, seed in batch["tag"].tolist())
    mean.register_hook(lambda gradient: note(f"{'samples' if gradient.item() else 'filler'} {tags}"))
    return mean, weight


def make_task(config: DictConfig) -> Task:
    task = recipe.make_task(config)
    return replace(task, train_data=Tagged(task.train_data), loss=loss)


def mark(owner: Any, name: str, phase: str) -> None:
    """Have calls of ``owner.name`` noted as a phase of their own."""
    inner: Callable[..., Any] = getattr(owner, name)

    @wraps(inner)
    def outer(*arguments: Any, **named: Any) -> Any:
        note(f"phase {phase}")
        try:
            return inner(*arguments, **named)
        finally:
            note("phase steps")

    setattr(owner, name, outer)


def run(config: DictConfig, arguments: Sequence[str]) -> int:
    return launch(config, arguments, name="lm", make_task=make_task)


if __name__ == "__main__":
    mark(HeldOut, "evaluate", "evaluation")
    mark(Checkpoints, "save", "checkpoint")
    mark(Controller, "_follow_measurements", "decision")
    mark(Trainer, "record_decision", "decision")
    mark(launching, "write_report", "report")
    schemas = {"model": {"gpt": recipe.GptConfig}, "data": {"text": recipe.TextConfig}}
    sys.exit(program(run, config="lm", schemas=schemas))
