"""Live control: what a running job may be asked to change, by a file or by the verb, and what comes of it."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from programs import SMALL

from adabatch.checkpoint import Checkpoints, tensors
from adabatch.cli import main
from adabatch.config import ConfigError, Task, control, launch
from adabatch.config.resume import Change, read_launches, save_snapshot
from adabatch.ledger import Ledger
from adabatch.report import write_report
from adabatch.runlog import read_metrics

Task_ = Callable[[DictConfig], Task]


def saved(folder: Path, *overrides: str) -> Path:
    """What a launch leaves in its run folder, as far as a control file is judged by it."""
    config = programs.composed("lm", *overrides)
    OmegaConf.update(config, "scaling.reference_batch", 16)
    OmegaConf.update(config, "limits.rounding", "micro_batch")
    folder.mkdir(parents=True, exist_ok=True)
    launched = {"program": "train.py", "config": "lm", "overrides": list(overrides), "world": 2}
    save_snapshot(folder, OmegaConf.to_container(config, resolve=True), launched)
    return folder


# -- the file


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("limits.max_batch: 512", ["limits.max_batch=512"]),
        ("limits: {min_batch: 8, max_batch: 512}", ["limits.min_batch=8", "limits.max_batch=512"]),
        ("policy: fixed\npolicy.global_batch: 64", ["policy=fixed", "policy.global_batch=64"]),
        ("damping: off", ["damping=off"]),
        ("damping.growth: 1e9", ["damping.growth=1000000000.0"]),
        ("damping: {monotone: true, dwell: null}", ["damping.monotone=true", "damping.dwell=null"]),
        ("policy.stages: '0:16, 1k:32'", ['policy.stages="0:16, 1k:32"']),
        ("# nothing yet\n", []),
        ("", []),
    ],
)
def test_a_control_file_says_what_a_command_line_says(text: str, overrides: list[str]) -> None:
    assert list(control.read_request(text.encode()).overrides) == overrides


@pytest.mark.parametrize("text", [b"limits: [", b"- limits.max_batch=5", b"\xff\xfe", b"a: 1\na: 2"])
def test_what_is_no_mapping_is_refused_in_words(text: bytes) -> None:
    with pytest.raises(ConfigError, match="control.yaml"):
        control.read_request(text)


def test_what_the_verb_writes_reads_back(tmp_path: Path) -> None:
    asked = ["policy=stages", "policy.stages='0:16, 1k:32'", "damping=off", "damping.growth=1e9", "stop.loss=null"]
    asked += ["checkpoint.every=20k", "damping.monotone=true", "limits.max_batch=64"]
    digest = control.write_request(tmp_path, asked)
    request = control.read_request((tmp_path / control.REQUEST).read_bytes())
    assert request.digest == digest
    values = [(control.parse(one).key_or_group, control.parse(one).value()) for one in asked]
    read = [(control.parse(one).key_or_group, control.parse(one).value()) for one in request.overrides]
    assert [(key, getattr(value, "text", value)) for key, value in read] == [
        (key, getattr(value, "text", value)) for key, value in values
    ]
    assert control.write_request(tmp_path, asked) != digest, "the same again is another request"
    assert [path.name for path in tmp_path.iterdir()] == [control.REQUEST], "nothing half written is left"


# -- what may change


def test_a_request_is_composed_as_a_resumed_launch_would(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", "policy.calibration=2.0", "limits.max_batch=256")
    checked = control.check("lm", folder, ["policy.target_efficiency=0.8", "limits.max_batch=512"])
    assert checked.changes == [
        Change("limits.max_batch", 256, 512, "applied live"),
        Change("policy.target_efficiency", 0.5, 0.8, "applied live"),
    ]
    assert (checked.config.policy.calibration, checked.config.scaling.reference_batch) == (2.0, 16)
    assert checked.overrides[-2:] == ["policy.target_efficiency=0.8", "limits.max_batch=512"]
    assert control.check("lm", folder, ["limits.max_batch=256"]).changes == []


REFUSED = {
    "limits.micro_batch=4": r"cannot change limits.micro_batch. Stop it and go on with resume=\S+ limits.micro_batch=",
    "optimizer.lr=1": r"cannot change optimizer.lr. Stop it and go on with resume=",
    "model.dropout=0.1": "model.dropout stays as the run began: start a new run",
    "order_seed=3": "order_seed stays as the run began: start a new run",
    "limits.max_bach=64": "Did you mean limits.max_batch?",
    "resume=elsewhere": "cannot change resume",
    "policy.target_eficiency=0.5": "Did you mean policy.target_efficiency?",
    "policy=fixd": "Did you mean fixed?",
    "policy=fixed": "must be given: policy.global_batch",
    "limits.max_batch=many": "limits.max_batch",
    "policy.target_efficiency=1.5": "must be in",
    "limits.max_batch=64,128": "lists several values",
    "+limits.max_batch=64": "neither added, deleted nor moved",
}


@pytest.mark.parametrize(("override", "words"), REFUSED.items(), ids=REFUSED)
def test_what_a_job_cannot_take_is_refused_with_the_way_out(override: str, words: str, tmp_path: Path) -> None:
    """Field cases D05 and D06."""
    with pytest.raises(ConfigError, match=words):
        control.check("lm", saved(tmp_path / "run"), [override])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["limits.max_batch=1"], "no global batch in .1, 1. can be made from 2 ranks"),
        (["limits.min_batch=5000"], "limits.min_batch=5000 is above limits.max_batch=4096"),
        (["policy=fixed", "policy.global_batch=8192"], "outside limits.min_batch"),
        (["policy=fixed", "policy.global_batch=18"], "cannot be made from 2 ranks"),
        (["policy=replay", "policy.ledger=nowhere.json"], "there is no ledger at nowhere.json"),
        (["damping.dead_band=3"], "damping.dead_band between 1 and damping.growth"),
    ],
)
def test_what_no_run_could_use_is_found_before_it_is_asked_for(
    overrides: list[str], words: str, tmp_path: Path
) -> None:
    checked = control.check("lm", saved(tmp_path / "run"), overrides)
    with pytest.raises(ValueError, match=words):
        control.require_possible(checked.config, 2)


def test_a_measuring_policy_where_nothing_is_measured_is_found_too(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", "noise=off", "policy=observe")
    checked = control.check("lm", folder, ["policy=target_efficiency"])
    with pytest.raises(ValueError, match="measures none"):
        control.require_possible(checked.config, 2)


# -- the verb


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A run folder that another process holds."""
    folder = saved(tmp_path / "run")
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'a+'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        yield folder
        process.stdin.close()


