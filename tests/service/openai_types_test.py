"""Bodies of any shape are accepted or refused by name; none fails the server."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError
from mint_jax.models import base as base_lib
from mint_jax.service import openai_types
from mint_jax.service.openai_types import ChatBody, CompletionBody
from mint_jax.service.responses import ResponseBody, Store, chat_body_of, conversation_of
from mint_jax.service.validation import check, parse
from tests.service.chat_test import TEMPLATE

FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *ResponseBody.model_fields})
KEYS = ["role", "content", "type", "text", "function", "name", "parameters", "json_schema"]
KEYS += ["schema", "json", "tool_calls", "arguments", "output", "format"]
WORDS = ["user", "assistant", "text", "function", "json_schema", "required", "auto", "none", "{}"]
WORDS += ["weather", "[", "5", "function_call", "function_call_output", "message", "input_text"]
SCALARS = st.none() | st.booleans() | st.integers(-3, 600) | st.integers() | st.floats()
VALUES = st.recursive(
    SCALARS | st.sampled_from([*WORDS, "\ud800", "\x00"]) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer(base_lib.resolve("tiny-random"))
    made._templates = {"default": TEMPLATE}
    return made


def spec_of(kind, body, tokenizer):
    """Reads a body as the service does."""
    read = parse(kind, json.dumps({"model": "m", **body}).encode())
    if isinstance(read, ResponseBody):
        messages = conversation_of(read, "default", Store())
        read = check(ChatBody, chat_body_of(read, messages))
    return openai_types.spec_of(read, tokenizer, 512)


@settings(
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.sampled_from([CompletionBody, ChatBody, ResponseBody]),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
)
def test_any_body_is_accepted_or_refused(tokenizer, kind, change):
    good = {"prompt": "x", "messages": MESSAGES, "input": "x"}
    try:
        spec = spec_of(kind, {**good, **change}, tokenizer)
    except UserError:
        return
    assert spec.prompts
    assert spec.request.max_tokens >= 1


def test_fields_become_sampling_settings(tokenizer):
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    body = {"messages": MESSAGES, "max_tokens": 9, "max_completion_tokens": 8, "top_k": -1}
    body |= {"stop": "END", "stop_token_ids": [7, 2], "seed": -1, "response_format": form}
    body |= {"logit_bias": {"5": -100, "6": 2.5}}
    request = spec_of(ChatBody, body, tokenizer).request
    assert (request.stop, request.stop_ids, request.top_k) == (("END",), (2, 7), 0)
    assert (request.seed, request.max_tokens) == (2**32 - 1, 8)
    assert request.logit_bias == ((5, -100.0), (6, 2.5))
    assert request.json_schema == '{"type": "integer"}'
    unended = spec_of(ChatBody, {**body, "ignore_eos": True}, tokenizer)
    assert unended.request.stop_ids == (7, 2)
