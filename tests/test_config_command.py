"""A recipe's command line: what it prints, how it sweeps, how it refuses, and that it makes no folder of its own."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import programs
import pytest
from omegaconf import DictConfig, OmegaConf

from adabatch.config import ConfigError, command, program
from adabatch.config.bounds import rules
from adabatch.policies import POLICIES

Outcome = tuple[int, str, str]
Call = Callable[..., Outcome]


class Runs(list):
    """What the program was asked to run; a status may be wanted, or a refusal."""

    answer: int | ConfigError = 0

    def __call__(self, config: DictConfig, arguments: Sequence[str]) -> int:
        self.append((config, list(arguments)))
        if isinstance(self.answer, ConfigError):
            raise self.answer
        return self.answer


@pytest.fixture
def runs() -> Runs:
    return Runs()


@pytest.fixture
def own_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra sets up the logging of a process that it thinks is its own."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [*root.handlers])
    monkeypatch.setattr(root, "level", root.level)


@pytest.fixture
def call(
    own_logging: None, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Call:
    """Call the program ``lm`` in an empty folder: its status and what it wrote to both streams."""
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def called(*arguments: str, **environment: Any) -> Outcome:
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        status = program(runs, config="lm", schemas=programs.load("lm").SCHEMAS)
        assert Path.cwd() == tmp_path
        assert list(tmp_path.iterdir()) == [], "nothing was made"
        return status, *capfd.readouterr()

    return called


def test_a_run_gets_its_configuration_and_arguments(call: Call, runs: Runs) -> None:
    runs.answer = 7
    assert call("policy=fixed", "policy.global_batch=32") == (7, "", "")
    [(config, arguments)] = runs
    assert (config.policy.global_batch, arguments) == (32, ["policy=fixed", "policy.global_batch=32"])


@pytest.mark.parametrize("arguments", [("policy=fixd",), ("seed=-1",), ("policy=fixed",), ("limits.micro=1",), ("x",)])
def test_a_refusal_is_said_by_rank_0_alone_and_ends_every_rank_alike(arguments: tuple[str, ...], call: Call) -> None:
    status, out, err = call(*arguments, RANK=0)
    assert (status, out) == (2, "")
    assert err.startswith("configuration error: ") and "Traceback" not in err
    assert call(*arguments, RANK=1) == (2, "", "")


def test_a_refusal_that_one_rank_met_is_said_by_that_one(call: Call, runs: Runs) -> None:
    runs.answer = ConfigError("no such file here", rank=1)
    assert call(RANK=0) == (2, "", "")
    assert call(RANK=1) == (2, "", "configuration error: no such file here\n")


def test_silent_ranks_wait_for_the_one_that_speaks(call: Call, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher ends all ranks with the first, which has to be the one with something to say."""
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(command.signal, "signal", handlers.__setitem__)
    slept: list[float] = []
    monkeypatch.setattr(command.time, "sleep", slept.append)
    status, _, err = call("policy=fixd", RANK=1, WORLD_SIZE=2)
    assert (status, slept) == (2, [command.PATIENCE])
    assert err.startswith("configuration error on rank 1: "), "nobody ended it: it alone has met the error"
    with pytest.raises(SystemExit) as ended:
        handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert ended.value.code == 2


def test_help_shows_every_setting_with_its_value_meaning_and_bounds(call: Call, runs: Runs) -> None:
    status, out, err = call("--help", "policy=stages")
    assert (status, err, runs) == (0, "", [])
    lines = {line.split("=")[0].strip(): line for line in out.splitlines() if line.startswith("  ") and "=" in line}
    config = programs.composed("lm", "policy=stages", "policy.stages=0:8")
    for prefix, node in programs.nodes(config):
        brief = {name: rule.brief for name, rule in rules(OmegaConf.get_type(node)).items()}
        for key in node:
            if not OmegaConf.is_dict(node[key]) and brief.get(key, "") is not None:
                line = lines[f"{prefix}.{key}".lstrip(".")]
                assert len(line.split(maxsplit=1)) == 2 and f"({brief[key]})" in line if brief.get(key) else line
    assert "policy.stages=???" in lines["policy.stages"]
    assert lines["optimizer.lr"].split() == "optimizer.lr=0.001 at the reference batch ((0, inf))".split()
    assert f"\npolicy={'|'.join(sorted(POLICIES))}: " in out
    assert "\nmodel=gpt_medium|gpt_small|gpt_tiny: " in out
    assert call("--help", RANK=1) == (0, "", "")


