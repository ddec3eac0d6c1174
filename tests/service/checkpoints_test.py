"""Checkpoints: what a client samples from is the policy of that moment, for good; what is loaded is what was saved; names and bytes end
when they should."""

import dataclasses
import threading

import numpy as np
import pytest

from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.service import checkpoints
from mint_jax.service.book import NotFound
from mint_jax.service.calls import Create, ForwardBackward, Load, Optim, Save
from mint_jax.service.server import Server, Sizes
from mint_jax.train.state import OptimizerConfig
from tests.train.live_test import SHAPES, coefs, random_data, random_state

SIZES = Sizes(slots={2: 1, 8: 1}, adapters={2: 1, 8: 1}, shapes=SHAPES, max_rows=8, host_bytes=1 << 26)
WAIT_S = 120.0


class Client:
    """One tenant's session, in process."""

    def __init__(self, server: Server, tenant: str = "default"):
        self.server, self.tenant = server, tenant
        self.session = server.book.open_session(tenant, {})
        self._sent: dict[str, int] = {}

    def model(self, *first) -> str:
        made = self.server.book.add_model(self.session, len(self._sent), self.tenant, {}).id
        self._sent[made] = 0
        self.ask(made, *first)
        return made

    def send(self, model, call) -> str:
        self._sent[model] += 1
        return self.server.durable.submit(model, self._sent[model], call)

    def ask(self, model, *calls):
        """The last call's result."""
        ids = [self.send(model, call) for call in calls]
        return [self.server.durable.result(id, WAIT_S) for id in ids][-1]

    def sampler(self, model, number) -> str:
        told = self.ask(model, Save("sampler_weights", None, f"{self.session}:sample:{number}"))
        return self.server.book.sampler(self.tenant, told["sampling_session_id"]).digest

    def held(self, model):
        return self.server.loop.training.do(model, lambda live: live.held(model)).result(WAIT_S)

    def put(self, model, state):
        self.server.loop.training.do(model, lambda live: live.replace(model, state)).result(WAIT_S)


@pytest.fixture(scope="module")
def server(tiny_base, tmp_path_factory):
    with Server(tiny_base("llama"), tmp_path_factory.mktemp("server"), SIZES).running() as made:
        yield made


def update(rng, rate=0.05):
    return ForwardBackward(random_data(rng, "cross_entropy"), coefs("cross_entropy")), Optim(OptimizerConfig(rate))


def sampled(server, digest, prompt):
    [answer] = server.engine.submit(Request(prompt, revision=digest, temperature=0.0, max_tokens=6, stop_ids=())).result(WAIT_S)
    assert answer.revision == digest
    return answer.tokens, answer.logprobs


@pytest.mark.long
@pytest.mark.bits
def test_an_old_snapshot_is_sampled_while_its_policy_trains(rng, server):
    """Of each of three versions of two policies: greedy tokens and log-probabilities are those of exactly these weights, asked again
    after all updates and with one slot between them."""
    client, prompt, taken, kept = Client(server), tuple(rng.integers(3, 97, 9).tolist()), [], []
    configs = [AdapterConfig(2, 4.0, ("q", "down")), AdapterConfig(5, 9.0, ("v", "unembed"))]
    models = [client.model(Create(config)) for config in configs]
    for model, config in zip(models, configs):
        client.put(model, random_state(rng, server.base, config))
    for number in range(3):
        for model in models:
            digest = client.sampler(model, 10 * number + models.index(model))
            kept.append(client.held(model))
            taken.append((digest, sampled(server, digest, prompt)))
            client.ask(model, *update(rng))
    again = [sampled(server, digest, prompt) for digest, _ in taken]
    assert len({digest for digest, _ in taken}) == 6
    engine = Engine(server.base, rows=(8,))
    adapters = {str(i): (held.config, held.adapter()) for i, held in enumerate(kept)}
    stacks, slots = lora_tree.stack_adapters(transformer.abstract(server.base.cfg), adapters)
    for i, (_, (tokens, logprobs)) in enumerate(taken):
        [[direct]] = engine.generate([Request(prompt, slots[str(i)], temperature=0.0, max_tokens=6, stop_ids=())], stacks)
        assert (tokens, logprobs) == again[i], "the same bits after all updates"
        assert tokens == direct.tokens
        np.testing.assert_allclose(logprobs, direct.logprobs, atol=1e-5)  # stacks of other sizes: another program
    assert len({tuple(logprobs) for _, (_, logprobs) in taken}) == 6, "versions differ, else this says nothing"


def test_what_is_to_be_sampled_at_once_is_not_read_back_from_the_disk(rng, server, monkeypatch):
    """Its bytes go to the device from memory; after a restart, and for a checkpoint with a name, they come from the catalog."""
    client, prompt, read = Client(server), tuple(rng.integers(3, 97, 5).tolist()), []
    load = server.catalog.load
    monkeypatch.setattr(server.catalog, "load", lambda digest, *args: read.append(digest) or load(digest, *args))
    config = AdapterConfig(2, 4.0, ("q", "v"))
    model = client.model(Create(config))
    client.put(model, random_state(rng, server.base, config))
    digest = client.sampler(model, 0)
    drawn = sampled(server, digest, prompt)
    assert read == []
    server.residency.drop(digest)
    assert sampled(server, digest, prompt) == drawn
    assert read == [digest]


