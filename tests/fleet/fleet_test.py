"""A front over two engines of one process: placement, refusals, streams whose engine dies, Tinker's
clients on both engines, and lists of both.
"""

import asyncio
import contextlib
import functools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tinker
from prometheus_client import CollectorRegistry
from tinker import types

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack
from mint_jax.errors import UserError
from mint_jax.fleet import homes
from mint_jax.fleet.engine import EngineReport
from mint_jax.fleet.front import Front, make
from mint_jax.fleet.view import FleetEngine, FleetView
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import base as base_lib
from mint_jax.service.app import Web
from mint_jax.service.canaries import uniform
from mint_jax.service.checkpoints import Checkpoints
from mint_jax.service.openai import OpenAI
from mint_jax.service.server import Server, Sizes
from mint_jax.service.server_db import FolderBusy
from mint_jax.train.blocks import BlockShape
from tests.service.openai_world import random_adapter
from tests.service.sites import Site
from tests.service.sites import sites as sites

CONFIG = AdapterConfig(4, 8.0, ("q", "v"))
SIZES = Sizes(slots={4: 2}, adapters={4: 2}, shapes=(BlockShape(1, 1, 32),), max_rows=4)
SIZES_S = 60.0
GONE_S = 0.3


class Fleet:
    """Two sites, ``e0`` and ``e1``, and a front in a thread. ``dead`` engines do not report, and
    ``waiting`` ones wait for their folders.
    """

    def __init__(self, sites, folder, base):
        self.catalog = Catalog.open(folder / "catalog")
        self.dead: set[str] = set()
        self.waiting: set[str] = set()
        self.sites: dict[str, Site] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._site, self._base, self._folder = sites, base, folder
        for name in ("e0", "e1"):
            self.start(name)
        self.members = {
            name: FleetEngine(
                name,
                functools.partial(self._ask, name),
                lambda digest: None,
                functools.partial(self._move, name),
            )
            for name in self.sites
        }
        self.view = FleetView([*self.members.values()])
        self.metrics = CollectorRegistry()
        started, self.url = threading.Event(), ""
        self.web: Any = None

        def up(port: int) -> None:
            self.url = f"http://127.0.0.1:{port}"
            started.set()

        async def main() -> None:
            front = Front(self.view, self.catalog, self.metrics)
            self.web = Web(front, make(front, keys=None), "127.0.0.1", 0, up)
            async with self.view.watching():
                moving = asyncio.create_task(homes.keep(self.view, folder / "engines", GONE_S))
                await self.web.serve()
                moving.cancel()

        self._thread = threading.Thread(target=asyncio.run, args=(main(),))
        self._thread.start()
        assert started.wait(SIZES_S)
        while len(self.view.up()) < 2:
            time.sleep(0.01)
        self.api = openai.OpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0)

    def start(self, name: str) -> None:
        """Starts an engine; waits for its folder."""

        def wait() -> None:
            self.waiting.add(name)
            self.dead.discard(name)
            time.sleep(0.05)

        catalog = self._folder / "catalog"
        kind = functools.partial(Server, catalog=catalog, engine=name, on_busy=wait)
        folder = self._folder / "engines" / name
        # each has the mesh of its thread as its context, and they do not end in turn
        self._threads[name] = thread = ThreadPoolExecutor(1)
        made = thread.submit(self._site, self._base, folder, SIZES, kind=kind)
        self.sites[name] = made.result()
        self.waiting.discard(name)

    def end(self, name: str) -> None:
        """Ends an engine's process."""
        self._threads[name].submit(self.sites[name].close).result()

    async def _move(self, name: str, home: str, here: bool) -> None:
        server = self.sites[name].server
        await asyncio.to_thread(server.adopt if here else server.release, home)

    async def _ask(self, name: str) -> EngineReport:
        if name in self.dead:
            raise ConnectionError("dead")
        if name in self.waiting:
            return EngineReport(waits=True)
        site = self.sites[name]
        residency = site.server.residency
        slots = frozenset(d for tier in residency.device.values() for d in tier.resident())
        names = site.server.weights.names
        own = {"slots": slots, "names": names, "homes": (name, *site.server.guests)}
        own["policies"] = len(site.server.live.names())
        return EngineReport(0, site.url, True, True, 4, places=2, **own)

    def kill(self, name: str) -> None:
        """Resets an engine's connections, as the kernel does when its process dies."""
        self.dead.add(name)
        web = self.sites[name]._web
        for one in list(web.server_state.connections):
            web.servers[0].get_loop().call_soon_threadsafe(one.transport.abort)

    def revive(self) -> None:
        self.dead.clear()
        while len(self.view.up()) < 2:
            time.sleep(0.01)

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.get_sample_value(f"mint_fleet_{name}_total", labels) or 0.0

    def close(self) -> None:
        self.web.should_exit = True
        self._thread.join()
        for name in self.sites:
            self.end(name)
        self.catalog.close()


