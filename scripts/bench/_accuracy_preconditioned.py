"""The preconditioned noise scales on simulated windows, for accuracy.py: P comes from the windows before, as in Adam.

Windows, groups and weights are those of ``_accuracy_windows.py``: d = 1,000 coordinates, Sigma with eigenvalues j^-0.6.
G has the same spectrum in another order, so that its share of the noise differs from one coordinate to the next, and
the two preconditioned scales from each other and from the Euclidean one. Coordinates are those of the parameters.

Each run keeps Adam's second moment v of its own mean gradients. P = 1 / (sqrt(v / (1 - beta2^n)) + eps) after n windows
is the one with which window n + 1 is measured; the first ``WARM_STEPS`` windows are not measured. No coordinate is left
out, as none has a second moment of 0. The noise is such that ``adam``'s scale is 0.1 to 100 times the first batch where
v is what it is on average. With P as it comes, and in ``adam_sqrt``, it is a little more or less, and so is the truth:
the ratio of the weighted sums of tr(Q Sigma) and G'Q G, with Q = P^2 or P of each averaged window.

That a window's errors have mean 0 is a matter of P here: it fails when P has seen the window. The controls take it for
granted, and so the mean of G^2 is also judged without them, wherever its standard error lets it.

All that an estimator reads is linear in Q, with coefficients that are sums over the groups. These are drawn once per
repeat, and all runs of the repeat use them, each from another window on.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import _accuracy_runs as runs
import _accuracy_windows as drawn
import numpy as np
from _accuracy_runs import DECIDE_EVERY, FIELDS, FIXED, PIECE, RATIOS, SEED, TO_SCALE, Case, Run
from _accuracy_windows import DIMENSION, GROUPS, KINDS, SAMPLES

from adabatch import noise
from adabatch.gradients.preconditioned import VIEWS, WARM_STEPS

POOL = 160
# The defaults of torch's Adam, and a beta2 with which P never settles.
BETA2, RESTLESS, EPS = 0.999, 0.95, 1e-8
# The view that a batch follows: the one that Adam's runs are decided by.
FOLLOWED = "adam_sqrt"
# What a window's truth is made of, by view.
MEAN_SQUARE, GROUP_SQUARE, SIGNAL, NOISE, MIXED, OWN = range(6)


@dataclass(frozen=True)
class Stream(Case):
    """One kind of run, with Adam's beta2; every step is measured."""

    beta2: float = BETA2

    @property
    def readings(self) -> tuple[int, int, int]:
        """Measured windows after which the run is read; it ends with the last."""
        if self.batch == TO_SCALE:
            return 32, 64, 96
        return 16, 32, {30.0: 96, 100.0: 128}.get(self.ratio, 48)


def streams() -> list[Stream]:
    """The full grid with a fixed batch, and a few more with a batch that follows or with a restless P."""
    grid = itertools.product(KINDS, RATIOS, (False, True), (FIXED,))
    follow = itertools.product(("equal",), (3.0, 30.0), (False, True), (TO_SCALE,))
    restless = itertools.product(("equal",), (3.0, 30.0), (False, True), (FIXED,), (1,), (RESTLESS,))
    return [Stream(*values) for values in (*grid, *follow, *restless)]


@lru_cache(maxsize=1)
def direction_square() -> np.ndarray:
    """G_j^2 for |G|^2 = 1, (d,)."""
    return np.random.default_rng(SEED).permutation(drawn.eigenvalues())


@lru_cache(maxsize=1)
def fixed_vectors() -> np.ndarray:
    """G_j^2, Sigma_jj, their product and Sigma_jj^2 for |G|^2 = tr Sigma = 1, (d, 4) in single precision."""
    signal, sigma = direction_square(), drawn.eigenvalues()
    return np.stack([signal, sigma, signal * sigma, sigma**2], 1).astype(np.float32)


@lru_cache(maxsize=16)
def noise_share(ratio: float) -> float:
    """tr Sigma / N over |G|^2 for which ``adam``'s scale is ``ratio`` N, with v at its mean G_j^2 + Sigma_jj / N."""
    signal, sigma = direction_square(), drawn.eigenvalues()
    low, high = ratio / 1e3, ratio * 1e3
    for _ in range(60):
        share = math.sqrt(low * high)
        second = signal + share * sigma
        low, high = (share, high) if share * (sigma / second).sum() < ratio * (signal / second).sum() else (low, share)
    return share


