"""QK norm on the CPU: heads of the forward and of the gradients, float32.

    y[t, h, j] = x[t, h, j] * r[t, h] * w[j]        r[t, h] = 1 / sqrt(sum_j x[t, h, j]^2 / head_dim + eps)

for q with q's weight and for k with k's. The order of every sum is README.md's: LANES partial sums along a
head, added by halving; the gradient of w adds FOLD heads, FOLD such sums, FOLD of these and then those in
order, a token's heads in order and token after token, anew from every TOKEN_BLOCK tokens. A task is some
tokens, or for the gradient of w some columns, so that no schedule can change a bit.
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

FOLD = 8
TOKEN_BLOCK = 64
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


@inner
def normalize_heads(x, weight, eps, out, start, stop):
    width, first, target = np.int64(x.shape[2]), address(x), address(out)
    w = row_at(address(weight), width)
    for t in range(start, stop):
        for h in range(x.shape[1]):
            place = first + t * x.strides[0] + h * x.strides[1]
            a, y = row_at(place, width), row_at(target + t * out.strides[0] + h * out.strides[1], width)
            r = factor(place, width, eps)
            for j in range(width):
                y[j] = canonical(a[j] * r * w[j])


@entry
def normalize(q, k, q_weight, k_weight, eps, q_out, k_out, start, stop, probe):
    normalize_heads(q, q_weight, eps, q_out, start, stop)
    normalize_heads(k, k_weight, eps, k_out, start, stop)
    return keeps_denormals(probe)


@entry
def differentiate_heads(x, weight, dout, eps, dx, factors, start, stop, probe):
    width, first, given, target = np.int64(x.shape[2]), address(x), address(dout), address(dx)
    w_place = address(weight)
    w = row_at(w_place, width)
    for t in range(start, stop):
        for h in range(x.shape[1]):
            place = first + t * x.strides[0] + h * x.strides[1]
            d_place = given + t * dout.strides[0] + h * dout.strides[1]
            r = factor(place, width, eps)
            factors[t, h] = r
            if dx.shape[0]:
                c = projection(place, w_place, d_place, r, width)
                a, d = row_at(place, width), row_at(d_place, width)
                y = row_at(target + t * dx.strides[0] + h * dx.strides[1], width)
                for j in range(width):
                    y[j] = canonical(r * fma(-c, a[j] * r, d[j] * w[j]))
    return keeps_denormals(probe)


@inner
def flush(part, total):
    """Add a sum to that of the level above and begin it anew."""
    for j in range(part.shape[0]):
        total[j] = canonical(total[j] + part[j])
        part[j] = ZERO


@entry
def differentiate_weight(x, dout, factors, dweight, start, stop, probe):
    """Columns start to stop - 1: sums of FOLD heads, of FOLD of them, and of FOLD of those, each from +0."""
    width, first, given = np.int64(stop - start), address(x) + 4 * start, address(dout) + 4 * start
    one, two, three = np.zeros(width, np.float32), np.zeros(width, np.float32), np.zeros(width, np.float32)
    count = 0
    for t in range(x.shape[0]):
        ends = (t + 1) % TOKEN_BLOCK == 0 or t + 1 == x.shape[0]
        for h in range(x.shape[1]):
            r = factors[t, h]
            a = row_at(first + t * x.strides[0] + h * x.strides[1], width)
            d = row_at(given + t * dout.strides[0] + h * dout.strides[1], width)
            for j in range(width):
                one[j] = fma(d[j], a[j] * r, one[j])
            count += 1
            last = ends and h + 1 == x.shape[1]
            if count % FOLD == 0 or last:
                flush(one, two)
            if count % (FOLD * FOLD) == 0 or last:
                flush(two, three)
            if count % (FOLD * FOLD * FOLD) == 0 or last:
                flush(three, dweight[start:stop])
            if last:
                count = 0
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
