"""Audits of a study: pending requests leave as a job, run here or elsewhere, and come back as evidence.

A local audit is the same three steps as one that travels, with the job in the study's folder. A job file
there means that its results may not be recorded yet; it goes away once they are, so that an interrupted
search finds what it left.
"""

import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelbraid.audit import jobs
from kernelbraid.ir import proposing
from kernelbraid.ir.evidence import AuditEvidence, Level
from kernelbraid.ir.schema import AuditRequest, Usage
from kernelbraid.search import lineage
from kernelbraid.search.audit_command import AuditCommand, AuditCommandFailed
from kernelbraid.search.executors import LOST, QUEUED, Executor
from kernelbraid.search.executors.local import LocalExecutor
from kernelbraid.search.measured import aggregate
from kernelbraid.search.study import Study

RUNS = 3
"""Times that a failing audit command is run."""
WAIT_SECONDS = 2.0
"""Before it is run again; then four times as long."""


RunJob = Executor


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of a results file."""

    recorded: tuple[AuditEvidence, ...]
    repeated: int
    """Answers to requests that were answered before; each is recorded once."""


def runner(command: str | None, executor: str = "local") -> RunJob:
    """Return what runs audits: this machine, an audit command, or a Ray cluster.

    Args:
        command: an audit command, or None.
        executor: `local`, `ray` (the cluster that RAY_ADDRESS names, or one made here) or `ray:ADDRESS`.

    Raises:
        ValueError: the command is no template, or there is no such executor.
        RuntimeError: Ray is not installed, or the cluster cannot be reached.
    """
    kind, _, address = executor.partition(":")
    if kind not in ("local", "ray") or (kind == "local" and address):
        raise ValueError(f"executor must be local, ray or ray:ADDRESS, got {executor!r}")
    if command is not None:
        if kind != "local":
            raise ValueError("an audit command says itself where audits run: leave out --executor")
        return AuditCommand(command)
    if kind == "ray":
        from kernelbraid.search.executors.cluster import RayExecutor

        return RayExecutor(address or os.environ.get("RAY_ADDRESS"))
    return LocalExecutor()


def job_of(study: Study, requests: Sequence[AuditRequest]) -> jobs.AuditJob:
    """Return a job that audits the requested implementations beside the root and the present incumbent.

    Full audits time held-out workloads too; in a study that has some, a job is of one level.
    """
    record, store = study.store.study, study.store
    assert requests
    full = all(each.level is Level.FULL for each in requests)
    return jobs.AuditJob(
        id=secrets.token_hex(8),
        study=record.name,
        operator=record.operator,
        contract=record.contract_hash,
        harness=record.harness,
        device=record.device,
        level=max((each.level for each in requests), key=list(Level).index),
        policy=record.policy,
        dtype=record.dtype,
        constant_axes=record.constant_axes,
        workloads=(*record.workloads, *(store.held_out if full else ())),
        root=store.source(record.root),
        incumbent=store.source(study.incumbent),
        candidates=tuple(
            jobs.Candidate(request=each.id, source=store.source(each.implementation), level=each.level)
            for each in requests
        ),
        to_beat=_to_beat(study),
    )


def _to_beat(study: Study) -> float:
    """The share of the incumbent's time that the fastest candidate that waits for its full audit needs."""
    waiting = [each.screen for each in lineage.awaiting(study) if each.screen is not None]
    return min((aggregate(evidence).ratio for evidence in waiting), default=1.0)


