"""Reads, checks, changes and lists the settings that ``options`` declares as frozen dataclasses.

``launch`` fills what a config file leaves out, applies the command line's changes and checks the
whole. What an annotation means:

- a dataclass is a section; one that derives from ``Open`` also takes names that only its reader
  knows, such as an environment's;
- ``dict[str, SomeDataclass]`` is a section for each name that the file gives, ``dict[str, T]``
  takes any name;
- ``T | None = None`` is left out of the config until it is set: the job decides;
- ``Place`` is a path, whose ``~`` is expanded; ``Count`` is at least 1, ``Natural`` at least 0.

Without a class (a bench) the file itself is the declaration: its names, with the types of its
values.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from ml_collections import ConfigDict

from mint_jax.errors import UserError, choice
from mint_jax.jobs import options
from mint_jax.jobs.options import Least, Open

Config = Any  # a ConfigDict, whose own annotations know only JSON scalars


TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def settings_of(job: Any) -> type | None:
    """The dataclass of a job's settings; None where the config file declares them.

    Raises:
        UserError: no such job.
    """
    if job not in options.OF_JOB:
        raise choice("job", job, options.OF_JOB)
    return options.OF_JOB[job]


def complete(config: Config) -> Config:
    """Fills and checks a config in place; what ``launch`` does with one that has no changes from
    the command line.
    """
    cls = settings_of(config.get("job"))
    fill(cls, config)
    check(cls, config)
    return config


def filled(plain: dict[str, Any]) -> dict[str, Any]:
    """A saved config with the defaults of what it leaves out; names that are no setting (any more)
    stay.
    """
    config = ConfigDict(plain)
    fill(settings_of(plain.get("job")), config, strict=False)
    return json.loads(config.to_json_best_effort())


def fill(cls: Any, config: Config, where: str = "", given: Any = None, strict: bool = True) -> None:
    """Gives a config the settings that it leaves out, where they have a default.

    Args:
        given: an instance with the defaults of this place, where they are not the class's own.
        strict: refuse names that are no setting.

    Raises:
        UserError: a name that is no setting.
    """
    cls = _bare(cls)
    if not dataclasses.is_dataclass(cls):
        for name, item in _sections(cls, config):
            fill(item, config[name], f"{where}{name}.", None, strict)
        return
    known = _fields(cls)
    for name in config:
        if strict and name not in known and not _takes_any_name(cls):
            raise _unknown(where, name, known)
    with config.unlocked():
        for name, (kind, default) in known.items():
            default = default if given is None else getattr(given, name)
            if _optional(kind):
                continue
            if _is_section(kind):
                if name not in config:
                    config[name] = ConfigDict()
                elif not isinstance(config[name], ConfigDict):
                    config[name] = ConfigDict(_section(config[name], where + name))
                fill(
                    kind,
                    config[name],
                    f"{where}{name}.",
                    default if dataclasses.is_dataclass(default) else None,
                    strict,
                )
            elif name not in config and default is not dataclasses.MISSING:
                config[name] = default


def check(cls: Any, config: Config, where: str = "") -> Any:
    """Checks every value of a config and gives it its declared type, in place: paths are expanded,
    lists become tuples.

    Returns:
        the dataclass, or what stands for it in a section without one.

    Raises:
        UserError: a setting that is missing, unknown or of another type, or that its dataclass
            refuses.
    """
    cls = _bare(cls)
    values: dict[str, Any] = {}
    known = _fields(cls) if dataclasses.is_dataclass(cls) else {}
    if not known and not len(config) and cls is not None and not _takes_any_name(cls):
        raise UserError(f"{where.rstrip('.')} is empty: give the config at least one")
    with config.unlocked(), config.ignore_type():
        for name in config:
            kind, path = _kind(cls, config, name, where), where + name
            if _is_section(kind):
                values[name] = check(kind, _section(config[name], path), path + ".")
            else:
                values[name] = _value(kind, config[name], path)
                if config[name] != values[name] or type(config[name]) is not type(values[name]):
                    config[name] = values[name]
    if not known:
        return values
    for name, (kind, default) in known.items():
        if name not in values and default is dataclasses.MISSING and not _optional(kind):
            about = _lines(cls).get(name, "")
            raise UserError(
                f"{where}{name} is not set ({about}): give it to the config file, or set"
                f" --config.{where}{name}=..."
            )
    try:
        return cls(**{name: value for name, value in values.items() if name in known})  # type: ignore[operator]
    except UserError as error:
        raise UserError(f"{where.rstrip('.')}: {error}" if where else str(error)) from None


def change(cls: Any, config: Config, path: str, text: str, where: str = "") -> None:
    """Sets one setting from the command line's text; ``*`` in place of a policy's name means all of
    them.

    Raises:
        UserError: no such setting, with the nearest name; or text that is not of its type.
    """
    cls = _bare(cls)
    name, _, rest = path.partition(".")
    if not dataclasses.is_dataclass(cls) and typing.get_origin(cls) is dict:
        item = _bare(typing.get_args(cls)[1])
        if name == "*" and rest and dataclasses.is_dataclass(item):
            for each in config:
                change(item, config[each], rest, text, f"{where}{each}.")
            return
    kind, full = _kind(cls, config, name, where), where + name
    with config.unlocked(), config.ignore_type():
        if rest and kind is Any and name not in config:
            kind = dict[str, Any]
        if rest and not _is_section(kind):
            raise UserError(f"{full} is a value, not a section: set --config.{full}={text}")
        if rest:
            if name not in config:
                config[name] = ConfigDict()
            change(kind, config[name], rest, text, full + ".")
        elif _is_section(kind):
            names = ", ".join(_names(kind, config.get(name, {}))) or "NAME"
            raise UserError(
                f"{full} is a section, not a value: set --config.{full}.<name>=...; it has {names}"
            )
        else:
            config[name] = _value(kind, text, full, text=True)


def describe(cls: Any, config: Config, where: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Every setting of a completed config: path, type in words, present value (None: not set), and
    its line.
    """
    cls = _bare(cls)
    names = _names(cls, config)
    lines = _lines(cls) if dataclasses.is_dataclass(cls) else {}
    for name in names:
        kind = _kind(cls, config, name, where)
        if _is_section(kind):
            yield from describe(kind, config.get(name, ConfigDict()), f"{where}{name}.")
        else:
            yield where + name, _words(kind), config.get(name), lines.get(name, "")
    if _takes_any_name(cls):
        yield f"{where}NAME", "value", None, "any further name" if names else "any name"


