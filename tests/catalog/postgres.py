"""A real PostgreSQL on loopback for tests; where it cannot start, tests fail and say why."""

import os

import sqlalchemy as sa

from benchmarks.postgres_server import PostgresServer


class Server(PostgresServer):
    """A server that syncs nothing and checks its pages; see ``PostgresServer``.

    Attributes:
        catalog_url: of a database that ``place`` empties for every test.
    """

    def __init__(self):
        quick = {
            "fsync": "off",
            "full_page_writes": "off",
            "shared_buffers": "32MB",
            "max_connections": 200,
        }
        super().__init__(quick, options=("--no-sync", "-k"), folder=_roomy("/dev/shm"))
        self._made = 0
        self.catalog_url = ""

    def new_database(self) -> str:
        """URL of a fresh, empty database."""
        self._made += 1
        name = f"test_{self._made}"
        address = f"postgresql+psycopg://postgres@127.0.0.1:{self.port}"
        engine = sa.create_engine(
            f"{address}/postgres", isolation_level="AUTOCOMMIT", poolclass=sa.NullPool
        )
        with engine.connect() as connection:
            connection.execute(sa.text(f"CREATE DATABASE {name}"))
        return f"{address}/{name}"


def _roomy(folder: str) -> str | None:
    """The folder if it has half a gigabyte: in memory the server is faster than on a disk that
    others use.
    """
    if not os.access(folder, os.W_OK):
        return None
    found = os.statvfs(folder)
    return folder if found.f_bavail * found.f_frsize > 512 << 20 else None
