"""A large study of attention, written quickly: rows as the store would write them, in one transaction."""

import itertools
import random
from pathlib import Path

from sqlalchemy import insert
from tests.search.fake_audit import ROOT, FakeAudits, new_study

from kernelbraid.audit import jobs
from kernelbraid.ir.evidence import Level
from kernelbraid.ir.schema import (
    Audit,
    AuditMeasurement,
    AuditRequest,
    AuditVerdict,
    Implementation,
    Modification,
    ModificationParent,
)
from kernelbraid.ir.store import source_path
from kernelbraid.search import audits
from kernelbraid.search.proposers import edits
from kernelbraid.search.study import Study


def fill(folder: Path, count: int) -> Study:
    """A study of `count` implementations beside its root, every one audited with all requirements."""
    fake = FakeAudits()
    study = new_study(folder, fake)
    study.store.request_audit(study.root, Level.SCREEN)
    audits.run(study, study.store.pending(), run_job=fake)
    knobs = edits.declared(ROOT, study.contract)
    drawn = list(itertools.product(*(knob.choices for knob in knobs)))
    random.Random(1).shuffle(drawn)
    sources = []
    for values in drawn:
        settings = {knob.name: value for knob, value in zip(knobs, values, strict=True)}
        made = edits.apply(ROOT, settings, study.contract)
        if made.sha256 != ROOT.sha256:
            sources.append(made)
        if len(sources) == count:
            break
    job = audits.job_of(study, [AuditRequest(id="0" * 16, implementation=study.root, level=Level.SCREEN,
                                             root=study.root, incumbent=study.root)])  # fmt: skip
    found = []
    for number, made in enumerate(sources):
        source_path(study.folder, made.sha256).write_text(made.text)
        found.append(fake.evidence(job, jobs.Candidate(f"{number:016x}", made, Level.SCREEN)))
    with study.store.transaction() as session:
        session.execute(
            insert(Implementation.__table__),
            [{"sha256": s.sha256, "tree": s.sha256, "label": s.label, "created": 0.0} for s in sources],
        )
        session.execute(
            insert(AuditRequest.__table__),
            [{"id": e.job, "implementation": e.implementation, "level": e.level, "root": e.root,
              "incumbent": e.incumbent, "created": 0.0} for e in found],
        )  # fmt: skip
        empty = dict.fromkeys(("functions", "regimes", "requirements_at_risk"), ())
        stated = {**empty, "hypothesis": "h", "expected_effect": "", "falsified_by": "", "proposer": "knobs"}
        stated["created"] = 0.0
        session.execute(
            insert(Modification.__table__),
            [{"id": n + 1, "child": s.sha256, **stated} for n, s in enumerate(sources)],
        )
        session.execute(
            insert(ModificationParent.__table__),
            [{"modification": n + 1, "position": 0, "parent": ROOT.sha256} for n in range(len(sources))],
        )
        names = ("implementation", "root", "incumbent", "level", "status", "reason", "bits_id", "numerics",
                 "specialisations", "seconds", "seed", "environment", "harness", "started")  # fmt: skip
        session.execute(
            insert(Audit.__table__),
            [{**{name: getattr(e, name) for name in names}, "seq": n + 2, "request": e.job,
              "comparable": "c" * 16, "log": None, "recorded": 0.0} for n, e in enumerate(found)],
        )  # fmt: skip
        fields = ("requirement", "held", "cases", "comparisons", "error", "difference")
        session.execute(
            insert(AuditVerdict.__table__),
            [{"audit": n + 2, "position": i, **{name: getattr(v, name) for name in fields}}
             for n, e in enumerate(found) for i, v in enumerate(e.verdicts)],
        )  # fmt: skip
        fields = ("workload", "phase", "weight", "limit", "protocol", "candidate_ms", "root_ms",
                  "incumbent_ms", "calls", "bound_ms")  # fmt: skip
        session.execute(
            insert(AuditMeasurement.__table__),
            [{"audit": n + 2, "position": i, **{name: getattr(m, name) for name in fields}}
             for n, e in enumerate(found) for i, m in enumerate(e.measurements)],
        )  # fmt: skip
    return study
