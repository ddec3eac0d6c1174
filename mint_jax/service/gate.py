"""ASGI middleware before every request: keys and scopes, and limits of bytes, seconds and counts.

A body is read and decompressed before the app is called: the app's first ``receive`` gives all of
it. The app finds a ``Client`` and ``request_id`` in ``scope["state"]``. Time limits on heads of
requests and on clients that do not read are in ``connections.py``.

Statuses 408 and 429 are for load only, since clients retry them.
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
from typing import Any, NamedTuple

from mint_jax.errors import UserError
from mint_jax.service import bodies
from mint_jax.service.binding import check_hosts, is_ours
from mint_jax.service.console.sessions import Browsers, covers, sign_in_first
from mint_jax.service.endpoints import TABLE, Endpoint
from mint_jax.service.errors import OPENAI_PATHS
from mint_jax.service.exchange import Left, Refusal, Reply, Source, path_of, replay, values
from mint_jax.service.keys import SCOPES, Keys
from mint_jax.service.monitoring import HttpMetrics
from mint_jax.service.quotas import Quotas
from mint_jax.service.tokens import is_token
from mint_jax.service.validation import off_loop

log = logging.getLogger("mint_jax.service")

Headers = list[tuple[bytes, bytes]]
_KEY_LIKE = re.compile(r"[A-Za-z0-9_-]{43,}")
POLLS = ("/retrieve_future", "/retrieve_futures")  # not counted: they use a connection alone
# of the gate alone: the app gets a whole, plain body and no key
_HIDDEN = (b"content-encoding", b"content-length", b"transfer-encoding", b"x-api-key")
_HIDDEN += (b"authorization",)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one request, one tenant and the server. Bytes of a body are those that were sent,
    and those that they decompress to.
    """

    body_bytes: int = 64 << 20  # with data
    small_body_bytes: int = 1 << 20  # on paths that take no data, see ``Endpoint.data``
    open_body_bytes: int = 16 << 10  # on paths that need no key
    body_s: float = 30.0  # in which a body has to arrive
    tenant: int = 1000  # requests in flight of a tenant without a quota of its own
    total: int = 4000  # requests in flight
    held_bytes: int = 1 << 30  # of memory of all bodies in flight, as sent and as parsed

    def __post_init__(self):
        if not self.held_bytes >= self.body_bytes > 0:
            raise UserError(
                f"held_bytes is {self.held_bytes}, body_bytes {self.body_bytes}; expected room for"
                " several bodies"
            )

    def body(self, endpoint: Endpoint | None) -> int:
        """Returns the maximum bytes of a body at an endpoint."""
        if endpoint is None or not (endpoint.open or endpoint.data):
            return min(self.small_body_bytes, self.body_bytes)
        return self.open_body_bytes if endpoint.open else self.body_bytes


class Client(NamedTuple):
    """The sender of a request: ``key`` is an id, ``session`` a browser's, else the key's id;
    ``by_token``: a token was sent in place of the key.
    """

    tenant: str = "-"
    scopes: tuple[str, ...] = ()
    key: str = "-"
    by_token: bool = False
    session: str = ""


