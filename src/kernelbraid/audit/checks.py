"""The judge's comparisons: bits as integers, all elements, no tolerance; and errors against float64.

A `Runner` runs programs somewhere else; what they must give is known here alone.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kernelbraid.audit.accuracy import Errors
from kernelbraid.audit.cases import Case, Execution, Process, cases, vacuous
from kernelbraid.audit.drawings import Plan
from kernelbraid.contract import AccuracyBound, Requirement
from kernelbraid.ir.evidence import Difference, Verdict
from kernelbraid.ops.formats import bits_type
from kernelbraid.ops.problem import WHOLE_PROBLEM, Array, Operator, Problem, ProblemShape, Program, Rows

_VENDOR = Lock()
"""Held while the vendor's kernel runs: torch chooses among its kernels by process-wide switches."""

REMEMBERED_BYTES = 384 << 20
"""Results and problems kept for the next cases, least recently used dropped first."""


class Runner(Protocol):
    """Runs programs of one implementation, or of the root, in processes of their own."""

    def run(self, program: Program, process: Process) -> Mapping[str, Array]:
        """Run every call of `program` in order on fresh, poisoned buffers and return the output buffers."""
        ...

    def replay(self, captured: Program, program: Program, process: Process) -> Mapping[str, Array]:
        """Capture the calls of one program, replay them on another's contents, return the output buffers."""
        ...


class Comparison(NamedTuple):
    """Two arrays compared as bits."""

    unequal: int
    first: tuple[int, ...] | None
    ulp: int | None
    """Distance of the first unequal elements in units in the last place; None beside a NaN or an infinity."""


def compare(left: Array, right: Array) -> Comparison:
    """Compare all elements of two arrays as integers of their width.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(f"cannot compare {left.dtype}{left.shape} with {right.dtype}{right.shape}")
    different = _bits(left) != _bits(right)
    unequal = int(np.count_nonzero(different))
    if not unequal:
        return Comparison(0, None, None)
    first = tuple(int(i) for i in np.unravel_index(int(np.argmax(different)), left.shape))
    return Comparison(unequal, first, ulp_distance(left[first], right[first]))


def _bits(array: Array) -> npt.NDArray[np.unsignedinteger]:
    return np.ascontiguousarray(array).view(bits_type(array.dtype))


def ulp_distance(left: np.generic, right: np.generic) -> int | None:
    """Return the distance of two floats in representable numbers; None for NaN and infinity."""
    if not (np.isfinite(left) and np.isfinite(right)):
        return None
    return abs(_ordinal(left) - _ordinal(right))


def _ordinal(value: np.generic) -> int:
    """Position of a float on the line of its representable numbers; both zeros are 0."""
    width = 8 * value.dtype.itemsize
    bits = int.from_bytes(value.tobytes(), "little")
    negative = bits >> (width - 1)
    magnitude = bits & ((1 << (width - 1)) - 1)
    return -magnitude if negative else magnitude


def describe(value: np.generic) -> str:
    """A value and its bits, such as `0.5 (0x3f000000)`."""
    bits = int.from_bytes(value.tobytes(), "little")
    return f"{value!s} (0x{bits:0{2 * value.dtype.itemsize}x})"


T = TypeVar("T")


class Memory:
    """Problems, results and references of one audit, so that cases and requirements share them."""

    def __init__(self, operator: Operator, runner: Runner, capacity: int = REMEMBERED_BYTES) -> None:
        self._operator = operator
        self._runner = runner
        self._capacity = capacity
        self._problems = _Kept(capacity)
        self._results = _Kept(capacity)
        self._references: dict[Hashable, Rows] = {}
        self._huge = _Kept(4 * capacity)
        self.executions = 0
        """Programs run so far."""

    def problem(self, shape: ProblemShape, seed: int) -> Problem:
        return self._problems(
            (shape, seed),
            lambda: self._operator.draw(shape, np.random.default_rng(seed)),
            lambda problem: sum(
                a.nbytes
                for arrays in (*problem.requests, problem.shared)
                for a in arrays.values()
                if a.flags.writeable  # what is not is shared by many problems
            ),
        )

    def rows(self, shape: ProblemShape, seed: int, execution: Execution) -> Rows:
        """Rows of every request that takes part, run now unless an equal execution was run before."""
        if execution.repeat:
            return self._run(shape, seed, execution)
        return self._results((shape, seed, execution), lambda: self._run(shape, seed, execution), _size)

    def exact(self, shape: ProblemShape, seed: int) -> Rows:
        """The float64 reference's rows: few and dear, so not dropped unless they are huge."""
        return self._reference(("exact", shape, seed), self._operator.reference)

    def vendor(self, shape: ProblemShape, seed: int) -> Rows:
        """The vendor's rows of the same problem."""

        def locked(problem: Problem) -> Rows:
            with _VENDOR:
                return self._operator.vendor(problem)

        return self._reference(("vendor", shape, seed), locked)

    def _reference(self, key: tuple[str, ProblemShape, int], make: Callable[[Problem], Rows]) -> Rows:
        found = self._references.get(key)
        if found is None:
            found = self._huge(key, lambda: make(self.problem(*key[1:])), _size)
            if _size(found) < self._capacity // 4:
                self._references[key] = found
        return found

    def _run(self, shape: ProblemShape, seed: int, execution: Execution) -> Rows:
        problem, process = self.problem(shape, seed), execution.process
        program = self._operator.lower(problem, execution.layout)
        self.executions += 1
        if execution.captured is None:
            return gather(program, self._runner.run(program, process), shape.rows)
        captured = self._operator.lower(problem, execution.captured)
        return gather(program, self._runner.replay(captured, program, process), shape.rows)


