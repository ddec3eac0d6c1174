"""``/openapi.json``: OpenAPI 3.1, generated from the endpoints and the pydantic models of bodies.

Tinker's training and sampling requests are documented by their place (session, model, number)
only: any other mistake fails their future. Their protobuf forms are in ``wire/``.
"""

import functools
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mint_jax.service.endpoints import JSON, OPENAI_PREFIXES, PROTOBUF, TABLE, Endpoint
from mint_jax.service.openai_types import OPENAI, Bounds, Count

Schema = dict[str, Any]
SCHEMAS = "#/components/schemas/"
STATUSES = {  # other than success
    400: "The request is wrong: the message says where.",
    401: "The key is missing or invalid.",
    403: "The key lacks the scope.",
    404: "The object does not exist, or belongs to another tenant.",
    405: "The path takes another method.",
    408: "There is no result yet, or the body did not arrive in time: ask again.",
    409: "It exists already, with another content.",
    410: "It has ended.",
    413: "The body is too large.",
    415: "The content type or coding is unknown.",
    429: "The server is loaded: ask again after Retry-After.",
    503: "The server cannot serve now: ask again.",
}
Tokens = Annotated[int, Field(ge=0)]
Choices = Annotated[list[Schema], Field(min_length=1, description="As in OpenAI's API.")]
USAGE = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), Tokens)
GENERATED = {"id": str, "model": str, "mint_revision": str | None}
ANSWERS: dict[str, type[pydantic.BaseModel]] = {}


def _answer(name: str, **fields: Any) -> Any:
    """Documents an answer by its fields' types."""
    required: Any = {field: (type, ...) for field, type in fields.items()}
    ANSWERS[name] = pydantic.create_model(f"{name}Answer", **required)
    return ANSWERS[name]


_answer("Detail", detail=str)
fields = _answer("ErrorFields", message=str, type=str, param=str | None, code=str | None)
_answer("Error", error=fields)
_answer("Ready", status=str)
_answer("Token", jwt=str)
_answer("Session", session_id=str)
_answer("Future", request_id=str, model_id=str)
card = {"id": str, "created": int, "owned_by": str, "mint_revision": str | None}
model = _answer("Model", object=Literal["model"], **card)
edges = {"has_more": bool, "first_id": str | None, "last_id": str | None}
_answer("Models", object=Literal["list"], data=list[model], **edges)
for name, kind in (("Completion", "text_completion"), ("Chat", "chat.completion")):
    _answer(
        name,
        object=Literal[kind],  # type: ignore[valid-type]
        created=Count,
        choices=Choices,
        usage=_answer("Usage", **USAGE),
        system_fingerprint=str,
        **GENERATED,
    )
_answer(
    "Response",
    object=Literal["response"],
    created_at=Count,
    status=Literal["completed", "incomplete"],
    output=list[Schema],
    usage=Schema,
    **GENERATED,
)
_answer("Deleted", id=str, object=Literal["response"], deleted=Literal[True])


def route(context: int, bounds: Bounds = OPENAI) -> Route:
    """Returns the document's route.

    Args:
        context: maximum number of tokens of an answer.
        bounds: limits of OpenAI's fields.
    """
    made = document(context, bounds)

    async def openapi(_: Request) -> JSONResponse:
        return JSONResponse(made)

    return Route("/openapi.json", openapi, methods=["GET"])


@functools.cache
def document(context: int, bounds: Bounds = OPENAI) -> Schema:
    """Returns the document of one server."""
    endpoints = [one for one in TABLE.endpoints if one.summary]
    bodies = {one.body for one in endpoints if one.body is not None}
    _, schemas = pydantic.json_schema.models_json_schema(
        [(model, "validation") for model in (*bodies, *ANSWERS.values())],
        ref_template=SCHEMAS + "{model}",
    )
    for body in bodies:
        fields = schemas["$defs"][body.__name__].get("properties", {})
        for field, most in bounds.maxima(body, context).items():
            fields[field]["anyOf"][0]["maximum"] = most
        if "stop" in fields:
            fields["stop"]["anyOf"][1]["maxItems"] = bounds.stops
    paths: Schema = {}
    for one in endpoints:
        path = one.path.replace(":path}", "}")
        paths.setdefault(path, {})[one.method.lower()] = _operation(one)
        if names := [part.partition("}")[0] for part in path.split("{")[1:]]:
            text = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            paths[path]["parameters"] = [{"name": name} | text for name in names]
    failures = {
        f"{form}{code}": {"description": text, "content": _json(_failed(form, code))}
        for form in ("Detail", "Error")
        for code, text in STATUSES.items()
    }
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    description = "Training and sampling of LoRA policies over one resident base model."
    components = {"securitySchemes": keys, "responses": failures, "schemas": schemas["$defs"]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mint_jax", "version": "1", "description": description},
        "paths": paths,
        "components": components,
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _json(schema: Schema) -> Schema:
    return {JSON: {"schema": schema}}


def _ref(model: str) -> Schema:
    return {"$ref": SCHEMAS + model}


def _failed(form: str, code: int) -> Schema:
    schema = _ref(f"{form}Answer")
    if code == 408:  # a long poll without a result
        queue = {"type": "object", "properties": {"queue_state": {"type": "string"}}}
        schema = {"anyOf": [schema, queue | {"required": ["queue_state"]}]}
    return schema


def _operation(one: Endpoint) -> Schema:
    openai = one.path.startswith(OPENAI_PREFIXES)
    failure = "Error" if openai else "Detail"
    responses: Schema = {
        str(code): {"$ref": f"#/components/responses/{failure}{code}"} for code in STATUSES
    }
    responses[str(one.status)] = {"description": "Success."}
    if one.status == 200:
        answer = _ref(f"{one.answer}Answer") if one.answer else {"type": "object"}
        content = {kind: {"schema": answer} if kind == JSON else {} for kind in one.kinds}
        responses["200"]["content"] = content
    if one.path == "/ready":
        text = "Not now; the status says why."
        responses["503"] = {"description": text, "content": _json(_ref("ReadyAnswer"))}
    tag = "OpenAI" if openai else "Tinker" if one.path.startswith("/api") else "operators"
    out: Schema = {"summary": one.summary, "tags": [tag], "responses": responses}
    if one.query is not None:
        out["parameters"] = [
            {"name": name, "in": "query", "schema": schema}
            for name, schema in one.query.model_json_schema()["properties"].items()
        ]
    if one.body is not None:
        content = _json(_ref(one.body.__name__)) | ({PROTOBUF: {}} if one.protobuf else {})
        out["requestBody"] = {"required": True, "content": content}
    return out
