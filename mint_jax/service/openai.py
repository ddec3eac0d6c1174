"""OpenAI's API over one engine, with vLLM's fields and its adapter endpoints.

A model's name is resolved once per request; the answer names the revision in ``mint_revision`` and
``x-mint-revision`` (``base`` for the bare base). A body is read, resolved, tokenised and validated
in a thread; each dispatch of the engine wakes the event loop once. Disconnecting cancels the
client's samples.
"""

import asyncio
import contextlib
import dataclasses
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.responses import Response as HttpResponse
from starlette.types import Receive

import mint_jax
from mint_jax.models.paged import PAGE
from mint_jax.rollout.request import BadField, ContextExceeded
from mint_jax.rollout.stream import Stream
from mint_jax.service import errors, openai_types
from mint_jax.service.durable import Unavailable
from mint_jax.service.growing import TokenTexts
from mint_jax.service.handlers import body_of, tenant_of
from mint_jax.service.handover import Handover, Inbox
from mint_jax.service.openai_answers import Answer
from mint_jax.service.openai_types import (
    OPENAI,
    TOO_LONG,
    Bounds,
    ChatBody,
    CompletionBody,
    LoadAdapter,
    UnloadAdapter,
    limited,
)
from mint_jax.service.queries import ModelsQuery, query_of
from mint_jax.service.responses import Response, ResponseBody, Store, own_names, response_of
from mint_jax.service.server import Server
from mint_jax.service.validation import BadRequest, check, parse
from mint_jax.service.weights import Model, Taken

HEADER = "x-mint-revision"


@dataclasses.dataclass(frozen=True)
class _Job:
    """A body that is being sampled, one stream for each prompt."""

    answer: Answer | Response
    streams: list[Stream]

    @property
    def headers(self) -> dict[str, str]:
        return {HEADER: self.answer.model.digest or "base"}

    def cancel(self) -> None:
        for stream in self.streams:
            if not stream.done:
                stream.cancel()


