"""Unified attention's contracts and costs. README.md derives the orders; this file states them."""

from dataclasses import replace
from functools import partial

from kernelbraid.contract import (
    AccuracyBound,
    Axis,
    Contract,
    Cost,
    ElementaryOperation,
    Exclusion,
    Knob,
    Regime,
    Relation,
    RoundingPoint,
    Workload,
)
from kernelbraid.ops.attention.inputs import LARGEST_BATCH, LARGEST_LENGTH, draw
from kernelbraid.ops.attention.lowering import load_axes, lower, timed, workload_lengths
from kernelbraid.ops.attention.workloads import CUDA_GRIDS, GRIDS, SCOPES
from kernelbraid.ops.problem import Operator, Peer, Problem, Rows

HEAD_DIMS = (64, 128)
LARGEST_PAGE = 256
MOST_HEADS = 1024

EXP2_TABLES = (
    ("degree 4", ("0x1p+0", "0x1.62dfcap-1", "0x1.ebf1b4p-3", "0x1.ca9008p-5", "0x1.409102p-7")),
    (
        "degree 5",
        ("0x1p+0", "0x1.62e39ep-1", "0x1.ebfa4ep-3", "0x1.c74322p-5", "0x1.3cbea8p-7", "0x1.23a5eep-10"),
    ),
    (
        "degree 6",
        (
            *("0x1p+0", "0x1.62e432p-1", "0x1.ebfbe2p-3", "0x1.c6ae72p-5", "0x1.3b270ep-7"),
            *("0x1.5f7276p-10", "0x1.470b48p-13"),
        ),
    ),
    (
        "degree 7",
        (
            *("0x1p+0", "0x1.62e430p-1", "0x1.ebfbe0p-3", "0x1.c6b056p-5", "0x1.3b2a1cp-7"),
            *("0x1.5dc052p-10", "0x1.443f96p-13", "0x1.c047dap-17"),
        ),
    ),
)
LOG2_TABLE = (
    "odd powers of z",
    ("0x1.715476p+1", "0x1.ec709ep-1", "0x1.2776c6p-1", "0x1.a61762p-2", "0x1.484b14p-2"),
)
CUDA_LOG2_TABLE = (
    "powers of r",
    (
        *("-0x1.715476p-1", "0x1.ec7094p-2", "-0x1.715492p-2", "0x1.277f32p-2", "-0x1.ec7916p-3"),
        *("0x1.a417e8p-3", "-0x1.6e9c86p-3", "0x1.5f9e54p-3", "-0x1.58fe60p-3", "0x1.8d64fep-4"),
    ),
)

ROLLOUT: tuple[Regime, ...] = ("prefill", "chunked_prefill", "decode")
FORWARD: tuple[Regime, ...] = (*ROLLOUT, "update")
TRAINING: tuple[Regime, ...] = (*FORWARD, "backward")
BACKWARD: tuple[Regime, ...] = ("backward",)

