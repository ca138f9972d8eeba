"""Studies of thousands of implementations: what is read in bulk is what the records say, in seconds."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.search.fake_audit import FakeAudits, new_study
from tests.search.large import fill

from kernelbraid.ir import query
from kernelbraid.ir.reading import evidence_after
from kernelbraid.report import documents, render
from kernelbraid.search import loop
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


@pytest.mark.slow
def test_large_studies_answer_in_seconds(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    fill(folder, 5000).close()

    def show() -> None:
        with Study.open(folder) as study:
            assert len(documents.implementations(study.store)) == 5001
            study.summary()

    def report() -> None:
        with Study.open(folder) as study:
            render.write(study.store, tmp_path / "report.html")

    def seconds(work: Callable[[], object]) -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    assert seconds(show) < 4.0  # about 1.6 s alone
    assert seconds(report) < 4.0  # about 1.7 s
    assert seconds(lambda: external.next_(folder)) < 6.0  # about 2.7 s
