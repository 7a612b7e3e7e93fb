"""The report: numbers against hand-computed values, and a page that holds for every kind of run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from adabatch.report import summary, write_report
from adabatch.report.history import stretches, timings
from adabatch.runlog import RunLog, read_metrics
from recorded_run import SyntheticRun, grown_run


def exact_run(
    folder: Path,
    parts: Sequence[tuple[int, int]] = ((8, 10), (16, 5), (32, 5)),
    *,
    fixed: float = 0.5,
    per_micro_batch: float = 0.25,
    worlds: Sequence[int] = (1, 1, 1),
    efficiencies: Sequence[float | None] = (0.8, 0.6, 0.4),
    every: int = 1,
    **start: Any,
) -> dict[str, Any]:
    """The summary of a run of (batch, steps) parts with micro-batch 8 and step times that lie on the model."""
    step, samples, seconds, previous = 0, 0, 0.0, None
    with RunLog(folder, loggers=["jsonl"], target_efficiency=0.5, **start) as log:
        log.start(dict(step=0, samples=0, tokens=0, seconds=0.0, world=worlds[0]))
        for (batch, steps), world, efficiency in zip(parts, worlds, efficiencies):
            where = dict(step=step, samples=samples, tokens=0, seconds=seconds)
            if previous is not None:
                log.decision(dict(where, previous=previous, batch=batch, changed=True, reason="grow"))
            previous = batch
            for _ in range(steps):
                pieces = batch // (8 * world)
                step, samples, seconds = step + 1, samples + batch, seconds + fixed + per_micro_batch * pieces
                shape = dict(global_batch=batch, micro_batch=8, micro_batches=pieces, world=world)
                record = dict(step=step, samples=samples, tokens=0, seconds=seconds, loss=1.0, efficiency=efficiency)
                if step % every == 0:
                    log.step(record | shape)
    return summary(read_metrics(folder))


def test_the_numbers_of_a_run(tmp_path: Path) -> None:
    facts = exact_run(tmp_path)
    assert (facts["steps"], facts["samples"], facts["seconds"]) == (20, 320, pytest.approx(20.0))
    assert (facts["start_batch"], facts["final_batch"], facts["changes"]) == (8, 32, 2)
    assert facts["steps_at_start_batch"] == 40
    assert facts["efficiency"] == pytest.approx((80 * 0.8 + 80 * 0.6 + 160 * 0.4) / 320)
    assert facts["efficiency_share"] == 1 and facts["target_efficiency"] == 0.5
    assert facts["step_time"] == {
        "fixed": pytest.approx(0.5),
        "per_micro_batch": pytest.approx(0.25),
        "micro_batch": 8,
    }
    assert facts["seconds_at_start_batch"] == pytest.approx(40 * 0.75)
    assert facts["seconds_saved"] == pytest.approx(10.0)
    assert facts["time_statement"] == "10 s, 33 % (20 s instead of about 30 s)"
    assert facts["speedup"] == pytest.approx((32 / 1.5) / (8 / 0.75))
    assert "would have taken 40 steps for the same samples, 2 times as many" in facts["sentences"][1]
    assert "uncalibrated" in facts["sentences"][2] and facts["caveats"][0].startswith("Uncalibrated")


def test_samples_without_a_noise_scale_are_left_out_of_the_efficiency(tmp_path: Path) -> None:
    facts = exact_run(tmp_path, efficiencies=(None, 0.6, 0.3), calibrated=True)
    assert facts["efficiency"] == pytest.approx((80 * 0.6 + 160 * 0.3) / 240)
    assert facts["efficiency_share"] == pytest.approx(240 / 320)
    assert any("covers 75 % of the samples" in caveat for caveat in facts["caveats"])
    assert not any("ncalibrated" in line for line in facts["sentences"] + facts["caveats"])


def test_efficiency_is_worked_out_from_the_scale_where_it_was_not_recorded(tmp_path: Path) -> None:
    with RunLog(tmp_path, loggers=["jsonl"]) as log:
        for step, scale in ((1, 8.0), (2, 24.0), (3, 1e9)):
            bounds = dict(scale=scale, scale_low=scale / 2, scale_high=2 * scale, resolved=step < 3)
            log.step(dict(step=step, samples=8 * step, global_batch=8, **bounds))
    facts = summary(read_metrics(tmp_path))
    assert facts["efficiency"] == pytest.approx((0.5 + 0.75) / 2)  # the third is unresolved, and so unknown
    assert facts["efficiency_share"] == pytest.approx(2 / 3)


def test_without_a_fixed_cost_there_is_no_gain_and_the_report_says_so(tmp_path: Path) -> None:
    facts = exact_run(tmp_path, fixed=0.0)
    assert facts["seconds_saved"] == pytest.approx(0, abs=1e-9)
    assert facts["time_statement"] == "none (10 s instead of about 10 s)"
    assert any(sentence.startswith("No wall-clock gain per sample") for sentence in facts["sentences"])


def test_growth_that_costs_time_is_no_saving(tmp_path: Path) -> None:
    facts = exact_run(tmp_path, fixed=-0.05)  # each further micro-batch costs more than the first
    assert facts["time_statement"].startswith("none: the run took 1 s longer")
    assert any("samples per second fell to" in sentence for sentence in facts["sentences"])


def test_the_model_stands_in_where_the_starting_batch_was_hardly_timed(tmp_path: Path) -> None:
    facts = exact_run(tmp_path, ((8, 2), (16, 5), (32, 5)))
    assert facts["seconds_at_start_batch"] == pytest.approx(math.ceil(256 / 8) * 0.75)


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    one_count = exact_run(tmp_path / "a", ((8, 1), (16, 9)))
    assert one_count["step_time"] is None and one_count["seconds_saved"] is None
    assert one_count["time_statement"].startswith("not measurable: too few step times")
    other_ranks = exact_run(tmp_path / "b", worlds=(1, 1, 2))
    assert other_ranks["time_statement"] == "not measurable: the number of ranks changed during the run"
    fixed = exact_run(tmp_path / "c", ((8, 10),))
    assert fixed["time_statement"] == "none, because the batch never changed" and fixed["seconds_saved"] is None
    assert fixed["steps_at_start_batch"] == fixed["steps"] == 10


def test_a_stall_does_not_move_the_step_time(tmp_path: Path) -> None:
    exact_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    seconds = re.compile(r'"seconds":([\d.]+)')
    late = [seconds.sub(lambda match: f'"seconds":{float(match[1]) + 60}', line) for line in lines[6:]]
    path.write_text("\n".join(lines[:6] + late) + "\n")
    facts = summary(read_metrics(tmp_path))
    assert facts["seconds"] == pytest.approx(80)
    assert facts["seconds_at_start_batch"] == pytest.approx(30)


def test_step_times_mix_neither_batches_nor_processes(tmp_path: Path) -> None:
    facts = exact_run(tmp_path, ((8, 14), (16, 14)), every=4)
    shape = dict(global_batch=16, micro_batch=8, micro_batches=2, world=1)
    with RunLog(tmp_path, loggers=["jsonl"]) as log:
        log.resume(dict(step=28, samples=336, from_step=28, seconds=facts["seconds"]))
        log.step(dict(step=32, samples=400, seconds=facts["seconds"] + 1000, **shape))
    measured = timings(read_metrics(tmp_path))
    assert [t.shape.global_batch for t in measured] == [8, 16]
    assert [(t.intervals, t.steps) for t in measured] == [(2, 8), (3, 12)]
    assert [(t.low, t.high) for t in measured] == [pytest.approx((0.75, 0.75)), pytest.approx((1.0, 1.0))]


def test_the_schedule_is_exact_when_only_some_steps_are_recorded(tmp_path: Path) -> None:
    facts = exact_run(tmp_path, ((8, 10), (16, 7), (32, 7)), every=2)
    run = stretches(read_metrics(tmp_path))
    assert [(s.global_batch, s.first_sample, s.steps, s.samples) for s in run] == [
        (8, 0, 10, 80),
        (16, 80, 7, 112),
        (32, 192, 7, 224),
    ]
    assert facts["seconds_at_start_batch"] == pytest.approx(52 * 0.75)


def test_the_steps_after_the_last_record_belong_to_the_schedule(tmp_path: Path) -> None:
    facts = exact_run(tmp_path, ((8, 10), (16, 7)), every=4)  # the last record is that of step 16
    with RunLog(tmp_path, loggers=["jsonl"]) as log:
        log.checkpoint(dict(step=19, samples=80 + 8 * 16 + 4, seconds=facts["seconds"] + 2))
    metrics = read_metrics(tmp_path)
    assert [(s.global_batch, s.first_sample, s.steps, s.samples) for s in stretches(metrics)] == [
        (8, 0, 10, 80),
        (16, 80, 8, 128),
        (4, 208, 1, 4),
    ]
    facts = summary(metrics)
    assert (facts["steps"], facts["samples"], facts["final_batch"]) == (19, 212, 16)
    assert facts["steps_at_start_batch"] == 27  # 26.5, and a last partial batch is a step


def test_a_shortened_last_step_is_not_the_final_batch(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, start=16, top=16, samples=1_000, every=5)
    with run.log() as log:
        run.train(log, 1_000)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    last = lines[-2] if '"eval"' in lines[-1] else lines[-1]
    path.write_text("\n".join(lines).replace(last, last.replace('"global_batch":16', '"global_batch":8')) + "\n")
    metrics = read_metrics(tmp_path)
    assert [(s.global_batch, s.steps) for s in stretches(metrics)] == [(16, 62), (8, 1)]
    assert summary(metrics)["final_batch"] == 16


class Page(HTMLParser):
    """Collects what a page shows and refers to, and checks that its elements nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.words = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)
        for name, value in attributes:
            self.ids += [value or ""] if name == "id" else []
            self.references += [value or ""] if name in ("href", "src", "xlink:href", "srcset", "action") else []
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def read_page(folder: Path) -> Page:
    path = write_report(folder)
    html = path.read_text(encoding="utf-8")
    assert path == folder / "report.html" and len(html) < 1_000_000
    page = Page(html)
    assert page.open == [], "every element is closed"
    assert len(set(page.ids)) == len(page.ids)
    assert {reference.removeprefix("#") for reference in page.references} <= set(page.ids), "nothing from elsewhere"
    assert "http" not in html.replace("http-equiv", "") and "@import" not in html and "nan" not in page.words.split()
    assert not page.tags & {"script", "link", "img", "iframe", "object", "image", "metadata"}
    return page


