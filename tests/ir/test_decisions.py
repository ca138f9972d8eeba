"""Opportunities, lineage and promotion: every invariant, with an attempt to break it."""

from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.ir.plain import (
    MACHINE,
    ROOT,
    WORKLOADS,
    answer,
    audited,
    child,
    new_store,
    promoted,
)

from kernelbraid.ir import query
from kernelbraid.ir.evidence import Level, Status
from kernelbraid.ir.schema import Lineage, Outcome
from kernelbraid.ir.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "study")


@pytest.fixture
def started(store: Store) -> Store:
    audited(store, ROOT.sha256, ratio=1.0)
    return store


def test_an_opportunity_is_recorded_once_and_ends_once(started: Store) -> None:
    asked = {"parents": [ROOT.sha256], "mechanism": "larger block", "edit": {"BLOCK": 64}, "rationale": "r"}
    first = started.add_opportunity(**asked, workloads=[WORKLOADS[0].name], evidence=[])  # type: ignore[arg-type]
    assert started.add_opportunity(**{**asked, "rationale": "again"}).id == first.id  # type: ignore[arg-type]
    second = started.add_opportunity(**{**asked, "edit": {"BLOCK": 128}})  # type: ignore[arg-type]
    assert [o.id for o in query.open_opportunities(started)] == [first.id, second.id]
    sha = child(started, 1, opportunity=first.id)
    assert [o.id for o in query.open_opportunities(started, ROOT.sha256)] == [second.id]
    with pytest.raises(ValueError, match="taken or closed"):
        child(started, 2, opportunity=first.id)
    assert not started.close_opportunity(first.id, Outcome.EXPIRED, reason="late")
    assert started.close_opportunity(second.id, Outcome.DUPLICATE, reason="same", implementation=sha[:8])
    assert not started.close_opportunity(second.id, Outcome.DUPLICATE, reason="same", implementation=sha)
    assert query.open_opportunities(started) == []
    with pytest.raises(ValueError, match="add_implementation"):
        started.close_opportunity(second.id, Outcome.TAKEN, reason="no")
    with pytest.raises(ValueError, match="no opportunity 77"):
        started.close_opportunity(77, Outcome.EXPIRED, reason="no")
    started.check()


def test_an_opportunity_needs_grounds(started: Store) -> None:
    sha = child(started, 1)
    good = {"parents": [ROOT.sha256], "mechanism": "m", "rationale": "r"}
    for changes, message in (
        ({"parents": []}, "at least one parent"),
        ({"parents": [sha]}, "not verified"),
        ({"mechanism": ""}, "mechanism"),
        ({"workloads": ["decode[batch=2]"]}, "no workload"),
        ({"evidence": ["0" * 16]}, "evidence"),
        ({"source_audit": "0" * 16}, "evidence"),
    ):
        with pytest.raises(ValueError, match=message):
            started.add_opportunity(**{**good, **changes})  # type: ignore[arg-type]
    assert query.open_opportunities(started) == []


def test_taking_an_opportunity_keeps_its_parents(started: Store) -> None:
    sha = child(started, 1)
    audited(started, sha)
    opportunity = started.add_opportunity(parents=[sha], mechanism="m", rationale="r")
    with pytest.raises(ValueError, match="name them among parents"):
        child(started, 2, (ROOT.sha256,), opportunity=opportunity.id)
    child(started, 2, (ROOT.sha256, sha), opportunity=opportunity.id)


def test_the_latest_lineage_decision_holds(started: Store) -> None:
    sha = child(started, 1)
    for decision in (Lineage.CONTINUE, Lineage.ARCHIVE, Lineage.MERGE):
        with pytest.raises(ValueError, match="not verified"):
            started.decide(sha, decision, reason="r", decided_by="loop")
    audited(started, sha)

    def places() -> tuple[bool, bool]:
        frontier = {i.sha256 for i in query.frontier(started)}
        return sha in frontier, sha in {i.sha256 for i in query.archive(started)}

    assert places() == (True, False)
    started.decide(sha[:6], Lineage.ARCHIVE, reason="slower", decided_by="loop")
    assert places() == (False, True)
    started.decide(sha, Lineage.CONTINUE, reason="again", decided_by="agent")
    assert places() == (True, False)
    started.decide(sha, Lineage.ABANDON, reason="dead end", decided_by="agent")
    assert places() == (False, False)
    assert [d.decided_by for d in query.lineage_decisions(started, sha)] == ["loop", "agent", "agent"]


# Promotion


