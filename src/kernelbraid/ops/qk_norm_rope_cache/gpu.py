"""The rollout's fused step on the GPU, in portable Triton: QK norm, rotation and cache write in one launch.

    n[t, h, j] = round16((x[t, h, j] * r[t, h]) * w[j])         where there are weights, otherwise x
    y[t, h] = n[t, h] with its halves turned by the angles of positions[t], rounded to 16 bits
    q_out[t] = y of q;  k_cache[slot of t] = y of k;  v_cache[slot of t] = v[t]

The steps are those of the operators qk_norm and rope and of attention's write_kv_cache, to the bit: a head's
squares pair neighbours, which for a power of two is each half's sum and then both; of the rotation's two
products the one with the cosine is rounded, the other fused. Free of bits: heads of a program, warps. Fusion
is off: what is fused is written so. Nothing is read or written outside tables and caches, whatever positions
and pages say.
"""

import triton
import triton.language as tl

TILE = 2048
WARPS = 4

KNOBS = {
    "TILE": ("schedule", (512, 1024, 2048, 4096)),
    "WARPS": ("schedule", (1, 2, 4, 8)),
}

CHOSEN = {"TILE": TILE, "WARPS": WARPS}
MOST_ROWS = 32


def numerics(constant_axes):
    return {}


def schedule(axes, knobs):
    """Choose the heads of a program and its warps: small calls are spread over the multiprocessors."""
    half, heads = triton.next_power_of_2(axes["head_dim"] // 2), axes["query_heads"] + 2 * axes["kv_heads"]
    rows = max(1, min(MOST_ROWS, knobs["TILE"] // half))
    while rows > 1 and axes["tokens"] * heads < 264 * rows:
        rows //= 2
    return {"rows": rows, "warps": max(1, min(knobs["WARPS"], rows * half // 128))}


def launch(kernel, programs, warps, *arguments, **options):
    kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=False, **options)


# ---- Entry point. Tensors on one device: heads [T, H, D], weights [D], caches in 16 bits; tables float32.


def qk_norm_rope_cache(
    q, k, v, q_weight, k_weight, positions, cos, sin, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k,
    eps, q_out,
):  # fmt: skip
    """Write new tokens into the caches, and the queries, turned, into q_out; weights may both be None."""
    (tokens, query_heads, depth), kv_heads = q.shape, k.shape[1]
    if not tokens:
        return
    axes = {"query_heads": query_heads, "kv_heads": kv_heads, "head_dim": depth, "tokens": tokens}
    plan, normed = schedule(axes, CHOSEN), q_weight is not None
    of_q, of_k = (triton.cdiv(tokens * heads, plan["rows"]) for heads in (query_heads, kv_heads))
    launch(
        *(prepare_kernel, of_q + 2 * of_k, plan["warps"]),
        *(q, k, v, q_weight if normed else q, k_weight if normed else k, positions, cos, sin),
        *(k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k, q_out, float(eps)),
        *(tokens, of_q, of_q + of_k, cos.shape[0], len(seqlens_k), page_table.stride(0)),
        *(page_table.shape[1], *k_cache.shape[:2], cos.stride(0), sin.stride(0)),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *q_out.stride()[:2]),
        *(*k_cache.stride()[:3], *v_cache.stride()[:3]),
        *(query_heads, kv_heads, depth // 2, plan["rows"], normed, 64),
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
def prepare(
    X, WEIGHT, POSITIONS, COS, SIN, eps, t, h, m_r, rows, sc, ss, sx_t, sx_h,
    HALF: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Both halves of R heads as attention reads them."""
    dtype: tl.constexpr = X.dtype.element_ty
    o_i = tl.arange(0, HALF)
    m = m_r[:, None] & (o_i >= 0)[None, :]
    p = tl.load(POSITIONS + t, mask=m_r, other=0)
    m_p, p = m & ((p >= 0) & (p < rows))[:, None], p.to(tl.int64)
    c = tl.load(COS + p[:, None] * sc + o_i[None, :], mask=m_p, other=float("nan"))
    s = tl.load(SIN + p[:, None] * ss + o_i[None, :], mask=m_p, other=float("nan"))
    place = (t * sx_t + h * sx_h)[:, None] + o_i[None, :]
    a = tl.load(X + place, mask=m, other=0.0).to(tl.float32)
    b = tl.load(X + place + HALF, mask=m, other=0.0).to(tl.float32)
    if NORM:
        total = paired(a * a, R, HALF) + paired(b * b, R, HALF)
        mean = tl.div_rn(total, tl.full((R,), 2 * HALF, tl.float32))
        r = tl.div_rn(tl.full((R,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))[:, None]
        a = canonical(a * r * tl.load(WEIGHT + o_i).to(tl.float32)[None, :], dtype).to(tl.float32)
        b = canonical(b * r * tl.load(WEIGHT + HALF + o_i).to(tl.float32)[None, :], dtype).to(tl.float32)
    return canonical(tl.fma(-b, s, a * c), dtype), canonical(tl.fma(a, s, b * c), dtype)


@triton.jit
def place_of(
    TABLE, CU, LENGTHS, o_t, m_r, batch, stable, columns, pages, page_size, R: tl.constexpr, BB: tl.constexpr
):
    """Page and slot of each token, and whether it has one in the cache."""
    m_r = m_r & (o_t < tl.load(CU + batch))  # rows after the last request are nobody's
    b = tl.zeros((R,), tl.int32)
    for first in range(1, batch, BB):  # requests that start at or before the token, less one
        o_b = first + tl.arange(0, BB)
        starts = tl.load(CU + o_b, mask=o_b < batch, other=2147483647)
        b += tl.sum((starts[None, :] <= o_t[:, None]).to(tl.int32), 1)
    position = tl.load(LENGTHS + b, mask=m_r, other=0) - tl.load(CU + b + 1, mask=m_r, other=0) + o_t
    column = position // page_size
    m_r = m_r & (position >= 0) & (column < columns)
    page = tl.load(TABLE + b.to(tl.int64) * stable + column, mask=m_r, other=-1)
    return page.to(tl.int64), (position % page_size).to(tl.int64), m_r & (page >= 0) & (page < pages)


@triton.jit(
    do_not_specialize=[
        "tokens", "first_k", "first_v", "rows", "batch", "stable", "columns", "pages", "page_size",
    ],
    do_not_specialize_on_alignment=["POSITIONS", "TABLE", "CU", "LENGTHS"],
)  # fmt: skip
def prepare_kernel(
    Q, K, V, QW, KW, POSITIONS, COS, SIN, KC, VC, TABLE, CU, LENGTHS, QO, eps,
    tokens, first_k, first_v, rows, batch, stable, columns, pages, page_size, sc, ss,
    sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sqo_t, sqo_h, skc_page, skc_slot, skc_h, svc_page, svc_slot, svc_h,
    HQ: tl.constexpr, HK: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr,
    BB: tl.constexpr,
):  # fmt: skip
    """Programs before first_k take heads of q, those before first_v heads of k, the others heads of v."""
    program, o_i = tl.program_id(0), tl.arange(0, HALF)
    if program < first_k:
        o_r = program * R + tl.arange(0, R)
        m_r, t, h = o_r < tokens * HQ, (o_r // HQ).to(tl.int64), o_r % HQ
        one, two = prepare(
            Q, QW, POSITIONS, COS, SIN, eps, t, h, m_r, rows, sc, ss, sq_t, sq_h, HALF, R, NORM
        )  # fmt: skip
        place, m = (t * sqo_t + h * sqo_h)[:, None] + o_i[None, :], m_r[:, None] & (o_i >= 0)[None, :]
        tl.store(QO + place, one, mask=m)
        tl.store(QO + place + HALF, two, mask=m)
    else:
        is_k = program < first_v
        o_r = (program - tl.where(is_k, first_k, first_v)) * R + tl.arange(0, R)
        m_r, t, h = o_r < tokens * HK, (o_r // HK).to(tl.int64), o_r % HK
        page, slot, known = place_of(
            TABLE, CU, LENGTHS, o_r // HK, m_r, batch, stable, columns, pages, page_size, R, BB
        )  # fmt: skip
        m = known[:, None] & (o_i >= 0)[None, :]
        if is_k:
            one, two = prepare(
                K, KW, POSITIONS, COS, SIN, eps, t, h, m_r, rows, sc, ss, sk_t, sk_h, HALF, R, NORM
            )  # fmt: skip
            place = (page * skc_page + slot * skc_slot + h * skc_h)[:, None] + o_i[None, :]
            tl.store(KC + place, one, mask=m)
            tl.store(KC + place + HALF, two, mask=m)
        else:
            source = (t * sv_t + h * sv_h)[:, None] + o_i[None, :]
            place = (page * svc_page + slot * svc_slot + h * svc_h)[:, None] + o_i[None, :]
            tl.store(VC + place, tl.load(V + source, mask=m), mask=m)
            tl.store(VC + place + HALF, tl.load(V + source + HALF, mask=m), mask=m)
