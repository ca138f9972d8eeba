"""RMS norm on the CPU: rows of the forward and of the gradients, float32.

    y[t, j] = x[t, j] * r[t] * w[j]        r[t] = 1 / sqrt(sum_j x[t, j]^2 / width + eps)

The order of every sum is README.md's: LANES partial sums along a row, added by halving; the gradient of w
adds blocks of BLOCK tokens. A task is some rows, or for the gradient of w some columns, so that no schedule
can change a bit.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llvmlite import ir
from numba import boolean, float32, int64, njit, types
from numba.extending import intrinsic
from numba.np import arrayobj

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


# ---- Rows by their address. A vector is LANES float32; addresses and sizes are int64.
I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR, PLACES = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
ZEROS = VECTOR([0.0] * LANES)


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


def vector_fma(b, *operands):
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return b.call(b.module.declare_intrinsic(f"llvm.fma.v{LANES}f32", (), kind), operands)


def spread(b, number, kind):
    """A vector of one number."""
    single = b.insert_element(kind(ir.Undefined), number, I32(0))
    return b.shuffle_vector(single, single, PLACES([0] * LANES))


def loop(b, count, step, carried, body):
    """Emit `for i in range(0, count, step): carried = body(i, carried)`; returns what is carried out."""
    start, head, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
    b.cbranch(b.icmp_signed(">", count, I64(0)), head, done)
    b.position_at_end(head)
    i, inside = b.phi(I64), [b.phi(x.type) for x in carried]
    after, ahead = body(i, inside), b.add(i, I64(step))
    b.cbranch(b.icmp_signed("<", ahead, count), head, done)
    end = b.block
    b.position_at_end(done)
    outside = [b.phi(x.type) for x in carried]
    before, later = [I64(0), *carried, *carried], [ahead, *after, *after]
    for phi, first, other in zip([i, *inside, *outside], before, later, strict=True):
        phi.add_incoming(first, start)
        phi.add_incoming(other, end)
    return outside


def emit_sum(b, count, rows, add):
    """Emit a sum along rows: `add` to LANES partial sums in a register, which are added by halving."""

    def load(kind, row, i):
        return b.load(b.inttoptr(b.add(row, b.mul(i, I64(4))), kind.as_pointer()), align=4)

    def vectors(i, sums):
        return [add(sums[0], *[load(VECTOR, row, i) for row in rows])]

    def singles(i, tails):
        where, place = b.add(whole, i), b.trunc(i, I32)
        return [b.insert_element(x, load(F32, row, where), place) for x, row in zip(tails, rows, strict=True)]

    rest = b.srem(count, I64(LANES))
    whole = b.sub(count, rest)
    (sums,) = loop(b, whole, LANES, [ZEROS], vectors)
    tails = loop(b, rest, 1, [ZEROS] * len(rows), singles)
    there = b.icmp_signed("<", PLACES(list(range(LANES))), spread(b, b.trunc(rest, I32), PLACES))
    sums, half = b.select(there, add(sums, *tails), sums), LANES // 2
    while half:
        sums = b.fadd(sums, b.shuffle_vector(sums, sums, PLACES([lane ^ half for lane in range(LANES)])))
        half //= 2
    return b.extract_element(sums, I32(0))


@intrinsic
def sum_of_squares(typing_context, x, count):
    def codegen(context, b, signature, args):
        return emit_sum(b, args[1], args[:1], lambda sums, x: vector_fma(b, x, x, sums))

    return float32(int64, int64), codegen


@intrinsic
def sum_of_projections(typing_context, x, weight, dout, r, count):
    def codegen(context, b, signature, args):
        *rows, r, count = args
        factors = spread(b, r, VECTOR)

        def add(sums, x, weight, dout):
            return vector_fma(b, b.fmul(dout, weight), b.fmul(x, factors), sums)

        return emit_sum(b, count, rows, add)

    return float32(int64, int64, int64, float32, int64), codegen


@inner
def address(array):
    return np.int64(array.ctypes.data)


@inner
def factor(x, width, eps):
    """1 / sqrt(mean of squares + eps) of a row."""
    return ONE / np.sqrt(sum_of_squares(x, width) / np.float32(width) + eps)


@inner
def projection(x, weight, dout, r, width):
    """Mean of dout * w * (x * r) over a row."""
    return sum_of_projections(x, weight, dout, r, width) / np.float32(width)


@entry
def normalize(x, weight, eps, out, start, stop, probe):
    width, w, first, target = (
        np.int64(weight.size),
        row_at(address(weight), weight.size),
        address(x),
        address(out),
    )
    for t in range(start, stop):
        place = first + t * x.strides[0]
        a, y = row_at(place, width), row_at(target + t * out.strides[0], width)
        r = factor(place, width, eps)
        for j in range(width):
            y[j] = canonical(a[j] * r * w[j])
    return keeps_denormals(probe)


@entry
def differentiate_rows(x, weight, dout, eps, dx, factors, start, stop, probe):
    width, w_place = np.int64(weight.size), address(weight)
    w, first, given, target = row_at(w_place, width), address(x), address(dout), address(dx)
    for t in range(start, stop):
        place, d_place = first + t * x.strides[0], given + t * dout.strides[0]
        r = factor(place, width, eps)
        factors[t] = r
        if dx.shape[0]:
            c = projection(place, w_place, d_place, r, width)
            a, d, y = row_at(place, width), row_at(d_place, width), row_at(target + t * dx.strides[0], width)
            for j in range(width):
                y[j] = canonical(r * fma(-c, a[j] * r, d[j] * w[j]))
    return keeps_denormals(probe)


@entry
def differentiate_weight(x, dout, factors, dweight, start, stop, probe):
    """Columns start to stop - 1: blocks of tokens from the first one up, each from +0."""
    width, at, given = np.int64(stop - start), address(x) + 4 * start, address(dout) + 4 * start
    part = np.empty(width, np.float32)
    for first in range(0, x.shape[0], BLOCK):
        part[:] = ZERO
        for t in range(first, min(first + BLOCK, x.shape[0])):
            r = factors[t]
            a, d = row_at(at + t * x.strides[0], width), row_at(given + t * dout.strides[0], width)
            for j in range(width):
                part[j] = fma(d[j], a[j] * r, part[j])
        for j in range(width):
            dweight[start + j] = canonical(dweight[start + j] + part[j])
    return keeps_denormals(probe)


# ---- Host.
ROWS = types.Array(float32, 2, "A", readonly=True)
ROW = types.Array(float32, 1, "A", readonly=True)
OUT, COLUMN = types.Array(float32, 2, "A"), types.Array(float32, 1, "A")
RANGE = (int64, int64, float32[::1])
UNCOMPILED = {
    normalize: boolean(ROWS, ROW, float32, OUT, *RANGE),
    differentiate_rows: boolean(ROWS, ROW, ROWS, float32, OUT, float32[::1], *RANGE),
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


def rms_norm(x, weight, eps, out):
    """Normalize the rows of x [T, width] into out."""
    share(normalize, (x, weight, np.float32(eps), out), len(x), threads_of(x))


def rms_norm_backward(x, weight, dout, eps, dx, dweight, accumulate):
    """Write the gradients; one that is None is left out. dweight is added to if `accumulate`."""
    threads, factors = threads_of(x), np.empty(len(x), np.float32)
    rows = np.empty((0, 0), np.float32) if dx is None else dx
    share(differentiate_rows, (x, weight, dout, np.float32(eps), rows, factors), len(x), threads)
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
