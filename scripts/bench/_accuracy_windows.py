"""Windows of gradients whose G and Sigma are known, as an estimator sees them: drawn exactly, and rescaled at no cost.

Gradients have d = 1,000 coordinates, in the eigenbasis of Sigma, with eigenvalues j^-0.6 (effective dimension 327, the
largest 63 times the smallest); G is aligned with the noise, G_j = +-sqrt(lambda_j). A window of N samples has 4 groups,
and group k has the mean gradient G + s_k e_k, where e_k is a vector really drawn from N(0, Sigma / tr Sigma) and s_k^2
is the group's share of noise:

- equal:   4 groups of N/4 samples, s_k^2 = tr Sigma / (N/4);
- unequal: n_k = 6, 10, 16 and 32 64ths of the samples, s_k^2 = tr Sigma / n_k;
- tokens:  4 groups of 16 sequences, the loss a mean over tokens. Lengths are drawn anew in every window (log-normal,
  median 55, 4 to 1,024). Tokens of a sequence correlate by 0.2, so that its summed gradient has n (1 + 0.2 (n - 1))
  times the noise of a token. A group weighs what its tokens do. Where N is not 64, the noise alone is rescaled: the
  weights of larger windows vary more than they would.

Everything that an estimator reads of a window is |g_bar|^2 and sum p_k^2 |g_k|^2, and both follow from the products
e_k.e_l and G.e_k. These depend neither on the size of the noise nor on N, so they are computed once per drawn window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

KINDS = ("equal", "unequal", "tokens")
DIMENSION, SAMPLES, GROUPS = 1000, 64, 4
SIZES = {"equal": (16.0, 16.0, 16.0, 16.0), "unequal": (6.0, 10.0, 16.0, 32.0)}
CORRELATION = 0.2


@dataclass(frozen=True)
class Windows:
    """What the readings of each drawn window are made of, for any |G|^2 = g and S / N = x.

    Attributes:
        mean: (windows, 2), |g_bar|^2 = g + 2 sqrt(g x) mean[0] + x mean[1].
        group: (windows, 2), sum p_k^2 |g_k|^2 = g W + 2 sqrt(g x) group[0] + x group[1].
        weight_square: (windows,), W = sum p_k^2.
        spread: (windows, 3, 2), the variances of G^2 and of S / N and their covariance, each g x spread[0] +
            x^2 spread[1], exact for Gaussian noise.
        formula: (windows, 2), the variance of G^2 in the same form as section 9 of the theory has it: 4 G'Sigma G / N +
            2 tr(Sigma^2) / (N^2 (1 - W)). Where groups are unequal, the exact first term is larger by a factor of
            sum p_k (1 - p_k)^2 / (1 - W)^2.
        extra: the variance of S / N that comes from the weights and lengths, in units of x^2.
    """

    mean: np.ndarray
    group: np.ndarray
    weight_square: np.ndarray
    spread: np.ndarray
    formula: np.ndarray
    extra: float


def draw(rng: np.random.Generator, count: int) -> dict[str, Windows]:
    """``count`` windows of each kind. The kinds share the noise vectors."""
    between, along = products(rng, count)
    return {kind: assemble(kind, between, along, *shares(kind, rng, count)) for kind in KINDS}


def eigenvalues() -> np.ndarray:
    """The spectrum of Sigma, (d,), with trace 1."""
    values = np.arange(1, DIMENSION + 1) ** -0.6
    return values / values.sum()


def products(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw noise vectors; return e_k.e_l (windows, K, K) and G.e_k (windows, K) for a fresh G of length 1."""
    root = np.sqrt(eigenvalues()).astype(np.float32)
    direction = root * rng.choice(np.array([-1, 1], np.float32), DIMENSION)
    between, along = np.empty((count, GROUPS, GROUPS)), np.empty((count, GROUPS))
    buffer = np.empty((64, GROUPS, DIMENSION), np.float32)
    for i in range(0, count, len(buffer)):
        rng.standard_normal(dtype=np.float32, out=buffer)
        buffer *= root
        between[i : i + len(buffer)] = buffer @ buffer.transpose(0, 2, 1)
        along[i : i + len(buffer)] = (buffer.reshape(-1, DIMENSION) @ direction).reshape(-1, GROUPS)
    return between, along


