"""``/openapi.json``: OpenAPI 3.1, generated from the endpoints and the pydantic models of bodies.

Tinker's training and sampling requests are documented by their place (session, model, number)
only: any other mistake fails their future. Their protobuf forms are in ``wire/``.
"""

import functools
from typing import Any

import pydantic
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mint_jax.service.endpoints import JSON, OPENAI_PREFIXES, PROTOBUF, TABLE, Endpoint
from mint_jax.service.openai_types import MAX_STOPS, maxima

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


def _model(name: str, **fields: Any) -> Any:
    """Documents an answer by the types of its fields."""
    required: Any = {field: (type, ...) for field, type in fields.items()}
    return pydantic.create_model(name, **required)


ERROR = _model("ErrorFields", message=str, type=str, param=str | None, code=str | None)
FAILURES = (_model("Detail", detail=str), _model("Error", error=ERROR), _model("Ready", status=str))


def route(context: int, strict: bool) -> Route:
    """Returns the document's route, see ``openai_types.maxima``."""
    made = document(context, strict)

    async def openapi(_: Request) -> JSONResponse:
        return JSONResponse(made)

    return Route("/openapi.json", openapi, methods=["GET"])


@functools.cache
def document(context: int, strict: bool) -> Schema:
    endpoints = [one for one in TABLE.endpoints if one.summary]
    bodies = {one.body for one in endpoints if one.body is not None}
    _, schemas = pydantic.json_schema.models_json_schema(
        [(model, "validation") for model in (*bodies, *FAILURES)],
        ref_template=SCHEMAS + "{model}",
    )
    for body in bodies:
        fields = schemas["$defs"][body.__name__].get("properties", {})
        for field, most in maxima(body, context, strict).items():
            fields[field]["anyOf"][0]["maximum"] = most
        if "stop" in fields and strict:
            fields["stop"]["anyOf"][1]["maxItems"] = MAX_STOPS
    paths: Schema = {}
    for one in endpoints:
        path = one.path.replace(":path}", "}")
        paths.setdefault(path, {})[one.method.lower()] = _operation(one)
        if names := [part.partition("}")[0] for part in path.split("{")[1:]]:
            text = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            paths[path]["parameters"] = [{"name": name} | text for name in names]
    failures = {
        f"{form}{code}": {"description": text, "content": _failed(form, code)}
        for form in ("Detail", "Error")
        for code, text in STATUSES.items()
    }
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    description = "Training and sampling of LoRA policies over one resident base model."
    return {
        "openapi": "3.1.0",
        "info": {"title": "mint_jax", "version": "1", "description": description},
        "paths": paths,
        "components": {
            "securitySchemes": keys,
            "responses": failures,
            "schemas": schemas["$defs"],
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _ref(model: str) -> Schema:
    return {JSON: {"schema": {"$ref": SCHEMAS + model}}}


def _failed(form: str, code: int) -> Schema:
    content = _ref(form)
    if code == 408:  # a long poll without a result
        queue = {"type": "object", "properties": {"queue_state": {"type": "string"}}}
        schema = content[JSON]["schema"]
        content = {JSON: {"schema": {"anyOf": [schema, queue | {"required": ["queue_state"]}]}}}
    return content


def _operation(one: Endpoint) -> Schema:
    openai = one.path.startswith(OPENAI_PREFIXES)
    failure = "Error" if openai else "Detail"
    responses: Schema = {
        str(code): {"$ref": f"#/components/responses/{failure}{code}"} for code in STATUSES
    }
    responses[str(one.status)] = {"description": "Success."}
    if one.status == 200:
        answers = {JSON: {"schema": {"type": "object"}}}
        responses["200"]["content"] = {kind: answers.get(kind, {}) for kind in one.kinds}
    if one.path == "/ready":
        text = "Not now; the status says why."
        responses["503"] = {"description": text, "content": _ref("Ready")}
    tag = "OpenAI" if openai else "Tinker" if one.path.startswith("/api") else "operators"
    out: Schema = {"summary": one.summary, "tags": [tag], "responses": responses}
    if one.query is not None:
        out["parameters"] = [
            {"name": name, "in": "query", "schema": schema}
            for name, schema in one.query.model_json_schema()["properties"].items()
        ]
    if one.body is not None:
        content = _ref(one.body.__name__) | ({PROTOBUF: {}} if one.protobuf else {})
        out["requestBody"] = {"required": True, "content": content}
    return out
