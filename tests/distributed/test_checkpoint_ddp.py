"""Checkpoints of several ranks: exact resume under DDP, other numbers of ranks, failures on one rank."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from adabatch import distributed
from adabatch.checkpoint import CheckpointError, Checkpoints

SAMPLES = 40


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))


def make(wrap: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = net()
    model = DistributedDataParallel(plain) if wrap else plain
    torch.manual_seed(100 + distributed.rank())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        data = torch.Generator().manual_seed(step * 1000 + distributed.rank())
        optimizer.zero_grad(set_to_none=True)
        loss = model(torch.randn(8, 6, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every parameter, buffer and optimizer entry as exact numbers, which outlive the process."""
    state = optimizer.state_dict()["state"]
    flat = {f"{i}.{key}": value.tolist() for i, entries in state.items() for key, value in entries.items()}
    plain = getattr(model, "module", model).state_dict()
    return {**{name: value.tolist() for name, value in plain.items()}, **flat}


def straight(folder: str) -> tuple[Any, ...]:
    model, optimizer = make(wrap=True)
    train(model, optimizer, 0, 5)
    at_save = contents(model, optimizer)
    extra = {"who": distributed.rank()}
    path = Checkpoints(folder).save(step=5, samples=SAMPLES, model=model, optimizer=optimizer, extra=extra)
    return at_save, train(model, optimizer, 5, 9), contents(model, optimizer), str(path)


def resumed(folder: str) -> tuple[Any, ...]:
    model, optimizer = make(wrap=True)
    torch.manual_seed(999)
    checkpoints = Checkpoints(folder)
    extra = checkpoints.load(checkpoints.latest(), model=model, optimizer=optimizer)
    return extra, train(model, optimizer, 5, 9), contents(model, optimizer)


