"""Query parameters of requests."""

from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BeforeValidator, Field
from starlette.requests import Request

from mint_jax.service.validation import Body, check

MAX_LISTED = 1000


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


T = TypeVar("T", bound=pydantic.BaseModel)


def query_of(model: type[T], request: Request) -> T:
    """Returns a request's query. Raises ``BadRequest`` for a wrong parameter."""
    return check(model, dict(request.query_params))
