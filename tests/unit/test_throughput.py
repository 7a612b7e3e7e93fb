"""The step-time model: offline fits, and the running estimate on simulated steps of known costs."""

from __future__ import annotations

import json
import math
import random
import statistics
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from adabatch.plan import BatchLimits, BatchPlan, split, varied
from adabatch.policies import Price
from adabatch.throughput import KEPT, Fit, Lap, Observation, Throughput, fit, of_slowest, typical


def totals(*steps: tuple[int, int, float], variance: float = 0.0) -> list[Observation]:
    """Observations of whole steps from (micro-batches, samples, seconds)."""
    return [Observation(seconds, variance, 1, micro_batches, samples) for micro_batches, samples, seconds in steps]


def found(observations: list[Observation], micro_batch: int = 8) -> Fit:
    fitted = fit(observations, micro_batch)
    assert fitted is not None
    return fitted


# -- the fit


def test_two_accumulation_counts_give_the_fixed_cost_and_that_of_a_full_micro_batch() -> None:
    model = found(totals((1, 8, 0.6), (4, 32, 0.9)))
    assert model.step_time.fixed == pytest.approx(0.5)
    assert model.step_time.of_micro_batch(8) == pytest.approx(0.1)
    assert model.step_time.seconds(16, 128) == pytest.approx(2.1)
    assert model.price(2).value == pytest.approx(0.5 / 0.1 * 16)


def test_micro_batches_of_two_sizes_tell_all_three_costs_apart() -> None:
    def law(m: int, n: int) -> tuple[int, int, float]:
        return m, n, 0.3 + 0.02 * m + 0.01 * n

    model = found(totals(law(1, 8), law(2, 8), law(3, 24)))
    parts = (model.step_time.fixed, model.step_time.per_micro_batch, model.step_time.per_sample)
    assert parts == pytest.approx((0.3, 0.02, 0.01), rel=1e-4)
    assert model.price(2).value == pytest.approx(0.3 / (0.02 / 16 + 0.01 / 2), rel=1e-4)
    assert model.price_below(2, 1).value == pytest.approx(0.32 / 0.005, rel=1e-4)


def test_the_inside_of_a_step_tells_its_costs_apart() -> None:
    inside = [Observation(0.3, 0.0, 0, 3, 24), Observation(0.6, 0.0, 1, 1, 8)]
    model = found(inside)
    assert (model.step_time.fixed, model.step_time.of_micro_batch(8)) == pytest.approx((0.5, 0.1))


def test_one_split_that_is_known_to_the_last_digit_tells_nothing_apart_either() -> None:
    model = found(totals((1, 2, 0.094)))
    assert all(model.covariance[i][i] > 0 for i in range(3))
    price = model.price_below(2, 1)
    assert (price.low, price.high) == (0.0, math.inf)


@pytest.mark.parametrize("seen", [[(2, 16, 0.5)], [(2, 16, 0.5), (2, 16, 0.52)]])
def test_one_split_alone_tells_nothing_apart(seen: list[tuple[int, int, float]]) -> None:
    price = found(totals(*seen)).price(1)
    assert (price.low, price.high, price.resolved) == (0.0, math.inf, False)


def test_nothing_seen_fits_nothing() -> None:
    assert fit([], 8) is None
    assert fit(totals((1, 8, 0.0)), 8) is None


def test_a_step_that_takes_no_longer_with_more_micro_batches_has_no_price_but_a_lower_bound() -> None:
    price = found(totals((1, 8, 0.5), (2, 16, 0.5), variance=1e-6)).price(1)
    # 1.96 sqrt(2) thousandths of a second are the most that a micro-batch may cost, against half a second.
    assert price.high == math.inf and price.low == pytest.approx(0.5 / 0.00277 * 8, rel=0.02)


def test_costs_are_never_negative_and_a_fit_without_a_fixed_cost_goes_through_the_mean() -> None:
    model = found(totals((1, 8, 1.0), (2, 16, 4.0), variance=0.01))
    assert model.step_time.fixed == 0.0
    assert model.step_time.of_micro_batch(8) == pytest.approx((1 * 1 + 2 * 4) / (1 + 4), rel=1e-3)
    assert model.price(1).low == model.price(1).value == 0.0
    falling = found(totals((1, 8, 2.0), (2, 16, 1.5)))
    assert falling.step_time.of_micro_batch(8) == 0.0 and falling.step_time.per_sample == 0.0


