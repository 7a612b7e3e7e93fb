"""``adabatch calibrate`` on a run of a recipe, as users start it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LM = Path(__file__).parents[2] / "recipes" / "lm" / "train.py"
SMALL = """
    model=gpt_tiny stop.samples=256 checkpoint.every=128 evaluation.samples=16 lr_schedule.warmup=0 logger=quiet
    policy=fixed policy.global_batch=16
""".split()
SETTINGS = """
    calibrate.batches=[4,8,16] calibrate.samples=128 calibrate.pairs=2 calibrate.halvings=1 calibrate.held_out=16
    calibrate.noise_samples=256
""".split()


def started(*command: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "lm"
    started(LM, *SMALL, f"run_folder={folder}")
    return folder


def test_it_calibrates_on_two_ranks_and_writes_one_file(folder: Path) -> None:
    before = contents(folder)
    verb = ("-m", "adabatch.cli", "calibrate", folder, "--steps", "early,late", "--nproc", "2", "--json")
    printed = json.loads(started(*verb, *SETTINGS).stdout)
    after = contents(folder)
    del after["calibrations.json"]
    assert after == before
    assert [(one["step"], one["world"]) for one in printed] == [(8, 2), (16, 2)]
    assert json.loads((folder / "calibrations.json").read_text()) == printed
    assert set(printed[1]["noise"]) == {"euclidean", "adam", "adam_sqrt", "sign"}
    for one in printed:
        assert all(len(branch["losses"]) == 2 for branch in one["branches"].values())


def test_shards_are_refused_with_the_way_out(folder: Path) -> None:
    verb = ("-m", "adabatch.cli", "calibrate", folder, "parallelism=fsdp", "--nproc", "2")
    assert "use parallelism=ddp for it" in started(*verb, *SETTINGS, status=1).stderr
