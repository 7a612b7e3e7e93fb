"""Snapshots, branches and noise scales of a small model: all is put back bit by bit, and branches are what they say."""

from __future__ import annotations

import copy
import itertools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import test_loop as loops
import torch
from torch import Tensor, nn

from adabatch import data, distributed, gradients, optimizers
from adabatch.calibrate import (
    GEOMETRIES,
    Bench,
    Branch,
    Refusal,
    Settings,
    Snapshot,
    allowance,
    calibrate,
    calibrate_within,
    calibration,
    expected_cost,
    noise_scales,
)
from adabatch.calibrate.branches import plans, run
from adabatch.calibrate.calibration import choose, fitted
from adabatch.calibrate.measuring import measurable
from adabatch.calibrate.tuning import Tuned
from adabatch.checkpoint import rng
from adabatch.loop import HeldOut, Interrupt, Trainer
from adabatch.plan import BatchLimits
from adabatch.scaling import Scaling

START = 40
WORLD = distributed.World(0, 1, 0, 1, torch.device("cpu"))


class Points:
    """A noisy linear map of six inputs."""

    deterministic = True

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(size, 6, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True) + torch.randn(size, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, None]:
    return (model(batch[0]) - batch[1]).square().mean(), None


def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
    return {"loss": ((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))}


TRAIN, HELD_OUT = Points(4096, 1), Points(256, 2)


def make(optimizer: str = "adamw", normalised: bool = False, dropout: float = 0.2, world=WORLD) -> Bench:
    """A model after a few steps, so that its optimizer has a state; over ranks in DistributedDataParallel."""
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(12) if normalised else nn.Tanh()
    model = nn.Sequential(nn.Linear(6, 12), middle, nn.Dropout(dropout), nn.Linear(12, 1))
    made = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), fused=True),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        "tensor": lambda: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False),
    }[optimizer]()
    optimizers.prepare(made)
    wrapped = nn.parallel.DistributedDataParallel(model) if world.size > 1 else model
    bench = Bench(
        model=wrapped,
        plain_model=model,
        optimizer=made,
        loss=loss,
        tap=gradients.attach(wrapped, made),
        world=world,
        held_out=HeldOut(HELD_OUT, metrics, 256, 64),
        train_data=TRAIN,
        order_seed=3,
        limits=BatchLimits(world.size, 4, rounding="whole" if normalised else "micro_batch"),
        scaling=Scaling("sqrt" if optimizer != "sgd" else "adascale", 8),
        start=START,
        clip_norm=1.0,
    )
    with data.stream(TRAIN, seed=3, rank=world.rank, world=world.size, micro_batch=4) as samples:
        steps(bench, samples, Branch(8, START, 0, cooldown=1e-9))
    return bench


def steps(bench: Bench, samples: data.Stream, branch: Branch) -> None:
    """Training steps by hand."""
    for plan in plans(bench, branch):
        with gradients.accumulate(bench.tap, plan) as window:
            for micro_batch in samples.take(plan):
                with window.micro_batch():
                    window.backward(loss(bench.model, micro_batch.data)[0], samples=micro_batch.samples)
        outcome = window.finish(bench.optimizer, max_norm=1.0 * plan.scales.clip)
        optimizers.apply(plan, bench.optimizer)
        outcome.step()
        bench.optimizer.zero_grad()


def state(bench: Bench) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "model": bench.plain_model.state_dict(),
            "optimizer": bench.optimizer.state_dict(),
            "training": [module.training for module in bench.model.modules()],
            "random": (torch.get_rng_state(), random.getstate()),
            "gradients": [parameter.grad for parameter in bench.model.parameters()],
        }
    )


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield str(key)
            yield from leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def same(left: Any, right: Any) -> bool:
    """Bit by bit."""
    pairs = list(zip(leaves(left), leaves(right), strict=True))
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.fixture(params=["adamw", "sgd", "tensor"])
def bench(request) -> Iterator[Bench]:
    made = make(request.param)
    yield made
    made.tap.detach()


# -- snapshots


