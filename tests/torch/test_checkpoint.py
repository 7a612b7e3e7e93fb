"""Checkpoints in one process: exact resume, damage, crashes, full disks, cleaning."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from adabatch.checkpoint import CheckpointError, Checkpoints
from adabatch.checkpoint import files as on_disk

ROOT = Path(__file__).parents[2]
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
}


class Net(nn.Module):
    """Dropout, running statistics, and a branch that only steps from ``late_from`` on use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
        self.late = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor, late: bool) -> torch.Tensor:
        return self.body(inputs) + (self.late(inputs) if late else 0.0)


def make(kind: str = "adamw") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, OPTIMIZERS[kind](model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, late_from: int = 6) -> None:
    for step in range(first, last):
        # Python's and NumPy's generators take part, so that losing their state would show.
        inputs = torch.randn(8, 6) + random.random() + float(np.random.normal())
        optimizer.zero_grad(set_to_none=True)
        model(inputs, step >= late_from).square().mean().backward()
        optimizer.step()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    flat = {f"{i}.{key}": value for i, entries in state.items() for key, value in entries.items() if value is not None}
    return {**model.state_dict(), **flat}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def save(checkpoints: Checkpoints, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, **extra) -> Path:
    return checkpoints.save(step=step, samples=8 * step, model=model, optimizer=optimizer, extra=extra)


def seed_everything() -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    np.random.normal()  # leaves a second Gaussian behind, which is part of NumPy's state


def run_self(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_resume_in_a_new_process_equals_the_straight_run(tmp_path):
    straight = {}
    for kind in OPTIMIZERS:
        model, optimizer = make(kind)
        seed_everything()
        train(model, optimizer, 0, 5)
        save(Checkpoints(tmp_path / kind), 5, model, optimizer, kind=kind)
        train(model, optimizer, 5, 9)
        straight[kind] = contents(model, optimizer)
    run_self("resume", str(tmp_path))
    for kind, expected in straight.items():
        assert same(torch.load(tmp_path / f"{kind}.pt", weights_only=True), expected), kind


def resume_all(folder: Path) -> None:
    for kind in OPTIMIZERS:
        model, optimizer = make(kind)
        checkpoints = Checkpoints(folder / kind)
        assert checkpoints.load(checkpoints.latest(), model=model, optimizer=optimizer) == {"kind": kind}
        train(model, optimizer, 5, 9)
        torch.save(contents(model, optimizer), folder / f"{kind}.pt")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_saving_does_not_disturb_the_run(tmp_path, kind):
    results = []
    for saving in (False, True):
        model, optimizer = make(kind)
        steps = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))  # noqa: B023
        seed_everything()
        for step in range(4):
            if saving:
                save(Checkpoints(tmp_path), step, model, optimizer)
            train(model, optimizer, step, step + 1)
        assert len(steps) == 4
        results.append(contents(model, optimizer))
    assert same(*results)


def test_loading_fires_no_step_and_gives_never_used_parameters_no_state(tmp_path, caplog):
    model, optimizer = make()
    train(model, optimizer, 0, 3)
    path = save(Checkpoints(tmp_path), 3, model, optimizer)
    model, optimizer = make()
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("loading stepped the optimizer"))
    with caplog.at_level(logging.INFO):
        Checkpoints(tmp_path).load(path, model=model, optimizer=optimizer)
    assert model.late.weight not in optimizer.state
    assert optimizer.state[model.body[0].weight]["step"] == 3
    assert "late.weight, late.bias" in caplog.text


def test_a_checkpoint_before_the_first_step_loads(tmp_path):
    model, optimizer = make()
    path = save(Checkpoints(tmp_path), 0, model, optimizer)
    model, optimizer = make()
    train(model, optimizer, 0, 2)
    Checkpoints(tmp_path).load(path, model=model, optimizer=optimizer)
    assert same(contents(model, optimizer), contents(*make())) and not optimizer.state


