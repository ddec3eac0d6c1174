"""Evaluation of reward functions: checks their results, explains their errors and reports slow
ones.

Python cannot end a thread from outside. Rewards therefore run in daemon threads, each call
registers itself, and the waiting thread inspects the calls: it reports slow ones, and after a
timeout it raises.
"""

import dataclasses
import inspect
import math
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TextIO, TypeVar

from mint_jax.envs.env import Environment, Example
from mint_jax.errors import UserError, own_traceback

T = TypeVar("T")
TIMEOUT_S = 600.0  # for one completion's reward
SHOWN_S = 10.0  # first report of a wait; later ones after each doubling
LOOK_S = 1.0


@dataclasses.dataclass(frozen=True)
class _Call:
    who: str
    completion: str
    prompt: Any
    began: float

    def __str__(self) -> str:
        last = self.prompt[-1] if self.prompt and not isinstance(self.prompt, str) else None
        prompt = last.get("content", "") if isinstance(last, dict) else self.prompt
        return f"policy {self.who!r}, completion {self.completion!r:.200} of prompt {prompt!r:.200}"


_running: dict[int, _Call] = {}  # by thread


def score(who: str, env: Environment, completion: str, example: Example) -> float:
    """Returns the reward of one completion.

    Args:
        who: policy that sampled it, for errors.

    Raises:
        UserError: the reward function raised, with its traceback, or returned something else than a
            finite number.
    """
    call = _running[threading.get_ident()] = _Call(
        who, completion, example.messages, time.monotonic()
    )
    try:
        value: Any = env.reward(completion, example)
    except Exception as error:
        raise UserError(
            f"the reward function raised {type(error).__name__}: {error}; {call}: fix it and"
            f" resume\n{own_traceback(error)}"
        ) from None
    finally:
        _running.pop(threading.get_ident(), None)
    if inspect.iscoroutine(value):
        value.close()
        raise UserError(
            f"the reward function is async, {call}: rewards run in threads, use a plain function"
        )
    if (
        isinstance(value, str | bool)
        or type(value).__name__ == "bool"
        or not hasattr(value, "__float__")
        or getattr(value, "ndim", 0)
    ):
        shown = f"{value!r:.80} ({type(value).__name__})"
        raise UserError(
            f"the reward function returned {shown}; expected a number, such as float(...) of it;"
            f" {call}: fix it and resume"
        )
    if not math.isfinite(value := float(value)):
        raise UserError(
            f"the reward function returned {value}; expected a finite number; {call}: fix it and"
            " resume"
        )
    return value


def check_timeout(timeout_s: float) -> None:
    """Checks a timeout.

    Raises:
        UserError: the value is not a finite number of seconds >= 0.
    """
    if (
        isinstance(timeout_s, bool)
        or not isinstance(timeout_s, int | float)
        or not 0 <= timeout_s < math.inf
    ):
        raise UserError(
            f"reward_timeout is {timeout_s!r}; expected the seconds that a completion's reward may"
            " take, or 0 for no limit"
        )


class Watch:
    """Watch over the rewards that this process awaits.

    Args:
        timeout_s: seconds that one completion's reward may take; 0 disables the limit.
        out: stream for reports of slow rewards.

    Raises:
        UserError: the timeout is not a number of seconds.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S, out: TextIO | None = None):
        check_timeout(timeout_s)
        self.timeout_s, self._out = timeout_s, out
        self._waited, self._due = 0.0, SHOWN_S

    def look(self, waited_s: float, waiting: int) -> None:
        """Inspects running rewards; call it every second of a wait.

        Args:
            waited_s: seconds since the wait began.
            waiting: number of policies whose rewards are missing.

        Raises:
            UserError: a reward exceeded the timeout; names policy, prompt and completion.
        """
        now, calls = time.monotonic(), sorted(_running.values(), key=lambda call: call.began)
        if self.timeout_s and calls and now - calls[0].began > self.timeout_s:
            raise UserError(
                f"a reward has taken {now - calls[0].began:.0f} s, {calls[0]}; reward_timeout is"
                f" {self.timeout_s:g} s: fix the reward function, or raise reward_timeout (0"
                " disables it), and resume"
            )
        if waited_s < self._waited:  # another wait
            self._due = SHOWN_S
        self._waited = waited_s
        if waited_s >= self._due:
            self._due = 2 * waited_s
            longest = (
                f"; the longest runs for {now - calls[0].began:.0f} s: {calls[0]}" if calls else ""
            )
            text = (
                f"waiting for rewards for {waited_s:.0f} s: {waiting} to come, {len(calls)}"
                f" completions at work{longest}"
            )
            print(text, file=self._out or sys.stderr, flush=True)

    def over(self, call: Callable[[], T]) -> T:
        """Runs ``call``, which computes rewards, in a thread under this watch and returns its
        result.
        """
        future, began = in_thread(call), time.monotonic()
        while not wait([future], LOOK_S).done:
            self.look(time.monotonic() - began, 1)
        return future.result()


def in_thread(call: Callable[[], T]) -> "Future[T]":
    """Runs a function in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return future