@pytest.fixture(scope="module")
def fleet(sites, tmp_path_factory, mesh):
    base = base_lib.load("tiny-random", mesh)
    one = Fleet(sites, tmp_path_factory.mktemp("fleet"), base)
    yield one
    one.close()


def export(fleet, rng, name: str, step: int) -> str:
    """The digest of a new revision of a policy."""
    base = fleet.sites["e0"].server.base
    packed = pack(random_adapter(rng, base, CONFIG), Schema(base.fingerprint, CONFIG))
    return fleet.catalog.export(name, packed, step=step, create=True).digest


@pytest.fixture
def policy(fleet, rng):
    """A policy with one revision; its name and digest."""
    name = f"p{rng.integers(1 << 40)}"
    return name, export(fleet, rng, name, 1)


@pytest.fixture
def slow(monkeypatch):
    """Streams of all engines wait after each dispatch."""
    arrivals = OpenAI._arrivals

    async def slowly(self, streams, pieces):
        async for arrived in arrivals(self, streams, pieces):
            yield arrived
            await asyncio.sleep(0.02)

    monkeypatch.setattr(OpenAI, "_arrivals", slowly)


def serving(fleet) -> str:
    """The engine that has a request in flight."""
    [name] = [member.name for member in fleet.members.values() if member.in_flight]
    return name


@pytest.mark.parametrize("door", ["completions", "chat", "responses"])
def test_a_stream_whose_engine_dies_goes_on_with_the_same_tokens(fleet, policy, slow, rng, door):
    name, digest = policy
    seed, text = int(rng.integers(1 << 31)), " ".join(map(str, rng.integers(0, 99, 8)))
    asked = {"model": name, "extra_body": {"ignore_eos": True, "seed": seed}}
    if door == "completions":
        call = functools.partial(fleet.api.completions.create, prompt=text, max_tokens=48, n=2)
        asked |= {"logprobs": 0}
    elif door == "chat":
        messages = [{"role": "user", "content": text}]
        call = functools.partial(fleet.api.chat.completions.create, messages=messages)
        asked |= {"max_completion_tokens": 48, "logprobs": True}
    else:
        call = functools.partial(fleet.api.responses.create, input=text)
        asked |= {"max_output_tokens": 48}
    whole = call(**asked)
    before, events, killed = fleet.counted("continued"), [], ""
    counts = {name: site.server.engine.counts for name, site in fleet.sites.items()}
    accepted = {name: one["accepted_prefix"] for name, one in counts.items()}
    for event in call(**asked, stream=True):
        events.append(event)
        if not killed and len(events) >= 4:
            fleet.kill(killed := serving(fleet))
    fleet.revive()
    assert fleet.counted("continued") == before + 1
    other = "e1" if killed == "e0" else "e0"
    assert counts[other]["accepted_prefix"] > accepted[other], "what was sent is drawn at once"
    if door == "responses":
        text_of = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert text_of == whole.output_text
        assert [e.sequence_number for e in events] == [*range(len(events))]
        assert events[-1].response.output_text == whole.output_text
        assert len({e.response.id for e in events if hasattr(e, "response")}) == 1
        return
    assert len({event.id for event in events}) == 1, "one answer"
    for index, choice in enumerate(whole.choices):
        parts = [c for e in events for c in e.choices if c.index == index]
        if door == "completions":
            assert "".join(part.text for part in parts) == choice.text
            drawn = [p for one in parts if one.logprobs for p in one.logprobs.token_logprobs]
            expected = choice.logprobs.token_logprobs
        else:
            assert "".join(p.delta.content or "" for p in parts) == choice.message.content
            assert [p.delta.role for p in parts if p.delta.role] == ["assistant"]
            drawn = [t.logprob for p in parts if p.logprobs for t in p.logprobs.content]
            expected = [one.logprob for one in choice.logprobs.content]
        assert drawn == expected, "every token once, with its own bits"
        assert [p.finish_reason for p in parts if p.finish_reason] == [choice.finish_reason]


