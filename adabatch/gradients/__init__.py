"""Gradients: the only code that knows how a model is wrapped. Taps measure them, windows accumulate them."""

from adabatch.gradients.aligned import Aligned, AlignmentTaps
from adabatch.gradients.layout import survey
from adabatch.gradients.outcomes import Outcome
from adabatch.gradients.rulers import Instrument, Ruler
from adabatch.gradients.statistics import Pending
from adabatch.gradients.taps import OneGroupWarning, Tap, attach
from adabatch.gradients.windows import Window, accumulate

__all__ = [
    "Aligned",
    "AlignmentTaps",
    "Instrument",
    "OneGroupWarning",
    "Outcome",
    "Pending",
    "Ruler",
    "Tap",
    "Window",
    "accumulate",
    "attach",
    "survey",
]
