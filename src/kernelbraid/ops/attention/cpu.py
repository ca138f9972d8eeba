"""Unified causal attention on the CPU: one implementation for prefill, chunked prefill, decode and packed update.

    O[t, h]   = sum_j softmax_j(c * q[t, h] . k[j, g]) * v[j, g]        g = h // group, j = 0 .. position of t
    LSE[h, t] = log sum_j exp(c * q[t, h] . k[j, g])

Order of every sum (README.md derives it): keys in chunks of CHUNK at fixed positions, chunks in blocks of KEY_BLOCK;
a block is one step of online softmax; weights add up in 16 lanes, key j in lane j mod 16, which halve at the end of
a chunk; chunks merge left to right. No schedule can change it: vectors run across independent sums (16 keys of the
scores, 16 columns of the output), never along one.

A task is a tile of query rows, some KV heads and some chunks of one request; threads take tasks from one counter. Of
each block of keys a task transposes K once for all its rows, then takes up to ROWS rows (query rows times heads of
the group) at a time: their scores and outputs stay in vector registers. All inner loops are written as the vector
instructions they are, which is twice as fast as what a compiler makes of scalar loops; the control around them is
plain Numba.
"""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llvmlite import ir
from numba import float32, int32, int64, njit, types
from numba.extending import intrinsic

CHUNK = 1024
KEY_BLOCK = 64
EXP2_DEGREE = 6
ROWS = 6
TILE_ROWS = 192
PACK_ROWS = 24
TASKS = 16
ALONE_BELOW = 4000

KNOBS = {
    "CHUNK": ("numeric", (256, 512, 1024, 2048, 4096)),
    "KEY_BLOCK": ("numeric", (16, 32, 64, 128, 256)),
    "EXP2_DEGREE": ("numeric", (4, 5, 6, 7)),
    "ROWS": ("schedule", (2, 4, 6)),
    "TILE_ROWS": ("schedule", (48, 96, 192, 384)),
    "PACK_ROWS": ("schedule", (1, 24, 1000000)),
    "TASKS": ("schedule", (1, 4, 8, 16, 32, 64)),
    "ALONE_BELOW": ("schedule", (0, 1000, 4000, 16000)),
}

EXP2 = {
    4: "1p0 1.62dfcap-1 1.ebf1b4p-3 1.ca9008p-5 1.409102p-7",
    5: "1p0 1.62e39ep-1 1.ebfa4ep-3 1.c74322p-5 1.3cbea8p-7 1.23a5eep-10",
    6: "1p0 1.62e432p-1 1.ebfbe2p-3 1.c6ae72p-5 1.3b270ep-7 1.5f7276p-10 1.470b48p-13",
    7: "1p0 1.62e430p-1 1.ebfbe0p-3 1.c6b056p-5 1.3b2a1cp-7 1.5dc052p-10 1.443f96p-13 1.c047dap-17",
}
LOG2 = "1.715476p1 1.ec709ep-1 1.2776c6p-1 1.a61762p-2 1.484b14p-2"

LANES = 16
TILE = 64  # columns of a register tile: four vectors
SCORE_TILE = min(TILE, KEY_BLOCK)
# A row's running state: its maximum and what rescales its accumulator (one cache line), its lanes (one), its
# accumulator. Of the total over chunks: the maximum and L, both in every lane of their line, and A.
FACTOR, SUMS, COLUMNS = 4, 64, 128
# 2^-100 * 2^-40 is denormal; scaled back by 2^100 it must still be there.
DENORMAL_PROBE = np.array([2.0**-100, 2.0**-40, 2.0**100], np.float32)

# ---- Vector code. Addresses and sizes are int64, a vector is 16 float32; an emitter appends to the function that
# is being compiled.

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR, INTEGERS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


def machine(emit):
    """Make a function that Numba can call, with one tuple of numbers, of an emitter."""

    @intrinsic
    def call(typing_context, operands):
        def codegen(context, builder, signature, args):
            emit(builder, *[builder.extract_value(args[0], i) for i in range(operands.count)])
            return context.get_dummy_value()

        return types.none(operands), codegen

    return call


def at(b, address, offset, scale=1):
    """address + offset * scale"""
    if not isinstance(offset, ir.Value):
        return b.add(address, I64(offset * scale))
    return b.add(address, offset if scale == 1 else b.mul(offset, I64(scale)))


