"""Operators whose output rows are made from input rows of the same token: problems, layouts and timing.

A request has `rows[b]` tokens at its last positions. Every call of every regime is one call of the forward's
entry point on the tokens that it brings, one below the other: what differs is how many there are and which.
The regime `backward` calls the gradient's entry point once with all tokens. Parameters, such as weights, are
the same for all requests of a problem. An operator states its tensors in a `RowForm`; numpy only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Literal

import numpy as np

from kernelbraid.contract import Axis, Regime, Relation, Workload
from kernelbraid.ops.formats import BFLOAT16
from kernelbraid.ops.numbers import DRAWN_PERIOD, Floats, normal, poison, repeated, spoil
from kernelbraid.ops.problem import (
    WHOLE_PROBLEM,
    Argument,
    Array,
    Call,
    InputKind,
    Layout,
    Problem,
    ProblemShape,
    Program,
    RowSpan,
    View,
)

MOST_TOKENS = 131072
MOST_REQUESTS = 1024
MOST_POSITIONS = 131072

ROLLOUT: tuple[Regime, ...] = ("prefill", "chunked_prefill", "decode")
FORWARD: tuple[Regime, ...] = (*ROLLOUT, "update")
TRAINING: tuple[Regime, ...] = (*FORWARD, "backward")
BACKWARD: tuple[Regime, ...] = ("backward",)

TOKENS = Axis("tokens", 0, MOST_TOKENS, constant=False, doc="rows in one call")

FORWARD_RELATIONS = (
    Relation("rerun", "the same call again gives the same bits", FORWARD),
    Relation("fresh_process", "another process gives the same bits", FORWARD),
    Relation("batch", "a row does not depend on its neighbours, nor on their number or order", FORWARD),
    Relation("padding", "poisoned rows behind a call's tokens do not matter", FORWARD),
    Relation("packing", "a sequence packed with others equals the sequence alone", ("update",)),
    Relation("chunked_prefill", "any partition of a prompt gives the prompt's bits", ("chunked_prefill",)),
    Relation("decode_equals_prefill", "a token decoded alone equals its row of the prompt", ("decode",)),
    Relation("update_equals_rollout", "the packed forward equals the rows that rollout gave", ("update",)),
)
GRADIENT_RELATIONS = (
    Relation("gradient_rerun", "the same gradients again", BACKWARD),
    Relation("gradient_packing", "a token's gradient does not depend on what it is packed with", BACKWARD),
    Relation(
        "gradient_accumulation", "gradients added over pieces equal those of all tokens at once", BACKWARD
    ),
)


def relations(*, gradients: bool, graph: bool) -> tuple[Relation, ...]:
    """The relations of a contract on rows; `graph` on devices that capture calls."""
    regimes = TRAINING if gradients else FORWARD
    found = [
        replace(each, regimes=regimes) if each.name in ("fresh_process",) else each
        for each in FORWARD_RELATIONS
    ]
    if gradients:
        found += GRADIENT_RELATIONS
    if graph:
        statement = "a captured graph replayed on other inputs equals those computed at once"
        found.append(Relation("graph_replay", statement, regimes))
    return (*found, Relation("implementations_agree", "equal bits ids mean equal bits", regimes))


# ---- What an operator states.

Axes = Mapping[str, int]
Drawn = Literal["numbers", "positions", "indices"]


@dataclass(frozen=True, slots=True)
class Field:
    """A tensor: of an input or output one row, of a parameter the whole."""

    name: str
    shape: Callable[[Axes], tuple[int, ...]]
    dtype: str = ""
    """Empty: the problem's."""
    drawn: Drawn = "numbers"
    below: Callable[[Axes], int] | None = None
    """Indices, and positions of timed calls, lie below this; rows of padding hold any int32."""
    scale: Callable[[Axes], float] = lambda axes: 1.0
    """Factor of the drawn numbers."""
    offset: float = 0.0
    """Added to the drawn numbers."""
    present: Callable[[Axes], bool] = lambda axes: True
    """Under which constant axes there is such a tensor; otherwise an implementation is given None."""

    def kept(self, dtype: str) -> str:
        return self.dtype or dtype


