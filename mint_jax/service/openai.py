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
from collections.abc import AsyncIterator
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
from mint_jax.service.handlers import body_of, tenant_of
from mint_jax.service.handover import Handover, Inbox
from mint_jax.service.openai_answers import Answer
from mint_jax.service.openai_types import OPENAI, TOO_LONG, Bounds, ChatBody, CompletionBody
from mint_jax.service.queries import ModelsQuery, query_of
from mint_jax.service.responses import (
    Response,
    ResponseBody,
    Store,
    chat_body_of,
    conversation_of,
    own_names,
)
from mint_jax.service.server import Server
from mint_jax.service.text_stream import TokenTexts
from mint_jax.service.validation import BadRequest, check, parse
from mint_jax.service.weights import Model, Taken

HEADER = "x-mint-revision"
EVENTS = "text/event-stream"


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
        answer, streams = await asyncio.to_thread(self._start, raw, tenant, kind)
        headers = {HEADER: answer.model.digest or "base"}
        if answer.spec.body.stream:
            events = self._events(answer, streams, request.receive)
            first = await anext(events)  # an earlier failure has its own status

            async def chained() -> AsyncIterator[str]:
                yield first
                async for text in events:
                    yield text

            headers["cache-control"] = "no-cache"
            return StreamingResponse(chained(), media_type=EVENTS, headers=headers)
        async with _watched(streams, request.receive):
            handover, ends = self._handover(), [asyncio.Event() for _ in streams]
            for stream, end in zip(streams, ends):
                stream.when_done(lambda _, end=end: handover.give(end.set))
            for end in ends:
                await end.wait()
            body = answer.whole([stream.result(0) for stream in streams])
        return HttpResponse(json.dumps(body), headers=headers, media_type="application/json")

    def _start(self, raw: bytes, tenant: str, kind: Any) -> tuple[Answer | Response, list[Stream]]:
        """Validates a body and submits its prompts to the engine, one stream for each; runs in a
        thread.

        Raises:
            UserError, QueueFull: none of its prompts are left in the engine.
        """
        body = parse(kind, raw)
        model = self._server.weights.resolve(body.model, tenant)
        self._server.base.need_tokenizer()
        if not self._server.engine.is_serving:
            raise Unavailable("sampling has stopped: retry once the server is up again")
        if not isinstance(body, ResponseBody):
            answer = self._answer(body, model)
            return answer, self._submit(answer, tenant)
        messages = conversation_of(body, tenant, self._store)
        try:
            answer = self._answer(check(ChatBody, chat_body_of(body, messages)), model)
            streams = self._submit(answer, tenant)
        except BadRequest as error:
            raise own_names(error) from None
        return Response(answer, body, messages, tenant, self._store), streams

    def _answer(self, body: CompletionBody | ChatBody, model: Model) -> Answer:
        base, cache = self._server.base, self._server.engine.cache
        tokenizer = base.need_tokenizer()
        assert self._texts is not None, "the base has a tokenizer"
        # an answer may take the cache's capacity for one sample, less a page at each end
        room = min(base.cfg.context, max(1, cache.most - 2) * PAGE)
        self.bounds.check(body, room)
        if isinstance(body, CompletionBody):
            spec = openai_types.completion_of(body, tokenizer)
        else:
            spec = openai_types.chat_of(body, tokenizer, room)
        return Answer(spec, model, self._texts, tokenizer.decode, self._fingerprint)

    def _submit(self, answer: Answer, tenant: str) -> list[Stream]:
        spec, streams = answer.spec, []
        request = dataclasses.replace(spec.request, revision=answer.model.digest, tenant=tenant)
        try:
            for prompt in spec.prompts:
                seed = secrets.randbits(32) if spec.body.seed is None else request.seed
                one = dataclasses.replace(request, prompt=prompt.tokens, seed=seed)
                streams.append(self._server.submit(one))
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

    async def _events(
        self, answer: Answer | Response, streams: list[Stream], receive: Receive
    ) -> AsyncIterator[str]:
        """Yields the text of a streamed answer, all events of a dispatch at once."""
        inbox, left, started = Inbox(self._handover()), len(streams), False
        written: Any = answer.written
        async with _watched(streams, receive):
            for number, stream in enumerate(streams):
                inbox.follow(number, stream)
            while left:
                arrived = await inbox.take()
                try:
                    chunks: list[Any] = answer.chunks(
                        [(n, piece) for n, piece in arrived if piece is not None]
                    )
                    for number in [n for n, piece in arrived if piece is None]:
                        chunks += answer.last_chunks(number, streams[number].result(0))
                        left -= 1
                except Exception as error:
                    if not started:
                        raise
                    failed = json.loads(bytes(errors.answer(error, openai=True).body))["error"]
                    chunks, left = answer.failed(failed), 0
                else:
                    if not left:
                        chunks += answer.usage([stream.result(0) for stream in streams])
                started = True
                yield "".join(written(chunk) for chunk in chunks)
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
        body, load = await body_of(openai_types.LoadAdapter, request), self._server.weights.load
        place = (tenant_of(request), bool(body.load_inplace))
        try:
            model = await asyncio.to_thread(load, body.lora_name, body.lora_path, *place)
        except Taken as taken:
            raise BadRequest("lora_name", str(taken)) from None
        text = f"Success: adapter {body.lora_name!r} is loaded, revision {model.digest}."
        return PlainTextResponse(text)

    async def unload_lora_adapter(self, request: Request) -> HttpResponse:
        name, tenant = (
            (await body_of(openai_types.UnloadAdapter, request)).lora_name,
            tenant_of(request),
        )
        await asyncio.to_thread(self._server.weights.unload, name, tenant)
        return PlainTextResponse(f"Success: adapter {name!r} is unloaded.")


@contextlib.asynccontextmanager
async def _watched(streams: list[Stream], receive: Receive) -> AsyncIterator[None]:
    """Cancels streams when the client disconnects or the block ends."""

    def cancel() -> None:
        for stream in streams:
            if not stream.done:
                stream.cancel()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        cancel()
