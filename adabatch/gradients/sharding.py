"""FSDP2 and HSDP: which parameters are reduced together, over which ranks, and what of it cannot be measured.

A rank holds a shard of every parameter and, after backward, the same shard of the mean gradient. Its own whole gradient
exists only before the reduce-scatter, one flat buffer per *unit*: the parameters that one ``fully_shard`` call reduces
together. torch has no public way to ask for units, meshes and what a reduction divides by, so this reads what
``torch.distributed.fsdp`` keeps beneath its modules (torch 2.9 to 2.13), and refuses what it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adabatch import distributed

# torch 2.9 was the first release whose reduce-scatter can be replaced (pytorch pull request 155189).
OLDEST_TORCH = "2.9"

# FSDP2 divides gradients of these types after or within the reduction, those of other types also before it.
UNDIVIDED = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Placed:
    """A trainable parameter in its unit's buffer, which has one row for each shard.

    Attributes:
        index: its number among the layout's parameters.
        shape: of the whole parameter.
        dimension: the one that is cut into shards; only dimension 0 is padded.
        columns: elements in each row, padding included.
    """

    index: int
    shape: torch.Size
    dimension: int
    columns: int

    def gradient(self, rows: Tensor) -> Tensor:
        """The whole gradient from this parameter's columns of the buffer, (shards, columns)."""
        if self.dimension == 0:
            return rows.reshape(-1)[: self.shape.numel()].view(self.shape)
        size = list(self.shape)
        size[self.dimension] //= len(rows)
        return torch.cat([row.view(size) for row in rows], dim=self.dimension)


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters whose gradients travel together.

    Attributes:
        name: the module's, for messages.
        module: the FSDP2 module.
        inner: torch's own record of it.
        parameters: those that are trained, in the order of the buffer.
    """

    name: str
    module: Any
    inner: Any
    parameters: tuple[Placed, ...]

    @property
    def columns(self) -> int:
        """Elements of one row of the buffer when every parameter has a gradient."""
        return sum(placed.columns for placed in self.parameters)

    def divided_before(self, dtype: torch.dtype, ranks: int) -> float:
        """What a buffer of this type is divided by before its reduce-scatter: a power of 2, to stay in range."""
        if dtype in UNDIVIDED:
            return 1.0
        whole, before = self.inner.gradient_divide_factor or ranks, 1.0
        while whole % before == 0 and whole / before > before:
            before *= 2.0
        return before

    @property
    def unreduced(self) -> bool:
        """Whether a gradient waits on this rank for its reduction."""
        wholes = (getattr(each, "_unsharded_param", None) for each in self.inner.fsdp_params)
        waiting = any(getattr(each, "unsharded_accumulated_grad", None) is not None for each in self.inner.fsdp_params)
        return waiting or any(whole is not None and whole.grad is not None for whole in wholes)


@dataclass(frozen=True, slots=True)
class Shards:
    """How a model is sharded.

    Attributes:
        roots: the outermost FSDP2 modules, which steer those inside them.
        units: all units with something to train.
        ranks: ranks whose gradients are averaged.
        replicas: on how many ranks each shard lives: 1 under FSDP2.
    """

    roots: tuple[Any, ...]
    units: tuple[Unit, ...]
    ranks: int
    replicas: int

    @property
    def divisor(self) -> float:
        """What gradients are divided by, relative to the sum over the ranks: their number, or what the user has set.

        Raises:
            ValueError: when units have different ones.
        """
        factors = {unit.name: unit.inner.gradient_divide_factor or self.ranks for unit in self.units}
        if len(set(factors.values())) > 1:
            raise ValueError(
                f"FSDP2 modules divide their gradients by different factors ({factors}), so that the whole has no "
                f"length; call set_gradient_divide_factor() with one number on all of them, or on none"
            )
        return next(iter(factors.values()))

    def unsharded(self) -> set[int]:
        """Ids of the whole parameters that FSDP2 puts into the modules from forward to backward."""
        kept = (getattr(each, "_unsharded_param", None) for unit in self.units for each in unit.inner.fsdp_params)
        return {id(parameter) for parameter in kept if parameter is not None}


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, maybe without elements; any other tensor as it is. Call it under ``no_grad``."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, found out without loading the module that has it."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


def sharded_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Names and modules that ``fully_shard`` was called on."""
    return [(name or type(module).__name__, module) for name, module in model.named_modules() if _is_fsdp(module)]


def reshard(modules: Iterable[tuple[str, Any]]) -> None:
    """Let the modules hold their shards: after a forward pass without backward a root keeps its whole parameters."""
    for _, module in modules:
        module.reshard()


def survey_shards(modules: Sequence[tuple[str, Any]], trainable: Sequence[tuple[str, nn.Parameter]]) -> Shards:
    """How the model is sharded; ``modules`` as from ``sharded_modules``, ``trainable`` all that needs a gradient.

    Raises:
        ValueError: for what cannot be measured, naming the module or parameter, and what to do.
    """
    places = {id(parameter): index for index, (_, parameter) in enumerate(trainable)}
    inners = _inners(modules)
    _require_sharded(trainable, {id(each.sharded_param) for _, _, inner in inners for each in inner.fsdp_params})
    _require_placements(trainable)
    units = [unit for unit in (_unit(*inner, places) for inner in inners) if unit.parameters]
    for unit in units:
        _require_on_device(unit)
    ranks, replicas = _ranks(units)
    shards = Shards(_outermost(modules), tuple(units), ranks, replicas)
    if ranks == 1 and any(unit.inner.gradient_divide_factor for unit in units):
        raise ValueError("set_gradient_divide_factor() on a single rank is not supported; leave it away there")
    return shards


