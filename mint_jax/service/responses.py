"""OpenAI's Responses API: bodies become bodies of chats, and answers of chats become responses or
their events.

Text, function tools, structured output, streams and ``previous_response_id`` are served. What is
known and cannot be had (other tools, background, conversations, reasoning) is refused by name.
"""

import collections
import copy
import dataclasses
import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mint_jax.rollout.request import Completion
from mint_jax.rollout.stream import Piece
from mint_jax.service import fields
from mint_jax.service.fields import BadRequest, wrong
from mint_jax.service.openai_answers import Answer
from mint_jax.service.openai_types import refuse_used

UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # field -> values that mean "not used"
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "reasoning": (None, {}),
    "truncation": (None, "disabled"),
    "context_management": (None, []),
}
KEPT = (  # fields that chats call the same, vLLM's among them
    *(
        "model",
        "stream",
        "temperature",
        "top_p",
        "parallel_tool_calls",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
    ),
    *(
        "logit_bias",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "chat_template_kwargs",
    ),
)
NAMES = {  # what chats call fields of responses
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "messages": "input",
}
LOGPROBS = "message.output_text.logprobs"
STORE_BYTES = 64 << 20  # of responses that are kept, as JSON
Messages = list[dict[str, Any]]


class Unknown(BadRequest):
    """A response is not kept here."""

    def __init__(self, id: str, param: str | None = None):
        super().__init__(
            param,
            f"response {id[:100]!r} is not kept here: it was deleted, is too old, or the server was"
            " started anew",
        )


class Store:
    """Responses that were asked to be kept, the newest ``STORE_BYTES`` of them, in memory. From any
    thread.

    Args:
        most_bytes: of all tenants together.
    """

    def __init__(self, most_bytes: int = STORE_BYTES):
        self._most, self._bytes, self._lock = most_bytes, 0, threading.Lock()
        self._kept: collections.OrderedDict[tuple[str, str], tuple[str, int]] = (
            collections.OrderedDict()
        )

    def put(self, tenant: str, response: Mapping[str, Any], messages: Messages) -> None:
        """Keeps a response and the conversation that it ends."""
        data = json.dumps([response, messages])
        with self._lock:
            self._kept[tenant, response["id"]] = data, len(data)
            self._bytes += len(data)
            while self._bytes > self._most:
                self._bytes -= self._kept.popitem(last=False)[1][1]

    def get(
        self, tenant: str, id: str, param: str | None = None
    ) -> tuple[dict[str, Any], Messages]:
        """Returns a tenant's response and the conversation that it ends.

        Raises:
            Unknown: it is not kept, or is another tenant's.
        """
        with self._lock:
            found = self._kept.get((tenant, id))
        if found is None:
            raise Unknown(id, param)
        response, messages = json.loads(found[0])
        return response, messages

    def delete(self, tenant: str, id: str) -> None:
        """Raises ``Unknown`` as ``get``."""
        with self._lock:
            found = self._kept.pop((tenant, id), None)
            if found is None:
                raise Unknown(id)
            self._bytes -= found[1]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A body, read.

    Attributes:
        chat: the body of the chat that it stands for.
        messages: of the conversation, without the instructions.
        told: what the response repeats of the body.
        store: the response is kept.
    """

    chat: dict[str, Any]
    messages: Messages
    told: dict[str, Any]
    store: bool


def asked_of(body: dict[str, Any], tenant: str, store: Store) -> Asked:
    """Reads a body of ``/responses``.

    Raises:
        BadRequest: naming the field that is wrong.
    """
    refuse_used(body, UNSUPPORTED)
    instructions, previous = body.get("instructions"), body.get("previous_response_id")
    messages: Messages = []
    if previous is not None:
        messages = store.get(
            tenant, fields.text("previous_response_id", previous), "previous_response_id"
        )[1]
    messages += _messages(body.get("input"))
    chat = {name: body[name] for name in KEPT if name in body}
    chat["messages"] = copy.deepcopy(messages)
    if instructions is not None:
        system = fields.text("instructions", instructions)
        if (first := messages[0])["role"] in ("system", "developer") and isinstance(
            first["content"], str
        ):
            chat["messages"][0]["content"] = f"{system}\n\n{first['content']}"
        else:
            chat["messages"].insert(0, {"role": "system", "content": system})
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if not isinstance(tools, list):
        raise wrong("tools", tools, "a list of functions")
    chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    else:
        chat["tool_choice"] = choice
    chat["max_completion_tokens"] = body.get("max_output_tokens")
    form = (fields.mapping(body, "text") or {}).get("format")
    chat["response_format"] = _format(form)
    include = body.get("include") or []
    if not isinstance(include, list) or not all(isinstance(one, str) for one in include):
        raise wrong("include", include, "a list of names")
    top = fields.whole(body, "top_logprobs", 0, 0, 20)
    chat |= {"logprobs": True, "top_logprobs": top} if top or LOGPROBS in include else {}
    kept = fields.flag(body, "store", True)
    told = {
        "instructions": instructions,
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": fields.mapping(body, "metadata") or {},
        "parallel_tool_calls": fields.flag(body, "parallel_tool_calls", True),
        "previous_response_id": previous,
        "store": kept,
        "temperature": fields.number(body, "temperature", 1.0, 0.0),
        "text": {"format": form or {"type": "text"}},
        "tool_choice": choice or "auto",
        "tools": tools,
        "top_logprobs": top,
        "top_p": fields.number(body, "top_p", 1.0, 0.0),
    }
    return Asked(chat, messages, told, kept)


def own_names(error: BadRequest) -> BadRequest:
    """Returns an error about a chat's body with the names that the fields have in responses."""
    for name, own in NAMES.items():
        if error.param is not None and error.param.startswith(name):
            return BadRequest(
                own + error.param[len(name) :], str(error).replace(name, own), error.code
            )
    return error


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise wrong(f"{where}.type", kind, "function: tools of other types are not served here")
    function = {
        key: tool[key]
        for key in ("name", "description", "parameters", "strict")
        if tool.get(key) is not None
    }
    return {"type": "function", "function": function}