class OpenAI:
    """The handlers of one server.

    Args:
        server: its engine was made with the base tokenizer's ``decode``.
        bounds: limits of fields.
    """

    def __init__(self, server: Server, bounds: Bounds = OPENAI):
        self._server, self.bounds = server, bounds
        tokenizer = server.base.tokenizer
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._handovers: dict[asyncio.AbstractEventLoop, Handover] = {}
        self._store = Store()
        self._fingerprint = f"mint-jax-{mint_jax.__version__}-{server.base.fingerprint[:12]}"

    # -- completions, chats and responses

    async def completions(self, request: Request) -> HttpResponse:
        return await self._serve(request, CompletionBody)

    async def chats(self, request: Request) -> HttpResponse:
        return await self._serve(request, ChatBody)

    async def responses(self, request: Request) -> HttpResponse:
        return await self._serve(request, ResponseBody)

    async def _serve(self, request: Request, kind: Any) -> HttpResponse:
        raw, tenant = await request.body(), tenant_of(request)
        job = await asyncio.to_thread(self._start, raw, tenant, kind)
        if job.answer.spec.stream:
            events = self._events(job, request.receive)
            first = await anext(events)  # an earlier failure has its own status
            headers = {"cache-control": "no-cache"} | job.headers
            return StreamingResponse(
                _chained(first, events), media_type="text/event-stream", headers=headers
            )
        async with _watched(job, request.receive):
            await self._ended(job)
            body = job.answer.whole([stream.result(0) for stream in job.streams])
        return HttpResponse(json.dumps(body), headers=job.headers, media_type="application/json")

    @property
    def _room(self) -> int:
        """Maximum number of tokens of an answer: the cache's capacity for one sample, less a page
        at each of its ends.
        """
        base, cache = self._server.base, self._server.engine.cache
        return min(base.cfg.context, max(1, cache.most - 2) * PAGE)

    def _start(self, raw: bytes, tenant: str, kind: Any) -> _Job:
        """Validates a body and submits its prompts to the engine; runs in a thread.

        Raises:
            UserError, QueueFull: none of its prompts are left in the engine.
        """
        body = parse(limited(kind, self.bounds, self._room), raw)
        model = self._server.weights.resolve(body.model, tenant)
        self._server.base.need_tokenizer()
        if not self._server.engine.is_serving:
            raise Unavailable("sampling has stopped: retry once the server is up again")
        if not isinstance(body, ResponseBody):
            answer = self._answer(body, model)
            return _Job(answer, self._submit(answer, tenant))
        spec = response_of(body, tenant, self._store)
        try:
            answer = self._answer(
                check(limited(ChatBody, self.bounds, self._room), spec.chat), model
            )
            streams = self._submit(answer, tenant)
        except BadRequest as error:
            raise own_names(error) from None
        return _Job(Response(answer, spec, tenant, self._store), streams)

    def _answer(self, body: CompletionBody | ChatBody, model: Model) -> Answer:
        tokenizer = self._server.base.need_tokenizer()
        assert self._texts is not None, "the base has a tokenizer"
        if isinstance(body, CompletionBody):
            spec = openai_types.completion_of(body, tokenizer)
        else:
            spec = openai_types.chat_of(body, tokenizer, self._room)
        return Answer(spec, model, self._texts, tokenizer.decode, self._fingerprint)

    def _submit(self, answer: Answer, tenant: str) -> list[Stream]:
        spec, streams = answer.spec, []
        try:
            for prompt in spec.prompts:
                seed = spec.request.seed if spec.seeded else secrets.randbits(32)
                request = dataclasses.replace(
                    spec.request,
                    prompt=prompt.tokens,
                    seed=seed,
                    revision=answer.model.digest,
                    tenant=tenant,
                )
                streams.append(self._server.submit(request))
        except BaseException as error:
            for stream in streams:
                stream.cancel()
            if isinstance(error, BadField):
                code = TOO_LONG if isinstance(error, ContextExceeded) else None
                name = spec.names.get(error.field, error.field)
                raise BadRequest(name, str(error), code) from None
            raise
        return streams

    def _handover(self) -> Handover:
        """Returns the handover into the running loop."""
        loop = asyncio.get_running_loop()
        return self._handovers.setdefault(loop, Handover(loop))

    async def _ended(self, job: _Job) -> None:
        """Returns when all streams have ended."""
        handover = self._handover()
        events = [asyncio.Event() for _ in job.streams]
        for stream, event in zip(job.streams, events):
            stream.when_done(lambda _, event=event: handover.give(event.set))
        for event in events:
            await event.wait()

    async def _events(self, job: _Job, receive: Receive) -> AsyncIterator[str]:
        """Yields the text of a stream as it comes."""
        answer, inbox, left, started = job.answer, Inbox(self._handover()), len(job.streams), False
        async with _watched(job, receive):
            for number, stream in enumerate(job.streams):
                inbox.follow(number, stream)
            while left:
                came = await inbox.take()
                try:
                    chunks = answer.chunks([(n, piece) for n, piece in came if piece is not None])
                    for number in [n for n, piece in came if piece is None]:
                        chunks += answer.last_chunks(number, job.streams[number].result(0))
                        left -= 1
                except Exception as error:
                    if not started:
                        raise
                    failed = json.loads(bytes(errors.answer(error, openai=True).body))["error"]
                    yield _text(answer, answer.failed(failed))
                    break
                started = True
                yield _text(answer, chunks)
            else:
                if answer.spec.usage:
                    results = [stream.result(0) for stream in job.streams]
                    yield _text(answer, [answer.usage_chunk(results)])
            yield answer.end

    async def response(self, request: Request) -> HttpResponse:
        return JSONResponse(self._store.get(tenant_of(request), request.path_params["id"])[0])

    async def delete_response(self, request: Request) -> HttpResponse:
        id = request.path_params["id"]
        self._store.delete(tenant_of(request), id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    # -- models and adapters

    async def models(self, request: Request) -> HttpResponse:
        query, tenant = query_of(ModelsQuery, request), tenant_of(request)
        page = await asyncio.to_thread(self._server.weights.page, tenant, query.after, query.limit)
        ids = [card["id"] for card in page.cards] or [None]
        edges = {"has_more": page.more, "first_id": ids[0], "last_id": ids[-1]}
        return JSONResponse({"object": "list", "data": page.cards} | edges)

    async def model(self, request: Request) -> HttpResponse:
        name, tenant = request.path_params["name"], tenant_of(request)
        return JSONResponse(await asyncio.to_thread(self._server.weights.card, name, tenant))

    async def load_lora_adapter(self, request: Request) -> HttpResponse:
        body, tenant, load = await body_of(LoadAdapter, request), tenant_of(request), self._load
        model = await asyncio.to_thread(load, body, tenant)
        text = f"Success: adapter {body.lora_name!r} is loaded, revision {model.digest}."
        return PlainTextResponse(text)

    def _load(self, body: LoadAdapter, tenant: str) -> Model:
        inplace = bool(body.load_inplace)
        try:
            return self._server.weights.load(body.lora_name, body.lora_path, tenant, inplace)
        except Taken as taken:
            raise BadRequest("lora_name", str(taken)) from None

    async def unload_lora_adapter(self, request: Request) -> HttpResponse:
        name, tenant = (await body_of(UnloadAdapter, request)).lora_name, tenant_of(request)
        await asyncio.to_thread(self._server.weights.unload, name, tenant)
        return PlainTextResponse(f"Success: adapter {name!r} is unloaded.")


def _text(answer: Answer | Response, chunks: Sequence[dict[str, Any]]) -> str:
    return "".join(map(answer.written, chunks))


async def _chained(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for text in rest:
        yield text


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
