"""Ablations on modelled audits: arms differ in what they know, budgets and seeds are equal."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.search import fake_audit
from tests.search.fake_audit import FakeAudits
from typer.testing import CliRunner

from kernelbraid import ops
from kernelbraid.cli import app
from kernelbraid.ir import query
from kernelbraid.search import ablation
from kernelbraid.search.ablation import Plan
from kernelbraid.search.proposers import arms
from kernelbraid.search.proposers.arms import Arm
from kernelbraid.search.study import Study, some_workloads

AUDITS = 12


def created(folder: Path, operator: str, root: object, **given: Any) -> Study:
    assert operator == "attention" and root is None
    return fake_audit.new_study(folder, FakeAudits(), **given)


def ran(folder: Path, **given: Any) -> tuple[dict[str, Any], Plan]:
    plan = Plan("attention", folder, repeats=given.pop("repeats", 3), audits=AUDITS, **given)
    return ablation.run(plan, run_job=FakeAudits(), create=created), plan


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Plan]:
    return ran(tmp_path_factory.mktemp("ablation") / "arms")


def test_every_arm_has_the_same_budget_and_seeds(whole: tuple[dict[str, Any], Plan]) -> None:
    document, plan = whole
    json.dumps(document)
    assert document["ended"] and list(document["arms"]) == [each.value for each in Arm]
    for arm in document["arms"].values():
        assert [each["repeat"] for each in arm["repeats"]] == [0, 1, 2]
        assert all(each["audits"] == AUDITS == len(each["trajectory"]) for each in arm["repeats"])
        assert all(each["tokens"] is None for each in arm["repeats"]), "unknown is not 0"
        assert arm["audits"] == 3 * AUDITS
    for _, repeat, folder in plan.studies:
        with Study.open(folder) as study:
            assert study.store.study.seed == repeat


def test_trajectories_fall_and_end_at_the_fastest(whole: tuple[dict[str, Any], Plan]) -> None:
    for arm in whole[0]["arms"].values():
        for each in arm["repeats"]:
            assert each["trajectory"] == sorted(each["trajectory"], reverse=True)
            assert each["trajectory"][-1] == pytest.approx(each["fastest"], abs=1e-6)
            assert 0 < each["fastest"] <= 1


def test_intervals_hold_their_means_and_full_over_full_is_one(whole: tuple[dict[str, Any], Plan]) -> None:
    document, _ = whole
    for arm in document["arms"].values():
        for name in ("objective", "proven", "over_full"):
            found = arm[name]
            assert found["low"] <= found["mean"] <= found["high"]
    assert document["arms"]["full"]["over_full"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    full = document["arms"]["full"]["objective"]["mean"]
    assert full < document["arms"]["no-evidence"]["objective"]["mean"], "the model rewards evidence"


def test_arms_branch_where_they_may(whole: tuple[dict[str, Any], Plan]) -> None:
    _, plan = whole
    for arm, _, folder in plan.studies:
        with Study.open(folder) as study:
            parents = {
                sha
                for each in query.implementations(study.store)
                if (made := query.modification(study.store, each.sha256)) is not None
                for sha in made.parents
            }
            granted = {each.implementation for each in query.promotions(study.store, granted=True)}
            if arm is Arm.BEST_OF_N:
                assert parents == {study.root}
            elif arm is Arm.NO_BRANCHING:
                assert parents <= granted | {study.root}
            texts = [study.store.source(each.sha256).text for each in query.implementations(study.store)]
            assert len(set(texts)) == len(texts)


def test_an_ablation_goes_on_where_it_was(tmp_path: Path) -> None:
    calls = 0

    def before(where: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise KeyboardInterrupt

    plan = Plan("attention", tmp_path / "arms", repeats=2, audits=AUDITS, arms=(Arm.FULL, Arm.NO_EVIDENCE))
    stopped = ablation.run(plan, run_job=FakeAudits(before=before), create=created)
    assert not stopped["ended"]
    fake = FakeAudits()
    whole = ablation.run(plan, run_job=fake, create=created)
    assert whole["ended"] and all(arm["audits"] == 2 * AUDITS for arm in whole["arms"].values())
    again = FakeAudits()
    assert ablation.run(plan, run_job=again, create=created)["ended"] and not again.ran, "all was done"


def test_what_a_plan_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="repeats must be at least 2, got 1"):
        Plan("attention", tmp_path, repeats=1, audits=3)
    with pytest.raises(ValueError, match="name audits or minutes"):
        Plan("attention", tmp_path, repeats=2)
    with pytest.raises(ValueError, match="once each"):
        Plan("attention", tmp_path, repeats=2, audits=3, arms=(Arm.FULL, Arm.FULL))
    _, plan = ran(tmp_path / "arms", repeats=2, arms=(Arm.FULL,))
    other = Plan("attention", plan.folder, repeats=2, audits=AUDITS + 1, arms=(Arm.FULL,))
    with pytest.raises(ValueError, match="other budgets"):
        ablation.run(other, run_job=FakeAudits(), create=created)
    for changed in ({"policy": "pinned"}, {"workloads": fake_audit.WORKLOADS[:1]}):
        other = Plan("attention", plan.folder, repeats=2, audits=AUDITS, arms=(Arm.FULL,), **changed)
        with pytest.raises(ValueError, match="another policy, for other workloads"):
            ablation.run(other, run_job=FakeAudits(), create=created)
    result = CliRunner().invoke(app, ["ablate", "attention", "--folder", str(tmp_path), "--arm", "none"])
    assert result.exit_code == 2 and "arm must be one of full" in result.stderr
    result = CliRunner().invoke(
        app, ["ablate", "attention", "--folder", str(tmp_path), "--audits", "1", "--workload", "update2"]
    )
    assert result.exit_code == 2 and "must be one of attention or a phase (prefill, chunked_" in result.stderr


def test_a_plan_times_the_workloads_that_are_named(tmp_path: Path) -> None:
    operator = ops.get("attention")
    grid = operator.grids["study"]
    decode = some_workloads(operator, ["decode"])
    assert decode == tuple(each for each in grid if each.phase == "decode") and len(decode) > 1
    assert some_workloads(operator, [grid[-1].name, grid[0].name]) == (grid[0], grid[-1])
    begun: list[tuple[str, int]] = []
    plan = Plan("attention", tmp_path / "a", 2, (Arm.FULL,), audits=2, workloads=fake_audit.WORKLOADS[1:2])
    ablation.run(
        plan,
        run_job=FakeAudits(),
        create=created,
        begins=lambda study, before: begun.append((study, before)),
    )
    assert begun == [("full-0", 0), ("full-1", 1)]
    for _, _, folder in plan.studies:
        with Study.open(folder) as study:
            assert study.workloads == fake_audit.WORKLOADS[1:2]


def test_blind_proposals_know_no_evidence(tmp_path: Path) -> None:
    """The same seed draws the same edits whatever audits found."""
    drawn = []
    for number, gain in enumerate((-0.3, 0.3)):
        fake = FakeAudits(
            model=lambda settings, phase, gain=gain: gain * (settings["SCORES"] != "key_by_key")
        )
        with fake_audit.new_study(tmp_path / str(number), fake) as study:
            study.store.request_audit(study.root, fake_audit.Level.SCREEN)
            from kernelbraid.search import audits

            audits.run(study, study.store.pending(), run_job=fake)
            blind = arms.proposer_of(Arm.BEST_OF_N, 5)
            drawn.append([each.source.sha256 for each in blind.propose(study, 4)])
            blind.observe(study)
            assert not query.open_opportunities(study.store)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 4
