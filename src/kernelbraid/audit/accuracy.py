"""How far results are from float64, beside the vendor's on the same inputs.

What a bound is about is the geometric mean, over rows, of our error over what is allowed for that row: of
every case, and of all cases of a requirement together. A row that is ill-conditioned, where luck decides who
is nearer, counts as one row there and decides no verdict. Means do not see an error that sits in few rows:
the norm of a case and its worst row are bounded too, by a multiple of the vendor's that luck does not reach.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kernelbraid.contract import AccuracyBound
from kernelbraid.ops.problem import Rows

Floats = npt.NDArray[np.float64]
Key = tuple[str, int]

STANDARD_ERRORS = 3.0
"""A mean is above the bound where it is by so many of its standard errors: few rows prove little."""
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
        wanted = exact[key].astype(np.float64)
        given = value.astype(np.float64)
        finite = np.isfinite(wanted)
        if (
            not np.array_equal(given[~finite], wanted[~finite], equal_nan=True)
            or not np.isfinite(given[finite]).all()
        ):
            return math.inf
        distance += float(np.sum((given[finite] - wanted[finite]) ** 2))
        norm += float(np.sum(wanted[finite] ** 2))
    return math.sqrt(distance / norm) if norm else (math.inf if distance else 0.0)


def row_errors(rows: Rows, exact: Rows) -> Floats:
    """Return for every row, keys in order, ||row - exact|| over ||exact||, or over what a row has on average.

    The larger of the two: a row that is nearly zero beside the others may be as far off as they are. A number
    that is finite on one side alone is infinitely far off.
    """
    flat = {key: exact[key].astype(np.float64).reshape(len(rows[key]), -1) for key in sorted(rows)}
    finite = {key: np.where(np.isfinite(wanted), wanted, 0.0) for key, wanted in flat.items()}
    squares = sum(float(np.sum(wanted**2)) for wanted in finite.values())
    mean = squares / max(1, sum(wanted.size for wanted in finite.values()))
    found = [np.zeros(0)]
    for key, wanted in flat.items():
        given = rows[key].astype(np.float64).reshape(wanted.shape)
        same = (given == wanted) | (np.isnan(given) & np.isnan(wanted))
        with np.errstate(invalid="ignore", divide="ignore"):
            difference = np.where(same, 0.0, given - wanted)
            difference[~np.isfinite(difference)] = math.inf
            distance = np.sqrt(np.sum(difference**2, axis=1))
            norm = np.sqrt(np.maximum(np.sum(finite[key] ** 2, axis=1), mean * wanted.shape[1]))
            found.append(np.where(distance > 0, distance / norm, 0.0))
    return np.concatenate(found)


def typical(logarithms: Sequence[Floats]) -> float:
    """The geometric mean of ratios, less what chance may have added; 0 where too few say nothing."""
    logs = np.concatenate([np.zeros(0), *logarithms])
    if logs.size < 2:
        return 0.0
    if not np.isfinite(logs).all():
        return math.inf
    return math.exp(float(np.mean(logs) - STANDARD_ERRORS * np.std(logs, ddof=1) / math.sqrt(logs.size)))


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

    def add(self, rows: Rows, exact: Rows, vendor: Rows) -> Excess:
        """Take a case; return the test that found most of what it allows. The floor alone, if no vendor."""
        bound, ours = self.bound, row_errors(rows, exact)
        theirs = row_errors(vendor, exact) if vendor else np.zeros(ours.size)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = ours / np.maximum(bound.floor, bound.factor * theirs)
        ratios[np.isnan(ratios)] = 0.0  # both infinite
        self._logarithms.append(np.log(np.maximum(ratios, LEAST)))
        tests = [self._mean(self._logarithms[-1:], "this case")]
        if sum(value.size for value in rows.values()) >= FEW:
            whole = relative_error(rows, exact), relative_error(vendor, exact) if vendor else 0.0
            tests.append(self._gross(*whole, "relative error {:.3g} of this case, {:.3g} allowed"))
            row = int(np.argmax(ours))
            worst, luck = (float(ours[row]), float(np.max(theirs))), LUCK if _width(rows) < FEW else 1.0
            tests.append(self._gross(*worst, "relative error {:.3g} of this row, {:.3g} allowed", row, luck))
        return max(tests, key=lambda test: test.ratio)

    def together(self) -> Excess:
        """The mean over all rows of all cases so far."""
        return self._mean(self._logarithms, "all cases")

    def _mean(self, logarithms: Sequence[Floats], of: str) -> Excess:
        found, rows, bound = typical(logarithms), sum(each.size for each in logarithms), self.bound
        allowed = f"{bound.factor:g} times the vendor's or {bound.floor:g}"
        return Excess(found, f"{rows} rows of {of}, on average {found:.3g} of the allowed error, {allowed}")

    def _gross(
        self, ours: float, theirs: float, words: str, row: int | None = None, luck: float = 1.0
    ) -> Excess:
        allowed = luck * self.bound.gross * max(self.bound.floor, theirs)
        return Excess(0.0 if math.isinf(allowed) else ours / allowed, words.format(ours, allowed), row)


def _width(rows: Rows) -> int:
    """Numbers of a row."""
    return max((value.size // len(value) for value in rows.values() if len(value)), default=0)
