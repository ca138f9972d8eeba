"""Errors to float64: what the means, the norm of a case and its worst row reject, and what luck does not."""

import math
from pathlib import Path

import numpy as np
import pytest
from tests.audit.local import LocalRunner
from tests.audit.test_checks import PLAN, ROOT, requirement
from tests.audit.toy import SUMS

from kernelbraid.audit.accuracy import Errors, relative_error, row_errors, typical
from kernelbraid.audit.checks import check
from kernelbraid.contract import AccuracyBound
from kernelbraid.ops.problem import Rows

BOUND = AccuracyBound("y", 1.25, 1e-7, ("update",))
ROUNDING = 2e-7


def drawn(seed: int = 0, rows: int = 400, width: int = 32) -> tuple[Rows, Rows, Rows]:
    """Rows with errors of an implementation as good as the vendor, the exact ones, and the vendor's."""
    rng = np.random.default_rng(seed)
    exact = rng.standard_normal((rows, width))

    def erring() -> Rows:
        return {("y", 0): exact * (1 + ROUNDING * rng.standard_normal(exact.shape))}

    return erring(), {("y", 0): exact}, erring()


def spoiled(rows: Rows, exact: Rows, factor: float, where: slice) -> Rows:
    """The same with errors so many times as large in some rows."""
    key = ("y", 0)
    changed = rows[key].copy()
    changed[where] = exact[key][where] + factor * (rows[key][where] - exact[key][where])
    return {key: changed}


def test_an_implementation_like_the_vendor_holds_every_test() -> None:
    errors = Errors(BOUND)
    for seed in range(20):
        assert errors.add(*drawn(seed)).ratio < 0.95
    assert 0.75 < errors.together().ratio < 0.85


@pytest.mark.parametrize("seed", range(5))
def test_rows_where_luck_decides_do_not_decide(seed: int) -> None:
    """Errors of few rows are larger than all others: norms differ widely from the vendor's, means do not."""
    rng = np.random.default_rng(seed)
    rows, exact, vendor = drawn(seed)
    for each in (rows, vendor):
        each["y", 0] += 3e-6 * rng.standard_normal((400, 1)) * (rng.random((400, 1)) < 0.01)
    errors = Errors(BOUND)
    assert errors.add(rows, exact, vendor).ratio < 1
    assert errors.together().ratio < 0.9


def test_an_error_of_all_rows_is_rejected_though_no_norm_is_gross() -> None:
    rows, exact, vendor = drawn()
    found = Errors(BOUND).add(spoiled(rows, exact, 1.4, slice(None)), exact, vendor)
    assert found.ratio > 1 and "400 rows of this case, on average" in found.test and found.row is None


def test_an_error_of_half_of_the_rows_is_rejected() -> None:
    rows, exact, vendor = drawn()
    assert Errors(BOUND).add(spoiled(rows, exact, 2, slice(0, 200)), exact, vendor).ratio > 1


def test_exact_rows_do_not_make_up_for_wrong_ones() -> None:
    """A source that computes half of its rows in float64 gains no room for errors in the others."""
    rows, exact, vendor = drawn()
    better = spoiled(rows, exact, 0, slice(0, 200))
    assert Errors(BOUND).add(spoiled(better, exact, 6, slice(200, 400)), exact, vendor).ratio > 1


def test_an_error_in_one_row_is_rejected() -> None:
    rows, exact, vendor = drawn()
    found = Errors(BOUND).add(spoiled(rows, exact, 12, slice(123, 124)), exact, vendor)
    assert found.ratio > 1 and "of this row" in found.test and found.row == 123


def test_an_error_in_one_number_is_rejected() -> None:
    rows, exact, vendor = drawn(width=1)
    worst = int(np.argmax(np.abs(rows["y", 0] - exact["y", 0])))
    assert Errors(BOUND).add(spoiled(rows, exact, 10, slice(worst, worst + 1)), exact, vendor).ratio < 1
    assert Errors(BOUND).add(spoiled(rows, exact, 30, slice(worst, worst + 1)), exact, vendor).ratio > 1


def test_an_error_of_some_rows_that_no_row_shows_is_rejected_by_the_norm() -> None:
    """The vendor has a bad row: ours may have as bad ones, but not many."""
    rows, exact, vendor = drawn()
    vendor = spoiled(vendor, exact, 8, slice(0, 1))
    found = Errors(BOUND).add(spoiled(rows, exact, 20, slice(0, 40)), exact, vendor)
    assert found.ratio > 1 and "of this case" in found.test


