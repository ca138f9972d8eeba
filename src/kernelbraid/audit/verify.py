"""Verification of what is shipped or installed: the whole relation suite, over every scope of a contract."""

import ast
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from kernelbraid import ops
from kernelbraid.audit.cases import Case, Process, rebuild, vacuous
from kernelbraid.audit.checks import Memory, check, run_case, together
from kernelbraid.audit.drawings import Plan
from kernelbraid.audit.environment import fingerprint
from kernelbraid.audit.judges import Order, Scope, Told, judged
from kernelbraid.audit.orders import harness_hash
from kernelbraid.audit.partial import Finished, Part
from kernelbraid.audit.process import Limits, Worker, WorkerFailure
from kernelbraid.audit.stages import Built, Hands, build
from kernelbraid.contract import Requirement, Source
from kernelbraid.ir.evidence import Environment, Level, Verdict
from kernelbraid.ops import installed
from kernelbraid.ops.problem import Operator

Progress = Callable[[str, float], None]
"""Told what is being checked, and which fraction is done."""

LIMITS = Limits(build_seconds=300.0, run_seconds=300.0, memory_bytes=8 << 30)
DEVICE_BYTES = 4 << 30
HOST_BYTES = 6 << 30
"""Memory of a GPU, and of the host, for the processes of a scope where several are checked at once."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a verification found."""

    operator: Operator
    source: Source
    against: Source | None
    """The second implementation that bits were compared with."""
    level: Level
    seed: int
    verdicts: tuple[Verdict, ...]
    bits_ids: tuple[tuple[str, str], ...]
    """(constant axes and dtype, bits id)."""
    untested: tuple[tuple[str, str], ...]
    """(requirement, why it was not tested)."""
    specialisations: tuple[str, ...]
    environment: Environment
    seconds: float

    @property
    def held(self) -> bool:
        return all(verdict.held for verdict in self.verdicts)

    @property
    def comparisons(self) -> int:
        return sum(verdict.comparisons for verdict in self.verdicts)

    @property
    def unequal(self) -> int:
        return sum(verdict.difference.unequal for verdict in self.verdicts if verdict.difference is not None)

    def to_json(self) -> dict[str, Any]:
        """The form scripts read."""
        return {
            "operator": self.operator.name,
            "contract": self.operator.contract.name,
            "backend": self.operator.backend,
            "implementation": self.source.sha256,
            "against": self.against.sha256 if self.against is not None else None,
            "level": self.level.value,
            "seed": self.seed,
            "held": self.held,
            "comparisons": self.comparisons,
            "unequal": self.unequal,
            "relations": [_line(verdict) for verdict in self.verdicts],
            "untested": [{"requirement": name, "reason": reason} for name, reason in self.untested],
            "bits_ids": dict(self.bits_ids),
            "environment": {**asdict(self.environment), "versions": dict(self.environment.versions)},
            "seconds": round(self.seconds, 3),
        }


def _line(verdict: Verdict) -> dict[str, Any]:
    name, regime = verdict.requirement.split("/")[2:]
    difference = verdict.difference
    return {
        "requirement": verdict.requirement,
        "relation": name,
        "regime": regime,
        "held": verdict.held,
        "cases": verdict.cases,
        "comparisons": verdict.comparisons,
        "unequal": difference.unequal if difference is not None else 0,
        "error": verdict.error,
        "first_difference": asdict(difference) if difference is not None else None,
    }


def in_use(operator: Operator) -> Source:
    """Return what the public operator runs on this machine: the installed winner, or the shipped source."""
    here = fingerprint(operator.backend, rates=False)
    return installed.active(operator.name, here.architecture, here.device) or ops.source(operator)


def second_implementation(operator: Operator) -> Source | None:
    """Return another implementation to compare bits with, None where there is no other.

    That is the next shipped one; or on the CPU, in a checkout, a file of `examples/roots` with all entry
    points; or the shipped one with another choice of every schedule knob.
    """
    if len(operator.files) > 1:
        return ops.source(operator, operator.files[1])
    roots = Path(__file__).resolve().parents[3] / "examples" / "roots"
    for path in sorted(roots.glob("*.py")) if operator.backend == "cpu" else ():
        source = Source(path.read_text(encoding="utf-8"), label=path.name)
        defined = {node.name for node in ast.parse(source.text).body if isinstance(node, ast.FunctionDef)}
        if defined >= set(operator.entry_points):
            return source
    return with_other_schedule(ops.source(operator))


