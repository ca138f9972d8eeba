"""The problems of the fused step, the calls that they become in each regime, and timing. numpy only.

A request has `rows[b]` new tokens at its last positions; every call writes those that it brings into the
request's pages and returns their queries. What is compared are the queries of every call, and the rows of the
caches at the end, which are read where the page table says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kernelbraid.contract import Workload
from kernelbraid.ops.numbers import Integers, garbage, normal, poison
from kernelbraid.ops.problem import (
    Argument,
    Array,
    Call,
    Layout,
    Problem,
    ProblemShape,
    Program,
    RowSpan,
    View,
)
from kernelbraid.ops.rope.spec import TABLE_POSITIONS
from kernelbraid.ops.rows import MOST_REQUESTS, Axes, Field, RowForm

FARTHEST = 64
"""Largest difference of a token's position for the rotation from its position in the cache."""
ENTRY_POINT = "qk_norm_rope_cache"
TOKENS = ("q", "k", "v", "positions")
CACHES = ("k_cache", "v_cache")


def _queries(axes: Axes) -> tuple[int, ...]:
    return axes["query_heads"], axes["head_dim"]


def _keys(axes: Axes) -> tuple[int, ...]:
    return axes["kv_heads"], axes["head_dim"]


def _head(axes: Axes) -> tuple[int, ...]:
    return (axes["head_dim"],)


def _table(axes: Axes) -> tuple[int, ...]:
    return TABLE_POSITIONS, axes["head_dim"] // 2


FORM = RowForm(
    entry_point=ENTRY_POINT,
    inputs=(
        Field("q", _queries),
        Field("k", _keys),
        Field("v", _keys),
        Field("positions", lambda axes: (), dtype="int32", drawn="positions"),
    ),
    parameters=(
        Field("cos", _table, dtype="float32"),
        Field("sin", _table, dtype="float32"),
        Field("q_weight", _head, scale=lambda axes: 0.5, offset=1.0),
        Field("k_weight", _head, scale=lambda axes: 0.5, offset=1.0),
    ),
    scalars={"eps": 1e-6},
    outputs=(Field("q_out", _queries),),
)


def draw(shape: ProblemShape, rng: np.random.Generator, *, dtypes: Sequence[str]) -> Problem:
    """Draw a problem: per request q, k, v and positions, a row each of its last tokens; tables and weights.

    Positions for the rotation count from a number of the request's own. There are no weights where the
    constant axis `norm` is 0.

    Raises:
        ValueError: the dtype is none of `dtypes`, or the problem is larger than the contract or the tables.
    """
    longest = max(shape.lengths, default=0)
    if longest > TABLE_POSITIONS:
        raise ValueError(f"drawn tables have {TABLE_POSITIONS} positions, and a request has {longest}")
    problem = FORM.draw(shape, rng, dtypes=dtypes)
    for request, length in zip(problem.requests, shape.lengths, strict=True):
        offset = int(rng.integers(0, min(FARTHEST, TABLE_POSITIONS - length) + 1))
        positions: Integers = request["positions"]  # type: ignore[assignment]
        positions += np.int32(offset)
    if dict(shape.constant_axes)["norm"]:
        return problem
    shared = {name: problem.shared[name] for name in ("cos", "sin")}
    return Problem(shape, problem.requests, problem.scalars, shared)


def load_axes(shape: ProblemShape, layout: Layout) -> dict[str, int]:
    """Return the axes that an implementation's `schedule` sees in the largest of the layout's calls."""
    return {
        **dict(shape.constant_axes),
        "batch": len(layout.requests) + _extra_requests(layout),
        "tokens": max((sum(new) for new in _steps(shape, layout)), default=0) + layout.padding,
        "page_size": layout.page_size,
    }


