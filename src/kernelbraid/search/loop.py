"""The search: action, audit, lineage, until a budget, patience or the opportunities end.

Every step reads what is recorded and records what it did, so the loop decides nothing from memory: killed
anywhere, it goes on where it was.
"""

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

from kernelbraid.audit import jobs
from kernelbraid.ir import query
from kernelbraid.ir.evidence import ACCEPTED, AuditEvidence, Level, Status
from kernelbraid.ir.held_out import shown
from kernelbraid.ir.schema import AuditRequest, Usage
from kernelbraid.ir.store import DuplicateSourceError
from kernelbraid.search import audits, lineage, opportunities
from kernelbraid.search.budget import CLOSING, SEARCH
from kernelbraid.search.executors import devices_of
from kernelbraid.search.measured import aggregate, processes, provable
from kernelbraid.search.proposers import Proposal, Proposer, ProposerSpent
from kernelbraid.search.standings import Standing
from kernelbraid.search.study import Study

BATCH = 4
"""Candidates in one job: they share its inputs, and are prepared two at a time."""
CAUTION = 1.2
"""Audits take different times; so many times the seconds seen are set aside."""
FULL_OVER_SCREEN = 2.0
"""Seconds of a full audit over those of a screen, until one was seen."""
CONFIRMING_SHARE = 1 / 8
"""Part of the searching time that full audits may take before the end of a search."""
WORTH_CONFIRMING = 5.0
"""Times a full audit's length that must be left after it: an incumbent pays by what is searched later."""
CLOSING_SECONDS = 900.0
"""Limit of the full audit that closes a search, beyond the time to search."""
MOST_CLOSINGS = 3
"""Candidates that are confirmed at the end, if the first ones are refused."""


class Ending(StrEnum):
    """Why a search ended."""

    TIME = "time"
    AUDITS = "audits"
    PATIENCE = "patience"
    OPPORTUNITIES = "opportunities"
    """The proposer has nothing left to try."""
    CALLS = "calls"
    """The proposer was asked as often as the study allows."""
    PROPOSER = "proposer"
    """The proposer's own budget is spent: tokens, money, or attempts in vain."""
    INTERRUPTED = "interrupted"
    """Asked to stop; `run` on the same study goes on."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a search is doing, for whoever watches."""

    stage: str
    """A stage of an audit (`build`, `screen`, ...), or `proposed`, `audited`, `promoted`, `refused`; or
    `proposer`, where the proposer says why there is no more."""
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

    At the end the best candidate gets its full audit, if it waits for one, beyond the time to search.

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
    with study.store.controller_lock(), study.budget.spending(SEARCH), _interrupts() as interrupted:
        search = _Search(study, proposer, progress, lambda: interrupted() or should_stop(), run_job)
        try:
            return search.run()
        except KeyboardInterrupt:
            search.tell("interrupted", "", "stopped; finished audits are recorded, the rest stays pending")
            return Ending.INTERRUPTED


