"""Residual add and RMS norm on the GPU, in portable Triton: forward and gradients, bfloat16 or float16.

    h[t, j] = round16(x[t, j] + residual[t, j])
    out[t, j] = round16((h[t, j] * r[t]) * w[j])        r[t] = 1 / sqrt(sum_j h[t, j]^2 / width + eps)

A row's sums pair neighbours: 0 with 1, 2 with 3, then pairs with pairs, over the width filled up with zeros
to a power of two. The gradient of w adds TOKEN_BLOCK tokens in order from +0, and blocks in order. Free of
bits: rows of a program, warps, one launch or two. Fusion is off: what is fused is written so.
"""

import torch
import triton
import triton.language as tl

TOKEN_BLOCK = 16
TILE = 4096
WARPS = 4

KNOBS = {
    "TOKEN_BLOCK": ("numeric", (16, 32, 64)),
    "TILE": ("schedule", (1024, 2048, 4096, 8192)),
    "WARPS": ("schedule", (1, 2, 4, 8)),
}

MOST_ROWS = 16


def numerics(constant_axes):
    return {"token_block": TOKEN_BLOCK}


def schedule(axes, knobs):
    """Choose the rows of a program and its warps: small calls are spread over the multiprocessors."""
    width = triton.next_power_of_2(axes["width"])
    rows = max(1, min(MOST_ROWS, knobs["TILE"] // width))
    while rows > 1 and axes["tokens"] < 132 * rows:
        rows //= 2
    # at most 64 numbers a thread: more of them would spill
    fewest = max(1, rows * width // 2048)
    warps = max(fewest, min(knobs["WARPS"], rows * width // 128)) if width <= 8192 else 16
    return {"rows": rows, "warps": warps}


def chosen(x):
    return schedule({"width": x.shape[1], "tokens": x.shape[0]}, {"TILE": TILE, "WARPS": WARPS})


def launch(kernel, programs, warps, *arguments, **options):
    kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=False, **options)


# ---- Entry points. Tensors on one device: rows [T, width] and weight [width] in 16 bits, dweight float32.


def add_rms_norm(x, residual, weight, eps, out, residual_out):
    """Add the rows of x and residual into residual_out, and normalize the sums into out."""
    tokens, width = x.shape
    if not tokens:
        return
    plan = chosen(x)
    launch(
        *(add_rms_norm_kernel, triton.cdiv(tokens, plan["rows"]), plan["warps"]),
        *(x, residual, weight, out, residual_out, float(eps), tokens),
        *(x.stride(0), residual.stride(0), out.stride(0), residual_out.stride(0)),
        *(width, triton.next_power_of_2(width), plan["rows"]),
    )


def add_rms_norm_backward(residual_out, weight, dout, dresidual_out, eps, dx, dweight, accumulate):
    """Write the gradients; one that is None is left out. dweight is added to if `accumulate`.

    dx is the gradient of x and of residual; a dresidual_out of None counts as zeros.
    """
    x, others = residual_out, dresidual_out
    tokens, width = x.shape
    if not tokens:
        if dweight is not None and not accumulate:
            dweight.zero_()
        return
    blocks, padded = triton.cdiv(tokens, TOKEN_BLOCK), triton.next_power_of_2(width)
    partials = torch.empty(blocks if dweight is not None else 0, width, dtype=torch.float32, device=x.device)
    warps = min(16, max(1, padded // 256))
    launch(
        *(add_rms_norm_backward_kernel, blocks, warps),
        *(x, weight, dout, x if others is None else others, x if dx is None else dx, partials),
        *(float(eps), tokens, x.stride(0), dout.stride(0)),
        *(0 if others is None else others.stride(0), 0 if dx is None else dx.stride(0)),
        *(width, padded, TOKEN_BLOCK, others is not None, dx is not None, dweight is not None),
    )
    if dweight is not None:
        launch(
            *(add_partials_kernel, triton.cdiv(width, 64), 2),
            *(partials, dweight, blocks, width, bool(accumulate), 64),
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
def factor(x, eps, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """1 / sqrt(mean of squares + eps) of each row."""
    mean = tl.div_rn(paired(x * x, R, W), tl.full((R,), WIDTH, tl.float32))
    return tl.div_rn(tl.full((R,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit(do_not_specialize=["tokens"])
def add_rms_norm_kernel(
    X, RESIDUAL, WEIGHT, OUT, TOTAL, eps, tokens, sx_t, sr_t, so_t, st_t,
    WIDTH: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0) * R + tl.arange(0, R)
    o_j = tl.arange(0, W)
    m = (o_t < tokens)[:, None] & (o_j < WIDTH)[None, :]
    o_t = o_t.to(tl.int64)
    x = tl.load(X + o_t[:, None] * sx_t + o_j[None, :], mask=m, other=0.0).to(tl.float32)
    residual = tl.load(RESIDUAL + o_t[:, None] * sr_t + o_j[None, :], mask=m, other=0.0).to(tl.float32)
    w = tl.load(WEIGHT + o_j, mask=o_j < WIDTH, other=0.0).to(tl.float32)
    total = canonical(x + residual, TOTAL.dtype.element_ty)
    tl.store(TOTAL + o_t[:, None] * st_t + o_j[None, :], total, mask=m)
    h = total.to(tl.float32)
    r = factor(h, eps, WIDTH, R, W)
    y = canonical(h * r[:, None] * w[None, :], OUT.dtype.element_ty)
    tl.store(OUT + o_t[:, None] * so_t + o_j[None, :], y, mask=m)


@triton.jit(do_not_specialize=["tokens"])
def add_rms_norm_backward_kernel(
    X, WEIGHT, DOUT, DTOTAL, DX, PARTIALS, eps, tokens, sx_t, sd_t, st_t, sdx_t,
    WIDTH: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
    HAS_DTOTAL: tl.constexpr, HAS_DX: tl.constexpr, HAS_DW: tl.constexpr,
):  # fmt: skip
    """A block of tokens one after the other: their dx, and the sum of their part of dweight."""
    block = tl.program_id(0)
    o_j = tl.arange(0, W)
    m = (o_j < WIDTH)[None, :]
    w = tl.load(WEIGHT + o_j, mask=o_j < WIDTH, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((1, W), tl.float32)
    for t in range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, tokens)):
        t = tl.cast(t, tl.int64)
        x = tl.load(X + t * sx_t + o_j[None, :], mask=m, other=0.0).to(tl.float32)
        d = tl.load(DOUT + t * sd_t + o_j[None, :], mask=m, other=0.0).to(tl.float32)
        r = factor(x, eps, WIDTH, 1, W)
        n = x * r[:, None]
        if HAS_DX:
            c = tl.div_rn(paired(d * w * n, 1, W), tl.full((1,), WIDTH, tl.float32))
            g = tl.fma(tl.broadcast_to(-c[:, None], (1, W)), n, d * w)
            other = tl.zeros((1, W), tl.float32)
            if HAS_DTOTAL:
                other = tl.load(DTOTAL + t * st_t + o_j[None, :], mask=m, other=0.0).to(tl.float32)
            g = tl.fma(tl.broadcast_to(r[:, None], (1, W)), g, other)
            tl.store(DX + t * sdx_t + o_j[None, :], canonical(g, DX.dtype.element_ty), mask=m)
        if HAS_DW:
            total = tl.fma(d, n, total)
    if HAS_DW:
        tl.store(PARTIALS + block.to(tl.int64) * WIDTH + o_j[None, :], total, mask=m)


@triton.jit(do_not_specialize=["blocks"])
def add_partials_kernel(PARTIALS, OUT, blocks, WIDTH, ACCUMULATE: tl.constexpr, B: tl.constexpr):
    """Add blocks in order to each column."""
    o_j = tl.program_id(0) * B + tl.arange(0, B)
    m = o_j < WIDTH
    total = tl.load(OUT + o_j, mask=m) if ACCUMULATE else tl.zeros((B,), tl.float32)
    for block in range(blocks):
        total += tl.load(PARTIALS + tl.cast(block, tl.int64) * WIDTH + o_j, mask=m, other=0.0)
    tl.store(OUT + o_j, canonical(total, tl.float32), mask=m)
