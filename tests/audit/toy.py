"""A tiny operator, to show that the audit knows nothing of attention: scaled running sums of rows.

    y[t, c] = sum_j scale * x[j, c]     j = 0 .. position of t

in blocks of `block` positions from position 0, summed in order inside a block, blocks merged left to right.
"""

from dataclasses import replace
from math import prod

import numpy as np

from kernelbraid.contract import (
    AccuracyBound,
    Axis,
    Contract,
    Cost,
    ElementaryOperation,
    Knob,
    Regime,
    Relation,
    Source,
    Workload,
)
from kernelbraid.ops.problem import (
    Array,
    Call,
    Layout,
    Operator,
    Problem,
    ProblemShape,
    Program,
    Rows,
    RowSpan,
    View,
)

ROOT = '''
import numpy as np

BLOCK = 16
TILE = 4

KNOBS = {"BLOCK": ("numeric", (8, 16, 32)), "TILE": ("schedule", (1, 4, 64))}


def scaled_sums(x, ends, rows, scale, out):
    """x [T, width], ends [B + 1], rows [B]; the last rows[b] of each request go to out [R, width]."""
    at = 0
    for b in range(len(rows)):
        request = x[ends[b] : ends[b + 1]] * np.float32(scale)
        before = np.zeros(x.shape[1], np.float32)
        sums = np.empty_like(request)
        for first in range(0, len(request), BLOCK):
            inside = np.add.accumulate(request[first : first + BLOCK], axis=0)
            sums[first : first + BLOCK] = before + inside
            before = before + inside[-1]
        if rows[b]:
            out[at : at + rows[b]] = sums[len(request) - rows[b] :]
        at += rows[b]


def numerics(constant_axes):
    return {"block": BLOCK}


def schedule(axes, knobs):
    return {"tile": min(knobs["TILE"], 1 if axes["query_length"] < 32 else 64)}
'''

FORWARD: tuple[Regime, ...] = ("prefill", "chunked_prefill", "decode", "update")

CONTRACT = Contract(
    operator="sums",
    version=1,
    dtypes=("float32",),
    axes=(
        Axis("width", 1, 64, constant=True),
        Axis("batch", 0, 64, constant=False),
        Axis("query_length", 0, 512, constant=False),
        Axis("key_length", 0, 512, constant=False),
    ),
    exclusions=(),
    rounding_points=(),
    elementary_operations=(ElementaryOperation("multiply", "IEEE binary32"),),
    reduction_orders=(("positions", "blocks left to right"),),
    special_values=(),
    knobs=(Knob("block", (8, 16, 32), 16, "positions a block"),),
    relations=(
        Relation("rerun", "the same call twice", FORWARD),
        Relation("fresh_process", "another process", FORWARD),
        Relation("batch", "no neighbour matters", FORWARD),
        Relation("decode_equals_prefill", "row by row equals at once", ("decode",)),
        Relation("implementations_agree", "equal bits id, equal bits", FORWARD),
    ),
    accuracy=(AccuracyBound("y", 2.0, 1e-6, FORWARD),),
)


def draw(shape: ProblemShape, rng: np.random.Generator) -> Problem:
    width = dict(shape.constant_axes)["width"]
    requests = tuple({"x": rng.standard_normal((n, width), np.float32)} for n in shape.lengths)
    return Problem(shape, requests, {"scale": 0.5})


def lower(problem: Problem, layout: Layout) -> Program:
    shape, width = problem.shape, dict(problem.shape.constant_axes)["width"]
    pieces = layout.partition or tuple((shape.rows[b],) for b in layout.requests)
    inputs: dict[str, Array] = {}
    calls, spans, start = [], [], 0
    done = [0] * len(layout.requests)
    for t in range(max((len(p) for p in pieces), default=0)):
        new = [p[t] if t < len(p) else 0 for p in pieces]
        done = [d + n for d, n in zip(done, new, strict=True)]
        held = [shape.lengths[b] - shape.rows[b] + d for b, d in zip(layout.requests, done, strict=True)]
        inputs[f"x{t}"] = np.concatenate(
            [problem.requests[b]["x"][:n] for b, n in zip(layout.requests, held, strict=True)]
        )
        inputs[f"ends{t}"] = np.cumsum([0, *held], dtype=np.int32)
        inputs[f"rows{t}"] = np.array(new, np.int32)
        stop = start + sum(new)
        calls.append(_call(f"x{t}", f"ends{t}", f"rows{t}", problem.scalars["scale"], start, stop))
        for b, n, d in zip(layout.requests, new, done, strict=True):
            if n or (t == 0 and not shape.rows[b]):
                spans.append(RowSpan("y", "out", 0, start, start + n, b, d - n))
            start += n
    outputs = {"out": ((start, width), "float32")}
    return Program(inputs, {}, outputs, tuple(calls), tuple(spans), dict(shape.constant_axes))


