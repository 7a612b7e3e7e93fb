"""What others build on: public names, the command line, and the keys of everything that is written to disk.

These lists are frozen. A change here is a change for users, for saved runs or for their tools: make it on purpose, with
a new format version where old files cannot be read any more.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import programs
import pytest

from adabatch import ledger
from adabatch.checkpoint import Checkpoints
from adabatch.cli import _parser

NAMES = {
    "adabatch": [
        "BatchLimits",
        "BatchPlan",
        "Budget",
        "Cabs",
        "Controller",
        "CosineTest",
        "Damping",
        "Estimate",
        "Facts",
        "Fixed",
        "InnerProductTest",
        "LateSwitch",
        "Ledger",
        "LossLaw",
        "Measurement",
        "NoiseEstimator",
        "NormTest",
        "Observe",
        "Progress",
        "Ramp",
        "Replay",
        "Scales",
        "Scaling",
        "Schedule",
        "Seesaw",
        "Stages",
        "StepPrice",
        "TargetEfficiency",
        "WallClock",
        "accumulate",
        "agree",
        "apply",
        "attach",
        "stream",
    ],
    "adabatch.gradients": [
        "Aligned",
        "AlignmentTaps",
        "Instrument",
        "OneGroupWarning",
        "Outcome",
        "Pending",
        "Ruler",
        "Tap",
        "Window",
        "accumulate",
        "attach",
        "survey",
    ],
    "adabatch.data": [
        "IterableAdapter",
        "MicroBatch",
        "SampleOrder",
        "Stream",
        "cache_folder",
        "cached",
        "check_fingerprint",
        "fingerprint",
        "iterable",
        "sample_seed",
        "stream",
    ],
    "adabatch.config": [
        "ConfigError",
        "Task",
        "compose",
        "counted",
        "launch",
        "matching",
        "one_of",
        "program",
        "some_of",
        "within",
    ],
    "adabatch.checkpoint": ["CheckpointError", "Checkpoints", "Choice", "Manifest"],
    "adabatch.runlog": ["LOGGERS", "LogSettings", "Logger", "Metrics", "RunLog", "read_calibrations", "read_metrics"],
    "adabatch.report": ["summary", "write_report"],
}

COMMANDS = {
    "": ["--help", "--version", "verb"],
    "calibrate": ["--help", "--json", "--nproc", "--step", "--steps", "overrides", "program"],
    "control": ["--help", "--wait", "overrides", "run_folder"],
    "curvature": ["--help", "--json", "--step", "overrides", "program"],
    "ledger": ["--help", "--holds", "ledger", "other"],
    "plan": ["--help", "--json", "--times", "overrides"],
    "recommend": ["--calibration", "--help", "--json", "run_folder"],
    "report": ["--help", "--output", "run_folder"],
    "simulate": ["--config", "--help", "--json", "--plot", "overrides"],
    "validate": ["--help", "overrides", "program"],
}

CHECKPOINT = {
    "controller": ["batch", "measured", "memory", "policy", "progress", "timed", "version"],
    "data": ["content", "size", "type"],
    "ledger": ["decisions", "format", "segments", "skipped", "splices", "version"],
    "loop": ["last_record", "losses", "probes", "scaler", "seconds"],
    "run": ["config", "world"],
}

CONTROLLER = {
    "measured": ["guards", "lr_multiplier", "slope", "views"],
    "memory": [
        "accounted",
        "changed_at",
        "due_at",
        "loss",
        "loss_weight",
        "recorded_scale",
        "regression",
        "skipped_in_a_row",
        "tokens_when_due",
    ],
    "policy": ["name", "state"],
    "progress": ["samples", "steps", "tokens"],
}

LEDGER = {
    ledger.Segment: ["first_sample", "global_batch", "partial", "steps"],
    ledger.Decision: [
        "batch",
        "count",
        "estimate",
        "guards",
        "kind",
        "policy",
        "previous",
        "reason",
        "sample",
        "step",
        "until_sample",
        "wanted",
    ],
    ledger.Skip: ["global_batch", "sample", "step"],
    ledger.Splice: ["changes", "sample", "step"],
}

WHERE = ["kind", "samples", "seconds", "step", "time", "tokens"]
SCALE = ["geometry", "guards", "noise", "resolved", "scale", "scale_high", "scale_low", "signal", "slope", "views"]
RECORDS = {
    "start": [
        "arguments",
        "calibrated",
        "config",
        "program",
        "target_efficiency",
        "total_samples",
        "versions",
        "world",
    ],
    "step": [
        "efficiency",
        "global_batch",
        "grad_norm",
        "last_loss",
        "loss",
        "lr",
        "micro_batch",
        "micro_batches",
        "samples_per_second",
        "skipped",
        "step_time",
        "world",
        *SCALE,
    ],
    "eval": ["loss"],
    "decision": ["batch", "changed", "policy", "previous", "reason", "wanted", *SCALE],
    "resume": ["changes", "from_step"],
    "checkpoint": ["path"],
    "end": ["reason", "summary"],
}
CHANGE = ["key", "new", "old", "outcome"]

LAUNCH = ["config", "directory", "overrides", "program", "world"]
FOLDER = [
    "checkpoints",
    "config.1.yaml",
    "config.yaml",
    "launches.json",
    "ledger.json",
    "lock",
    "metrics.jsonl",
    "report.html",
]


def public(module: Any) -> list[str]:
    """The names that a package offers: ``__all__``, or what it imports ``as`` itself, and what it loads when asked."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in found for alias in node.names if alias.asname == alias.name}
    return sorted(names | set(getattr(module, "_WITH_TORCH", ())))


