"""Tinker's sessions, models and training requests.

A training request with a valid place (model and number) is accepted. If its content is wrong, its
number is used up and its future fails. A request without a place gets 400, one for a missing or
another tenant's object 404.
"""

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mint_jax.errors import UserError
from mint_jax.service import checkpoints, training_calls
from mint_jax.service.answers import group_of
from mint_jax.service.book import Model, NotFound
from mint_jax.service.errors import LONGEST_REASON, reason_of
from mint_jax.service.futures import Conflict
from mint_jax.service.handlers import body_of, off_loop, tenant_of
from mint_jax.service.server import Server
from mint_jax.service.tinker_types import (
    MAX_METADATA,
    REASONS,
    AdamParams,
    CreateModel,
    CreateSession,
    FinishSession,
    LoadPlace,
    LoadWeights,
    ModelPlace,
    ModelRef,
    OptimStep,
    RequestPlace,
    SaveForSampler,
    SaveWeights,
    SessionRef,
)
from mint_jax.service.training_calls import Call, Create, Load, Refused, Save
from mint_jax.service.validation import parse
from mint_jax.service.wire import forward_backward as wire_training
from mint_jax.train.config import OptimizerConfig

CLIENT_CONFIG = {
    # exchange keys for tokens first, also keys such as sk-... that the SDK would not send otherwise
    "pjwt_auth_enabled": True,
    "proto_compress_fwdbwd": True,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": False,
}
DYNAMIC_CONFIG = {
    "refresh_interval_sec": 300,
    "sample_cancel_enabled": True,
    "sample_cancel_max_batch_size": 64,
}
ADAM = {  # the optimizer's name and Tinker's default of each of ``AdamParams``
    "learning_rate": ("learning_rate", 1e-4),
    "beta1": ("b1", 0.9),
    "beta2": ("b2", 0.95),
    "eps": ("eps", 1e-12),
    "weight_decay": ("weight_decay", 0.0),
    "grad_clip_norm": ("max_grad_norm", 0.0),
}


def _constant(value: dict[str, Any]) -> Callable[[Any, Request], Awaitable[Response]]:
    """Returns a handler that always answers the same."""

    async def handler(self: Any, request: Request) -> Response:
        return JSONResponse(value)

    return handler


