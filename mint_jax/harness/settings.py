"""Reads settings: a config file's mapping and the command line's changes become a frozen dataclass,
as its annotations say (``fields``). Imports no JAX, so that a mistake on the command line is
reported before JAX is imported.
"""

import ast
import dataclasses
import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from mint_jax.errors import UserError
from mint_jax.fields import Kind, Open, kind_of, kinds

T = TypeVar("T")
UNSET = dataclasses.MISSING
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class Setting(NamedTuple):
    """A declared setting; ``value`` is its default or present value, ``UNSET`` where one must be
    given.
    """

    path: str
    kind: Kind
    value: Any
    help: str


@functools.cache
def declared(cls: Any) -> dict[str, Setting]:
    """Returns the settings of a dataclass, none for another type."""
    if not dataclasses.is_dataclass(cls):
        return {}
    return {
        f.name: Setting(f.name, kinds(cls)[f.name], f.default, f.metadata.get("help", ""))
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


def _read(kind: Kind, value: Any, path: str, default: Any) -> Any:
    """Returns a section or a value in its declared type."""
    if not kind.is_section or (value is None and kind.is_optional):
        return _value(kind, value, path)
    section = _section(value, path)
    if kind.type is not dict:
        instance = default if dataclasses.is_dataclass(default) else None
        return build(kind.type, section, path + ".", instance)
    item = kind_of(kind.items[0])
    if not section and item.is_section:
        raise UserError(f"{path} is empty: give the config at least one")
    return {name: _read(item, each, f"{path}.{name}", None) for name, each in section.items()}


def _section(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{path} is {value!r}; expected a section of settings: a ConfigDict")
    return value


def _value(kind: Kind, value: Any, path: str) -> Any:
    try:
        return kind.read(value)
    except ValueError:
        raise UserError(
            f"{path} is {value!r}; expected {kind.expected}: set --config.{path}=..."
        ) from None


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
    if name == "*" and rest and dataclasses.is_dataclass(kind.items[0]):
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


def _parse(kind: Kind, text: str) -> Any:
    """Returns the value that a text of the command line stands for."""
    if kind.is_optional and text == "None":
        return None
    is_texts = kind.type is tuple and kind.items[0] is str
    if kind.type is str or (is_texts and text[:1] not in ("(", "[")):
        return text
    if kind.type is bool:
        return text.lower() in TRUE if text.lower() in TRUE + FALSE else text
    try:
        value = float(text) if kind.type is float else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    return (value,) if kind.type is tuple and not isinstance(value, tuple | list) else value


def describe(
    kind: Any, tree: Mapping[str, Any], where: str = "", default: Any = None, about: str = ""
) -> Iterator[Setting]:
    """Yields every setting with its present value; ``NAME`` stands for a name of one's own.
    ``about`` is the help of the section itself.
    """
    kind = kind_of(kind)
    known = declared(kind.type)
    for name in dict.fromkeys([*known, *tree] or (() if kind.takes_any_name else ("NAME",))):
        child = _child(kind, tree, name, where)
        _, _, usual, line = known.get(name, (name, child, UNSET, ""))
        value = tree.get(name, usual if default is None else getattr(default, name, UNSET))
        if child.is_section:
            inner = value if isinstance(value, Mapping) else {}
            instance = usual if dataclasses.is_dataclass(usual) else None
            yield from describe(child, inner, f"{where}{name}.", instance, line)
        else:
            yield Setting(where + name, child, value, line)
    if kind.takes_any_name:
        further = "an option of the environment" if known else about
        yield Setting(f"{where}NAME", Kind(Any), None, further)


def _child(kind: Kind, tree: Mapping[str, Any], name: str, where: str) -> Kind:
    """Returns the kind of a name in a section."""
    known = declared(kind.type)
    if name in known:
        return known[name].kind
    if not kind.takes_any_name and name not in (*tree, "NAME"):
        raise _unknown(where, name, dict.fromkeys([*known, *tree]))
    is_section = kind.items[0] is Any and isinstance(tree.get(name), Mapping)
    return kind_of(dict[str, Any] if is_section else kind.items[0])


def _unknown(where: str, name: str, known: Iterable[str]) -> UserError:
    near = difflib.get_close_matches(name, known := list(known), n=1, cutoff=0.5)
    hint = f"{where.rstrip('.') or 'the config'} has {', '.join(known) or 'none'}"
    if near:
        hint = f"did you mean {where}{near[0]}?"
    return UserError(f"{where}{name} is no setting: {hint} (--help lists all)")
