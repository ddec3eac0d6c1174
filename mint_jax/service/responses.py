"""OpenAI's Responses API: a body becomes a chat, and the chat's answer a response or its events.

Text, function tools, structured output, streams and ``previous_response_id`` are supported. Other
tools, background mode, conversations and reasoning are refused by name.
"""

import collections
import copy
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mint_jax.rollout.request import Completion
from mint_jax.rollout.stream import Piece
from mint_jax.service import openai_types as types
from mint_jax.service.chat import RefusalPart
from mint_jax.service.openai_answers import Answer, Object, Part
from mint_jax.service.openai_types import SamplingFields, refusing
from mint_jax.service.validation import BadRequest, Body, Like, Text, check

# field -> values that mean "not used"
UNSUPPORTED: dict[str, tuple[Any, ...]] = dict.fromkeys(("conversation", "prompt"), (None,))
UNSUPPORTED |= dict.fromkeys(("background", "mint_witness"), (None, False))
UNSUPPORTED |= {"truncation": (None, "disabled"), "reasoning": (None, {})}
UNSUPPORTED |= {"context_management": (None, [])}
# a chat's name of a field -> the name in responses
NAMES = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
NAMES |= {"messages": "input"}
LOGPROBS = "message.output_text.logprobs"
STORE_BYTES = 64 << 20  # of stored responses, as JSON


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
    input: str | Annotated[list[Annotated[dict[str, Any], Like(Item)]], Field(min_length=1)]
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
    def form(self) -> Object:
        """Form of the text."""
        return (self.text and self.text.format) or {"type": "text"}


# fields that chats have too
SAME = {*SamplingFields.model_fields, "tool_choice", "parallel_tool_calls", "chat_template_kwargs"}
# fields of a response: those of its body with what null means, and those that never change
ECHOED: Object = {"parallel_tool_calls": True, "store": True, "temperature": 1.0, "top_p": 1.0}
ECHOED |= {"tool_choice": "auto", "metadata": {}, "tools": [], "top_logprobs": 0}
ECHOED |= dict.fromkeys(("model", "instructions", "max_output_tokens", "previous_response_id"))
UNUSED: Object = {"background": False, "truncation": "disabled"}
UNUSED |= {"reasoning": {"effort": None, "summary": None}}
UNUSED |= dict.fromkeys(("error", "incomplete_details", "usage", "user"))


class Store:
    """Responses of all tenants, the newest ``most_bytes`` of them, in memory. Thread-safe."""

    def __init__(self, most_bytes: int = STORE_BYTES):
        self._most, self._bytes, self._lock = most_bytes, 0, threading.Lock()
        # (tenant, id) -> JSON of the response and of the items that it ends
        self._kept: collections.OrderedDict[tuple[str, str], str] = collections.OrderedDict()

    def put(self, tenant: str, items: Sequence[Object], response: Object) -> None:
        """Stores a response, after the items of its conversation."""
        data = json.dumps([response, [*items, *response["output"]]])
        with self._lock:
            self._kept[tenant, response["id"]] = data
            self._bytes += len(data)
            while self._bytes > self._most:
                self._bytes -= len(self._kept.popitem(last=False)[1])

    def get(self, tenant: str, id: str, param: str | None = None) -> Any:
        """Returns a tenant's response and the items that it ends.

        Args:
            param: field that names the response; None if the path does.

        Raises:
            BadRequest: it is not stored for this tenant.
        """
        if (found := self._kept.get((tenant, id))) is None:
            text = "it was deleted, is too old, or the server has restarted since"
            status = 404 if param is None else 400
            raise BadRequest(
                param, f"response {id[:100]!r} is not stored here: {text}", status=status
            )
        return json.loads(found)

    def delete(self, tenant: str, id: str) -> None:
        """Deletes a response. Raises ``BadRequest`` as ``get`` does."""
        self.get(tenant, id)
        with self._lock:
            self._bytes -= len(self._kept.pop((tenant, id), ""))


def items_of(body: ResponseBody, tenant: str, store: Store) -> list[Object]:
    """Returns the items of a body, after those of its previous response."""
    previous, given = body.previous_response_id, body.input
    earlier = store.get(tenant, previous, "previous_response_id")[1] if previous else []
    return earlier + ([{"role": "user", "content": given}] if isinstance(given, str) else given)


def chat_of(body: ResponseBody, items: Sequence[Object]) -> types.ChatBody:
    """Returns the body of the chat that is sampled. Raises ``BadRequest``."""
    chat = body.model_dump(include=SAME, exclude_unset=True)
    messages = _messages(items)
    if (text := body.instructions) is not None:
        if messages[0]["role"] in ("system", "developer"):
            messages[0]["content"] = f"{text}\n\n{messages[0]['content']}"
        else:
            messages.insert(0, {"role": "system", "content": text})
    tools = []
    for tool in body.tools or ():
        function = {name: v for name, v in tool.items() if name != "type" and v is not None}
        tools.append({"type": "function", "function": function})
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    form = body.form | {"json_schema": {"schema": body.form.get("schema")}}
    chat |= {"response_format": form, "max_completion_tokens": body.max_output_tokens}
    return check(types.ChatBody, chat | {"messages": messages, "tools": tools})


