"""The judge: takes candidates through the stages of an audit, imports none of them, records what it finds.

    tripwires -> build -> smoke -> screen -> timing -> full

One judge serves one job. What candidates share it makes once: the root's process, the timed inputs, the
machine's rates. Up to the screen nothing is timed, so candidates are prepared two at a time; timing has the
machine to itself.
"""

import contextlib
import queue
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from kernelbraid.audit import environment
from kernelbraid.audit.cases import Process
from kernelbraid.audit.confined import limits_of
from kernelbraid.audit.drawings import Plan
from kernelbraid.audit.measure import Rounds, call_seconds, contenders_of
from kernelbraid.audit.orders import AuditJob, Candidate, Event
from kernelbraid.audit.pools import Machine, TimedProgram, sweep_of, timed_programs
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
from kernelbraid.audit.timing import Sequential, Step, within_limits
from kernelbraid.contract import BitPolicy, Source, Workload, left_to_full
from kernelbraid.ir.evidence import AuditEvidence, Level, Status
from kernelbraid.ops.installed import home
from kernelbraid.ops.problem import Operator

PREPARED_TOGETHER = 2
"""Candidates that are built and checked at the same time, while nothing is timed."""
SLOW_TO_START = frozenset({"cuda"})
"""Devices on which a process takes seconds to start: there, all that timing needs start together."""
EVENT_SECONDS = 0.05
"""How long the judge waits for news of candidates being prepared before it looks whether they are done."""


