"""Cutting and joining collated data: nested tuples, lists and dicts whose tensors have samples along dimension 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = (str, bytes, int, float, type(None))


def length(data: Any) -> int:
    """Samples in collated ``data``.

    Raises:
        TypeError: when a part is not a tensor, a container of tensors, or a list of one plain value per sample.
        ValueError: when its parts hold different numbers of samples.
    """
    sizes = {_leaf_length(leaf) for leaf in _leaves(data)}
    if len(sizes) != 1:
        raise ValueError(f"the parts of a batch must hold the same number of samples, got {sorted(sizes)}")
    return sizes.pop()


def cut(data: Any, start: int, stop: int) -> Any:
    """The samples [start, stop) of collated ``data``; tensors are views."""
    return _zip_leaves(lambda leaves: leaves[0][start:stop], [data])


def join(parts: Sequence[Any]) -> Any:
    """Collated pieces, one after another along dimension 0. A single piece is returned as it is."""
    return parts[0] if len(parts) == 1 else _zip_leaves(_concatenate, parts)


def _concatenate(leaves: Sequence[Any]) -> Any:
    if not isinstance(leaves[0], Tensor):
        return type(leaves[0])(value for leaf in leaves for value in leaf)
    shapes = {tuple(leaf.shape[1:]) for leaf in leaves}
    if len(shapes) > 1:
        raise ValueError(
            f"a micro-batch spans two chunks whose samples differ in shape, {sorted(shapes)}: let collate give every "
            f"chunk the same shape (pad to a fixed length), or keep batches to whole micro-batches per rank"
        )
    return torch.cat(list(leaves))


def _zip_leaves(function: Callable[[Sequence[Any]], Any], parts: Sequence[Any]) -> Any:
    """Apply ``function`` to the corresponding leaves of equally built structures."""
    first = parts[0]
    if _is_leaf(first):
        return function(parts)
    if isinstance(first, Mapping):
        return {key: _zip_leaves(function, [part[key] for part in parts]) for key in first}
    columns = [_zip_leaves(function, column) for column in zip(*parts, strict=True)]
    return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)


def _leaves(data: Any) -> Iterator[Any]:
    if _is_leaf(data):
        yield data
    else:
        for part in data.values() if isinstance(data, Mapping) else data:
            yield from _leaves(part)


def _is_leaf(data: Any) -> bool:
    if isinstance(data, Tensor):
        return True
    if isinstance(data, (list, tuple)):
        return all(isinstance(value, _PLAIN) for value in data)
    if isinstance(data, Mapping):
        return False
    raise TypeError(
        f"a batch must be a tensor or a tuple, list or dict of tensors with samples along dimension 0, "
        f"but holds a {type(data).__name__}; convert it in collate"
    )


def _leaf_length(leaf: Any) -> int:
    if isinstance(leaf, Tensor) and leaf.dim() == 0:
        raise ValueError(f"a tensor in a batch has no sample dimension: {leaf!r}; let collate stack one per sample")
    return len(leaf)
