"""What every handler of Tinker's interface reads a request with."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request as Asked
from starlette.responses import Response

from mint_jax.service.wire.reading import json_object

OFF_LOOP = 1 << 16  # bytes of a body from which it is parsed in a thread
LONGEST_REASON = 2000  # characters of an error

Handler = Callable[[Asked], Awaitable[Response]]


def tenant_of(request: Asked) -> str:
    """Who asks, as the gate found."""
    return getattr(request.state, "tenant", "default")


def reason_of(error: BaseException) -> str:
    """What a client hears of an error; cut, for it may name what was sent, and that is as long as a
    client likes.
    """
    return str(error)[:LONGEST_REASON]


async def told_in(request: Asked) -> Mapping[str, Any]:
    """The JSON object of a body."""
    body = await request.body()
    return await beside(len(body), lambda: json_object(body))


async def beside(size: int, call: Callable[[], Any]) -> Any:
    """What a call gives, off the event loop where it has many bytes to read."""
    return await asyncio.to_thread(call) if size > OFF_LOOP else call()


def given(told: Mapping[str, Any], name: str, kind: Callable[[Any, str], Any]) -> Any:
    """A field of a kind; None where it is null or not there."""
    return None if told.get(name) is None else kind(told[name], name)
