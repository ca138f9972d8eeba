"""Unified causal attention on a GPU in plain Triton: where a study may begin.

The order of every sum is that of the shipped kernels: chunks of keys at fixed positions, online softmax over
blocks of keys inside a chunk, chunks merged left to right; gradients as chains of the matrix unit. Nothing
else is done for speed: one kernel serves every regime, a program takes one tile of queries of one head and
walks all keys, every key looks its page up, every block is masked.
"""

import math

import torch
import triton
import triton.language as tl

CHUNK = 1024
EARLY_CHUNK = 256
EARLY_KEYS = 8192
KEY_BLOCK = 64
TILE = 64
WARPS = 8
STAGES = 1

KNOBS = {
    "CHUNK": ("numeric", (1024, 2048, 4096)),
    "EARLY_CHUNK": ("numeric", (256, 512, 1024)),
    "EARLY_KEYS": ("numeric", (4096, 8192, 16384)),
    "KEY_BLOCK": ("numeric", (32, 64)),
    "TILE": ("schedule", (16, 32, 64, 128)),
    "WARPS": ("schedule", (4, 8)),
    "STAGES": ("schedule", (1, 2, 3)),
}

LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2))
LOG2E_F32 = tl.constexpr(math.log2(math.e))


def numerics(constant_axes):
    return {"early_chunk": EARLY_CHUNK, "early_keys": EARLY_KEYS, "chunk": CHUNK, "key_block": KEY_BLOCK}


def schedule(axes, knobs):
    return {"tile": knobs["TILE"], "warps": knobs["WARPS"], "stages": knobs["STAGES"]}


# ---- Entry points.


def attention(q, k, v, cu_seqlens, max_seqlen, softmax_scale, out, lse):
    """Attend packed sequences: q [T, Hq, D], k and v [T, Hkv, D] into out [T, Hq, D], lse [Hq, T] or None."""
    strides = (0, *k.stride()[:2], 0, *v.stride()[:2])
    forward(q, k, v, cu_seqlens, None, None, max_seqlen, strides, softmax_scale, out, lse)


def paged_attention(
    q, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
    out, lse,
):  # fmt: skip
    """Attend new tokens q [T, Hq, D] over caches [pages, page_size, Hkv, D] by page_table [B, columns]."""
    strides = (*k_cache.stride()[:3], *v_cache.stride()[:3])
    forward(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        seqlens_k,
        page_table,
        max_seqlen_q,
        strides,
        softmax_scale,
        out,
        lse,
    )


def write_kv_cache(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k):
    """Write new keys and values [T, Hkv, D] into the caches; pages outside the cache are skipped."""
    tokens, kv_heads, depth = k.shape
    if tokens:
        launch(
            *(write_kernel, tokens * kv_heads, 1, 1),
            *(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k, len(seqlens_k)),
            *(page_table.stride(0), page_table.shape[1], *k_cache.shape[:2], *k.stride()[:2]),
            *(*v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], kv_heads, depth),
        )


def attention_backward(q, k, v, out, lse, dout, cu_seqlens, max_seqlen, softmax_scale, dq, dk, dv):
    """Gradients of packed attention into dq, dk and dv; a dq of None, or both others None, is left out."""
    (tokens, query_heads, depth), kv_heads, batch = q.shape, k.shape[1], len(cu_seqlens) - 1
    if not tokens or not max_seqlen:
        return
    group, tile = query_heads // kv_heads, 32
    tiles = triton.cdiv(max_seqlen, tile)
    delta = torch.empty(query_heads, tokens, dtype=torch.float32, device=q.device)
    launch(
        *(delta_kernel, tiles * query_heads * batch, 4, 1),
        *(out, dout, delta, cu_seqlens, tiles, tokens, *out.stride()[:2], *dout.stride()[:2]),
        *(query_heads, depth, tile),
    )
    inputs = (q, k, v, dout, lse, delta)
    scales = (float(softmax_scale) * LOG2E, float(softmax_scale))
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *dout.stride()[:2])
    sizes = (tiles, tokens, lse.stride(0))
    if dq is not None:
        launch(
            *(dq_kernel, tiles * query_heads * batch, 4, 1),
            *(*inputs, dq, cu_seqlens, *scales, *sizes, *strides, *dq.stride()[:2]),
            *(query_heads, group, depth, tile, tile),
        )
    if dk is not None or dv is not None:
        dk, dv = torch.empty_like(k) if dk is None else dk, torch.empty_like(v) if dv is None else dv
        launch(
            *(dkv_kernel, tiles * kv_heads * batch, 4, 1),
            *(*inputs, dk, dv, cu_seqlens, *scales, *sizes, *strides, *dk.stride()[:2], *dv.stride()[:2]),
            *(query_heads, group, depth, tile, tile),
        )