def grown(folder: str) -> tuple[Any, ...]:
    """Two ranks load what one process saved: parameters, a random number, and the warnings."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("adabatch").addHandler(handler)
    model, optimizer = make(wrap=True)
    checkpoints = Checkpoints(folder)
    checkpoints.load(checkpoints.newest_good().path, model=model, optimizer=optimizer)
    warned = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    return contents(model, optimizer), torch.rand(1).item(), warned


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("ddp")
    return folder, ranks.run(straight, 2, str(folder))


def test_resume_on_as_many_ranks_equals_the_straight_run(saved):
    folder, before = saved
    after = ranks.run(resumed, 2, str(folder))
    for (_, losses, final, path), (extra, resumed_losses, resumed_final) in zip(before, after, strict=True):
        assert path == str(folder / "step-0000000005")
        assert extra == {"who": 0}, "rank 0's extra is the one that is kept"
        assert resumed_losses == losses
        assert resumed_final == final
    assert before[0][1] != before[1][1], "the ranks' dropout differs, or this would show nothing"


def test_buffers_are_rank_zeros(saved):
    """The ranks' running statistics differ until the next forward hands out rank 0's."""
    folder, ((first, *_), (second, *_)) = saved
    assert first["1.running_mean"] != second["1.running_mean"]
    model, optimizer = make(wrap=False)
    Checkpoints(folder).load(folder / "step-0000000005", model=model, optimizer=optimizer)
    assert contents(model, optimizer) == first


def test_two_ranks_to_one_and_back(saved, tmp_path, caplog):
    folder, _ = saved
    model, optimizer = make(wrap=False)
    draws = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        Checkpoints(folder).load(folder / "step-0000000005", model=model, optimizer=optimizer)
        draws.append(torch.rand(1).item())
    assert "saved by 2 ranks and is loaded by 1" in caplog.text
    assert draws[0] == draws[1], "the new seed is a function of what was saved"
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(step=6, samples=48, model=model, optimizer=optimizer, extra={})
    outcomes = ranks.run(grown, 2, str(tmp_path))
    assert all(loaded == contents(model, optimizer) for loaded, *_ in outcomes)
    assert len({draws[0], *(number for _, number, _ in outcomes)}) == 3, "every rank draws its own numbers"
    assert [len(warned) for *_, warned in outcomes] == [1, 0]
    assert "saved by 1 ranks and is loaded by 2" in outcomes[0][2][0]


def failing(folder: str) -> list[str]:
    """Failures that one rank alone has; each must be raised on both ranks, and leave nothing."""
    rank, texts = distributed.rank(), []
    model, optimizer = make(wrap=True)
    checkpoints = Checkpoints(folder)

    def attempt(extra: dict[str, Any] | None = None, samples: int = SAMPLES, step: int = 6) -> None:
        try:
            checkpoints.save(step=step, samples=samples, model=model, optimizer=optimizer, extra=extra or {})
            texts.append("")
        except CheckpointError as error:
            texts.append(str(error))

    attempt({"bad": {1}} if rank == 0 else {})
    attempt(samples=SAMPLES + rank)
    optimizer.param_groups[0]["odd"] = {1} if rank == 1 else None
    attempt()
    optimizer.param_groups[0]["odd"] = None
    for limited in (0, 1):  # rank 0 writes tensors and more, rank 1 its random-number states only
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard) if rank == limited else (soft, hard))
        attempt()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    distributed.barrier()
    texts.append(",".join(sorted(os.listdir(folder))))
    attempt()
    return texts


def test_a_failure_on_one_rank_is_raised_on_all(saved, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    first, second = ranks.run(failing, 2, str(folder), seconds=30.0)
    assert first[1:2] == second[1:2] == ["the ranks are not at the same step: [(6, 40), (6, 41)]"]
    reasons = [
        "rank 0: bad is not JSON",
        "not at the same step",
        "rank 1: optimizer.group0.odd is of type set",
        "File too large",
        "rank 1: OSError: [Errno 27] File too large",
    ]
    for reason, one, other in zip(reasons, first, second, strict=False):
        assert reason in one and reason in other
    assert first[5] == second[5] == "latest,step-0000000005"
    assert first[6] == second[6] == "", "the next save goes through"
    assert Checkpoints(folder).newest_good().path == folder / "step-0000000006"


def damaged(folder: str) -> list[str]:
    model, optimizer = make(wrap=True)
    before = contents(model, optimizer)
    texts = []
    for path in Checkpoints(folder).paths():
        try:
            Checkpoints(folder).load(path, model=model, optimizer=optimizer)
        except CheckpointError as error:
            texts.append(str(error))
    assert before == contents(model, optimizer)
    return texts


def test_damage_is_raised_on_all_ranks(saved, tmp_path):
    """The ranks share the checking of files, so that each damaged file is seen by one of them only."""
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    for name in ("optimizer.json", "rng-00001.json", "__0_0.distcp"):
        (folder / "step-0000000005" / name).write_bytes(b"?")
    first, second = ranks.run(damaged, 2, str(folder), seconds=30.0)
    assert first == second and len(first) == 1
    assert all(name in first[0] for name in ("optimizer.json", "rng-00001.json", "__0_0.distcp"))


def flat(folder: str) -> str:
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        Checkpoints(folder).save(step=1, samples=1, model=model, optimizer=optimizer, extra={})
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_flattened_parameters_are_refused(tmp_path):
    assert all("(FSDP1) cannot be checkpointed here; use" in text for text in ranks.run(flat, 2, str(tmp_path)))
    assert os.listdir(tmp_path) == []


def sharded(folder: str, from_folder: str) -> tuple[Any, ...]:
    """fully_shard: load what DDP saved, train, save, load again."""
    model = net()
    for layer in (model[0], model[3], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoints = Checkpoints(folder)
    Checkpoints(from_folder).load(Path(from_folder) / "step-0000000005", model=model, optimizer=optimizer)
    assert isinstance(optimizer.state[model[0].weight]["exp_avg"], DTensor)
    train(model, optimizer, 5, 6)
    path = checkpoints.save(step=6, samples=48, model=model, optimizer=optimizer, extra={})
    losses = train(model, optimizer, 6, 8)
    checkpoints.load(path, model=model, optimizer=optimizer)
    weight = model[0].weight.full_tensor().tolist()
    return losses, train(model, optimizer, 6, 8), weight


def test_sharded_parameters(saved, tmp_path):
    outcomes = ranks.run(sharded, 2, str(tmp_path), str(saved[0]))
    for losses, again, _ in outcomes:
        assert losses == again
    path = tmp_path / "step-0000000006"
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(os.listdir(path)), "each rank wrote its shards"
    assert json.loads((path / "optimizer.json").read_text())["class"] == "AdamW"
    model, optimizer = make(wrap=False)
    Checkpoints(tmp_path).load(path, model=model, optimizer=optimizer)
    assert model[0].weight.tolist() == outcomes[0][2]
    assert optimizer.state[model[0].weight]["step"] == 6
