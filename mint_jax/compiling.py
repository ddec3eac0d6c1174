"""Compiles programs in a thread while others run, and says what is being compiled: it may take a
minute.

JAX reports the start of each compilation as a scalar and its end as a duration of one event, with
the program's name. What ends within ``AFTER_S``, as everything that comes from the compilation
cache does, is not worth a line.
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
    """A program of declared shapes.

    Attributes:
        key: what ``Programs`` is asked for it by.
        name: for people.
        build: lowers and compiles it, and runs nothing: jit finds it when it is called with such
            arguments.
        urgency: 0 of what the first request needs, 1 of what makes others faster, 2 of what few ask
            for.
    """

    key: Hashable
    name: str
    build: Callable[[], Any]
    urgency: int = 1


class Programs:
    """Programs compiled one after another in a thread of its own, the urgent ones first, while
    those that are ready run.

    XLA releases the GIL while it compiles. ``close`` does not wait for the program that is being
    compiled, which nothing can interrupt.

    Args:
        todo: all of them; keys are distinct.
        changed: called in the thread after each, and when one could not be compiled.
        compiled: called with the name of each program before it is compiled, how many are ready,
            and how many there are.

    Attributes:
        total: how many there are.
        now: the name of the program that is being compiled; empty while none is.
        failed: why one could not be compiled; no further one is then.
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
        """Begins to compile."""
        host.may_abandon(self._thread)
        self._thread.start()

    def close(self) -> None:
        """Begins no further program."""
        self.closed = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until all are ready; whether they are."""
        self._thread.join(timeout_s)
        return self.done

    @property
    def ready(self) -> int:
        """How many can be run."""
        return len(self._ready)

    @property
    def done(self) -> bool:
        """Whether all can be run."""
        return self.ready == self.total

    def has(self, key: Hashable) -> bool:
        """Whether a program can be run without compiling anything; from any thread."""
        return key in self._ready

    def want(self, key: Hashable) -> bool:
        """``has``; a program that is not ready is compiled next, for somebody waits for it."""
        if key in self._ready:
            return True
        with self._lock:
            self._todo.sort(key=lambda program: program.key != key)
        return False

    def _run(self) -> None:
        try:
            while not self.closed and (program := self._next()) is not None:
                self.now = program.name
                self._compiled(program.name, self.ready, self.total)
                program.build()
                self._ready.add(program.key)
                self.now = ""
                self._changed()
        except BaseException as error:  # told by who waits for the rest: the server ends with it
            self.failed = error
            self._changed()

    def _next(self) -> Program | None:
        with self._lock:
            return self._todo.pop(0) if self._todo else None


def abstract(tree: Any) -> Any:
    """Shapes and shardings of a tree's arrays, for compiling: the arrays may be donated meanwhile.

    Arrays that are committed to no device have no sharding here: a call takes them to wherever the
    others are.
    """
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=x.sharding if x.committed else None
        ),
        tree,
    )


class Announcer:
    """Prints a line once a compilation has taken ``after`` seconds, and one when it ends.

    Args:
        out: stderr, as it then is, by default.
    """

    def __init__(self, after: float = AFTER_S, out: TextIO | None = None):
        self._after, self._out = after, out
        # by the thread that compiles
        self._waiting: dict[int, tuple[threading.Timer, threading.Event]] = {}

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
    """A list that grows by the name of every program compiled inside, from the disk's cache or
    not.
    """
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
    """From now on compilations of this process are announced, by the first process where there are
    several.
    """
    if multihost.is_main():
        announcer = Announcer()
        jax.monitoring.register_scalar_listener(announcer.started)
        jax.monitoring.register_event_duration_secs_listener(announcer.ended)
