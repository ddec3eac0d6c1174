"""ASGI middleware before every request: keys and scopes, and limits of bytes, seconds and counts.

The meaning of a request is left to the app. A body
is read whole, and decompressed, before the app is called: the app's first ``receive`` gives all of
it. The app finds in ``scope["state"]`` the strings ``tenant``, ``key`` (its id), ``session`` and
``request_id``, the tuple ``scopes``, and ``by_token``: whether a token was shown for the key. Time
limits on heads of requests and on clients that do not read are in ``connections.py``.

A refusal is ``{"detail": ...}``, or ``{"error": {message, type, param, code}}`` on the paths of
OpenAI's API. Statuses 408 and 429 are for load alone, since clients ask again then.
"""

import asyncio
import collections
import contextlib
import dataclasses
import io
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from mint_jax.errors import UserError
from mint_jax.service import weight
from mint_jax.service.binding import check_hosts, is_ours
from mint_jax.service.bodies import TooLarge, UnknownCoding, decompress
from mint_jax.service.endpoints import TABLE, Endpoint, Table
from mint_jax.service.exchange import Left, Refusal, Reply, Source, path_of, replay, values
from mint_jax.service.keys import SCOPES, Keys
from mint_jax.service.quotas import Quotas
from mint_jax.service.tokens import is_token
from mint_jax.service.wire.reading import is_protobuf

_Found = Endpoint | None
log = logging.getLogger("mint_jax.service")

_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_KEY_LIKE = re.compile(r"[A-Za-z0-9_-]{43,}")
_OPENAI = ("/v1/", "/oai/")
_OFF_LOOP = 1 << 16  # bytes of a body from which it is weighed in a thread


def waits(path: str) -> bool:
    """Returns whether a path is a long poll, which uses nothing but its connection."""
    return path.rstrip("/").endswith(("/retrieve_future", "/retrieve_futures"))


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one request, one tenant and the server.

    Attributes:
        body_bytes: of a body with data, as sent and decompressed.
        small_body_bytes: the same on paths that take no data, see ``Endpoint.data``.
        open_body_bytes: the same where no key is needed.
        body_s: seconds in which a body has to arrive.
        tenant, total: requests in flight, of a tenant whose quota says no other number, and of all.
        held_bytes: memory of all bodies of requests in flight together, as sent and as parsed.
        waits: of which paths requests are not counted as in flight.
    """

    body_bytes: int = 64 << 20
    small_body_bytes: int = 1 << 20
    open_body_bytes: int = 16 << 10
    body_s: float = 30.0
    tenant: int = 1000
    total: int = 4000
    held_bytes: int = 1 << 30
    waits: Callable[[str], bool] = waits

    def __post_init__(self):
        for field in (
            "body_bytes",
            "small_body_bytes",
            "open_body_bytes",
            "body_s",
            "tenant",
            "total",
            "held_bytes",
        ):
            if not getattr(self, field) > 0:
                raise UserError(f"{field} is {getattr(self, field)}; expected a number above 0")
        if self.held_bytes < self.body_bytes:
            raise UserError(
                f"held_bytes is {self.held_bytes}, less than one body of {self.body_bytes} bytes:"
                " give it several times that"
            )


@dataclasses.dataclass
class _Who:
    tenant: str = "-"
    scopes: tuple[str, ...] = ()
    key: str = "-"  # its id
    by_token: bool = False
    session: str = ""  # what its requests have in common: a browser's session, or the key


class Budget:
    """Bytes of all requests in flight."""

    def __init__(self, limit: int):
        self.limit, self.held, self.lock = limit, 0, threading.Lock()


class Share:
    """One request's part of the budget until its block ends. Thread-safe."""

    def __init__(self, budget: Budget):
        self._budget, self._held, self._ended = budget, 0, False

    def take(self, count: int) -> None:
        """Reserves bytes.

        Raises:
            Refusal: 413, there never is; 429, there is none now.
            Left: the request has ended; a thread still worked for it.
        """
        budget = self._budget
        with budget.lock:
            if self._ended:
                raise Left
            if self._held + count > budget.limit:
                told = (
                    f"the request would take {self._held + count} bytes of memory, of at most"
                    f" {budget.limit}"
                )
                raise Refusal(413, f"{told}: send fewer data in a request")
            if budget.held + count > budget.limit:
                raise _busy(
                    f"the server holds {budget.held} bytes of requests, of at most {budget.limit}"
                )
            budget.held += count
            self._held += count

    def give(self, count: int) -> None:
        with self._budget.lock:
            self._budget.held -= count
            self._held -= count

    def __enter__(self) -> "Share":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self.give(self._held)