def lower(problem: Problem, layout: Layout) -> Program:
    """Turn a problem into calls, one a piece; every participant takes part in every call.

    Everything that no request owns, in the caches, the page table and the padding, is poisoned from
    `poison_seed`. The caches are outputs: what the calls wrote into them is compared.

    Raises:
        ValueError: the layout does not fit the problem.
    """
    _check(problem.shape, layout)
    rng = np.random.default_rng(layout.poison_seed)
    shape, size, padding = problem.shape, layout.page_size, layout.padding
    axes, dtype = dict(shape.constant_axes), shape.dtype
    table, pages = _pages(shape, layout, rng)
    extra = _extra_requests(layout)
    batch = len(layout.requests) + extra
    held = [shape.lengths[b] - shape.rows[b] for b in layout.requests]
    done = [0] * len(layout.requests)
    blocks: dict[str, list[Array]] = {name: [] for name in TOKENS}
    offsets: list[Integers] = []
    lengths: list[Integers] = []
    calls: list[Call] = []
    spans: list[RowSpan] = []
    at = 0
    for step, new in enumerate(_steps(shape, layout)):
        start = at
        for i, (b, count) in enumerate(zip(layout.requests, new, strict=True)):
            for name in TOKENS:
                blocks[name].append(problem.requests[b][name][done[i] : done[i] + count])
            if count or (step == 0 and not shape.rows[b]):
                spans.append(RowSpan("q", "q_out", 0, at, at + count, b, done[i]))
                spans += _slots(table[i], size, b, held[i], done[i], count)
            held[i] += count
            done[i] += count
            at += count
        for each in FORM.inputs:
            rows = (padding, *each.shape(axes))
            any_integers = rng.integers(-(2**31), 2**31, rows).astype(np.int32)
            blocks[each.name].append(any_integers if each.dtype == "int32" else poison(rng, rows, dtype))
        at += padding
        offsets.append(np.pad(np.cumsum((0, *new), dtype=np.int32), (0, extra), mode="edge"))
        lengths.append(np.array((*held, *([0] * extra)), np.int32))
        arguments: dict[str, Argument] = {
            **{name: View(name, start, at) for name in TOKENS},
            **_parameters(problem.shared),
            **{name: View(name) for name in CACHES},
            "page_table": View("page_table"),
            "cu_seqlens_q": View("cu_seqlens_q", step * (batch + 1), (step + 1) * (batch + 1)),
            "seqlens_k": View("seqlens_k", step * batch, (step + 1) * batch),
            **problem.scalars,
            "q_out": View("q_out", start, at),
        }
        calls.append(Call(ENTRY_POINT, arguments))
    inputs = {name: np.concatenate(found) for name, found in blocks.items()}
    cache = ((pages, size, *_keys(axes)), dtype)
    return Program(
        inputs={
            **inputs,
            **problem.shared,
            "page_table": table,
            "cu_seqlens_q": np.concatenate(offsets),
            "seqlens_k": np.concatenate(lengths),
        },
        state={},
        outputs={"q_out": ((at, *_queries(axes)), dtype), **dict.fromkeys(CACHES, cache)},
        calls=tuple(calls),
        spans=tuple(spans),
        constant_axes=axes,
    )


def _check(shape: ProblemShape, layout: Layout) -> None:
    if layout.shared_prefix:
        raise ValueError("new tokens have pages of their own: no prefix is shared")
    if layout.partition:
        rows = [shape.rows[b] for b in layout.requests]
        if [sum(pieces) for pieces in layout.partition] != rows:
            raise ValueError(f"the partition's pieces must add up to each request's rows {rows}")


def _extra_requests(layout: Layout) -> int:
    """Empty requests that padding appends to the batch."""
    return max(0, min(layout.padding, MOST_REQUESTS - len(layout.requests)))


def _steps(shape: ProblemShape, layout: Layout) -> list[tuple[int, ...]]:
    """New tokens of each participant in each call."""
    pieces = layout.partition or tuple((shape.rows[b],) for b in layout.requests)
    count = max((len(p) for p in pieces), default=1)
    return [tuple(p[t] if t < len(p) else 0 for p in pieces) for t in range(count)]


def _parameters(shared: Mapping[str, Array]) -> dict[str, Argument]:
    """Tables, and weights or None."""
    return {each.name: View(each.name) if each.name in shared else None for each in FORM.parameters}


