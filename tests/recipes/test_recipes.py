"""The recipes as users start them: by torchrun and without it, stopped, resumed, replayed, refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from adabatch.checkpoint import Checkpoints, tensors
from adabatch.ledger import Ledger
from adabatch.runlog import read_metrics

RECIPES = Path(__file__).parents[2] / "recipes"
LM, IMAGE = RECIPES / "lm" / "train.py", RECIPES / "image" / "train.py"
# Small, and damped so little that the batch changes several times.
SMALL = """
    evaluation.every=200 evaluation.samples=32 checkpoint.every=160 lr_schedule.warmup=0 noise.decide_every=4
""".split()
SMALL_LM = [*SMALL, "model=gpt_tiny", "model.dropout=0.1", "damping=off", "policy.target_efficiency=0.2"]
CONFIG_ERROR = 2


def command(program: Path, overrides: Sequence[object], ranks: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, str(program), *map(str, overrides)]


def start(program: Path, *overrides: object, ranks: int = 1) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(program, overrides, ranks),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(process: subprocess.Popen[str], seconds: float = 100.0) -> str:
    try:
        return process.communicate(timeout=seconds)[0]
    finally:
        process.kill()


def launch(program: Path, *overrides: object, ranks: int = 1) -> str:
    """Start a program, see it succeed, and return what it printed."""
    process = start(program, *overrides, ranks=ranks)
    output = output_of(process)
    assert process.returncode == 0, output
    return output


def refused(program: Path, *overrides: object) -> str:
    """Start a program, see it refuse its configuration without a traceback, and return what it said."""
    process = start(program, *overrides)
    output = output_of(process)
    assert process.returncode == CONFIG_ERROR, output
    assert "Traceback" not in output and output.count("configuration error: ") == 1
    return output


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """Model and optimizer tensors of a run's last checkpoint."""
    path = Checkpoints(folder / "checkpoints").latest()
    found = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype) for name, stored in tensors.describe(path).items()
    }
    tensors.read(path, found)
    return found


def launches(folder: Path) -> list[dict]:
    return json.loads((folder / "launches.json").read_text())


# -- a run from start to end, by torchrun


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def lm_run(runs) -> tuple[Path, str]:
    """The language model on two ranks, with every logger: its folder, and what it printed."""
    folder = runs / "lm"
    output = launch(LM, *SMALL_LM, "stop.samples=483", "logger.every=4", f"run_folder={folder}", ranks=2)
    return folder, output


def test_a_run_leaves_its_files(lm_run) -> None:
    folder, output = lm_run
    assert f"report: {folder / 'report.html'}" in output
    assert "<html" in (folder / "report.html").read_text()
    assert list(folder.rglob("events.out.tfevents.*"))
    [entry] = launches(folder)
    assert entry["program"] == str(LM) and entry["world"] == 2 and "stop.samples=483" in entry["overrides"]
    assert "target_efficiency: 0.2" in (folder / "config.yaml").read_text()
    checkpoints = Checkpoints(folder / "checkpoints")
    assert checkpoints.verify(checkpoints.latest()).samples == 483
    assert not list((folder / "checkpoints").glob(".*")), "nothing half written is left"


def test_its_metrics_and_its_ledger_tell_the_same_story(lm_run) -> None:
    folder, _ = lm_run
    ledger, read = Ledger.load(folder), read_metrics(folder)
    assert ledger.samples == read.end["samples"] == 483 and read.end["reason"] == "budget"
    assert ledger.steps == read.steps[-1]["step"] == read.end["summary"]["steps"]
    assert len({segment.global_batch for segment in ledger.segments}) >= 3
    changes = [(one.step, one.previous, one.batch) for one in ledger.decisions if one.changed]
    assert changes == [(one["step"], one["previous"], one["batch"]) for one in read.decisions if one["changed"]]
    assert [record["global_batch"] for record in read.steps] == [
        ledger.batch_at_step(record["step"] - 1) for record in read.steps
    ]
    assert read.end["tokens"] == 483 * 64
    first, last = read.evaluations[0], read.evaluations[-1]
    assert (first["samples"], last["samples"]) == (0, 483) and last["loss"] < first["loss"] - 0.3
    assert read.end["summary"]["ended"] == "the budget is used up"
    assert not any("end record" in caveat for caveat in read.end["summary"]["caveats"])


def test_replaying_its_ledger_gives_the_same_batches_and_the_same_parameters(lm_run, runs) -> None:
    source, folder = lm_run[0], runs / "replay"
    others = [override for override in SMALL_LM if not override.startswith("policy.")]
    ledger = f"policy.ledger={source / 'ledger.json'}"
    launch(
        LM, *others, "policy=replay", ledger, "stop.samples=483", "logger=quiet", "logger.every=4",
        f"run_folder={folder}", ranks=2,
    )  # fmt: skip
    ours, theirs = (Ledger.load(run) for run in (folder, source))
    assert not ours.diff(theirs) and ours.steps == theirs.steps
    ours, theirs = parameters(folder), parameters(source)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    losses = [[record["loss"] for record in read_metrics(run).evaluations] for run in (folder, source)]
    assert losses[0] == losses[1]
    rates = [[record["lr"] for record in read_metrics(run).steps] for run in (folder, source)]
    assert rates[0] == rates[1] and len(set(rates[0])) > 3


