"""Proposals of another study, kept here so that they can be made again, whatever becomes of that one."""

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import select

from kernelbraid.contract import Source
from kernelbraid.ir import query
from kernelbraid.ir.schema import RecordedProposal
from kernelbraid.ir.store import Store


@dataclass(frozen=True, slots=True)
class Recorded:
    """One proposal as it was made."""

    source: Source
    parents: tuple[str, ...]
    hypothesis: str
    functions: tuple[str, ...]
    regimes: tuple[str, ...]
    expected_effect: str
    requirements_at_risk: tuple[str, ...]
    falsified_by: str
    proposer: str


def read(store: Store) -> list[Recorded]:
    """Return every proposal that a study recorded, in the order in which they were made."""
    with store.read():
        found = []
        for each in query.implementations(store):
            change = query.modification(store, each.sha256)
            if change is not None:
                found.append(
                    Recorded(
                        source=store.source(each.sha256),
                        parents=change.parents,
                        hypothesis=change.hypothesis,
                        functions=change.functions,
                        regimes=change.regimes,
                        expected_effect=change.expected_effect,
                        requirements_at_risk=change.requirements_at_risk,
                        falsified_by=change.falsified_by,
                        proposer=change.proposer,
                    )
                )
        return found


def record(store: Store, proposals: Iterable[Recorded]) -> None:
    """Write down the proposals that a study is to make again, all of them or none."""
    with store.transaction() as session:
        session.add_all(
            RecordedProposal(
                position=position,
                sha256=each.source.sha256,
                text=each.source.text,
                label=each.source.label,
                parents=each.parents,
                hypothesis=each.hypothesis,
                functions=each.functions,
                regimes=each.regimes,
                expected_effect=each.expected_effect,
                requirements_at_risk=each.requirements_at_risk,
                falsified_by=each.falsified_by,
                proposer=each.proposer,
            )
            for position, each in enumerate(proposals)
        )


def recorded(store: Store) -> list[Recorded]:
    """Return the proposals that a study is to make again, in their order."""
    with store.read() as session:
        rows = session.scalars(select(RecordedProposal).order_by(RecordedProposal.position)).all()
    return [
        Recorded(
            source=Source(row.text, row.label),
            parents=row.parents,
            hypothesis=row.hypothesis,
            functions=row.functions,
            regimes=row.regimes,
            expected_effect=row.expected_effect,
            requirements_at_risk=row.requirements_at_risk,
            falsified_by=row.falsified_by,
            proposer=row.proposer,
        )
        for row in rows
    ]
