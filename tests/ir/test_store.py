"""Every invariant of the store, with an attempt to break it."""

from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.ir.plain import (
    HARNESS,
    MACHINE,
    REQUIREMENTS,
    ROOT,
    WORKLOADS,
    answer,
    audited,
    child,
    failed,
    held,
    modelled,
    new_store,
    new_study,
    promoted,
    source,
    timings,
)

from kernelbraid.contract import BitPolicy, Requirement, Source, Workload
from kernelbraid.ir import query, replaying
from kernelbraid.ir.evidence import Level, Status, Verdict
from kernelbraid.ir.schema import HeldOut, Lineage, Outcome, Record, Usage
from kernelbraid.ir.store import DuplicateSourceError, Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "study")


@pytest.fixture
def started(store: Store) -> Store:
    audited(store, ROOT.sha256, ratio=1.0)
    return store


def rows(store: Store) -> dict[str, int]:
    with store.read() as session:
        return {name: session.scalar(text(f"SELECT count(*) FROM {name}")) for name in Record.metadata.tables}


def files(store: Store) -> set[Path]:
    return {path for name in ("sources", "logs") for path in (store.folder / name).iterdir()}


def test_a_study_comes_back_as_it_was_written(tmp_path: Path) -> None:
    with new_store(tmp_path / "a" / "study") as store:
        written = store.study
    with Store.open(tmp_path / "a" / "study") as store:
        assert store.study == written
        assert store.study.root == ROOT.sha256
        assert store.study.workloads == WORKLOADS
        assert store.study.seed == 7 << 100
        assert [r.id for r in query.requirements(store)] == [r.id for r in REQUIREMENTS]
        assert store.source(ROOT.sha256) == ROOT
        assert query.incumbent(store).sha256 == query.root(store).sha256 == ROOT.sha256
        store.check()


@pytest.mark.parametrize(
    "changes",
    [
        {"workloads": ()},
        {
            "workloads": (
                WORKLOADS[0],
                replace(WORKLOADS[0], axes=(("batch", 16), ("length", (100, 200, 600)))),
            )
        },
        {"patience": 0},
        {"minutes": -1.0},
        {"minutes": float("nan")},
        {"audits": 0},
    ],
)
def test_an_incomplete_study_leaves_nothing_behind(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        new_store(tmp_path / "study", **changes)
    assert list(tmp_path.iterdir()) == []


def test_requirements_must_be_given_once(tmp_path: Path) -> None:
    for requirements in ((), REQUIREMENTS + REQUIREMENTS[:1]):
        with pytest.raises(ValueError, match="requirements"):
            Store.create(tmp_path / "study", new_study(), ROOT, requirements)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused_and_untouched(tmp_path: Path, store: Store) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    for folder in (store.folder, tmp_path / "other", tmp_path / "other" / "file"):
        with pytest.raises(ValueError, match="exists already"):
            new_store(folder)
    store.check()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "study"]


def test_no_record_is_changed_or_deleted(started: Store) -> None:
    opportunity = started.add_opportunity(parents=[ROOT.sha256], mechanism="m", rationale="r")
    spare = started.add_opportunity(parents=[ROOT.sha256], mechanism="n", rationale="r")
    started.close_opportunity(spare.id, Outcome.EXPIRED, reason="gone")
    sha = child(started, 1, opportunity=opportunity.id)
    promoted(started, sha)
    started.decide(sha, Lineage.CONTINUE, reason="faster", decided_by="loop")
    started.record_usage(Usage(purpose="search", wall_seconds=1.0))
    modelled(started)
    replaying.record(started, replaying.read(started))
    with started.transaction() as session:  # after the audits, which did not time it
        session.add(HeldOut(position=0, name="kept", workload=WORKLOADS[0]))
    for table in Record.metadata.sorted_tables:
        column = next(iter(table.primary_key.columns)).name
        assert rows(started)[table.name] > 0, table.name
        for statement in (
            f"UPDATE {table.name} SET {column} = {column}",
            f"DELETE FROM {table.name}",
            f"REPLACE INTO {table.name} SELECT * FROM {table.name}",
        ):
            with pytest.raises(RuntimeError, match="insert-only"), started.transaction() as session:
                session.execute(text(statement))
    with pytest.raises(
        RuntimeError, match="held_out names decode"
    ):  # one that the study shows, as written above
        started.check()


