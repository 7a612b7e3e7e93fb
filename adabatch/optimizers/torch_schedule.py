"""torch's own learning-rate schedulers, counted in samples."""

from __future__ import annotations

from collections.abc import Callable

import torch


class TorchSchedule:
    """A torch learning-rate scheduler, read as a function of samples for ``Controller(schedule=...)``.

    The scheduler runs on a shadow optimizer with learning rate 1 and no parameters of the model, one tick for each
    reference batch of samples; its learning rate is the multiplier. So it means the same at every batch, and a resumed
    run needs nothing of it.

    Args:
        make: builds the scheduler for an optimizer, such as ``lambda optimizer: CosineAnnealingLR(optimizer, 1000)``.
        reference_batch: samples of one tick.
        warmup: samples during which the batch must not grow; the scheduler itself does not say.

    Raises:
        ValueError: for a scheduler that follows a metric, or a reference batch below 1.
    """

    unit = "samples"

    def __init__(
        self,
        make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
        *,
        reference_batch: int,
        warmup: int = 0,
    ) -> None:
        if reference_batch < 1:
            raise ValueError(f"reference_batch must be at least 1, got {reference_batch}")
        self.warmup = warmup
        self._reference_batch = reference_batch
        self._optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=1.0)
        self._scheduler = make(self._optimizer)
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau follows a metric and is no function of samples; use another scheduler")
        self._values = [self._rate()]

    def value(self, position: float) -> float:
        """The multiplier at ``position`` samples: the scheduler's value after ``position // reference_batch`` ticks."""
        tick = int(position // self._reference_batch)
        while len(self._values) <= tick:
            self._optimizer.step()  # of nothing; torch warns when a scheduler steps before its optimizer
            self._scheduler.step()
            self._values.append(self._rate())
        return self._values[tick]

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])