def test_steps_that_contradict_the_law_widen_the_interval() -> None:
    agreeing = found(totals((1, 8, 0.6), (2, 16, 0.7), (3, 24, 0.8), (4, 32, 0.9), variance=1e-6)).price(1)
    bent = found(totals((1, 8, 0.6), (2, 16, 0.73), (3, 24, 0.77), (4, 32, 0.9), variance=1e-6)).price(1)
    assert bent.high - bent.low > 5 * (agreeing.high - agreeing.low)


def test_the_interval_is_fiellers() -> None:
    """Against brute force: the ratios r that top - r bottom, a normal variable, does not reject at 95 %."""
    error = 0.01
    price = found([Observation(0.9, error**2, 0, 3, 24), Observation(0.5, error**2, 1, 1, 8)]).price(1)
    c, variance = 0.3, error**2 / 9
    fixed = 0.5 - c

    def rejected(samples: float) -> bool:
        r = samples / 8
        return abs(fixed - r * c) > 1.959964 * math.sqrt(error**2 + (1 + r) ** 2 * variance)

    inside = [k / 1000 for k in range(0, 20_000) if not rejected(k / 1000)]
    assert (price.low, price.high) == (pytest.approx(min(inside), abs=0.01), pytest.approx(max(inside), abs=0.01))


def test_the_median_has_the_standard_error_that_resampling_finds() -> None:
    rng = random.Random(1)
    medians, errors = [], []
    for _ in range(400):
        middle, variance = typical([rng.expovariate(1.0) for _ in range(48)])
        medians.append(middle)
        errors.append(math.sqrt(variance))
    assert statistics.mean(medians) == pytest.approx(math.log(2), rel=0.03)
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(medians), rel=0.15)


# -- the running estimate


@dataclass(frozen=True)
class Machine:
    """Steps of known costs: heavy-tailed jitter, stalls, pauses of 10 s now and then, seconds of compilation."""

    fixed: float = 0.02
    per_micro_batch: float = 0.001
    per_sample: float = 0.001
    world: int = 2
    jitter: float = 0.05

    def limits(self) -> BatchLimits:
        return BatchLimits(world=self.world, micro_batch=8)

    def lap(self, plan: BatchPlan, rng: random.Random) -> Lap:
        def jittered(seconds: float) -> float:
            heavy = rng.paretovariate(2.5) if rng.random() < 0.05 else 1.0
            return seconds * math.exp(rng.gauss(0.0, self.jitter)) * heavy

        pieces = plan.pieces(plan.first_sample % plan.world)
        each = [jittered(self.per_micro_batch + self.per_sample * samples) for samples in pieces]
        seconds = sum(each) + jittered(self.fixed)
        seconds += 5.0 * (plan.step < 2) + 10.0 * (plan.step % 50 == 49)
        seconds += rng.expovariate(0.5) if rng.random() < 0.03 else 0.0
        return Lap(seconds, sum(each[1:-1]))

    def run(
        self, batch: Callable[[int], int], steps: int, seed: int, vary: bool = False, fewest: int = 1
    ) -> tuple[Throughput, dict]:
        rng, limits = random.Random(seed), self.limits()
        model = Throughput(limits, fewest)
        state, position = model.init(), 0
        for step in range(steps):
            plan = split(step=step, first_sample=position, global_batch=batch(step), limits=limits, measure=True)
            plan = varied(plan, limits) if vary and step % 8 == 4 else plan
            position = plan.last_sample
            state = model.update(state, plan, self.lap(plan, rng))
        return model, state


CASES = {
    "accumulating": (Machine(), lambda step: 64, 100, False, 1, 0.02 / 0.009 * 16),
    "hardly any fixed cost": (Machine(fixed=0.0002), lambda step: 64, 100, False, 1, 0.0002 / 0.009 * 16),
    "large fixed cost": (Machine(fixed=0.5), lambda step: 64, 100, False, 1, 0.5 / 0.009 * 16),
    "a growing batch": (Machine(), lambda step: 16 if step < 50 else 32, 100, False, 1, 0.02 / 0.009 * 16),
    "one micro-batch, varied": (Machine(), lambda step: 16, 400, True, 1, 0.02 / 0.009 * 16),
    "half a micro-batch, varied": (Machine(), lambda step: 8, 400, True, 1, 0.021 / 0.001 * 2),
    "one rank that measures": (Machine(world=1), lambda step: 32, 100, False, 2, 0.02 / 0.009 * 8),
}


