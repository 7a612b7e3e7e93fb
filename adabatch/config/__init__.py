"""Typed configuration of a run: Hydra groups in ``hydra_configs``, schemas here, and the assembly of the parts."""

from adabatch.config.build import Task as Task
from adabatch.config.build import launch as launch
from adabatch.config.compose import ConfigError as ConfigError
from adabatch.config.compose import compose as compose
from adabatch.config.compose import program as program
