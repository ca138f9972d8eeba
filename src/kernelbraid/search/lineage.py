"""What follows an audit: a promotion granted or refused, and whether the implementation is built on.

Everything is decided from recorded evidence: a search that was interrupted decides the same when it goes on.
"""

import math
from dataclasses import asdict, dataclass
from typing import Self

from sqlalchemy import select

from kernelbraid.contract import BitPolicy
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


@dataclass(frozen=True, slots=True)
class Rule:
    """The promotion rule of a study, with the incumbent of one moment."""

    incumbent: str
    root_bits: str | None
    incumbent_bits: str | None
    policy: BitPolicy
    held_out: frozenset[str] = frozenset()

    @classmethod
    def of(cls, study: Study) -> Self:
        with study.store.read():
            standings, incumbent = study.standings(), study.incumbent
        bits = {sha: standing.evidence.bits_id for sha, standing in standings.items()}
        return cls(incumbent, bits.get(study.root), bits.get(incumbent), study.policy, study.held_out)

    def judge(self, study: Study, standing: Standing) -> Decision:
        """Apply the rule to what is known of one implementation."""
        assert standing.screen is not None
        return decide(
            standing.screen,
            None if standing.full is None else study.whole(standing.full),
            incumbent=self.incumbent,
            root_bits=self.root_bits,
            incumbent_bits=self.incumbent_bits,
            policy=self.policy,
            held_out=self.held_out,
        )


def settle(study: Study) -> list[Settled]:
    """Decide and record promotion, and continue or archive, for every audit that can be decided.

    Grants come first: what else was measured against the same incumbent is then refused for that reason, and
    stays a branch point.
    """
    settled: list[Settled] = []
    for standing in _undecided(study):
        if standing.full is not None and (decision := Rule.of(study).judge(study, standing)).granted:
            settled.append(_record(study, standing, decision))
    rule = Rule.of(study)
    for standing in _undecided(study):
        decision = rule.judge(study, standing)
        if decision.outcome is Outcome.REFUSED:
            settled.append(_record(study, standing, decision))
    return settled


def awaiting(study: Study) -> list[Standing]:
    """Return the candidates whose promotion waits for a full audit alone, the one to confirm first in front.

    That is the fastest one, but among those that are as fast within their errors one that keeps the
    incumbent's bits, if there is one: nobody should lose certificates for noise.
    """
    rule = Rule.of(study)
    waiting = [each for each in _undecided(study) if rule.judge(study, each).outcome is Outcome.CONFIRM]
    if not waiting:
        return []
    fastest = min(waiting, key=_objective)

    def order(each: Standing) -> tuple[bool, bool, float]:
        behind = _objective(each) - _objective(fastest) > math.hypot(each.error, fastest.error)
        return behind, each.evidence.bits_id != rule.incumbent_bits, _objective(each)

    return sorted(waiting, key=order)


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


def _objective(standing: Standing) -> float:
    assert standing.log_objective is not None
    return standing.log_objective


def _undecided(study: Study) -> list[Standing]:
    """Audited candidates without a decision on their latest evidence."""
    with study.store.read() as session:
        rows = session.execute(select(PromotionDecision.screen_audit, PromotionDecision.full_audit)).all()
    decided = {(screen, full) for screen, full in rows}
    refused_on_screen = {screen for screen, full in rows if full is None}
    found = []
    for sha256, standing in study.standings().items():
        if sha256 == study.root or standing.screen is None:
            continue
        screen, full = standing.screen.job, standing.full.job if standing.full is not None else None
        if (screen, full) not in decided and screen not in refused_on_screen:
            found.append(standing)
    return found


def _record(study: Study, standing: Standing, decision: Decision) -> Settled:
    assert standing.screen is not None
    lineage: Lineage | None = None
    with study.store.transaction():
        study.store.promote(
            screen_audit=standing.screen.job,
            full_audit=standing.full.job if standing.full is not None else None,
            granted=decision.granted,
            reason=decision.reason,
            blocked_by=decision.blocked_by,
            checks=[asdict(check) for check in decision.checks],
        )
        if standing.evidence.status in ACCEPTED:
            lineage, reason = follow_up(study, standing)
            study.store.decide(standing.sha256, lineage, reason=reason, decided_by=SEARCH)
    return Settled(standing.sha256, decision, lineage)
