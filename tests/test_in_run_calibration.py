"""Calibration inside a run: when it comes, what it changes, what it leaves bit by bit, and what is refused beforehand."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs
import pytest
from omegaconf import OmegaConf

from adabatch import cli
from adabatch.calibrate import Bound, Calibration, Refusal, calibrate
from adabatch.checkpoint import Checkpoints
from adabatch.config import ConfigError, control, in_run
from adabatch.ledger import Ledger
from adabatch.policies import TargetEfficiency
from adabatch.report import summary
from adabatch.report.recommend import recommendation
from adabatch.runlog import lines, read_calibrations, read_metrics

RUN = (
    *programs.SMALL,
    "damping=off",
    "limits.micro_batch=4",
    "limits.start_batch=16",
    "limits.min_batch=8",
    "limits.max_batch=32",
    "noise.geometry=euclidean",
    "noise.views=[adam]",
    "checkpoint.every=1M",
)
SETTINGS = (
    "calibrate.batches=[4,8,16]",
    "calibrate.samples=128",
    "calibrate.pairs=2",
    "calibrate.halvings=1",
    "calibrate.held_out=16",
    "calibrate.noise_samples=64",
    "calibrate.geometries=[euclidean,adam,adam_sqrt,sign]",
)
TIMES = (*SETTINGS, "calibrate.times=2", "calibrate.share=0.5")


def narrow(found: Calibration, value: float = 3.0) -> Calibration:
    """The same with ratios that are known."""
    return replace(found, ratios=dict.fromkeys(found.ratios, Bound(value, value / 1.4, value * 1.6)))


def answers(monkeypatch: pytest.MonkeyPatch, *given: Callable[[Any, Any], Any]) -> list[int]:
    """Have calibrations answered by these in turn, after real branches; the samples at which they were asked for."""
    asked: list[int] = []

    def answered(bench: Any, settings: Any, *, allowance: int, present: int, geometry: str, **options: Any) -> Any:
        asked.append(bench.start)
        return given[min(len(asked), len(given)) - 1](
            bench, lambda: calibrate(bench, settings, present=present, geometry=geometry, **options)
        )

    monkeypatch.setattr(in_run, "calibrate_within", answered)
    return asked


def started(folder: Path, *overrides: str) -> None:
    assert programs.start(*RUN, *overrides, f"run_folder={folder}") == 0


def state(folder: Path) -> Any:
    """Model, optimizer, generators and noise estimates of the last checkpoint."""
    path = Checkpoints(folder / "checkpoints").latest()
    tensors = [file.read_bytes() for file in sorted(path.glob("*.distcp"))]
    assert tensors
    measured = json.loads((path / "controller.json").read_text())["measured"]
    return tensors, (path / "rng-00000.json").read_text(), measured


# -- without a change


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "plain"
    started(folder)
    return folder


def test_a_refusal_says_its_numbers_and_the_run_goes_on_bit_by_bit(plain: Path, tmp_path: Path) -> None:
    started(tmp_path / "probed", *TIMES)
    records = read_metrics(tmp_path / "probed").calibrations
    assert [record["outcome"] for record in records] == ["refused", "refused"]
    assert all(re.search(r"would take about 4,160 samples, and \d+ are allowed", one["reason"]) for one in records)
    assert [one["samples"] >= place for one, place in zip(records, (64, 192))] == [True, True]
    assert all(one["cost"]["samples"] == 0 for one in records)
    same_but_for_calibration(plain, tmp_path / "probed")


def test_branches_that_tell_too_little_change_nothing_either(
    plain: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    asked = answers(
        monkeypatch,
        lambda bench, made: wide(made()),
        lambda bench, made: Refusal(f"after {made().samples} samples, no", 5),
    )
    started(tmp_path / "probed", *TIMES)
    records = read_metrics(tmp_path / "probed").calibrations
    assert len(asked) == 2 and all(record["cost"]["samples"] > 500 for record in records)
    assert records[0]["outcome"] == "refused" and "2 [0.5, 9], and a factor of 2 is wanted" in records[0]["reason"]
    assert records[1]["reason"].startswith("after") and records[1]["all"]["samples"] == sum(
        record["cost"]["samples"] for record in records
    )
    assert "samples in branches" in capsys.readouterr().out
    assert [one["sample"] for one in read_calibrations(tmp_path / "probed")] == asked[:1]
    same_but_for_calibration(plain, tmp_path / "probed")


def wide(found: Calibration) -> Calibration:
    unknown = dict.fromkeys(found.ratios, Bound(2.0, 0.5, 9.0))
    return replace(found, critical=replace(found.critical, reason=""), ratios=unknown)


def same_but_for_calibration(plain: Path, probed: Path) -> None:
    ledgers = [Ledger.load(folder) for folder in (plain, probed)]
    assert ledgers[0].to_dict() == ledgers[1].to_dict() and any(one.changed for one in ledgers[0].decisions)
    assert state(plain) == state(probed)
    left, right = (read_metrics(folder).steps for folder in (plain, probed))
    timed = ("time", "seconds", "samples_per_second", "step_time")
    without = [[{k: v for k, v in one.items() if k not in timed} for one in steps] for steps in (left, right)]
    assert without[0] == without[1]


# -- a change


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was calibrated once to c = 3, and then not again."""
    folder = tmp_path_factory.mktemp("runs") / "taken"
    with pytest.MonkeyPatch.context() as patch:
        answers(patch, lambda bench, made: narrow(made()), lambda bench, made: Refusal("enough", 0))
        started(folder, *TIMES)
    return folder


