"""OpenAI's Responses API: bodies become chats, and answers of chats become responses or their
events.

Text, function tools, structured output, streams and ``previous_response_id`` are supported. Other
tools, background mode, conversations and reasoning are refused by name.
"""

import collections
import copy
import dataclasses
import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mint_jax.rollout.device import ALTERNATIVES
from mint_jax.rollout.request import Completion
from mint_jax.rollout.stream import Piece
from mint_jax.service.openai_answers import Answer
from mint_jax.service.openai_types import Count, Schema, refusing
from mint_jax.service.validation import BadRequest, Body, Like, Text

UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # field -> values that mean "not used"
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "reasoning": (None, {}),
    "truncation": (None, "disabled"),
    "context_management": (None, []),
}
# fields with the same name in chats, vLLM's among them
KEPT = {"model", "stream", "temperature", "top_p", "parallel_tool_calls", "top_k", "min_p", "seed"}
KEPT |= {"stop", "stop_token_ids", "ignore_eos", "logit_bias", "presence_penalty"}
KEPT |= {"frequency_penalty", "repetition_penalty", "chat_template_kwargs"}
NAMES = {  # a chat's name of a field -> the name in responses
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "messages": "input",
}
LOGPROBS = "message.output_text.logprobs"
STORE_BYTES = 64 << 20  # of stored responses, as JSON
Messages = list[dict[str, Any]]


class InputText(Body):
    type: Literal["input_text", "output_text"]
    text: str


class InputRefusal(Body):
    type: Literal["refusal"]
    refusal: str


Content = str | list[Annotated[InputText | InputRefusal, Field(discriminator="type")]]


class MessageItem(Body):
    type: Literal["message"] | None = None
    role: str
    content: Content


class FunctionCall(Body):
    type: Literal["function_call"]
    call_id: str | None = None
    name: Text
    arguments: str


class FunctionOutput(Body):
    type: Literal["function_call_output"]
    call_id: str | None = None
    output: Content


def _kind_of(item: Any) -> Any:
    return item.get("type") or "message" if isinstance(item, dict) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")],
    Discriminator(_kind_of),
]


class FunctionTool(Body):
    type: Literal["function"]
    name: Text
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    schema_: Schema | None = Field(None, alias="schema")


class TextOptions(Body):
    format: Annotated[dict[str, Any], Like(TextFormat)] | None = None


class ResponseBody(refusing("ResponseFields", UNSUPPORTED)):
    model: Text
    input: str | Annotated[list[Annotated[dict[str, Any], Like(Item)]], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: Text | None = None
    stream: bool | None = None
    store: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1e30)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_output_tokens: Count | None = None
    metadata: dict[str, Any] | None = None
    tools: list[Annotated[dict[str, Any], Like(FunctionTool)]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=ALTERNATIVES)] | None = None

    # the fields that chats have too are checked with the chat
    model_config = {"extra": "allow"}


class Unknown(BadRequest):
    """A response is not stored here."""

    def __init__(self, id: str, param: str | None = None):
        self.status = 404 if param is None else 400
        super().__init__(
            param,
            f"response {id[:100]!r} is not stored here: it was deleted, is too old, or the server"
            " has restarted since",
        )


class Store:
    """Stored responses, the newest ``STORE_BYTES`` of them, in memory. Thread-safe.

    Args:
        most_bytes: limit of all tenants together.
    """

    def __init__(self, most_bytes: int = STORE_BYTES):
        self._most, self._bytes, self._lock = most_bytes, 0, threading.Lock()
        # (tenant, id) -> JSON
        self._kept: collections.OrderedDict[tuple[str, str], str] = collections.OrderedDict()

    def put(self, tenant: str, response: Mapping[str, Any], messages: Messages) -> None:
        """Stores a response and the conversation that it ends."""
        data = json.dumps([response, messages])
        with self._lock:
            self._kept[tenant, response["id"]] = data
            self._bytes += len(data)
            while self._bytes > self._most:
                self._bytes -= len(self._kept.popitem(last=False)[1])

    def get(
        self, tenant: str, id: str, param: str | None = None
    ) -> tuple[dict[str, Any], Messages]:
        """Returns a tenant's response and the conversation that it ends.

        Raises:
            Unknown: it is not stored, or belongs to another tenant.
        """
        with self._lock:
            found = self._kept.get((tenant, id))
        if found is None:
            raise Unknown(id, param)
        response, messages = json.loads(found)
        return response, messages

    def delete(self, tenant: str, id: str) -> None:
        """Deletes a response. Raises ``Unknown`` as ``get`` does."""
        with self._lock:
            found = self._kept.pop((tenant, id), None)
            if found is None:
                raise Unknown(id)
            self._bytes -= len(found)


