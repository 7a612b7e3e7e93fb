"""What a policy is asked, what it may look at, and what it answers.

A policy is a set of pure functions with explicit state: ``init()`` gives the state, ``update`` takes in what happened
since the last decision, ``value`` says which batch is wanted. Closed-loop policies are asked when a decision is due,
and what they want passes through the gates of ``Damping``; open-loop ones are functions of the progress alone, are
asked after every step, and are followed exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from adabatch.progress import Progress

if TYPE_CHECKING:
    from adabatch.noise import Estimate

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Price:
    """What a step costs beside its samples: fixed seconds of a step over the seconds of one more sample, in samples.

    ``value`` lies in [``low``, ``high``], a confidence interval; ``high`` is inf where the step times cannot tell.
    """

    value: float
    low: float
    high: float

    @property
    def resolved(self) -> bool:
        return math.isfinite(self.high)


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a policy may look at.

    Attributes:
        progress: steps, samples and tokens so far.
        batch: the present global batch.
        estimate: the noise estimate that decisions go by, if there is one.
        loss: mean training loss of the last windows, if it is known.
        price: what a step costs, if it was measured.
        telling_batch: the global batch whose steps would tell the price, where those of the present one cannot.
    """

    progress: Progress
    batch: int
    estimate: Estimate | None = None
    loss: float | None = None
    price: Price | None = None
    telling_batch: int | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """The batch that a policy wants: a point, and the range that the evidence supports (``high`` may be inf)."""

    batch: float
    low: float
    high: float
    reason: str

    @property
    def resolved(self) -> bool:
        return math.isfinite(self.high)


class Policy(Protocol):
    """What the controller asks of a policy.

    ``closed_loop`` says whether it follows measurements, and its wishes pass the damping gates; ``exact`` whether the
    wanted batch is used as it is, without rounding to the ranks (replay); ``needs`` which of ``noise``, ``loss`` and
    ``price`` it cannot do without; ``batches`` are those that the user named, which have to be makeable before the
    first step.
    """

    name: str
    closed_loop: bool
    exact: bool
    needs: frozenset[str]

    @property
    def batches(self) -> tuple[int, ...]: ...

    def init(self) -> State: ...

    def update(self, state: State, facts: Facts, samples: int) -> State:
        """The state after ``samples`` were consumed at ``facts.batch``."""
        ...

    def value(self, state: State, facts: Facts) -> Wanted | None:
        """The wanted batch, or ``None`` while what it ``needs`` is not known."""
        ...


class Stateless:
    """A policy that remembers nothing, follows no measurement and names no batch, where it does not say otherwise."""

    __slots__ = ()
    closed_loop: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    batches: ClassVar[tuple[int, ...]] = ()

    def init(self) -> State:
        return {}

    def update(self, state: State, facts: Facts, samples: int) -> State:
        return state


def exactly(batch: float, reason: str) -> Wanted:
    """A wish that no evidence widens."""
    return Wanted(batch, batch, batch, reason)


def describe_scale(estimate: Estimate) -> str:
    """The noise scale with its interval, for a sentence."""
    if estimate.resolved:
        return f"noise scale {estimate.scale:,.3g} [{estimate.low:,.3g}, {estimate.high:,.3g}]"
    return f"noise scale above {estimate.low:,.3g} (unresolved)"


def supported_scale(estimate: Estimate) -> float:
    """The noise scale when it is resolved, else the lower bound that the data support."""
    return estimate.scale if estimate.resolved else estimate.low
