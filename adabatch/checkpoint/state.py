"""Model and optimizers to and from a torch distributed checkpoint.

Tensors go into the distributed checkpoint under flat names, ``model.<parameter>`` and
``optimizer.<parameter>.<entry>``. All else of the optimizers (parameter groups, step counters) is plain JSON, in
``optimizer.json``: a distributed load returns only what it is asked for, so that a key which the new optimizer does not
have yet would be lost without a word.
"""

from __future__ import annotations

import io
import json
import logging
import math
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from adabatch.checkpoint import tensors as tensors_on_disk
from adabatch.checkpoint.files import CheckpointError
from adabatch.optimizers import Optimizers, each

OPTIMIZER = "optimizer.json"

# How an optimizer computes, not what: these stay as this run configured them.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Captured:
    """Tensors (not copied) by flat name, and the optimizers' JSON."""

    tensors: dict[str, Any]
    optimizer: dict[str, Any]


@dataclass(slots=True)
class Incoming:
    """What is about to be loaded: targets by flat name, the optimizers' JSON, their parameters by name and groups."""

    tensors: dict[str, Any]
    saved: dict[str, Any]
    groups: list[list[str]]


def capture(model: torch.nn.Module, optimizer: Optimizers) -> Captured:
    """Take the state of model and optimizers without copying a tensor.

    Raises:
        CheckpointError: for wrappers and values that a checkpoint cannot hold.
    """
    tensors = _model_state(model)
    for name, value in tensors.items():
        _require_safe(name, value)
    layout = _optimizer_state(model, optimizer)
    encoded = {
        "class": _classes(optimizer),
        "groups": [_encode(group, f"optimizer.group{i}", tensors) for i, group in enumerate(layout["param_groups"])],
        "state": {
            name: _encode(entries, f"optimizer.{name}", tensors) for name, entries in layout["state"].items() if entries
        },
    }
    return Captured(tensors, encoded)


def prepare(folder: Path, model: torch.nn.Module, optimizer: Optimizers) -> Incoming:
    """Compare the checkpoint in ``folder`` with this model and its optimizers, and make what it is to be loaded into.

    Raises:
        CheckpointError: naming parameters that are missing, unexpected or of another shape or type, another class of
            optimizer, and parameter groups that differ.
    """
    described = tensors_on_disk.describe(folder)
    tensors = _targets(described, model)
    saved = json.loads((folder / OPTIMIZER).read_bytes())
    layout = _optimizer_state(model, optimizer)
    groups = [group["params"] for group in layout["param_groups"]]
    _require_same_optimizer(_classes(optimizer), groups, saved)
    for name, param in _by_name(optimizer, groups).items():
        for key in _keys_in(saved["state"].get(name)):
            tensors[key] = _blank(key, described[key], param)
    for key in _keys_in(saved["groups"]):
        tensors[key] = torch.empty(described[key].size, dtype=described[key].properties.dtype)
    return Incoming(tensors, saved, groups)


def load(folder: Path, incoming: Incoming, model: torch.nn.Module, optimizer: Optimizers) -> None:
    """Read the tensors and put them in place; every rank calls this."""
    _read_into_model(folder, incoming.tensors, model)
    saved, groups = _decode(incoming.saved, incoming.tensors), iter(incoming.groups)
    for one in each(optimizer):
        _put_optimizer(one, [next(groups) for _ in one.param_groups], saved)


def load_model(folder: Path, model: torch.nn.Module) -> None:
    """Put the parameters and buffers of the checkpoint in ``folder`` in place, and leave the rest of it; every rank
    calls this.

    Raises:
        CheckpointError: naming parameters that are missing, unexpected or of another shape or type.
    """
    _read_into_model(folder, _targets(tensors_on_disk.describe(folder), model), model)


