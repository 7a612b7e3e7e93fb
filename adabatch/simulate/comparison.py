"""A run against fixed batches: those that make the same progress, and the one that does so on the same samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from adabatch.plan import BatchLimits
from adabatch.policies import Fixed
from adabatch.simulate.run import Outcome, Simulation
from adabatch.simulate.windows import Diverged

# Neighbours on the ladder of fixed batches differ by this factor; so many are tried before giving up.
LADDER, MOST_ARMS = 2**0.5, 16
# Learning rates are searched for within so many factors of 2 from the configured one.
MOST_DOUBLINGS = 12

Start = Callable[[Fixed | None, float], Simulation]


@dataclass(frozen=True, slots=True)
class Match:
    """The fixed batch that gets as far on as many samples, between two that were run."""

    global_batch: float
    steps: float
    seconds: float | None
    cost: float | None


@dataclass(frozen=True, slots=True)
class Fastest:
    """The fixed batch that makes the same progress in the fewest seconds, on whatever samples it takes."""

    global_batch: int
    steps: float
    samples: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run and the fixed batches that it is compared with.

    Attributes:
        run: the simulation of the policy, at its end.
        outcome: what it came to.
        by_loss: whether runs are compared by the final loss; else by the progress made.
        lr_factor: the run's learning rate over the configured one.
        arms: fixed batches on the same samples, in rising order.
        match: the one that gets as far; ``None`` when no makeable batch does.
        fastest: the one that gets as far in the fewest seconds; ``None`` without times, or where the loss of the truth
            depends on more than the progress by its critical batch.
    """

    run: Simulation
    outcome: Outcome
    by_loss: bool
    lr_factor: float
    arms: tuple[tuple[int, Outcome], ...]
    match: Match | None
    fastest: Fastest | None


def compare(start: Start, *, by_loss: bool) -> Comparison:
    """Simulate a policy, and fixed batches over the same samples until two of them lie on either side of it.

    Args:
        start: makes a simulation at its beginning: of the policy for ``None``, else of the fixed batch, with the
            learning rate times a factor.
        by_loss: whether runs are compared by the final loss; else by the progress made. A loss depends on the learning
            rate, so that every run, the policy's too, takes the best from a ladder of factors of 2.
    """
    run, lr_factor = _best(start, None, by_loss)
    outcome = run.outcome()
    limits = run.controller.limits
    arms: dict[int, Outcome] = {}
    exponent = direction = 0
    while len(arms) < MOST_ARMS:
        batch = limits.realise(outcome.samples / outcome.steps * LADDER**exponent)
        if batch not in arms:
            arms[batch] = _best(start, Fixed(batch), by_loss)[0].outcome()
        # A smaller batch gets further on the same samples.
        wanted = 1 if _reached(arms[batch], by_loss) > _reached(outcome, by_loss) else -1
        if direction == -wanted or _at_the_end(limits, batch, wanted):
            break
        direction, exponent = wanted, exponent + wanted
    ladder = tuple(sorted(arms.items()))
    match, fastest = _match(ladder, outcome, by_loss), None if by_loss else _fastest(run, outcome)
    return Comparison(run, outcome, by_loss, lr_factor, ladder, match, fastest)


def _best(start: Start, policy: Fixed | None, by_loss: bool) -> tuple[Simulation, float]:
    """The run at its end with the best learning rate, where that matters, and its factor."""
    if not by_loss:
        return _ended(start(policy, 1.0)), 1.0
    runs: dict[int, Simulation | None] = {}

    def loss(exponent: int) -> float:
        if exponent not in runs:
            try:
                runs[exponent] = _ended(start(policy, 2.0**exponent))
            except Diverged:
                runs[exponent] = None
        done = runs[exponent]
        return math.inf if done is None else done.outcome().loss or 0.0

    best = 0
    for way in (-1, 1):
        while abs(best + way) <= MOST_DOUBLINGS and (loss(best + way) < loss(best) or loss(best) == math.inf):
            best += way
    done = runs[best]
    if done is None:
        raise Diverged(
            f"the run diverged at every learning rate down to {2.0**-MOST_DOUBLINGS:g} times the configured one"
        )
    return done, 2.0**best


def _ended(run: Simulation) -> Simulation:
    run.run()
    return run


def _reached(outcome: Outcome, by_loss: bool) -> float:
    """How far a run got: a number that, by progress, falls about linearly with the logarithm of the batch."""
    return -(outcome.loss or 0.0) if by_loss else -math.log(outcome.samples / outcome.needs.samples - 1)


def _at_the_end(limits: BatchLimits, batch: int, wanted: int) -> bool:
    return batch == limits.realise(math.inf) if wanted > 0 else batch == limits.realise(0)


def _match(arms: Sequence[tuple[int, Outcome]], outcome: Outcome, by_loss: bool) -> Match | None:
    """Interpolated in the logarithm of the batch between neighbours that got further and less far."""
    reached = _reached(outcome, by_loss)
    for (small, further), (large, nearer) in pairwise(arms):
        high, low = _reached(further, by_loss), _reached(nearer, by_loss)
        if low <= reached <= high and high > low:
            share = (high - reached) / (high - low)
            return Match(
                global_batch=_between(small, large, share),
                steps=_between(further.steps, nearer.steps, share),
                seconds=_between(further.seconds, nearer.seconds, share),
                cost=_between(further.cost, nearer.cost, share),
            )
    return None


def _between(left: float | None, right: float | None, share: float) -> float | None:
    return None if left is None or right is None else left ** (1 - share) * right**share


def _fastest(run: Simulation, outcome: Outcome) -> Fastest | None:
    """By the trade-off, steps = S_min + E_min / B, over the ladder of makeable batches."""
    limits, needs = run.controller.limits, outcome.needs
    found: list[Fastest] = []
    batch = limits.realise(0)
    while run.cluster.per_sample is not None:
        seconds = run.seconds_of(batch)
        if seconds is not None:
            steps = needs.steps_at(batch)
            found.append(Fastest(batch, steps, needs.samples_at(batch), steps * seconds))
        following = limits.realise(max(batch * LADDER, limits.ceil(batch + 1)))
        if following == batch or batch > outcome.samples:
            break
        batch = following
    return min(found, key=lambda one: one.seconds, default=None)
