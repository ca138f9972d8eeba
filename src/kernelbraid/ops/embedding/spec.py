"""Embedding's contracts, workloads and costs. README.md derives the order; this file states it."""

from dataclasses import replace

import numpy as np

from kernelbraid.contract import (
    AccuracyBound,
    Axis,
    Contract,
    Cost,
    ElementaryOperation,
    Exclusion,
    Regime,
    Relation,
    RoundingPoint,
    Workload,
)
from kernelbraid.ops.problem import InputKind, Peer
from kernelbraid.ops.records import on_rows
from kernelbraid.ops.rows import (
    BACKWARD,
    FORWARD,
    KINDS,
    TOKENS,
    Axes,
    Field,
    Gradients,
    RowForm,
    relations,
)

LARGEST_WIDTH = 65536
LARGEST_VOCABULARY = 1 << 20

AXES = (
    Axis("width", 1, LARGEST_WIDTH, constant=True, doc="elements of a row"),
    TOKENS,
    Axis("vocabulary", 1, LARGEST_VOCABULARY, constant=False, doc="rows of the table: no bit depends on it"),
)
EXCLUSIONS = (
    Exclusion("padding_idx", "its row would get no gradient; mask the loss instead"),
    Exclusion("max_norm", "it writes to the table in the forward"),
    Exclusion("scale", "Gemma multiplies by the root of the width, which needs a rounding point of its own"),
)

CHECKED_VOCABULARY = 307
"""Rows of the tables that checks draw: ids occur several times in a call. Workloads name their own."""


def _vocabulary(axes: Axes) -> int:
    return axes.get("vocabulary", CHECKED_VOCABULARY)


def _row(axes: Axes) -> tuple[int, ...]:
    return (axes["width"],)


def _table(axes: Axes) -> tuple[int, ...]:
    return (_vocabulary(axes), axes["width"])


FORM = RowForm(
    entry_point="embedding",
    inputs=(Field("ids", lambda axes: (), dtype="int64", drawn="indices", below=_vocabulary),),
    parameters=(Field("weight", _table),),
    outputs=(Field("out", _row),),
    gradients=Gradients(
        entry_point="embedding_backward",
        given=(Field("dout", _row),),
        rows=(),
        parameters=(Field("dweight", _table, dtype="float32"),),
    ),
)

EXACT = 1e-30
"""Largest relative error of a copy: none, but a bound is positive."""
SPECIAL_VALUES = (
    ("rows of the table", "copied with every bit, signed zeros, denormals and NaN payloads included"),
    (
        "an id outside of 0 .. V - 1",
        "a row of NaN (public function on the CPU: ValueError); adds no gradient",
    ),
    ("an id that does not occur", "its gradient is +0, or what was there"),
    ("signed zeros", "a sum begins with +0, so that it is never -0 unless -0 was there and only -0 is added"),
    ("denormals", "kept; on the CPU a thread that flushes them is an error"),
    (
        "NaN and infinity",
        "reach the gradient of their own id, and no other; a NaN is stored as canonical one",
    ),
)


def _relations(*, graph: bool) -> tuple[Relation, ...]:
    """Those of rows, without the one on gradients of rows: ids have none."""
    return tuple(
        each for each in relations(gradients=True, graph=graph) if each.name not in ("gradient_packing",)
    )


CONTRACT = Contract(
    operator="embedding",
    version=1,
    dtypes=("float32",),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("out", "none: a copy"),
        RoundingPoint("every addition", "float32, to nearest even, denormals kept"),
    ),
    elementary_operations=(ElementaryOperation("add", "IEEE-754 binary32"),),
    reduction_orders=(
        (
            "dweight",
            "row v: from +0, or from what is there; tokens t ascending with ids[t] = v: s = s + dout[t]",
        ),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(),
    relations=_relations(graph=False),
    accuracy=(
        AccuracyBound("out", factor=1.0, floor=EXACT, regimes=FORWARD),
        AccuracyBound("dweight", factor=1.25, floor=2e-7, regimes=BACKWARD),
    ),
)

