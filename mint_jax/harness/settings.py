"""Reads settings: a config file's mapping and the command line's changes become a frozen dataclass.

The dataclass declares the settings; ``fields.setting`` adds the line that ``--help`` shows. The
annotation of a field says how its value is read:

- a dataclass is a section; one that derives from ``Open`` keeps undeclared names in ``extra``;
- ``dict[str, SomeDataclass]`` is a section for each name, ``dict[str, T]`` takes any name;
- ``Place`` is a path, whose ``~`` is expanded; ``Count`` is at least 1, ``Natural`` at least 0;
- ``Annotated[str, ("a", "b")]`` is one of these texts;
- ``T | None = None`` may stay unset.

Imports no JAX: a mistake on the command line is reported before JAX is imported.
"""

import ast
import dataclasses
import difflib
import functools
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar

from mint_jax.errors import UserError

T = TypeVar("T")
UNSET = dataclasses.MISSING
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
Place = Annotated[str, "path"]
Count = Annotated[int, 1]  # the smallest value
Natural = Annotated[int, 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Open:
    """A section that takes names beyond its fields; ``extra`` has them."""

    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class Line(NamedTuple):
    """One setting of ``--help``. ``value`` is ``UNSET`` where one must be given."""

    path: str
    type: str
    value: Any
    help: str


def build(cls: type[T], given: Mapping[str, Any], where: str = "", default: Any = None) -> T:
    """Returns the dataclass with these values, and defaults for the others.

    Args:
        where: path of the section in error messages, such as ``policies.adder.``.
        default: an instance whose values replace the defaults of the class.

    Raises:
        UserError: a setting is missing, unknown or of another type, or the dataclass refuses it.
    """
    known, values = declared(cls), {}
    extra = {name: value for name, value in given.items() if name not in known}
    if issubclass(cls, Open):
        values["extra"] = {name: _value(Any, value, where + name) for name, value in extra.items()}
    elif extra:
        _unknown(where, next(iter(extra)), known)
    for name, (kind, value, line) in known.items():
        value = value if default is None else getattr(default, name)
        if name in given:
            value = _read(kind, given[name], where + name, value)
        elif value is UNSET and _is_section(kind):
            value = _read(kind, {}, where + name, value)
        elif value is UNSET:
            raise UserError(
                f"{where}{name} is not set ({line}): give it to the config file, or set"
                f" --config.{where}{name}=..."
            )
        values[name] = value
    try:
        return cls(**values)
    except UserError as error:
        raise UserError(f"{where.rstrip('.')}: {error}" if where else str(error)) from None


def plain(value: Any) -> Any:
    """Returns settings as JSON has them; unset ones are left out."""
    if dataclasses.is_dataclass(value):
        out = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        extra = out.pop("extra") if isinstance(value, Open) else {}
        value = {name: each for name, each in out.items() if each is not None} | extra
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value


def change(kind: Any, tree: dict[str, Any], path: str, text: str, where: str = "") -> None:
    """Sets one value of a nested dict from the command line's text; ``*`` in place of a policy's
    name changes all policies.

    Raises:
        UserError: no such setting, or text that is not of its type.
    """
    name, _, rest = path.partition(".")
    if name == "*" and rest and dataclasses.is_dataclass(_item(kind)):
        for each in tree:
            change(kind, tree, f"{each}.{rest}", text, where)
        return
    child, full = _child(kind, tree, name, where), where + name
    if rest and child is Any and name not in tree:
        child = dict[str, Any]
    if rest and not _is_section(child):
        raise UserError(f"{full} is a value, not a section: set --config.{full}={text}")
    if rest:
        tree[name] = dict(_section(tree.get(name, {}), full))
        change(child, tree[name], rest, text, full + ".")
    elif _is_section(child):
        names = ", ".join(_names(child, tree.get(name, {}))) or "NAME"
        raise UserError(
            f"{full} is a section, not a value: set --config.{full}.<name>=...; it has {names}"
        )
    else:
        tree[name] = _value(child, _parse(child, text), full)


def describe(
    kind: Any, tree: Mapping[str, Any], where: str = "", default: Any = None
) -> Iterator[Line]:
    """Yields every setting with its present value; ``NAME`` stands for a name of one's own."""
    known = declared(kind) if dataclasses.is_dataclass(kind) else {}
    takes_any = _takes_any_name(kind)
    for name in dict.fromkeys([*known, *tree] or (() if takes_any else ("NAME",))):
        child = _child(kind, tree, name, where)
        _, usual, line = known.get(name, (None, UNSET, ""))
        value = tree.get(name, usual if default is None else getattr(default, name, UNSET))
        if _is_section(child):
            inner = value if isinstance(value, Mapping) else {}
            instance = usual if dataclasses.is_dataclass(usual) else None
            yield from describe(child, inner, f"{where}{name}.", instance)
        else:
            yield Line(where + name, _words(child), value, line)
    if takes_any:
        yield Line(f"{where}NAME", "value", None, "any further name" if known else "any name")


@functools.cache
def declared(cls: Any) -> dict[str, tuple[Any, Any, str]]:
    """Returns annotation, default (``UNSET``: none) and help of every setting of a dataclass."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        f.name: (hints[f.name], f.default, f.metadata.get("help", ""))
        for f in dataclasses.fields(cls)
        if not (f.name == "extra" and issubclass(cls, Open))
    }


def _bare(kind: Any) -> Any:
    """Returns an annotation without ``| None``."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        [kind] = [k for k in typing.get_args(kind) if k is not types.NoneType]
    return kind


def _is_section(kind: Any) -> bool:
    kind = _bare(kind)
    return dataclasses.is_dataclass(kind) or typing.get_origin(kind) is dict


def _item(kind: Any) -> Any:
    """Returns ``T`` of ``dict[str, T]`` or ``tuple[T, ...]``, else ``Any``."""
    return (typing.get_args(kind) or (Any,))[typing.get_origin(kind) is dict]


def _section(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{path} is {value!r}; expected a section of settings: a ConfigDict")
    return value


def _takes_any_name(kind: Any) -> bool:
    if dataclasses.is_dataclass(kind):
        return issubclass(kind, Open)  # type: ignore[arg-type]
    return typing.get_origin(kind) is dict and not dataclasses.is_dataclass(_item(kind))


def _names(kind: Any, tree: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*(declared(kind) if dataclasses.is_dataclass(kind) else ()), *tree]))


