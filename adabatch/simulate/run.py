"""A simulated run: the real controller plans and decides, a truth answers, a cluster keeps the time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from adabatch.controller import Controller
from adabatch.ledger import Ledger
from adabatch.plan import data_efficiency, split
from adabatch.report.tradeoff import Needs
from adabatch.simulate.cluster import Cluster
from adabatch.simulate.windows import Groups, Moment, Ready, Truth, exact_window, unmeasured_window

# So many points of a run are kept for a plot, and the final loss is the mean over so large a share of the samples.
POINTS, FINAL_SHARE = 512, 0.05


@dataclass(frozen=True, slots=True)
class Point:
    """Where a run was: its counters, its batch, what was true, and what was measured (``None`` before anything was)."""

    samples: int
    steps: int
    seconds: float | None
    global_batch: int
    critical: float
    scale: float | None
    low: float | None
    high: float | None
    loss: float | None


@dataclass(slots=True)
class Tally:
    """Sums over the steps of a run: seconds, rank-seconds, what the same progress needs at least, and the last losses.

    ``least_steps`` and ``least_samples`` are S_min and E_min of the progress made by the true critical batch
    (arXiv 1812.06162, section 2.3).
    """

    seconds: float = 0.0
    cost: float = 0.0
    least_steps: float = 0.0
    least_samples: float = 0.0
    loss: float = 0.0
    loss_samples: int = 0
    most_ranks: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        steps, samples: optimizer steps and samples.
        seconds, cost: of all steps, and of all their ranks; ``None`` where the cluster knows no times.
        efficiency: delivered data efficiency by the true critical batch, E_min / samples.
        product: (steps / S_min - 1) (samples / E_min - 1): 1 for any fixed batch, less is better.
        changes: how often the batch changed.
        final_batch: the last whole step's.
        loss: mean true loss over the last twentieth of the samples; ``None`` where the truth has none.
        needs: S_min and E_min.
        most_ranks: the most ranks that a step ran on.
    """

    steps: int
    samples: int
    seconds: float | None
    cost: float | None
    efficiency: float
    product: float
    changes: int
    final_batch: int
    loss: float | None
    needs: Needs
    most_ranks: int