def run(
    study: Study,
    requests: Sequence[AuditRequest],
    *,
    seconds: float = math.inf,
    progress: Callable[[jobs.Event], None] | None = None,
    run_job: RunJob = jobs.run_job,
) -> tuple[AuditEvidence, ...]:
    """Audit pending requests and record what was found; what was cut short stays pending.

    A command that fails is written down as an interruption and repeated, RUNS times in all; it goes on from
    the results that it left.

    Args:
        study: whose requests; the caller holds its controller lock.
        requests: what to audit, in this order.
        seconds: time after which the job stops by itself.
        progress: told of every stage.
        run_job: runs the job, here or by a command.

    Raises:
        RuntimeError: the command failed RUNS times in a row.
    """
    job = job_of(study, requests)
    path = study.folder / "jobs" / f"{job.id}.json"
    jobs.write_job(job, path)
    results = study.folder / "results" / f"{job.id}.jsonl"
    deadline = time.monotonic() + seconds

    def told(event: jobs.Event) -> None:
        nonlocal deadline
        if event.stage == QUEUED:
            study.budget.waited(event.data["seconds"])
            deadline += event.data["seconds"]
        elif event.stage == LOST:
            proposing.record_interruptions(study.store, event.data["requests"], event.data["reason"])
        if progress is not None:
            progress(event)

    try:
        for run in range(1, RUNS + 1):
            minutes = None if math.isinf(seconds) else max(0.0, deadline - time.monotonic()) / 60
            try:
                run_job(job, results, minutes=minutes, progress=told)
                break
            except AuditCommandFailed as failed:
                waiting = [each.id for each in requests if each.id not in _answered(results)]
                proposing.record_interruptions(study.store, waiting, failed.reason, failed.output)
                if run == RUNS:
                    raise RuntimeError(f"{failed.reason} ({RUNS} times; the audits stay pending)") from failed
            time.sleep(min(WAIT_SECONDS * 4 ** (run - 1), max(0.0, deadline - time.monotonic())))
    finally:
        recorded = _collect(study, path)
    return recorded


def recover(study: Study) -> tuple[AuditEvidence, ...]:
    """Record the finished audits that a search left behind when it was interrupted."""
    left = sorted((study.folder / "jobs").glob("*.json"))
    return tuple(evidence for path in left for evidence in _collect(study, path))


def export(
    study: Study, path: Path, most: int | None = None, requests: Sequence[AuditRequest] | None = None
) -> int:
    """Write requests into one job file that can run where there is no study, and return how many.

    Args:
        study: whose requests.
        path: file to write.
        most: requests at most; all by default.
        requests: pending ones; by default all that are.

    Raises:
        ValueError: nothing is pending.
        RuntimeError: the file cannot be written.
    """
    study.require_current()
    waiting = (study.store.pending() if requests is None else list(requests))[:most]
    if not waiting:
        raise ValueError(f"{study.folder} has no pending audit to export: submit a candidate first")
    if study.held_out:
        waiting = [each for each in waiting if each.level is waiting[0].level]
    jobs.write_job(job_of(study, waiting), path)
    return len(waiting)


def take_in(study: Study, path: Path) -> Imported:
    """Record the evidence of a results file, each answer once.

    Raises:
        ValueError: the file is corrupt, or its evidence is not of this study.
    """
    study.require_current()
    results, record = jobs.read_results(path), study.store.study
    for key, wanted in (("study", record.name), ("harness", record.harness)):
        if results.header.get(key) != wanted:
            raise ValueError(f"{path} holds results of another {key}: {results.header.get(key)!r}")
    return _record(study, results.evidence)


def expected_seconds(study: Study, level: Level) -> float | None:
    """Return what an audit of that level took on average over the last few; None while there was none."""
    found = [each.full if level is Level.FULL else each.screen for each in study.standings().values()]
    recent = [evidence for evidence in found if evidence is not None][-5:]
    taken = [math.fsum(seconds for _, seconds in evidence.seconds) for evidence in recent]
    return math.fsum(taken) / len(taken) if taken else None


def _collect(study: Study, job: Path) -> tuple[AuditEvidence, ...]:
    results = study.folder / "results" / f"{job.stem}.jsonl"
    recorded: tuple[AuditEvidence, ...] = ()
    if _begun(results):
        recorded = _record(study, jobs.read_results(results).evidence).recorded
    results.unlink(missing_ok=True)
    results.with_name(f"{job.stem}.job.json").unlink(missing_ok=True)
    job.unlink(missing_ok=True)
    return recorded


def _answered(results: Path) -> set[str]:
    return {each.job for each in jobs.read_results(results).evidence} if _begun(results) else set()


def _begun(results: Path) -> bool:
    """Whether a results file holds at least its header: a search may have died before."""
    if not results.exists():
        return False
    with results.open("rb") as file:
        return file.readline().endswith(b"\n")


def _record(study: Study, evidence: Sequence[AuditEvidence]) -> Imported:
    recorded = []
    for each in evidence:
        with study.store.transaction():
            if study.store.record(each):
                taken = math.fsum(seconds for _, seconds in each.seconds)
                usage = Usage(purpose="audit", device_seconds=taken, implementation=each.implementation)
                study.store.record_usage(usage)
                recorded.append(each)
    return Imported(tuple(recorded), len(evidence) - len(recorded))
