"""``/openapi.json``: what the routes take and answer, as OpenAPI 3.1.

OpenAI's fields are told whole, with their limits. Of Tinker's training and sampling requests the
places alone are (which session, model, number), since whatever else is wrong with one is told by
its future; their binary forms are in ``wire/``.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mint_jax.rollout.device import ALTERNATIVES
from mint_jax.rollout.request import MAX_BIASES, MAX_STOP_IDS
from mint_jax.service import checkpoints
from mint_jax.service.admin import MOST_LISTED
from mint_jax.service.chat import ROLES
from mint_jax.service.openai_types import (
    MOST_CHOICES,
    MOST_PROMPTS,
    MOST_SAMPLES,
    OPENAI,
    UNSUPPORTED,
    Bounds,
)
from mint_jax.service.responses import UNSUPPORTED as OF_RESPONSES

Schema = dict[str, Any]

TEXT, NAME, FLAG, ANY, OBJECT = (
    {"type": "string"},
    {"type": "string", "minLength": 1},
    {"type": "boolean"},
    {},
    {"type": "object"},
)
ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
PLACE = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}  # a number in a session
NUMBER = PLACE | {"minimum": 1}  # a training request's
STATUSES = {  # beside 200
    400: "The request is wrong: the message says where.",
    401: "There is no key, or not a good one.",
    403: "The key has not the scope.",
    404: "There is none, or it is another tenant's.",
    405: "The path takes another method.",
    408: "Not yet, or the body did not arrive in time: ask again.",
    409: "It is there already, with another content.",
    410: "It is over.",
    413: "The body is too large.",
    415: "The content type or coding is unknown.",
    429: "The server is loaded: ask again after Retry-After.",
    503: "The server cannot serve now: ask again.",
}


def route(context: int, bounds: Bounds = OPENAI) -> Route:
    """The document's route.

    Args:
        context: tokens that the base reads.
        bounds: of OpenAI's fields.
    """
    told = document(context, bounds)

    async def openapi(_: Request) -> JSONResponse:
        return JSONResponse(told)

    return Route("/openapi.json", openapi, methods=["GET"])


def document(context: int, bounds: Bounds = OPENAI) -> Schema:
    """The document."""
    paths: Schema = {}
    for under in ("/v1", "/oai/api/v1"):
        for path, methods in _openai(context, bounds).items():
            paths[under + path] = methods
    paths |= {
        f"/api/v1/{path}": methods for path, methods in {**_tinker(), **_tinker_rest()}.items()
    } | _operators()
    for path, methods in paths.items():
        if names := _parameters(path):
            methods["parameters"] = names
    info = {
        "title": "mint_jax",
        "version": "1",
        "description": "Training and sampling of LoRA policies over one resident base.",
    }
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    failures = {
        f"{name}{code}": _failure(code, schema)
        for name, schema in FAILURES.items()
        for code in STATUSES
    }
    parts = {"securitySchemes": keys, "responses": failures}
    security: list[Schema] = [{}, {"bearer": []}, {"header": []}]
    return {
        "openapi": "3.1.0",
        "info": info,
        "paths": paths,
        "components": parts,
        "security": security,
    }


# -- parts


def _or_null(schema: Schema) -> Schema:
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    return (
        schema | {"type": [schema["type"], "null"]}
        if "type" in schema
        else {"anyOf": [schema, {"type": "null"}]}
    )


def _whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float = 1e30, above: bool = False) -> Schema:
    return {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}


def _list(items: Schema, low: int = 0, high: int | None = None) -> Schema:
    return {"type": "array", "items": items, "minItems": low} | (
        {} if high is None else {"maxItems": high}
    )


def _fields(required: Schema, **optional: Schema) -> Schema:
    """An object with fields; further ones are ignored."""
    return OBJECT | {"properties": required | optional, "required": list(required)}


FAILURES = {
    "Detail": _fields({"detail": TEXT}),
    "Error": _fields(
        {
            "error": _fields(
                {"message": TEXT, "type": TEXT, "param": _or_null(TEXT), "code": _or_null(TEXT)}
            )
        }
    ),
}


def _failure(code: int, schema: Schema) -> Schema:
    if code == 408:  # a long poll that has nothing yet
        schema = {"anyOf": [schema, _fields({"queue_state": TEXT})]}
    return {"description": STATUSES[code], "content": {"application/json": {"schema": schema}}}


def _operation(
    summary: str,
    tag: str,
    answer: Schema = OBJECT,
    *,
    body: Schema | None = None,
    query: Schema | None = None,
    failure: str = "Detail",
    kinds: tuple[str, ...] = ("application/json",),
    status: int = 200,
    binary: bool = False,
) -> Schema:
    """One method of a path.

    Args:
        answer: schema of a body that is JSON.
        body: schema of a request's body; None where it has none.
        query: parameters' schemas.
        failure: how errors are told.
        kinds: content types of answers; their bodies are JSON in the first of them alone.
        binary: the body may be protobuf too.
    """
    told = {kind: {"schema": answer} if kind == "application/json" else {} for kind in kinds}
    responses: Schema = {
        str(status): (
            {"description": "As asked."} | ({} if status in (204, 302) else {"content": told})
        )
    }
    responses |= {
        str(code): {"$ref": f"#/components/responses/{failure}{code}"} for code in STATUSES
    }
    out: Schema = {"summary": summary, "tags": [tag], "responses": responses}
    if body is not None:
        content: Schema = {"application/json": {"schema": body}} | (
            {"application/x-protobuf": {}} if binary else {}
        )
        out["requestBody"] = {"required": True, "content": content}
    if query:
        out["parameters"] = [
            {"name": name, "in": "query", "schema": schema} for name, schema in query.items()
        ]
    return out


def _parameters(path: str) -> list[Schema]:
    """Those that stand in a path's braces."""
    names = [part.partition("}")[0] for part in path.split("{")[1:]]
    return [{"name": name, "in": "path", "required": True, "schema": NAME} for name in names]


