"""What became of modifications: which audit tells it, and why it ended so."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from kernelbraid.ir.evidence import ACCEPTED, Status
from kernelbraid.ir.held_out import shown_reason
from kernelbraid.ir.schema import Audit, AuditVerdict, HeldOut, Modification, ModificationParent, Opportunity
from kernelbraid.ir.store import Store

_verdicts = AuditVerdict.__table__.c


@dataclass(frozen=True, slots=True)
class Attempt:
    """A modification of a parent, what was edited, and how its audit ended."""

    modification: Modification
    edit: Any
    """The opportunity's edit; None where there was none."""
    status: Status | None
    """None while no audit has answered."""
    reason: str
    failed: tuple[str, ...]
    """Ids of the requirements that did not hold."""


def attempts(store: Store, parent: str | None = None) -> list[Attempt]:
    """Modifications, oldest first, with the audit that rejected each or its latest; of one parent if named.

    The failed ones are negative evidence scoped to its parents: that edit, made to those sources, ended so.
    """
    wanted = select(Modification, Opportunity).outerjoin(
        Opportunity, Opportunity.id == Modification.opportunity
    )
    if parent is not None:
        edge = exists().where(
            ModificationParent.modification == Modification.id, ModificationParent.parent == parent
        )
        wanted = wanted.where(edge)
    with store.read() as session:
        told = telling(session)
        failed = _failed_requirements(session)
        rows = session.execute(wanted.order_by(Modification.id)).all()
    return [_attempt(change, opportunity, told.get(change.child), failed) for change, opportunity in rows]


def rejected(store: Store, most: int) -> list[Attempt]:
    """The latest `most` of the `attempts` that an audit rejected, oldest first; reads no others."""
    wanted = select(Modification, Opportunity).outerjoin(
        Opportunity, Opportunity.id == Modification.opportunity
    )
    made = select(Modification.id, Modification.child).order_by(Modification.id)
    with store.read() as session:
        told = telling(session)
        rejections = {sha256 for sha256, (_, status, _) in told.items() if status not in ACCEPTED}
        latest = [key for key, child in session.execute(made) if child in rejections][-most:] if most else []
        rows = session.execute(wanted.where(Modification.id.in_(latest)).order_by(Modification.id)).all()
        failed = _failed_requirements(session)
    return [_attempt(change, opportunity, told[change.child], failed) for change, opportunity in rows]


def endings(store: Store) -> dict[str, tuple[Status, str]]:
    """Implementation -> status and reason of the audit that rejected it first, or else of its latest."""
    with store.read() as session:
        return {sha256: (status, reason) for sha256, (_, status, reason) in telling(session).items()}


def telling(session: Session) -> dict[str, tuple[int, Status, str]]:
    """Implementation -> (audit, status, reason) of the first audit that rejected it or else of its latest."""
    rows = session.execute(
        select(Audit.implementation, Audit.seq, Audit.level, Audit.status, Audit.reason).order_by(Audit.seq)
    )
    held_out = frozenset(session.scalars(select(HeldOut.name)))
    failed = _failed_requirements(session) if held_out else {}
    found: dict[str, tuple[int, Status, str]] = {}
    for sha256, seq, level, status, told in rows:
        reason = shown_reason(level, status, told, seq not in failed, held_out)
        if sha256 not in found or found[sha256][1] in ACCEPTED:
            found[sha256] = (seq, status, reason)
    return found


def _failed_requirements(session: Session) -> dict[int, tuple[str, ...]]:
    wanted = select(_verdicts.audit, _verdicts.requirement).where(~_verdicts.held)
    failed: dict[int, tuple[str, ...]] = {}
    for audit, requirement in session.execute(wanted.order_by(_verdicts.audit, _verdicts.position)):
        failed[audit] = (*failed.get(audit, ()), requirement)
    return failed


def _attempt(
    change: Modification,
    opportunity: Opportunity | None,
    telling: tuple[int, Status, str] | None,
    failed: dict[int, tuple[str, ...]],
) -> Attempt:
    edit = None if opportunity is None else opportunity.edit
    if telling is None:
        return Attempt(change, edit, None, "", ())
    seq, status, reason = telling
    return Attempt(change, edit, status, reason, failed.get(seq, ()))