def _is_fsdp(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _inners(modules: Sequence[tuple[str, Any]]) -> list[tuple[str, Any, Any]]:
    """Name, module and torch's record of each unit; modules that were given to one ``fully_shard`` call share one."""
    found: dict[int, tuple[str, Any, Any]] = {}
    for name, module in modules:
        if not hasattr(module, "set_custom_reduce_scatter"):
            raise ValueError(
                f"measuring under FSDP2 needs torch {OLDEST_TORCH} or newer, and this is {torch.__version__}: "
                f"{name!r} ({type(module).__name__}) has no set_custom_reduce_scatter()"
            )
        inners = _records(name, module)
        if len(inners) > 1:
            raise ValueError(
                f"the parameters of module {name!r} are reduced in {len(inners)} groups, over different meshes, which "
                f"is not supported: let shard_placement_fn return a placement only, so that all parameters share the "
                f"module's mesh"
            )
        for inner in inners:
            found.setdefault(id(inner), (name, module, inner))
    return list(found.values())


def _records(name: str, module: Any) -> list[Any]:
    try:
        state = module._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)
        records = list(several) if several is not None else [state._fsdp_param_group]
        records = [record for record in records if record is not None]
        for record in records:
            _ = record.fsdp_params, record.gradient_divide_factor, record._reduce_scatter_comm, record._all_reduce_hook
    except AttributeError as error:
        raise ValueError(
            f"module {name!r}: this torch ({torch.__version__}) keeps FSDP2's records in another way than torch "
            f"{OLDEST_TORCH} to 2.13 ({error}); use one of those, or measure under DistributedDataParallel"
        ) from error
    return records


def _unit(name: str, module: Any, inner: Any, places: dict[int, int]) -> Unit:
    return Unit(
        name,
        module,
        inner,
        tuple(
            _placed(places[id(each.sharded_param)], each.sharded_param)
            for each in inner.fsdp_params
            if id(each.sharded_param) in places
        ),
    )


def _placed(index: int, parameter: Any) -> Placed:
    dimension = parameter.placements[-1].dim
    shards = parameter.device_mesh.size(parameter.device_mesh.ndim - 1)
    row = list(parameter.shape)
    row[dimension] = math.ceil(row[dimension] / shards)
    return Placed(index, parameter.shape, dimension, math.prod(row))


def _require_sharded(trainable: Sequence[tuple[str, nn.Parameter]], managed: set[int]) -> None:
    for name, parameter in trainable:
        if id(parameter) not in managed:
            kind = "a DTensor that fully_shard() does not manage" if is_sharded(parameter) else "not sharded"
            raise ValueError(
                f"parameter {name!r} is trained and {kind}, beside parameters that are sharded by FSDP2, so nobody "
                f"synchronises its gradient; call fully_shard() on the module that holds all parameters (last, and "
                f"without ignored_params), or freeze it"
            )


def _require_on_device(unit: Unit) -> None:
    if type(getattr(unit.inner, "offload_policy", None)).__name__ == "CPUOffloadPolicy":
        raise ValueError(
            f"module {unit.name!r} keeps its parameters on the CPU and reduces gradients on the device "
            f"(CPUOffloadPolicy), which is not supported; leave offload_policy away"
        )


def _ranks(units: Sequence[Unit]) -> tuple[int, int]:
    """Ranks and replicas of the mesh, which all units must share, and which must span the process group."""
    meshes = {unit.name: unit.inner.mesh_info.mesh for unit in units}
    first_name, first = next(iter(meshes.items()))
    for name, mesh in meshes.items():
        if mesh.mesh.tolist() != first.mesh.tolist():
            raise ValueError(
                f"modules {first_name!r} and {name!r} are sharded over different meshes ({_shown(first)} and "
                f"{_shown(mesh)}), which is not supported; call fully_shard() with one mesh for all"
            )
    world = distributed.size()
    if first.ndim > 2 or first.size() != world:
        raise ValueError(
            f"module {first_name!r} is sharded over {_shown(first)}, and the process group has {world} ranks. "
            f"Supported: a 1-D mesh (shard) or a 2-D mesh (replicate, shard) of all ranks, without tensor or pipeline "
            f"parallelism beside it"
        )
    shards = first.size(first.ndim - 1)
    if shards == 1 and world > 1:
        raise ValueError(
            f"module {first_name!r} is sharded over 1 rank and replicated over {world} ({_shown(first)}), and then "
            f"FSDP2 has no reduce-scatter to look into; use DistributedDataParallel, which does the same, or shard "
            f"over 2 ranks or more"
        )
    return world, world // shards


def _shown(mesh: Any) -> str:
    return f"a mesh {tuple(mesh.mesh.shape)} of ranks {mesh.mesh.flatten().tolist()}"


def _require_placements(trainable: Sequence[tuple[str, Any]]) -> None:
    for name, parameter in trainable:
        kinds = [type(placement).__name__ for placement in parameter.placements]
        if kinds not in (["Shard"], ["Replicate", "Shard"]):
            raise ValueError(
                f"parameter {name!r} has the placements {tuple(parameter.placements)} on a mesh "
                f"{tuple(parameter.device_mesh.shape)}: tensor and expert parallelism are not supported. Supported: "
                f"(Shard,) under FSDP2 and (Replicate, Shard) under HSDP"
            )


def _outermost(modules: Sequence[tuple[str, Any]]) -> tuple[Any, ...]:
    inside = {id(other) for _, module in modules for other in module.modules() if other is not module}
    return tuple(module for _, module in modules if id(module) not in inside)
