"""Bodies of any shape are read or refused by name; none is a failure of the server."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError
from mint_jax.models import base as base_lib
from mint_jax.service.openai_types import (
    OPENAI,
    ChatBody,
    CompletionBody,
    chat_of,
    completion_of,
    limited,
)
from mint_jax.service.responses import ResponseBody, Store, response_of
from mint_jax.service.validation import BadRequest, check, parse
from tests.service.chat_test import TEMPLATE, WEATHER

NAMES = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *ResponseBody.model_fields})
KEYS = [
    *(
        "role",
        "content",
        "type",
        "text",
        "function",
        "name",
        "parameters",
        "json_schema",
        "schema",
        "json",
        "tool_calls",
        "arguments",
    ),
    *("output", "format"),
]
WORDS = [
    *(
        "user",
        "assistant",
        "text",
        "function",
        "json_schema",
        "required",
        "auto",
        "none",
        "weather",
        "{}",
        "[",
        "\ud800",
        "\x00",
        "5",
    ),
    *("function_call", "function_call_output", "message", "input_text"),
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 600)
    | st.integers()
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer(base_lib.resolve("tiny-random"))
    made._templates = {"default": TEMPLATE}
    return made


def spec_of(kind, raw, tokenizer):
    """Reads a body as the service does."""
    body = parse(limited(kind, OPENAI, 512), raw)
    if isinstance(body, CompletionBody):
        return completion_of(body, tokenizer)
    if isinstance(body, ResponseBody):
        body = check(ChatBody, response_of(body, "default", Store()).chat)
    return chat_of(body, tokenizer, 512)


@settings(
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.sampled_from([CompletionBody, ChatBody, ResponseBody]),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
)
def test_any_body_is_read_or_refused(tokenizer, kind, change):
    good = {
        "model": "m",
        "prompt": "x",
        "messages": [{"role": "user", "content": "x"}],
        "input": "x",
    }
    try:
        asked = spec_of(kind, json.dumps({**good, **change}).encode(), tokenizer)
    except UserError:
        return
    assert asked.prompts
    assert asked.request.max_tokens >= 1


def test_what_is_given_is_what_is_asked(tokenizer):
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "stop": "END",
        "stop_token_ids": [7, 2],
        "top_k": -1,
        "seed": -1,
        "logit_bias": {"5": -100, "6": 2.5},
        "max_tokens": 9,
        "max_completion_tokens": 8,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}},
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    def read(body):
        return spec_of(ChatBody, json.dumps(body).encode(), tokenizer)

    asked = read(body)
    request = asked.request
    assert (request.stop, request.stop_ids, request.top_k, request.seed) == (
        ("END",),
        (2, 7),
        0,
        2**32 - 1,
    )
    assert (request.logit_bias, request.max_tokens, request.json_schema) == (
        ((5, -100.0), (6, 2.5)),
        8,
        '{"type": "integer"}',
    )
    assert (asked.stream, asked.usage, asked.chat, asked.whole) == (True, True, True, False)
    assert read({**body, "ignore_eos": True}).request.stop_ids == (7, 2)
    demanded = {**body, "tools": [WEATHER], "tool_choice": "required"}
    with pytest.raises(BadRequest, match="another form of answer"):
        read(demanded)
