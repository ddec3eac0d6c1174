"""A server of OpenAI's API over the random base, with a catalog of two tenants, for tests."""

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest
import uvicorn
from starlette.applications import Starlette

from mint_jax import params as params_lib
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack, unpack
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import base as base_lib
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.residency.admission import Admission
from mint_jax.residency.residency import Residency
from mint_jax.residency.slots import DeviceSlots
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request
from mint_jax.rollout.stream import Piece, Stream
from mint_jax.service import endpoints
from mint_jax.service.adapter_uris import AdapterUris
from mint_jax.service.canaries import Canaries
from mint_jax.service.errors import HANDLERS
from mint_jax.service.openai import OpenAI
from mint_jax.service.openai_answers import Answer
from mint_jax.service.server_db import ServerDatabase
from mint_jax.service.weights import Model, Weights

CONFIG = AdapterConfig(2, 4.0, ("q", "v"))


def random_adapter(rng: np.random.Generator, base: Base, config: AdapterConfig = CONFIG) -> Any:
    specs = lora_tree.adapter_specs(transformer.abstract(base.cfg), config)
    return params_lib.map_with_path(lambda _, s: rng.normal(size=s.shape).astype(np.float32), specs)


def export(catalog: Catalog, rng: np.random.Generator, base: Base, policy: str, step: int) -> str:
    """One more revision of a policy; its digest."""
    return catalog.export(
        policy, pack(random_adapter(rng, base), Schema(base.fingerprint, CONFIG)), step=step
    ).digest


@dataclasses.dataclass
class World:
    """``chat`` of the default tenant has two revisions, the first is ``serving``; ``a`` and ``b``
    have a policy each.
    """

    base: Base
    catalog: Catalog
    weights: Weights
    residency: Residency
    engine: Engine
    canaries: Canaries
    digests: dict[str, str]
    rng: np.random.Generator
    url: str = ""
    api: Any = None
    routes: Any = None  # it does not route

    def submit(self, request: Request) -> Stream:
        return self.engine.submit(request)

    def at_once(self, model: Model, tenant: str) -> Model:
        return model

    def sampled(self, prompt: Any, revision: str | None = None, **settings: Any) -> list:
        """What the engine itself answers; a text is encoded as completions do."""
        tokenizer = self.base.need_tokenizer()
        tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        settings = {"stop_ids": tokenizer.eos_ids, "max_tokens": 16} | settings
        return self.engine.generate([Request(tuple(tokens), revision=revision, **settings)])[0]


@contextlib.contextmanager
def opened(mesh: Any, folder: Path) -> Iterator[World]:
    """The world without a server, its engine idle."""
    rng = np.random.default_rng([int(os.environ["MINT_TEST_SEED"]), 7])
    base = base_lib.load("tiny-random", mesh)
    (folder / "peft").mkdir()
    with Catalog.open(folder / "catalog") as catalog:
        digests = {}
        for policy, count in (("chat", 2), ("a/mine", 1), ("b/secret", 1)):
            catalog.create_policy(policy, Schema(base.fingerprint, CONFIG))
            digests |= {
                f"{policy}@{n}": export(catalog, rng, base, policy, n) for n in range(1, count + 1)
            }
        catalog.promote("chat", 1, "serving")

        def sampler(tenant: str, path: str) -> str:
            return catalog.resolve(f"{tenant}/{path.rsplit('/', 1)[1]}", tenant).digest

        uris, also = AdapterUris((f"file:{folder}/peft",)), ("Base/Name",)
        weights = Weights(base, catalog, sampler, also=also, folder=folder / "peft", uris=uris)
        specs = transformer.abstract(base.cfg)
        slots = DeviceSlots(specs, {2: 3}, ("q", "v"))
        admission = Admission(base.fingerprint, specs, {b: slots.targets(b) for b in slots.stacks})
        residency = Residency(weights.fetch, unpack, admission, slots, 1 << 28)
        # a row costs most, 49,152 tokens
        engine = Engine(base, base.need_tokenizer().decode, rows=(2,), steps=3)
        with ServerDatabase(folder / "server.db") as database:
            canaries = Canaries(database, catalog, time.time)
            try:
                yield World(base, catalog, weights, residency, engine, canaries, digests, rng)
            finally:
                residency.close()


