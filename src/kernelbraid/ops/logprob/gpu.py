"""Log-probabilities of chosen tokens on the GPU, in portable Triton: forward and gradients, 16 bits.

    s[t, v]    = (sum_k x[t, k] * w[v, k]) * c                c = float32(1 / temperature)
    lse[t]     = log sum_v exp(s[t, v])
    logprob[t] = s[t, target of t] - lse[t]
    entropy[t] = -sum_v p[t, v] * log p[t, v]                 p[t, v] = exp(s[t, v] - lse[t])

A logit is one chain of the matrix unit over ascending k, in float32 and never in memory. BLOCK logits are
reduced by pairing neighbours, and blocks by pairing again. Gradients recompute the logits of a piece of
tokens and keep the gradients of the piece's logits, in 16 bits: dx adds spans of SPAN rows of w in order,
each a chain from +0; dweight is one chain over the tokens of a call in order. Free of bits: tiles of tokens,
warps, stages, which operand is which, pieces. Fusion is off: what is fused is written so.
"""

import torch
import triton
import triton.language as tl

BLOCK = 128
TILE = 128
FEW_TOKENS = 64
STAGES = 3
PIECE_MIB = 512
TOGETHER = 8

KNOBS = {
    "BLOCK": ("numeric", (64, 128)),
    "TILE": ("schedule", (64, 128)),
    "FEW_TOKENS": ("schedule", (16, 32, 64)),
    "STAGES": ("schedule", (2, 3, 4)),
    "PIECE_MIB": ("schedule", (128, 256, 512, 1024)),
    "TOGETHER": ("schedule", (4, 8, 16)),
}

SPAN = 2048
TOKENS_AT_ONCE = 8192
LOG2E = tl.constexpr(1.4426950216293335)
LN2 = tl.constexpr(0.6931471824645996)


def numerics(constant_axes):
    return {"block": BLOCK}


