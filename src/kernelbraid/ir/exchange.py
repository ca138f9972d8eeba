"""A whole study as one JSONL file: records, sources and logs, one a line, closed by a count and a hash.

Nothing of a damaged file is imported: every line is checked, then the invariants of the whole, and only then
does the new folder appear under its name.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import Column, Float, String, Table, exists, select
from sqlalchemy.exc import StatementError
from sqlalchemy.orm import Session

from kernelbraid.contract import Source
from kernelbraid.ir.columns import AnyFloat, Json, WideInt, plain
from kernelbraid.ir.database import Database
from kernelbraid.ir.files import new_folder, whole_file, write_whole
from kernelbraid.ir.schema import (
    SCHEMA_VERSION,
    Audit,
    AuditMeasurement,
    Implementation,
    Record,
    SchemaVersion,
)
from kernelbraid.ir.store import DATABASE, FOLDERS, Store, log_path, source_path

FORMAT = 1
_LAST = AuditMeasurement.__tablename__  # measurements are refused before their verdicts
_TABLES = {
    table.name: table
    for table in sorted(Record.metadata.sorted_tables, key=lambda table: table.name == _LAST)
    if table.name != SchemaVersion.__tablename__
}


def export_study(store: Store, path: Path) -> int:
    """Write a study to one JSONL file, whole or not at all.

    Args:
        store: the study; it may be in use meanwhile.
        path: the file to write; an existing one is replaced.

    Returns:
        The number of lines.

    Raises:
        RuntimeError: the file cannot be written, or a source or log of the study was changed.
    """
    digest = hashlib.sha256()
    count = 0
    with whole_file(path) as temporary, temporary.open("wb") as file:
        for entry in _entries(store):
            line = _line(entry)
            digest.update(line)
            count += 1
            file.write(line)
        file.write(_line({"end": {"lines": count, "sha256": digest.hexdigest()}}))
    return count + 1


def _line(entry: dict[str, Any]) -> bytes:
    return (json.dumps(entry, separators=(",", ":"), allow_nan=False) + "\n").encode()


def _entries(store: Store) -> Iterator[dict[str, Any]]:
    yield {"kernelbraid_study": FORMAT, "schema": SCHEMA_VERSION}
    with store.read() as session:
        for name, table in _TABLES.items():
            for row in session.execute(select(table).order_by(*table.primary_key.columns)):
                values = zip(table.columns, row, strict=True)
                yield {
                    "record": name,
                    "row": {column.name: _outward(column, item) for column, item in values},
                }
        for sha256 in session.scalars(select(Implementation.sha256).order_by(Implementation.seq)):
            yield {"source": sha256, "text": store.source(sha256).text}
        logs = select(Audit.request).where(Audit.log.is_not(None)).order_by(Audit.seq)
        for request in session.scalars(logs):
            yield {"log": request, "text": store.log(request)}


def _outward(column: Column[Any], value: Any) -> Any:
    return str(value) if isinstance(column.type, WideInt) else plain(value)


def _inward(column: Column[Any], value: Any) -> Any:
    """The value of a column from its JSON form; ValueError or TypeError where it is none."""
    kind = column.type
    if value is None:
        return None
    if isinstance(kind, Json):
        return kind.decode(value)
    if isinstance(kind, (AnyFloat, Float)):
        return float(value)
    if isinstance(kind, WideInt):
        return int(value)
    expected = str if isinstance(kind, String) else kind.python_type
    if type(value) is not expected:
        raise TypeError(f"{column.name} must be {expected.__name__}, got {value!r}")
    return value


def import_study(path: Path, folder: Path) -> Store:
    """Make a new study folder from an exported file, whole or not at all.

    Args:
        path: a file that `export_study` wrote.
        folder: must not exist, or be empty.

    Raises:
        ValueError: the file is no export, was cut short or changed, or breaks an invariant; names the line.
        RuntimeError: the file cannot be read, or the folder cannot be written.
    """
    with new_folder(folder) as temporary:
        for name in FOLDERS:
            (temporary / name).mkdir()
        database = Database.create(temporary / DATABASE)
        try:
            with database.transaction() as session:
                _read(path, _Loader(temporary, session))
        finally:
            database.close()
        try:
            with Store.open(temporary) as store:
                store.check()
        except (RuntimeError, ValueError) as error:
            reason = str(error).replace(f" in {temporary}", "")
            raise ValueError(f"{path} holds no consistent study: {reason}") from error
    return Store.open(folder)


def _read(path: Path, load: Callable[[dict[str, Any]], None]) -> None:
    digest = hashlib.sha256()
    number = 0
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            entry = _entry(path, number, line)
            if "end" in entry:
                if entry["end"] != {"lines": number - 1, "sha256": digest.hexdigest()} or file.read(1):
                    raise ValueError(
                        f"{path} line {number} does not fit what it closes: the file was changed"
                    )
                return
            if number > 1:
                _load(path, number, entry, load)
            digest.update(line)
    raise ValueError(f"{path} stops after line {number} without its closing line: it was cut short")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise RuntimeError(f"cannot read {path}: {error.strerror or error}") from error


def _entry(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path} line {number} is no JSON: the file was changed or cut short") from error
    if number == 1:
        header = {"kernelbraid_study": FORMAT, "schema": SCHEMA_VERSION}
        older = [{**header, "schema": version} for version in range(1, SCHEMA_VERSION)]
        if not isinstance(entry, dict) or "kernelbraid_study" not in entry:
            raise ValueError(f"{path} line 1 is not that of an exported study")
        if entry != header and entry not in older:
            raise ValueError(f"{path} line 1 names format {entry}, and this kernelbraid reads {header}")
    if not isinstance(entry, dict):
        raise ValueError(f"{path} line {number} is no record")
    return entry


def _load(path: Path, number: int, entry: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
    try:
        load(entry)
    except StatementError as error:
        raise ValueError(f"{path} line {number} is not a valid record: {error.orig}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} line {number} is not a valid record: {error}") from error


class _Loader:
    """Writes entries into a new study folder, in the order in which `_entries` gives them."""

    def __init__(self, folder: Path, session: Session) -> None:
        self.folder = folder
        self.session = session

    def __call__(self, entry: dict[str, Any]) -> None:
        match entry:
            case {"record": str(name), "row": dict(row)} if name in _TABLES:
                self._record(_TABLES[name], row)
            case {"source": str(sha256), "text": str(text)}:
                self._source(sha256, text)
            case {"log": str(request), "text": str(text)}:
                self._log(request, text)
            case _:
                raise ValueError(f"expected a record, a source or a log, got {sorted(entry)}")

    def _record(self, table: Table, row: dict[str, Any]) -> None:
        columns = {column.name: column for column in table.columns}
        if row.keys() != columns.keys():
            raise ValueError(f"{table.name} has columns {sorted(columns)}, got {sorted(row)}")
        values = {name: _inward(columns[name], value) for name, value in row.items()}
        self.session.execute(table.insert(), values)

    def _source(self, sha256: str, text: str) -> None:
        known = select(exists().where(Implementation.sha256 == sha256))
        if Source(text).sha256 != sha256 or not self.session.scalar(known):
            raise ValueError(f"the text is not that of implementation {sha256}")
        write_whole(source_path(self.folder, sha256), text.encode())

    def _log(self, request: str, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        recorded = self.session.scalar(select(Audit.log).where(Audit.request == request))
        if hashlib.sha256(data).hexdigest() != recorded:
            raise ValueError(f"the text is not the log of audit {request}")
        write_whole(log_path(self.folder, request), data)
