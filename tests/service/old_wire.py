"""Requests as SDKs before protobuf send them, JSON, optional fields null or left out: ``old`` is
such a client of a server here.
"""

import contextlib
from typing import Any

import httpx
import pytest

from mint_jax.service.server import Sizes
from mint_jax.train.blocks import BlockShape
from tests.service.sites import Site

SIZES = Sizes(
    slots={4: 2},
    adapters={4: 2, 8: 2},
    shapes=(BlockShape(2, 1, 16),),
    max_rows=4,
    cache_bytes=32 << 20,
    gap_s=0.05,
    idle_gap_s=0.2,
)


class Client:
    """One session of a site.

    Attributes:
        numbers: of each model the requests sent so far.
    """

    def __init__(self, site: Site, key: str = "sk-any"):
        self.server, self.numbers = site.server, {}
        self._http = httpx.Client(
            base_url=f"{site.url}/api/v1", headers={"x-api-key": key}, timeout=60
        )
        told = {"tags": [], "user_metadata": None, "sdk_version": "0.6.0", "type": "create_session"}
        self.session = self.post("create_session", told)["session_id"]
        self._models = 0

    def send(self, path: str, told: dict[str, Any]) -> httpx.Response:
        return self._http.post(path, json=told)

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def post(self, path: str, told: dict[str, Any]) -> dict[str, Any]:
        """What is answered at once."""
        answer = self.send(path, told)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def result(self, path: str, told: dict[str, Any]) -> dict[str, Any]:
        """What a future gives; its body has no more than its id."""
        id = self.post(path, told)["request_id"]
        answer = self.send("retrieve_future", {"request_id": id})
        if answer.status_code == 408:
            assert answer.json()["queue_state"] == "active"
            # what takes two long polls does not come
            answer = self.send("retrieve_future", {"request_id": id})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("application/json")
        return answer.json()

    def create(self, rank: int = 4, **options: Any) -> str:
        """A new model's id."""
        lora = {"rank": rank, "seed": None, "train_unembed": True, "train_mlp": True}
        told = {"session_id": self.session, "model_seq_id": self._models, "user_metadata": None}
        told |= {"base_model": self.server.name, "lora_config": lora | options}
        self._models += 1
        id = self.result("create_model", told | {"type": "create_model"})["model_id"]
        self.numbers[id] = 0
        return id

    def train(self, route: str, model: str, **told: Any) -> dict[str, Any]:
        """The result of a model's next request."""
        self.numbers[model] += 1
        return self.result(route, {"model_id": model, "seq_id": self.numbers[model]} | told)

    def close(self) -> None:
        self._http.close()


@pytest.fixture(scope="module")
def old(sites, tiny_base):
    """A client of a server over the tiny llama."""
    with contextlib.closing(Client(sites(tiny_base(), sizes=SIZES))) as one:
        yield one


def tensor(values: Any) -> dict[str, Any]:
    """Of an array, as JSON has it; the shape may be null."""
    whole = values.dtype.kind == "i"
    return {"data": values.tolist(), "dtype": "int64" if whole else "float32", "shape": None}


def datum(tokens: Any, **inputs: Any) -> dict[str, Any]:
    """Tokens ``[N + 1]`` as a datum that predicts the next one."""
    chunks = [{"tokens": tokens[:-1].tolist()}]  # no type
    return {
        "model_input": {"chunks": chunks},
        "loss_fn_inputs": {name: tensor(value) for name, value in inputs.items()},
    }


def adam(learning_rate: float) -> dict[str, Any]:
    """What ``optim_step`` had before weight decay."""
    return {
        "adam_params": {"learning_rate": learning_rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
        "type": "optim_step",
    }
