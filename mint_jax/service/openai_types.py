"""What a body of ``/completions`` or ``/chat/completions`` asks for: every field that OpenAI's API
and vLLM have and we do.

Fields that are not known are ignored; known ones that would change the answer, and cannot be had,
are refused.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from mint_jax.data.tokenizer import Tokenizer
from mint_jax.rollout.device import ALTERNATIVES
from mint_jax.rollout.request import MAX_BIASES, MAX_STOP_IDS, Request
from mint_jax.service import chat, fields
from mint_jax.service.chat import Tools
from mint_jax.service.fields import BadRequest, flag, number, whole, wrong

# of a prompt, of a body, of a body's prompts together
MOST_SAMPLES, MOST_PROMPTS, MOST_CHOICES = 128, 2048, 4096
DEFAULT_TOKENS = 16  # of completions, as OpenAI's API has it
# what OpenAI's API takes for a prompt that is not there or empty: the beginning of a document
START = "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How far fields may go.

    Attributes:
        temperature: at most.
        logprobs: of completions: alternatives at most.
        stops: stop strings at most.
        strict: other roles than OpenAI's are refused.
    """

    temperature: float = 2.0
    logprobs: int = 5
    stops: int = 4
    strict: bool = True


# OpenAI's own; those of the engine
OPENAI, WIDE = Bounds(), Bounds(math.inf, ALTERNATIVES, 1 << 20, False)
UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # field -> values that mean "not used"
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "guided_grammar": (None,),
    "structural_tag": (None,),
}


TOO_LONG = "context_length_exceeded"  # code of errors
NAMES = {"stop_ids": "stop_token_ids"}  # fields of ``Request`` that bodies call otherwise


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids, and the text that ``echo`` tells."""

    tokens: tuple[int, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Asked:
    """A body, read.

    Attributes:
        prompts: at least one.
        request: how each of them is sampled; without a prompt.
        seeded: the body names a seed.
        chat: answered as a chat.
        echo: prompts are told before their completions.
        silent: the completions themselves are not told, max_tokens is 0.
        logprobs: those of tokens are told.
        prompt_top: alternatives told at each place of a prompt by vLLM's ``prompt_logprobs``; None:
            it is not asked for.
        token_ids: told beside text.
        as_ids: tokens beside log-probabilities are told by their ids.
        usage: the last chunk of a stream tells it.
        tools: whose calls are looked for.
        names: what the body calls fields of ``request``, where it is another name.
    """

    model: str
    prompts: list[Prompt]
    request: Request
    seeded: bool
    chat: bool
    stream: bool
    usage: bool
    logprobs: bool
    echo: bool = False
    silent: bool = False
    prompt_top: int | None = None
    token_ids: bool = False
    as_ids: bool = False
    tools: Tools | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """What is asked for is known at a completion's end only, so that a stream has it as one
        piece.
        """
        return self.prompt_top is not None or (self.echo and self.logprobs)


def model_of(body: dict[str, Any]) -> str:
    """The name of the model that a body asks.

    Raises:
        BadRequest: none.
    """
    return fields.text("model", body.get("model"), empty=False)


def refuse_used(body: dict[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses fields that are not supported, by the values of each that mean "not used"."""
    for name, unused in unsupported.items():
        if body.get(name) not in unused:
            raise BadRequest(name, f"{name} is not supported: leave it out")


def completion_of(
    body: dict[str, Any], tokenizer: Tokenizer, context: int, bounds: Bounds = OPENAI
) -> Asked:
    """A body of ``/completions``.

    Raises:
        BadRequest: naming the field that is wrong.
    """
    top = whole(body, "logprobs", None, 0, bounds.logprobs)
    echo = flag(body, "echo")
    settings = _settings(body, tokenizer, bounds)
    tokens = whole(body, "max_tokens", DEFAULT_TOKENS, 0 if echo else 1, context)
    if (best := whole(body, "best_of", None, 1, MOST_SAMPLES)) not in (None, settings["n"]):
        raise wrong(
            "best_of", best, "as many as n: all samples are told, ranking them is the caller's"
        )
    named, schema = _format(body)
    shown = _shown(body, settings, top is not None, top or 0, echo)
    request = Request((), max_tokens=max(1, tokens), **settings, **schema)
    prompts = _prompts(body, tokenizer)
    if len(prompts) * request.n > MOST_CHOICES:
        raise wrong(
            "n",
            request.n,
            f"at most {MOST_CHOICES} completions of all {len(prompts)} prompts together",
        )
    names = NAMES | dict.fromkeys(schema, named)
    return Asked(
        prompts=prompts,
        request=request,
        chat=False,
        echo=echo,
        silent=tokens == 0,
        names=names,
        **shown,
    )


