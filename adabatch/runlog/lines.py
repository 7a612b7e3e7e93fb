"""What the console says: the parts of the progress line, and one line for each event. Pure text, no terminal."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adabatch.runlog import text

_VERB = re.compile(r"^(?:(?:grow|shrink) \d+ to \d+|hold \d+): ")
_RATE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the progress line. On a narrow terminal the parts of the highest ``rank`` go first."""

    words: str
    rank: int
    style: str = ""


@dataclass(slots=True)
class Pace:
    """Samples per second of wall time over the last minute or so; pauses for evaluation and saving included."""

    _points: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, time: float, samples: int) -> None:
        self._points.append((time, samples))
        while len(self._points) > 2 and time - self._points[1][0] >= _RATE_SECONDS:
            self._points.popleft()

    def value(self) -> float | None:
        """Samples per second, or ``None`` before two points are known."""
        if not self._points:
            return None
        (first_time, first), (last_time, last) = self._points[0], self._points[-1]
        return (last - first) / (last_time - first_time) if last_time > first_time and last > first else None


@dataclass(slots=True)
class Progress:
    """What the progress line remembers from one record to the next."""

    total_samples: int | None
    calibrated: bool
    held_out: float | None = None
    pace: Pace = field(default_factory=Pace)

    def share(self, record: Mapping[str, Any]) -> float | None:
        """The share of the run that is done, from 0 to 1; ``None`` when its end is not known in samples."""
        return min(int(record["samples"]) / self.total_samples, 1.0) if self.total_samples else None

    def seconds_left(self, record: Mapping[str, Any]) -> float | None:
        """Expected wall seconds until the last sample, or ``None``."""
        pace = self.pace.value() or record.get("samples_per_second")
        if not self.total_samples or not pace:
            return None
        return max(self.total_samples - record["samples"], 0) / pace

    def parts(self, record: Mapping[str, Any]) -> list[Part]:
        """The progress line of a ``step`` record, in reading order."""
        parts = [
            Part(f"{text.count(record['samples'])} samples", 7),
            Part(f"step {record['step']:,}", 8),
            Part(f"loss {text.loss(record.get('loss'))}", 1, "bold"),
            self._held_out(),
            Part(f"batch {record['global_batch']:,}", 2, "bold cyan") if record.get("global_batch") else None,
            self._noise(record),
            self._efficiency(record),
            _skipped(record),
            _speed(record),
            self._time_left(record),
        ]
        return [part for part in parts if part]

    def _held_out(self) -> Part | None:
        return Part(f"held-out {text.loss(self.held_out)}", 4) if self.held_out is not None else None

    def _noise(self, record: Mapping[str, Any]) -> Part | None:
        noise = text.noise_scale(record)
        style = "" if text.is_resolved(record) else "dim"
        return Part(f"noise {noise}", 3, style) if noise else None

    def _efficiency(self, record: Mapping[str, Any]) -> Part | None:
        if record.get("efficiency") is None:
            return None
        mark = "" if self.calibrated else "*"
        return Part(f"efficiency {text.percent(record['efficiency'])}{mark}", 5)

    def _time_left(self, record: Mapping[str, Any]) -> Part | None:
        left = self.seconds_left(record)
        return Part(f"ETA {text.duration(math.ceil(left))}", 1, "green") if left else None


def _speed(record: Mapping[str, Any]) -> Part | None:
    speed = record.get("samples_per_second")
    return Part(f"{text.quantity(speed)} samples/s", 6) if speed else None


def _skipped(record: Mapping[str, Any]) -> Part | None:
    return Part(f"{record['skipped']:,} skipped", 2, "bold red") if record.get("skipped") else None


def fit(parts: list[Part], width: int, separator: str = " · ") -> list[Part]:
    """The parts that fit into ``width`` columns; the least important ones are left out first."""
    kept = list(parts)
    while len(kept) > 1 and sum(len(part.words) + len(separator) for part in kept) - len(separator) > width:
        kept.remove(max(kept, key=lambda part: part.rank))
    return kept


def started(record: Mapping[str, Any], folder: str, progress: Progress, target: float | None) -> list[str]:
    """The first lines of a run."""
    world = record.get("world")
    facts = [
        f"run {folder}",
        f"{world} rank{'' if world == 1 else 's'}" if world else "",
        f"{text.count(progress.total_samples)} samples" if progress.total_samples else "",
        f"target efficiency {text.percent(target)}" if target is not None else "",
    ]
    star = "* data efficiency is uncalibrated: the critical batch is taken to be the noise scale"
    return [" · ".join(fact for fact in facts if fact), *([] if progress.calibrated else [star])]


def decided(record: Mapping[str, Any]) -> str:
    """A change of the batch with its reason."""
    reason = _VERB.sub("", str(record.get("reason") or "no reason recorded"))
    return f"batch {record.get('previous')} → {record.get('batch')} at {record['samples']:,} samples: {reason}"


def evaluated(record: Mapping[str, Any]) -> str:
    """Held-out metrics, the loss first."""
    metrics = [f"{name} {text.loss(value)}" for name, value in text.held_out_metrics(record).items()]
    return f"held-out at {record['samples']:,} samples: " + ", ".join(metrics or ["no metric"])


def _changed(record: Mapping[str, Any]) -> list[str]:
    return [
        f"  {change.get('key')}: {change.get('old')} → {change.get('new')} ({change.get('outcome', 'applied')})"
        for change in record.get("changes") or []
    ]


def controlled(record: Mapping[str, Any]) -> list[str]:
    """What the running job was asked to change, and what came of it."""
    where = f"asked to change at step {record['step']:,}, {record['samples']:,} samples"
    if record.get("outcome") != "taken":
        return [f"{where}: refused, the run goes on as it was: {record.get('reason')}"]
    changes = _changed(record)
    return [where + ("; changed:" if changes else ", and all of it is so already"), *changes]


def calibrated(record: Mapping[str, Any]) -> list[str]:
    """What came of a calibration inside the run, and what it took."""
    cost = record.get("cost") or {}
    where = f"calibration at step {record['step']:,}, {record['samples']:,} samples"
    took = f"{cost.get('samples', 0):,} samples in branches, {text.duration(cost.get('seconds') or 0)} beside training"
    if record.get("outcome") != "taken":
        return [f"{where}: refused, the run goes on as it was: {record.get('reason')} ({took})"]
    return [f"{where}: {record.get('reason')} ({took}); changed:", *_changed(record)]


def resumed(record: Mapping[str, Any]) -> list[str]:
    """Where the run goes on, and what is different from then on."""
    changes = _changed(record)
    where = f"resumed at step {record.get('from_step', record['step']):,}, {record['samples']:,} samples"
    return [where + ("; changed:" if changes else ", nothing changed"), *changes]


def ended(record: Mapping[str, Any]) -> list[str]:
    """Why the run ended, and the sentences of its summary when the record has them."""
    summary = record.get("summary") or {}
    sentences = summary.get("sentences") or [
        f"{record['step']:,} steps, {record['samples']:,} samples, {text.duration(record.get('seconds') or 0)}"
    ]
    return [f"ended: {text.ending(record)}", *(f"  {sentence}" for sentence in sentences)]
