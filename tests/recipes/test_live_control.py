"""A running job on two ranks is told to change: by the verb, by a broken file, and killed right after."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from adabatch.checkpoint import Checkpoints, tensors
from adabatch.config import control
from adabatch.ledger import Ledger
from adabatch.runlog import read_metrics
from adabatch.runlog.reader import Record

LM = Path(__file__).parents[2] / "recipes" / "lm" / "train.py"
MODEL = "model=gpt_tiny damping=off evaluation.every=1M evaluation.samples=16 lr_schedule.warmup=0".split()
ENDLESS = "stop.samples=1M lr_schedule.horizon=1M noise.decide_every=4 logger.names=[jsonl] checkpoint.every=96".split()
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(*overrides: object) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [sys.executable, *launcher, str(LM), *map(str, overrides)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        output = process.communicate(timeout=100)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def kill(folder: Path, process: subprocess.Popen[str]) -> None:
    """End the first rank at once, as the lock names it; the launcher then ends the other and itself."""
    held = re.match(r"process (\d+) on", (folder / "lock").read_text(encoding="utf-8"))
    if held:
        os.kill(int(held[1]), signal.SIGKILL)
    else:
        process.terminate()
    process.communicate(timeout=60)


def verb(folder: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "adabatch.cli", "control", str(folder), *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def await_until(process: subprocess.Popen[str], condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"it did not happen: {process.stdout.read() if process.poll() is not None else 'too slow'}")


@dataclass
class Told:
    """What was said to a run, and what it left when it was killed."""

    folder: Path
    first: tuple[int, str]
    refused: tuple[int, str]
    broken: dict[str, Any]
    last: tuple[int, str]
    controls: list[Record]
    ledger: Ledger


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """Target and limit by the verb, a broken file by hand, another policy by the verb, and a kill right after."""
    folder = tmp_path_factory.mktemp("live") / "run"
    process = start(*MODEL, *ENDLESS, "limits.max_batch=16", f"run_folder={folder}")
    try:
        await_until(process, lambda: (folder / "metrics.jsonl").exists() and read_metrics(folder).checkpoints)
        first = verb(folder, "policy.target_efficiency=0.3", "limits.min_batch=32", "limits.max_batch=64", "--wait")
        refused = verb(folder, "limits.max_batch=1")
        (folder / control.REQUEST).write_text("limits: {max_batch: [", encoding="utf-8")
        broken = await_until(process, lambda: one if (one := control.read_answer(folder))["outcome"] != "taken" else {})
        last = verb(folder, "policy=fixed", "policy.global_batch=48", "checkpoint.every=1M", "--wait")
        kill(folder, process)
        yield Told(folder, first, refused, broken, last, read_metrics(folder).controls, Ledger.load(folder))
    finally:
        if process.poll() is None:
            kill(folder, process)


@pytest.fixture(scope="module")
def gone_on(told: Told) -> tuple[Path, int, int]:
    """The killed run, gone on with to a near end: its folder, and the samples that it went on from and ended at."""
    checkpoints = Checkpoints(told.folder / "checkpoints")
    kept = checkpoints.verify(checkpoints.latest()).samples
    finish(start(f"resume={told.folder}", f"stop.samples={kept + 200}"))
    return told.folder, kept, kept + 200


def test_the_verb_foretells_the_change_and_the_run_takes_it(told: Told) -> None:
    status, said = told.first
    assert status == 0, said
    assert "limits.max_batch: 16 -> 64\n" in said and "policy.target_efficiency: 0.5 -> 0.3\n" in said
    assert "within 4 steps" in said and "taken at step" in said
    status, said = told.refused
    assert status == 2 and "limits.min_batch=32 is above limits.max_batch=1" in said


def test_ledger_and_metrics_tell_the_same(told: Told) -> None:
    assert [one["outcome"] for one in told.controls] == ["taken", "refused", "taken"]
    assert told.broken["outcome"] == "refused" and "not readable as YAML" in told.broken["reason"]
    taken = [one for one in told.controls if one["outcome"] == "taken"]
    assert [one["changes"] for one in taken] == [list(splice.changes) for splice in told.ledger.splices]
    assert [one["samples"] for one in taken] == [splice.sample for splice in told.ledger.splices]
    first = told.ledger.splices[0].sample
    assert told.ledger.batch_at_sample(first - 1) <= 16 < 32 <= told.ledger.batch_at_sample(first)
    assert told.last[0] == 0 and "policy.name: target_efficiency -> fixed" in told.last[1]


def test_a_killed_run_goes_on_under_what_it_was_told(gone_on: tuple[Path, int, int]) -> None:
    folder, kept, end = gone_on
    ledger = Ledger.load(folder)
    assert ledger.samples == end and ledger.batch_at_sample(kept) == 48
    changed = {one["key"]: one["new"] for splice in ledger.splices for one in splice.changes}
    assert (changed["policy.name"], changed["policy.global_batch"], changed["limits.max_batch"]) == ("fixed", 48, 64)
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    assert "global_batch: 48" in text and "max_batch: 64" in text


def test_its_ledger_replays_to_the_same_weights(gone_on: tuple[Path, int, int], tmp_path: Path) -> None:
    folder, _, end = gone_on
    replay = [f"policy.ledger={folder / 'ledger.json'}", "policy=replay", f"run_folder={tmp_path / 'replay'}"]
    horizon = ["lr_schedule.horizon=1M", "logger.names=[jsonl]", f"stop.samples={end}"]
    # The reference batch, where the configured rate holds, is the first batch of either run.
    finish(start(*MODEL, *horizon, *replay))
    assert not Ledger.load(tmp_path / "replay").diff(Ledger.load(folder))
    ours, theirs = weights(tmp_path / "replay"), weights(folder)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    path = Checkpoints(folder / "checkpoints").latest()
    found = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype) for name, stored in tensors.describe(path).items()
    }
    tensors.read(path, found)
    return found
