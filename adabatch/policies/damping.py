"""How fast a run follows its policy: the gates that a closed-loop policy's wish passes before it is a decision."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from adabatch.policies.protocol import Wanted


@dataclass(frozen=True, slots=True)
class Situation:
    """What the gates look at, beside the wanted batch; ``undone_for``: samples to wait since a change was rolled back."""

    batch: int
    samples_since_change: int
    memory: int
    warming_up: bool
    undone_for: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """A batch on its way through the gates.

    ``held`` says which gate stopped the change and why. Rounding to what the ranks can make does not go above
    ``most`` or below ``least`` unless nothing else lies on that side of the present batch.
    """

    batch: float
    held: tuple[str, str] | None = None
    notes: tuple[str, ...] = ()
    most: float = math.inf
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class Damping:
    """How fast a run follows its policy. The gates run in the order of the arguments.

    At most one change, and so one reversal, comes in a dwell. The bounds of the batch are ``BatchLimits``; what was
    decided beforehand (open-loop policies) is followed as it is written, within those bounds, and passes no gate.

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
        rollback: a change is undone when the training loss regresses beyond its interval (``adabatch.regression``), and
            the next attempt waits: a dwell, twice as long after each change that is undone in a row. No gate, but the
            controller's.

    Raises:
        ValueError: for factors that are too small or not finite, a dead band above the growth, or a negative dwell.
    """

    dwell: int = 0
    warmup_guard: bool = True
    monotone: bool = False
    interval_gate: bool = True
    growth: float = 2.0
    dead_band: float = 1.2
    rollback: bool = False

    def __post_init__(self) -> None:
        if not (1.5 <= self.growth < math.inf and 1 <= self.dead_band <= self.growth and self.dwell >= 0):
            raise ValueError(
                f"damping.growth must be at least 1.5 and finite, damping.dead_band between 1 and damping.growth, and "
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
        return _hold(situation, "invalid", "no batch follows from that")
    return proposal


def _dwell(damping: Damping, proposal: Proposal, wanted: Wanted, situation: Situation) -> Proposal:
    # An unresolved estimate wants an ever longer memory; waiting for that would keep a small batch for ever.
    dwell = max(damping.dwell, situation.memory) if wanted.resolved else damping.dwell
    if situation.samples_since_change < dwell:
        return _hold(situation, "dwell", f"within {dwell:,} samples of the last change")
    if situation.undone_for > 0:
        return _hold(situation, "dwell", f"another {situation.undone_for:,} samples since a change was rolled back")
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
    least = situation.batch / damping.growth
    limited = min(max(proposal.batch, least), most)
    limit = () if limited == proposal.batch else (f"at most x{damping.growth:g} per decision",)
    return Proposal(limited, notes=proposal.notes + limit, most=most, least=least)


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
