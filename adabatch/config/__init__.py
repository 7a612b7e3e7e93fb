"""Typed configuration of a run: Hydra groups in ``hydra_configs``, schemas here, and the assembly of the parts.

Composing and checking load no torch; ``launch`` and ``Task`` do when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from adabatch.config.bounds import counted as counted
from adabatch.config.bounds import matching as matching
from adabatch.config.bounds import one_of as one_of
from adabatch.config.bounds import some_of as some_of
from adabatch.config.bounds import within as within
from adabatch.config.command import program as program
from adabatch.config.compose import ConfigError as ConfigError
from adabatch.config.compose import compose as compose

if TYPE_CHECKING:
    from adabatch.config.build import Task as Task
    from adabatch.config.launching import launch as launch

_WITH_TORCH = {"Task": "adabatch.config.build", "launch": "adabatch.config.launching"}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'adabatch.config' has no attribute {name!r}")
    return getattr(importlib.import_module(_WITH_TORCH[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WITH_TORCH])
