"""Router of a mixture on the GPU, in portable Triton: experts, weights and the gradient of the logits.

    experts[t] = the top_k largest of x[t], equal ones by index    softmax: p = exp2((x - max) * log2 e) / sum
    weights[t, s] = p[experts[t, s]], or that over their sum       sigmoid: p = 1 / (1 + exp2(-x * log2 e))

Logits are bfloat16 or float16, weights float32. Experts are chosen by integers that order their logits. A sum
over all experts pairs neighbours, one over slots takes them in order. Free of bits: rows of a program and
warps. Fusion is off: what is fused is written so.
"""

import triton
import triton.language as tl

TILE = 1024
WARPS = 4

KNOBS = {
    "TILE": ("schedule", (512, 1024, 2048)),
    "WARPS": ("schedule", (1, 2, 4)),
}

MOST_ROWS = 16
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-(2**63))


def numerics(constant_axes):
    return {}


def schedule(axes, knobs):
    """Choose the rows of a program and its warps: small calls are spread over the multiprocessors."""
    width = triton.next_power_of_2(axes["experts"])
    rows = max(1, min(MOST_ROWS, knobs["TILE"] // width))
    while rows > 1 and axes["tokens"] < 132 * rows:
        rows //= 2
    return {"rows": rows, "warps": max(1, min(knobs["WARPS"], rows * width // 128))}


def launch(kernel, logits, experts, *arguments):
    (tokens, count), top_k = logits.shape, experts.shape[1]
    axes = {"experts": count, "top_k": top_k, "tokens": tokens}
    plan = schedule(axes, {"TILE": TILE, "WARPS": WARPS})
    kernel[(triton.cdiv(tokens, plan["rows"]),)](
        *(logits, *arguments, tokens, count, triton.next_power_of_2(count), top_k, plan["rows"]),
        num_warps=plan["warps"],
        enable_fp_fusion=False,
    )


# ---- Entry points. Tensors on one device: logits [T, E], weights float32 and experts int32 [T, k].


def moe_router(logits, by_sigmoid, renormalize, weights, experts):
    """Choose experts for the rows of logits, and write their weights."""
    if len(logits):
        launch(
            *(moe_router_kernel, logits, experts, weights, experts),
            *(logits.stride(0), weights.stride(0), experts.stride(0), bool(by_sigmoid), bool(renormalize)),
        )


def moe_router_backward(logits, weights, experts, dweights, by_sigmoid, renormalize, dlogits):
    """Write the gradient of the logits; weights and experts are the forward's."""
    if len(logits):
        launch(
            *(moe_router_backward_kernel, logits, experts, weights, experts, dweights, dlogits),
            *(logits.stride(0), weights.stride(0), experts.stride(0), dweights.stride(0), dlogits.stride(0)),
            *(bool(by_sigmoid), bool(renormalize)),
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
def turned(bits):
    """Between the bits of a float and an integer that orders floats; it is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(
    do_not_specialize=["tokens", "sw_t", "se_t"], do_not_specialize_on_alignment=["WEIGHTS", "EXPERTS"]
)
def moe_router_kernel(
    LOGITS, WEIGHTS, EXPERTS, sx_t, sw_t, se_t, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    tokens, COUNT: tl.constexpr, W: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0) * R + tl.arange(0, R)
    o_j = tl.arange(0, W)
    m_t, m_j = o_t < tokens, o_j < COUNT
    o_t = o_t.to(tl.int64)
    x = tl.load(LOGITS + o_t[:, None] * sx_t + o_j[None, :], mask=m_t[:, None] & m_j[None, :], other=0.0)
    x = x.to(tl.float32)
    # One integer holds the logit's rank above and its index, turned round, below; NaN ranks last.
    rank = turned((x + 0.0).to(tl.int32, bitcast=True))
    rank = tl.where(x == x, rank, tl.full(rank.shape, -0x80000000, tl.int32)).to(tl.int64)
    key = tl.where(m_j[None, :], rank * 4096 + (4095 - o_j[None, :]), LOWEST)
    KP: tl.constexpr = 16
    o_s = tl.arange(0, KP)
    values, chosen = tl.zeros((R, KP), tl.float32), tl.zeros((R, KP), tl.int32)
    largest, share = tl.zeros((R,), tl.float32), tl.zeros((R,), tl.float32)
    for s in tl.static_range(K):
        best = tl.max(key, 1)
        key = tl.where(key == best[:, None], LOWEST, key)
        index = (4095 - (best & 4095)).to(tl.int32)
        value = turned((best >> 12).to(tl.int32)).to(tl.float32, bitcast=True)
        if s == 0:
            largest = value
        score = sigmoid(value) if SIGMOID else tl.exp2((value - largest) * LOG2E)
        share = score if s == 0 else share + score
        here = o_s[None, :] == s
        values, chosen = tl.where(here, score[:, None], values), tl.where(here, index[:, None], chosen)
    if not RENORMALIZE:
        if SIGMOID:
            share = tl.full((R,), 1.0, tl.float32)
        else:
            powers = tl.exp2((x - largest[:, None]) * LOG2E)
            share = paired(tl.where(m_j[None, :], powers, 0.0), R, W)
    w = tl.div_rn(values, tl.broadcast_to(share[:, None], (R, KP)))
    m = m_t[:, None] & (o_s < K)[None, :]
    tl.store(WEIGHTS + o_t[:, None] * sw_t + o_s[None, :], canonical(w, tl.float32), mask=m)
    tl.store(EXPERTS + o_t[:, None] * se_t + o_s[None, :], chosen, mask=m)


@triton.jit(
    do_not_specialize=["tokens", "sw_t", "se_t", "sd_t"],
    do_not_specialize_on_alignment=["WEIGHTS", "EXPERTS", "DWEIGHTS"],
)
def moe_router_backward_kernel(
    LOGITS, WEIGHTS, EXPERTS, DWEIGHTS, DLOGITS, sx_t, sw_t, se_t, sd_t, so_t,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    tokens, COUNT: tl.constexpr, W: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0) * R + tl.arange(0, R)
    o_j = tl.arange(0, W)
    m_t, m_j = o_t < tokens, o_j < COUNT
    o_t = o_t.to(tl.int64)
    x = tl.load(LOGITS + o_t[:, None] * sx_t + o_j[None, :], mask=m_t[:, None] & m_j[None, :], other=0.0)
    x = x.to(tl.float32)
    projected = tl.zeros((R,), tl.float32)
    given, weight, taken = (
        tl.zeros((R, W), tl.float32),
        tl.zeros((R, W), tl.float32),
        tl.zeros((R, W), tl.int1),
    )
    for s in tl.static_range(K):
        w = tl.load(WEIGHTS + o_t * sw_t + s, mask=m_t, other=0.0)
        d = tl.load(DWEIGHTS + o_t * sd_t + s, mask=m_t, other=0.0)
        e = tl.load(EXPERTS + o_t * se_t + s, mask=m_t, other=0)
        if RENORMALIZE or not SIGMOID:
            projected = tl.fma(d, w, projected)
        here = o_j[None, :] == e[:, None]
        given, weight = tl.where(here, d[:, None], given), tl.where(here, w[:, None], weight)
        taken = taken | here
        if s == 0:
            first = e
    g = given - projected[:, None]
    if SIGMOID:
        g = tl.where(taken, g * weight * (1.0 - sigmoid(x)), 0.0)
    elif RENORMALIZE:
        g = tl.where(taken, weight * g, 0.0)
    else:
        largest = tl.load(
            LOGITS + o_t * sx_t + first, mask=m_t & (first >= 0) & (first < COUNT), other=0.0
        ).to(tl.float32)
        powers = tl.where(m_j[None, :], tl.exp2((x - largest[:, None]) * LOG2E), 0.0)
        g = tl.div_rn(powers, tl.broadcast_to(paired(powers, R, W)[:, None], (R, W))) * g
    out = canonical(g, DLOGITS.dtype.element_ty)
    tl.store(DLOGITS + o_t[:, None] * so_t + o_j[None, :], out, mask=m_t[:, None] & m_j[None, :])