def test_a_snapshot_brings_everything_back_bit_by_bit(bench) -> None:
    before, tensors = state(bench), [id(parameter) for parameter in bench.model.parameters()]
    snapshot = Snapshot(bench.plain_model, bench.optimizer)
    for _ in range(2):  # as often as wanted
        with data.stream(TRAIN, seed=3, start=START, micro_batch=4) as samples:
            steps(bench, samples, Branch(16, 64, START, octaves=1.0))
        bench.model.eval()
        random.random()
        assert not same(before, state(bench))
        snapshot.restore()
        assert same(before, state(bench))
    assert tensors == [id(parameter) for parameter in bench.model.parameters()]


def test_state_that_came_later_goes_again() -> None:
    bench = make("sgd")
    bench.optimizer.state.clear()
    snapshot = Snapshot(bench.plain_model, bench.optimizer)
    bench.optimizer.param_groups[0]["new"] = 1
    with data.stream(TRAIN, seed=3, start=START, micro_batch=4) as samples:
        steps(bench, samples, Branch(16, 32, START))
    assert bench.optimizer.state
    snapshot.restore()
    assert not bench.optimizer.state and "new" not in bench.optimizer.param_groups[0]
    bench.tap.detach()


def test_statistics_of_batch_normalisation_come_back_too() -> None:
    bench = make(normalised=True)
    before = state(bench)
    run(bench, Branch(16, 64, START), Snapshot(bench.plain_model, bench.optimizer))
    assert same(before, state(bench))
    bench.tap.detach()


# -- branches


def test_a_branch_is_that_training_and_leaves_nothing_behind(bench) -> None:
    """Its loss is that of the same steps taken by hand, with dropout, and training goes on as if it had not been."""
    before, branch = state(bench), Branch(16, 160, START, octaves=0.5, cooldown=0.4)
    snapshot = Snapshot(bench.plain_model, bench.optimizer)
    found = run(bench, branch, snapshot)
    assert same(before, state(bench))
    assert run(bench, branch, snapshot) == found
    rng.seed_all(rng.derive(bench.seed, 0, START))
    with data.stream(TRAIN, seed=3, start=START, micro_batch=4) as samples:
        steps(bench, samples, branch)
    assert bench.held_out.evaluate(bench.model, WORLD)["loss"] == found


def test_its_rate_is_the_rules_times_the_factor_constant_and_then_falling_to_nothing() -> None:
    bench = make()
    bench.schedule = 0.5
    found = list(plans(bench, Branch(32, 320, START, octaves=1.0, cooldown=0.5)))
    assert [plan.first_sample for plan in found] == list(range(START, START + 320, 32))
    assert {plan.scales.lr for plan in found} == {2.0}  # sqrt of 32 / 8
    assert [plan.schedule for plan in found] == pytest.approx([1.0] * 5 + [0.9, 0.7, 0.5, 0.3, 0.1])
    assert bench.rate(32, None) == pytest.approx(0.01 * 0.5 * 2)
    bench.tap.detach()


def test_a_last_batch_may_be_smaller() -> None:
    bench = make()
    assert [plan.global_batch for plan in plans(bench, Branch(24, 64, START))] == [24, 24, 16]
    bench.tap.detach()


def test_a_branch_that_diverges_has_no_finite_loss_and_does_no_harm(bench) -> None:
    before = state(bench)
    bench.clip_norm = None
    loss = run(bench, Branch(16, 320, START, octaves=60.0), Snapshot(bench.plain_model, bench.optimizer))
    assert not loss < 1e3
    assert same(before, state(bench))


def test_limits_of_the_run_do_not_bound_branches() -> None:
    bench = make()
    tight = Bench(**{**_fields(bench), "limits": BatchLimits(1, 4, min_batch=8, max_batch=16)})
    assert tight.limits.require(4, "x") == 4 and tight.limits.require(512, "x") == 512
    bench.tap.detach()


def test_half_precision_with_a_loss_scale_is_refused() -> None:
    bench = make()
    with pytest.raises(ValueError, match="fp32 or bf16"):
        Bench(**{**_fields(bench), "precision": "fp16"})
    bench.tap.detach()