def test_changing_a_mapped_record_is_refused(started: Store) -> None:
    with pytest.raises(RuntimeError, match="insert-only"), started.transaction() as session:
        session.add(query.root(started))
        query.root(started).label = "better"
    assert query.root(started).label == "root"


# Parents


def test_a_parent_must_be_verified(store: Store) -> None:
    with pytest.raises(ValueError, match="not verified"):
        child(store, 1)
    audited(store, ROOT.sha256, level=Level.SMOKE)
    with pytest.raises(ValueError, match="not verified"):
        child(store, 1)
    audited(store, ROOT.sha256)
    sha = child(store, 1)
    with pytest.raises(ValueError, match="not verified"):
        child(store, 2, (sha,))
    audited(store, sha, Status.BITS_UNEQUAL)
    with pytest.raises(ValueError, match="not verified"):
        child(store, 2, (ROOT.sha256, sha))
    assert len(query.implementations(store)) == 2
    assert {path.stem for path in (store.folder / "sources").iterdir()} == {ROOT.sha256, sha}


def test_a_stopped_audit_makes_a_branch_point(started: Store) -> None:
    sha = child(started, 1)
    request = started.request_audit(sha, Level.SCREEN)
    started.record(answer(started, request, Status.STOPPED, measurements=()))
    assert query.is_verified(started, sha)
    child(started, 2, (sha,))


def test_a_rejection_is_final(started: Store) -> None:
    sha = child(started, 1)
    audited(started, sha)
    assert query.is_verified(started, sha)
    audited(started, sha, Status.CRASHED, Level.FULL)
    assert not query.is_verified(started, sha)
    audited(started, sha)
    assert not query.is_verified(started, sha)
    with pytest.raises(ValueError, match="not verified"):
        child(started, 2, (sha,))
    assert len(query.audits(started, sha)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parents": ()}, "parents"),
        ({"parents": (ROOT.sha256, ROOT.sha256)}, "parents"),
        ({"parents": ("f" * 64,)}, "no implementation"),
        ({"hypothesis": " "}, "hypothesis"),
        ({"regimes": ("decode", "training")}, "training"),
        ({"requirements_at_risk": ("toy/1/nothing",)}, "requirements_at_risk"),
        ({"opportunity": 99}, "no opportunity 99"),
    ],
)
def test_a_wrong_modification_adds_nothing(started: Store, changes: dict[str, object], message: str) -> None:
    before = rows(started)
    with pytest.raises(ValueError, match=message):
        child(started, 1, **changes)  # type: ignore[arg-type]
    assert rows(started) == before
    assert len(files(started)) == 2


def test_a_modification_is_kept_whole(started: Store) -> None:
    first = child(started, 1)
    audited(started, first)
    merged = child(
        started,
        2,
        (first, ROOT.sha256),
        functions=("decode",),
        regimes=("decode", "prefill"),
        expected_effect="decode 5% faster",
        requirements_at_risk=(REQUIREMENTS[0].id,),
        falsified_by="equal decode latency",
    )
    modification = query.modification(started, merged)
    assert modification is not None
    assert modification.parents == (first, ROOT.sha256)
    assert modification.regimes == ("decode", "prefill")
    assert modification.requirements_at_risk == (REQUIREMENTS[0].id,)
    assert query.modification(started, ROOT.sha256) is None


# Sources


def test_duplicates_are_refused(started: Store) -> None:
    sha = child(started, 1)
    with pytest.raises(DuplicateSourceError) as refusal:
        child(started, 1)
    assert refusal.value.existing.sha256 == sha
    same_tree = Source("# a comment\nBLOCK  =  65\n")
    with pytest.raises(DuplicateSourceError, match="layout and comments"):
        started.add_implementation(same_tree, parents=[ROOT.sha256], hypothesis="h", proposer="p")
    with pytest.raises(DuplicateSourceError):
        started.add_implementation(ROOT, parents=[ROOT.sha256], hypothesis="h", proposer="p")
    assert started.duplicate_of(source(2)) is None
    assert len(query.implementations(started)) == 2


def test_sources_that_do_not_parse_are_still_implementations(started: Store) -> None:
    texts = ("def broken(:\n", "def broken(:  \n", "x = 1\x00\n")
    for broken in texts:
        started.add_implementation(Source(broken), parents=[ROOT.sha256], hypothesis="h", proposer="p")
    assert len(query.implementations(started)) == 4


