"""Studies of thousands of implementations: what is read in bulk is what the records say, in seconds."""

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.search.fake_audit import FakeAudits, Settings, new_study
from tests.search.large import fill

from kernelbraid.ir import attempts, query, survey
from kernelbraid.ir.bulk import kept_objects
from kernelbraid.ir.evidence import ACCEPTED, Status
from kernelbraid.ir.reading import evidence_after
from kernelbraid.report import documents, render
from kernelbraid.search import audits, loop
from kernelbraid.search.proposers import external
from kernelbraid.search.proposers.knobs import KnobProposer
from kernelbraid.search.study import Study


def test_evidence_in_bulk_is_that_of_the_records(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, audits=8, seed=5) as study:
        loop.run(study, KnobProposer(5), run_job=fake)
        records = query.audits(study.store)
        with study.store.read() as session:
            found = evidence_after(session, 0)
            assert found == [(each.seq, each.evidence()) for each in records]
            assert evidence_after(session, records[3].seq) == found[4:]
            assert evidence_after(session, records[-1].seq) == []
        assert {each.status.value for each in records} > {"verified"}, "nothing was rejected: this shows less"


def test_lists_in_bulk_say_what_the_records_say(tmp_path: Path) -> None:
    def broken(settings: Settings) -> tuple[Status, str] | None:
        kept = settings["QUERY_TILE"] == 16 and settings["VALUES"] == "key_by_key"
        return None if kept else (Status.BITS_UNEQUAL, "batch")

    fake = FakeAudits(broken=broken)
    with new_study(tmp_path / "s", fake, audits=10, seed=5) as study:
        loop.run(study, KnobProposer(5), run_job=fake)
        store = study.store
        implementations, tried = query.implementations(store), attempts.attempts(store)
        assert query.hashes(store) == [each.sha256 for each in implementations]
        assert survey.labels(store) == [(each.sha256, each.label) for each in implementations]
        assert query.extent(store) == (query.audits(store)[-1].seq, implementations[-1].seq)
        rejected = [each for each in tried if each.status is not None and each.status not in ACCEPTED]
        assert len(rejected) > 1, "this shows less"
        for most in (0, 1, 100):
            wanted = rejected[max(0, len(rejected) - most) :]
            assert list(map(_told, attempts.rejected(store, most))) == list(map(_told, wanted))
        endings = attempts.endings(store)
        for each in tried:
            assert endings.get(each.modification.child) == (each.status, each.reason)
        listed = {each["implementation"]: each for each in documents.implementations(store)}
        for each in tried:
            row = listed[each.modification.child]
            assert row["parents"] == list(each.modification.parents) and row["reason"] == each.reason
            assert row["hypothesis"] == each.modification.hypothesis


def _told(attempt: attempts.Attempt) -> tuple[object, ...]:
    change = attempt.modification
    return change.id, change.parents, attempt.edit, attempt.status, attempt.reason, attempt.failed


def test_a_proposer_reads_evidence_again_when_there_is_more(tmp_path: Path) -> None:
    """What it keeps between two calls would otherwise hide later audits and proposals."""
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, audits=6, seed=5) as study:
        kept = KnobProposer(5)
        loop.run(study, kept, run_job=fake)
        assert kept.propose(study, 4) == KnobProposer(5).propose(study, 4)
        before = kept._evidence(study)
        assert kept._evidence(study) is before
        (proposal,) = kept.propose(study, 1)
        study.admit(proposal)
        assert kept._evidence(study) is not before, "a new implementation"
        assert kept.propose(study, 4) == KnobProposer(5).propose(study, 4)
        before = kept._evidence(study)
        audits.run(study, study.store.pending(), run_job=fake)
        assert kept._evidence(study) is not before, "a new audit"
        assert kept.expectations(study) == KnobProposer(5).expectations(study)


def test_the_collector_is_held_and_let_go() -> None:
    assert gc.isenabled()
    with kept_objects():
        assert not gc.isenabled()
        with kept_objects():
            pass
        assert not gc.isenabled(), "the outer one still reads"
    assert gc.isenabled()
    with pytest.raises(ValueError, match="x"), kept_objects():
        raise ValueError("x")
    assert gc.isenabled()


@pytest.mark.slow
def test_large_studies_answer_in_seconds(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    fill(folder, 5000).close()

    def show() -> None:
        with Study.open(folder) as study, kept_objects():
            assert len(documents.implementations(study.store)) == 5001
            study.summary()

    def report() -> None:
        with Study.open(folder) as study:
            render.write(study.store, tmp_path / "report.html")

    def seconds(work: Callable[[], object]) -> float:
        started = time.process_time()
        work()
        taken = time.process_time() - started
        print(f"{taken:.2f} s")
        return taken

    assert seconds(show) < 3.0  # about 1.1 s alone
    assert seconds(report) < 3.0  # about 1.2 s
    assert seconds(lambda: external.next_(folder)) < 3.0  # about 1.3 s
    assert (folder / "study.db").stat().st_size < 50 << 20  # 38 MiB, and 18 MiB of sources
