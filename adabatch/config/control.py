"""What a running job may be asked to change, the file that asks for it, and the run's answer.

``control.yaml`` in a run folder says what is to hold from now on, in the words of the command line; the run looks at it
when a decision is due. Rows may be nested or not, and ``policy: fixed`` chooses another one:

    policy.target_efficiency: 0.8
    limits: {max_batch: 512}

A file that was written by hand is taken when two looks in a row find it the same: an editor may be about to write the
rest.
``control.answer.json`` beside it says what came of the last request. What was answered is not looked at again, whoever
goes on with the run; a changed file is a new request.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from adabatch.config import resume
from adabatch.config.compose import FAILURES, ConfigError, config_folder, is_group, parse, register
from adabatch.config.deciding import build_budget, build_damping, build_policy
from adabatch.config.resume import Change
from adabatch.controller import Controller
from adabatch.noise import NoiseEstimator
from adabatch.plan import BatchLimits

REQUEST = "control.yaml"
# The last line of what the verb writes: a text that ends with it is whole, also after an edit by hand.
END = "# end\n"
ANSWER = "control.answer.json"

# What moves the batch, and cadences. Anything else is built into the running parts, or is what their state means.
GROUPS = ("policy", "damping")
KEYS = (
    "limits.min_batch",
    "limits.max_batch",
    "noise.decide_every",
    "evaluation.every",
    "checkpoint.every",
    "stop.seconds",
    "stop.loss",
)
_ABSENT = object()
VALID = ", ".join((*GROUPS, *(f"{group}.*" for group in GROUPS), *KEYS))


@dataclass(frozen=True, slots=True)
class Request:
    """A readable request: the text's ``digest``, and what it asks for as command-line overrides."""

    digest: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checked:
    """A request that a run could go on under: its configuration then, all overrides, and what changes."""

    config: DictConfig
    overrides: list[str]
    changes: list[Change]


def check(name: str, folder: Path, overrides: Sequence[str]) -> Checked:
    """Compose the run's configuration under ``overrides``, as a resumed launch would, and see what a job cannot change.

    Args:
        name: the root configuration of the run's program, whose schemas are registered.
        folder: the run folder.
        overrides: what is asked for.

    Raises:
        ConfigError: for what cannot be composed, and for keys that cannot change in a running job.
    """
    before = OmegaConf.load(folder / resume.SNAPSHOT)
    _refuse_fixed([_key(override) for override in overrides], before, folder)
    config, merged = resume.resumed(name, folder, overrides)
    changes = resume.changes_since(resume.to_text(before), config)
    return Checked(config, merged, [replace(change, outcome="applied live") for change in changes])


def build_parts(config: DictConfig, world: int) -> dict[str, Any]:
    """What ``Controller.adopt`` takes.

    Raises:
        ValueError: for values that a part does not take, or bounds between which no batch can be made.
        OSError: when a file that the policy names cannot be read.
    """
    bounds = config.limits
    return {
        "policy": build_policy(config, build_budget(config)),
        "limits": BatchLimits(world, bounds.micro_batch, bounds.min_batch, bounds.max_batch, bounds.rounding),
        "damping": build_damping(config, config.scaling.reference_batch),
        "decide_every": config.noise.decide_every,
    }


def require_possible(config: DictConfig, world: int) -> None:
    """Raise ``ValueError`` for what a run on ``world`` ranks would refuse at any batch."""
    parts = build_parts(config, world)
    limits = parts["limits"]
    noise = NoiseEstimator() if config.noise.enabled else None
    Controller(**parts, start_batch=limits.realise(limits.max_batch), noise=noise)


def _refuse_fixed(keys: Sequence[str], before: DictConfig, folder: Path) -> None:
    wrong = [key for key in keys if key not in KEYS and key.partition(".")[0] not in GROUPS]
    if wrong:
        ways = " ".join(dict.fromkeys(_way_out(key, before, folder) for key in wrong))
        raise ConfigError(f"a running job cannot change {', '.join(wrong)}. {ways} While it runs, it takes {VALID}")


def _way_out(key: str, before: DictConfig, folder: Path) -> str:
    known = OmegaConf.select(before, key, default=_ABSENT) is not _ABSENT
    if not known and (close := difflib.get_close_matches(key, (*GROUPS, *KEYS), n=1)):
        return f"Did you mean {close[0]}?"
    if key.startswith(resume.FIXED_GROUPS) or key in resume.FIXED_KEYS:
        return f"{key} stays as the run began: start a new run."
    return f"Stop it and go on with resume={folder} {key}=..."


# -- the file that asks


