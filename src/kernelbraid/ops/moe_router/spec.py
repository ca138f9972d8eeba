"""The router's contracts, workloads and costs. README.md derives the orders; this file states them."""

from collections.abc import Callable
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
from kernelbraid.ops.problem import Layout, Operator, Peer, Problem, ProblemShape, Program, Rows
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

SCORINGS = ("softmax", "sigmoid")

AXES = (
    Axis("experts", 1, 512, constant=True, doc="logits of a token"),
    Axis("top_k", 1, 16, constant=True, doc="slots of a token, at most its logits"),
    Axis("sigmoid", 0, 1, constant=True, doc="1: scores are sigmoids; 0: a softmax"),
    Axis("renormalize", 0, 1, constant=True, doc="1: weights are divided by their sum"),
    TOKENS,
)
EXCLUSIONS = (
    Exclusion("bias", "a bias that chooses but does not weigh needs a contract of its own"),
    Exclusion("groups", "choosing among groups of experts needs a contract of its own"),
)


def _experts(axes: Axes) -> tuple[int, ...]:
    return (axes["experts"],)


def _slots(axes: Axes) -> tuple[int, ...]:
    return (axes["top_k"],)


def form(axes: Axes) -> RowForm:
    """The operator's tensors; how it scores is a constant axis, and an argument of its entry points."""
    return RowForm(
        entry_point="moe_router",
        inputs=(Field("logits", _experts, scale=lambda axes: 2.0),),
        scalars={"by_sigmoid": axes["sigmoid"], "renormalize": axes["renormalize"]},
        outputs=(
            Field("weights", _slots, dtype="float32"),
            Field("experts", _slots, dtype="int32", drawn="indices", below=lambda axes: axes["experts"]),
        ),
        gradients=Gradients(
            entry_point="moe_router_backward",
            given=(Field("dweights", _slots, dtype="float32"),),
            rows=(Field("dlogits", _experts),),
            saved=("weights", "experts"),
        ),
    )


def draw(shape: ProblemShape, rng: np.random.Generator, *, dtypes: tuple[str, ...]) -> Problem:
    return form(dict(shape.constant_axes)).draw(shape, rng, dtypes=dtypes)


def lower(problem: Problem, layout: Layout) -> Program:
    return form(dict(problem.shape.constant_axes)).lower(problem, layout)


def load_axes(shape: ProblemShape, layout: Layout) -> dict[str, int]:
    return form(dict(shape.constant_axes)).load_axes(shape, layout)


def timed(
    workload: Workload,
    rng: np.random.Generator,
    variants: int,
    pool_bytes: int,
    *,
    contiguous: bool,
    dtype: str,
) -> Program:
    """`RowForm.timed`; peers are told how many slots there are, which ours reads off its outputs."""
    axes = _integers(workload)
    program = form(axes).timed(workload, rng, variants, pool_bytes, contiguous=contiguous, dtype=dtype)
    if not contiguous:
        return program
    calls = [replace(call, arguments={**call.arguments, "top_k": axes["top_k"]}) for call in program.calls]
    return replace(program, calls=tuple(calls))


def _integers(workload: Workload) -> dict[str, int]:
    return {name: value for name, value in workload.shape.items() if isinstance(value, int)}


SPECIAL_VALUES = (
    ("equal logits, zeros of either sign", "the expert of lower index comes first"),
    ("NaN", "comes after every number; weights and dlogits follow the arithmetic of the steps"),
    ("infinity", "a softmax of a row that holds +infinity, or nothing but -infinity, gives NaN"),
    ("every score 0", "renormalised weights of sigmoids that all vanish are NaN"),
    ("NaN and infinity", "reach nothing outside of their own row"),
)

SCORES = (
    ("experts", "descending logits, compared as numbers; equal ones by index"),
    ("softmax score", "e[j] = exp2((x[j] - x of slot 0) * float32(log2 e))"),
    ("sigmoid score", "1 / (1 + exp2(-x * float32(log2 e)))"),
    ("renormalised weights", "slots ascending, from the first: S = S + score[s]; score[s] / S"),
)
GRADIENT = (
    ("projection", "slots ascending: c = fma(dweights[s], weights[s], c)"),
    ("dlogits, softmax renormalised", "w[s] * (d[s] - c); elsewhere 0"),
    ("dlogits, softmax", "p[j] = e[j] / L; p[j] * (d[j] - c), d being 0 where j was not chosen"),
    ("dlogits, sigmoid", "((d[s] - c) * w[s]) * (1 - score[s]), c being 0 if not renormalised; elsewhere 0"),
)

CONTRACT = Contract(
    operator="moe_router",
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
    ),
    reduction_orders=(
        *SCORES,
        (
            "softmax weights",
            "L: `lanes` partial sums of e, lane l from +0 over j = l, l + lanes, ...; then added by halving: "
            "l and l + lanes / 2, then l + lanes / 4, and so on; e[slot] / L",
        ),
        *GRADIENT,
    ),
    special_values=SPECIAL_VALUES,
    knobs=(Knob("lanes", (8, 16, 32), 16, "partial sums over experts"),),
    relations=tuple(
        each for each in relations(gradients=True, graph=False) if each.name != "gradient_accumulation"
    ),
    accuracy=(
        AccuracyBound("weights", factor=1.25, floor=2e-7, regimes=FORWARD),
        AccuracyBound("dlogits", factor=1.25, floor=1e-6, regimes=BACKWARD, gross=6.0),
    ),
    canonical_nan=True,
)

