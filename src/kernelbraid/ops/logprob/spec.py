"""Contracts, workloads and costs of log-probabilities: README.md derives the orders, this file states "
"them."""

from dataclasses import replace
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
from kernelbraid.ops.problem import Call, Layout, Operator, Peer, Problem, Program, Rows, View
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
LARGEST_VOCABULARY = 1 << 20
IGNORED = -100
"""The target of a token that does not count."""

AXES = (
    Axis("width", 1, LARGEST_WIDTH, constant=True, doc="elements of a row of x"),
    Axis("vocabulary", 2, LARGEST_VOCABULARY, constant=True, doc="rows of the weight"),
    TOKENS,
)
EXCLUSIONS = (
    Exclusion("bias", "no model here has a bias in its head"),
    Exclusion("softcap", "Gemma's capped logits need operations of their own"),
)


def _row(axes: Axes) -> tuple[int, ...]:
    return (axes["width"],)


def _weight(axes: Axes) -> tuple[int, ...]:
    return axes["vocabulary"], axes["width"]


def _one(axes: Axes) -> tuple[int, ...]:
    return ()


FORM = RowForm(
    entry_point="logprob",
    inputs=(
        Field("x", _row),
        Field("targets", _one, dtype="int32", drawn="indices", below=lambda axes: axes["vocabulary"]),
    ),
    parameters=(Field("weight", _weight, scale=lambda axes: 2.5 / axes["width"] ** 0.5),),
    scalars={"temperature": 0.8},
    outputs=(
        Field("logprob", _one, dtype="float32"),
        Field("entropy", _one, dtype="float32"),
        Field("lse", _one, dtype="float32"),
    ),
    gradients=Gradients(
        entry_point="logprob_backward",
        given=(Field("dlogprob", _one, dtype="float32"), Field("dentropy", _one, dtype="float32")),
        rows=(Field("dx", _row),),
        parameters=(Field("dweight", _weight, dtype="float32"),),
        saved=("entropy", "lse"),
    ),
)

ROLLOUT_ROWS = 64
"""Tokens of the largest call that `lower` turns into rollout's form."""


def lower(problem: Problem, layout: Layout) -> Program:
    """Turn a problem into calls as `RowForm.lower`, every other one of decode in the form of rollout.

    Rollout writes the logits, to sample from, and then reads them: its bits are to be those of `logprob`.
    """
    program = FORM.lower(problem, layout)
    if layout.regime != "decode":
        return program
    calls: list[Call] = []
    most = 0
    for i, call in enumerate(program.calls):
        rows = call.arguments["x"]
        assert isinstance(rows, View) and rows.stop is not None
        count = rows.stop - rows.start
        if i % 2 or count > ROLLOUT_ROWS:
            calls.append(call)
            continue
        given, logits = dict(call.arguments), View("logits", 0, count)
        most = max(most, count)
        calls.append(Call("logits", {"x": given.pop("x"), "weight": given.pop("weight"), "out": logits}))
        calls.append(Call("logprob_of_logits", {"logits": logits, **given}))
    if not most:
        return program
    buffer = (most, program.constant_axes["vocabulary"]), "float32"
    return replace(program, calls=tuple(calls), outputs={**program.outputs, "logits": buffer})


SPECIAL_VALUES = (
    ("temperature", "positive and finite; logits are multiplied by float32(1 / temperature)"),
    (
        "targets",
        "one outside of the vocabulary: log-probability 0, no gradient of it; entropy and lse are kept",
    ),
    ("logits of -inf", "weight 0, no gradient, nothing to the entropy; all of them: lse -inf, the rest NaN"),
    ("logits of +inf and NaN", "lse, entropy and log-probability of their row are NaN"),
    ("denormals", "kept, in inputs and results; weights below about 2^-125 count as 0"),
    ("gradients", "of finite numbers: a NaN reaches dweight"),
)

