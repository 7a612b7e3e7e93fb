"""The command line ``adabatch``: its verbs, their exit statuses, and errors without a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_run import SyntheticRun

import adabatch
from adabatch.cli import _EXAMPLES, main
from adabatch.ledger import Decision, Ledger

Outcome = tuple[int, str, str]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]):
    def called(*arguments: object) -> Outcome:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as ended:  # argparse's own
            status = ended.code
        return status, *capfd.readouterr()

    return called


def written(path: Path, *batches: tuple[int, int], decide: bool = False) -> Path:
    """A ledger file of (global batch, steps) segments, with the decisions between them and two holds after each."""
    ledger = Ledger()

    def record(previous: int, batch: int, reason: str, kind: str) -> None:
        if decide:
            place = (ledger.steps, ledger.samples)
            ledger.record_decision(Decision(*place, previous, batch, float(batch), reason, "target_efficiency", kind))

    for number, (batch, steps) in enumerate(batches):
        if number:
            previous = batches[number - 1][0]
            record(previous, batch, f"grow {previous} to {batch}", "grow")
        for _ in range(steps):
            ledger.record_step(batch)
        for _ in range(2):
            record(batch, batch, f"hold {batch}: within the dead band", "dead_band")
    ledger.save(path)
    return path


# -- help


def test_help_names_every_verb_and_shows_an_example_of_each(call) -> None:
    status, out, _ = call("--help")
    assert status == 0
    for verb, examples in _EXAMPLES.items():
        assert f"    {verb} " in out
        assert all(line in out for line in examples.splitlines())
        status, own, _ = call(verb, "--help")
        assert status == 0 and examples.splitlines()[0] in own


def test_the_version(call) -> None:
    assert call("--version") == (0, f"adabatch {adabatch.__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("lern",), ("ledger",), ("report", "a", "b"), ("ledger", "a", "--what")])
def test_a_misused_command_line_is_answered_with_the_usage(arguments: tuple[str, ...], call) -> None:
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("usage: adabatch")


# -- ledger


def test_a_ledger_is_shown_with_the_reason_of_each_change(tmp_path: Path, call) -> None:
    path = written(tmp_path / "ledger.json", (16, 10), (32, 5), decide=True)
    expected = [
        "15 steps, 320 samples",
        "  from sample          0:       10 steps of 16",
        "  from sample        160:        5 steps of 32",
        "  sample        160: grow 16 to 32",
    ]
    status, out, err = call("ledger", path)
    assert (status, out.splitlines(), err) == (0, expected, "")
    assert call("ledger", tmp_path) == (status, out, err), "a run folder stands for its ledger"
    holds = call("ledger", "--holds", path)[1].splitlines()
    assert holds[3] == "  sample        160: hold 16: within the dead band (2 times)"
    assert len(holds) == 6


def test_a_splice_and_a_shortened_step_are_shown(tmp_path: Path, call) -> None:
    ledger = Ledger()
    ledger.record_step(16)
    ledger.record_splice([{"key": "limits.max_batch", "old": 64, "new": 32, "outcome": "applied"}])
    ledger.record_step(5, partial=True)
    ledger.record_splice([])
    ledger.save(tmp_path / "ledger.json")
    out = call("ledger", tmp_path)[1].splitlines()
    assert out[2:] == [
        "  from sample         16:        1 steps of 5 (shortened to end the run)",
        "  resumed at sample 16: limits.max_batch 64 -> 32",
        "  resumed at sample 21: nothing changed",
    ]


def test_two_ledgers_are_compared_and_the_status_says_whether_they_differ(tmp_path: Path, call) -> None:
    one = written(tmp_path / "one.json", (16, 10), (32, 5))
    other = written(tmp_path / "other.json", (16, 10), (64, 2))
    assert call("ledger", one, one) == (0, "the schedules are the same\n", "")
    assert call("ledger", one, other) == (
        1,
        "  samples 160 to 287: 32 against 64\n  samples 288 to 319: 32 against not reached\n",
        "",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no ledger at"),
        ("{", "is not readable as JSON"),
        ("[]", "is no batch ledger"),
        ('{"format": "adabatch-ledger", "version": 9}', "has version 9"),
    ],
)
def test_a_bad_ledger_is_refused(text: str | None, words: str, tmp_path: Path, call) -> None:
    path = tmp_path / "ledger.json"
    if text is not None:
        path.write_text(text)
    for arguments in (("ledger", path), ("ledger", written(tmp_path / "good.json", (8, 1)), path)):
        status, out, err = call(*arguments)
        assert (status, out) == (2, "")
        assert err.startswith("adabatch ledger: ") and words in err and "Traceback" not in err


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.json", *((8 + batch % 2, 1) for batch in range(5000)))
    command = f"'{sys.executable}' -m adabatch.cli ledger '{path}' | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.splitlines(), done.stderr) == (["5,000 steps, 42,500 samples", "0"], "")


# -- report


def test_a_report_is_written_where_it_is_wanted(tmp_path: Path, call) -> None:
    run = SyntheticRun(tmp_path / "run", samples=4_000)
    with run.log() as log:
        log.start(run.start_record())
        run.train(log, run.samples)
    status, out, _ = call("report", tmp_path / "run")
    assert (status, Path(out.strip())) == (0, tmp_path / "run" / "report.html")
    status, out, _ = call("report", tmp_path / "run", "--output", tmp_path / "elsewhere.html")
    assert (status, Path(out.strip())) == (0, tmp_path / "elsewhere.html")
    assert "<html" in (tmp_path / "elsewhere.html").read_text(encoding="utf-8")


def test_a_folder_without_metrics_has_no_report(tmp_path: Path, call) -> None:
    status, out, err = call("report", tmp_path)
    assert (status, out) == (2, "")
    assert err.startswith("adabatch report: there are no metrics at ") and "Traceback" not in err


# -- recommend


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A run of batch 16 on 2 ranks that goes on, with a noise scale that rises to 114 samples."""
    run = SyntheticRun(tmp_path / "run", start=16, top=16, samples=8_000)
    with run.log() as log:
        log.start(run.start_record())
        run.train(log, run.samples)
    return tmp_path / "run"


