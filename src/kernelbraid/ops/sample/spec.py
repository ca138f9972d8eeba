"""Contracts, workloads and costs of sampling. README.md gives the reasons; this file states the rules."""

from functools import partial

from kernelbraid.contract import (
    Axis,
    Contract,
    Cost,
    ElementaryOperation,
    Exclusion,
    Regime,
    RoundingPoint,
    Workload,
)
from kernelbraid.ops.problem import Operator, Peer, Problem, Rows
from kernelbraid.ops.rows import FORWARD, KINDS, TOKENS, Axes, Field, RowForm, relations

LARGEST_VOCABULARY = 1 << 20

AXES = (
    Axis("vocabulary", 2, LARGEST_VOCABULARY, constant=True, doc="logits of a row"),
    TOKENS,
)
EXCLUSIONS = (
    Exclusion("penalties", "repetition and presence need the tokens before: change the logits first"),
    Exclusion("generator", "random numbers belong to (seed, sample, position), never to a stream"),
)


def _row(axes: Axes) -> tuple[int, ...]:
    return (axes["vocabulary"],)


def _one(axes: Axes) -> tuple[int, ...]:
    return ()


def _integer(name: str, dtype: str, below: int) -> Field:
    return Field(name, _one, dtype=dtype, drawn="indices", below=lambda axes: below)


FORM = RowForm(
    entry_point="sample",
    inputs=(
        Field("logits", _row, scale=lambda axes: 3.0),
        Field("inverse_temperature", _one, dtype="float32", scale=lambda axes: 0.5, offset=0.9),
        Field("top_k", _one, dtype="int32", drawn="indices", below=lambda axes: axes["vocabulary"]),
        Field("top_p", _one, dtype="float32", scale=lambda axes: 0.3, offset=0.8),
        Field("min_p", _one, dtype="float32", scale=lambda axes: 0.02),
        _integer("seeds", "int64", 1 << 62),
        _integer("samples", "int32", 64),
        Field("positions", _one, dtype="int32", drawn="positions"),
    ),
    outputs=(Field("tokens", _one, dtype="int32"),),
)

EXP2 = ElementaryOperation(
    "exp2",
    "of x <= 0: t = x + 12582912, f = x - (t - 12582912), Horner's rule by fma, times 2^t; 0 below -125",
    (
        (
            "exp2",
            (
                *("1p0", "1.62e432p-1", "1.ebfbe2p-3", "1.c6ae72p-5", "1.3b270ep-7", "1.5f7276p-10"),
                "1.470b48p-13",
            ),
        ),
    ),
)
RULES = (
    ("scaled logit", "s = l * c + 0 with c = float32(1 / temperature); a NaN counts as -inf"),
    ("greedy", "where c is not positive and finite: the first of the largest logits"),
    ("weight", "w = exp2(u * log2 e) with u = s - max s, or 0 where s is the maximum; q = floor(w * 2^40)"),
    ("min-p, first", "what has w < min(min_p, 1) is removed, if min_p > 0"),
    ("order of cuts", "s descending, ties by index ascending"),
    ("top-k, second", "the first top_k of what is left, if 0 < top_k < vocabulary"),
    (
        "top-p, third",
        "of what is left, the shortest prefix with sum q >= max(1, int64(float64(top_p) * float64(sum q))), "
        "if "
        "top_p < 1: the probabilities are renormalised after min-p and top-k",
    ),
    (
        "random bits",
        "r = first 64 bits of Philox 4x32-10, key = seed (low, high), counter = position (low, high), sample "
        "(low, high)",
    ),
    ("token", "the first v, by index, with q[0] + ... + q[v] > floor(r * sum q / 2^64), q of what is left"),
    ("every sum", "of 64-bit integers, which is exact: it has no order"),
)
SPECIAL_VALUES = (
    ("logits of +inf", "they share the whole probability"),
    ("no logit above -inf", "token 0"),
    ("NaN", "a NaN logit counts as -inf; a NaN top_p or min_p cuts nothing, a NaN temperature is greedy"),
    ("small weights", "below 2^-40 of the largest, a logit 27.8 below it, a token has probability 0"),
    ("signed zeros", "equal"),
)