CONTRACT = Contract(
    operator="logprob",
    version=1,
    dtypes=("float32",),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("every elementary operation", "float32, to nearest even, denormals kept"),
    ),
    elementary_operations=(
        ElementaryOperation("multiply, add, divide", "IEEE-754 binary32, never contracted"),
        ElementaryOperation("fma", "a * b + c rounded once, and only where the orders below write fma"),
        ElementaryOperation(
            "exp",
            "of x <= 0: t = fma(x, r, 12582912), n = t - 12582912, f = fma(x, r', fma(x, r, -n)), r and r' "
            "being log2 e and its rest; Horner's rule of f by fma, times 2^n; 0 where n is below -125",
            (
                ("log2 e", ("1.715476p0", "1.4ae0c0p-26")),
                (
                    "exp2",
                    (
                        *("1p0", "1.62e432p-1", "1.ebfbe2p-3", "1.c6ae72p-5", "1.3b270ep-7"),
                        *("1.5f7276p-10", "1.470b48p-13"),
                    ),
                ),
            ),
        ),
        ElementaryOperation(
            "log2",
            "x = 2^e * f with f from 2^-0.5 to 2^0.5; z = (f - 1) / (f + 1); fma(z, polynomial of z * z, e)",
            (("log2", ("1.715476p1", "1.ec709ep-1", "1.2776c6p-1", "1.a61762p-2", "1.484b14p-2")),),
        ),
    ),
    reduction_orders=(
        (
            "logit",
            "l = fma(x[k], w[k], l), k ascending in blocks of k_block, each a chain from +0, added in order "
            "to the total from +0; s = total * c",
        ),
        (
            "block",
            "columns of `block`, filled up with -inf: m = max s, b = m or 0 if -inf, u = s - b, "
            "w = exp(u); L = sum w and E = sum w * u (nothing where w is 0): lane l adds columns "
            "l, l + 16, ... from +0, lanes are added by halving: l and l + 8, l + 4, l + 2, l + 1",
        ),
        (
            "row",
            "M = max m, B = M or 0 if -inf, a = exp(m - B); lane l adds blocks l, l + 16, ... "
            "from "
            "+0: L = fma(L', a, L), E = fma(fma(L', b - B, E'), a, E); lanes by halving as above",
        ),
        (
            "lse, entropy, logprob",
            "fma(log2 L, ln 2, M); fma(log2 L, ln 2, 0 - E / L); fma(log2 L, -ln 2, s[target] - M)",
        ),
        (
            "gradient of a logit",
            "u = fma(log2 L, -ln 2, s - M), p = exp(min(u, 0)), g = p * fma(dentropy, u + entropy, "
            "dlogprob) or 0 if p is 0; -g, at the target dlogprob - g; times c",
        ),
        (
            "dx",
            "blocks in order: each a chain by fma from +0 over its rows of the weight, added to the total "
            "from +0",
        ),
        (
            "dweight",
            "tokens of a call in blocks of 64 from its first: each a chain by fma from +0 in order, added "
            "to the "
            "total, from +0 or from what is there",
        ),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(
        Knob("block", (64, 128, 256), 128, "logits that are reduced together"),
        Knob("k_block", (64, 128, 256), 128, "numbers of a logit that one chain adds, as in `linear`"),
    ),
    relations=relations(gradients=True, graph=False),
    accuracy=(
        AccuracyBound("logprob", factor=1.25, floor=2e-7, regimes=FORWARD),
        AccuracyBound("entropy", factor=1.25, floor=2e-7, regimes=FORWARD),
        AccuracyBound("lse", factor=1.25, floor=2e-7, regimes=FORWARD),
        AccuracyBound("dx", factor=1.25, floor=2e-7, regimes=BACKWARD),
        AccuracyBound("dweight", factor=1.25, floor=2e-7, regimes=BACKWARD),
    ),
    canonical_nan=True,
)