# -- OpenAI


def _openai(context: int, bounds: Bounds) -> Schema:
    streamed = ("application/json", "text/event-stream")
    limits = {"limit": _whole(1, 1000), "after": NAME}
    loaded = _fields({"lora_name": NAME, "lora_path": NAME}, load_inplace=_or_null(FLAG))

    def told(summary: str, answer: Schema = OBJECT, **more: Any) -> Schema:
        return _operation(summary, "OpenAI", answer, failure="Error", **more)

    return {
        "/models": {
            "get": told(
                "Models that can be named: the base, loaded adapters, policies.",
                MODELS,
                query=limits,
            )
        },
        "/models/{name}": {"get": told("One model.", MODEL)},
        "/completions": {
            "post": told(
                "Completes prompts.", COMPLETION, body=_completion(context, bounds), kinds=streamed
            )
        },
        "/chat/completions": {
            "post": told("Answers a chat.", CHAT, body=_chat(context, bounds), kinds=streamed)
        },
        "/responses": {
            "post": told(
                "Answers input with items.",
                RESPONSE,
                body=_response(context, bounds),
                kinds=streamed,
            )
        },
        "/responses/{id}": {
            "get": told("A response that is kept.", RESPONSE),
            "delete": told("Forgets one.", DELETED),
        },
        "/load_lora_adapter": {
            "post": told("Names a revision, as vLLM does.", body=loaded, kinds=("text/plain",))
        },
        "/unload_lora_adapter": {
            "post": told(
                "Takes a name back.", body=_fields({"lora_name": NAME}), kinds=("text/plain",)
            )
        },
    }


