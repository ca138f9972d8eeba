"""Unified causal attention on the CPU, written the straightforward way: the root of the CPU study.

    O[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, h // group]) v[j, h // group]     j = 0 .. position of t

The order of every sum is that of ops/attention/README.md: keys are cut into chunks of CHUNK at fixed positions
and chunks into blocks of KEY_BLOCK; a block is one step of online softmax, chunks are merged left to right. A
task is one KV head of one tile of query rows: it gathers each block of keys and values once, for every row of
the tile and every head of the group. Tiles, tasks and threads may change freely: no bit depends on them.
"""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llvmlite import ir
from numba import carray, float32, int32, int64, njit, types
from numba.extending import intrinsic

CHUNK = 1024
KEY_BLOCK = 64
EXP2_DEGREE = 6
QUERY_TILE = 16
SCORES = "key_by_key"
VALUES = "key_by_key"
DECODE_SPLIT = "request"
PARTITION = "count"
ALONE_BELOW = 0

KNOBS = {
    "CHUNK": ("numeric", (256, 512, 1024, 2048)),
    "KEY_BLOCK": ("numeric", (16, 32, 64, 128)),
    "EXP2_DEGREE": ("numeric", (4, 5, 6, 7)),
    "QUERY_TILE": ("schedule", (1, 4, 16, 32, 64)),
    "SCORES": ("schedule", ("key_by_key", "keys_vectorised", "keys_vectorised_by_4")),
    "VALUES": ("schedule", ("key_by_key", "keys_by_4")),
    "DECODE_SPLIT": ("schedule", ("request", "chunk")),
    "PARTITION": ("schedule", ("count", "cost")),
    "ALONE_BELOW": ("schedule", (0, 2000, 20000)),
}

LANE_COUNT = 16
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
    x[:] = ZERO
    for d in range(q.size):
        for j in range(KEY_BLOCK):
            x[j] = fma(q[d], keys[d, j], x[j])


