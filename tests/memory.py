"""Memory that a call takes at most, measured in a child process.

In this process other threads (compilers, servers of earlier tests) would add theirs.
``tracemalloc`` is no choice either: CPython 3.11 crashes in it where a thread of a native library
enters Python for the first time while memory is traced, and Tinker's client has such threads.
"""

import ctypes
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil

SLACK = 4 << 20  # bytes that the measure may be off by
HANGS_S = 60


def assert_takes_at_most(limit: int, call: Callable[[], object]) -> None:
    """Fails if ``call`` makes the process larger by more than ``limit`` bytes and ``SLACK``, or
    raises. It runs in a fork, which has no other threads.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks; the child uses none of it
        child = os.fork()
    if child == 0:
        signal.alarm(HANGS_S)  # ends the child
        try:
            told = str(_taken(call))
        except BaseException:
            told = traceback.format_exc()
        os.write(writer, told[-60_000:].encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert told.isdecimal(), told or f"the call took more than {HANGS_S} s"
    assert int(told) < limit + SLACK, f"{told} bytes were taken, of at most {limit}"


def _taken(call: Callable[[], object]) -> int:
    # Free memory is given back first, or the call could take it without growing the process.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = psutil.Process().memory_info().rss
    call()
    status = Path("/proc/self/status").read_text()
    return max(0, (int(status.partition("VmHWM:")[2].split()[0]) << 10) - before)
