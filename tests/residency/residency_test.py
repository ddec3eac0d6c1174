"""The whole way from storage to slots: leases, joins, failures, quotas, pauses; then sampling from
what was loaded.
"""

import threading

import jax
import numpy as np
import pytest
from blake3 import blake3
from prometheus_client import CollectorRegistry

from mint_jax.catalog.packed import Schema, pack, unpack
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.residency.admission import Admission
from mint_jax.residency.loads import QueueFull
from mint_jax.residency.metrics import Metrics
from mint_jax.residency.residency import Residency
from mint_jax.residency.slots import DeviceSlots
from tests.adapters import random_adapter

LONG = 60.0  # a deadlock fails, it does not hang


class Storage:
    """Packed objects by digest; counts reads, and holds them at a gate while ``held``."""

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.reads: list[str] = []
        self.gate, self.started = threading.Event(), threading.Semaphore(0)
        self.gate.set()

    def add(self, adapter, config, base) -> str:
        data = pack(adapter, Schema(base, config))
        digest = blake3(data).hexdigest()
        self.objects[digest] = data
        return digest

    def fetch(self, digest: str) -> np.ndarray:
        self.reads.append(digest)
        self.started.release()
        assert self.gate.wait(LONG)
        if digest not in self.objects:
            raise UserError(f"no revision {digest[:12]}: list the catalog")
        return np.frombuffer(self.objects[digest], np.uint8)


class World:
    """A base, a storage with random adapters, and a residency over both."""

    def __init__(
        self,
        rng,
        base,
        capacities=None,
        host_bytes=1 << 30,
        targets=("q", "v"),
        piece_bytes=None,
        **settings,
    ):
        self.rng, self.base, self.storage = rng, base, Storage()
        self.specs = transformer.abstract(base.cfg)
        self.slots = DeviceSlots(self.specs, capacities or {2: 2}, targets, piece_bytes=piece_bytes)
        projections = {b: self.slots.targets(b) for b in self.slots.stacks}
        admission = Admission(base.fingerprint, self.specs, projections)
        self.registry = CollectorRegistry()
        settings["metrics"] = Metrics(self.registry)
        self.residency = Residency(
            self.storage.fetch, unpack, admission, self.slots, host_bytes, **settings
        )

    def new(self, rank=2, targets=("q", "v"), base=None, change=lambda adapter: adapter) -> str:
        config = AdapterConfig(rank, 2.0 * rank, targets)
        adapter = random_adapter(self.rng, self.specs, config)
        return self.storage.add(change(adapter), config, base or self.base.fingerprint)

    def loads(self, name: str) -> int:
        return self.residency.state()["loads"][name]

    def leased(self, digest: str):
        """A lease, committed."""
        future = self.residency.acquire(digest)
        self.settle(future)
        return future.result()

    def settle(self, *futures):
        """Commits until these are done."""
        self.until(lambda: (self.residency.commit_ready(), all(f.done() for f in futures))[1])

    def until(self, happened):
        for _ in range(60_000):
            if happened():
                return
            threading.Event().wait(0.001)
        raise AssertionError(f"never happened: {self.residency.state()}")

    def holds(self, lease) -> bool:
        """True if a lease's slot has its revision's factors."""
        adapter, schema = unpack(self.storage.objects[lease.digest])
        stack, rank = self.residency.stacks[lease.slot.bucket], schema.config.rank
        found = lora_tree.read_slot(stack, lease.slot.index, rank, adapter)
        return jax.tree.all(jax.tree.map(np.array_equal, found, adapter))


@pytest.fixture
def world(rng, tiny_base):
    made = []

    def make(**settings) -> World:
        made.append(World(rng, tiny_base("llama"), **settings))
        return made[-1]

    yield make
    for one in made:
        one.storage.gate.set()
        one.residency.close()


def test_requests_for_one_revision_are_one_load_and_get_leases_at_a_commit(world):
    w = world()
    digest = w.new()
    w.storage.gate.clear()
    futures = [w.residency.acquire(digest, f"t{i % 3}") for i in range(16)]
    w.storage.gate.set()
    w.until(lambda: w.loads("ready") == 1)
    assert not any(future.done() for future in futures), "it becomes resident between steps only"
    assert w.residency.commit_ready() == 1
    leases = [future.result(0) for future in futures]
    assert w.holds(leases[0])
    assert leases[0].modules == 2 * w.base.cfg.num_layers
    leases.append(w.residency.acquire(digest).result(0))  # resident: at once
    assert len({lease.slot for lease in leases}) == 1
    assert w.storage.reads == w.residency.state()["resident"] == [digest]
    assert w.residency.state()["slots"][2]["leases"] == 17
    for lease in leases:
        lease.release()
        lease.release()  # the second has no effect
    assert w.residency.state()["slots"][2]["leases"] == 0


