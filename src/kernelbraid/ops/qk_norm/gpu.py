"""QK norm on the GPU, in portable Triton: forward and gradients, bfloat16 or float16.

    out[t, h, j] = round16((x[t, h, j] * r[t, h]) * w[j])    r[t, h] = 1 / sqrt(sum_j x[t, h, j]^2 / D + eps)

for q with q's weight and for k with k's. A head's sums pair neighbours: 0 with 1, 2 with 3, then pairs with
pairs, over D filled up with zeros to a power of two. The gradient of w adds, a head each, TOKEN_BLOCK tokens
in order from +0; then the heads by pairing neighbours; then blocks in order. Free of bits: heads of a
program, warps, one launch or two. Fusion is off: what is fused is written so.
"""

import torch
import triton
import triton.language as tl

TOKEN_BLOCK = 16
TILE = 4096
WARPS = 4
GRADIENT_TILE = 4096

KNOBS = {
    "TOKEN_BLOCK": ("numeric", (16, 32, 64)),
    "TILE": ("schedule", (1024, 2048, 4096, 8192)),
    "WARPS": ("schedule", (1, 2, 4, 8)),
    "GRADIENT_TILE": ("schedule", (1024, 2048, 4096)),
}

CHOSEN = {"TILE": TILE, "WARPS": WARPS, "GRADIENT_TILE": GRADIENT_TILE}
MOST_ROWS = 64


def numerics(constant_axes):
    return {"token_block": TOKEN_BLOCK}


