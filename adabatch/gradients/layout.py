"""What a model is made of, as far as its gradients go: trainable parameters, their device, and who synchronises them.

This is where wrappers are recognised. What is not recognised is refused, because wrappers differ in ways that change
a measurement without an error: under FSDP2, for one, a parameter's hook never sees the local gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adabatch import distributed
from adabatch.gradients.sharding import Shards, is_sharded, local, reshard, sharded_modules, survey_shards

SUPPORTED = (
    "a plain module in one process, or DistributedDataParallel or FSDP2 (fully_shard, also over a 2-D mesh) on any "
    "number of ranks"
)

# By class name, because importing them all would cost seconds.
REFUSED = {
    "FullyShardedDataParallel": "FSDP1 shards gradients before any hook sees them",
    "ReplicateModule": "replicate() all-reduces gradients before any hook sees them; use DistributedDataParallel",
    "DataParallel": "DataParallel splits every batch inside one process",
    "DeepSpeedEngine": "DeepSpeed owns backward, synchronisation and the step",
    "DistributedModelParallel": "torchrec shards embeddings over the ranks",
}

# Gradients up to this many elements are handled in bulk, larger ones one by one, in chunks.
BULK_ELEMENTS = 16_384

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Alike:
    """Parameters of one dtype, small ones and large ones apart; their gradients are handled by one kernel."""

    dtype: torch.dtype
    small: tuple[nn.Parameter, ...]
    large: tuple[nn.Parameter, ...]

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients that exist now, of small and of large parameters; under FSDP2, this rank's shards of them."""
        small = [local(gradient) for parameter in self.small if (gradient := parameter.grad) is not None]
        large = [local(gradient) for parameter in self.large if (gradient := parameter.grad) is not None]
        return small, large


@dataclass(frozen=True, slots=True)
class Layout:
    """The trainable parameters of a model and the ranks that share them.

    Attributes:
        parallel: every DistributedDataParallel in the model, nested ones included.
        shards: how FSDP2 has sharded the model; ``None`` where it has not.
        names, parameters: the trainable parameters, in the model's order; tied ones once.
        frozen: parameters that need no gradient.
        known: ids of the trainable parameters.
        alike: the trainable parameters by dtype.
        group, rank, world: the process group that synchronises the gradients, and this process in it.
        device: where all parameters live.
    """

    parallel: tuple[DistributedDataParallel, ...]
    shards: Shards | None
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    frozen: tuple[nn.Parameter, ...]
    known: frozenset[int]
    alike: tuple[Alike, ...]
    group: dist.ProcessGroup | None
    rank: int
    world: int
    device: torch.device

    @property
    def sharded(self) -> bool:
        """Whether ``.grad`` holds only this rank's shard."""
        return self.shards is not None

    @property
    def replicas(self) -> int:
        """On how many ranks each shard lives."""
        return self.shards.replicas if self.shards else 1


def survey(model: nn.Module) -> Layout:
    """Look a model over.

    Raises:
        ValueError: for wrappers and parameters that are not supported, gradients that nobody synchronises, parameters
            on several devices, or a model with nothing to train. The message names the module or parameter.
    """
    _refuse_wrappers(model)
    fully_sharded = sharded_modules(model)
    reshard(fully_sharded)
    named = list(model.named_parameters())
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trainable:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter: {len(named)} are frozen; there is nothing to measure"
        )
    _refuse_parameters(trainable, sharded=bool(fully_sharded))
    parallel = tuple(module for module in model.modules() if isinstance(module, DistributedDataParallel))
    shards = None
    if fully_sharded:
        _refuse_both(parallel, fully_sharded)
        shards = survey_shards(fully_sharded, trainable)
    else:
        _require_synchronised(model, parallel, trainable)
    group = parallel[0].process_group if parallel else None
    return Layout(
        parallel=parallel,
        shards=shards,
        names=tuple(name for name, _ in trainable),
        parameters=tuple(parameter for _, parameter in trainable),
        frozen=tuple(parameter for _, parameter in named if not parameter.requires_grad),
        known=frozenset(id(parameter) for _, parameter in trainable),
        alike=_by_dtype([parameter for _, parameter in trainable]),
        group=group,
        rank=distributed.rank(group) if parallel or shards else 0,
        world=distributed.size(group) if parallel or shards else 1,
        device=trainable[0][1].device,
    )


