"""One SQLite file, and one thread that writes it: changes that arrive while a transaction is being
written share the next one (group commit).

A change is a function of the writer's connection. Its future is resolved once the transaction is
synced (write-ahead log, ``synchronous=FULL``), so it survives ``kill -9`` and a loss of power.
After a failed sync SQLite writes the same pages again instead of syncing again, because the kernel
may have dropped them (Rebello et al. 2020, "Can Applications Recover from fsync Failures?").
"""

import collections
import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
import urllib.parse
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.errors import UserError
from mint_jax.service.schema import SCHEMA

log = logging.getLogger("mint_jax.service")
RETRY_S = 1.0  # between two probes of a disk that refused
PROBES = (f"INSERT INTO probe VALUES (zeroblob({64 << 10}))", "DELETE FROM probe")
GROUP_BYTES = 8 << 20  # per transaction: the first change of a large group does not wait long
LAZY_S = 0.2  # delay of changes that need no transaction of their own
_DISK_CODES = {  # errors of the disk, not of the statement
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_BUSY,
}

Connection = sqlite3.Connection


class FolderBusy(UserError):
    """Another process, or another object of this process, has the database open."""


class DatabaseDamaged(UserError):
    """The file is not what was written."""

    def __init__(self, path: Path, reason: object):
        super().__init__(f"{path} is damaged ({reason}): restore it from a backup")


class Overloaded(UserError):
    """The queue is full: retry after ``retry_after_s``."""

    retry_after_s = 0.1


class _Change(Future[Any]):
    def __init__(self, apply: Callable[[Connection], Any], nbytes: int = 0, keep: bool = False):
        super().__init__()
        self.apply, self.nbytes, self.keep = apply, nbytes, keep
        self.set_running_or_notify_cancel()  # a caller that stops waiting cancels no write


