"""Unified causal attention on the CPU: prefill, chunked prefill, decode, packed update and its gradients.

    O[t, h]   = sum_j softmax_j(c * q[t, h] . k[j, g]) * v[j, g]        g = h // group, j = 0 .. position of t
    LSE[h, t] = log sum_j exp(c * q[t, h] . k[j, g])

The order of every sum is README.md's. No schedule can change it: vectors run across independent sums (16 keys
of the scores, 16 columns of the output), never along one. A task is a tile of query rows, some KV heads and
some chunks of one request; threads take tasks from one counter. Of each block of keys a task transposes K
once for all its rows, then takes up to ROWS rows (query rows times heads of the group) at a time: their
scores and outputs stay in vector registers. Gradients add up in blocks of TILE queries and TILE keys, by the
same products. Inner loops are written as vector instructions, twice as fast as compiled scalar loops.
"""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llvmlite import ir
from numba import float32, int32, int64, njit, types
from numba.extending import intrinsic

CHUNK = 256
KEY_BLOCK = 64
EXP2_DEGREE = 6
ROWS = 6
TILE_ROWS = 192
TASKS = 16
GRADIENT_ROWS = 256
THREAD_COST = 8000

KNOBS = {
    "CHUNK": ("numeric", (256, 512, 1024, 2048, 4096)),
    "KEY_BLOCK": ("numeric", (16, 32, 64, 128, 256)),
    "EXP2_DEGREE": ("numeric", (4, 5, 6, 7)),
    "ROWS": ("schedule", (2, 4, 6)),
    "TILE_ROWS": ("schedule", (48, 96, 192, 384)),
    "TASKS": ("schedule", (1, 4, 8, 16, 32, 64)),
    "GRADIENT_ROWS": ("schedule", (64, 128, 256, 512, 1024)),
    "THREAD_COST": ("schedule", (1000, 4000, 8000, 16000, 64000)),
}

EXP2 = {
    4: "1p0 1.62dfcap-1 1.ebf1b4p-3 1.ca9008p-5 1.409102p-7",
    5: "1p0 1.62e39ep-1 1.ebfa4ep-3 1.c74322p-5 1.3cbea8p-7 1.23a5eep-10",
    6: "1p0 1.62e432p-1 1.ebfbe2p-3 1.c6ae72p-5 1.3b270ep-7 1.5f7276p-10 1.470b48p-13",
    7: "1p0 1.62e430p-1 1.ebfbe0p-3 1.c6b056p-5 1.3b2a1cp-7 1.5dc052p-10 1.443f96p-13 1.c047dap-17",
}
LOG2, LN2 = "1.715476p1 1.ec709ep-1 1.2776c6p-1 1.a61762p-2 1.484b14p-2", float.fromhex("1.62e43p-1")
LOG2E = math.log2(math.e)

CHOSEN = {"TILE_ROWS": TILE_ROWS, "TASKS": TASKS, "GRADIENT_ROWS": GRADIENT_ROWS}
LANES, TILE = 16, 64  # numbers of a vector; columns of a register tile, four vectors
WIDTH = max(KEY_BLOCK, TILE)  # of a row of scores, and of transposed keys
# A row's running state: its maximum and what rescales its accumulator (one cache line), its lanes (one), its
# accumulator. Its total over chunks: the maximum and L, each in all lanes of a line, and A.
FACTOR, SUMS, COLUMNS = 4, 64, 128
# Tables of addresses, and of how many keys a row sees.
KEYS_AT, VALUES_AT, QUERIES_AT, OUT_AT, LSE_AT, SCORES_AT, TRANSPOSED_AT, SEES = range(8)
DENORMAL_PROBE = np.array([2.0**-100, 2.0**-40, 2.0**100], np.float32)  # their product passes a denormal

# ---- Vector code. A vector is 16 float32; addresses and sizes are int64.
I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR, INTEGERS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


def arithmetic(real, whole):
    return lambda self, x: self.emit(real if self.real else whole, x)


