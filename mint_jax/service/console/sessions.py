"""Browser sessions by cookie.

The cookie is 32 random bytes, HttpOnly, SameSite=Strict and, except on loopback without TLS,
Secure. The server keeps its hash and the key's id; the key itself is stored nowhere. A session ends
after ``SESSION_S``, with its key, by signing out, and with the server.
"""

import collections
import hashlib
import secrets
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from starlette.requests import cookie_parser

from mint_jax.service.exchange import Refusal, path_of
from mint_jax.service.keys import Keys

ROOT = "/console"
COOKIE = "mint_console"
SESSION_S = 12 * 3600
MAX_SESSIONS = 10_000  # beyond it the oldest is dropped


class Browsers:
    """The sessions of one server, thread-safe. Without ``keys`` none is needed."""

    def __init__(self, keys: Keys | None, clock: Callable[[], float] = time.monotonic):
        self.keys, self._clock = keys, clock
        # session -> the key's id, the session's end
        self._sessions: collections.OrderedDict[str, tuple[str, float]] = collections.OrderedDict()

    def find(self, headers: list[tuple[bytes, bytes]]) -> tuple[str, str] | None:
        """Returns the ids of a request's key and session; None without a session."""
        lines = (value.decode("latin-1") for name, value in headers if name == b"cookie")
        session = _hash(cookie_parser(";".join(lines)).get(COOKIE, ""))
        key, end = self._sessions.get(session, ("", 0.0))
        return (key, session) if self._clock() < end else None

    def sign_in(self, secret: str) -> str | None:
        """Returns a new session's cookie; None for a wrong key."""
        assert self.keys is not None, "without keys there is no sign-in"
        if (key := self.keys.find(secret.strip())) is None:
            return None
        cookie = secrets.token_urlsafe(32)
        self._sessions[_hash(cookie)] = key.id, self._clock() + SESSION_S
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return cookie

    def sign_out(self, session: str) -> None:
        self._sessions.pop(session, None)


def covers(path: str) -> bool:
    """Returns whether cookies are accepted on a path."""
    return path == ROOT or path.startswith(ROOT + "/")


def sign_in_first(scope: Any) -> Refusal:
    """Returns the redirect to the sign-in page; htmx, which swaps parts, gets a header."""
    location = scope.get("root_path", "") + f"{ROOT}/sign-in"
    if scope["method"] in ("GET", "HEAD"):
        location += "?" + urllib.parse.urlencode({"next": path_of(scope)})
    message = "there is no session: sign in with an API key"
    if any(name == b"hx-request" for name, _ in scope["headers"]):
        return Refusal(401, message, {"hx-redirect": location})
    return Refusal(303, message, {"location": location, "cache-control": "no-store"})


def _hash(cookie: str) -> str:
    return hashlib.sha256(cookie.encode()).hexdigest()
