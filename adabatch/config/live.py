"""Live control: a running job looks at its control file when a decision is due, and takes what it asks for, or says no.

Rank 0 looks, and all ranks go by what it found, so that they change at the same step. Whatever is wrong with the file,
the run goes on as it was.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from adabatch import distributed
from adabatch.config import control
from adabatch.config.build import build_settings
from adabatch.config.compose import plain
from adabatch.config.resume import LAUNCH_KEYS, as_records, read_launches, save_snapshot, to_text
from adabatch.controller import Controller
from adabatch.loop import Trainer

# A file's identity: modification time in ns, size and inode.
_Signature = tuple[int, int, int]


class LiveControl:
    """What a trainer calls when a decision is due, on all ranks.

    Args:
        name: the root configuration of the program.
        folder: the run folder, which holds the file that asks.
        config: this launch's configuration, which says where it runs.
    """

    def __init__(self, name: str, folder: Path, config: DictConfig) -> None:
        self._name, self._folder = name, folder
        self._launch = {key: config[key] for key in LAUNCH_KEYS if not OmegaConf.is_dict(config[key])}
        self._seen: _Signature | None = None
        self._glimpsed: _Signature | None = None

    def __call__(self, trainer: Trainer) -> None:
        """Take over what the file asks for, if it is new, and answer it."""
        found = distributed.agree(self._look() if trainer.world.rank == 0 else None)
        if found is None:
            return
        refusal = found["refusal"] or self._take(trainer, found)
        answer = {**trainer.where(), **(_refused(refusal) if refusal else _taken(found))}
        trainer.log.control(answer)
        if trainer.world.rank == 0:
            told = {**answer, "digest": found["digest"], "time": time.time()}
            attempt("answer to a control file", lambda: control.write_answer(self._folder, told))
        trainer.stopwatch.restart()

    # -- on rank 0

    def _look(self) -> dict[str, Any] | None:
        """What a new request comes to; ``None`` when there is none."""
        file = self._folder / control.REQUEST
        try:
            status = os.stat(file)
        except OSError:
            return None
        signature = (status.st_mtime_ns, status.st_size, status.st_ino)
        if signature == self._seen:
            return None
        try:
            text = file.read_bytes()
        except OSError as error:
            self._seen = signature
            return {"digest": None, "refusal": f"{control.REQUEST} cannot be read: {error}"}
        # A file that is being written by hand is one that differs the next time.
        if not control.ends_as_written(text) and signature != self._glimpsed:
            self._glimpsed = signature
            return None
        self._seen = signature
        if control.digest_of(text) == control.read_answer(self._folder).get("digest"):
            return None
        return self._judge(text)

    def _judge(self, text: bytes) -> dict[str, Any] | None:
        found: dict[str, Any] = {"digest": control.digest_of(text), "refusal": None}
        try:
            asked = control.read_request(text)
            if not asked.overrides:
                return None
            checked = control.check(self._name, self._folder, asked.overrides)
            config = {**plain(checked.config), **self._launch}
            found |= {"config": config, "overrides": checked.overrides, "changes": as_records(checked.changes)}
            json.dumps(found)
        except Exception as error:  # whatever is wrong with a file, losing the run would be worse
            return {**found, "refusal": str(error) or repr(error)}
        return found

    # -- on all ranks

    def _take(self, trainer: Trainer, found: Mapping[str, Any]) -> str | None:
        """Go on under the new configuration; returns why not, when the run cannot."""
        if not found["changes"]:
            return None
        sample = trainer.controller.progress.samples
        config = OmegaConf.create(found["config"])
        return go_on_under(trainer, config, found["changes"], lambda: self._save(found, sample))

    def _save(self, found: Mapping[str, Any], sample: int) -> None:
        """Let a resumed run go on under this: the launch stands once more, with its overrides as they are by now."""
        launch = {**read_launches(self._folder)[-1], "overrides": found["overrides"], "live_since_sample": sample}
        save_snapshot(self._folder, found["config"], launch)


def go_on_under(
    trainer: Trainer, config: DictConfig, changes: Sequence[Mapping[str, Any]], save: Callable[[], None]
) -> str | None:
    """Let a running job go on under ``config``, on all ranks between the same two steps.

    Args:
        changes: what differs, for the ledger.
        save: writes the configuration into the run folder, on rank 0.

    Returns:
        Why the run cannot; then nothing has changed.
    """
    before = len(trainer.controller.ledger.decisions)
    refusal = _adopt(trainer.controller, config)
    if refusal:
        return refusal
    trainer.controller.splice(changes)
    trainer.settings = build_settings(config)
    trainer.calibration = config.policy.get("calibration", 1.0)
    trainer.extra = {**trainer.extra, "run": {**trainer.extra["run"], "config": to_text(plain(config))}}
    if trainer.world.rank == 0:
        attempt("configuration as it is now", save)
    for decision in trainer.controller.ledger.decisions[before:]:
        trainer.record_decision(decision)
    trainer.save_ledger()
    return None


def _taken(found: Mapping[str, Any]) -> dict[str, Any]:
    policy = found["config"]["policy"]
    return {
        "outcome": "taken",
        "reason": None,
        "changes": found["changes"],
        "target_efficiency": policy.get("target_efficiency"),
        "calibrated": policy.get("calibration", 1.0) != 1,
    }


def _refused(reason: str) -> dict[str, Any]:
    return {"outcome": "refused", "reason": reason, "changes": []}


def attempt(what: str, write: Callable[[], None]) -> None:
    """Write a file into the run folder; a failure is reported, and training goes on."""
    try:
        write()
    except (OSError, ValueError) as error:
        print(f"adabatch: the {what} was not written, training goes on: {error}", file=sys.stderr, flush=True)


def _adopt(controller: Controller, config: DictConfig) -> str | None:
    """Hand new parts to the controller; returns why not, when one rank cannot make them or the run cannot use them."""
    parts: dict[str, Any] = {}
    refusal = None
    try:
        parts = control.build_parts(config, controller.limits.world)
    except (OSError, ValueError) as error:
        refusal = str(error)
    failed = torch.zeros(distributed.size(), device=distributed.control_device())
    failed[distributed.rank()] = float(refusal is not None)
    if wrong := distributed.all_reduce_sum(failed).nonzero().flatten().tolist():
        return refusal or f"rank {wrong[0]} has refused it"
    try:
        controller.adopt(**parts)
    except ValueError as error:
        return str(error)
    return None
