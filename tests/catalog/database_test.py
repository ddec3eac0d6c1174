"""The database: versions, locks, damage, lost connections, and error messages."""

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.schema import CreateIndex, CreateTable

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import digest_of
from mint_jax.catalog.records import audit, tables
from mint_jax.catalog.records.database import Database
from mint_jax.errors import UserError
from tests.catalog.adapters import packed
from tests.catalog.conftest import DATABASES, empty


@pytest.fixture(params=DATABASES)
def blank(request, tmp_path) -> str:
    """URL of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'catalog.db'}"
    return request.getfixturevalue("postgres_server").new_database()


def engine_of(url: str) -> sa.Engine:
    return sa.create_engine(url, poolclass=sa.NullPool)


def test_other_tables_are_another_version():
    """An older catalog is refused by its version, not by the first column that it lacks."""
    texts = [str(CreateTable(table)) for table in tables.metadata.sorted_tables]
    indexes = [one for table in tables.metadata.sorted_tables for one in table.indexes]
    texts += sorted(str(CreateIndex(one)) for one in indexes)
    digest = digest_of("".join(texts).encode())[:12]
    assert (tables.VERSION, digest) == (12, "2e4e85e9fc0f"), "count VERSION up, and write both here"


@pytest.mark.parametrize(
    ("tables_made", "message"),
    [
        (
            [
                f"CREATE TABLE {tables.version} (version INTEGER)",
                f"INSERT INTO {tables.version} VALUES ({tables.VERSION + 1})",
            ],
            f"is a catalog of version {tables.VERSION + 1}; .*: export its",
        ),
        (
            ["CREATE TABLE policies (id INTEGER)"],
            "has tables policies that are not a catalog's: choose an empty database",
        ),
    ],
    ids=["version", "tables"],
)
def test_another_version_and_another_database_are_refused(blank, tables_made, message):
    with engine_of(blank).begin() as connection:
        for statement in tables_made:
            connection.execute(sa.text(statement))
    with pytest.raises(UserError, match=message):
        Database(blank)
    with pytest.raises(UserError, match="needs a place for the payloads too"):
        Catalog.open(blank)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (
            "mysql://root:secret@host/db",
            "is not supported: give a folder, sqlite:///path or postgresql://",
        ),
        ("nonsense", "is not a database URL"),
        ("sqlite://", "lives in memory: a catalog must outlive its process"),
        (
            "postgresql://me:secret@127.0.0.1:1/db",
            "check that the server runs, the address, and the user's rights",
        ),
    ],
)
def test_a_wrong_address_says_so_and_hides_the_password(url, reason):
    with pytest.raises(UserError, match=reason) as raised:
        Database(url, timeout_s=0.2)
    assert "secret" not in str(raised.value)


def test_commits_are_durable_and_readers_do_not_wait(tmp_path):
    with Catalog.open(tmp_path) as catalog:
        catalog.export("p", packed(1), 1, create=True)
        with catalog.database.engine.connect() as connection:
            assert connection.scalar(sa.text("PRAGMA journal_mode")) == "wal"
            assert connection.scalar(sa.text("PRAGMA synchronous")) == 2
            assert connection.scalar(sa.text("PRAGMA foreign_keys")) == 1
        holder = sqlite3.connect(tmp_path / "catalog.db", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        holder.execute("DELETE FROM aliases")
        assert catalog.resolve("p").number == 1
        holder.execute("ROLLBACK")
        holder.close()


HOLD = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.readline()
connection.execute("COMMIT")
"""


def test_a_lock_held_by_another_process_is_waited_for(tmp_path):
    catalog, hasty = Catalog.open(tmp_path), Catalog.open(tmp_path, timeout_s=0.3)
    catalog.export("p", packed(1), 1, create=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "catalog.db")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(
            UserError, match="database is locked: another process holds the write lock"
        ):
            hasty.promote("p", 1)
        assert hasty.resolve("p").number == 1
        waiting = threading.Thread(target=lambda: catalog.promote("p", 1))
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive()
        assert catalog.aliases("p")[0].name == "latest"
    finally:
        holder.communicate(b"\n", timeout=30)
    waiting.join(30)
    assert hasty.resolve("p@serving").number == 1
    catalog.close()
    hasty.close()


def damaged(folder: Path, how: str) -> None:
    file = folder / "catalog.db"
    data = bytearray(file.read_bytes())
    if how == "text":
        file.write_bytes(b"no database at all, but long enough to look like one\n" * 40)
    elif how == "truncated":
        file.write_bytes(data[: len(data) // 2])
    else:
        for page in range(1, len(data) // 4096):
            data[page * 4096 : page * 4096 + 64] = bytes([0xA5]) * 64
        file.write_bytes(data)


@pytest.mark.parametrize("how", ["text", "truncated", "pages"])
def test_a_damaged_file_is_named(tmp_path, how):
    with Catalog.open(tmp_path) as catalog:
        for step in range(30):
            catalog.export("p", packed(step), step, create=True)
    damaged(tmp_path, how)

    def use() -> None:
        with Catalog.open(tmp_path) as catalog:
            catalog.resolve("p@3")
            catalog.export("p", packed(99), 99)
            raise AssertionError([str(finding) for finding in catalog.verify()])

    with pytest.raises(
        UserError,
        match=(
            r"catalog\.db: .*(not a database|malformed|disk I/O).*: .*(restore it from a"
            r" backup|check the disk)"
        ),
    ):
        use()


def test_a_lost_row_is_named(tmp_path):
    with Catalog.open(tmp_path) as catalog:
        catalog.export("p", packed(1), 1, create=True)
        with catalog.database.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
            connection.exec_driver_sql("DELETE FROM revisions")
            connection.exec_driver_sql("PRAGMA foreign_keys=ON")
        assert [finding.what for finding in catalog.verify()] == [
            "row 1 of aliases refers to a missing row of revisions"
        ]
        with pytest.raises(UserError):
            catalog.resolve("p")


@pytest.mark.parametrize("committed", [True, False])
def test_a_server_lost_during_the_commit(postgres_server, tmp_path, committed):
    """The connection breaks while COMMIT is under way: the change is made once, whichever way it
    went.
    """
    empty(postgres_server.catalog_url)
    runs, crashes = [], []

    def break_commit(connection):
        if runs and not crashes:
            crashes.append(committed)
            if committed:
                connection.connection.dbapi_connection.commit()
            postgres_server.halt(signal.SIGQUIT)
            postgres_server.start()

    def body(connection):
        runs.append(1)
        connection.execute(
            tables.schemas.insert(), {"digest": bytes([len(runs)]) * 32, "json": "{}"}
        )
        audit.append(connection, audit.row(audit.Author("me", "", 0.0), "test"))
        return len(runs)

    with Catalog.open(postgres_server.catalog_url, tmp_path / "payloads", timeout_s=20) as catalog:
        sa.event.listen(catalog.database.engine, "commit", break_commit)
        result = catalog.database.write(body)
        assert crashes == [committed]
        assert result == len(runs) == (1 if committed else 2)
        assert catalog.stats()["schemas"] == 1
