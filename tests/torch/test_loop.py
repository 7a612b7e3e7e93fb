"""The reference loop on one process (and, where ranks must agree, on two): cadences, stopping, skipping, resuming."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adabatch import data, distributed, gradients, loop, optimizers
from adabatch.checkpoint import Checkpoints
from adabatch.controller import Controller, TooManySkipped
from adabatch.ledger import Ledger
from adabatch.loop import Clock, HeldOut, Interrupt, Meter, Settings, Trainer
from adabatch.noise import Measurement, NoiseEstimator
from adabatch.plan import BatchLimits
from adabatch.policies import Damping, Fixed, Policy, TargetEfficiency
from adabatch.progress import Budget
from adabatch.runlog import RunLog, read_metrics
from adabatch.scaling import Scaling

START = 8
TIMED = ("time", "seconds", "samples_per_second", "step_time")
NOISE = ("scale", "scale_low", "scale_high", "resolved", "signal", "noise", "efficiency")


class Pairs:
    """Noisy targets of a linear map; each sample has its own weight, as sequences of unequal length do."""

    deterministic = True

    def __init__(self, size: int = 97) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(size, 6, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True) + torch.randn(size, 1, generator=generator)
        self.weights = 1 + torch.arange(size) % 7

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs[index], self.targets[index], self.weights[index]


def weighted_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The mean over weights, and their sum."""
    inputs, targets, weights = batch
    squares = (model(inputs) - targets).square().squeeze(1)
    return (squares * weights).sum() / weights.sum(), weights.sum()


def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
    inputs, targets, _ = batch
    return {"loss": ((model(inputs) - targets).square().sum(), len(inputs))}


def make(
    folder: Path,
    *,
    samples: int | None = 203,
    settings: Settings = Settings(),
    policy: Policy | None = None,
    loss: Callable[..., Any] = weighted_loss,
    metrics: Callable[..., Any] | None = metrics,
    resume: bool = False,
) -> Trainer:
    """A trainer of a small network with dropout; with ``resume`` it goes on from the checkpoint in the folder."""
    world = distributed.World(distributed.rank(), distributed.size(), 0, 1, torch.device("cpu"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 1))
    torch.manual_seed(world.rank)
    model = DistributedDataParallel(plain) if world.size > 1 else plain
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.95), fused=True)
    optimizers.prepare(optimizer)
    controller = Controller(
        policy or TargetEfficiency(0.4),
        limits=BatchLimits(world.size, 4, max_batch=40),
        start_batch=START,
        noise=NoiseEstimator(horizon=2_000),
        scaling=Scaling("gain_power", START),
        damping=Damping(interval_gate=False, dead_band=1.0),
        budget=Budget(samples=samples),
        decide_every=4,
    )
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=2, run="test")
    start = 0
    if resume:
        extra = checkpoints.load(checkpoints.latest(), model=plain, optimizer=optimizer)
        controller.load_state_dict(extra["controller"], Ledger.from_dict(extra["ledger"]))
        start = controller.progress.samples
    trainer = Trainer(
        model=model,
        plain_model=plain,
        optimizer=optimizer,
        loss=loss,
        controller=controller,
        stream=data.stream(Pairs(), seed=1, start=start, rank=world.rank, world=world.size, micro_batch=4),
        tap=gradients.attach(model, optimizer),
        world=world,
        log=RunLog(folder, loggers=["jsonl"], main=world.rank == 0, resumed_at=start if resume else None),
        checkpoints=checkpoints,
        ledger_file=folder / "ledger.json",
        settings=settings,
        held_out=HeldOut(Pairs(31), metrics, 31, 4) if metrics else None,
    )
    if resume:
        trainer.load_state_dict(extra["loop"])
        trainer.log.resume({**trainer.where(), "from_step": controller.progress.steps, "changes": []})
    return trainer


def train(folder: Path, **options: Any) -> tuple[str, Trainer]:
    trainer = make(folder, **options)
    with trainer.stream, trainer.tap, trainer.log:
        return trainer.train(), trainer


def parameters(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.plain_model.parameters()])


def records(folder: Path, *without: str) -> list[dict[str, Any]]:
    """Steps, evaluations and decisions as they stand, without what depends on time."""
    read = read_metrics(folder)
    return [
        {key: value for key, value in record.items() if key not in (*TIMED, *without)}
        for record in (*read.steps, *read.evaluations, *read.decisions)
    ]


