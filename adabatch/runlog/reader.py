"""Reads ``metrics.jsonl`` back as the history that stands: what a resume undid is dropped, a torn line is reported."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adabatch.runlog.settings import KINDS, METRICS_FILE

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Metrics:
    """The final records of a run, by kind, in order. Infinite and NaN values were written as ``None``.

    Attributes:
        path: the file read.
        start: the last ``start`` record, or ``None``.
        steps, evaluations, decisions, resumes, controls, calibrations, checkpoints: the records of these kinds.
        end: the ``end`` record of the last attempt; ``None`` while the run goes on, or when it was killed.
        superseded: records dropped because a later resume started from before them.
        damaged: numbers (from 1) of the lines that are no record, a torn last line included.
        torn: whether the last line is one of them.
    """

    path: Path
    start: Record | None = None
    steps: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    decisions: list[Record] = field(default_factory=list)
    resumes: list[Record] = field(default_factory=list)
    controls: list[Record] = field(default_factory=list)
    calibrations: list[Record] = field(default_factory=list)
    checkpoints: list[Record] = field(default_factory=list)
    end: Record | None = None
    superseded: int = 0
    damaged: tuple[int, ...] = ()
    torn: bool = False

    @property
    def last(self) -> Record | None:
        """The record that is furthest along, of any kind."""
        records = [*self.steps, *self.evaluations, *self.decisions, *self.resumes]
        records += [*self.controls, *self.calibrations, *self.checkpoints]
        records += [record for record in (self.start, self.end) if record]
        return max(records, key=lambda record: (record["step"], record.get("seconds") or 0), default=None)


def read_metrics(folder_or_file: str | os.PathLike[str]) -> Metrics:
    """Read the metrics of a run folder, or one metrics file.

    After a resume from step k, records of later steps that were written before it are superseded and dropped, and
    where both attempts wrote a record of one kind at one step, the later stands. An empty file gives empty metrics.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when the file has lines, but not one record.
    """
    path = Path(folder_or_file)
    path = path / METRICS_FILE if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f"there are no metrics at {path}; name a run folder (it holds {METRICS_FILE}) or the file"
        )
    lines = path.read_bytes().split(b"\n")
    parsed = [(number, _parse(line)) for number, line in enumerate(lines, 1) if line.strip()]
    damaged = tuple(number for number, record in parsed if record is None)
    records = [record for _, record in parsed if record is not None]
    if damaged and not records:
        raise ValueError(f"{path} holds no metrics: none of its {len(damaged)} lines is a record of {', '.join(KINDS)}")
    final = _final(records)
    return Metrics(
        path=path,
        start=next((record for record in reversed(final) if record["kind"] == "start"), None),
        steps=_of_kind(final, "step"),
        evaluations=_of_kind(final, "eval"),
        decisions=_of_kind(final, "decision"),
        resumes=_of_kind(final, "resume"),
        controls=_of_kind(final, "control"),
        calibrations=_of_kind(final, "calibration"),
        checkpoints=_of_kind(final, "checkpoint"),
        end=next((record for record in final if record["kind"] == "end"), None),
        superseded=_without_ends(records) - _without_ends(final),
        damaged=damaged,
        torn=bool(damaged) and damaged[-1] == parsed[-1][0],
    )


def _without_ends(records: list[Record]) -> int:
    return sum(record["kind"] != "end" for record in records)


def _of_kind(records: list[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _parse(line: bytes) -> Record | None:
    """The record of a line, or ``None`` when the line is none."""
    try:
        record = json.loads(line, parse_constant=lambda name: None)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        return None
    return record if _is_record(record) else None


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return False
    return all(isinstance(record.get(key), int) and record[key] >= 0 for key in ("step", "samples"))


def _final(records: list[Record]) -> list[Record]:
    """Play resumes back: each cuts what came after the step that it starts from."""
    kept: list[tuple[int, Record]] = []
    attempt = 0
    for index, record in enumerate(records):
        cut = _cut(records, index)
        if cut is not None:
            attempt += 1
            kept = [(made, old) for made, old in kept if old["step"] <= cut and old["kind"] != "end"]
        kept.append((attempt, record))
    return _latest_attempts(kept)


def _cut(records: list[Record], index: int) -> int | None:
    """The step that the run goes back to at this record, or ``None`` when it just goes on."""
    record = records[index]
    if record["kind"] == "resume":
        from_step = record.get("from_step")
        return int(record["step"] if from_step is None else from_step)
    neighbours = records[max(index - 1, 0) : index + 2]
    if record["kind"] == "start" and index > 0 and all(other["kind"] != "resume" for other in neighbours):
        return int(record["step"])  # begun anew in the same folder, without a checkpoint to go on from
    return None


def _latest_attempts(kept: list[tuple[int, Record]]) -> list[Record]:
    """Where two attempts wrote the same kind at the same step, the later one stands."""
    latest: dict[tuple[str, int], int] = {}
    for attempt, record in kept:
        latest[record["kind"], record["step"]] = attempt
    once = ("start", "resume")
    return [
        record
        for attempt, record in kept
        if record["kind"] in once or latest[record["kind"], record["step"]] == attempt
    ]
