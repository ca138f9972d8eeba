"""Contracts, workloads and costs of a mixture's experts. README.md derives the orders; this states them."""

from dataclasses import replace
from functools import partial

import numpy as np

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
from kernelbraid.ops.problem import Array, Operator, Peer, Problem, ProblemShape, Program, Rows
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

AXES = (
    Axis("width", 1, 16384, constant=True, doc="elements of a token's row"),
    Axis("intermediate", 1, 32768, constant=True, doc="elements of an expert's activation"),
    Axis("experts", 1, 512, constant=True, doc="experts whose matrices are given"),
    Axis("top_k", 1, 16, constant=True, doc="slots of a token"),
    TOKENS,
)
EXCLUSIONS = (
    Exclusion("bias", "the models here have experts without one"),
    Exclusion("activation", "swiglu is the only one whose operations the contract states"),
)


def _slots(axes: Axes) -> tuple[int, ...]:
    return (axes["top_k"],)


def _row(axes: Axes) -> tuple[int, ...]:
    return (axes["width"],)


def _gate_up(axes: Axes) -> tuple[int, ...]:
    return (axes["experts"], 2 * axes["intermediate"], axes["width"])


def _down(axes: Axes) -> tuple[int, ...]:
    return (axes["experts"], axes["width"], axes["intermediate"])


FORM = RowForm(
    entry_point="moe_experts",
    inputs=(
        Field("x", _row),
        Field("weights", _slots, dtype="float32", scale=lambda axes: 0.5),
        Field("experts", _slots, dtype="int32", drawn="indices", below=lambda axes: axes["experts"]),
    ),
    parameters=(
        Field("gate_up", _gate_up, scale=lambda axes: axes["width"] ** -0.5),
        Field("down", _down, scale=lambda axes: axes["intermediate"] ** -0.5),
    ),
    outputs=(Field("out", _row),),
    gradients=Gradients(
        entry_point="moe_experts_backward",
        given=(Field("dout", _row),),
        rows=(Field("dx", _row), Field("dweights", _slots, dtype="float32")),
        parameters=(Field("dgate_up", _gate_up, dtype="float32"), Field("ddown", _down, dtype="float32")),
    ),
)


# ---- Loads.


def distinct(rng: np.random.Generator, size: tuple[int, ...], experts: int) -> Array:
    """Indices of neighbouring experts from a random one on: every expert as likely as any other."""
    first = rng.integers(0, experts, (size[0], 1))
    return np.asarray((first + np.arange(size[1])) % experts, np.int32)


def draw(shape: ProblemShape, rng: np.random.Generator, *, dtypes: tuple[str, ...]) -> Problem:
    """Draw a problem whose kind chooses the load too: even, all on one expert, or half of it on nobody.

    Elsewhere indices are drawn one by one, so that an expert may stand in several of a token's slots.
    """
    problem = FORM.draw(shape, rng, dtypes=dtypes)
    axes = dict(shape.constant_axes)
    for request in problem.requests:
        chosen = request["experts"]
        if shape.kind == "normal":
            chosen[...] = distinct(rng, chosen.shape, axes["experts"])
        elif shape.kind == "heavy_tailed":
            chosen[:] = axes["experts"] - 1
        elif shape.kind in ("signed_zeros", "saturated"):
            outside = np.array((-1, axes["experts"], -(2**31), 2**31 - 1), np.int32)
            where = rng.integers(0, 2, chosen.shape) == 0
            chosen[where] = rng.choice(outside, int(where.sum()))
    return problem


def timed(
    workload: Workload,
    rng: np.random.Generator,
    variants: int,
    pool_bytes: int,
    *,
    contiguous: bool,
    dtype: str,
) -> Program:
    """`RowForm.timed`, every token with experts of its own kind: as many as it has slots, if there are."""
    program = FORM.timed(workload, rng, variants, pool_bytes, contiguous=contiguous, dtype=dtype)
    axes = _integers(workload)
    chosen = distinct(rng, program.inputs["experts"].shape, axes["experts"])
    return replace(program, inputs={**program.inputs, "experts": chosen})


def _integers(workload: Workload) -> dict[str, int]:
    return {name: value for name, value in workload.shape.items() if isinstance(value, int)}


