"""HTTP status of each exception, and errors in the form of either door."""

import math
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.storage.payloads import StorageFailed
from mint_jax.errors import UserError
from mint_jax.residency.loads import QueueFull
from mint_jax.service import weights
from mint_jax.service.bodies import TooLarge, UnknownCoding
from mint_jax.service.book import NotFound
from mint_jax.service.durable import Unavailable
from mint_jax.service.exchange import error_body, release
from mint_jax.service.futures import Conflict, Gone
from mint_jax.service.quotas import Busy, OverQuota
from mint_jax.service.server_db import Overloaded

# errors on these have OpenAI's form
OPENAI_PATHS = ("/v1/", "/oai/")
LONGEST_REASON = 2000  # characters of an error
RETRY_AFTER_S = 5.0  # with 503, if nothing says better


class Forbidden(UserError):
    """The client has no right to do this."""


# the first that matches; 429 and 503 are for load only, since clients retry them
STATUSES: dict[type[Exception], int] = {
    NotFound: 404,
    Conflict: 409,
    Gone: 410,
    TooLarge: 413,
    UnknownCoding: 415,
    Overloaded: 429,
    QueueFull: 429,
    Busy: 429,
    OverQuota: 403,
    Forbidden: 403,
    Unavailable: 503,
    DatabaseFailed: 503,
    StorageFailed: 503,
    UserError: 400,
}
CODES: dict[type[Exception], str] = {  # OpenAI's
    weights.NotFound: "model_not_found",
    Busy: "tokens",
    OverQuota: "insufficient_quota",
}


def _first(table: dict[type[Exception], Any], error: Exception) -> Any:
    return next((value for kind, value in table.items() if isinstance(error, kind)), None)


def status_of(error: Exception) -> int:
    """Returns the HTTP status of an exception; 500 for a failure of the server."""
    return getattr(error, "status", None) or _first(STATUSES, error) or 500


def reason_of(error: BaseException) -> str:
    """Returns an error's message, cut: it may quote the request, which can be of any length."""
    return str(error)[:LONGEST_REASON]


def body(error: Exception, openai: bool) -> dict[str, Any]:
    """Returns the JSON of an exception in OpenAI's form, else in Tinker's."""
    status = status_of(error)
    reason = "the server failed: its log says why" if status == 500 else reason_of(error)
    code = error.reason if isinstance(error, QueueFull) else getattr(error, "code", None)
    param = "model" if isinstance(error, weights.NotFound) else getattr(error, "param", None)
    return error_body(status, reason, openai, param, code or _first(CODES, error))


async def handle(request: Request, error: Exception) -> Response:
    """Answers a request that failed, as starlette calls it."""
    release(error)
    status, headers = status_of(error), {}
    retry_s = getattr(error, "retry_after_s", RETRY_AFTER_S if status == 503 else None)
    if retry_s is not None:
        seconds, ms = max(1, math.ceil(retry_s)), math.ceil(1000 * retry_s)
        headers = {"retry-after": str(seconds), "retry-after-ms": str(ms)}
    openai = request.url.path.startswith(OPENAI_PATHS)
    return JSONResponse(body(error, openai), status, headers)


HANDLERS: dict[Any, Any] = dict.fromkeys((*STATUSES, Exception), handle)  # for starlette
