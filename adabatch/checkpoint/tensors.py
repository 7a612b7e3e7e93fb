"""Tensors to and from disk by torch.distributed.checkpoint, on all ranks together.

torch's own reader unpickles its index and every value that is no tensor without restraint. The classes here keep to the
format and unpickle only what belongs there.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from adabatch.checkpoint.files import CheckpointError


def write(folder: Path, tensors: dict[str, Any]) -> None:
    """Write values by flat name into ``folder``, not yet synced; it fails on every rank or on none."""
    # Replicated tensors are taken from rank 0. Balancing them over the ranks would pick some buffers (running
    # statistics) from a rank whose copy the next forward throws away.
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    writer = _Writer(folder, sync_files=False)
    with _without_single_process_warning():
        dcp.save(tensors, storage_writer=writer, planner=planner, no_dist=not dist.is_initialized())


def describe(folder: Path) -> dict[str, Any]:
    """What is stored under each flat name: for a tensor, ``size`` and ``properties.dtype``."""
    return _Reader(folder).read_metadata().state_dict_metadata


def read(folder: Path, tensors: dict[str, Any]) -> None:
    """Fill ``tensors`` in place from ``folder``; values that are no tensors are replaced."""
    planner = _Planner(flatten_state_dict=False)
    with _without_single_process_warning():
        dcp.load(tensors, storage_reader=_Reader(folder), planner=planner, no_dist=not dist.is_initialized())


@contextmanager
def _without_single_process_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Writer(dcp.FileSystemWriter):
    """torch's writer; without the record of where on this machine it wrote, and with the true reason of a failure."""

    def storage_meta(self) -> None:
        return None

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # A full disk shows as "unexpected pos", since torch's archive writer stumbles over its own clean-up.
            reason = error.__context__
            while reason and not isinstance(reason, OSError):
                reason = reason.__context__
            raise reason or error from None


class _Planner(dcp.DefaultLoadPlanner):
    """torch's load planner; values that are no tensors are unpickled by the safe loader."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _Reader(dcp.FileSystemReader):
    """torch's reader; the index is unpickled by a loader that knows the few classes which belong there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with Path(self.path, ".metadata").open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        metadata.storage_meta = StorageMeta()
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    _known = {
        "torch": {"Size"},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.distributed.checkpoint.metadata": {
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in self._known.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f"the index of the tensors names {module}.{name}, which has no place there")
