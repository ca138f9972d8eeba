"""The records of the optimization IR: one typed, insert-only table each.

A record is written once and never changed: triggers refuse updates and deletions. Everything that changes
(incumbent, frontier, pending audits, open opportunities) is a view over these rows, in `views`.
"""

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar, dataclass_transform

from sqlalchemy import (
    DDL,
    CheckConstraint,
    Enum,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    UniqueConstraint,
    event,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, composite, mapped_column, relationship
from sqlalchemy.schema import ExecutableDDLElement

from kernelbraid.contract import BitPolicy, Workload
from kernelbraid.ir.columns import (
    ANY,
    AXES,
    CHECKS,
    DIFFERENCE,
    ENVIRONMENT,
    FLOATS,
    PAIRS,
    TEXTS,
    WORKLOAD,
    WORKLOADS,
    AnyFloat,
    WideInt,
)
from kernelbraid.ir.evidence import (
    ACCEPTED,
    AuditEvidence,
    Environment,
    Launch,
    Level,
    Measurement,
    Status,
    Verdict,
)

SCHEMA_VERSION = 4
APPLICATION_ID = 0x4B424944
"""Written into the header of every study database, so that a foreign SQLite file is recognised."""


class Outcome(StrEnum):
    """Why an opportunity is closed."""

    TAKEN = "taken"
    DUPLICATE = "duplicate"
    """It leads to a source that the study already has."""
    EXPIRED = "expired"
    """Later evidence took away its ground."""
    REFUSED = "refused"
    """It cannot be carried out: the edit is outside the contract, or no proposer could write it."""


class Lineage(StrEnum):
    """What becomes of an implementation as a branch point."""

    CONTINUE = "continue"
    MERGE = "merge"
    ARCHIVE = "archive"
    ABANDON = "abandon"


@dataclass_transform(kw_only_default=True, field_specifiers=(mapped_column, relationship, composite))
class Record(MappedAsDataclass, DeclarativeBase, kw_only=True):
    """A row that is written once."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {
        StrEnum: Enum(
            StrEnum,
            values_callable=lambda members: [member.value for member in members],
            native_enum=False,
            create_constraint=True,
            length=20,
        ),
    }


class SchemaVersion(Record):
    """The layouts this database has had; the highest one holds."""

    __tablename__ = "schema_version"
    version: Mapped[int] = mapped_column(primary_key=True)
    created: Mapped[float] = mapped_column(default_factory=time.time)


class Requirement(Record):
    """A relation or an accuracy bound in one regime, from the study's contract."""

    __tablename__ = "requirement"
    seq: Mapped[int] = mapped_column(primary_key=True, init=False)
    """Order of recording; so in every table that has it."""
    id: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str] = mapped_column(CheckConstraint("kind IN ('relation', 'accuracy')"))
    name: Mapped[str]
    regime: Mapped[str]


class Implementation(Record):
    """One source, identified by the SHA-256 of its bytes, which lie in `sources/<sha256>.py`."""

    __tablename__ = "implementation"
    seq: Mapped[int] = mapped_column(primary_key=True, init=False)
    sha256: Mapped[str] = mapped_column(CheckConstraint("length(sha256) = 64"), unique=True)
    tree: Mapped[str] = mapped_column(index=True)
    """Hash of the parsed source: equal where only layout and comments differ. Detects duplicates, no more."""
    label: Mapped[str] = mapped_column(default="")
    created: Mapped[float] = mapped_column(default_factory=time.time)

    @property
    def short(self) -> str:
        """The first twelve digits of the hash, as shown to people."""
        return self.sha256[:12]


