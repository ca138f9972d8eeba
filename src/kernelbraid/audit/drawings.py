"""Which problems an audit draws: shapes on both sides of every edge, and random ones between.

An edge is a size at which an implementation may change what it does: the length of a block of positions (a
numeric knob), a page, or a size at which its schedule changes. Nothing here knows an operator: axes
and limits come from its contract, edges from its build.
"""

import hashlib
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from kernelbraid.contract import Regime
from kernelbraid.ir.evidence import Level
from kernelbraid.ops.problem import InputKind, Layout, Operator, ProblemShape

WHOLE_REGIMES: tuple[Regime, ...] = ("update", "backward")
"""Regimes that compute every row of a request at once."""

PAGE = 16
"""Page size of a layout where nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the cases of an audit are derived from, and all that they depend on."""

    level: Level
    constant_axes: tuple[dict[str, int], ...]
    numerics: Mapping[str, int]
    """Value of every numeric knob; each may be the length of a block of positions."""
    edges: Mapping[str, tuple[int, ...]]
    """Load axis -> sizes at which the schedule changes: `batch` counts requests in a call, `query_length` the
    most rows of one request in a call, `tokens` all rows of a call, `page_size` slots of a page; every other
    axis counts positions."""
    dtype: str
    seed: int
    root_agrees: bool
    """Whether the root has the same bits id, so that its bits must be equal."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A problem to be drawn: its shape and the seed of its numbers."""

    shape: ProblemShape
    seed: int


@dataclass(frozen=True, slots=True)
class Scale:
    """How much a level does."""

    kinds: int
    """Input kinds of a relation that needs no particular one, `normal` first, the others in turn."""
    near: int
    """Blocks up to this many positions belong to every problem; those beyond have problems of their own."""
    short: int
    """Edges up to this many positions belong to every problem of which all rows are computed."""
    whole: int
    """Positions of the longest request of which every row is computed."""
    crossing: int
    """About how many rows of a request lie across the largest edge."""
    batch: int
    """Largest number of requests in a call."""
    alone: int
    """Requests of a problem that are computed again alone."""
    layouts: int
    """Random layouts (partitions, orders, page sizes) of each problem."""
    reruns: int
    memory: int
    """Bytes that the inputs of a problem of long requests may take: longer ones are left to a full check."""
    rows_memory: int
    """Bytes that the inputs of a problem of many requests may take."""


SCALES: Mapping[Level, Scale] = {
    Level.SMOKE: Scale(
        kinds=1,
        near=300,
        short=65,
        whole=130,
        crossing=8,
        batch=4,
        alone=1,
        layouts=1,
        reruns=1,
        memory=0,
        rows_memory=64 << 20,
    ),
    Level.SCREEN: Scale(
        kinds=2,
        near=8200,
        short=137,
        whole=1100,
        crossing=16,
        batch=1024,
        alone=4,
        layouts=2,
        reruns=3,
        memory=24 << 20,
        rows_memory=64 << 20,
    ),
    Level.FULL: Scale(
        kinds=3,
        near=8200,
        short=300,
        whole=4200,
        crossing=40,
        batch=1024,
        alone=6,
        layouts=3,
        reruns=4,
        memory=256 << 20,
        rows_memory=256 << 20,
    ),
}


