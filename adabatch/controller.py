"""The one stateful joint: plan a step, then commit what happened.

``plan()`` says which samples the next step takes, how they are split and at which scales; ``commit(plan, measurement,
timing)`` records the step in the ledger, takes the measurement in, and decides the next batch when a decision is due. A
crash between the two is a plan that never happened.

Due dates depend on sample counts only, so all ranks reach a decision at the same step. Measurements and times are
handed over unread and are read, in order, when a decision is due: on the other steps the host does not wait for the
device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from adabatch import plan as planning
from adabatch import regression, requirements
from adabatch.evidence import Estimator
from adabatch.guards import GuardReport
from adabatch.ledger import Decision, Ledger
from adabatch.noise import Estimate, Measurement
from adabatch.observations import LOSSES, Observations
from adabatch.observations import VARY_EVERY as VARY_EVERY
from adabatch.observations import Readable as Readable
from adabatch.observations import TooManySkipped as TooManySkipped
from adabatch.plan import BatchLimits, BatchPlan
from adabatch.policies import Damping, Facts, Policy, Price, Replay, Situation, Wanted
from adabatch.progress import Budget, Progress
from adabatch.scaling import Scaling, scales_of
from adabatch.schedules import Schedule, ScheduleLike, middle_of_window
from adabatch.slope import SlopeFit
from adabatch.standing import Standing
from adabatch.throughput import ReadableLap, StepTime
from adabatch.verdicts import Verdict, limited, scheduled, verdict

STATE_VERSION = 4


@dataclass(slots=True)
class Controller:
    """Plans every step and decides the global batch.

    Args:
        policy: which batch is wanted (``adabatch.policies``).
        limits: world size, micro-batch and bounds.
        start_batch: global batch of the first step, for policies that do not name it themselves.
        noise: the estimator, or several, one for each view of the gradients: decisions go by the first, the others are
            for the record. ``None`` measures nothing.
        scaling: the rule by which learning rate and companions move; one for each kind of optimizer where they differ
            (``scaling.scales_of``); or ``None`` for no scaling.
        schedule: learning-rate schedule.
        damping: gates for closed-loop policies.
        budget: when the run is done.
        tokens_per_sample: tokens of each sample where they are equal; otherwise tokens are the loss weights, which
            are read with the measurements, and what depends on tokens knows those of the last due date.
        decide_every: steps between two decisions; a decision reads the measurements from the device.
        measure_every: steps between two measured ones.
        align_every: steps between two whose alignments are measured, where an estimator asks for them.
        max_skipped: windows in a row with a non-finite gradient that end the run.
        agree: gives every rank what rank 0 passes in (plain JSON data); the identity on one rank.
        slowest: gives every rank the largest over the ranks of each number in a list; the identity on one rank.

    Raises:
        ValueError: when a batch that the policy names cannot be made within the limits, when a closed-loop policy has
            nothing to measure with, or when a schedule in tokens has no ``tokens_per_sample``.
    """

    policy: Policy
    limits: BatchLimits
    start_batch: int | None = None
    noise: Estimator | Sequence[Estimator] | None = None
    scaling: Scaling | Mapping[str, Scaling] | None = None
    schedule: ScheduleLike = field(default_factory=Schedule)
    damping: Damping = field(default_factory=Damping)
    budget: Budget = field(default_factory=Budget)
    tokens_per_sample: int | None = None
    decide_every: int = 16
    measure_every: int = 1
    align_every: int = 8
    max_skipped: int = 5
    agree: Callable[[Any], Any] = lambda value: value
    slowest: Callable[[list[float]], list[float]] = lambda values: values
    ledger: Ledger = field(default_factory=Ledger, init=False)
    progress: Progress = field(default_factory=Progress, init=False)
    batch: int = field(default=0, init=False)
    _observed: Observations = field(init=False)
    _policy_state: Mapping[str, Any] = field(default_factory=dict, init=False)
    _standing: Standing = field(default_factory=Standing, init=False)
    _plan: BatchPlan | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        counts = ("decide_every", "measure_every", "align_every", "max_skipped")
        requirements.require_counts(**{name: getattr(self, name) for name in counts})
        requirements.require_length(self.schedule, self.tokens_per_sample)
        requirements.require_possible(self.policy, self.limits, measured=self.noise is not None)
        self._observed = Observations(
            self.noise, self.limits, measure_every=self.measure_every, align_every=self.align_every
        )
        self._policy_state = self.policy.init()
        self.batch = self._first_batch()
        self._standing.await_next(self.progress, self.decide_every, self.batch)
        self._require_measurable(self.policy, self.limits, self.batch)

    # -- the two verbs

    def plan(self) -> BatchPlan:
        """The next step; the same object until it is committed.

        Raises:
            RuntimeError: when the run is done.
            ValueError: when a new run's ``start_batch`` cannot be made within the limits.
        """
        if self._plan is None:
            if self.done:
                raise RuntimeError(f"the run is done at {self.progress}: there is no step to plan")
            if self.progress.steps == 0 and not self.policy.exact:
                self.limits.require(self.batch, "limits.start_batch")
            batch = int(min(self.batch, self._left()))
            scale = self._standing.scale_in_force(self.policy, self.progress.samples)
            scales, by_kind = scales_of(self.scaling, batch, scale)
            plan = planning.split(
                step=self.progress.steps,
                first_sample=self.progress.samples,
                global_batch=batch,
                limits=self.limits,
                **self._observed.asked(self.progress.steps, batch),
                schedule=self.schedule.value(self._schedule_position(batch)),
                scales=scales,
                by_kind=by_kind,
            )
            self._plan = self._observed.varied(plan) if "price" in self.policy.needs else plan
        return self._plan

    def commit(
        self, plan: BatchPlan, measurement: Readable | None = None, timing: ReadableLap | None = None
    ) -> Decision | None:
        """Record that ``plan`` was carried out, and decide the next batch when a decision is due.

        Args:
            timing: how long the step took on this rank (``Stopwatch.lap``); on all ranks or on none. A policy that goes
                by the price of a step cannot do without.

        Returns:
            The decision, or ``None`` when none was due.

        Raises:
            ValueError: when ``plan`` is not the current one, or the policy lacks the step's time.
            TooManySkipped: when ``max_skipped`` windows in a row were not finite.
        """
        requirements.require_current(plan, self._plan, self.progress)
        requirements.require_timed(self.policy, plan.step, timed=timing is not None)
        self._plan = None
        self.ledger.record_step(plan.global_batch, partial=plan.global_batch < self.batch)
        self.progress = self.progress.advance(
            samples=plan.global_batch, tokens=plan.global_batch * (self.tokens_per_sample or 0)
        )
        self._observed.hand_over(plan, measurement, timing)
        return self._decide()

    # -- what a caller may ask

    @property
    def done(self) -> bool:
        """Whether the budget is used up."""
        return self._left() <= 0

    @property
    def estimate(self) -> Estimate | None:
        """The noise estimate that decisions go by, as of the last decision or ``read``."""
        return self._observed.reading.estimate

    @property
    def views(self) -> Mapping[str, Estimate]:
        """The noise estimates of the other views, as of then."""
        return self._observed.reading.views

    @property
    def slope(self) -> SlopeFit | None:
        """How the whole model's noise scale followed from the normalisation layers', as of then."""
        return self._observed.reading.slope

    @property
    def guards(self) -> GuardReport | None:
        """What the guards saw, as of then."""
        return self._observed.reading.guards

    @property
    def price(self) -> Price | None:
        """What a step costs beside its samples, as of the last due date; ``None`` before enough steps were timed."""
        return self._observed.price

    @property
    def step_time(self) -> StepTime | None:
        """How long a step takes, as of then."""
        return self._observed.step_time()

    @property
    def due(self) -> bool:
        """Whether committing the current plan reads the device, to decide or to look for skipped windows.

        Then the window's numbers are better exchanged at once: ``window.finish(..., exchange=controller.due)``. An
        open-loop policy that changes the batch on another step reads the device then, too.
        """
        return self.progress.samples + self.plan().global_batch >= self._standing.due_at

    def read(self) -> None:
        """Take in all measurements handed over so far; waits for the device."""
        for plan, measurement in self._observed.read(self.decide_every):
            self._note(plan, measurement)

    # -- saving and going on

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON data; the ledger is saved beside it. Reads the device."""
        self.read()
        observed = self._observed.state_dict()
        return {
            "version": STATE_VERSION,
            "progress": self.progress.to_dict(),
            "batch": self.batch,
            "measured": observed["measured"],
            "timed": observed["timed"],
            "policy": {"name": self.policy.name, "state": dict(self._policy_state)},
            "memory": asdict(self._standing) | observed["memory"],
        }

    def load_state_dict(self, state: Mapping[str, Any], ledger: Ledger) -> None:
        """Go on from a saved state under this controller's own policy, limits and scaling.

        A policy of another name begins with a fresh state; the batch becomes one that the new limits allow. The past
        in the ledger stays as it is.

        Raises:
            ValueError: when the state is of another version, or contradicts the ledger.
        """
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"controller state has version {state.get('version')!r}, not {STATE_VERSION}")
        progress = Progress(**state["progress"])
        requirements.require_same_end(progress, ledger)
        self.ledger, self.progress = ledger, progress
        self._observed.load_state_dict(state)
        self._standing = Standing(**{name: value for name, value in state["memory"].items() if name not in LOSSES})
        self.batch, self._plan = state["batch"], None
        self._settle(state["policy"]["name"], state["policy"]["state"])
        self._observed.find_price(self.batch)

    def adopt(
        self,
        *,
        policy: Policy | None = None,
        limits: BatchLimits | None = None,
        damping: Damping | None = None,
        decide_every: int | None = None,
    ) -> None:
        """Go on from here under another policy, limits, damping or cadence; on all ranks between the same two steps.

        It is as if the run had been saved here and resumed under them: a policy of another name begins with a fresh
        state, the batch becomes one that the new limits allow, and the past in the ledger stays as it is.

        Raises:
            ValueError: when the run could not go on like that; then nothing has changed.
        """
        policy, limits = policy or self.policy, limits or self.limits
        decide_every = self.decide_every if decide_every is None else decide_every
        requirements.require_same_ranks(self.limits, limits)
        requirements.require_counts(decide_every=decide_every)
        requirements.require_possible(policy, limits, measured=self.noise is not None)
        self._require_measurable(policy, limits, limits.realise(self.batch))
        before, self._plan = self.policy.name, None
        self.policy, self.limits, self.decide_every = policy, limits, decide_every
        self.damping = damping or self.damping
        self._settle(before, self._policy_state)

    def splice(self, changes: Iterable[Mapping[str, Any]]) -> None:
        """Note in the ledger that the run goes on from here under ``changes`` (key, old, new)."""
        self.ledger.record_splice(changes)

    # -- inside

    def _settle(self, name: str, state: Mapping[str, Any]) -> None:
        """After policy ``name`` in ``state``, begin under the present policy, with a batch that the limits allow."""
        if name == self.policy.name:
            self._policy_state = state
        else:
            self._policy_state = self.policy.init()
            self._standing.account(self.progress)
        if self._follow_schedule() is None and not self.policy.exact:
            found = limited(self.batch, self.limits)
            if found is not None:
                self._follow(replace(found, estimate=self._observed.estimate_dict()))
        self._standing.not_later(self.progress, self.decide_every, self.batch)
        self._require_measurable(self.policy, self.limits, self.batch)

    def _require_measurable(self, policy: Policy, limits: BatchLimits, batch: int) -> None:
        requirements.require_measurable(policy, limits, batch, by_alignment=self._observed.by_alignment)

    def _first_batch(self) -> int:
        wanted = self._want()
        return int(wanted.batch) if wanted is not None else requirements.require_start(self.policy, self.start_batch)

    def _schedule_position(self, batch: int) -> float:
        return middle_of_window(self.progress, batch, self.schedule.unit, self.tokens_per_sample)

    def _known(self) -> Progress:
        """The progress that plans and decisions go by: the same whenever somebody happened to read the device."""
        if self.tokens_per_sample is not None:
            return self.progress
        return Progress(self.progress.steps, self.progress.samples, self._standing.tokens_when_due)

    def _left(self) -> float:
        return self.budget.left(self._known(), self.tokens_per_sample)

    def _facts(self) -> Facts:
        observed = self._observed
        return Facts(
            self._known(),
            self.batch,
            observed.reading.estimate,
            observed.losses.mean,
            observed.price,
            observed.telling_batch,
        )

    def _want(self) -> Wanted | None:
        return self.policy.value(self._policy_state, self._facts())

    def _note(self, plan: BatchPlan, measurement: Measurement) -> None:
        """Count the tokens of a window that was read, or that it was skipped."""
        if self.tokens_per_sample is None and math.isfinite(measurement.weight):
            self.progress = replace(self.progress, tokens=self.progress.tokens + round(measurement.weight))
        if not measurement.finite:
            self.ledger.record_skip(plan.step)
            self._observed.losses.require_few_skipped(self.max_skipped, plan.step, self.progress.samples)

    # -- deciding

    def _decide(self) -> Decision | None:
        decision = self._follow_schedule()
        if decision is None and self.progress.samples < self._standing.due_at:
            return None
        self.read()
        self._observed.read_laps(self.slowest, self.batch)
        if self.policy.closed_loop:
            decision = self._follow_measurements()
        self._standing.await_next(self.progress, self.decide_every, self.batch)
        return decision

    def _follow_schedule(self) -> Decision | None:
        """Make the change that an open-loop policy has for this sample, if it has one."""
        wanted = None if self.policy.closed_loop else self._want()
        found = scheduled(wanted, self.batch, self.limits, exact=self.policy.exact)
        return self._follow(replace(found, estimate=self._recorded_estimate())) if found else None

    def _follow_measurements(self) -> Decision:
        """Decide by a closed-loop policy, or undo the last change."""
        unaccounted = self._standing.account(self.progress)
        self._policy_state = self.policy.update(self._policy_state, self._facts(), unaccounted)
        self._observed.end_block()
        regressed = self._observed.regressed() if self.damping.rollback else None
        if regressed is not None and self.limits.realise(regressed.previous) == regressed.previous:
            return self._roll_back(regressed)
        by_alignment = "noise" in self.policy.needs and self._observed.by_alignment
        found = verdict(self._want(), self._situation(), self.damping, self.limits, by_alignment=by_alignment)
        return self._follow_agreed(self._observed.beside(found))

    def _roll_back(self, regressed: regression.Regression) -> Decision:
        """Undo the last change, its scales included."""
        before, dwell = self._observed.losses.regression, max(self.damping.dwell, regressed.samples)
        reason = regressed.sentence(self.batch)
        decision = self._follow_agreed(Verdict(regressed.previous, None, "rollback", reason, regressed.estimate))
        self._observed.losses.regression = regression.undone(before, self.progress.samples, dwell)
        return decision

    def _follow_agreed(self, found: Verdict) -> Decision:
        return self._follow(Verdict(**self.agree(asdict(found))))

    def _follow(self, found: Verdict) -> Decision:
        """Record what was found, and let it be so from the next step on."""
        decision = found.decision(self.progress, self.batch, self.policy.name)
        in_force = next((one.estimate for one in reversed(self.ledger.decisions) if one.changed), None)
        self.ledger.record_decision(decision)
        if decision.changed:
            self.batch = decision.batch
            self._standing.changed(decision)
            self._observed.changed(decision, in_force)
        return decision

    def _situation(self) -> Situation:
        return Situation(
            batch=self.batch,
            samples_since_change=self.progress.samples - self._standing.changed_at,
            memory=self.estimate.memory if self.estimate and "noise" in self.policy.needs else 0,
            warming_up=self._schedule_position(self.batch) < self.schedule.warmup,
            undone_for=self._observed.losses.regression["hold_until"] - self.progress.samples,
        )

    def _recorded_estimate(self) -> Mapping[str, Any] | None:
        """The estimate that goes with an open-loop change: the replayed ledger's, or this run's own."""
        if isinstance(self.policy, Replay):
            return self.policy.recorded_estimate(self.progress.samples)
        self.read()
        return self.agree(self._observed.estimate_dict())
