"""The loops whose steps are timed against one another; see ``overhead.py``."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

ROOT = Path(__file__).resolve().parents[2]
RANKS, TOKENS = 2, 64
LEARNING_RATE, CLIP, SEED = 1e-3, 1.0, 0
LOG_EVERY, EXCHANGE_EVERY = 10, 16

Lap = Callable[[str], None]


def no_lap(name: str) -> None:
    """Nobody takes the time of parts."""


def recipe(task: str, module: str) -> ModuleType:
    """A module of a recipe, loaded by path: recipes are programs, not a package."""
    name = f"{task}_{module}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / task / f"{module}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


class Digits(Dataset):
    """Images (1, 28, 28) of random pixels with random classes: what a step costs does not depend on them."""

    def __init__(self, count: int = 4096) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.images = torch.rand(count, 1, 28, 28, generator=generator)
        self.classes = torch.randint(0, 10, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.classes[index]


@dataclass(frozen=True)
class Task:
    """A model and its data, made anew for each loop.

    Args:
        size: of the language model, or ``convnet``.
        micro_batch: samples of one forward and backward on one rank.
        micro_batches: of one step.
        sharded: FSDP2 instead of DistributedDataParallel.
    """

    size: str
    micro_batch: int
    micro_batches: int
    sharded: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(SEED)
        if self.size == "convnet":
            model = recipe("image", "model").ConvNet(width=32, hidden=96)
        else:
            model = recipe("lm", "model").build(self.size, sequence_length=TOKENS)
        if not self.sharded:
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        from torch.distributed.fsdp import fully_shard

        for block in getattr(model, "blocks", ()):
            fully_shard(block)
        return fully_shard(model)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | None]:
        return recipe("image" if self.size == "convnet" else "lm", "model").loss(model, batch)

    def data(self) -> Dataset:
        return Digits() if self.size == "convnet" else recipe("lm", "data").load(sequence_length=TOKENS).train

    @property
    def global_batch(self) -> int:
        return RANKS * self.micro_batch * self.micro_batches


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.1, fused=True)


class Plain:
    """The loop that somebody writes without adabatch."""

    def __init__(self, task: Task, dataset: Dataset, folder: Path) -> None:
        self.task = task
        self.model = task.model()
        self.optimizer = optimizer_of(self.model)
        sampler = DistributedSampler(dataset, seed=SEED)
        collate = None if task.size == "convnet" else as_it_is
        loader = DataLoader(dataset, task.micro_batch, sampler=sampler, collate_fn=collate, drop_last=True)
        self.samples = itertools.chain.from_iterable(loader for _ in itertools.count())
        self.log = (folder / f"plain{id(self)}-{torch.distributed.get_rank()}.jsonl").open("w")
        self.losses: list[Tensor] = []
        self.steps = 0

    def step(self, lap: Lap = no_lap) -> None:
        for number in range(1, self.task.micro_batches + 1):
            batch = next(self.samples)
            lap("data")
            with self.quiet(number < self.task.micro_batches):
                loss, _ = self.task.loss(self.model, batch)
                lap("forward")
                (loss / self.task.micro_batches).backward()
            self.losses.append(loss.detach())
            lap("backward")
            self.after_backward(loss)
            lap("tap")
        self.before_clipping()
        lap("tap")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        lap("clip | finish")
        self.optimizer.step()
        self.optimizer.zero_grad()
        lap("optimizer")
        self.steps += 1
        if self.steps % LOG_EVERY == 0:
            loss, self.losses = torch.stack(self.losses).mean().item(), []
            print(json.dumps({"step": self.steps, "loss": loss, "norm": float(norm)}), file=self.log, flush=True)
        lap("log | commit")

    def quiet(self, on: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients stay on their rank. FSDP2 synchronises each micro-batch, as it does when nobody says otherwise."""
        return self.model.no_sync() if on and not self.task.sharded else contextlib.nullcontext()

    def after_backward(self, loss: Tensor) -> None:
        """Nothing here; a tap notes."""

    def before_clipping(self) -> None:
        """Nothing here; a tap is read."""


class Tapped(Plain):
    """The same loop with a passive tap, which notes, is read in each measured step, and is looked at now and then."""

    def __init__(
        self,
        task: Task,
        dataset: Dataset,
        folder: Path,
        *,
        kind: str,
        rulers: Sequence[str] = (),
        examples: bool = False,
        every: int = 1,
    ) -> None:
        from adabatch import gradients
        from adabatch.gradients import geometry

        super().__init__(task, dataset, folder)
        self.every = every
        chosen = geometry.rulers_for(rulers, self.optimizer, gradients.survey(self.model))
        self.tap = gradients.attach(self.model, self.optimizer, kind=kind, rulers=chosen, examples=examples)
        self.pending: list[Any] = []

    def step(self, lap: Lap = no_lap) -> None:
        self.tap.measure(self.measured)
        super().step(lap)

    @property
    def measured(self) -> bool:
        return self.steps % self.every == 0

    def after_backward(self, loss: Tensor) -> None:
        if self.measured:
            self.tap.note(self.task.micro_batch, loss=loss)

    def before_clipping(self) -> None:
        if not self.measured:
            return
        exchange = len(self.pending) + 1 >= EXCHANGE_EVERY
        self.pending.append(self.tap.read(factor=1.0, exchange=exchange))
        if exchange:
            assert all(one.read().measurable for one in self.pending)
            self.pending = []


