"""The process group: who is rank what, one small sum, and one agreement over ranks, with bounded waiting.

Everything here works in a single process without any process group, where a sum is the identity and an agreement is
one's own word. Control data goes to the device that the process group can reduce on: gloo's is the CPU, NCCL's the GPU.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 600.0

# What torchrun sets for every worker.
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Bytes of a message's length, and of a text that travels beside it.
_HEAD, _SHORT = 8, 4088

# Length that announces that rank 0 had nothing to say that JSON can hold.
_UNSPEAKABLE = -1

# The process group is the whole process's, and so is this: whether ``start`` began it, and how many it has begun. In
# torchrun's store a second group would find the addresses of the first one, so each gets a corner of its own.
_owned = False
_begun = 0

# torch 2.13 gave it a new name and deprecates the old one.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Waits for something that was begun.
Wait = Callable[[], None]


@dataclass(frozen=True, slots=True)
class World:
    """This process among its ranks.

    Attributes:
        rank, size: this process and the number of processes, over all machines.
        local_rank, local_size: the same on this machine.
        device: where this rank's model lives.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and decides."""
        return self.rank == 0


def start(device: str = "auto", backend: str | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> World:
    """Join the ranks that torchrun started, or be the only one.

    A process group begins only when there is more than one rank; one that exists already is used and left alone by
    ``stop``.

    Args:
        device: ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:<index>``.
        backend: torch.distributed backend; by default gloo for the CPU, and NCCL with gloo beside it for GPUs.
        timeout_seconds: how long any collective waits for the other ranks before it raises.

    Raises:
        ValueError: for half of torchrun's variables, more ranks than GPUs, an unknown or absent device, a backend that
            cannot serve it, or a timeout of 0.
    """
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds must be above 0, got {timeout_seconds}")
    launch = _launch(os.environ)
    where = _device(device, launch["LOCAL_RANK"], launch["LOCAL_WORLD_SIZE"])
    if backend == "nccl" and where.type != "cuda":
        raise ValueError(f"backend nccl serves GPUs only, and the device is {where}; use gloo, or name no backend")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if launch["WORLD_SIZE"] > 1 and not dist.is_initialized():
        backend = backend or ("cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo")
        _begin(backend, launch, timedelta(seconds=timeout_seconds))
    return World(rank(), size(), launch["LOCAL_RANK"], launch["LOCAL_WORLD_SIZE"], where)


def stop() -> None:
    """Leave the process group that ``start`` began; without one, do nothing."""
    global _owned
    if _owned and dist.is_initialized():
        dist.destroy_process_group()
    _owned = False


def rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in ``group``; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def size(group: dist.ProcessGroup | None = None) -> int:
    """Number of ranks in ``group``; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def control_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device on which ``group`` can reduce small control tensors: the CPU where it can, else the current GPU."""
    if not dist.is_initialized():
        return torch.device("cpu")
    # "cpu:gloo,cuda:nccl" or "cuda:nccl"
    devices = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    return torch.device("cpu") if "cpu" in devices else torch.device(devices[0], torch.cuda.current_device())


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum ``tensor`` over the ranks, in place, and return it; the same tensor in a single process.

    Raises:
        RuntimeError: when another rank did not come within the timeout.
    """
    if size(group) > 1:
        with _explained("all_reduce_sum"):
            dist.all_reduce(tensor, group=group)
    return tensor


def largest(values: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """The largest over the ranks of each of ``values``, as many on all ranks; the same values in a single process.

    Raises:
        RuntimeError: when another rank did not come within the timeout.
    """
    if size(group) == 1 or not values:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=control_device(group))
    with _explained("largest"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        return tensor.tolist()


def start_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, Wait]:
    """Begin to collect ``tensor``, of the same shape on all ranks, on every rank.

    Returns:
        A tensor (ranks, *shape), and a function; the tensor is filled when that was called.

    Raises:
        RuntimeError: from the returned function, when another rank did not come within the timeout.
    """
    if size(group) == 1:
        return tensor.unsqueeze(0), _nothing
    gathered = tensor.new_empty((size(group), *tensor.shape))
    # gloo takes the ranks' tensors one behind the other only, not stacked.
    work = _gather_single(gathered.view(-1), tensor.reshape(-1), group=group, async_op=True)

    def wait() -> None:
        with _explained("start_gather"):
            work.wait()

    return gathered, wait


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until every rank is here.

    Raises:
        RuntimeError: when another rank did not come within the timeout.
    """
    with _explained("barrier"):
        all_reduce_sum(torch.zeros(1, device=control_device(group)), group)


def agree(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's ``value`` on every rank, as plain JSON data; what the other ranks pass in is ignored.

    Every rank gets what JSON makes of the value (tuples become lists), rank 0 and single processes included, so that
    all go on with the same. Only JSON text travels: nothing is unpickled.

    Raises:
        ValueError: on every rank, when rank 0's value is not JSON data.
        RuntimeError: when another rank did not come within the timeout.
    """
    text, problem = _speak(value) if rank(group) == 0 else (b"", None)
    if size(group) > 1:
        with _explained("agree"):
            text = _broadcast(None if problem else text, group)
    if problem or text is None:
        raise ValueError(f"agree() takes plain JSON data on rank 0: {problem or 'rank 0 passed something else'}")
    return json.loads(text)


def _nothing() -> None:
    """There is nobody to wait for."""


def _speak(value: Any) -> tuple[bytes, str | None]:
    try:
        return json.dumps(value).encode(), None
    except (TypeError, ValueError) as error:
        return b"", str(error)


def _broadcast(text: bytes | None, group: dist.ProcessGroup | None) -> bytes | None:
    """Rank 0's bytes on every rank; ``None`` travels as such.

    The first broadcast has room for the length and a short text, so that only long ones need a second.
    """
    device = control_device(group)
    first = torch.zeros(_HEAD + _SHORT, dtype=torch.uint8)
    if rank(group) == 0:
        length = _UNSPEAKABLE if text is None else len(text)
        message = length.to_bytes(_HEAD, "little", signed=True) + (text or b"")
        first[: len(message)] = _as_tensor(message[: len(first)])
    first = _sent(first, device, group)
    length = int.from_bytes(first[:_HEAD], "little", signed=True)
    if length == _UNSPEAKABLE:
        return None
    if length <= _SHORT:
        return first[_HEAD : _HEAD + length]
    rest = torch.zeros(length - _SHORT, dtype=torch.uint8)
    if rank(group) == 0:
        rest = _as_tensor(text[_SHORT:])
    return first[_HEAD:] + _sent(rest, device, group)


def _as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _sent(data: torch.Tensor, device: torch.device, group: dist.ProcessGroup | None) -> bytes:
    """Rank 0's ``data`` as bytes, on every rank."""
    data = data.to(device)
    dist.broadcast(data, group=group, group_src=0)
    return data.cpu().numpy().tobytes()


@contextmanager
def _explained(verb: str) -> Iterator[None]:
    """Say which wait failed: a bare timeout from the backend names neither the call nor the likely cause."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank()} of {size()} waited in {verb}() for the other ranks in vain: one of them has died, or does "
            f"not make the same calls in the same order; its own log says more ({error})"
        ) from error


def _launch(environment: Mapping[str, str]) -> dict[str, int]:
    """Rank numbers from torchrun's variables; a single process without them."""
    present = [name for name in LAUNCH_VARIABLES if name in environment]
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    missing = [name for name in LAUNCH_VARIABLES if name not in environment]
    if missing:
        raise ValueError(
            f"{', '.join(present)} are set but {', '.join(missing)} are not; start the program with torchrun, "
            f"which sets them all, or unset them to run one process"
        )
    return {name: int(environment[name]) for name in LAUNCH_VARIABLES[:4]}


def _device(name: str, local_rank: int, local_size: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name) if name.partition(":")[0] in ("cpu", "cuda") else None
    if device is None:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:<index>, got {name!r}")
    if device.type == "cpu":
        return device
    found = torch.cuda.device_count()
    if not found:
        raise ValueError(f"device={name} for the ranks on this machine, but torch finds no GPU; use device=cpu or auto")
    if device.index is not None:
        if device.index >= found:
            raise ValueError(f"device={name}, but this machine has {found} GPUs: cuda:0 to cuda:{found - 1}")
        return device
    if local_size > found:
        raise ValueError(
            f"{local_size} ranks on this machine but {found} GPUs; start one rank per GPU, or use device=cpu"
        )
    return torch.device("cuda", local_rank)


def _begin(backend: str, launch: Mapping[str, int], timeout: timedelta) -> None:
    global _begun, _owned
    rendezvous = dist.rendezvous("env://", launch["RANK"], launch["WORLD_SIZE"], timeout=timeout)
    store, number, count = next(iter(rendezvous))
    store.set_timeout(timeout)
    _begun += 1
    corner = dist.PrefixStore(f"adabatch/{_begun}", store)
    dist.init_process_group(backend, store=corner, rank=number, world_size=count, timeout=timeout)
    _owned = True
    if _begun == 1:
        # A model in a reference cycle would keep the group and its threads alive until the interpreter is half gone,
        # and then the process aborts ("terminate called without an active exception", 5 of 12 runs).
        atexit.register(gc.collect)
