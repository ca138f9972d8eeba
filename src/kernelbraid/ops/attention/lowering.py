"""The calls that attention's problems and workloads become in each regime. numpy only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from kernelbraid.contract import Regime, Workload
from kernelbraid.ops.attention.inputs import LARGEST_BATCH, LARGEST_LENGTH, head_counts
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


@dataclass(frozen=True, slots=True)
class _Step:
    """New tokens of every request in one call."""

    new: tuple[int, ...]
    """Of each participant, in call order."""
    held: tuple[int, ...]
    """Keys each participant has after it."""


@dataclass(frozen=True, slots=True)
class _Pages:
    table: Integers
    count: int
    shared: tuple[int, ...]
    """Leading positions of each participant that another one's pages hold."""


WHOLE: tuple[Regime, ...] = ("update", "backward")
"""Regimes that compute every row of packed sequences."""


def load_axes(shape: ProblemShape, layout: Layout) -> dict[str, int]:
    """Return the axes that an implementation's `schedule` sees in the largest of the layout's calls."""
    steps = _steps(shape, layout)
    lengths = [shape.lengths[b] for b in layout.requests]
    widest = max((max(step.new, default=0) for step in steps), default=0)
    return {
        **dict(shape.constant_axes),
        "batch": len(layout.requests) + _extra_requests(layout),
        "query_length": min(widest + layout.padding, LARGEST_LENGTH),
        "key_length": min(max(lengths, default=0) + layout.padding, LARGEST_LENGTH),
        "page_size": layout.page_size,
    }


def lower(problem: Problem, layout: Layout) -> Program:
    """Turn a problem into calls: `attention` in `update`, elsewhere cache writes and `paged_attention`.

    In `backward`, `attention_backward` follows the packed `attention` and reads what that stored. Every
    participant takes part in every call; one that has no piece left has no new token in it. Everything that
    no request owns, in the cache, the page table and the padding, is poisoned from `poison_seed`.

    Raises:
        ValueError: the layout does not fit the problem.
    """
    _check_layout(problem.shape, layout)
    rng = np.random.default_rng(layout.poison_seed)
    if layout.regime in WHOLE:
        return _lower_packed(problem, layout, rng)
    return _lower_paged(problem, layout, rng)


def _check_layout(shape: ProblemShape, layout: Layout) -> None:
    if layout.shared_prefix > shape.shared_prefix:
        raise ValueError(f"the problem shares {shape.shared_prefix} positions, not {layout.shared_prefix}")
    if layout.regime in WHOLE:
        if any(shape.rows[b] != shape.lengths[b] for b in layout.requests):
            raise ValueError(f"{layout.regime} computes every row of a sequence: rows must equal lengths")
        if layout.partition:
            raise ValueError(f"{layout.regime} takes no partition")
        if layout.regime == "backward" and shape.rows != shape.lengths:
            raise ValueError("backward needs dout, which is drawn where every request wants all its rows")
    elif layout.partition:
        rows = [shape.rows[b] for b in layout.requests]
        if [sum(pieces) for pieces in layout.partition] != rows:
            raise ValueError(f"the partition's pieces must add up to each request's rows {rows}")


def _extra_requests(layout: Layout) -> int:
    """Empty requests that padding appends to the batch."""
    return max(0, min(layout.padding, LARGEST_BATCH - len(layout.requests)))


def _steps(shape: ProblemShape, layout: Layout) -> list[_Step]:
    rows = [shape.rows[b] for b in layout.requests]
    held = [shape.lengths[b] - shape.rows[b] for b in layout.requests]
    pieces = layout.partition or tuple((r,) for r in rows)
    steps = []
    for t in range(max((len(p) for p in pieces), default=1)):
        new = tuple(p[t] if t < len(p) else 0 for p in pieces)
        held = [h + n for h, n in zip(held, new, strict=True)]
        steps.append(_Step(new, tuple(held)))
    return steps


def _offsets(counts: Sequence[int], extra: int = 0) -> Integers:
    """Exclusive prefix sums, followed by `extra` empty entries."""
    return np.pad(np.cumsum((0, *counts), dtype=np.int32), (0, extra), mode="edge")