def schedule(axes, knobs):
    """Choose tiles of tokens, warps and stages: of few tokens, rows of the weight are the first operand.

    `piece` is how many tokens have the gradients of their logits in memory at a time.
    """
    tokens, room = axes["tokens"], knobs["PIECE_MIB"] << 19
    few = tokens <= knobs["FEW_TOKENS"]
    tile = max(16, triton.next_power_of_2(min(tokens, knobs["FEW_TOKENS"]))) if few else knobs["TILE"]
    piece = min(TOKENS_AT_ONCE, max(1, room // axes["vocabulary"] // 128) * 128)
    return {
        "tile": tile,
        "swap": few,
        "depth": 128 if few else 64,
        "warps": 8 if tile == 128 or (few and tile == 64) else 4,
        "stages": knobs["STAGES"],
        "piece": piece,
    }


def chosen(tokens, vocabulary):
    knobs = {"TILE": TILE, "FEW_TOKENS": FEW_TOKENS, "STAGES": STAGES, "PIECE_MIB": PIECE_MIB}
    return schedule({"tokens": tokens, "vocabulary": vocabulary}, knobs)


def wide(*tensors):
    """Whether the addresses of rows are multiples of 16 elements: others take more registers."""
    return all(x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 for x in tensors)


def inverse(temperature):
    return 1 / float(temperature)


def launch(kernel, programs, warps, stages, *arguments):
    kernel[(programs,)](*arguments, num_warps=warps, num_stages=stages, enable_fp_fusion=False)


# ---- Entry points. Tensors on one device: x [T, H] and weight [V, H] in 16 bits, targets int32 [T].


def logprob(x, weight, targets, temperature, logprob, entropy, lse):
    """Write log-probabilities of targets, entropies (or None) and log-sum-exps, float32 [T]."""
    (tokens, width), vocabulary = x.shape, weight.shape[0]
    for first in range(0, tokens, TOKENS_AT_ONCE):
        part = slice(first, first + TOKENS_AT_ONCE)
        count, plan = min(TOKENS_AT_ONCE, tokens - first), chosen(tokens, vocabulary)
        depth = plan["depth"] if wide(x, weight) else 32
        partials, picked = workspace(count, vocabulary, x.device)
        tiles, blocks = triton.cdiv(count, plan["tile"]), triton.cdiv(vocabulary, BLOCK)
        launch(
            *(logprob_kernel, tiles * blocks, plan["warps"], plan["stages"]),
            *(x[part], weight, targets[part], partials, picked, inverse(temperature), count),
            *(x.stride(0), weight.stride(0), tiles, width, vocabulary),
            *(plan["tile"], BLOCK, depth, TOGETHER, plan["swap"]),
        )
        finish(partials, picked, targets[part], logprob[part], entropy, lse[part], part, vocabulary)


def logprob_of_logits(logits, targets, temperature, logprob, entropy, lse):
    """The same from logits [T, V] in memory, float32 or 16 bits."""
    tokens, vocabulary = logits.shape
    for first in range(0, tokens, TOKENS_AT_ONCE):
        part = slice(first, first + TOKENS_AT_ONCE)
        count, rows = min(TOKENS_AT_ONCE, tokens - first), 16
        partials, picked = workspace(count, vocabulary, logits.device)
        tiles, blocks = triton.cdiv(count, rows), triton.cdiv(vocabulary, BLOCK)
        launch(
            *(read_logits_kernel, tiles * blocks, 4, 1),
            *(logits[part], targets[part], partials, picked, inverse(temperature), count, logits.stride(0)),
            *(tiles, vocabulary, rows, BLOCK),
        )
        finish(partials, picked, targets[part], logprob[part], entropy, lse[part], part, vocabulary)


def logits(x, weight, out):
    """Write the logits that the log-probabilities are those of, not scaled: float32 [T, V]."""
    (tokens, width), vocabulary = x.shape, weight.shape[0]
    plan = chosen(tokens, vocabulary)
    tiles, blocks = triton.cdiv(tokens, plan["tile"]), triton.cdiv(vocabulary, BLOCK)
    launch(
        *(logits_kernel, tiles * blocks, plan["warps"], plan["stages"]),
        *(x, weight, out, tokens, x.stride(0), weight.stride(0), out.stride(0), tiles, width, vocabulary),
        *(plan["tile"], BLOCK, plan["depth"] if wide(x, weight) else 32, TOGETHER, plan["swap"]),
    )


def logprob_backward(
    x, weight, targets, temperature, dlogprob, dentropy, lse, entropy, dx, dweight, accumulate
):  # fmt: skip
    """Write the gradients; one that is None is left out. dweight, float32, is added to if `accumulate`.

    dentropy and entropy may be None: nothing then comes from the entropies.
    """
    (tokens, width), vocabulary = x.shape, weight.shape[0]
    plan = chosen(max(tokens, FEW_TOKENS + 1), vocabulary)
    padded, stages = triton.cdiv(vocabulary, BLOCK) * BLOCK, plan["stages"]
    narrow = min(64, max(16, triton.next_power_of_2(width)))
    depth, across = (plan["depth"], 128) if wide(x, weight) else (32, narrow)
    g = torch.empty(min(plan["piece"], tokens), padded, dtype=x.dtype, device=x.device)
    dentropy, entropy = (dlogprob, lse) if dentropy is None else (dentropy, entropy)
    has_entropy = dentropy is not dlogprob
    for first in range(0, tokens, plan["piece"]):
        part = slice(first, first + plan["piece"])
        count = min(plan["piece"], tokens - first)
        tiles, blocks = triton.cdiv(count, plan["tile"]), triton.cdiv(vocabulary, BLOCK)
        launch(
            *(logits_backward_kernel, tiles * blocks, plan["warps"], stages),
            *(x[part], weight, targets[part], dlogprob[part], dentropy[part], lse[part], entropy[part], g),
            *(inverse(temperature), count, x.stride(0), weight.stride(0), padded, tiles, width, vocabulary),
            *(plan["tile"], BLOCK, depth, TOGETHER, has_entropy),
        )
        columns = triton.cdiv(width, across)
        if dx is not None:
            launch(
                *(dx_kernel, triton.cdiv(count, 128) * columns, 8, stages),
                *(g, weight, dx[part], count, padded, weight.stride(0), dx.stride(0)),
                *(columns, width, vocabulary, 128, across, depth, SPAN, TOGETHER),
            )
        if dweight is not None:
            launch(
                *(dweight_kernel, triton.cdiv(vocabulary, 128) * columns, 8, stages),
                *(g, x[part], dweight, count, padded, x.stride(0), dweight.stride(0)),
                *(columns, width, vocabulary, 128, across, depth, TOGETHER, bool(accumulate) or first > 0),
            )


# ---- Launches.


def workspace(tokens, vocabulary, device):
    """Partial sums [3, blocks, tokens] and the scaled logits of targets."""
    blocks = triton.cdiv(vocabulary, BLOCK)
    partials = torch.empty(3, blocks, tokens, dtype=torch.float32, device=device)
    return partials, torch.empty(tokens, dtype=torch.float32, device=device)


def finish(partials, picked, targets, logprob, entropy, lse, part, vocabulary):
    """Merge the blocks of every token."""
    _, blocks, tokens = partials.shape
    together = triton.next_power_of_2(blocks)
    rows = max(1, min(8, 4096 // together))
    launch(
        *(merge_kernel, triton.cdiv(tokens, rows), min(16, max(4, together * rows // 512)), 1),
        *(partials, picked, targets, logprob, lse if entropy is None else entropy[part], lse),
        *(tokens, blocks, vocabulary, rows, together, entropy is not None),
    )


# ---- Device. o_ offsets, m_ masks, b_ values of a block.


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
def paired(x, R: tl.constexpr, W: tl.constexpr):
    """Sums of the rows of x [R, W], neighbours first: each step adds two numbers, in whatever order."""
    if W == 1:
        return tl.reshape(x, (R,))
    else:
        return paired(tl.sum(tl.reshape(x, (R, W // 2, 2)), 2), R, W // 2)


@triton.jit
def paired_down(x, R: tl.constexpr, W: tl.constexpr):
    """Sums of the columns of x [W, R] by the same pairs."""
    if W == 1:
        return tl.reshape(x, (R,))
    else:
        return paired_down(tl.sum(tl.reshape(x, (W // 2, 2, R)), 1), R, W // 2)


@triton.jit
def across(x, SWAP: tl.constexpr):
    """One number for each token, shaped to meet a tile: tokens are its columns with SWAP."""
    if SWAP:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def place(tiles, blocks, TOGETHER: tl.constexpr):
    """Tile of tokens and block of a program: TOGETHER tiles pass over the weight side by side."""
    pid = tl.program_id(0)
    set_ = pid // (TOGETHER * blocks)
    size = tl.minimum(TOGETHER, tiles - set_ * TOGETHER)
    pid = pid - set_ * TOGETHER * blocks
    return set_ * TOGETHER + pid % size, pid // size


@triton.jit
def logit_tile(
    X, WEIGHT, o_t, o_v, tokens, sx_t, sw_v, H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Logits of a tile, [BT, BV], or with SWAP [BV, BT]: one chain over k each."""
    o_k = tl.arange(0, BK)
    t0 = tl.min(o_t, 0)
    v0 = tl.min(o_v, 0)
    p_x = X + t0.to(tl.int64) * sx_t
    p_w = WEIGHT + v0.to(tl.int64) * sw_v
    # rows beyond the last are read as the last; nobody uses what comes of them
    o_x = (tl.minimum(o_t, tokens - 1) - t0)[:, None] * sx_t + o_k[None, :]
    o_w = (tl.minimum(o_v, V - 1) - v0)[:, None] * sw_v + o_k[None, :]
    acc = tl.zeros((BV, BT), tl.float32) if SWAP else tl.zeros((BT, BV), tl.float32)
    for k in range(0, H, BK):
        if H % BK == 0:
            b_x = tl.load(p_x + o_x)
            b_w = tl.load(p_w + o_w)
        else:
            b_x = tl.load(p_x + o_x, mask=o_k[None, :] < H - k, other=0.0)
            b_w = tl.load(p_w + o_w, mask=o_k[None, :] < H - k, other=0.0)
        acc = tl.dot(b_w, b_x.T, acc) if SWAP else tl.dot(b_x, b_w.T, acc)
        p_x += BK
        p_w += BK
    return acc


@triton.jit
def reduce_tile(
    s, targets, PARTIALS, PICKED, o_t, o_v, block, tokens, blocks, V: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Store maximum, sum of weights and sum of w log w of a tile's tokens, and the targets' logits."""
    axis: tl.constexpr = 0 if SWAP else 1
    s = tl.where(across(o_v < V, not SWAP), s, float("-inf"))
    m = tl.max(s, axis)
    u = s - across(tl.where(m == float("-inf"), 0.0, m), SWAP)
    w = tl.exp2(u * LOG2E)
    e = tl.where(w == 0.0, 0.0, w * u)
    l = paired_down(w, BT, BV) if SWAP else paired(w, BT, BV)
    e = paired_down(e, BT, BV) if SWAP else paired(e, BT, BV)
    m_t = o_t < tokens
    p = PARTIALS + block.to(tl.int64) * tokens + o_t
    size = blocks.to(tl.int64) * tokens
    tl.store(p, m, mask=m_t)
    tl.store(p + size, l, mask=m_t)
    tl.store(p + 2 * size, e, mask=m_t)
    # one number and zeros: a sum without an order
    own = across(targets, SWAP) == across(o_v, not SWAP)
    picked = tl.sum(tl.where(own, s, 0.0), axis)
    inside = (targets >= block * BV) & (targets < tl.minimum(block * BV + BV, V))
    tl.store(PICKED + o_t, picked, mask=m_t & inside)


@triton.jit(do_not_specialize=["tokens", "tiles"], do_not_specialize_on_alignment=["TARGETS"])
def logprob_kernel(
    X, WEIGHT, TARGETS, PARTIALS, PICKED, scale, tokens, sx_t, sw_v, tiles, H: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    blocks = (V + BV - 1) // BV
    tile, block = place(tiles, blocks, TOGETHER)
    o_t = tile * BT + tl.arange(0, BT)
    o_v = block * BV + tl.arange(0, BV)
    s = logit_tile(X, WEIGHT, o_t, o_v, tokens, sx_t, sw_v, H, V, BT, BV, BK, SWAP) * scale
    targets = tl.load(TARGETS + o_t, mask=o_t < tokens, other=-1)
    blocks = tl.cast(blocks, tl.int32)
    reduce_tile(s, targets, PARTIALS, PICKED, o_t, o_v, block, tokens, blocks, V, BT, BV, SWAP)


@triton.jit(do_not_specialize=["tokens", "tiles"], do_not_specialize_on_alignment=["TARGETS"])
def read_logits_kernel(
    LOGITS, TARGETS, PARTIALS, PICKED, scale, tokens, sl_t, tiles, V: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Partial sums of logits in memory."""
    blocks = (V + BV - 1) // BV
    tile, block = place(tiles, blocks, 1)
    o_t = tile * BT + tl.arange(0, BT)
    o_v = block * BV + tl.arange(0, BV)
    m = (o_t < tokens)[:, None] & (o_v < V)[None, :]
    s = tl.load(LOGITS + o_t.to(tl.int64)[:, None] * sl_t + o_v[None, :], mask=m, other=0.0)
    s = s.to(tl.float32) * scale
    targets = tl.load(TARGETS + o_t, mask=o_t < tokens, other=-1)
    blocks = tl.cast(blocks, tl.int32)
    reduce_tile(s, targets, PARTIALS, PICKED, o_t, o_v, block, tokens, blocks, V, BT, BV, False)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def logits_kernel(
    X, WEIGHT, OUT, tokens, sx_t, sw_v, so_t, tiles, H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    tile, block = place(tiles, (V + BV - 1) // BV, TOGETHER)
    o_t = tile * BT + tl.arange(0, BT)
    o_v = block * BV + tl.arange(0, BV)
    s = logit_tile(X, WEIGHT, o_t, o_v, tokens, sx_t, sw_v, H, V, BT, BV, BK, SWAP)
    p = OUT + across(o_t.to(tl.int64) * so_t, SWAP) + across(o_v, not SWAP)
    m = across(o_t < tokens, SWAP) & across(o_v < V, not SWAP)
    tl.store(p, canonical(s, tl.float32), mask=m)


@triton.jit(
    do_not_specialize=["tokens"], do_not_specialize_on_alignment=["TARGETS", "LOGPROB", "ENTROPY", "LSE"]
)
def merge_kernel(
    PARTIALS, PICKED, TARGETS, LOGPROB, ENTROPY, LSE, tokens, BLOCKS: tl.constexpr, V: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """Merge all blocks of R tokens by pairs."""
    o_t = tl.program_id(0) * R + tl.arange(0, R)
    o_b = tl.arange(0, W)
    m_t = o_t < tokens
    m_b = m_t[:, None] & (o_b < BLOCKS)[None, :]
    p = PARTIALS + o_b.to(tl.int64)[None, :] * tokens + o_t[:, None]
    size = tl.cast(tokens, tl.int64) * BLOCKS
    m = tl.load(p, mask=m_b, other=float("-inf"))
    l = tl.load(p + size, mask=m_b, other=0.0)
    e = tl.load(p + 2 * size, mask=m_b, other=0.0)
    top = tl.max(m, 1)
    base = tl.where(top == float("-inf"), 0.0, top)[:, None]
    a = tl.exp2((m - base) * LOG2E)
    e = tl.fma(l, tl.where(m == float("-inf"), 0.0, m) - base, e) * a
    l = paired(l * a, R, W)
    logarithm = tl.log2(l)
    ln2 = tl.full((R,), LN2, tl.float32)
    lse = canonical(tl.fma(logarithm, ln2, top), tl.float32)
    targets = tl.load(TARGETS + o_t, mask=m_t, other=-1)
    inside = (targets >= 0) & (targets < V)
    picked = tl.load(PICKED + o_t, mask=m_t & inside, other=0.0)
    chosen = tl.where(inside, canonical(picked - lse, tl.float32), 0.0)
    tl.store(LOGPROB + o_t, chosen, mask=m_t)
    tl.store(LSE + o_t, lse, mask=m_t)
    if HAS_ENTROPY:
        mean = 0.0 - tl.div_rn(paired(e, R, W), l)
        tl.store(ENTROPY + o_t, canonical(tl.fma(logarithm, ln2, mean), tl.float32), mask=m_t)


@triton.jit(
    do_not_specialize=["tokens", "tiles"],
    do_not_specialize_on_alignment=["TARGETS", "DLOGPROB", "DENTROPY", "LSE", "ENTROPY"],
)
def logits_backward_kernel(
    X, WEIGHT, TARGETS, DLOGPROB, DENTROPY, LSE, ENTROPY, G, scale, tokens, sx_t, sw_v, sg_t, tiles,
    H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    TOGETHER: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """Gradients of the logits of a tile, in 16 bits; 0 beyond the vocabulary."""
    tile, block = place(tiles, (V + BV - 1) // BV, TOGETHER)
    o_t = tile * BT + tl.arange(0, BT)
    o_v = block * BV + tl.arange(0, BV)
    m_t = o_t < tokens
    s = logit_tile(X, WEIGHT, o_t, o_v, tokens, sx_t, sw_v, H, V, BT, BV, BK, False) * scale
    targets = tl.load(TARGETS + o_t, mask=m_t, other=-1)
    lse = tl.load(LSE + o_t, mask=m_t, other=0.0)
    d = tl.load(DLOGPROB + o_t, mask=m_t, other=0.0)
    d = tl.where((targets >= 0) & (targets < V), d, 0.0)
    u = s - lse[:, None]
    exponent = u * LOG2E
    p = tl.exp2(tl.where(exponent > 0.0, 0.0, exponent))
    if HAS_ENTROPY:
        h = tl.load(ENTROPY + o_t, mask=m_t, other=0.0)
        e = tl.load(DENTROPY + o_t, mask=m_t, other=0.0)
        slope = tl.fma(
            tl.broadcast_to(e[:, None], (BT, BV)), u + h[:, None], tl.broadcast_to(d[:, None], (BT, BV))
        )
    else:
        slope = tl.broadcast_to(d[:, None], (BT, BV))
    g = tl.where(p == 0.0, 0.0, p * slope)
    g = tl.where(targets[:, None] == o_v[None, :], d[:, None] - g, -g) * scale
    g = tl.where((o_v < V)[None, :], g, 0.0)
    p_g = G + o_t.to(tl.int64)[:, None] * sg_t + o_v[None, :]
    tl.store(p_g, canonical(g, G.dtype.element_ty), mask=m_t[:, None])


@triton.jit(do_not_specialize=["tokens", "columns"])
def dx_kernel(
    G, WEIGHT, DX, tokens, sg_t, sw_v, sd_t, columns, H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BH: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A tile of dx: spans of rows of the weight in order, each a chain from +0."""
    tile, column = place((tokens + BT - 1) // BT, columns, TOGETHER)
    o_t = tile * BT + tl.arange(0, BT)
    o_h = column * BH + tl.arange(0, BH)
    o_k = tl.arange(0, BK)
    m_h = (o_h < H)[None, :]
    p_g = G + (tile * BT).to(tl.int64) * sg_t
    p_w = WEIGHT + column * BH
    o_g = (tl.minimum(o_t, tokens - 1) - tile * BT)[:, None] * sg_t + o_k[None, :]
    o_w = o_k[:, None] * sw_v + tl.arange(0, BH)[None, :]
    total = tl.zeros((BT, BH), tl.float32)
    for span in range(0, V, SPAN):
        acc = tl.zeros((BT, BH), tl.float32)
        for v in range(span, tl.minimum(span + SPAN, V), BK):
            if V % BK == 0 and H % BH == 0:
                b_g = tl.load(p_g + o_g)
                b_w = tl.load(p_w + o_w)
            else:
                m_k = o_k < V - v
                b_g = tl.load(p_g + o_g, mask=m_k[None, :], other=0.0)
                b_w = tl.load(p_w + o_w, mask=m_k[:, None] & m_h, other=0.0)
            acc = tl.dot(b_g, b_w, acc)
            p_g += BK
            p_w += BK * tl.cast(sw_v, tl.int64)
        total += acc
    p = DX + o_t.to(tl.int64)[:, None] * sd_t + o_h[None, :]
    tl.store(p, canonical(total, DX.dtype.element_ty), mask=(o_t < tokens)[:, None] & m_h)


@triton.jit(do_not_specialize=["tokens", "columns"])
def dweight_kernel(
    G, X, DWEIGHT, tokens, sg_t, sx_t, sd_v, columns, H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    BH: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """A tile of dweight: one chain over tokens in order, from +0 or from what is there."""
    tile, column = place((V + BV - 1) // BV, columns, TOGETHER)
    o_v = tile * BV + tl.arange(0, BV)
    o_h = column * BH + tl.arange(0, BH)
    o_k = tl.arange(0, BK)
    m = (o_v < V)[:, None] & (o_h < H)[None, :]
    p = DWEIGHT + o_v.to(tl.int64)[:, None] * sd_v + o_h[None, :]
    acc = tl.load(p, mask=m, other=0.0) if ACCUMULATE else tl.zeros((BV, BH), tl.float32)
    p_g = G + tile * BV
    p_x = X + column * BH
    o_g = o_k[:, None] * sg_t + tl.arange(0, BV)[None, :]
    o_x = o_k[:, None] * sx_t + tl.arange(0, BH)[None, :]
    for t in range(0, tokens, BK):
        m_k = (o_k < tokens - t)[:, None]
        b_g = tl.load(p_g + o_g, mask=m_k & (o_v < V)[None, :], other=0.0)
        b_x = tl.load(p_x + o_x, mask=m_k & (o_h < H)[None, :], other=0.0)
        acc = tl.dot(b_g.T, b_x, acc)
        p_g += BK * tl.cast(sg_t, tl.int64)
        p_x += BK * tl.cast(sx_t, tl.int64)
    tl.store(p, canonical(acc, tl.float32), mask=m)