@dataclasses.dataclass(frozen=True)
class ResponseSpec:
    """A validated body.

    Attributes:
        chat: the body of the chat that is sampled.
        messages: the conversation, without the instructions.
        repeated: fields of the body that the response repeats.
        store: store the response.
    """

    chat: dict[str, Any]
    messages: Messages
    repeated: dict[str, Any]
    store: bool


def response_of(body: ResponseBody, tenant: str, store: Store) -> ResponseSpec:
    """Returns the spec of a body of ``/responses``. Raises ``BadRequest``."""
    previous, messages = body.previous_response_id, []
    if previous is not None:
        messages = store.get(tenant, previous, "previous_response_id")[1]
    messages += _messages(body.input)
    given = body.model_dump(include=KEPT, exclude_unset=True)
    chat: dict[str, Any] = given | {"messages": copy.deepcopy(messages)}
    if body.instructions is not None:
        first = messages[0]
        if first["role"] in ("system", "developer") and isinstance(first["content"], str):
            chat["messages"][0]["content"] = f"{body.instructions}\n\n{first['content']}"
        else:
            chat["messages"].insert(0, {"role": "system", "content": body.instructions})
    tools, choice = body.tools or [], body.tool_choice
    fields = "name", "description", "parameters", "strict"
    chat["tools"] = [
        {"type": "function", "function": {f: tool[f] for f in fields if tool.get(f) is not None}}
        for tool in tools
    ]
    chat["tool_choice"] = choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    chat["max_completion_tokens"] = body.max_output_tokens
    form = None if body.text is None else body.text.format
    chat["response_format"] = form
    if form is not None and form["type"] == "json_schema":
        schema = {"schema": form.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    top = body.top_logprobs or 0
    if top or LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": top}
    kept = body.store is not False
    repeated = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": previous,
        "store": kept,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": choice or "auto",
        "tools": tools,
        "top_logprobs": top,
        "top_p": 1.0 if body.top_p is None else body.top_p,
    }
    return ResponseSpec(chat, messages, repeated, kept)


def own_names(error: BadRequest) -> BadRequest:
    """Returns an error about the chat with the names that the fields have in responses."""
    for name, own in NAMES.items():
        if error.param is not None and error.param.startswith(name):
            return BadRequest(
                own + error.param[len(name) :], str(error).replace(name, own), error.code
            )
    return error


