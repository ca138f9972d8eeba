"""Linear layers on the GPU, in portable Triton: forward and gradients, bfloat16 or float16.

    out[t, n] = round16(sum_k x[t, k] * w[n, k] + b[n])
    dx[t, k]  = round16(sum_n dout[t, n] * w[n, k])
    dw[n, k]  = sum_t dout[t, n] * x[t, k]        db[n] = sum_t dout[t, n]        float32

Every sum is one chain of the matrix unit over ascending groups of 16, its end filled up with zeros, from +0
or, of dw and db, from what is there; the sum over k in K_GROUPS equal parts, that over n in N_GROUPS, merged
by pairing neighbours. Nothing is split further, however few rows a call has. Free of bits: tiles, warps,
stages, which factor is the first operand, pointers or bulk copies, order of tiles, programs that stay or not.
Fusion is off.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

K_GROUPS = 1
N_GROUPS = 1
FEW_ROWS = 64
NARROW = 64
STREAM_DEPTH = 128
STREAM_STAGES = 4
DEPTH = 64
STAGES = 3
PROGRAMS = 132
STAY_TILES = 264
BULK_ROWS = 65
TOGETHER = 8

KNOBS = {
    "K_GROUPS": ("numeric", (1, 2, 4, 8)),
    "N_GROUPS": ("numeric", (1, 2, 4, 8)),
    "FEW_ROWS": ("schedule", (16, 32, 64, 128)),
    "NARROW": ("schedule", (32, 64, 128)),
    "STREAM_DEPTH": ("schedule", (64, 128, 256)),
    "STREAM_STAGES": ("schedule", (3, 4, 5, 6)),
    "DEPTH": ("schedule", (32, 64, 128)),
    "STAGES": ("schedule", (2, 3, 4)),
    "PROGRAMS": ("schedule", (108, 132, 264)),
    "STAY_TILES": ("schedule", (132, 264, 528, 1000000)),
    "BULK_ROWS": ("schedule", (1, 17, 65, 129, 1000000)),
    "TOGETHER": ("schedule", (1, 4, 8, 16)),
}

FORWARD, OF_X, OF_WEIGHT = 0, 1, 2  # which product
TILES = ((128, 256, 8), (128, 128, 8), (64, 128, 4), (64, 64, 4))  # rows, columns, warps; the largest first
SMALLER_TILES = ((128, 128, 8), (64, 128, 4), (64, 64, 4))  # where sums and operands share the registers
SHARED = {80: 162 << 10, 90: 226 << 10, 100: 226 << 10}  # bytes that a program may take
LESS_SHARED = 98 << 10  # of other architectures: 8.6, 8.9, 12.0


def numerics(constant_axes):
    return {"k_groups": K_GROUPS, "n_groups": N_GROUPS}


def chosen_knobs():
    return {name: globals()[name] for name, (kind, _) in KNOBS.items() if kind == "schedule"}


def shared_bytes(height, width, depth, stages, stay, itemsize):
    """At most so many bytes of shared memory a program takes: operands in flight, and a tile to be stored.

    A program that stays loads its next tile's operands while it stores: it needs both at a time.
    """
    loads, stored = 2 * (height + width) * depth * stages + 128, height * width * itemsize
    return loads + stored if stay else max(loads, stored)


def cut(which, rows, columns, groups, add, architecture, alignment, knobs, itemsize=2):
    """Choose how one product is cut: tile, warps, stages, and how its programs go about it.

    With few rows the second factor, which is read once, is the first operand, and tiles are so narrow that
    all multiprocessors read. With more rows the largest tile is taken that keeps all of them busy and whose
    sums, of `itemsize` bytes each, have room where they are stored from. Rows begin at multiples of
    `alignment` elements: bulk copies need 8, wide loads 16.
    """
    enough = knobs["PROGRAMS"] * 7 // 8
    room = LESS_SHARED if architecture in (86, 87, 89) else SHARED.get(architecture // 10 * 10, LESS_SHARED)
    swap = which == FORWARD and rows <= knobs["FEW_ROWS"]
    if rows <= knobs["FEW_ROWS"]:
        height = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
        width, depth, stages, warps = knobs["NARROW"], knobs["STREAM_DEPTH"], knobs["STREAM_STAGES"], 4
        while width > 32 and -(-columns // width) < enough:
            width //= 2
    else:
        depth, stages = knobs["DEPTH"], knobs["STAGES"]
        known = TILES if architecture >= 90 else SMALLER_TILES
        known = [tile for tile in known if tile[0] * tile[1] * itemsize <= room]
        fitting = [tile for tile in known if -(-rows // tile[0]) * -(-columns // tile[1]) >= enough]
        height, width, warps = (fitting or known[-1:])[0]
    bulk = bool(alignment >= 8 and architecture >= 90 and rows >= knobs["BULK_ROWS"])
    if groups > 1 or not (bulk or alignment >= 16):  # more sums, or addresses, than registers are for
        height, width, depth, warps = min(height, 64), min(width, 64 if groups > 1 else 32), 32, 4
    while stages > 2 and shared_bytes(height, width, depth, stages, False, itemsize) > room:
        stages -= 1
    while depth > 16 and shared_bytes(height, width, depth, stages, False, itemsize) > room:
        depth //= 2
    tiles = -(-rows // height) * -(-columns // width)
    stay = bool(bulk and groups == 1 and not add and tiles >= knobs["STAY_TILES"])
    stay = stay and shared_bytes(height, width, depth, stages, True, itemsize) <= room
    return {
        "height": height, "width": width, "depth": depth, "warps": warps, "stages": stages, "swap": swap,
        "bulk": bulk, "stay": stay,
    }  # fmt: skip


def schedule(axes, knobs):
    """Choose how each of a call's products is cut: see `cut`."""
    sizes = axes["tokens"], axes["in_features"], axes["out_features"]
    architecture, alignment = axes.get("architecture", 90), axes.get("alignment", 16)
    answer = {}
    for name, which, rows, columns, groups, itemsize in (
        ("out", FORWARD, sizes[0], sizes[2], K_GROUPS, 2),
        ("dx", OF_X, sizes[0], sizes[1], N_GROUPS, 2),
        ("dweight", OF_WEIGHT, sizes[2], sizes[1], 1, 4),
    ):
        plan = cut(which, rows, columns, groups, False, architecture, alignment, knobs, itemsize)
        answer |= {f"{name}_{key}": value for key, value in plan.items()}
    return answer


