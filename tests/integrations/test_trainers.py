"""The passive tap inside trainers that own everything, which stay as they are: Hugging Face's and Lightning's.

Each program trains a small model on real bytes and compares every window with separate backward passes; the tests look
at what it found. See ``_hf_program.py`` and ``_lightning_program.py`` for how the tap is put in.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

# Importing the trainers warns of matters of their own.
pytestmark = pytest.mark.filterwarnings("ignore")

Case = dict[str, Any]
Found = dict[str, Any]

NEEDS = {"_hf_program.py": ("transformers", "accelerate"), "_lightning_program.py": ("lightning",)}

# Cases by number of processes. Both trainers clip at 1.0, Hugging Face's by default, and every window is above that.
CASES: dict[str, dict[int, list[Case]]] = {
    "_hf_program.py": {
        1: [
            {},
            {"told": False},
            {"accumulation": 1},
            {"loss": "means"},
            {"bf16": True},
            {"compiled": True},
            {"early": False, "told": False},
        ],
        2: [
            {},
            {"kind": "ddp", "told": False},
            {"accumulation": 1},
            {"kind": "ddp", "accumulation": 1},
            {"across": False},
            {"kind": "ddp", "loss": "means"},
            {"kind": "ddp", "bf16": True},
            {"kind": "ddp", "early": False, "told": False},
        ],
    },
    "_lightning_program.py": {
        1: [{}, {"accumulation": 1}, {"bf16": True}, {"fp16": True}, {"compiled": True}],
        2: [{}, {"kind": "ddp"}, {"accumulation": 1}, {"kind": "ddp", "accumulation": 1, "bf16": True}],
    },
}


def named(case: Case) -> str:
    """What is special about a case."""
    return "-".join(f"{name}={value}" for name, value in case.items()) or "plain"


EVERY = [
    pytest.param(program, world, case, id=f"{program[1:-11]}-{world}-{named(case)}")
    for program, worlds in CASES.items()
    for world, cases in worlds.items()
    for case in cases
    if case.get("early", True)
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, Case], Found]:
    """What a program found in one case; it runs all its cases of that many processes once."""
    runs: dict[tuple[str, int], list[Found]] = {}

    def look(program: str, world: int, case: Case) -> Found:
        for package in NEEDS[program]:
            pytest.importorskip(package)
        if (program, world) not in runs:
            runs[program, world] = launch(program, world, tmp_path_factory.mktemp("run") / "result.json")
        return runs[program, world][CASES[program][world].index(case)]

    return look


def launch(program: str, world: int, result: pathlib.Path) -> list[Found]:
    """Run a program's cases in ``world`` processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    script = pathlib.Path(__file__).with_name(program)
    command = [sys.executable, *torchrun, str(script), str(result), json.dumps(CASES[program][world])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(result.read_text())


@pytest.mark.parametrize("program, world, case", EVERY)
def test_every_window_agrees_with_separate_backward_passes(
    found: Callable[[str, int, Case], Found], program: str, world: int, case: Case
) -> None:
    # Half precision turns the last bit of a sum into a rounding of its own; the noise is a difference, up to 20 times
    # smaller than what it is the difference of.
    tolerance = 1e-4 if case.get("bf16") or case.get("fp16") else 1e-5
    windows = found(program, world, case)["windows"]
    assert len(windows) == 4
    for window in windows:
        measured, expected = window["measured"], window["expected"]
        assert measured.keys() == expected.keys()
        for name, value in expected.items():
            assert measured[name] == pytest.approx(value, rel=tolerance * (3 if name == "noise" else 1)), name
        assert window["agreed"], "ranks measured differently"
        # one micro-batch in one process is one group: nothing to compare it with
        assert ("signal" in measured) == (world > 1 or case.get("accumulation") != 1)


@pytest.mark.parametrize("program, world, case", EVERY)
def test_training_is_the_same_to_the_last_bit_without_the_tap(
    found: Callable[[str, int, Case], Found], program: str, world: int, case: Case
) -> None:
    assert found(program, world, case)["unchanged"]


@pytest.mark.parametrize("world, kind", [(1, {}), (2, {"kind": "ddp"})])
def test_hugging_face_clips_before_a_callback_can_read_and_that_is_noticed(
    found: Callable[[str, int, Case], Found], world: int, kind: Case
) -> None:
    error = found("_hf_program.py", world, {**kind, "early": False, "told": False})["error"]
    assert "changed between the window's last backward and read()" in error and "early=True" in error
