"""Counting: progress, durations, budgets and the counts that people write."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adabatch.progress import Budget, Duration, Progress, parse_count


def test_progress_advances_by_what_a_step_consumed() -> None:
    progress = Progress().advance(samples=16, tokens=900).advance(samples=24, tokens=1000)
    assert progress == Progress(steps=2, samples=40, tokens=1900)
    assert [progress.in_unit(unit) for unit in ("steps", "samples", "tokens")] == [2, 40, 1900]
    assert Progress(**progress.to_dict()) == progress


def test_progress_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Progress().steps = 1  # type: ignore[misc]


@pytest.mark.parametrize(("samples", "tokens"), [(0, 0), (-1, 0), (8, -1)])
def test_a_step_consumes_samples(samples: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Progress().advance(samples=samples, tokens=tokens)


def test_progress_is_not_counted_in_seconds() -> None:
    with pytest.raises(ValueError, match="'seconds'"):
        Progress().in_unit("seconds")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (1500, 1500),
        (1e12, 10**12),
        ("1500", 1500),
        ("1_500", 1500),
        ("12,345,678", 12_345_678),
        ("1.5k", 1500),
        (" 250 B ", 250 * 10**9),
        ("0.000000000001T", 1),
        ("2.50m", 2_500_000),
        ("0", 0),
    ],
)
def test_parse_count_reads(text: str | int | float, count: int) -> None:
    parsed = parse_count(text)
    assert parsed == count
    assert type(parsed) is int


@pytest.mark.parametrize(
    "text",
    ["", "k", "1,5k", "1__0", "-3", -3, 1.5, "1.5", "0.0001k", 1e-9, float("nan"), float("inf"), True, None, "3 x"],
)
def test_parse_count_refuses_what_is_no_whole_count(text: object) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_count(text)  # type: ignore[arg-type]


@given(st.integers(0, 10**18), st.sampled_from([("k", 3), ("M", 6), ("b", 9), ("T", 12)]))
def test_a_count_with_a_suffix_is_exact(count: int, suffix: tuple[str, int]) -> None:
    letter, power = suffix
    whole, fraction = divmod(count, 10**power)
    assert parse_count(f"{whole}.{fraction:0{power}d}{letter}") == count


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("120k samples", 120_000, "samples"),
        ("1 step", 1, "steps"),
        ("2.5B tokens", 2_500_000_000, "tokens"),
        ("0.5 seconds", 0.5, "seconds"),
    ],
)
def test_durations_are_read_with_their_unit(text: str, value: float, unit: str) -> None:
    assert Duration.parse(text) == Duration(value, unit)
    assert Duration.parse(str(Duration.parse(text))) == Duration(value, unit)


@pytest.mark.parametrize("text", ["120k", "samples", "-1 steps", "5 epochs", "1.5 steps"])
def test_durations_without_a_known_unit_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"unit|whole"):
        Duration.parse(text)


def test_durations_of_different_units_do_not_compare() -> None:
    assert Duration(1, "samples") < Duration(2, "samples")
    assert not Duration(2, "samples") < Duration(2, "samples")
    with pytest.raises(ValueError, match="samples with tokens"):
        assert Duration(1, "samples") < Duration(2, "tokens")
    with pytest.raises(ValueError, match="negative"):
        Duration(float("nan"), "steps")
    with pytest.raises(ValueError, match="epochs"):
        Duration(1, "epochs")


@pytest.mark.parametrize(
    ("budget", "progress", "left"),
    [
        (Budget(samples=1000), Progress(150, 300), 700),
        (Budget(samples=1000), Progress(9, 1000), 0),
        (Budget(samples=1000), Progress(9, 1200), 0),
        (Budget(tokens=1000), Progress(1, 10, 640), 6),  # 360 tokens of 64 each: 5.6 samples
        (Budget(samples=12, tokens=1000), Progress(1, 10, 640), 2),
        (Budget(), Progress(10**6, 10**9, 10**12), float("inf")),
    ],
)
def test_a_budget_says_how_many_samples_remain(budget: Budget, progress: Progress, left: float) -> None:
    assert budget.left(progress, tokens_per_sample=64) == left


@pytest.mark.parametrize("bounds", [{"samples": 0}, {"tokens": -1}])
def test_a_budget_of_nothing_is_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"stop.{next(iter(bounds))} must be at least 1"):
        Budget(**bounds)
