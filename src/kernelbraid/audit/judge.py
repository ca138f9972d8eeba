"""The judge: takes candidates through the stages of an audit, imports none of them, records what it finds.

    tripwires -> build -> smoke -> screen -> timing -> full

One judge serves one job. What candidates share it makes once: the root's process, the timed inputs, the
machine's rates.
"""

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from kernelbraid.audit import environment
from kernelbraid.audit.cases import Process
from kernelbraid.audit.drawings import Plan
from kernelbraid.audit.measure import Rounds
from kernelbraid.audit.orders import AuditJob, Candidate, Event
from kernelbraid.audit.pools import Machine, Sweep, TimedProgram, timed_programs
from kernelbraid.audit.process import Limits, Worker, WorkerFailure, prune_compiled
from kernelbraid.audit.stages import (
    Built,
    Ended,
    Hands,
    Timing,
    build,
    check_clocks,
    check_plausible,
    check_twin,
    contenders_of,
    run_checks,
    run_timing,
    tripped,
    warm_specialisations,
)
from kernelbraid.audit.timing import Sequential, Step
from kernelbraid.contract import BitPolicy, Source, Workload
from kernelbraid.ir.evidence import ACCEPTED, AuditEvidence, Level, Measurement, Status, Verdict
from kernelbraid.ops.installed import home
from kernelbraid.ops.problem import Operator

BUILT_TOGETHER = 2
"""Candidates that are built at the same time, while nothing is timed."""


@dataclass(slots=True)
class _Findings:
    """What an audit has found so far."""

    seed: int
    started: float
    status: Status = Status.VERIFIED
    reason: str = ""
    output: str = ""
    built: Built | None = None
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    measurements: tuple[Measurement, ...] = ()
    specialisations: tuple[str, ...] = ()
    seconds: list[tuple[str, float]] = field(default_factory=list)


