"""One canonical setting for every registered policy, rule and damping, and the run that all of them are put through."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulated_run import Trace, simulate

from adabatch.controller import Controller
from adabatch.ledger import Decision, Ledger
from adabatch.noise import Estimate, Measurement, NoiseEstimator
from adabatch.plan import BatchLimits, BatchPlan
from adabatch.policies import (
    Cabs,
    CosineTest,
    Damping,
    Fixed,
    InnerProductTest,
    LateSwitch,
    LossLaw,
    NormTest,
    Observe,
    Policy,
    Ramp,
    Replay,
    Seesaw,
    Stages,
    StepPrice,
    TargetEfficiency,
    WallClock,
)
from adabatch.progress import Budget
from adabatch.scaling import Scaling
from adabatch.schedules import Schedule
from adabatch.throughput import Lap

LIMITS = BatchLimits(world=2, micro_batch=8, min_batch=3, max_batch=200)
SAMPLES = 4_001
DWELL = 200
DECIDE_EVERY = 4


def schedule(unit: int = 1) -> Schedule:
    return Schedule("cosine", SAMPLES * unit, warmup=300 * unit)


@functools.cache
def recorded(unit: int) -> Ledger:
    """A ledger with batches that no rounding would make, and the estimates of its changes."""
    limits = BatchLimits(world=3 * unit, micro_batch=5, rounding="none")
    controller = controller_for(TargetEfficiency(0.5), unit=unit, limits=limits)
    simulate(controller, lambda samples: scale(samples, unit), seed="recorded")
    ledger = Ledger.from_dict(controller.ledger.to_dict())
    assert len(ledger.segments) > 5
    return ledger


# Each for a run whose samples, noise scale and ranks are ``unit`` times as many.
POLICIES: dict[str, Callable[[int], Policy]] = {
    "target_efficiency": lambda unit: TargetEfficiency(0.6, calibration=1.5),
    "wall_clock": lambda unit: WallClock(calibration=1.5),
    "step_price": lambda unit: StepPrice(60.0 * unit, calibration=1.5),
    "norm_test": lambda unit: NormTest(0.7),
    "inner_product_test": lambda unit: InnerProductTest(0.8),
    "cosine_test": lambda unit: CosineTest(0.3),
    "cabs": lambda unit: Cabs(1.5, schedule(unit)),
    "loss_law": lambda unit: LossLaw(20 * unit, 3.0),
    "ramp": lambda unit: Ramp(16 * unit, 96 * unit, 16 * unit, 2_500 * unit),
    "stages": lambda unit: Stages(
        ((0, 16 * unit), (1_000 * unit, 64 * unit), (1_500 * unit, 32 * unit), (3_000 * unit, 96 * unit))
    ),
    "seesaw": lambda unit: Seesaw(16 * unit, schedule(unit), cap=8.0),
    "late_switch": lambda unit: LateSwitch(16 * unit, 80 * unit, at=3_000 * unit),
    "replay": lambda unit: Replay(recorded(unit)),
    "fixed": lambda unit: Fixed(48 * unit),
    "observe": lambda unit: Observe(),
}

RULES: dict[str, Scaling] = {
    "none": Scaling("none", 16),
    "linear": Scaling("linear", 16),
    "sqrt": Scaling("sqrt", 16),
    "adascale": Scaling("adascale", 16),
    "gain_power": Scaling("gain_power", 16, exponent=0.5),
    "surge": Scaling("surge", 16),
}

DAMPINGS: dict[str, Damping] = {
    "default": Damping(dwell=DWELL),
    "monotone": Damping(dwell=DWELL, monotone=True),
    "slow": Damping(dwell=3 * DWELL, growth=1.5, dead_band=1.4, interval_gate=False),
    "off": Damping(warmup_guard=False, interval_gate=False, growth=1e9, dead_band=1.0),
}


def scale(samples: int, unit: int = 1) -> float:
    """The true noise scale: rising, then falling."""
    return unit * (20.0 + samples / unit / 20 if samples < 2500 * unit else 30.0)


def loss(samples: int, unit: int = 1) -> float:
    """The training loss: falling fast, then slowly, with a spike."""
    return 5.0 if 2000 * unit <= samples < 2400 * unit else 1.0 + 3.0 / (1 + samples / unit / 400)


@dataclass(frozen=True, slots=True)
class Timed:
    """A lap that can be read at once."""

    value: Lap

    def read(self) -> Lap:
        return self.value


def lap(plan: BatchPlan) -> Timed:
    """Steps of a fixed time that is worth 48 samples of all ranks, without noise."""
    pieces = [1e-3 * size for size in plan.pieces(0)]
    return Timed(Lap(48e-3 / 2 + sum(pieces), sum(pieces[:-1])))


def controller_for(
    policy: Policy, rule: Scaling | None = None, damping: str = "default", unit: int = 1, **more: Any
) -> Controller:
    settings: dict[str, Any] = {
        "limits": LIMITS,
        "start_batch": None if policy.batches else 10 * unit,
        "noise": NoiseEstimator(horizon=SAMPLES * unit),
        "scaling": rule,
        "schedule": schedule(unit),
        "damping": DAMPINGS[damping],
        "budget": Budget(samples=SAMPLES * unit),
        "decide_every": DECIDE_EVERY,
    }
    return Controller(policy, **{**settings, **more})


def train(controller: Controller, unit: int = 1, **more: Any) -> Trace:
    """A run whose noise scale, loss and step times are those above; the times are taken where a policy needs them."""
    settings: dict[str, Any] = {
        "loss": lambda samples: loss(samples, unit),
        "lap": lap if "price" in controller.policy.needs else None,
    }
    return simulate(controller, lambda samples: scale(samples, unit), **{**settings, **more})


def saved_and_restored(controller: Controller, into: Controller) -> Controller:
    """``into``, gone on from the JSON text that ``controller`` wrote."""
    state = json.loads(json.dumps(controller.state_dict(), allow_nan=False))
    into.load_state_dict(state, Ledger.from_dict(json.loads(controller.ledger.dumps())))
    return into


def policy(name: str, unit: int = 1) -> Policy:
    assert name in POLICIES, f"policy {name!r} is registered and has no canonical setting in canonical.py"
    return POLICIES[name](unit)


def changes(controller: Controller) -> list[Decision]:
    return [decision for decision in controller.ledger.decisions if decision.changed]


def check_reason(change: Decision) -> None:
    words = change.reason.split()
    assert len(words) >= 4, "a sentence"
    assert "\n" not in change.reason
    assert "nan" not in words
    assert any(str(number) in change.reason.replace(",", "") for number in (change.batch, change.sample))


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
