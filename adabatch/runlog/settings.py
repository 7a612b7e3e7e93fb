"""What every logger of a run is told, and what it must offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

METRICS_FILE = "metrics.jsonl"
KINDS = ("start", "step", "eval", "decision", "resume", "control", "calibration", "checkpoint", "end")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The facts of a run that loggers need.

    Attributes:
        folder: the run folder.
        stream: where the console logger prints.
        total_samples: samples at which the run ends, or ``None`` when it ends by another rule.
        resumed_at: samples already consumed by the checkpoint that the run goes on from, or ``None``.
        calibrated: whether the critical batch was calibrated; else shown data efficiencies carry an asterisk.
        target_efficiency: the data efficiency that the policy aims for, or ``None``.
    """

    folder: Path
    stream: TextIO
    total_samples: int | None = None
    resumed_at: int | None = None
    calibrated: bool = False
    target_efficiency: float | None = None


class Logger(Protocol):
    """Takes every record of a run, in order. ``write`` may raise: the run warns once, counts, and goes on."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...
