"""Calibrations as JSON in the run folder, as a table, and as the line of a configuration that comes of them."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adabatch.calibrate.calibration import Calibration
from adabatch.calibrate.tuning import Tuned
from adabatch.runlog.calibrations import FILE, VERSION, factor, read_calibrations

# A c that is known to this factor is worth a line of its own; beyond it, a word of caution stands beside it.
WITHIN = 2.0


def to_record(found: Calibration, *, step: int, sample: int, geometry: str, **more: Any) -> dict[str, Any]:
    """A calibration as plain JSON data; an open end is ``None``.

    Args:
        step, sample: of the checkpoint.
        geometry: by which the run's decisions go.
        more: what else belongs to it, such as the settings and seeds.
    """
    return {
        "version": VERSION,
        "time": time.time(),
        "step": step,
        "sample": sample,
        "geometry": geometry,
        "batches": list(found.batches),
        "critical": {**asdict(found.critical.batch), "reason": found.critical.reason},
        "efficiencies": {
            str(batch): {**asdict(one), "fitted": found.critical.fitted.get(batch)}
            for batch, one in found.critical.efficiencies.items()
        },
        "exponent": asdict(found.exponent),
        "noise": {name: _finite(one.to_dict()) for name, one in found.noise.items()},
        "ratios": {name: asdict(one) for name, one in found.ratios.items()},
        "refused": found.refused,
        "left_out": {str(batch): why for batch, why in found.left_out.items()},
        "rates": {str(batch): rate for batch, rate in found.rates.items()},
        "lengths": {str(samples): _tuned(one) for samples, one in found.short.items()},
        "branches": {str(batch): _tuned(one) for batch, one in found.large.items()},
        "cost": {"samples": found.samples, "seconds": found.seconds},
        **more,
    }


def append(folder: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Add records to the folder's ``calibrations.json``, which is replaced as a whole.

    Raises:
        ValueError: when the file there is not a list of calibrations.
    """
    path = folder / FILE
    aside = path.with_name(f".{FILE}.new")
    aside.write_text(json.dumps([*read_calibrations(folder), *records], allow_nan=False, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)
    return path


def to_text(record: Mapping[str, Any]) -> str:
    """One calibration as a block of lines."""
    critical = record["critical"]
    lines = [
        f"calibration at step {record['step']:,}, sample {record['sample']:,}: critical batch {interval(critical)}",
        *([f"  not resolved: {critical['reason']}"] if critical["reason"] else []),
        f"  {'batch':>7}  {'best rate':>9}  {'held-out loss':>13}  {'data efficiency':<22}  fitted",
        *(f"  {line}" for line in _batch_lines(record)),
        f"  best learning rate goes as batch^{interval(record['exponent'])}",
        f"  {'geometry':<10}  {'noise scale':<22}  c = critical batch / noise scale",
    ]
    for name, ratio in record["ratios"].items():
        lines.append(f"  {name:<10}  {interval(record['noise'][name], 'scale'):<22}  {interval(ratio)}")
    lines += [f"  {name:<10}  not measured: {why.partition(' (')[0]}" for name, why in record["refused"].items()]
    lines += [f"  batch {batch}: left out: {why}" for batch, why in record["left_out"].items()]
    cost = record["cost"]
    lines.append(f"  cost: {cost['samples']:,} samples, {cost['seconds']:.0f} s")
    return "\n".join(lines)


def recommended(records: Sequence[Mapping[str, Any]]) -> str:
    """The line that the calibrations put into a configuration: the mean of log c in the geometry of decisions."""
    geometry = records[0]["geometry"]
    found = [one["ratios"].get(geometry, {"value": None}) for one in records]
    resolved = [one for one in found if factor(one) is not None]
    if not resolved:
        return f"no policy.calibration: c is not resolved in the geometry {geometry} that decisions go by"
    mean = math.exp(math.fsum(math.log(one["value"]) for one in resolved) / len(resolved))
    where = f"{len(resolved)} of {len(records)} checkpoints" if len(records) > 1 else "this checkpoint"
    widest = max(map(factor, resolved))
    line = f"policy.calibration={mean:.3g}    for noise.geometry={geometry}, by {where}"
    if widest <= WITHIN:
        return line
    return f"{line}; an interval reaches a factor of {widest:.1f}: more pairs or samples would narrow it"


def interval(bound: Mapping[str, Any], key: str = "value") -> str:
    """A value with its interval; a bound where it has no more; ``unresolved``."""
    value, low, high = bound[key], bound["low"], bound["high"]
    if value is not None and low is not None and high is not None:
        return f"{value:.3g} [{low:.3g}, {high:.3g}]"
    if low and high is None:
        return f"above {low:.3g}" + (f" (near {value:.3g})" if value is not None else "")
    return f"below {high:.3g}" if high is not None else "unresolved"


def _batch_lines(record: Mapping[str, Any]) -> list[str]:
    longest = max(record["lengths"], key=int)
    rows = {record["batches"][0]: record["lengths"][longest], **{int(b): one for b, one in record["branches"].items()}}
    lines = []
    for batch, one in rows.items():
        efficiency = record["efficiencies"].get(str(batch))
        measured = "1" if batch == record["batches"][0] else interval(efficiency) if efficiency else "unknown"
        fitted = efficiency["fitted"] if efficiency else None
        shown = f"{fitted:.3g}" if fitted is not None else ""
        rate = f"{record['rates'][str(batch)]:.3g}" + ("" if one["interior"] else "*")
        loss = math.fsum(one["losses"]) / len(one["losses"])
        lines.append(f"{batch:>7}  {rate:>9}  {loss:>13.5f}  {measured:<22}  {shown}".rstrip())
    if not all(one["interior"] for one in rows.values()):
        lines.append("* the best of the rates tried, and the end of them: not interior")
    return lines


def _tuned(one: Tuned) -> dict[str, Any]:
    return {**_finite(asdict(one)), "tried": [[octaves, _number(loss)] for octaves, loss in one.tried]}


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _number(value) if isinstance(value, float) else value for key, value in values.items()}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
