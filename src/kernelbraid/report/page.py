"""A study as one document of plain values: what `report.html` shows, and tests compare with the records."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from kernelbraid.ir import query, survey
from kernelbraid.ir.evidence import ACCEPTED, Level
from kernelbraid.ir.held_out import shown_checks
from kernelbraid.ir.schema import LineageDecision, PromotionDecision, Usage
from kernelbraid.ir.store import Store
from kernelbraid.ir.survey import Finding, Timing
from kernelbraid.ir.views import OBJECTIVE_PROTOCOL
from kernelbraid.report.tree import Layout, layout

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    """All that the page shows but the sources."""

    study: Row
    totals: Row
    nodes: list[Row]
    """Oldest first; parents, branches and points name a node by its index."""
    layout: Layout
    requirements: list[Row]
    workloads: list[Row]
    objective: list[Row]
    """One entry an audit that timed every workload, oldest first."""
    incumbents: list[Row]
    """The root, then the promotions after a comparable full audit, oldest first."""
    tokens: str
    """What is known of tokens, for people."""
    rejections: list[Row]
    ledger: list[Row]
    stages: Row
    budgets: list[Row]
    promotions: list[Row]
    environment: Row | None
    incomparable: int
    """Timed audits left out of the plots: their ratios do not compare with those of the latest one."""


def document(store: Store) -> Page:
    """Read a study, in one state of it.

    Args:
        store: its records.
    """
    with store.read():
        findings = survey.findings(store)
        usage = survey.usage(store)
        promotions = query.promotions(store)
        nodes, place = _nodes(store, findings, promotions)
        index = {node["sha256"]: i for i, node in enumerate(nodes)}
        weighed = [(each, ms) for each in findings if (ms := objective_ms(each, len(store.study.workloads)))]
        comparable = [(each, ms) for each, ms in weighed if each.comparable == weighed[-1][0].comparable]
        environments = survey.environments(store)
        latest = environments.get(weighed[-1][0].comparable) if weighed else None
        totals = query.totals(store)
        incumbent = query.incumbent(store).sha256
        proof = _proof(findings, incumbent)
        proven = objective_ms(proof, len(store.study.workloads)) if proof else None
        ratio = 1.0 if incumbent == store.study.root else proven[0] / proven[1] if proven else None
        return Page(
            study=_study(store),
            totals={**asdict(totals), "implementations": len(nodes), "incumbent_ratio": ratio},
            nodes=nodes,
            layout=place,
            requirements=_requirements(store, findings),
            workloads=_workloads(store, findings, comparable, index, proof),
            objective=_objective(comparable, usage, index),
            incumbents=_incumbents(store, promotions, {each.request: ms for each, ms in comparable}, index),
            tokens=_tokens(usage),
            rejections=_rejections(nodes, findings, index),
            ledger=_ledger(usage),
            stages=query.stage_seconds(store),
            budgets=_budgets(store, usage, findings),
            promotions=[_promotion(each, index) for each in promotions],
            environment=None if latest is None else asdict(latest),
            incomparable=len(weighed) - len(comparable),
        )


def objective_ms(finding: Finding, workloads: int) -> tuple[float, float] | None:
    """The weighted sum of latencies of candidate and root, milliseconds; None unless all were timed."""
    timed = _cold(finding)
    if len(timed) != workloads or not timed:
        return None
    candidate = math.fsum(each.weight * each.candidate_ms for each in timed)
    root = math.fsum(each.weight * each.root_ms for each in timed)
    return (candidate, root) if 0 < candidate < math.inf and 0 < root < math.inf else None


def _cold(finding: Finding) -> list[Timing]:
    return [each for each in finding.timings if each.protocol == OBJECTIVE_PROTOCOL]


def _study(store: Store) -> Row:
    record = store.study
    names = ("name", "operator", "contract", "device", "dtype", "proposer", "arm", "package", "root")
    created = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {**{name: getattr(record, name) for name in names}, "policy": record.policy.value,
            "created": created, "constant_axes": list(record.constant_axes)}  # fmt: skip


def _nodes(
    store: Store, findings: Sequence[Finding], promotions: Sequence[PromotionDecision]
) -> tuple[list[Row], Layout]:
    implementations = survey.labels(store)
    index = {sha256: i for i, (sha256, _) in enumerate(implementations)}
    changes = {each.child: each for each in survey.changes(store)}
    states = query.states(store)
    incumbent = query.incumbent(store).sha256
    ratios = {
        each.implementation: ms[0] / ms[1]
        for each in findings
        if (ms := objective_ms(each, len(store.study.workloads)))
    }
    audits: dict[str, list[Finding]] = {}
    for finding in findings:
        audits.setdefault(finding.implementation, []).append(finding)
    decisions: dict[str, list[LineageDecision]] = {}
    for decision in query.lineage_decisions(store):
        decisions.setdefault(decision.implementation, []).append(decision)
    promoted = {each.implementation for each in promotions if each.granted}
    above = [
        [index[parent] for parent in changes[sha256].parents] if sha256 in changes else []
        for sha256, _ in implementations
    ]
    place = layout([parents[0] if parents else None for parents in above], index[incumbent])
    nodes = []
    for node, (sha256, label) in enumerate(implementations):
        change, own = changes.get(sha256), audits.get(sha256, [])
        telling = next((audit for audit in own if audit.status not in ACCEPTED), own[-1] if own else None)
        state = states.get(sha256) or (telling.status.value if telling else "pending")
        nodes.append(
            {
                "sha256": sha256,
                "label": label,
                "state": state,
                "group": _group(state, sha256 in promoted),
                "parents": above[node],
                "branch": place.branch[node],
                "ratio": ratios.get(sha256),
                "reason": telling.reason if telling else "",
                "change": change,
                "audits": own,
                "decisions": [
                    {"decision": d.decision.value, "reason": d.reason, "by": d.decided_by}
                    for d in decisions.get(sha256, ())
                ],
            }
        )
    return nodes, place


def _group(state: str, promoted: bool) -> str:
    """Class of a node in the picture."""
    if state in ("root", "incumbent", "pending"):
        return state
    if state in ("frontier", "archive", "verified"):
        return "promoted" if promoted else state
    return "rejected"


def _requirements(store: Store, findings: Sequence[Finding]) -> list[Row]:
    """Each requirement with the audits that checked it and those in which it did not hold."""
    sets = Counter(finding.checked for finding in findings)
    checked: Counter[int] = Counter()
    for members, audits in sets.items():
        for member in members:
            checked[member] += audits
    broken = Counter(failure.requirement for finding in findings for failure in finding.failures)
    return [
        {"seq": each.seq, "id": each.id, "kind": each.kind, "name": each.name, "regime": each.regime,
         "checked": checked[each.seq], "broken": broken[each.id]}
        for each in query.requirements(store)
    ]  # fmt: skip


def _proof(findings: Sequence[Finding], incumbent: str) -> Finding | None:
    """The audit that the incumbent's latencies are read from: its latest full one, or else its latest."""
    timed = [each for each in findings if each.implementation == incumbent and _cold(each)]
    full = [each for each in timed if each.level is Level.FULL]
    return full[-1] if full else timed[-1] if timed else None


