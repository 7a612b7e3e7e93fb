"""The text of ``--help``: every group with its options, every setting with its value, its meaning and its bounds."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from adabatch.config.bounds import rules
from adabatch.config.compose import config_folder, options

_FIELD = re.compile(r"    (\w+): .*?  # (.+)")
_HOW = """Settings are key=value; "=option" chooses a whole section, whose settings then follow it:
    {program} policy=fixed policy.global_batch=64
Further: --cfg job prints the composed configuration, --info how it came about, and --multirun makes one run for each
of a comma-separated list of values (policy.target_efficiency=0.5,0.8; not under torchrun)."""


def usage(task: Callable[..., Any], config: DictConfig) -> str:
    """What can be set, with the values of ``config``.

    Args:
        task: a function of the recipe, whose module's docstring begins the text.
        config: the composed configuration; values may be missing.
    """
    about = inspect.getdoc(inspect.getmodule(task)) or ""
    return "\n".join([about, "", _HOW.format(program=sys.argv[0]), *_section(config, "")])


def sentences(schema: type) -> dict[str, str]:
    """The comment behind each field of a schema, by name; nothing where the source cannot be read."""
    try:
        source = "".join(inspect.getsource(one) for one in reversed(schema.__mro__[:-1]))
    except OSError:
        return {}
    return dict(match.groups() for line in source.splitlines() if (match := _FIELD.fullmatch(line)))


def _section(config: DictConfig, name: str) -> Iterator[str]:
    schema = OmegaConf.get_type(config)
    about, checked = sentences(schema), rules(schema)
    yield ""
    yield _heading(name, schema)
    nested = []
    for key in config:
        missing = OmegaConf.is_missing(config, key)
        if not missing and OmegaConf.is_dict(config[key]):
            nested.append(key)
            continue
        brief = checked[key].brief if key in checked else ""
        if brief is not None:
            setting = f"{name}.{key}" if name else str(key)
            bounds = f" ({brief})" if brief else ""
            yield f"  {setting + '=' + _shown(config, key):<44} {about.get(key, '')}{bounds}".rstrip()
    for key in nested:
        yield from _section(config[key], str(key))


def _heading(name: str, schema: type) -> str:
    if not name:
        return "The run"
    valid = f"={'|'.join(options(name))}" if (config_folder() / name).is_dir() else ""
    return f"{name}{valid}: {(inspect.getdoc(schema) or '').splitlines()[0]}"


def _shown(config: DictConfig, key: Any) -> str:
    if OmegaConf.is_missing(config, key):
        return "???"
    value = config[key]
    if OmegaConf.is_list(value):
        return "[" + ",".join(map(str, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
