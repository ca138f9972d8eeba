"""The state of a study as SQL views over its records, so that any reader of the database sees the same."""

from sqlalchemy import ColumnElement, MetaData, Table, exists, func, literal_column, select
from sqlalchemy.orm import aliased
from sqlalchemy.schema import CreateView
from sqlalchemy.sql import Select

from kernelbraid.ir.evidence import ACCEPTED, Level
from kernelbraid.ir.schema import (
    Audit,
    AuditMeasurement,
    AuditRequest,
    HeldOut,
    Implementation,
    Lineage,
    LineageDecision,
    Opportunity,
    OpportunityClosed,
    PromotionDecision,
    Study,
)

VIEWS = MetaData()
BRANCH_POINT_LEVELS = (Level.SCREEN, Level.FULL)
OBJECTIVE_PROTOCOL = "cold"


def _view(name: str, selectable: Select[*tuple[object, ...]]) -> Table:
    return CreateView(selectable, name, metadata=VIEWS).table


_accepted = exists().where(
    Audit.implementation == Implementation.sha256,
    Audit.status.in_(ACCEPTED),
    Audit.level.in_(BRANCH_POINT_LEVELS),
)
_rejected = exists().where(Audit.implementation == Implementation.sha256, Audit.status.not_in(ACCEPTED))

VERIFIED = _view("verified", select(Implementation.sha256, Implementation.seq).where(_accepted, ~_rejected))
"""Branch points: accepted at `screen` or above, and never rejected; no later audit outweighs a rejection."""

_promoted = (
    select(PromotionDecision.implementation)
    .where(PromotionDecision.granted, PromotionDecision.implementation.in_(select(VERIFIED.c.sha256)))
    .order_by(PromotionDecision.id.desc())
    .limit(1)
    .scalar_subquery()
)
INCUMBENT = _view("incumbent", select(func.coalesce(_promoted, Study.root).label("sha256")))
"""The latest promoted implementation that was not rejected since, or the root."""

PENDING = _view(
    "pending",
    select(AuditRequest.seq, AuditRequest.id, AuditRequest.implementation, AuditRequest.level).where(
        ~exists().where(Audit.request == AuditRequest.id)
    ),
)

OPEN_OPPORTUNITY = _view(
    "open_opportunity",
    select(Opportunity.id).where(~exists().where(OpportunityClosed.opportunity == Opportunity.id)),
)

_later = aliased(LineageDecision)
_standing = select(LineageDecision.implementation, LineageDecision.decision).where(
    ~exists().where(_later.implementation == LineageDecision.implementation, _later.id > LineageDecision.id)
)
_left = _standing.where(LineageDecision.decision.in_((Lineage.ARCHIVE, Lineage.ABANDON))).subquery().c
_archived = _standing.where(LineageDecision.decision == Lineage.ARCHIVE).subquery().c

FRONTIER = _view(
    "frontier",
    select(VERIFIED.c.sha256, VERIFIED.c.seq).where(VERIFIED.c.sha256.not_in(select(_left.implementation))),
)
"""Verified implementations with an immediate follow-up: decided to continue or merge, or not decided yet."""

ARCHIVE = _view(
    "archive",
    select(VERIFIED.c.sha256, VERIFIED.c.seq).where(VERIFIED.c.sha256.in_(select(_archived.implementation))),
)
"""Verified implementations kept for later."""

_timings = AuditMeasurement.__table__.c


def _total(column: str) -> ColumnElement[float]:
    mean = f"(SELECT avg(each.value) FROM json_each(measurement.{column}) AS each)"
    return func.sum(_timings.weight * literal_column(mean))


_weighed = (
    select(
        _timings.audit,
        _total("candidate_ms").label("candidate_ms"),
        _total("root_ms").label("root_ms"),
        _total("incumbent_ms").label("incumbent_ms"),
    )
    .where(_timings.protocol == OBJECTIVE_PROTOCOL, _timings.workload.not_in(select(HeldOut.name)))
    .group_by(_timings.audit)
    .having(func.count() == select(func.json_array_length(Study.workloads)).scalar_subquery())
    .subquery()
)
OBJECTIVE = _view(
    "objective",
    select(
        Audit.seq,
        Audit.request,
        Audit.implementation,
        Audit.level,
        Audit.comparable,
        _weighed.c.candidate_ms,
        _weighed.c.root_ms,
        _weighed.c.incumbent_ms,
    ).join_from(_weighed, Audit, Audit.seq == _weighed.c.audit),
)
"""Weighted sum of latencies over the workloads that are shown, one row an audit that timed them all."""
