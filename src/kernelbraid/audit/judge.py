"""The judge: takes candidates through the stages of an audit, imports none of them, records what it finds.

    tripwires -> build -> smoke -> screen -> timing -> full

One judge serves one job. What candidates share it makes once: the root's process, the timed inputs, the
machine's rates.
"""

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

from kernelbraid.audit import environment
from kernelbraid.audit.cases import Process
from kernelbraid.audit.drawings import Plan
from kernelbraid.audit.measure import Rounds, contenders_of
from kernelbraid.audit.orders import AuditJob, Candidate, Event
from kernelbraid.audit.pools import Machine, Sweep, TimedProgram, timed_programs
from kernelbraid.audit.process import Limits, Worker, WorkerFailure, prune_compiled
from kernelbraid.audit.stages import (
    Built,
    Ended,
    Findings,
    Hands,
    Later,
    Timing,
    build,
    check_clocks,
    check_plausible,
    check_twin,
    run_checks,
    run_timing,
    tripped,
    warm_reference,
    warm_specialisations,
)
from kernelbraid.audit.timing import Sequential, Step
from kernelbraid.contract import BitPolicy, Source, Workload
from kernelbraid.ir.evidence import AuditEvidence, Level, Status
from kernelbraid.ops.installed import home
from kernelbraid.ops.problem import Operator

BUILT_TOGETHER = 2
"""Candidates that are built at the same time, while nothing is timed."""


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
            raise RuntimeError(f"cannot start a worker: {error}") from error
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
            building = threads.map(self._build, workers.values())
            if self._root is None:
                warm_reference(self.operator, self.job.constant_axes[0], self.job.dtype)
            found = dict(zip(workers, building, strict=True))
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
        found = Findings(seed=secrets.randbits(31), started=time.time())
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
        evidence = found.evidence(self.job, candidate, self.environment)
        verdict = evidence.reason or evidence.status.value
        self._tell("done", candidate, verdict, 1.0, {"status": evidence.status.value})
        return evidence

    def _stages(self, candidate: Candidate, found: Findings, deadline: float | None) -> None:
        with self._stage("tripwires", candidate, found, deadline):
            if (ended := tripped(candidate.source)) is not None:
                raise ended
        built = self._built(candidate, found)
        fresh = Later(lambda: self._start(candidate.source))
        hands = self._hands(built.worker, fresh)
        with self._stage("smoke", candidate, found, deadline):
            self._check(Level.SMOKE, candidate, found, hands, deadline)
        if candidate.level is Level.SMOKE:
            found.specialisations = built.worker.specialisations()
            return
        with self._stage("inputs", candidate, found, deadline):
            programs = self._timed_programs(candidate.level)
        rounds, of = self._rounds(candidate, built, programs)
        with rounds:
            fresh.begin()
            rounds.begin()  # all of them import while the screen leaves a core idle
            with self._stage("screen", candidate, found, deadline):
                self._check(Level.SCREEN, candidate, found, hands, deadline)
            with self._stage("timing", candidate, found, deadline):
                timing = self._time(candidate, found, rounds, programs, of, deadline)
        if timing.step is Step.HOPELESS:
            found.status, found.reason = Status.STOPPED, timing.reason
        elif candidate.level is Level.FULL:
            self._confirm(candidate, found, hands, timing, deadline)

    def _confirm(
        self,
        candidate: Candidate,
        found: Findings,
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
            assert found.built is not None
            found.specialisations = found.built.worker.specialisations()

    @contextmanager
    def _stage(
        self, name: str, candidate: Candidate, found: Findings, deadline: float | None
    ) -> Iterator[None]:
        if deadline is not None and time.monotonic() > deadline:
            raise Ended(Status.INTERRUPTED, f"the time ended before {name}")
        if name != "inputs":
            self._tell(name, candidate, name, 0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            found.seconds.append((name, round(time.perf_counter() - start, 4)))

    def _built(self, candidate: Candidate, found: Findings) -> Built:
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

    def _hands(self, main: Worker, fresh: Later) -> Hands:
        def root() -> Worker:
            assert self._root is not None
            return self._root.worker

        workers: dict[Process, Callable[[], Worker]] = {"main": lambda: main, "fresh": fresh, "root": root}
        return Hands(workers)

    def _check(
        self, level: Level, candidate: Candidate, found: Findings, hands: Hands, deadline: float | None
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

    def _rounds(
        self, candidate: Candidate, built: Built, programs: tuple[TimedProgram, ...]
    ) -> tuple[Rounds, dict[str, str]]:
        assert self._root is not None
        contenders, of = contenders_of(
            (self.job.root, self.job.incumbent, candidate.source),
            self.operator.entry_points,
            programs,
            agrees=built.bits_ids == self._root.bits_ids,
            separate=self.job.separate,
        )
        rounds = Rounds(
            contenders,
            lambda contender: self._start(contender.source),
            self._sweep,
            too_slow=self.rule.too_slow,
        )
        return rounds, of

    def _time(
        self,
        candidate: Candidate,
        found: Findings,
        rounds: Rounds,
        programs: tuple[TimedProgram, ...],
        of: Mapping[str, str],
        deadline: float | None,
    ) -> Timing:
        def told(message: str, fraction: float, data: dict[str, float]) -> None:
            self._tell("timing", candidate, message, fraction, data)

        assert found.built is not None
        found.specialisations = warm_specialisations(found.built.worker, programs)
        timing = run_timing(rounds, programs, of, self.rule, found.specialisations, deadline, told)
        if len(timing.rounds) >= self.rule.least:
            check_clocks(timing.rounds, of["candidate"], programs)
        check_twin(lambda: self._start(candidate.source), timing.rounds)
        check_plausible(self.operator, self._machine, programs, timing.rounds, of["candidate"])
        found.measurements = timing.measurements(programs, of)
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
