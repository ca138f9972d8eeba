"""A study driven from outside: by a coding agent, a script or a person, several at once if need be.

Each verb opens the study folder, does one thing and returns a JSON-able dictionary; nothing is kept between
calls.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kernelbraid.audit import jobs
from kernelbraid.contract import Source
from kernelbraid.ir import attempts, query
from kernelbraid.ir.bulk import kept_objects
from kernelbraid.ir.evidence import AuditEvidence
from kernelbraid.ir.held_out import shown, shown_checks
from kernelbraid.ir.schema import Lineage, Opportunity, PromotionDecision, Usage
from kernelbraid.ir.store import StudyBusyError
from kernelbraid.search import audits, loop, merging
from kernelbraid.search import opportunities as analysers
from kernelbraid.search.measured import aggregate, cold, processes, provable, workload_ratio
from kernelbraid.search.proposers import Proposal, edits
from kernelbraid.search.proposers.knobs import KnobProposer
from kernelbraid.search.standings import Standing
from kernelbraid.search.study import DECLARATIONS, Study, read_source

WAIT_SECONDS = 0.5
"""How often a submission that wants its audit now looks whether the machine is free."""


def next_(folder: Path, most: int = 10) -> dict[str, Any]:
    """Return what one needs to write the next candidate: task, parents, opportunities, failures, budget.

    Args:
        folder: of the study.
        most: opportunities, parents and failures listed, the most promising or latest first.
    """
    with Study.open(folder) as study, kept_objects():
        return outlook(study, most)


def outlook(study: Study, most: int = 10) -> dict[str, Any]:
    """Return what `next_` does, of an open study."""
    study.require_current()
    proposer = KnobProposer(study.store.study.seed)
    analysers.observe(study)
    proposer.observe(study)
    with study.store.read():
        frontier = {each.sha256 for each in query.frontier(study.store)}
        standings = [each for each in study.standings().values() if each.sha256 in frontier]
        standings.sort(key=lambda each: each.log_objective or 0.0)
        expected = proposer.expectations(study)
        points = frontier | {study.root, study.incumbent}
        opportunities = _listed(query.open_opportunities(study.store), expected, points, most)
        return {
            "study": str(study.folder),
            "task": task(study),
            "root": study.root,
            "incumbent": study.incumbent,
            "parents": [_standing(each) for each in standings[:most]],
            "opportunities": [_opportunity(each, expected.get(each.id)) for each in opportunities],
            "failures": [_failure(each) for each in attempts.rejected(study.store, most)],
            "pending": [each.implementation for each in study.store.pending()],
            "budget": _budget(study),
        }


def _listed(
    opportunities: Sequence[Opportunity], expected: Mapping[int, float], points: Set[str], most: int
) -> list[Opportunity]:
    """The edits that promise most, then the latest findings of analysers on open branch points: half of each,
    if there are so many."""
    written = [each for each in opportunities if each.edit is None and points & set(each.parents)]
    programmed = [each for each in opportunities if each.edit is not None]
    programmed.sort(key=lambda each: expected.get(each.id, 0.0))
    half = max(most // 2, most - len(programmed))
    findings = written[-half:] if half else []
    return programmed[: most - len(findings)] + findings


def source(folder: Path, sha256: str) -> dict[str, Any]:
    """Return an implementation's text, knobs and descent; `sha256` may be the first digits."""
    with Study.open(folder) as study:
        return source_of(study, sha256)


def source_of(study: Study, sha256: str) -> dict[str, Any]:
    """Return what `source` does, of an open study."""
    found = study.store.source(sha256)
    knobs = edits.declared(found, study.contract)
    steps = query.lineage(study.store, found.sha256)
    return {
        "implementation": found.sha256,
        "label": found.label,
        "text": found.text,
        "knobs": [
            {"name": k.name, "kind": k.kind.value, "value": k.value, "choices": list(k.choices)}
            for k in knobs
        ],
        "lineage": [
            {
                "implementation": step.implementation.sha256,
                "parents": list(step.modification.parents) if step.modification else [],
                "hypothesis": step.modification.hypothesis if step.modification else "",
            }
            for step in steps
        ],
    }


def merge(folder: Path, ours: str, theirs: str) -> dict[str, Any]:
    """Return two implementations composed over their nearest common ancestor, or what conflicts.

    The text is a proposal like any other: submit it with both as parents.

    Raises:
        ValueError: one of them is not verified, or one descends from the other.
    """
    with Study.open(folder) as study:
        return merge_of(study, ours, theirs)


