"""Linear layers on the CPU: out = x @ w^T + b and its gradients, float32.

    out[t, n] = sum_k x[t, k] * w[n, k] + b[n]
    dx[t, k]  = sum_n dout[t, n] * w[n, k]
    dw[n, k]  = sum_t dout[t, n] * x[t, k]        db[n] = sum_t dout[t, n]

Every sum goes in ascending order of what is summed, in blocks: K_BLOCK of k and n, TOKEN_BLOCK tokens, for
db BIAS_BLOCK. A block is one chain of fused multiply-adds from +0, which is added to the total. The sum over
k is in K_GROUPS equal parts, that over n in N_GROUPS, merged by pairing neighbours. No schedule can change
it: vectors run across independent elements, never along a sum. A task is a panel of COLUMNS columns of a
result and some of its rows. Of the second factor it packs DEPTH numbers a column at a time, then lets ROWS
rows at a time see them, whose sums stay in vector registers; few rows read it in place. Inner loops are
written as vector instructions. db is a product too: of a row of ones with dout.
"""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llvmlite import ir
from numba import boolean, float32, int64, njit, types
from numba.extending import intrinsic

K_BLOCK = 128
K_GROUPS = 1
N_GROUPS = 1
DEPTH = 128
TILE_ROWS = 384
THREAD_COST = 262144

KNOBS = {
    "K_BLOCK": ("numeric", (64, 128, 256)),
    "K_GROUPS": ("numeric", (1, 2, 4, 8)),
    "N_GROUPS": ("numeric", (1, 2, 4, 8)),
    "DEPTH": ("schedule", (64, 128, 256, 512)),
    "TILE_ROWS": ("schedule", (96, 192, 384, 768)),
    "THREAD_COST": ("schedule", (65536, 262144, 1048576)),
}

TOKEN_BLOCK, BIAS_BLOCK = 64, 16  # tokens of a chain of dw and of db
LANES, ROWS, COLUMNS = 16, 6, 64  # numbers of a vector; rows and columns of a register tile
VECTORS, FEW = COLUMNS // LANES, 8  # vectors of a tile's row; rows for which packing does not pay
AHEAD = 512  # bytes of a row of the second factor that are fetched in advance
NAN = np.float32(np.nan)
ZERO = np.float32(0)
DENORMAL_PROBE = np.array([2.0**-100, 2.0**-40, 2.0**100], np.float32)  # their product passes a denormal

# ---- Vector code. A vector is 16 float32; addresses and sizes are int64.
I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)


class Value:
    """A value of the function being compiled; arithmetic with others or with integers emits instructions."""

    def __init__(self, builder, value):
        self.builder, self.value = builder, value

    def __add__(self, x):
        kind = self.value.type
        if isinstance(x, int):
            x = Value(self.builder, kind(x))
        add = self.builder.add if kind == I64 else self.builder.fadd
        return Value(self.builder, add(self.value, x.value))

    def __sub__(self, x):
        return Value(self.builder, self.builder.sub(self.value, x.value))

    def __mul__(self, x):
        other = I64(x) if isinstance(x, int) else x.value
        return Value(self.builder, self.builder.mul(self.value, other))

    def load(self, kind=VECTOR):
        pointer = self.builder.inttoptr(self.value, kind.as_pointer())
        return Value(self.builder, self.builder.load(pointer, align=4))

    def store(self, x):
        pointer = self.builder.inttoptr(self.value, x.value.type.as_pointer())
        self.builder.store(x.value, pointer, align=4)

    def shuffle(self, other, picks):
        mask = ir.VectorType(I32, LANES)(picks)
        return Value(self.builder, self.builder.shuffle_vector(self.value, other.value, mask))

    def spread(self):
        """A vector of this number."""
        single = self.builder.insert_element(VECTOR(ir.Undefined), self.value, I32(0))
        return Value(self.builder, single).shuffle(Value(self.builder, single), [0] * LANES)

    def call(self, name, result, *operands):
        kind = ir.FunctionType(result, [x.type for x in operands])
        function = self.builder.module.declare_intrinsic(name, (), kind)
        return Value(self.builder, self.builder.call(function, operands))

    def fma(self, factor, x):
        """self * factor + x, rounded once."""
        return self.call("llvm.fma.v16f32", VECTOR, self.value, factor.value, x.value)

    def canonical(self):
        ordered = self.builder.fcmp_ordered("==", self.value, self.value)
        return Value(self.builder, self.builder.select(ordered, self.value, VECTOR([math.nan] * LANES)))

    def pick(self, sign, x, yes, no):
        """`yes` where this integer compares like that with x, otherwise `no`."""
        chosen = self.builder.icmp_signed(sign, self.value, x.value if isinstance(x, Value) else I64(x))
        return Value(self.builder, self.builder.select(chosen, yes.value, no.value))

    def prefetch(self):
        pointer = self.builder.inttoptr(self.value, ir.IntType(8).as_pointer())
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(3), I32(1))


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
    b.cbranch(b.icmp_signed(">", count.value, I64(0)), head, done)
    b.position_at_end(head)
    i, *inside = [Value(b, b.phi(x.value.type)) for x in (count, *carried)]
    following = body(i, *inside) or []
    advanced, end = i + step, b.block
    b.cbranch(b.icmp_signed("<", advanced.value, count.value), head, done)
    b.position_at_end(done)
    outside = [Value(b, b.phi(x.value.type)) for x in carried]
    before, after = [Value(b, I64(0)), *carried, *carried], [advanced, *following, *following]
    for phi, first, later in zip([i, *inside, *outside], before, after, strict=True):
        phi.value.add_incoming(first.value, start)
        phi.value.add_incoming(later.value, end)
    return outside