def test_settings_of_parameter_groups_survive(tmp_path):
    model, _ = make()
    groups = [{"params": model.body.parameters(), "adabatch_kappa": 0.1 + 0.2}, {"params": model.late.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.99), fused=True)
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.param_groups[1].update(adabatch_lr=float("inf"), note="x", unset=None, shape=[1, (2, 3)])
    path = save(Checkpoints(tmp_path), 0, model, optimizer)

    model, _ = make()
    # In the other order, and with the learning rate in a tensor that compiled code would hold on to.
    rate = torch.tensor(7.0)
    fresh = torch.optim.AdamW([{"params": model.late.parameters()}, {"params": model.body.parameters()}], lr=rate)
    Checkpoints(tmp_path).load(path, model=model, optimizer=fresh)
    late, body = fresh.param_groups
    assert body["adabatch_kappa"] == 0.1 + 0.2 and "adabatch_kappa" not in late
    assert late["adabatch_lr"] == float("inf") and late["note"] == "x" and late["unset"] is None
    assert late["shape"] == [1, (2, 3)] and body["betas"] == (0.8, 0.99)
    assert late["fused"] is None
    # The two groups were made to share one tensor, and have different rates now.
    assert late["lr"] is rate and rate == torch.tensor(0.02)
    assert isinstance(body["lr"], torch.Tensor) and body["lr"] == torch.tensor(0.05)