@pytest.mark.parametrize("answers", ["stand-in", "own"])
def test_a_stream_goes_on_with_the_revision_that_began_it(fleet, policy, slow, rng, answers):
    """A stand-in's answer though the policy is loaded by then, and the policy's own though the next
    engine has only the stand-in.
    """
    name, digest = policy
    family = f"family{rng.integers(1 << 40)}"
    other = export(fleet, rng, family, 1)
    ask = {"prompt": "count", "max_tokens": 48, "seed": 7, "extra_body": {"ignore_eos": True}}
    for site in fleet.sites.values():
        api = openai.OpenAI(base_url=f"{site.url}/v1", api_key="-", max_retries=0)
        assert api.completions.create(model=family, **ask).mint_revision == other
        if answers == "own":
            assert api.completions.create(model=name, **ask).mint_revision == digest
    began = other if answers == "stand-in" else digest
    whole = fleet.api.completions.create(model=began, **ask).choices[0].text
    fleet.catalog.stand_in(name, family)
    text, killed = "", ""
    with fleet.api.completions.with_streaming_response.create(
        model=name, stream=True, **ask
    ) as raw:
        assert raw.headers["x-mint-revision"] == began
        for number, event in enumerate(raw.parse()):
            text += event.choices[0].text
            if number == 3:
                killed = serving(fleet)
                [left] = {"e0", "e1"} - {killed}
                site = fleet.sites[left]
                api = openai.OpenAI(base_url=f"{site.url}/v1", api_key="-")
                while answers == "own" and not site.server.residency.eta_s(digest):
                    third = f"third{rng.integers(1 << 40)}"  # takes a slot there
                    export(fleet, rng, third, 1)
                    for each in (third, family):
                        api.completions.create(model=each, prompt="a", max_tokens=1)
                fleet.kill(killed)
    fleet.revive()
    fleet.catalog.stand_in(name, None)
    assert killed
    assert text == whole


def test_the_promoted_revision_is_served_by_every_engine_at_once(fleet, policy, rng):
    name, _ = policy
    export(fleet, rng, name, 2)
    for number in (1, 2, 1, 2):
        fleet.catalog.promote(name, number, "serving")
        expected = fleet.catalog.resolve(f"{name}@{number}").digest
        asked = {"model": f"{name}@serving", "prompt": "a", "max_tokens": 1}
        answers = [fleet.api.completions.create(**asked) for _ in range(4)]
        assert {answer.mint_revision for answer in answers} == {expected}


def test_the_engine_that_answers_draws_the_arm_and_gets_the_reward(fleet, policy, rng):
    name, first = policy
    second = export(fleet, rng, name, 2)
    fleet.catalog.promote(name, 1)
    canary = fleet.catalog.open_canary(name, 2, share=0.5, guard="reward>=parent-0.1")
    for _ in range(8):
        asked = {"model": f"{name}@serving", "prompt": "a", "max_tokens": 1}
        answer = fleet.api.completions.create(**asked)
        key = answer.id.removeprefix("cmpl-")
        assert answer.mint_revision == (second if uniform(canary.id, key) < 0.5 else first)
        body = {"id": answer.id, "reward": 0.5}
        assert fleet.api.post("/feedback", body=body, cast_to=object)["state"] == "open"
    assert sum(fleet.catalog.canary(canary.id).evidence.answers) == 8


def test_an_engine_that_refuses_costs_nothing(fleet, policy, monkeypatch):
    """If one engine refuses, the other one serves. If both do, the client gets the shorter wait."""
    name, digest = policy
    servers = {name: site.server for name, site in fleet.sites.items()}
    from mint_jax.residency.loads import QueueFull

    def full(seconds):
        def acquire(*_):
            raise QueueFull("full", seconds)

        return acquire

    ask = functools.partial(fleet.api.completions.create, model=name, prompt="a", max_tokens=1)
    for refusing in servers:
        with monkeypatch.context() as patch:
            patch.setattr(servers[refusing].residency, "acquire", full(0.01))
            for _ in range(4):
                assert ask().mint_revision == digest
    with monkeypatch.context() as patch:
        for seconds, server in zip((30.0, 7.0), servers.values()):
            patch.setattr(server.residency, "acquire", full(seconds))
        with pytest.raises(openai.RateLimitError) as refused:
            ask()
    assert refused.value.response.headers["retry-after"] == "7"
    time.sleep(0.1)
    for member in fleet.members.values():
        member.refused_until = 0.0
    with pytest.raises(openai.NotFoundError):
        fleet.api.completions.create(model="unknown", prompt="a", max_tokens=1)


