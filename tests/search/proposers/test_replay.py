"""Recorded proposals, made again against fresh audits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.search.fake_audit import ROOT, FakeAudits, Settings, new_study, reopened

from kernelbraid.ir import query, replaying
from kernelbraid.ir.evidence import Status
from kernelbraid.ir.exchange import export_study, import_study
from kernelbraid.search import ablation, loop
from kernelbraid.search.ablation import Plan
from kernelbraid.search.proposers.arms import Arm
from kernelbraid.search.proposers.knobs import KnobProposer
from kernelbraid.search.proposers.replay import Replay, made_from
from kernelbraid.search.study import Study
from kernelbraid.search.travel import proposer_of

AUDITS = 9


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "original"
    fake = FakeAudits()
    with new_study(folder, fake, audits=AUDITS) as study:
        loop.run(study, KnobProposer(), run_job=fake)
        assert study.incumbent != study.root
    return folder


def derivation(study: Study) -> list[tuple[str, tuple[str, ...]]]:
    return [(each.sha256, study.parents(each.sha256)) for each in query.implementations(study.store)]


def replayed(folder: Path, original: Path, fake: FakeAudits, arm: Arm = Arm.FULL, **given: Any) -> Study:
    operator, root, proposals = made_from(original)
    assert operator == "attention" and root.sha256 == ROOT.sha256
    study = new_study(folder, fake, root=root, proposer="replay", replay=proposals, **given)
    loop.run(study, Replay(arm), run_job=fake)
    study.store.check()
    return study


def test_a_derivation_is_reproduced(tmp_path: Path, original: Path) -> None:
    with Study.open(original) as before, replayed(tmp_path / "s", original, FakeAudits()) as study:
        assert derivation(study) == derivation(before) and len(derivation(study)) == AUDITS + 1
        assert study.incumbent == before.incumbent
        assert all(
            query.modification(study.store, sha).proposer.startswith("replay of ")  # type: ignore[union-attr]
            for sha, parents in derivation(study)
            if parents
        )


def test_it_goes_on_where_it_was_and_needs_the_original_no_more(tmp_path: Path, original: Path) -> None:
    stopped: list[str] = []
    fake = FakeAudits(before=stopped.append)
    _, root, proposals = made_from(original)
    new_study(tmp_path / "s", fake, root=root, proposer="replay", replay=proposals).close()
    with reopened(tmp_path / "s", fake) as study:
        ending = loop.run(study, proposer_of(study), run_job=fake, should_stop=lambda: len(stopped) > 6)
        assert ending is loop.Ending.INTERRUPTED and len(derivation(study)) < AUDITS + 1
        export_study(study.store, tmp_path / "file")
    import_study(tmp_path / "file", tmp_path / "t").close()
    fake = FakeAudits()
    with reopened(tmp_path / "t", fake) as study, Study.open(original) as before:
        assert loop.run(study, proposer_of(study), run_job=fake) is loop.Ending.OPPORTUNITIES
        assert derivation(study) == derivation(before)


def test_children_of_a_parent_that_is_rejected_here_go_to_its_ancestor(
    tmp_path: Path, original: Path
) -> None:
    def stricter(settings: Settings) -> tuple[Status, str] | None:
        return (Status.BITS_UNEQUAL, "batch") if settings["SCORES"] != "key_by_key" else None

    with (
        Study.open(original) as before,
        replayed(tmp_path / "s", original, FakeAudits(broken=stricter)) as study,
    ):
        assert [sha for sha, _ in derivation(study)] == [sha for sha, _ in derivation(before)]
        verified = {each.sha256 for each in query.verified(study.store)}
        moved = dict(derivation(study)).items() - dict(derivation(before)).items()
        assert moved, "no parent was rejected: this shows nothing"
        assert all(set(parents) <= verified for _, parents in derivation(study))


def test_arms_take_what_they_may(tmp_path: Path, original: Path) -> None:
    with replayed(tmp_path / "n", original, FakeAudits(), Arm.BEST_OF_N) as study:
        assert {parents for _, parents in derivation(study)} <= {(), (study.root,)}
    with replayed(tmp_path / "b", original, FakeAudits(), Arm.NO_BRANCHING) as study:
        incumbents = {
            study.root,
            *(each.implementation for each in query.promotions(study.store, granted=True)),
        }
        assert {one for _, parents in derivation(study) for one in parents} <= incumbents
    with pytest.raises(ValueError, match="no-evidence cannot be replayed"):
        Replay(Arm.NO_EVIDENCE)


def test_arms_of_an_ablation_get_the_same_proposals(tmp_path: Path, original: Path) -> None:
    def created(folder: Path, operator: str, root: object, **given: Any) -> Study:
        return new_study(folder, FakeAudits(), root=root, **given)

    arms = (Arm.FULL, Arm.BEST_OF_N)
    plan = Plan("attention", tmp_path / "arms", repeats=2, arms=arms, audits=AUDITS, replay=original)
    document = ablation.run(plan, run_job=FakeAudits(), create=created)
    assert document["ended"] and document["arms"]["full"]["audits"] == 2 * AUDITS
    hashes = {each.source.sha256 for each in made_from(original)[2]}
    for _, _, folder in plan.studies:
        with Study.open(folder) as study:
            assert {sha for sha, parents in derivation(study) if parents} <= hashes
    with pytest.raises(ValueError, match="cannot be replayed"):
        replace(plan, arms=tuple(Arm))


def test_a_layout_of_the_same_source_is_passed_over(tmp_path: Path, original: Path) -> None:
    _, root, proposals = made_from(original)
    spaced = replace(proposals[1], source=type(root)(proposals[0].source.text + "\n\n# again\n"))
    fake = FakeAudits()
    given = [proposals[0], spaced, proposals[1]]
    with new_study(tmp_path / "s", fake, root=root, proposer="replay", replay=given) as study:
        assert replaying.recorded(study.store) == given
        assert loop.run(study, Replay(), run_job=fake) is loop.Ending.OPPORTUNITIES
        assert len(derivation(study)) == 3


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake):
        pass
    with pytest.raises(ValueError, match="no proposal to replay"):
        made_from(tmp_path / "s")
    with pytest.raises(ValueError, match="give --replay"):
        new_study(tmp_path / "t", fake, proposer="replay")
