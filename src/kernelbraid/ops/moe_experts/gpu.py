"""Experts of a mixture on the GPU, in portable Triton: forward and gradients, bfloat16 or float16.

    a = round16(silu(gate[e] @ x[t]) * (up[e] @ x[t]))    out[t] = round16(sum_s w[t, s] * down[e] @ a)

where e = experts[t, s].

Pairs (token, slot) are sorted by expert, stably and with integers alone; products run over tiles of rows of
one expert. Every product is one chain of the matrix unit along K: neither the tile, nor its warps, nor what
else is in it can change a bit; README.md has the order of every sum. Fusion is off: what is fused is
written so.
"""

import torch
import triton
import triton.language as tl

TOKEN_BLOCK = 64
TILE_ROWS = 128
DEPTH = 64
STAGES = 3

KNOBS = {
    "TOKEN_BLOCK": ("numeric", (16, 32, 64)),
    "TILE_ROWS": ("schedule", (32, 64, 128)),
    "DEPTH": ("schedule", (32, 64, 128)),
    "STAGES": ("schedule", (2, 3, 4)),
}

FEW_PAIRS = 4096  # ranked by comparing each with all
PASS_BYTES = 1 << 30  # of the rows of a pass
SWAPPED_BELOW = 64  # rows of a tile that are the second operand of its product
MATRIX_TILE = 128
LOG2E = tl.constexpr(1.4426950408889634)


def numerics(constant_axes):
    return {"token_block": TOKEN_BLOCK}


def schedule(axes, knobs):
    """Choose the tiles of the products by the mean number of an expert's rows; no choice changes bits."""
    mean = triton.cdiv(axes["tokens"] * axes["top_k"], axes["experts"])
    rows = min(knobs["TILE_ROWS"], max(16, triton.next_power_of_2(mean)))
    large = rows == 128
    return {
        "rows": rows,
        "columns": 128 if large else 64,
        "gated_columns": 64,
        "depth": knobs["DEPTH"],
        "warps": 8 if large else 4,
        "stages": knobs["STAGES"],
    }


def chosen(tokens, top_k, down):
    experts, width, inside = down.shape
    axes = {"width": width, "intermediate": inside, "experts": experts, "top_k": top_k, "tokens": tokens}
    return schedule(axes, {"TILE_ROWS": TILE_ROWS, "DEPTH": DEPTH, "STAGES": STAGES})


def launch(kernel, programs, warps, *arguments, **options):
    kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=False, **options)


# ---- Entry points. Tensors on one device: rows [T, H], weights float32 and experts int32 [T, k],
# gate_up [E, 2 I, H] and down [E, H, I]; dweights, dgate_up and ddown are float32.


def moe_experts(x, weights, experts, gate_up, down, out):
    """Apply the experts to the rows of x and add them, slot after slot, into out."""
    for at in passes(len(x), experts.shape[1] * x.shape[1] * 4):
        compute(x[at], weights[at], experts[at], gate_up, down, out[at])


def compute(x, weights, experts, gate_up, down, out):
    (tokens, top_k), (count, width, inside) = experts.shape, down.shape
    plan = chosen(tokens, top_k, down)
    order, starts = arrange(experts, count)
    act = torch.empty(tokens * top_k, inside, dtype=x.dtype, device=x.device)
    y = torch.empty(tokens * top_k, width, dtype=torch.float32, device=x.device)
    multiply(plan, x, order, starts, gate_up, act, top_k, gather=True, gated=True)
    multiply(plan, act, order, starts, down, y, top_k, scatter=True)
    combine(y, weights, experts, out, count)


def moe_experts_backward(x, weights, experts, gate_up, down, dout, dx, dweights, dgate_up, ddown, accumulate):
    """Write the gradients; one that is None is left out. dgate_up and ddown are added to if `accumulate`."""
    if not len(x) and not accumulate:
        for each in (dgate_up, ddown):
            if each is not None:
                each.zero_()
    added = bool(accumulate)
    row = experts.shape[1] * (4 * x.shape[1] + 18 * down.shape[2])
    for at in passes(len(x), row):
        found = [None if each is None else each[at] for each in (dx, dweights)]
        operands = (x[at], weights[at], experts[at], gate_up, down, dout[at])
        differentiate(*operands, *found, dgate_up, ddown, added)
        added = True


