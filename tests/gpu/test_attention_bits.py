"""The shipped kernels against themselves with other schedules, and the control that fusion must fail.

    python -m pytest tests/gpu/test_attention_bits.py -s        prints how many elements were compared

A variant is the shipped source with other schedule knobs or other tiles, loaded as a module of its own.
"""

import importlib.util
import re

import numpy as np
import pytest
import torch

from kernelbraid import ops
from kernelbraid.ops.formats import BFLOAT16
from kernelbraid.ops.problem import Layout, Problem, ProblemShape, Program, View

OPERATOR = ops.get("attention", "cuda")
SOURCE = ops.source(OPERATOR).text
LENGTHS = (1, 63, 64, 65, 0, 255, 256, 257, 300, 511, 513, 1023, 1025, 1537, 2049)
KINDS = ("normal", "heavy_tailed", "cancelling", "denormals", "signed_zeros", "saturated", "non_finite")
MODELS = (
    ("bfloat16", (32, 8, 128)),
    ("float16", (9, 3, 64)),
    ("bfloat16", (5, 5, 128)),
    ("float16", (40, 1, 128)),
)
WALKS = {"TILE": 128, "PACK_ROWS": 16, "PROGRAMS": 0, "STAGES": 2, "HEADS_TOGETHER_KEYS": 1}
SPLITS = {"PROGRAMS": 100000, "WALK_PROGRAMS": 100000, "PACK_ROWS": 32, "MERGE_WARPS": 4, "MERGE_AHEAD": 32}
PARTS = {
    "PROGRAMS": 300,
    "WALK_PROGRAMS": 100000,
    "DEPENDENT_LAUNCH": 0,
    "MERGE_WARPS": 2,
    "MERGE_AHEAD": 8,
}
TILES = [(r'return \{"dq": \(128,.*', 'return {"dq": (64, 64, 4, 2), "dkv": (32, 64, 4, 2)}')]
FUSED = [("enable_fp_fusion=False", "enable_fp_fusion=True")]
LEFT_TO_THE_COMPILER = [
    (r"s = tl\.dot\(b_k, b_q\) if SWAP else tl\.dot\(b_q, b_k\.T\)\n        if MASK",
     "s = (tl.dot(b_k, b_q) if SWAP else tl.dot(b_q, b_k.T)) * scale\n        if MASK"),
    (r"tl\.max\(s, 0 if SWAP else 1\) \* scale", "tl.max(s, 0 if SWAP else 1)"),
    (r"x = tl\.fma\(s, tl\.zeros\(s\.shape.*", "x = s - across(ms, SWAP)"),
]  # fmt: skip
"""Scores scaled before the mask, and a plain subtraction: the mask decides whether an fma may form."""


@pytest.fixture
def variant(tmp_path):
    """Load the source with other knobs and edits."""

    def load(edits=(), **knobs):
        edits = [*edits, *((rf"^{name} = .*$", f"{name} = {value}") for name, value in knobs.items())]
        text = SOURCE
        for pattern, new in edits:
            text, count = re.subn(pattern, lambda _, new=new: new, text, flags=re.M)
            assert count == 1, pattern
        path = tmp_path / f"variant_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        specification = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return module

    return load


def tensor(array: np.ndarray) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(array).cuda()


def run(module, program: Program) -> dict[tuple[str, int], torch.Tensor]:
    """(quantity, request) -> rows, computed by a module."""
    buffers = {name: tensor(array) for name, array in (program.inputs | program.state).items()}
    for name, (shape, dtype) in program.outputs.items():
        buffers[name] = torch.full(shape, torch.nan, dtype=getattr(torch, dtype), device="cuda")
    for call in program.calls:
        arguments = {
            name: buffers[value.buffer][value.start : value.stop] if isinstance(value, View) else value
            for name, value in call.arguments.items()
        }
        getattr(module, call.entry_point)(**arguments)
    rows: dict[tuple[str, int], list[torch.Tensor]] = {}
    for span in sorted(program.spans, key=lambda span: span.first_row):
        block = buffers[span.buffer].movedim(span.axis, 0)[span.start : span.stop]
        rows.setdefault((span.quantity, span.request), []).append(block.contiguous())
    return {key: torch.cat(blocks) for key, blocks in rows.items()}


class Tally:
    """Elements compared as integers, and those that differ."""

    def __init__(self) -> None:
        self.compared = self.unequal = 0

    def add(self, left, right) -> None:
        for key in left.keys() & right.keys():
            one, other = left[key], right[key]
            rows = min(len(one), len(other))  # the last rows of a request
            kind = torch.int16 if one.element_size() == 2 else torch.int32
            self.compared += other[len(other) - rows :].numel()
            differs = one[len(one) - rows :].view(kind) != other[len(other) - rows :].view(kind)
            self.unequal += int(differs.sum())


def problem(dtype: str, heads: tuple[int, int, int], kind: str, lengths=LENGTHS, rows=None) -> Problem:
    axes = tuple(zip(("query_heads", "kv_heads", "head_dim"), heads, strict=True))
    shape = ProblemShape(axes, lengths, rows or lengths, kind, dtype)
    return OPERATOR.draw(shape, np.random.default_rng(len(kind)))


