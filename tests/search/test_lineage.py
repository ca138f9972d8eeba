"""What follows an audit: which candidate is confirmed first, and which stay branch points."""

import math
from pathlib import Path

import pytest
from tests.search.fake_audit import ROOT, FakeAudits, Settings, new_study, settings_of

from kernelbraid.contract import KnobValue, Source
from kernelbraid.ir import query
from kernelbraid.ir.schema import Lineage
from kernelbraid.search import audits, lineage, loop
from kernelbraid.search.proposers import Proposal, edits
from kernelbraid.search.proposers.external import External
from kernelbraid.search.study import Study


def screened(study: Study, fake: FakeAudits, *settings: dict[str, KnobValue]) -> None:
    """Audit the root and edits of it, without deciding anything."""
    loop.run(study, External(), run_job=fake)
    for each in settings:
        source = edits.apply(ROOT, each, study.contract)
        study.admit(Proposal(source, (ROOT.sha256,), "a test", proposer="test"))
    audits.run(study, study.store.pending(), run_job=fake)


def gains(**effects: float) -> FakeAudits:
    def model(settings: Settings, phase: str) -> float:
        return sum(effects.get(f"{name}__{value}", 0.0) for name, value in settings.items())

    return FakeAudits(model=model, noise=0.003)


def waiting(study: Study) -> list[dict[str, KnobValue]]:
    found = [settings_of(study.store.source(each.sha256)) for each in lineage.awaiting(study)]
    return [edits.differences(settings_of(ROOT), each) for each in found]


def test_the_fastest_candidate_is_confirmed_first(tmp_path: Path) -> None:
    fake = gains(VALUES__keys_by_4=-0.2, PARTITION__cost=-0.3, KEY_BLOCK__128=-0.4)
    with new_study(tmp_path / "s", fake) as study:
        screened(study, fake, {"VALUES": "keys_by_4"}, {"PARTITION": "cost"}, {"KEY_BLOCK": 128})
        assert waiting(study) == [{"KEY_BLOCK": 128}, {"PARTITION": "cost"}, {"VALUES": "keys_by_4"}]


def test_a_job_names_what_the_fastest_waiting_candidate_needs(tmp_path: Path) -> None:
    fake = gains(VALUES__keys_by_4=-0.2, PARTITION__cost=-0.3)
    with new_study(tmp_path / "s", fake) as study:
        screened(study, fake, {"VALUES": "keys_by_4"}, {"PARTITION": "cost"})
        assert [job.to_beat for job in fake.ran] == [1.0] * len(fake.ran)
        source = edits.apply(ROOT, {"KEY_BLOCK": 128}, study.contract)
        study.admit(Proposal(source, (ROOT.sha256,), "a test", proposer="test"))
        job = audits.job_of(study, study.store.pending())
        assert job.to_beat == pytest.approx(math.exp(-0.3), rel=0.02)


def test_among_equally_fast_ones_the_incumbents_bits_are_kept(tmp_path: Path) -> None:
    fake = gains(PARTITION__cost=-0.3, KEY_BLOCK__128=-0.3001)
    fake.noise, fake.draw = 0.01, ("two within their errors",)
    with new_study(tmp_path / "s", fake) as study:
        screened(study, fake, {"KEY_BLOCK": 128}, {"PARTITION": "cost"})
        standings = {each.sha256: each for each in lineage.awaiting(study)}
        assert len(standings) == 2
        one, two = standings.values()
        assert one.log_objective is not None and two.log_objective is not None
        near = abs(one.log_objective - two.log_objective) <= (one.error**2 + two.error**2) ** 0.5
        assert near and waiting(study)[0] == {"PARTITION": "cost"}


def test_faster_and_equal_ones_are_continued_and_slower_ones_archived(tmp_path: Path) -> None:
    fake = gains(VALUES__keys_by_4=-0.2, PARTITION__cost=0.03)
    with new_study(tmp_path / "s", fake) as study:
        screened(study, fake, {"VALUES": "keys_by_4"}, {"PARTITION": "cost"}, {"EXP2_DEGREE": 4})
        loop.run(study, External(), run_job=fake)
        fast, slow, wrong = [each.sha256 for each in query.implementations(study.store)][1:]
        assert [each.decision for each in query.lineage_decisions(study.store, fast)] == [Lineage.CONTINUE]
        (archived,) = query.lineage_decisions(study.store, slow)
        assert archived.decision is Lineage.ARCHIVE and "above its parent's" in archived.reason
        assert query.lineage_decisions(study.store, wrong) == []
        assert [each.sha256 for each in query.archive(study.store)] == [slow]
        assert wrong not in {each.sha256 for each in query.frontier(study.store)}


def test_every_audited_candidate_gets_one_decision_and_settling_again_adds_none(tmp_path: Path) -> None:
    fake = gains(VALUES__keys_by_4=-0.2)
    with new_study(tmp_path / "s", fake) as study:
        screened(study, fake, {"VALUES": "keys_by_4"}, {"QUERY_TILE": 1}, {"EXP2_DEGREE": 4})
        assert len(lineage.settle(study)) == 2
        assert lineage.settle(study) == []
        loop.run(study, External(), run_job=fake)
        decided = [each.implementation for each in query.promotions(study.store)]
        assert len(decided) == len(set(decided)) == 3
        assert lineage.settle(study) == [] and lineage.awaiting(study) == []


def test_an_archived_parent_is_measured_again_before_its_child(tmp_path: Path) -> None:
    fake = gains(VALUES__keys_by_4=-0.2, PARTITION__cost=0.03)
    with new_study(tmp_path / "s", fake) as study:
        screened(study, fake, {"VALUES": "keys_by_4"}, {"PARTITION": "cost"})
        loop.run(study, External(), run_job=fake)
        fast, slow = [each.sha256 for each in query.implementations(study.store)][1:]
        assert study.incumbent == fast and [e.sha256 for e in query.archive(study.store)] == [slow]
        text = study.store.source(slow).text.replace("CHUNK = 1024", "CHUNK = 2048", 1)
        study.admit(Proposal(Source(text), (slow,), "longer chunks", proposer="someone"))
        pending = [each.implementation for each in study.store.pending()]
        assert pending[0] == slow and len(pending) == 2
        assert [each.sha256 for each in query.archive(study.store)] == []
        taken_up = query.lineage_decisions(study.store, slow)[-1]
        assert (taken_up.decision, taken_up.decided_by) == (Lineage.CONTINUE, "someone")
        before = study.standings()[slow].evidence
        audits.run(study, study.store.pending(), run_job=fake)
        after = study.standings()[slow].evidence
        assert before.incumbent == study.root and after.incumbent == fast, "beside today's incumbent"
        study.admit(Proposal(Source(text.replace("= 2048", "= 512")), (fast,), "shorter", proposer="a"))
        assert fast not in [each.implementation for each in study.store.pending()], "it was not archived"