def test_a_number_stays_a_number_when_a_tensor_was_saved(tmp_path):
    model, _ = make()
    path = save(Checkpoints(tmp_path), 0, model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    Checkpoints(tmp_path).load(path, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5 and isinstance(optimizer.param_groups[0]["lr"], float)


class Lion32(torch.optim.Optimizer):
    """Keeps float32 state, a nested entry and a plain number for parameters of any type."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state.setdefault("mean", torch.zeros(param.shape, dtype=torch.float32)).add_(param.grad.float() / 3)
            state.setdefault("rows", {"sum": torch.zeros(param.shape[0])})["sum"].add_(1)
            state["count"] = state.get("count", 0) + 1


def test_state_keeps_its_own_type_and_shape(tmp_path):
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = Lion32(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    path = save(Checkpoints(tmp_path), 1, model, optimizer)
    fresh = Lion32(model.parameters())
    Checkpoints(tmp_path).load(path, model=model, optimizer=fresh)
    state = fresh.state[model.weight]
    assert state["mean"].dtype == torch.float32 and torch.equal(state["mean"], optimizer.state[model.weight]["mean"])
    assert torch.equal(state["rows"]["sum"].float(), torch.ones(2)) and state["count"] == 1


def test_tied_weights_and_module_state_that_is_no_tensor(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.note = {"seen": 0}

        def get_extra_state(self):
            return self.note

        def set_extra_state(self, state):
            self.note = state

    model = Tied()
    model.note = {"seen": 7, "means": torch.ones(2)}
    path = save(Checkpoints(tmp_path), 0, model, torch.optim.SGD(model.parameters(), lr=0.1))
    fresh = Tied()
    Checkpoints(tmp_path).load(path, model=fresh, optimizer=torch.optim.SGD(fresh.parameters(), lr=0.1))
    assert fresh.note["seen"] == 7 and torch.equal(fresh.note["means"], torch.ones(2))
    assert torch.equal(fresh.head.weight, model.embed.weight) and fresh.head.weight is fresh.embed.weight

    model.note = {"unsafe": Path("x")}
    with pytest.raises(CheckpointError, match=r"_extra_state holds a dict that cannot be loaded safely"):
        save(Checkpoints(tmp_path), 1, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_another_model_is_refused_by_name_and_left_alone(tmp_path):
    model, optimizer = make()
    path = save(Checkpoints(tmp_path), 0, model, optimizer)
    other = nn.ModuleDict({"body": nn.Sequential(nn.Linear(6, 17)), "new": nn.Linear(2, 2, bias=False)})
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path).load(path, model=other, optimizer=torch.optim.AdamW(other.parameters()))
    text = str(caught.value)
    assert "not in the checkpoint: new.weight" in text
    assert "not in the model: body.1.bias" in text and "late.weight" in text
    assert "body.0.weight is (17, 6) float32 in the model and (16, 6) float32 in the checkpoint" in text
    assert same(before, other.state_dict())
    with pytest.raises(CheckpointError, match=r"late.weight is \(3, 6\) bfloat16 in the model"):
        half = model.to(torch.bfloat16)
        Checkpoints(tmp_path).load(path, model=half, optimizer=torch.optim.AdamW(half.parameters()))


def test_another_optimizer_is_refused(tmp_path):
    model, optimizer = make()
    path = save(Checkpoints(tmp_path), 0, model, optimizer)
    load = lambda optimizer: Checkpoints(tmp_path).load(path, model=model, optimizer=optimizer)  # noqa: E731
    with pytest.raises(CheckpointError, match="has the state of AdamW, and this run's optimizer is SGD"):
        load(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match="no longer optimized: late.bias, late.weight"):
        load(torch.optim.AdamW(model.body.parameters()))
    with pytest.raises(CheckpointError, match="1 groups were saved that are cut differently from these 2"):
        load(torch.optim.AdamW([{"params": model.body.parameters()}, {"params": model.late.parameters()}]))
    with pytest.raises(CheckpointError, match=r"not the model's, of shapes \[\(2,\)\]"):
        load(torch.optim.AdamW([nn.Parameter(torch.zeros(2))]))
    optimizer.param_groups[0]["rule"] = {1, 2}
    with pytest.raises(CheckpointError, match="optimizer.group0.rule is of type set"):
        save(Checkpoints(tmp_path), 1, model, optimizer)


DAMAGE = {
    "flip": lambda path, at: path.write_bytes(
        (data := path.read_bytes())[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    ),
    "cut": lambda path, at: path.write_bytes(path.read_bytes()[:at]),
    "delete": lambda path, at: path.unlink(),
}
NAMES = ["__0_0.distcp", ".metadata", "optimizer.json", "ledger.json", "rng-00000.json", "manifest.json"]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    model, optimizer = make()
    train(model, optimizer, 0, 1)
    for step in (10, 20):
        save(Checkpoints(folder), step, model, optimizer, ledger=[step])
    return folder


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_passed_over(tmp_path, two, name, damage):
    shutil.copytree(two, tmp_path / "copy")
    checkpoints = Checkpoints(tmp_path / "copy")
    good, damaged = [checkpoints.folder / on_disk.name_of(step) for step in (10, 20)]
    file = damaged / name
    DAMAGE[damage](file, random.Random(f"{name}{damage}").randrange(file.stat().st_size))
    assert checkpoints.latest() == damaged, "a damaged checkpoint is named, not silently replaced by an older one"
    for check in (checkpoints.verify, lambda path: checkpoints.load(path, model=model, optimizer=optimizer)):
        model, optimizer = make()
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            check(damaged)
        assert same(contents(*make()), contents(model, optimizer))
    choice = checkpoints.newest_good()
    assert choice.path == good and len(choice.passed_over) == 1 and name in choice.passed_over[0]
    assert checkpoints.read_extra(good) == {"ledger": [10]}


def test_every_byte_of_the_manifest_counts(two):
    path = Checkpoints(two).latest()
    text = (path / "manifest.json").read_bytes()
    try:
        for at in range(0, len(text), 7):
            (path / "manifest.json").write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
            with pytest.raises(CheckpointError):
                on_disk.verify(path)
    finally:
        (path / "manifest.json").write_bytes(text)
    assert on_disk.verify(path).samples == 160


def test_the_index_cannot_run_code(tmp_path, two):
    shutil.copytree(two, tmp_path / "copy")
    path = Checkpoints(tmp_path / "copy").latest()

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    manifest = on_disk.Manifest.read(path)
    manifest.files[".metadata"] = on_disk.digest(path / ".metadata")
    (path / "manifest.json").write_text(manifest.render())
    model, optimizer = make()
    with pytest.raises(CheckpointError, match="mkdir, which has no place there"):
        Checkpoints(tmp_path).load(path, model=model, optimizer=optimizer)
    assert not (tmp_path / "owned").exists()


def test_a_later_format_is_refused(tmp_path, two):
    shutil.copytree(two, tmp_path / "copy")
    path = Checkpoints(tmp_path / "copy").latest()
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(CheckpointError, match="has checkpoint format 2; this version of adabatch reads 1"):
        Checkpoints(tmp_path).verify(path)


def test_keeps_the_last_ones_and_latest(tmp_path):
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path / "deep" / "folder", keep_last=2)
    assert checkpoints.latest() is None and checkpoints.newest_good() == (None, [])
    for step in (1, 2, 3, 4):
        path = save(checkpoints, step, model, optimizer)
        assert checkpoints.latest() == path == checkpoints.folder / f"step-{step:010d}"
    names = ["latest", "step-0000000003", "step-0000000004"]
    assert sorted(os.listdir(checkpoints.folder)) == names
    (checkpoints.folder / "latest").unlink()
    assert checkpoints.latest() == path
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="keep_last"):
            Checkpoints(tmp_path, keep_last=wrong)


def test_an_abandoned_history_is_not_resumed(tmp_path):
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in (100, 200, 150):  # stopped at 200, resumed by hand from 100
        newest = save(checkpoints, step, model, optimizer)
    assert checkpoints.latest() == newest == checkpoints.newest_good().path
    (newest / "optimizer.json").unlink()
    choice = checkpoints.newest_good()
    assert choice.path == tmp_path / "step-0000000100"
    assert "optimizer.json is missing" in choice.passed_over[0]
    assert "step-0000000200 is of a history that step-0000000150 replaced" in choice.passed_over[1]
    save(checkpoints, 160, model, optimizer)
    assert [path.name[-3:] for path in checkpoints.paths()] == ["160", "150", "200"]


def test_saving_a_step_again_replaces_it(tmp_path):
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    save(checkpoints, 5, model, optimizer, note=1)
    path = save(checkpoints, 5, model, optimizer, note=2)
    assert checkpoints.read_extra(path) == {"note": 2}
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-0000000005"]
    # Killed when the old one had made room and the new one was not there yet.
    path.rename(tmp_path / f".{path.name}.replaced-run7")
    checkpoints = Checkpoints(tmp_path, run="run7")
    assert checkpoints.clean() == [] and checkpoints.latest() == path
    checkpoints.verify(path)


def test_only_the_owner_cleans(tmp_path):
    host = on_disk.owner_name(None).rpartition("-")[0]
    dead = subprocess.Popen(["true"])
    dead.wait()
    owners = {"dead": f"{host}-{dead.pid}", "alive": f"{host}-{os.getppid()}", "host": "elsewhere-1", "run": "run7"}
    for owner in owners.values():
        for kind in ("partial", "old"):
            on_disk.aside(tmp_path, "step-0000000001", kind, owner).mkdir()
    (tmp_path / ".step-notes").mkdir()
    removed = Checkpoints(tmp_path).clean()
    assert removed == [f".step-0000000001.{kind}-{owners['dead']}" for kind in ("old", "partial")]
    assert Checkpoints(tmp_path, run="run7").clean() == [f".step-0000000001.{kind}-run7" for kind in ("old", "partial")]
    assert len(os.listdir(tmp_path)) == 5
    with pytest.raises(ValueError, match="run's id"):
        Checkpoints(tmp_path, run="a/b")


def test_the_first_save_cleans(tmp_path):
    model, optimizer = make()
    on_disk.aside(tmp_path, "step-0000000001", "partial", "run7").mkdir()
    save(Checkpoints(tmp_path, run="run7"), 2, model, optimizer)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-0000000002"]


EXTRA = {"controller": {"a": [1, 2.5, None, True], "big": 2**70, "tiny": 5e-324}, "ledger": [], "text": "é\n", "n": 0.1}


def test_extra_is_a_fixed_point(tmp_path):
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path)
    first = save(checkpoints, 1, model, optimizer, **EXTRA)
    loaded = checkpoints.load(first, model=model, optimizer=optimizer)
    assert loaded == EXTRA == checkpoints.read_extra(first)
    assert checkpoints.read_extra(save(checkpoints, 3, model, optimizer, a={"b": (1, (2,))})) == {"a": {"b": [1, [2]]}}
    second = save(checkpoints, 2, model, optimizer, **loaded)
    for name in (*(f"{key}.json" for key in EXTRA), "optimizer.json", "rng-00000.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"a": float("nan")}, "a is not JSON: Out of range"),
        ({"a": Path("x")}, "a is not JSON: .*PosixPath"),
        ({"a": {1: 2}}, "JSON would not give a back"),
        ({"a": [{"b": ({1: 2},)}]}, "JSON would not give a back"),
        ({"../a": 1}, "'../a' cannot name a file"),
        ({"manifest": 1}, "'manifest' cannot name a file"),
    ],
)
def test_extra_that_is_not_json_is_refused_and_leaves_nothing(tmp_path, extra, reason):
    model, optimizer = make()
    with pytest.raises(CheckpointError, match=reason):
        save(Checkpoints(tmp_path / "new"), 1, model, optimizer, **extra)
    assert os.listdir(tmp_path) == []


def test_random_states_are_per_call_and_optional(tmp_path, caplog):
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path)
    draw = lambda: (torch.rand(2).tolist(), random.gauss(0, 1), np.random.normal(size=3).tolist())  # noqa: E731
    seed_everything()
    with_states = save(checkpoints, 1, model, optimizer)
    without = checkpoints.save(step=2, samples=16, model=model, optimizer=optimizer, extra={}, rng=False)
    expected = draw()
    checkpoints.load(with_states, model=model, optimizer=optimizer)
    assert draw() == expected
    checkpoints.load(with_states, model=model, optimizer=optimizer, rng=False)
    assert draw() != expected
    assert not [record for record in caplog.records if record.name.startswith("adabatch")]
    checkpoints.load(without, model=model, optimizer=optimizer)
    assert "holds no random-number states" in caplog.text


@contextmanager
def small_volume(folder: Path, size: int) -> Iterator[None]:
    """A full disk: a small tmpfs where mounting is allowed, else a limit on the size of files."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True).returncode:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path):
    folder = tmp_path / "disk"
    with small_volume(folder, 2_000_000):
        checkpoints = Checkpoints(folder, keep_last=1)
        small, large = nn.Linear(100, 500), nn.Linear(1000, 500)
        first = save(checkpoints, 1, small, torch.optim.SGD(small.parameters(), lr=0.1))
        for _ in range(2):
            reason = r"step 2 was not saved; earlier ones are as they were: OSError: .*(No space left|File too large)"
            with pytest.raises(CheckpointError, match=reason):
                save(checkpoints, 2, large, torch.optim.SGD(large.parameters(), lr=0.1))
            assert sorted(os.listdir(folder)) == ["latest", first.name]
        fresh = nn.Linear(100, 500)
        checkpoints.load(checkpoints.latest(), model=fresh, optimizer=torch.optim.SGD(fresh.parameters(), lr=0.1))
        assert torch.equal(fresh.weight, small.weight)
        save(checkpoints, 3, small, torch.optim.SGD(small.parameters(), lr=0.1))
        assert sorted(os.listdir(folder)) == ["latest", "step-0000000003"]


@pytest.mark.parametrize("broken", ["rename", "replace"])
def test_a_failing_rename_leaves_the_old_checkpoint(tmp_path, monkeypatch, broken):
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path)
    path = save(checkpoints, 1, model, optimizer, note=1)

    def fail(self, target):
        if ".partial-" in self.name or self.name == ".latest.new":
            raise OSError(28, "No space left on device")
        return os.rename(self, target)

    monkeypatch.setattr(Path, broken, fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(checkpoints, 1, model, optimizer, note=2)
    monkeypatch.undo()
    assert checkpoints.latest() == path and checkpoints.newest_good().path == path
    assert sorted(name for name in os.listdir(tmp_path) if name != ".latest.new") == ["latest", path.name]


def test_an_interrupt_is_not_swallowed(tmp_path, monkeypatch):
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(checkpoints, 1, model, optimizer)
    assert os.listdir(tmp_path) == []


def test_killed_at_random_moments_the_latest_always_loads(tmp_path):
    result = json.loads(run_self("kill", str(tmp_path)))
    assert result["kills"] == 8 and result["bad"] == []
    assert result["half_written"] > 0, "no kill fell into a save, so this showed nothing"
    assert result["left"] == [], "what the dead left was not cleaned"


def kill_repeatedly(folder: Path) -> None:
    """Fork a process that saves all the time, kill it, check what it left; eight times."""
    torch.set_num_threads(1)
    checkpoints, step, bad, half_written, kills = Checkpoints(folder, keep_last=2), 0, [], 0, 0
    pause = random.Random(5)
    while kills < 8:
        child = os.fork()
        if child == 0:
            try:
                save_forever(folder, step)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 10
        while not (folder / on_disk.name_of(step + 2)).exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(pause.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        kills += os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        half_written += any(folder.glob(".step-*.partial-*"))
        model = nn.Linear(40, 40)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        latest = checkpoints.latest()
        extra = checkpoints.load(latest, model=model, optimizer=optimizer)
        if not (model.weight == extra["at"]).all() or latest.name != on_disk.name_of(extra["at"]):
            bad.append(latest.name)
        if extra["at"] < step + 1:
            bad.append(f"{latest.name} is older than what was there before")
        step = extra["at"]
    checkpoints.clean()
    left = [name for name in os.listdir(folder) if ".partial-" in name or ".old-" in name]
    print(json.dumps({"kills": kills, "bad": bad, "half_written": half_written, "left": left}))


def save_forever(folder: Path, step: int) -> None:
    model, checkpoints = nn.Linear(40, 40), Checkpoints(folder, keep_last=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        step += 1
        with torch.no_grad():
            model.weight.fill_(step)
        save(checkpoints, step, model, optimizer, at=step)


if __name__ == "__main__":
    {"resume": resume_all, "kill": kill_repeatedly}[sys.argv[1]](Path(sys.argv[2]))
