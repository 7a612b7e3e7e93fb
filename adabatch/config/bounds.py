"""What values a field may have, declared beside its default: intervals, choices, counts and patterns.

A schema says ``lr: float = within("(0, inf)", 1e-3)``; ``problems`` then finds every value of a composed configuration
that is outside, whether it came from a YAML file, the command line or a recipe's own schema.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from adabatch.progress import parse_count

_KEY = "adabatch"
_INTERVAL = re.compile(r"([\[(])(\S+), (\S+)([\])])")


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must be; an unset optional value always is.

    Attributes:
        valid: completes the sentence "must be ...".
        accepts: whether a value is.
        brief: the same for a table; empty when it goes without saying, ``None`` for what nobody sets.
    """

    valid: str
    accepts: Callable[[Any], bool]
    brief: str | None = ""


def within(interval: str, default: Any) -> Any:
    """A number in ``interval``, such as ``"[0, 1)"`` or ``"(0, inf)"``."""
    return _ruled(default, Rule(f"in {interval}", _inside(interval), interval))


def each_within(interval: str, default: list[Any]) -> Any:
    """A list of numbers in ``interval``."""
    inside, valid = _inside(interval), f"each in {interval}"
    return _ruled(default, Rule(f"a list of numbers, {valid}", lambda values: all(map(inside, values)), valid))


def one_of(default: Any, *others: Any) -> Any:
    """One of some values; the first is the default."""
    choices = tuple(dict.fromkeys((default, *others)))
    return _ruled(default, Rule(f"one of {_listed(choices)}", choices.__contains__, _listed(choices)))


def some_of(choices: tuple[str, ...], default: list[str]) -> Any:
    """A list of some of ``choices``."""
    some = f"some of {_listed(choices)}"
    return _ruled(default, Rule(f"a list of {some}", lambda value: set(value) <= set(choices), some))


def tag(name: str) -> Any:
    """The name of an option within its group: a mark that is no setting."""
    return _ruled(name, Rule(f"{name}, the chosen option's (choose another by <group>=...)", name.__eq__, None))


def counted(least: int, default: Any) -> Any:
    """Text that writes a whole number, such as ``1500`` or ``1.5k``."""

    def accepts(value: str) -> bool:
        try:
            return parse_count(value) >= least
        except ValueError:
            return False

    return _ruled(default, Rule(f"a whole number of at least {least}, such as 1500 or 1.5k", accepts))


def counted_or_share(default: Any) -> Any:
    """Text that writes a whole number such as ``2k``, or a share of the horizon such as ``3%``."""

    def accepts(value: str) -> bool:
        try:
            return 0 <= float(value[:-1]) < 100 if value.endswith("%") else parse_count(value) >= 0
        except ValueError:
            return False

    return _ruled(default, Rule("a whole number such as 2k, or a share of the horizon such as 3%", accepts))


def matching(pattern: str, valid: str, default: str) -> Any:
    """Text that ``pattern`` describes in full; ``valid`` says so in words."""
    return _ruled(default, Rule(valid, lambda value: re.fullmatch(pattern, value) is not None))


def each_matching(pattern: str, valid: str, default: list[str]) -> Any:
    """A list of texts that ``pattern`` describes in full; ``valid`` says so in words."""

    def accepts(values: Iterable[str]) -> bool:
        return all(re.fullmatch(pattern, value) for value in values)

    return _ruled(default, Rule(f"a list of {valid}", accepts, valid))


def rules(schema: type) -> dict[str, Rule]:
    """The rules of a schema's fields, by name."""
    if not dataclasses.is_dataclass(schema):
        return {}
    return {one.name: one.metadata[_KEY] for one in dataclasses.fields(schema) if _KEY in one.metadata}


def problems(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Each value that its field's rule refuses, as a sentence. Nothing may be missing in ``config``."""
    checked = rules(OmegaConf.get_type(config))
    for key in config:
        value = config[key]
        if OmegaConf.is_dict(value):
            yield from problems(value, f"{prefix}{key}.")
        elif value is not None and key in checked and not checked[key].accepts(value):
            shown = OmegaConf.to_container(value) if OmegaConf.is_list(value) else value
            yield f"{prefix}{key} must be {checked[key].valid}, got {shown!r}"


def _ruled(default: Any, rule: Rule) -> Any:
    metadata = {_KEY: rule}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _inside(interval: str) -> Callable[[float], bool]:
    match = _INTERVAL.fullmatch(interval)
    assert match, f"{interval!r} is no interval"
    low, high = float(match[2]), float(match[3])
    closed_low, closed_high = match[1] == "[", match[4] == "]"

    def accepts(value: float) -> bool:
        return low < value < high or (closed_low and value == low) or (closed_high and value == high)

    return accepts


def _listed(choices: tuple[Any, ...]) -> str:
    return ", ".join("null" if choice is None else str(choice) for choice in choices)
