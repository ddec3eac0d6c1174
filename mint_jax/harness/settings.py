"""Reads settings: a config file's mapping and the command line's changes become a frozen dataclass.

The dataclass declares the settings; ``fields.setting`` adds the line that ``--help`` shows. The
annotation of a field says how its value is read:

- a dataclass is a section; one that derives from ``Open`` keeps undeclared names in ``extra``;
- ``dict[str, SomeDataclass]`` is a section for each name, ``dict[str, T]`` takes any name;
- ``Place`` is a path, whose ``~`` is expanded; ``Count`` is at least 1, ``Natural`` at least 0;
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
WORDS = {int: "whole number", float: "number", bool: "True or False", str: "text"}


@dataclasses.dataclass(frozen=True)
class Least:
    """The smallest value of a number, as an annotation."""

    value: float


Place = Annotated[str, "path"]
Count = Annotated[int, Least(1)]
Natural = Annotated[int, Least(0)]


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
    fields = declared(cls)
    extra = {name: value for name, value in given.items() if name not in fields}
    if extra and not issubclass(cls, Open):
        _unknown(where, next(iter(extra)), fields)
    values = {}
    for name, (kind, value, line) in fields.items():
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
    if issubclass(cls, Open):
        values["extra"] = {name: _leaf(Any, v, where + name) for name, v in extra.items()}
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
    if name == "*" and rest and dataclasses.is_dataclass(item := _item(kind)):
        for each in tree:
            change(item, tree[each], rest, text, f"{where}{each}.")
        return
    child, full = _kind(kind, tree, name, where), where + name
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
        tree[name] = _leaf(child, text, full, text=True)


def describe(
    kind: Any, tree: Mapping[str, Any], where: str = "", default: Any = None
) -> Iterator[Line]:
    """Yields every setting with its present value; ``NAME`` stands for a name of one's own."""
    fields = declared(kind) if dataclasses.is_dataclass(kind) else {}
    takes_any = _takes_any_name(kind)
    for name in dict.fromkeys([*fields, *tree] or (() if takes_any else ("NAME",))):
        child = _kind(kind, tree, name, where)
        _, value, line = fields.get(name, (None, UNSET, ""))
        value = tree.get(name, value if default is None else getattr(default, name, UNSET))
        if _is_section(child):
            inner = value if isinstance(value, Mapping) else {}
            base = fields[name][1] if name in fields else None
            instance = base if dataclasses.is_dataclass(base) else None
            yield from describe(_bare(child), inner, f"{where}{name}.", instance)
        else:
            yield Line(where + name, _words(child), value, line)
    if takes_any:
        yield Line(f"{where}NAME", "value", None, "any further name" if fields else "any name")


@functools.cache
def declared(cls: Any) -> dict[str, tuple[Any, Any, str]]:
    """Annotation, default (``UNSET``: none) and help of every setting of a dataclass."""
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
    """Returns ``T`` of ``dict[str, T]``, else ``Any``."""
    return typing.get_args(kind)[1] if typing.get_origin(kind) is dict else Any


def _section(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{path} is {value!r}; expected a section of settings: a ConfigDict")
    return value


def _takes_any_name(kind: Any) -> bool:
    if dataclasses.is_dataclass(kind):
        return issubclass(kind, Open)  # type: ignore[arg-type]
    return typing.get_origin(kind) is dict and not dataclasses.is_dataclass(_item(kind))


def _names(kind: Any, tree: Mapping[str, Any]) -> list[str]:
    kind = _bare(kind)
    return list(dict.fromkeys([*(declared(kind) if dataclasses.is_dataclass(kind) else ()), *tree]))


def _kind(kind: Any, tree: Mapping[str, Any], name: str, where: str) -> Any:
    """Returns the annotation of a name in a section."""
    if dataclasses.is_dataclass(kind) and name in declared(kind):
        return _bare_section(declared(kind)[name][0])
    if not _takes_any_name(kind) and name not in (*tree, "NAME"):
        _unknown(where, name, _names(kind, tree))
    if _item(kind) is Any and isinstance(tree.get(name), Mapping):
        return dict[str, Any]
    return _item(kind)


def _bare_section(kind: Any) -> Any:
    return _bare(kind) if _is_section(kind) else kind


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
    if value is None and _bare(kind) is not kind:
        return None
    kind = _bare_section(kind)
    if dataclasses.is_dataclass(kind):
        instance = default if dataclasses.is_dataclass(default) else None
        return build(kind, _section(value, path), path + ".", instance)  # type: ignore[arg-type]
    if typing.get_origin(kind) is dict:
        section, item = _section(value, path), _item(kind)
        if not section and dataclasses.is_dataclass(item):
            raise UserError(f"{path} is empty: give the config at least one")
        return {name: _read(item, each, f"{path}.{name}", None) for name, each in section.items()}
    return _leaf(kind, value, path)


def _words(kind: Any) -> str:
    """Names the type of a value."""
    kind = _bare(kind)
    if typing.get_origin(kind) is Annotated:
        inner, *marks = typing.get_args(kind)
        least = next((f", at least {m.value}" for m in marks if isinstance(m, Least)), "")
        return "path" if "path" in marks else _words(inner) + least
    if kind is tuple or typing.get_origin(kind) is tuple:
        item = (typing.get_args(kind) or (Any,))[0]
        return f"tuple of {_words(item)}s" if item is not Any else "tuple"
    return WORDS.get(kind, "value")


def _leaf(kind: Any, value: Any, path: str, text: bool = False) -> Any:
    """Returns a value in its type; with ``text`` it is the command line's."""

    def refused(shown: Any = value) -> UserError:
        words = _words(kind)
        article = "" if words.startswith(("text", "True")) else "a "
        return UserError(f"{path} is {shown!r}; expected {article}{words}: set --config.{path}=...")

    if _bare(kind) is not kind and (value is None or (text and value == "None")):
        return None
    kind = _bare(kind)
    if typing.get_origin(kind) is Annotated:
        inner, *marks = typing.get_args(kind)
        try:
            out = _leaf(inner, value, path, text)
        except UserError:
            raise refused() from None
        if any(isinstance(m, Least) and not out >= m.value for m in marks):
            raise refused(out)
        return os.path.expanduser(out) if "path" in marks else out
    if kind is Any:
        value = _literal(value) if text else value
        is_home = isinstance(value, str) and value.startswith("~/")
        return os.path.expanduser(value) if is_home else value
    if kind is tuple or typing.get_origin(kind) is tuple:
        return _tuple((typing.get_args(kind) or (Any,))[0], value, path, text, refused)
    if kind is bool and text:
        if value.lower() not in TRUE + FALSE:
            raise refused()
        return value.lower() in TRUE
    if kind in (int, float) and text:
        try:
            return kind(value)
        except ValueError:
            raise refused() from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise refused()
    return value


def _tuple(item: Any, value: Any, path: str, text: bool, refused: Any) -> tuple:
    """Returns items of one type; where texts are expected a single text is a tuple of one."""
    if isinstance(value, str):
        parsed = _literal(value) if text and value[:1] in ("(", "[") else value
        if isinstance(parsed, str) and (text or item is str):
            parsed = (parsed,) if parsed and item is str else () if not parsed else _literal(parsed)
            parsed = parsed if isinstance(parsed, tuple | list) else (parsed,)
        value = parsed
    if not isinstance(value, tuple | list):
        raise refused()
    try:
        return tuple(_leaf(item, each, path) for each in value)
    except UserError:
        raise refused() from None


def _literal(text: str) -> Any:
    """Returns a Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
