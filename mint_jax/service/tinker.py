"""Tinker's sessions, models and training requests.

A training request with a valid place (model and number) is accepted. If its content is wrong, its
number is used up and its future fails. A request without a place gets 400, one for a missing or
another tenant's object 404.
"""

import asyncio
import functools
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import pydantic
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mint_jax.errors import UserError
from mint_jax.service import checkpoints, custom_loss, training_calls
from mint_jax.service import tinker_types as types
from mint_jax.service.answers import group_of
from mint_jax.service.book import Checkpoint, Model, NotFound
from mint_jax.service.custom_loss import CreateCustomLoss
from mint_jax.service.errors import LONGEST_REASON, reason_of
from mint_jax.service.futures import Conflict
from mint_jax.service.server import Server
from mint_jax.service.training_calls import Call, Create, Load, Refused, Save
from mint_jax.service.validation import body_of, off_loop, parse, tenant_of
from mint_jax.service.wire import forward_backward as wire

CLIENT_CONFIG = {
    # exchange keys for tokens first, also keys such as sk-... that the SDK would not send otherwise
    "pjwt_auth_enabled": True,
    "proto_compress_fwdbwd": True,
    "sample_use_retrieve_futures": True,
    "custom_loss_server_side": True,
}
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}
# its loss sums ``p(v) (log p(v) - log q(v))`` over the vocabulary, which no training step computes
NO_REVERSE_KL = (
    "forward_backward_reverse_kl needs whole distributions, which this server does not compute; for"
    " sampled tokens send forward_backward with importance_sampling: advantages are the reference's"
    " log-probabilities (compute_logprobs of a sampling client of it) minus the policy's"
)
T = TypeVar("T", bound=pydantic.BaseModel)


