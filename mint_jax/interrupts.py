"""Ends a program within seconds of SIGINT or SIGTERM, whatever its main thread is doing.

Python runs signal handlers between bytecodes of the main thread, so a handler waits as long as XLA
compiles or a program runs; an exception that a handler raises may also end in a callback that
discards it. The kernel-side half of a handler writes the signal's number to a pipe at once. A
thread reads it, says so, and ends the process if the orderly way out takes longer than ``GRACE_S``.
Everything that has been acknowledged is on the disk by then, as it is for a process that is killed.
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
GRACE_S = 10.0  # from the first signal: a step and its checkpoint may end
AGAIN_S = 1.0  # from a second one

_standing: list[Callable[[], str]] = []  # say where the program stands; the last one counts
DISCARDING = ("__del__", "_xla_gc_callback")  # functions whose exceptions Python discards

_repeated: list[int] = []  # signals that this module delivers a second time
_grace: list[float] = []  # of the blocks that are running, the last one counts


def install(leave: Callable[[int, str], None]) -> None:
    """Has both signals raise ``Interrupted`` in the main thread, which must call this, and end the
    process when that does not.

    Args:
        leave: called with exit status and message before the process is ended; it tells other
            processes of the run.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, interrupt)
    threading.Thread(target=_watch, args=(reading, leave), name="signals", daemon=True).start()


@contextlib.contextmanager
def grace(seconds: float) -> Iterator[None]:
    """Gives the orderly way out this long, if the first signal comes in the block: a server ends
    what it is answering.
    """
    _grace.append(seconds)
    try:
        yield
    finally:
        _grace.remove(seconds)


def restore() -> None:
    """Puts back the handlers of both signals, which a native library has replaced: libtpu does as
    it is loaded.
    """
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)


def standing(where: Callable[[], str]) -> None:
    """Registers what to say of a program that is ended: where the same command goes on. It is
    called from another thread.
    """
    _standing.append(where)


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler that raises ``Interrupted``; where an exception would be discarded, as soon as that
    is over.

    JAX has a callback of the garbage collector: a Ctrl-C that met it was printed, and forgotten.
    """
    while frame is not None:
        if frame.f_code.co_name in DISCARDING:
            again = threading.Timer(0.05, _deliver, (number, threading.get_ident()))
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    raise Interrupted(signal.Signals(number).name, number)


def _deliver(number: int, main: int) -> None:
    _repeated.append(number)
    signal.pthread_kill(main, number)


def _watch(reading: int, leave: Callable[[int, str], None]) -> None:
    number = _next(reading)
    name, seconds = signal.Signals(number).name, _grace[-1] if _grace else GRACE_S
    print(
        f"{name}: stopping within {seconds:.0f} s; once more stops at once",
        file=sys.stderr,
        flush=True,
    )
    deadline = threading.Timer(seconds, _end, (number, leave))
    deadline.daemon = True
    deadline.start()
    _next(reading)
    time.sleep(AGAIN_S)
    _end(number, leave)


def _next(reading: int) -> int:
    """The next of ``SIGNALS`` that arrives."""
    while True:
        for number in os.read(reading, 64):
            if number in _repeated:
                _repeated.remove(number)
            elif number in SIGNALS:
                return number


def _end(number: int, leave: Callable[[int, str], None]) -> None:
    status, name = 128 + number, signal.Signals(number).name
    last = threading.Timer(2 * AGAIN_S, os._exit, (status,))  # if the others cannot be told
    last.daemon = True
    last.start()
    where = f"; {_standing[-1]()}" if _standing else ""
    print(f"interrupted: {name}{where}", file=sys.stderr, flush=True)
    leave(status, name)
    os._exit(status)