def schedule(axes, knobs):
    """Choose the heads of a program and its warps: small calls are spread over the multiprocessors.

    `query_group` and `kv_group` are the heads of a token that a program of the gradients takes.
    """
    depth, heads = triton.next_power_of_2(axes["head_dim"]), axes["query_heads"] + axes["kv_heads"]
    rows = max(1, min(MOST_ROWS, knobs["TILE"] // depth))
    while rows > 1 and axes["tokens"] * heads < 264 * rows:
        rows //= 2
    group = max(1, knobs["GRADIENT_TILE"] // depth)
    groups = (min(group, triton.next_power_of_2(axes[name])) for name in ("query_heads", "kv_heads"))
    query_group, kv_group = groups
    return {
        "rows": rows,
        "warps": max(1, min(knobs["WARPS"], rows * depth // 128)),
        "query_group": query_group,
        "kv_group": kv_group,
        "gradient_warps": max(1, min(8, max(query_group, kv_group) * depth // 256)),
    }


def chosen(q, k):
    axes = {"query_heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[2], "tokens": q.shape[0]}
    return schedule(axes, CHOSEN)


def launch(kernel, programs, warps, *arguments, **options):
    kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=False, **options)


# ---- Entry points. Tensors on one device: heads [T, H, D] and weights [D] in 16 bits, sums float32.


def qk_norm(q, k, q_weight, k_weight, eps, q_out, k_out):
    """Normalize the heads of q and k into q_out and k_out."""
    tokens, query_heads, depth = q.shape
    kv_heads = k.shape[1]
    if not tokens:
        return
    plan = chosen(q, k)
    programs = [triton.cdiv(tokens * heads, plan["rows"]) for heads in (query_heads, kv_heads)]
    launch(
        *(qk_norm_kernel, sum(programs), plan["warps"]),
        *(q, k, q_weight, k_weight, q_out, k_out, float(eps), tokens, programs[0]),
        *(*q.stride()[:2], *k.stride()[:2], *q_out.stride()[:2], *k_out.stride()[:2]),
        *(query_heads, kv_heads, depth, triton.next_power_of_2(depth), plan["rows"]),
    )


def qk_norm_backward(
    q, k, q_weight, k_weight, dq_out, dk_out, eps, dq, dk, dq_weight, dk_weight, accumulate
):  # fmt: skip
    """Write the gradients; one that is None is left out. Those of weights are added to if `accumulate`."""
    tokens, _, depth = q.shape
    if not tokens:
        for dweight in (dq_weight, dk_weight):
            if dweight is not None and not accumulate:
                dweight.zero_()
        return
    plan, blocks, padded = chosen(q, k), triton.cdiv(tokens, TOKEN_BLOCK), triton.next_power_of_2(depth)
    for x, weight, dout, dx, dweight, group in (
        (q, q_weight, dq_out, dq, dq_weight, plan["query_group"]),
        (k, k_weight, dk_out, dk, dk_weight, plan["kv_group"]),
    ):
        if dx is None and dweight is None:
            continue
        heads = x.shape[1]
        groups = triton.cdiv(heads, group)
        room = (blocks * groups if dweight is not None else 0, depth)
        partials = torch.empty(room, dtype=torch.float32, device=x.device)
        launch(
            *(qk_norm_backward_kernel, blocks * groups, plan["gradient_warps"]),
            *(x, weight, dout, x if dx is None else dx, partials, float(eps), tokens),
            *(*x.stride()[:2], *dout.stride()[:2], *((0, 0) if dx is None else dx.stride()[:2])),
            *(heads, group, groups, depth, padded, TOKEN_BLOCK, dx is not None, dweight is not None),
        )
        if dweight is not None:
            launch(
                *(add_partials_kernel, triton.cdiv(depth, 32), 1),
                *(partials, dweight, blocks, depth, bool(accumulate)),
                *(groups, triton.next_power_of_2(groups), 32),
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
def paired(x, R: tl.constexpr, W: tl.constexpr):
    """Sums of the rows of x [R, W], neighbours first: each step adds two numbers, in whatever order."""
    if W == 1:
        return tl.reshape(x, (R,))
    else:
        return paired(tl.sum(tl.reshape(x, (R, W // 2, 2)), 2), R, W // 2)


@triton.jit
def paired_heads(x, H: tl.constexpr, W: tl.constexpr):
    """Sums of the columns of x [H, W], neighbours first."""
    if H == 1:
        return tl.reshape(x, (W,))
    else:
        return paired_heads(tl.sum(tl.reshape(x, (H // 2, 2, W)), 1), H // 2, W)


@triton.jit
def factor(x, eps, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """1 / sqrt(mean of squares + eps) of each row."""
    mean = tl.div_rn(paired(x * x, R, W), tl.full((R,), D, tl.float32))
    return tl.div_rn(tl.full((R,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def normalize_heads(
    X, WEIGHT, OUT, eps, tokens, program, sx_t, sx_h, so_t, so_h,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """R heads, of as many tokens as they are of."""
    o_r = program * R + tl.arange(0, R)
    o_j = tl.arange(0, W)
    m = (o_r < tokens * H)[:, None] & (o_j < D)[None, :]
    t, h = (o_r // H).to(tl.int64), o_r % H
    x = tl.load(X + (t * sx_t + h * sx_h)[:, None] + o_j[None, :], mask=m, other=0.0).to(tl.float32)
    w = tl.load(WEIGHT + o_j, mask=o_j < D, other=0.0).to(tl.float32)
    r = factor(x, eps, D, R, W)
    y = canonical(x * r[:, None] * w[None, :], OUT.dtype.element_ty)
    tl.store(OUT + (t * so_t + h * so_h)[:, None] + o_j[None, :], y, mask=m)


@triton.jit(do_not_specialize=["tokens", "first_k"])
def qk_norm_kernel(
    Q, K, QW, KW, QO, KO, eps, tokens, first_k, sq_t, sq_h, sk_t, sk_h, sqo_t, sqo_h, sko_t, sko_h,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Programs before first_k take heads of q, the others heads of k."""
    program = tl.program_id(0)
    if program < first_k:
        normalize_heads(Q, QW, QO, eps, tokens, program, sq_t, sq_h, sqo_t, sqo_h, HQ, D, W, R)
    else:
        normalize_heads(K, KW, KO, eps, tokens, program - first_k, sk_t, sk_h, sko_t, sko_h, HK, D, W, R)


@triton.jit(do_not_specialize=["tokens"])
def qk_norm_backward_kernel(
    X, WEIGHT, DOUT, DX, PARTIALS, eps, tokens, sx_t, sx_h, sd_t, sd_h, sdx_t, sdx_h,
    H: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    BLOCK: tl.constexpr, HAS_DX: tl.constexpr, HAS_DW: tl.constexpr,
):  # fmt: skip
    """G heads of a block of tokens, one token after the other: their dx, and their part of dweight."""
    block, o_h = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS * G + tl.arange(0, G)
    o_j = tl.arange(0, W)
    m = (o_h < H)[:, None] & (o_j < D)[None, :]
    w = tl.load(WEIGHT + o_j, mask=o_j < D, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((G, W), tl.float32)
    o_h = o_h.to(tl.int64)
    for t in range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, tokens)):
        t = tl.cast(t, tl.int64)
        x = tl.load(X + t * sx_t + (o_h * sx_h)[:, None] + o_j[None, :], mask=m, other=0.0).to(tl.float32)
        d = tl.load(DOUT + t * sd_t + (o_h * sd_h)[:, None] + o_j[None, :], mask=m, other=0.0).to(tl.float32)
        r = factor(x, eps, D, G, W)
        n = x * r[:, None]
        if HAS_DX:
            c = tl.div_rn(paired(d * w * n, G, W), tl.full((G,), D, tl.float32))
            g = tl.fma(tl.broadcast_to(-c[:, None], (G, W)), n, d * w)
            y = canonical(r[:, None] * g, DX.dtype.element_ty)
            tl.store(DX + t * sdx_t + (o_h * sdx_h)[:, None] + o_j[None, :], y, mask=m)
        if HAS_DW:
            total = tl.fma(d, n, total)
    if HAS_DW:
        part = paired_heads(total, G, W)
        tl.store(PARTIALS + tl.program_id(0).to(tl.int64) * D + o_j, part, mask=o_j < D)


@triton.jit(do_not_specialize=["blocks"])
def add_partials_kernel(
    PARTIALS, OUT, blocks, D, ACCUMULATE: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr, B: tl.constexpr
):
    """Add blocks in order to each column; in a block, groups of heads by pairing."""
    o_j, o_g = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, G)
    m_j = o_j < D
    m = (o_g < GROUPS)[:, None] & m_j[None, :]
    total = tl.load(OUT + o_j, mask=m_j) if ACCUMULATE else tl.zeros((B,), tl.float32)
    for block in range(blocks):
        place = tl.cast(block, tl.int64) * GROUPS * D
        parts = tl.load(PARTIALS + place + o_g[:, None] * D + o_j[None, :], mask=m, other=0.0)
        total += paired_heads(parts, G, B)
    tl.store(OUT + o_j, canonical(total, tl.float32), mask=m_j)
