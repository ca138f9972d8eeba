"""Every relation as pairs of layouts of one problem, for any operator.

A relation is a generator of pairs: a problem, and two ways to run it whose rows must have equal bits. Which
problems, and where the edges are, is `drawings.py`'s business; what is compared, `checks.py`'s. A case's id
carries the whole plan, so that the case can be rebuilt alone.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from kernelbraid.audit.drawings import PAGE, WHOLE_REGIMES, Drawing, Plan, Scope, derive
from kernelbraid.contract import Contract, Regime, Requirement
from kernelbraid.ir.evidence import Level
from kernelbraid.ops.problem import InputKind, Layout, Operator, ProblemShape
from kernelbraid.ops.rows import ACCUMULATION

Process = Literal["main", "fresh", "root"]

ACCURACY_KINDS: tuple[InputKind, ...] = ("normal", "heavy_tailed", "cancelling", "saturated", "captured")
"""Kinds on which a relative error means something: the results are normal numbers. Signed zeros give an empty
norm, denormals have no relative precision, non-finite rows no distance; their bits are compared instead."""

LONG = 4
"""Requests of a large batch that are long enough to cross blocks."""

SMOKE_RELATIONS = (
    "rerun",
    "batch",
    "decode_equals_prefill",
    "update_equals_rollout",
    "graph_replay",
    "implementations_agree",
)


@dataclass(frozen=True, slots=True)
class Execution:
    """One run of a problem: laid out so, in that process."""

    layout: Layout
    process: Process = "main"
    repeat: int = 0
    """Equal executions share one result, except for a repeat, which runs anew."""
    captured: Layout | None = None
    """Capture the calls of this layout in a graph, and replay them on what `layout` puts into the buffers."""


@dataclass(frozen=True, slots=True)
class Case:
    """Two executions of one problem that must give equal bits, or one whose error is bounded."""

    id: str
    requirement: str
    relation: str
    regime: Regime
    shape: ProblemShape
    seed: int
    left: Execution
    right: Execution | None
    """None: compare with the float64 reference."""
    between: tuple[Execution, ...] = ()
    """Other work that is done between left and right."""


class Pair(NamedTuple):
    """A case without its id."""

    drawing: Drawing
    left: Execution
    right: Execution | None
    between: tuple[Execution, ...] = ()


def cases(operator: Operator, requirement: Requirement, plan: Plan) -> Iterator[Case]:
    """Yield the cases of one requirement under a plan; equal arguments give equal cases.

    Raises:
        ValueError: the contract names a relation that nothing here can test.
    """
    for axes in plan.constant_axes:
        constant = tuple((a.name, axes[a.name]) for a in operator.contract.axes if a.constant)
        prefix = "/".join((requirement.id, _plan_text(operator.contract, plan, axes)))
        pairs: Iterable[Pair] = _pairs(Scope(operator, plan, constant), requirement)
        if plan.level == Level.SMOKE:
            pairs = _first(pairs) if requirement.name in SMOKE_RELATIONS else ()
        for number, pair in enumerate(pairs):
            yield Case(
                f"{prefix}/{number}",
                requirement.id,
                requirement.name,
                requirement.regime,
                pair.drawing.shape,
                pair.drawing.seed,
                pair.left,
                pair.right,
                pair.between,
            )


def vacuous(requirement: Requirement, plan: Plan) -> bool:
    """Whether the plan asks nothing of a requirement: agreement with other bits, or most of a smoke test."""
    if requirement.name == "implementations_agree" and not plan.root_agrees:
        return True
    return plan.level == Level.SMOKE and requirement.name not in SMOKE_RELATIONS


def rebuild(operator: Operator, case_id: str) -> tuple[Case, Plan]:
    """Return the case that an id names, and its plan.

    Raises:
        ValueError: it is not the id of one of this operator's cases.
    """
    parts = case_id.split("/")
    requirement = next((r for r in operator.contract.requirements if r.id == "/".join(parts[:4])), None)
    if requirement is None or len(parts) != 11:
        raise ValueError(f"{case_id!r} is not the id of a case of {operator.contract.name}")
    try:
        plan = _parse_plan(operator.contract, parts[4:10])
        number = int(parts[10])
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{case_id!r} is not the id of a case of {operator.contract.name}: {error}"
        ) from error
    for case in cases(operator, requirement, plan):
        if case.id == case_id:
            return case, plan
        if int(case.id.rsplit("/", 1)[1]) >= number:
            break
    raise ValueError(
        f"{requirement.id} has no case {case_id!r}; ids stay valid for one version of the cases only"
    )


def _plan_text(contract: Contract, plan: Plan, axes: Mapping[str, int]) -> str:
    constant = "-".join(str(axes[a.name]) for a in contract.axes if a.constant)
    numerics = "-".join(str(plan.numerics[knob.name]) for knob in contract.knobs) or "none"
    edges = "+".join(
        f"{axis}:{','.join(map(str, sizes))}" for axis, sizes in sorted(plan.edges.items()) if sizes
    )
    return "/".join((plan.level, plan.dtype, constant, numerics, edges or "none", str(plan.seed)))


def _parse_plan(contract: Contract, parts: list[str]) -> Plan:
    level, dtype, constant, numerics, edges, seed = parts
    names = [axis.name for axis in contract.axes if axis.constant]
    axes = dict(zip(names, map(int, constant.split("-")), strict=True))
    for name, value in axes.items():
        contract.axis(name).check(value)
    values = map(int, numerics.split("-")) if contract.knobs else ()
    knobs = dict(zip((knob.name for knob in contract.knobs), values, strict=True))
    contract.check_numerics(knobs)
    if dtype not in contract.dtypes:
        raise ValueError(f"dtype must be one of {contract.dtypes}, got {dtype!r}")
    split = [item.split(":") for item in edges.split("+")] if edges != "none" else []
    found = {axis: tuple(map(int, sizes.split(","))) for axis, sizes in split}
    return Plan(Level(level), (axes,), knobs, found, dtype, int(seed), root_agrees=True)


def _pairs(scope: Scope, requirement: Requirement) -> Iterator[Pair]:
    if requirement.kind == "accuracy":
        return _accuracy(scope, requirement.regime)
    if requirement.name not in RELATIONS:
        raise ValueError(f"no test of relation {requirement.name!r}; there are {', '.join(RELATIONS)}")
    if vacuous(requirement, scope.plan):
        return iter(())
    return RELATIONS[requirement.name](scope, requirement.regime)


def _first(pairs: Iterable[Pair]) -> Iterator[Pair]:
    for pair in pairs:
        yield pair
        return


def _again(layout: Layout, **changes: Any) -> Layout:
    """The same layout with other poison, and with `changes`."""
    return replace(
        layout, poison_seed=1 + derive(layout.poison_seed, "again", changes) % (1 << 31), **changes
    )


def _rerun(scope: Scope, regime: Regime) -> Iterator[Pair]:
    """The same call again, at once and after other work."""
    drawings = scope.problems(regime, "rerun", regime)
    for drawing in drawings if scope.plan.level == Level.FULL else drawings[:1]:
        layout = scope.layout(regime, drawing)
        other = scope.layout(regime, drawing, reversed(layout.requests), salt=1)
        for repeat in range(1, scope.scale.reruns + 1 if drawing is drawings[0] else 2):
            between = (Execution(other, repeat=repeat),) if repeat % 2 else ()
            yield Pair(drawing, Execution(layout), Execution(_again(layout), repeat=repeat), between)


def _fresh_process(scope: Scope, regime: Regime) -> Iterator[Pair]:
    for drawing in scope.problems(regime, "fresh", regime):
        layout = scope.layout(regime, drawing)
        yield Pair(drawing, Execution(layout), Execution(layout, "fresh"))


def _implementations_agree(scope: Scope, regime: Regime) -> Iterator[Pair]:
    for drawing in scope.problems(regime, "agree", regime, every=scope.plan.level == Level.FULL):
        layout = scope.layout(regime, drawing)
        yield Pair(drawing, Execution(layout), Execution(layout, "root"))


def _batch(scope: Scope, regime: Regime) -> Iterator[Pair]:
    """Requests alone, reordered, repeated, in part, and in batches of every size worth a call."""
    for drawing in scope.problems(regime, "batch", regime):
        rng = scope.rng("batch", regime, drawing.seed)
        together = scope.layout(regime, drawing)
        active = [b for b, rows in enumerate(drawing.shape.rows) if rows]
        for b in rng.sample(active, min(scope.scale.alone, len(active))):
            yield Pair(drawing, Execution(together), Execution(scope.layout(regime, drawing, (b,))))
        for turn in range(scope.scale.layouts):
            order = rng.sample(
                together.requests, len(together.requests) if turn == 0 else len(active) // 2 + 1
            )
            if any(b in active for b in order):
                yield Pair(drawing, Execution(together), Execution(scope.layout(regime, drawing, order)))
        twice = sorted(rng.choices(active, k=6))
        yield Pair(drawing, Execution(together), Execution(scope.layout(regime, drawing, twice)))
    yield from _batch_sizes(scope, regime)


def _batch_sizes(scope: Scope, regime: Regime) -> Iterator[Pair]:
    drawing = scope.many(regime)
    rng = scope.rng("batch sizes", regime, drawing.seed)
    page = min(8, scope.pages[1])
    everyone = replace(scope.layout(regime, drawing), page_size=page)
    by_length = sorted(everyone.requests, key=lambda b: -drawing.shape.lengths[b])
    for size in scope.batches[:-1]:
        # A schedule that follows the batch shows in long requests: the longest always take part.
        long = by_length[: min(size, LONG)]
        others = [b for b in everyone.requests if b not in long]
        order = rng.sample([*long, *rng.sample(others, size - len(long))], size)
        some = replace(scope.layout(regime, drawing, order), page_size=page)
        yield Pair(drawing, Execution(everyone), Execution(some))


def _graph_replay(scope: Scope, regime: Regime) -> Iterator[Pair]:
    """Calls captured once and replayed on other contents against those contents computed at once.

    Requests change places, and pages too: every length, table and input of the calls then stands elsewhere,
    while the buffers' shapes and what the calls are told by the host stay.
    """
    for drawing in scope.problems(regime, "graph", regime):
        rng = scope.rng("graph", regime, drawing.seed)
        captured = scope.layout(regime, drawing)
        for _ in range(scope.scale.layouts):
            order = rng.sample(captured.requests, len(captured.requests))
            changed = replace(scope.layout(regime, drawing, order), page_seed=rng.randint(1, 1 << 31))
            replayed = Execution(_again(changed), captured=captured)
            yield Pair(drawing, Execution(changed), replayed)


def _padding(scope: Scope, regime: Regime) -> Iterator[Pair]:
    for drawing in scope.problems(regime, "padding", regime):
        layout = scope.layout(regime, drawing)
        for padding in (1, 3, 40)[: scope.scale.layouts]:
            yield Pair(drawing, Execution(layout), Execution(_again(layout, padding=padding)))


def _packing(scope: Scope, regime: Regime) -> Iterator[Pair]:
    """Sequences packed together against each alone, and against other packings."""
    beyond = scope.beyond() if regime in WHOLE_REGIMES else ()
    for drawing in scope.problems(regime, "packing", regime) + beyond:
        rng = scope.rng("packing", drawing.seed)
        together = scope.layout(regime, drawing)
        active = [b for b, rows in enumerate(drawing.shape.rows) if rows]
        alone = [(b,) for b in rng.sample(active, min(2 * scope.scale.alone, len(active)))]
        pairs = [tuple(rng.sample(active, min(2, len(active)))) for _ in range(scope.scale.layouts)]
        for requests in (*alone, *pairs):
            yield Pair(drawing, Execution(together), Execution(scope.layout(regime, drawing, requests)))


def _chunked_prefill(scope: Scope, regime: Regime) -> Iterator[Pair]:
    """Prompts at once against any partition: random pieces, one row first or last, sides of a query edge."""
    for drawing in scope.problems("prefill", "chunked", every=True) + scope.problems("update", "chunked"):
        at_once = Execution(scope.layout("prefill", drawing))
        layout = scope.layout(regime, drawing)
        yield Pair(drawing, at_once, Execution(layout))
        if drawing.shape.kind != "normal" and scope.plan.level != Level.FULL:
            continue
        for turn in range(1, scope.scale.layouts):
            yield Pair(drawing, at_once, Execution(scope.layout(regime, drawing, salt=turn)))
        for cut in (_one_first, _one_last):
            pieces = tuple(cut(rows) for rows in drawing.shape.rows)
            yield Pair(drawing, at_once, Execution(_again(layout, partition=pieces)))
    for drawing in scope.tall():
        at_once = Execution(scope.layout("prefill", drawing))
        rows = drawing.shape.rows[0]
        for size in sorted({max(1, rows - 2), rows - 1}):
            cut_there = _again(scope.layout(regime, drawing), partition=((size, rows - size), (1,)))
            yield Pair(drawing, at_once, Execution(cut_there))
    yield from _far(scope, regime)


def _far(scope: Scope, regime: Regime) -> Iterator[Pair]:
    """Rows across far edges, all requests at once, against each request alone."""
    for drawing in scope.far():
        at_once = Execution(scope.layout("prefill", drawing))
        for b in range(len(drawing.shape.rows)):
            yield Pair(drawing, at_once, Execution(scope.layout(regime, drawing, (b,))))


def _one_first(rows: int) -> tuple[int, ...]:
    return (1, rows - 1) if rows > 1 else (1,) * rows


def _one_last(rows: int) -> tuple[int, ...]:
    return (rows - 1, 1) if rows > 1 else (1,) * rows


def _prefix_cache(scope: Scope, regime: Regime) -> Iterator[Pair]:
    """Requests that read a common prefix from shared pages against requests with pages of their own."""
    for kind in scope.kinds(False, "prefix", regime):
        rng = scope.rng("prefix", regime, kind)
        for page in (PAGE, rng.choice(scope.page_sizes(rng))):
            drawing = scope.prefixed(kind, regime, page)
            own = replace(scope.layout(regime, drawing), page_size=page)
            shared = _again(own, shared_prefix=drawing.shape.shared_prefix, page_seed=rng.randint(0, 999))
            yield Pair(drawing, Execution(own), Execution(shared))
            some = rng.sample(own.requests, 2)
            later = replace(scope.layout(regime, drawing, some), page_size=page)
            yield Pair(drawing, Execution(shared), Execution(later))


def _paging(scope: Scope, regime: Regime) -> Iterator[Pair]:
    for drawing in scope.problems(regime, "paging", regime):
        rng = scope.rng("paging", regime, drawing.seed)
        layout = scope.layout(regime, drawing)
        sizes = scope.page_sizes(rng)
        if drawing.shape.kind != "normal" and scope.plan.level != Level.FULL:
            sizes = (rng.choice(sizes),)
        for page_size in sizes:
            changed = _again(layout, page_size=page_size, page_seed=rng.randint(1, 1 << 31))
            yield Pair(drawing, Execution(layout), Execution(changed))
    if scope.plan.level == Level.FULL:
        yield from _every_page_size(scope, regime)


def _every_page_size(scope: Scope, regime: Regime) -> Iterator[Pair]:
    """All page sizes of the domain on one small problem, divided among the regimes."""
    drawing = scope.small()
    layout = scope.layout(regime, drawing)
    regimes = [r for r in scope.operator.regimes if r not in WHOLE_REGIMES]
    low, high = scope.pages
    for page_size in range(low + regimes.index(regime), high + 1, len(regimes)):
        changed = _again(layout, page_size=page_size, page_seed=page_size)
        yield Pair(drawing, Execution(layout), Execution(changed))


def _decode_equals_prefill(scope: Scope, regime: Regime) -> Iterator[Pair]:
    """Every decode step, beside others and alone, against the rows of the prompt computed at once."""
    for drawing in scope.problems("prefill", "decode", every=True):
        at_once = Execution(scope.layout("prefill", drawing))
        yield Pair(drawing, at_once, Execution(scope.layout(regime, drawing)))
        rng = scope.rng("decode", drawing.seed)
        active = [b for b, rows in enumerate(drawing.shape.rows) if 0 < rows <= 9]
        for b in active if drawing.shape.kind == "normal" else rng.sample(active, 1):
            alone = replace(scope.layout(regime, drawing, (b,)), page_seed=rng.randint(1, 1 << 31))
            yield Pair(drawing, at_once, Execution(alone))
    yield from _far(scope, regime)


def _update_equals_rollout(scope: Scope, regime: Regime) -> Iterator[Pair]:
    """Whole sequences, packed, against rollout: a prompt at once or in pieces, then token by token."""
    rollouts = [r for r in scope.operator.regimes if r not in WHOLE_REGIMES]
    for drawing in scope.problems(regime, "update", every=True):
        rng = scope.rng("rollout", drawing.seed)
        update = Execution(scope.layout(regime, drawing))
        if "decode" in rollouts:
            prompts = [tuple(_prompt(scope, rng, rows)) for rows in drawing.shape.rows]
            layout = replace(scope.layout("prefill", drawing), regime="decode", partition=tuple(prompts))
            yield Pair(drawing, update, Execution(_again(layout, page_seed=rng.randint(1, 1 << 31))))
        for way in rollouts if scope.plan.level == Level.FULL else rng.sample(rollouts, 1):
            if way != "decode":
                yield Pair(drawing, update, Execution(scope.layout(way, drawing)))
    for drawing in scope.beyond():
        for way in rollouts:
            if way != "decode":
                yield Pair(
                    drawing, Execution(scope.layout(regime, drawing)), Execution(scope.layout(way, drawing))
                )


def _prompt(scope: Scope, rng: random.Random, rows: int) -> tuple[int, ...]:
    """A prompt at once or in pieces, then at most 24 tokens one by one."""
    tokens = min(rows, rng.randint(0, 24))
    prompt = rows - tokens
    pieces = scope.pieces(rng, prompt) if rng.random() < 0.5 else (prompt,) * bool(prompt)
    return (*pieces, *(1,) * tokens)


def _gradient_accumulation(scope: Scope, regime: Regime) -> Iterator[Pair]:
    """One request's gradients of parameters at once against their sum over pieces of whole blocks."""
    for drawing in scope.problems(regime, "accumulation", regime) + scope.beyond():
        rng = scope.rng("accumulation", drawing.seed)
        longest = max(range(len(drawing.shape.rows)), key=lambda b: drawing.shape.rows[b])
        at_once = scope.layout(regime, drawing, (longest,))
        rows = drawing.shape.rows[longest]
        for _ in range(scope.scale.layouts):
            pieces: list[int] = []
            while (left := rows - sum(pieces)) > ACCUMULATION and len(pieces) < 7:
                pieces.append(ACCUMULATION * rng.randint(1, (left - 1) // ACCUMULATION))
            pieces.append(rows - sum(pieces))
            yield Pair(drawing, Execution(at_once), Execution(_again(at_once, partition=(tuple(pieces),))))


def _accuracy(scope: Scope, regime: Regime) -> Iterator[Pair]:
    full = scope.plan.level == Level.FULL
    known = [kind for kind in ACCURACY_KINDS if kind in scope.operator.kinds]
    others = scope.rng("accuracy kinds").sample(known[1:], min(scope.scale.kinds, len(known) - 1))
    for kind in known if full else ("normal", *others):
        drawing = scope.accuracy(kind, regime)
        yield Pair(drawing, Execution(scope.layout(regime, drawing)), None)
    if regime == "decode" and full:
        for drawing in scope.far()[-1:]:
            yield Pair(drawing, Execution(scope.layout(regime, drawing)), None)


RELATIONS: Mapping[str, Callable[[Scope, Regime], Iterator[Pair]]] = {
    "rerun": _rerun,
    "fresh_process": _fresh_process,
    "batch": _batch,
    "padding": _padding,
    "packing": _packing,
    "chunked_prefill": _chunked_prefill,
    "prefix_cache": _prefix_cache,
    "paging": _paging,
    "decode_equals_prefill": _decode_equals_prefill,
    "update_equals_rollout": _update_equals_rollout,
    "graph_replay": _graph_replay,
    "implementations_agree": _implementations_agree,
    "gradient_rerun": _rerun,
    "gradient_packing": _packing,
    "gradient_accumulation": _gradient_accumulation,
}
"""Relation name -> the pairs of executions that must give equal bits."""
