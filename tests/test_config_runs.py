"""A run's folder: chosen once, used by one launch at a time, and what going on with it takes from it."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import ranks
from omegaconf import DictConfig, OmegaConf
from programs import SMALL

from adabatch.config import ConfigError, folders, schema
from adabatch.config.compose import require_legal
from adabatch.config.resume import Change, list_changes, read_launches, resumed, save_snapshot, to_text
from adabatch.runlog import read_metrics

# -- the run folder


def claim(folder: Path, **more: Any) -> Any:
    config = OmegaConf.create({"resume": None, "run_folder": str(folder), "runs": str(folder), "name": "run", **more})
    return folders.claim(config)


def refused_claim(folder: Path) -> str:
    try:
        claim(folder)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_second_launch_into_a_folder_names_the_first(tmp_path: Path) -> None:
    """Field case E04: one of two launches with the same folder ends, naming the other's process and host."""
    folder, lock = claim(tmp_path / "run")
    holder = f"{folder} is in use by process {os.getpid()} on {socket.gethostname()}"
    assert ranks.run(refused_claim, 1, tmp_path / "run") == [
        f"no run folder: {holder}; wait for it, or choose another run_folder"
    ]
    (folder / "metrics.jsonl").touch()
    assert holder in ranks.run(refused_claim, 1, tmp_path / "run")[0], "also when it has logged something"
    lock.close()
    assert "already holds a run; go on with it by resume=" in refused_claim(tmp_path / "run")


def test_launches_in_the_same_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders.time, "strftime", lambda form: "20260131-180000")
    names = []
    for _ in range(3):
        folder, lock = claim(tmp_path, run_folder=None)
        names.append(folder.name)
        lock.close()
    assert names == ["run-20260131-180000", "run-20260131-180000-2", "run-20260131-180000-3"]


def test_a_folder_name_that_no_checkpoint_could_carry_is_refused(tmp_path: Path) -> None:
    assert "letters, digits" in refused_claim(tmp_path / "a run")
    assert not (tmp_path / "a run").exists()


# -- snapshots, and going on


def snapshot(folder: Path, *overrides: str, root: str = "lm", **edited: Any) -> None:
    """What a launch leaves in its run folder; ``edited`` are values as they were resolved then."""
    config = programs.composed(root, *overrides)
    for key, value in edited.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    folder.mkdir(exist_ok=True)
    launched = {"program": "train.py", "config": root, "overrides": list(overrides), "world": 1}
    save_snapshot(folder, OmegaConf.to_container(config, resolve=True), launched)


def changed(folder: Path, *arguments: str) -> tuple[DictConfig, list[Change]]:
    config, _ = resumed("lm", folder, [f"resume={folder}", *arguments])
    before = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    return config, list_changes(flat(before), flat(OmegaConf.to_container(config, resolve=True)))


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return programs.own_files(tmp_path / "files", monkeypatch)


def test_a_run_goes_on_under_its_snapshot_and_not_under_files_edited_since(tmp_path: Path, files: Path) -> None:
    snapshot(tmp_path / "run", "limits.max_batch=256", scaling__reference_batch=16)
    edit(files / "optimizer" / "adamw.yaml", "lr: 1e-3", "lr: 5e-3")
    edit(files / "lm.yaml", "policy: target_efficiency", "policy: fixed")
    edit(files / "lm.yaml", "model: gpt_small", "model: gpt_medium")
    config, changes = changed(tmp_path / "run")
    assert changes == []
    assert (config.optimizer.lr, config.policy.name, config.model.size) == (1e-3, "target_efficiency", "0.5M")
    assert (config.limits.max_batch, config.scaling.reference_batch) == (256, 16)
    require_legal(config)


def test_changed_overrides_are_applied_and_listed(tmp_path: Path) -> None:
    snapshot(tmp_path / "run", "policy.target_efficiency=0.8", "limits.max_batch=256")
    config, changes = changed(tmp_path / "run", "limits.max_batch=512", "stop.samples=80k", "workers=2")
    before = programs.composed("lm").stop.samples
    assert changes == [Change("limits.max_batch", 256, 512), Change("stop.samples", before, "80k")]
    assert (config.policy.target_efficiency, config.workers) == (0.8, 2), "where a launch runs is no change of the run"


def test_a_value_that_is_named_counts_even_where_the_files_say_the_same_by_now(tmp_path: Path, files: Path) -> None:
    snapshot(tmp_path / "run")
    edit(files / "optimizer" / "adamw.yaml", "lr: 1e-3", "lr: 5e-3")
    _, changes = changed(tmp_path / "run", "optimizer.lr=5e-3")
    assert changes == [Change("optimizer.lr", 1e-3, 5e-3)]


def test_another_policy_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    snapshot(tmp_path / "run", "policy.target_efficiency=0.8")
    config, changes = changed(tmp_path / "run", "policy=fixed", "policy.global_batch=64")
    assert dict(config.policy) == {"name": "fixed", "global_batch": 64}
    assert OmegaConf.get_type(config.policy) is schema.FixedConfig
    assert Change("policy.target_efficiency", 0.8, None) in changes
    assert Change("policy.name", "target_efficiency", "fixed") in changes


