"""The page's numbers are those of the records."""

import math
import time
from pathlib import Path

import pytest
from tests.ir.plain import REQUIREMENTS, ROOT, WORKLOADS, answer, audited, child, new_store
from tests.ir.test_query import fill
from tests.report.studies import small_study

from kernelbraid.ir import query, survey
from kernelbraid.ir.evidence import Level, Status, Verdict
from kernelbraid.ir.schema import Usage
from kernelbraid.report import deltas, documents, render
from kernelbraid.report.page import document


def test_nodes_are_the_implementations_as_show_lists_them(tmp_path: Path) -> None:
    store, shas = small_study(tmp_path / "s")
    page = document(store)
    listed = documents.implementations(store)
    assert [node["sha256"] for node in page.nodes] == [row["implementation"] for row in listed]
    for node, row in zip(page.nodes, listed, strict=True):
        assert (node["state"], node["label"], node["reason"]) == (row["state"], row["label"], row["reason"])
        assert [page.nodes[parent]["sha256"] for parent in node["parents"]] == row["parents"]
        assert (node["ratio"] is None) == (row["ratio_to_root"] is None)
        if node["ratio"] is not None:
            assert node["ratio"] == pytest.approx(row["ratio_to_root"], rel=1e-12)
    states = {name: page.nodes[_index(page, sha)]["state"] for name, sha in shas.items()}
    assert states == {
        "root": "root",
        "best": "incumbent",
        "broken": "bits_unequal",
        "slow": "archive",
        "merged": "frontier",
        "crashed": "crashed",
        "pending": "pending",
    }


def test_branches_leave_the_line_to_the_incumbent(tmp_path: Path) -> None:
    store, shas = small_study(tmp_path / "s")
    page = document(store)

    def branch(name: str) -> int | None:
        found: int | None = page.nodes[_index(page, shas[name])]["branch"]
        return found

    assert branch("root") is None and branch("best") is None
    for name in ("broken", "slow", "merged", "crashed"):
        assert branch(name) == _index(page, shas[name])
    assert branch("pending") == _index(page, shas["merged"])


def test_audits_carry_what_was_recorded(tmp_path: Path) -> None:
    store, _ = small_study(tmp_path / "s")
    page = document(store)
    place = {each.seq: each.id for each in query.requirements(store)}
    shown = {audit.request: audit for node in page.nodes for audit in node["audits"]}
    for audit in query.audits(store):
        found, evidence = shown[audit.request], audit.evidence()
        assert (found.status, found.level, found.reason) == (audit.status, audit.level, audit.reason)
        assert {place[seq] for seq in found.checked} == {each.requirement for each in evidence.verdicts}
        broken = [each for each in evidence.verdicts if not each.held]
        assert [each.requirement for each in found.failures] == [each.requirement for each in broken]
        assert [each.difference for each in found.failures] == [each.difference for each in broken]
        kinds = {each.id: each.kind for each in REQUIREMENTS}
        relations = [each for each in evidence.verdicts if kinds[each.requirement] == "relation"]
        assert found.comparisons == sum(each.comparisons for each in relations)
        errors = [each.error for each in evidence.verdicts if each.error is not None]
        assert found.error == (max(errors) if errors else None)
        for timing, measured in zip(found.timings, evidence.measurements, strict=True):
            assert timing.candidate_ms == pytest.approx(math.fsum(measured.candidate_ms) / 3)
            assert timing.root_ms == pytest.approx(math.fsum(measured.root_ms) / 3)
            assert (timing.bound_ms, timing.processes) == (measured.bound_ms, 3)


def test_the_objective_is_that_of_the_store(tmp_path: Path) -> None:
    store, shas = small_study(tmp_path / "s")
    page = document(store)
    expected = {each.request: each for each in query.objectives(store)}
    assert [row["request"] for row in page.objective] == list(expected)
    for row in page.objective:
        assert row["ratio"] == pytest.approx(expected[row["request"]].ratio, rel=1e-12)
        assert page.nodes[row["node"]]["sha256"] == expected[row["request"]].implementation
    [root, promoted] = page.incumbents
    assert (root["audit"], root["ratio"]) == (0, 1.0)
    assert page.nodes[promoted["node"]]["sha256"] == shas["best"]
    assert promoted["audit"] == 3 and promoted["ratio"] == pytest.approx(0.9)
    assert page.totals["incumbent_ratio"] == promoted["ratio"]


