"""Experts of a mixture on the CPU: rows of the forward and of the gradients, float32.

    out[t] = sum_s w[t, s] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))        e = experts[t, s]

Every product of matrices is a sum of chains an output: K ascending in blocks of K_BLOCK, each step one fma,
each chain from +0 and added to the total. A task is some rows of one expert, side by side in lanes, or for
gradients of parameters some rows of a matrix: no lane sees another, so neither tiles nor threads nor other
tokens of an expert can change a bit. README.md has all orders.
"""

import itertools
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llvmlite import ir
from numba import boolean, float32, int32, int64, njit, types, void
from numba.extending import intrinsic

K_BLOCK = 128
ROWS = 64
THREAD_COST = 524288

KNOBS = {
    "K_BLOCK": ("numeric", (64, 128, 256)),
    "ROWS": ("schedule", (16, 32, 64, 128)),
    "THREAD_COST": ("schedule", (131072, 524288, 2097152)),
}

BLOCK = (
    64  # tokens of a pass are a multiple of it; no chain of a parameter's gradient crosses one, or is longer
)
DOT_BLOCK = 16  # numbers of a chain of dweights
PASS_FLOATS = 1 << 25  # numbers that the rows of a pass may take
MATRIX_ROWS = 96  # rows of a gradient's matrix in a task
LANES = 16
EXP2 = "1p0 1.62e432p-1 1.ebfbe2p-3 1.c6ae72p-5 1.3b270ep-7 1.5f7276p-10 1.470b48p-13"
EXP2_DESCENDING = tuple(np.float32(float.fromhex(c)) for c in reversed(EXP2.split()))
SHIFT = np.float32(12582912)
LOG2E = np.float32(math.log2(math.e))
INF, NAN = np.float32(np.inf), np.float32(np.nan)
ZERO, ONE = np.float32(0), np.float32(1)
DENORMAL_PROBE = np.array([2.0**-100, 2.0**-40, 2.0**100], np.float32)  # their product passes a denormal

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


@inner
def canonical(x):
    return x if x == x else NAN


@inner
def keeps_denormals(probe):
    return probe[0] * probe[1] * probe[2] != ZERO


@inner
def exp2(x):
    t = x + SHIFT
    r = x - (t - SHIFT)
    p = EXP2_DESCENDING[0]
    for c in EXP2_DESCENDING[1:]:
        p = fma(p, r, c)
    y = p * from_bits(np.int32((bits_of(t) << 23) + 0x3F800000))
    return ZERO if x < -125 else (INF if x > 127 else y)


@inner
def sigmoid(x):
    return ONE / (ONE + exp2(-x * LOG2E))


# ---- Products of matrices.