def test_the_verb_says_what_will_happen_and_what_it_could_not_ask(held: Path, capsys) -> None:
    assert main(["control", str(held), "policy.target_efficiency=0.8"]) == 0
    said = capsys.readouterr().out
    assert "policy.target_efficiency: 0.5 -> 0.8\n" in said and "within 16 steps" in said
    assert main(["control", str(held), "limits.max_batch=64"]) == 0
    assert "together with what the run has not answered yet: policy.target_efficiency=0.8" in capsys.readouterr().out
    before = (held / control.REQUEST).read_bytes()
    assert list(control.read_request(before).overrides) == ["policy.target_efficiency=0.8", "limits.max_batch=64"]
    for wrong in (["model.dropout=0.5"], ["limits.max_batch=1"], []):
        assert main(["control", str(held), *wrong]) == 2
        assert capsys.readouterr().err.startswith("adabatch control: ")
    assert (held / control.REQUEST).read_bytes() == before, "what was refused is not asked for"


def test_the_verb_waits_for_the_answer(held: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["taken", "refused"])

    def answered(seconds: float) -> None:
        digest = control.digest_of((held / control.REQUEST).read_bytes())
        told = {"digest": digest, "outcome": next(answers), "reason": "no", "step": 7, "samples": 1120}
        control.write_answer(held, told)

    monkeypatch.setattr(control.time, "sleep", answered)
    assert main(["control", str(held), "limits.max_batch=64", "--wait"]) == 0
    assert "taken at step 7, sample 1,120" in capsys.readouterr().out
    assert main(["control", str(held), "limits.max_batch=32", "--wait", "5"]) == 1
    assert "refused at step 7, sample 1,120: no" in capsys.readouterr().out
    assert main(["control", str(held), "limits.max_batch=16", "--wait", "0"]) == 1
    assert "no answer from the run: it has not decided since" in capsys.readouterr().out


