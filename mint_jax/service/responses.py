"""OpenAI's Responses API: bodies become chats, and answers of chats become responses or their
events.

Text, function tools, structured output, streams and ``previous_response_id`` are supported. Other
tools, background mode, conversations and reasoning are refused by name.
"""

import collections
import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mint_jax.rollout.request import Completion
from mint_jax.rollout.stream import Piece
from mint_jax.service.openai_answers import Answer
from mint_jax.service.openai_types import (
    Count,
    Schema,
    Temperature,
    ToolChoice,
    Top,
    TopP,
    refusing,
)
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
KEPT |= {"frequency_penalty", "repetition_penalty", "chat_template_kwargs", "tool_choice"}
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
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: Text | None = None
    stream: bool | None = None
    store: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_output_tokens: Count | None = None
    metadata: dict[str, Any] | None = None
    tools: list[Annotated[dict[str, Any], Like(FunctionTool)]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: Top | None = None

    # the fields that chats have too are checked with the chat
    model_config = {"extra": "allow"}

    @property
    def form(self) -> dict[str, Any]:
        """Form of the text."""
        return (self.text and self.text.format) or {"type": "text"}


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
    """Stored responses of all tenants, the newest ``most_bytes`` of them, in memory.
    Thread-safe.
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
        if (found := self._kept.get((tenant, id))) is None:
            raise Unknown(id, param)
        response, messages = json.loads(found)
        return response, messages

    def delete(self, tenant: str, id: str) -> None:
        """Deletes a response. Raises ``Unknown`` as ``get`` does."""
        with self._lock:
            if (found := self._kept.pop((tenant, id), None)) is None:
                raise Unknown(id)
            self._bytes -= len(found)


def conversation_of(body: ResponseBody, tenant: str, store: Store) -> Messages:
    """Returns the messages of a body, after those of its previous response. Raises ``Unknown``."""
    previous = body.previous_response_id
    before = [] if previous is None else store.get(tenant, previous, "previous_response_id")[1]
    return [*before, *_messages(body.input)]


def chat_body_of(body: ResponseBody, messages: Messages) -> dict[str, Any]:
    """Returns the body of the chat that is sampled."""
    chat: dict[str, Any] = body.model_dump(include=KEPT, exclude_unset=True)
    if body.instructions is not None:
        text, first = body.instructions, messages[0]
        if first["role"] in ("system", "developer"):
            messages = [first | {"content": f"{text}\n\n{first['content']}"}, *messages[1:]]
        else:
            messages = [{"role": "system", "content": text}, *messages]
    fields = "name", "description", "parameters", "strict"
    tools = [{f: tool[f] for f in fields if tool.get(f) is not None} for tool in body.tools or []]
    chat["tools"] = [{"type": "function", "function": tool} for tool in tools]
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    form = body.form
    if form["type"] == "json_schema":
        form = form | {"json_schema": {"schema": form.get("schema")}}
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    most = body.max_output_tokens
    return chat | {"messages": messages, "response_format": form, "max_completion_tokens": most}


def own_names(error: BadRequest) -> BadRequest:
    """Returns an error about the chat with the names that the fields have in responses."""
    param = error.param or ""
    for name, own in NAMES.items():
        if param.startswith(name):
            message = str(error).replace(name, own)
            return BadRequest(own + param[len(name) :], message, error.code)
    return error


def _messages(items: str | Sequence[Any]) -> Messages:
    """Returns input items as messages of a chat."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    out: Messages = []
    for item in items:
        if isinstance(item, MessageItem):
            out.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, FunctionOutput):
            content = _text(item.output)
            out.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        else:
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": None})
            call = _chat_call(item.call_id, item.name, item.arguments)
            out[-1].setdefault("tool_calls", []).append(call)
    return out


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text if hasattr(part, "text") else part.refusal for part in content)


