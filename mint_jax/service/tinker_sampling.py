"""Tinker's sampling: sampling sessions of a base or of saved weights, and samples, which only this
process keeps.
"""

import asyncio
import dataclasses
import zlib
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.models.paged import PAGE
from mint_jax.residency.loads import QueueFull
from mint_jax.rollout.request import Completion
from mint_jax.rollout.stream import Stream
from mint_jax.service.answers import Answer, group_of
from mint_jax.service.durable import Unavailable
from mint_jax.service.futures import Conflict
from mint_jax.service.handlers import body_of, off_loop, tenant_of
from mint_jax.service.quotas import Busy
from mint_jax.service.server import Server
from mint_jax.service.tinker_types import CreateSampler, SamplerRef
from mint_jax.service.wire import samples as wire_samples

CLONE = 1_000_000_000  # the n-th copy of a client numbers its samples from n times this


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
        message = await off_loop(len(body), lambda: wire_samples.Message(body))
        if message.sampling_session_id is not None:
            group, place = message.sampling_session_id, message.seq_id
            digest = self.server.sampler(tenant, group).digest
        else:  # SDKs before sampling sessions: a repeated request cannot be recognised
            group, place = "", None
            digest = self._weights(tenant, message.model_path, message.base_model)
        clone = 0 if place is None else place // CLONE
        answer, new = server.answers.begin(group_of(tenant, group, clone), place, blake3_of(body))
        if new:
            try:
                await off_loop(len(body), lambda: self._sample(answer, message, tenant, digest))
            except (QueueFull, Busy):
                server.answers.withdraw(answer)
                raise
            except UserError as reason:
                server.answers.end(answer, failure=reason)
        ids = [f"{answer.id}.{i}" for i in range(answer.count)]
        return JSONResponse({"request_id": answer.id, "sample_sequence_ids": ids})

    def _sample(
        self, answer: Answer, message: wire_samples.Message, tenant: str, digest: str | None
    ) -> None:
        server = self.server
        eos = () if server.base.tokenizer is None else server.base.tokenizer.eos_ids
        # a sample without a limit may take the cache's capacity, less a page at each end
        room = min(server.base.cfg.context, max(1, server.engine.cache.most - 2) * PAGE)
        # without a seed a repeated request is another sample
        spec = message.spec(room, eos, zlib.crc32(answer.id.encode()))
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


def _bytes_of(completion: Completion) -> int:
    """Estimates the bytes of a completion in memory, with its numbers as Python objects."""
    done = completion
    numbers = (done.tokens, done.logprobs, done.drawn_logprobs, done.prompt_logprobs)
    tables = (done.top_logprobs, done.top_prompt_logprobs)
    tables += (done.target_prompt_logprobs, done.prompt_alternatives)
    pairs = sum(len(place) for table in tables for place in table or ())
    routes = sum(x.nbytes for x in (done.routes, done.prompt_routes) if x is not None)
    return 1000 + 40 * sum(len(one or ()) for one in numbers) + 120 * pairs + routes
