"""A good attention, small enough to break on purpose: one row of one head at a time, the contract's bits.

`broken.py` edits this text; each edit is a mistake that somebody makes.
"""

import itertools
import math

import numpy as np
from llvmlite import ir
from numba import float32, int32, int64, njit, types
from numba.extending import intrinsic

CHUNK = 256
KEY_BLOCK = 32
EXP2_DEGREE = 6

KNOBS = {
    "CHUNK": ("numeric", (256, 512)),
    "KEY_BLOCK": ("numeric", (16, 32, 64)),
    "EXP2_DEGREE": ("numeric", (6,)),
}
LANES = 16
GRADIENT_BLOCK = 64
SHIFT = np.float32(12582912)
LN2 = np.float32(math.log(2))
INF = np.float32(np.inf)
EXP2 = "1p0 1.62e432p-1 1.ebfbe2p-3 1.c6ae72p-5 1.3b270ep-7 1.5f7276p-10 1.470b48p-13"
LOG2 = "1.715476p1 1.ec709ep-1 1.2776c6p-1 1.a61762p-2 1.484b14p-2"
EXP2_DESCENDING = tuple(np.float32(float.fromhex(c)) for c in reversed(EXP2.split()))
LOG2_DESCENDING = tuple(np.float32(float.fromhex(c)) for c in reversed(LOG2.split()))


@intrinsic
def fma(typing_context, a, b, c):
    return float32(float32, float32, float32), lambda context, builder, signature, args: builder.fma(*args)