def _contract(backend: str) -> Contract:
    gpu = backend == "cuda"
    exp2 = ElementaryOperation("exp2", "ex2.approx.ftz.f32") if gpu else EXP2
    return Contract(
        operator="sample",
        version=1,
        dtypes=("float32",),
        axes=AXES,
        exclusions=EXCLUSIONS,
        rounding_points=(RoundingPoint("scaled logits, weights", "float32, to nearest even"),),
        elementary_operations=(
            ElementaryOperation("multiply, add", "IEEE-754 binary32, never contracted"),
            exp2,
            ElementaryOperation("float64 product of top-p", "IEEE-754 binary64, to nearest even"),
        ),
        reduction_orders=RULES,
        special_values=SPECIAL_VALUES,
        knobs=(),
        relations=relations(gradients=False, graph=gpu),
        accuracy=(),
    )


CONTRACT, CUDA_CONTRACT = _contract("cpu"), _contract("cuda")


def _workload(phase: Regime, vocabulary: int, tokens: int, weight: float = 1.0) -> Workload:
    return Workload(phase, (("tokens", tokens), ("vocabulary", vocabulary)), weight)


def _step(vocabulary: int) -> tuple[Workload, ...]:
    """Calls of one GRPO step: first tokens after prompts, decode at batch 16 and 64."""
    return (
        _workload("prefill", vocabulary, 8, 2),
        _workload("decode", vocabulary, 16, 900),
        _workload("decode", vocabulary, 64, 300),
    )


SMOLLM2, QWEN3 = 49152, 151936
GRIDS = {
    "study": _step(SMOLLM2),
    "cpu": tuple(_workload("decode", SMOLLM2, tokens) for tokens in (1, 16, 64)),
}
CUDA_GRIDS = {
    "study": _step(QWEN3),
    "decode": tuple(_workload("decode", QWEN3, tokens) for tokens in (1, 16, 64, 256)),
}
SCOPES = tuple({"vocabulary": vocabulary} for vocabulary in (2, 100, 1000, 4099))


def cost(workload: Workload) -> Cost:
    """Least work of one call: logits read once, about 20 operations each."""
    tokens, vocabulary = workload.shape["tokens"], workload.shape["vocabulary"]
    assert isinstance(tokens, int) and isinstance(vocabulary, int)
    return Cost(20.0 * tokens * vocabulary, FORM.moved(workload, "float32"))


def _reference(problem: Problem) -> Rows:
    from kernelbraid.ops.sample.reference import reference

    return reference(problem)


def _vendor(problem: Problem) -> Rows:
    """Nobody else draws these tokens."""
    return {}


def _operator(backend: str, contract: Contract, file: str, peers: str) -> Operator:
    return Operator(
        name="sample",
        backend=backend,
        contract=contract,
        files=(file,),
        entry_points=FORM.entry_points,
        regimes=FORWARD,
        grids=GRIDS if backend == "cpu" else CUDA_GRIDS,
        draw=partial(FORM.draw, dtypes=contract.dtypes),
        lower=FORM.lower,
        reference=_reference,
        vendor=_vendor,
        cost=cost,
        load_axes=FORM.load_axes,
        timed=partial(FORM.timed, dtype="float32"),
        peers=(Peer("torch", "torch_sample", FORWARD),),
        peer_file=peers,
        scopes=SCOPES,
        kinds=KINDS,
    )


SAMPLE = _operator("cpu", CONTRACT, "cpu.py", "peers.py")
SAMPLE_CUDA = _operator("cuda", CUDA_CONTRACT, "gpu.py", "peers_gpu.py")
