"""Unified causal attention on the CPU, written the straightforward way: the root of the CPU study.

    O[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, h // group]) v[j, h // group]     j = 0 .. position of t

The order of every sum is that of ops/attention/README.md: keys are cut into chunks of CHUNK at fixed
positions and chunks into blocks of KEY_BLOCK; a block is one step of online softmax; chunks merge left to
right. A task is one KV head of one tile of query rows: it gathers each block of keys and values once, for
every row of the tile and every head of the group. Tiles, tasks and threads may change freely: no bit
depends on them. The gradients' task is one KV head of one sequence.
"""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from llvmlite import ir
from numba import carray, float32, int32, int64, njit, types
from numba.extending import intrinsic

CHUNK = 256
KEY_BLOCK = 64
EXP2_DEGREE = 6
QUERY_TILE = 16
SCORES = "key_by_key"
VALUES = "key_by_key"
PARTITION = "count"
ALONE_BELOW = 0

KNOBS = {
    "CHUNK": ("numeric", (256, 512, 1024, 2048)),
    "KEY_BLOCK": ("numeric", (16, 32, 64, 128)),
    "EXP2_DEGREE": ("numeric", (4, 5, 6, 7)),
    "QUERY_TILE": ("schedule", (1, 4, 16, 32, 64)),
    "SCORES": ("schedule", ("key_by_key", "keys_vectorised", "keys_vectorised_by_4")),
    "VALUES": ("schedule", ("key_by_key", "keys_by_4")),
    "PARTITION": ("schedule", ("count", "cost")),
    "ALONE_BELOW": ("schedule", (0, 2000, 20000)),
}

LANE_COUNT = 16
GRADIENT_BLOCK = 64  # query rows and keys of a partial sum, from the sequence's own start
EXP2 = {
    4: "1p0 1.62dfcap-1 1.ebf1b4p-3 1.ca9008p-5 1.409102p-7",
    5: "1p0 1.62e39ep-1 1.ebfa4ep-3 1.c74322p-5 1.3cbea8p-7 1.23a5eep-10",
    6: "1p0 1.62e432p-1 1.ebfbe2p-3 1.c6ae72p-5 1.3b270ep-7 1.5f7276p-10 1.470b48p-13",
    7: "1p0 1.62e430p-1 1.ebfbe0p-3 1.c6b056p-5 1.3b2a1cp-7 1.5dc052p-10 1.443f96p-13 1.c047dap-17",
}
LOG2 = "1.715476p1 1.ec709ep-1 1.2776c6p-1 1.a61762p-2 1.484b14p-2"
EXP2_DESCENDING = tuple(np.float32(float.fromhex(c)) for c in reversed(EXP2[EXP2_DEGREE].split()))
LOG2_DESCENDING = tuple(np.float32(float.fromhex(c)) for c in reversed(LOG2.split()))
SHIFT = np.float32(12582912)
LN2 = np.float32(math.log(2))
LOG2E = math.log2(math.e)
INF = np.float32(np.inf)
ZERO = np.float32(0)
ONE = np.float32(1)
# 2^-100 * 2^-40 is denormal; scaled back by 2^100 it must still be there.
DENORMAL_PROBE = np.float32([2.0**-100, 2.0**-40, 2.0**100])


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
def exp2(x):
    t = x + SHIFT
    n = t - SHIFT
    r = x - n
    p = EXP2_DESCENDING[0]
    for c in EXP2_DESCENDING[1:]:
        p = fma(p, r, c)
    y = p * from_bits(np.int32((bits_of(t) << 23) + 0x3F800000))
    return ZERO if x < -125 else y


@inner
def log2(x):
    if not (ZERO < x < INF):
        return -INF if x == ZERO else x
    offset = bits_of(x) - 0x3F3504F3
    f = from_bits(np.int32((offset & 0x7FFFFF) + 0x3F3504F3))
    z = (f - ONE) / (f + ONE)
    w = z * z
    p = LOG2_DESCENDING[0]
    for c in LOG2_DESCENDING[1:]:
        p = fma(p, w, c)
    return fma(z, p, np.float32(offset >> 23))


@inner
def canonical(x):
    return x if x == x else from_bits(np.int32(0x7FC00000))


