"""OpenAI's API over one engine, with vLLM's fields and its endpoints for adapters, under ``/v1``
and ``/oai/api/v1``.

    GET  /models  /models/{name}                          the base, loaded adapters, the tenant's
    policies POST /completions  /chat/completions  /responses      one body, or server-sent events
    GET, DELETE /responses/{id}                           responses that were kept POST
    /load_lora_adapter  /unload_lora_adapter         vLLM's

A name is resolved once a request; the answer names the revision in ``mint_revision`` and
``x-mint-revision`` (``base`` for the bare base). Handlers are plain ASGI: a body is read, resolved,
tokenised and checked in a thread, the rest costs the loop one wake-up for all that a dispatch of
the engine brought. Who leaves cancels what it asked for.
"""

import asyncio
import contextlib
import dataclasses
import json
import math
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import mint_jax
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.storage.interface import StorageFailed
from mint_jax.errors import UserError
from mint_jax.models.base import Base
from mint_jax.models.paged import PAGE
from mint_jax.residency.loads import QueueFull
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import BadField, ContextExceeded
from mint_jax.rollout.request import Request as Asking
from mint_jax.rollout.stream import Piece, Stream
from mint_jax.service import fields, openai_types, responses
from mint_jax.service.durable import Unavailable
from mint_jax.service.exchange import release
from mint_jax.service.growing import TokenTexts
from mint_jax.service.handover import Handover, Inbox
from mint_jax.service.openai_answers import Answer
from mint_jax.service.openai_types import TOO_LONG, Asked, Bounds
from mint_jax.service.quotas import Busy, OverQuota
from mint_jax.service.responses import Response, Store, Unknown
from mint_jax.service.weights import Model, NotFound, Taken, Weights

PREFIXES = ("/v1", "/oai/api/v1")
MOST_LISTED = 1000
HEADER = "x-mint-revision"


# of a body, the model that it names, and the tenant
Make = Callable[[dict[str, Any], Model, str], Answer | Response]


class Serves(Protocol):
    """What is served.

    Attributes:
        engine: while it serves; made with the base tokenizer's ``decode``.
        weights: their names.
        bounds: of fields.
    """

    engine: Engine
    base: Base
    weights: Weights
    bounds: Bounds

    def tenant(self, request: Request) -> str:
        """Who asks."""
        ...

    def submit(self, request: Asking) -> Stream:
        """Asks the engine, where the tenant may."""
        ...


def routes(serves: Serves) -> list[Route]:
    """The routes, to be mounted in an app whose loop they then use."""
    api = _Api(serves)
    endpoints = [
        ("/models", "GET", api.models),
        ("/models/{name:path}", "GET", api.model),
        ("/completions", "POST", api.completions),
        ("/chat/completions", "POST", api.chats),
        ("/responses", "POST", api.responses),
        ("/responses/{id}", "GET", api.response),
        ("/responses/{id}", "DELETE", api.delete_response),
        ("/load_lora_adapter", "POST", api.load),
        ("/unload_lora_adapter", "POST", api.unload),
    ]
    return [
        Route(prefix + path, _Endpoint(call), methods=[method])
        for prefix in PREFIXES
        for path, method, call in endpoints
    ]


def sampling(serves: Serves) -> "tuple[_Endpoint, _Endpoint]":
    """ASGI apps of ``/completions`` and ``/chat/completions``, for other paths than those of the
    API.
    """
    api = _Api(serves)
    return _Endpoint(api.completions), _Endpoint(api.chats)


