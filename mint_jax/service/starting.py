"""Responses of a port before its server is ready: ``/health``, ``/ready``, and 503 for the rest.

Loading a base takes seconds to minutes; clients retry meanwhile.
"""

import json
import uuid
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from mint_jax.service.exchange import Left, Refusal, Reply, Source, path_of

RETRY_S = 2
BODY_BYTES = 1 << 20  # of a refused request, read so that no reset loses the response
TYPE = {"content-type": "application/json"}


class Starting:
    """An ASGI application that forwards to another one once that is made. ``doing`` is the current
    phase of the program.
    """

    def __init__(self) -> None:
        self.doing = "starting"
        self._app: Any = None
        self._end_waits: Callable[[], None] = lambda: None

    def begin(self, app: Any, end_waits: Callable[[], None]) -> None:
        """Forwards to ``app`` from now on; ``end_waits`` ends its long polls."""
        self._end_waits = end_waits
        self._app = app

    def end_waits(self) -> None:
        """Ends long polls: the program is about to stop."""
        self._end_waits()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            path = path_of(scope)
            if scope["method"] in ("GET", "HEAD") and path in ("/health", "/ready"):
                status, found = (200, "ok") if path == "/health" else (503, self.doing)
                response = Response(json.dumps({"status": found}) + "\n", status, TYPE)
                await response(scope, receive, send)
            else:
                await self._refuse(path, scope["headers"], receive, send)

    async def _refuse(self, path: str, headers: Any, receive: Any, send: Any) -> None:
        source = Source(receive)
        reply = Reply(send, uuid.uuid4().hex, path.startswith(("/v1/", "/oai/")))
        try:
            whole = await source.drained(headers, BODY_BYTES)
        except Left:
            return
        message = f"the server is not ready, it is {self.doing}: ask again in some seconds"
        await reply.refuse(Refusal(503, message, {"retry-after": str(RETRY_S)}), close=not whole)