@inner
def scores_key_by_key(q, keys, visible, x):
    for j in range(visible):
        s = ZERO
        for d in range(q.size):
            s = fma(q[d], keys[j, d], s)
        x[j] = s


@inner
def scores_keys_vectorised(q, keys, visible, x):
    x.fill(0)
    for d in range(q.size):
        for j in range(KEY_BLOCK):
            x[j] = fma(q[d], keys[d, j], x[j])


@inner
def scores_keys_vectorised_by_4(q, keys, visible, x):
    x.fill(0)
    for d in range(0, q.size, 4):
        for j in range(KEY_BLOCK):
            s = fma(q[d], keys[d, j], x[j])
            s = fma(q[d + 1], keys[d + 1, j], s)
            s = fma(q[d + 2], keys[d + 2, j], s)
            x[j] = fma(q[d + 3], keys[d + 3, j], s)


@inner
def values_key_by_key(p, values, first, visible, acc):
    for j in range(first, visible):
        for d in range(acc.size):
            acc[d] = fma(p[j], values[j, d], acc[d])


@inner
def values_keys_by_4(p, values, first, visible, acc):
    whole = visible // 4 * 4
    for j in range(0, whole, 4):
        for d in range(acc.size):
            o = fma(p[j], values[j, d], acc[d])
            o = fma(p[j + 1], values[j + 1, d], o)
            o = fma(p[j + 2], values[j + 2, d], o)
            acc[d] = fma(p[j + 3], values[j + 3, d], o)
    values_key_by_key(p, values, whole, visible, acc)


scores = {
    "key_by_key": scores_key_by_key,
    "keys_vectorised": scores_keys_vectorised,
    "keys_vectorised_by_4": scores_keys_vectorised_by_4,
}[SCORES]
values = {"key_by_key": values_key_by_key, "keys_by_4": values_keys_by_4}[VALUES]
TRANSPOSED = SCORES != "key_by_key"


@inner
def softmax_step(x, visible, cl, m, lanes, acc):
    """Turn the block's scores into weights; rescale the row's state to the new maximum, which is returned."""
    top = m
    for j in range(visible):
        x[j] *= cl
        if x[j] > top:
            top = x[j]
    base = ZERO if top == -INF else top
    for j in range(visible):
        x[j] = exp2(x[j] - base)
    a = exp2(m - base)
    if a != ONE:
        for d in range(acc.size):
            acc[d] *= a
        for lane in range(LANE_COUNT):
            lanes[lane] *= a
    whole = visible // LANE_COUNT * LANE_COUNT
    for j in range(0, whole, LANE_COUNT):
        for lane in range(LANE_COUNT):
            lanes[lane] += x[j + lane]
    for j in range(whole, visible):
        lanes[j - whole] += x[j]
    return top


@inner
def sum_lanes(lanes):
    for half in (8, 4, 2, 1):
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
    return lanes[0]


@inner
def merge(M, L, A, m, weights, acc):
    """Merge a chunk (maximum, weights, accumulator) into a row's (M, L, A); returns the new M and L."""
    top = m if m > M else M
    base = ZERO if top == -INF else top
    a0 = exp2(M - base)
    a1 = exp2(m - base)
    for d in range(A.size):
        A[d] = fma(acc[d], a1, A[d] * a0)
    return top, fma(weights, a1, L * a0)


@inner
def store(M, L, A, out, lse, h, t):
    for d in range(A.size):
        out[t, h, d] = canonical(A[d] / L + ZERO)
    if lse.size:
        lse[h, t] = canonical((M + log2(L)) * LN2)


@inner
def contiguous(row):
    """The same row, known to the compiler as contiguous."""
    return carray(pointer(row.ctypes.data), (row.size,))


