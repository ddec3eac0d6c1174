"""Commands under a full disk or a limit on the size of a file, for tests of what a crash leaves."""

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mint_jax.service.server_db import ServerDatabase

ROOT = Path(__file__).parents[1]
LIMITS = ("full disk", "file size")


def run_limited(limit: str, megabytes: int, module: str, directory: Path) -> str:
    """Output of ``fill_the_disk(directory)`` of a test module, in a process that has so much room
    and prints no stack trace.

    ``full disk`` mounts a tmpfs, and skips the test where a user may not; ``file size`` works
    everywhere.
    """
    if limit == "full disk":
        shell = [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            f'mount -t tmpfs -o size={megabytes}m none "$0" && exec "$@"',
        ]
        if (
            not shutil.which("unshare")
            or subprocess.run([*shell, str(directory), "true"], capture_output=True).returncode
        ):
            pytest.skip("no right to mount a tmpfs here")
    else:
        shell = ["sh", "-c", f'ulimit -f {megabytes * 1000} && exec "$@"']
    code = f"import sys; from {module} import fill_the_disk as f; f(sys.argv[1])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*shell, str(directory), sys.executable, "-c", code, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr, done.stderr[:2000]
    return done.stdout


class FullDatabase:
    """A disk without room for a server's database: within the block, statements that begin so fail
    as SQLite's do.
    """

    def __init__(
        self, database: ServerDatabase, statement: str, gate: threading.Event | None = None
    ):
        self._database, self._statement, self._gate = database, statement, gate
        self._real = database._connection

    def __enter__(self) -> None:
        self._database._connection = self  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        self._database._connection = self._real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute(self, query: str, *values: Any) -> sqlite3.Cursor:
        if query.startswith(self._statement):
            if self._gate is not None:
                self._gate.wait(30)
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self._real.execute(query, *values)