def choose(rows, most, case):
    """Emit `case(rows)` for each number of rows up to `most`."""
    builder = rows.builder
    done = builder.append_basic_block("end")
    choice = builder.switch(rows.value, done)
    for count in range(1, most + 1):
        block = builder.append_basic_block("rows")
        choice.add_case(I64(count), block)
        builder.position_at_end(block)
        case(count)
        builder.branch(done)
    builder.position_at_end(done)


def in_blocks(depth, block, places, c_offsets, first, bias, chain):
    """Emit c = (0 if first else c) + a sum, block by block, each from +0; then canonical c + bias.

    `chain(j, count, zeros)` gives the sums of `count` numbers from the one at j on, a vector for each place.
    """
    builder, zero = depth.builder, Value(depth.builder, VECTOR([0.0] * LANES))

    def one(j):
        left = depth - j
        empty = j.pick("==", 0, first, j * 0)
        sums = chain(j, left.pick("<", block, left, block), [zero] * len(places))
        totals = [empty.pick("!=", 0, zero, place.load()) + x for place, x in zip(places, sums, strict=True)]
        with builder.if_else(builder.icmp_signed(">", left.value, block.value)) as (more, done):
            with more:
                for place, x in zip(places, totals, strict=True):
                    place.store(x)
            with done:
                for place, offset, x in zip(places, c_offsets, totals, strict=True):
                    place.store((x + (bias + offset).load()).canonical())

    repeat(depth, block, one)


