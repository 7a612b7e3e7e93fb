"""``calibrations.json`` of a run folder, read back: the measured critical batches of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "calibrations.json"
VERSION = 1


def read_calibrations(folder: Path) -> list[dict[str, Any]]:
    """The calibrations of a run, the oldest first; none where there is no file.

    Raises:
        ValueError: when the file there is not a list of calibrations.
    """
    path = folder / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not readable as JSON ({error}); move it away") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) and one.get("version") == VERSION for one in found):
        raise ValueError(f"{path} is not a list of calibrations of version {VERSION}; move it away")
    return found


def factor(bound: Mapping[str, Any]) -> float | None:
    """To which factor the ``value`` of an interval is known; ``None`` where the interval has an open end."""
    if not (bound["value"] and bound["low"] and bound["high"]):
        return None
    return max(bound["high"] / bound["value"], bound["value"] / bound["low"])


def latest(folder: Path, geometry: str | None) -> dict[str, Any] | None:
    """The calibration of the furthest checkpoint at which c is resolved in ``geometry``; of two there, the later."""
    unresolved = {"value": None, "low": None, "high": None}
    found = [one for one in read_calibrations(folder) if factor(one["ratios"].get(geometry, unresolved)) is not None]
    return max(enumerate(found), key=lambda one: (one[1]["sample"], one[0]), default=(0, None))[1]
