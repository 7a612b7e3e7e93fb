"""A noisy quadratic: a loss with known curvatures and known noise, trained by SGD with or without momentum.

    loss = 1/2 sum h_i theta_i^2,    gradient of one sample = h_i theta_i + N(0, s_i)

Here the learning rate matters: G, the noise scale and the loss are what the updates make of them, and at a constant
rate the noise scale ends as a thermometer of it (arXiv 1812.06162, appendix C).

The parameters that are measured are one draw. Beside them run their second moments, which are what is true on average
over all draws, for the batches and learning rates that this one had: so losses compare without their noise.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from adabatch.noise import Measurement
from adabatch.plan import BatchPlan
from adabatch.simulate.windows import Diverged, Groups, Moment, grouped


class Quadratic:
    """The parameters of a quadratic in training.

    The critical batch is that of the one-step model, tr(H Sigma) / E[G'HG] (arXiv 1812.06162, section 2.2); it equals
    the noise scale tr(Sigma) / E|G|^2 where all curvatures are equal.

    Args:
        curvatures: h_i above 0.
        noises: s_i, variance of one sample's gradient along each direction.
        start: theta_i at first.
        lr: learning rate at the reference batch; a plan's schedule and scales multiply it.
        momentum: as of ``torch.optim.SGD`` without dampening.

    Raises:
        ValueError: when the three are not of one length, a curvature is not above 0, all noise is 0, or the learning
            rate or the momentum is out of range.
    """

    def __init__(
        self,
        curvatures: Sequence[float],
        noises: Sequence[float],
        start: Sequence[float],
        *,
        lr: float,
        momentum: float = 0.0,
    ) -> None:
        self.curvatures, self.noises, self.theta = (np.array(one, float) for one in (curvatures, noises, start))
        if not self.curvatures.shape == self.noises.shape == self.theta.shape or self.curvatures.ndim != 1:
            raise ValueError(
                f"a quadratic needs as many curvatures as noises and starts, got {len(curvatures)}, {len(noises)} and "
                f"{len(start)}"
            )
        if not (self.curvatures > 0).all() or not (self.noises >= 0).all() or not self.noises.any():
            raise ValueError("a quadratic needs curvatures above 0, and noises of at least 0 that are not all 0")
        if not lr > 0 or not 0 <= momentum < 1:
            raise ValueError(f"optimizer.lr must be above 0 and momentum in [0, 1), got {lr} and {momentum}")
        self.lr, self.momentum = lr, momentum
        self.velocity = np.zeros_like(self.theta)
        # E[theta^2], E[theta velocity] and E[velocity^2]
        self.moments = np.stack([self.theta**2, 0 * self.theta, 0 * self.theta])
        self.deviations = np.sqrt(self.noises)
        self.noise = float(self.noises.sum())
        self.dimensions = self.noise**2 / float(self.noises @ self.noises)

    @classmethod
    def power_law(
        cls,
        *,
        dimensions: int,
        noise: float,
        curvature_decay: float,
        noise_decay: float,
        distance: float,
        lr: float,
        momentum: float,
    ) -> Quadratic:
        """Curvatures i ^ -curvature_decay, noises in proportion to i ^ -noise_decay, all parameters at ``distance``.

        Args:
            noise: sum of all noises, tr(Sigma).
        """
        places = np.arange(1.0, dimensions + 1)
        noises = places**-noise_decay
        return cls(
            list(places**-curvature_decay),
            list(noise / noises.sum() * noises),
            [distance] * dimensions,
            lr=lr,
            momentum=momentum,
        )

    @property
    def moment(self) -> Moment:
        squares = self.curvatures**2 * self.moments[0]
        return Moment(
            signal=float(squares.sum()),
            noise=self.noise,
            critical=float(self.curvatures @ self.noises) / max(float(self.curvatures @ squares), 1e-300),
            dimensions=self.dimensions,
            loss=0.5 * float(self.curvatures @ self.moments[0]),
        )

    def step(self, plan: BatchPlan, groups: Groups, draws: random.Random) -> Measurement | None:
        """One update along a drawn gradient.

        Raises:
            Diverged: when the learning rate was so large that the parameters are no longer finite.
        """
        measured = plan.measure and groups.count > 1
        moment = self.moment if measured else None
        normal = np.random.Generator(np.random.PCG64(draws.getrandbits(64))).standard_normal(self.theta.size)
        gradient = self.curvatures * self.theta + self.deviations * normal / plan.global_batch**0.5
        self.velocity = self.momentum * self.velocity + gradient
        lr = self.lr * plan.schedule * plan.scales.lr
        self.theta = self.theta - lr * self.velocity
        self.moments = self._next_moments(lr, plan.global_batch)
        if not np.abs(self.theta).max() < 1e100:
            raise Diverged(
                f"the quadratic diverged at step {plan.step} with learning rate {lr:.3g} and momentum "
                f"{self.momentum:g}; its largest curvature is {self.curvatures.max():.3g}: lower "
                f"optimizer.lr or change scaling.rule"
            )
        if moment is None:
            return None
        return grouped(moment, plan.global_batch, groups, float(gradient @ gradient), draws)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name).tolist() for name in ("theta", "velocity", "moments")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, values in state.items():
            setattr(self, name, np.array(values))

    def _next_moments(self, lr: float, global_batch: int) -> np.ndarray:
        """The second moments after v' = momentum v + h theta + noise and theta' = theta - lr v'."""
        place, both, speed = self.moments
        across = self.momentum * both + self.curvatures * place  # E[theta v']
        speed = self.momentum * (self.momentum * speed + 2 * self.curvatures * both) + self.curvatures**2 * place
        speed = speed + self.noises / global_batch
        return np.stack([place - 2 * lr * across + lr**2 * speed, across - lr * speed, speed])