@dataclass(frozen=True, slots=True)
class Gradients:
    """The entry point of the gradients: it gets the forward's inputs and parameters, `saved`, and `given`."""

    entry_point: str
    given: tuple[Field, ...]
    """Gradients of the outputs, a row each token."""
    rows: tuple[Field, ...]
    """Gradients of inputs, a row each token."""
    parameters: tuple[Field, ...] = ()
    """Gradients of parameters, sums over a call's tokens; added to what is there if `accumulate` is 1."""
    saved: tuple[str, ...] = ()
    """Outputs of the forward that it reads."""
    unread: tuple[str, ...] = ()
    """Inputs and parameters of the forward that it does not read."""
    absent: tuple[str, ...] = ()
    """Gradients that are None: see `RowForm.under`."""


SHARED_NUMBERS = 1 << 20
"""Parameters of so many numbers are the same in all problems of their kind: drawing them takes seconds."""
SHARED_BYTES = 4 << 30
"""Of such parameters, those used last are kept."""
_SHARED: dict[Any, Array] = {}
_SHARED_LOCK = Lock()

ACCUMULATION = 64
"""Gradients of parameters may be added over pieces of multiples of this many tokens without other bits."""


@dataclass(frozen=True, slots=True)
class RowForm:
    """The tensors and entry points of an operator on rows."""

    entry_point: str
    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]
    parameters: tuple[Field, ...] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)
    gradients: Gradients | None = None
    absent: tuple[str, ...] = ()
    """Tensors of the forward that are None: see `under`."""

    def under(self, axes: Axes) -> "RowForm":
        """Return the form without the tensors that are not there under these constant axes."""

        def kept(fields: tuple[Field, ...]) -> tuple[Field, ...]:
            return tuple(each for each in fields if each.present(axes))

        def absent(fields: tuple[Field, ...]) -> tuple[str, ...]:
            return tuple(each.name for each in fields if not each.present(axes))

        gradients = self.gradients
        if gradients is not None:
            gradients = replace(
                gradients,
                given=kept(gradients.given),
                rows=kept(gradients.rows),
                parameters=kept(gradients.parameters),
                absent=gradients.absent + absent((*gradients.given, *gradients.rows, *gradients.parameters)),
            )
        return replace(
            self,
            inputs=kept(self.inputs),
            outputs=kept(self.outputs),
            parameters=kept(self.parameters),
            gradients=gradients,
            absent=self.absent + absent((*self.inputs, *self.parameters, *self.outputs)),
        )

    @property
    def entry_points(self) -> tuple[str, ...]:
        return (self.entry_point, *((self.gradients.entry_point,) if self.gradients else ()))

    # ---- Drawing.

    def draw(self, shape: ProblemShape, rng: np.random.Generator, *, dtypes: Sequence[str]) -> Problem:
        """Draw a problem: per request its inputs, a row each of its last `rows[b]` tokens; shared parameters.

        Where every row of every request is wanted, a request also has the gradients of its outputs.

        Raises:
            ValueError: the dtype is none of `dtypes`, or the problem is larger than the contract.
        """
        if shape.dtype not in dtypes:
            raise ValueError(f"dtype must be {' or '.join(dtypes)}, got {shape.dtype!r}")
        if len(shape.lengths) > MOST_REQUESTS or max(shape.lengths, default=0) > MOST_POSITIONS:
            raise ValueError(f"at most {MOST_REQUESTS} requests of {MOST_POSITIONS} positions")
        axes, total = dict(shape.constant_axes), sum(shape.rows)
        return self.under(axes)._draw(shape, rng, axes, total)

    def _draw(self, shape: ProblemShape, rng: np.random.Generator, axes: Axes, total: int) -> Problem:
        fields = self.inputs
        if self.gradients is not None and shape.rows == shape.lengths:
            fields += self.gradients.given
        blocks = {
            each.name: self._drawn(each, axes, (total, *each.shape(axes)), shape, rng) for each in fields
        }
        shared = {each.name: self._parameter(each, axes, shape, rng) for each in self.parameters}
        ends = np.cumsum((0, *shape.rows))
        requests = tuple(
            {name: block[ends[b] : ends[b + 1]] for name, block in blocks.items()}
            for b in range(len(shape.rows))
        )
        for request, length, rows in zip(requests, shape.lengths, shape.rows, strict=True):
            for each in self.inputs:
                if each.drawn == "positions":
                    request[each.name][...] = np.arange(length - rows, length, dtype=each.kept(shape.dtype))
            if shape.kind == "non_finite" and rows:
                for each in self.inputs:
                    if each.drawn == "numbers":
                        spoil(request[each.name].reshape(rows, -1), rng, rows - max(rows // 4, 1), rows)
        return Problem(shape, requests, self.scalars, shared)

    def _parameter(self, each: Field, axes: Axes, shape: ProblemShape, rng: np.random.Generator) -> Array:
        """A parameter; one of many numbers is drawn once for all problems that want its like, read-only."""
        size, dtype = each.shape(axes), each.kept(shape.dtype)
        if int(np.prod(size)) < SHARED_NUMBERS or each.drawn != "numbers":
            return self._drawn(each, axes, size, shape, rng)
        kind = shape.kind if shape.kind in PARAMETER_KINDS else "normal"
        key = self.entry_point, each.name, size, dtype, kind, each.scale(axes)
        with _SHARED_LOCK:
            found = _SHARED.pop(key, None)
            if found is None:
                alike, same = replace(shape, kind=kind), np.random.default_rng(len(each.name))
                found = self._drawn(each, axes, size, alike, same)
                found.flags.writeable = False
            _SHARED[key] = found
            while len(_SHARED) > 1 and sum(array.nbytes for array in _SHARED.values()) > SHARED_BYTES:
                _SHARED.pop(next(iter(_SHARED)))
        return found

    def _drawn(
        self, each: Field, axes: Axes, size: tuple[int, ...], shape: ProblemShape, rng: np.random.Generator
    ) -> Array:
        dtype = np.dtype(each.kept(shape.dtype))
        if each.drawn == "positions":
            most = each.below(axes) if each.below else MOST_POSITIONS
            return (np.arange(np.prod(size)) % most).reshape(size).astype(dtype)
        if each.drawn == "indices":
            assert each.below is not None
            return rng.integers(0, each.below(axes), size).astype(dtype)
        parameter = any(each is other for other in self.parameters)
        # numbers of these kinds know nothing of their places: so many are made, and then repeated
        few = shape.kind in ("normal", "heavy_tailed", "saturated", "non_finite", "denormals")
        count = int(np.prod(size))
        numbers = normal(rng, (min(count, DRAWN_PERIOD),) if few else size)
        shape_numbers(shape.kind, dtype, rng, numbers, parameter)
        numbers *= np.float32(each.scale(axes))
        if each.offset:  # adding 0 would make +0 of every -0
            numbers += np.float32(each.offset)
        numbers = numbers.astype(dtype, copy=False)
        return repeated(numbers, count).reshape(size) if few else numbers

    # ---- Calls.

    def load_axes(self, shape: ProblemShape, layout: Layout) -> dict[str, int]:
        """Return the axes that an implementation's `schedule` sees in the largest of the layout's calls."""
        most = max((sum(step) for step in _steps(shape, layout)), default=0)
        return {**dict(shape.constant_axes), "tokens": most + layout.padding}

    def lower(self, problem: Problem, layout: Layout) -> Program:
        """Turn a problem into calls: in `backward` of the gradients, elsewhere of the forward, one a piece.

        Padding appends poisoned rows to every forward call. In `backward` a partition cuts one request's
        tokens into calls that add to the gradients of the parameters.

        Raises:
            ValueError: the layout does not fit the problem.
        """
        _check(problem.shape, layout)
        rng = np.random.default_rng(layout.poison_seed)
        form = self.under(dict(problem.shape.constant_axes))
        if layout.regime == "backward":
            return form._lower_backward(problem, layout)
        return form._lower_forward(problem, layout, rng)

    def _lower_forward(self, problem: Problem, layout: Layout, rng: np.random.Generator) -> Program:
        axes, dtype, padding = dict(problem.shape.constant_axes), problem.shape.dtype, layout.padding
        pieces: dict[str, list[Array]] = {each.name: [] for each in self.inputs}
        calls: list[Call] = []
        spans: list[RowSpan] = []
        done, at = [0] * len(layout.requests), 0
        for step in _steps(problem.shape, layout):
            start = at
            for i, (b, count) in enumerate(zip(layout.requests, step, strict=True)):
                if not count:
                    continue
                for each in self.inputs:
                    pieces[each.name].append(problem.requests[b][each.name][done[i] : done[i] + count])
                spans += [
                    RowSpan(each.name, each.name, 0, at, at + count, b, done[i]) for each in self.outputs
                ]
                done[i] += count
                at += count
            if padding:
                for each in self.inputs:
                    pieces[each.name].append(_padding(each, axes, padding, dtype, rng))
                at += padding
            if at > start:
                calls.append(Call(self.entry_point, self._arguments(start, at)))
        inputs = {each.name: _joined(pieces[each.name], each, axes, dtype) for each in self.inputs}
        outputs = {each.name: ((at, *each.shape(axes)), each.kept(dtype)) for each in self.outputs}
        # parameters first: what stands at the same place in the next program needs no copy
        return Program(
            {**problem.shared, **inputs}, {}, outputs, tuple(calls), tuple(spans), constant_axes=axes
        )

    def _arguments(self, start: int, stop: int) -> dict[str, Argument]:
        return {
            **{each.name: View(each.name, start, stop) for each in self.inputs},
            **{each.name: View(each.name) for each in self.parameters},
            **self.scalars,
            **{each.name: View(each.name, start, stop) for each in self.outputs},
            **dict.fromkeys(self.absent),
        }

    def _lower_backward(self, problem: Problem, layout: Layout) -> Program:
        gradients = self.gradients
        assert gradients is not None
        axes, dtype = dict(problem.shape.constant_axes), problem.shape.dtype
        given = (*self.inputs, *gradients.given)
        inputs = {
            each.name: finite(
                _joined([problem.requests[b][each.name] for b in layout.requests], each, axes, dtype)
            )
            for each in given
        }
        total = sum(problem.shape.rows[b] for b in layout.requests)
        saved = [each for each in self.outputs if each.name in gradients.saved]
        outputs = {
            each.name: ((total, *each.shape(axes)), each.kept(dtype)) for each in (*saved, *gradients.rows)
        }
        outputs |= {each.name: (each.shape(axes), each.kept(dtype)) for each in gradients.parameters}
        others = {each.name: ((total, *each.shape(axes)), each.kept(dtype)) for each in self.outputs}
        calls: list[Call] = []
        if saved and total:
            outputs = others | outputs
            calls.append(Call(self.entry_point, self._arguments(0, total)))
        at = 0
        for piece in layout.partition[0] if layout.partition else (total,):
            arguments: dict[str, Argument] = {
                **{each.name: View(each.name, at, at + piece) for each in (*given, *saved)},
                **{each.name: View(each.name) for each in self.parameters},
                **self.scalars,
                **{each.name: View(each.name, at, at + piece) for each in gradients.rows},
                **{each.name: View(each.name) for each in gradients.parameters},
                **dict.fromkeys((*self.absent, *gradients.absent)),
            }
            if gradients.parameters:
                arguments["accumulate"] = int(at > 0)
            kept = {name: value for name, value in arguments.items() if name not in gradients.unread}
            if total:
                calls.append(Call(gradients.entry_point, kept))
            at += piece
        spans: list[RowSpan] = []
        at = 0
        for b in layout.requests:
            rows = problem.shape.rows[b]
            if rows:
                spans += [RowSpan(each.name, each.name, 0, at, at + rows, b, 0) for each in gradients.rows]
            at += rows
        for each in gradients.parameters if total else ():
            height = each.shape(axes)[0]
            name = _of_requests(each.name, layout.requests, len(problem.requests))
            spans.append(RowSpan(name, each.name, 0, 0, height, WHOLE_PROBLEM, 0))
        # parameters first: what stands at the same place in the next program needs no copy
        return Program(
            {**problem.shared, **inputs}, {}, outputs, tuple(calls), tuple(spans), constant_axes=axes
        )

    # ---- Timing and cost.

    def timed(
        self,
        workload: Workload,
        rng: np.random.Generator,
        variants: int,
        pool_bytes: int,
        *,
        contiguous: bool,
        dtype: str,
    ) -> Program:
        """Return a program of `variants` distinct calls; see `Operator.timed`.

        Every variant has rows of its own of the inputs, up to `pool_bytes` of them, and the parameters and
        their gradients are stored as often as the pool has room for. Peers get the arguments of the entry
        point that it reads.
        """
        form = self.under(_integers(workload))
        return form._timed(workload, rng, variants, pool_bytes, contiguous, dtype)

    def _timed(
        self,
        workload: Workload,
        rng: np.random.Generator,
        variants: int,
        pool_bytes: int,
        contiguous: bool,
        dtype: str,
    ) -> Program:
        axes, tokens = _integers(workload), _tokens(workload)
        backward = workload.phase == "backward"
        gradients = self.gradients
        assert gradients is not None or not backward
        saved = [each for each in self.outputs if gradients and each.name in gradients.saved]
        read = (*self.inputs, *(gradients.given if gradients else ()), *saved) if backward else self.inputs
        written = gradients.rows if gradients and backward else self.outputs
        summed = gradients.parameters if gradients and backward else ()
        inputs: dict[str, Array] = {}
        places: dict[str, int] = {}
        for each in (*read, *self.parameters):
            whole = each in self.parameters
            size = each.shape(axes) if whole else (tokens, *each.shape(axes))
            one = max(1, int(np.prod(size)) * np.dtype(each.kept(dtype)).itemsize)
            places[each.name] = max(1, min(variants, -(-pool_bytes // one)))
            shape = ProblemShape((), (), (), "normal", dtype)
            inputs[each.name] = self._drawn(each, axes, (places[each.name] * size[0], *size[1:]), shape, rng)
        outputs = {e.name: ((variants * tokens, *e.shape(axes)), e.kept(dtype)) for e in written}
        for each in summed:
            height, *others = each.shape(axes)
            one = max(1, height * int(np.prod(others)) * np.dtype(each.kept(dtype)).itemsize)
            places[each.name] = max(1, min(variants, -(-pool_bytes // one)))
            outputs[each.name] = (places[each.name] * height, *others), each.kept(dtype)
        calls = []
        for i in range(variants):
            arguments: dict[str, Argument] = {}
            for each in (*read, *self.parameters):
                rows = each.shape(axes)[0] if each in self.parameters else tokens
                at = i % places[each.name] * rows
                arguments[each.name] = View(each.name, at, at + rows)
            arguments |= self.scalars
            arguments |= dict.fromkeys(self.absent)
            if not contiguous:
                arguments |= dict.fromkeys(gradients.absent if gradients and backward else ())
                arguments |= {e.name: View(e.name, i * tokens, (i + 1) * tokens) for e in written}
                heights = {e.name: e.shape(axes)[0] for e in summed}
                turns = {n: i % places[n] for n in heights}
                arguments |= {n: View(n, turns[n] * h, (turns[n] + 1) * h) for n, h in heights.items()}
                if summed:
                    arguments["accumulate"] = 0
            unread = gradients.unread if gradients and backward else ()
            kept = {name: value for name, value in arguments.items() if name not in unread}
            entry = gradients.entry_point if gradients and backward else self.entry_point
            calls.append(Call("peer" if contiguous else entry, kept))
        return Program(inputs, {}, {} if contiguous else outputs, tuple(calls), constant_axes=axes)

    def moved(self, workload: Workload, dtype: str) -> float:
        """Bytes of every tensor of a call that is read or written, each once."""
        axes, tokens = _integers(workload), _tokens(workload)
        form = self.under(axes)
        gradients = form.gradients if workload.phase == "backward" else None
        rows = (*form.inputs, *(gradients.given + gradients.rows if gradients else form.outputs))
        whole = (*form.parameters, *(gradients.parameters if gradients else ()))
        unread = gradients.unread if gradients else ()

        def size(each: Field) -> int:
            return int(np.prod(each.shape(axes))) * np.dtype(each.kept(dtype)).itemsize

        moved = tokens * sum(size(each) for each in rows if each.name not in unread)
        return float(moved + sum(size(each) for each in whole if each.name not in unread))


def _check(shape: ProblemShape, layout: Layout) -> None:
    if layout.shared_prefix:
        raise ValueError("rows share no prefix")
    if layout.regime in ("update", "backward"):
        if any(shape.rows[b] != shape.lengths[b] for b in layout.requests):
            raise ValueError(f"{layout.regime} computes every row of a sequence: rows must equal lengths")
        if layout.regime == "backward" and shape.rows != shape.lengths:
            raise ValueError("gradients are drawn where every request wants all its rows")
        if layout.partition and (layout.regime == "update" or len(layout.requests) != 1):
            raise ValueError(f"{layout.regime} takes no partition of several requests")
    if layout.partition:
        rows = [shape.rows[b] for b in layout.requests]
        if [sum(pieces) for pieces in layout.partition] != rows:
            raise ValueError(f"the partition's pieces must add up to each request's rows {rows}")


def _steps(shape: ProblemShape, layout: Layout) -> list[tuple[int, ...]]:
    """Tokens of each participant in each call."""
    pieces = layout.partition or tuple((shape.rows[b],) for b in layout.requests)
    count = max((len(p) for p in pieces), default=0)
    return [tuple(p[t] if t < len(p) else 0 for p in pieces) for t in range(count)]


def _of_requests(name: str, requests: tuple[int, ...], count: int) -> str:
    """The name of a quantity of some requests together; only equal ones may be compared."""
    return name if requests == tuple(range(count)) else f"{name} of {','.join(map(str, requests))}"


def _joined(pieces: list[Array], each: Field, axes: Axes, dtype: str) -> Array:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty((0, *each.shape(axes)), each.kept(dtype))


def _padding(each: Field, axes: Axes, rows: int, dtype: str, rng: np.random.Generator) -> Array:
    """Rows that nobody asked for: NaN, or any integers."""
    size, kept = (rows, *each.shape(axes)), np.dtype(each.kept(dtype))
    if kept.kind == "i":
        return rng.integers(-(2**31), 2**31, size).astype(kept)
    return poison(rng, size, str(kept))


def finite(block: Array) -> Array:
    """The same numbers with 0 for what is not finite: sums over tokens would spread it over all others."""
    if block.dtype.kind == "i":
        return block
    return np.where(np.isfinite(block), block, np.zeros((), block.dtype))


def _integers(workload: Workload) -> dict[str, int]:
    return {name: value for name, value in workload.shape.items() if isinstance(value, int)}


def _tokens(workload: Workload) -> int:
    tokens = workload.shape["tokens"]
    assert isinstance(tokens, int)
    return tokens


# ---- Numbers of every kind.

KINDS: tuple[InputKind, ...] = (
    "normal",
    "heavy_tailed",
    "cancelling",
    "signed_zeros",
    "denormals",
    "saturated",
    "non_finite",
)
PARAMETER_KINDS = ("heavy_tailed", "cancelling", "signed_zeros", "denormals")
"""Kinds whose parameters are not simply normal."""
LARGE = {np.dtype(np.float32): 64.0, np.dtype(np.float16): 32.0, BFLOAT16: 4.0}
DENORMAL = {np.dtype(np.float32): 2.0**-132, np.dtype(np.float16): 2.0**-18, BFLOAT16: 2.0**-130}


def shape_numbers(
    kind: InputKind, dtype: np.dtype[Any], rng: np.random.Generator, numbers: Floats, parameter: bool
) -> None:
    """Turn normal numbers into numbers of `kind` that `dtype` can hold, in place.

    `cancelling` makes both halves of an input's rows equal and of a parameter's nearly opposite and large, so
    that products with them are small differences of large sums.
    """
    half = numbers.shape[-1] // 2 if numbers.ndim else 0
    if kind == "heavy_tailed":
        numbers /= np.sqrt(np.maximum(np.abs(normal(rng, numbers.shape)), np.float32(1e-6)))
    elif kind == "cancelling" and half:
        if parameter:
            numbers[..., :half] *= np.float32(LARGE[dtype])
            numbers[..., half : 2 * half] = numbers[..., half : 2 * half] / 8 - numbers[..., :half]
        else:
            numbers[..., half : 2 * half] = numbers[..., :half]
    elif kind == "signed_zeros":
        numbers *= normal(rng, numbers.shape) > 0
        numbers[..., : half // 2] = -0.0
        if not parameter:
            numbers[::5] *= 0
    elif kind == "denormals":
        numbers[normal(rng, numbers.shape) > 0.5] *= np.float32(DENORMAL[dtype])
    elif kind == "saturated" and not parameter:
        numbers *= 40