class Sessions(Protocol):
    """Keys that browsers have shown; their further requests bring a cookie in place of the key."""

    def covers(self, path: str) -> bool:
        """Returns whether cookies are accepted on a path."""
        ...

    def find(self, headers: list[tuple[bytes, bytes]]) -> tuple[str, str] | None:
        """The ids of a request's key and of its session."""
        ...

    def refusal(self, scope: Any) -> Refusal:
        """Returns the refusal of a browser without a session."""
        ...


class Gate:
    """The middleware. One event loop calls it.

    Args:
        app: an ASGI app; an exception that leaves it is logged, and answered with 500 and no more
            than the request's id.
        keys: None lets everybody in as tenant ``default`` with all scopes: for a server on
            loopback, see ``binding.py``. Requests must then name this machine in ``Host``, on every
            path.
        table: what each path needs.
        quotas: of requests in flight by tenant.
        sessions: of browsers; None: there are none.
        hosts: further names that ``Host`` and ``Origin`` of requests without keys may have.
    """

    def __init__(
        self,
        app: Any,
        keys: Keys | None,
        limits: Limits | None = None,
        table: Table = TABLE,
        quotas: Quotas | None = None,
        sessions: Sessions | None = None,
        hosts: Iterable[str] = (),
    ):
        self.app, self.keys, self.limits, self.table, self.sessions = (
            app,
            keys,
            limits or Limits(),
            table,
            sessions,
        )
        self.quotas, self.hosts = quotas or Quotas(), check_hosts(hosts)
        self.in_flight: collections.Counter[str] = collections.Counter()  # by tenant
        self.budget = Budget(self.limits.held_bytes)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        began, who = time.perf_counter(), _Who()
        path = path_of(scope)
        reply = Reply(send, _request_id(scope["headers"]), path.startswith(_OPENAI))
        source = Source(receive)
        try:
            endpoint = self.table.find(scope["method"], path)
            is_open = endpoint is not None and endpoint.open
            try:
                # an absolute URI, whose host would count in place of the header's, or `*`
                if not path.startswith("/"):
                    raise Refusal(
                        400,
                        f"the request is for {path[:80]!r}; send a path that begins with '/', and"
                        " the host in Host",
                    )
                who = _Who() if is_open and self.keys is not None else self._who(scope, path)
                self._check_scope(endpoint, who, scope["method"], path)
                with (
                    self._counted(None if is_open or self.limits.waits(path) else who.tenant),
                    Share(self.budget) as share,
                ):
                    body = await self._body(scope["headers"], source, self._most(endpoint), share)
                    await self._weigh(body, endpoint, scope["headers"], share)
                    state = {
                        "tenant": who.tenant,
                        "scopes": who.scopes,
                        "key": who.key,
                        "by_token": who.by_token,
                        "session": who.session,
                    }
                    state = {**scope.get("state", {}), **state, "request_id": reply.id}
                    inner = {
                        **scope,
                        "headers": _plain(scope["headers"], len(body)),
                        "state": state,
                    }
                    await self.app(inner, replay(body, receive), reply)
                    await reply.flush()
            except Refusal as refusal:
                close = refusal.close or not await source.drained(
                    scope["headers"], self.limits.body_bytes
                )
                await reply.refuse(refusal, close)
        except Left:
            pass
        except Exception:
            log.exception("request %s failed", reply.id)
            await reply.refuse(Refusal(500, f"internal error, request {reply.id}"), close=False)
        finally:
            line = {
                "id": reply.id,
                "tenant": who.tenant,
                "key": who.key,
                "method": scope["method"],
                "path": _masked(path)[:200],
                "status": reply.status or 499,
                "ms": round(1e3 * (time.perf_counter() - began), 1),
                "bytes_in": source.bytes,
                "bytes_out": reply.bytes,
            }
            log.info("%s", json.dumps(line))

    def _who(self, scope: Any, path: str) -> _Who:
        """Returns the tenant and scopes of a request, by its headers."""
        headers = scope["headers"]
        if self.keys is None:
            self._check_local(headers)
            return _Who("default", SCOPES)
        shown = set(values(headers, b"x-api-key"))
        for value in values(headers, b"authorization"):
            scheme, _, key = value.partition(" ")
            if scheme.lower() != "bearer":
                raise _unknown("Authorization is not 'Bearer KEY'")
            shown.add(key.strip())
        if not shown and self.sessions is not None and self.sessions.covers(path):
            return self._of_session(scope, self.sessions)
        if not shown:
            raise _unknown("there is no API key: send it as X-API-Key or as Authorization: Bearer")
        if len(shown) > 1:
            raise _unknown("there are several API keys: send one")
        with _readable():
            key = self.keys.find(secret := shown.pop())
        if key is None:
            # The SDK fetches another token when it reads this, also where the server's clock was
            # moved past the old one's end.
            raise _unknown(
                "the API key is unknown, revoked or expired: ask the server's operator for another",
                ' error="invalid_token"',
            )
        return _Who(key.tenant, key.scopes, key.id, is_token(secret), key.id)

    def _check_local(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Refuses browsers' requests from pages of other sites, whatever name these give to this
        machine.
        """
        named = values(headers, b"host")
        if len(named) != 1 or not is_ours(named[0], self.hosts):
            told = ", ".join(named)[:80]
            others = "".join(f", {host}" for host in sorted(self.hosts))
            raise Refusal(
                403,
                f"Host is {told!r}; a server without keys answers to localhost, 127.0.0.1,"
                f" [::1]{others} alone: ask for it there, add the name to its setting hosts, or"
                " give it keys",
            )
        for origin in values(headers, b"origin"):
            if not is_ours(origin.partition("://")[2], self.hosts):
                raise Refusal(
                    403,
                    "a server without keys takes no requests from pages of other sites: give it"
                    " keys",
                )

    def _of_session(self, scope: Any, sessions: Sessions) -> _Who:
        """Returns the tenant and scopes of a browser's session. Its key is looked up each time: it
        may have been revoked.
        """
        assert self.keys is not None, "there are no sessions without keys"
        if (found := sessions.find(scope["headers"])) is None:
            raise sessions.refusal(scope)
        with _readable():
            key = self.keys.by_id(found[0])
        if key is None:
            raise sessions.refusal(scope)
        return _Who(key.tenant, key.scopes, key.id, session=found[1])

    def _check_scope(self, endpoint: _Found, who: _Who, method: str, path: str) -> None:
        needed = endpoint.scopes if endpoint is not None else ()
        if needed and not set(needed) & set(who.scopes):
            has = ", ".join(who.scopes)
            raise Refusal(
                403,
                f"{method} {path} needs scope {' or '.join(needed)}, and this key has {has}: use"
                " another key",
            )

    @contextlib.contextmanager
    def _counted(self, tenant: str | None) -> Iterator[None]:
        """Counts a request as in flight; None is not counted."""
        if tenant is None:
            yield
            return
        mine = self.quotas.of(tenant).requests
        most = self.limits.tenant if mine is None else mine
        if self.in_flight[tenant] >= most:
            raise _busy(f"tenant {tenant} has {most} requests in flight")
        if self.in_flight.total() >= self.limits.total:
            raise _busy(f"the server has {self.limits.total} requests in flight")
        self.in_flight[tenant] += 1
        try:
            yield
        finally:
            self.in_flight[tenant] -= 1
            if not self.in_flight[tenant]:
                del self.in_flight[tenant]

    def _most(self, endpoint: _Found) -> int:
        """Returns the bytes that a body may have under a endpoint."""
        if endpoint is not None and endpoint.open:
            return self.limits.open_body_bytes
        has_data = endpoint is not None and endpoint.data
        return (
            self.limits.body_bytes
            if has_data
            else min(self.limits.small_body_bytes, self.limits.body_bytes)
        )

    async def _weigh(
        self,
        body: bytes,
        endpoint: _Found,
        headers: list[tuple[bytes, bytes]],
        share: Share,
    ) -> None:
        """Reserves the memory of the parsed body before it is parsed.

        Raises:
            Refusal: it is too much, or more than there is room for now.
        """
        protobuf = (
            endpoint is not None
            and endpoint.protobuf
            and any(map(is_protobuf, values(headers, b"content-type")[:1]))
        )
        weigh = weight.of_protobuf if protobuf else weight.of_json
        try:
            share.take(
                await asyncio.to_thread(weigh, body) if len(body) > _OFF_LOOP else weigh(body)
            )
        except TooLarge as error:
            raise Refusal(413, str(error)) from error
        except UserError as error:
            raise Refusal(400, str(error)) from error

    async def _body(
        self, headers: list[tuple[bytes, bytes]], source: Source, limit: int, share: Share
    ) -> bytes:
        """Returns the body, decompressed."""
        for length in values(headers, b"content-length"):
            if not re.fullmatch("[0-9]{1,18}", length):
                raise Refusal(
                    400,
                    f"Content-Length is {length[:20]!r}; expected a number of bytes",
                    close=True,
                )
            if int(length) > limit:
                raise Refusal(
                    413, f"the body has {length} bytes; send at most {limit} in a request"
                )
        # a list of parts would take 40 bytes for each, and a part may have one
        whole = io.BytesIO()
        try:
            async with asyncio.timeout(self.limits.body_s):
                while not source.whole:
                    part = await source.read()
                    if source.bytes > limit:
                        raise Refusal(
                            413,
                            f"the body has more than {limit} bytes: send fewer data in a request",
                        )
                    share.take(len(part))
                    whole.write(part)
        except TimeoutError:
            raise Refusal(
                408,
                f"the body did not arrive within {self.limits.body_s} s: send it again",
                close=True,
            ) from None
        body = whole.getvalue()
        codings = [value.strip().lower() for value in values(headers, b"content-encoding")]
        codings = [coding for coding in codings if coding not in ("", "identity")]
        if not codings:
            return body
        try:
            plain = await asyncio.to_thread(decompress, body, ", ".join(codings), limit, share.take)
        except TooLarge as error:
            raise Refusal(413, str(error)) from error
        except UnknownCoding as error:
            raise Refusal(415, str(error)) from error
        except UserError as error:
            raise Refusal(400, str(error)) from error
        share.give(len(body))
        return plain


def _plain(headers: list[tuple[bytes, bytes]], size: int) -> list[tuple[bytes, bytes]]:
    """Headers of a request whose body is whole and not compressed; without its key, which the app
    has no use for.
    """
    gone = (
        b"content-encoding",
        b"content-length",
        b"transfer-encoding",
        b"x-api-key",
        b"authorization",
    )
    return [
        *((name, value) for name, value in headers if name not in gone),
        (b"content-length", str(size).encode()),
    ]


def _request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """The id that the client gave, where it is a plain one; else a new one."""
    for given in values(headers, b"x-request-id"):
        if _ID.fullmatch(given) and _masked(given) == given:
            return given
    return uuid.uuid4().hex


def _masked(text: str) -> str:
    """A text without what may be a key; digests, which have no capitals, stay."""
    return _KEY_LIKE.sub(lambda found: found[0] if found[0] == found[0].lower() else "***", text)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        log.error("keys: %s", error)
        raise Refusal(
            503, "the server cannot read its keys now: ask its operator", {"retry-after": "5"}
        ) from error


def _unknown(message: str, why: str = "") -> Refusal:
    return Refusal(401, message, {"www-authenticate": "Bearer" + why})


def _busy(message: str) -> Refusal:
    return Refusal(429, f"{message}: ask again later", {"retry-after": "1"})