# ---- Entry points. Rows [T, K], [T, N] and weight [N, K] in 16 bits; dweight, dbias float32 or 16 bits.


def linear(x, weight, bias, out):
    """Write x [T, K] @ weight [N, K]^T + bias [N] (or None) into out [T, N]."""
    if x.shape[0]:
        product(FORWARD, x, weight, out, bias, K_GROUPS, False)


def linear_backward(x, weight, dout, dx, dweight, dbias, accumulate):
    """Write the gradients that are not None; sums over tokens are added to if `accumulate`."""
    tokens, outputs = dout.shape
    if not tokens:
        for sums in (dweight, dbias):
            if sums is not None and not accumulate:
                sums.zero_()
        return
    if dx is not None:
        product(OF_X, dout, weight, dx, None, N_GROUPS, False)
    if dweight is not None:
        product(OF_WEIGHT, dout, x, dweight, None, 1, bool(accumulate))
    if dbias is not None:
        launch(
            *(add_rows_kernel, triton.cdiv(outputs, 32), 4, 3),
            *(dout, dbias, tokens, outputs, dout.stride(0), bool(accumulate), 32, 128),
        )


def launch(kernel, programs, warps, stages, *arguments, **options):
    kernel[(programs,)](*arguments, num_warps=warps, num_stages=stages, enable_fp_fusion=False, **options)


def architecture_of(device):
    """Compute capability as one number: 90 is 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def alignment_of(x):
    """Of how many of its elements the addresses of x's rows are multiples: 16, 8 or, without more, 1."""
    if x.data_ptr() % 16 or x.stride(1) != 1:
        return 1
    return 16 if x.stride(0) % 16 == 0 else 8 if x.stride(0) % 8 == 0 else 1


