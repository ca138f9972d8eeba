"""Properties of the search, on audits that a model answers."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.search.fake_audit import (
    ROOT,
    WORKLOADS,
    FakeAudits,
    Settings,
    log_latency,
    new_study,
    reopened,
    settings_of,
)

from kernelbraid.audit import jobs
from kernelbraid.contract import BitPolicy, Source
from kernelbraid.ir import query
from kernelbraid.ir.evidence import Level, Status
from kernelbraid.ir.schema import Lineage
from kernelbraid.ir.store import Store
from kernelbraid.search import loop
from kernelbraid.search.budget import CLOSING
from kernelbraid.search.loop import Ending, Progress
from kernelbraid.search.proposers import Proposal, edits
from kernelbraid.search.proposers.knobs import KnobProposer
from kernelbraid.search.study import Study


def search(study: Study, fake: FakeAudits, **given: object) -> tuple[Ending, list[Progress]]:
    seen: list[Progress] = []
    ending = loop.run(study, KnobProposer(), progress=seen.append, run_job=fake, **given)  # type: ignore[arg-type]
    study.store.check()
    return ending, seen


def true_ratio(source: Source) -> float:
    """The model's aggregate latency over the root's, without noise."""
    from tests.search.fake_audit import ROOT_MS

    def total(of: Source) -> float:
        settings = settings_of(of)
        return math.fsum(
            w.weight * ROOT_MS[w.phase] * math.exp(log_latency(settings, w.phase)) for w in WORKLOADS
        )

    return total(source) / total(ROOT)


def edit(study: Study, parent: Source, **settings: int | str) -> Proposal:
    return Proposal(
        source=edits.apply(parent, settings, study.contract),
        parents=(parent.sha256,),
        hypothesis="to see what happens",
        proposer="test",
    )


class Scripted:
    """Proposes single edits of the root, one at a time."""

    name = "scripted"

    def __init__(self, *settings: dict[str, int | str]) -> None:
        self.settings = list(settings)

    def observe(self, study: Study) -> None:
        pass

    def propose(self, study: Study, wanted: int) -> tuple[Proposal, ...]:
        if not self.settings:
            return ()
        return (edit(study, study.store.source(study.root), **self.settings.pop(0)),)


# What a search achieves


def test_three_minutes_find_a_clear_winner(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, minutes=3) as study:
        ending, seen = search(study, fake)
        found = study.summary()
        assert ending is Ending.TIME
        assert found["audited"] >= 20 and found["promotions"] >= 1
        assert found["speedup"] > 1.8
        assert true_ratio(study.store.source(found["best"])) < 0.52
        assert found["unequal"] == 0 and found["comparisons"] > 0
        assert found["seconds"] <= 180.0
        assert {"proposed", "audited", "promoted"} <= {each.stage for each in seen}
        promoted = next(each for each in seen if each.stage == "promoted")
        assert "bits changed" in promoted.message


@pytest.mark.parametrize("seed", range(2))
def test_the_same_seed_searches_the_same_way(tmp_path: Path, seed: int) -> None:
    orders = []
    for name in ("one", "two"):
        fake = FakeAudits()
        with new_study(tmp_path / name, fake, audits=6, seed=seed) as study:
            loop.run(study, KnobProposer(seed), run_job=fake)
            orders.append([each.sha256 for each in query.implementations(study.store)])
    assert orders[0] == orders[1]


def test_opportunities_end(tmp_path: Path) -> None:
    fake = FakeAudits()
    source = Source(
        ROOT.text.replace('"vectorised", "vectorised_by_4"', '"vectorised",')
        .replace("(256, 512, 1024, 2048)", "(1024,)")
        .replace("(16, 32, 64, 128)", "(64,)")
        .replace("(4, 5, 6, 7)", "(6,)")
        .replace("(1, 4, 16, 32, 64)", "(16,)")
    )
    with new_study(tmp_path / "s", fake, root=source) as study:
        assert search(study, fake)[0] is Ending.OPPORTUNITIES
        assert true_ratio(study.store.source(study.incumbent)) == pytest.approx(
            true_ratio(
                edits.apply(
                    source,
                    {"SCORES": "vectorised", "VALUES": "keys_by_4", "PARTITION": "cost"},
                    study.contract,
                )
            )
        )


# Promotion


def test_nothing_is_promoted_without_a_full_audit(tmp_path: Path) -> None:
    fake = FakeAudits(seconds={Level.SCREEN: 6.0, Level.FULL: 1e6})
    with new_study(tmp_path / "s", fake, minutes=2) as study:
        with pytest.raises(RuntimeError, match="closing audit"):
            search(study, fake)
        assert study.incumbent == study.root and study.summary()["speedup"] == 1.0
        assert query.promotions(study.store, granted=True) == []
        assert [each.level for each in study.store.pending()] == [Level.FULL]
        fake.seconds = {Level.SCREEN: 6.0, Level.FULL: 60.0}
        assert search(study, fake)[0] is Ending.TIME
        assert study.incumbent != study.root and study.store.pending() == []


def test_a_candidate_that_fails_its_full_audit_is_no_branch_point(tmp_path: Path) -> None:
    def bad(settings: Settings) -> bool:
        return settings["VALUES"] == "keys_by_4"

    fake = FakeAudits(fails_full=bad, noise=0.002)
    with new_study(tmp_path / "s", fake) as study:
        proposer = Scripted({"VALUES": "keys_by_4"}, {"PARTITION": "cost"})
        loop.run(study, proposer, run_job=fake)
        first, second = query.implementations(study.store)[1:]
        assert study.incumbent == second.sha256
        refused = query.promotions(study.store, granted=False)
        assert [(each.implementation, each.blocked_by) for each in refused] == [
            (first.sha256, "full/requirements")
        ]
        assert not study.standings()[first.sha256].accepted
        with pytest.raises(ValueError, match="not verified"):
            study.admit(edit(study, study.store.source(first.sha256), QUERY_TILE=32))


def test_refusals_say_what_blocked_them(tmp_path: Path) -> None:
    fake = FakeAudits(noise=0.001)
    with new_study(tmp_path / "s", fake) as study:
        proposer = Scripted({"EXP2_DEGREE": 4}, {"QUERY_TILE": 1}, {"CHUNK": 512}, {"EXP2_DEGREE": 7})
        loop.run(study, proposer, run_job=fake)
        blocked = {each.blocked_by for each in query.promotions(study.store, granted=False)}
        assert "screen/requirements" in blocked and "screen/status" in blocked
        reasons = " ".join(each.reason for each in query.promotions(study.store))
        assert "accuracy_out" in reasons
        assert study.incumbent == study.root


def test_a_limit_blocks_by_workload(tmp_path: Path) -> None:
    def model(settings: Settings, phase: str) -> float:
        moved = settings["PARTITION"] == "cost"
        return {"decode": -0.3, "update": 0.2, "prefill": 0.0}[phase] if moved else 0.0

    fake = FakeAudits(model=model, noise=0.001)
    with new_study(tmp_path / "s", fake) as study:
        loop.run(study, Scripted({"PARTITION": "cost"}), run_job=fake)
        (decision,) = query.promotions(study.store)
        assert not decision.granted and decision.blocked_by == f"screen/limit/{WORKLOADS[2].name}"
        child = query.implementations(study.store)[1].sha256
        (row,) = query.lineage_decisions(study.store, child)
        assert row.decision is Lineage.ARCHIVE and "slower than its limit" in row.reason


def test_after_a_promotion_jobs_measure_against_the_new_incumbent(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake) as study:
        loop.run(study, Scripted({"SCORES": "vectorised"}), run_job=fake)
        first = study.incumbent
        assert first != study.root
        loop.run(study, Scripted({"SCORES": "vectorised_by_4"}), run_job=fake)
        assert fake.ran[-1].incumbent.sha256 == first and fake.ran[0].incumbent.sha256 == study.root


def test_what_waited_when_another_was_promoted_is_refused_for_that_and_stays_a_branch_point(
    tmp_path: Path,
) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake) as study:
        loop.run(study, Scripted(), run_job=fake)
        root = study.store.source(study.root)
        for settings in ({"SCORES": "vectorised"}, {"VALUES": "keys_by_4"}):
            study.admit(edit(study, root, **settings))
        loop.run(study, Scripted(), run_job=fake)
        (waited,) = query.promotions(study.store, granted=False)
        assert waited.blocked_by == "screen/incumbent"
        assert waited.implementation in {each.sha256 for each in query.frontier(study.store)}


@pytest.mark.parametrize("noise", [0.002, 0.02])
def test_sources_that_are_no_faster_are_not_promoted(tmp_path: Path, noise: float) -> None:
    fake = FakeAudits(model=lambda settings, phase: 0.0, noise=noise, broken=lambda settings: None)
    with new_study(tmp_path / "s", fake, audits=30, patience=1000) as study:
        search(study, fake)
        assert study.budget.audited >= 25
        assert study.incumbent == study.root


# Bit policy


def test_pinned_never_touches_numeric_knobs(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, audits=25, policy=BitPolicy.PINNED) as study:
        search(study, fake)
        assert {each.evidence.bits_id for each in study.standings().values()} == {
            study.summary()["bits"]["root"]
        }
        assert study.incumbent != study.root and not study.summary()["bits"]["changed"]
        assert not any(each.bits_changed for each in query.promotions(study.store))


def test_a_pinned_study_rejects_other_bits_from_anyone(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, policy="pinned") as study:
        loop.run(study, Scripted({"KEY_BLOCK": 128}), run_job=fake)
        (decision,) = query.promotions(study.store)
        assert not decision.granted
        assert [each.status for each in study.standings().values()][1] is Status.WRONG_BITS_ID


# Budgets and patience


def test_the_audit_budget_is_exact(tmp_path: Path) -> None:
    for audits in (1, 4, 5):
        fake = FakeAudits()
        with new_study(tmp_path / str(audits), fake, audits=audits) as study:
            assert search(study, fake)[0] is Ending.AUDITS
            assert study.budget.audited == audits
            assert search(study, fake)[0] is Ending.AUDITS
            assert study.budget.audited == audits


@pytest.mark.parametrize("minutes", [0.75, 1.0, 2.5])
def test_the_time_to_search_is_never_exceeded_and_survives_reopening(tmp_path: Path, minutes: float) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, minutes=minutes) as study:
        assert search(study, fake)[0] is Ending.TIME
        assert study.budget.seconds <= 60 * minutes + 1e-6
        assert fake.now == pytest.approx(study.budget.seconds + study.budget.spent(CLOSING))
        spent, ran = study.budget.seconds, len(fake.ran)
        assert study.summary()["speedup"] > 1.4
    with reopened(tmp_path / "s", fake) as study:
        assert study.budget.seconds == pytest.approx(spent)
        assert search(study, fake)[0] is Ending.TIME
        assert len(fake.ran) == ran


def test_a_long_search_confirms_on_the_way_within_its_share(tmp_path: Path) -> None:
    fake = FakeAudits(seconds={Level.SCREEN: 6.0, Level.FULL: 12.0})
    with new_study(tmp_path / "s", fake, audits=34) as study:
        _, seen = search(study, fake)
        promoted = [each.audited for each in seen if each.stage == "promoted"]
        assert promoted and promoted[0] < 34
        fulls = [c for job in fake.ran for c in job.candidates if c.level is Level.FULL]
        assert 12.0 * (len(fulls) - 1) <= study.budget.seconds / 3


def test_when_the_best_is_not_confirmed_the_next_one_is_tried(tmp_path: Path) -> None:
    def model(settings: Settings, phase: str) -> float:
        return -0.4 * (settings["VALUES"] == "keys_by_4") - 0.2 * (settings["PARTITION"] == "cost")

    fake = FakeAudits(model=model, fails_full=lambda settings: settings["VALUES"] == "keys_by_4")
    with new_study(tmp_path / "s", fake) as study:
        loop.run(study, Scripted(), run_job=fake)
        root = study.store.source(study.root)
        for settings in ({"PARTITION": "cost"}, {"VALUES": "keys_by_4"}):
            study.admit(edit(study, root, **settings))
        loop.run(study, Scripted(), run_job=fake)
        (refused,) = query.promotions(study.store, granted=False)
        assert refused.blocked_by == "full/requirements"
        assert settings_of(study.store.source(study.incumbent))["PARTITION"] == "cost"


def test_no_time_for_the_root_is_an_error_and_can_be_resumed(tmp_path: Path) -> None:
    fake = FakeAudits(seconds={Level.SCREEN: 100.0, Level.FULL: 100.0})
    with new_study(tmp_path / "s", fake, minutes=1) as study:
        with pytest.raises(RuntimeError, match="allow more minutes"):
            search(study, fake)
        study.store.check()


def test_patience_ends_a_search_and_keeps_its_count(tmp_path: Path) -> None:
    fake = FakeAudits(model=lambda settings, phase: 0.0, broken=lambda settings: None)
    with new_study(tmp_path / "s", fake, patience=7) as study:
        assert search(study, fake)[0] is Ending.PATIENCE
        assert 7 <= study.budget.audited < 7 + loop.BATCH
        audited = study.budget.audited
        assert search(study, fake)[0] is Ending.PATIENCE
        assert study.budget.audited == audited


def test_a_root_that_fails_ends_the_search_with_its_reason(tmp_path: Path) -> None:
    fake = FakeAudits(broken=lambda settings: (Status.BITS_UNEQUAL, "batch"))
    with new_study(tmp_path / "s", fake) as study:
        with pytest.raises(RuntimeError, match="no valid start, bits_unequal"):
            search(study, fake)
        with pytest.raises(RuntimeError, match="no valid start, bits_unequal"):
            search(study, fake)


# Duplicates and negative evidence


def test_no_source_is_audited_twice_and_every_opportunity_ends_once(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, audits=20) as study:
        search(study, fake)
        screened = [c.source.sha256 for job in fake.ran for c in job.candidates if c.level is Level.SCREEN]
        assert len(screened) == len(set(screened))
        settings = [tuple(sorted(settings_of(study.store.source(sha)).items())) for sha in screened]
        assert len(settings) == len(set(settings))


def test_a_proposal_that_repeats_a_source_is_closed_as_duplicate(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake) as study:
        loop.run(
            study,
            Scripted({"PARTITION": "cost"}, {"PARTITION": "cost"}, {"VALUES": "keys_by_4"}),
            run_job=fake,
        )
        assert study.budget.audited == 2


def test_an_edit_that_broke_a_requirement_is_not_made_again_while_the_code_is_the_same(
    tmp_path: Path,
) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, audits=25) as study:
        search(study, fake)
        inaccurate = [
            settings_of(study.store.source(sha))
            for sha, standing in study.standings().items()
            if standing.status is Status.INACCURATE
        ]
        assert len(inaccurate) == 1


# Interruption


class HereError(Exception):
    """Stands for the death of the process at one place."""


class Countdown:
    """Raises at the n-th place that asks."""

    def __init__(self, count: int, error: type[BaseException] = HereError) -> None:
        self.left = count
        self.error = error

    def __call__(self, where: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error(where)


def outcome(study: Study) -> tuple[list[str], str, int]:
    implementations = [each.sha256 for each in query.implementations(study.store)]
    return implementations, study.incumbent, study.budget.audited


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str, int]:
    fake = FakeAudits()
    with new_study(tmp_path_factory.mktemp("calm") / "s", fake, audits=6) as study:
        search(study, fake)
        return outcome(study)


def resumed(folder: Path, fake: FakeAudits) -> tuple[list[str], str, int]:
    """Go on to the end, and check that nothing was lost and nothing counted twice."""
    with reopened(folder, fake) as study:
        study.store.check()
        assert search(study, fake)[0] is Ending.AUDITS
        answered = [audit.request for audit in query.audits(study.store)]
        assert len(answered) == len(set(answered)) and study.store.pending() == []
        assert not list((folder / "jobs").iterdir()) and not list((folder / "results").iterdir())
        return outcome(study)


@pytest.mark.parametrize("error", [HereError, KeyboardInterrupt])
@pytest.mark.parametrize("place", [1, 2, 3, 7])
def test_a_search_interrupted_in_its_audits_goes_on(
    tmp_path: Path, undisturbed: tuple[list[str], str, int], error: type[BaseException], place: int
) -> None:
    fake = FakeAudits(before=Countdown(place, error))
    with new_study(tmp_path / "s", fake, audits=6) as study, contextlib.suppress(HereError):
        loop.run(study, KnobProposer(), run_job=fake)
    assert resumed(tmp_path / "s", fake) == undisturbed


RECORDING = (
    (Store, "record"),
    (Store, "add_implementation"),
    (Store, "request_audit"),
    (Store, "promote"),
    (Store, "decide"),
    (Store, "add_opportunity"),
    (Store, "close_opportunity"),
    (Store, "record_usage"),
    (jobs, "write_job"),
    (jobs, "read_results"),
    (Path, "unlink"),
)


def recording_calls(monkeypatch: pytest.MonkeyPatch, place: int) -> Countdown:
    """Make the search die before or after the n-th of the calls by which it records what it does."""
    countdown = Countdown(place)

    def dying(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **given: object) -> object:
            countdown(original.__name__)
            result = original(*args, **given)
            countdown(original.__name__)
            return result

        return call

    for owner, name in RECORDING:
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))
    return countdown


def die_and_resume(folder: Path, place: int) -> tuple[tuple[list[str], str, int], bool]:
    fake = FakeAudits()
    with pytest.MonkeyPatch.context() as monkeypatch, new_study(folder, fake, audits=6) as study:
        countdown = recording_calls(monkeypatch, place)
        with contextlib.suppress(HereError):
            loop.run(study, KnobProposer(), run_job=fake)
    return resumed(folder, fake), countdown.left <= 0


@pytest.mark.parametrize("place", [2, 10, 61, 90, 112, 150, 201])
def test_a_search_that_dies_while_recording_goes_on(
    tmp_path: Path, undisturbed: tuple[list[str], str, int], place: int
) -> None:
    found, died = die_and_resume(tmp_path / "s", place)
    assert died and found == undisturbed


@pytest.mark.slow
def test_a_search_that_dies_anywhere_goes_on(tmp_path: Path, undisturbed: tuple[list[str], str, int]) -> None:
    place, died = 1, True
    while died:
        found, died = die_and_resume(tmp_path / str(place), place)
        assert found == undisturbed, place
        place += 3
    assert place > 200


def test_stopping_ends_cleanly_and_drops_at_most_the_running_audit(tmp_path: Path) -> None:
    fake = FakeAudits()
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 12

    with new_study(tmp_path / "s", fake, audits=8) as study:
        ending, seen = search(study, fake, should_stop=stop)
        assert ending is Ending.INTERRUPTED and seen[-1].stage == "interrupted"
        assert study.store.pending() or study.budget.audited
        assert search(study, fake)[0] is Ending.AUDITS


def test_one_process_at_a_time_searches(tmp_path: Path) -> None:
    fake = FakeAudits()
    with new_study(tmp_path / "s", fake, audits=1) as study:
        with study.store.controller_lock(), pytest.raises(RuntimeError, match="another process"):
            search(study, fake)
        assert search(study, fake)[0] is Ending.AUDITS
