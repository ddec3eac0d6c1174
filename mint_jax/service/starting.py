"""Responses of a port before its server is ready: ``/health``, ``/ready``, and 503 for the rest.

Loading a base takes seconds to minutes; clients retry meanwhile.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse

from mint_jax.service.exchange import Left, Source, error_body, path_of

RETRY_S = "2"
BODY_BYTES = 1 << 20  # of a refused request, read so that no reset loses the response


class Starting:
    """An ASGI application that forwards to another one once that is made. ``doing`` is the current
    phase of the program.
    """

    def __init__(self) -> None:
        self.doing = "starting"
        self._app: Any = None
        self.end_waits: Callable[[], None] = lambda: None  # ends long polls

    def begin(self, app: Any, end_waits: Callable[[], None]) -> None:
        """Forwards to ``app`` from now on; ``end_waits`` ends its long polls."""
        self._app, self.end_waits = app, end_waits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            path, source = path_of(scope), Source(receive)
            with contextlib.suppress(Left):
                whole = await source.drained(scope["headers"], BODY_BYTES)
                await self._answer(path, whole)(scope, receive, send)

    def _answer(self, path: str, whole: bool) -> JSONResponse:
        if path == "/health":
            return JSONResponse({"status": "ok"})
        if path == "/ready":
            return JSONResponse({"status": self.doing}, 503)
        message = f"the server is not ready, it is {self.doing}: ask again in some seconds"
        headers = {"retry-after": RETRY_S} | ({} if whole else {"connection": "close"})
        body = error_body(503, message, path.startswith(("/v1/", "/oai/")))
        return JSONResponse(body, 503, headers)