def product(which, a, b, c, bias, groups, add):
    """c = a @ b (+ bias), or c + a @ b; `which` says along which axes of a and b the sums run."""
    tokens = a.shape[0]
    inputs, outputs = (b.shape[1], a.shape[1]) if which != FORWARD else (a.shape[1], b.shape[0])
    rows, columns = c.shape
    summed = outputs if which == OF_X else inputs
    length = triton.cdiv(summed, groups) if which != OF_WEIGHT else 0
    alignment = min(alignment_of(a), alignment_of(b))
    architecture = architecture_of(a.device)
    plan = cut(which, rows, columns, groups, add, architecture, alignment, chosen_knobs(), c.element_size())
    height, width, depth = plan["height"], plan["width"], plan["depth"]
    bulk = plan["bulk"] and (groups == 1 or length % depth == 0)
    if bulk:
        a_tile = [depth, height] if which == OF_WEIGHT else [height, depth]
        b_tile = [width, depth] if which == FORWARD else [depth, width]
        a_read = TensorDescriptor(a, list(a.shape), list(a.stride()), a_tile)
        b_read = TensorDescriptor(b, list(b.shape), list(b.stride()), b_tile)
    tiles = triton.cdiv(rows, height) * triton.cdiv(columns, width)
    stay = plan["stay"] and bulk
    even = which != OF_WEIGHT and length % depth == 0 and length * groups == summed
    launch(
        *(product_kernel, min(tiles, PROGRAMS) if stay else tiles, plan["warps"], plan["stages"]),
        *(a_read if bulk else a, b_read if bulk else b, c, c if bias is None else bias),
        *(tokens, inputs, outputs, length, a.stride(0), b.stride(0), c.stride(0)),
        *(which, groups, even, bias is not None, add, height, width, depth, TOGETHER),
        *(plan["swap"], bulk, stay),
        # ptxas would spill in small tiles to fit more programs onto a multiprocessor
        **({} if architecture >= 90 else {"maxnreg": 255}),
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
def read(
    X, stride, o, first, count, r, stop, SECOND: tl.constexpr,
    ALONG: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A tile [O, R] of a factor, SECOND [R, O]: places `o`, from `first` on, of R numbers of their sums.

    ALONG: the sum runs along the rows of X. What lies outside is 0. A tile is made in the shape in which it
    is multiplied: transposed afterwards, it would pass through registers.
    """
    if BULK:
        if ALONG:
            tile = X.load([first, r])
        else:
            tile = X.load([r, first])
        return tl.trans(tile) if ALONG == SECOND else tile
    else:
        o_r = r + tl.arange(0, R)
        if SECOND:
            o_r, o = o_r[:, None], o[None, :]
        else:
            o_r, o = o_r[None, :], o[:, None]
        p = X + o.to(tl.int64) * stride + o_r if ALONG else X + o_r.to(tl.int64) * stride + o
        return tl.load(p, mask=(o < count) if EVEN else (o < count) & (o_r < stop), other=0.0)


@triton.jit
def chain(
    A, B, total, i, j, rows, columns, start, stop, sa, sb,
    WHICH: tl.constexpr, EVEN: tl.constexpr, I: tl.constexpr, J: tl.constexpr, R: tl.constexpr,
    SWAP: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Go on with a tile's sums over start .. stop - 1. Swapped, the tile is [J, I]."""
    o_i, o_j = i + tl.arange(0, I), j + tl.arange(0, J)
    for r in tl.range(start, stop, R):
        a = read(A, sa, o_i, i, rows, r, stop, SWAP, WHICH != 2, EVEN, BULK, R)
        b = read(B, sb, o_j, j, columns, r, stop, not SWAP, WHICH == 0, EVEN, BULK, R)
        if SWAP:
            total = tl.dot(b, a, total)
        else:
            total = tl.dot(a, b, total)
    return total


@triton.jit
def parts(
    A, B, i, j, rows, columns, depth, length, sa, sb, LOW: tl.constexpr, COUNT: tl.constexpr,
    WHICH: tl.constexpr, EVEN: tl.constexpr, I: tl.constexpr, J: tl.constexpr, R: tl.constexpr,
    SWAP: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Sums of COUNT parts from LOW on, each from +0, added in pairs."""
    if COUNT == 1:
        zero = tl.zeros((J, I) if SWAP else (I, J), tl.float32)
        start, stop = LOW * length, tl.minimum(LOW * length + length, depth)
        return chain(
            A, B, zero, i, j, rows, columns, start, stop, sa, sb, WHICH, EVEN, I, J, R, SWAP, BULK
        )  # fmt: skip
    else:
        HALF: tl.constexpr = COUNT // 2
        low = parts(
            A, B, i, j, rows, columns, depth, length, sa, sb, LOW, HALF, WHICH, EVEN, I, J, R, SWAP, BULK
        )  # fmt: skip
        high = parts(
            A, B, i, j, rows, columns, depth, length, sa, sb, LOW + HALF, HALF,
            WHICH, EVEN, I, J, R, SWAP, BULK,
        )  # fmt: skip
        return low + high


@triton.jit
def compute_tile(
    A, B, C, BIAS, tile, rows, columns, depth, length, sa, sb, sc,
    WHICH: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr, I: tl.constexpr, J: tl.constexpr, R: tl.constexpr, TOGETHER: tl.constexpr,
    SWAP: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """One tile, start to end. TOGETHER rows of tiles are walked column by column, for the second level."""
    high = tl.cdiv(rows, I)
    band = TOGETHER * tl.cdiv(columns, J)
    top = tile // band * TOGETHER
    tall = tl.minimum(high - top, TOGETHER)
    i, j = (top + tile % band % tall) * I, tile % band // tall * J
    o_i, o_j = i + tl.arange(0, I), j + tl.arange(0, J)
    p_c = C + o_i.to(tl.int64)[:, None] * sc + o_j[None, :]
    m = (o_i < rows)[:, None] & (o_j < columns)[None, :]
    if GROUPS == 1:
        if ADD:
            total = tl.load(p_c, mask=m, other=0.0).to(tl.float32)
            if SWAP:
                total = tl.trans(total)
        else:
            total = tl.zeros((J, I) if SWAP else (I, J), tl.float32)
        total = chain(
            A, B, total, i, j, rows, columns, 0, depth, sa, sb, WHICH, EVEN, I, J, R, SWAP, BULK
        )  # fmt: skip
    else:
        total = parts(
            A, B, i, j, rows, columns, depth, length, sa, sb, 0, GROUPS,
            WHICH, EVEN, I, J, R, SWAP, BULK,
        )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(BIAS + o_j, mask=o_j < columns, other=0.0).to(tl.float32)
        total += bias[:, None] if SWAP else bias[None, :]
    result = canonical(total, C.dtype.element_ty)
    if SWAP:
        result = tl.trans(result)
    tl.store(p_c, result, mask=m)


@triton.jit(do_not_specialize=["tokens"])
def product_kernel(
    A, B, C, BIAS, tokens, inputs, outputs, length, sa, sb, sc,
    WHICH: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr, I: tl.constexpr, J: tl.constexpr, R: tl.constexpr, TOGETHER: tl.constexpr,
    SWAP: tl.constexpr, BULK: tl.constexpr, STAY: tl.constexpr,
):  # fmt: skip
    """Tiles of a product: one a program, or, where programs stay, every so many of them."""
    if WHICH == 0:
        rows, columns, depth = tokens, outputs, inputs
    elif WHICH == 1:
        rows, columns, depth = tokens, inputs, outputs
    else:
        rows, columns, depth = outputs, inputs, tokens
    if STAY:
        tiles = tl.cdiv(rows, I) * tl.cdiv(columns, J)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            compute_tile(
                A, B, C, BIAS, tile, rows, columns, depth, length, sa, sb, sc,
                WHICH, GROUPS, EVEN, HAS_BIAS, ADD, I, J, R, TOGETHER, SWAP, BULK,
            )  # fmt: skip
    else:
        compute_tile(
            A, B, C, BIAS, tl.program_id(0), rows, columns, depth, length, sa, sb, sc,
            WHICH, GROUPS, EVEN, HAS_BIAS, ADD, I, J, R, TOGETHER, SWAP, BULK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def add_rows_kernel(
    X, TOTAL, tokens, columns, sx, ADD: tl.constexpr, J: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Sums of columns, as a product of ones with X; all rows of its tile are equal, the first is kept."""
    o_i, o_r, o_j = tl.arange(0, 16), tl.arange(0, R), tl.program_id(0) * J + tl.arange(0, J)
    p_total = TOTAL + o_j[None, :] + 0 * o_i[:, None]
    m = (o_j < columns)[None, :]
    total = tl.load(p_total, mask=m, other=0.0).to(tl.float32) if ADD else tl.zeros((16, J), tl.float32)
    ones = tl.full((16, R), 1.0, X.dtype.element_ty)
    for r in tl.range(0, tokens, R):
        rows = (r + o_r).to(tl.int64)
        x = tl.load(X + rows[:, None] * sx + o_j[None, :], mask=m & (rows < tokens)[:, None], other=0.0)
        total = tl.dot(ones, x, total)
    tl.store(p_total, canonical(total, TOTAL.dtype.element_ty), mask=m & (o_i == 0)[:, None])
