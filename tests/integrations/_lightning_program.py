"""Trains a small byte model with an unmodified Lightning Trainer while the passive tap watches, through a Callback.

    python _lightning_program.py RESULT CASES        CASES is a JSON list of a Case's fields

``NoiseScale`` is all that a user writes; ``Record`` and the rest are there for the comparison. Lightning clips after
``on_before_optimizer_step``, which is where the window is read.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
import warnings
from dataclasses import dataclass
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import adabatch
from _reference import IGNORED, Batch, Window, agreed, everyone, expected, gradient, snapshot, texts, told
from adabatch.gradients import Pending

# Of one process: eleven micro-batches, the last one of one sample.
MICRO_BATCH, SAMPLES = 2, 21
# What the gradient scaler begins with.
SCALE = 256.0


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        kind: of the tap.
        accumulation: micro-batches of one window; the last window of the epoch has fewer.
        bf16: whether forward runs under autocast.
        fp16: whether it does with a gradient scaler.
        compiled: whether the module is compiled.
    """

    kind: str = "hooks"
    accumulation: int = 3
    bf16: bool = False
    fp16: bool = False
    compiled: bool = False


class Network(lightning.LightningModule):
    """Two causal layers of width 64 over bytes; its loss is the mean over a micro-batch's tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, 64)
        layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 256)

    def loss(self, batch: Batch) -> Tensor:
        hidden = self.embedding(batch["input_ids"])
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))[:, :-1]
        return cross_entropy(logits.flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)

    def training_step(self, batch: Batch, _: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class NoiseScale(Callback):
    """The passive tap beside a Trainer."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.measured: list[Pending] = []

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        # The callback's own ``module`` is the one inside DistributedDataParallel.
        self.tap = adabatch.attach(trainer.strategy.model, trainer.optimizers[0], self.kind)

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Batch, batch_idx: int) -> None:
        self.samples = len(batch["labels"])

    def on_after_backward(self, trainer: lightning.Trainer, module: Any) -> None:
        # Lightning divides by this also in the last window of an epoch, which has fewer micro-batches.
        self.tap.note(self.samples, weight=1.0 / trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, trainer: lightning.Trainer, module: Any, optimizer: Any) -> None:
        # There is a scaler with fp16, and the gradients are unscaled by now.
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.measured.append(self.tap.read(factor=None, scaler=scaler))

    def on_train_end(self, trainer: lightning.Trainer, module: Any) -> None:
        self.tap.detach()


class Record(Callback):
    """What every window began with and what it was given, for the reference."""

    def __init__(self) -> None:
        self.windows: list[Window] = []

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Batch, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.windows.append(Window(snapshot(module)))
        self.windows[-1].batches.append(dict(batch))


def train(case: Case, folder: str, *callbacks: Callback) -> dict[str, Tensor]:
    """One epoch, or four windows; returns what the parameters became."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        accumulate_grad_batches=case.accumulation,
        gradient_clip_val=1.0,
        precision=None if case.fp16 else "bf16-mixed" if case.bf16 else "32-true",
        plugins=[MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=SCALE))] if case.fp16 else None,
        max_epochs=1,
        max_steps=-1 if case.accumulation > 1 else 4,
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Network()
    if case.compiled:
        module = torch.compile(module, backend="aot_eager")
    data = DataLoader(texts(SAMPLES * world), MICRO_BATCH, shuffle=True)
    torch.manual_seed(1)
    trainer.fit(module, data)
    return snapshot(trainer.lightning_module)


def compared(case: Case, window: Window, pending: Pending) -> dict[str, Any]:
    """One window's numbers and the reference's."""
    model = Network()
    model.load_state_dict(window.state)
    batches = everyone(window)

    dtype, scale = (torch.float16, SCALE) if case.fp16 else (torch.bfloat16, 1.0)

    def mean_gradient(batch: Batch) -> Tensor:
        # Divided and scaled as the Trainer does, and multiplied back: under autocast the order is not all the same.
        with torch.autocast("cpu", dtype, enabled=case.bf16 or case.fp16):
            loss = model.loss(batch)
        return gradient(loss / case.accumulation * scale, model) * (case.accumulation / scale)

    shares = [[1.0 / len(mine) / len(batches) for _ in mine] for mine in batches]
    reference = expected(mean_gradient, shares, batches, case.kind == "ddp")
    numbers = told(pending.read())
    return {"measured": numbers, "expected": reference, "agreed": agreed(numbers)}


def run(case: Case) -> dict[str, Any]:
    watch, record = NoiseScale(case.kind), Record()
    with tempfile.TemporaryDirectory() as folder:
        parameters, untouched = train(case, folder, watch, record), train(case, folder)
    return {
        "windows": [compared(case, *pair) for pair in zip(record.windows, watch.measured, strict=True)],
        "unchanged": all(torch.equal(parameters[name], untouched[name]) for name in untouched),
    }


def main(result: str, cases: str) -> None:
    results = [run(Case(**fields)) for fields in json.loads(cases)]
    if not dist.is_initialized() or dist.get_rank() == 0:
        pathlib.Path(result).write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