def _pages(shape: ProblemShape, layout: Layout, rng: np.random.Generator) -> tuple[Integers, int]:
    """The page table, and how many pages there are."""
    needed = [-(-shape.lengths[b] // layout.page_size) for b in layout.requests]
    count = sum(needed) + layout.padding
    order = np.arange(count, dtype=np.int32)
    if layout.page_seed:
        np.random.default_rng(layout.page_seed).shuffle(order)
    rows, columns = len(needed) + _extra_requests(layout), max(needed, default=0) + layout.padding
    table = garbage(rng, (rows, columns), count)
    starts = np.cumsum((0, *needed))
    for b, n in enumerate(needed):
        table[b, :n] = order[starts[b] : starts[b + 1]]
    return table, count


def _slots(pages: Integers, size: int, request: int, position: int, row: int, count: int) -> list[RowSpan]:
    """Where `count` rows from a position on come out of the caches: a run of slots a page."""
    spans: list[RowSpan] = []
    for name, cache in zip(("k", "v"), CACHES, strict=True):
        first = 0
        while True:
            run = min(count - first, size - (position + first) % size)
            slot = 0
            if run:
                slot = int(pages[(position + first) // size]) * size + (position + first) % size
            spans.append(RowSpan(name, cache, 0, slot, slot + run, request, row + first, leading=2))
            first += run
            if first >= count:
                break
    return spans


# ---- Timing ----


@dataclass(frozen=True, slots=True)
class _Sizes:
    """A workload's numbers."""

    batch: int
    tokens: int
    held: int
    """Positions of each request, new ones included."""
    page_size: int

    @classmethod
    def of(cls, workload: Workload) -> "_Sizes":
        batch, tokens, length, page = (
            workload.shape[name] for name in ("batch", "tokens", "length", "page_size")
        )
        assert isinstance(batch, int) and isinstance(tokens, int)
        assert isinstance(length, int) and isinstance(page, int)
        if tokens % batch or tokens // batch > length:
            raise ValueError(
                f"{workload.name}: every request has the same number of new tokens, at most length"
            )
        return cls(batch, tokens, length, page)


def timed(
    workload: Workload,
    rng: np.random.Generator,
    variants: int,
    pool_bytes: int,
    *,
    contiguous: bool,
    dtype: str,
) -> Program:
    """Return a program of `variants` distinct calls on pages of one pool; see `Operator.timed`.

    Peers get slots, page * page_size + place, instead of the page table, and the number of slots; they keep
    caches of their own, as entry points of a benchmark's peers return what they wrote.
    """
    sizes = _Sizes.of(workload)
    axes = {name: value for name, value in workload.shape.items() if isinstance(value, int)}
    each_new, needed = sizes.tokens // sizes.batch, -(-sizes.held // sizes.page_size)
    page_bytes = 2 * sizes.page_size * int(np.prod(_keys(axes))) * np.dtype(dtype).itemsize
    pages = max(sizes.batch * needed, min(variants * sizes.batch * needed, -(-pool_bytes // page_bytes)))
    order = rng.permutation(pages).astype(np.int32)
    taken = np.take(order, np.arange(variants * sizes.batch * needed), mode="wrap")
    tables = taken.reshape(variants * sizes.batch, needed)
    new = np.arange(sizes.held - each_new, sizes.held, dtype=np.int32)
    row_bytes = np.dtype(dtype).itemsize * int(np.prod(_queries(axes)))
    places = max(1, min(variants, -(-pool_bytes // (sizes.tokens * row_bytes))))
    inputs: dict[str, Array] = {
        each.name: normal(rng, (places * sizes.tokens, *each.shape(axes)), np.dtype(dtype))
        for each in FORM.inputs
        if each.dtype != "int32"
    }
    for each in FORM.parameters:
        if axes["norm"] or not each.name.endswith("weight"):
            inputs[each.name] = normal(rng, each.shape(axes), np.dtype(each.kept(dtype)))
    inputs["positions"] = np.tile(new, sizes.batch)
    if contiguous:
        where = tables[:, new // sizes.page_size].astype(np.int64) * sizes.page_size + new % sizes.page_size
        inputs["slots"] = where.reshape(-1)
    else:
        inputs["page_table"] = tables
        inputs["cu_seqlens_q"] = np.arange(0, sizes.tokens + 1, each_new, dtype=np.int32)
        inputs["seqlens_k"] = np.full(sizes.batch, sizes.held, np.int32)
    calls = []
    for i in range(variants):
        start, stop = i * sizes.tokens, (i + 1) * sizes.tokens
        first = i % places * sizes.tokens
        arguments: dict[str, Argument] = {
            **{name: View(name, first, first + sizes.tokens) for name in ("q", "k", "v")},
            "positions": View("positions"),
            **_parameters(inputs),
            **FORM.scalars,
        }
        if contiguous:
            arguments |= {"slots": View("slots", start, stop), "room": pages * sizes.page_size}
        else:
            arguments |= {name: View(name) for name in (*CACHES, "cu_seqlens_q", "seqlens_k")}
            arguments["page_table"] = View("page_table", i * sizes.batch, (i + 1) * sizes.batch)
            arguments["q_out"] = View("q_out", start, stop)
        calls.append(Call("peer" if contiguous else ENTRY_POINT, arguments))
    constant = {name: axes[name] for name in ("query_heads", "kv_heads", "head_dim", "norm")}
    if contiguous:
        return Program(inputs, {}, {}, tuple(calls), constant_axes=constant)
    cache = np.zeros((pages, sizes.page_size, *_keys(axes)), np.dtype(dtype))
    outputs = {"q_out": ((variants * sizes.tokens, *_queries(axes)), dtype)}
    return Program(inputs, dict.fromkeys(CACHES, cache), outputs, tuple(calls), constant_axes=constant)
