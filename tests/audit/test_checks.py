"""Comparison of bits, errors against the reference, and verdicts."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.audit.local import LocalRunner
from tests.audit.toy import ROOT, SUMS, hostile

from kernelbraid.audit.cases import Execution, cases
from kernelbraid.audit.checks import (
    Memory,
    check,
    check_all,
    compare,
    describe,
    gather,
    together,
    ulp_distance,
)
from kernelbraid.audit.drawings import Plan
from kernelbraid.contract import Relation
from kernelbraid.ir.evidence import Level, Verdict
from kernelbraid.ops.problem import Layout, ProblemShape, Program, RowSpan

PLAN = Plan(Level.SCREEN, ({"width": 8},), {"block": 16}, {"query_length": (32,)}, "float32", 7, True)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def requirement(name: str):
    return next(r for r in SUMS.contract.requirements if r.id == f"sums/1/{name}")


# ---- compare


def test_equal_bits_are_equal() -> None:
    array = np.array([[1.0, np.nan], [np.inf, -0.0]], np.float32)
    assert compare(array, array.copy()) == (0, None, None)
    assert compare(array[:0], array[:0]).unequal == 0


def test_zeros_of_other_sign_differ() -> None:
    found = compare(np.array([0.0, 0.0], np.float32), np.array([0.0, -0.0], np.float32))
    assert found == (1, (1,), 0)


def test_nans_of_other_payload_differ() -> None:
    left = np.array([0x7FC00000, 0x7FC00000], np.uint32).view(np.float32)
    right = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert compare(left, right) == (1, (1,), None)


def test_all_unequal_elements_are_counted_and_the_first_is_named() -> None:
    left = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    right = left.copy()
    right[0, 2, 1] = np.nextafter(right[0, 2, 1], np.float32(np.inf))
    right[1, 1, 1] += 1
    assert compare(left, right) == (2, (0, 2, 1), 1)


def test_non_contiguous_arrays_are_compared_by_element() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert compare(array.T, np.ascontiguousarray(array.T)).unequal == 0


@pytest.mark.parametrize("other", [np.zeros((2, 2), np.float32), np.zeros(3, np.float64)])
def test_shapes_and_dtypes_must_match(other: np.ndarray) -> None:
    with pytest.raises(ValueError, match="cannot compare float32"):
        compare(np.zeros(3, np.float32), other)


@given(FLOATS, st.integers(0, 50))
def test_ulp_distance_counts_representable_numbers(value: float, steps: int) -> None:
    left = right = np.float32(value)
    for _ in range(steps):
        right = np.nextafter(right, np.float32(np.inf))
    if np.isfinite(right):
        assert ulp_distance(left, right) == ulp_distance(right, left) == steps


def test_ulp_distance_beside_nan_and_infinity_is_none() -> None:
    assert ulp_distance(np.float32(np.nan), np.float32(1)) is None
    assert ulp_distance(np.float32(1), np.float32(np.inf)) is None


def test_values_are_described_with_their_bits() -> None:
    assert describe(np.float32(-0.5)) == "-0.5 (0xbf000000)"


# ---- gather


def program(*spans: RowSpan) -> Program:
    return Program({}, {}, {}, (), spans)


def test_rows_are_gathered_across_calls_and_axes() -> None:
    outputs = {"out": np.arange(10.0), "lse": np.arange(20.0).reshape(2, 10)}
    found = gather(
        program(
            RowSpan("out", "out", 0, 0, 2, 0, 0),
            RowSpan("lse", "lse", 1, 4, 6, 0, 0),
            RowSpan("out", "out", 0, 7, 8, 0, 2),
            RowSpan("lse", "lse", 1, 0, 1, 0, 2),
        ),
        outputs,
        (3,),
    )
    assert found["out", 0].tolist() == [[0, 1, 7]]
    assert found["lse", 0].tolist() == [[[4, 14], [5, 15], [0, 10]]]


def test_copies_of_a_request_are_kept_apart() -> None:
    spans = [RowSpan("out", "out", 0, start, start + n, 0, row) for start, n, row in COPIES]
    found = gather(program(*spans), {"out": np.array([0, 10, 1, 2, 11, 12])}, (3,))
    assert sorted(map(tuple, found["out", 0].tolist())) == [(0, 1, 2), (10, 11, 12)]


COPIES = ((0, 1, 0), (1, 1, 0), (2, 2, 1), (4, 2, 1))


def test_a_row_that_does_not_come_out_is_an_error() -> None:
    with pytest.raises(AssertionError):
        gather(program(RowSpan("out", "out", 0, 0, 2, 0, 0)), {"out": np.zeros(5)}, (3,))


def test_gathered_rows_are_copies() -> None:
    buffer = np.zeros(3)
    found = gather(program(RowSpan("out", "out", 0, 0, 3, 0, 0)), {"out": buffer}, (3,))
    buffer[:] = 1
    assert not found["out", 0].any()


# ---- memory


def test_equal_executions_run_once_and_repeats_anew(tmp_path: Path) -> None:
    runner = LocalRunner(ROOT, tmp_path)
    memory = Memory(SUMS, runner)
    shape = ProblemShape((("width", 8),), (5, 9), (2, 9))
    layout = Layout("prefill", (0, 1))
    first = memory.rows(shape, 1, Execution(layout))
    assert memory.rows(shape, 1, Execution(layout)) is first
    assert runner.programs == 1
    memory.rows(shape, 1, Execution(layout, repeat=1))
    memory.rows(shape, 1, Execution(layout, "fresh"))
    memory.rows(shape, 2, Execution(layout))
    assert runner.programs == memory.executions == 4


def test_memory_drops_what_was_not_used_lately(tmp_path: Path) -> None:
    runner = LocalRunner(ROOT, tmp_path)
    memory = Memory(SUMS, runner, capacity=1)
    shape = ProblemShape((("width", 8),), (5,), (5,))
    for seed in (1, 2, 1):
        memory.rows(shape, seed, Execution(Layout("prefill", (0,))))
    assert runner.programs == 3


# ---- verdicts


def test_a_good_implementation_of_any_operator_holds_every_requirement(tmp_path: Path) -> None:
    verdicts = list(check_all(SUMS, PLAN, LocalRunner(ROOT, tmp_path, ROOT)))
    assert [v.requirement for v in verdicts] == [r.id for r in SUMS.contract.requirements]
    assert all(v.held and v.cases and v.comparisons for v in verdicts)
    accuracy = [v.error for v in verdicts if "accuracy" in v.requirement]
    assert all(error is not None and 0 < error <= 1 for error in accuracy)


def test_a_verdict_ends_at_the_first_failing_case(tmp_path: Path) -> None:
    broken = ROOT.replace("range(0, len(request), BLOCK)", "range(0, len(request), BLOCK + len(rows))")
    broken = broken.replace("first + BLOCK]", "first + BLOCK + len(rows)]")
    verdict = check(SUMS, requirement("batch/prefill"), PLAN, LocalRunner(broken, tmp_path))
    assert not verdict.held
    found = verdict.difference
    assert found is not None and found.unequal > 0 and found.ulp is not None and found.ulp > 0
    failing = list(cases(SUMS, requirement("batch/prefill"), PLAN))[verdict.cases - 1]
    assert found.case == failing.id and found.seed == failing.seed
    assert check(SUMS, requirement("rerun/prefill"), PLAN, LocalRunner(broken, tmp_path)).held


def test_work_is_done_between_two_runs(tmp_path: Path) -> None:
    """A result that is kept for the next call shows only when another call comes between."""
    body = "calls.append(ends.tolist())\nsame = calls[-1] == calls[max(0, len(calls) - 2)]"
    broken = hostile(body, top="calls = []").text
    broken = broken.replace("* np.float32(scale)", "* np.float32(scale if same else 2 * scale)")
    assert not check(SUMS, requirement("rerun/prefill"), PLAN, LocalRunner(broken, tmp_path)).held


def test_an_inaccurate_implementation_is_rejected_by_the_bound(tmp_path: Path) -> None:
    broken = ROOT.replace("* np.float32(scale)", "* np.float32(scale * 1.0001)")
    runner = LocalRunner(broken, tmp_path)
    verdict = check(SUMS, requirement("accuracy_y/update"), PLAN, runner)
    assert not verdict.held and verdict.error is not None and verdict.error > 1
    assert verdict.difference is not None and "250 rows of this case, on average" in verdict.difference.place
    assert check(SUMS, requirement("batch/update"), PLAN, runner).held


def test_a_deadline_ends_the_check(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="sums/1/rerun/prefill"):
        check(SUMS, requirement("rerun/prefill"), PLAN, LocalRunner(ROOT, tmp_path), time.monotonic() - 1)


def test_agreement_is_asked_only_of_equal_bits_ids(tmp_path: Path) -> None:
    alone = replace(PLAN, root_agrees=False)
    verdict = check(SUMS, requirement("implementations_agree/decode"), alone, LocalRunner(ROOT, tmp_path))
    assert (verdict.held, verdict.cases, verdict.comparisons) == (True, 0, 0)
    checked = [v.requirement for v in check_all(SUMS, alone, LocalRunner(ROOT, tmp_path))]
    assert checked and not any("implementations_agree" in name for name in checked)


def test_a_relation_that_nothing_tests_is_an_error(tmp_path: Path) -> None:
    contract = replace(SUMS.contract, relations=(Relation("unheard_of", "?", ("prefill",)),))
    with pytest.raises(ValueError, match="no test of relation 'unheard_of'"):
        list(check_all(replace(SUMS, contract=contract), PLAN, LocalRunner(ROOT, tmp_path)))


def test_verdicts_of_two_scopes_are_joined() -> None:
    good, bad = Verdict("r", True, 2, 10, 0.5), Verdict("r", False, 1, 5, 2.0)
    assert together(None, good) is good
    assert together(good, bad) == Verdict("r", False, 3, 15, 2.0)