# -- going on


@pytest.fixture(scope="module")
def resumed_run(lm_run, runs) -> tuple[Path, str]:
    """The same run, gone on with on one rank and without a launcher, with another target and a longer budget."""
    folder = runs / "resumed"
    shutil.copytree(lm_run[0], folder)
    return folder, launch(LM, f"resume={folder}", "policy.target_efficiency=0.3", "stop.samples=600")


def test_resuming_lists_what_was_restored_and_what_changed(resumed_run) -> None:
    folder, output = resumed_run
    assert f"resumed {folder} at step" in output and "sample 483" in output
    assert "policy.target_efficiency: 0.2 -> 0.3 (applied)" in output
    assert "ranks: 2 -> 1 (applied)" in output
    [resume] = read_metrics(folder).resumes
    keys = [change["key"] for change in resume["changes"]]
    assert keys == ["policy.target_efficiency", "stop.samples", "ranks"]


def test_the_ledger_shows_the_splice_and_keeps_the_past(resumed_run, lm_run) -> None:
    before, after = Ledger.load(lm_run[0]), Ledger.load(resumed_run[0])
    assert after.samples == 600
    assert after.segments[: len(before.segments)] == before.segments
    [splice] = after.splices
    assert (splice.step, splice.sample) == (before.steps, 483)
    change = next(one for one in splice.changes if one["key"] == "policy.target_efficiency")
    assert (change["old"], change["new"]) == (0.2, 0.3)


def test_a_resumed_run_keeps_the_earlier_configuration_and_learns_on(resumed_run, lm_run) -> None:
    folder, _ = resumed_run
    assert "target_efficiency: 0.2" in (folder / "config.1.yaml").read_text()
    assert "target_efficiency: 0.3" in (folder / "config.yaml").read_text()
    assert [entry["world"] for entry in launches(folder)] == [2, 1]
    read = read_metrics(folder)
    steps = [record["step"] for record in read.steps]
    assert steps == sorted(set(steps)) and read.steps[-1]["samples"] == 600
    assert read.evaluations[-1]["loss"] < read_metrics(lm_run[0]).evaluations[-1]["loss"]


def test_what_cannot_change_is_refused_all_at_once(lm_run) -> None:
    said = refused(LM, f"resume={lm_run[0]}", "order_seed=1", "model=gpt_small", "data.sequence_length=32")
    assert "cannot change" in said
    for change in ("order_seed: 0 -> 1", "model.size: '0.1M' -> '0.5M'", "data.sequence_length: 64 -> 32"):
        assert change in said
    assert len(launches(lm_run[0])) == 1


def test_another_program_cannot_go_on_with_it(lm_run) -> None:
    assert "is a run of the program 'lm', and this is 'image'" in refused(IMAGE, f"resume={lm_run[0]}")


def test_text_that_was_edited_meanwhile_is_refused(tmp_path) -> None:
    texts, folder = tmp_path / "texts", tmp_path / "run"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"Chapter {number}. " + "The cat sat on the mat. " * (20 + number))
    options = [*SMALL_LM, "data=text", f"data.path={texts}", "data.held_out=0.2", "logger=quiet", "stop.samples=64"]
    launch(LM, *options, f"run_folder={folder}")
    assert "already holds a run" in refused(LM, *options, f"run_folder={folder}")
    (texts / "7.txt").write_text("Chapter 7. " + "The dog sat on the mat. " * 27)
    said = refused(LM, f"resume={folder}", "stop.samples=128")
    assert "the data set is not the one that the run was started on" in said
    assert Ledger.load(folder).samples == 64 and len(launches(folder)) == 1


# -- stopping


@pytest.fixture(scope="module")
def stopped_run(runs) -> Iterator[tuple[Path, str, str]]:
    """A run on two ranks that gets SIGTERM at its launcher: its folder, what it printed, and what another launch in
    the same folder was told meanwhile."""
    folder = runs / "stopped"
    options = [*SMALL_LM, "stop.samples=1M", "evaluation.every=1M", "checkpoint.every=1M", "logger.names=[jsonl]"]
    process = start(LM, *options, "limits.max_batch=32", f"run_folder={folder}", ranks=2)
    try:
        await_steps(folder, process)
        meanwhile = refused(LM, f"resume={folder}")
        process.send_signal(signal.SIGTERM)
        yield folder, output_of(process), meanwhile
    finally:
        process.kill()


