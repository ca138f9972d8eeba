"""Log-probabilities of chosen tokens on the CPU: forward and gradients, float32; logits never in memory.

    s[t, v]    = (sum_k x[t, k] * w[v, k]) * c                c = float32(1 / temperature)
    lse[t]     = log sum_v exp(s[t, v])
    logprob[t] = s[t, target of t] - lse[t]
    entropy[t] = -sum_v p[t, v] * log p[t, v]                 p[t, v] = exp(s[t, v] - lse[t])

The order of every sum is README.md's: a logit is a sum of chains over K_BLOCK numbers of k; BLOCK logits are
reduced by 16 lanes, and blocks by 16 lanes again. Gradients recompute the logits of a piece of tokens and
their sums, block by block, and turn the logits into their gradients. A task is a block of the vocabulary, or
columns of dx; threads take tasks from one counter. Inner loops are written as vector instructions across
independent sums.
"""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llvmlite import ir
from numba import boolean, float32, int64, njit, types
from numba.extending import intrinsic

BLOCK = 128
K_BLOCK = 128
ROWS = 6
COLUMNS = 192
PIECE = 8
THREAD_COST = 8000

KNOBS = {
    "BLOCK": ("numeric", (64, 128, 256)),
    "K_BLOCK": ("numeric", (64, 128, 256)),
    "ROWS": ("schedule", (2, 4, 6)),
    "COLUMNS": ("schedule", (64, 128, 192, 320)),
    "PIECE": ("schedule", (1, 2, 4, 8, 16)),
    "THREAD_COST": ("schedule", (1000, 4000, 8000, 16000, 64000)),
}

EXP2 = "1p0 1.62e432p-1 1.ebfbe2p-3 1.c6ae72p-5 1.3b270ep-7 1.5f7276p-10 1.470b48p-13"
LOG2 = "1.715476p1 1.ec709ep-1 1.2776c6p-1 1.a61762p-2 1.484b14p-2"
LOG2E, LOG2E_REST = float.fromhex("1.715476p0"), float.fromhex("1.4ae0c0p-26")
LN2 = float.fromhex("1.62e430p-1")

LANES, TILE = 16, 64  # numbers of a vector; columns of a register tile
TOKEN_BLOCK = 64  # tokens of a partial sum of the gradient of w
TOKENS_AT_ONCE = 4096
MEGAFLOATS = 1 << 20
CHOSEN = {"COLUMNS": COLUMNS, "PIECE": PIECE}
NAN = np.float32(np.nan)
DENORMAL_PROBE = np.array([2.0**-100, 2.0**-40, 2.0**100], np.float32)  # their product passes a denormal

# ---- Vector code. A vector is 16 float32; addresses and sizes are int64.
I1, I32, I64, F32 = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
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
        kind = yes if isinstance(yes, Value) else no if isinstance(no, Value) else self
        return Value(self.builder, self.builder.select(self.compare(sign, x), *map(kind.operand, (yes, no))))

    def shuffle(self, other, picks):
        return self.emit("shuffle_vector", other, INTEGERS(picks))

    def spread(self):
        """A vector of this number."""
        kind = VECTOR if self.real else INTEGERS
        single = Value(self.builder, self.builder.insert_element(kind(ir.Undefined), self.value, I32(0)))
        return single.shuffle(single, [0] * LANES)

    def first(self):
        return self.emit("extract_element", I32(0))

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
        """What exponents count from where this is the maximum: 0 where all are -inf."""
        return self.pick("==", -math.inf, 0, self)

    def canonical(self):
        return self.pick("==", self, self, math.nan)

    def polynomial(self, ascending):
        *lower, result = [float.fromhex(c) for c in ascending.split()]
        for c in reversed(lower):
            result = self.fma(result, c)
        return result

    def exp(self):
        """e^x for x <= 0 or NaN: 2^n times 2^f, where n + f is x times log2 e, whose rest f has too."""
        constant = [Value(self.builder, VECTOR([c] * LANES)) for c in (LOG2E, LOG2E_REST, 12582912)]
        t = self.fma(constant[0], constant[2])
        n = t - 12582912
        f = self.fma(constant[1], self.fma(constant[0], n * -1))
        power = (t.emit("bitcast", INTEGERS).emit("shl", 23) + 0x3F800000).emit("bitcast", VECTOR)
        return n.pick("<", -125, 0, f.polynomial(EXP2) * power)

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

    def load_some(self, lanes):
        """The vector at this address where `lanes` says so, 0 elsewhere; nothing else is read."""
        place = self.pointer(VECTOR)
        return place.call("llvm.masked.load.v16f32.p0", VECTOR, I32(4), lanes, VECTOR([0.0] * LANES))

    def store_some(self, x, lanes):
        x.call("llvm.masked.store.v16f32.p0", ir.VoidType(), self.pointer(VECTOR), I32(4), lanes)


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


