"""A server on loopback in this process, for clients of every kind: ``sites(base)`` starts one,
``site`` is one over the tiny llama.
"""

import contextlib
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from mint_jax.models.base import Base
from mint_jax.service import app
from mint_jax.service.quotas import Quotas
from mint_jax.service.server import Server, Sizes
from mint_jax.train.blocks import BlockShape

SHAPES = (BlockShape(1, 1, 32), BlockShape(4, 1, 32), BlockShape(2, 1, 32, 4))
SIZES = Sizes(
    slots={8: 2},
    adapters={8: 2},
    shapes=SHAPES,
    max_rows=8,
    cache_bytes=64 << 20,
    gap_s=0.05,
    idle_gap_s=0.2,
)
KEY = "tml-x"
STARTED_S = 120.0


class Site:
    """A server that runs, and clients of it.

    Args:
        folder: the server's; the next site of a folder goes on with it.
        port: 0: any that is free.
        kind: of the server.
        beside: its programs are compiled while it serves.
        options: further ones of ``app.make``.
    """

    def __init__(
        self,
        base: Base,
        folder: Path,
        sizes: Sizes = SIZES,
        port: int = 0,
        quotas: Quotas | None = None,
        kind: type[Server] = Server,
        beside: bool = False,
        **options,
    ):
        self.server = kind(base, folder, sizes, quotas=quotas)
        self._entered = contextlib.ExitStack()
        if beside:
            self.server.compile()
        self._entered.enter_context(self.server.running())
        started, self.port = threading.Event(), 0

        def is_up(port: int) -> None:
            self.port = port
            started.set()

        self._web = app.Web(self.server, app.make(self.server, **options), "127.0.0.1", port, is_up)
        self._thread = threading.Thread(target=self._web.run, name="web")
        self._thread.start()
        assert started.wait(STARTED_S)
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self, key: str = KEY) -> tinker.ServiceClient:
        """A session of the official SDK."""
        return tinker.ServiceClient(base_url=self.url, api_key=key)

    def trainer(
        self, rank: int = 8, client: tinker.ServiceClient | None = None, **options
    ) -> tinker.TrainingClient:
        """A new policy of a session of its own, or of ``client``'s."""
        client = client or self.client()
        return client.create_lora_training_client(self.server.name, rank, **options).result()

    def post(self, path: str, told: dict | bytes, key: str = KEY, **headers: str) -> httpx.Response:
        """One raw request, JSON or bytes."""
        body = {"content": told} if isinstance(told, bytes) else {"json": told}
        return httpx.post(
            f"{self.url}/api/v1/{path}", headers={"x-api-key": key} | headers, timeout=60, **body
        )

    def retrieve(self, id: str, key: str = KEY) -> httpx.Response:
        """The answer of a future."""
        return self.post("retrieve_future", {"request_id": id, "allow_metadata_only": False}, key)

    def held(self, trainer: tinker.TrainingClient):
        """A policy's state as it lies in the server, once what was asked of it has run."""
        return self.server.durable.do(
            trainer.model_id, lambda live: live.read_state(trainer.model_id)
        ).result(STARTED_S)

    def put(self, trainer: tinker.TrainingClient, held) -> None:
        """Gives a policy another state, behind the clients' backs."""
        self.server.durable.do(
            trainer.model_id, lambda live: live.replace(trainer.model_id, held)
        ).result(STARTED_S)

    @property
    def is_up(self) -> bool:
        """Whether it has not been closed."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the server; sessions stay."""
        self._web.should_exit = True
        self._thread.join(STARTED_S)
        self._entered.close()


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """``sites(base, folder)`` -> a site, ended with the module."""
    made: list[Site] = []

    def make(
        base: Base, folder: Path | None = None, sizes: Sizes = SIZES, port: int = 0, **options
    ) -> Site:
        made.append(Site(base, folder or tmp_path_factory.mktemp("server"), sizes, port, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield make
        for site in reversed(made):  # each one has the mesh of the one before as its context
            if site.is_up:
                site.close()


@pytest.fixture(scope="module")
def site(sites, tiny_base):
    """Over the tiny llama, which has no tokenizer."""
    return sites(tiny_base())


def datum_of(datum) -> types.Datum:
    """Our datum as the SDK's."""
    inputs = {"target_tokens": np.int64(datum.targets), "weights": datum.weights}
    if datum.advantages is not None:
        inputs |= {"advantages": datum.advantages, "logprobs": datum.old_logp}
    return types.Datum(types.ModelInput.from_ints(datum.tokens.tolist()), inputs)


def adam(c) -> types.AdamParams:
    """Our numbers as the SDK's."""
    return types.AdamParams(
        learning_rate=c.learning_rate,
        beta1=c.b1,
        beta2=c.b2,
        eps=c.eps,
        weight_decay=c.weight_decay,
        grad_clip_norm=c.max_grad_norm,
    )


def logprobs_of(result) -> list[np.ndarray]:
    """Log-probabilities of an answer's data."""
    return [one["logprobs"].to_numpy() for one in result.loss_fn_outputs]