CUDA_CONTRACT = Contract(
    operator="logprob",
    version=1,
    dtypes=("bfloat16", "float16"),
    axes=AXES,
    exclusions=EXCLUSIONS,
    rounding_points=(
        RoundingPoint("logits", "none: the float32 accumulator of the matrix unit, not rounded to 16 bits"),
        RoundingPoint("every elementary operation", "float32, to nearest even"),
        RoundingPoint(
            "gradients of logits", "float32 to the compute dtype, once, as operands of dx and dweight"
        ),
        RoundingPoint("store of dx", "float32 to the compute dtype, once"),
        RoundingPoint("store of dweight", "float32 already: no further rounding"),
    ),
    elementary_operations=(
        ElementaryOperation("multiply, add", "mul.f32, add.f32, never contracted"),
        ElementaryOperation("fma", "fma.rn.f32, and only where the orders below write fma"),
        ElementaryOperation("divide", "div.rn.f32, correctly rounded"),
        ElementaryOperation("dot product", "the matrix unit's chain over ascending groups of 16, float32"),
        ElementaryOperation("exp2", "ex2.approx.ftz.f32"),
        ElementaryOperation("log2", "Triton's log2: a polynomial by fma of the mantissa, plus the exponent"),
    ),
    reduction_orders=(
        ("logit", "l = x . w, one chain of the matrix unit over k ascending from +0; s = l * c"),
        (
            "block",
            "columns of `block`, filled up with -inf: m = max s, b = m or 0 if -inf, u = s - b, "
            "w = exp2(u * log2 e); L = sum w and E = sum w * u (nothing where w is 0), added by pairing "
            "neighbours: 0 with 1, 2 with 3, then the sums in the same way",
        ),
        (
            "row",
            "M = max m, B = M or 0 if -inf, a = exp2((m - B) * log2 e); L = sum L' * a and "
            "E = sum fma(L', b - B, E') * a over blocks, filled up with +0 to a power of two, by pairing",
        ),
        ("lse, entropy, logprob", "fma(log2 L, ln 2, M); fma(log2 L, ln 2, 0 - E / L); s[target] - lse"),
        (
            "gradient of a logit",
            "u = s - lse, p = exp2(min(u * log2 e, 0)), g = p * fma(dentropy, u + entropy, dlogprob) or 0 "
            "if p "
            "is 0; -g, at the target dlogprob - g; times c; rounded to 16 bits",
        ),
        (
            "dx",
            "rows of the weight in spans of 2048: each a chain of the matrix unit from +0, added in order "
            "to the "
            "total, from +0",
        ),
        ("dweight", "tokens of a call in order: one chain of the matrix unit from +0 or from what is there"),
    ),
    special_values=SPECIAL_VALUES,
    knobs=(Knob("block", (64, 128), 128, "logits that are reduced together"),),
    relations=relations(gradients=True, graph=True),
    accuracy=(
        AccuracyBound("logprob", factor=1.0, floor=2e-5, regimes=FORWARD),
        AccuracyBound("entropy", factor=1.0, floor=2e-5, regimes=FORWARD),
        AccuracyBound("lse", factor=1.0, floor=2e-5, regimes=FORWARD),
        AccuracyBound("dx", factor=1.5, floor=0.0, regimes=BACKWARD, half_ulps=1.02),
        AccuracyBound("dweight", factor=1.5, floor=0.0, regimes=BACKWARD, half_ulps=0.64),
    ),
    canonical_nan=True,
)


def _workload(phase: Regime, model: tuple[int, int], tokens: int, weight: float = 1.0) -> Workload:
    width, vocabulary = model
    return Workload(phase, (("tokens", tokens), ("vocabulary", vocabulary), ("width", width)), weight)


def _step(model: tuple[int, int]) -> tuple[Workload, ...]:
    """Calls of one GRPO step: first tokens of prompts, decode at batch 16 and 64, packed updates."""
    return (
        _workload("prefill", model, 8, 2),
        _workload("chunked_prefill", model, 4, 16),
        _workload("decode", model, 16, 900),
        _workload("decode", model, 64, 300),
        _workload("update", model, 1500, 32),
        _workload("backward", model, 1500, 16),
    )


