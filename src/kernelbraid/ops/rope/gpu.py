"""Rotary position embedding on the GPU, in portable Triton: forth and back, bfloat16 or float16.

    a = x[t, h, i]    b = x[t, h, D/2 + i]    c, s = cos, sin[positions[t], i]
    out[t, h, i] = round16(fma(-b, s, a * c))    out[t, h, D/2 + i] = round16(fma(a, s, b * c))

for q and for k, in one launch; tables are float32. Gradients turn back, by the negative sine. A position
outside the tables gives NaN and reads nothing. Free of bits: heads of a program, warps. Fusion is off: what
is fused is written so.
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
MOST_ROWS = 128


def numerics(constant_axes):
    return {}


def schedule(axes, knobs):
    """Choose the heads of a program and its warps: small calls are spread over the multiprocessors."""
    half, heads = triton.next_power_of_2(axes["head_dim"] // 2), axes["query_heads"] + axes["kv_heads"]
    rows = max(1, min(MOST_ROWS, knobs["TILE"] // half))
    while rows > 1 and axes["tokens"] * heads < 264 * rows:
        rows //= 2
    return {"rows": rows, "warps": max(1, min(knobs["WARPS"], rows * half // 128))}


def launch(kernel, programs, warps, *arguments, **options):
    kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=False, **options)


# ---- Entry points. Tensors on one device: heads [T, H, D] in 16 bits, tables [positions, D/2] float32.


def rope(q, k, positions, cos, sin, q_out, k_out):
    """Turn the heads of q and k into q_out and k_out."""
    rotate_both(q, k, positions, cos, sin, q_out, k_out, False)


def rope_backward(positions, cos, sin, dq_out, dk_out, dq, dk):
    """Write the gradients, turned back; one that is None is left out."""
    rotate_both(dq_out, dk_out, positions, cos, sin, dq, dk, True)


def rotate_both(q, k, positions, cos, sin, q_out, k_out, back):
    (tokens, query_heads, depth), kv_heads = q.shape, k.shape[1]
    if not tokens or (q_out is None and k_out is None):
        return
    axes = {"query_heads": query_heads, "kv_heads": kv_heads, "head_dim": depth, "tokens": tokens}
    plan = schedule(axes, CHOSEN)
    programs = [
        0 if out is None else triton.cdiv(tokens * x.shape[1], plan["rows"])
        for x, out in ((q, q_out), (k, k_out))
    ]
    q_out, k_out = (x if out is None else out for x, out in ((q, q_out), (k, k_out)))
    launch(
        *(rope_kernel, sum(programs), plan["warps"]),
        *(q, k, positions, cos, sin, q_out, k_out, tokens, programs[0], cos.shape[0]),
        *(cos.stride(0), sin.stride(0), *q.stride()[:2], *k.stride()[:2]),
        *(*q_out.stride()[:2], *k_out.stride()[:2], query_heads, kv_heads, depth // 2),
        *(triton.next_power_of_2(depth // 2), plan["rows"], back),
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
def rotate_heads(
    X, POSITIONS, COS, SIN, OUT, tokens, program, rows, sc, ss, sx_t, sx_h, so_t, so_h,
    H: tl.constexpr, HALF: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """R heads, of as many tokens as they are of."""
    o_r = program * R + tl.arange(0, R)
    o_i = tl.arange(0, W)
    m_r, m_i = o_r < tokens * H, o_i < HALF
    m = m_r[:, None] & m_i[None, :]
    t, h = (o_r // H).to(tl.int64), o_r % H
    p = tl.load(POSITIONS + t, mask=m_r, other=0)
    known = (p >= 0) & (p < rows)
    m_p, p = known[:, None] & m, p.to(tl.int64)
    c = tl.load(COS + p[:, None] * sc + o_i[None, :], mask=m_p, other=float("nan"))
    s = tl.load(SIN + p[:, None] * ss + o_i[None, :], mask=m_p, other=float("nan"))
    if BACK:
        s = -s
    place = (t * sx_t + h * sx_h)[:, None] + o_i[None, :]
    a = tl.load(X + place, mask=m, other=0.0).to(tl.float32)
    b = tl.load(X + place + HALF, mask=m, other=0.0).to(tl.float32)
    place = (t * so_t + h * so_h)[:, None] + o_i[None, :]
    tl.store(OUT + place, canonical(tl.fma(-b, s, a * c), OUT.dtype.element_ty), mask=m)
    tl.store(OUT + place + HALF, canonical(tl.fma(a, s, b * c), OUT.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["tokens", "first_k", "rows"], do_not_specialize_on_alignment=["POSITIONS"])
def rope_kernel(
    Q, K, POSITIONS, COS, SIN, QO, KO, tokens, first_k, rows, sc, ss,
    sq_t, sq_h, sk_t, sk_h, sqo_t, sqo_h, sko_t, sko_h,
    HQ: tl.constexpr, HK: tl.constexpr, HALF: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """Programs before first_k take heads of q, the others heads of k."""
    program = tl.program_id(0)
    if program < first_k:
        rotate_heads(
            Q, POSITIONS, COS, SIN, QO, tokens, program, rows, sc, ss, sq_t, sq_h, sqo_t, sqo_h,
            HQ, HALF, W, R, BACK,
        )  # fmt: skip
    else:
        rotate_heads(
            K, POSITIONS, COS, SIN, KO, tokens, program - first_k, rows, sc, ss, sk_t, sk_h, sko_t, sko_h,
            HK, HALF, W, R, BACK,
        )  # fmt: skip
