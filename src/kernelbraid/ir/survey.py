"""Whole tables of a study as plain rows, for those who show thousands of implementations at once.

`query` answers with records; loading all of them, with every verdict, takes seconds, these a fraction of one.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Float, String, case, cast, func, select, type_coerce
from sqlalchemy.orm import Session

from kernelbraid.ir.evidence import Difference, Environment, Level, Status
from kernelbraid.ir.files import read_checked
from kernelbraid.ir.held_out import shown_reason
from kernelbraid.ir.schema import (
    Audit,
    AuditMeasurement,
    AuditVerdict,
    HeldOut,
    Implementation,
    Modification,
    ModificationParent,
    Opportunity,
    Requirement,
    Usage,
)
from kernelbraid.ir.store import Store, source_path

_verdict = AuditVerdict.__table__.c
_measured = AuditMeasurement.__table__.c


@dataclass(frozen=True, slots=True)
class Change:
    """A modification with its parents and the opportunity it took; empty texts where nothing was stated."""

    child: str
    parents: tuple[str, ...]
    hypothesis: str
    functions: tuple[str, ...]
    regimes: tuple[str, ...]
    expected_effect: str
    requirements_at_risk: tuple[str, ...]
    falsified_by: str
    proposer: str
    mechanism: str | None
    edit: Any
    rationale: str | None


@dataclass(frozen=True, slots=True)
class Failure:
    """A requirement that did not hold."""

    requirement: str
    error: float | None
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class Timing:
    """Means over the processes of one audit, milliseconds a call."""

    workload: str
    protocol: str
    weight: float
    limit: float
    candidate_ms: float
    root_ms: float
    incumbent_ms: float
    processes: int
    bound_ms: float

    @property
    def ratio(self) -> float:
        """Candidate / root: below 1 is faster."""
        return self.candidate_ms / self.root_ms


@dataclass(frozen=True, slots=True)
class Finding:
    """One audit, its verdicts summed up."""

    seq: int
    request: str
    implementation: str
    incumbent: str
    level: Level
    status: Status
    reason: str
    bits_id: str | None
    seconds: tuple[tuple[str, float], ...]
    comparable: str
    recorded: float
    checked: tuple[int, ...] = ()
    """`seq` of the requirements that have a verdict, ascending."""
    comparisons: int = 0
    """Elements compared as bits."""
    error: float | None = None
    """The largest finite ratio of an error to its bound; None where there is none."""
    failures: tuple[Failure, ...] = field(default=())
    timings: tuple[Timing, ...] = field(default=())


def labels(store: Store) -> list[tuple[str, str]]:
    """Hash and label of every implementation, oldest first."""
    wanted = select(Implementation.sha256, Implementation.label).order_by(Implementation.seq)
    with store.read() as session:
        return [(sha256, label) for sha256, label in session.execute(wanted)]


def changes(store: Store) -> list[Change]:
    """Every modification, oldest first."""
    edges = select(ModificationParent.modification, ModificationParent.parent)
    stated = (
        Modification.child,
        Modification.hypothesis,
        Modification.functions,
        Modification.regimes,
        Modification.expected_effect,
        Modification.requirements_at_risk,
        Modification.falsified_by,
        Modification.proposer,
        Opportunity.mechanism,
        Opportunity.edit,
        Opportunity.rationale,
    )
    wanted = select(Modification.id, *stated).outerjoin(
        Opportunity, Opportunity.id == Modification.opportunity
    )
    parents: dict[int, tuple[str, ...]] = {}
    with store.read() as session:
        ordered = edges.order_by(ModificationParent.modification, ModificationParent.position)
        for modification, parent in session.execute(ordered):
            parents[modification] = (*parents.get(modification, ()), parent)
        rows = session.execute(wanted.order_by(Modification.id))
        return [Change(child, parents.get(key, ()), *rest) for key, child, *rest in rows]


def findings(store: Store) -> list[Finding]:
    """Every audit, oldest first, without what proposers may not see of it."""
    columns = (
        *(Audit.seq, Audit.request, Audit.implementation, Audit.incumbent, Audit.level, Audit.status),
        *(Audit.reason, Audit.bits_id, Audit.seconds, Audit.comparable, Audit.recorded),
    )
    with store.read() as session:
        held_out = frozenset(each.name for each in store.held_out)
        checked = _checked(session)
        failures = _failures(session)
        timings = _timings(session)
        return [
            Finding(
                *row[:6],
                shown_reason(row.level, row.status, row.reason, row.seq not in failures, held_out),
                *row[7:],
                *checked.get(row.seq, ((), 0, None)),
                tuple(failures.get(row.seq, ())),
                tuple(timings.get(row.seq, ())),
            )
            for row in session.execute(select(*columns).order_by(Audit.seq))
        ]


def usage(store: Store) -> list[Usage]:
    """Everything spent, in the order in which it was written down."""
    with store.read() as session:
        return list(session.scalars(select(Usage).order_by(Usage.id)))


def environments(store: Store) -> dict[str, Environment]:
    """What the audits ran on: the latest audit's machine for each value of `comparable`."""
    latest = select(func.max(Audit.seq)).group_by(Audit.comparable)
    wanted = select(Audit.comparable, Audit.environment).where(Audit.seq.in_(latest)).order_by(Audit.seq)
    with store.read() as session:
        return {comparable: environment for comparable, environment in session.execute(wanted)}


