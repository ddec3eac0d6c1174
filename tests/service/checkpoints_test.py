"""Checkpoints: what a client samples from is the policy of that moment, for good; what is loaded is
what was saved; names and bytes end when they should.
"""

import contextlib
import dataclasses
import random
import threading

import numpy as np
import pytest

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.service import checkpoints
from mint_jax.service.book import Book, NotFound
from mint_jax.service.checkpoints import Checkpoints
from mint_jax.service.server import Server, Sizes
from mint_jax.service.server_db import ServerDatabase
from mint_jax.service.training_calls import Create, ForwardBackward, Load, Optim, Save
from mint_jax.train import host_state as held_lib
from mint_jax.train.state import OptimizerConfig
from tests.service.conftest import result_of
from tests.train.live_test import SHAPES, coefs, random_data, random_state

SIZES = Sizes(
    slots={2: 1, 8: 1}, adapters={2: 1, 8: 1}, shapes=SHAPES, max_rows=8, host_bytes=1 << 26
)
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
        return self.server.durable.submit(model, self._sent[model], call).result()

    def ask(self, model, *calls):
        """The last call's result."""
        ids = [self.send(model, call) for call in calls]
        return [result_of(self.server.durable, id, WAIT_S) for id in ids][-1]

    def sampler(self, model, number) -> str:
        told = self.ask(model, Save("sampler_weights", None, f"{self.session}:sample:{number}"))
        return self.server.book.sampler(self.tenant, told["sampling_session_id"]).digest

    def held(self, model):
        return self.server.durable.do(model, lambda live: live.read_state(model)).result(WAIT_S)

    def put(self, model, state):
        self.server.durable.do(model, lambda live: live.replace(model, state)).result(WAIT_S)


@pytest.fixture(scope="module")
def server(tiny_base, tmp_path_factory):
    with Server(tiny_base("llama"), tmp_path_factory.mktemp("server"), SIZES).running() as made:
        yield made


def update(rng):
    data = random_data(rng, "cross_entropy")
    return ForwardBackward(data, coefs("cross_entropy")), Optim(OptimizerConfig(0.05))


def sampled(server, digest, prompt):
    request = Request(prompt, revision=digest, temperature=0.0, max_tokens=6, stop_ids=())
    [answer] = server.engine.submit(request).result(WAIT_S)
    assert answer.revision == digest
    return answer.tokens, answer.logprobs


@pytest.mark.long
@pytest.mark.bits
def test_an_old_snapshot_is_sampled_while_its_policy_trains(rng, server):
    """Of each of three versions of two policies: greedy tokens and log-probabilities are those of
    exactly these weights, asked again after all updates and with one slot between them.
    """
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
        request = Request(prompt, slots[str(i)], temperature=0.0, max_tokens=6, stop_ids=())
        [[direct]] = engine.generate([request], stacks)
        assert (tokens, logprobs) == again[i], "the same bits after all updates"
        assert tokens == direct.tokens
        # stacks of other sizes: another program
        np.testing.assert_allclose(logprobs, direct.logprobs, atol=1e-5)
    assert len({tuple(logprobs) for _, (_, logprobs) in taken}) == 6, (
        "versions differ, else this says nothing"
    )


@pytest.mark.long
def test_weights_without_a_name_end_a_while_after_their_session(rng, server, monkeypatch):
    """Except those with a name too, those that another session samples, and a policy's last."""
    client, other = Client(server), Client(server)
    model = client.model(Create(AdapterConfig(2, 4.0, ("q",))))
    digests = []
    for number in range(4):
        client.ask(model, *update(rng))
        digests.append(client.sampler(model, number))
    client.ask(model, Save("sampler_weights", "named"))
    server.book.add_sampler(other.session, 0, "default", None, digests[0])
    server.end_session(client.session)
    assert server.checkpoints.expire() == 0
    now = server.book.clock()
    monkeypatch.setattr(server.book, "clock", lambda: now + checkpoints.SNAPSHOTS_S + 1)
    assert server.checkpoints.expire() == 4
    with pytest.raises(NotFound):
        server.book.sampler("default", f"{client.session}:sample:1")
    for digest in digests[1:3]:
        with pytest.raises(UserError):
            server.catalog.load(digest)
    for digest in (digests[0], digests[3]):
        server.catalog.load(digest)
    server.end_session(other.session)
    monkeypatch.setattr(server.book, "clock", lambda: now + 2 * checkpoints.SNAPSHOTS_S + 10)
    assert server.checkpoints.expire() == 1
    with pytest.raises(UserError):
        server.catalog.load(digests[0])
    server.checkpoints.remove(server.book.checkpoint("default", model, "sampler_weights", "named"))
    server.catalog.load(digests[3])


