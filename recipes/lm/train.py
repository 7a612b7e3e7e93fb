"""Train a GPT-style language model with a batch that follows the gradient noise scale.

    torchrun --standalone --nproc-per-node 2 recipes/lm/train.py policy.target_efficiency=0.5
    python recipes/lm/train.py                                      one rank, no launcher
    torchrun ... recipes/lm/train.py resume=runs/lm-...             go on with a run
    python recipes/lm/train.py --help                               every setting
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
class GptConfig:
    """``model=gpt_small`` and its sisters."""

    size: str = "0.5M"  # 0.1M, 0.5M or 5M parameters
    dropout: float = 0.0
    tied: bool = False  # the output layer is the embedding's transpose


@dataclass
class TextConfig:
    """``data=stdlib``, ``data=text``."""

    path: str = "stdlib"  # the interpreter's own library source, a text file, or a folder
    pattern: str = "*"  # file names to read in a folder
    sequence_length: int = 64  # tokens of a sample
    tokenizer: str = "bytes"  # bytes, or bpe (trained on the training split)
    vocabulary: int = 4096  # tokens of the bpe
    held_out: float = 0.05  # share of the documents kept for evaluation


def metrics(model: torch.nn.Module, batch: torch.Tensor) -> Mapping[str, tuple[torch.Tensor, float]]:
    """Summed cross entropy over the predicted tokens, in nats, and their number."""
    logits = model(batch[:, :-1])
    total = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")
    return {"loss": (total, batch[:, 1:].numel())}


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
    return Task(model, corpus.train, corpus.held_out, models.loss, metrics, config.data.sequence_length)


def run(config: DictConfig, arguments: Sequence[str]) -> int:
    return launch(config, arguments, name="lm", make_task=make_task)


if __name__ == "__main__":
    schemas = {"model": {"gpt": GptConfig}, "data": {"text": TextConfig}}
    sys.exit(program(run, config="lm", schemas=schemas))
