"""``adabatch curvature`` on a finished run of the language model, which two ranks have trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LM = Path(__file__).parents[2] / "recipes" / "lm" / "train.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SMALL = """
    model=gpt_tiny policy=fixed policy.global_batch=16 stop.samples=160 checkpoint.every=80 logger=quiet
    evaluation.samples=8 evaluation.every=160 lr_schedule.warmup=0
""".split()
SETTINGS = ("curvature.samples=240", "curvature.per_group=1")


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )


def verb(*arguments: object) -> subprocess.CompletedProcess[str]:
    return python("-m", "adabatch.cli", "curvature", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "lm"
    done = python(*TORCHRUN, LM, *SMALL, f"run_folder={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_it_diagnoses_the_checkpoints_of_a_run_and_touches_nothing(folder: Path) -> None:
    before = contents(folder)
    latest, earlier = verb(folder, *SETTINGS, "--json"), verb(folder, "--step", 5, *SETTINGS)
    assert (latest.returncode, earlier.returncode) == (0, 0), latest.stderr + earlier.stderr
    found = json.loads(latest.stdout)
    assert (found["run"], found["step"], found["sample"], found["sets"]) == ("lm", 10, 160, 10)
    assert (found["samples"], found["curvature_samples"]) == (160, 80)
    # Early in training the Hessian's trace with the noise is far above 0, whatever the signal.
    assert found["noise"] > 0 and found["state"] in ("resolved", "unresolved") and found["low"] > 0
    assert earlier.stdout.startswith("lm: curvature at step 5, samples from 80 on\n")
    assert "B_noise" in earlier.stdout and "B_simple" in earlier.stdout
    assert contents(folder) == before