@pytest.mark.parametrize("wrong", ["is damaged", "is of base"])
def test_a_load_that_fails_says_why_and_the_policy_continues(rng, server, wrong, monkeypatch):
    client = Client(server)
    model = client.model(Create(AdapterConfig(2, 4.0, ("q",))))
    path = client.ask(model, Save("weights", "a"))["path"]
    row = server.book.checkpoint("default", model, "weights", "a")
    file = server.checkpoints.folder / f"{row.digest}.safetensors"
    if wrong == "is damaged":
        data = bytearray(file.read_bytes())
        data[-7] ^= 4
        file.write_bytes(data)
    else:
        changed = dataclasses.replace(server.base, fingerprint="f" * 64)
        monkeypatch.setattr(server.checkpoints, "base", changed)
    with pytest.raises((UserError, RuntimeError), match=wrong):
        client.ask(model, Load(path, True, "default"))
    assert client.ask(model, *update(rng))["skipped"] == 0


class Shelf:
    """Checkpoints without a server: states of one small adapter are saved by hand."""

    KINDS = ("weights", "sampler_weights", "external_weights")

    def __init__(self, base, folder):
        self.book = Book(ServerDatabase(folder / "server.db"))
        self.catalog = Catalog.open(folder / "catalog")
        self.checkpoints = Checkpoints(folder / "checkpoints", self.book, self.catalog, base)
        self.session = self.book.open_session("default", {})
        self.model = self.book.add_model(self.session, 0, "default", {}).id
        specs, config = transformer.abstract(base.cfg), AdapterConfig(1, 2.0, ("q",))
        self.states = [held_lib.fresh(specs, config, seed) for seed in range(3)]
        self._requests = iter(range(1 << 30))

    def save(self, kind, name, state=0, **options):
        call, request = Save(kind, name, **options), f"request {next(self._requests)}"
        return self.checkpoints.save(self.model, request, call, self.states[state])

    def row(self, kind, name, model=None):
        return self.book.checkpoint("default", model or self.model, kind, name)

    def load_state(self, path):
        kept = self.checkpoints.folder.parent / f"kept{next(self._requests)}"
        return self.checkpoints.load(Load(path, True, "default"), kept)

    def load(self, row):
        """Reads what a row names, as whoever uses it does."""
        if row.kind == "weights":
            self.load_state(row.path)
        elif row.kind == "sampler_weights":
            self.catalog.load(row.digest)
        else:
            assert any((self.checkpoints.folder / "external" / row.digest).iterdir())

    def close(self):
        self.book.database.close()
        self.catalog.close()


@pytest.fixture
def shelf(tiny_base, tmp_path):
    with contextlib.closing(Shelf(tiny_base("llama"), tmp_path)) as made:
        yield made


def beside(call, wait_s=0.3):
    """Starts a call in a thread and gives it time; it may have to wait for a lock that is held
    here.
    """
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(wait_s)
    return thread


@pytest.mark.parametrize("kind", Shelf.KINDS)
def test_bytes_that_are_being_saved_outlive_the_removal_of_their_last_name(
    shelf, monkeypatch, kind
):
    """x has the same bytes as y, and goes when those of y are written and its row is not."""
    shelf.save(kind, "x")
    shelf.save(kind, "z", 1)
    add, threads = shelf.book.add_checkpoint, []

    def add_late(row):
        monkeypatch.undo()
        threads.append(beside(lambda: shelf.checkpoints.remove(shelf.row(kind, "x")), 30))
        assert not threads[0].is_alive(), "a removal does not wait for a save"
        add(row)

    monkeypatch.setattr(shelf.book, "add_checkpoint", add_late)
    shelf.save(kind, "y")
    assert len(threads) == 1
    shelf.load(shelf.row(kind, "y"))
    with pytest.raises(NotFound):
        shelf.row(kind, "x")


@pytest.mark.parametrize("at", ["aliases", "retire"])
def test_a_sampler_checkpoint_is_deleted_while_its_policy_saves(shelf, monkeypatch, at):
    """During the removal the same weights are saved under another name, which stays."""
    shelf.save("sampler_weights", "x")
    shelf.save("sampler_weights", "z", 1)
    whole, threads = getattr(shelf.catalog, at), []

    def during(*args, **named):
        monkeypatch.undo()
        threads.append(beside(lambda: shelf.save("sampler_weights", "y")))
        return whole(*args, **named)

    monkeypatch.setattr(shelf.catalog, at, during)
    shelf.checkpoints.remove(shelf.row("sampler_weights", "x"))
    [thread] = threads
    thread.join(30)
    with pytest.raises(NotFound):
        shelf.row("sampler_weights", "x")
    for name in "yz":
        shelf.load(shelf.row("sampler_weights", name))
    last = shelf.row("sampler_weights", "y")
    assert shelf.catalog.resolve(f"{last.policy}@latest").digest == last.digest


def test_a_removal_whose_bytes_cannot_be_deleted_is_a_removal(shelf, monkeypatch):
    """The bytes are deleted in a later pass."""
    shelf.save("sampler_weights", "x")
    shelf.save("sampler_weights", "z", 1)
    row = shelf.row("sampler_weights", "x")

    def refuse(*args, **named):
        raise UserError("the catalog refuses")

    with monkeypatch.context() as patch:
        patch.setattr(shelf.catalog, "retire", refuse)
        shelf.checkpoints.remove(row)
    with pytest.raises(NotFound):
        shelf.checkpoints.remove(row)
    shelf.catalog.load(row.digest)
    shelf.checkpoints.expire()
    with pytest.raises(UserError, match="is retired"):
        shelf.catalog.load(row.digest)


