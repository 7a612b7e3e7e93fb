"""adabatch: a global batch size that follows the gradient noise scale, around a standard torchrun loop.

The deciding half (controller, policies, ledger) loads without torch; the other names load torch when they are first
used.
"""

from __future__ import annotations

import importlib
from typing import Any

from adabatch.controller import Budget as Budget
from adabatch.controller import Controller as Controller
from adabatch.ledger import Ledger as Ledger
from adabatch.noise import Estimate as Estimate
from adabatch.noise import Measurement as Measurement
from adabatch.noise import NoiseEstimator as NoiseEstimator
from adabatch.plan import BatchLimits as BatchLimits
from adabatch.plan import BatchPlan as BatchPlan
from adabatch.plan import Scales as Scales
from adabatch.policies import Cabs as Cabs
from adabatch.policies import CosineTest as CosineTest
from adabatch.policies import Damping as Damping
from adabatch.policies import Facts as Facts
from adabatch.policies import Fixed as Fixed
from adabatch.policies import InnerProductTest as InnerProductTest
from adabatch.policies import LateSwitch as LateSwitch
from adabatch.policies import LossLaw as LossLaw
from adabatch.policies import NormTest as NormTest
from adabatch.policies import Observe as Observe
from adabatch.policies import Ramp as Ramp
from adabatch.policies import Replay as Replay
from adabatch.policies import Seesaw as Seesaw
from adabatch.policies import Stages as Stages
from adabatch.policies import StepPrice as StepPrice
from adabatch.policies import TargetEfficiency as TargetEfficiency
from adabatch.policies import WallClock as WallClock
from adabatch.progress import Progress as Progress
from adabatch.scaling import Scaling as Scaling
from adabatch.schedules import Schedule as Schedule

__version__ = "0.1.0"

_WITH_TORCH = {
    "accumulate": "adabatch.gradients",
    "agree": "adabatch.distributed",
    "apply": "adabatch.optimizers",
    "attach": "adabatch.gradients",
    "stream": "adabatch.data",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'adabatch' has no attribute {name!r}")
    return getattr(importlib.import_module(_WITH_TORCH[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WITH_TORCH])
