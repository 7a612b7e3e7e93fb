"""What tells one data set from another, so that a resumed run reads the data that it began with."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy
import torch
from torch import Tensor

from adabatch.data.fetch import Chunks
from adabatch.data.iterables import IterableAdapter
from adabatch.data.order import SampleOrder

_SAMPLES = 8  # enough to notice another order, file or transform; a data set's own fingerprint sees every byte


def fingerprint(dataset: Any) -> dict[str, Any]:
    """A JSON-able description of ``dataset``: ``size``, ``type`` and ``content``.

    ``content`` is the data set's own ``fingerprint()`` where it has one, else a checksum of a few samples, chosen by
    a keyed order; it is None for an iterable data set, and for samples that differ each time they are read.

    Warns:
        UserWarning: when a sample differs on a second read although the generators were seeded.
    """
    if isinstance(dataset, IterableAdapter):
        return {"size": None, "type": _type_name(dataset.dataset), "content": _own_content(dataset.dataset)}
    content = _own_content(dataset)
    if content is None and len(dataset):
        content = _checksum(dataset)
    return {"size": len(dataset), "type": _type_name(dataset), "content": content}


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Compare the fingerprint of a saved run with the current data set's.

    Raises:
        ValueError: when they differ, with what changed and its likely cause.
    """
    if saved["size"] != current["size"]:
        cause = "samples were added, removed or filtered, or another split or sequence length is configured"
        _refuse("size", saved, current, cause)
    if saved["type"] != current["type"]:
        _refuse("type", saved, current, "another data set is configured, or its class was renamed")
    if None not in (saved["content"], current["content"]) and saved["content"] != current["content"]:
        cause = "files were edited or replaced, come in another order, or a transform or tokenizer changed"
        _refuse("content", saved, current, cause)


def _refuse(what: str, saved: Mapping[str, Any], current: Mapping[str, Any], cause: str) -> None:
    raise ValueError(
        f"the data set is not the one that the run was started on: its {what} was {saved[what]!r} and is now "
        f"{current[what]!r}. Likely cause: {cause}. Restore the data, or start a new run"
    )


def _type_name(dataset: Any) -> str:
    return type(dataset).__name__


def _own_content(dataset: Any) -> Any:
    if not hasattr(dataset, "fingerprint"):
        return None
    content = dataset.fingerprint()
    try:
        return json.loads(json.dumps(content))  # as it will read when it comes back from a file
    except TypeError as error:
        raise ValueError(f"{_type_name(dataset)}.fingerprint() must return JSON-able values: {error}") from None


def _checksum(dataset: Any) -> str | None:
    """A hash of a few samples, or None where reading one twice gives two results."""
    order = SampleOrder(len(dataset))
    indices = sorted({order.index(position) for position in range(min(_SAMPLES, len(dataset)))})
    chunks = Chunks(dataset, 0, list)
    digests = [[_digest(chunks[[index], [index]]) for index in indices] for _ in range(2)]
    if digests[0] != digests[1]:
        warnings.warn(
            f"samples of {_type_name(dataset)} differ each time they are read, although the global generators of "
            f"torch, random and numpy were seeded: runs on it cannot be repeated exactly. Draw from those generators, "
            f"or give the data set a method at(index, seed)",
            stacklevel=3,
        )
        return None
    return sha256("".join(digests[0]).encode()).hexdigest()


def _digest(sample: Any) -> str:
    hasher = sha256()
    for part in _parts(sample):
        hasher.update(part)
    return hasher.hexdigest()


def _parts(value: Any) -> list[bytes]:
    """The bytes of a sample: nested containers of tensors, arrays, images and plain values."""
    if isinstance(value, Mapping):
        return [b"{", *(part for key in value for part in (str(key).encode(), *_parts(value[key]))), b"}"]
    if isinstance(value, (list, tuple)):
        return [b"[", *(part for item in value for part in _parts(item)), b"]"]
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return [str((value.dtype, tuple(value.shape))).encode(), raw.numpy().tobytes()]
    if hasattr(value, "__array_interface__"):
        array = numpy.asarray(value)
        return [str((array.dtype, array.shape)).encode(), array.tobytes()]
    if isinstance(value, (str, bytes, int, float, bool, type(None))):
        return [repr(value).encode()]
    return [_type_name(value).encode()]
