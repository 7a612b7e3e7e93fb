"""What comes of a policy's wish: a batch that the ranks can make, the kind of decision, and one readable sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adabatch.plan import BatchLimits
from adabatch.policies import Damping, Proposal, Situation, Wanted


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision before it is agreed upon; ``kind`` is ``grow``, ``shrink``, ``rounding`` or the gate that held it."""

    batch: int
    wanted: float | None
    kind: str
    reason: str


def verdict(wanted: Wanted | None, situation: Situation, damping: Damping, limits: BatchLimits) -> Verdict:
    """Pass ``wanted`` through the gates and round what is left to what the ranks can make and measure.

    ``None`` stands for a policy that has nothing to go by yet, and holds the batch.
    """
    if wanted is None:
        proposal = Proposal(situation.batch, held=("unmeasured", "nothing is measured yet"))
    else:
        proposal = damping.propose(wanted, situation)
    batch = _rounded(proposal, situation.batch, limits) if proposal.held is None else situation.batch
    return Verdict(
        batch=batch,
        wanted=wanted.batch if wanted and math.isfinite(wanted.batch) else None,
        kind=_kind(batch, situation.batch, proposal),
        reason=_sentence(batch, situation.batch, wanted, proposal),
    )


def _rounded(proposal: Proposal, current: int, limits: BatchLimits) -> int:
    """The nearest batch that the ranks can make and measure, without overshooting where that can be helped."""
    batch = limits.realise(max(proposal.batch, limits.fewest_measurable))
    if (below := limits.floor(min(proposal.most, batch))) > current:
        return below
    if (above := limits.ceil(max(proposal.least, batch))) < current:
        return above
    return batch


def _kind(batch: int, current: int, proposal: Proposal) -> str:
    """What kind of decision it is: a change, the gate that held the batch, or rounding."""
    if batch != current:
        return "grow" if batch > current else "shrink"
    return proposal.held[0] if proposal.held else "rounding"


def _sentence(batch: int, current: int, wanted: Wanted | None, proposal: Proposal) -> str:
    """The reason of a decision in one readable sentence."""
    evidence = _evidence(wanted)
    if proposal.held:
        return f"hold {current}: {evidence}; {proposal.held[1]}"
    notes = "".join(f"; {note}" for note in proposal.notes)
    if batch == current:
        return f"hold {current}: {evidence}{notes}; no other batch that the ranks can make is nearer"
    verb = "grow" if batch > current else "shrink"
    return f"{verb} {current} to {batch}: {evidence}{notes}"


def _evidence(wanted: Wanted | None) -> str:
    """What a policy goes by, and the batch that it wants for it."""
    if wanted is None:
        return "no estimate yet"
    return wanted.reason if math.isnan(wanted.batch) else f"{wanted.reason} wants {wanted.batch:,.3g}"
