"""Tenants of one server without an SDK, in raw JSON as SDKs before protobuf send it; valid bodies
of Tinker routes, and wrong values for their fields.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx

from tests.service.sites import KEY, Site

LONGEST_ANSWER = 4096  # bytes of an error
NOBODY = "0" * 32
CHUNKS = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}


class Tenant:
    """A tenant with a session; after ``settle`` with one of everything.

    Attributes:
        ids: of its session, model, samplers, future, answer, and paths of checkpoints by kind.
        numbers: count of the requests of each model that ``train`` sent.
        place: number of the next request of the model in ``ids``.
        last: id of the last future whose result was read.
    """

    def __init__(self, site: Site, key: str = KEY):
        self.site, self.key, self.web = site, key, httpx.Client(timeout=60)
        self.samples, self.place, self.last = 0, 1, ""
        self.numbers: dict[str, int] = {}
        told = {"tags": [], "user_metadata": None, "sdk_version": "0.6.0", "type": "create_session"}
        self.ids = {"session": self.done("create_session", told)["session_id"]}

    def send(self, method: str, path: str, content: Any = b"", **headers: str) -> httpx.Response:
        """Sends one request; anything but bytes as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"x-api-key": self.key, "content-type": "application/json"} | headers
        url = f"{self.site.url}/api/v1/{path}"
        return self.web.request(method, url, content=body, headers=headers)

    def post(self, path: str, content: Any) -> httpx.Response:
        return self.send("POST", path, content)

    def outcome(self, id: str) -> dict[str, Any]:
        """Returns the result of a future; one that takes two long polls does not come."""
        answer = self.post("retrieve_future", {"request_id": id})
        if answer.status_code == 408:
            assert answer.json()["queue_state"] == "active"
            answer = self.post("retrieve_future", {"request_id": id})
        assert answer.status_code == 200, f"{answer.status_code} {answer.text[:300]}"
        assert answer.headers["content-type"].startswith("application/json")
        return answer.json()

    def result(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer of an accepted request; the result or error of its future."""
        answer = self.post(path, body)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:300]}"
        if "request_id" not in answer.json():
            return answer.json()
        self.last = answer.json()["request_id"]
        return self.outcome(self.last)

    def done(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the result of a valid request."""
        result = self.result(path, body)
        assert "error" not in result, f"{path}: {result}"
        return result

    def train(self, route: str, model: str, **body: Any) -> dict[str, Any]:
        """Returns the result of a model's next request."""
        self.numbers[model] = self.numbers.get(model, 0) + 1
        return self.result(route, {"model_id": model, "seq_id": self.numbers[model]} | body)

    def step(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the result of the next request of the model in ``ids``."""
        self.place += 1
        return self.done(path, body | {"model_id": self.ids["model"], "seq_id": self.place - 1})

    def sample(self, **params: Any) -> dict[str, Any]:
        self.samples += 1
        place = {"sampling_session_id": self.ids["sampler"], "seq_id": self.samples}
        return self.done("asample", place | {"prompt": CHUNKS, "sampling_params": params})

    def settle(self) -> "Tenant":
        """Makes one of everything."""
        self.ids["model"] = self.done("create_model", self.new_model(0))["model_id"]
        self.step("forward_backward", {"forward_backward_input": batch()})
        self.ids["future"] = self.last
        self.step("optim_step", {"adam_params": {"learning_rate": 1e-2}})
        for kind in SAVES:
            path = self.step(kind, {"path": "kept"})["path"]
            self.ids[path.split("/")[-2]] = path
        new = {"session_id": self.ids["session"], "sampling_session_seq_id": 0}
        new["model_path"] = self.ids["sampler_weights"]
        made = self.done("create_sampling_session", new)
        self.ids["sampler"] = made["sampling_session_id"]
        kept = self.step("save_weights_for_sampler", {"sampling_session_seq_id": 1})
        self.ids["unnamed"] = kept["sampling_session_id"]
        self.sample(max_tokens=3, temperature=0)
        self.ids["answer"] = self.last
        return self

    def new_model(self, number: int, **options: Any) -> dict[str, Any]:
        """Returns the body that creates a model."""
        place = {"session_id": self.ids["session"], "model_seq_id": number}
        lora = {"rank": 8, "seed": 3, "train_unembed": True, "train_mlp": True}
        model = {"base_model": self.site.server.name, "lora_config": lora}
        return place | model | {"optimizer_config": {"type": "adamw"}} | options


def batch(tokens: Any = (5, 6, 7)) -> dict[str, Any]:
    """Returns a batch of one datum for cross-entropy."""
    n = len(tokens)
    inputs = {
        "target_tokens": {"data": list(tokens), "dtype": "int64", "shape": [n]},
        "weights": {"data": [1.0] * n, "dtype": "float32", "shape": [n]},
    }
    chunk = {"type": "encoded_text", "tokens": list(tokens)}
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}
    return {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": {}}


SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")
TRAINING = ("load_weights", "forward_backward", "optim_step", *SAVES)
ROUTES = ("create_session", "session_heartbeat", "create_model", *TRAINING, "get_info")
ROUTES += ("unload_model", "create_sampling_session", "asample", "sessions/search")
ROUTES += ("retrieve_future", "retrieve_futures", "cancel_future", "weights_info", "copy_weights")


def body_of(route: str, tenant: Tenant) -> dict[str, Any]:
    """Returns a valid body of a route, with the model's next place."""
    name, ids = tenant.site.server.name, tenant.ids
    session, model = {"session_id": ids["session"]}, {"model_id": ids["model"]}
    here, sampler = model | {"seq_id": tenant.place}, {"sampling_session_id": ids["sampler"]}
    tenant.samples += 1
    new = 1000 + tenant.samples
    saved = here | {"path": f"n{tenant.place}", "ttl_seconds": 3600}
    adam = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
    params = {"max_tokens": 2, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 1}
    sample = {"seq_id": tenant.samples, "num_samples": 1, "prompt": CHUNKS}
    scored = {"prompt_logprobs": False, "topk_prompt_logprobs": 0, "topk_sample_logprobs": 0}
    scored |= {"prompt_alt_tokens_k": 0, "prompt_logprobs_last_n": 1}
    scored["target_prompt_logprobs"] = {"data": [5, 6], "dtype": "int64", "shape": [2, 1]}
    bodies = {
        "create_session": {"tags": ["a"], "user_metadata": {"a": 1}, "display_name": "d"},
        "session_heartbeat": session,
        "create_model": tenant.new_model(new),
        "load_weights": here | {"path": ids["weights"], "optimizer": True, "base_model": name},
        "get_info": model,
        "unload_model": model,
        "forward_backward": here | {"forward_backward_input": batch()},
        "optim_step": here | {"adam_params": adam | {"grad_clip_norm": 1.0}},
        "save_weights": saved | {"overwrite": False, "user_metadata": {}},
        "save_weights_for_sampler": saved | {"kind": "snapshot"},
        "save_weights_external": saved | {"age_encryption_recipients": []},
        "create_sampling_session": session
        | {"sampling_session_seq_id": new, "model_path": ids["sampler_weights"]},
        "asample": sampler | sample | scored | {"sampling_params": params},
        "retrieve_future": {"request_id": ids["future"], "allow_metadata_only": False},
        "retrieve_futures": {"target": sampler | {"cloned_sampler_id": 0}, "prev_cursor": 0}
        | {"timeout": 0.0, "retrieved_request_ids": []},
        "cancel_future": {"request_ids": [ids["answer"]]},
        "sessions/search": {"limit": 5, "display_name": "d", "user_metadata": {"a": 1}}
        | {"statuses": [{"type": "client_finished", "reasons": ["success"]}]}
        | {"cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "x"}}
        | {"owner": {"type": "own"}},
        "weights_info": {"tinker_path": ids["weights"]},
        "copy_weights": session | {"source_path": ids["weights"], "model_seq_id": 1000 + new},
    }
    return copy.deepcopy(bodies[route])


HUGE, NAN, INF = 10**30, float("nan"), float("inf")
WRONG: dict[type, list[Any]] = {  # type of a valid value -> values that are refused
    str: [7, 1.5, True, [], {}, ["x"], ""],
    int: ["1", 1.5, True, [], {}, HUGE, NAN],
    float: ["1", True, [], {}, HUGE**2, NAN, INF, -INF],
    bool: ["true", 1, 0, [], {}],
    dict: ["x", 5, True, ["x"]],
    list: ["x", 5, True, {"x": 1}],
}
TOKENS = [[1.5], ["5"], [True], [None], [-1], [97], [2**31], [HUGE], [[5]], []]
MISSING = object()
REQUIRED = """session_id model_id seq_id path model_seq_id forward_backward_input data loss_fn
chunks model_input tokens loss_fn_inputs weights target_tokens dtype sampling_session_id prompt
target sampling_session_seq_id request_id tinker_path source_path"""
FREE = ("tags", "user_metadata")  # any JSON below them


def is_numbers(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(one, int | float) for one in value)


def parts(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Yields the path and the value of each part of a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in items:
        yield (*path, key), part
        if isinstance(part, dict | list) and key not in FREE and not is_numbers(part):
            yield from parts(part, (*path, key))


def wrongs(body: dict[str, Any]) -> Iterator[tuple[tuple, Any]]:
    """Yields the path of each field of a body, with each value that it refuses."""
    for path, value in parts(body):
        wrong = list(WRONG[type(value)])
        if is_numbers(value) and path[-1] != "shape":
            wrong += TOKENS
        if path[-1] in REQUIRED.split():
            wrong += [None, MISSING]
        for one in wrong:
            yield path, one


def changed(body: dict[str, Any], path: tuple, value: Any) -> dict[str, Any]:
    """Changes a field of a body in place."""
    *above, last = path
    at: Any = body
    for part in above:
        at = at[part]
    if value is MISSING:
        del at[last]
    else:
        at[last] = value
    return body


def refused(tenant: Tenant, answer: httpx.Response, statuses: tuple[int, ...] = (400,)) -> str:
    """Returns the reason for which a request was refused, at once or by its future."""
    what = f"{answer.status_code} {answer.text[:300]}"
    assert len(answer.content) <= LONGEST_ANSWER, f"{len(answer.content)} bytes: {what}"
    assert answer.headers.get("content-type", "").startswith("application/json"), what
    body = answer.json()
    if answer.status_code == 200:
        assert "request_id" in body, f"accepted: {what}"
        body = tenant.outcome(body["request_id"])
        assert body.get("category") == "user", f"accepted: {str(body)[:300]}"
        reason = body["error"]
        assert len(reason) <= LONGEST_ANSWER, f"{len(reason)} characters: {reason[:300]}"
    else:
        assert answer.status_code in statuses, what
        reason = body["detail"]
    assert len(reason) > 10, what
    return reason
