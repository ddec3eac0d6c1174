"""Measured tile sizes: tables for each op and device, which take precedence over a kernel's own
rule.

A table is ``<op>/tuned/<device>.json``: ``{key: {"config": {...}, ...}}``, whose key names what a
call's speed depends on. Tables under ``tuned/<op>`` in the cache are this machine's own and take
precedence. ``benchmarks/tune_kernels.py`` writes them.
"""

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from pallas_kernels import cache, dispatch

Sizes = TypeVar("Sizes", bound=tuple)


class Choice(NamedTuple):
    """Sizes that a program was traced with."""

    op: str  # this and platform, key: identify the call
    platform: str
    key: str
    sizes: Any  # from the table or the rule


class _TraceContext(NamedTuple):
    """Target of tracing."""

    device: str | None = None  # device kind; None: the attached one
    op: str | None = None  # op whose sizes are overridden
    sizes: Any = None  # override of the table's and the rule's sizes


_asked = jax.make_user_context(_TraceContext())
_notes: list[list["Choice"]] = []  # one list for each active ``noted``


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Traces programs for this kind of device, which need not be attached."""
    with _asked(_asked.value._replace(device=device)):
        yield


@contextlib.contextmanager
def trying(op: str, sizes: Any) -> Iterator[None]:
    """Traces programs with these sizes of one op."""
    with _asked(_asked.value._replace(op=op, sizes=sizes)):
        yield


@contextlib.contextmanager
def noted() -> Iterator[list[Choice]]:
    """Yields a list that collects the sizes of programs traced meanwhile."""
    _notes.append([])
    try:
        yield _notes[-1]
    finally:
        _notes.pop()


def chosen(op: str, platform: str, key: str, rule: Sizes) -> Sizes:
    """Returns the sizes of a call of an op's kernel.

    Args:
        op: its folder's name, optionally followed by a word: ``packed_lora backward``.
        platform: of the kernel; devices of other platforms have no table of it.
        rule: sizes without a table; a ``NamedTuple`` of numbers and of such tuples.
    """
    asked, key = _asked.value, f"{platform} {key}"
    # Kernels of other platforms are asked too, to see if they could serve.
    if asked.op == op and type(asked.sizes) is type(rule):
        return asked.sizes
    device = asked.device or _attached(platform)
    entry = table(op, device).get(key) if device else None
    sizes = _like(rule, entry["config"]) if entry else rule
    for notes in _notes:
        notes.append(Choice(op, platform, key, sizes))
    return sizes


def power(n: int) -> int:
    """Returns the next power of two, for keys."""
    return 1 << max(0, n - 1).bit_length()


def _attached(platform: str) -> str | None:
    return jax.local_devices()[0].device_kind if dispatch.platform_here() == platform else None


def filename(device: str) -> str:
    return re.sub(r"\W+", "_", device.strip().lower()) + ".json"


def folders(op: str) -> list[Path]:
    """Returns the folders of an op's tables; later ones take precedence."""
    folder = op.split()[0]
    return [Path(__file__).with_name(folder) / "tuned", cache.folder() / "tuned" / folder]


def table(op: str, device: str) -> dict[str, Any]:
    """Returns an op's table for a kind of device, ``key -> entry``; ``ValueError`` if invalid."""
    return {
        key: entry
        for at in folders(op)
        for key, entry in _read(at / filename(device)).get(op, {}).items()
    }


@functools.cache
def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the contents of a file, ``{op: {key: entry}}``."""
    if not path.exists():
        return {}
    try:
        stored = json.loads(path.read_text())
        for entries in stored.values():
            for entry in entries.values():
                entry["config"].items()
    except (ValueError, AttributeError, KeyError, TypeError) as wrong:
        raise ValueError(
            f"{path} is not a table of measured sizes ({type(wrong).__name__}: {wrong}): delete it,"
            " or measure again"
        ) from None
    return stored


def write(op: str, device: str, entries: dict[str, Any], folder: Path) -> Path:
    """Adds entries to an op's table in ``folder``, replacing those with the same keys."""
    path = folder / filename(device)
    stored = dict(_read(path))
    stored[op] = stored.get(op, {}) | entries
    folder.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    scratch.replace(path)
    _read.cache_clear()
    return path


def as_dict(sizes: Any) -> Any:
    """Returns sizes as JSON objects."""
    if not hasattr(sizes, "_asdict"):
        return sizes
    return {name: as_dict(value) for name, value in sizes._asdict().items()}


def _like(rule: Any, stored: Any) -> Any:
    if not hasattr(rule, "_fields"):
        return int(stored)
    if set(stored) != set(rule._fields):
        raise ValueError(
            f"a table has sizes {sorted(stored)} where the kernel has {sorted(rule._fields)}:"
            " measure again"
        )
    return type(rule)(*(_like(getattr(rule, name), stored[name]) for name in rule._fields))


def neighbours(sizes: Sizes) -> Iterator[Sizes]:
    """Yields sizes with one number doubled or halved, or one more or fewer stages."""
    for name, value in zip(sizes._fields, sizes):  # type: ignore[attr-defined]
        if hasattr(value, "_fields"):
            yield from (sizes._replace(**{name: one}) for one in neighbours(value))  # type: ignore[attr-defined]
        else:
            rest = (value + 1, value - 1) if name == "stages" else (2 * value, value // 2)
            yield from (sizes._replace(**{name: one}) for one in rest if one > 0)  # type: ignore[attr-defined]
