"""The catalog's database: SQLite in a file, or PostgreSQL by URL.

Work is a function of a connection, because it may run again: after a serialisation failure, a
deadlock, or a connection lost before the commit was sent. If the connection breaks during the
commit, the audit log shows whether it was made; a write without an entry there must be harmless
when done twice. SQLite uses a write-ahead log, so readers never wait, and ``synchronous=FULL``, so
a commit is on disk. Its writers queue, within a process on a mutex, else on SQLite's own wait.
"""

import contextlib
import functools
import os
import random
import re
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event, exc

from mint_jax.catalog.records import tables
from mint_jax.errors import UserError

T = TypeVar("T")
ATTEMPTS = 8
WRITE = "catalog_write"  # execution option with the transaction's id, for the audit log
CACHE_BYTES = 64 << 20
_POOL: dict[str, Any] = {"pool_size": 8, "max_overflow": 32}
_LOCK_KEY = 0x6D696E74  # PostgreSQL's advisory lock while tables are made
# SQLSTATE of serialisation failure, deadlock, lock not available: certainly rolled back
_AGAIN = {"40001", "40P01", "55P03"}
_LOST = {"57P01", "57P02", "57P03", "08000", "08001", "08003", "08006"}  # lost connections
_TRANSACTION = sa.text("SELECT CAST(pg_current_xact_id_if_assigned() AS text)")
_STATUS = sa.text("SELECT pg_xact_status(CAST(:id AS xid8))")
_CORRUPT = {"XX001", "XX002"}  # damaged page or index
_SQLITE_REMEDIES = {  # by patterns of SQLite's message
    "locked|busy": (
        "another process holds the write lock; close its transaction, or raise timeout_s"
    ),
    "not a database": "the file is damaged; restore it from a backup, or choose another path",
    "malformed|could not decode|no such|unsupported file format|foreign key mismatch": (
        "the file is damaged; restore it from a backup"
    ),
    "readonly": "make the file and its folder writable",
    "unable to open": "check that the folder exists and is writable",
    "full": "free disk space",
    "disk i/o": "check the disk and its free space",
}


class DatabaseFailed(UserError):
    """The database is locked, full, damaged or does not answer."""