def await_steps(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a run has logged its first steps."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and read_metrics(folder).steps:
            return
        time.sleep(0.05)
    raise AssertionError(f"no step was logged: {output_of(process, 1)}")


def test_sigterm_to_torchrun_saves_and_says_how_to_go_on(stopped_run) -> None:
    folder, output, _ = stopped_run
    assert "ended by SIGTERM" in output and f"go on with resume={folder}" in output
    checkpoints = Checkpoints(folder / "checkpoints")
    manifest = checkpoints.verify(checkpoints.latest())
    read = read_metrics(folder)
    assert read.end["reason"] == "SIGTERM" and manifest.samples == read.end["samples"] == Ledger.load(folder).samples
    assert (folder / "report.html").exists()


def test_a_folder_is_one_launch_s_at_a_time(stopped_run) -> None:
    folder, _, meanwhile = stopped_run
    assert f"{folder} is in use by process" in meanwhile


# -- refused before training


def test_a_typo_is_refused_with_the_valid_names(tmp_path) -> None:
    runs = f"runs={tmp_path / 'runs'}"
    said = refused(LM, runs, "policy.target_eficiency=0.5", "optimiser=sgd")
    assert "policy.target_efficiency" in said and "repay" in said
    assert "optimizer" in said and "lr_schedule" in said
    assert "stop.samples" in refused(LM, runs, "stop.samples=many")
    assert not (tmp_path / "runs").exists()


def test_validate_checks_without_training(tmp_path) -> None:
    runs = f"runs={tmp_path / 'runs'}"
    output = launch(LM, *SMALL_LM, runs, "job=validate", "limits.start_batch=24")
    assert "24 = 1 ranks x 3 micro-batches of at most 8" in output
    said = refused(LM, *SMALL_LM, runs, "job=validate", "limits.start_batch=20")
    assert all(number in said for number in ("limits.start_batch=20", "1 ranks", "micro-batch 8", "16 or 24"))
    assert not (tmp_path / "runs").exists()


# -- the other recipe


@pytest.fixture(scope="module")
def image_run(runs) -> tuple[Path, Path, str]:
    """The digits on one rank, and a copy gone on with on two: both folders, and what the second printed."""
    first, second = runs / "image", runs / "image-resumed"
    options = [*SMALL, "damping.dwell=0", "damping.interval_gate=false", "logger=quiet", "limits.start_batch=8"]
    launch(IMAGE, *options, "stop.samples=400", f"run_folder={first}")
    shutil.copytree(first, second)
    return first, second, launch(IMAGE, f"resume={second}", "stop.samples=1k", ranks=2)


def test_the_image_recipe_trains_without_a_launcher(image_run) -> None:
    folder, _, _ = image_run
    ledger, read = Ledger.load(folder), read_metrics(folder)
    assert ledger.samples == 400 and any(decision.changed for decision in ledger.decisions)
    assert [record["samples"] for record in read.evaluations][0::2] == [0, 400]
    assert read.evaluations[-1]["loss"] < read.evaluations[0]["loss"]
    assert 0 <= read.evaluations[0]["accuracy"] < read.evaluations[-1]["accuracy"] <= 1
    assert (folder / "report.html").exists() and Checkpoints(folder / "checkpoints").latest() is not None


def test_it_goes_on_by_torchrun_on_two_ranks(image_run) -> None:
    first, second, output = image_run
    assert "ranks: 1 -> 2 (applied)" in output and "stop.samples: 400 -> 1k (applied)" in output
    before, after = Ledger.load(first), Ledger.load(second)
    assert after.samples == 1000
    assert [after.batch_at_step(step) for step in range(before.steps)] == [
        before.batch_at_step(step) for step in range(before.steps)
    ]
    assert read_metrics(second).steps[-1]["world"] == 2
    assert read_metrics(second).evaluations[-1]["loss"] < read_metrics(first).evaluations[-1]["loss"]


# -- sharded


def losses(folder: Path) -> dict[int, float]:
    return {record["samples"]: record["loss"] for record in read_metrics(folder).evaluations}


def test_a_sharded_run_learns_the_same_and_goes_on_without_shards(runs) -> None:
    """The same samples under HSDP on four ranks and in one process; then the shards go on under two ranks of DDP."""
    same = [*SMALL, "model=gpt_tiny", "policy=stages", "policy.stages='0:16, 64:32'", "stop.samples=160"]
    alone, sharded = runs / "alone", runs / "sharded"
    launch(LM, f"run_folder={alone}", *same)
    more = ["parallelism=fsdp", "parallelism.replicas=2", "limits.micro_batch=4", "logger.names=[jsonl]"]
    launch(LM, f"run_folder={sharded}", *same, *more, ranks=4)
    assert losses(sharded)[160] == pytest.approx(losses(alone)[160], abs=5e-4)
    launch(LM, f"resume={sharded}", "parallelism=ddp", "stop.samples=320", ranks=2)
    launch(LM, f"resume={alone}", "stop.samples=320")
    assert losses(sharded)[320] == pytest.approx(losses(alone)[320], abs=5e-4)
