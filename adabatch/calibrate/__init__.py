"""The measured critical batch: short paired branches of a run at several batches, against its noise scales."""

from adabatch.calibrate.allowance import Refusal, calibrate_within, expected_cost
from adabatch.calibrate.branches import Bench, Branch, Cancelled
from adabatch.calibrate.calibration import Calibration, Settings, calibrate
from adabatch.calibrate.fitting import Bound, Critical, exponent, fit, foreseen, ratio
from adabatch.calibrate.measuring import GEOMETRIES, noise_scales
from adabatch.calibrate.snapshot import Snapshot
from adabatch.calibrate.tuning import Tuned, tune

__all__ = [
    "GEOMETRIES",
    "Bench",
    "Bound",
    "Branch",
    "Calibration",
    "Cancelled",
    "Critical",
    "Refusal",
    "Settings",
    "Snapshot",
    "Tuned",
    "calibrate",
    "calibrate_within",
    "expected_cost",
    "exponent",
    "fit",
    "foreseen",
    "noise_scales",
    "ratio",
    "tune",
]
