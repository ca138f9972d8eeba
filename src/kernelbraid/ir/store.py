"""A study on disk: insert-only records in SQLite, sources and logs as files beside them.

    study.db            records (write-ahead log; several processes may read and write)
    sources/<sha>.py    the bytes of every implementation
    logs/<request>.txt  what a worker printed
    jobs/, results/     audits that travel
    lock                held by the one process that controls a search

Each method is one transaction, or part of the one that `Store.transaction` holds open; a process may die at
any moment. What the records say about the present (incumbent, frontier, totals) is asked through `query`.
"""

import ast
import hashlib
import math
import os
import re
import secrets
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout
from sqlalchemy import exists, func, or_, select
from sqlalchemy.orm import Session

from kernelbraid import contract
from kernelbraid.contract import REGIMES, Source, content_hash
from kernelbraid.ir.database import Database
from kernelbraid.ir.evidence import AuditEvidence, Level, Status
from kernelbraid.ir.files import new_folder, read_checked, write_whole
from kernelbraid.ir.invariants import (
    Grounds,
    audit_of,
    bits_changed,
    check_evidence,
    check_grant,
    check_study,
    check_takeable,
    incumbent_hash,
    is_open,
    require_known,
    require_verified,
    violations,
)
from kernelbraid.ir.schema import (
    Audit,
    AuditLaunch,
    AuditMeasurement,
    AuditRequest,
    AuditVerdict,
    HeldOut,
    Implementation,
    Lineage,
    LineageDecision,
    Modification,
    ModificationParent,
    Opportunity,
    OpportunityClosed,
    OpportunityParent,
    Outcome,
    PromotionDecision,
    Requirement,
    Study,
    Usage,
)
from kernelbraid.ir.views import PENDING

DATABASE = "study.db"
FOLDERS = ("sources", "logs", "jobs", "results")
_PREFIX = re.compile(r"[0-9a-f]{4,64}")


class DuplicateSourceError(ValueError):
    """The study already has this source, or one that differs in layout and comments only."""

    def __init__(self, existing: Implementation, *, same_bytes: bool) -> None:
        kind = "is" if same_bytes else "differs in layout and comments only from"
        super().__init__(f"this source {kind} {existing.short}, which the study has already")
        self.existing = existing


class StudyBusyError(RuntimeError):
    """Another process controls the study's search."""


