"""The linear layer's contracts, workloads and costs. README.md derives the orders; this file states them."""

from functools import partial
from typing import NamedTuple

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

LARGEST_FEATURES = 262144

AXES = (
    Axis("in_features", 1, LARGEST_FEATURES, constant=True, doc="elements of a row of x"),
    Axis("out_features", 1, LARGEST_FEATURES, constant=True, doc="elements of a row of the result"),
    Axis("bias", 0, 1, constant=True, doc="whether there is a bias"),
    TOKENS,
)
EXCLUSIONS = (
    Exclusion("weight_scale", "quantised weights need rounding points of their own"),
    Exclusion("activation", "a function of the result has a rounding point of its own"),
)


def _in(axes: Axes) -> tuple[int, ...]:
    return (axes["in_features"],)


def _out(axes: Axes) -> tuple[int, ...]:
    return (axes["out_features"],)


def _weight(axes: Axes) -> tuple[int, ...]:
    return (axes["out_features"], axes["in_features"])


def _biased(axes: Axes) -> bool:
    return bool(axes["bias"])


FORM = RowForm(
    entry_point="linear",
    inputs=(Field("x", _in),),
    parameters=(
        Field("weight", _weight, scale=lambda axes: float(axes["in_features"] ** -0.5)),
        Field("bias", _out, present=_biased),
    ),
    outputs=(Field("out", _out),),
    gradients=Gradients(
        entry_point="linear_backward",
        given=(Field("dout", _out),),
        rows=(Field("dx", _in),),
        parameters=(
            Field("dweight", _weight, dtype="float32"),
            Field("dbias", _out, dtype="float32", present=_biased),
        ),
        unread=("bias",),
    ),
)

GROUPS = (1, 2, 4, 8)
K_BLOCK = Knob("k_block", (64, 128, 256), 128, "numbers of in_features, in dx of out_features, of a chain")
KNOBS = (
    Knob("k_groups", GROUPS, 1, "parts of the sum over in_features, such as one a rank"),
    Knob("n_groups", GROUPS, 1, "parts of the sum over out_features in dx"),
)
GROUPED = (
    "parts of the sum",
    "G parts of ceil(length / G) numbers, the last ones shorter or empty, each a chain from +0 of its own; "
    "part sums are added in pairs of neighbours: 0 with 1, 2 with 3, then these sums in the same way",
)
SPECIAL_VALUES = (
    ("signed zeros", "the sign that the chain from +0 gives"),
    ("denormals", "kept, in inputs and results; on the CPU a thread that flushes them is an error"),
    ("NaN and infinity", "reach every element of their own row by the arithmetic of the steps, and no other"),
    ("gradients", "of finite numbers: a NaN reaches dweight and dbias"),
    ("no tokens", "dweight and dbias are +0, or stay as they are where they are added to"),
)

CONTRACT = Contract(
    operator="linear",
    version=1,
    dtypes=("float32",),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("every elementary operation", "float32, to nearest even, denormals kept"),
    ),
    elementary_operations=(
        ElementaryOperation("add", "IEEE-754 binary32"),
        ElementaryOperation("fma", "a * b + c rounded once: the only multiplication"),
    ),
    reduction_orders=(
        (
            "block",
            "the next so many numbers of a sum, the last one shorter: a chain from +0; total = total + chain",
        ),
        (
            "out",
            "s = fma(x[t, k], w[n, k], s), blocks of k_block, total from +0, k_groups parts; + b[n]",
        ),
        ("dx", "s = fma(dout[t, n], w[n, k], s), n in blocks of k_block, total from +0, n_groups parts"),
        (
            "dweight",
            "s = fma(dout[t, n], x[t, k], s), blocks of 64 tokens from the call's first; total from +0 or "
            "from what is there",
        ),
        ("dbias", "s = s + dout[t, n], blocks of 16 tokens in the same way"),
        (GROUPED[0], GROUPED[1].replace("each a chain from +0 of its own", "each blocks from +0 of its own")),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(K_BLOCK, *KNOBS),
    relations=relations(gradients=True, graph=False),
    accuracy=(
        AccuracyBound("out", factor=1.25, floor=2e-7, regimes=FORWARD),
        AccuracyBound("dx", factor=1.25, floor=2e-7, regimes=BACKWARD),
        AccuracyBound("dweight", factor=1.25, floor=2e-7, regimes=BACKWARD),
        AccuracyBound("dbias", factor=1.25, floor=2e-7, regimes=BACKWARD),
    ),
    canonical_nan=True,
)

CUDA_CONTRACT = Contract(
    operator="linear",
    version=1,
    dtypes=("bfloat16", "float16"),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("inside a chain", "the matrix unit's own, in float32 accumulators"),
        RoundingPoint("sums of parts, bias", "float32, to nearest even"),
        RoundingPoint("store of out, dx", "float32 to the compute dtype, once: after the bias"),
        RoundingPoint("store of dweight, dbias", "float32 already: no further rounding"),
    ),
    elementary_operations=(
        ElementaryOperation("chain", "products of 16-bit numbers added by mma or wgmma in groups of 16"),
        ElementaryOperation("add", "add.f32, never contracted"),
    ),
    reduction_orders=(
        ("out", "a chain over k ascending from +0 in k_groups parts; then round16(s + b[n])"),
        ("dx", "a chain over n ascending from +0 in n_groups parts; then round16(s)"),
        ("dweight", "a chain over t ascending, from +0 or from what is there"),
        ("dbias", "a chain of 1 * dout[t, n] over t ascending, from +0 or from what is there"),
        GROUPED,
        ("end of a chain", "filled up with zeros to a multiple of 16"),
    ),
    special_values=SPECIAL_VALUES,
    knobs=KNOBS,
    relations=relations(gradients=True, graph=True),
    accuracy=(
        AccuracyBound("out", factor=1.0, floor=0.0, regimes=FORWARD, half_ulps=0.64),
        AccuracyBound("dx", factor=1.0, floor=0.0, regimes=BACKWARD, half_ulps=0.64),
        AccuracyBound("dweight", factor=1.0, floor=2e-5, regimes=BACKWARD),
        AccuracyBound("dbias", factor=1.0, floor=2e-5, regimes=BACKWARD),
    ),
    canonical_nan=True,
)


