"""Bodies of ``/completions`` and ``/chat/completions``: OpenAI's fields, and vLLM's.

Unknown fields are ignored. Known fields that would change the answer and are not supported are
refused.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import Field

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.rollout.device import ALTERNATIVES
from mint_jax.rollout.request import MAX_BIASES, MAX_STOP_IDS, Request
from mint_jax.rollout.witness import GRAMMARS
from mint_jax.service import chat
from mint_jax.service.chat import ROLES, Message, Tool, Tools
from mint_jax.service.validation import BadRequest, Body, Like, Text, TokenId, unsupported, wrong

# completions of a prompt, prompts of a body, completions of a body
MAX_SAMPLES, MAX_PROMPTS, MAX_CHOICES = 128, 2048, 4096
DEFAULT_TOKENS = 16  # of completions, as in OpenAI's API
TOO_LONG = "context_length_exceeded"  # an error code
MOST_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MAX_STOPS, MAX_TEMPERATURE, MAX_LOGPROBS = 4, 2.0, 5  # OpenAI's limits, below the engine's
# fields of the same name in ``Request``, with the same defaults
SAME = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
SAME += ("repetition_penalty",)

Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Schema = dict[str, Any]
Count = Annotated[int, Field(ge=1)]
Top = Annotated[int, Field(ge=0, le=ALTERNATIVES)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
BiasKey = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS // 2, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | dict[str, Any]
PROMPTS = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
Prompts = Annotated[
    str | Annotated[list[str], PROMPTS] | Ids | Annotated[list[Ids], PROMPTS],
    Field(union_mode="left_to_right"),
]

ABSENT = ("allowed_token_ids", "truncate_prompt_tokens", "prompt_embeds", "audio", "chat_template")
ABSENT += ("web_search_options", "structural_tag", "prompt_logprobs", "guided_json")
ABSENT += ("guided_regex", "guided_choice", "guided_grammar")
FALSE = ("use_beam_search", "include_stop_str_in_output", "continue_final_message")
# field -> values that mean "not used"
UNSUPPORTED: dict[str, tuple[Any, ...]] = dict.fromkeys(ABSENT, (None,))
UNSUPPORTED |= dict.fromkeys(FALSE, (None, False)) | {"suffix": (None, ""), "best_of": (None, 1)}
UNSUPPORTED |= dict.fromkeys(("bad_words", "functions"), (None, [])) | {"min_tokens": (None, 0)}
UNSUPPORTED |= {"skip_special_tokens": (None, True), "modalities": (None, ["text"])}


def refusing(base: type[Body], fields: Mapping[str, tuple[Any, ...]]) -> Any:
    """Returns a base class of bodies whose given fields are unsupported."""
    types: dict[str, Any] = {key: (unsupported(values), None) for key, values in fields.items()}
    return pydantic.create_model(base.__name__, __base__=base, **types)


Budget = Annotated[
    float, Field(ge=0, description="Of auto: seconds until its policy could start, at most.")
]


class StreamOptions(Body):
    include_usage: bool | None = None


class NamedSchema(Body):
    schema_: Schema | None = Field(None, alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    json_: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None


class SamplingFields(refusing(Body, UNSUPPORTED)):
    """Fields that all bodies share; null is the same as absent."""

    model: Text
    mint_budget_s: Budget | None = None
    stream: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e30)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=MAX_BIASES)] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None


class ChoicesBody(SamplingFields):
    """Fields that completions and chats share."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    max_tokens: Count | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    mint_witness: bool | None = Field(
        None, description="Each choice carries what an auditor needs, see mint_jax.audit."
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionBody(ChoicesBody):
    prompt: Prompts | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="0 with echo only: the prompt is returned and nothing is sampled."
    )
    logprobs: Top | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class ChatBody(ChoicesBody):
    messages: Annotated[list[Annotated[dict[str, Any], Like(Message)]], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    max_completion_tokens: Count | None = None
    tools: list[Annotated[dict[str, Any], Like(Tool)]] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    echo: unsupported((None, False)) = None  # type: ignore[valid-type]


class RouteBody(Body):
    prompt: Annotated[Text, Field(min_length=1)]
    mint_budget_s: Budget | None = None


class DescribeBody(Body):
    model: Annotated[Text, Field(description="A policy.")]
    prompts: Annotated[
        list[Annotated[Text, Field(min_length=1)]],
        Field(max_length=100, description="What the policy is for; none: it is not for auto."),
    ]


class FeedbackBody(Body):
    id: Annotated[Text, Field(description="The answer's id.")]
    reward: Annotated[float, Field(ge=0, le=1)]


class UnloadAdapter(Body):
    lora_name: Text


class LoadAdapter(UnloadAdapter):
    lora_path: Text
    load_inplace: bool | None = None


def maxima(kind: type[Body], context: int, strict: bool) -> dict[str, float]:
    """Returns the maxima of a body's fields that a server sets: tokens of an answer, and if
    ``strict`` OpenAI's limits, where the engine could do more.
    """
    most: dict[str, float] = dict.fromkeys(MOST_TOKENS, context)
    if strict:
        most["temperature"] = MAX_TEMPERATURE
        most |= {"logprobs": MAX_LOGPROBS} if kind is CompletionBody else {}
    return {name: value for name, value in most.items() if name in kind.model_fields}


class Prompt(NamedTuple):
    """Token ids, and the text that ``echo`` returns."""

    tokens: tuple[int, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Spec:
    """A validated body, ready to be sampled.

    Attributes:
        request: the sampling settings; its prompt is empty.
        names: the body's names of fields of ``request``, where they differ.
    """

    body: CompletionBody | ChatBody
    prompts: list[Prompt]
    request: Request
    names: Mapping[str, str]
    tools: Tools | None = None

    @property
    def chat(self) -> bool:
        return isinstance(self.body, ChatBody)

    @property
    def logprobs(self) -> bool:
        """The answer has log-probabilities; completions may have them without alternatives."""
        return self.body.logprobs is not None and self.body.logprobs is not False

    @property
    def silent(self) -> bool:
        """The answer has no completion text."""
        return isinstance(self.body, CompletionBody) and self.body.max_tokens == 0

    @property
    def whole(self) -> bool:
        """A stream has each choice in one chunk: the prompt's scores come with its end."""
        return bool(self.body.echo) and self.logprobs


def spec_of(
    body: CompletionBody | ChatBody, tokenizer: Tokenizer, context: int, strict: bool = True
) -> Spec:
    """Returns the spec of a body. A chat without a limit of its own may take what its prompt leaves
    of ``context`` tokens.

    Raises:
        BadRequest: names the wrong field.
        UserError: the chat template refuses the messages.
    """
    for name, most in maxima(type(body), context, strict).items():
        if (value := getattr(body, name)) is not None and value > most:
            raise wrong(name, value, f"at most {most}")
    if strict and isinstance(body.stop, list) and len(body.stop) > MAX_STOPS:
        raise wrong("stop", body.stop, f"at most {MAX_STOPS} strings")
    if body.stream_options is not None and not body.stream:
        text = "stream_options is given, but stream is not true: leave it out, or stream"
        raise BadRequest("stream_options", text)
    if isinstance(body, CompletionBody):
        spec = _completion(body, tokenizer)
    else:
        for i, message in enumerate(body.messages if strict else ()):
            if message["role"] not in ROLES:
                raise wrong(f"messages[{i}].role", message["role"], f"one of {', '.join(ROLES)}")
        spec = _chat(body, tokenizer, context)
    if body.mint_witness:  # tokens must be drawn again from what it says
        reason = "max_tokens is 0, so no token is drawn" if spec.silent else ""
        for name in GRAMMARS:
            if getattr(spec.request, name) is not None:
                reason = f"a witness does not say which tokens {spec.names[name]} allows"
        if reason:
            text = f"mint_witness is true, but {reason}: leave one of them out"
            raise BadRequest("mint_witness", text)
    return spec


def _completion(body: CompletionBody, tokenizer: Tokenizer) -> Spec:
    tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if not tokens and not body.echo:
        raise wrong("max_tokens", 0, "1 or more without echo")
    prompts = _prompts(body, tokenizer)
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise wrong("n", body.n, f"at most {MAX_CHOICES} completions of {len(prompts)} prompts")
    field, settings = _grammar(body)
    names = {"stop_ids": "stop_token_ids"} | dict.fromkeys(settings, field)
    if body.echo and body.logprobs is not None:
        settings |= {"prompt_logprobs": True, "top_prompt_logprobs": body.logprobs}
    request = _request(body, tokenizer, max(1, tokens), body.logprobs, settings)
    return Spec(body, prompts, request, names)


def _chat(body: ChatBody, tokenizer: Tokenizer, context: int) -> Spec:
    if body.top_logprobs and not body.logprobs:
        raise wrong("top_logprobs", body.top_logprobs, "0 without logprobs: set logprobs to true")
    field, grammar = _grammar(body)
    tools = chat.tools_of(body.tools, body.tool_choice, body.parallel_tool_calls, tokenizer)
    if tools is not None and tools.schema is not None:
        if grammar:
            text = "tool_choice demands a call, and the body another form of answer"
            raise BadRequest("tool_choice", f"{text}: give one of them")
        field, grammar = "tools", {"json_schema": json.dumps(tools.schema)}
    variables, opening = body.chat_template_kwargs or {}, body.add_generation_prompt is not False
    tokens = tuple(chat.prompt_of(body.messages, tokenizer, tools, variables, opening))
    if len(tokens) >= context:
        text = f"messages are {len(tokens)} tokens, and the context has {context}: shorten them"
        raise BadRequest("messages", text, TOO_LONG)
    most = body.max_completion_tokens or body.max_tokens or context - len(tokens)
    names = {"stop_ids": "stop_token_ids", "prompt": "messages"} | dict.fromkeys(grammar, field)
    request = _request(body, tokenizer, most, body.top_logprobs, grammar)
    return Spec(body, [Prompt(tokens, "")], request, names, tools)


def _request(
    body: ChoicesBody, tokenizer: Tokenizer, max_tokens: int, top: int | None, settings: Any
) -> Request:
    """Returns the sampling settings; ``top`` is the number of alternatives at each token."""
    ends = () if body.ignore_eos else tokenizer.eos_ids
    same = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    return Request(
        (),
        n=body.n or 1,
        max_tokens=max_tokens,
        seed=(body.seed or 0) % 2**32,
        top_k=max(0, body.top_k or 0),
        logit_bias=tuple((int(id), bias) for id, bias in (body.logit_bias or {}).items()),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_ids=tuple(dict.fromkeys((*ends, *(body.stop_token_ids or ())))),
        top_logprobs=top or 0,
        **same,
        **settings,
    )


def _grammar(body: ChoicesBody) -> tuple[str, dict[str, Any]]:
    """Returns the field that constrains the answer, and the constraint as ``Request`` names it."""
    form, outputs = body.response_format, body.structured_outputs or StructuredOutputs(json=None)
    schema = None
    if form is not None and form.type != "text":
        named = form.json_schema and form.json_schema.schema_
        schema = {"type": "object"} if form.type == "json_object" else named
        if schema is None:
            raise wrong("response_format.json_schema.schema", None, "a JSON schema")
    rows: tuple[tuple[str, str, Any, Any], ...] = (
        ("response_format", "json_schema", schema, json.dumps),
        ("structured_outputs.json", "json_schema", outputs.json_, json.dumps),
        ("structured_outputs.regex", "regex", outputs.regex, str),
        ("structured_outputs.choice", "choice", outputs.choice, tuple),
    )
    found = {field: {name: made(value)} for field, name, value, made in rows if value is not None}
    if len(found) > 1:
        raise BadRequest(list(found)[1], f"{' and '.join(found)} are given: give one of them")
    return next(iter(found.items()), ("", {}))


def _prompts(body: CompletionBody, tokenizer: Tokenizer) -> list[Prompt]:
    given = body.prompt or ""
    prompts: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    # OpenAI's API reads an empty prompt as the beginning of a document
    openings = (tokenizer.special_ids.get("<|endoftext|>"), tokenizer.eos_id)
    start = tokenizer.encode("") or [id for id in openings if id is not None][:1]
    out = []
    for one in prompts:
        if isinstance(one, str):
            tokens = tokenizer.encode(one, special=body.add_special_tokens is not False) or start
        else:
            tokens, one = one, tokenizer.decode(one, skip_special=False)
        if not tokens:
            raise wrong("prompt", "", "text: this tokenizer has no token that begins a document")
        out.append(Prompt(tuple(tokens), one))
    return out