def read_request(text: bytes) -> Request:
    """What the text of a control file asks for; an empty one asks for nothing.

    Raises:
        ConfigError: when it is no YAML mapping.
    """
    try:
        asked = OmegaConf.to_container(OmegaConf.create(text.decode("utf-8")))
    except FAILURES as error:
        raise ConfigError(f"{REQUEST} is not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(asked, dict):
        raise ConfigError(f"{REQUEST} must hold rows like 'limits.max_batch: 512', got a list")
    return Request(digest_of(text), tuple(_overrides(asked, "")))


def ends_as_written(text: bytes) -> bool:
    """Whether nothing of a request can be missing; an editor may not have written the rest of any other."""
    return text.endswith(END.encode())


def digest_of(text: bytes) -> str:
    """What tells one request from another."""
    return hashlib.sha256(text).hexdigest()


def _overrides(asked: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    for key, value in asked.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _overrides(value, f"{name}.")
        elif is_group(name):
            # YAML reads a bare off as false.
            yield f"{name}={'off' if value is False else value}"
        else:
            yield f"{name}={_quoted(value)}"


def _quoted(value: Any) -> str:
    """A plain value in the words of an override."""
    if isinstance(value, str):
        return QuotedString(value, Quote.double).with_quotes()
    return "null" if value is None else str(value).lower()


def write_request(folder: Path, overrides: Sequence[str]) -> str:
    """Ask the run in ``folder`` for ``overrides`` and nothing else; returns the digest."""
    rows = {_key(override): _value(override) for override in overrides}
    head = f"# asked for by adabatch control at {time.strftime('%Y-%m-%d %H:%M:%S')}, {time.time_ns()}\n"
    text = head + yaml.safe_dump(rows, sort_keys=False) + END
    resume.write_whole(folder / REQUEST, text)
    return digest_of(text.encode())


def waiting(folder: Path) -> list[str]:
    """The overrides of a readable request that the run has not answered."""
    try:
        request = read_request((folder / REQUEST).read_bytes())
    except (OSError, ConfigError):
        return []
    return [] if request.digest == read_answer(folder).get("digest") else list(request.overrides)


def _key(override: str) -> str:
    return parse(override).key_or_group


def _value(override: str) -> Any:
    value = parse(override).value()
    return value.text if isinstance(value, QuotedString) else value


# -- the verb


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was written: its digest, and what is to be said about it."""

    digest: str
    lines: tuple[str, ...]


def ask(folder: Path, overrides: Sequence[str]) -> Asked:
    """Check ``overrides``, together with what the run has not answered yet, and write them for the run to find.

    Raises:
        ConfigError: when the folder is no run's, when nobody runs it, or for what the run would refuse.
    """
    launch = resume.read_launches(folder)[-1]
    if not in_use(folder):
        raise ConfigError(
            f"no process runs {folder}: there is nothing to change while it runs; go on with it by resume={folder} "
            f"{' '.join(overrides)}"
        )
    register_saved(launch["config"], folder)
    earlier = waiting(folder)
    together = resume.merge_overrides(earlier, overrides)
    checked = check(launch["config"], folder, together)
    try:
        require_possible(checked.config, launch["world"])
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    digest = write_request(folder, together)
    return Asked(digest, tuple(_foretold(checked, earlier, folder)))


def _foretold(checked: Checked, earlier: Sequence[str], folder: Path) -> Iterator[str]:
    for change in checked.changes:
        yield f"{change.key}: {change.old} -> {change.new}"
    if not checked.changes:
        yield "all of it is so already"
    if earlier:
        yield f"together with what the run has not answered yet: {' '.join(earlier)}"
    every = OmegaConf.load(folder / resume.SNAPSHOT).noise.decide_every
    yield f"asked for in {folder / REQUEST}; the run takes it up when it decides next, within {every} steps"


def describe(answer: Mapping[str, Any], folder: Path) -> str:
    """The run's answer in a sentence."""
    if not answer:
        alive = "it has not decided since" if in_use(folder) else "it has ended; it is taken up when the run goes on"
        return f"no answer from the run: {alive}"
    where = f"at step {answer['step']:,}, sample {answer['samples']:,}"
    return f"taken {where}" if answer["outcome"] == "taken" else f"refused {where}: {answer['reason']}"


# -- the answer


def read_answer(folder: Path) -> dict[str, Any]:
    """The run's last answer, or nothing."""
    try:
        answer = json.loads((folder / ANSWER).read_bytes())
    except (OSError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


def write_answer(folder: Path, answer: Mapping[str, Any]) -> None:
    resume.write_whole(folder / ANSWER, json.dumps(answer, indent=2) + "\n")


def await_answer(folder: Path, digest: str, seconds: float) -> dict[str, Any]:
    """The run's answer to a request, or nothing when it does not come in time or nobody is left to give it."""
    deadline = time.monotonic() + seconds
    while True:
        running = in_use(folder)  # asked first: a run that ends now has answered before
        answer = read_answer(folder)
        if answer.get("digest") == digest:
            return answer
        if not running or time.monotonic() >= deadline:
            return {}
        time.sleep(0.05)


def in_use(folder: Path) -> bool:
    """Whether another process's launch holds the folder. Never to be asked by that launch, whose lock would be gone."""
    try:
        with open(folder / resume.LOCK, encoding="utf-8") as file:
            # Shared, and for no longer than this.
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


# -- without the run's program


def register_saved(name: str, folder: Path) -> None:
    """Make the run's own groups known where its program is not loaded: as they were saved, since they cannot change."""
    saved = OmegaConf.to_container(OmegaConf.load(folder / resume.SNAPSHOT))
    assert isinstance(saved, dict)
    schemas = {}
    for group in ("model", "data"):
        entries = [one for file in (config_folder() / group).glob("*.yaml") for one in OmegaConf.load(file).defaults]
        names = {str(one).rpartition("/")[2].partition("@")[0] for one in entries if str(one).startswith("/schema/")}
        schemas[group] = dict.fromkeys(names, saved[group])
    register(name, schemas)
