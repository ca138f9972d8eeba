"""What the measurements of tried implementations say about a knob edit: an estimate with its grounds.

Two implementations that differ in one knob alone give that knob's effect on every workload. An estimate for
another parent takes the effect seen in the most similar surroundings and weighs it by the parent's own shares
of time.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kernelbraid.contract import KnobKind, KnobValue
from kernelbraid.search.proposers.edits import DeclaredKnob

SURROUNDINGS = 0.85
"""An effect seen in other surroundings counts this much for each other knob that differs."""
FURTHER = 0.5
"""A gain is expected to go on by this part when the value moves further the same way."""
PRIOR_VARIANT = 0.12
PRIOR_SCHEDULE = 0.05
PRIOR_NUMERIC = 0.04
"""Expected gain (natural log) of a knob that no measurement has moved: variants first."""


@dataclass(frozen=True, slots=True)
class Point:
    """An accepted implementation as its knobs and its measurements describe it."""

    sha256: str
    skeleton: str
    knobs: tuple[DeclaredKnob, ...]
    settings: Mapping[str, KnobValue]
    log_ratios: Mapping[str, float]
    """Workload -> log of its latency over the root's."""
    shares: Mapping[str, float]
    """Workload -> its share of this implementation's aggregate latency."""
    log_objective: float
    """Log of its aggregate latency over the root's."""
    error: float
    """Standard error of it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected gain of an edit, in natural logarithm of aggregate latency, and where it comes from."""

    gain: float
    grounds: str
    evidence: tuple[str, ...] = ()
    """SHA-256 of the implementations whose measurements it rests on."""
    workloads: tuple[str, ...] = ()
    """Workloads that the knob was seen to move, most first."""
    error: float | None = None
    """Standard error of the gain where this very edit was measured, on some parent; else None."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Points equal in everything but one knob."""

    surroundings: Mapping[str, KnobValue]
    points: Mapping[KnobValue, Point]


class Effects:
    """Single-knob effects among a set of points."""

    def __init__(self, points: Iterable[Point]) -> None:
        buckets: dict[tuple[str, str, tuple[tuple[str, KnobValue], ...]], dict[KnobValue, Point]] = {}
        for point in points:
            settings = tuple(sorted(point.settings.items()))
            for place, (name, value) in enumerate(settings):
                others = settings[:place] + settings[place + 1 :]
                buckets.setdefault((point.skeleton, name, others), {}).setdefault(value, point)
        self._groups: dict[tuple[str, str], list[_Group]] = {}
        for (skeleton, name, others), members in buckets.items():
            if len(members) > 1:
                self._groups.setdefault((skeleton, name), []).append(_Group(dict(others), members))

    def estimate(self, parent: Point, knob: DeclaredKnob, value: KnobValue) -> Estimate:
        """Return what to expect of setting one knob of `parent` to `value`."""
        groups = [g for g in self._groups.get((parent.skeleton, knob.name), []) if knob.value in g.points]
        groups.sort(key=lambda g: _distance(g.surroundings, parent.settings))
        for group in groups:
            if value in group.points:
                return _seen(parent, knob, group, value)
        if groups:
            return _extrapolated(parent, knob, groups[0], value)
        return _untried(knob, value)


def gain(parent: Point, changes: Mapping[str, float]) -> float:
    """Return the gain in log aggregate latency of `parent` for these changes of log latency by workload."""
    after = math.fsum(share * math.exp(changes.get(name, 0.0)) for name, share in parent.shares.items())
    return -math.log(after)


def _changes(group: _Group, before: KnobValue, after: KnobValue) -> dict[str, float]:
    old, new = group.points[before].log_ratios, group.points[after].log_ratios
    return {name: new[name] - old[name] for name in new if name in old}


def _seen(parent: Point, knob: DeclaredKnob, group: _Group, value: KnobValue) -> Estimate:
    changes = _changes(group, knob.value, value)
    away = _distance(group.surroundings, parent.settings)
    expected = gain(parent, changes) * SURROUNDINGS**away
    evidence = (group.points[knob.value].sha256, group.points[value].sha256)
    grounds = f"the same edit changed the aggregate by {_percent(expected)} on {evidence[0][:12]}"
    error = math.hypot(group.points[knob.value].error, group.points[value].error)
    return Estimate(expected, grounds, evidence, _moved(changes), error)


def _extrapolated(parent: Point, knob: DeclaredKnob, group: _Group, value: KnobValue) -> Estimate:
    """An untried value of a knob that was moved: further along the best direction, or against it."""
    tried = {
        each: gain(parent, _changes(group, knob.value, each)) for each in group.points if each != knob.value
    }
    best = max(tried, key=lambda each: tried[each])
    moved = _moved(_changes(group, knob.value, best))
    evidence = (group.points[knob.value].sha256, group.points[best].sha256)
    if knob.selects_variant:
        size = max(abs(each) for each in tried.values())
        grounds = f"{best} changed the aggregate by {_percent(tried[best])}; this variant is untried"
        return Estimate(min(PRIOR_VARIANT, size) * FURTHER, grounds, evidence, moved)
    between = [each for each in tried if _between(knob, each, value)]
    if between:
        near = max(between, key=lambda each: abs(knob.choices.index(each) - knob.choices.index(knob.value)))
        factor = FURTHER if tried[near] > 0 else 1.0
        grounds = f"{near} on the way changed the aggregate by {_percent(tried[near])}"
        return Estimate(tried[near] * factor, grounds, (evidence[0], group.points[near].sha256), moved)
    against = FURTHER * max(abs(each) for each in tried.values())
    prior = PRIOR_NUMERIC if knob.kind is KnobKind.NUMERIC else PRIOR_SCHEDULE
    grounds = f"the other direction changed the aggregate by {_percent(tried[best])}"
    return Estimate(min(prior, against) * FURTHER, grounds, evidence, moved)


def _untried(knob: DeclaredKnob, value: KnobValue) -> Estimate:
    if knob.selects_variant:
        return Estimate(PRIOR_VARIANT, "a written-out variant that no measurement has tried")
    steps = abs(knob.choices.index(value) - knob.choices.index(knob.value))
    prior = PRIOR_NUMERIC if knob.kind is KnobKind.NUMERIC else PRIOR_SCHEDULE
    return Estimate(prior / (1 + 0.25 * (steps - 1)), f"a {knob.kind} knob that no measurement has moved")


def _between(knob: DeclaredKnob, middle: KnobValue, end: KnobValue) -> bool:
    """Whether `middle` lies on the way from the knob's value to `end`, in the order of its choices."""
    start, at, stop = (knob.choices.index(each) for each in (knob.value, middle, end))
    return start < at < stop or stop < at < start


def _distance(one: Mapping[str, KnobValue], other: Mapping[str, KnobValue]) -> int:
    return sum(other.get(name) != value for name, value in one.items())


def _moved(changes: Mapping[str, float]) -> tuple[str, ...]:
    """Workloads whose latency changed by more than 1%, most first."""
    moved = [name for name, change in changes.items() if abs(change) > 0.01]
    return tuple(sorted(moved, key=lambda name: (-abs(changes[name]), name)))


def _percent(expected: float) -> str:
    return f"{100 * (math.exp(-expected) - 1):+.1f}%"
