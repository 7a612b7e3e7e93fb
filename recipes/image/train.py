"""Train a small convolutional network on handwritten digits with a batch that follows the gradient noise scale.

    torchrun --standalone --nproc-per-node 2 recipes/image/train.py
    python recipes/image/train.py data=mnist                        all 60,000 training digits
    python recipes/image/train.py --help                            every setting
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import data
import model as models
import torch
import torch.nn.functional as F
from omegaconf import DictConfig

from adabatch.config import Task, launch, program


@dataclass
class ConvNetConfig:
    """``model=convnet``."""

    width: int = 16  # channels of the first stage
    hidden: int = 48  # width of the layer before the last
    dropout: float = 0.0


@dataclass
class DigitsConfig:
    """``data=mnist5k``, ``data=mnist``."""

    name: str = "mnist_5k"  # mnist_5k or mnist
    shift: int = 0  # largest random shift of training images in pixels


def metrics(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Mapping[str, tuple[torch.Tensor, float]]:
    """Summed cross entropy and correct answers, and the number of images."""
    images, labels = batch
    logits = model(images).float()
    correct = (logits.argmax(dim=1) == labels).sum()
    return {"loss": (F.cross_entropy(logits, labels, reduction="sum"), len(labels)), "accuracy": (correct, len(labels))}


def make_task(config: DictConfig) -> Task:
    train, held_out = data.load(config.data.name, shift=config.data.shift)
    model = models.ConvNet(width=config.model.width, hidden=config.model.hidden, dropout=config.model.dropout)
    return Task(model, train, held_out, models.loss, metrics)


def run(config: DictConfig, arguments: Sequence[str]) -> int:
    return launch(config, arguments, name="image", make_task=make_task)


if __name__ == "__main__":
    schemas = {"model": {"convnet": ConvNetConfig}, "data": {"digits": DigitsConfig}}
    sys.exit(program(run, config="image", schemas=schemas))
