"""What measurements say about a knob edit elsewhere."""

import math

import pytest

from kernelbraid.contract import KnobKind, KnobValue
from kernelbraid.search.proposers.edits import DeclaredKnob
from kernelbraid.search.proposers.effects import (
    PRIOR_NUMERIC,
    PRIOR_SCHEDULE,
    PRIOR_VARIANT,
    SURROUNDINGS,
    Effects,
    Point,
)

CHOICES: dict[str, tuple[KnobValue, ...]] = {
    "TILE": (1, 4, 16, 64),
    "BLOCK": (32, 64, 128),
    "CODE": ("plain", "fast", "other"),
}
KINDS = {"TILE": KnobKind.SCHEDULE, "BLOCK": KnobKind.NUMERIC, "CODE": KnobKind.SCHEDULE}


def point(skeleton: str = "s", a: float = 0.0, b: float = 0.0, **settings: KnobValue) -> Point:
    """A point with log ratios `a` and `b` on two workloads of equal share."""
    found: dict[str, KnobValue] = {"TILE": 4, "BLOCK": 64, "CODE": "plain", **settings}
    knobs = tuple(DeclaredKnob(name, KINDS[name], CHOICES[name], found[name], 0, 0) for name in CHOICES)
    sha = f"{skeleton}{sorted(found.items())}"
    shares = {"a": 0.5, "b": 0.5}
    return Point(sha, skeleton, knobs, found, {"a": a, "b": b}, shares, (a + b) / 2, 0.01)


def estimated(parent: Point, name: str, value: KnobValue, *others: Point) -> float:
    knob = next(each for each in parent.knobs if each.name == name)
    return Effects((parent, *others)).estimate(parent, knob, value).gain


def test_without_measurements_variants_come_first_and_near_values_before_far_ones() -> None:
    root = point()
    assert estimated(root, "CODE", "fast") == PRIOR_VARIANT
    assert estimated(root, "TILE", 16) == estimated(root, "TILE", 1) == PRIOR_SCHEDULE
    assert estimated(root, "TILE", 64) < PRIOR_SCHEDULE
    assert estimated(root, "BLOCK", 32) == PRIOR_NUMERIC
    assert PRIOR_VARIANT > PRIOR_SCHEDULE > PRIOR_NUMERIC


def test_a_measured_edit_is_weighed_by_the_parents_shares() -> None:
    root, fast = point(), point(CODE="fast", a=-0.4)
    expected = -math.log(0.5 * math.exp(-0.4) + 0.5)
    assert estimated(root, "CODE", "fast", fast) == pytest.approx(expected)
    assert estimated(fast, "CODE", "plain", root) == pytest.approx(-math.log(0.5 * math.exp(0.4) + 0.5))


def test_an_effect_counts_less_in_other_surroundings_and_the_nearest_one_is_taken() -> None:
    root, fast = point(), point(CODE="fast", a=-0.4, b=-0.4)
    elsewhere = point(TILE=16)
    assert estimated(elsewhere, "CODE", "fast", root, fast) == pytest.approx(0.4 * SURROUNDINGS)
    near = point(TILE=16, BLOCK=128)
    near_fast = point(TILE=16, BLOCK=128, CODE="fast", a=-0.1, b=-0.1)
    found = estimated(elsewhere, "CODE", "fast", root, fast, near, near_fast)
    assert found in (pytest.approx(0.4 * SURROUNDINGS), pytest.approx(0.1 * SURROUNDINGS))
    beside = point(TILE=16, BLOCK=128, a=0.0)
    assert estimated(beside, "CODE", "fast", root, fast, near_fast) == pytest.approx(0.1)


def test_neighbours_of_gains_promise_more_and_neighbours_of_losses_nothing() -> None:
    root = point()
    better, worse = point(TILE=16, a=-0.2, b=-0.2), point(TILE=16, a=0.2, b=0.2)
    assert estimated(root, "TILE", 64, better) == pytest.approx(0.1)
    assert estimated(root, "TILE", 64, worse) == pytest.approx(-0.2)
    assert 0 < estimated(root, "TILE", 1, worse) < PRIOR_SCHEDULE


def test_other_variants_of_a_knob_that_matters_stay_worth_trying() -> None:
    root, slow = point(), point(CODE="fast", a=0.3, b=0.3)
    assert 0 < estimated(root, "CODE", "other", slow) <= PRIOR_VARIANT


def test_sources_that_differ_in_more_than_knobs_say_nothing_about_each_other() -> None:
    fast = point("t", CODE="fast", a=-0.4, b=-0.4)
    assert estimated(point(), "CODE", "fast", fast, point("t")) == PRIOR_VARIANT


def test_an_estimate_tells_its_grounds() -> None:
    root, fast = point(), point(CODE="fast", a=-0.4)
    knob = next(each for each in root.knobs if each.name == "CODE")
    found = Effects((root, fast)).estimate(root, knob, "fast")
    assert found.evidence == (root.sha256, fast.sha256)
    assert found.workloads == ("a",)
    assert found.error == pytest.approx(math.hypot(0.01, 0.01))
    assert "-16" in found.grounds
