"""Questions to a study: each one reads the records and changes nothing.

Several questions asked inside `with store.read():` see the same state.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Select, String, Table, bindparam, exists, func, literal_column, select
from sqlalchemy.orm import Session, aliased

from kernelbraid.ir import attempts
from kernelbraid.ir.evidence import ACCEPTED, AuditEvidence, Difference, Level
from kernelbraid.ir.invariants import incumbent_hash, require_known
from kernelbraid.ir.schema import (
    Audit,
    AuditVerdict,
    Implementation,
    LineageDecision,
    Modification,
    ModificationParent,
    Opportunity,
    OpportunityParent,
    PromotionDecision,
    Requirement,
    Usage,
)
from kernelbraid.ir.store import Store
from kernelbraid.ir.views import ARCHIVE, FRONTIER, OBJECTIVE, OPEN_OPPORTUNITY, PENDING, VERIFIED


@dataclass(frozen=True, slots=True)
class Objective:
    """The weighted sum of latencies that one audit measured for candidate, root and incumbent."""

    request: str
    implementation: str
    level: Level
    comparable: str
    """Ratios compare between audits for which this is equal."""
    candidate_ms: float
    root_ms: float
    incumbent_ms: float

    @property
    def ratio(self) -> float:
        """Candidate / root: below 1 is faster."""
        return self.candidate_ms / self.root_ms


@dataclass(frozen=True, slots=True)
class Step:
    """One implementation of a lineage, and the modification that led to it (None for the root)."""

    implementation: Implementation
    modification: Modification | None


@dataclass(frozen=True, slots=True)
class Break:
    """An audit in which a requirement did not hold."""

    implementation: str
    modification: Modification | None
    request: str
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class Totals:
    """What a study amounts to so far. Candidates are all implementations but the root."""

    candidates: int
    audited: int
    """Candidates with at least one audit."""
    verified: int
    rejected: dict[str, int] = field(default_factory=dict)
    """Status of the first audit that rejected a candidate -> candidates."""
    audits: int = 0
    pending: int = 0
    comparisons: int = 0
    """Elements compared as bits, in every audit."""
    unequal: int = 0
    """Elements found unequal in candidates that are verified."""
    promotions: int = 0
    refusals: int = 0
    wall_seconds: float = 0.0
    device_seconds: float = 0.0
    queue_seconds: float = 0.0
    proposer_calls: int = 0
    tokens_in: int | None = None
    tokens_out: int | None = None
    money: float | None = None
    """None where no proposer told."""


# Implementations


def root(store: Store) -> Implementation:
    """The implementation that the study started from."""
    return store.implementation(store.study.root)


def incumbent(store: Store) -> Implementation:
    """The latest promoted implementation that was not rejected since, or the root."""
    with store.read() as session:
        return store.implementation(incumbent_hash(session))


def implementations(store: Store) -> list[Implementation]:
    """Every implementation, oldest first."""
    return _implementations(store, select(Implementation))


def hashes(store: Store) -> list[str]:
    """Hash of every implementation, oldest first."""
    with store.read() as session:
        return list(session.scalars(select(Implementation.sha256).order_by(Implementation.seq)))


def extent(store: Store) -> tuple[int, int]:
    """The latest audit and the latest implementation, by `seq`: equal while neither was added."""
    with store.read() as session:
        audit = session.scalar(select(func.max(Audit.seq))) or 0
        return audit, session.scalar(select(func.max(Implementation.seq))) or 0


def verified(store: Store) -> list[Implementation]:
    """Branch points: accepted at `screen` or above and never rejected, oldest first."""
    return _members(store, VERIFIED)


def frontier(store: Store) -> list[Implementation]:
    """Verified implementations with an immediate follow-up, oldest first."""
    return _members(store, FRONTIER)


def archive(store: Store) -> list[Implementation]:
    """Verified implementations kept for later, oldest first."""
    return _members(store, ARCHIVE)


def without_evidence(store: Store) -> list[Implementation]:
    """Implementations that no audit has answered for, oldest first."""
    audited = exists().where(Audit.implementation == Implementation.sha256)
    return _implementations(store, select(Implementation).where(~audited))


def states(store: Store) -> dict[str, str]:
    """Implementation -> state, for the root and those that are verified; the more telling name wins."""
    with store.read():
        found = {each.sha256: "verified" for each in verified(store)}
        found |= {each.sha256: "archive" for each in archive(store)}
        found |= {each.sha256: "frontier" for each in frontier(store)}
        return found | {store.study.root: "root", incumbent(store).sha256: "incumbent"}


def is_verified(store: Store, sha256: str) -> bool:
    """Whether the implementation of that whole hash is a branch point."""
    with store.read() as session:
        return bool(session.scalar(select(exists().where(VERIFIED.c.sha256 == sha256))))


def objectives(store: Store, sha256: str | None = None) -> list[Objective]:
    """The objective of every audit that timed all workloads, oldest first; of one implementation if named."""
    wanted = select(OBJECTIVE).order_by(OBJECTIVE.c.seq)
    if sha256 is not None:
        wanted = wanted.where(OBJECTIVE.c.implementation == sha256)
    with store.read() as session:
        return [Objective(*row[1:]) for row in session.execute(wanted)]


def best(store: Store) -> Implementation:
    """The verified implementation with the lowest measured ratio to the root by its latest audit.

    Only audits comparable to the study's latest one count. It is a measurement, no proof: `incumbent` is what
    was proven to be faster, and what is returned while nothing was measured.
    """
    with store.read():
        measured = objectives(store)
        branch_points = {implementation.sha256 for implementation in verified(store)}
        latest = {
            objective.implementation: objective
            for objective in measured
            if objective.comparable == measured[-1].comparable and objective.implementation in branch_points
        }
        if not latest:
            return incumbent(store)
        fastest = min(latest.values(), key=lambda objective: objective.ratio)
        return store.implementation(fastest.implementation)


# Descent


def lineage(store: Store, sha256: str) -> list[Step]:
    """An implementation and all its ancestors with the modifications between them, oldest first."""
    edge = aliased(ModificationParent)
    return _walk(store, sha256, Modification.child, edge.parent, edge)


def descendants(store: Store, sha256: str) -> list[Step]:
    """All implementations derived from one, it excluded, oldest first."""
    edge = aliased(ModificationParent)
    return [
        step
        for step in _walk(store, sha256, edge.parent, Modification.child, edge)
        if step.implementation.sha256 != sha256
    ]


def _walk(store: Store, sha256: str, near: Any, far: Any, edge: Any) -> list[Step]:
    with store.read() as session:
        start = store.implementation(sha256).sha256
        reached = select(bindparam("start", start, String).label("sha256")).cte("reached", recursive=True)
        onward = select(far).join_from(Modification, edge, edge.modification == Modification.id)
        reached = reached.union(onward.where(near == reached.c.sha256))
        joined = select(Implementation, Modification).outerjoin(
            Modification, Modification.child == Implementation.sha256
        )
        members = joined.where(Implementation.sha256.in_(select(reached.c.sha256)))
        rows = session.execute(members.order_by(Implementation.seq))
        return [Step(implementation, modification) for implementation, modification in rows]


def modification(store: Store, sha256: str) -> Modification | None:
    """The modification that led to an implementation; None for the root."""
    with store.read() as session:
        return session.scalars(select(Modification).where(Modification.child == sha256)).one_or_none()


def lineage_decisions(store: Store, sha256: str | None = None) -> list[LineageDecision]:
    """What was decided, oldest first, the last one holds; about one implementation if named."""
    decided = select(LineageDecision)
    if sha256 is not None:
        decided = decided.where(LineageDecision.implementation == sha256)
    with store.read() as session:
        return list(session.scalars(decided.order_by(LineageDecision.id)))


# Evidence


def audits(store: Store, sha256: str | None = None) -> list[Audit]:
    """Audits, oldest first; of one implementation if named."""
    wanted = select(Audit).order_by(Audit.seq)
    if sha256 is not None:
        wanted = wanted.where(Audit.implementation == sha256)
    with store.read() as session:
        return list(session.scalars(wanted))


def evidence(store: Store, request: str) -> AuditEvidence | None:
    """The evidence that answered a request, as it travelled; None while there is no answer."""
    with store.read() as session:
        audit = session.scalars(select(Audit).where(Audit.request == request)).one_or_none()
        return None if audit is None else audit.evidence(store.log(request))


def latest_evidence(store: Store, sha256: str, level: Level | None = None) -> AuditEvidence | None:
    """The latest evidence of an implementation, at one level if named; None where there is none."""
    wanted = select(Audit.request).where(Audit.implementation == sha256)
    if level is not None:
        wanted = wanted.where(Audit.level == level)
    with store.read() as session:
        request = session.scalar(wanted.order_by(Audit.seq.desc()).limit(1))
        return None if request is None else evidence(store, request)


def requirements(store: Store) -> list[Requirement]:
    """What audits of this study give verdicts on, in the contract's order."""
    with store.read() as session:
        return list(session.scalars(select(Requirement).order_by(Requirement.seq)))


