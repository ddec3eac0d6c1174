"""OpenAI's Responses API: a body becomes a chat, and the chat's answer a response or its events.

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
from mint_jax.service import openai_types as types
from mint_jax.service.chat import RefusalPart
from mint_jax.service.openai_answers import Answer
from mint_jax.service.openai_types import SamplingFields, refusing
from mint_jax.service.validation import BadRequest, Body, Like, Text

# field -> values that mean "not used"
UNSUPPORTED: dict[str, tuple[Any, ...]] = dict.fromkeys(("conversation", "prompt"), (None,))
UNSUPPORTED |= {"background": (None, False), "truncation": (None, "disabled")}
UNSUPPORTED |= {"reasoning": (None, {}), "context_management": (None, [])}
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


Content = str | list[Annotated[InputText | RefusalPart, Field(discriminator="type")]]


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
    parameters: types.Schema | None = None


class TextFormat(types.NamedSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body):
    format: Annotated[dict[str, Any], Like(TextFormat)] | None = None


class ResponseBody(refusing(SamplingFields, UNSUPPORTED)):
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: Text | None = None
    store: bool | None = None
    max_output_tokens: types.Count | None = None
    metadata: dict[str, Any] | None = None
    tools: list[Annotated[dict[str, Any], Like(FunctionTool)]] | None = None
    tool_choice: types.ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: types.Top | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def form(self) -> dict[str, Any]:
        """Form of the text."""
        return (self.text and self.text.format) or {"type": "text"}


# fields that chats have too
SAME = {*SamplingFields.model_fields, "tool_choice", "parallel_tool_calls", "chat_template_kwargs"}
# fields of a response: those of its body with what null means, and those that never change
ECHOED: dict[str, Any] = {"parallel_tool_calls": True, "store": True, "temperature": 1.0}
ECHOED |= {"top_p": 1.0, "tool_choice": "auto", "metadata": {}, "tools": [], "top_logprobs": 0}
ECHOED |= dict.fromkeys(("model", "instructions", "max_output_tokens", "previous_response_id"))
UNUSED: dict[str, Any] = {
    "background": False,
    "truncation": "disabled",
    "reasoning": {"effort": None, "summary": None},
}
UNUSED |= dict.fromkeys(("error", "incomplete_details", "usage", "user"))


class Store:
    """Responses of all tenants, the newest ``most_bytes`` of them, in memory. Thread-safe."""

    def __init__(self, most_bytes: int = STORE_BYTES):
        self._most, self._bytes, self._lock = most_bytes, 0, threading.Lock()
        # (tenant, id) -> JSON of the response and of the conversation that it ends
        self._kept: collections.OrderedDict[tuple[str, str], str] = collections.OrderedDict()

    def put(self, tenant: str, response: Mapping[str, Any], messages: Messages) -> None:
        data = json.dumps([response, messages])
        with self._lock:
            self._kept[tenant, response["id"]] = data
            self._bytes += len(data)
            while self._bytes > self._most:
                self._bytes -= len(self._kept.popitem(last=False)[1])

    def get(self, tenant: str, id: str, param: str | None = None) -> Any:
        """Returns a tenant's response and the messages that it ends.

        Args:
            param: field that names the response; None if the path does.

        Raises:
            BadRequest: it is not stored, or belongs to another tenant.
        """
        if (found := self._kept.get((tenant, id))) is None:
            raise BadRequest(
                param,
                f"response {id[:100]!r} is not stored here: it was deleted, is too old, or the"
                " server has restarted since",
                status=404 if param is None else 400,
            )
        return json.loads(found)

    def delete(self, tenant: str, id: str) -> None:
        """Deletes a response. Raises ``BadRequest`` as ``get`` does."""
        self.get(tenant, id)
        with self._lock:
            self._bytes -= len(self._kept.pop((tenant, id), ""))


def conversation_of(body: ResponseBody, tenant: str, store: Store) -> Messages:
    """Returns the messages of a body, after those of its previous response."""
    out: Messages = []
    if (previous := body.previous_response_id) is not None:
        out += store.get(tenant, previous, "previous_response_id")[1]
    if isinstance(body.input, str):
        return [*out, {"role": "user", "content": body.input}]
    for item in body.input:
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


def chat_body_of(body: ResponseBody, messages: Messages) -> dict[str, Any]:
    """Returns the body of the chat that is sampled."""
    chat: dict[str, Any] = body.model_dump(include=SAME, exclude_unset=True)
    if (text := body.instructions) is not None:
        system = {"role": "system", "content": text}
        if messages[0]["role"] in ("system", "developer"):
            first, *messages = messages
            system = first | {"content": f"{text}\n\n{first['content']}"}
        messages = [system, *messages]
    chat["tools"] = []
    for tool in body.tools or ():
        function = {name: v for name, v in tool.items() if name != "type" and v is not None}
        chat["tools"].append({"type": "function", "function": function})
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    form = body.form | {"json_schema": {"schema": body.form.get("schema")}}
    chat |= {"response_format": form, "max_completion_tokens": body.max_output_tokens}
    return chat | {"messages": messages}


def own_names(error: BadRequest) -> BadRequest:
    """Returns an error about the chat with the names that the fields have in responses."""
    param = error.param or ""
    for name, own in NAMES.items():
        if param.startswith(name):
            message = str(error).replace(name, own)
            return BadRequest(own + param[len(name) :], message, error.code)
    return error


class Response:
    """The response to one body, made from the answer to its chat.

    Args:
        messages: the conversation, without the instructions.
        tenant: owner of the stored response.
    """

    end = ""  # of a stream

    def __init__(
        self, answer: Answer, body: ResponseBody, messages: Messages, tenant: str, store: Store
    ):
        self._answer, self._body, self._messages = answer, body, messages
        self._tenant, self._store = tenant, store
        self.spec, self.model = answer.spec, answer.model
        self.id = "resp_" + secrets.token_hex(16)
        self._events = 0
        self._text: str | None = None  # None: the message has not started
        self._logprobs: list[Any] = []  # of the text
        self._pending: list[Any] = []  # of tokens whose text has not been sent
        self._output: list[dict[str, Any]] = []  # finished items
        self._finish = ""

    def whole(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """Returns the body: that of the last event."""
        self.last_chunks(0, results[0])
        return self.finish(results)[0]["response"]

    def chunks(self, pieces: Sequence[tuple[int, Piece]]) -> list[dict[str, Any]]:
        """Returns the events for new pieces."""
        return self._deltas(self._answer.chunks(pieces))

    def last_chunks(self, number: int, results: Sequence[Completion]) -> list[dict[str, Any]]:
        """Returns the last events of the output."""
        chunks = self._answer.last_chunks(number, results)
        [choice] = chunks[-1]["choices"]
        self._finish, calls = choice["finish_reason"], choice["delta"].get("tool_calls", [])
        out = self._deltas(chunks)
        if self._text is None and not calls:
            out += self._open()
        if self._text is not None:
            self._logprobs += self._pending
            part = self._part()
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            out.append(self._part_event("output_text.done", **text))
            out.append(self._part_event("content_part.done", part=part))
            out.append(self._item_event("done", self._message(self._status, part)))
        for call in calls:
            item = {"id": f"fc_{call['id']}", "type": "function_call", "status": "completed"}
            item |= {"call_id": call["id"], **call["function"]}
            place = {"output_index": len(self._output), "item_id": item["id"]}
            whole = {"name": item["name"], "arguments": item["arguments"]}
            opened = item | {"arguments": "", "status": "in_progress"}
            out += [
                self._item_event("added", opened),
                self._event("function_call_arguments.delta", **place, delta=item["arguments"]),
                self._event("function_call_arguments.done", **place, **whole),
                self._item_event("done", item),
            ]
        return out

    def finish(self, results: Sequence[Sequence[Completion]]) -> list[dict[str, Any]]:
        """Returns the event with the complete response, and stores the response."""
        body, usage = self._response(self._status), self._answer.usage_of(results)
        if self._finish == "length":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        body["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        if body["store"]:
            message: dict[str, Any] = {"role": "assistant", "content": self._text}
            calls = [
                _chat_call(item["call_id"], item["name"], item["arguments"])
                for item in self._output
                if item["type"] == "function_call"
            ]
            message |= {"tool_calls": calls} if calls else {}
            self._store.put(self._tenant, body, [*self._messages, message])
        return [self._event(body["status"], response=body)]

    def failed(self, error: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the event that ends a stream that failed midway."""
        error = {"code": "server_error", "message": error["message"]}
        return [self._event("failed", response=self._response("failed") | {"error": error})]

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish in ("length", "abort") else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        given = {name: getattr(self._body, name) for name in ECHOED}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "output": [*self._output],
            "text": {"format": self._body.form},
            "mint_revision": self.model.digest,
            **UNUSED,
            **{name: ECHOED[name] if one is None else one for name, one in given.items()},
        }

    def _message(self, status: str, *content: dict[str, Any]) -> dict[str, Any]:
        item = {"id": f"msg_{self.id[5:]}", "type": "message", "status": status}
        return item | {"role": "assistant", "content": [*content]}

    def _part(self) -> dict[str, Any]:
        text = {"type": "output_text", "text": self._text, "annotations": []}
        return text | {"logprobs": [*self._logprobs]}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": f"response.{kind}", "sequence_number": self._events - 1, **fields}

    def _part_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        id = self._message("")["id"]
        return self._event(kind, item_id=id, output_index=0, content_index=0, **fields)

    def _item_event(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        event = self._event(f"output_item.{kind}", output_index=len(self._output), item=item)
        self._output += [item] if kind == "done" else []
        return event

    def _open(self) -> list[dict[str, Any]]:
        """Returns the events that begin the message."""
        self._text, added = "", self._item_event("added", self._message("in_progress"))
        return [added, self._part_event("content_part.added", part=self._part())]

    def _deltas(self, chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the events for the text of a chat's chunks."""
        out = []
        if not self._events:
            body = self._response("in_progress")
            out = [self._event(kind, response=body) for kind in ("created", "in_progress")]
        for chunk in chunks:
            [choice] = chunk["choices"]
            self._pending += (choice["logprobs"] or {}).get("content") or []
            if text := choice["delta"].get("content"):
                out += self._open() if self._text is None else []
                logprobs, self._pending = self._pending, []
                self._text = (self._text or "") + text
                self._logprobs += logprobs
                delta = {"delta": text, "logprobs": logprobs}
                out.append(self._part_event("output_text.delta", **delta))
        return out
