"""Tinker's futures: waiting for the result of one request or of a whole sampler, and cancelling
requests.
"""

import asyncio
import math
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mint_jax.errors import UserError
from mint_jax.rollout.stream import Stream
from mint_jax.service import answers as answers_
from mint_jax.service import calls, checkpoints
from mint_jax.service import futures as futures_
from mint_jax.service.answers import PREFIX, Answer, group_of
from mint_jax.service.errors import reason_of
from mint_jax.service.futures import Category, Failed
from mint_jax.service.handlers import body_of, off_loop, tenant_of
from mint_jax.service.server import Server
from mint_jax.service.tinker_types import CancelFuture, RetrieveFuture, RetrieveFutures
from mint_jax.service.wire import forward_backward as wire_training
from mint_jax.service.wire import samples as wire_samples

POLL_S = 40.0  # the SDK gives up after 45
GROUP_POLL_S = 30.0
# bytes of a result from which a client can ask for its size first
LARGE = 1 << 20
PROTOBUF = "application/x-protobuf"


class Futures:
    """The handlers of one server."""

    def __init__(self, server: Server):
        self.server = server

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
            result = _result(call, model, calls.decode_result(raw))
            return JSONResponse(result, background=then)
        body = await off_loop(
            len(raw), lambda: wire_training.encode(calls.decode_result(raw), protobuf)
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
