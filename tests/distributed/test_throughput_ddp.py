"""Step times over real gloo processes: the slowest rank is the one that counts, and waiting for it is no fixed cost."""

from __future__ import annotations

import json
import time
from pathlib import Path

import programs
import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adabatch import distributed, gradients
from adabatch.controller import Controller
from adabatch.plan import BatchLimits
from adabatch.policies import Observe
from adabatch.stopwatch import Stopwatch

SLOW, FIXED, STEPS = 0.010, 0.020, 34


def _largest() -> list[float]:
    rank = distributed.rank()
    return distributed.largest([float(rank), -float(rank), 5.0])


def test_the_largest_of_each_number_is_known_to_every_rank() -> None:
    assert ranks.run(_largest, 3) == [[2.0, 0.0, 5.0]] * 3
    assert distributed.largest([1.0, -2.0]) == [1.0, -2.0]
    assert distributed.largest([]) == []


def _train(slow_rank: int) -> tuple[float, float, float, str]:
    """Windows of 4 micro-batches; one rank sleeps in each of its own, and every rank after the last."""
    rank = distributed.rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    controller = Controller(
        Observe(), limits=BatchLimits(2, 2), start_batch=16, agree=distributed.agree, slowest=distributed.largest
    )
    stopwatch = Stopwatch("cpu")
    stopwatch.restart()
    with gradients.attach(model, optimizer) as tap:
        for _ in range(STEPS):
            plan = controller.plan()
            with gradients.accumulate(tap, plan) as window:
                for samples in plan.pieces(rank):
                    stopwatch.micro_batch(plan)
                    with window.micro_batch():
                        time.sleep(SLOW if rank == slow_rank else 0.0)
                        window.backward(model(torch.ones(samples, 8)).square().mean(), samples=samples)
            window.finish(optimizer).step()
            time.sleep(FIXED)
            optimizer.zero_grad()
            controller.commit(plan, window.measurement, stopwatch.lap())
    step_time = controller.step_time
    return step_time.fixed, step_time.of_micro_batch(2), controller.price.value, str(controller.state_dict()["timed"])


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_rank_with_a_delay_is_the_one_that_counts(slow_rank: int) -> None:
    told = ranks.run(_train, 2, slow_rank)
    assert told[0] == told[1], "both ranks hold the same times"
    fixed, micro_batch, price, _ = told[0]
    # A sleep lasts a little longer than asked for. Waiting for the slow rank would add 4 x 10 ms to the fixed 20 ms.
    assert SLOW <= micro_batch < 1.6 * SLOW
    assert 0.6 * FIXED < fixed < 1.7 * FIXED
    assert price == pytest.approx(fixed / micro_batch * 4)


def test_the_price_of_a_run_is_in_its_records(tmp_path: Path) -> None:
    programs.start(f"run_folder={tmp_path / 'run'}", *programs.SMALL, "logger.every=4", "noise.decide_every=4")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    told = [line["step_time"] for line in lines if line["kind"] == "step" and line["step_time"]]
    assert told and set(told[-1]) == {"fixed", "per_micro_batch", "per_sample", "price", "price_low", "price_high"}
