"""What the adaptive loop costs in time: the reference loop against a plain hand-written DDP loop, on two ranks.

The reference loop (``adabatch.loop``) runs the closed-loop policy with its batch held fixed, measures the noise in
every step, decides every 16 steps and logs every 10. The plain loop has the same model, data, optimizer and clipping,
accumulates under ``no_sync``, and logs its loss and gradient norm every 10 steps too. A second copy of the plain loop
runs beside them: its ratio to the first says what the measurement itself can resolve (A/A).

A round is one block of steps of each of the three, the order alternated. A ratio is the geometric mean over rounds,
with a 95 % interval by Student's quantile; rounds go on until the interval's half-width is small enough, or the time
for the cell is over, which is then said.

    python scripts/bench/overhead.py [--quick] [--cells 0.5M-1,5M-4]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from _common import Table, Target, cached, describe_machine, verdict, write_result
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

ROOT = Path(__file__).resolve().parents[2]
CELLS = {f"{size}-{number}": (size, number) for size in ("0.5M", "5M") for number in (1, 4)}
RANKS, MICRO_BATCH, TOKENS = 2, 8, 64
LEARNING_RATE, CLIP, SEED = 1e-3, 1.0, 0
LOG_EVERY, BLOCK_SECONDS, FEWEST_ROUNDS = 10, 0.25, 12
TARGET = 1.03


@dataclass(frozen=True)
class Mode:
    """How long a cell is measured: until the half-width is reached, at most for so many seconds."""

    half_width: float
    seconds: float
    profiled_steps: int


FULL, QUICK = Mode(0.005, 1200.0, 48), Mode(0.02, 25.0, 16)


# -- the loops


def recipe(module: str) -> ModuleType:
    """A module of the language-model recipe, loaded by path: recipes are programs, not a package."""
    spec = importlib.util.spec_from_file_location(f"lm_{module}", ROOT / "recipes" / "lm" / f"{module}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


class Plain:
    """The loop that somebody writes without adabatch."""

    def __init__(self, size: str, micro_batches: int, corpus: Any, folder: Path) -> None:
        self.lm = recipe("model")
        torch.manual_seed(SEED)
        self.model = wrapped(self.lm.build(size, sequence_length=TOKENS))
        self.optimizer = optimizer_of(self.model)
        self.micro_batches = micro_batches
        sampler = DistributedSampler(corpus.train, seed=SEED)
        self.loader = DataLoader(corpus.train, MICRO_BATCH, sampler=sampler, collate_fn=as_it_is, drop_last=True)
        self.samples = itertools.chain.from_iterable(self.loader for _ in itertools.count())
        self.log = (folder / f"plain{id(self)}-{torch.distributed.get_rank()}.jsonl").open("w")
        self.losses: list[Tensor] = []
        self.steps = 0

    def step(self, lap: Callable[[str], None] = lambda name: None) -> None:
        for number in range(1, self.micro_batches + 1):
            batch = next(self.samples)
            lap("data")
            with self.model.no_sync() if number < self.micro_batches else contextlib.nullcontext():
                loss, _ = self.lm.loss(self.model, batch)
                lap("forward")
                (loss / self.micro_batches).backward()
            self.losses.append(loss.detach())
            lap("backward")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        lap("clip | finish")
        self.optimizer.step()
        self.optimizer.zero_grad()
        lap("optimizer")
        self.steps += 1
        if self.steps % LOG_EVERY == 0:
            loss, self.losses = torch.stack(self.losses).mean().item(), []
            print(json.dumps({"step": self.steps, "loss": loss, "norm": norm.item()}), file=self.log, flush=True)
        lap("log | commit")


class Adaptive:
    """The reference loop, its batch held by the limits."""

    def __init__(self, size: str, micro_batches: int, corpus: Any, folder: Path) -> None:
        from adabatch import data, distributed, gradients
        from adabatch.checkpoint import Checkpoints
        from adabatch.controller import Budget, Controller
        from adabatch.loop import Interrupt, Settings, Trainer
        from adabatch.noise import NoiseEstimator
        from adabatch.plan import BatchLimits
        from adabatch.policies import TargetEfficiency
        from adabatch.runlog import RunLog
        from adabatch.scaling import Scaling

        lm = recipe("model")
        torch.manual_seed(SEED)
        model = wrapped(lm.build(size, sequence_length=TOKENS))
        optimizer = optimizer_of(model)
        rank, batch = distributed.rank(), RANKS * MICRO_BATCH * micro_batches
        limits = BatchLimits(RANKS, MICRO_BATCH, min_batch=batch, max_batch=batch)
        self.interrupt = Interrupt()
        self.trainer = Trainer(
            model=model,
            plain_model=model.module,
            optimizer=optimizer,
            loss=lm.loss,
            controller=Controller(
                TargetEfficiency(0.5),
                limits=limits,
                start_batch=batch,
                noise=NoiseEstimator(horizon=10**7, dataset_size=len(corpus.train)),
                scaling=Scaling("sqrt", reference_batch=batch),
                budget=Budget(samples=10**9),
                tokens_per_sample=TOKENS,
                agree=distributed.agree,
            ),
            stream=data.stream(corpus.train, seed=SEED, rank=rank, world=RANKS, micro_batch=MICRO_BATCH),
            tap=gradients.attach(model, optimizer),
            world=distributed.World(rank, RANKS, rank, RANKS, torch.device("cpu")),
            log=RunLog(folder, loggers=["jsonl"], main=rank == 0),
            checkpoints=Checkpoints(folder / "checkpoints"),
            ledger_file=folder / "ledger.json",
            settings=Settings(log_every=LOG_EVERY, clip_norm=CLIP),
        )
        self.trainer.clock.start()

    def step(self) -> None:
        self.trainer._next(self.interrupt)

    def profiled_step(self, lap: Callable[[str], None]) -> None:
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


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.1, fused=True)


def as_it_is(batch: Any) -> Any:
    return batch


# -- timing, on every rank


def measure(size: str, micro_batches: int, mode: Mode) -> dict[str, Any]:
    """One cell: ratios per round and a profile, the same on both ranks."""
    from adabatch import distributed

    corpus = recipe("data").load(sequence_length=TOKENS)
    with tempfile.TemporaryDirectory() as name:
        make = {"plain": Plain, "adaptive": Adaptive, "plain again": Plain}
        loops = {arm: kind(size, micro_batches, corpus, Path(name)) for arm, kind in make.items()}
        for _ in range(2):
            for loop in loops.values():
                timed(loop.step, 3)
        seconds = distributed.agree(timed(loops["plain"].step, 5) / 5)
        steps = max(1, round(BLOCK_SECONDS / seconds))
        # rank 0's clock, between barriers; the steps of a block are the same on both ranks
        rounds: list[dict[str, float]] = []
        for order in itertools.cycle(itertools.permutations(loops)):
            rounds.append({arm: timed(loops[arm].step, steps) / steps for arm in order})
            if distributed.agree(enough(rounds, steps, mode)):
                break
        profile = {
            "plain": profiled(loops["plain"].step, mode.profiled_steps),
            "adaptive": profiled(loops["adaptive"].profiled_step, mode.profiled_steps),
        }
    return {"rounds": rounds, "steps": steps, "profile": profile}


def timed(step: Callable[[], None], steps: int) -> float:
    """Seconds of so many steps, both ranks beginning and ending together."""
    from adabatch import distributed

    distributed.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    distributed.barrier()
    return time.perf_counter() - begun


def enough(rounds: list[dict[str, float]], steps: int, mode: Mode) -> bool:
    """Whether the interval is narrow enough, after some rounds at least, or the time is over."""
    spent = steps * sum(sum(times.values()) for times in rounds)
    if len(rounds) < FEWEST_ROUNDS:
        return len(rounds) >= 3 and spent > 2 * mode.seconds
    return spent > mode.seconds or interval(rounds, "adaptive")[1] <= mode.half_width


def profiled(step: Callable[[Callable[[str], None]], None], steps: int) -> dict[str, float]:
    """Median seconds per part of a step."""
    parts: list[dict[str, float]] = []
    for _ in range(steps):
        laps: dict[str, float] = {}
        last = [time.perf_counter()]

        def lap(name: str) -> None:
            now = time.perf_counter()
            laps[name] = laps.get(name, 0.0) + now - last[0]
            last[0] = now

        step(lap)
        parts.append(laps)
    return {name: statistics.median(laps[name] for laps in parts) for name in parts[0]}


def interval(rounds: list[dict[str, float]], arm: str) -> tuple[float, float]:
    """Geometric mean of ``arm`` over plain, and the half-width of its 95 % interval."""
    logs = [math.log(times[arm] / times["plain"]) for times in rounds]
    spread = statistics.stdev(logs) / math.sqrt(len(logs))
    ratio = math.exp(statistics.fmean(logs))
    return ratio, ratio * student(len(logs) - 1) * spread


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by the expansion in 1/freedom (right to 1 % from 4 on)."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2) + (
        3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
    ) / (384 * freedom**3)


# -- the table


def run_cell(name: str, mode: Mode) -> dict[str, Any]:
    """Measure one cell in two processes that torchrun starts."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        arguments = ["--worker", name, "--result", str(result), *(["--quick"] if mode is QUICK else [])]
        threads = str(max(1, (os.cpu_count() or RANKS) // RANKS))
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        subprocess.run([*command, str(Path(__file__)), *arguments], check=True, env=environment)
        return json.loads(result.read_text())


def work(name: str, result: Path, mode: Mode) -> None:
    from adabatch import distributed

    world = distributed.start(device="cpu", timeout_seconds=300.0)
    found = measure(*CELLS[name], mode)
    if world.is_first:
        result.write_text(json.dumps(found))
    distributed.stop()


def report(cells: dict[str, dict[str, Any]], mode: Mode) -> tuple[str, list[Target]]:
    """Markdown and targets."""
    ratios = Table(["GPT", "micro-batches", "plain ms", "ratio", "±", "A/A", "±", "rounds", "steps each"])
    targets = []
    for name, found in cells.items():
        size, number = CELLS[name]
        rounds = found["rounds"]
        (ratio, width), (same, same_width) = interval(rounds, "adaptive"), interval(rounds, "plain again")
        plain = 1000 * statistics.median(times["plain"] for times in rounds)
        figures = [f"{value:.4f}" for value in (ratio, width, same, same_width)]
        ratios.add(size, number, f"{plain:.1f}", *figures, len(rounds), found["steps"])
        figure = f"{ratio:.4f} ± {width:.4f}"
        targets.append(Target(f"ratio {name}", figure, f"<= {TARGET}", ratio - width <= TARGET))
        if width > mode.half_width:
            targets.append(Target(f"half-width {name}", f"{width:.4f}", f"<= {mode.half_width}", False))
    profiles = [f"{name}, median ms per step on rank 0:\n\n{profile_table(found)}" for name, found in cells.items()]
    return "\n\n".join([str(ratios), "What remains:", *profiles]), targets


def profile_table(found: dict[str, Any]) -> Table:
    plain, adaptive = found["profile"]["plain"], found["profile"]["adaptive"]
    table = Table(["part", "plain", "adaptive", "difference", "% of the plain step"])
    whole = sum(plain.values())
    pairs = {part: (plain.get(part, 0.0), seconds) for part, seconds in adaptive.items()}
    for part, (one, other) in {**pairs, "all": (whole, sum(adaptive.values()))}.items():
        milliseconds = [f"{1000 * seconds:.3f}" for seconds in (one, other, other - one)]
        table.add(part, *milliseconds, f"{100 * (other - one) / whole:+.2f}")
    return table


def selected(names: str) -> Iterator[str]:
    for name in names.split(","):
        if name not in CELLS:
            raise SystemExit(f"--cells takes some of {','.join(CELLS)}, got {name!r}")
        yield name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half-width 0.02 instead of 0.005: minutes on 2 cores")
    parser.add_argument("--cells", default=",".join(CELLS), help="some of %(default)s")
    parser.add_argument("--write", action="store_true", help="write docs/results/overhead.md with --quick, too")
    parser.add_argument("--fresh", action="store_true", help="measure anew what a stopped run has measured already")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    mode = QUICK if options.quick else FULL
    if options.worker:
        work(options.worker, options.result, mode)
        return 0
    begun = time.monotonic()
    cells = {}
    for name in selected(options.cells):
        if options.quick or options.fresh:
            cells[name] = run_cell(name, mode)
        else:
            key = {"cell": name, "machine": describe_machine(), "half_width": mode.half_width}
            cells[name] = cached("overhead", key, lambda name=name: run_cell(name, mode))
        print(f"{name}: ratio {interval(cells[name]['rounds'], 'adaptive')[0]:.4f}", flush=True)
    body, targets = report(cells, mode)
    body += f"\n\n{time.monotonic() - begun:.0f} s, seed {SEED}."
    print(f"\n{body}\n")
    if options.write or not options.quick:
        command = shlex.join(["python", "scripts/bench/overhead.py", *sys.argv[1:]])
        write_result("overhead", "Time of a step against a plain loop", f"{body}\n\n{verdict(targets)}", command)
    print(verdict(targets))
    return 0 if all(target.holds for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
