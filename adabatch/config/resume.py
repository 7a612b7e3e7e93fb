"""Going on with a run: its saved configuration, with what this launch changes, and what it may not change.

The values that a run was started with are its snapshot, not the YAML files of today. A resumed launch names only what
it changes; the difference that its overrides make to the composed configuration is laid over the snapshot.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from adabatch.config.compose import ConfigError, compose, is_group, parse, plain, require_complete
from adabatch.config.schema import GROUPS

SNAPSHOT = "config.yaml"
LAUNCHES = "launches.json"
LOCK = "lock"

# Another data set, order or model would make the checkpoint mean something else; seed and first batch had their effect.
FIXED_GROUPS = ("data.", "model.")
FIXED_KEYS = ("order_seed", "optimizer.name", "seed", "limits.start_batch")
# Where a launch runs and what it is asked to do are not part of the run.
LAUNCH_KEYS = ("resume", "run_folder", "runs", "name", "job", "curvature", "calibrate", "device", "threads", "workers")


@dataclass(frozen=True, slots=True)
class Change:
    """One key that differs between a run and the launch that goes on with it."""

    key: str
    old: Any
    new: Any
    outcome: str = "applied"


def save_snapshot(folder: Path, config: Mapping[str, Any], launch: Mapping[str, Any]) -> None:
    """Write the resolved configuration and append this launch; earlier snapshots are kept, numbered.

    A crash in between leaves the folder as it was or as it is to be, or with a new snapshot whose launch is not listed.
    """
    snapshot = folder / SNAPSHOT
    launches = read_launches(folder) if (folder / LAUNCHES).exists() else []
    if snapshot.exists():
        write_whole(folder / f"config.{len(launches)}.yaml", snapshot.read_text(encoding="utf-8"))
    write_whole(snapshot, to_text(config))
    write_whole(folder / LAUNCHES, json.dumps([*launches, dict(launch)], indent=2) + "\n")


def to_text(config: Mapping[str, Any]) -> str:
    """A plain configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(config)))


def write_whole(path: Path, text: str) -> None:
    """Write a file as a whole or not at all: a reader sees the old one or the new one, never a part."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def read_launches(folder: Path) -> list[dict[str, Any]]:
    """The program, arguments and overrides of every launch of a run, first to last."""
    try:
        launches = json.loads((folder / LAUNCHES).read_text(encoding="utf-8"))
        snapshot_there = (folder / SNAPSHOT).is_file()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{folder} is no run folder: it has no {LAUNCHES}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{folder / LAUNCHES} is not readable as JSON: {error}") from None
    if not snapshot_there or not isinstance(launches, list) or not launches:
        raise ConfigError(f"{folder} is no complete run folder: {SNAPSHOT} or the launches are missing")
    if not all(isinstance(one, dict) and {"program", "config", "overrides"} <= set(one) for one in launches):
        raise ConfigError(f"{folder / LAUNCHES}: every launch needs a program, its config and its overrides")
    return launches


def resumed(name: str, folder: Path, arguments: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """The configuration under which the run in ``folder`` goes on.

    Args:
        name: the root configuration of the program, which must be the run's own.
        folder: the run folder.
        arguments: this launch's overrides, ``resume=`` among them.

    Returns:
        The configuration, and the overrides that make it up from now on.

    Raises:
        ConfigError: when the folder is no run of this program, or when something changed that cannot change.
    """
    last = read_launches(folder)[-1]
    if last["config"] != name:
        raise ConfigError(f"{folder} is a run of the program {last['config']!r}, and this is {name!r}")
    snapshot = _flat(OmegaConf.load(folder / SNAPSHOT))
    added = [argument for argument in arguments if not argument.startswith("resume=")]
    old = merge_overrides(_choices(snapshot), last["overrides"])
    overrides = merge_overrides(old, added)
    before, config = _flat(compose(name, old)), compose(name, overrides)
    changed = {*LAUNCH_KEYS, *(key for key in map(_key, added) if not is_group(key))}
    for key, value in _flat(config).items():
        if key in snapshot and before.get(key, _ABSENT) == value and not _is_under(key, changed):
            OmegaConf.update(config, key, snapshot[key])
    refuse_fixed(list_changes(snapshot, _flat(config)))
    require_complete(config)
    return config, overrides


def merge_overrides(old: Sequence[str], added: Sequence[str]) -> list[str]:
    """``added`` after ``old``, without those of ``old`` that are about an option which ``added`` replaces.

    ``policy=replay`` does away with an earlier ``policy=fixed`` and ``policy.global_batch=32``.
    """
    keys = {override.partition("=")[0] for override in added}
    kept = [one for one in old if not any(one == key or one.startswith((f"{key}=", f"{key}.")) for key in keys)]
    return [*kept, *added]


def _choices(snapshot: Mapping[str, Any]) -> list[str]:
    """The snapshot's options of the groups that have several schemas: a root configuration may name others by now."""
    several = [group for group, schemas in GROUPS.items() if len(schemas) > 1]
    return [f"{group}={snapshot[f'{group}.name']}" for group in several if f"{group}.name" in snapshot]


def _key(override: str) -> str:
    return parse(override).key_or_group


def _is_under(key: str, roots: Collection[str]) -> bool:
    return key in roots or any(key.startswith(f"{root}.") for root in roots)


def list_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The keys whose values differ, those of the launch itself left out."""
    keys = [key for key in sorted({*old, *new}) if not _is_under(key, LAUNCH_KEYS)]
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def changes_since(saved: str, config: DictConfig) -> list[Change]:
    """What differs in ``config`` from the configuration in force when a checkpoint was written (``to_text``).

    The snapshot in the run folder would not do: a launch that was killed before its first checkpoint has changed it.
    """
    return list_changes(_flat(OmegaConf.create(saved)), _flat(config))


def refuse_fixed(changes: Sequence[Change]) -> None:
    """Raise for changes that would make the checkpoint mean something else."""
    fixed = [change for change in changes if change.key in FIXED_KEYS or change.key.startswith(FIXED_GROUPS)]
    if fixed:
        listed = "; ".join(f"{change.key}: {change.old!r} -> {change.new!r}" for change in fixed)
        raise ConfigError(
            f"a resumed run cannot change {listed}. Model, data, sample order, kind of optimizer, seed and first batch "
            f"are those that it began with: leave these keys out, or start a new run"
        )


def as_records(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """The changes as plain data, for the ledger and the log."""
    return [asdict(change) for change in changes]


def _flat(config: DictConfig, prefix: str = "") -> dict[str, Any]:
    data = plain(config) if isinstance(config, DictConfig) else config
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


_ABSENT = object()
