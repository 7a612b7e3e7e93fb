"""``job=calibrate``: the measured critical batch at checkpoints of a run, in its ``calibrations.json`` and printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from adabatch import data
from adabatch.calibrate import Bench, Calibration, Settings, calibrate, records
from adabatch.checkpoint import Checkpoints
from adabatch.config.build import Assembly
from adabatch.config.compose import ConfigError, plain
from adabatch.loop import HeldOut
from adabatch.runlog import read_calibrations

Restore = Callable[[Checkpoints, dict[str, Any], Path], Any]


def report(run: Assembly, restore: Restore) -> None:
    """Calibrate at the asked checkpoints, append what was found to the run folder, and print it.

    Nothing else in the folder changes.

    Args:
        run: the parts of the run, to be brought to each checkpoint.
        restore: does that, from the checkpoints, the data's fingerprint and a checkpoint's path.

    Raises:
        ConfigError: without a run to resume or such a checkpoint.
        ValueError: for what ``adabatch.calibrate`` does not take.
    """
    config = run.config
    if config.resume is None:
        raise ConfigError("job=calibrate is about checkpoints of a run: give resume=<run folder>")
    folder = Path(config.resume)
    checkpoints, fingerprint = Checkpoints(folder / "checkpoints"), data.fingerprint(run.task.train_data)
    read_calibrations(folder)  # a file that nothing can be added to is better met before than after the work
    found = []
    for path in chosen(checkpoints, config.calibrate.steps):
        restore(checkpoints, fingerprint, path)
        found.append(at_checkpoint(run, path))
        if run.world.is_first:
            records.append(folder, found[-1:])
    if run.world.is_first:
        print(json.dumps(found, allow_nan=False, indent=2) if config.calibrate.json else _text(found), flush=True)


def at_checkpoint(run: Assembly, path: Path) -> dict[str, Any]:
    """The record of a calibration where ``run`` stands, which is at the checkpoint ``path``."""
    config, progress = run.config, run.controller.progress
    geometry = run.noise[0].geometry if run.noise else "euclidean"
    _say(run, f"{path.name}: sample {progress.samples:,}, batch {run.controller.batch}")
    calibration = calibrate(
        bench_of(run),
        settings_of(config),
        present=run.controller.batch,
        geometry=geometry,
        dataset_size=len(run.task.train_data) if config.noise.finite_data else None,
        say=lambda line: _say(run, f"  {line}"),
    )
    return record_of(run, calibration, geometry, config)


def record_of(run: Assembly, found: Calibration, geometry: str, config: DictConfig) -> dict[str, Any]:
    """A calibration where ``run`` stands as plain data, under the configuration in force there."""
    progress = run.controller.progress
    return records.to_record(
        found,
        step=progress.steps,
        sample=progress.samples,
        geometry=geometry,
        present=run.controller.batch,
        world=run.world.size,
        seeds={"seed": config.seed, "order_seed": config.order_seed},
        settings=plain(config)["calibrate"],
        config=plain(config),
    )


def bench_of(run: Assembly) -> Bench:
    """What branches of ``run`` are made of, where it stands."""
    config = run.config
    held_out = HeldOut(run.task.held_out, run.task.metrics, config.calibrate.held_out, config.limits.micro_batch)
    return Bench.at(
        run.controller,
        model=run.model,
        plain_model=run.plain_model,
        optimizer=run.optimizer,
        loss=run.task.loss,
        tap=run.tap,
        world=run.world,
        held_out=held_out,
        train_data=run.task.train_data,
        order_seed=config.order_seed,
        seed=config.seed,
        clip_norm=run.settings.clip_norm,
        precision=run.settings.precision,
    )


def settings_of(config: DictConfig) -> Settings:
    wanted = plain(config)["calibrate"]
    own = {field.name for field in fields(Settings)}
    return Settings(**{name: value for name, value in wanted.items() if name in own})


def chosen(checkpoints: Checkpoints, wanted: list[str]) -> list[Path]:
    """The checkpoints by step, or ``early``, ``middle`` and ``late`` of those that are there; each once, in order.

    Raises:
        ConfigError: when there is none, or not one of a step that was asked for.
    """
    saved = checkpoints.at_steps()
    if not saved:
        raise ConfigError(f"the run has no complete checkpoint in {checkpoints.folder}; let it save one first")
    steps = sorted(saved)
    named = {"early": steps[0], "middle": steps[(len(steps) - 1) // 2], "late": steps[-1]}
    asked = [named[one] if one in named else int(one) for one in wanted]
    if missing := [step for step in asked if step not in saved]:
        raise ConfigError(
            f"there is no complete checkpoint of step {', '.join(map(str, missing))} in {checkpoints.folder}; there "
            f"are: {', '.join(map(str, steps))}"
        )
    return [saved[step] for step in sorted(set(asked))]


def _say(run: Assembly, line: str) -> None:
    if run.world.is_first:
        print(line, file=sys.stderr, flush=True)


def _text(found: list[Mapping[str, Any]]) -> str:
    return "\n\n".join([*map(records.to_text, found), records.recommended(found)])
