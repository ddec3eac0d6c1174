"""Browsers that have shown a key: sessions by cookie, and what shows that a form is a page's of
ours.

The cookie is 32 random bytes, of which the server has the hash, with the key's id. It is HttpOnly,
SameSite=Strict and, but for loopback without TLS, Secure; scripts and other sites never have it,
and the key itself is nowhere. A session ends after ``LONGEST_S``, with its key, by signing out, and
with the server.
"""

import asyncio
import collections
import hashlib
import hmac
import secrets
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import cookie_parser

from mint_jax.service.exchange import Refusal, path_of
from mint_jax.service.keys import Key, Keys

UNDER = "/console"
COOKIE = "mint_console"
LONGEST_S = 12 * 3600.0
MOST = 10_000  # sessions; the oldest goes
SLOW_S = 1.0  # for a wrong key, one after the other
MOST_WRONG = 20  # that wait for it


class TooMany(Exception):
    """Too many wrong keys are being tried."""


class Browsers:
    """The sessions of one server (``gate.Sessions``); for one event loop.

    Args:
        keys: None: nobody needs a session.
        clock: monotonic seconds.
    """

    def __init__(
        self, keys: Keys | None, clock: Callable[[], float] = time.monotonic, slow_s: float = SLOW_S
    ):
        self.keys, self._clock, self._slow_s = keys, clock, slow_s
        # session -> key's id, its end
        self._found: collections.OrderedDict[str, tuple[str, float]] = collections.OrderedDict()
        self._secret = secrets.token_bytes(32)
        self._trying, self._waiting = asyncio.Lock(), 0

    # -- what the gate asks

    def covers(self, path: str) -> bool:
        return path == UNDER or path.startswith(UNDER + "/")

    def find(self, headers: list[tuple[bytes, bytes]]) -> tuple[str, str] | None:
        cookie = cookies_of(headers).get(COOKIE)
        session = "" if cookie is None else _hash(cookie)
        key, end = self._found.get(session, ("", 0.0))
        return (key, session) if self._clock() < end else None

    def refusal(self, scope: Any) -> Refusal:
        """Redirects to the sign-in page; htmx gets a header instead, or it would insert that page
        into a part of this one.
        """
        root = scope.get("root_path", "")
        asks = root + f"{UNDER}/sign-in"
        if scope["method"] in ("GET", "HEAD"):
            asks += "?" + urllib.parse.urlencode({"next": path_of(scope)})
        message = "there is no session: sign in with an API key"
        if any(name == b"hx-request" for name, _ in scope["headers"]):
            return Refusal(401, message, {"hx-redirect": asks})
        return Refusal(303, message, {"location": asks, "cache-control": "no-store"})

    # -- signing in and out

    async def sign_in(self, secret: str) -> tuple[Key, str] | None:
        """The key and a new session's cookie; None, slowly, for a key that is none.

        Raises:
            TooMany: others are waiting for the same.
            UserError: the keys cannot be read.
        """
        assert self.keys is not None, "nobody signs in where there are no keys"
        key = self.keys.find(secret.strip())
        if key is not None:
            cookie = secrets.token_urlsafe(32)
            self._found[_hash(cookie)] = key.id, self._clock() + LONGEST_S
            while len(self._found) > MOST:
                self._found.popitem(last=False)
            return key, cookie
        if self._waiting >= MOST_WRONG:
            raise TooMany
        self._waiting += 1
        try:
            async with self._trying:
                await asyncio.sleep(self._slow_s)
        finally:
            self._waiting -= 1
        return None

    def sign_out(self, session: str) -> None:
        self._found.pop(session, None)

    # -- forms

    def token(self, session: str) -> str:
        """Returns the token of a session's forms; without keys all sessions share one."""
        return hmac.new(self._secret, session.encode(), "sha256").hexdigest()

    def check(self, session: str, token: str) -> bool:
        return hmac.compare_digest(self.token(session), token)


def same_origin(headers: Mapping[str, str]) -> bool:
    """Returns whether a page of this server sent a request, by the browser's headers."""
    if (site := headers.get("sec-fetch-site")) is not None:
        return site == "same-origin"
    origin = urllib.parse.urlsplit(headers.get("origin", "")).netloc
    return bool(origin) and origin == headers.get("host")


def cookies_of(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns a request's cookies by name."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name == b"cookie":
            found |= cookie_parser(value.decode("latin-1"))
    return found


def _hash(cookie: str) -> str:
    return hashlib.sha256(cookie.encode()).hexdigest()
