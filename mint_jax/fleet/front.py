"""The front of a fleet: the service's HTTP doors over many engines.

A request that names something an engine keeps (a session, a model, a sampler, a future) goes to the
engine that serves that folder now (``homes.py``); while no engine does, the request waits. Any
engine may sample: the front resolves the name once, leases the revision, and offers the request to
the engines in the order of ``chooser.choose`` until one accepts. A stream whose engine dies
continues at the next one, with the same revision, seed, position and tokens (``service/pins.py``).
The front keeps nothing that a client needs: another one on the same port serves the next request.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import secrets
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import aiohttp
from multidict import CIMultiDict
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from yarl import URL

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.records.leases import Lease
from mint_jax.errors import UserError
from mint_jax.fleet import places
from mint_jax.fleet.chooser import Choice
from mint_jax.fleet.view import PERIOD_S, FleetEngine, FleetView
from mint_jax.service import pins
from mint_jax.service.app import HOME
from mint_jax.service.endpoints import OPENAI_PREFIXES
from mint_jax.service.errors import OPENAI_PATHS
from mint_jax.service.exchange import error_body
from mint_jax.service.gate import POLLS, Gate
from mint_jax.service.pins import Pin

log = logging.getLogger("mint_jax.fleet")


def _doors(*names: str) -> set[str]:
    return {f"{prefix}/{name}" for prefix in OPENAI_PREFIXES for name in names}


SAMPLED = _doors("completions", "chat/completions", "responses")
EVERYWHERE = _doors("load_lora_adapter", "unload_lora_adapter")
WAIT_S = 120.0  # for an engine that starts again
LEASE_S = 120.0
CACHE_BYTES = 1 << 20  # of the catalog's pages: at 64 MiB, memory grows with the catalog's names
# statuses that another engine may answer otherwise: it has no such thing, or no room
REFUSALS = (404, 429, 503)
_OWN_HEADERS = {b"connection", b"keep-alive", b"transfer-encoding", b"content-length"}
_OWN_HEADERS |= {b"expect", b"te", b"trailer", b"upgrade", b"content-encoding", b"date", b"server"}
# of a client's request; pins and homes are the front's own: a second one would be ignored
_DROPPED = _OWN_HEADERS | {pins.HEADER.encode(), HOME.encode(), b"x-forwarded-proto"}


class Leases:
    """Leases of the revisions that streams use, one each, renewed while it is in use."""

    def __init__(self, catalog: Catalog):
        self._catalog = catalog
        self._leases: dict[str, Lease] = {}

    async def hold(self, digest: str) -> None:
        """Keeps a revision's bytes for at least half of ``LEASE_S``."""
        lease, now = self._leases.get(digest), self._catalog.clock()
        if lease is not None and lease.expires_at - now > LEASE_S / 2:
            return
        [self._leases[digest]] = await asyncio.to_thread(
            self._catalog.lease, [digest], "fleet", LEASE_S
        )
        for old in [d for d, one in self._leases.items() if one.expires_at < now]:
            del self._leases[old]


