"""What comes of a policy's wish: a batch that the ranks can make, the kind of decision, and one readable sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adabatch.ledger import Decision
from adabatch.plan import BatchLimits
from adabatch.policies import Damping, Proposal, Situation, Wanted
from adabatch.progress import Progress


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision before it is agreed upon.

    Attributes:
        batch, wanted, reason, estimate, guards: as in the ledger's ``Decision``.
        kind: ``grow``, ``shrink``, ``rounding`` or the gate that held the batch; ``rollback``; ``schedule`` for what
            was decided beforehand; ``limits`` for what follows from new bounds.
    """

    batch: int
    wanted: float | None
    kind: str
    reason: str
    estimate: Mapping[str, Any] | None = None
    guards: Mapping[str, Any] | None = None

    def decision(self, progress: Progress, previous: int, policy: str) -> Decision:
        """The decision that this makes of the batch ``previous`` under the policy of that name."""
        return Decision(
            step=progress.steps,
            sample=progress.samples,
            previous=previous,
            batch=self.batch,
            wanted=self.wanted,
            reason=self.reason,
            policy=policy,
            kind=self.kind,
            estimate=self.estimate,
            guards=self.guards,
        )


def scheduled(wanted: Wanted | None, current: int, limits: BatchLimits, *, exact: bool) -> Verdict | None:
    """A change of the batch that was decided beforehand, and passes no gate; ``None`` where there is none.

    Args:
        exact: whether the wanted batch is used as it is, without rounding to what the ranks can make.
    """
    if wanted is None:
        return None
    batch = int(wanted.batch) if exact else limits.realise(wanted.batch)
    if batch == current:
        return None
    nearest = "" if batch == wanted.batch else f"; the ranks can make {batch}"
    return Verdict(batch, wanted.batch, "schedule", wanted.reason + nearest)


def limited(current: int, limits: BatchLimits) -> Verdict | None:
    """The change to what new ``limits`` can make; ``None`` where that is the current batch."""
    batch = limits.realise(current)
    if batch == current:
        return None
    return Verdict(batch, current, "limits", f"the limits from here on cannot make {current}: nearest {batch}")


def verdict(
    wanted: Wanted | None,
    situation: Situation,
    damping: Damping,
    limits: BatchLimits,
    *,
    by_alignment: bool = False,
) -> Verdict:
    """Pass ``wanted`` through the gates and round what is left to what the ranks can make and measure.

    ``None`` stands for a policy that has nothing to go by yet, and holds the batch.

    Args:
        by_alignment: whether the policy goes by alignments, which need more groups of samples to be measured.
    """
    if wanted is None:
        proposal = Proposal(situation.batch, held=("unmeasured", "nothing is measured yet"))
    else:
        proposal = damping.propose(wanted, situation)
    fewest = limits.fewest_alignable if by_alignment else limits.fewest_measurable
    batch = _rounded(proposal, situation.batch, limits, fewest) if proposal.held is None else situation.batch
    return Verdict(
        batch=batch,
        wanted=wanted.batch if wanted and math.isfinite(wanted.batch) else None,
        kind=_kind(batch, situation.batch, proposal),
        reason=_sentence(batch, situation.batch, wanted, proposal),
    )


def _rounded(proposal: Proposal, current: int, limits: BatchLimits, fewest: int) -> int:
    """The nearest batch from ``fewest`` on that the ranks can make, without overshooting where that can be helped."""
    batch = limits.realise(max(proposal.batch, fewest))
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
