"""The HTTP application: every route over one server, behind the gate, and how it is served."""

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from mint_jax import interrupts
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.storage.interface import StorageFailed
from mint_jax.errors import UserError
from mint_jax.residency.loads import QueueFull
from mint_jax.service import admin, connections, exchange, openai, openapi, status
from mint_jax.service.asking import reason_of, tenant_of
from mint_jax.service.bodies import TooLarge, UnknownCoding
from mint_jax.service.book import NotFound
from mint_jax.service.console.routes import Console
from mint_jax.service.console.sessions import Browsers
from mint_jax.service.durable import Unavailable
from mint_jax.service.futures import Conflict, Gone
from mint_jax.service.gate import Gate, Limits
from mint_jax.service.keys import Keys
from mint_jax.service.mint_extras import MintExtras
from mint_jax.service.openai_types import OPENAI, Bounds
from mint_jax.service.quotas import Busy, OverQuota
from mint_jax.service.server import Server
from mint_jax.service.server_db import Overloaded
from mint_jax.service.starting import Starting
from mint_jax.service.tinker import Tinker
from mint_jax.service.tinker_futures import Futures
from mint_jax.service.tinker_rest import Rest
from mint_jax.service.tinker_sampling import Sampling
from mint_jax.service.tinker_sessions import Sessions
from mint_jax.service.tokens import Tokens
from mint_jax.service.watch import Source, Watch, gaps_of

# the first that fits; 429 and 503 are for load alone, since clients ask again then
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
    Unavailable: 503,
    DatabaseFailed: 503,
    StorageFailed: 503,
    UserError: 400,
}
RETRY_AFTER_S = 5.0  # where nothing says better
DRAIN_S = 30  # for requests that are being answered when the server is told to stop


class _Openai:
    """A server as ``openai.py`` asks for one."""

    def __init__(self, server: Server, bounds: Bounds):
        self.engine, self.base, self.weights, self.submit = (
            server.engine,
            server.base,
            server.weights,
            server.submit,
        )
        self.bounds = bounds

    def tenant(self, request: Request) -> str:
        return tenant_of(request)


def status_of(error: Exception) -> int:
    """The HTTP status of what a handler raised."""
    return next(status for kind, status in STATUSES.items() if isinstance(error, kind))


async def told(request: Request, error: Exception) -> Response:
    """An error as Tinker's clients read it."""
    exchange.release(error)
    status = status_of(error)
    retry = getattr(error, "retry_after_s", RETRY_AFTER_S if status == 503 else None)
    headers = None if retry is None else {"retry-after": str(max(1, round(retry)))}
    return JSONResponse({"detail": reason_of(error)}, status, headers)


async def unrouted(request: Request, error: Exception) -> Response:
    """A path or a method that no route has."""
    assert isinstance(error, HTTPException)
    what = (
        "there is no such path here: look at its spelling"
        if error.status_code == 404
        else "this path takes another method"
    )
    told = f"{request.method} {request.url.path[:200]}: {what}"
    headers = error.headers
    if error.status_code == 405:  # starlette tells the methods of the first route of a path alone
        routes = [
            route
            for route in request.app.routes
            if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE
        ]
        headers = {
            "allow": ", ".join(
                sorted({method for route in routes for method in route.methods or ()})
            )
        }
    if request.url.path.startswith(openai.PREFIXES):
        code = "unknown_url" if error.status_code == 404 else None
        return JSONResponse(
            {"error": openai.shape(told, "invalid_request_error", None, code)},
            error.status_code,
            headers,
        )
    return JSONResponse({"detail": told}, error.status_code, headers)


def make(
    server: Server,
    keys: Keys | None = None,
    limits: Limits | None = None,
    hosts: Iterable[str] = (),
    bounds: Bounds = OPENAI,
) -> Any:
    """The ASGI application of a server that is running.

    Args:
        bounds: of fields of OpenAI's API.
        hosts: see ``Gate``.
    """
    live, loop, engine = server.live, server.loop, server.engine
    watch = Watch(
        [
            Source("engine", "counter", "What the engine did.", lambda: engine.counts),
            Source("training", "counter", "What live training did.", lambda: live.counts),
            gaps_of(
                "decode_gap_seconds",
                "How long rows that decode waited for training.",
                lambda: list(loop.gaps),
            ),
        ],
        ready=server.readiness,
        state=functools.partial(status.state_of, server),
        registry=server.metrics,
    )
    browsers, serves = Browsers(keys), _Openai(server, bounds)
    of_tinker = [
        route
        for made in (Tinker, Sampling, Futures, Sessions, Rest, MintExtras)
        for route in made(server).routes()
    ]
    tokens = _exchange(Tokens() if keys is None else keys.tokens)
    of_operators = [
        *watch.routes(),
        *admin.routes(server.costs),
        openapi.route(server.base.cfg.context, bounds),
    ]
    of_people = Console(server, browsers, serves).routes()
    routes = [tokens, *of_tinker, *openai.routes(serves), *of_operators, *of_people]
    app = Starlette(
        routes=routes, exception_handlers={**dict.fromkeys(STATUSES, told), HTTPException: unrouted}
    )
    return watch.around(
        Gate(
            app,
            keys,
            limits,
            quotas=server.quotas,
            sessions=None if keys is None else browsers,
            hosts=hosts,
        )
    )


def _exchange(tokens: Tokens) -> Route:
    """Where a key is exchanged for a token. A token is not: one that was found would renew itself
    for ever.
    """

    async def exchanged(request: Request) -> Response:
        if getattr(request.state, "by_token", False):
            return JSONResponse(
                {"detail": "this is a token already: send the API key, for which there are others"},
                403,
            )
        return JSONResponse({"jwt": tokens.make(getattr(request.state, "key", "-"))})

    return Route("/api/v1/auth/token", exchanged, methods=["POST"])


class Web(uvicorn.Server):
    """Serves an application until a signal or ``should_exit`` says to stop: what is being answered
    ends, long polls end at once.

    Args:
        server: whose ``end_waits`` ends long polls: a ``Server`` or a ``Starting``.
        app: from ``make``, or what becomes one.
        started: called with the port once connections are taken.
        options: further ones of ``uvicorn.Config``.

    Attributes:
        stopped_by: the signal's name.
    """

    def __init__(
        self,
        server: Server | Starting,
        app: Any,
        host: str,
        port: int,
        started: Callable[[int], None] = lambda port: None,
        **options: Any,
    ):
        settings = {
            "log_config": None,
            "access_log": False,
            "http": connections.timed(),
            "ws": "none",
            "lifespan": "off",
        } | options
        super().__init__(
            uvicorn.Config(
                app, host, port, timeout_graceful_shutdown=DRAIN_S, backlog=2048, **settings
            )
        )
        self._server, self._when_started, self.stopped_by = server, started, ""

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._when_started(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: Any = None) -> None:
        self._server.end_waits()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's own it does not raise the signal again: the program ends in its own
        way.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: Any) -> None:
            self.stopped_by, self.should_exit = signal.Signals(number).name, True

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            with interrupts.grace(DRAIN_S + interrupts.GRACE_S):
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