def _fields(bench: Bench) -> dict[str, Any]:
    return {name: getattr(bench, name) for name in bench.__slots__}


# -- noise scales


def test_noise_scales_agree_with_the_exact_ones_and_leave_nothing_behind() -> None:
    bench = make(dropout=0.0)
    exact = _exact(bench)
    before = state(bench)
    names, _ = measurable(bench, GEOMETRIES)
    found = noise_scales(bench, names, samples=2048, dataset_size=len(TRAIN))
    assert same(before, state(bench))
    assert set(found) == set(names)
    assert found["euclidean"].low <= exact <= found["euclidean"].high
    assert found["euclidean"].samples == 2048 and found["sign"].samples == 2048
    bench.tap.detach()


def _exact(bench: Bench) -> float:
    """tr(Sigma) / |G|^2 over all training samples."""
    rows = []
    for x, y in zip(TRAIN.inputs, TRAIN.targets):
        grads = torch.autograd.grad(loss(bench.model, (x[None], y[None]))[0], list(bench.model.parameters()))
        rows.append(torch.cat([one.flatten() for one in grads]))
    rows = torch.stack(rows).double()
    return float(rows.var(0).sum() / rows.mean(0).square().sum())


def test_geometries_that_the_optimizer_does_not_have_are_told_and_unknown_ones_refused() -> None:
    bench = make("sgd")
    found, refused = measurable(bench, GEOMETRIES)
    assert found == ["euclidean", "sign"] and set(refused) == {"adam", "adam_sqrt", "muon"}
    assert "second moment" in refused["adam"] and "torch.optim.Muon" in refused["muon"]
    with pytest.raises(ValueError, match="some of euclidean, adam, adam_sqrt, sign, muon, got layers"):
        measurable(bench, ["layers"])
    bench.tap.detach()


# -- the whole


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_calibration_is_whole_and_restores_everything(optimizer: str) -> None:
    bench = make(optimizer)
    bench = Bench(**{**_fields(bench), "limits": BatchLimits(1, 16)})
    before, said = state(bench), []
    settings = Settings(batches=(16, 32, 64), samples=512, pairs=2, halvings=1, noise_samples=1024, widest=8.0)
    found = calibrate(bench, settings, present=8, say=said.append)
    assert same(before, state(bench))
    assert found.batches == (16, 32, 64) and found.lengths == (512, 256)
    assert set(found.rates) == {16, 32, 64} and found.samples > 0
    assert set(found.ratios) == set(found.noise) and "euclidean" in found.ratios
    assert any("batch 64, 512 samples" in line for line in said)
    bench.tap.detach()


def test_a_running_trainer_goes_on_bit_by_bit_as_if_it_had_not_been_calibrated(tmp_path) -> None:
    """Model, optimizer, dropout, data, estimates and decisions."""
    straight, calibrated = (loops.make(tmp_path / name) for name in ("straight", "calibrated"))
    for trainer in (straight, calibrated):
        with trainer.stream, trainer.tap, trainer.log, Interrupt() as interrupt:
            trainer.clock.start()
            torch.manual_seed(7)
            for step in itertools.count():
                if trainer is calibrated and step in (0, 9):
                    calibrate(_bench_of(trainer), SMALLEST, present=trainer.controller.batch)
                if trainer._next(interrupt) is not None:
                    break
    left, right = (one.controller for one in (straight, calibrated))
    assert left.progress == right.progress and left.ledger.to_dict() == right.ledger.to_dict()
    assert any(decision.changed for decision in left.ledger.decisions)
    one, other = (trainer.controller.state_dict() for trainer in (straight, calibrated))
    assert one["measured"] == other["measured"]
    assert same(straight.plain_model.state_dict(), calibrated.plain_model.state_dict())
    assert same(straight.optimizer.state_dict(), calibrated.optimizer.state_dict())


SMALLEST = Settings(
    batches=(4, 8, 16), samples=128, pairs=2, halvings=1, noise_samples=64, geometries=("euclidean",), widest=8.0
)