def with_numerics(source: Source, numerics: Mapping[str, int]) -> Source:
    """Return the source with its numeric knobs set to these values; constants it does not have stay out."""
    text = source.text
    for name, value in numerics.items():
        text = re.sub(rf"(?m)^({re.escape(name.upper())} = )\d+$", rf"\g<1>{value}", text)
    return Source(text, label=source.label)


def with_other_schedule(source: Source) -> Source | None:
    """Return the source with the first other choice of every schedule knob, None where there is no choice."""
    text = source.text
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="KNOBS")], value=knobs):
                for name, (kind, choices) in ast.literal_eval(knobs).items():
                    text = _with_other_choice(text, name, choices) if kind == "schedule" else text
    return Source(text, label=f"{source.label}, another schedule") if text != source.text else None


def _with_other_choice(text: str, name: str, choices: Sequence[object]) -> str:
    assigned = re.compile(rf"(?m)^({re.escape(name)} = )(.+)$")
    found = assigned.search(text)
    if found is None:
        return text
    value = ast.literal_eval(found[2])
    other = next((each for each in choices if each != value), value)
    return assigned.sub(lambda match: f"{match[1]}{other!r}", text, count=1)


def verify(
    operator: Operator,
    *,
    level: Level = Level.FULL,
    source: Source | None = None,
    against: Source | None = None,
    seed: int | None = None,
    resume: bool = False,
    progress: Progress = lambda _, __: None,
) -> Report:
    """Check every requirement of an operator's contract over its scopes, and go on after one that fails.

    Args:
        operator: what to verify.
        level: `screen` draws less, over the same scopes but those of the largest tensors.
        source: an implementation; by default the one in use on this machine.
        against: another implementation, whose bits must be equal where its bits id is; by default found.
        seed: of the inputs; by default drawn.
        resume: keep what is found in the user's data folder until all scopes are done, and begin with what
            an interrupted verification of the same subject kept there, its seed too.
        progress: told of every requirement.

    Raises:
        ValueError: its device is not there.
        RuntimeError: an implementation does not build, crashes or hangs, or nothing can be kept.
    """
    environment = fingerprint(operator.backend, rates=False)
    source = source or in_use(operator)
    against = against or second_implementation(operator)
    finished = _finished(operator, source, against, level, environment) if resume else None
    seed = secrets.randbits(31) if seed is None else seed
    seed = seed if finished is None else finished.seed(seed)
    start = time.perf_counter()
    task = _Task(operator, environment.architecture, source, against, level, seed, progress, finished)
    scopes = at_level(operator, scopes_of(operator), level)
    parts = task.run([(tuple(a.items()), dtype) for a, dtype in product(scopes, operator.contract.dtypes)])
    verdicts: dict[str, Verdict] = {}
    untested: dict[str, str] = {}
    for part in parts:
        untested |= part.untested
        for verdict in part.verdicts:
            verdicts[verdict.requirement] = together(verdicts.get(verdict.requirement), verdict)
    if finished is not None:
        finished.clear()
    return Report(
        operator=operator,
        source=source,
        against=against,
        level=level,
        seed=seed,
        verdicts=tuple(verdicts.values()),
        bits_ids=tuple((part.scope, part.bits_id) for part in parts),
        untested=tuple((name, reason) for name, reason in untested.items() if name not in verdicts),
        specialisations=tuple(sorted({kernel for part in parts for kernel in part.specialisations})),
        environment=environment,
        seconds=time.perf_counter() - start,
    )


