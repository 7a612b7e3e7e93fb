"""What the tap refuses or notices under FSDP2 and HSDP: every message names the module or parameter and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_cases as sharding
import gradient_cases as cases
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from adabatch import gradients
from adabatch.gradients import layout as layouts
from adabatch.gradients.shards import ShardSource


def _message(act: Callable[[], Any]) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    return "went on"


# -- models that cannot be measured


def _layer(**options: Any) -> nn.Module:
    return fully_shard(nn.Linear(4, 4), **options)


def _mesh() -> Any:
    return sharding.mesh(dist.get_world_size())


def _plain_beside() -> nn.Module:
    return nn.ModuleDict({"sharded": _layer(mesh=_mesh()), "bare": nn.Linear(2, 2)})


def _ignored() -> nn.Module:
    network = cases.network()
    return fully_shard(network, mesh=_mesh(), ignored_params={network.narrow.weight})


def _tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tensor"], {"0": ColwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


def _replicated_only() -> nn.Module:
    return sharding.sharded(cases.network(), 1)


def _offloaded() -> nn.Module:
    return _layer(mesh=_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))


def _hooked() -> nn.Module:
    model = _layer(mesh=_mesh())
    model.set_all_reduce_hook(print)
    return model


def _two_wrappers() -> nn.Module:
    return nn.ModuleDict({"one": _layer(mesh=_mesh()), "other": DistributedDataParallel(nn.Linear(2, 2))})


def _two_meshes() -> nn.Module:
    """The weight over both ranks, the bias over each alone."""
    alone = FSDPMeshInfo(init_device_mesh("cpu", (2, 1), mesh_dim_names=("each", "alone"))["alone"], shard_mesh_dim=0)
    return _layer(
        mesh=_mesh(),
        shard_placement_fn=lambda parameter: ShardPlacementResult(None, alone) if parameter.dim() == 1 else None,
    )


def _replicate() -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("data",)))


def _attach(make: Callable[[], nn.Module], **options: Any) -> Any:
    return gradients.attach(make(), **options)


REFUSED = [
    (_plain_beside, ["'bare.weight' is trained and not sharded", "nobody synchronises", "freeze it"]),
    (_ignored, ["'narrow.weight' is trained and not sharded", "without ignored_params"]),
    (_tensor_parallel, ["'0.weight'", "tensor and expert parallelism are not supported", "(Replicate, Shard)"]),
    (_replicated_only, ["sharded over 1 rank and replicated over 2", "use DistributedDataParallel"]),
    (_offloaded, ["'FSDPLinear'", "CPUOffloadPolicy", "leave offload_policy away"]),
    (_hooked, ["'FSDPLinear' has an all-reduce hook of its own", "use a 2-D mesh (replicate, shard)"]),
    (_two_wrappers, ["DistributedDataParallel and FSDP2 modules ('one')", "2-D mesh"]),
    (_two_meshes, ["'FSDPLinear' are reduced in 2 groups", "shard_placement_fn"]),
    (_replicate, ["replicate() all-reduces gradients", "use DistributedDataParallel"]),
]


def _refused(numbers: list[int]) -> list[str]:
    return [_message(lambda make=REFUSED[number][0]: _attach(make)) for number in numbers]


def test_unsupported_models_are_refused() -> None:
    for said in ranks.run(_refused, 2, list(range(len(REFUSED)))):
        for message, (make, parts) in zip(said, REFUSED, strict=True):
            for part in parts:
                assert part in message, make.__name__


def _partial_meshes() -> list[str]:
    """Parts of the ranks only, and different meshes in one model."""
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    model = nn.ModuleDict({"fsdp": _layer(mesh=sharding.mesh(4)), "hsdp": _layer(mesh=sharding.mesh(2))})
    return [
        _message(lambda: gradients.attach(_layer(mesh=halves["data"]))),
        _message(lambda: gradients.attach(model)),
    ]


def test_meshes_that_are_not_one_mesh_of_all_ranks_are_refused() -> None:
    for part, several in ranks.run(_partial_meshes, 4):
        assert "is sharded over a mesh (2,) of ranks [" in part and "the process group has 4 ranks" in part
        assert "'fsdp' and 'hsdp' are sharded over different meshes" in several and "one mesh for all" in several


def _other_torch() -> list[str]:
    """As if torch were older, or kept its records under another name."""
    model = _layer(mesh=_mesh())
    setter = FSDPModule.set_custom_reduce_scatter
    del FSDPModule.set_custom_reduce_scatter
    older = _message(lambda: gradients.attach(model))
    FSDPModule.set_custom_reduce_scatter = setter
    del model._get_fsdp_state()._fsdp_param_groups[0]._all_reduce_hook
    return [older, _message(lambda: gradients.attach(model))]


def test_a_torch_that_is_not_known_is_refused() -> None:
    for older, unknown in ranks.run(_other_torch, 2):
        assert "needs torch 2.9 or newer" in older and "'FSDPLinear'" in older
        assert "keeps FSDP2's records in another way" in unknown and "_all_reduce_hook" in unknown


# -- arguments that do not fit


def _arguments() -> list[str]:
    def make() -> nn.Module:
        return sharding.sharded(cases.network(), 2)

    def wrapped() -> nn.Module:
        return DistributedDataParallel(cases.network())

    return [
        _message(lambda: _attach(make, kind="hooks")),
        _message(lambda: _attach(make, kind="ddp")),
        _message(lambda: _attach(make, comm_hook=(None, print))),
        _message(lambda: _attach(wrapped, kind="fsdp")),
        _message(lambda: _attach(wrapped, sync="each")),
        _message(lambda: _attach(make, sync="first")),
    ]


def test_arguments_that_do_not_fit_are_refused() -> None:
    for hooks, ddp, comm_hook, fsdp, each, first in ranks.run(_arguments, 2):
        assert "kind='hooks' sees nothing under FSDP2" in hooks and "use kind='fsdp'" in hooks
        assert "kind='ddp' sees nothing under FSDP2" in ddp
        assert "comm_hook is for kind='ddp'" in comm_hook
        assert "kind='fsdp' is for models that fully_shard() was called on" in fsdp
        assert "sync='each' is for FSDP2" in each
        assert "sync must be one of each, last or None, got 'first'" in first


# -- loops that cannot be measured


def _window(disturb: Callable[[nn.Module, int], Any], backwards: int = 1) -> None:
    """Three micro-batches of a passive loop; ``disturb`` comes before each."""
    model = sharding.sharded(cases.network(), 2)
    tap = gradients.attach(model)
    for number, piece in enumerate(cases.pieces([2, 2, 2], tokens=False)):
        disturb(model, number)
        for _ in range(backwards):
            cases.mean_loss(model, piece).backward()
        tap.note(2)
    tap.read()


def _zeros(model: nn.Module) -> None:
    """What zero_grad(set_to_none=False) leaves, so that there are gradients which no backward has made."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def _silent(model: nn.Module, number: int) -> None:
    if number == 0:
        _zeros(model)
    model.set_requires_gradient_sync(False)