@pytest.mark.long
def test_what_is_loaded_is_what_was_saved(rng, server):
    """With its moments or without, into a new policy or in place of a living one's; pending gradients are no part of it."""
    client = Client(server)
    model = client.model(Create(AdapterConfig(3, 6.0, ("q", "o")), seed=5))
    client.ask(model, *update(rng))
    saved = client.held(model)
    client.send(model, update(rng)[0])  # pending
    path = client.ask(model, Save("weights", "one", metadata={"why": "test"}))["path"]
    client.ask(model, *update(rng))
    whole, bare = (client.model(Load(path, optimizer, client.tenant)) for optimizer in (True, False))
    client.ask(model, Load(path, True, client.tenant))
    for name, expected in ((whole, saved), (model, saved), (bare, saved.fresh())):
        found = client.held(name)
        assert (found.count, found.steps, found.config) == (expected.count, expected.steps, expected.config)
        assert found.parts.keys() == expected.parts.keys()
        for part, leaves in expected.parts.items():
            for key, leaf in leaves.items():
                np.testing.assert_array_equal(found.parts[part][key], leaf)
    row = server.book.checkpoint(client.tenant, model, "weights", "one")
    assert row.path == path
    assert row.told["metadata"] == {"why": "test"}


@pytest.mark.long
def test_weights_without_a_name_end_a_while_after_their_session(rng, server, monkeypatch):
    """But for what has a name too, what another session samples, and the last revision of a policy."""
    client, other = Client(server), Client(server)
    model = client.model(Create(AdapterConfig(2, 4.0, ("q",))))
    digests = []
    for number in range(4):
        client.ask(model, *update(rng))
        digests.append(client.sampler(model, number))
    path = client.ask(model, Save("sampler_weights", "named"))["path"]
    assert server.checkpoints.digest("default", path) == digests[3]
    server.book.add_sampler(other.session, 0, "default", None, digests[0])
    beside = other.model(Create(AdapterConfig(2, 4.0, ("q",))))
    other.ask(beside, *update(rng))
    other.sampler(beside, 1)
    server.end_session(client.session)
    assert server.checkpoints.expire() == 0
    now = server.book.clock()
    monkeypatch.setattr(server.book, "clock", lambda: now + checkpoints.SNAPSHOTS_S + 1)
    assert server.checkpoints.expire() == 4
    with pytest.raises(NotFound):
        server.book.sampler("default", f"{client.session}:sample:1")
    for digest in digests[1:3]:
        with pytest.raises(UserError):
            server.checkpoints.fetch(digest)
    for digest in (digests[0], digests[3]):
        server.checkpoints.fetch(digest)
    assert server.checkpoints.expire() == 0
    server.end_session(other.session)
    monkeypatch.setattr(server.book, "clock", lambda: now + 2 * checkpoints.SNAPSHOTS_S + 10)
    assert server.checkpoints.expire() == 2
    with pytest.raises(UserError):
        server.checkpoints.fetch(digests[0])
    server.checkpoints.fetch(server.catalog.resolve(f"default/{beside}@latest").digest)


def test_names_are_taken_once_and_bytes_go_with_the_last_name(rng, server):
    client, before = Client(server), {file.stem for file in server.checkpoints.folder.glob("*.safetensors")}
    model = client.model(Create(AdapterConfig(2, 4.0, ("q",))))
    path = client.ask(model, Save("weights", "a"))["path"]
    with pytest.raises(UserError, match="exists already"):
        client.ask(model, Save("weights", "a"))
    first = server.book.checkpoint("default", model, "weights", "a")
    client.ask(model, *update(rng))
    client.ask(model, Save("weights", "a", overwrite=True))
    second = server.book.checkpoint("default", model, "weights", "a")

    def files():
        return {file.stem for file in server.checkpoints.folder.glob("*.safetensors")} - before

    assert first.digest != second.digest
    assert files() == {second.digest}, "what was overwritten is gone"
    copy = server.copy("default", path, client.session, 7, None)
    server.checkpoints.remove(second)
    assert files() == {second.digest}, "the copy has it still"
    with pytest.raises(UserError, match="there is no checkpoint"):
        client.ask(model, Load(path, True, "default"))
    client.ask(model, Load(copy, True, "default"))
    server.checkpoints.remove(server.book.checkpoint("default", *checkpoints.parse(copy)))
    assert files() == set()