def merge_of(study: Study, ours: str, theirs: str) -> dict[str, Any]:
    """Return what `merge` does, of an open study."""
    with study.store.read():
        found = merging.merge(study, ours, theirs)
        return {
            "base": found.base,
            "parents": list(found.parents),
            "text": None if found.source is None else found.source.text,
            "conflicts": [asdict(each) for each in found.conflicts],
        }


def evidence(folder: Path, sha256: str) -> dict[str, Any]:
    """Return everything that audits found about an implementation, and what was decided on it."""
    with Study.open(folder) as study:
        return evidence_of(study, sha256)


def evidence_of(study: Study, sha256: str) -> dict[str, Any]:
    """Return what `evidence` does, of an open study."""
    with study.store.read():
        implementation = study.store.implementation(sha256)
        found = query.audits(study.store, implementation.sha256)
        decisions = [
            each for each in query.promotions(study.store) if each.implementation == implementation.sha256
        ]
        lineages = query.lineage_decisions(study.store, implementation.sha256)
        return {
            "implementation": implementation.sha256,
            "verified": query.is_verified(study.store, implementation.sha256),
            "audits": [
                _audit(shown(each.evidence(study.store.log(each.request)), study.held_out)) for each in found
            ],
            "promotions": [_promotion(each) for each in decisions],
            "lineage": [
                {"decision": each.decision.value, "reason": each.reason, "by": each.decided_by}
                for each in lineages
            ],
        }


def submit(
    folder: Path,
    file: Path | Source,
    *,
    parents: Sequence[str],
    hypothesis: str,
    functions: Sequence[str] = (),
    regimes: Sequence[str] = (),
    expected_effect: str = "",
    requirements_at_risk: Sequence[str] = (),
    falsified_by: str = "",
    opportunity: int | None = None,
    by: str = "external",
    audit: bool = False,
    progress: Callable[[loop.Progress], None] = lambda _: None,
    run_job: audits.RunJob = jobs.run_job,
) -> dict[str, Any]:
    """Record a candidate and request its audit; with `audit`, run it now and decide on promotion.

    Args:
        folder: of the study.
        file: the complete source, or its path.
        parents: verified implementations it was made from, by hash or first digits.
        hypothesis: why it should be better.
        functions: functions that change together.
        regimes: regimes whose calls they serve.
        expected_effect: what the audit should show.
        requirements_at_risk: ids of requirements that the change could break.
        falsified_by: what would show the hypothesis wrong.
        opportunity: id of the open opportunity that it takes.
        by: who submits.
        audit: run the audit here and now, after those of others that search this study.
        progress: told of the audit's stages.
        run_job: runs the audit.

    Raises:
        ValueError: the file is no implementation of the operator or a duplicate, or a parent is not verified.
        RuntimeError: the study cannot be written.
    """
    text = file if isinstance(file, Source) else read_source(file)
    with Study.open(folder) as study:
        study.require_current()
        if audit and study.root not in study.standings():
            _search(study, None, progress, run_job)
        proposal = Proposal(
            source=text,
            parents=tuple(study.store.implementation(sha).sha256 for sha in parents),
            hypothesis=hypothesis,
            functions=tuple(functions),
            regimes=tuple(regimes),
            expected_effect=expected_effect,
            requirements_at_risk=tuple(requirements_at_risk),
            falsified_by=falsified_by,
            proposer=by,
            opportunity=opportunity,
        )
        request = study.admit(proposal)
        if audit:
            _search(study, request, progress, run_job)
        standing = study.standings().get(text.sha256)
        return {
            "implementation": text.sha256,
            "request": request,
            "status": None if standing is None else standing.status.value,
            "reason": "" if standing is None else standing.evidence.reason,
            "incumbent": study.incumbent,
        }


def decide(folder: Path, sha256: str, decision: str, *, reason: str, by: str = "external") -> dict[str, Any]:
    """Record a lineage decision: `continue`, `merge`, `archive` or `abandon`."""
    known = {each.value: each for each in Lineage}
    if decision not in known:
        raise ValueError(f"decision must be one of {', '.join(known)}, got {decision!r}")
    if not reason.strip():
        raise ValueError("reason must say why")
    with Study.open(folder) as study:
        row = study.store.decide(sha256, known[decision], reason=reason, decided_by=by)
        return {"implementation": row.implementation, "decision": row.decision.value, "reason": row.reason}


