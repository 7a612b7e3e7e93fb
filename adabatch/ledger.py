"""The batch schedule as history: which batch was used when, and why.

The ledger is a run-length list of segments (global batch, steps, first sample) with the decisions, skipped windows and
splices that belong to it. Offsets and batches at any step or sample are recomputed from the segments, so the file can
be edited by hand: change ``global_batch`` or ``steps`` and leave ``first_sample`` out, and it is filled in again.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

FORMAT = "adabatch-ledger"
VERSION = 1


class LedgerError(ValueError):
    """A ledger that cannot be read, contradicts itself, or was asked about a step it does not have."""


@dataclass(frozen=True, slots=True)
class Segment:
    """``steps`` consecutive optimizer steps of ``global_batch`` samples, the first of which is ``first_sample``.

    ``partial`` marks a single step that was shortened to end the run at its last sample.
    """

    first_sample: int
    global_batch: int
    steps: int
    partial: bool = False

    @property
    def last_sample(self) -> int:
        """One past the last sample of the segment."""
        return self.first_sample + self.global_batch * self.steps


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy wanted, what came of it, and why, in one sentence.

    ``count`` is above 1 when the same kind of hold was decided several times in a row; ``sample`` is then the first
    and ``until_sample`` the last time. ``estimate`` is the noise estimate that the decision used, as plain numbers, and
    ``guards`` what the guards saw then.
    """

    step: int
    sample: int
    previous: int
    batch: int
    wanted: float | None
    reason: str
    policy: str
    kind: str
    estimate: Mapping[str, Any] | None = None
    guards: Mapping[str, Any] | None = None
    count: int = 1
    until_sample: int | None = None

    @property
    def changed(self) -> bool:
        return self.batch != self.previous


@dataclass(frozen=True, slots=True)
class Skip:
    """A window whose gradient was not finite: its samples are consumed, the parameters did not move."""

    step: int
    sample: int
    global_batch: int


@dataclass(frozen=True, slots=True)
class Splice:
    """The point at which a resumed run went on under another configuration."""

    step: int
    sample: int
    changes: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """A range of samples in which two ledgers used different batches."""

    first_sample: int
    last_sample: int
    global_batch: int | None
    other_batch: int | None


