"""The stages of an audit that need processes: building, checking, timing."""

import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

import numpy as np

from kernelbraid.audit import environment, tripwires
from kernelbraid.audit.cases import Process, vacuous
from kernelbraid.audit.checks import Memory, check, together
from kernelbraid.audit.drawings import Plan
from kernelbraid.audit.measure import (
    BATCHES,
    Block,
    ContenderFailure,
    Round,
    Rounds,
    TooSlow,
    repeat_by_twin,
)
from kernelbraid.audit.orders import AuditJob, Candidate
from kernelbraid.audit.pools import Machine, TimedProgram
from kernelbraid.audit.process import BuildReport, Worker, WorkerFailure
from kernelbraid.audit.timing import Sequential, Step, bound, smallest_gain, totals
from kernelbraid.contract import Regime, Source, content_hash
from kernelbraid.ir.evidence import ACCEPTED, AuditEvidence, Environment, Launch, Measurement, Status, Verdict
from kernelbraid.ops.problem import Array, Layout, Operator, ProblemShape, Program

MARGIN = 1.2
"""A time below the machine's bound by more than this factor is implausible."""
TRIES = 3
"""Times the rates are measured again before that."""
DISAGREEMENT = 0.20
"""Share, beside a millisecond, by which a worker's clock may differ from the judge's."""


