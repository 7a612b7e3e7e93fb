"""One canonical setting for every registered policy and rule, and the run that all of them are put through."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulated_run import simulate

from adabatch.controller import Controller
from adabatch.ledger import Ledger
from adabatch.noise import Estimate, Measurement, NoiseEstimator
from adabatch.plan import BatchLimits
from adabatch.policies import (
    Damping,
    Fixed,
    Observe,
    Policy,
    Replay,
    Stages,
    StepPrice,
    TargetEfficiency,
    WallClock,
)
from adabatch.progress import Budget
from adabatch.scaling import Scaling
from adabatch.schedules import Schedule

LIMITS = BatchLimits(world=2, micro_batch=8, min_batch=3, max_batch=200)
SAMPLES = 4_001
DWELL = 200
DECIDE_EVERY = 4


def recorded() -> Ledger:
    """A ledger with batches that no rounding would make, and the estimates of its changes."""
    ledger = Ledger()
    controller = controller_for(TargetEfficiency(0.5), limits=BatchLimits(world=3, micro_batch=5, rounding="none"))
    simulate(controller, scale, seed="recorded")
    ledger = Ledger.from_dict(controller.ledger.to_dict())
    assert len(ledger.segments) > 5
    return ledger


POLICIES: dict[str, Callable[[], Policy]] = {
    "target_efficiency": lambda: TargetEfficiency(0.6, calibration=1.5),
    "wall_clock": lambda: WallClock(calibration=1.5),
    "step_price": lambda: StepPrice(60.0, calibration=1.5),
    "fixed": lambda: Fixed(48),
    "observe": lambda: Observe(),
    "stages": lambda: Stages.parse("0:16, 1k:64, 1500:32, 3k:96"),
    "replay": lambda: Replay(recorded()),
}

RULES: dict[str, Scaling] = {
    "none": Scaling("none", 16),
    "linear": Scaling("linear", 16),
    "sqrt": Scaling("sqrt", 16),
    "adascale": Scaling("adascale", 16),
    "gain_power": Scaling("gain_power", 16, exponent=0.5),
    "surge": Scaling("surge", 16),
}


def scale(samples: int) -> float:
    """The true noise scale: rising, then falling."""
    return 20.0 + samples / 20 if samples < 2500 else 30.0


def controller_for(policy: Policy, rule: Scaling | None = None, **more: Any) -> Controller:
    settings: dict[str, Any] = {
        "limits": LIMITS,
        "start_batch": None if policy.batches else 10,
        "noise": NoiseEstimator(horizon=SAMPLES),
        "scaling": rule,
        "schedule": Schedule("cosine", SAMPLES, warmup=300),
        "damping": Damping(dwell=DWELL),
        "budget": Budget(samples=SAMPLES),
        "decide_every": DECIDE_EVERY,
    }
    return Controller(policy, **{**settings, **more})


def saved_and_restored(controller: Controller, into: Controller) -> Controller:
    """``into``, gone on from the JSON text that ``controller`` wrote."""
    state = json.loads(json.dumps(controller.state_dict(), allow_nan=False))
    into.load_state_dict(state, Ledger.from_dict(json.loads(controller.ledger.dumps())))
    return into


@dataclass(frozen=True, slots=True)
class Scripted:
    """An estimator that says what it is told, whatever was measured: the n-th estimate after the n-th window."""

    estimates: tuple[Estimate | None, ...]
    geometry: str = "scripted"

    def init(self) -> dict[str, int]:
        return {"windows": 0}

    def update(
        self, state: dict[str, int], measurement: Measurement, last_sample: int | None = None
    ) -> dict[str, int]:
        return {"windows": state["windows"] + 1}

    def memory(self, state: dict[str, int]) -> float:
        return 64.0

    def value(self, state: dict[str, int]) -> Estimate | None:
        return self.estimates[state["windows"] % len(self.estimates)]