def test_the_report_of_a_grown_and_resumed_run(tmp_path: Path) -> None:
    run = grown_run(tmp_path, samples=12_000)
    page = read_page(tmp_path)
    metrics = read_metrics(tmp_path)
    assert [r["batch"] for r in metrics.decisions if r["changed"]] == [16, 32, 64]
    assert [r["step"] for r in metrics.steps] == sorted({r["step"] for r in metrics.steps})
    assert metrics.superseded > 0 and metrics.damaged
    titles = ("Global batch and noise scale", "Loss over samples", "Loss over steps", "Learning rate")
    for title in (*titles, "Data efficiency (uncalibrated)", "Time per step", "Held-out accuracy"):
        assert title in page.words
    for record in metrics.decisions:
        assert record["reason"] in page.words
    for words in ("policy.target_efficiency", "applied from here on", "2 windows were skipped", "2 × 2 × 8"):
        assert words in page.words
    assert (
        f"batch 8 would have taken {math.ceil(12_000 / 8):,}".replace("batch 8", "batch\N{NO-BREAK SPACE}8")
        in page.words
    )
    assert "recipes/lm/train.py policy.target_efficiency=0.5 seed=0" in page.words
    assert "no end record" not in page.words and run.done["samples"] == 12_000


def test_the_report_is_the_same_each_time(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, samples=1_000)
    with run.log() as log:
        run.train(log, 1_000)
    first = write_report(tmp_path).read_bytes()
    assert write_report(tmp_path, tmp_path / "again.html").read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.html", "metrics.jsonl", "report.html"]


