"""A whole simulated run against its recorded ledger: a change of any decision has to be made on purpose.

    python tests/golden/test_golden.py      records it anew; say in the commit why it changed
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulated_run import simulate

from adabatch.controller import Budget, Controller
from adabatch.ledger import Ledger
from adabatch.noise import NoiseEstimator
from adabatch.plan import BatchLimits
from adabatch.policies import Damping, TargetEfficiency
from adabatch.scaling import Scaling
from adabatch.schedules import Schedule

RECORDED = Path(__file__).with_name("ledger.json")
SAMPLES = 40_000


def run() -> Ledger:
    """A run under all defaults whose true noise scale grows from 40 to 600."""
    controller = Controller(
        TargetEfficiency(0.5),
        limits=BatchLimits(2, 8),
        start_batch=16,
        noise=NoiseEstimator(horizon=SAMPLES),
        scaling=Scaling("sqrt", 16),
        schedule=Schedule("cosine", horizon=SAMPLES, warmup=3_000),
        damping=Damping(dwell=1_600),
        budget=Budget(samples=SAMPLES),
    )
    simulate(controller, lambda sample: 40 * 15 ** (sample / SAMPLES), seed="golden")
    return controller.ledger


def same(one: Any, other: Any) -> bool:
    """Equality of plain data, numbers to 1e-9: mathematical libraries differ in the last digit."""
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    return one == other


def test_the_run_is_the_recorded_one() -> None:
    recorded = Ledger.load(RECORDED).to_dict()
    found = run().to_dict()
    assert found["segments"] == recorded["segments"]
    assert same(json.loads(json.dumps(found)), json.loads(json.dumps(recorded)))


def test_the_run_exercises_the_decisions() -> None:
    kinds = {decision.kind for decision in Ledger.load(RECORDED).decisions}
    assert {"grow", "dwell", "warmup", "interval"} <= kinds


if __name__ == "__main__":
    run().save(RECORDED)