class Study(Record):
    """What a study is about and may spend; frozen when it is created."""

    __tablename__ = "study"
    id: Mapped[int] = mapped_column(CheckConstraint("id = 1"), primary_key=True, init=False, default=1)
    name: Mapped[str]
    operator: Mapped[str]
    contract: Mapped[str]
    """Name and version, such as `attention/1`."""
    contract_hash: Mapped[str]
    device: Mapped[str]
    dtype: Mapped[str]
    constant_axes: Mapped[tuple[dict[str, int], ...]] = mapped_column(AXES)
    workloads: Mapped[tuple[Workload, ...]] = mapped_column(WORKLOADS)
    policy: Mapped[BitPolicy]
    proposer: Mapped[str]
    seed: Mapped[int] = mapped_column(WideInt)
    harness: Mapped[str]
    """Hash of the code that judges; evidence of any other is refused."""
    package: Mapped[str]
    """Version of kernelbraid that created the study."""
    patience: Mapped[int]
    """Audits without a promotion after which a search ends."""
    arm: Mapped[str] = mapped_column(default="full")
    minutes: Mapped[float | None] = mapped_column(default=None)
    audits: Mapped[int | None] = mapped_column(default=None)
    proposer_calls: Mapped[int | None] = mapped_column(default=None)
    root: Mapped[str] = mapped_column(ForeignKey("implementation.sha256"), init=False, default="")
    created: Mapped[float] = mapped_column(default_factory=time.time)

    def workload(self, name: str) -> Workload | None:
        """The workload of that name, or None."""
        return next((workload for workload in self.workloads if workload.name == name), None)


class HeldOut(Record):
    """A workload that only full audits time and that proposers never see; chosen when the study is made."""

    __tablename__ = "held_out"
    position: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    workload: Mapped[Workload] = mapped_column(WORKLOAD)


class RecordedProposal(Record):
    """A proposal of another study that this one makes again."""

    __tablename__ = "recorded_proposal"
    position: Mapped[int] = mapped_column(primary_key=True)
    sha256: Mapped[str] = mapped_column(unique=True)
    text: Mapped[str]
    label: Mapped[str]
    parents: Mapped[tuple[str, ...]] = mapped_column(TEXTS)
    hypothesis: Mapped[str]
    functions: Mapped[tuple[str, ...]] = mapped_column(TEXTS)
    regimes: Mapped[tuple[str, ...]] = mapped_column(TEXTS)
    expected_effect: Mapped[str]
    requirements_at_risk: Mapped[tuple[str, ...]] = mapped_column(TEXTS)
    falsified_by: Mapped[str]
    proposer: Mapped[str]


class AuditRequest(Record):
    """An audit that is wanted: pending until a record of evidence answers it."""

    __tablename__ = "audit_request"
    __table_args__ = (UniqueConstraint("id", "implementation", "level"),)
    seq: Mapped[int] = mapped_column(primary_key=True, init=False)
    id: Mapped[str] = mapped_column(unique=True)
    """Random, since requests travel to other machines."""
    implementation: Mapped[str] = mapped_column(ForeignKey("implementation.sha256"), index=True)
    level: Mapped[Level]
    root: Mapped[str] = mapped_column(ForeignKey("implementation.sha256"))
    incumbent: Mapped[str] = mapped_column(ForeignKey("implementation.sha256"))
    """The incumbent when the request was made; the audit names the one it was measured against."""
    created: Mapped[float] = mapped_column(default_factory=time.time)


class AuditVerdict(Record):
    """One requirement's verdict in one audit."""

    __tablename__ = "verdict"
    audit: Mapped[int] = mapped_column(ForeignKey("audit.seq"), primary_key=True, init=False)
    position: Mapped[int] = mapped_column(primary_key=True)
    verdict: Mapped[Verdict] = composite(
        mapped_column("requirement", ForeignKey("requirement.id")),
        mapped_column("held"),
        mapped_column("cases"),
        mapped_column("comparisons"),
        mapped_column("error", AnyFloat),
        mapped_column("difference", DIFFERENCE),
    )


