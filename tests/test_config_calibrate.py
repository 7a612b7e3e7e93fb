"""``job=calibrate``: which checkpoints it takes, what it adds to the run folder, what it prints and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import programs
import pytest

from adabatch.calibrate import GEOMETRIES, records
from adabatch.config import ConfigError, schema
from adabatch.runlog import read_calibrations

BATCH = ("policy=fixed", "policy.global_batch=16", "limits.micro_batch=4")
SETTINGS = (
    "calibrate.batches=[4,8,16]",
    "calibrate.samples=128",
    "calibrate.pairs=2",
    "calibrate.halvings=1",
    "calibrate.held_out=16",
    "calibrate.noise_samples=64",
    "calibrate.geometries=[euclidean,adam_sqrt]",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 16 steps, with checkpoints at 4, 8, 12 and 16."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    saving = ("checkpoint.every=64", "checkpoint.keep_last=9")
    assert programs.start(*programs.SMALL, *BATCH, *saving, f"run_folder={folder}") == 0
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        programs.start(*overrides, "job=calibrate")
    return str(caught.value)


def test_it_adds_a_record_for_each_checkpoint_and_changes_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)
    capsys.readouterr()
    assert programs.start(f"resume={folder}", "job=calibrate", "calibrate.steps=[early,12]", *SETTINGS) == 0
    printed = capsys.readouterr()
    after = contents(folder)
    added = json.loads(after.pop(records.FILE))
    assert after == before
    assert [(one["step"], one["sample"], one["present"]) for one in added] == [(4, 64, 16), (12, 192, 16)]
    for one in added:
        assert one["batches"] == [4, 8, 16] and set(one["lengths"]) == {"128", "64"}
        assert set(one["noise"]) == set(one["ratios"]) == {"euclidean", "adam_sqrt"} - set(one["refused"])
        assert one["seeds"] == {"seed": 0, "order_seed": 0} and one["config"]["policy"]["global_batch"] == 16
    assert "too young" in added[0]["refused"]["adam_sqrt"] and not added[1]["refused"]
    assert "calibration at step 4, sample 64: critical batch" in printed.out
    assert "batch 16, 128 samples: loss" in printed.err

    assert programs.start(f"resume={folder}", "job=calibrate", *SETTINGS, "calibrate.json=true") == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)] == [16]
    assert [one["step"] for one in read_calibrations(folder)] == [4, 12, 16]
    assert contents(folder) | {records.FILE: b""} == before | {records.FILE: b""}


def test_a_file_that_nothing_can_be_added_to_is_refused_before_the_work(folder: Path) -> None:
    path, held = folder / records.FILE, None
    held = path.read_text() if path.exists() else None
    for text in ("{", "[1]", '[{"version": 99}]'):
        path.write_text(text)
        assert "move it away" in refused(f"resume={folder}", *SETTINGS)
        assert path.read_text() == text
    path.unlink() if held is None else path.write_text(held)


def test_what_it_cannot_do_is_refused_with_the_way_out(folder: Path) -> None:
    assert "resume=<run folder>" in refused(*programs.SMALL, *BATCH)
    said = refused(f"resume={folder}", *SETTINGS, "calibrate.steps=[5]")
    assert "no complete checkpoint of step 5" in said and "4, 8, 12, 16" in said
    assert "calibrate.samples to 512 or more" in refused(f"resume={folder}", *SETTINGS, "calibrate.batches=[4,8,64]")
    assert "fp32 or bf16" in refused(f"resume={folder}", *SETTINGS, "precision=fp16")


def test_the_schemas_geometries_are_those_that_are_measured() -> None:
    assert tuple(schema.CALIBRATED) == GEOMETRIES


# -- the line that goes into a configuration


def record(*, value: float | None, low: float | None, high: float | None) -> dict:
    return {"geometry": "euclidean", "ratios": {"euclidean": {"value": value, "low": low, "high": high}}}


def test_the_line_is_the_mean_of_the_logarithms_of_what_is_resolved() -> None:
    two, eight = record(value=2.0, low=1.5, high=3.0), record(value=8.0, low=6.0, high=9.0)
    open_end = record(value=50.0, low=20.0, high=None)
    line = records.recommended([two, eight, open_end])
    assert line == "policy.calibration=4    for noise.geometry=euclidean, by 2 of 3 checkpoints"
    assert records.recommended([two]).endswith("by this checkpoint")


def test_it_cautions_where_an_interval_is_wide_and_is_none_where_nothing_is_resolved() -> None:
    assert "an interval reaches a factor of 4.0" in records.recommended([record(value=2.0, low=0.5, high=3.0)])
    assert records.recommended([record(value=None, low=None, high=None)]).startswith("no policy.calibration")


@pytest.mark.parametrize(
    ("bound", "shown"),
    [
        ((150.0, 100.0, 200.0), "150 [100, 200]"),
        ((150.0, 100.0, None), "above 100 (near 150)"),
        ((None, 100.0, None), "above 100"),
        ((None, 0.0, 30.0), "below 30"),
        ((None, None, None), "unresolved"),
        ((150.0, 0.0, None), "unresolved"),
    ],
)
def test_intervals_and_bounds_are_shown_for_what_they_are(bound: tuple, shown: str) -> None:
    assert records.interval(dict(zip(("value", "low", "high"), bound))) == shown
