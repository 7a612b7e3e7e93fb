"""Which batch is wanted, and how fast the run may follow.

A policy is a set of pure functions with explicit state: ``init()`` gives the state, ``update`` takes in what happened
since the last decision, ``value`` says which batch is wanted. Closed-loop policies ask the noise estimate; open-loop
ones (``fixed``, ``stages``, ``replay``) are functions of the progress alone and are followed exactly. What a
closed-loop policy wants passes through the gates of ``Damping`` before it becomes a decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from adabatch.ledger import Ledger
from adabatch.plan import data_efficiency
from adabatch.progress import Progress, parse_count

if TYPE_CHECKING:
    from adabatch.noise import Estimate

State = Mapping[str, Any]


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

    ``closed_loop`` says whether decisions follow the noise estimate (and pass the damping gates); ``exact`` whether
    the wanted batch is used as it is, without rounding to the ranks (replay); ``batches`` are those that the user
    named, which have to be makeable before the first step.
    """

    name: str
    closed_loop: bool
    exact: bool

    @property
    def batches(self) -> tuple[int, ...]: ...

    def init(self) -> State: ...

    def update(self, state: State, *, batch: int, samples: int, estimate: Estimate | None) -> State: ...

    def value(self, state: State, *, progress: Progress, batch: int, estimate: Estimate | None) -> Wanted | None: ...


def describe_scale(estimate: Estimate) -> str:
    """The noise scale with its interval, for a sentence."""
    if estimate.resolved:
        return f"noise scale {estimate.scale:,.3g} [{estimate.low:,.3g}, {estimate.high:,.3g}]"
    return f"noise scale above {estimate.low:,.3g} (unresolved)"


def supported_scale(estimate: Estimate) -> float:
    """The noise scale when it is resolved, else the lower bound that the data support."""
    return estimate.scale if estimate.resolved else estimate.low


@dataclass(frozen=True, slots=True)
class TargetEfficiency:
    """Follow the critical batch so that the run's data efficiency is ``target``: B = B_crit (1/e - 1).

    B_crit = calibration x noise scale. The efficiency already delivered (sample-weighted) is kept account of against
    the target in force at the time, and the lag that damping causes is paid back: the efficiency asked for now is the
    one that settles the account over as many samples again, the batch staying within ``repay`` times the undisturbed
    one.

    Args:
        target: data efficiency in (0, 1); 0.5 is the critical batch itself.
        calibration: critical batch over measured noise scale.
        repay: the largest factor by which a debt may raise or lower the batch.

    Raises:
        ValueError: for a target outside (0, 1), a calibration not above 0, or a repay factor below 1.
    """

    target: float = 0.5
    calibration: float = 1.0
    repay: float = 2.0
    name: ClassVar[str] = "target_efficiency"
    closed_loop: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    batches: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ValueError(f"policy.target_efficiency must lie strictly between 0 and 1, got {self.target}")
        if not self.calibration > 0 or not self.repay >= 1:
            raise ValueError(
                f"policy.calibration must be above 0 and policy.repay at least 1, "
                f"got {self.calibration} and {self.repay}"
            )

    def init(self) -> State:
        return {"samples": 0, "surplus": 0.0}

    def update(self, state: State, *, batch: int, samples: int, estimate: Estimate | None) -> State:
        """Account for ``samples`` consumed at ``batch``, at the efficiency that the estimate supports."""
        if estimate is None:
            return state
        efficiency = data_efficiency(batch, self.calibration * supported_scale(estimate))
        return {
            "samples": state["samples"] + samples,
            "surplus": state["surplus"] + (efficiency - self.target) * samples,
        }

    def value(self, state: State, *, progress: Progress, batch: int, estimate: Estimate | None) -> Wanted | None:
        if estimate is None:
            return None
        ratio = self._ratio(state, estimate.resolved) * self.calibration
        uncalibrated = " (uncalibrated)" if self.calibration == 1 else ""
        return Wanted(
            batch=ratio * supported_scale(estimate),
            low=ratio * estimate.low,
            high=ratio * estimate.high,
            reason=f"{describe_scale(estimate)} at target efficiency {self.target:g}{uncalibrated}",
        )

    def _ratio(self, state: State, resolved: bool) -> float:
        """Wanted batch over critical batch, with the account taken in; a lower bound supports no growth beyond it."""
        plain = 1 / self.target - 1
        asked = self.target - (state["surplus"] / state["samples"] if state["samples"] else 0.0)
        low, high = plain / self.repay, plain * (self.repay if resolved else 1.0)
        return min(max(1 / asked - 1, low), high) if asked > 0 else high