class AuditMeasurement(Record):
    """One workload's latency in one audit."""

    __tablename__ = "measurement"
    audit: Mapped[int] = mapped_column(ForeignKey("audit.seq"), primary_key=True, init=False)
    position: Mapped[int] = mapped_column(primary_key=True)
    measurement: Mapped[Measurement] = composite(
        mapped_column("workload"),
        mapped_column("phase"),
        mapped_column("weight"),
        mapped_column("limit"),
        mapped_column("protocol", CheckConstraint("protocol IN ('cold', 'warm')")),
        mapped_column("candidate_ms", FLOATS),
        mapped_column("root_ms", FLOATS),
        mapped_column("incumbent_ms", FLOATS),
        mapped_column("calls"),
        mapped_column("bound_ms"),
    )


class AuditLaunch(Record):
    """One kernel that a call of a timed workload launches."""

    __tablename__ = "launch"
    audit: Mapped[int] = mapped_column(ForeignKey("audit.seq"), primary_key=True, init=False)
    position: Mapped[int] = mapped_column(primary_key=True)
    launch: Mapped[Launch] = composite(
        mapped_column("workload"),
        mapped_column("kernel"),
        mapped_column("count"),
        mapped_column("blocks"),
        mapped_column("threads"),
        mapped_column("resident"),
    )


class Audit(Record):
    """What one audit found: with its verdicts and measurements, the evidence that was recorded."""

    __tablename__ = "audit"
    __table_args__ = (
        ForeignKeyConstraint(
            ["request", "implementation", "level"],
            ["audit_request.id", "audit_request.implementation", "audit_request.level"],
        ),
        UniqueConstraint("request", "implementation"),
        CheckConstraint(f"status <> '{Status.INTERRUPTED}'", name="an_interrupted_audit_is_repeated"),
        Index("audit_by_implementation", "implementation", "status", "level"),
    )
    seq: Mapped[int] = mapped_column(primary_key=True, init=False)
    request: Mapped[str] = mapped_column(unique=True)
    implementation: Mapped[str]
    root: Mapped[str] = mapped_column(ForeignKey("implementation.sha256"))
    incumbent: Mapped[str] = mapped_column(ForeignKey("implementation.sha256"))
    level: Mapped[Level]
    status: Mapped[Status]
    reason: Mapped[str]
    bits_id: Mapped[str | None]
    numerics: Mapped[tuple[tuple[str, int], ...]] = mapped_column(PAIRS)
    specialisations: Mapped[tuple[str, ...]] = mapped_column(TEXTS)
    seconds: Mapped[tuple[tuple[str, float], ...]] = mapped_column(PAIRS)
    seed: Mapped[int] = mapped_column(WideInt)
    environment: Mapped[Environment] = mapped_column(ENVIRONMENT)
    comparable: Mapped[str]
    """Equal for audits whose ratios may be compared: hash of the architecture and the versions."""
    harness: Mapped[str]
    log: Mapped[str | None]
    """SHA-256 of `logs/<request>.txt`, what the worker printed; None where it printed nothing."""
    started: Mapped[float]
    recorded: Mapped[float] = mapped_column(default_factory=time.time)
    verdicts: Mapped[list[AuditVerdict]] = relationship(
        lazy="selectin", order_by=AuditVerdict.position, default_factory=list
    )
    measurements: Mapped[list[AuditMeasurement]] = relationship(
        lazy="selectin", order_by=AuditMeasurement.position, default_factory=list
    )
    launches: Mapped[list[AuditLaunch]] = relationship(
        lazy="selectin", order_by=AuditLaunch.position, default_factory=list
    )

    @property
    def accepted(self) -> bool:
        return self.status in ACCEPTED

    def evidence(self, output: str = "") -> AuditEvidence:
        """The record as it travelled; `output` is the text of its log."""
        return AuditEvidence(
            job=self.request,
            implementation=self.implementation,
            root=self.root,
            incumbent=self.incumbent,
            level=self.level,
            status=self.status,
            reason=self.reason,
            bits_id=self.bits_id,
            numerics=self.numerics,
            verdicts=tuple(row.verdict for row in self.verdicts),
            measurements=tuple(row.measurement for row in self.measurements),
            specialisations=self.specialisations,
            launches=tuple(row.launch for row in self.launches),
            seconds=self.seconds,
            seed=self.seed,
            environment=self.environment,
            harness=self.harness,
            output=output,
            started=self.started,
        )


