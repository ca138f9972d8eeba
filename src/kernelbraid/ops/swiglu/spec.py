"""SwiGLU's contracts, workloads and costs. README.md derives the steps; this file states them."""

from kernelbraid.contract import (
    AccuracyBound,
    Axis,
    Contract,
    Cost,
    ElementaryOperation,
    Exclusion,
    Knob,
    Regime,
    RoundingPoint,
    Workload,
)
from kernelbraid.ops.attention.spec import EXP2_TABLES
from kernelbraid.ops.problem import Peer
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

LARGEST_WIDTH = 131072

AXES = (
    Axis("width", 1, LARGEST_WIDTH, constant=True, doc="elements of an output row: half of a packed input's"),
    TOKENS,
)
EXCLUSIONS = (
    Exclusion("limit", "gpt-oss clamps gate and up first, which needs steps of its own"),
    Exclusion("alpha", "gpt-oss scales the gate inside of the exponential only"),
)


def _row(axes: Axes) -> tuple[int, ...]:
    return (axes["width"],)


FORM = RowForm(
    entry_point="swiglu",
    inputs=(Field("gate", _row), Field("up", _row)),
    outputs=(Field("out", _row),),
    gradients=Gradients(
        entry_point="swiglu_backward",
        given=(Field("dout", _row),),
        rows=(Field("dgate", _row), Field("dup", _row)),
    ),
)

SPECIAL_VALUES = (
    ("signed zeros", "a zero keeps the sign that the divisions and products give it"),
    ("gate far below 0", "exp is +inf below about -88.4 (CPU) or -88.7 (GPU), and gate / inf = -0"),
    ("gate = -inf", "-inf / inf: NaN, as in torch"),
    ("gate far above 0", "1 + exp(-gate) is 1, and the activation is the gate"),
    ("denormals", "kept, in inputs and results; on the CPU a thread that flushes them is an error"),
    ("NaN and infinity", "reach their own element by the arithmetic of the steps, and no other"),
)

CONTRACT = Contract(
    operator="swiglu",
    version=1,
    dtypes=("float32",),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("every elementary operation", "float32, to nearest even, denormals kept"),
    ),
    elementary_operations=(
        ElementaryOperation("add, subtract, multiply", "IEEE-754 binary32, never contracted"),
        ElementaryOperation("fma", "a * b + c rounded once, and only where the orders below write fma"),
        ElementaryOperation("divide", "IEEE-754 binary32, correctly rounded"),
        ElementaryOperation(
            "exp(-g)",
            "c = g cut to -89 .. 88, t = fma(c, -0x1.715476p+0, 12582912), n = t - 12582912, "
            "r = fma(c, -0x1.4ae0c0p-26, fma(c, -0x1.715476p+0, -n)), p = polynomial in r by Horner's rule "
            "with fma, result p * 2^n with 2^n built from bits: 0 for n = -127, +inf for n = 128; of a NaN "
            "any number comes, since the gate itself enters too",
            EXP2_TABLES,
        ),
    ),
    reduction_orders=(
        ("out", "(gate / (1 + exp(-gate))) * up"),
        ("backward: sigmoid", "s = 1 / (1 + exp(-gate)), y = gate * s"),
        ("dgate", "(dout * up) * fma(y, 1 - s, s)"),
        ("dup", "dout * y"),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(Knob("exp2_degree", (4, 5, 6, 7), 6, "degree of the exponential's polynomial"),),
    relations=relations(gradients=True, graph=False),
    accuracy=(
        AccuracyBound("out", factor=1.25, floor=2e-7, regimes=FORWARD),
        AccuracyBound("dgate", factor=1.25, floor=2e-7, regimes=BACKWARD),
        AccuracyBound("dup", factor=1.25, floor=2e-7, regimes=BACKWARD),
    ),
    canonical_nan=True,
)