# ---- Contracts.

SPECIAL_VALUES = (
    ("experts outside 0 .. experts - 1", "the slot adds nothing, its weight is not looked at, dweights is 0"),
    ("no slot left", "out and dx are +0"),
    ("signed zeros", "every sum begins at +0"),
    ("NaN and infinity", "reach every element of their own row by the arithmetic of the steps, and no other"),
    ("gradients", "of finite numbers: a NaN reaches dgate_up and ddown"),
)

CONTRACT = Contract(
    operator="moe_experts",
    version=1,
    dtypes=("float32",),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("every elementary operation", "float32, to nearest even, denormals kept"),
    ),
    elementary_operations=(
        ElementaryOperation("multiply, add, subtract, divide", "IEEE-754 binary32, never contracted"),
        ElementaryOperation("fma", "a * b + c rounded once, and only where the orders below write fma"),
        ElementaryOperation(
            "exp2",
            "t = x + 12582912; r = x - (t - 12582912); p = polynomial of r by Horner with fma; p times 2^n, "
            "n from the bits of t; 0 below -125, infinity above 127",
            (
                (
                    "coefficients",
                    (
                        *("1p0", "1.62e432p-1", "1.ebfbe2p-3", "1.c6ae72p-5"),
                        *("1.3b270ep-7", "1.5f7276p-10", "1.470b48p-13"),
                    ),
                ),
            ),
        ),
        ElementaryOperation("sigmoid", "1 / (1 + exp2(-x * float32(log2 e)))"),
    ),
    reduction_orders=(
        (
            "product",
            "K ascending in blocks of k_block, the last one shorter, each a chain s from +0; "
            "total = total + s, from +0",
        ),
        ("gate, up", "product, j of the width: s = fma(gate_up[e, i, j], x[j], s)"),
        ("activation", "(gate * sigmoid(gate)) * up"),
        ("down", "product, i of the intermediate: s = fma(down[e, j, i], a[i], s)"),
        ("out", "slots ascending: o = fma(w[s], y[s], o)"),
        ("dactivation", "product, j of the width: s = fma(down[e, j, i], dout[j], s)"),
        ("dweights", "as a product, in blocks of 16 of the intermediate: s = fma(d[i], a[i], s)"),
        (
            "dgate, dup",
            "s = sigmoid(gate), l = gate * s, v = d * w: dgate = (v * up) * fma(l, 1 - s, s), dup = v * l",
        ),
        (
            "dx",
            "product, rows of gate, then of up: s = fma(gate_up[e, i, j], dblock[i], s); then slots "
            "ascending: o + g",
        ),
        (
            "dgate_up, ddown",
            "pairs of an expert, tokens ascending, then slots: those of each 64 tokens from the call's "
            "first, 64 at a time, are a chain from +0, s = fma(dblock, x, s) or s = fma(dout, a * w, s); "
            "total = total + s, from +0 or from what is there",
        ),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(Knob("k_block", (64, 128, 256), 128, "numbers of a product's sum that one chain adds"),),
    relations=relations(gradients=True, graph=False),
    accuracy=(
        AccuracyBound("out", factor=1.25, floor=2e-7, regimes=FORWARD),
        AccuracyBound("dx", factor=1.25, floor=2e-7, regimes=BACKWARD),
        AccuracyBound("dweights", factor=1.25, floor=2e-7, regimes=BACKWARD),
        AccuracyBound("dgate_up", factor=1.25, floor=2e-7, regimes=BACKWARD),
        AccuracyBound("ddown", factor=1.25, floor=2e-7, regimes=BACKWARD),
    ),
    canonical_nan=True,
)