class Front:
    """The ASGI application behind the gate; see ``make``.

    Args:
        catalog: that of all engines.
    """

    def __init__(self, view: FleetView, catalog: Catalog, metrics: CollectorRegistry):
        self.view, self._catalog, self._leases = view, catalog, Leases(catalog)
        self._metrics, self.numbers = metrics, itertools.count()
        self._ending = asyncio.Event()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"mint_fleet_{name}", help, labels, registry=metrics)

        self.offers = counter("offers", "Requests offered to engines.", "engine", "reason")
        self.refusals = counter("refusals", "Offers that an engine refused.", "engine", "status")
        self.continued = counter("continued", "Streams that went on at another engine.")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body, path = await request.body(), request.url.path.rstrip("/") or "/"
        with contextlib.ExitStack() as counted:
            scope["state"]["counted"] = counted
            work = asyncio.create_task(self._answer(request, body, path))
            ends = [asyncio.create_task(_left(receive))]
            ends += [asyncio.create_task(self._ending.wait())] if path.endswith(POLLS) else []
            try:
                await asyncio.wait([work, *ends], return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    response = work.result()
                elif self._ending.is_set():
                    response = _unavailable(request, "the front is being stopped")
                else:
                    return  # the client has left
            finally:
                for task in (work, *ends):
                    task.cancel()
            await response(scope, receive, send)

    def end_waits(self) -> None:
        """Ends all long polls: the front is about to stop."""
        self._ending.set()

    async def _answer(self, request: Request, body: bytes, path: str) -> Response:
        own = {"/ready": self._ready, "/metrics": self._own_metrics, "/debug/state": self._state}
        if path == "/health":
            return JSONResponse({"status": "ok"})
        if path in own:
            return await own[path](request)
        if path in SAMPLED and request.method == "POST":
            return await self._sample(request, body)
        if path in EVERYWHERE and request.method == "POST":
            return await self._everywhere(request, body)
        if path in places.LISTS and request.method == "GET":
            return await self._list(request, path)
        kind = request.headers.get("content-type", "application/json")
        name = places.named(path, body, "json" in kind)
        if name in self.view.members or name in self.view.folders:
            return await self._at(name, request, body)
        if path == "/api/v1/create_session" and request.method == "POST":
            return await self._open_session(request, body)
        if path.startswith("/console"):  # a browser's session is one engine's
            return await self._at(next(iter(self.view.members)), request, body)
        return await self._first(request, body)

    # -- to engines

    async def send(
        self, member: FleetEngine, request: Request, body: bytes, *more: tuple[str, str]
    ) -> aiohttp.ClientResponse:
        """Returns an engine's response, whose body is not read. Raises ``aiohttp.ClientError``."""
        assert member.client is not None, "it has reported its address"
        sent = [one for one in request.scope["state"]["sent"] if one[0].lower() not in _DROPPED]
        sent += [(name.encode(), value.encode()) for name, value in more]
        sent.append((b"x-forwarded-proto", request.url.scheme.encode()))
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in sent]
        target = request.scope["raw_path"].decode("ascii")
        if query := request.scope["query_string"].decode("latin-1"):
            target += f"?{query}"
        return await member.client.request(
            request.method,
            URL(target, encoded=True),
            data=body or None,
            headers=CIMultiDict(headers),
            skip_auto_headers=("user-agent", "content-type", "accept", "accept-encoding"),
            allow_redirects=False,
        )

    async def _whole(
        self, member: FleetEngine, request: Request, body: bytes, *more: tuple[str, str]
    ) -> Response:
        """Returns an engine's whole response. Raises ``aiohttp.ClientError``."""
        return await _read(await self.send(member, request, body, *more))

    async def _at(self, home: str, request: Request, body: bytes) -> Response:
        """Returns the response of the engine that serves what an engine keeps; waits for it."""
        deadline = time.monotonic() + WAIT_S
        while (left := deadline - time.monotonic()) > 0:
            member = await self.view.wait(lambda: self.view.at(home), left)
            if member is None:
                break
            header = [] if member.name == home else [(HOME, home)]
            try:
                # every request of Tinker's clients may be sent again: they do so themselves
                with self.view.sending(member, None):
                    response = await self._whole(member, request, body, *header)
                if response.status_code != 421:
                    return response
                await asyncio.sleep(PERIOD_S)  # the home has just moved: the next reports say where
            except aiohttp.ClientError:
                self.view.lose(member)
        return _unavailable(request, f"engine {home} is being started again")

    async def _first(self, request: Request, body: bytes) -> Response:
        """Returns the response of the first engine that does not refuse, the least loaded first."""
        refused: list[Response] = []
        deadline = time.monotonic() + WAIT_S
        while not refused and (left := deadline - time.monotonic()) > 0:
            if not await self.view.wait(self.view.up, left):
                break
            for choice in self.view.choices(None, next(self.numbers)):
                member = self.view.members[choice.engine]
                try:
                    response = await self._whole(member, request, body)
                except aiohttp.ClientError:
                    self.view.lose(member)
                    continue
                if response.status_code not in REFUSALS:
                    return response
                refused.append(response)
        return refused[0] if refused else _unavailable(request, "no engine is up yet")

    async def _open_session(self, request: Request, body: bytes) -> Response:
        """Opens a session at the engine with the fewest policies in training."""
        if not await self.view.wait(self.view.up, WAIT_S):
            return _unavailable(request, "no engine is up yet")
        member = min(self.view.up(), key=lambda one: (one.report.policies, one.sessions, one.name))
        member.sessions += 1
        return await self._at(member.name, request, body)

    async def _everywhere(self, request: Request, body: bytes) -> Response:
        """Returns the first failure of all engines, else one's success."""
        members = self.view.up()
        if len(members) < len(self.view.members):
            return _unavailable(request, "an engine is being started")
        answers = await asyncio.gather(*(self._whole(one, request, body) for one in members))
        return max(answers, key=lambda answer: answer.status_code)

    async def _list(self, request: Request, path: str) -> Response:
        """Returns the rows of all engines."""
        query = dict(request.query_params)
        try:
            limit, offset = int(query.get("limit", 20)), int(query.get("offset", 0))
        except ValueError:
            return await self._first(request, b"")  # an engine says what is wrong
        if path in places.PAGED:
            query |= {"limit": str(limit + offset), "offset": "0"}
        scope = {**request.scope, "query_string": urllib.parse.urlencode(query).encode()}
        asked = Request(scope)
        answers = await asyncio.gather(*(self._at(home, asked, b"") for home in self.view.homes()))
        if (worst := max(answers, key=lambda answer: answer.status_code)).status_code != 200:
            return worst
        read = [json.loads(bytes(answer.body)) for answer in answers]
        return JSONResponse(places.LISTS[path](read, limit, offset))

    # -- samples

    async def _resolve(self, name: Any, tenant: str) -> tuple[str | None, str]:
        """Returns what the chooser places a name by, and the pinned revision; an engine resolves
        names that the catalog does not have.
        """
        if name in self.view.names():
            return None, pins.BASE
        if not isinstance(name, str) or "|" in name or name.startswith("tinker://"):
            return (name if isinstance(name, str) else None), ""
        try:
            found = await asyncio.to_thread(self._catalog.resolve, name, tenant)
            await self._leases.hold(found.digest)
        except UserError:
            return name, ""
        # the engine that answers draws the arm of an open canary
        return found.digest, found.digest if found.canary is None else ""

    async def hold(self, digest: str) -> None:
        """Keeps the bytes that an answer is drawn from; those of no catalog have no lease."""
        with contextlib.suppress(UserError):
            await self._leases.hold(digest)

    async def _sample(self, request: Request, body: bytes) -> Response:
        try:
            given = json.loads(body)
        except ValueError:
            given = None
        fields = given if isinstance(given, dict) else {}
        tenant = request.scope["state"]["tenant"]
        key, revision = await self._resolve(fields.get("model"), tenant)
        # a response that follows another one is where that is
        near = places.named(request.url.path, body, True) if given else None
        pin = Pin(revision, "", secrets.randbits(32), int(time.time()))
        offer = _Offer(self, request, body, key, pin, near)
        found = await offer.next()
        if isinstance(found, Response):
            return found
        kind = found.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            return await offer.whole(found)
        stream = offer.events(found)
        response = StreamingResponse(stream, found.status)
        response.raw_headers = _kept(found.raw_headers)
        return response

    # -- operators

    async def _ready(self, _: Request) -> Response:
        ready = {name: member.report.ready for name, member in self.view.members.items()}
        if all(ready.values()):
            return JSONResponse({"status": "ready", "engines": ready})
        waiting = ", ".join(name for name, done in ready.items() if not done)
        return JSONResponse({"status": f"waiting for {waiting}", "engines": ready}, 503)

    async def _own_metrics(self, _: Request) -> Response:
        text = await asyncio.to_thread(generate_latest, self._metrics)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _state(self, request: Request) -> Response:
        """Returns the state of every engine, and the front's view of it."""
        engines = {}
        for name, member in self.view.members.items():
            report = member.report
            shown = {"pid": report.pid, "url": report.url, "up": member.is_up}
            shown |= {"ready": report.ready, "in_flight": member.in_flight}
            shown |= {"trouble": member.trouble, "age_s": round(time.monotonic() - member.at, 2)}
            if member.is_up:
                answer = await self._at(name, request, b"")
                shown["state"] = json.loads(bytes(answer.body))
            engines[name] = shown
        return JSONResponse({"front": {"pid": os.getpid()}, "engines": engines})


