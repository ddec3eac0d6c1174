"""A catalog on each of the two databases: SQLite in a folder, and a real PostgreSQL on loopback.

A PostgreSQL that cannot start is an error of every test that needs it, never a skip.
"""

import dataclasses
import sys
from collections.abc import Callable

import numpy as np
import pytest
import sqlalchemy as sa

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.records import tables
from mint_jax.catalog.records.database import Database
from tests.catalog.postgres import Server
from tests.marks import has_value
from tests.residency.clock import Clock

DATABASES = ("sqlite", "postgres")
# Files that show on PostgreSQL what they show on SQLite: there in `make test-long`. Lifecycle,
# lookup and the tables are in `make test`.
LONG_ON_POSTGRES = {
    f"{name}_test" for name in ("collection", "damage", "exports", "kill", "places", "sessions")
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (
            "catalog" in item.path.parts
            and item.path.stem in LONG_ON_POSTGRES
            and has_value(item, "postgres")
        ):
            item.add_marker(pytest.mark.long)


@dataclasses.dataclass
class Place:
    """Where a catalog is; ``open`` may be called several times."""

    database: str
    payloads: str
    open: Callable[..., Catalog]


@pytest.fixture(scope="session")
def postgres_server():
    """The server. Its ``catalog_url`` is a database with a catalog, which ``place`` empties for
    every test.
    """
    try:
        server = Server()
        server.catalog_url = server.new_database()
        Database(server.catalog_url).close()
    except Exception as error:
        print(f"\nNO POSTGRESQL: half of the tests cannot run. {error}", file=sys.stderr)
        raise
    yield server
    server.stop()


@pytest.fixture(params=DATABASES)
def place(request, tmp_path) -> Place:
    """An empty catalog's place, on each database in turn."""
    return make_place(request, request.param, tmp_path)


def make_place(request, database: str, folder) -> Place:
    """See ``place``."""
    if database == "sqlite":
        url = f"sqlite:///{folder / 'catalog.db'}"
    else:
        url = request.getfixturevalue("postgres_server").catalog_url
        empty(url)
    payloads = str(folder / "payloads")
    opened: list[Catalog] = []

    def open_it(**options) -> Catalog:
        opened.append(Catalog.open(url, payloads, **options))
        return opened[-1]

    request.addfinalizer(lambda: [catalog.close() for catalog in opened])
    return Place(url, payloads, open_it)


def empty(url: str) -> None:
    """Removes all rows of a catalog on PostgreSQL: much faster than a new database."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        # what an earlier test left open is an error here
        connection.execute(sa.text("SET lock_timeout = '20s'"))
        connection.execute(
            sa.text(f"TRUNCATE {', '.join(tables.metadata.tables)} RESTART IDENTITY CASCADE")
        )


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0)


@pytest.fixture
def catalog(place, clock) -> Catalog:
    """An empty catalog whose clock stands still until the test moves it."""
    return place.open(clock=clock, actor="tester")


def execute(catalog: Catalog, statement: str) -> None:
    """SQL behind the catalog's back."""
    with catalog.database.engine.begin() as connection:
        connection.execute(sa.text(statement))


def rows(catalog: Catalog, statement: str) -> list:
    with catalog.database.engine.connect() as connection:
        return list(connection.execute(sa.text(statement)))


def same_bytes(found: np.ndarray, data: bytes) -> bool:
    return found.tobytes() == data