@dataclass(slots=True)
class Prepared:
    """A candidate that is being taken through the stages in which nothing is timed."""

    candidate: Candidate
    found: Findings
    main: Worker | None = None
    """The process of its checks; None where a tripwire ended the audit."""
    fresh: Later | None = None
    ended: Exception | None = None
    """What ended its audit before timing, if anything did."""
    ready: bool = False
    """Every check that its level asks for before timing was made, and held."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        fresh = None if self.fresh is None else self.fresh.worker
        return tuple(worker for worker in (self.main, fresh) if worker is not None)


class Judge:
    """Audits the candidates of one job; used by the thread that made it.

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
        self.limits = limits or limits_of(job.device)
        self.rule = rule or Sequential()
        self._progress = progress
        self._own_scratch = scratch is None
        self._scratch = scratch or Path(tempfile.mkdtemp(prefix="kernelbraid-"))
        self._compiled = compiled or home() / "compiled"
        self._ahead: dict[str, Prepared] = {}
        self._root: Future[Built] | None = None
        self._root_lock = threading.Lock()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._thread = threading.current_thread()
        self._programs: tuple[TimedProgram, ...] = ()
        self._calls: dict[Workload, float] = {}
        self._to_beat = job.to_beat
        self._workers: list[Worker] = []
        self.environment = environment.fingerprint(job.device)
        self._machine = Machine.of(self.environment)
        self._sweep = sweep_of(job.device, self.environment.cache_bytes)

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
                device=self.job.device,
                kin=self.job.root,
            )
        except OSError as error:
            raise RuntimeError(f"cannot start a worker: {error}") from error
        self._workers = [each for each in self._workers if not each.dead] + [worker]
        return worker

    def _build(self, worker: Worker) -> Built:
        job, architecture = self.job, self.environment.architecture
        later = left_to_full(job.workloads)
        return build(worker, self.operator, job.constant_axes, job.dtype, architecture, later)

    def _built_root(self) -> Built:
        """The root, built; waits for it."""
        assert self._root is not None
        try:
            return self._root.result()
        except WorkerFailure as failure:
            raise RuntimeError(f"the root does not run: {failure.reason}") from failure

    # ---- before timing

    def prepare(self, candidates: Sequence[Candidate], deadline: float | None = None) -> None:
        """Take several candidates up to the screen, two at a time; the root is built at the first call.

        Args:
            candidates: some of the job's.
            deadline: as for `audit`.

        Raises:
            RuntimeError: the root does not run, so that nothing can be said of the candidates.
        """
        waiting = [c for c in candidates if c.request not in self._ahead]
        if not waiting:
            return
        # All processes start here: each dies with the thread that starts it, and one that is not known yet
        # when another answers would be taken for a stray.
        root = None if self._root is not None else self._start(self.job.root)
        for candidate in waiting:
            self._ahead[candidate.request] = self._begun(candidate)
        with ThreadPoolExecutor(PREPARED_TOGETHER) as threads:
            try:
                if root is not None:
                    self._root = threads.submit(self._build, root)
                running = [threads.submit(self._prepare, self._ahead[c.request], deadline) for c in waiting]
                if root is not None:
                    warm_reference(self.operator, self.job.constant_axes[0], self.job.dtype)
                self._tell_until_done(running)
            except BaseException:
                for worker in self._workers:
                    worker.kill()  # so that no thread waits for it
                self._ahead = {}
                raise
        for each in running:
            each.result()

    def _begun(self, candidate: Candidate) -> Prepared:
        """Start a candidate's processes, unless a tripwire ends its audit."""
        prepared = Prepared(candidate, Findings(seed=secrets.randbits(31), started=time.time()))
        with self._stage("tripwires", prepared):
            prepared.ended = tripped(candidate.source, self.job.device)
        if prepared.ended is None:
            prepared.main = self._start(candidate.source)
            if candidate.level is not Level.SMOKE:
                prepared.fresh = Later(self._start(candidate.source))
        return prepared

    def _tell_until_done(self, running: Sequence[Future[None]]) -> None:
        """Pass on what the threads tell, from the judge's own."""
        while True:
            done = all(each.done() for each in running)
            with contextlib.suppress(queue.Empty):
                while True:
                    self._deliver(self._events.get(timeout=0 if done else EVENT_SECONDS))
            if done:
                return

    def _prepare(self, prepared: Prepared, deadline: float | None) -> None:
        if prepared.ended is not None:
            return
        try:
            self._untimed_stages(prepared, deadline)
        except (Ended, WorkerFailure) as ended:
            if prepared.candidate.source.sha256 != self.job.root.sha256:
                self._built_root()  # where nothing runs, nothing is said of candidates
            elif any(worker.killed for worker in prepared.workers):
                reason = "the root's process was killed from outside: go on once there is memory"
                raise RuntimeError(reason) from ended
            prepared.ended = ended
            for worker in prepared.workers:
                worker.kill()
        else:
            prepared.ready = True

    def _untimed_stages(self, prepared: Prepared, deadline: float | None) -> None:
        candidate, found = prepared.candidate, prepared.found
        assert prepared.main is not None
        with self._stage("build", prepared, deadline):
            found.built = self._build(prepared.main)
        self._require_bits(found.built)
        with self._stage("smoke", prepared, deadline):
            self._check(Level.SMOKE, prepared, deadline)
        if candidate.level is Level.SMOKE:
            found.specialisations = prepared.main.specialisations()
            return
        assert prepared.fresh is not None
        prepared.fresh.begin()
        with self._stage("screen", prepared, deadline):
            self._check(Level.SCREEN, prepared, deadline)
        prepared.fresh()  # it stands still from here on

    def _require_bits(self, built: Built) -> None:
        """Under `pinned`, refuse other bits than the root's."""
        root = self._built_root()
        if self.job.policy is BitPolicy.PINNED and built.bits_ids != root.bits_ids:
            declared = ", ".join(f"{name}={value}" for name, value in built.numerics.items())
            reason = f"the study pins the root's bits {root.bits_id}, and {declared} gives {built.bits_id}"
            raise Ended(Status.WRONG_BITS_ID, reason)

    # ---- one audit

    def audit(self, candidate: Candidate, deadline: float | None = None) -> AuditEvidence:
        """Take one candidate through the stages of its level; those before timing may be behind it.

        Args:
            candidate: one of the job's.
            deadline: a time of `time.monotonic()`; an audit that is not done by then is INTERRUPTED.

        Raises:
            RuntimeError: the root or the incumbent fails, so that nothing can be said of the candidate.
        """
        self.prepare([candidate], deadline)
        prepared = self._ahead.pop(candidate.request)
        found = prepared.found
        try:
            if prepared.ended is not None:
                raise prepared.ended
            assert prepared.ready, "a candidate is timed after its checks"
            if candidate.level is not Level.SMOKE:
                self._timed_stages(prepared, deadline)
        except Ended as ended:
            found.status, found.reason, found.output = ended.status, ended.reason, ended.output
        except WorkerFailure as failure:
            found.status, found.reason, found.output = failure.status, failure.reason, failure.output
        finally:
            self._kill_all_but_root_and_prepared()
        evidence = found.evidence(self.job, candidate, self.environment)
        verdict = evidence.reason or evidence.status.value
        self._tell("done", candidate, verdict, 1.0, {"status": evidence.status.value})
        return evidence

    def _kill_all_but_root_and_prepared(self) -> None:
        kept = [worker for prepared in self._ahead.values() for worker in prepared.workers]
        if self._root is not None and self._root.exception() is None:
            kept.append(self._root.result().worker)
        for worker in self._workers:
            if worker not in kept:
                worker.kill()

    def _timed_stages(self, prepared: Prepared, deadline: float | None) -> None:
        candidate, found = prepared.candidate, prepared.found
        with self._stage("inputs", prepared, deadline):
            programs = self._timed_programs(candidate.level)
        rounds, of = self._rounds(prepared, programs)
        with rounds, self._stage("timing", prepared, deadline):
            timing = self._time(prepared, rounds, programs, of, deadline)
        if timing.step is Step.HOPELESS:
            found.status, found.reason = Status.STOPPED, timing.reason
        elif candidate.level is Level.FULL:
            self._confirm(prepared, timing, deadline)

    def _confirm(self, prepared: Prepared, timing: Timing, deadline: float | None) -> None:
        """The whole domain, unless the second timing refuses already what the domain is checked for."""
        candidate, found = prepared.candidate, prepared.found
        challenger = candidate.source.sha256 != self.job.incumbent.sha256 or self.job.separate
        if challenger and timing.step is not Step.PROVEN:
            found.status, found.reason = Status.STOPPED, "the gain was not confirmed on fresh inputs"
            return
        with self._stage("full", prepared, deadline):
            self._check(Level.FULL, prepared, deadline)
            assert prepared.main is not None
            found.specialisations = prepared.main.specialisations()

    @contextmanager
    def _stage(self, name: str, prepared: Prepared, deadline: float | None = None) -> Iterator[None]:
        if deadline is not None and time.monotonic() > deadline:
            raise Ended(Status.INTERRUPTED, f"the time ended before {name}")
        if name != "inputs":
            self._tell(name, prepared.candidate, name, 0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            prepared.found.seconds.append((name, round(time.perf_counter() - start, 4)))

    def _check(self, level: Level, prepared: Prepared, deadline: float | None) -> None:
        """Check every requirement at one level, under each set of constant axes."""
        found, built, root = prepared.found, prepared.found.built, self._built_root()
        assert built is not None
        workers: dict[Process, Callable[[], Worker]] = {
            "main": lambda: built.worker,
            "root": lambda: root.worker,
        }
        if prepared.fresh is not None:
            workers["fresh"] = prepared.fresh
        hands = Hands(workers, self._root_lock)
        for axes, report, mine, roots in zip(
            self.job.constant_axes, built.reports, built.bits_ids, root.bits_ids, strict=True
        ):
            plan = Plan(
                level, (dict(axes),), report.numerics, report.edges, self.job.dtype, found.seed, mine == roots
            )

            def told(requirement: str, fraction: float) -> None:
                self._tell(level.value, prepared.candidate, requirement, fraction)

            later = () if level is Level.FULL else left_to_full(self.job.workloads)
            run_checks(self.operator, plan, hands, found.verdicts, deadline, told, later)

    # ---- timing

    def _rounds(
        self, prepared: Prepared, programs: tuple[TimedProgram, ...]
    ) -> tuple[Rounds, dict[str, str]]:
        assert prepared.found.built is not None
        contenders, of = contenders_of(
            (self.job.root, self.job.incumbent, prepared.candidate.source),
            self.operator.entry_points,
            programs,
            agrees=prepared.found.built.bits_ids == self._built_root().bits_ids,
            separate=self.job.separate,
        )
        rounds = Rounds(
            contenders,
            lambda contender: self._start(contender.source),
            self._sweep,
            too_slow=self.rule.too_slow,
            ahead=self.rule.least if self.job.device in SLOW_TO_START else 1,
        )
        return rounds, of

    def _time(
        self,
        prepared: Prepared,
        rounds: Rounds,
        programs: tuple[TimedProgram, ...],
        of: Mapping[str, str],
        deadline: float | None,
    ) -> Timing:
        candidate, found = prepared.candidate, prepared.found

        def told(message: str, fraction: float, data: dict[str, float]) -> None:
            self._tell("timing", candidate, message, fraction, data)

        assert found.built is not None
        twin = Later(lambda: self._start(candidate.source))
        together = self.job.device in SLOW_TO_START and rounds.have_twin
        if together:
            twin.begin()
        rounds.begin()
        found.specialisations, found.launches = warm_specialisations(found.built.worker, programs)
        if together:
            twin()
        to_beat = 1.0 if candidate.level is Level.FULL else self._to_beat
        timing = run_timing(rounds, programs, of, self.rule, found.specialisations, deadline, told, to_beat)
        if len(timing.rounds) >= self.rule.least:
            check_clocks(timing.rounds, of["candidate"], programs)
        check_twin(twin, timing.rounds)
        check_plausible(self.operator, self._machine, programs, timing.rounds, of["candidate"])
        found.measurements = timing.measurements(programs, of)
        if timing.step is Step.PROVEN and within_limits(found.measurements):
            self._to_beat = min(self._to_beat, timing.ratio)
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
        root = self._built_root().worker
        rng = np.random.default_rng(secrets.randbits(64))
        program = self.operator.timed(workload, rng, 1, 0, contiguous=False)
        try:
            return call_seconds(root, program)
        except WorkerFailure as failure:
            raise RuntimeError(f"the root fails in {workload.name}: {failure.reason}") from failure

    def _tell(
        self,
        stage: str,
        candidate: Candidate,
        message: str,
        fraction: float | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        event = Event(stage, candidate.source.short, message, fraction, data or {})
        if threading.current_thread() is self._thread:
            self._deliver(event)
        else:
            self._events.put(event)

    def _deliver(self, event: Event) -> None:
        if self._progress is not None:
            self._progress(event)
