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
from mint_jax.service import tinker_types as types
from mint_jax.service.answers import PREFIX, Answer, group_of
from mint_jax.service.durable import Unavailable
from mint_jax.service.errors import reason_of
from mint_jax.service.futures import Category, Conflict
from mint_jax.service.quotas import Busy
from mint_jax.service.server import Server
from mint_jax.service.validation import body_of, off_loop, parse, tenant_of
from mint_jax.service.wire import forward_backward, samples

CLONE = 1_000_000_000  # the n-th copy of a client numbers its samples from n times this
POLL_S = 40.0  # the SDK gives up after 45
GROUP_POLL_S = 30.0
LARGE = 1 << 20  # bytes of a result from which a client can ask for its size first
PROTOBUF = "application/x-protobuf"
Result = tuple[bytes | dict[str, Any], BackgroundTask]  # the latter marks it as delivered


class Sampling:
    """The handlers of one server."""

    def __init__(self, server: Server):
        self.server, self.answers = server, server.answers

    async def create_sampling_session(self, request: Request) -> Response:
        body, tenant = await body_of(types.CreateSampler, request), tenant_of(request)
        path, server = body.model_path, self.server
        server.tenancy.need_open(tenant, body.session_id)
        digest = self._weights(tenant, path, body.base_model)
        new = body.session_id, body.sampling_session_seq_id, tenant
        if path is None:
            sampler = await asyncio.to_thread(server.book.add_sampler, *new, None, None)
        else:
            sampler = await asyncio.to_thread(server.checkpoints.add_sampler, *new, path)
        if (sampler.path, sampler.digest) != (path, digest):
            raise Conflict(
                f"sampling session {sampler.id!r} is of {sampler.path or server.name}: give another"
                " a new number"
            )
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    def _weights(self, tenant: str, path: str | None, base_model: str | None) -> str | None:
        """Returns the digest of the weights to sample; None for the bare base."""
        if path is None and base_model is None:
            instead = "model_path or base_model, or to asample a sampling_session_id"
            raise UserError(f"the request names no weights: give {instead}")
        self.server.need_base(base_model)
        return None if path is None else self.server.checkpoints.digest(tenant, path)

    async def sampler(self, request: Request) -> Response:
        found = self.server.sampler(tenant_of(request), request.path_params["sampler"])
        answer = {"sampler_id": found.id, "base_model": self.server.name}
        return JSONResponse(answer | {"model_path": None if found.is_inflight else found.path})

    async def asample(self, request: Request) -> Response:
        body, tenant = await request.body(), tenant_of(request)
        if trouble := self.server.trouble(sampling=True):
            raise Unavailable(trouble)
        where = await off_loop(len(body), lambda: parse(types.SampleRequest, body))
        if (sampler := where.sampling_session_id) is not None:
            found = self.server.sampler(tenant, sampler)
            place, digest = where.seq_id, self.server.book.digest_of(found)
            if place is None:
                raise UserError("the request has a sampling_session_id and no seq_id: give one")
        else:  # SDKs before sampling sessions: a repeated request cannot be recognised
            place, digest = None, self._weights(tenant, where.model_path, where.base_model)
        group = group_of(tenant, sampler or "", (place or 0) // CLONE)
        answer, new = self.answers.begin(group, place, blake3_of(body))
        if new:
            try:
                await off_loop(len(body), lambda: self._sample(answer, body, tenant, digest))
            except (QueueFull, Busy):
                self.answers.withdraw(answer)
                raise
            except UserError as reason:
                self.answers.end(answer, failure=reason)
        ids = [f"{answer.id}.{i}" for i in range(answer.count)]
        return JSONResponse({"request_id": answer.id, "sample_sequence_ids": ids})

    def _sample(self, answer: Answer, body: bytes, tenant: str, digest: str | None) -> None:
        server = self.server
        eos = () if server.base.tokenizer is None else server.base.tokenizer.eos_ids
        # a sample without a limit may take the cache's capacity, less a page at each end
        room = min(server.base.cfg.context, max(1, server.engine.calls.most - 2) * PAGE)
        # without a seed a repeated request is another sample
        spec = samples.spec_of(body, room, eos, zlib.crc32(answer.id.encode()))
        stream = server.submit(dataclasses.replace(spec.request, revision=digest, tenant=tenant))
        answer.what, answer.count = stream, stream.request.n

        def ended(stream: Stream) -> None:
            try:
                completions = stream.result()
                if any(completion.finish == "cancelled" for completion in completions):
                    raise UserError("this sample was cancelled before it was done: ask again")
            except Exception as failure:
                server.answers.end(answer, failure=failure)
                return
            for i, completion in enumerate(completions):
                server.sequences.add(f"{answer.id}.{i}", tenant, completion, spec.recorded)
            nbytes = sum(map(_bytes_of, completions)) + 40 * len(spec.request.prompt)
            server.answers.end(answer, (spec, completions), nbytes=nbytes)

        stream.when_done(ended)

    # -- futures

    async def retrieve_future(self, request: Request) -> Response:
        body, tenant = await body_of(types.RetrieveFuture, request), tenant_of(request)
        protobuf = PROTOBUF in request.headers.get("accept", "")
        get = self._sampled if body.request_id.startswith(PREFIX) else self._trained
        if (found := await get(body.request_id, tenant, protobuf)) is None:
            return JSONResponse({"queue_state": "active"}, 408)
        result, then = found
        if isinstance(result, dict):
            return JSONResponse(result, background=then)
        if body.allow_metadata_only and len(result) > LARGE:
            size = {"status": "complete_metadata", "response_payload_size": len(result)}
            return JSONResponse(size)
        kind = PROTOBUF if protobuf else "application/json"
        return Response(result, media_type=kind, background=then)

    async def _trained(self, id: str, tenant: str, protobuf: bool) -> Result | None:
        futures = self.server.durable.futures
        model, call = futures.about(id)
        if self.server.book.owner(model) != tenant:
            raise futures_.unknown(id)
        if (outcome := await futures.wait(id, POLL_S)) is None:
            return None
        then = BackgroundTask(futures.delivered, id)
        raw, category = outcome
        if category is not None:
            return {"error": raw.decode(), "category": category.value}, then
        if call != "forward_backward":
            return _result(call, model, training_calls.decode_result(raw)), then

        def encode() -> bytes:
            return forward_backward.encode(training_calls.decode_result(raw), protobuf)

        return await off_loop(len(raw), encode), then

    async def _sampled(self, id: str, tenant: str, protobuf: bool) -> Result | None:
        self._own(id, tenant)
        if (answer := await self.answers.wait(id, POLL_S)) is None:
            return None
        then = BackgroundTask(self.answers.delivered, answer)
        if answer.failure is not None:
            category = Category.USER if isinstance(answer.failure, UserError) else Category.SERVER
            return {"error": reason_of(answer.failure), "category": category.value}, then
        if isinstance(answer.value, dict):
            return answer.value, then
        spec, completions = answer.value
        return await asyncio.to_thread(samples.encode, completions, spec, protobuf), then

    def _own(self, id: str, tenant: str) -> Answer:
        """Returns a tenant's answer."""
        answer = self.answers.find(id)
        if not answer.group.startswith(f"{tenant}/"):
            raise answers_.unknown(id)
        return answer

    async def retrieve_futures(self, request: Request) -> Response:
        body, tenant = await body_of(types.RetrieveFutures, request), tenant_of(request)
        sampler = self.server.sampler(tenant, body.target.sampling_session_id).id
        group = group_of(tenant, sampler, body.target.cloned_sampler_id)
        received = body.retrieved_request_ids or ()
        self.answers.acknowledge(group, received)
        timeout = GROUP_POLL_S if body.timeout is None else min(GROUP_POLL_S, body.timeout)
        ended, cursor = await self.answers.wait_group(group, body.prev_cursor, timeout)
        found = [
            {"request_id": one.id, "state": "finished" if one.failure is None else "failed"}
            for one in ended
        ]
        return JSONResponse({"completions": found, "cursor": cursor})

    async def cancel_future(self, request: Request) -> Response:
        body, tenant = await body_of(types.CancelFuture, request), tenant_of(request)
        single = [] if body.request_id is None else [body.request_id]
        for answer in [self._own(id, tenant) for id in [*(body.request_ids or ()), *single]]:
            if isinstance(answer.what, Stream):
                answer.what.cancel()
        self.server.engine.wake()
        return JSONResponse({})


def _bytes_of(done: Completion) -> int:
    """Estimates the bytes of a completion in memory, with its numbers as Python objects."""
    numbers = (done.tokens, done.logprobs, done.drawn_logprobs, done.prompt_logprobs)
    tables = (done.top_logprobs, done.top_prompt_logprobs)
    tables += (done.target_prompt_logprobs, done.prompt_alternatives)
    pairs = sum(len(place) for table in tables for place in table or ())
    routes = sum(x.nbytes for x in (done.routes, done.prompt_routes) if x is not None)
    return 1000 + 40 * sum(len(one or ()) for one in numbers) + 120 * pairs + routes


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
