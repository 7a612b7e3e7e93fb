"""What a checkpoint is on disk: names, the manifest, checksums, atomic replacement. Knows no torch.

Names inside the checkpoint folder:

- ``step-0000000120``: a complete checkpoint, put there by one rename;
- ``.step-0000000120.partial-<owner>``: one being written;
- ``.step-0000000120.replaced-<owner>``: one that is making room for another of the same step;
- ``.step-0000000120.old-<owner>``: one being deleted;
- ``latest``: a text file with the name of the checkpoint to resume from.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "latest"

_NAME = re.compile(r"step-(\d{10,})")
_ASIDE = re.compile(r"\.(?P<name>step-\d{10,})\.(?P<kind>partial|replaced|old)-(?P<owner>.+)")
_EXTRA = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_RESERVED = ("manifest", "optimizer")


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, or cannot be used; the message names the files or parameters and the reason."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What ``manifest.json`` says of a checkpoint.

    Attributes:
        step: optimizer steps done.
        samples: samples consumed.
        world: ranks that saved it.
        serial: counts the saves into one folder; the newest has the largest. Steps do not order checkpoints, since a
            run that was resumed from an earlier one passes the same steps again.
        torch: version of torch that wrote it.
        time: when, in seconds since 1970.
        extra: names of the JSON files that the caller handed in.
        files: size in bytes and SHA-256 of every file, by name.
    """

    step: int
    samples: int
    world: int
    serial: int
    torch: str
    time: float
    extra: tuple[str, ...]
    files: dict[str, dict[str, Any]]

    def render(self) -> str:
        """The manifest's text, which ends with a checksum of itself."""
        body = {"format": FORMAT, **asdict(self), "extra": list(self.extra)}
        return json.dumps({**body, "sha256": hashlib.sha256(json.dumps(body).encode()).hexdigest()}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read the manifest of the checkpoint at ``path``.

        Raises:
            CheckpointError: when it is missing or changed, or of a format that this version does not read.
        """
        try:
            text = (path / MANIFEST).read_bytes().decode()
            body = json.loads(text)
            body.pop("sha256")
            version = body.pop("format")
            manifest = cls(**{**body, "extra": tuple(body["extra"])}) if version == FORMAT else None
        except FileNotFoundError:
            raise CheckpointError(f"{path} is no complete checkpoint: it has no {MANIFEST}") from None
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {MANIFEST} cannot be read ({error!r})") from None
        if manifest is None:
            raise CheckpointError(f"{path} has checkpoint format {version}; this version of adabatch reads {FORMAT}")
        if manifest.render() != text:
            raise CheckpointError(f"{path} is damaged: the contents of {MANIFEST} changed (its checksum differs)")
        return manifest


def name_of(step: int) -> str:
    """``step-0000000120``: fixed width, so that a listing sorts by step."""
    return f"step-{step:010d}"


def aside(folder: Path, name: str, kind: str, owner: str) -> Path:
    """Where checkpoint ``name`` is while it is written (``partial``), ``replaced`` or deleted (``old``)."""
    return folder / f".{name}.{kind}-{owner}"


def checkpoints(folder: Path) -> list[Path]:
    """All folders in ``folder`` that have a checkpoint's name, by step."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=lambda p: int(p.name[5:]))


def leftovers(folder: Path, owner: str) -> Iterator[tuple[Path, str, str]]:
    """What a dead owner left aside, as (path, checkpoint name, kind); what may belong to a live one is left out."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _ASIDE.fullmatch(path.name)
        if match and _abandoned(match["owner"], owner):
            yield path, match["name"], match["kind"]


def owner_name(run: str | None) -> str:
    """Who writes here: the run's id where there is one, else host and process."""
    return run or f"{socket.gethostname()}-{os.getpid()}"


def _abandoned(owner: str, own: str) -> bool:
    """Whether ``owner`` writes no more: it is an earlier process of ``own``'s run, or a dead process of this host."""
    host, _, pid = owner.rpartition("-")
    return owner == own or (host == socket.gethostname() and pid.isdigit() and not _alive(int(pid)))


def _alive(pid: int) -> bool:
    if os.name != "posix":  # elsewhere signal 0 is not a harmless question
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def digest(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": checksum}


def verify(path: Path, *, part: int = 0, parts: int = 1) -> Manifest:
    """Check the checkpoint at ``path`` against its manifest; with ``parts``, only every so many-th file.

    Raises:
        CheckpointError: naming every file that is missing, cut short or changed.
    """
    manifest = Manifest.read(path)
    names = sorted(manifest.files)[part::parts]
    problems = [f"{name} {problem}" for name in names if (problem := _problem(path / name, manifest.files[name]))]
    if problems:
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}")
    return manifest


def _problem(path: Path, expected: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"has {size} bytes instead of {expected['bytes']}"
        return None if digest(path) == expected else "has other contents than were saved (its SHA-256 differs)"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def render_extra(extra: dict[str, Any]) -> dict[str, str]:
    """The text of each JSON file that the caller handed in, by file name.

    Raises:
        CheckpointError: for a name that is no plain word or is taken, and for a value that JSON would not give back
            (tuples may become lists).
    """
    texts = {}
    for name, value in extra.items():
        if not _EXTRA.fullmatch(name) or name in _RESERVED:
            raise CheckpointError(
                f"{name!r} cannot name a file of a checkpoint; use letters, digits and underscores, and none of "
                f"{', '.join(_RESERVED)}"
            )
        try:
            texts[f"{name}.json"] = text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name} is not JSON: {error}") from None
        if json.loads(text) != _with_lists(value):
            raise CheckpointError(f"JSON would not give {name} back as it is; use str keys only")
    return texts


def _with_lists(value: Any) -> Any:
    """``value`` with lists for tuples, which is the one change that JSON may make."""
    if isinstance(value, (list, tuple)):
        return [_with_lists(item) for item in value]
    return {key: _with_lists(item) for key, item in value.items()} if isinstance(value, dict) else value


def read_extra(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The JSON files that the caller handed in, by name; each is verified."""
    for name in manifest.extra:
        if problem := _problem(path / f"{name}.json", manifest.files[f"{name}.json"]):
            raise CheckpointError(f"{path} is damaged: {name}.json {problem}")
    return {name: json.loads((path / f"{name}.json").read_bytes()) for name in manifest.extra}


def replace(path: Path, text: str) -> None:
    """Replace a file as a whole: a reader sees the old text or the new one, after a crash as well."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(text.encode())
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the disk has a file's contents, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(partial: Path, target: Path, owner: str) -> None:
    """Give a complete checkpoint its name by one rename; an older one of the same name makes room."""
    replaced = aside(target.parent, target.name, "replaced", owner)
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    try:
        partial.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove(path: Path, owner: str) -> None:
    """Delete a checkpoint; it is renamed aside first, so that half of one never bears a checkpoint's name."""
    away = aside(path.parent, path.name, "old", owner)
    shutil.rmtree(away, ignore_errors=True)
    path.rename(away)
    shutil.rmtree(away)