def test_bytes_are_kept_exactly(started: Store) -> None:
    windows = Source("BLOCK = 1\r\n# caf\u00e9 \U0001f600\r\n")
    sha = started.add_implementation(windows, parents=[ROOT.sha256], hypothesis="h", proposer="p").sha256
    assert started.source(sha).text == windows.text
    assert (started.folder / "sources" / f"{sha}.py").read_bytes() == windows.text.encode()


def test_prefixes_name_implementations(started: Store) -> None:
    sha = child(started, 1)
    assert started.source(sha[:8]) == source(1)
    assert started.implementation(sha).short == sha[:12]
    for wrong in ("", "abc", "xyz_", "%%%%", sha + "0", "../../etc"):
        with pytest.raises(ValueError, match="4 to 64 hexadecimal digits"):
            started.source(wrong)
    absent = f"{(int(sha[:8], 16) ^ 1):08x}"
    with pytest.raises(ValueError, match="no implementation"):
        started.source(absent)


def test_an_ambiguous_prefix_is_refused(started: Store) -> None:
    by_prefix: dict[str, Source] = {}
    number = 0
    while True:
        number += 1
        new = Source(f"N = {number}\n")
        if (other := by_prefix.setdefault(new.sha256[:4], new)) is not new:
            break
    for twin in (new, other):
        started.add_implementation(twin, parents=[ROOT.sha256], hypothesis="h", proposer="p")
    with pytest.raises(ValueError, match="2 implementations"):
        started.source(new.sha256[:4])


def test_a_source_that_lost_its_bytes_is_an_error(started: Store) -> None:
    sha = child(started, 1)
    path = started.folder / "sources" / f"{sha}.py"
    path.write_text("BLOCK = 1\n")
    with pytest.raises(RuntimeError, match="no longer match"):
        started.source(sha)
    with pytest.raises(RuntimeError, match="no longer match"):
        started.check()
    path.unlink()
    with pytest.raises(RuntimeError, match="cannot read"):
        started.source(sha)


# Evidence


def test_evidence_comes_back_as_it_travelled(started: Store) -> None:
    sha = child(started, 1)
    request = started.request_audit(sha, Level.SCREEN)
    warm = tuple(replace(m, protocol="warm", bound_ms=float("inf")) for m in timings(0.8))
    sent = answer(started, request, measurements=(*timings(0.9, 5), *warm), output="\x00odd \ud800 bytes\r\n")
    assert started.record(sent)
    assert query.evidence(started, request) == sent
    with Store.open(started.folder) as again:
        assert query.latest_evidence(again, sha) == sent
        assert query.latest_evidence(again, sha, Level.FULL) is None
        assert again.log(request) == sent.output
        again.check()


@pytest.mark.parametrize("error", [float("nan"), float("inf"), 0.1, 3.5, None])
def test_failed_verdicts_keep_their_numbers(started: Store, error: float | None) -> None:
    request = started.request_audit(child(started, 1), Level.SCREEN)
    verdict = replace(failed("toy/1/accuracy_out/decode")[0], error=error)
    started.record(answer(started, request, Status.INACCURATE, verdicts=(verdict,)))
    found = query.evidence(started, request)
    assert found is not None
    assert repr(found.verdicts) == repr((verdict,))


def test_a_request_is_answered_once(started: Store) -> None:
    sha = child(started, 1)
    request = started.request_audit(sha, Level.SCREEN)
    first = answer(started, request, Status.BITS_UNEQUAL)
    second = answer(started, request, Status.VERIFIED, output="another")
    assert started.record(first)
    before = rows(started)
    assert not started.record(first)
    assert not started.record(second)
    assert rows(started) == before
    assert query.evidence(started, request) == first


def test_an_interrupted_audit_stays_pending(started: Store) -> None:
    request = started.request_audit(child(started, 1), Level.SCREEN)
    cut = answer(started, request, Status.INTERRUPTED)
    assert not started.record(cut)
    assert [pending.id for pending in started.pending()] == [request]
    assert started.record(answer(started, request))
    assert started.pending() == []


def test_pending_requests_are_not_doubled(started: Store) -> None:
    sha = child(started, 1)
    screen = started.request_audit(sha, Level.SCREEN)
    assert started.request_audit(sha[:10], Level.SCREEN) == screen
    full = started.request_audit(sha, Level.FULL)
    assert [(p.id, p.level) for p in started.pending()] == [(screen, Level.SCREEN), (full, Level.FULL)]
    started.record(answer(started, screen))
    assert started.request_audit(sha, Level.SCREEN) not in (screen, full)
    with pytest.raises(ValueError, match="no implementation"):
        started.request_audit("0" * 64, Level.SCREEN)