def test_a_lease_keeps_its_slot_and_the_next_revision_waits_for_it(world):
    """Law 10, with one slot: the second revision is loaded only when the first lease ends."""
    w = world(capacities={2: 1})
    first, second = w.new(), w.new()
    a = w.leased(first)
    b = w.residency.acquire(second)
    w.until(lambda: w.loads("waiting_for_slot") == 1)
    for _ in range(3):
        assert w.residency.commit_ready() == 0
    assert w.holds(a)
    assert not b.done()
    a.release()
    w.settle(b)
    assert w.holds(b.result())
    assert w.residency.state()["resident"] == [second]
    back = w.residency.acquire(first)
    b.result().release()
    w.settle(back)
    assert w.holds(back.result())
    assert w.storage.reads == [first, second], "the host cache had it"


WRONG = {
    "corrupt": "is corrupt: the .* bytes that came from storage have digest",
    "base": "was trained on base 111111111111",
    "rank": "there are slots for rank buckets 2",
    "targets": "adapts unembed, for which the slots have no room",
    "infinite": "has NaN or infinite values",
    "unknown": "no revision 000000000000: list the catalog",
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_is_refused_with_the_reason_and_leaves_nothing(world, kind):
    w = world(workers=1)

    def change(adapter):
        if kind == "infinite":
            adapter["dense"]["attn"]["q"]["b"][1, 0, 3] = -np.inf
        return adapter

    digest = w.new(
        rank=5 if kind == "rank" else 2,
        targets=("q", "unembed") if kind == "targets" else ("q", "v"),
        base="1" * 64 if kind == "base" else None,
        change=change,
    )
    if kind == "corrupt":
        data = bytearray(w.storage.objects[digest])
        data[-5] ^= 1
        w.storage.objects[digest] = bytes(data)
    elif kind == "unknown":
        digest = "0" * 64
    w.storage.gate.clear()
    futures = [w.residency.acquire(digest) for _ in range(3)]
    w.storage.gate.set()
    for future in futures:
        with pytest.raises(UserError, match=WRONG[kind]):
            future.result(LONG)
    state = w.residency.state()
    assert state["host"]["bytes"] == state["device_bytes"] == state["loads"]["unfinished"] == 0
    assert state["slots"][2]["free"] == 2
    assert w.holds(w.leased(w.new()))  # the worker lives


@pytest.mark.parametrize("call", ["stage", "write"])
def test_a_load_that_fails_on_the_device_frees_its_slot(world, monkeypatch, call):
    w = world(capacities={2: 1})

    def fail(*_):
        raise RuntimeError("device full")

    monkeypatch.setattr(w.slots, call, fail)
    future = w.residency.acquire(w.new())
    if call == "write":
        w.until(lambda: w.loads("ready") == 1)
        with pytest.raises(RuntimeError, match="device full"):
            w.residency.commit_ready()
    with pytest.raises(RuntimeError, match="device full"):
        future.result(LONG)
    assert w.residency.state()["slots"][2]["free"] == 1
    monkeypatch.undo()
    assert w.holds(w.leased(w.new()))


def test_metrics_count_what_happened(world):
    w = world(capacities={2: 1}, depth=1)

    def value(name, **labels):
        return w.registry.get_sample_value(f"mint_residency_{name}", labels)

    first, second = w.new(), w.new()
    w.storage.gate.clear()
    futures = [w.residency.acquire(first) for _ in range(3)]
    assert value("unfinished_loads") == 1
    with pytest.raises(QueueFull, match="retry in"):
        w.residency.acquire(second)
    assert not w.residency.prefetch(second)
    w.storage.gate.set()
    w.settle(*futures)
    for future in (*futures, w.residency.acquire(first)):
        future.result().release()
    w.leased(second).release()
    w.leased(first)
    with pytest.raises(UserError):
        w.residency.acquire("0" * 64).result(LONG)
    tiers = {"hits": (1, 1), "misses": (7, 3)}  # device, host
    for name, counts in tiers.items():
        assert counts == tuple(value(f"{name}_total", tier=t) for t in ("device", "host"))
    for reason in ("queue_full", "prefetch_dropped", "failed"):
        assert value("refusals_total", reason=reason) == 1
    assert value("evictions_total", tier="device") == 2
    assert [value("load_seconds_count", source=x) for x in ("storage", "host")] == [2, 1]
    assert value("bytes", tier="host") == sum(map(len, w.storage.objects.values()))
    assert value("bytes", tier="device") == w.slots.slot_bytes(2)
    assert value("joined_total") == 2
    assert value("queue_wait_seconds_count") == 4


def test_a_cancelled_request_is_withdrawn_and_the_others_are_served(world):
    w = world(workers=1)
    running, waiting, shared = (w.new() for _ in range(3))
    w.storage.gate.clear()
    a = w.residency.acquire(running)
    assert w.storage.started.acquire(timeout=LONG)
    b, c, d = w.residency.acquire(waiting), w.residency.acquire(shared), w.residency.acquire(shared)
    for future in (a, b, c):
        assert future.cancel()
    w.storage.gate.set()
    w.settle(d)
    w.until(lambda: (w.residency.commit_ready(), w.loads("unfinished") == 0)[1])
    assert w.holds(d.result())
    assert w.storage.reads == [running, shared], "nobody waited for the other"
    assert sum(s["leases"] for s in w.residency.state()["slots"].values()) == 1
    assert not d.cancel()


def test_a_prefetch_takes_a_free_slot_but_evicts_nobody(world):
    w = world(capacities={2: 1})
    first, second = w.new(), w.new()
    assert w.residency.prefetch(first)
    w.until(lambda: w.residency.commit_ready() == 1)
    assert w.residency.prefetch(second)
    w.until(lambda: second in w.residency.host and not w.loads("unfinished"))
    assert w.residency.state()["resident"] == [first]
    w.leased(second)
    assert w.storage.reads == [first, second]
    assert w.residency.state()["resident"] == [second]


def test_bytes_that_are_offered_are_not_fetched(world):
    """While the storage does not answer. Those that do not fit in are told when they are asked for,
    and leave nothing.
    """
    w = world(capacities={2: 1})
    first, second, wrong = w.new(), w.new(), w.new(rank=5)
    w.storage.gate.clear()
    for digest in (first, second, first):
        assert w.residency.offer(digest, np.frombuffer(w.storage.objects[digest], np.uint8))
    before = w.residency.state()["host"]["bytes"]
    assert not w.residency.offer(wrong, np.frombuffer(w.storage.objects[wrong], np.uint8))
    assert not w.residency.offer("0" * 64, np.frombuffer(w.storage.objects[wrong], np.uint8))
    assert (
        w.residency.state()["host"]["bytes"]
        == before
        == len(w.storage.objects[first]) + len(w.storage.objects[second])
    )
    for digest in (first, second):
        lease = w.leased(digest)
        assert w.holds(lease)
        lease.release()
    assert w.storage.reads == []
    future = w.residency.acquire(wrong)
    w.storage.gate.set()
    with pytest.raises(UserError, match="rank 5"):
        future.result(LONG)


def test_many_threads_get_what_they_asked_for(rng, world):
    """Six threads, nine revisions, three slots, a host cache for four: every lease's slot holds its
    revision while it lasts.
    """
    w = world(capacities={2: 2, 1: 1}, workers=3)
    digests = [w.new(rank=1 + i % 2) for i in range(9)]
    w.residency.host.capacity = sum(sorted(len(x) for x in w.storage.objects.values())[-4:])
    wrong = []
    check = threading.Lock()  # the stack's arrays are replaced by commits

    def use(seed):
        mine = np.random.default_rng(seed)
        try:
            for _ in range(15):
                digest = digests[mine.integers(9)]
                future = w.residency.acquire(digest, f"t{seed % 2}")
                if mine.random() < 0.2 and future.cancel():
                    continue
                lease = future.result(LONG)
                with check:
                    wrong.extend([] if w.holds(lease) else [digest])
                lease.release()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(int(s),)) for s in rng.integers(2**31, size=6)]
    for thread in threads:
        thread.start()
    for _ in range(600_000):
        with check:
            w.residency.commit_ready()
        if not any(thread.is_alive() for thread in threads):
            break
        threading.Event().wait(0.0005)
    assert wrong == []
    w.until(lambda: (w.residency.commit_ready(), w.loads("unfinished") == 0)[1])
    state = w.residency.state()
    assert state["host"]["leased"] == 0
    assert state["host"]["bytes"] <= w.residency.host.capacity
    assert all(s["leases"] == s["filling"] == 0 for s in state["slots"].values())