def test_small_excesses_show_over_all_cases() -> None:
    """What one case of few rows cannot prove, all of them do."""
    errors, ratios = Errors(BOUND), []
    for seed in range(40):
        rows, exact, vendor = drawn(seed, rows=20, width=4)
        ratios.append(errors.add(spoiled(rows, exact, 1.8, slice(None)), exact, vendor).ratio)
    assert np.median(ratios) < 1
    found = errors.together()
    assert found.ratio > 1 and "cases, on average" in found.test


def test_few_bad_rows_of_every_case_show_in_the_norms_of_all() -> None:
    """No row and no case is gross, and the mean over rows hardly moves: the norms of the cases tell."""
    errors = Errors(BOUND)
    for seed in range(10):
        rows, exact, vendor = drawn(seed)
        assert errors.add(spoiled(rows, exact, 2.5, slice(0, 80)), exact, vendor).ratio < 1
    found = errors.together()
    assert found.ratio > 1 and "10 cases, on average" in found.test


def test_a_single_number_is_left_to_the_means() -> None:
    rows, exact = {("y", 0): np.array([[1.00001]])}, {("y", 0): np.array([[1.0]])}
    errors = Errors(BOUND)
    assert errors.add(rows, exact, exact).ratio == 0
    for _ in range(3):
        assert errors.add(rows, exact, exact).ratio == 0
    assert errors.together().ratio == pytest.approx(100, rel=0.01)


def test_without_a_vendor_the_floor_is_the_bound() -> None:
    rows, exact, _ = drawn()
    assert Errors(BOUND).add(rows, exact, {}).ratio > 1
    assert Errors(AccuracyBound("y", 1.0, 1e-6, ("update",))).add(rows, exact, {}).ratio < 1


def test_not_a_number_is_infinitely_far_off() -> None:
    rows, exact, vendor = drawn()
    rows["y", 0][7, 3] = np.nan
    found = Errors(BOUND).add(rows, exact, vendor)
    assert math.isinf(found.ratio)


def test_means_are_of_rows_not_of_numbers() -> None:
    exact = {("y", 0): np.array([[3.0, 4.0], [0.0, 0.0]])}
    rows = {("y", 0): np.array([[3.0, 4.5], [0.0, 1.0]])}
    average = math.sqrt(25 / 4)
    assert row_errors(rows, exact) == pytest.approx([0.1, 1 / (average * math.sqrt(2))])
    assert typical([np.log([0.5]), np.log([0.5])]) == pytest.approx(0.5)
    assert typical([np.log([0.5])]) == typical([]) == 0


def test_a_verdict_tells_of_the_mean_over_all_cases(tmp_path: Path) -> None:
    """Errors that alternate between cases: none is wrong enough, all together are."""
    broken = ROOT.replace("* np.float32(scale)", "* np.float32(scale * 1.0000022)")
    verdict = check(SUMS, requirement("accuracy_y/update"), PLAN, LocalRunner(broken, tmp_path))
    assert not verdict.held and verdict.error is not None and 1 < verdict.error < 3
    assert verdict.difference is not None and "on average" in verdict.difference.place


# ---- norms


def test_relative_error_is_taken_over_all_rows() -> None:
    exact = {("y", 0): np.array([3.0, 4.0]), ("y", 1): np.array([0.0])}
    rows = {("y", 0): np.array([3.0, 4.5], np.float32), ("y", 1): np.array([0.0], np.float32)}
    assert relative_error(rows, exact) == pytest.approx(0.1)


def test_relative_error_needs_the_same_places_to_be_finite() -> None:
    exact = {("y", 0): np.array([1.0, np.nan, -np.inf])}
    assert relative_error({("y", 0): np.array([1.0, np.nan, -np.inf], np.float32)}, exact) == 0
    for wrong in ([np.nan, np.nan, -np.inf], [1.0, 2.0, -np.inf], [1.0, np.nan, np.inf]):
        assert relative_error({("y", 0): np.array(wrong, np.float32)}, exact) == np.inf


def test_relative_error_of_an_empty_norm() -> None:
    zero = {("y", 0): np.zeros(2)}
    assert relative_error({("y", 0): np.zeros(2, np.float32)}, zero) == 0
    assert relative_error({("y", 0): np.ones(2, np.float32)}, zero) == np.inf