class Tinker:
    """The handlers of one server."""

    def __init__(self, server: Server):
        self.server, self.book, self.tenancy = server, server.book, server.tenancy

    # -- handshake and sessions

    async def _constant(self, value: dict[str, Any], request: Request) -> Response:
        return JSONResponse(value)

    client_config = functools.partialmethod(_constant, CLIENT_CONFIG)
    dynamic_config = functools.partialmethod(_constant, DYNAMIC_CONFIG)
    healthz = functools.partialmethod(_constant, {"status": "ok"})
    telemetry = functools.partialmethod(_constant, {"status": "accepted"})

    async def get_server_capabilities(self, request: Request) -> Response:
        model = {"model_name": self.server.name, "max_context_length": self.server.base.cfg.context}
        model |= {"trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [model]})

    async def create_session(self, request: Request) -> Response:
        notes = (await body_of(types.CreateSession, request)).model_dump()
        id = await asyncio.to_thread(self.book.open_session, tenant_of(request), notes)
        return JSONResponse({"type": "create_session", "session_id": id})

    async def session_heartbeat(self, request: Request) -> Response:
        id = (await body_of(types.SessionRef, request)).session_id
        if not self.tenancy.is_open(tenant_of(request), id):
            return JSONResponse({"detail": f"session {id[:80]!r} has ended"}, 410)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, request: Request) -> Response:
        session = self.book.session(tenant_of(request), request.path_params["session"])
        body = parse(types.FinishSession, await request.body() or b"{}")
        if (reason := (body.reason or {}).get("type")) in types.REASONS:
            notes = {"finished": reason, "detail": (body.detail or "")[:LONGEST_REASON] or None}
            await asyncio.to_thread(self.book.update_session, session, **notes)
        await asyncio.to_thread(self.server.end_session, session.id)
        return JSONResponse({})

    # -- models

    async def create_model(self, request: Request) -> Response:
        def make(body: types.CreateModel) -> Call:
            self.server.need_base(body.base_model)
            lora = body.lora_config or types.LoraConfig()
            train = {name: getattr(lora, name, True) for name in self.server.families}
            # the default seed is the model's id, so that a repeated request is the same
            id = f"{body.session_id}:train:{body.model_seq_id}"
            seed = zlib.crc32(id.encode()) if lora.seed is None else lora.seed
            kind = (body.optimizer_config or types.Optimizer()).type
            return Create(self.server.adapter_config(lora.rank, train), seed, kind)

        return await self._begin(request, types.CreateModel, make)

    async def load_weights(self, request: Request) -> Response:
        """Loads a checkpoint, into a new model of a session or into a model in training."""

        def make(body: types.LoadWeights, model: Model | None = None) -> Call:
            self.server.need_base(body.base_model)
            saved = self._checkpoint(request, body.path).optimizer
            own = None if body.optimizer_config is None else body.optimizer_config.type
            own = own if model is None else model.optimizer
            if body.optimizer and own not in (None, saved):
                raise UserError(
                    f"{body.path} has the state of {saved}, and the model's optimizer is {own}:"
                    " load it without optimizer"
                )
            kind = saved if body.optimizer else own or "adamw"
            return Load(body.path, body.optimizer, tenant_of(request), kind)

        if parse(types.LoadPlace, await request.body()).session_id is None:
            return await self._train(request, types.LoadWeights, make)
        return await self._begin(request, types.LoadWeights, make)

    def _checkpoint(self, request: Request, path: str) -> Checkpoint:
        """Returns a checkpoint of the tenant, or a published one."""
        return self.book.checkpoint(tenant_of(request), *checkpoints.parse(path), published=True)

    async def _begin(self, request: Request, kind: type[T], make: Callable[[T], Call]) -> Response:
        """Records a new model, or finds it recorded by an earlier copy of the request, and submits
        its first request, the call that is made of the body.
        """
        raw, tenant = await request.body(), tenant_of(request)
        place, call = parse(types.ModelPlace, raw), _call(kind, raw, make)
        self.tenancy.need_open(tenant, place.session_id)
        about: dict[str, Any] = {"metadata": place.user_metadata}
        if isinstance(call, Load):
            config = self.server.checkpoints.config(self._checkpoint(request, call.path))
            about |= self.server.about(config) | {"optimizer": call.kind}
        elif isinstance(call, Create):
            about |= self.server.about(call.config) | {"optimizer": call.kind}
        new = place.session_id, place.model_seq_id, tenant, about
        model = await asyncio.to_thread(self.tenancy.add_model, *new)
        if model.ended is not None:
            raise Conflict(f"model {model.id!r} has ended: give a new one a new model_seq_id")
        return await self._submit(model, 0, call)

    async def get_info(self, request: Request) -> Response:
        model, name = await self._model(request), self.server.name
        info = {"type": "get_info", "model_id": model.id, "model_name": name, "is_lora": True}
        data = {"tokenizer_id": self.server.tokenizer, "arch": self.server.base.cfg.family}
        info |= {"model_data": data | {"model_name": name}, "lora_rank": model.details.get("rank")}
        return JSONResponse(info | {"optimizer_config": {"type": model.optimizer}})

    async def unload_model(self, request: Request) -> Response:
        model = await self._model(request)
        await asyncio.to_thread(self.server.durable.forget, model.id)
        await asyncio.to_thread(self.book.end_model, model.id)
        answer, _ = self.server.answers.begin(group_of(model.tenant, model.id), None, "")
        self.server.answers.end(answer, {"type": "unload_model", "model_id": model.id})
        return JSONResponse({"request_id": answer.id, "model_id": model.id})

    async def _model(self, request: Request, id: str | None = None) -> Model:
        """Returns the tenant's model of this id, by default of that in the body."""
        id = (await body_of(types.ModelRef, request)).model_id if id is None else id
        model = self.book.model(tenant_of(request), id)
        if model.ended is not None:
            raise NotFound(
                f"model {id!r} has ended with its session: load a checkpoint of it into a new one"
            )
        self.tenancy.is_open(model.tenant, model.session)  # counts as a heartbeat
        return model

    # -- training

    async def _train(
        self, request: Request, kind: type[T], make: Callable[[T, Model], Call]
    ) -> Response:
        """Submits the call that is made of a body and its model."""
        raw = await request.body()
        place = parse(types.RequestPlace, raw)
        model = await self._model(request, place.model_id)
        call = _call(kind, raw, lambda body: make(body, model))
        return await self._submit(model, place.seq_id, call)

    async def _submit(self, model: Model, place: int, call: Call) -> Response:
        """Returns the id of a training request. A model's first request creates the model."""
        id = await self.server.submit_training(model.id, model.tenant, place + 1, call)
        return JSONResponse({"request_id": id, "model_id": model.id})

    async def forward_backward(self, request: Request) -> Response:
        raw, kind = await request.body(), request.headers.get("content-type", "")
        message = await off_loop(len(raw), lambda: wire.read(raw, kind))
        model = await self._model(request, message.model_id)

        def make() -> Call:
            try:
                call, spans = message.batch()
                return self.server.sequences.complete(call, spans, model.tenant)
            except UserError as reason:
                return Refused(reason_of(reason))

        return await self._submit(model, message.seq_id, await off_loop(len(raw), make))

    async def create_custom_loss(self, request: Request) -> Response:
        body, tenant = await body_of(CreateCustomLoss, request), tenant_of(request)
        self.tenancy.need_open(tenant, body.session_id)
        id = await asyncio.to_thread(custom_loss.create, body)
        answer, _ = self.server.answers.begin(group_of(tenant, body.session_id), None, "")
        self.server.answers.end(answer, {"type": "create_custom_loss", "loss_id": id})
        return JSONResponse({"request_id": answer.id})

    async def optim_step(self, request: Request) -> Response:
        def make(body: types.OptimStep, model: Model) -> Call:
            params = body.optimizer_params or body.adam_params or types.AdamParams()
            # a model whose creation was refused has none, and its requests fail all the same
            numbers = params.config(model.details.get("rank", 32))
            if numbers.kind != model.optimizer:
                raise UserError(
                    f"model {model.id!r} was created with optimizer {model.optimizer}, and the"
                    f" parameters are of {numbers.kind}: send its own"
                )
            return training_calls.Optim(numbers)

        return await self._train(request, types.OptimStep, make)

    async def reverse_kl(self, request: Request) -> Response:
        """Refuses a request of MinT's client, which may have no number; a number is used up."""
        body = await body_of(types.ReverseKl, request)
        model = await self._model(request, body.model_id)
        if body.seq_id is None:
            raise UserError(NO_REVERSE_KL)
        return await self._submit(model, body.seq_id, Refused(NO_REVERSE_KL))

    async def _save_as(self, kind: str, request: Request) -> Response:
        return await self._train(request, types.SaveWeights, lambda body, _: _save(kind, body))

    save_weights = functools.partialmethod(_save_as, "weights")
    save_weights_external = functools.partialmethod(_save_as, "external_weights")

    async def save_weights_for_sampler(self, request: Request) -> Response:
        def make(body: types.SaveForSampler, model: Model) -> Call:
            moves = body.kind == "inflight"
            if (number := body.sampling_session_seq_id) is not None:
                sampler = f"{model.session}:sample:{number}"
                return Save("sampler_weights", None, sampler, inflight=moves)
            if moves:
                raise UserError("kind inflight has no path: give a sampling_session_seq_id")
            return _save("sampler_weights", body)

        return await self._train(request, types.SaveForSampler, make)


def _call(kind: type[T], raw: bytes, make: Callable[[T], Call]) -> Call:
    """Returns the call of a body, or a refusal with the reason why there is none."""
    try:
        return make(parse(kind, raw))
    except UserError as reason:
        return Refused(reason_of(reason))


def _save(kind: str, body: types.SaveWeights) -> Save:
    options = body.ttl_seconds, body.overwrite, body.user_metadata
    recipients = tuple(body.age_encryption_recipients or ())
    return Save(kind, checkpoints.check_name(body.path), None, *options, recipients)
