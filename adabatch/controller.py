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
from typing import Any, Protocol

from adabatch import plan as planning
from adabatch import regression
from adabatch.evidence import Estimator, Evidence, Reading
from adabatch.guards import GuardReport
from adabatch.ledger import Decision, Ledger
from adabatch.noise import Estimate, Measurement
from adabatch.plan import BatchLimits, BatchPlan
from adabatch.policies import Damping, Facts, Policy, Price, Replay, Situation, Wanted, supported_scale
from adabatch.progress import Budget, Progress
from adabatch.scaling import Scaling, scales_of
from adabatch.schedules import Schedule, ScheduleLike
from adabatch.slope import SlopeFit
from adabatch.throughput import ReadableLap, StepTime, Throughput, of_slowest
from adabatch.verdicts import verdict

STATE_VERSION = 3
# Of so many measured windows, one is compared with the optimizer's momentum.
DRIFT_EVERY = 8
# The loss that policies see is averaged over so many decisions.
LOSS_DECISIONS = 4
# A loss above this is left out, as one that was not given: sums would leave the range of floats.
LARGEST_LOSS = 1e120
# Of so many steps, one is split into smaller micro-batches while a policy lacks the price of a step.
VARY_EVERY = 8


class Readable(Protocol):
    """A measurement that may still be on the device; ``read`` may wait for it."""

    def read(self) -> Measurement: ...


class TooManySkipped(RuntimeError):
    """Several windows in a row had a gradient that was not finite."""