_verdict = AuditVerdict.__table__
_verdicts = _verdict.c


def broke(store: Store, requirement: str) -> list[Break]:
    """Audits in which a requirement did not hold, with the modifications that led there, oldest first.

    Raises:
        ValueError: the study has no such requirement.
    """
    failed = (
        select(Audit.implementation, Modification, Audit.request, _verdicts.difference)
        .join(Audit, Audit.seq == _verdicts.audit)
        .outerjoin(Modification, Modification.child == Audit.implementation)
        .where(_verdicts.requirement == requirement, ~_verdicts.held)
        .order_by(Audit.seq)
    )
    with store.read() as session:
        require_known(session, Requirement.id, [requirement], "requirement", "requirement")
        return [Break(*row) for row in session.execute(failed)]


def survives(store: Store, requirement: str) -> list[Modification]:
    """Modifications after which a requirement held in every audit that checked it, oldest first.

    Raises:
        ValueError: the study has no such requirement.
    """
    checked = (
        select(Audit.implementation)
        .join(_verdict, _verdicts.audit == Audit.seq)
        .where(_verdicts.requirement == requirement)
        .group_by(Audit.implementation)
        .having(func.min(_verdicts.held) == literal_column("1"))
    )
    survived = select(Modification).where(Modification.child.in_(checked)).order_by(Modification.id)
    with store.read() as session:
        require_known(session, Requirement.id, [requirement], "requirement", "requirement")
        return list(session.scalars(survived))