OTHER = source(9).sha256
TIMED = timings(0.9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job": "0" * 16}, "never made"),
        ({"implementation": OTHER}, "another implementation"),
        ({"implementation": ROOT.sha256}, "another implementation"),
        ({"root": OTHER}, "another root"),
        ({"harness": "harness-2"}, "another harness"),
        ({"level": Level.FULL}, "another level"),
        ({"incumbent": OTHER}, "never had"),
        ({"bits_id": None}, "no bits id"),
        ({"verdicts": held()[1:]}, "no verdict on toy/1/batch/decode"),
        ({"verdicts": held()[:2] + held()[3:]}, "no verdict on toy/1/implementations_agree"),
        ({"verdicts": held() + held()[:1]}, "2 verdicts"),
        ({"verdicts": (*held(), Verdict("toy/2/new/decode", True, 1, 1))}, "no requirement"),
        ({"measurements": TIMED[:1]}, "no cold time"),
        ({"measurements": tuple(replace(m, protocol="warm") for m in TIMED)}, "no cold time"),
        ({"measurements": TIMED + TIMED[:1]}, "twice"),
        ({"measurements": (*TIMED, replace(TIMED[0], workload="decode[batch=1]"))}, "no workload"),
        ({"measurements": (replace(TIMED[0], weight=1.0), TIMED[1])}, "other terms"),
        ({"measurements": (replace(TIMED[0], limit=9.0), TIMED[1])}, "other terms"),
        ({"measurements": (replace(TIMED[0], candidate_ms=(0.1, -0.1, 0.1)), TIMED[1])}, "positive"),
        ({"measurements": (replace(TIMED[0], candidate_ms=(0.1, float("nan"), 0.1)), TIMED[1])}, "positive"),
        (
            {"measurements": (replace(TIMED[0], candidate_ms=(), root_ms=(), incumbent_ms=()), TIMED[1])},
            "pos",
        ),
    ],
)
def test_evidence_that_does_not_answer_is_refused(
    started: Store, changes: dict[str, object], message: str
) -> None:
    request = started.request_audit(child(started, 1), Level.SCREEN)
    good = answer(started, request)
    before, present = rows(started), files(started)
    with pytest.raises(ValueError, match=message):
        started.record(replace(good, **changes))  # type: ignore[arg-type]
    assert rows(started) == before
    assert files(started) == present
    assert started.record(good)


def test_a_time_for_wrong_bits_cannot_be_written(started: Store) -> None:
    sha = child(started, 1)
    request = audited(started, sha, Status.BITS_UNEQUAL)
    with started.read() as session:
        audit = session.scalar(text("SELECT seq FROM audit WHERE request = :r"), {"r": request})
        columns = 'position, workload, phase, weight, "limit", protocol, candidate_ms, root_ms, incumbent_ms'
    measured = f"INSERT INTO measurement (audit, {columns}, calls, bound_ms) "
    with pytest.raises(RuntimeError, match="needs a held verdict"), started.transaction() as session:
        session.execute(
            text(measured + f"VALUES ({audit}, 0, 'w', 'decode', 1, 1, 'cold', '[1]', '[1]', '[1]', 1, 1)")
        )
    accepted = audited(started, child(started, 2))
    with pytest.raises(RuntimeError, match="needs a held verdict"), started.transaction() as session:
        audit = session.scalar(text("SELECT seq FROM audit WHERE request = :r"), {"r": accepted})
        verdict = "INSERT INTO verdict (audit, position, requirement, held, cases, comparisons) "
        session.execute(text(verdict + f"VALUES ({audit}, 9, 'toy/1/batch/decode', 0, 1, 1)"))
    started.check()


def test_relation_with_the_root_may_be_left_out_where_bits_differ(started: Store) -> None:
    request = started.request_audit(child(started, 1), Level.SCREEN)
    verdicts = tuple(v for v in held() if "implementations_agree" not in v.requirement)
    assert started.record(answer(started, request, bits_id="f" * 16, verdicts=verdicts))


GRADIENTS = Requirement("toy/1/gradient_rerun/backward", "relation", "gradient_rerun", "backward")