CUDA_CONTRACT = Contract(
    operator="swiglu",
    version=1,
    dtypes=("bfloat16", "float16"),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("every elementary operation", "float32, to nearest even"),
        RoundingPoint("store of out, dgate, dup", "float32 to the compute dtype, once: not after silu too"),
    ),
    elementary_operations=(
        ElementaryOperation("add, subtract, multiply", "add.f32, sub.f32, mul.f32, never contracted"),
        ElementaryOperation("fma", "fma.rn.f32, and only where the orders below write fma"),
        ElementaryOperation("divide", "div.rn.f32, correctly rounded"),
        ElementaryOperation(
            "exp(-g)",
            "ex2.approx.ftz.f32 of g * -0x1.715476p+0: a denormal result is +0, and counts as 0 in 1 +",
        ),
    ),
    reduction_orders=(
        ("out", "round16((gate / (1 + exp(-gate))) * up)"),
        ("backward: sigmoid", "s = 1 / (1 + exp(-gate)), y = gate * s"),
        ("dgate", "round16((dout * up) * fma(y, 1 - s, s))"),
        ("dup", "round16(dout * y)"),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(),
    relations=relations(gradients=True, graph=True),
    accuracy=(
        AccuracyBound("out", factor=1.0, floor=0.0, regimes=FORWARD, half_ulps=0.64),
        AccuracyBound("dgate", factor=1.0, floor=0.0, regimes=BACKWARD, half_ulps=0.64),
        AccuracyBound("dup", factor=1.0, floor=0.0, regimes=BACKWARD, half_ulps=0.64),
    ),
    canonical_nan=True,
)


def _workload(phase: Regime, width: int, tokens: int, weight: float = 1.0) -> Workload:
    return Workload(phase, (("tokens", tokens), ("width", width)), weight)


def _step(width: int, layers: int) -> tuple[Workload, ...]:
    """Calls of one GRPO step, one a layer: prompts, decode at batch 16 and 64, packed updates."""
    return (
        _workload("prefill", width, 800, layers),
        _workload("chunked_prefill", width, 140, 8 * layers),
        _workload("decode", width, 16, 450 * layers),
        _workload("decode", width, 64, 150 * layers),
        _workload("update", width, 1500, 16 * layers),
        _workload("backward", width, 1500, 8 * layers),
    )


SMOLLM2_135M, QWEN3_0_6B, QWEN3_1_7B, QWEN3_8B, QWEN3_32B = 1536, 3072, 6144, 12288, 25600
MODELS = (QWEN3_0_6B, QWEN3_1_7B, QWEN3_8B, QWEN3_32B)

CPU_CALLS: tuple[tuple[Regime, int], ...] = (("decode", 16), ("update", 2048), ("backward", 2048))
LARGE_CALLS: tuple[tuple[Regime, int], ...] = (("update", 8192), ("update", 32768), ("backward", 8192))

GRIDS = {
    "study": _step(SMOLLM2_135M, 30),
    "cpu": tuple(
        _workload(phase, width, tokens) for width in (SMOLLM2_135M, QWEN3_0_6B) for phase, tokens in CPU_CALLS
    ),
}
CUDA_GRIDS = {
    "study": _step(QWEN3_8B, 36),
    "large": tuple(_workload(phase, width, tokens) for width in MODELS for phase, tokens in LARGE_CALLS),
    "decode": tuple(_workload("decode", width, tokens) for width in MODELS for tokens in (1, 16, 64, 256)),
}
SCOPES = tuple({"width": width} for width in (1, 100, 768, 4864, 11008))


def cost(workload: Workload, *, dtype: str) -> Cost:
    """Least work of one call: every tensor read or written once; 12 operations an element, backward 20."""
    tokens, width = workload.shape["tokens"], workload.shape["width"]
    assert isinstance(tokens, int) and isinstance(width, int)
    operations = 20.0 if workload.phase == "backward" else 12.0
    return Cost(operations * tokens * width, FORM.moved(workload, dtype))


PEERS = (
    Peer("torch", "torch_swiglu", FORWARD),
    Peer("torch", "torch_swiglu_backward", BACKWARD),
)
SWIGLU = on_rows(
    "cpu",
    CONTRACT,
    FORM,
    grids=GRIDS,
    cost=cost,
    peers=PEERS,
    scopes=SCOPES,
)
SWIGLU_CUDA = on_rows(
    "cuda",
    CUDA_CONTRACT,
    FORM,
    grids=CUDA_GRIDS,
    cost=cost,
    peers=(
        *PEERS,
        Peer("liger", "liger_swiglu", FORWARD, module="liger_kernel"),
    ),
    scopes=SCOPES,
)
