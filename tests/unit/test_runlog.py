"""The run's log: strict lines that survive kills and full disks, the console's words, TensorBoard's events."""

from __future__ import annotations

import io
import json
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adabatch.runlog import LOGGERS, RunLog, read_metrics, text
from adabatch.runlog.console import ConsoleLogger
from adabatch.runlog.lines import Part, fit
from adabatch.runlog.settings import LogSettings

RESOLVED = dict(scale=47.2, scale_low=38.1, scale_high=60.9, resolved=True)
UNRESOLVED = dict(scale=90.0, scale_low=38.1, scale_high=math.inf, resolved=False)


def at(step: int, **more: Any) -> dict[str, Any]:
    """A record at ``step`` of a run with batch 8 and one step per second."""
    return dict(step=step, samples=8 * step, tokens=0, seconds=float(step), time=1e9 + step, **more)


def a_step(step: int, **more: Any) -> dict[str, Any]:
    return at(step, **{"loss": 2.0, "global_batch": 8, "samples_per_second": 8.0, **more})


def strict_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, read by a parser that refuses Infinity and NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_every_kind_of_record_is_one_line_of_strict_json(tmp_path: Path) -> None:
    with RunLog(tmp_path, loggers=["jsonl"], total_samples=80, target_efficiency=0.5) as log:
        log.start(at(0, world=2, config={"limits": {"max_batch": math.inf}, "path": Path("a")}))
        log.step(a_step(1, **UNRESOLVED))
        log.step(a_step(2, loss=math.nan, scale=math.inf, scale_low=3.0, scale_high=math.inf))
        log.evaluation(at(2, loss=2.5))
        log.decision(at(2, previous=8, batch=16, changed=True))
        log.resume(at(2, from_step=2, changes=[]))
        log.checkpoint(at(2))
        log.end(at(2, reason="done"))
    start, first, second, *others = strict_lines(tmp_path)
    assert [r["kind"] for r in others] == ["eval", "decision", "resume", "checkpoint", "end"]
    assert (start["total_samples"], start["calibrated"], start["target_efficiency"]) == (80, False, 0.5)
    assert start["config"] == {"limits": {"max_batch": None}, "path": "a"}
    assert start["nonfinite"] == {"config.limits.max_batch": "inf"}
    assert first["scale_high"] is None and "nonfinite" not in first  # an unbounded interval is no accident
    assert second["loss"] is None and second["nonfinite"] == {"loss": "nan"}


def test_numbers_of_other_libraries_become_plain_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with RunLog(tmp_path, loggers=["jsonl"]) as log:
        log.step(a_step(1, lr=numpy.float32(0.5), skipped=numpy.int64(3), changed=numpy.bool_(True), odd=object))
    (record,) = strict_lines(tmp_path)
    assert (record["lr"], record["skipped"], record["changed"]) == (0.5, 3, True)
    assert isinstance(record["odd"], str)


def test_a_record_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    log = RunLog(tmp_path, loggers=["jsonl"])
    log.step(a_step(1))
    assert len(strict_lines(tmp_path)) == 1
    log.close()
    log.close()


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    with RunLog(tmp_path / "run", main=False, stream=stream) as log:
        log.step(a_step(1))
    assert not (tmp_path / "run").exists() and stream.getvalue() == ""


def test_an_unknown_logger_is_refused_with_the_valid_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'wandb'; valid: jsonl, console, tensorboard"):
        RunLog(tmp_path, loggers=["jsonl", "wandb"], main=False)


