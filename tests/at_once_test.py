"""A failure has its name on the terminal while other tests still run, also when several processes run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os, time, pytest

@pytest.fixture
def broken():
    raise ValueError("no such thing\\nmore")

def test_fails():
    assert 1 == 2, "they differ"

def test_has_no_fixture(broken):
    pass

def test_sees_both():
    deadline = time.monotonic() + 60
    while not all(line in open(os.environ["SHOWN"]).read() for line in os.environ["AWAITED"].split(";")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""
LINES = "call of own_test.py::test_fails: AssertionError: they differ;setup of own_test.py::test_has_no_fixture: ValueError: no such thing"


@pytest.mark.parametrize("processes", [0, 1])
def test_a_failure_is_named_at_once(processes, tmp_path):
    (tmp_path / "own_test.py").write_text(TESTS)
    shown = tmp_path / "shown"
    command = [
        "-m",
        "pytest",
        "-q",
        "-n",
        str(processes),
        "-p",
        "tests.at_once",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        "own_test.py",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "SHOWN": str(shown), "AWAITED": LINES}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        environment.pop(name, None)
    with shown.open("w") as out:
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, stdout=out, stderr=out, env=environment)
    assert done.returncode == 1
    assert "1 passed" in shown.read_text(), shown.read_text()