def test_everything_shown_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('&\"x')</script>"
    folder = tmp_path / "<script>alert(1)<|script>"
    run = SyntheticRun(folder, start=16, top=16, samples=600)
    with run.log() as log:
        log.start(run.start_record() | {"program": evil, "config": {evil: evil}, "versions": {evil: evil}})
        run.train(log, 300)
        change = {"key": evil, "old": evil, "new": [evil], "outcome": evil}
        log.resume(dict(run.done, from_step=run.done["step"], changes=[change]))
        log.decision(dict(run.done, previous=16, batch=16, changed=False, reason=evil))
        log.decision(dict(run.done, previous=16, batch=32, changed=True, reason=evil + "\x00\ud800"))
        log.evaluation({**run.done, "loss": 1.0, evil: 0.5})
        run.train(log, 600)
        log.evaluation({**run.done, "loss": 1.0, evil: 0.6})
        log.end(dict(run.done, reason=evil))
    page = read_page(folder)
    assert page.words.count("<script>alert('&\"x')</script>") >= 8  # shown as text, and no tag made of it
    assert folder.name in page.words


@pytest.mark.parametrize("kind", ["empty", "started", "one step", "fixed", "unresolved", "not measured", "no loss"])
def test_reports_of_unusual_runs(tmp_path: Path, kind: str) -> None:
    run = SyntheticRun(tmp_path, start=16, top=16, samples=400)
    hidden = {
        "unresolved": dict(scale=None, scale_high=None, resolved=False, efficiency=None),
        "not measured": dict.fromkeys(("scale", "scale_low", "scale_high", "resolved", "efficiency")),
        "no loss": dict(loss=math.nan, lr=None, seconds=None, samples_per_second=None),
    }
    record = run.step_record
    run.step_record = lambda: {**record(), **hidden.get(kind, {})}  # type: ignore[method-assign]
    with run.log() as log:
        if kind != "empty":
            log.start(run.start_record())
        if kind not in ("empty", "started"):
            run.train(log, 64 if kind == "one step" else 400, evaluate_every=10**9)
    if kind == "empty":
        (tmp_path / "metrics.jsonl").write_text("")
    page = read_page(tmp_path)
    assert "no end record" in page.words
    expected = {
        "empty": "No step has been recorded yet",
        "started": "No step has been recorded yet",
        "one step": "Global batch and noise scale",
        "fixed": "The global batch stayed at 16: 25 steps",
        "unresolved": "unresolved in 100\N{NO-BREAK SPACE}% of the records",
        "not measured": "The noise scale was not measured",
        "no loss": "Training loss at the end: not finite",
    }
    assert expected[kind] in page.words


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, start=8, top=16, samples=24_000, every=1, target=0.99)
    with run.log() as log:
        log.start(run.start_record())
        for _ in range(1_500):
            run.advance()
            log.step(run.step_record())
            run.decide(log)
    page = read_page(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 400_000
    assert "rows in the middle are left out" in page.words


def recommended(page: Page) -> str:
    """The words of the section on the batch, without breaks that cannot be seen."""
    words = page.words.replace("\N{NO-BREAK SPACE}", " ")
    return words.partition("Which batch?")[2].partition("Curves")[0]


def test_the_report_says_which_batch(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, start=16, top=16, samples=4_000)
    record = run.step_record
    steady = dict(scale=48.0, scale_low=36.0, scale_high=72.0, resolved=True)
    run.step_record = lambda: {**record(), **steady}  # type: ignore[method-assign]
    with run.log() as log:
        log.start(run.start_record())
        run.train(log, run.samples)
    section = recommended(read_page(tmp_path))
    for words in ("48 [36, 72] -> 48", "12 [9, 18] -> 12", "Steps against samples, predicted (uncalibrated)"):
        assert words in section
    assert "0.5: 48" in section and "0.8: 12" in section, "marked in the figure"
    assert "x 0.50" in section, "steps of batch 48: (1 + 48/48) / (1 + 48/16)"
    assert "Predicted, not run" in section


def test_the_report_of_a_run_without_a_resolved_scale_bounds_the_batch(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, start=16, top=16, samples=4_000)
    record = run.step_record
    bound = dict(scale=None, scale_low=36.0, scale_high=None, resolved=False)
    run.step_record = lambda: {**record(), **bound}  # type: ignore[method-assign]
    with run.log() as log:
        log.start(run.start_record())
        run.train(log, run.samples)
    section = recommended(read_page(tmp_path))
    assert section.count("above 36") == 4 and "->" not in section
    assert "fixed batches: somewhere in here" in section and "data efficiency: batch" not in section


def test_a_run_that_measured_nothing_has_no_section_on_the_batch(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, start=16, top=16, samples=400)
    record = run.step_record
    nothing = dict.fromkeys(("scale", "scale_low", "scale_high", "resolved", "efficiency"))
    run.step_record = lambda: {**record(), **nothing}  # type: ignore[method-assign]
    with run.log() as log:
        log.start(run.start_record())
        run.train(log, 400)
    assert "Which batch?" not in read_page(tmp_path).words


def test_a_report_needs_metrics(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="metrics"):
        write_report(tmp_path)
