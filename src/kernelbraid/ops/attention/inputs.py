"""Random inputs of attention. numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import sqrt
from typing import Any

import numpy as np

from kernelbraid.ops.formats import BFLOAT16
from kernelbraid.ops.numbers import Floats, normal, spoil
from kernelbraid.ops.problem import Array, InputKind, Problem, ProblemShape

LARGEST_LENGTH = 131072
LARGEST_BATCH = 1024
CAPTURED_LAYERS = 3
CAPTURED_GROUP = 3
CAPTURED_HEAD_DIM = 64


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Factors and offsets of a format: large ones that cancel and leave a small part, and denormal ones."""

    large_key: np.float32
    large_value: np.float32
    denormal: np.float32
    denormal_value: np.float32


SIZES = {
    np.dtype(dtype): _Sizes(*map(np.float32, sizes))
    for dtype, sizes in (
        (np.float32, (64.0, 1000.0, 2.0**-132, 2.0**-130)),
        (np.float16, (32.0, 128.0, 2.0**-18, 2.0**-17)),
        (BFLOAT16, (4.0, 16.0, 2.0**-130, 2.0**-129)),
    )
}


def draw(shape: ProblemShape, rng: np.random.Generator, *, dtypes: Sequence[str] = ("float32",)) -> Problem:
    """Draw a problem: per request q [rows, Hq, D], k and v [length, Hkv, D], and the softmax scale.

    Where every row of every request is wanted, a request also has dout [rows, Hq, D], the gradient of its
    output. Numbers are drawn in float32 and rounded once to the problem's dtype, in which they are finite.
    Kind `non_finite` then spoils keys and queries, and in float32 values too.

    Args:
        shape: what to draw.
        rng: the source of every number.
        dtypes: dtypes of the contract.

    Raises:
        ValueError: an axis lies outside the contract, or the dtype is none of `dtypes`.
    """
    query_heads, kv_heads, head_dim = head_counts(shape)
    if shape.dtype not in dtypes:
        raise ValueError(f"dtype must be {' or '.join(dtypes)}, got {shape.dtype!r}")
    if len(shape.lengths) > LARGEST_BATCH or max(shape.lengths, default=0) > LARGEST_LENGTH:
        raise ValueError(f"at most {LARGEST_BATCH} requests of {LARGEST_LENGTH} positions")
    dtype = np.dtype(shape.dtype)
    q = np.empty((sum(shape.rows), query_heads, head_dim), np.float32)
    k = np.empty((sum(shape.lengths), kv_heads, head_dim), np.float32)
    v = np.empty_like(k)
    if shape.kind == "captured":
        _fill_captured(shape, rng, q, k, v)
    else:
        for block in (q, k, v):
            block[...] = normal(rng, block.shape)
        _shape_values(shape.kind, dtype, rng, q, k, v)
    row_ends, ends = np.cumsum((0, *shape.rows)), np.cumsum((0, *shape.lengths))
    queries, keys, values = (block.astype(dtype, copy=False) for block in (q, k, v))
    requests: list[dict[str, Array]] = []
    for b in range(len(shape.rows)):
        held = slice(ends[b], ends[b + 1])
        requests.append({"q": queries[row_ends[b] : row_ends[b + 1]], "k": keys[held], "v": values[held]})
    if shape.kind == "non_finite":
        for request in requests:
            _spoil(request, rng)
    _share(requests, shape.shared_prefix)
    scale = float(rng.choice((1.0, 1.0, 0.75))) / sqrt(head_dim)
    if shape.rows == shape.lengths:
        for request in requests:
            request["dout"] = normal(rng, request["q"].shape, dtype)
    return Problem(shape, tuple(requests), {"softmax_scale": scale})


def head_counts(shape: ProblemShape) -> tuple[int, int, int]:
    axes = dict(shape.constant_axes)
    query_heads, kv_heads, head_dim = axes["query_heads"], axes["kv_heads"], axes["head_dim"]
    if query_heads % kv_heads:
        raise ValueError(f"query_heads must be a multiple of kv_heads, got {query_heads} and {kv_heads}")
    return query_heads, kv_heads, head_dim


