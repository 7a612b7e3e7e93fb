"""Real process groups for tests: run one function on N gloo processes, and kill them when they take too long."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

# The processes are forked from one that has imported torch already: hundredths of a second each instead of seconds.
# torch imports its compiler when an optimizer is first used.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "pytest"])


class RanksFailed(AssertionError):
    """A rank raised, died or did not end in time; the message holds every rank's last words."""


def run(function: Callable[..., Any], world: int, *arguments: Any, seconds: float = 60.0) -> list[Any]:
    """Call ``function(*arguments)`` in ``world`` processes that torchrun's variables make ranks of one group.

    The function must be at the top of its module. It finds a running gloo group of the CPU (``adabatch.distributed``
    began it) and one thread of computation; with a world of 1 there is no group, as in ``distributed.start``.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RanksFailed: with each rank's traceback, or the ranks that had to be killed after ``seconds``.
    """
    # Each process dies with its rank's result sent; the store lives here, where no rank can take it down with itself.
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world):
        receiver, sender = _PROCESSES.Pipe(duplex=False)
        process = _PROCESSES.Process(
            target=_rank, args=(sender, function, arguments, _environment(rank, world, store.port)), daemon=True
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        outcomes = _collect(pipes, seconds)
    finally:
        for process in processes:
            process.join(timeout=5.0 if process.is_alive() and len(outcomes) == world else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
    ended = [outcomes.get(rank, ("failed", "killed, no result")) for rank in range(world)]
    failures = [f"rank {rank}: {words}" for rank, (kind, words) in enumerate(ended) if kind == "failed"]
    if failures:
        raise RanksFailed(f"{len(failures)} of {world} ranks failed within {seconds} s\n" + "\n".join(failures))
    return [result for _, result in ended]


def _collect(pipes: list[Connection], seconds: float) -> dict[int, tuple[str, Any]]:
    """What the ranks sent until all have, one has failed (the others then wait in vain) or the time is over."""
    outcomes: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + seconds
    while len(outcomes) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in outcomes]
        ready = wait(open_pipes, timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            break
        for pipe in ready:
            try:
                outcomes[pipes.index(pipe)] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcomes[pipes.index(pipe)] = ("failed", "died without a result")
        if any(kind == "failed" for kind, _ in outcomes.values()):
            deadline = min(deadline, time.monotonic() + 2.0)
    return outcomes


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is the test's own process, as it is torchrun's agent in earnest.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _rank(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str]):
    os.environ.update(environment)
    warnings.simplefilter("error")
    try:
        import torch

        from adabatch import distributed

        # Results travel as plain pickles: torch's own would share memory with a process that is about to end.
        torch.set_num_threads(1)
        distributed.start(device="cpu", timeout_seconds=30.0)
        result = function(*arguments)
        sender.send_bytes(pickle.dumps(("returned", result)))
        distributed.stop()
    except BaseException:  # everything that ends a rank is the test's business
        sender.send_bytes(pickle.dumps(("failed", traceback.format_exc())))
    finally:
        sender.close()
