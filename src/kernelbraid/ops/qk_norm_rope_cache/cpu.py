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
from llvmlite import ir
from numba import boolean, float32, int32, int64, njit, types
from numba.extending import intrinsic
from numba.np import arrayobj

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


@inner
def address(array):
    return np.int64(array.ctypes.data)


@inner
def factor(x, width, eps):
    """1 / sqrt(mean of squares + eps) of a row."""
    return ONE / np.sqrt(sum_of_squares(x, width) / np.float32(width) + eps)


@inner
def normalize(place, width, weight, eps, out):
    r, x, w = factor(place, width, eps), row_at(place, width), row_at(weight, width)
    for j in range(width):
        out[j] = canonical(x[j] * r * w[j])


@inner
def rotate(x, cos, sin, out):
    """Turn a head."""
    half = cos.size
    for i in range(half):
        s, a, b = sin[i], x[i], x[half + i]
        out[i] = canonical(fma(-b, s, a * cos[i]))
        out[half + i] = canonical(fma(a, s, b * cos[i]))


@inner
def prepare(place, width, weight, eps, known, cos, sin, target, head):
    """A token's head, as attention reads it; without a weight it is not normalized."""
    out = row_at(target, width)
    if not known:
        out[:] = NAN
    elif weight:
        normalize(place, width, weight, eps, head)
        rotate(head, cos, sin, out)
    else:
        rotate(row_at(place, width), cos, sin, out)


@entry
def prepare_tokens(
    q, k, v, q_weight, k_weight, positions, cos, sin, k_cache, v_cache, table, cu, lengths, eps, q_out,
    start, stop, probe,
):  # fmt: skip
    width, pages, size, b = np.int64(q.shape[2]), k_cache.shape[0], k_cache.shape[1], 0
    head = np.empty(width, np.float32)
    places = address(q), address(k), address(v), address(q_out), address(k_cache), address(v_cache)
    tables = address(cos), address(sin)
    of_q, of_k = address(q_weight) if q_weight.size else 0, address(k_weight) if k_weight.size else 0
    for t in range(start, stop):
        p = positions[t]
        known = 0 <= p < cos.shape[0]
        at = p if known else 0
        c = row_at(tables[0] + at * cos.strides[0], width // 2)
        s = row_at(tables[1] + at * sin.strides[0], width // 2)
        for h in range(q.shape[1]):
            place = places[0] + t * q.strides[0] + h * q.strides[1]
            target = places[3] + t * q_out.strides[0] + h * q_out.strides[1]
            prepare(place, width, of_q, eps, known, c, s, target, head)
        while cu[b + 1] <= t:
            b += 1
        n = lengths[b] - cu[b + 1] + t
        if n < 0 or n >= table.shape[1] * size:
            continue
        page, slot = np.int64(table[b, n // size]), n % size
        if page < 0 or page >= pages:
            continue
        k_slot = places[4] + page * k_cache.strides[0] + slot * k_cache.strides[1]
        v_slot = places[5] + page * v_cache.strides[0] + slot * v_cache.strides[1]
        for h in range(k.shape[1]):
            place = places[1] + t * k.strides[0] + h * k.strides[1]
            prepare(place, width, of_k, eps, known, c, s, k_slot + h * k_cache.strides[2], head)
            row = row_at(v_slot + h * v_cache.strides[2], width)
            value = row_at(places[2] + t * v.strides[0] + h * v.strides[1], width)
            for j in range(width):
                row[j] = value[j]
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