class Tinker:
    """The handlers of one server."""

    def __init__(self, server: Server):
        self.server = server

    # -- handshake and sessions

    client_config = _constant(CLIENT_CONFIG)
    dynamic_config = _constant(DYNAMIC_CONFIG)
    healthz = _constant({"status": "ok"})
    telemetry = _constant({"status": "accepted"})

    async def get_server_capabilities(self, request: Request) -> Response:
        context = self.server.base.cfg.context
        model = {"model_name": self.server.name, "max_context_length": context}
        model |= {"trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [model]})

    async def create_session(self, request: Request) -> Response:
        notes = (await body_of(CreateSession, request)).model_dump()
        if len(json.dumps(notes)) > 2 * MAX_METADATA:
            raise UserError(
                f"{', '.join(notes)} have more than {2 * MAX_METADATA} bytes of JSON together:"
                " shorten them"
            )
        id = await asyncio.to_thread(self.server.book.open_session, tenant_of(request), notes)
        return JSONResponse({"type": "create_session", "session_id": id})

    async def session_heartbeat(self, request: Request) -> Response:
        id = (await body_of(SessionRef, request)).session_id
        if not self.server.tenancy.is_open(tenant_of(request), id):
            return JSONResponse({"detail": f"session {id[:80]!r} has ended"}, 410)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, request: Request) -> Response:
        session = self.server.book.session(tenant_of(request), request.path_params["session"])
        body = await body_of(FinishSession, request) if await request.body() else FinishSession()
        reason = None if body.reason is None else body.reason.type
        if reason in REASONS:
            detail, update = (body.detail or "")[:LONGEST_REASON], self.server.book.update_session
            await asyncio.to_thread(update, session, finished=reason, detail=detail or None)
        await asyncio.to_thread(self.server.end_session, session.id)
        return JSONResponse({})

    # -- models

    async def create_model(self, request: Request) -> Response:
        raw, tenant = await request.body(), tenant_of(request)
        place = parse(ModelPlace, raw)
        self.server.tenancy.need_open(tenant, place.session_id)
        id = f"{place.session_id}:train:{place.model_seq_id}"
        about: dict[str, Any] = {"metadata": place.user_metadata}

        def make() -> Call:
            body = parse(CreateModel, raw)
            self.server.need_base(body.base_model)
            lora = {} if body.lora_config is None else body.lora_config.model_dump()
            train = {family: lora.get(family, True) for family in self.server.families}
            config = self.server.adapter_config(lora.get("rank", 32), train)
            about.update(self.server.about(config))
            # the default seed is the model's name, so that a repeated request is the same
            seed = lora.get("seed")
            return Create(config, zlib.crc32(id.encode()) if seed is None else seed)

        call = _call(make)
        await self._add(place, tenant, about)
        return await self._submit(id, tenant, 0, call)

    async def load_weights(self, request: Request) -> Response:
        raw, tenant = await request.body(), tenant_of(request)
        call = _call(lambda: self._load(parse(LoadWeights, raw), tenant))
        if parse(LoadPlace, raw).session_id is None:
            return await self._train(parse(RequestPlace, raw), tenant, lambda: call)
        place = parse(ModelPlace, raw)
        self.server.tenancy.need_open(tenant, place.session_id)
        about: dict[str, Any] = {"metadata": place.user_metadata}
        if isinstance(call, Load):
            row = self.server.book.checkpoint(tenant, *checkpoints.parse(call.path), published=True)
            config = self.server.checkpoints.config(row)
            about |= self.server.about(config)
        await self._add(place, tenant, about)
        return await self._submit(f"{place.session_id}:train:{place.model_seq_id}", tenant, 0, call)

    def _load(self, body: LoadWeights, tenant: str) -> Call:
        self.server.need_base(body.base_model)
        self.server.book.checkpoint(tenant, *checkpoints.parse(body.path), published=True)
        return Load(body.path, body.optimizer, tenant)

    async def _add(self, place: ModelPlace, tenant: str, about: Mapping[str, Any]) -> None:
        """Records a new model, or finds it recorded by an earlier copy of the request."""
        new = place.session_id, place.model_seq_id, tenant, about
        model = await asyncio.to_thread(self.server.tenancy.add_model, *new)
        if model.ended is not None:
            raise Conflict(f"model {model.id!r} has ended: give a new one a new model_seq_id")

    async def get_info(self, request: Request) -> Response:
        model = self._model(tenant_of(request), (await body_of(ModelRef, request)).model_id)
        name, rank = self.server.name, model.details.get("rank")
        arch, tokenizer = self.server.base.cfg.family, self.server.tokenizer
        info = {
            "type": "get_info",
            "model_id": model.id,
            "model_data": {"model_name": name, "tokenizer_id": tokenizer, "arch": arch},
            "is_lora": True,
            "lora_rank": rank,
            "model_name": name,
            "optimizer_config": {"type": "adamw"},
        }
        return JSONResponse(info)

    async def unload_model(self, request: Request) -> Response:
        tenant = tenant_of(request)
        model = self._model(tenant, (await body_of(ModelRef, request)).model_id)
        await asyncio.to_thread(self.server.durable.forget, model.id)
        await asyncio.to_thread(self.server.book.end_model, model.id)
        answer, _ = self.server.answers.begin(group_of(tenant, model.id), None, "")
        self.server.answers.end(answer, {"type": "unload_model", "model_id": model.id})
        return JSONResponse({"request_id": answer.id, "model_id": model.id})

    def _model(self, tenant: str, id: str) -> Model:
        model = self.server.book.model(tenant, id)
        if model.ended is not None:
            raise NotFound(
                f"model {id!r} has ended with its session: load a checkpoint of it into a new one"
            )
        self.server.tenancy.is_open(tenant, model.session)  # counts as a heartbeat
        return model

    # -- training

    async def _train(self, place: RequestPlace, tenant: str, make: Callable[[], Call]) -> Response:
        model = self._model(tenant, place.model_id)
        return await self._submit(model.id, tenant, place.seq_id, _call(make))

    async def _submit(self, model: str, tenant: str, place: int, call: Call) -> Response:
        """Returns the id of a training request. A model's first request creates the model."""
        id = await self.server.submit_training(model, tenant, place + 1, call)
        return JSONResponse({"request_id": id, "model_id": model})

    async def forward_backward(self, request: Request) -> Response:
        body, tenant = await request.body(), tenant_of(request)
        kind = request.headers.get("content-type", "")
        message = await off_loop(len(body), lambda: wire_training.read(body, kind))
        model = self._model(tenant, message.model_id)

        def make() -> Call:
            call, spans = message.batch()
            return self.server.sequences.with_routes(call, spans, tenant)

        call = await off_loop(len(body), lambda: _call(make))
        return await self._submit(model.id, tenant, message.seq_id, call)

    async def optim_step(self, request: Request) -> Response:
        raw, tenant = await request.body(), tenant_of(request)

        def make() -> Call:
            return training_calls.Optim(_adam(parse(OptimStep, raw).adam_params or AdamParams()))

        return await self._train(parse(RequestPlace, raw), tenant, make)

    async def save_weights(self, request: Request) -> Response:
        return await self._save(request, "weights")

    async def save_weights_external(self, request: Request) -> Response:
        return await self._save(request, "external_weights")

    async def _save(self, request: Request, kind: str) -> Response:
        raw, tenant = await request.body(), tenant_of(request)
        place = parse(RequestPlace, raw)
        return await self._train(place, tenant, lambda: _save(kind, parse(SaveWeights, raw)))

    async def save_weights_for_sampler(self, request: Request) -> Response:
        raw, tenant = await request.body(), tenant_of(request)
        place = parse(RequestPlace, raw)
        session = self._model(tenant, place.model_id).session

        def make() -> Call:
            body = parse(SaveForSampler, raw)
            if body.sampling_session_seq_id is None:
                return _save("sampler_weights", body)
            sampler = f"{session}:sample:{body.sampling_session_seq_id}"
            return Save("sampler_weights", None, sampler)

        return await self._train(place, tenant, make)


def _call(make: Callable[[], Call]) -> Call:
    """Returns a call, or a refusal with the reason why there is none."""
    try:
        return make()
    except UserError as reason:
        return Refused(reason_of(reason))


def _save(kind: str, body: SaveWeights) -> Save:
    return Save(
        kind,
        checkpoints.check_name(body.path),
        ttl_s=checkpoints.check_ttl(body.ttl_seconds),
        overwrite=body.overwrite,
        metadata=body.user_metadata,
        recipients=tuple(body.age_encryption_recipients or ()),
    )


def _adam(params: AdamParams) -> OptimizerConfig:
    given = params.model_dump(exclude_none=True)
    return OptimizerConfig(
        **{own: given.get(name, default) for name, (own, default) in ADAM.items()}
    )