def build(cls: type, section: Any, where: str) -> Any:
    """A frozen dataclass from a config section.

    Raises:
        UserError: see ``check``.
    """
    own = ConfigDict(dict(section))
    fill(cls, own, where + ".")
    return check(cls, own, where + ".")


@functools.cache
def _fields(cls: Any) -> dict[str, tuple[Any, Any]]:
    """Annotation and default (``MISSING``: none) of every field."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: (hints[f.name], f.default) for f in dataclasses.fields(cls)}


@functools.cache
def _lines(cls: type) -> dict[str, str]:
    """What the docstrings of a dataclass and its ancestors say under ``Attributes``, by field."""
    out: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        _, _, text = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")
        for names, line in re.findall(
            r"^ {4}(\w[\w, ]*): (.*(?:\n {5,}.*)*)", text.split("\n\n")[0], re.M
        ):
            out |= dict.fromkeys(names.split(", "), " ".join(line.split()))
    return out


def _bare(kind: Any) -> Any:
    """An annotation without ``| None``."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        [kind] = [k for k in typing.get_args(kind) if k is not types.NoneType]
    return kind


def _optional(kind: Any) -> bool:
    return _bare(kind) is not kind


def _is_section(kind: Any) -> bool:
    kind = _bare(kind)
    return kind is None or dataclasses.is_dataclass(kind) or typing.get_origin(kind) is dict


def _section(value: Any, path: str) -> Config:
    if not isinstance(value, ConfigDict | dict):
        raise UserError(f"{path} is {value!r}; expected a section of settings: a ConfigDict")
    return value if isinstance(value, ConfigDict) else ConfigDict(value)


def _takes_any_name(cls: Any) -> bool:
    if dataclasses.is_dataclass(cls):
        return issubclass(cls, Open)  # type: ignore[arg-type]
    return typing.get_origin(cls) is dict and not dataclasses.is_dataclass(
        _bare(typing.get_args(cls)[1])
    )


