"""How far results are from float64, beside the vendor's on the same inputs.

What a bound is about is the geometric mean of our error over what is allowed: over the rows of every case,
over the rows of all cases of a requirement together, and over the norms of these cases. A row that is
ill-conditioned, where luck decides who is nearer, counts as one row there and decides no verdict. Means do
not see an error that sits in few rows of few cases: the norm of each case and its worst row are bounded too,
by a multiple of the vendor's that luck does not reach.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kernelbraid.contract import AccuracyBound
from kernelbraid.ops.problem import Array, Rows

Floats = npt.NDArray[np.float64]
Key = tuple[str, int]

PIECE = 1 << 20
"""Numbers that are compared at a time."""
STANDARD_ERRORS = 3.0
"""A mean is above the bound where it is by so many of its standard errors, of many rows."""
FEW_ROWS = 40.0
"""Of n rows by 1 + FEW_ROWS / n^2 times as many: about Student's t at the same chance."""
LEAST = 0.25
"""No row counts as less of what is allowed: exact rows make up for little elsewhere."""
FEW = 16
"""A case of fewer numbers has neither a norm nor a worst row that means much: only the means judge it."""
LUCK = 4.0
"""A row of fewer numbers than FEW may be so many times as far off as others: one number has more luck."""


def relative_error(rows: Rows, exact: Rows) -> float:
    """Return ||rows - exact|| / ||exact|| over all given rows; infinite where only one of them is finite."""
    distance = norm = 0.0
    for key, value in rows.items():
        flat, other = exact[key].reshape(-1), value.reshape(-1)
        assert exact[key].shape == value.shape, (key, exact[key].shape, value.shape)
        for at in range(0, flat.size, PIECE):
            wanted = flat[at : at + PIECE].astype(np.float64)
            given = other[at : at + PIECE].astype(np.float64)
            finite = np.isfinite(wanted)
            if not finite.all():
                if not np.array_equal(given[~finite], wanted[~finite], equal_nan=True):
                    return math.inf
                given, wanted = given[finite], wanted[finite]
            if not np.isfinite(given).all():
                return math.inf
            distance += float(np.sum((given - wanted) ** 2))
            norm += float(np.sum(wanted**2))
    return math.sqrt(distance / norm) if norm else (math.inf if distance else 0.0)


def row_errors(rows: Rows, exact: Rows) -> Floats:
    """Return for every row, keys in order, ||row - exact|| over ||exact||, or over what a row has on average.

    The larger of the two: a row that is nearly zero beside the others may be as far off as they are. A number
    that is finite on one side alone is infinitely far off.
    """
    squares = numbers = 0.0
    for key in rows:
        for wanted, _ in _pieces(exact[key], exact[key]):
            squares += float(np.sum(np.where(np.isfinite(wanted), wanted, 0.0) ** 2))
            numbers += wanted.size
    mean = squares / max(1.0, numbers)
    found = [np.zeros(0)]
    for key in sorted(rows):
        for wanted, given in _pieces(exact[key], rows[key]):
            same = (given == wanted) | (np.isnan(given) & np.isnan(wanted))
            finite = np.where(np.isfinite(wanted), wanted, 0.0)
            with np.errstate(invalid="ignore", divide="ignore"):
                difference = np.where(same, 0.0, given - wanted)
                difference[~np.isfinite(difference)] = math.inf
                distance = np.sqrt(np.sum(difference**2, axis=1))
                norm = np.sqrt(np.maximum(np.sum(finite**2, axis=1), mean * wanted.shape[1]))
                found.append(np.where(distance > 0, distance / norm, 0.0))
    return np.concatenate(found)