def chat_of(
    body: dict[str, Any], tokenizer: Tokenizer, context: int, bounds: Bounds = OPENAI
) -> Asked:
    """A body of ``/chat/completions``.

    Args:
        context: tokens of prompt and answer at most; an answer without a limit of its own may take
            what the prompt leaves.

    Raises:
        BadRequest: naming the field that is wrong.
        UserError: the chat template refuses the messages.
    """
    logprobs, top = flag(body, "logprobs"), whole(body, "top_logprobs", 0, 0, ALTERNATIVES)
    if top and not logprobs:
        raise wrong("top_logprobs", top, "0 without logprobs: set logprobs to true")
    if body.get("echo") not in (None, False):
        raise wrong("echo", body["echo"], "nothing: a chat's prompt is told by completions alone")
    settings: dict[str, Any] = _settings(body, tokenizer, bounds)
    named, schema = _format(body)
    limit = [
        whole(body, name, None, 1, context) for name in ("max_completion_tokens", "max_tokens")
    ]
    tools = chat.tools_of(body, tokenizer)
    if tools is not None and tools.schema is not None:
        if schema:
            raise BadRequest(
                "tool_choice",
                "tool_choice demands a call, and the body another form of answer: give one of"
                " the two",
            )
        named, schema = "tools", dict[str, Any](json_schema=json.dumps(tools.schema))
    shown = _shown(body, settings, logprobs, top, False)
    tokens = tuple(chat.prompt_of(body, tokenizer, tools, bounds.strict))
    if len(tokens) >= context:
        raise BadRequest(
            "messages",
            f"messages are {len(tokens)} tokens, and the context has {context}: shorten them",
            TOO_LONG,
        )
    most = next((value for value in limit if value is not None), context - len(tokens))
    request = Request((), max_tokens=most, **settings, **schema)
    names = NAMES | {"prompt": "messages"} | dict.fromkeys(schema, named)
    return Asked(
        prompts=[Prompt(tokens, "")], request=request, chat=True, tools=tools, names=names, **shown
    )


def _shown(
    body: dict[str, Any], settings: dict[str, Any], logprobs: bool, top: int, echo: bool
) -> dict[str, Any]:
    """What is told of an answer, and what of it the engine must be asked for, which goes to
    ``settings``.
    """
    refuse_used(body, UNSUPPORTED)
    stream, options = flag(body, "stream"), fields.mapping(body, "stream_options")
    if options is not None and not stream:
        raise BadRequest(
            "stream_options",
            "stream_options are given, but stream is not true: leave them out, or stream",
        )
    prompt_top = whole(body, "prompt_logprobs", None, 0, ALTERNATIVES)
    settings["top_logprobs"] = top
    if prompt_top is not None or (echo and logprobs):
        settings |= {
            "prompt_logprobs": True,
            "top_prompt_logprobs": max(prompt_top or 0, top if echo else 0),
        }
    return {
        "model": model_of(body),
        "seeded": body.get("seed") is not None,
        "stream": stream,
        "usage": flag(options or {}, "include_usage"),
        "logprobs": logprobs,
        "prompt_top": prompt_top,
        "token_ids": flag(body, "return_token_ids"),
        "as_ids": flag(body, "return_tokens_as_token_ids"),
    }


def _settings(body: dict[str, Any], tokenizer: Tokenizer, bounds: Bounds) -> dict[str, Any]:
    """Settings of ``Request`` that completions and chats share."""
    ends = () if flag(body, "ignore_eos") else tokenizer.eos_ids
    stop_ids = (
        ()
        if body.get("stop_token_ids") is None
        else fields.ids("stop_token_ids", body["stop_token_ids"])
    )
    if len(stop_ids) > MAX_STOP_IDS // 2:
        raise wrong("stop_token_ids", body["stop_token_ids"], f"at most {MAX_STOP_IDS // 2} ids")
    if len(stops := fields.texts(body, "stop")) > bounds.stops:
        raise wrong("stop", body["stop"], f"at most {bounds.stops} strings")
    return {
        "n": whole(body, "n", 1, 1, MOST_SAMPLES),
        "seed": whole(body, "seed", 0, -(2**63), 2**64 - 1) % 2**32,
        "temperature": number(body, "temperature", 1.0, 0.0, bounds.temperature),
        "top_p": number(body, "top_p", 1.0, 0.0, 1.0, above=True),
        "top_k": max(0, whole(body, "top_k", 0, -1, 2**31 - 1)),
        "min_p": number(body, "min_p", 0.0, 0.0, 1.0),
        "presence_penalty": number(body, "presence_penalty", 0.0, -2.0, 2.0),
        "frequency_penalty": number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        "repetition_penalty": number(body, "repetition_penalty", 1.0, 1e-6, 1e6),
        "logit_bias": _biases(body),
        "stop": stops,
        "stop_ids": tuple(dict.fromkeys((*ends, *stop_ids))),
    }


