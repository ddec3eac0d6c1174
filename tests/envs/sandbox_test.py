"""Snippets that a policy may write: each ends in time, with its text and nothing left behind."""

import os
import time

import pytest

from mint_jax.envs.sandbox import SnippetLimits, code_in, run_python
from mint_jax.errors import UserError

SHORT = SnippetLimits(timeout_s=1.0)
ROOT = os.geteuid() == 0


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42\n"),
        ("print(sorted({'b', 'a'}), hash('a') == hash('a'))", "['a', 'b'] True\n"),
        ("import sys; sys.stderr.write('bad')", "bad"),
        ("print('é', chr(55296))", "é ?\n"),
        ("import os; print(os.getcwd() == os.environ['HOME'], len(os.listdir()))", "True 1\n"),
        ("print('unended", "SyntaxError: unterminated string literal"),
        ("def f():\n    return 1 / 0\nf()", "return 1 / 0"),
        ("raise ValueError('x')", "ValueError: x\n[exit status 1]"),
        ("import sys; print('a'); sys.exit(3)", "a\n[exit status 3]"),
        ("import os; os._exit(0)", ""),
        ("import os; os.abort()", "[signal SIGABRT]"),
        ("x = 'a' * (1 << 40)", "MemoryError"),
        ("open('f', 'wb').write(bytes(100 << 20))", "File too large"),
        ("input()", "EOFError"),
    ],
)
def test_the_text_of_a_snippet(code, text):
    found = run_python(code)
    assert text in found if text else not found
    assert run_python(code) == found, "a rollout that is drawn again reads the same"
    assert "/" not in found.replace("1 / 0", ""), "no path that another run does not have"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import re; re.match(r'(a+)+b', 'a' * 60)",  # holds the interpreter's lock
        "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "import os; os.close(1); os.close(2)\nwhile True: pass",
    ],
)
def test_a_snippet_that_hangs_is_stopped(code):
    began = time.monotonic()
    assert run_python(code, SHORT) == "[stopped after 1 s]"
    assert time.monotonic() - began < 10


def test_output_without_end_is_cut():
    found = run_python(
        "while True: print('x' * 1000)", SnippetLimits(timeout_s=60.0, output_bytes=50)
    )
    assert found == "x" * 50 + "\n[output cut after 50 bytes]"


def exists(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_no_child_outlives_its_snippet():
    """Root may fork; the children are killed with the group."""
    code = (
        "import os, time\nprint(os.getpgid(0), flush=True)\nif os.fork() == 0:\n    time.sleep(60)"
    )
    found = run_python(code, SHORT)
    group = int(found.split()[0])
    assert ("stopped" in found) if ROOT else ("BlockingIOError" in found)
    until = time.monotonic() + 10  # a killed process is there until it is reaped
    while exists(group):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_no_file_descriptor_is_inherited(tmp_path):
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        found = run_python("import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))")
    assert found == "[0, 1, 2, 3]\n", "3 is the listing itself"


@pytest.mark.parametrize("wrong", [{"timeout_s": 0}, {"memory_mib": -1}, {"output_bytes": "4"}])
def test_limits_that_are_none_are_refused(wrong):
    with pytest.raises(UserError, match=r"of a snippet is .*; expected a number above 0: set it"):
        SnippetLimits(**wrong)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("first\n```\na\n```\nthen ```py\nb\n``` end", "b\n"),
        ("```python\ncut off", "cut off"),
        ("no code", None),
    ],
)
def test_the_code_of_a_completion(text, code):
    assert code_in(text) == code