class Value:
    """A value of the function being compiled; arithmetic with others or with numbers emits instructions."""

    def __init__(self, builder, value):
        self.builder, self.value, self.kind = builder, value, value.type
        self.real = value.type in (VECTOR, F32)

    def operand(self, x):
        """What the builder takes: a value's, a constant of this type for a number, anything else as it is."""
        if isinstance(x, int | float):
            return self.kind([x] * LANES if isinstance(self.kind, ir.VectorType) else x)
        return x.value if isinstance(x, Value) else x

    def emit(self, instruction, *others):
        operands = map(self.operand, (self, *others))
        return Value(self.builder, getattr(self.builder, instruction)(*operands))

    __add__, __sub__ = arithmetic("fadd", "add"), arithmetic("fsub", "sub")
    __mul__, __truediv__ = arithmetic("fmul", "mul"), arithmetic("fdiv", "sdiv")

    def compare(self, sign, x):
        compare = self.builder.fcmp_ordered if self.real else self.builder.icmp_signed
        return compare(sign, self.value, self.operand(x))

    def pick(self, sign, x, yes, no):
        """`yes` where this compares like that with x, `no` elsewhere and where either is a NaN."""
        operands = map(self.operand, (yes, no))
        return Value(self.builder, self.builder.select(self.compare(sign, x), *operands))

    def shuffle(self, other, picks):
        return self.emit("shuffle_vector", other, INTEGERS(picks))

    def spread(self):
        """A vector of this number."""
        single = Value(self.builder, self.builder.insert_element(VECTOR(ir.Undefined), self.value, I32(0)))
        return single.shuffle(single, [0] * LANES)

    def across(self, combine):
        """Combine the lanes by halving; every lane ends with the result."""
        x = self
        for distance in (8, 4, 2, 1):
            x = combine(x, x.shuffle(x, [lane ^ distance for lane in range(LANES)]))
        return x

    def call(self, name, result, *others):
        """Call an LLVM intrinsic with this and others."""
        operands = list(map(self.operand, (self, *others)))
        kind = ir.FunctionType(result, [x.type for x in operands])
        function = self.builder.module.declare_intrinsic(name, (), kind)
        return Value(self.builder, self.builder.call(function, operands))

    def fma(self, factor, x):
        """self * factor + x, rounded once."""
        return self.call("llvm.fma.f32" if self.kind == F32 else "llvm.fma.v16f32", self.kind, factor, x)

    def larger(self, x):
        """self > x ? self : x, so that a NaN gives x."""
        return self.pick(">", x, self, x)

    def origin(self):
        """What the exponents of a row with this maximum count from: 0 while nothing has been seen."""
        return self.pick("==", -math.inf, 0, self)

    def canonical(self):
        return self.pick("==", self, self, math.nan)

    def polynomial(self, ascending):
        *lower, result = [float.fromhex(c) for c in ascending.split()]
        for c in reversed(lower):
            result = self.fma(result, c)
        return result

    def exp2(self):
        """2^x for x <= 0 or NaN."""
        t = self + 12582912
        p = (self - (t - 12582912)).polynomial(EXP2[EXP2_DEGREE])
        power = (t.emit("bitcast", INTEGERS).emit("shl", 23) + 0x3F800000).emit("bitcast", VECTOR)
        return self.pick("<", -125, 0, p * power)

    def log2(self):
        """log2 of a sum of weights: zero, NaN or at least about 1."""
        offset = self.emit("bitcast", INTEGERS) - 0x3F3504F3
        f = (offset.emit("and_", 0x7FFFFF) + 0x3F3504F3).emit("bitcast", VECTOR)
        z, exponent = (f - 1) / (f + 1), offset.emit("ashr", 23).emit("sitofp", VECTOR)
        y = z.fma((z * z).polynomial(LOG2), exponent)
        return self.pick(">", 0, self.pick("<", math.inf, y, self), self.pick("==", 0, -math.inf, self))

    def pointer(self, kind):
        return self.emit("inttoptr", kind.as_pointer())

    def load(self, kind=VECTOR):
        return Value(self.builder, self.builder.load(self.pointer(kind).value, align=4))

    def store(self, x):
        self.builder.store(x.value, self.pointer(x.kind).value, align=4)


def machine(emit):
    """Make a function that Numba can call, with one tuple of integers, of one that emits code for them."""

    @intrinsic
    def call(typing_context, operands):
        def codegen(context, builder, signature, args):
            emit(*[Value(builder, builder.extract_value(args[0], i)) for i in range(operands.count)])
            return context.get_dummy_value()

        return types.none(operands), codegen

    return call


def repeat(count, step, body, carried=()):
    """Emit `for i in range(0, count, step): carried = body(i, *carried)`; returns what is carried out."""
    b = count.builder
    start, head, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
    b.cbranch(count.compare(">", 0), head, done)
    b.position_at_end(head)
    i, *inside = [Value(b, b.phi(value.kind)) for value in (count, *carried)]
    following = body(i, *inside) or []
    advanced, end = i + step, b.block
    b.cbranch(advanced.compare("<", count), head, done)
    b.position_at_end(done)
    outside = [Value(b, b.phi(value.kind)) for value in carried]
    before, after = [0, *carried, *carried], [advanced, *following, *following]
    for phi, first, later in zip([i, *inside, *outside], before, after, strict=True):
        phi.value.add_incoming(count.operand(first), start)
        phi.value.add_incoming(later.value, end)
    return outside


