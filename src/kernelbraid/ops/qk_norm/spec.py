"""QK norm's contracts, workloads and costs. README.md derives the orders; this file states them."""

from kernelbraid.contract import (
    AccuracyBound,
    Axis,
    Contract,
    Cost,
    Exclusion,
    Knob,
    Regime,
    RoundingPoint,
    Workload,
)
from kernelbraid.ops.problem import Peer
from kernelbraid.ops.records import on_rows
from kernelbraid.ops.rms_norm import spec as norm
from kernelbraid.ops.rows import (
    BACKWARD,
    FORWARD,
    TOKENS,
    Axes,
    Field,
    Gradients,
    RowForm,
    relations,
)

MOST_HEADS = 1024
LARGEST_HEAD = 256

AXES = (
    Axis("query_heads", 1, MOST_HEADS, constant=True, doc="heads of q"),
    Axis("kv_heads", 1, MOST_HEADS, constant=True, doc="heads of k"),
    Axis("head_dim", 1, LARGEST_HEAD, constant=True, doc="elements of a head"),
    TOKENS,
)
EXCLUSIONS = (
    *norm.EXCLUSIONS,
    Exclusion("layer_norm", "only Qwen3's RMS norm of single heads is covered"),
)


def _queries(axes: Axes) -> tuple[int, ...]:
    return axes["query_heads"], axes["head_dim"]


def _keys(axes: Axes) -> tuple[int, ...]:
    return axes["kv_heads"], axes["head_dim"]


def _head(axes: Axes) -> tuple[int, ...]:
    return (axes["head_dim"],)


FORM = RowForm(
    entry_point="qk_norm",
    inputs=(Field("q", _queries), Field("k", _keys)),
    parameters=(
        Field("q_weight", _head, scale=lambda axes: 0.5, offset=1.0),
        Field("k_weight", _head, scale=lambda axes: 0.5, offset=1.0),
    ),
    scalars={"eps": 1e-6},
    outputs=(Field("q_out", _queries), Field("k_out", _keys)),
    gradients=Gradients(
        entry_point="qk_norm_backward",
        given=(Field("dq_out", _queries), Field("dk_out", _keys)),
        rows=(Field("dq", _queries), Field("dk", _keys)),
        parameters=(
            Field("dq_weight", _head, dtype="float32"),
            Field("dk_weight", _head, dtype="float32"),
        ),
    ),
)

SPECIAL_VALUES = (
    ("eps", "positive and finite"),
    ("signed zeros", "a zero keeps the sign that the products give it"),
    ("denormals", "kept, in inputs and results; on the CPU a thread that flushes them is an error"),
    (
        "NaN and infinity",
        "reach every element of their own head by the arithmetic of the steps, and no other",
    ),
    ("gradients", "of finite numbers: a NaN reaches the gradients of the weights"),
)


def _accuracy(factor: float, floor: float, half_ulps: float = 0.0) -> tuple[AccuracyBound, ...]:
    forward = (AccuracyBound(each, factor, floor, FORWARD, half_ulps) for each in ("q_out", "k_out"))
    rows = (AccuracyBound(each, factor, floor, BACKWARD, half_ulps) for each in ("dq", "dk"))
    summed = (AccuracyBound(each, factor, floor, BACKWARD) for each in ("dq_weight", "dk_weight"))
    return (*forward, *rows, *summed)


