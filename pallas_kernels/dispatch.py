"""Selection of an op's implementation, with the reasons against the others.

Every op has a table, best first. An implementation that cannot serve raises ``NotImplementedError``
with the reason, and the next is tried; the last serves everything.
"""

import collections
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

_log = logging.getLogger(__name__)


class Fall(NamedTuple):
    """An implementation that was skipped."""

    op: str  # this and implementation: their names
    implementation: str
    platform: str | None  # platform of the implementation
    reason: str  # reason why it could not serve


# Number of times that each was skipped in this process.
fallen: collections.Counter[Fall] = collections.Counter()


class Implementation(NamedTuple):
    """One way to compute an op."""

    name: str  # name for `implementation=`
    platform: str | None  # platform that it is lowered for; None is any
    call: Callable[..., Any]  # function of the op's arrays, and `interpret` for a Pallas kernel
    # function of the same arguments (or the arrays' shapes); raises `NotImplementedError` with the
    # reason if it cannot serve them
    require: Callable[..., None]


def platform_here() -> str:
    """Returns the platform that this process's programs are lowered for."""
    return _platform(jax.default_backend())


def platform_of_mesh() -> str:
    """Returns the platform of the current mesh, also a compile-only one, or ``platform_here``."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return platform_here() if device is None else _platform(device.platform)


def _platform(backend: str) -> str:
    return "cuda" if backend == "gpu" else backend


def named(implementation: str) -> bool:
    """Returns True for a kernel's name; on a CPU such a kernel runs in interpret mode."""
    return implementation not in ("auto", "xla", "cpu")


def anything(*args: Any, **static: Any) -> None:
    """Accepts everything."""


def explain(table: Sequence[Implementation], *args: Any, **static: Any) -> list[tuple[str, str]]:
    """Returns each implementation's name with ``serves``, or the reason why it does not."""
    out = []
    for one in table:
        try:
            one.require(*args, **static)
            out.append((one.name, f"serves on {one.platform or 'any platform'}"))
        except NotImplementedError as reason:
            out.append((one.name, f"does not serve: {reason}"))
    return out


# ``auto`` selects by the platform that a program is *lowered for*, inside the program
# (``jax.lax.platform_dependent``), so a program compiled ahead of time for a TPU has the TPU's
# kernel wherever it is compiled.
def run(
    op: str,
    table: Sequence[Implementation],
    implementation: str,
    args: Sequence[Any],
    interpret: Any = None,
    **static: Any,
) -> Any:
    """Runs the op on ``args``.

    Args:
        implementation: a name in the table, or ``auto``.
        interpret: run a named kernel in Pallas' interpreter; None: if lowered for a CPU.
        static: extra arguments of every implementation, which become constants of the program.

    Raises:
        ValueError: no such implementation, or a named one that cannot serve.
    """
    if implementation != "auto":
        named = [one for one in table if one.name == implementation]
        if not named:
            raise ValueError(
                f"{op} has no implementation {implementation!r}; choose one of: auto,"
                f" {', '.join(one.name for one in table)}"
            )
        try:
            named[0].require(*args, **static)
        except NotImplementedError as reason:
            statuses = explain(table, *args, **static)
            serving = ", ".join(name for name, status in statuses if status.startswith("serves"))
            raise ValueError(
                f"{op} by {implementation}: {reason}; choose auto or one of: {serving}"
            ) from None
        call = functools.partial(named[0].call, **static)
        if named[0].platform in (None, "cpu"):
            return call(*args)
        if interpret is not None:
            return call(*args, interpret=interpret)
        on_cpu = functools.partial(call, interpret=True)
        return jax.lax.platform_dependent(
            *args, cpu=on_cpu, default=functools.partial(call, interpret=False)
        )
    forms: dict[str, Any] = {}
    for one in table:
        if (one.platform or "default") in forms:
            continue
        try:
            one.require(*args, **static)
            forms[one.platform or "default"] = functools.partial(one.call, **static)
        except NotImplementedError as reason:
            _passed(Fall(op, one.name, one.platform, str(reason)))
    if len(forms) == 1:
        return forms["default"](*args)
    return jax.lax.platform_dependent(*args, **forms)


def passed_over(since: collections.Counter[Fall], platform: str) -> list[dict[str, Any]]:
    """Returns the kernels of one platform that were skipped since ``since``, an earlier copy of
    ``fallen``: ``op``, ``implementation``, ``reason``, and ``times``, each traced once per
    program.
    """
    return [
        {"op": op, "implementation": name, "reason": reason, "times": times}
        for (op, name, of, reason), times in (fallen - since).items()
        if of == platform
    ]


def _passed(fall: Fall) -> None:
    if not fallen[fall]:
        _log.info("%s: %s is passed over: %s", fall.op, fall.implementation, fall.reason)
    fallen[fall] += 1
