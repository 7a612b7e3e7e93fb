"""Numbers as a person reads them: counts, durations, percentages, a noise scale with its interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def count(value: float) -> str:
    """A count in at most five digits: ``950``, ``41,216``, ``412k``, ``1.25M``."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (999_500, "M")):
        if abs(value) >= limit:
            return f"{value / (1e6 if unit == 'M' else limit):.3g}{unit}"
    return f"{value / 1e3:.0f}k" if abs(value) >= 1e5 else f"{value:,.0f}"


def quantity(value: float) -> str:
    """A measured quantity to two or three digits: ``0.47``, ``4.7``, ``47``, ``1,234``, ``412k``."""
    if not math.isfinite(value):
        return "unbounded" if value > 0 else "unknown"
    return count(value) if abs(value) >= 99.5 else f"{value:.2g}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def loss(value: float | None) -> str:
    """A loss or metric with three decimals where they mean something; a value that was not finite is named."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.3f}" if 0.1 <= abs(value) < 1000 or value == 0 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """A time span in its two largest units: ``420 ms``, ``42 s``, ``3 min 12 s``, ``2 h 05 min``, ``3 d 04 h``."""
    if 0 < seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def noise_scale(record: Mapping[str, Any]) -> str | None:
    """The noise scale of a record: ``47 [38, 61]``, ``> 38 (unresolved)``; ``None`` before anything was measured."""
    scale, low, high = record.get("scale"), record.get("scale_low"), record.get("scale_high")
    if scale is None and low is None:
        return None
    if is_resolved(record):
        return f"{quantity(scale)} [{quantity(low)}, {quantity(high)}]"
    return f"> {quantity(low)} (unresolved)" if low else "unresolved"


def is_resolved(record: Mapping[str, Any]) -> bool:
    """Whether the record's noise scale has a finite interval."""
    bounds = [record.get(key) for key in ("scale", "scale_low", "scale_high")]
    return record.get("resolved") is not False and all(bound is not None and math.isfinite(bound) for bound in bounds)


def held_out_metrics(record: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics of an ``eval`` record, the loss first: every number that is not bookkeeping."""
    metrics = {key: value for key, value in record.items() if key not in _BOOKKEEPING and _is_number(value)}
    return {"loss": record.get("loss"), **metrics} if "loss" in record else metrics


_BOOKKEEPING = frozenset(
    {"kind", "step", "samples", "tokens", "seconds", "time", "nonfinite", "eval_seconds", "eval_samples"}
)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def ending(record: Mapping[str, Any]) -> str:
    """Why a run ended, in words, from its ``end`` record."""
    reason = str(record.get("reason") or "no reason recorded")
    return _ENDINGS.get(reason, f"stopped by {reason}" if reason.startswith("SIG") else reason)


_ENDINGS = {
    "budget": "the budget is used up",
    "seconds": "the time is used up",
    "loss": "the target loss is reached",
}
