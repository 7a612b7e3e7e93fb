"""The reference loop on two real ranks with a sign view: measured every few steps, decided by, saved, gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adabatch import data, distributed, gradients, optimizers
from adabatch.alignment import Alignment, AlignmentEstimator
from adabatch.checkpoint import Checkpoints
from adabatch.controller import Controller
from adabatch.data import SampleOrder
from adabatch.ledger import Ledger
from adabatch.loop import Settings, Trainer
from adabatch.noise import Measurement, NoiseEstimator
from adabatch.plan import BatchLimits
from adabatch.policies import Observe
from adabatch.progress import Budget
from adabatch.runlog import RunLog, read_metrics

SAMPLES, BATCH, MICRO, EVERY = 480, 16, 8, 4


def points() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(200, 6, generator=generator)
    targets = inputs.sum(1, keepdim=True) + torch.randn(200, 1, generator=generator)
    return torch.utils.data.TensorDataset(inputs, targets)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, None]:
    return (model(batch[0]) - batch[1]).square().mean(), None


class Watching(Controller):
    """Keeps what it is told."""

    def commit(self, plan: Any, measurement: Any = None, timing: Any = None) -> Any:
        self.seen.append((plan, measurement))
        return super().commit(plan, measurement, timing)

    seen: list[tuple[Any, Any]] = []


def train(folder: Path, kind: str, samples: int, resume: bool = False) -> dict[str, Any]:
    """One launch; what this rank measured, and where its estimates ended."""
    world = distributed.World(distributed.rank(), distributed.size(), 0, 1, torch.device("cpu"))
    plain = network()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    optimizers.prepare(optimizer)
    views = [AlignmentEstimator(geometry="sign", dataset_size=200), NoiseEstimator()]
    controller = Watching(
        Observe(),
        limits=BatchLimits(world.size, MICRO),
        start_batch=BATCH,
        noise=views,
        budget=Budget(samples=samples),
        decide_every=8,
        align_every=EVERY,
    )
    controller.seen = []
    checkpoints = Checkpoints(folder / "checkpoints", run="test")
    if resume:
        extra = checkpoints.load(checkpoints.latest(), model=plain, optimizer=optimizer)
        controller.load_state_dict(extra["controller"], Ledger.from_dict(extra["ledger"]))
    start = controller.progress.samples
    tap = gradients.attach(model, optimizer, kind=kind)
    aligned = gradients.AlignmentTaps(["sign"], optimizer, tap)
    stream = data.stream(points(), seed=1, start=start, rank=world.rank, world=world.size, micro_batch=MICRO)
    log = RunLog(folder, loggers=["jsonl"], main=world.rank == 0, resumed_at=start if resume else None)
    trainer = Trainer(
        model=model,
        plain_model=plain,
        optimizer=optimizer,
        loss=loss,
        controller=controller,
        stream=stream,
        tap=tap,
        world=world,
        log=log,
        checkpoints=checkpoints,
        ledger_file=folder / "ledger.json",
        settings=Settings(log_every=10),
        aligned=aligned,
    )
    with stream, tap, aligned, log:
        trainer.train()
    seen = [(plan.step, plan.align, plan.micro_batches, pending.read()) for plan, pending in controller.seen]
    return {"seen": seen, "state": controller.state_dict(), "estimate": controller.estimate}


def runs(folder: str) -> list[dict[str, Any]]:
    whole = [train(Path(folder, kind), kind, SAMPLES) for kind in ("ddp", "hooks")]
    halves = [train(Path(folder, "halves"), "ddp", SAMPLES // 2), train(Path(folder, "halves"), "ddp", SAMPLES, True)]
    return [*whole, *halves]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("aligned")
    return folder, ranks.run(runs, 2, str(folder))


def by_hand() -> dict[float, tuple[float, float]]:
    """m -> (alignment, own) in the first window: two ranks with two micro-batches of four samples, each set by hand."""
    model, dataset, order = network(), points(), SampleOrder(200, seed=1)
    shares = [[order.index(position) for position in range(rank, BATCH, 2)] for rank in (0, 1)]
    groups = [share[i : i + 4] for share in shares for i in (0, 4)]

    def mean(indices: list[int]) -> Tensor:
        inputs, targets = dataset[indices]
        value = (model(inputs) - targets).square().mean()
        return torch.cat([one.flatten() for one in torch.autograd.grad(value, list(model.parameters()))]).double()

    everything = {index for share in shares for index in share}
    rests_of_groups = [[index for index in everything if index not in group] for group in groups]
    found = {}
    for sets in (groups, shares, rests_of_groups):
        pairs = [(mean(one), mean([index for index in everything if index not in one])) for one in sets]
        size = float(len(sets[0]))
        found[size] = (
            sum((own.sign() @ rest).item() for own, rest in pairs) / len(pairs),
            sum(own.abs().sum().item() for own, _ in pairs) / len(pairs),
        )
    return found


@pytest.mark.parametrize("launch", [0, 1])
def test_the_loop_measures_what_sets_written_out_say(launch: int, results: Any) -> None:
    expected = by_hand()
    for rank in results[1]:
        first: Measurement = rank[launch]["seen"][0][3]
        found: Alignment = first.alignments["sign"]
        assert found.samples == BATCH
        assert {one.samples: one.pairs for one in found.readings} == {4.0: 4, 8.0: 2, 12.0: 4}
        for one in found.readings:
            assert (one.alignment, one.own) == pytest.approx(expected[one.samples], rel=1e-4)


def test_it_is_measured_every_few_steps_and_the_same_on_both_ranks(results: Any) -> None:
    ddp, hooks, first_half, second_half = zip(*results[1], strict=True)
    for one, other in (ddp, hooks):
        for step, align, micro_batches, measurement in one["seen"]:
            assert align == (step % EVERY == 0) == bool(measurement.alignments)
            assert micro_batches == (2 if align else 1)
        assert [entry[3].alignments for entry in one["seen"]] == [entry[3].alignments for entry in other["seen"]]
        assert one["estimate"].geometry == "sign"
        assert (one["estimate"].steps, one["estimate"].span) == (8, BATCH + 7 * EVERY * BATCH)


def test_a_run_that_was_stopped_goes_on_measuring_as_if_it_had_not_been(results: Any) -> None:
    _, [[whole, _, _, second], _] = results
    views = [json.loads(json.dumps(one["state"]["measured"]["views"]["sign"])) for one in (whole, second)]
    assert views[0] == views[1] and views[0]["blocks"]
    assert whole["estimate"] == second["estimate"]


def test_it_is_logged(results: Any) -> None:
    last = read_metrics(results[0] / "ddp").steps[-1]
    assert last["geometry"] == "sign"
    assert set(last["views"]) == {"euclidean"}