@dataclass(frozen=True, slots=True)
class Fixed:
    """One global batch for the whole run."""

    global_batch: int
    name: ClassVar[str] = "fixed"
    closed_loop: ClassVar[bool] = False
    exact: ClassVar[bool] = False

    @property
    def batches(self) -> tuple[int, ...]:
        return (self.global_batch,)

    def init(self) -> State:
        return {}

    def update(self, state: State, *, batch: int, samples: int, estimate: Estimate | None) -> State:
        return state

    def value(self, state: State, *, progress: Progress, batch: int, estimate: Estimate | None) -> Wanted:
        return Wanted(self.global_batch, self.global_batch, self.global_batch, f"fixed batch {self.global_batch}")


@dataclass(frozen=True, slots=True)
class Observe:
    """Measure only: the batch stays where it is, whatever the noise scale."""

    name: ClassVar[str] = "observe"
    closed_loop: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    batches: ClassVar[tuple[int, ...]] = ()

    def init(self) -> State:
        return {}

    def update(self, state: State, *, batch: int, samples: int, estimate: Estimate | None) -> State:
        return state

    def value(self, state: State, *, progress: Progress, batch: int, estimate: Estimate | None) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Stages:
    """A schedule of thresholds and batches, in samples or tokens: ``((0, 16), (1000, 32), (4000, 64))``.

    A window takes the batch of the stage in which it begins. ``Stages.parse`` reads "0:16, 1k:32, 4k:64".

    Raises:
        ValueError: when the thresholds do not begin at 0 and rise strictly, or a batch is below 1.
    """

    stages: tuple[tuple[int, int], ...]
    unit: str = "samples"
    name: ClassVar[str] = "stages"
    closed_loop: ClassVar[bool] = False
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.stages]
        if not starts or starts[0] != 0 or any(b <= a for a, b in zip(starts, starts[1:])):
            raise ValueError(f"policy.stages must begin at 0 and rise strictly, got thresholds {starts}")
        if self.unit not in ("samples", "tokens"):
            raise ValueError(f"policy.unit must be samples or tokens, got {self.unit!r}")
        if bad := [batch for _, batch in self.stages if batch < 1]:
            raise ValueError(f"every batch of policy.stages must be at least 1, got {bad}")

    @classmethod
    def parse(cls, text: str, unit: str = "samples") -> Stages:
        """Read ``"0:16, 1k:32 4k:64"``: pairs of threshold and batch, with suffixes K, M, B, T."""
        stages = []
        for pair in text.replace(",", " ").split():
            start, colon, batch = pair.partition(":")
            if not colon:
                raise ValueError(f"policy.stages: {pair!r} is no pair of threshold:batch, such as '1k:32'")
            stages.append((parse_count(start), parse_count(batch)))
        return cls(tuple(stages), unit)

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(batch for _, batch in self.stages)

    def init(self) -> State:
        return {}

    def update(self, state: State, *, batch: int, samples: int, estimate: Estimate | None) -> State:
        return state

    def value(self, state: State, *, progress: Progress, batch: int, estimate: Estimate | None) -> Wanted:
        position = progress.in_unit(self.unit)
        start, wanted = [stage for stage in self.stages if stage[0] <= position][-1]
        return Wanted(wanted, wanted, wanted, f"stage from {start:,} {self.unit}: batch {wanted}")


@dataclass(frozen=True, slots=True)
class Replay:
    """A recorded or hand-edited ledger, batch by batch, without rounding; past its end, its last batch."""

    ledger: Ledger
    name: ClassVar[str] = "replay"
    closed_loop: ClassVar[bool] = False
    exact: ClassVar[bool] = True
    batches: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        if not self.ledger.segments:
            raise ValueError("policy.ledger has no step to replay")

    def init(self) -> State:
        return {}

    def update(self, state: State, *, batch: int, samples: int, estimate: Estimate | None) -> State:
        return state

    def value(self, state: State, *, progress: Progress, batch: int, estimate: Estimate | None) -> Wanted:
        wanted = self.ledger.scheduled_batch(progress.samples)
        return Wanted(wanted, wanted, wanted, f"replayed from the ledger at sample {progress.samples:,}")

    def recorded_estimate(self, samples: int) -> Mapping[str, Any] | None:
        """The estimate recorded with the last change of the batch at or before ``samples``."""
        decision = self.ledger.decision_before(samples)
        return decision.estimate if decision else None


@dataclass(frozen=True, slots=True)
class Situation:
    """What the gates look at, beside the wanted batch."""

    batch: int
    samples_since_change: int
    memory: int
    warming_up: bool


@dataclass(frozen=True, slots=True)
class Proposal:
    """A batch on its way through the gates.

    ``held`` says which gate stopped the change and why. Rounding to what the ranks can make does not go above
    ``most`` unless nothing else lies above the present batch.
    """

    batch: float
    held: tuple[str, str] | None = None
    notes: tuple[str, ...] = ()
    most: float = math.inf


