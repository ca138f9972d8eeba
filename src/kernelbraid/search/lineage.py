"""What follows an audit: a promotion granted or refused, and whether the implementation is built on.

Everything is decided from recorded evidence: a search that was interrupted decides the same when it goes on.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from sqlalchemy import select

from kernelbraid.ir.evidence import ACCEPTED
from kernelbraid.ir.schema import Lineage, PromotionDecision
from kernelbraid.search.promote import Decision, Outcome, decide
from kernelbraid.search.standings import Standing
from kernelbraid.search.study import Study

SEARCH = "search"
"""Who decided, where no person and no agent did."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A decision on one implementation, as it was recorded."""

    sha256: str
    decision: Decision
    lineage: Lineage | None
    """None where an audit rejected it: it is no branch point, and its evidence speaks for itself."""


def settle(study: Study) -> list[Settled]:
    """Decide and record promotion, and continue or archive, for every audit that can be decided.

    Grants come first: what else was measured against the same incumbent is then refused for that reason, and
    stays a branch point.
    """
    undecided = list(_undecided(study))
    undecided.sort(key=lambda each: each[1].outcome is not Outcome.GRANTED)
    settled = []
    for standing, _ in undecided:
        decision = judge(study, standing)
        if decision.outcome is not Outcome.CONFIRM:
            settled.append(_record(study, standing, decision))
    return settled


def awaiting(study: Study) -> list[Standing]:
    """Return the candidates whose promotion waits for a full audit alone, the fastest first."""
    waiting = [standing for standing, decision in _undecided(study) if decision.outcome is Outcome.CONFIRM]
    return sorted(waiting, key=lambda each: each.log_objective or 0.0)


def judge(study: Study, standing: Standing) -> Decision:
    """Apply the promotion rule to what is known of one implementation."""
    assert standing.screen is not None
    standings, incumbent = study.standings(), study.incumbent
    return decide(
        standing.screen,
        standing.full,
        incumbent=incumbent,
        root_bits=standings[study.root].evidence.bits_id,
        incumbent_bits=standings[incumbent].evidence.bits_id,
        policy=study.policy,
    )


def follow_up(study: Study, standing: Standing) -> tuple[Lineage, str]:
    """Decide whether a verified implementation is worth building on at once.

    It is if it is at least as fast as one of its parents and within its limits, proven or not: gains too
    small to be proven alone are joined later.
    """
    standings = study.standings()
    if standing.log_objective is None:
        return Lineage.ARCHIVE, "it was not timed on every workload"
    if not standing.within_limits:
        return Lineage.ARCHIVE, "a workload is slower than its limit allows"
    parents = [
        standings[sha].log_objective or 0.0 for sha in study.parents(standing.sha256) if sha in standings
    ]
    change = standing.log_objective - max(parents, default=0.0)
    if change > 0:
        return Lineage.ARCHIVE, f"its aggregate latency is {100 * change:.1f}% above its parent's"
    return Lineage.CONTINUE, f"its aggregate latency is {-100 * change:.1f}% below its parent's"


def _undecided(study: Study) -> Iterator[tuple[Standing, Decision]]:
    """Audited candidates without a decision on their latest evidence."""
    with study.store.read() as session:
        rows = (
            session.execute(select(PromotionDecision.screen_audit, PromotionDecision.full_audit))
            .tuples()
            .all()
        )
    decided = set(rows)
    refused_on_screen = {screen for screen, full in rows if full is None}
    for sha256, standing in study.standings().items():
        if sha256 == study.root or standing.screen is None:
            continue
        screen, full = standing.screen.job, standing.full.job if standing.full is not None else None
        if (screen, full) not in decided and screen not in refused_on_screen:
            yield standing, judge(study, standing)


def _record(study: Study, standing: Standing, decision: Decision) -> Settled:
    assert standing.screen is not None
    lineage: Lineage | None = None
    with study.store.transaction():
        study.store.promote(
            screen_audit=standing.screen.job,
            full_audit=standing.full.job if standing.full is not None else None,
            granted=decision.granted,
            reason=decision.reason,
            blocked_by=None if decision.granted else decision.blocking[0],
            checks=[asdict(check) for check in decision.checks],
        )
        if standing.evidence.status in ACCEPTED:
            lineage, reason = follow_up(study, standing)
            study.store.decide(standing.sha256, lineage, reason=reason, decided_by=SEARCH)
    return Settled(standing.sha256, decision, lineage)
