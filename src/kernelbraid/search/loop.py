"""The search: action, audit, lineage, until a budget, patience or the opportunities end.

Every step reads what is recorded and records what it did, so the loop has no state of its own: killed
anywhere, it goes on where it was.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kernelbraid.audit import jobs
from kernelbraid.ir import query
from kernelbraid.ir.evidence import ACCEPTED, AuditEvidence, Level, Status
from kernelbraid.ir.schema import AuditRequest, Usage
from kernelbraid.ir.store import DuplicateSourceError
from kernelbraid.search import audits, lineage
from kernelbraid.search.measured import aggregate, processes, provable
from kernelbraid.search.proposers import Proposal, Proposer
from kernelbraid.search.standings import Standing
from kernelbraid.search.study import Study

BATCH = 3
"""Candidates in one job, so that one is built while another is checked."""
FULL_OVER_SCREEN = 8.0
"""Seconds of a full audit over those of a screen, until one was seen."""
CONFIRMING_SHARE = 1 / 3
"""Part of the searching time that full audits may take before the end of a study."""


class Ending(StrEnum):
    """Why a search ended."""

    TIME = "time"
    AUDITS = "audits"
    PATIENCE = "patience"
    OPPORTUNITIES = "opportunities"
    """The proposer has nothing left to try."""
    INTERRUPTED = "interrupted"
    """Asked to stop; `run` on the same study goes on."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a search is doing, for whoever watches."""

    stage: str
    """A stage of an audit (`build`, `screen`, ...), or `proposed`, `audited`, `promoted`, `refused`."""
    candidate: str
    """First digits of its hash."""
    message: str
    fraction: float | None = None
    status: Status | None = None
    ratio: float | None = None
    """Aggregate latency over the incumbent's."""
    smallest_gain: float | None = None
    """The smallest gain that this audit could have proven, as a share."""
    audited: int = 0
    audits_left: float = math.inf
    seconds_left: float = math.inf


class StopRequested(KeyboardInterrupt):
    """The caller asked the search to stop: a running audit is dropped and stays pending."""


def run(
    study: Study,
    proposer: Proposer,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    run_job: audits.RunJob = jobs.run_job,
) -> Ending:
    """Search until a budget, patience or the opportunities end, or until asked to stop.

    Args:
        study: an open study; only one process at a time may search it.
        proposer: writes the candidates.
        progress: told of every stage.
        should_stop: asked between and within audits; a keyboard interrupt does the same.
        run_job: runs the audits.

    Raises:
        ValueError: the study was made under another contract or harness.
        RuntimeError: another process searches it, or its root is not a valid implementation.
    """
    study.require_current()
    with study.store.controller_lock(), study.budget.searching():
        search = _Search(study, proposer, progress, should_stop, run_job)
        try:
            return search.run()
        except KeyboardInterrupt:
            search.tell("interrupted", "", "stopped; finished audits are recorded, the rest stays pending")
            return Ending.INTERRUPTED