@dataclass(slots=True)
class Memory:
    """What lies between two decisions, in plain numbers: counted in samples where nothing else is said.

    Attributes:
        recorded_scale: noise scale recorded with the last change of the batch.
        changed_at: where that was.
        due_at: where the next decision is due.
        accounted: up to where the policy has accounted for.
        tokens_when_due: tokens at the last due date.
        skipped_in_a_row: windows with a non-finite gradient, up to now.
        loss, loss_weight: exponentially weighted sum of the training loss, and of its weights.
        regression: what the loss did before and since the last change.
    """

    recorded_scale: float | None = None
    changed_at: int = 0
    due_at: int = 0
    accounted: int = 0
    tokens_when_due: int = 0
    skipped_in_a_row: int = 0
    loss: float = 0.0
    loss_weight: float = 0.0
    regression: Mapping[str, Any] = field(default_factory=regression.init)


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
    _evidence: Evidence | None = field(default=None, init=False)
    _measured: dict[str, Any] | None = field(default=None, init=False)
    _reading: Reading = field(default_factory=Reading, init=False)
    _policy_state: Mapping[str, Any] = field(default_factory=dict, init=False)
    _memory: Memory = field(default_factory=Memory, init=False)
    _unread: list[tuple[BatchPlan, Readable]] = field(default_factory=list, init=False)
    _throughput: Throughput = field(init=False)
    _timed: Mapping[str, Any] = field(default_factory=dict, init=False)
    _laps: list[tuple[BatchPlan, ReadableLap]] = field(default_factory=list, init=False)
    _price: Price | None = field(default=None, init=False)
    _plan: BatchPlan | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for name in ("decide_every", "measure_every", "align_every", "max_skipped"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.schedule.unit == "tokens" and self.tokens_per_sample is None:
            raise ValueError("a learning-rate schedule in tokens needs tokens_per_sample; give its lengths in samples")
        self._require_possible(self.policy, self.limits)
        if self.noise is not None:
            self._evidence = Evidence(self.noise if isinstance(self.noise, Sequence) else [self.noise])
            self._measured = self._evidence.init()
        halved = self._evidence is not None and self.measure_every == 1 and planning.halved_alone(self.limits)
        self._throughput = Throughput(self.limits, fewest=2 if halved else 1)
        self._timed = self._throughput.init()
        self._policy_state = self.policy.init()
        self.batch = self._first_batch()
        self._memory.due_at = planning.samples_in(self.decide_every, self.batch)
        _require_measurable(self.policy, self.limits, self.batch)
        if self._evidence is not None and self._evidence.decides_by_alignment:
            _require_alignable(self.policy, self.limits, self.batch)

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
            step = self.progress.steps
            measure = self._evidence is not None and batch >= self.limits.fewest_measurable and step % self.measure_every == 0
            align = self._evidence is not None and self._evidence.aligned and step % self.align_every == 0
            scales, by_kind = scales_of(self.scaling, batch, self._scale_in_force())
            self._plan = planning.split(
                step=step,
                first_sample=self.progress.samples,
                global_batch=batch,
                limits=self.limits,
                measure=measure,
                drift=measure and step % (self.measure_every * DRIFT_EVERY) == 0,
                align=align and batch >= self.limits.fewest_alignable,
                schedule=self.schedule.value(self._schedule_position(batch)),
                scales=scales,
                by_kind=by_kind,
            )
            self._plan = self._varied(self._plan)
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
        if plan is not self._plan:
            raise ValueError(
                f"commit() takes the plan of step {self.progress.steps} that plan() returned last, "
                f"not one of step {plan.step}; commit each plan once, in order"
            )
        if timing is None and "price" in self.policy.needs:
            raise ValueError(
                f"policy {self.policy.name} goes by the time of each step, and step {plan.step} came without: call "
                f"commit(plan, measurement, stopwatch.lap()) with a stopwatch of adabatch.stopwatch, and on several "
                f"ranks give the controller slowest=adabatch.distributed.largest"
            )
        self._plan = None
        self.ledger.record_step(plan.global_batch, partial=plan.global_batch < self.batch)
        self.progress = self.progress.advance(
            samples=plan.global_batch, tokens=plan.global_batch * (self.tokens_per_sample or 0)
        )
        if measurement is not None:
            self._unread.append((plan, measurement))
        if timing is not None:
            self._laps.append((plan, timing))
        return self._decide()

    # -- what a caller may ask

    @property
    def done(self) -> bool:
        """Whether the budget is used up."""
        return self._left() <= 0

    @property
    def estimate(self) -> Estimate | None:
        """The noise estimate that decisions go by, as of the last decision or ``read``."""
        return self._reading.estimate

    @property
    def views(self) -> Mapping[str, Estimate]:
        """The noise estimates of the other views, as of then."""
        return self._reading.views

    @property
    def slope(self) -> SlopeFit | None:
        """How the whole model's noise scale followed from the normalisation layers', as of then."""
        return self._reading.slope

    @property
    def guards(self) -> GuardReport | None:
        """What the guards saw, as of then."""
        return self._reading.guards

    @property
    def price(self) -> Price | None:
        """What a step costs beside its samples, as of the last due date; ``None`` before enough steps were timed."""
        return self._price

    @property
    def step_time(self) -> StepTime | None:
        """How long a step takes, as of then."""
        known = self._throughput.value(self._timed)
        return known.step_time if known else None

    @property
    def due(self) -> bool:
        """Whether committing the current plan reads the device, to decide or to look for skipped windows.

        Then the window's numbers are better exchanged at once: ``window.finish(..., exchange=controller.due)``. An
        open-loop policy that changes the batch on another step reads the device then, too.
        """
        return self.progress.samples + self.plan().global_batch >= self._memory.due_at

    def read(self) -> None:
        """Take in all measurements handed over so far; waits for the device."""
        if not self._unread:
            return
        while self._unread:
            plan, pending = self._unread.pop(0)
            self._take_in(plan, pending.read())
        self._evaluate()

    # -- saving and going on

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON data; the ledger is saved beside it. Reads the device."""
        self.read()
        return {
            "version": STATE_VERSION,
            "progress": self.progress.to_dict(),
            "batch": self.batch,
            "measured": self._measured,
            "timed": self._timed,
            "policy": {"name": self.policy.name, "state": dict(self._policy_state)},
            "memory": asdict(self._memory),
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
        if (progress.steps, progress.samples) != (ledger.steps, ledger.samples):
            raise ValueError(
                f"the controller stopped at step {progress.steps}, sample {progress.samples}, but its ledger ends at "
                f"step {ledger.steps}, sample {ledger.samples}"
            )
        self.ledger, self.progress = ledger, progress
        if self._evidence is not None:
            self._measured = self._evidence.restored(state["measured"])
        self._evaluate()
        self._memory = Memory(**state["memory"])
        self._unread, self._laps, self._plan = [], [], None
        self.batch = state["batch"]
        self._timed = self._throughput.restored(state.get("timed"))
        self._settle(state["policy"]["name"], state["policy"]["state"])
        self._price = self._throughput.price(self._timed, self.batch)

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
        if replace(limits, min_batch=self.limits.min_batch, max_batch=self.limits.max_batch) != self.limits:
            raise ValueError(
                f"adopt() changes the bounds of the batch; the world, the micro-batch and the rounding stay those of "
                f"the ranks and their streams: {self.limits}, not {limits}"
            )
        if decide_every < 1:
            raise ValueError(f"decide_every must be at least 1, got {decide_every}")
        self._require_possible(policy, limits)
        _require_measurable(policy, limits, limits.realise(self.batch))
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
            self._policy_state, self._memory.accounted = self.policy.init(), self.progress.samples
        if self._follow_open_loop() is None and not self.policy.exact:
            batch = self.limits.realise(self.batch)
            if batch != self.batch:
                reason = f"the limits from here on cannot make {self.batch}: nearest {batch}"
                self._record(batch, self.batch, "limits", reason, self._estimate_dict())
        _require_measurable(self.policy, self.limits, self.batch)

    def _require_possible(self, policy: Policy, limits: BatchLimits) -> None:
        if "noise" in policy.needs and self.noise is None:
            raise ValueError(f"policy {policy.name} follows the noise scale, and noise=None measures none")
        for batch in policy.batches:
            limits.require(batch, f"a batch of policy {policy.name}")

    def _first_batch(self) -> int:
        wanted = self._want()
        if wanted is not None:
            return int(wanted.batch)
        if self.start_batch is None:
            raise ValueError(f"policy {self.policy.name} needs a start_batch")
        return self.start_batch

    def _schedule_position(self, batch: int) -> float:
        """The middle of the coming window, in the schedule's unit."""
        if self.schedule.unit == "samples":
            return self.progress.samples + batch / 2
        assert self.tokens_per_sample is not None
        return self.progress.tokens + batch * self.tokens_per_sample / 2

    def _known(self) -> Progress:
        """The progress that plans and decisions go by: the same whenever somebody happened to read the device."""
        if self.tokens_per_sample is not None:
            return self.progress
        return Progress(self.progress.steps, self.progress.samples, self._memory.tokens_when_due)

    def _left(self) -> float:
        return self.budget.left(self._known(), self.tokens_per_sample)

    def _facts(self) -> Facts:
        memory = self._memory
        loss = memory.loss / memory.loss_weight if memory.loss_weight else None
        return Facts(self._known(), self.batch, self.estimate, loss, self._price)

    def _want(self) -> Wanted | None:
        return self.policy.value(self._policy_state, self._facts())

    def _varied(self, plan: BatchPlan) -> BatchPlan:
        """The same step, now and then, in smaller micro-batches: while a policy lacks a price that these can tell."""
        wanted = "price" in self.policy.needs and self._price is not None and not self._price.resolved
        if not wanted or plan.step % VARY_EVERY != VARY_EVERY // 2:
            return plan
        varied = planning.varied(plan, self.limits)
        return varied if self._throughput.teaches(self._timed, varied) else plan

    def _read_laps(self) -> None:
        """Take in the times of all steps so far, of the slowest rank; waits for the device, and for the other ranks."""
        if not self._laps:
            return
        laps, self._laps = self._laps, []
        plans = [plan for plan, _ in laps]
        for plan, lap in zip(plans, of_slowest(plans, [lap.read() for _, lap in laps], self.slowest), strict=True):
            self._timed = self._throughput.update(self._timed, plan, lap)
        self._price = self._throughput.price(self._timed, self.batch)

    def _evaluate(self) -> None:
        if self._evidence is not None:
            self._reading = self._evidence.value(self._measured)

    def _take_in(self, plan: BatchPlan, measurement: Measurement) -> None:
        if self.tokens_per_sample is None and math.isfinite(measurement.weight):
            self.progress = replace(self.progress, tokens=self.progress.tokens + round(measurement.weight))
        if not measurement.finite:
            self._skip(plan.step)
            return
        self._memory.skipped_in_a_row = 0
        if abs(measurement.loss) < LARGEST_LOSS:
            self._average(measurement.loss, plan.global_batch)
            self._memory.regression = regression.update(self._memory.regression, measurement.loss, plan.global_batch)
        if self._evidence is not None:
            self._measured = self._evidence.update(self._measured, measurement, plan)

    def _average(self, loss: float, samples: int) -> None:
        memory = self._memory
        kept = math.exp(-samples / planning.samples_in(LOSS_DECISIONS * self.decide_every, samples))
        memory.loss = kept * memory.loss + loss * samples
        memory.loss_weight = kept * memory.loss_weight + samples

    def _skip(self, step: int) -> None:
        self.ledger.record_skip(step)
        self._memory.skipped_in_a_row += 1
        if self._memory.skipped_in_a_row >= self.max_skipped:
            raise TooManySkipped(
                f"the gradient was not finite in {self._memory.skipped_in_a_row} windows in a row, the last at step {step}; "
                f"lower the learning rate, look for bad samples before sample {self.progress.samples}, or raise "
                f"max_skipped={self.max_skipped}"
            )

    def _decide(self) -> Decision | None:
        if not self.policy.closed_loop:
            decision = self._follow_open_loop()
            if decision is None and self.progress.samples < self._memory.due_at:
                return None
            self.read()
            self._read_laps()
            self._mark_due()
            return decision
        if self.progress.samples < self._memory.due_at:
            return None
        self.read()
        self._read_laps()
        return self._follow_closed_loop()

    def _mark_due(self) -> None:
        self._memory.tokens_when_due = self.progress.tokens
        self._memory.due_at = self.progress.samples + planning.samples_in(self.decide_every, self.batch)

    def _follow_open_loop(self) -> Decision | None:
        wanted = None if self.policy.closed_loop else self._want()
        if wanted is None:
            return None
        batch = int(wanted.batch) if self.policy.exact else self.limits.realise(wanted.batch)
        if batch == self.batch:
            return None
        estimate = self._recorded_estimate()
        nearest = "" if batch == wanted.batch else f"; the ranks can make {batch}"
        return self._record(batch, wanted.batch, "schedule", wanted.reason + nearest, estimate)

    def _follow_closed_loop(self) -> Decision:
        self._account()
        self._memory.regression = regression.close(self._memory.regression)
        regressed = regression.value(self._memory.regression) if self.damping.rollback else None
        if regressed is not None and self.limits.realise(regressed.previous) == regressed.previous:
            return self._roll_back(regressed)
        found = verdict(self._want(), self._situation(), self.damping, self.limits)
        agreed = self.agree(
            {
                "batch": found.batch,
                "wanted": found.wanted,
                "kind": found.kind,
                "reason": found.reason + self._caution(),
                "estimate": self._estimate_dict(),
                "guards": self.guards.to_dict() if self.guards else None,
            }
        )
        decision = self._record(**agreed)
        self._mark_due()
        return decision

    def _roll_back(self, regressed: regression.Regression) -> Decision:
        """Undo the last change, its scales included."""
        undone = {"reason": regressed.sentence(self.batch), "estimate": regressed.estimate}
        agreed = self.agree({"batch": regressed.previous, "wanted": None, "kind": "rollback", **undone})
        dwell = max(self.damping.dwell, regressed.samples)
        before = self._memory.regression
        decision = self._record(**agreed)
        self._memory.regression = regression.undone(before, self.progress.samples, dwell)
        self._mark_due()
        return decision

    def _caution(self) -> str:
        """Why the noise scale may be read as a thermometer, to be said beside a decision."""
        reason = self.guards.thermometric if self.guards else None
        return f" (thermometric: {reason})" if reason else ""

    def _account(self) -> None:
        """Tell the policy what the samples since the last decision were worth."""
        samples, self._memory.accounted = self.progress.samples - self._memory.accounted, self.progress.samples
        self._policy_state = self.policy.update(self._policy_state, self._facts(), samples)

    def _situation(self) -> Situation:
        return Situation(
            batch=self.batch,
            samples_since_change=self.progress.samples - self._memory.changed_at,
            memory=self.estimate.memory if self.estimate and "noise" in self.policy.needs else 0,
            warming_up=self._schedule_position(self.batch) < self.schedule.warmup,
            undone_for=self._memory.regression["hold_until"] - self.progress.samples,
        )

    def _record(
        self,
        batch: int,
        wanted: float | None,
        kind: str,
        reason: str,
        estimate: Mapping[str, Any] | None,
        guards: Mapping[str, Any] | None = None,
    ) -> Decision:
        decision = Decision(
            step=self.progress.steps,
            sample=self.progress.samples,
            previous=self.batch,
            batch=batch,
            wanted=wanted,
            reason=reason,
            policy=self.policy.name,
            kind=kind,
            estimate=estimate,
            guards=guards,
        )
        in_force = next((one.estimate for one in reversed(self.ledger.decisions) if one.changed), None)
        self.ledger.record_decision(decision)
        if decision.changed:
            self._memory.regression = regression.changed(self._memory.regression, self.batch, in_force)
            self.batch, self._memory.changed_at = batch, self.progress.samples
            self._memory.recorded_scale = _scale_of(estimate)
            self._price = self._throughput.price(self._timed, batch)
        return decision

    def _recorded_estimate(self) -> Mapping[str, Any] | None:
        """The estimate that goes with an open-loop change: the replayed ledger's, or this run's own."""
        if isinstance(self.policy, Replay):
            return self.policy.recorded_estimate(self.progress.samples)
        self.read()
        return self.agree(self._estimate_dict())

    def _estimate_dict(self) -> dict[str, Any] | None:
        return self.estimate.to_dict() if self.estimate else None

    def _scale_in_force(self) -> float | None:
        """The noise scale recorded with the last change of the batch, here or in the ledger that is replayed."""
        if isinstance(self.policy, Replay):
            return _scale_of(self.policy.recorded_estimate(self.progress.samples))
        return self._memory.recorded_scale


def _require_measurable(policy: Policy, limits: BatchLimits, batch: int) -> None:
    fewest = limits.fewest_measurable
    if "noise" in policy.needs and batch < fewest:
        raise ValueError(
            f"a global batch of {batch} is one group of samples, and the noise scale needs two to compare; set "
            f"limits.start_batch and limits.max_batch to {fewest} or more"
        )


def _require_alignable(policy: Policy, limits: BatchLimits, batch: int) -> None:
    fewest = limits.fewest_alignable
    if "noise" in policy.needs and batch < fewest:
        raise ValueError(
            f"a global batch of {batch} has too few groups of samples for the alignment scale, which compares sets of "
            f"two sizes with their rest; set limits.start_batch and limits.min_batch to {fewest} or more"
        )


def _scale_of(estimate: Mapping[str, Any] | None) -> float | None:
    return supported_scale(Estimate.from_dict(estimate)) if estimate else None
