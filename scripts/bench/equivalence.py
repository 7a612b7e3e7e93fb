"""One recorded ledger on other ranks, micro-batches and workers: the same samples in the same steps, the same weights.

An adaptive run on one rank records a ledger. It is then replayed by torchrun with 1, 2 and 3 ranks, three micro-batch
sizes, with and without loader workers. For every task (language model; language model with token-weighted losses of
very unequal counts; digits) and optimizer, in fp32 and fp64:

- the union of the ranks' positions of every step is exactly the step's range of the sample order;
- after 30 steps |theta - theta_ref| / |theta_ref - theta_0| is at most 1e-5 (fp32) and 1e-10 (fp64);
- the SGD arms also agree, by the same measure, with a hand-written loop that runs each step as one full batch without
  any part of adabatch but the sample order: AdamW hides errors in the scale of the gradient, SGD does not.

    python scripts/bench/equivalence.py [--quick]
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from _common import Table, Target, verdict, write_result
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adabatch import data, distributed, gradients, optimizers
from adabatch.controller import Budget, Controller
from adabatch.ledger import Ledger
from adabatch.noise import NoiseEstimator
from adabatch.plan import BatchLimits
from adabatch.policies import Damping, Replay, TargetEfficiency
from adabatch.scaling import Scaling
from adabatch.schedules import Schedule

ROOT = Path(__file__).resolve().parents[2]
SEED = 7
START, HORIZON = 24, 2_000_000
CLIP = 0.5
LIMITS = {"fp32": 1e-5, "fp64": 1e-10}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def recipe(name: str, module: str) -> ModuleType:
    """A module of a recipe, loaded by path: recipes are programs, not a package."""
    spec = importlib.util.spec_from_file_location(f"{name}_{module}", ROOT / "recipes" / name / f"{module}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@dataclass(frozen=True)
class Case:
    """A task with its optimizer and precision."""

    task: str
    optimizer: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.task}-{self.optimizer}-{self.dtype}"


@dataclass(frozen=True)
class Layout:
    """How a replay is spread."""

    ranks: int
    micro_batch: int
    workers: int

    @property
    def name(self) -> str:
        return f"{self.ranks} ranks, micro-batch {self.micro_batch}, {self.workers} workers"


class Masked:
    """Sequences in which only the first few targets count: between 1 and 64 of them, by index."""

    deterministic = True
    collated = True

    def __init__(self, sequences: Any) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        tokens = self.sequences.__getitems__(indices)
        lengths = torch.tensor([1 + (index * 2654435761 >> 7) % 64 if index % 3 else 1 for index in indices])
        return {"tokens": tokens, "mask": torch.arange(tokens.shape[1] - 1) < lengths[:, None]}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[0] for key, value in self.__getitems__([index]).items()}


def build(case: Case) -> tuple[nn.Module, Any, Callable[..., tuple[Tensor, Any]]]:
    """Model, data set and loss of a case; the model is the same on every rank."""
    torch.manual_seed(SEED)
    if case.task == "image":
        models = recipe("image", "model")
        train, _ = recipe("image", "data").load()
        return models.ConvNet().to(DTYPES[case.dtype]), train, models.loss
    models = recipe("lm", "model")
    train = recipe("lm", "data").load().train
    model = models.build("0.1M").to(DTYPES[case.dtype])
    return model, Masked(train) if case.task == "lm-masked" else train, models.loss


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: cast(value, dtype) for key, value in batch.items()}
    return type(batch)(cast(value, dtype) for value in batch)


def scaling_of(case: Case, reference: int) -> Scaling:
    adam = case.optimizer == "adamw"
    return Scaling("gain_power" if adam else "adascale", reference, beta2=adam, eps=adam)


def schedule() -> Schedule:
    return Schedule("cosine", horizon=6_000, warmup=200)


def train(case: Case, controller: Controller, world: distributed.World, layout: Layout, steps: int) -> dict[str, Any]:
    """The loop of the README: returns the first and last weights, positions of every step, and the plans' scales."""
    plain, dataset, loss_fn = build(case)
    first = flat(plain)
    model = DistributedDataParallel(plain) if world.size > 1 else plain
    optimizer = make_optimizer(case, plain)
    positions: list[list[int]] = []
    tap = gradients.attach(model, optimizer)
    stream = data.stream(
        dataset, seed=SEED, rank=world.rank, world=world.size, micro_batch=layout.micro_batch, workers=layout.workers
    )
    with stream:
        while controller.progress.steps < steps:
            plan = controller.plan()
            taken: list[int] = []
            with gradients.accumulate(tap, plan) as window:
                for micro_batch in stream.take(plan):
                    with window.micro_batch():
                        loss, weight = loss_fn(model, cast(micro_batch.data, DTYPES[case.dtype]))
                        if micro_batch.samples == 0:
                            weight = 0
                        window.backward(loss, samples=micro_batch.samples, weight=weight)
                    taken.extend(micro_batch.positions)
            outcome = window.finish(optimizer, max_norm=CLIP * plan.scales.clip)
            optimizers.apply(plan, optimizer)
            outcome.step()
            optimizer.zero_grad()
            controller.commit(plan, outcome.measurement)
            positions.append(taken)
    tap.detach()
    return {"first": first, "last": flat(plain), "positions": positions}


