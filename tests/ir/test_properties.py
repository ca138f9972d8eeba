"""Random histories, legal and illegal, against a model of what the store should answer."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.ir.plain import ROOT, answer, audited, child, new_store, source

from kernelbraid.ir import query
from kernelbraid.ir.evidence import ACCEPTED, Level, Status
from kernelbraid.ir.exchange import export_study, import_study
from kernelbraid.ir.schema import Lineage
from kernelbraid.ir.store import Store

ANSWERS = (Status.VERIFIED, Status.VERIFIED, Status.STOPPED, Status.BITS_UNEQUAL, Status.CRASHED)
numbers = st.integers(0, 10**6)


class Histories(RuleBasedStateMachine):
    """Everything a search may do, in any order."""

    @initialize()
    def begin(self) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.store = new_store(self.folder / "study")
        self.known = [ROOT.sha256]
        self.parents: dict[str, tuple[str, ...]] = {ROOT.sha256: ()}
        self.answers: dict[str, list[tuple[str, Level, Status, str]]] = {ROOT.sha256: []}
        self.promoted: list[str] = []
        self.decided: dict[str, Lineage] = {}
        self.audits = 0

    def pick(self, number: int) -> str:
        return self.known[number % len(self.known)]

    def verified(self, sha256: str) -> bool:
        answers = self.answers[sha256]
        accepted = any(s in ACCEPTED and level is not Level.SMOKE for _, level, s, _ in answers)
        return accepted and all(s in ACCEPTED for _, _, s, _ in answers)

    def incumbent(self) -> str:
        return next((sha for sha in reversed(self.promoted) if self.verified(sha)), ROOT.sha256)

    @rule(number=numbers, picks=st.lists(numbers, min_size=1, max_size=3))
    def add(self, number: int, picks: list[int]) -> None:
        parents = tuple(dict.fromkeys(self.pick(n) for n in picks))
        new = source(number % 30).sha256
        legal = new not in self.known and all(self.verified(sha) for sha in parents)
        try:
            child(self.store, number % 30, parents)
        except ValueError:
            assert not legal
            return
        assert legal
        self.known.append(new)
        self.parents[new], self.answers[new] = parents, []

    @rule(number=numbers, level=st.sampled_from(list(Level)), status=st.sampled_from(ANSWERS))
    def audit(self, number: int, level: Level, status: Status) -> None:
        sha = self.pick(number)
        incumbent = self.incumbent()
        request = audited(self.store, sha, status, level)
        self.answers[sha].append((request, level, status, incumbent))
        self.audits += 1

    @rule(number=numbers, status=st.sampled_from(ANSWERS))
    def answer_again(self, number: int, status: Status) -> None:
        request = self.store.request_audit(self.pick(number), Level.SCREEN)
        pending = answer(self.store, request, status)
        assert not self.store.record(answer(self.store, request, Status.INTERRUPTED))
        assert self.store.record(pending)
        assert not self.store.record(pending)
        self.answers[pending.implementation].append((request, Level.SCREEN, status, pending.incumbent))
        self.audits += 1

    @precondition(lambda self: self.audits > 1)
    @rule(first=numbers, second=numbers)
    def promote(self, first: int, second: int) -> None:
        audits = [(sha, *entry) for sha, entries in self.answers.items() for entry in entries]
        sha, screen, level, status, against = audits[first % len(audits)]
        other, full, full_level, full_status, full_against = audits[second % len(audits)]
        legal = (
            (level, full_level, status, full_status)
            == (Level.SCREEN, Level.FULL, Status.VERIFIED, Status.VERIFIED)
            and sha == other
            and against == full_against == self.incumbent()
            and self.verified(sha)
        )
        try:
            self.store.promote(screen_audit=screen, full_audit=full, granted=True, reason="faster")
        except ValueError:
            assert not legal
            return
        assert legal
        self.promoted.append(sha)

    @rule(number=numbers)
    def win(self, number: int) -> None:
        sha = self.pick(number)
        self.audit(number, Level.SCREEN, Status.VERIFIED)
        self.audit(number, Level.FULL, Status.VERIFIED)
        if self.verified(sha):
            (screen, *_), (full, *_) = self.answers[sha][-2:]
            self.store.promote(screen_audit=screen, full_audit=full, granted=True, reason="faster")
            self.promoted.append(sha)

    @rule(number=numbers, decision=st.sampled_from(list(Lineage)))
    def decide(self, number: int, decision: Lineage) -> None:
        sha = self.pick(number)
        try:
            self.store.decide(sha, decision, reason="r", decided_by="test")
        except ValueError:
            assert decision is not Lineage.ABANDON and not self.verified(sha)
            return
        self.decided[sha] = decision

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store.open(self.folder / "study")

    @invariant()
    def answers_agree(self) -> None:
        verified = {sha for sha in self.known if self.verified(sha)}
        left = {sha for sha in verified if self.decided.get(sha) in (Lineage.ARCHIVE, Lineage.ABANDON)}
        with self.store.read():
            assert {i.sha256 for i in query.verified(self.store)} == verified
            assert {i.sha256 for i in query.frontier(self.store)} == verified - left
            archived = {sha for sha in left if self.decided[sha] is Lineage.ARCHIVE}
            assert {i.sha256 for i in query.archive(self.store)} == archived
            assert query.incumbent(self.store).sha256 == self.incumbent()
            totals = query.totals(self.store)
        candidates = {sha: [s for _, _, s, _ in a] for sha, a in self.answers.items() if sha != ROOT.sha256}
        rejected = [sha for sha, statuses in candidates.items() if any(s not in ACCEPTED for s in statuses)]
        assert totals.candidates == len(candidates)
        assert totals.audited == sum(1 for statuses in candidates.values() if statuses)
        assert sum(totals.rejected.values()) == len(rejected)
        assert totals.verified == len(verified - {ROOT.sha256})
        assert totals.audits == self.audits
        assert totals.pending == totals.unequal == 0

    def teardown(self) -> None:
        for sha in self.known[-2:]:
            ancestors = {step.implementation.sha256 for step in query.lineage(self.store, sha)}
            expected, open_ = {sha}, [sha]
            while open_:
                new = set(self.parents[open_.pop()]) - expected
                expected |= new
                open_ += new
            assert ancestors == expected
        self.store.check()
        export_study(self.store, self.folder / "a.jsonl")
        with import_study(self.folder / "a.jsonl", self.folder / "copy") as copy:
            export_study(copy, self.folder / "b.jsonl")
        assert (self.folder / "a.jsonl").read_bytes() == (self.folder / "b.jsonl").read_bytes()
        self.store.close()
        self.temporary.cleanup()


quick = settings(
    max_examples=6, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_random_histories() -> None:
    run_state_machine_as_test(Histories, settings=quick)


@pytest.mark.slow
def test_many_random_histories() -> None:
    run_state_machine_as_test(Histories, settings=settings(quick, max_examples=100, stateful_step_count=50))
