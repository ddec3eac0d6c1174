"""Evaluation of reward and step functions: checks their results, explains their errors and reports
slow ones.

Python cannot end a thread from outside. Rewards therefore run in daemon threads, each call
registers itself, and the waiting thread reports slow calls and raises after a timeout.
"""

import contextlib
import dataclasses
import inspect
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from multiprocessing.pool import ThreadPool
from typing import Any, TextIO, TypeVar

import numpy as np

from mint_jax.envs.env import Conversation, Environment, Example, StepResult, Unscored
from mint_jax.envs.processes import Raised
from mint_jax.errors import UserError, own_traceback

T = TypeVar("T")
Row = TypeVar("Row")
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
        who = f"policy {self.who!r}" if self.who else "the base"
        return f"{who}, completion {self.completion!r:.200} of prompt {prompt!r:.200}"

    def wrong(
        self,
        what: str,
        problem: str,
        expected: str = "",
        remedy: str = "fix it and resume",
        frames: str = "",
    ) -> UserError:
        """Returns the error of a user's function ``what``."""
        if expected:
            problem = f"{problem}; expected {expected}"
        text = f"the {what} function {problem}; {self}: {remedy}"
        return UserError(f"{text}\n{frames}" if frames else text)


_running: dict[int, _Call] = {}  # by thread


def score(who: str, env: Environment, completion: str, example: Example) -> float:
    """Returns the reward of a sample of the policy ``who``, NaN if it was given up.
    Raises ``UserError``: no number.
    """
    call = _Call(who, completion, example.messages, time.monotonic())
    try:
        found = _result(call, "reward", env.reward, completion, example)
    except Unscored as error:
        _report(call, "reward", error)
        return math.nan
    return _number(found, call)


def step(who: str, env: Conversation, completions: Sequence[str], example: Example) -> StepResult:
    """Returns an environment's answer to the last turn of the policy ``who``. Raises ``UserError``:
    it is no ``StepResult`` with a finite reward and messages or text. If it was given up, the
    conversation ends with the reward NaN.
    """
    call = _Call(who, completions[-1], example.messages, time.monotonic())
    try:
        found = _result(call, "step", env.step, completions, example)
    except Unscored as error:
        _report(call, "step", error)
        return StepResult(reward=math.nan, done=True)
    if not isinstance(found, StepResult):
        expected = "envs.env.StepResult(observation, reward, done)"
        raise call.wrong("step", f"returned {found!r:.80} ({type(found).__name__})", expected)
    reads, is_text = found.observation, isinstance(example.messages, str)
    if not found.done and reads and isinstance(reads, str) != is_text:
        expected = "text, as the prompt is" if is_text else "messages, as the prompt has"
        raise call.wrong("step", f"returned the observation {reads!r:.80}", expected)
    if not isinstance(found.done, bool):
        raise call.wrong("step", f"returned done={found.done!r:.80}", "True or False")
    return dataclasses.replace(found, reward=_number(found.reward, call, "step"))


def each(
    score: Callable[[Row], T], groups: Sequence[Sequence[Row]], env: Environment | Conversation
) -> list[list[T]]:
    """Returns ``score(row)`` of the rows of each group, ``env.concurrency`` at once."""
    rows = [row for group in groups for row in group]
    with contextlib.ExitStack() as stack:
        mapped: Any = map
        if (count := min(getattr(env, "concurrency", 1), len(rows))) > 1:
            mapped = stack.enter_context(ThreadPool(count)).imap  # threads are daemons
        found = iter(mapped(score, rows))
        return [[next(found) for _ in group] for group in groups]


def _result(call: _Call, what: str, function: Callable[..., Any], *given: Any) -> Any:
    """Returns what a user's function returns, registered while it runs."""
    thread = threading.get_ident()
    _running[thread] = call
    try:
        value: Any = function(*given)
    except Unscored:
        raise
    except Raised as error:
        raise call.wrong(what, f"raised {error}", frames=error.frames) from None
    except Exception as error:
        reason, frames = f"raised {type(error).__name__}: {error}", own_traceback(error)
        raise call.wrong(what, reason, frames=frames) from None
    finally:
        _running.pop(thread, None)
    if inspect.iscoroutine(value):
        value.close()
        raise call.wrong(what, "is async", remedy="rewards run in threads, use a plain function")
    return value


def _report(call: _Call, what: str, error: Unscored) -> None:
    text = f"a {what} was given up, {error}: {call}; its row trains nothing"
    print(text, file=sys.stderr, flush=True)


def _number(value: Any, call: _Call, what: str = "reward") -> float:
    kind = type(value).__name__
    is_number = hasattr(value, "__float__") and not getattr(value, "ndim", 0)
    if not is_number or isinstance(value, str) or kind == "bool":
        expected = "a number, such as float(...) of it"
        raise call.wrong(what, f"returned {value!r:.80} ({kind})", expected)
    if not math.isfinite(value := float(value)):
        raise call.wrong(what, f"returned {value}", "a finite number")
    return value


def check_any(who: str, rewards: np.ndarray) -> None:
    """Raises ``UserError`` if every reward of the policy ``who`` was given up."""
    if np.isnan(rewards).all():
        raise UserError(
            f"policy {who!r}: all {rewards.size} rewards were given up, for the reasons above;"
            " expected one at least: fix the reward function, or raise reward_timeout, and resume"
        )


def check_timeout(timeout_s: float) -> None:
    """Raises ``UserError`` unless a timeout is a finite number of seconds >= 0."""
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 <= timeout_s < math.inf:
        raise UserError(
            f"reward_timeout is {timeout_s!r}; expected the seconds that a completion's reward may"
            " take, or 0 for no limit"
        )


class Watch:
    """Watch over the rewards that this process awaits.

    ``timeout_s`` is the limit of one completion's reward; 0 disables it.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S, out: TextIO | None = None):
        check_timeout(timeout_s)
        self.timeout_s, self._out = timeout_s, out
        self._waited, self._due = 0.0, SHOWN_S

    def look(self, waited_s: float, waiting: int) -> None:
        """Inspects running rewards, each second of a wait. Raises ``UserError``: a timeout."""
        longest = min([*_running.values()], key=lambda call: call.began, default=None)
        took_s = 0.0 if longest is None else time.monotonic() - longest.began
        if self.timeout_s and took_s > self.timeout_s:
            raise UserError(
                f"a reward has taken {took_s:.0f} s, {longest}; reward_timeout is"
                f" {self.timeout_s:g} s: fix the reward function, or raise reward_timeout (0"
                " disables it), and resume"
            )
        if waited_s < self._waited:  # another wait
            self._due = SHOWN_S
        self._waited = waited_s
        if waited_s >= self._due:
            self._due = 2 * waited_s
            text = f"waiting for rewards for {waited_s:.0f} s: {waiting} to come,"
            text += f" {len(_running)} completions at work"
            if longest is not None:
                text += f"; the longest runs for {took_s:.0f} s: {longest}"
            print(text, file=self._out or sys.stderr, flush=True)

    def over(self, call: Callable[[], T]) -> T:
        """Returns ``call()``, which computes rewards, run in a daemon thread under this watch."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="reward", daemon=True).start()
        began = time.monotonic()
        while not wait([future], LOOK_S).done:
            self.look(time.monotonic() - began, 1)
        return future.result()