def test_cfg_prints_what_would_be_composed(call: Call, runs: Runs) -> None:
    status, out, _ = call("--cfg", "job", "limits.max_batch=64")
    assert (status, runs) == (0, [])
    assert OmegaConf.create(out) == programs.composed("lm", "limits.max_batch=64")
    status, out, _ = call("--cfg", "job", "policy=fixed")
    assert OmegaConf.is_missing(OmegaConf.create(out).policy, "global_batch"), "what is missing may be so"
    status, out, err = call("--cfg", "job", "policy=fixd")
    assert (status, out) == (2, "") and "there is no policy=fixd" in err
    assert call("--cfg", "job", RANK=1) == (0, "", "")


def test_info_says_where_values_come_from(call: Call) -> None:
    status, out, _ = call("--info", "defaults")
    assert status == 0 and "policy/target_efficiency" in out


@pytest.mark.parametrize("flag", ["--foo", "--run", "--config-name=image", "-x"])
def test_another_option_is_refused_with_the_valid_ones(flag: str, call: Call) -> None:
    status, out, err = call(flag)
    assert (status, out) == (2, "")
    assert err.startswith(f"configuration error: there is no option {flag.partition('=')[0]}; valid: --help, --cfg job")


def test_a_sweep_runs_every_combination(call: Call, runs: Runs) -> None:
    status, out, err = call("--multirun", "policy.target_efficiency=0.5,0.8", "model=gpt_tiny,gpt_small", "seed=3")
    assert (status, err) == (0, "")
    ran = [(config.policy.target_efficiency, config.model.size, config.seed) for config, _ in runs]
    assert ran == [(0.5, "0.1M", 3), (0.5, "0.5M", 3), (0.8, "0.1M", 3), (0.8, "0.5M", 3)]
    assert runs[-1][1] == ["policy.target_efficiency=0.8", "model=gpt_small", "seed=3"]
    assert out.splitlines()[-1] == "run 4 of 4: policy.target_efficiency=0.8 model=gpt_small seed=3"


def test_a_sweep_of_numbers_and_of_texts(call: Call, runs: Runs) -> None:
    call("-m", "seed=range(2)", "policy=stages", "policy.stages='0:16, 1k:32','0:8'")
    assert [(config.seed, config.policy.stages) for config, _ in runs] == [
        (0, "0:16, 1k:32"),
        (0, "0:8"),
        (1, "0:16, 1k:32"),
        (1, "0:8"),
    ]


def test_a_sweep_with_a_mistake_runs_nothing(call: Call, runs: Runs) -> None:
    status, _, err = call("-m", "policy.target_efficiency=0.5,1.8")
    assert (status, runs) == (2, []) and "got 1.8" in err
    assert "write them out" in call("-m", "seed=interval(0, 9)")[2]


def test_a_refused_run_does_not_end_a_sweep(call: Call, runs: Runs) -> None:
    runs.answer = ConfigError("not on this machine")
    status, _, err = call("-m", "seed=0,1")
    assert (status, len(runs), err) == (2, 2, "configuration error: not on this machine\n" * 2)


def test_a_sweep_under_torchrun_is_refused_with_the_way_out(call: Call, runs: Runs) -> None:
    """Field case E03."""
    status, _, err = call("--multirun", "seed=0,1", RANK=0, TORCHELASTIC_RUN_ID="none")
    assert (status, runs) == (2, [])
    assert "--multirun cannot run under torchrun" in err and "for e in 0.5 0.8; do torchrun" in err


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_the_working_directory_is_not_hydras_business(chdir: str, call: Call, runs: Runs) -> None:
    """Field case E05: the same with and without; ``call`` checks that the directory and its contents stay."""
    status, _, err = call(f"hydra.job.chdir={chdir}")
    assert (status, len(runs)) == (0, 1)
    assert f"note: hydra.job.chdir={chdir} changes nothing" in err
    assert call(f"hydra.job.chdir={chdir}", RANK=1)[2] == ""


@pytest.mark.parametrize("name", programs.RECIPES)
def test_a_real_program_prints_its_help_and_makes_nothing(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(programs.ROOT / "recipes" / name / "train.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Train a ") and f"\n  name={name} " in done.stdout
    assert list(tmp_path.iterdir()) == []
