"""One SQLite file: how it is made, recognised and opened, and the transactions on it."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from sqlalchemy import URL, Connection, Engine, create_engine, event, func, select
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from kernelbraid.ir.schema import ADDED, APPLICATION_ID, SCHEMA_VERSION, Record, SchemaVersion
from kernelbraid.ir.views import VIEWS

BUSY_SECONDS = 30.0
_MAGIC = b"SQLite format 3\x00"
_OLDEST_SQLITE = (3, 38)
_BEGIN = "kernelbraid_begin"
_RESTORE = "import an export of the study into a new folder"


class Database:
    """Transactions on one database file; any number of processes and threads may hold one each."""

    def __init__(self, path: Path) -> None:
        if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
            raise RuntimeError(f"studies need SQLite 3.38 or newer, and Python has {sqlite3.sqlite_version}")
        self.path = path
        self._engine = _engine(path)
        self._local = threading.local()

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make a new file with the tables, triggers and views of this version."""
        database = cls(path)
        with database.transaction() as session:
            connection = session.connection()
            Record.metadata.create_all(connection)
            VIEWS.create_all(connection)
            connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
            session.add(SchemaVersion(version=SCHEMA_VERSION))
        return database

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing file.

        Raises:
            ValueError: it is missing, another program's, damaged, or of a later version of the schema.
            RuntimeError: it cannot be read.
        """
        _recognise(path)
        database = cls(path)
        try:
            with database.read() as session:
                problem = session.connection().exec_driver_sql("PRAGMA quick_check(1)").scalar()
                if problem != "ok":
                    first = str(problem).splitlines()[-1]
                    raise ValueError(f"{path} is damaged ({first}): {_RESTORE}")
                version = session.scalar(select(func.max(SchemaVersion.version)))
            if version is None or not 1 <= version <= SCHEMA_VERSION:
                raise ValueError(f"{path} has schema {version}: use the kernelbraid that wrote it")
            if version < SCHEMA_VERSION:
                database.extend()
        except BaseException:
            database.close()
            raise
        return database

    def extend(self) -> None:
        """Add the tables that an older layout lacks; whichever process comes first does it."""
        with self.transaction() as session:
            version = session.scalar(select(func.max(SchemaVersion.version))) or 0
            for later in range(version + 1, SCHEMA_VERSION + 1):
                for record in ADDED[later]:
                    Record.metadata.tables[record.__tablename__].create(session.connection())
                session.add(SchemaVersion(version=later))

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Yield a session that sees one state throughout; inside a transaction, that transaction's."""
        current: Session | None = getattr(self._local, "session", None)
        if current is not None:
            yield current
            return
        with self._session(writing=False) as session:
            yield session

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Yield a session whose writes are kept together or not at all; inside another one, a savepoint."""
        current: Session | None = getattr(self._local, "session", None)
        if current is None:
            with self._session(writing=True) as session:
                yield session
            return
        assert self._local.writing, "a read cannot become a transaction: open the transaction first"
        with current.begin_nested():
            yield current

    @contextmanager
    def _session(self, *, writing: bool) -> Iterator[Session]:
        engine = self._engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE" if writing else "BEGIN"})
        try:
            with Session(engine, expire_on_commit=False) as session, session.begin():
                session.connection()  # the transaction begins here, and not with the first statement
                self._local.session, self._local.writing = session, writing
                try:
                    yield session
                except BaseException:
                    session.expunge_all()  # records that were read stay readable after the rollback
                    raise
        except DatabaseError as error:
            raise _explained(self.path, error) from error
        finally:
            self._local.session = None


def _engine(path: Path) -> Engine:
    url = URL.create("sqlite", database=str(path))
    engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS})

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
        connection.isolation_level = None  # transactions begin where `begin` below says so
        for pragma in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
            "recursive_triggers = ON",  # so that REPLACE meets the triggers that refuse deletions
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options()[_BEGIN])

    return engine


def _recognise(path: Path) -> None:
    """Look at the header alone, so that a file of another program is left untouched."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} holds no study: name the folder of one") from error
    except OSError as error:
        raise RuntimeError(f"cannot read {path}: {error.strerror or error}") from error
    if len(header) < 100 or not header.startswith(_MAGIC):
        raise ValueError(f"{path} is damaged or no database: {_RESTORE}")
    if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise ValueError(f"{path} is the database of another program: name the folder of a study")


def _explained(path: Path, error: DatabaseError) -> RuntimeError | ValueError:
    first: BaseException | None = error
    while first is not None:  # a full disk ends the transaction, and then undoing its savepoints fails too
        if isinstance(first, DatabaseError):
            error = first
        first = first.__context__
    reason = str(error.orig)
    if "locked" in reason or "busy" in reason:
        return RuntimeError(f"another process kept {path} locked for {BUSY_SECONDS:.0f} seconds: try again")
    if "malformed" in reason or "not a database" in reason:
        return ValueError(f"{path} is damaged ({reason}): {_RESTORE}")
    return RuntimeError(f"{path} refused the operation: {reason}")