def _biases(body: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    given = fields.mapping(body, "logit_bias") or {}
    if len(given) > MAX_BIASES:
        raise wrong("logit_bias", given, f"at most {MAX_BIASES} tokens")
    out: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise BadRequest("logit_bias", f"logit_bias has {key[:40]!a}; expected token ids")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or not -100 <= value <= 100
        ):
            raise BadRequest(
                "logit_bias",
                f"logit_bias of token {key} is {str(value)[:40]!a}; expected a number from -100"
                " to 100",
            )
        out[int(key)] = float(value)
    return tuple(out.items())


def _format(body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The field that has the grammar of an answer, OpenAI's or one of vLLM's, and the grammar by
    the names of ``Request``.
    """
    found: dict[str, dict[str, Any]] = {}
    if (given := fields.mapping(body, "response_format")) is not None:
        kind = given.get("type")
        if kind not in ("text", "json_object", "json_schema"):
            raise wrong("response_format.type", kind, "text, json_object or json_schema")
        if kind == "json_object":
            found["response_format"] = {"json_schema": '{"type": "object"}'}
        elif kind == "json_schema":
            named = fields.mapping(given, "json_schema") or {}
            found["response_format"] = {
                "json_schema": _schema("response_format.json_schema.schema", named.get("schema"))
            }
    for prefix, source in (
        ("guided_", body),
        ("", fields.mapping(body, "structured_outputs") or {}),
    ):
        where = prefix or "structured_outputs."
        for key in ("json", "regex", "choice"):
            if (value := source.get(prefix + key)) is not None:
                found[where + key] = _grammar(where + key, key, value)
    if len(found) > 1:
        raise BadRequest(list(found)[1], f"{' and '.join(found)} are given: give one of them")
    return next(iter(found.items()), ("", {}))


def _grammar(name: str, kind: str, value: Any) -> dict[str, Any]:
    if kind == "json":
        return {
            "json_schema": _schema(
                name, fields.parse(value.encode()) if isinstance(value, str) else value
            )
        }
    if kind == "regex":
        return {"regex": fields.text(name, value, empty=False)}
    if not isinstance(value, list) or not value:
        raise wrong(name, value, "a list of texts")
    return {"choice": tuple(fields.text(name, one, empty=False) for one in value)}


def _schema(name: str, value: Any) -> str:
    if not isinstance(value, dict):
        raise wrong(name, value, "a JSON schema")
    return json.dumps(value)


def _prompts(body: dict[str, Any], tokenizer: Tokenizer) -> list[Prompt]:
    given = body.get("prompt")
    given = "" if given is None else given
    if isinstance(given, str):
        return [_from_text(given, body, tokenizer)]
    if (
        not isinstance(given, list)
        or not given
        or (isinstance(given[0], str | list) and len(given) > MOST_PROMPTS)
    ):
        raise wrong(
            "prompt",
            given,
            f"text, token ids, or a list of either with 1 to {MOST_PROMPTS} prompts",
        )
    if isinstance(given[0], str):
        return [_from_text(one, body, tokenizer) for one in given]
    lists = given if isinstance(given[0], list) else [given]
    read = [fields.ids("prompt", one) for one in lists]
    return [Prompt(tokens, tokenizer.decode(list(tokens), skip_special=False)) for tokens in read]


def _from_text(given: Any, body: dict[str, Any], tokenizer: Tokenizer) -> Prompt:
    given = fields.text("prompt", given)
    tokens = tokenizer.encode(given, special=flag(body, "add_special_tokens", True))
    return Prompt(tuple(tokens or _start(tokenizer)), given)


def _start(tokenizer: Tokenizer) -> list[int]:
    """Returns the token that a document begins with, for an empty prompt."""
    start = (
        tokenizer.encode("")
        or [id for id in (tokenizer.special_ids.get(START), tokenizer.eos_id) if id is not None][:1]
    )
    if not start:
        raise wrong("prompt", "", "text: this tokenizer has no token that begins a document")
    return start
