"""SwiGLU on the GPU, in portable Triton: forward and gradients, bfloat16 or float16.

    out[t, j] = round16(gate[t, j] / (1 + exp(-gate[t, j])) * up[t, j])

There is no sum, so tiles and warps are free of bits. Rows have any stride: gate and up may be halves of one
tensor. Fusion is off: what is fused is written so.
"""

import triton
import triton.language as tl

TILE = 2048
WARPS = 4

KNOBS = {
    "TILE": ("schedule", (1024, 2048, 4096)),
    "WARPS": ("schedule", (2, 4, 8)),
}

SMALLEST_TILE = 256
MULTIPROCESSORS = 132
MINUS_LOG2E = tl.constexpr(-1.4426950216293335)  # of float32


def numerics(constant_axes):
    return {}


def schedule(axes, knobs):
    """Choose the columns of a program and its warps: small calls are spread over the multiprocessors."""
    tile = min(knobs["TILE"], triton.next_power_of_2(axes["width"]))
    while tile > SMALLEST_TILE and axes["tokens"] * triton.cdiv(axes["width"], tile) < 2 * MULTIPROCESSORS:
        tile //= 2
    return {"tile": tile, "warps": max(1, min(knobs["WARPS"], tile // 256))}


def launch(kernel, tensors, strides):
    """Launch a kernel with one program a row and tile of columns."""
    tokens, width = tensors[0].shape
    if not tokens or not width:
        return
    plan = schedule({"width": width, "tokens": tokens}, {"TILE": TILE, "WARPS": WARPS})
    columns = triton.cdiv(width, plan["tile"])
    kernel[(tokens * columns,)](
        *tensors,
        *strides,
        width,
        columns,
        plan["tile"],
        num_warps=plan["warps"],
        enable_fp_fusion=False,
    )


# ---- Entry points. Tensors on one device, rows [T, width] of any stride, in 16 bits.


def swiglu(gate, up, out):
    """Activate rows of gate and up into out."""
    tensors = (gate, up, out)
    launch(swiglu_kernel, tensors, [x.stride(0) for x in tensors])


def swiglu_backward(gate, up, dout, dgate, dup):
    """Write the gradients; both are always computed, from one exponential."""
    tensors = (gate, up, dout, dgate, dup)
    launch(swiglu_backward_kernel, tensors, [x.stride(0) for x in tensors])


# ---- Device.


@triton.jit
def canonical(x, dtype: tl.constexpr):
    """x as stored: one NaN, chosen among bits, since conversions have NaNs of their own."""
    NAN: tl.constexpr = 0x7FC0 if dtype == tl.bfloat16 else 0x7E00
    bits = x.to(dtype).to(tl.int16, bitcast=True)
    return tl.where(x == x, bits, tl.full(bits.shape, NAN, tl.int16)).to(dtype, bitcast=True)


@triton.jit
def swiglu_kernel(
    GATE, UP, OUT, sg_t, su_t, so_t, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, B: tl.constexpr
):
    t = (tl.program_id(0) // COLUMNS).to(tl.int64)
    o_j = tl.program_id(0) % COLUMNS * B + tl.arange(0, B)
    m = o_j < WIDTH
    g = tl.load(GATE + t * sg_t + o_j, mask=m, other=0.0).to(tl.float32)
    u = tl.load(UP + t * su_t + o_j, mask=m, other=0.0).to(tl.float32)
    y = tl.div_rn(g, 1.0 + tl.exp2(g * MINUS_LOG2E))
    tl.store(OUT + t * so_t + o_j, canonical(y * u, OUT.dtype.element_ty), mask=m)


@triton.jit
def swiglu_backward_kernel(
    GATE, UP, DOUT, DGATE, DUP, sg_t, su_t, sd_t, sdg_t, sdu_t,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) // COLUMNS).to(tl.int64)
    o_j = tl.program_id(0) % COLUMNS * B + tl.arange(0, B)
    m = o_j < WIDTH
    g = tl.load(GATE + t * sg_t + o_j, mask=m, other=0.0).to(tl.float32)
    u = tl.load(UP + t * su_t + o_j, mask=m, other=0.0).to(tl.float32)
    d = tl.load(DOUT + t * sd_t + o_j, mask=m, other=0.0).to(tl.float32)
    s = tl.div_rn(tl.full((B,), 1.0, tl.float32), 1.0 + tl.exp2(g * MINUS_LOG2E))
    y = g * s
    dg = canonical(d * u * tl.fma(y, 1.0 - s, s), DGATE.dtype.element_ty)
    tl.store(DGATE + t * sdg_t + o_j, dg, mask=m)
    tl.store(DUP + t * sdu_t + o_j, canonical(d * y, DUP.dtype.element_ty), mask=m)