def load(b, address, kind=VECTOR):
    return b.load(b.inttoptr(address, kind.as_pointer()), align=4 if kind is VECTOR else None)


def store(b, value, address):
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=4)


def prefetch(b, address):
    """Ask for a cache line, into the second level."""
    pointer = ir.IntType(8).as_pointer()
    function = declared(b, "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32]))
    b.call(function, [b.inttoptr(address, pointer), I32(0), I32(2), I32(1)])


def declared(b, name, kind):
    known = b.module.globals.get(name)
    return ir.Function(b.module, kind, name) if known is None else known


def constant(x):
    return VECTOR([float(x)] * LANES)


def integers(x):
    return INTEGERS([x] * LANES)


def spread(b, x):
    single = b.insert_element(VECTOR(ir.Undefined), x, I32(0))
    return shuffle(b, single, single, [0] * LANES)


def shuffle(b, x, y, picks):
    return b.shuffle_vector(x, y, INTEGERS(picks))


def fused(b, x, y, z):
    return b.call(declared(b, "llvm.fma.v16f32", ir.FunctionType(VECTOR, [VECTOR] * 3)), [x, y, z])


def larger(b, x, y):
    """x > y ? x : y, so that a NaN in x gives y."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def across(b, combine, x):
    """Combine the lanes by halving; every lane ends with the result."""
    for distance in (8, 4, 2, 1):
        x = combine(b, shuffle(b, x, x, [lane ^ distance for lane in range(LANES)]), x)
    return x


def polynomial(b, x, ascending):
    *lower, result = [constant(float.fromhex(c)) for c in ascending.split()]
    for c in reversed(lower):
        result = fused(b, result, x, c)
    return result


def exp2(b, x):
    """2^x for x <= 0 or NaN."""
    shift = constant(12582912)
    t = b.fadd(x, shift)
    p = polynomial(b, b.fsub(x, b.fsub(t, shift)), EXP2[EXP2_DEGREE])
    power = b.add(b.shl(b.bitcast(t, INTEGERS), integers(23)), integers(0x3F800000))
    return b.select(b.fcmp_ordered("<", x, constant(-125)), constant(0), b.fmul(p, b.bitcast(power, VECTOR)))


def log2(b, x):
    """log2 of a sum of weights: zero, NaN or at least about 1."""
    offset = b.sub(b.bitcast(x, INTEGERS), integers(0x3F3504F3))
    f = b.bitcast(b.add(b.and_(offset, integers(0x7FFFFF)), integers(0x3F3504F3)), VECTOR)
    z = b.fdiv(b.fsub(f, constant(1)), b.fadd(f, constant(1)))
    y = fused(b, z, polynomial(b, b.fmul(z, z), LOG2), b.sitofp(b.ashr(offset, integers(23)), VECTOR))
    finite = b.and_(b.fcmp_ordered(">", x, constant(0)), b.fcmp_ordered("<", x, constant(math.inf)))
    return b.select(finite, y, b.select(b.fcmp_ordered("==", x, constant(0)), constant(-math.inf), x))


def origin(b, maximum):
    """What the exponents of a row count from: its maximum, or 0 while nothing has been seen."""
    return b.select(b.fcmp_ordered("==", maximum, constant(-math.inf)), constant(0), maximum)


def canonical(b, x):
    return b.select(b.fcmp_unordered("uno", x, x), b.bitcast(integers(0x7FC00000), VECTOR), x)


def repeat(b, count, step, body, carried=()):
    """Emit `for i in range(0, count, step): carried = body(i, *carried)`; returns what is carried out."""
    start, head, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
    b.cbranch(b.icmp_signed(">", count, I64(0)), head, done)
    b.position_at_end(head)
    i = b.phi(I64)
    inside = [b.phi(value.type) for value in carried]
    following = body(i, *inside) or []
    advanced = b.add(i, I64(step))
    end = b.block
    b.cbranch(b.icmp_signed("<", advanced, count), head, done)
    b.position_at_end(done)
    outside = [b.phi(value.type) for value in carried]
    for phi, first, later in zip([i, *inside, *outside], [I64(0), *carried, *carried], [advanced, *following * 2]):
        phi.add_incoming(first, start)
        phi.add_incoming(later, end)
    return outside


def register_tiles(width, begin, end):
    """Emit c = end(begin(c) + a @ b) for up to ROWS rows, in register tiles of `width` columns.

    Its operands: rows; tables of the addresses of the rows of a and of b, and what to add to each; c, the bytes of
    its rows and its columns; depth, the rows of b; where the factor of the first row is and the bytes to the next.
    """
    vectors = range(width // LANES)

    def emit(b, rows, a_table, a_offset, b_table, b_offset, c, c_bytes, columns, depth, factor, factor_bytes):
        done = b.append_basic_block("end")
        choice = b.switch(rows, done)
        for count in range(1, ROWS + 1):
            choice.add_case(I64(count), b.append_basic_block(f"rows_{count}"))
            b.position_at_end(b.function.blocks[-1])
            tall = range(count)
            a_rows = [at(b, load(b, at(b, a_table, 8 * r), I64), a_offset) for r in tall]
            factors = [spread(b, load(b, at(b, factor, b.mul(factor_bytes, I64(r))), F32)) for r in tall]

            def tile(column, tall=tall, a_rows=a_rows, factors=factors):
                corner = at(b, c, column, 4)
                places = [[at(b, at(b, corner, b.mul(c_bytes, I64(r))), 64 * n) for n in vectors] for r in tall]

                def step(j, *sums):
                    b_row = at(b, at(b, load(b, at(b, b_table, j, 8), I64), b_offset), column, 4)
                    parts = [load(b, at(b, b_row, 64 * n)) for n in vectors]
                    weights = [spread(b, load(b, at(b, a_rows[r], j, 4), F32)) for r in tall]
                    return [fused(b, weights[r], parts[n], sums[r * len(vectors) + n]) for r in tall for n in vectors]

                first = [begin(b, places[r][n], factors[r]) for r in tall for n in vectors]
                for i, total in enumerate(repeat(b, depth, 1, step, first)):
                    r, n = divmod(i, len(vectors))
                    store(b, end(b, total, factors[r]), places[r][n])

            repeat(b, columns, width, tile)
            b.branch(done)
        b.position_at_end(done)

    return machine(emit)


emit_scores = register_tiles(
    SCORE_TILE, begin=lambda b, place, scale: constant(0), end=lambda b, total, scale: b.fmul(total, scale)
)
emit_outputs = register_tiles(
    TILE, begin=lambda b, place, factor: b.fmul(load(b, place), factor), end=lambda b, total, factor: total
)


@machine
def emit_mask(b, rows, x, sees, start):
    """Give the keys that a row does not see, from `start` + its limit on, the score -inf."""

    def row(r):
        limit = b.trunc(b.sub(load(b, at(b, sees, r, 8), I64), start), I32)
        limits = b.insert_element(INTEGERS(ir.Undefined), limit, I32(0))
        limits = shuffle(b, limits, limits, [0] * LANES)
        for n in range(0, KEY_BLOCK, LANES):
            place = at(b, at(b, x, r, 4 * KEY_BLOCK), 4 * n)
            seen = b.icmp_signed("<", INTEGERS([n + lane for lane in range(LANES)]), limits)
            store(b, b.select(seen, load(b, place), constant(-math.inf)), place)

    repeat(b, rows, 1, row)


@machine
def emit_softmax(b, rows, x, state, state_bytes):
    """Turn rows of scores into weights; move each row's maximum and lanes on and leave its rescaling factor."""

    def row(r):
        own = at(b, state, b.mul(r, state_bytes))
        places = [at(b, at(b, x, r, 4 * KEY_BLOCK), 4 * n) for n in range(0, KEY_BLOCK, LANES)]
        scores = [load(b, place) for place in places]
        old = spread(b, load(b, own, F32))
        top = old
        for score in scores:
            top = larger(b, score, top)
        top = across(b, larger, top)
        base = origin(b, top)
        factor = exp2(b, b.fsub(old, base))
        lanes = b.fmul(load(b, at(b, own, SUMS)), factor)
        for score, place in zip(scores, places):
            weight = exp2(b, b.fsub(score, base))
            lanes = b.fadd(lanes, weight)
            store(b, weight, place)
        store(b, lanes, at(b, own, SUMS))
        store(b, b.extract_element(top, I32(0)), own)
        store(b, b.extract_element(factor, I32(0)), at(b, own, FACTOR))

    repeat(b, rows, 1, row)


@machine
def emit_reset(b, rows, state, state_bytes):
    """Empty rows of state: maximum -inf, sums and columns zero."""

    def row(r):
        own = at(b, state, b.mul(r, state_bytes))
        store(b, constant(-math.inf), own)
        repeat(b, b.sub(state_bytes, I64(SUMS)), 64, lambda n: store(b, constant(0), at(b, at(b, own, SUMS), n)))

    repeat(b, rows, 1, row)


@machine
def emit_merge(b, rows, state, total, state_bytes):
    """Merge a finished chunk into the total of its rows."""

    def row(r):
        chunk, whole = at(b, state, b.mul(r, state_bytes)), at(b, total, b.mul(r, state_bytes))
        m, M = spread(b, load(b, chunk, F32)), load(b, whole)
        weight = across(b, lambda b, x, y: b.fadd(x, y), load(b, at(b, chunk, SUMS)))
        top = larger(b, m, M)
        base = origin(b, top)
        a0, a1 = exp2(b, b.fsub(M, base)), exp2(b, b.fsub(m, base))

        def add(value, offset):
            place = at(b, whole, offset)
            store(b, fused(b, value, a1, b.fmul(load(b, place), a0)), place)

        store(b, top, whole)
        add(weight, I64(SUMS))
        columns = at(b, chunk, COLUMNS)
        repeat(
            b, b.sub(state_bytes, I64(COLUMNS)), 64,
            lambda n: add(load(b, at(b, columns, n)), b.add(n, I64(COLUMNS))),
        )  # fmt: skip

    repeat(b, rows, 1, row)


@machine
def emit_results(b, rows, total, state_bytes, depth, out_table, lse_table):
    """Store O = A / L + 0 and LSE = (M + log2 L) * ln 2 of finished rows."""

    def row(r):
        own = at(b, total, b.mul(r, state_bytes))
        M, L = load(b, own), load(b, at(b, own, SUMS))
        out = load(b, at(b, out_table, r, 8), I64)

        def columns(d):
            o = b.fadd(b.fdiv(load(b, at(b, at(b, own, COLUMNS), d, 4)), L), constant(0))
            store(b, canonical(b, o), at(b, out, d, 4))

        repeat(b, depth, LANES, columns)
        lse = canonical(b, b.fmul(b.fadd(M, log2(b, L)), constant(np.float32(math.log(2)))))
        store(b, b.extract_element(lse, I32(0)), load(b, at(b, lse_table, r, 8), I64))

    repeat(b, rows, 1, row)


@machine
def emit_copy(b, rows, source_table, source_offset, target_table, target_offset, depth):
    """Copy `depth` numbers of each row of a table to the row of another."""

    def row(r):
        source = at(b, load(b, at(b, source_table, r, 8), I64), source_offset)
        target = at(b, load(b, at(b, target_table, r, 8), I64), target_offset)
        repeat(b, depth, LANES, lambda d: store(b, load(b, at(b, source, d, 4)), at(b, target, d, 4)))

    repeat(b, rows, 1, row)


def transposed(b, rows):
    """Transpose 16 vectors: rows of 4 x 4 numbers inside quarters of vectors, then the quarters."""

    def numbers(x, y, picks):
        return shuffle(b, x, y, [pick + 4 * quarter for quarter in range(4) for pick in picks])

    def quarters(x, y, first, second):
        starts = (4 * first, 4 * second, 16 + 4 * first, 16 + 4 * second)
        return shuffle(b, x, y, [start + n for start in starts for n in range(4)])

    groups = []  # groups[g][k], quarter n: column 4 n + k of rows 4 g .. 4 g + 3
    for r0, r1, r2, r3 in (rows[n : n + 4] for n in range(0, LANES, 4)):
        low, high = (0, 16, 1, 17), (2, 18, 3, 19)
        pairs = [(numbers(r0, r1, picks), numbers(r2, r3, picks)) for picks in (low, high)]
        groups.append([numbers(*pair, picks) for pair in pairs for picks in ((0, 1, 16, 17), (2, 3, 18, 19))])
    columns = [None] * LANES
    for k in range(4):
        for half in (0, 2):
            upper = quarters(groups[0][k], groups[1][k], half, half + 1)
            lower = quarters(groups[2][k], groups[3][k], half, half + 1)
            columns[4 * half + k] = quarters(upper, lower, 0, 2)
            columns[4 * half + 4 + k] = quarters(upper, lower, 1, 3)
    return columns


@machine
def emit_transpose(b, keys, depth, table, offset, target, k_ahead, k_offset, v_ahead, v_offset):
    """Write target[d, j] = number d of the table's row j, in steps of 16 rows; prefetch those of two more tables."""

    def rows(j):
        sources, *ahead = (
            [at(b, load(b, at(b, at(b, base, j, 8), 8 * r), I64), add) for r in range(LANES)]
            for base, add in ((table, offset), (k_ahead, k_offset), (v_ahead, v_offset))
        )

        def square(d):
            for line in (line for lines in zip(*ahead) for line in lines):
                prefetch(b, at(b, line, d, 4))
            corner = at(b, at(b, target, j, 4), d, 4 * KEY_BLOCK)
            for n, column in enumerate(transposed(b, [load(b, at(b, source, d, 4)) for source in sources])):
                store(b, column, at(b, corner, 4 * KEY_BLOCK * n))

        repeat(b, depth, LANES, square)

    repeat(b, keys, LANES, rows)


@intrinsic
def fetch_add(typing_context, address):
    """Return the int64 at an address and add one to it, as one step."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), I64(1), "seq_cst")

    return int64(int64), codegen


# ---- Tasks.

inner = njit(error_model="numpy")
entry = njit(error_model="numpy", nogil=True, cache=True)


@inner
def address(array):
    return np.int64(array.ctypes.data)


@inner
def fill_table(rows, count, first, step):
    """Fill a table with addresses at a regular distance."""
    for row in range(count):
        rows[row] = first + row * step


@inner
def locate(cache, table, b, slot, count, rows):
    """Write the addresses of `count` tokens of request b, from `slot` on, and the last one's to the end of the block."""
    page_size = cache.shape[1]
    page, within = slot // page_size, slot % page_size
    for j in range(count):
        rows[j] = address(cache) + table[b, page] * cache.strides[0] + within * cache.strides[1]
        within += 1
        if within == page_size:
            page, within = page + 1, 0
    for j in range(count, KEY_BLOCK):
        rows[j] = rows[count - 1]


@inner
def see_block(row, end, sees, start, q_rows, v_rows, v_offset, state, state_bytes, depth, tile):
    """Let rows row .. end - 1 of a task see a block of keys: the transpose is in place, values are in rows."""
    x, x_rows, k_rows, one, scale = tile
    padded = (state_bytes - COLUMNS) // 4
    while row < end:
        rows = min(ROWS, end - row)
        if ROWS < end - row < 2 * ROWS:
            rows = (end - row + 1) // 2  # two equal steps are faster than a full one and a narrow one
        own = state + row * state_bytes
        width = min(KEY_BLOCK, sees[row + rows - 1] - start)
        emit_scores((rows, q_rows + 8 * row, 0, k_rows, 0, x, 4 * KEY_BLOCK, width, depth, scale, 0))
        if sees[row] - start < KEY_BLOCK:
            emit_mask((rows, x, address(sees) + 8 * row, start))
        emit_softmax((rows, x, own, state_bytes))
        # All rows together as far as the first one sees; from there on, stepwise, those that see more.
        keys = 0
        for later in range(rows):
            visible = max(0, min(KEY_BLOCK, sees[row + later] - start))
            if later == 0 or visible > keys:
                columns = own + later * state_bytes + COLUMNS
                factor, factor_bytes = (one, 0) if later else (own + FACTOR, state_bytes)
                weights = (rows - later, x_rows + 8 * later, 4 * keys, v_rows + 8 * keys, v_offset)
                emit_outputs((*weights, columns, state_bytes, padded, visible - keys, factor, factor_bytes))
                keys = visible
        row += rows


@inner
def merge_chunk(start, position, heads, per_head, group, state, total, state_bytes):
    """Merge the chunk at `start` into the total of the rows that see some of it."""
    unseeing = max(0, start - position) * group
    for g in range(heads):
        row = (g * per_head + unseeing) * state_bytes
        emit_merge((per_head - unseeing, state + row, total + row, state_bytes))


@entry
def attend(q, k, v, table, slots, cu, lengths, scale, tasks, order, counters, scratches, partials, probe, out, lse):
    """Take tasks until none is left; False if this thread drops denormal numbers.

    counters: the next task, the next scratch, and of each split tile the tasks that are done.
    """
    if probe[0] * probe[1] * probe[2] != probe[1]:
        return False
    depth, group = q.shape[2], q.shape[1] // k.shape[2]
    padded = -(-depth // TILE) * TILE
    state_bytes = COLUMNS + 4 * padded
    scratch = scratches[fetch_add(address(counters) + 8)]
    line = (address(scratch) + 63) // 64 * 64
    one = (line - address(scratch)) // 4
    scratch[one], scratch[one + 1] = 1, scale
    x = line + 64
    keys = x + 4 * KEY_BLOCK * ROWS
    packed = keys + 4 * KEY_BLOCK * depth
    total = packed + 4 * KEY_BLOCK * padded
    largest = (address(scratch) + 4 * scratch.size - total) // (2 * state_bytes)
    tables = np.empty((11, max(KEY_BLOCK, depth, largest, LANES)), np.int64)
    packed_rows, key_rows, x_rows, q_rows, out_rows, lse_rows, sees = (
        tables[4], tables[5], tables[6], tables[7], tables[8], tables[9], tables[10],
    )  # fmt: skip
    fill_table(packed_rows, KEY_BLOCK, packed, 4 * padded)
    fill_table(key_rows, depth, keys, 4 * KEY_BLOCK)
    fill_table(x_rows, ROWS, x, 4 * KEY_BLOCK)
    tile = (x, address(x_rows), address(key_rows), line, line + 4)
    while True:
        taken = fetch_add(address(counters))
        if taken >= order.size:
            return True
        b, g0, g1, first, end, chunk, end_chunk, partial, item, parts = tasks[order[taken]]
        per_head = (end - first) * group
        size = per_head * (g1 - g0)
        position = lengths[b] - cu[b + 1] + cu[b] + first  # of the task's first row
        seen = position + end - first
        for i in range(size):
            t, h = cu[b] + first + i % per_head // group, (g0 + i // per_head) * group + i % group
            sees[i] = position + i % per_head // group + 1
            q_rows[i], out_rows[i] = address(q[t, h]), address(out[t, h])
            lse_rows[i] = address(lse) + h * lse.strides[0] + t * lse.strides[1] if lse.size else line + 8
        emit_reset((size, total, state_bytes))
        for chunk_start in range(chunk * CHUNK, end_chunk * CHUNK, CHUNK):
            state = total + largest * state_bytes
            if partial >= 0:
                state = address(partials) + (partial + chunk_start // CHUNK * size) * state_bytes
            emit_reset((size, state, state_bytes))
            chunk_end = min(chunk_start + CHUNK, seen)
            for start in range(chunk_start, chunk_end, KEY_BLOCK):
                count = min(KEY_BLOCK, chunk_end - start)
                now = start // KEY_BLOCK % 2
                k_rows, v_rows, next_k, next_v = tables[now], tables[2 + now], tables[1 - now], tables[3 - now]
                if start == chunk * CHUNK:
                    locate(k, table, b, slots[b] + start, count, k_rows)
                    locate(v, table, b, slots[b] + start, count, v_rows)
                ahead = min(KEY_BLOCK, min(end_chunk * CHUNK, seen) - start - KEY_BLOCK)
                if ahead <= 0:
                    next_k, next_v = k_rows, v_rows
                else:
                    locate(k, table, b, slots[b] + start + KEY_BLOCK, ahead, next_k)
                    locate(v, table, b, slots[b] + start + KEY_BLOCK, ahead, next_v)
                for g in range(g0, g1):
                    k_offset, v_offset = g * k.strides[2], g * v.strides[2]
                    ahead_k, ahead_v, forth = (k_rows, v_rows, 1) if g + 1 < g1 else (next_k, next_v, g0 - g)
                    coming = (
                        *(address(ahead_k), k_offset + forth * k.strides[2]),
                        *(address(ahead_v), v_offset + forth * v.strides[2]),
                    )
                    emit_transpose((count, depth, address(k_rows), k_offset, keys, *coming))
                    values = address(v_rows)
                    if per_head >= PACK_ROWS or padded != depth:
                        emit_copy((count, values, v_offset, address(packed_rows), 0, depth))
                        values, v_offset = address(packed_rows), 0
                    rows = (g - g0) * per_head
                    unseeing, sight = max(0, start - position) * group, (sees, start, address(q_rows))
                    see_block(
                        rows + unseeing, rows + per_head, *sight, values, v_offset, state, state_bytes, depth, tile
                    )
            if partial < 0:
                merge_chunk(chunk_start, position, g1 - g0, per_head, group, state, total, state_bytes)
        if partial >= 0:
            if fetch_add(address(counters) + 16 + 8 * item) < parts - 1:
                continue  # other threads still compute chunks of these rows; the last one merges them
            for chunk_start in range(0, seen, CHUNK):
                state = address(partials) + (partial + chunk_start // CHUNK * size) * state_bytes
                merge_chunk(chunk_start, position, g1 - g0, per_head, group, state, total, state_bytes)
        emit_results((size, total, state_bytes, depth, address(out_rows), address(lse_rows)))


@entry
def plan(cu, lengths, kv_heads, group, tile, heads, apart):
    """List tasks and their costs; return also the most rows of a task, the split tiles and their partial rows.

    A task is a request, its KV heads, rows and chunks (first and end of each), the place of its partial rows or -1,
    and the split tile that it is a part of and the number of parts.
    """
    most = 0
    for b in range(lengths.size):
        parts = (lengths[b] + CHUNK * apart - 1) // (CHUNK * apart)
        most += (cu[b + 1] - cu[b] + tile - 1) // tile * kv_heads * parts
    tasks, costs = np.empty((most, 10), np.int64), np.empty(most, np.int64)
    count = largest = split = partial_rows = 0
    for b in range(lengths.size):
        rows = cu[b + 1] - cu[b]
        together = min(heads, max(1, TILE_ROWS // (max(1, min(rows, tile)) * group)))
        for first in range(0, rows, tile):
            end = min(rows, first + tile)
            seen = lengths[b] - rows + end
            chunks = (seen + CHUNK - 1) // CHUNK
            parts = (chunks + apart - 1) // apart
            for g in range(0, kv_heads, together):
                g_end = min(kv_heads, g + together)
                size = (end - first) * group * (g_end - g)
                largest = max(largest, size)
                for part in range(parts):
                    c, c_end = part * apart, min(chunks, (part + 1) * apart)
                    task = tasks[count]
                    task[0], task[1], task[2], task[3], task[4], task[5], task[6] = b, g, g_end, first, end, c, c_end
                    task[7], task[8], task[9] = partial_rows if parts > 1 else -1, split, parts
                    costs[count] = size * (min(seen, c_end * CHUNK) - c * CHUNK)
                    count += 1
                if parts > 1:
                    split, partial_rows = split + 1, partial_rows + size * chunks
    return tasks[:count], costs[:count], largest, split, partial_rows


@entry
def write_rows(k, v, k_cache, v_cache, table, cu, lengths, part, parts):
    """Write one part of the new tokens to the cache."""
    rows = np.empty((4, KEY_BLOCK), np.int64)
    for b in range(part, lengths.size, parts):
        for first in range(cu[b], cu[b + 1], KEY_BLOCK):
            count = min(KEY_BLOCK, cu[b + 1] - first)
            position = lengths[b] - cu[b + 1] + first
            locate(k_cache, table, b, position, count, rows[0])
            locate(v_cache, table, b, position, count, rows[1])
            fill_table(rows[2], count, address(k[first]), k.strides[0])
            fill_table(rows[3], count, address(v[first]), v.strides[0])
            for g in range(k.shape[1]):
                to_k, to_v = (address(rows[0]), g * k_cache.strides[2]), (address(rows[1]), g * v_cache.strides[2])
                emit_copy((count, address(rows[2]), g * k.strides[1], *to_k, k.shape[2]))
                emit_copy((count, address(rows[3]), g * v.strides[1], *to_v, v.shape[2]))


# ---- Host.

FLOATS_3, FLOATS_4, TABLE, LENGTHS = (
    types.Array(kind, rank, "A", readonly=True) for kind, rank in ((float32, 3), (float32, 4), (int32, 2), (int32, 1))
)
CACHE, OUT, LSE = (types.Array(float32, rank, "A") for rank in (4, 3, 2))
TASKS_2, INTEGERS_1, SCRATCH, PARTIALS = int64[:, ::1], int64[::1], float32[:, ::1], float32[::1]
SIGNATURES = {
    attend: (
        *(FLOATS_3, FLOATS_4, FLOATS_4, TABLE, LENGTHS, LENGTHS, LENGTHS, float32, TASKS_2, INTEGERS_1, INTEGERS_1),
        *(SCRATCH, PARTIALS, PARTIALS, OUT, LSE),
    ),
    plan: (LENGTHS, LENGTHS, int64, int64, int64, int64, int64),
    write_rows: (FLOATS_3, FLOATS_3, CACHE, CACHE, TABLE, LENGTHS, LENGTHS, int64, int64),
}
_lock = threading.Lock()
_ready: set[object] = set()
_pools: dict[int, ThreadPoolExecutor] = {}


def compiled(kernel):
    """Compile a kernel at its first use, once, for arrays of any strides."""
    if kernel not in _ready:
        with _lock:
            if kernel not in _ready:
                kernel.compile(SIGNATURES[kernel])
                kernel.disable_compile()
                _ready.add(kernel)
    return kernel


def together(threads, call):
    """Make a call on some threads, this one among them; returns what they return."""
    with _lock:
        if threads > 1 and os.getpid() not in _pools:  # a forked child makes its own pool
            _pools.clear()
            _pools[os.getpid()] = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    helping = [_pools[os.getpid()].submit(call, thread) for thread in range(1, threads)]
    return [call(0), *(each.result() for each in helping)]


def run(q, k, v, table, slots, cu, lengths, query_length, key_length, scale, out, lse):
    (_, query_heads, depth), kv_heads = q.shape, k.shape[2]
    axes = {"query_heads": query_heads, "kv_heads": kv_heads, "batch": len(lengths)}
    axes |= {"query_length": query_length, "key_length": key_length}
    tile, heads, chunks = schedule(axes, {"TILE_ROWS": TILE_ROWS, "TASKS": TASKS}).values()
    group, padded = query_heads // kv_heads, -(-depth // TILE) * TILE
    tasks, costs, largest, split, partial_rows = compiled(plan)(cu, lengths, kv_heads, group, tile, heads, chunks)
    threads = min(len(os.sched_getaffinity(0)), len(tasks)) if costs.sum() >= ALONE_BELOW else 1
    row = COLUMNS // 4 + padded
    scratches = np.zeros((threads, KEY_BLOCK * (ROWS + depth + padded) + 2 * largest * row + 2 * LANES), np.float32)
    partials = np.empty(partial_rows * row, np.float32)
    operands = (
        *(q, k, v, table, slots, cu, lengths, np.float32(float(scale) * math.log2(math.e)), tasks),
        *(np.argsort(-costs), np.zeros(2 + split, np.int64), scratches, partials, DENORMAL_PROBE, out),
        np.empty((0, 0), np.float32) if lse is None else lse,
    )
    kernel = compiled(attend)
    if not all(together(threads, lambda thread: kernel(*operands))):
        raise RuntimeError("a thread flushes denormal numbers to zero, which changes bits: turn that mode off")


def attention(q, k, v, cu_seqlens, max_seqlen, softmax_scale, out, lse):
    """Attend packed sequences: all tokens are one page, in which a request starts at its offset."""
    table = np.zeros((len(cu_seqlens) - 1, 1), np.int32)
    lengths, sizes = np.diff(cu_seqlens), (max_seqlen, max_seqlen)
    run(q, k[None], v[None], table, cu_seqlens[:-1], cu_seqlens, lengths, *sizes, softmax_scale, out, lse)


def paged_attention(
    q, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, out, lse
):
    slots, sizes = np.zeros(len(seqlens_k), np.int32), (max_seqlen_q, max_seqlen_k)
    run(q, k_cache, v_cache, page_table, slots, cu_seqlens_q, seqlens_k, *sizes, softmax_scale, out, lse)


def write_kv_cache(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k):
    threads = min(len(os.sched_getaffinity(0)), len(seqlens_k)) if k.size >= 1 << 16 else 1
    kernel = compiled(write_rows)
    operands = (k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k)
    together(threads, lambda thread: kernel(*operands, thread, threads))


def numerics(constant_axes):
    return {"chunk": CHUNK, "key_block": KEY_BLOCK, "exp2_degree": EXP2_DEGREE}


def schedule(axes, knobs):
    """Choose the query rows of a tile, and the KV heads and chunks that a task may take."""
    kv_heads, group = axes["kv_heads"], axes["query_heads"] // axes["kv_heads"]
    tile = max(1, min(axes["query_length"], knobs["TILE_ROWS"] // group))
    tiles = axes["batch"] * -(-axes["query_length"] // tile)
    heads = min(kv_heads, max(1, tiles * kv_heads // knobs["TASKS"]))
    tasks = tiles * -(-kv_heads // heads)
    chunks = max(1, -(-axes["key_length"] // CHUNK))
    if tasks < knobs["TASKS"]:
        chunks = max(1, chunks * tasks // knobs["TASKS"])
    return {"tile": tile, "heads": heads, "chunks": chunks}
