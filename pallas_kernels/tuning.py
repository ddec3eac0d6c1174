"""Sizes of tiles that were measured: tables of each op and device, which come before a kernel's own
rule.

A table is ``<op>/tuned/<device>.json``, of a device's kind as JAX names it: ``{key: {"config":
{...}, ...}}``, where the key names what a call's speed depends on (platform, dtypes, shapes in
powers of two) and what else stands beside the sizes is how they were measured. Tables under
``tuned/<op>`` in the cache (``cache.folder``) are this machine's own and come first.
``benchmarks/tune_kernels.py`` writes them.

Sizes are looked up while a program is traced. Which device it is for, and sizes that are being
tried, are part of the key of JAX's caches (``jax.make_user_context``), so that no program has
another one's.
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
    """What a program was traced with.

    Attributes:
        op, platform, key: of a call.
        sizes: those of the table or of the rule.
    """

    op: str
    platform: str
    key: str
    sizes: Any


class _Asked(NamedTuple):
    """What programs are traced for.

    Attributes:
        device: its kind; None: the one that is attached.
        op: whose sizes are given; none other's are.
        sizes: instead of the table's and the rule's.
    """

    device: str | None = None
    op: str | None = None
    sizes: Any = None


_asked = jax.make_user_context(_Asked())
_notes: list[list["Choice"]] = []  # of each ``noted`` that is under way


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Programs that are traced within are for this kind of device, which need not be attached."""
    with _asked(_asked.value._replace(device=device)):
        yield


@contextlib.contextmanager
def trying(op: str, sizes: Any) -> Iterator[None]:
    """Programs that are traced within have these sizes of one op."""
    with _asked(_asked.value._replace(op=op, sizes=sizes)):
        yield


@contextlib.contextmanager
def noted() -> Iterator[list[Choice]]:
    """A list that is filled with what programs are traced with meanwhile."""
    _notes.append([])
    try:
        yield _notes[-1]
    finally:
        _notes.pop()


def chosen(op: str, platform: str, key: str, rule: Sizes) -> Sizes:
    """The sizes of a call of an op's kernel.

    Args:
        op: its name, as in ``trying`` and as its folder's, which a word may follow: ``packed_lora
            backward``.
        platform: what the kernel is lowered for; a device of another one has no table of it.
        rule: what is taken without a table; a ``NamedTuple`` of numbers and of such tuples.
    """
    asked, key = _asked.value, f"{platform} {key}"
    # kernels of other platforms are asked too, whether they could serve
    if asked.op == op and type(asked.sizes) is type(rule):
        return asked.sizes
    device = asked.device or _attached(platform)
    entry = table(op, device).get(key) if device else None
    sizes = _like(rule, entry["config"]) if entry else rule
    for notes in _notes:
        notes.append(Choice(op, platform, key, sizes))
    return sizes


def power(n: int) -> int:
    """The next power of two, for keys."""
    return 1 << max(0, n - 1).bit_length()


def _attached(platform: str) -> str | None:
    return jax.local_devices()[0].device_kind if dispatch.platform_here() == platform else None


def filename(device: str) -> str:
    return re.sub(r"\W+", "_", device.strip().lower()) + ".json"


def folders(op: str) -> list[Path]:
    """Where tables of an op are looked for, the last first."""
    folder = op.split()[0]
    return [Path(__file__).with_name(folder) / "tuned", cache.folder() / "tuned" / folder]


def table(op: str, device: str) -> dict[str, Any]:
    """``key -> entry`` of an op on a kind of device; empty where nobody measured.

    Raises:
        ValueError: a table is no such table; the message names the file.
    """
    return {
        key: entry
        for at in folders(op)
        for key, entry in _read(at / filename(device)).get(op, {}).items()
    }


@functools.cache
def _read(path: Path) -> dict[str, dict[str, Any]]:
    """``{op: {key: entry}}`` of a file."""
    if not path.exists():
        return {}
    try:
        held = json.loads(path.read_text())
        for entries in held.values():
            for entry in entries.values():
                entry["config"].items()
    except (ValueError, AttributeError, KeyError, TypeError) as wrong:
        raise ValueError(
            f"{path} is no table of measured sizes ({type(wrong).__name__}: {wrong}): delete it, or"
            " measure again"
        ) from None
    return held


def write(op: str, device: str, entries: dict[str, Any], folder: Path) -> Path:
    """Adds entries to an op's table in ``folder``, instead of those with the same keys; its
    path.
    """
    path = folder / filename(device)
    held = dict(_read(path))
    held[op] = held.get(op, {}) | entries
    folder.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n")
    scratch.replace(path)
    _read.cache_clear()
    return path


def as_dict(sizes: Any) -> Any:
    """Sizes as JSON has them."""
    return (
        {name: as_dict(value) for name, value in sizes._asdict().items()}
        if hasattr(sizes, "_asdict")
        else sizes
    )


def _like(rule: Any, held: Any) -> Any:
    if not hasattr(rule, "_fields"):
        return int(held)
    if set(held) != set(rule._fields):
        raise ValueError(
            f"a table has sizes {sorted(held)} where the kernel has {sorted(rule._fields)}: measure"
            " again"
        )
    return type(rule)(*(_like(getattr(rule, name), held[name]) for name in rule._fields))


def neighbours(sizes: Sizes) -> Iterator[Sizes]:
    """Sizes of which one number is twice or half as large, or of stages one more or less."""
    for name, value in zip(sizes._fields, sizes):  # type: ignore[attr-defined]
        if hasattr(value, "_fields"):
            yield from (sizes._replace(**{name: one}) for one in neighbours(value))  # type: ignore[attr-defined]
        else:
            others = (value + 1, value - 1) if name == "stages" else (2 * value, value // 2)
            yield from (sizes._replace(**{name: one}) for one in others if one > 0)  # type: ignore[attr-defined]