def _format(given: Any) -> dict[str, Any] | None:
    """Returns ``text.format`` as ``response_format``."""
    if isinstance(given, dict) and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}
    return given


def _messages(given: Any) -> Messages:
    """Returns the input, a text or items, as messages of a chat."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", given, "text, or a list of items")
    out: Messages = []
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise wrong(where, item, "an item")
        kind = item.get("type", "message")
        if kind == "message":
            out.append(
                {
                    "role": item.get("role"),
                    "content": _text(item.get("content"), f"{where}.content"),
                }
            )
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": None})
            out[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _text(item.get("output"), f"{where}.output")
            out.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise wrong(
                f"{where}.type",
                kind,
                "message, function_call or function_call_output: others are not served here",
            )
    return out


def _text(content: Any, where: str) -> Any:
    """Returns content as a text; what is no list is left to the chat."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in ("input_text", "output_text", "refusal"):
            raise wrong(
                f"{where}.type", kind, "parts that are text: others cannot be read by this model"
            )
        texts.append(fields.text(where, part.get("refusal" if kind == "refusal" else "text")))
    return "\n".join(texts)


class Response:
    """The response to one body, as ``Answer`` is to a chat's.

    Args:
        answer: to the chat.
        store: keeps the response of this tenant, if it asks so.
    """

    def __init__(self, answer: Answer, asked: Asked, tenant: str, store: Store):
        self._answer, self._asked, self._tenant, self._store = answer, asked, tenant, store
        self.asked, self.model, self.id = (
            answer.asked,
            answer.model,
            "resp_" + secrets.token_hex(16),
        )
        self._sent = 0
        self._output: list[dict[str, Any]] = []  # of a stream
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
        if self._asked.store:
            self._store.put(self._tenant, body, [*self._asked.messages, *_messages(output)])
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
            "model": self._answer.asked.model,
            "output": output,
            "reasoning": {"effort": None, "summary": None},
            "truncation": "disabled",
            "usage": None,
            "user": None,
            **self._asked.told,
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

    # -- as it comes

    def chunks(self, pieces: Sequence[tuple[int, Piece]]) -> list[dict[str, Any]]:
        """Returns the events for what has come."""
        return self._begin() + [
            event for chunk in self._answer.chunks(pieces) for event in self._deltas(chunk)
        ]

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
        return [*out, self._event(f"response.{body['status']}", response=body)]

    def failed(self, error: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the event that ends a stream which has begun."""
        body = self._body("failed", self._output)
        body["error"] = {"code": "server_error", "message": error["message"]}
        return [self._event("response.failed", response=body)]

    def written(self, event: Mapping[str, Any]) -> str:
        """Returns an event as a stream has it."""
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    end = ""  # of a stream

    def usage_chunk(self, results: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        raise AssertionError("the last event of a response has its usage")

    def _event(self, kind: str, **what: Any) -> dict[str, Any]:
        self._sent += 1
        return copy.deepcopy({"type": kind, "sequence_number": self._sent - 1, **what})

    def _begin(self) -> list[dict[str, Any]]:
        if self._sent:
            return []
        return [
            self._event(f"response.{kind}", response=self._body("in_progress", []))
            for kind in ("created", "in_progress")
        ]

    def _open(self) -> list[dict[str, Any]]:
        """The events that begin the message."""
        item = self._message("", [], "in_progress")
        self._output.append(item)
        added = self._event(
            "response.output_item.added", output_index=0, item=item | {"content": []}
        )
        return [
            added,
            self._event("response.content_part.added", **self._place(), part=item["content"][0]),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[0]["id"], "output_index": 0, "content_index": 0}

    def _deltas(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The events of a chat's chunk with text."""
        choice = chunk["choices"][0]
        text, logprobs = choice["delta"].get("content") or "", _logprobs(choice)
        self._logprobs += logprobs
        if not text:
            return []
        out = [] if self._output else self._open()
        part = self._output[0]["content"][0]
        part["text"] += text
        logprobs, self._logprobs = self._logprobs, []
        part["logprobs"] += logprobs
        return [
            *out,
            self._event(
                "response.output_text.delta", **self._place(), delta=text, logprobs=logprobs
            ),
        ]

    def _close(self, finish: str) -> list[dict[str, Any]]:
        """The events that end the message."""
        [item] = self._output
        [part] = item["content"]
        part["logprobs"] += self._logprobs
        item["status"] = "incomplete" if finish == "length" else "completed"
        return [
            self._event(
                "response.output_text.done",
                **self._place(),
                text=part["text"],
                logprobs=part["logprobs"],
            ),
            self._event("response.content_part.done", **self._place(), part=part),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def _called(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a call."""
        place = {"item_id": item["id"], "output_index": len(self._output)}
        self._output.append(item)
        begun = item | {"arguments": "", "status": "in_progress"}
        return [
            self._event(
                "response.output_item.added", output_index=place["output_index"], item=begun
            ),
            self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]),
            self._event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=item["arguments"],
            ),
            self._event("response.output_item.done", output_index=place["output_index"], item=item),
        ]


def _logprobs(choice: Mapping[str, Any]) -> list[Any]:
    return (choice["logprobs"] or {}).get("content") or []
