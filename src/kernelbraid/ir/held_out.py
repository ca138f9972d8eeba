"""Workloads that a study keeps from whoever proposes.

They are of the same declared domain as the others, a full audit times them too, and a promotion needs them.
What is shown of such an audit leaves out their times, and everything else that could tell them: whoever knows
which shapes are timed may write what is fast on those alone.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from kernelbraid.contract import Workload
from kernelbraid.ir.evidence import AuditEvidence, Level, Measurement, Status

HELD_OUT = "held_out"
"""What a refusal names that these workloads brought about."""


def kept_reason(status: Status) -> str:
    """What is shown in place of the reason of a full audit."""
    return f"the full audit, which times workloads that proposers do not see, ended {status}"


def shown_reason(level: Level, status: Status, reason: str, held: bool, held_out: Set[str]) -> str:
    """Return the reason of an audit as proposers may read it.

    Args:
        level: of the audit.
        status: how it ended.
        reason: as recorded.
        held: no requirement of the contract failed; a failed one is named: it has nothing to do with times.
        held_out: names of the workloads that are kept; without any, the reason is what it is.
    """
    named = any(name in reason for name in held_out)
    if not held_out or level is not Level.FULL or not reason or (not held and not named):
        return reason
    return kept_reason(status)


def shown(evidence: AuditEvidence, held_out: Set[str]) -> AuditEvidence:
    """Return what proposers may read of an audit.

    Of a full audit neither the output nor the compiled specialisations are shown: an implementation is called
    with the shapes that are kept, and could print them.
    """
    if not held_out or evidence.level is not Level.FULL:
        return evidence
    held = all(verdict.held for verdict in evidence.verdicts)
    return replace(
        evidence,
        measurements=tuple(each for each in evidence.measurements if each.workload not in held_out),
        reason=shown_reason(evidence.level, evidence.status, evidence.reason, held, held_out),
        specialisations=(),
        launches=tuple(each for each in evidence.launches if each.workload not in held_out),
        output="",
    )


def measured(evidence: AuditEvidence, held_out: Set[str]) -> tuple[Measurement, ...]:
    """Return the times of the workloads that are kept."""
    return tuple(each for each in evidence.measurements if each.workload in held_out)


def shown_checks(checks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the checks of a promotion but those that tell times of workloads that are kept."""
    return [dict(each) for each in checks if not str(each["name"]).startswith(f"{HELD_OUT}/")]


def check(workloads: Sequence[Workload], held_out: Sequence[Workload]) -> None:
    """Raise ValueError unless each held-out workload is named once and is none of those that are shown."""
    names = [each.name for each in held_out]
    if len(set(names)) != len(names):
        raise ValueError(f"held_out must name each workload once, got {sorted(names)}")
    if both := sorted(set(names) & {each.name for each in workloads}):
        raise ValueError(f"held_out names {both[0]}, which the study shows: it can be one or the other")
