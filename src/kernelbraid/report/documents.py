"""What the records of a study say, as JSON-able documents."""

import difflib
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kernelbraid import ops
from kernelbraid.audit.beside import SideBySide
from kernelbraid.audit.environment import fingerprint
from kernelbraid.contract import Contract, KnobValue, Source
from kernelbraid.ir import attempts, query, survey
from kernelbraid.ir.evidence import AuditEvidence
from kernelbraid.ir.held_out import shown, shown_checks
from kernelbraid.ir.store import Store
from kernelbraid.search import measured
from kernelbraid.search.proposers import edits
from kernelbraid.search.study import Study


def side_by_side(study: Study, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure a study's root and best beside the shipped implementation and the peers, cold, in one run."""
    device = study.store.study.device
    named = {
        "root": study.store.source(study.root),
        "best": study.store.source(study.incumbent),
        "shipped": ops.source(study.operator),
    }
    first = {source.sha256: name for name, source in reversed(named.items())}
    distinct = {name: source for name, source in named.items() if first[source.sha256] == name}
    with tempfile.TemporaryDirectory(prefix="kernelbraid-compare-") as scratch:
        run = SideBySide(study.operator, distinct, fingerprint(device), Path(scratch))
        rows = []
        for row in run.rows(study.workloads, ("cold",), tell):
            ours = {name: row.ms[first[source.sha256]] for name, source in named.items()}
            peers = {name: ms for name, ms in row.ms.items() if name not in distinct}
            rows.append(
                {
                    "workload": row.workload.name,
                    "protocol": row.protocol,
                    **{f"{name}_ms": ms for name, ms in ours.items()},
                    "peers": peers,
                    "bound_ms": row.bound_ms,
                }
            )
    return rows


def implementations(store: Store) -> list[dict[str, Any]]:
    """One line an implementation, oldest first: where it stands, where it comes from, how fast it is."""
    with store.read():
        states = query.states(store)
        ratios = {objective.implementation: objective.ratio for objective in query.objectives(store)}
        changes = {change.child: change for change in survey.changes(store)}
        outcomes = attempts.endings(store)
        rows = []
        for sha256, label in survey.labels(store):
            change = changes.get(sha256)
            status, reason = outcomes.get(sha256, ("pending", ""))
            rows.append(
                {
                    "implementation": sha256,
                    "label": label,
                    "state": states.get(sha256) or str(status),
                    "ratio_to_root": ratios.get(sha256),
                    "parents": list(change.parents) if change else [],
                    "hypothesis": change.hypothesis if change else "",
                    "reason": reason if change else "",
                }
            )
    return rows


def held_out(study: Study) -> list[dict[str, Any]]:
    """Each workload that proposers do not see, with the latencies that promoted the best; for people."""
    standing = study.standings().get(study.incumbent)
    proof = None if standing is None or standing.full is None else study.whole(standing.full)
    found = {} if proof is None else {each.workload: each for each in measured.cold(proof)}
    rows = []
    for each in study.store.held_out:
        row: dict[str, Any] = {"workload": each.name, "phase": each.phase, "weight": each.weight}
        row |= {"limit": each.limit, "root_ms": None, "best_ms": None, "ratio": None}
        if (timed := found.get(each.name)) is not None:
            ratio = measured.workload_ratio(timed).ratio
            root_ms = math.fsum(timed.root_ms) / len(timed.root_ms)
            row |= {"root_ms": root_ms, "best_ms": root_ms * ratio, "ratio": ratio}
        rows.append(row)
    return rows


def implementation(
    store: Store, contract: Contract, sha256: str, *, held_out: bool = False
) -> dict[str, Any]:
    """Everything about one implementation: descent, evidence, decisions, source.

    What proposers may not see is left out, unless `held_out`: then those workloads are marked.
    """
    kept = frozenset() if held_out else frozenset(each.name for each in store.held_out)
    source = store.source(sha256)
    full = source.sha256
    lineage = [
        {
            "implementation": step.implementation.sha256,
            "hypothesis": step.modification.hypothesis if step.modification else "",
            "parents": list(step.modification.parents) if step.modification else [],
        }
        for step in query.lineage(store, full)
    ]
    return {
        "implementation": full,
        "label": source.label,
        "knobs": knobs(source, contract),
        "lineage": lineage,
        "held_out": [each.name for each in store.held_out] if held_out else [],
        "evidence": [shown(audit.evidence(), kept).to_json() for audit in query.audits(store, full)],
        "decisions": [
            {"decision": each.decision.value, "reason": each.reason, "by": each.decided_by}
            for each in query.lineage_decisions(store, full)
        ],
        "promotions": [
            {
                "granted": each.granted,
                "reason": each.reason,
                "blocked_by": each.blocked_by,
                "bits_changed": each.bits_changed,
                "checks": list(each.checks) if held_out else shown_checks(each.checks),
            }
            for each in query.promotions(store)
            if each.implementation == full
        ],
        "source": source.text,
    }


def difference(store: Store, contract: Contract, a: str, b: str) -> dict[str, Any]:
    """What differs between two implementations: knobs, text, bits id, latencies against the root."""
    left, right = store.source(a), store.source(b)
    found = [_timed_evidence(store, each.sha256) for each in (left, right)]
    before, after = knobs(left, contract), knobs(right, contract)
    return {
        "a": left.sha256,
        "b": right.sha256,
        "knobs": {
            name: [before.get(name), after.get(name)]
            for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name)
        },
        "bits_id": [each.bits_id if each else None for each in found],
        "status": [each.status.value if each else "pending" for each in found],
        "workloads": _latencies(*found),
        "patch": patch(left, right),
    }


def _timed_evidence(store: Store, sha256: str) -> AuditEvidence | None:
    """The latest evidence with latencies, or else the latest."""
    kept = frozenset(each.name for each in store.held_out)
    audits = [shown(audit.evidence(), kept) for audit in query.audits(store, sha256)]
    best = [each for each in audits if each.measurements] or audits
    return best[-1] if best else None


def knobs(source: Source, contract: Contract) -> dict[str, KnobValue]:
    """The values of the knobs that a source declares."""
    return edits.values(edits.declared(source, contract))


def patch(left: Source, right: Source) -> str:
    """A unified diff of two sources."""
    lines = difflib.unified_diff(
        left.text.splitlines(keepends=True), right.text.splitlines(keepends=True), left.short, right.short
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def _latencies(left: AuditEvidence | None, right: AuditEvidence | None) -> list[dict[str, Any]]:
    """Ratios to the root, workload by workload, of two audits; None where one has not timed it."""
    ratios: list[Mapping[str, float]] = []
    for each in (left, right):
        timed = measured.cold(each) if each else ()
        ratios.append({m.workload: measured.workload_ratio(m).ratio for m in timed})
    names = list(dict.fromkeys([*ratios[0], *ratios[1]]))
    return [{"workload": name, "ratio_to_root": [each.get(name) for each in ratios]} for name in names]
