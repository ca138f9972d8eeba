"""Audits on a GPU, end to end: one job with honest and hostile candidates, and how each of them ends."""

import dataclasses
import math
from pathlib import Path

import pytest
from tests.audit.left import no_process_left
from tests.gpu import toy_cuda

from kernelbraid.audit import judge, orders, stages
from kernelbraid.audit.judge import Judge
from kernelbraid.audit.process import Limits
from kernelbraid.audit.timing import Sequential
from kernelbraid.contract import BitPolicy, Cost, Source
from kernelbraid.ir.evidence import ACCEPTED, AuditEvidence, Level, Status
from kernelbraid.ops.problem import Operator

RULE = Sequential(most=3, hopeless=(), too_slow=math.inf)
LIMITS = Limits(build_seconds=90.0, run_seconds=30.0, memory_bytes=8 << 30)

CANDIDATES = {
    "root": toy_cuda.root(),
    "schedule": toy_cuda.variant(("WARPS = 1", "WARPS = 2")),
    "other bits": toy_cuda.variant(("BLOCK = 16", "BLOCK = 8")),
    "writes": toy_cuda.WRITES_INPUTS,
    "writes later": toy_cuda.WRITES_INPUTS_LATER,
    "stale": toy_cuda.STALE,
    "later otherwise": toy_cuda.LATER_OTHERWISE,
    "reads lengths": toy_cuda.READS_LENGTHS,
    "baked": toy_cuda.BAKED,
    "false clock": toy_cuda.FALSE_CLOCK,
}
ENDS = {
    "root": ACCEPTED,
    "schedule": ACCEPTED,
    "other bits": ACCEPTED,
    "writes": (Status.TAMPERED,),
    "writes later": (Status.TAMPERED,),
    "stale": (Status.BITS_UNEQUAL,),
    "later otherwise": (Status.BITS_UNEQUAL,),
    "reads lengths": (Status.BUILD_FAILED,),
    "baked": (Status.BITS_UNEQUAL,),
    "false clock": (Status.IMPLAUSIBLE,),
}


def job(**sources: Source) -> orders.AuditJob:
    return orders.AuditJob(
        id="job",
        study="study",
        operator="sums",
        contract=toy_cuda.SUMS.contract.hash,
        harness=orders.harness_hash("sums"),
        device="cuda",
        level=Level.SCREEN,
        policy=BitPolicy.MUTUAL,
        dtype="float32",
        constant_axes=({"width": 4},),
        workloads=toy_cuda.SUMS.grids["study"],
        root=toy_cuda.root(),
        incumbent=toy_cuda.root(),
        candidates=tuple(orders.Candidate(name, source, Level.SCREEN) for name, source in sources.items()),
        separate=True,
    )


def audits(folder: Path, operator: Operator, **sources: Source) -> dict[str, AuditEvidence]:
    made = job(**sources)
    with (
        no_process_left(),
        pytest.MonkeyPatch.context() as patch,
        Judge(made, operator, limits=LIMITS, rule=RULE, scratch=folder / "s", compiled=folder / "c") as each,
    ):
        for module in (judge, stages):
            patch.setattr(module, "tripped", lambda source, backend: None)
        found = {}
        for first in range(0, len(made.candidates), judge.PREPARED_TOGETHER):
            together = made.candidates[first : first + judge.PREPARED_TOGETHER]
            each.prepare(together)
            found.update({candidate.request: each.audit(candidate) for candidate in together})
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AuditEvidence]:
    made = audits(tmp_path_factory.mktemp("audits"), toy_cuda.SUMS, **CANDIDATES)
    for name, evidence in made.items():
        print(f"{name}: {evidence.status} {evidence.reason} {dict(evidence.seconds)}")
        for each in evidence.measurements:
            print("   ", each.phase, each.candidate_ms, each.root_ms, each.calls)
    return made


@pytest.mark.parametrize("name", CANDIDATES)
def test_how_an_audit_ends(found: dict[str, AuditEvidence], name: str) -> None:
    assert found[name].status in ENDS[name], found[name].reason
    assert bool(found[name].measurements) == (ENDS[name] is ACCEPTED)


def test_what_an_honest_audit_holds(found: dict[str, AuditEvidence]) -> None:
    evidence = found["root"]
    held = {verdict.requirement for verdict in evidence.verdicts if verdict.held}
    assert held == {requirement.id for requirement in toy_cuda.SUMS.contract.requirements}
    assert evidence.environment.architecture.startswith("sm_") and evidence.environment.flops > 1e12
    assert all(kernel.startswith("sums_kernel(") for kernel in evidence.specialisations)
    assert {each.workload for each in evidence.launches} == {e.workload for e in evidence.measurements}
    assert {(each.kernel, each.count) for each in evidence.launches} == {("sums_kernel", 1.0)}
    for each in evidence.measurements:
        assert each.protocol == "cold" and len(each.candidate_ms) == 3
        ratios = [mine / root for mine, root in zip(each.candidate_ms, each.root_ms, strict=True)]
        assert all(0.9 < ratio < 1.1 for ratio in ratios), ratios


def test_schedules_share_bits_and_blocks_do_not(found: dict[str, AuditEvidence]) -> None:
    assert found["schedule"].bits_id == found["root"].bits_id != found["other bits"].bits_id


def test_lengths_baked_in_fail_the_relation_of_graphs(found: dict[str, AuditEvidence]) -> None:
    assert "/graph_replay/" in found["baked"].reason


def test_faster_than_the_device_is_implausible(tmp_path: Path) -> None:
    heavy = dataclasses.replace(toy_cuda.SUMS, cost=lambda workload: Cost(flops=1e18, bytes=1.0))
    evidence = audits(tmp_path, heavy, root=toy_cuda.root())["root"]
    assert evidence.status is Status.IMPLAUSIBLE and "this machine needs" in evidence.reason


def test_tripwires_come_first() -> None:
    assert stages.tripped(toy_cuda.root(), "cuda") is None
    ended = stages.tripped(toy_cuda.FALSE_CLOCK, "cuda")
    assert ended is not None and ended.status is Status.TRIPWIRE
