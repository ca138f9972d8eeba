"""What latencies prove: pure functions over the means of fresh processes.

The unit of replication is a process, not a call: processes that run identical source differ by more than
their calls do. Every statement is about log ratios of two implementations that were measured interleaved,
process by process.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from kernelbraid.ir.evidence import Measurement

GAIN = 0.995
"""A promotion needs the upper bound of the aggregate ratio to the incumbent below this."""
CONFIDENCE = 0.999
"""One-sided confidence of that bound."""
LEAST_ROUNDS = 3
"""Processes of each side below which nothing is proven."""
MOST_ROUNDS = 8
"""Processes of each side after which an undecided candidate is left undecided."""
TOO_SLOW = 4.0
"""A workload of which every batch of a round takes this many times the root's ends the timing."""
HOPELESS = (1.02, 1.0)
"""After one round, and after two: a larger ratio to the incumbent ends the timing."""
BEHIND = (1.08, 1.03)
"""The same for the ratio to a faster candidate: processes differ by percents, and it may still fail."""


class Step(StrEnum):
    """What to do after a round of processes."""

    CONTINUE = "continue"
    PROVEN = "proven"
    """The promotion rule's bound holds."""
    HOPELESS = "hopeless"
    """Stopped before the least number of rounds: a promotion is out of reach, or another one comes first."""
    UNDECIDED = "undecided"
    """The rest of the rounds could not prove a gain, or would prove one that another candidate exceeds."""


@dataclass(frozen=True, slots=True)
class Sequential:
    """When to go on timing.

    Looks at the bound after 3, 4, ... 8 processes: under identical sources each look errs with probability at
    most 0.001 (less, since the bound must pass 0.995 and not 1), so that all six together stay below 1%.
    """

    least: int = LEAST_ROUNDS
    most: int = MOST_ROUNDS
    gain: float = GAIN
    confidence: float = CONFIDENCE
    hopeless: tuple[float, ...] = HOPELESS
    behind: tuple[float, ...] = BEHIND
    too_slow: float = TOO_SLOW

    def after(
        self, candidate_ms: Sequence[float], incumbent_ms: Sequence[float], to_beat: float = 1.0
    ) -> Step:
        """Decide from one aggregate a process of each side, in the order of measurement.

        A candidate above `to_beat`, a share of the incumbent's time, is behind another one: more rounds could
        prove a gain that nobody would promote.
        """
        rounds = len(candidate_ms)
        ratio, upper, _ = bound(candidate_ms, incumbent_ms, self.confidence)
        if rounds < self.least:
            return Step.HOPELESS if self._out_of_reach(rounds, ratio, to_beat) else Step.CONTINUE
        if upper < self.gain:
            return Step.PROVEN
        at_best = self._at_best(candidate_ms, incumbent_ms)
        if rounds >= self.most or at_best >= self.gain or ratio > to_beat:
            return Step.UNDECIDED
        return Step.CONTINUE

    def _out_of_reach(self, rounds: int, ratio: float, to_beat: float) -> bool:
        if rounds > len(self.hopeless):
            return False
        behind = to_beat < 1 and ratio > self.behind[rounds - 1] * to_beat
        return behind or ratio > self.hopeless[rounds - 1]

    def _at_best(self, candidate_ms: Sequence[float], incumbent_ms: Sequence[float]) -> float:
        """The upper bound after the last round if the remaining processes look like those so far."""
        mean, spread = _log_ratios(candidate_ms, incumbent_ms)
        quantile = student_quantile(self.confidence, self.most - 1)
        return _exp(mean + quantile * spread / math.sqrt(self.most))


def bound(
    candidate_ms: Sequence[float], baseline_ms: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """Return (ratio, upper, lower): the ratio candidate / baseline and its one-sided bounds.

    Args:
        candidate_ms: one mean a process, milliseconds.
        baseline_ms: as many; entry i was measured interleaved with the candidate's entry i.
        confidence: of each bound by itself.

    One pair gives a ratio with bounds infinity and 0.

    Raises:
        ValueError: no pair, unequal numbers, or a time that is not positive.
    """
    mean, spread = _log_ratios(candidate_ms, baseline_ms)
    if len(candidate_ms) < 2:
        return math.exp(mean), math.inf, 0.0
    width = _width(len(candidate_ms), spread, confidence)
    return math.exp(mean), _exp(mean + width), _exp(mean - width)


def smallest_gain(
    candidate_ms: Sequence[float],
    baseline_ms: Sequence[float],
    confidence: float = CONFIDENCE,
    gain: float = GAIN,
) -> float:
    """Return the smallest gain, as a share of the baseline, that data with this noise could have proven.

    A candidate whose mean ratio is 1 minus that has its upper bound at `gain`. One pair proves nothing: 1.0.
    """
    _, spread = _log_ratios(candidate_ms, baseline_ms)
    if len(candidate_ms) < 2:
        return 1.0
    return 1.0 - gain * math.exp(-_width(len(candidate_ms), spread, confidence))


def totals(weights: Sequence[float], means_ms: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return each process's aggregate, `sum_w weight * ms`, from one sequence of process means a workload."""
    rows = zip(*means_ms, strict=True)
    return tuple(math.fsum(w * ms for w, ms in zip(weights, row, strict=True)) for row in rows)


def within_limits(measurements: Sequence[Measurement]) -> bool:
    """Whether no workload's mean ratio to the root exceeds its limit."""
    ratios = ((bound(each.candidate_ms, each.root_ms)[0], each.limit) for each in measurements)
    return all(ratio <= limit for ratio, limit in ratios)


def _log_ratios(candidate_ms: Sequence[float], baseline_ms: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation of the log ratios."""
    if not candidate_ms or len(candidate_ms) != len(baseline_ms):
        raise ValueError("latencies need one mean a process of both sides, and at least one")
    if not all(0 < ms < math.inf for ms in (*candidate_ms, *baseline_ms)):
        raise ValueError("latencies must be positive and finite")
    logs = [math.log(c / b) for c, b in zip(candidate_ms, baseline_ms, strict=True)]
    mean = math.fsum(logs) / len(logs)
    if len(logs) == 1:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (len(logs) - 1))


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _width(pairs: int, spread: float, confidence: float) -> float:
    return student_quantile(confidence, pairs - 1) * spread / math.sqrt(pairs)


@lru_cache(maxsize=256)
def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t distribution, for a probability from 0.5 to below 1, by bisection."""
    if not 0.5 <= probability < 1 or freedom < 1:
        raise ValueError(f"no quantile for probability {probability} and {freedom} degrees of freedom")
    low, high = 0.0, 1.0
    while _student_distribution(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        if _student_distribution(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return high


def _student_distribution(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0, by the finite series for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1 + odd, 2):
        term *= square * (k - 1) / k
        total += term
    if odd:
        return 0.5 + (angle + math.sin(angle) * total) / math.pi
    return 0.5 + math.sin(angle) * total / 2
