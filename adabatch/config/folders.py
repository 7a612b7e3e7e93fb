"""One run folder for all ranks, chosen once by rank 0, and used by one launch at a time."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from pathlib import Path
from typing import IO

from omegaconf import DictConfig

from adabatch import distributed
from adabatch.config.compose import ConfigError
from adabatch.config.resume import LAUNCHES, LOCK


def claim(config: DictConfig) -> tuple[Path, IO[str] | None]:
    """The run folder of this launch, the same on every rank, made where it is new; and, on rank 0, the lock on it.

    The folder is this launch's until the lock is closed or the process ends.

    Raises:
        ConfigError: on every rank, when ``run_folder`` already holds a run and ``resume`` does not name it, or when
            another launch uses the folder (with that one's process and host).
    """
    claimed: dict[str, str] = {}
    held = None
    if distributed.rank() == 0:
        try:
            folder = _make(config)
            held = _lock(folder)
            _require_unused(folder, config)
            claimed = {"folder": str(folder)}
        except (OSError, ConfigError) as error:
            claimed = {"error": f"no run folder: {error}"}
    claimed = distributed.agree(claimed)
    if "error" in claimed:
        if held is not None:
            held.close()
        raise ConfigError(claimed["error"])
    return Path(claimed["folder"]), held


def _lock(folder: Path) -> IO[str]:
    file = open(folder / LOCK, "a+", encoding="utf-8")
    try:
        # The process's own, not the open file's: data workers inherit that, and may outlive a killed rank by seconds.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ConfigError(f"{folder} is in use by {holder}; wait for it, or choose another run_folder") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def _make(config: DictConfig) -> Path:
    if config.resume is not None:
        return Path(config.resume).absolute()
    if config.run_folder is not None:
        folder = Path(config.run_folder).absolute()
        if not re.fullmatch(r"[\w.-]+", folder.name):
            raise ConfigError(f"run_folder={folder}: its last name may hold letters, digits, '_', '.' and '-'")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    runs = Path(config.runs).absolute()
    runs.mkdir(parents=True, exist_ok=True)
    name = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1, 1000):
        folder = runs / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise ConfigError(f"{runs} holds too many runs of {name}")


def _require_unused(folder: Path, config: DictConfig) -> None:
    """Refuse a folder that a run was started in. Asked under the lock, so that a live launch is named first."""
    if config.resume is None and ((folder / LAUNCHES).exists() or (folder / "metrics.jsonl").exists()):
        raise ConfigError(f"{folder} already holds a run; go on with it by resume={folder}, or name another")
