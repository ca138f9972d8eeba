"""Audits without workers: evidence from a model of what knob settings do, fast and repeatable.

`FakeAudits` stands in for `jobs.run_job`. It reads the knobs of each source, never runs it, and answers as
the judge would: requirements first, then latencies of interleaved processes with their noise, stopped and
continued by the judge's own rule. Its clock moves by what audits take, so budgets are tested without waiting.
"""

import ast
import hashlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kernelbraid import ops
from kernelbraid.audit import jobs, timing
from kernelbraid.contract import BitPolicy, KnobValue, Source, Workload
from kernelbraid.ir.evidence import (
    AuditEvidence,
    Difference,
    Environment,
    Level,
    Measurement,
    Status,
    Verdict,
)
from kernelbraid.search.budget import Budget
from kernelbraid.search.proposers import external
from kernelbraid.search.study import Study

OPERATOR = ops.get("attention")
ENVIRONMENT = Environment("cpu", "Fake CPU", 2, 8.0, 1 << 25, (("python", "3"),), 1e11, 1e10)
AXES = (("page_size", 16), ("query_heads", 9), ("kv_heads", 3), ("head_dim", 64))
WORKLOADS = (
    Workload("prefill", (("batch", 1), ("length", 512), *AXES), weight=30),
    Workload("decode", (("batch", 16), ("length", 300), *AXES), weight=300),
    Workload("update", (("batch", 4), ("length", 400), *AXES), weight=20),
)
ROOT_MS = {"prefill": 4.0, "decode": 1.0, "update": 8.0}

ROOT = Source(
    '''"""A source that is never run."""

CHUNK = 1024
KEY_BLOCK = 64
EXP2_DEGREE = 6
QUERY_TILE = 16
SCORES = "key_by_key"
VALUES = "key_by_key"
DECODE_SPLIT = "request"
PARTITION = "count"

KNOBS = {
    "CHUNK": ("numeric", (256, 512, 1024, 2048)),
    "KEY_BLOCK": ("numeric", (16, 32, 64, 128)),
    "EXP2_DEGREE": ("numeric", (4, 5, 6, 7)),
    "QUERY_TILE": ("schedule", (1, 4, 16, 32, 64)),
    "SCORES": ("schedule", ("key_by_key", "vectorised", "vectorised_by_4")),
    "VALUES": ("schedule", ("key_by_key", "keys_by_4")),
    "DECODE_SPLIT": ("schedule", ("request", "chunk")),
    "PARTITION": ("schedule", ("count", "cost")),
}


def scores():
    return SCORES, CHUNK


def values():
    return VALUES, KEY_BLOCK, EXP2_DEGREE


def plan():
    return QUERY_TILE, DECODE_SPLIT, PARTITION


def attention():
    return scores(), values()


def paged_attention():
    return attention()


def write_kv_cache():
    return None


def attention_backward():
    return attention()


def numerics(constant_axes):
    return {"chunk": CHUNK, "key_block": KEY_BLOCK, "exp2_degree": EXP2_DEGREE}


def schedule(axes, knobs):
    return {}
''',
    label="root.py",
)

Settings = Mapping[str, KnobValue]

EFFECTS: dict[tuple[str, KnobValue], dict[str, float]] = {
    ("SCORES", "vectorised"): {"prefill": -0.5, "decode": -0.35, "update": -0.5},
    ("SCORES", "vectorised_by_4"): {"prefill": -0.62, "decode": -0.33, "update": -0.62},
    ("VALUES", "keys_by_4"): {"prefill": -0.15, "decode": -0.1, "update": -0.15},
    ("DECODE_SPLIT", "chunk"): {"decode": 0.02},
    ("PARTITION", "cost"): {"decode": -0.06, "update": -0.02},
    ("QUERY_TILE", 1): {"prefill": 0.6, "decode": -0.02, "update": 0.6},
    ("QUERY_TILE", 4): {"prefill": 0.2, "update": 0.2},
    ("QUERY_TILE", 32): {"prefill": -0.04, "update": -0.04},
    ("QUERY_TILE", 64): {"prefill": 0.05, "update": 0.03},
    ("CHUNK", 256): {"decode": 0.05, "prefill": 0.05, "update": 0.05},
    ("CHUNK", 512): {"decode": 0.02, "prefill": 0.01, "update": 0.01},
    ("KEY_BLOCK", 128): {"decode": -0.05, "prefill": -0.06, "update": -0.06},
    ("KEY_BLOCK", 32): {"decode": 0.06, "prefill": 0.08, "update": 0.08},
    ("KEY_BLOCK", 16): {"decode": 0.15, "prefill": 0.2, "update": 0.2},
    ("EXP2_DEGREE", 5): {"decode": -0.01, "prefill": -0.01, "update": -0.01},
    ("EXP2_DEGREE", 4): {"decode": -0.02, "prefill": -0.02, "update": -0.02},
    ("EXP2_DEGREE", 7): {"decode": 0.01, "prefill": 0.01, "update": 0.01},
}
"""(knob, value) -> change of log latency by phase."""


