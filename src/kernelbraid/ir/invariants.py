"""What must hold in every study: checked for each record before it is written, and over whole databases."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import exists, select, text
from sqlalchemy.orm import Session

from kernelbraid.contract import BitPolicy, Workload, left_to_full
from kernelbraid.ir import held_out as kept
from kernelbraid.ir.evidence import ACCEPTED, AuditEvidence, Level, Measurement, Status
from kernelbraid.ir.schema import (
    Audit,
    AuditRequest,
    HeldOut,
    Implementation,
    Modification,
    Opportunity,
    OpportunityClosed,
    Outcome,
    PromotionDecision,
    Requirement,
    Study,
)
from kernelbraid.ir.views import (
    BRANCH_POINT_LEVELS,
    INCUMBENT,
    OBJECTIVE_PROTOCOL,
    OPEN_OPPORTUNITY,
    VERIFIED,
)

AGAINST_ROOT = "implementations_agree"
"""The relation that an audit may leave out where the bits ids differ, since it then claims nothing."""


def check_study(study: Study, requirements: Sequence[Requirement], held_out: Sequence[Workload] = ()) -> None:
    """Raise ValueError unless a study is complete."""
    kept.check(study.workloads, held_out)
    names = [workload.name for workload in study.workloads]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"workloads must name at least one workload, each once, got {sorted(names)}")
    ids = [requirement.id for requirement in requirements]
    if not ids or len(set(ids)) != len(ids):
        raise ValueError("requirements must name at least one requirement of the contract, each once")
    for name in ("patience", "minutes", "audits", "proposer_calls"):
        value = getattr(study, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True, slots=True)
class Grounds:
    """What evidence is held against: read once, used for any number of records."""

    study: Study
    requirements: Mapping[str, str]
    """Id -> name."""
    later: frozenset[str]
    """Ids that an audit leaves out which did not come to the checks of level full."""
    incumbents: frozenset[str]
    """The root and everything that was ever promoted."""
    held_out: Mapping[str, Workload]
    """Name -> workload that only full audits time."""
    root_bits: Mapping[str, str | None]
    """Architecture -> the bits id that the root's first accepted audit found."""

    @classmethod
    def of(cls, session: Session, study: Study) -> "Grounds":
        promoted = session.scalars(select(PromotionDecision.implementation).where(PromotionDecision.granted))
        rows = session.execute(select(Requirement.id, Requirement.name))
        later = select(Requirement.id).where(Requirement.regime.in_(left_to_full(study.workloads)))
        return cls(
            study=study,
            requirements=dict(rows.all()),
            later=frozenset(session.scalars(later)),
            incumbents=frozenset({study.root, *promoted}),
            held_out={each.name: each.workload for each in session.scalars(select(HeldOut))},
            root_bits=_bits_by_architecture(session, study.root),
        )


def _bits_by_architecture(session: Session, sha256: str) -> dict[str, str | None]:
    accepted = select(Audit.environment, Audit.bits_id).where(
        Audit.implementation == sha256, Audit.status.in_(ACCEPTED)
    )
    found: dict[str, str | None] = {}
    for environment, bits_id in session.execute(accepted.order_by(Audit.seq)):
        found.setdefault(environment.architecture, bits_id)
    return found


def check_evidence(grounds: Grounds, request: AuditRequest, evidence: AuditEvidence) -> None:
    """Raise ValueError unless `evidence` answers `request` in its study."""
    study, named = grounds.study, f"evidence for request {request.id}"
    expected = {
        "implementation": request.implementation,
        "level": request.level,
        "root": study.root,
        "harness": study.harness,
    }
    for field, value in expected.items():
        found = getattr(evidence, field)
        if found != value:
            raise ValueError(f"{named} is of another {field}: expected {value}, got {found}")
    if evidence.incumbent not in grounds.incumbents:
        raise ValueError(f"{named} names an incumbent that this study never had: {evidence.incumbent}")
    _check_verdicts(grounds, evidence, named)
    _check_measurements(grounds, evidence, named)
    if evidence.status in ACCEPTED:
        _check_bits_id(grounds, evidence, named)


def _check_bits_id(grounds: Grounds, evidence: AuditEvidence, named: str) -> None:
    if not evidence.bits_id:
        raise ValueError(f"{named} is accepted but declares no bits id")
    pinned = grounds.root_bits.get(evidence.environment.architecture, evidence.bits_id)
    if grounds.study.policy is BitPolicy.PINNED and evidence.bits_id != pinned:
        raise ValueError(f"{named} has bits id {evidence.bits_id}, and the study pins the root's, {pinned}")


