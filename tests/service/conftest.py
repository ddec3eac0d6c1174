"""Fixtures of the service's tests."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mint_jax.errors import UserError
from mint_jax.service.durable import Durable
from mint_jax.service.futures import Category
from mint_jax.service.training_calls import decode_result
from tests.catalog.postgres import _roomy


@pytest.fixture
def memory(tmp_path):
    """A folder in memory where there is room: a killed process loses nothing of it, and syncing
    costs nothing.
    """
    folder = tempfile.mkdtemp(prefix="mint-server-", dir=_roomy("/dev/shm") or tmp_path)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


def result_of(durable: Durable, id: str, wait_s: float = 0.0) -> Any:
    """The result of a request; None if it has not ended in time. Raises ``UserError`` if a mistake
    of the caller failed it, ``RuntimeError`` if something else did.
    """
    outcome = asyncio.run(durable.futures.wait(id, wait_s))
    if outcome is not None and outcome.category is not None:
        kind = UserError if outcome.category == Category.USER else RuntimeError
        raise kind(outcome.data.decode())
    return None if outcome is None else decode_result(outcome.data)


def until(done: Callable[[], Any], wait_s: float = 120.0) -> None:
    """Waits for something that another thread does."""
    give_up = time.monotonic() + wait_s
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.01)