CONTRACT = Contract(
    operator="qk_norm",
    version=1,
    dtypes=("float32",),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=norm.CONTRACT.rounding_points,
    elementary_operations=norm.CONTRACT.elementary_operations,
    reduction_orders=(
        (
            "sum of squares",
            "`lanes` partial sums, lane l from +0 over j = l, l + lanes, ...: s = fma(x[j], x[j], s); then "
            "added by halving: l and l + lanes / 2, then l + lanes / 4, and so on",
        ),
        ("factor", "r = 1 / sqrt(s / head_dim + eps)"),
        ("q_out, k_out", "(x[j] * r) * w[j]"),
        (
            "projection of the gradient",
            "lanes as above: s = fma(dout[j] * w[j], x[j] * r, s); c = s / head_dim",
        ),
        ("dq, dk", "r * fma(-c, x[j] * r, dout[j] * w[j])"),
        (
            "dq_weight, dk_weight",
            "heads of a call, a token's in order and token after token, counted anew from every 64th token: "
            "8 heads from +0, part = fma(dout, x * r, part); 8 such sums from +0; 8 of those from +0; then "
            "total + part, from +0 or from what is there",
        ),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(Knob("lanes", (8, 16, 32, 64), 16, "partial sums along a head"),),
    relations=relations(gradients=True, graph=False),
    accuracy=_accuracy(1.25, 2e-7),
    canonical_nan=True,
)

CUDA_CONTRACT = Contract(
    operator="qk_norm",
    version=1,
    dtypes=("bfloat16", "float16"),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("every elementary operation", "float32, to nearest even"),
        RoundingPoint(
            "store of q_out, k_out, dq, dk", "float32 to the compute dtype, once: not before the weight"
        ),
        RoundingPoint("store of dq_weight, dk_weight", "float32 already: no further rounding"),
    ),
    elementary_operations=norm.CUDA_CONTRACT.elementary_operations,
    reduction_orders=(
        (
            "sum of squares",
            "x[j] * x[j], filled up with +0 to a power of two, added by pairing neighbours: 0 with 1, 2 with "
            "3, then the sums in the same way",
        ),
        ("factor", "r = 1 / sqrt(s / head_dim + eps)"),
        ("q_out, k_out", "round16((x[j] * r) * w[j])"),
        ("projection of the gradient", "(dout[j] * w[j]) * (x[j] * r), added by pairing; c = s / head_dim"),
        ("dq, dk", "round16(r * fma(-c, x[j] * r, dout[j] * w[j]))"),
        (
            "dq_weight, dk_weight",
            "tokens of a call in blocks of token_block from its first; in a block each head from +0 in the "
            "order of tokens: part = fma(dout, x * r, part); then the heads, filled up with +0 to a power of "
            "two, by pairing neighbours; then total + part, from +0 or from what is there",
        ),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(Knob("token_block", (16, 32, 64), 16, "tokens of a partial sum of the weights' gradients"),),
    relations=relations(gradients=True, graph=True),
    accuracy=_accuracy(1.0, 1e-5, 0.64),
    canonical_nan=True,
)

SMOLLM2_135M = (9, 3, 64)
QWEN3_0_6B, QWEN3_8B, QWEN3_32B = (16, 8, 128), (32, 8, 128), (64, 8, 128)
NAMES = ("query_heads", "kv_heads", "head_dim")

CPU_CALLS: tuple[tuple[Regime, int], ...] = (("decode", 16), ("update", 2048), ("backward", 2048))
LARGE_CALLS: tuple[tuple[Regime, int], ...] = (("update", 8192), ("update", 32768), ("backward", 8192))
DECODE_CALLS: tuple[tuple[Regime, int], ...] = tuple(("decode", n) for n in (1, 16, 64, 256))

Heads = tuple[int, int, int]


def workload(phase: Regime, heads: Heads, tokens: int, weight: float = 1.0) -> Workload:
    return Workload(phase, (*zip(NAMES, heads, strict=True), ("tokens", tokens)), weight)


def step(heads: Heads, layers: int) -> tuple[Workload, ...]:
    """Calls of one GRPO step, one a layer: prompts, decode at batch 16 and 64, packed updates."""
    return (
        workload("prefill", heads, 800, 2 * layers),
        workload("chunked_prefill", heads, 140, 16 * layers),
        workload("decode", heads, 16, 900 * layers),
        workload("decode", heads, 64, 300 * layers),
        workload("update", heads, 1500, 32 * layers),
        workload("backward", heads, 1500, 16 * layers),
    )


def grid(models: tuple[Heads, ...], calls: tuple[tuple[Regime, int], ...]) -> tuple[Workload, ...]:
    return tuple(workload(phase, heads, tokens) for heads in models for phase, tokens in calls)


GRIDS = {
    "study": step(QWEN3_0_6B, 28),
    "cpu": grid((SMOLLM2_135M, QWEN3_0_6B), CPU_CALLS),
}
CUDA_GRIDS = {
    "study": step(QWEN3_8B, 36),
    "large": grid((QWEN3_0_6B, QWEN3_8B, QWEN3_32B), LARGE_CALLS),
    "decode": grid((QWEN3_0_6B, QWEN3_8B, QWEN3_32B), DECODE_CALLS),
}
SCOPES = tuple(
    dict(zip(NAMES, heads, strict=True)) for heads in ((1, 1, 9), (3, 1, 100), (14, 2, 64), (40, 8, 128))
)


def elements(workload: Workload) -> float:
    """Elements of q and k."""
    tokens, query_heads, kv_heads, head_dim = (workload.shape[name] for name in ("tokens", *NAMES))
    assert isinstance(tokens, int) and isinstance(head_dim, int)
    assert isinstance(query_heads, int) and isinstance(kv_heads, int)
    return float(tokens * (query_heads + kv_heads) * head_dim)


def cost(workload: Workload, *, dtype: str) -> Cost:
    """Least work of one call: every tensor read or written once; 4 operations an element, backward 12."""
    operations = 12.0 if workload.phase == "backward" else 4.0
    return Cost(operations * elements(workload), FORM.moved(workload, dtype))


PEERS = (
    Peer("torch", "torch_qk_norm", FORWARD),
    Peer("torch", "torch_qk_norm_backward", BACKWARD),
)
QK_NORM = on_rows(
    "cpu",
    CONTRACT,
    FORM,
    grids=GRIDS,
    cost=cost,
    peers=PEERS,
    scopes=SCOPES,
)
QK_NORM_CUDA = on_rows(
    "cuda",
    CUDA_CONTRACT,
    FORM,
    grids=CUDA_GRIDS,
    cost=cost,
    peers=(
        *PEERS,
        Peer("liger_kernel", "liger_qk_norm", FORWARD, "liger_kernel"),
    ),
    scopes=SCOPES,
)