def test_a_run_that_nobody_runs_is_not_asked(tmp_path: Path, capsys) -> None:
    folder = saved(tmp_path / "run")
    (folder / "lock").touch()
    assert main(["control", str(folder), "limits.max_batch=64"]) == 2
    assert f"go on with it by resume={folder} limits.max_batch=64" in capsys.readouterr().err
    assert not (folder / control.REQUEST).exists()
    assert main(["control", str(tmp_path), "limits.max_batch=64"]) == 2
    assert "is no run folder" in capsys.readouterr().err
    with open(folder / "lock", "a+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the verb has left no lock behind


# -- in a run


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing one at the end of each run takes longer than the run."""
    monkeypatch.setattr("adabatch.config.launching.write_report", lambda folder: folder / "report.html")


def interrupted(at: int, action: Callable[[], None]) -> Task_:
    """The tiny task, with something that happens in its ``at``-th training micro-batch."""

    def make(config: DictConfig) -> Task:
        task = programs.tiny_task(config)
        seen = iter(range(1, 10**6))

        def loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, None]:
            if model.training and next(seen) == at:
                action()
            return task.loss(model, batch)

        return Task(task.model, task.train_data, task.held_out, loss, task.metrics, task.tokens_per_sample)

    return make


def run(folder: Path, *overrides: str, make_task: Task_ = programs.tiny_task) -> None:
    arguments = [f"run_folder={folder}", *SMALL, "noise.require_mean=false", "damping=off", *overrides]
    assert launch(programs.composed("lm", *arguments), arguments, name="lm", make_task=make_task) == 0


def asks(folder: Path, text: str) -> Callable[[], None]:
    """Write what the verb would, which is taken at the first look."""
    return lambda: (folder / control.REQUEST).write_text(f"{text}\n{control.END}", encoding="utf-8") and None


def weights(folder: Path) -> dict[str, torch.Tensor]:
    path = Checkpoints(folder / "checkpoints").latest()
    found = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype) for name, stored in tensors.describe(path).items()
    }
    tensors.read(path, found)
    return found


def test_a_changed_run_is_one_that_was_resumed_with_the_change(tmp_path: Path) -> None:
    """Taken when the first decision is due, at sample 32: ledger, weights and configuration are those of a resume."""
    live, other = tmp_path / "live", tmp_path / "other"
    live.mkdir()
    asks(live, "policy.target_efficiency: 0.2\nlimits.max_batch: 8\n")()
    run(live, "checkpoint.every=64")

    def crash() -> None:
        raise KeyboardInterrupt("the run is killed after its first checkpoint")

    with pytest.raises(KeyboardInterrupt):
        run(other, "checkpoint.every=32", make_task=interrupted(5, crash))
    programs.start(f"resume={other}", "policy.target_efficiency=0.2", "limits.max_batch=8", "checkpoint.every=64")
    ours, theirs = Ledger.load(live), Ledger.load(other)
    assert [(one.step, one.sample) for one in ours.splices] == [(one.step, one.sample) for one in theirs.splices]
    assert [(one["key"], one["old"], one["new"]) for one in ours.splices[0].changes] == [
        (one["key"], one["old"], one["new"]) for one in theirs.splices[0].changes if one["key"] != "checkpoint.every"
    ]
    assert (ours.splices[0].sample, ours.batch_at_sample(31), ours.batch_at_sample(32)) == (32, 16, 8)
    assert (ours.segments, ours.decisions) == (theirs.segments, theirs.decisions)
    ours, theirs = weights(live), weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert OmegaConf.load(live / "config.yaml").policy == OmegaConf.load(other / "config.yaml").policy


def test_two_changes_and_two_refusals_are_on_the_record(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    texts = ["limits: {max_batch: 8}", "limits: [", "limits.micro_batch: 2"]
    texts += ["policy: fixed\npolicy.global_batch: 24\nlimits.max_batch: 32"]
    pending = iter(texts)

    def make(config: DictConfig) -> Task:
        task = programs.tiny_task(config)
        seen = iter(range(1, 10**6))

        def loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, None]:
            if model.training and next(seen) % 6 == 1 and (text := next(pending, None)):
                asks(folder, text)()
            return task.loss(model, batch)

        return Task(task.model, task.train_data, task.held_out, loss, task.metrics, task.tokens_per_sample)

    run(folder, "logger.names=[jsonl,console,tensorboard]", make_task=make)
    read, ledger = read_metrics(folder), Ledger.load(folder)
    assert [one["outcome"] for one in read.controls] == ["taken", "refused", "refused", "taken"]
    assert "not readable as YAML" in read.controls[1]["reason"]
    assert "cannot change limits.micro_batch" in read.controls[2]["reason"]
    assert [one["changes"] for one in read.controls if one["changes"]] == [list(one.changes) for one in ledger.splices]
    assert [one.global_batch for one in ledger.segments if not one.partial][-1] == 24 and read.end["samples"] == 256
    assert ledger.batch_at_sample(ledger.splices[0].sample) == 8
    said = capsys.readouterr().out
    assert "limits.max_batch: 4096 → 8 (applied live)" in said
    assert "refused, the run goes on as it was: control.yaml is not readable" in said
    page = write_report(folder).read_text()
    assert "Changed while it ran" in page and "a request was refused" in page
    assert main(["ledger", str(folder)]) == 0
    assert "changed while it ran at sample" in capsys.readouterr().out
    assert control.read_answer(folder)["digest"] == control.digest_of((folder / control.REQUEST).read_bytes())
    kept = sorted(path.name for path in folder.glob("config*.yaml"))
    assert kept == ["config.1.yaml", "config.2.yaml", "config.yaml"]
    assert [one.get("live_since_sample") for one in read_launches(folder)] == [
        None, *(splice.sample for splice in ledger.splices)
    ]  # fmt: skip


def test_a_resumed_run_keeps_what_was_changed_and_does_not_ask_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    asks(folder, "policy: fixed\npolicy.global_batch: 24\nlimits.max_batch: 24\n")()
    run(folder)
    programs.start(f"resume={folder}", "stop.samples=320")
    assert (Ledger.load(folder).batch_at_sample(260), len(read_metrics(folder).controls)) == (24, 1)
    assert [one["key"] for one in read_metrics(folder).resumes[0]["changes"]] == ["stop.samples"]
    programs.start(f"resume={folder}", "stop.samples=384", "policy=fixed", "policy.global_batch=8")
    assert Ledger.load(folder).batch_at_sample(330) == 8, "an answered file does not come back over the command line"
    assert len(read_metrics(folder).controls) == 1


def test_a_run_killed_before_its_next_checkpoint_goes_on_under_the_change(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    asks(folder, "policy: fixed\npolicy.global_batch: 8\n")()

    def crash() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, "checkpoint.every=32", "noise.decide_every=3", make_task=interrupted(7, crash))
    read = read_metrics(folder)
    assert (read.controls[0]["samples"], read.checkpoints[-1]["samples"]) == (48, 32)
    programs.start(f"resume={folder}", "stop.samples=128")
    ledger = Ledger.load(folder)
    assert (ledger.batch_at_sample(31), ledger.batch_at_sample(32), ledger.batch_at_sample(127)) == (16, 8, 8)
    [splice] = ledger.splices
    assert splice.sample == 32 and "policy.global_batch" in [one["key"] for one in splice.changes]
    assert read_metrics(folder).controls == [], "what the kill undid is not told as the run's history"


def test_a_replay_of_the_ledger_is_the_same_run(tmp_path: Path) -> None:
    source, replay = tmp_path / "source", tmp_path / "replay"
    source.mkdir()
    asks(source, "policy: stages\npolicy.stages: '0:8, 128:32'\nlimits.max_batch: 32\n")()
    run(source)
    run(replay, "policy=replay", f"policy.ledger={source / 'ledger.json'}")
    assert not Ledger.load(replay).diff(Ledger.load(source))
    ours, theirs = weights(replay), weights(source)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_cadences_and_bounds_of_the_loop_change_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    asks(folder, "evaluation.every: 16\ncheckpoint.every: 48\nnoise.decide_every: 3\nstop.loss: 1e9\n")()
    run(folder)
    read = read_metrics(folder)
    assert [one["samples"] for one in read.evaluations] == [0, 48]
    assert read.end["reason"] == "loss" and read.checkpoints[0]["samples"] == 48


def test_a_file_that_is_being_written_by_hand_is_taken_when_it_is_whole(tmp_path: Path) -> None:
    """Half of "limits.max_batch: 64" is a request as well. It is taken when two looks have found it the same."""
    folder = tmp_path / "run"
    folder.mkdir()

    def make(config: DictConfig) -> Task:
        task = programs.tiny_task(config)
        seen = iter(range(1, 10**6))
        writes = {1: "limits.max_batch: 6", 3: "limits.max_batch: 64\ndamping.dwell: 2"}

        def loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, None]:
            if model.training and (text := writes.get(next(seen))):
                (folder / control.REQUEST).write_text(text, encoding="utf-8")
            return task.loss(model, batch)

        return Task(task.model, task.train_data, task.held_out, loss, task.metrics, task.tokens_per_sample)

    run(folder, "policy=observe", "noise.decide_every=1", "limits.micro_batch=8", make_task=make)
    [told] = read_metrics(folder).controls
    assert told["outcome"] == "taken" and {one["key"] for one in told["changes"]} == {"limits.max_batch", "damping.dwell"}
    # Two micro-batches a step: written in the second, seen after it, and taken after the third.
    assert Ledger.load(folder).splices[0].step == 3


def test_an_empty_or_unreadable_file_stops_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / control.REQUEST).mkdir(parents=True)
    run(folder)
    [told] = read_metrics(folder).controls
    assert told["outcome"] == "refused" and "cannot be read" in told["reason"]
    other = tmp_path / "other"
    other.mkdir()
    asks(other, "# limits.max_batch: 8\n")()
    run(other)
    assert read_metrics(other).controls == [] and not (other / control.ANSWER).exists()


def test_the_file_is_looked_at_when_a_decision_is_due_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adabatch.config import live

    looked, agreed = [], []
    look = live.LiveControl._look
    monkeypatch.setattr(live.LiveControl, "_look", lambda self: looked.append(1) or look(self))
    monkeypatch.setattr(live.distributed, "agree", lambda value: agreed.append(value) or json.loads(json.dumps(value)))
    folder = tmp_path / "run"
    folder.mkdir()
    asks(folder, "limits.max_batch: 16")()
    run(folder, "policy=observe", "noise.decide_every=4", "stop.samples=256")
    # 16 steps of 16 samples: due after 4, 8 and 12; at the end there is nothing left to change.
    assert len(looked) == 3
    requests = [one for one in agreed if isinstance(one, dict) and "digest" in one]
    assert len(requests) == 1
