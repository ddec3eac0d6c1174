"""A failure has its name on the terminal while other tests still run, also when several processes
run them.
"""

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
"""  # noqa: E501
LINES = (
    "call of own_test.py::test_fails: AssertionError: they differ;setup of"
    " own_test.py::test_has_no_fixture: ValueError: no such thing"
)


HANGS = """
import os, threading

if "PYTEST_XDIST_WORKER" in os.environ:
    def waits_for_nobody():
        threading.Event().wait()

    waits_for_nobody()

def test_never_begins():
    pass
"""


def run(
    tests: str, processes: int, folder: Path, environment: dict[str, str], *options: str
) -> tuple[int, str]:
    """Pytest with the plugin, in a process of its own: its status, and what it showed."""
    (folder / "own_test.py").write_text(tests)
    shown = folder / "shown"
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
        str(folder),
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    for name in (
        "PYTEST_ADDOPTS",
        "PYTEST_XDIST_WORKER",
        "PYTEST_XDIST_WORKER_COUNT",
        "PYTEST_XDIST_TESTRUNUID",
    ):
        environment.pop(name, None)
    with shown.open("w") as out:
        done = subprocess.run(
            [sys.executable, *command, "own_test.py"],
            cwd=folder,
            stdout=out,
            stderr=out,
            env=environment,
        )
    return done.returncode, shown.read_text()


@pytest.mark.parametrize("processes", [0, 1])
def test_a_failure_is_named_at_once(processes, tmp_path):
    status, shown = run(
        TESTS, processes, tmp_path, {"SHOWN": str(tmp_path / "shown"), "AWAITED": LINES}
    )
    assert status == 1
    assert "1 passed" in shown, shown


@pytest.mark.long
def test_a_run_in_which_nothing_ends_says_where_it_hangs(tmp_path):
    options = "-o", "faulthandler_timeout=8", "-o", "faulthandler_exit_on_timeout=true"
    status, shown = run(HANGS, 1, tmp_path, {}, *options)
    assert status == 1
    assert "no test has ended for" in shown, shown
    assert "in waits_for_nobody" in shown, shown