def _check_verdicts(grounds: Grounds, evidence: AuditEvidence, named: str) -> None:
    given = Counter(verdict.requirement for verdict in evidence.verdicts)
    for requirement, count in given.items():
        if requirement not in grounds.requirements:
            raise ValueError(f"{named} has a verdict on {requirement}, which is no requirement of this study")
        if count > 1:
            raise ValueError(f"{named} has {count} verdicts on {requirement}")
    if evidence.status not in ACCEPTED or evidence.level not in BRANCH_POINT_LEVELS:
        return
    root_bits = grounds.root_bits.get(evidence.environment.architecture)
    apart = evidence.implementation == grounds.study.root or evidence.bits_id != root_bits
    whole = evidence.level is Level.FULL and evidence.status is not Status.STOPPED
    later: frozenset[str] = frozenset() if whole else grounds.later
    for requirement in grounds.requirements.keys() - given.keys() - later:
        if not (grounds.requirements[requirement] == AGAINST_ROOT and apart):
            raise ValueError(
                f"{named} is accepted at level {evidence.level} with no verdict on {requirement}"
            )


def _check_measurements(grounds: Grounds, evidence: AuditEvidence, named: str) -> None:
    wanted = {each.name: each for each in grounds.study.workloads}
    if evidence.level is Level.FULL:
        wanted |= grounds.held_out
    seen = Counter((m.workload, m.protocol) for m in evidence.measurements)
    for measurement in evidence.measurements:
        workload = wanted.get(measurement.workload)
        if workload is None:
            raise ValueError(
                f"{named} times {measurement.workload}, which is no workload of this study at that level"
            )
        stated = (measurement.phase, measurement.weight, measurement.limit)
        if stated != (workload.phase, workload.weight, workload.limit):
            raise ValueError(f"{named} times {workload.name} under other terms: {stated}")
        if seen[measurement.workload, measurement.protocol] > 1:
            raise ValueError(f"{named} times {workload.name} twice in protocol {measurement.protocol}")
        if not _is_time(measurement):
            raise ValueError(f"{named} has times of {workload.name} that are not positive, finite numbers")
    if evidence.status is Status.VERIFIED and evidence.level in BRANCH_POINT_LEVELS:
        for name in wanted:
            if (name, OBJECTIVE_PROTOCOL) not in seen:
                raise ValueError(f"{named} is verified with no {OBJECTIVE_PROTOCOL} time of {name}")


def _is_time(measurement: Measurement) -> bool:
    times = (*measurement.candidate_ms, *measurement.root_ms, *measurement.incumbent_ms)
    return bool(times) and all(math.isfinite(ms) and ms > 0 for ms in times) and measurement.calls > 0


def require_verified(session: Session, sha256: str) -> None:
    """Raise ValueError unless `sha256` is a branch point."""
    if session.scalar(select(exists().where(VERIFIED.c.sha256 == sha256))):
        return
    if not session.scalar(select(exists().where(Implementation.sha256 == sha256))):
        raise ValueError(f"the study has no implementation {sha256}: give the whole hash")
    missing = "an accepted audit at level screen or full, and no rejected one"
    raise ValueError(f"{sha256[:12]} is not verified: it needs {missing}")


def require_known(session: Session, column: Any, values: Iterable[str], argument: str, noun: str) -> None:
    """Raise ValueError, naming the argument, unless every value is in a column."""
    for value in values:
        if not session.scalar(select(exists().where(column == value))):
            raise ValueError(f"{argument} names {value}, and the study has no such {noun}")


def incumbent_hash(session: Session) -> str:
    """The hash of the present incumbent."""
    return str(session.scalar(select(INCUMBENT.c.sha256)))


def is_open(session: Session, opportunity: int) -> bool:
    """Whether an opportunity exists and is not closed."""
    return bool(session.scalar(select(exists().where(OPEN_OPPORTUNITY.c.id == opportunity))))


def check_takeable(session: Session, number: int, parents: Sequence[str]) -> None:
    """Raise ValueError unless an opportunity is open and builds on some of `parents`."""
    opportunity = session.get(Opportunity, number)
    if opportunity is None:
        raise ValueError(f"the study has no opportunity {number}")
    if not is_open(session, number):
        raise ValueError(f"opportunity {number} was taken or closed before: choose another")
    if missing := set(opportunity.parents) - set(parents):
        raise ValueError(f"opportunity {number} builds on {sorted(missing)}: name them among parents")


def audit_of(session: Session, request: str) -> Audit:
    """Return the audit that answered a request, or raise ValueError."""
    audit = session.scalars(select(Audit).where(Audit.request == request)).one_or_none()
    if audit is None:
        raise ValueError(f"the study has no audit {request}")
    return audit