@dataclass(slots=True)
class Ledger:
    """Append-only history of a run. See the module's text for the file format."""

    segments: list[Segment] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    splices: list[Splice] = field(default_factory=list)
    _first_steps: list[int] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._first_steps = _first_steps(self.segments)

    @property
    def samples(self) -> int:
        """Samples consumed so far: the cursor of the data stream."""
        return self.segments[-1].last_sample if self.segments else 0

    @property
    def steps(self) -> int:
        """Optimizer steps taken so far."""
        return self._first_steps[-1] + self.segments[-1].steps if self.segments else 0

    def record_step(self, global_batch: int, *, partial: bool = False) -> None:
        """Append one step of ``global_batch`` samples; a step like the last ones lengthens their segment."""
        last = self.segments[-1] if self.segments else None
        if last and last.global_batch == global_batch and last.partial == partial and not partial:
            self.segments[-1] = replace(last, steps=last.steps + 1)
        else:
            self._first_steps.append(self.steps)
            self.segments.append(Segment(self.samples, global_batch, 1, partial))

    def record_decision(self, decision: Decision) -> None:
        """Append a decision; a hold of the same kind as the one before is counted there, but not across a splice."""
        last = self.decisions[-1] if self.decisions else None
        spliced = self.splices[-1].step if self.splices else -1
        holds = last is not None and not last.changed and not decision.changed
        if holds and last.kind == decision.kind and last.step > spliced:
            self.decisions[-1] = replace(
                decision, step=last.step, sample=last.sample, count=last.count + 1, until_sample=decision.sample
            )
        else:
            self.decisions.append(decision)

    def record_skip(self, step: int) -> None:
        """Mark the recorded step ``step`` as skipped for a gradient that was not finite."""
        self.skipped.append(Skip(step, self.offset(step), self.batch_at_step(step)))

    def record_splice(self, changes: Iterable[Mapping[str, Any]]) -> None:
        """Note that the run goes on from here under a changed configuration."""
        self.splices.append(Splice(self.steps, self.samples, tuple(changes)))

    def batch_at_step(self, step: int) -> int:
        """Global batch of step ``step`` (from 0)."""
        return self._segment_of_step(step)[1].global_batch

    def offset(self, step: int) -> int:
        """First sample of step ``step``; the total of samples for ``step == steps``."""
        if step == self.steps:
            return self.samples
        first_step, segment = self._segment_of_step(step)
        return segment.first_sample + (step - first_step) * segment.global_batch

    def step_of(self, sample: int) -> int:
        """The step that consumed ``sample``."""
        index = self._segment_of_sample(sample)
        segment = self.segments[index]
        return self._first_steps[index] + (sample - segment.first_sample) // segment.global_batch

    def batch_at_sample(self, sample: int) -> int:
        """Global batch of the step that consumed ``sample``."""
        return self.segments[self._segment_of_sample(sample)].global_batch

    def scheduled_batch(self, sample: int) -> int:
        """The batch that a replay uses at ``sample``; past the end, that of the last whole step."""
        if not self.segments:
            raise LedgerError("the ledger has no step to replay")
        if sample < self.samples:
            return self.batch_at_sample(sample)
        whole = [segment for segment in self.segments if not segment.partial]
        return (whole or self.segments)[-1].global_batch

    def decision_before(self, sample: int) -> Decision | None:
        """The last decision that changed the batch at or before ``sample``."""
        index = bisect.bisect_right(self.decisions, sample, key=lambda decision: decision.sample)
        return next((decision for decision in reversed(self.decisions[:index]) if decision.changed), None)

    def diff(self, other: Ledger) -> list[Difference]:
        """The ranges of samples in which the two schedules differ, in order; ``None`` stands for "not reached"."""
        edges = sorted(_edges(self) | _edges(other))
        differences: list[Difference] = []
        for first, last in zip(edges, edges[1:]):
            mine, theirs = (
                ledger.batch_at_sample(first) if first < ledger.samples else None for ledger in (self, other)
            )
            if mine == theirs:
                continue
            previous = differences[-1] if differences else None
            if previous and (previous.last_sample, previous.global_batch, previous.other_batch) == (
                first,
                mine,
                theirs,
            ):
                differences[-1] = replace(previous, last_sample=last)
            else:
                differences.append(Difference(first, last, mine, theirs))
        return differences

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "segments": [_without_defaults(segment) for segment in self.segments],
            "decisions": [_without_defaults(decision) for decision in self.decisions],
            "skipped": [asdict(skip) for skip in self.skipped],
            "splices": [asdict(splice) for splice in self.splices],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "ledger") -> Ledger:
        """Read and check plain data.

        Raises:
            LedgerError: naming ``source``, the entry, the offending value and what would be valid.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise LedgerError(f"{source} is no batch ledger: its 'format' is not {FORMAT!r}")
        if data.get("version") != VERSION:
            raise LedgerError(f"{source} has version {data.get('version')!r}; this release reads version {VERSION}")
        known = {"format", "version", "segments", "decisions", "skipped", "splices"}
        if unknown := set(data) - known:
            raise LedgerError(f"{source} has unknown entries {sorted(unknown)}; valid: {sorted(known)}")
        return cls(
            segments=_read_segments(data.get("segments", []), source),
            decisions=_read_entries(Decision, data.get("decisions", []), f"{source}: decisions"),
            skipped=_read_entries(Skip, data.get("skipped", []), f"{source}: skipped"),
            splices=[
                replace(splice, changes=tuple(splice.changes))
                for splice in _read_entries(Splice, data.get("splices", []), f"{source}: splices")
            ],
        )

    def dumps(self) -> str:
        """The file's text: one line for each entry, so that it is easily read, edited and compared."""
        data = self.to_dict()
        lines = [f'  "format": "{FORMAT}",', f'  "version": {VERSION},']
        keys = ("segments", "decisions", "skipped", "splices")
        for key in keys:
            entries = [json.dumps(entry, allow_nan=False) for entry in data[key]]
            body = "[\n    " + ",\n    ".join(entries) + "\n  ]" if entries else "[]"
            lines.append(f'  "{key}": {body}' + ("," if key != keys[-1] else ""))
        return "{\n" + "\n".join(lines) + "\n}\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ledger atomically: a reader sees the old file or the new one, never a part."""
        text = self.dumps()
        target = Path(path)
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Ledger:
        """Read a ledger file, or the ``ledger.json`` of a run folder.

        Raises:
            LedgerError: when there is none, when it is no JSON (with line and column) or contradicts itself.
        """
        target = Path(path)
        target = target / "ledger.json" if target.is_dir() else target
        try:
            data = json.loads(target.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise LedgerError(f"there is no ledger at {target}") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise LedgerError(f"{target} is not readable as JSON: {error}") from None
        return cls.from_dict(data, source=str(target))

    def _segment_of_step(self, step: int) -> tuple[int, Segment]:
        if not 0 <= step < self.steps:
            raise LedgerError(f"the ledger has steps 0 to {self.steps - 1}, not {step}")
        index = bisect.bisect_right(self._first_steps, step) - 1
        return self._first_steps[index], self.segments[index]

    def _segment_of_sample(self, sample: int) -> int:
        if not 0 <= sample < self.samples:
            raise LedgerError(f"the ledger has samples 0 to {self.samples - 1}, not {sample}")
        return bisect.bisect_right(self.segments, sample, key=lambda segment: segment.first_sample) - 1


def _first_steps(segments: list[Segment]) -> list[int]:
    starts, total = [], 0
    for segment in segments:
        starts.append(total)
        total += segment.steps
    return starts


def _edges(ledger: Ledger) -> set[int]:
    return {segment.first_sample for segment in ledger.segments} | {ledger.samples}


def _without_defaults(entry: Segment | Decision) -> dict[str, Any]:
    optional = {"partial": False, "count": 1, "until_sample": None, "estimate": None, "guards": None}
    return {key: value for key, value in asdict(entry).items() if key not in optional or value != optional[key]}


def _read_segments(entries: Any, source: str) -> list[Segment]:
    """Segments with their offsets filled in; a stated offset that contradicts the ones before it is refused."""
    if not isinstance(entries, list):
        raise LedgerError(f"{source}: segments must be a list, got {type(entries).__name__}")
    segments: list[Segment] = []
    samples = 0
    for number, entry in enumerate(entries):
        where = f"{source}: segment {number}"
        if not isinstance(entry, Mapping) or not {"global_batch", "steps"} <= set(entry):
            raise LedgerError(f"{where} needs 'global_batch' and 'steps', got {entry!r}")
        if unknown := set(entry) - {"first_sample", "global_batch", "steps", "partial"}:
            raise LedgerError(f"{where} has unknown entries {sorted(unknown)}")
        for key in ("global_batch", "steps"):
            if not isinstance(entry[key], int) or isinstance(entry[key], bool) or entry[key] < 1:
                raise LedgerError(f"{where}: {key} must be a whole number of at least 1, got {entry[key]!r}")
        first = entry.get("first_sample", samples)
        if first != samples:
            raise LedgerError(
                f"{where} says first_sample={first!r}, but the segments before it end at {samples}; "
                f"correct it, or leave first_sample out to have it filled in"
            )
        segments.append(Segment(samples, entry["global_batch"], entry["steps"], bool(entry.get("partial", False))))
        samples = segments[-1].last_sample
    return segments


def _read_entries(kind: type, entries: Any, where: str) -> list[Any]:
    if not isinstance(entries, list):
        raise LedgerError(f"{where} must be a list, got {type(entries).__name__}")
    names = {entry.name for entry in fields(kind)}
    whole = {entry.name for entry in fields(kind) if entry.type == "int"}
    read = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or set(entry) - names:
            raise LedgerError(f"{where}: entry {number} must have some of {sorted(names)}, got {entry!r}")
        if bad := {key: entry[key] for key in sorted(whole & set(entry)) if type(entry[key]) is not int}:
            raise LedgerError(f"{where}: entry {number} needs whole numbers in {', '.join(bad)}, got {bad}")
        try:
            read.append(kind(**entry))
        except TypeError as error:
            raise LedgerError(f"{where}: entry {number} is incomplete: {error}") from None
    return read
