"""The batch schedule as history: offsets, files, edits and differences."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adabatch.ledger import Decision, Difference, Ledger, LedgerError, Segment, Skip, Splice

BATCHES = st.lists(st.sampled_from([1, 2, 3, 8, 16]), max_size=40)
RUNS = st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)), min_size=1, max_size=8)


def ledger_of(batches: list[int]) -> Ledger:
    ledger = Ledger()
    for batch in batches:
        ledger.record_step(batch)
    return ledger


def decision(sample: int, previous: int = 8, batch: int = 8, kind: str = "interval", **more: Any) -> Decision:
    reason = f"because of sample {sample}"
    return Decision(sample // 8, sample, previous, batch, 9.5, reason, "target_efficiency", kind, **more)


def example() -> Ledger:
    ledger = ledger_of([8, 8, 16])
    ledger.record_step(5, partial=True)
    ledger.record_decision(decision(16, 8, 16, "grow", estimate={"scale": 20.0, "high": None}))
    ledger.record_decision(decision(32))
    ledger.record_decision(decision(37))
    ledger.record_skip(1)
    ledger.record_splice([{"key": "policy.target_efficiency", "old": 0.5, "new": 0.8}])
    return ledger


# -- offsets


@given(BATCHES)
def test_steps_and_samples_are_found_as_in_a_list_of_all_steps(batches: list[int]) -> None:
    ledger = ledger_of(batches)
    owners = [step for step, batch in enumerate(batches) for _ in range(batch)]
    assert (ledger.steps, ledger.samples) == (len(batches), len(owners))
    assert [ledger.batch_at_step(step) for step in range(len(batches))] == batches
    for step in range(len(batches) + 1):
        assert ledger.offset(step) == sum(batches[:step])
    assert [ledger.step_of(sample) for sample in range(len(owners))] == owners
    assert [ledger.batch_at_sample(sample) for sample in range(len(owners))] == [batches[owner] for owner in owners]


@given(BATCHES)
def test_equal_steps_share_a_segment(batches: list[int]) -> None:
    segments = ledger_of(batches).segments
    assert all(a.global_batch != b.global_batch for a, b in zip(segments, segments[1:]))
    assert [segment.global_batch for segment in segments for _ in range(segment.steps)] == batches


@given(RUNS, st.data())
def test_offset_and_step_of_are_inverse_at_any_length(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    ledger = Ledger.from_dict(
        {"format": "adabatch-ledger", "version": 1, "segments": [{"global_batch": b, "steps": n} for b, n in runs]}
    )
    step = data.draw(st.integers(0, ledger.steps - 1))
    first, last = ledger.offset(step), ledger.offset(step + 1) - 1
    assert ledger.step_of(first) == ledger.step_of(last) == step
    assert last - first + 1 == ledger.batch_at_step(step) == ledger.batch_at_sample(last)


@pytest.mark.parametrize(
    ("ask", "value"), [("batch_at_step", 3), ("offset", 4), ("step_of", 32), ("batch_at_sample", 32), ("offset", -1)]
)
def test_what_is_not_in_the_ledger_is_refused(ask: str, value: int) -> None:
    with pytest.raises(LedgerError, match=f"not {value}$"):
        getattr(ledger_of([8, 8, 16]), ask)(value)


def test_every_shortened_step_is_its_own_segment() -> None:
    ledger = ledger_of([16])
    ledger.record_step(5, partial=True)
    ledger.record_step(5, partial=True)
    assert ledger.segments == [Segment(0, 16, 1), Segment(16, 5, 1, partial=True), Segment(21, 5, 1, partial=True)]


def test_an_empty_ledger_has_no_samples() -> None:
    assert (Ledger().steps, Ledger().samples, Ledger().offset(0)) == (0, 0, 0)
    with pytest.raises(LedgerError, match="no step"):
        Ledger().scheduled_batch(0)


def test_a_shortened_last_step_is_its_own_segment_and_is_not_what_a_replay_goes_on_with() -> None:
    ledger = ledger_of([16, 16])
    ledger.record_step(5, partial=True)
    ledger.record_step(5)
    ledger.record_step(5)
    assert ledger.segments == [Segment(0, 16, 2), Segment(32, 5, 1, partial=True), Segment(37, 5, 2)]
    ledger = ledger_of([16, 16])
    ledger.record_step(5, partial=True)
    assert [ledger.scheduled_batch(sample) for sample in (0, 31, 32, 36, 37, 10**12)] == [16, 16, 5, 5, 16, 16]


# -- decisions, skipped windows, splices


def test_holds_of_one_kind_are_counted_and_changes_never_are() -> None:
    ledger = Ledger()
    for sample in (8, 16, 24):
        ledger.record_decision(decision(sample))
    ledger.record_decision(decision(32, kind="dwell"))
    ledger.record_decision(decision(40, 8, 16, "grow"))
    ledger.record_decision(decision(48, 16, 32, "grow"))
    first, *others = ledger.decisions
    assert (first.sample, first.until_sample, first.count, first.reason) == (8, 24, 3, "because of sample 24")
    assert [(d.kind, d.count) for d in others] == [("dwell", 1), ("grow", 1), ("grow", 1)]


def test_a_hold_after_a_splice_leaves_the_one_before_it_alone() -> None:
    ledger = ledger_of([8, 8])
    ledger.record_decision(decision(8))
    ledger.record_splice([])
    ledger.record_decision(decision(24))
    ledger.record_decision(decision(32))
    assert [(d.sample, d.count) for d in ledger.decisions] == [(8, 1), (24, 2)]


def test_decision_before_is_the_last_change() -> None:
    ledger = Ledger(decisions=[decision(8), decision(16, 8, 16), decision(24), decision(32, 16, 32)])
    found = [ledger.decision_before(sample) for sample in (0, 15, 16, 31, 32, 999)]
    assert [d and d.batch for d in found] == [None, None, 16, 16, 32, 32]


def test_of_two_changes_at_one_sample_the_later_counts() -> None:
    ledger = Ledger(decisions=[decision(16, 8, 16), decision(16, 16, 12)])
    assert ledger.decision_before(16) == decision(16, 16, 12)


def test_a_skipped_window_is_marked_with_its_samples() -> None:
    ledger = ledger_of([8, 8, 16, 16])
    ledger.record_skip(3)
    assert ledger.skipped == [Skip(step=3, sample=32, global_batch=16)]
    assert ledger.samples == 48


def test_a_splice_notes_where_a_run_went_on() -> None:
    changes = [{"key": "limits.max_batch", "old": 64, "new": 128}]
    ledger = ledger_of([8, 8, 16])
    ledger.record_splice(changes)
    assert ledger.splices == [Splice(step=3, sample=32, changes=tuple(changes))]


# -- files


@given(BATCHES)
def test_json_round_trip(batches: list[int]) -> None:
    ledger = ledger_of(batches)
    read = Ledger.from_dict(json.loads(ledger.dumps()))
    assert read == ledger
    assert read.dumps() == ledger.dumps()
    read.record_step(4)
    assert read.offset(len(batches)) == sum(batches)


def test_everything_survives_the_file(tmp_path: Path) -> None:
    ledger = example()
    ledger.save(tmp_path / "ledger.json")
    read = Ledger.load(tmp_path / "ledger.json")
    assert read == ledger == Ledger.load(tmp_path)
    read.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "ledger.json").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["again.json", "ledger.json"]


def test_the_file_has_one_line_for_each_entry() -> None:
    lines = example().dumps().splitlines()
    assert '    {"first_sample": 0, "global_batch": 8, "steps": 2},' in lines
    assert '    {"first_sample": 32, "global_batch": 5, "steps": 1, "partial": true}' in lines
    assert len(lines) == 2 + 2 + 4 * 2 + 3 + 2 + 1 + 1  # braces, version, lists, entries


def test_a_ledger_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    example().save(tmp_path / "ledger.json")
    broken = example()
    broken.record_decision(decision(40, 16, 32, estimate={"scale": math.nan}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        broken.save(tmp_path / "ledger.json")
    assert Ledger.load(tmp_path) == example()
    assert os.listdir(tmp_path) == ["ledger.json"]


def test_an_edited_segment_without_its_offset_is_filled_in() -> None:
    data = example().to_dict()
    data["segments"] = [{"global_batch": batch, "steps": steps} for batch, steps in ((8, 2), (12, 10), (2, 1))]
    assert Ledger.from_dict(data).segments == [Segment(0, 8, 2), Segment(16, 12, 10), Segment(136, 2, 1)]


def test_an_edited_segment_that_contradicts_its_offset_is_refused_with_the_way_out() -> None:
    data = example().to_dict()
    data["segments"][0]["steps"] = 3
    message = r"run.json: segment 1 says first_sample=16, .* end at 24; .* leave first_sample out"
    with pytest.raises(LedgerError, match=message):
        Ledger.from_dict(data, source="run.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "'format' is not 'adabatch-ledger'"),
        ({"version": 2}, "version 2; this release reads version 1"),
        ({"segment": []}, r"unknown entries \['segment'\]; valid: .*'segments'"),
        ({"segments": {}}, "segments must be a list, got dict"),
        ({"segments": [{"global_batch": 8}]}, "segment 0 needs 'global_batch' and 'steps'"),
        ({"segments": [{"global_batch": 8, "steps": 0}]}, "segment 0: steps must be a whole number .*, got 0"),
        ({"segments": [{"global_batch": 8.0, "steps": 1}]}, "global_batch must be a whole number .* got 8.0"),
        ({"segments": [{"global_batch": True, "steps": 1}]}, "global_batch must be a whole number .* got True"),
        ({"segments": [{"global_batch": 8, "steps": 1, "batch": 8}]}, r"unknown entries \['batch'\]"),
        ({"decisions": [{"step": 1}]}, "decisions: entry 0 is incomplete"),
        ({"decisions": [{"why": 1}]}, "decisions: entry 0 must have some of"),
        ({"decisions": "none"}, "decisions must be a list, got str"),
        ({"skipped": [{"step": "1", "sample": 0, "global_batch": 8}]}, r"skipped: entry 0 needs whole numbers in step"),
    ],
)
def test_a_file_that_is_no_ledger_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LedgerError, match=message):
        Ledger.from_dict({**example().to_dict(), **change})


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"no ledger at .*ledger\.json"):
        Ledger.load(tmp_path)
    (tmp_path / "ledger.json").write_text('{"format":\n oops}')
    with pytest.raises(LedgerError, match=r"ledger\.json is not readable as JSON: .* line 2"):
        Ledger.load(tmp_path)


# -- differences


@given(BATCHES, BATCHES)
def test_diff_names_exactly_the_samples_with_another_batch(mine: list[int], theirs: list[int]) -> None:
    one, other = ledger_of(mine), ledger_of(theirs)

    def per_sample(batches: list[int], length: int) -> list[int | None]:
        filled: list[int | None] = [batch for batch in batches for _ in range(batch)]
        return filled + [None] * (length - len(filled))

    length = max(one.samples, other.samples)
    left, right = per_sample(mine, length), per_sample(theirs, length)
    told = {
        sample: (difference.global_batch, difference.other_batch)
        for difference in one.diff(other)
        for sample in range(difference.first_sample, difference.last_sample)
    }
    assert told == {sample: (left[sample], right[sample]) for sample in range(length) if left[sample] != right[sample]}


def test_diff_joins_what_differs_alike() -> None:
    other = ledger_of([8, 4, 4, 16, 16])
    assert ledger_of([8, 8, 16]).diff(other) == [Difference(8, 16, 8, 4), Difference(32, 48, None, 16)]
    assert ledger_of([8, 8]).diff(ledger_of([8, 8])) == []
    cut = Ledger(segments=[Segment(0, 8, 1), Segment(8, 8, 2)])
    assert cut.diff(ledger_of([8, 8, 8])) == []
    assert cut.diff(ledger_of([6] * 4)) == [Difference(0, 24, 8, 6)]
