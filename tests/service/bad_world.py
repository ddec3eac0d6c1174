"""Two tenants of one server, valid bodies of every Tinker route, and what may not be in their
fields: what the bad inputs are made of.
"""

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np

from mint_jax.service.wire import messages
from tests.service.sites import Site

JSON = {"content-type": "application/json"}
PROTOBUF = {"content-type": "application/x-protobuf"}
LONGEST_ANSWER = 4096  # bytes of an error: it names the value, and does not give it back
NOBODY = "0" * 32
CHUNKS = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}


@dataclasses.dataclass
class Tenant:
    """A tenant with one of everything.

    Attributes:
        place: of the model's next request.
        paths: of its checkpoints, by kind.
        future, answer: a training request's and a sample's id.
    """

    site: Site
    key: str
    web: httpx.Client
    session: str = ""
    model: str = ""
    sampler: str = ""
    place: int = 1
    samples: int = 0
    paths: dict[str, str] = dataclasses.field(default_factory=dict)
    future: str = ""
    answer: str = ""

    def send(
        self,
        method: str,
        path: str,
        content: Any = b"",
        headers: dict[str, str] = JSON,
        **options: Any,
    ) -> httpx.Response:
        """One request; what is no bytes is sent as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        url = f"{self.site.url}/api/v1/{path}"
        return self.web.request(
            method, url, content=body, headers={"x-api-key": self.key} | headers, **options
        )

    def post(self, path: str, content: Any, headers: dict[str, str] = JSON) -> httpx.Response:
        return self.send("POST", path, content, headers)

    def outcome(self, id: str) -> dict[str, Any]:
        """What a future's id gives."""
        answer = self.post("retrieve_future", {"request_id": id})
        assert answer.status_code == 200, f"{answer.status_code} {answer.text[:300]}"
        return answer.json()

    def done(self, path: str, told: dict[str, Any]) -> dict[str, Any]:
        """The result of a good request."""
        answer = self.post(path, told)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:300]}"
        if "request_id" not in answer.json():
            return answer.json()
        result = self.outcome(answer.json()["request_id"])
        assert "error" not in result, f"{path}: {result}"
        return result | {"request_id": answer.json()["request_id"]}

    def train(self, path: str, told: dict[str, Any]) -> dict[str, Any]:
        """The result of the model's next request."""
        self.place += 1
        return self.done(path, told | {"model_id": self.model, "seq_id": self.place - 1})

    def sample(self, **params: Any) -> dict[str, Any]:
        self.samples += 1
        told = {
            "sampling_session_id": self.sampler,
            "seq_id": self.samples,
            "prompt": CHUNKS,
            "num_samples": 1,
            "sampling_params": params,
        }
        return self.done("asample", told)

    def settle(self) -> "Tenant":
        """Makes one of everything."""
        web, name = self, self.site.server.name
        self.session = web.done(
            "create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        )["session_id"]
        self.model = web.done("create_model", self.adopted(0))["model_id"]
        self.future = self.train("forward_backward", {"forward_backward_input": batch()})[
            "request_id"
        ]
        self.train("optim_step", {"adam_params": {"learning_rate": 1e-2}})
        for kind in ("save_weights", "save_weights_for_sampler", "save_weights_external"):
            path = self.train(kind, {"path": "kept"})["path"]
            self.paths[path.split("/")[-2]] = path
        told = {
            "session_id": self.session,
            "sampling_session_seq_id": 0,
            "model_path": self.paths["sampler_weights"],
            "base_model": name,
        }
        self.sampler = web.done("create_sampling_session", told)["sampling_session_id"]
        self.answer = self.sample(max_tokens=3, temperature=0)["request_id"]
        return self

    def adopted(self, number: int, **options: Any) -> dict[str, Any]:
        """The body that makes a model."""
        config = {
            "rank": 8,
            "seed": 3,
            "train_unembed": True,
            "train_mlp": True,
            "train_attn": True,
        }
        told = {
            "session_id": self.session,
            "model_seq_id": number,
            "base_model": self.site.server.name,
            "lora_config": config,
        }
        return told | {"optimizer_config": {"type": "adamw"}, "user_metadata": {}} | options


def batch(tokens: Any = (5, 6, 7), loss: str = "cross_entropy") -> dict[str, Any]:
    """A forward and backward as old SDKs tell it."""
    n = len(tokens)
    inputs = {
        "target_tokens": {"data": list(tokens), "dtype": "int64", "shape": [n]},
        "weights": {"data": [1.0] * n, "dtype": "float32", "shape": [n]},
    }
    data = [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]},
            "loss_fn_inputs": inputs,
        }
    ]
    return {"data": data, "loss_fn": loss, "loss_fn_config": {}}


