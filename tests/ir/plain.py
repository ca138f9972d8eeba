"""Studies, sources and evidence with made-up numbers, for tests of the store."""

from dataclasses import replace
from pathlib import Path

from kernelbraid.contract import BitPolicy, Requirement, Source, Workload
from kernelbraid.ir import proposing
from kernelbraid.ir.evidence import (
    AuditEvidence,
    Difference,
    Environment,
    Launch,
    Level,
    Measurement,
    Status,
    Verdict,
)
from kernelbraid.ir.schema import Study, Usage
from kernelbraid.ir.store import Store

WORKLOADS = (
    Workload("decode", (("batch", 16), ("length", (100, 600, 300))), weight=512.0, limit=1.1),
    Workload("prefill", (("batch", 4), ("length", 200)), weight=1.0),
)
REQUIREMENTS = (
    Requirement("toy/1/batch/decode", "relation", "batch", "decode"),
    Requirement("toy/1/paging/prefill", "relation", "paging", "prefill"),
    Requirement("toy/1/implementations_agree/decode", "relation", "implementations_agree", "decode"),
    Requirement("toy/1/accuracy_out/decode", "accuracy", "accuracy_out", "decode"),
)
MACHINE = Environment(
    architecture="cpu",
    device="a CPU",
    cores=2,
    memory_gib=8.0,
    cache_bytes=1 << 25,
    versions=(("python", "3.11.7"), ("numba", "0.68.0")),
    flops=1.5e11,
    bandwidth=2.0e10,
)
HARNESS = "harness-1"
ROOT = Source("BLOCK = 32\n", label="root")


def source(number: int) -> Source:
    return Source(f"BLOCK = {64 + number}\n", label=f"candidate {number}")


def new_study(**changes: object) -> Study:
    fields: dict[str, object] = {
        "name": "toy study",
        "operator": "toy",
        "contract": "toy/1",
        "contract_hash": "c" * 64,
        "device": "cpu",
        "dtype": "float32",
        "constant_axes": ({"query_heads": 9, "kv_heads": 3, "head_dim": 64},),
        "workloads": WORKLOADS,
        "policy": BitPolicy.MUTUAL,
        "proposer": "knobs",
        "seed": 7 << 100,
        "harness": HARNESS,
        "package": "0.1.0",
        "patience": 40,
        "minutes": 3.0,
    }
    return Study(**{**fields, **changes})  # type: ignore[arg-type]


def new_store(folder: Path, **changes: object) -> Store:
    return Store.create(folder, new_study(**changes), ROOT, REQUIREMENTS)


def timings(ratio: float, processes: int = 3) -> tuple[Measurement, ...]:
    return tuple(
        Measurement(
            workload=workload.name,
            phase=workload.phase,
            weight=workload.weight,
            limit=workload.limit,
            protocol="cold",
            candidate_ms=tuple(0.1 * ratio * (1 + i / 7) for i in range(processes)),
            root_ms=tuple(0.1 * (1 + i / 7) for i in range(processes)),
            incumbent_ms=tuple(0.1 * (1 + i / 7) for i in range(processes)),
            calls=120,
            bound_ms=0.01,
        )
        for workload in WORKLOADS
    )


def answer(
    store: Store, request: str, status: Status = Status.VERIFIED, *, ratio: float = 0.9, **changes: object
) -> AuditEvidence:
    """Evidence that the store accepts for a pending request, unless `changes` spoil it."""
    asked = next(pending for pending in store.pending() if pending.id == request)
    accepted = status in (Status.VERIFIED, Status.STOPPED)
    evidence = AuditEvidence(
        job=asked.id,
        implementation=asked.implementation,
        root=asked.root,
        incumbent=asked.incumbent,
        level=asked.level,
        status=status,
        reason="" if status is Status.VERIFIED else f"it ended {status}",
        bits_id="0123456789abcdef",
        numerics=(("chunk", 1024), ("key_block", 64)),
        verdicts=held() if accepted else failed("toy/1/batch/decode"),
        measurements=timings(ratio) if accepted else (),
        specialisations=("f(float32)", "g(int32)"),
        seconds=(("build", 2.5), ("screen", 1.25)),
        seed=1 << 127,
        environment=MACHINE,
        harness=HARNESS,
        output="compiled\n",
        started=1.75e9,
        launches=(Launch("decode", "attend", 1.5, 264, 128, 132),) if accepted else (),
    )
    return replace(evidence, **changes)  # type: ignore[arg-type]


def held() -> tuple[Verdict, ...]:
    return tuple(
        Verdict(r.id, True, cases=3, comparisons=1000, error=0.4 if r.kind == "accuracy" else None)
        for r in REQUIREMENTS
    )


def failed(requirement: str) -> tuple[Verdict, ...]:
    place, left, right = "out, request 0, row 1", "1.0 (3f800000)", "nan (7fc00000)"
    first = Difference("toy/decode/7", 7, place, left, right, ulp=None, unequal=12)
    return (Verdict(requirement, False, cases=1, comparisons=50, difference=first),)


def audited(
    store: Store,
    sha256: str,
    status: Status = Status.VERIFIED,
    level: Level = Level.SCREEN,
    *,
    ratio: float = 0.9,
) -> str:
    """Request an audit and record its answer."""
    request = store.request_audit(sha256, level)
    assert store.record(answer(store, request, status, ratio=ratio))
    return request


def child(store: Store, number: int, parents: tuple[str, ...] = (ROOT.sha256,), **changes: object) -> str:
    """Add an implementation with made-up reasons."""
    stated: dict[str, object] = {"hypothesis": "larger blocks", "proposer": "knobs"}
    return store.add_implementation(source(number), parents=parents, **{**stated, **changes}).sha256  # type: ignore[arg-type]


def promoted(store: Store, sha256: str) -> None:
    """Audit at both levels and promote."""
    screen = audited(store, sha256)
    full = audited(store, sha256, level=Level.FULL)
    store.promote(screen_audit=screen, full_audit=full, granted=True, reason="faster")


def modelled(store: Store) -> None:
    """One record of each kind that a language model or an interrupted audit leaves."""
    proposing.record_settings(store, {"model": "m"}, {"rules": "be exact"})
    call = proposing.begin_call(store, 1000, 0.5)
    usage = Usage(purpose=proposing.PURPOSE, tokens_in=100)
    proposing.end_call(store, call, outcome="stop", model="m", seconds=1.0, usage=usage)
    proposing.record_attempt(store, "llm", "failed", "it was cut off")
    request = store.request_audit(ROOT.sha256, Level.SCREEN)
    proposing.record_interruptions(store, [request], "connection lost")
