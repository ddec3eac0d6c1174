"""The HTTP application: all routes over one server, behind the gate, and its web server."""

import contextlib
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
from mint_jax.service import connections, monitoring, openai, openapi
from mint_jax.service.console.routes import Console
from mint_jax.service.console.sessions import Browsers
from mint_jax.service.errors import STATUSES, handler
from mint_jax.service.exchange import error_body
from mint_jax.service.gate import Gate, Limits
from mint_jax.service.handlers import tenant_of
from mint_jax.service.keys import Keys
from mint_jax.service.mint_extras import MintExtras
from mint_jax.service.openai_types import OPENAI, Bounds
from mint_jax.service.server import Server
from mint_jax.service.starting import Starting
from mint_jax.service.tinker import Tinker
from mint_jax.service.tinker_futures import Futures
from mint_jax.service.tinker_rest import Rest
from mint_jax.service.tinker_sampling import Sampling
from mint_jax.service.tinker_sessions import Sessions
from mint_jax.service.tokens import Tokens

DRAIN_S = 30  # seconds for requests in flight when the server stops


class _Openai:
    """Adapts a server to ``openai.Serves``."""

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


async def unrouted(request: Request, error: Exception) -> Response:
    """Answers a path or a method that no route has."""
    assert isinstance(error, HTTPException)
    what = "there is no such path here: check its spelling"
    if error.status_code == 405:
        what = "this path takes another method"
    message = f"{request.method} {request.url.path[:200]}: {what}"
    headers = error.headers
    if error.status_code == 405:  # starlette lists the methods of a path's first route only
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
    by_openai = request.url.path.startswith(openai.PREFIXES)
    code = "unknown_url" if error.status_code == 404 else None
    body = error_body(error.status_code, message, by_openai, code=code)
    return JSONResponse(body, error.status_code, headers)


def make(
    server: Server,
    keys: Keys | None = None,
    limits: Limits | None = None,
    hosts: Iterable[str] = (),
    bounds: Bounds = OPENAI,
) -> Any:
    """Returns the ASGI application of a running server.

    Args:
        hosts: see ``Gate``.
        bounds: limits of the fields of OpenAI's API.
    """
    monitor = monitoring.monitor_of(server)
    browsers, serves = Browsers(keys), _Openai(server, bounds)
    of_tinker = [
        route
        for made in (Tinker, Sampling, Futures, Sessions, Rest, MintExtras)
        for route in made(server).routes()
    ]
    tokens = _exchange(Tokens() if keys is None else keys.tokens)
    of_operators = [
        *monitor.routes(),
        monitoring.cost_route(server.costs),
        openapi.route(server.base.cfg.context, bounds),
    ]
    of_people = Console(server, browsers, serves).routes()
    routes = [tokens, *of_tinker, *openai.routes(serves), *of_operators, *of_people]
    handlers = {**dict.fromkeys(STATUSES, handler()), HTTPException: unrouted}
    app = Starlette(routes=routes, exception_handlers=handlers)
    return monitor.around(
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
    """Returns the route that exchanges a key for a token. A token is refused: a stolen one could
    otherwise renew itself forever.
    """

    async def exchanged(request: Request) -> Response:
        if getattr(request.state, "by_token", False):
            return JSONResponse(
                {"detail": "this is a token already: send the API key"},
                403,
            )
        return JSONResponse({"jwt": tokens.make(getattr(request.state, "key", "-"))})

    return Route("/api/v1/auth/token", exchanged, methods=["POST"])


class Web(uvicorn.Server):
    """Serves an application until a signal or ``should_exit`` stops it. Requests in flight are
    finished; long polls end at once.

    Args:
        server: its ``end_waits`` ends long polls.
        app: from ``make``, or a ``Starting``.
        started: called with the port once connections are accepted.
        options: further options of ``uvicorn.Config``.

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
        """Handles signals without raising them again, as uvicorn would: the program ends itself."""
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