def message(model: str, place: int) -> Any:
    """The same as SDK 0.38 sends it; to be changed."""
    out = messages.ForwardBackwardRequest(model_id=model, seq_id=place, loss_fn="cross_entropy")
    datum = out.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([5, 6, 7], "<i4").tobytes()
    put(datum, "target_tokens", np.array([6, 7, 8], "<i8"), messages.INT64)
    put(datum, "weights", np.ones(3, "<f4"), messages.FLOAT32)
    return out


def put(datum: Any, name: str, values: Any, dtype: int, shape: Any = (3,)) -> None:
    """Sets a tensor of a datum."""
    tensor = datum.loss_fn_inputs[name]
    tensor.Clear()
    tensor.dense = values if isinstance(values, bytes) else values.tobytes()
    tensor.dtype = dtype
    tensor.shape.extend(shape)


HUGE, NAN, INF = 10**30, float("nan"), float("inf")
# what a field of a kind may not be; NaN and infinities are in no JSON
BAD: dict[str, list[Any]] = {
    "text": [7, 1.5, True, [], {}, ["x"], ""],
    "place": ["1", 1.5, True, [], {}, -1, HUGE, NAN],
    "whole": ["1", 1.5, True, [], {}, HUGE, NAN],
    "number": ["1", True, [], {}, HUGE**2, NAN, INF, -INF],
    "positive": ["1", True, [], {}, HUGE**2, NAN, INF, -1.0],
    "flag": ["true", 1, 0, [], {}],
    "object": ["x", 5, True, ["x"]],
    "list": ["x", 5, True, {"x": 1}],
    "tokens": [
        "x",
        5,
        True,
        {"x": 1},
        [1.5],
        ["5"],
        [True],
        [None],
        [-1],
        [97],
        [2**31],
        [HUGE],
        [[5]],
        [],
    ],
}
# route -> fields by their paths, with their kinds; `!`: it has to be there
FIELDS: dict[str, dict[str, str]] = {
    "create_session": {"tags": "list", "user_metadata": "object", "sdk_version": "text", "display_name": "text", "project_id": "text"},  # noqa: E501
    "session_heartbeat": {"session_id": "text!"},
    "create_model": {
        "session_id": "text!", "model_seq_id": "place!", "base_model": "text", "lora_config": "object", "lora_config.rank": "place",  # noqa: E501
        "lora_config.seed": "whole", "lora_config.train_mlp": "flag", "optimizer_config": "object", "user_metadata": "object",  # noqa: E501
        "optimizer_config.type": "text",
    },
    "load_weights": {"model_id": "text!", "seq_id": "place!", "path": "text!", "optimizer": "flag", "base_model": "text"},  # noqa: E501
    "get_info": {"model_id": "text!"},
    "unload_model": {"model_id": "text!"},
    "forward_backward": {
        "model_id": "text!", "seq_id": "place!", "forward_backward_input": "object!", "forward_backward_input.data": "list!",  # noqa: E501
        "forward_backward_input.loss_fn": "text!", "forward_backward_input.loss_fn_config": "object",  # noqa: E501
        "forward_backward_input.data.0": "object!", "forward_backward_input.data.0.model_input": "object!",  # noqa: E501
        "forward_backward_input.data.0.model_input.chunks": "list!", "forward_backward_input.data.0.model_input.chunks.0": "object!",  # noqa: E501
        "forward_backward_input.data.0.model_input.chunks.0.tokens": "tokens!",
        "forward_backward_input.data.0.loss_fn_inputs": "object!",
        "forward_backward_input.data.0.loss_fn_inputs.weights": "object!",
        "forward_backward_input.data.0.loss_fn_inputs.target_tokens": "object!",
        "forward_backward_input.data.0.loss_fn_inputs.target_tokens.data": "tokens!",
        "forward_backward_input.data.0.loss_fn_inputs.target_tokens.dtype": "text!",
        "forward_backward_input.data.0.loss_fn_inputs.target_tokens.shape": "list",
    },
    "optim_step": {
        "model_id": "text!", "seq_id": "place!", "adam_params": "object", "adam_params.learning_rate": "positive",  # noqa: E501
        "adam_params.beta1": "positive", "adam_params.beta2": "positive", "adam_params.eps": "positive",  # noqa: E501
        "adam_params.weight_decay": "positive", "adam_params.grad_clip_norm": "positive",
    },
    "save_weights": {
        "model_id": "text!", "seq_id": "place!", "path": "text!", "ttl_seconds": "place", "overwrite": "flag", "user_metadata": "object",  # noqa: E501
    },
    "save_weights_for_sampler": {"model_id": "text!", "seq_id": "place!", "path": "text!", "ttl_seconds": "place", "kind": "text"},  # noqa: E501
    "save_weights_external": {"model_id": "text!", "seq_id": "place!", "path": "text!", "age_encryption_recipients": "list"},  # noqa: E501
    "create_sampling_session": {
        "session_id": "text!", "sampling_session_seq_id": "place!", "model_path": "text", "base_model": "text",  # noqa: E501
    },
    "join_sampling_session": {"sampling_session_id": "text!"},
    "asample": {
        "sampling_session_id": "text!", "seq_id": "place!", "prompt": "object!", "prompt.chunks": "list!", "num_samples": "place",  # noqa: E501
        "prompt.chunks.0": "object!", "prompt.chunks.0.tokens": "tokens!", "sampling_params": "object",  # noqa: E501
        "sampling_params.max_tokens": "place", "sampling_params.temperature": "positive", "sampling_params.top_p": "positive",  # noqa: E501
        "sampling_params.top_k": "whole", "sampling_params.seed": "whole", "prompt_logprobs": "flag", "topk_prompt_logprobs": "place",  # noqa: E501
        "topk_sample_logprobs": "place", "prompt_alt_tokens_k": "place", "prompt_logprobs_last_n": "place",  # noqa: E501
        "target_prompt_logprobs": "object",
    },
    "retrieve_future": {"request_id": "text!", "allow_metadata_only": "flag"},
    "retrieve_futures": {
        "target": "object!", "target.sampling_session_id": "text!", "target.cloned_sampler_id": "place", "prev_cursor": "place",  # noqa: E501
        "timeout": "number", "retrieved_request_ids": "list",
    },
    "cancel_future": {"request_id": "text", "request_ids": "list"},
    "weights_info": {"tinker_path": "text!"},
    "copy_weights": {
        "source_path": "text!", "session_id": "text", "model_seq_id": "place!", "ttl_seconds": "place",  # noqa: E501
    },
}  # fmt: skip
TRAINING = (
    "load_weights",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
)