def test_a_policy_goes_back_and_forth(tmp_path: Path) -> None:
    snapshot(tmp_path / "run", "policy=fixed", "policy.global_batch=64")
    config, overrides = resumed("lm", tmp_path / "run", ["policy=observe"])
    assert dict(config.policy) == {"name": "observe"}
    launched = {"program": "train.py", "config": "lm", "overrides": overrides, "world": 1}
    save_snapshot(tmp_path / "run", OmegaConf.to_container(config), launched)
    config, _ = resumed("lm", tmp_path / "run", ["policy=fixed", "policy.global_batch=32"])
    assert dict(config.policy) == {"name": "fixed", "global_batch": 32}


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.sequence_length=128", "data.sequence_length: 64 -> 128"),
        ("model=gpt_tiny", "model.size: '0.5M' -> '0.1M'"),
        ("order_seed=5", "order_seed: 0 -> 5"),
        ("optimizer=sgd", "optimizer.name: 'adamw' -> 'sgd'"),
        ("seed=5", "seed: 0 -> 5"),
        ("limits.start_batch=32", "limits.start_batch: 16 -> 32"),
    ],
)
def test_what_cannot_change_is_refused(override: str, key: str, tmp_path: Path) -> None:
    """Field case D05: a changed order seed is refused, a changed bound is applied."""
    snapshot(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        resumed("lm", tmp_path / "run", [override])
    assert key in str(caught.value) and "start a new run" in str(caught.value)


def test_every_snapshot_is_kept_and_numbered(tmp_path: Path) -> None:
    """Field case E07: a second launch leaves both configurations."""
    folder = tmp_path / "run"
    for efficiency in (0.5, 0.6, 0.7):
        snapshot(folder, f"policy.target_efficiency={efficiency}")
    files = ["config.1.yaml", "config.2.yaml", "config.yaml"]
    assert sorted(path.name for path in folder.iterdir()) == [*files, "launches.json"]
    kept = [OmegaConf.load(folder / name).policy.target_efficiency for name in files]
    assert kept == [0.5, 0.6, 0.7]
    assert [one["overrides"] for one in read_launches(folder)][-1] == ["policy.target_efficiency=0.7"]


def test_a_folder_that_is_no_run_of_this_program_is_refused(tmp_path: Path) -> None:
    snapshot(tmp_path / "run", root="image")
    with pytest.raises(ConfigError, match="a run of the program 'image', and this is 'lm'"):
        resumed("lm", tmp_path / "run", [])
    (tmp_path / "run" / "launches.json").write_text('[{"config": "lm"}]')
    with pytest.raises(ConfigError, match="needs a program, its config and its overrides"):
        resumed("lm", tmp_path / "run", [])
    (tmp_path / "run" / "launches.json").write_text("[")
    with pytest.raises(ConfigError, match="not readable as JSON"):
        resumed("lm", tmp_path / "run", [])


def test_a_snapshot_reads_back_as_it_was() -> None:
    config = OmegaConf.to_container(programs.composed("lm"), resolve=True)
    assert OmegaConf.to_container(OmegaConf.create(to_text(config))) == config


def test_a_whole_run_resumes_with_a_changed_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert programs.start(f"run_folder={folder}", *SMALL) == 0
    assert programs.start(f"resume={folder}", "limits.max_batch=64", "stop.samples=384") == 0
    listed = "limits.max_batch: 4096 -> 64 (applied); stop.samples: 256 -> 384 (applied)"
    assert listed in capsys.readouterr().out
    changes = [Change("limits.max_batch", 4096, 64), Change("stop.samples", "256", "384")]
    assert [Change(**change) for change in read_metrics(folder).resumes[0]["changes"]] == changes
    kept = [OmegaConf.load(folder / name).limits.max_batch for name in ("config.1.yaml", "config.yaml")]
    assert kept == [4096, 64]
    launches = read_launches(folder)
    assert [one["program"] for one in launches] == [str(Path(sys.argv[0]).absolute())] * 2
    assert [one["directory"] for one in launches] == [str(Path.cwd())] * 2
    with pytest.raises(ConfigError, match="already holds a run; go on with it by resume="):
        programs.start(f"run_folder={folder}", *SMALL)


def test_a_report_that_fails_does_not_fail_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> Path:
        raise ZeroDivisionError("no page today")

    monkeypatch.setattr("adabatch.config.launching.write_report", broken)
    folder = tmp_path / "run"
    assert programs.start(f"run_folder={folder}", *SMALL) == 0
    said = capsys.readouterr()
    assert f"no report; try again with: adabatch report {folder}" in said.out
    assert "the run is complete and saved, but its report failed:" in said.err
    assert "ZeroDivisionError: no page today" in said.err
    assert read_metrics(folder).end["reason"] == "budget"


def test_validating_a_run_restores_it_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    programs.start(f"run_folder={folder}", *SMALL)
    before = contents(folder)
    assert programs.start(f"resume={folder}", "stop.samples=512", "job=validate") == 0
    said = capsys.readouterr().out
    assert "valid: 2 trainable parameters, 64 training samples; policy target_efficiency" in said
    assert "against the checkpoint: stop.samples: 256 -> 512 (applied)" in said
    assert programs.start(f"resume={folder}", "job=validate") == 0
    assert "no step left" in capsys.readouterr().out
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    programs.start(f"run_folder={folder}", *SMALL)
    [checkpoint] = (folder / "checkpoints").glob("step-*")
    (checkpoint / "optimizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="optimizer.json"):
        programs.start(f"resume={folder}", "stop.samples=512")
    for one in (folder / "checkpoints").iterdir():
        one.rename(folder / one.name)
    with pytest.raises(ConfigError, match="there is nothing to go on from"):
        programs.start(f"resume={folder}", "stop.samples=512", "job=validate")
