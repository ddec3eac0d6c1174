"""Says what is being compiled while it is: a program's first call may take a minute in which nothing else is heard.

JAX reports the start of each compilation as a scalar and its end as a duration of one event, with the program's name. What
ends within ``AFTER_S``, as everything that comes from the compilation cache does, is not worth a line.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

import jax

from mint_jax import multihost
from mint_jax.metrics import clock

EVENT = "/jax/core/compile/backend_compile_duration"
AFTER_S = 2.0


class Announcer:
    """Prints a line once a compilation has taken ``after`` seconds, and one when it ends.

    Args:
        out: stderr, as it then is, by default.
    """

    def __init__(self, after: float = AFTER_S, out: TextIO | None = None):
        self._after, self._out = after, out
        self._waiting: dict[int, tuple[threading.Timer, threading.Event]] = {}  # by the thread that compiles

    def started(self, event: str, value: float, **about: str | int) -> None:
        """A listener for scalars."""
        del value  # when it began
        if event != EVENT:
            return
        said, name = threading.Event(), about.get("fun_name", "a program")

        def say() -> None:
            said.set()
            self._print(f"compiling {name} …")

        timer = threading.Timer(self._after, say)
        timer.daemon = True
        self._waiting[threading.get_ident()] = timer, said
        timer.start()

    def ended(self, event: str, duration_secs: float, **about: str | int) -> None:
        """A listener for durations; JAX reports those of compilations that failed, too."""
        found = self._waiting.pop(threading.get_ident(), None) if event == EVENT else None
        if found is None:
            return
        timer, said = found
        timer.cancel()
        if said.is_set():
            self._print(f"compiled {about.get('fun_name', 'a program')} in {clock(duration_secs)}")

    def _print(self, line: str) -> None:
        print(line, file=self._out or sys.stderr, flush=True)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that grows by the name of every program compiled inside, from the disk's cache or not."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if event == EVENT:
            seen.append(str(about.get("fun_name", "?")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def announce() -> None:
    """From now on compilations of this process are announced, by the first process where there are several."""
    if multihost.is_main():
        announcer = Announcer()
        jax.monitoring.register_scalar_listener(announcer.started)
        jax.monitoring.register_event_duration_secs_listener(announcer.ended)