def bodies(tenant: Tenant) -> dict[str, dict[str, Any]]:
    """A valid body of each route, with the model's next place."""
    name, here = tenant.site.server.name, {"model_id": tenant.model, "seq_id": tenant.place}
    tenant.samples += 1
    adam = {
        "learning_rate": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "grad_clip_norm": 1.0,
    }
    params = {"max_tokens": 2, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 1}
    saved = here | {"path": f"n{tenant.place}", "ttl_seconds": 3600}
    scored = {
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
    }
    scored |= {
        "prompt_logprobs_last_n": 1,
        "target_prompt_logprobs": {"data": [5, 6], "dtype": "int64", "shape": [2, 1]},
    }
    return copy.deepcopy({
        "create_session": {"tags": ["a"], "user_metadata": {"a": 1}, "sdk_version": "0.38.0", "display_name": "d", "project_id": "p"},  # noqa: E501
        "session_heartbeat": {"session_id": tenant.session},
        "create_model": tenant.adopted(1000 + tenant.samples),
        "load_weights": here | {"path": tenant.paths["weights"], "optimizer": True, "base_model": name},  # noqa: E501
        "get_info": {"model_id": tenant.model},
        "unload_model": {"model_id": tenant.model},
        "forward_backward": here | {"forward_backward_input": batch()},
        "optim_step": here | {"adam_params": adam},
        "save_weights": saved | {"overwrite": False, "user_metadata": {}},
        "save_weights_for_sampler": saved | {"kind": "snapshot"},
        "save_weights_external": saved | {"age_encryption_recipients": []},
        "create_sampling_session": {
            "session_id": tenant.session, "sampling_session_seq_id": 1000 + tenant.samples, "base_model": name,  # noqa: E501
            "model_path": tenant.paths["sampler_weights"],
        },
        "join_sampling_session": {"sampling_session_id": tenant.sampler},
        "asample": {"sampling_session_id": tenant.sampler, "seq_id": tenant.samples, "num_samples": 1, "prompt": CHUNKS}  # noqa: E501
        | {"sampling_params": params} | scored,
        "retrieve_future": {"request_id": tenant.future, "allow_metadata_only": False},
        "retrieve_futures": {
            "target": {"type": "sampling_session", "sampling_session_id": tenant.sampler, "cloned_sampler_id": 0}, "prev_cursor": 0,  # noqa: E501
            "timeout": 0.0, "retrieved_request_ids": [],
        },
        "cancel_future": {"request_ids": [tenant.answer]},
        "weights_info": {"tinker_path": tenant.paths["weights"]},
        "copy_weights": {
            "source_path": tenant.paths["weights"], "session_id": tenant.session, "model_seq_id": 2000 + tenant.samples,  # noqa: E501
            "ttl_seconds": 3600,
        },
    })  # fmt: skip


