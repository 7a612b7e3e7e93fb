"""What a finished window is stepped with: the optimizer's step, unless the gradient is not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adabatch.gradients.statistics import Pending


class Outcome:
    """A finished window; made by ``Window.finish``.

    Attributes:
        measurement: pending; ``measurement.read()`` may wait for the device.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        measurement: Pending,
        skip: Tensor,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.measurement = measurement
        self._optimizers = optimizers
        self._skip = skip
        self._scaler = scaler

    def step(self) -> None:
        """Step the optimizers, or leave parameters, moments and counters alone when the gradient is not finite.

        On a GPU a fused optimizer skips on the device; for any other the host reads one number, and so waits, in each
        step. With a scaler the scaler steps, skips and updates its scale.
        """
        for optimizer in self._optimizers:
            if self._scaler is None:
                step_unless(self._skip, optimizer, on_device=self._skip.device.type != "cpu")
            else:
                scaled_step_unless(self._skip, optimizer, self._scaler)
        if self._scaler is not None:
            self._scaler.update()

    def skipped(self) -> bool:
        """Whether this window is skipped; waits for the device on the first call."""
        return not self.measurement.read().finite

    def stop_requested(self) -> bool:
        """Whether any rank asked to stop, the same on all ranks; waits for the device on the first call.

        Ask one window later to wait for nothing that is not long done, and only a window whose numbers have
        ``travelled``: for any other this is a collective.
        """
        return self.measurement.stop


def step_unless(skip: Tensor, optimizer: torch.optim.Optimizer, *, on_device: bool) -> None:
    """``optimizer.step()`` unless ``skip``; with ``on_device`` the optimizer decides there, where it can."""
    if on_device and skips_by_itself(optimizer):
        optimizer.grad_scale = None
        optimizer.found_inf = skip.float()
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
    elif not skip.item():
        optimizer.step()


def scaled_step_unless(skip: Tensor, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """``scaler.step(optimizer)``, which finds the NaN of a skipped window by itself.

    An optimizer that would spoil its state is kept out of it; ``unscale_`` then tells the scaler what it needs to know.
    """
    if _skips_unsafely(optimizer) and skip.item():
        scaler.unscale_(optimizer)
    else:
        scaler.step(optimizer)


def skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's kernel takes ``found_inf`` and leaves everything alone."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not _skips_unsafely(optimizer)


def _skips_unsafely(optimizer: torch.optim.Optimizer) -> bool:
    """Fused SGD's first step makes momentum buffers of uninitialised memory, and a skip leaves them so (torch 2.13)."""
    if not (isinstance(optimizer, torch.optim.SGD) and getattr(optimizer, "_step_supports_amp_scaling", False)):
        return False
    return any(
        optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for parameter in group["params"]
        if parameter.grad is not None
    )