class _Kept:
    """What was made last, up to so many bytes, and at least one."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()
        self._bytes = 0

    def __call__(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][0]  # type: ignore[return-value]
        made = make()
        self._kept[key] = (made, size(made))
        self._bytes += size(made)
        while self._bytes > self._capacity and len(self._kept) > 1:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._bytes -= dropped
        return made


def _size(rows: Rows) -> int:
    return sum(array.nbytes for array in rows.values())


def gather(program: Program, outputs: Mapping[str, Array], rows: Sequence[int]) -> Rows:
    """Collect each request's rows from output buffers; the leading axis counts its copies in the layout."""
    along: dict[tuple[str, int, int], Array] = {}
    copies: dict[tuple[str, int], list[_Copy]] = {}
    for span in program.spans:
        where = span.buffer, span.axis, span.leading
        if where not in along:
            whole = outputs[span.buffer]
            rows_together = whole.reshape(-1, *whole.shape[span.leading :]) if span.leading > 1 else whole
            along[where] = np.moveaxis(rows_together, span.axis, 0)
        found = copies.setdefault((span.quantity, span.request), [])
        if span.first_row == 0:
            found.append(_Copy(0, []))
        # Spans come in the order of the calls: the first copy that ends where this one begins goes on.
        copy = next(copy for copy in found if copy.rows == span.first_row)
        copy.blocks.append(along[where][span.start : span.stop])
        copy.rows += span.stop - span.start
    for key, found in copies.items():
        if key[1] != WHOLE_PROBLEM:
            assert all(copy.rows == rows[key[1]] for copy in found), (key, [copy.rows for copy in found])
    return {key: np.array([copy.joined() for copy in found]) for key, found in copies.items()}


@dataclass(slots=True)
class _Copy:
    """Rows of one copy of a request, as far as they have come out."""

    rows: int
    blocks: list[Array]

    def joined(self) -> Array:
        return self.blocks[0] if len(self.blocks) == 1 else np.concatenate(self.blocks)


def check(
    operator: Operator,
    requirement: Requirement,
    plan: Plan,
    runner: Runner,
    deadline: float | None = None,
    memory: Memory | None = None,
) -> Verdict:
    """Check one requirement and return the verdict, which ends at the first case that fails.

    A requirement of which the plan asks nothing is held with no case (see `cases.vacuous`).

    Args:
        operator: what is checked.
        requirement: one of its contract's.
        plan: level, scope, edges and seed.
        runner: runs the programs.
        deadline: a time of `time.monotonic()` after which no case begins.
        memory: shared by the checks of one audit; by default this check's own.

    Raises:
        TimeoutError: the deadline has passed before the last case.
        ValueError: the plan has no case for a requirement that it should test.
    """
    memory = memory or Memory(operator, runner)
    done = compared = 0
    worst: float | None = None
    last: Case | None = None
    errors = Errors(_bound(operator, requirement.name)) if requirement.kind == "accuracy" else None
    for case in cases(operator, requirement, plan):
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"the time for checks ended before {case.id}")
        verdict, last = run_case(operator, case, memory, errors), case
        done, compared = done + 1, compared + verdict.comparisons
        if verdict.error is not None:
            worst = max(verdict.error, worst or 0.0)
        if not verdict.held:
            return Verdict(requirement.id, False, done, compared, worst, verdict.difference)
    if not done and not vacuous(requirement, plan):
        raise ValueError(f"no case tests {requirement.id}")
    if errors is not None and last is not None and compared:
        found = errors.together()
        worst = max(found.ratio, worst or 0.0)
        if found.ratio > 1:
            where = Difference(last.id, last.seed, found.test, f"{found.ratio:.3g}", "1", None, 0)
            return Verdict(requirement.id, False, done, compared, worst, where)
    return Verdict(requirement.id, True, done, compared, worst)