def test_records_after_the_resumed_step_are_superseded(tmp_path: Path) -> None:
    with RunLog(tmp_path, loggers=["jsonl"]) as log:
        log.start(at(0))
        for step in range(1, 13):
            log.step(a_step(step, attempt=1))
        log.evaluation(at(10, loss=9.0))
        log.evaluation(at(12, loss=9.0))
        log.decision(at(11, previous=8, batch=16))
        log.end(at(12, reason="interrupted"))
    with RunLog(tmp_path, loggers=["jsonl"], resumed_at=80) as log:
        log.start(at(10))
        log.resume(at(10, from_step=10, changes=[]))
        log.evaluation(at(10, loss=1.0))
        for step in range(11, 15):
            log.step(a_step(step, attempt=2))
    metrics = read_metrics(tmp_path)
    assert [r["step"] for r in metrics.steps] == list(range(1, 15))
    assert [r["attempt"] for r in metrics.steps] == [1] * 10 + [2] * 4
    assert [(r["step"], r["loss"]) for r in metrics.evaluations] == [(10, 1.0)]
    assert metrics.decisions == [] and metrics.end is None
    assert metrics.superseded == 5  # two steps, two evaluations, one decision
    assert metrics.last is not None and metrics.last["step"] == 14
    assert len(strict_lines(tmp_path)) == 24  # the file keeps them


def test_a_second_resume_from_further_back_undoes_the_first(tmp_path: Path) -> None:
    with RunLog(tmp_path, loggers=["jsonl"]) as log:
        for step in range(1, 6):
            log.step(a_step(step))
        log.resume(at(4, from_step=4))
        log.step(a_step(5))
        log.resume(at(2, from_step=2))
        log.step(a_step(3))
    metrics = read_metrics(tmp_path)
    assert [r["step"] for r in metrics.steps] == [1, 2, 3]
    assert [r["from_step"] for r in metrics.resumes] == [2]


def test_a_run_begun_anew_in_its_folder_supersedes_the_old_one(tmp_path: Path) -> None:
    with RunLog(tmp_path, loggers=["jsonl"]) as log:
        for _ in range(2):
            log.start(at(0))
            log.step(a_step(1))
            log.step(a_step(2))
    metrics = read_metrics(tmp_path)
    assert [r["step"] for r in metrics.steps] == [1, 2] and metrics.superseded == 2


def test_a_torn_last_line_is_reported_and_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    with RunLog(tmp_path, loggers=["jsonl"]) as log:
        log.step(a_step(1))
        log.step(a_step(2))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    torn = read_metrics(path)
    assert [r["step"] for r in torn.steps] == [1] and torn.torn and torn.damaged == (2,)
    with RunLog(tmp_path, loggers=["jsonl"]) as log:
        log.resume(at(1, from_step=1))
        log.step(a_step(2))
    healed = read_metrics(tmp_path)
    assert [r["step"] for r in healed.steps] == [1, 2] and len(healed.resumes) == 1
    assert not healed.torn and healed.damaged == (2,)


def test_reading_what_is_no_metrics_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="metrics.jsonl"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert read_metrics(tmp_path).last is None
    (tmp_path / "ledger.json").write_text('{"segments": []}\n')
    with pytest.raises(ValueError, match="holds no metrics"):
        read_metrics(tmp_path / "ledger.json")


def test_a_full_disk_warns_once_and_training_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    stream = io.StringIO()
    with RunLog(tmp_path, loggers=["jsonl", "console"], stream=stream) as log:
        for step in range(1, 4):
            log.step(a_step(step))
        assert log.failures == {"jsonl": 3, "console": 0}
    errors = capsys.readouterr().err
    assert errors.count("No space left on device") == 1
    assert "could not be logged: jsonl 3" in errors
    assert "loss 2.000" in stream.getvalue()


