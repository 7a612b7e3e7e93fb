"""Tensors that are slow to make, kept outside the repository."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # not a POSIX system: two processes may then make the same tensors
    fcntl = None  # type: ignore[assignment]


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/adabatch``, or ``~/.cache/adabatch``; made when missing."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adabatch"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cached(name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors that ``make`` returns, made once and kept in ``cache_folder()``.

    Args:
        name: of the file; it must change with everything that the tensors depend on, by a hash for example.
        make: called when the file is missing. Other processes of this machine wait for it.
    """
    path = cache_folder() / f"{name}.pt"
    if not path.exists():
        with _lock(path.with_suffix(".lock")):
            if not path.exists():
                _write(path, make())
    return torch.load(path, map_location="cpu", weights_only=True)


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write aside and rename, so that a file by its name is whole."""
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        torch.save(tensors, aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