def differentiate(x, weights, experts, gate_up, down, dout, dx, dweights, dgate_up, ddown, accumulate):
    (tokens, top_k), (count, width, inside) = experts.shape, down.shape
    pairs, plan = tokens * top_k, chosen(tokens, top_k, down)
    order, starts = arrange(experts, count)

    def empty(columns, dtype):
        return torch.empty(pairs, columns, dtype=dtype, device=x.device)

    block, dact = empty(2 * inside, torch.float32), empty(inside, torch.float32)
    multiply(plan, x, order, starts, gate_up, block, top_k, gather=True)
    multiply(plan, dout, order, starts, down, dact, top_k, gather=True, transposed=True)
    dblock, weighted = empty(2 * inside, x.dtype), empty(inside, x.dtype)
    projected = torch.zeros(tokens, top_k, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(inside)
    launch(
        *(differentiate_pairs_kernel, pairs, min(16, max(1, min(padded, 4096) // 256))),
        *(block, dact, weights, order, starts, dblock, weighted, projected, weights.stride(0)),
        *(count, top_k, inside, padded),
    )
    if dweights is not None:
        dweights.copy_(projected)
    if dx is not None:
        dy = empty(width, torch.float32)
        multiply(plan, dblock, order, starts, gate_up, dy, top_k, scatter=True, transposed=True)
        combine(dy, None, experts, dx, count)
    if dgate_up is None and ddown is None:
        return
    groups, group_starts = grouped(experts, order, count)
    if dgate_up is not None:
        add_products(dblock, x, order, groups, group_starts, dgate_up, top_k, accumulate, right=True)
    if ddown is not None:
        add_products(dout, weighted, order, groups, group_starts, ddown, top_k, accumulate, left=True)


# ---- Who goes where: integers alone.


def passes(tokens, row_bytes):
    """Tokens in pieces of a multiple of 64, so that a piece's workspace stays in bounds."""
    size = max(64, PASS_BYTES // row_bytes // 64 * 64)
    return [slice(at, at + size) for at in range(0, tokens, size)]


def arrange(experts, count):
    """Pairs by expert, then token, then slot, and where each expert's begin; those of no expert come last."""
    pairs = experts.numel()
    if pairs > FEW_PAIRS:
        keys, order = torch.sort(keys_of(experts, count), stable=True)
        numbers = torch.arange(count + 1, dtype=torch.int32, device=experts.device)
        return order.to(torch.int32), torch.searchsorted(keys, numbers, out_int32=True)
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=experts.device)
    programs = triton.cdiv(pairs + count + 1, 64)
    launch(
        rank_kernel, programs, 4, experts, order, starts, pairs, experts.stride(0), count, experts.shape[1]
    )
    return order, starts


def keys_of(experts, count):
    """The expert of every pair, `count` where it has none."""
    flat = experts.reshape(-1)
    return torch.where((flat >= 0) & (flat < count), flat, count)


def grouped(experts, order, count):
    """Places of the pairs of each expert and block of TOKEN_BLOCK tokens, filled up with -1 to groups of 16.

    Returns places in `order` and where each expert's begin.
    """
    tokens, top_k = experts.shape
    blocks, pairs = triton.cdiv(tokens, TOKEN_BLOCK), tokens * top_k
    device, order = experts.device, order.long()
    cells = keys_of(experts, count)[order].long() * blocks + order // top_k // TOKEN_BLOCK
    firsts = torch.searchsorted(cells, torch.arange((count + 1) * blocks + 1, device=device))
    sizes = (firsts[1:] - firsts[:-1] + 15) // 16 * 16
    ends = torch.cumsum(sizes, 0)
    places = torch.arange(pairs, device=device)
    inside = (ends - sizes)[cells] + places - firsts[cells]
    groups = torch.full((pairs + 15 * min(pairs, len(sizes)),), -1, dtype=torch.int32, device=device)
    groups.scatter_(0, inside, places.to(torch.int32))
    starts = torch.cat((torch.zeros(1, dtype=ends.dtype, device=device), ends[blocks - 1 :: blocks]))
    return groups, starts[: count + 1].to(torch.int32)


# ---- Products.


def multiply(
    plan,
    rows,
    order,
    starts,
    matrices,
    out,
    top_k,
    *,
    gather=False,
    scatter=False,
    gated=False,
    transposed=False,
):
    """out = rows @ matrices[e]^T, or not transposed; rows by place or token (gather), out by place, pair."""
    count, high, wide = matrices.shape
    depth, columns = (high, wide) if transposed else (wide, high)
    columns = columns // 2 if gated else columns
    pairs, width = len(order), plan["gated_columns" if gated else "columns"]
    tiles = pairs // plan["rows"] + min(count, pairs)
    launch(
        *(product_kernel, tiles * triton.cdiv(columns, width), plan["warps"]),
        *(rows, order, starts, matrices, out, rows.stride(0), matrices.stride(0), matrices.stride(1)),
        *(count, triton.next_power_of_2(count), top_k, columns, depth, gather, scatter, gated, transposed),
        *(plan["rows"] < SWAPPED_BELOW, plan["rows"], width, plan["depth"] if columns > 16 else 32),
        num_stages=plan["stages"],
    )


def combine(y, weights, experts, out, count):
    """out = the sum over slots of y [pair, H], each times its weight if there are weights."""
    tokens, width = out.shape
    size = min(1024, triton.next_power_of_2(width))
    parts = triton.cdiv(width, size)
    launch(
        *(combine_kernel, tokens * parts, 4 if size > 256 else 1),
        *(y, y if weights is None else weights, experts, out),
        *(0 if weights is None else weights.stride(0), experts.stride(0), out.stride(0)),
        *(count, experts.shape[1], width, size, weights is not None),
    )


def add_products(first, second, order, groups, starts, out, top_k, accumulate, *, left=False, right=False):
    """out[e] (+)= the sum over e's pairs of outer products of two rows; `left`, `right`: rows by token."""
    count, high, wide = out.shape
    tile = MATRIX_TILE if min(high, wide) >= 128 else 32
    tiles = triton.cdiv(high, tile) * triton.cdiv(wide, tile)
    launch(
        *(add_products_kernel, count * tiles, 8 if tile == 128 else 4),
        *(first, second, order, groups, starts, out, first.stride(0), second.stride(0)),
        *(top_k, high, wide, left, right, accumulate, tile, 64 if tile == 128 else 32),
        num_stages=STAGES,
    )


# ---- Device.


@triton.jit
def canonical(x, dtype: tl.constexpr):
    """x as stored: one NaN, chosen among bits, since conversions have NaNs of their own."""
    if dtype == tl.float32:
        return tl.where(x == x, x, float("nan"))
    else:
        NAN: tl.constexpr = 0x7FC0 if dtype == tl.bfloat16 else 0x7E00
        bits = x.to(dtype).to(tl.int16, bitcast=True)
        return tl.where(x == x, bits, tl.full(bits.shape, NAN, tl.int16)).to(dtype, bitcast=True)


@triton.jit
def sigmoid(x):
    one = tl.full(x.shape, 1.0, tl.float32)
    return tl.div_rn(one, one + tl.exp2(-x * LOG2E))


@triton.jit
def paired(x, R: tl.constexpr, W: tl.constexpr):
    """Sums of the rows of x [R, W], neighbours first: each step adds two numbers, in whatever order."""
    if W == 1:
        return tl.reshape(x, (R,))
    else:
        return paired(tl.sum(tl.reshape(x, (R, W // 2, 2)), 2), R, W // 2)


@triton.jit
def expert_of(EXPERTS, pair, m, se_t, COUNT: tl.constexpr, K: tl.constexpr):
    """The expert of a pair, COUNT where it has none."""
    e = tl.load(EXPERTS + (pair // K).to(tl.int64) * se_t + pair % K, mask=m, other=COUNT)
    return tl.where((e >= 0) & (e < COUNT), e, COUNT)


@triton.jit(do_not_specialize=["pairs", "se_t"], do_not_specialize_on_alignment=["EXPERTS"])
def rank_kernel(EXPERTS, ORDER, STARTS, pairs, se_t, COUNT: tl.constexpr, K: tl.constexpr):
    """A pair's place is the number of pairs before it; an expert begins where the pairs before it end."""
    p = tl.program_id(0) * 64 + tl.arange(0, 64)
    is_pair = p < pairs
    key = tl.where(is_pair, expert_of(EXPERTS, p, is_pair, se_t, COUNT, K), p - pairs)
    tie = tl.where(is_pair, p, -1)
    rank = tl.zeros((64,), tl.int32)
    for first in range(0, pairs, 64):
        q = first + tl.arange(0, 64)
        other = expert_of(EXPERTS, q, q < pairs, se_t, COUNT, K)
        before = (other[None, :] < key[:, None]) | (
            (other[None, :] == key[:, None]) & (q[None, :] < tie[:, None])
        )
        rank += tl.sum((before & (q < pairs)[None, :]).to(tl.int32), 1)
    tl.store(ORDER + rank, p, mask=is_pair)
    tl.store(STARTS + (p - pairs), rank, mask=(p >= pairs) & (p - pairs <= COUNT))


@triton.jit
def product_kernel(
    X, ORDER, STARTS, W, OUT, sx, sw_e, sw_r,
    COUNT: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, N: tl.constexpr, DEPTH: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, GATED: tl.constexpr, TRANSPOSED: tl.constexpr,
    SWAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one expert times a tile of its matrix, K ascending."""
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    tile, column = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    # Which expert the tile belongs to: experts have as many tiles as their rows fill.
    o_e = tl.arange(0, EP)
    firsts = tl.load(STARTS + o_e, mask=o_e < COUNT, other=0)
    lasts = tl.load(STARTS + o_e + 1, mask=o_e < COUNT, other=0)
    tiles = (lasts - firsts + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    e = tl.sum(((ends <= tile) & (o_e < COUNT)).to(tl.int32), 0)
    if e >= COUNT:
        return
    tile -= tl.sum(tl.where(o_e < e, tiles, 0), 0)
    place = tl.load(STARTS + e) + tile * BM + tl.arange(0, BM)
    m = place < tl.load(STARTS + e + 1)
    pair = tl.load(ORDER + place, mask=m, other=0)
    row = (pair // K if GATHER else place).to(tl.int64)
    o_n, o_k = column * BN + tl.arange(0, BN), tl.arange(0, BK)
    n_n = o_n < N
    p_x = X + row[:, None] * sx + o_k[None, :]
    base = W + e.to(tl.int64) * sw_e
    if TRANSPOSED:
        p_w = base + o_k[:, None].to(tl.int64) * sw_r + o_n[None, :]
    else:
        p_w = base + o_n[:, None].to(tl.int64) * sw_r + o_k[None, :]
    p_u = p_w + N * tl.cast(sw_r, tl.int64)
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    up = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for k in range(0, DEPTH, BK):
        n_k = o_k < DEPTH - k
        x = tl.load(p_x, mask=m[:, None] & n_k[None, :], other=0.0)
        if TRANSPOSED:
            w = tl.load(p_w, mask=n_k[:, None] & n_n[None, :], other=0.0)
            acc = tl.dot(w.T, x.T, acc) if SWAP else tl.dot(x, w, acc)
            p_w += BK * tl.cast(sw_r, tl.int64)
        else:
            w = tl.load(p_w, mask=n_n[:, None] & n_k[None, :], other=0.0)
            acc = tl.dot(w, x.T, acc) if SWAP else tl.dot(x, w.T, acc)
            p_w += BK
        if GATED:
            u = tl.load(p_u, mask=n_n[:, None] & n_k[None, :], other=0.0)
            up = tl.dot(u, x.T, up) if SWAP else tl.dot(x, u.T, up)
            p_u += BK
        p_x += BK
    if GATED:
        acc = acc * sigmoid(acc) * up
    to = (pair if SCATTER else place).to(tl.int64) * N
    out = canonical(acc, OUT.dtype.element_ty)
    if SWAP:
        tl.store(OUT + to[None, :] + o_n[:, None], out, mask=m[None, :] & n_n[:, None])
    else:
        tl.store(OUT + to[:, None] + o_n[None, :], out, mask=m[:, None] & n_n[None, :])


@triton.jit(do_not_specialize=["sw_t", "se_t"], do_not_specialize_on_alignment=["WEIGHTS", "EXPERTS"])
def combine_kernel(
    Y, WEIGHTS, EXPERTS, OUT, sw_t, se_t, so_t,
    COUNT: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Part of a token's row: slots in order."""
    parts: tl.constexpr = (WIDTH + B - 1) // B
    t = (tl.program_id(0) // parts).to(tl.int64)
    o_j = tl.program_id(0) % parts * B + tl.arange(0, B)
    m = o_j < WIDTH
    total = tl.zeros((B,), tl.float32)
    for s in tl.static_range(K):
        e = tl.load(EXPERTS + t * se_t + s)
        valid = (e >= 0) & (e < COUNT)
        y = tl.load(Y + (t * K + s) * WIDTH + o_j, mask=m & valid, other=0.0)
        if WEIGHTED:
            w = tl.load(WEIGHTS + t * sw_t + s)
            added = tl.fma(tl.full((B,), 1.0, tl.float32) * w, y, total)
        else:
            added = total + y
        total = tl.where(valid, added, total)
    tl.store(OUT + t * so_t + o_j, canonical(total, OUT.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["sw_t"], do_not_specialize_on_alignment=["WEIGHTS"])
def differentiate_pairs_kernel(
    BLOCK, DACT, WEIGHTS, ORDER, STARTS, DBLOCK, WEIGHTED, DWEIGHTS, sw_t,
    COUNT: tl.constexpr, K: tl.constexpr, I: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The gradients of a pair's weight, gate and up, and its activation times its weight."""
    place = tl.program_id(0).to(tl.int64)
    if place >= tl.load(STARTS + COUNT):
        return
    pair = tl.load(ORDER + place)
    share = tl.load(WEIGHTS + (pair // K).to(tl.int64) * sw_t + pair % K)
    C: tl.constexpr = W if W < 4096 else 4096
    o_c = tl.arange(0, W // C)
    sums = tl.zeros((1, W // C), tl.float32)
    for c in tl.static_range(W // C):
        o_i = c * C + tl.arange(0, C)
        m = o_i < I
        gate = tl.load(BLOCK + place * 2 * I + o_i, mask=m, other=0.0)
        up = tl.load(BLOCK + place * 2 * I + I + o_i, mask=m, other=0.0)
        d = tl.load(DACT + place * I + o_i, mask=m, other=0.0)
        s = sigmoid(gate)
        silu = gate * s
        act = canonical(silu * up, DBLOCK.dtype.element_ty).to(tl.float32)
        sums = tl.where(o_c[None, :] == c, paired(tl.reshape(d * act, (1, C)), 1, C)[:, None], sums)
        v = d * share
        dgate = v * up * tl.fma(silu, 1.0 - s, s)
        tl.store(DBLOCK + place * 2 * I + o_i, canonical(dgate, DBLOCK.dtype.element_ty), mask=m)
        tl.store(DBLOCK + place * 2 * I + I + o_i, canonical(v * silu, DBLOCK.dtype.element_ty), mask=m)
        tl.store(WEIGHTED + place * I + o_i, canonical(act * share, DBLOCK.dtype.element_ty), mask=m)
    tl.store(DWEIGHTS + pair + tl.arange(0, 1), canonical(paired(sums, 1, W // C), tl.float32))


@triton.jit
def add_products_kernel(
    FIRST, SECOND, ORDER, GROUPS, STARTS, OUT, sf, ss,
    K: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    ACCUMULATE: tl.constexpr, B: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of an expert's matrix: one chain over its groups of 16 pairs."""
    across: tl.constexpr = (WIDE + B - 1) // B
    tiles: tl.constexpr = (HIGH + B - 1) // B * across
    e, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    o_m, o_n, o_k = (
        tile // across * B + tl.arange(0, B),
        tile % across * B + tl.arange(0, B),
        tl.arange(0, BK),
    )
    m_m, m_n = o_m < HIGH, o_n < WIDE
    p_out = OUT + (e.to(tl.int64) * HIGH + o_m[:, None]) * WIDE + o_n[None, :]
    m_out = m_m[:, None] & m_n[None, :]
    acc = tl.load(p_out, mask=m_out, other=0.0) if ACCUMULATE else tl.zeros((B, B), tl.float32)
    last = tl.load(STARTS + e + 1)
    for at in range(tl.load(STARTS + e), last, BK):
        place = tl.load(GROUPS + at + o_k, mask=at + o_k < last, other=-1)
        m = place >= 0
        token = tl.load(ORDER + place, mask=m, other=0) // K
        left = (token if LEFT else place).to(tl.int64)
        right = (token if RIGHT else place).to(tl.int64)
        a = tl.load(FIRST + left[:, None] * sf + o_m[None, :], mask=m[:, None] & m_m[None, :], other=0.0)
        b = tl.load(SECOND + right[:, None] * ss + o_n[None, :], mask=m[:, None] & m_n[None, :], other=0.0)
        acc = tl.dot(a.T, b, acc)
    tl.store(p_out, canonical(acc + 0.0, tl.float32), mask=m_out)
