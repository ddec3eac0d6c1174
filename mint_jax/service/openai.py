"""OpenAI's API over one engine, with vLLM's fields and its adapter endpoints, under ``/v1`` and
``/oai/api/v1``.

A model's name is resolved once per request; the answer names the revision in ``mint_revision`` and
``x-mint-revision`` (``base`` for the bare base). Handlers are plain ASGI: a body is read, resolved,
tokenised and validated in a thread; each dispatch of the engine wakes the event loop once.
Disconnecting cancels the client's samples.
"""

import asyncio
import contextlib
import dataclasses
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import mint_jax
from mint_jax.models.base import Base
from mint_jax.models.paged import PAGE
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import BadField, ContextExceeded
from mint_jax.rollout.request import Request as SampleRequest
from mint_jax.rollout.stream import Piece, Stream
from mint_jax.service import errors, openai_types
from mint_jax.service.durable import Unavailable
from mint_jax.service.growing import TokenTexts
from mint_jax.service.handover import Handover, Inbox
from mint_jax.service.openai_answers import Answer
from mint_jax.service.openai_types import (
    TOO_LONG,
    Bounds,
    ChatBody,
    CompletionBody,
    CompletionSpec,
    LoadAdapter,
    UnloadAdapter,
    limited,
)
from mint_jax.service.queries import ModelsQuery, query_of
from mint_jax.service.responses import Response, ResponseBody, Store, own_names, response_of
from mint_jax.service.validation import BadRequest, check, parse
from mint_jax.service.weights import Model, Taken, Weights

PREFIXES = ("/v1", "/oai/api/v1")
HEADER = "x-mint-revision"

Kind = type[CompletionBody] | type[ChatBody] | type[ResponseBody]


class Serves(Protocol):
    """The server behind the API.

    Attributes:
        engine: running; made with the base tokenizer's ``decode``.
        weights: resolves model names.
        bounds: limits of fields.
    """

    engine: Engine
    base: Base
    weights: Weights
    bounds: Bounds

    def tenant(self, request: Request) -> str:
        """Returns the tenant of a request."""
        ...

    def submit(self, request: SampleRequest) -> Stream:
        """Submits to the engine within the tenant's quota."""
        ...


def routes(serves: Serves) -> list[Route]:
    """Returns the routes, for an app in whose event loop they run."""
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
    """Returns ASGI apps of ``/completions`` and ``/chat/completions``, for other paths."""
    api = _Api(serves)
    return _Endpoint(api.completions), _Endpoint(api.chats)


class _Endpoint:
    """An ASGI app of a function that sends its answer or returns it; errors get OpenAI's form."""

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
            response = errors.answer(error, openai=True)
            await response(scope, receive, send)
            if response.status_code == 500:  # for the server's log
                raise


