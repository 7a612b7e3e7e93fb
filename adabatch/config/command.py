"""The command line of a recipe: overrides, ``--help``, ``--cfg job``, ``--info`` and ``--multirun``.

Errors are printed once, by rank 0, and end every rank with status 2. Neither folders nor the working directory are
Hydra's business here: run folders are chosen in ``folders``.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import hydra
from omegaconf import DictConfig

from adabatch.config.compose import ConfigError, compose, compose_partly, config_folder, parse, register
from adabatch.config.usage import usage

HELP = ("-h", "--help")
SWEEP = ("-m", "--multirun")
# Hydra answers these itself, and runs nothing.
HYDRA = ("-c", "--cfg", "-i", "--info", "--hydra-help", "--version", "-sc", "--shell-completion")
REFUSED = 2
# Seconds that a silent rank leaves the speaking one.
PATIENCE = 10.0

Run = Callable[[DictConfig, Sequence[str]], int]


def program(task: Run, *, config: str, schemas: Mapping[str, Mapping[str, type]]) -> int:
    """The entry point of a recipe: compose the command line's configuration and hand it to ``task``.

    Returns:
        The exit status: that of ``task``, or 2 for a configuration that cannot be run.
    """
    register(config, schemas)
    arguments = sys.argv[1:]
    flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("-")]
    try:
        if flags and flags[0] in HYDRA:
            return _answer(config, arguments)
        overrides = [argument for argument in arguments if not argument.startswith("-")]
        if set(flags) & set(HELP):
            return _print(usage(task, compose_partly(config, overrides)))
        if unknown := [flag for flag in flags if flag not in SWEEP]:
            raise ConfigError(
                f"there is no option {unknown[0]}; valid: --help, --cfg job, --info and --multirun. Settings are "
                f"key=value, without dashes"
            )
        if flags:
            return _sweep(task, config, overrides)
        _note_hydra(overrides)
        return task(compose(config, overrides), overrides)
    except ConfigError as error:
        return _refuse(error)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _refuse(error: ConfigError) -> int:
    """Have the error said once; the status for it.

    The launcher ends all ranks when the first has ended. So the others wait for that until the one that speaks has
    spoken; when nothing ends them, it has not met the error (a file may be missing on one machine), and they speak.
    """
    rank = _rank()
    if rank != error.rank and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(REFUSED))
        time.sleep(PATIENCE)
        print(f"configuration error on rank {rank}: {error}", file=sys.stderr, flush=True)
    elif rank == error.rank:
        print(f"configuration error: {error}", file=sys.stderr, flush=True)
    return REFUSED


def _print(text: str) -> int:
    if _rank() == 0:
        print(text)
    return 0


def _answer(config: str, arguments: Sequence[str]) -> int:
    """Let Hydra print what it was asked for; what cannot be composed is refused as always."""
    compose_partly(config, [argument for argument in arguments if "=" in argument and not argument.startswith("-")])
    if _rank() == 0:
        hydra.main(config_path=str(config_folder()), config_name=config, version_base="1.3")(_unreachable)()
    return 0


def _unreachable(config: DictConfig) -> None:
    raise AssertionError("Hydra was asked to print, and not to run")


def _note_hydra(overrides: Sequence[str]) -> None:
    idle = [override for override in overrides if override.startswith("hydra")]
    if idle and _rank() == 0:
        print(
            f"note: {' '.join(idle)} changes nothing: the working directory stays, and the run folder is chosen by "
            f"run_folder= or runs=",
            file=sys.stderr,
        )


def _sweep(task: Run, config: str, overrides: Sequence[str]) -> int:
    """One run after another, for each combination of the values that overrides list; all are composed before."""
    if "RANK" in os.environ:
        raise ConfigError(
            "--multirun cannot run under torchrun: every rank would start its own sweep. Start one torchrun for each "
            "setting, for example: for e in 0.5 0.8; do torchrun ... policy.target_efficiency=$e; done"
        )
    jobs = [list(job) for job in itertools.product(*map(_values, overrides))]
    composed = [compose(config, job) for job in jobs]
    status = 0
    for number, (job, one) in enumerate(zip(jobs, composed, strict=True), start=1):
        print(f"run {number} of {len(jobs)}: {' '.join(job)}", flush=True)
        try:
            status = max(status, task(one, job))
        except ConfigError as error:
            status = max(status, _refuse(error))
    return status


def _values(override: str) -> list[str]:
    """The overrides of one value each that a sweeping one stands for."""
    parsed = parse(override)
    if not parsed.is_sweep_override():
        return [override]
    if not parsed.is_discrete_sweep():
        raise ConfigError(f"{override!r} lists no values that can be run one by one; write them out: key=a,b,c")
    return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