def _sampling(context: int, bounds: Bounds) -> Schema:
    """Fields of completions and chats; null is as if one were not there."""
    bias = OBJECT | {
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": _number(-100, 100),
        "maxProperties": MAX_BIASES,
    }
    schema = {"anyOf": [OBJECT, TEXT]}
    kinds = {"type": {"enum": ["text", "json_object", "json_schema"]}}
    wanted = {
        **dict.fromkeys(
            ("stream", "ignore_eos", "return_token_ids", "return_tokens_as_token_ids"), FLAG
        ),
        "stream_options": _fields({}, include_usage=_or_null(FLAG)),
        "n": _whole(1, MOST_SAMPLES),
        "seed": _whole(-(2**63), 2**64 - 1),
        "temperature": _number(0, min(bounds.temperature, 1e30)),
        "top_p": _number(0, 1, above=True),
        "top_k": _whole(-1, 2**31 - 1),
        "min_p": _number(0, 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": _number(1e-6, 1e6),
        "logit_bias": bias,
        "stop": {"anyOf": [NAME, _list(NAME, 0, bounds.stops)]},
        "stop_token_ids": _list(ID, 0, MAX_STOP_IDS // 2),
        "max_tokens": _whole(1, context),
        "prompt_logprobs": _whole(0, ALTERNATIVES),
        "response_format": _fields(
            kinds, json_schema=_or_null(_fields({}, schema=_or_null(OBJECT)))
        ),
        "guided_json": schema,
        "guided_regex": NAME,
        "guided_choice": _list(NAME, 1),
        "structured_outputs": _fields(
            {}, json=_or_null(schema), regex=_or_null(NAME), choice=_or_null(_list(NAME, 1))
        ),
    }
    unused = {
        name: {"enum": list(values), "description": "Not supported: leave it out."}
        for name, values in UNSUPPORTED.items()
    }
    return {name: _or_null(schema) for name, schema in wanted.items()} | unused


def _completion(context: int, bounds: Bounds) -> Schema:
    ids = _list(ID, 1)
    prompt = {"anyOf": [TEXT, _list(TEXT, 1, MOST_PROMPTS), ids, _list(ids, 1, MOST_PROMPTS)]}
    own = {
        "max_tokens": (
            _whole(0, context)
            | {"description": "0 with echo alone: the prompt is told and nothing is drawn."}
        ),
        "logprobs": _whole(0, bounds.logprobs),
        "echo": FLAG,
        "add_special_tokens": FLAG,
        "best_of": _whole(1, MOST_SAMPLES) | {"description": "As n."},
    }
    optional = _sampling(context, bounds) | {name: _or_null(schema) for name, schema in own.items()}
    optional["n"] = optional["n"] | {
        "description": f"At most {MOST_CHOICES} completions of all prompts together."
    }
    return _fields({"model": NAME}, prompt=_or_null(prompt), **optional)


def _chat(context: int, bounds: Bounds) -> Schema:
    part = _fields({"type": {"const": "text"}, "text": TEXT})
    content = {"anyOf": [TEXT, _list(part)]}
    role = {"enum": list(ROLES)} if bounds.strict else TEXT
    message = {
        "anyOf": [
            _fields({"role": role, "content": content}),
            _fields({"role": role, "tool_calls": _list(MADE, 1)}),
        ]
    }
    function = _fields({"name": NAME}, parameters=_or_null(OBJECT))
    own = {
        "logprobs": FLAG,
        "top_logprobs": _whole(0, ALTERNATIVES),
        "max_completion_tokens": _whole(1, context),
        "tools": _list(_fields({"type": {"const": "function"}, "function": function})),
        "parallel_tool_calls": FLAG,
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, OBJECT]},
        "chat_template_kwargs": OBJECT,
        "add_generation_prompt": FLAG,
        "echo": {"enum": [False]},
    }
    optional = _sampling(context, bounds) | {name: _or_null(schema) for name, schema in own.items()}
    return _fields({"model": NAME, "messages": _list(message, 1)}, **optional)