def test_the_run_goes_on_by_what_was_found_and_nothing_else(taken: Path, tmp_path: Path, monkeypatch) -> None:
    """As one that is calibrated without a single branch."""
    [found] = read_calibrations(taken)
    first, second = read_metrics(taken).calibrations
    assert first["outcome"] == "taken" and first["calibrated"] and first["changes"][0]["new"] == 3.0
    ledger = Ledger.load(taken)
    [splice] = ledger.splices
    [change] = splice.changes
    assert (splice.sample, change["key"], change["old"], change["new"]) == (found["sample"], in_run.KEY, 1.0, 3.0)
    assert "3 [2.14, 4.8]" in change["reason"] and "over noise scale" in change["reason"]
    assert found["config"]["policy"]["calibration"] == 1.0 and found["step"] == first["step"]
    assert OmegaConf.load(taken / "config.yaml").policy.calibration == 3.0

    by_it = {one.sample > splice.sample: "uncalibrated" not in one.reason for one in ledger.decisions if one.wanted}
    assert by_it == {False: False, True: True}

    kept = []
    monkeypatch.setattr(in_run, "record_of", lambda *_: {**found, "step": 0})
    answers(monkeypatch, lambda bench, made: kept.append(bench) or narrow(EMPTY), lambda *_: Refusal("enough", 0))
    started(tmp_path / "branchless", *TIMES)
    assert kept[0].consumed == 0
    assert state(taken) == state(tmp_path / "branchless")
    other = Ledger.load(tmp_path / "branchless")
    assert (other.segments, other.decisions) == (ledger.segments, ledger.decisions)
    assert recommendation(read_metrics(taken)).calibration == 3.0


EMPTY = Calibration((), (), {}, {}, {}, None, None, {}, {}, {}, {}, 0, 0.0)


def test_it_is_said_wherever_the_run_is_told_of(taken: Path, capsys) -> None:
    metrics = read_metrics(taken)
    assert summary(metrics)["calibrated"] and metrics.start["calibrated"] is False
    page = (taken / "report.html").read_text(encoding="utf-8")
    assert "Calibrated while it ran" in page and "refused: enough" in page and "or calibrated" not in page
    said = "\n".join("\n".join(lines.calibrated(one)) for one in metrics.calibrations)
    assert "3 [2.14, 4.8]" in said and "policy.calibration: 1.0 → 3.0 (applied live)" in said
    assert "refused, the run goes on as it was: enough (0 samples in branches" in said
    capsys.readouterr()
    assert cli.main(["ledger", str(taken)]) == 0
    assert "policy.calibration 1.0 -> 3.0 (critical batch" in capsys.readouterr().out


def test_a_resumed_run_keeps_it_and_so_does_one_that_is_told_to_change(
    taken: Path, tmp_path: Path, monkeypatch
) -> None:
    taken = shutil.copytree(taken, tmp_path / "run")
    asked = answers(monkeypatch, lambda *_: Refusal("no", 0))
    seen = []
    settle = in_run.InRunCalibration.__call__

    def watched(self, trainer, interrupted):
        seen.append(trainer)
        return settle(self, trainer, interrupted)

    monkeypatch.setattr(in_run.InRunCalibration, "__call__", watched)
    assert programs.start(f"resume={taken}", "stop.samples=320") == 0
    policy = seen[-1].controller.policy
    assert isinstance(policy, TargetEfficiency) and policy.calibration == 3.0 and seen[-1].calibration == 3.0
    assert seen[-1].probes.samples == read_metrics(taken).calibrations[1]["all"]["samples"]
    # The places of a longer run are further on; the last one is behind the end of the first.
    assert all(sample > 230 for sample in asked)
    resumed = read_metrics(taken).resumes[-1]
    assert [change["key"] for change in resumed["changes"]] == ["stop.samples"]
    programs.composed("lm")
    checked = control.check("lm", taken, ["policy.target_efficiency=0.8"])
    assert checked.config.policy.calibration == 3.0
    assert [change.key for change in checked.changes] == ["policy.target_efficiency"]


def test_a_stop_in_the_middle_of_it_comes_at_once_and_it_is_made_when_the_run_goes_on(
    tmp_path: Path, monkeypatch
) -> None:
    folder = tmp_path / "run"

    def told(bench: Any, made: Callable[[], Calibration]) -> Calibration:
        signal.raise_signal(signal.SIGTERM)
        return made()

    asked = answers(monkeypatch, told, lambda bench, made: narrow(made()), lambda *_: Refusal("no", 0))
    started(folder, *TIMES)
    assert read_metrics(folder).end["reason"] == "SIGTERM" and len(asked) == 1
    assert not read_metrics(folder).calibrations and not read_calibrations(folder)
    assert programs.start(f"resume={folder}") == 0
    assert read_metrics(folder).calibrations[0]["outcome"] == "taken"
    assert asked[0] < asked[1] < asked[0] + 100
    assert Ledger.load(folder).samples == 256


# -- before training


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("policy=fixed", "policy.global_batch=16"), "policy=fixed has no calibration"),
        (("policy=stages", "policy.stages='0:8 64:16'"), "policy=stages has no calibration"),
        (("stop.samples=null", "stop.loss=0.1", "lr_schedule.horizon=1k"), "set stop.samples or stop.tokens"),
        (("noise.geometry=adam", "calibrate.geometries=[euclidean]"), "go by the noise scale adam, and"),
        (("calibrate.batches=[4,8]",), "compares 3 or more batches"),
    ],
)
@pytest.mark.parametrize("job", ["train", "validate"])
def test_what_cannot_be_calibrated_is_refused_before_training(
    overrides: tuple[str, ...], said: str, job: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        programs.start(*RUN, *TIMES, *overrides, f"job={job}", f"run_folder={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()