# Search


def open_opportunities(store: Store, parent: str | None = None) -> list[Opportunity]:
    """Opportunities that are not closed, oldest first; of one parent if named."""
    wanted = select(Opportunity).join(OPEN_OPPORTUNITY, OPEN_OPPORTUNITY.c.id == Opportunity.id)
    if parent is not None:
        link = exists().where(
            OpportunityParent.opportunity == Opportunity.id, OpportunityParent.parent == parent
        )
        wanted = wanted.where(link)
    with store.read() as session:
        return list(session.scalars(wanted.order_by(Opportunity.id)))


def promotions(store: Store, *, granted: bool | None = None) -> list[PromotionDecision]:
    """Decisions to promote and refusals, oldest first; only the one or the other if `granted` is given."""
    wanted = select(PromotionDecision).order_by(PromotionDecision.id)
    if granted is not None:
        wanted = wanted.where(PromotionDecision.granted == granted)
    with store.read() as session:
        return list(session.scalars(wanted))


def audits_since_promotion(store: Store) -> int:
    """Audits of candidates since the last promotion, or since the start: what patience counts."""
    last = select(func.coalesce(func.max(PromotionDecision.after_audit), 0)).where(PromotionDecision.granted)
    since = select(func.count()).select_from(Audit).where(Audit.implementation != store.study.root)
    with store.read() as session:
        return session.scalar(since.where(Audit.seq > last.scalar_subquery())) or 0


def stage_seconds(store: Store) -> dict[str, float]:
    """Where the time of all audits went: stage -> seconds."""
    spent: Counter[str] = Counter()
    with store.read() as session:
        for seconds in session.scalars(select(Audit.seconds)):
            for stage, value in seconds:
                spent[stage] += value  # type: ignore[assignment]
    return dict(spent)


def totals(store: Store) -> Totals:
    """Count candidates, audits, comparisons and what was spent."""
    with store.read() as session:
        telling = attempts.telling(session)
        telling.pop(store.study.root, None)
        rejected = Counter(str(status) for _, status, _ in telling.values() if status not in ACCEPTED)
        usage = session.execute(select(*_sums())).one()
        return Totals(
            candidates=_count(session, select(Implementation.seq)) - 1,
            audited=len(telling),
            verified=_count(session, select(VERIFIED.c.seq).where(VERIFIED.c.sha256 != store.study.root)),
            rejected=dict(sorted(rejected.items())),
            audits=_count(session, select(Audit.seq)),
            pending=_count(session, select(PENDING.c.seq)),
            comparisons=_comparisons(session),
            unequal=_unequal(session),
            promotions=_count(session, select(PromotionDecision.id).where(PromotionDecision.granted)),
            refusals=_count(session, select(PromotionDecision.id).where(~PromotionDecision.granted)),
            wall_seconds=usage.wall_seconds or 0.0,
            device_seconds=usage.device_seconds or 0.0,
            queue_seconds=usage.queue_seconds or 0.0,
            proposer_calls=usage.proposer_calls or 0,
            tokens_in=usage.tokens_in,
            tokens_out=usage.tokens_out,
            money=usage.money,
        )


def _sums() -> list[Any]:
    columns = (
        Usage.wall_seconds,
        Usage.device_seconds,
        Usage.queue_seconds,
        Usage.proposer_calls,
        Usage.tokens_in,
        Usage.tokens_out,
        Usage.money,
    )
    return [func.sum(column).label(column.key) for column in columns]


def _count(session: Session, rows: Select[Any]) -> int:
    return session.scalar(select(func.count()).select_from(rows.subquery())) or 0


def _comparisons(session: Session) -> int:
    relations = select(func.sum(_verdicts.comparisons)).join(
        Requirement, Requirement.id == _verdicts.requirement
    )
    return session.scalar(relations.where(Requirement.kind == "relation")) or 0


def _unequal(session: Session) -> int:
    found = (
        select(func.sum(func.json_extract(_verdicts.difference, "$.unequal")))
        .join(Audit, Audit.seq == _verdicts.audit)
        .where(Audit.implementation.in_(select(VERIFIED.c.sha256)))
    )
    return session.scalar(found) or 0


def _members(store: Store, view: Table) -> list[Implementation]:
    return _implementations(store, select(Implementation).join(view, view.c.seq == Implementation.seq))


def _implementations(store: Store, wanted: Select[Implementation]) -> list[Implementation]:
    with store.read() as session:
        return list(session.scalars(wanted.order_by(Implementation.seq)))
