"""Compilation in a background thread, and announcements of long compilations.

JAX reports the start of each compilation as a scalar and its end as a duration, with the program's
name. A compilation shorter than ``AFTER_S``, such as a read from the compilation cache, is not
announced.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import jax

from mint_jax import host, multihost
from mint_jax.metrics import clock

EVENT = "/jax/core/compile/backend_compile_duration"
AFTER_S = 2.0


class Program(NamedTuple):
    """Program of declared shapes.

    Attributes:
        build: lowers and compiles the program without running it; jit then finds it.
        urgency: 0 for programs of the first request, 1 for faster ones, 2 for rarely used ones.
    """

    key: Hashable
    name: str
    build: Callable[[], Any]
    urgency: int = 1


class Programs:
    """Programs of distinct keys compiled in a background thread, urgent ones first, while ready
    ones run.

    Args:
        changed: called in the thread after each program and after a failure.
        compiled: called before each compilation with name, number of ready programs, and total.

    Attributes:
        now: name of the program being compiled; empty if none is.
        failed: exception of a failed compilation, which ends all.
    """

    def __init__(
        self,
        todo: Sequence[Program],
        changed: Callable[[], None] = lambda: None,
        compiled: Callable[[str, int, int], None] = lambda name, done, total: None,
    ):
        self._todo = sorted(todo, key=lambda program: program.urgency)
        self._changed, self._compiled = changed, compiled
        self._ready: set[Hashable] = set()
        self._lock = threading.Lock()
        self.total, self.now, self.closed = len(self._todo), "", False
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="compiler", daemon=True)

    def start(self) -> None:
        host.may_abandon(self._thread)
        self._thread.start()

    def close(self) -> None:
        """Stops before the next program, without waiting for the running compilation."""
        self.closed = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until all programs are ready; returns false after the timeout."""
        self._thread.join(timeout_s)
        return self.done

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def done(self) -> bool:
        return self.ready == self.total

    def has(self, key: Hashable) -> bool:
        """Returns true if a program can run without compiling; callable from any thread."""
        return key in self._ready

    def want(self, key: Hashable) -> bool:
        """Returns ``has``, and compiles a missing program next."""
        if key in self._ready:
            return True
        with self._lock:
            self._todo.sort(key=lambda program: program.key != key)
        return False

    def _run(self) -> None:
        try:
            while not self.closed and self._todo:
                with self._lock:
                    program = self._todo.pop(0)
                self.now = program.name
                self._compiled(program.name, self.ready, self.total)
                program.build()
                self._ready.add(program.key)
                self.now = ""
                self._changed()
        except BaseException as error:  # the server polls `failed` and ends
            self.failed = error
            self._changed()


def abstract(tree: Any) -> Any:
    """Returns shapes and shardings of a tree's arrays, which may be donated while it compiles."""

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        # a call moves an array that is not committed to the others' devices
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None)

    return jax.tree.map(shape_of, tree)


class Announcer:
    """Prints a line when a compilation has taken ``after`` seconds, and one when it ends."""

    def __init__(self, after: float = AFTER_S, out: TextIO | None = None):
        self._after, self._out = after, out
        self._waiting: dict[int, tuple[threading.Timer, threading.Event]] = {}  # by thread

    def started(self, event: str, value: float, **about: str | int) -> None:
        """Listens to scalars."""
        del value  # start time
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
        """Listens to durations; JAX reports failed compilations too."""
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
    """Yields a list that grows by the name of every program compiled inside."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if event == EVENT:
            names.append(str(about.get("fun_name", "?")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def announce() -> None:
    """Announces all later compilations of process 0."""
    if multihost.is_main():
        announcer = Announcer()
        jax.monitoring.register_scalar_listener(announcer.started)
        jax.monitoring.register_event_duration_secs_listener(announcer.ended)