def _chat_call(id: str | None, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Response:
    """The response to one body, made from the answer to its chat.

    Args:
        messages: the conversation, without the instructions.
        store: stores the response for this tenant, if the body asks for it.
    """

    end = ""  # text that ends a stream

    def __init__(
        self, answer: Answer, body: ResponseBody, messages: Messages, tenant: str, store: Store
    ):
        self._answer, self._asked, self._messages = answer, body, messages
        self._tenant, self._store = tenant, store
        self.spec, self.model = answer.spec, answer.model
        self.id = "resp_" + secrets.token_hex(16)
        self._output: list[dict[str, Any]] = []  # items
        self._events = 0
        self._logprobs: list[Any] = []  # of tokens whose text has not been sent

    def whole(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """Returns the body."""
        answer = self._answer.whole(results)
        [choice] = answer["choices"]
        content, calls = choice["message"]["content"], choice["message"].get("tool_calls", [])
        if content or not calls:
            self._add_message(content or "", _logprobs(choice))
        self._output += map(_call_item, calls)
        return self._ended(choice["finish_reason"], answer["usage"])

    def _ended(self, finish: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the body after its output is complete, and stores it."""
        body = self._body("incomplete" if finish in ("length", "abort") else "completed")
        if finish == "length":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for item in self._output:
            if item["type"] == "message":
                item["status"] = body["status"]
                message["content"] = item["content"][0]["text"]
            else:
                call = _chat_call(item["call_id"], item["name"], item["arguments"])
                message.setdefault("tool_calls", []).append(call)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        body["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        if body["store"]:
            self._store.put(self._tenant, body, [*self._messages, message])
        return body

    def _body(self, status: str) -> dict[str, Any]:
        asked = self._asked
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": asked.model,
            "output": self._output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": asked.store is not False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": asked.form},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": None,
            "mint_revision": self.model.digest,
        }

    def _add_message(self, text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        item = {"id": f"msg_{self.id[5:]}", "type": "message", "status": "in_progress"}
        self._output.append(item | {"role": "assistant", "content": [part]})
        return self._output[-1]

    # -- streams

    def chunks(self, pieces: Sequence[tuple[int, Piece]]) -> list[str]:
        """Returns the events for new pieces."""
        out = self._begin()
        for chunk in self._answer.chunks(pieces):
            out += self._deltas(chunk["choices"][0])
        return out

    def last_chunks(self, number: int, results: Sequence[Completion]) -> list[str]:
        """Returns the last events."""
        out = self._begin()
        for chunk in self._answer.last_chunks(number, results):
            [choice] = chunk["choices"]
            out += self._deltas(choice)
        calls, finish = choice["delta"].get("tool_calls", []), choice["finish_reason"]
        if not self._output and not calls:
            out += self._open()
        if self._output:
            [item] = self._output
            [part] = item["content"]
            part["logprobs"] += self._logprobs
            item["status"] = "incomplete" if finish == "length" else "completed"
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            out.append(self._part_event("output_text.done", **text))
            out.append(self._part_event("content_part.done", part=part))
            out.append(self._event("output_item.done", output_index=0, item=item))
        for call in calls:
            out += self._called(_call_item(call))
        body = self._ended(finish, self._answer.usage_of([results]))
        return [*out, self._event(body["status"], response=body)]

    def usage(self, results: Sequence[Sequence[Completion]]) -> list[str]:
        """Returns nothing: the last event has the usage."""
        return []

    def failed(self, error: Mapping[str, Any]) -> list[str]:
        """Returns the event that ends a stream that failed midway."""
        error = {"code": "server_error", "message": error["message"]}
        return [self._event("failed", response=self._body("failed") | {"error": error})]

    def written(self, event: str) -> str:
        """Returns an event as the stream's text."""
        return event

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": f"response.{kind}", "sequence_number": self._events, **fields}
        self._events += 1
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    def _part_event(self, kind: str, **fields: Any) -> str:
        """Returns an event about the message's text."""
        id = self._output[0]["id"]
        return self._event(kind, item_id=id, output_index=0, content_index=0, **fields)

    def _begin(self) -> list[str]:
        if self._events:
            return []
        body = self._body("in_progress")
        return [self._event(kind, response=body) for kind in ("created", "in_progress")]

    def _open(self) -> list[str]:
        """Returns the events that begin the message."""
        item = self._add_message("", [])
        added = self._event("output_item.added", output_index=0, item=item | {"content": []})
        return [added, self._part_event("content_part.added", part=item["content"][0])]

    def _deltas(self, choice: Mapping[str, Any]) -> list[str]:
        """Returns the events for the text of a chat's chunk."""
        self._logprobs += _logprobs(choice)
        if not (text := choice["delta"].get("content")):
            return []
        out = [] if self._output else self._open()
        part, logprobs = self._output[0]["content"][0], self._logprobs
        self._logprobs = []
        part["text"] += text
        part["logprobs"] += logprobs
        return [*out, self._part_event("output_text.delta", delta=text, logprobs=logprobs)]

    def _called(self, item: dict[str, Any]) -> list[str]:
        """Returns the events of a call."""
        place, arguments = {"output_index": len(self._output)}, item["arguments"]
        self._output.append(item)
        named = place | {"item_id": item["id"]}
        opened = item | {"arguments": "", "status": "in_progress"}
        done = named | {"name": item["name"], "arguments": arguments}
        return [
            self._event("output_item.added", **place, item=opened),
            self._event("function_call_arguments.delta", **named, delta=arguments),
            self._event("function_call_arguments.done", **done),
            self._event("output_item.done", **place, item=item),
        ]


def _call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    item = {"id": f"fc_{call['id']}", "type": "function_call", "status": "completed"}
    return item | {"call_id": call["id"], **call["function"]}


def _logprobs(choice: Mapping[str, Any]) -> list[Any]:
    return (choice["logprobs"] or {}).get("content") or []