Index("verdict_by_requirement", AuditVerdict.__table__.c.requirement, AuditVerdict.__table__.c.held)


class OpportunityParent(Record):
    """A parent of an opportunity."""

    __tablename__ = "opportunity_parent"
    opportunity: Mapped[int] = mapped_column(ForeignKey("opportunity.id"), primary_key=True, init=False)
    position: Mapped[int] = mapped_column(primary_key=True)
    parent: Mapped[str] = mapped_column(ForeignKey("implementation.sha256"), index=True)


class Opportunity(Record):
    """A possible modification that measured evidence supports."""

    __tablename__ = "opportunity"
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    mechanism: Mapped[str]
    """What would make it faster, in a few words."""
    edit: Mapped[Any] = mapped_column(ANY, nullable=True)
    """The edit itself where a program can make it, such as knob values; None where a proposer writes it."""
    workloads: Mapped[tuple[str, ...]] = mapped_column(TEXTS)
    """Workloads it should make faster, by name."""
    evidence: Mapped[tuple[str, ...]] = mapped_column(TEXTS)
    """Audit requests whose measurements or verdicts support it."""
    rationale: Mapped[str]
    source_audit: Mapped[str | None] = mapped_column(ForeignKey("audit.request"))
    """The audit it was derived from."""
    fingerprint: Mapped[str] = mapped_column(unique=True)
    """Hash of parents, mechanism and edit: the same opportunity is recorded once."""
    created: Mapped[float] = mapped_column(default_factory=time.time)
    parent_links: Mapped[list[OpportunityParent]] = relationship(
        lazy="selectin", order_by=OpportunityParent.position, default_factory=list, repr=False
    )

    @property
    def parents(self) -> tuple[str, ...]:
        return tuple(link.parent for link in self.parent_links)


class ModificationParent(Record):
    """A parent of a modification; several where lineages merge."""

    __tablename__ = "modification_parent"
    __table_args__ = (UniqueConstraint("modification", "parent"),)
    modification: Mapped[int] = mapped_column(ForeignKey("modification.id"), primary_key=True, init=False)
    position: Mapped[int] = mapped_column(primary_key=True)
    parent: Mapped[str] = mapped_column(ForeignKey("implementation.sha256"), index=True)


class Modification(Record):
    """The edge from parents to a child, stated before its audit."""

    __tablename__ = "modification"
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    child: Mapped[str] = mapped_column(ForeignKey("implementation.sha256"), unique=True)
    hypothesis: Mapped[str]
    functions: Mapped[tuple[str, ...]] = mapped_column(TEXTS)
    regimes: Mapped[tuple[str, ...]] = mapped_column(TEXTS)
    """Functions and regimes changed together."""
    expected_effect: Mapped[str]
    requirements_at_risk: Mapped[tuple[str, ...]] = mapped_column(TEXTS)
    falsified_by: Mapped[str]
    proposer: Mapped[str]
    opportunity: Mapped[int | None] = mapped_column(ForeignKey("opportunity.id"), unique=True)
    created: Mapped[float] = mapped_column(default_factory=time.time)
    parent_links: Mapped[list[ModificationParent]] = relationship(
        lazy="selectin", order_by=ModificationParent.position, default_factory=list, repr=False
    )

    @property
    def parents(self) -> tuple[str, ...]:
        return tuple(link.parent for link in self.parent_links)


