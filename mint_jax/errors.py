"""The error a user can mend: it names the value, what was expected, and the remedy."""


class UserError(ValueError):
    """A mistake in a config, a file or a request. ``launch`` prints it as one line, without a traceback."""


def choice(what: str, value: object, choices: object) -> UserError:
    """A ``UserError`` for a value that is none of ``choices``."""
    return UserError(f"{what} is {value!r}; choose one of: {', '.join(map(str, choices))}")  # type: ignore[call-overload]
