"""What passes between the gate and one client: the body as it comes, the answer with its id, and a
refusal in place of one.
"""

import asyncio
import contextlib
import json
import traceback
from typing import Any

# for which the body of a refused request is read and thrown away, so that the answer is not lost in
# a reset
LINGER_S = 2.0
_TYPES = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    429: ("rate_limit_error", None),
}


class Refusal(Exception):
    """A request ends here, with this status."""

    def __init__(
        self, status: int, message: str, headers: dict[str, str] | None = None, close: bool = False
    ):
        super().__init__(message)
        self.status, self.message, self.headers, self.close = status, message, headers or {}, close


class Left(Exception):
    """The client left before its body was whole."""


class Source:
    """``receive`` of one request.

    Attributes:
        bytes: of the body that have come.
        whole: that was all.
    """

    def __init__(self, receive: Any):
        self._receive = receive
        self.bytes, self.whole = 0, False

    async def read(self) -> bytes:
        """The next part of the body."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise Left
        part = message.get("body", b"")
        self.bytes += len(part)
        self.whole = not message.get("more_body", False)
        return part

    async def drained(self, headers: list[tuple[bytes, bytes]], limit: int) -> bool:
        """Reads what is left of a refused body, for a short time and at most ``limit`` bytes;
        whether that was all.
        """
        if values(headers, b"expect"):
            return self.whole  # the client waits to be told to send it
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self.whole and self.bytes <= limit:
                    await self.read()
        return self.whole


class Reply:
    """``send`` of one request: adds its id, counts, and keeps a 500 back until it is known whether
    an exception comes behind it.

    Starlette sends its own 500 before it passes an exception on.

    Attributes:
        status: of the answer; 0 while there is none, logged as 499: the client left.
        bytes: of its body.
    """

    def __init__(self, send: Any, id: str, openai: bool):
        self._send, self.id, self._openai = send, id, openai
        self._kept: list[Any] = []
        self._started = False
        self.status = self.bytes = 0

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [
                (name, value)
                for name, value in message.get("headers", [])
                if name.lower() != b"x-request-id"
            ]
            message = {**message, "headers": [*headers, (b"x-request-id", self.id.encode())]}
            if self.status == 500:
                self._kept.append(message)
                return
            self._started = True
        elif self._kept:
            self._kept.append(message)
            return
        await self._pass(message)

    async def _pass(self, message: Any) -> None:
        self.bytes += len(message.get("body", b""))
        await self._send(message)

    async def flush(self) -> None:
        """Sends what was kept back: no exception came."""
        kept, self._kept = self._kept, []
        for message in kept:
            self._started = True
            await self._pass(message)

    async def refuse(self, refusal: Refusal, close: bool) -> None:
        """Answers with an error, unless an answer has begun: that one stays cut off, and the server
        closes the connection.
        """
        if self._started:
            return
        self._kept = []
        kind, code = _TYPES.get(
            refusal.status,
            ("server_error" if refusal.status >= 500 else "invalid_request_error", None),
        )
        error = {"error": {"message": refusal.message, "type": kind, "param": None, "code": code}}
        body = json.dumps(error if self._openai else {"detail": refusal.message}).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **refusal.headers,
            "x-request-id": self.id,
        }
        if close:
            headers["connection"] = "close"
        self._started, self.status = True, refusal.status
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._pass({"type": "http.response.start", "status": refusal.status, "headers": raw})
        await self._pass({"type": "http.response.body", "body": body})


def replay(body: bytes, receive: Any) -> Any:
    """A ``receive`` that gives the body first, whole."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def first() -> Any:
        return waiting.pop() if waiting else await receive()

    return first


def release(error: BaseException) -> None:
    """Lets go of what the functions that raised an error have in their variables, the request's
    body and all that it was parsed into.

    An exception keeps them through its traceback, and a task whose exception it is keeps the
    exception: a cycle, which stays until the garbage collector looks at the oldest objects. Three
    refused requests of 64 MB had taken a gigabyte.
    """
    reason: BaseException | None = error
    while reason is not None:
        traceback.clear_frames(reason.__traceback__)
        reason = reason.__cause__ or reason.__context__


def path_of(scope: Any) -> str:
    """The path below the app's root."""
    root, path = scope.get("root_path", ""), scope["path"]
    return path[len(root) :] if root and path.startswith(root + "/") else path


def values(headers: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    """Of all headers of a name, in small letters."""
    return [value.decode("latin-1") for key, value in headers if key == name]
