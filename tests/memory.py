"""Memory that a call takes at most, measured on the whole process.

``tracemalloc`` is no choice: CPython 3.11 crashes in it where a thread of a native library enters
Python for the first time while memory is traced, and Tinker's client has such threads.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import psutil

SLACK = 4 << 20  # bytes that other threads of the process may take meanwhile


@contextlib.contextmanager
def taken_at_most(limit: int) -> Iterator[None]:
    """Fails if the block makes the process larger by more than ``limit`` bytes and ``SLACK``.

    Free memory is given back first, or the block could take it without growing the process.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = psutil.Process().memory_info().rss
    yield
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
    assert peak - before < limit + SLACK, f"{peak - before} bytes were taken"