def _messages(items: str | Sequence[Mapping[str, Any]]) -> Messages:
    """Returns validated input as messages of a chat."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    out: Messages = []
    for item in items:
        kind = _kind_of(item)
        if kind == "message":
            out.append({"role": item["role"], "content": _text(item["content"])})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": None})
            out[-1].setdefault("tool_calls", []).append(call)
        else:
            content = _text(item["output"])
            out.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    return out


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)


class Response:
    """The response to one body; wraps the ``Answer`` to its chat.

    Args:
        answer: the answer to the chat.
        store: stores the response for this tenant, if the body asks for it.
    """

    def __init__(self, answer: Answer, spec: ResponseSpec, tenant: str, store: Store):
        self._answer, self._spec, self._tenant, self._store = answer, spec, tenant, store
        self.spec, self.model = answer.spec, answer.model
        self.id = "resp_" + secrets.token_hex(16)
        self._sent = 0
        self._output: list[dict[str, Any]] = []  # items of a stream
        self._logprobs: list[Any] = []

    def whole(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """Returns the body."""
        answer = self._answer.whole(results)
        [choice] = answer["choices"]
        message = choice["message"]
        output = []
        if message["content"] or not message.get("tool_calls"):
            output.append(self._message(message["content"] or "", _logprobs(choice), "completed"))
        output += [self._call(call) for call in message.get("tool_calls", [])]
        return self._ended(output, choice["finish_reason"], answer["usage"])

    def _ended(
        self, output: list[dict[str, Any]], finish: str, usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        body = self._body("incomplete" if finish in ("length", "abort") else "completed", output)
        if finish == "length":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
            for item in output:
                if item["type"] == "message":
                    item["status"] = "incomplete"
        body["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        if self._spec.store:
            self._store.put(self._tenant, body, [*self._spec.messages, *_messages(output)])
        return body

    def _body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._answer.spec.model,
            "output": output,
            "reasoning": {"effort": None, "summary": None},
            "truncation": "disabled",
            "usage": None,
            "user": None,
            **self._spec.repeated,
            "mint_revision": self.model.digest,
        }

    def _message(self, text: str, logprobs: Sequence[Any], status: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
        return {
            "id": f"msg_{self.id[5:]}",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [part],
        }

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        made = {
            "id": f"fc_{call['id']}",
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
        }
        return made | {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}

    # -- streams

    def chunks(self, pieces: Sequence[tuple[int, Piece]]) -> list[dict[str, Any]]:
        """Returns the events for new pieces."""
        out = self._begin()
        for chunk in self._answer.chunks(pieces):
            out += self._deltas(chunk)
        return out

    def last_chunks(self, number: int, results: Sequence[Completion]) -> list[dict[str, Any]]:
        """Returns the last events."""
        out, calls, finish = self._begin(), [], ""
        for chunk in self._answer.last_chunks(number, results):
            out += self._deltas(chunk)
            calls += chunk["choices"][0]["delta"].get("tool_calls", [])
            finish = chunk["choices"][0]["finish_reason"] or finish
        if not self._output and not calls:
            out += self._open()
        if self._output:
            out += self._close(finish)
        for call in calls:
            out += self._called(self._call(call))
        body = self._ended(self._output, finish, self._answer.usage_chunk([results])["usage"])
        return [*out, self._event(body["status"], response=body)]

    def failed(self, error: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the event that ends a stream that failed midway."""
        body = self._body("failed", self._output)
        body["error"] = {"code": "server_error", "message": error["message"]}
        return [self._event("failed", response=body)]

    def written(self, event: Mapping[str, Any]) -> str:
        """Returns an event as the stream's text."""
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    end = ""  # text that ends a stream

    def usage_chunk(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        raise AssertionError("a response's last event has its usage")

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": f"response.{kind}", "sequence_number": self._sent, **fields}
        self._sent += 1
        return copy.deepcopy(event)

    def _begin(self) -> list[dict[str, Any]]:
        if self._sent:
            return []
        body = self._body("in_progress", [])
        return [self._event(kind, response=body) for kind in ("created", "in_progress")]

    def _open(self) -> list[dict[str, Any]]:
        """Returns the events that begin the message."""
        item = self._message("", [], "in_progress")
        self._output.append(item)
        added = self._event("output_item.added", output_index=0, item=item | {"content": []})
        return [added, self._part_event("content_part.added", part=item["content"][0])]

    def _part_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Returns an event about the message's text."""
        id = self._output[0]["id"]
        return self._event(kind, item_id=id, output_index=0, content_index=0, **fields)

    def _deltas(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the events of a chat's chunk with text."""
        choice = chunk["choices"][0]
        text = choice["delta"].get("content") or ""
        self._logprobs += _logprobs(choice)
        if not text:
            return []
        out = [] if self._output else self._open()
        part, logprobs = self._output[0]["content"][0], self._logprobs
        self._logprobs = []
        part["text"] += text
        part["logprobs"] += logprobs
        return [*out, self._part_event("output_text.delta", delta=text, logprobs=logprobs)]

    def _close(self, finish: str) -> list[dict[str, Any]]:
        """Returns the events that end the message."""
        [item] = self._output
        [part] = item["content"]
        part["logprobs"] += self._logprobs
        item["status"] = "incomplete" if finish == "length" else "completed"
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            self._part_event("output_text.done", **text),
            self._part_event("content_part.done", part=part),
            self._event("output_item.done", output_index=0, item=item),
        ]

    def _called(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the events of a call."""
        place, arguments = {"output_index": len(self._output)}, item["arguments"]
        self._output.append(item)
        opened = item | {"arguments": "", "status": "in_progress"}
        named = place | {"item_id": item["id"]}
        done = named | {"name": item["name"], "arguments": arguments}
        return [
            self._event("output_item.added", **place, item=opened),
            self._event("function_call_arguments.delta", **named, delta=arguments),
            self._event("function_call_arguments.done", **done),
            self._event("output_item.done", **place, item=item),
        ]


def _logprobs(choice: Mapping[str, Any]) -> list[Any]:
    return (choice["logprobs"] or {}).get("content") or []
