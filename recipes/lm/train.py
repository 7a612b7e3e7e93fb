"""Train a GPT-style language model with a batch that follows the gradient noise scale.

    torchrun --standalone --nproc-per-node 2 recipes/lm/train.py policy.target_efficiency=0.5
    python recipes/lm/train.py                                      one rank, no launcher
    torchrun ... recipes/lm/train.py resume=runs/lm-...             go on with a run
    python recipes/lm/train.py --help                               every setting
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import data
import model as models
from omegaconf import MISSING, DictConfig

from adabatch.config import Task, launch, one_of, program, within


@dataclass
class GptConfig:
    """``model=gpt_small`` and its sisters."""

    size: str = one_of("0.5M", *models.SIZES)  # parameters
    dropout: float = within("[0, 1)", 0.0)  # of attention weights and residual branches
    tied: bool = False  # the output layer is the embedding's transpose


@dataclass
class TextConfig:
    """``data=stdlib``, ``data=text``."""

    path: str = MISSING  # the interpreter's own library source, a text file, or a folder
    pattern: str = "*"  # file names to read in a folder
    sequence_length: int = within("[1, inf)", 64)  # tokens of a sample
    tokenizer: str = one_of(*data.TOKENIZERS)  # bpe is trained on the training split
    vocabulary: int = within("[257, inf)", 4096)  # tokens of the bpe
    held_out: float = within("(0, 1)", 0.05)  # share of the documents kept for evaluation


SCHEMAS = {"model": {"gpt": GptConfig}, "data": {"text": TextConfig}}


def make_task(config: DictConfig) -> Task:
    corpus = data.load(
        config.data.path,
        sequence_length=config.data.sequence_length,
        tokenizer=config.data.tokenizer,
        vocabulary=config.data.vocabulary,
        held_out=config.data.held_out,
        pattern=config.data.pattern,
    )
    model = models.build(
        config.model.size,
        vocabulary=corpus.vocabulary,
        sequence_length=config.data.sequence_length,
        dropout=config.model.dropout,
        tied=config.model.tied,
    )
    return Task(model, corpus.train, corpus.held_out, models.loss, models.metrics, config.data.sequence_length)


def run(config: DictConfig, arguments: Sequence[str]) -> int:
    return launch(config, arguments, name="lm", make_task=make_task)


if __name__ == "__main__":
    sys.exit(program(run, config="lm", schemas=SCHEMAS))
