"""Tinker's HTTP interface: sessions, models and training. Beside it are ``tinker_sampling.py``,
``tinker_futures.py`` with what becomes of requests, and ``tinker_rest.py``, which lists and manages
what was saved.

A training request that can be placed (its model and its number are known) is accepted whatever is
wrong with its content: its number is used up, and its future says why. What cannot be placed is a
400, what is not there or another tenant's a 404.
"""

import asyncio
import json
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mint_jax.errors import UserError
from mint_jax.service import calls, checkpoints
from mint_jax.service.answers import group_of
from mint_jax.service.asking import (
    LONGEST_REASON,
    Handler,
    beside,
    given,
    reason_of,
    tenant_of,
    told_in,
)
from mint_jax.service.book import Model, NotFound
from mint_jax.service.calls import Call, Create, Load, Refused, Save
from mint_jax.service.futures import Conflict
from mint_jax.service.server import Server
from mint_jax.service.tinker_sessions import REASONS
from mint_jax.service.wire import forward_backward as wire_training
from mint_jax.service.wire.reading import boolean, integer, mapping, number, sequence, text
from mint_jax.train.config import OptimizerConfig

CLIENT_CONFIG = {
    # a key is exchanged for a token first; one that the SDK would not send otherwise, sk-..., too
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
LARGEST_NOTE = 1 << 16  # bytes of JSON that the user may put beside a thing


class Tinker:
    """The handlers over one server."""

    def __init__(self, server: Server):
        self.server = server

    def routes(self) -> list[Route]:
        posts: dict[str, Handler] = {
            "client/config": self.client_config,
            "client/dynamic_config": self.dynamic_config,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "sessions/{session}/finish": self.finish_session,
            "telemetry": self.telemetry,
            "create_model": self.create_model,
            "load_weights": self.load_weights,
            "get_info": self.get_info,
            "unload_model": self.unload_model,
            "forward": self.forward_backward,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "save_weights_for_sampler": self.save_weights_for_sampler,
            "save_weights_external": self.save_weights_external,
        }
        gets: dict[str, Handler] = {
            "healthz": self.healthz,
            "get_server_capabilities": self.capabilities,
        }
        return [
            Route(f"/api/v1/{path}", handler, methods=["POST"]) for path, handler in posts.items()
        ] + [Route(f"/api/v1/{path}", handler, methods=["GET"]) for path, handler in gets.items()]

    # -- handshake and sessions

    async def client_config(self, request: Asked) -> Response:
        return JSONResponse(CLIENT_CONFIG)

    async def dynamic_config(self, request: Asked) -> Response:
        return JSONResponse(DYNAMIC_CONFIG)

    async def healthz(self, request: Asked) -> Response:
        return JSONResponse({"status": "ok"})

    async def telemetry(self, request: Asked) -> Response:
        return JSONResponse({"status": "accepted"})

    async def capabilities(self, request: Asked) -> Response:
        model = {
            "max_context_length": self.server.base.cfg.context,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [{"model_name": self.server.name} | model]})

    async def create_session(self, request: Asked) -> Response:
        told = await told_in(request)
        kept: dict[str, Any] = {
            name: given(told, name, text) for name in ("display_name", "project_id", "sdk_version")
        }
        kept |= {"tags": given(told, "tags", sequence), "user_metadata": _metadata(told)}
        if len(json.dumps(kept)) > 2 * LARGEST_NOTE:
            raise UserError(
                f"{', '.join(kept)} have more than {2 * LARGEST_NOTE} bytes of JSON together: say"
                " less of the session"
            )
        id = await asyncio.to_thread(self.server.book.open_session, tenant_of(request), kept)
        return JSONResponse({"type": "create_session", "session_id": id})

    async def heartbeat(self, request: Asked) -> Response:
        id = text((await told_in(request)).get("session_id"), "session_id")
        if not self.server.is_open(tenant_of(request), id):
            return JSONResponse({"detail": f"session {id[:80]!r} is over"}, 410)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, request: Asked) -> Response:
        session = self.server.book.session(tenant_of(request), request.path_params["session"])
        told = await told_in(request) if await request.body() else {}
        reason = (given(told, "reason", mapping) or {}).get("type")
        if reason in REASONS:
            detail = str(told.get("detail") or "")[:LONGEST_REASON]
            await asyncio.to_thread(
                self.server.book.update_session, session, finished=reason, detail=detail or None
            )
        await asyncio.to_thread(self.server.end_session, session.id)
        return JSONResponse({})

    # -- models

    async def create_model(self, request: Asked) -> Response:
        told, tenant = await told_in(request), tenant_of(request)
        session = text(told.get("session_id"), "session_id")
        place = integer(told.get("model_seq_id"), "model_seq_id", 0)
        self.server.need_open(tenant, session)
        id = f"{session}:train:{place}"
        about: dict[str, Any] = {"metadata": _metadata(told)}

        def wanted() -> Call:
            self.server.need_base(given(told, "base_model", text))
            _need_adam(told.get("optimizer_config"))
            lora = mapping(told.get("lora_config") or {}, "lora_config")
            train = {
                family: boolean(lora.get(family, True), family) for family in self.server.families
            }
            config = self.server.adapter_config(lora.get("rank", 32), train)
            about.update(rank=config.rank, train=train)
            # The same request sent again is the same: a seed that nobody told is the model's name.
            seed = (
                zlib.crc32(id.encode())
                if lora.get("seed") is None
                else integer(lora["seed"], "seed", -(2**63), 2**63 - 1)
            )
            return Create(config, seed)

        call = _call(wanted)
        await self._added(session, place, tenant, about)
        return await self._accepted(id, tenant, 0, call)

    async def load_weights(self, request: Asked) -> Response:
        told, tenant = await told_in(request), tenant_of(request)
        call = _call(lambda: self._load_of(told, tenant))
        if told.get("session_id") is None:
            return await self._train(told, tenant, lambda: call)
        session = text(told["session_id"], "session_id")
        place = integer(told.get("model_seq_id"), "model_seq_id", 0)
        self.server.need_open(tenant, session)
        about: dict[str, Any] = {"metadata": _metadata(told)}
        if isinstance(call, Load):
            row = self.server.book.checkpoint(tenant, *checkpoints.parse(call.path), published=True)
            config = self.server.checkpoints.config(row)
            about |= {"rank": config.rank, "train": self.server.trained_families(config)}
        await self._added(session, place, tenant, about)
        return await self._accepted(f"{session}:train:{place}", tenant, 0, call)

    def _load_of(self, told: Mapping[str, Any], tenant: str) -> Call:
        self.server.need_base(given(told, "base_model", text))
        _need_adam(told.get("optimizer_config"))
        call = Load(
            text(told.get("path"), "path"),
            boolean(told.get("optimizer", False), "optimizer"),
            tenant,
        )
        self.server.book.checkpoint(tenant, *checkpoints.parse(call.path), published=True)
        return call

    async def _added(self, session: str, place: int, tenant: str, about: Mapping[str, Any]) -> None:
        """Writes down a model that is to be made, or is made already."""
        model = await asyncio.to_thread(self.server.owned.add_model, session, place, tenant, about)
        if model.ended is not None:
            raise Conflict(f"model {model.id!r} has ended: give a new one a new model_seq_id")

    async def get_info(self, request: Asked) -> Response:
        model = self._model(
            tenant_of(request), text((await told_in(request)).get("model_id"), "model_id")
        )
        name, rank = self.server.name, model.details.get("rank")
        data = {
            "model_name": name,
            "tokenizer_id": self.server.tokenizer,
            "arch": self.server.base.cfg.family,
        }
        told = {
            "type": "get_info",
            "model_id": model.id,
            "model_data": data,
            "is_lora": True,
            "lora_rank": rank,
            "model_name": name,
        }
        return JSONResponse(told | {"optimizer_config": {"type": "adamw"}})

    async def unload_model(self, request: Asked) -> Response:
        tenant = tenant_of(request)
        model = self._model(tenant, text((await told_in(request)).get("model_id"), "model_id"))
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
        self.server.is_open(tenant, model.session)  # a contact with the session, as a heartbeat is
        return model

    # -- training

    async def _train(
        self, told: Mapping[str, Any], tenant: str, wanted: Callable[[], Call]
    ) -> Response:
        """Accepts a request of JSON."""
        model = self._model(tenant, text(told.get("model_id"), "model_id"))
        place = integer(told.get("seq_id"), "seq_id", 1)
        return await self._accepted(model.id, tenant, place, _call(wanted))

    async def _accepted(self, model: str, tenant: str, place: int, call: Call) -> Response:
        """The id of a training request. A model's first is the one that makes it."""
        id = await self.server.submit_training(model, tenant, place + 1, call)
        return JSONResponse({"request_id": id, "model_id": model})

    async def forward_backward(self, request: Asked) -> Response:
        body, tenant = await request.body(), tenant_of(request)
        kind = request.headers.get("content-type", "")
        message = await beside(len(body), lambda: wire_training.read(body, kind))
        model = self._model(tenant, message.model_id)

        def wanted() -> Call:
            asked = message.asked()
            return self.server.sequences.with_routes(
                asked.call, [one.model_input for one in asked.spans], tenant
            )

        call = await beside(len(body), lambda: _call(wanted))
        return await self._accepted(model.id, tenant, message.seq_id, call)

    async def optim_step(self, request: Asked) -> Response:
        told = await told_in(request)

        def wanted() -> Call:
            if told.get("optimizer_params") is not None:
                _need_adam(told["optimizer_params"])
            return calls.Optim(_adam(mapping(told.get("adam_params") or {}, "adam_params")))

        return await self._train(told, tenant_of(request), wanted)

    async def save_weights(self, request: Asked) -> Response:
        told = await told_in(request)
        return await self._train(told, tenant_of(request), lambda: _save("weights", told))

    async def save_weights_external(self, request: Asked) -> Response:
        told = await told_in(request)
        return await self._train(told, tenant_of(request), lambda: _save("external_weights", told))

    async def save_weights_for_sampler(self, request: Asked) -> Response:
        told, tenant = await told_in(request), tenant_of(request)
        session = self._model(tenant, text(told.get("model_id"), "model_id")).session

        def wanted() -> Call:
            if told.get("kind", "snapshot") != "snapshot":
                raise UserError(
                    f"kind is {str(told['kind'])[:40]!r}; this server makes snapshots: leave it"
                    " out, and save again to go on"
                )
            if told.get("sampling_session_seq_id") is None:
                return _save("sampler_weights", told)
            place = integer(told["sampling_session_seq_id"], "sampling_session_seq_id", 0)
            return Save("sampler_weights", None, f"{session}:sample:{place}")

        return await self._train(told, tenant, wanted)