@dataclass(frozen=True, slots=True)
class _Task:
    """A verification; its scopes are checked one after the other on a CPU, by several judges on a GPU."""

    operator: Operator
    architecture: str
    source: Source
    against: Source | None
    level: Level
    seed: int
    progress: Progress
    finished: Finished | None = None

    def run(self, scopes: Sequence[Scope]) -> list[Part]:
        found = {scope: part for scope in scopes if (part := self._known(scope)) is not None}
        left = [scope for scope in scopes if scope not in found]
        known = len(found)

        def told(scope: Scope, requirement: str, done: float) -> None:
            self.progress(f"{self._text(scope)}: {requirement}", (known + done) / len(scopes))

        judges = min(len(left), scopes_together(self.operator.backend))
        for scope, part in self._alone(left, told) if judges < 2 else self._together(left, judges, told):
            found[scope] = part
            if self.finished is not None:
                self.finished.keep(part)
        return [found[scope] for scope in scopes]

    def _alone(self, scopes: Sequence[Scope], told: Told) -> Iterator[tuple[Scope, Part]]:
        with _Bench(self.operator, self.architecture) as bench:
            for done, scope in enumerate(scopes):

                def tell(requirement: str, share: float, scope: Scope = scope, done: int = done) -> None:
                    told(scope, requirement, done + share)

                yield scope, self.scope(bench, scope, tell)

    def _together(self, scopes: Sequence[Scope], judges: int, told: Told) -> Iterator[tuple[Scope, Part]]:
        here, subject = (self.operator.name, self.operator.backend, self.architecture), self.source
        order = Order(*here, subject, self.against, self.level, self.seed)
        return judged(_judge, order, scopes, judges, told)

    def _known(self, scope: Scope) -> Part | None:
        return None if self.finished is None else self.finished.find(self._text(scope))

    def _text(self, scope: Scope) -> str:
        axes, dtype = dict(scope[0]), scope[1]
        constant = ",".join(f"{a.name}={axes[a.name]}" for a in self.operator.contract.axes if a.constant)
        return f"{constant},{dtype}"

    def scope(self, bench: "_Bench", scope: Scope, told: Progress) -> Part:
        """Check every requirement in one scope; `told` of each and of the share of them that is done."""
        axes, dtype = dict(scope[0]), scope[1]
        main = bench.built(self.source, axes, dtype)
        root, reason = bench.agreeing(self.against, main, axes, dtype)
        fresh = bench.fresh(self.source, axes, dtype)
        plan = _plan(self.level, axes, dtype, main, self.seed, root is not None)
        requirements = self.operator.contract.requirements
        wanted = [each for each in requirements if not vacuous(each, plan)]
        verdicts = []
        hands = Hands(_processes(main, fresh, root))
        for verdict in _verdicts(self.operator, plan, hands, wanted):
            verdicts.append(verdict)
            told(verdict.requirement, len(verdicts) / len(wanted))
        fresh.worker.kill()
        untested = {each.id: reason for each in requirements if each not in wanted}
        return Part(self._text(scope), main.bits_id, tuple(verdicts), untested, main.worker.specialisations())


def _judge(order: Order, scope: Scope, told: Progress) -> Part:
    """What a judge in a process of its own does with a scope."""
    operator = ops.get(order.operator, order.backend)
    subject = (operator, order.architecture, order.source, order.against)
    task = _Task(*subject, order.level, order.seed, told)
    with _Bench(operator, order.architecture) as bench:
        return task.scope(bench, scope, told)


