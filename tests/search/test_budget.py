"""Time is written down as it passes, and audits are counted by candidate."""

import math
from pathlib import Path

import pytest
from tests.search.fake_audit import FakeAudits, new_study

from kernelbraid.search import loop
from kernelbraid.search.budget import CLOSING, FLUSH_SECONDS, SEARCH, Budget
from kernelbraid.search.proposers.external import External


def test_without_limits_everything_is_left(tmp_path: Path) -> None:
    with new_study(tmp_path / "s", FakeAudits()) as study:
        assert study.budget.seconds_left == math.inf and study.budget.audits_left == math.inf


def test_a_killed_process_loses_little_of_its_time(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, minutes=1) as study:
        budget = Budget(study.store, fake.clock)
        with budget.spending(SEARCH):
            for _ in range(100):
                fake.now += 0.3
                budget.flush()
            assert budget.seconds == pytest.approx(30.0)
            killed = Budget(study.store, fake.clock)
            assert 30.0 - FLUSH_SECONDS <= killed.seconds <= 30.0
            assert killed.seconds_left == pytest.approx(60.0 - killed.seconds)
        assert Budget(study.store, fake.clock).seconds == pytest.approx(30.0)


def test_time_passes_only_while_searching(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, minutes=1) as study:
        fake.now += 1000.0
        study.budget.flush(0.0)
        assert study.budget.seconds == 0.0
        with study.budget.spending(SEARCH):
            fake.now += 90.0
        assert study.budget.seconds == 90.0 and study.budget.seconds_left == 0.0


def test_closing_interrupts_searching_and_counts_apart(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, minutes=1) as study:
        with study.budget.spending(SEARCH):
            fake.now += 10.0
            with study.budget.spending(CLOSING):
                fake.now += 100.0
                assert study.budget.spent(CLOSING) == 100.0
            fake.now += 5.0
        assert (study.budget.seconds, study.budget.spent(CLOSING)) == (15.0, 100.0)
        again = Budget(study.store, fake.clock)
        assert (again.seconds, again.spent(CLOSING)) == (15.0, 100.0)


def test_the_root_and_full_audits_are_not_counted_as_candidates(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, audits=3) as study:
        loop.run(study, External(), run_job=fake)
        assert study.budget.audited == 0 and study.budget.audits_left == 3
