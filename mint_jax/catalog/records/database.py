"""The catalog's database: SQLite in a file, or PostgreSQL by URL; upgraded when opened.

Work is handed over as a function of a connection, because the database may run it again:

- ``read(body)`` runs it outside a transaction, each statement for itself. A dropped connection is
  tried again.
- ``write(body)`` runs it in one transaction that is durable when ``write`` returns. It is run again
  after a serialisation failure, a deadlock, or a connection lost before the commit was sent:
  nothing was committed then. Where the connection breaks during the commit, the audit log is asked
  afterwards whether it was made. A write that leaves no entry there must therefore do no harm when
  it is done twice.

SQLite: write-ahead log, so that readers never wait; ``synchronous=FULL``, so that a commit is on
the disk; writers take the lock at their first statement and queue for it, inside the process on a
mutex and between processes on SQLite's own wait. A file that this user may not write, or whose
folder, is opened for reading alone.
"""

import contextlib
import functools
import itertools
import os
import random
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event, exc

from mint_jax.catalog.records import integrity, tables
from mint_jax.errors import UserError

T = TypeVar("T")
MIGRATIONS = Path(__file__).parent / "migrations"
ATTEMPTS = 8
WRITE = "catalog_write"  # execution option that names the transaction, for the audit log
_LOCK_KEY = 0x6D696E74  # of PostgreSQL's advisory lock around an upgrade
# SQLSTATE of serialisation failure, deadlock, lock not available: rolled back for certain
_AGAIN = {"40001", "40P01", "55P03"}
_LAST_ENTRY = sa.select(sa.func.max(tables.audit.c.id))
# of a page or an index that PostgreSQL finds damaged, by its checksum for one
_CORRUPT = {"XX001", "XX002"}
# of values from damaged rows
UNREADABLE = (UnicodeDecodeError, TypeError, ValueError, AttributeError, LookupError, OverflowError)
_SQLITE_REMEDIES = {
    "locked": (
        "another process holds the write lock; find what keeps a transaction open, or open with a"
        " larger timeout_s"
    ),
    "busy": (
        "another process holds the write lock; find what keeps a transaction open, or open with a"
        " larger timeout_s"
    ),
    "not a database": (
        "the file is something else or damaged; restore it from a backup or choose another path"
    ),
    "malformed": "the file is damaged; restore it from a backup",
    "could not decode": "the file is damaged; run verify, restore it from a backup",
    "no such": "its tables are not what was made; the file is damaged, restore it from a backup",
    "foreign key mismatch": (
        "its tables are not what was made; the file is damaged, restore it from a backup"
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
        sqlite: whether it is SQLite.
        read_only: whether it is an SQLite file that can only be read here.
    """

    def __init__(self, url: str | sa.URL, timeout_s: float = 30.0):
        """Opens and, where needed, creates or upgrades.

        Args:
            url: ``sqlite:///path`` or ``postgresql://…``.
            timeout_s: how long a write waits for the lock, and a lost server for its return.

        Raises:
            UserError: no such database, one of a newer version, or not a catalog.
        """
        self.timeout_s = timeout_s
        try:
            self.url = sa.make_url(url)
        except exc.ArgumentError:
            raise UserError(
                f"{str(url)[:200]!r} is not a database URL: give a folder, sqlite:///path or"
                " postgresql://host/name"
            ) from None
        if self.url.drivername in ("postgresql", "postgres"):
            self.url = self.url.set(drivername="postgresql+psycopg")
        if self.url.get_backend_name() not in ("sqlite", "postgresql"):
            raise UserError(
                f"database {self.name} is not supported: give a folder, sqlite:///path or"
                " postgresql://host/name"
            )
        self.sqlite = self.url.get_backend_name() == "sqlite"
        self.read_only = self.sqlite and _may_only_read(Path(str(self.url.database)))
        self._writers = threading.Lock()
        self.engine = self._connect_args()
        self._witness = (
            integrity.Witness(Path(str(self.url.database)))
            if self.sqlite and not self.read_only
            else None
        )
        self._reader = (
            self.engine
            if self.sqlite
            else self.engine.execution_options(isolation_level="AUTOCOMMIT")
        )
        self._writer = self.engine.execution_options(begin_immediate=True)
        _open.add(self)
        try:
            self._upgrade()
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The URL, its password hidden."""
        return self.url.render_as_string(hide_password=True)

    def _connect_args(self) -> sa.Engine:
        if self.sqlite:
            if not self.url.database or self.url.database == ":memory:":
                raise UserError(
                    f"database {self.name} lives in memory: a catalog must outlive its process;"
                    " give a path"
                )
            args = {"timeout": self.timeout_s, "check_same_thread": False}
            if self.read_only:
                path = Path(str(self.url.database))
                connect = functools.partial(sqlite3.connect, _reading(path), uri=True, **args)
                return sa.create_engine(
                    "sqlite://",
                    creator=connect,
                    poolclass=sa.QueuePool,
                    pool_size=8,
                    max_overflow=32,
                )
            engine = sa.create_engine(self.url, connect_args=args, pool_size=8, max_overflow=32)
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
            return engine
        try:
            args = {"connect_timeout": max(2, int(self.timeout_s))}
            return sa.create_engine(
                self.url,
                connect_args=args,
                pool_size=8,
                max_overflow=32,
                isolation_level="READ COMMITTED",
            )
        except ModuleNotFoundError:
            raise UserError(
                f"database {self.name} needs psycopg: pip install 'mint-jax[postgres]'"
            ) from None

    def read(self, body: Callable[[sa.Connection], T]) -> T:
        """``body(connection)``, for statements that change nothing."""
        for attempt in range(ATTEMPTS):
            try:
                with self._reader.connect() as connection:
                    return body(connection)
            except exc.DBAPIError as error:
                if not (_lost(error) and attempt + 1 < ATTEMPTS and not self.sqlite):
                    raise self._explain(error) from error
                self._pause(attempt)
            except UNREADABLE as error:
                self._blame_the_file(error)
                raise
        raise AssertionError("unreachable")

    def snapshot(self, body: Callable[[sa.Connection], T]) -> T:
        """``body(connection)``, all of whose statements see the same moment; for statements that
        change nothing.
        """
        try:
            if self.sqlite:
                with self.engine.connect() as connection:
                    connection.exec_driver_sql("BEGIN")
                    return body(connection)
            with self.engine.connect().execution_options(
                isolation_level="REPEATABLE READ"
            ) as connection:
                return body(connection)
        except exc.DBAPIError as error:
            raise self._explain(error) from error
        except UNREADABLE as error:
            self._blame_the_file(error)
            raise

    def write(self, body: Callable[[sa.Connection], T]) -> T:
        """``body(connection)`` in one transaction; it may run several times and must change nothing
        but the database.

        Raises:
            UserError: the database cannot be written; nothing was changed, or the message says that
                this is unknown.
        """
        write = uuid.uuid4().bytes
        for attempt in range(ATTEMPTS):
            transaction: str | None = None  # set while the commit is under way
            result: T
            try:
                with self._queue(), self._writer.begin() as connection:
                    result = body(connection.execution_options(**{WRITE: write}))
                    if self._witness is not None:
                        last = connection.scalar(_LAST_ENTRY) or 0
                    else:
                        transaction = connection.scalar(
                            sa.text("SELECT CAST(pg_current_xact_id_if_assigned() AS text)")
                        )
                if self._witness is not None:
                    self._witness.note(last)
                return result
            except exc.DBAPIError as error:
                lost = _lost(error) and not self.sqlite
                if lost and transaction is not None and self._was_committed(transaction, write):
                    return result  # type: ignore[possibly-undefined]
                if not (lost or _state(error) in _AGAIN) or attempt + 1 == ATTEMPTS:
                    raise self._explain(error) from error
                self._pause(attempt)
            except UNREADABLE as error:
                self._blame_the_file(error)
                raise
        raise AssertionError("unreachable")

    def _queue(self) -> contextlib.AbstractContextManager:
        return self._writers if self.sqlite else contextlib.nullcontext()

    def _was_committed(self, transaction: str, write: bytes) -> bool:
        """Whether a write whose commit lost its connection is in the audit log, once its
        transaction has ended.

        The transaction's own status does not show it: a crash can forget its number, and the next
        transaction may get it.
        """
        deadline = time.monotonic() + self.timeout_s
        status = "unreachable"
        while time.monotonic() < deadline:
            try:
                status = self._status(transaction)
                if status != "in progress":
                    query = (
                        sa.select(tables.audit.c.id).where(tables.audit.c.write == write).limit(1)
                    )
                    with self._reader.connect() as connection:
                        return connection.execute(query).first() is not None
            except exc.OperationalError:
                status = "unreachable"
            time.sleep(0.1)
        raise DatabaseFailed(
            f"database {self.name} was lost during a commit and is {status} since"
            f" {self.timeout_s:.0f} s: whether the change was made is unknown; look before"
            " repeating it"
        )

    def _status(self, transaction: str) -> str | None:
        try:
            with self._reader.connect() as connection:
                return connection.scalar(
                    sa.text("SELECT pg_xact_status(CAST(:id AS xid8))"), {"id": transaction}
                )
        except exc.DBAPIError as error:
            if _state(error) == "22023":  # "in the future": a crash forgot it
                return None
            raise

    def _pause(self, attempt: int) -> None:
        time.sleep(min(self.timeout_s / ATTEMPTS, 0.02 * 2**attempt) * random.uniform(0.5, 1.5))

    def _explain(self, error: exc.DBAPIError) -> Exception:
        """A ``UserError`` for what the surroundings did; anything else is a defect of ours and
        stays as it is.
        """
        reason = (
            str(error.orig).strip().splitlines()[0]
            if error.orig and str(error.orig).strip()
            else type(error).__name__
        )
        if isinstance(error, exc.IntegrityError | exc.ProgrammingError):
            return error
        if self.sqlite:
            for sign, remedy in _SQLITE_REMEDIES.items():
                if sign in reason.lower():
                    return DatabaseFailed(f"database {self.name}: {reason}: {remedy}")
            # SQLite has many words for what it does not expect in a file
            return (
                DatabaseFailed(
                    f"database {self.name} is damaged: {reason}: restore it from a backup"
                )
                if self.damage(1)
                else error
            )
        if _state(error) in _CORRUPT:
            return DatabaseFailed(
                f"database {self.name} is damaged: {reason}: restore it from a backup"
            )
        if (
            isinstance(error, exc.OperationalError | exc.InterfaceError)
            or error.connection_invalidated
        ):
            return DatabaseFailed(
                f"database {self.name}: {reason}: check that the server runs, the address, and the"
                " user's rights"
            )
        return error

    def damage(self, most: int = 20) -> list[str]:
        """What is wrong in the database's files, at most ``most`` lines: pages, rows, and every
        index against its table.
        """
        if not self.sqlite:
            return list(itertools.islice(integrity.index_damage(self.engine), most))
        try:
            with self.engine.connect() as connection:
                lines = [
                    line
                    for (line,) in connection.exec_driver_sql(f"PRAGMA integrity_check({most})")
                ]
        except (exc.DBAPIError, *UNREADABLE) as error:
            return [str(error.orig if isinstance(error, exc.DBAPIError) else error)]
        return [line for line in lines if line != "ok"]

    def _blame_the_file(self, error: Exception) -> None:
        """Raises a ``UserError`` for an error over values of a kind that is never written, where
        the file is damaged.
        """
        if isinstance(error, UnicodeDecodeError) or (
            not isinstance(error, UserError) and self.damage(1)
        ):
            reason = f"the file is damaged ({type(error).__name__} over what a row says)"
            raise UserError(
                f"database {self.name}: {reason}: run verify, restore it from a backup"
            ) from error

    def _upgrade(self) -> None:
        """Brings the database to ``tables.HEAD``."""
        try:
            with self._reader.connect() as connection:
                found = _version(connection)
            if found == tables.HEAD:
                return
            if self.read_only:
                raise UserError(
                    f"database {self.name} is of version {found}, this code has {tables.HEAD}, and"
                    " it cannot be written here: open it once as a user who may write it"
                )
            with self._queue(), self._writer.begin() as connection:
                if not self.sqlite:
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_KEY)))
                migrate(connection, self.name)
        except exc.DBAPIError as error:
            raise self._explain(error) from error
        except UNREADABLE as error:
            self._blame_the_file(error)
            raise

    def lost(self) -> tuple[int, int] | None:
        """Where SQLite's log was cut off or damaged: the last entry of the audit log, and the last
        that was committed.
        """
        # first: what it knows is in the database by then
        if self._witness is None or not (seen := self._witness.seen):
            return None
        last = self.read(lambda c: c.scalar(_LAST_ENTRY)) or 0
        return (last, seen) if last < seen else None

    def forget_lost(self) -> None:
        """The audit log is taken for whole as it is now."""
        if self._witness is not None:
            self._witness.reset(self.read(lambda c: c.scalar(_LAST_ENTRY)) or 0)

    def close(self) -> None:
        """Closes all connections."""
        self.engine.dispose()
        if self._witness is not None:
            self._witness.close()
        _open.discard(self)


