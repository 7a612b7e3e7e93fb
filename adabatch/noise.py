"""From measured windows to a running noise scale with a confidence interval.

One window of K groups yields unbiased readings of G^2 (the squared norm of the true gradient) and of S (the trace of
one sample's gradient covariance). Their averages are divided last: the noise scale is S / G^2, in samples, with
Fieller's interval. Everything here is pure; the state is a dict of numbers and lists that JSON keeps unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adabatch.alignment import Alignment

# Blocks of one sliding memory: fewer make Student's quantile wide, and more buy nothing.
MOST_BLOCKS = 32
# A memory holds at least so many steps, to have blocks to compare, and otherwise at most this share of a run.
FEWEST_STEPS, LARGEST_SHARE = 16, 0.05
# With fewer blocks than this, their variance is too uncertain to close an interval.
FEWEST_BLOCKS = 8
# How much longer the history is that sizes the memory: an estimate must not choose its own window.
SIZING = 8
# Size of the history's blocks beyond the memory, as a share of the memory.
COARSE = 0.25
# Windows keep their weight in the averages until the batch is so many times larger or smaller than that.
STEADY = 3.0
# Squared norms above this are no measurement: sums of their squares would leave the range of floats.
LARGEST = 1e120
# The name of the view that every measurement has, and of the one in which single examples are measured.
EUCLIDEAN, NORM_LAYERS = "euclidean", "norm_layers"

# A block holds sums over neighbouring measured windows: of the weight w, 1, N, the samples of training since the
# measured window before, w G^2, w S and a reading of the variance of w G^2.
WEIGHT, STEPS, SAMPLES, SPAN, SIGNAL, NOISE, VARIANCE = range(7)

Block = list[float]
Blocks = list[Block]
State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The group norms of one window: all micro-batches of one optimizer step, over all ranks.

    Group k has mean gradient g_k and loss weight w_k > 0; p_k = w_k / sum(w), and g_bar = sum(p_k g_k) is the gradient
    of the step. Groups of weight 0 are left out.

    Attributes:
        samples: N, samples in the window.
        groups: K, groups with weight above 0.
        mean_square: |g_bar|^2.
        group_square: sum(p_k^2 |g_k|^2).
        weight_square: sum(p_k^2).
        weight: sum of the loss weights (samples, or tokens when the loss is a mean over tokens).
        loss: weighted mean loss of the window.
        finite: False when the window was skipped, and there is nothing to average.
        views: |g_bar|^2 and sum(p_k^2 |g_k|^2) in other lengths of a gradient than the Euclidean one, by name.
        drift: product of g_bar with the optimizer's average past gradient; None where it was not taken.
        clipped: whether g_bar was clipped afterwards; None where nothing clips.
        examples: the same window measured in groups of one example, in the view ``norm_layers``; None where it was not.
        alignments: how well updates of parts of the window fit the rest, by view (``sign``, ``muon``).
    """

    samples: int
    groups: int
    mean_square: float
    group_square: float
    weight_square: float
    weight: float
    loss: float
    finite: bool = True
    views: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    drift: float | None = None
    clipped: bool | None = None
    examples: Measurement | None = None
    alignments: Mapping[str, Alignment] = field(default_factory=dict)

    @property
    def signal(self) -> float:
        """G^2 = (|g_bar|^2 - sum(p_k^2 |g_k|^2)) / (1 - sum(p_k^2)), unbiased for |G|^2.

        Holds for groups of any size, weight and variance, as long as they are independent with one mean. It may be
        negative in one window, and is never clipped there: clipping before averaging biases the average.
        """
        return (self.mean_square - self.group_square) / (1.0 - self.weight_square)

    @property
    def noise(self) -> float:
        """S = N (|g_bar|^2 - G^2), unbiased for N tr Cov(g_bar): the noise of one sample."""
        return self.samples * (self.mean_square - self.signal)

    @property
    def measurable(self) -> bool:
        """Whether there are two groups to compare, and finite numbers to compare them by."""
        comparable = self.finite and self.groups >= 2 and self.weight_square < 1.0
        return comparable and self.samples * (self.mean_square + self.group_square) < LARGEST

    def seen_in(self, view: str) -> Measurement:
        """The same window measured by another length; nothing to average when it was not measured by that one.

        In the normalisation layers, single examples come first: they are the more groups.
        """
        if view == EUCLIDEAN:
            return self
        if view == NORM_LAYERS and self.examples is not None:
            return self.examples
        mean_square, group_square = self.views.get(view, (0.0, 0.0))
        groups = self.groups if view in self.views else 0
        return replace(self, mean_square=mean_square, group_square=group_square, groups=groups, views={})


