"""Where the decisions of a run stand: what lies between one and the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adabatch.ledger import Decision
from adabatch.noise import Estimate
from adabatch.plan import samples_in
from adabatch.policies import Policy, Replay, supported_scale
from adabatch.progress import Progress


@dataclass(slots=True)
class Standing:
    """Plain numbers, counted in samples where nothing else is said.

    Attributes:
        recorded_scale: noise scale recorded with the last change of the batch.
        changed_at: where that was.
        due_at: where the next decision is due.
        accounted: up to where the policy has accounted for.
        tokens_when_due: tokens at the last due date.
    """

    recorded_scale: float | None = None
    changed_at: int = 0
    due_at: int = 0
    accounted: int = 0
    tokens_when_due: int = 0

    def scale_in_force(self, policy: Policy, sample: int) -> float | None:
        """The noise scale recorded with the last change of the batch, here or in the ledger that is replayed."""
        return _scale_of(policy.recorded_estimate(sample)) if isinstance(policy, Replay) else self.recorded_scale

    def changed(self, decision: Decision) -> None:
        """The batch was changed by ``decision``."""
        self.changed_at, self.recorded_scale = decision.sample, _scale_of(decision.estimate)

    def account(self, progress: Progress) -> int:
        """The samples that the policy has not accounted for; it does so now."""
        samples, self.accounted = progress.samples - self.accounted, progress.samples
        return samples

    def await_next(self, progress: Progress, steps: int, batch: int) -> None:
        """A due date is over, and the next is in ``steps`` steps of ``batch`` samples."""
        self.tokens_when_due = progress.tokens
        self.due_at = progress.samples + samples_in(steps, batch)

    def not_later(self, progress: Progress, steps: int, batch: int) -> None:
        """Other settings hold from here on: the next due date is at most ``steps`` steps of ``batch`` away."""
        self.due_at = min(self.due_at, progress.samples + samples_in(steps, batch))


def _scale_of(estimate: Mapping[str, Any] | None) -> float | None:
    return supported_scale(Estimate.from_dict(estimate)) if estimate else None
