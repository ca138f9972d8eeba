"""Records of language models: what is charged, what stays unknown, and how they travel."""

import hashlib
import json
from pathlib import Path

import pytest
from tests.ir.plain import ROOT, new_store

from kernelbraid.ir import proposing, query
from kernelbraid.ir.evidence import Level
from kernelbraid.ir.exchange import export_study, import_study
from kernelbraid.ir.schema import Usage
from kernelbraid.ir.store import Store

PROMPTS = {"rules": "be exact", "candidate": "write $task"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "study")


def usage(read: int | None = None, written: int | None = None, money: float | None = None) -> Usage:
    return Usage(purpose=proposing.PURPOSE, tokens_in=read, tokens_out=written, money=money)


def ended(store: Store, usage: Usage | None, tokens: int = 1000, money: float | None = 0.5) -> None:
    call = proposing.begin_call(store, tokens, money)
    proposing.end_call(store, call, outcome="stop", model="m", seconds=1.0, usage=usage)


def test_nothing_is_spent_at_first(store: Store) -> None:
    spent = proposing.spent(store)
    assert spent == proposing.Spent(0, 0, 0.0, None, None, None, 0)
    assert proposing.settings(store) is None


def test_what_is_reported_is_charged_and_the_most_where_nothing_is(store: Store) -> None:
    ended(store, usage(100, 20, 0.25))
    ended(store, usage())
    ended(store, None)  # refused
    proposing.begin_call(store, 7000, 2.0)  # cut off
    spent = proposing.spent(store)
    assert (spent.calls, spent.unreported) == (4, 2)
    assert spent.tokens == 120 + 1000 + 7000 and spent.money == 0.25 + 0.5 + 2.0
    assert (spent.tokens_in, spent.tokens_out, spent.money_reported) == (100, 20, 0.25)
    assert query.totals(store).tokens_in == 100


def test_usage_that_nobody_reported_is_never_zero(store: Store) -> None:
    ended(store, usage(), money=None)
    spent = proposing.spent(store)
    assert (spent.tokens_in, spent.tokens_out, spent.money_reported, spent.money) == (None, None, None, None)
    assert query.totals(store).tokens_out is None and spent.tokens == 1000


def test_the_latest_settings_hold_and_prompts_are_kept_once(store: Store) -> None:
    proposing.record_settings(store, {"model": "a"}, PROMPTS)
    proposing.record_settings(store, {"model": "b"}, {**PROMPTS, "rules": "be quick"})
    found = proposing.settings(store)
    assert found is not None and found.values == {"model": "b"}
    assert found.prompts == {**PROMPTS, "rules": "be quick"}


def test_they_travel_with_the_study(store: Store, tmp_path: Path) -> None:
    proposing.record_settings(store, {"model": "a"}, PROMPTS)
    ended(store, usage(100, 20))
    ended(store, None)
    proposing.record_attempt(store, "llm", "failed", "refused")
    request = store.request_audit(ROOT.sha256, Level.SCREEN)
    proposing.record_interruptions(store, [request], "connection lost", "ssh: no route")
    export_study(store, tmp_path / "export")
    with import_study(tmp_path / "export", tmp_path / "copy") as copy:
        assert proposing.spent(copy) == proposing.spent(store)
        assert proposing.settings(copy) == proposing.settings(store)
        (attempt,) = proposing.attempts(copy)
        assert (attempt.outcome, attempt.reason, attempt.last_call) == ("failed", "refused", 2)
        (interruption,) = proposing.interruptions(copy)
        assert interruption.request == request and interruption.output == "ssh: no route"


def test_an_export_of_the_first_layout_is_read(store: Store, tmp_path: Path) -> None:
    export_study(store, tmp_path / "export")
    first, *lines = (tmp_path / "export").read_bytes().splitlines(keepends=True)
    lines = [first.replace(b'"schema":4', b'"schema":1'), *lines[:-1]]
    end = {"end": {"lines": len(lines), "sha256": hashlib.sha256(b"".join(lines)).hexdigest()}}
    (tmp_path / "older").write_bytes(b"".join(lines) + json.dumps(end).encode() + b"\n")
    with import_study(tmp_path / "older", tmp_path / "copy") as copy:
        assert copy.study.root == ROOT.sha256