class Adaptive:
    """The reference loop, its batch held by the limits."""

    def __init__(self, task: Task, dataset: Dataset, folder: Path) -> None:
        from adabatch import data, distributed, gradients
        from adabatch.checkpoint import Checkpoints
        from adabatch.controller import Budget, Controller
        from adabatch.loop import Interrupt, Settings, Trainer
        from adabatch.noise import NoiseEstimator
        from adabatch.plan import BatchLimits
        from adabatch.policies import TargetEfficiency
        from adabatch.runlog import RunLog
        from adabatch.scaling import Scaling

        model = task.model()
        optimizer = optimizer_of(model)
        rank, batch = distributed.rank(), task.global_batch
        limits = BatchLimits(RANKS, task.micro_batch, min_batch=batch, max_batch=batch)
        self.interrupt = Interrupt()
        self.trainer = Trainer(
            model=model,
            plain_model=getattr(model, "module", model),
            optimizer=optimizer,
            loss=task.loss,
            controller=Controller(
                TargetEfficiency(0.5),
                limits=limits,
                start_batch=batch,
                noise=NoiseEstimator(horizon=10**7, dataset_size=len(dataset)),
                scaling=Scaling("sqrt", reference_batch=batch),
                budget=Budget(samples=10**9),
                tokens_per_sample=TOKENS,
                agree=distributed.agree,
            ),
            stream=data.stream(dataset, seed=SEED, rank=rank, world=RANKS, micro_batch=task.micro_batch),
            tap=gradients.attach(model, optimizer),
            world=distributed.World(rank, RANKS, rank, RANKS, torch.device("cpu")),
            log=RunLog(folder, loggers=["jsonl"], main=rank == 0),
            checkpoints=Checkpoints(folder / "checkpoints"),
            ledger_file=folder / "ledger.json",
            settings=Settings(log_every=LOG_EVERY, clip_norm=CLIP),
        )
        self.trainer.clock.start()

    def step(self, lap: Lap = no_lap) -> None:
        self.trainer._next(self.interrupt)

    def profiled_step(self, lap: Lap) -> None:
        """The same step, taken apart as in ``Trainer._next`` and ``Trainer._step``."""
        from adabatch import gradients, optimizers

        trainer = self.trainer
        plan = trainer.controller.plan()
        lap("plan")
        with gradients.accumulate(trainer.tap, plan) as window:
            for micro_batch in trainer.stream.take(plan):
                lap("data")
                with window.micro_batch():
                    loss, weight = trainer.loss(trainer.model, micro_batch.data)
                    lap("forward")
                    window.backward(loss, samples=micro_batch.samples, weight=weight)
                lap("backward")
        outcome = window.finish(trainer.optimizer, max_norm=CLIP * plan.scales.clip, exchange=trainer._exchanges())
        lap("clip | finish")
        optimizers.apply(plan, trainer.optimizer)
        lap("apply")
        outcome.step()
        trainer.optimizer.zero_grad()
        lap("optimizer")
        trainer.controller.commit(plan, outcome.measurement)
        if trainer.outcome is not None and trainer.outcome.measurement.travelled:
            trainer.outcome.stop_requested()  # of the step before, as in the loop
        trainer.outcome = outcome
        lap("log | commit")


def as_it_is(batch: Any) -> Any:
    return batch


def alive() -> list[Tensor]:
    """All plain tensors that the process has now."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # to ask what something is wakes up deprecated names
        # A sharded tensor is no storage of its own, and holds a plain one.
        return [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter) and one.device.type == "cpu"]


def held_bytes(make: Callable[[], Plain]) -> tuple[int, int]:
    """Bytes that a loop's tensors hold between backward and clipping of its third step, and those of its parameters."""
    before = alive()  # held on to, so that no address is used again
    others = {one.untyped_storage().data_ptr() for one in before}
    loop = make()
    loop.step()
    loop.step()
    found = 0
    real = loop.before_clipping

    def counted() -> None:
        nonlocal found
        real()
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in alive()}
        found = sum(size for place, size in storages.items() if place not in others)

    loop.before_clipping = counted
    loop.step()
    return found, sum(one.numel() * one.element_size() for one in loop.model.parameters())


# What is timed against the plain loop, and the largest ratio that it may have.
ARMS: dict[str, tuple[Callable[..., Any], float]] = {
    "reference loop": (Adaptive, 1.03),
    "ddp": (partial(Tapped, kind="ddp"), 1.01),
    "ddp, every 10th": (partial(Tapped, kind="ddp", every=10), 1.01),
    "hooks": (partial(Tapped, kind="hooks"), 1.02),
    "hooks, every 10th": (partial(Tapped, kind="hooks", every=10), 1.02),
    "adam_sqrt": (partial(Tapped, kind="ddp", rulers=["adam_sqrt"]), 1.03),
    "adam_sqrt, every 10th": (partial(Tapped, kind="ddp", rulers=["adam_sqrt"], every=10), 1.03),
    "norm layers": (partial(Tapped, kind="ddp", examples=True), 1.02),
    "norm layers, every 10th": (partial(Tapped, kind="ddp", examples=True, every=10), 1.02),
    "fsdp": (partial(Tapped, kind="fsdp"), 1.02),
    "fsdp, every 10th": (partial(Tapped, kind="fsdp", every=10), 1.02),
}


def arms_of(task: Task) -> list[str]:
    """What can be measured on a task: FSDP2 by its own tap, single examples where there are normalisation layers."""
    if task.sharded:
        return [name for name in ARMS if name.startswith("fsdp")]
    names = [name for name in ARMS if not name.startswith("fsdp")]
    return [name for name in names if task.size != "convnet" or not name.startswith("norm layers")]
