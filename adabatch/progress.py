"""How far a run has come, in units that never mix: steps, samples, tokens, seconds.

A step is one optimizer step, a sample the independent unit of the data (an image, a sequence, an episode). The three
counters advance by what really happened; none is ever computed from another by a constant batch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

UNITS = ("steps", "samples", "tokens", "seconds")

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)(?:\.\d+)?"
_COUNT = re.compile(rf"\s*({_NUMBER})\s*([kmbt]?)\s*", re.IGNORECASE)
_DURATION = re.compile(rf"\s*({_NUMBER}\s*[kmbt]?)\s*(steps?|samples?|tokens?|seconds?)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters at a step boundary: optimizer steps taken, samples and tokens consumed."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0

    def advance(self, *, samples: int, tokens: int = 0) -> Progress:
        """The progress after one more step that consumed ``samples`` and ``tokens``."""
        if samples < 1 or tokens < 0:
            raise ValueError(f"a step consumes at least one sample and no negative tokens, got {samples=} {tokens=}")
        return Progress(self.steps + 1, self.samples + samples, self.tokens + tokens)

    def in_unit(self, unit: str) -> int:
        """The counter named ``unit`` (``steps``, ``samples`` or ``tokens``)."""
        if unit not in ("steps", "samples", "tokens"):
            raise ValueError(f"progress is counted in steps, samples or tokens, not in {unit!r}")
        return getattr(self, unit)

    def to_dict(self) -> dict[str, int]:
        return {"steps": self.steps, "samples": self.samples, "tokens": self.tokens}


@dataclass(frozen=True, slots=True)
class Duration:
    """An amount of training in one unit. Comparing two durations of different units raises."""

    value: float
    unit: str

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unknown unit {self.unit!r}; durations are in {', '.join(UNITS)}")
        if not self.value >= 0:
            raise ValueError(f"a duration cannot be negative, got {self.value} {self.unit}")

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read ``"120k samples"``, ``"2.5B tokens"``, ``"500 steps"`` or ``"90 seconds"``."""
        match = _DURATION.fullmatch(text)
        if match is None:
            raise ValueError(f"cannot read {text!r} as a duration; write a number and a unit, such as '120k samples'")
        unit = match.group(2).lower().rstrip("s") + "s"
        if unit == "seconds":
            return cls(float(_parse(match.group(1))), unit)
        return cls(parse_count(match.group(1)), unit)

    def __lt__(self, other: Duration) -> bool:
        if self.unit != other.unit:
            raise ValueError(f"cannot compare {self.unit} with {other.unit}")
        return self.value < other.value

    def __str__(self) -> str:
        return f"{self.value:,.10g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a run consumes: it is done at the first bound reached. ``None`` sets no bound.

    A bound in samples is met exactly: the last window is shortened to it.
    """

    samples: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"stop.{name} must be at least 1, got {value}")

    def left(self, progress: Progress, tokens_per_sample: int | None) -> float:
        """Samples that remain (``inf`` without a bound). Tokens are turned into samples, rounded up."""
        left = math.inf
        if self.samples is not None:
            left = self.samples - progress.samples
        if self.tokens is not None:
            left = min(left, math.ceil((self.tokens - progress.tokens) / (tokens_per_sample or 1)))
        return max(left, 0)


def parse_count(text: str | int | float) -> int:
    """Read a whole count such as ``1500``, ``"1_500"``, ``"1.5k"``, ``"250B"`` (decimal suffixes k, M, B, T).

    Raises:
        ValueError: when the text is no count or does not name a whole number.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise ValueError(f"cannot read {text!r} as a count; write a whole number such as 1500 or '1.5k'")
    value = _parse(text) if isinstance(text, str) else Fraction(text) if math.isfinite(text) else None
    if value is None or value < 0:
        raise ValueError(f"cannot read {text!r} as a count; write a whole number such as 1500 or '1.5k'")
    if value.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number")
    return value.numerator


def _parse(text: str) -> Fraction | None:
    """The number that ``text`` writes, exactly: counts stay exact at 1e12 and beyond."""
    match = _COUNT.fullmatch(text)
    if match is None:
        return None
    return Fraction(match.group(1).replace(",", "")) * _SUFFIXES[match.group(2).lower()]
