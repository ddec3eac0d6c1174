"""The HTTP application: all routes over one server, behind the gate, and its web server."""

import contextlib
import functools
import signal
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from mint_jax import interrupts
from mint_jax.service import connections, endpoints, interpolation, monitoring, openapi
from mint_jax.service.console.pages import console_routes
from mint_jax.service.console.sessions import Browsers
from mint_jax.service.errors import HANDLERS, OPENAI_PATHS
from mint_jax.service.exchange import error_body
from mint_jax.service.gate import Gate, Limits
from mint_jax.service.keys import Keys
from mint_jax.service.openai import OpenAI
from mint_jax.service.server import Server
from mint_jax.service.tinker import Tinker
from mint_jax.service.tinker_rest import Rest
from mint_jax.service.tinker_sampling import Sampling
from mint_jax.service.tokens import Tokens

HOME = "x-mint-home"  # header: the engine whose folder a request is about
DRAIN_S = 30  # seconds for requests in flight when the server stops


async def unrouted(request: Request, error: Exception) -> Response:
    """Answers a path or a method that no route has."""
    assert isinstance(error, HTTPException)
    path, status, headers = request.url.path, error.status_code, error.headers
    problem, code = "there is no such path here: check its spelling", "unknown_url"
    if status == 405:  # starlette lists the methods of a path's first route only
        problem, code = "this path takes another method", None
        matches = [one for one in request.app.routes if one.matches(request.scope)[0] != Match.NONE]
        headers = {"allow": ", ".join(sorted({name for one in matches for name in one.methods}))}
    message = f"{request.method} {path[:200]}: {problem}"
    body = error_body(status, message, path.startswith(OPENAI_PATHS), code=code)
    return JSONResponse(body, status, headers)


def make(
    server: Server,
    keys: Keys | None = None,
    limits: Limits | None = None,
    hosts: Iterable[str] = (),
    openai_limits: bool = True,
) -> Any:
    """Returns the ASGI application of a running server.

    Args:
        hosts: see ``Gate``.
        openai_limits: refuse what OpenAI's API refuses beyond the engine.
    """
    browsers = Browsers(keys)
    server.metrics.register(monitoring.PartsCollector(server))
    metrics = monitoring.HttpMetrics(server.metrics)
    homes = Homes(server, lambda one: application(one, keys, browsers, openai_limits))
    gate = Gate(homes, keys, limits, server.quotas, browsers, hosts, metrics)
    metrics.in_flight.set_function(gate.in_flight.total)
    return gate


class Homes:
    """Sends each request to the server, or to the guest that the header ``x-mint-home`` names: a
    front does so (``fleet/front.py``). 421 if that is not a guest here, or no longer.
    """

    def __init__(self, server: Server, make: Callable[[Server], Starlette]):
        self._server, self._make, self.app = server, make, make(server)
        self._guests: dict[str, tuple[Server, Starlette]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        app: Any = self.app
        if home := Headers(scope=scope).get(HOME):
            app = self._of(home)
        await app(scope, receive, send)

    def _of(self, home: str) -> Any:
        if (guest := self._server.guests.get(home)) is None:
            self._guests.pop(home, None)
            return JSONResponse({"detail": f"{home[:40]!r} is not served here: ask again"}, 421)
        if home not in self._guests or self._guests[home][0] is not guest:
            self._guests[home] = guest, self._make(guest)
        return self._guests[home][1]


def application(
    server: Server, keys: Keys | None, browsers: Browsers, openai_limits: bool
) -> Starlette:
    """Returns the routes over one server, without the gate."""
    openai = OpenAI(server, openai_limits)
    parts = [kind(server) for kind in (Tinker, Sampling, Rest, monitoring.Operators)]
    tokens = Tokens() if keys is None else keys.tokens
    others = SimpleNamespace(
        token=functools.partial(exchange, tokens),
        interpolate=functools.partial(interpolation.interpolate, server),
        openapi=functools.partial(openapi.openapi, server.base.cfg.context, openai_limits),
    )
    routes = [
        *endpoints.routes(endpoints.tinker_endpoints(), others, *parts),
        *endpoints.routes(endpoints.operators(), others, *parts),
        *endpoints.routes(endpoints.openai_endpoints(), openai),
        *console_routes(server, browsers),
    ]
    return Starlette(routes=routes, exception_handlers=HANDLERS | {HTTPException: unrouted})


async def exchange(tokens: Tokens, request: Request) -> Response:
    """Exchanges a key for a token. Refuses a token: a stolen one could otherwise renew itself."""
    if getattr(request.state, "by_token", False):
        return JSONResponse({"detail": "this is a token already: send the API key"}, 403)
    return JSONResponse({"jwt": tokens.make(getattr(request.state, "key", "-"))})


class Waits(Protocol):
    """Long polls that can be ended."""

    @property
    def end_waits(self) -> Callable[[], None]: ...


class Web(uvicorn.Server):
    """Serves an application until a signal (``stopped_by``) or ``should_exit`` stops it. Requests
    in flight are finished; the ``server`` ends long polls at once.

    Args:
        started: called with the port once connections are accepted.
        options: further options of ``uvicorn.Config``.
    """

    def __init__(
        self,
        server: Waits,
        app: Any,
        host: str,
        port: int,
        started: Callable[[int], None] = lambda port: None,
        **options: Any,
    ):
        settings = {"log_config": None, "access_log": False, "ws": "none", "lifespan": "off"}
        settings |= {"timeout_graceful_shutdown": DRAIN_S, "backlog": 2048}
        settings |= {"http": connections.TimedProtocol, **options}
        super().__init__(uvicorn.Config(app, host, port, **settings))
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
        with interrupts.grace(DRAIN_S + interrupts.GRACE_S), super().capture_signals():
            yield

    def handle_exit(self, sig: int, frame: Any) -> None:
        # uvicorn would raise the signal again, but the program ends itself
        self.stopped_by, self.should_exit = signal.Signals(sig).name, True
