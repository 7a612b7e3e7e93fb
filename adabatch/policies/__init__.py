"""Which batch is wanted, and how fast the run may follow."""

from __future__ import annotations

from adabatch.policies.damping import Damping as Damping
from adabatch.policies.damping import Proposal as Proposal
from adabatch.policies.damping import Situation as Situation
from adabatch.policies.efficiency import TargetEfficiency as TargetEfficiency
from adabatch.policies.forecast import Curve as Curve
from adabatch.policies.literature import Cabs as Cabs
from adabatch.policies.literature import CosineTest as CosineTest
from adabatch.policies.literature import InnerProductTest as InnerProductTest
from adabatch.policies.literature import LossLaw as LossLaw
from adabatch.policies.literature import NormTest as NormTest
from adabatch.policies.open_loop import Fixed as Fixed
from adabatch.policies.open_loop import LateSwitch as LateSwitch
from adabatch.policies.open_loop import Observe as Observe
from adabatch.policies.open_loop import Ramp as Ramp
from adabatch.policies.open_loop import Replay as Replay
from adabatch.policies.open_loop import Seesaw as Seesaw
from adabatch.policies.open_loop import Stages as Stages
from adabatch.policies.prices import StepPrice as StepPrice
from adabatch.policies.prices import WallClock as WallClock
from adabatch.policies.protocol import Facts as Facts
from adabatch.policies.protocol import Policy as Policy
from adabatch.policies.protocol import Price as Price
from adabatch.policies.protocol import State as State
from adabatch.policies.protocol import Wanted as Wanted
from adabatch.policies.protocol import describe_scale as describe_scale
from adabatch.policies.protocol import supported_scale as supported_scale

POLICIES: dict[str, type] = {
    policy.name: policy
    for policy in (
        TargetEfficiency,
        WallClock,
        StepPrice,
        NormTest,
        InnerProductTest,
        CosineTest,
        Cabs,
        LossLaw,
        Ramp,
        Stages,
        Seesaw,
        LateSwitch,
        Replay,
        Fixed,
        Observe,
    )
}
