"""Router of a mixture on the CPU: chosen experts, their weights and the gradient of the logits, float32.

    experts[t] = the top_k largest of x[t], equal ones by index    softmax: p = exp2((x - max) * log2 e) / sum
    weights[t, s] = p[experts[t, s]], or that over their sum       sigmoid: p = 1 / (1 + exp2(-x * log2 e))

Experts are chosen by their logits, compared as integers, so that no rounding decides. The order of sums is
README.md's: over all experts LANES partial sums added by halving, over slots one after the other. A task is
some rows, so that no schedule can change a bit.
"""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llvmlite import ir
from numba import boolean, float32, int32, int64, njit, types
from numba.extending import intrinsic

LANES = 16
THREAD_COST = 65536

KNOBS = {
    "LANES": ("numeric", (8, 16, 32)),
    "THREAD_COST": ("schedule", (16384, 65536, 262144)),
}

EXP2 = "1p0 1.62e432p-1 1.ebfbe2p-3 1.c6ae72p-5 1.3b270ep-7 1.5f7276p-10 1.470b48p-13"
EXP2_DESCENDING = tuple(np.float32(float.fromhex(c)) for c in reversed(EXP2.split()))
SHIFT = np.float32(12582912)
LOG2E = np.float32(math.log2(math.e))
INF, NAN = np.float32(np.inf), np.float32(np.nan)
ZERO, ONE = np.float32(0), np.float32(1)
DENORMAL_PROBE = np.array([2.0**-100, 2.0**-40, 2.0**100], np.float32)  # their product passes a denormal

inner = njit(error_model="numpy")
entry = njit(error_model="numpy", nogil=True, cache=True)


@intrinsic
def fma(typing_context, a, b, c):
    """a * b + c rounded once."""
    return float32(float32, float32, float32), lambda context, builder, signature, args: builder.fma(*args)


@intrinsic
def bits_of(typing_context, x):
    return int32(float32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def from_bits(typing_context, x):
    return float32(int32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.FloatType())


@inner
def canonical(x):
    return x if x == x else NAN


@inner
def keeps_denormals(probe):
    return probe[0] * probe[1] * probe[2] != ZERO


@inner
def exp2(x):
    t = x + SHIFT
    r = x - (t - SHIFT)
    p = EXP2_DESCENDING[0]
    for c in EXP2_DESCENDING[1:]:
        p = fma(p, r, c)
    y = p * from_bits(np.int32((bits_of(t) << 23) + 0x3F800000))
    return ZERO if x < -125 else (INF if x > 127 else y)


@inner
def sigmoid(x):
    return ONE / (ONE + exp2(-x * LOG2E))


@inner
def rank_of(x):
    """An integer that orders floats: both zeros are equal, NaN comes last."""
    bits = bits_of(x + ZERO)
    return np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF)) if x == x else np.int32(-0x80000000)


@inner
def choose(x, experts, ranks):
    """Indices of the largest of a row, in descending order, equal ones in ascending order of their index."""
    filled, slots = 0, experts.size
    for j in range(x.size):
        rank = rank_of(x[j])
        if filled == slots and rank <= ranks[slots - 1]:
            continue
        s = filled if filled < slots else slots - 1
        while s > 0 and ranks[s - 1] < rank:
            ranks[s], experts[s] = ranks[s - 1], experts[s - 1]
            s -= 1
        ranks[s], experts[s] = rank, j
        filled = min(filled + 1, slots)


@inner
def total(x, largest, powers, lanes):
    """Keep exp2((x - largest) * log2 e) in `powers` and return their sum."""
    count = x.size
    for j in range(count):
        powers[j] = exp2((x[j] - largest) * LOG2E)
    lanes[:] = ZERO
    whole = count // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] += powers[start + lane]
    for lane in range(count - whole):
        lanes[lane] += powers[whole + lane]
    half = LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return lanes[0]


