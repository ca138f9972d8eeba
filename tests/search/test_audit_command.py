"""Audits by a command: what it is told, and what becomes of one that fails."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.search.fake_audit import ROOT, FakeAudits, new_study
from tests.search.killing import gone

from kernelbraid.audit import jobs
from kernelbraid.ir import proposing, query
from kernelbraid.ir.evidence import Level
from kernelbraid.search import audits, loop
from kernelbraid.search.audit_command import AuditCommand
from kernelbraid.search.proposers.external import External

REMOTE = """
import sys
from pathlib import Path
from kernelbraid.audit import jobs
from tests.search.fake_audit import FakeAudits
job, results, fail, count = sys.argv[1:5]
seen = Path(count)
runs = int(seen.read_text()) if seen.exists() else 0
seen.write_text(str(runs + 1))
if runs < int(fail):
    print("connection lost")
    sys.exit(255)
FakeAudits()(jobs.read_job(Path(job)), Path(results))
"""
"""Stands for `kernelbraid audit run` on another host."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "WAIT_SECONDS", 0.01)


def command(tmp_path: Path, *, failures: int = 0) -> AuditCommand:
    script = tmp_path / "remote host.py"
    script.write_text(REMOTE)
    return AuditCommand(f"{sys.executable} '{script}' {{job}} {{results}} {failures} '{tmp_path / 'runs'}'")


def test_a_search_audits_by_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:{Path.cwd() / 'src'}")
    with new_study(tmp_path / "a study", FakeAudits(), proposer="external") as study:
        assert loop.run(study, External(), run_job=command(tmp_path)) is loop.Ending.OPPORTUNITIES
        assert [each.level for each in query.audits(study.store)] == [Level.SCREEN]
        assert proposing.interruptions(study.store) == []
        assert not list((study.folder / "jobs").iterdir()) and not list((study.folder / "results").iterdir())


def test_a_failure_is_an_interruption_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:{Path.cwd() / 'src'}")
    with new_study(tmp_path / "s", FakeAudits(), proposer="external") as study:
        loop.run(study, External(), run_job=command(tmp_path, failures=2))
        (audit,) = query.audits(study.store)
        found = proposing.interruptions(study.store)
        assert [each.request for each in found] == [audit.request] * 2
        assert found[0].reason == "the audit command ended with 255: connection lost"
        assert found[0].output == "connection lost\n"
        study.store.check()


def test_a_command_that_keeps_failing_stops_the_search_and_loses_nothing(tmp_path: Path) -> None:
    with new_study(tmp_path / "s", FakeAudits(), proposer="external") as study:
        with pytest.raises(RuntimeError, match=r"ended with 3: no such host \(3 times; the"):
            broken = AuditCommand("echo {job} {results}; echo no such host; exit 3")
            loop.run(study, External(), run_job=broken)
        assert len(study.store.pending()) == 1 and len(proposing.interruptions(study.store)) == 3
        assert loop.run(study, External(), run_job=FakeAudits()) is loop.Ending.OPPORTUNITIES
        study.store.check()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (": {job} {results}", "left no results"),
        ("echo {job} >/dev/null; echo hello > {results}", "left no results: .* is not a results file"),
    ],
)
def test_a_command_without_results_is_an_interruption(tmp_path: Path, template: str, reason: str) -> None:
    with (
        new_study(tmp_path / "s", FakeAudits(), proposer="external") as study,
        pytest.raises(RuntimeError, match=reason),
    ):
        loop.run(study, External(), run_job=AuditCommand(template))


