"""What a database may have lost without saying so: SQLite's last commits, and what PostgreSQL's
indexes no longer find.

SQLite's write-ahead log ends, for SQLite, at the first page whose checksum is wrong. A flipped bit
or a cut there takes back commits that were acknowledged, without a word. So the id of the last
entry of the audit log is noted in a file beside the database once its commit has returned: a
database that has less has lost some. A crash of the machine may leave the note behind the database,
which proves nothing; it never runs ahead.

PostgreSQL's indexes are held against their tables, as SQLite's ``integrity_check`` does it in its
file, in two passes over each index: in its order, which reads all its leaves, and by the key of
every row, which goes down through the pages above them. Every page is read that a query could go
through, so where the cluster has checksums (the default of ``initdb`` since PostgreSQL 18,
``--data-checksums`` before) a damaged one is found; without them, a row that an index has lost.
"""

import contextlib
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import exc

from mint_jax.catalog.records import tables

# the id, and its complement: a note that is half written, or damaged, is none
_NOTE = struct.Struct("<qq")


class Witness:
    """The note beside one database; where it cannot be kept, say in a folder that is read-only,
    there is none.

    Args:
        database: the database's file.
    """

    def __init__(self, database: Path):
        self._file = -1
        # a number that is written to must not be closed, and another file's, meanwhile
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):
            self._file = os.open(
                database.with_name(database.name + ".seen"),
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
                0o644,
            )

    @property
    def seen(self) -> int:
        """The highest id noted; 0 where there is no note."""
        with contextlib.suppress(OSError, struct.error):
            last, complement = _NOTE.unpack(os.pread(self._file, _NOTE.size, 0))
            return last if last == ~complement else 0
        return 0

    def note(self, last: int) -> None:
        """Notes that the entry with this id is committed."""
        if last > self.seen:
            self.reset(last)

    def reset(self, last: int) -> None:
        """Notes this id whatever was noted before. Not synced: a system that crashes may forget it,
        and that is all right.
        """
        with self._lock, contextlib.suppress(OSError):  # the commit is made, with or without a note
            os.pwrite(self._file, _NOTE.pack(last, ~last), 0)

    def close(self) -> None:
        """Lets go of the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1


_WAYS = (
    "seqscan",
    "bitmapscan",
    "indexscan",
    "indexonlyscan",
    "sort",
    "incremental_sort",
    "hashjoin",
    "mergejoin",
    "material",
    "memoize",
)
_THROUGH_INDEXES = ("indexscan", "indexonlyscan")


def index_damage(engine: sa.Engine) -> Iterator[str]:
    """What is wrong, in words, index by index; each is looked at in one snapshot, so writers may go
    on.
    """
    for table in tables.metadata.sorted_tables:
        for name, columns in _indexes(table):
            count = sa.select(sa.func.count())
            ordered = count.select_from(sa.select(*columns).order_by(*columns).offset(0).subquery())
            try:
                with engine.connect().execution_options(
                    isolation_level="REPEATABLE READ"
                ) as connection:
                    rows = _scalar(connection, count.select_from(table), ("seqscan",))
                    found = _scalar(connection, ordered, _THROUGH_INDEXES)
                    lost = _scalar(connection, _unreached(table, columns), _THROUGH_INDEXES)
            except exc.DBAPIError as error:
                yield f"index {name} of {table.name}: {str(error.orig).strip().splitlines()[0]}"
                continue
            if found != rows or lost:
                yield (
                    f"index {name} of {table.name} has {found} entries for {rows} rows, and does"
                    f" not find {lost} of them"
                )


def _indexes(table: sa.Table) -> Iterator[tuple[str, Sequence[sa.Column]]]:
    keys = [
        [*one.columns]
        for one in table.constraints
        if isinstance(one, sa.PrimaryKeyConstraint | sa.UniqueConstraint)
    ]
    for columns in sorted(keys, key=lambda columns: [column.name for column in columns]):
        yield "over " + ", ".join(column.name for column in columns), columns
    for index in sorted(table.indexes, key=lambda index: index.name or ""):
        yield str(index.name), list(index.columns)


def _unreached(table: sa.Table, columns: Sequence[sa.Column]) -> sa.Select:
    """How many rows an index does not find by their own key. A key with a NULL is never looked
    for.
    """
    other = table.alias()
    reached = (
        sa.select(1)
        .select_from(other)
        .where(*(other.c[column.name] == column for column in columns))
        .correlate(table)
        .exists()
    )
    return (
        sa.select(sa.func.count())
        .select_from(table)
        .where(*(column.is_not(None) for column in columns), sa.not_(reached))
    )


def _scalar(connection: sa.Connection, query: sa.Select, ways: Sequence[str]) -> int:
    """A count, taken by these ways of reading wherever they can be taken."""
    switch = (
        "SELECT set_config(name, CASE WHEN name = ANY(:on) THEN 'on' ELSE 'off' END, true) FROM"
        " pg_settings WHERE name = ANY(:all)"
    )
    connection.execute(
        sa.text(switch),
        {"on": [f"enable_{way}" for way in ways], "all": [f"enable_{way}" for way in _WAYS]},
    )
    return connection.scalar(query) or 0
