"""Embedding on the CPU: rows of a table by id, and the gradient of the table, float32.

    out[t, j] = weight[ids[t], j]        dweight[v, j] = sum over t with ids[t] = v of dout[t, j]

Rows are copied. The sum goes in token order from what is there: one chain an element, so that neither threads
nor the pieces that tokens come in can change a bit. An id outside of the table gives a row of NaN, and adds
nothing.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llvmlite import ir
from numba import boolean, float32, int64, njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

THREAD_COST = 262144

KNOBS = {
    "THREAD_COST": ("schedule", (262144, 1048576, 4194304, 16777216)),
}

NAN = np.float32(np.nan)
ZERO = np.float32(0)
DENORMAL_PROBE = np.array([2.0**-100, 2.0**-40, 2.0**100], np.float32)  # their product passes a denormal

inner = njit(error_model="numpy")
entry = njit(error_model="numpy", nogil=True, cache=True)


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


@entry
def copy_rows(ids, weight, out, start, stop, probe):
    for t in range(start, stop):
        o, v = contiguous(out[t]), ids[t]
        if 0 <= v < weight.shape[0]:
            w = contiguous(weight[v])
            for j in range(o.size):
                o[j] = w[j]
        else:
            for j in range(o.size):
                o[j] = NAN
    return True


@entry
def clear(dweight, start, stop, probe):
    if stop > start and dweight.strides[0] == 4 * dweight.shape[1]:
        whole = carray(pointer(dweight[start].ctypes.data), ((stop - start) * dweight.shape[1],))
        for i in range(whole.size):
            whole[i] = ZERO
    else:
        for v in range(start, stop):
            dweight[v] = ZERO
    return True


@entry
def group(ids, vocabulary, order, first, found):
    """List the tokens of each id that occurs in their order, ids ascending; returns how many ids there are.

    Id number i is found[i], its tokens are order[first[i]] to order[first[i + 1] - 1].
    """
    place = np.zeros(vocabulary, np.int64)
    for v in ids:
        if 0 <= v < vocabulary:
            place[v] += 1
    count = at = 0
    for v in range(vocabulary):
        if place[v]:
            found[count], first[count] = v, at
            count += 1
            at += place[v]
            place[v] = at - place[v]
    first[count] = at
    for t in range(ids.size):
        v = ids[t]
        if 0 <= v < vocabulary:
            order[place[v]] = t
            place[v] += 1
    return count


@entry
def add_rows(dout, order, first, found, dweight, start, stop, probe):
    """Add the tokens of ids number start to stop - 1, each in order to what is there."""
    for i in range(start, stop):
        w = contiguous(dweight[found[i]])
        for at in range(first[i], first[i + 1]):
            d = contiguous(dout[order[at]])
            for j in range(w.size):
                w[j] = canonical(w[j] + d[j])
    return keeps_denormals(probe)


# ---- Host.
IDS, LIST = types.Array(int64, 1, "A", readonly=True), int64[::1]
ROWS, OUT = types.Array(float32, 2, "A", readonly=True), types.Array(float32, 2, "A")
RANGE = (int64, int64, float32[::1])
UNCOMPILED = {
    copy_rows: boolean(IDS, ROWS, OUT, *RANGE),
    clear: boolean(OUT, *RANGE),
    group: int64(IDS, int64, LIST, LIST, LIST),
    add_rows: boolean(ROWS, LIST, LIST, LIST, OUT, *RANGE),
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


def share(kernel, operands, bounds):
    """Run a kernel from each of the bounds to the next, one part a thread, this one among them."""
    kernel = compiled(kernel)
    parts = [(*operands, *bounds[i : i + 2], DENORMAL_PROBE) for i in range(len(bounds) - 1)]
    with _lock:
        if len(parts) > 1 and os.getpid() not in _pools:  # a forked child makes its own pool
            _pools.clear()
            _pools[os.getpid()] = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    helping = [_pools[os.getpid()].submit(kernel, *part) for part in parts[1:]]
    if not all([kernel(*parts[0]), *[each.result() for each in helping]]):
        raise RuntimeError("a thread flushes denormal numbers, which changes bits: turn that mode off")


def equal_parts(count, width):
    """Bounds of equal parts of that many rows, as many as are worth a thread."""
    parts = schedule({"tokens": count, "width": width}, {"THREAD_COST": THREAD_COST})["parts"]
    parts = max(1, min(parts, count, len(os.sched_getaffinity(0))))
    return [count * i // parts for i in range(parts + 1)]


def embedding(ids, weight, out):
    """Copy rows of weight [V, width] by ids [T] into out [T, width]; NaN where there is no such row."""
    ids = ids.astype(np.int64, copy=False)
    share(copy_rows, (ids, weight, out), equal_parts(len(ids), weight.shape[1]))


def embedding_backward(ids, weight, dout, dweight, accumulate):
    """Write the gradient of weight, which is not read, or add it to dweight if `accumulate`."""
    ids = ids.astype(np.int64, copy=False)
    vocabulary, width = dweight.shape
    if not accumulate:
        share(clear, (dweight,), equal_parts(vocabulary, width))
    order, first, found = (np.empty(len(ids) + 1, np.int64) for _ in range(3))
    count = compiled(group)(ids, vocabulary, order, first, found)
    tokens = equal_parts(int(first[count]), width)
    bounds = np.searchsorted(first[: count + 1], tokens).tolist()
    share(add_rows, (dout, order, first, found, dweight), bounds)


def numerics(constant_axes):
    return {}


def schedule(axes, knobs):
    """Choose into how many parts the rows of a call are cut at most: as many as are worth a thread."""
    return {"parts": min(16, max(1, axes["tokens"] * axes["width"] // knobs["THREAD_COST"]))}