@pytest.mark.parametrize("case", CASES)
def test_known_costs_are_recovered_without_bias_and_the_interval_covers(case: str) -> None:
    machine, batch, steps, vary, fewest, truth = CASES[case]
    prices = []
    for seed in range(200):
        model, state = machine.run(batch, steps, seed, vary, fewest)
        price = model.price(state, batch(steps))
        assert price is not None and price.low <= price.value <= price.high
        prices.append(price)
    assert statistics.median(price.value for price in prices) == pytest.approx(truth, rel=0.05, abs=0.2)
    covered = sum(price.low <= truth <= price.high for price in prices) / len(prices)
    assert covered >= 0.92
    if not vary:
        wide = statistics.median(price.high - price.low for price in prices)
        assert all(price.resolved for price in prices) and wide < 0.3 * truth + 1.0


def test_full_micro_batches_one_a_rank_do_not_tell_until_some_are_split() -> None:
    plain, state = Machine().run(lambda step: 16, 200, seed=1)
    assert plain.price(state, 16) is not None and plain.price(state, 16).high == math.inf
    split_now_and_then, state = Machine().run(lambda step: 16, 200, seed=1, vary=True)
    # At the full micro-batch the interval holds both the price of growing and that of shrinking.
    price = split_now_and_then.price(state, 16)
    assert price is not None and price.low < 0.02 / 0.009 * 16 < 0.021 / 0.001 * 2 < price.high


def test_micro_batches_that_have_to_be_whole_have_one_price_only() -> None:
    limits = BatchLimits(world=2, micro_batch=8, rounding="whole")
    _, state = Machine().run(lambda step: 32 if step % 2 else 16, 200, seed=1)
    price = Throughput(limits).price(state, 16)
    assert price == Throughput(limits).price(state, 32)


def test_the_first_two_steps_of_a_split_are_set_aside_in_each_process() -> None:
    model = Throughput(BatchLimits(world=1, micro_batch=8))
    state, plans = model.init(), [split_at(step) for step in range(30)]
    for plan in plans[:12]:
        state = model.update(state, plan, Lap(9.0 if plan.step < 2 else 0.5, 0.2))
    assert [lap for one in state["splits"] for lap in one["laps"]] == [[0.5, 0.2]] * 10
    state = model.restored(json.loads(json.dumps(state)))
    for plan in plans[12:16]:
        state = model.update(state, plan, Lap(9.0 if plan.step < 14 else 0.5, 0.2))
    assert [lap for one in state["splits"] for lap in one["laps"]] == [[0.5, 0.2]] * 12


def split_at(step: int, global_batch: int = 32, world: int = 1) -> BatchPlan:
    limits = BatchLimits(world=world, micro_batch=8)
    return split(step=step, first_sample=32 * step, global_batch=global_batch, limits=limits, measure=True)


def test_other_hardware_is_followed_within_the_step_times_kept() -> None:
    model = Throughput(BatchLimits(world=1, micro_batch=8))
    state = model.init()
    for step in range(200 + KEPT):
        state = model.update(state, split_at(step), Lap(*((0.7, 0.2) if step < 200 else (0.45, 0.2))))
    assert model.value(state).step_time.fixed == pytest.approx(0.05, rel=1e-3)  # 0.3 before
    assert len(state["splits"][0]["laps"]) == KEPT


def test_a_split_of_long_ago_fades_and_is_forgotten() -> None:
    model = Throughput(BatchLimits(world=1, micro_batch=8))
    state = model.init()
    for step in range(40):
        state = model.update(state, split_at(step, 24), Lap(0.5, 0.2 + 0.01 * (step % 5)))
    known = model.value(state).covariance[1][1]
    for step in range(2_000, 2_040):
        state = model.update(state, split_at(step, 8 * 5), Lap(math.inf, 0.0))  # no step time, and nothing changes
    assert model.value(state).covariance[1][1] == known
    state = model.update(state, split_at(2_040, 40), Lap(1.0, 0.8))
    assert model.value(state).covariance[1][1] == pytest.approx(known * (1 + 2_001 / 512), rel=0.01)
    state = model.update(state, split_at(9_000, 40), Lap(1.0, 0.8))
    assert [one["shape"] for one in state["splits"]] == [[5, 40, 8, 8]]


