"""The audit tested on itself: hostile candidates, identical candidates, swapped candidates.

Fixtures go through the stages of a real audit beside the shipped implementation; none may be promoted, and
each must end as it should. Swapped labels: a slow twin is audited beside the honest source, then the honest
source beside its slow twin; the faster one must win either way. Trials time the shipped implementation
against itself in processes of their own, as a search and then its confirmation would; hardly any may be
promoted. What was found is kept until the test ends: one that was interrupted goes on.
"""

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from kernelbraid import ops
from kernelbraid.audit.environment import fingerprint
from kernelbraid.audit.fixtures import FIXTURES, Fixture
from kernelbraid.audit.judge import Judge
from kernelbraid.audit.measure import Contender, ContenderFailure, Rounds, TooSlow, call_seconds
from kernelbraid.audit.orders import AuditJob, Candidate, harness_hash
from kernelbraid.audit.pools import Machine, TimedProgram, sweep_of, timed_programs
from kernelbraid.audit.process import Limits, Worker
from kernelbraid.audit.timing import Sequential, Step, totals
from kernelbraid.contract import BitPolicy, Source, Workload, content_hash
from kernelbraid.ir.evidence import ACCEPTED, AuditEvidence, Level, Status
from kernelbraid.ops import installed
from kernelbraid.ops.problem import Operator

Pair = tuple[Sequence[float], Sequence[float]]
"""Aggregate milliseconds of the candidate and of the incumbent, one entry a process."""

PROMOTED = "promoted"

Promotable = Callable[[AuditEvidence], bool]
"""Whether the promotion rule holds on an audit's evidence, against the root as incumbent."""

LIMITS = {
    "cpu": Limits(build_seconds=30.0, run_seconds=30.0, memory_bytes=1 << 30),
    "cuda": Limits(build_seconds=120.0, run_seconds=60.0, memory_bytes=4 << 30),
}
WORKLOADS = 2
"""Workloads that are timed: the cheapest of the operator's study grid, of different phases."""
COMPLETE = 5
"""Every so many trials, one is timed for all rounds: what could have been proven is found from these."""
MOST_FALSE = 0.01
"""Share of trials of identical source that may be promoted."""
SHARE = 0.8
"""Share of trials in which the stated smallest gain is proven."""

SLOWED = Fixture(
    "twice_the_work",
    "timing",
    """
def _exploit(honest, arguments, named):
    honest(*arguments, **named)
    return honest(*arguments, **named)
""",
    (Status.STOPPED,),
)


@dataclass(frozen=True, slots=True)
class Observed:
    """How the audit of one source ended."""

    name: str
    kind: str
    expected: tuple[str, ...]
    observed: str
    """A status, `promoted`, or `audit_failed`."""
    promoted: bool
    reason: str


class Kept:
    """What a self-test has found so far, one synced line a step, until it ends.

    Args:
        subject: all that the findings depend on.
        folder: where such files live; by default in the user's data folder.

    Raises:
        ValueError: another process runs the same self-test.
        RuntimeError: the file cannot be written.
    """

    def __init__(self, subject: object, folder: Path | None = None) -> None:
        self.path = (folder or installed.home() / "selftest") / f"{content_hash(subject)[:32]}.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = open(self.path, "ab+")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise RuntimeError(f"cannot write {self.path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError("the same self-test runs already: wait for it, or end it") from error
        self._found: dict[str, Any] = {}
        self._file.seek(0)
        whole = 0
        for line in self._file.read().splitlines(keepends=True):
            try:
                step, found = json.loads(line)
            except ValueError:
                break  # cut off when the test was ended
            if not line.endswith(b"\n"):
                break
            self._found[step] = found
            whole += len(line)
        self._file.truncate(whole)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, step: str) -> bool:
        return step in self._found

    def of(self, step: str, find: Callable[[], Any]) -> Any:
        """What was found in a step, by finding it now if it was not done; JSON-able."""
        if step not in self._found:
            self._found[step] = find()
            try:
                self._file.write(json.dumps([step, self._found[step]]).encode() + b"\n")
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise RuntimeError(f"cannot write {self.path}: {error.strerror or error}") from error
        return self._found[step]

    def clear(self) -> None:
        """Forget all of it: the self-test is done."""
        with contextlib.suppress(OSError):
            self.path.unlink()