CUDA_CONTRACT = Contract(
    operator="moe_experts",
    version=1,
    dtypes=("bfloat16", "float16"),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("every elementary operation", "float32, to nearest even"),
        RoundingPoint("activation", "float32 to the compute dtype, once, after gate times up"),
        RoundingPoint("product with down", "kept in float32: the weight and the sum over slots come first"),
        RoundingPoint("store of out, dx", "float32 to the compute dtype, once, after the sum over slots"),
        RoundingPoint("dgate, dup, and activation times weight", "float32 to the compute dtype, once"),
        RoundingPoint("store of dweights, dgate_up, ddown", "float32 already: no further rounding"),
    ),
    elementary_operations=(
        ElementaryOperation("multiply, add, subtract", "mul.f32, add.f32, sub.f32, never contracted"),
        ElementaryOperation("fma", "fma.rn.f32, and only where the orders below write fma"),
        ElementaryOperation("divide", "div.rn.f32"),
        ElementaryOperation("exp2", "ex2.approx.ftz.f32"),
        ElementaryOperation("sigmoid", "1 / (1 + exp2(-x * float32(log2 e)))"),
        ElementaryOperation(
            "chain", "the matrix unit: groups of 16 along K ascending, float32 sums, from +0"
        ),
    ),
    reduction_orders=(
        ("gate, up", "chain along the width"),
        ("activation", "round16((gate * sigmoid(gate)) * up)"),
        ("down", "chain along the intermediate, of rounded activations"),
        ("out", "slots ascending: o = fma(w[s], y[s], o); round16(o)"),
        ("dactivation", "chain along the width, of dout and down"),
        (
            "dweights",
            "d[i] * a[i], a rounded, filled up with +0 to a power of two, added by pairing neighbours",
        ),
        (
            "dgate, dup",
            "s = sigmoid(gate), l = gate * s, v = d * w: dgate = round16((v * up) * fma(l, 1 - s, s)), "
            "dup = round16(v * l)",
        ),
        ("dx", "chain along the rows of gate, then of up; slots ascending: o + g; round16(o)"),
        (
            "dgate_up, ddown",
            "tokens of a call in blocks of token_block from its first; an expert's pairs of a block, tokens "
            "ascending, then slots, filled up with zeros to a multiple of 16; chain over the blocks, from "
            "+0 or from what is there, of dgate, dup and x, of dout and round16(a * w); + 0 at the store",
        ),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(
        Knob("token_block", (16, 32, 64), 64, "tokens whose pairs share groups of 16 in dgate_up, ddown"),
    ),
    relations=relations(gradients=True, graph=True),
    accuracy=(
        AccuracyBound("out", factor=1.0, floor=0.0, regimes=FORWARD, half_ulps=1.28),
        AccuracyBound("dx", factor=1.0, floor=0.0, regimes=BACKWARD, half_ulps=1.28),
        AccuracyBound("dweights", factor=1.0, floor=0.0, regimes=BACKWARD, half_ulps=0.64),
        AccuracyBound("dgate_up", factor=1.0, floor=0.0, regimes=BACKWARD, half_ulps=0.64),
        AccuracyBound("ddown", factor=1.0, floor=0.0, regimes=BACKWARD, half_ulps=1.28),
    ),
    canonical_nan=True,
)

# ---- Workloads.

Model = tuple[int, int, int, int]
"""Width, intermediate, experts, slots."""

SMALL: Model = (576, 192, 16, 4)
"""A mixture of SmolLM2-135M's width, half of its MLP active."""
WIDE: Model = (1024, 256, 8, 2)
QWEN3_30B_A3B: Model = (2048, 768, 128, 8)


def _workload(phase: Regime, model: Model, tokens: int, weight: float = 1.0) -> Workload:
    width, intermediate, experts, top_k = model
    axes = (("tokens", tokens), ("width", width), ("intermediate", intermediate), ("experts", experts))
    return Workload(phase, (*axes, ("top_k", top_k)), weight)


def _step(model: Model, layers: int) -> tuple[Workload, ...]:
    """Calls of one GRPO step, one a layer: prompts, decode at batch 16 and 64, packed updates."""
    return (
        _workload("prefill", model, 800, layers),
        _workload("chunked_prefill", model, 140, 8 * layers),
        _workload("decode", model, 16, 450 * layers),
        _workload("decode", model, 64, 150 * layers),
        _workload("update", model, 1500, 16 * layers),
        _workload("backward", model, 1500, 8 * layers),
    )


CPU_CALLS: tuple[tuple[Regime, int], ...] = (
    ("decode", 1),
    ("decode", 16),
    ("update", 512),
    ("update", 2048),
    ("backward", 2048),
)
LARGE_CALLS: tuple[tuple[Regime, int], ...] = (
    ("prefill", 1024),
    ("update", 4096),
    ("update", 8192),
    ("backward", 8192),
)