def ends_of_steps(ledger: Ledger) -> list[int]:
    return [ledger.offset(step) for step in range(1, ledger.steps + 1)]


def first_at_or_after(ends: list[int], every: int) -> list[int]:
    """The step ends at which a multiple of ``every`` was reached or passed."""
    return [end for before, end in itertools.pairwise([0, *ends]) if end // every > before // every]


# -- cadences, and what a record says


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Trainer, list[tuple[float, int]]]:
    """One run with everything on, and the loss and weight of each micro-batch."""
    seen: list[tuple[float, int]] = []

    def noting(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        loss, weight = weighted_loss(model, batch)
        seen.append((loss.item(), int(weight)))
        return loss, weight

    folder = tmp_path_factory.mktemp("run")
    settings = Settings(log_every=6, evaluate_every=30, save_every=50, clip_norm=1.0)
    reason, trainer = train(folder, settings=settings, loss=noting)
    assert reason == "budget"
    return folder, trainer, seen


def test_the_budget_is_met_to_the_sample_while_the_batch_changes(run) -> None:
    _, trainer, _ = run
    ledger = trainer.controller.ledger
    assert ledger.samples == trainer.controller.progress.samples == trainer.stream.cursor == 203
    assert len({segment.global_batch for segment in ledger.segments}) >= 4
    assert ledger.segments[-1].partial


def test_evaluations_come_at_sample_counts_and_at_both_ends(run) -> None:
    folder, trainer, _ = run
    due = first_at_or_after(ends_of_steps(trainer.controller.ledger), 30)
    assert [record["samples"] for record in read_metrics(folder).evaluations] == [0, *due, 203]
    assert 203 not in due


def test_checkpoints_come_at_sample_counts_and_once_at_the_end(run) -> None:
    folder, trainer, _ = run
    due = first_at_or_after(ends_of_steps(trainer.controller.ledger), 50)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["samples"] for line in lines if line["kind"] == "checkpoint"] == [*due, 203]
    assert len(trainer.checkpoints.paths()) == 2
    assert Ledger.load(folder).to_dict() == trainer.controller.ledger.to_dict()


def test_what_is_due_at_the_very_end_is_done_once(tmp_path) -> None:
    settings = Settings(log_every=3, evaluate_every=24, save_every=24)
    train(tmp_path, samples=48, policy=Fixed(8), settings=settings)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for kind, expected in {"step": [24, 48], "eval": [0, 24, 48], "checkpoint": [24, 48]}.items():
        assert [line["samples"] for line in lines if line["kind"] == kind] == expected


def test_records_come_every_n_steps_and_at_the_end(run) -> None:
    folder, trainer, _ = run
    steps = trainer.controller.ledger.steps
    assert steps % 6, "the last step is not one that is logged anyhow"
    assert [record["step"] for record in read_metrics(folder).steps] == [*range(6, steps, 6), steps]


def test_a_recorded_loss_is_the_weighted_mean_of_the_steps_since_the_record_before(run) -> None:
    folder, trainer, seen = run
    ledger, losses = trainer.controller.ledger, iter(seen)
    by_step = []
    for step in range(ledger.steps):
        left, pieces = ledger.batch_at_step(step), []
        # Windows of a single micro-batch are cut in two, to have something to compare.
        micro = 4 if left > 4 else math.ceil(left / 2)
        while left > 0:
            pieces.append(next(losses))
            left -= micro
        by_step.append(pieces)
    assert next(losses, None) is None
    before = 0
    for record in read_metrics(folder).steps:
        pieces = [piece for step in by_step[before : record["step"]] for piece in step]
        mean = sum(loss * weight for loss, weight in pieces) / sum(weight for _, weight in pieces)
        assert record["loss"] == pytest.approx(mean, rel=1e-6)
        last = by_step[record["step"] - 1]
        assert record["last_loss"] == pytest.approx(sum(a * w for a, w in last) / sum(w for _, w in last), rel=1e-6)
        before = record["step"]


def test_tokens_are_the_weights_where_samples_have_no_fixed_number(run) -> None:
    folder, trainer, seen = run
    assert read_metrics(folder).evaluations[-1]["tokens"] == sum(weight for _, weight in seen)


