"""Which implementation of an op runs, and why not another one.

Every op has a table, the best first. One that cannot serve says so before anything is computed, by
a ``NotImplementedError`` with the reason, and the next is asked; the last serves everything.
``auto`` decides by the platform that a program is *lowered for*, inside it
(``jax.lax.platform_dependent``): so a program compiled ahead of time for a TPU has the TPU's kernel
wherever it is compiled.
"""

import collections
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

_log = logging.getLogger(__name__)


class Fall(NamedTuple):
    """An implementation that was passed over.

    Attributes:
        op, implementation: their names.
        platform: the one that it is for.
        reason: why it could not serve.
    """

    op: str
    implementation: str
    platform: str | None
    reason: str


# how often each was passed over, in this process
fallen: collections.Counter[Fall] = collections.Counter()


class Implementation(NamedTuple):
    """One way to compute an op.

    Attributes:
        name: for ``implementation=``.
        platform: what it is lowered for; None is any.
        call: of the op's arrays, with ``interpret`` where it is a kernel of Pallas'.
        require: of the same arrays (or their shapes); raises ``NotImplementedError`` with the
            reason where it cannot serve them.
    """

    name: str
    platform: str | None
    call: Callable[..., Any]
    require: Callable[..., None]


def platform_here() -> str:
    """The platform that programs for this process's devices are lowered for, as ``Implementation``
    has it.
    """
    return _platform(jax.default_backend())


def platform_of_mesh() -> str:
    """Platform of the mesh that is set, also a compile-only one; without one ``platform_here``."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return platform_here() if device is None else _platform(device.platform)


def _platform(backend: str) -> str:
    return "cuda" if backend == "gpu" else backend


def named(implementation: str) -> bool:
    """Whether this is a kernel's name, which on a CPU runs in an interpreter."""
    return implementation not in ("auto", "xla", "cpu")


def anything(*args: Any) -> None:
    """``require`` of an implementation that serves everything."""


def explain(table: Sequence[Implementation], *args: Any) -> list[tuple[str, str]]:
    """Of each implementation its name, and ``serves`` or why it does not."""
    out = []
    for one in table:
        try:
            one.require(*args)
            out.append((one.name, f"serves on {one.platform or 'any platform'}"))
        except NotImplementedError as reason:
            out.append((one.name, f"does not serve: {reason}"))
    return out


def run(
    op: str,
    table: Sequence[Implementation],
    implementation: str,
    args: Sequence[Any],
    interpret: Any = None,
    **static: Any,
) -> Any:
    """The op of ``args``.

    Args:
        implementation: a name of the table, or ``auto``.
        interpret: runs a kernel that is named in Pallas' interpreter; None: where it is lowered for
            a CPU.
        static: what every implementation is given beside the arrays, and a program holds as
            constants.

    Raises:
        ValueError: no such implementation, or one that was named cannot serve.
    """
    if implementation != "auto":
        named = [one for one in table if one.name == implementation]
        if not named:
            raise ValueError(
                f"{op} has no implementation {implementation!r}; choose one of: auto,"
                f" {', '.join(one.name for one in table)}"
            )
        try:
            named[0].require(*args)
        except NotImplementedError as reason:
            others = ", ".join(
                name for name, told in explain(table, *args) if told.startswith("serves")
            )
            raise ValueError(
                f"{op} by {implementation}: {reason}; choose auto or one of: {others}"
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
            one.require(*args)
            forms[one.platform or "default"] = functools.partial(one.call, **static)
        except NotImplementedError as reason:
            _passed(Fall(op, one.name, one.platform, str(reason)))
    if len(forms) == 1:
        return forms["default"](*args)
    return jax.lax.platform_dependent(*args, **forms)


def passed_over(since: collections.Counter[Fall], platform: str) -> list[dict[str, Any]]:
    """The kernels of one platform that were passed over since, for reports: those of others were
    never wanted.

    Args:
        since: a copy of ``fallen`` from then.
        platform: as in ``Implementation``, or another one, which has no kernels.

    Returns:
        Of each kernel and reason ``op``, ``implementation``, ``reason`` and ``times``: how many
        calls, each traced once a program.
    """
    return [
        {
            "op": fall.op,
            "implementation": fall.implementation,
            "reason": fall.reason,
            "times": times,
        }
        for fall, times in (fallen - since).items()
        if fall.platform == platform
    ]


def _passed(fall: Fall) -> None:
    if not fallen[fall]:
        _log.info("%s: %s is passed over: %s", fall.op, fall.implementation, fall.reason)
    fallen[fall] += 1