CUDA_CONTRACT = Contract(
    operator="moe_router",
    version=1,
    dtypes=("bfloat16", "float16"),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("every elementary operation", "float32, to nearest even"),
        RoundingPoint("store of weights", "float32 already: no further rounding"),
        RoundingPoint("store of dlogits", "float32 to the compute dtype, once"),
    ),
    elementary_operations=(
        ElementaryOperation("multiply, add, subtract", "mul.f32, add.f32, sub.f32, never contracted"),
        ElementaryOperation("fma", "fma.rn.f32, and only where the orders below write fma"),
        ElementaryOperation("divide", "div.rn.f32"),
        ElementaryOperation("exp2", "ex2.approx.ftz.f32"),
    ),
    reduction_orders=(
        *SCORES,
        (
            "softmax weights",
            "L: e, filled up with +0 to a power of two, added by pairing neighbours: 0 with 1, 2 with 3, "
            "then the sums in the same way; e[slot] / L",
        ),
        *GRADIENT,
    ),
    special_values=SPECIAL_VALUES,
    knobs=(),
    relations=tuple(
        each for each in relations(gradients=True, graph=True) if each.name != "gradient_accumulation"
    ),
    accuracy=(
        AccuracyBound("weights", factor=4.0, floor=2e-6, regimes=FORWARD),
        AccuracyBound("dlogits", factor=1.0, floor=0.0, regimes=BACKWARD, half_ulps=0.64),
    ),
    canonical_nan=True,
)

# ---- Workloads.

Model = tuple[int, int, int, int]
"""Experts, slots, sigmoid, renormalize."""

SMALL: Model = (16, 4, 0, 1)
QWEN3_30B_A3B: Model = (128, 8, 0, 1)
DEEPSEEK_V3: Model = (256, 8, 1, 1)


def _workload(phase: Regime, model: Model, tokens: int, weight: float = 1.0) -> Workload:
    axes = zip(("experts", "top_k", "sigmoid", "renormalize"), model, strict=True)
    return Workload(phase, (("tokens", tokens), *axes), weight)


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


CPU_CALLS: tuple[tuple[Regime, int], ...] = (("decode", 16), ("update", 2048), ("backward", 2048))
LARGE_CALLS: tuple[tuple[Regime, int], ...] = (("update", 8192), ("backward", 8192))

GRIDS = {
    "study": _step(SMALL, 30),
    "cpu": tuple(
        _workload(phase, model, tokens) for model in (SMALL, QWEN3_30B_A3B) for phase, tokens in CPU_CALLS
    ),
}
CUDA_GRIDS = {
    "study": _step(QWEN3_30B_A3B, 48),
    "large": tuple(
        _workload(phase, model, tokens)
        for model in (QWEN3_30B_A3B, DEEPSEEK_V3)
        for phase, tokens in LARGE_CALLS
    ),
    "decode": tuple(_workload("decode", QWEN3_30B_A3B, tokens) for tokens in (1, 16, 64, 256)),
}
SCOPES = tuple(
    dict(zip(("experts", "top_k", "sigmoid", "renormalize"), model, strict=True))
    for model in ((1, 1, 0, 0), (5, 5, 0, 0), (60, 4, 0, 0), (33, 7, 1, 0), DEEPSEEK_V3, (512, 10, 0, 1))
)


def cost(workload: Workload, *, dtype: str) -> Cost:
    """Least work of one call: every tensor read or written once; 4 operations a logit, backward 8."""
    axes = _integers(workload)
    operations = 8.0 if workload.phase == "backward" else 4.0
    return Cost(operations * axes["tokens"] * axes["experts"], form(axes).moved(workload, dtype))


def _reference(problem: Problem) -> Rows:
    from kernelbraid.ops.moe_router.reference import reference

    return reference(problem)


def _vendor(problem: Problem) -> Rows:
    from kernelbraid.ops.moe_router.reference import vendor

    return vendor(problem)


def _operator(backend: str, contract: Contract, file: str, peer_file: str, dtype: str) -> Operator:
    drawing: Callable[[ProblemShape, np.random.Generator], Problem] = partial(draw, dtypes=contract.dtypes)
    return Operator(
        name="moe_router",
        backend=backend,
        contract=contract,
        files=(file,),
        entry_points=("moe_router", "moe_router_backward"),
        regimes=TRAINING,
        grids=GRIDS if backend == "cpu" else CUDA_GRIDS,
        draw=drawing,
        lower=lower,
        reference=_reference,
        vendor=_vendor,
        cost=partial(cost, dtype=dtype),
        load_axes=load_axes,
        timed=partial(timed, dtype=dtype),
        peers=(
            Peer("torch", "torch_router", FORWARD),
            Peer("torch", "torch_router_backward", BACKWARD),
        ),
        peer_file=peer_file,
        scopes=SCOPES,
        kinds=KINDS,
    )


MOE_ROUTER = _operator("cpu", CONTRACT, "cpu.py", "peers.py", "float32")
MOE_ROUTER_CUDA = _operator("cuda", CUDA_CONTRACT, "gpu.py", "peers_gpu.py", "bfloat16")