def test_evaluating_and_saving_leave_no_trace_in_the_training(run, tmp_path) -> None:
    _, trainer, _ = run
    bare = Settings(log_every=1000, evaluate_every=None, save_every=None, clip_norm=1.0)
    _, other = train(tmp_path, settings=bare, metrics=None)
    assert torch.equal(parameters(other), parameters(trainer))
    assert other.controller.ledger.to_dict() == trainer.controller.ledger.to_dict()


def test_the_held_out_loss_is_the_mean_over_the_held_out_samples(run) -> None:
    folder, trainer, _ = run
    held_out, model = Pairs(31), trainer.plain_model
    assert model.training
    model.eval()
    expected = (model(held_out.inputs) - held_out.targets).square().mean().item()
    model.train()
    assert read_metrics(folder).evaluations[-1]["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_meter_weighs_leaves_out_skipped_windows_and_begins_anew() -> None:
    class Ready:
        def __init__(self, loss: float, weight: float, finite: bool = True) -> None:
            self.measurement = Measurement(4, 2, 1.0, 1.0, 0.5, weight, loss, finite)

        def read(self) -> Measurement:
            return self.measurement

    meter = Meter()
    for pending in (Ready(2.0, 1.0), Ready(math.nan, 5.0, finite=False), Ready(5.0, 3.0)):
        meter.add(pending)
    assert meter.take() == pytest.approx(17 / 4)
    assert meter.take() is None


# -- stopping


@pytest.fixture
def seconds(monkeypatch) -> list[float]:
    """A clock that only the test moves."""
    now = [50.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    return now


def slow(now: list[float], training: float, evaluation: float) -> dict[str, Any]:
    """A loss and metrics that take so many seconds for each micro-batch."""

    def slow_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        now[0] += training
        return weighted_loss(model, batch)

    def slow_metrics(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        now[0] += evaluation
        return metrics(model, batch)

    return {"loss": slow_loss, "metrics": slow_metrics}


def test_training_time_stops_a_run_and_goes_on_when_it_is_resumed(tmp_path, seconds) -> None:
    # Two micro-batches of 1 s make a step. Evaluations take far longer and do not count.
    options = {"samples": None, "policy": Fixed(8), **slow(seconds, 1.0, 1000.0)}
    settings = Settings(log_every=1, evaluate_every=16, save_every=16, max_seconds=15.0)
    reason, trainer = train(tmp_path, settings=settings, **options)
    assert reason == "seconds"
    read = read_metrics(tmp_path)
    # The time is up within step 8, step 9 says so to all ranks, and the answer is asked for a step later.
    assert [record["seconds"] for record in read.steps] == [2.0 * step for step in range(1, 11)]
    assert read.evaluations[-1]["samples"] == read.checkpoints[-1]["samples"] == 80
    assert read.steps[-1]["samples_per_second"] == 4.0

    longer = Settings(log_every=1, evaluate_every=16, max_seconds=24.0)
    reason, trainer = train(tmp_path, settings=longer, resume=True, **options)
    assert reason == "seconds" and trainer.controller.progress.steps == 14
    assert read_metrics(tmp_path).steps[-1]["seconds"] == 28.0


def test_a_paused_clock_stands_still(seconds) -> None:
    clock = Clock(elapsed=3.0)
    clock.start()
    seconds[0] += 2.0
    with clock.paused():
        seconds[0] += 40.0
        assert clock.seconds() == 5.0
    seconds[0] += 1.0
    assert clock.seconds() == 6.0


def test_the_target_loss_stops_a_run_at_the_evaluation_that_reaches_it(tmp_path) -> None:
    losses = iter([5.0, 3.0, 2.0, 1.0])

    def falling(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        # Eight micro-batches make an evaluation.
        falling.value = next(losses) if falling.calls % 8 == 0 else falling.value
        falling.calls += 1
        return {"loss": (torch.tensor(falling.value * len(batch[0])), len(batch[0]))}

    falling.calls = 0
    settings = Settings(log_every=100, evaluate_every=24, target_loss=2.0)
    reason, trainer = train(tmp_path, settings=settings, policy=Fixed(8), metrics=falling)
    read = read_metrics(tmp_path)
    assert reason == "loss"
    assert [(record["samples"], record["loss"]) for record in read.evaluations] == [(0, 5.0), (24, 3.0), (48, 2.0)]
    assert [record["step"] for record in read.steps] == [6], "the steps until then are in the log"
    assert trainer.checkpoints.read_extra(trainer.checkpoints.latest())["controller"]["progress"]["samples"] == 48


def test_a_budget_that_is_used_up_is_not_mistaken_for_an_interruption(tmp_path) -> None:
    """A signal in the last step: the run is over, and its last record and evaluation are made."""
    reason, _ = train(tmp_path, samples=16, policy=Fixed(8), loss=killing(at=4), settings=Settings(log_every=100))
    read = read_metrics(tmp_path)
    assert reason == "budget"
    assert read.steps[-1]["samples"] == read.evaluations[-1]["samples"] == 16


# -- windows that are not finite


def spoiled(at: set[int]) -> Callable[..., Any]:
    """A loss that is NaN in the micro-batches with these numbers, from 1."""
    calls = itertools.count(1)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        mean, weight = weighted_loss(model, batch)
        return (mean * math.nan if next(calls) in at else mean), weight

    return loss


def test_a_window_that_is_not_finite_is_skipped_and_marked(tmp_path) -> None:
    settings = Settings(log_every=1, evaluate_every=1000)
    _, untouched = train(tmp_path / "shorter", samples=16, policy=Fixed(8), settings=settings)
    _, trainer = train(tmp_path / "run", samples=24, policy=Fixed(8), settings=settings, loss=spoiled({5}))
    _, longer = train(tmp_path / "longer", samples=32, policy=Fixed(8), settings=settings, loss=spoiled({5}))
    # Step 2, of micro-batches 5 and 6, is as if it had not been, but for its samples.
    assert torch.equal(parameters(trainer), parameters(untouched))
    assert not torch.equal(parameters(longer), parameters(trainer)) and parameters(longer).isfinite().all()
    skips = Ledger.load(tmp_path / "longer").skipped
    assert [(skip.step, skip.sample, skip.global_batch) for skip in skips] == [(2, 16, 8)]
    steps = read_metrics(tmp_path / "longer").steps
    assert [record["skipped"] for record in steps][-1] == 1
    assert steps[2]["loss"] is None and steps[2]["grad_norm"] is None and steps[3]["loss"] is not None
    assert longer.controller.progress.samples == 32


def test_five_skipped_windows_in_a_row_end_the_run_and_stand_in_the_ledger(tmp_path) -> None:
    trainer = make(tmp_path, policy=Fixed(8), loss=spoiled(set(range(7, 1000))))
    with trainer.stream, trainer.tap, trainer.log, pytest.raises(TooManySkipped, match="5 windows in a row"):
        trainer.train()
    assert [skip.step for skip in Ledger.load(tmp_path).skipped] == [3, 4, 5, 6, 7]
    assert parameters(trainer).isfinite().all()


def test_four_in_a_row_do_not(tmp_path) -> None:
    bad = {number for number in range(1, 100) if (number - 1) // 2 % 5 != 4}  # four of five windows
    reason, trainer = train(tmp_path, samples=80, policy=Fixed(8), loss=spoiled(bad))
    assert reason == "budget" and len(trainer.controller.ledger.skipped) == 8


# -- signals, and going on


def killing(at: int, number: signal.Signals = signal.SIGTERM, rank: int = 0) -> Callable[..., Any]:
    """A loss during whose ``at``-th call the process gets a signal."""
    calls = itertools.count(1)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if next(calls) == at and distributed.rank() == rank:
            os.kill(os.getpid(), number)
        return weighted_loss(model, batch)

    return loss


CADENCE = Settings(log_every=4, evaluate_every=40, save_every=60, clip_norm=1.0)


def interrupted(folder: str, number: int, rank: int) -> tuple[str, int, list[int]]:
    """On a rank: a run that a signal stops, by a process of its own."""
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    options = {"settings": CADENCE, "loss": killing(17, signal.Signals(number), rank)}
    reason, trainer = train(Path(folder), **options)
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before
    return reason, trainer.controller.progress.steps, ends_of_steps(trainer.controller.ledger)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_resumed_run_is_the_uninterrupted_one(tmp_path, number) -> None:
    [(reason, steps, ends)] = ranks.run(interrupted, 1, str(tmp_path / "cut"), int(number), 0)
    assert reason == number.name
    read = read_metrics(tmp_path / "cut")
    assert read.checkpoints[-1]["step"] == steps and steps % 4 and ends[-1] // 60 == ends[-2] // 60
    assert [record["step"] for record in read.steps] == list(range(4, steps, 4)), "its open record is left open"

    reason, resumed = train(tmp_path / "cut", settings=CADENCE, resume=True)
    _, whole = train(tmp_path / "whole", settings=CADENCE)
    assert reason == "budget"
    assert torch.equal(parameters(resumed), parameters(whole))
    assert (tmp_path / "cut" / "ledger.json").read_text() == (tmp_path / "whole" / "ledger.json").read_text()
    # Saving reads what was measured, so records until the next decision may know a fresher noise scale.
    assert records(tmp_path / "cut", *NOISE) == records(tmp_path / "whole", *NOISE)


def test_a_run_that_died_goes_on_from_its_last_checkpoint_as_if_nothing_had_happened(tmp_path) -> None:
    calls = itertools.count(1)

    def dying(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if next(calls) == 40:
            raise RuntimeError("the machine is on fire")
        return weighted_loss(model, batch)

    with pytest.raises(RuntimeError, match="on fire"):
        train(tmp_path / "cut", settings=CADENCE, loss=dying)
    _, resumed = train(tmp_path / "cut", settings=CADENCE, resume=True)
    _, whole = train(tmp_path / "whole", settings=CADENCE)
    assert torch.equal(parameters(resumed), parameters(whole))
    assert (tmp_path / "cut" / "ledger.json").read_text() == (tmp_path / "whole" / "ledger.json").read_text()
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert read_metrics(tmp_path / "cut").superseded > 0


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path) -> None:
    (first, steps, _), (second, other_steps, _) = ranks.run(interrupted, 2, str(tmp_path), int(signal.SIGTERM), 1)
    assert first == second == "SIGTERM"
    assert steps == other_steps == read_metrics(tmp_path).checkpoints[-1]["step"]


def test_a_second_interrupt_after_three_seconds_interrupts_at_once(monkeypatch) -> None:
    now = [10.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        now[0] += 2.9  # the launcher forwards what the whole group has had already
        signal.raise_signal(signal.SIGINT)
        assert interrupt.received == "SIGINT"
        now[0] += 0.2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


# -- what else may go wrong


def test_what_cannot_be_saved_is_reported_and_training_goes_on(tmp_path, capfd) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    trainer = make(tmp_path, settings=Settings(save_every=50, evaluate_every=1000))
    trainer.ledger_file = tmp_path / "nowhere" / "ledger.json"
    with trainer.stream, trainer.tap, trainer.log:
        assert trainer.train() == "budget"
    assert trainer.controller.progress.samples == 203 and not read_metrics(tmp_path).checkpoints
    said = capfd.readouterr().err
    assert "saving failed, training goes on" in said and "the ledger was not saved, training goes on" in said


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_trains(tmp_path, precision) -> None:
    trainer = make(tmp_path, policy=Fixed(8), settings=Settings(precision=precision, log_every=5))
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if precision == "fp16" else None
    with trainer.stream, trainer.tap, trainer.log:
        trainer.train()
    _, exact = train(tmp_path / "exact", policy=Fixed(8), settings=Settings(log_every=5))
    got, expected = (read_metrics(folder).evaluations[-1]["loss"] for folder in (tmp_path, tmp_path / "exact"))
    assert got == pytest.approx(expected, rel=0.05) and got != expected
    saved = trainer.checkpoints.read_extra(trainer.checkpoints.latest())["loop"]["scaler"]
    assert (saved is None) == (precision == "bf16")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"precision": "fp8"}, "must be one of fp32, bf16, fp16, got 'fp8'"),
        ({"log_every": 0}, "log_every must be above 0, got 0"),
        ({"max_seconds": -1.0}, "max_seconds must be above 0, got -1.0"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0, got 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, words) -> None:
    with pytest.raises(ValueError, match=words):
        Settings(**wrong)