@machine
def emit_tile(rows, a, a_row, a_step, b, b_step, c, c_row, depth, block, first, bias):
    """c = (0 if first else c) + a @ b + bias for up to ROWS rows and COLUMNS columns, block by block.

    Numbers of a row of a lie a_step bytes apart, its rows a_row, those of b b_step.
    """

    def case(tall):
        a_rows = [a + a_row * r for r in range(tall)]
        places = [c + c_row * r + 64 * v for r in range(tall) for v in range(VECTORS)]

        def chain(first_j, count, zeros):
            a_first, b_first = [row + first_j * a_step for row in a_rows], b + first_j * b_step

            def step(j, *sums):
                b_row = b_first + j * b_step
                parts = [(b_row + 64 * v).load() for v in range(VECTORS)]
                factors = [(row + j * a_step).load(F32).spread() for row in a_first]
                return [factors[i // VECTORS].fma(parts[i % VECTORS], x) for i, x in enumerate(sums)]

            return repeat(count, 1, step, zeros)

        offsets = [64 * v for v in range(VECTORS)] * tall
        in_blocks(depth, block, places, offsets, first, bias, chain)

    choose(rows, ROWS, case)


def transposed(rows):
    """Transpose 16 vectors: exchange each bit of a row's number for the same bit of the lane's."""
    for bit in (1, 2, 4, 8):
        low = [lane + (LANES - bit if lane & bit else 0) for lane in range(LANES)]
        high = [lane + (LANES if lane & bit else bit) for lane in range(LANES)]
        rows = [rows[n & ~bit].shuffle(rows[n | bit], high if n & bit else low) for n in range(LANES)]
    return rows


def turned(rows, j):
    """The next 16 numbers of 16 rows, transposed; those further on are fetched in advance."""
    for row in rows:
        (row + j * 4 + AHEAD).prefetch()
    return transposed([(row + j * 4).load() for row in rows])


@machine
def emit_stream(rows, a, a_row, table, c, c_row, depth, block, first, bias):
    """The same as emit_tile for up to FEW rows, b being COLUMNS rows by their addresses, read once.

    Depth and block are multiples of LANES.
    """

    def case(tall):
        a_rows = [a + a_row * r for r in range(tall)]

        def sixteen(n):
            sources = [(table + n * 8 + 8 * i).load(I64) for i in range(LANES)]
            places = [c + c_row * r + n * 4 for r in range(tall)]

            def chain(first_j, count, zeros):
                def step(j, *sums):
                    for i, part in enumerate(turned(sources, first_j + j)):
                        factors = [(row + (first_j + j + i) * 4).load(F32).spread() for row in a_rows]
                        sums = [factor.fma(part, x) for factor, x in zip(factors, sums, strict=True)]
                    return sums

                return repeat(count, LANES, step, zeros)

            in_blocks(depth, block, places, [n * 4] * tall, first, bias, chain)

        repeat(Value(rows.builder, I64(COLUMNS)), LANES, sixteen)

    choose(rows, FEW, case)


@machine
def emit_pack_rows(table, depth, packed):
    """packed[j, n] = number j of row n: COLUMNS rows by their addresses, depth a multiple of LANES."""

    def sixteen(n):
        sources = [(table + n * 8 + 8 * r).load(I64) for r in range(LANES)]

        def square(j):
            for i, column in enumerate(turned(sources, j)):
                (packed + n * 4 + (j + i) * (4 * COLUMNS)).store(column)

        repeat(depth, LANES, square)

    repeat(Value(table.builder, I64(COLUMNS)), LANES, sixteen)


@machine
def emit_pack_columns(source, row_bytes, depth, packed):
    """packed[j, n] = number n of row j, for COLUMNS columns."""

    def row(j):
        for v in range(VECTORS):
            (packed + j * (4 * COLUMNS) + 64 * v).store((source + j * row_bytes + 64 * v).load())

    repeat(depth, 1, row)


@intrinsic
def fetch_add(typing_context, address):
    """Return the int64 at an address and add one to it, as one step."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, I64(1), "seq_cst")

    return int64(int64), codegen


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
    return probe[0] * probe[1] * probe[2] != ZERO


@inner
def locate_rows(b, column, width, start, table):
    """Write the addresses of b[column + n, start]; rows beyond `width` are the last one again."""
    for n in range(COLUMNS):
        table[n] = address(b) + (column + min(n, width - 1)) * b.strides[0] + 4 * start


@inner
def pack_rows(b, column, width, start, depth, table, packed):
    """packed[j, n] = b[column + n, start + j]; columns beyond `width` repeat the last one."""
    locate_rows(b, column, width, start, table)
    whole = depth // LANES * LANES
    emit_pack_rows((address(table), whole, address(packed)))
    for j in range(whole, depth):
        for n in range(COLUMNS):
            packed[j, n] = b[column + min(n, width - 1), start + j]


@inner
def pack_columns(b, column, width, start, depth, packed):
    """packed[j, n] = b[start + j, column + n]; columns beyond `width` are 0."""
    if width == COLUMNS:
        emit_pack_columns(
            (address(b) + start * b.strides[0] + 4 * column, b.strides[0], depth, address(packed))
        )
        return
    for j in range(depth):
        for n in range(width):
            packed[j, n] = b[start + j, column + n]


@entry
def multiply(a, b, c, bias, sizes, counters, probe):
    """Take tasks until none is left: c = a @ b + bias, or c + a @ b; False if denormals are dropped here.

    `sizes`: whether a is read along its columns, whether b's rows are columns of the product, groups of the
    sum, numbers of a chain, whether c is added to, rows of a task, and numbers packed at a time: chains.
    """
    a_turned, b_turned, groups, block, add, tile, step = sizes
    rows, columns = c.shape
    depth = a.shape[0] if a_turned else a.shape[1]
    a_row, a_step = (4, a.strides[0]) if a_turned else (a.strides[0], 4)
    panels, length = (columns + COLUMNS - 1) // COLUMNS, (depth + groups - 1) // groups
    tasks = panels * ((rows + tile - 1) // tile)
    table = np.empty(COLUMNS, np.int64)
    packed = np.zeros((step, COLUMNS), np.float32)
    biases = np.empty((2, COLUMNS), np.float32)  # -0 changes no sum
    biases[:] = -ZERO
    kept = min(tile, rows) if groups > 1 or columns % COLUMNS else 0
    own = np.empty((groups, kept, COLUMNS), np.float32)
    while True:
        taken = fetch_add(address(counters))
        if taken >= tasks:
            return keeps_denormals(probe)
        column, row = taken % panels * COLUMNS, taken // panels * tile
        width, end = min(COLUMNS, columns - column), min(rows, row + tile)
        aside = groups > 1 or width < COLUMNS  # results pass through a place of this thread's own
        for n in range(width if bias.size else 0):
            biases[1, n] = bias[column + n]
        if aside and add:
            for r in range(row, end):
                for n in range(width):
                    own[0, r - row, n] = c[r, column + n]
        for group in range(groups):
            first, stop = group * length, min(depth, group * length + length)
            target, target_row = address(own[group]), 4 * COLUMNS
            if not aside:
                target, target_row = address(c) + row * c.strides[0] + 4 * column, c.strides[0]
            elif first >= stop:
                own[group] = ZERO
            begin, stride = first, step
            whole = stop - first if (stop - first) % LANES == 0 else (stop - first) // block * block
            if b_turned and end - row <= FEW and whole > 0:
                begin += whole
                locate_rows(b, column, width, first, table)
                last = address(biases[int(groups == 1 and begin == stop)])
                shape = (a_row, address(table), target, target_row, whole, block, int(not add))
                emit_stream((end - row, address(a) + row * a_row + first * 4, *shape, last))
            direct = not b_turned and width == COLUMNS and end - row <= ROWS
            if direct:
                stride = max(1, stop - first)
            for start in range(begin, stop, stride):
                count = min(stride, stop - start)
                source, b_step = address(packed), 4 * COLUMNS
                if direct:
                    source, b_step = address(b) + start * b.strides[0] + 4 * column, b.strides[0]
                elif b_turned:
                    pack_rows(b, column, width, start, count, table, packed)
                else:
                    pack_columns(b, column, width, start, count, packed)
                empty = int(start == first and not add)
                last = address(biases[int(groups == 1 and start + count == stop)])
                for r in range(row, end, ROWS):
                    factors = address(a) + r * a_row + start * a_step
                    place = target + (r - row) * target_row
                    shape = (a_row, a_step, source, b_step, place, target_row, count, block, empty)
                    emit_tile((min(ROWS, end - r), factors, *shape, last))
        if not aside:
            continue
        distance = 1
        while distance < groups:
            for group in range(0, groups, 2 * distance):
                for r in range(end - row):
                    for n in range(COLUMNS):
                        own[group, r, n] += own[group + distance, r, n]
            distance *= 2
        for r in range(row, end):
            for n in range(width):
                x = own[0, r - row, n]
                c[r, column + n] = canonical(x + biases[1, n]) if groups > 1 else x


# ---- Host.
MATRIX, RESULT = types.Array(float32, 2, "A", readonly=True), types.Array(float32, 2, "A")
ROW = types.Array(float32, 1, "A", readonly=True)
UNCOMPILED = {
    multiply: boolean(MATRIX, MATRIX, RESULT, ROW, types.UniTuple(int64, 7), int64[::1], float32[::1]),
}
NO_BIAS = np.empty(0, np.float32)
CHOSEN = {"DEPTH": DEPTH, "TILE_ROWS": TILE_ROWS, "THREAD_COST": THREAD_COST}
_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def compiled(kernel):
    """Compile a kernel at its first use, for arrays of any strides."""
    if kernel in UNCOMPILED:
        with _lock:
            if kernel in UNCOMPILED:
                kernel.compile(UNCOMPILED[kernel])
                kernel.disable_compile()
                del UNCOMPILED[kernel]
    return kernel


def helpers():
    """The threads of this process."""
    with _lock:
        if os.getpid() not in _pools:  # a forked child makes its own
            _pools.clear()
            _pools[os.getpid()] = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        return _pools[os.getpid()]


def product(a, b, c, bias, a_turned, b_turned, groups, block, add):
    """c = a @ b + bias (or c + a @ b) on as many threads as it is worth, this one among them."""
    rows, columns = c.shape
    depth = a.shape[0] if a_turned else a.shape[1]
    chosen = schedule({"tokens": rows, "in_features": depth, "out_features": columns}, CHOSEN)
    tasks = -(-columns // COLUMNS) * -(-rows // chosen["tile"])
    threads = min(chosen["parts"], tasks, len(os.sched_getaffinity(0)))
    packed = max(1, chosen["depth"] // block) * block
    sizes = (a_turned, b_turned, groups, block, add, chosen["tile"], packed)
    operands = (a, b, c, NO_BIAS if bias is None else bias, sizes, np.zeros(1, np.int64), DENORMAL_PROBE)
    kernel = compiled(multiply)
    helping = [helpers().submit(kernel, *operands) for _ in range(1, threads)]
    # Every task is taken when this thread returns; a helper that has not begun has none.
    if not all([kernel(*operands), *[each.cancel() or each.result() for each in helping]]):
        raise RuntimeError("a thread flushes denormal numbers, which changes bits: turn that mode off")


def linear(x, weight, bias, out):
    """Write x [T, K] @ weight [N, K]^T + bias [N] (or None) into out [T, N]."""
    product(x, weight, out, bias, 0, 1, K_GROUPS, K_BLOCK, 0)


def linear_backward(x, weight, dout, dx, dweight, dbias, accumulate):
    """Write the gradients that are not None; sums over tokens are added to if `accumulate`."""
    if not len(dout):
        for sums in (dweight, dbias):
            if sums is not None and not accumulate:
                sums[...] = 0
        return
    if dx is not None:
        product(dout, weight, dx, None, 0, 0, N_GROUPS, K_BLOCK, 0)
    if dweight is not None:
        product(dout, x, dweight, None, 1, 0, 1, TOKEN_BLOCK, int(accumulate))
    if dbias is not None:
        ones = np.ones((1, len(dout)), np.float32)
        product(ones, dout, dbias[None], None, 0, 0, 1, BIAS_BLOCK, int(accumulate))


def numerics(constant_axes):
    return {"k_block": K_BLOCK, "k_groups": K_GROUPS, "n_groups": N_GROUPS}


def schedule(axes, knobs):
    """Choose how a product is cut; a call is three of them, whose axes take one another's place.

    `tokens` are a product's rows, `in_features` the numbers of a sum, `out_features` its columns. The answer:
    rows of a task and whether there are several, numbers packed at a time, whether few rows read the second
    factor without packing it, and how many threads it is worth at most.
    """
    rows, cost = axes["tokens"], axes["tokens"] * axes["in_features"] * axes["out_features"]
    return {
        "tile": knobs["TILE_ROWS"],
        "tiles": int(rows > knobs["TILE_ROWS"]),
        "depth": knobs["DEPTH"],
        "stream": int(rows <= FEW),
        "direct": int(rows <= ROWS),
        "parts": min(64, max(1, cost // knobs["THREAD_COST"])),
    }