class _Endpoint:
    """An ASGI app of a function that answers by itself, or returns what is to be answered; errors
    become OpenAI's.
    """

    def __init__(self, call: Callable[..., Any]):
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sending(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            response = await self._call(Request(scope, receive), sending)
            if response is not None:
                await response(scope, receive, sending)
        except ClientDisconnect:
            return
        except Exception as error:
            if begun:
                raise
            response = failure(error)
            await response(scope, receive, send)
            if response.status_code == 500:  # for the server's log
                raise


def failure(error: Exception) -> JSONResponse:
    """What a caller is told of an error."""
    release(error)
    status, kind, param, code, headers = (
        400,
        "invalid_request_error",
        getattr(error, "param", None),
        None,
        {},
    )
    if isinstance(error, NotFound):
        status, param, code = 404, "model", "model_not_found"
    elif isinstance(error, QueueFull):
        status, kind, code = 429, "rate_limit_error", error.reason
        headers = {
            "retry-after": str(math.ceil(error.retry_after_s)),
            "retry-after-ms": str(math.ceil(1000 * error.retry_after_s)),
        }
    elif isinstance(error, Busy):
        status, kind, code, headers = (
            429,
            "rate_limit_error",
            "tokens",
            {"retry-after": str(math.ceil(error.retry_after_s))},
        )
    elif isinstance(error, OverQuota):
        status, kind, code = 403, "permission_error", "insufficient_quota"
    elif isinstance(error, DatabaseFailed | StorageFailed | Unavailable):
        status, kind = 503, "server_error"
    elif isinstance(error, Unknown) and error.param is None:
        status = 404
    elif isinstance(error, fields.BadRequest):
        code = error.code
    elif not isinstance(error, UserError):
        status, kind = 500, "server_error"
    message = str(error) if status != 500 else "the server failed: its log says why"
    return JSONResponse({"error": shape(message, kind, param, code)}, status, headers)


def shape(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """Returns an error as OpenAI's API has it."""
    return {"message": message, "type": kind, "param": param, "code": code}


@dataclasses.dataclass(frozen=True)
class _Job:
    """A body that is being sampled for: a stream for each prompt."""

    asked: Asked
    answer: Answer | Response
    streams: list[Stream]

    @property
    def header(self) -> str:
        return self.answer.model.digest or "base"

    def cancel(self) -> None:
        for stream in self.streams:
            if not stream.done:
                stream.cancel()


class _Api:
    def __init__(self, serves: Serves):
        self._serves = serves
        tokenizer = serves.base.tokenizer
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._handover: Handover | None = None
        self._store = Store()
        self._fingerprint = f"mint-jax-{mint_jax.__version__}-{serves.base.fingerprint[:12]}"

    # -- completions and chats

    async def completions(self, request: Request, send: Send) -> HttpResponse | None:
        return await self._serve(request, send, self._completion)

    async def chats(self, request: Request, send: Send) -> HttpResponse | None:
        return await self._serve(request, send, self._chat)

    async def responses(self, request: Request, send: Send) -> HttpResponse | None:
        return await self._serve(request, send, self._response)

    def _completion(self, body: dict[str, Any], model: Model, tenant: str) -> Answer:
        return self._answer(openai_types.completion_of, body, model)

    def _chat(self, body: dict[str, Any], model: Model, tenant: str) -> Answer:
        return self._answer(openai_types.chat_of, body, model)

    def _response(self, body: dict[str, Any], model: Model, tenant: str) -> Response:
        asked = responses.asked_of(body, tenant, self._store)
        try:
            return Response(
                self._answer(openai_types.chat_of, asked.chat, model), asked, tenant, self._store
            )
        except fields.BadRequest as error:
            raise responses.own_names(error) from None

    def _answer(self, read: Callable[..., Asked], body: dict[str, Any], model: Model) -> Answer:
        base, engine = self._serves.base, self._serves.engine
        # of an answer without a limit: what the cache holds of one sample, a page for each of its
        # two ends left out
        room = min(base.cfg.context, max(1, engine.cache.most - 2) * PAGE)
        assert self._texts is not None, "there is a tokenizer"
        tokenizer = base.need_tokenizer()
        asked = read(body, tokenizer, room, self._serves.bounds)
        return Answer(asked, model, self._texts, tokenizer.decode, self._fingerprint)

    async def _serve(self, request: Request, send: Send, make: Make) -> HttpResponse | None:
        raw, tenant = await request.body(), self._serves.tenant(request)
        beginning = asyncio.ensure_future(asyncio.to_thread(self._begin, raw, tenant, make))
        try:
            job = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(
                lambda begun: begun.cancelled() or begun.exception() or begun.result().cancel()
            )
            raise
        async with _watched(job, request.receive):
            if job.asked.stream:
                await self._stream(job, send)
                return None
            await self._ended(job)
            body = job.answer.whole([stream.result(0) for stream in job.streams])
        return HttpResponse(
            json.dumps(body), headers={HEADER: job.header}, media_type="application/json"
        )

    def _begin(self, raw: bytes, tenant: str, make: Make) -> _Job:
        """Reads a body and asks the engine; in a thread.

        Raises:
            UserError, QueueFull: nothing of it is left in the engine.
        """
        try:
            return self._submitted(fields.parse(raw), tenant, make)
        except RecursionError:
            raise fields.BadRequest(None, "the body is nested too deeply: flatten it") from None

    def _submitted(self, body: dict[str, Any], tenant: str, make: Make) -> _Job:
        model = self._serves.weights.resolve(openai_types.model_of(body), tenant)
        self._serves.base.need_tokenizer()
        if not self._serves.engine.is_serving:
            raise Unavailable("sampling has stopped: ask when the server is there again")
        answer = make(body, model, tenant)
        asked = answer.asked
        streams: list[Stream] = []
        try:
            for prompt in asked.prompts:
                seed = asked.request.seed if asked.seeded else secrets.randbits(32)
                made = dataclasses.replace(
                    asked.request,
                    prompt=prompt.tokens,
                    seed=seed,
                    revision=model.digest,
                    tenant=tenant,
                )
                streams.append(self._serves.submit(made))
        except BaseException as error:
            for stream in streams:
                stream.cancel()
            if isinstance(error, BadField):
                code = TOO_LONG if isinstance(error, ContextExceeded) else None
                refused = fields.BadRequest(
                    asked.names.get(error.field, error.field), str(error), code
                )
                raise (
                    responses.own_names(refused) if isinstance(answer, Response) else refused
                ) from None
            raise
        return _Job(asked, answer, streams)

    def _hand(self) -> Handover:
        """The way into the running loop."""
        loop = asyncio.get_running_loop()
        if self._handover is None or self._handover.loop is not loop:
            self._handover = Handover(loop)
        return self._handover

    async def _ended(self, job: _Job) -> None:
        """Returns when all streams have."""
        handover, left = self._hand(), len(job.streams)
        ended = handover.loop.create_future()

        def one() -> None:
            nonlocal left
            left -= 1
            if not left and not ended.done():
                ended.set_result(None)

        for stream in job.streams:
            stream.when_done(lambda _: handover.give(one))
        await ended

    async def _stream(self, job: _Job, send: Send) -> None:
        """Sends chunks as they come. The response begins with the first of them, so that what fails
        before has its status.
        """
        answer, inbox, left = job.answer, Inbox(self._hand()), len(job.streams)
        for number, stream in enumerate(job.streams):
            inbox.follow(number, stream)
        begun = False
        while left:
            came = await inbox.take()
            try:
                chunks, ended = _read(job, came)
            except Exception as error:
                if not begun:
                    raise
                await _send(
                    send, job, answer.failed(json.loads(bytes(failure(error).body))["error"])
                )
                break
            left -= ended
            if not begun:
                headers = [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                ]
                headers.append((HEADER.encode(), job.header.encode()))
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                begun = True
            await _send(send, job, chunks)
        else:
            if job.asked.usage:
                await _send(
                    send, job, [answer.usage_chunk([stream.result(0) for stream in job.streams])]
                )
        await send({"type": "http.response.body", "body": answer.end.encode(), "more_body": False})

    async def response(self, request: Request, _: Send) -> HttpResponse:
        return JSONResponse(
            self._store.get(self._serves.tenant(request), request.path_params["id"])[0]
        )

    async def delete_response(self, request: Request, _: Send) -> HttpResponse:
        id = request.path_params["id"]
        self._store.delete(self._serves.tenant(request), id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    # -- models and adapters

    async def models(self, request: Request, _: Send) -> HttpResponse:
        limit, after = request.query_params.get("limit", "100"), request.query_params.get("after")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MOST_LISTED):
            raise fields.wrong("limit", limit, f"an integer from 1 to {MOST_LISTED}")
        page = await asyncio.to_thread(
            self._serves.weights.page, self._serves.tenant(request), after, int(limit)
        )
        ids = [card["id"] for card in page.cards]
        edges = (
            {"first_id": ids[0], "last_id": ids[-1]} if ids else {"first_id": None, "last_id": None}
        )
        return JSONResponse({"object": "list", "data": page.cards, "has_more": page.more} | edges)

    async def model(self, request: Request, _: Send) -> HttpResponse:
        name = request.path_params["name"]
        return JSONResponse(
            await asyncio.to_thread(self._serves.weights.card, name, self._serves.tenant(request))
        )

    async def load(self, request: Request, _: Send) -> HttpResponse:
        body = fields.parse(await request.body())
        name, path = (
            fields.text(key, body.get(key), empty=False) for key in ("lora_name", "lora_path")
        )
        inplace = fields.flag(body, "load_inplace")
        try:
            model = await asyncio.to_thread(
                self._serves.weights.load, name, path, self._serves.tenant(request), inplace
            )
        except Taken as taken:
            raise fields.BadRequest("lora_name", str(taken)) from None
        return PlainTextResponse(f"Success: adapter {name!r} is loaded, revision {model.digest}.")

    async def unload(self, request: Request, _: Send) -> HttpResponse:
        body = fields.parse(await request.body())
        name = fields.text("lora_name", body.get("lora_name"), empty=False)
        await asyncio.to_thread(self._serves.weights.unload, name, self._serves.tenant(request))
        return PlainTextResponse(f"Success: adapter {name!r} is unloaded.")


def _read(job: _Job, came: Sequence[tuple[int, Piece | None]]) -> tuple[list[dict[str, Any]], int]:
    """Chunks for what has come, and how many streams have ended."""
    chunks = job.answer.chunks([(number, piece) for number, piece in came if piece is not None])
    ended = [number for number, piece in came if piece is None]
    for number in ended:
        chunks += job.answer.last_chunks(number, job.streams[number].result(0))
    return chunks, len(ended)


async def _send(send: Send, job: _Job, chunks: Sequence[dict[str, Any]]) -> None:
    if chunks:
        data = "".join(map(job.answer.written, chunks))
        await send({"type": "http.response.body", "body": data.encode(), "more_body": True})


@contextlib.asynccontextmanager
async def _watched(job: _Job, receive: Receive) -> AsyncIterator[None]:
    """Cancels a job's streams as soon as who asked has left, and what is left of them when the
    block ends.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        job.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        job.cancel()