def log_latency(settings: Settings, phase: str) -> float:
    """Log latency over the root's: effects add up, and VALUES tells fully only once the scores are fast."""
    change = 0.0
    for item in settings.items():
        effect = EFFECTS.get(item, {}).get(phase, 0.0)
        change += 0.5 * effect if item[0] == "VALUES" and settings["SCORES"] == "key_by_key" else effect
    return change


def broken(settings: Settings) -> tuple[Status, str] | None:
    """The status and the requirement's name for settings that do not keep the contract."""
    if settings["EXP2_DEGREE"] == 4:
        return Status.INACCURATE, "accuracy_out"
    if settings["QUERY_TILE"] == 64 and settings["SCORES"] == "vectorised_by_4":
        return Status.BITS_UNEQUAL, "batch"
    return None


def settings_of(source: Source) -> dict[str, KnobValue]:
    found: dict[str, KnobValue] = {}
    for node in ast.parse(source.text).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id != "KNOBS"
        ):
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


@dataclass
class FakeAudits:
    """Stands in for `jobs.run_job`.

    `model` and `broken` say what settings do, `noise` is the spread of process means, and `before` is called
    where a test may want to interrupt.
    """

    model: Callable[[Settings, str], float] = log_latency
    broken: Callable[[Settings], tuple[Status, str] | None] = broken
    fails_full: Callable[[Settings], bool] = lambda settings: False
    noise: float = 0.01
    draw: tuple[str, ...] = ()
    """Picks another draw of the noise, which follows the sources' text."""
    rewritten: Mapping[str, float] = field(default_factory=dict)
    """SHA-256 of a source -> change of its log latencies, for what the settings do not tell."""
    overfits: Callable[[Settings, Workload], float] = lambda settings, workload: 0.0
    """Change of log latency on one workload."""
    seconds: Mapping[Level, float] = field(default_factory=lambda: {Level.SCREEN: 6.0, Level.FULL: 30.0})
    before: Callable[[str], None] = lambda where: None
    now: float = 0.0
    ran: list[jobs.AuditJob] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def __call__(
        self,
        job: jobs.AuditJob,
        results: Path,
        *,
        minutes: float | None = None,
        progress: Callable[[jobs.Event], None] | None = None,
    ) -> Path:
        self.ran.append(job)
        end = math.inf if minutes is None else self.now + 60 * minutes
        with jobs.ResultsWriter(job, results) as writer:
            for candidate in job.candidates:
                if progress is not None:
                    progress(jobs.Event("screen", candidate.source.short, "", 0.5, {}))
                self.before("audit")
                self.now += self.seconds[candidate.level]
                if self.now > end:
                    self.now = end
                    break
                writer.append(self.evidence(job, candidate))
                self.before("written")
        return results

    def evidence(self, job: jobs.AuditJob, candidate: jobs.Candidate) -> AuditEvidence:
        settings = settings_of(candidate.source)
        bits_id, root_bits = bits(settings), bits(settings_of(job.root))
        fault = self.broken(settings)
        if fault is None and candidate.level is Level.FULL and self.fails_full(settings):
            fault = Status.BITS_UNEQUAL, "paging"
        if fault is None and job.policy is BitPolicy.PINNED and bits_id != root_bits:
            fault = Status.WRONG_BITS_ID, "implementations_agree"
        status, measurements = Status.VERIFIED, ()
        verdicts = _verdicts(fault[1] if fault else None, agree=bits_id == root_bits)
        if fault is not None:
            status = fault[0]
        else:
            status, measurements = self._timed(job, candidate)
        return AuditEvidence(
            job=candidate.request,
            implementation=candidate.source.sha256,
            root=job.root.sha256,
            incumbent=job.incumbent.sha256,
            level=candidate.level,
            status=status,
            reason="" if status is Status.VERIFIED else f"the model says {status}",
            bits_id=bits_id,
            numerics=tuple(numerics(settings).items()),
            verdicts=verdicts,
            measurements=measurements,
            specialisations=("attend(float32)",),
            seconds=(("screen", 2.0), ("timing", self.seconds[candidate.level] - 2.0)),
            seed=_seed(candidate.source.sha256, candidate.level),
            environment=ENVIRONMENT,
            harness=job.harness,
            started=self.now,
        )

    def _timed(self, job: jobs.AuditJob, candidate: jobs.Candidate) -> tuple[Status, tuple[Measurement, ...]]:
        parts = (candidate.source.sha256, candidate.level, job.incumbent.sha256, *self.draw)
        rng = random.Random(_seed(*parts))
        sources = {"candidate": candidate.source, "root": job.root, "incumbent": job.incumbent}
        ms: dict[tuple[str, str], list[float]] = {}
        rule, step = timing.Sequential(), timing.Step.CONTINUE
        weights = [workload.weight for workload in job.workloads]
        while step is timing.Step.CONTINUE:
            for whose, source in sources.items():
                process = rng.gauss(0.0, self.noise)
                for workload in job.workloads:
                    log = self.model(settings_of(source), workload.phase) + process
                    log += self.overfits(settings_of(source), workload)
                    log += self.rewritten.get(source.sha256, 0.0)
                    ms.setdefault((whose, workload.name), []).append(ROOT_MS[workload.phase] * math.exp(log))
            sides = [[ms[whose, each.name] for each in job.workloads] for whose in ("candidate", "incumbent")]
            step = rule.after(*(timing.totals(weights, side) for side in sides))
        measurements = tuple(
            Measurement(
                workload=workload.name,
                phase=workload.phase,
                weight=workload.weight,
                limit=workload.limit,
                protocol="cold",
                candidate_ms=tuple(ms["candidate", workload.name]),
                root_ms=tuple(ms["root", workload.name]),
                incumbent_ms=tuple(ms["incumbent", workload.name]),
                calls=20,
                bound_ms=0.01,
            )
            for workload in job.workloads
        )
        return Status.STOPPED if step is timing.Step.HOPELESS else Status.VERIFIED, measurements


