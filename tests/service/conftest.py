"""Fixtures of the service's tests."""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.catalog.postgres import _roomy


@pytest.fixture
def memory(tmp_path):
    """A folder in memory where there is room: a killed process loses nothing of it, and syncing
    costs nothing.
    """
    folder = tempfile.mkdtemp(prefix="mint-journal-", dir=_roomy("/dev/shm") or tmp_path)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