class OpportunityClosed(Record):
    """The end of an opportunity; each ends once."""

    __tablename__ = "opportunity_closed"
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    opportunity: Mapped[int] = mapped_column(ForeignKey("opportunity.id"), unique=True)
    outcome: Mapped[Outcome]
    implementation: Mapped[str | None] = mapped_column(ForeignKey("implementation.sha256"))
    """The child it led to, or the source it would have repeated."""
    reason: Mapped[str]
    created: Mapped[float] = mapped_column(default_factory=time.time)


class LineageDecision(Record):
    """What becomes of an implementation; the latest decision holds."""

    __tablename__ = "lineage_decision"
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    implementation: Mapped[str] = mapped_column(ForeignKey("implementation.sha256"), index=True)
    decision: Mapped[Lineage]
    reason: Mapped[str]
    decided_by: Mapped[str]
    created: Mapped[float] = mapped_column(default_factory=time.time)


class PromotionDecision(Record):
    """Whether an implementation became the incumbent, with every number that decided it."""

    __tablename__ = "promotion_decision"
    __table_args__ = (
        ForeignKeyConstraint(["screen_audit", "implementation"], ["audit.request", "audit.implementation"]),
        ForeignKeyConstraint(["full_audit", "implementation"], ["audit.request", "audit.implementation"]),
        CheckConstraint("NOT granted OR full_audit IS NOT NULL", name="granted_after_a_full_audit"),
        CheckConstraint("granted = (blocked_by IS NULL)", name="a_refusal_names_what_blocked_it"),
    )
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    implementation: Mapped[str] = mapped_column(index=True)
    previous: Mapped[str] = mapped_column(ForeignKey("implementation.sha256"))
    """The incumbent that it replaced, or was refused against."""
    screen_audit: Mapped[str]
    full_audit: Mapped[str | None]
    granted: Mapped[bool]
    reason: Mapped[str]
    blocked_by: Mapped[str | None]
    """The workload, requirement or statistic that stood against it."""
    checks: Mapped[tuple[dict[str, Any], ...]] = mapped_column(CHECKS)
    bits_changed: Mapped[bool]
    after_audit: Mapped[int]
    """Audits recorded before this decision."""
    created: Mapped[float] = mapped_column(default_factory=time.time)


class Usage(Record):
    """What was spent since the last such row; sums survive the death of any process."""

    __tablename__ = "usage"
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    purpose: Mapped[str]
    """What it was spent on, such as `audit`, `proposal` or `search`."""
    wall_seconds: Mapped[float] = mapped_column(default=0.0)
    device_seconds: Mapped[float] = mapped_column(default=0.0)
    queue_seconds: Mapped[float] = mapped_column(default=0.0)
    """Time spent waiting for a machine, which no budget counts."""
    proposer_calls: Mapped[int] = mapped_column(default=0)
    tokens_in: Mapped[int | None] = mapped_column(default=None)
    tokens_out: Mapped[int | None] = mapped_column(default=None)
    money: Mapped[float | None] = mapped_column(default=None)
    """None where a proposer does not tell."""
    implementation: Mapped[str | None] = mapped_column(ForeignKey("implementation.sha256"), default=None)
    created: Mapped[float] = mapped_column(default_factory=time.time)


class AuditInterruption(Record):
    """An audit that ended without evidence for no fault of the implementation: it stays pending."""

    __tablename__ = "audit_interruption"
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    request: Mapped[str] = mapped_column(ForeignKey("audit_request.id"), index=True)
    reason: Mapped[str]
    output: Mapped[str] = mapped_column(default="")
    """The last of what the command that ran it printed."""
    created: Mapped[float] = mapped_column(default_factory=time.time)


class Prompt(Record):
    """A text that language models are given."""

    __tablename__ = "prompt"
    sha256: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    text: Mapped[str]
    created: Mapped[float] = mapped_column(default_factory=time.time)


