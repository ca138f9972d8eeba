"""Unified causal attention on the GPU, in portable Triton: every regime of the forward, and its gradients.

    O[t, h]   = sum_j softmax_j(c * q[t, h] . k[j, g]) * v[j, g]        g = h // group, j = 0 .. position of t
    LSE[h, t] = log sum_j exp(c * q[t, h] . k[j, g])

Order of every sum, forward. Keys fall into chunks at fixed positions: EARLY_CHUNK keys each up to position
EARLY_KEYS, CHUNK keys each after it. Inside a chunk, online softmax from an empty state over blocks of
KEY_BLOCK keys; dot products are chains of the matrix unit over ascending groups of its K; the weights' sum is
one more such chain, over the rounded weights, against ones. Chunks merge left to right by one formula, the
first one too, into (-inf, 0, +0). Prefill walks the chunks; decode computes them in parallel and merges in
the same order.

Backward. delta[h, t] = sum_d O * dO by halving; dQ adds key blocks from position 0 up; dK and dV add the
query heads of the group in order and within a head the queries from the sequence's first up: each one chain
of the matrix unit per element, no atomics.

Free of bits: tiles of queries (and, backward, of keys), warps, stages, which operand is which, packing of
query heads, pointers or bulk copies, one launch or two, order of programs, page size. Fusion is off: every
multiply-add that is meant to be fused is written as one.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

CHUNK = 1024
EARLY_CHUNK = 256
EARLY_KEYS = 8192
KEY_BLOCK = 64
TILE = 64
PACK_ROWS = 64
PROGRAMS = 264
WALK_PROGRAMS = 96
WALK_KEYS = 256
STAGES = 3
HEADS_TOGETHER_KEYS = 65536
DEPENDENT_LAUNCH = 1
MERGE_WARPS = 1
MERGE_AHEAD = 16

KNOBS = {
    "CHUNK": ("numeric", (1024, 2048, 4096)),
    "EARLY_CHUNK": ("numeric", (256, 512, 1024)),
    "EARLY_KEYS": ("numeric", (4096, 8192, 16384)),
    "KEY_BLOCK": ("numeric", (32, 64)),
    "TILE": ("schedule", (64, 128)),
    "PACK_ROWS": ("schedule", (16, 32, 64)),
    "PROGRAMS": ("schedule", (0, 132, 264, 528, 1056)),
    "WALK_PROGRAMS": ("schedule", (64, 96, 128, 256)),
    "WALK_KEYS": ("schedule", (256, 512, 1024)),
    "STAGES": ("schedule", (2, 3, 4)),
    "HEADS_TOGETHER_KEYS": ("schedule", (1, 32768, 65536, 131072)),
    "DEPENDENT_LAUNCH": ("schedule", (0, 1)),
    "MERGE_WARPS": ("schedule", (1, 2, 4)),
    "MERGE_AHEAD": ("schedule", (8, 16, 32)),
}

SMALL_KEY_BLOCK = 32
PAGES_OF_128_ROWS = (16, 32, 64)
LARGEST_WORKSPACE = 1 << 26  # floats: 256 MiB
PAD = 128  # rows behind each sequence of the backward's sums
LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2))
LOG2E_F32 = tl.constexpr(math.log2(math.e))


# ---- Choices.


def architecture_of(device):
    """Compute capability as one number: 90 is 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def large(architecture):
    """Whether tiles have the room of sm_90 and sm_100: 227 KiB of shared memory, bulk copies."""
    return architecture // 10 in (9, 10)


def key_block(architecture):
    return KEY_BLOCK if large(architecture) else min(KEY_BLOCK, SMALL_KEY_BLOCK)


def chunk_count(keys):
    """Chunks of a request with that many keys."""
    if keys <= EARLY_KEYS:
        return triton.cdiv(keys, EARLY_CHUNK)
    return EARLY_KEYS // EARLY_CHUNK + triton.cdiv(keys - EARLY_KEYS, CHUNK)


def numerics(constant_axes):
    """Numeric knobs; of the current device, unless the axes name an `architecture`."""
    architecture = constant_axes.get("architecture") or architecture_of(None)
    order = {"early_chunk": EARLY_CHUNK, "early_keys": EARLY_KEYS, "chunk": CHUNK}
    return order | {"key_block": key_block(architecture)}