SMOLLM2_135M, QWEN3_0_6B, QWEN3_8B = (576, 49152), (1024, 151936), (4096, 151936)

CPU_CALLS: tuple[tuple[Regime, int], ...] = (
    *(("decode", 1), ("decode", 16), ("update", 512), ("backward", 512)),
)
GRIDS = {
    "study": _step(SMOLLM2_135M),
    "cpu": tuple(_workload(phase, SMOLLM2_135M, tokens) for phase, tokens in CPU_CALLS),
}
CUDA_GRIDS = {
    "study": _step(QWEN3_8B),
    "large": (_workload("update", QWEN3_8B, 8192), _workload("backward", QWEN3_8B, 8192)),
    "decode": tuple(_workload("decode", QWEN3_8B, tokens) for tokens in (1, 16, 64, 256)),
}
SCOPES = tuple(
    {"width": width, "vocabulary": vocabulary}
    for width, vocabulary in ((1, 2), (64, 1000), (100, 4099), (896, 2374), (2048, 1187))
)
REAL_HEAD = {"width": QWEN3_8B[0], "vocabulary": QWEN3_8B[1]}
CUDA_SCOPES = (*SCOPES, {**REAL_HEAD, "vocabulary": QWEN3_8B[1] // 16})


def cost(workload: Workload, *, dtype: str) -> Cost:
    """Least work of one call: every tensor read or written once; one product forward, three backward."""
    tokens, width, vocabulary = (workload.shape[name] for name in ("tokens", "width", "vocabulary"))
    assert isinstance(tokens, int) and isinstance(width, int) and isinstance(vocabulary, int)
    products = 3 if workload.phase == "backward" else 1
    return Cost(2.0 * products * tokens * width * vocabulary, FORM.moved(workload, dtype))


def _reference(problem: Problem) -> Rows:
    from kernelbraid.ops.logprob.reference import reference

    return reference(problem)


def _vendor(problem: Problem) -> Rows:
    from kernelbraid.ops.logprob.reference import vendor

    return vendor(problem)


LOGPROB = Operator(
    name="logprob",
    backend="cpu",
    contract=CONTRACT,
    files=("cpu.py",),
    entry_points=(*FORM.entry_points, "logits", "logprob_of_logits"),
    regimes=TRAINING,
    grids=GRIDS,
    draw=partial(FORM.draw, dtypes=CONTRACT.dtypes),
    lower=lower,
    reference=_reference,
    vendor=_vendor,
    cost=partial(cost, dtype="float32"),
    load_axes=FORM.load_axes,
    timed=partial(FORM.timed, dtype="float32"),
    peers=(
        Peer("torch", "torch_logprob", FORWARD),
        Peer("torch", "torch_logprob_backward", BACKWARD),
    ),
    peer_file="peers.py",
    scopes=SCOPES,
    kinds=KINDS,
)

LOGPROB_CUDA = Operator(
    name="logprob",
    backend="cuda",
    contract=CUDA_CONTRACT,
    files=("gpu.py",),
    entry_points=(*FORM.entry_points, "logits", "logprob_of_logits"),
    regimes=TRAINING,
    grids=CUDA_GRIDS,
    draw=partial(FORM.draw, dtypes=CUDA_CONTRACT.dtypes),
    lower=lower,
    reference=_reference,
    vendor=_vendor,
    cost=partial(cost, dtype="bfloat16"),
    load_axes=FORM.load_axes,
    timed=partial(FORM.timed, dtype="bfloat16"),
    peers=(
        Peer("torch", "torch_logprob", FORWARD),
        Peer("torch", "torch_logprob_backward", BACKWARD),
        Peer("Liger-Kernel", "liger_logprob", FORWARD, module="liger_kernel"),
        Peer("Liger-Kernel", "liger_logprob_backward", BACKWARD, module="liger_kernel"),
    ),
    peer_file="peers_gpu.py",
    scopes=CUDA_SCOPES,
    left_to_full=(REAL_HEAD,),
    kinds=KINDS,
)