FLOAT, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def tile(rows, vectors, width):
    """Make c[m, n] = c[m, n] + chains, fma(a[m, k], b[k, n], s), k ascending, a tile of sums in registers.

    Its arguments are addresses and strides: a, to the next row and column of a in bytes, b, to b's next row,
    c, to c's next row, the ends of the chains along k, ascending, and how many there are, at least one.
    """
    vector = ir.VectorType(FLOAT, width)
    undefined = ir.Constant(vector, ir.Undefined)
    first_lane = ir.Constant(ir.VectorType(I32, width), [0] * width)

    def emit(context, builder, signature, args):
        a, a_row, a_column, b, b_row, c, c_row, ends, count = args
        name = f"llvm.fma.v{width}f32"
        known = builder.module.globals
        fused = known.get(name) or ir.Function(builder.module, ir.FunctionType(vector, [vector] * 3), name)

        def place(base, row, stride, v, kind):
            address = builder.add(base, builder.mul(row, stride))
            return builder.inttoptr(builder.add(address, I64(4 * width * v)), kind.as_pointer())

        each = [(m, v) for m in range(rows) for v in range(vectors)]
        before, (outer, loop, added, done) = builder.block, map(builder.append_basic_block, "ocad")
        builder.branch(outer)
        builder.position_at_end(outer)
        n, start = builder.phi(I64), builder.phi(I64)
        stop = builder.load(builder.inttoptr(builder.add(ends, builder.mul(n, I64(8))), I64.as_pointer()))
        length = builder.sub(stop, start)
        a_start = builder.add(a, builder.mul(start, a_column))
        b_start = builder.add(b, builder.mul(start, b_row))
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(I64)
        sums = [builder.phi(vector) for _ in each]
        loaded = [builder.load(place(b_start, k, b_row, v, vector), align=4) for v in range(vectors)]
        column = builder.add(a_start, builder.mul(k, a_column))
        factors = []
        for m in range(rows):
            x = builder.load(place(column, I64(m), a_row, 0, FLOAT), align=4)
            x = builder.insert_element(undefined, x, I32(0))
            factors.append(builder.shuffle_vector(x, undefined, first_lane))
        later = [
            builder.call(fused, [factors[m], loaded[v], s]) for (m, v), s in zip(each, sums, strict=True)
        ]
        following = builder.add(k, I64(1))
        builder.cbranch(builder.icmp_signed("<", following, length), loop, added)
        zeros = [vector([0.0] * width)] * len(each)
        for phi, first, after in zip([k, *sums], [I64(0), *zeros], [following, *later], strict=True):
            phi.add_incoming(first, outer)
            phi.add_incoming(after, loop)
        builder.position_at_end(added)
        for (m, v), x in zip(each, later, strict=True):
            p = place(c, I64(m), c_row, v, vector)
            builder.store(builder.fadd(builder.load(p, align=4), x), p, align=4)
        next_n = builder.add(n, I64(1))
        builder.cbranch(builder.icmp_signed("<", next_n, count), outer, done)
        for phi, after in ((n, next_n), (start, stop)):
            phi.add_incoming(I64(0), before)
            phi.add_incoming(after, added)
        builder.position_at_end(done)
        return context.get_dummy_value()

    @intrinsic
    def chained(typing_context, a, a_row, a_column, b, b_row, c, c_row, ends, count):
        return void(*[int64] * 9), emit

    return chained


tile_6x64, tile_4x64, tile_8x16 = tile(6, 4, 16), tile(4, 4, 16), tile(8, 1, 16)
tile_4x1 = tile(4, 1, 1)
tile_1x64, tile_1x16, tile_1x1 = tile(1, 4, 16), tile(1, 1, 16), tile(1, 1, 1)


@inner
def chain(a, b, c, ends, tall):
    """Add a @ b to c, a chain up to each of `ends` along k; columns of b and c are next to each other.

    `tall`: tiles have six rows, not four, which is faster where rows of a touch or chains short.
    """
    if ends.size:
        walk_tiles(
            *(a.ctypes.data, a.strides[0], a.strides[1], b.ctypes.data, b.strides[0]),
            *(c.ctypes.data, c.strides[0], c.shape[0], c.shape[1], ends, tall),
        )


