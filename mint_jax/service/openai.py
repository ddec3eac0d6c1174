"""OpenAI's API over one engine, with vLLM's fields and its adapter endpoints.

A model's name is resolved once per request; the answer names the revision in ``mint_revision`` and
``x-mint-revision`` (``base`` for the bare base). A body is read, resolved, tokenised and validated
in a thread; each dispatch of the engine wakes the event loop once. Disconnecting cancels the
client's samples.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.responses import Response as HttpResponse

import mint_jax
from mint_jax.catalog.records.canaries import Canary
from mint_jax.catalog.records.names import full_name
from mint_jax.models.paged import PAGE
from mint_jax.rollout.request import BadField, ContextExceeded
from mint_jax.rollout.stream import Piece, Stream
from mint_jax.rollout.witness import Witness
from mint_jax.service import errors, pins, responses
from mint_jax.service import openai_types as types
from mint_jax.service.durable import Unavailable
from mint_jax.service.handover import Handover
from mint_jax.service.openai_answers import Answer
from mint_jax.service.pins import Pin
from mint_jax.service.responses import Response, ResponseBody, Store
from mint_jax.service.routes import AUTO, RouteOption, need
from mint_jax.service.server import Server
from mint_jax.service.text_stream import TokenTexts
from mint_jax.service.validation import BadRequest, ModelsQuery, body_of, parse, query_of, tenant_of
from mint_jax.service.weights import Model, Taken

Arrived = list[tuple[int, Piece | None]]  # number of the stream; None: it has ended


class OpenAI:
    """The handlers of one server; ``strict``: OpenAI's limits hold, where the engine could do more.
    The engine decodes text.
    """

    def __init__(self, server: Server, strict: bool = True):
        self._server, self.strict = server, strict
        self._store = Store()
        self._fingerprint = f"mint-jax-{mint_jax.__version__}-{server.base.fingerprint[:12]}"

    @functools.cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self._server.base.need_tokenizer())

    @functools.cached_property
    def _handover(self) -> Handover:
        return Handover(asyncio.get_running_loop())

    async def _serve(self, kind: Any, request: Request) -> HttpResponse:
        tenant = tenant_of(request)
        pin, raw = pins.split(request.headers.get(pins.HEADER), await request.body())
        answer, streams = await asyncio.to_thread(self._start, raw, tenant, kind, pin)
        headers = {"x-mint-revision": answer.model.digest or "base"}
        if answer.takes_reward:
            headers["x-mint-feedback"] = answer.id
        if not answer.spec.body.stream:
            async with _watched(streams, request):
                async for _ in self._arrivals(streams, pieces=False):
                    pass
                body = answer.whole([stream.result(0) for stream in streams])
            return HttpResponse(json.dumps(body), headers=headers, media_type="application/json")
        events = self._events(answer, streams, request)
        first = await anext(events)  # an earlier failure has its own status

        async def chained() -> AsyncIterator[str]:
            yield first
            async for text in events:
                yield text

        headers["cache-control"] = "no-cache"
        return StreamingResponse(chained(), headers=headers, media_type="text/event-stream")

    completions = functools.partialmethod(_serve, types.CompletionBody)
    chats = functools.partialmethod(_serve, types.ChatBody)
    responses = functools.partialmethod(_serve, ResponseBody)

    def _start(
        self, raw: bytes, tenant: str, kind: Any, pin: Pin | None
    ) -> tuple[Answer, list[Stream]]:
        """Validates a body and submits its prompts to the engine, one stream for each; runs in a
        thread.

        Raises:
            UserError, QueueFull: none of its prompts are left in the engine.
        """
        body, base = parse(kind, raw), self._server.base
        key = secrets.token_hex(12) if pin is None else pin.id
        routed = body.model == AUTO and self._server.routes is not None
        routed = routed and not (pin is not None and pin.revision)
        model = Model(AUTO) if routed else self._model(body.model, tenant, pin)
        if not self._server.engine.is_serving:
            raise Unavailable("sampling has stopped: retry once the server is up again")
        # an answer may take the cache's capacity for one sample, less a page at each end
        room = min(base.cfg.context, max(1, self._server.engine.calls.most - 2) * PAGE)
        limits = base.need_tokenizer(), room, self.strict
        about = self._texts, self._fingerprint, pin, key
        try:
            items: Any = []
            if isinstance(body, ResponseBody):
                items = responses.items_of(body, tenant, self._store)
                spec = types.spec_of(responses.chat_of(body, items), *limits)
            else:
                spec = types.spec_of(body, *limits)
            if routed:
                model = self._routed(spec, tenant, key, body.mint_budget_s)
            if model.canary is not None:
                model = self._server.canaries.drawn(model, tenant, key)
            # a reward is of the revision that was drawn, and a stream goes on with its own
            takes_reward = routed or model.canary is not None
            if not takes_reward and not (pin is not None and pin.accepted):
                model = self._server.at_once(model, tenant)
            if isinstance(body, ResponseBody):
                put = functools.partial(self._store.put, tenant, items)
                answer: Answer = Response(body, put, spec, model, *about)
            else:
                answer = Answer(spec, model, *about)
            answer.takes_reward = takes_reward
            streams = self._submit(spec, model, tenant, pin)
        except BadRequest as error:
            raise (responses.own_names(error) if kind is ResponseBody else error) from None
        if spec.body.mint_witness:
            answer.witness = lambda number, sample, done: Witness.of(
                streams[number].request, sample, done, base.fingerprint
            ).to_json()
        return answer, streams

    def _model(self, name: str, tenant: str, pin: Pin | None) -> Model:
        """Returns the revision of a name, or the one that is pinned, under this name."""
        if pin is None or not pin.revision:
            return self._server.weights.resolve(name, tenant)
        if pin.revision == pins.BASE:
            return Model(self._server.name if name == AUTO else name)
        found = self._server.weights.resolve(pin.revision, tenant)
        if name == AUTO and found.policy is not None:
            name = f"{found.policy}@{found.number}"
        return dataclasses.replace(found, name=name)

    def _routed(self, spec: types.Spec, tenant: str, key: str, budget_s: float | None) -> Model:
        """Returns the model that answers a request for ``auto``."""
        if len(spec.prompts) != 1:
            text = f"prompt has {len(spec.prompts)} prompts; auto takes one: ask one by one"
            raise BadRequest("prompt", text)
        [vector] = self._server.vectors([spec.prompts[0].tokens])
        return need(self._server.routes).choose(tenant, vector, key, budget_s)

    def _submit(self, spec: types.Spec, model: Model, tenant: str, pin: Pin | None) -> list[Stream]:
        request = dataclasses.replace(spec.request, revision=model.digest, tenant=tenant)
        streams: list[Stream] = []
        sent = {} if pin is None else pin.sent
        try:
            for number, prompt in enumerate(spec.prompts):
                choices = range(number * request.n, (number + 1) * request.n)
                prefixes = tuple(tuple(sent.get(choice, ())) for choice in choices)
                own: dict[str, Any] = {"prompt": prompt.tokens, "prefixes": prefixes}
                if spec.body.seed is None:
                    drawn = secrets.randbits(32) if pin is None else pin.seed + number
                    own["seed"] = drawn % (1 << 32)
                streams.append(self._server.submit(dataclasses.replace(request, **own)))
        except BaseException as error:
            for stream in streams:
                stream.cancel()
            if not isinstance(error, BadField):
                raise
            code = types.TOO_LONG if isinstance(error, ContextExceeded) else None
            name = spec.names.get(error.field, error.field)
            raise BadRequest(name, str(error), code) from None
        return streams

    async def _arrivals(self, streams: list[Stream], pieces: bool) -> AsyncIterator[Arrived]:
        """Yields what has arrived until all streams have ended: pieces and ends, or only ends."""
        queue: asyncio.Queue[tuple[int, Piece | None]] = asyncio.Queue()
        give = self._handover.give

        def put(number: int, piece: Piece | None) -> None:
            give(queue.put_nowait, (number, piece))

        for number, stream in enumerate(streams):
            if pieces:
                stream.listen(functools.partial(put, number))
            else:
                stream.when_done(lambda _, number=number: put(number, None))
        left = len(streams)
        while left:
            arrived = [await queue.get()]
            while not queue.empty():
                arrived.append(queue.get_nowait())
            left -= sum(piece is None for _, piece in arrived)
            yield arrived

    async def _events(
        self, answer: Answer, streams: list[Stream], request: Request
    ) -> AsyncIterator[str]:
        """Yields the text of a streamed answer, all events of a dispatch at once. Behind each a
        comment says what was sent, if the answer is pinned.
        """
        started = False
        async with _watched(streams, request):
            try:
                async for arrived in self._arrivals(streams, pieces=True):
                    pieces = [(n, piece) for n, piece in arrived if piece is not None]
                    chunks = answer.chunks(answer.unsent(pieces))
                    for number in (n for n, piece in arrived if piece is None):
                        chunks += answer.last_chunks(number, streams[number].result(0))
                    yield _written(chunks) + answer.progress(chunks)
                    started = True
                yield _written(answer.finish([stream.result(0) for stream in streams]))
            except Exception as error:
                if not started:
                    raise
                yield _written(answer.failed(errors.body(error, openai=True)["error"]))
            yield answer.end

    async def response(self, request: Request) -> HttpResponse:
        return JSONResponse(self._store.get(tenant_of(request), request.path_params["id"])[0])

    async def delete_response(self, request: Request) -> HttpResponse:
        id = request.path_params["id"]
        self._store.delete(tenant_of(request), id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def feedback(self, request: Request) -> HttpResponse:
        body, server = await body_of(types.FeedbackBody, request), self._server
        given = tenant_of(request), body.id, body.reward

        def give() -> Canary | None:
            drew = server.canaries.drew(*given[:2])
            routed = server.routes is not None and server.routes.feedback(*given, repeated=drew)
            if routed and not drew:
                return None
            return server.canaries.feedback(*given)

        found = await asyncio.to_thread(give)
        about = {"canary": found.id, "state": found.state} if found else {"state": None}
        return JSONResponse({"object": "feedback", "id": body.id, "reward": body.reward} | about)

    async def route(self, request: Request) -> HttpResponse:
        body, tenant = await body_of(types.RouteBody, request), tenant_of(request)
        routes, encode = need(self._server.routes), self._server.base.need_tokenizer().encode

        def look() -> list[RouteOption]:
            [vector] = self._server.vectors([encode(body.prompt)])
            return routes.options(tenant, vector, body.mint_budget_s)

        options = [
            {"model": model.name, "mint_revision": model.digest}
            | {"cosine": option.arm.cosine, "eta_s": option.arm.eta_s}
            | {"reward": option.reward, "propensity": option.propensity}
            for option, model in await asyncio.to_thread(look)
        ]
        return JSONResponse({"object": "route", "options": options})

    async def describe(self, request: Request) -> HttpResponse:
        body, tenant = await body_of(types.DescribeBody, request), tenant_of(request)
        routes, encode = need(self._server.routes), self._server.base.need_tokenizer().encode
        name = full_name(tenant, body.model)

        def write() -> None:
            vector = None
            if body.prompts:
                vectors = self._server.vectors([encode(prompt) for prompt in body.prompts])
                vector = vectors.mean(0)
            self._server.catalog.describe(name, vector, len(body.prompts), by=tenant)
            routes.refresh()

        await asyncio.to_thread(write)
        about = {"model": body.model, "examples": len(body.prompts)}
        return JSONResponse({"object": "description"} | about)

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
        body, load = await body_of(types.LoadAdapter, request), self._server.weights.load
        place = (tenant_of(request), bool(body.load_inplace))
        try:
            model = await asyncio.to_thread(load, body.lora_name, body.lora_path, *place)
        except Taken as taken:
            raise BadRequest("lora_name", str(taken)) from None
        text = f"Success: adapter {body.lora_name!r} is loaded, revision {model.digest}."
        return PlainTextResponse(text)

    async def unload_lora_adapter(self, request: Request) -> HttpResponse:
        name = (await body_of(types.UnloadAdapter, request)).lora_name
        await asyncio.to_thread(self._server.weights.unload, name, tenant_of(request))
        return PlainTextResponse(f"Success: adapter {name!r} is unloaded.")


def _written(chunks: list[dict[str, Any]]) -> str:
    """Returns server-sent events; those of responses have a type."""
    names = (f"event: {chunk['type']}\n" if "type" in chunk else "" for chunk in chunks)
    return "".join(f"{name}data: {json.dumps(chunk)}\n\n" for name, chunk in zip(names, chunks))


@contextlib.asynccontextmanager
async def _watched(streams: list[Stream], request: Request) -> AsyncIterator[None]:
    """Cancels streams when the client disconnects or the block ends."""

    def cancel() -> None:
        for stream in streams:
            if not stream.done:
                stream.cancel()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        cancel()
