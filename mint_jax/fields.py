"""Settings as dataclasses: how an annotation reads a value, for config files, the command line and
Python callers alike. Imports no JAX.

``Annotated[str, ("a", "b")]`` is one of these texts, ``Annotated[int, 1]`` at least 1, and ``T |
None`` may stay unset. A dataclass is a section, one that derives from ``Open`` also keeps
undeclared names, and ``dict[str, T]`` takes any name.
"""

import dataclasses
import difflib
import functools
import math
import numbers
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from mint_jax.errors import UserError

WORDS = {int: "whole number", float: "number", bool: "True or False", str: "text", Any: "value"}
ABSTRACT = {int: numbers.Integral, float: numbers.Real}  # NumPy's numbers are welcome
Place = Annotated[str, "path"]  # its ~ is expanded
Count = Annotated[int, 1]  # the smallest value
Natural = Annotated[int, 0]
Amount = Annotated[float, 0]  # and finite


def setting(help: str, default: Any = dataclasses.MISSING) -> Any:
    """Declares a field of a dataclass, with its line of ``--help`` and of ``docs/settings.md``."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Open:
    """A section that takes names beyond its fields; ``extra`` has them."""

    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class Kind(NamedTuple):
    """An annotation, taken apart; ``items`` are the annotations of a dict's or tuple's items,
    ``mark`` is ``"path"``, the smallest value, or a tuple of choices.
    """

    type: Any
    items: tuple[Any, ...] = (Any, ...)
    mark: Any = None
    is_optional: bool = False

    @property
    def is_section(self) -> bool:
        return self.type is dict or dataclasses.is_dataclass(self.type)

    @property
    def takes_any_name(self) -> bool:
        if self.type is dict:
            return not dataclasses.is_dataclass(self.items[0])
        return self.is_section and issubclass(self.type, Open)

    def __str__(self) -> str:
        if isinstance(self.mark, tuple):
            return f"one of {', '.join(name or 'empty' for name in self.mark)}"
        if self.type is tuple:
            items = str(kind_of(self.items[0])).partition(" of ")[0]
            return "tuple" if self.items[0] is Any else f"tuple of {items}s"
        word = WORDS.get(self.type) or self.type.__name__
        return {None: word, "path": "path"}.get(self.mark, f"{word}, at least {self.mark}")

    @property
    def expected(self) -> str:
        """Words for an error, with their article."""
        words = str(self)
        return words if words.startswith(("one of", "text", "True")) else f"a {words}"

    def read(self, value: Any) -> Any:
        """Returns a value in its type, or raises ``ValueError``."""
        if value is None and self.is_optional:
            return None
        if self.type is Any:
            is_home = isinstance(value, str) and value.startswith("~/")
            return os.path.expanduser(str(value)) if is_home else value
        if self.type is tuple:
            if self.items[0] is str and isinstance(value, str):  # a single text is a tuple of one
                value = (value,) if value else ()
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ValueError
            items = self.items if self.items[-1] is not ... else self.items[:1] * len(value)
            return tuple(kind_of(k).read(each) for k, each in zip(items, value, strict=True))
        if type(value) is not self.type:
            accepted = ABSTRACT.get(self.type, self.type)
            if isinstance(value, bool) or not isinstance(value, accepted):
                raise ValueError
            value = self.type(value) if self.type in ABSTRACT else value
        mark: Any = self.mark
        if mark is None:
            return value
        if mark == "path":
            return os.path.expanduser(str(value))
        is_in = value in mark if isinstance(mark, tuple) else mark <= value < math.inf  # type: ignore[operator]
        if not is_in:
            raise ValueError
        return value


@functools.cache
def kind_of(annotation: Any) -> Kind:
    if isinstance(annotation, Kind):
        return annotation
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = next(each for each in args if each is not types.NoneType)
        return kind_of(inner)._replace(is_optional=True)
    if origin is Annotated:
        return kind_of(args[0])._replace(mark=args[1])
    if origin in (dict, tuple):
        return Kind(origin, args[origin is dict :])
    return Kind(annotation)


@functools.cache
def kinds(cls: type) -> dict[str, Kind]:
    """Returns the kind of each field of a dataclass."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: kind_of(hints[f.name]) for f in dataclasses.fields(cls)}


def check(cls: type, values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Returns checked values of a dataclass's fields; a list becomes the expected tuple. Raises
    ``UserError``, which names ``what``, for an unknown name or a wrong type.
    """
    known, out = kinds(cls), {}
    for name, value in values.items():
        if name not in known:
            raise unknown(f"{what} has no setting", name, known)
        try:
            out[name] = known[name].read(value)
        except ValueError:
            wanted = known[name].expected
            raise UserError(f"{what}: {name} is {value!r:.80}; expected {wanted}") from None
    return out


def unknown(said: str, name: object, known: Iterable[str]) -> UserError:
    """Returns the error for a name that is not in ``known``, with the nearest known name."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, 1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    return UserError(f"{said} {name!r}{hint}; choose from {', '.join(known)}")


class Settings:
    """Base of a frozen dataclass of settings, decorated with ``repr=False``, that checks the types
    of its values and prints what differs from the defaults.
    """

    def __post_init__(self):
        vars(self).update(check(type(self), vars(self), type(self).__name__))

    def __repr__(self) -> str:
        given = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        shown = ", ".join(f"{n}={value!r}" for n, (value, usual) in given.items() if value != usual)
        return f"{type(self).__name__}({shown})"