def check_all(
    operator: Operator, plan: Plan, runner: Runner, deadline: float | None = None
) -> Iterator[Verdict]:
    """Check every requirement that the plan tests, in the contract's order, sharing problems and results."""
    memory = Memory(operator, runner)
    for requirement in operator.contract.requirements:
        if not vacuous(requirement, plan):
            yield check(operator, requirement, plan, runner, deadline, memory)


def together(before: Verdict | None, now: Verdict) -> Verdict:
    """Join two verdicts on one requirement, such as those of two levels or two sets of constant axes."""
    if before is None:
        return now
    errors = [error for error in (before.error, now.error) if error is not None]
    return Verdict(
        now.requirement,
        before.held and now.held,
        before.cases + now.cases,
        before.comparisons + now.comparisons,
        max(errors) if errors else None,
        before.difference or now.difference,
    )


def run_case(operator: Operator, case: Case, memory: Memory, errors: Errors | None = None) -> Verdict:
    """Run one case and return its verdict; `errors` takes in those of a case of an accuracy bound."""
    left = memory.rows(case.shape, case.seed, case.left)
    if case.right is None:
        return _accuracy(operator, case, left, memory, errors)
    for execution in case.between:
        memory.rows(case.shape, case.seed, execution)
    right = memory.rows(case.shape, case.seed, case.right)
    unequal = compared = 0
    first: Difference | None = None
    for key in sorted(left.keys() & right.keys()):
        for mine in right[key]:
            others = list(left[key])
            if operator.contract.canonical_nan and np.isnan(mine).any():
                others.append(canonical(mine))
            for other in others:
                found = compare(other, mine)
                compared += mine.size
                unequal += found.unequal
                if found.first is not None and first is None:
                    place = _place(key, found.first, case.shape)
                    values = describe(other[found.first]), describe(mine[found.first])
                    first = Difference(case.id, case.seed, place, *values, found.ulp, 0)
    assert compared, f"{case.id} compares nothing"
    difference = replace(first, unequal=unequal) if first is not None else None
    return Verdict(case.requirement, difference is None, 1, compared, None, difference)


def canonical(array: Array) -> Array:
    """The same floats with every NaN the positive quiet one without payload."""
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array)


def _place(key: tuple[str, int], index: tuple[int, ...], shape: ProblemShape) -> str:
    quantity, request = key
    row = index[0]
    if request == WHOLE_PROBLEM:
        return f"{quantity}, row {row}, index {list(index[1:])}"
    position = shape.lengths[request] - shape.rows[request] + row
    return f"{quantity} of request {request}, row {row} (position {position}), index {list(index[1:])}"


def _accuracy(operator: Operator, case: Case, left: Rows, memory: Memory, errors: Errors | None) -> Verdict:
    """The worst of what a bound's tests of single cases find, as a multiple of what they allow."""
    bound = _bound(operator, case.relation)
    exact = memory.exact(case.shape, case.seed)
    if all(quantity != bound.quantity for quantity, _ in exact):
        return Verdict(case.requirement, True, 1, 0)  # not there under these constant axes
    ours = {key: value[0] for key, value in left.items() if key[0] == bound.quantity}
    vendor = memory.vendor(case.shape, case.seed)
    theirs = {key: vendor[key] for key in ours} if ours.keys() <= vendor.keys() else {}
    found = (errors or Errors(bound)).add(ours, exact, theirs, bound.least(case.shape.dtype))
    compared = sum(value.size for value in ours.values())
    assert compared, f"{case.id} compares nothing"
    if found.ratio <= 1:
        return Verdict(case.requirement, True, 1, compared, found.ratio)
    key, index = _worst(ours, exact, found.row)
    values = describe(ours[key][index]), repr(float(exact[key][index]))
    place = f"{_place(key, index, case.shape)}: {found.test}"
    difference = Difference(case.id, case.seed, place, *values, None, 0)
    return Verdict(case.requirement, False, 1, compared, found.ratio, difference)


def _bound(operator: Operator, name: str) -> AccuracyBound:
    return next(b for b in operator.contract.accuracy if f"accuracy_{b.quantity}" == name)


def _worst(rows: Rows, exact: Rows, row: int | None) -> tuple[tuple[str, int], tuple[int, ...]]:
    """Key and index of the largest absolute error: of all rows, or of one, counted with keys in order."""
    found: tuple[float, tuple[str, int], tuple[int, ...]] | None = None
    for key, value in sorted(rows.items()):
        count, at = len(value), row
        if row is not None:
            row -= count
        if not value.size or (at is not None and not 0 <= at < count):
            continue
        error = np.abs(value.astype(np.float64) - exact[key].astype(np.float64))
        error[np.isnan(error)] = math.inf
        if at is not None:
            error[:at] = error[at + 1 :] = -1
        index = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), error.shape))
        if found is None or error[index] > found[0]:
            found = (float(error[index]), key, index)
    assert found is not None
    return found[1], found[2]
