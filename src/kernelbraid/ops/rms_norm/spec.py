"""RMS norm's contracts, workloads and costs. README.md derives the orders; this file states them."""

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
    RoundingPoint,
    Workload,
)
from kernelbraid.ops.problem import Operator, Peer, Problem, Rows
from kernelbraid.ops.rows import (
    BACKWARD,
    FORWARD,
    KINDS,
    TOKENS,
    TRAINING,
    Axes,
    Field,
    Gradients,
    RowForm,
    relations,
)

LARGEST_WIDTH = 65536

AXES = (Axis("width", 1, LARGEST_WIDTH, constant=True, doc="elements of a row"), TOKENS)
EXCLUSIONS = (
    Exclusion("bias", "no model here adds one after the norm"),
    Exclusion("weight_offset", "Gemma multiplies by 1 + weight, which needs a rounding point of its own"),
)


def _row(axes: Axes) -> tuple[int, ...]:
    return (axes["width"],)


FORM = RowForm(
    entry_point="rms_norm",
    inputs=(Field("x", _row),),
    parameters=(Field("weight", _row, scale=lambda axes: 0.5, offset=1.0),),
    scalars={"eps": 1e-6},
    outputs=(Field("out", _row),),
    gradients=Gradients(
        entry_point="rms_norm_backward",
        given=(Field("dout", _row),),
        rows=(Field("dx", _row),),
        parameters=(Field("dweight", _row, dtype="float32"),),
    ),
)

SPECIAL_VALUES = (
    ("eps", "positive and finite"),
    ("signed zeros", "a zero keeps the sign that the products give it"),
    ("denormals", "kept, in inputs and results; on the CPU a thread that flushes them is an error"),
    ("NaN and infinity", "reach every element of their own row by the arithmetic of the steps, and no other"),
    ("gradients", "of finite numbers: a NaN reaches dweight"),
)

CONTRACT = Contract(
    operator="rms_norm",
    version=1,
    dtypes=("float32",),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("every elementary operation", "float32, to nearest even, denormals kept"),
    ),
    elementary_operations=(
        ElementaryOperation("multiply, add", "IEEE-754 binary32, never contracted"),
        ElementaryOperation("fma", "a * b + c rounded once, and only where the orders below write fma"),
        ElementaryOperation("divide, square root", "IEEE-754 binary32, correctly rounded"),
    ),
    reduction_orders=(
        (
            "sum of squares",
            "`lanes` partial sums, lane l from +0 over j = l, l + lanes, ...: s = fma(x[j], x[j], s); then "
            "added by halving: l and l + lanes / 2, then l + lanes / 4, and so on",
        ),
        ("factor", "r = 1 / sqrt(s / width + eps)"),
        ("out", "(x[j] * r) * w[j]"),
        (
            "projection of the gradient",
            "lanes as above: s = fma(dout[j] * w[j], x[j] * r, s); c = s / width",
        ),
        ("dx", "r * fma(-c, x[j] * r, dout[j] * w[j])"),
        (
            "dweight",
            "tokens of a call in blocks of 64 from its first, each from +0 in order: part = fma(dout, x * r, "
            "part); then total + part, from +0 or from what is there",
        ),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(Knob("lanes", (8, 16, 32, 64), 16, "partial sums along a row"),),
    relations=relations(gradients=True, graph=False),
    accuracy=(
        AccuracyBound("out", factor=1.25, floor=2e-7, regimes=FORWARD),
        AccuracyBound("dx", factor=1.25, floor=2e-7, regimes=BACKWARD),
        AccuracyBound("dweight", factor=1.25, floor=2e-7, regimes=BACKWARD),
    ),
    canonical_nan=True,
)