def derive(*parts: object) -> int:
    """Return a seed that depends on every part and on nothing else."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "little")


@dataclass(frozen=True)
class Scope:
    """The problems of one plan under one set of constant axes; equal arguments give equal problems."""

    operator: Operator
    plan: Plan
    constant: tuple[tuple[str, int], ...]
    scale: Scale = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", SCALES[self.plan.level])

    def rng(self, *parts: object) -> random.Random:
        return random.Random(derive(self.plan.seed, self.constant, *parts))

    def limit(self, axis: str, otherwise: int) -> int:
        """The contract's upper limit of a load axis, or `otherwise` where it has none of that name."""
        return next((a.high for a in self.operator.contract.axes if a.name == axis), otherwise)

    @cached_property
    def positions(self) -> int:
        return self.limit("key_length", 4096)

    @cached_property
    def pages(self) -> tuple[int, int]:
        """Smallest and largest page size."""
        axis = next((a for a in self.operator.contract.axes if a.name == "page_size"), None)
        return (axis.low, axis.high) if axis else (PAGE, PAGE)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Lengths along positions at which something may begin by contract: blocks, their doubles, pages."""
        values = set(self.plan.numerics.values())
        lengths = values | {2 * value for value in values} | {PAGE}
        return tuple(sorted(e for e in lengths if 1 <= e <= self.positions))

    @cached_property
    def scheduled(self) -> tuple[int, ...]:
        """Lengths along positions at which the schedule changes."""
        known = ("batch", "query_length", "tokens", "page_size")
        lengths = {e for axis, sizes in self.plan.edges.items() if axis not in known for e in sizes}
        return tuple(sorted(e for e in lengths if 1 <= e <= self.positions))

    @cached_property
    def near(self) -> tuple[int, ...]:
        """Edges of every problem: the contract's, and those of the schedule within the longest block."""
        blocks = {e for e in self.blocks if e <= self.scale.near}
        return tuple(sorted(blocks | {e for e in self.scheduled if e <= self.longest_block}))

    @cached_property
    def longest_block(self) -> int:
        """The longest block whose edge belongs to every problem."""
        return max((e for e in self.plan.numerics.values() if e <= self.scale.near), default=PAGE)

    @cached_property
    def query_edges(self) -> tuple[int, ...]:
        edges = (*self.plan.edges.get("query_length", ()), *self.plan.edges.get("tokens", ()))
        return tuple(sorted({e for e in edges if 1 <= e <= self.scale.whole}))

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes worth a call: the smallest and largest, both sides of every edge, and random ones."""
        room = max(4, self.scale.rows_memory // self.bytes_per_row)
        high = min(self.scale.batch, room, self.limit("batch", self.scale.batch))
        edges = (*self.plan.edges.get("batch", ()), *self.plan.edges.get("tokens", ()))
        around = {e + d for e in edges for d in (-1, 0, 1)}
        rng = self.rng("batches")
        drawn = {logarithmic(rng, 1, high) for _ in range(2 * self.scale.layouts)}
        return tuple(sorted(n for n in {1, 2, 3, high - 1, high} | around | drawn if 1 <= n <= high))

    @cached_property
    def bytes_per_position(self) -> int:
        """Bytes that one more position adds to a request's inputs, measured on drawn ones."""
        shape = ProblemShape(self.constant, (1, 2), (1, 1), "normal", self.plan.dtype)
        one, two = self.operator.draw(shape, np.random.default_rng(0)).requests
        return max(1, sum(two[name].nbytes - one[name].nbytes for name in one))

    @cached_property
    def bytes_per_row(self) -> int:
        """Bytes of the inputs of a request of one position and one row, measured on a drawn one."""
        shape = ProblemShape(self.constant, (1,), (1,), "normal", self.plan.dtype)
        (one,) = self.operator.draw(shape, np.random.default_rng(0)).requests
        return max(1, sum(array.nbytes for array in one.values()))

    def kinds(self, every: bool, *salt: object) -> tuple[InputKind, ...]:
        """`normal` first; then all others, or as many as the level asks for, chosen by `salt`."""
        others = [kind for kind in self.operator.kinds if kind != "normal"]
        self.rng("kinds", *salt).shuffle(others)
        count = self.scale.kinds if self.plan.level == Level.SMOKE or not every else len(self.operator.kinds)
        return ("normal", *others[: count - 1])

    def problems(self, regime: Regime, *salt: object, every: bool = False) -> tuple[Drawing, ...]:
        """The level's problems for a regime, one a kind; relations share them and their results."""
        draw = self.whole if regime in WHOLE_REGIMES else self.edges
        return tuple(draw(kind) for kind in self.kinds(every, *salt))

    def edges(self, kind: InputKind) -> Drawing:
        """A problem with a request across every near edge, more rows across the largest, and random ones."""
        rng = self.rng("edges", kind)
        largest, crossing = self.longest_block, self.scale.crossing
        farthest = self.near[-1] if kind == "normal" else largest
        sizes = [(e + 2, 4) for e in self.near if e <= farthest and e != largest]
        beyond = rng.randint(2, crossing)
        sizes.append((largest + beyond, beyond + rng.randint(2, crossing)))
        sizes += [(1, 1), (2, 1), (0, 0), (rng.randint(1, 40), 0)]
        for _ in range(2 if self.plan.level == Level.SMOKE else 4):
            sizes.append((logarithmic(rng, 1, 600), rng.randint(1, 9)))
        rng.shuffle(sizes)
        return self._drawing(sizes, kind, "edges")

    def small(self) -> Drawing:
        """A problem of few positions, for layouts that are many."""
        rng = self.rng("small")
        lengths = [1, rng.randint(2, 60), rng.randint(60, 300)]
        return self._drawing([(n, rng.randint(1, 4)) for n in lengths], "normal", "small")

    def whole(self, kind: InputKind) -> Drawing:
        """A problem of which every row is computed: both sides of short edges, and random lengths."""
        rng = self.rng("whole", kind)
        short = self.scale.short
        lengths = [0, 1, 2, logarithmic(rng, 1, 2 * short), rng.randint(short, 2 * short)]
        for edge in self.near:
            if edge <= short:
                lengths += [rng.choice((edge - 1, edge)), edge + 1]
        rng.shuffle(lengths)
        return self._drawing([(n, n) for n in lengths], kind, "whole")

    def beyond(self) -> tuple[Drawing, ...]:
        """Problems of which every row is computed, of a request that goes beyond a long edge."""
        edges = [e for e in self.blocks if self.scale.short < e < self.scale.whole]
        drawings = []
        for edge in edges if self.plan.level == Level.FULL else edges[-1:]:
            rng = self.rng("beyond", edge)
            lengths = [edge + rng.randint(1, 20), rng.randint(1, self.scale.short)]
            drawings.append(self._drawing([(n, n) for n in lengths], "normal", "beyond", edge))
        return tuple(drawings)

    def many(self, regime: Regime) -> Drawing:
        """As many requests as a call may hold: short ones, and a few across the near edges."""
        rng = self.rng("many", regime)
        every_row = regime in WHOLE_REGIMES
        lengths = [logarithmic(rng, 1, 6 if every_row else 24) for _ in range(self.batches[-1])]
        longest = self.scale.short if every_row else self.scale.whole
        long = [e + rng.randint(1, 9) for e in self.near if e <= longest]
        for i, n in zip(rng.sample(range(len(lengths)), min(len(long), len(lengths))), long, strict=False):
            lengths[i] = n
        most = {"decode": 1, "prefill": 2}.get(regime, 3)
        sizes = [(n, n if every_row else min(n, rng.randint(1, most))) for n in lengths]
        return self._drawing(sizes, "normal", "many", regime)

    def tall(self) -> tuple[Drawing, ...]:
        """For each edge of the rows in a call, a problem with a request of one row more."""
        drawings = []
        for edge in self.query_edges:
            rng = self.rng("tall", edge)
            sizes = [(edge + 1 + rng.randint(0, 40), edge + 1), (1, 1)]
            drawings.append(self._drawing(sizes, "normal", "tall", edge))
        return tuple(drawings)

    def far(self) -> tuple[Drawing, ...]:
        """Problems with a request across each edge beyond the near ones, as far as the level's memory goes.

        A screen has one problem for all of them; otherwise each has its own, and so has the longest context.
        """
        room = self.scale.memory // self.bytes_per_position
        ends = [min(e + 2, self.positions) for e in (*self.blocks, *self.scheduled) if e not in self.near]
        if self.plan.level == Level.FULL:
            sizes = {min(end, room) for end in (*ends, self.positions)}
            return tuple(self._drawing([(n, 6), (1, 1)], "normal", "far", n) for n in sorted(sizes))
        fitting: list[tuple[int, int]] = []
        for end in sorted(ends):
            if end + sum(n for n, _ in fitting) <= room:
                fitting.append((end, min(end, 4)))
        return (self._drawing(fitting, "normal", "far"),) if fitting else ()

    def accuracy(self, kind: InputKind, regime: Regime) -> Drawing:
        """A problem with enough rows for an error norm to be steady."""
        rng = self.rng("accuracy", kind, regime in WHOLE_REGIMES)
        lengths = [rng.randint(30, 90), rng.randint(150, 300)]
        if regime in WHOLE_REGIMES:
            return self._drawing([(n, n) for n in lengths], kind, "accuracy")
        lengths += [e + rng.randint(1, 90) for e in self.blocks[-1:]]
        return self._drawing([(n, 16) for n in lengths], kind, "accuracy rows")

    def prefixed(self, kind: InputKind, regime: Regime, page_size: int) -> Drawing:
        """A problem whose requests begin with the same positions, a whole number of pages."""
        rng = self.rng("prefixed", kind, regime, page_size)
        edge = rng.choice([e for e in self.near if e <= max(self.scale.whole, PAGE)])
        shared = max(1, (edge + rng.randint(0, 2 * page_size)) // page_size) * page_size
        rows = [rng.randint(1, 4) if regime == "decode" else rng.randint(1, 70) for _ in range(4)] + [1]
        sizes = [(shared + extra + n, n) for n in rows for extra in (rng.randint(0, 20),)]
        drawing = self._drawing(sizes, kind, "prefixed", regime, page_size)
        return Drawing(replace(drawing.shape, shared_prefix=shared), drawing.seed)

    def layout(
        self, regime: Regime, drawing: Drawing, requests: Iterable[int] | None = None, salt: int = 0
    ) -> Layout:
        """The regime's way to run a problem: at once, row by row, or in random and adversarial pieces."""
        chosen = tuple(requests) if requests is not None else tuple(range(len(drawing.shape.rows)))
        rows = [drawing.shape.rows[b] for b in chosen]
        partition: tuple[tuple[int, ...], ...] = ()
        if regime == "decode":
            partition = tuple((1,) * r for r in rows)
        elif regime == "chunked_prefill":
            rngs = [self.rng("pieces", drawing.seed, b, salt) for b in chosen]
            partition = tuple(self.pieces(rng, r) for rng, r in zip(rngs, rows, strict=True))
        return Layout(
            regime, chosen, partition, PAGE, 0, 0, 1 + derive(drawing.seed, regime, chosen, salt) % (1 << 31)
        )

    def pieces(self, rng: random.Random, rows: int) -> tuple[int, ...]:
        """Cut rows into at most eight pieces: single rows, an edge and its neighbours, or anything."""
        sizes = [1] + [e + d for e in (*self.near, *self.query_edges) for d in (-1, 0, 1)]
        cut: list[int] = []
        while rows and len(cut) < 7:
            fitting = [n for n in sizes if 1 <= n <= rows]
            size = rng.choice(fitting) if rng.random() < 0.6 else rng.randint(1, rows)
            cut.append(size)
            rows -= size
        if rows:
            cut.append(rows)
        rng.shuffle(cut)
        return tuple(cut)

    def page_sizes(self, rng: random.Random) -> tuple[int, ...]:
        """Page sizes worth a layout: the limits, both sides of every edge, and random ones."""
        low, high = self.pages
        around = {e + d for e in self.plan.edges.get("page_size", ()) for d in (-1, 0, 1)}
        drawn = {rng.randint(low, high) for _ in range(self.scale.layouts)}
        sizes = {low, high, 3, min(self.near, key=lambda e: abs(e - 64))} | around | drawn
        return tuple(sorted(n for n in sizes if low <= n <= high))

    def _drawing(self, sizes: list[tuple[int, int]], kind: InputKind, *salt: object) -> Drawing:
        """A problem of requests (positions, rows), cut to the contract's limits; all rows stay all rows."""
        most = self.limit("query_length", self.positions)
        fitting = [(min(n, self.positions, most if rows >= n else n), rows) for n, rows in sizes]
        lengths, rows = tuple(n for n, _ in fitting), tuple(min(r, n, most) for n, r in fitting)
        shape = ProblemShape(self.constant, lengths, rows, kind, self.plan.dtype)
        return Drawing(shape, derive(self.plan.seed, self.constant, kind, *salt))


def logarithmic(rng: random.Random, low: int, high: int) -> int:
    """A random integer between the limits, as likely short as long."""
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))