@intrinsic
def bits_of(typing_context, x):
    return int32(float32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def from_bits(typing_context, x):
    return float32(int32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.FloatType())


@njit
def exp2(x):
    if x < np.float32(-125):
        return np.float32(0)
    if x != x:
        return x
    n = (x + SHIFT) - SHIFT
    p = EXP2_DESCENDING[0]
    for c in EXP2_DESCENDING[1:]:
        p = fma(p, x - n, c)
    return p * from_bits(np.int32((np.int32(n) + 127) << 23))


@njit
def log2(x):
    if not (np.float32(0) < x < INF):
        return -INF if x == np.float32(0) else x
    offset = bits_of(x) - 0x3F3504F3
    f = from_bits(np.int32((offset & 0x7FFFFF) + 0x3F3504F3))
    z = (f - np.float32(1)) / (f + np.float32(1))
    p = LOG2_DESCENDING[0]
    for c in LOG2_DESCENDING[1:]:
        p = fma(p, z * z, c)
    return fma(z, p, np.float32(offset >> 23))


@njit
def weight(x, base):
    return exp2(x - base)


@njit
def canonical(x):
    return x if x == x else from_bits(np.int32(0x7FC00000))


@njit
def merge(M, L, A, m, total, acc):
    top = m if m > M else M
    base = np.float32(0) if top == -INF else top
    a0, a1 = exp2(M - base), exp2(m - base)
    for d in range(A.size):
        A[d] = fma(acc[d], a1, A[d] * a0)
    return top, fma(total, a1, L * a0)


READ, WRITTEN = types.Array(float32, 3, "A", readonly=True), types.Array(float32, 3, "A")


@njit((READ, READ, READ, int64, float32, int64, int64, WRITTEN, float32[:, :]), error_model="numpy")
def attend(q, keys, values, position, cl, chunk, block, out, lse):
    """Rows q [R, Hq, D] at positions `position ...` over keys and values [n, Hkv, D]."""
    group = q.shape[1] // keys.shape[1]
    x, lanes = np.empty(block, np.float32), np.empty(LANES, np.float32)
    acc, A = np.empty(q.shape[2], np.float32), np.empty(q.shape[2], np.float32)
    for row in range(q.shape[0]):
        seen = position + row + 1
        for h in range(q.shape[1]):
            g = h // group
            M, L = -INF, np.float32(0)
            A[:] = 0
            for first in range(0, seen, chunk):
                m = -INF
                lanes[:], acc[:] = 0, 0
                for start in range(first, min(first + chunk, seen), block):
                    end = min(start + block, first + chunk, seen)
                    top = m
                    for j in range(start, end):
                        s = np.float32(0)
                        for d in range(A.size):
                            s = fma(q[row, h, d], keys[j, g, d], s)
                        x[j - start] = s * cl
                        if x[j - start] > top:
                            top = x[j - start]
                    base = np.float32(0) if top == -INF else top
                    a = exp2(m - base)
                    for d in range(A.size):
                        acc[d] *= a
                    for i in range(LANES):
                        lanes[i] *= a
                    for j in range(start, end):
                        p = weight(x[j - start], base)
                        lanes[j % LANES] += p
                        for d in range(A.size):
                            acc[d] = fma(p, values[j, g, d], acc[d])
                    m = top
                half = LANES // 2
                while half:
                    for i in range(half):
                        lanes[i] += lanes[i + half]
                    half //= 2
                total = lanes[0]
                M, L = merge(M, L, A, m, total, acc)
            for d in range(A.size):
                out[row, h, d] = canonical(A[d] / L + np.float32(0))
            lse[h, row] = canonical((M + log2(L)) * LN2)


def scaled(softmax_scale):
    return np.float32(softmax_scale * math.log2(math.e))


def attention(q, k, v, cu_seqlens, max_seqlen, softmax_scale, out, lse):
    cl = scaled(softmax_scale)
    for start, stop in itertools.pairwise(cu_seqlens):
        if start < stop:
            at = slice(start, stop)
            attend(q[at], k[at], v[at], 0, cl, CHUNK, KEY_BLOCK, out[at], lse[:, at])


def paged_attention(
    q,
    k_cache,
    v_cache,
    page_table,
    cu_seqlens_q,
    seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    out,
    lse,
):
    cl = scaled(softmax_scale)
    for b, n in enumerate(seqlens_k):
        at = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        rows = at.stop - at.start
        if rows:
            chunk, block = CHUNK, KEY_BLOCK
            slots = slots_of(page_table[b], k_cache.shape[1], n)
            keys, values = k_cache[slots], v_cache[slots]
            attend(q[at], keys, values, n - rows, cl, chunk, block, out[at], lse[:, at])


def slots_of(table, page_size, count):
    """Page and slot of positions 0 .. count - 1."""
    positions = np.arange(count)
    return table[positions // page_size], positions % page_size


def write_kv_cache(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k):
    for b, n in enumerate(seqlens_k):
        at = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        pages, slots = slots_of(page_table[b], k_cache.shape[1], n)
        new = slice(n - (at.stop - at.start), n)
        k_cache[pages[new], slots[new]] = k[at]
        v_cache[pages[new], slots[new]] = v[at]


SUMS = (READ, READ, READ, READ, READ, types.Array(float32, 2, "A", readonly=True))


@njit((*SUMS, int64, int64, float32, float32, WRITTEN, WRITTEN, WRITTEN), error_model="numpy")
def differentiate(q, keys, values, result, grad, log_sums, size, turn, cl, scale, dq, dk, dv):
    """Gradients of one sequence's rows q [n, Hq, D] over its keys and values [n, Hkv, D].

    Partial sums over `size` rows; `turn` rotates the heads of each group, which is 0 in a good attention.
    """
    n, group, part = q.shape[0], q.shape[1] // keys.shape[1], np.empty((3, q.shape[2]), np.float32)
    p, ds = np.empty((n, n), np.float32), np.empty((n, n), np.float32)
    dq[...], dk[...], dv[...] = 0, 0, 0
    for head in range(q.shape[1]):
        g = head // group
        h = g * group + (head + turn) % group
        for i in range(n):
            delta = np.float32(0)
            for d in range(q.shape[2]):
                delta = fma(result[i, h, d], grad[i, h, d], delta)
            shift = -np.float32(np.float64(log_sums[h, i]) * math.log2(math.e))
            whole = np.float32(0)
            for block in range(0, i + 1, size):
                some = np.float32(0)
                for j in range(block, min(i + 1, block + size)):
                    score = np.float32(0)
                    for d in range(q.shape[2]):
                        score = fma(q[i, h, d], keys[j, g, d], score)
                    exponent = fma(score, cl, shift)
                    p[i, j] = exp2(np.float32(0) if exponent > 0 else exponent)
                    some += p[i, j]
                whole += some
            for j in range(i + 1):
                product = np.float32(0)
                for d in range(q.shape[2]):
                    product = fma(grad[i, h, d], values[j, g, d], product)
                p[i, j] *= np.float32(1) / whole
                ds[i, j] = p[i, j] * (product - delta)
        for x in range(n):
            for block in range(0, n, size):
                part[:] = 0
                for y in range(block, min(n, block + size)):
                    for d in range(q.shape[2]):
                        if y <= x:
                            part[0, d] = fma(ds[x, y], keys[y, g, d], part[0, d])
                        if y >= x:
                            part[1, d] = fma(ds[y, x], q[y, h, d], part[1, d])
                            part[2, d] = fma(p[y, x], grad[y, h, d], part[2, d])
                for d in range(q.shape[2]):
                    dq[x, h, d] += part[0, d]
                    dk[x, g, d] += part[1, d]
                    dv[x, g, d] += part[2, d]
    for sums, factor in ((dq, scale), (dk, scale), (dv, np.float32(1))):
        for x in range(n):
            for h in range(sums.shape[1]):
                for d in range(sums.shape[2]):
                    sums[x, h, d] = canonical(sums[x, h, d] * factor + np.float32(0))


def attention_backward(q, k, v, out, lse, dout, cu_seqlens, max_seqlen, softmax_scale, dq, dk, dv):
    factors = scaled(softmax_scale), np.float32(softmax_scale)
    size, turn = GRADIENT_BLOCK, 0
    dq, dk, dv = (np.empty_like(x) if d is None else d for d, x in ((dq, q), (dk, k), (dv, v)))
    for b in range(len(cu_seqlens) - 1):
        rows = slice(cu_seqlens[b], cu_seqlens[b + 1])
        sequence = (q[rows], k[rows], v[rows], out[rows], dout[rows], lse[:, rows])
        differentiate(*sequence, size, turn, *factors, dq[rows], dk[rows], dv[rows])


def numerics(constant_axes):
    return {"chunk": CHUNK, "key_block": KEY_BLOCK, "exp2_degree": EXP2_DEGREE}


def schedule(axes, knobs):
    return {"rows": 1}
