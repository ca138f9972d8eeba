"""The rollout's fused step on the CPU: QK norm, rotation and cache write in one pass over the new tokens.

    n[t, h, j] = x[t, h, j] * r[t, h] * w[j]                    where there are weights, otherwise x
    y[t, h] = n[t, h] with its halves turned by the angles of positions[t]
    q_out[t] = y of q;  k_cache[slot of t] = y of k;  v_cache[slot of t] = v[t]

for float32. The steps are those of the operators qk_norm and rope and of attention's write_kv_cache, to the
bit: LANES partial sums along a head, added by halving; of the rotation's two products the one with the cosine
is rounded, the other fused. A task is some tokens, so that no schedule can change a bit.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import boolean, float32, int32, int64, njit, types
from numba.extending import intrinsic

LANES = 16
THREAD_COST = 32768

KNOBS = {
    "LANES": ("numeric", (8, 16, 32, 64)),
    "THREAD_COST": ("schedule", (8192, 32768, 131072, 524288)),
}

NAN = np.float32(np.nan)
ZERO, ONE = np.float32(0), np.float32(1)
DENORMAL_PROBE = np.array([2.0**-100, 2.0**-40, 2.0**100], np.float32)  # their product passes a denormal

inner = njit(error_model="numpy")
entry = njit(error_model="numpy", nogil=True, cache=True)


@intrinsic
def fma(typing_context, a, b, c):
    """a * b + c rounded once."""
    return float32(float32, float32, float32), lambda context, builder, signature, args: builder.fma(*args)


@inner
def canonical(x):
    return x if x == x else NAN


@inner
def keeps_denormals(probe):
    return probe[0] * probe[1] * probe[2] != ZERO


@inner
def halved(lanes):
    half = LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return lanes[0]


@inner
def factor(x, eps, lanes):
    """1 / sqrt(mean of squares + eps) of a row."""
    width = x.size
    lanes[:] = ZERO
    whole = width // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = fma(x[start + lane], x[start + lane], lanes[lane])
    for lane in range(width - whole):
        lanes[lane] = fma(x[whole + lane], x[whole + lane], lanes[lane])
    return ONE / np.sqrt(halved(lanes) / np.float32(width) + eps)


@inner
def normalize(x, weight, eps, out, lanes):
    r = factor(x, eps, lanes)
    for j in range(weight.size):
        out[j] = canonical(x[j] * r * weight[j])


@inner
def rotate(x, cos, sin, out):
    """Turn a head."""
    half = cos.size
    for i in range(half):
        s, a, b = sin[i], x[i], x[half + i]
        out[i] = canonical(fma(-b, s, a * cos[i]))
        out[half + i] = canonical(fma(a, s, b * cos[i]))


@inner
def prepare(x, weight, eps, p, cos, sin, out, head, lanes):
    """A token's head, as attention reads it; without weights it is not normalized."""
    if p < 0 or p >= cos.shape[0]:
        out[:] = NAN
    elif weight.size:
        normalize(x, weight, eps, head, lanes)
        rotate(head, cos[p], sin[p], out)
    else:
        rotate(x, cos[p], sin[p], out)


@entry
def prepare_tokens(
    q, k, v, q_weight, k_weight, positions, cos, sin, k_cache, v_cache, table, cu, lengths, eps, q_out,
    start, stop, probe,
):  # fmt: skip
    lanes, head = np.empty(LANES, np.float32), np.empty(q.shape[2], np.float32)
    pages, size = k_cache.shape[0], k_cache.shape[1]
    b = 0
    for t in range(start, stop):
        p = positions[t]
        for h in range(q.shape[1]):
            prepare(q[t, h], q_weight, eps, p, cos, sin, q_out[t, h], head, lanes)
        while cu[b + 1] <= t:
            b += 1
        place = lengths[b] - cu[b + 1] + t
        if place < 0 or place >= table.shape[1] * size:
            continue
        page, slot = table[b, place // size], place % size
        if page < 0 or page >= pages:
            continue
        for h in range(k.shape[1]):
            prepare(k[t, h], k_weight, eps, p, cos, sin, k_cache[page, slot, h], head, lanes)
            row = v_cache[page, slot, h]
            for j in range(v.shape[2]):
                row[j] = v[t, h, j]
    return keeps_denormals(probe)


# ---- Host.
HEADS, ROWS, ROW = (types.Array(float32, rank, "A", readonly=True) for rank in (3, 2, 1))
OUT, CACHE = (types.Array(float32, rank, "A") for rank in (3, 4))
NUMBERS, TABLE = (types.Array(int32, rank, "A", readonly=True) for rank in (1, 2))
RANGE = (int64, int64, float32[::1])
UNCOMPILED = {
    prepare_tokens: boolean(
        *(HEADS, HEADS, HEADS, ROW, ROW, NUMBERS, ROWS, ROWS, CACHE, CACHE, TABLE, NUMBERS, NUMBERS),
        *(float32, OUT, *RANGE),
    ),
}
_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def compiled(kernel):
    """Compile a kernel at its first use, for arrays of any strides."""
    with _lock:
        if kernel in UNCOMPILED:
            kernel.compile(UNCOMPILED.pop(kernel))
            kernel.disable_compile()
    return kernel


def share(kernel, operands, count, threads):
    """Run a kernel over 0 .. count - 1 in equal parts, one a thread, this one among them."""
    kernel, bounds = compiled(kernel), np.linspace(0, count, threads + 1).astype(int).tolist()
    with _lock:
        if threads > 1 and os.getpid() not in _pools:  # a forked child makes its own pool
            _pools.clear()
            _pools[os.getpid()] = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    parts = [(*operands, *bounds[i : i + 2], DENORMAL_PROBE) for i in range(threads)]
    helping = [_pools[os.getpid()].submit(kernel, *part) for part in parts[1:]]
    if not all([kernel(*parts[0]), *[each.result() for each in helping]]):
        raise RuntimeError("a thread flushes denormal numbers, which changes bits: turn that mode off")


def qk_norm_rope_cache(
    q, k, v, q_weight, k_weight, positions, cos, sin, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k,
    eps, q_out,
):  # fmt: skip
    """Write new tokens into the caches, and the queries, turned, into q_out.

    q [T, Hq, D], k and v [T, Hkv, D]; weights [D] or None; rows after the last request are nobody's.
    """
    tokens, none = int(cu_seqlens_q[-1]), np.empty(0, np.float32)
    weights = [none if weight is None else weight for weight in (q_weight, k_weight)]
    cache = (k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k)
    operands = (q, k, v, *weights, positions, cos, sin, *cache, np.float32(eps), q_out)
    axes = {"query_heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[2], "tokens": tokens}
    wanted = schedule(axes, {"THREAD_COST": THREAD_COST})["parts"]
    share(prepare_tokens, operands, tokens, max(1, min(len(os.sched_getaffinity(0)), tokens, wanted)))


def numerics(constant_axes):
    return {"lanes": LANES}


def schedule(axes, knobs):
    """Choose into how many parts the rows of a call are cut at most: as many as are worth a thread."""
    numbers = axes["tokens"] * (axes["query_heads"] + axes["kv_heads"]) * axes["head_dim"]
    return {"parts": min(16, max(1, numbers // knobs["THREAD_COST"]))}