def record(case: Case, folder: Path, steps: int) -> None:
    """An adaptive run on one rank, undamped so that the batch moves often; its ledger is what is replayed."""
    controller = Controller(
        TargetEfficiency(0.15),
        limits=BatchLimits(1, 8, max_batch=96, rounding="none"),
        start_batch=START,
        noise=NoiseEstimator(horizon=HORIZON),
        scaling=scaling_of(case, START),
        schedule=schedule(),
        damping=Damping(interval_gate=False, growth=1.7, dead_band=1.0),
        decide_every=2,
    )
    train(case, controller, distributed.start(device="cpu"), Layout(1, 8, 0), steps)
    controller.ledger.save(folder / f"{case.name}.json")


def replay(case: Case, folder: Path, layout: Layout, world: distributed.World, steps: int) -> None:
    """Replay a recorded ledger on this layout; rank 0 writes weights, every rank the positions that it took."""
    ledger = Ledger.load(folder / f"{case.name}.json")
    controller = Controller(
        Replay(ledger),
        limits=BatchLimits(world.size, layout.micro_batch),
        noise=NoiseEstimator(horizon=HORIZON),
        scaling=scaling_of(case, ledger.segments[0].global_batch),
        schedule=schedule(),
    )
    result = train(case, controller, world, layout, steps)
    torch.save(result, folder / f"{case.name}-{tag(layout)}-{world.rank}.pt")


def by_hand(case: Case, ledger: Ledger, steps: int) -> Tensor:
    """Every step as one full batch, in plain PyTorch with the formulas written out; returns the last weights."""
    model, dataset, _ = build(case)
    optimizer = make_optimizer(case, model)
    order = data.SampleOrder(len(dataset), SEED)
    reference = ledger.segments[0].global_batch
    last_gain = 1.0
    for step in range(steps):
        first, batch = ledger.offset(step), ledger.batch_at_step(step)
        indices = [order.index(position) for position in range(first, first + batch)]
        loss = full_batch_loss(case, model, cast(dataset.__getitems__(indices), DTYPES[case.dtype]))
        loss.backward()
        middle = first + batch / 2
        decay = middle / 200 if middle < 200 else 0.5 * (1 + math.cos(math.pi * (middle - 200) / 5_800))
        change = ledger.decision_before(first)
        gain, clip = (1.0, 1.0) if change is None else gains(change.estimate, reference, batch)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP * clip)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * decay * gain
            group["weight_decay"] = 1e-4 * batch / reference / gain
        # The velocity, learning rate times buffer, goes on through a change of the learning rate.
        for state in optimizer.state.values():
            state["momentum_buffer"].mul_(last_gain / gain)
        last_gain = gain
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def gains(estimate: Any, reference: int, batch: int) -> tuple[float, float]:
    """AdaScale's gain and the clip threshold's factor, from the recorded signal and noise."""
    scale = estimate["scale"] if estimate["resolved"] else estimate["low"]
    gain = (1 + scale / reference) / (1 + scale / batch)
    return gain, math.sqrt((1 + scale / batch) / (1 + scale / reference))


def full_batch_loss(case: Case, model: nn.Module, batch: Any) -> Tensor:
    """The mean over all images, or over all tokens that count."""
    if case.task == "image":
        return F.cross_entropy(model(batch[0]), batch[1])
    tokens = batch["tokens"] if case.task == "lm-masked" else batch
    losses = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses[batch["mask"].flatten()].mean() if case.task == "lm-masked" else losses.mean()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten().clone() for parameter in model.parameters()])


def tag(layout: Layout) -> str:
    return f"{layout.ranks}x{layout.micro_batch}w{layout.workers}"


