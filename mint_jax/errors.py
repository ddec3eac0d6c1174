"""Errors that a user can fix: the message names the value, the expectation and the remedy."""

import traceback
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or a termination signal. The message says where the program stopped; the exit status
    is 128 plus the signal number.
    """

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.number = number


class UserError(ValueError):
    """Mistake in a config, a file or a request. ``launch`` prints it as one line, without a
    traceback.
    """


def choice(what: str, value: object, choices: object) -> UserError:
    """Returns a ``UserError`` for a value that is not among ``choices``."""
    return UserError(f"{what} is {value!r}; choose one of: {', '.join(map(str, choices))}")  # type: ignore[call-overload]


def own_traceback(error: BaseException) -> str:
    """Returns the traceback of an error without this package's frames, if it has others."""
    shown = traceback.TracebackException.from_exception(error)
    chain, one = [], shown
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    theirs = [[f for f in one.stack if not f.filename.startswith(_PACKAGE)] for one in chain]
    if any(theirs):
        for one, frames in zip(chain, theirs):
            one.stack = traceback.StackSummary.from_list(frames)
    return "".join(shown.format()).rstrip()