def _at_times(model: nn.Module, number: int) -> None:
    model.set_requires_gradient_sync(number != 1)


def _nothing(model: nn.Module, number: int) -> None:
    """Leave the loop alone."""


def _replaced(model: nn.Module, number: int) -> None:
    """The user's own communication comes after the tap, on one of the modules."""
    model.wide.set_custom_reduce_scatter(DefaultReduceScatter())


def _different_factors(model: nn.Module, number: int) -> None:
    for module in (model, model.wide, model.narrow):
        module.set_gradient_divide_factor(2.0 if module is model.wide else 4.0)
        module.set_force_sum_reduction_for_comms(True)


def _second_tap() -> None:
    model = sharding.sharded(cases.network(), 2)
    gradients.attach(model)
    gradients.attach(model)


def _parts_of_a_unit() -> None:
    """A loss that goes backward in chunks through modules that the model itself has called before."""
    network = cases.network()
    mesh = _mesh()
    fully_shard([network.wide, network.narrow], mesh=mesh)
    model = fully_shard(network, mesh=mesh)
    tap = gradients.attach(model)
    outputs = model(torch.ones(2, 6))
    cut = outputs.detach().requires_grad_()
    for half in cut.chunk(2):
        model.narrow(torch.tanh(model.wide(half))).sum().backward()
    outputs.backward(cut.grad)
    tap.note(2)