def _call(x: str, ends: str, rows: str, scale: float, start: int, stop: int) -> Call:
    return Call(
        "scaled_sums",
        {
            "x": View(x),
            "ends": View(ends),
            "rows": View(rows),
            "scale": scale,
            "out": View("out", start, stop),
        },
    )


def _exact(problem: Problem, dtype: type) -> Rows:
    shape = problem.shape
    return {
        ("y", b): np.cumsum(request["x"].astype(dtype) * dtype(0.5), axis=0)[
            shape.lengths[b] - shape.rows[b] :
        ]
        for b, request in enumerate(problem.requests)
    }


def timed(
    workload: Workload, rng: np.random.Generator, variants: int, pool_bytes: int, *, contiguous: bool
) -> Program:
    batch, length, width = (int(workload.shape[name]) for name in ("batch", "length", "width"))  # type: ignore[arg-type]
    rows = length if workload.phase != "decode" else 1
    inputs: dict[str, Array] = {
        "x": rng.standard_normal((variants * batch * length, width), np.float32),
        "ends": np.arange(0, batch * length + 1, length, dtype=np.int32),
        "rows": np.full(batch, rows, np.int32),
    }
    calls = []
    for i in range(variants):
        call = _call("x", "ends", "rows", 0.5, i * batch * rows, (i + 1) * batch * rows)
        x = View("x", i * batch * length, (i + 1) * batch * length)
        calls.append(replace(call, arguments={**call.arguments, "x": x}))
    outputs = {"out": ((variants * batch * rows, width), "float32")}
    return Program(inputs, {}, outputs, tuple(calls), constant_axes={"width": width})


def cost(workload: Workload) -> Cost:
    elements = prod(int(workload.shape[name]) for name in ("batch", "length", "width"))  # type: ignore[arg-type]
    return Cost(flops=2.0 * elements, bytes=4.0 * elements)


def workload(phase: Regime, batch: int, length: int, width: int = 4, weight: float = 1.0) -> Workload:
    return Workload(phase, (("batch", batch), ("length", length), ("width", width)), weight)


SUMS = Operator(
    name="sums",
    contract=CONTRACT,
    backend="cpu",
    files=("cpu.py",),
    entry_points=("scaled_sums",),
    regimes=FORWARD,
    grids={"study": (workload("prefill", 2, 64, weight=1.0), workload("decode", 8, 100, weight=10.0))},
    draw=draw,
    lower=lower,
    reference=lambda problem: _exact(problem, np.float64),
    vendor=lambda problem: _exact(problem, np.float32),
    cost=cost,
    load_axes=lambda shape, layout: {
        **dict(shape.constant_axes),
        "batch": len(layout.requests),
        "query_length": max((shape.rows[b] for b in layout.requests), default=0),
        "key_length": max((shape.lengths[b] for b in layout.requests), default=0),
    },
    timed=timed,
    peers=(),
    peer_file="peers.py",
)


def root(label: str = "root") -> Source:
    return Source(ROOT, label)


def variant(*edits: tuple[str, str], label: str = "candidate") -> Source:
    """The root with pieces of its text replaced; each must occur."""
    text = ROOT
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return Source(text, label)


def hostile(body: str, *, top: str = "") -> Source:
    """The root whose every call first runs `body`; `top` runs at import."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    text = ROOT.replace("    at = 0\n", lines + "    at = 0\n", 1)
    return Source(f"{top}\n{text}", "hostile")


def small_program(lengths: tuple[int, ...] = (5, 40), width: int = 4, seed: int = 3) -> Program:
    """One prefill call on normal numbers."""
    shape = ProblemShape((("width", width),), lengths, lengths)
    problem = draw(shape, np.random.default_rng(seed))
    return lower(problem, Layout("prefill", tuple(range(len(lengths)))))


def expected(lengths: tuple[int, ...] = (5, 40), width: int = 4, seed: int = 3) -> Array:
    """What the root writes for `small_program`, computed here."""
    space: dict[str, object] = {}
    exec(ROOT, space)
    program = small_program(lengths, width, seed)
    out = np.empty(program.outputs["out"][0], np.float32)
    arguments = {name: program.inputs[name] for name in ("x0", "ends0", "rows0")}
    space["scaled_sums"](*arguments.values(), 0.5, out)  # type: ignore[operator]
    return out