@dataclass(frozen=True, slots=True)
class Estimate:
    """The noise scale as decisions use it.

    Attributes:
        signal: averaged G^2, corrected for finite data; may be 0 or negative.
        noise: averaged S, the noise of one sample.
        scale: noise / signal in samples; inf when the signal is not above 0.
        low, high: confidence interval of the scale. When the interval has no upper end, high is inf and low is a bound.
        resolved: whether high is finite.
        samples, steps: what was averaged over, the measured windows of the memory.
        memory: samples of training, measured or not, that the estimator now aims to look back over.
        geometry: the norm that signal and noise were measured in.
        span: samples of training, measured or not, that the averaged windows stand for; 0 where a ledger from before
            there was a difference does not tell.
    """

    signal: float
    noise: float
    scale: float
    low: float
    high: float
    resolved: bool
    samples: int
    steps: int
    memory: int
    geometry: str = EUCLIDEAN
    span: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A dict for JSON, which has no infinity: ``inf`` is written as None."""
        return {key: None if value == math.inf else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Estimate:
        """The inverse of :meth:`to_dict`."""
        return cls(**{key: math.inf if value is None else value for key, value in values.items()})


class NoiseEstimator:
    """A running estimate of the noise scale: pure ``init``, ``update`` and ``value`` with explicit state.

    S and G^2 are averaged over a sliding memory of measured windows: as many as bring the standard error of the
    averaged G^2 down to ``relative_error`` of it. That is judged over an eight times longer history, and moves by
    factors of 2, between 16 windows and 5 % of the run, in samples of training, measured or not; where the two cross,
    the 16 windows win, since fewer make no interval. The first half of a run so far is left out of it, too: a run
    starts with gradients like none that follow.

    The memory is chosen anew at every step, from sums over the whole history and from nothing else. Whatever they are,
    every order of the windows in the history is about equally likely, as long as nothing drifts: choosing biases
    nothing. Hysteresis would (G^2 low by 2 to 3 % while a run starts), since it keeps old windows where they were low.
    For the same reason a memory that grows takes back what it had let go.

    A window weighs what the batch was when it last became three times larger or smaller than the weight before, and
    the memory is a sum of weights. So the windows of a batch that follows the estimate weigh the same, and the memory
    holds the same number of them. Otherwise a G^2 that is low by chance raises the batch, and the windows after it
    weigh more for that and push it out sooner: weights by samples left the averaged G^2 high by 2 % where the batch was
    kept at a tenth of the estimate at every decision, by 7 % at a thirtieth (now 0.3 % and 1 to 3 %).

    Args:
        relative_error: standard error that the averaged G^2 should have, as a share of it.
        confidence: coverage of the interval.
        horizon: samples of the whole run; the memory is capped at 5 % of it. None: no cap.
        dataset_size: samples D of a data set that is read by epochs. Sampling without replacement makes G^2 low by
            S / D, which is added to the average. None: every sample is a fresh one.
        geometry: the norm in which the measurements were made; only passed on to the estimates.

    Raises:
        ValueError: when an argument is outside its range.
    """

    def __init__(
        self,
        *,
        relative_error: float = 0.25,
        confidence: float = 0.95,
        horizon: int | None = None,
        dataset_size: int | None = None,
        geometry: str = EUCLIDEAN,
    ) -> None:
        for name, value in (("relative_error", relative_error), ("confidence", confidence)):
            if not 0.0 < value < 1.0:
                raise ValueError(f"noise.{name} must lie between 0 and 1, got {value!r}")
        for name, count in (("horizon", horizon), ("dataset_size", dataset_size)):
            if count is not None and not count >= 1:
                raise ValueError(f"noise.{name} must be at least 1 sample, or None when unknown, got {count!r}")
        self.relative_error = relative_error
        self.confidence = confidence
        self.cap = math.inf if horizon is None else LARGEST_SHARE * horizon
        self.inverse_size = 0.0 if dataset_size is None else 1.0 / dataset_size
        self.geometry = geometry

    def init(self) -> State:
        """The state before anything was measured."""
        return {"memory": 0.0, "last": None, "total": [0, 0, 0, 0, 0.0, 0.0, 0.0], "recent": [], "older": []}

    def update(self, state: State, measurement: Measurement, last_sample: int | None = None) -> State:
        """The state after one more window; ``state`` itself when the window cannot be measured.

        Args:
            last_sample: samples of training up to the end of this window. What went by since the measured window
                before it counts as looked back over, too. None: this window came right after that one.
        """
        if not measurement.measurable:
            return state
        samples, signal = measurement.samples, measurement.signal
        end, weight, *before = state["last"] or (None, samples, samples, signal)
        if last_sample is None:
            last_sample = (end or 0) + samples
        if not weight <= STEADY * samples <= STEADY * STEADY * weight:
            weight = samples
        span = samples if end is None else max(last_sample - end, samples)
        variance = (weight / samples) ** 2 * _difference_variance(samples, signal, *before)
        row = [weight, 1, samples, span, weight * signal, weight * measurement.noise, variance]
        total = _sum(state["total"], row)
        memory = self._resize(state["memory"] or float(FEWEST_STEPS * weight), weight, total)
        aim = self._aim(memory, total)
        recent, older = _add(state["recent"], row, aim / MOST_BLOCKS), state["older"].copy()
        _balance(recent, older, aim)
        if _forget(older, total, SIZING * aim):
            total = [sum(column) for column in zip(*older, *recent, strict=True)]
        blocks = {"recent": _compact(recent), "older": _compact(older)}
        return {"memory": memory, "last": [last_sample, weight, samples, signal], "total": total, **blocks}

    def value(self, state: State) -> Estimate | None:
        """The estimate, or None before anything was measured."""
        blocks = state["recent"]
        if not blocks:
            return None
        weight, steps, samples, span, signal, noise, _ = (sum(column) for column in zip(*blocks, strict=True))
        signal, noise = signal / weight, noise / weight
        # In units of their own size, so that no power of a tiny or huge gradient leaves the range of floats.
        unit = abs(signal) + abs(noise) or 1.0
        spread = _spread(
            [block[WEIGHT] for block in blocks],
            [block[SIGNAL] / block[WEIGHT] / unit for block in blocks],
            [block[NOISE] / block[WEIGHT] / unit for block in blocks],
        )
        # 1/scale = G^2/S + 1/D: the correction for finite data shifts the signal by a multiple of the noise.
        signal, spread = signal + noise * self.inverse_size, spread.shifted(self.inverse_size)
        low, high = _interval(signal / unit, noise / unit, spread, self.confidence)
        high = high if len(blocks) >= FEWEST_BLOCKS else math.inf
        return Estimate(
            signal=signal,
            noise=noise,
            scale=max(noise, 0.0) / signal if signal > 0.0 else math.inf,
            low=low,
            high=high,
            resolved=high < math.inf,
            samples=samples,
            steps=steps,
            memory=round(max(self._aim(state["memory"], state["total"]) / weight, FEWEST_STEPS / steps) * span),
            geometry=self.geometry,
            span=span,
        )

    def memory(self, state: State) -> float:
        """Samples of training, measured or not, that the state aims to look back over; 0 before the first window."""
        total = state["total"]
        return self._aim(state["memory"], total) * total[SPAN] / total[WEIGHT] if total[STEPS] else 0.0

    def _aim(self, memory: float, total: Block) -> float:
        """Weight to average over: the chosen memory within its bounds, and never the first half of a run."""
        return min(memory, self._most(total), 0.5 * total[WEIGHT])

    def _most(self, total: Block) -> float:
        """The weight of the history, or that of the largest share of a run where it is less."""
        return total[WEIGHT] * min(1.0, self.cap / total[SPAN])

    def _resize(self, memory: float, weight: float, total: Block) -> float:
        """``memory`` times the power of 2 that brings it nearest to what the history asks for."""
        most = math.ceil(math.log2(self._most(total) / memory))
        wanted = max(self._wanted(total), FEWEST_STEPS * weight)
        return memory * 2.0 ** (min(round(math.log2(wanted / memory)), most) if wanted < math.inf else most)

    def _wanted(self, total: Block) -> float:
        """Weight after which the averaged G^2 has the wanted relative error; inf while no signal is seen.

        The variance of one step's G^2 is measured, not taken from the formula 2 tr(Sigma^2) K/(K-1) / N^2: the two
        agree at low signal, and the measured one also has the 4 G'Sigma G / N term and heavy tails, and needs no d_eff.
        It comes from successive steps: these are several times as precise as differences of 32 blocks, and the steep
        fall of G^2 with which a run starts does not pass for noise, as it would in a plain second moment.
        """
        signal = (total[SIGNAL] + total[NOISE] * self.inverse_size) / total[WEIGHT]
        if signal <= 0.0:
            return math.inf
        return total[VARIANCE] / total[WEIGHT] / signal / signal / self.relative_error**2


@lru_cache(maxsize=1024)
def student_quantile(probability: float, freedom: float) -> float:
    """The quantile of Student's t for 0.5 <= ``probability`` < 1 and ``freedom`` >= 1, not necessarily whole.

    With t = sqrt(freedom) tan(a) the distribution is 1/2 + c * integral from 0 to a of cos^(freedom - 1). That is
    concave in a, so that Newton's steps from 0 rise to the solution without overshooting it.
    """
    if not (0.5 <= probability < 1.0 and freedom >= 1.0):
        raise ValueError(f"needs 0.5 <= probability < 1 and freedom >= 1, got {probability=} {freedom=}")
    log_ratio = math.lgamma(0.5 * (freedom + 1.0)) - math.lgamma(0.5 * freedom)
    wanted = (probability - 0.5) * math.sqrt(math.pi) / math.exp(log_ratio)
    angle = 0.0
    for _ in range(60):
        step = (wanted - _cosine_power_integral(angle, freedom - 1.0)) / math.cos(angle) ** (freedom - 1.0)
        angle += step
        if abs(step) <= 1e-13 * angle:
            break
    return math.sqrt(freedom) * math.tan(angle)


@dataclass(frozen=True, slots=True)
class _Spread:
    """Sampling variances of the averaged signal and noise, their covariance, and the degrees of freedom behind them."""

    signal: float
    noise: float
    both: float
    freedom: float

    def shifted(self, factor: float) -> _Spread:
        """The same for signal + ``factor`` * noise in the place of signal."""
        both = self.both + factor * self.noise
        return _Spread(self.signal + factor * (self.both + both), self.noise, both, self.freedom)


def _spread(sizes: list[int], signals: list[float], noises: list[float]) -> _Spread:
    """Variances of the size-weighted means, from successive differences of block means.

    Neighbours differ little by drift, so a trend within the memory does not pass for noise. A difference of blocks of
    n and m samples has variance c (1/n + 1/m) when c is the variance of one sample; each is weighted by the samples
    that it speaks for, so that blocks of equal size may also have unequal variances. The degrees of freedom are
    Satterthwaite's with the correlation of neighbouring differences, 2 (J-1)^2 / (3J - 4) for J equal blocks.
    """
    if len(sizes) < 2:
        return _Spread(math.inf, math.inf, 0.0, 1.0)
    signal = noise = both = mass = squares = 0
    for i in range(1, len(sizes)):
        left, right = sizes[i - 1], sizes[i]
        weight, x, y = left * right, signals[i] - signals[i - 1], noises[i] - noises[i - 1]
        signal += weight * x * x
        noise += weight * y * y
        both += weight * x * y
        mass += left + right
        squares += (left + right) ** 2 + (2 * sizes[i - 2] * right if i > 1 else 0)
    total = float(mass * sum(sizes))
    return _Spread(signal / total, noise / total, both / total, mass * mass / squares)


def _interval(signal: float, noise: float, spread: _Spread, confidence: float) -> tuple[float, float]:
    """Fieller's confidence interval of noise / signal, cut to [0, inf].

    It is the set of ratios R for which signal * R - noise is within t standard errors of 0. When that set has no upper
    end, the lower one comes from 1/R, which is then an interval around 0; a negative signal bounds no more than a
    zero one would, so that bad luck does not pass for a huge scale.

    By that, a 1/R within t standard errors of 0 is missed in one way only, by a signal that is too large. Such R are
    held against the one-sided t; otherwise the interval would hold the truth in 97.5 % of all cases where it should in
    95 % (after hep-ex/9910041).
    """
    if math.isinf(spread.signal):
        return 0.0, math.inf
    signal = max(signal, 0.0)
    two_sided = student_quantile(0.5 + 0.5 * confidence, spread.freedom) ** 2
    one_sided = student_quantile(max(confidence, 0.5), spread.freedom) ** 2
    low, high = _fieller(signal, noise, spread, two_sided)
    near, _ = _fieller(0.0, noise, spread, one_sided)
    return low, min(high, max(_fieller(signal, noise, spread, one_sided)[1], near))


def _fieller(signal: float, noise: float, spread: _Spread, t2: float) -> tuple[float, float]:
    """The lowest and the highest R >= 0 with (signal * R - noise)^2 <= t2 times its variance, for signal >= 0."""
    cross = noise * signal - t2 * spread.both
    signal_left = signal * signal - t2 * spread.signal
    noise_left = noise * noise - t2 * spread.noise
    root = math.sqrt(max(cross * cross - signal_left * noise_left, 0.0))
    if signal_left > 0.0:
        return max((cross - root) / signal_left, 0.0), max((cross + root) / signal_left, 0.0)
    if noise <= 0.0 or noise_left <= 0.0:
        return 0.0, math.inf
    return (noise_left / (cross + root) if cross + root > 0.0 else 0.0), math.inf


def _difference_variance(samples: int, signal: float, last_samples: int, last_signal: float) -> float:
    """The variance c of N G^2, read from two steps whose G^2 have the variances c / N^2."""
    return (signal - last_signal) ** 2 / (1.0 / samples**2 + 1.0 / last_samples**2)


def _add(blocks: Blocks, row: Block, size: float) -> Blocks:
    """The blocks with one more at the end, joined to the newest while that weighs less than ``size``."""
    if blocks and blocks[-1][WEIGHT] < size:
        return [*blocks[:-1], _sum(blocks[-1], row)]
    return [*blocks, row]


def _balance(recent: Blocks, older: Blocks, aim: float) -> None:
    """Move blocks between the two lists, so that ``recent`` weighs ``aim`` or little less.

    The lists are changed, the blocks never: states share them.
    """
    weight, steps = _total(recent, WEIGHT), _total(recent, STEPS)
    while weight > aim and steps - recent[0][STEPS] >= FEWEST_STEPS:
        block = recent.pop(0)
        weight, steps = weight - block[WEIGHT], steps - block[STEPS]
        older[:] = _add(older, block, COARSE * aim)
    while older and weight + older[-1][WEIGHT] <= aim:
        recent.insert(0, older.pop())
        weight += recent[0][WEIGHT]


def _forget(older: Blocks, total: Block, most: float) -> bool:
    """Drop the oldest blocks beyond a weight of ``most``, but for the steps that a sizing needs; whether any went."""
    weight, steps, *_ = total
    while older and weight > most and steps - older[0][STEPS] >= SIZING * FEWEST_STEPS:
        block = older.pop(0)
        weight, steps = weight - block[WEIGHT], steps - block[STEPS]
    return steps < total[STEPS]


def _compact(blocks: Blocks) -> Blocks:
    """The blocks, joined in pairs when they are too many; the newest, which is still filling, stays as it is."""
    if len(blocks) <= MOST_BLOCKS:
        return blocks
    *closed, newest = blocks
    odd = len(closed) % 2
    pairs = zip(closed[odd::2], closed[odd + 1 :: 2], strict=True)
    return [*closed[:odd], *(_sum(*pair) for pair in pairs), newest]


def _total(blocks: Blocks, column: int) -> float:
    return sum([block[column] for block in blocks])


def _sum(left: Block, right: Block) -> Block:
    return [a + b for a, b in zip(left, right, strict=True)]


def _cosine_power_integral(angle: float, power: float) -> float:
    """The integral of cos^power from 0 to ``angle``, by Simpson's rule in 64 pieces."""
    inner = math.fsum((4.0 if i % 2 else 2.0) * math.cos(i * angle / 64) ** power for i in range(1, 64))
    return (1.0 + inner + math.cos(angle) ** power) * angle / 192.0
