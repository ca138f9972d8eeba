"""Files that are missing, foreign, damaged, newer or read-only: one clear sentence, nothing half-written."""

import errno
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from tests.ir.plain import ROOT, answer, audited, child, new_store, source

from kernelbraid.ir import files, query
from kernelbraid.ir.evidence import Level
from kernelbraid.ir.store import Store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "study"
    with new_store(folder) as store:
        audited(store, ROOT.sha256)
        for number in range(20):
            child(store, number)
    return folder


def refused(folder: Path, match: str, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind, match=match) as error:
        Store.open(folder)
    assert "\n" not in str(error.value)


def test_there_must_be_a_study(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "there is no study at")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "there is no study at")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no study")
    assert list((tmp_path / "empty").iterdir()) == []


def test_foreign_databases_are_left_alone(folder: Path) -> None:
    database = folder / "study.db"
    database.unlink()
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE note (text)")
    connection.close()
    before = database.read_bytes()
    refused(folder, "database of another program")
    assert database.read_bytes() == before
    assert not (folder / "study.db-wal").exists()


@pytest.mark.parametrize("content", [b"", b"hello\n", b"SQLite format 3\x00", bytes(200)])
def test_files_that_are_no_database(folder: Path, content: bytes) -> None:
    (folder / "study.db").write_bytes(content)
    refused(folder, "damaged or no database")


def test_damaged_pages_are_noticed(folder: Path) -> None:
    database = folder / "study.db"
    whole = database.read_bytes()
    assert not (folder / "study.db-wal").exists()
    for at in (100, 4096, len(whole) // 2):
        database.write_bytes(whole[:at] + bytes([0xA5]) * 3000 + whole[at + 3000 :])
        refused(folder, "damaged")
    database.write_bytes(whole[: len(whole) // 2])
    refused(folder, "damaged")
    database.write_bytes(whole)
    Store.open(folder).check()


def test_a_newer_schema_is_refused(folder: Path) -> None:
    with sqlite3.connect(folder / "study.db") as connection:
        connection.execute("INSERT INTO schema_version (version, created) VALUES (99, 0)")
    connection.close()
    refused(folder, "has schema 99")


def test_a_database_without_a_study_is_refused(folder: Path) -> None:
    with sqlite3.connect(folder / "study.db") as connection:
        connection.execute("DROP TRIGGER study_refuses_delete")
        connection.execute("DELETE FROM study")
    connection.close()
    refused(folder, "without a study")


def test_a_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    refused(folder, "cannot be written", RuntimeError)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="cannot write the study folder"):
        new_store(Path("/proc/study"))
    (folder.parent / "file").write_text("")
    with pytest.raises(RuntimeError, match="cannot write the study folder"):
        new_store(folder.parent / "file" / "study")


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = Store.open(folder)
    request = store.request_audit(source(0).sha256, Level.SCREEN)
    evidence = answer(store, request)
    monkeypatch.setattr(files.os, call, full)
    with pytest.raises(RuntimeError, match="No space left"):
        new_store(tmp_path / "another")
    with pytest.raises(RuntimeError, match="No space left"):
        child(store, 100)
    with pytest.raises(RuntimeError, match="No space left"):
        store.record(evidence)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["study"]
    assert not [path for path in folder.rglob("*partial*")]
    assert [pending.id for pending in store.pending()] == [request]
    store.check()
    child(store, 100)
    assert store.record(evidence)


def test_a_full_database_is_one_sentence(folder: Path) -> None:
    store = Store.open(folder)
    before = len(query.implementations(store))
    with pytest.raises(RuntimeError, match="disk is full"), store.transaction() as session:
        pages = session.connection().exec_driver_sql("PRAGMA page_count").scalar()
        session.connection().exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        for number in range(100, 400):
            child(store, number)
    with store.read() as session:
        session.connection().exec_driver_sql("PRAGMA max_page_count = 1000000")
    assert len(query.implementations(store)) == before
    store.check()


def test_a_study_may_be_moved(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder, tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "elsewhere" / "jobs")
    with Store.open(tmp_path / "elsewhere") as store:
        store.check()
        assert (store.folder / "jobs").is_dir()


def test_a_missing_log_is_noticed(folder: Path) -> None:
    store = Store.open(folder)
    (log,) = (folder / "logs").iterdir()
    log.write_text("something else")
    with pytest.raises(RuntimeError, match="no longer match"):
        store.log(log.stem)
    with pytest.raises(RuntimeError, match="no longer match"):
        query.evidence(store, log.stem)
    log.unlink()
    with pytest.raises(RuntimeError, match="cannot read"):
        store.check()
    with pytest.raises(ValueError, match="no audit"):
        store.log("0" * 16)