GRIDS = {
    "study": _step(SMALL, 30),
    "cpu": tuple(_workload(phase, model, tokens) for model in (SMALL, WIDE) for phase, tokens in CPU_CALLS),
}
CUDA_GRIDS = {
    "study": _step(QWEN3_30B_A3B, 48),
    "large": tuple(_workload(phase, QWEN3_30B_A3B, tokens) for phase, tokens in LARGE_CALLS),
    "decode": tuple(_workload("decode", QWEN3_30B_A3B, tokens) for tokens in (1, 4, 16, 64, 256)),
}
SCOPES = tuple(
    {"width": width, "intermediate": intermediate, "experts": experts, "top_k": top_k}
    for width, intermediate, experts, top_k in (
        (1, 1, 1, 1),
        (33, 20, 5, 5),
        (64, 96, 1, 2),
        (128, 64, 60, 4),
    )
)
REAL_MODEL = dict(zip(("width", "intermediate", "experts", "top_k"), QWEN3_30B_A3B, strict=True))
CUDA_SCOPES = (*SCOPES, {**REAL_MODEL, "intermediate": 256, "experts": 16})


def cost(workload: Workload, *, dtype: str) -> Cost:
    """Least work of one call: matrices of the experts that somebody chose, each read or written once."""
    axes = _integers(workload)
    tokens, experts, top_k = axes["tokens"], axes["experts"], axes["top_k"]
    matrix = 3 * axes["width"] * axes["intermediate"]
    share = min(1.0, top_k / experts)
    chosen = experts * (1 - (1 - share) ** tokens)
    whole = FORM.moved(workload, dtype) - FORM.moved(_without_tokens(workload), dtype)
    itemsize = 4 if dtype == "float32" else 2
    backward = workload.phase == "backward"
    written = 4 * experts * matrix if backward else 0
    operations = (6.0 if backward else 2.0) * tokens * top_k * matrix
    return Cost(operations, whole + chosen * matrix * itemsize + written)


def _without_tokens(workload: Workload) -> Workload:
    axes = tuple((name, 0 if name == "tokens" else value) for name, value in workload.axes)
    return replace(workload, axes=axes)


def _reference(problem: Problem) -> Rows:
    from kernelbraid.ops.moe_experts.reference import reference

    return reference(problem)


def _vendor(problem: Problem) -> Rows:
    from kernelbraid.ops.moe_experts.reference import vendor

    return vendor(problem)


MOE_EXPERTS = Operator(
    name="moe_experts",
    backend="cpu",
    contract=CONTRACT,
    files=("cpu.py",),
    entry_points=FORM.entry_points,
    regimes=TRAINING,
    grids=GRIDS,
    draw=partial(draw, dtypes=CONTRACT.dtypes),
    lower=FORM.lower,
    reference=_reference,
    vendor=_vendor,
    cost=partial(cost, dtype="float32"),
    load_axes=FORM.load_axes,
    timed=partial(timed, dtype="float32"),
    peers=(
        Peer("torch", "torch_experts", FORWARD),
        Peer("torch", "torch_experts_backward", BACKWARD),
    ),
    peer_file="peers.py",
    scopes=SCOPES,
    kinds=KINDS,
)

MOE_EXPERTS_CUDA = Operator(
    name="moe_experts",
    backend="cuda",
    contract=CUDA_CONTRACT,
    files=("gpu.py",),
    entry_points=FORM.entry_points,
    regimes=TRAINING,
    grids=CUDA_GRIDS,
    draw=partial(draw, dtypes=CUDA_CONTRACT.dtypes),
    lower=FORM.lower,
    reference=_reference,
    vendor=_vendor,
    cost=partial(cost, dtype="bfloat16"),
    load_axes=FORM.load_axes,
    timed=partial(timed, dtype="bfloat16"),
    peers=(
        Peer("torch._grouped_mm", "torch_grouped", FORWARD),
        Peer("torch", "torch_experts", FORWARD),
        Peer("torch._grouped_mm", "torch_grouped_backward", BACKWARD),
    ),
    peer_file="peers_gpu.py",
    scopes=CUDA_SCOPES,
    left_to_full=(REAL_MODEL,),
    kinds=KINDS,
)