def test_another_number_of_ranks_begins_anew() -> None:
    model, state = Machine().run(lambda step: 64, 50, seed=0)
    assert model.restored(json.loads(json.dumps(state)))["splits"]
    assert Throughput(BatchLimits(world=4, micro_batch=8)).restored(state) == {"world": 4, "splits": []}
    assert model.restored(None) == model.init()


def test_nothing_is_said_before_enough_steps() -> None:
    model, state = Machine().run(lambda step: 64, 9, seed=0)
    assert model.price(state, 64) is None and model.value(state) is None


def test_update_leaves_the_state_it_was_given_alone() -> None:
    model, state = Machine().run(lambda step: 64, 20, seed=0)
    before = json.dumps(state)
    model.update(state, split_at(20, 64, 2), Lap(1.0, 0.5))
    assert json.dumps(state) == before


def test_a_split_teaches_until_it_was_timed_as_often_as_is_kept() -> None:
    model, state = Machine().run(lambda step: 16, 600, seed=0, vary=True)
    limits = Machine().limits()
    plan = split(step=604, first_sample=0, global_batch=16, limits=limits, measure=True)
    assert not model.teaches(state, varied(plan, limits))
    other = split(step=604, first_sample=0, global_batch=32, limits=limits, measure=True)
    assert model.teaches(state, varied(other, limits))


def test_a_price_is_that_of_the_policies() -> None:
    assert isinstance(found(totals((1, 8, 0.6), (4, 32, 0.9))).price(2), Price)


# -- ranks


def test_luck_of_many_ranks_does_not_count_as_the_cost_of_a_micro_batch() -> None:
    """64 equal ranks with much jitter: a step waits for the slowest, and one more micro-batch costs the mean."""
    rng = random.Random(3)
    plans = [split_at(step, 32 * 64, 64) for step in range(64)]
    ranks = [[[0.01 * math.exp(rng.gauss(0, 0.2)) for _ in range(4)] for _ in plans] for _ in range(64)]
    seconds = [0.05 + max(sum(rank[k]) for rank in ranks) for k in range(64)]
    laps = [[Lap(seconds[k], sum(rank[k][1:-1])) for k in range(64)] for rank in ranks]
    told = together(plans, laps)
    assert all(one == told[0] for one in told)
    model = Throughput(BatchLimits(world=64, micro_batch=8))
    state = model.init()
    for plan, lap in zip(plans, told[0]):
        state = model.update(state, plan, lap)
    assert model.value(state).step_time.of_micro_batch(8) == pytest.approx(0.0102, rel=0.06)
    unlucky = statistics.mean(max(lap[k].quiet for lap in laps) for k in range(64)) / 2
    assert unlucky > 1.2 * 0.0102


def test_the_typically_slowest_rank_tells_the_quiet_time_of_each_split() -> None:
    plans = [split_at(step, 32 if step % 2 else 64, 2) for step in range(12)]
    fast, slow = ([Lap(1.0, 0.1 * cost + 0.001 * step) for step in range(12)] for cost in (1, 2))
    slow[3], fast[5] = Lap(1.0, 0.01), Lap(math.inf, 0.0)
    slow[5] = Lap(math.inf, 0.0)
    told = together(plans, [fast, slow])
    assert told[0] == told[1] == slow


def together(plans: list[BatchPlan], laps: list[list[Lap]]) -> list[list[Lap]]:
    """What every rank is told: of_slowest on threads that meet wherever the largest is asked for."""
    meeting, said = threading.Barrier(len(laps)), [[] for _ in laps]

    def on(rank: int) -> list[Lap]:
        def slowest(values: list[float]) -> list[float]:
            said[rank] = values
            meeting.wait(10)
            found = [max(column) for column in zip(*said, strict=True)]
            meeting.wait(10)
            return found

        return of_slowest(plans, laps[rank], slowest)

    with ThreadPoolExecutor(len(laps)) as pool:
        return list(pool.map(on, range(len(laps))))
