"""Reads settings: a config file's mapping and the command line's changes become a frozen dataclass.

``fields.setting`` declares a setting with its line of ``--help``; the annotation says how its value
is read. A dataclass is a section, one that derives from ``Open`` also keeps undeclared names, and
``dict[str, T]`` takes any name. ``Annotated[str, ("a", "b")]`` is one of these texts, and ``T |
None`` may stay unset. Imports no JAX, so that a mistake on the command line is reported before JAX
is imported.
"""

import ast
import dataclasses
import difflib
import functools
import math
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from mint_jax.errors import UserError

T = TypeVar("T")
UNSET = dataclasses.MISSING
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
WORDS = {int: "whole number", float: "number", bool: "True or False", str: "text"}
Place = Annotated[str, "path"]  # its ~ is expanded
Count = Annotated[int, 1]  # the smallest value
Natural = Annotated[int, 0]
Amount = Annotated[float, 0]  # and finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Open:
    """A section that takes names beyond its fields; ``extra`` has them."""

    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class Kind(NamedTuple):
    """An annotation, taken apart; ``item`` is the annotation of the items of a dict or tuple,
    ``mark`` is ``"path"``, the smallest value, or a tuple of choices.
    """

    type: Any
    item: Any = Any
    mark: Any = None
    is_optional: bool = False

    @property
    def is_section(self) -> bool:
        return self.type is dict or dataclasses.is_dataclass(self.type)

    @property
    def takes_any_name(self) -> bool:
        if self.type is dict:
            return not dataclasses.is_dataclass(self.item)
        return self.is_section and issubclass(self.type, Open)

    def __str__(self) -> str:
        if isinstance(self.mark, tuple):
            return f"one of {', '.join(name or 'empty' for name in self.mark)}"
        if self.type is tuple:
            items = str(kind_of(self.item)).partition(" of ")[0]
            return "tuple" if self.item is Any else f"tuple of {items}s"
        word = WORDS.get(self.type, "value")
        return {None: word, "path": "path"}.get(self.mark, f"{word}, at least {self.mark}")


class Setting(NamedTuple):
    """A declared setting; ``value`` is its default or present value, ``UNSET`` where one must be
    given.
    """

    path: str
    kind: Kind
    value: Any
    help: str


@functools.cache
def kind_of(annotation: Any) -> Kind:
    if isinstance(annotation, Kind):
        return annotation
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        [inner] = [each for each in args if each is not types.NoneType]
        return kind_of(inner)._replace(is_optional=True)
    if origin is Annotated:
        return kind_of(args[0])._replace(mark=args[1])
    if origin in (dict, tuple):
        return Kind(origin, args[origin is dict])
    return Kind(annotation)


@functools.cache
def declared(cls: Any) -> dict[str, Setting]:
    """Returns the settings of a dataclass, none for another type."""
    if not dataclasses.is_dataclass(cls):
        return {}
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        f.name: Setting(f.name, kind_of(hints[f.name]), f.default, f.metadata.get("help", ""))
        for f in dataclasses.fields(cls)
        if not (f.name == "extra" and issubclass(cls, Open))  # type: ignore[arg-type]
    }


def build(cls: type[T], given: Mapping[str, Any], where: str = "", default: Any = None) -> T:
    """Returns the dataclass with these values, and defaults for the others. Raises ``UserError`` if
    a setting is missing, unknown or of another type, or the dataclass refuses it.

    Args:
        where: path of the section in error messages, such as ``policies.adder.``.
        default: an instance whose values replace the defaults of the class.
    """
    known, values = declared(cls), {}
    extra = {name: value for name, value in given.items() if name not in known}
    if issubclass(cls, Open):
        values["extra"] = {n: _value(Kind(Any), value, where + n) for n, value in extra.items()}
    elif extra:
        raise _unknown(where, next(iter(extra)), known)
    for name, kind, usual, line in known.values():
        usual = usual if default is None else getattr(default, name)
        if name in given or (usual is UNSET and kind.is_section):
            values[name] = _read(kind, given.get(name, {}), where + name, usual)
        elif usual is UNSET:
            raise UserError(
                f"{where}{name} is not set ({line}): give it to the config file, or set"
                f" --config.{where}{name}=..."
            )
        else:
            values[name] = usual
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
    name changes all policies. Refuses an unknown setting, and text that is not of its type.
    """
    kind, (name, _, rest) = kind_of(kind), path.partition(".")
    if name == "*" and rest and dataclasses.is_dataclass(kind.item):
        for each in tree:
            change(kind, tree, f"{each}.{rest}", text, where)
        return
    child, full = _child(kind, tree, name, where), where + name
    if rest and child.type is Any and name not in tree:
        child = kind_of(dict[str, Any])
    if rest and not child.is_section:
        raise UserError(f"{full} is a value, not a section: set --config.{full}={text}")
    if rest:
        tree[name] = dict(_section(tree.get(name, {}), full))
        change(child, tree[name], rest, text, full + ".")
    elif child.is_section:
        names = dict.fromkeys([*declared(child.type), *tree.get(name, {})])
        raise UserError(
            f"{full} is a section, not a value: set --config.{full}.<name>=...; it has"
            f" {', '.join(names) or 'NAME'}"
        )
    else:
        tree[name] = _value(child, _parse(child, text), full)


def describe(
    kind: Any, tree: Mapping[str, Any], where: str = "", default: Any = None
) -> Iterator[Setting]:
    """Yields every setting with its present value; ``NAME`` stands for a name of one's own."""
    kind = kind_of(kind)
    known = declared(kind.type)
    for name in dict.fromkeys([*known, *tree] or (() if kind.takes_any_name else ("NAME",))):
        child = _child(kind, tree, name, where)
        _, _, usual, line = known.get(name, (name, child, UNSET, ""))
        value = tree.get(name, usual if default is None else getattr(default, name, UNSET))
        if child.is_section:
            inner = value if isinstance(value, Mapping) else {}
            instance = usual if dataclasses.is_dataclass(usual) else None
            yield from describe(child, inner, f"{where}{name}.", instance)
        else:
            yield Setting(where + name, child, value, line)
    if kind.takes_any_name:
        further = "any further name" if known else "any name"
        yield Setting(f"{where}NAME", Kind(Any), None, further)