def numerics(settings: Settings) -> dict[str, int]:
    found = {name: settings[name.upper()] for name in ("chunk", "key_block", "exp2_degree")}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def bits(settings: Settings) -> str:
    constant = {"query_heads": 9, "kv_heads": 3, "head_dim": 64}
    return OPERATOR.contract.bits_id(numerics(settings), "float32", constant, "cpu")


def new_study(folder: Path, fake: FakeAudits, **given: object) -> Study:
    """A study of the model, its budget on the fake's clock."""
    arguments: dict[str, object] = {"root": ROOT, "workloads": WORKLOADS, **given}
    study = Study.create(folder, "attention", **arguments)  # type: ignore[arg-type]
    study.budget = Budget(study.store, fake.clock)
    return study


def reopened(folder: Path, fake: FakeAudits) -> Study:
    study = Study.open(folder)
    study.budget = Budget(study.store, fake.clock)
    return study


def submit_and_audit(given: tuple[Path, str, str]) -> str | None:
    """What one of several agents does, in a process of its own; returns the status of its audit."""
    folder, text, parent = given
    document = external.submit(
        folder,
        Source(text),
        parents=[parent],
        hypothesis="it may be faster",
        audit=True,
        run_job=FakeAudits(),
    )
    status = document["status"]
    return None if status is None else str(status)


def _verdicts(failed: str | None, *, agree: bool) -> tuple[Verdict, ...]:
    verdicts = []
    for requirement in OPERATOR.contract.requirements:
        if requirement.name == "implementations_agree" and not agree:
            continue
        held = requirement.name != failed
        difference = None if held else Difference("case/1", 7, "out 0 0 0", "0x1", "0x2", 1, 3)
        verdicts.append(Verdict(requirement.id, held, 4, 1000, 0.5, difference))
    return tuple(verdicts)


def _seed(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256(" ".join(parts).encode()).digest()[:8])