# ---- Launches.


def launch(kernel, programs, warps, stages, *arguments):
    kernel[(programs,)](*arguments, num_warps=warps, num_stages=stages, enable_fp_fusion=False)


def forward(q, k, v, cu, lengths, table, longest, strides, scale, out, lse):
    (tokens, query_heads, depth), kv_heads, batch = q.shape, k.shape[-2], len(cu) - 1
    if not tokens or not longest:
        return
    tiles, paged = triton.cdiv(longest, TILE), table is not None
    cache = (table.stride(0), table.shape[1], k.shape[0], k.shape[1]) if paged else (0, 0, 0, 1)
    lengths, table = (lengths, table) if paged else (cu, cu)
    log_sums, has_lse = (cu, False) if lse is None else (lse, True)
    launch(
        *(forward_kernel, tiles * query_heads * batch, WARPS, STAGES),
        *(q, k, v, out, log_sums, cu, lengths, table, float(scale) * LOG2E, tiles, *q.stride()[:2]),
        *(*strides, *out.stride()[:2], log_sums.stride(0), *cache),
        *(query_heads, query_heads // kv_heads, depth, TILE, KEY_BLOCK, EARLY_CHUNK, EARLY_KEYS, CHUNK),
        *(paged, has_lse),
    )


# ---- Device. p_ pointers, b_ values of a block, o_ offsets, m_ masks.


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
def merge(M, L, A, m, l, acc):
    """One chunk (m, l, acc) into the total."""
    Mn = tl.maximum(M, m)
    Ms = tl.where(Mn == float("-inf"), 0.0, Mn)
    a0 = tl.exp2(M - Ms)
    a1 = tl.exp2(m - Ms)
    A = tl.fma(acc, tl.broadcast_to(a1[:, None], A.shape), A * a0[:, None])
    return Mn, tl.fma(l, a1, L * a0), A


@triton.jit(do_not_specialize=["tiles", "slse_h", "stable", "columns", "pages", "page_size"])
def forward_kernel(
    Q, K, V, O, LSE, CU, LENGTHS, TABLE, scale, tiles,
    sq_t, sq_h, sk_page, sk_slot, sk_h, sv_page, sv_slot, sv_h, so_t, so_h, slse_h,
    stable, columns, pages, page_size,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EARLY: tl.constexpr, UNTIL: tl.constexpr, CHUNK: tl.constexpr,
    PAGED: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """A tile of BM rows of one head of one request: all its keys."""
    pid = tl.program_id(0)
    tile = pid % tiles
    h = pid // tiles % HQ
    b = pid // tiles // HQ
    token0 = tl.load(CU + b)
    r = tl.load(CU + b + 1) - token0
    n = r
    if PAGED:
        n = tl.minimum(tl.load(LENGTHS + b), columns * page_size)
    if tile * BM >= r:
        return
    o_r = tile * BM + tl.arange(0, BM)
    o_d = tl.arange(0, D)
    m_r = o_r < r
    b_t = tl.minimum(o_r, r - 1)
    b_pos = n - r + b_t
    b_q = tl.load(Q + ((token0 + b_t).to(tl.int64) * sq_t + h * sq_h)[:, None] + o_d[None, :])
    p_k = K + h // G * sk_h
    p_v = V + h // G * sv_h
    end = tl.minimum(n, n - r + tile * BM + BM)
    M = tl.full((BM,), float("-inf"), tl.float32)
    L = tl.zeros((BM,), tl.float32)
    A = tl.zeros((BM, D), tl.float32)
    m = tl.full((BM,), float("-inf"), tl.float32)
    sums = tl.zeros((BM, 8), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for pos in range(0, end, BN):
        opens = tl.where(pos < UNTIL, pos % EARLY, (pos - UNTIL) % CHUNK) == 0
        if opens & (pos > 0):
            M, L, A = merge(M, L, A, m, tl.max(sums, 1), acc)
            m = tl.full((BM,), float("-inf"), tl.float32)
            sums = tl.zeros((BM, 8), tl.float32)
            acc = tl.zeros((BM, D), tl.float32)
        o_n = pos + tl.arange(0, BN)
        m_n = o_n < n
        if PAGED:
            page = tl.load(TABLE + b.to(tl.int64) * stable + o_n // page_size, mask=m_n, other=0)
            page = tl.maximum(tl.minimum(page, pages - 1), 0).to(tl.int64)
            slot = (o_n % page_size).to(tl.int64)
            o_k = page * sk_page + slot * sk_slot
            o_v = page * sv_page + slot * sv_slot
        else:
            o_k = (token0 + o_n).to(tl.int64) * sk_slot
            o_v = (token0 + o_n).to(tl.int64) * sv_slot
        b_k = tl.load(p_k + o_k[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
        b_v = tl.load(p_v + o_v[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
        s = tl.dot(b_q, b_k.T)
        s = tl.where(o_n[None, :] <= b_pos[:, None], s, float("-inf"))
        mn = tl.maximum(m, tl.max(s, 1) * scale)
        ms = tl.where(mn == float("-inf"), 0.0, mn)
        x = tl.fma(s, tl.zeros(s.shape, tl.float32) + scale, tl.broadcast_to(-ms[:, None], s.shape))
        p = tl.exp2(x).to(b_q.dtype)
        a = tl.exp2(m - ms)
        acc = tl.dot(p, b_v, acc * a[:, None])
        sums = tl.dot(p, tl.full((BN, 8), 1.0, b_q.dtype), sums * a[:, None])
        m = mn
    M, L, A = merge(M, L, A, m, tl.max(sums, 1), acc)
    inv = tl.div_rn(tl.full(L.shape, 1.0, tl.float32), L)
    o = canonical(A * inv[:, None] + 0.0, O.dtype.element_ty)
    o_t = (token0 + o_r).to(tl.int64)
    tl.store(O + (o_t * so_t + h * so_h)[:, None] + o_d[None, :], o, mask=m_r[:, None])
    if HAS_LSE:
        b_lse = canonical((M + tl.log2(L)) * LN2, tl.float32)
        tl.store(LSE + h.to(tl.int64) * slse_h + o_t, b_lse, mask=m_r)


@triton.jit(do_not_specialize=["batch", "stable", "columns", "pages", "page_size"])
def write_kernel(
    K, V, KC, VC, TABLE, CU, LENGTHS, batch, stable, columns, pages, page_size,
    sk_t, sk_h, sv_t, sv_h, skc_page, skc_slot, skc_h, svc_page, svc_slot, svc_h,
    HK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Copy the key and value of one new token, one head, to their place."""
    t = tl.program_id(0) // HK
    h = tl.program_id(0) % HK
    if t >= tl.load(CU + batch):
        return  # rows after the last request are nobody's
    b = 0
    for i in range(1, batch):
        if tl.load(CU + i) <= t:
            b = i
    position = tl.load(LENGTHS + b) - tl.load(CU + b + 1) + t
    if (position < 0) | (position // page_size >= columns):
        return
    page = tl.load(TABLE + b * stable + position // page_size)
    if (page < 0) | (page >= pages):
        return
    o_d = tl.arange(0, D)
    page = page.to(tl.int64)
    slot = position % page_size
    b_k = tl.load(K + t.to(tl.int64) * sk_t + h * sk_h + o_d)
    b_v = tl.load(V + t.to(tl.int64) * sv_t + h * sv_h + o_d)
    tl.store(KC + page * skc_page + slot * skc_slot + h * skc_h + o_d, b_k)
    tl.store(VC + page * svc_page + slot * svc_slot + h * svc_h + o_d, b_v)


@triton.jit
def halve(x, BM: tl.constexpr, W: tl.constexpr):
    """x[:, d] + x[:, d + W/2]; a sum of two numbers has no order."""
    return tl.sum(tl.reshape(x, (BM, 2, W // 2)), 1)


@triton.jit(do_not_specialize=["tiles", "tokens"])
def delta_kernel(
    O, DO, DELTA, CU, tiles, tokens, so_t, so_h, sdo_t, sdo_h,
    HQ: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """DELTA[h] = -sum_d O * dO."""
    pid = tl.program_id(0)
    o_r = pid % tiles * BM + tl.arange(0, BM)
    h = pid // tiles % HQ
    b = pid // tiles // HQ
    token0 = tl.load(CU + b)
    m_r = o_r < tl.load(CU + b + 1) - token0
    o_d = tl.arange(0, D)
    o_t = (token0 + o_r).to(tl.int64)
    b_o = tl.load(O + (o_t * so_t + h * so_h)[:, None] + o_d[None, :], mask=m_r[:, None], other=0.0)
    b_do = tl.load(DO + (o_t * sdo_t + h * sdo_h)[:, None] + o_d[None, :], mask=m_r[:, None], other=0.0)
    x = b_o.to(tl.float32) * b_do.to(tl.float32)
    if D == 128:
        x = halve(x, BM, 128)
    x = halve(halve(halve(halve(halve(x, BM, 64), BM, 32), BM, 16), BM, 8), BM, 4)
    tl.store(DELTA + h * tokens + o_t, -tl.sum(x, 1), mask=m_r)


@triton.jit
def rows_of(p, o_t, stride, m, D: tl.constexpr):
    """Rows of one head, [B, D], zero where `m` is not set."""
    return tl.load(
        p + (o_t.to(tl.int64) * stride)[:, None] + tl.arange(0, D)[None, :], mask=m[:, None], other=0.0
    )


@triton.jit(do_not_specialize=["tiles", "tokens", "slse_h"])
def dq_kernel(
    Q, K, V, DO, LSE, DELTA, DQ, CU, scale, out_scale, tiles, tokens, slse_h,
    sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sdo_t, sdo_h, sdq_t, sdq_h,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dQ of BM queries of one head: key blocks ascending from position 0."""
    pid = tl.program_id(0)
    tile = pid % tiles
    h = pid // tiles % HQ
    b = pid // tiles // HQ
    token0 = tl.load(CU + b)
    r = tl.load(CU + b + 1) - token0
    if tile * BM >= r:
        return
    o_m = tile * BM + tl.arange(0, BM)
    m_m = o_m < r
    b_q = rows_of(Q + h * sq_h, token0 + o_m, sq_t, m_m, D)
    b_do = rows_of(DO + h * sdo_h, token0 + o_m, sdo_t, m_m, D)
    b_lse = tl.load(LSE + h.to(tl.int64) * slse_h + token0 + o_m, mask=m_m, other=float("inf"))
    b_lse = -(b_lse * LOG2E_F32)
    b_delta = tl.load(DELTA + h * tokens + token0 + o_m, mask=m_m, other=0.0)
    dq = tl.zeros((BM, D), tl.float32)
    for pos in range(0, tl.minimum(r, tile * BM + BM), BN):
        o_n = pos + tl.arange(0, BN)
        b_k = rows_of(K + h // G * sk_h, token0 + o_n, sk_t, o_n < r, D)
        b_v = rows_of(V + h // G * sv_h, token0 + o_n, sv_t, o_n < r, D)
        s = tl.dot(b_q, b_k.T)
        x = tl.fma(s, tl.zeros((BM, BN), tl.float32) + scale, tl.broadcast_to(b_lse[:, None], (BM, BN)))
        dp = tl.dot(b_do, b_v.T, tl.broadcast_to(b_delta[:, None], (BM, BN)))
        ds = tl.where(o_n[None, :] <= o_m[:, None], tl.exp2(x) * dp, 0.0)
        dq = tl.dot(ds.to(b_q.dtype), b_k, dq)
    dq = canonical(dq * out_scale + 0.0, DQ.dtype.element_ty)
    p_dq = DQ + ((token0 + o_m).to(tl.int64) * sdq_t + h * sdq_h)[:, None] + tl.arange(0, D)[None, :]
    tl.store(p_dq, dq, mask=m_m[:, None])


@triton.jit(do_not_specialize=["tiles", "tokens", "slse_h"])
def dkv_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV, CU, scale, out_scale, tiles, tokens, slse_h,
    sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sdo_t, sdo_h, sdk_t, sdk_h, sdv_t, sdv_h,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dK and dV of BN keys of one KV head: query heads in order, queries ascending."""
    pid = tl.program_id(0)
    tile = pid % tiles
    g = pid // tiles % (HQ // G)
    b = pid // tiles // (HQ // G)
    token0 = tl.load(CU + b)
    r = tl.load(CU + b + 1) - token0
    if tile * BN >= r:
        return
    o_n = tile * BN + tl.arange(0, BN)
    m_n = o_n < r
    b_k = rows_of(K + g * sk_h, token0 + o_n, sk_t, m_n, D)
    b_v = rows_of(V + g * sv_h, token0 + o_n, sv_t, m_n, D)
    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    for h in range(g * G, g * G + G):
        for pos in range(tile * BN // BM * BM, r, BM):
            o_m = pos + tl.arange(0, BM)
            m_m = o_m < r
            b_q = rows_of(Q + h * sq_h, token0 + o_m, sq_t, m_m, D)
            b_do = rows_of(DO + h * sdo_h, token0 + o_m, sdo_t, m_m, D)
            p_lse = LSE + h * slse_h + token0 + o_m
            b_lse = -(tl.load(p_lse, mask=m_m, other=float("inf")) * LOG2E_F32)
            b_delta = tl.load(DELTA + h * tokens + token0 + o_m, mask=m_m, other=0.0)
            m_mn = o_n[:, None] <= o_m[None, :]
            # [BN, BM]
            s = tl.dot(b_k, b_q.T)
            x = tl.fma(s, tl.zeros((BN, BM), tl.float32) + scale, tl.broadcast_to(b_lse[None, :], (BN, BM)))
            p = tl.where(m_mn, tl.exp2(x), 0.0)
            dp = tl.dot(b_v, b_do.T, tl.broadcast_to(b_delta[None, :], (BN, BM)))
            dv = tl.dot(p.to(b_k.dtype), b_do, dv)
            ds = tl.where(m_mn, p * dp, 0.0)
            dk = tl.dot(ds.to(b_k.dtype), b_q, dk)
    p_o = (token0 + o_n).to(tl.int64)
    o_d = tl.arange(0, D)
    p_dk = DK + (p_o * sdk_t + g * sdk_h)[:, None] + o_d[None, :]
    p_dv = DV + (p_o * sdv_t + g * sdv_h)[:, None] + o_d[None, :]
    tl.store(p_dk, canonical(dk * out_scale + 0.0, DK.dtype.element_ty), mask=m_n[:, None])
    tl.store(p_dv, canonical(dv + 0.0, DV.dtype.element_ty), mask=m_n[:, None])