def test_a_time_to_live_ends_a_checkpoint_and_a_sampled_one_with_it(rng, server, monkeypatch):
    client = Client(server)
    model = client.model(Create(AdapterConfig(2, 4.0, ("q",))))
    path = client.ask(model, Save("sampler_weights", "a", ttl_s=3600))["path"]
    digest = server.checkpoints.digest("default", path)
    client.ask(model, *update(rng))
    later = server.checkpoints.digest("default", client.ask(model, Save("sampler_weights", "b"))["path"])
    assert server.checkpoints.expire() == 0
    monkeypatch.setattr(server.book, "clock", lambda now=server.book.clock() + 3601: now)
    with pytest.raises(NotFound):
        server.checkpoints.digest("default", path)
    assert server.checkpoints.expire() == 1
    with pytest.raises(UserError):
        server.checkpoints.fetch(digest)
    server.checkpoints.fetch(later)


def test_others_see_what_is_published_and_nothing_else(rng, server):
    client, other = Client(server), Client(server, "other")
    model = client.model(Create(AdapterConfig(2, 4.0, ("q",))))
    path = client.ask(model, Save("weights", "a"))["path"]
    sampler = client.ask(model, Save("sampler_weights", "a"))["path"]
    mine = other.model(Create(AdapterConfig(2, 4.0, ("q",))))
    for _ in range(2):
        with pytest.raises(UserError, match="there is no checkpoint"):
            other.ask(mine, Load(path, True, "other"))
        with pytest.raises(NotFound):
            server.checkpoints.digest("other", sampler)
        with pytest.raises(NotFound):
            server.book.model("other", model)
    for kind in ("weights", "sampler_weights"):
        server.book.change_checkpoint(server.book.checkpoint("default", model, kind, "a"), public=True)
    other.ask(mine, Load(path, True, "other"))
    assert server.checkpoints.digest("other", sampler)
    with pytest.raises(UserError, match="are weights to sample from"):
        other.ask(mine, Load(sampler, True, "other"))
    with pytest.raises(UserError, match="cannot be sampled"):
        server.checkpoints.digest("other", path)


@pytest.mark.parametrize("what", ["damaged", "gone", "another base"])
def test_what_cannot_be_loaded_is_told_and_the_policy_goes_on(rng, server, what, monkeypatch):
    client = Client(server)
    model = client.model(Create(AdapterConfig(2, 4.0, ("q",))))
    path = client.ask(model, Save("weights", "a"))["path"]
    row = server.book.checkpoint("default", model, "weights", "a")
    file = server.checkpoints.folder / f"{row.digest}.safetensors"
    if what == "damaged":
        data = bytearray(file.read_bytes())
        data[-7] ^= 4
        file.write_bytes(data)
    elif what == "gone":
        file.unlink()
    else:
        monkeypatch.setattr(server.checkpoints, "base", dataclasses.replace(server.base, fingerprint="f" * 64))
    expected = {"damaged": "is damaged", "gone": "No such file", "another base": "is of base"}[what]
    with pytest.raises((UserError, RuntimeError), match=expected):
        client.ask(model, Load(path, True, "default"))
    assert client.ask(model, *update(rng))["skipped"] == 0


def test_a_store_that_fails_is_one_request_s_failure(rng, server, monkeypatch):
    client = Client(server)
    model = client.model(Create(AdapterConfig(2, 4.0, ("q",))))
    path = client.ask(model, Save("weights", "a"))["path"]

    def busy(*_):
        raise RuntimeError("database is locked")

    for name, call in (("save", Save("weights", "b")), ("load", Load(path, True, "default"))):
        with monkeypatch.context() as patch:
            patch.setattr(server.checkpoints, name, busy)
            with pytest.raises(RuntimeError, match="cannot be reached: database is locked"):
                client.ask(model, call)
    assert server.durable.failed is None
    client.ask(model, Save("weights", "b"))
    assert client.ask(model, *update(rng))["skipped"] == 0


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "a?b", "a#b", "a\\b", 7, None, "x" * 300, "a\nb"])
def test_names_that_are_no_segment_are_refused(name):
    with pytest.raises(UserError):
        checkpoints.check_name(name)


@pytest.mark.parametrize(
    "path", ["", "a", "tinker://a/weights", "tinker://a/b/c", "tinker:///weights/a", "http://a/weights/b", "tinker://a/weights/"]
)
def test_paths_that_are_none_are_refused(path):
    with pytest.raises(UserError, match="expected tinker://"):
        checkpoints.parse(path)


@pytest.mark.parametrize("seconds", [0, 3599, -1, 10**12, 3600.5, "3600", True])
def test_times_to_live_out_of_range_are_refused(seconds):
    with pytest.raises(UserError, match="ttl_seconds"):
        checkpoints.check_ttl(seconds)


def test_saves_of_many_policies_at_once_are_each_their_own(rng, server):
    client = Client(server)
    models = [client.model(Create(AdapterConfig(2, 4.0, ("q",)), seed=i)) for i in range(5)]
    paths = {}

    def save(model):
        paths[model] = client.ask(model, Save("sampler_weights", "a"))["path"]

    threads = [threading.Thread(target=save, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == {model: f"tinker://{model}/sampler_weights/a" for model in models}
    assert len({server.checkpoints.digest("default", path) for path in paths.values()}) == 5