def test_a_run_recommends_a_batch(measured: Path, call) -> None:
    status, out, err = call("recommend", measured)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("run: policy target_efficiency on 2 ranks, 8,000 samples in 500 steps")
    assert any(line.startswith("Which batch? 95 % intervals") for line in lines)
    assert [line.split()[0] for line in lines if line.startswith("         0.")] == ["0.5", "0.8", "0.9"]
    assert sum("16*" in line.split() for line in lines) == 1, "the trade-off marks the batch in force"
    assert lines[-1] == "The run has no end record: it is still going on, or it was killed."


def test_a_recommendation_for_machines(measured: Path, call) -> None:
    status, out, _ = call("recommend", measured, "--json")
    plain = json.loads(out)
    assert (status, plain["calibration"], plain["calibrated"], plain["ended"]) == (0, 1.0, False, None)
    status, out, _ = call("recommend", measured, "--json", "--calibration", 3)
    tripled = json.loads(out)
    assert (status, tripled["calibrated"]) == (0, True)
    for one, other in zip(plain["now"]["batches"], tripled["now"]["batches"]):
        assert other["wanted"]["value"] == pytest.approx(3 * one["wanted"]["value"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there are no metrics at"),
        ("{\n[]\n", "holds no metrics: none of its 2 lines is a record"),
        ("", "has no noise scale yet, after 0 steps"),
        ('{"kind":"step","step":90,"samples":1440,"global_batch":16}\n{"kind":"st', "holds no noise scale, after 90"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_run_that_recommends_nothing_says_why(
    text: str | None, words: str, options: tuple[str, ...], tmp_path: Path, call
) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    status, out, err = call("recommend", tmp_path, *options)
    assert (status, out) == (2, "")
    assert err.startswith("adabatch recommend: ") and words in err and "Traceback" not in err


def test_a_calibration_must_be_one(measured: Path, call) -> None:
    status, out, err = call("recommend", measured, "--calibration", "-1")
    assert (status, out, err) == (2, "", "adabatch recommend: calibration must be above 0, got -1.0\n")


# -- validate


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that tells where and with what it was started, and refuses what it is told to."""
    path = tmp_path / "train.py"
    path.write_text(
        "import json, os, sys\n"
        "print(json.dumps([os.getcwd(), *sys.argv[1:]]))\n"
        "sys.exit(2 if 'bad=1' in sys.argv else 0)\n"
    )
    return path


def test_validate_starts_the_program_and_hands_its_status_on(program: Path, call) -> None:
    status, out, _ = call("validate", program, "policy=fixed", "policy.global_batch=64")
    assert (status, json.loads(out)) == (0, [str(Path.cwd()), "policy=fixed", "policy.global_batch=64", "job=validate"])
    assert call("validate", program, "bad=1")[0] == 2


def run_folder(folder: Path, program: Path, **more: object) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 0\n")
    launch = {"program": str(program), "config": "lm", "overrides": [], "world": 1, **more}
    (folder / "launches.json").write_text(json.dumps([{**launch, "program": "another.py"}, launch]))
    return folder


def test_validate_resumes_a_run_with_its_last_program_where_that_was_started(
    program: Path, tmp_path: Path, call, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder(tmp_path / "a run", program, directory=str(tmp_path))
    monkeypatch.chdir(tmp_path)
    status, out, _ = call("validate", "a run", "limits.max_batch=64")
    assert (status, json.loads(out)) == (0, [str(tmp_path), f'resume="{run}"', "limits.max_batch=64", "job=validate"])


@pytest.mark.parametrize(
    ("launches", "words"),
    [
        (None, "it has no launches.json"),
        ("{", "is not readable as JSON"),
        ("[]", "is no complete run folder"),
        ('[{"config": "lm"}]', "needs a program, its config and its overrides"),
    ],
)
def test_validate_refuses_a_folder_that_is_no_run(launches: str | None, words: str, tmp_path: Path, call) -> None:
    (tmp_path / "config.yaml").touch()
    if launches is not None:
        (tmp_path / "launches.json").write_text(launches)
    status, out, err = call("validate", tmp_path)
    assert (status, out) == (2, "")
    assert err.startswith("adabatch validate: ") and words in err and "Traceback" not in err


def test_validate_says_what_to_do_about_a_program_that_is_gone(tmp_path: Path, call) -> None:
    run = run_folder(tmp_path / "run", tmp_path / "gone.py")
    status, _, err = call("validate", run)
    assert status == 2
    assert f"gone.py is not there any more; say where it is: adabatch validate <program> resume=\"{run}\"" in err
    assert call("validate", tmp_path / "nowhere.py")[2] == (
        f"adabatch validate: there is no program and no run folder at {tmp_path / 'nowhere.py'}\n"
    )


# -- curvature


def test_curvature_asks_the_run_s_program_for_it(program: Path, tmp_path: Path, call) -> None:
    run = run_folder(tmp_path / "run", program)
    about = [str(Path.cwd()), f'resume="{run}"']
    assert json.loads(call("curvature", run)[1]) == [*about, "job=curvature"]
    for arguments in (
        ("--step", "640", "--json", run, "curvature.samples=4k", "device=cpu"),
        (run, "curvature.samples=4k", "--step", "640", "device=cpu", "--json"),
    ):
        status, out, _ = call("curvature", *arguments)
        settings = ["curvature.samples=4k", "device=cpu", "curvature.step=640", "curvature.json=true"]
        assert (status, json.loads(out)) == (0, [*about, *settings, "job=curvature"])
    assert call("curvature", run, "bad=1")[0] == 2


def test_curvature_refuses_what_it_does_not_know(program: Path, tmp_path: Path, call) -> None:
    run = run_folder(tmp_path / "run", program)
    status, out, err = call("curvature", run, "--jsn")
    assert (status, out) == (2, "") and "unrecognized arguments: --jsn" in err
    status, out, err = call("report", run, "a=1")
    assert (status, out) == (2, "") and "unrecognized arguments: a=1" in err
    moved = run_folder(tmp_path / "moved", tmp_path / "gone.py")
    assert "say where it is: adabatch curvature <program>" in call("curvature", moved)[2]