def shares(kind: str, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights p_k and noise s_k^2, both (windows, K), such that sum p_k^2 s_k^2 is 1 on average."""
    if kind == "tokens":
        weights, noises = token_shares(rng, count)
        return weights, noises / token_noise()[0]
    sizes = np.array(SIZES[kind])
    return np.tile(sizes / SAMPLES, (count, 1)), np.tile(SAMPLES / sizes, (count, 1))


def token_shares(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and noise of groups of sequences of random lengths, for tokens of noise 1."""
    draws = rng.normal(4.0, 1.0, (count, GROUPS, SAMPLES // GROUPS))
    lengths = np.clip(np.exp(draws), 4.0, 1024.0).round()
    tokens = lengths.sum(2)
    noises = (lengths * (1.0 + CORRELATION * (lengths - 1.0))).sum(2) / tokens**2
    return tokens / tokens.sum(1, keepdims=True), noises


@lru_cache(maxsize=1)
def token_noise() -> tuple[float, float]:
    """Mean and relative variance of sum p_k^2 s_k^2 over the lengths, for tokens of noise 1; the mean to 0.03 %."""
    rng = np.random.default_rng(20240607)
    noises = np.concatenate([(p * p * s).sum(1) for p, s in (token_shares(rng, 10_000) for _ in range(50))])
    return float(noises.mean()), float(noises.var() / noises.mean() ** 2)


def assemble(kind: str, between: np.ndarray, along: np.ndarray, weights: np.ndarray, noises: np.ndarray) -> Windows:
    """The windows of one kind from the products of their noise vectors."""
    size, parts = np.sqrt(noises), weights * np.sqrt(noises)
    own = np.einsum("tkk->tk", between)
    square = (weights**2).sum(1)
    return Windows(
        mean=np.stack([(parts * along).sum(1), np.einsum("tk,tkl,tl->t", parts, between, parts)], 1),
        group=np.stack([(weights**2 * size * along).sum(1), (parts**2 * own).sum(1)], 1),
        weight_square=square,
        spread=spreads(weights, noises),
        formula=np.stack([np.full(len(square), 4.0), 2.0 / (1.0 - square)], 1) * inverse_dimension(),
        extra=token_noise()[1] if kind == "tokens" else 0.0,
    )


def inverse_dimension() -> float:
    """1 / d_eff = tr Sigma^2 / (tr Sigma)^2; also G'Sigma G / (|G|^2 tr Sigma), since G is aligned with the noise."""
    return float((eigenvalues() ** 2).sum())


def spreads(weights: np.ndarray, noises: np.ndarray) -> np.ndarray:
    """Variances of G^2 and S / N and their covariance for Gaussian noise, (windows, 3, 2): see ``Windows``.

    G^2 = g + 2 sqrt(g x) sum c_k s_k G.e_k + x sum over j != k of (p_j p_k s_j s_k e_j.e_k) / (1 - W), with c_k = p_k
    (1 - p_k) / (1 - W), and S / N = |g_bar|^2 - G^2 has the rest of each product.
    """
    square = (weights**2).sum(1)
    mixed = weights * (1.0 - weights) / (1.0 - square)[:, None]
    rest = weights - mixed
    own = (weights**4 * noises**2).sum(1)
    cross = (weights**2 * noises).sum(1) ** 2 - own
    share = square / (1.0 - square)
    rows = [
        [4.0 * (mixed**2 * noises).sum(1), 2.0 * cross / (1.0 - square) ** 2],
        [4.0 * (rest**2 * noises).sum(1), 2.0 * (own + cross * share**2)],
        [4.0 * (mixed * rest * noises).sum(1), -2.0 * cross * share / (1.0 - square)],
    ]
    return np.stack([np.stack(row, 1) for row in rows], 1) * inverse_dimension()


def numbers(windows: Windows, first: int, count: int) -> Iterator[tuple[float, ...]]:
    """mean[0], mean[1], group[0], group[1] and W of ``count`` windows from ``first`` on, starting again at the end."""
    order = np.arange(first, first + count) % len(windows.weight_square)
    table = np.column_stack([windows.mean, windows.group, windows.weight_square])
    return map(tuple, table[order].tolist())
