"""SwiGLU on the CPU: rows of the forward and of the gradients, float32.

    out[t, j] = gate[t, j] / (1 + exp(-gate[t, j])) * up[t, j]

There is no sum: README.md writes out the steps of an element, the exponential too. A task is some rows, so
that no schedule can change a bit.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llvmlite import ir
from numba import boolean, float32, int32, int64, njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

EXP2_DEGREE = 6
THREAD_COST = 131072

KNOBS = {
    "EXP2_DEGREE": ("numeric", (4, 5, 6, 7)),
    "THREAD_COST": ("schedule", (32768, 131072, 524288, 2097152)),
}

EXP2 = {
    4: "1p0 1.62dfcap-1 1.ebf1b4p-3 1.ca9008p-5 1.409102p-7",
    5: "1p0 1.62e39ep-1 1.ebfa4ep-3 1.c74322p-5 1.3cbea8p-7 1.23a5eep-10",
    6: "1p0 1.62e432p-1 1.ebfbe2p-3 1.c6ae72p-5 1.3b270ep-7 1.5f7276p-10 1.470b48p-13",
    7: "1p0 1.62e430p-1 1.ebfbe0p-3 1.c6b056p-5 1.3b2a1cp-7 1.5dc052p-10 1.443f96p-13 1.c047dap-17",
}
DESCENDING = tuple(np.float32(float.fromhex(c)) for c in reversed(EXP2[EXP2_DEGREE].split()))
LOG2E = np.float32(float.fromhex("0x1.715476p+0"))
LOG2E_REST = np.float32(float.fromhex("0x1.4ae0c0p-26"))
SHIFT = np.float32(12582912)
LOW, HIGH = np.float32(-89), np.float32(88)  # of exponents from -127, of power 0, to 128, of power infinity
NAN = np.float32(np.nan)
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


@intrinsic
def pointer(typing_context, address):
    to = ir.FloatType().as_pointer()
    return types.CPointer(float32)(address), lambda context, builder, signature, args: builder.inttoptr(
        args[0], to
    )


@inner
def contiguous(row):
    """The same row, known to the compiler as contiguous."""
    return carray(pointer(row.ctypes.data), (row.size,))


@inner
def canonical(x):
    return x if x == x else NAN


@inner
def keeps_denormals(probe):
    return probe[0] * probe[1] * probe[2] != ZERO


@inner
def exp_of_minus(g):
    """exp(-g); a NaN gives a number."""
    c = g if g > LOW else LOW
    c = c if c < HIGH else HIGH
    t = fma(c, -LOG2E, SHIFT)
    n = t - SHIFT
    r = fma(c, -LOG2E_REST, fma(c, -LOG2E, -n))
    p = DESCENDING[0]
    for coefficient in DESCENDING[1:]:
        p = fma(p, r, coefficient)
    return p * from_bits(np.int32((bits_of(t) << 23) + 0x3F800000))


@entry
def activate(gate, up, out, start, stop, probe):
    for t in range(start, stop):
        g, u, o = contiguous(gate[t]), contiguous(up[t]), contiguous(out[t])
        for j in range(o.size):
            o[j] = canonical(g[j] / (ONE + exp_of_minus(g[j])) * u[j])
    return keeps_denormals(probe)


@entry
def differentiate(gate, up, dout, dgate, dup, start, stop, probe):
    for t in range(start, stop):
        g, u, d = contiguous(gate[t]), contiguous(up[t]), contiguous(dout[t])
        dg, du = contiguous(dgate[t]), contiguous(dup[t])
        for j in range(d.size):
            s = ONE / (ONE + exp_of_minus(g[j]))
            y = g[j] * s
            dg[j] = canonical(d[j] * u[j] * fma(y, ONE - s, s))
            du[j] = canonical(d[j] * y)
    return keeps_denormals(probe)


# ---- Host.
ROWS, OUT = types.Array(float32, 2, "A", readonly=True), types.Array(float32, 2, "A")
RANGE = (int64, int64, float32[::1])
UNCOMPILED = {
    activate: boolean(ROWS, ROWS, OUT, *RANGE),
    differentiate: boolean(ROWS, ROWS, ROWS, OUT, OUT, *RANGE),
}
_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def compiled(kernel):
    """Compile a kernel at its first use, for rows of any stride."""
    with _lock:
        if kernel in UNCOMPILED:
            kernel.compile(UNCOMPILED.pop(kernel))
            kernel.disable_compile()
    return kernel


def share(kernel, operands, count, threads):
    """Run a kernel over 0 .. count - 1 in equal parts, one a thread, this one among them."""
    kernel = compiled(kernel)
    parts = [
        (*operands, count * i // threads, count * (i + 1) // threads, DENORMAL_PROBE) for i in range(threads)
    ]
    with _lock:
        if threads > 1 and os.getpid() not in _pools:  # a forked child makes its own pool
            _pools.clear()
            _pools[os.getpid()] = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    helping = [_pools[os.getpid()].submit(kernel, *part) for part in parts[1:]]
    if not all([kernel(*parts[0]), *[each.result() for each in helping]]):
        raise RuntimeError("a thread flushes denormal numbers, which changes bits: turn that mode off")


def swiglu(gate, up, out):
    """Activate rows of gate and up [T, width] into out."""
    share(activate, (gate, up, out), len(gate), threads_of(gate))


def swiglu_backward(gate, up, dout, dgate, dup):
    """Write the gradients; both are always computed, from one exponential."""
    share(differentiate, (gate, up, dout, dgate, dup), len(gate), threads_of(gate))


def threads_of(x):
    axes = {"width": x.shape[1], "tokens": len(x)}
    return max(
        1, min(len(os.sched_getaffinity(0)), len(x), schedule(axes, {"THREAD_COST": THREAD_COST})["parts"])
    )


def numerics(constant_axes):
    return {"exp2_degree": EXP2_DEGREE}


def schedule(axes, knobs):
    """Choose into how many parts the rows of a call are cut at most: as many as are worth a thread."""
    return {"parts": min(16, max(1, axes["tokens"] * axes["width"] // knobs["THREAD_COST"]))}
