"""Settings dataclasses that check the types of their values and print only what differs from the
defaults.
"""

import collections.abc
import dataclasses
import difflib
import functools
import numbers
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from mint_jax.errors import UserError

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}


def setting(help: str, default: Any = dataclasses.MISSING) -> Any:
    """Declares a field of a dataclass, with its line of ``--help`` and of ``docs/settings.md``."""
    return dataclasses.field(default=default, metadata={"help": help})


class Settings:
    """Base of a frozen dataclass of settings, decorated with ``repr=False``."""

    def __post_init__(self):
        vars(self).update(check(type(self), vars(self), type(self).__name__))

    def __repr__(self) -> str:
        given = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        shown = ", ".join(f"{n}={value!r}" for n, (value, usual) in given.items() if value != usual)
        return f"{type(self).__name__}({shown})"


def check(cls: type, values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Returns checked values of a dataclass's fields; a list becomes the expected tuple. Raises
    ``UserError``, which names ``what``, for an unknown name or a wrong type.
    """
    hints = _hints(cls)
    for name in values:
        if name not in hints:
            raise unknown(f"{what} has no setting", name, hints)
    return {
        n: value if _is_plainly(hints[n], value) else _checked(hints[n], value, f"{what}: {n}")
        for n, value in values.items()
    }


def unknown(said: str, name: object, known: Iterable[str]) -> UserError:
    """Returns the error for a name that is not in ``known``, with the nearest known name."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, 1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    return UserError(f"{said} {name!r}{hint}; choose from {', '.join(known)}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _is_plainly(kind: Any, value: Any) -> bool:
    """Returns true if a value is certainly of a type; a fast path for a million objects."""
    if type(value) is tuple:
        item = _item(kind)
        return item is not None and all(type(each) is item for each in value)
    return type(value) is kind


@functools.cache
def _item(kind: Any) -> Any:
    """Returns ``X`` of ``tuple[X, ...]``."""
    items = typing.get_args(kind) if typing.get_origin(kind) is tuple else ()
    return items[0] if len(items) == 2 and items[1] is Ellipsis else None


def _checked(kind: Any, value: Any, where: str) -> Any:
    if _is_plainly(kind, value):
        return value
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if value is None and types.NoneType in typing.get_args(kind):
            return None
        kind = next(each for each in typing.get_args(kind) if each is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        if isinstance(value, str) or not isinstance(value, collections.abc.Sequence):
            example = f": write ({value!r},)" if isinstance(value, str) else ""
            raise UserError(f"{where} is {value!r:.80}; expected a list or tuple{example}")
        if len(items) == 2 and items[1] is not Ellipsis:
            if len(value) != len(items):
                raise UserError(f"{where} is {value!r:.80}; expected {len(items)} values")
            return tuple(_checked(item, each, where) for item, each in zip(items, value))
        return tuple(_checked(items[0], each, where) for each in value)
    for plain, abstract in ((int, numbers.Integral), (float, numbers.Real)):
        if kind is plain and isinstance(value, abstract) and not isinstance(value, bool):
            return plain(value)  # type: ignore[call-overload]
    if (isinstance(kind, type) and not isinstance(value, kind)) or kind in (int, float):
        wanted = _WORDS.get(kind, f"a {kind.__name__}")
        raise UserError(f"{where} is {value!r:.80}; expected {wanted}")
    return value