def _pieces(exact: Array, rows: Array) -> Iterator[tuple[Floats, Floats]]:
    """Rows of both in float64, a few at a time: a model's head is too large to be taken as one."""
    count = len(rows)
    flat, other = exact.reshape(count, -1), rows.reshape(count, -1)
    step = max(1, PIECE // max(1, flat.shape[1]))
    for at in range(0, count, step):
        yield flat[at : at + step].astype(np.float64), other[at : at + step].astype(np.float64)


def typical(logarithms: Sequence[Floats]) -> float:
    """The geometric mean of ratios, less what chance may have added; 0 where too few say nothing."""
    logs = np.concatenate([np.zeros(0), *logarithms])
    if logs.size < 2:
        return 0.0
    if not np.isfinite(logs).all():
        return math.inf
    errors = STANDARD_ERRORS * (1 + FEW_ROWS / logs.size**2)
    return math.exp(float(np.mean(logs) - errors * np.std(logs, ddof=1) / math.sqrt(logs.size)))


@dataclass(frozen=True, slots=True)
class Excess:
    """How much of what one test allows was found; above 1 it fails."""

    ratio: float
    test: str
    """What was found and allowed, in words."""
    row: int | None = None
    """Number of the row, keys in order, where it is about one."""


@dataclass(slots=True)
class Errors:
    """Errors of the cases of one requirement, as they come, under its bound."""

    bound: AccuracyBound
    _logarithms: list[Floats] = field(default_factory=list)
    _norms: list[Floats] = field(default_factory=list)

    def add(self, rows: Rows, exact: Rows, vendor: Rows, floor: float | None = None) -> Excess:
        """Take a case; return the test that found most of what it allows.

        Args:
            rows: ours.
            exact: float64's.
            vendor: the vendor's; the floor alone is allowed, if there are none.
            floor: of this case, by default the bound's.
        """
        bound, ours = self.bound, row_errors(rows, exact)
        floor = bound.floor if floor is None else floor
        theirs = row_errors(vendor, exact) if vendor else np.zeros(ours.size)
        self._logarithms.append(self._counted(ours, theirs, floor))
        tests = [self._mean(self._logarithms[-1:], "rows of this case")]
        if sum(value.size for value in rows.values()) >= FEW:
            whole = relative_error(rows, exact), relative_error(vendor, exact) if vendor else 0.0
            tests.append(self._gross(floor, *whole, "relative error {:.3g} of this case, {:.3g} allowed"))
            self._norms.append(self._counted(np.array(whole[:1]), np.array(whole[1:]), floor))
            row = int(np.argmax(ours))
            worst, luck = (float(ours[row]), float(np.max(theirs))), LUCK if _width(rows) < FEW else 1.0
            words = "relative error {:.3g} of this row, {:.3g} allowed"
            tests.append(self._gross(floor, *worst, words, row, luck))
        return max(tests, key=lambda test: test.ratio)

    def together(self) -> Excess:
        """The mean over all rows of all cases so far, or over the norms of these cases."""
        means = self._mean(self._logarithms, "rows of all cases"), self._mean(self._norms, "cases")
        return max(means, key=lambda mean: mean.ratio)

    def _counted(self, ours: Floats, theirs: Floats, floor: float) -> Floats:
        """Logarithms of errors over what is allowed, as the means take them."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = ours / np.maximum(floor, self.bound.factor * theirs)
        ratios[np.isnan(ratios)] = 0.0  # both infinite
        return np.log(np.maximum(ratios, LEAST))

    def _mean(self, logarithms: Sequence[Floats], of: str) -> Excess:
        found, count, bound = typical(logarithms), sum(each.size for each in logarithms), self.bound
        least = f"{bound.half_ulps:g} half-ulps" if bound.half_ulps else f"{bound.floor:g}"
        allowed = f"{bound.factor:g} times the vendor's or {least}"
        return Excess(found, f"{count} {of}, on average {found:.3g} of the allowed error, {allowed}")

    def _gross(
        self, floor: float, ours: float, theirs: float, words: str, row: int | None = None, luck: float = 1.0
    ) -> Excess:
        allowed = luck * self.bound.gross * max(floor, theirs)
        return Excess(0.0 if math.isinf(allowed) else ours / allowed, words.format(ours, allowed), row)


def _width(rows: Rows) -> int:
    """Numbers of a row."""
    return max((value.size // len(value) for value in rows.values() if len(value)), default=0)