class ServerDatabase:
    """The database of one server; all methods may be called from any thread.

    When the disk refuses a transaction, because it is full for example, every change in the queue
    fails, and further ones are refused until the disk takes a probe, which the writer tries every
    ``RETRY_S`` seconds. Changes with ``keep`` stay in the queue, in order, until then. ``trouble``
    is the reason; empty while the disk takes changes.

    Args:
        path: file, created if missing; ``PATH.lock`` next to it is locked while it is open.
        queue_bytes: limit of the bytes that wait to be written.
        engine: name in all new ids, ``e0`` for example, by which a front finds the engine, and the
            engines of one folder find each other's checkpoints; empty: it is alone.

    Raises:
        FolderBusy: it is open elsewhere.
        DatabaseDamaged: it fails SQLite's integrity check, or has other tables.
        DatabaseFailed: the disk refuses.
    """

    def __init__(self, path: Path, queue_bytes: int = 64 << 20, engine: str = ""):
        self.path, self.queue_bytes, self.trouble, self.engine = path, queue_bytes, "", engine
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # a change is queued, or the writer must end
        self._queue: collections.deque[_Change] = collections.deque()
        self._queued = 0  # bytes, including those being written
        self._urgent = self._closed = False
        self._readers: list[Connection] = []
        with contextlib.ExitStack() as opened:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                guard = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                opened.callback(os.close, guard)
                fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._connection = self._connect()
                self._check()
            except BlockingIOError:
                raise FolderBusy(
                    f"{path} is open already: stop the other process, or choose another folder"
                ) from None
            except Exception as error:
                raise self._explained(error) from None
            self._opened = opened.pop_all()
        self._thread = threading.Thread(target=self._run, name="database", daemon=True)
        self._thread.start()

    def __enter__(self) -> "ServerDatabase":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def new_id(self) -> str:
        """Returns a new id, with the engine's name."""
        return f"{self.engine}." * bool(self.engine) + uuid.uuid4().hex

    def other_folder(self, id: str) -> Path | None:
        """Returns the folder of the engine that made an id; None: it is this one, or unknown."""
        engine, dot, _ = id.partition(".")
        if not dot or not engine.isalnum() or self.engine in ("", engine):
            return None
        folder = self.path.parent.with_name(engine)
        return folder if (folder / self.path.name).exists() else None

    def read_of(self, id: str, query: str, *values: Any) -> list[sqlite3.Row]:
        """Returns ``read`` of the database of the engine that made an id."""
        if (folder := self.other_folder(id)) is None:
            return self.read(query, *values)
        uri = f"file:{urllib.parse.quote(str(folder / self.path.name))}?mode=ro"
        try:
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
                connection.row_factory = sqlite3.Row
                connection.execute("PRAGMA busy_timeout=30000")
                return connection.execute(query, values).fetchall()
        except Exception as error:
            raise self._explained(error) from None

    def read(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Returns the rows of a query, over everything that is acknowledged."""
        try:
            connection = self._readers.pop()
        except IndexError:
            connection = self._connect()
        try:
            return connection.execute(query, values).fetchall()
        except Exception as error:
            raise self._explained(error) from None
        finally:
            self._readers.append(connection)

    def write(
        self,
        apply: Callable[[Connection], Any],
        nbytes: int = 0,
        *,
        keep: bool = False,
        lazy: bool = False,
    ) -> "Future[Any]":
        """Queues a change; its future returns the result of ``apply`` once that is synced.

        Changes apply in the order of the calls. One that raises changes nothing, and its future has
        the error. Raises ``Overloaded``: the queue is full; ``DatabaseFailed``: the disk refuses,
        or the database is closed.

        Args:
            nbytes: size that counts against the queue's limit.
            keep: it records something that has happened: a disk that refuses only delays it.
            lazy: the change waits up to ``LAZY_S`` for another one's transaction.
        """
        change = _Change(apply, nbytes, keep)
        with self._lock:
            if self._closed or (self.trouble and not keep):
                raise DatabaseFailed(self.trouble or f"{self.path} is closed: open it again")
            if self._queued and self._queued + nbytes > self.queue_bytes and not keep:
                message = f"{self._queued} bytes wait for the disk, of at most {self.queue_bytes}"
                raise Overloaded(f"{message}: ask again")
            self._queue.append(change)
            self._queued += nbytes
            if not (lazy or self._urgent) or len(self._queue) == 1:
                self._urgent = self._urgent or not lazy
                self._work.notify()
        return change

    def close(self) -> None:
        """Writes what is queued and lets others open the file. Closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._work.notify()
        self._thread.join()
        for connection in (*self._readers, self._connection):
            with contextlib.suppress(sqlite3.Error):
                connection.close()
        self._opened.close()

    def _connect(self) -> Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA busy_timeout=30000")
        connection.execute("PRAGMA synchronous=FULL")
        # a row that INSERT OR REPLACE replaces fires the triggers of removed rows
        connection.execute("PRAGMA recursive_triggers=ON")
        return connection

    def _check(self) -> None:
        self._connection.execute("PRAGMA journal_mode=WAL")
        found = self._connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if found != "ok":
            raise DatabaseDamaged(self.path, found)
        if not (tables := _tables(self._connection)):  # new
            self._connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT")
            return
        with contextlib.closing(sqlite3.connect(":memory:")) as connection:
            connection.executescript(SCHEMA)
            wrong = tables ^ _tables(connection)
        if wrong:
            names = ", ".join(sorted({str(name) for name, _ in wrong}))
            raise DatabaseDamaged(self.path, f"or another version made it: tables {names}")

    def _explained(self, error: Exception) -> Exception:
        """Returns the error that callers get for one of SQLite's or of the operating system's."""
        if isinstance(error, OSError) or _is_of_disk(error):
            return DatabaseFailed(f"cannot use {self.path} ({error}): check the disk")
        if isinstance(error, (sqlite3.IntegrityError, sqlite3.ProgrammingError)):
            return error
        # The message of a damaged schema quotes it, and Python fails to decode the quote.
        if isinstance(error, (sqlite3.DatabaseError, UnicodeDecodeError)):
            return DatabaseDamaged(self.path, error)
        return error

    # the writer's thread

    def _run(self) -> None:
        while (group := self._next_group()) or not self._closed:
            try:
                if self.trouble:
                    for query in PROBES:
                        self._commit([_Change(lambda c, query=query: c.execute(query))])
                results = self._commit(group)
            except Exception as error:
                self._refuse(group, error)
                continue
            with self._lock:
                self.trouble = ""
                self._queued -= sum(change.nbytes for change in group)
            for change, (result, error) in zip(group, results):
                if error is None:
                    change.set_result(result)
                    continue
                if change.keep:  # no one may be waiting for its future
                    log.error("a change of %s failed", self.path, exc_info=error)
                change.set_exception(self._explained(error))

    def _next_group(self) -> list[_Change]:
        """Returns the changes of the next transaction; may be none while the disk refuses."""
        with self._lock:
            if self.trouble:
                self._work.wait_for(lambda: self._closed, RETRY_S)
            else:
                self._work.wait_for(lambda: self._queue or self._closed)
                self._work.wait_for(lambda: self._urgent or self._closed, LAZY_S)
            group: list[_Change] = []
            nbytes = 0
            while self._queue and (not group or nbytes + self._queue[0].nbytes <= GROUP_BYTES):
                group.append(self._queue.popleft())
                nbytes += group[-1].nbytes
            self._urgent = bool(self._queue)
            return group

    def _commit(self, group: Sequence[_Change]) -> list[tuple[Any, Exception | None]]:
        """Writes one transaction; returns each change's result or error. Raises for the disk's."""
        connection, results = self._connection, []
        if connection.in_transaction:  # the disk refused a rollback
            connection.execute("ROLLBACK")
        try:
            connection.execute("BEGIN IMMEDIATE")
            for change in group:
                connection.execute("SAVEPOINT change")
                try:
                    results.append((change.apply(connection), None))
                except Exception as error:
                    if _is_of_disk(error):
                        raise
                    connection.execute("ROLLBACK TO change")
                    results.append((None, error))
                connection.execute("RELEASE change")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # SQLite rolls back by itself if the disk is full
                connection.execute("ROLLBACK")
            raise
        return results

    def _refuse(self, group: Sequence[_Change], error: Exception) -> None:
        """Fails changes after a failed transaction; once the database is closed, all of them."""
        with self._lock:
            self.trouble = (
                f"cannot write {self.path} ({error}): free space on its disk, or repair the disk;"
                " the server goes on by itself then"
            )
            queued, closed = [*group, *self._queue], self._closed
            self._queue = collections.deque(c for c in queued if c.keep and not closed)
            self._queued = sum(change.nbytes for change in self._queue)
        for change in queued:
            if closed or not change.keep:
                change.set_exception(DatabaseFailed(self.trouble))


def _tables(connection: Connection) -> set[tuple[str, str | None]]:
    """Returns the names and definitions of tables and indexes."""
    return {(name, sql) for name, sql in connection.execute("SELECT name, sql FROM sqlite_schema")}


def _is_of_disk(error: BaseException) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 255
    return isinstance(error, sqlite3.OperationalError) and code in _DISK_CODES