@entry
def route(logits, by_sigmoid, renormalize, weights, experts, start, stop, probe):
    lanes, powers = np.empty(LANES, np.float32), np.empty(logits.shape[1], np.float32)
    slots = experts.shape[1]
    chosen, ranks = np.empty(slots, np.int32), np.empty(slots, np.int32)
    values = np.empty(slots, np.float32)
    for t in range(start, stop):
        x = logits[t]
        choose(x, chosen, ranks)
        largest = x[chosen[0]]
        share = ONE
        if by_sigmoid:
            for s in range(slots):
                values[s] = sigmoid(x[chosen[s]])
        else:
            for s in range(slots):
                values[s] = exp2((x[chosen[s]] - largest) * LOG2E)
            if not renormalize:
                share = total(x, largest, powers, lanes)
        if renormalize:
            share = values[0]
            for s in range(1, slots):
                share += values[s]
        for s in range(slots):
            experts[t, s] = chosen[s]
            weights[t, s] = canonical(values[s] / share)
    return keeps_denormals(probe)


@entry
def differentiate(logits, weights, experts, dweights, by_sigmoid, renormalize, dlogits, start, stop, probe):
    lanes, powers = np.empty(LANES, np.float32), np.empty(logits.shape[1], np.float32)
    for t in range(start, stop):
        x, w, d, chosen = logits[t], weights[t], dweights[t], experts[t]
        projected = ZERO
        if renormalize or not by_sigmoid:
            for s in range(w.size):
                projected = fma(d[s], w[s], projected)
        if by_sigmoid or renormalize:
            for j in range(x.size):
                dlogits[t, j] = ZERO
        else:
            first = chosen[0] if 0 <= chosen[0] < x.size else 0
            share = total(x, x[first], powers, lanes)
            for j in range(x.size):
                powers[j] = powers[j] / share
                dlogits[t, j] = canonical(powers[j] * (ZERO - projected))
        for s in range(w.size):
            j = chosen[s]
            if not 0 <= j < x.size:
                continue
            if not by_sigmoid:
                dlogits[t, j] = canonical((w[s] if renormalize else powers[j]) * (d[s] - projected))
            else:
                dlogits[t, j] = canonical((d[s] - projected) * w[s] * (ONE - sigmoid(x[j])))
    return keeps_denormals(probe)


# ---- Host.
ROWS = types.Array(float32, 2, "A", readonly=True)
INDICES = types.Array(int32, 2, "A", readonly=True)
ROWS_OUT, INDICES_OUT = types.Array(float32, 2, "A"), types.Array(int32, 2, "A")
RANGE = (int64, int64, float32[::1])
UNCOMPILED = {
    route: boolean(ROWS, boolean, boolean, ROWS_OUT, INDICES_OUT, *RANGE),
    differentiate: boolean(ROWS, ROWS, INDICES, ROWS, boolean, boolean, ROWS_OUT, *RANGE),
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


def share_rows(kernel, operands, count, threads):
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


def moe_router(logits, by_sigmoid, renormalize, weights, experts):
    """Choose for the rows of logits [T, E] experts [T, k] int32, and write their weights [T, k]."""
    operands = (logits, bool(by_sigmoid), bool(renormalize), weights, experts)
    share_rows(route, operands, len(logits), threads_of(logits, experts))


def moe_router_backward(logits, weights, experts, dweights, by_sigmoid, renormalize, dlogits):
    """Write the gradient of the logits; weights and experts are the forward's."""
    operands = (logits, weights, experts, dweights, bool(by_sigmoid), bool(renormalize), dlogits)
    share_rows(differentiate, operands, len(logits), threads_of(logits, experts))


def threads_of(logits, experts):
    axes = {"tokens": len(logits), "experts": logits.shape[1], "top_k": experts.shape[1]}
    parts = schedule(axes, {"THREAD_COST": THREAD_COST})["parts"]
    return max(1, min(len(os.sched_getaffinity(0)), len(logits), parts))


def numerics(constant_axes):
    return {"lanes": LANES}


def schedule(axes, knobs):
    """Choose into how many parts the rows of a call are cut at most: as many as are worth a thread."""
    return {"parts": min(16, max(1, axes["tokens"] * axes["experts"] // knobs["THREAD_COST"]))}
