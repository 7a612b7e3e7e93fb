"""Gradients: the only code that knows how a model is wrapped. Taps measure them, windows accumulate them."""

from adabatch.gradients.outcomes import Outcome
from adabatch.gradients.statistics import Pending
from adabatch.gradients.taps import Tap, attach
from adabatch.gradients.windows import Window, accumulate

__all__ = ["Outcome", "Pending", "Tap", "Window", "accumulate", "attach"]