def upcoming(
    study: Study,
    proposer: Proposer,
    most: int,
    progress: Callable[[Progress], None] = lambda _: None,
) -> list[AuditRequest]:
    """Settle what evidence decides, and return the pending audits that a search would run next.

    For audits that travel: their results come in between calls. The root comes first and alone; none are
    returned at the end of the search.

    Args:
        study: an open study.
        proposer: writes the candidates.
        most: audits at most.
        progress: told of decisions and proposals.

    Raises:
        ValueError: the study was made under another contract or harness.
        RuntimeError: another process searches it, or its root is not a valid implementation.
    """
    study.require_current()
    with study.store.controller_lock(), study.budget.spending(SEARCH):
        search = _Search(study, proposer, progress, lambda: False, jobs.run_job)
        return search.upcoming(most)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Remember a keyboard interrupt: one raised inside a finaliser or a callback would be lost."""
    seen = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield seen.is_set
        return

    def notice(number: int, frame: object) -> None:
        seen.set()
        before(number, frame)  # type: ignore[arg-type]

    signal.signal(signal.SIGINT, notice)
    try:
        yield seen.is_set
    finally:
        signal.signal(signal.SIGINT, before)


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
        self._last_pace = 0.0
        self._proposer_spent = False
        self._count()

    def run(self) -> Ending:
        self._report(audits.recover(self._study))
        self._audit_root()
        closings = 0
        while True:
            self._settle()
            ending = self._ending()
            requests = [] if ending is not None else self._confirmation() or self._screens()
            if requests:
                if not self._audit(requests, self._study.budget.seconds_left):
                    self._require_time_limit()
                continue
            ending = ending or self._ending() or self._nothing_proposed()
            if closings == MOST_CLOSINGS or not self._close():
                return ending
            closings += 1

    def upcoming(self, most: int) -> list[AuditRequest]:
        if self._study.standings().get(self._study.root) is None:
            return self._root_requests()
        self._root_accepted()
        self._settle()
        if self._ending() is None:
            return self._confirmation() or self._screens(most)
        waiting = lineage.awaiting(self._study)
        return (self._begun(waiting) or self._full(waiting[0])) if waiting else []

    def _close(self) -> bool:
        """Confirm the best candidate that waits for it, on top of the time to search; False if none waits."""
        waiting = lineage.awaiting(self._study)
        if not waiting:
            return False
        requests = self._begun(waiting) or self._full(waiting[0])
        with self._study.budget.spending(CLOSING):
            found = self._audit(requests, CLOSING_SECONDS)
        if not found:
            raise RuntimeError(
                f"the closing audit took more than {CLOSING_SECONDS:.0f} s and is still pending"
            )
        return True

    def _require_time_limit(self) -> None:
        """A job gave no evidence: that is the time limit's doing, or something is wrong."""
        if math.isinf(self._study.budget.seconds_left):
            raise RuntimeError("an audit ended without evidence though no time limit cut it short")

    def tell(self, stage: str, candidate: str, message: str, **details: object) -> None:
        budget = self._study.budget
        budget.flush()
        self._progress(
            Progress(
                stage,
                candidate[:12],
                message,
                audited=self._audited,
                audits_left=self._audits_left,
                seconds_left=budget.seconds_left,
                **details,  # type: ignore[arg-type]
            )
        )

    # Action

    def _screens(self, most: int | None = None) -> list[AuditRequest]:
        """Pending screens, after asking the proposer for candidates if there are none."""
        most = self._affordable() if most is None else most
        waiting = self._pending(Level.SCREEN)
        if not waiting and not self._proposer_spent:
            opportunities.observe(self._study)
            self._proposer.observe(self._study)
            self._propose(most)
            waiting = self._pending(Level.SCREEN)
        return waiting[:most]

    def _propose(self, most: int) -> None:
        """Admit proposals until one is new to the study or none comes."""
        while True:
            try:
                proposals = self._proposer.propose(self._study, most)
            except ProposerSpent as spent:
                self._proposer_spent = True
                self.tell("proposer", "", str(spent))
                return
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
        each, left = self._pace(), self._study.budget.seconds_left
        by_time = left / each if each > 0 else math.inf
        most = BATCH * devices_of(self._run_job)
        return int(max(1, min(most, by_time, self._study.budget.audits_left)))

    def _pace(self) -> float:
        """Seconds to allow for a screen: by the last job, or by the stages of recorded audits."""
        seen = self._last_pace or audits.expected_seconds(self._study, Level.SCREEN) or 0.0
        return CAUTION * seen

    # Audit

    def _audit_root(self) -> None:
        if self._study.standings().get(self._study.root) is None:
            self._audit(self._root_requests(), self._study.budget.seconds_left)
        self._root_accepted()

    def _root_requests(self) -> list[AuditRequest]:
        study = self._study
        study.store.request_audit(study.root, Level.SCREEN)
        return [each for each in self._pending(Level.SCREEN) if each.implementation == study.root]

    def _root_accepted(self) -> None:
        root = self._study.standings().get(self._study.root)
        if root is None:
            raise RuntimeError("the time ended before the root was audited: allow more minutes")
        if not root.accepted or not root.timed:
            raise RuntimeError(f"the root is no valid start, {root.status}: {root.evidence.reason}")

    def _audit(self, requests: list[AuditRequest], seconds: float) -> bool:
        """Run one job; return whether it gave evidence."""
        full = bool(self._study.held_out) and all(each.level is Level.FULL for each in requests)
        progress, run_job = self._on_kept_event if full else self._on_event, self._run_job
        before = self._study.budget.seconds
        found = audits.run(self._study, requests, seconds=seconds, progress=progress, run_job=run_job)
        self._report(found)
        if found and all(each.level is Level.SCREEN for each in found):
            self._last_pace = (self._study.budget.seconds - before) / len(found)
        return bool(found)

    def _on_event(self, event: jobs.Event) -> None:
        self.tell(event.stage, event.candidate, event.message, fraction=event.fraction)
        if self._should_stop():
            raise StopRequested

    def _on_kept_event(self, event: jobs.Event) -> None:
        """Tell no times: an agent that waits for its audit may read them."""
        self._on_event(
            replace(event, message=event.stage if event.stage != "done" else "the full audit ended")
        )

    def _count(self) -> None:
        """What every message tells, counted when it changes: there are many messages an audit."""
        self._audited = self._study.budget.audited
        self._audits_left = self._study.budget.audits_left

    def _report(self, found: Sequence[AuditEvidence]) -> None:
        self._count()
        for evidence in (shown(each, self._study.held_out) for each in found):
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

    # When to end, and when to confirm

    def _ending(self) -> Ending | None:
        study = self._study
        if self._should_stop():
            raise StopRequested
        if study.budget.audits_left < 1:
            return Ending.AUDITS
        if study.budget.seconds_left <= self._pace():
            return Ending.TIME
        if study.budget.proposer_calls_left < 1:
            return None if self._pending(Level.SCREEN) else Ending.CALLS
        if query.audits_since_promotion(study.store) >= study.store.study.patience:
            return Ending.PATIENCE
        return None

    def _nothing_proposed(self) -> Ending:
        return Ending.PROPOSER if self._proposer_spent else Ending.OPPORTUNITIES

    def _confirmation(self) -> list[AuditRequest]:
        """The full audit of the best candidate that waits for one, if its time has come.

        A full audit costs as much as many screens, and a better candidate may come first. So it waits for the
        end of the search, unless full audits, this one included, stay within their share of the time.
        """
        waiting = lineage.awaiting(self._study)
        begun = self._begun(waiting)
        if not waiting or begun:
            return begun
        cost = audits.expected_seconds(self._study, Level.FULL) or FULL_OVER_SCREEN * self._pace()
        spent = math.fsum(_full_taken(each) for each in self._study.standings().values())
        budget = self._study.budget
        affordable = spent + cost <= CONFIRMING_SHARE * budget.seconds
        early = affordable and budget.seconds_left >= WORTH_CONFIRMING * cost
        return self._full(waiting[0]) if early else []

    def _begun(self, waiting: list[Standing]) -> list[AuditRequest]:
        """A full audit that was interrupted: it was due then, and is now."""
        hashes = {each.sha256 for each in waiting}
        return [each for each in self._pending(Level.FULL) if each.implementation in hashes][:1]

    def _full(self, candidate: Standing) -> list[AuditRequest]:
        self._study.store.request_audit(candidate.sha256, Level.FULL)
        return [each for each in self._pending(Level.FULL) if each.implementation == candidate.sha256]


def _full_taken(standing: Standing) -> float:
    return 0.0 if standing.full is None else math.fsum(seconds for _, seconds in standing.full.seconds)