@inner
def blocks_of(count):
    """Where chains of K_BLOCK end."""
    ends = np.arange(1, (count + K_BLOCK - 1) // K_BLOCK + 1) * K_BLOCK
    ends[-1] = count
    return ends


@inner
def walk_tiles(a, ar, ac, b, br, c, cr, high, wide, bounds, tall):
    """`chain` by addresses and strides in bytes."""
    n, ends, chains = 0, bounds.ctypes.data, bounds.size
    while n < wide:
        left = wide - n
        width = 64 if left >= 64 else (16 if left >= 16 else 1)
        bn, m = b + 4 * n, 0
        while m < high:
            am, cm = a + m * ar, c + m * cr + 4 * n
            rows = 1
            if width == 64:
                if high - m >= 6 and tall:
                    rows = 6
                    tile_6x64(am, ar, ac, bn, br, cm, cr, ends, chains)
                elif high - m >= 4:
                    rows = 4
                    tile_4x64(am, ar, ac, bn, br, cm, cr, ends, chains)
                else:
                    tile_1x64(am, ar, ac, bn, br, cm, cr, ends, chains)
            elif width == 16:
                if high - m >= 8:
                    rows = 8
                    tile_8x16(am, ar, ac, bn, br, cm, cr, ends, chains)
                else:
                    tile_1x16(am, ar, ac, bn, br, cm, cr, ends, chains)
            elif high - m >= 4:
                rows = 4
                tile_4x1(am, ar, ac, bn, br, cm, cr, ends, chains)
            else:
                tile_1x1(am, ar, ac, bn, br, cm, cr, ends, chains)
            m += rows
        n += width


@inner
def lanes_of(count):
    return (count + LANES - 1) // LANES * LANES


@inner
def gather(rows, pairs, top_k, lanes):
    """Rows of the tokens of some pairs side by side: [width, lanes], zeros beyond."""
    width = rows.shape[1]
    out = np.zeros((width, lanes), np.float32)
    for first in range(0, width, 64):
        for r in range(pairs.size):
            t = pairs[r] // top_k
            for j in range(first, min(first + 64, width)):
                out[j, r] = rows[t, j]
    return out


@inner
def scatter(block, pairs, out):
    """The other way: lane r becomes the row of its pair."""
    for first in range(0, block.shape[0], 64):
        for r in range(pairs.size):
            for j in range(first, min(first + 64, block.shape[0])):
                out[pairs[r], j] = block[j, r]


@inner
def gate_and_up(x, matrix, pairs, top_k, lanes):
    block = np.zeros((matrix.shape[0], lanes), np.float32)
    chain(matrix, gather(x, pairs, top_k, lanes), block, blocks_of(x.shape[1]), False)
    return block


# ---- Kernels.


@entry
def compute_pairs(x, order, top_k, gate_up, down, y, expert, first, last, probe):
    """Rows `first` to `last` - 1 of `order`, all of one expert: y[pair] = down @ swiglu(gate_up @ x)."""
    pairs = order[first:last]
    lanes, inside = lanes_of(pairs.size), down.shape[2]
    block = gate_and_up(x, gate_up[expert], pairs, top_k, lanes)
    for i in range(inside):
        for r in range(lanes):
            gate = block[i, r]
            block[i, r] = gate * sigmoid(gate) * block[inside + i, r]
    found = np.zeros((down.shape[1], lanes), np.float32)
    chain(down[expert], block[:inside], found, blocks_of(inside), False)
    scatter(found, pairs, y)
    return keeps_denormals(probe)


@entry
def combine(y, weights, experts, count, out, start, stop, probe):
    """Add a token's slots in order, each times its weight; where there are no weights, as they are."""
    weighted, top_k = weights.shape[0] > 0, experts.shape[1]
    total = np.empty(out.shape[1], np.float32)
    for t in range(start, stop):
        total[:] = ZERO
        for s in range(top_k):
            if 0 <= experts[t, s] < count:
                row = y[t * top_k + s]
                if weighted:
                    w = weights[t, s]
                    for j in range(total.size):
                        total[j] = fma(w, row[j], total[j])
                else:
                    for j in range(total.size):
                        total[j] += row[j]
        for j in range(total.size):
            out[t, j] = canonical(total[j])
    return keeps_denormals(probe)


@entry
def differentiate_pairs(
    x, weights, dout, order, top_k, gate_up, down, dy, dweights, dblock, weighted, expert, first, last, probe
):
    """Gradients of some pairs of one expert: dweights, dy [pair, H], and what the parameters' gradients need.

    dblock [2 I, pairs] gets the gradients of gate and up, weighted [pairs, I] the activations times w.
    """
    pairs = order[first:last]
    lanes, inside = lanes_of(pairs.size), down.shape[2]
    block = gate_and_up(x, gate_up[expert], pairs, top_k, lanes)
    dact = np.zeros((inside, lanes), np.float32)
    chain(down[expert].T, gather(dout, pairs, top_k, lanes), dact, blocks_of(dout.shape[1]), True)
    share, projected, part = (
        np.zeros(lanes, np.float32),
        np.zeros(lanes, np.float32),
        np.zeros(lanes, np.float32),
    )
    for r in range(pairs.size):
        share[r] = weights[pairs[r] // top_k, pairs[r] % top_k]
    act = np.empty((inside, lanes), np.float32)
    for i in range(inside):
        for r in range(lanes):
            gate, up = block[i, r], block[inside + i, r]
            s = sigmoid(gate)
            silu = gate * s
            act[i, r] = silu * up
            part[r] = fma(dact[i, r], act[i, r], part[r])
            d = dact[i, r] * share[r]
            block[i, r] = d * up * fma(silu, ONE - s, s)
            block[inside + i, r] = d * silu
            act[i, r] *= share[r]
        if (i + 1) % DOT_BLOCK == 0 or i + 1 == inside:
            for r in range(lanes):
                projected[r] += part[r]
                part[r] = ZERO
    for r in range(pairs.size):
        dweights[pairs[r]] = canonical(projected[r])
    if dy.shape[0]:
        found = np.zeros((x.shape[1], lanes), np.float32)
        chain(gate_up[expert].T, block, found, blocks_of(2 * inside), True)
        scatter(found, pairs, dy)
    if dblock.shape[0]:
        for i in range(2 * inside):
            for r in range(pairs.size):
                dblock[i, first + r] = block[i, r]
    if weighted.shape[0]:
        for r in range(pairs.size):
            for i in range(inside):
                weighted[first + r, i] = act[i, r]
    return keeps_denormals(probe)


@entry
def differentiate_matrix(left, right, order, top_k, out, start, expert, first, last, probe):
    """Add to rows `start` on of an expert's matrix the sums over its pairs, in their order."""
    rows = out[expert, start : min(start + MATRIX_ROWS, out.shape[1])]
    ends, count, begin = np.empty(last - first, np.int64), 0, first
    for i in range(first + 1, last + 1):
        if i == last or i - begin == BLOCK or order[i] // top_k // BLOCK != order[begin] // top_k // BLOCK:
            ends[count], count, begin = i - first, count + 1, i
    own = left[start : start + rows.shape[0], first:last]
    chain(own, right[first:last], rows, ends[:count], True)
    for m in range(rows.shape[0]):
        for n in range(rows.shape[1]):
            rows[m, n] = canonical(rows[m, n])
    return keeps_denormals(probe)


# ---- Host.
INDICES, WHOLE = types.Array(int32, 2, "A", readonly=True), int64[::1]
ROWS_IN, ROWS_OUT = types.Array(float32, 2, "A", readonly=True), types.Array(float32, 2, "A")
STACK_IN, STACK_OUT = types.Array(float32, 3, "A", readonly=True), types.Array(float32, 3, "A")
MATRIX, VECTOR = float32[:, ::1], float32[::1]
TASK = (int64, int64, int64, float32[::1])
UNCOMPILED = {
    compute_pairs: boolean(ROWS_IN, WHOLE, int64, STACK_IN, STACK_IN, MATRIX, *TASK),
    combine: boolean(MATRIX, ROWS_IN, INDICES, int64, ROWS_OUT, int64, int64, float32[::1]),
    differentiate_pairs: boolean(
        *(ROWS_IN, ROWS_IN, ROWS_IN, WHOLE, int64, STACK_IN, STACK_IN, MATRIX, VECTOR, MATRIX, MATRIX, *TASK)
    ),
    differentiate_matrix: boolean(ROWS_IN, MATRIX, WHOLE, int64, STACK_OUT, int64, *TASK),
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


def share(kernel, operands, tasks, threads):
    """Run a kernel for every task; threads take the next one when they are done with one."""
    kernel, turn = compiled(kernel), itertools.count()

    def work():
        kept = True
        while (i := next(turn)) < len(tasks):
            kept &= kernel(*operands, *tasks[i], DENORMAL_PROBE)
        return kept

    with _lock:
        if threads > 1 and os.getpid() not in _pools:  # a forked child makes its own pool
            _pools.clear()
            _pools[os.getpid()] = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    helping = [_pools[os.getpid()].submit(work) for _ in range(1, threads)]
    if not all([work(), *[each.result() for each in helping]]):
        raise RuntimeError("a thread flushes denormal numbers, which changes bits: turn that mode off")


def arrange(experts, count):
    """Pairs (token, slot) by expert, then token, then slot; and where each expert's begin in that order."""
    chosen = experts.reshape(-1)
    valid = np.flatnonzero((chosen >= 0) & (chosen < count))
    order = valid[np.argsort(chosen[valid], kind="stable")]
    return order, np.searchsorted(chosen[order], np.arange(count + 1))


def pieces(starts, rows):
    """Tasks (expert, first, last) of at most so many rows, the largest first."""
    found = [
        (e, at, min(at + rows, last))
        for e, (first, last) in enumerate(itertools.pairwise(starts.tolist()))
        for at in range(first, last, rows)
    ]
    return sorted(found, key=lambda task: task[1] - task[2])


def ranges(count, threads):
    """0 .. count - 1 in equal parts."""
    return list(itertools.pairwise(np.linspace(0, count, threads + 1).astype(int).tolist()))


def passes(tokens, numbers):
    """Tokens in pieces of a multiple of BLOCK, so that a piece's pairs of so many numbers fit in memory."""
    size = max(BLOCK, PASS_FLOATS // numbers // BLOCK * BLOCK)
    return [slice(at, at + size) for at in range(0, tokens, size)]


def moe_experts(x, weights, experts, gate_up, down, out):
    """Apply to the rows of x [T, H] the experts [T, k] of gate_up [E, 2 I, H] and down [E, H, I]."""
    top_k, width = experts.shape[1], x.shape[1]
    for rows in passes(len(x), top_k * width):
        one(x[rows], weights[rows], experts[rows], gate_up, down, out[rows])


def one(x, weights, experts, gate_up, down, out):
    plan = chosen_schedule(x, experts, down)
    top_k = experts.shape[1]
    order, starts = arrange(experts, len(down))
    y = np.empty((experts.size, x.shape[1]), np.float32)
    share(compute_pairs, (x, order, top_k, gate_up, down, y), pieces(starts, plan["rows"]), plan["parts"])
    share(combine, (y, weights, experts, len(down), out), ranges(len(x), plan["parts"]), plan["parts"])


def moe_experts_backward(x, weights, experts, gate_up, down, dout, dx, dweights, dgate_up, ddown, accumulate):
    """Write the gradients; one that is None is left out. dgate_up and ddown are added to if `accumulate`."""
    for each in (dgate_up, ddown):
        if each is not None and not accumulate:
            each[...] = 0
    for rows in passes(len(x), experts.shape[1] * (2 * x.shape[1] + 3 * down.shape[2])):
        found = [None if each is None else each[rows] for each in (dx, dweights)]
        differentiate(
            x[rows], weights[rows], experts[rows], gate_up, down, dout[rows], *found, dgate_up, ddown
        )


def differentiate(x, weights, experts, gate_up, down, dout, dx, dweights, dgate_up, ddown):
    plan = chosen_schedule(x, experts, down)
    (_, width, inside), top_k = down.shape, experts.shape[1]
    order, starts = arrange(experts, len(down))
    dy = np.empty((0 if dx is None else experts.size, width), np.float32)
    projected = np.zeros(experts.size, np.float32)
    dblock = np.empty((0 if dgate_up is None else 2 * inside, len(order)), np.float32)
    weighted = np.empty((0 if ddown is None else len(order), inside), np.float32)
    operands = (x, weights, dout, order, top_k, gate_up, down, dy, projected, dblock, weighted)
    share(differentiate_pairs, operands, pieces(starts, plan["rows"]), plan["parts"])
    if dweights is not None:
        dweights[...] = projected.reshape(dweights.shape)
    if dx is not None:
        none = np.empty((0, 0), np.float32)
        share(combine, (dy, none, experts, len(down), dx), ranges(len(x), plan["parts"]), plan["parts"])
    whole = pieces(starts, max(1, len(order)))
    if dgate_up is not None:
        tasks = [(at, *each) for each in whole for at in range(0, 2 * inside, MATRIX_ROWS)]
        share(differentiate_matrix, (dblock, x[order // top_k], order, top_k, dgate_up), tasks, plan["parts"])
    if ddown is not None:
        tasks = [(at, *each) for each in whole for at in range(0, width, MATRIX_ROWS)]
        share(
            differentiate_matrix,
            (dout[order // top_k].T, weighted, order, top_k, ddown),
            tasks,
            plan["parts"],
        )


def chosen_schedule(x, experts, down):
    axes = {"width": x.shape[1], "intermediate": down.shape[2], "experts": len(down)}
    plan = schedule(
        {**axes, "top_k": experts.shape[1], "tokens": len(x)}, {"ROWS": ROWS, "THREAD_COST": THREAD_COST}
    )
    return {**plan, "parts": min(plan["parts"], len(os.sched_getaffinity(0)))}


def numerics(constant_axes):
    return {"k_block": K_BLOCK}


def schedule(axes, knobs):
    """Choose the rows of an expert in a task, and the threads: as many as the work is worth."""
    work = axes["tokens"] * axes["top_k"] * axes["width"] * axes["intermediate"]
    return {"rows": knobs["ROWS"], "parts": min(16, max(1, work // knobs["THREAD_COST"]))}
