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
from mint_jax.service.openai_types import OPENAI, Bounds, SamplingFields, limited
from mint_jax.service.responses import ResponseBody

Schema = dict[str, Any]
REF = "#/components/schemas/{model}"
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
    bodies = {one.body: one.body for one in endpoints if one.body is not None}
    for body in bodies:
        if issubclass(body, SamplingFields | ResponseBody):
            bodies[body] = limited(body, bounds, context)
    models = [*bodies.values(), *ANSWERS.values()]
    refs, schemas = pydantic.json_schema.models_json_schema(
        [(model, "validation") for model in models], ref_template=REF
    )
    ref_of = {model: refs[model, "validation"] for model in models}
    paths: Schema = {}
    for one in endpoints:
        path = one.path.replace(":path}", "}")
        operation = _operation(one, ref_of)
        if one.body is not None:
            content = {JSON: {"schema": ref_of[bodies[one.body]]}}
            content |= {PROTOBUF: {}} if one.protobuf else {}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[one.method.lower()] = operation
        if names := [part.partition("}")[0] for part in path.split("{")[1:]]:
            paths[path]["parameters"] = [
                {"name": name, "in": "path", "required": True}
                | {"schema": {"type": "string", "minLength": 1}}
                for name in names
            ]
    failures = {
        f"{name}{code}": _failure(code, ref_of[ANSWERS[name]])
        for name in ("Detail", "Error")
        for code in STATUSES
    }
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mint_jax",
            "version": "1",
            "description": "Training and sampling of LoRA policies over one resident base model.",
        },
        "paths": paths,
        "components": {
            "securitySchemes": keys,
            "responses": failures,
            "schemas": schemas.get("$defs", {}),
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _operation(one: Endpoint, ref_of: dict[Any, Schema]) -> Schema:
    answer = ref_of[ANSWERS[one.answer]] if one.answer else {"type": "object"}
    content = {kind: {"schema": answer} if kind == JSON else {} for kind in one.kinds}
    responses: Schema = {str(one.status): {"description": "Success."}}
    if one.status == 200:
        responses["200"]["content"] = content
    openai = one.path.startswith(OPENAI_PREFIXES)
    failure = "Error" if openai else "Detail"
    for code in STATUSES:
        responses[str(code)] = {"$ref": f"#/components/responses/{failure}{code}"}
    if one.path == "/ready":
        responses["503"] = {
            "description": "Not now; the status says why.",
            "content": {JSON: {"schema": ref_of[ReadyAnswer]}},
        }
    tag = "OpenAI" if openai else "Tinker" if one.path.startswith("/api") else "operators"
    out: Schema = {"summary": one.summary, "tags": [tag], "responses": responses}
    if one.query is not None:
        out["parameters"] = [
            {"name": name, "in": "query", "schema": schema}
            for name, schema in one.query.model_json_schema()["properties"].items()
        ]
    return out


def _failure(code: int, schema: Schema) -> Schema:
    if code == 408:  # a long poll without a result
        queue = {"type": "object", "properties": {"queue_state": {"type": "string"}}}
        schema = {"anyOf": [schema, queue | {"required": ["queue_state"]}]}
    return {"description": STATUSES[code], "content": {JSON: {"schema": schema}}}


# -- answers

Count = Annotated[int, Field(ge=0)]
Choices = Annotated[list[dict[str, Any]], Field(min_length=1, description="As in OpenAI's API.")]


class Documented(pydantic.BaseModel):
    """Base of documented answers."""


class DetailAnswer(Documented):
    detail: str


class ErrorFields(Documented):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Documented):
    error: ErrorFields


class ReadyAnswer(Documented):
    status: str


class TokenAnswer(Documented):
    jwt: str


class SessionAnswer(Documented):
    session_id: str


class FutureAnswer(Documented):
    request_id: str
    model_id: str


class ModelAnswer(Documented):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    mint_revision: str | None


class ModelsAnswer(Documented):
    object: Literal["list"]
    data: list[ModelAnswer]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Usage(Documented):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class CompletionAnswer(Documented):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: Choices
    usage: Usage
    system_fingerprint: str
    mint_revision: str | None


class ChatAnswer(CompletionAnswer):
    object: Literal["chat.completion"]  # type: ignore[assignment]


class ResponseAnswer(Documented):
    id: str
    object: Literal["response"]
    created_at: Count
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]
    mint_revision: str | None


class DeletedAnswer(Documented):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


ANSWERS: dict[str, type[Documented]] = {
    name.removesuffix("Answer"): kind
    for name, kind in list(globals().items())
    if name.endswith("Answer")
}
