"""A study: one operator, one root, one device, and all that a search for something faster finds out."""

import ast
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import kernelbraid
from kernelbraid import ops
from kernelbraid.audit import jobs
from kernelbraid.audit.environment import require_device
from kernelbraid.contract import BitPolicy, Contract, Source, Workload
from kernelbraid.ir import proposing, query, replaying, schema, survey
from kernelbraid.ir.bulk import kept_objects
from kernelbraid.ir.evidence import AuditEvidence, Level
from kernelbraid.ir.held_out import shown
from kernelbraid.ir.reading import evidence_after
from kernelbraid.ir.replaying import Recorded
from kernelbraid.ir.schema import Lineage, Outcome
from kernelbraid.ir.store import DuplicateSourceError, Store
from kernelbraid.ops.problem import Operator
from kernelbraid.search import prompts
from kernelbraid.search.budget import Budget
from kernelbraid.search.proposers import Proposal, edits
from kernelbraid.search.proposers.llm_settings import LlmSettings
from kernelbraid.search.standings import Standing, standing
from kernelbraid.search.summary import summary

DEFAULT_PATIENCE = 40
"""Audits without a promotion after which a search ends: more than the single edits of a usual source, so that
a branch point can be tried out in full before the search gives up on it."""
PROPOSERS = ("knobs", "external", "llm", "replay")
DECLARATIONS = ("numerics", "schedule")
"""Functions that every implementation exports beside the operator's entry points."""


class _Rehearsed(Exception):  # noqa: N818 - ends a transaction that keeps nothing
    pass