def scopes_together(backend: str) -> int:
    """Return how many scopes are checked at a time.

    One on a CPU. On a GPU a core for each, as memory allows: the time goes into compiling and into the judge.
    """
    if backend == "cpu":
        return 1
    import torch

    cores = len(os.sched_getaffinity(0))
    device, _ = torch.cuda.mem_get_info()
    host = int(psutil.virtual_memory().available)
    return max(1, min(cores, device // DEVICE_BYTES, host // HOST_BYTES))


def _finished(
    operator: Operator, source: Source, against: Source | None, level: Level, environment: Environment
) -> Finished:
    """Where the finished scopes of a verification are kept: all that findings depend on names the place."""
    here = (environment.architecture, environment.device, environment.versions)
    judged = (operator.contract.hash, harness_hash(operator.name), level.value)
    return Finished((source.sha256, None if against is None else against.sha256, judged, here))


def verify_case(operator: Operator, case_id: str, *, source: Source | None = None) -> tuple[Case, Verdict]:
    """Rebuild one case from its id and run it alone.

    Raises:
        ValueError: the id is not one of this operator's cases, or it needs a second implementation.
        RuntimeError: an implementation does not build, crashes or hangs.
    """
    environment = fingerprint(operator.backend, rates=False)
    case, plan = rebuild(operator, case_id)
    source = source or in_use(operator)
    axes = plan.constant_axes[0]
    with _Bench(operator, environment.architecture) as bench:
        main = bench.built(source, axes, plan.dtype)
        root: Built | None = None
        if case.right is not None and case.right.process == "root":
            root, reason = bench.agreeing(second_implementation(operator), main, axes, plan.dtype)
            if root is None:
                raise ValueError(f"{case_id} cannot be run: {reason}")
        hands = Hands(_processes(main, bench.fresh(source, axes, plan.dtype), root))
        with _named(case_id):
            return case, run_case(operator, case, Memory(operator, hands))


def scopes_of(operator: Operator) -> tuple[dict[str, int], ...]:
    """Every set of constant axes that a verification covers: those stated, and those of its grids."""
    covered = [grid for name, grid in operator.grids.items() if name not in operator.figures]
    used = [operator.constant_axes(workload) for grid in covered for workload in grid]
    found: list[dict[str, int]] = []
    for scope in (*used, *map(dict, operator.scopes)):
        if scope not in found:
            found.append(scope)
    return tuple(found)


def at_level(
    operator: Operator, scopes: Sequence[dict[str, int]], level: Level
) -> tuple[dict[str, int], ...]:
    """Leave out the scopes that only a full verification covers."""
    left = operator.left_to_full if level != Level.FULL else ()
    return tuple(scope for scope in scopes if scope not in left)


class _Bench:
    """The workers of a verification."""

    def __init__(self, operator: Operator, architecture: str) -> None:
        self._operator = operator
        self._architecture = architecture
        self._stack = ExitStack()
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> "_Bench":
        self._scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kernelbraid-")))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End its processes."""
        self._stack.close()

    def built(self, source: Source, axes: Mapping[str, int], dtype: str) -> Built:
        """A source in a process that it keeps, built for these axes."""
        if source.sha256 not in self._workers:
            self._workers[source.sha256] = self._start(source)
        return self._build(self._workers[source.sha256], axes, dtype)

    def fresh(self, source: Source, axes: Mapping[str, int], dtype: str) -> Built:
        """A source in a new process."""
        return self._build(self._start(source), axes, dtype)

    def agreeing(
        self, against: Source | None, main: Built, axes: Mapping[str, int], dtype: str
    ) -> tuple[Built | None, str]:
        """The second implementation with the first one's numerics, or None and the reason."""
        if against is None:
            return None, "there is no second implementation"
        other = self.built(with_numerics(against, main.numerics), axes, dtype)
        if other.bits_id != main.bits_id:
            return None, f"{against.label or against.short} has other numerics"
        return other, ""

    def _start(self, source: Source) -> Worker:
        entry_points = self._operator.entry_points
        compiled = installed.home() / "compiled"
        worker = Worker(
            source,
            entry_points,
            scratch=self._scratch,
            cache=compiled,
            limits=LIMITS,
            device=self._operator.backend,
        )
        self._stack.callback(worker.kill)
        return worker

    def _build(self, worker: Worker, axes: Mapping[str, int], dtype: str) -> Built:
        try:
            return build(worker, self._operator, (axes,), dtype, self._architecture)
        except WorkerFailure as failure:
            name = worker.source.label or worker.source.short
            raise RuntimeError(f"{name} does not build: {failure.reason}") from failure


def _processes(main: Built, fresh: Built, root: Built | None) -> dict[Process, Callable[[], Worker]]:
    processes: dict[Process, Callable[[], Worker]] = {
        "main": lambda: main.worker,
        "fresh": lambda: fresh.worker,
    }
    if root is not None:
        processes["root"] = lambda: root.worker
    return processes


def _plan(level: Level, axes: dict[str, int], dtype: str, main: Built, seed: int, root_agrees: bool) -> Plan:
    report = main.reports[0]
    return Plan(level, (axes,), report.numerics, report.edges, dtype, seed, root_agrees)


def _verdicts(
    operator: Operator, plan: Plan, hands: Hands, wanted: Sequence[Requirement]
) -> Iterator[Verdict]:
    memory = Memory(operator, hands)
    for requirement in wanted:
        with _named(requirement.id):
            yield check(operator, requirement, plan, hands, memory=memory)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """A worker's failure as an error that says where it happened."""
    try:
        yield
    except WorkerFailure as failure:
        raise RuntimeError(f"{failure.reason}, in a check of {what}") from failure
