"""Termination within seconds of SIGINT or SIGTERM, whatever the main thread is doing.

Python runs signal handlers between bytecodes of the main thread, so a handler waits while XLA
compiles, and its exception may be discarded by a callback. The wakeup descriptor writes the
signal's number to a pipe at once. A thread reads it, prints a line, and ends the process if a clean
exit takes longer than ``GRACE_S``. Everything acknowledged is on disk by then.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from mint_jax.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 10.0  # seconds after the first signal: a step and its checkpoint may finish
AGAIN_S = 1.0  # seconds after the second signal

_standing: list[Callable[[], str]] = []  # where the program resumes; the last one is used
DISCARDING = ("__del__", "_xla_gc_callback")  # functions whose exceptions Python discards
IMPORTING = "<frozen importlib._bootstrap>"
_leave: list[Callable[[int, str], None]] = []  # the argument of ``install``
_repeated: list[int] = []  # signals delivered a second time by this module
_raised: list[int] = []  # signals that have raised ``Interrupted``
_grace: list[float] = []  # seconds of the active blocks; the last one is used


def install(leave: Callable[[int, str], None]) -> None:
    """Makes both signals raise ``Interrupted`` in the main thread, and end the process if that does
    not; ``leave(status, message)`` then notifies other processes of the run.
    """
    _leave.append(leave)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, interrupt)
    threading.Thread(target=_watch, args=(reading, leave), name="signals", daemon=True).start()


@contextlib.contextmanager
def grace(seconds: float) -> Iterator[None]:
    """Sets the time for a clean exit if the first signal arrives in the block."""
    _grace.append(seconds)
    try:
        yield
    finally:
        _grace.remove(seconds)


def restore() -> None:
    """Restores the handlers after a native library replaced them, as libtpu does when loaded."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)


def standing(where: Callable[[], str]) -> None:
    """Registers a function that says where the same command resumes; another thread calls it."""
    _standing.append(where)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raises ``Interrupted``; where an exception would be discarded, as in JAX's callback of the
    garbage collector, as soon as that code has returned.
    """
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING and _leave:
            # An exception in the initialisation of a native module can crash it (SIGSEGV in JAX's).
            _end(number, _leave[-1])
        if frame.f_code.co_name in DISCARDING:
            again = threading.Timer(0.05, _deliver, (number, threading.get_ident()))
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    _raised.append(number)
    raise Interrupted(signal.Signals(number).name, number)


def raised() -> int:
    """Returns the last signal that has raised ``Interrupted``; 0 if none has."""
    return _raised[-1] if _raised else 0


def _deliver(number: int, main: int) -> None:
    _repeated.append(number)
    signal.pthread_kill(main, number)


def _watch(reading: int, leave: Callable[[int, str], None]) -> None:
    number = _next(reading)
    name, seconds = signal.Signals(number).name, _grace[-1] if _grace else GRACE_S
    line = f"{name}: stopping within {seconds:.0f} s; once more stops at once"
    print(line, file=sys.stderr, flush=True)
    deadline = threading.Timer(seconds, _end, (number, leave))
    deadline.daemon = True
    deadline.start()
    _next(reading)
    time.sleep(AGAIN_S)
    _end(number, leave)


def _next(reading: int) -> int:
    """Returns the next of ``SIGNALS`` that arrives."""
    while True:
        for number in os.read(reading, 64):
            if number in _repeated:
                _repeated.remove(number)
            elif number in SIGNALS:
                return number


def _end(number: int, leave: Callable[[int, str], None]) -> None:
    status, name = 128 + number, signal.Signals(number).name
    last = threading.Timer(2 * AGAIN_S, os._exit, (status,))  # if notifying the others blocks
    last.daemon = True
    last.start()
    where = f"; {_standing[-1]()}" if _standing else ""
    print(f"interrupted: {name}{where}", file=sys.stderr, flush=True)
    leave(status, name)
    os._exit(status)
