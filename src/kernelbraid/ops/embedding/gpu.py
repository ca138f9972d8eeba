"""Embedding on the GPU, in portable Triton: rows of a table by id, and the gradient of the table.

    out[t, j] = weight[ids[t], j]        dweight[v, j] = sum over t with ids[t] = v of dout[t, j]

Rows are copied as integers. The sum goes in token order from what is there, one float32 chain an element and
no atomics: torch sorts the ids, stably, and a program adds the tokens of one id. Nothing waits for the
device, and no address leaves the tensors whatever the ids are: one outside of the table gives a row of NaN,
and adds nothing. Free of bits: tiles, warps, rows loaded ahead, and the pieces that tokens come in.
"""

import torch
import triton
import triton.language as tl

TILE = 2048
WARPS = 4
AHEAD = 4

KNOBS = {
    "TILE": ("schedule", (1024, 2048, 4096)),
    "WARPS": ("schedule", (2, 4, 8)),
    "AHEAD": ("schedule", (2, 4, 8)),
}

SMALLEST_TILE = 256
MOST_TOKENS_LOG2 = 17
MULTIPROCESSORS = 132
NANS = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def numerics(constant_axes):
    return {}


def schedule(axes, knobs):
    """Choose the columns of a program and its warps: small calls are spread over the multiprocessors."""
    tile = min(knobs["TILE"], triton.next_power_of_2(axes["width"]))
    while tile > SMALLEST_TILE and axes["tokens"] * triton.cdiv(axes["width"], tile) < 2 * MULTIPROCESSORS:
        tile //= 2
    return {"tile": tile, "warps": max(1, min(knobs["WARPS"], tile // 256)), "ahead": knobs["AHEAD"]}


def chosen(tokens, width):
    return schedule({"width": width, "tokens": tokens}, {"TILE": TILE, "WARPS": WARPS, "AHEAD": AHEAD})


# ---- Entry points. Tensors on one device: ids [T] int32 or int64, rows in 16 bits, last strides 1.


def embedding(ids, weight, out):
    """Copy rows of weight [V, width] by ids [T] into out [T, width]; NaN where there is no such row."""
    tokens, width = out.shape
    if not tokens:
        return
    plan = chosen(tokens, width)
    columns = triton.cdiv(width, plan["tile"])
    embedding_kernel[(tokens * columns,)](
        ids,
        weight.view(torch.int16),
        out.view(torch.int16),
        weight.shape[0],
        weight.stride(0),
        out.stride(0),
        width,
        columns,
        plan["tile"],
        NANS[weight.dtype],
        num_warps=plan["warps"],
    )


def embedding_backward(ids, weight, dout, dweight, accumulate):
    """Write the gradient of weight, which is not read, or add it to dweight if `accumulate`.

    dweight is float32, or, without `accumulate`, of any dtype: sums are rounded to it once.
    """
    (tokens, width), vocabulary = dout.shape, dweight.shape[0]
    if not accumulate:
        dweight.zero_()
    if not tokens:
        return
    keys = torch.empty(tokens, dtype=torch.int32, device=ids.device)
    keys_kernel[(triton.cdiv(tokens, 1024),)](ids, keys, tokens, vocabulary, 1024)
    keys, order = torch.sort(keys, stable=True)
    counts = torch.empty_like(keys)
    counts_kernel[(triton.cdiv(tokens, 256),)](keys, counts, tokens, vocabulary, MOST_TOKENS_LOG2, 256)
    plan = chosen(tokens, width)
    columns = triton.cdiv(width, plan["tile"])
    embedding_backward_kernel[(tokens * columns,)](
        keys,
        counts,
        order,
        dout,
        dweight,
        dout.stride(0),
        dweight.stride(0),
        width,
        columns,
        plan["tile"],
        plan["ahead"],
        bool(accumulate),
        num_warps=plan["warps"],
        enable_fp_fusion=False,
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


@triton.jit(do_not_specialize=["vocabulary"], do_not_specialize_on_alignment=["IDS"])
def embedding_kernel(
    IDS, WEIGHT, OUT, vocabulary, sw_v, so_t,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, B: tl.constexpr, NAN: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) // COLUMNS).to(tl.int64)
    o_j = tl.program_id(0) % COLUMNS * B + tl.arange(0, B)
    m = o_j < WIDTH
    v = tl.load(IDS + t).to(tl.int64)
    inside = (v >= 0) & (v < vocabulary)
    w = tl.load(WEIGHT + tl.where(inside, v, 0) * sw_v + o_j, mask=m & inside, other=NAN)
    tl.store(OUT + t * so_t + o_j, w, mask=m)


@triton.jit(do_not_specialize=["tokens", "vocabulary"], do_not_specialize_on_alignment=["IDS"])
def keys_kernel(IDS, KEYS, tokens, vocabulary, B: tl.constexpr):
    """Ids as int32, those outside of the table behind all others."""
    o_t = tl.program_id(0) * B + tl.arange(0, B)
    m = o_t < tokens
    v = tl.load(IDS + o_t, mask=m, other=0).to(tl.int64)
    tl.store(KEYS + o_t, tl.where((v >= 0) & (v < vocabulary), v, vocabulary).to(tl.int32), mask=m)


@triton.jit(do_not_specialize=["tokens", "vocabulary"])
def counts_kernel(KEYS, COUNTS, tokens, vocabulary, STEPS: tl.constexpr, B: tl.constexpr):
    """At the first place of an id among the sorted ones, how often it occurs; 0 elsewhere."""
    o_p = tl.program_id(0) * B + tl.arange(0, B)
    m = o_p < tokens
    v = tl.load(KEYS + o_p, mask=m, other=-1)
    before = tl.load(KEYS + o_p - 1, mask=m & (o_p > 0), other=-1)
    low, high = o_p, tl.full((B,), 0, tl.int32) + tokens  # the last place of v, and one behind it
    for _ in range(STEPS):
        middle = (low + high) // 2
        same = tl.load(KEYS + middle, mask=m & (low < middle), other=-2) == v
        low = tl.where(same, middle, low)
        high = tl.where(same | (low >= middle), high, middle)
    tl.store(COUNTS + o_p, tl.where((v != before) & (v < vocabulary), low + 1 - o_p, 0), mask=m)


@triton.jit
def embedding_backward_kernel(
    KEYS, COUNTS, ORDER, DOUT, DWEIGHT, sd_t, sw_v,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, B: tl.constexpr, AHEAD: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """The program at the first place of an id among the sorted ones adds all its tokens, in order."""
    place = tl.program_id(0) // COLUMNS
    o_j = tl.program_id(0) % COLUMNS * B + tl.arange(0, B)
    m = o_j < WIDTH
    count = tl.load(COUNTS + place)
    if count > 0:
        p_w = DWEIGHT + tl.load(KEYS + place).to(tl.int64) * sw_v + o_j
        total = tl.load(p_w, mask=m, other=0.0) if ACCUMULATE else tl.zeros((B,), tl.float32)
        t = tl.load(ORDER + place)
        total += tl.load(DOUT + t * sd_t + o_j, mask=m, other=0.0).to(tl.float32)
        if count > 1:
            for i in tl.range(place + 1, place + count, num_stages=AHEAD):
                t = tl.load(ORDER + i)
                total += tl.load(DOUT + t * sd_t + o_j, mask=m, other=0.0).to(tl.float32)
        tl.store(p_w, canonical(total, DWEIGHT.dtype.element_ty), mask=m)
