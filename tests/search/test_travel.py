"""Audits that travel: export, run elsewhere, import, and on."""

from pathlib import Path

import pytest
from tests.search.fake_audit import FakeAudits, new_study

from kernelbraid.audit import jobs
from kernelbraid.ir import query
from kernelbraid.ir.evidence import Level
from kernelbraid.search import audits, loop, travel
from kernelbraid.search.study import Study


def there_and_back(study: Study, fake: FakeAudits, folder: Path, number: int) -> jobs.AuditJob:
    """Export what comes next, run it, and import its results."""
    travel.export(study, folder / f"{number}.json", propose=True)
    job = jobs.read_job(folder / f"{number}.json")
    results = fake(job, folder / f"{number}.jsonl")
    assert len(audits.take_in(study, results).recorded) == len(job.candidates)
    return job


def test_a_study_that_travels_ends_where_a_search_does(tmp_path: Path) -> None:
    fake = FakeAudits()
    study = new_study(tmp_path / "study", fake, audits=12)
    made = []
    with pytest.raises(ValueError, match="nothing left to audit"):
        for number in range(40):
            made.append(there_and_back(study, fake, tmp_path, number))
    study.store.check()
    assert [c.source.sha256 for c in made[0].candidates] == [study.root], "the root comes first and alone"
    assert all(len(job.candidates) <= loop.BATCH for job in made)
    assert any(job.level is Level.FULL for job in made)
    assert query.incumbent(study.store).sha256 != study.root


def test_an_export_that_was_lost_is_made_again(tmp_path: Path) -> None:
    fake = FakeAudits()
    study = new_study(tmp_path / "study", fake, audits=12)
    there_and_back(study, fake, tmp_path, 0)
    for name in ("a", "b"):
        assert travel.export(study, tmp_path / name, 3, propose=True)["audits"] > 0
    first, second = (jobs.read_job(tmp_path / name) for name in ("a", "b"))
    assert first.candidates == second.candidates


def test_without_proposals_only_what_is_pending_leaves(tmp_path: Path) -> None:
    study = new_study(tmp_path / "study", FakeAudits())
    with pytest.raises(ValueError, match="no pending audit"):
        travel.export(study, tmp_path / "job.json")


def test_a_study_for_another_machine_needs_no_device_here(tmp_path: Path) -> None:
    fake = FakeAudits()
    with pytest.raises(ValueError, match="no backend 'tpu'"):
        new_study(tmp_path / "study", fake, device="tpu", elsewhere=True)
