"""Calibration inside a run: at stated sample counts the trainer stops for branches, and its policy goes on by their c.

Branches read samples that the run is still to train on, and take nothing from it but time; the run goes on bit by bit as
it would have, under the calibration that they found. What cannot be told to a factor of 2 changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from adabatch import distributed
from adabatch.calibrate import GEOMETRIES, Bench, Calibration, Cancelled, Refusal, calibrate_within, records
from adabatch.calibrate.calibration import choose
from adabatch.calibrate.measuring import measurable
from adabatch.config.build import Assembly
from adabatch.config.calibrating import bench_of, record_of, settings_of
from adabatch.config.compose import ConfigError, plain
from adabatch.config.live import attempt, go_on_under
from adabatch.config.resume import merge_overrides, read_launches, save_snapshot
from adabatch.loop import Trainer
from adabatch.progress import Progress
from adabatch.runlog.calibrations import factor

KEY = "policy.calibration"


class InRunCalibration:
    """What a trainer calls between two steps, on all ranks.

    Args:
        run: the parts of the run.

    Raises:
        ConfigError: for a policy without a calibration, a run without an end in samples, and a geometry of decisions
            in which no noise scale is measured at a point.
        ValueError: for what ``adabatch.calibrate`` does not take.
    """

    def __init__(self, run: Assembly) -> None:
        self._run, config = run, run.config
        self._share, self._times = config.calibrate.share, config.calibrate.times
        self._geometry = _geometry(run)
        self._total = _total(run)
        self._places = [self._total * (2 * number + 1) // (2 * self._times) for number in range(self._times)]
        bench = bench_of(run)
        choose(bench.limits, settings_of(config), run.controller.batch)
        if reason := measurable(bench, [self._geometry])[1].get(self._geometry):
            raise ConfigError(f"calibrate.times={self._times}: {reason}")

    def __call__(self, trainer: Trainer, interrupted: Callable[[], bool]) -> bool:
        """Calibrate if that is due; returns whether the run has changed by it, and should be saved."""
        probes, samples = trainer.probes, trainer.controller.progress.samples
        passed = [place for place in self._places if place <= samples]
        if not passed or passed[-1] <= probes.tried_at or distributed.agree(interrupted()):
            return False
        allowance = max(0, int(self._share * self._total * len(passed) / self._times) - probes.samples)
        began = time.perf_counter()
        bench = bench_of(self._run)
        bench.cancelled = interrupted
        with trainer.clock.paused():
            answer = self._calibrated(trainer, bench, allowance)
        seconds = time.perf_counter() - began
        probes.samples, probes.seconds = probes.samples + bench.consumed, probes.seconds + seconds
        if answer is not None:
            probes.tried_at = samples
            cost = {"samples": bench.consumed, "seconds": seconds, "allowance": allowance}
            trainer.log.calibration({**trainer.where(), **answer, "cost": cost, "all": asdict(probes)})
        trainer.stopwatch.restart()
        return answer is not None and answer["outcome"] == "taken"

    def _calibrated(self, trainer: Trainer, bench: Bench, allowance: int) -> dict[str, Any] | None:
        """What came of it; ``None`` when the run was told to stop meanwhile, and is to try again when it goes on."""
        config = OmegaConf.create(trainer.extra["run"]["config"])
        if "calibration" not in config.policy:
            return _refused(f"policy={config.policy.name} has no calibration")
        if trainer.aligned is not None:
            trainer.aligned.measure(False)
        settings = settings_of(self._run.config)
        try:
            found = calibrate_within(
                bench,
                settings,
                allowance=allowance,
                present=trainer.controller.batch,
                geometry=self._geometry,
                dataset_size=len(self._run.task.train_data) if config.noise.finite_data else None,
            )
        except Cancelled:
            return None
        except ValueError as error:
            return _refused(str(error))
        return _refused(found.reason) if isinstance(found, Refusal) else self._taken(trainer, config, found)

    def _taken(self, trainer: Trainer, config: DictConfig, found: Calibration) -> dict[str, Any]:
        """Write the calibration down, and let the run go on by it where it is narrow enough."""
        record = record_of(self._run, found, self._geometry, config)
        if trainer.world.is_first:
            attempt("calibration", lambda: records.append(_folder(trainer), [record]))
        if self._geometry not in record["ratios"]:
            return _refused(f"no noise scale ({self._geometry}): {record['refused'][self._geometry]}")
        ratio, where = record["ratios"][self._geometry], f"{records.interval(record['critical'])} samples"
        told = {"geometry": self._geometry, "critical": record["critical"], "ratio": ratio}
        scale = records.interval(record["noise"][self._geometry], "scale")
        reason = f"critical batch {where} over noise scale {scale} ({self._geometry}): {records.interval(ratio)}"
        known = factor(ratio)
        if known is None or known > records.WITHIN:
            why = found.critical.reason or f"{reason}, and a factor of {records.WITHIN:g} is wanted"
            return _refused(why) | told
        value = float(f"{ratio['value']:.3g}")
        change = {"key": KEY, "old": config.policy.calibration, "new": value, "outcome": "applied live"}
        config.policy.calibration = value
        changes = [{**change, "reason": reason}]
        if refusal := go_on_under(trainer, config, changes, lambda: _save(trainer, config, value)):
            return _refused(refusal) | told
        facts = {"target_efficiency": config.policy.get("target_efficiency"), "calibrated": value != 1}
        return {"outcome": "taken", "reason": reason, "changes": changes, **facts, **told}


def _folder(trainer: Trainer) -> Path:
    return trainer.ledger_file.parent


def _save(trainer: Trainer, config: DictConfig, value: float) -> None:
    """Let a resumed run, and one that is told to change, go on by it: the launch stands once more."""
    last = read_launches(_folder(trainer))[-1]
    overrides = merge_overrides(last["overrides"], [f"{KEY}={value}"])
    launch = {**last, "overrides": overrides, "calibrated_at_sample": trainer.controller.progress.samples}
    save_snapshot(_folder(trainer), plain(config), launch)


def spent(trainer: Trainer) -> str:
    """What calibrations inside the run have taken beside training, as a sentence; empty for nothing."""
    probes, samples = trainer.probes, trainer.controller.progress.samples
    if not probes.samples:
        return ""
    return (
        f"calibration inside the run: {probes.samples:,} samples in branches, {probes.samples / max(samples, 1):.1%} of "
        f"those trained on, and {probes.seconds:.0f} s; not counted as training"
    )


def _refused(reason: str) -> dict[str, Any]:
    return {"outcome": "refused", "reason": reason, "changes": []}


def _geometry(run: Assembly) -> str:
    wanted = f"calibrate.times={run.config.calibrate.times}"
    if "calibration" not in run.config.policy:
        raise ConfigError(
            f"{wanted}: policy={run.policy.name} has no calibration to be measured; choose another policy, such as "
            f"target_efficiency, or set calibrate.times=0"
        )
    geometry = run.noise[0].geometry if run.noise else None
    if geometry not in run.config.calibrate.geometries:
        raise ConfigError(
            f"{wanted}: decisions go by the noise scale {geometry}, and calibrate.geometries="
            f"{plain(run.config)['calibrate']['geometries']} does not have it; it can have {', '.join(GEOMETRIES)}"
        )
    return geometry


def _total(run: Assembly) -> int:
    """Samples of the whole run."""
    total = run.budget.left(Progress(), run.task.tokens_per_sample)
    if not math.isfinite(total):
        raise ConfigError(
            f"calibrate.times={run.config.calibrate.times} is spread over the run, and its end is not known: set "
            f"stop.samples or stop.tokens"
        )
    return int(total)