def _lower_packed(problem: Problem, layout: Layout, rng: np.random.Generator) -> Program:
    query_heads, kv_heads, head_dim = head_counts(problem.shape)
    lengths = [problem.shape.lengths[b] for b in layout.requests]
    cu_seqlens = _offsets(lengths, _extra_requests(layout))
    total = int(cu_seqlens[-1]) + layout.padding
    padding, dtype = layout.padding, problem.shape.dtype
    heads = {"q": query_heads, "k": kv_heads, "v": kv_heads, "dout": query_heads}
    inputs: dict[str, Array] = {"cu_seqlens": cu_seqlens}
    for name in heads if layout.regime == "backward" else "qkv":
        blocks = [problem.requests[b][name] for b in layout.requests]
        if layout.regime == "backward" and dtype != "float32":
            blocks = [_finite(block) for block in blocks]
        inputs[name] = np.concatenate([*blocks, poison(rng, (padding, heads[name], head_dim), dtype)])
    common: dict[str, Argument] = {
        **{name: View(name) for name in ("q", "k", "v", "cu_seqlens", "out", "lse")},
        "max_seqlen": min(max(lengths, default=0) + padding, LARGEST_LENGTH),
        "softmax_scale": problem.scalars["softmax_scale"],
    }
    calls = [Call("attention", common)]
    outputs = {"out": ((total, query_heads, head_dim), dtype), "lse": ((query_heads, total), "float32")}
    axes = {"out": 0, "lse": 1}
    if layout.regime == "backward":
        gradients = {"d" + name: ((total, heads[name], head_dim), dtype) for name in "qkv"}
        calls.append(
            Call("attention_backward", {**common, **{name: View(name) for name in ("dout", *gradients)}})
        )
        outputs |= gradients
        axes = dict.fromkeys(gradients, 0)
    spans = [
        RowSpan(name, name, axis, int(start), int(stop), b, 0)
        for b, start, stop in zip(layout.requests, cu_seqlens, cu_seqlens[1:], strict=False)
        for name, axis in axes.items()
    ]
    return Program(
        inputs=inputs,
        state={},
        outputs=outputs,
        calls=tuple(calls),
        spans=tuple(spans),
        constant_axes=dict(problem.shape.constant_axes),
    )


def _finite(block: Array) -> Array:
    """A block with zeros for NaNs and infinities, which gradients in 16 bits exclude."""
    finite = np.isfinite(block)
    return block if finite.all() else np.where(finite, block, block.dtype.type(0))


