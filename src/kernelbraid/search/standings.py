"""Where each implementation of a study stands, read from its recorded audits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernelbraid.audit.timing import within_limits
from kernelbraid.ir.evidence import ACCEPTED, AuditEvidence, Level, Status
from kernelbraid.search.measured import cold, log_objective, log_ratios, processes, shares


@dataclass(frozen=True, slots=True)
class Standing:
    """What the audits of one implementation found, latest first where they differ."""

    sha256: str
    accepted: bool
    """No audit rejected it: it may be a parent. A rejection is not outweighed by another audit."""
    evidence: AuditEvidence
    """The latest audit where accepted, else the latest one that rejected it."""
    screen: AuditEvidence | None
    full: AuditEvidence | None
    log_objective: float | None
    """Log of its aggregate latency over the root's; None where it was not timed."""
    error: float
    """Standard error of `log_objective` over processes."""
    log_ratios: Mapping[str, float]
    """Workload -> log of its latency over the root's."""
    shares: Mapping[str, float]
    """Workload -> its share of the aggregate latency."""
    within_limits: bool
    """No workload's mean ratio to the root exceeds its limit; the root is within by definition."""

    @property
    def status(self) -> Status:
        return self.evidence.status

    @property
    def timed(self) -> bool:
        return self.log_objective is not None


def standing(audits: Sequence[AuditEvidence], workloads: int) -> Standing:
    """Return where an implementation stands.

    Args:
        audits: all its audits in the order in which they were recorded, at least one.
        workloads: how many the study has; an audit that timed fewer has no objective.
    """
    rejections = [each for each in audits if each.status not in ACCEPTED]
    evidence = rejections[-1] if rejections else audits[-1]
    timed = not rejections and len(cold(evidence)) == workloads and processes(evidence) > 0
    objective, error = log_objective(evidence) if timed else (None, 0.0)
    return Standing(
        sha256=evidence.implementation,
        accepted=not rejections,
        evidence=evidence,
        screen=_latest(audits, Level.SCREEN),
        full=_latest(audits, Level.FULL),
        log_objective=objective,
        error=error,
        log_ratios=log_ratios(evidence) if timed else {},
        shares=shares(evidence) if timed else {},
        within_limits=evidence.implementation == evidence.root or within_limits(cold(evidence)),
    )


def _latest(audits: Sequence[AuditEvidence], level: Level) -> AuditEvidence | None:
    return next((each for each in reversed(audits) if each.level is level), None)
