"""Which batch a run recommends: closed forms, brute force over interval ends, and runs that predict one another."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adabatch.report import recommend_text
from adabatch.report.recommend import NotMeasured, Recommendation, recommendation
from adabatch.report.tradeoff import Part, Quantity, Tradeoff
from adabatch.runlog import RunLog, read_metrics
from recorded_run import SyntheticRun, grown_run

# (low, value, high) of a noise scale; (low,) of an unresolved one.
Scale = tuple[float, ...]
Stretch = tuple[int, int, Scale | None]  # global batch, steps, noise scale
STEADY = (36.0, 48.0, 72.0)


def estimate(scale: Scale | None) -> dict[str, Any]:
    if scale is None:
        return {}
    if len(scale) == 1:  # the log holds a point estimate then, too; nobody may use it
        return dict(scale=12_345.0, scale_low=scale[0], scale_high=math.inf, resolved=False)
    return dict(scale=scale[1], scale_low=scale[0], scale_high=scale[2], resolved=True)


class Run:
    """Writes the records of a run whose steps take ``fixed + per_micro_batch * micro_batches`` seconds."""

    def __init__(self, folder: Path, *, world: int = 1, micro_batch: int = 8, every: int = 1, **config: Any) -> None:
        self.folder, self.world, self.micro_batch, self.every = folder, world, micro_batch, every
        self.config = {"policy": {"name": "fixed"}, "limits": {"micro_batch": micro_batch}, **config}
        self.fixed, self.per_micro_batch = 0.5, 0.25
        self.done = dict(step=0, samples=0, tokens=0, seconds=0.0)
        self.batch: int | None = None

    def write(self, *stretches: Stretch, end: bool = True, resumed_from: dict[str, Any] | None = None) -> Run:
        with RunLog(self.folder, loggers=["jsonl"]) as log:
            self.done = dict(resumed_from or self.done)
            log.start(dict(self.done, world=self.world, config=self.config))
            if resumed_from:
                log.resume(dict(self.done, from_step=self.done["step"], changes=[]))
            for batch, steps, scale in stretches:
                if self.batch not in (None, batch):
                    log.decision(dict(self.done, previous=self.batch, batch=batch, changed=True, reason="stage"))
                self.batch = batch
                for number in range(1, steps + 1):
                    self._step(batch)
                    if number % self.every == 0 or number == steps:
                        log.step(dict(self.done, **self._shape(batch), **estimate(scale), loss=1.0))
            if end:
                log.end(dict(self.done, reason="budget"))
        return self

    def _shape(self, batch: int) -> dict[str, int]:
        size = min(self.micro_batch, math.ceil(batch / self.world))
        pieces = math.ceil(batch / self.world / size)
        return dict(global_batch=batch, micro_batch=size, micro_batches=pieces, world=self.world)

    def _step(self, batch: int) -> None:
        self.done["step"] += 1
        self.done["samples"] += batch
        self.done["seconds"] += self.fixed + self.per_micro_batch * self._shape(batch)["micro_batches"]

    def advice(self, calibration: float | None = None) -> Recommendation:
        return recommendation(read_metrics(self.folder), calibration)


def ends(quantity: Quantity) -> tuple[float | None, float, float]:
    return quantity.value, quantity.low, quantity.high


def close(*values: float | None) -> Any:
    return tuple(None if value is None else pytest.approx(value, rel=1e-12, abs=1e-12) for value in values)


def words(advice: Recommendation) -> str:
    return recommend_text.to_text(advice)


# -- the trade-off


@pytest.mark.parametrize("every", [1, 7])
def test_a_constant_noise_scale_gives_the_closed_form(every: int, tmp_path: Path) -> None:
    """400 steps of 16 at b = 48 are 100 units of progress: S_min = 100, E_min = 4800."""
    advice = Run(tmp_path, every=every).write((16, 400, STEADY)).advice()
    run = advice.run.tradeoff
    assert ends(run.least_steps) == close(100, 6400 / 88, 6400 / 52)
    assert ends(run.least_samples) == close(4800, 6400 * 36 / 52, 6400 * 72 / 88)
    assert ends(run.critical_batch) == close(48, 36, 72) == ends(advice.now.critical)
    assert ends(advice.run.scale) == close(48, 36, 72)
    for batch in (1, 16, 48, 1000):
        steps, samples = run.steps_at(batch).value, run.samples_at(batch).value
        assert (steps, samples) == close(100 * (1 + 48 / batch), 4800 * (1 + batch / 48))
        assert (steps / 100 - 1) * (samples / 4800 - 1) == pytest.approx(1)
        assert ends(run.efficiency_at(batch)) == close(*(1 / (1 + batch / b) for b in (48, 36, 72)))
    assert ends(run.efficiency) == close(48 / 64, 36 / 52, 72 / 88)


def test_the_intervals_of_a_constant_noise_scale_are_the_closed_form_at_its_ends(tmp_path: Path) -> None:
    """Relative to what the run took: steps (1 + b/B)/(1 + b/16), samples (B + b)/(16 + b), rising in b below 16."""
    advice = Run(tmp_path).write((16, 400, STEADY)).advice()
    for row in advice.curve:
        batch = row.global_batch
        steps = [(1 + b / batch) / (1 + b / 16) for b in (48, 36, 72)]
        samples = [(batch + b) / (16 + b) for b in (48, 36, 72)]
        for found, (value, *two) in ((row.steps, steps), (row.samples, samples)):
            assert ends(found) == close(value, min(two), max(two))
        assert (ends(row.steps_now), ends(row.samples_now)) == (close(*ends(row.steps)), close(*ends(row.samples)))
    own = next(row for row in advice.curve if row.global_batch == 16)
    assert ends(own.steps) == ends(own.samples) == close(1, 1, 1), "what the run took is known"


def test_the_batches_for_the_data_efficiencies(tmp_path: Path) -> None:
    advice = Run(tmp_path).write((16, 400, STEADY)).advice()
    for outlook in (advice.now, advice.run):
        assert [choice.efficiency for choice in outlook.choices] == [0.5, 0.8, 0.9]
        for choice, ratio in zip(outlook.choices, (1, 1 / 4, 1 / 9)):
            assert ends(choice.wanted) == close(48 * ratio, 36 * ratio, 72 * ratio)
        assert [choice.global_batch for choice in outlook.choices] == [48, 16, 5]  # 12 is beyond sqrt(8 * 16)
    assert {48, 16, 5} <= {row.global_batch for row in advice.curve}


@pytest.mark.parametrize(("world", "batches"), [(1, [48, 16, 5]), (2, [48, 12, 6]), (4, [64, 12, 4])])
def test_the_ranks_can_make_what_is_recommended(world: int, batches: list[int], tmp_path: Path) -> None:
    advice = Run(tmp_path, world=world).write((32, 100, STEADY)).advice()
    assert [choice.global_batch for choice in advice.run.choices] == batches


def progress(scales: Sequence[int], batch: int) -> Iterator[Stretch]:
    """Runs through 4 units of progress at each noise scale: 4 (1 + b/B) steps, a whole number here."""
    for scale in scales:
        yield batch, 4 + 4 * scale // batch, (scale / 2, float(scale), scale * 2.0)


def test_runs_of_different_batches_predict_one_another(tmp_path: Path) -> None:
    """Independent of what the noise scale does on the way, and of a batch that follows it."""
    scales = [16 * k for k in (1, 4, 2, 8, 16, 32, 64)]
    small = Run(tmp_path / "small").write(*progress(scales, 16))
    large = Run(tmp_path / "large").write(*progress(scales, 64))
    followed = [stretch for scale in scales for stretch in progress([scale], 16 if scale < 64 else 64)]
    mixed = Run(tmp_path / "mixed").write(*followed)
    for one in (small, large, mixed):
        tradeoff = one.advice().run.tradeoff
        assert ends(tradeoff.critical_batch)[0] == pytest.approx(sum(scales) / len(scales))  # weighted by progress
        for batch, other in ((16, small), (64, large)):
            assert tradeoff.steps_at(batch).value == pytest.approx(other.done["step"])
            assert tradeoff.samples_at(batch).value == pytest.approx(other.done["samples"])
        assert (tradeoff.steps, tradeoff.samples) == (one.done["step"], one.done["samples"])


def test_now_and_over_the_run_are_two_things(tmp_path: Path) -> None:
    advice = Run(tmp_path).write(*progress([16, 1024], 16)).advice()
    assert advice.now.critical.value == pytest.approx(1024) and advice.run.critical.value == pytest.approx(520)
    row = next(row for row in advice.curve if row.global_batch == 1024)
    assert row.steps_now.value == pytest.approx(2 / (1 + 1024 / 16))
    assert row.samples_now.value == pytest.approx(2048 / (16 + 1024))
    shown = words(advice)
    assert "noise scale now: 1,024 [512, 2,048] samples." in shown and "Over the run: 520 [" in shown


def test_interval_ends_are_those_of_every_combination() -> None:
    """Brute force over the two ends of six parts, some without an upper end."""
    parts = [
        Part(160, 10, Quantity(20.0, 10.0, 50.0)),
        Part(640, 10, Quantity(90.0, 60.0, 300.0)),
        Part(160, 10, Quantity(None, 15.0, math.inf)),
        Part(1000, 30, Quantity(33.0, 30.0, 40.0)),
        Part(640, 10, Quantity(None, 100.0, math.inf)),
        Part(50, 5, Quantity(5.0, 0.0, 9.0)),
    ]
    tradeoff = Tradeoff.of(parts)

    def needed(critical: Sequence[float], batch: float) -> float:
        """Steps at ``batch`` for the progress of all parts."""
        return sum(
            part.samples / batch * (1.0 if math.isinf(c) else (batch + c) / (part.samples / part.steps + c))
            for part, c in zip(parts, critical)
        )

    def least(critical: Sequence[float]) -> tuple[float, float]:
        own = [part.samples / part.steps for part in parts]
        steps = sum(part.samples / (b + c) for part, b, c in zip(parts, own, critical))
        return steps, needed(critical, 1e-9) * 1e-9

    corners = list(itertools.product(*((part.critical.low, part.critical.high) for part in parts)))
    for batch in (1, 16, 30, 64, 500):
        steps = [needed(corner, batch) for corner in corners]
        assert (tradeoff.steps_at(batch).low, tradeoff.steps_at(batch).high) == close(min(steps), max(steps))
        samples = tradeoff.samples_at(batch)
        assert (samples.low, samples.high) == close(min(steps) * batch, max(steps) * batch)
    critical = [least(corner)[1] / least(corner)[0] for corner in corners]
    assert tradeoff.critical_batch.low == pytest.approx(min(critical), rel=1e-8)
    assert tradeoff.critical_batch.high == pytest.approx(max(critical), rel=1e-8)
    assert tradeoff.critical_batch.value is None and tradeoff.unresolved == 800


# -- what is not known


def test_an_unresolved_run_recommends_bounds_in_words_and_no_number(tmp_path: Path) -> None:
    advice = Run(tmp_path).write((16, 100, (40.0,))).advice()
    for outlook in (advice.now, advice.run):
        assert ends(outlook.critical) == (None, pytest.approx(40), math.inf)
        for choice, ratio in zip(outlook.choices, (1, 1 / 4, 1 / 9)):
            assert ends(choice.wanted) == (None, pytest.approx(40 * ratio), math.inf)
            assert choice.global_batch is None
    for row in advice.curve:  # between a noise scale of 40 and an endless one
        batch, known = row.global_batch, (1 + 40 / row.global_batch) / (1 + 40 / 16)
        assert ends(row.steps) == close(None, *sorted((known, 16 / batch)))
        assert ends(row.samples) == close(None, *sorted((known * batch / 16, 1)))
    shown = words(advice)
    assert "noise scale now: above 40 samples, unresolved." in shown and "Unresolved now" in shown
    rows = [line.split() for line in shown.splitlines()]
    for efficiency, bound in (("0.5", "40"), ("0.8", "10"), ("0.9", "4.4")):
        assert [efficiency, "above", bound, "above", bound, "-", "-", "-", "-"] in rows
    assert "->" not in shown.replace("; -> the nearest", "") and "12,345" not in shown
    data = json.loads(json.dumps(recommend_text.to_dict(advice), allow_nan=False))
    assert data["now"]["noise_scale"] == {"value": None, "low": 40.0, "high": None}
    assert data["now"]["resolved"] is data["over_the_run"]["resolved"] is False


def test_an_estimate_without_any_bound_is_called_unresolved(tmp_path: Path) -> None:
    advice = Run(tmp_path).write((16, 20, (0.0,))).advice()
    assert recommend_text.interval(advice.now.choices[0].wanted) == "unresolved"
    assert "noise scale now: unresolved." in words(advice)


@pytest.mark.parametrize(("bound", "steps", "valued"), [(1000.0, 10, True), (1000.0, 400, True), (50.0, 400, False)])
def test_a_value_over_the_run_needs_the_unresolved_part_to_matter_little(
    bound: float, steps: int, valued: bool, tmp_path: Path
) -> None:
    """The unresolved samples made progress n / (16 + C) with C from the bound to infinity."""
    advice = Run(tmp_path).write((16, 400, STEADY), (16, steps, (bound,))).advice()
    unresolved = 16 * steps

    def critical(known: float, other: float) -> float:
        least_steps = 6400 / (16 + known) + unresolved / (16 + other)
        return (6400 + unresolved - 16 * least_steps) / least_steps  # samples at batch 16 are E_min + 16 S_min

    low, value, endless = critical(36, bound), critical(48, bound), critical(48, math.inf)
    assert (endless / value <= 1.2) is valued, "the example is on the side that it is for"
    high = critical(72, math.inf)
    assert ends(advice.run.critical) == close(value if valued else None, low, high)
    assert advice.now.critical.value is None
    shown = words(advice)
    share = round(100 * unresolved / (6400 + unresolved))
    assert f"unresolved for {share} % of the samples" in shown
    assert ("takes their lower bounds" in shown) is valued and ("too wide for a single value" in shown) is not valued


def test_samples_before_the_first_estimate_are_left_out_and_counted(tmp_path: Path) -> None:
    advice = Run(tmp_path).write((16, 100, None), (16, 400, STEADY)).advice()
    assert (advice.run.tradeoff.steps, advice.measured) == (400, pytest.approx(0.8))
    assert "For 20 % of the samples no noise scale was known" in words(advice)


@pytest.mark.parametrize(
    ("config", "steps", "end", "message"),
    [
        ({"noise": {"enabled": False}}, 100, True, "noise.enabled=false; run it with noise=default"),
        ({"noise": {"enabled": True, "decide_every": 20}}, 10, False, "yet, after 10 steps: .* after 20 steps .*later"),
        ({"noise": {"enabled": True}}, 100, True, "holds no noise scale, after 100 steps: .* two groups"),
        ({}, 0, False, "yet, after 0 steps"),
    ],
)
def test_without_a_measurement_there_is_a_reason(
    config: dict[str, Any], steps: int, end: bool, message: str, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", **config).write((16, steps, None), end=end)
    with pytest.raises(NotMeasured, match=message) as caught:
        run.advice()
    assert str(tmp_path / "run") in str(caught.value)


def test_marks_of_the_estimate_are_passed_on(tmp_path: Path) -> None:
    """What the newest record says of its geometry and its guards."""
    run = Run(tmp_path).write((16, 40, STEADY))
    assert "geometry" not in words(run.advice()) and "hermometric" not in words(run.advice())
    path = tmp_path / "metrics.jsonl"
    marks = '"resolved":true,"geometry":"adam","guards":{"drift":0.1,"thermometric":"no drift is left"}'
    path.write_text(path.read_text().replace('"resolved":true', marks))
    shown = words(run.advice())
    assert "The noise scale (adam geometry) now: 48 [36, 72] samples." in shown
    assert "Thermometric now: no drift is left." in shown


def test_other_views_are_shown_for_the_record_and_alignments_by_what_they_are_of(tmp_path: Path) -> None:
    run = Run(tmp_path).write((16, 40, STEADY))
    assert "By other views" not in words(run.advice())
    path = tmp_path / "metrics.jsonl"
    sign = '"sign":{"scale":120,"low":90,"high":null,"resolved":false}'
    layer = '"layer:head":{"scale":9,"low":8,"high":10,"resolved":true}'
    adam = '"adam_sqrt":{"scale":80,"low":70,"high":95,"resolved":true}'
    marks = f'"resolved":true,"geometry":"muon","views":{{{sign},{layer},{adam}}}'
    path.write_text(path.read_text().replace('"resolved":true', marks))
    shown = words(run.advice())
    assert "The noise scale (alignment of Muon's steps of the hidden matrices) now: 48 [36, 72] samples." in shown
    others = "alignment of sign steps > 90 (unresolved); adam_sqrt geometry 80 [70, 95]."
    assert f"By other views now, for the record: {others}" in shown


# -- calibration


def test_a_calibration_multiplies_the_batches_and_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, policy={"name": "target_efficiency", "calibration": 2.0}).write((16, 400, STEADY))
    advice = run.advice()
    assert advice.calibrated and ends(advice.run.scale) == close(48, 36, 72)
    assert ends(advice.run.choices[0].wanted) == close(96, 72, 144) == ends(advice.now.choices[0].wanted)
    assert advice.run.tradeoff.least_steps.value == pytest.approx(6400 / (16 + 96))
    assert "ncalibrated" not in words(advice) and "the critical batch is 2 x it" in words(advice)
    other = run.advice(calibration=0.5)
    assert other.run.choices[0].wanted.value == pytest.approx(24)


def test_without_a_calibration_everything_is_marked(tmp_path: Path) -> None:
    run = Run(tmp_path).write((16, 400, STEADY))
    advice = run.advice()
    assert not advice.calibrated and recommend_text.to_dict(advice)["calibrated"] is False
    assert "(uncalibrated)" in words(advice) and "Uncalibrated: the critical batch is taken to be" in words(advice)
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"calibration must be above 0.*{bad}"):
            run.advice(calibration=bad)


# -- seconds and ranks


def test_seconds_follow_the_step_time_of_the_run(tmp_path: Path) -> None:
    """Steps of 0.5 s + 0.25 s per micro-batch of 8, on 2 ranks; noise scale 48 throughout."""
    advice = Run(tmp_path, world=2).write((16, 50, STEADY), (32, 50, STEADY)).advice()
    assert (advice.costs.model.fixed, advice.costs.of_micro_batches(1)) == pytest.approx((0.5, 0.75), rel=1e-6)
    least = 800 / (16 + 48) + 1600 / (32 + 48)
    for row in advice.curve:
        batch, steps = row.global_batch, least * (1 + 48 / row.global_batch)
        here = 0.5 + 0.25 * math.ceil(batch / 16)
        if batch >= 16:
            assert row.seconds.value == pytest.approx(steps * here)
            assert row.seconds.low == pytest.approx(row.steps.low * 100 * here)
        else:
            assert row.seconds is None, "less than a full micro-batch per rank was never timed"
        assert row.ranks == batch // 8
        if batch % 8 == 0:
            assert row.seconds_on_ranks.value == pytest.approx(steps * 0.75)
        elif batch < 8:
            assert row.seconds_on_ranks is None
    twelve = next(row for row in advice.curve if row.global_batch == 12)
    assert twelve.seconds_on_ranks.value == pytest.approx(least * (1 + 48 / 12) * 1.0), "1 rank runs 8 and 4"
    shown = words(advice)
    assert "A step on 2 ranks takes 500 ms + 250 ms per micro-batch of 8" in shown
    assert "assumes that a step with as many micro-batches takes no longer on more ranks" in shown


def test_the_batch_of_the_fewest_seconds_is_where_brute_force_finds_it(tmp_path: Path) -> None:
    advice = (
        Run(tmp_path, world=2).write((16, 50, (1800.0, 2400.0, 3000.0)), (32, 50, (1800.0, 2400.0, 3000.0))).advice()
    )
    fastest = advice.costs.fastest(advice.run.critical)
    seconds = {batch: (1 + 2400 / batch) * (0.5 + 0.25 * batch / 16) for batch in range(16, 2000)}
    assert fastest.value == pytest.approx(min(seconds, key=seconds.get), abs=1)
    assert (fastest.low, fastest.high) == pytest.approx((math.sqrt(32 * 1800), math.sqrt(32 * 3000)), rel=1e-6)
    small = Run(tmp_path / "small", world=2).write((16, 50, (1.0, 2.0, 3.0)), (32, 50, (1.0, 2.0, 3.0))).advice()
    assert ends(small.costs.fastest(small.run.critical)) == (16, 16, 16), "less than a micro-batch a rank is unknown"


def test_a_fixed_cost_of_nothing_is_no_root_of_a_negative_number(tmp_path: Path) -> None:
    advice = Run(tmp_path, world=2).write((16, 50, STEADY), (32, 50, STEADY)).advice()
    costs = replace(advice.costs, model=replace(advice.costs.model, fixed=-1e-17))
    assert ends(costs.fastest(advice.run.critical)) == (16, 16, 16)


def test_one_batch_alone_identifies_no_fixed_cost(tmp_path: Path) -> None:
    advice = Run(tmp_path, world=2).write((32, 100, STEADY)).advice()
    assert advice.costs.model is None and advice.costs.fastest(advice.run.critical) is None
    assert {row.global_batch for row in advice.curve if row.seconds} == {32}
    own = next(row for row in advice.curve if row.global_batch == 32)
    assert ends(own.seconds) == close(100, 100, 100)
    assert all(row.seconds_on_ranks is None for row in advice.curve), "no step of one micro-batch was timed"
    shown = words(advice)
    assert "not known: every timed step had 2 micro-batches of 8 a rank, so its fixed cost cannot be told" in shown
    # 16 samples a rank take a second: batch 48 is 3 ranks, and 3200 / (32 + 48) * (1 + 48 / 48) steps.
    assert "With 16 samples a rank as in this run, a step takes 1 s: batch 48 on 3 ranks would take 1 min 20 s" in shown


def test_the_share_of_a_rank_makes_whole_ranks(tmp_path: Path) -> None:
    """64 samples a rank; batch 48 is nearest to one rank of 64, which takes 100 * 2 * (1 + 48/64) / (1 + 48/128)."""
    shown = words(Run(tmp_path, world=2, micro_batch=32).write((128, 100, STEADY)).advice())
    assert "a step takes 1 s: batch 64 on 1 rank would take 2 min 07 s [" in shown


def test_one_micro_batch_a_rank_identifies_the_time_on_more_ranks(tmp_path: Path) -> None:
    advice = Run(tmp_path, world=2).write((16, 400, STEADY)).advice()
    assert advice.costs.model is None
    row = next(row for row in advice.curve if row.global_batch == 48)
    assert row.seconds is None and row.ranks == 6
    assert ends(row.seconds_on_ranks) == close(150, *(0.75 * 400 * (1 + b / 48) / (1 + b / 16) for b in (72, 36)))
    assert "With 8 samples a rank" not in words(advice)


def test_a_batch_between_full_micro_batches_costs_the_whole_of_its_last(tmp_path: Path) -> None:
    limits = {"micro_batch": 8, "rounding": "none"}
    scale = (40.0, 44.0, 50.0)
    advice = Run(tmp_path, world=2, limits=limits).write((16, 50, scale), (32, 50, scale)).advice()
    row = next(row for row in advice.curve if row.global_batch == 44)
    assert row.seconds.value == pytest.approx(100 * row.steps.value * (0.5 + 3 * 0.25))
    assert row.seconds_on_ranks.value == pytest.approx(100 * row.steps.value * 1.0), "5 ranks, some with two"


def test_two_halves_are_no_full_micro_batch(tmp_path: Path) -> None:
    """One rank that runs a batch of 8 as two micro-batches of 4, to have something to compare."""
    advice = Run(tmp_path, micro_batch=4, limits={"micro_batch": 8}).write((8, 400, STEADY)).advice()
    assert advice.facts["micro_batch"] == 8
    assert all(row.seconds_on_ranks is None for row in advice.curve)


def test_step_times_of_other_ranks_do_not_count(tmp_path: Path) -> None:
    """The run begins on 4 ranks and is resumed on 2."""
    Run(tmp_path, world=4).write((32, 50, STEADY), (64, 50, STEADY), end=False)
    saved = dict(step=100, samples=4800, tokens=0, seconds=87.5)
    advice = Run(tmp_path, world=2).write((64, 50, STEADY), resumed_from=saved).advice()
    assert (advice.costs.world, advice.costs.model, list(advice.costs.timed)) == (2, None, [64])
    row = next(row for row in advice.curve if row.global_batch == 64)
    assert row.seconds.value == pytest.approx(row.steps.value * 150 * 1.5)


def test_without_step_times_there_are_no_seconds(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.fixed = run.per_micro_batch = 0.0
    advice = run.write((16, 400, STEADY)).advice()
    assert all(row.seconds is None and row.seconds_on_ranks is None for row in advice.curve)
    assert "too few step times were recorded" in words(advice)
    flat = Run(tmp_path / "flat")
    flat.per_micro_batch = 0.0
    assert "do not tell a fixed cost" in words(flat.write((16, 50, STEADY), (32, 50, STEADY)).advice())


# -- runs that go on, were resumed, or are long past


def test_a_running_run_is_read_as_far_as_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path, every=16).write((16, 200, STEADY), end=False)
    running = run.advice()
    assert running.facts["ended"] is None and "no end record: it is still going on" in words(running)
    assert running.run.tradeoff.steps == 200
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind":"step","step":')  # in the middle of writing a line
    assert run.advice().run.tradeoff.steps == 200
    run.write((16, 200, STEADY))
    assert "no end record" not in words(run.advice())


def test_a_resumed_run_counts_each_sample_once(tmp_path: Path) -> None:
    run = Run(tmp_path).write((16, 100, STEADY), end=False)
    saved = dict(run.done)
    run.write((16, 60, (700.0, 800.0, 900.0)), end=False)
    advice = run.write((16, 300, STEADY), resumed_from=saved).advice()
    assert (advice.run.tradeoff.steps, advice.run.tradeoff.samples) == (400, 6400)
    assert ends(advice.run.critical) == close(48, 36, 72)
    assert read_metrics(tmp_path).superseded > 0


def test_a_run_of_any_policy_recommends(tmp_path: Path) -> None:
    """A grown, killed and resumed run; its noise scale rises from 14 to 114."""
    grown_run(tmp_path, samples=40_000)
    metrics = read_metrics(tmp_path)
    advice = recommendation(metrics)
    assert advice.facts["policy"] == "target_efficiency" and advice.facts["steps"] == metrics.steps[-1]["step"]
    assert 100 < advice.now.scale.value < 130
    assert 14 < advice.run.critical.low < advice.run.critical.high < 114
    assert advice.costs.model.fixed == pytest.approx(0.02, rel=0.3)
    assert advice.costs.model.of_micro_batch(8) == pytest.approx(0.03, rel=0.2)
    assert len(advice.curve) < 20


def test_a_run_without_a_configuration_is_enough(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, start=16, top=16, samples=4_000)
    with run.log() as log:
        run.train(log, run.samples)  # no start record
    advice = recommendation(read_metrics(tmp_path))
    assert (advice.facts["policy"], advice.facts["world"], advice.facts["micro_batch"]) == (None, 2, 8)
    assert words(advice).startswith(f"{tmp_path.name}: 2 ranks, 4,000 samples in 250 steps")


# -- measured calibrations


def calibration(sample: int, *, version: int = 1, **ratios: tuple[float | None, ...]) -> dict[str, Any]:
    found = {name: dict(zip(("value", "low", "high"), ends)) for name, ends in ratios.items()}
    return {"version": version, "step": sample // 16, "sample": sample, "ratios": found}


def test_the_furthest_calibration_in_the_geometry_that_decides_counts(tmp_path: Path) -> None:
    policy = {"name": "target_efficiency", "calibration": 5.0}
    run = Run(tmp_path, policy=policy).write((16, 400, STEADY))
    metrics = read_metrics(tmp_path)
    for record in metrics.steps:
        record["geometry"] = "adam"
    assert recommendation(metrics).calibration == 5.0
    rows = [
        calibration(3200, adam=(2.0, 1.5, 2.5), euclidean=(9.0, 8.0, 10.0)),
        calibration(1600, adam=(7.0, 6.0, 8.0)),
        calibration(6400, adam=(4.0, 3.0, None)),  # open
        calibration(6400, euclidean=(9.0, 8.0, 10.0)),  # another geometry
    ]
    (run.folder / "calibrations.json").write_text(json.dumps(rows), encoding="utf-8")
    advice = recommendation(metrics)
    assert ends(advice.now.critical) == close(96, 72, 144) and advice.calibrated
    assert "as calibrated at step 200, sample 3,200: 2 [1.5, 2.5]" in words(advice)
    assert recommend_text.to_dict(advice)["measured"]["sample"] == 3200
    given = recommendation(metrics, 3.0)
    assert given.calibration == 3.0 and given.facts["measured"] is None and "as calibrated" not in words(given)


def test_calibrations_that_cannot_be_read_are_no_ground_to_recommend_by(tmp_path: Path) -> None:
    run = Run(tmp_path).write((16, 400, STEADY))
    for text in ("{", "[1]", json.dumps([calibration(8, version=99)])):
        (tmp_path / "calibrations.json").write_text(text, encoding="utf-8")
        with pytest.raises(NotMeasured, match="move it away"):
            run.advice()
        assert run.advice(2.0).calibration == 2.0


# -- words and data


def test_everything_said_fits_any_terminal(tmp_path: Path) -> None:
    shown = words(Run(tmp_path, world=2).write((16, 50, STEADY), (32, 50, STEADY)).advice())
    assert shown.isascii()
    assert not any(line != line.rstrip() for line in shown.splitlines())


def test_the_short_form_has_the_batches_and_not_the_curve(tmp_path: Path) -> None:
    advice = Run(tmp_path).write((16, 400, STEADY)).advice()
    short = recommend_text.to_text(advice, curve=False)
    assert "Which batch?" in short and "48 [36, 72] -> 48" in short and "Trade-off" not in short
    assert set(short.splitlines()) < set(words(advice).splitlines()) | {""}


def test_the_data_say_the_same(tmp_path: Path) -> None:
    advice = Run(tmp_path, world=2).write((16, 50, STEADY), (32, 50, STEADY)).advice()
    data = json.loads(json.dumps(recommend_text.to_dict(advice), allow_nan=False))
    assert data["over_the_run"]["batches"][0]["wanted"] == {
        "value": pytest.approx(48),
        "low": pytest.approx(36),
        "high": pytest.approx(72),
    }
    assert [row["global_batch"] for row in data["curve"]] == sorted(row.global_batch for row in advice.curve)
    assert data["time"]["fixed"] == pytest.approx(0.5) and data["confidence"] == 0.95
    assert (data["global_batch"], data["world"], data["steps"]) == (32, 2, 100)


@pytest.mark.parametrize(
    ("value", "shown"), [(0.034, "0.03"), (1.0, "1.00"), (1.994, "1.99"), (2.04, "2.0"), (9.94, "9.9"), (47.2, "47")]
)
def test_multiples_have_as_many_digits_as_they_deserve(value: float, shown: str) -> None:
    assert recommend_text.factor(value) == shown


def test_no_torch_is_needed(tmp_path: Path) -> None:
    Run(tmp_path).write((16, 40, STEADY))
    program = (
        "import sys; from adabatch.cli import main; "
        f"status = main(['recommend', {str(tmp_path)!r}]); "
        "print(status, [m for m in ('torch', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
