"""The checkpoints of one run: save, find, verify and restore, on one process or all ranks together."""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from adabatch import distributed
from adabatch.checkpoint import files, state, tensors
from adabatch.checkpoint import rng as random_states
from adabatch.checkpoint.files import CheckpointError, Manifest
from adabatch.optimizers import Optimizers

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A checkpoint that verifies, or None; and one sentence for each newer one that was passed over."""

    path: Path | None
    passed_over: list[str]


class Checkpoints:
    """The checkpoints in one folder, which all ranks share.

    ``save``, ``load``, ``load_model`` and ``newest_good`` are collective: every rank calls them, and they succeed or raise on all
    ranks alike. The other methods act on their own. Constructing one touches nothing.

    Args:
        folder: where the checkpoints are; made at the first save.
        keep_last: how many to keep; older ones are deleted after a save, never the one that ``latest`` names.
        run: the run's id. What an earlier process with the same id left half written is then cleaned up even where
            that process ran on another host; without an id, only what dead processes of this host left.

    Raises:
        ValueError: when ``keep_last`` is below 1, or ``run`` cannot be part of a file name.
    """

    def __init__(self, folder: str | Path, *, keep_last: int = 3, run: str | None = None) -> None:
        if not isinstance(keep_last, int) or isinstance(keep_last, bool) or keep_last < 1:
            raise ValueError(f"checkpoints.keep_last must be a whole number of at least 1, got {keep_last!r}")
        if run is not None and not re.fullmatch(r"[\w.-]+", run):
            raise ValueError(f"a run's id may hold letters, digits, '_', '.' and '-', got {run!r}")
        self.folder = Path(folder).absolute()
        self.keep_last = keep_last
        self._owner = files.owner_name(run)
        self._cleaned = False

    def save(
        self,
        *,
        step: int,
        samples: int,
        model: torch.nn.Module,
        optimizer: Optimizers,
        extra: dict[str, Any],
        rng: bool = True,
    ) -> Path:
        """Save everything at a step boundary; returns the new checkpoint's path, the same on all ranks.

        Args:
            step: optimizer steps done; the checkpoint's name.
            samples: samples consumed.
            model: plain, compiled, DistributedDataParallel or fully_shard.
            optimizer: over parameters of ``model``; one or several.
            extra: what else to keep, as JSON; each key becomes a file ``<key>.json``, and tuples become lists. Rank
                0's is saved.
            rng: whether to save every rank's random-number states.

        Raises:
            CheckpointError: on all ranks, when any rank failed; nothing half written stays, earlier checkpoints and
                ``latest`` are as they were.
        """
        shared = _exchange({"owner": self._owner, "step": step, "samples": samples})
        if any((one["step"], one["samples"]) != (step, samples) for one in shared):
            raise CheckpointError(f"the ranks are not at the same step: {[(s['step'], s['samples']) for s in shared]}")
        partial = files.aside(self.folder, files.name_of(step), "partial", shared[0]["owner"])
        try:
            captured = _together(lambda: self._begin(partial, model, optimizer, extra))
            mine = _together(lambda: _write(partial, captured, rng))
            digests = {name: value for one in _exchange(mine) for name, value in one.items()}
            return _together(lambda: self._publish(partial, step, samples, tuple(extra), digests))
        except CheckpointError as error:
            free = shutil.disk_usage(self._existing()).free
            raise CheckpointError(
                f"the checkpoint of step {step} was not saved; earlier ones are as they were: {error} "
                f"({free:,} bytes were free in {self.folder})"
            ) from error
        finally:
            if distributed.rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)

    def load(
        self, path: str | Path, *, model: torch.nn.Module, optimizer: Optimizers, rng: bool = True
    ) -> dict[str, Any]:
        """Verify the checkpoint at ``path``, restore it in place, and return its ``extra``.

        The optimizers may be freshly made. Their parameter groups get the saved settings (learning rate and all, also
        keys that they did not have), except how they compute (``fused``, ``foreach``, ``capturable``,
        ``differentiable``). Parameters without saved state start without. Random-number states are restored when the
        number of ranks is the saved one; otherwise each rank is seeded from (saved seed, rank, samples), and a
        warning is logged.

        Raises:
            CheckpointError: on all ranks; when a file is damaged (named), or the model or optimizer differ (with the
                names), before anything is changed. A failure after that leaves both unusable.
        """
        path = Path(path).absolute()
        try:
            manifest = _together(lambda: files.verify(path, part=distributed.rank(), parts=distributed.size()))
            incoming = _together(lambda: state.prepare(path, model, optimizer))
            _together(lambda: state.load(path, incoming, model, optimizer))
            extra = _together(lambda: files.read_extra(path, manifest))
            if rng:
                _together(lambda: _restore_rng(path, manifest))
        except CheckpointError as error:
            raise CheckpointError(f"{path.name} was not loaded: {error}") from error
        return extra

    def load_model(self, path: str | Path, *, model: torch.nn.Module) -> dict[str, Any]:
        """Verify the checkpoint at ``path``, restore the model alone in place, and return its ``extra``. Collective.

        Raises:
            CheckpointError: on all ranks, as by ``load``.
        """
        path = Path(path).absolute()
        try:
            manifest = _together(lambda: files.verify(path, part=distributed.rank(), parts=distributed.size()))
            _together(lambda: state.load_model(path, model))
            return _together(lambda: files.read_extra(path, manifest))
        except CheckpointError as error:
            raise CheckpointError(f"{path.name} was not loaded: {error}") from error

    def latest(self) -> Path | None:
        """The checkpoint that ``latest`` names; where there is no such, the newest complete one; else None."""
        try:
            named = self.folder / (self.folder / files.LATEST).read_text().strip()
        except FileNotFoundError:
            named = None
        if named in files.checkpoints(self.folder):
            return named
        newest = next(iter(self.paths()), None)
        if named is not None:
            _log.warning("%s names %s, which is not there; using %s", files.LATEST, named.name, newest and newest.name)
        return newest

    def paths(self) -> list[Path]:
        """All checkpoints with a readable manifest, the newest save first; their files are not checked."""
        return [path for _, path in self._readable()[0]]

    def at_steps(self) -> dict[int, Path]:
        """The same by the step that each was saved at, lowest first."""
        return {manifest.step: path for manifest, path in sorted(self._readable()[0], key=lambda pair: pair[0].step)}

    def verify(self, path: str | Path) -> Manifest:
        """Check every file of the checkpoint at ``path`` against its manifest, and return the manifest.

        Raises:
            CheckpointError: naming every file that is missing, cut short or changed.
        """
        return files.verify(Path(path).absolute())

    def read_extra(self, path: str | Path) -> dict[str, Any]:
        """The verified ``extra`` of the checkpoint at ``path`` alone, before there is a model."""
        path = Path(path).absolute()
        return files.read_extra(path, Manifest.read(path))

    def newest_good(self) -> Choice:
        """The newest checkpoint whose files all verify, and why each newer one was passed over.

        A checkpoint of a step that the run passed again later is of an abandoned history, and is passed over too.
        """
        path, passed_over = distributed.agree(self._choose() if distributed.rank() == 0 else None)
        return Choice(path and Path(path), passed_over)

    def clean(self) -> list[str]:
        """Remove what dead writers of this run left half written or half deleted; returns the names.

        Call it on one rank, at the start of a run; the first save does it too.
        """
        self._cleaned = True
        removed = []
        for path, name, kind in files.leftovers(self.folder, self._owner):
            if kind == "replaced" and not (self.folder / name).exists():
                # It died between moving a checkpoint away and putting another of the same step in its place.
                path.rename(self.folder / name)
            else:
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path.name)
        return removed

    def _begin(
        self, partial: Path, model: torch.nn.Module, optimizer: Optimizers, extra: dict[str, Any]
    ) -> state.Captured:
        captured = state.capture(model, optimizer)
        if distributed.rank() == 0:
            texts = {**files.render_extra(extra), state.OPTIMIZER: json.dumps(captured.optimizer, allow_nan=False)}
            if not self._cleaned:
                self.clean()
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for name, text in texts.items():
                (partial / name).write_bytes(text.encode())
        return captured

    def _publish(
        self, partial: Path, step: int, samples: int, extra: tuple[str, ...], digests: dict[str, dict[str, Any]]
    ) -> Path:
        target = self.folder / files.name_of(step)
        if distributed.rank() != 0:
            return target
        serial = max((manifest.serial for manifest, _ in self._readable()[0]), default=-1) + 1
        manifest = Manifest(
            step=step,
            samples=samples,
            world=distributed.size(),
            serial=serial,
            torch=torch.__version__,
            time=time.time(),
            extra=extra,
            files=dict(sorted(digests.items())),
        )
        (partial / files.MANIFEST).write_bytes(manifest.render().encode())
        files.sync(partial / files.MANIFEST)
        files.sync(partial)
        files.publish(partial, target, self._owner)
        files.replace(self.folder / files.LATEST, target.name + "\n")
        self._prune(target)
        return target

    def _prune(self, latest: Path) -> None:
        for path in self.paths()[self.keep_last :]:
            if path == latest:
                continue
            try:
                files.remove(path, self._owner)
            except OSError as error:
                _log.warning("could not delete the old checkpoint %s: %s", path, error)

    def _readable(self) -> tuple[list[tuple[Manifest, Path]], list[str]]:
        """Checkpoints with a readable manifest, newest first, and one sentence for each other."""
        readable, damaged = [], []
        for path in files.checkpoints(self.folder):
            try:
                readable.append((Manifest.read(path), path))
            except CheckpointError as error:
                damaged.append(str(error))
        return sorted(readable, key=lambda pair: pair[0].serial, reverse=True), damaged

    def _choose(self) -> tuple[str | None, list[str]]:
        readable, passed_over = self._readable()
        newest_step, newest = float("inf"), ""
        for manifest, path in readable:
            if manifest.step >= newest_step:
                passed_over.append(f"{path} is of a history that {newest} replaced")
                continue
            newest_step, newest = manifest.step, path.name
            try:
                files.verify(path)
                return str(path), passed_over
            except CheckpointError as error:
                passed_over.append(str(error))
        return None, passed_over

    def _existing(self) -> Path:
        return next(path for path in (self.folder, *self.folder.parents) if path.exists())


def _write(partial: Path, captured: state.Captured, with_rng: bool) -> dict[str, dict[str, Any]]:
    """Write this rank's tensors and random-number states; returns the digests of the files that it wrote."""
    tensors.write(partial, captured.tensors)
    if with_rng:
        (partial / random_states.file_of(distributed.rank())).write_bytes(json.dumps(random_states.take()).encode())
    mine = [path for path in partial.iterdir() if _writer_of(path.name) == distributed.rank()]
    # One after another at the end: a sync after each write would have the file system commit its journal each time.
    for path in mine:
        files.sync(path)
    return {path.name: files.digest(path) for path in mine}