def selftest(
    operator: Operator,
    promotable: Promotable,
    *,
    honest: Source | None = None,
    trials: int = 10,
    fixtures: Sequence[Fixture] = FIXTURES,
    progress: Callable[[str], None] = lambda _: None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Run fixtures, swapped labels and trials, and return a JSON-able document.

    One that was interrupted goes on with the first step that had not ended, on the same machine with the same
    arguments.

    Args:
        operator: what the candidates implement.
        promotable: the promotion rule.
        honest: the implementation that is abused; by default the shipped one.
        trials: of identical source.
        fixtures: hostile candidates to audit; written for CPUs, so none elsewhere.
        progress: told of each step in a few words.
        folder: where findings are kept until the end; by default in the user's data folder.

    Raises:
        ValueError: its device is not there, fixtures are asked for on a GPU, or the same test runs already.
        RuntimeError: findings cannot be written.
    """
    if operator.backend != "cpu" and fixtures:
        raise ValueError(
            f"the self-test's hostile candidates are written for the CPU, not for {operator.backend}: "
            "without --fixture it times identical sources; `python -m pytest tests/gpu` audits hostile ones"
        )
    source = honest or ops.source(operator)
    here = fingerprint(operator.backend)
    judged = (operator.name, operator.contract.hash, harness_hash(operator.name), source.sha256)
    asked = (trials, [(each.name, each.code, each.expected) for each in fixtures])
    subject = (judged, asked, (here.architecture, here.device, here.versions))
    with (
        tempfile.TemporaryDirectory(prefix="kernelbraid-selftest-") as scratch,
        Kept(subject, folder) as kept,
    ):
        test = _Selftest(operator, promotable, source, Path(scratch), progress, kept)
        if kept:
            progress(f"goes on after {len(kept)} steps of an interrupted run, which are not repeated")
        hostile = [test.hostile(fixture) for fixture in fixtures]
        swapped = list(test.swapped()) if operator.backend == "cpu" and len(fixtures) != 1 else []
        document = {
            "operator": operator.name,
            "environment": {**asdict(test.environment), "versions": dict(test.environment.versions)},
            "fixtures": [asdict(each) for each in (*hostile, *swapped)],
            "unexpected": [each.name for each in (*hostile, *swapped) if each.observed not in each.expected],
            "promoted_exploits": sum(each.promoted for each in hostile),
            **test.trials(trials),
        }
        kept.clear()
        return document


def passed(document: Mapping[str, Any]) -> bool:
    """Whether everything ended as it should, and at most one trial in a hundred was promoted."""
    few = document["false_promotions"] <= MOST_FALSE * max(document["trials"], 1)
    return not document["unexpected"] and not document["promoted_exploits"] and few


class _Selftest:
    def __init__(
        self,
        operator: Operator,
        promotable: Promotable,
        honest: Source,
        scratch: Path,
        progress: Callable[[str], None],
        kept: Kept,
    ) -> None:
        self.operator = operator
        self.promotable = promotable
        self.environment = fingerprint(operator.backend)
        self.honest = honest
        self.workloads = cheapest(operator)
        self._scratch = scratch
        self._tell = progress
        self._kept = kept
        self._sweep = sweep_of(operator.backend, self.environment.cache_bytes)

    # ---- audits

    def hostile(self, fixture: Fixture) -> Observed:
        """Audit one hostile source beside the honest one."""

        def audited() -> Observed:
            evidence = self._audit(self.honest, fixture.source(self.honest, self.operator.entry_points))
            return self._observed(fixture.name, fixture.kind, fixture.expected, evidence)

        return self._once(fixture.name, audited)

    def swapped(self) -> Iterator[Observed]:
        """Audit a slow twin beside the honest source, then the honest one beside its slow twin."""
        slow = SLOWED.source(self.honest, self.operator.entry_points)

        def slow_beside_honest() -> Observed:
            evidence = self._audit(self.honest, slow)
            return self._observed("slow_beside_honest", "swapped_labels", SLOWED.expected, evidence)

        def honest_beside_slow() -> Observed:
            evidence = self._audit(slow, self.honest)
            won = isinstance(evidence, AuditEvidence) and self.promotable(evidence)
            found = self._observed("honest_beside_slow", "swapped_labels", (), evidence)
            return replace(found, expected=(PROMOTED,), observed=PROMOTED if won else found.observed)

        yield self._once("slow_beside_honest", slow_beside_honest)
        yield self._once("honest_beside_slow", honest_beside_slow)

    def _once(self, step: str, audited: Callable[[], Observed]) -> Observed:
        """What an audit ended as, here or before the test was interrupted."""
        found = self._kept.of(step, lambda: asdict(audited()))
        return Observed(**{**found, "expected": tuple(found["expected"])})

    def _audit(self, root: Source, candidate: Source) -> AuditEvidence | RuntimeError:
        """Audit one candidate at `screen`, by a judge of its own; an audit that cannot end is its result."""
        request = Candidate(secrets.token_hex(8), candidate, Level.SCREEN)
        job = AuditJob(
            id=secrets.token_hex(8),
            study="selftest",
            operator=self.operator.name,
            contract=self.operator.contract.hash,
            harness=harness_hash(self.operator.name),
            device=self.operator.backend,
            level=Level.SCREEN,
            policy=BitPolicy.MUTUAL,
            dtype=self.operator.contract.dtypes[0],
            constant_axes=(self.operator.constant_axes(self.workloads[0]),),
            workloads=self.workloads,
            root=root,
            incumbent=root,
            candidates=(request,),
        )
        compiled, scratch = self._scratch / "compiled", self._scratch / "run"
        try:
            with Judge(
                job, self.operator, limits=LIMITS[self.operator.backend], scratch=scratch, compiled=compiled
            ) as judge:
                return judge.audit(request)
        except RuntimeError as error:
            return error

    def _observed(
        self, name: str, kind: str, expected: tuple[Status, ...], evidence: AuditEvidence | RuntimeError
    ) -> Observed:
        names = tuple(each.value for each in expected)
        if isinstance(evidence, RuntimeError):
            found = Observed(name, kind, names, "audit_failed", False, str(evidence))
        else:
            promoted = evidence.status in ACCEPTED and self.promotable(evidence)
            found = Observed(name, kind, names, evidence.status.value, promoted, evidence.reason)
        self._tell(f"{kind} {name}: {found.observed} {found.reason}".rstrip())
        return found

    # ---- trials

    def trials(self, count: int) -> dict[str, Any]:
        """Time the honest source against itself, as the search and then its confirmation would."""
        rule = Sequential()
        proven = promoted = failed = 0
        complete: list[Pair] = []
        programs: tuple[TimedProgram, ...] = ()
        started, here = time.monotonic(), 0
        for number in range(count):
            whole, known = number % COMPLETE == 0, f"trial {number}" in self._kept
            if not (known or programs):
                programs = self._programs()
            pair = self._kept.of(f"trial {number}", partial(self._pair, programs, rule, whole))
            if pair is None:
                failed += 1
                continue
            if whole:
                complete.append(pair)
            if walk(rule, *pair) is Step.PROVEN:
                proven += 1
                # A step of its own: a trial that was interrupted here must not be drawn again.
                promoted += self._kept.of(f"trial {number}, confirmed", partial(self._confirmed, rule))
            here += not known
            if not known:
                left = (time.monotonic() - started) / here * (count - number - 1)
                about = f"{left / 60:.0f} min" if left > 99 else f"{left:.0f} s"
                self._tell(
                    f"trial {number + 1} of {count}: {proven} proven once, {promoted} promoted, {about} left"
                )
        return {
            "trials": count - failed,
            "failed_trials": failed,
            "proven_once": proven,
            "false_promotions": promoted,
            "smallest_gain": smallest_gain(rule, complete) if complete else None,
            "smallest_gain_share": SHARE,
            "complete_trials": len(complete),
        }

    def _confirmed(self, rule: Sequential) -> bool:
        """Whether identical source is proven faster on fresh inputs too."""
        again = self._pair(self._programs(), rule, False)
        return again is not None and walk(rule, *again) is Step.PROVEN

    def _programs(self) -> tuple[TimedProgram, ...]:
        machine = Machine.of(self.environment)
        seconds: dict[Workload, float] = {}
        with self._worker() as worker:
            worker.build()
            for workload in self.workloads:
                rng = np.random.default_rng(secrets.randbits(64))
                program = self.operator.timed(workload, rng, 1, 0, contiguous=False)
                seconds[workload] = call_seconds(worker, program)
        return timed_programs(self.operator, self.workloads, machine, seconds.__getitem__)

    def _pair(self, programs: tuple[TimedProgram, ...], rule: Sequential, whole: bool) -> Pair | None:
        """Aggregates of both sides, a process an entry, until the rule decides or, if `whole`, to its end."""
        entry_points = self.operator.entry_points
        contenders = [
            Contender("root", self.honest, entry_points, programs),
            Contender("candidate", self.honest, entry_points, programs, like="root"),
        ]
        weights = [each.weight for each in self.workloads]
        columns: dict[str, list[tuple[float, ...]]] = {"root": [], "candidate": []}
        with Rounds(contenders, lambda _: self._worker(), self._sweep) as rounds:
            for _ in range(rule.most):
                try:
                    measured = rounds.measure()
                except (ContenderFailure, TooSlow):
                    return None
                for name, column in columns.items():
                    column.append(measured.ms[name])
                pair = tuple(
                    totals(weights, list(zip(*columns[name], strict=True))) for name in ("candidate", "root")
                )
                if not whole and walk(rule, *pair) is not Step.CONTINUE:
                    break
        return pair[0], pair[1]

    def _worker(self) -> Worker:
        return Worker(
            self.honest,
            self.operator.entry_points,
            scratch=self._scratch / "run",
            cache=self._scratch / "compiled",
            limits=LIMITS[self.operator.backend],
            device=self.operator.backend,
        )


def walk(rule: Sequential, candidate_ms: Sequence[float], incumbent_ms: Sequence[float]) -> Step:
    """What a rule decides that looks after every process, at the first one at which it decides."""
    for rounds in range(1, len(candidate_ms) + 1):
        step = rule.after(candidate_ms[:rounds], incumbent_ms[:rounds])
        if step is not Step.CONTINUE:
            return step
    return Step.CONTINUE


def smallest_gain(rule: Sequential, trials: Sequence[Pair], share: float = SHARE) -> float:
    """The smallest gain that the rule proves in `share` of trials, by giving it to identical sources."""
    low, high = 0.0, 0.9
    while high - low > 1e-4:
        gain = (low + high) / 2
        steps = [walk(rule, [ms * (1 - gain) for ms in ours], theirs) for ours, theirs in trials]
        enough = steps.count(Step.PROVEN) >= share * len(steps)
        low, high = (low, gain) if enough else (gain, high)
    return high


def cheapest(operator: Operator) -> tuple[Workload, ...]:
    """The study's cheapest workloads, one a phase, that share the first one's constant axes."""
    found: list[Workload] = []
    for workload in sorted(operator.grids["study"], key=lambda each: operator.cost(each).flops):
        same = not found or operator.constant_axes(workload) == operator.constant_axes(found[0])
        if same and workload.phase not in {each.phase for each in found}:
            found.append(workload)
    return tuple(found[:WORKLOADS])
