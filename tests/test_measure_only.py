"""Runs that only measure: what they print at their end."""

from __future__ import annotations

import json
from pathlib import Path

import programs
import pytest

from adabatch.cli import main
from adabatch.report.recommend import recommendation
from adabatch.runlog import read_metrics


@pytest.fixture
def printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    def launched(*arguments: str) -> list[str]:
        assert programs.start(f"run_folder={tmp_path / 'run'}", *programs.SMALL, "logger.every=2", *arguments) == 0
        return capfd.readouterr().out.splitlines()

    return launched


@pytest.mark.parametrize("policy", [("policy=observe",), ("policy=fixed", "policy.global_batch=16")])
def test_a_run_that_leaves_its_batch_alone_recommends_one(policy: tuple[str, ...], printed, tmp_path: Path) -> None:
    lines = printed(*policy)
    name = policy[0].removeprefix("policy=")
    assert any(line.startswith(f"run: policy {name} on 1 rank, 256 samples in 16 steps") for line in lines)
    assert any(line.startswith("Which batch?") for line in lines)
    assert f"the whole trade-off: adabatch recommend {tmp_path / 'run'}" in lines
    assert "no end record" not in " ".join(lines)
    advice = recommendation(read_metrics(tmp_path / "run"))
    assert (advice.facts["policy"], advice.facts["global_batch"], advice.calibrated) == (name, 16, False)
    assert "Which batch?" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_it_is_printed_again_by_the_verb(printed, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = printed("policy=observe")
    assert main(["recommend", str(tmp_path / "run")]) == 0
    shown = capfd.readouterr().out.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("Which batch?"))
    assert lines[first : first + 6] == shown[shown.index(lines[first]) :][:6]
    assert main(["recommend", "--json", str(tmp_path / "run")]) == 0
    assert json.loads(capfd.readouterr().out)["policy"] == "observe"


def test_a_run_that_moves_its_batch_prints_none(printed) -> None:
    assert not any(line.startswith("Which batch?") for line in printed("policy=target_efficiency"))


def test_a_run_that_measured_nothing_says_so(printed) -> None:
    lines = printed("policy=fixed", "policy.global_batch=16", "noise=off")
    assert sum(line.startswith("no recommendation: ") and "noise.enabled=false" in line for line in lines) == 1
