"""The fused step's contracts, workloads and costs. README.md draws the steps; this file states them."""

from functools import partial

from kernelbraid.contract import (
    AccuracyBound,
    Axis,
    Contract,
    Cost,
    Exclusion,
    Knob,
    Regime,
    Relation,
    RoundingPoint,
    Workload,
)
from kernelbraid.ops.attention.spec import HEAD_DIMS, LARGEST_PAGE
from kernelbraid.ops.problem import Operator, Peer, Problem, Rows
from kernelbraid.ops.qk_norm import spec as norm
from kernelbraid.ops.qk_norm_rope_cache.lowering import ENTRY_POINT, draw, load_axes, lower, timed
from kernelbraid.ops.rope import spec as rope
from kernelbraid.ops.rows import KINDS, MOST_REQUESTS, ROLLOUT, TOKENS

AXES = (
    Axis("query_heads", 1, norm.MOST_HEADS, constant=True, doc="heads of q"),
    Axis("kv_heads", 1, norm.MOST_HEADS, constant=True, doc="heads of k and v"),
    Axis("head_dim", 64, 128, constant=True, choices=HEAD_DIMS, doc="elements of a head"),
    Axis("norm", 0, 1, constant=True, doc="1: heads of q and k are normalized first"),
    Axis("batch", 0, MOST_REQUESTS, constant=False, doc="requests in one call"),
    TOKENS,
    Axis("page_size", 1, LARGEST_PAGE, constant=False, doc="tokens of a page"),
)
EXCLUSIONS = (
    *norm.EXCLUSIONS,
    *rope.EXCLUSIONS,
    Exclusion("fp8_cache", "a cache of 8 bits needs scales and a rounding point of its own"),
)

RELATIONS = (
    Relation("rerun", "the same call again gives the same bits", ROLLOUT),
    Relation("fresh_process", "another process gives the same bits", ROLLOUT),
    Relation("batch", "a request does not depend on its neighbours, nor on their number or order", ROLLOUT),
    Relation("padding", "poisoned rows, pages and table tails behind a call's do not matter", ROLLOUT),
    Relation("chunked_prefill", "any partition of a prompt gives the prompt's bits", ("chunked_prefill",)),
    Relation("paging", "page size and page order do not matter", ROLLOUT),
    Relation("decode_equals_prefill", "a token decoded alone equals its row of the prompt", ("decode",)),
)
AGREE = Relation("implementations_agree", "equal bits ids mean equal bits", ROLLOUT)
REPLAY = Relation(
    "graph_replay",
    "a captured graph replayed on other inputs, lengths and tables equals those computed at once",
    ROLLOUT,
)

SPECIAL_VALUES = (
    ("eps", "positive and finite; not read where norm is 0"),
    ("a position outside the tables", "NaN in every element of the token's q and k; nothing is read outside"),
    ("a page outside the cache", "the token is not written; nothing is touched outside"),
    ("v", "every bit kept, of NaNs too"),
    ("NaN in q and k", "stored as the canonical one"),
    ("slots of no new token", "keep what they hold"),
)