class ModelSettings(Record):
    """Which language model proposes, within which limits; the latest row holds."""

    __tablename__ = "model_settings"
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    settings: Mapped[Any] = mapped_column(ANY)
    prompts: Mapped[tuple[str, ...]] = mapped_column(TEXTS)
    """Hashes of the prompts."""
    created: Mapped[float] = mapped_column(default_factory=time.time)


class ModelCall(Record):
    """A call of a language model that is about to be made, and the most that it may cost."""

    __tablename__ = "model_call"
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    tokens: Mapped[int]
    money: Mapped[float | None]
    """US dollars; None where the price is unknown."""
    created: Mapped[float] = mapped_column(default_factory=time.time)


class ModelAnswer(Record):
    """How a call ended; a call without one was cut off, and may have cost all that it might."""

    __tablename__ = "model_answer"
    call: Mapped[int] = mapped_column(ForeignKey("model_call.id"), primary_key=True)
    usage: Mapped[int | None] = mapped_column(ForeignKey("usage.id"), unique=True)
    """None where the endpoint refused the call, so that it cost nothing."""
    model: Mapped[str]
    """The model's name as the endpoint tells it."""
    outcome: Mapped[str]
    """Why the answer ends, such as `stop` or `length`, or the error."""
    seconds: Mapped[float]
    created: Mapped[float] = mapped_column(default_factory=time.time)


class ProposerAttempt(Record):
    """What came of asking a proposer for a candidate."""

    __tablename__ = "proposer_attempt"
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    proposer: Mapped[str]
    outcome: Mapped[str] = mapped_column(CheckConstraint("outcome IN ('proposed', 'declined', 'failed')"))
    reason: Mapped[str]
    last_call: Mapped[int | None] = mapped_column(ForeignKey("model_call.id"))
    created: Mapped[float] = mapped_column(default_factory=time.time)


ADDED: dict[int, tuple[type[Record], ...]] = {
    2: (AuditInterruption, Prompt, ModelSettings, ModelCall, ModelAnswer, ProposerAttempt),
    3: (HeldOut, RecordedProposal),
    4: (AuditLaunch,),
}
"""Layout -> the tables that it added to the one before."""


_ACCEPTED_SQL = ", ".join(f"'{status}'" for status in ACCEPTED)
_TIMED_BITS = f"""
CREATE TRIGGER measurement_needs_held_verdicts BEFORE INSERT ON measurement
WHEN (SELECT status FROM audit WHERE seq = NEW.audit) NOT IN ({_ACCEPTED_SQL})
  OR NOT EXISTS (SELECT 1 FROM verdict WHERE audit = NEW.audit)
  OR EXISTS (SELECT 1 FROM verdict WHERE audit = NEW.audit AND NOT held)
BEGIN SELECT RAISE(ABORT, 'a measurement needs a held verdict on every requirement'); END
"""
_LATE_VERDICT = f"""
CREATE TRIGGER accepted_audit_needs_held_verdicts BEFORE INSERT ON verdict
WHEN NOT NEW.held AND (SELECT status FROM audit WHERE seq = NEW.audit) IN ({_ACCEPTED_SQL})
BEGIN SELECT RAISE(ABORT, 'an accepted audit needs a held verdict on every requirement'); END
"""


def _create_triggers() -> None:
    create: Callable[[str], ExecutableDDLElement] = DDL
    for table in Record.metadata.sorted_tables:
        for verb in ("UPDATE", "DELETE"):
            statement = (
                f"CREATE TRIGGER {table.name}_refuses_{verb.lower()} BEFORE {verb} ON {table.name} "
                f"BEGIN SELECT RAISE(ABORT, '{table.name} records are insert-only'); END"
            )
            event.listen(table, "after_create", create(statement))
    event.listen(Record.metadata, "after_create", create(_TIMED_BITS))
    event.listen(Record.metadata, "after_create", create(_LATE_VERDICT))


_create_triggers()