def _workloads(
    store: Store,
    findings: Sequence[Finding],
    comparable: Sequence[tuple[Finding, Any]],
    index: Mapping[str, int],
    proof: Finding | None,
) -> list[Row]:
    proven = {each.workload: each for each in _cold(proof)} if proof else {}
    same = comparable[-1][0].comparable if comparable else None
    trajectories: dict[str, list[Row]] = {workload.name: [] for workload in store.study.workloads}
    for finding in findings:
        for timing in _cold(finding):
            if (
                finding.comparable == same
                and timing.workload in trajectories
                and math.isfinite(timing.ratio)
                and timing.ratio > 0
            ):
                trajectories[timing.workload].append(
                    {"audit": finding.seq, "request": finding.request, "ratio": timing.ratio,
                     "node": index[finding.implementation]}
                )  # fmt: skip
    rows = []
    for workload in store.study.workloads:
        found = proven.get(workload.name)
        row: Row = {name: getattr(workload, name) for name in ("name", "phase", "weight", "limit")}
        row |= dict.fromkeys(("root_ms", "best_ms", "ratio", "bound_ms", "share"))
        if found is not None:
            row |= {"root_ms": found.root_ms, "best_ms": found.candidate_ms, "ratio": found.ratio}
            if found.bound_ms > 0:
                row |= {"bound_ms": found.bound_ms, "share": found.bound_ms / found.candidate_ms}
        rows.append({**row, "audit": proof.request if proof else None, "points": trajectories[workload.name]})
    return rows


def _objective(
    comparable: Sequence[tuple[Finding, tuple[float, float]]],
    usage: Sequence[Usage],
    index: Mapping[str, int],
) -> list[Row]:
    spent = sorted(
        (each.created, (each.tokens_in or 0) + (each.tokens_out or 0))
        for each in usage
        if each.tokens_in is not None or each.tokens_out is not None
    )
    rows, tokens, taken = [], 0, 0
    for finding, (candidate, root) in comparable:
        while taken < len(spent) and spent[taken][0] <= finding.recorded:
            tokens += spent[taken][1]
            taken += 1
        rows.append(
            {"audit": finding.seq, "request": finding.request, "node": index[finding.implementation],
             "candidate_ms": candidate, "root_ms": root, "ratio": candidate / root,
             "tokens": tokens if spent else None}
        )  # fmt: skip
    return rows


