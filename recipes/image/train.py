"""Train a small convolutional network on handwritten digits with a batch that follows the gradient noise scale.

    torchrun --standalone --nproc-per-node 2 recipes/image/train.py
    python recipes/image/train.py data=mnist                        all 60,000 training digits
    python recipes/image/train.py --help                            every setting
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import data
import model as models
from omegaconf import DictConfig

from adabatch.config import Task, launch, one_of, program, within


@dataclass
class ConvNetConfig:
    """``model=convnet``."""

    width: int = within("[1, inf)", 16)  # channels of the first stage
    hidden: int = within("[1, inf)", 48)  # width of the layer before the last
    dropout: float = within("[0, 1)", 0.0)  # before the last layer


@dataclass
class DigitsConfig:
    """``data=mnist5k``, ``data=mnist``."""

    name: str = one_of(*data.SOURCES)  # the data set
    shift: int = within("[0, 28)", 0)  # largest random shift of training images in pixels


SCHEMAS = {"model": {"convnet": ConvNetConfig}, "data": {"digits": DigitsConfig}}


def make_task(config: DictConfig) -> Task:
    train, held_out = data.load(config.data.name, shift=config.data.shift)
    model = models.ConvNet(width=config.model.width, hidden=config.model.hidden, dropout=config.model.dropout)
    return Task(model, train, held_out, models.loss, models.metrics)


def run(config: DictConfig, arguments: Sequence[str]) -> int:
    return launch(config, arguments, name="image", make_task=make_task)


if __name__ == "__main__":
    sys.exit(program(run, config="image", schemas=SCHEMAS))
