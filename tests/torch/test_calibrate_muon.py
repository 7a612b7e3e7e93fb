"""Calibration of a model that Muon and AdamW train together: all is put back, and both geometries are measured."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import test_calibrate as single
import torch
from torch import nn

from adabatch import data, gradients, optimizers
from adabatch.calibrate import GEOMETRIES, Bench, Branch, Settings, Snapshot, calibrate, noise_scales
from adabatch.calibrate.branches import plans, run
from adabatch.calibrate.measuring import measurable
from adabatch.loop import HeldOut
from adabatch.plan import BatchLimits
from adabatch.scaling import Scaling


def steps(bench: Bench, branch: Branch, start: int) -> None:
    """Training steps by hand."""
    with data.stream(single.TRAIN, seed=3, start=start, micro_batch=4) as samples:
        for plan in plans(bench, branch):
            with gradients.accumulate(bench.tap, plan) as window:
                for micro_batch in samples.take(plan):
                    with window.micro_batch():
                        window.backward(single.loss(bench.model, micro_batch.data)[0], samples=micro_batch.samples)
            outcome = window.finish(bench.optimizer, max_norm=1.0 * plan.scales.clip)
            optimizers.apply(plan, bench.optimizer)
            outcome.step()
            for one in bench.optimizer:
                one.zero_grad()


@pytest.fixture
def bench() -> Iterator[Bench]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8, bias=False), nn.Tanh(), nn.Linear(8, 1))
    hidden = [model[2].weight]
    others = [one for one in model.parameters() if one is not hidden[0]]
    made = [
        torch.optim.Muon(hidden, lr=0.01, adjust_lr_fn="match_rms_adamw", ns_steps=2),
        torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95), fused=True),
    ]
    optimizers.prepare(made)
    bench = Bench(
        model=model,
        plain_model=model,
        optimizer=made,
        loss=single.loss,
        tap=gradients.attach(model, made),
        world=single.WORLD,
        held_out=HeldOut(single.HELD_OUT, single.metrics, 256, 64),
        train_data=single.TRAIN,
        order_seed=3,
        limits=BatchLimits(1, 4),
        scaling={"muon": Scaling("linear", 8), "adam": Scaling("sqrt", 8)},
        start=single.START,
        clip_norm=1.0,
    )
    steps(bench, Branch(8, single.START, 0, cooldown=1e-9), 0)
    yield bench
    bench.tap.detach()


def state(bench: Bench) -> object:
    optimizer = [one.state_dict() for one in bench.optimizer]
    return copy.deepcopy([bench.plain_model.state_dict(), optimizer, torch.get_rng_state()])


def test_a_branch_trains_by_both_rules_and_leaves_nothing_behind(bench: Bench) -> None:
    before, branch = state(bench), Branch(32, 160, single.START, octaves=1.0)
    found = run(bench, branch, Snapshot(bench.plain_model, bench.optimizer))
    assert single.same(before, state(bench))
    plan = next(plans(bench, branch))
    assert {kind: one.lr for kind, one in plan.by_kind.items()} == {"muon": 4.0, "adam": 2.0} and plan.schedule == 2.0
    steps(bench, branch, single.START)
    assert bench.held_out.evaluate(bench.model, single.WORLD)["loss"] == found


def test_muons_alignments_are_those_of_its_matrices_and_signs_those_of_the_others(bench: Bench) -> None:
    names, refused = measurable(bench, GEOMETRIES)
    assert {"euclidean", "sign", "muon"} <= set(names) and not set(refused) & {"sign", "muon"}
    before = state(bench)
    both = noise_scales(bench, ["sign", "muon"], samples=2048)
    assert single.same(before, state(bench))
    assert {name: one.geometry for name, one in both.items()} == {"sign": "sign", "muon": "muon"}
    others = nn.ModuleList([bench.plain_model[0], bench.plain_model[4]])
    for parameter in others.parameters():
        parameter.requires_grad_(False)
    alone = replace_tap(bench)
    assert noise_scales(alone, ["muon"], samples=2048)["muon"].scale == pytest.approx(both["muon"].scale, rel=1e-5)
    alone.tap.detach()


def replace_tap(bench: Bench) -> Bench:
    """The same run with Muon alone: what AdamW trains is frozen."""
    optimizer = bench.optimizer[0]
    return replace(bench, optimizer=optimizer, tap=gradients.attach(bench.model, optimizer))


def test_a_whole_calibration_goes_by_muons_noise_scale(bench: Bench) -> None:
    before = state(bench)
    settings = Settings(
        batches=(16, 32, 64), samples=512, pairs=2, halvings=1, noise_samples=1024, widest=8.0, geometries=("muon",)
    )
    found = calibrate(bench, settings, present=8, geometry="muon")
    assert single.same(before, state(bench))
    assert set(found.ratios) == {"muon"} and set(found.rates) == {16, 32, 64}
    assert found.samples == bench.consumed > 1024