def _around_the_model() -> None:
    """Parameters made whole by hand, and the forward pass not through the module."""
    model = sharding.sharded(cases.network(), 2)
    tap = gradients.attach(model)
    _zeros(model)
    for module in (model, model.wide, model.narrow):
        module.unshard()
    model.forward(torch.ones(2, 6)).square().sum().backward()
    tap.note(2)
    tap.read()


class Everything:
    """A view that looks at every parameter."""

    name = "everything"

    def open(self) -> None:
        """Nothing to take from an optimizer."""

    def square(self, index: int, gradient: Tensor) -> Tensor | None:
        return gradient.square().sum()


def _unused_in_a_view() -> None:
    """A parameter of the root's unit has no gradient, so the buffer is shorter than the parameters are."""
    network = cases.network()
    network.idle = nn.Linear(3, 3)
    model = sharding.sharded(network, 2)
    source = ShardSource(layouts.survey(model), [Everything()])
    source.measure(True)
    cases.mean_loss(model, cases.pieces([2], tokens=False)[0]).backward()
    source.close_micro_batch(2.0)


def _no_backward() -> None:
    """Another model's backward: nothing has a gradient, and the source knows more about that than the norm does."""
    model, other = sharding.sharded(cases.network(), 2), cases.network()
    tap = gradients.attach(model)
    cases.mean_loss(other, cases.pieces([2], tokens=False)[0]).backward()
    tap.note(2)
    tap.read()


LOOPS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "silent": (lambda: _window(_silent), ["reduced no gradient in this window of 3", "set_requires_gradient_sync"]),
    "at times": (lambda: _window(_at_times), ["in the micro-batches [1, 3] of 3", "the last one only"]),
    "twice": (
        lambda: _window(_nothing, backwards=2),
        ["2 times in one micro-batch", "call note() after each backward"],
    ),
    "replaced": (lambda: _window(_replaced), ["FSDP2 module 'wide' was replaced after attach()", "before attach()"]),
    "factors": (lambda: _window(_different_factors), ["divide their gradients by different factors", "'wide': 2.0"]),
    "no backward": (_no_backward, ["reduced no gradient", "set_requires_gradient_sync"]),
    "second tap": (_second_tap, ["another tap is attached to the FSDP2 module 'FSDPTied'", "detach()"]),
    "parts": (_parts_of_a_unit, ["module 'wide' 3 times in one micro-batch", "fully_shard([...]) once per forward"]),
    "around": (
        _around_the_model,
        ["module 'FSDPTied' holds gradients that it has not reduced", "call the model itself"],
    ),
    "unused": (_unused_in_a_view, ["'FSDPTied' had no gradient", "set_reduce_scatter_unused_params(True)"]),
}


def _loops(names: list[str]) -> list[str]:
    return [_message(LOOPS[name][0]) for name in names]


def test_loops_that_cannot_be_measured_are_noticed() -> None:
    for said in ranks.run(_loops, 2, list(LOOPS)):
        for message, (name, (_, parts)) in zip(said, LOOPS.items(), strict=True):
            for part in parts:
                assert part in message, name


def _alone() -> list[str]:
    """On one rank there is no reduce-scatter, and the tap listens elsewhere."""

    def two_taps() -> None:
        model = sharding.sharded(cases.network(), 1)
        gradients.attach(model)
        gradients.attach(model)

    def factor() -> None:
        model = sharding.sharded(cases.network(), 1)
        model.set_gradient_divide_factor(2.0)
        gradients.attach(model)

    return [_message(two_taps), _message(factor)]


def test_a_single_rank_is_watched_too() -> None:
    for two_taps, factor in ranks.run(_alone, 1):
        assert "another tap is attached to the FSDP2 module 'FSDPTied'" in two_taps
        assert "set_gradient_divide_factor() on a single rank is not supported" in factor
