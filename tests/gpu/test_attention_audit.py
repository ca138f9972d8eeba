"""The shipped attention under audit on a GPU, and what an audit must not let pass."""

from pathlib import Path

import pytest

from kernelbraid import ops
from kernelbraid.audit import orders
from kernelbraid.audit.checks import Memory, check
from kernelbraid.audit.drawings import Plan
from kernelbraid.audit.judge import Judge
from kernelbraid.audit.process import Worker
from kernelbraid.audit.stages import Hands, build
from kernelbraid.contract import BitPolicy, Source
from kernelbraid.ir.evidence import AuditEvidence, Level, Status

ATTENTION = ops.get("attention", "cuda")
SHIPPED = ops.source(ATTENTION)


def edited(old: str, new: str) -> Source:
    assert old in SHIPPED.text, old
    return Source(SHIPPED.text.replace(old, new), "edited")


FUSED = edited("enable_fp_fusion=False", "enable_fp_fusion=True")
"""Triton's default: multiplies and adds contract as the compiler likes."""
READS_LENGTHS = edited('    """Attend new tokens q', '    int(seqlens_k.sum())\n    """Attend new tokens q')
CANDIDATES = {"shipped": SHIPPED, "reads lengths": READS_LENGTHS}
_NAMES = [axis.name for axis in ATTENTION.contract.axes if axis.constant]
AXES = {name: int(ATTENTION.grids["study"][0].shape[name]) for name in _NAMES}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AuditEvidence]:
    folder: Path = tmp_path_factory.mktemp("audits")
    job = orders.AuditJob(
        id="job",
        study="study",
        operator="attention",
        contract=ATTENTION.contract.hash,
        harness=orders.harness_hash("attention"),
        device="cuda",
        level=Level.SMOKE,
        policy=BitPolicy.MUTUAL,
        dtype="bfloat16",
        constant_axes=(AXES,),
        workloads=ATTENTION.grids["study"],
        root=SHIPPED,
        incumbent=SHIPPED,
        candidates=tuple(orders.Candidate(name, source, Level.SMOKE) for name, source in CANDIDATES.items()),
    )
    with Judge(job, ATTENTION, scratch=folder / "s", compiled=folder / "c") as judge:
        made = {candidate.request: judge.audit(candidate) for candidate in job.candidates}
    for name, evidence in made.items():
        print(f"{name}: {evidence.status} {evidence.reason} {dict(evidence.seconds)}")
    return made


def test_the_shipped_kernels_hold(found: dict[str, AuditEvidence]) -> None:
    assert found["shipped"].status is Status.VERIFIED, found["shipped"].reason
    regimes = {verdict.requirement.rsplit("/", 1)[1] for verdict in found["shipped"].verdicts}
    assert regimes == set(ATTENTION.regimes)
    assert any("/graph_replay/" in verdict.requirement for verdict in found["shipped"].verdicts)


def test_calls_that_wait_for_the_device_cannot_be_captured(found: dict[str, AuditEvidence]) -> None:
    assert found["reads lengths"].status is Status.BUILD_FAILED, found["reads lengths"].reason
    assert "capture" in found["reads lengths"].reason


@pytest.mark.slow
def test_contraction_by_the_compiler_breaks_a_relation(tmp_path: Path) -> None:
    """A few elements in millions, so in the whole domain's cases."""
    workers: dict[str, Worker] = {}

    def started(source: Source) -> Worker:
        if source.sha256 not in workers:
            folders = {"scratch": tmp_path / "s", "cache": tmp_path / "c"}
            workers[source.sha256] = Worker(source, ATTENTION.entry_points, **folders, device="cuda")
            workers[source.sha256].build()
        return workers[source.sha256]

    try:
        built = build(started(FUSED), ATTENTION, (AXES,), "bfloat16", "sm_90")
        hands = Hands({"main": lambda: started(FUSED), "root": lambda: started(SHIPPED)})
        report = built.reports[0]
        plan = Plan(Level.FULL, (AXES,), report.numerics, report.edges, "bfloat16", 1, True)
        memory = Memory(ATTENTION, hands)
        wanted = ("decode_equals_prefill", "update_equals_rollout", "batch", "implementations_agree")
        relations = [r for r in ATTENTION.contract.requirements if r.name in wanted]
        assert not all(check(ATTENTION, each, plan, hands, memory=memory).held for each in relations)
    finally:
        for worker in workers.values():
            worker.kill()