def test_tinkers_clients_train_on_both_engines_and_load_each_others_checkpoints(fleet, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    clients = [tinker.ServiceClient(base_url=fleet.url, api_key="tml-x") for _ in range(2)]
    made, trained = {}, {}
    tokens = [5, 6, 7, 8, 9]
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(4, np.float32)}
    datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)
    for client in clients:
        trainer = client.create_lora_training_client("tiny-random", 4, seed=1).result()
        step = trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
        step.result()
        engine = trainer.model_id.partition(".")[0]
        made[engine] = trainer
        trained[engine] = trainer.save_state("s").result().path
    assert set(made) == {"e0", "e1"}, "a new session goes to the least loaded engine"
    for engine, client in zip(made, clients):
        other = trained["e1" if engine == "e0" else "e0"]
        loaded = client.create_training_client_from_state(other)
        mine = made[engine].forward([datum], "cross_entropy").result().metrics
        assert loaded.forward([datum], "cross_entropy").result().metrics == mine
        assert loaded.model_id.partition(".")[0] == engine
    paths = [one.save_weights_for_sampler("w").result().path for one in made.values()]
    greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
    prompt = types.ModelInput.from_ints(tokens)
    drawn = [
        client.create_sampling_client(model_path=path).sample(prompt, 1, greedy).result()
        for client in clients
        for path in paths
    ]
    assert len({tuple(one.sequences[0].tokens) for one in drawn}) == 1, "both learned the same"
    rest = clients[0].create_rest_client()
    runs = rest.list_training_runs(limit=100).result().training_runs
    assert {one.training_run_id for one in runs} >= {one.model_id for one in made.values()}
    found = {one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints}
    assert found >= {*trained.values(), *paths}


def test_sessions_move_to_another_engine_and_back(fleet, monkeypatch, policy):
    """Losses, checkpoints and samplers are those of a policy whose engine stays, also of requests
    that were accepted and not run yet when their engine went.
    """
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    tokens = [5, 6, 7, 8, 9]
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(4, np.float32)}
    datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)
    trainers = [
        tinker.ServiceClient(base_url=fleet.url, api_key="tml-x").create_lora_training_client(
            "tiny-random", 4, seed=1
        )
        for _ in range(2)
    ]
    trainers = {one.model_id.partition(".")[0]: one for one in [t.result() for t in trainers]}
    assert set(trainers) == {"e0", "e1"}

    def steps(name: str, count: int, between=lambda: None) -> list[float]:
        asked = []
        for _ in range(count):
            asked.append(trainers[name].forward_backward([datum], "cross_entropy"))
            trainers[name].optim_step(types.AdamParams(learning_rate=0.01))
        between()
        return [one.result().metrics["loss:sum"] for one in asked]

    sweep, failures = Checkpoints.sweep, [OSError("the disk hangs")]

    def sweep_later(self) -> None:  # the first attempt to adopt fails, and leaves the folder free
        if failures:
            raise failures.pop()
        sweep(self)

    def leave() -> None:
        monkeypatch.setattr(Checkpoints, "sweep", sweep_later)
        fleet.kill("e0")
        fleet.end("e0")

    undisturbed = steps("e1", 9)
    losses = steps("e0", 3)
    path = trainers["e0"].save_state("s").result().path
    sampler = trainers["e0"].save_weights_and_get_sampling_client()
    greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
    prompt = types.ModelInput.from_ints(tokens)
    drawn = sampler.sample(prompt, 1, greedy).result().sequences[0].tokens
    losses += steps("e0", 3, leave)
    assert losses == undisturbed[:6], "served by the other engine"
    assert not failures
    guests = fleet.sites["e1"].server.guests
    assert set(guests) == {"e0"}
    assert sampler.sample(prompt, 1, greedy).result().sequences[0].tokens == drawn
    assert trainers["e0"].load_state(path).result().path == path
    assert steps("e0", 3) != undisturbed[3:6], "moments are not loaded"
    trainers["e0"].load_state_with_optimizer(path).result()
    assert steps("e0", 3) == undisturbed[3:6]
    rest = tinker.ServiceClient(base_url=fleet.url, api_key="tml-x").create_rest_client()
    assert path in {c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints}
    runs = {run.training_run_id for run in rest.list_training_runs().result().training_runs}
    assert runs >= {one.model_id for one in trainers.values()}

    assert steps("e0", 3, functools.partial(fleet.start, "e0")) == undisturbed[6:9]
    assert fleet.sites["e1"].server.guests == {}, "its folder was given back"
    assert trainers["e0"].model_id in fleet.sites["e0"].server.live.names()
    assert {one.partition(".")[0] for one in fleet.sites["e1"].server.live.names()} == {"e1"}
    fleet.revive()
    assert sampler.sample(prompt, 1, greedy).result().sequences[0].tokens == drawn