@inner
def gather(cache, table, b, slot, count, g, tile, transposed):
    """Copy `count` keys or values of KV head g, from slot `slot` of request b on, into a small tile."""
    page_size = cache.shape[1]
    for j in range(count):
        row = contiguous(cache[table[b, (slot + j) // page_size], (slot + j) % page_size, g])
        for d in range(row.size):
            if transposed:
                tile[d, j] = row[d]
            else:
                tile[j, d] = row[d]


@entry
def attend(q, k_cache, v_cache, table, offsets, cu, lengths, cl, tasks, probe, out, lse):
    """Run some tasks of `plan`; False if this thread drops denormal numbers."""
    if probe[0] * probe[1] * probe[2] != probe[1]:
        return False
    D, group = q.shape[2], q.shape[1] // k_cache.shape[2]
    keys = np.empty((D, KEY_BLOCK) if TRANSPOSED else (KEY_BLOCK, D), np.float32)
    vals, x = np.empty((KEY_BLOCK, D), np.float32), np.empty(KEY_BLOCK, np.float32)
    size = QUERY_TILE * group
    m, M, L = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    lanes = np.empty((size, LANE_COUNT), np.float32)
    acc, A = np.empty((size, D), np.float32), np.empty((size, D), np.float32)
    for task in range(tasks.shape[0]):
        b, g, first = tasks[task, 0], tasks[task, 1], tasks[task, 2]
        rows = min(QUERY_TILE, cu[b + 1] - cu[b] - first)
        position = lengths[b] - cu[b + 1] + cu[b] + first  # of the tile's first row
        M.fill(-INF)
        L.fill(0)
        A.fill(0)
        for chunk in range(0, position + rows, CHUNK):
            m.fill(-INF)
            lanes.fill(0)
            acc.fill(0)
            chunk_end = min(chunk + CHUNK, position + rows)
            for start in range(chunk, chunk_end, KEY_BLOCK):
                count = min(KEY_BLOCK, chunk_end - start)
                gather(k_cache, table, b, offsets[b] + start, count, g, keys, TRANSPOSED)
                gather(v_cache, table, b, offsets[b] + start, count, g, vals, False)
                for row in range(max(0, start - position), rows):
                    visible = min(count, position + row + 1 - start)
                    for h in range(group):
                        i = row * group + h
                        scores(contiguous(q[cu[b] + first + row, g * group + h]), keys, visible, x)
                        m[i] = softmax_step(x, visible, cl, m[i], lanes[i], acc[i])
                        values(x, vals, 0, visible, acc[i])
            for i in range(max(0, chunk - position) * group, rows * group):
                M[i], L[i] = merge(M[i], L[i], A[i], m[i], sum_lanes(lanes[i]), acc[i])
        for i in range(rows * group):
            store(M[i], L[i], A[i], out, lse, g * group + i % group, cu[b] + first + i // group)
    return True


@inner
def dot(a, b):
    s = ZERO
    for d in range(a.size):
        s = fma(a[d], b[d], s)
    return s


@inner
def weight(q, key, shift, cl):
    """exp(scale * q . key - LSE) of a key that the row sees."""
    x = fma(dot(q, key), cl, shift)
    return exp2(ZERO if x > ZERO else x)


@inner
def add_part(weights, rows, first, sums):
    """sums += a partial sum over the rows of one block, weights[j] * rows[first + j]."""
    part = np.zeros(sums.size, np.float32)
    for j in range(weights.size):
        row = contiguous(rows[first + j])
        for d in range(part.size):
            part[d] = fma(weights[j], row[d], part[d])
    for d in range(part.size):
        sums[d] += part[d]


@inner
def finish(sums, factor):
    for d in range(sums.size):
        sums[d] = canonical(sums[d] * factor + ZERO)


@inner
def differentiate_head(q, k, v, out, lse, dout, cl, dq, dk, dv):
    """Add up the gradients of one query head of one sequence, rows and keys [n, D]."""
    n, size = q.shape[0], GRADIENT_BLOCK
    p, ds = np.empty((size, size), np.float32), np.empty((size, size), np.float32)
    shift, delta, weights = np.empty(n, np.float32), np.empty(n, np.float32), np.zeros(n, np.float32)
    for i in range(n):
        shift[i] = -(np.float64(lse[i]) * LOG2E)
        delta[i] = dot(contiguous(out[i]), contiguous(dout[i]))
        for first in range(0, i + 1, size):
            part = ZERO
            for j in range(first, min(i + 1, first + size)):
                part += weight(contiguous(q[i]), contiguous(k[j]), shift[i], cl)
            weights[i] += part  # about 1: LSE is rounded
    for first in range(0, n, size):
        keys = min(size, n - first)
        for start in range(first, n, size):
            rows = min(size, n - start)
            for r in range(rows):
                i = start + r
                seen = min(keys, i + 1 - first)
                for j in range(seen):
                    key, value = contiguous(k[first + j]), contiguous(v[first + j])
                    p[r, j] = weight(contiguous(q[i]), key, shift[i], cl) * (ONE / weights[i])
                    ds[r, j] = p[r, j] * (dot(contiguous(dout[i]), value) - delta[i])
                add_part(ds[r, :seen], k, first, dq[i])
            for j in range(keys):
                unseeing = max(0, first + j - start)
                add_part(p[unseeing:rows, j], dout, start + unseeing, dv[first + j])
                add_part(ds[unseeing:rows, j], q, start + unseeing, dk[first + j])


@entry
def differentiate(q, k, v, out, lse, dout, cu, cl, scale, tasks, probe, dq, dk, dv):
    """Run some tasks, a KV head of a sequence each; False if this thread drops denormal numbers."""
    if probe[0] * probe[1] * probe[2] != probe[1]:
        return False
    group = q.shape[1] // k.shape[1]
    for task in range(tasks.shape[0]):
        b, g = tasks[task]
        rows = slice(cu[b], cu[b + 1])
        dk[rows, g] = 0
        dv[rows, g] = 0
        for h in range(g * group, g * group + group):
            dq[rows, h] = 0
            row_inputs = q[rows, h], k[rows, g], v[rows, g], out[rows, h], lse[h, rows], dout[rows, h]
            differentiate_head(*row_inputs, cl, dq[rows, h], dk[rows, g], dv[rows, g])
            for t in range(cu[b], cu[b + 1]):
                finish(dq[t, h], scale)
        for t in range(cu[b], cu[b + 1]):
            finish(dk[t, g], scale)
            finish(dv[t, g], ONE)
    return True


@entry
def plan(cu, lengths, kv_heads):
    """List the tasks (request, KV head, first row) and their costs."""
    tiles = 0
    for b in range(lengths.size):
        tiles += (cu[b + 1] - cu[b] + QUERY_TILE - 1) // QUERY_TILE
    tasks, costs = np.empty((tiles * kv_heads, 3), np.int64), np.empty(tiles * kv_heads, np.int64)
    count = 0
    for b in range(lengths.size):
        rows = cu[b + 1] - cu[b]
        for g in range(kv_heads):
            for first in range(0, rows, QUERY_TILE):
                end = min(rows, first + QUERY_TILE)
                tasks[count, 0], tasks[count, 1], tasks[count, 2] = b, g, first
                costs[count] = (end - first) * (lengths[b] - rows + end)
                count += 1
    return tasks, costs


@entry
def write_rows(k, v, k_cache, v_cache, table, cu, lengths):
    page_size = k_cache.shape[1]
    for b in range(lengths.size):
        for t in range(cu[b], cu[b + 1]):
            position = lengths[b] - cu[b + 1] + t
            page, slot = table[b, position // page_size], position % page_size
            for g in range(k.shape[1]):
                for d in range(k.shape[2]):
                    k_cache[page, slot, g, d] = k[t, g, d]
                    v_cache[page, slot, g, d] = v[t, g, d]


LENGTHS, TABLE = (types.Array(int32, rank, "A", readonly=True) for rank in (1, 2))
FLOATS, PAGES = (types.Array(float32, rank, "A", readonly=True) for rank in (3, 4))
LSE, OUT, CACHE = (types.Array(float32, rank, "A") for rank in (2, 3, 4))
INPUTS = (FLOATS, PAGES, PAGES, TABLE, LENGTHS, LENGTHS, LENGTHS, float32)
LOG_SUMS = types.Array(float32, 2, "A", readonly=True)
UNCOMPILED = {
    differentiate: (
        *(FLOATS, FLOATS, FLOATS, FLOATS, LOG_SUMS, FLOATS, LENGTHS, float32, float32),
        *(int64[:, ::1], float32[::1], OUT, OUT, OUT),
    ),
    attend: (*INPUTS, int64[:, ::1], float32[::1], OUT, LSE),
    plan: (LENGTHS, LENGTHS, int64),
    write_rows: (FLOATS, FLOATS, CACHE, CACHE, TABLE, LENGTHS, LENGTHS),
}
lock = threading.Lock()
pools = {}


def compiled(kernel):
    """Compile a kernel at its first use, for arrays of any strides."""
    with lock:
        if kernel in UNCOMPILED:
            kernel.compile(UNCOMPILED.pop(kernel))
            kernel.disable_compile()
    return kernel


def pool():
    """This process's threads beside the caller's own: a forked child makes its own."""
    with lock:
        if os.getpid() not in pools:
            pools.clear()
            pools[os.getpid()] = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) - 1))
        return pools[os.getpid()]


def run(q, k_cache, v_cache, table, offsets, cu, lengths, scale, out, lse):
    tasks, costs = compiled(plan)(cu, lengths, k_cache.shape[2])
    cl = np.float32(float(scale) * LOG2E)
    lse = np.empty((0, 0), np.float32) if lse is None else lse
    inputs = (q, k_cache, v_cache, table, offsets, cu, lengths, cl)
    kernel = compiled(attend)
    share(lambda first, end: kernel(*inputs, tasks[first:end], DENORMAL_PROBE, out, lse), costs)


def share(part, costs):
    """Run tasks on all threads, consecutive ones together: part(first, end) runs some."""
    threads = len(os.sched_getaffinity(0))
    if costs.sum() < ALONE_BELOW:
        intact = part(0, len(costs))
    else:
        if PARTITION == "cost":
            ends = np.searchsorted(np.cumsum(costs), costs.sum() * np.arange(1, threads) / threads).tolist()
        else:
            ends = [len(costs) * n // threads for n in range(1, threads)]
        bounds = [0, *ends, len(costs)]
        others = [pool().submit(part, *between) for between in pairwise(bounds[1:])]
        intact = all([part(*bounds[:2]), *(other.result() for other in others)])
    if not intact:
        raise RuntimeError("a thread flushes denormal numbers, which changes bits: turn that mode off")


def attention(q, k, v, cu_seqlens, max_seqlen, softmax_scale, out, lse):
    """Packed sequences: all tokens are one page, in which a request starts at its offset."""
    table = np.zeros((len(cu_seqlens) - 1, 1), np.int32)
    run(q, k[None], v[None], table, cu_seqlens[:-1], cu_seqlens, np.diff(cu_seqlens), softmax_scale, out, lse)


def paged_attention(
    q, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k,
    max_seqlen_q, max_seqlen_k, softmax_scale, out, lse,
):  # fmt: skip
    offsets = np.zeros(len(seqlens_k), np.int32)
    run(q, k_cache, v_cache, page_table, offsets, cu_seqlens_q, seqlens_k, softmax_scale, out, lse)


def attention_backward(q, k, v, out, lse, dout, cu_seqlens, max_seqlen, softmax_scale, dq, dk, dv):
    """Gradients of packed sequences; one that is None is computed for nobody."""
    lengths, kv_heads = np.diff(cu_seqlens), k.shape[1]
    tasks = np.array([(b, g) for b in range(len(lengths)) for g in range(kv_heads)], np.int64).reshape(-1, 2)
    cl = np.float32(float(softmax_scale) * LOG2E)
    inputs = (q, k, v, out, lse, dout, cu_seqlens, cl, np.float32(softmax_scale))
    gradients = [np.empty_like(x) if d is None else d for d, x in ((dq, q), (dk, k), (dv, v))]
    kernel = compiled(differentiate)
    costs = np.repeat(lengths.astype(np.int64) ** 2, kv_heads)
    share(lambda first, end: kernel(*inputs, tasks[first:end], DENORMAL_PROBE, *gradients), costs)


def write_kv_cache(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k):
    compiled(write_rows)(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k)


def numerics(constant_axes):
    return {"chunk": CHUNK, "key_block": KEY_BLOCK, "exp2_degree": EXP2_DEGREE}


def schedule(axes, knobs):
    tile = min(knobs["QUERY_TILE"], axes["query_length"])
    return {"query_tile": tile, "tiles": axes["batch"] * -(-axes["query_length"] // max(1, tile))}