class Study:
    """A study folder, opened; use it as a context manager.

    Attributes:
        store: its records.
        operator: what it optimizes.
        budget: what it may spend and has spent.
    """

    def __init__(self, store: Store, operator: Operator) -> None:
        self.store = store
        self.operator = operator
        self.budget = Budget(store)
        self._audits: dict[str, list[AuditEvidence]] = {}
        self._whole: dict[str, AuditEvidence] = {}
        self._standings: dict[str, Standing] = {}
        self._parents: dict[str, tuple[str, ...]] = {}
        self._seen = 0

    @classmethod
    def create(
        cls,
        folder: Path,
        operator: str | Operator,
        root: Source | Path | None = None,
        *,
        device: str = "cpu",
        workloads: Sequence[Workload] | None = None,
        held_out: Sequence[Workload] | None = None,
        policy: BitPolicy | str = BitPolicy.MUTUAL,
        minutes: float | None = None,
        audits: int | None = None,
        patience: int = DEFAULT_PATIENCE,
        proposer: str = "knobs",
        dtype: str | None = None,
        seed: int = 0,
        elsewhere: bool = False,
        proposer_calls: int | None = None,
        llm: LlmSettings | None = None,
        replay: Sequence[Recorded] = (),
    ) -> Self:
        """Make a new study in `folder`, whole or not at all.

        Args:
            folder: must not exist, or be empty.
            operator: an operator or its name.
            root: the implementation to start from, or its file; by default the shipped one.
            device: `cpu` or `cuda`.
            workloads: what is timed, with weights and limits; by default the operator's grid `study`.
            held_out: workloads of the same domain that proposers never see and that a promotion needs too; by
                default the operator's grid `held_out`, and none where it has none.
            policy: `mutual` lets a candidate have bits of its own, `pinned` keeps the root's.
            minutes: time to search, the full audit that closes a search not included; None for no limit.
            audits: candidates to audit; None for no limit.
            patience: audits without a promotion after which the search ends.
            proposer: `knobs`, `external` where candidates come through `submit`, `llm` or `replay`.
            dtype: one of the contract's; by default its first.
            seed: decides among edits that evidence does not tell apart.
            elsewhere: audits run on another machine: the device need not be here.
            proposer_calls: times that the proposer is asked for candidates; None for no limit.
            llm: the language model of the proposer `llm`.
            replay: what the proposer `replay` makes again; its root is the one they were made from.

        Raises:
            ValueError: an argument is out of its range, or the root is no implementation of the operator.
            RuntimeError: the folder cannot be written.
        """
        if not elsewhere:
            require_device(device)
        operator = ops.get(operator, device) if isinstance(operator, str) else operator
        contract = operator.contract
        dtype = contract.dtypes[0] if dtype is None else dtype
        if proposer not in PROPOSERS:
            raise ValueError(f"proposer must be one of {', '.join(PROPOSERS)}, got {proposer!r}")
        if (proposer == "llm") != (llm is not None):
            raise ValueError("a model's settings go with the proposer llm, and it needs them: give --model")
        if (proposer == "replay") != bool(replay):
            raise ValueError(
                "recorded proposals go with the proposer replay, and it needs them: give --replay"
            )
        if dtype not in contract.dtypes:
            raise ValueError(f"dtype must be one of {', '.join(contract.dtypes)}, got {dtype!r}")
        if llm is not None:
            llm.require()
        source = _root(operator, device, root)
        check_source(source, operator)
        kept = operator.grids.get("held_out", ()) if held_out is None else tuple(held_out)
        timed = operator.grids["study"] if workloads is None else tuple(workloads)
        if workloads is None:
            timed = tuple(each for each in timed if each not in kept)
        axes = constant_axes(operator, timed)
        check_held_out(operator, axes, kept)
        record = schema.Study(
            name=Path(folder).name,
            operator=operator.name,
            contract=contract.name,
            contract_hash=contract.hash,
            device=device,
            dtype=dtype,
            constant_axes=axes,
            workloads=timed,
            policy=_policy(policy),
            proposer=proposer,
            seed=seed,
            harness=jobs.harness_hash(operator.name),
            package=kernelbraid.__version__,
            patience=patience,
            minutes=minutes,
            audits=audits,
            proposer_calls=proposer_calls,
            arm="no-evidence" if llm is not None and llm.evidence == "none" else "full",
        )
        store = Store.create(Path(folder), record, source, contract.requirements, kept)
        if llm is not None:
            proposing.record_settings(store, llm.to_json(), prompts.shipped())
        if replay:
            replaying.record(store, replay)
        return cls(store, operator)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a study folder.

        Raises:
            ValueError: there is no study, or its operator is unknown.
            RuntimeError: the folder cannot be read or written.
        """
        store = Store.open(Path(folder))
        try:
            return cls(store, ops.get(store.study.operator, store.study.device))
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        return self.store.folder

    @property
    def contract(self) -> Contract:
        return self.operator.contract

    @property
    def workloads(self) -> tuple[Workload, ...]:
        return self.store.study.workloads

    @property
    def held_out(self) -> frozenset[str]:
        """Names of the workloads that proposers never see."""
        return frozenset(each.name for each in self.store.held_out)

    def whole(self, evidence: AuditEvidence) -> AuditEvidence:
        """Return a full audit's evidence with what `standings` leaves out; for promotion and certificates."""
        self.standings()
        return self._whole.get(evidence.job, evidence)

    @property
    def policy(self) -> BitPolicy:
        return self.store.study.policy

    @property
    def root(self) -> str:
        return self.store.study.root

    @property
    def incumbent(self) -> str:
        return query.incumbent(self.store).sha256

    def standings(self) -> dict[str, Standing]:
        """Return where each audited implementation stands, in the order of their first audits.

        The evidence is what proposers may read: without held-out workloads.
        """
        held_out = self.held_out
        with self.store.read() as session, kept_objects():
            new = evidence_after(session, self._seen)
            for _, found in new:
                if held_out and found.level is Level.FULL:
                    self._whole[found.job] = found
                self._audits.setdefault(found.implementation, []).append(shown(found, held_out))
        for sha256 in {found.implementation for _, found in new}:
            self._standings[sha256] = standing(self._audits[sha256], len(self.workloads))
        self._seen = max((seq for seq, _ in new), default=self._seen)
        return {sha256: self._standings[sha256] for sha256 in self._audits}

    def parents(self, sha256: str) -> tuple[str, ...]:
        """Return the parents of an implementation; the root has none."""
        if sha256 not in self._parents and sha256 != self.root:
            self._parents = {each.child: each.parents for each in survey.changes(self.store)}
        return self._parents.get(sha256, ())

    def admit(self, proposal: Proposal) -> str:
        """Record a proposal as an implementation and request its audit.

        A parent that was archived is taken up again: it is measured anew beside today's incumbent, first.

        Returns:
            The id of the request.

        Raises:
            DuplicateSourceError: the study has this source already; the opportunity is closed as such.
            ValueError: the source is no implementation of the operator, or the modification is not lawful.
        """
        check_source(proposal.source, self.operator)
        try:
            with self.store.transaction():
                added = self.store.add_implementation(
                    proposal.source,
                    parents=proposal.parents,
                    hypothesis=proposal.hypothesis,
                    proposer=proposal.proposer,
                    functions=proposal.functions,
                    regimes=proposal.regimes,
                    expected_effect=proposal.expected_effect,
                    requirements_at_risk=proposal.requirements_at_risk,
                    falsified_by=proposal.falsified_by,
                    opportunity=proposal.opportunity,
                )
                self._take_up(added.sha256, proposal.proposer)
                return self.store.request_audit(added.sha256, Level.SCREEN)
        except DuplicateSourceError as duplicate:
            if proposal.opportunity is not None:
                self.store.close_opportunity(
                    proposal.opportunity,
                    Outcome.DUPLICATE,
                    reason=str(duplicate),
                    implementation=duplicate.existing.sha256,
                )
            raise

    def rehearse(self, proposal: Proposal) -> None:
        """Raise what `admit` would raise, and record nothing."""
        with suppress(_Rehearsed), self.store.transaction():
            self.admit(proposal)
            raise _Rehearsed

    def _take_up(self, child: str, proposer: str) -> None:
        """Reopen the archived parents of a new implementation, and measure them again."""
        archived = {each.sha256 for each in query.archive(self.store)}
        for parent in self.parents(child):
            if parent in archived:
                reason = f"{child[:12]} was made from it"
                self.store.decide(parent, Lineage.CONTINUE, reason=reason, decided_by=proposer or "search")
                self.store.request_audit(parent, Level.SCREEN)

    def summary(self) -> dict[str, Any]:
        """Return what the study found so far, JSON-able: see `summary.summary`."""
        return summary(self)

    def require_contract(self) -> None:
        """Raise ValueError unless the study was made under the operator's present contract."""
        if self.contract.hash != self.store.study.contract_hash:
            raise ValueError(self._outdated("contract"))

    def require_current(self) -> None:
        """Raise ValueError unless this version of kernelbraid judges as the study's evidence was judged."""
        self.require_contract()
        if jobs.harness_hash(self.store.study.operator) != self.store.study.harness:
            raise ValueError(self._outdated("judging code"))

    def _outdated(self, what: str) -> str:
        return (
            f"{self.folder} was made under another state of the {what}, and its evidence does not carry "
            "over: start a new study, or use the version that made it"
        )


