"""What a study answers, on a small one with a known history and on a large one."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import select
from tests.ir.plain import (
    MACHINE,
    ROOT,
    answer,
    audited,
    child,
    failed,
    held,
    new_store,
    promoted,
    source,
    timings,
)

from kernelbraid.contract import content_hash
from kernelbraid.ir import attempts, query
from kernelbraid.ir.evidence import AuditEvidence, Level, Status
from kernelbraid.ir.schema import (
    Audit,
    AuditMeasurement,
    AuditRequest,
    AuditVerdict,
    Implementation,
    Modification,
    ModificationParent,
    Opportunity,
    OpportunityParent,
)
from kernelbraid.ir.store import Store, source_path

BATCH = "toy/1/batch/decode"
PAGING = "toy/1/paging/prefill"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = new_store(tmp_path / "study")
    audited(store, ROOT.sha256, ratio=1.0)
    return store


def shas(found: list[Implementation]) -> list[str]:
    return [implementation.sha256 for implementation in found]


def test_lineage_is_every_ancestor_oldest_first(store: Store) -> None:
    a, b = child(store, 1), child(store, 2)
    for sha in (a, b):
        audited(store, sha)
    c = child(store, 3, (a,))
    audited(store, c)
    merged = child(store, 4, (b, c))
    aside = child(store, 5, (a,))
    steps = query.lineage(store, merged[:9])
    assert [s.implementation.sha256 for s in steps] == [ROOT.sha256, a, b, c, merged]
    assert [s.modification and s.modification.parents for s in steps] == [
        None,
        (ROOT.sha256,),
        (ROOT.sha256,),
        (a,),
        (b, c),
    ]
    assert [s.implementation.sha256 for s in query.lineage(store, ROOT.sha256)] == [ROOT.sha256]
    assert [s.implementation.sha256 for s in query.descendants(store, a)] == [c, merged, aside]
    assert query.descendants(store, merged) == []
    with pytest.raises(ValueError, match="no implementation"):
        query.lineage(store, "0" * 64)


def test_requirements_know_who_broke_them(store: Store) -> None:
    good, bad, none = child(store, 1), child(store, 2), child(store, 3)
    audited(store, good)
    request = audited(store, bad, Status.BITS_UNEQUAL)
    (found,) = query.broke(store, BATCH)
    assert (found.implementation, found.request) == (bad, request)
    assert found.difference == failed(BATCH)[0].difference
    assert found.modification is not None and found.modification.child == bad
    assert query.broke(store, PAGING) == []
    assert [m.child for m in query.survives(store, BATCH)] == [good]
    assert shas(query.without_evidence(store)) == [none]
    audited(store, good, Status.BITS_UNEQUAL, Level.FULL)
    assert [b.implementation for b in query.broke(store, BATCH)] == [bad, good]
    assert query.survives(store, BATCH) == []
    assert [m.child for m in query.survives(store, PAGING)] == [good]
    for question in (query.broke, query.survives):
        with pytest.raises(ValueError, match="toy/1/speed"):
            question(store, "toy/1/speed")


def test_the_root_can_break_a_requirement(tmp_path: Path) -> None:
    store = new_store(tmp_path / "study")
    audited(store, ROOT.sha256, Status.BITS_UNEQUAL)
    (found,) = query.broke(store, BATCH)
    assert found.modification is None
    assert query.incumbent(store).sha256 == ROOT.sha256
    assert query.verified(store) == []


def test_attempts_are_negative_evidence_scoped_to_a_parent(store: Store) -> None:
    edit = {"BLOCK": 64}
    opportunity = store.add_opportunity(parents=[ROOT.sha256], mechanism="larger", edit=edit, rationale="r")
    a = child(store, 1, opportunity=opportunity.id)
    b = child(store, 2)
    audited(store, a, Status.BITS_UNEQUAL)
    assert [
        (t.modification.child, t.edit, t.status, t.failed) for t in attempts.attempts(store, ROOT.sha256)
    ] == [
        (a, edit, Status.BITS_UNEQUAL, (BATCH,)),
        (b, None, None, ()),
    ]
    assert attempts.attempts(store, a) == []
    audited(store, b)
    audited(store, b, Status.CRASHED, Level.FULL)
    audited(store, b)
    assert attempts.attempts(store)[1].status is Status.CRASHED


def test_best_is_measured_and_incumbent_is_proven(store: Store) -> None:
    assert query.best(store).sha256 == ROOT.sha256
    a, b, c, d = (child(store, i) for i in range(1, 5))
    audited(store, a, ratio=0.9)
    audited(store, b, ratio=0.7)
    audited(store, c, ratio=0.5)
    audited(store, c, Status.BITS_UNEQUAL, Level.FULL)
    request = store.request_audit(d, Level.SCREEN)
    store.record(answer(store, request, Status.STOPPED, measurements=timings(0.1)[:1]))
    assert query.best(store).sha256 == b
    assert query.incumbent(store).sha256 == ROOT.sha256
    audited(store, b, ratio=0.95)
    assert query.best(store).sha256 == a
    newer = replace(MACHINE, versions=(("python", "3.12.0"),))
    request = store.request_audit(d, Level.FULL)
    store.record(answer(store, request, ratio=0.99, environment=newer))
    assert query.best(store).sha256 == d


def test_objective_is_the_weighted_sum_of_means(store: Store) -> None:
    sha = child(store, 1)
    request = audited(store, sha, ratio=0.5)
    (objective,) = query.objectives(store, sha)
    mean = 0.1 * sum(1 + i / 7 for i in range(3)) / 3
    assert objective.request == request
    assert objective.root_ms == pytest.approx(513 * mean, rel=1e-12)
    assert objective.ratio == pytest.approx(0.5, rel=1e-12)
    assert len(query.objectives(store)) == 2


def test_totals(store: Store) -> None:
    shas = [child(store, i) for i in range(1, 7)]
    audited(store, shas[0])
    audited(store, shas[1], Status.BITS_UNEQUAL)
    audited(store, shas[1], Status.CRASHED)
    audited(store, shas[2], Status.CRASHED)
    audited(store, shas[3], level=Level.SMOKE)
    audited(store, shas[4])
    audited(store, shas[4], Status.TIMED_OUT, Level.FULL)
    store.request_audit(shas[5], Level.SCREEN)
    totals = query.totals(store)
    assert (totals.candidates, totals.audited, totals.verified, totals.audits) == (6, 5, 1, 8)
    assert totals.rejected == {"bits_unequal": 1, "crashed": 1, "timed_out": 1}
    assert totals.pending == 1
    assert totals.comparisons == 4 * 3000 + 4 * 50
    assert totals.unequal == 0
    assert query.stage_seconds(store) == {"build": 20.0, "screen": 10.0}


def test_patience_counts_candidates_audited_since_the_last_promotion(store: Store) -> None:
    assert query.audits_since_promotion(store) == 0
    a, b = child(store, 1), child(store, 2)
    audited(store, a, Status.CRASHED)
    assert query.audits_since_promotion(store) == 1
    promoted(store, b)
    assert query.audits_since_promotion(store) == 0
    audited(store, child(store, 3))
    screen = query.audits(store)[-1].request
    store.promote(screen_audit=screen, full_audit=None, granted=False, reason="r", blocked_by="noise")
    assert query.audits_since_promotion(store) == 1


def fill(store: Store, count: int) -> None:
    """Write a large study quickly: rows as the store would write them, without a transaction each."""
    rng = random.Random(1)
    sample = answer(store, store.request_audit(ROOT.sha256, Level.SCREEN))
    store.record(sample)
    parents = [ROOT.sha256]
    children: list[tuple[str, str, bool]] = []
    for number in range(count):
        new = source(number)
        source_path(store.folder, new.sha256).write_text(new.text)
        children.append((new.sha256, rng.choice(parents), rng.random() < 0.5))
        if children[-1][2]:
            parents.append(new.sha256)
    with store.transaction() as session:
        session.add_all(Implementation(sha256=sha, tree=sha) for sha, _, _ in children)
        session.flush()
        for number, (sha, parent, _) in enumerate(children):
            session.add_all((opportunity(number, parent), modification(sha, parent), asked(number, sha)))
        session.flush()
        for number, (sha, _, ok) in enumerate(children):
            session.add(audit_row(number, sha, ok, sample))
        session.flush()
        for row in session.scalars(select(Audit).where(Audit.status == Status.VERIFIED, Audit.seq > 2)):
            times = timings(rng.uniform(0.5, 1.5))
            row.measurements.extend(AuditMeasurement(position=i, measurement=m) for i, m in enumerate(times))


def opportunity(number: int, parent: str) -> Opportunity:
    return Opportunity(
        mechanism="m",
        edit={"BLOCK": number},
        workloads=(),
        evidence=(),
        rationale="r",
        source_audit=None,
        fingerprint=f"{number}",
        parent_links=[OpportunityParent(position=0, parent=parent)],
    )


def modification(sha256: str, parent: str) -> Modification:
    return Modification(
        child=sha256,
        hypothesis="h",
        functions=(),
        regimes=(),
        expected_effect="",
        requirements_at_risk=(),
        falsified_by="",
        proposer="knobs",
        opportunity=None,
        parent_links=[ModificationParent(position=0, parent=parent)],
    )


def asked(number: int, sha256: str) -> AuditRequest:
    return AuditRequest(
        id=f"{number:016x}",
        implementation=sha256,
        level=Level.SCREEN,
        root=ROOT.sha256,
        incumbent=ROOT.sha256,
    )


def audit_row(number: int, sha256: str, ok: bool, sample: AuditEvidence) -> Audit:
    verdicts = held() if ok else failed(BATCH)
    return Audit(
        request=f"{number:016x}",
        implementation=sha256,
        root=ROOT.sha256,
        incumbent=ROOT.sha256,
        level=Level.SCREEN,
        status=Status.VERIFIED if ok else Status.BITS_UNEQUAL,
        reason="",
        bits_id=sample.bits_id,
        numerics=sample.numerics,
        specialisations=(),
        seconds=sample.seconds,
        seed=number,
        environment=MACHINE,
        comparable=content_hash([MACHINE.architecture, MACHINE.versions])[:16],
        harness=sample.harness,
        log=None,
        started=0.0,
        verdicts=[AuditVerdict(position=i, verdict=verdict) for i, verdict in enumerate(verdicts)],
    )


def test_questions_stay_quick_in_a_large_study(tmp_path: Path) -> None:
    store = new_store(tmp_path / "study")
    fill(store, 2000)
    store.check()
    youngest = query.verified(store)[-1].sha256
    questions: dict[str, Callable[[], object]] = {
        "incumbent": lambda: query.incumbent(store),
        "best": lambda: query.best(store),
        "frontier": lambda: query.frontier(store),
        "archive": lambda: query.archive(store),
        "without_evidence": lambda: query.without_evidence(store),
        "open_opportunities": lambda: query.open_opportunities(store),
        "of one parent": lambda: query.open_opportunities(store, youngest),
        "attempts": lambda: attempts.attempts(store),
        "attempts of one parent": lambda: attempts.attempts(store, youngest),
        "totals": lambda: query.totals(store),
        "lineage": lambda: query.lineage(store, youngest),
        "descendants": lambda: query.descendants(store, ROOT.sha256),
        "broke": lambda: query.broke(store, BATCH),
        "survives": lambda: query.survives(store, BATCH),
        "latest_evidence": lambda: query.latest_evidence(store, youngest),
        "audits_since_promotion": lambda: query.audits_since_promotion(store),
        "pending": store.pending,
        "add": lambda: child(store, 10_000, (youngest,)),
    }
    # Each takes well under 0.2 s alone; a question without an index takes tens of seconds.
    for name, question in questions.items():
        started = time.process_time()
        question()
        assert time.process_time() - started < 2.0, name
    assert len(query.descendants(store, ROOT.sha256)) == 2001
    assert query.totals(store).audited == 2000
