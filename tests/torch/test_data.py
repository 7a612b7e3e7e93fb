"""The sample order and the streams over it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from adabatch.data import (
    SampleOrder,
    cached,
    check_fingerprint,
    fingerprint,
    iterable,
    sample_seed,
    stream,
)
from adabatch.plan import BatchLimits, BatchPlan, split

few_cores = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Indices(Dataset):
    """Sample i is i: batches show which samples they hold."""

    deterministic = True

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Noisy(Indices):
    """Adds what the three global generators draw, as augmentations do."""

    deterministic = False

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Batched(Indices):
    """Collates by itself, and remembers what it was asked for and what it gave."""

    collated = True

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.asked: list[list[int]] = []
        self.given: list[torch.Tensor] = []

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        self.asked.append(indices)
        self.given.append(torch.tensor(indices))
        return self.given[-1]


def plans(batches: list[int], *, world: int = 1, micro_batch: int = 4, start: int = 0) -> list[BatchPlan]:
    """Consecutive plans of any sizes."""
    made: list[BatchPlan] = []
    limits = BatchLimits(world, micro_batch, rounding="none")
    for step, batch in enumerate(batches):
        first = made[-1].last_sample if made else start
        made.append(split(step=step, first_sample=first, global_batch=batch, limits=limits, measure=step % 2 == 0))
    return made


def taken(dataset, batches: list[int], *, world: int = 1, rank: int = 0, micro_batch: int = 4, start: int = 0, **more):
    """All micro-batches that a fresh stream yields for these batches, plan by plan."""
    arguments = {"seed": 3, "start": start, "rank": rank, "world": world, "micro_batch": micro_batch, **more}
    with stream(dataset, **arguments) as samples:
        made = plans(batches, world=world, micro_batch=micro_batch, start=start)
        return [list(samples.take(plan)) for plan in made], made


# --- the order


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_each_epoch_visits_every_sample_once(size: int, seed: int, epoch: int) -> None:
    order = SampleOrder(size, seed)
    positions = torch.arange(epoch * size, (epoch + 2) * size)
    for visited in order.indices(positions).view(2, size):
        assert visited.sort().values.equal(torch.arange(size))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2**60), st.integers(), st.lists(st.integers(0, 2**61), min_size=1, max_size=8))
def test_scalar_and_vector_orders_agree(size: int, seed: int, positions: list[int]) -> None:
    order = SampleOrder(size, seed)
    indices = [order.index(position) for position in positions]
    assert order.indices(torch.tensor(positions)).tolist() == indices
    assert all(0 <= index < size for index in indices)


def test_the_order_never_changes() -> None:
    assert [SampleOrder(1000, 0).index(position) for position in (0, 1, 999, 1000, 10**12)] == [941, 355, 7, 499, 705]
    assert [SampleOrder(size, 5).index(12345) for size in (1, 2, 3, 5, 2**60)] == [0, 0, 2, 0, 338022224971297550]
    assert sample_seed(0, 0) == 4724521172550564193


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_every_order_of_a_few_samples_is_equally_likely(size: int) -> None:
    epochs = 20_000
    orders = SampleOrder(size, 11).indices(torch.arange(size * epochs)).view(epochs, size)
    counts = torch.unique(orders, dim=0, return_counts=True)[1].double()
    expected = epochs / torch.arange(1, size + 1).prod()
    freedom = int(torch.arange(1, size + 1).prod()) - 1
    assert len(counts) == freedom + 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("size", [9, 25])
def test_odd_orders_come_as_often_as_even_ones(size: int) -> None:
    orders = SampleOrder(size, 4).indices(torch.arange(size * 400)).view(400, size)
    signs = torch.linalg.det(torch.nn.functional.one_hot(orders).double()).round()
    assert abs(float(signs.sum())) < 4 * 400**0.5


@pytest.mark.parametrize("size", [97, 1000, 40_009])
def test_positions_say_nothing_about_indices(size: int) -> None:
    epochs = max(4, 200_000 // size)
    indices = SampleOrder(size, 2).indices(torch.arange(size * epochs)).view(epochs, size).double()
    scores = (indices - (size - 1) / 2) / indices.std()
    ramp = torch.linspace(-1, 1, size, dtype=torch.float64) * 3**0.5
    rows = round(size**0.5)  # of the table that the order is computed on
    neighbours = [scores[:, lag:] * scores[:, :-lag] + 1 / (size - 1) for lag in (1, 2, rows)]  # drawn without return
    for product in (scores * ramp, *neighbours, scores[1:] * scores[:-1]):
        assert abs(float(product.mean())) * product.numel() ** 0.5 < 4


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    epochs = SampleOrder(500, 1).indices(torch.arange(1500)).view(3, 500)
    other = SampleOrder(500, 2).indices(torch.arange(500))
    for left, right in [(epochs[0], epochs[1]), (epochs[1], epochs[2]), (epochs[0], other)]:
        assert int((left == right).sum()) < 8  # one coincidence is expected


def test_order_without_shuffling_and_its_errors() -> None:
    assert SampleOrder(3, 9, shuffle=False).indices(torch.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert SampleOrder(3, 9, shuffle=False).index(4) == 1
    assert SampleOrder(3).epoch(7) == 2
    with pytest.raises(ValueError, match="size=0"):
        SampleOrder(0)
    for call in (lambda: SampleOrder(3).index(-1), lambda: SampleOrder(3).indices(torch.tensor([4, -1]))):
        with pytest.raises(ValueError, match="start at 0, got -1"):
            call()
    with pytest.raises(ValueError, match="int32"):
        SampleOrder(3).indices(torch.tensor([1], dtype=torch.int32))


# --- what a stream yields


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 7), st.lists(st.integers(1, 40), min_size=1, max_size=4)),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 60),
)
def test_any_schedule_on_any_ranks_consumes_every_position_once(legs, size: int) -> None:
    dataset, order = Indices(size), SampleOrder(size, 3)
    cursor, positions = 0, []
    for world, micro_batch, batches in legs:  # each leg resumes on other ranks and with another micro-batch
        for rank in range(world):
            steps, made = taken(dataset, batches, world=world, rank=rank, micro_batch=micro_batch, start=cursor)
            for step, plan in zip(steps, made, strict=True):
                assert tuple(micro.samples for micro in step) == plan.pieces(rank)
                for micro in step:
                    assert all(plan.first_sample <= p < plan.last_sample for p in micro.positions)
                    assert all(p % world == rank for p in micro.positions)
                    assert micro.data.tolist() == [order.index(p) for p in micro.positions] or not micro.samples
                    positions += micro.positions
        cursor += sum(batches)
    assert sorted(positions) == list(range(cursor))


def test_a_filler_carries_the_next_sample_without_consuming_it() -> None:
    steps, made = taken(Indices(50), [3, 4], world=2, rank=1, micro_batch=1)
    assert made[0].pieces(1) == (1, 0)
    filler, following = steps[0][1], steps[1][0]
    assert (filler.samples, len(filler.positions)) == (0, 0)
    assert filler.data.tolist() == following.data.tolist()


def test_whole_chunks_are_handed_through_and_cuts_are_views() -> None:
    dataset = Batched(100)
    steps, _ = taken(dataset, [8, 16], micro_batch=8)
    halves, wholes = steps  # a measured step of one micro-batch is split in two
    assert [micro_batch.data.data_ptr() for micro_batch in halves] == [
        dataset.given[0].data_ptr(), dataset.given[0][4:].data_ptr()
    ]
    assert all(taken.data is given for taken, given in zip(wholes, dataset.given[1:], strict=True))


def test_prefetched_samples_are_forgotten_and_the_cursor_is_enough_to_go_on() -> None:
    whole = [m.data for step in taken(Noisy(30), [10, 6, 14])[0] for m in step]
    with stream(Noisy(30), seed=3, micro_batch=4, workers=1, prefetch=4) as samples:
        first = [m.data for m in samples.take(plans([10])[0])]
        assert samples.cursor == 10
    rest = [m.data for step in taken(Noisy(30), [6, 14], start=10)[0] for m in step]
    assert torch.cat(first + rest).equal(torch.cat(whole))


@few_cores
@pytest.mark.parametrize(("workers", "world", "micro_batch"), [(1, 1, 4), (2, 1, 3), (2, 2, 4)])
def test_noise_in_samples_depends_on_seed_and_position_alone(workers: int, world: int, micro_batch: int) -> None:
    batches = [5, 12, 9]
    expected = {}
    for micro in taken(Noisy(20), [sum(batches)])[0][0]:
        expected.update(zip(micro.positions, micro.data.tolist(), strict=True))
    found = {}
    for rank in range(world):
        more = {"world": world, "rank": rank, "micro_batch": micro_batch, "workers": workers}
        for step in taken(Noisy(20), batches, **more)[0]:
            for micro in step:
                found.update(zip(micro.positions, micro.data.tolist(), strict=False))
    assert found == expected
    by_sample = {}
    for _, *drawn in expected.values():
        by_sample[tuple(drawn)] = drawn
    assert len(by_sample) == sum(batches)  # also for a sample's second epoch
    other = taken(Noisy(20), [4], seed=4)[0][0][0].data
    assert not other[:, 1:].equal(torch.tensor([expected[p] for p in range(2)])[:, 1:])


def test_the_global_generators_do_not_move() -> None:
    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    def seed() -> None:
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)

    seed()
    undisturbed = draws()
    for workers in (0, 1):
        seed()
        taken(Noisy(20), [7, 7], workers=workers)
        assert draws() == undisturbed


def test_ways_of_reading_a_data_set() -> None:
    class At(Indices):
        deterministic = False

        def at(self, index: int, seed: int) -> torch.Tensor:
            return torch.tensor([index, seed])

    order = SampleOrder(9, 3)
    assert taken(At(9), [2])[0][0][0].data.tolist() == [[order.index(0), sample_seed(3, 0)]]
    batched = Batched(9)
    assert taken(batched, [8])[0][0][0].data.tolist() == [order.index(p) for p in range(4)]
    assert batched.asked[0] == [order.index(p) for p in range(4)]
    tensors = TensorDataset(torch.arange(9), torch.arange(9.0))
    images, labels = taken(Subset(tensors, range(9)), [8], shuffle=False)[0][0][1].data
    assert (images.tolist(), labels.tolist()) == ([4, 5, 6, 7], [4.0, 5.0, 6.0, 7.0])


def test_nested_data_is_cut_and_joined() -> None:
    class Nested(Indices):
        def __getitem__(self, index: int):
            return {"x": torch.full((2,), index), "pair": (torch.tensor(index), f"name {index}")}

    cut = taken(Nested(40), [3, 4], shuffle=False)[0][0][1]
    assert cut.positions == range(2, 3)
    assert cut.data["x"].tolist() == [[2, 2]]
    numbers, names = cut.data["pair"]
    assert (numbers.tolist(), list(names)) == ([2], ["name 2"])
    joined = taken(Nested(40), [3, 4], shuffle=False)[0][1][0]
    assert joined.positions == range(3, 7)
    assert joined.data["x"].tolist() == [[3, 3], [4, 4], [5, 5], [6, 6]]
    assert list(joined.data["pair"][1]) == ["name 3", "name 4", "name 5", "name 6"]


# --- what a stream refuses


def test_plans_out_of_order_or_half_taken_are_refused() -> None:
    first, second = plans([6, 6])
    with stream(Indices(40), seed=0, micro_batch=4) as samples:
        with pytest.raises(ValueError, match="begins at sample 6.*cursor is at 0"):
            samples.take(second)
        with pytest.raises(ValueError, match="for 2 ranks and the stream for 1"):
            samples.take(plans([6], world=2)[0])
        samples.take(first)  # nothing is taken before it is iterated
        micro_batches = samples.take(first)
        next(micro_batches)
        with pytest.raises(RuntimeError, match="inside step 0 after 0 of its 2 micro-batches.*start=0"):
            samples.take(first)
        next(micro_batches)  # the last: the step is complete, though the loop has not asked for more
        assert samples.cursor == 6
        assert len(list(samples.take(second))) == 2
    with pytest.raises(RuntimeError, match="closed"):
        samples.take(second)


def test_a_plan_that_leaves_samples_over_is_refused() -> None:
    plan = BatchPlan(step=0, first_sample=0, global_batch=9, world=1, micro_batch=4, micro_batches=2)
    with stream(Indices(40), seed=0, micro_batch=4) as samples, pytest.raises(ValueError, match="share of 9"):
        samples.take(plan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batch": 0}, "micro_batch must be a whole number of at least 1, got 0"),
        ({"start": -1}, "start must be"),
        ({"workers": 1.5}, "workers must be"),
        ({"rank": 2, "world": 2}, r"rank must be in \[0, 2\), got 2"),
        ({"dataset": Indices(0)}, r"\(Indices\) is empty"),
        ({"dataset": iter([1])}, "no random access"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(**{"dataset": Indices(5), "seed": 0, "micro_batch": 4, **arguments})


def test_batches_that_cannot_be_cut_say_why() -> None:
    def ragged(samples: list) -> torch.Tensor:
        return torch.zeros(len(samples), int(samples[0]) % 7 + 1)

    cases = [
        (lambda samples: torch.stack(samples)[:-1], ValueError, "batch of 3 from 4 samples"),
        (lambda samples: {"x": torch.stack(samples), "y": torch.zeros(9)}, ValueError, r"got \[4, 9\]"),
        (lambda samples: object(), TypeError, "holds a object"),
        (lambda samples: torch.tensor(1.0), ValueError, "no sample dimension"),
        (ragged, ValueError, r"differ in shape, \[\(1,\), \(5,\)\]"),
    ]
    for collate, error, message in cases:
        with pytest.raises(error, match=message):
            taken(Indices(40), [3, 4], collate=collate, shuffle=False)


class Broken(Indices):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise KeyError(f"no file {index}")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_sample_names_it(workers: int) -> None:
    with pytest.raises(KeyError) as caught:
        taken(Broken(5), [2], workers=workers, shuffle=False)
    assert "while reading sample 0" in str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))


class Deadly(Indices):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


def test_a_dead_worker_is_an_error_and_workers_end_with_the_stream() -> None:
    with stream(Deadly(40), seed=0, micro_batch=4, workers=1, shuffle=False, prefetch=1) as samples:
        micro_batches = samples.take(plans([40])[0])
        with pytest.raises(RuntimeError, match="worker"):
            list(micro_batches)
        with pytest.raises(RuntimeError, match="inside step 0"):
            samples.take(plans([40])[0])
    with stream(Indices(40), seed=0, micro_batch=4, workers=1) as samples:
        list(samples.take(plans([4])[0]))
        workers = list(samples._chunks._workers)
        assert all(worker.is_alive() for worker in workers)
    assert not any(worker.is_alive() for worker in workers)


def test_a_signal_to_the_group_reaches_the_rank_and_not_its_workers() -> None:
    program = """
        import os, signal, torch
        from adabatch.data import stream
        from adabatch.plan import BatchLimits, split
        from torch.utils.data import TensorDataset

        caught = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: caught.append(number))
        with stream(TensorDataset(torch.arange(64)), seed=0, micro_batch=4, workers=1) as samples:
            for step in range(12):
                if step in (4, 8):
                    os.killpg(0, signal.SIGINT if step == 4 else signal.SIGTERM)
                plan = split(step=step, first_sample=4 * step, global_batch=4, limits=BatchLimits(), measure=False)
                list(samples.take(plan))
        print("survived", *map(int, caught))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True, check=False)
    assert result.stdout.split() == ["survived", "2", "15"], result.stderr