class Judge:
    """Audits the candidates of one job, one after the other.

    Args:
        job: what to audit beside what.
        operator: the job's.
        progress: called with every step.
        limits: of each worker.
        rule: when timing stops.
        scratch: folder for the workers' own folders; by default a temporary one.
        compiled: folder for compiled code; by default in the user's data folder.

    Raises:
        ValueError: the job's contract is not the operator's, or its device is not there.
    """

    def __init__(
        self,
        job: AuditJob,
        operator: Operator,
        *,
        progress: Callable[[Event], None] | None = None,
        limits: Limits | None = None,
        rule: Sequential | None = None,
        scratch: Path | None = None,
        compiled: Path | None = None,
    ) -> None:
        if job.contract != operator.contract.hash:
            raise ValueError(f"job {job.id} is for another state of the contract {operator.contract.name}")
        environment.require_device(job.device)
        self.job = job
        self.operator = operator
        self.limits = limits or Limits()
        self.rule = rule or Sequential()
        self._progress = progress
        self._own_scratch = scratch is None
        self._scratch = scratch or Path(tempfile.mkdtemp(prefix="kernelbraid-"))
        self._compiled = compiled or home() / "compiled"
        self._ahead: dict[str, tuple[Worker, Built | WorkerFailure, float]] = {}
        self._root: Built | None = None
        self._programs: tuple[TimedProgram, ...] = ()
        self._calls: dict[Workload, float] = {}
        self._workers: list[Worker] = []
        self.environment = environment.fingerprint(job.device)
        self._machine = Machine(
            self.environment.cache_bytes, self.environment.flops, self.environment.bandwidth
        )
        self._sweep = Sweep(self.environment.cache_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers and remove what they left."""
        for worker in self._workers:
            worker.kill()
        self._workers, self._ahead, self._root = [], {}, None
        if self._own_scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
        prune_compiled(self._compiled)

    # ---- workers

    def _start(self, source: Source, entry_points: Sequence[str] | None = None) -> Worker:
        try:
            worker = Worker(
                source,
                entry_points or self.operator.entry_points,
                scratch=self._scratch,
                cache=self._compiled,
                limits=self.limits,
            )
        except OSError as error:
            raise RuntimeError(
                f"cannot start a worker in {self._scratch}: {error.strerror or error}"
            ) from error
        self._workers = [each for each in self._workers if not each.dead] + [worker]
        return worker

    def _build(self, worker: Worker) -> tuple[Built | WorkerFailure, float]:
        start = time.perf_counter()
        job, architecture = self.job, self.environment.architecture
        try:
            built = build(worker, self.operator, job.constant_axes, job.dtype, architecture)
        except WorkerFailure as failure:
            return failure, time.perf_counter() - start
        return built, time.perf_counter() - start

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Build several candidates, and the root at the first call, two at a time."""
        workers = {} if self._root is not None else {"": self._start(self.job.root)}
        for candidate in candidates:
            if candidate.request not in self._ahead and not tripped(candidate.source):
                self._tell("build", candidate, "building")
                workers[candidate.request] = self._start(candidate.source)
        with ThreadPoolExecutor(BUILT_TOGETHER) as threads:
            found = dict(zip(workers, threads.map(self._build, workers.values()), strict=True))
        for request, (built, seconds) in found.items():
            if request:
                self._ahead[request] = workers[request], built, seconds
            elif isinstance(built, WorkerFailure) and all(
                c.source.sha256 != self.job.root.sha256 for c in candidates
            ):
                raise RuntimeError(f"the root does not run: {built.reason}") from built
            elif isinstance(built, Built):
                self._root = built

    # ---- one audit

    def audit(self, candidate: Candidate, deadline: float | None = None) -> AuditEvidence:
        """Take one candidate through the stages of its level.

        Args:
            candidate: one of the job's.
            deadline: a time of `time.monotonic()`; an audit that is not done by then is INTERRUPTED.

        Raises:
            RuntimeError: the root or the incumbent fails, so that nothing can be said of the candidate.
        """
        found = _Findings(seed=secrets.randbits(31), started=time.time())
        try:
            self._stages(candidate, found, deadline)
        except Ended as ended:
            found.status, found.reason, found.output = ended.status, ended.reason, ended.output
        except WorkerFailure as failure:
            found.status, found.reason, found.output = failure.status, failure.reason, failure.output
        finally:
            kept = self._root.worker if self._root is not None else None
            for worker in self._workers:
                if worker is not kept and worker not in [ahead for ahead, _, _ in self._ahead.values()]:
                    worker.kill()
        evidence = self._evidence(candidate, found)
        verdict = evidence.reason or evidence.status.value
        self._tell("done", candidate, verdict, 1.0, {"status": evidence.status.value})
        return evidence

    def _stages(self, candidate: Candidate, found: _Findings, deadline: float | None) -> None:
        with self._stage("tripwires", candidate, found, deadline):
            if (ended := tripped(candidate.source)) is not None:
                raise ended
        built = self._built(candidate, found)
        hands = self._hands(candidate, built)
        level = candidate.level
        for name in (Level.SMOKE, Level.SCREEN):
            if name is Level.SMOKE or level is not Level.SMOKE:
                with self._stage(name.value, candidate, found, deadline):
                    self._check(name, candidate, found, hands, deadline)
        if level is Level.SMOKE:
            found.specialisations = built.worker.specialisations()
            return
        with self._stage("timing", candidate, found, deadline):
            timing = self._time(candidate, found, built, deadline)
        if timing.step is Step.HOPELESS:
            found.status, found.reason = Status.STOPPED, timing.reason
        elif level is Level.FULL:
            self._confirm(candidate, found, hands, timing, deadline)

    def _confirm(
        self,
        candidate: Candidate,
        found: _Findings,
        hands: Hands,
        timing: Timing,
        deadline: float | None,
    ) -> None:
        """The whole domain, unless the second timing refuses already what the domain is checked for."""
        challenger = candidate.source.sha256 != self.job.incumbent.sha256 or self.job.separate
        if challenger and timing.step is not Step.PROVEN:
            found.status, found.reason = Status.STOPPED, "the gain was not confirmed on fresh inputs"
            return
        with self._stage("full", candidate, found, deadline):
            self._check(Level.FULL, candidate, found, hands, deadline)

    @contextmanager
    def _stage(
        self, name: str, candidate: Candidate, found: _Findings, deadline: float | None
    ) -> Iterator[None]:
        if deadline is not None and time.monotonic() > deadline:
            raise Ended(Status.INTERRUPTED, f"the time ended before {name}")
        self._tell(name, candidate, name, 0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            found.seconds.append((name, round(time.perf_counter() - start, 4)))

    def _built(self, candidate: Candidate, found: _Findings) -> Built:
        """Take what was built ahead, and look at what it declares."""
        if candidate.request not in self._ahead or self._root is None:
            self.prepare([candidate])
        _, built, seconds = self._ahead.pop(candidate.request)
        found.seconds.append(("build", round(seconds, 4)))
        if isinstance(built, WorkerFailure):
            raise built
        found.built = built
        if self._root is None:
            raise RuntimeError("the root does not run, though the same source just did")
        if self.job.policy is BitPolicy.PINNED and built.bits_ids != self._root.bits_ids:
            declared = ", ".join(f"{name}={value}" for name, value in built.numerics.items())
            reason = (
                f"the study pins the root's bits {self._root.bits_id}, and {declared} gives {built.bits_id}"
            )
            raise Ended(Status.WRONG_BITS_ID, reason)
        return built

    def _hands(self, candidate: Candidate, built: Built) -> Hands:
        fresh: list[Worker] = []

        def another() -> Worker:
            if not fresh:
                fresh.append(self._start(candidate.source))
                fresh[0].build()
            return fresh[0]

        def root() -> Worker:
            assert self._root is not None
            return self._root.worker

        workers: dict[Process, Callable[[], Worker]] = {
            "main": lambda: built.worker,
            "fresh": another,
            "root": root,
        }
        return Hands(workers)

    def _check(
        self, level: Level, candidate: Candidate, found: _Findings, hands: Hands, deadline: float | None
    ) -> None:
        """Check every requirement at one level, under each set of constant axes."""
        built, root = found.built, self._root
        assert built is not None and root is not None
        for axes, report, mine, roots in zip(
            self.job.constant_axes, built.reports, built.bits_ids, root.bits_ids, strict=True
        ):
            plan = Plan(
                level, (dict(axes),), report.numerics, report.edges, self.job.dtype, found.seed, mine == roots
            )

            def told(requirement: str, fraction: float) -> None:
                self._tell(level.value, candidate, requirement, fraction)

            run_checks(self.operator, plan, hands, found.verdicts, deadline, told)

    # ---- timing

    def _time(self, candidate: Candidate, found: _Findings, built: Built, deadline: float | None) -> Timing:
        programs = self._timed_programs(candidate.level)
        assert self._root is not None
        sources = (self.job.root, self.job.incumbent, candidate.source)
        agrees = built.bits_ids == self._root.bits_ids
        contenders, of = contenders_of(
            sources, self.operator.entry_points, programs, agrees, self.job.separate
        )
        starts = {c.name: c.source for c in contenders}
        with Rounds(contenders, lambda c: self._start(starts[c.name]), self._sweep) as rounds:
            rounds.begin()
            found.specialisations = warm_specialisations(built.worker, programs)

            def told(message: str, fraction: float, data: dict[str, float]) -> None:
                self._tell("timing", candidate, message, fraction, data)

            timing = run_timing(rounds, programs, of, self.rule, found.specialisations, deadline, told)
        if len(timing.rounds) >= self.rule.least:
            check_clocks(timing.rounds, of["candidate"], programs)
        check_twin(lambda: self._start(candidate.source), timing.rounds)
        measured = timing.measurements(programs, of)
        if measured:
            check_plausible(self.operator, self._machine, programs, measured)
        found.measurements = measured
        return timing

    def _timed_programs(self, level: Level) -> tuple[TimedProgram, ...]:
        """Inputs on which candidates of this job are timed; a full audit gets its own."""
        if level is not Level.FULL and self._programs:
            return self._programs
        if not self._calls:
            self._calls = {workload: self._call_seconds(workload) for workload in self.job.workloads}
        made = timed_programs(self.operator, self.job.workloads, self._machine, self._calls.__getitem__)
        if level is not Level.FULL:
            self._programs = made
        return made

    def _call_seconds(self, workload: Workload) -> float:
        """The root's time for one call, roughly: it fixes the number of calls of a batch for everybody."""
        assert self._root is not None
        rng = np.random.default_rng(secrets.randbits(64))
        program = self.operator.timed(workload, rng, 1, 0, contiguous=False)
        try:
            loaded = self._root.worker.load(program)
            seconds = [self._root.worker.run(loaded) for _ in range(3)]
        except WorkerFailure as failure:
            raise RuntimeError(f"the root fails in {workload.name}: {failure.reason}") from failure
        self._root.worker.drop(loaded)
        return min(seconds)

    # ---- records

    def _evidence(self, candidate: Candidate, found: _Findings) -> AuditEvidence:
        job, built = self.job, found.built
        accepted = found.status in ACCEPTED
        return AuditEvidence(
            job=candidate.request,
            implementation=candidate.source.sha256,
            root=job.root.sha256,
            incumbent=job.incumbent.sha256,
            level=candidate.level,
            status=found.status,
            reason=found.reason,
            bits_id=built.bits_id if built is not None else None,
            numerics=tuple(sorted(built.numerics.items())) if built is not None else (),
            verdicts=tuple(found.verdicts.values()),
            measurements=found.measurements if accepted else (),
            specialisations=found.specialisations,
            seconds=tuple(found.seconds),
            seed=found.seed,
            environment=self.environment,
            harness=job.harness,
            output=found.output or (built.worker.printed if built is not None else ""),
            started=found.started,
        )

    def _tell(
        self,
        stage: str,
        candidate: Candidate,
        message: str,
        fraction: float | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        if self._progress is not None:
            self._progress(Event(stage, candidate.source.short, message, fraction, data or {}))