CUDA_CONTRACT = replace(
    CONTRACT,
    dtypes=("bfloat16", "float16"),
    rounding_points=(
        RoundingPoint("out", "none: a copy"),
        RoundingPoint("every addition", "float32, to nearest even"),
        RoundingPoint("store of dweight", "float32 already; a gradient of 16 bits is rounded from it once"),
    ),
    elementary_operations=(ElementaryOperation("add", "add.f32"),),
    relations=_relations(graph=True),
    accuracy=(
        AccuracyBound("out", factor=1.0, floor=EXACT, regimes=FORWARD),
        AccuracyBound("dweight", factor=1.0, floor=5e-7, regimes=BACKWARD),
    ),
)


def _workload(phase: Regime, model: tuple[int, int], tokens: int, weight: float = 1.0) -> Workload:
    vocabulary, width = model
    return Workload(phase, (("tokens", tokens), ("vocabulary", vocabulary), ("width", width)), weight)


def _step(model: tuple[int, int]) -> tuple[Workload, ...]:
    """Calls of one GRPO step, one a forward: prompts, decode at batch 16 and 64, packed updates."""
    return (
        _workload("prefill", model, 800, 1),
        _workload("chunked_prefill", model, 140, 8),
        _workload("decode", model, 16, 450),
        _workload("decode", model, 64, 150),
        _workload("update", model, 1500, 16),
        _workload("backward", model, 1500, 8),
    )


SMOLLM2_135M = (49152, 576)
QWEN3_0_6B, QWEN3_1_7B, QWEN3_8B, QWEN3_32B = ((151936, width) for width in (1024, 2048, 4096, 5120))
MODELS = (QWEN3_0_6B, QWEN3_1_7B, QWEN3_8B, QWEN3_32B)

CPU_CALLS: tuple[tuple[Regime, int], ...] = (("decode", 16), ("update", 2048), ("backward", 2048))
LARGE_CALLS: tuple[tuple[Regime, int], ...] = (("update", 8192), ("update", 32768), ("backward", 8192))

GRIDS = {
    "study": _step(SMOLLM2_135M),
    "cpu": tuple(
        _workload(phase, model, tokens)
        for model in (SMOLLM2_135M, (151936, 1024))
        for phase, tokens in CPU_CALLS
        if model == SMOLLM2_135M or phase != "backward"
    ),
}
CUDA_GRIDS = {
    "study": _step(QWEN3_8B),
    "large": tuple(_workload(phase, model, tokens) for model in MODELS for phase, tokens in LARGE_CALLS),
    "decode": tuple(_workload("decode", model, tokens) for model in MODELS for tokens in (1, 16, 64, 256)),
}
SCOPES = tuple({"width": width} for width in (1, 100, 896, 4096))

CHECKED_KINDS: tuple[InputKind, ...] = tuple(kind for kind in KINDS if kind != "non_finite")
"""No input is a number that could be spoiled."""


def cost(workload: Workload, *, dtype: str) -> Cost:
    """Least work of one call: ids and distinct rows read, rows written once; backward the whole table.

    The zeros of a table's gradient count half: nothing is read for them, and memory takes such writes at up
    to twice the rate of reading.
    """
    tokens, vocabulary, width = (workload.shape[name] for name in ("tokens", "vocabulary", "width"))
    assert isinstance(tokens, int) and isinstance(vocabulary, int) and isinstance(width, int)
    row = width * np.dtype(dtype).itemsize
    distinct = vocabulary * (1 - (1 - 1 / vocabulary) ** tokens)
    if workload.phase == "backward":
        zeros = 4 * width * (vocabulary - distinct)
        return Cost(float(tokens * width), tokens * (8 + row) + 4 * width * distinct + zeros / 2)
    return Cost(0.0, tokens * (8 + row) + distinct * row)


PEERS = (
    Peer("torch", "torch_embedding", FORWARD),
    Peer("torch", "torch_embedding_backward", BACKWARD),
)
EMBEDDING = on_rows(
    "cpu",
    CONTRACT,
    FORM,
    grids=GRIDS,
    cost=cost,
    peers=PEERS,
    scopes=SCOPES,
    kinds=CHECKED_KINDS,
)
EMBEDDING_CUDA = on_rows(
    "cuda",
    CUDA_CONTRACT,
    FORM,
    grids=CUDA_GRIDS,
    cost=cost,
    peers=(
        *PEERS,
        Peer("liger", "liger_embedding", FORWARD, module="liger_kernel"),
        Peer("liger", "liger_embedding_backward", BACKWARD, module="liger_kernel"),
    ),
    scopes=SCOPES,
    kinds=CHECKED_KINDS,
)