def _response(context: int, bounds: Bounds) -> Schema:
    shared = _sampling(context, bounds)
    part = _fields({"type": {"enum": ["input_text", "output_text"]}, "text": TEXT})
    message = _fields(
        {
            "role": {"enum": list(ROLES)} if bounds.strict else TEXT,
            "content": {"anyOf": [TEXT, _list(part)]},
        }
    )
    call = _fields(
        {
            "type": {"const": "function_call"},
            "call_id": TEXT,
            "name": NAME,
            "arguments": {"const": "{}"},
        }
    )
    output = _fields({"type": {"const": "function_call_output"}, "call_id": TEXT, "output": TEXT})
    asked = {
        "instructions": TEXT,
        "max_output_tokens": _whole(1, context),
        "metadata": OBJECT,
        "previous_response_id": NAME,
        "store": FLAG,
        "tools": _list(
            _fields({"type": {"const": "function"}, "name": NAME}, parameters=_or_null(OBJECT))
        ),
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, OBJECT]},
        "parallel_tool_calls": FLAG,
        "text": _fields(
            {},
            format=_or_null(
                _fields(
                    {"type": {"enum": ["text", "json_object", "json_schema"]}},
                    schema=_or_null(OBJECT),
                )
            ),
        ),
        "include": _list(TEXT),
        "top_logprobs": _whole(0, ALTERNATIVES),
    }
    unused = {
        name: {"enum": list(values), "description": "Not supported: leave it out."}
        for name, values in OF_RESPONSES.items()
    }
    optional = {name: shared[name] for name in ("stream", "temperature", "top_p")} | unused
    items = _list({"anyOf": [message, call, output]}, 1)
    return _fields(
        {"model": NAME, "input": {"anyOf": [TEXT, items]}},
        **optional,
        **{k: _or_null(v) for k, v in asked.items()},
    )


EDGE = _or_null(TEXT)
MODEL = _fields(
    {
        "id": TEXT,
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": TEXT,
        "mint_revision": EDGE,
    }
)
MODELS = _fields(
    {
        "object": {"const": "list"},
        "data": _list(MODEL),
        "has_more": FLAG,
        "first_id": EDGE,
        "last_id": EDGE,
    }
)
COUNT = {"type": "integer", "minimum": 0}
LOGPROB = _or_null({"type": "number", "maximum": 1e-3})  # rounding alone is above 0
REASON = {"enum": ["stop", "length", "tool_calls", "abort"]}
USAGE = _fields(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": _fields({"cached_tokens": COUNT}),
    }
)
LIKELIEST = OBJECT | {"additionalProperties": LOGPROB}
TABLE = _fields(
    {
        "tokens": _list(TEXT),
        "token_logprobs": _list(LOGPROB),
        "top_logprobs": _or_null(_list(_or_null(LIKELIEST))),
        "text_offset": _list(COUNT),
    }
)
TOKEN = {"token": TEXT, "logprob": LOGPROB, "bytes": _list(_whole(0, 255))}
CALL = _fields(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": _fields({"name": TEXT, "arguments": TEXT}),
    }
)
MADE = _fields({"function": _fields({"name": TEXT, "arguments": {"anyOf": [TEXT, OBJECT]}})})
MESSAGE = _fields(
    {"role": {"const": "assistant"}, "content": _or_null(TEXT), "refusal": {"const": None}},
    tool_calls=_list(CALL),
)
CONTENT = _or_null(
    _fields(
        {
            "content": _list(_fields(TOKEN | {"top_logprobs": _list(_fields(TOKEN))})),
            "refusal": {"const": None},
        }
    )
)


def _body(kind: str, **choice: Schema) -> Schema:
    of = _list(_fields({"index": COUNT, "finish_reason": REASON, **choice}, token_ids=_list(ID)), 1)
    frame = {
        "id": TEXT,
        "object": {"const": kind},
        "created": COUNT,
        "model": TEXT,
        "choices": of,
        "usage": USAGE,
        "system_fingerprint": TEXT,
    }
    return _fields(frame | {"mint_revision": _or_null(TEXT)})


COMPLETION = _body("text_completion", text=TEXT, logprobs=_or_null(TABLE))
CHAT = _body("chat.completion", message=MESSAGE, logprobs=CONTENT)
ITEM = _fields({"id": TEXT, "type": {"enum": ["message", "function_call"]}, "status": TEXT})
RESPONSE = _fields(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": COUNT,
        "status": {"enum": ["completed", "incomplete"]},
        "model": TEXT,
    }
    | {"output": _list(ITEM), "usage": OBJECT, "mint_revision": EDGE}
)
DELETED = _fields({"id": TEXT, "object": {"const": "response"}, "deleted": {"const": True}})