def _targets(described: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """What the model's tensors are read into, by flat name."""
    tensors = _model_state(model)
    _require_same_model(tensors, {key: value for key, value in described.items() if key.startswith("model.")})
    return tensors


def _read_into_model(folder: Path, targets: dict[str, Any], model: torch.nn.Module) -> None:
    tensors_on_disk.read(folder, targets)
    state = {key.removeprefix("model."): value for key, value in targets.items() if key.startswith("model.")}
    set_model_state_dict(model, state)


def _put_optimizer(optimizer: torch.optim.Optimizer, named: list[list[str]], saved: dict[str, Any]) -> None:
    """Its part of what was saved; ``named`` are its parameters by name and group."""
    names = [name for group in named for name in group]
    index = {name: i for i, name in enumerate(names)}
    state = {index[name]: entries for name, entries in saved["state"].items() if name in index}
    by_params = {frozenset(group["params"]): group for group in saved["groups"]}
    live = [dict(group) for group in optimizer.param_groups]
    groups = []
    for group, params in zip(live, named, strict=True):
        kept = {key: group[key] for key in _IMPLEMENTATION if key in group}
        numbers = [index[name] for name in params]
        groups.append({**group, **by_params[frozenset(params)], **kept, "params": numbers})
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    _keep_tensor_objects(optimizer.param_groups, live)
    _keep_precision(optimizer, state)
    _report_stateless(names, index, state)


@torch.no_grad()
def _keep_tensor_objects(groups: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """A setting that is a tensor stays the same object, since compiled code holds on to it; a number stays a number."""
    filled: dict[int, torch.Tensor] = {}
    for group, live in zip(groups, before, strict=True):
        for key, value in live.items():
            if isinstance(value, torch.Tensor):
                loaded = torch.as_tensor(group[key], dtype=value.dtype, device=value.device)
                # A tensor given to the optimizer's constructor is shared by all groups, until their values differ.
                shared = filled.setdefault(id(value), loaded)
                group[key] = value.copy_(loaded) if torch.equal(shared, loaded) else loaded.clone()
            elif isinstance(group[key], torch.Tensor) and isinstance(value, (int, float)):
                group[key] = group[key].item()


def _keep_precision(optimizer: torch.optim.Optimizer, state: dict[int, Any]) -> None:
    """torch casts floating-point state to its parameter's type; state that was saved in another type goes back."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, entries in state.items():
        for name, value in entries.items():
            put = optimizer.state[params[index]][name]
            if isinstance(value, torch.Tensor) and name != "step" and put.dtype != value.dtype:
                optimizer.state[params[index]][name] = value.to(put.device)


def _report_stateless(names: list[str], index: dict[str, int], state: dict[int, Any]) -> None:
    without = [name for name in names if not state.get(index[name])]
    if without and len(without) < len(names):
        _log.info("no optimizer state was saved for %s: it starts when they first get a gradient", ", ".join(without))


def _model_state(model: torch.nn.Module) -> dict[str, Any]:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise CheckpointError(
            "FullyShardedDataParallel (FSDP1) cannot be checkpointed here; use a plain module, "
            "DistributedDataParallel or fully_shard (FSDP2)"
        )
    return {f"model.{name}": value for name, value in get_model_state_dict(model).items()}


def _optimizer_state(model: torch.nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    """The optimizers' state dicts as one, with parameter names in place of numbers."""
    held = [param for one in each(optimizer) for group in one.param_groups for param in group["params"]]
    known = set(model.parameters())
    if foreign := [tuple(param.shape) for param in held if param not in known]:
        raise CheckpointError(f"the optimizer holds parameters that are not the model's, of shapes {foreign}")
    if len(set(held)) < len(held):
        raise CheckpointError(f"{len(held) - len(set(held))} parameters are held by more than one optimizer")
    with ExitStack() as stack:
        for one in each(optimizer):
            stack.enter_context(_left_unstepped(one))
        return get_optimizer_state_dict(model, each(optimizer))


def _classes(optimizer: Optimizers) -> str:
    return " + ".join(type(one).__qualname__ for one in each(optimizer))


@contextmanager
def _left_unstepped(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep torch from filling the state of an optimizer that has none.

    It would do that by a step with zero gradients: hooks fire, Adam's counters go to 1, and parameters that never get
    a gradient get state. An empty entry makes it see that there is state already.
    """
    if optimizer.state:
        yield
        return
    param = optimizer.param_groups[0]["params"][0]
    optimizer.state[param] = {}
    try:
        yield
    finally:
        del optimizer.state[param]


def _by_name(optimizer: Optimizers, groups: list[list[str]]) -> dict[str, torch.Tensor]:
    pairs = zip((group for one in each(optimizer) for group in one.param_groups), groups, strict=True)
    return {name: param for group, names in pairs for name, param in zip(names, group["params"], strict=True)}


def _blank(key: str, described: Any, param: torch.Tensor) -> torch.Tensor:
    """An empty tensor for one entry of a parameter's optimizer state, laid out and sharded like the parameter."""
    if described.size == param.shape:
        return torch.empty_like(param, dtype=described.properties.dtype, requires_grad=False)
    if isinstance(param, DTensor):
        raise CheckpointError(
            f"{key} has shape {tuple(described.size)}, its sharded parameter {tuple(param.shape)}; only optimizer "
            f"state of the parameter's own shape can be loaded into sharded parameters"
        )
    return torch.empty(described.size, dtype=described.properties.dtype, device=param.device)


def _require_same_model(live: dict[str, Any], saved: dict[str, Any]) -> None:
    problems = []
    for label, names in (
        ("not in the checkpoint", live.keys() - saved.keys()),
        ("not in the model", saved.keys() - live.keys()),
    ):
        if names:
            problems.append(f"{label}: {', '.join(sorted(name.removeprefix('model.') for name in names))}")
    for name in sorted(live.keys() & saved.keys()):
        here, there = _shape_and_type(live[name]), _shape_and_type(saved[name])
        if here != there:
            problems.append(f"{name.removeprefix('model.')} is {here} in the model and {there} in the checkpoint")
    if problems:
        raise CheckpointError(f"the model is not the one that was saved; {'; '.join(problems)}")


def _shape_and_type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, TensorStorageMetadata):
        return f"{tuple(value.size)} {str(value.properties.dtype).removeprefix('torch.')}"
    return "no tensor"


def _require_same_optimizer(name: str, groups: list[list[str]], saved: dict[str, Any]) -> None:
    if saved["class"] != name:
        raise CheckpointError(f"the checkpoint has the state of {saved['class']}, and this run's optimizer is {name}")
    here = {param: i for i, group in enumerate(groups) for param in group}
    there = {param: i for i, group in enumerate(saved["groups"]) for param in group["params"]}
    problems = [
        f"{label}: {', '.join(sorted(names))}"
        for label, names in (
            ("without saved settings", here.keys() - there.keys()),
            ("no longer optimized", there.keys() - here.keys()),
        )
        if names
    ]
    if not problems and {frozenset(g) for g in groups} != {frozenset(g["params"]) for g in saved["groups"]}:
        problems.append(f"{len(saved['groups'])} groups were saved that are cut differently from these {len(groups)}")
    if problems:
        raise CheckpointError(
            f"the optimizer's parameter groups are not those that were saved; {'; '.join(problems)}; "
            f"build the optimizer over the same groups of parameters"
        )


def _encode(value: Any, key: str, tensors: dict[str, Any]) -> Any:
    """``value`` as JSON; tensors with a dimension move to ``tensors[key]`` and leave a reference."""
    if isinstance(value, torch.Tensor):
        if value.dim() or isinstance(value, DTensor):
            tensors[key] = value.detach()
            return {"$tensor": key}
        return {"$scalar": _encode(value.item(), key, tensors), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{key}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict) and all(isinstance(name, str) and not name.startswith("$") for name in value):
        return {name: _encode(item, f"{key}.{name}", tensors) for name, item in value.items()}
    raise CheckpointError(
        f"{key} is of type {type(value).__qualname__}; an optimizer's tensors, numbers, strings, None, and lists, "
        f"tuples and str-keyed dicts of them can be saved"
    )


def _decode(value: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$scalar" in value:
        return torch.tensor(_decode(value["$scalar"], tensors), dtype=getattr(torch, value["dtype"]))
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(_decode(item, tensors) for item in value["$tuple"])
    return {name: _decode(item, tensors) for name, item in value.items()}


def _keys_in(value: Any) -> Iterator[str]:
    """The names of all tensors that encoded JSON refers to."""
    if isinstance(value, dict):
        if "$tensor" in value:
            yield value["$tensor"]
        else:
            for item in value.values():
                yield from _keys_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _keys_in(item)


def _require_safe(name: str, value: Any) -> None:
    """Refuse extra state of a module that could not be loaded without running code from the file."""
    if isinstance(value, torch.Tensor):
        return
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{name} holds a {type(value).__qualname__} that cannot be loaded safely; let the module's "
            f"get_extra_state return tensors, numbers, strings and lists or dicts of them"
        ) from None