def _child(kind: Any, tree: Mapping[str, Any], name: str, where: str) -> Any:
    """Returns the annotation of a name in a section."""
    if dataclasses.is_dataclass(kind) and name in declared(kind):
        child = declared(kind)[name][0]
        return _bare(child) if _is_section(child) else child
    if not _takes_any_name(kind) and name not in (*tree, "NAME"):
        _unknown(where, name, _names(kind, tree))
    item = Any if dataclasses.is_dataclass(kind) else _item(kind)
    return dict[str, Any] if item is Any and isinstance(tree.get(name), Mapping) else item


def _unknown(where: str, name: str, known: Iterable[str]) -> NoReturn:
    near = difflib.get_close_matches(name, known := list(known), n=1, cutoff=0.5)
    hint = (
        f"did you mean {where}{near[0]}?"
        if near
        else f"{where.rstrip('.') or 'the config'} has {', '.join(known) or 'none'}"
    )
    raise UserError(f"{where}{name} is no setting: {hint} (--help lists all)")


def _read(kind: Any, value: Any, path: str, default: Any) -> Any:
    """Returns a section or a value in its declared type."""
    if not _is_section(kind) or (value is None and _bare(kind) is not kind):
        return _value(kind, value, path)
    kind, section = _bare(kind), _section(value, path)
    if dataclasses.is_dataclass(kind):
        instance = default if dataclasses.is_dataclass(default) else None
        return build(kind, section, path + ".", instance)  # type: ignore[arg-type]
    if not section and dataclasses.is_dataclass(_item(kind)):
        raise UserError(f"{path} is empty: give the config at least one")
    return {name: _read(_item(kind), v, f"{path}.{name}", None) for name, v in section.items()}


def _words(kind: Any, article: str = "") -> str:
    """Names the type of a value."""
    kind = _bare(kind)
    if typing.get_origin(kind) is Annotated:
        inner, mark = typing.get_args(kind)
        if isinstance(mark, tuple):
            return f"one of {', '.join(name or 'empty' for name in mark)}"
        least = f"{_words(inner, article)}, at least {mark}"
        return f"{article}path" if mark == "path" else least
    if tuple in (kind, typing.get_origin(kind)):
        items = _words(_item(kind)).partition(" of ")[0]
        of = "" if _item(kind) is Any else f" of {items}s"
        return f"{article}tuple{of}"
    words = WORDS.get(kind, "a value")
    return words if article else words.removeprefix("a ")


def _value(kind: Any, value: Any, path: str) -> Any:
    """Returns a value in its type.

    Raises:
        UserError: it is of another type, or out of range.
    """
    try:
        return None if value is None and _bare(kind) is not kind else _checked(_bare(kind), value)
    except ValueError:
        expected = _words(kind, "a ")
        raise UserError(
            f"{path} is {value!r}; expected {expected}: set --config.{path}=..."
        ) from None


def _checked(kind: Any, value: Any) -> Any:
    """Returns a value in its type, or raises ``ValueError``."""
    if typing.get_origin(kind) is Annotated:
        inner, mark = typing.get_args(kind)
        value = _checked(inner, value)
        if mark == "path":
            return os.path.expanduser(value)
        if value not in mark if isinstance(mark, tuple) else value < mark:
            raise ValueError
    elif kind is Any:
        is_home = isinstance(value, str) and value.startswith("~/")
        return os.path.expanduser(value) if is_home else value
    elif tuple in (kind, typing.get_origin(kind)):
        item = _item(kind)
        if item is str and isinstance(value, str):  # a single text is a tuple of one
            value = (value,) if value else ()
        if not isinstance(value, tuple | list):
            raise ValueError
        return tuple(_checked(item, each) for each in value)
    elif kind is float and type(value) is int:
        return float(value)
    elif not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueError
    return value


def _parse(kind: Any, text: str) -> Any:
    """Returns the value that a text of the command line stands for."""
    if _bare(kind) is not kind and text == "None":
        return None
    kind = _bare(kind)
    if typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    is_tuple = tuple in (kind, typing.get_origin(kind))
    if kind is str or (is_tuple and _item(kind) is str and text[:1] not in ("(", "[")):
        return text
    if kind is bool:
        return text.lower() in TRUE if text.lower() in TRUE + FALSE else text
    try:
        value = float(text) if kind is float else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    return (value,) if is_tuple and not isinstance(value, tuple | list) else value