def steps(drawn: Problem, count: int, **layout) -> Program:
    """The last rows of a problem, in `count` calls of one row."""
    held = tuple(min(count, n) for n in drawn.shape.lengths)
    requests = tuple(
        {**{n: r[n] for n in "kv"}, "q": r["q"][len(r["q"]) - keep :]}
        for r, keep in zip(drawn.requests, held, strict=True)
    )
    shape = ProblemShape(
        drawn.shape.constant_axes, drawn.shape.lengths, held, drawn.shape.kind, drawn.shape.dtype
    )
    partition = tuple((1,) * n for n in held)
    everyone = tuple(range(len(held)))
    return OPERATOR.lower(
        Problem(shape, requests, drawn.scalars), Layout("decode", everyone, partition, **layout)
    )


def compare_forward(drawn: Problem, modules, tally: Tally) -> None:
    """The packed forward of the first module against every regime, each with another module."""
    shipped, walks, splits, parts = modules
    everyone = tuple(range(len(drawn.shape.lengths)))
    base = run(shipped, OPERATOR.lower(drawn, Layout("update", everyone)))
    tally.add(base, run(walks, OPERATOR.lower(drawn, Layout("update", everyone[::-1], padding=3))))
    for page, module in ((1, walks), (7, shipped), (16, shipped), (16, walks), (64, shipped), (256, walks)):
        layout = Layout("prefill", everyone, page_size=page, page_seed=page)
        tally.add(base, run(module, OPERATOR.lower(drawn, layout)))
    for module in (shipped, walks, splits, parts):
        tally.add(base, run(module, steps(drawn, 3, page_size=16, page_seed=2)))
    pieces = tuple((n // 3, n - n // 3 - n // 9, n // 9) for n in drawn.shape.lengths)
    layout = Layout("chunked_prefill", everyone, pieces, page_size=64, page_seed=5)
    tally.add(base, run(splits, OPERATOR.lower(drawn, layout)))


@pytest.fixture
def modules(variant):
    return variant(), variant(**WALKS), variant(**SPLITS), variant(**PARTS)


@pytest.mark.parametrize(("dtype", "heads"), MODELS)
def test_schedules_and_regimes_agree(dtype, heads, modules):
    tally = Tally()
    for kind in KINDS:
        compare_forward(problem(dtype, heads, kind), modules, tally)
    print(f"{dtype} {heads}: {tally.compared} compared")
    assert tally.compared > 10**8 and not tally.unequal


@pytest.mark.parametrize(("dtype", "heads"), MODELS)
def test_gradients_of_other_tiles_and_packings_agree(dtype, heads, variant):
    shipped, tiled, tally = variant(), variant(TILES, HEADS_TOGETHER_KEYS=1), Tally()
    everyone = tuple(range(10))
    for kind in KINDS[:-1]:
        drawn = problem(dtype, heads, kind, (*LENGTHS[:9], 1025))
        base = run(shipped, OPERATOR.lower(drawn, Layout("backward", everyone)))
        again = Layout("backward", everyone[::-1], padding=70, poison_seed=3)
        tally.add(base, run(shipped, OPERATOR.lower(drawn, again)))
        tally.add(base, run(tiled, OPERATOR.lower(drawn, Layout("backward", everyone))))
        for b in (2, 8, 9):
            tally.add(base, run(shipped, OPERATOR.lower(drawn, Layout("backward", (b,)))))
    print(f"{dtype} {heads}: {tally.compared} compared")
    assert tally.compared > 10**7 and not tally.unequal


@pytest.mark.parametrize("length", [8191, 8193, 40000, 131072])
def test_long_contexts_agree(length, modules):
    shipped, walks, splits, parts = modules
    drawn = problem("bfloat16", (4, 1, 128), "normal", (length,), (500,))
    base, tally = run(walks, OPERATOR.lower(drawn, Layout("prefill", (0,)))), Tally()
    for module in (shipped, splits, parts):
        tally.add(base, run(module, steps(drawn, 3, page_size=16, page_seed=4)))
    tally.add(base, run(shipped, OPERATOR.lower(drawn, Layout("prefill", (0,), page_size=64))))
    assert tally.compared > 10**5 and not tally.unequal


@pytest.mark.parametrize("fused", [True, False])
def test_default_fusion_is_seen(fused, variant):
    """The same formulas, fused by the compiler or not: tiles of 64 and 128 rows differ only where fused."""
    edits = [*LEFT_TO_THE_COMPILER, *(FUSED if fused else [])]
    shipped, walks = variant(edits), variant(edits, **WALKS)
    tally = Tally()
    compare_forward(
        problem("bfloat16", (32, 8, 128), "normal", (64, 300, 1025, 1537)),
        (shipped, walks, walks, walks),
        tally,
    )
    print(f"fused {fused}: {tally.unequal} of {tally.compared} differ")
    assert bool(tally.unequal) == fused
