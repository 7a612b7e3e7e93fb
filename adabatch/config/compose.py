"""Composing a run's configuration with Hydra, and saying plainly what is wrong with it."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adabatch.config.schema import GROUPS, RunConfig


class ConfigError(ValueError):
    """A configuration that cannot be run; the message says what would be valid."""


def config_folder() -> Path:
    """The folder of YAML groups: beside this package in a wheel, at the top of a source tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "hydra_configs", package.parent / "hydra_configs"):
        if folder.is_dir():
            return folder
    raise ConfigError(f"the configuration groups are missing beside {package}; reinstall adabatch")


def register(config: str, schemas: Mapping[str, Mapping[str, type]]) -> None:
    """Make the typed schemas known to Hydra: the run's, and those of a recipe's own groups."""
    store = ConfigStore.instance()
    store.store(group="schema", name=config, node=RunConfig, package="_global_")
    for groups in (GROUPS, schemas):
        for group, entries in groups.items():
            for name, schema in entries.items():
                store.store(group=f"schema/{group}", name=name, node=schema)


def compose(config: str, overrides: Sequence[str]) -> DictConfig:
    """Compose ``config`` with command-line overrides.

    Raises:
        ConfigError: for an unknown key, option, value or type, with the valid names.
    """
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        base = _compose(config, [override for override in overrides if _is_group(override)])
        for override in overrides:
            _require_known(base, override)
        composed = _compose(config, overrides)
    require_complete(composed)
    return composed


def require_complete(config: DictConfig) -> None:
    """Raise when values are missing, naming all of them at once."""
    if missing := sorted(_missing(config, "")):
        raise ConfigError("these values must be given: " + ", ".join(f"{key}=..." for key in missing))


def _compose(config: str, overrides: Sequence[str]) -> DictConfig:
    try:
        return hydra.compose(config_name=config, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        reasons = [str(error)]
        if error.__cause__ is not None and str(error.__cause__) not in reasons[0]:
            reasons.append(str(error.__cause__))
        raise ConfigError("\n".join(reasons)) from None


def _parse(override: str) -> Any:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise ConfigError(f"cannot read {override!r}; overrides are key=value ({error})") from None


def _is_group(override: str) -> bool:
    key = _parse(override).key_or_group
    return (config_folder() / key.split("@")[0]).is_dir()


def _require_known(config: DictConfig, override: str) -> None:
    """Refuse a key that does not exist, naming those that do and the nearest one."""
    parsed = _parse(override)
    if _is_group(override) or parsed.is_add() or parsed.is_force_add() or parsed.key_or_group.startswith("hydra"):
        return
    node: Any = config
    walked: list[str] = []
    for part in parsed.key_or_group.split("."):
        names = [str(name) for name in node] if OmegaConf.is_dict(node) else []
        if part not in names:
            where = ".".join(walked) or "the top level"
            close = difflib.get_close_matches(part, names, n=1)
            hint = f" Did you mean {'.'.join([*walked, close[0]])}?" if close else ""
            raise ConfigError(
                f"there is no {part!r} in {where}, so {override!r} sets nothing.{hint} "
                f"Valid names: {', '.join(sorted(names)) or 'none'}"
            )
        walked.append(part)
        missing = OmegaConf.is_missing(node, part)
        node = None if missing else OmegaConf.to_container(node, resolve=False).get(part)
        node = OmegaConf.create(node) if isinstance(node, dict) else node


def _missing(node: DictConfig, prefix: str) -> list[str]:
    found: list[str] = []
    for key in node:
        name = f"{prefix}{key}"
        if OmegaConf.is_missing(node, key):
            found.append(name)
        elif not OmegaConf.is_interpolation(node, key) and OmegaConf.is_dict(node[key]):
            found.extend(_missing(node[key], f"{name}."))
    return found


def plain(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration as plain data."""
    data = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    assert isinstance(data, dict)
    return data


def program(
    task: Callable[[DictConfig, Sequence[str]], int], *, config: str, schemas: Mapping[str, Mapping[str, type]]
) -> int:
    """The entry point of a recipe: compose the command line's configuration and hand it to ``task``.

    Hydra's own flags (``--help``, ``--cfg job``, ``--info``) work as usual. ``--multirun`` is refused under torchrun,
    whose processes cannot each start a sweep.

    Returns:
        The exit status: that of ``task``, or 2 for a configuration that cannot be run.
    """
    register(config, schemas)
    arguments = sys.argv[1:]
    try:
        if any(argument.startswith("-") for argument in arguments):
            return _hydra_main(task, config, arguments)
        return task(compose(config, arguments), arguments)
    except ConfigError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"configuration error: {error}", file=sys.stderr)
        return 2


def _hydra_main(task: Callable[[DictConfig, Sequence[str]], int], config: str, arguments: Sequence[str]) -> int:
    if {"-m", "--multirun"} & set(arguments) and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "--multirun cannot run under torchrun: every rank would start its own sweep. Start one torchrun for each "
            "setting, for example: for e in 0.5 0.8; do torchrun ... policy.target_efficiency=$e; done"
        )
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    status: list[int] = []

    def run(composed: DictConfig) -> None:
        require_complete(composed)
        status.append(task(composed, overrides))

    hydra.main(config_path=str(config_folder()), config_name=config, version_base="1.3")(run)()
    return max(status, default=0)
