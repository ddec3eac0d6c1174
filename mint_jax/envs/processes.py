"""Rewards and steps in worker processes: one that hangs, or takes its process with it, is given up
and the run goes on.

Python cannot end a thread, and a regular expression may hold the interpreter's lock without end. A
worker makes its own environment from its name and options, so these must suffice to make it.
"""

import atexit
import functools
import multiprocessing as mp
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from mint_jax.envs import env as env_lib
from mint_jax.envs.env import ListConversation, ListEnvironment, Unscored
from mint_jax.errors import UserError, own_traceback

ENDED = "the run ended before its rewards did: resume it"
SPARE_S = 5.0  # after its timeout a worker ends by itself, if this process is gone


class GaveUp(Unscored):
    """A worker took too long or died."""


class Raised(Exception):
    """An error in a worker: ``str`` has its type and message, ``frames`` the user's traceback."""

    def __init__(self, text: str, frames: str):
        super().__init__(text)
        self.frames = frames


ERRORS = {"raised": Raised, "unscored": Unscored, "mistake": UserError}  # kinds of a bad answer


class WorkerPool:
    """Up to ``count`` worker processes, started when needed; calls wait for a free one.

    Attributes:
        timeout_s: time limit of one call; 0 sets no limit.
    """

    def __init__(self, count: int, timeout_s: float):
        self.count, self.timeout_s = count, timeout_s
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(None)
        self._all, self._lock, self._is_closed = list[_Worker](), threading.Lock(), False
        atexit.register(self.close)

    def call(self, made_by: tuple[str, dict[str, Any]], method: str, *given: Any) -> Any:
        """Returns ``method(*given)`` of an environment, by its name and options.

        Raises:
            GaveUp: the call took too long, or its process died.
            Unscored: the method raised it.
            Raised: the method raised another error.
        """
        worker = self._idle.get()
        try:
            if worker is None:
                worker = self._start()
            try:
                if made_by not in worker.ready:
                    worker.ask(("make", *made_by), None)
                    worker.ready.append(made_by)
                return worker.ask((method, self.timeout_s, made_by, given), self.timeout_s or None)
            except GaveUp:
                worker.kill()
                worker = None
                if self._is_closed:
                    raise UserError(ENDED) from None
                raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kills the workers; calls that wait give up."""
        atexit.unregister(self.close)
        with self._lock:
            self._is_closed = True
            for worker in self._all:
                worker.kill()

    def _start(self) -> "_Worker":
        with self._lock:
            if self._is_closed:
                raise UserError(ENDED)
            worker = _Worker()
            self._all = [one for one in self._all if one.process.poll() is None] + [worker]
        return worker


class _Worker:
    """A process that answers calls through a pipe, one after another."""

    def __init__(self):
        self.pipe, other = mp.Pipe()
        self.ready: list[Any] = []
        # an environment that uses JAX must not take the accelerator's memory
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mint_jax.envs.processes", str(other.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[other.fileno()],
            env=os.environ | variables,
            start_new_session=True,
        )
        other.close()

    def ask(self, message: Any, timeout_s: float | None) -> Any:
        """Returns the answer to a message; raises as ``WorkerPool.call``."""
        try:
            self.pipe.send(message)
            if not self.pipe.poll(timeout_s):
                raise GaveUp(f"it took more than {timeout_s:g} s")
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            raise GaveUp("its process died") from None
        if kind in ERRORS:
            raise ERRORS[kind](*value)
        return value

    def kill(self) -> None:
        """Ends the process and what it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def remote(environment: Any, pool: WorkerPool, name: str, options: dict[str, Any]) -> Any:
    """Returns an environment that calls the same one in workers, by its name and options."""
    kind, method = ListEnvironment, "reward"
    if env_lib.is_conversation(environment):
        kind, method = ListConversation, "step"
    call = functools.partial(pool.call, (name, options), method)
    return kind(environment.train, environment.held_out, call, pool.count)


def _work(pipe: Connection) -> None:
    """Answers calls until the other end closes."""
    made: list[tuple[Any, Any]] = []
    while True:
        try:
            what, *rest = pipe.recv()
            if what == "make":
                made.append((tuple(rest), env_lib.make(rest[0], **rest[1])))
                answer: Any = ("value", None)
            else:
                timeout_s, made_by, given = rest
                [environment] = [one for by, one in made if by == made_by]
                if timeout_s:
                    signal.setitimer(signal.ITIMER_REAL, timeout_s + SPARE_S)
                try:
                    answer = "value", getattr(environment, what)(*given)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
        except EOFError:
            return
        except UserError as error:
            answer = "mistake", (str(error),)
        except Unscored as error:
            answer = "unscored", (str(error),)
        except Exception as error:
            answer = "raised", (f"{type(error).__name__}: {error}", own_traceback(error))
        try:
            pipe.send(answer)
        except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
            pipe.send(("raised", (f"an answer that cannot be sent: {error}", "")))


if __name__ == "__main__":
    _work(Connection(int(sys.argv[1])))
