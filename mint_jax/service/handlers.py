"""Helpers of the HTTP handlers."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pydantic
from starlette.requests import Request

from mint_jax.service.validation import parse

OFF_LOOP = 1 << 16  # bytes of a body from which it is parsed in a thread


T = TypeVar("T", bound=pydantic.BaseModel)


def tenant_of(request: Request) -> str:
    """Returns the tenant that the gate found."""
    return getattr(request.state, "tenant", "default")


async def body_of(model: type[T], request: Request) -> T:
    """Returns a validated body. Raises ``BadRequest``."""
    raw = await request.body()
    return await off_loop(len(raw), lambda: parse(model, raw))


async def off_loop(size: int, call: Callable[[], Any]) -> Any:
    """Returns what a call returns; in a thread if it has many bytes to parse."""
    return await asyncio.to_thread(call) if size > OFF_LOOP else call()