class Database:
    """One database, shared by all threads of a process.

    Attributes:
        engine: SQLAlchemy's, for tests and tools.
        sqlite: True for SQLite, False for PostgreSQL.
        read_only: True for an SQLite file that this user cannot write.
    """

    def __init__(self, url: str | sa.URL, timeout_s: float = 30.0, cache_bytes: int = CACHE_BYTES):
        """Opens the database and creates its tables if it has none. Raises ``UserError``: no such
        database, not a catalog, or a catalog of another version.

        Args:
            url: ``sqlite:///path`` or ``postgresql://…``.
            timeout_s: seconds that a write waits for the lock, or for a lost server.
            cache_bytes: of pages that each connection to an SQLite file may keep.
        """
        self.timeout_s, self._cache_bytes = timeout_s, cache_bytes
        places = "give a folder, sqlite:///path or postgresql://host/name"
        try:
            self.url = sa.make_url(url)
        except exc.ArgumentError:
            raise UserError(f"{str(url)[:200]!r} is not a database URL: {places}") from None
        if self.url.drivername in ("postgresql", "postgres"):
            self.url = self.url.set(drivername="postgresql+psycopg")
        if self.url.get_backend_name() not in ("sqlite", "postgresql"):
            raise UserError(f"database {self.name} is not supported: {places}")
        self.sqlite = self.url.get_backend_name() == "sqlite"
        file = Path(str(self.url.database))
        is_writable = all(os.access(path, os.W_OK) for path in (file, file.parent))
        self.read_only = self.sqlite and file.is_file() and not is_writable
        self._queue = threading.Lock() if self.sqlite else contextlib.nullcontext()
        self.engine = self._sqlite_engine() if self.sqlite else self._postgres_engine()
        read = {} if self.sqlite else {"isolation_level": "AUTOCOMMIT"}
        self._reader = self.engine.execution_options(**read)
        self._writer = self.engine.execution_options(begin_immediate=True)
        try:
            self._create()
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The URL, its password hidden."""
        return self.url.render_as_string(hide_password=True)

    def _postgres_engine(self) -> sa.Engine:
        args = {"connect_timeout": max(2, int(self.timeout_s))}
        level = "READ COMMITTED"
        try:
            return sa.create_engine(self.url, connect_args=args, isolation_level=level, **_POOL)
        except ModuleNotFoundError:
            raise UserError(
                f"database {self.name} needs psycopg: pip install 'mint-jax[postgres]'"
            ) from None

    def _sqlite_engine(self) -> sa.Engine:
        if not self.url.database or self.url.database == ":memory:":
            raise UserError(
                f"database {self.name} lives in memory: a catalog must outlive its process;"
                " give a path"
            )
        args = {"timeout": self.timeout_s, "check_same_thread": False}
        if self.read_only:
            uri = _read_only_uri(Path(self.url.database))
            connect = functools.partial(sqlite3.connect, uri, uri=True, **args)
            return sa.create_engine("sqlite://", creator=connect, poolclass=sa.QueuePool, **_POOL)
        engine = sa.create_engine(self.url, connect_args=args, **_POOL)
        event.listen(engine, "connect", lambda new, _: _prepare_sqlite(new, self._cache_bytes))
        event.listen(engine, "begin", _begin_sqlite)
        return engine

    def read(self, body: Callable[[sa.Connection], T]) -> T:
        """Runs ``body(connection)``, whose statements change nothing."""
        for attempt in range(ATTEMPTS):
            try:
                with self._reader.connect() as connection:
                    return body(connection)
            except exc.DBAPIError as error:
                if not (_lost(error) and attempt + 1 < ATTEMPTS and not self.sqlite):
                    raise self._explain(error) from error
                self._pause(attempt)
        raise AssertionError("unreachable")

    def rows(self, query: sa.Select) -> Sequence[sa.Row[Any]]:
        """Returns all rows of a query."""
        return self.read(lambda c: c.execute(query).all())

    def write(self, body: Callable[[sa.Connection], T]) -> T:
        """Runs ``body(connection)`` in one transaction; ``body`` may run several times and must
        change only the database. Raises ``UserError``: the database cannot be written. Nothing was
        changed, or the message says that this is unknown.
        """
        write = uuid.uuid4().bytes
        for attempt in range(ATTEMPTS):
            transaction: str | None = None  # set while the commit is under way
            result: T
            try:
                with self._queue, self._writer.begin() as connection:
                    result = body(connection.execution_options(**{WRITE: write}))
                    if not self.sqlite:
                        transaction = connection.scalar(_TRANSACTION)
                return result
            except exc.DBAPIError as error:
                lost = _lost(error) and not self.sqlite
                if lost and transaction is not None and self._was_committed(transaction, write):
                    return result  # type: ignore[possibly-undefined]
                if not (lost or _state(error) in _AGAIN) or attempt + 1 == ATTEMPTS:
                    raise self._explain(error) from error
                self._pause(attempt)
        raise AssertionError("unreachable")

    def _was_committed(self, transaction: str, write: bytes) -> bool:
        """Waits for the end of a transaction whose commit lost its connection, and looks for it in
        the audit log.

        The transaction's own status is not enough: a crash can forget its number, and the next
        transaction may get the same.
        """
        deadline, status = time.monotonic() + self.timeout_s, "unreachable"
        logged = sa.select(sa.exists().where(tables.audit.c.write == write))
        while time.monotonic() < deadline:
            try:
                with self._reader.connect() as connection:
                    try:
                        status = connection.scalar(_STATUS, {"id": transaction})
                    except exc.DataError as error:
                        if _state(error) != "22023":  # "in the future": a crash forgot it
                            raise
                        status = None
                    if status != "in progress":
                        return bool(connection.scalar(logged))
            except exc.OperationalError:
                status = "unreachable"
            time.sleep(0.1)
        raise DatabaseFailed(
            f"database {self.name} was lost during a commit and is {status} since"
            f" {self.timeout_s:.0f} s: whether the change was made is unknown; look before"
            " repeating it"
        )

    def _pause(self, attempt: int) -> None:
        time.sleep(min(self.timeout_s / ATTEMPTS, 0.02 * 2**attempt) * random.uniform(0.5, 1.5))

    def _explain(self, error: exc.DBAPIError) -> Exception:
        """A ``UserError`` for a fault of the surroundings; any other error is ours and stays."""
        lines = str(error.orig).strip().splitlines()
        reason, remedy = lines[0] if lines else type(error).__name__, None
        if isinstance(error, exc.IntegrityError | exc.ProgrammingError):
            return error
        if self.sqlite:
            found = (to for sign, to in _SQLITE_REMEDIES.items() if re.search(sign, reason.lower()))
            remedy = next(found, None)
        elif _state(error) in _CORRUPT:
            remedy = "restore it from a backup"
        elif _lost(error) or isinstance(error, exc.OperationalError | exc.InterfaceError):
            remedy = "check that the server runs, the address, and the user's rights"
        if remedy is None:
            return error
        return DatabaseFailed(f"database {self.name}: {reason}: {remedy}")

    def damage(self, limit: int = 20) -> list[str]:
        """Returns the damage that the database finds in its own files.

        SQLite: ``PRAGMA integrity_check``, at most ``limit`` lines, and rows whose parent is
        missing. PostgreSQL: all rows are read, so that a cluster with page checksums (the default
        of ``initdb`` since version 18) checks their pages.
        """
        try:
            with self._reader.connect() as connection:
                if self.sqlite:
                    found = list(connection.exec_driver_sql(f"PRAGMA integrity_check({limit})"))
                    lost = connection.exec_driver_sql("PRAGMA foreign_key_check")
                    return [f"SQLite says: {line}" for (line,) in found if line != "ok"] + [
                        f"row {row_id} of {table} refers to a missing row of {parent}"
                        for table, row_id, parent, _ in lost
                    ]
                for table in tables.metadata.sorted_tables:
                    text = sa.text(f"SELECT sum(length(CAST(t AS text))) FROM {table.name} t")
                    connection.scalar(text)
        except exc.DBAPIError as error:
            return [f"{self.engine.dialect.name} says: {str(error.orig).strip()}"]
        return []

    def _create(self) -> None:
        """Makes the tables of a new database."""
        try:
            with self._reader.connect() as connection:
                if self._is_current(connection):
                    return
            if self.read_only:
                raise UserError(f"database {self.name} is empty and cannot be written here")
            with self._queue, self._writer.begin() as connection:
                if not self.sqlite:
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_KEY)))
                if not self._is_current(connection):
                    tables.metadata.create_all(connection, checkfirst=False)
                    tables.version.create(connection)
                    connection.execute(sa.insert(tables.version), {"version": tables.VERSION})
        except exc.DBAPIError as error:
            raise self._explain(error) from error

    def _is_current(self, connection: sa.Connection) -> bool:
        """True for a catalog of this version, False for an empty database. Raises ``UserError``:
        the database is of another version, or has tables of something else.
        """
        there = set(sa.inspect(connection).get_table_names())
        if tables.version.name not in there:
            if strange := sorted(there & set(tables.metadata.tables)):
                raise UserError(
                    f"database {self.name} has tables {', '.join(strange)} that are not a"
                    " catalog's: choose an empty database"
                )
            return False
        found = connection.scalar(sa.select(tables.version))
        if found != tables.VERSION:
            raise UserError(
                f"database {self.name} is a catalog of version {found}; this code reads version"
                f" {tables.VERSION}: export its revisions with the mint-jax that made it, and"
                " import them into a new catalog"
            )
        return True

    def close(self) -> None:
        """Closes all connections."""
        self.engine.dispose()


def _prepare_sqlite(connection: sqlite3.Connection, cache_bytes: int) -> None:
    connection.isolation_level = None  # _begin_sqlite begins transactions
    _write_ahead(connection)
    cache = f"cache_size=-{cache_bytes // 1024}"
    for pragma in ("synchronous=FULL", "foreign_keys=ON", cache, "temp_store=MEMORY"):
        connection.execute(f"PRAGMA {pragma}").close()


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Sets up the write-ahead log, retrying: if another process does the same, SQLite refuses at
    once, whatever the time limit.
    """
    [[limit_ms]] = connection.execute("PRAGMA busy_timeout")
    until = time.monotonic() + limit_ms / 1e3
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.005)