MISSING = object()


def wrongs(route: str) -> Iterator[tuple[str, Any]]:
    """Every field of a route, and what it may not be; ``MISSING``: it may not be left out."""
    for field, kind in FIELDS[route].items():
        for value in BAD[kind.rstrip("!")]:
            yield field, value
        if kind.endswith("!"):
            yield field, None
            yield field, MISSING


def changed(body: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """The body with another value of a field, in place."""
    *parts, last = [int(part) if part.isdecimal() else part for part in field.split(".")]
    at: Any = body
    for part in parts:
        at = at[part]
    if value is MISSING:
        del at[last]
    else:
        at[last] = value
    return body


def refused(tenant: Tenant, answer: httpx.Response, statuses: tuple[int, ...] = (400,)) -> str:
    """Why a request was refused; at once, or by its future, as the user's mistake. What is answered
    otherwise fails the test.
    """
    what = f"{answer.status_code} {answer.text[:300]}"
    assert len(answer.content) <= LONGEST_ANSWER, f"{len(answer.content)} bytes: {what}"
    assert answer.headers.get("content-type", "").startswith("application/json"), (
        f"{answer.headers.get('content-type')}: {what}"
    )
    told = answer.json()
    if answer.status_code == 200:
        assert "request_id" in told, f"accepted: {what}"
        told = tenant.outcome(told["request_id"])
        assert told.get("category") == "user", f"accepted: {str(told)[:300]}"
        reason = told["error"]
        assert len(reason) <= LONGEST_ANSWER, f"{len(reason)} characters: {reason[:300]}"
    else:
        assert answer.status_code in statuses, what
        reason = told["detail"]
    assert isinstance(reason, str), what
    assert len(reason) > 10, what
    return reason