AXES = (
    Axis("query_heads", 1, MOST_HEADS, constant=True, doc="Hq; a multiple of kv_heads"),
    Axis("kv_heads", 1, MOST_HEADS, constant=True, doc="Hkv; query head h reads KV head h // (Hq // Hkv)"),
    Axis("head_dim", min(HEAD_DIMS), max(HEAD_DIMS), constant=True, choices=HEAD_DIMS, doc="D"),
    Axis("batch", 0, LARGEST_BATCH, constant=False, doc="requests in one call"),
    Axis("query_length", 0, LARGEST_LENGTH, constant=False, doc="most new tokens of a request in one call"),
    Axis("key_length", 0, LARGEST_LENGTH, constant=False, doc="most keys of a request, new tokens included"),
    Axis("page_size", 1, LARGEST_PAGE, constant=False, doc="tokens a page of the KV cache holds"),
)
EXCLUSIONS = (
    Exclusion("window", "sliding-window attention skips chunks, whose order this version does not state"),
    Exclusion("soft_cap", "a cap on scores adds a tanh, which needs a written-out definition of its own"),
    Exclusion("sinks", "attention sinks add a term to L, whose place in the order is not fixed yet"),
    Exclusion("fp8_cache", "caches below the compute dtype need rounding points of their own"),
)
RELATIONS = (
    Relation("rerun", "the same call again gives the same bits", FORWARD),
    Relation("fresh_process", "another process gives the same bits", FORWARD),
    Relation("batch", "a row does not depend on its neighbours, nor on their number or order", FORWARD),
    Relation(
        "padding", "poisoned extra pages, table columns, rows and empty requests do not matter", FORWARD
    ),
    Relation("packing", "a sequence packed with others equals the sequence alone", ("update",)),
    Relation("chunked_prefill", "any partition of a prompt gives the prompt's bits", ("chunked_prefill",)),
    Relation("prefix_cache", "pages shared with other requests give the bits of pages of one's own", ROLLOUT),
    Relation("paging", "page size and page order do not matter", ROLLOUT),
    Relation("decode_equals_prefill", "a token decoded alone equals its row of the prompt", ("decode",)),
    Relation("update_equals_rollout", "the packed forward equals the rows that rollout gave", ("update",)),
)
TRAINED_RELATIONS = (
    *(
        replace(each, regimes=TRAINING) if each.name in ("fresh_process", "batch", "padding") else each
        for each in RELATIONS
    ),
    Relation("gradient_rerun", "the same gradients again", BACKWARD),
    Relation(
        "gradient_packing", "gradients of a packed sequence equal those of the sequence alone", BACKWARD
    ),
)
IMPLEMENTATIONS_AGREE = Relation("implementations_agree", "equal bits ids mean equal bits", TRAINING)

CONTRACT = Contract(
    operator="attention",
    version=1,
    dtypes=("float32",),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("scale: cl = softmax_scale * log2(e)", "computed in float64, rounded once to float32"),
        RoundingPoint("every elementary operation", "float32, to nearest even, denormals kept"),
        RoundingPoint("store of O, LSE, dQ, dK, dV", "float32 already: no further rounding"),
    ),
    elementary_operations=(
        ElementaryOperation("multiply, add, subtract", "IEEE-754 binary32, never contracted"),
        ElementaryOperation("fma", "a * b + c rounded once, and only where the orders below write fma"),
        ElementaryOperation("divide", "IEEE-754 binary32, correctly rounded"),
        ElementaryOperation(
            "exp2",
            "x < -125 gives +0; else t = x + 12582912, n = t - 12582912, r = x - n, p = polynomial in r by "
            "Horner's rule with fma, result p * 2^n with 2^n built from bits; NaN gives NaN",
            EXP2_TABLES,
        ),
        ElementaryOperation(
            "log2",
            "x = 2^e * f with f in [sqrt(1/2), sqrt(2)) by bits, z = (f - 1) / (f + 1), w = z * z, p = "
            "polynomial in w by Horner's rule with fma, result fma(z, p, float32(e)); "
            "0 gives -inf, +inf gives +inf, NaN gives NaN",
            (LOG2_TABLE,),
        ),
    ),
    reduction_orders=(
        ("score", "s = +0; d ascending: s = fma(q[d], k[j][d], s); then x[j] = s * cl"),
        ("maximum", "over the visible keys of a block and the running maximum; NaN never becomes it"),
        (
            "weights of a block",
            "j ascending: p = exp2(x[j] - ms); l[j mod 16] += p; acc[d] = fma(p, v[j][d], acc[d]); before it "
            "acc and l are multiplied by exp2(m - ms)",
        ),
        ("chunk", "from m = -inf, l = +0, acc = +0; blocks ascending; the 16 lanes of l added by halving"),
        (
            "merge",
            "chunks ascending from M = -inf, L = +0, A = +0: A = fma(acc, a1, A * a0), "
            "L = fma(l, a1, L * a0) with a0 = exp2(M - Ms), a1 = exp2(m - Ms)",
        ),
        ("store", "O = A / L + 0, LSE = (M + log2(L)) * ln2"),
        ("backward: delta", "+0; d ascending: delta = fma(O[d], dO[d], delta)"),
        (
            "backward: weights",
            "s = fma(q[d], k[d], s) from +0, d ascending; x = fma(s, cl, nl), 0 where x > 0, with "
            "nl = -float32(float64(LSE) * log2(e)); w = exp2(x); W = blocks of 64 keys ascending from "
            "position 0, each from +0 by j ascending: part = part + w, then W = W + part; p = w * (1 / W)",
        ),
        (
            "backward: pair",
            "dp = fma(dO[d], v[d], dp) from +0, d ascending; ds = p * (dp - delta)",
        ),
        (
            "backward: dQ",
            "blocks of 64 keys ascending from position 0, each from +0 by j ascending: part = fma(ds, k, "
            "part), then dQ = dQ + part; stored as dQ * float32(softmax_scale) + 0",
        ),
        (
            "backward: dK, dV",
            "query heads of the group in order, blocks of 64 query rows ascending, each from +0 by i "
            "ascending: part = fma(ds, q, part), fma(p, dO, part); then added; stored as "
            "dK * float32(softmax_scale) + 0, dV + 0",
        ),
    ),
    special_values=(
        ("softmax_scale", "positive and finite"),
        ("signed zeros", "a zero result is stored as +0"),
        ("denormals", "kept, in inputs and results; a thread that flushes them is an error"),
        ("NaN", "propagates to the rows that see it and is stored as the canonical 0x7fc00000"),
        ("infinity", "follows IEEE-754 arithmetic of the steps"),
        ("keys a row cannot see", "never enter, whatever they hold"),
        ("no query rows", "nothing is stored"),
    ),
    knobs=(
        Knob("chunk", (256, 512, 1024, 2048, 4096), 256, "keys per chunk, from position 0"),
        Knob("key_block", (16, 32, 64, 128, 256), 64, "keys per online-softmax step; divides chunk"),
        Knob("exp2_degree", (4, 5, 6, 7), 6, "degree of the exp2 polynomial"),
    ),
    relations=(*TRAINED_RELATIONS, IMPLEMENTATIONS_AGREE),
    # Measured in screens of all scopes: out, dq, dk and dv at most 1.03 times torch's error in the mean over
    # rows, 1.15 in a case's norm. Degree 4 of exp2: 2.4 times and more in the mean, from 1.2e-6 on.
    accuracy=(
        AccuracyBound("out", factor=1.5, floor=5e-7, regimes=FORWARD),
        AccuracyBound("lse", factor=1.5, floor=5e-7, regimes=FORWARD),
        *(AccuracyBound(each, factor=1.5, floor=5e-7, regimes=BACKWARD) for each in ("dq", "dk", "dv")),
    ),
    canonical_nan=True,
)