def _shape_values(
    kind: InputKind, dtype: np.dtype[Any], rng: np.random.Generator, q: Floats, k: Floats, v: Floats
) -> None:
    """Turn normal numbers into numbers of `kind` that `dtype` can hold, in place."""
    half, size = q.shape[2] // 2, SIZES[dtype]
    if kind == "heavy_tailed":
        for block in (q, k, v):
            block /= np.sqrt(np.maximum(np.abs(normal(rng, block.shape)), np.float32(1e-6)))
    elif kind == "cancelling":
        # Scores are small differences of two large halves; outputs are small differences of large values.
        q[..., half:] = q[..., :half]
        k[..., :half] *= size.large_key
        k[..., half:] = k[..., half:] / 8 - k[..., :half]
        v += np.where(np.arange(len(v)) % 2, size.large_value, -size.large_value)[:, None, None]
    elif kind == "signed_zeros":
        for block in (q, k, v):
            block *= normal(rng, block.shape) > 0
        v[..., : half // 2] *= 0
        v[..., : half // 4] = -0.0
        q[::5] *= 0
    elif kind == "denormals":
        # Half of each head's output is denormal, the other half normal; scores mix both.
        v[..., :half] *= size.denormal_value
        for block in (q, k):
            block[normal(rng, block.shape) > 0.5] *= size.denormal
    elif kind == "saturated":
        q *= 40
        k[::3] = k[:1]


def _spoil(request: dict[str, Array], rng: np.random.Generator) -> None:
    """Put NaNs with payloads and infinities into the last quarter of a request's keys, values and queries.

    In 16 bits values stay finite: a matrix unit multiplies those of masked keys too, by a weight of 0.
    """
    length, rows = len(request["k"]), len(request["q"])
    first = length - max(length // 4, 1)
    for name in ("k", "v") if request["v"].dtype == np.float32 else ("k",):
        if length:
            spoil(request[name], rng, first, length)
    if rows:
        spoil(request["q"], rng, rows - max(rows // 4, 1), rows)


def _share(requests: Sequence[dict[str, Array]], prefix: int) -> None:
    """Give every request the longest one's keys and values at the first `prefix` positions."""
    if not prefix or not requests:
        return
    longest = max(requests, key=lambda request: len(request["k"]))
    for request in requests:
        if request is not longest:
            shared = min(prefix, len(request["k"]))
            for name in ("k", "v"):
                request[name][:shared] = longest[name][:shared]


@cache
def _captured() -> dict[str, Floats]:
    """Real q [layer, token, 3, 64], k and v [layer, token, 64], captured by scripts/capture_qkv.py."""
    with (files("kernelbraid.ops.attention") / "captured.npz").open("rb") as file, np.load(file) as stored:
        return {name: stored[name].astype(np.float32) for name in ("q", "k", "v")}


def _fill_captured(shape: ProblemShape, rng: np.random.Generator, q: Floats, k: Floats, v: Floats) -> None:
    """Tile the captured group over positions, heads (a layer each) and head dimensions (the next layer's)."""
    data = _captured()
    query_heads, kv_heads, head_dim = head_counts(shape)
    group = query_heads // kv_heads
    tokens = data["k"].shape[1]
    starts = rng.integers(0, tokens, len(shape.lengths))
    positions = np.concatenate(
        [(start + np.arange(n)) % tokens for start, n in zip(starts, shape.lengths, strict=True)] or [[]]
    ).astype(np.intp)
    rows = np.concatenate(
        [
            (start + np.arange(n - r, n)) % tokens
            for start, n, r in zip(starts, shape.lengths, shape.rows, strict=True)
        ]
        or [[]]
    ).astype(np.intp)
    for g in range(kv_heads):
        for first in range(0, head_dim, CAPTURED_HEAD_DIM):
            layer = (g + first // CAPTURED_HEAD_DIM) % CAPTURED_LAYERS
            part = slice(first, first + CAPTURED_HEAD_DIM)
            k[:, g, part] = data["k"][layer, positions]
            v[:, g, part] = data["v"][layer, positions]
            for h in range(group):
                q[:, g * group + h, part] = data["q"][layer, rows, h % CAPTURED_GROUP]