def _bench_of(trainer: Trainer) -> Bench:
    names = ("model", "plain_model", "optimizer", "loss", "tap", "world", "held_out")
    parts = {name: getattr(trainer, name) for name in names}
    return Bench.at(trainer.controller, **parts, train_data=loops.Pairs(), order_seed=1)


# -- within an allowance


WITHIN = Settings(batches=(16, 32, 64), samples=512, pairs=3, halvings=1, noise_samples=1024, widest=8.0)


@pytest.fixture(scope="module")
def allowed() -> Iterator[Bench]:
    bench = make("sgd")
    yield Bench(**{**_fields(bench), "limits": BatchLimits(1, 16)})
    bench.tap.detach()


def test_too_little_for_two_pairs_is_refused_before_any_work(allowed) -> None:
    cost = expected_cost(allowed, replace(WITHIN, pairs=2), 16)
    assert cost == (5 + 3) * 4 * 512 + 1024
    found = calibrate_within(allowed, WITHIN, allowance=cost - 1, present=16, geometry="euclidean")
    assert isinstance(found, Refusal) and found.samples == 0
    assert f"{cost:,} samples, and {cost - 1:,} are allowed" in found.reason


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.5, 3), (9.0, "would tell c to a factor of 9"), (None, "fall|fitted|too little")]
)
def test_what_two_pairs_foresee_decides(
    factor: float | None, expected: Any, allowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, runs = state(allowed), []
    monkeypatch.setattr(allowance, "foreseen", lambda *_, **__: factor)
    monkeypatch.setattr(allowance, "_factor", lambda noise: 1.0)
    monkeypatch.setattr(calibration, "run", lambda bench, branch, snapshot: runs.append(branch) or _loss_of(branch))
    found = calibrate_within(allowed, WITHIN, allowance=10**6, present=16, geometry="euclidean")
    assert same(before, state(allowed))
    assert len(set(runs)) == len(runs), "no branch is run twice"
    if isinstance(expected, int):
        assert len(found.large[32].losses) == expected
    else:
        assert isinstance(found, Refusal) and re.search(expected, found.reason) and found.samples > 0


def _loss_of(branch: Branch) -> float:
    """Falls with its samples, rises with its batch, and is lowest at the rule's rate."""
    pair = (branch.first_sample - START) // 512
    own = 0.01 * math.sin(pair * branch.batch + branch.samples)
    return 3 - 0.1 * math.log2(branch.samples) + 0.001 * branch.batch + 0.01 * branch.octaves**2 + own


# -- batches and settings


def test_batches_are_made_by_the_limits_or_refused_with_numbers() -> None:
    limits = BatchLimits(2, 4, max_batch=64)
    kept, left_out = choose(limits, Settings(samples=4096), present=40)
    assert kept == [8, 40, 160] and "640" in str(left_out) and "7 steps" in left_out[640]
    with pytest.raises(ValueError, match="calibrate.samples to 1280 or more"):
        choose(limits, Settings(samples=100), present=10)
    with pytest.raises(ValueError, match="calibrate.batches=9 cannot be made"):
        choose(limits, Settings(batches=(9, 16, 32)), present=10)


@pytest.mark.parametrize("name", ["samples", "pairs", "cooldown"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"calibrate.{name}"):
        Settings(**{name: 0})


def test_optima_at_the_end_of_their_grid_are_left_out() -> None:
    inside, outside = (Tuned(0.0, interior, interior, (2.0, 2.1), (0.0, 0.0), ()) for interior in (True, False))
    short = {64: Tuned(0.0, True, True, (2.5, 2.6), (0.0, 0.0), ()), 128: inside}
    assert "no optimum inside of the learning rates of batch 4 (64 samples)" in fitted(
        {**short, 64: outside}, {8: inside, 16: inside}, 4, 0.95
    ).reason
    assert "of batches 16: raise" in fitted(short, {8: inside, 16: outside}, 4, 0.95).reason
    assert math.isfinite(fitted(short, {8: inside, 16: inside, 32: outside}, 4, 0.95).efficiencies[8].value)
