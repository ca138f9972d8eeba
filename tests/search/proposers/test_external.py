"""The verbs that drive a study from outside, round trip, in JSON."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from tests.search.fake_audit import OPERATOR, ROOT, FakeAudits, new_study, submit_and_audit

from kernelbraid.contract import Source
from kernelbraid.ir import query
from kernelbraid.ir.evidence import Level
from kernelbraid.search import loop
from kernelbraid.search.proposers import edits, external
from kernelbraid.search.study import Study


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study whose root is audited."""
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, proposer="external") as study:
        assert loop.run(study, external.External(), run_job=fake) is loop.Ending.OPPORTUNITIES
    return tmp_path / "s"


def child(**settings: int | str) -> Source:
    return edits.apply(ROOT, settings, OPERATOR.contract, label="child.py")


def test_next_tells_the_task_the_parents_and_the_opportunities(folder: Path) -> None:
    document = json.loads(json.dumps(external.next_(folder, most=50)))
    assert document["task"]["exports"] == [*OPERATOR.entry_points, "numerics", "schedule"]
    assert document["task"]["numeric_knobs"]["CHUNK"] == [256, 512, 1024, 2048, 4096]
    assert {each["phase"] for each in document["task"]["workloads"]} == {"prefill", "decode", "update"}
    assert [each["implementation"] for each in document["parents"]] == [ROOT.sha256]
    assert document["parents"][0]["ratio_to_root"] == 1.0
    knobs = edits.declared(ROOT, OPERATOR.contract)
    edited = [each for each in document["opportunities"] if each["edit"] is not None]
    assert len(edited) == sum(len(each.alternatives) for each in knobs)
    first = document["opportunities"][0]
    assert first["edit"]["knobs"] and first["expected_ratio_to_root"] < 1 and first["rationale"]
    assert document["budget"] == {"audited": 0, "seconds": 6.0, "seconds_left": None, "audits_left": None}


def test_a_candidate_goes_from_submission_to_promotion(folder: Path, tmp_path: Path) -> None:
    fake = FakeAudits()
    taken = next(
        each
        for each in external.next_(folder, most=50)["opportunities"]
        if each["edit"] == {"knobs": {"SCORES": "vectorised"}}
    )
    file = tmp_path / "mine.py"
    file.write_text(child(SCORES="vectorised").text)
    document = external.submit(
        folder,
        file,
        parents=[ROOT.sha256[:12]],
        hypothesis="vector code for the scores",
        functions=["scores"],
        regimes=["decode"],
        opportunity=taken["id"],
        by="someone",
        audit=True,
        run_job=fake,
    )
    sha = child(SCORES="vectorised").sha256
    assert document["implementation"] == document["incumbent"] == sha
    assert document["status"] == "verified" and document["reason"] == ""
    found = json.loads(json.dumps(external.evidence(folder, sha[:8])))
    assert found["verified"] and [each["level"] for each in found["audits"]] == ["screen", "full"]
    assert found["audits"][0]["ratio_to_incumbent"] < 0.8
    assert found["promotions"][0]["granted"] and found["lineage"][0]["decision"] == "continue"
    text = external.source(folder, sha)
    assert text["text"] == file.read_text() and text["label"] == "mine.py"
    assert [each["implementation"] for each in text["lineage"]] == [ROOT.sha256, sha]
    assert {"name": "SCORES", "kind": "schedule", "value": "vectorised"}.items() <= text["knobs"][4].items()
    following = external.next_(folder, most=50)
    assert following["incumbent"] == sha
    assert taken["id"] not in {each["id"] for each in following["opportunities"]}


def test_without_audit_a_submission_waits_for_a_search(folder: Path) -> None:
    document = external.submit(folder, child(PARTITION="cost"), parents=[ROOT.sha256], hypothesis="balance")
    assert document["status"] is None
    assert external.next_(folder)["pending"] == [document["implementation"]]
    fake = FakeAudits()
    with Study.open(folder) as study:
        assert [each.id for each in study.store.pending()] == [document["request"]]
        loop.run(study, external.External(), run_job=fake)
        assert study.store.pending() == []