@pytest.mark.parametrize("use", ["load", "copy", "sampler"])
def test_bytes_in_use_outlive_the_removal_of_their_row(shelf, monkeypatch, use):
    """A load, a copy and a sampler have found a row, which goes before they use its bytes."""
    kind = "sampler_weights" if use == "sampler" else "weights"
    shelf.save(kind, "z", 1)
    path = shelf.save(kind, "x")["path"]
    digest, reading = shelf.row(kind, "x").digest, shelf.checkpoints.reading
    file = shelf.checkpoints.folder / f"{digest}.safetensors"

    @contextlib.contextmanager
    def late(*args):
        with reading(*args) as row:
            shelf.checkpoints.remove(shelf.row(kind, "x"))
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(shelf.checkpoints, "reading", late)
        if use == "load":
            assert shelf.load_state(path).to_bytes() == shelf.states[0].to_bytes()
        elif use == "sampler":
            assert shelf.checkpoints.add_sampler(shelf.session, 0, "default", path).digest == digest
        else:
            shelf.checkpoints.copy("default", path, "another", "request", None)
    shelf.checkpoints.expire()
    if use == "sampler":
        shelf.catalog.load(digest)
    elif use == "copy":
        copy = shelf.row(kind, "x", "another")
        shelf.load(copy)
        shelf.checkpoints.remove(copy)
    assert not file.exists(), "its bytes go with the last name"


def test_a_save_that_fails_leaves_nothing(shelf, monkeypatch):
    for kind in Shelf.KINDS:
        shelf.save(kind, "z", 1)
    before = sorted(path.name for path in shelf.checkpoints.folder.rglob("*"))

    def refuse(row):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shelf.book, "add_checkpoint", refuse)
    for kind in Shelf.KINDS:
        with pytest.raises(OSError, match="No space left"):
            shelf.save(kind, "x")
        with pytest.raises(NotFound):
            shelf.row(kind, "x")
    assert sorted(path.name for path in shelf.checkpoints.folder.rglob("*")) == before


def test_leftovers_of_a_killed_process_are_swept(shelf):
    kept = [shelf.row(kind, "x") for kind in Shelf.KINDS if shelf.save(kind, "x")]
    folder = shelf.checkpoints.folder
    for name in (f"{'a' * 64}.safetensors", f".{'b' * 64}.safetensors-1", "notes.txt"):
        (folder / name).write_bytes(b"half")
    for name in ("c" * 64, ".staged"):
        (folder / "external" / name).mkdir()
    shelf.checkpoints.sweep()
    for row in kept:
        shelf.load(row)
    names = {path.name for path in (*folder.glob("*"), *(folder / "external").glob("*"))}
    assert names == {f"{kept[0].digest}.safetensors", kept[2].digest, "external", "notes.txt"}


def test_many_threads_save_delete_copy_and_expire(shelf, rng):
    """Checkpoints that nobody removes stay; every row loads at the end; no bytes are without a
    row.
    """
    seed, errors = int(rng.integers(1 << 30)), []
    kept = [(kind, f"kept{i}") for i, kind in enumerate(Shelf.KINDS)]

    def turn(choice, number):
        kind, name = choice.choice(Shelf.KINDS), choice.choice("abc")
        match choice.choice(("save", "save", "keep", "remove", "copy", "expire")):
            case "save":
                shelf.save(kind, name, choice.randrange(2), overwrite=True)
            case "keep":
                shelf.save(*kept[number % 3], choice.randrange(2), overwrite=True)
            case "remove":
                shelf.checkpoints.remove(shelf.row(kind, name))
            case "copy":
                path, copy = shelf.row(kind, name).path, f"copy {choice.random()}"
                shelf.checkpoints.copy("default", path, copy, copy, None)
            case "expire":
                shelf.book.change_checkpoint(shelf.row(kind, name), expires=1.0)
                shelf.checkpoints.expire()

    def work(number):
        choice = random.Random(f"{seed} {number}")
        for _ in range(60):
            try:
                with contextlib.suppress(NotFound):
                    turn(choice, number)
            except BaseException as error:
                errors.append(error)
                raise

    for kind, name in kept:
        shelf.save(kind, name)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not errors
    shelf.checkpoints.expire()
    rows = shelf.book.checkpoints("default")
    assert {(row.kind, row.name) for row in rows} >= set(kept)
    for row in rows:
        shelf.load(row)
    folder = shelf.checkpoints.folder
    found = {path.name.removesuffix(".safetensors") for path in folder.glob("*.safetensors")}
    found |= {path.name for path in (folder / "external").iterdir()}
    assert found == {row.digest for row in rows if row.kind != "sampler_weights"}
