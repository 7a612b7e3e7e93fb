"""Composing a run's configuration with Hydra, and saying plainly what is wrong with it.

Everything that can be told without building a part is told here, before any process group starts: unknown names with
the nearest valid one, wrong types, values out of bounds, and all values that are missing at once.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from adabatch.config.bounds import problems
from adabatch.config.schema import GROUPS, RunConfig

# What Hydra raises for files and overrides that it cannot make a configuration of.
FAILURES = (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError)


class ConfigError(ValueError):
    """A configuration that cannot be run; the message says what would be valid.

    It is raised on every rank. ``rank`` is the one that prints it: the first, or the only one that met it.
    """

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


def config_folder() -> Path:
    """The folder of YAML groups: inside the package in a wheel, at the top of a source tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "hydra_configs", package.parent / "hydra_configs"):
        if folder.is_dir():
            return folder
    raise ConfigError(f"the configuration groups are missing beside {package}; reinstall adabatch")


def register(config: str, schemas: Mapping[str, Mapping[str, type]], whole: type = RunConfig) -> None:
    """Make the typed schemas known to Hydra: the ``whole``, and those of its own groups, in place of another's."""
    store = ConfigStore.instance()
    store.repo.pop("schema", None)
    store.store(group="schema", name=config, node=whole, package="_global_")
    for groups in (GROUPS, schemas):
        for group, entries in groups.items():
            for name, schema in entries.items():
                store.store(group=f"schema/{group}", name=name, node=schema)


def compose(config: str, overrides: Sequence[str]) -> DictConfig:
    """Compose ``config`` with command-line overrides.

    Raises:
        ConfigError: for an unknown key, option, value or type, with the valid names.
    """
    composed = compose_partly(config, overrides)
    require_complete(composed)
    require_legal(composed)
    return composed


def compose_partly(config: str, overrides: Sequence[str]) -> DictConfig:
    """Like ``compose``, but values may be missing or out of bounds."""
    for override in overrides:
        _require_plain(override)
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        try:
            return hydra.compose(config_name=config, overrides=list(overrides))
        except FAILURES as error:
            raise ConfigError("\n".join(_unknown(config, overrides)) or _readable(error)) from None


def require_complete(config: DictConfig) -> None:
    """Raise when values are missing, naming all of them at once."""
    if missing := sorted(_missing(config, "")):
        raise ConfigError("these values must be given: " + ", ".join(f"{key}=..." for key in missing))


def require_legal(config: DictConfig) -> None:
    """Raise when values are outside the bounds that the schemas declare, naming all of them at once."""
    if found := list(problems(config)):
        raise ConfigError("\n".join(found))


def options(group: str) -> list[str]:
    """The options of ``group`` that the registered program can use: those of a schema that it has."""
    return sorted(file.stem for file in (config_folder() / group).glob("*.yaml") if _is_usable(file))


