"""What analysers read from a study's evidence; audits are modelled."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.search import fake_audit
from tests.search.fake_audit import FakeAudits, Settings

from kernelbraid.contract import Source
from kernelbraid.ir import query
from kernelbraid.ir.evidence import Launch, Status
from kernelbraid.search import loop, opportunities
from kernelbraid.search.opportunities import CompiledKernel
from kernelbraid.search.proposers import external
from kernelbraid.search.proposers.knobs import KnobProposer
from kernelbraid.search.study import Study


def searched(folder: Path, fake: FakeAudits, audits: int = 16) -> Study:
    study = fake_audit.new_study(folder, fake, audits=audits, seed=3)
    loop.run(study, KnobProposer(3), run_job=fake)
    return study


def written(study: Study) -> list[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    found = [each for each in query.open_opportunities(study.store) if each.edit is None]
    return [(each.mechanism, each.rationale, each.parents, each.workloads) for each in found]


def test_the_root_alone_says_what_dominates_and_what_is_far_from_the_bound(tmp_path: Path) -> None:
    fake = FakeAudits()
    with searched(tmp_path / "study", fake, audits=1) as study:
        found = {mechanism: (rationale, workloads) for mechanism, rationale, _, workloads in written(study)}
        # 30 x 4 ms, 300 x 1 ms and 20 x 8 ms
        assert "takes 52% of the aggregate" in found["less time in decode"][0]
        names = [each.name for each in study.workloads]
        for name in names:
            rationale, workloads = found[f"closer to the machine's bound in {name}"]
            assert "the 0.01 ms that the measured rates allow" in rationale and workloads == (name,)
        assert set(found) == {
            "less time in decode",
            *(f"closer to the machine's bound in {n}" for n in names),
        }


def test_each_suggestion_is_written_once_and_rests_on_audits(tmp_path: Path) -> None:
    fake = FakeAudits()
    with searched(tmp_path / "study", fake) as study:
        opportunities.observe(study)
        before = written(study)
        assert opportunities.observe(study) == 0 and written(study) == before
        assert len({(mechanism, parents) for mechanism, _, parents, _ in before}) == len(before)
        audits = {each.request for each in query.audits(study.store)}
        for each in query.open_opportunities(study.store):
            assert each.evidence and set(each.evidence) <= audits


def test_a_refused_modification_is_suggested_with_its_requirement_held(tmp_path: Path) -> None:
    fake = FakeAudits(
        broken=lambda settings: (Status.BITS_UNEQUAL, "batch") if settings["SCORES"] != "key_by_key" else None
    )
    with searched(tmp_path / "study", fake) as study:
        opportunities.observe(study)
        kept = [each for each in written(study) if "attention/1/batch/" in each[0]]
        assert kept and all("0x1 against 0x2" in rationale for _, rationale, _, _ in kept)
        assert all(query.is_verified(study.store, parent) for _, _, parents, _ in kept for parent in parents)


def test_a_gain_behind_a_limit_and_a_knob_at_its_end(tmp_path: Path) -> None:
    def model(settings: Settings, phase: str) -> float:
        gain = {64: 0.0, 128: -0.3, 32: 0.1, 16: 0.2}[settings["KEY_BLOCK"]]  # type: ignore[index]
        slow = 0.2 if settings["VALUES"] == "keys_by_4" and phase == "update" else 0.0
        fast = -0.5 if settings["VALUES"] == "keys_by_4" and phase == "decode" else 0.0
        return gain + slow + fast

    fake = FakeAudits(model=model, broken=lambda _: None)
    with searched(tmp_path / "study", fake, audits=40) as study:
        opportunities.observe(study)
        mechanisms = {mechanism: rationale for mechanism, rationale, _, _ in written(study)}
        assert "KEY_BLOCK beyond 128, the end of its range" in mechanisms
        assert "from 64 to 128" in mechanisms["KEY_BLOCK beyond 128, the end of its range"]
        assert not any(each.startswith("CHUNK beyond") for each in mechanisms), "it gained nothing"
    # Alone, without the gain that makes room for it, the slower workload exceeds its limit.
    fake = FakeAudits(model=lambda s, phase: model({**s, "KEY_BLOCK": 64}, phase), broken=lambda _: None)
    with searched(tmp_path / "other", fake, audits=40) as study:
        opportunities.observe(study)
        update = next(each.name for each in study.workloads if each.phase == "update")
        found = {mechanism: rationale for mechanism, rationale, _, _ in written(study)}
        assert "where its limit is 1.05" in found[f"its gain without slowing {update}"]


def test_next_lists_findings_beside_edits(tmp_path: Path) -> None:
    fake = FakeAudits()
    with searched(tmp_path / "study", fake, audits=6):
        pass
    document = external.next_(tmp_path / "study")
    json.dumps(document)
    listed = document["opportunities"]
    assert len(listed) == 10
    by_hand = [each for each in listed if each["edit"] is None]
    assert 1 <= len(by_hand) <= 5 and listed[-len(by_hand) :] == by_hand


@pytest.mark.parametrize(
    ("text", "programs", "occupancy"),
    [
        ("k(Q: *bf16; D=128; ) warps=4 stages=3 registers=168 spills=0 shared=99328 abc", 2, 0.125),
        ("k(Q: *bf16; D=128; ) warps=8 stages=3 registers=255 spills=4 shared=1024 abc", 1, 0.125),
        ("k(x) warps=4 stages=2 registers=32 spills=0 shared=0 abc", 16, 1.0),
    ],
)
def test_resources_of_a_compiled_kernel(text: str, programs: int, occupancy: float) -> None:
    kernel = CompiledKernel.read(text)
    assert kernel is not None
    assert (kernel.programs, kernel.occupancy) == (programs, occupancy)
    assert CompiledKernel.read("attend(float32)") is None


def test_spills_and_low_occupancy_are_suggested(tmp_path: Path) -> None:
    kernels = (
        "fwd(Q; D=128; ) warps=8 stages=3 registers=255 spills=4 shared=1024 abc",
        "merge(Q; D=128; ) warps=4 stages=3 registers=168 spills=0 shared=99328 abc",
        "copy(Q; D=128; ) warps=4 stages=3 registers=32 spills=0 shared=0 abc",
    )
    fake = FakeAudits()
    with searched(tmp_path / "study", fake, audits=1) as study:
        standing = study.standings()[study.root]
        standing = replace(standing, evidence=replace(standing.evidence, specialisations=kernels))
        found = {each.mechanism: each.rationale for each in opportunities.compiled_kernels(study, standing)}
    assert set(found) == {"fwd without spills", "more programs of merge on a multiprocessor"}
    assert "let 2 run at a time: 12% of its threads" in found["more programs of merge on a multiprocessor"]


def test_launches_and_unfilled_waves_are_suggested(tmp_path: Path) -> None:
    fake = FakeAudits()
    with searched(tmp_path / "study", fake, audits=1) as study:
        standing = study.standings()[study.root]
        ms = {each.workload: each.candidate_ms[0] for each in standing.evidence.measurements}
        small, large, *_ = sorted(ms, key=lambda name: ms[name])
        made = (
            Launch(small, "chunks", 400.0, 132, 128, 264),
            Launch(small, "merge", 1.0, 132, 128, 132),
            Launch(large, "forward", 1.0, 140, 256, 132),
            Launch("another", "copy", 900.0, 1, 32, 4224),
        )
        standing = replace(standing, evidence=replace(standing.evidence, launches=made))
        found = {each.mechanism: each for each in opportunities.launches(study, standing)}
    wanted = {
        f"fewer launches in {small}": "launches 401 kernels (chunks, merge)",
        f"blocks of chunks that fill the device in {small}": "0.50 waves: 50% of",
        f"blocks of forward that fill the device in {large}": "1.06 waves: 47% of",
    }
    assert set(found) == set(wanted)
    for mechanism, text in wanted.items():
        assert text in found[mechanism].rationale and found[mechanism].parents == (standing.sha256,)


def test_sources_without_knobs_are_analysed_too(tmp_path: Path) -> None:
    fake = FakeAudits()
    text = fake_audit.ROOT.text.partition("KNOBS")[0] + fake_audit.ROOT.text.partition("}\n")[2]
    study = fake_audit.new_study(tmp_path / "study", fake, root=Source(text), audits=1)
    with study:
        loop.run(study, KnobProposer(0), run_job=fake)
        assert len(written(study)) == 4
