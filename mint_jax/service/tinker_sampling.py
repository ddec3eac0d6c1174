"""Tinker's sampling, and its futures: samplers of a base or of saved weights, samples, which only
this process keeps, and results of samples and of training requests.
"""

import asyncio
import dataclasses
import math
import zlib
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.models.paged import PAGE
from mint_jax.residency.loads import QueueFull
from mint_jax.rollout.request import Completion
from mint_jax.rollout.stream import Stream
from mint_jax.service import answers as answers_
from mint_jax.service import checkpoints, training_calls
from mint_jax.service import futures as futures_
from mint_jax.service.answers import PREFIX, Answer, group_of
from mint_jax.service.durable import Unavailable
from mint_jax.service.errors import reason_of
from mint_jax.service.futures import Category, Conflict, Failed
from mint_jax.service.handlers import body_of, off_loop, tenant_of
from mint_jax.service.quotas import Busy
from mint_jax.service.server import Server
from mint_jax.service.tinker_types import (
    CancelFuture,
    CreateSampler,
    RetrieveFuture,
    RetrieveFutures,
    SamplerRef,
)
from mint_jax.service.wire import forward_backward as wire_training
from mint_jax.service.wire import samples as wire_samples

CLONE = 1_000_000_000  # the n-th copy of a client numbers its samples from n times this
POLL_S = 40.0  # the SDK gives up after 45
GROUP_POLL_S = 30.0
LARGE = 1 << 20  # bytes of a result from which a client can ask for its size first
PROTOBUF = "application/x-protobuf"


class Sampling:
    """The handlers of one server."""

    def __init__(self, server: Server):
        self.server = server

    async def create_sampling_session(self, request: Request) -> Response:
        body, tenant = await body_of(CreateSampler, request), tenant_of(request)
        session, place, path = body.session_id, body.sampling_session_seq_id, body.model_path
        self.server.tenancy.need_open(tenant, session)
        digest = self._weights(tenant, path, body.base_model)
        if path is None:
            add: Any = self.server.book.add_sampler
            of: tuple[Any, ...] = (None, None)
        else:
            add, of = self.server.checkpoints.add_sampler, (path,)
        sampler = await asyncio.to_thread(add, session, place, tenant, *of)
        if (sampler.path, sampler.digest) != (path, digest):
            raise Conflict(
                f"sampling session {sampler.id!r} is of {sampler.path or self.server.name}: give"
                " another a new number"
            )
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    def _weights(self, tenant: str, path: str | None, base_model: str | None) -> str | None:
        """Returns the digest of the weights to sample; None for the bare base."""
        if path is None and base_model is None:
            raise UserError("neither model_path nor base_model is given: give one")
        self.server.need_base(base_model)
        if path is None:
            return None
        return self.server.checkpoints.digest(tenant, path)

    async def join_sampling_session(self, request: Request) -> Response:
        id = (await body_of(SamplerRef, request)).sampling_session_id
        count = await asyncio.to_thread(self.server.book.join_sampler, tenant_of(request), id)
        return JSONResponse({"type": "join_sampling_session", "client_counter": count})

    async def sampler(self, request: Request) -> Response:
        found = self.server.sampler(tenant_of(request), request.path_params["sampler"])
        return JSONResponse(
            {"sampler_id": found.id, "base_model": self.server.name, "model_path": found.path}
        )

    async def asample(self, request: Request) -> Response:
        body, tenant, server = await request.body(), tenant_of(request), self.server
        if trouble := server.trouble(sampling=True):
            raise Unavailable(trouble)
        where = await off_loop(len(body), lambda: wire_samples.place_of(body))
        if where.sampling_session_id is not None:
            group, place = where.sampling_session_id, where.seq_id
            digest = self.server.sampler(tenant, group).digest
        else:  # SDKs before sampling sessions: a repeated request cannot be recognised
            group, place = "", None
            digest = self._weights(tenant, where.model_path, where.base_model)
        clone = 0 if place is None else place // CLONE
        answer, new = server.answers.begin(group_of(tenant, group, clone), place, blake3_of(body))
        if new:
            try:
                await off_loop(len(body), lambda: self._sample(answer, body, tenant, digest))
            except (QueueFull, Busy):
                server.answers.withdraw(answer)
                raise
            except UserError as reason:
                server.answers.end(answer, failure=reason)
        ids = [f"{answer.id}.{i}" for i in range(answer.count)]
        return JSONResponse({"request_id": answer.id, "sample_sequence_ids": ids})

    def _sample(self, answer: Answer, body: bytes, tenant: str, digest: str | None) -> None:
        server = self.server
        eos = () if server.base.tokenizer is None else server.base.tokenizer.eos_ids
        # a sample without a limit may take the cache's capacity, less a page at each end
        room = min(server.base.cfg.context, max(1, server.engine.cache.most - 2) * PAGE)
        # without a seed a repeated request is another sample
        spec = wire_samples.spec_of(body, room, eos, zlib.crc32(answer.id.encode()))
        stream = server.submit(dataclasses.replace(spec.request, revision=digest, tenant=tenant))
        answer.what, answer.count = stream, stream.request.n

        def ended(stream: Stream) -> None:
            try:
                completions = stream.result()
            except Exception as failure:
                server.answers.end(answer, failure=failure)
                return
            if any(completion.finish == "cancelled" for completion in completions):
                failure = UserError("this sample was cancelled before it was done: ask again")
                server.answers.end(answer, failure=failure)
                return
            for i, completion in enumerate(completions):
                server.sequences.add(f"{answer.id}.{i}", tenant, completion)
            nbytes = sum(map(_bytes_of, completions)) + 40 * len(spec.request.prompt)
            server.answers.end(answer, (spec, completions), nbytes=nbytes)

        stream.when_done(ended)

    # -- futures

    async def retrieve_future(self, request: Request) -> Response:
        body, tenant = await body_of(RetrieveFuture, request), tenant_of(request)
        id, small = body.request_id, body.allow_metadata_only
        protobuf = PROTOBUF in request.headers.get("accept", "")
        if id.startswith(PREFIX):
            return await self._answer(id, tenant, protobuf, small)
        futures = self.server.durable.futures
        model, call = futures.about(id)
        if self.server.book.owner(model) != tenant:
            raise futures_.unknown(id)
        outcome = await futures.wait_task(id, POLL_S)
        if outcome is None:
            return _not_yet()
        then = BackgroundTask(futures.delivered, id)
        if isinstance(outcome, Failed):
            failure = {"error": outcome.error, "category": outcome.category.value}
            return JSONResponse(failure, background=then)
        raw = outcome.result
        if call != "forward_backward":
            result = _result(call, model, training_calls.decode_result(raw))
            return JSONResponse(result, background=then)
        body = await off_loop(
            len(raw), lambda: wire_training.encode(training_calls.decode_result(raw), protobuf)
        )
        return _payload(body, protobuf, small, then)

    async def _answer(self, id: str, tenant: str, protobuf: bool, small: bool) -> Response:
        answers = self.server.answers
        self._own(id, tenant)
        if (answer := await answers.wait(id, POLL_S)) is None:
            return _not_yet()
        then = BackgroundTask(answers.delivered, answer)
        if answer.failure is not None:
            category = Category.USER if isinstance(answer.failure, UserError) else Category.SERVER
            failure = {"error": reason_of(answer.failure), "category": category.value}
            return JSONResponse(failure, background=then)
        if isinstance(answer.value, dict):
            return JSONResponse(answer.value, background=then)
        spec, completions = answer.value
        body = await asyncio.to_thread(wire_samples.encode, completions, spec, protobuf)
        return _payload(body, protobuf, small, then)

    def _own(self, id: str, tenant: str) -> Answer:
        """Returns a tenant's answer."""
        answer = self.server.answers.find(id)
        if not answer.group.startswith(f"{tenant}/"):
            raise answers_.unknown(id)
        return answer

    async def retrieve_futures(self, request: Request) -> Response:
        body, tenant = await body_of(RetrieveFutures, request), tenant_of(request)
        sampler = self.server.sampler(tenant, body.target.sampling_session_id).id
        group = group_of(tenant, sampler, body.target.cloned_sampler_id)
        answers = self.server.answers
        received = body.retrieved_request_ids or ()
        answers.acknowledge(id for id in received if answers.is_in(id, group))
        timeout = GROUP_POLL_S if body.timeout is None else min(GROUP_POLL_S, body.timeout)
        ended, cursor = await answers.wait_group(group, body.prev_cursor, timeout)
        found = [
            {"request_id": one.id, "state": "finished" if one.failure is None else "failed"}
            for one in ended
        ]
        return JSONResponse({"completions": found, "cursor": cursor})

    async def cancel_future(self, request: Request) -> Response:
        body, tenant = await body_of(CancelFuture, request), tenant_of(request)
        single = [] if body.request_id is None else [body.request_id]
        ids = [*(body.request_ids or ()), *single]
        for answer in [self._own(id, tenant) for id in ids]:
            if isinstance(answer.what, Stream):
                answer.what.cancel()
        self.server.engine.wake()
        return JSONResponse({})