@dataclass(slots=True)
class Simulation:
    """A run in simulation, step by step. Draws depend on (seed, step) alone, so a run that is resumed goes on alike.

    Args:
        controller: the real one; its world is that of the cluster's fewest ranks.
        truth: what gradients are like.
        cluster: what a step takes.
        seed: of measurements, updates and stragglers.
        exact: measure without error.
    """

    controller: Controller
    truth: Truth
    cluster: Cluster = field(default_factory=Cluster)
    seed: int = 0
    exact: bool = False
    tally: Tally = field(default_factory=Tally)
    points: list[Point] = field(default_factory=list)

    def run(self, steps: int | None = None) -> Outcome:
        """Take all steps that are left, or so many of them.

        Raises:
            ValueError: when the controller's budget has no end in samples and ``steps`` is not given.
        """
        if steps is None and self.controller.budget.samples is None and self.controller.budget.tokens is None:
            raise ValueError("a simulation needs an end: set stop.samples, or stop.tokens and tokens_per_sample")
        taken = 0
        while not self.controller.done and (steps is None or taken < steps):
            self.step()
            taken += 1
        return self.outcome()

    def step(self) -> None:
        """Take one step."""
        plan = self.controller.plan()
        placed = self.cluster.placed(plan, self.controller.limits)
        draws = random.Random((self.seed << 48) + plan.step)
        groups, moment = Groups.of(placed), self.truth.moment
        measurement = self.truth.step(placed, groups, draws)
        if measurement is None:
            measurement = unmeasured_window(moment, plan.global_batch)
        elif self.exact:
            measurement = exact_window(moment, plan.global_batch, groups)
        lap = self.cluster.lap(placed, draws)
        self._count(placed.global_batch, placed.world, lap.seconds if lap else 0.0, moment)
        timed = lap is not None and "price" in self.controller.policy.needs
        self.controller.commit(plan, Ready(measurement), Ready(lap) if timed else None)
        self._mark(plan.global_batch, plan.first_sample, moment)

    def seconds_of(self, global_batch: int) -> float | None:
        """The median time of a step of ``global_batch``; ``None`` where the cluster knows no times."""
        controller = self.controller
        plan = split(step=0, first_sample=0, global_batch=global_batch, limits=controller.limits, measure=False)
        lap = self.cluster.lap(self.cluster.placed(plan, controller.limits))
        return lap.seconds if lap else None

    @property
    def price(self) -> float | None:
        """What a step of the present batch costs beside its samples, in samples; ``None`` where no times are known."""
        controller = self.controller
        plan = split(step=0, first_sample=0, global_batch=controller.batch, limits=controller.limits, measure=False)
        return self.cluster.price(plan)

    def outcome(self) -> Outcome:
        """What the run has come to so far."""
        tally, progress = self.tally, self.controller.progress
        timed = self.cluster.per_sample is not None
        whole = [segment for segment in self.controller.ledger.segments if not segment.partial]
        steps, samples = progress.steps, progress.samples
        return Outcome(
            steps=steps,
            samples=samples,
            seconds=tally.seconds if timed else None,
            cost=tally.cost if timed else None,
            efficiency=tally.least_samples / samples,
            product=(steps / tally.least_steps - 1) * (samples / tally.least_samples - 1),
            changes=sum(decision.changed for decision in self.controller.ledger.decisions),
            final_batch=whole[-1].global_batch if whole else self.controller.batch,
            loss=tally.loss / tally.loss_samples if tally.loss_samples else None,
            needs=Needs(tally.least_steps, tally.least_samples),
            most_ranks=tally.most_ranks,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "controller": self.controller.state_dict(),
            "ledger": self.controller.ledger.to_dict(),
            "truth": self.truth.state_dict(),
            "tally": asdict(self.tally),
            "points": [asdict(point) for point in self.points],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, under this simulation's own policy, truth and cluster."""
        self.controller.load_state_dict(state["controller"], Ledger.from_dict(state["ledger"]))
        self.truth.load_state_dict(state["truth"])
        self.tally = Tally(**state["tally"])
        self.points = [Point(**point) for point in state["points"]]

    def _count(self, samples: int, ranks: int, seconds: float, moment: Moment) -> None:
        tally = self.tally
        worth = data_efficiency(samples, moment.critical) * samples
        tally.least_samples += worth
        tally.least_steps += worth / moment.critical
        tally.seconds += seconds
        tally.cost += ranks * seconds
        tally.most_ranks = max(tally.most_ranks, ranks)
        end = self.controller.budget.samples
        if moment.loss is not None and (end is None or self.controller.progress.samples >= (1 - FINAL_SHARE) * end):
            tally.loss += samples * moment.loss
            tally.loss_samples += samples

    def _mark(self, global_batch: int, first_sample: int, moment: Moment) -> None:
        """Keep a point where the batch was changed, and at every 512th of the run."""
        progress, controller = self.controller.progress, self.controller
        every = max((controller.budget.samples or 0) // POINTS, 1)
        if controller.done and self.points:
            return  # the last step may be a part of one
        if controller.batch == global_batch and first_sample // every == progress.samples // every and self.points:
            return
        controller.read()  # or the estimate would be that of whenever somebody last looked
        estimate = controller.estimate
        resolved = estimate is not None and estimate.resolved
        self.points.append(
            Point(
                samples=first_sample,
                steps=progress.steps,
                seconds=self.tally.seconds if self.cluster.per_sample is not None else None,
                global_batch=global_batch,
                critical=moment.critical,
                scale=estimate.scale if estimate and resolved else None,
                low=estimate.low if estimate else None,
                high=estimate.high if estimate and resolved else None,
                loss=moment.loss,
            )
        )
