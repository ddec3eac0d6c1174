"""Requests in raw JSON, as SDKs before protobuf send them: optional fields are null or left out."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from mint_jax.service.server import Sizes
from mint_jax.train.blocks import BlockShape
from tests.service.sites import KEY, Site

SIZES = Sizes(
    slots={4: 2},
    adapters={4: 2, 8: 2},
    shapes=(BlockShape(2, 1, 16),),
    max_rows=4,
    cache_bytes=32 << 20,
    gap_s=0.05,
    idle_gap_s=0.2,
)
N = 12  # positions of a datum


class RawClient:
    """A client of a site without an SDK.

    Attributes:
        numbers: count of the requests of each model.
        last: id of the last future whose result was read.
    """

    def __init__(self, site: Site, key: str = KEY):
        self.site, self.key, self.models = site, key, 0
        self.numbers: dict[str, int] = {}
        self.last, self.web = "", httpx.Client(timeout=60)

    @property
    def server(self):
        return self.site.server

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

    def open(self) -> str:
        told = {"tags": [], "user_metadata": None, "sdk_version": "0.6.0", "type": "create_session"}
        self.session = self.done("create_session", told)["session_id"]
        return self.session

    def create(self, rank: int = 4, **options: Any) -> str:
        """Returns a new model's id."""
        lora = {"rank": rank, "seed": None, "train_unembed": True, "train_mlp": True}
        told = {"session_id": self.session, "model_seq_id": self.models, "user_metadata": None}
        told |= {"base_model": self.server.name, "lora_config": lora | options}
        self.models += 1
        return self.done("create_model", told | {"type": "create_model"})["model_id"]

    def train(self, route: str, model: str, **body: Any) -> dict[str, Any]:
        """Returns the result of a model's next request."""
        self.numbers[model] = self.numbers.get(model, 0) + 1
        return self.result(route, {"model_id": model, "seq_id": self.numbers[model]} | body)


@pytest.fixture(scope="module")
def old(sites, tiny_base):
    """A client with a session of a server over the tiny llama."""
    client = RawClient(sites(tiny_base(), sizes=SIZES))
    client.open()
    return client


def tensor(values: Any) -> dict[str, Any]:
    """The JSON of an array; the shape may be null."""
    whole = values.dtype.kind == "i"
    return {"data": values.tolist(), "dtype": "int64" if whole else "float32", "shape": None}


def datum(tokens: Any, **inputs: Any) -> dict[str, Any]:
    """Tokens ``[N + 1]`` as a datum that predicts the next one."""
    chunks = [{"tokens": tokens[:-1].tolist()}]  # no type
    inputs = {name: tensor(value) for name, value in inputs.items()}
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


def adam(learning_rate: float) -> dict[str, Any]:
    """The body of ``optim_step`` before it had weight decay."""
    params = {"learning_rate": learning_rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    return {"adam_params": params, "type": "optim_step"}


def batch(rng, old: RawClient, count: int = 2) -> dict:
    """A request's input, for cross-entropy."""
    rows = rng.integers(0, old.server.base.cfg.vocab_size, (count, N + 1))
    weights = rng.normal(size=(count, N)).astype(np.float32)
    data = [datum(row, target_tokens=row[1:], weights=w) for row, w in zip(rows, weights)]
    return {"data": data, "loss_fn": "cross_entropy", "loss_fn_config": None}


def trained(rng, old: RawClient, rank: int = 4) -> str:
    """A model after an update."""
    model = old.create(rank)
    old.train("forward_backward", model, forward_backward_input=batch(rng, old))
    old.train("optim_step", model, **adam(0.05))
    return model