def products(added, rows, a, a_bytes, a_step, b, b_bytes, c, c_bytes, columns, depth):
    """c = a @ b for up to ROWS rows, K_BLOCK after K_BLOCK; or c = c + a @ b, each sum one chain.

    A chain begins at +0 and stays in registers; the total begins at +0 too, and chains are added to it.
    Number j of a's row r lies at a + r * a_bytes + j * a_step; b has `depth` rows of `columns` numbers.
    """
    builder = rows.builder

    def case(tall):
        def chain(first, count, column, load, vectors):
            a_first, b_first = [a + a_bytes * r + first * a_step for r in range(tall)], b + first * b_bytes

            def step(j, *sums):
                parts = [load(b_first + j * b_bytes + column + 64 * n) for n in range(vectors)]
                factors = [(row + j * a_step).load(F32).spread() for row in a_first]
                return [factors[i // vectors].fma(parts[i % vectors], x) for i, x in enumerate(sums)]

            return repeat(count, 1, step, [Value(builder, VECTOR([0.0] * LANES))] * (tall * vectors))

        def tile(column, load, store, vectors):
            places = [c + c_bytes * r + column + 64 * n for r in range(tall) for n in range(vectors)]

            def block(j):
                left = depth - j
                sums = chain(j, left.pick("<", K_BLOCK, left, K_BLOCK), column, load, vectors)
                before = [j.pick("==", 0, VECTOR([0.0] * LANES), load(place)) for place in places]
                totals = [total + x for total, x in zip(before, sums, strict=True)]
                with builder.if_else(left.compare(">", K_BLOCK)) as (more, done):
                    for branch, last in ((more, False), (done, True)):
                        with branch:
                            for place, x in zip(places, totals, strict=True):
                                store(place, x.canonical() if last else x)

            if not added:
                repeat(depth, K_BLOCK, block)
                return
            for place, x in zip(places, chain(depth * 0, depth, column, load, vectors), strict=True):
                store(place, (load(place) + x).canonical())

        whole = columns / TILE
        repeat(whole, 1, lambda i: tile(i * (4 * TILE), Value.load, Value.store, TILE // LANES))

        def rest(i):
            left = (columns - whole * TILE - i).emit("trunc", I32).spread()
            lanes = Value(builder, INTEGERS(list(range(LANES)))).compare("<", left)
            tile(
                whole * (4 * TILE) + i * 4,
                lambda place: place.load_some(lanes),
                lambda place, x: place.store_some(x, lanes),
                1,
            )

        repeat(columns - whole * TILE, LANES, rest)

    done = builder.append_basic_block("end")
    choice = builder.switch(rows.value, done)
    for count in range(1, ROWS + 1):
        block = builder.append_basic_block("rows")
        choice.add_case(I64(count), block)
        builder.position_at_end(block)
        case(count)
        builder.branch(done)
    builder.position_at_end(done)


emit_products = machine(lambda *operands: products(False, *operands))
emit_sums = machine(lambda *operands: products(True, *operands))


@machine
def emit_reduction(rows, x, scale, partials, row_bytes, kind_bytes):
    """Scale rows of BLOCK logits in place; store each row's maximum, sum of weights and sum of w log w."""
    scales = scale.load(F32).spread()

    def row(r):
        places = [x + r * (4 * BLOCK) + 4 * n for n in range(0, BLOCK, LANES)]
        top = Value(x.builder, VECTOR([-math.inf] * LANES))
        for place in places:
            score = place.load() * scales
            place.store(score)
            top = score.larger(top)
        top = top.across(Value.larger)
        base = top.origin()
        sums, products = (Value(x.builder, VECTOR([0.0] * LANES)) for _ in range(2))
        for place in places:
            difference = place.load() - base
            weight = difference.exp()
            sums += weight
            products += weight.pick("==", 0, 0, weight * difference)
        partial = partials + r * row_bytes
        for n, result in enumerate((top, sums.across(Value.__add__), products.across(Value.__add__))):
            (partial + kind_bytes * n).store(result.first())

    repeat(rows, 1, row)


@machine
def emit_merge(count, partials, kind_bytes, chosen, out):
    """Merge the blocks of a row, `count` a multiple of 16.

    Store its lse, entropy, maximum and binary logarithm of the sum, and a chosen logit's log-probability.
    """
    tops, sums_at, products_at = partials, partials + kind_bytes, partials + kind_bytes * 2
    lowest, zero = (Value(count.builder, VECTOR([x] * LANES)) for x in (-math.inf, 0.0))
    (top,) = repeat(count * 4, 64, lambda i, top: [(tops + i).load().larger(top)], [lowest])
    top = top.across(Value.larger)
    base = top.origin()

    def step(i, sums, products):
        difference = (tops + i).load().origin() - base
        factor = ((tops + i).load() - base).exp()
        own = (sums_at + i).load()
        products = own.fma(difference, (products_at + i).load()).fma(factor, products)
        return [own.fma(factor, sums), products]

    sums, products = (x.across(Value.__add__) for x in repeat(count * 4, 64, step, [zero, zero]))
    logarithm, given = sums.log2(), chosen.load(F32).spread()
    lse, entropy = logarithm.fma(LN2, top), logarithm.fma(LN2, zero - products / sums)
    found = lse.canonical(), entropy.canonical(), top, logarithm, logarithm.fma(-LN2, given - top).canonical()
    for n, result in enumerate(found):
        (out + 4 * n).store(result.first())


@machine
def emit_gradients(rows, x, scale, rows_at, target_at, start):
    """Turn rows of BLOCK scaled logits into their gradients.

    A row of five: entropy, maximum, logarithm of the sum, d and e; targets int64.
    """
    scales = scale.load(F32).spread()

    def row(r):
        entropy, top, logarithm, d, e = ((rows_at + r * 20 + 4 * n).load(F32).spread() for n in range(5))
        target = ((target_at + r * 8).load(I64) - start).emit("trunc", I32).spread()
        for n in range(0, BLOCK, LANES):
            place = x + r * (4 * BLOCK) + 4 * n
            u = logarithm.fma(-LN2, place.load() - top)
            p = u.pick(">", 0, 0, u).exp()
            g = p * e.fma(u + entropy, d)
            g = p.pick("==", 0, 0, g)
            lane = Value(x.builder, INTEGERS(list(range(n, n + LANES))))
            g = lane.pick("==", target, d - g, g * -1)
            place.store(g * scales)

    repeat(rows, 1, row)


def transposed(rows):
    """Transpose 16 vectors: exchange each bit of a row's number for the same bit of the lane's."""
    for bit in (1, 2, 4, 8):
        low = [lane + (LANES - bit if lane & bit else 0) for lane in range(LANES)]
        high = [lane + (LANES if lane & bit else bit) for lane in range(LANES)]
        rows = [rows[n & ~bit].shuffle(rows[n | bit], high if n & bit else low) for n in range(LANES)]
    return rows


@machine
def emit_transpose(columns, source, row_bytes, ahead, target):
    """Write target[d, j] = source[j, d] for 16 rows and whole vectors of columns; prefetch rows ahead."""

    def square(d):
        rows = [source + row_bytes * j + d * 4 for j in range(LANES)]
        for row in rows:
            line = (row + ahead).pointer(ir.IntType(8))
            line.call("llvm.prefetch.p0", ir.VoidType(), I32(0), I32(2), I32(1))  # into the second level
        for n, column in enumerate(transposed([row.load() for row in rows])):
            (target + (d + n) * (4 * TILE)).store(column)

    repeat(columns, LANES, square)


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
def canonical(x):
    return x if x == x else NAN


@inner
def keeps_denormals(probe):
    return probe[0] * probe[1] * probe[2] == probe[1]


@inner
def aligned(scratches, counters):
    """A scratch of this thread's own, from a whole cache line on."""
    scratch = scratches[fetch_add(address(counters) + 8)]
    return scratch[-address(scratch) % 64 // 4 :]


@inner
def turn(weight, start, count, panels):
    """Write the transpose of rows start .. start + count - 1, TILE rows to a panel; the last row fills up."""
    width, step = weight.shape[1], weight.strides[0]
    whole = width // LANES * LANES
    for j in range(0, (count + TILE - 1) // TILE * TILE, LANES):
        target = address(panels) + 4 * (j // TILE * TILE * width + j % TILE)
        inside = start + j + LANES <= weight.shape[0]
        if inside:
            ahead = LANES * step if start + j + 2 * LANES <= weight.shape[0] else 0
            emit_transpose((whole, address(weight[start + j]), step, ahead, target))
        for d in range(whole if inside else 0, width):
            for n in range(LANES):
                row = min(start + j + n, weight.shape[0] - 1)
                panels[j // TILE * TILE * width + d * TILE + j % TILE + n] = weight[row, d]


@inner
def score(x, t, rows, panels, count, scores):
    """Logits of up to ROWS tokens and a block, whose transpose is in place."""
    width = x.shape[1]
    for panel in range(0, count, TILE):
        b, c = address(panels) + 4 * panel * width, address(scores) + 4 * panel
        a = address(x) + t * x.strides[0]
        emit_products((rows, a, x.strides[0], 4, b, 4 * TILE, c, 4 * BLOCK, TILE, width))


@entry
def see_block(x, weight, targets, numbers, partials, chosen, counters, scratches, probe):
    """Partial sums of blocks until none is left, and the scaled logit of each token's target."""
    if not keeps_denormals(probe):
        return False
    tokens, vocabulary = x.shape[0], weight.shape[0]
    scratch = aligned(scratches, counters)
    scores, panels = scratch[: ROWS * BLOCK].reshape(ROWS, BLOCK), scratch[ROWS * BLOCK :]
    while True:
        block = fetch_add(address(counters))
        start = block * BLOCK
        if start >= vocabulary:
            return True
        count = min(BLOCK, vocabulary - start)
        turn(weight, start, count, panels)
        for t in range(0, tokens, ROWS):
            rows = min(ROWS, tokens - t)
            score(x, t, rows, panels, count, scores)
            scores[:, count:] = -np.inf
            own = address(partials) + t * partials.strides[0] + 4 * block
            strides = partials.strides[0], partials.strides[1]
            emit_reduction((rows, address(scores), address(numbers), own, *strides))
            for r in range(rows):
                if start <= targets[t + r] < start + count:
                    chosen[t + r] = scores[r, targets[t + r] - start]
        fetch_add(address(counters) + 16)


@entry
def read_logits(logits, targets, numbers, partials, chosen, counters, scratches, probe):
    """Partial sums of tokens whose logits are in memory, until none is left."""
    if not keeps_denormals(probe):
        return False
    tokens, vocabulary = logits.shape
    scratch = aligned(scratches, counters)
    scores = scratch[:BLOCK]
    while True:
        t = fetch_add(address(counters))
        if t >= tokens:
            return True
        for start in range(0, vocabulary, BLOCK):
            count = min(BLOCK, vocabulary - start)
            scores[:count] = logits[t, start : start + count]
            scores[count:] = -np.inf
            own = address(partials) + t * partials.strides[0] + 4 * (start // BLOCK)
            emit_reduction((1, address(scores), address(numbers), own, 0, partials.strides[1]))
            if start <= targets[t] < start + count:
                chosen[t] = scores[targets[t] - start]
        fetch_add(address(counters) + 16)


@entry
def write_logits(x, weight, out, counters, scratches, probe):
    """Logits of blocks until none is left."""
    if not keeps_denormals(probe):
        return False
    (tokens, width), vocabulary = x.shape, weight.shape[0]
    panels = aligned(scratches, counters)
    while True:
        start = fetch_add(address(counters)) * BLOCK
        if start >= vocabulary:
            return True
        count = min(BLOCK, vocabulary - start)
        turn(weight, start, count, panels)
        for t in range(0, tokens, ROWS):
            for panel in range(0, count, TILE):
                a = (min(ROWS, tokens - t), address(x) + t * x.strides[0], x.strides[0], 4)
                b = (address(panels) + 4 * panel * width, 4 * TILE)
                c = address(out) + t * out.strides[0] + 4 * (start + panel)
                emit_products((*a, *b, c, out.strides[0], min(TILE, count - panel), width))
        fetch_add(address(counters) + 16)


@entry
def finish(partials, chosen, targets, vocabulary, logprob, entropy, lse):
    """Merge the blocks of every token. A target outside of the vocabulary has log-probability 0."""
    row = np.empty(5, np.float32)
    for t in range(targets.size):
        blocks = partials.shape[2], address(partials[t]), partials.strides[1]
        emit_merge((*blocks, address(chosen) + 4 * t, address(row)))
        logprob[t] = row[4] if 0 <= targets[t] < vocabulary else 0
        if entropy.size:
            entropy[t] = row[1]
        lse[t] = row[0]


@entry
def see_piece(x, weight, numbers, g, partials, counters, scratches, probe):
    """Scaled logits g [blocks, tokens, BLOCK] of blocks until none is left, and their partial sums."""
    if not keeps_denormals(probe):
        return False
    tokens, vocabulary = x.shape[0], weight.shape[0]
    panels = aligned(scratches, counters)
    while True:
        block = fetch_add(address(counters))
        start = block * BLOCK
        if start >= vocabulary:
            return True
        count = min(BLOCK, vocabulary - start)
        turn(weight, start, count, panels)
        for t in range(0, tokens, ROWS):
            rows = min(ROWS, tokens - t)
            score(x, t, rows, panels, count, g[block, t : t + rows])
            g[block, t : t + rows, count:] = -np.inf
            own = address(partials) + t * partials.strides[0] + 4 * block
            strides = partials.strides[0], partials.strides[1]
            emit_reduction((rows, address(g[block, t]), address(numbers), own, *strides))
        fetch_add(address(counters) + 16)


@entry
def finish_piece(partials, edges):
    """Merge the blocks of every token into what gradients of its logits need."""
    row = np.zeros(5, np.float32)
    for t in range(edges.shape[0]):
        blocks = partials.shape[2], address(partials[t]), partials.strides[1]
        emit_merge((*blocks, address(row), address(row)))
        edges[t, :3] = row[1:4]


@entry
def differentiate_logits(x, vocabulary, targets, edges, numbers, g, dweight, counters, probe):
    """Turn the logits of blocks into their gradients, and add to those rows of the weight's."""
    if not keeps_denormals(probe):
        return False
    tokens, width = x.shape
    while True:
        block = fetch_add(address(counters))
        start = block * BLOCK
        if start >= vocabulary:
            return True
        count = min(BLOCK, vocabulary - start)
        own = (address(g[block]), address(numbers), address(edges), address(targets))
        emit_gradients((tokens, *own, start))
        g[block, :, count:] = 0
        if dweight.shape[0]:
            for first in range(0, tokens, TOKEN_BLOCK):
                depth = min(TOKEN_BLOCK, tokens - first)
                for v in range(0, count, ROWS):
                    a = (min(ROWS, count - v), address(g[block, first]) + 4 * v, 4, 4 * BLOCK)
                    b = (address(x) + first * x.strides[0], x.strides[0])
                    c = (address(dweight) + (start + v) * dweight.strides[0], dweight.strides[0])
                    emit_sums((*a, *b, *c, width, depth))
        fetch_add(address(counters) + 16)


@entry
def differentiate_rows(weight, g, dx, columns, rows, counters, probe):
    """Columns of tiles of dx until none is left: blocks of the vocabulary from the first one up."""
    if not keeps_denormals(probe):
        return False
    tokens, width = dx.shape
    parts = (width + columns - 1) // columns
    while True:
        task = fetch_add(address(counters))
        first, column = task // parts * rows, task % parts * columns
        if first >= tokens:
            return True
        end, span = min(tokens, first + rows), min(columns, width - column)
        for t in range(first, end):
            dx[t, column : column + span] = 0
        for block in range(g.shape[0]):
            start = block * BLOCK
            depth = min(BLOCK, weight.shape[0] - start)
            for t in range(first, end, ROWS):
                a = (min(ROWS, end - t), address(g[block, t]), 4 * BLOCK, 4)
                b = (address(weight) + start * weight.strides[0] + 4 * column, weight.strides[0])
                c = (address(dx) + t * dx.strides[0] + 4 * column, dx.strides[0])
                emit_sums((*a, *b, *c, span, depth))
        fetch_add(address(counters) + 16)


# ---- Host.
ROWS_IN, ROWS_OUT = types.Array(float32, 2, "A", readonly=True), types.Array(float32, 2, "A")
IN, OUT = types.Array(float32, 1, "A", readonly=True), types.Array(float32, 1, "A")
TARGETS, WORK = int64[::1], (int64[::1], float32[:, ::1], float32[::1])
KEPT = (float32[::1], float32[:, :, ::1], float32[::1])
UNCOMPILED = {
    see_block: boolean(ROWS_IN, ROWS_IN, TARGETS, *KEPT, *WORK),
    read_logits: boolean(ROWS_IN, TARGETS, *KEPT, *WORK),
    write_logits: boolean(ROWS_IN, ROWS_IN, ROWS_OUT, *WORK),
    finish: types.void(float32[:, :, ::1], float32[::1], TARGETS, int64, OUT, OUT, OUT),
    see_piece: boolean(ROWS_IN, ROWS_IN, float32[::1], float32[:, :, ::1], float32[:, :, ::1], *WORK),
    finish_piece: types.void(float32[:, :, ::1], float32[:, ::1]),
    differentiate_logits: boolean(
        *(ROWS_IN, int64, TARGETS, float32[:, ::1], float32[::1], float32[:, :, ::1], ROWS_OUT),
        *(int64[::1], float32[::1]),
    ),
    differentiate_rows: boolean(
        ROWS_IN, float32[:, :, ::1], ROWS_OUT, int64, int64, int64[::1], float32[::1]
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


def share(kernel, operands, tasks, multiplications, scratch=None):
    """Run a kernel on several threads, this one among them, until all tasks are done."""
    threads = max(1, min(len(os.sched_getaffinity(0)), tasks, multiplications // TILE // THREAD_COST))
    counters = np.zeros(3, np.int64)  # tasks taken, scratches taken, tasks done
    scratches = () if scratch is None else (np.empty((threads, scratch + LANES), np.float32),)
    operands = (*operands, counters, *scratches, DENORMAL_PROBE)
    with _lock:
        if threads > 1 and os.getpid() not in _pools:  # a forked child makes its own pool
            _pools.clear()
            _pools[os.getpid()] = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    kernel = compiled(kernel)
    helping = [_pools[os.getpid()].submit(kernel, *operands) for _ in range(1, threads)]
    # A helper that comes too late finds nothing to do and need not be waited for.
    if not kernel(*operands) or (counters[2] < tasks and not all([each.result() for each in helping])):
        raise RuntimeError("a thread flushes denormal numbers, which changes bits: turn that mode off")


def inverse(temperature):
    return np.array([1 / float(temperature)], np.float32)


def empty_partials(tokens, blocks):
    """Partial sums of tokens: of blocks that fill the last vector up, nothing comes."""
    partials = np.zeros((tokens, 3, -(-blocks // LANES) * LANES), np.float32)
    partials[:, 0, blocks:] = -np.inf
    return partials


def logprob(x, weight, targets, temperature, logprob, entropy, lse):
    """Write log-probabilities of targets [T], entropies (or None) and log-sum-exps of x [T, H] @ w [V, H]."""
    (tokens, width), vocabulary = x.shape, len(weight)
    for first in range(0, tokens, TOKENS_AT_ONCE):
        part = slice(first, first + TOKENS_AT_ONCE)
        rows, wanted = x[part], np.ascontiguousarray(targets[part], np.int64)
        blocks = -(-vocabulary // BLOCK)
        partials, chosen = empty_partials(len(rows), blocks), np.zeros(len(rows), np.float32)
        operands = (rows, weight, wanted, inverse(temperature), partials, chosen)
        work = len(rows) * width * vocabulary
        share(see_block, operands, blocks, work, BLOCK * (width + ROWS))
        entropies = np.empty(0, np.float32) if entropy is None else entropy[part]
        compiled(finish)(partials, chosen, wanted, vocabulary, logprob[part], entropies, lse[part])


def logprob_of_logits(logits, targets, temperature, logprob, entropy, lse):
    """The same from logits [T, V] in memory."""
    tokens, vocabulary = logits.shape
    wanted = np.ascontiguousarray(targets, np.int64)
    partials, chosen = empty_partials(tokens, -(-vocabulary // BLOCK)), np.zeros(tokens, np.float32)
    operands = (logits, wanted, inverse(temperature), partials, chosen)
    share(read_logits, operands, tokens, 64 * tokens * vocabulary, BLOCK)
    entropies = np.empty(0, np.float32) if entropy is None else entropy
    compiled(finish)(partials, chosen, wanted, vocabulary, logprob, entropies, lse)


def logits(x, weight, out):
    """Write the logits x [T, H] @ w [V, H] that the log-probabilities are those of, not scaled."""
    (tokens, width), vocabulary = x.shape, len(weight)
    blocks, work = -(-vocabulary // BLOCK), tokens * width * vocabulary
    share(write_logits, (x, weight, out), blocks, work, BLOCK * width)


def logprob_backward(
    x, weight, targets, temperature, dlogprob, dentropy, lse, entropy, dx, dweight, accumulate
):  # fmt: skip
    """Write the gradients; one that is None is left out. dweight is added to if `accumulate`.

    dentropy may be None: nothing then comes from the entropies. lse and entropy are not read: the logits are
    here again, and their maximum and the sum's logarithm apart are more accurate than one number of both.
    """
    (tokens, width), vocabulary = x.shape, len(weight)
    blocks = -(-vocabulary // BLOCK)
    plan = schedule({"tokens": tokens, "vocabulary": vocabulary, "width": width}, CHOSEN)
    if dweight is not None and not accumulate:
        dweight[...] = 0
    summed = np.empty((0, 0), np.float32) if dweight is None else dweight
    for first in range(0, tokens, plan["piece"]):
        part = slice(first, first + plan["piece"])
        rows, wanted = x[part], np.ascontiguousarray(targets[part], np.int64)
        valid = (wanted >= 0) & (wanted < vocabulary)
        edges, partials = np.zeros((len(rows), 5), np.float32), empty_partials(len(rows), blocks)
        edges[:, 3] = np.where(valid, dlogprob[part], np.float32(0))
        if dentropy is not None:
            edges[:, 4] = dentropy[part]
        wanted, numbers = np.where(valid, wanted, -1), inverse(temperature)
        g = np.empty((blocks, len(rows), BLOCK), np.float32)
        work = len(rows) * width * vocabulary
        share(see_piece, (rows, weight, numbers, g, partials), blocks, work, BLOCK * width)
        compiled(finish_piece)(partials, edges)
        share(differentiate_logits, (rows, vocabulary, wanted, edges, numbers, g, summed), blocks, work)
        if dx is not None:
            tasks = -(-len(rows) // plan["rows"]) * -(-width // plan["columns"])
            share(differentiate_rows, (weight, g, dx[part], plan["columns"], plan["rows"]), tasks, work)


def numerics(constant_axes):
    return {"block": BLOCK, "k_block": K_BLOCK}


def schedule(axes, knobs):
    """Choose the tokens of a piece, of which the gradients of logits are kept, and the tiles of dx."""
    padded = -(-axes["vocabulary"] // BLOCK) * BLOCK
    piece = max(1, knobs["PIECE"] * MEGAFLOATS // padded // TOKEN_BLOCK) * TOKEN_BLOCK
    return {"piece": min(piece, TOKENS_AT_ONCE), "rows": 96, "columns": knobs["COLUMNS"]}