def _sections(cls: Any, config: Config) -> list[tuple[str, Any]]:
    """Names and classes of the sections in a ``dict[str, SomeDataclass]``."""
    item = typing.get_args(cls)[1] if typing.get_origin(cls) is dict else None
    return [(name, item) for name in config] if dataclasses.is_dataclass(_bare(item)) else []


def _names(cls: Any, config: Config) -> list[str]:
    cls = _bare(cls)
    return list(dict.fromkeys([*(_fields(cls) if dataclasses.is_dataclass(cls) else ()), *config]))


def _kind(cls: Any, config: Config, name: str, where: str) -> Any:
    """The annotation of a name in a section; of an undeclared one ``Any``, or None for a section
    that the file declares.
    """
    if dataclasses.is_dataclass(cls) and name in _fields(cls):
        return _fields(cls)[name][0]
    if cls is None and name in config:
        return (
            None
            if isinstance(config[name], ConfigDict)
            else Any
            if config[name] is None
            else type(config[name])
        )
    if not _takes_any_name(cls) and (dataclasses.is_dataclass(cls) or name not in config):
        raise _unknown(where, name, _names(cls, config))
    item = typing.get_args(cls)[1] if typing.get_origin(cls) is dict else Any
    if item is Any and isinstance(config.get(name), ConfigDict):
        return dict[str, Any]
    return item


def _unknown(where: str, name: str, known: Any) -> UserError:
    near = difflib.get_close_matches(name, [*known], n=1, cutoff=0.5)
    hint = (
        f"did you mean {where}{near[0]}?"
        if near
        else f"{where.rstrip('.') or 'the config'} has {', '.join(known) or 'none'}"
    )
    return UserError(f"{where}{name} is no setting: {hint} (--help lists all)")


def _words(kind: Any) -> str:
    """A leaf's type in words."""
    kind = _bare(kind)
    if typing.get_origin(kind) is Annotated:
        inner, *marks = typing.get_args(kind)
        least = next((f", at least {m.value}" for m in marks if isinstance(m, Least)), "")
        return "path" if "path" in marks else _words(inner) + least
    if kind in (tuple, list) or typing.get_origin(kind) is tuple:
        item = (typing.get_args(kind) or (Any,))[0]
        return f"tuple of {_words(item)}s" if item is not Any else "tuple"
    return {int: "whole number", float: "number", bool: "True or False", str: "text"}.get(
        kind, "value"
    )


def _value(kind: Any, value: Any, path: str, text: bool = False) -> Any:
    """A leaf's value in its type; ``text``: it comes from the command line."""

    def refused(shown: Any = value) -> UserError:
        words = _words(kind)
        article = "" if words.startswith(("text", "True")) else "a "
        return UserError(f"{path} is {shown!r}; expected {article}{words}: set --config.{path}=...")

    if _optional(kind) and (value is None or (text and value == "None")):
        return None
    kind = _bare(kind)
    if typing.get_origin(kind) is Annotated:
        inner, *marks = typing.get_args(kind)
        try:
            out = _value(inner, value, path, text)
        except UserError:
            raise refused() from None
        if any(isinstance(m, Least) and not out >= m.value for m in marks):
            raise refused(out)
        return os.path.expanduser(out) if "path" in marks else out
    if kind is Any:
        value = _literal(value) if text else value
        return (
            os.path.expanduser(value)
            if isinstance(value, str) and value.startswith("~/")
            else value
        )
    if kind in (tuple, list) or typing.get_origin(kind) is tuple:
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
    """Items of one type; a single text stands for a tuple of one where texts are expected."""
    if isinstance(value, str):
        parsed = _literal(value) if text and value[:1] in ("(", "[") else value
        if isinstance(parsed, str) and (text or item is str):
            parsed = (parsed,) if parsed and item is str else () if not parsed else _literal(parsed)
            parsed = parsed if isinstance(parsed, tuple | list) else (parsed,)
        value = parsed
    if not isinstance(value, tuple | list):
        raise refused()
    try:
        return tuple(_value(item, each, path) for each in value)
    except UserError:
        raise refused() from None


def _literal(text: str) -> Any:
    """A Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