def test_an_engine_that_lives_keeps_its_sessions_though_it_does_not_report(fleet):
    fleet.dead.add("e0")
    time.sleep(GONE_S + 2 * homes.PERIOD_S)
    with pytest.raises(FolderBusy):
        fleet.sites["e1"].server.adopt("e0")
    assert fleet.sites["e1"].server.guests == {}
    with pytest.raises(UserError, match="engine is 'e7'; expected one with a folder"):
        fleet.sites["e1"].server.adopt("e7")
    fleet.revive()


def test_a_request_for_sessions_that_are_not_there_is_misdirected(fleet):
    site = fleet.sites["e1"]
    answer = site.post("create_session", {"tags": [], "sdk_version": "0"}, **{"x-mint-home": "e0"})
    assert answer.status_code == 421
    assert "'e0' is not served here" in answer.json()["detail"]


def test_operators_see_all_engines(fleet):
    state = httpx.get(f"{fleet.url}/debug/state").json()["engines"]
    assert {name: one["up"] for name, one in state.items()} == {"e0": True, "e1": True}
    assert all(one["state"]["base"] == "tiny-random" for one in state.values())
    assert "mint_fleet_offers_total" in httpx.get(f"{fleet.url}/metrics").text
    assert httpx.get(f"{fleet.url}/ready").status_code == 200
    assert "costs" in httpx.get(f"{fleet.url}/admin/costs").json()
    assert httpx.get(f"{fleet.url}/v1/models").json()["data"]


PIN = {"revision": "base", "id": "mine", "seed": 1, "at": 1}


@pytest.mark.parametrize(
    ("pin", "why"),
    [
        ({}, "Field required"),
        (PIN | {"revision": "x"}, "pattern"),
        (PIN | {"id": "A/b"}, "pattern"),
        (PIN | {"seed": 1 << 32}, "less than"),
        (PIN | {"sent": {"0": ["x"]}}, "integer"),
        (PIN | {"sent": {"0": [1 << 20]}}, "prefixes is"),
        (PIN | {"more": 1}, "nexpected"),
        (None, "expected the number of bytes"),
    ],
)
def test_a_malformed_pin_is_refused(fleet, pin, why):
    """A client may pin an answer itself; nonsense is refused by the engine."""
    site = fleet.sites["e0"]
    body = json.dumps({"model": "tiny-random", "prompt": "a", "max_tokens": 1}).encode()
    text = b"" if pin is None else json.dumps(pin).encode()
    headers = {"x-mint-pin": "x" if pin is None else str(len(text))}
    answer = httpx.post(f"{site.url}/v1/completions", content=text + body, headers=headers)
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


def test_the_front_drops_a_clients_pin(fleet):
    """The answer's name is the front's, and its stream has none of the engines' comments."""
    body = {"model": "tiny-random", "prompt": "a", "max_tokens": 4, "stream": True}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers={"x-mint-pin": "2"})
    answer.raise_for_status()
    assert ": sent" not in answer.text
    assert "data: " in answer.text


def test_a_client_that_leaves_cancels_its_samples(fleet, policy, slow):
    name, _ = policy
    body = {"model": name, "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    url = f"{fleet.url}/v1/completions"
    with contextlib.suppress(httpx.ReadError), httpx.stream("POST", url, json=body) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + 30
    engines = [site.server.engine for site in fleet.sites.values()]
    counts = [lambda one=one: sum(one.in_flight().values()) for one in engines]
    counts += [lambda one=one: one.in_flight for one in fleet.members.values()]
    while any(count() for count in counts) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [count() for count in counts] == [0] * 4