def _call(wanted: Callable[[], Call]) -> Call:
    """The call, or why there is none."""
    try:
        return wanted()
    except UserError as reason:
        return Refused(reason_of(reason))


def _save(kind: str, told: Mapping[str, Any]) -> Save:
    recipients = given(told, "age_encryption_recipients", sequence) or ()
    return Save(
        kind,
        checkpoints.check_name(told.get("path")),
        ttl_s=checkpoints.check_ttl(told.get("ttl_seconds")),
        overwrite=boolean(told.get("overwrite", False), "overwrite"),
        metadata=_metadata(told),
        recipients=tuple(text(one, "age_encryption_recipients") for one in recipients),
    )


def _metadata(told: Mapping[str, Any]) -> dict[str, Any] | None:
    """The user's own words on what is made."""
    metadata = given(told, "user_metadata", mapping)
    if metadata is not None and len(json.dumps(metadata)) > LARGEST_NOTE:
        raise UserError(
            f"user_metadata has more than {LARGEST_NOTE} bytes of JSON: keep it elsewhere, and name"
            " the place"
        )
    return None if metadata is None else dict(metadata)


def _need_adam(told: Any) -> None:
    kind = "adamw" if told is None else mapping(told, "optimizer_config").get("type", "adamw")
    if kind != "adamw":
        raise UserError(
            f"the optimizer's type is {str(kind)[:40]!r}; this server has adamw: leave it out, and"
            " send AdamParams"
        )


# name -> the optimizer's own, Tinker's default, smallest value, and the one that it must stay below
ADAM = {
    "learning_rate": ("learning_rate", 1e-4, 0.0, math.inf),
    "beta1": ("b1", 0.9, 0.0, 1.0),
    "beta2": ("b2", 0.95, 0.0, 1.0),
    "eps": ("eps", 1e-12, 0.0, math.inf),
    "weight_decay": ("weight_decay", 0.0, 0.0, math.inf),
    "grad_clip_norm": ("max_grad_norm", 0.0, 0.0, math.inf),
}


def _adam(told: Mapping[str, Any]) -> OptimizerConfig:
    """AdamW's numbers."""
    out = {}
    for name, (own, default, low, high) in ADAM.items():
        value = default if told.get(name) is None else number(told[name], name)
        if not low <= value < high:
            raise UserError(
                f"{name} is {value}; expected {low:g} or more"
                + (", and a finite number" if high == math.inf else f", below {high:g}")
            )
        out[own] = value
    return OptimizerConfig(**out)
