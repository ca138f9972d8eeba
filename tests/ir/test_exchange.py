"""A study travels as one file, whole or not at all."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.ir.plain import ROOT, answer, audited, child, failed, modelled, new_store, promoted

from kernelbraid.ir import query
from kernelbraid.ir.evidence import Level, Status
from kernelbraid.ir.exchange import export_study, import_study
from kernelbraid.ir.schema import Lineage, Outcome, Usage
from kernelbraid.ir.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return eventful(tmp_path / "study")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("eventful")
    export_study(eventful(folder / "study"), folder / "export")
    return (folder / "export").read_bytes().splitlines(keepends=True)


def eventful(folder: Path) -> Store:
    """A study with at least one record of every kind."""
    store = new_store(folder)
    first = audited(store, ROOT.sha256, ratio=1.0)
    taken, closed, _ = (
        store.add_opportunity(
            parents=[ROOT.sha256],
            mechanism="m",
            edit={"BLOCK": n, "why": None},
            rationale="r",
            source_audit=first,
        )
        for n in range(3)
    )
    a = child(store, 1, opportunity=taken.id)
    store.close_opportunity(closed.id, Outcome.DUPLICATE, reason="same", implementation=a)
    promoted(store, a)
    b = child(store, 2, (ROOT.sha256, a))
    request = store.request_audit(b, Level.SCREEN)
    verdict = failed("toy/1/accuracy_out/decode")[0]
    nan = type(verdict)(verdict.requirement, False, 1, 1, float("nan"), verdict.difference)
    store.record(
        answer(store, request, Status.INACCURATE, verdicts=(nan,), output="odd \ud800\x00\r\n\u2028")
    )
    c = child(store, 3)
    screen = audited(store, c)
    checks = [{"check": "limit", "bound": float("inf")}]
    store.promote(
        screen_audit=screen, full_audit=None, granted=False, reason="r", blocked_by="decode", checks=checks
    )
    audited(store, child(store, 4, (c,)), Status.CRASHED)
    store.request_audit(child(store, 5), Level.SCREEN)
    store.decide(c, Lineage.ARCHIVE, reason="slower", decided_by="loop")
    store.record_usage(Usage(purpose="search", wall_seconds=1 / 3, tokens_in=None, money=0.1))
    modelled(store)
    return store


def test_a_round_trip_changes_nothing(store: Store, tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    lines = export_study(store, first)
    assert lines == len(first.read_bytes().splitlines()) == first.read_bytes().count(b"\n")
    with import_study(first, tmp_path / "deep" / "copy") as copy:
        assert export_study(copy, second) == lines
        assert second.read_bytes() == first.read_bytes()
        assert copy.study == store.study
        assert query.totals(copy) == query.totals(store)
        assert [repr(a) for a in query.audits(copy)] == [repr(a) for a in query.audits(store)]
        assert query.promotions(copy) == query.promotions(store)
        assert query.incumbent(copy) == query.incumbent(store)
        assert [p.id for p in copy.pending()] == [p.id for p in store.pending()]
        for implementation in query.implementations(store):
            assert copy.source(implementation.sha256) == store.source(implementation.sha256)
        audited(copy, copy.pending()[0].implementation)
        copy.check()
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["copy"]


def test_an_export_is_plain_json_lines(store: Store, tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    export_study(store, tmp_path / "a.jsonl")
    entries = [
        json.loads(line, parse_constant=refuse) for line in (tmp_path / "a.jsonl").read_bytes().splitlines()
    ]
    kinds = {entry["record"] for entry in entries if "record" in entry}
    assert len(kinds) == 22
    assert entries[-1]["end"]["lines"] == len(entries) - 1


def refused(path: Path, folder: Path, match: str) -> None:
    before = sorted(folder.parent.iterdir())
    with pytest.raises(ValueError, match=match):
        import_study(path, folder)
    assert sorted(folder.parent.iterdir()) == before


def closed(lines: list[bytes]) -> bytes:
    """The lines with a closing line that fits them, as a careful forger would write it."""
    body = b"".join(lines)
    end = {"end": {"lines": len(lines), "sha256": hashlib.sha256(body).hexdigest()}}
    return body + json.dumps(end).encode() + b"\n"


def test_a_file_cut_short_is_refused_wherever_it_ends(lines: list[bytes], tmp_path: Path) -> None:
    path, whole = tmp_path / "cut", b"".join(lines)
    for at in (
        0,
        1,
        len(lines[0]) - 1,
        len(lines[0]),
        *range(500, len(whole) - 1, len(whole) // 12),
        len(whole) - 2,
    ):
        path.write_bytes(whole[:at])
        refused(path, tmp_path / "copy", r"line \d+")
    path.write_bytes(b"".join(lines[:-1]))
    refused(path, tmp_path / "copy", rf"stops after line {len(lines) - 1} without its closing line")


def test_a_changed_file_is_refused(lines: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "changed"
    for number in range(0, len(lines) - 1, 5):
        changed = list(lines)
        changed[number] = changed[number].replace(b"1", b"2").replace(b'"r"', b'"s"') + b"\n"
        path.write_bytes(b"".join(changed))
        refused(path, tmp_path / "copy", r"line \d+")
    path.write_bytes(b"".join([*lines[:5], *lines[6:]]))
    refused(path, tmp_path / "copy", r"line \d+")
    path.write_bytes(b"".join(lines) + b"{}\n")
    refused(path, tmp_path / "copy", rf"line {len(lines)} does not fit")


def row(kind: str, **changes: Any) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    def edit(entry: dict[str, Any]) -> dict[str, Any] | None:
        return {**entry, "row": {**entry["row"], **changes}} if entry.get("record") == kind else None

    return edit


FORGERIES: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "unknown table": lambda e: {**e, "record": "sqlite_master"} if "record" in e else None,
    "unknown column": row("implementation", colour="red"),
    "short hash": row("implementation", sha256="abc"),
    "number for a text": row("study", name=3),
    "text for a number": row("measurement", calls="many"),
    "nothing for a number": row("measurement", calls=None),
    "unknown status": row("audit", status="fine"),
    "unknown level": row("audit_request", level="all"),
    "malformed JSON": row("audit", numerics=[1, 2]),
    "malformed environment": row("audit", environment={"architecture": "cpu"}),
    "unknown implementation": row("modification_parent", parent="f" * 64),
    "unknown audit": row("verdict", audit=99),
    "verdict of an accepted audit not held": row("verdict", held=False),
    "negative time": row("measurement", candidate_ms=[-1.0, 1.0, 1.0]),
    "another harness": row("study", harness="h"),
    "no patience": row("study", patience="x"),
    "promotion without a full audit": row("promotion_decision", full_audit=None),
    "another incumbent": row("audit", incumbent="f" * 64),
    "source of other bytes": lambda e: {**e, "text": "x = 1\n"} if "source" in e else None,
    "source outside the folder": lambda e: {**e, "source": "../../evil"} if "source" in e else None,
    "log of other bytes": lambda e: {**e, "text": "fine"} if "log" in e else None,
    "log outside the folder": lambda e: {**e, "log": "../../evil"} if "log" in e else None,
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_record_is_refused(lines: list[bytes], tmp_path: Path, name: str) -> None:
    forged, hit = [], False
    for line in lines[:-1]:
        entry = None if hit else FORGERIES[name](json.loads(line))
        hit = hit or entry is not None
        forged.append(line if entry is None else json.dumps(entry).encode() + b"\n")
    assert hit
    (tmp_path / "forged").write_bytes(closed(forged))
    refused(tmp_path / "forged", tmp_path / "copy", r"line \d+ is not a valid|no consistent study")


@pytest.mark.parametrize("missing", ["source", "log", "verdict", "modification", "requirement", "study"])
def test_a_missing_record_is_refused(lines: list[bytes], tmp_path: Path, missing: str) -> None:
    entries = [json.loads(line) for line in lines[:-1]]
    at = next(i for i, e in enumerate(entries) if missing in e or e.get("record") == missing)
    (tmp_path / "forged").write_bytes(closed([*lines[:at], *lines[at + 1 : -1]]))
    refused(
        tmp_path / "forged", tmp_path / "copy", r"line \d+ is not a valid|no consistent study|without a study"
    )


@pytest.mark.parametrize(
    "text", [b"", b"hello\n", b"[]\n", b"{}\n", b'{"kernelbraid_study":9,"schema":1}\n', b"\xff\n"]
)
def test_foreign_files_are_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "foreign").write_bytes(text)
    refused(tmp_path / "foreign", tmp_path / "copy", "line [01]")


def test_missing_files_and_folders_in_use(store: Store, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cannot read"):
        import_study(tmp_path / "absent", tmp_path / "copy")
    export_study(store, tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="exists already"):
        import_study(tmp_path / "a.jsonl", store.folder)
    with pytest.raises(RuntimeError, match="cannot write"):
        export_study(store, tmp_path / "absent" / "a.jsonl")
    source_file = store.folder / "sources" / f"{ROOT.sha256}.py"
    source_file.write_text("changed")
    with pytest.raises(RuntimeError, match="no longer match"):
        export_study(store, tmp_path / "b.jsonl")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "study"]