def migrate(connection: sa.Connection, name: str, target: str = tables.HEAD) -> None:
    """Upgrades inside the caller's transaction, which must exclude other upgraders.

    Raises:
        UserError: a version this code does not know, or tables of something else.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    found = _version(connection)
    if found is None:
        mine = set(tables.metadata.tables) & set(sa.inspect(connection).get_table_names())
        if mine:
            raise UserError(
                f"database {name} has tables {', '.join(sorted(mine))} that are not a catalog's:"
                " choose an empty database"
            )
    elif found not in {
        script.revision for script in ScriptDirectory.from_config(config).walk_revisions()
    }:
        raise UserError(
            f"database {name} is at version {found}, this code knows versions up to {tables.HEAD}:"
            " upgrade mint-jax"
        )
    command.upgrade(config, target)


def _version(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table(tables.VERSION_TABLE):
        return None
    return connection.scalar(sa.text(f"SELECT version_num FROM {tables.VERSION_TABLE}"))


def _prepare_sqlite(connection, _record) -> None:
    connection.isolation_level = None  # BEGIN is ours to say, see _begin_sqlite
    _write_ahead(connection)
    for pragma in ("synchronous=FULL", "foreign_keys=ON", "cache_size=-65536", "temp_store=MEMORY"):
        connection.execute(f"PRAGMA {pragma}").close()


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Gives a new database its write-ahead log. While another one does so SQLite refuses at once,
    whatever the time limit.
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


def _may_only_read(path: Path) -> bool:
    return path.is_file() and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))


def _reading(path: Path) -> str:
    """The URI of a database that is only read.

    Its write-ahead log needs an index, a file that cannot be made here; with a writer about, it is
    there. Without a log nothing is going on, and the file is taken as it is.

    Raises:
        DatabaseFailed: a log without its index: its commits could not be seen.
    """
    log, index = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
    quoted = quote(str(path))
    if not log.is_file() or not log.stat().st_size:
        return f"file:{quoted}?mode=ro&immutable=1"
    if index.is_file():
        return f"file:{quoted}?mode=ro"
    raise DatabaseFailed(
        f"database {path} has commits in {log.name} that cannot be read without writing beside it:"
        " open it once as a user who may write it"
    )


def _begin_sqlite(connection: sa.Connection) -> None:
    if connection.get_execution_options().get("begin_immediate"):
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _lost(error: exc.DBAPIError) -> bool:
    return error.connection_invalidated or _state(error) in {
        "57P01",
        "57P02",
        "57P03",
        "08000",
        "08001",
        "08003",
        "08006",
    }


def _state(error: exc.DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


_open: "weakref.WeakSet[Database]" = weakref.WeakSet()


def _forget_connections() -> None:
    for database in list(_open):
        database.engine.dispose(close=False)


# a connection must not be used on both sides of a fork
os.register_at_fork(after_in_child=_forget_connections)


def insert_new(connection: sa.Connection, table: sa.Table, rows: list[dict]) -> None:
    """Inserts rows; one whose key is there already, also by a transaction that commits meanwhile,
    is left out.
    """
    if rows:
        connection.execute(dialect_insert(connection, table).on_conflict_do_nothing(), rows)


def dialect_insert(connection: sa.Connection, table: sa.Table) -> Any:
    """An INSERT that knows ON CONFLICT."""
    if connection.dialect.name == "postgresql":
        # a seventh of a second to import, and SQLite does without
        from sqlalchemy.dialects.postgresql import insert

        return insert(table)
    from sqlalchemy.dialects.sqlite import insert

    return insert(table)


def chunks(items: Sequence[T], size: int = 500) -> Iterator[Sequence[T]]:
    """Runs of at most ``size``: a statement takes only so many parameters."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