@dataclass(frozen=True)
class Pool:
    """Windows of all kinds, as vectors. For groups g_k = sqrt(g) G + sqrt(x) s_k e_k with weights p_k:

    Attributes:
        mean: sum p_k s_k e_k, (kinds, windows, d).
        mixed: sum p_k^2 s_k e_k, likewise.
        own: sum p_k^2 s_k^2 e_k^2, likewise.
        weight_square: sum p_k^2, (kinds, windows).
        spread: as ``Windows.spread``, without its effective dimension: (kinds, windows, 3, 2).
    """

    mean: np.ndarray
    mixed: np.ndarray
    own: np.ndarray
    weight_square: np.ndarray
    spread: np.ndarray

    def gradients(
        self, kind: np.ndarray, row: np.ndarray, signal: np.ndarray, share: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean gradients and sums of p_k^2 g_k^2 of one window per run, (runs, d), for |G|^2 = ``signal`` and
        S / N = ``share``, all (runs,)."""
        scales = np.stack([np.sqrt(signal), np.sqrt(share), share, signal * self.weight_square[kind, row]])
        root, size, share, whole = scales.astype(np.float32)[:, :, None]
        direction = np.sqrt(fixed_vectors()[:, 0])
        mean = self.mean[kind, row]
        mean *= size
        mean += root * direction
        square, mixed = self.own[kind, row], self.mixed[kind, row]
        square *= share
        mixed *= direction
        mixed *= 2.0 * root * size
        square += mixed
        square += whole * fixed_vectors()[:, 0]
        return mean, square


def vectors(rng: np.random.Generator, count: int) -> np.ndarray:
    """Noise e_k of ``count`` windows, drawn from N(0, Sigma / tr Sigma), (windows, K, d)."""
    root = np.sqrt(drawn.eigenvalues()).astype(np.float32)
    return rng.standard_normal((count, GROUPS, DIMENSION), dtype=np.float32) * root


def pooled(noises: np.ndarray, shares: Sequence[tuple[np.ndarray, np.ndarray]]) -> Pool:
    """The pool of noise vectors (windows, K, d), with weights p_k and noise s_k^2, both (windows, K), by kind."""
    weights, sizes = (np.stack(column) for column in zip(*shares, strict=True))
    parts = np.concatenate([weights * np.sqrt(sizes), weights**2 * np.sqrt(sizes)]).transpose(1, 0, 2)
    first = np.ascontiguousarray((parts.astype(noises.dtype) @ noises).transpose(1, 0, 2))
    second = (weights**2 * sizes).transpose(1, 0, 2).astype(noises.dtype) @ noises**2
    return Pool(
        mean=first[: len(shares)],
        mixed=first[len(shares) :],
        own=np.ascontiguousarray(second.transpose(1, 0, 2)),
        weight_square=(weights**2).sum(2),
        spread=np.stack([drawn.spreads(*one) for one in shares]) / drawn.inverse_dimension(),
    )


def preconditioner(second: np.ndarray, beta2: np.ndarray, count: int) -> np.ndarray:
    """P after ``count`` windows, (runs, d)."""
    root = np.sqrt(1.0 - beta2**count).astype(second.dtype)[:, None]
    p = np.sqrt(second)
    p += np.float32(EPS) * root
    return np.divide(root, p, out=p)


def lengths(p: np.ndarray, mean_square: np.ndarray, square: np.ndarray) -> np.ndarray:
    """What is read of a window and what is true of it, (runs, views, 6), for |G|^2 = 1 and S / N = 1.

    In the order of this module's constants: |g_bar|^2 and sum p_k^2 |g_k|^2 as they are; then G'Q G, tr(Q Sigma),
    G'Q Sigma Q G and tr(Q Sigma Q Sigma).
    """
    powers = np.empty((len(p), 3, DIMENSION), p.dtype)
    np.multiply(p, p, out=powers[:, 0])
    powers[:, 1] = p
    np.multiply(powers[:, 0], powers[:, 0], out=powers[:, 2])
    seen = powers[:, :2] @ np.stack([mean_square, square], 1).transpose(0, 2, 1)
    known = powers @ fixed_vectors()
    # Q^2 is P^4 in the view of P^2, and P^2 in that of P.
    return np.concatenate([seen, known[:, :2, :2], known[:, [2, 0], 2:]], 2).astype(float)


@dataclass
class Past(Run):
    """A run in one view: also the true S of each window, the powers of its variance, and the estimator's state."""

    noise: list[float] = field(default_factory=list)
    powers: list[tuple[float, float]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


ESTIMATOR = noise.NoiseEstimator()


def simulate(cases: Sequence[Stream], pool: Pool, firsts: Sequence[int]) -> list[list[list[Any]]]:
    """Runs of one length on the pool's windows, each from its own: ``reading`` per view, by run and reading."""
    kind, beta2 = np.array([KINDS.index(case.kind) for case in cases]), np.array([case.beta2 for case in cases])
    sample_noise = np.array([noise_share(case.ratio) * SAMPLES for case in cases])
    batch, position = np.full(len(cases), SAMPLES), np.zeros(len(cases), int)
    second, gain = np.zeros((len(cases), DIMENSION), np.float32), (1.0 - beta2).astype(np.float32)[:, None]
    pasts = [[Past([], [], [], [], state=ESTIMATOR.init()) for _ in VIEWS] for _ in cases]
    found: list[list[list[Any]]] = [[] for _ in cases]
    for count in range(WARM_STEPS + cases[0].readings[-1]):
        row = (np.array(firsts) + count) % POOL
        position += batch
        signal = np.array([case.signal(place) for case, place in zip(cases, position.tolist(), strict=True)])
        mean, square = pool.gradients(kind, row, signal, sample_noise / batch)
        mean *= mean
        if count >= WARM_STEPS:
            facts = lengths(preconditioner(second, beta2, count), mean, square).tolist()
            columns = (batch, position, signal, sample_noise, pool.weight_square[kind, row])
            for views, values, *known in zip(pasts, facts, *(one.tolist() for one in columns), strict=True):
                for past, lines in zip(views, values, strict=True):
                    take(past, *known, lines)
            measured = count + 1 - WARM_STEPS
            for i, case in enumerate(cases):
                if measured in case.readings:
                    rows = (firsts[i] + WARM_STEPS + np.arange(measured)) % POOL
                    found[i].append([reading(past, case.kind, pool.spread[kind[i], rows]) for past in pasts[i]])
                if case.batch != FIXED and measured % DECIDE_EVERY == 0:
                    state = pasts[i][VIEWS.index(FOLLOWED)].state
                    batch[i] = runs.decide(int(batch[i]), ESTIMATOR.value(state), 1.0)
        mean -= second
        mean *= gain
        second += mean
    return found


def take(
    past: Past, batch: int, position: int, signal: float, sample_noise: float, weight_square: float, facts: list[float]
) -> None:
    """One more window into the estimator and the past."""
    share, true_signal = sample_noise / batch, signal * facts[SIGNAL]
    measurement = noise.Measurement(batch, GROUPS, facts[MEAN_SQUARE], facts[GROUP_SQUARE], weight_square, batch, 0.0)
    past.state = ESTIMATOR.update(past.state, measurement, position)
    past.batch.append(batch)
    past.weight.append(past.state["last"][1])
    past.signal.append(true_signal)
    past.error.append(measurement.signal - true_signal)
    past.noise.append(sample_noise * facts[NOISE])
    past.powers.append((signal * share * facts[MIXED], share**2 * facts[OWN]))


def reading(past: Past, kind: str, spread: np.ndarray) -> tuple[list[float], float, list[float]]:
    """As ``runs.reading``, in the geometry of each window's own P; ``spread`` is that of the windows."""
    estimate = ESTIMATOR.value(past.state)
    chosen = slice(len(past.batch) - estimate.steps, None)
    batch, signal, sample_noise = (np.array(one[chosen]) for one in (past.batch, past.signal, past.noise))
    weight = np.array(past.weight[chosen]) / sum(past.weight[chosen])
    extra = drawn.token_noise()[1] * (sample_noise / batch) ** 2 if kind == "tokens" else 0.0
    parts = (spread[chosen] * np.array(past.powers[chosen])[:, None]).sum(2)
    variance = (weight**2 * parts[:, 0]).sum()
    noise_variance = (weight**2 * batch**2 * (parts[:, 1] + extra)).sum()
    both = (weight**2 * batch * parts[:, 2]).sum()
    true_signal, true_noise = float(weight @ signal), float(weight @ sample_noise)
    truth, now, error = true_noise / true_signal, sample_noise[-1] / signal[-1], estimate.signal - true_signal
    values = {
        "noise": estimate.noise,
        "noise_square": estimate.noise**2,
        "true_noise": true_noise,
        "true_signal": true_signal,
        "below": estimate.high < truth,
        "above": estimate.low > truth,
        "unresolved": not estimate.resolved,
        "averaged": estimate.steps,
        "now": batch[-1] / now,
        "lag": now / truth,
        "variance": error**2 / variance,
    }
    oracle = runs.oracle_width(estimate.signal, estimate.noise, variance, noise_variance, both)
    width = 1.0 / max(estimate.low, 1e-300) - 1.0 / estimate.high
    return [float(values[name]) for name in FIELDS], width / oracle, [error, *runs.controls(past)]


def repeats(first: int) -> dict[str, Any]:
    """Repeats ``first`` to ``first + PIECE`` of all streams: their readings summed up, by stream, reading and view."""
    began = time.process_time()
    all_streams = streams()
    found: list[list[Any]] = [[] for _ in all_streams]
    for repeat in range(first, first + PIECE):
        rng = np.random.Generator(np.random.SFC64([SEED, repeat, 1]))
        pool = pooled(vectors(rng, POOL), [drawn.shares(kind, rng, POOL) for kind in KINDS])
        for length in sorted({one.readings[-1] for one in all_streams}):
            chosen = [i for i, one in enumerate(all_streams) if one.readings[-1] == length]
            simulated = simulate([all_streams[i] for i in chosen], pool, [37 * i % POOL for i in chosen])
            for i, run in zip(chosen, simulated, strict=True):
                found[i].append(run)
    readings = [
        [[runs.summed([run[k][v] for run in one]) for v in range(len(VIEWS))] for k in range(3)] for one in found
    ]
    return {"readings": readings, "seconds": time.process_time() - began}
