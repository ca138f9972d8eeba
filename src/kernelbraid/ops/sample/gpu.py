"""Next tokens drawn from logits on the GPU, in portable Triton: greedy, temperature, min-p, top-k, top-p.

    s[v] = l[v] * c + 0                           c = 1 / temperature; not positive or infinite: greedy
    q[v] = floor(2^40 * exp(s[v] - max s))                an integer
    token = first v in the vocabulary's order with q[0] + ... + q[v] > floor(r * sum q / 2^64)

r is the first 64 bits of Philox 4x32-10, whose key is the seed and whose counter is the position and the
number of the sample. What is cut off has q = 0: see README.md. All sums are sums of integers, which have no
order, so that blocks and warps are free. A program is a row; cuts search the key of the last token that they
keep by two bits at a time, and rows without cuts skip the search. Fusion is off.
"""

import triton
import triton.language as tl

TILE = 2048
WARPS = 16

KNOBS = {"TILE": ("schedule", (512, 1024, 2048)), "WARPS": ("schedule", (4, 8, 16))}

LOG2E = tl.constexpr(1.4426950216293335)
UNIT = tl.constexpr(2.0**40)
REMOVED = tl.constexpr(-(2**31))  # below the key of every number


def numerics(constant_axes):
    return {}


def schedule(axes, knobs):
    """Choose the logits of a step and the warps of a program."""
    tile = min(knobs["TILE"], triton.next_power_of_2(axes["vocabulary"]))
    if axes["vocabulary"] % 16:  # loads that are not wide take more registers
        tile = min(tile, 1024)
    return {"tile": tile, "warps": max(1, min(knobs["WARPS"], tile // 64))}


def sample(logits, inverse_temperature, top_k, top_p, min_p, seeds, samples, positions, tokens):
    """Write a token a row of logits [T, V]; everything else is [T] and contiguous, seeds int64."""
    rows, vocabulary = logits.shape
    if not rows:
        return
    plan = schedule({"tokens": rows, "vocabulary": vocabulary}, {"TILE": TILE, "WARPS": WARPS})
    sample_kernel[(rows,)](
        *(logits, inverse_temperature, top_k, top_p, min_p, seeds, samples, positions, tokens),
        *(logits.stride(0), vocabulary, plan["tile"]),
        num_warps=plan["warps"],
        num_stages=2,
        enable_fp_fusion=False,
    )


# ---- Device.


@triton.jit
def scaled(p_l, v, o, scale, V: tl.constexpr):
    """Scaled logits of a step, -inf for NaN and beyond the vocabulary."""
    x = tl.load(p_l + v + o, mask=v + o < V, other=float("-inf"))
    s = x * scale + 0.0
    return tl.where((s == s) & (v + o < V), s, float("-inf"))


@triton.jit
def weighed(p_l, v, o, scale, top, smallest, V: tl.constexpr):
    """Keys and integer weights of a step, after min-p."""
    s = scaled(p_l, v, o, scale, V)
    w = tl.exp2(tl.where(s == top, 0.0, s - top) * LOG2E)
    kept = (w >= smallest) & (v + o < V)
    bits = s.to(tl.int32, bitcast=True)
    key = tl.where(kept, bits ^ ((bits >> 31) & 0x7FFFFFFF), REMOVED)
    return key, tl.where(kept, (w * UNIT).to(tl.int64), 0)


@triton.jit
def cut(key, q, v, o, kth, kth_ties, crossing, crossing_ties, seen_kth, seen_crossing):
    """Weights of a step after top-k and top-p: above a key, or among the first that have it.

    Returns also how many have had the keys so far.
    """
    at = key == kth
    rank = seen_kth + tl.cumsum(at.to(tl.int32), 0)
    kept = (key > kth) | (at & (rank <= kth_ties))
    seen_kth += tl.sum(at.to(tl.int32), 0)
    q = tl.where(kept, q, 0)
    at = (key == crossing) & kept
    rank = seen_crossing + tl.cumsum(at.to(tl.int32), 0)
    q = tl.where((key > crossing) | (at & (rank <= crossing_ties)), q, 0)
    return q, seen_kth, seen_crossing + tl.sum(at.to(tl.int32), 0)


@triton.jit
def philox(seed, position, sample):
    """The first 64 bits of Philox 4x32-10: key seed, counter (position, sample)."""
    low: tl.constexpr = 0xFFFFFFFF
    k0 = seed & low
    k1 = (seed >> 32) & low
    c0 = position & low
    c1 = (position >> 32) & low
    c2 = sample & low
    c3 = (sample >> 32) & low
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * tl.full((), 0xD2511F53, tl.uint64)
        p1 = c2.to(tl.uint64) * tl.full((), 0xCD9E8D57, tl.uint64)
        h0 = (p0 >> 32).to(tl.int64)
        h1 = (p1 >> 32).to(tl.int64)
        c0 = h1 ^ c1 ^ k0
        c2 = h0 ^ c3 ^ k1
        c1 = p1.to(tl.int64) & low
        c3 = p0.to(tl.int64) & low
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    return c0.to(tl.uint64) | (c1.to(tl.uint64) << 32)


@triton.jit
def high_product(a, b):
    """The upper 64 bits of a * b, unsigned."""
    low = tl.full((), 0xFFFFFFFF, tl.uint64)
    a0 = a & low
    a1 = a >> 32
    b0 = b & low
    b1 = b >> 32
    middle = a1 * b0 + ((a0 * b0) >> 32)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> 32) + (other >> 32)


@triton.jit
def signed(key):
    """An unsigned key, held in 64 bits, as one of those that are compared."""
    return (key - 2147483648).to(tl.int32)


@triton.jit(
    do_not_specialize_on_alignment=[
        "SCALE", "TOP_K", "TOP_P", "MIN_P", "SEEDS", "SAMPLES", "POSITIONS", "TOKENS",
    ]
)  # fmt: skip
def sample_kernel(
    LOGITS, SCALE, TOP_K, TOP_P, MIN_P, SEEDS, SAMPLES, POSITIONS, TOKENS, sl_t, V: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, B)
    p_l = LOGITS + t * sl_t
    scale = tl.load(SCALE + t)
    top_k = tl.load(TOP_K + t)
    top_p = tl.load(TOP_P + t)
    min_p = tl.load(MIN_P + t)
    random = (scale > 0.0) & (scale < float("inf"))
    scale = tl.where(random, scale, 1.0)
    smallest = tl.where(min_p > 0.0, tl.minimum(min_p, 1.0), 0.0)
    # the maximum and the first that has it
    highest = tl.full((B,), float("-inf"), tl.float32)
    for v in range(0, V, B):
        highest = tl.maximum(highest, scaled(p_l, v, o, scale, V))
    top = tl.max(highest, 0)
    if top == float("-inf"):
        tl.store(TOKENS + t, 0)
    elif not random:
        first = tl.full((B,), 2147483647, tl.int32)
        for v in range(0, V, B):
            first = tl.minimum(first, tl.where(scaled(p_l, v, o, scale, V) == top, v + o, 2147483647))
        tl.store(TOKENS + t, tl.min(first, 0))
    else:
        kth = tl.full((), REMOVED, tl.int32)
        kth_ties = tl.full((), V, tl.int32)
        if (top_k > 0) & (top_k < V):
            found = tl.zeros((), tl.int64)
            for i in range(16):
                step = tl.full((), 1073741824, tl.int64) >> (2 * i)
                n1 = tl.zeros((B,), tl.int32)
                n2 = tl.zeros((B,), tl.int32)
                n3 = tl.zeros((B,), tl.int32)
                for v in range(0, V, B):
                    key, _ = weighed(p_l, v, o, scale, top, smallest, V)
                    n1 += (key >= signed(found + step)).to(tl.int32)
                    n2 += (key >= signed(found + 2 * step)).to(tl.int32)
                    n3 += (key >= signed(found + 3 * step)).to(tl.int32)
                passed = (tl.sum(n1, 0) >= top_k).to(tl.int64) + (tl.sum(n2, 0) >= top_k).to(tl.int64)
                found += step * (passed + (tl.sum(n3, 0) >= top_k).to(tl.int64))
            kth = signed(found)
            above = tl.zeros((B,), tl.int32)
            for v in range(0, V, B):
                key, _ = weighed(p_l, v, o, scale, top, smallest, V)
                above += (key > kth).to(tl.int32)
            kth_ties = top_k - tl.sum(above, 0)
        crossing = tl.full((), REMOVED, tl.int32)
        crossing_ties = tl.full((), V, tl.int64)
        # the mass of what is left
        mass = tl.zeros((B,), tl.int64)
        seen = tl.zeros((), tl.int32)
        none = tl.zeros((), tl.int32)
        for v in range(0, V, B):
            key, q = weighed(p_l, v, o, scale, top, smallest, V)
            q, seen, none = cut(key, q, v, o, kth, kth_ties, REMOVED, V, seen, none)
            mass += q
        total = tl.sum(mass, 0)
        if top_p < 1.0:
            share = tl.where(top_p > 0.0, top_p, 0.0).to(tl.float64) * total.to(tl.float64)
            wanted = tl.maximum(share.to(tl.int64), 1)
            found = tl.zeros((), tl.int64)
            for i in range(16):
                step = tl.full((), 1073741824, tl.int64) >> (2 * i)
                q1 = tl.zeros((B,), tl.int64)
                q2 = tl.zeros((B,), tl.int64)
                q3 = tl.zeros((B,), tl.int64)
                seen = tl.zeros((), tl.int32)
                none = tl.zeros((), tl.int32)
                for v in range(0, V, B):
                    key, q = weighed(p_l, v, o, scale, top, smallest, V)
                    q, seen, none = cut(key, q, v, o, kth, kth_ties, REMOVED, V, seen, none)
                    q1 += tl.where(key >= signed(found + step), q, 0)
                    q2 += tl.where(key >= signed(found + 2 * step), q, 0)
                    q3 += tl.where(key >= signed(found + 3 * step), q, 0)
                passed = (tl.sum(q1, 0) >= wanted).to(tl.int64) + (tl.sum(q2, 0) >= wanted).to(tl.int64)
                found += step * (passed + (tl.sum(q3, 0) >= wanted).to(tl.int64))
            crossing = signed(found)
            before = tl.zeros((B,), tl.int64)
            own = tl.zeros((B,), tl.int64)
            seen = tl.zeros((), tl.int32)
            none = tl.zeros((), tl.int32)
            for v in range(0, V, B):
                key, q = weighed(p_l, v, o, scale, top, smallest, V)
                q, seen, none = cut(key, q, v, o, kth, kth_ties, REMOVED, V, seen, none)
                before += tl.where(key > crossing, q, 0)
                own = tl.maximum(own, tl.where(key == crossing, q, 0))
            one = tl.max(own, 0)
            sum_before = tl.sum(before, 0)
            crossing_ties = (wanted - sum_before + one - 1) // one
            total = tl.zeros((), tl.int64)
            seen = tl.zeros((), tl.int32)
            none = tl.zeros((), tl.int32)
            for v in range(0, V, B):
                key, q = weighed(p_l, v, o, scale, top, smallest, V)
                q, seen, none = cut(key, q, v, o, kth, kth_ties, crossing, crossing_ties, seen, none)
                total += tl.sum(q, 0)
        bits = philox(
            tl.load(SEEDS + t), tl.load(POSITIONS + t).to(tl.int64), tl.load(SAMPLES + t).to(tl.int64)
        )
        left = high_product(bits, total.to(tl.uint64)).to(tl.int64)
        token = tl.full((), 2147483647, tl.int32)
        seen = tl.zeros((), tl.int32)
        none = tl.zeros((), tl.int32)
        for v in range(0, V, B):
            key, q = weighed(p_l, v, o, scale, top, smallest, V)
            q, seen, none = cut(key, q, v, o, kth, kth_ties, crossing, crossing_ties, seen, none)
            inside = tl.sum(q, 0)
            if (left >= 0) & (left < inside):
                beyond = tl.cumsum(q, 0) > left
                token = tl.min(tl.where(beyond, v + o, 2147483647), 0)
            left -= inside
        tl.store(TOKENS + t, tl.where(token < V, token, 0))
