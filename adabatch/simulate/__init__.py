"""Policies tried out without training: the real controller against a known truth, on a modelled cluster."""

from __future__ import annotations

from adabatch.simulate.cluster import Cluster as Cluster
from adabatch.simulate.comparison import Comparison as Comparison
from adabatch.simulate.comparison import compare as compare
from adabatch.simulate.curves import CurveTruth as CurveTruth
from adabatch.simulate.curves import Exponential as Exponential
from adabatch.simulate.curves import LossLaw as LossLaw
from adabatch.simulate.curves import PowerLaw as PowerLaw
from adabatch.simulate.curves import Recorded as Recorded
from adabatch.simulate.run import Outcome as Outcome
from adabatch.simulate.run import Simulation as Simulation
from adabatch.simulate.windows import Truth as Truth