@dataclasses.dataclass(frozen=True)
class _Job:
    """A body that is being sampled, one stream for each prompt."""

    spec: CompletionSpec
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
        return await self._serve(request, send, CompletionBody)

    async def chats(self, request: Request, send: Send) -> HttpResponse | None:
        return await self._serve(request, send, ChatBody)

    async def responses(self, request: Request, send: Send) -> HttpResponse | None:
        return await self._serve(request, send, ResponseBody)

    def _answer(
        self, body: CompletionBody | ChatBody | ResponseBody, model: Model, tenant: str
    ) -> Answer | Response:
        assert self._texts is not None, "the base has a tokenizer"
        tokenizer = self._serves.base.need_tokenizer()
        if isinstance(body, CompletionBody):
            spec = openai_types.completion_of(body, tokenizer)
        elif isinstance(body, ChatBody):
            spec = openai_types.chat_of(body, tokenizer, self._room)
        else:
            asked = response_of(body, tenant, self._store)
            try:
                chat = check(limited(ChatBody, self._serves.bounds, self._room), asked.chat)
                answer = self._answer(chat, model, tenant)
            except BadRequest as error:
                raise own_names(error) from None
            assert isinstance(answer, Answer)
            return Response(answer, asked, tenant, self._store)
        return Answer(spec, model, self._texts, tokenizer.decode, self._fingerprint)

    @property
    def _room(self) -> int:
        """Maximum number of tokens of an answer: the cache's capacity for one sample, less a page
        at each of its ends.
        """
        base, cache = self._serves.base, self._serves.engine.cache
        return min(base.cfg.context, max(1, cache.most - 2) * PAGE)

    async def _serve(self, request: Request, send: Send, kind: Kind) -> HttpResponse | None:
        raw, tenant = await request.body(), self._serves.tenant(request)
        beginning = asyncio.ensure_future(asyncio.to_thread(self._begin, raw, tenant, kind))
        try:
            job = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(
                lambda begun: begun.cancelled() or begun.exception() or begun.result().cancel()
            )
            raise
        async with _watched(job, request.receive):
            if job.spec.stream:
                await self._stream(job, send)
                return None
            await self._ended(job)
            body = job.answer.whole([stream.result(0) for stream in job.streams])
        return HttpResponse(
            json.dumps(body), headers={HEADER: job.header}, media_type="application/json"
        )

    def _begin(self, raw: bytes, tenant: str, kind: Kind) -> _Job:
        """Validates a body and submits its prompts to the engine; runs in a thread.

        Raises:
            UserError, QueueFull: none of its prompts are left in the engine.
        """
        try:
            body = parse(limited(kind, self._serves.bounds, self._room), raw)
            return self._submitted(body, tenant)
        except RecursionError:
            raise BadRequest(None, "the body is nested too deeply: flatten it") from None

    def _submitted(self, body: CompletionBody | ChatBody | ResponseBody, tenant: str) -> _Job:
        model = self._serves.weights.resolve(body.model, tenant)
        self._serves.base.need_tokenizer()
        if not self._serves.engine.is_serving:
            raise Unavailable("sampling has stopped: retry once the server is up again")
        answer = self._answer(body, model, tenant)
        spec = answer.spec
        streams: list[Stream] = []
        try:
            for prompt in spec.prompts:
                request = dataclasses.replace(
                    spec.request,
                    prompt=prompt.tokens,
                    seed=spec.request.seed if spec.seeded else secrets.randbits(32),
                    revision=model.digest,
                    tenant=tenant,
                )
                streams.append(self._serves.submit(request))
        except BaseException as error:
            for stream in streams:
                stream.cancel()
            if isinstance(error, BadField):
                code = TOO_LONG if isinstance(error, ContextExceeded) else None
                name = spec.names.get(error.field, error.field)
                refused = BadRequest(name, str(error), code)
                raise (own_names(refused) if isinstance(answer, Response) else refused) from None
            raise
        return _Job(spec, answer, streams)

    def _hand(self) -> Handover:
        """Returns the handover into the running loop."""
        loop = asyncio.get_running_loop()
        if self._handover is None or self._handover.loop is not loop:
            self._handover = Handover(loop)
        return self._handover

    async def _ended(self, job: _Job) -> None:
        """Returns when all streams have ended."""
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
        """Sends chunks as they come. The response starts with the first chunk, so that an earlier
        failure has its status.
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
                failed = json.loads(bytes(errors.answer(error, openai=True).body))
                await _send(send, job, answer.failed(failed["error"]))
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
            if job.spec.usage:
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
        query, tenant = query_of(ModelsQuery, request), self._serves.tenant(request)
        page = await asyncio.to_thread(self._serves.weights.page, tenant, query.after, query.limit)
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
        body, tenant = parse(LoadAdapter, await request.body()), self._serves.tenant(request)
        name, inplace = body.lora_name, bool(body.load_inplace)
        try:
            model = await asyncio.to_thread(
                self._serves.weights.load, name, body.lora_path, tenant, inplace
            )
        except Taken as taken:
            raise BadRequest("lora_name", str(taken)) from None
        return PlainTextResponse(f"Success: adapter {name!r} is loaded, revision {model.digest}.")

    async def unload(self, request: Request, _: Send) -> HttpResponse:
        name = parse(UnloadAdapter, await request.body()).lora_name
        await asyncio.to_thread(self._serves.weights.unload, name, self._serves.tenant(request))
        return PlainTextResponse(f"Success: adapter {name!r} is unloaded.")


def _read(job: _Job, came: Sequence[tuple[int, Piece | None]]) -> tuple[list[dict[str, Any]], int]:
    """Returns the chunks of new pieces, and the number of streams that have ended."""
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
    """Cancels a job's streams when the client disconnects or the block ends."""

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
