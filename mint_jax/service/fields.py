"""Fields of a JSON body, read by name and type: what is wrong is told with the field's name. Null
is as if it were not there.
"""

import math
from typing import Any

from mint_jax.errors import UserError
from mint_jax.service.bodies import parse_json


class BadRequest(UserError):
    """A field of a request is wrong.

    Attributes:
        param: its name.
        code: OpenAI's word for the mistake, where it has one.
    """

    def __init__(self, param: str | None, message: str, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


def parse(raw: bytes) -> dict[str, Any]:
    """The object that a body is.

    Raises:
        BadRequest: it is none.
    """
    try:
        body = parse_json(raw, finite=False)  # a number that is none is told with its field's name
    except UserError as error:
        raise BadRequest(None, str(error)) from None
    if not isinstance(body, dict):
        raise BadRequest(None, f"the body is {_kind(body)}; expected an object")
    return body


def wrong(name: str, value: Any, expected: str) -> BadRequest:
    """The error for a value of a field."""
    return BadRequest(name, f"{name} is {_shown(value)}; expected {expected}")


def text(name: str, value: Any, empty: bool = True) -> str:
    """A string that can be encoded."""
    if not isinstance(value, str) or not (value or empty):
        raise wrong(name, value, "a string" if empty else "a string that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(name, value, "text without half surrogate pairs") from None
    return value


def flag(body: dict[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def whole(body: dict[str, Any], name: str, default: Any, low: int, high: int) -> Any:
    """An integer in a range."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(name, value, f"an integer from {low} to {high}")
    return value


def number(
    body: dict[str, Any],
    name: str,
    default: float,
    low: float,
    high: float = math.inf,
    above: bool = False,
) -> float:
    """A finite number in a range; ``above``: not its lower end."""
    value = body.get(name)
    if value is None:
        return default
    fits = (
        not isinstance(value, bool)
        and isinstance(value, int | float)
        and abs(value) < 1e30
        and low <= value <= high
    )
    if not fits or (above and value == low):
        limits = f"{'above' if above else 'at least'} {low:g}" + (
            "" if high == math.inf else f" and at most {high:g}"
        )
        raise wrong(name, value, f"a number {limits}")
    return float(value)


def texts(body: dict[str, Any], name: str) -> tuple[str, ...]:
    """A string or a list of strings, none of them empty."""
    value = body.get(name)
    if value is None:
        return ()
    if not isinstance(value, str | list):
        raise wrong(name, value, "a string or a list of strings")
    return tuple(
        text(name, one, empty=False) for one in ([value] if isinstance(value, str) else value)
    )


def ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of token ids."""
    if not isinstance(value, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in value
    ):
        raise wrong(name, value, "a list of token ids")
    return tuple(value)


def mapping(body: dict[str, Any], name: str) -> dict[str, Any] | None:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise wrong(name, value, "an object")
    return value


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"{_kind(value)} of {len(value)}"
    shown = ascii(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
