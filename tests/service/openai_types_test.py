"""Bodies of any shape are read or refused by name; none is a failure of the server."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError
from mint_jax.models import base as base_lib
from mint_jax.service import fields
from mint_jax.service.openai_types import UNSUPPORTED, chat_of, completion_of
from mint_jax.service.responses import Store, asked_of
from tests.service.chat_test import TEMPLATE, WEATHER

NAMES = [
    *(
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "stop",
    ),
    *(
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "top_logprobs",
        "echo",
        "stream",
        "stream_options",
        "presence_penalty",
        "best_of",
    ),
    *(
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "response_format",
        "guided_json",
        "guided_regex",
        "guided_choice",
    ),
    *(
        "structured_outputs",
        "prompt_logprobs",
        "return_token_ids",
        "tools",
        "tool_choice",
        "chat_template_kwargs",
        "add_special_tokens",
    ),
    *(
        "input",
        "instructions",
        "max_output_tokens",
        "text",
        "include",
        "metadata",
        "store",
        "previous_response_id",
        "parallel_tool_calls",
    ),
    *UNSUPPORTED,
]
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


def response_of(body, tokenizer, context):
    return chat_of(asked_of(body, "default", Store()).chat, tokenizer, context)


@settings(
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.sampled_from([completion_of, chat_of, response_of]),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
)
def test_any_body_is_read_or_refused(tokenizer, read, change):
    good = {
        "model": "m",
        "prompt": "x",
        "messages": [{"role": "user", "content": "x"}],
        "input": "x",
    }
    try:
        body = fields.parse(json.dumps({**good, **change}).encode())
        asked = read(body, tokenizer, 512)
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
    asked = chat_of(body, tokenizer, 512)
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
    assert chat_of({**body, "ignore_eos": True}, tokenizer, 512).request.stop_ids == (7, 2)
    demanded = {**body, "tools": [WEATHER], "tool_choice": "required"}
    with pytest.raises(fields.BadRequest, match="another form of answer"):
        chat_of(demanded, tokenizer, 512)
