"""``/openapi.json``: OpenAPI 3.1, generated from the endpoints and the pydantic models of bodies.

Tinker's training and sampling requests are documented by their place (session, model, number)
only: any other mistake fails their future. Their protobuf forms are in ``wire/``.
"""

import functools
import re
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from mint_jax.service.endpoints import JSON, OPENAI_PREFIXES, PROTOBUF, TABLE, Endpoint
from mint_jax.service.openai_types import MAX_STOPS, maxima

Schema = dict[str, Any]
SCHEMAS = "#/components/schemas/"
FAILED = (
    "400: the message names the field that is wrong; 401: the key is missing, unknown or expired;"
    " 403: the key lacks the scope, or a quota is used up; 404: there is no such object; 405: the"
    " path takes another method; 408: there is no result yet, ask again; 409: the number or name is"
    " in use otherwise; 410: it has ended; 413 and 415: the body is too large, or of another type;"
    " 429 and 503: ask again after Retry-After; 500: the server failed, its log says why."
)


def _model(name: str, **fields: Any) -> Any:
    """Documents an answer by the types of its fields."""
    required: Any = {field: (type, ...) for field, type in fields.items()}
    return pydantic.create_model(name, **required)


ERROR = _model("ErrorFields", message=str, type=str, param=str | None, code=str | None)
FAILURES = (_model("Detail", detail=str), _model("Error", error=ERROR), _model("Ready", status=str))
Natural = Annotated[int, Field(ge=0)]
REVISION = {"id": str, "mint_revision": str | None}
CARD = _model("Model", object=Literal["model"], created=int, owned_by=str, **REVISION)
CARDS = {"data": list[CARD], "has_more": bool, "first_id": str | None, "last_id": str | None}
TOKENS = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), Natural)
CHOICES: Any = Annotated[list[Schema], Field(min_length=1, description="As in OpenAI's API.")]
GENERATED = {"created": Natural, "model": str, "choices": CHOICES, "system_fingerprint": str}
GENERATED |= {"usage": _model("Usage", **TOKENS), **REVISION}
ITEMS = {"created_at": Natural, "status": str, "model": str, "output": list[Schema]}
RESPONSE = _model("Response", object=Literal["response"], usage=Schema, **ITEMS, **REVISION)
FUTURES = ("create_model", "unload_model", "forward_backward", "optim_step", "save_weights")
FUTURES += ("save_weights_for_sampler", "save_weights_external")
ANSWERS: dict[str, Any] = dict.fromkeys(FUTURES, _model("Future", request_id=str, model_id=str))
ANSWERS |= {  # name of the handler -> its answer
    "token": _model("Token", jwt=str),
    "create_session": _model("Session", session_id=str),
    "models": _model("Models", object=Literal["list"], **CARDS),
    "model": CARD,
    "completions": _model("Completion", object=Literal["text_completion"], **GENERATED),
    "chats": _model("Chat", object=Literal["chat.completion"], **GENERATED),
    "responses": RESPONSE,
    "response": RESPONSE,
    "feedback": _model("Feedback", object=Literal["feedback"], id=str, state=str | None),
    "delete_response": _model("Deleted", id=str, object=Literal["response"], deleted=bool),
}


async def openapi(context: int, strict: bool, _: Request) -> JSONResponse:
    """Answers with the document, see ``openai_types.maxima``."""
    return JSONResponse(document(context, strict))


@functools.cache
def document(context: int, strict: bool) -> Schema:
    endpoints = [one for one in TABLE.endpoints if one.summary]
    bodies = {one.body for one in endpoints if one.body is not None}
    models = (*bodies, *FAILURES, *set(ANSWERS.values()))
    _, schemas = pydantic.json_schema.models_json_schema(
        [(model, "validation") for model in models], ref_template=SCHEMAS + "{model}"
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
        if names := re.findall(r"{(\w+)}", path):
            text = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            paths[path]["parameters"] = [{"name": name} | text for name in names]
    header = {"type": "apiKey", "in": "header", "name": "X-API-Key"}
    failed = {form: {"description": FAILED, "content": _ref(form)} for form in ("Detail", "Error")}
    description = "Training and sampling of LoRA policies over one resident base model."
    return {
        "openapi": "3.1.0",
        "info": {"title": "mint_jax", "version": "1", "description": description},
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}, "header": header},
            "responses": failed,
            "schemas": schemas["$defs"],
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _ref(model: str) -> Schema:
    return {JSON: {"schema": {"$ref": SCHEMAS + model}}}


def _operation(one: Endpoint) -> Schema:
    openai = one.path.startswith(OPENAI_PREFIXES)
    failed = {"$ref": f"#/components/responses/{'Error' if openai else 'Detail'}"}
    responses: Schema = {str(one.status): {"description": "Success."}, "default": failed}
    if one.status == 200:
        answer = ANSWERS.get(one.name)
        content = _ref(answer.__name__) if answer else {JSON: {"schema": {"type": "object"}}}
        responses["200"]["content"] = {kind: content.get(kind, {}) for kind in one.kinds}
    if one.path == "/ready":
        text = "Not now; the status says why."
        responses["503"] = {"description": text, "content": _ref("Ready")}
    tag = "OpenAI" if openai else "Tinker" if one.path.startswith("/api") else "operators"
    out: Schema = {"summary": one.summary, "tags": [tag], "responses": responses}
    if one.query is not None:
        properties = one.query.model_json_schema()["properties"].items()
        out["parameters"] = [
            {"name": n, "in": "query", "schema": schema} for n, schema in properties
        ]
    if one.body is not None:
        content = _ref(one.body.__name__) | ({PROTOBUF: {}} if one.protobuf else {})
        out["requestBody"] = {"required": True, "content": content}
    return out