class Ended(Exception):  # noqa: N818 - a result
    """An audit ends here: how, and why."""

    def __init__(self, status: Status, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.output = output


@dataclass(frozen=True, slots=True)
class Built:
    """A worker whose implementation is compiled, with one report for each set of constant axes."""

    worker: Worker
    reports: tuple[BuildReport, ...]
    bits_ids: tuple[str, ...]

    @property
    def bits_id(self) -> str:
        """One bits id, whatever the number of sets of constant axes."""
        return self.bits_ids[0] if len(self.bits_ids) == 1 else content_hash(self.bits_ids)[:16]

    @property
    def numerics(self) -> dict[str, int]:
        return self.reports[0].numerics


@dataclass(slots=True)
class Findings:
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
    launches: tuple[Launch, ...] = ()
    seconds: list[tuple[str, float]] = field(default_factory=list)

    def evidence(self, job: AuditJob, candidate: Candidate, environment: Environment) -> AuditEvidence:
        """The record; times are dropped unless everything holds."""
        built = self.built
        return AuditEvidence(
            job=candidate.request,
            implementation=candidate.source.sha256,
            root=job.root.sha256,
            incumbent=job.incumbent.sha256,
            level=candidate.level,
            status=self.status,
            reason=self.reason,
            bits_id=built.bits_id if built is not None else None,
            numerics=tuple(sorted(built.numerics.items())) if built is not None else (),
            verdicts=tuple(self.verdicts.values()),
            measurements=self.measurements if self.status in ACCEPTED else (),
            specialisations=self.specialisations,
            launches=self.launches if self.status in ACCEPTED else (),
            seconds=tuple(self.seconds),
            seed=self.seed,
            environment=environment,
            harness=job.harness,
            output=self.output or (built.worker.printed if built is not None else ""),
            started=self.started,
        )


def build(
    worker: Worker,
    operator: Operator,
    constant_axes: Sequence[Mapping[str, int]],
    dtype: str,
    architecture: str,
    later: Container[Regime] = (),
) -> Built:
    """Import, ask for numerics and edges, and compile by a small call in every regime but those of `later`.

    Raises WorkerFailure.
    """
    reports = tuple(worker.build(operator.contract, axes) for axes in constant_axes)
    for axes in constant_axes:
        for regime in [each for each in operator.regimes if each not in later]:
            shape = _shape(operator, axes, (1, 1) if regime == "decode" else (3, 40), dtype)
            problem = operator.draw(shape, np.random.default_rng(0))
            worker.execute(operator.lower(problem, Layout(regime, (0, 1))))
    ids = (
        operator.contract.bits_id(report.numerics, dtype, axes, architecture)
        for report, axes in zip(reports, constant_axes, strict=True)
    )
    return Built(worker, reports, tuple(ids))


def warm_reference(operator: Operator, constant_axes: Mapping[str, int], dtype: str) -> None:
    """Let the reference and the vendor's kernel import what they need, while workers build."""
    problem = operator.draw(_shape(operator, constant_axes, (3,), dtype), np.random.default_rng(0))
    operator.reference(problem)
    operator.vendor(problem)


def _shape(
    operator: Operator, constant_axes: Mapping[str, int], rows: tuple[int, ...], dtype: str
) -> ProblemShape:
    constant = tuple((a.name, constant_axes[a.name]) for a in operator.contract.axes if a.constant)
    return ProblemShape(constant, (3, 40)[: len(rows)], rows, "normal", dtype)


def tripped(source: Source, backend: str) -> Ended | None:
    """How an audit ends at the tripwires, if it does."""
    try:
        findings = tripwires.scan(source.text, backend)
    except (SyntaxError, ValueError, MemoryError) as error:
        return Ended(Status.BUILD_FAILED, f"the source cannot be parsed: {error}")
    if findings:
        more = f" and {len(findings) - 1} more" if len(findings) > 1 else ""
        return Ended(Status.TRIPWIRE, f"{findings[0]}{more}")
    return None


class Later:
    """A process that may be told to import before it is needed.

    Args:
        worker: the process, or what starts it.
    """

    def __init__(self, worker: Worker | Callable[[], Worker]) -> None:
        self._start = worker
        self._begun = self._ready = False

    @cached_property
    def worker(self) -> Worker:
        return self._start if isinstance(self._start, Worker) else self._start()

    def begin(self) -> None:
        if not self._begun:
            self._begun = True
            self.worker.begin_build()

    def __call__(self) -> Worker:
        self.begin()
        if not self._ready:
            self.worker.finish()
            self._ready = True
        return self.worker


class Hands:
    """Runs the checks' programs in the processes that they name.

    Args:
        workers: how to get each process; called at its first use.
        root_lock: held while the root runs, where candidates that are checked at the same time share it.
    """

    def __init__(
        self, workers: Mapping[Process, Callable[[], Worker]], root_lock: "Lock | None" = None
    ) -> None:
        self._workers = workers
        self._root_lock = root_lock or Lock()

    def run(self, program: Program, process: Process) -> Mapping[str, Array]:
        return self._in(process, lambda worker: worker.execute(program))

    def replay(self, captured: Program, program: Program, process: Process) -> Mapping[str, Array]:
        return self._in(process, lambda worker: worker.replay(captured, program))

    def _in(self, process: Process, work: Callable[[Worker], Mapping[str, Array]]) -> Mapping[str, Array]:
        if process != "root":
            return work(self._workers[process]())
        with self._root_lock:
            root = self._workers["root"]()
            if root.dead:
                raise RuntimeError("the root failed in a check of another candidate")
            try:
                return work(root)
            except WorkerFailure as failure:
                raise RuntimeError(f"the root failed in a check: {failure.reason}") from failure


def run_checks(
    operator: Operator,
    plan: Plan,
    hands: Hands,
    verdicts: dict[str, Verdict],
    deadline: float | None,
    told: Callable[[str, float], None],
    later: Container[Regime] = (),
) -> None:
    """Check every requirement that a plan asks something of, and add the verdicts to those before.

    Requirements of the regimes in `later` are left out.

    Raises:
        Ended: a requirement does not hold, a worker failed, or the time is over.
    """
    memory = Memory(operator, hands)
    wanted = [r for r in operator.contract.requirements if not vacuous(r, plan) and r.regime not in later]
    for number, requirement in enumerate(wanted):
        told(requirement.id, number / len(wanted))
        try:
            verdict = check(operator, requirement, plan, hands, deadline, memory)
        except TimeoutError as error:
            raise Ended(Status.INTERRUPTED, str(error)) from error
        except WorkerFailure as failure:
            reason = f"{failure.reason}, in a check of {requirement.id}"
            raise Ended(failure.status, reason, failure.output) from failure
        verdicts[requirement.id] = together(verdicts.get(requirement.id), verdict)
        if not verdict.held:
            status = Status.INACCURATE if requirement.kind == "accuracy" else Status.BITS_UNEQUAL
            raise Ended(status, _failed(requirement.id, verdict))


def _failed(requirement: str, verdict: Verdict) -> str:
    found = verdict.difference
    if found is None:
        return f"{requirement} does not hold"
    return f"{requirement} does not hold: {found.place}: {found.left} is not {found.right}"


def warm_specialisations(
    worker: Worker, programs: Sequence[TimedProgram]
) -> tuple[tuple[str, ...], tuple[Launch, ...]]:
    """Let the checks' process call every timed program; list what it has compiled by then, and launches.

    Once each; where calls are captured in graphs, all of them, since addresses may decide what is compiled.
    """
    launches: list[Launch] = []
    for program in programs:
        loaded = worker.begin_load(program.program, program.inputs, calls=1, capture=program.repeats)
        worker.finish()
        launches += (Launch(program.workload.name, *each) for each in worker.launches(loaded))
        worker.drop(loaded)
    return worker.specialisations(), tuple(launches)


@dataclass(frozen=True, slots=True)
class Timing:
    """What a timing found."""

    step: Step
    reason: str
    rounds: tuple[Round, ...]
    ratio: float = math.inf
    """The candidate's aggregate over the incumbent's."""

    def measurements(
        self, programs: Sequence[TimedProgram], of: Mapping[str, str]
    ) -> tuple[Measurement, ...]:
        """One measurement a workload; `of` maps roles to contenders."""
        return tuple(
            Measurement(
                workload=program.workload.name,
                phase=program.workload.phase,
                weight=program.workload.weight,
                limit=program.workload.limit,
                protocol="cold",
                candidate_ms=tuple(r.ms[of["candidate"]][index] for r in self.rounds),
                root_ms=tuple(r.ms[of["root"]][index] for r in self.rounds),
                incumbent_ms=tuple(r.ms[of["incumbent"]][index] for r in self.rounds),
                calls=BATCHES[program.device] * program.calls * len(self.rounds),
                bound_ms=program.bound_ms,
            )
            for index, program in enumerate(programs)
            if self.rounds
        )


def run_timing(
    rounds: Rounds,
    programs: Sequence[TimedProgram],
    of: Mapping[str, str],
    rule: Sequential,
    allowed: Sequence[str],
    deadline: float | None,
    told: Callable[[str, float, dict[str, float]], None],
    to_beat: float = 1.0,
) -> Timing:
    """Measure rounds until the rule has enough.

    Args:
        rounds: the contenders.
        programs: what they are timed on.
        of: role -> contender.
        rule: when to stop.
        allowed: specialisations that the checks have seen; timing may launch no other.
        deadline: a time of `time.monotonic()` after which no round begins.
        told: progress.
        to_beat: share of the incumbent's time that another candidate needs.

    Raises:
        Ended: the candidate failed, launched something new, or the time is over.
        RuntimeError: the root or the incumbent failed.
    """
    weights = [program.workload.weight for program in programs]
    done: list[Round] = []
    step = Step.CONTINUE
    while step is Step.CONTINUE:
        if deadline is not None and time.monotonic() > deadline:
            raise Ended(Status.INTERRUPTED, "the time for this audit ended while it was timed")
        try:
            done.append(rounds.measure())
        except TooSlow as slow:
            return Timing(Step.HOPELESS, str(slow), tuple(done))
        except ContenderFailure as failed:
            raise _blamed(failed, of) from failed
        new = set(done[-1].specialisations.get(of["candidate"], ())) - set(allowed)
        if new:
            raise Ended(Status.TAMPERED, f"timing launched what the checks had not: {min(new)}")
        mine, theirs = (
            totals(weights, list(zip(*(r.ms[of[role]] for r in done), strict=True)))
            for role in ("candidate", "incumbent")
        )
        step = rule.after(mine, theirs, to_beat)
        ratio, upper, _ = bound(mine, theirs, rule.confidence)
        gain = smallest_gain(mine, theirs, rule.confidence)
        data = {"ratio": ratio, "upper": upper, "smallest_gain": gain}
        message = f"{len(done)} processes: {ratio:.4f} of the incumbent's time"
        told(message, len(done) / rule.most, {k: v for k, v in data.items() if math.isfinite(v)})
    reason = ""
    if step is Step.HOPELESS:
        reason = f"{ratio:.4f} of the incumbent's time after {len(done)} processes"
        reason += f", where another candidate needs {to_beat:.4f}" if to_beat < 1 else ""
    return Timing(step, reason, tuple(done), ratio)


def _blamed(failed: ContenderFailure, of: Mapping[str, str]) -> Exception:
    if failed.name != of["candidate"]:
        return RuntimeError(f"the {failed.name} failed while it was timed: {failed.failure.reason}")
    return Ended(failed.failure.status, failed.failure.reason, failed.failure.output)


def check_twin(twin: Later, rounds: Sequence[Round]) -> None:
    """Compare what was timed with another process of the candidate; raises Ended where bits differ."""
    blocks: list[Block] = [block for each in rounds for block in each.blocks]
    if not blocks:
        return
    try:
        with twin() as worker:
            repeat_by_twin(worker, blocks)
    except WorkerFailure as failure:
        raise Ended(failure.status, failure.reason, failure.output) from failure


def check_clocks(rounds: Sequence[Round], name: str, programs: Sequence[TimedProgram]) -> None:
    """Refuse a contender whose own clock disagrees with the judge's in every batch of a workload.

    In every batch, because a busy machine delays the judge in some. Raises Ended.
    """
    for index, program in enumerate(programs):
        batches = [clock for each in rounds for clock in each.clocks[name][index]]
        if all(abs(ours - theirs) > DISAGREEMENT * ours + 1e-3 for ours, theirs in batches):
            ours, theirs = batches[0]
            says = f"the worker's clock says {1e3 * theirs:.1f} ms, the judge's {1e3 * ours:.1f} ms"
            raise Ended(Status.IMPLAUSIBLE, f"{says}, and so in every batch of {program.workload.name}")


def check_plausible(
    operator: Operator, machine: Machine, programs: Sequence[TimedProgram], rounds: Sequence[Round], name: str
) -> None:
    """Refuse times below what the machine's rates allow; the rates are measured again before that.

    Raises Ended.
    """

    def impossible() -> list[tuple[TimedProgram, float]]:
        fastest = ((p, min(r.ms[name][i] for r in rounds)) for i, p in enumerate(programs) if rounds)
        return [(program, ms) for program, ms in fastest if ms * MARGIN < program.bound_ms]

    if not impossible():
        return
    for _ in range(TRIES):
        flops, bandwidth = environment.measured_rates(operator.backend, again=True)
        again = Machine(machine.cache_bytes, flops, bandwidth)
        for program in programs:
            program.bound_ms = again.bound_ms(operator, program.workload)
        if not impossible():
            return
    for program, ms in impossible():
        reason = (
            f"{ms:.4g} ms for {program.workload.name}, where this machine needs {program.bound_ms:.4g} ms"
        )
        raise Ended(Status.IMPLAUSIBLE, reason)