@dataclass(frozen=True, slots=True)
class Damping:
    """How fast a run follows its policy. The gates run in the order of the arguments.

    Args:
        dwell: a change waits until this many samples have gone by since the last one (about 1/(1-beta2) reference
            batches for Adam), and until the memory of a resolved estimate has.
        warmup_guard: no growth while the learning rate warms up.
        monotone: the batch never shrinks.
        interval_gate: a change needs the interval's support: growth needs its lower end above the present batch,
            shrinking its upper end below. An unresolved estimate grows the batch to its lower bound and never
            shrinks it.
        growth: the largest factor of one decision, up or down; at least 1.5, since rounding to what the ranks can make
            would undo a smaller one for ever.
        dead_band: changes by less than this factor are not made.

    Raises:
        ValueError: for factors that are too small, a dead band above the growth, or a negative dwell.
    """

    dwell: int = 0
    warmup_guard: bool = True
    monotone: bool = False
    interval_gate: bool = True
    growth: float = 2.0
    dead_band: float = 1.2

    def __post_init__(self) -> None:
        if not (self.growth >= 1.5 and 1 <= self.dead_band <= self.growth and self.dwell >= 0):
            raise ValueError(
                f"damping.growth must be at least 1.5, damping.dead_band between 1 and damping.growth, and "
                f"damping.dwell at least 0, got growth {self.growth}, dead_band {self.dead_band} and dwell {self.dwell}"
            )

    def propose(self, wanted: Wanted, situation: Situation) -> Proposal:
        """Pass ``wanted`` through all gates."""
        proposal = Proposal(wanted.batch)
        for gate in _GATES:
            proposal = gate(self, proposal, wanted, situation)
            if proposal.held:
                return proposal
        return proposal


def _sane(damping: Damping, proposal: Proposal, wanted: Wanted, situation: Situation) -> Proposal:
    if math.isnan(wanted.batch) or math.isnan(wanted.low) or math.isnan(wanted.high) or wanted.batch < 0:
        return _hold(situation, "invalid", f"the wanted batch {wanted.batch} is no batch")
    return proposal


def _dwell(damping: Damping, proposal: Proposal, wanted: Wanted, situation: Situation) -> Proposal:
    # An unresolved estimate wants an ever longer memory; waiting for that would keep a small batch for ever.
    dwell = max(damping.dwell, situation.memory) if wanted.resolved else damping.dwell
    if situation.samples_since_change < dwell:
        return _hold(situation, "dwell", f"within {dwell:,} samples of the last change")
    return proposal


def _warmup(damping: Damping, proposal: Proposal, wanted: Wanted, situation: Situation) -> Proposal:
    if damping.warmup_guard and situation.warming_up and proposal.batch > situation.batch:
        return _hold(situation, "warmup", "no growth during learning-rate warm-up")
    return proposal


def _monotone(damping: Damping, proposal: Proposal, wanted: Wanted, situation: Situation) -> Proposal:
    if damping.monotone and proposal.batch < situation.batch:
        return _hold(situation, "monotone", "the batch never shrinks here")
    return proposal


def _interval(damping: Damping, proposal: Proposal, wanted: Wanted, situation: Situation) -> Proposal:
    if not damping.interval_gate:
        return proposal
    if wanted.resolved:
        if wanted.low <= situation.batch <= wanted.high:
            return _hold(
                situation,
                "interval",
                f"the interval of the wanted batch [{wanted.low:,.3g}, {wanted.high:,.3g}] holds the present one",
            )
        return proposal
    if wanted.low <= situation.batch:
        return _hold(situation, "unresolved", f"the estimate supports no batch above {wanted.low:,.3g}")
    return Proposal(wanted.low, notes=("as far as the lower bound supports",), most=wanted.low)


def _growth(damping: Damping, proposal: Proposal, wanted: Wanted, situation: Situation) -> Proposal:
    most = min(proposal.most, situation.batch * damping.growth)
    limited = min(max(proposal.batch, situation.batch / damping.growth), most)
    limit = () if limited == proposal.batch else (f"at most x{damping.growth:g} per decision",)
    return Proposal(limited, notes=proposal.notes + limit, most=most)


def _dead_band(damping: Damping, proposal: Proposal, wanted: Wanted, situation: Situation) -> Proposal:
    ratio = max(proposal.batch / situation.batch, situation.batch / proposal.batch)
    if ratio < damping.dead_band:
        return _hold(situation, "dead_band", f"the wanted {proposal.batch:,.3g} is within x{damping.dead_band:g}")
    return proposal


_GATES: tuple[Callable[[Damping, Proposal, Wanted, Situation], Proposal], ...] = (
    _sane,
    _dwell,
    _warmup,
    _monotone,
    _interval,
    _growth,
    _dead_band,
)


def _hold(situation: Situation, kind: str, why: str) -> Proposal:
    return Proposal(situation.batch, held=(kind, why))


POLICIES: dict[str, type] = {
    "target_efficiency": TargetEfficiency,
    "fixed": Fixed,
    "observe": Observe,
    "stages": Stages,
    "replay": Replay,
}
