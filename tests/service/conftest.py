"""Fixtures of the service's tests."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mint_jax.service.futures import Futures
from mint_jax.service.server_db import ServerDatabase
from tests.catalog.postgres import _roomy


@pytest.fixture
def memory(tmp_path):
    """A folder in memory where there is room: a killed process loses nothing of it, and syncing
    costs nothing.
    """
    folder = tempfile.mkdtemp(prefix="mint-server-", dir=_roomy("/dev/shm") or tmp_path)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def opened(
    folder: Path,
    places: Mapping[str, int] | None = None,
    queue_bytes: int = 1 << 26,
    **options: Any,
) -> Iterator[Futures]:
    """Futures over the database of a server's folder."""
    with ServerDatabase(folder / "server.db", queue_bytes) as database:
        futures = Futures(database, places, **options)
        yield futures
        futures.end_waits()
