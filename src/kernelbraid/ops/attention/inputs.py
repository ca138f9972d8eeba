"""Random inputs of attention, and the poison that stands where nobody may look. numpy only."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from math import sqrt

import numpy as np
import numpy.typing as npt

from kernelbraid.ops.problem import InputKind, Problem, ProblemShape

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]

LARGEST_LENGTH = 131072
LARGEST_BATCH = 1024
DRAWN_PERIOD = (1 << 20) - 3
"""Larger arrays repeat this many drawn numbers; odd, so that no two pages hold the same."""
POISON_PERIOD = (1 << 14) - 3
CAPTURED_LAYERS = 3
CAPTURED_GROUP = 3
CAPTURED_HEAD_DIM = 64


def draw(shape: ProblemShape, rng: np.random.Generator) -> Problem:
    """Draw a problem: per request q [rows, Hq, D], k and v [length, Hkv, D], float32; and the softmax scale.

    Raises:
        ValueError: an axis lies outside the contract, or the dtype is not float32.
    """
    query_heads, kv_heads, head_dim = head_counts(shape)
    if shape.dtype != "float32":
        raise ValueError(f"dtype must be float32, got {shape.dtype!r}")
    if len(shape.lengths) > LARGEST_BATCH or max(shape.lengths, default=0) > LARGEST_LENGTH:
        raise ValueError(f"at most {LARGEST_BATCH} requests of {LARGEST_LENGTH} positions")
    q = np.empty((sum(shape.rows), query_heads, head_dim), np.float32)
    k = np.empty((sum(shape.lengths), kv_heads, head_dim), np.float32)
    v = np.empty_like(k)
    if shape.kind == "captured":
        _fill_captured(shape, rng, q, k, v)
    else:
        for block in (q, k, v):
            block[...] = normal(rng, block.shape)
        _shape_values(shape.kind, rng, q, k, v)
    row_ends, ends = np.cumsum((0, *shape.rows)), np.cumsum((0, *shape.lengths))
    requests = [
        {"q": q[row_ends[b] : row_ends[b + 1]], "k": k[ends[b] : ends[b + 1]], "v": v[ends[b] : ends[b + 1]]}
        for b in range(len(shape.rows))
    ]
    if shape.kind == "non_finite":
        for request in requests:
            _spoil(request, rng)
    _share(requests, shape.shared_prefix)
    scale = float(rng.choice((1.0, 1.0, 0.75))) / sqrt(head_dim)
    return Problem(shape, tuple(requests), {"softmax_scale": scale})


def head_counts(shape: ProblemShape) -> tuple[int, int, int]:
    axes = dict(shape.constant_axes)
    query_heads, kv_heads, head_dim = axes["query_heads"], axes["kv_heads"], axes["head_dim"]
    if query_heads % kv_heads:
        raise ValueError(f"query_heads must be a multiple of kv_heads, got {query_heads} and {kv_heads}")
    return query_heads, kv_heads, head_dim


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    size = int(np.prod(shape))
    drawn = rng.standard_normal(min(size, DRAWN_PERIOD), np.float32)
    return _tiled(drawn, size).reshape(shape)


def _tiled(block: Floats, size: int) -> Floats:
    """`block` repeated to `size` elements."""
    if size <= block.size:
        return block[:size]
    whole, rest = divmod(size, block.size)
    out = np.empty(size, np.float32)
    out[: whole * block.size].reshape(whole, block.size)[...] = block
    out[size - rest :] = block[:rest]
    return out


def _shape_values(kind: InputKind, rng: np.random.Generator, q: Floats, k: Floats, v: Floats) -> None:
    """Turn normal numbers into numbers of `kind`, in place."""
    half = q.shape[2] // 2
    if kind == "heavy_tailed":
        for block in (q, k, v):
            block /= np.sqrt(np.maximum(np.abs(normal(rng, block.shape)), np.float32(1e-6)))
    elif kind == "cancelling":
        # Scores are small differences of two large halves; outputs are small differences of large values.
        q[..., half:] = q[..., :half]
        k[..., :half] *= 64
        k[..., half:] = k[..., half:] / 8 - k[..., :half]
        v += np.where(np.arange(len(v)) % 2, np.float32(1000), np.float32(-1000))[:, None, None]
    elif kind == "signed_zeros":
        for block in (q, k, v):
            block *= normal(rng, block.shape) > 0
        v[..., : half // 2] *= 0
        v[..., : half // 4] = -0.0
        q[::5] *= 0
    elif kind == "denormals":
        # Half of each head's output is denormal, the other half normal; scores mix both.
        v[..., :half] *= np.float32(2.0**-130)
        for block in (q, k):
            block[normal(rng, block.shape) > 0.5] *= np.float32(2.0**-132)
    elif kind == "saturated":
        q *= 40
        k[::3] = k[:1]


def _spoil(request: dict[str, Floats], rng: np.random.Generator) -> None:
    """Put NaNs with payloads and infinities into the last quarter of a request's keys, values and queries."""
    length, rows = len(request["k"]), len(request["q"])
    first = length - max(length // 4, 1)
    for name in ("k", "v"):
        if length:
            _spoil_block(request[name], rng, first, length)
    if rows:
        _spoil_block(request["q"], rng, rows - max(rows // 4, 1), rows)


def _spoil_block(block: Floats, rng: np.random.Generator, first: int, stop: int) -> None:
    for _ in range(3):
        where = rng.integers(first, stop), rng.integers(block.shape[1]), rng.integers(block.shape[2])
        choice = int(rng.integers(4))
        if choice < 2:
            block[where] = (np.inf, -np.inf)[choice]
        else:
            block.view(np.uint32)[where] = _payloads(rng, 1)[0]


def _share(requests: Sequence[dict[str, Floats]], prefix: int) -> None:
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


def _payloads(rng: np.random.Generator, count: int) -> npt.NDArray[np.uint32]:
    """Quiet NaNs of either sign with random payloads, as bits."""
    sign = rng.integers(0, 2, count, np.uint32) << np.uint32(31)
    payload = rng.integers(1, 1 << 22, count, np.uint32)
    return np.asarray(sign | np.uint32(0x7FC00000) | payload, np.uint32)


def poison(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Return an array full of NaNs whose payloads come from `rng`."""
    size = int(np.prod(shape))
    bits = _payloads(rng, min(size, POISON_PERIOD))
    return _tiled(bits.view(np.float32), size).reshape(shape)


def garbage(rng: np.random.Generator, shape: tuple[int, int], pages: int) -> Integers:
    """Page numbers that nobody may follow: half of them in the pool, half of them any int32."""
    wild = rng.integers(-(2**31), 2**31, shape, np.int32)
    valid = rng.integers(0, max(pages, 1), shape, np.int32)
    return np.where(rng.integers(0, 2, shape) == 0, wild, valid)