@contextlib.contextmanager
def served(world: World) -> Iterator[World]:
    """The world behind a port of this machine."""
    world.api = api = OpenAI(cast(Any, world))
    inner = Starlette(
        routes=endpoints.routes(endpoints.openai_endpoints(), api), exception_handlers=HANDLERS
    )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        tenant = dict(scope["headers"]).get(b"x-tenant", b"default").decode()
        await inner({**scope, "state": {"tenant": tenant}}, receive, send)

    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    )
    thread = threading.Thread(target=server.run)
    with world.engine.serving(residency=world.residency):
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.005)
            world.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            yield world
        finally:
            server.should_exit = True
            thread.join()


def whole_and_streamed(spec: Any, texts: Any, done: Completion) -> tuple[dict, list[dict]]:
    """Returns the choice of an answer, and the choices of its chunks, a token at a time."""
    whole, stream = (Answer(spec, Model("m"), texts) for _ in range(2))
    chunks = []
    for token, logprob in zip(done.tokens, done.logprobs, strict=True):
        chunks += stream.chunks([(0, Piece(0, [token], [logprob]))])
    chunks += stream.last_chunks(0, [done])
    return whole.whole([[done]])["choices"][0], [chunk["choices"][0] for chunk in chunks]


def joined(chunks: Any) -> list[SimpleNamespace]:
    """Returns a stream's choices, each with all of its text and log-probabilities.

    ``early`` counts the tokens with alternatives before a choice's last chunk.
    """
    out: dict[int, SimpleNamespace] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            new = SimpleNamespace(text="", early=0, finish=None, logprobs=[], top=[], offsets=[])
            one = out.setdefault(choice.index, new)
            assert one.finish is None, "a chunk came after the choice's last one"
            delta, scores = getattr(choice, "delta", None), choice.logprobs
            one.text += choice.text if delta is None else delta.content or ""
            if scores and delta is None:
                one.logprobs += scores.token_logprobs
                one.offsets += scores.text_offset
                one.top += scores.top_logprobs or []
            elif scores:
                one.logprobs += [entry.logprob for entry in scores.content]
                one.top += [entry.top_logprobs for entry in scores.content]
            one.early = one.early if choice.finish_reason else len(one.top)
            one.finish, one.revision = choice.finish_reason, getattr(chunk, "mint_revision", None)
    return [out[index] for index in sorted(out)]


@pytest.fixture(scope="module")
def world(mesh: Any, tmp_path_factory: Any) -> Iterator[World]:
    with opened(mesh, tmp_path_factory.mktemp("world")) as one, served(one):
        yield one


@pytest.fixture(scope="module")
def client(world: World) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=world.url + "/v1", api_key="none", max_retries=0) as one:
        yield one


def wrong_fields(world: World, path: str, good: dict, bad: Any) -> list[Any]:
    """Posts bodies with one wrong field each; returns those whose answer does not name the field.

    Args:
        bad: pairs of the start of ``param`` and the change of the body.
    """
    unnamed = []
    with httpx.Client(base_url=world.url + "/v1/", timeout=60) as raw:
        for field, change in bad:
            found = raw.post(path, content=json.dumps({"model": "chat", **good, **change}))
            error = found.json()["error"]
            named = (error["param"] or "").startswith(field) or "not JSON" in error["message"]
            if (found.status_code, error["type"], named) != (400, "invalid_request_error", True):
                unnamed.append((change, found.status_code, error))
    assert not world.engine.active.jobs
    return unnamed