def test_workloads_have_limits_bounds_and_trajectories(tmp_path: Path) -> None:
    store, _ = small_study(tmp_path / "s")
    page = document(store)
    timed = [audit for audit in query.audits(store) if audit.measurements]
    for row, workload in zip(page.workloads, WORKLOADS, strict=True):
        assert (row["name"], row["limit"], row["weight"]) == (workload.name, workload.limit, workload.weight)
        assert [point["request"] for point in row["points"]] == [audit.request for audit in timed]
        mean = 0.1 * sum(1 + i / 7 for i in range(3)) / 3
        assert row["root_ms"] == pytest.approx(mean) and row["best_ms"] == pytest.approx(0.9 * mean)
        assert row["bound_ms"] == 0.01 and row["share"] == pytest.approx(0.01 / (0.9 * mean))


def test_rejections_and_requirements_count_what_broke(tmp_path: Path) -> None:
    store, shas = small_study(tmp_path / "s")
    page = document(store)
    assert {row["status"]: row["implementations"] for row in page.rejections} == query.totals(store).rejected
    unequal = next(row for row in page.rejections if row["status"] == "bits_unequal")
    assert unequal["broke"] == [("toy/1/batch/decode", 1)]
    assert unequal["reasons"] == [("it ended bits_unequal", 1)]
    assert page.nodes[unequal["example"]]["sha256"] == shas["broken"]
    for row in page.requirements:
        assert row["broken"] == len(query.broke(store, row["id"]))
    assert page.requirements[0]["checked"] == len(query.audits(store))


def test_the_ledger_adds_up_and_invents_nothing(tmp_path: Path) -> None:
    store, _ = small_study(tmp_path / "s")
    page = document(store)
    [row] = page.ledger
    assert row["purpose"] == "search" and row["wall_seconds"] == 30.0 and row["proposer_calls"] == 2
    assert row["tokens_in"] is None and row["tokens_out"] is None and row["money"] is None
    assert all(each["tokens"] is None for each in page.objective)
    assert page.tokens == "Tokens are unknown. 2 proposer calls are recorded, and no record tells tokens."
    assert page.stages == query.stage_seconds(store)
    budgets = {each["budget"]: (each["spent"], each["limit"]) for each in page.budgets}
    assert budgets["minutes of search"] == (0.5, 3.0)
    assert budgets["candidates audited"] == (5, None)
    assert budgets["audits since the last promotion"] == (query.audits_since_promotion(store), 40)


def test_tokens_so_far_stand_beside_each_audit(tmp_path: Path) -> None:
    with new_store(tmp_path / "s") as store:
        audited(store, ROOT.sha256)
        for number, tokens in ((1, 100), (2, 50)):
            store.record_usage(Usage(purpose="proposal", proposer_calls=1, tokens_in=tokens, tokens_out=7))
            audited(store, child(store, number))
        page = document(store)
        assert [row["tokens"] for row in page.objective] == [0, 107, 164]
        assert page.tokens == "Tokens are those that the proposer told, in and out added."
        store.record_usage(Usage(purpose="proposal", proposer_calls=1))
        assert document(store).tokens.startswith("Tokens are at least those shown: 2 of 3 proposer calls")


def test_a_new_study_has_a_page(tmp_path: Path) -> None:
    with new_store(tmp_path / "s") as store:
        page = document(store)
    assert len(page.nodes) == 1 and page.objective == [] and page.rejections == [] and page.ledger == []
    assert page.environment is None and page.totals["incumbent_ratio"] == 1.0
    assert page.tokens == "Tokens are unknown. No proposer call is recorded, and no record tells tokens."


def test_errors_that_are_no_numbers_are_told_with_their_failure(tmp_path: Path) -> None:
    with new_store(tmp_path / "s") as store:
        request = store.request_audit(ROOT.sha256, Level.SCREEN)
        verdict = Verdict("toy/1/accuracy_out/decode", False, cases=1, comparisons=9, error=math.nan)
        store.record(answer(store, request, Status.INACCURATE, verdicts=(verdict,)))
        [audit] = document(store).nodes[0]["audits"]
        assert audit.error is None and audit.comparisons == 0
        assert math.isnan(audit.failures[0].error)
        page = render.html(document(store), deltas.pack(survey.sources(store), {}))
    assert "inaccurate" in page


def test_surveys_stay_quick_in_a_large_study(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    fill(store, 2000)
    started = time.process_time()
    findings, changes = survey.findings(store), survey.changes(store)
    assert time.process_time() - started < 2.0  # about 0.2 s alone
    assert len(findings) == 2001 and len(changes) == 2000


def _index(page: object, sha256: str) -> int:
    nodes = page.nodes  # type: ignore[attr-defined]
    return next(i for i, node in enumerate(nodes) if node["sha256"] == sha256)