def _pages(shape: ProblemShape, layout: Layout, rng: np.random.Generator) -> _Pages:
    size = layout.page_size
    lengths = [shape.lengths[b] for b in layout.requests]
    contexts = [shape.lengths[b] - shape.rows[b] for b in layout.requests]
    needed = [-(-n // size) for n in lengths]
    shared = [min(layout.shared_prefix, context) // size for context in contexts]
    owner = int(np.argmax(shared)) if shared else 0
    for b in range(len(shared)):
        if b == owner:
            shared[b] = 0
    owned = [n - s for n, s in zip(needed, shared, strict=True)]
    count = sum(owned) + layout.padding
    order = np.arange(count, dtype=np.int32)
    if layout.page_seed:
        np.random.default_rng(layout.page_seed).shuffle(order)
    columns = max(needed, default=0) + layout.padding
    table = garbage(rng, (len(lengths) + _extra_requests(layout), columns), count)
    starts = _offsets(owned)
    for b, (n, s) in enumerate(zip(needed, shared, strict=True)):
        table[b, s:n] = order[starts[b] : starts[b + 1]]
    for b, s in enumerate(shared):
        table[b, :s] = table[owner, :s]
    return _Pages(table, count, tuple(s * size for s in shared))


class _Stream:
    """An input buffer in the making: the rows of each call, each followed by poisoned padding rows."""

    def __init__(self, name: str, padding: Array) -> None:
        self.name = name
        self.blocks: list[Array] = []
        self.rows = 0
        self.padding = padding

    def append(self, blocks: Sequence[Array]) -> View:
        start = self.rows
        for block in (*blocks, self.padding):
            self.blocks.append(block)
            self.rows += len(block)
        return View(self.name, start, self.rows)

    def array(self) -> Array:
        return np.concatenate(self.blocks) if self.blocks else self.padding


class _PagedProgram:
    """The calls of a paged layout, with their input streams and metadata, in the making."""

    def __init__(self, problem: Problem, layout: Layout, rng: np.random.Generator) -> None:
        query_heads, kv_heads, head_dim = head_counts(problem.shape)
        heads = {"q": query_heads, "k": kv_heads, "v": kv_heads}
        self.problem = problem
        self.layout = layout
        self.contexts = tuple(problem.shape.lengths[b] - problem.shape.rows[b] for b in layout.requests)
        self.pages = _pages(problem.shape, layout, rng)
        self.dtype = problem.shape.dtype
        self.streams = {
            name: _Stream(name, poison(rng, (layout.padding, n, head_dim), self.dtype))
            for name, n in heads.items()
        }
        self.caches = {
            name: poison(rng, (self.pages.count, layout.page_size, kv_heads, head_dim), self.dtype)
            for name in ("k_cache", "v_cache")
        }
        self.cu_seqlens: list[Integers] = []
        self.seqlens: list[Integers] = []
        self.calls: list[Call] = []
        self.spans: list[RowSpan] = []
        self.outputs: dict[str, tuple[tuple[int, ...], str]] = {}
        self.rows = 0

    def _tokens(self, name: str, step: _Step) -> View:
        """The step's new rows of one input; queries count from a request's first row."""
        blocks = []
        for b, new, held, context in zip(
            self.layout.requests, step.new, step.held, self.contexts, strict=True
        ):
            stop = held - context if name == "q" else held
            blocks.append(self.problem.requests[b][name][stop - new : stop])
        return self.streams[name].append(blocks)

    def write(self, step: _Step) -> dict[str, Argument]:
        """Append the call that writes a step's keys and values; return what describes the cache after it."""
        extra = _extra_requests(self.layout)
        t, batch = len(self.seqlens), len(step.new) + extra
        self.cu_seqlens.append(_offsets(step.new, extra))
        self.seqlens.append(np.array((*step.held, *([0] * extra)), np.int32))
        cache: dict[str, Argument] = {
            "k_cache": View("k_cache"),
            "v_cache": View("v_cache"),
            "page_table": View("page_table"),
            "cu_seqlens_q": View("cu_seqlens_q", t * (batch + 1), (t + 1) * (batch + 1)),
            "seqlens_k": View("seqlens_k", t * batch, (t + 1) * batch),
        }
        new = {"k": self._tokens("k", step), "v": self._tokens("v", step)}
        self.calls.append(Call("write_kv_cache", {**new, **cache}))
        return cache

    def attend(self, t: int, step: _Step, cache: dict[str, Argument], done: list[int]) -> None:
        """Append the t-th `paged_attention` and where its rows come out."""
        padding = self.layout.padding
        total = sum(step.new) + padding
        lse = f"lse{t}"
        self.outputs[lse] = ((dict(self.problem.shape.constant_axes)["query_heads"], total), "float32")
        arguments: dict[str, Argument] = {
            "q": self._tokens("q", step),
            **cache,
            "max_seqlen_q": min(max(step.new, default=0) + padding, LARGEST_LENGTH),
            "max_seqlen_k": min(max(step.held, default=0) + padding, LARGEST_LENGTH),
            "softmax_scale": self.problem.scalars["softmax_scale"],
            "out": View("out", self.rows, self.rows + total),
            "lse": View(lse),
        }
        self.calls.append(Call("paged_attention", arguments))
        first = 0
        for i, (b, n) in enumerate(zip(self.layout.requests, step.new, strict=True)):
            if n or (t == 0 and not self.problem.shape.rows[b]):
                start = self.rows + first
                self.spans.append(RowSpan("out", "out", 0, start, start + n, b, done[i]))
                self.spans.append(RowSpan("lse", lse, 1, first, first + n, b, done[i]))
            done[i] += n
            first += n
        self.rows += total

    def program(self) -> Program:
        query_heads, _, head_dim = head_counts(self.problem.shape)
        return Program(
            inputs={
                **{name: stream.array() for name, stream in self.streams.items()},
                "page_table": self.pages.table,
                "cu_seqlens_q": np.concatenate(self.cu_seqlens),
                "seqlens_k": np.concatenate(self.seqlens),
            },
            state=self.caches,
            outputs={**self.outputs, "out": ((self.rows, query_heads, head_dim), self.dtype)},
            calls=tuple(self.calls),
            spans=tuple(self.spans),
            constant_axes=dict(self.problem.shape.constant_axes),
        )


def _lower_paged(problem: Problem, layout: Layout, rng: np.random.Generator) -> Program:
    building = _PagedProgram(problem, layout, rng)
    own = tuple(c - s for c, s in zip(building.contexts, building.pages.shared, strict=True))
    if any(own):
        building.write(_Step(own, building.contexts))
    done = [0] * len(layout.requests)
    for t, step in enumerate(_steps(problem.shape, layout)):
        building.attend(t, step, building.write(step), done)
    return building.program()


# ---- Timing ----


def workload_lengths(workload: Workload) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a workload's keys and rows, one entry a request.

    Axis `length` counts a request's keys; `query_length` its rows, by default all of them, and one in decode.
    """
    shape = workload.shape
    batch, length = shape["batch"], shape["length"]
    assert isinstance(batch, int)
    lengths = length if isinstance(length, tuple) else (length,) * batch
    usual: tuple[int, ...] | int = 1 if workload.phase == "decode" else lengths
    query = shape.get("query_length", usual)
    rows = query if isinstance(query, tuple) else (query,) * batch
    if not len(lengths) == len(rows) == batch or any(r > n for r, n in zip(rows, lengths, strict=True)):
        raise ValueError(f"{workload.name}: batch, length and query_length do not fit together")
    return lengths, rows


@dataclass(frozen=True, slots=True)
class _Timing:
    """What the timed programs of one workload share."""

    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: np.dtype[Any]

    @property
    def total(self) -> int:
        return sum(self.rows)

    @property
    def scale(self) -> float:
        return 1.0 / sqrt(self.head_dim)


def timed(
    workload: Workload,
    rng: np.random.Generator,
    variants: int,
    pool_bytes: int,
    *,
    contiguous: bool,
    backend: str = "cpu",
    dtype: str = "float32",
) -> Program:
    """Return a program of `variants` distinct calls on caches filled beforehand; see `Operator.timed`.

    Paged calls read their own pages of one pool, in an order that walks through the pool before it repeats.
    Calls of the regime `backward` read an out and a lse of plausible size that no forward made. `contiguous`
    calls `peer(q, k, v, cu_seqlens_q, seqlens_k, softmax_scale)` with q packed [T, Hq, D] and k and v
    [B, Hkv, longest, D], of which a request uses its first positions; a peer returns its output. On CUDA
    those calls also have `max_seqlen_q` and `max_seqlen_k`, and where every row is computed they are
    `peer(q, k, v, cu_seqlens, max_seqlen, softmax_scale)` with k and v packed, with out, lse and dout too in
    the regime `backward`.
    """
    shape = workload.shape
    lengths, rows = workload_lengths(workload)
    sizes = {name: shape[name] for name in ("query_heads", "kv_heads", "head_dim", "page_size")}
    assert all(isinstance(value, int) for value in sizes.values())
    timing = _Timing(lengths, rows, **sizes, dtype=np.dtype(dtype))  # type: ignore[arg-type]
    if workload.phase in WHOLE and not contiguous:
        inputs, calls = _timed_packed(timing, rng, variants, workload.phase)
    elif contiguous and backend == "cuda" and lengths == rows and workload.phase != "decode":
        inputs, calls = _timed_packed(timing, rng, variants, workload.phase)
        calls = tuple(Call("peer", _read(call.arguments, inputs)) for call in calls)
    elif contiguous:
        inputs, calls = _timed_contiguous(timing, rng, variants, pool_bytes, backend)
    else:
        inputs, calls = _timed_paged(timing, rng, variants, pool_bytes)
    heads = {
        "out": timing.query_heads,
        "dq": timing.query_heads,
        "dk": timing.kv_heads,
        "dv": timing.kv_heads,
    }
    written = ("dq", "dk", "dv") if workload.phase == "backward" else ("out",)
    outputs: dict[str, tuple[tuple[int, ...], str]] = {}
    if not contiguous:
        outputs = {n: ((variants * timing.total, heads[n], timing.head_dim), dtype) for n in written}
    if not contiguous and workload.phase == "update":
        outputs["lse"] = ((variants * timing.query_heads, timing.total), "float32")
    axes = {name: sizes[name] for name in ("query_heads", "kv_heads", "head_dim")}
    return Program(inputs, {}, outputs, calls, constant_axes=axes)  # type: ignore[arg-type]


_Parts = tuple[dict[str, Array], tuple[Call, ...]]


def _timed_packed(timing: _Timing, rng: np.random.Generator, variants: int, phase: Regime) -> _Parts:
    total, heads, backward = timing.total, timing.query_heads, phase == "backward"
    inputs: dict[str, Array] = {"cu_seqlens": _offsets(timing.lengths)}
    for name in ("q", "k", "v", "out", "dout") if backward else ("q", "k", "v"):
        n = timing.kv_heads if name in ("k", "v") else heads
        inputs[name] = normal(rng, (variants * total, n, timing.head_dim), timing.dtype)
    if backward:
        # normal scores: the log-sum-exp of n of them is about log(n) + 1/2
        seen = np.concatenate([np.arange(1, n + 1, dtype=np.float32) for n in timing.lengths])
        inputs["lse"] = np.tile(np.log(seen) + np.float32(0.5), (variants * heads, 1))
    tokens = ("q", "k", "v", "out", *(("dout", "dq", "dk", "dv") if backward else ()))
    calls = []
    for i in range(variants):
        rows = {name: View(name, i * total, (i + 1) * total) for name in tokens}
        arguments: dict[str, Argument] = {
            **rows,
            "cu_seqlens": View("cu_seqlens"),
            "max_seqlen": max(timing.lengths),
            "softmax_scale": timing.scale,
            "lse": View("lse", i * heads, (i + 1) * heads),
        }
        calls.append(Call("attention_backward" if backward else "attention", arguments))
    return inputs, tuple(calls)


def _read(arguments: Mapping[str, Argument], inputs: Mapping[str, Array]) -> dict[str, Argument]:
    """The arguments of a call without those that it writes."""
    return {n: a for n, a in arguments.items() if not isinstance(a, View) or a.buffer in inputs}


def _timed_paged(timing: _Timing, rng: np.random.Generator, variants: int, pool_bytes: int) -> _Parts:
    page = (timing.page_size, timing.kv_heads, timing.head_dim)
    needed = [-(-n // timing.page_size) for n in timing.lengths]
    count = max(sum(needed), -(-pool_bytes // (2 * timing.dtype.itemsize * int(np.prod(page)))))
    order = rng.permutation(count).astype(np.int32)
    batch, columns = len(needed), max(needed) + 1
    tables = garbage(rng, (variants * batch, columns), count)
    ends = _offsets(needed)
    for i in range(variants):
        mine = np.take(order, np.arange(i * sum(needed), (i + 1) * sum(needed)), mode="wrap")
        rng.shuffle(mine)
        for b, n in enumerate(needed):
            tables[i * batch + b, :n] = mine[ends[b] : ends[b + 1]]
    total = timing.total
    inputs: dict[str, Array] = {
        "q": normal(rng, (variants * total, timing.query_heads, timing.head_dim), timing.dtype),
        "page_table": tables,
        "cu_seqlens_q": _offsets(timing.rows),
        "seqlens_k": np.array(timing.lengths, np.int32),
    }
    calls = []
    for i in range(variants):
        arguments: dict[str, Argument] = {
            "q": View("q", i * total, (i + 1) * total),
            **{name: View(name) for name in ("k_cache", "v_cache", "cu_seqlens_q", "seqlens_k")},
            "page_table": View("page_table", i * batch, (i + 1) * batch),
            "max_seqlen_q": max(timing.rows),
            "max_seqlen_k": max(timing.lengths),
            "softmax_scale": timing.scale,
            "out": View("out", i * total, (i + 1) * total),
            "lse": None,
        }
        calls.append(Call("paged_attention", arguments))
    inputs |= {name: normal(rng, (count, *page), timing.dtype) for name in ("k_cache", "v_cache")}
    return inputs, tuple(calls)


def _timed_contiguous(
    timing: _Timing, rng: np.random.Generator, variants: int, pool_bytes: int, backend: str
) -> _Parts:
    batch, longest, total = len(timing.lengths), max(timing.lengths), timing.total
    row_bytes = 2 * timing.dtype.itemsize * timing.kv_heads * longest * timing.head_dim
    slots = min(variants * batch, max(batch, -(-pool_bytes // row_bytes)))
    inputs: dict[str, Array] = {
        "q": normal(rng, (variants * total, timing.query_heads, timing.head_dim), timing.dtype),
        **{
            name: normal(rng, (slots, timing.kv_heads, longest, timing.head_dim), timing.dtype)
            for name in ("k", "v")
        },
        "cu_seqlens_q": _offsets(timing.rows),
        "seqlens_k": np.array(timing.lengths, np.int32),
    }
    longest_rows = {"max_seqlen_q": max(timing.rows), "max_seqlen_k": longest} if backend == "cuda" else {}
    calls = []
    for i in range(variants):
        first = i * batch % (slots - batch + 1)
        arguments: dict[str, Argument] = {
            "q": View("q", i * total, (i + 1) * total),
            **{name: View(name, first, first + batch) for name in ("k", "v")},
            "cu_seqlens_q": View("cu_seqlens_q"),
            "seqlens_k": View("seqlens_k"),
            "softmax_scale": timing.scale,
            **longest_rows,
        }
        calls.append(Call("peer", arguments))
    return inputs, tuple(calls)
