"""Answers of a port before its server is ready: ``/health`` and ``/ready``, and 503 with the reason
for everything else.

Loading a base takes seconds to minutes. Clients retry meanwhile, as for any 503, and whoever
started the program sees its progress.
"""

import json
import uuid
from collections.abc import Callable
from typing import Any

from mint_jax.service.exchange import Left, Refusal, Reply, Source, path_of

RETRY_S = 2
# of a refused request, read and thrown away so that its answer is not lost in a reset
BODY_BYTES = 1 << 20


class Starting:
    """An ASGI application that becomes another one, once that is made.

    Attributes:
        doing: what the program does now, for people.
    """

    def __init__(self) -> None:
        self.doing = "starting"
        self._app: Any = None
        self._end_waits: Callable[[], None] = lambda: None

    def begin(self, app: Any, end_waits: Callable[[], None]) -> None:
        """Answers by ``app`` from now on, whose long polls ``end_waits`` ends."""
        self._end_waits = end_waits
        self._app = app

    def end_waits(self) -> None:
        """Ends long polls, if there are any: the program is about to stop."""
        self._end_waits()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            path = path_of(scope)
            if scope["method"] in ("GET", "HEAD") and path in ("/health", "/ready"):
                await self._told(path, send)
            else:
                await self._refused(path, scope["headers"], receive, send)

    async def _told(self, path: str, send: Any) -> None:
        status, found = (200, "ok") if path == "/health" else (503, self.doing)
        body = json.dumps({"status": found}).encode() + b"\n"
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _refused(self, path: str, headers: Any, receive: Any, send: Any) -> None:
        source, reply = (
            Source(receive),
            Reply(send, uuid.uuid4().hex, path.startswith(("/v1/", "/oai/"))),
        )
        try:
            whole = await source.drained(headers, BODY_BYTES)
        except Left:
            return
        told = f"the server is not ready, it is {self.doing}: ask again in some seconds"
        await reply.refuse(Refusal(503, told, {"retry-after": str(RETRY_S)}), close=not whole)