def schedule(axes, knobs):
    """Choose tiles and launches; no choice changes bits.

    Axes: query_heads, kv_heads, head_dim, batch, query_length, key_length, page_size (absent: packed), and,
    where they are not those of the current device and of aligned inputs, architecture and bulk (keys come by
    bulk copies).

    Returns `tile` rows of which `pack` query heads make a token's, `span` keys of a program (0: all, in one
    launch), `swap` (rows are the second operand), `warps`, `stages`.
    """
    group = axes["query_heads"] // axes["kv_heads"]
    architecture = axes.get("architecture") or architecture_of(None)
    length, keys, page = axes["query_length"], axes["key_length"], axes.get("page_size", 0)
    rows = length * group
    packed = rows <= knobs["PACK_ROWS"] or length <= 16
    bulk = axes.get("bulk", large(architecture) and length > 16 and not page)
    tile = min(64, max(16, triton.next_power_of_2(rows))) if packed else knobs["TILE"]
    # What does not spill: 128 rows on 8 warps where the page size is one of those compiled so and no split is
    # near, otherwise 64 rows on 8; small tiles without pages take 32 rows as the second operand.
    if page and not packed:
        programs = axes["batch"] * axes["query_heads"] * triton.cdiv(length, 128)
        tile = 128 if page in PAGES_OF_128_ROWS and programs >= knobs["WALK_PROGRAMS"] else 64
    elif not large(architecture):
        tile = min(tile, 32)
    programs = axes["batch"] * axes["query_heads"] * triton.cdiv(length * (group if packed else 1), tile)
    programs //= group if packed else 1
    span = EARLY_CHUNK
    while large(architecture) and span < keys and programs * triton.cdiv(keys, span) > knobs["PROGRAMS"]:
        span *= 2
    partials = axes["batch"] * length * axes["query_heads"] * chunk_count(keys) * (axes["head_dim"] + 2)
    split = bool(
        page
        and keys > max(span, knobs["WALK_KEYS"])
        and programs < knobs["WALK_PROGRAMS"]
        and partials <= LARGEST_WORKSPACE
    )
    few = not large(architecture) or (packed and keys <= EARLY_CHUNK)
    return {
        "tile": tile,
        "pack": group if packed else 1,
        "span": span if split else 0,
        "swap": tile <= 32,
        # computing addresses takes registers that 64 rows on 4 warps do not have
        "warps": 8 if tile == 128 or (tile == 64 and (split or not bulk)) else 4,
        "stages": 2 if few else knobs["STAGES"],
    }


def schedule_knobs():
    """The schedule knobs as this source sets them."""
    tiles = {"TILE": TILE, "PACK_ROWS": PACK_ROWS, "STAGES": STAGES}
    programs = {"PROGRAMS": PROGRAMS, "WALK_PROGRAMS": WALK_PROGRAMS, "WALK_KEYS": WALK_KEYS}
    others = {"HEADS_TOGETHER_KEYS": HEADS_TOGETHER_KEYS, "DEPENDENT_LAUNCH": DEPENDENT_LAUNCH}
    return tiles | programs | others


def backward_tiles(depth, architecture):
    """Queries, keys, warps and stages of the gradient kernels' tiles."""
    if large(architecture):
        return {"dq": (128, 64, 8, 3), "dkv": (64 if depth == 64 else 32, 128, 8, 3)}
    return {"dq": (64, 32, 4, 2), "dkv": (32, 64, 8, 2)}


def page_window(page, split):
    """Keys whose pages a program holds at a time, and the page numbers that it takes."""
    window = max(CHUNK, EARLY_CHUNK) if split else 1024 if page >= 4 else EARLY_CHUNK
    return window, max(16, triton.next_power_of_2(window // page + (EARLY_CHUNK % page > 0) * 2))


# ---- Entry points. Tensors on one device: bfloat16 or float16, offsets and lengths int32, lse float32.


def attention(q, k, v, cu_seqlens, max_seqlen, softmax_scale, out, lse):
    """Attend packed sequences: q [T, Hq, D], k and v [T, Hkv, D] into out [T, Hq, D], lse [Hq, T] or None."""
    forward(q, k, v, None, cu_seqlens, None, max_seqlen, max_seqlen, softmax_scale, out, lse)


def paged_attention(
    q, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
    out, lse,
):  # fmt: skip
    """Attend new tokens q [T, Hq, D] over caches [pages, page_size, Hkv, D] by page_table [B, columns]."""
    sizes = (max_seqlen_q, max_seqlen_k)
    forward(q, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k, *sizes, softmax_scale, out, lse)


def write_kv_cache(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k):
    """Write new keys and values [T, Hkv, D] into the caches; pages outside the cache are skipped."""
    (tokens, kv_heads, depth), block = k.shape, 8
    if not tokens:
        return
    launch(
        *(write_cache_kernel, triton.cdiv(tokens, block) * kv_heads, 4, 3),
        *(k, v, k_cache, v_cache, page_table, cu_seqlens_q, seqlens_k, tokens, len(seqlens_k)),
        *(page_table.stride(0), page_table.shape[1], *k_cache.shape[:2], *k.stride()[:2], *v.stride()[:2]),
        *(*k_cache.stride()[:3], *v_cache.stride()[:3], kv_heads, depth, block, 256),
    )


def attention_backward(q, k, v, out, lse, dout, cu_seqlens, max_seqlen, softmax_scale, dq, dk, dv):
    """Gradients of packed attention into dq, dk and dv; a dq of None, or both others None, is left out."""
    (tokens, query_heads, depth), kv_heads, batch = q.shape, k.shape[1], len(cu_seqlens) - 1
    if not tokens or not max_seqlen:
        return
    group, padded = query_heads // kv_heads, tokens + batch * PAD
    tiles = backward_tiles(depth, architecture_of(q.device))
    x = torch.empty(2, query_heads, padded, dtype=torch.float32, device=q.device)
    rows = triton.cdiv(max_seqlen + PAD, 32)
    launch(
        *(delta_kernel, rows * query_heads * batch, 4, 3),
        *(out, dout, lse, x, cu_seqlens, padded, rows, lse.stride(0), *out.stride()[:2], *dout.stride()[:2]),
        *(query_heads, depth, 32, PAD),
    )
    inputs, scales = (q, k, v, dout, x), (float(softmax_scale) * LOG2E, float(softmax_scale))
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *dout.stride()[:2])
    heads = max(1, HEADS_TOGETHER_KEYS // max_seqlen)
    if dq is not None:
        rows, keys, warps, stages = tiles["dq"]
        count, groups = triton.cdiv(max_seqlen, rows), batch * query_heads
        launch(
            *(dq_kernel, count * groups, warps, stages),
            *(*inputs, dq, cu_seqlens, *scales, padded, *strides, *dq.stride()[:2]),
            *(count, groups, min(groups, heads * group), query_heads, group, depth, rows, keys, PAD),
        )
    if dk is not None or dv is not None:
        dk, dv = torch.empty_like(k) if dk is None else dk, torch.empty_like(v) if dv is None else dv
        rows, keys, warps, stages = tiles["dkv"]
        count, groups = triton.cdiv(max_seqlen, keys), batch * kv_heads
        launch(
            *(dkv_kernel, count * groups, warps, stages),
            *(*inputs, dk, dv, cu_seqlens, *scales, padded, *strides, *dk.stride()[:2], *dv.stride()[:2]),
            *(count, groups, min(groups, heads), query_heads, group, depth, rows, keys, PAD),
        )


# ---- Launches.


def launch(kernel, programs, warps, stages, *arguments, **options):
    kernel[(programs,)](*arguments, num_warps=warps, num_stages=stages, enable_fp_fusion=False, **options)


def bulk_descriptor(x, rows):
    """A descriptor of x [T, H, D] in tiles [rows, 1, D], or None if its addresses are not multiples of 16."""
    aligned = x.data_ptr() % 16 == 0 and all(n * x.element_size() % 16 == 0 for n in x.stride()[:-1])
    if not aligned or not x.numel():
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, 1, x.shape[-1]])