def all_cases(quick: bool) -> list[Case]:
    if quick:
        return [Case("lm-masked", "sgd", "fp64"), Case("lm", "adamw", "fp32"), Case("image", "sgd", "fp32")]
    tasks = ("lm", "lm-masked", "image")
    return [Case(*case) for case in itertools.product(tasks, ("adamw", "sgd"), ("fp32", "fp64"))]


def all_layouts(quick: bool) -> list[Layout]:
    if quick:
        return [Layout(1, 8, 0), Layout(2, 16, 1), Layout(3, 5, 0)]
    return [Layout(ranks, micro, (ranks + micro) % 2 * 2) for ranks in (1, 2, 3) for micro in (5, 8, 16)] + [
        Layout(1, 8, 0),
        Layout(2, 8, 2),
    ]


def worker(folder: Path, layout: Layout, quick: bool, steps: int) -> None:
    """One rank of a launch: every case in turn."""
    torch.set_num_threads(1)
    world = distributed.start(device="cpu", timeout_seconds=300)
    for case in all_cases(quick):
        replay(case, folder, layout, world, steps)
    distributed.stop()


def launch(folder: Path, layout: Layout, quick: bool, steps: int) -> None:
    arguments = [str(folder), str(layout.ranks), str(layout.micro_batch), str(layout.workers), str(steps)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(layout.ranks)]
    command += [__file__, *(["--quick"] if quick else []), "--worker", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{layout.name} failed:\n{done.stdout[-1000:]}{done.stderr[-5000:]}")


def same_positions(results: list[dict[str, Any]], ledger: Ledger, steps: int) -> bool:
    """Whether the ranks together took exactly the range of every step, each position once."""
    return all(
        sorted(itertools.chain.from_iterable(result["positions"][step] for result in results))
        == list(range(ledger.offset(step), ledger.offset(step) + ledger.batch_at_step(step)))
        for step in range(steps)
    )


def compare(folder: Path, cases: list[Case], layouts: list[Layout], steps: int) -> tuple[Table, list[Target]]:
    table = Table(["case", "batches", *[tag(layout) for layout in layouts[1:]], "by hand", "same samples"])
    worst = dict.fromkeys(LIMITS, 0.0)
    all_same = True
    for case in cases:
        ledger = Ledger.load(folder / f"{case.name}.json")
        loaded = [
            [torch.load(folder / f"{case.name}-{tag(layout)}-{rank}.pt") for rank in range(layout.ranks)]
            for layout in layouts
        ]
        reference = loaded[0][0]
        moved = (reference["last"] - reference["first"]).norm()
        ratios = [((results[0]["last"] - reference["last"]).norm() / moved).item() for results in loaded[1:]]
        hand = "-"
        if case.optimizer == "sgd":
            ratios.append(((by_hand(case, ledger, steps) - reference["last"]).norm() / moved).item())
            hand = f"{ratios[-1]:.0e}"
        same = all(same_positions(results, ledger, steps) for results in loaded)
        all_same &= same
        worst[case.dtype] = max(worst[case.dtype], *ratios)
        used = [segment.global_batch for segment in ledger.segments]
        batches = f"{min(used)} to {max(used)}, {len(used)} segments"
        cells = [f"{ratio:.0e}" for ratio in ratios[: len(layouts) - 1]]
        table.add(case.name, batches, *cells, hand, "yes" if same else "NO")
    targets = [
        Target(f"largest ratio {dtype}", f"{worst[dtype]:.1e}", f"<= {limit:.0e}", worst[dtype] <= limit)
        for dtype, limit in LIMITS.items()
    ]
    return table, [*targets, Target("same samples", "yes" if all_same else "no", "everywhere", all_same)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases and layouts, about a minute")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        folder, ranks, micro_batch, workers, steps = options.worker
        worker(Path(folder), Layout(int(ranks), int(micro_batch), int(workers)), options.quick, int(steps))
        return 0
    steps = 30
    torch.set_num_threads(1)
    cases, layouts = all_cases(options.quick), all_layouts(options.quick)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in cases:
            record(case, folder, steps)
        for layout in layouts:
            print(f"replaying on {layout.name}", flush=True)
            launch(folder, layout, options.quick, steps)
        table, targets = compare(folder, cases, layouts, steps)
    body = (
        f"Ratios |theta - theta_ref| / |theta_ref - theta_0| after {steps} steps, against the layout {tag(layouts[0])} "
        f"(ranks x micro-batch, w: loader workers). Seed {SEED}.\n\n{table}\n\n{verdict(targets)}"
    )
    if not options.quick:
        write_result("equivalence", "Replay on other ranks, micro-batches and workers", body, " ".join(sys.argv))
    print(body)
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