def _child(kind: Kind, tree: Mapping[str, Any], name: str, where: str) -> Kind:
    """Returns the kind of a name in a section."""
    known = declared(kind.type)
    if name in known:
        return known[name].kind
    if not kind.takes_any_name and name not in (*tree, "NAME"):
        raise _unknown(where, name, dict.fromkeys([*known, *tree]))
    is_section = kind.item is Any and isinstance(tree.get(name), Mapping)
    return kind_of(dict[str, Any] if is_section else kind.item)


def _section(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{path} is {value!r}; expected a section of settings: a ConfigDict")
    return value


def _unknown(where: str, name: str, known: Iterable[str]) -> UserError:
    near = difflib.get_close_matches(name, known := list(known), n=1, cutoff=0.5)
    hint = f"{where.rstrip('.') or 'the config'} has {', '.join(known) or 'none'}"
    if near:
        hint = f"did you mean {where}{near[0]}?"
    return UserError(f"{where}{name} is no setting: {hint} (--help lists all)")


def _read(kind: Kind, value: Any, path: str, default: Any = None) -> Any:
    """Returns a section or a value in its declared type."""
    if not kind.is_section or (value is None and kind.is_optional):
        return _value(kind, value, path)
    section = _section(value, path)
    if kind.type is not dict:
        instance = default if dataclasses.is_dataclass(default) else None
        return build(kind.type, section, path + ".", instance)
    if not section and dataclasses.is_dataclass(kind.item):
        raise UserError(f"{path} is empty: give the config at least one")
    return {name: _read(kind_of(kind.item), v, f"{path}.{name}") for name, v in section.items()}


def _value(kind: Kind, value: Any, path: str) -> Any:
    """Returns a value in its type; raises ``UserError`` for another type, or out of range."""
    try:
        return _checked(kind, value)
    except ValueError:
        words = str(kind)
        article = "" if words.startswith(("one of", "text", "True")) else "a "
        raise UserError(
            f"{path} is {value!r}; expected {article}{words}: set --config.{path}=..."
        ) from None


def _checked(kind: Kind, value: Any) -> Any:
    """Returns a value in its type, or raises ``ValueError``."""
    mark: Any = kind.mark
    if value is None and kind.is_optional:
        return None
    if kind.type is Any:
        is_home = isinstance(value, str) and value.startswith("~/")
        return os.path.expanduser(str(value)) if is_home else value
    if kind.type is tuple:
        if kind.item is str and isinstance(value, str):  # a single text is a tuple of one
            value = (value,) if value else ()
        if not isinstance(value, tuple | list):
            raise ValueError
        return tuple(_checked(kind_of(kind.item), each) for each in value)
    if kind.type is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind.type) or (kind.type is not bool and isinstance(value, bool)):
        raise ValueError
    if mark is None:
        return value
    if mark == "path":
        return os.path.expanduser(str(value))
    is_choice = isinstance(mark, tuple)
    if value not in mark if is_choice else not mark <= value < math.inf:  # type: ignore[operator]
        raise ValueError
    return value


def _parse(kind: Kind, text: str) -> Any:
    """Returns the value that a text of the command line stands for."""
    if kind.is_optional and text == "None":
        return None
    if kind.type is str or (kind[:2] == (tuple, str) and text[:1] not in ("(", "[")):
        return text
    if kind.type is bool:
        return text.lower() in TRUE if text.lower() in TRUE + FALSE else text
    try:
        value = float(text) if kind.type is float else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    return (value,) if kind.type is tuple and not isinstance(value, tuple | list) else value