def test_a_record_that_does_not_fit_leaves_no_part_behind(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunLog(tmp_path, loggers=["jsonl"]) as log:
        log.step(a_step(1))
        size = (tmp_path / "metrics.jsonl").stat().st_size
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
            log.step(a_step(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (tmp_path / "metrics.jsonl").stat().st_size == size
        log.step(a_step(3))
        assert log.failures == {"jsonl": 1}
    assert [r["step"] for r in read_metrics(tmp_path).steps] == [1, 3] and read_metrics(tmp_path).damaged == ()


def test_a_logger_with_a_fault_of_its_own_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def __init__(self, settings: LogSettings) -> None: ...

        def write(self, record: object) -> None:
            raise RuntimeError("no such project")

        close = write  # wrong, too: it is called without a record

    monkeypatch.setitem(LOGGERS, "broken", Broken)
    with RunLog(tmp_path, loggers=["broken", "jsonl"]) as log:
        log.step(a_step(1))
    assert len(strict_lines(tmp_path)) == 1
    assert "logger broken failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (RESOLVED, "47 [38, 61]"),
        (UNRESOLVED, "> 38 (unresolved)"),
        (dict(scale=None, scale_low=38.1, scale_high=None, resolved=False), "> 38 (unresolved)"),
        (dict(scale=90.0, scale_low=0.0, scale_high=math.inf, resolved=False), "unresolved"),
        (dict(scale=1234.5, scale_low=0.47, scale_high=2.5e6), "1,234 [0.47, 2.5M]"),
        (dict(scale=None, scale_low=None, scale_high=None), None),
        ({}, None),
    ],
)
def test_a_noise_scale_in_words(record: dict[str, Any], words: str | None) -> None:
    assert text.noise_scale(record) == words


def test_numbers_in_words() -> None:
    assert [text.count(value) for value in (950, 41_216, 412_345, 999_999, 1.25e6)] == [
        "950",
        "41,216",
        "412k",
        "1M",
        "1.25M",
    ]
    spans = [text.duration(seconds) for seconds in (0, 0.05, 4.2, 59.6, 192, 7_500, 100_000)]
    assert spans == ["0 s", "50 ms", "4.2 s", "1 min 00 s", "3 min 12 s", "2 h 05 min", "1 d 04 h"]


def console(**settings: Any) -> tuple[ConsoleLogger, io.StringIO, list[float]]:
    """A console logger on a pipe, its stream, and the clock's reading to be moved by the test."""
    stream, now = io.StringIO(), [0.0]
    return ConsoleLogger(LogSettings(Path("runs/a"), stream, **settings), clock=lambda: now[0]), stream, now


def test_the_progress_line() -> None:
    logger, stream, _ = console(total_samples=800)
    logger.write(at(10, kind="eval", loss=2.25))
    logger.write(a_step(20, kind="step", efficiency=0.61, **RESOLVED))
    evaluated, progress = stream.getvalue().splitlines()
    assert evaluated == "held-out at 80 samples: loss 2.250"
    assert progress == (
        "[ 20 %] 160 samples · step 20 · loss 2.000 · held-out 2.250 · batch 8 · noise 47 [38, 61] · "
        "efficiency 61 %* · 8 samples/s · ETA 1 min 20 s"
    )


def test_calibrated_efficiency_has_no_asterisk_and_unresolved_noise_says_so() -> None:
    logger, stream, _ = console(calibrated=True)
    logger.write(a_step(20, kind="step", efficiency=0.61, **UNRESOLVED))
    assert "noise > 38 (unresolved) · efficiency 61 % · 8 samples/s" in stream.getvalue()
    assert "ETA" not in stream.getvalue() and not stream.getvalue().startswith("[")


def test_progress_lines_are_thinned_by_time() -> None:
    logger, stream, now = console(total_samples=8000)  # 1,000 steps of a second: a line for every 2 %
    for step in range(1, 201):
        now[0] = float(step)
        logger.write(a_step(step, kind="step"))
    printed = [int(line.split("step ")[1].split(" ")[0]) for line in stream.getvalue().splitlines()]
    assert printed[0] == 1 and {b - a for a, b in zip(printed, printed[1:])} == {20}
    logger.close()
    assert "step 200 ·" in stream.getvalue().splitlines()[-1]  # the log ends with the last state


def test_only_decisions_that_change_the_batch_are_shown() -> None:
    logger, stream, _ = console()
    hold = dict(previous=8, batch=8, changed=False, reason="hold 8: within the dead band")
    grow = dict(previous=8, batch=16, changed=True, reason="grow 8 to 16: noise scale 47 [38, 61] wants 47")
    logger.write(at(16, kind="decision", **hold))
    logger.write(at(32, kind="decision", **grow))
    assert stream.getvalue() == "batch 8 → 16 at 256 samples: noise scale 47 [38, 61] wants 47\n"


def test_resume_lists_the_changes_and_the_end_its_summary() -> None:
    logger, stream, _ = console(calibrated=True)
    change = dict(key="policy.target", old=0.5, new=0.4, outcome="applied")
    logger.write(at(4, kind="resume", from_step=4, changes=[change]))
    logger.write(at(9, kind="end", reason="SIGTERM", summary={"sentences": ["72 samples in 9 steps."]}))
    assert stream.getvalue().splitlines() == [
        "resumed at step 4, 32 samples; changed:",
        "  policy.target: 0.5 → 0.4 (applied)",
        "ended: stopped by SIGTERM",
        "  72 samples in 9 steps.",
    ]


def test_a_stream_that_knows_no_unicode_gets_plain_separators_and_no_escapes() -> None:
    raw = io.BytesIO()
    logger = ConsoleLogger(LogSettings(Path("a"), io.TextIOWrapper(raw, encoding="ascii")), clock=lambda: 0.0)
    logger.write(at(1, kind="decision", previous=8, batch=16, reason="because\x1b[2J é"))
    assert raw.getvalue() == b"batch 8 -> 16 at 8 samples: because[2J ?\n"


def test_narrow_terminals_drop_the_least_important_parts() -> None:
    parts = [Part("samples", 7), Part("loss", 1), Part("held-out", 4)]
    assert [part.words for part in fit(parts, 80)] == ["samples", "loss", "held-out"]
    assert [part.words for part in fit(parts, 16)] == ["loss", "held-out"]
    assert [part.words for part in fit(parts, 3)] == ["loss"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_line_is_redrawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream, now = Terminal(), [0.0]
    logger = ConsoleLogger(LogSettings(Path("a"), stream, total_samples=80), clock=lambda: now[0])
    for step in range(1, 6):
        now[0] = float(step)
        logger.write(a_step(step, kind="step", **RESOLVED))
    logger.write(at(5, kind="decision", previous=8, batch=16, reason="grow 8 to 16: because [it] may"))
    logger.close()
    shown = stream.getvalue()
    assert "\x1b[2K" in shown and "━" in shown and "noise 47 [38, 61]" in shown
    assert "batch 8 → 16 at 40 samples: because [it] may" in shown  # brackets are no markup
    assert shown.endswith("\x1b[?25h") or "\x1b[?25h" in shown  # the cursor is back


def test_tensorboard_events_are_over_samples_and_a_resume_hides_what_it_undid(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with RunLog(tmp_path, loggers=["tensorboard"]) as log:
        for step in range(1, 7):
            log.step(a_step(step, loss=1.0, **UNRESOLVED))
        log.evaluation(at(6, loss=7.0, accuracy=0.25))
    with RunLog(tmp_path, loggers=["tensorboard"], resumed_at=32) as log:
        log.resume(at(4, from_step=4))
        log.step(a_step(5, loss=2.0, **RESOLVED))
        log.evaluation(at(5, loss=3.0))
        log.decision(at(5, previous=8, batch=16, changed=True, reason="grow 8 to 16: why not"))
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(8, 1), (16, 1), (24, 1), (32, 1), (40, 2)]
    assert [e.value for e in events.Scalars("progress/steps")] == [1, 2, 3, 4, 5]
    assert [(e.step, e.value) for e in events.Scalars("held_out/loss")] == [(40, 3)]
    assert events.Scalars("noise/scale_high")[0].value == math.inf
    (decision,) = events.Tensors("batch/decision/text_summary")
    assert decision.tensor_proto.string_val[0].decode() == "batch 8 → 16 at 40 samples: why not"


def test_loggers_are_imported_only_when_asked_for() -> None:
    heavy = "torch,rich,matplotlib,tensorboard,numpy"
    code = f"import sys, adabatch.runlog, adabatch.report; print([m for m in '{heavy}'.split(',') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