def _incumbents(
    store: Store,
    promotions: Sequence[PromotionDecision],
    weighed: Mapping[str, tuple[float, float]],
    index: Mapping[str, int],
) -> list[Row]:
    """Who was promoted after which audit, with the ratio that its full audit measured."""
    rows: list[Row] = [{"audit": 0, "node": index[store.study.root], "ratio": 1.0, "request": None}]
    for each in promotions:
        measured = weighed.get(each.full_audit or "")
        if each.granted and measured is not None:
            candidate, root = measured
            rows.append({"audit": each.after_audit, "node": index[each.implementation],
                         "ratio": candidate / root, "request": each.full_audit})  # fmt: skip
    return rows


def _tokens(usage: Sequence[Usage]) -> str:
    """One sentence on what the study's records tell of tokens."""
    calls = sum(each.proposer_calls for each in usage)
    whole = [each for each in usage if each.tokens_in is not None and each.tokens_out is not None]
    partly = any(each.tokens_in is not None or each.tokens_out is not None for each in usage)
    told = sum(each.proposer_calls for each in whole)
    if not partly:
        said = f"{calls:,} proposer calls are recorded" if calls else "No proposer call is recorded"
        return f"Tokens are unknown. {said}, and no record tells tokens."
    if told < calls or any((each.tokens_in is None) != (each.tokens_out is None) for each in usage):
        return f"Tokens are at least those shown: {told:,} of {calls:,} proposer calls tell theirs in full."
    return "Tokens are those that the proposer told, in and out added."


def _rejections(nodes: Sequence[Row], findings: Sequence[Finding], index: Mapping[str, int]) -> list[Row]:
    """By status, as the audit that first rejected an implementation has it: how many, and what it broke."""
    first: dict[str, Finding] = {}
    for finding in findings:
        if finding.status not in ACCEPTED:
            first.setdefault(finding.implementation, finding)
    rows: dict[str, Row] = {}
    for sha256, finding in first.items():
        row = rows.setdefault(
            finding.status.value,
            {"status": finding.status.value, "implementations": 0, "broke": Counter(), "reasons": Counter(),
             "example": index[sha256]},
        )  # fmt: skip
        row["implementations"] += 1
        row["broke"].update(failure.requirement for failure in finding.failures)
        row["reasons"][finding.reason] += 1
    ordered = sorted(rows.values(), key=lambda row: (-row["implementations"], row["status"]))
    return [
        {**row, "broke": row["broke"].most_common(3), "reasons": row["reasons"].most_common(3)}
        for row in ordered
    ]


def _ledger(usage: Sequence[Usage]) -> list[Row]:
    """What was spent on each purpose; None where no record tells."""
    known = ("wall_seconds", "device_seconds", "queue_seconds", "proposer_calls")
    perhaps = ("tokens_in", "tokens_out", "money")
    rows: dict[str, Row] = {}
    for each in usage:
        empty = dict.fromkeys(known, 0) | dict.fromkeys(perhaps)
        row = rows.setdefault(each.purpose, {"purpose": each.purpose, **empty})
        for name in (*known, *perhaps):
            value = getattr(each, name)
            if value is not None:
                row[name] = (row[name] or 0) + value
    return [rows[purpose] for purpose in sorted(rows)]


def _budgets(store: Store, usage: Sequence[Usage], findings: Sequence[Finding]) -> list[Row]:
    record = store.study
    screened = {
        each.implementation
        for each in findings
        if each.level is Level.SCREEN and each.implementation != record.root
    }
    searching = math.fsum(each.wall_seconds for each in usage if each.purpose == "search")
    calls = sum(each.proposer_calls for each in usage)
    since = query.audits_since_promotion(store)
    return [
        {"budget": "minutes of search", "limit": record.minutes, "spent": searching / 60},
        {"budget": "candidates audited", "limit": record.audits, "spent": len(screened)},
        {"budget": "proposer calls", "limit": record.proposer_calls, "spent": calls},
        {"budget": "audits since the last promotion", "limit": record.patience, "spent": since},
    ]


def _promotion(each: PromotionDecision, index: Mapping[str, int]) -> Row:
    names = ("granted", "reason", "blocked_by", "bits_changed", "after_audit", "screen_audit", "full_audit")
    return {**{name: getattr(each, name) for name in names}, "node": index[each.implementation],
            "previous": index[each.previous], "checks": shown_checks(each.checks)}  # fmt: skip