@pytest.mark.parametrize(
    ("level", "status", "complete"),
    [
        (Level.SCREEN, Status.VERIFIED, True),
        (Level.FULL, Status.STOPPED, True),
        (Level.FULL, Status.VERIFIED, False),
    ],
)
def test_gradients_may_be_left_out_until_level_full_is_checked(
    tmp_path: Path, level: Level, status: Status, complete: bool
) -> None:
    store = Store.create(tmp_path / "study", new_study(), ROOT, (*REQUIREMENTS, GRADIENTS))
    everything = (*held(), Verdict(GRADIENTS.id, True, cases=3, comparisons=1000))
    request = store.request_audit(ROOT.sha256, Level.SCREEN)
    assert store.record(answer(store, request, ratio=1.0, verdicts=everything))
    request = store.request_audit(child(store, 1), level)
    evidence = answer(store, request, status)
    if not complete:
        with pytest.raises(ValueError, match=f"level {level} with no verdict on {GRADIENTS.id}"):
            store.record(evidence)
        evidence = replace(evidence, verdicts=everything)
    assert store.record(evidence)
    store.check()


def test_gradients_that_are_timed_are_never_left_out(tmp_path: Path) -> None:
    timed = (*WORKLOADS, Workload("backward", (("batch", 4), ("length", 200))))
    store = Store.create(tmp_path / "study", new_study(workloads=timed), ROOT, (*REQUIREMENTS, GRADIENTS))
    request = store.request_audit(ROOT.sha256, Level.SCREEN)
    with pytest.raises(ValueError, match=f"no verdict on {GRADIENTS.id}"):
        store.record(answer(store, request))


def test_pinned_bits_are_enforced(tmp_path: Path) -> None:
    store = new_store(tmp_path / "study", policy=BitPolicy.PINNED)
    audited(store, ROOT.sha256)
    request = store.request_audit(child(store, 1), Level.SCREEN)
    with pytest.raises(ValueError, match="pins the root's"):
        store.record(answer(store, request, bits_id="f" * 16))
    other_machine = replace(MACHINE, architecture="sm_90")
    assert store.record(answer(store, request, bits_id="f" * 16, environment=other_machine))


# Transactions and usage


def test_a_transaction_is_kept_whole_or_not_at_all(started: Store) -> None:
    before = rows(started)
    with pytest.raises(KeyError), started.transaction():
        sha = child(started, 1)
        audited(started, sha)
        assert query.is_verified(started, sha)
        raise KeyError
    assert rows(started) == before
    started.check()


def test_a_refused_step_does_not_undo_the_transaction_around_it(started: Store) -> None:
    with started.transaction():
        sha = child(started, 1)
        opportunity = started.add_opportunity(parents=[ROOT.sha256], mechanism="m", rationale="r")
        with pytest.raises(DuplicateSourceError):
            child(started, 1, opportunity=opportunity.id)
        with pytest.raises(ValueError, match="not verified"):
            child(started, 2, (sha,), opportunity=opportunity.id)
        started.close_opportunity(opportunity.id, Outcome.DUPLICATE, reason="same", implementation=sha)
    assert [i.sha256 for i in query.without_evidence(started)] == [sha]
    started.check()


def test_questions_asked_together_see_one_state(started: Store) -> None:
    with Store.open(started.folder) as other, started.read():
        seen = len(query.implementations(started))
        child(other, 1)
        assert len(query.implementations(started)) == seen
    assert len(query.implementations(started)) == seen + 1


def test_usage_adds_up(started: Store) -> None:
    assert query.totals(started).tokens_in is None
    started.record_usage(Usage(purpose="search", wall_seconds=1.5, queue_seconds=3.0))
    started.record_usage(Usage(purpose="proposal", proposer_calls=2, tokens_in=10, money=0.25))
    started.record_usage(Usage(purpose="proposal", proposer_calls=1, tokens_in=5, implementation=ROOT.sha256))
    totals = query.totals(started)
    assert (totals.wall_seconds, totals.queue_seconds, totals.proposer_calls) == (1.5, 3.0, 3)
    assert (totals.tokens_in, totals.tokens_out, totals.money) == (15, None, 0.25)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="usage"):
            started.record_usage(Usage(purpose="search", wall_seconds=wrong))


def test_harness_of_the_study_is_the_one_that_counts(tmp_path: Path) -> None:
    store = new_store(tmp_path / "study", harness="harness-2")
    request = store.request_audit(ROOT.sha256, Level.SCREEN)
    with pytest.raises(ValueError, match="another harness"):
        store.record(answer(store, request, harness=HARNESS))
