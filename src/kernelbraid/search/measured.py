"""Ratios of latencies read from evidence: paired over fresh processes, to the incumbent or to the root."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kernelbraid.audit import timing
from kernelbraid.ir.evidence import AuditEvidence, Measurement

PROTOCOL = "cold"
"""Search and promotion read cold measurements alone."""
UNKNOWN_ERROR = 0.02
"""Taken for the standard error (natural log) where one process alone was timed."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of latencies over process means, with one-sided bounds."""

    ratio: float
    upper: float
    lower: float


def cold(evidence: AuditEvidence) -> tuple[Measurement, ...]:
    return tuple(each for each in evidence.measurements if each.protocol == PROTOCOL)


def processes(evidence: AuditEvidence) -> int:
    """Return how many processes of each side were timed."""
    return min((len(each.candidate_ms) for each in cold(evidence)), default=0)


def totals(measurements: Sequence[Measurement], whose: str) -> tuple[float, ...]:
    """Return `sum_w weight * ms` of each process, milliseconds; `whose` is candidate, root or incumbent."""
    weights = [each.weight for each in measurements]
    return timing.totals(weights, [getattr(each, f"{whose}_ms") for each in measurements])


def aggregate(
    evidence: AuditEvidence, against: str = "incumbent", confidence: float = timing.CONFIDENCE
) -> Ratio:
    """Return the ratio of the candidate's aggregate latency to that of the incumbent or the root."""
    measurements = cold(evidence)
    return Ratio(*timing.bound(totals(measurements, "candidate"), totals(measurements, against), confidence))


def workload_ratio(
    measurement: Measurement, against: str = "root", confidence: float = timing.CONFIDENCE
) -> Ratio:
    """Return the ratio of the candidate's latency on one workload to that of the root or the incumbent."""
    return Ratio(*timing.bound(measurement.candidate_ms, getattr(measurement, f"{against}_ms"), confidence))


def provable(evidence: AuditEvidence) -> float | None:
    """Return the smallest relative gain this evidence could have proven; None with too few processes."""
    if processes(evidence) < timing.LEAST_ROUNDS:
        return None
    measurements = cold(evidence)
    return timing.smallest_gain(totals(measurements, "candidate"), totals(measurements, "incumbent"))


def log_objective(evidence: AuditEvidence) -> tuple[float, float]:
    """Return the log of the candidate's aggregate over the root's, and its standard error over processes.

    The root over itself is 0, whatever the noise of two measurements of it.
    """
    if evidence.implementation == evidence.root:
        return 0.0, 0.0
    measurements = cold(evidence)
    pairs = zip(totals(measurements, "candidate"), totals(measurements, "root"), strict=True)
    logs = [math.log(ours / roots) for ours, roots in pairs]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else UNKNOWN_ERROR
    return math.fsum(logs) / len(logs), error


def log_ratios(evidence: AuditEvidence) -> dict[str, float]:
    """Return, by workload, the log of the candidate's mean latency over the root's; 0 for the root."""
    own = evidence.implementation == evidence.root
    return {
        each.workload: 0.0 if own else _mean_log(each.candidate_ms) - _mean_log(each.root_ms)
        for each in cold(evidence)
    }


def shares(evidence: AuditEvidence) -> dict[str, float]:
    """Return each workload's share of the candidate's aggregate latency."""
    parts = {each.workload: each.weight * math.exp(_mean_log(each.candidate_ms)) for each in cold(evidence)}
    whole = math.fsum(parts.values())
    return {name: part / whole for name, part in parts.items()}


def _mean_log(ms: Sequence[float]) -> float:
    return math.fsum(math.log(each) for each in ms) / len(ms)