def products(
    apart, rows, a_table, a_add, a_step, b_table, b_add, c, c_bytes, columns, depth, factor, factor_bytes
):  # fmt: skip
    """c = c * factor + a @ b for up to ROWS rows, in tiles of TILE columns that stay in registers.

    The sums go on from c * factor, or, apart, start at zero and are added to c at the end. Tables hold the
    addresses of rows; a's numbers lie a_step bytes apart. A factor (one a row) below zero means zero,
    whatever c is.
    """
    b, vectors = rows.builder, TILE // LANES

    def case(tall):
        a_rows = [(a_table + 8 * r).load(I64) + a_add for r in range(tall)]
        factors = [(factor + factor_bytes * r).load(F32).spread() for r in range(tall)]

        def tile(column):
            places = [c + c_bytes * r + column * 4 + 64 * n for r in range(tall) for n in range(vectors)]
            before = [place.load() * factors[i // vectors] for i, place in enumerate(places)]
            before = [factors[i // vectors].pick("<", 0, 0, x) for i, x in enumerate(before)]
            zeros = [Value(b, VECTOR([0.0] * LANES)) for _ in places]

            def step(j, *sums):
                b_row = (b_table + j * 8).load(I64) + b_add + column * 4
                parts = [(b_row + 64 * n).load() for n in range(vectors)]
                weights = [(a_row + j * a_step).load(F32).spread() for a_row in a_rows]
                return [weights[i // vectors].fma(parts[i % vectors], x) for i, x in enumerate(sums)]

            for place, x in zip(places, repeat(depth, 1, step, zeros if apart else before), strict=True):
                place.store(place.load() + x if apart else x)

        repeat(columns, TILE, tile)

    done = b.append_basic_block("end")
    choice = b.switch(rows.value, done)
    for count in range(1, ROWS + 1):
        block = b.append_basic_block("rows")
        choice.add_case(I64(count), block)
        b.position_at_end(block)
        case(count)
        b.branch(done)
    b.position_at_end(done)


emit_products = machine(lambda *operands: products(False, *operands))
emit_sums = machine(lambda *operands: products(True, *operands))


@machine
def emit_softmax(rows, x, state, state_bytes, scale):
    """Turn rows of scores into weights; move each row's maximum and lanes on, leave its rescaling factor."""
    scales = scale.load(F32).spread()

    def row(r):
        own, first = state + r * state_bytes, x + r * (4 * WIDTH)
        places = [first + 4 * n for n in range(0, KEY_BLOCK, LANES)]
        scores = [place.load() * scales for place in places]
        old = top = own.load(F32).spread()
        for score in scores:
            top = score.larger(top)
        top = top.across(Value.larger)
        base = top.origin()
        factor = (old - base).exp2()
        lanes = (own + SUMS).load() * factor
        for score, place in zip(scores, places, strict=True):
            weights = (score - base).exp2()
            lanes += weights
            place.store(weights)
        (own + SUMS).store(lanes)
        own.store(top.emit("extract_element", I32(0)))
        (own + FACTOR).store(factor.emit("extract_element", I32(0)))

    repeat(rows, 1, row)


@machine
def emit_merge(state, total, columns):
    """Merge a row's finished chunk into its total; of a chunk that it does not see, nothing comes."""
    m, M = state.load(F32).spread(), total.load()
    top = m.larger(M)
    a0, a1 = (M - top.origin()).exp2(), (m - top.origin()).exp2()

    def merge(offset, value):
        place = total + offset
        place.store(value.fma(a1, place.load() * a0))

    total.store(top)
    merge(SUMS, (state + SUMS).load().across(Value.__add__))
    repeat(columns * 4, 64, lambda n: merge(n + COLUMNS, (state + COLUMNS + n).load()))


@machine
def emit_results(total, columns, out, lse):
    """Store a row's O = A / L + 0 and LSE = (M + log2 L) * ln 2."""
    M, L = total.load(), (total + SUMS).load()

    repeat(columns * 4, 64, lambda n: (out + n).store(((total + COLUMNS + n).load() / L + 0).canonical()))
    lse.store(((M + L.log2()) * LN2).canonical().emit("extract_element", I32(0)))


@machine
def emit_delta(out, dout, columns, delta):
    """Store a row's delta = sum O * dO."""
    zero = Value(out.builder, F32(0))
    (x,) = repeat(columns * 4, 4, lambda d, x: [(out + d).load(F32).fma((dout + d).load(F32), x)], [zero])
    delta.store(x)


@machine
def emit_gradients(rows, s, t, edges, scale):
    """Turn rows of scores and of dP into P and dS, by the rows' edges."""
    scales = scale.load(F32).spread()

    def row(r):
        shift, delta, share = ((edges + r * 16 + n).load(F32).spread() for n in (0, 4, 8))
        for n in range(0, 4 * TILE, 64):
            p_place, ds_place = (x + r * (4 * WIDTH) + n for x in (s, t))
            x = p_place.load().fma(scales, shift)
            p = x.pick(">", 0, 0, x).exp2() * share
            p_place.store(p)
            ds_place.store(p * (ds_place.load() - delta))

    repeat(rows, 1, row)


@machine
def emit_scaled(row, columns, factor):
    """Multiply a row of finished sums by a factor."""
    scale = factor.load(F32).spread()
    repeat(columns * 4, 64, lambda n: (row + n).store(((row + n).load() * scale + 0).canonical()))


@machine
def emit_copy(source, target, columns):
    repeat(columns * 4, 64, lambda n: (target + n).store((source + n).load()))


def transposed(rows):
    """Transpose 16 vectors: exchange each bit of a row's number for the same bit of the lane's."""
    for bit in (1, 2, 4, 8):
        low = [lane + (LANES - bit if lane & bit else 0) for lane in range(LANES)]
        high = [lane + (LANES if lane & bit else bit) for lane in range(LANES)]
        rows = [rows[n & ~bit].shuffle(rows[n | bit], high if n & bit else low) for n in range(LANES)]
    return rows


@machine
def emit_transpose(keys, columns, table, offset, target, k_ahead, k_offset, v_ahead, v_offset):
    """Write target[d, j] = number d of the table's row j, 16 rows at a time; prefetch rows of two tables."""

    def sixteen_keys(j):
        sources, *coming = (
            [(rows + j * 8 + 8 * r).load(I64) + add for r in range(LANES)]
            for rows, add in ((table, offset), (k_ahead, k_offset), (v_ahead, v_offset))
        )

        def square(d):
            for row in (*coming[0], *coming[1]):
                line = (row + d * 4).pointer(ir.IntType(8))
                line.call("llvm.prefetch.p0", ir.VoidType(), I32(0), I32(2), I32(1))  # into the second level
            for n, column in enumerate(transposed([(row + d * 4).load() for row in sources])):
                (target + j * 4 + (d + n) * (4 * WIDTH)).store(column)

        repeat(columns, LANES, square)

    repeat(keys, LANES, sixteen_keys)


@intrinsic
def fetch_add(typing_context, address):
    """Return the int64 at an address and add one to it, as one step."""
    return int64(int64), lambda context, builder, signature, args: builder.atomic_rmw(
        "add", Value(builder, args[0]).pointer(I64).value, I64(1), "seq_cst"
    )


# ---- Tasks.
inner = njit(error_model="numpy")
entry = njit(error_model="numpy", nogil=True, cache=True)


@inner
def address(array):
    return np.int64(array.ctypes.data)


@inner
def token(cache, table, b, slot):
    """The address of a slot of request b."""
    page, within = table[b, slot // cache.shape[1]], slot % cache.shape[1]
    return address(cache) + page * cache.strides[0] + within * cache.strides[1]


@inner
def locate(cache, table, b, slot, count, rows):
    """Write the addresses of `count` slots of request b, and the last one's to the end of its block."""
    left = 0  # slots of the page
    for j in range((count + KEY_BLOCK - 1) // KEY_BLOCK * KEY_BLOCK):
        if j >= count:
            rows[j] = rows[count - 1]
        elif left > 0:
            rows[j] = rows[j - 1] + cache.strides[1]
            left -= 1
        else:
            rows[j] = token(cache, table, b, slot + j)
            left = cache.shape[1] - 1 - (slot + j) % cache.shape[1]


@inner
def see_block(row, end, start, state, scores, tables, v_rows, v_offset, factors):
    """Let rows row .. end - 1 of a task see a block of keys, whose transpose is in place."""
    sees, state_bytes, columns = tables[SEES], state.strides[0], state.shape[1] - COLUMNS // 4
    x, x_rows, k_rows = address(scores), address(tables[SCORES_AT]), address(tables[TRANSPOSED_AT])
    one, scale, nothing = factors, factors + 4, factors + 8
    while row < end:
        rows = min(ROWS, end - row)
        if ROWS < end - row < 2 * ROWS:
            rows = (end - row + 1) // 2  # two equal steps are faster than a full one and a narrow one
        width = min(KEY_BLOCK, sees[row + rows - 1] - start)
        q_rows, own = address(tables[QUERIES_AT]) + 8 * row, address(state) + row * state_bytes
        emit_products((rows, q_rows, 0, 4, k_rows, 0, x, 4 * WIDTH, width, columns, nothing, 0))
        for later in range(rows):
            for j in range(max(0, sees[row + later] - start), KEY_BLOCK):
                scores[later, j] = -np.inf  # a key that the row does not see
        emit_softmax((rows, x, own, state_bytes, scale))
        # All rows together as far as the first one sees; from there on, stepwise, those that see more.
        seen = 0
        for later in range(rows):
            visible = max(0, min(KEY_BLOCK, sees[row + later] - start))
            if later == 0 or visible > seen:
                weights = (rows - later, x_rows + 8 * later, 4 * seen, 4, v_rows + 8 * seen, v_offset)
                result = (own + later * state_bytes + COLUMNS, state_bytes, columns, visible - seen)
                factor = (one, 0) if later else (own + FACTOR, state_bytes)
                emit_products((*weights, *result, *factor))
                seen = visible
        row += rows


@entry
def attend(inputs, work, out, lse):
    """Take tasks until none is left; False if this thread drops denormal numbers."""
    q, k, v, table, slots, cu, lengths, scale = inputs
    tasks, order, counters, scratches, partials, probe = work
    if probe[0] * probe[1] * probe[2] != probe[1]:
        return False
    columns, group = q.shape[2], q.shape[1] // k.shape[2]
    words = COLUMNS // 4 + columns  # of a row's state
    scratch = scratches[fetch_add(address(counters) + 8)]
    scratch = scratch[-address(scratch) % 64 // 4 :]
    scratch[0], scratch[1], scratch[2] = 1, scale, -1
    factors, keys = address(scratch), address(scratch) + 4 * (LANES + ROWS * WIDTH)
    scores = scratch[LANES : LANES + ROWS * WIDTH].reshape(ROWS, WIDTH)
    states = scratch[LANES + (ROWS + columns) * WIDTH :]
    largest = states.size // (2 * words)
    states = states[: 2 * largest * words].reshape(2, largest, words)
    tables = np.empty((8, max(CHUNK + KEY_BLOCK, columns, largest)), np.int64)
    k_rows, v_rows, sees = tables[KEYS_AT], tables[VALUES_AT], tables[SEES]
    for row in range(max(ROWS, columns)):
        tables[SCORES_AT, row] = address(scores) + 4 * WIDTH * row
        tables[TRANSPOSED_AT, row] = keys + 4 * WIDTH * row
    while True:
        taken = fetch_add(address(counters))
        if taken >= order.size:
            return True
        b, g0, g1, first, end, chunk, end_chunk, partial, split = tasks[order[taken]]
        i, per_head = 0, (end - first) * group
        size = per_head * (g1 - g0)
        for g in range(g0, g1):
            for t in range(cu[b] + first, cu[b] + end):
                for h in range(g * group, g * group + group):
                    tables[QUERIES_AT, i], tables[OUT_AT, i] = address(q[t, h]), address(out[t, h])
                    tables[LSE_AT, i] = address(lse[h, t:]) if lse.size else factors + 12
                    sees[i] = lengths[b] - cu[b + 1] + t + 1
                    i += 1
        total = states[0, :size]
        total.fill(0)
        total[:, :LANES] = -np.inf  # the maximum
        for c in range(chunk, end_chunk):
            state = states[1, :size] if partial < 0 else partials[partial + c * size :][:size]
            state.fill(0)
            state[:, 0] = -np.inf
            stop = min(c * CHUNK + CHUNK, sees[size - 1])
            known = min(stop + KEY_BLOCK, end_chunk * CHUNK, sees[size - 1])  # with a block to prefetch
            locate(k, table, b, slots[b] + c * CHUNK, known - c * CHUNK, k_rows)
            locate(v, table, b, slots[b] + c * CHUNK, known - c * CHUNK, v_rows)
            for start in range(c * CHUNK, stop, KEY_BLOCK):
                k_now, v_now = address(k_rows) + 8 * (start % CHUNK), address(v_rows) + 8 * (start % CHUNK)
                for g in range(g0, g1):
                    # Prefetched meanwhile: this block for the next KV head, or the next block for the first.
                    next_g, ahead = (
                        (g + 1, 0) if g + 1 < g1 else (g0, 8 * KEY_BLOCK * (start + KEY_BLOCK < known))
                    )
                    coming = (k_now + ahead, next_g * k.strides[2], v_now + ahead, next_g * v.strides[2])
                    count = min(KEY_BLOCK, stop - start)
                    emit_transpose((count, columns, k_now, g * k.strides[2], keys, *coming))
                    row, unseeing = (g - g0) * per_head, max(0, start + 1 - sees[0]) * group
                    block = (state, scores, tables, v_now, g * v.strides[2], factors)
                    see_block(row + unseeing, row + per_head, start, *block)
            if partial < 0:
                for i in range(size):
                    emit_merge((address(state[i]), address(total[i]), columns))
        if partial >= 0:
            # The thread that computes the last chunk of these rows merges and stores them all.
            chunks = (sees[size - 1] + CHUNK - 1) // CHUNK
            size = size if fetch_add(address(counters) + 24 + 8 * split) == chunks - 1 else 0
            for i in range(size):
                for c in range(chunks):
                    emit_merge((address(partials[partial + c * size + i]), address(total[i]), columns))
        for i in range(size):
            emit_results((address(total[i]), columns, tables[OUT_AT, i], tables[LSE_AT, i]))
        fetch_add(address(counters) + 16)


@inner
def add_products(rows, a_rows, a_add, a_step, b_rows, c, c_bytes, columns, depth, one, triangle):
    """c += a @ b; of row r only the first r + 1 numbers count (triangle -1), or those from r on (1)."""
    step = ROWS if triangle == 0 else 1
    for r in range(0, rows, step):
        skip, stop = (r if triangle > 0 else 0), (r + 1 if triangle < 0 else depth)
        a = (min(step, rows - r), a_rows + 8 * r, a_add + skip * a_step, a_step)
        emit_sums((*a, b_rows + 8 * skip, 0, c + r * c_bytes, c_bytes, columns, stop - skip, one, 0))


@entry
def row_edges(out, lse, dout, edges):
    """Write each row's -LSE log2 e, its delta, 1 for one over the sum of its weights, and 0 for that sum."""
    for h in range(out.shape[1]):
        for t in range(out.shape[0]):
            edges[h, t, 0], edges[h, t, 2], edges[h, t, 3] = -(np.float64(lse[h, t]) * LOG2E), 1, 0
            emit_delta((address(out[t, h]), address(dout[t, h]), out.shape[2], address(edges[h, t, 1:])))


@entry
def differentiate(inputs, work, dq, dk, dv):
    """Take tasks until none is left; False if this thread drops denormal numbers.

    A task is a KV head and rows first .. end - 1 of a sequence, and which gradients of theirs are wanted: of
    the keys over all queries, of the queries over all keys, for all rows at once both, or neither: then it
    completes the edges of the rows, which the gradients need.
    """
    q, k, v, dout, edges, cu, numbers = inputs
    tasks, counters, scratches, probe = work
    if probe[0] * probe[1] * probe[2] != probe[1]:
        return False
    columns, group, width = q.shape[2], q.shape[1] // k.shape[1], 4 * WIDTH
    one, scale = address(numbers), address(numbers) + 4
    nothing, factor = one + 8, one + 12
    scratch = scratches[fetch_add(address(counters) + 8)]
    scratch = scratch[-address(scratch) % 64 // 4 :]
    lines = address(scratch) + width * np.arange(2 * (TILE + columns))
    s, t, k_tile, v_tile = lines[0], lines[TILE], lines[2 * TILE], lines[2 * TILE + columns]
    s_columns = s + 4 * np.arange(TILE)
    while True:
        taken = fetch_add(address(counters))
        if taken >= len(tasks):
            return True
        b, g, first, end, of_keys, of_queries = tasks[taken]
        origin, length = cu[b], cu[b + 1] - cu[b]
        heads, mine = range(g * group, (g + 1) * group), range(origin + first, origin + end)
        for x in mine:
            if of_keys:
                dk[x, g], dv[x, g] = 0, 0
            if of_queries:
                dq[x, g * group : (g + 1) * group] = 0
        rows_at = np.minimum(np.arange(length + TILE), length - 1)
        k_rows, v_rows = k.strides[0] * rows_at, v.strides[0] * rows_at
        k_rows += address(k[origin, g])
        v_rows += address(v[origin, g])
        for h in heads:
            q_rows, do_rows = q.strides[0] * rows_at, dout.strides[0] * rows_at
            q_rows += address(q[origin, h])
            do_rows += address(dout[origin, h])
            for start in range(first if of_keys else 0, end, TILE):
                count, keys = min(TILE, end - start), address(k_rows) + 8 * start
                values = address(v_rows) + 8 * start
                emit_transpose((count, columns, keys, 0, k_tile, keys, 0, values, 0))
                emit_transpose((count, columns, values, 0, v_tile, keys, 0, values, 0))
                stop = length if of_keys else end
                for row in range(max(start, first), stop, TILE):
                    rows, at = min(TILE, stop - row), origin + row
                    queries, douts = address(q_rows) + 8 * row, address(do_rows) + 8 * row
                    table = address(lines) + 16 * TILE  # of the transposed keys, then values
                    for i in range(0, rows, ROWS):
                        few, product = min(ROWS, rows - i), (width, TILE, columns, nothing, 0)
                        emit_products((few, queries + 8 * i, 0, 4, table, 0, s + i * width, *product))
                        if of_keys or of_queries:
                            other = table + 8 * columns
                            emit_products((few, douts + 8 * i, 0, 4, other, 0, t + i * width, *product))
                    emit_gradients((rows, s, t, address(edges[h, at]), scale))
                    crossed = 1 if row == start else 0  # by the diagonal
                    for i in range(0 if of_keys or of_queries else rows):
                        part = np.float32(0)
                        for j in range(i + 1 if crossed else count):
                            part += scratch[i * WIDTH + j]
                        edges[h, at + i, 3] += part
                    if of_queries:
                        sums = (address(dq[at, h]), dq.strides[0], columns, count, one)
                        add_products(rows, address(lines) + 8 * TILE, 0, 4, keys, *sums, -crossed)
                    if of_keys:
                        sums = (address(dv[origin + start, g]), dv.strides[0], columns, rows, one)
                        add_products(count, address(s_columns), 0, width, douts, *sums, crossed)
                        sums = (address(dk[origin + start, g]), dk.strides[0], columns, rows, one)
                        add_products(count, address(s_columns), t - s, width, queries, *sums, crossed)
        for x in mine:
            if not (of_keys or of_queries):
                for h in heads:
                    edges[h, x, 2] = np.float32(1) / edges[h, x, 3]
            if of_keys:
                emit_scaled((address(dk[x, g]), columns, factor))
                emit_scaled((address(dv[x, g]), columns, one))
            if of_queries:
                for h in heads:
                    emit_scaled((address(dq[x, h]), columns, factor))
        fetch_add(address(counters) + 16)


@entry
def plan(cu, lengths, kv_heads, group, tile, heads, apart):
    """List tasks and their costs; return also the most rows of a task, split tiles and their partial rows.

    A task is a request, its KV heads, rows and chunks (first and end of each), and, where each chunk is a
    task, the place of the tile's partial rows and its number.
    """
    most = 0
    for b in range(lengths.size):
        chunks = (lengths[b] + CHUNK - 1) // CHUNK if apart else 1
        most += (cu[b + 1] - cu[b] + tile - 1) // tile * kv_heads * chunks
    tasks, costs = np.empty((most, 9), np.int64), np.empty(most, np.int64)
    count = largest = split = partial_rows = 0
    for b in range(lengths.size):
        rows = cu[b + 1] - cu[b]
        together = min(heads, max(1, TILE_ROWS // (max(1, min(rows, tile)) * group)))
        for first in range(0, rows, tile):
            end = min(rows, first + tile)
            seen = lengths[b] - rows + end
            chunks = (seen + CHUNK - 1) // CHUNK
            for g in range(0, kv_heads, together):
                g_end, step = min(kv_heads, g + together), 1 if apart else chunks
                size = (end - first) * group * (g_end - g)
                largest = max(largest, size)
                marks = (partial_rows, split) if step < chunks else (-1, -1)
                for c in range(0, chunks, step):
                    for n, number in enumerate((b, g, g_end, first, end, c, c + step, *marks)):
                        tasks[count, n] = number
                    costs[count] = size * (min(seen, (c + step) * CHUNK) - c * CHUNK)
                    count += 1
                if step < chunks:
                    split, partial_rows = split + 1, partial_rows + size * chunks
    return tasks[:count], costs[:count], largest, split, partial_rows


@entry
def write_rows(k, v, k_cache, v_cache, table, cu, lengths):
    for b in range(lengths.size):
        for t in range(cu[b], cu[b + 1]):
            position = lengths[b] - cu[b + 1] + t
            k_row, v_row = token(k_cache, table, b, position), token(v_cache, table, b, position)
            for g in range(k.shape[1]):
                emit_copy((address(k[t, g]), k_row + g * k_cache.strides[2], k.shape[2]))
                emit_copy((address(v[t, g]), v_row + g * v_cache.strides[2], v.shape[2]))


# ---- Host.
LENGTHS, TABLE = (types.Array(int32, rank, "A", readonly=True) for rank in (1, 2))
FLOATS, PAGES = (types.Array(float32, rank, "A", readonly=True) for rank in (3, 4))
LSE, OUT, CACHE = (types.Array(float32, rank, "A") for rank in (2, 3, 4))
INPUTS = types.Tuple((FLOATS, PAGES, PAGES, TABLE, LENGTHS, LENGTHS, LENGTHS, float32))
WORK = types.Tuple((int64[:, ::1], int64[::1], int64[::1], float32[:, ::1], float32[:, ::1], float32[::1]))
SUMMED = types.Tuple((FLOATS, FLOATS, FLOATS, FLOATS, float32[:, :, ::1], LENGTHS, float32[::1]))
SUMMING = types.Tuple((int64[:, ::1], int64[::1], float32[:, ::1], float32[::1]))
UNCOMPILED = {
    row_edges: (FLOATS, types.Array(float32, 2, "A", readonly=True), FLOATS, float32[:, :, ::1]),
    differentiate: (SUMMED, SUMMING, OUT, OUT, OUT),
    attend: (INPUTS, WORK, OUT, LSE),
    plan: (LENGTHS, LENGTHS, int64, int64, int64, int64, int64),
    write_rows: (FLOATS, FLOATS, CACHE, CACHE, TABLE, LENGTHS, LENGTHS),
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


def run(q, k, v, table, slots, cu, lengths, load, scale, out, lse):
    (_, query_heads, columns), kv_heads, words = q.shape, k.shape[2], COLUMNS // 4 + q.shape[2]
    assert columns % TILE == 0, f"head_dim must be a multiple of {TILE}"
    axes = {"query_heads": query_heads, "kv_heads": kv_heads, "batch": len(lengths), **load}
    chosen, group = schedule(axes, CHOSEN), query_heads // kv_heads
    tiles = (chosen["tile"], chosen["heads"], chosen["apart"])
    tasks, costs, largest, split, partial_rows = compiled(plan)(cu, lengths, kv_heads, group, *tiles)
    threads = thread_count(len(tasks), costs.sum() * columns)
    scratches = np.zeros((threads, WIDTH * (ROWS + columns) + 2 * largest * words + 2 * LANES), np.float32)
    partials = np.empty((partial_rows, words), np.float32)
    counters = np.zeros(3 + split, np.int64)  # tasks taken, scratches taken, tasks done; chunks done by tile
    inputs = (q, k, v, table, slots, cu, lengths, np.float32(float(scale) * LOG2E))
    work = (tasks, np.argsort(-costs), counters, scratches, partials, DENORMAL_PROBE)
    operands = (inputs, work, out, np.empty((0, 0), np.float32) if lse is None else lse)
    share(compiled(attend), operands, threads, counters, len(tasks))


def thread_count(tasks, multiplications):
    return max(1, min(len(os.sched_getaffinity(0)), tasks, multiplications // TILE // THREAD_COST))


def share(kernel, operands, threads, counters, tasks):
    """Run a kernel on several threads, this one among them, until all tasks are done."""
    with _lock:
        if threads > 1 and os.getpid() not in _pools:  # a forked child makes its own pool
            _pools.clear()
            _pools[os.getpid()] = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    helping = [_pools[os.getpid()].submit(kernel, *operands) for _ in range(1, threads)]
    # A helper that comes too late finds nothing to do and need not be waited for.
    if not kernel(*operands) or (counters[2] < tasks and not all([each.result() for each in helping])):
        raise RuntimeError("a thread flushes denormal numbers, which changes bits: turn that mode off")


def attention(q, k, v, cu_seqlens, max_seqlen, softmax_scale, out, lse):
    """Attend packed sequences: all tokens are one page, in which a request starts at its offset."""
    table = np.zeros((len(cu_seqlens) - 1, 1), np.int32)
    lengths, load = np.diff(cu_seqlens), {"query_length": max_seqlen, "key_length": max_seqlen}
    run(q, k[None], v[None], table, cu_seqlens[:-1], cu_seqlens, lengths, load, softmax_scale, out, lse)


def paged_attention(
    q, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k,
    max_seqlen_q, max_seqlen_k, softmax_scale, out, lse,
):  # fmt: skip
    slots = np.zeros(len(seqlens_k), np.int32)
    load = {"query_length": max_seqlen_q, "key_length": max_seqlen_k}
    run(q, k_cache, v_cache, page_table, slots, cu_seqlens_q, seqlens_k, load, softmax_scale, out, lse)


def attention_backward(q, k, v, out, lse, dout, cu_seqlens, max_seqlen, softmax_scale, dq, dk, dv):
    """Write the gradients of packed `attention`; a gradient that is None is left out."""
    (tokens, query_heads, columns), kv_heads = q.shape, k.shape[1]
    axes = {"query_heads": query_heads, "kv_heads": kv_heads, "batch": len(cu_seqlens) - 1}
    span = schedule(axes | {"query_length": max_seqlen, "key_length": max_seqlen}, CHOSEN)["span"]
    keys, queries = int(dk is not None or dv is not None), int(dq is not None)
    edges = np.empty((query_heads, tokens, 4), np.float32)
    compiled(row_edges)(out, lse, dout, edges)
    numbers = np.array([1, float(softmax_scale) * LOG2E, -1, softmax_scale], np.float32)
    inputs = (q, k, v, dout, edges, cu_seqlens, numbers)
    gradients = [np.empty_like(x) if d is None else d for d, x in ((dq, q), (dk, k), (dv, v))]
    lengths = sorted(((n, b) for b, n in enumerate(np.diff(cu_seqlens).tolist()) if n), reverse=True)
    pairs = query_heads * sum(n * n for n, _ in lengths) // 2
    wanted = [(keys, 0), (0, queries)] if span else [(keys, queries)]
    for kinds in ([(0, 0)], [kind for kind in wanted if any(kind)]):
        tasks = []
        for n, b in lengths:
            for first in range(0, n, span or n):
                part = (first, min(n, first + (span or n)))
                tasks += [(b, g, *part, *kind) for kind in kinds for g in range(kv_heads)]
        threads = thread_count(len(tasks), pairs * columns)
        scratches = np.zeros((threads, 2 * WIDTH * (TILE + columns) + LANES), np.float32)
        counters = np.zeros(3, np.int64)  # tasks taken, scratches taken, tasks done
        work = (np.array(tasks, np.int64).reshape(-1, 6), counters, scratches, DENORMAL_PROBE)
        share(compiled(differentiate), (inputs, work, *gradients), threads, counters, len(tasks))


def write_kv_cache(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k):
    compiled(write_rows)(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k)


def numerics(constant_axes):
    return {"chunk": CHUNK, "key_block": KEY_BLOCK, "exp2_degree": EXP2_DEGREE}


def schedule(axes, knobs):
    """Choose the query rows of a tile, the KV heads of a task, and whether a chunk is a task of its own.

    `span` is how many rows of a sequence one task differentiates, 0 for all.
    """
    kv_heads, group = axes["kv_heads"], axes["query_heads"] // axes["kv_heads"]
    tile = max(1, min(axes["query_length"], knobs["TILE_ROWS"] // group))
    tiles = axes["batch"] * -(-axes["query_length"] // tile)
    heads = min(kv_heads, max(1, tiles * kv_heads // knobs["TASKS"]))
    apart = int(tiles * -(-kv_heads // heads) < knobs["TASKS"] and axes["key_length"] > CHUNK)
    span = knobs["GRADIENT_ROWS"] if axes["batch"] * kv_heads < knobs["TASKS"] else 0
    return {"tile": tile, "heads": heads, "apart": apart, "span": span}
