"""One HTTP request at the gate: its body as it arrives, and its response or a refusal."""

import asyncio
import contextlib
import time
import traceback
from typing import Any

from starlette.responses import JSONResponse

# seconds that a refused request's body is read and discarded, so that no reset loses the response
LINGER_S = 2.0
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(
    status: int, message: str, openai: bool, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Returns the JSON of an error: ``{"detail": ...}``, or OpenAI's form."""
    if not openai:
        return {"detail": message}
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = "invalid_api_key" if status == 401 else code
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Refusal(Exception):
    """Ends a request with this status."""

    def __init__(
        self, status: int, message: str, headers: dict[str, str] | None = None, close: bool = False
    ):
        super().__init__(message)
        self.status, self.message, self.headers, self.close = status, message, headers or {}, close


class Left(Exception):
    """The client disconnected before its body was complete."""


class Source:
    """``receive`` of one request; ``bytes`` counts the body, which is ``whole`` at its end."""

    def __init__(self, receive: Any):
        self._receive = receive
        self.bytes, self.whole = 0, False

    async def read(self) -> bytes:
        """Returns the next part of the body."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise Left
        part = message.get("body", b"")
        self.bytes += len(part)
        self.whole = not message.get("more_body", False)
        return part

    async def drained(self, headers: list[tuple[bytes, bytes]], limit: int) -> bool:
        """Reads the rest of a refused body, up to ``limit`` bytes; returns whether it is whole."""
        if values(headers, b"expect"):
            return self.whole  # the client waits for permission to send it
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self.whole and self.bytes <= limit:
                    await self.read()
        return self.whole


class Reply:
    """``send`` of one request: adds its id and counts. ``status`` is 0 before the response."""

    def __init__(self, send: Any, id: str, openai: bool):
        self._send, self.id, self._openai = send, id, openai
        self.status = self.bytes = 0
        self.first_byte: float | None = None  # on the clock of ``perf_counter``

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [one for one in message["headers"] if one[0].lower() != b"x-request-id"]
            message = {**message, "headers": [*headers, (b"x-request-id", self.id.encode())]}
            self.first_byte = time.perf_counter()
        self.bytes += len(message.get("body", b""))
        await self._send(message)

    async def refuse(self, refusal: Refusal, close: bool) -> None:
        """Responds with an error, unless a response has started, which stays cut off."""
        if not self.status:
            body = error_body(refusal.status, refusal.message, self._openai)
            headers = refusal.headers | ({"connection": "close"} if close else {})
            response = JSONResponse(body, refusal.status, headers)
            await response({"type": "http"}, None, self)  # type: ignore[arg-type]


def replay(body: bytes, receive: Any) -> Any:
    """Returns a ``receive`` that first gives the complete body."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def first() -> Any:
        return waiting.pop() if waiting else await receive()

    return first


def release(error: BaseException) -> None:
    """Clears the local variables of the functions that raised an error: the body and all that was
    parsed from it. The exception and its task hold them in a cycle: three refused requests of 64 MB
    took a gigabyte.
    """
    reason: BaseException | None = error
    while reason is not None:
        traceback.clear_frames(reason.__traceback__)
        reason = reason.__cause__ or reason.__context__


def path_of(scope: Any) -> str:
    """Returns the path below the app's root."""
    root, path = scope.get("root_path", ""), scope["path"]
    return path[len(root) :] if root and path.startswith(root + "/") else path


def values(headers: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    """Returns the values of all headers of a lower-case name."""
    return [value.decode("latin-1") for key, value in headers if key == name]
