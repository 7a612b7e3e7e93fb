"""One job of peers.py inside the peers' environment; arms and names may be several, with commas between them.

    python _peers_worker.py stream ARMS PROBLEMS FIRST REPEATS STEPS
    python _peers_worker.py cost ARMS SIZES SECONDS
    torchrun --nproc-per-node 2 _peers_worker.py parallel ARMS WRAPS STEPS

The last line of the output is JSON: {arm: {name: result}}.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _peers_arms import KINDS, Arm, Plain
from _peers_problems import Batch, problem, stream
from torch import nn

READ_EVERY = 10
BLOCK_SECONDS, FEWEST_ROUNDS = 0.2, 12
PARALLEL_PROBLEM = "classification"
# With one draw, torch-gqc has nothing to compare.
PARALLEL_MICRO_BATCHES = {"torch-gqc": 4}


def unwrapped(model: nn.Module) -> nn.Module:
    return model


def run_stream(arm: str, name: str, first: int, repeats: int, steps: int) -> list[list[dict[str, Any]]]:
    """Per repeat the readings."""
    task, kind = problem(name), KINDS[arm]
    numbers = range(first, first + repeats)
    loops = [kind.build(task, unwrapped, kind.micro_batches) for _ in numbers]
    return [readings(loop, stream(task, repeat), steps) for loop, repeat in zip(loops, numbers, strict=True)]


def readings(arm: Arm, batches: Iterator[Batch], steps: int) -> list[dict[str, Any]]:
    """What the arm says over the second half of its run, every tenth step."""
    found = []
    for step, batch in enumerate(itertools.islice(batches, steps), start=1):
        arm.step(batch)
        if step > steps // 2 and step % READ_EVERY == 0 and (reading := arm.reading()) is not None:
            found.append(reading.to_dict())
    return found


def run_cost(arm: str, size: str, seconds: float) -> list[dict[str, float]]:
    """Seconds of a step of the arm, the plain loop and a second copy of it, in rounds of alternating order."""
    task, kind = problem(size), KINDS[arm]
    batches = list(itertools.islice(stream(task, 0), 16))
    loops: dict[str, Arm] = {
        "plain": Plain(task, unwrapped, kind.micro_batches),
        "arm": kind.build(task, unwrapped, kind.micro_batches),
        "plain again": Plain(task, unwrapped, kind.micro_batches),
    }
    for loop in loops.values():
        timed(loop, batches, 4)
    # a block holds ten steps at least, since one arm works in every tenth only
    steps = 10 * max(1, round(BLOCK_SECONDS / timed(loops["plain"], batches, 10) / 10))
    rounds: list[dict[str, float]] = []
    begun = time.perf_counter()
    for order in itertools.cycle(itertools.permutations(loops)):
        rounds.append({name: timed(loops[name], batches, steps) / steps for name in order})
        if len(rounds) >= FEWEST_ROUNDS and time.perf_counter() - begun > seconds:
            return rounds
    raise AssertionError("unreachable")


def timed(loop: Arm, batches: list[Any], steps: int) -> float:
    begun = time.perf_counter()
    for batch in itertools.islice(itertools.cycle(batches), steps):
        loop.step(batch)
    return time.perf_counter() - begun


def run_parallel(arm: str, wrap: str, steps: int) -> list[dict[str, Any]]:
    """The readings on two ranks under a wrapper."""
    task, rank, world = problem(PARALLEL_PROBLEM), torch.distributed.get_rank(), torch.distributed.get_world_size()
    wrappers = {"ddp": nn.parallel.DistributedDataParallel, "fsdp2": sharded}
    loop = KINDS[arm].build(task, wrappers[wrap], PARALLEL_MICRO_BATCHES.get(arm, 1))
    shares = (tuple(part.chunk(world)[rank] for part in batch) for batch in stream(task, 0))
    return readings(loop, shares, steps)


def sharded(model: nn.Module) -> nn.Module:
    """``fully_shard`` on every layer with parameters and on the whole, as its documentation advises."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def start_group() -> None:
    """The process group of torchrun, or one of this process alone, which AdaptDL's class needs."""
    alone = {"init_method": "tcp://127.0.0.1:0", "rank": 0, "world_size": 1} if "RANK" not in os.environ else {}
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60), **alone)


JOBS: dict[str, tuple[Callable[..., Any], type]] = {
    "stream": (run_stream, int),
    "cost": (run_cost, float),
    "parallel": (run_parallel, int),
}


def attempt(run: Callable[..., Any], *arguments: Any) -> Any:
    """What ``run`` returns, or what it raises: whatever a library raises is a finding."""
    try:
        return run(*arguments)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def main(job: str, arms: str, names: str, *numbers: str) -> None:
    warnings.simplefilter("ignore")  # of old packages about themselves
    torch.set_num_threads(1)
    if job == "parallel" or "adaptdl" in arms:
        start_group()
    run, number = JOBS[job]
    values = [number(text) for text in numbers]
    result = {arm: {name: attempt(run, arm, name, *values) for name in names.split(",")} for arm in arms.split(",")}
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result))
    sys.stdout.flush()
    # Without waiting: the other rank may have stopped on an error that this one did not see.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
