"""Inputs of requests: the tenant, and bodies and queries validated by pydantic models, which both
doors and OpenAPI share.
"""

import asyncio
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field, GetCoreSchemaHandler, WithJsonSchema
from pydantic_core import core_schema, from_json
from starlette.requests import Request

from mint_jax.errors import UserError
from mint_jax.service.bodies import DEPTH, depth_of

OFF_LOOP = 1 << 16  # bytes of a body from which it is parsed in a thread
MAX_LISTED = 1000


class BadRequest(UserError):
    """A field of a request is wrong: ``param`` is its path, such as ``messages[0].role``; None for
    the body as a whole. ``code`` is OpenAI's error code.
    """

    def __init__(self, param: str | None, message: str, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class Body(pydantic.BaseModel):
    """Base of all bodies: types are strict, unknown fields are ignored."""

    model_config = pydantic.ConfigDict(strict=True)


WORDS = (  # pydantic's -> ours
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("greater than", "more than"),
    ("a valid ", "a "),
)
T = TypeVar("T", bound=pydantic.BaseModel)
Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Place = Annotated[int, Field(ge=0, lt=2**31)]  # the number of an object in its session
SeqId = Annotated[int, Field(ge=1, lt=2**31)]  # the number of a training request
Number = Annotated[float, Field(ge=-3.4028234663852886e38, le=3.4028234663852886e38)]
Natural = Annotated[int, Field(ge=0, lt=10**18)]
Limit = Annotated[int, Field(ge=1, le=MAX_LISTED)]


class PageQuery(Body):
    limit: Annotated[Natural, pydantic.AfterValidator(lambda limit: min(limit, MAX_LISTED))] = 20
    offset: Natural = 0


class RunsQuery(PageQuery):
    project_id: str | None = None


class UsageQuery(Body):
    starting_on: pydantic.AwareDatetime
    ending_before: pydantic.AwareDatetime


class ModelsQuery(Body):
    limit: Limit = 100
    after: str | None = None


class CostsQuery(Body):
    by: Literal["policy", "tenant"] = "policy"
    tenant: str | None = None
    limit: Limit = 100
    offset: Natural = 0


@dataclasses.dataclass(frozen=True)
class Like:
    """Validates a value as a model and keeps it as it was sent, with its keys in their order."""

    model: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        def keep(value: Any, check: Any) -> Any:
            check(value)
            return value

        return core_schema.no_info_wrap_validator_function(
            keep, handler.generate_schema(self.model)
        )


def unsupported(values: Sequence[Any]) -> Any:
    """Returns the type of a field that is accepted only with values that mean "not used"."""

    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError("is not supported: leave it out")
        return value

    schema = {"enum": list(values), "description": "Not supported: leave it out."}
    return Annotated[Any, pydantic.AfterValidator(check), WithJsonSchema(schema)]


def tenant_of(request: Request) -> str:
    """Returns the tenant that the gate found."""
    return getattr(request.state, "tenant", "default")


async def body_of(model: type[T], request: Request) -> T:
    """Returns a validated body. Raises ``BadRequest``."""
    raw = await request.body()
    return await off_loop(len(raw), lambda: parse(model, raw))


async def off_loop(size: int, call: Callable[[], Any]) -> Any:
    """Returns what a call returns; in a thread if it has many bytes to parse."""
    return await asyncio.to_thread(call) if size > OFF_LOOP else call()


def query_of(model: type[T], request: Request) -> T:
    """Returns a validated query. Raises ``BadRequest``."""
    return check(model, dict(request.query_params), strict=False)


def parse(model: type[T], raw: bytes) -> T:
    """Validates the JSON of a body.

    Raises:
        BadRequest: it is not JSON, or not such a body; the message names the first wrong field.
    """
    if depth_of(raw) > DEPTH:  # before anything recurses
        problem = f"the JSON nests deeper than {DEPTH} lists and objects"
        raise BadRequest(None, f"{problem}: send it flatter")
    try:
        return model.model_validate_json(raw)
    except pydantic.ValidationError as error:
        details = error.errors(include_url=False)
    if details[0]["type"] == "json_invalid":
        reason = details[0]["msg"].removeprefix("Invalid JSON: ")
        raise BadRequest(None, f"the body is not JSON in UTF-8 ({reason}): check what was sent")
    raise _refusal(details, from_json(raw))


def check(model: type[T], value: Any, strict: bool = True) -> T:
    """Validates values as ``parse`` does a body; if not ``strict``, numbers may be text. Raises
    ``BadRequest`` likewise.
    """
    try:
        return model.model_validate(value, strict=strict)
    except pydantic.ValidationError as error:
        details = error.errors(include_url=False)
    raise _refusal(details, value)


def wrong(name: str, value: Any, expected: str) -> BadRequest:
    """Returns the error for a field's value."""
    return BadRequest(name, f"{name} is {shown(value)}; expected {expected}")


def shown(value: Any) -> str:
    """Returns a value for a message, cut where it is long."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    named = {None: "null", True: "true", False: "false"}
    text = named[value] if value is None or isinstance(value, bool) else ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _refusal(details: Sequence[Any], body: Any) -> BadRequest:
    """Returns one error for the first wrong field, at the deepest place that is wrong in it.

    A union reports an error for each of its types; those of one place become one sentence.
    """
    top = details[0]["loc"][:1]
    found = [(_path(one, body), one) for one in details if one["loc"][:1] == top]
    path, first = max(found, key=lambda one: len(one[0]))  # the first of the deepest
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
    name, value = name if len(name) <= 200 else name[:197] + "...", first["input"]
    if first["type"] == "missing":
        return BadRequest(name, f"{name} is missing: give it")
    if first["type"] == "value_error":
        return BadRequest(name, f"{name} {first['msg'].removeprefix('Value error, ')}")
    if first["type"].startswith("union_tag"):
        key, tags = first["ctx"]["discriminator"].strip("'"), first["ctx"].get("expected_tags")
        value = value.get(key) if isinstance(value, dict) else value
        return wrong(f"{name}.{key}", value, f"one of {tags}" if tags else "a type")
    expected = dict.fromkeys(_expected(one) for other, one in found if other == path)
    message = f"{name or 'the body'} is {shown(value)}; expected {' or '.join(expected)}"
    return BadRequest(name or None, message)


def _path(detail: Mapping[str, Any], body: Any) -> tuple[Any, ...]:
    """Returns the path of an error in a body.

    Pydantic's locations also name the types of a union; these are no keys of the body.
    """
    path, parts = [], detail["loc"]
    for i, part in enumerate(parts):
        places = body if isinstance(body, dict) else range(len(body) if type(body) is list else 0)
        if part in places:
            body = body[part]
        elif detail["type"] != "missing" or i < len(parts) - 1:
            continue
        path.append(part)
    return tuple(path)


def _expected(detail: Mapping[str, Any]) -> str:
    """Returns what pydantic expected: ``'a' or 'b'`` of ``Input should be 'a' or 'b'``."""
    message, pattern = detail["msg"], r"\w+ should (?:be|have) (.*?)( after validation, not \d+)?"
    found = re.fullmatch(pattern, message)
    text = found[1] if found else message[:1].lower() + message[1:]
    return functools.reduce(lambda text, words: text.replace(*words), WORDS, text)