def test_the_results_of_another_job_are_not_taken(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    with new_study(tmp_path / "o", FakeAudits(), proposer="external") as study:
        study.store.request_audit(ROOT.sha256, Level.SCREEN)
        FakeAudits()(audits.job_of(study, study.store.pending()), other)
    with new_study(tmp_path / "s", FakeAudits(), proposer="external") as study:
        with pytest.raises(RuntimeError, match="the results of another job"):
            loop.run(study, External(), run_job=AuditCommand(f": {{job}}; cp {other} {{results}}"))
        assert query.audits(study.store) == []


def test_a_command_ends_with_its_time(tmp_path: Path) -> None:
    told: list[jobs.Event] = []
    with new_study(tmp_path / "s", FakeAudits(), proposer="external") as study:
        study.store.request_audit(ROOT.sha256, Level.SCREEN)
        job = audits.job_of(study, study.store.pending())
        start = time.monotonic()
        slow = AuditCommand("sleep 60 & wait; : {job} {results} {minutes}")
        slow(job, study.folder / "results" / "r.jsonl", minutes=0.01, progress=told.append)
        assert time.monotonic() - start < 8 and told


def test_a_stop_ends_the_command(tmp_path: Path) -> None:
    with new_study(tmp_path / "s", FakeAudits(), proposer="external") as study:
        stops = iter([False, True])
        start = time.monotonic()
        ending = loop.run(
            study,
            External(),
            run_job=AuditCommand("sleep 60 & wait; : {job} {results}"),
            should_stop=lambda: next(stops, True),
        )
        assert ending is loop.Ending.INTERRUPTED and time.monotonic() - start < 8
        assert len(study.store.pending()) == 1


SEARCH = """
import sys
from pathlib import Path
from kernelbraid.search.audit_command import AuditCommand
AuditCommand(sys.argv[1] + "; : {job} {results}")._run(sys.argv[1], 1, None, None)
"""


@pytest.mark.parametrize(
    "command",
    [
        "echo $$; sleep 600",
        "(echo $$; sleep 600 | cat) && true",
        f"{sys.executable} -c 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'; true",
    ],
)
def test_a_command_ends_with_the_search_that_was_killed(command: str) -> None:
    """All of it: of a pipe and of a list too, not just the shell that runs them."""
    paths = os.pathsep.join([str(Path.cwd() / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    search = subprocess.Popen(
        [sys.executable, "-c", SEARCH, command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    with search:
        assert search.stdout is not None
        assert int(search.stdout.readline()) > 0
        deadline = time.monotonic() + 20
        while not (below := psutil.Process(search.pid).children(recursive=True)) or len(below) < 2:
            assert time.monotonic() < deadline
        search.kill()
    assert gone(below, 10.0)


@pytest.mark.parametrize("code", [0, 7])
def test_a_command_says_how_it_ended(code: int, tmp_path: Path) -> None:
    """Also one with a comment at its end, and one in several lines."""
    for text in (f"exit {code}  # done", f"true\n(exit {code})"):
        with (tmp_path / "out").open("wb") as out:
            told = AuditCommand(": {job} {results}")
            assert told._run(text, out.fileno(), None, None) == code


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("run {job}", r"must name \{results\}"),
        ("run", r"must name \{job\} and \{results\}"),
        ("run {job} {results} {host}", "may name job, results, minutes, got"),
        ("run {job} {results} {", "no template"),
    ],
)
def test_bad_templates_are_refused(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AuditCommand(template)


def test_paths_are_quoted(tmp_path: Path) -> None:
    with new_study(tmp_path / "it's a; study", FakeAudits(), proposer="external") as study:
        study.store.request_audit(ROOT.sha256, Level.SCREEN)
        job = audits.job_of(study, study.store.pending())
        out = tmp_path / "told.json"
        probe = "import json, sys; json.dump(sys.argv[2:], open(sys.argv[1], 'w'))"
        told = AuditCommand(f'{sys.executable} -c "{probe}" {out} {{job}} {{results}}; exit 1')
        with pytest.raises(RuntimeError, match="ended with 1: it printed nothing"):
            told(job, study.folder / "results" / "r.jsonl")
        assert json.loads(out.read_text())[1] == str(study.folder / "results" / "r.jsonl")
