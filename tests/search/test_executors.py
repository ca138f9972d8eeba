"""Where audits run: the local executor's turns, and what waiting costs."""

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.search.fake_audit import FakeAudits, new_study

from kernelbraid.audit import jobs
from kernelbraid.ir import proposing, query
from kernelbraid.ir.evidence import Level
from kernelbraid.search import audits, loop
from kernelbraid.search.audit_command import AuditCommand
from kernelbraid.search.executors import devices_of, lost, queued
from kernelbraid.search.executors.cluster import divided
from kernelbraid.search.executors.local import LocalExecutor, holding
from kernelbraid.search.proposers.knobs import KnobProposer


def test_one_comparison_a_device_at_a_time(tmp_path: Path) -> None:
    inside, most, order = 0, 0, threading.Lock()
    together = threading.Barrier(4)

    def work() -> None:
        nonlocal inside, most
        together.wait()
        with holding("cpu", tmp_path):
            with order:
                inside += 1
                most = max(most, inside)
            threading.Event().wait(0.02)
            with order:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most == 1
    with holding("cpu", tmp_path), holding("cuda", tmp_path):
        pass


def test_waiting_is_told_and_can_be_given_up(tmp_path: Path) -> None:
    told: list[jobs.Event] = []

    class EnoughError(Exception):
        pass

    def progress(event: jobs.Event) -> None:
        told.append(event)
        if len(told) == 2:
            raise EnoughError

    with holding("cpu", tmp_path), pytest.raises(EnoughError), holding("cpu", tmp_path, progress):
        pass
    assert [each.stage for each in told] == ["queue", "queue"]
    assert all(each.data["seconds"] > 0 for each in told)
    with holding("cpu", tmp_path):
        pass


class Slow:
    """Audits that wait for their device before each job, on the fake's clock."""

    def __init__(self, fake: FakeAudits, seconds: float, told: bool = True) -> None:
        self.fake, self.seconds, self.told = fake, seconds, told

    def __call__(self, job: jobs.AuditJob, results: Path, **given: Any) -> Path:
        self.fake.now += self.seconds
        if self.told:
            given["progress"](queued(self.seconds))
        return self.fake(job, results, **given)


@pytest.mark.parametrize("told", [True, False])
def test_the_queue_is_not_charged_to_the_budget(tmp_path: Path, told: bool) -> None:
    """The control is an executor that waits as long and does not tell."""
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, audits=6, minutes=60) as study:
        loop.run(study, KnobProposer(), run_job=Slow(fake, 100.0, told))
        jobs_run, waited = len(fake.ran), query.totals(study.store).queue_seconds
        assert waited == (100.0 * jobs_run if told else 0.0)
        audited = 6.0 * sum(each.level is Level.SCREEN for each in query.audits(study.store))
        searched = study.budget.seconds
        assert (searched <= audited + 60.0) == told, (searched, audited)


def test_a_lost_machine_is_recorded_and_its_audits_come_once(tmp_path: Path) -> None:
    fake = FakeAudits()

    def losing(job: jobs.AuditJob, results: Path, **given: Any) -> Path:
        given["progress"](lost([each.request for each in job.candidates], "host 7 went away"))
        return fake(job, results, **given)

    with new_study(tmp_path / "s", fake, audits=3) as study:
        loop.run(study, KnobProposer(), run_job=losing)
        told = proposing.interruptions(study.store)
        assert {each.reason for each in told} == {"host 7 went away"}
        found = query.audits(study.store)
        assert {each.request for each in told} == {each.request for each in found}
        assert len({each.request for each in found}) == len(found) and not study.store.pending()


def test_the_name_of_an_executor(tmp_path: Path) -> None:
    assert isinstance(audits.runner(None), LocalExecutor)
    assert isinstance(audits.runner("run {job} {results}"), AuditCommand)
    for command, executor in ((None, "slurm"), (None, "local:x"), ("run {job} {results}", "ray")):
        with pytest.raises(ValueError, match="executor"):
            audits.runner(command, executor)
    assert devices_of(FakeAudits()) == 1


def test_a_job_is_divided_evenly() -> None:
    assert [list(each) for each in divided("abcde", 2)] == [["a", "c", "e"], ["b", "d"]]  # type: ignore[arg-type]
    assert len(divided("ab", 4)) == 2 and divided("", 3) == []  # type: ignore[arg-type]