@pytest.mark.parametrize("name", NAMES)
def test_the_public_names(name: str) -> None:
    module = importlib.import_module(name)
    assert public(module) == NAMES[name]
    assert set(NAMES[name]) <= set(dir(module))
    for one in NAMES[name]:
        assert getattr(module, one) is not None


def test_another_name_is_none() -> None:
    for name in ("adabatch", "adabatch.config"):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            importlib.import_module(name).nothing


def test_the_verbs_and_their_options() -> None:
    parsers = {"": _parser()}
    for action in parsers[""]._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers |= action.choices
    found = {
        verb: sorted(max(action.option_strings, key=len, default=action.dest) for action in parser._actions)
        for verb, parser in parsers.items()
    }
    assert found == COMMANDS


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that was resumed once."""
    folder = tmp_path_factory.mktemp("surface") / "run"
    programs.start(f"run_folder={folder}", *programs.SMALL, "logger.every=4", "noise.geometry=euclidean")
    programs.start(f"resume={folder}", "stop.samples=512")
    return folder


def test_what_a_run_folder_holds(run: Path) -> None:
    assert sorted(path.name for path in run.iterdir()) == FOLDER
    assert [sorted(launch) for launch in json.loads((run / "launches.json").read_text())] == [LAUNCH, LAUNCH]


def test_the_keys_of_a_checkpoint(run: Path) -> None:
    checkpoints = Checkpoints(run / "checkpoints")
    extra = checkpoints.read_extra(checkpoints.latest())
    assert {name: sorted(value) for name, value in extra.items()} == CHECKPOINT
    assert {name: sorted(extra["controller"][name]) for name in CONTROLLER} == CONTROLLER


def test_the_keys_of_a_ledger(run: Path) -> None:
    assert {kind: sorted(field.name for field in dataclasses.fields(kind)) for kind in LEDGER} == LEDGER
    written = json.loads((run / "ledger.json").read_text())
    assert sorted(written) == CHECKPOINT["ledger"]
    assert (written["format"], written["version"]) == ("adabatch-ledger", 1)
    assert [sorted(change) for change in written["splices"][0]["changes"]] == [CHANGE]


def test_the_keys_of_the_metrics(run: Path) -> None:
    keys: dict[str, set[tuple[str, ...]]] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        keys.setdefault(record["kind"], set()).add(tuple(sorted(set(record) - {"nonfinite"})))
        if record["kind"] == "resume":
            assert [sorted(change) for change in record["changes"]] == [CHANGE]
    assert keys == {kind: {tuple(sorted({*WHERE, *more}))} for kind, more in RECORDS.items()}