def require_covered(layout: Layout, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Check that every parameter that the optimizers may move is one that the layout knows.

    Raises:
        ValueError: for parameters added, replaced or unfrozen since the model was looked over.
    """
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in layout.known:
                    raise ValueError(
                        f"parameter group {index} of {type(optimizer).__name__} holds a parameter of shape "
                        f"{tuple(parameter.shape)} that was added, replaced or unfrozen after attach(); "
                        f"{_afresh(layout)}"
                    )


def require_current(layout: Layout, model: nn.Module) -> None:
    """Check that the model trains the same parameters as when it was looked over.

    Raises:
        ValueError: naming the first parameter that was added, replaced or unfrozen since.
    """
    known = layout.known | layout.shards.unsharded() if layout.shards else layout.known
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise ValueError(f"parameter {name!r} was added, replaced or unfrozen after attach(); {_afresh(layout)}")


def _afresh(layout: Layout) -> str:
    wrap = "wrap the model in DistributedDataParallel anew, then " if layout.parallel else ""
    wrap = "call fully_shard() with it, then " if layout.shards else wrap
    return f"{wrap}call detach() and attach() again (the model handed over must hold all parameters of the optimizer)"


def _refuse_wrappers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        where = f"{type(module).__name__} ({name or 'the model itself'})"
        ancestors = {kind.__name__ for kind in type(module).__mro__}
        for refused in ancestors & REFUSED.keys():
            raise ValueError(f"{where} is not supported: {REFUSED[refused]}. Supported: {SUPPORTED}")
        # A compiled module passes attributes through, so it would look like what it holds.
        if "OptimizedModule" in ancestors or isinstance(module, DistributedDataParallel):
            continue
        if callable(getattr(module, "no_sync", None)):
            raise ValueError(
                f"{where} looks like a wrapper for data parallelism that adabatch does not know: it has no_sync(). "
                f"Supported: {SUPPORTED}"
            )
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(f"{where} makes sparse gradients, which are not supported; set sparse=False")


def _refuse_parameters(trainable: Sequence[tuple[str, nn.Parameter]], *, sharded: bool) -> None:
    devices = {parameter.device for _, parameter in trainable}
    if len(devices) > 1:
        raise ValueError(
            f"the parameters are on several devices ({', '.join(sorted(map(str, devices)))}); model parallelism is not "
            f"supported. Supported: {SUPPORTED}"
        )
    for name, parameter in trainable:
        if is_sharded(parameter) and not sharded:
            raise ValueError(
                f"parameter {name!r} is a DTensor without fully_shard() (tensor parallelism, or a part of an FSDP2 "
                f"model), which is not supported. Supported: {SUPPORTED}"
            )
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(f"parameter {name!r} has no shape yet; run one forward pass before attach()")


def _refuse_both(parallel: Sequence[DistributedDataParallel], fully_sharded: Sequence[tuple[str, nn.Module]]) -> None:
    if parallel:
        raise ValueError(
            f"the model holds DistributedDataParallel and FSDP2 modules ({fully_sharded[0][0]!r}), which is not "
            f"supported; use fully_shard() over a 2-D mesh (replicate, shard) for both"
        )


def _require_synchronised(
    model: nn.Module,
    parallel: Sequence[DistributedDataParallel],
    trainable: Sequence[tuple[str, nn.Parameter]],
) -> None:
    """On several ranks every trainable parameter must be one that DistributedDataParallel reduces."""
    ranks = distributed.size(parallel[0].process_group if parallel else None)
    if ranks == 1:
        return
    if not parallel:
        raise ValueError(
            f"{type(model).__name__} is a plain module in a process group of {ranks} ranks, so nobody synchronises its "
            f"gradients; wrap it in torch.nn.parallel.DistributedDataParallel first, or hand over the wrapped one: "
            f"trainer.model_wrapped in Hugging Face, trainer.strategy.model in Lightning"
        )
    if any(module.process_group != parallel[0].process_group for module in parallel):
        raise ValueError("the model's DistributedDataParallel modules use different process groups; use one for all")
    reduced = {
        id(parameter)
        for module in parallel
        for name, parameter in module.module.named_parameters()
        if name not in module.parameters_to_ignore
    }
    for name, parameter in trainable:
        if id(parameter) not in reduced:
            raise ValueError(
                f"parameter {name!r} is not synchronised over the {ranks} ranks: DistributedDataParallel does not "
                f"hold it or ignores it; wrap the whole model"
            )


@torch.no_grad()
def _by_dtype(parameters: Sequence[nn.Parameter]) -> tuple[Alike, ...]:
    dtypes = dict.fromkeys(parameter.dtype for parameter in parameters)
    return tuple(_alike(dtype, [parameter for parameter in parameters if parameter.dtype == dtype]) for dtype in dtypes)


def _alike(dtype: torch.dtype, parameters: Sequence[nn.Parameter]) -> Alike:
    small = tuple(parameter for parameter in parameters if local(parameter).numel() <= BULK_ELEMENTS)
    large = tuple(parameter for parameter in parameters if local(parameter).numel() > BULK_ELEMENTS)
    return Alike(dtype, small, large)
