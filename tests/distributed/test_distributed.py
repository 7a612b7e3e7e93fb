"""The process group's small verbs, over real gloo processes and in one process without a group."""

from __future__ import annotations

import math
import time

import pytest
import ranks
import torch
import torch.distributed as dist

from adabatch import distributed


def _speak_as_rank() -> object:
    return distributed.agree({"rank": distributed.rank(), "pair": (1, 2.5), "unbounded": math.inf, "none": None})


def test_every_rank_gets_what_rank_0_said() -> None:
    said = ranks.run(_speak_as_rank, 3)
    assert said == [{"rank": 0, "pair": [1, 2.5], "unbounded": math.inf, "none": None}] * 3


def test_one_process_agrees_with_itself_without_a_group() -> None:
    assert not dist.is_initialized()
    assert _speak_as_rank() == {"rank": 0, "pair": [1, 2.5], "unbounded": math.inf, "none": None}
    assert distributed.size() == 1
    assert distributed.all_reduce_sum(torch.tensor([2.0])).item() == 2.0
    distributed.barrier()


# Around the longest text that needs one broadcast only (two quotes are part of it), and far beyond.
LENGTHS = (0, 1, 4085, 4086, 4087, 100_000)


def _agree_on_long_and_short() -> list[bool]:
    texts = ["".join(chr(97 + place % 26) for place in range(length)) for length in LENGTHS]
    return [distributed.agree(text if distributed.rank() == 0 else None) == text for text in texts]


def test_length_does_not_matter() -> None:
    assert ranks.run(_agree_on_long_and_short, 2) == [[True] * len(LENGTHS)] * 2


def _say_a_tensor() -> str:
    try:
        distributed.agree(torch.ones(1) if distributed.rank() == 0 else 3)
    except ValueError as error:
        return str(error)
    return "agreed"


def test_what_is_no_json_raises_on_every_rank() -> None:
    for message in ranks.run(_say_a_tensor, 2):
        assert "plain JSON data" in message


def _sum() -> list[float]:
    return distributed.all_reduce_sum(torch.tensor([1.0, distributed.rank()], dtype=torch.float64)).tolist()


def test_sum_over_ranks() -> None:
    assert ranks.run(_sum, 3) == [[3.0, 3.0]] * 3


def _start_again() -> list[object]:
    """A second run in the same process."""
    distributed.stop()
    gone = not dist.is_initialized()
    distributed.stop()
    world = distributed.start(device="cpu")
    return [gone, world.rank, world.size, world.is_first, str(world.device), _sum()]


def test_stop_and_start_again_in_one_process() -> None:
    first, second = ranks.run(_start_again, 2)
    assert first == [True, 0, 2, True, "cpu", [2.0, 1.0]]
    assert second == [True, 1, 2, False, "cpu", [2.0, 1.0]]


def _leave_a_foreign_group_alone() -> bool:
    distributed.stop()
    dist.init_process_group("gloo")
    distributed.start(device="cpu")
    distributed.stop()
    alive = dist.is_initialized()
    dist.destroy_process_group()
    return alive


def test_a_group_that_was_there_before_stays() -> None:
    assert ranks.run(_leave_a_foreign_group_alone, 2) == [True, True]


def _wait_for_a_missing_rank() -> tuple[str, float]:
    distributed.stop()
    distributed.start(device="cpu", timeout_seconds=1.5)
    begun = time.monotonic()
    if distributed.rank() == 1:
        time.sleep(4.0)
        return "", 0.0
    try:
        distributed.agree(1)
    except RuntimeError as error:
        return str(error), time.monotonic() - begun
    return "agreed", 0.0


def test_waiting_ends_with_the_timeout_and_says_what_for() -> None:
    message, waited = ranks.run(_wait_for_a_missing_rank, 2)[0]
    assert "rank 0 of 2 waited in agree()" in message
    assert 1.0 < waited < 3.5


def _control_device() -> str:
    return f"{distributed.control_device()} {distributed.rank()}"


def test_control_data_is_on_the_groups_device() -> None:
    assert ranks.run(_control_device, 2) == ["cpu 0", "cpu 1"]


def test_half_of_torchruns_variables_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="LOCAL_RANK.*start the program with torchrun"):
        distributed.start(device="cpu")


@pytest.mark.parametrize("device", ["tpu", "gpu:0"])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda"):
        distributed.start(device=device)


def test_more_ranks_than_gpus_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks on this machine"):
        distributed._device("cuda", 0, torch.cuda.device_count() + 1)


def test_a_timeout_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_seconds"):
        distributed.start(device="cpu", timeout_seconds=0.0)


def _raise_on_rank_1() -> None:
    if distributed.rank() == 1:
        raise ValueError("rank 1 is unwell")
    distributed.barrier()


def test_the_helper_reports_the_rank_that_failed() -> None:
    with pytest.raises(ranks.RanksFailed, match="rank 1 is unwell"):
        ranks.run(_raise_on_rank_1, 2)


def _sleep() -> None:
    time.sleep(60.0)


def test_the_helper_kills_ranks_that_hang() -> None:
    begun = time.monotonic()
    with pytest.raises(ranks.RanksFailed, match="rank 0: killed"):
        ranks.run(_sleep, 2, seconds=1.0)
    assert time.monotonic() - begun < 10.0
