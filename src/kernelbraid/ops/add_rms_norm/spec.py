"""The residual add and RMS norm: contracts, workloads and costs. README.md derives the orders."""

from kernelbraid.contract import (
    AccuracyBound,
    Contract,
    Cost,
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
    Axes,
    Field,
    Gradients,
    RowForm,
    relations,
)


def _row(axes: Axes) -> tuple[int, ...]:
    return (axes["width"],)


FORM = RowForm(
    entry_point="add_rms_norm",
    inputs=(Field("x", _row), Field("residual", _row)),
    parameters=(Field("weight", _row, scale=lambda axes: 0.5, offset=1.0),),
    scalars={"eps": 1e-6},
    outputs=(Field("out", _row), Field("residual_out", _row)),
    gradients=Gradients(
        entry_point="add_rms_norm_backward",
        given=(Field("dout", _row), Field("dresidual_out", _row)),
        rows=(Field("dx", _row),),
        parameters=(Field("dweight", _row, dtype="float32"),),
        saved=("residual_out",),
        unread=("x", "residual"),
    ),
)

SPECIAL_VALUES = (
    *(each for each in norm.SPECIAL_VALUES if each[0] != "gradients"),
    ("gradients", "of finite numbers: a NaN reaches dweight; dx is the gradient of x and of residual"),
    ("dresidual_out absent", "counts as +0 everywhere"),
)

