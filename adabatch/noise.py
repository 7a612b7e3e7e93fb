"""From measured windows to a running noise scale with a confidence interval.

One window of K groups yields unbiased readings of G^2 (the squared norm of the true gradient) and of S (the trace of
one sample's gradient covariance). The noise scale is S / G^2, in samples. The two are averaged apart over a sliding
memory and divided last; the interval is Fieller's. Nothing here knows torch, and every function is pure: the
estimator's state is a dict of numbers and lists that survives JSON unchanged.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

# Blocks of one sliding memory: fewer make Student's quantile wide, and more buy nothing.
MOST_BLOCKS = 32
# A full memory never holds fewer steps than this, so that there are blocks to compare.
FEWEST_STEPS = 16
# With fewer blocks than this, their variance is too uncertain to close an interval.
FEWEST_BLOCKS = 8
# How much longer the memory is that sizes the memory: an estimate must not choose its own window.
SIZING = 8
# Blocks that have left the memory are joined to blocks of this share of it; each new one is an occasion to resize.
COARSE = 0.25
# The memory doubles when the wanted one is above the first multiple of it, and halves below the second. They lie a
# factor of 4 apart, so that the error of a sizing (about a third) moves nothing back and forth.
HYST = 0.5

# A block is the sums over neighbouring windows of N, 1, N G^2, N S, (N G^2)^2, N N G^2 and N^2.
SAMPLES, STEPS, SIGNAL, NOISE = range(4)

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
    """

    samples: int
    groups: int
    mean_square: float
    group_square: float
    weight_square: float
    weight: float
    loss: float
    finite: bool = True

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
        enough = self.finite and self.groups >= 2 and self.weight_square < 1.0
        return enough and math.isfinite(self.mean_square) and math.isfinite(self.group_square)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The noise scale as decisions use it.

    Attributes:
        signal: averaged G^2, corrected for finite data; may be 0 or negative.
        noise: averaged S, the noise of one sample.
        scale: noise / signal in samples; inf when the signal is not above 0.
        low, high: confidence interval of the scale. When the interval has no upper end, high is inf and low is a bound.
        resolved: whether high is finite.
        samples, steps: what was averaged over.
        memory: samples that the estimator now aims to average over.
        geometry: the norm that signal and noise were measured in.
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
    geometry: str = "euclidean"

    def to_dict(self) -> dict[str, Any]:
        """A dict for JSON, which has no infinity: ``inf`` is written as None."""
        return {key: None if value == math.inf else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Estimate:
        """The inverse of :meth:`to_dict`."""
        return cls(**{key: math.inf if value is None else value for key, value in values.items()})


class NoiseEstimator:
    """A running estimate of the noise scale: pure ``init``, ``update`` and ``value`` with explicit state.

    S and G^2 are averaged over a sliding memory, weighted by samples. The memory spans the samples of measured windows
    that bring the standard error of the averaged G^2 down to ``relative_error`` of it. That is judged over an eight
    times longer memory, and moves by factors of 2, between 16 steps and 5 % of the run; where the two cross, the 16
    steps win, since fewer make no interval.

    Args:
        relative_error: standard error that the averaged G^2 should have, as a share of it.
        confidence: coverage of the interval.
        horizon: samples of the whole run; the memory is capped at ``memory_share`` of it. None: no cap.
        dataset_size: samples D of a data set that is read by epochs. Sampling without replacement makes G^2 low by
            S / D, which is added to the average. None: every sample is a fresh one.
        memory_share: largest share of the run that the memory may span.
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
        memory_share: float = 0.05,
        geometry: str = "euclidean",
    ) -> None:
        shares = {"relative_error": relative_error, "confidence": confidence, "memory_share": memory_share}
        for name, value in shares.items():
            if not 0.0 < value < 1.0:
                raise ValueError(f"noise.{name} must lie between 0 and 1, got {value!r}")
        for name, count in (("horizon", horizon), ("dataset_size", dataset_size)):
            if count is not None and not count >= 1:
                raise ValueError(f"noise.{name} must be at least 1 sample, or None when unknown, got {count!r}")
        self.relative_error = relative_error
        self.confidence = confidence
        self.cap = math.inf if horizon is None else memory_share * horizon
        self.inverse_size = 0.0 if dataset_size is None else 1.0 / dataset_size
        self.geometry = geometry

    def init(self) -> State:
        """The state before anything was measured."""
        return {"memory": 0.0, "total": [0] * 7, "recent": [], "older": []}

    def update(self, state: State, measurement: Measurement) -> State:
        """The state after one more window; ``state`` itself when the window cannot be measured."""
        if not measurement.measurable:
            return state
        samples, signal = measurement.samples, measurement.samples * measurement.signal
        row = [samples, 1, signal, samples * measurement.noise, signal**2, samples * signal, samples**2]
        total = _sum(state["total"], row)
        memory = self._resize(state["memory"] or float(FEWEST_STEPS * samples), samples, total)
        aim = min(memory, self.cap)
        recent, older = _add(state["recent"], row, aim / MOST_BLOCKS), state["older"].copy()
        if not _retire(recent, older, aim):
            _recall(recent, older, aim)
        if _forget(older, total, SIZING * aim):
            total = [sum(column) for column in zip(*recent, *older, strict=True)]
        return {"memory": memory, "total": total, "recent": _compact(recent), "older": _compact(older)}

    def value(self, state: State) -> Estimate | None:
        """The estimate, or None before anything was measured."""
        blocks = state["recent"]
        if not blocks:
            return None
        samples, steps = _total(blocks, SAMPLES), _total(blocks, STEPS)
        signal, noise = _total(blocks, SIGNAL) / samples, _total(blocks, NOISE) / samples
        # In units of their own size, so that no power of a tiny or huge gradient leaves the range of floats.
        unit = abs(signal) + abs(noise) or 1.0
        spread = _spread(
            [block[SAMPLES] for block in blocks],
            [block[SIGNAL] / block[SAMPLES] / unit for block in blocks],
            [block[NOISE] / block[SAMPLES] / unit for block in blocks],
        )
        # 1/scale = G^2/S + 1/D: the correction for finite data shifts the signal by a multiple of the noise.
        signal, spread = signal + noise * self.inverse_size, spread.shifted(self.inverse_size)
        low, high = _interval(signal / unit, noise / unit, spread, 0.5 + 0.5 * self.confidence)
        if len(blocks) < FEWEST_BLOCKS:
            high = math.inf
        return Estimate(
            signal=signal,
            noise=noise,
            scale=max(noise, 0.0) / signal if signal > 0.0 else math.inf,
            low=low,
            high=high,
            resolved=high < math.inf,
            samples=samples,
            steps=steps,
            memory=round(max(min(state["memory"], self.cap), FEWEST_STEPS * samples / steps)),
            geometry=self.geometry,
        )

    def _resize(self, memory: float, batch: float, total: Block) -> float:
        """The memory times the power of 2 that comes nearest to what the longer memory asks for."""
        wanted = max(self._wanted(total, batch), FEWEST_STEPS * batch)
        most = math.ceil(math.log2(min(total[SAMPLES], self.cap) / memory))
        if wanted == math.inf:
            return memory * 2.0**most
        off = math.log2(wanted / memory)
        return memory * 2.0 ** min(round(off) if abs(off) > HYST else 0, most)

    def _wanted(self, total: Block, batch: float) -> float:
        """Samples after which the averaged G^2 has the wanted relative error; inf while no signal is seen.

        The variance c of one step's N G^2 around N times the average is measured, not taken from the formula
        2 tr(Sigma^2) K/(K-1): the two agree at low signal, and the measured one also has the 4 N G'Sigma G term and
        heavy tails, and needs no d_eff. It is the plain second moment over hundreds of steps, which is several times
        as precise as differences of 32 blocks, and to which a drift of G^2 adds some steps at most. In batches of B
        samples, the mean over M samples then has variance c / (B M), whatever batches c was measured at.
        """
        samples, steps, signal, noise, square, product, size_square = total
        mean, corrected = signal / samples, (signal + noise * self.inverse_size) / samples
        if corrected <= 0.0:
            return math.inf
        variance = (square - 2.0 * mean * product + mean * mean * size_square) / steps
        return variance / (corrected * self.relative_error) ** 2 / batch


def data_efficiency(batch: float, scale: float) -> float:
    """1 / (1 + batch / scale): the share of samples that a tiny batch would have needed. 1 when ``scale`` is inf."""
    _check_efficiency(batch, scale)
    return scale / (scale + batch) if scale < math.inf else 1.0


def step_efficiency(batch: float, scale: float) -> float:
    """1 / (1 + scale / batch): the share of steps that a huge batch would have needed. 0 when ``scale`` is inf."""
    _check_efficiency(batch, scale)
    return batch / (batch + scale)


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
    signal = noise = both = 0.0
    mass = squares = 0
    for i in range(1, len(sizes)):
        left, right = sizes[i - 1], sizes[i]
        x, y = signals[i] - signals[i - 1], noises[i] - noises[i - 1]
        weight = left * right
        signal += weight * x * x
        noise += weight * y * y
        both += weight * x * y
        mass += left + right
        squares += (left + right) ** 2 + (2 * sizes[i - 2] * right if i > 1 else 0)
    total = float(mass * sum(sizes))
    return _Spread(signal / total, noise / total, both / total, mass * mass / squares)


def _interval(signal: float, noise: float, spread: _Spread, probability: float) -> tuple[float, float]:
    """Fieller's confidence interval of noise / signal, cut to [0, inf].

    It is the set of ratios R for which signal * R - noise is within t standard errors of 0. When that set has no upper
    end, the lower bound comes from 1/R, which is then an interval around 0; a negative signal bounds no more than a
    zero one would, so that bad luck does not pass for a huge scale.
    """
    if math.isinf(spread.signal):
        return 0.0, math.inf
    t2 = student_quantile(probability, spread.freedom) ** 2
    cross = noise * max(signal, 0.0) - t2 * spread.both
    signal_left = signal * signal - t2 * spread.signal
    noise_left = noise * noise - t2 * spread.noise
    if signal > 0.0 and signal_left > 0.0:
        root = math.sqrt(max(cross * cross - signal_left * noise_left, 0.0))
        return max((cross - root) / signal_left, 0.0), max((cross + root) / signal_left, 0.0)
    if noise <= 0.0 or noise_left <= 0.0:
        return 0.0, math.inf
    if signal < 0.0:
        signal_left = -t2 * spread.signal
    largest = (cross + math.sqrt(max(cross * cross - signal_left * noise_left, 0.0))) / noise_left
    return (1.0 / largest if largest > 0.0 else 0.0), math.inf


def _add(blocks: Blocks, row: Block, size: float) -> Blocks:
    """The blocks with one more at the end, joined to the newest while that has fewer than ``size`` samples."""
    if blocks and blocks[-1][SAMPLES] < size:
        return [*blocks[:-1], _sum(blocks[-1], row)]
    return [*blocks, row]


def _retire(recent: Blocks, older: Blocks, aim: float) -> bool:
    """Move blocks beyond ``aim`` samples from ``recent`` to ``older``; whether there were any.

    The lists are changed, the blocks never: states share them.
    """
    samples = _total(recent, SAMPLES)
    if samples <= aim:
        return False
    steps = _total(recent, STEPS)
    while samples > aim and steps - recent[0][STEPS] >= FEWEST_STEPS:
        block = recent.pop(0)
        samples, steps = samples - block[SAMPLES], steps - block[STEPS]
        older[:] = _add(older, block, COARSE * aim)
    return True


def _recall(recent: Blocks, older: Blocks, aim: float) -> None:
    """Move blocks back from ``older`` as long as they fit into ``aim`` samples."""
    if older:
        samples = _total(recent, SAMPLES)
        while older and samples + older[-1][SAMPLES] <= aim:
            recent.insert(0, older.pop())
            samples += recent[0][SAMPLES]


def _forget(older: Blocks, total: Block, span: float) -> bool:
    """Drop the oldest blocks beyond ``span`` samples, but never below the steps that a sizing needs."""
    samples, steps, count = total[SAMPLES], total[STEPS], len(older)
    while older and samples > span and steps - older[0][STEPS] >= SIZING * FEWEST_STEPS:
        block = older.pop(0)
        samples, steps = samples - block[SAMPLES], steps - block[STEPS]
    return len(older) < count


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


def _cosine_power_integral(angle: float, power: float, pieces: int = 64) -> float:
    """The integral of cos^power from 0 to ``angle``, by Simpson's rule."""
    width = angle / pieces
    ends = 1.0 + math.cos(angle) ** power
    inner = math.fsum((4.0 if i % 2 else 2.0) * math.cos(i * width) ** power for i in range(1, pieces))
    return (ends + inner) * width / 3.0


def _check_efficiency(batch: float, scale: float) -> None:
    if not (batch > 0.0 and scale >= 0.0):
        raise ValueError(f"an efficiency needs a batch above 0 and a scale of at least 0, got {batch=} {scale=}")
