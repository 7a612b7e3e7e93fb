"""Applies a plan's scales to real optimizers: learning rates, betas, epsilon, weight decay, moments, step counters."""

from adabatch.optimizers.configured import KINDS as KINDS
from adabatch.optimizers.configured import Optimizers as Optimizers
from adabatch.optimizers.configured import bases as bases
from adabatch.optimizers.configured import each as each
from adabatch.optimizers.configured import kind as kind
from adabatch.optimizers.configured import prepare as prepare
from adabatch.optimizers.configured import rebase as rebase
from adabatch.optimizers.hidden import hidden_matrices as hidden_matrices
from adabatch.optimizers.switch import apply as apply
from adabatch.optimizers.torch_schedule import TorchSchedule as TorchSchedule
