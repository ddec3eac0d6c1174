"""Memory that a call takes at most, measured on the whole process.

``tracemalloc`` is no choice: CPython 3.11 crashes in it where a thread of a native library enters
Python for the first time while memory is traced, and Tinker's client has such threads.
"""

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import psutil

SLACK = 4 << 20  # bytes that the measure itself may be off by
ATTEMPTS = 10


def assert_takes_at_most(limit: int, call: Callable[[], object]) -> None:
    """Fails if ``call`` makes the process larger by more than ``limit`` bytes and ``SLACK``.

    Other threads of the process (compilers, servers of earlier tests) can only add to what one call
    takes, so the least of ``ATTEMPTS`` calls counts.
    """
    least = float("inf")
    for _ in range(ATTEMPTS):
        least = min(least, _taken(call))
        if least < limit + SLACK:
            return
        time.sleep(0.2)
    raise AssertionError(f"{least} bytes were taken, of at most {limit}")


def _taken(call: Callable[[], object]) -> int:
    # Free memory is given back first, or the call could take it without growing the process.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = psutil.Process().memory_info().rss
    call()
    status = Path("/proc/self/status").read_text()
    return (int(status.partition("VmHWM:")[2].split()[0]) << 10) - before