class Budget:
    """Bytes of all requests in flight, of which ``limit`` may be in use. Thread-safe."""

    def __init__(self, limit: int):
        self.limit, self.used, self._lock = limit, 0, threading.Lock()

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that reserves bytes for one request until the block ends; a negative
        number releases some. It raises ``Refusal``: 413, they never fit; 429, they do not fit now;
        ``Left``: the request has ended, a thread still worked for it.
        """
        own, ended = 0, False

        def take(count: int) -> None:
            nonlocal own
            with self._lock:
                if ended:
                    raise Left
                if own + count > self.limit:
                    found = f"the request would take {own + count} bytes of memory"
                    limit = f"of at most {self.limit}: send fewer data in a request"
                    raise Refusal(413, f"{found}, {limit}")
                if count > 0 and self.used + count > self.limit:
                    used = f"the server holds {self.used} bytes of requests"
                    raise _busy(f"{used}, of at most {self.limit}")
                self.used += count
                own += count

        try:
            yield take
        finally:
            with self._lock:
                ended = True
                self.used -= own


class Gate:
    """The middleware, for HTTP requests of one event loop.

    Args:
        app: an ASGI app; an exception that leaves it is logged and answered with 500.
        keys: None accepts every request as tenant ``default`` with all scopes: for a server on
            loopback, see ``binding.py``. Requests must then name this machine in ``Host``.
        hosts: further names that ``Host`` and ``Origin`` of requests without keys may have.
    """

    def __init__(
        self,
        app: Any,
        keys: Keys | None,
        limits: Limits | None = None,
        quotas: Quotas | None = None,
        browsers: Browsers | None = None,
        hosts: Iterable[str] = (),
        metrics: HttpMetrics | None = None,
    ):
        self.app, self.keys, self.browsers, self._metrics = app, keys, browsers, metrics
        self.limits, self.quotas = limits or Limits(), quotas or Quotas()
        self.hosts = check_hosts(hosts)
        self.in_flight: collections.Counter[str] = collections.Counter()  # by tenant
        self.budget = Budget(self.limits.held_bytes)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        started, client, path = time.perf_counter(), Client(), path_of(scope)
        reply = Reply(send, uuid.uuid4().hex, path.startswith(OPENAI_PATHS))
        source, endpoint = Source(receive), TABLE.find(scope["method"], path)
        try:
            # an absolute URI, whose host would count in place of the header's, or `*`
            if not path.startswith("/"):
                expected = "'/...', and the host in Host"
                raise Refusal(400, f"the path is {path[:80]!r}; expected {expected}")
            is_open = endpoint is not None and endpoint.open
            if not is_open or self.keys is None:
                client = self._client(scope, path)
            needed = () if endpoint is None else endpoint.scopes or ()
            if needed and not set(needed) & set(client.scopes):
                own = f"this key has {', '.join(client.scopes)}: use another key"
                where = f"{scope['method']} {path}"
                raise Refusal(403, f"{where} needs scope {' or '.join(needed)}, and {own}")
            counted = not is_open and not path.rstrip("/").endswith(POLLS)
            with self._count(client.tenant, int(counted)), self.budget.share() as take:
                body = await self._body(scope["headers"], source, endpoint, take)
                state = scope.get("state", {}) | client._asdict() | {"request_id": reply.id}
                headers = [one for one in scope["headers"] if one[0] not in _HIDDEN]
                headers.append((b"content-length", str(len(body)).encode()))
                inner = {**scope, "headers": headers, "state": state}
                await self.app(inner, replay(body, receive), reply)
        except Refusal as refusal:
            with contextlib.suppress(Left):
                limit = self.limits.body_bytes
                close = refusal.close or not await source.drained(scope["headers"], limit)
                await reply.refuse(refusal, close)
        except Left:
            pass
        except Exception:
            log.exception("request %s failed", reply.id)
            await reply.refuse(Refusal(500, f"internal error, request {reply.id}"), close=False)
        finally:
            if self._metrics is not None:
                self._metrics.record(endpoint, source, reply, started)
            line = {"id": reply.id, "tenant": client.tenant, "key": client.key}
            line |= {"method": scope["method"], "path": _masked(path)[:200]}
            line |= {"status": reply.status or 499, "bytes_in": source.bytes}
            ms = 1e3 * (time.perf_counter() - started)
            log.info("%s", json.dumps(line | {"bytes_out": reply.bytes, "ms": round(ms, 1)}))

    # -- keys

    def _client(self, scope: Any, path: str) -> Client:
        """Returns the sender of a request by its headers, or by a browser's session. Keys are
        looked up with every request: they may have been revoked.
        """
        headers = scope["headers"]
        if self.keys is None:
            self._check_local(headers)
            return Client("default", SCOPES)
        bearers = [value.partition(" ") for value in values(headers, b"authorization")]
        if any(scheme.lower() != "bearer" for scheme, *_ in bearers):
            raise _unknown("Authorization is not 'Bearer KEY'")
        sent = {*values(headers, b"x-api-key"), *(key.strip() for *_, key in bearers)}
        if len(sent) > 1:
            raise _unknown("there are several API keys: send one")
        try:
            if sent:
                secret = sent.pop()
                if (key := self.keys.find(secret)) is not None:
                    return Client(key.tenant, key.scopes, key.id, is_token(secret), key.id)
            elif self.browsers is not None and covers(path):
                owner, session = self.browsers.find(headers) or ("", "")
                if (key := self.keys.by_id(owner)) is not None:
                    return Client(key.tenant, key.scopes, key.id, session=session)
                raise sign_in_first(scope)
            else:
                text = "there is no API key: send it as X-API-Key or as Authorization: Bearer"
                raise _unknown(text)
        except UserError as error:
            log.error("keys: %s", error)
            message = "the server cannot read its keys now: ask its operator"
            raise Refusal(503, message, {"retry-after": "5"}) from error
        # The SDK fetches another token when it reads this, also where the server's clock was moved
        # past the old one's end.
        found = "the API key is unknown, revoked or expired"
        raise _unknown(f"{found}: ask the server's operator for another", ' error="invalid_token"')

    def _check_local(self, headers: Headers) -> None:
        """Refuses browsers' requests from pages of other sites, whatever name these give to this
        machine.
        """
        named = values(headers, b"host")
        if len(named) != 1 or not is_ours(named[0], self.hosts):
            names = ", ".join(["localhost", "127.0.0.1", "[::1]", *sorted(self.hosts)])
            found = f"Host is {', '.join(named)[:80]!r}; a server without keys answers to {names}"
            remedy = "use such a name, add this one to the server's setting hosts, or give it keys"
            raise Refusal(403, f"{found} alone: {remedy}")
        origins = (one.partition("://")[2] for one in values(headers, b"origin"))
        if not all(is_ours(origin, self.hosts) for origin in origins):
            raise Refusal(403, "a server without keys takes no requests from pages of other sites")

    # -- limits

    @contextlib.contextmanager
    def _count(self, tenant: str, count: int) -> Iterator[None]:
        """Counts a request as in flight."""
        quota, limits, in_flight = self.quotas.of(tenant).requests, self.limits, self.in_flight
        most = limits.tenant if quota is None else quota
        if count and in_flight[tenant] >= most:
            raise _busy(f"tenant {tenant} has {most} requests in flight")
        if count and in_flight.total() >= limits.total:
            raise _busy(f"the server has {limits.total} requests in flight")
        in_flight[tenant] += count
        try:
            yield
        finally:
            in_flight[tenant] -= count
            if not in_flight[tenant]:
                del in_flight[tenant]

    async def _body(
        self,
        headers: Headers,
        source: Source,
        endpoint: Endpoint | None,
        take: Callable[[int], None],
    ) -> bytes:
        """Returns the body, decompressed; takes its memory, and that of its values when parsed."""
        limit = self.limits.body(endpoint)
        too_large = f"the body has more than {limit} bytes: send fewer data in a request"
        if any(int(length) > limit for length in values(headers, b"content-length")):
            raise Refusal(413, too_large)
        # a list of parts would take 40 bytes for each, and a part may have one
        whole = io.BytesIO()
        try:
            async with asyncio.timeout(self.limits.body_s):
                while not source.whole:
                    part = await source.read()
                    if source.bytes > limit:
                        raise Refusal(413, too_large)
                    take(len(part))
                    whole.write(part)
        except TimeoutError:
            message = f"the body did not arrive within {self.limits.body_s} s: send it again"
            raise Refusal(408, message, close=True) from None
        body = whole.getvalue()
        del whole
        codings = [value.strip().lower() for value in values(headers, b"content-encoding")]
        coding = ", ".join(coding for coding in codings if coding not in ("", "identity"))
        protobuf = any(map(bodies.is_protobuf, values(headers, b"content-type")[:1]))
        is_message = protobuf and endpoint is not None and endpoint.protobuf
        estimate = bodies.protobuf_memory if is_message else bodies.json_memory
        try:
            if coding:
                body = await asyncio.to_thread(bodies.decompress, body, coding, limit, take)
                take(-source.bytes)
            take(await off_loop(len(body), lambda: estimate(body)))
        except UserError as error:
            known = {bodies.TooLarge: 413, bodies.UnknownCoding: 415}
            raise Refusal(known.get(type(error), 400), str(error)) from error
        return body


def _masked(text: str) -> str:
    """Returns a text without likely keys; digests, which have no capitals, stay."""
    return _KEY_LIKE.sub(lambda found: found[0] if found[0] == found[0].lower() else "***", text)


def _unknown(message: str, why: str = "") -> Refusal:
    return Refusal(401, message, {"www-authenticate": "Bearer" + why})


def _busy(message: str) -> Refusal:
    return Refusal(429, f"{message}: ask again later", {"retry-after": "1"})