def sources(store: Store) -> Iterator[tuple[str, str]]:
    """Hash and text of every implementation, oldest first.

    Raises:
        RuntimeError: a file is missing, or its bytes no longer match its hash.
    """
    with store.read() as session:
        hashes = list(session.scalars(select(Implementation.sha256).order_by(Implementation.seq)))
    for sha256 in hashes:
        yield sha256, read_checked(source_path(store.folder, sha256), sha256).decode()


def _checked(session: Session) -> dict[int, tuple[tuple[int, ...], int, float | None]]:
    """Audit -> requirements with a verdict, elements compared, largest error over its bound."""
    compared = func.sum(case((Requirement.kind == "relation", _verdict.comparisons), else_=0))
    error = type_coerce(_verdict.error, String)  # `nan` and `inf` are texts there
    worst = func.max(case((error.not_in(("nan", "inf", "-inf")), cast(error, Float))))
    wanted = (
        select(_verdict.audit, func.group_concat(Requirement.seq), compared, worst)
        .join(Requirement, Requirement.id == _verdict.requirement)
        .group_by(_verdict.audit)
    )
    seen: dict[str, tuple[int, ...]] = {}
    found = {}
    for audit, joined, comparisons, largest in session.execute(wanted):
        if joined not in seen:
            seen[joined] = tuple(sorted(map(int, joined.split(","))))
        found[audit] = seen[joined], comparisons, largest
    return found


def _failures(session: Session) -> dict[int, list[Failure]]:
    wanted = select(_verdict.audit, _verdict.requirement, _verdict.error, _verdict.difference)
    found: dict[int, list[Failure]] = {}
    ordered = wanted.where(~_verdict.held).order_by(_verdict.audit, _verdict.position)
    for audit, *rest in session.execute(ordered):
        found.setdefault(audit, []).append(Failure(*rest))
    return found


def _timings(session: Session) -> dict[int, list[Timing]]:
    names = ("candidate_ms", "root_ms", "incumbent_ms")
    plain = (_measured.audit, _measured.workload, _measured.protocol, _measured.weight, _measured.limit)
    texts = (type_coerce(_measured[name], String) for name in names)
    wanted = select(*plain, _measured.bound_ms, *texts).order_by(_measured.audit, _measured.position)
    wanted = wanted.where(_measured.workload.not_in(select(HeldOut.name)))
    rows = session.execute(wanted).all()
    # One text for the parser: a call for each of many thousand short lists takes longer than reading them.
    lists = [json.loads(f"[{','.join(row[6 + side] for row in rows)}]") for side in range(len(names))]
    found: dict[int, list[Timing]] = {}
    for (audit, workload, protocol, weight, limit, bound, *_), *sides in zip(rows, *lists, strict=True):
        candidate, root, incumbent = (_mean(side) for side in sides)
        timing = Timing(workload, protocol, weight, limit, candidate, root, incumbent, len(sides[0]), bound)
        found.setdefault(audit, []).append(timing)
    return found


def _mean(values: Sequence[Any]) -> float:
    return sum(map(float, values)) / len(values) if values else float("nan")