def _bytes_of(completion: Completion) -> int:
    """Estimates the bytes of a completion in memory, with its numbers as Python objects."""
    done = completion
    numbers = (done.tokens, done.logprobs, done.drawn_logprobs, done.prompt_logprobs)
    tables = (done.top_logprobs, done.top_prompt_logprobs)
    tables += (done.target_prompt_logprobs, done.prompt_alternatives)
    pairs = sum(len(place) for table in tables for place in table or ())
    routes = sum(x.nbytes for x in (done.routes, done.prompt_routes) if x is not None)
    return 1000 + 40 * sum(len(one or ()) for one in numbers) + 120 * pairs + routes


def _not_yet() -> Response:
    return JSONResponse({"queue_state": "active"}, 408)


def _payload(body: bytes, protobuf: bool, small: bool, then: BackgroundTask) -> Response:
    """Returns a result; only the size of a large one, if the client asks for that first."""
    if small and len(body) > LARGE:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": len(body)})
    return Response(body, media_type=PROTOBUF if protobuf else "application/json", background=then)


def _result(call: str, model: str, result: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON of a call's result."""
    if call == "create":
        return {"type": "create_model", "model_id": model}
    if call == "load":
        return {"type": "load_weights", "path": result["path"], "model_id": model}
    if call == "optim":  # JSON has no infinity; ``skipped`` says that the gradient had one
        return {"metrics": {name: value for name, value in result.items() if math.isfinite(value)}}
    kind = checkpoints.parse(result["path"]).kind if "path" in result else "sampler_weights"
    suffix = {"weights": "", "sampler_weights": "_for_sampler", "external_weights": "_external"}
    return {"type": f"save_weights{suffix[kind]}"} | result