CUDA_CONTRACT = Contract(
    operator="rms_norm",
    version=1,
    dtypes=("bfloat16", "float16"),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("every elementary operation", "float32, to nearest even"),
        RoundingPoint("store of out, dx", "float32 to the compute dtype, once: not before the weight"),
        RoundingPoint("store of dweight", "float32 already: no further rounding"),
    ),
    elementary_operations=(
        ElementaryOperation("multiply, add", "mul.f32, add.f32, never contracted"),
        ElementaryOperation("fma", "fma.rn.f32, and only where the orders below write fma"),
        ElementaryOperation("divide, square root", "div.rn.f32, sqrt.rn.f32, correctly rounded"),
    ),
    reduction_orders=(
        (
            "sum of squares",
            "x[j] * x[j], filled up with +0 to a power of two, added by pairing neighbours: 0 with 1, 2 with "
            "3, then the sums in the same way",
        ),
        ("factor", "r = 1 / sqrt(s / width + eps)"),
        ("out", "round16((x[j] * r) * w[j])"),
        ("projection of the gradient", "(dout[j] * w[j]) * (x[j] * r), added by pairing; c = s / width"),
        ("dx", "round16(r * fma(-c, x[j] * r, dout[j] * w[j]))"),
        (
            "dweight",
            "tokens of a call in blocks of token_block from its first, each from +0 in order: part = "
            "fma(dout, x * r, part); then total + part, from +0 or from what is there",
        ),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(Knob("token_block", (16, 32, 64), 16, "tokens of a partial sum of dweight"),),
    relations=relations(gradients=True, graph=True),
    accuracy=(
        AccuracyBound("out", factor=1.0, floor=0.0, regimes=FORWARD, half_ulps=0.64),
        AccuracyBound("dx", factor=1.0, floor=0.0, regimes=BACKWARD, half_ulps=0.64),
        AccuracyBound("dweight", factor=1.0, floor=1e-5, regimes=BACKWARD),
    ),
    canonical_nan=True,
)


def _workload(phase: Regime, width: int, tokens: int, weight: float = 1.0) -> Workload:
    return Workload(phase, (("tokens", tokens), ("width", width)), weight)


def _step(width: int, layers: int) -> tuple[Workload, ...]:
    """Calls of one GRPO step, one norm a layer: prompts, decode at batch 16 and 64, packed updates."""
    return (
        _workload("prefill", width, 800, 2 * layers),
        _workload("chunked_prefill", width, 140, 16 * layers),
        _workload("decode", width, 16, 900 * layers),
        _workload("decode", width, 64, 300 * layers),
        _workload("update", width, 1500, 32 * layers),
        _workload("backward", width, 1500, 16 * layers),
    )


SMOLLM2_135M, QWEN3_0_6B, QWEN3_1_7B, QWEN3_8B, QWEN3_32B = 576, 1024, 2048, 4096, 5120
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
SCOPES = tuple({"width": width} for width in (1, 64, 100, 896, 2048, 5120))


def cost(workload: Workload, *, dtype: str) -> Cost:
    """Least work of one call: every tensor read or written once; 4 operations an element, backward 12."""
    tokens, width = workload.shape["tokens"], workload.shape["width"]
    assert isinstance(tokens, int) and isinstance(width, int)
    operations = 12.0 if workload.phase == "backward" else 4.0
    return Cost(operations * tokens * width, FORM.moved(workload, dtype))


def _reference(problem: Problem) -> Rows:
    from kernelbraid.ops.rms_norm.reference import reference

    return reference(problem)


def _vendor(problem: Problem) -> Rows:
    from kernelbraid.ops.rms_norm.reference import vendor

    return vendor(problem)


RMS_NORM = Operator(
    name="rms_norm",
    backend="cpu",
    contract=CONTRACT,
    files=("cpu.py",),
    entry_points=FORM.entry_points,
    regimes=TRAINING,
    grids=GRIDS,
    draw=partial(FORM.draw, dtypes=CONTRACT.dtypes),
    lower=FORM.lower,
    reference=_reference,
    vendor=_vendor,
    cost=partial(cost, dtype="float32"),
    load_axes=FORM.load_axes,
    timed=partial(FORM.timed, dtype="float32"),
    peers=(
        Peer("torch", "torch_rms_norm", FORWARD),
        Peer("torch", "torch_rms_norm_backward", BACKWARD),
    ),
    peer_file="peers.py",
    scopes=SCOPES,
    kinds=KINDS,
)

RMS_NORM_CUDA = Operator(
    name="rms_norm",
    backend="cuda",
    contract=CUDA_CONTRACT,
    files=("gpu.py",),
    entry_points=FORM.entry_points,
    regimes=TRAINING,
    grids=CUDA_GRIDS,
    draw=partial(FORM.draw, dtypes=CUDA_CONTRACT.dtypes),
    lower=FORM.lower,
    reference=_reference,
    vendor=_vendor,
    cost=partial(cost, dtype="bfloat16"),
    load_axes=FORM.load_axes,
    timed=partial(FORM.timed, dtype="bfloat16"),
    peers=(
        Peer("torch", "torch_rms_norm", FORWARD),
        Peer("torch", "torch_rms_norm_backward", BACKWARD),
    ),
    peer_file="peers_gpu.py",
    scopes=SCOPES,
    kinds=KINDS,
)
