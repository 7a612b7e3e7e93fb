"""The verbs ``simulate`` and ``plan``: what they print, what they refuse, and that they do without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from recorded_run import SyntheticRun

from adabatch.cli import main
from adabatch.config.simulation import TRUTHS, composed, overrides_of
from adabatch.ledger import Ledger

ROOT = Path(__file__).parents[2]
SHORT = ("stop.samples=20k", "truth.growth=4")


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]):
    def called(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = ended.code
        return status, *capfd.readouterr()

    return called


def columns(line: str) -> list[str]:
    return line.split()


# -- simulate


def test_a_policy_stands_beside_fixed_batches(call) -> None:
    status, out, err = call("simulate", *SHORT, "policy.target_efficiency=0.5", "seed=1")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        "policy target_efficiency, truth exponential; 20,000 samples on 1 rank, micro-batches of at most 8; "
        "scaling sqrt from reference batch 16"
    )
    assert columns(lines[1]) == ["data"]
    assert columns(lines[2]) == ["batch", "steps", "samples", "efficiency", "product", "changes"]
    assert columns(lines[3])[:3] == ["policy", "16", "to"]
    fixed = [columns(line) for line in lines[4:] if line.split()[:1] == ["fixed"]]
    assert len(fixed) >= 2
    assert all((row[3], row[-1]) == ("20,000", "0") and float(row[5]) == pytest.approx(1, abs=0.01) for row in fixed)
    assert "On the same samples a fixed batch of" in out and ("fewer steps" in out or "more steps" in out)


def test_the_same_for_machines(call) -> None:
    status, out, err = call("simulate", *SHORT, "--json", "exact=true", "cluster.per_sample=0.001")
    data = json.loads(out)
    assert (status, err) == (0, "")
    assert data["policy"]["samples"] == 20_000
    assert data["policy"]["efficiency"] == pytest.approx(0.5, abs=0.05)
    assert (
        data["fixed"][0]["needs"]["samples"]
        > data["policy"]["needs"]["samples"]
        > data["fixed"][-1]["needs"]["samples"]
    )
    assert data["match"]["steps"] == pytest.approx(20_000 / data["match"]["global_batch"], rel=0.02)
    assert data["points"][0]["global_batch"] == 16
    assert call("simulate", *SHORT, "--json", "exact=true", "cluster.per_sample=0.001")[1] == out


def test_a_step_that_costs_nothing_saves_no_time(call) -> None:
    out = call("simulate", *SHORT, "cluster.per_sample=0.001")[1]
    assert "No wall-clock gain per sample" in out
    assert "No wall-clock gain" not in call("simulate", *SHORT, "cluster.per_sample=0.001", "cluster.optimizer=0.01")[1]


@pytest.mark.parametrize("truth", [name for name in TRUTHS if name not in ("recorded", "quadratic")])
def test_every_curve_can_be_followed(truth: str, call) -> None:
    status, out, err = call("simulate", f"truth={truth}", "stop.samples=20k")
    assert (status, err) == (0, "") and f"truth {truth};" in out
    assert OmegaConf.get_type(composed([f"truth={truth}"]).truth) is TRUTHS[truth]


def test_a_recorded_run_is_a_truth(tmp_path: Path, call) -> None:
    run = SyntheticRun(tmp_path / "run", samples=20_000)
    with run.log() as log:
        log.start(run.start_record())
        run.train(log, run.samples)
    status, out, _ = call("simulate", "truth=recorded", f"truth.run={tmp_path / 'run'}", "stop.samples=20k", "--json")
    data = json.loads(out)
    assert status == 0
    assert 14 < data["points"][-1]["critical"] < 150
    assert data["policy"]["loss"] < 4


def test_a_quadratic_is_compared_by_its_loss(call) -> None:
    settings = ("truth=quadratic", "optimizer=sgd", "optimizer.lr=0.05", "truth.dimensions=20", "stop.samples=4k")
    status, out, err = call("simulate", *settings, "optimizer.momentum=0")
    assert (status, err) == (0, "")
    assert columns(out.splitlines()[2])[-1] == "loss"
    assert "each fixed batch had its own" in out or "best learning rate" not in out
    status, _, err = call("simulate", "truth=quadratic")
    assert (status, err) == (2, "adabatch simulate: truth=quadratic is trained by optimizer=sgd, not by adamw\n")


@pytest.mark.parametrize(
    ("suffix", "begins"), [(".png", b"\x89PNG"), (".html", b"<!doctype html>"), (".svg", b"<?xml")]
)
def test_a_plot_is_written(suffix: str, begins: bytes, tmp_path: Path, call) -> None:
    path = tmp_path / f"run{suffix}"
    status, _, err = call("simulate", *SHORT, "--plot", path)
    assert (status, err) == (0, f"{path}\n")
    assert path.read_bytes().startswith(begins)
    assert path.stat().st_size > 10_000


def test_a_plot_of_another_kind_is_refused_before_anything_runs(tmp_path: Path, call) -> None:
    status, out, err = call("simulate", *SHORT, "--plot", tmp_path / "run.txt")
    assert (status, out) == (2, "")
    assert err.startswith("adabatch simulate: --plot writes .png, .svg, .pdf, .html")


def test_settings_come_from_a_file_and_the_command_line_wins(tmp_path: Path, call) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "policy: step_price\npolicy.price: 500\ncluster: {ranks: 4, per_sample: 2.0e-3}\nstop: {samples: 20k}\n"
        "truth: power_law\nlimits: {start_batch: 32}\nexact: true\n"
    )
    assert overrides_of(path)[:3] == ["policy=step_price", "policy.price=500", "cluster.ranks=4"]
    status, out, _ = call("simulate", "--config", path, "cluster.ranks=2")
    assert status == 0
    assert out.startswith("policy step_price, truth power_law; 20,000 samples on 2 ranks")
    path.write_text("[1, 2]")
    assert "must hold settings such as" in call("simulate", "--config", path)[2]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("cluster.rank=3", "Did you mean cluster.ranks?"),
        ("policy=fixt", "there is no policy=fixt"),
        ("truth=power", "there is no truth=power"),
        ("model=gpt_tiny", "model"),
        ("policy.target_efficiency=2", "policy.target_efficiency must be in (0, 1), got 2"),
        ("cluster.overlap=3", "cluster.overlap must be in [0, 1], got 3"),
        ("stop.loss=2", "leave out stop.loss"),
        ("policy=wall_clock", "set cluster.per_sample"),
        ("cluster.ranks=64", "limits.start_batch=16 cannot be made from 64 ranks"),
    ],
)
def test_a_wrong_setting_is_refused_as_in_training(setting: str, words: str, call) -> None:
    status, out, err = call("simulate", *SHORT, setting)
    assert (status, out) == (2, "")
    assert err.startswith("adabatch simulate: ") and words in err and "Traceback" not in err


# -- plan


def test_stages_on_given_ranks(call) -> None:
    settings = ("stop.samples=100k", "cluster.ranks=4", "lr_schedule=cosine", "cluster.per_sample=0.001")
    status, out, err = call("plan", "0:16, 10k:64, 40k:256", *settings)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        "policy stages; 100,000 samples on 4 ranks, micro-batches of at most 8; scaling sqrt from reference batch 16"
    )
    rows = [" ".join(line.split()) for line in lines[3:7]]
    assert rows == [
        "0 16 4 x 1 x 4 625 10,000 1.0 to 0.978 1 1 1 4.02 ms 2.5 s",
        "10,000 64 4 x 2 x 8 469 30,016 1.956 to 1.379 4 0.5 2 16 ms 7.5 s",
        "40,016 256 4 x 8 x 8 234 59,904 2.748 to 0.4 16 0.25 4 64 ms 15 s",
        "99,920 80 4 x 3 x 8 1 80 0.2236 5 0.4472 2.236 20 ms 20 ms",
    ]
    assert lines[-1] == "1,329 steps, 100,000 samples, 25 s; the last step is shortened to end the run"


def test_a_ledger_or_a_run_folder_is_a_schedule(tmp_path: Path, call) -> None:
    ledger = Ledger()
    for batch, steps in ((16, 10), (32, 5)):
        for _ in range(steps):
            ledger.record_step(batch)
    ledger.save(tmp_path / "ledger.json")
    expected = call("plan", tmp_path / "ledger.json", "cluster.ranks=2")
    assert expected[0] == 0 and expected[1].splitlines()[-1] == "15 steps, 320 samples"
    assert call("plan", tmp_path, "cluster.ranks=2") == expected
    assert call("plan", "policy=replay", f"policy.ledger={tmp_path}", "cluster.ranks=2") == expected
    longer = call("plan", tmp_path, "stop.samples=384")[1].splitlines()
    assert longer[-1] == "17 steps, 384 samples"


def test_a_plan_for_machines(call) -> None:
    status, out, _ = call("plan", "--json", "policy=fixed", "policy.global_batch=64", "stop.samples=1k")
    first, last = json.loads(out)
    assert (status, first["global_batch"], first["steps"], first["lr"], first["seconds"]) == (
        0,
        64,
        15,
        [1.0, 1.0],
        None,
    )
    assert (last["global_batch"], last["partial"]) == (40, True)


def test_step_times_come_from_a_run(tmp_path: Path, call) -> None:
    run = SyntheticRun(tmp_path / "run", samples=40_000, fixed=0.02, per_micro_batch=0.03)
    with run.log() as log:
        log.start(run.start_record())
        run.train(log, run.samples)
    settings = ("0:64", "stop.samples=6400", "--times", tmp_path / "run", "cluster.ranks=2", "--json")
    status, out, err = call("plan", *settings)
    (stretch,) = json.loads(out)
    assert (status, err) == (0, "")
    assert stretch["seconds"] == pytest.approx(100 * (0.02 + 4 * 0.03), rel=0.1)
    status, out, err = call("plan", "0:24", "stop.samples=2400", "--times", tmp_path / "run", "cluster.ranks=3")
    assert status == 0 and "tells no step times of these batches on 3 ranks" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("0:16 1k:32",), "say how long the run is: stop.samples=..."),
        (("0:16 1k:32 500:64", "stop.samples=2k"), "must begin at 0 and rise strictly"),
        (("0-16", "stop.samples=2k"), "'0-16' is no pair of threshold:batch"),
        (("0:4", "stop.samples=2k", "cluster.ranks=8", "limits.min_batch=4"), "the nearest that can: 8"),
        (("policy=target_efficiency", "stop.samples=2k"), "adabatch simulate policy=target_efficiency"),
    ],
)
def test_what_is_no_schedule_is_refused(arguments: tuple[str, ...], words: str, call) -> None:
    status, out, err = call("plan", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("adabatch plan: ") and words in err


# -- without torch


def test_both_do_without_torch(tmp_path: Path) -> None:
    plot = str(tmp_path / "run.png")
    commands = [
        ["simulate", *SHORT, "--plot", plot],
        ["simulate", "truth=quadratic", "optimizer=sgd", "truth.dimensions=5", "stop.samples=1k"],
        ["plan", "0:16 1k:32", "stop.samples=10k"],
    ]
    blocked = "import sys; sys.modules['torch'] = None"
    program = f"{blocked}\nfrom adabatch.cli import main\nprint([main(one) for one in {commands!r}])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stderr) == (0, f"{plot}\n")
    assert done.stdout.splitlines()[-1] == "[0, 0, 0]"


def test_every_truth_has_a_file() -> None:
    assert {path.stem for path in (ROOT / "hydra_configs" / "truth").glob("*.yaml")} == set(TRUTHS)
