"""Rulers: other lengths of a gradient than the Euclidean one, whose noise scale is measured in the same windows.

Every such length is a quadratic form, so that the same unbiased formulas hold for it: a squared length of the mean
gradient, and the sum of the groups' squared lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn


class Ruler(Protocol):
    """A way to measure gradients; one view of each window.

    Attributes:
        name: the view's name, as ``Measurement.views`` and an estimate's geometry say it.
    """

    name: str

    def open(self) -> None:
        """A window begins: what is needed from the optimizer is taken as it is now, before the window's step."""

    def square(self, index: int, gradient: Tensor) -> Tensor | None:
        """Squared length of the gradient of parameter ``index`` (of ``Layout.parameters``), a scalar; ``None`` where
        this view does not look."""


def lengths(rulers: Sequence[Ruler], parameters: Sequence[nn.Parameter], device: torch.device) -> list[Tensor]:
    """Squared length of the gradients that exist now, by every ruler, scalars in double precision."""
    gradients = [(index, parameter.grad) for index, parameter in enumerate(parameters) if parameter.grad is not None]
    return [
        summed([square for pair in gradients if (square := ruler.square(*pair)) is not None], device)
        for ruler in rulers
    ]


def summed(squares: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of scalars, in double precision; 0 for none."""
    if not squares:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(list(squares)).sum(dtype=torch.float64)