def test_failures_come_back_as_negative_evidence(folder: Path) -> None:
    external.submit(
        folder,
        child(EXP2_DEGREE=4),
        parents=[ROOT.sha256],
        hypothesis="fewer terms",
        audit=True,
        run_job=FakeAudits(),
    )
    (failure,) = external.next_(folder)["failures"]
    assert failure["status"] == "inaccurate" and failure["hypothesis"] == "fewer terms"
    assert failure["requirements"][0].startswith("attention/1/accuracy_out")
    (audit,) = external.evidence(folder, failure["implementation"])["audits"]
    broken = [each for each in audit["verdicts"] if not each["held"]]
    assert broken[0]["difference"]["seed"] == 7
    listed = external.next_(folder, most=50)["opportunities"]
    assert {"knobs": {"EXP2_DEGREE": 4}} not in [each["edit"] for each in listed]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"file": Path("/nowhere.py")}, "cannot read"),
        ({"file": Source("x = 1")}, "must define attention"),
        ({"file": Source(ROOT.text.replace("CHUNK = 1024", "CHUNK = 1000"))}, "one of"),
        ({"file": ROOT}, "has already"),
        ({"file": Source(ROOT.text + "\n\n# another layout\n")}, "layout and comments only"),
        ({"parents": []}, "parents must name"),
        ({"parents": ["f" * 64]}, "no implementation"),
        ({"parents": ["not hexadecimal"]}, "hexadecimal"),
        ({"hypothesis": "  "}, "hypothesis"),
        ({"regimes": ["training"]}, "regimes must be among"),
        ({"requirements_at_risk": ["nonsense"]}, "nonsense"),
        ({"opportunity": 999}, "opportunity"),
    ],
)
def test_a_bad_submission_is_refused_and_changes_nothing(
    folder: Path, given: dict[str, object], message: str
) -> None:
    arguments: dict[str, object] = {
        "file": child(VALUES="keys_by_4"),
        "parents": [ROOT.sha256],
        "hypothesis": "because",
        **given,
    }
    with pytest.raises(ValueError, match=message):
        external.submit(folder, arguments.pop("file"), **arguments)  # type: ignore[arg-type]
    with Study.open(folder) as study:
        assert len(query.implementations(study.store)) == 1 and study.store.pending() == []
        study.store.check()


def test_a_rejected_implementation_is_no_parent(folder: Path) -> None:
    bad = child(EXP2_DEGREE=4)
    given = {"parents": [ROOT.sha256], "hypothesis": "fewer terms", "audit": True, "run_job": FakeAudits()}
    external.submit(folder, bad, **given)  # type: ignore[arg-type]
    grandchild = edits.apply(bad, {"PARTITION": "cost"}, OPERATOR.contract)
    with pytest.raises(ValueError, match="not verified"):
        external.submit(folder, grandchild, parents=[bad.sha256], hypothesis="balance")


def test_two_parents_are_recorded(folder: Path) -> None:
    fake = FakeAudits()
    one, two = child(VALUES="keys_by_4"), child(PARTITION="cost")
    for each in (one, two):
        external.submit(folder, each, parents=[ROOT.sha256], hypothesis="one", audit=True, run_job=fake)
    both = child(VALUES="keys_by_4", PARTITION="cost")
    external.submit(
        folder, both, parents=[one.sha256, two.sha256], hypothesis="both", audit=True, run_job=fake
    )
    lineage = external.source(folder, both.sha256)["lineage"]
    assert len(lineage) == 4 and lineage[-1]["parents"] == [one.sha256, two.sha256]


def test_lineage_decisions_are_recorded_and_checked(folder: Path) -> None:
    document = external.decide(folder, ROOT.sha256[:10], "archive", reason="finished with it", by="me")
    assert document == {
        "implementation": ROOT.sha256,
        "decision": "archive",
        "reason": "finished with it",
    }
    assert external.next_(folder)["parents"] == []
    assert external.evidence(folder, ROOT.sha256)["lineage"][-1]["by"] == "me"
    with pytest.raises(ValueError, match="decision must be one of continue, merge, archive, abandon"):
        external.decide(folder, ROOT.sha256, "keep", reason="x")
    with pytest.raises(ValueError, match="reason"):
        external.decide(folder, ROOT.sha256, "continue", reason=" ")


def test_a_submission_to_a_new_study_audits_the_root_first(tmp_path: Path) -> None:
    fake = FakeAudits()
    new_study(tmp_path / "s", fake, proposer="external").close()
    with pytest.raises(ValueError, match="not verified"):
        external.submit(tmp_path / "s", child(PARTITION="cost"), parents=[ROOT.sha256], hypothesis="x")
    external.submit(
        tmp_path / "s",
        child(PARTITION="cost"),
        parents=[ROOT.sha256],
        hypothesis="x",
        audit=True,
        run_job=fake,
    )
    first = fake.ran[0].candidates[0]
    assert first.source.sha256 == ROOT.sha256 and first.level is Level.SCREEN


def test_several_submit_at_once_and_each_is_audited_once(folder: Path) -> None:
    settings: list[dict[str, int | str]] = [{"VALUES": "keys_by_4"}, {"PARTITION": "cost"}, {"QUERY_TILE": 4}]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(settings), mp_context=spawn) as agents:
        given = [(folder, child(**each).text, ROOT.sha256) for each in settings]
        statuses = list(agents.map(submit_and_audit, given))
    assert None not in statuses
    with Study.open(folder) as study:
        study.store.check()
        assert study.store.pending() == []
        screens = [each for each in query.audits(study.store) if each.level is Level.SCREEN]
        assert len(screens) == 1 + len(settings) == len({each.implementation for each in screens})
