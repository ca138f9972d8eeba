"""Evidence of many audits at once, as the store's records would give it and in a fraction of the time.

Columns are read as plain text, and what repeats from audit to audit (environments, verdicts, texts in JSON)
is parsed once.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import String, select, type_coerce
from sqlalchemy.orm import Session

from kernelbraid.ir.columns import DIFFERENCE, ENVIRONMENT, PAIRS, TEXTS, Json
from kernelbraid.ir.evidence import AuditEvidence, Launch, Measurement, Verdict
from kernelbraid.ir.schema import Audit, AuditLaunch, AuditMeasurement, AuditVerdict

_verdict = AuditVerdict.__table__.c
_measured = AuditMeasurement.__table__.c
_launched = AuditLaunch.__table__.c


class _Parser:
    """Parses a column's text, each distinct one once."""

    def __init__(self, kind: Json) -> None:
        self._decode: Callable[[Any], Any] = kind.decode
        self._known: dict[str, Any] = {}

    def __call__(self, text: str) -> Any:
        if text not in self._known:
            self._known[text] = self._decode(json.loads(text))
        return self._known[text]


def evidence_after(session: Session, seq: int) -> list[tuple[int, AuditEvidence]]:
    """Return the evidence of all audits after one, without their output, oldest first, each with its `seq`.

    Args:
        session: of the study.
        seq: 0 for all of them.
    """
    texts = [type_coerce(each, String) for each in (Audit.numerics, Audit.specialisations, Audit.seconds)]
    plain = (Audit.seq, Audit.request, Audit.implementation, Audit.root, Audit.incumbent, Audit.level)
    more = (Audit.status, Audit.reason, Audit.bits_id, Audit.seed, Audit.harness, Audit.started)
    wanted = select(*plain, *more, type_coerce(Audit.environment, String), *texts)
    rows = session.execute(wanted.where(Audit.seq > seq).order_by(Audit.seq)).all()
    if not rows:
        return []
    verdicts, measurements = _verdicts(session, seq), _measurements(session, seq)
    launches = _launches(session, seq)
    pairs, names, environments = _Parser(PAIRS), _Parser(TEXTS), _Parser(ENVIRONMENT)
    found = []
    for row in rows:
        number, request, implementation, root, incumbent, level, status, reason, bits_id, *rest = row
        seed, harness, started, environment, numerics, specialisations, seconds = rest
        evidence = AuditEvidence(
            job=request,
            implementation=implementation,
            root=root,
            incumbent=incumbent,
            level=level,
            status=status,
            reason=reason,
            bits_id=bits_id,
            numerics=pairs(numerics),
            verdicts=tuple(verdicts.get(number, ())),
            measurements=tuple(measurements.get(number, ())),
            specialisations=names(specialisations),
            launches=tuple(launches.get(number, ())),
            seconds=pairs(seconds),
            seed=seed,
            environment=environments(environment),
            harness=harness,
            started=started,
        )
        found.append((number, evidence))
    return found


def _verdicts(session: Session, seq: int) -> dict[int, list[Verdict]]:
    columns = (_verdict.audit, _verdict.requirement, _verdict.held, _verdict.cases, _verdict.comparisons)
    texts = [type_coerce(each, String) for each in (_verdict.error, _verdict.difference)]
    wanted = select(*columns, *texts).where(_verdict.audit > seq)
    known: dict[tuple[Any, ...], Verdict] = {}
    parse = _Parser(DIFFERENCE)
    found: dict[int, list[Verdict]] = {}
    for audit, *stated in session.execute(wanted.order_by(_verdict.audit, _verdict.position)):
        key = tuple(stated)
        verdict = known.get(key)
        if verdict is None:
            requirement, held, cases, comparisons, error, difference = stated
            verdict = known[key] = Verdict(
                requirement,
                held,
                cases,
                comparisons,
                None if error is None else float(error),
                None if difference is None else parse(difference),
            )
        found.setdefault(audit, []).append(verdict)
    return found


def _measurements(session: Session, seq: int) -> dict[int, list[Measurement]]:
    columns = (_measured.audit, _measured.workload, _measured.phase, _measured.weight, _measured.limit)
    more = (_measured.protocol, _measured.calls, _measured.bound_ms)
    sides = [type_coerce(_measured[f"{side}_ms"], String) for side in ("candidate", "root", "incumbent")]
    wanted = select(*columns, *more, *sides).where(_measured.audit > seq)
    rows = session.execute(wanted.order_by(_measured.audit, _measured.position)).all()
    lists = [_floats([row[8 + side] for row in rows]) for side in range(len(sides))]
    found: dict[int, list[Measurement]] = {}
    for row, candidate, root, incumbent in zip(rows, *lists, strict=True):
        audit, workload, phase, weight, limit, protocol, calls, bound = row[:8]
        measurement = Measurement(
            workload, phase, weight, limit, protocol, candidate, root, incumbent, calls, bound
        )
        found.setdefault(audit, []).append(measurement)
    return found


def _launches(session: Session, seq: int) -> dict[int, list[Launch]]:
    columns = (_launched[name] for name in ("workload", "kernel", "count", "blocks", "threads", "resident"))
    wanted = select(_launched.audit, *columns).where(_launched.audit > seq)
    found: dict[int, list[Launch]] = {}
    for audit, *stated in session.execute(wanted.order_by(_launched.audit, _launched.position)):
        found.setdefault(audit, []).append(Launch(*stated))
    return found


def _floats(texts: Sequence[str]) -> list[tuple[float, ...]]:
    """Lists of floats, one text for the parser: a call for each of thousands of short ones takes longer."""
    return [tuple(map(float, each)) for each in json.loads(f"[{','.join(texts)}]")]