class External:
    """Stands for whoever submits from outside: a search audits what is pending and asks for no more."""

    name = "external"

    def observe(self, study: Study) -> None:
        """Write no opportunities: `next_` does, when it is asked."""

    def propose(self, study: Study, wanted: int) -> tuple[Proposal, ...]:
        return ()


def _search(
    study: Study,
    request: str | None,
    progress: Callable[[loop.Progress], None],
    run_job: audits.RunJob,
) -> None:
    """Audit what is pending and decide on promotion, unless another process that searches the study does."""
    while request is None or any(each.id == request for each in study.store.pending()):
        try:
            loop.run(study, External(), progress=progress, run_job=run_job)
            return
        except StudyBusyError:
            time.sleep(WAIT_SECONDS)
            study.store.record_usage(Usage(purpose="queue", queue_seconds=WAIT_SECONDS))


def task(study: Study) -> dict[str, Any]:
    """Return what a study is about: what to export, the domain, what is measured."""
    record, contract = study.store.study, study.contract
    return {
        "operator": study.operator.name,
        "contract": contract.name,
        "device": record.device,
        "dtype": record.dtype,
        "policy": study.policy.value,
        "exports": [*study.operator.entry_points, *DECLARATIONS],
        "constant_axes": list(record.constant_axes),
        "numeric_knobs": {knob.name.upper(): list(knob.choices) for knob in contract.knobs},
        "requirements": [each.id for each in contract.requirements],
        "objective": "the sum over workloads of weight times latency, as a ratio to the root's",
        "workloads": [
            {**each.flat(), "weight": each.weight, "limit": each.limit} for each in study.workloads
        ],
    }


def task_text(study: Study) -> str:
    """Return the task as JSON text."""
    return json.dumps(task(study), indent=1)


def _budget(study: Study) -> dict[str, Any]:
    budget = study.budget
    left = {"seconds_left": budget.seconds_left, "audits_left": budget.audits_left}
    finite = {name: None if math.isinf(value) else value for name, value in left.items()}
    return {"audited": budget.audited, "seconds": budget.seconds, **finite}


def _standing(standing: Standing) -> dict[str, Any]:
    known = standing.log_objective is not None
    return {
        "implementation": standing.sha256,
        "ratio_to_root": math.exp(standing.log_objective) if standing.log_objective is not None else None,
        "within_limits": standing.within_limits if known else None,
        "workloads": {
            name: {"ratio_to_root": math.exp(ratio), "share": standing.shares[name]}
            for name, ratio in standing.log_ratios.items()
        },
    }


def _opportunity(opportunity: Opportunity, expected: float | None) -> dict[str, Any]:
    return {
        "id": opportunity.id,
        "parents": list(opportunity.parents),
        "mechanism": opportunity.mechanism,
        "edit": opportunity.edit,
        "workloads": list(opportunity.workloads),
        "rationale": opportunity.rationale,
        "expected_ratio_to_root": None if expected is None else math.exp(expected),
    }


def _failure(attempt: attempts.Attempt) -> dict[str, Any]:
    assert attempt.status is not None
    return {
        "implementation": attempt.modification.child,
        "parents": list(attempt.modification.parents),
        "hypothesis": attempt.modification.hypothesis,
        "edit": attempt.edit,
        "status": attempt.status.value,
        "reason": attempt.reason,
        "requirements": list(attempt.failed),
    }


def _audit(found: AuditEvidence) -> dict[str, Any]:
    timed = bool(found.measurements) and processes(found) > 0
    return {
        **found.to_json(),
        "ratio_to_incumbent": aggregate(found).ratio if timed else None,
        "ratio_to_root": aggregate(found, "root").ratio if timed else None,
        "smallest_gain": provable(found) if timed else None,
        "workload_ratios": {each.workload: workload_ratio(each).ratio for each in cold(found)},
    }


def _promotion(decision: PromotionDecision) -> dict[str, Any]:
    return {
        "granted": decision.granted,
        "reason": decision.reason,
        "blocked_by": decision.blocked_by,
        "previous": decision.previous,
        "bits_changed": decision.bits_changed,
        "checks": shown_checks(decision.checks),
    }