def _writer_of(name: str) -> int:
    """The rank that wrote a file of a checkpoint."""
    match = re.match(r"__(\d+)_|rng-(\d+)\.", name)
    return int(match[1] or match[2]) if match else 0


def _restore_rng(path: Path, manifest: Manifest) -> None:
    if random_states.file_of(0) not in manifest.files:
        _log.warning("%s holds no random-number states; they stay as they are", path.name)
    elif manifest.world == distributed.size():
        lacking = random_states.put(json.loads((path / random_states.file_of(distributed.rank())).read_bytes()))
        if lacking:
            _log.warning("random-number states of %s were not restored: not in use here or there", ", ".join(lacking))
    else:
        seed = json.loads((path / random_states.file_of(0)).read_bytes())["seed"]
        random_states.seed_all(random_states.derive(seed, distributed.rank(), manifest.samples))
        if distributed.rank() == 0:
            _log.warning(
                "%s was saved by %d ranks and is loaded by %d: random numbers (dropout) continue from new seeds, "
                "so the run is not bit for bit the one that was stopped",
                path.name,
                manifest.world,
                distributed.size(),
            )


def _together(work: Callable[[], T]) -> T:
    """Do this rank's part, and raise the same error on all ranks when one failed.

    Raises:
        CheckpointError: with every failed rank's reason.
    """
    result, cause, reason = None, None, None
    try:
        result = work()
    except CheckpointException as error:
        # Not an Exception in torch's eyes, and an interrupt may hide in it; it is raised on all ranks alike.
        for inner, _ in error.failures.values():
            if not isinstance(inner, Exception):
                raise inner from error
        # Every rank tells its own failure, and one that had none is content to hear the others'.
        cause, reason = error, None
        if distributed.rank() in error.failures:
            reason = _reason(error.failures[distributed.rank()][0])
    except Exception as error:
        cause, reason = error, _reason(error)
    reasons = _exchange(reason)
    if any(reasons):
        several = len(reasons) > 1
        failed = [f"rank {rank}: {text}" if several else text for rank, text in enumerate(reasons) if text]
        raise CheckpointError("; ".join(failed)) from cause
    return result  # type: ignore[return-value]


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _exchange(value: Any) -> list[Any]:
    """Every rank's JSON-able ``value``, by rank, on every rank."""
    if distributed.size() == 1:
        return [value]
    device = distributed.control_device()
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = torch.zeros(distributed.size(), dtype=torch.int64, device=device)
    sizes[distributed.rank()] = mine.numel()
    distributed.all_reduce_sum(sizes)
    buffers = [torch.empty(int(sizes.max()), dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(buffers, torch.nn.functional.pad(mine, (0, int(sizes.max()) - mine.numel())))
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(buffers, sizes.tolist(), strict=True)]