class _Offer:
    """One request to sample, from engine to engine until it is answered."""

    def __init__(
        self,
        front: Front,
        request: Request,
        body: bytes,
        key: str | None,
        pin: Pin,
        near: str | None,
    ):
        self.front, self.view, self.request, self.body = front, front.view, request, body
        self.key, self.pin, self.near = key, pin, near
        self.number = next(front.numbers)
        self.member: FleetEngine | None = None
        self.has_begun = False
        # ends with the response, however that ends
        self._counted = request.scope["state"]["counted"].enter_context(contextlib.ExitStack())

    def _order(self) -> Iterator[tuple[FleetEngine, str]]:
        choices: Iterable[Choice] = self.view.choices(self.key, self.number)
        if self.near is not None:
            choices = sorted(choices, key=lambda one: one.engine != self.near)  # stable
        return ((self.view.members[one.engine], one.reason) for one in choices)

    async def next(self) -> aiohttp.ClientResponse | Response:
        """Returns the response of the first engine that accepts, its body unread; or the refusal of
        all of them: of 429 the one that may be tried first, and 404 only if all say so.
        """
        refused: list[Response] = []
        deadline = time.monotonic() + WAIT_S
        while not refused and (left := deadline - time.monotonic()) > 0:
            if not await self.view.wait(self.view.up, left):
                break
            for member, reason in self._order():
                if not self.has_begun:
                    self.pin.id = f"{member.name}.{secrets.token_hex(12)}"
                length, body = self.pin.before(self.body)
                self.front.offers.labels(member.name, reason).inc()
                self._counted.close()
                self._counted.enter_context(self.view.sending(member, self.key))
                try:
                    header = (pins.HEADER, length)
                    found = await self.front.send(member, self.request, body, header)
                    if found.status not in REFUSALS:
                        self.member, self.pin.accepted = member, True
                        # the engine resolves a name, and may answer by a stand-in
                        own = found.headers.get("x-mint-revision", self.pin.revision)
                        if own not in (self.pin.revision, pins.BASE):
                            await self.front.hold(own)
                        self.pin.revision = own
                        return found
                    refused.append(await _read(found))
                except aiohttp.ClientError:
                    self.view.lose(member)
                    continue
                self.front.refusals.labels(member.name, str(found.status)).inc()
                if found.status == 429:
                    member.refused_until = time.monotonic() + _retry_s(refused[-1])
        self._counted.close()
        if not refused:
            return _unavailable(self.request, "no engine is up")

        def rank(one: Response) -> tuple[bool, bool, float]:
            return one.status_code == 404, one.status_code != 429, _retry_s(one)

        return min(refused, key=rank)

    async def whole(self, found: aiohttp.ClientResponse | Response) -> Response:
        """Returns a whole answer, of the next engine if one dies while it samples."""
        while not isinstance(found, Response):
            try:
                return await _read(found)
            except aiohttp.ClientError:
                self._lose()
            found = await self.next()
        return found

    def _lose(self) -> None:
        assert self.member is not None, "it has accepted"
        self.view.lose(self.member)

    async def events(self, found: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Yields the events of a stream; where an engine dies, the next one's from there on."""
        self.has_begun = True
        while True:
            try:
                async with found:
                    async for event in _events(found):
                        if pins.is_comment(event):
                            self.pin.follow(event)
                        else:
                            yield event.encode()
                return
            except aiohttp.ClientError:
                self._lose()
            self.front.continued.inc()
            again = await self.next()
            if isinstance(again, Response):
                yield b"data: " + bytes(again.body) + b"\n\n"
                return
            found = again


async def _events(found: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yields whole events of a stream, each with its blank line."""
    text = b""
    async for part in found.content.iter_any():
        *events, text = (text + part).split(b"\n\n")
        for event in events:
            yield event.decode() + "\n\n"


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(found: aiohttp.ClientResponse) -> Response:
    """Returns an engine's whole response as the client gets it."""
    async with found:
        response = Response(await found.read(), found.status)
    length = (b"content-length", str(len(response.body)).encode())
    response.raw_headers = [*_kept(found.raw_headers), *([] if found.status == 204 else [length])]
    return response


def _retry_s(refused: Response) -> float:
    """Returns the seconds after which an engine that refused may be asked again."""
    if (ms := refused.headers.get("retry-after-ms")) is not None:
        return float(ms) / 1e3
    return float(refused.headers.get("retry-after", 0))


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Returns the headers of an engine's response that are the client's too."""
    own = _OWN_HEADERS - {b"content-encoding"} | {b"x-request-id"}
    return [(name.lower(), value) for name, value in headers if name.lower() not in own]


def _unavailable(request: Request, reason: str) -> Response:
    openai = request.url.path.startswith(OPENAI_PATHS)
    body = error_body(503, f"{reason}: ask again in some seconds", openai)
    return JSONResponse(body, 503, {"retry-after": "2"})


def make(front: Front, **gate: Any) -> Any:
    """Returns the ASGI application: the gate before a front. The engines have gates of their own,
    to which the client's keys are sent on; ``gate``: arguments of ``Gate``.
    """
    gated = Gate(front, **gate)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        state = {**scope.get("state", {}), "sent": list(scope["headers"])}
        inner: Any = gated
        if scope["path"].startswith("/console"):  # browsers sign in at their engine
            inner, state = front, state | {"tenant": "-"}
        await inner({**scope, "state": state}, receive, send)

    return app
