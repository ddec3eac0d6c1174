"""Inputs of HTTP handlers: the tenant, the body and the query of a request."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BeforeValidator, Field
from starlette.requests import Request

from mint_jax.service.validation import Body, check, parse

OFF_LOOP = 1 << 16  # bytes of a body from which it is parsed in a thread
MAX_LISTED = 1000
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


def query_of(model: type[T], request: Request) -> T:
    """Returns a validated query. Raises ``BadRequest``."""
    return check(model, dict(request.query_params))


def _digits(value: Any) -> Any:
    """Converts decimal digits; other texts are refused as integers."""
    is_number = isinstance(value, str) and value.isascii() and value.isdecimal()
    return int(value) if is_number and len(value) < 19 else value


Natural = Annotated[int, BeforeValidator(_digits), Field(ge=0, lt=10**18)]
Limit = Annotated[int, BeforeValidator(_digits), Field(ge=1, le=MAX_LISTED)]


class PageQuery(Body):
    limit: Natural = 20  # more than MAX_LISTED are cut
    offset: Natural = 0


class RunsQuery(PageQuery):
    project_id: str | None = None


class ModelsQuery(Body):
    limit: Limit = 100
    after: str | None = None


class CostsQuery(Body):
    by: Literal["policy", "tenant"] = "policy"
    tenant: str | None = None
    limit: Limit = 100
    offset: Natural = 0