CONTRACT = Contract(
    operator="add_rms_norm",
    version=1,
    dtypes=("float32",),
    axes=norm.AXES,
    exclusions=norm.EXCLUSIONS,
    rounding_points=norm.CONTRACT.rounding_points,
    elementary_operations=norm.CONTRACT.elementary_operations,
    reduction_orders=(
        ("residual_out", "h[j] = x[j] + residual[j]"),
        (
            "sum of squares",
            "`lanes` partial sums, lane l from +0 over j = l, l + lanes, ...: s = fma(h[j], h[j], s); then "
            "added by halving: l and l + lanes / 2, then l + lanes / 4, and so on",
        ),
        ("factor", "r = 1 / sqrt(s / width + eps)"),
        ("out", "(h[j] * r) * w[j]"),
        (
            "projection of the gradient",
            "lanes as above: s = fma(dout[j] * w[j], h[j] * r, s); c = s / width",
        ),
        ("dx", "fma(r, fma(-c, h[j] * r, dout[j] * w[j]), dresidual_out[j])"),
        (
            "dweight",
            "tokens of a call in blocks of 64 from its first, each from +0 in order: part = fma(dout, h * r, "
            "part); then total + part, from +0 or from what is there",
        ),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(Knob("lanes", (8, 16, 32, 64), 16, "partial sums along a row"),),
    relations=relations(gradients=True, graph=False),
    accuracy=(
        AccuracyBound("out", factor=1.25, floor=2e-7, regimes=FORWARD),
        AccuracyBound("residual_out", factor=1.0, floor=1e-7, regimes=FORWARD),
        AccuracyBound("dx", factor=1.25, floor=2e-7, regimes=BACKWARD),
        AccuracyBound("dweight", factor=1.25, floor=2e-7, regimes=BACKWARD),
    ),
    canonical_nan=True,
)

CUDA_CONTRACT = Contract(
    operator="add_rms_norm",
    version=1,
    dtypes=("bfloat16", "float16"),
    axes=norm.AXES,
    exclusions=norm.EXCLUSIONS,
    rounding_points=(
        RoundingPoint("every elementary operation", "float32, to nearest even"),
        RoundingPoint("residual_out", "the float32 sum to the compute dtype; the norm reads the rounded one"),
        RoundingPoint("store of out, dx", "float32 to the compute dtype, once: not before the weight"),
        RoundingPoint("store of dweight", "float32 already: no further rounding"),
    ),
    elementary_operations=norm.CUDA_CONTRACT.elementary_operations,
    reduction_orders=(
        ("residual_out", "h[j] = round16(x[j] + residual[j])"),
        (
            "sum of squares",
            "h[j] * h[j], filled up with +0 to a power of two, added by pairing neighbours: 0 with 1, 2 with "
            "3, then the sums in the same way",
        ),
        ("factor", "r = 1 / sqrt(s / width + eps)"),
        ("out", "round16((h[j] * r) * w[j])"),
        ("projection of the gradient", "(dout[j] * w[j]) * (h[j] * r), added by pairing; c = s / width"),
        ("dx", "round16(fma(r, fma(-c, h[j] * r, dout[j] * w[j]), dresidual_out[j]))"),
        (
            "dweight",
            "tokens of a call in blocks of token_block from its first, each from +0 in order: part = "
            "fma(dout, h * r, part); then total + part, from +0 or from what is there",
        ),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(Knob("token_block", (16, 32, 64), 16, "tokens of a partial sum of dweight"),),
    relations=relations(gradients=True, graph=True),
    accuracy=(
        AccuracyBound("out", factor=1.0, floor=0.0, regimes=FORWARD, half_ulps=0.64),
        AccuracyBound("residual_out", factor=1.0, floor=0.0, regimes=FORWARD, half_ulps=0.64),
        AccuracyBound("dx", factor=1.0, floor=0.0, regimes=BACKWARD, half_ulps=0.64),
        AccuracyBound("dweight", factor=1.0, floor=1e-5, regimes=BACKWARD),
    ),
    canonical_nan=True,
)


def _workload(phase: Regime, width: int, tokens: int, weight: float = 1.0) -> Workload:
    return Workload(phase, (("tokens", tokens), ("width", width)), weight)


def _step(width: int, layers: int) -> tuple[Workload, ...]:
    """Calls of one GRPO step, two a layer: prompts, decode at batch 16 and 64, packed updates."""
    return (
        _workload("prefill", width, 800, 4 * layers),
        _workload("chunked_prefill", width, 140, 32 * layers),
        _workload("decode", width, 16, 1800 * layers),
        _workload("decode", width, 64, 600 * layers),
        _workload("update", width, 1500, 64 * layers),
        _workload("backward", width, 1500, 32 * layers),
    )


GRIDS = {
    "study": _step(norm.SMOLLM2_135M, 30),
    "cpu": tuple(
        _workload(phase, width, tokens)
        for width in (norm.SMOLLM2_135M, norm.QWEN3_0_6B)
        for phase, tokens in norm.CPU_CALLS
    ),
}
CUDA_GRIDS = {
    "study": _step(norm.QWEN3_8B, 36),
    "large": tuple(
        _workload(phase, width, tokens) for width in norm.MODELS for phase, tokens in norm.LARGE_CALLS
    ),
    "decode": tuple(
        _workload("decode", width, tokens) for width in norm.MODELS for tokens in (1, 16, 64, 256)
    ),
}


def cost(workload: Workload, *, dtype: str) -> Cost:
    """Least work of one call: every tensor read or written once; 5 operations an element, backward 13."""
    tokens, width = workload.shape["tokens"], workload.shape["width"]
    assert isinstance(tokens, int) and isinstance(width, int)
    operations = 13.0 if workload.phase == "backward" else 5.0
    return Cost(operations * tokens * width, FORM.moved(workload, dtype))


PEERS = (
    Peer("torch", "torch_add_rms_norm", FORWARD),
    Peer("torch", "torch_add_rms_norm_backward", BACKWARD),
)
ADD_RMS_NORM = on_rows(
    "cpu",
    CONTRACT,
    FORM,
    grids=GRIDS,
    cost=cost,
    peers=PEERS,
    scopes=norm.SCOPES,
)
ADD_RMS_NORM_CUDA = on_rows(
    "cuda",
    CUDA_CONTRACT,
    FORM,
    grids=CUDA_GRIDS,
    cost=cost,
    peers=(
        *PEERS,
        Peer("liger_kernel", "liger_add_rms_norm", FORWARD, "liger_kernel"),
        Peer("liger_kernel", "liger_add_rms_norm_backward", BACKWARD, "liger_kernel"),
    ),
    scopes=norm.SCOPES,
)