@inner
def scores_keys_vectorised_by_4(q, keys, visible, x):
    x[:] = ZERO
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
SPLIT = DECODE_SPLIT == "chunk"


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
def gather(cache, table, b, offset, first, count, g, tile, transposed):
    """Copy `count` keys or values of KV head g, from position `first` of request b on, into a small tile."""
    page_size = cache.shape[1]
    for j in range(count):
        slot = offset + first + j
        row = contiguous(cache[table[b, slot // page_size], slot % page_size, g])
        for d in range(row.size):
            if transposed:
                tile[d, j] = row[d]
            else:
                tile[j, d] = row[d]


@entry
def attend(q, k_cache, v_cache, table, offsets, cu, lengths, cl, tasks, partials, probe, out, lse):
    """Run some tasks of `plan`; False if this thread drops denormal numbers."""
    if probe[0] * probe[1] * probe[2] != probe[1]:
        return False
    D, group = q.shape[2], q.shape[1] // k_cache.shape[2]
    size = QUERY_TILE * group
    keys = np.empty((D, KEY_BLOCK) if TRANSPOSED else (KEY_BLOCK, D), np.float32)
    vals, x = np.empty((KEY_BLOCK, D), np.float32), np.empty(KEY_BLOCK, np.float32)
    m, M, L = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    lanes = np.empty((size, LANE_COUNT), np.float32)
    acc, A = np.empty((size, D), np.float32), np.empty((size, D), np.float32)
    for task in range(tasks.shape[0]):
        b, g, first, end, chunk, end_chunk, partial = tasks[task]
        rows = end - first
        position = lengths[b] - cu[b + 1] + cu[b] + first  # of the tile's first row
        M[:], L[:], A[:] = -INF, ZERO, ZERO
        for chunk_start in range(chunk * CHUNK, end_chunk * CHUNK, CHUNK):
            m[:], lanes[:], acc[:] = -INF, ZERO, ZERO
            chunk_end = min(chunk_start + CHUNK, position + rows)
            for start in range(chunk_start, chunk_end, KEY_BLOCK):
                count = min(KEY_BLOCK, chunk_end - start)
                gather(k_cache, table, b, offsets[b], start, count, g, keys, TRANSPOSED)
                gather(v_cache, table, b, offsets[b], start, count, g, vals, False)
                for row in range(max(0, start - position), rows):
                    visible = min(count, position + row + 1 - start)
                    for h in range(group):
                        i = row * group + h
                        scores(contiguous(q[cu[b] + first + row, g * group + h]), keys, visible, x)
                        m[i] = softmax_step(x, visible, cl, m[i], lanes[i], acc[i])
                        values(x, vals, 0, visible, acc[i])
            for i in range(max(0, chunk_start - position) * group, rows * group):
                if partial < 0:
                    M[i], L[i] = merge(M[i], L[i], A[i], m[i], sum_lanes(lanes[i]), acc[i])
                else:
                    partials[partial, i, 0], partials[partial, i, 1] = m[i], sum_lanes(lanes[i])
                    partials[partial, i, 2:] = acc[i]
        if partial < 0:
            for i in range(rows * group):
                store(M[i], L[i], A[i], out, lse, g * group + i % group, cu[b] + first + i // group)
    return True


@entry
def combine(tasks, partials, cu, out, lse):
    """Merge the chunks that were computed apart, left to right, and store their rows."""
    group, D = partials.shape[1], partials.shape[2] - 2
    M, L, A = np.empty(group, np.float32), np.empty(group, np.float32), np.empty((group, D), np.float32)
    for task in range(tasks.shape[0]):
        b, g, _, _, chunk, _, partial = tasks[task]
        if partial < 0:
            continue
        if chunk == 0:
            M[:], L[:], A[:] = -INF, ZERO, ZERO
        for h in range(group):
            part = partials[partial, h]
            M[h], L[h] = merge(M[h], L[h], A[h], part[0], part[1], part[2:])
            store(M[h], L[h], A[h], out, lse, g * group + h, cu[b])  # the last chunk's is the result


@entry
def plan(cu, lengths, kv_heads):
    """List tasks, with costs: request, KV head, first row, end row, first chunk, end chunk, partial or -1."""
    most = 0
    for b in range(lengths.size):
        most += (cu[b + 1] - cu[b]) // QUERY_TILE + lengths[b] // CHUNK + 2
    tasks, costs = np.empty((most * kv_heads, 7), np.int64), np.empty(most * kv_heads, np.int64)
    count = partials = 0
    for b in range(lengths.size):
        rows = cu[b + 1] - cu[b]
        for g in range(kv_heads):
            for first in range(0, rows, QUERY_TILE):
                end = min(rows, first + QUERY_TILE)
                seen = lengths[b] - rows + end
                chunks = (seen + CHUNK - 1) // CHUNK
                apart = chunks if SPLIT and rows == 1 and chunks > 1 else 1
                for c in range(apart):
                    end_chunk = c + 1 if apart > 1 else chunks
                    tasks[count] = (b, g, first, end, c, end_chunk, partials if apart > 1 else -1)
                    costs[count] = (end - first) * (min(seen, end_chunk * CHUNK) - c * CHUNK)
                    count += 1
                    partials += apart > 1
    return tasks[:count], costs[:count], partials


@entry
def write_rows(k, v, k_cache, v_cache, table, cu, lengths):
    page_size = k_cache.shape[1]
    for b in range(lengths.size):
        for t in range(cu[b], cu[b + 1]):
            position = lengths[b] - cu[b + 1] + t
            page, slot = table[b, position // page_size], position % page_size
            k_cache[page, slot] = k[t]
            v_cache[page, slot] = v[t]


def read(dtype, rank):
    return types.Array(dtype, rank, "A", readonly=True)


def written(rank):
    return types.Array(float32, rank, "A")


SIGNATURES = {
    attend: (
        *(
            read(float32, 3),
            read(float32, 4),
            read(float32, 4),
            read(int32, 2),
            read(int32, 1),
            read(int32, 1),
        ),
        *(
            read(int32, 1),
            float32,
            int64[:, ::1],
            float32[:, :, ::1],
            read(float32, 1),
            written(3),
            written(2),
        ),
    ),
    combine: (int64[:, ::1], float32[:, :, ::1], read(int32, 1), written(3), written(2)),
    plan: (read(int32, 1), read(int32, 1), int64),
    write_rows: (
        *(read(float32, 3), read(float32, 3), written(4), written(4)),
        *(read(int32, 2), read(int32, 1), read(int32, 1)),
    ),
}
lock = threading.Lock()
pools = {}


def compiled(kernel):
    """Compile a kernel at its first use, for arrays of any strides."""
    if not kernel.signatures:
        with lock:
            if not kernel.signatures:
                kernel.compile(SIGNATURES[kernel])
                kernel.disable_compile()
    return kernel


def pool():
    """The thread pool of this process: a forked child makes its own."""
    with lock:
        if os.getpid() not in pools:
            pools.clear()
            pools[os.getpid()] = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        return pools[os.getpid()]


def run(q, k_cache, v_cache, table, offsets, cu, lengths, scale, out, lse):
    tasks, costs, partial_count = compiled(plan)(cu, lengths, k_cache.shape[2])
    partials = np.empty((partial_count, q.shape[1] // k_cache.shape[2], q.shape[2] + 2), np.float32)
    cl = np.float32(float(scale) * math.log2(math.e))
    lse = np.empty((0, 0), np.float32) if lse is None else lse
    kernel = compiled(attend)

    inputs = (q, k_cache, v_cache, table, offsets, cu, lengths, cl)

    def part(first, end):
        return kernel(*inputs, tasks[first:end], partials, DENORMAL_PROBE, out, lse)

    total = costs.sum()
    if total < ALONE_BELOW:
        intact = part(0, len(tasks))
    else:
        threads = len(os.sched_getaffinity(0))
        if PARTITION == "cost":
            cuts = np.searchsorted(np.cumsum(costs), total * np.arange(1, threads) / threads)
        else:
            cuts = len(tasks) * np.arange(1, threads) // threads
        cuts = [0, *cuts.tolist(), len(tasks)]
        intact = all(list(pool().map(part, cuts[:-1], cuts[1:])))
    if not intact:
        raise RuntimeError(
            "a thread flushes denormal numbers to zero, which changes bits: turn that mode off"
        )
    if partial_count:
        compiled(combine)(tasks, partials, cu, out, lse)


def attention(q, k, v, cu_seqlens, max_seqlen, softmax_scale, out, lse):
    """Packed causal attention: all the tokens are one page, and a request starts at its offset into it."""
    table = np.zeros((len(cu_seqlens) - 1, 1), np.int32)
    run(q, k[None], v[None], table, cu_seqlens[:-1], cu_seqlens, np.diff(cu_seqlens), softmax_scale, out, lse)


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
    """Causal attention of the last rows of every request over its pages."""
    offsets = np.zeros(len(seqlens_k), np.int32)
    run(q, k_cache, v_cache, page_table, offsets, cu_seqlens_q, seqlens_k, softmax_scale, out, lse)


def write_kv_cache(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k):
    """Write the new tokens' keys and values to their positions in the pages."""
    compiled(write_rows)(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k)


def numerics(constant_axes):
    return {"chunk": CHUNK, "key_block": KEY_BLOCK, "exp2_degree": EXP2_DEGREE}


def schedule(axes, knobs):
    return {
        "query_tile": min(knobs["QUERY_TILE"], axes["query_length"]),
        "by_chunk": int(knobs["DECODE_SPLIT"] == "chunk" and axes["query_length"] == 1),
    }