# -- Tinker


def _tinker() -> Schema:
    model, session, request = {"model_id": NAME}, {"session_id": NAME}, {"request_id": TEXT}
    trained = _fields(request | {"model_id": TEXT})

    def post(
        summary: str,
        required: Schema | None = None,
        answer: Schema = OBJECT,
        binary: bool = False,
        **optional: Schema,
    ) -> Schema:
        body = None if required is None else _fields(required, **optional)
        return {"post": _operation(summary, "Tinker", answer, body=body, binary=binary)}

    def numbered(summary: str, binary: bool = False, **optional: Schema) -> Schema:
        return post(summary, model | {"seq_id": NUMBER}, trained, binary, **optional)

    def get(summary: str) -> Schema:
        return {"get": _operation(summary, "Tinker")}

    names: dict[str, Any] = {
        name: _or_null(NAME) for name in ("display_name", "project_id", "sdk_version")
    }
    notes: dict[str, Any] = {"tags": _or_null(_list(ANY)), "user_metadata": _or_null(OBJECT)}
    target = _fields({"sampling_session_id": NAME}, cloned_sampler_id=PLACE)
    acknowledged = {
        "retrieved_request_ids": _or_null(_list(NAME)),
        "prev_cursor": _whole(0, 2**63 - 1),
        "timeout": ANY,
    }
    places = session | {"sampling_session_seq_id": PLACE}
    summed = {"source_paths": _list(NAME, 1), "coefficients": _list({"type": "number"}, 1)}
    result = {
        "post": _operation(
            "Waits for a result.",
            "Tinker",
            body=_fields({"request_id": NAME}, allow_metadata_only=FLAG),
        )
    }
    result["post"]["responses"]["200"]["content"]["application/x-protobuf"] = {}
    return {
        "healthz": get("The process lives."),
        "get_server_capabilities": get("The base."),
        "samplers/{sampler}": get("What a sampler samples."),
        "auth/token": post("A short-lived token for a key.", None, _fields({"jwt": TEXT})),
        "client/config": post("Options of the SDK."),
        "client/dynamic_config": post("Options of the SDK that may change."),
        "telemetry": post("Taken and dropped."),
        "create_session": post(
            "Opens a session.", {}, _fields({"session_id": TEXT}), **names, **notes
        ),
        "session_heartbeat": post("The session goes on.", session),
        "sessions/{session}/finish": post("Ends a session."),
        "create_model": post(
            "Makes a policy.",
            session | {"model_seq_id": PLACE},
            trained,
            lora_config=ANY,
            user_metadata=ANY,
        ),
        "load_weights": post(
            "Loads a state into a new policy of a session, or into a living one.", {}, path=ANY
        ),
        "get_info": post("A policy's base and rank.", model),
        "unload_model": post("Ends a policy.", model, trained),
        "forward": numbered("Log-probabilities and losses.", True, forward_input=ANY),
        "forward_backward": numbered("Gradients are added up.", True, forward_backward_input=ANY),
        "optim_step": numbered("An update by AdamW.", adam_params=ANY),
        "save_weights": numbered("Keeps a training state.", path=ANY, ttl_seconds=ANY),
        "save_weights_for_sampler": numbered(
            "Makes a revision to sample.", path=ANY, sampling_session_seq_id=ANY
        ),
        "save_weights_external": numbered(
            "Writes encrypted weights to download.", path=ANY, age_encryption_recipients=ANY
        ),
        "create_sampling_session": post(
            "Names what is sampled.", places, model_path=_or_null(NAME), base_model=_or_null(NAME)
        ),
        "join_sampling_session": post("A further copy of a client.", {"sampling_session_id": NAME}),
        "asample": post(
            "Samples.",
            {},
            _fields(request),
            sampling_session_id=_or_null(NAME),
            prompt=ANY,
            sampling_params=ANY,
        ),
        "retrieve_future": result,
        "retrieve_futures": post(
            "Waits for any of a sampler's results.", {"target": target}, **acknowledged
        ),
        "cancel_future": post(
            "Cancels samples.", {}, request_id=_or_null(NAME), request_ids=_or_null(_list(NAME))
        ),
        "mint/checkpoints/interpolate": post("Sums adapters.", summed),
        "mint/forward_backward_reverse_kl": post("Refused, through its future.", model),
    }