def plain(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration as plain data."""
    data = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    assert isinstance(data, dict)
    return data


def parse(override: str) -> Override:
    """An override taken apart.

    Raises:
        ConfigError: when it cannot be read.
    """
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise ConfigError(
            f"cannot read {override!r} ({str(error).splitlines()[0]}); overrides are key=value, and a value with "
            f"special characters needs quotes of its own within the shell's: 'key=\"value\"'"
        ) from None


def _is_usable(file: Path) -> bool:
    """Whether the schemas that an option's file begins with, such as ``/schema/model/gpt@_here_``, are registered."""
    schemas = ConfigStore.instance().repo.get("schema", {}).get(file.parent.name, {})
    named = [entry for entry in OmegaConf.load(file).get("defaults", []) if str(entry).startswith("/schema/")]
    return all(f"{entry.rpartition('/')[2].partition('@')[0]}.yaml" in schemas for entry in named)


def is_group(key: str) -> bool:
    """Whether an override of ``key`` chooses an option of a group."""
    return (config_folder() / key).is_dir()


def _require_plain(override: str) -> None:
    """Refuse what does not set one existing key to one value, and options that do not exist."""
    parsed = parse(override)
    key = parsed.key_or_group
    if parsed.is_add() or parsed.is_force_add() or parsed.is_delete() or parsed.package is not None:
        raise ConfigError(f"{override!r}: keys are neither added, deleted nor moved; write {key}=value")
    if parsed.is_sweep_override():
        text = override.partition("=")[2]
        raise ConfigError(
            f"{override!r} lists several values: add --multirun to run once for each, or, when it is one text, quote "
            f"it within the shell's quotes: '{key}=\"{text}\"'"
        )
    if is_group(key):
        value = parsed.value()
        value = value.text if isinstance(value, QuotedString) else value
        file = config_folder() / key / f"{value}.yaml"
        if not (isinstance(value, str) and file.is_file() and _is_usable(file)):
            valid = options(key)
            raise ConfigError(f"there is no {key}={value}.{_hint(str(value), valid)} Valid options: {', '.join(valid)}")


def _unknown(config: str, overrides: Sequence[str]) -> list[str]:
    """A sentence for each override of a key that does not exist, with those that do and the nearest one."""
    keys = {override: parse(override).key_or_group for override in overrides}
    try:
        groups = [override for override, key in keys.items() if is_group(key)]
        without = hydra.compose(config_name=config, overrides=groups)
    except FAILURES:
        return []
    values = [key for key in keys.values() if not is_group(key) and not key.startswith("hydra")]
    return [sentence for key in values if (sentence := _unknown_part(without, key))]


def _unknown_part(config: DictConfig, key: str) -> str | None:
    node: Any = config
    walked: list[str] = []
    for part in key.split("."):
        names = sorted(map(str, node)) if OmegaConf.is_dict(node) else []
        if part not in names:
            where = ".".join(walked)
            hint = _elsewhere(config, where, part) or _hint(part, names, f"{where}." if where else "")
            valid = f"Valid names in {where or 'the top level'}: {', '.join(names) or 'none'}"
            return f"there is no {key}.{hint} {valid}"
        walked.append(part)
        node = None if OmegaConf.is_missing(node, part) else node[part]
    return None


def _hint(word: str, names: Sequence[str], prefix: str = "") -> str:
    """A question about the name nearest to ``word``, or nothing."""
    close = difflib.get_close_matches(word, names, n=1) or [name for name in names if name.startswith(word)][:1]
    return f" Did you mean {prefix}{close[0]}?" if close else ""


def _elsewhere(config: DictConfig, where: str, name: str) -> str:
    """Where a setting of this name is: in other options of the group, or in other sections."""
    owners = [
        f"{where}={option}"
        for option, schema in GROUPS.get(where, {}).items()
        if name in {one.name for one in dataclasses.fields(schema)}
    ]
    if owners:
        return f" It belongs to {' and '.join(owners)}."
    sections = [str(key) for key in config if OmegaConf.is_dict(config[key]) and name in config[key]]
    return f" There is {' and '.join(f'{section}.{name}' for section in sections)}." if sections else ""


def _readable(error: Exception) -> str:
    """The error's own words without what only Hydra's authors need."""
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key and cause.msg:
        return f"{cause.full_key}: {cause.msg.splitlines()[0]}"
    lines = str(error).partition("\nConfig search path")[0].splitlines()
    return "\n".join(line for line in lines if not line.startswith("    "))


def _missing(node: DictConfig, prefix: str) -> Iterator[str]:
    """The names of values that are missing, or are taken from a missing one."""
    for key in node:
        name = f"{prefix}{key}"
        try:
            value = node[key]
        except (MissingMandatoryValue, InterpolationToMissingValueError):
            yield name
            continue
        except InterpolationResolutionError as error:
            raise ConfigError(f"{name}: {str(error).splitlines()[0]}") from None
        if OmegaConf.is_dict(value):
            yield from _missing(value, f"{name}.")