CUDA_CONTRACT = Contract(
    operator="attention",
    version=1,
    dtypes=("bfloat16", "float16"),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("scale: c2 = softmax_scale * log2(e)", "computed in float64, rounded once to float32"),
        RoundingPoint("every elementary operation", "float32, to nearest even; its instruction says more"),
        RoundingPoint(
            "weights p, before they meet V", "float32 to the compute dtype; l sums the rounded ones"
        ),
        RoundingPoint("store of O", "float32 to the compute dtype"),
        RoundingPoint("store of LSE", "float32 already: no further rounding"),
        RoundingPoint("backward: p before it meets dO, ds before it meets K or Q", "to the compute dtype"),
        RoundingPoint("store of dQ, dK, dV", "float32 to the compute dtype"),
    ),
    elementary_operations=(
        ElementaryOperation("multiply, add, subtract", "mul.f32, add.f32, sub.f32, never contracted"),
        ElementaryOperation("fma", "fma.rn.f32, and only where the orders below write fma"),
        ElementaryOperation("ex2", "ex2.approx.ftz.f32: a denormal result is +0"),
        ElementaryOperation(
            "log2",
            "x = 2^e * f with f in [2/3, 4/3) by bits, r = f - 1, p = polynomial in r by Horner's rule with "
            "fma, result float32(e) + fma(r, 0x1.715476p+0, r * (r * p)); 0 gives -inf, +inf gives +inf, NaN "
            "gives NaN (as Triton writes out libdevice's log2f)",
            (CUDA_LOG2_TABLE,),
        ),
        ElementaryOperation("1 / L", "div.rn.f32, correctly rounded"),
        ElementaryOperation("maximum", "max.f32: NaN loses"),
        ElementaryOperation("round16", "cvt.rn to bfloat16 or float16, to nearest even"),
        ElementaryOperation(
            "chain",
            "the matrix unit's accumulation (wgmma, mma.sync): exact products of 16-bit numbers into one "
            "float32 accumulator, K ascending in the hardware's groups; the inner rounding is its own",
        ),
    ),
    reduction_orders=(
        ("score", "s = chain over d of q[d] * k[j][d] from +0; -inf at keys that the row cannot see"),
        ("maximum", "mn = max(m, max_j(s[j]) * c2) over a block; ms = 0 if mn is -inf, otherwise mn"),
        (
            "weights of a block",
            "p[j] = round16(ex2(fma(s[j], c2, -ms))), a = ex2(m - ms), acc[d] = chain over j of p[j] * "
            "v[j][d] from acc[d] * a, l = chain over j of p[j] * 1 from l * a, m = mn",
        ),
        (
            "chunk",
            "from m = -inf, l = +0, acc = +0; blocks of key_block keys ascending; chunks begin at multiples "
            "of early_chunk below position early_keys, and of chunk from there on",
        ),
        (
            "merge",
            "chunks ascending from M = -inf, L = +0, A = +0: A = fma(acc, a1, A * a0), "
            "L = fma(l, a1, L * a0) with a0 = ex2(M - Ms), a1 = ex2(m - Ms)",
        ),
        ("store", "O = round16(A * (1 / L) + 0), LSE = (M + log2(L)) * ln2"),
        ("backward: delta", "sum over d of O[d] * dO[d] by halving: d and d + D/2, then d + D/4, and so on"),
        (
            "backward: weights",
            "p = ex2(fma(s, c2, -(LSE * log2e))), t = chain over d of dO[d] * v[d] from -delta, ds = p * t; "
            "both 0 where the key comes after the query",
        ),
        (
            "backward: dQ",
            "chain over keys ascending from position 0 of round16(ds) * k; then * softmax_scale + 0",
        ),
        (
            "backward: dK, dV",
            "one chain over the group's query heads in order and within a head over queries ascending from "
            "the sequence's first, of round16(ds) * q and of round16(p) * dO; then dK * softmax_scale + 0, "
            "dV + 0",
        ),
    ),
    special_values=(
        ("softmax_scale", "positive and finite"),
        ("signed zeros", "a zero result is stored as +0"),
        ("denormals", "kept in inputs, sums and results; a weight below 2^-126 is +0"),
        (
            "NaN, infinity in q and k",
            "reach the rows that see them; a NaN is stored as 0x7fc0, 0x7e00, 0x7fc00000",
        ),
        ("v below seqlens_k", "finite: a masked key of the same block has weight 0, and 0 * inf is NaN"),
        (
            "keys a row cannot see",
            "never enter k; slots at and after seqlens_k never enter, whatever they hold",
        ),
        ("backward", "q, k, v and dO finite: otherwise which rows turn NaN may follow the tiles"),
        ("no query rows", "nothing is stored"),
    ),
    knobs=(
        Knob("early_chunk", (256, 512, 1024), 256, "keys per chunk before position early_keys"),
        Knob("early_keys", (4096, 8192, 16384), 8192, "from this position on chunks have `chunk` keys"),
        Knob("chunk", (1024, 2048, 4096), 1024, "keys of a later chunk"),
        Knob("key_block", (32, 64), 64, "keys per online-softmax step; 32 on sm_80"),
    ),
    relations=(
        *TRAINED_RELATIONS,
        Relation(
            "graph_replay",
            "a captured graph replayed on other inputs, lengths and tables equals those computed at once",
            TRAINING,
        ),
        IMPLEMENTATIONS_AGREE,
    ),
    # FlashAttention-2's error on the same input is what a factor multiplies. Measured on sm_90: out 0.97 to
    # 1.0 times it, dq at most 1.02, dk and dv below 1. LSE is the log of a sum of rounded weights: 1.7e-4 of
    # it in bfloat16 for two keys, less for more.
    accuracy=(
        AccuracyBound("out", factor=1.5, floor=5e-4, regimes=FORWARD),
        AccuracyBound("lse", factor=1.5, floor=5e-4, regimes=FORWARD),
        *(AccuracyBound(each, factor=1.5, floor=5e-4, regimes=BACKWARD) for each in ("dq", "dk", "dv")),
    ),
    canonical_nan=True,
)


