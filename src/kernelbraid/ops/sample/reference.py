"""Sampling as README.md states it, a row at a time: float64 weights, Python's integers. Needs numpy alone."""

import math

import numpy as np
import numpy.typing as npt

from kernelbraid.ops.problem import Problem, Rows

Numbers = npt.NDArray[np.float32]
WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32 with ten rounds."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & WORD, (p0 >> 32) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def random_bits(seed: int, sample: int, position: int) -> int:
    """The 64 random bits of a token."""
    counter = tuple(n >> shift & WORD for n in (position, sample) for shift in (0, 32))
    low, high, _, _ = philox(counter, (seed & WORD, seed >> 32 & WORD))  # type: ignore[arg-type]
    return low | high << 32


def token(
    logits: Numbers,
    inverse_temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    bits: int,
) -> int:
    """The token that 64 random bits choose from logits [V]."""
    values = np.where(np.isnan(logits), -np.inf, logits).astype(np.float64)
    if not values.max() > -np.inf or not 0 < inverse_temperature < np.inf:
        return int(np.argmax(values))
    with np.errstate(all="ignore"):
        scaled = logits * np.float32(inverse_temperature)
    scaled = np.where(np.isnan(scaled), -np.inf, scaled).astype(np.float64)
    top = float(scaled.max())
    if top == -np.inf:
        return 0
    differences = np.where(scaled == top, 0.0, scaled - (top if math.isfinite(top) else 0.0))
    if top == np.inf:
        differences = np.where(scaled == top, 0.0, -np.inf)
    weights = np.exp(differences)
    kept = weights >= min(min_p, 1.0) if min_p > 0 else np.ones(len(logits), bool)
    order = np.argsort(-scaled, kind="stable")
    order = order[kept[order]]
    order = order[:top_k] if 0 < top_k < len(logits) else order
    whole = [int(w * 2.0**40) for w in weights[order]]
    if top_p < 1:
        mass, seen, count = max(1, int(max(top_p, 0.0) * sum(whole))), 0, 0
        while seen < mass:
            seen, count = seen + whole[count], count + 1
        order, whole = order[:count], whole[:count]
    wanted = bits * sum(whole) >> 64
    for v, weight in sorted(zip(order.tolist(), whole, strict=True)):
        wanted -= weight
        if wanted < 0:
            return int(v)
    return 0


def reference(problem: Problem) -> Rows:
    """Return every request's tokens."""
    rows: Rows = {}
    for b, request in enumerate(problem.requests):
        columns = (request[name] for name in ("inverse_temperature", "top_k", "top_p", "min_p"))
        keys = zip(request["seeds"], request["samples"], request["positions"], strict=True)
        bits = [random_bits(*map(int, key)) for key in keys]
        given = zip(request["logits"], *columns, bits, strict=True)
        tokens = [token(row, float(c), int(k), float(p), float(m), r) for row, c, k, p, m, r in given]
        rows["tokens", b] = np.array(tokens, np.float64)
    return rows