CONTRACT = Contract(
    operator=ENTRY_POINT,
    version=1,
    dtypes=("float32",),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=norm.CONTRACT.rounding_points,
    elementary_operations=norm.CONTRACT.elementary_operations,
    reduction_orders=(
        ("norm", "where norm is 1, the steps of qk_norm/1 with the same `lanes`"),
        ("rotation", "the steps of rope/1 on its results, or on q and k"),
        ("store", "q to q_out; k and v to the slot of position seqlens_k - cu_seqlens_q[b + 1] + t"),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(Knob("lanes", (8, 16, 32, 64), 16, "partial sums along a head"),),
    relations=(*RELATIONS, AGREE),
    accuracy=tuple(AccuracyBound(each, 1.25, 2e-7, ROLLOUT) for each in ("q", "k")),
)

CUDA_CONTRACT = Contract(
    operator=ENTRY_POINT,
    version=1,
    dtypes=("bfloat16", "float16"),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("every elementary operation", "float32, to nearest even"),
        RoundingPoint("between norm and rotation", "float32 to the compute dtype, as qk_norm stores it"),
        RoundingPoint("store of q_out and of k", "float32 to the compute dtype"),
    ),
    elementary_operations=norm.CUDA_CONTRACT.elementary_operations,
    reduction_orders=(
        ("norm", "where norm is 1, the steps of qk_norm/1"),
        ("rotation", "the steps of rope/1 on its rounded results, or on q and k"),
        ("store", "q to q_out; k and v to the slot of position seqlens_k - cu_seqlens_q[b + 1] + t"),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(),
    relations=(*RELATIONS, REPLAY, AGREE),
    accuracy=tuple(AccuracyBound(each, 1.0, 0.0, ROLLOUT, 1.02) for each in ("q", "k")),
)


def _workload(
    phase: Regime,
    heads: norm.Heads,
    normed: bool,
    batch: int,
    tokens: int,
    length: int,
    *,
    page: int = 16,
    weight: float = 1.0,
) -> Workload:
    """`tokens` new ones of `batch` requests, which have `length` positions each then."""
    axes = (
        *(("batch", batch), ("tokens", tokens), ("length", length), ("page_size", page)),
        *zip(norm.NAMES, heads, strict=True),
        ("norm", int(normed)),
    )
    return Workload(phase, axes, weight)


def _step(heads: norm.Heads, normed: bool, layers: int) -> tuple[Workload, ...]:
    """Calls of one GRPO step, one a layer: prompts, chunks, decode at batch 16 and 64."""
    return (
        _workload("prefill", heads, normed, 4, 800, 200, weight=2 * layers),
        _workload("chunked_prefill", heads, normed, 1, 140, 400, weight=16 * layers),
        _workload("decode", heads, normed, 16, 16, 700, weight=900 * layers),
        _workload("decode", heads, normed, 64, 64, 700, weight=300 * layers),
    )


def _decode(heads: norm.Heads, normed: bool) -> tuple[Workload, ...]:
    return tuple(_workload("decode", heads, normed, n, n, 1000) for n in (1, 16, 64, 256))


SMOLLM2_135M, QWEN3_0_6B, QWEN3_8B = norm.SMOLLM2_135M, norm.QWEN3_0_6B, norm.QWEN3_8B
LLAMA_8B = QWEN3_8B

GRIDS = {
    "study": _step(SMOLLM2_135M, False, 30),
    "cpu": tuple(
        workload
        for heads, normed in ((SMOLLM2_135M, False), (QWEN3_0_6B, True))
        for workload in (
            _workload("decode", heads, normed, 16, 16, 700),
            _workload("prefill", heads, normed, 4, 2048, 512),
        )
    ),
}
CUDA_GRIDS = {
    "study": _step(QWEN3_8B, True, 36),
    "large": tuple(
        _workload("prefill", heads, normed, 8, tokens, tokens // 8)
        for heads, normed in ((QWEN3_0_6B, True), (QWEN3_8B, True), (LLAMA_8B, False))
        for tokens in (8192, 32768)
    ),
    "decode": (*_decode(QWEN3_0_6B, True), *_decode(QWEN3_8B, True), *_decode(LLAMA_8B, False)),
}
SCOPES = tuple(
    {**dict(zip(norm.NAMES, heads, strict=True)), "norm": normed}
    for heads, normed in (((14, 2, 64), 0), ((5, 1, 64), 1), ((40, 8, 128), 1))
)


def cost(workload: Workload, *, itemsize: int) -> Cost:
    """Least work of one call: q and k read and written once, v too, each token's row of the tables."""
    tokens, kv_heads, depth = (workload.shape[name] for name in ("tokens", "kv_heads", "head_dim"))
    assert isinstance(tokens, int) and isinstance(kv_heads, int) and isinstance(depth, int)
    length, normed = workload.shape["length"], workload.shape["norm"]
    assert isinstance(length, int)
    moved = 2 * itemsize * (norm.elements(workload) + tokens * kv_heads * depth)
    looked_up = 4 * tokens + 4 * min(tokens, length) * depth
    return Cost((7.0 if normed else 3.0) * norm.elements(workload), moved + looked_up)


def _reference(problem: Problem) -> Rows:
    from kernelbraid.ops.qk_norm_rope_cache.reference import reference

    return reference(problem)


def _vendor(problem: Problem) -> Rows:
    from kernelbraid.ops.qk_norm_rope_cache.reference import vendor

    return vendor(problem)


QK_NORM_ROPE_CACHE = Operator(
    name=ENTRY_POINT,
    backend="cpu",
    contract=CONTRACT,
    files=("cpu.py",),
    entry_points=(ENTRY_POINT,),
    regimes=ROLLOUT,
    grids=GRIDS,
    draw=partial(draw, dtypes=CONTRACT.dtypes),
    lower=lower,
    reference=_reference,
    vendor=_vendor,
    cost=partial(cost, itemsize=4),
    load_axes=load_axes,
    timed=partial(timed, dtype="float32"),
    peers=(Peer("torch", "torch_steps", ROLLOUT),),
    peer_file="peers.py",
    scopes=SCOPES,
    kinds=KINDS,
)

QK_NORM_ROPE_CACHE_CUDA = Operator(
    name=ENTRY_POINT,
    backend="cuda",
    contract=CUDA_CONTRACT,
    files=("gpu.py",),
    entry_points=(ENTRY_POINT,),
    regimes=ROLLOUT,
    grids=CUDA_GRIDS,
    draw=partial(draw, dtypes=CUDA_CONTRACT.dtypes),
    lower=lower,
    reference=_reference,
    vendor=_vendor,
    cost=partial(cost, itemsize=2),
    load_axes=load_axes,
    timed=partial(timed, dtype="bfloat16"),
    peers=(Peer("torch", "torch_steps", ROLLOUT),),
    peer_file="peers_gpu.py",
    scopes=SCOPES,
    kinds=KINDS,
)