def _read_only_uri(path: Path) -> str:
    """The URI of a read-only database. SQLite's write-ahead log needs an index file, which a reader
    cannot make. While a writer is open, the index is there. Without a log, the file alone is
    complete. Raises ``DatabaseFailed``: a log without its index: its commits would be invisible.
    """
    log, index = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
    quoted = quote(str(path))
    if not log.is_file() or not log.stat().st_size:
        return f"file:{quoted}?mode=ro&immutable=1"
    if index.is_file():
        return f"file:{quoted}?mode=ro"
    raise DatabaseFailed(
        f"database {path} has commits in {log.name} that cannot be read without writing next to it:"
        " open it once as a user who may write it"
    )


def _begin_sqlite(connection: sa.Connection) -> None:
    if connection.get_execution_options().get("begin_immediate"):
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _lost(error: exc.DBAPIError) -> bool:
    return error.connection_invalidated or _state(error) in _LOST


def _state(error: exc.DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


def insert_new(connection: sa.Connection, table: sa.Table, rows: list[dict]) -> None:
    """Inserts rows, skipping those whose key exists or is committed meanwhile."""
    if rows:
        connection.execute(dialect_insert(connection, table).on_conflict_do_nothing(), rows)


def dialect_insert(connection: sa.Connection, table: sa.Table) -> Any:
    """An INSERT with ``on_conflict_do_nothing`` and ``on_conflict_do_update``."""
    # imported here: PostgreSQL's takes 0.15 s, and SQLite does not need it
    return import_module(f"sqlalchemy.dialects.{connection.dialect.name}").insert(table)


def chunks(items: Sequence[T], size: int = 500) -> Iterator[Sequence[T]]:
    """Splits items into runs of at most ``size``, the parameters of one statement."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
