"""The rotary embedding's contracts, workloads and costs. README.md draws the steps; this file states them."""

from kernelbraid.contract import (
    AccuracyBound,
    Axis,
    Contract,
    Cost,
    ElementaryOperation,
    Exclusion,
    Relation,
    RoundingPoint,
    Workload,
)
from kernelbraid.ops.problem import Peer
from kernelbraid.ops.qk_norm.spec import (
    CPU_CALLS,
    DECODE_CALLS,
    LARGE_CALLS,
    MOST_HEADS,
    NAMES,
    QWEN3_0_6B,
    QWEN3_8B,
    QWEN3_32B,
    SMOLLM2_135M,
    elements,
    grid,
    step,
)
from kernelbraid.ops.records import on_rows
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

LARGEST_HEAD = 256
TABLE_POSITIONS = 4096
"""Rows of the tables of a drawn problem, as many as a request has positions at most there."""

AXES = (
    Axis("query_heads", 1, MOST_HEADS, constant=True, doc="heads of q"),
    Axis("kv_heads", 1, MOST_HEADS, constant=True, doc="heads of k"),
    Axis("head_dim", 2, LARGEST_HEAD, constant=True, doc="elements of a head, even"),
    TOKENS,
)
EXCLUSIONS = (
    Exclusion("interleaved", "pairs of neighbours instead of halves: no model here turns those"),
    Exclusion("rotary_dim", "every model here turns whole heads"),
    Exclusion("sections", "positions of several dimensions belong to models that see images"),
)


def _queries(axes: Axes) -> tuple[int, ...]:
    return axes["query_heads"], axes["head_dim"]


def _keys(axes: Axes) -> tuple[int, ...]:
    return axes["kv_heads"], axes["head_dim"]


def _table(axes: Axes) -> tuple[int, ...]:
    return TABLE_POSITIONS, axes["head_dim"] // 2


FORM = RowForm(
    entry_point="rope",
    inputs=(
        Field("q", _queries),
        Field("k", _keys),
        Field(
            "positions", lambda axes: (), dtype="int32", drawn="positions", below=lambda axes: TABLE_POSITIONS
        ),
    ),
    parameters=(Field("cos", _table, dtype="float32"), Field("sin", _table, dtype="float32")),
    outputs=(Field("q_out", _queries), Field("k_out", _keys)),
    gradients=Gradients(
        entry_point="rope_backward",
        given=(Field("dq_out", _queries), Field("dk_out", _keys)),
        rows=(Field("dq", _queries), Field("dk", _keys)),
        unread=("q", "k"),
    ),
)

SPECIAL_VALUES = (
    ("a position outside the tables", "NaN in every element of its token; nothing is read outside"),
    ("signed zeros", "a zero keeps the sign that product and fma give it"),
    ("denormals", "kept, in inputs and results; on the CPU a thread that flushes them is an error"),
    ("NaN and infinity", "reach the two elements of their pair by the arithmetic of the steps"),
)
STEPS = (
    ("q_out, k_out: first half", "a = x[i], b = x[D/2 + i]: fma(-b, sin, a * cos)"),
    ("q_out, k_out: second half", "fma(a, sin, b * cos)"),
    ("dq, dk", "the same from dq_out and dk_out with -sin"),
)


def _relations(*, graph: bool) -> tuple[Relation, ...]:
    """Those of operators on rows, but for sums over tokens, of which there are none."""
    return tuple(
        each for each in relations(gradients=True, graph=graph) if each.name != "gradient_accumulation"
    )


def _accuracy(factor: float, floor: float, half_ulps: float = 0.0) -> tuple[AccuracyBound, ...]:
    forward = (AccuracyBound(each, factor, floor, FORWARD, half_ulps) for each in ("q_out", "k_out"))
    return (*forward, *(AccuracyBound(each, factor, floor, BACKWARD, half_ulps) for each in ("dq", "dk")))


CONTRACT = Contract(
    operator="rope",
    version=1,
    dtypes=("float32",),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("every elementary operation", "float32, to nearest even, denormals kept"),
    ),
    elementary_operations=(
        ElementaryOperation("multiply", "IEEE-754 binary32"),
        ElementaryOperation("fma", "a * b + c rounded once, and only where the orders below write fma"),
    ),
    reduction_orders=STEPS,
    special_values=SPECIAL_VALUES,
    knobs=(),
    relations=_relations(graph=False),
    accuracy=_accuracy(1.25, 2e-7),
    canonical_nan=True,
)

CUDA_CONTRACT = Contract(
    operator="rope",
    version=1,
    dtypes=("bfloat16", "float16"),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("tables", "float32: not to the compute dtype"),
        RoundingPoint("every elementary operation", "float32, to nearest even"),
        RoundingPoint("store of q_out, k_out, dq, dk", "float32 to the compute dtype, once"),
    ),
    elementary_operations=(
        ElementaryOperation("multiply", "mul.f32"),
        ElementaryOperation("fma", "fma.rn.f32, and only where the orders below write fma"),
    ),
    reduction_orders=tuple((name, f"round16 of {order}") for name, order in STEPS),
    special_values=SPECIAL_VALUES,
    knobs=(),
    relations=_relations(graph=True),
    accuracy=_accuracy(1.0, 0.0, 0.64),
    canonical_nan=True,
)

GRIDS = {
    "study": step(SMOLLM2_135M, 30),
    "cpu": grid((SMOLLM2_135M, QWEN3_0_6B), CPU_CALLS),
}
CUDA_GRIDS = {
    "study": step(QWEN3_8B, 36),
    "large": grid((QWEN3_0_6B, QWEN3_8B, QWEN3_32B), LARGE_CALLS),
    "decode": grid((QWEN3_0_6B, QWEN3_8B, QWEN3_32B), DECODE_CALLS),
}
SCOPES = tuple(
    dict(zip(NAMES, heads, strict=True)) for heads in ((1, 1, 2), (3, 1, 100), (14, 2, 64), (40, 8, 128))
)


def cost(workload: Workload, *, dtype: str) -> Cost:
    """Least work of one call: heads read and written once, each token's position and row of the tables."""
    tokens, depth = workload.shape["tokens"], workload.shape["head_dim"]
    assert isinstance(tokens, int) and isinstance(depth, int)
    itemsize = 4 if dtype == "float32" else 2
    looked_up = 4 * tokens + 4 * min(tokens, TABLE_POSITIONS) * depth
    return Cost(3.0 * elements(workload), 2 * itemsize * elements(workload) + looked_up)


PEERS = (
    Peer("torch", "torch_rope", FORWARD),
    Peer("torch", "torch_rope_backward", BACKWARD),
)
ROPE = on_rows(
    "cpu",
    CONTRACT,
    FORM,
    grids=GRIDS,
    cost=cost,
    peers=PEERS,
    scopes=SCOPES,
)
ROPE_CUDA = on_rows(
    "cuda",
    CUDA_CONTRACT,
    FORM,
    grids=CUDA_GRIDS,
    cost=cost,
    peers=(
        *PEERS,
        Peer("liger_kernel", "liger_rope", FORWARD, "liger_kernel"),
    ),
    scopes=SCOPES,
)
