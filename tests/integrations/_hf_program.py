"""Trains a small GPT-2 with an unmodified Hugging Face Trainer while the passive tap watches.

    python _hf_program.py RESULT CASES        CASES is a JSON list of a Case's fields

``NoiseScale`` is all that a user writes: a callback, and a hook that sees what the model is given. The Trainer clips
before it calls anybody, so the tap is an early one; ``Record`` and the rest are there for the comparison.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import adabatch
from _reference import Batch, Window, agreed, everyone, expected, gradient, snapshot, texts, tokens, told
from adabatch.gradients import Pending

# Of one process: eleven micro-batches, the last one of one sample.
MICRO_BATCH, SAMPLES = 2, 21


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        kind: of the tap.
        early: whether it measures when backward ends.
        told: whether it is told which backward is a window's last.
        accumulation: micro-batches of one window; the last window of the epoch has fewer.
        loss: ``tokens`` for a mean over all the window's tokens (over a rank's alone with ``across`` False), ``means``
            for a mean of the micro-batches' means.
        bf16: whether forward runs under autocast.
        compiled: whether the Trainer compiles the model.
    """

    kind: str = "hooks"
    early: bool = True
    told: bool = True
    accumulation: int = 3
    loss: str = "tokens"
    across: bool = True
    bf16: bool = False
    compiled: bool = False


class MeanLoss(nn.Module):
    """A model whose forward takes no ``num_items_in_batch``: the Trainer averages its losses over micro-batches."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.language_model(input_ids=input_ids, labels=labels).loss}


def network(case: Case) -> nn.Module:
    """Two layers of width 64 over bytes. Without dropout, so that a reference can repeat what the Trainer did."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    language_model = GPT2LMHeadModel(config)
    return MeanLoss(language_model) if case.loss == "means" else language_model


class NoiseScale(TrainerCallback):
    """The passive tap beside a Trainer, which is to be handed over as ``callback.trainer = trainer``.

    With fp16 the window is read in ``on_pre_optimizer_step``, as ``read(factor=None, scaler=...)``: the scaler's update
    comes next.
    """

    trainer: Trainer

    def __init__(self, case: Case) -> None:
        self.case = case
        self.measured: list[Pending] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The callback's own ``model`` is the one inside DistributedDataParallel.
        model, accelerator = self.trainer.model_wrapped, self.trainer.accelerator
        early, last = self.case.early, (lambda: accelerator.sync_gradients) if self.case.told else None
        self.tap = adabatch.attach(model, self.trainer.optimizer, self.case.kind, early=early, last=last)
        self.hook = model.register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, model: nn.Module, args: tuple[()], inputs: dict[str, Any]) -> None:
        if model.training:
            self.inputs = inputs

    def note(self) -> None:
        """The weight is what the Trainer multiplies the micro-batch's mean loss by."""
        items = self.inputs.get("num_items_in_batch")
        if items is None:
            weight = 1.0 / self.trainer.current_gradient_accumulation_steps
        else:
            weight = tokens(self.inputs) / items * (ranks() if self.trainer.args.average_tokens_across_devices else 1)
        self.tap.note(samples=len(self.inputs["labels"]), weight=weight)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note()
        self.measured.append(self.tap.read(factor=None))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tap.detach()
        self.hook.remove()


class Record(TrainerCallback):
    """What every window began with and what it was given, for the reference."""

    def __init__(self) -> None:
        self.windows: list[Window] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **models: Any) -> None:
        self.model = models["model"]
        self.hook = self.model.register_forward_pre_hook(self.see, with_kwargs=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.windows.append(Window(snapshot(self.model)))

    def see(self, model: nn.Module, args: tuple[()], inputs: dict[str, Any]) -> None:
        self.windows[-1].batches.append(dict(inputs))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.hook.remove()


def train(case: Case, folder: str, *callbacks: TrainerCallback) -> dict[str, Tensor]:
    """One epoch, or four windows; returns what the parameters became."""
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=case.accumulation,
        max_steps=-1 if case.accumulation > 1 else 4,
        num_train_epochs=1,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        average_tokens_across_devices=case.across,
        bf16=case.bf16,
        torch_compile_backend="aot_eager" if case.compiled else None,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(network(case), arguments, train_dataset=texts(SAMPLES * ranks()), callbacks=list(callbacks))
    for callback in callbacks:
        callback.trainer = trainer
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    return snapshot(trainer.model)


def shares(case: Case, batches: list[list[Batch]]) -> list[list[float]]:
    """Each micro-batch's share of the mean gradient: its tokens over the divisor that its rank's loss was given."""
    if case.loss == "means":
        return [[1.0 / len(mine) / len(batches) for _ in mine] for mine in batches]
    factors = [[tokens(batch) / float(batch["num_items_in_batch"]) for batch in mine] for mine in batches]
    total = sum(map(sum, factors))
    return [[factor / total for factor in mine] for mine in factors]


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def compared(case: Case, window: Window, pending: Pending) -> dict[str, Any]:
    """One window's numbers and the reference's."""
    model = network(case)
    model.load_state_dict(window.state)
    batches = everyone(window)

    def mean_gradient(batch: Batch) -> Tensor:
        # Divided as the Trainer divided, and multiplied back: under autocast the order is not all the same.
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
            loss = model(**batch)["loss"]
        return gradient(loss, model) * (batch["num_items_in_batch"] / tokens(batch) if case.loss == "tokens" else 1.0)

    numbers = told(pending.read())
    reference = expected(mean_gradient, shares(case, batches), batches, case.kind == "ddp")
    return {"measured": numbers, "expected": reference, "agreed": agreed(numbers)}


def run(case: Case) -> dict[str, Any]:
    watch, record = NoiseScale(case), Record()
    with tempfile.TemporaryDirectory() as folder:
        try:
            parameters = train(case, folder, watch, record)
        except ValueError as error:
            return {"error": str(error)}
        untouched = train(case, folder)
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
    main(*sys.argv[1:])
