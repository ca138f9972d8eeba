"""Residual add and RMS norm on the CPU: rows of the forward and of the gradients, float32.

    h[t, j] = x[t, j] + residual[t, j]
    y[t, j] = h[t, j] * r[t] * w[j]        r[t] = 1 / sqrt(sum_j h[t, j]^2 / width + eps)

The order of every sum is README.md's: LANES partial sums along a row, added by halving; the gradient of w
adds blocks of BLOCK tokens. A task is some rows, or for the gradient of w some columns, so that no schedule
can change a bit.
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


@entry
def add_and_normalize(x, residual, weight, eps, out, total, start, stop, probe):
    lanes = np.empty(LANES, np.float32)
    for t in range(start, stop):
        for j in range(weight.size):
            total[t, j] = canonical(x[t, j] + residual[t, j])
        r = factor(total[t], eps, lanes)
        for j in range(weight.size):
            out[t, j] = canonical(total[t, j] * r * weight[j])
    return keeps_denormals(probe)


@entry
def differentiate_rows(x, weight, dout, dtotal, eps, dx, factors, start, stop, probe):
    """Gradients of the sums x; dtotal, what comes to them from elsewhere, may have no rows."""
    lanes = np.empty(LANES, np.float32)
    for t in range(start, stop):
        r = factor(x[t], eps, lanes)
        factors[t] = r
        if dx.shape[0]:
            c = projection(x[t], weight, dout[t], r, lanes)
            if dtotal.shape[0]:
                for j in range(weight.size):
                    part = fma(-c, x[t, j] * r, dout[t, j] * weight[j])
                    dx[t, j] = canonical(fma(r, part, dtotal[t, j]))
            else:
                for j in range(weight.size):
                    part = fma(-c, x[t, j] * r, dout[t, j] * weight[j])
                    dx[t, j] = canonical(fma(r, part, ZERO))
    return keeps_denormals(probe)


@entry
def differentiate_weight(x, dout, factors, dweight, start, stop, probe):
    """Columns start to stop - 1: blocks of tokens from the first one up, each from +0."""
    part = np.empty(stop - start, np.float32)
    for first in range(0, x.shape[0], BLOCK):
        part[:] = ZERO
        for t in range(first, min(first + BLOCK, x.shape[0])):
            r = factors[t]
            for j in range(stop - start):
                part[j] = fma(dout[t, start + j], x[t, start + j] * r, part[j])
        for j in range(stop - start):
            dweight[start + j] = canonical(dweight[start + j] + part[j])
    return keeps_denormals(probe)


# ---- Host.
ROWS = types.Array(float32, 2, "A", readonly=True)
ROW = types.Array(float32, 1, "A", readonly=True)
OUT, COLUMN = types.Array(float32, 2, "A"), types.Array(float32, 1, "A")
RANGE = (int64, int64, float32[::1])
UNCOMPILED = {
    add_and_normalize: boolean(ROWS, ROWS, ROW, float32, OUT, OUT, *RANGE),
    differentiate_rows: boolean(ROWS, ROW, ROWS, ROWS, float32, OUT, float32[::1], *RANGE),
    differentiate_weight: boolean(ROWS, ROWS, float32[::1], COLUMN, *RANGE),
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


def add_rms_norm(x, residual, weight, eps, out, residual_out):
    """Add the rows of x and residual [T, width] into residual_out, and normalize the sums into out."""
    share(add_and_normalize, (x, residual, weight, np.float32(eps), out, residual_out), len(x), threads_of(x))


def add_rms_norm_backward(residual_out, weight, dout, dresidual_out, eps, dx, dweight, accumulate):
    """Write the gradients; one that is None is left out. dweight is added to if `accumulate`.

    dx is the gradient of x and of residual; a dresidual_out of None counts as zeros.
    """
    x, threads, factors = residual_out, threads_of(residual_out), np.empty(len(residual_out), np.float32)
    none = np.empty((0, 0), np.float32)
    rows, others = none if dx is None else dx, none if dresidual_out is None else dresidual_out
    share(differentiate_rows, (x, weight, dout, others, np.float32(eps), rows, factors), len(x), threads)
    if dweight is not None:
        if not accumulate:
            dweight[...] = 0
        share(differentiate_weight, (x, dout, factors, dweight), x.shape[1], threads)


def threads_of(x):
    axes = {"width": x.shape[1], "tokens": len(x)}
    return max(
        1, min(len(os.sched_getaffinity(0)), len(x), schedule(axes, {"THREAD_COST": THREAD_COST})["parts"])
    )


def numerics(constant_axes):
    return {"lanes": LANES}


def schedule(axes, knobs):
    """Choose into how many parts the rows of a call are cut at most: as many as are worth a thread."""
    return {"parts": min(16, max(1, axes["tokens"] * axes["width"] // knobs["THREAD_COST"]))}
