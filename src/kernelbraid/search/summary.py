"""What a study amounts to: the numbers of its closing table, and the facts that scripts read."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kernelbraid.contract import Workload
from kernelbraid.ir import proposing, query
from kernelbraid.ir.evidence import AuditEvidence, Measurement
from kernelbraid.search.budget import CLOSING
from kernelbraid.search.measured import aggregate, cold, provable
from kernelbraid.search.standings import Standing

if TYPE_CHECKING:
    from kernelbraid.search.study import Study


def summary(study: "Study") -> dict[str, Any]:
    """Return what the study found so far, JSON-able.

    `best` is the incumbent: what a full audit proved to be faster, or the root. Its latencies stand beside
    the root's from the same audit; `fastest` is the lowest measured ratio, proven or not.
    """
    with study.store.read():
        totals = query.totals(study.store)
        standings = study.standings()
        root, best = study.root, study.incumbent
        standing = standings.get(best)
        proof = None if standing is None else standing.full or standing.evidence
        return {
            "study": str(study.folder),
            "operator": study.operator.name,
            "device": study.store.study.device,
            "policy": study.policy.value,
            "root": root,
            "best": best,
            "speedup": 1.0 if best == root or proof is None else 1.0 / aggregate(proof, "root").ratio,
            "audited": totals.audited,
            "verified": totals.verified,
            "rejected": totals.rejected,
            "comparisons": totals.comparisons,
            "unequal": totals.unequal,
            "seconds": study.budget.seconds,
            "closing_seconds": study.budget.spent(CLOSING),
            "queue_seconds": totals.queue_seconds,
            "pending": totals.pending,
            "promotions": totals.promotions,
            "refusals": totals.refusals,
            "fastest": _fastest(list(standings.values())),
            "bits": _bits(study, root, best),
            "objective": _objective(proof, own=best == root),
            "workloads": [_workload_row(each, proof) for each in study.workloads],
            "held_out": len(study.held_out),
            "regimes": _regimes(study.workloads, proof),
            "smallest_gain": _smallest_gain(list(standings.values())),
            "stage_seconds": query.stage_seconds(study.store),
            "budget": _budget(study),
            "model": _model(study),
            "stored": _places(study),
        }


def _fastest(standings: Sequence[Standing]) -> dict[str, Any] | None:
    timed = [each for each in standings if each.log_objective is not None and each.within_limits]
    if not timed:
        return None
    least = min(timed, key=lambda each: each.log_objective or 0.0)
    return {"implementation": least.sha256, "ratio": math.exp(least.log_objective or 0.0)}


def _bits(study: "Study", root: str, best: str) -> dict[str, Any]:
    found = study.standings()
    ids = [found[sha].evidence.bits_id if sha in found else None for sha in (root, best)]
    return {"root": ids[0], "best": ids[1], "changed": ids[0] != ids[1]}


def _objective(proof: AuditEvidence | None, *, own: bool) -> dict[str, Any] | None:
    """Milliseconds a step, and their ratio with its bound, from the audit of the best."""
    if proof is None or not proof.measurements:
        return None
    rows = cold(proof)
    ratio = aggregate(proof, "root")
    root_ms = math.fsum(each.weight * _mean(each.root_ms) for each in rows)
    if own:
        return {"root_ms": root_ms, "best_ms": root_ms, "ratio": 1.0, "upper": 1.0}
    return {"root_ms": root_ms, "best_ms": root_ms * ratio.ratio, "ratio": ratio.ratio, "upper": ratio.upper}


def _workload_row(workload: Workload, proof: AuditEvidence | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "workload": workload.name,
        "phase": workload.phase,
        "weight": workload.weight,
        "limit": workload.limit,
        "root_ms": None,
        "best_ms": None,
        "ratio": None,
    }
    measured = _measurement(proof, workload.name)
    if measured is not None:
        root_ms, best_ms = _mean(measured.root_ms), _mean(measured.candidate_ms)
        row |= {"root_ms": root_ms, "best_ms": best_ms, "ratio": best_ms / root_ms}
    return row


def _regimes(workloads: Sequence[Workload], proof: AuditEvidence | None) -> list[dict[str, Any]]:
    """Each regime's weighted milliseconds a step."""
    rows = []
    for phase in dict.fromkeys(each.phase for each in workloads):
        found = [_measurement(proof, each.name) for each in workloads if each.phase == phase]
        measured = [each for each in found if each is not None]
        row: dict[str, Any] = {"regime": phase, "root_ms": None, "best_ms": None, "ratio": None}
        if measured:
            root_ms = math.fsum(each.weight * _mean(each.root_ms) for each in measured)
            best_ms = math.fsum(each.weight * _mean(each.candidate_ms) for each in measured)
            row |= {"root_ms": root_ms, "best_ms": best_ms, "ratio": best_ms / root_ms}
        rows.append(row)
    return rows


def _smallest_gain(standings: Sequence[Standing]) -> float | None:
    """The smallest gain that the latest fully timed audit could have proven."""
    found = [gain for each in standings if each.timed and (gain := provable(each.evidence)) is not None]
    return found[-1] if found else None


def _budget(study: "Study") -> dict[str, Any]:
    record = study.store.study
    return {"minutes": record.minutes, "audits": record.audits, "patience": record.patience}


def _places(study: "Study") -> dict[str, str]:
    folder = study.folder
    return {name: str(folder / place) for name, place in (("records", "study.db"), ("sources", "sources"))}


def _measurement(evidence: AuditEvidence | None, workload: str) -> Measurement | None:
    if evidence is None:
        return None
    return next((each for each in cold(evidence) if each.workload == workload), None)


def _mean(ms: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(each) for each in ms) / len(ms))


def _model(study: "Study") -> dict[str, Any] | None:
    """What the language model cost and did; None where none proposes."""
    found = proposing.settings(study.store)
    if found is None:
        return None
    spent = proposing.spent(study.store)
    outcomes = Counter(each.outcome for each in proposing.attempts(study.store))
    limits = ("model", "api", "base_url", "evidence", "max_tokens", "max_money")
    return {
        **{name: found.values.get(name) for name in limits},
        "attempts": dict(outcomes),
        "calls": spent.calls,
        "tokens_in": spent.tokens_in,
        "tokens_out": spent.tokens_out,
        "money": spent.money_reported,
        "calls_without_usage": spent.unreported,
        "charged_tokens": spent.tokens,
        "charged_money": spent.money,
    }