def bits_changed(session: Session, audit: Audit) -> bool:
    """Whether an audited implementation has other bits than the incumbent it was measured against."""
    known = _bits_by_architecture(session, audit.incumbent)
    return audit.bits_id != known.get(audit.environment.architecture)


def check_grant(decision: str, previous: str, screen: Audit, full: Audit | None) -> None:
    """Raise ValueError unless two audits can carry a promotion over the incumbent `previous`."""
    if full is None:
        raise ValueError(f"{decision} needs a full audit")
    for audit, level in ((screen, Level.SCREEN), (full, Level.FULL)):
        if audit.level is not level or audit.status is not Status.VERIFIED:
            found = f"{audit.request}, {audit.status} at level {audit.level}"
            raise ValueError(f"{decision} rests on audit {found}: it must be verified at {level}")
        if audit.incumbent != previous:
            measured = f"was measured against {audit.incumbent[:12]}, not {previous[:12]}"
            raise ValueError(f"{decision} rests on audit {audit.request}, which {measured}: audit it again")
    if screen.comparable != full.comparable:
        raise ValueError(f"{decision} rests on audits in two environments that cannot be compared")


def violations(session: Session) -> Iterator[str]:
    """Yield one sentence for every invariant that the records of a database break."""
    for row in session.execute(text("PRAGMA integrity_check")):
        if row[0] != "ok":
            yield f"the database file is damaged: {row[0]}"
    for row in session.execute(text("PRAGMA foreign_key_check")):
        yield f"a record of {row[0]} refers to a record of {row[2]} that does not exist"
    studies = session.scalars(select(Study)).all()
    if len(studies) != 1:
        yield f"a database holds one study, this one holds {len(studies)}"
        return
    held_out = session.scalars(select(HeldOut)).all()
    try:
        kept.check(studies[0].workloads, [each.workload for each in held_out])
    except ValueError as error:
        yield str(error)
    for each in held_out:
        if each.name != each.workload.name:
            yield f"the held-out workload {each.workload.name} is named {each.name}"
    yield from _audit_violations(session, studies[0])
    yield from _descent_violations(session, studies[0])
    yield from _opportunity_violations(session)
    yield from _promotion_violations(session, studies[0])


def _audit_violations(session: Session, study: Study) -> Iterator[str]:
    grounds = Grounds.of(session, study)
    requests = {request.id: request for request in session.scalars(select(AuditRequest))}
    for audit in session.scalars(select(Audit).order_by(Audit.seq)):
        try:
            check_evidence(grounds, requests[audit.request], audit.evidence())
        except ValueError as error:
            yield str(error)


def _descent_violations(session: Session, study: Study) -> Iterator[str]:
    branch_point = (Audit.status.in_(ACCEPTED), Audit.level.in_(BRANCH_POINT_LEVELS))
    accepted = set(session.scalars(select(Audit.implementation).where(*branch_point)))
    order = dict(session.execute(select(Implementation.sha256, Implementation.seq)).all())
    children = set()
    for modification in session.scalars(select(Modification)):
        child, parents = modification.child, modification.parents
        children.add(child)
        if not parents:
            yield f"{child} has a modification without parents"
        for parent in parents:
            if parent not in accepted:
                yield f"{parent} is a parent of {child} without accepted evidence"
            if order[parent] >= order[child]:
                yield f"{parent} is a parent of {child}, which is older"
    for sha256 in order.keys() - children - {study.root}:
        yield f"{sha256} is not the root and has no modification"
    if study.root in children:
        yield "the root has parents"


def _opportunity_violations(session: Session) -> Iterator[str]:
    closed = select(OpportunityClosed).where(OpportunityClosed.outcome == Outcome.TAKEN)
    taken = {(row.opportunity, row.implementation) for row in session.scalars(closed)}
    used = select(Modification.opportunity, Modification.child).where(Modification.opportunity.is_not(None))
    for opportunity, child in taken ^ set(session.execute(used)):
        yield f"opportunity {opportunity} is not both taken by {child} and named in its modification"


def _promotion_violations(session: Session, study: Study) -> Iterator[str]:
    audits = {audit.request: audit for audit in session.scalars(select(Audit))}
    incumbents = {study.root}
    for row in session.scalars(select(PromotionDecision).order_by(PromotionDecision.id)):
        named = f"promotion decision {row.id}"
        if row.previous not in incumbents:
            yield f"{named} replaces {row.previous}, which was never the incumbent"
        if row.granted:
            incumbents.add(row.implementation)
            try:
                check_grant(named, row.previous, audits[row.screen_audit], audits.get(row.full_audit or ""))
            except ValueError as error:
                yield str(error)