def check_source(source: Source, operator: Operator) -> None:
    """Raise ValueError unless a source parses, defines what implementations export, has lawful knobs.

    Nothing is executed; the audit is what decides on everything else.
    """
    edits.declared(source, operator.contract)
    defined = {node.name for node in ast.parse(source.text).body if isinstance(node, ast.FunctionDef)}
    missing = [name for name in (*operator.entry_points, *DECLARATIONS) if name not in defined]
    if missing:
        label = source.label or source.short
        raise ValueError(
            f"{label} must define {', '.join(missing)} to be an implementation of {operator.name}"
        )


def read_source(path: Path) -> Source:
    """Read an implementation from a file.

    Raises:
        ValueError: there is no such file, or it is not UTF-8 text.
    """
    try:
        return Source(Path(path).read_bytes().decode(), label=Path(path).name)
    except OSError as error:
        raise ValueError(f"cannot read the implementation {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the implementation {path} is not UTF-8 text: {error.reason}") from error


def constant_axes(operator: Operator, workloads: Sequence[Workload]) -> tuple[dict[str, int], ...]:
    """Return the distinct values of the constant axes among workloads.

    Raises:
        ValueError: a workload lacks one of them, or is of a regime that the operator does not have.
    """
    found: list[dict[str, int]] = []
    for workload in workloads:
        if workload.phase not in operator.regimes:
            raise ValueError(
                f"{operator.name} has no regime {workload.phase}; it has {', '.join(operator.regimes)}"
            )
        axes = operator.constant_axes(workload)
        for name, value in axes.items():
            operator.contract.axis(name).check(value)
        if axes not in found:
            found.append(axes)
    return tuple(found)


def check_held_out(
    operator: Operator, shown_axes: Sequence[Mapping[str, int]], held_out: Sequence[Workload]
) -> None:
    """Raise ValueError unless held-out workloads are of the same declared domain as those that are shown."""
    for axes in constant_axes(operator, held_out):
        if axes not in shown_axes:
            named = ", ".join(f"{name}={value}" for name, value in axes.items())
            raise ValueError(
                f"held_out must have constant axes that the study's workloads have, got {named}: the bits id "
                "and the checks of a screen cover no others"
            )


def chosen_workloads(operator: Operator, names: Sequence[str]) -> tuple[Workload, ...]:
    """Return workloads by the names of theirs, or of the operator's grids, each once.

    Raises:
        ValueError: there is no such grid or workload.
    """
    found: dict[str, Workload] = {}
    for name in names:
        known = {each.name: each for grid in operator.grids.values() for each in grid}
        picked = operator.grids.get(name) or ((known[name],) if name in known else None)
        if picked is None:
            raise ValueError(
                f"held_out names {name}, which is neither a grid of {operator.name} "
                f"({', '.join(operator.grids)}) nor a workload of one"
            )
        found |= {each.name: each for each in picked}
    return tuple(found.values())


def some_workloads(operator: Operator, names: Sequence[str]) -> tuple[Workload, ...]:
    """Return those workloads of the operator's grid `study` that are named, or whose phase is.

    Raises:
        ValueError: a name is neither.
    """
    grid = operator.grids["study"]
    for name in names:
        if not any(name in (each.name, each.phase) for each in grid):
            phases = ", ".join(dict.fromkeys(each.phase for each in grid))
            raise ValueError(f"workload must be one of {operator.name} or a phase ({phases}), got {name!r}")
    return tuple(each for each in grid if each.name in names or each.phase in names)


def _root(operator: Operator, device: str, root: Source | Path | None) -> Source:
    if root is None:
        return ops.source(operator)
    return root if isinstance(root, Source) else read_source(root)


def _policy(policy: BitPolicy | str) -> BitPolicy:
    known = {each.value: each for each in BitPolicy}
    if policy not in known:
        raise ValueError(f"policy must be one of {', '.join(known)}, got {policy!r}")
    return known[policy]