def _tinker_rest() -> Schema:
    def of(summary: str, **more: Any) -> Schema:
        return _operation(summary, "Tinker", **more)

    page = {"limit": _whole(0, 10**18 - 1), "offset": _whole(0, 10**18 - 1)}
    checkpoint = "training_runs/{model}/checkpoints/{kind}/{name}"
    life = _or_null(_whole(checkpoints.SHORTEST_S, checkpoints.LONGEST_S))
    copied = _fields(
        {"source_path": NAME},
        ttl_seconds=life,
        destination_project_id=ANY,
        session_id=ANY,
        model_seq_id=ANY,
    )
    searched = (
        "session_id",
        "project_ids",
        "user_metadata",
        "display_name",
        "owner",
        "statuses",
        "limit",
        "cursor",
    )
    return {
        "training_runs": {"get": of("A tenant's policies.", query=page | {"project_id": TEXT})},
        "training_runs/{model}": {"get": of("One policy.")},
        "training_runs/{model}/checkpoints": {"get": of("Its checkpoints.")},
        "checkpoints": {"get": of("A tenant's checkpoints.", query=page)},
        checkpoint: {"delete": of("Removes a checkpoint.", status=204)},
        f"{checkpoint}/publish": {
            "post": of("Other tenants may load it."),
            "delete": of("They may no more."),
        },
        f"{checkpoint}/ttl": {
            "put": of("How long it is kept.", body=_fields({}, ttl_seconds=life))
        },
        f"{checkpoint}/external_weights_urls": {
            "get": of("Where external weights are for an hour.")
        },
        f"{checkpoint}/archive": {
            "get": of("Where a tar of an adapter is for an hour.", status=302)
        },
        "files/{token}": {
            "get": of(
                "A file of a link.",
                kinds=("application/octet-stream", "application/x-tar", "application/json"),
            )
        },
        "weights_info": {
            "post": of("What a checkpoint is of.", body=_fields({"tinker_path": NAME}))
        },
        "copy_weights": {"post": of("Copies a checkpoint.", body=copied)},
        "sessions": {"get": of("A tenant's sessions.", query=page)},
        "sessions/{session}": {"get": of("One session.")},
        "sessions/{session}/project": {
            "put": of("Moves a session into a project.", body=_fields({"project_id": NAME}))
        },
        "sessions/{session}/trace_export": {
            "get": of("Where a session's timeline is for an hour.")
        },
        "sessions/search": {
            "post": of(
                "A tenant's sessions that match.", body=_fields({}, **dict.fromkeys(searched, ANY))
            )
        },
    }


# -- operators


def _operators() -> Schema:
    def get(summary: str, **more: Any) -> Schema:
        return {"get": _operation(summary, "operators", **more)}

    costs = {
        "by": {"enum": ["policy", "tenant"]},
        "tenant": TEXT,
        "limit": _whole(1, MOST_LISTED),
        "offset": _whole(0, 10**9),
    }
    ready = get("Whether requests would be served now.")
    why = {"application/json": {"schema": _fields({"status": TEXT})}}
    ready["get"]["responses"]["503"] = {"description": "Not now, and why.", "content": why}
    return {
        "/health": get("The process lives."),
        "/ready": ready,
        "/metrics": get("Metrics for Prometheus.", kinds=("text/plain",)),
        "/debug/state": get("What the server is doing."),
        "/admin/costs": get("What policies or tenants have cost.", query=costs),
        "/openapi.json": get("This document."),
    }
