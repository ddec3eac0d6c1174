"""Tinker's futures: what became of a request, waited for one by one or for a whole sampler, and
requests that nobody waits for any more.
"""

import math
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mint_jax.errors import UserError
from mint_jax.rollout.stream import Stream
from mint_jax.service import answers as answers_
from mint_jax.service import calls, checkpoints
from mint_jax.service import futures as futures_
from mint_jax.service.answers import PREFIX, Answer, group_of
from mint_jax.service.asking import OFF_LOOP, Handler, beside, given, reason_of, tenant_of, told_in
from mint_jax.service.futures import Category, Failed
from mint_jax.service.server import Server
from mint_jax.service.wire import forward_backward as wire_training
from mint_jax.service.wire import samples as wire_samples
from mint_jax.service.wire.reading import boolean, integer, mapping, number, sequence, text

POLL_S = 40.0  # the SDK gives up after 45
GROUP_POLL_S = 30.0
# bytes of a result from which a client is told its size first, where it asks for that
LARGE = 1 << 20
PROTOBUF = "application/x-protobuf"


class Futures:
    """The handlers over one server."""

    def __init__(self, server: Server):
        self.server = server

    def routes(self) -> list[Route]:
        posts: dict[str, Handler] = {
            "retrieve_future": self.retrieve_future,
            "retrieve_futures": self.retrieve_futures,
            "cancel_future": self.cancel_future,
        }
        return [
            Route(f"/api/v1/{path}", handler, methods=["POST"]) for path, handler in posts.items()
        ]

    async def retrieve_future(self, request: Asked) -> Response:
        told, tenant = await told_in(request), tenant_of(request)
        id = text(told.get("request_id"), "request_id")
        protobuf = PROTOBUF in request.headers.get("accept", "")
        small = boolean(told.get("allow_metadata_only", False), "allow_metadata_only")
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
            return JSONResponse(
                {"error": outcome.error, "category": outcome.category.value}, background=then
            )
        if call != "forward_backward":
            return JSONResponse(
                _result(call, model, calls.decode_result(outcome.result)), background=then
            )
        body = await beside(
            len(outcome.result),
            lambda: wire_training.encode(calls.decode_result(outcome.result), protobuf),
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
            return JSONResponse(
                {"error": reason_of(answer.failure), "category": category.value}, background=then
            )
        if isinstance(answer.value, dict):
            return JSONResponse(answer.value, background=then)
        asked, completions = answer.value
        body = await beside(OFF_LOOP + 1, lambda: wire_samples.encode(completions, asked, protobuf))
        return _payload(body, protobuf, small, then)

    def _own(self, id: str, tenant: str) -> Answer:
        """A tenant's answer."""
        answer = self.server.answers.find(id)
        if not answer.group.startswith(f"{tenant}/"):
            raise answers_.unknown(id)
        return answer

    async def retrieve_futures(self, request: Asked) -> Response:
        told, tenant = await told_in(request), tenant_of(request)
        target = mapping(told.get("target"), "target")
        sampler = self.server.sampler(
            tenant, text(target.get("sampling_session_id"), "sampling_session_id")
        ).id
        group = group_of(
            tenant, sampler, integer(target.get("cloned_sampler_id", 0), "cloned_sampler_id", 0)
        )
        answers = self.server.answers
        mine = [
            text(id, "retrieved_request_ids")
            for id in given(told, "retrieved_request_ids", sequence) or ()
        ]
        answers.acknowledge(id for id in mine if answers.is_in(id, group))
        cursor = integer(told.get("prev_cursor", 0), "prev_cursor", 0, 2**63 - 1)
        timeout = (
            GROUP_POLL_S
            if told.get("timeout") is None
            else min(GROUP_POLL_S, number(told["timeout"], "timeout"))
        )
        ended, cursor = await answers.wait_group(group, cursor, timeout)
        found = [
            {"request_id": one.id, "state": "finished" if one.failure is None else "failed"}
            for one in ended
        ]
        return JSONResponse({"completions": found, "cursor": cursor})

    async def cancel_future(self, request: Asked) -> Response:
        told, tenant = await told_in(request), tenant_of(request)
        single, several = (
            given(told, "request_id", text),
            given(told, "request_ids", sequence) or [],
        )
        ids = [text(id, "request_ids") for id in several] + ([] if single is None else [single])
        for answer in [self._own(id, tenant) for id in ids]:
            if isinstance(answer.what, Stream):
                answer.what.cancel()
        self.server.engine.wake()
        return JSONResponse({})


def _not_yet() -> Response:
    return JSONResponse({"queue_state": "active"}, 408)


def _payload(body: bytes, protobuf: bool, small: bool, then: BackgroundTask) -> Response:
    """A result; of a large one its size alone, where the client wants to make room first."""
    if small and len(body) > LARGE:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": len(body)})
    return Response(body, media_type=PROTOBUF if protobuf else "application/json", background=then)


def _result(call: str, model: str, told: dict[str, Any]) -> dict[str, Any]:
    """The answer to a call that is told in JSON."""
    if call == "create":
        return {"type": "create_model", "model_id": model}
    if call == "load":
        return {"type": "load_weights", "path": told["path"], "model_id": model}
    if call == "optim":  # JSON has no infinity; that the gradient had one is what ``skipped`` says
        return {"metrics": {name: value for name, value in told.items() if math.isfinite(value)}}
    kind = checkpoints.parse(told["path"]).kind if "path" in told else "sampler_weights"
    names = {
        "weights": "save_weights",
        "sampler_weights": "save_weights_for_sampler",
        "external_weights": "save_weights_external",
    }
    return {"type": names[kind]} | told
