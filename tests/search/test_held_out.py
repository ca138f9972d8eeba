"""Held-out workloads: no answer to a proposer tells of them; being fast on the others alone does not win."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.search.fake_audit import AXES, OPERATOR, WORKLOADS, FakeAudits, Settings, new_study
from typer.testing import CliRunner

from kernelbraid.cli import app
from kernelbraid.contract import Workload
from kernelbraid.ir import query
from kernelbraid.ir.evidence import Level, Status
from kernelbraid.ir.exchange import export_study, import_study
from kernelbraid.report import documents, page
from kernelbraid.search import audits, loop
from kernelbraid.search.proposers import Proposal, edits, external
from kernelbraid.search.proposers.knobs import KnobProposer
from kernelbraid.search.proposers.llm_tools import Tools
from kernelbraid.search.study import Study, chosen_workloads

HELD_OUT = (
    Workload("decode", (("batch", 13), ("length", 777), *AXES), weight=300),
    Workload("update", (("batch", 3), ("length", 555), *AXES), weight=20),
)
OTHER_HEADS = Workload(
    "decode", (*HELD_OUT[0].axes[:3], ("query_heads", 4), ("kv_heads", 2), ("head_dim", 64))
)
HIDDEN = ("length=777", "length=555")
"""What would give them away."""


class Overfit:
    """Proposes the one edit that is fast on the shapes it was shown."""

    name = "overfit"

    def observe(self, study: Study) -> None:
        pass

    def propose(self, study: Study, wanted: int) -> tuple[Proposal, ...]:
        if len(query.implementations(study.store)) > 1:
            return ()
        root = study.store.source(study.root)
        made = edits.apply(root, {"SCORES": "vectorised"}, study.contract)
        return (Proposal(made, (root.sha256,), "fast on what is timed", proposer=self.name),)


def overfits(by: float) -> Any:
    def change(settings: Settings, workload: Workload) -> float:
        return by if settings["SCORES"] == "vectorised" and workload in HELD_OUT else 0.0

    return change


def searched(folder: Path, by: float, held_out: tuple[Workload, ...] = HELD_OUT) -> Study:
    fake = FakeAudits(overfits=overfits(by))
    study = new_study(folder, fake, held_out=held_out)
    loop.run(study, Overfit(), run_job=fake)
    study.store.check()
    return study


@pytest.mark.parametrize("by", [0.4, 0.55, 3.0])
def test_what_is_fast_on_visible_workloads_alone_is_not_promoted(tmp_path: Path, by: float) -> None:
    with searched(tmp_path / "s", by) as study:
        assert study.incumbent == study.root
        [refusal] = query.promotions(study.store)
        assert not refusal.granted and refusal.blocked_by == "held_out"
        assert refusal.reason.startswith("held_out")
        full = query.latest_evidence(study.store, refusal.implementation, Level.FULL)
        assert full is not None and {each.name for each in HELD_OUT} <= {
            m.workload for m in full.measurements
        }


@pytest.mark.parametrize(("by", "held_out"), [(0.4, ()), (0.0, HELD_OUT)])
def test_the_same_proposer_wins_where_nothing_is_held_out_or_it_is_fast_everywhere(
    tmp_path: Path, by: float, held_out: tuple[Workload, ...]
) -> None:
    with searched(tmp_path / "s", by, held_out) as study:
        assert study.incumbent != study.root
        [granted] = query.promotions(study.store, granted=True)
        checks = {each["name"] for each in granted.checks}
        assert ("held_out/aggregate" in checks) == bool(held_out)
        assert (f"held_out/limit/{HELD_OUT[0].name}" in checks) == bool(held_out)


def test_one_slow_held_out_workload_blocks_by_its_limit(tmp_path: Path) -> None:
    def slow(settings: Settings, workload: Workload) -> float:
        return 0.6 if settings["SCORES"] == "vectorised" and workload == HELD_OUT[1] else 0.0

    fake = FakeAudits(overfits=slow)
    with new_study(tmp_path / "s", fake, held_out=HELD_OUT) as study:
        loop.run(study, Overfit(), run_job=fake)
        [refusal] = query.promotions(study.store)
        assert refusal.blocked_by == "held_out"
        failed = [each["name"] for each in refusal.checks if not each["held"]]
        assert failed == [f"held_out/limit/{HELD_OUT[1].name}"]


def test_only_full_audits_time_them(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, held_out=HELD_OUT, audits=8) as study:
        loop.run(study, KnobProposer(), run_job=fake)
        for job in fake.ran:
            full = all(each.level is Level.FULL for each in job.candidates)
            assert full or all(each.level is not Level.FULL for each in job.candidates)
            assert set(job.workloads) == {*WORKLOADS, *(HELD_OUT if full else ())}
        assert any(len(job.workloads) > len(WORKLOADS) for job in fake.ran)
        timed = query.objectives(study.store)
        assert {each.level for each in timed} == {Level.SCREEN, Level.FULL}
        assert study.summary()["speedup"] > 1


def told(document: Any) -> None:
    text = document if isinstance(document, str) else json.dumps(document, default=str)
    for each in (*HIDDEN, '"length": 777', '"length":777'):
        assert each not in text, f"{each} is told: {text[max(0, text.index(each) - 200) :][:400]}"


def printing(fake: FakeAudits) -> FakeAudits:
    """Audits in which the implementation prints every shape, and the judge names them in its reasons."""
    plain = fake.evidence

    def evidence(job: Any, candidate: Any) -> Any:
        from dataclasses import replace

        names = " ".join(each.name for each in job.workloads)
        found = plain(job, candidate)
        reason = f"slow in {job.workloads[-1].name}" if found.status is Status.STOPPED else found.reason
        return replace(found, output=names, specialisations=(names,), reason=reason)

    fake.evidence = evidence  # type: ignore[method-assign]
    return fake


@pytest.mark.parametrize("by", [0.0, 3.0])
def test_no_answer_to_a_proposer_tells_them(tmp_path: Path, by: float) -> None:
    import asyncio

    folder = tmp_path / "s"
    fake = printing(FakeAudits(overfits=overfits(by)))
    seen: list[loop.Progress] = []
    with new_study(folder, fake, held_out=HELD_OUT, audits=4) as study:
        loop.run(study, KnobProposer(), run_job=fake, progress=seen.append)
        assert any(each.level is Level.FULL for each in query.audits(study.store))
        hashes = [each.sha256 for each in query.implementations(study.store)]
        tools = Tools(study, study.root, evidence=True, by="test")
        told(asyncio.run(tools.read_outlook()))
        for sha256 in hashes:
            told(asyncio.run(tools.read_evidence(sha256)))
            told(asyncio.run(tools.read_output(sha256)))
            told(documents.implementation(study.store, study.contract, sha256))
            told(documents.difference(study.store, study.contract, study.root, sha256))
        told(documents.implementations(study.store))
        told(study.summary())
        told(external.task_text(study))
        told([str(each) for each in page.document(study.store).promotions])
        told(str(page.document(study.store)))
        told([str(each) for each in seen])
        told(
            [
                (each.mechanism, each.rationale, each.workloads)
                for each in query.open_opportunities(study.store)
            ]
        )
        people = [
            documents.implementation(study.store, study.contract, each, held_out=True) for each in hashes
        ]
        assert all(each in json.dumps(people) for each in HIDDEN), "the flag shows them"
    for sha256 in hashes:
        told(external.evidence(folder, sha256))
        told(external.source(folder, sha256))
    told(external.next_(folder))
    plain = CliRunner().invoke(app, ["show", str(folder), "--json"])
    told(plain.stdout)
    flagged = CliRunner().invoke(app, ["show", str(folder), "--held-out", "--json"])
    rows = json.loads(flagged.stdout)["held_out_workloads"]
    assert [each["workload"] for each in rows] == [each.name for each in HELD_OUT]
    assert "held out" in CliRunner().invoke(app, ["show", str(folder), "--held-out"]).stdout


def test_an_export_keeps_them(tmp_path: Path) -> None:
    with searched(tmp_path / "s", 3.0) as study:
        export_study(study.store, tmp_path / "s.jsonl")
    with import_study(tmp_path / "s.jsonl", tmp_path / "t") as store:
        assert store.held_out == HELD_OUT
        store.check()


def test_evidence_without_them_is_refused(tmp_path: Path) -> None:
    """A full audit that did not time them cannot carry a promotion, so it is not recorded at all."""

    def careless(job: Any, results: Path, **given: Any) -> Path:
        from dataclasses import replace

        return FakeAudits()(replace(job, workloads=WORKLOADS), results, **given)

    with new_study(tmp_path / "s", FakeAudits(), held_out=HELD_OUT) as study:
        root = study.store.request_audit(study.root, Level.FULL)
        requests = [each for each in study.store.pending() if each.id == root]
        with pytest.raises(ValueError, match="no cold time of decode"):
            audits.run(study, requests, run_job=careless)


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        ((WORKLOADS[0],), "held_out names prefill"),
        ((HELD_OUT[0], HELD_OUT[0]), "each workload once"),
        ((OTHER_HEADS,), "constant axes"),
    ],
)
def test_wrong_choices_are_refused(tmp_path: Path, held_out: tuple[Workload, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_study(tmp_path / "s", FakeAudits(), held_out=held_out)
    assert not (tmp_path / "s").exists()


def test_names_choose_workloads_of_the_operators_grids(tmp_path: Path) -> None:
    grid = OPERATOR.grids["study"]
    assert chosen_workloads(OPERATOR, ["study", grid[0].name]) == grid
    with pytest.raises(ValueError, match="neither a grid of attention"):
        chosen_workloads(OPERATOR, ["nothing"])
    with new_study(tmp_path / "s", FakeAudits(), workloads=None, held_out=grid[2:4]) as study:
        assert study.workloads == (*grid[:2], *grid[4:]) and study.store.held_out == grid[2:4]