class _Search:
    def __init__(
        self,
        study: Study,
        proposer: Proposer,
        progress: Callable[[Progress], None],
        should_stop: Callable[[], bool],
        run_job: audits.RunJob,
    ) -> None:
        self._study = study
        self._proposer = proposer
        self._progress = progress
        self._should_stop = should_stop
        self._run_job = run_job

    def run(self) -> Ending:
        for evidence in audits.recover(self._study):
            self._report(evidence)
        self._audit_root()
        while True:
            self._settle()
            ending = self._ending()
            requests = self._confirmation(ending)
            if not requests and ending is None:
                requests = self._screens()
                ending = None if requests else Ending.OPPORTUNITIES
                requests = requests or self._confirmation(ending)
            if not requests:
                assert ending is not None
                return ending
            if not self._audit(requests):
                return self._cut_short()

    def _cut_short(self) -> Ending:
        """A job gave no evidence: that is the time limit's doing, or something is wrong."""
        if math.isinf(self._study.budget.seconds_left):
            raise RuntimeError("an audit ended without evidence though no time limit cut it short")
        return Ending.TIME

    def tell(self, stage: str, candidate: str, message: str, **details: object) -> None:
        budget = self._study.budget
        budget.flush()
        left = {
            "audited": budget.audited,
            "audits_left": budget.audits_left,
            "seconds_left": budget.seconds_left,
        }
        self._progress(Progress(stage, candidate[:12], message, **left, **details))  # type: ignore[arg-type]

    # Action

    def _screens(self) -> list[AuditRequest]:
        """Pending screens, after asking the proposer for candidates if there are none."""
        most = self._affordable()
        waiting = self._pending(Level.SCREEN)
        if not waiting:
            self._proposer.observe(self._study)
            self._propose(most)
            waiting = self._pending(Level.SCREEN)
        return waiting[:most]

    def _propose(self, most: int) -> None:
        """Admit proposals until one is new to the study or none comes."""
        while True:
            proposals = self._proposer.propose(self._study, most)
            with self._study.store.transaction():
                self._study.store.record_usage(Usage(purpose="proposal", proposer_calls=1))
                admitted = [each for each in proposals if self._admit(each)]
            for proposal in admitted:
                self.tell("proposed", proposal.source.sha256, proposal.hypothesis)
            if admitted or not proposals:
                return

    def _admit(self, proposal: Proposal) -> bool:
        try:
            self._study.admit(proposal)
        except DuplicateSourceError:
            return False
        return True

    def _pending(self, level: Level) -> list[AuditRequest]:
        return [each for each in self._study.store.pending() if each.level is level]

    def _affordable(self) -> int:
        """How many candidates the next job may hold: at least one."""
        each = audits.expected_seconds(self._study, Level.SCREEN) or 0.0
        left = self._study.budget.seconds_left - self._reserved()
        by_time = math.inf if each == 0 else left // each
        return int(max(1, min(BATCH, by_time, self._study.budget.audits_left)))

    # Audit

    def _audit_root(self) -> None:
        study = self._study
        root = study.standings().get(study.root)
        if root is None:
            study.store.request_audit(study.root, Level.SCREEN)
            waiting = [each for each in self._pending(Level.SCREEN) if each.implementation == study.root]
            self._audit(waiting)
            root = study.standings().get(study.root)
        if root is None:
            raise RuntimeError("the time ended before the root was audited: allow more minutes")
        if not root.accepted or not root.timed:
            raise RuntimeError(f"the root is no valid start, {root.status}: {root.evidence.reason}")

    def _audit(self, requests: list[AuditRequest]) -> bool:
        """Run one job; return whether it gave evidence."""
        left = self._study.budget.seconds_left
        found = audits.run(
            self._study, requests, seconds=left, progress=self._on_event, run_job=self._run_job
        )
        for evidence in found:
            self._report(evidence)
        return bool(found)

    def _on_event(self, event: jobs.Event) -> None:
        self.tell(event.stage, event.candidate, event.message, fraction=event.fraction)
        if self._should_stop():
            raise StopRequested

    def _report(self, evidence: AuditEvidence) -> None:
        timed = evidence.status in ACCEPTED and processes(evidence) > 0
        self.tell(
            "audited",
            evidence.implementation,
            evidence.reason,
            status=evidence.status,
            ratio=aggregate(evidence).ratio if timed else None,
            smallest_gain=provable(evidence) if timed else None,
        )

    # Lineage

    def _settle(self) -> None:
        overtaken = 0
        for each in lineage.settle(self._study):
            if each.decision.granted:
                self.tell("promoted", each.sha256, each.decision.reason)
            elif "screen/incumbent" in each.decision.blocking:
                overtaken += 1
            else:
                self.tell("refused", each.sha256, each.decision.reason)
        if overtaken:
            self.tell("refused", "", f"{overtaken} candidates were measured against the former incumbent")

    # When to confirm, and when to end

    def _ending(self) -> Ending | None:
        study = self._study
        if self._should_stop():
            raise StopRequested
        if study.budget.audits_left < 1:
            return Ending.AUDITS
        each = audits.expected_seconds(study, Level.SCREEN) or 0.0
        if study.budget.seconds_left < each + self._reserved():
            return Ending.TIME
        if query.audits_since_promotion(study.store) >= study.store.study.patience:
            return Ending.PATIENCE
        return None

    def _reserved(self) -> float:
        """Seconds kept for the full audit of the best candidate, where one waits for it."""
        return self._full_seconds() if lineage.awaiting(self._study) else 0.0

    def _full_seconds(self) -> float:
        seen = audits.expected_seconds(self._study, Level.FULL)
        return seen or FULL_OVER_SCREEN * (audits.expected_seconds(self._study, Level.SCREEN) or 0.0)

    def _confirmation(self, ending: Ending | None) -> list[AuditRequest]:
        """The full audit of the best candidate that waits for one, if its time has come.

        A full audit costs as much as many screens, and a better candidate may come first. So it waits for the
        end of the search, unless full audits, this one included, stay within their share of the time.
        """
        waiting = lineage.awaiting(self._study)
        if not waiting or not (ending is not None or self._may_confirm()):
            return []
        self._study.store.request_audit(waiting[0].sha256, Level.FULL)
        return [each for each in self._pending(Level.FULL) if each.implementation == waiting[0].sha256]

    def _may_confirm(self) -> bool:
        budget, cost = self._study.budget, self._full_seconds()
        spent = math.fsum(_full_taken(each) for each in self._study.standings().values())
        return spent + cost <= CONFIRMING_SHARE * budget.seconds and budget.seconds_left >= 3 * cost


def _full_taken(standing: Standing) -> float:
    return 0.0 if standing.full is None else math.fsum(seconds for _, seconds in standing.full.seconds)
