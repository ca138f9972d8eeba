"""Kill -9 at random moments loses nothing and counts nothing twice."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.search.fake_audit import FakeAudits, new_study, reopened

from kernelbraid.ir import query
from kernelbraid.search import loop
from kernelbraid.search.proposers.knobs import KnobProposer

AUDITS = 18
REPOSITORY = Path(__file__).parents[2]


def killed_after(folder: Path, seconds: float) -> bool:
    """Search in a process of its own and kill it; return whether it was still searching."""
    command = [sys.executable, "-m", "tests.search.searcher", str(folder)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "searching\n"
        time.sleep(seconds)
        process.kill()
        return process.stdout.read() == ""


@pytest.fixture(autouse=True)
def no_confirmation_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the searcher: it would depend on the clock, of which a kill takes some."""
    monkeypatch.setattr(loop, "CONFIRMING_SHARE", 0.0)


def survives(tmp_path: Path, kills: int, seed: int) -> None:
    calm = FakeAudits()
    with new_study(tmp_path / "calm", calm, audits=AUDITS) as study:
        assert loop.run(study, KnobProposer(), run_job=calm) is loop.Ending.AUDITS
        expected = [each.sha256 for each in query.implementations(study.store)]
        winner = study.incumbent
    folder = tmp_path / "killed"
    new_study(folder, FakeAudits(), audits=AUDITS).close()
    moments = random.Random(seed)
    hits = 0
    for _ in range(kills):
        hits += killed_after(folder, moments.uniform(0.0, 2.0 / kills))
        with reopened(folder, FakeAudits()) as study:
            study.store.check()
            audits = query.audits(study.store)
            assert len(audits) == len({each.request for each in audits})
    assert hits >= kills // 4, "most searches ended before they were killed"
    fake = FakeAudits()
    with reopened(folder, fake) as study:
        assert loop.run(study, KnobProposer(), run_job=fake) is loop.Ending.AUDITS
        study.store.check()
        assert [each.sha256 for each in query.implementations(study.store)] == expected
        assert study.incumbent == winner and study.store.pending() == []
        assert study.budget.audited == AUDITS


def test_a_search_survives_kills(tmp_path: Path) -> None:
    survives(tmp_path, kills=3, seed=1)


@pytest.mark.slow
def test_a_search_survives_twenty_kills(tmp_path: Path) -> None:
    survives(tmp_path, kills=20, seed=2)