def cost(workload: Workload, *, itemsize: int = 4) -> Cost:
    """Least work of one call: its causal matrix products; every input read and every output written once.

    The forward has two products, the backward five.
    """
    shape = workload.shape
    lengths, rows = workload_lengths(workload)
    query_heads, kv_heads, head_dim = (_integer(shape[n]) for n in ("query_heads", "kv_heads", "head_dim"))
    visible = sum(r * (n - r) + r * (r + 1) // 2 for n, r in zip(lengths, rows, strict=True))
    backward = workload.phase == "backward"
    query_tensors, key_tensors = (4, 4) if backward else (2, 2)
    moved = (
        query_tensors * sum(rows) * query_heads * head_dim + key_tensors * sum(lengths) * kv_heads * head_dim
    )
    log_sums = sum(rows) * query_heads if workload.phase in ("update", "backward") else 0
    products = 5 if backward else 2
    return Cost(2.0 * products * visible * query_heads * head_dim, itemsize * moved + 4.0 * log_sums)


def _integer(value: int | tuple[int, ...]) -> int:
    assert isinstance(value, int)
    return value


def _reference(problem: Problem) -> Rows:
    from kernelbraid.ops.attention.reference import reference

    return reference(problem)


def _vendor(problem: Problem) -> Rows:
    from kernelbraid.ops.attention.reference import vendor

    return vendor(problem)


def _scopes() -> tuple[dict[str, int], ...]:
    return tuple(dict(zip(("query_heads", "kv_heads", "head_dim"), heads, strict=True)) for heads in SCOPES)


ENTRY_POINTS = ("attention", "paged_attention", "write_kv_cache", "attention_backward")

ATTENTION = Operator(
    name="attention",
    backend="cpu",
    contract=CONTRACT,
    files=("cpu.py",),
    entry_points=ENTRY_POINTS,
    regimes=TRAINING,
    grids=GRIDS,
    draw=draw,
    lower=lower,
    reference=_reference,
    vendor=_vendor,
    cost=cost,
    load_axes=load_axes,
    timed=timed,
    peers=(
        Peer("torch_sdpa", "torch_sdpa", ("prefill", "update")),
        Peer("torch_loop", "torch_loop", ("chunked_prefill", "decode")),
        Peer("torch_padded", "torch_padded", ("decode",)),
    ),
    peer_file="peers.py",
    scopes=_scopes(),
)

ATTENTION_CUDA = Operator(
    name="attention",
    backend="cuda",
    contract=CUDA_CONTRACT,
    files=("gpu.py",),
    entry_points=ENTRY_POINTS,
    regimes=TRAINING,
    grids=CUDA_GRIDS,
    draw=partial(draw, dtypes=CUDA_CONTRACT.dtypes),
    lower=lower,
    reference=_reference,
    vendor=_vendor,
    cost=partial(cost, itemsize=2),
    load_axes=load_axes,
    timed=partial(timed, backend="cuda", dtype="bfloat16"),
    peers=(
        Peer("torch_cudnn", "torch_cudnn", ("prefill", "update"), uniform=True),
        Peer("torch_flash_attention_2", "torch_flash", ("prefill", "update")),
        Peer("flash_attention_4", "flash_attention_4", ("prefill", "update"), "flash_attn.cute"),
        Peer("split_decode", "split_decode", ("decode",)),
        Peer("torch_cudnn", "torch_cudnn_decode", ("decode",), uniform=True),
        Peer("torch_flash_attention_2", "torch_flash_decode", ("decode",), uniform=True),
        Peer("flashinfer", "flashinfer_decode", ("decode",), "flashinfer", uniform=True),
        Peer("torch_cudnn", "torch_cudnn_backward", ("backward",), uniform=True),
        Peer("torch_flash_attention_2", "torch_flash_backward", ("backward",)),
        Peer("flash_attention_4", "flash_attention_4_backward", ("backward",), "flash_attn.cute"),
    ),
    peer_file="peers_gpu.py",
    scopes=_scopes(),
)