def tree_hash(text: str) -> str:
    """Hash of a source's syntax tree under the running Python; of its bytes where it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = ast.dump(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parsed = f"unparsed {text}"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"{version}:{hashlib.sha256(parsed.encode()).hexdigest()}"


class Store:
    """One study: typed, insert-only records, and the files beside them."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.folder = folder
        self._database = database
        with self.read() as session:
            study = session.scalars(select(Study)).one_or_none()
            kept = session.scalars(select(HeldOut).order_by(HeldOut.position)).all()
        if study is None:
            raise ValueError(f"{folder} holds a database without a study: import an export into a new folder")
        self.study = study
        self.held_out = tuple(each.workload for each in kept)

    @classmethod
    def create(
        cls,
        folder: Path,
        study: Study,
        root: Source,
        requirements: Iterable[contract.Requirement],
        held_out: Sequence[contract.Workload] = (),
    ) -> Self:
        """Make a new study folder, whole or not at all, with `root` as its root and incumbent.

        Args:
            folder: must not exist, or be empty.
            study: what it is about; its `root` is set here.
            root: the starting implementation.
            requirements: what audits of this study give verdicts on, usually `contract.requirements`.
            held_out: workloads that only full audits time, and that proposers never see.

        Raises:
            ValueError: the folder is in use, or the study is not complete.
            RuntimeError: the folder cannot be written.
        """
        rows = [Requirement(id=r.id, kind=r.kind, name=r.name, regime=r.regime) for r in requirements]
        check_study(study, rows, held_out)
        with new_folder(folder) as temporary:
            for name in FOLDERS:
                (temporary / name).mkdir()
            write_whole(source_path(temporary, root.sha256), root.text.encode())
            database = Database.create(temporary / DATABASE)
            try:
                with database.transaction() as session:
                    session.add(_implementation(root))
                    session.add_all(rows)
                    session.add_all(
                        HeldOut(position=i, name=each.name, workload=each) for i, each in enumerate(held_out)
                    )
                    session.flush()
                    study.root = root.sha256
                    session.add(study)
            finally:
                database.close()
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a study folder.

        Raises:
            ValueError: there is no study, or its database is damaged, foreign, or of another version.
            RuntimeError: the folder cannot be read or written.
        """
        folder = Path(os.path.abspath(folder))
        if not folder.is_dir():
            raise ValueError(f"there is no study at {folder}: name the folder of one")
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise RuntimeError(f"{folder} cannot be written: a study needs a folder that its user may write")
        database = Database.open(folder / DATABASE)
        try:
            for name in FOLDERS:
                (folder / name).mkdir(exist_ok=True)
            return cls(folder, database)
        except OSError as error:
            database.close()
            raise RuntimeError(f"cannot write {folder}: {error.strerror or error}") from error
        except BaseException:
            database.close()
            raise

    def close(self) -> None:
        """Let go of the database; records that were returned stay readable."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self) -> AbstractContextManager[Session]:
        """Hold one state of the study for the queries inside."""
        return self._database.read()

    def transaction(self) -> AbstractContextManager[Session]:
        """Keep everything recorded inside together, or none of it; other writers wait meanwhile."""
        return self._database.transaction()

    @contextmanager
    def controller_lock(self) -> Iterator[None]:
        """Be the one process that controls this study's search; the lock goes away with the process.

        Raises:
            StudyBusyError: another process holds it.
        """
        lock = FileLock(self.folder / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise StudyBusyError(f"another process searches {self.folder}: stop it, or wait") from error
        try:
            yield
        finally:
            lock.release()

    # Implementations

    def implementation(self, sha256: str) -> Implementation:
        """Return the implementation whose hash is, or begins with, `sha256` (at least four digits)."""
        if not _PREFIX.fullmatch(sha256):
            raise ValueError(f"an implementation is named by 4 to 64 hexadecimal digits, got {sha256!r}")
        column = Implementation.sha256
        with self.read() as session:
            matching = select(Implementation).where(column >= sha256, column < sha256 + "g")
            found = session.scalars(matching.order_by(Implementation.seq)).all()
        if not found:
            raise ValueError(f"the study has no implementation {sha256}")
        if len(found) > 1:
            raise ValueError(f"{sha256} begins the hash of {len(found)} implementations: give more digits")
        return found[0]

    def source(self, sha256: str) -> Source:
        """Return the source whose hash is, or begins with, `sha256`.

        Raises:
            ValueError: no implementation, or several, have such a hash.
            RuntimeError: the file is missing, or its bytes no longer match its hash.
        """
        implementation = self.implementation(sha256)
        path = source_path(self.folder, implementation.sha256)
        return Source(read_checked(path, implementation.sha256).decode(), implementation.label)

    def log(self, request: str) -> str:
        """Return what the worker printed in the audit that answered `request`."""
        with self.read() as session:
            log = audit_of(session, request).log
        if log is None:
            return ""
        return read_checked(log_path(self.folder, request), log).decode("utf-8", "surrogatepass")

    def duplicate_of(self, source: Source) -> Implementation | None:
        """Return the implementation with the same bytes or, failing that, the same syntax tree."""
        same = Implementation.sha256 == source.sha256
        alike = Implementation.tree == tree_hash(source.text)
        found = select(Implementation).where(or_(same, alike)).order_by(same.desc(), Implementation.seq)
        with self.read() as session:
            return session.scalars(found).first()

    def add_implementation(
        self,
        source: Source,
        *,
        parents: Sequence[str],
        hypothesis: str,
        proposer: str,
        functions: Sequence[str] = (),
        regimes: Sequence[str] = (),
        expected_effect: str = "",
        requirements_at_risk: Sequence[str] = (),
        falsified_by: str = "",
        opportunity: int | None = None,
    ) -> Implementation:
        """Record a child of verified parents, its source file first, and the modification that leads to it.

        Args:
            source: the complete text.
            parents: hashes of one or more verified implementations.
            hypothesis: why it should be better.
            proposer: who wrote it.
            functions: functions of the source that change together.
            regimes: regimes whose calls they serve.
            expected_effect: what the audit should show if the hypothesis holds.
            requirements_at_risk: ids of requirements that the change could break.
            falsified_by: what would show the hypothesis wrong.
            opportunity: id of the open opportunity that this takes; its parents must be among `parents`.

        Raises:
            DuplicateSourceError: the study has this source, or one with the same syntax tree.
            ValueError: a parent is unknown or not verified, the opportunity is closed, or a field is wrong.
            RuntimeError: the file or the record cannot be written.
        """
        if not parents or len(set(parents)) != len(parents):
            raise ValueError(f"parents must name one or more implementations, each once: got {list(parents)}")
        if not hypothesis.strip():
            raise ValueError("hypothesis must say why the change should help")
        if unknown := set(regimes) - set(REGIMES):
            raise ValueError(f"regimes must be among {REGIMES}, got {sorted(unknown)}")
        with self.transaction() as session:
            if (existing := self.duplicate_of(source)) is not None:
                raise DuplicateSourceError(existing, same_bytes=existing.sha256 == source.sha256)
            for parent in parents:
                require_verified(session, parent)
            if opportunity is not None:
                check_takeable(session, opportunity, parents)
            at_risk = tuple(requirements_at_risk)
            require_known(session, Requirement.id, at_risk, "requirements_at_risk", "requirement")
            write_whole(source_path(self.folder, source.sha256), source.text.encode())
            implementation = _implementation(source)
            session.add(implementation)
            session.flush()
            session.add(
                Modification(
                    child=source.sha256,
                    hypothesis=hypothesis,
                    functions=tuple(functions),
                    regimes=tuple(regimes),
                    expected_effect=expected_effect,
                    requirements_at_risk=at_risk,
                    falsified_by=falsified_by,
                    proposer=proposer,
                    opportunity=opportunity,
                    parent_links=[
                        ModificationParent(position=i, parent=sha) for i, sha in enumerate(parents)
                    ],
                )
            )
            if opportunity is not None:
                session.add(
                    OpportunityClosed(
                        opportunity=opportunity,
                        outcome=Outcome.TAKEN,
                        implementation=source.sha256,
                        reason=hypothesis,
                    )
                )
        return implementation

    # Audits

    def request_audit(self, sha256: str, level: Level) -> str:
        """Return the id of the pending audit of an implementation at a level, made if there is none."""
        with self.transaction() as session:
            implementation = self.implementation(sha256)
            same = (PENDING.c.implementation == implementation.sha256, PENDING.c.level == level)
            waiting = session.scalar(select(PENDING.c.id).where(*same))
            if waiting is not None:
                return str(waiting)
            request = AuditRequest(
                id=secrets.token_hex(8),
                implementation=implementation.sha256,
                level=level,
                root=self.study.root,
                incumbent=incumbent_hash(session),
            )
            session.add(request)
        return request.id

    def pending(self) -> list[AuditRequest]:
        """Return the requests without an answer, oldest first."""
        with self.read() as session:
            waiting = select(AuditRequest).join(PENDING, PENDING.c.seq == AuditRequest.seq)
            return list(session.scalars(waiting.order_by(AuditRequest.seq)))

    def record(self, evidence: AuditEvidence) -> bool:
        """Record the answer to a request, once.

        Returns:
            False, and nothing is added, if the request was answered before or the audit was interrupted.

        Raises:
            ValueError: it answers no request of this study, or contradicts the study or its contract.
            RuntimeError: the log or the record cannot be written.
        """
        with self.transaction() as session:
            asked = select(AuditRequest).where(AuditRequest.id == evidence.job)
            request = session.scalars(asked).one_or_none()
            if request is None:
                raise ValueError(f"evidence answers request {evidence.job}, which this study never made")
            if session.scalar(select(exists().where(Audit.request == request.id))):
                return False
            if evidence.status is Status.INTERRUPTED:
                return False
            check_evidence(Grounds.of(session, self.study), request, evidence)
            log = self._write_log(request.id, evidence.output)
            audit = _audit(evidence, log)
            session.add(audit)
            session.flush()  # verdicts first: measurements are refused where one is missing or not held
            audit.measurements.extend(
                AuditMeasurement(position=i, measurement=m) for i, m in enumerate(evidence.measurements)
            )
        return True

    def _write_log(self, request: str, output: str) -> str | None:
        if not output:
            return None
        data = output.encode("utf-8", "surrogatepass")
        write_whole(log_path(self.folder, request), data)
        return hashlib.sha256(data).hexdigest()

    # Opportunities and lineage

    def add_opportunity(
        self,
        *,
        parents: Sequence[str],
        mechanism: str,
        rationale: str,
        edit: Any = None,
        workloads: Sequence[str] = (),
        evidence: Sequence[str] = (),
        source_audit: str | None = None,
    ) -> Opportunity:
        """Record a possible modification, once: the first with these parents, mechanism and edit is returned.

        Args:
            parents: hashes of verified implementations.
            mechanism: what would make them faster, in a few words.
            rationale: why the evidence suggests it.
            edit: JSON value by which a program carries it out, such as knob values; None: a proposer writes.
            workloads: names of the workloads that should gain.
            evidence: audit requests whose findings support it.
            source_audit: audit request that it was derived from.
        """
        if not parents or not mechanism.strip():
            raise ValueError("an opportunity needs at least one parent and a mechanism")
        for workload in workloads:
            if self.study.workload(workload) is None:
                raise ValueError(f"the study has no workload {workload}")
        idea = [sorted(parents), mechanism, edit if edit is not None else ["by hand", rationale]]
        fingerprint = content_hash(idea)
        with self.transaction() as session:
            same = select(Opportunity).where(Opportunity.fingerprint == fingerprint)
            if (existing := session.scalars(same).one_or_none()) is not None:
                return existing
            for parent in parents:
                require_verified(session, parent)
            cited = [*evidence, *([] if source_audit is None else [source_audit])]
            require_known(session, Audit.request, cited, "evidence", "audit")
            opportunity = Opportunity(
                mechanism=mechanism,
                edit=edit,
                workloads=tuple(workloads),
                evidence=tuple(evidence),
                rationale=rationale,
                source_audit=source_audit,
                fingerprint=fingerprint,
                parent_links=[OpportunityParent(position=i, parent=sha) for i, sha in enumerate(parents)],
            )
            session.add(opportunity)
        return opportunity

    def close_opportunity(
        self, opportunity: int, outcome: Outcome, *, reason: str, implementation: str | None = None
    ) -> bool:
        """Close an opportunity that was not taken; `add_implementation` closes those that are.

        Returns:
            False, and nothing is added, if it was closed before.
        """
        if outcome is Outcome.TAKEN:
            raise ValueError("an opportunity is taken by naming it in add_implementation")
        with self.transaction() as session:
            if session.get(Opportunity, opportunity) is None:
                raise ValueError(f"the study has no opportunity {opportunity}")
            if not is_open(session, opportunity):
                return False
            if implementation is not None:
                implementation = self.implementation(implementation).sha256
            session.add(
                OpportunityClosed(
                    opportunity=opportunity, outcome=outcome, implementation=implementation, reason=reason
                )
            )
        return True

    def decide(self, sha256: str, decision: Lineage, *, reason: str, decided_by: str) -> LineageDecision:
        """Record what becomes of an implementation; one that is not verified can only be abandoned."""
        with self.transaction() as session:
            implementation = self.implementation(sha256)
            if decision is not Lineage.ABANDON:
                require_verified(session, implementation.sha256)
            row = LineageDecision(
                implementation=implementation.sha256, decision=decision, reason=reason, decided_by=decided_by
            )
            session.add(row)
        return row

    def promote(
        self,
        *,
        screen_audit: str,
        full_audit: str | None,
        granted: bool,
        reason: str,
        blocked_by: str | None = None,
        checks: Sequence[Mapping[str, Any]] = (),
    ) -> PromotionDecision:
        """Record a decision to make an implementation the incumbent, or not to, with every number behind it.

        Args:
            screen_audit: request of the screen audit that the decision rests on.
            full_audit: request of the full audit; None where the screen refused it.
            granted: whether it becomes the incumbent.
            reason: one sentence for people.
            blocked_by: for a refusal, the workload, requirement or statistic that stood against it.
            checks: every check with its numbers, in order.

        Raises:
            ValueError: an audit is unknown, of another implementation, or cannot carry a promotion: both must
                be verified, in comparable environments, against the implementation that is the incumbent now.
        """
        if granted == (blocked_by is not None):
            raise ValueError("blocked_by must say what blocked a promotion that was refused, and only then")
        with self.transaction() as session:
            screen = audit_of(session, screen_audit)
            full = None if full_audit is None else audit_of(session, full_audit)
            if full is not None and full.implementation != screen.implementation:
                raise ValueError(f"audits {screen_audit} and {full_audit} are of two implementations")
            if granted:
                require_verified(session, screen.implementation)
                named = f"the promotion of {screen.implementation[:12]}"
                check_grant(named, incumbent_hash(session), screen, full)
            row = PromotionDecision(
                implementation=screen.implementation,
                previous=screen.incumbent,
                screen_audit=screen_audit,
                full_audit=full_audit,
                granted=granted,
                reason=reason,
                blocked_by=blocked_by,
                checks=tuple(dict(check) for check in checks),
                bits_changed=bits_changed(session, screen),
                after_audit=session.scalar(select(func.count()).select_from(Audit)) or 0,
            )
            session.add(row)
        return row

    def record_usage(self, usage: Usage) -> Usage:
        """Record what was spent since the last such record: totals are sums, and outlive any process."""
        spent = (usage.wall_seconds, usage.device_seconds, usage.queue_seconds, usage.proposer_calls)
        told = (usage.tokens_in, usage.tokens_out, usage.money)
        if not all(amount is None or (math.isfinite(amount) and amount >= 0) for amount in (*spent, *told)):
            raise ValueError(f"usage must be finite and not negative, got {usage}")
        with self.transaction() as session:
            session.add(usage)
        return usage

    def check(self) -> None:
        """Raise RuntimeError, naming the first, if an invariant is broken or a file lost its bytes."""
        with self.read() as session:
            for problem in violations(session):
                raise RuntimeError(f"the study in {self.folder} breaks an invariant: {problem}")
            hashes = session.scalars(select(Implementation.sha256)).all()
            logs = session.execute(select(Audit.request, Audit.log)).all()
        for sha256 in hashes:
            read_checked(source_path(self.folder, sha256), sha256)
        for request, log in logs:
            if log is not None:
                read_checked(log_path(self.folder, request), log)


def source_path(folder: Path, sha256: str) -> Path:
    return folder / "sources" / f"{sha256}.py"


def log_path(folder: Path, request: str) -> Path:
    return folder / "logs" / f"{request}.txt"


def _implementation(source: Source) -> Implementation:
    return Implementation(sha256=source.sha256, tree=tree_hash(source.text), label=source.label)


def _audit(evidence: AuditEvidence, log: str | None) -> Audit:
    environment = evidence.environment
    return Audit(
        request=evidence.job,
        implementation=evidence.implementation,
        root=evidence.root,
        incumbent=evidence.incumbent,
        level=evidence.level,
        status=evidence.status,
        reason=evidence.reason,
        bits_id=evidence.bits_id,
        numerics=evidence.numerics,
        specialisations=evidence.specialisations,
        seconds=evidence.seconds,
        seed=evidence.seed,
        environment=environment,
        comparable=content_hash([environment.architecture, environment.versions])[:16],
        harness=evidence.harness,
        log=log,
        started=evidence.started,
        verdicts=[AuditVerdict(position=i, verdict=verdict) for i, verdict in enumerate(evidence.verdicts)],
        launches=[AuditLaunch(position=i, launch=launch) for i, launch in enumerate(evidence.launches)],
    )
