"""Ablations: what a search gains from evidence and from branching, arm beside arm with equal budgets.

Each repeat of each arm is a study of its own under one folder, with the repeat's number as its seed in every
arm. Run again, finished studies are read and the others go on.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelbraid.audit import jobs
from kernelbraid.audit.timing import student_quantile
from kernelbraid.contract import Source, Workload
from kernelbraid.ir import query
from kernelbraid.ir.evidence import ACCEPTED
from kernelbraid.search import audits, loop
from kernelbraid.search.measured import cold, log_objective
from kernelbraid.search.proposers.arms import Arm, proposer_of
from kernelbraid.search.proposers.replay import Replay, made_from
from kernelbraid.search.study import Study

CONFIDENCE = 0.95
"""Two-sided, of every interval, by Student's t over the repeats."""
LEAST_REPEATS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What every arm gets alike.

    `audits` candidates a study, or `minutes` to search, or both; patience never ends a study early.
    """

    operator: str
    folder: Path
    repeats: int
    arms: tuple[Arm, ...] = tuple(Arm)
    audits: int | None = None
    minutes: float | None = None
    root: Path | Source | None = None
    device: str = "cpu"
    policy: str = "mutual"
    replay: Path | None = None
    """A study whose proposals every arm gets, in place of a proposer of its own."""
    workloads: tuple[Workload, ...] | None = None
    """What is timed; by default all of the operator's grid `study`."""

    def __post_init__(self) -> None:
        if self.repeats < LEAST_REPEATS:
            raise ValueError(f"repeats must be at least {LEAST_REPEATS}, got {self.repeats}")
        if self.audits is None and self.minutes is None:
            raise ValueError("an ablation needs equal budgets: name audits or minutes")
        if len(set(self.arms)) < len(self.arms) or not self.arms:
            raise ValueError(f"arms must be named once each, got {', '.join(self.arms) or 'none'}")
        if self.replay is not None:
            for arm in self.arms:
                Replay(arm)

    @property
    def studies(self) -> list[tuple[Arm, int, Path]]:
        """(arm, repeat, folder), the arms of one repeat after each other."""
        return [
            (arm, repeat, self.folder / f"{arm}-{repeat}")
            for repeat in range(self.repeats)
            for arm in self.arms
        ]


def run(
    plan: Plan,
    *,
    progress: Callable[[str, loop.Progress], None] = lambda _, __: None,
    begins: Callable[[str, int], None] = lambda _, __: None,
    run_job: audits.RunJob = jobs.run_job,
    create: Callable[..., Study] = Study.create,
) -> dict[str, Any]:
    """Run what is missing of an ablation and return its document, `ended` False if it was interrupted.

    Args:
        plan: what to run.
        progress: told of every stage of every study, with the study's name.
        begins: told each study's name and how many there are before it.
        run_job: runs the audits.
        create: makes a study.

    Raises:
        ValueError: a study of the folder was made with other budgets, or under another contract or harness.
    """
    for before, (arm, repeat, folder) in enumerate(plan.studies):
        with _study(plan, repeat, folder, create) as study:
            name = folder.name
            begins(name, before)

            def told(each: loop.Progress, name: str = name) -> None:
                progress(name, each)

            proposer = proposer_of(arm, repeat) if plan.replay is None else Replay(arm)
            ending = loop.run(study, proposer, progress=told, run_job=run_job)
            if ending is loop.Ending.INTERRUPTED:
                return document(plan) | {"ended": False}
    return document(plan) | {"ended": True}


def _study(plan: Plan, repeat: int, folder: Path, create: Callable[..., Study]) -> Study:
    if not folder.exists():
        more: dict[str, Any] = {} if plan.workloads is None else {"workloads": plan.workloads}
        root = plan.root
        if plan.replay is not None:
            _, root, proposals = made_from(plan.replay)
            more |= {"proposer": "replay", "replay": proposals}
        return create(
            folder,
            plan.operator,
            root,
            **more,
            device=plan.device,
            policy=plan.policy,
            minutes=plan.minutes,
            audits=plan.audits,
            patience=1 << 30,
            seed=repeat,
        )
    study = Study.open(folder)
    record = study.store.study
    made = (record.audits, record.minutes, record.operator, record.device, record.policy)
    other = made != (plan.audits, plan.minutes, plan.operator, plan.device, plan.policy)
    if other or (plan.workloads is not None and record.workloads != plan.workloads):
        study.close()
        raise ValueError(
            f"{folder} was made with other budgets, another policy, for other workloads or another operator"
        )
    return study


def document(plan: Plan) -> dict[str, Any]:
    """What the studies that exist so far found, arm by arm."""
    repeats: dict[Arm, dict[int, dict[str, Any]]] = {arm: {} for arm in plan.arms}
    for arm, repeat, folder in plan.studies:
        if folder.exists():
            with Study.open(folder) as study:
                repeats[arm][repeat] = _repeat(study) | {"repeat": repeat, "study": str(folder)}
    return {
        "operator": plan.operator,
        "repeats": plan.repeats,
        "budget": {"audits": plan.audits, "minutes": plan.minutes},
        "arms": {arm.value: _arm(found, repeats.get(Arm.FULL, {})) for arm, found in repeats.items()},
    }


def _repeat(study: Study) -> dict[str, Any]:
    with study.store.read():
        totals = query.totals(study.store)
        incumbent = study.standings().get(study.incumbent)
        proven = None if incumbent is None else incumbent.log_objective
        curve = _trajectory(study)
        return {
            "objective": math.exp(proven or 0.0),
            "fastest": math.exp(curve[-1]) if curve else 1.0,
            "trajectory": [round(math.exp(each), 6) for each in curve],
            "audits": totals.audited,
            "verified": totals.verified,
            "promotions": totals.promotions,
            "tokens": None,
            "seconds": study.budget.seconds,
        }


def _trajectory(study: Study) -> list[float]:
    """After each audited candidate, the lowest log objective measured so far within the limits."""
    standings = study.standings()
    lowest, curve, seen = 0.0, [], {study.root}
    for audit in query.audits(study.store):
        sha = audit.implementation
        if sha in seen:
            continue
        seen.add(sha)
        standing = standings[sha]
        evidence = standing.screen
        timed = evidence is not None and evidence.status in ACCEPTED and cold(evidence)
        if timed and evidence is not None and standing.within_limits and standing.accepted:
            lowest = min(lowest, log_objective(evidence)[0])
        curve.append(lowest)
    return curve


def _arm(found: Mapping[int, Mapping[str, Any]], full: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    logs = {repeat: math.log(each["fastest"]) for repeat, each in found.items()}
    against = [logs[r] - math.log(full[r]["fastest"]) for r in logs if r in full]
    return {
        "objective": _interval(list(logs.values())),
        "proven": _interval([math.log(each["objective"]) for each in found.values()]),
        "over_full": _interval(against),
        "audits": sum(each["audits"] for each in found.values()),
        "seconds": math.fsum(each["seconds"] for each in found.values()),
        "repeats": [dict(each) for _, each in sorted(found.items())],
    }


def _interval(logs: Sequence[float]) -> dict[str, float | None]:
    """Geometric mean with its interval; no interval of fewer than two."""
    if not logs:
        return {"mean": None, "low": None, "high": None}
    mean = statistics.fmean(logs)
    if len(logs) < LEAST_REPEATS:
        return {"mean": math.exp(mean), "low": None, "high": None}
    half = (
        student_quantile((1 + CONFIDENCE) / 2, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    )
    return {"mean": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}
