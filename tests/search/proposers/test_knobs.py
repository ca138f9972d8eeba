"""What the knob proposer proposes, in which order, and what it leaves alone."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.search.fake_audit import OPERATOR, ROOT, FakeAudits, new_study, settings_of

from kernelbraid.contract import KnobValue, Source
from kernelbraid.ir import query
from kernelbraid.ir.evidence import Status
from kernelbraid.ir.schema import OpportunityClosed, Outcome
from kernelbraid.search import audits, loop
from kernelbraid.search.proposers import Proposal, edits
from kernelbraid.search.proposers.external import External
from kernelbraid.search.proposers.knobs import KnobProposer
from kernelbraid.search.study import Study

Settings = Mapping[str, KnobValue]


def proposed(study: Study, wanted: int = 100) -> list[Proposal]:
    proposer = KnobProposer()
    proposer.observe(study)
    return list(proposer.propose(study, wanted))


def changes(study: Study, proposal: Proposal) -> Settings:
    """What a proposal sets differently from its parent."""
    parent = study.store.source(proposal.parents[0])
    return edits.differences(settings_of(parent), settings_of(proposal.source))


def audited(study: Study, fake: FakeAudits, *settings: Settings, base: Source = ROOT) -> None:
    """Audit the root, then edits of `base`."""
    loop.run(study, External(), run_job=fake)
    for each in settings:
        source = edits.apply(base, each, study.contract)
        study.admit(Proposal(source, (base.sha256,), "a test", proposer="test"))
    loop.run(study, External(), run_job=fake)


def closed(study: Study) -> dict[int, Outcome]:
    with study.store.read() as session:
        return {each.opportunity: each.outcome for each in session.query(OpportunityClosed)}


def calm(**effects: float) -> FakeAudits:
    """Audits almost without noise; an effect `SCORES__vectorised` changes every log latency by so much."""
    known = {tuple(name.split("__")): change for name, change in effects.items()}

    def model(settings: Settings, phase: str) -> float:
        return sum(known.get((name, str(value)), 0.0) for name, value in settings.items())

    return FakeAudits(model=model, noise=1e-4, broken=lambda settings: None)


def test_nothing_is_proposed_before_the_root_is_audited(tmp_path: Path) -> None:
    with new_study(tmp_path / "s", calm()) as study:
        assert proposed(study) == []


def test_every_single_edit_of_the_root_is_an_opportunity_and_variants_come_first(tmp_path: Path) -> None:
    fake = calm()
    with new_study(tmp_path / "s", fake) as study:
        audited(study, fake)
        found = [changes(study, each) for each in proposed(study)]
        knobs = edits.declared(ROOT, OPERATOR.contract)
        expected = [{knob.name: value} for knob in knobs for value in knob.alternatives]
        assert len(found) == len(expected) and all(each in found for each in expected)
        first = [next(iter(each)) for each in found[:4]]
        assert sorted(first) == ["DECODE_SPLIT", "PARTITION", "SCORES", "VALUES"]
        again = [each.source.sha256 for each in proposed(study, 3)]
        assert again == [each.source.sha256 for each in proposed(study)[:3]]
        opportunities = [each for each in query.open_opportunities(study.store) if each.edit is not None]
        assert len(opportunities) == len(expected)


def test_a_proposal_states_its_modification(tmp_path: Path) -> None:
    fake = calm()
    with new_study(tmp_path / "s", fake) as study:
        audited(study, fake)
        for each in proposed(study):
            ((name, value),) = changes(study, each).items()
            knob = next(k for k in edits.declared(ROOT, OPERATOR.contract) if k.name == name)
            assert each.source.text.encode() == (
                ROOT.text.encode()[: knob.start]
                + (f'"{value}"' if isinstance(value, str) else str(value)).encode()
                + ROOT.text.encode()[knob.stop :]
            )
            assert f"{name} {knob.value} -> {value}" in each.hypothesis
            assert each.functions and each.regimes and each.expected_effect and each.falsified_by
            at_risk = "accuracy" if knob.kind == "numeric" else "relation"
            kinds = {r.id: r.kind for r in OPERATOR.contract.requirements}
            assert {kinds[r] for r in each.requirements_at_risk} == {at_risk}


def test_edits_that_gained_are_joined_though_none_could_be_promoted_alone(tmp_path: Path) -> None:
    fake = calm(VALUES__keys_by_4=-0.004, PARTITION__cost=-0.0042, QUERY_TILE__32=-0.0044)
    with new_study(tmp_path / "s", fake) as study:
        gains = ({"VALUES": "keys_by_4"}, {"PARTITION": "cost"}, {"QUERY_TILE": 32})
        audited(study, fake, *gains, {"DECODE_SPLIT": "chunk"})
        assert study.incumbent == study.root
        joint = next(each for each in proposed(study) if len(changes(study, each)) > 1)
        settings = settings_of(joint.source)
        assert all(gain.items() <= settings.items() for gain in gains)
        assert "each seen to gain" in joint.hypothesis
        study.admit(joint)
        loop.run(study, External(), run_job=fake)
        assert study.incumbent == joint.source.sha256


def test_small_gains_do_not_buy_new_bits_in_a_joint_edit(tmp_path: Path) -> None:
    fake = calm(VALUES__keys_by_4=-0.002, KEY_BLOCK__128=-0.005, PARTITION__cost=-0.002)
    with new_study(tmp_path / "s", fake) as study:
        audited(study, fake, {"VALUES": "keys_by_4"}, {"KEY_BLOCK": 128}, {"PARTITION": "cost"})
        joint = [changes(study, each) for each in proposed(study) if len(changes(study, each)) > 1]
        assert not any("KEY_BLOCK" in each for each in joint)


def test_pinned_proposes_no_numeric_edit(tmp_path: Path) -> None:
    fake = calm()
    with new_study(tmp_path / "s", fake, policy="pinned") as study:
        audited(study, fake)
        names = {name for each in proposed(study) for name in changes(study, each)}
        assert names == {"QUERY_TILE", "SCORES", "VALUES", "DECODE_SPLIT", "PARTITION"}


def rejecting(settings_broken: Settings, status: Status, requirement: str) -> FakeAudits:
    fake = calm(SCORES__vectorised=-0.3)

    def broken(settings: Settings) -> tuple[Status, str] | None:
        hit = settings_broken.items() <= settings.items()
        return (status, requirement) if hit else None

    fake.broken = broken
    return fake


def test_an_edit_that_broke_a_requirement_is_not_offered_to_relatives_with_the_same_code(
    tmp_path: Path,
) -> None:
    fake = rejecting({"QUERY_TILE": 32}, Status.BITS_UNEQUAL, "batch")
    with new_study(tmp_path / "s", fake) as study:
        audited(study, fake, {"QUERY_TILE": 32}, {"KEY_BLOCK": 128})
        child = edits.apply(ROOT, {"KEY_BLOCK": 128}, OPERATOR.contract)
        audited(study, fake, {"CHUNK": 512}, base=child)
        fake.model = lambda settings, phase: -0.5 if settings["CHUNK"] == 2048 else 0.0
        audited(study, fake, {"CHUNK": 2048}, base=child)
        offered = proposed(study)
        winner = edits.apply(child, {"CHUNK": 2048}, OPERATOR.contract)
        assert offered and all(each.parents == (winner.sha256,) for each in offered)
        assert not any(changes(study, each) == {"QUERY_TILE": 32} for each in offered)


def test_where_other_code_runs_the_edit_is_offered_again_but_late(tmp_path: Path) -> None:
    fake = rejecting({"QUERY_TILE": 32}, Status.BITS_UNEQUAL, "batch")
    with new_study(tmp_path / "s", fake) as study:
        audited(study, fake, {"QUERY_TILE": 32}, {"SCORES": "vectorised"})
        child = edits.apply(ROOT, {"SCORES": "vectorised"}, OPERATOR.contract)
        offered = [each for each in proposed(study) if each.parents == (child.sha256,)]
        places = [changes(study, each) for each in offered]
        assert {"QUERY_TILE": 32} in places
        assert places.index({"QUERY_TILE": 32}) > places.index({"QUERY_TILE": 4})


def test_inaccurate_numeric_knobs_are_ruled_out_whatever_the_code(tmp_path: Path) -> None:
    fake = rejecting({"EXP2_DEGREE": 4}, Status.INACCURATE, "accuracy_out")
    with new_study(tmp_path / "s", fake) as study:
        audited(study, fake, {"EXP2_DEGREE": 4}, {"SCORES": "vectorised"})
        for each in proposed(study):
            assert settings_of(each.source)["EXP2_DEGREE"] != 4


@pytest.mark.parametrize("status", [Status.IMPLAUSIBLE, Status.TIMED_OUT, Status.OUT_OF_MEMORY])
def test_what_may_be_the_machines_doing_does_not_rule_an_edit_out(tmp_path: Path, status: Status) -> None:
    fake = rejecting({"PARTITION": "cost", "SCORES": "key_by_key"}, status, "batch")
    with new_study(tmp_path / "s", fake) as study:
        audited(study, fake, {"PARTITION": "cost"}, {"SCORES": "vectorised"})
        child = edits.apply(ROOT, {"SCORES": "vectorised"}, OPERATOR.contract)
        offered = [changes(study, each) for each in proposed(study) if each.parents == (child.sha256,)]
        assert {"PARTITION": "cost"} in offered


def test_opportunities_that_evidence_took_away_are_closed(tmp_path: Path) -> None:
    fake = rejecting({"EXP2_DEGREE": 4}, Status.INACCURATE, "accuracy_out")
    with new_study(tmp_path / "s", fake) as study:
        audited(study, fake)
        proposer = KnobProposer()
        proposer.observe(study)
        edit = {each.id: each.edit["knobs"] for each in query.open_opportunities(study.store) if each.edit}
        audited(study, fake, {"EXP2_DEGREE": 4}, {"PARTITION": "cost"})
        proposer.observe(study)
        outcomes = {tuple(edit[number].items()): outcome for number, outcome in closed(study).items()}
        assert outcomes == {
            (("EXP2_DEGREE", 4),): Outcome.DUPLICATE,
            (("PARTITION", "cost"),): Outcome.DUPLICATE,
        }
        audited(study, fake, {"SCORES": "vectorised"})
        proposer.observe(study)
        assert all(
            each.edit != {"knobs": {"EXP2_DEGREE": 4}} for each in query.open_opportunities(study.store)
        )


def test_opportunities_of_a_rejected_parent_are_closed(tmp_path: Path) -> None:
    fake = calm(SCORES__vectorised=-0.3)
    with new_study(tmp_path / "s", fake) as study:
        audited(study, fake)
        child = edits.apply(ROOT, {"SCORES": "vectorised"}, study.contract)
        study.admit(Proposal(child, (ROOT.sha256,), "a test", proposer="test"))
        (request,) = study.store.pending()
        audits.run(study, [request], run_job=fake)
        assert {each.parents for each in proposed(study)} == {(child.sha256,)}
        fake.fails_full = lambda settings: True
        loop.run(study, External(), run_job=fake)
        assert {each.parents for each in proposed(study)} == {(ROOT.sha256,)}
        assert Outcome.EXPIRED in closed(study).values()
        assert all(each.parents == (ROOT.sha256,) for each in query.open_opportunities(study.store))


def test_evidence_of_an_opportunity_is_what_its_estimate_rests_on(tmp_path: Path) -> None:
    fake = calm(QUERY_TILE__32=-0.2)
    with new_study(tmp_path / "s", fake) as study:
        audited(study, fake, {"QUERY_TILE": 32})
        proposed(study)
        further = next(
            each
            for each in query.open_opportunities(study.store)
            if each.edit == {"knobs": {"QUERY_TILE": 64}}
        )
        requests = {sha: standing.evidence.job for sha, standing in study.standings().items()}
        assert set(further.evidence) == set(requests.values())
        assert set(further.workloads) == {each.name for each in study.workloads}
        assert study.incumbent in further.parents


def test_another_source_with_knobs_becomes_the_branch_point(tmp_path: Path) -> None:
    rewritten = Source(ROOT.text.replace("return SCORES, CHUNK", "return CHUNK, SCORES, 'rewritten'"))
    fake = calm()
    fake.model = lambda settings, phase: 0.0
    with new_study(tmp_path / "s", fake) as study:
        audited(study, fake)
        fake.rewritten = {rewritten.sha256: -0.4}
        study.admit(Proposal(rewritten, (ROOT.sha256,), "rewritten", proposer="someone"))
        loop.run(study, External(), run_job=fake)
        assert study.incumbent == rewritten.sha256
        assert proposed(study, 1)[0].parents == (rewritten.sha256,)
