"""The log of a run: every record goes to each of its loggers, and no logger can stop the training."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO

from adabatch.runlog.console import ConsoleLogger
from adabatch.runlog.records import JsonlLogger
from adabatch.runlog.settings import Logger, LogSettings
from adabatch.runlog.tensorboard import TensorBoardLogger

LOGGERS: dict[str, Callable[[LogSettings], Logger]] = {
    "jsonl": JsonlLogger,
    "console": ConsoleLogger,
    "tensorboard": TensorBoardLogger,
}


class RunLog:
    """Writes the records of a run to its loggers, on rank 0; on the other ranks it does nothing.

    A record is a mapping with ``step``, ``samples``, ``tokens`` and ``seconds`` at that point; ``kind`` and ``time``
    (Unix seconds) are added here. A logger that raises, for instance because the disk is full, is reported once on
    stderr and counted in ``failures``; the run and the other loggers go on, and the next record is tried again.

    Args:
        folder: the run folder; made when the first record is written.
        loggers: names from ``LOGGERS``.
        total_samples: samples at which the run ends, for percentages and the ETA; ``None`` when it ends otherwise.
        main: whether this process writes, that is, whether it is rank 0.
        resumed_at: samples consumed by the checkpoint that the run goes on from; ``None`` for a new run.
        calibrated: whether the critical batch was calibrated.
        target_efficiency: the data efficiency aimed for, or ``None``.
        stream: where the console logger prints; standard output when ``None``.

    Raises:
        ValueError: for an unknown logger, with the valid names.
        ImportError: for a logger whose package is not installed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        loggers: Iterable[str] = ("jsonl", "console", "tensorboard"),
        total_samples: int | None = None,
        main: bool = True,
        resumed_at: int | None = None,
        calibrated: bool = False,
        target_efficiency: float | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._settings = LogSettings(
            folder=Path(folder),
            stream=sys.stdout if stream is None else stream,
            total_samples=total_samples,
            resumed_at=resumed_at,
            calibrated=calibrated,
            target_efficiency=target_efficiency,
        )
        names = _checked(loggers)
        self._loggers = {name: _make(name, self._settings) for name in names} if main else {}
        self.failures: dict[str, int] = dict.fromkeys(self._loggers, 0)

    def start(self, record: Mapping[str, Any]) -> None:
        """World size, resolved config, program, arguments, versions. What this log was told is added for the report."""
        settings = self._settings
        facts = {
            "total_samples": settings.total_samples,
            "calibrated": settings.calibrated,
            "target_efficiency": settings.target_efficiency,
        }
        self._write("start", {**facts, **record})

    def step(self, record: Mapping[str, Any]) -> None:
        """The state of training after a step; losses are means since the last such record."""
        self._write("step", record)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Held-out loss and other metrics."""
        self._write("eval", record)

    def decision(self, record: Mapping[str, Any]) -> None:
        """What the controller decided, and why."""
        self._write("decision", record)

    def resume(self, record: Mapping[str, Any]) -> None:
        """The step that the run goes on from and what changed; later records written before are superseded by it."""
        self._write("resume", record)

    def control(self, record: Mapping[str, Any]) -> None:
        """What came of a request to the running job: ``outcome`` (taken or refused), ``reason`` and ``changes``."""
        self._write("control", record)

    def calibration(self, record: Mapping[str, Any]) -> None:
        """What came of a calibration inside the run: ``outcome`` (taken or refused), ``reason``, ``changes``, ``cost``."""
        self._write("calibration", record)

    def checkpoint(self, record: Mapping[str, Any]) -> None:
        """A checkpoint that is complete."""
        self._write("checkpoint", record)

    def end(self, record: Mapping[str, Any]) -> None:
        """Why the run ended, and its summary."""
        self._write("end", record)

    def close(self) -> None:
        """Close all loggers. A second call does nothing."""
        closing, self._loggers = self._loggers, {}
        for name, logger in closing.items():
            self._guarded(name, logger.close)
        lost = ", ".join(f"{name} {self.failures[name]}" for name in closing if self.failures[name])
        if lost:
            _warn(f"records that could not be logged: {lost}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, kind: str, record: Mapping[str, Any]) -> None:
        complete = {"kind": kind, "time": time.time(), **record}
        complete["kind"] = kind
        for name, logger in self._loggers.items():
            self._guarded(name, partial(logger.write, complete))

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever goes wrong in a logger, losing the run would be worse
            self.failures[name] += 1
            if self.failures[name] == 1:
                _warn(f"logger {name} failed, training goes on without it until it recovers: {error!r}")


def _checked(loggers: Iterable[str]) -> list[str]:
    names = [loggers] if isinstance(loggers, str) else list(dict.fromkeys(loggers))
    unknown = [name for name in names if name not in LOGGERS]
    if unknown:
        raise ValueError(f"unknown logger {', '.join(map(repr, unknown))}; valid: {', '.join(LOGGERS)}")
    return names


def _make(name: str, settings: LogSettings) -> Logger:
    try:
        return LOGGERS[name](settings)
    except ImportError as error:
        raise ImportError(
            f"logger {name!r} needs a package that is not installed ({error}); install it, or leave {name!r} out of "
            f"loggers"
        ) from error


def _warn(message: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be gone, too
        print(f"adabatch: {message}", file=sys.stderr, flush=True)
