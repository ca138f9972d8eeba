"""QK norm on the CPU: heads of the forward and of the gradients, float32.

    y[t, h, j] = x[t, h, j] * r[t, h] * w[j]        r[t, h] = 1 / sqrt(sum_j x[t, h, j]^2 / head_dim + eps)

for q with q's weight and for k with k's. The order of every sum is README.md's: LANES partial sums along a
head, added by halving; the gradient of w adds blocks of BLOCK heads, a token's heads in order and token after
token. A task is some tokens, or for the gradient of w some columns, so that no schedule can change a bit.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import boolean, float32, int64, njit, types
from numba.extending import intrinsic

LANES = 16
THREAD_COST = 32768

KNOBS = {
    "LANES": ("numeric", (8, 16, 32, 64)),
    "THREAD_COST": ("schedule", (8192, 32768, 131072, 524288)),
}

BLOCK = 64
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
def projection(x, weight, dout, r, lanes):
    """Mean of dout * w * (x * r) over a row."""
    width = x.size
    lanes[:] = ZERO
    whole = width // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            j = start + lane
            lanes[lane] = fma(dout[j] * weight[j], x[j] * r, lanes[lane])
    for lane in range(width - whole):
        j = whole + lane
        lanes[lane] = fma(dout[j] * weight[j], x[j] * r, lanes[lane])
    return halved(lanes) / np.float32(width)


@inner
def normalize_heads(x, weight, eps, out, start, stop, lanes):
    for t in range(start, stop):
        for h in range(x.shape[1]):
            r = factor(x[t, h], eps, lanes)
            for j in range(weight.size):
                out[t, h, j] = canonical(x[t, h, j] * r * weight[j])


@entry
def normalize(q, k, q_weight, k_weight, eps, q_out, k_out, start, stop, probe):
    lanes = np.empty(LANES, np.float32)
    normalize_heads(q, q_weight, eps, q_out, start, stop, lanes)
    normalize_heads(k, k_weight, eps, k_out, start, stop, lanes)
    return keeps_denormals(probe)


@entry
def differentiate_heads(x, weight, dout, eps, dx, factors, start, stop, probe):
    lanes = np.empty(LANES, np.float32)
    for t in range(start, stop):
        for h in range(x.shape[1]):
            r = factor(x[t, h], eps, lanes)
            factors[t, h] = r
            if dx.shape[0]:
                c = projection(x[t, h], weight, dout[t, h], r, lanes)
                for j in range(weight.size):
                    dx[t, h, j] = canonical(r * fma(-c, x[t, h, j] * r, dout[t, h, j] * weight[j]))
    return keeps_denormals(probe)


@entry
def differentiate_weight(x, dout, factors, dweight, start, stop, probe):
    """Columns start to stop - 1: blocks of heads from the first token's first, each from +0."""
    part = np.zeros(stop - start, np.float32)
    count, heads = 0, x.shape[0] * x.shape[1]
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            r = factors[t, h]
            for j in range(stop - start):
                part[j] = fma(dout[t, h, start + j], x[t, h, start + j] * r, part[j])
            count += 1
            if count % BLOCK == 0 or count == heads:
                for j in range(stop - start):
                    dweight[start + j] = canonical(dweight[start + j] + part[j])
                    part[j] = ZERO
    return keeps_denormals(probe)


# ---- Host.
HEADS = types.Array(float32, 3, "A", readonly=True)
ROW = types.Array(float32, 1, "A", readonly=True)
OUT, COLUMN = types.Array(float32, 3, "A"), types.Array(float32, 1, "A")
RANGE = (int64, int64, float32[::1])
UNCOMPILED = {
    normalize: boolean(HEADS, HEADS, ROW, ROW, float32, OUT, OUT, *RANGE),
    differentiate_heads: boolean(HEADS, ROW, HEADS, float32, OUT, float32[:, ::1], *RANGE),
    differentiate_weight: boolean(HEADS, HEADS, float32[:, ::1], COLUMN, *RANGE),
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


def qk_norm(q, k, q_weight, k_weight, eps, q_out, k_out):
    """Normalize the heads of q [T, Hq, D] and k [T, Hkv, D] into q_out and k_out."""
    threads = threads_of(q, k)
    share(normalize, (q, k, q_weight, k_weight, np.float32(eps), q_out, k_out), len(q), threads)


def qk_norm_backward(
    q, k, q_weight, k_weight, dq_out, dk_out, eps, dq, dk, dq_weight, dk_weight, accumulate
):  # fmt: skip
    """Write the gradients; one that is None is left out. Those of weights are added to if `accumulate`."""
    threads = threads_of(q, k)
    for x, weight, dout, dx, dweight in (
        (q, q_weight, dq_out, dq, dq_weight),
        (k, k_weight, dk_out, dk, dk_weight),
    ):
        if dx is None and dweight is None:
            continue
        heads, factors = (
            np.empty((0, 0, 0), np.float32) if dx is None else dx,
            np.empty(x.shape[:2], np.float32),
        )
        share(differentiate_heads, (x, weight, dout, np.float32(eps), heads, factors), len(x), threads)
        if dweight is not None:
            if not accumulate:
                dweight[...] = 0
            share(differentiate_weight, (x, dout, factors, dweight), x.shape[2], threads)


def threads_of(q, k):
    axes = {"query_heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[2], "tokens": len(q)}
    wanted = schedule(axes, {"THREAD_COST": THREAD_COST})["parts"]
    return max(1, min(len(os.sched_getaffinity(0)), len(q), q.shape[2], wanted))


def numerics(constant_axes):
    return {"lanes": LANES}


def schedule(axes, knobs):
    """Choose into how many parts the rows of a call are cut at most: as many as are worth a thread."""
    numbers = axes["tokens"] * (axes["query_heads"] + axes["kv_heads"]) * axes["head_dim"]
    return {"parts": min(16, max(1, numbers // knobs["THREAD_COST"]))}