# --- iterable data sets


class Letters(IterableDataset):
    """Five samples an epoch, in an order of its own for each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        for number in range(5):
            yield torch.tensor([10 * self.epoch + number, float(torch.rand(()))])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_data_set_is_split_by_position_and_resumed_by_skipping(workers: int) -> None:
    with pytest.warns(UserWarning, match="skips what was consumed by reading it again"):
        dataset = iterable(Letters())
    whole = torch.cat([m.data for m in taken(dataset, [12])[0][0]])
    assert whole[:, 0].tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 20, 21]
    assert len(set(whole[:, 1].tolist())) == 12
    found = {}
    for rank in range(2):
        more = {"world": 2, "rank": rank, "workers": workers, "start": 3, "micro_batch": 2}
        for step in taken(dataset, [4, 5], **more)[0]:
            for micro in step:
                found.update(zip(micro.positions, micro.data.tolist(), strict=False))
    assert found == dict(zip(range(3, 12), whole[3:].tolist(), strict=True))


def test_iterable_data_sets_say_what_they_cannot() -> None:
    with pytest.raises(ValueError, match=r"wrap it: stream\(iterable\(dataset\)"):
        stream(Letters(), seed=0, micro_batch=2)
    with pytest.raises(ValueError, match="once per epoch"):
        iterable(iter([1, 2]))
    with pytest.warns(UserWarning, match="cannot shuffle"):
        empty, letters = iterable([]), iterable(Letters())
    with pytest.raises(ValueError, match="yielded no sample in epoch 0"):
        taken(empty, [2])
    with pytest.raises(ValueError, match="at most one worker.*workers=2"):
        taken(letters, [2], workers=2)
    assert fingerprint(letters) == {"size": None, "type": "Letters", "content": None}


# --- fingerprints and the cache


def test_a_changed_data_set_is_noticed() -> None:
    data = TensorDataset(torch.arange(40.0), torch.arange(40))
    saved = json.loads(json.dumps(fingerprint(data)))
    check_fingerprint(saved, fingerprint(TensorDataset(torch.arange(40.0), torch.arange(40))))
    changes = {
        "size was 40 and is now 39": TensorDataset(torch.arange(39.0), torch.arange(39)),
        "type was 'TensorDataset' and is now 'Indices'": Indices(40),
        "content was": TensorDataset(torch.arange(40.0) + 1, torch.arange(40)),
    }
    for message, changed in changes.items():
        with pytest.raises(ValueError, match=message + ".*Likely cause"):
            check_fingerprint(saved, fingerprint(changed))


def test_fingerprints_of_random_and_of_self_describing_data_sets() -> None:
    assert fingerprint(Noisy(20)) == fingerprint(Noisy(20))  # keyed, so that augmentation does not matter

    class Unkeyed(Indices):
        deterministic = False

        def __getitem__(self, index: int) -> numpy.ndarray:
            return numpy.random.default_rng().random(3)

    with pytest.warns(UserWarning, match="differ each time"):
        assert fingerprint(Unkeyed(20))["content"] is None

    class Own(Indices):
        def fingerprint(self) -> dict:
            return {"files": ("a", "b")}

    assert fingerprint(Own(2)) == {"size": 2, "type": "Own", "content": {"files": ["a", "b"]}}
    Own.fingerprint = lambda self: {1.5: object()}
    with pytest.raises(ValueError, match="JSON-able"):
        fingerprint(Own(2))


def test_cached_tensors_are_made_once_and_never_half_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def make() -> dict[str, torch.Tensor]:
        calls.append(1)
        return {"x": torch.arange(3)}

    def fail(tensors: dict, path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(torch, "save", fail)
        cached("numbers", make)
    assert [path.suffix for path in (tmp_path / "adabatch").iterdir()] == [".lock"]
    for _ in range(2):
        assert cached("numbers", make)["x"].tolist() == [0, 1, 2]
    assert len(calls) == 2
    assert sorted(path.suffix for path in (tmp_path / "adabatch").iterdir()) == [".lock", ".pt"]