def forward(q, k, v, table, cu, lengths, longest, keys, scale, out, lse):
    """Launch the forward kernels; table and lengths are None for packed sequences."""
    (tokens, query_heads, depth), kv_heads, batch = q.shape, k.shape[-2], len(cu) - 1
    if not tokens or not longest:
        return
    paged, architecture = table is not None, architecture_of(q.device)
    block, group = key_block(architecture), query_heads // kv_heads
    descriptors = (None, None)
    if large(architecture) and not paged and longest > 16:
        descriptors = bulk_descriptor(k, block), bulk_descriptor(v, block)
    axes = {"query_heads": query_heads, "kv_heads": kv_heads, "head_dim": depth, "batch": batch}
    axes |= {"query_length": longest, "key_length": keys, "page_size": k.shape[1] if paged else 0}
    axes |= {"architecture": architecture, "bulk": all(descriptors)}
    plan = schedule(axes, schedule_knobs())
    pack, split = plan["pack"], plan["span"] > 0
    tiles, groups = triton.cdiv(longest * pack, plan["tile"]), batch * query_heads // pack
    # ptxas would spill in small tiles to fit more programs onto a multiprocessor
    registers = {} if large(architecture) else {"maxnreg": 255}
    span, chunks = plan["span"] or keys, chunk_count(keys) if split else 1
    together = max(1, HEADS_TOGETHER_KEYS // max(keys, 1)) * (group // pack)
    together, parts = groups if split else min(groups, together), triton.cdiv(keys, span)
    use_bulk = all(descriptors) and not plan["swap"] and not split
    page, (window, ids) = 0, (1 << 30, 1)
    if paged:
        page, (window, ids) = k.shape[1], page_window(k.shape[1], split)
    sums = torch.empty(2, tokens * query_heads * chunks if split else 0, dtype=torch.float32, device=q.device)
    partials = torch.empty(sums.shape[1] * depth, dtype=torch.float32, device=q.device) if split else sums
    dependent = bool(DEPENDENT_LAUNCH and split and large(architecture))
    log_sums, has_lse = (sums, False) if lse is None else (lse, True)
    lengths, pages = (lengths, table) if paged else (cu, cu)
    cache = (table.stride(0), table.shape[1], k.shape[0]) if paged else (0, 0, 0)
    strides = (*k.stride()[:3], *v.stride()[:3]) if paged else (0, *k.stride()[:2], 0, *v.stride()[:2])
    order = (EARLY_CHUNK, EARLY_KEYS, CHUNK)
    launch(
        *(attention_fwd_kernel, tiles * groups * parts, plan["warps"], plan["stages"]),
        *(q, *(descriptors if use_bulk else (k, v)), out, log_sums, cu, lengths, pages),
        *(partials, sums[0], sums[1], float(scale) * LOG2E, *q.stride()[:2], *strides, *out.stride()[:2]),
        *(log_sums.stride(0), *cache, chunks, parts, span, tiles, groups, together),
        *(query_heads, group, pack, depth, plan["tile"], block, *order, page, window, ids),
        *(use_bulk, split * (1 if span == EARLY_CHUNK else 2), plan["swap"], has_lse, dependent),
        **registers,
    )
    if split:
        launch(
            *(attention_merge_kernel, batch * longest * query_heads, MERGE_WARPS, 3),
            *(out, log_sums, cu, lengths, partials, sums[0], sums[1], *out.stride()[:2], log_sums.stride(0)),
            *(chunks, longest, query_heads, depth, *order, MERGE_AHEAD, has_lse, dependent),
            **({"launch_pdl": True} if dependent else {}),
        )


# ---- Device. p_ pointers, b_ values of a block, o_ offsets, m_ masks.


@triton.jit
def in_sets(pid, tiles, groups, together):
    """Tile and group of a program: sets of `together` groups share the second-level cache, tile by tile."""
    set_ = pid // (together * tiles)
    size = tl.minimum(together, groups - set_ * together)
    pid = pid - set_ * together * tiles
    return pid // size, set_ * together + pid % size


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
def opens_chunk(pos, EARLY: tl.constexpr, UNTIL: tl.constexpr, CHUNK: tl.constexpr):
    return tl.where(pos < UNTIL, pos % EARLY, (pos - UNTIL) % CHUNK) == 0


@triton.jit
def chunk_of(pos, EARLY: tl.constexpr, UNTIL: tl.constexpr, CHUNK: tl.constexpr):
    return tl.where(pos < UNTIL, pos // EARLY, UNTIL // EARLY + (pos - UNTIL) // CHUNK)


@triton.jit
def page_ids(p_table, lo, columns, pages, PAGE: tl.constexpr, IDS: tl.constexpr):
    """Pages of the keys from lo on, inside the cache whatever the table says."""
    o_p = lo // PAGE + tl.arange(0, IDS)
    b_p = tl.load(p_table + o_p, mask=o_p < columns, other=0)
    return tl.maximum(tl.minimum(b_p, pages - 1), 0)


@triton.jit
def key_tile(
    p, b_pages, pos, lo, n, row0, head, stride_page, stride_slot,
    BN: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr, MASK: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    """Keys or values at positions pos .. pos + BN - 1, [BN, D]; with MASK zero from n on."""
    o_n = pos + tl.arange(0, BN)
    o_d = tl.arange(0, D)
    if TMA:
        b = tl.reshape(p.load([row0 + pos, head, 0]), (BN, D))
        if MASK:
            b = tl.where((o_n < n)[:, None], b, 0.0)
        return b
    else:
        if PAGE == 0:
            o_r = o_n.to(tl.int64) * stride_slot
        elif PAGE % BN == 0 and SWAP:
            page = tl.sum(tl.where(tl.arange(0, b_pages.shape[0]) == pos // PAGE - lo // PAGE, b_pages, 0), 0)
            p += page.to(tl.int64) * stride_page + pos % PAGE * stride_slot
            o_r = tl.arange(0, BN) * stride_slot
        else:
            # the index is clamped because pipelined loads look ahead past the last block
            o_i = tl.minimum(o_n // PAGE - lo // PAGE, b_pages.shape[0] - 1)
            o_r = tl.gather(b_pages, o_i, 0).to(tl.int64) * stride_page
            o_r += (o_n % PAGE).to(tl.int64) * stride_slot
        if MASK:
            return tl.load(p + o_r[:, None] + o_d[None, :], mask=(o_n < n)[:, None], other=0.0)
        else:
            return tl.load(p + o_r[:, None] + o_d[None, :])


@triton.jit
def across(x, SWAP: tl.constexpr):
    """One number for each query row, shaped to meet a tile: rows are columns of the tile with SWAP."""
    if SWAP:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def merge(M, L, A, m, l, acc, SWAP: tl.constexpr):
    """One chunk (m, l, acc) into the total."""
    Mn = tl.maximum(M, m)
    Ms = tl.where(Mn == float("-inf"), 0.0, Mn)
    a0 = tl.exp2(M - Ms)
    a1 = tl.exp2(m - Ms)
    A = tl.fma(acc, tl.broadcast_to(across(a1, SWAP), A.shape), A * across(a0, SWAP))
    return Mn, tl.fma(l, a1, L * a0), A


@triton.jit
def lanes(b_sums, SWAP: tl.constexpr):
    """The weights' sum of each row, of its equal copies."""
    return tl.max(b_sums, 0 if SWAP else 1)


@triton.jit
def empty(BM: tl.constexpr, D: tl.constexpr, SWAP: tl.constexpr):
    m = tl.full((BM,), float("-inf"), tl.float32)
    if SWAP:
        return m, tl.zeros((16, BM), tl.float32), tl.zeros((D, BM), tl.float32)
    else:
        return m, tl.zeros((BM, 8), tl.float32), tl.zeros((BM, D), tl.float32)


@triton.jit
def store_chunk(p_acc, p_m, p_l, o_p, m_r, m, sums, acc, D: tl.constexpr, SWAP: tl.constexpr):
    """One chunk (m, l, acc) to the workspace."""
    o_d = tl.arange(0, D)
    tl.store(p_m + o_p, m, mask=m_r)
    tl.store(p_l + o_p, lanes(sums, SWAP), mask=m_r)
    tl.store(p_acc + across(o_p, SWAP) * D + across(o_d, not SWAP), acc, mask=across(m_r, SWAP))


@triton.jit
def see_blocks(
    b_q, p_k, p_v, b_pages, start, stop, lo, first, n, row0, head, b_pos, scale, M, L, A, m, sums, acc,
    p_acc, p_m, p_l, o_p, m_r, sk_page, sk_slot, sv_page, sv_slot,
    D: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr, UNTIL: tl.constexpr, CHUNK: tl.constexpr,
    PAGE: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr, MASK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys start .. stop - 1, with SPLIT == 1 inside one chunk. Otherwise a block
    that opens a chunk first merges or stores the one before: after its scores are under way, so that the
    matrix unit does not wait."""
    for pos in range(start, stop, BN):
        o_n = pos + tl.arange(0, BN)
        b_k = key_tile(p_k, b_pages, pos, lo, n, row0, head, sk_page, sk_slot, BN, D, PAGE, TMA, MASK, SWAP)
        m0 = m
        if SPLIT != 1:
            opens = opens_chunk(pos, EARLY, UNTIL, CHUNK)
            m0 = tl.where(opens, float("-inf"), m)
        # [BN, BM] with SWAP, otherwise [BM, BN]
        s = tl.dot(b_k, b_q) if SWAP else tl.dot(b_q, b_k.T)
        if MASK:
            s = tl.where(across(o_n, not SWAP) <= across(b_pos, SWAP), s, float("-inf"))
        mn = tl.maximum(m0, tl.max(s, 0 if SWAP else 1) * scale)
        ms = tl.where(mn == float("-inf"), 0.0, mn)
        x = tl.fma(s, tl.zeros(s.shape, tl.float32) + scale, tl.broadcast_to(across(-ms, SWAP), s.shape))
        p = tl.exp2(x).to(b_q.dtype)
        a = tl.exp2(m0 - ms)
        if SPLIT != 1:
            m = tl.where(opens, m, mn)  # the old m wherever it is used: keeps what follows behind the scores
            if opens & (pos > first):
                if SPLIT == 2:
                    o_c = o_p + chunk_of(pos - 1, EARLY, UNTIL, CHUNK)
                    store_chunk(p_acc, p_m, p_l, o_c, m_r, m, sums, acc, D, SWAP)
                else:
                    M, L, A = merge(M, L, A, m, lanes(sums, SWAP), acc, SWAP)
                sums = tl.zeros(sums.shape, tl.float32)
                acc = tl.zeros(acc.shape, tl.float32)
        b_v = key_tile(p_v, b_pages, pos, lo, n, row0, head, sv_page, sv_slot, BN, D, PAGE, TMA, MASK, SWAP)
        if SWAP:
            acc = tl.dot(b_v.T, p, acc * a[None, :])
            sums = tl.dot(tl.full((16, BN), 1.0, b_q.dtype), p, sums * a[None, :])
        else:
            acc = tl.dot(p, b_v, acc * a[:, None])
            sums = tl.dot(p, tl.full((BN, 8), 1.0, b_q.dtype), sums * a[:, None])
        m = mn
    return M, L, A, m, sums, acc


@triton.jit
def store_rows(
    p_o, p_lse, M, L, A, token0, o_r, r, head0, so_t, so_h, slse_h,
    PACK: tl.constexpr, D: tl.constexpr, HAS_LSE: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    o_d = tl.arange(0, D)
    b_head = head0 + o_r % PACK
    b_token = (token0 + o_r // PACK).to(tl.int64)
    m_r = o_r // PACK < r
    inv = tl.div_rn(tl.full(L.shape, 1.0, tl.float32), L)
    o = canonical(A * across(inv, SWAP) + 0.0, p_o.dtype.element_ty)
    p = p_o + b_token * so_t + b_head * so_h
    tl.store(across(p, SWAP) + across(o_d, not SWAP), o, mask=across(m_r, SWAP))
    if HAS_LSE:
        b_lse = canonical((M + tl.log2(L)) * LN2, tl.float32)
        tl.store(p_lse + b_head.to(tl.int64) * slse_h + b_token, b_lse, mask=m_r)


@triton.jit(
    do_not_specialize=[
        *("slse_h", "stable", "columns", "pages", "chunks", "parts", "span", "tiles", "groups", "together")
    ],
    do_not_specialize_on_alignment=["CU", "LENGTHS"],
)
def attention_fwd_kernel(
    Q, K, V, O, LSE, CU, LENGTHS, TABLE, PA, PM, PL, scale,
    sq_t, sq_h, sk_page, sk_slot, sk_h, sv_page, sv_slot, sv_h, so_t, so_h, slse_h,
    stable, columns, pages, chunks, parts, span, tiles, groups, together,
    HQ: tl.constexpr, G: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EARLY: tl.constexpr, UNTIL: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, IDS: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr,
    HAS_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of BM rows (tokens times PACK heads) of one request: all its chunks, or with SPLIT those of
    `span` keys (1: one chunk, 2: any number)."""
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    first = 0
    if SPLIT:
        first = tl.multiple_of(pid % parts * span, EARLY)
        pid = pid // parts
    place, heads = in_sets(pid, tiles, groups, together)
    tile = tiles - 1 - place  # longest rows first
    b = heads // (HQ // PACK)
    head0 = heads % (HQ // PACK) * PACK
    head = head0 // G
    p_table = TABLE + b.to(tl.int64) * stable
    b_pages = tl.arange(0, IDS)
    if PAGE > 0:
        b_pages = page_ids(p_table, first, columns, pages, PAGE, IDS)
    token0 = tl.load(CU + b)
    r = tl.load(CU + b + 1) - token0
    if PAGE == 0:
        row0 = token0
        n = r
    else:
        row0 = token0 * 0
        n = tl.minimum(tl.load(LENGTHS + b), columns * PAGE)
    end = tl.minimum(n, n - r + (tile * BM + BM - 1) // PACK + 1)
    # all rows of the tile see the keys before `free`
    free = (n - r + tile * BM // PACK + 1) // BN * BN
    if tile * BM >= r * PACK:
        return
    if SPLIT:
        if (first >= end) | ((first >= UNTIL) & ((first - UNTIL) % CHUNK > 0)):
            return
        if first >= UNTIL:
            span = tl.maximum(span, CHUNK)
        end = tl.minimum(first + span, end)
    o_r = tile * BM + tl.arange(0, BM)
    m_r = o_r // PACK < r
    b_t = tl.minimum(o_r // PACK, r - 1)
    b_pos = n - r + b_t
    o_d = tl.arange(0, D)
    p_q = Q + (token0 + b_t).to(tl.int64) * sq_t + (head0 + o_r % PACK) * sq_h
    b_q = tl.load(across(p_q, SWAP) + across(o_d, not SWAP))
    if TMA:
        p_k = K
        p_v = V
    else:
        p_k = K + row0.to(tl.int64) * sk_slot + head * sk_h
        p_v = V + row0.to(tl.int64) * sv_slot + head * sv_h
    o_p = o_r
    if SPLIT:
        o_p = ((token0 + b_t).to(tl.int64) * HQ + head0 + o_r % PACK) * chunks
    m, sums, acc = empty(BM, D, SWAP)
    M, L, A = m, m, m
    if not SPLIT:
        M, L, A = empty(BM, D, SWAP)
        L = tl.zeros((BM,), tl.float32)
    if SPLIT == 1:
        mid = tl.maximum(first, tl.minimum(end, free))
        for masked in tl.static_range(2):
            start, stop = mid if masked else first, end if masked else mid
            M, L, A, m, sums, acc = see_blocks(
                b_q, p_k, p_v, b_pages, start, stop, first, first, n, row0, head, b_pos, scale, M, L, A, m,
                sums, acc, PA, PM, PL, o_p, m_r, sk_page, sk_slot, sv_page, sv_slot,
                D, BN, EARLY, UNTIL, CHUNK, PAGE, TMA, SPLIT, masked, SWAP,
            )  # fmt: skip
    else:
        for lo in range(first, end, WINDOW):
            if PAGE > 0:
                if lo > first:
                    b_pages = page_ids(p_table, lo, columns, pages, PAGE, IDS)
            hi = tl.minimum(lo + WINDOW, end)
            mid = tl.maximum(lo, tl.minimum(hi, free))
            for masked in tl.static_range(2):
                start, stop = mid if masked else lo, hi if masked else mid
                M, L, A, m, sums, acc = see_blocks(
                    b_q, p_k, p_v, b_pages, start, stop, lo, first, n, row0, head, b_pos, scale, M, L, A, m,
                    sums, acc, PA, PM, PL, o_p, m_r, sk_page, sk_slot, sv_page, sv_slot,
                    D, BN, EARLY, UNTIL, CHUNK, PAGE, TMA, SPLIT, masked, SWAP,
                )  # fmt: skip
    if SPLIT:
        store_chunk(PA, PM, PL, o_p + chunk_of(end - 1, EARLY, UNTIL, CHUNK), m_r, m, sums, acc, D, SWAP)
    else:
        M, L, A = merge(M, L, A, m, lanes(sums, SWAP), acc, SWAP)
        o_r = tile * BM + tl.arange(0, BM)
        store_rows(O, LSE, M, L, A, token0, o_r, r, head0, so_t, so_h, slse_h, PACK, D, HAS_LSE, SWAP)


@triton.jit(
    do_not_specialize=["slse_h", "chunks", "longest"], do_not_specialize_on_alignment=["CU", "LENGTHS"]
)
def attention_merge_kernel(
    O, LSE, CU, LENGTHS, PA, PM, PL, so_t, so_h, slse_h, chunks, longest,
    HQ: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr, UNTIL: tl.constexpr, CHUNK: tl.constexpr,
    AHEAD: tl.constexpr, HAS_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of one query row, AHEAD of them loaded at a time."""
    if PDL:
        gdc_wait()
    pid = tl.program_id(0)
    h = pid % HQ
    row = pid // HQ % longest
    b = pid // HQ // longest
    token0 = tl.load(CU + b)
    r = tl.load(CU + b + 1) - token0
    if row >= r:
        return
    seen = tl.load(LENGTHS + b) - r + row + 1
    late = UNTIL // EARLY + (seen - UNTIL + CHUNK - 1) // CHUNK
    count = tl.minimum(tl.where(seen <= UNTIL, (seen + EARLY - 1) // EARLY, late), chunks)
    o_d = tl.arange(0, D)
    o_1 = tl.arange(0, 1)
    M = tl.full((1,), float("-inf"), tl.float32)
    L = tl.zeros((1,), tl.float32)
    A = tl.zeros((1, D), tl.float32)
    o_p = ((token0 + row).to(tl.int64) * HQ + h) * chunks
    for first in range(0, count, AHEAD):
        for i in tl.static_range(AHEAD):
            c = first + i
            m = tl.load(PM + o_p + c + o_1, mask=c + o_1 < count, other=float("-inf"))
            l = tl.load(PL + o_p + c + o_1, mask=c + o_1 < count, other=0.0)
            acc = tl.load(
                PA + (o_p + c + o_1)[:, None] * D + o_d[None, :], mask=(c + o_1 < count)[:, None], other=0.0
            )
            M, L, A = merge(M, L, A, m, l, acc, False)
    store_rows(O, LSE, M, L, A, token0, row + o_1, r, h, so_t, so_h, slse_h, 1, D, HAS_LSE, False)


@triton.jit(
    do_not_specialize=["tokens", "batch", "stable", "columns", "pages", "page_size"],
    do_not_specialize_on_alignment=["CU", "LENGTHS", "TABLE"],
)
def write_cache_kernel(
    K, V, KC, VC, TABLE, CU, LENGTHS, tokens, batch, stable, columns, pages, page_size,
    sk_t, sk_h, sv_t, sv_h, skc_page, skc_slot, skc_h, svc_page, svc_slot, svc_h,
    HK: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Copy the keys and values of BT new tokens, one head, to their places."""
    o_t = tl.program_id(0) // HK * BT + tl.arange(0, BT)
    h = tl.program_id(0) % HK
    o_d = tl.arange(0, D)
    m_t = o_t < tl.minimum(tokens, tl.load(CU + batch))  # rows after the last request are nobody's
    b = tl.zeros((BT,), tl.int32)
    for first in range(1, batch, BB):  # requests that start at or before the token, less one
        o_b = first + tl.arange(0, BB)
        starts = tl.load(CU + o_b, mask=o_b < batch, other=2147483647)
        b += tl.sum((starts[None, :] <= o_t[:, None]).to(tl.int32), 1)
    position = tl.load(LENGTHS + b) - tl.load(CU + b + 1) + o_t
    o_p = position // page_size
    m_t = m_t & (position >= 0) & (o_p < columns)
    page = tl.load(TABLE + b.to(tl.int64) * stable + o_p, mask=m_t, other=-1)
    m_t = m_t & (page >= 0) & (page < pages)
    page = page.to(tl.int64)
    slot = (position % page_size).to(tl.int64)
    m_td = m_t[:, None] & (o_d >= 0)[None, :]
    o_t = o_t.to(tl.int64)
    b_k = tl.load(K + (o_t * sk_t + h * sk_h)[:, None] + o_d[None, :], mask=m_td)
    tl.store(KC + (page * skc_page + slot * skc_slot + h * skc_h)[:, None] + o_d[None, :], b_k, mask=m_td)
    b_v = tl.load(V + (o_t * sv_t + h * sv_h)[:, None] + o_d[None, :], mask=m_td)
    tl.store(VC + (page * svc_page + slot * svc_slot + h * svc_h)[:, None] + o_d[None, :], b_v, mask=m_td)


@triton.jit
def halve(x, BM: tl.constexpr, W: tl.constexpr):
    """x[:, d] + x[:, d + W/2]; a sum of two numbers has no order."""
    return tl.sum(tl.reshape(x, (BM, 2, W // 2)), 1)


@triton.jit(do_not_specialize=["padded", "tiles", "slse_h"])
def delta_kernel(
    O, DO, LSE, X, CU, padded, tiles, slse_h, so_t, so_h, sdo_t, sdo_h,
    HQ: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """X[0, h] = -LSE * log2(e), X[1, h] = -sum_d O * dO; PAD rows (-inf, 0) follow each sequence, so that a
    query beyond its end has weight 0."""
    pid = tl.program_id(0)
    o_r = pid % tiles * BM + tl.arange(0, BM)
    h = pid // tiles % HQ
    b = pid // tiles // HQ
    token0 = tl.load(CU + b)
    r = tl.load(CU + b + 1) - token0
    if pid % tiles * BM >= r + PAD:
        return
    o_d = tl.arange(0, D)
    m_r = o_r < r
    o_t = (token0 + o_r).to(tl.int64)
    b_o = tl.load(O + (o_t * so_t + h * so_h)[:, None] + o_d[None, :], mask=m_r[:, None], other=0.0)
    b_do = tl.load(DO + (o_t * sdo_t + h * sdo_h)[:, None] + o_d[None, :], mask=m_r[:, None], other=0.0)
    x = b_o.to(tl.float32) * b_do.to(tl.float32)
    if D == 128:
        x = halve(x, BM, 128)
    x = halve(halve(halve(halve(halve(x, BM, 64), BM, 32), BM, 16), BM, 8), BM, 4)
    x = tl.sum(x, 1)
    b_lse = tl.load(LSE + h.to(tl.int64) * slse_h + o_t, mask=m_r, other=float("inf"))
    m_x = o_r < r + PAD
    p_x = X + h.to(tl.int64) * padded + token0 + b * PAD + o_r
    tl.store(p_x, -(b_lse * LOG2E_F32), mask=m_x)
    tl.store(p_x + HQ * padded.to(tl.int64), -x, mask=m_x)


@triton.jit
def rows_tile(p, pos, r, stride, B: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr):
    """Rows pos .. pos + B - 1 of one head of a sequence, [B, D]; with MASK zero from r on."""
    o_r = tl.arange(0, B)
    p += stride.to(tl.int64) * pos
    o = (o_r * stride)[:, None] + tl.arange(0, D)[None, :]
    if MASK:
        return tl.load(p + o, mask=(pos + o_r < r)[:, None], other=0.0)
    else:
        return tl.load(p + o)


@triton.jit
def dq_blocks(
    dq, b_q, b_do, b_lse, b_delta, p_k, p_v, o_m, start, stop, r, scale, sk_t, sv_t,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    for pos in range(start, stop, BN):
        o_n = pos + tl.arange(0, BN)
        b_k = rows_tile(p_k, pos, r, sk_t, BN, D, MASK)
        b_v = rows_tile(p_v, pos, r, sv_t, BN, D, MASK)
        s = tl.dot(b_q, b_k.T)
        x = tl.fma(s, tl.zeros((BM, BN), tl.float32) + scale, tl.broadcast_to(b_lse[:, None], (BM, BN)))
        dp = tl.dot(b_do, b_v.T, tl.broadcast_to(b_delta[:, None], (BM, BN)))
        ds = tl.exp2(x) * dp
        if MASK:
            ds = tl.where(o_n[None, :] <= o_m[:, None], ds, 0.0)
        dq = tl.dot(ds.to(b_q.dtype), b_k, dq)
    return dq


@triton.jit(do_not_specialize=["padded", "tiles", "groups", "together"])
def dq_kernel(
    Q, K, V, DO, X, DQ, CU, scale, out_scale, padded,
    sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sdo_t, sdo_h, sdq_t, sdq_h, tiles, groups, together,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PAD: tl.constexpr,
):  # fmt: skip
    """dQ of BM queries of one head: key blocks ascending from position 0."""
    place, head = in_sets(tl.program_id(0), tiles, groups, together)
    tile = tiles - 1 - place
    b = head // HQ
    h = head % HQ
    token0 = tl.load(CU + b)
    r = tl.load(CU + b + 1) - token0
    if tile * BM >= r:
        return
    o_m = tile * BM + tl.arange(0, BM)
    o_d = tl.arange(0, D)
    m_m = o_m < r
    o_t = (token0 + o_m).to(tl.int64)
    b_q = tl.load(Q + (o_t * sq_t + h * sq_h)[:, None] + o_d[None, :], mask=m_m[:, None], other=0.0)
    b_do = tl.load(DO + (o_t * sdo_t + h * sdo_h)[:, None] + o_d[None, :], mask=m_m[:, None], other=0.0)
    p_x = X + h.to(tl.int64) * padded + token0 + b * PAD + o_m
    b_lse = tl.load(p_x)
    b_delta = tl.load(p_x + HQ * padded.to(tl.int64))
    p_k = K + token0.to(tl.int64) * sk_t + h // G * sk_h
    p_v = V + token0.to(tl.int64) * sv_t + h // G * sv_h
    free = (tile * BM + 1) // BN * BN
    dq = tl.zeros((BM, D), tl.float32)
    end = tl.minimum(r, tile * BM + BM)
    for masked in tl.static_range(2):
        start, stop = free if masked else 0, end if masked else free
        dq = dq_blocks(
            dq, b_q, b_do, b_lse, b_delta, p_k, p_v, o_m, start, stop, r, scale, sk_t, sv_t, BM, BN, D, masked
        )
    dq = canonical(dq * out_scale + 0.0, DQ.dtype.element_ty)
    tl.store(DQ + (o_t * sdq_t + h * sdq_h)[:, None] + o_d[None, :], dq, mask=m_m[:, None])


@triton.jit
def dkv_blocks(
    dk, dv, b_k, b_v, p_q, p_do, p_x, o_delta, o_n, start, r, scale, sq_t, sdo_t,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    o_m = tl.arange(0, BM)
    for pos in range(start, r, BM):
        b_q = rows_tile(p_q, pos, r, sq_t, BM, D, True)
        b_do = rows_tile(p_do, pos, r, sdo_t, BM, D, True)
        b_lse = tl.load(p_x + pos + o_m)
        b_delta = tl.load(p_x + pos + o_delta + o_m)
        m_mn = (o_n - pos)[:, None] <= o_m[None, :]
        # [BN, BM]
        s = tl.dot(b_k, b_q.T)
        x = tl.fma(s, tl.zeros((BN, BM), tl.float32) + scale, tl.broadcast_to(b_lse[None, :], (BN, BM)))
        p = tl.where(m_mn, tl.exp2(x), 0.0)
        dp = tl.dot(b_v, b_do.T, tl.broadcast_to(b_delta[None, :], (BN, BM)))
        dv = tl.dot(p.to(b_k.dtype), b_do, dv)
        ds = tl.where(m_mn, p * dp, 0.0)
        dk = tl.dot(ds.to(b_k.dtype), b_q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["padded", "tiles", "groups", "together"])
def dkv_kernel(
    Q, K, V, DO, X, DK, DV, CU, scale, out_scale, padded,
    sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sdo_t, sdo_h, sdk_t, sdk_h, sdv_t, sdv_h, tiles, groups, together,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PAD: tl.constexpr,
):  # fmt: skip
    """dK and dV of BN keys of one KV head: query heads in order, queries ascending."""
    HK: tl.constexpr = HQ // G
    # the first keys have the most queries
    tile, head = in_sets(tl.program_id(0), tiles, groups, together)
    b = head // HK
    g = head % HK
    token0 = tl.load(CU + b)
    r = tl.load(CU + b + 1) - token0
    if tile * BN >= r:
        return
    o_n = tile * BN + tl.arange(0, BN)
    o_d = tl.arange(0, D)
    m_n = o_n < r
    o_t = (token0 + o_n).to(tl.int64)
    b_k = tl.load(K + (o_t * sk_t + g * sk_h)[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
    b_v = tl.load(V + (o_t * sv_t + g * sv_h)[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    start = tile * BN // BM * BM
    o_delta = HQ * padded.to(tl.int64)
    for h in range(g * G, g * G + G):
        p_q = Q + token0.to(tl.int64) * sq_t + h * sq_h
        p_do = DO + token0.to(tl.int64) * sdo_t + h * sdo_h
        p_x = X + padded.to(tl.int64) * h + token0 + b * PAD
        dk, dv = dkv_blocks(
            dk, dv, b_k, b_v, p_q, p_do, p_x, o_delta, o_n, start, r, scale, sq_t, sdo_t, BM, BN, D
        )
    dk = canonical(dk * out_scale + 0.0, DK.dtype.element_ty)
    dv = canonical(dv + 0.0, DV.dtype.element_ty)
    tl.store(DK + (o_t * sdk_t + g * sdk_h)[:, None] + o_d[None, :], dk, mask=m_n[:, None])
    tl.store(DV + (o_t * sdv_t + g * sdv_h)[:, None] + o_d[None, :], dv, mask=m_n[:, None])
