"""What a study records of a language model that proposes, and of audits that came to nothing.

A call is written down with the most it may cost before it is made, and with what the endpoint reports
afterwards: a process that dies in between is charged for it, and what nobody reported stays unknown.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from kernelbraid.contract import content_hash
from kernelbraid.ir.schema import (
    AuditInterruption,
    ModelAnswer,
    ModelCall,
    ModelSettings,
    Prompt,
    ProposerAttempt,
    Usage,
)
from kernelbraid.ir.store import Store

PURPOSE = "model"
"""Of the usage of model calls."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What the calls of a study cost so far."""

    calls: int
    tokens: int
    """Charged to the budget: as reported, or the most a call may have used where nothing was reported."""
    money: float | None
    """US dollars, so charged; None once a call's price is unknown."""
    tokens_in: int | None
    """As reported; None where no call reported any."""
    tokens_out: int | None
    money_reported: float | None
    unreported: int
    """Calls that may have used tokens nobody reported."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The latest settings of a study's language model, with the prompts it was given."""

    values: Mapping[str, Any]
    prompts: Mapping[str, str]
    """Name -> text."""


def record_settings(store: Store, values: Mapping[str, Any], prompts: Mapping[str, str]) -> None:
    """Write down what a language model is told and may spend; prompts are kept once each, by their hash.

    Args:
        store: of the study.
        values: JSON-able; never a key.
        prompts: name -> text.
    """
    hashes = {name: content_hash([name, text]) for name, text in prompts.items()}
    with store.transaction() as session:
        for name, sha256 in hashes.items():
            if session.get(Prompt, sha256) is None:
                session.add(Prompt(sha256=sha256, name=name, text=prompts[name]))
        session.add(ModelSettings(settings=dict(values), prompts=tuple(hashes.values())))


def settings(store: Store) -> Settings | None:
    """Return the settings that hold; None where no language model proposes."""
    with store.read() as session:
        row = session.scalars(select(ModelSettings).order_by(ModelSettings.id.desc()).limit(1)).first()
        if row is None:
            return None
        found = session.scalars(select(Prompt).where(Prompt.sha256.in_(row.prompts)))
        return Settings(row.settings, {each.name: each.text for each in found})


def begin_call(store: Store, tokens: int, money: float | None) -> int:
    """Write down a call that is about to be made and the most it may cost; return its id."""
    with store.transaction() as session:
        call = ModelCall(tokens=tokens, money=money)
        session.add(call)
        session.flush()
        return call.id


def end_call(
    store: Store, call: int, *, outcome: str, model: str, seconds: float, usage: Usage | None
) -> None:
    """Write down how a call ended.

    Args:
        store: of the study.
        call: what `begin_call` returned.
        outcome: why the answer ends, or the error.
        model: as the endpoint tells it.
        seconds: that the call took.
        usage: as reported, unknown numbers None; None where the endpoint refused the call.
    """
    with store.transaction() as session:
        if usage is not None:
            store.record_usage(usage)
            session.flush()
        session.add(
            ModelAnswer(
                call=call,
                usage=None if usage is None else usage.id,
                outcome=outcome,
                model=model,
                seconds=seconds,
            )
        )


def spent(store: Store) -> Spent:
    """Return what calls cost so far, over all processes."""
    rows = (
        select(ModelCall, ModelAnswer.call, Usage)
        .join(ModelAnswer, ModelAnswer.call == ModelCall.id, isouter=True)
        .join(Usage, Usage.id == ModelAnswer.usage, isouter=True)
    )
    calls, tokens, unreported = 0, 0, 0
    money: float | None = 0.0
    read: list[int] = []
    written: list[int] = []
    told: list[float] = []
    with store.read() as session:
        found: Sequence[Any] = session.execute(rows).all()
    usage: Usage | None
    for call, answered, usage in found:
        calls += 1
        if answered is not None and usage is None:
            continue  # refused, and so for nothing
        charged = call.money
        if usage is not None and usage.money is not None:
            charged = usage.money
            told.append(usage.money)
        money = None if money is None or charged is None else money + charged
        if usage is not None and usage.tokens_in is not None and usage.tokens_out is not None:
            read.append(usage.tokens_in)
            written.append(usage.tokens_out)
            tokens += usage.tokens_in + usage.tokens_out
        else:
            tokens += call.tokens
            unreported += 1
    return Spent(
        calls=calls,
        tokens=tokens,
        money=money,
        tokens_in=sum(read) if read else None,
        tokens_out=sum(written) if written else None,
        money_reported=math.fsum(told) if told else None,
        unreported=unreported,
    )


def record_attempt(store: Store, proposer: str, outcome: str, reason: str) -> None:
    """Write down what came of asking for a candidate: `proposed`, `declined` or `failed`, and why."""
    with store.transaction() as session:
        last = session.scalar(select(func.max(ModelCall.id)))
        session.add(ProposerAttempt(proposer=proposer, outcome=outcome, reason=reason, last_call=last))


def attempts(store: Store) -> list[ProposerAttempt]:
    """Return every attempt, oldest first."""
    with store.read() as session:
        return list(session.scalars(select(ProposerAttempt).order_by(ProposerAttempt.id)))


def record_interruptions(store: Store, requests: Sequence[str], reason: str, output: str = "") -> None:
    """Write down that audits ended without evidence; they stay pending.

    Args:
        store: of the study.
        requests: their ids.
        reason: one sentence.
        output: what the command printed last.
    """
    with store.transaction() as session:
        session.add_all(AuditInterruption(request=each, reason=reason, output=output) for each in requests)


def interruptions(store: Store) -> list[AuditInterruption]:
    """Return every interruption, oldest first."""
    with store.read() as session:
        return list(session.scalars(select(AuditInterruption).order_by(AuditInterruption.id)))
