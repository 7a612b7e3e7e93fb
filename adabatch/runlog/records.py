"""Records as strict JSON lines, and the append-only files that hold them."""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adabatch.runlog.settings import METRICS_FILE, LogSettings

# For these, null beside a finite lower bound means "unbounded", which is how an unresolved noise scale reads.
_UNBOUNDED_AS_NULL = frozenset({"scale", "scale_high"})


def to_json_line(record: Mapping[str, Any]) -> bytes:
    """One record as a line of strict JSON.

    JSON has no infinity and no NaN: such a value becomes null, and its name and what it was are kept under
    ``nonfinite`` (``{"loss": "nan"}``). Only ``scale`` and ``scale_high`` are null without a note. Arrays and tensors
    of one element become numbers; anything that JSON cannot hold becomes its text.
    """
    notes: dict[str, str] = {}
    plain = _plain(record, "", notes)
    if notes:
        plain["nonfinite"] = notes
    return json.dumps(plain, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _plain(value: Any, path: str, notes: dict[str, str]) -> Any:
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return _finite(float(value), path, notes)
    if isinstance(value, Mapping):
        prefix = path + "." if path else ""
        return {str(key): _plain(item, f"{prefix}{key}", notes) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [_plain(item, f"{path}.{index}", notes) for index, item in enumerate(items)]
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
        return _plain(value.item(), path, notes)
    return str(value)


def _finite(value: float, path: str, notes: dict[str, str]) -> float | None:
    if math.isfinite(value):
        return value
    if path not in _UNBOUNDED_AS_NULL or math.isnan(value):
        notes[path] = str(value)
    return None


class AppendFile:
    """Appends whole entries to a file: an entry that does not fit on the disk leaves no part of itself behind."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Open as long as the run. Unbuffered: what was written survives the process, and nothing waits in a buffer to
        # fail again at close.
        self._file = open(path, "ab", buffering=0)

    def append(self, entry: bytes) -> None:
        """Write ``entry``, or raise ``OSError`` with the file as it was."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            left = memoryview(entry)
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), size)
            raise

    def close(self) -> None:
        self._file.close()


class JsonlLogger:
    """Writes ``metrics.jsonl``: one JSON object per line, on the disk as soon as ``write`` returns."""

    def __init__(self, settings: LogSettings) -> None:
        self._path = settings.folder / METRICS_FILE
        self._file: AppendFile | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            self._file = AppendFile(self._path)
            if _ends_inside_a_line(self._path):
                self._file.append(b"\n")  # a killed process left part of a line; the next one starts on its own
        self._file.append(to_json_line(record))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _ends_inside_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