class Layer(NamedTuple):
    """Features in and out of one linear layer."""

    inputs: int
    outputs: int


class Model(NamedTuple):
    """What the linear layers of a model follow from."""

    hidden: int
    intermediate: int
    layers: int
    query: int
    """Width of all query heads together."""
    keys: int
    """Width of all key heads together."""
    vocabulary: int

    @property
    def block(self) -> tuple[Layer, ...]:
        """qkv, o, gate_up and down."""
        return (
            Layer(self.hidden, self.query + 2 * self.keys),
            Layer(self.query, self.hidden),
            Layer(self.hidden, 2 * self.intermediate),
            Layer(self.intermediate, self.hidden),
        )

    @property
    def head(self) -> Layer:
        return Layer(self.hidden, self.vocabulary)


SMOLLM2_135M = Model(576, 1536, 30, 576, 192, 49152)
QWEN3_0_6B = Model(1024, 3072, 28, 2048, 1024, 151936)
QWEN3_1_7B = Model(2048, 6144, 28, 2048, 1024, 151936)
QWEN3_8B = Model(4096, 12288, 36, 4096, 1024, 151936)
QWEN3_32B = Model(5120, 25600, 64, 8192, 1024, 151936)
MODELS = (QWEN3_0_6B, QWEN3_1_7B, QWEN3_8B, QWEN3_32B)


def _workload(phase: Regime, layer: Layer, tokens: int, weight: float = 1.0) -> Workload:
    axes = (("tokens", tokens), ("in_features", layer.inputs), ("out_features", layer.outputs), ("bias", 0))
    return Workload(phase, axes, weight)


def _step(model: Model) -> tuple[Workload, ...]:
    """Calls of one GRPO step: of every layer decode at batch 16 and packed updates, of the largest all.

    Prompts, their pieces and decode at batch 64 weigh little, and a study measures every workload.
    """
    calls: tuple[tuple[Regime, int, int], ...] = (
        ("decode", 16, 900),
        ("update", 1500, 32),
        ("backward", 1500, 16),
    )
    others: tuple[tuple[Regime, int, int], ...] = (
        ("prefill", 800, 2),
        ("chunked_prefill", 140, 16),
        ("decode", 64, 300),
    )
    largest = max(model.block, key=lambda layer: layer.inputs * layer.outputs)
    return tuple(
        _workload(phase, layer, tokens, count * model.layers)
        for layer in model.block
        for phase, tokens, count in (*calls, *(others if layer == largest else ()))
    )


CPU_CALLS: tuple[tuple[Regime, int], ...] = (
    ("decode", 1),
    ("decode", 4),
    ("decode", 16),
    ("update", 2048),
    ("backward", 2048),
)
FEW, MANY = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512), (1024, 2048, 8192, 16384)

GRIDS = {
    "study": _step(SMOLLM2_135M),
    "cpu": tuple(
        _workload(phase, layer, tokens) for layer in SMOLLM2_135M.block for phase, tokens in CPU_CALLS
    ),
}
CUDA_GRIDS = {
    "study": _step(QWEN3_8B),
    "decode": tuple(
        _workload("decode", layer, tokens) for model in MODELS for layer in model.block for tokens in FEW
    ),
    "large": tuple(
        _workload("update", layer, tokens) for model in MODELS for layer in model.block for tokens in MANY
    ),
    "gradients": tuple(_workload("backward", layer, 8192) for model in MODELS for layer in model.block),
    "lm_head": (
        *(_workload("decode", model.head, tokens) for model in MODELS for tokens in (*FEW, 1024)),
        *(_workload("update", model.head, 16384) for model in MODELS),
        *(_workload("backward", model.head, 8192) for model in MODELS),
    ),
}
SCOPES = tuple(
    {"in_features": k, "out_features": n, "bias": bias}
    for k, n, bias in ((1, 1, 0), (17, 33, 1), (200, 130, 0), (2048, 128, 0), (896, 1152, 1), (1536, 2048, 1))
)


def cost(workload: Workload, *, dtype: str) -> Cost:
    """Least work of one call: every tensor read or written once; backward is two products."""
    sizes = [workload.shape[name] for name in ("tokens", "in_features", "out_features")]
    operations = 4.0 if workload.phase == "backward" else 2.0
    for size in sizes:
        assert isinstance(size, int)
        operations *= size
    return Cost(operations, FORM.moved(workload, dtype))


def _reference(problem: Problem) -> Rows:
    from kernelbraid.ops.linear.reference import reference

    return reference(problem)


def _vendor(problem: Problem) -> Rows:
    from kernelbraid.ops.linear.reference import vendor

    return vendor(problem)


PEERS = (Peer("torch", "torch_linear", FORWARD), Peer("torch", "torch_linear_backward", BACKWARD))

LINEAR = Operator(
    name="linear",
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
    peers=PEERS,
    peer_file="peers.py",
    scopes=SCOPES,
    kinds=KINDS,
)

LINEAR_CUDA = Operator(
    name="linear",
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
    peers=PEERS,
    peer_file="peers_gpu.py",
    scopes=SCOPES,
    figures=("decode", "large", "gradients", "lm_head"),
    kinds=KINDS,
)