def _messages(items: Sequence[Object]) -> list[Object]:
    out: list[Object] = []
    for item in items:
        kind = _kind_of(item)
        if kind == "message":
            out.append({"role": item["role"], "content": _text(item["content"])})
        elif kind == "function_call_output":
            message = {"role": "tool", "content": _text(item["output"])}
            out.append(message | {"tool_call_id": item.get("call_id")})
        else:
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": None})
            function = {name: item[name] for name in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            out[-1].setdefault("tool_calls", []).append(call)
    return out


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if "text" in part else part["refusal"] for part in content)


def own_names(error: BadRequest) -> BadRequest:
    """Returns an error about the chat with the names that the fields have in responses."""
    param = error.param or ""
    for name, own in NAMES.items():
        if param.startswith(name):
            message = str(error).replace(name, own)
            return BadRequest(own + param[len(name) :], message, error.code)
    return error


class Response(Answer):
    """The response to ``body``: the answer to its chat, as one body or as events; ``keep`` stores
    the response. Further arguments as of ``Answer``.
    """

    end = ""

    def __init__(self, body: ResponseBody, keep: Callable[[Object], None], *answer: Any):
        super().__init__(*answer)
        self._keep, self._numbers = keep, itertools.count(self._events)
        self._opened |= {0} if self._events else set()
        given = {name: getattr(body, name) for name in ECHOED}
        self._body: Object = {
            "id": f"resp_{self._pin.id}",
            "object": "response",
            "created_at": self._frame["created"],
            "status": "in_progress",
            "output": [],
            "text": {"format": body.form},
            "mint_revision": self.model.digest,
            **UNUSED,
            **{name: ECHOED[name] if one is None else one for name, one in given.items()},
        }
        self._part: Object = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._pending: list[Object] = []  # log-probabilities of tokens whose text was not sent

    @property
    def id(self) -> str:
        return self._body["id"]

    def whole(self, results: Sequence[Sequence[Completion]]) -> Object:
        self.last_chunks(0, results[0])
        return self.finish(results)[0]["response"]

    def chunks(self, pieces: Iterable[tuple[int, Piece]]) -> list[Object]:
        opening = () if self._opened else ("created", "in_progress")
        self._opened.add(0)
        events = [self._event(kind, response=self._body) for kind in opening]
        return events + super().chunks(pieces)

    def unsent(self, pieces: Iterable[tuple[int, Piece]]) -> list[tuple[int, Piece]]:
        out = super().unsent(pieces)
        self._numbers = itertools.count(self._events)  # what was sent already is not counted twice
        return out

    def finish(self, results: Sequence[Sequence[Completion]]) -> list[Object]:
        """Returns the event with the complete response, and stores the response."""
        prompt, sampled, total, cached = self.usage(results).values()
        body = self._body
        body["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": cached | {"cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total,
        }
        if body["store"]:
            self._keep(body)
        return [self._event(body["status"], response=body)]

    def failed(self, error: Object) -> list[Object]:
        reason = {"code": "server_error", "message": error["message"]}
        return [self._event("failed", response=self._body | {"status": "failed", "error": reason})]

    def _chunks(self, index: int, part: Part) -> list[Object]:
        text, out = self._part, []
        self._pending += self._scores(part) if self.spec.logprobs else []
        if not self._body["output"] and (part.text or (part.done and not part.calls)):
            message: Object = {"id": f"msg_{self._body['id'][5:]}", "type": "message"}
            message |= {"role": "assistant", "content": []}
            self._body["output"] = [message]
            out.append(self._item_event("added", "in_progress"))
            out.append(self._text_event("content_part.added", part=text))
            message["content"].append(text)
        if part.text:
            logprobs, self._pending = self._pending, []
            text["text"] += part.text
            text["logprobs"] += logprobs
            out.append(self._text_event("output_text.delta", delta=part.text, logprobs=logprobs))
        return out if part.done is None else out + self._last(part, part.done)

    def _last(self, part: Part, done: Completion) -> list[Object]:
        """Returns the events that end the message and those of the calls."""
        body, text, out = self._body, self._part, []
        body["status"] = "completed" if part.calls or done.finish == "stop" else "incomplete"
        if done.finish == "length" and not part.calls:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        if body["output"]:
            text["logprobs"] += self._pending
            whole = {"text": text["text"], "logprobs": text["logprobs"]}
            out.append(self._text_event("output_text.done", **whole))
            out.append(self._text_event("content_part.done", part=text))
            out.append(self._item_event("done", body["status"]))
        for call in part.calls:
            item = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"]}
            place = {"item_id": item["id"], "output_index": len(body["output"])}
            given, kind = call["function"]["arguments"], "function_call_arguments"
            body["output"].append(item | call["function"] | {"arguments": ""})
            out.append(self._item_event("added", "in_progress"))
            out.append(self._event(f"{kind}.delta", **place, delta=given))
            out.append(self._event(f"{kind}.done", **place, **call["function"]))
            body["output"][-1]["arguments"] = given
            out.append(self._item_event("done", "completed"))
        return out

    def _event(self, kind: str, **fields: Any) -> Object:
        number = next(self._numbers)
        # a copy: the response grows before the event is written
        return {"type": f"response.{kind}", "sequence_number": number, **copy.deepcopy(fields)}

    def _text_event(self, kind: str, **fields: Any) -> Object:
        id = self._body["output"][0]["id"]
        return self._event(kind, item_id=id, output_index=0, content_index=0, **fields)

    def _item_event(self, kind: str, status: str) -> Object:
        """Returns an event of the output's last item, which gets a status."""
        output = self._body["output"]
        output[-1]["status"] = status
        place = {"output_index": len(output) - 1, "item": output[-1]}
        return self._event(f"output_item.{kind}", **place)
