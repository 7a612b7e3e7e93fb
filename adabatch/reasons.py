"""Decisions in words: each has a kind, by which they are counted, and one readable sentence."""

from __future__ import annotations

from adabatch.policies import Proposal, Wanted


def kind_of(batch: int, current: int, proposal: Proposal) -> str:
    """What kind of decision it is: a change, the gate that held the batch, or rounding."""
    if batch != current:
        return "grow" if batch > current else "shrink"
    return proposal.held[0] if proposal.held else "rounding"


def sentence(batch: int, current: int, wanted: Wanted | None, proposal: Proposal) -> str:
    """The reason of a decision in one readable sentence."""
    evidence = f"{wanted.reason} wants {wanted.batch:,.3g}" if wanted else "no estimate yet"
    if proposal.held:
        return f"hold {current}: {evidence}; {proposal.held[1]}"
    notes = "".join(f"; {note}" for note in proposal.notes)
    if batch == current:
        return f"hold {current}: {evidence}{notes}; no other batch that the ranks can make is nearer"
    verb = "grow" if batch > current else "shrink"
    return f"{verb} {current} to {batch}: {evidence}{notes}"