def test_a_promotion_needs_two_verified_audits_against_the_incumbent(started: Store) -> None:
    first, second = child(started, 1), child(started, 2)
    screen, other = audited(started, first), audited(started, second)
    grant = {"granted": True, "reason": "faster"}
    with pytest.raises(ValueError, match="full audit"):
        started.promote(screen_audit=screen, full_audit=None, **grant)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="verified at full"):
        started.promote(screen_audit=screen, full_audit=screen, **grant)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two implementations"):
        started.promote(screen_audit=screen, full_audit=other, **grant)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no audit"):
        started.promote(screen_audit="0" * 16, full_audit=None, **grant)  # type: ignore[arg-type]
    stopped = started.request_audit(first, Level.FULL)
    started.record(answer(started, stopped, Status.STOPPED, measurements=()))
    with pytest.raises(ValueError, match="verified at full"):
        started.promote(screen_audit=screen, full_audit=stopped, **grant)  # type: ignore[arg-type]
    full = audited(started, first, level=Level.FULL)
    decision = started.promote(
        screen_audit=screen, full_audit=full, checks=[{"check": "aggregate", "upper": float("inf")}], **grant
    )  # type: ignore[arg-type]
    assert query.incumbent(started).sha256 == first
    assert decision.previous == ROOT.sha256
    assert not decision.bits_changed
    assert query.promotions(started)[0].checks == ({"check": "aggregate", "upper": "inf"},)
    with pytest.raises(ValueError, match="audit it again"):
        started.promote(screen_audit=other, full_audit=audited(started, second, level=Level.FULL), **grant)  # type: ignore[arg-type]
    promoted(started, second)
    assert query.incumbent(started).sha256 == second
    assert [p.previous for p in query.promotions(started, granted=True)] == [ROOT.sha256, first]
    started.check()


def test_audits_on_machines_that_cannot_be_compared_promote_nothing(started: Store) -> None:
    sha = child(started, 1)
    screen = audited(started, sha)
    full = started.request_audit(sha, Level.FULL)
    newer = replace(MACHINE, versions=(("python", "3.12.1"), ("numba", "0.68.0")))
    started.record(answer(started, full, environment=newer))
    with pytest.raises(ValueError, match="cannot be compared"):
        started.promote(screen_audit=screen, full_audit=full, granted=True, reason="faster")


def test_a_refusal_says_what_blocked_it(started: Store) -> None:
    sha = child(started, 1)
    screen = audited(started, sha)
    with pytest.raises(ValueError, match="blocked_by"):
        started.promote(screen_audit=screen, full_audit=None, granted=False, reason="slower")
    full = audited(started, sha, Status.BITS_UNEQUAL, Level.FULL)
    with pytest.raises(ValueError, match="blocked_by"):
        started.promote(screen_audit=screen, full_audit=full, granted=True, reason="", blocked_by="x")
    with pytest.raises(ValueError, match="not verified"):
        started.promote(screen_audit=screen, full_audit=full, granted=True, reason="")
    blocked = "toy/1/batch/decode"
    started.promote(screen_audit=screen, full_audit=full, granted=False, reason="r", blocked_by=blocked)
    started.promote(screen_audit=screen, full_audit=None, granted=False, reason="r", blocked_by="noise")
    assert query.incumbent(started).sha256 == ROOT.sha256
    assert [p.blocked_by for p in query.promotions(started, granted=False)] == [blocked, "noise"]
    columns = (
        "implementation, previous, screen_audit, granted, reason, checks, bits_changed, after_audit, created"
    )
    values = f"'{sha}', '{ROOT.sha256}', '{screen}', 1, '', '[]', 0, 0, 0"
    with pytest.raises(RuntimeError, match="CHECK"), started.transaction() as session:
        session.execute(text(f"INSERT INTO promotion_decision ({columns}) VALUES ({values})"))


def test_new_bits_are_announced(started: Store) -> None:
    sha = child(started, 1)
    ids = [started.request_audit(sha, level) for level in (Level.SCREEN, Level.FULL)]
    for request in ids:
        started.record(answer(started, request, bits_id="f" * 16))
    decision = started.promote(screen_audit=ids[0], full_audit=ids[1], granted=True, reason="faster")
    assert decision.bits_changed


def test_a_promoted_implementation_that_is_rejected_later_is_not_the_incumbent(started: Store) -> None:
    first, second = child(started, 1), child(started, 2)
    promoted(started, first)
    promoted(started, second)
    audited(started, second, Status.BITS_UNEQUAL, Level.FULL)
    assert query.incumbent(started).sha256 == first
    audited(started, first, Status.CRASHED, Level.FULL)
    assert query.incumbent(started).sha256 == ROOT.sha256
    promoted(started, child(started, 3))
    started.check()
