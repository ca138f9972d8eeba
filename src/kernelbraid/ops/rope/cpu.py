"""Rotary position embedding on the CPU: halves of heads turned, forth and, for gradients, back, float32.

    out[t, h, i]       = x[t, h, i] * cos[p, i] - x[t, h, D/2 + i] * sin[p, i]       p = positions[t]
    out[t, h, D/2 + i] = x[t, h, D/2 + i] * cos[p, i] + x[t, h, i] * sin[p, i]       i = 0 .. D/2 - 1

for q and for k: a product, then an fma. Gradients turn back, by the negative sine. A position outside the
tables gives NaN. A task is some tokens, so that no schedule can change a bit.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import boolean, float32, int32, int64, njit, types
from numba.extending import intrinsic
from numba.np import arrayobj

THREAD_COST = 32768

KNOBS = {
    "THREAD_COST": ("schedule", (8192, 32768, 131072, 524288)),
}

NAN = np.float32(np.nan)
ZERO = np.float32(0)
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


@intrinsic
def row_at(typing_context, address, count):
    """The numbers from an address on, as an array that nobody owns: what it is made of is not counted."""
    kind = float32[::1]

    def codegen(context, builder, signature, args):
        row = arrayobj.make_array(kind)(context, builder)
        size, first = context.get_constant(types.intp, 4), builder.inttoptr(args[0], row.data.type)
        arrayobj.populate_array(row, first, [args[1]], [size], size, None)
        return row._getvalue()

    return kind(int64, int64), codegen


@inner
def address(array):
    return np.int64(array.ctypes.data)


@inner
def rotate(x, cos, sin, sign, out):
    """Turn a head."""
    half = cos.size
    for i in range(half):
        s, a, b = sign * sin[i], x[i], x[half + i]
        out[i] = canonical(fma(-b, s, a * cos[i]))
        out[half + i] = canonical(fma(a, s, b * cos[i]))


@inner
def rotate_heads(x, positions, cos, sin, sign, out, start, stop):
    width, first, target = np.int64(x.shape[2]), address(x), address(out)
    of_cos, of_sin, half = address(cos), address(sin), np.int64(cos.shape[1])
    for t in range(start, stop):
        p = positions[t]
        known = 0 <= p < cos.shape[0]
        at = p if known else 0
        c, s = row_at(of_cos + at * cos.strides[0], half), row_at(of_sin + at * sin.strides[0], half)
        for h in range(x.shape[1]):
            a = row_at(first + t * x.strides[0] + h * x.strides[1], width)
            y = row_at(target + t * out.strides[0] + h * out.strides[1], width)
            if known:
                rotate(a, c, s, sign, y)
            else:
                y[:] = NAN


@entry
def rotate_tokens(q, k, positions, cos, sin, sign, q_out, k_out, start, stop, probe):
    rotate_heads(q, positions, cos, sin, sign, q_out, start, stop)
    rotate_heads(k, positions, cos, sin, sign, k_out, start, stop)
    return keeps_denormals(probe)


# ---- Host.
HEADS, TABLE = (types.Array(float32, rank, "A", readonly=True) for rank in (3, 2))
POSITIONS, OUT = types.Array(int32, 1, "A", readonly=True), types.Array(float32, 3, "A")
RANGE = (int64, int64, float32[::1])
UNCOMPILED = {
    rotate_tokens: boolean(HEADS, HEADS, POSITIONS, TABLE, TABLE, float32, OUT, OUT, *RANGE),
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


def rope(q, k, positions, cos, sin, q_out, k_out):
    """Turn the heads of q [T, Hq, D] and k [T, Hkv, D] into q_out and k_out."""
    share(rotate_tokens, (q, k, positions, cos, sin, np.float32(1), q_out, k_out), len(q), threads_of(q, k))


def rope_backward(positions, cos, sin, dq_out, dk_out, dq, dk):
    """Write the gradients, turned back; one that is None is left out."""
    (dq_out, dq), (dk_out, dk) = (
        (dout[:, :0], np.empty((0, 0, 0), np.float32)) if dx is None else (dout, dx)
        for dout, dx in ((dq_out, dq), (dk_out, dk))
    )
    operands = (dq_out, dk_out, positions, cos, sin, np.float32(-1), dq, dk)
    share(rotate_tokens, operands, len(dq_out), threads_of(dq_out, dk_out))


def threads_of(q, k):
    axes = {"query_heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[2], "tokens": len(q)}
    wanted = schedule(axes, {"THREAD_COST": THREAD_COST})["parts"]
    return max(1, min(len(os.sched_getaffinity(0)), len(q), wanted))


def numerics(constant_axes):
    return {}


def schedule(axes, knobs):
    """Choose into how many parts the rows of a call are cut at most: as many as are worth a thread."""
    numbers = axes["tokens"] * (axes["query_heads"] + axes["kv_heads"]) * axes["head_dim"]
    return {"parts": min(16, max(1, numbers // knobs["THREAD_COST"]))}
