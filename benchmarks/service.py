"""Many tenants train and sample over one base in one process, below HTTP: database, queues, loop.

``cpu_ratio_N``: CPU seconds of N tenants' rounds one after another over all at once.
``flood_p95_ratio``: a tenant's rounds while another floods the queue, over that alone. ``gap_...``:
wait of decoding rows for a training slice. ``rss_a_tenant``: growth of memory per tenant without a
slot, over the bytes of its adapter and moments. ``handoff_...``: from an update's response until
its weights can be sampled.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timing
from benchmarks.alone import scratch
from benchmarks.bases import open_base
from mint_jax import host
from mint_jax.lora.tree import AdapterConfig
from mint_jax.metrics import Progress
from mint_jax.rollout.request import Request
from mint_jax.service.server import Server, Sizes
from mint_jax.service.training_calls import (
    Call,
    Create,
    ForwardBackward,
    Optim,
    Save,
    decode_result,
)
from mint_jax.train.blocks import Datum
from mint_jax.train.config import BlockShape, OptimizerConfig
from mint_jax.train.losses import NO_LOSS
from mint_jax.train.trainer import Trainer

WAIT_S = 600.0


class _Tenants:
    """Clients of one server, each with a policy of its own."""

    def __init__(self, config: Any, server: Server):
        self.config, self.server = config, server
        self.base, self.durable = server.base, server.durable
        self.session = server.book.open_session("bench", {})
        self.errors = 0
        self._rng = np.random.default_rng(config.seed)
        self._sent: dict[str, int] = {}
        self._lock = threading.Lock()

    def send(self, name: str, *calls: Call) -> list[str]:
        """Ids of a tenant's next calls."""
        ids = []
        for call in calls:
            with self._lock:
                self._sent[name] += 1
                number = self._sent[name]
            ids.append(self.durable.submit(name, number, call).result())
        return ids

    def wait(self, ids: Sequence[str]) -> None:
        for id in ids:
            outcome = asyncio.run(self.durable.futures.wait(id, WAIT_S))
            if outcome is None:
                raise TimeoutError(
                    f"a request has no result within {WAIT_S:.0f} s:"
                    f" {self.durable.failed or 'the machine is too slow'}"
                )
            self.errors += outcome.category is not None
        for id in ids:
            self.durable.futures.delivered(id)

    def join(self) -> str:
        """A new tenant's policy."""
        c, number = self.config, len(self._sent)
        name = self.server.book.add_model(self.session, number, f"tenant {number}", {}).id
        self._sent[name] = 0
        self.wait(
            self.send(name, Create(AdapterConfig(c.rank, 2.0 * c.rank, tuple(c.targets)), number))
        )
        return name

    def data(self) -> ForwardBackward:
        c, weights = self.config, np.ones(self.config.tokens, np.float32)
        with self._lock:
            shape = c.sequences, c.tokens + 1
            rows = self._rng.integers(0, self.base.cfg.vocab_size, shape).astype(np.int32)
        return ForwardBackward([Datum(row[:-1], row[1:], weights) for row in rows], NO_LOSS)

    def round(self, name: str) -> None:
        """Data and an update, sent together."""
        self.wait(self.send(name, self.data(), Optim(OptimizerConfig(1e-4))))

    def together(self, names: Sequence[str]) -> None:
        with _threads([functools.partial(self.round, name) for name in names]):
            pass

    def one_by_one(self, names: Sequence[str]) -> None:
        for name in names:
            self.round(name)

    def prompt(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(self._rng.integers(0, self.base.cfg.vocab_size, 8).tolist())


@contextlib.contextmanager
def _threads(calls: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Runs calls in threads meanwhile, and waits for their ends."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        running = [pool.submit(call) for call in calls]
        yield
    for one in running:
        one.result()


@contextlib.contextmanager
def _repeatedly(calls: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Runs each call again and again in a thread meanwhile."""
    ended = threading.Event()

    def repeat(call: Callable[[], None]) -> None:
        while not ended.is_set():
            call()

    with _threads([functools.partial(repeat, call) for call in calls]):
        try:
            yield
        finally:
            ended.set()


def _shared(config: Any, tenants: _Tenants, names: Sequence[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for count in config.tenants:
        sides = {"alone": tenants.one_by_one, "together": tenants.together}
        calls = {name: functools.partial(side, names[:count]) for name, side in sides.items()}
        cpu = timing.in_turn(f"{count} tenants", calls, config.n, clock=time.process_time)
        out[f"cpu_ratio_{count}"] = timing.ratio(cpu, "alone", "together")
    return out


def _flood(config: Any, tenants: _Tenants, small: str, large: str) -> dict[str, Any]:
    """Times one tenant's rounds, alone and while another floods the queue."""

    def times(what: str) -> list[float]:
        rounds = timing.counted(f"rounds {what}", range(config.flood_rounds + 1))
        return [timing.seconds_of(lambda: tenants.round(small)) for _ in rounds][1:]

    waiting: list[list[str]] = []

    def flood() -> None:
        waiting.append(tenants.send(large, tenants.data(), Optim(OptimizerConfig(1e-4))))
        if len(waiting) > config.flood_depth:
            tenants.wait(waiting.pop(0))

    both = {"alone": times("alone")}
    with _repeatedly([flood]):
        both["flooded"] = times("during a flood")
    for ids in waiting:
        tenants.wait(ids)
    return {"flood_p95_ratio": timing.ratio(both, "flooded", "alone", q=95)}


def _gaps(config: Any, tenants: _Tenants, names: Sequence[str]) -> dict[str, Any]:
    """Waits of decoding rows while two tenants train."""

    def decode() -> None:
        how = {"max_tokens": config.decode.tokens, "temperature": 1.0}
        rows = range(config.decode.rows)
        requests = [Request(tenants.prompt(), seed=i, **how) for i in rows]
        tenants.server.engine.generate(requests)

    decode()
    durable = tenants.durable
    durable.gaps.clear()
    training = [functools.partial(tenants.round, name) for name in names[:2]]
    for done in range(20 * config.n):
        if done >= config.n and durable.gaps:
            break
        with _repeatedly(training):
            decode()
    return {
        "gap_p50_ms": timing.percentile(durable.gaps, 50, 1e3),
        "gap_p90_ms": timing.percentile(durable.gaps, 90, 1e3),
        "gap_bound_ms": 1e3 * durable.gap_s,
    }


def _handoff(config: Any, tenants: _Tenants, name: str) -> dict[str, Any]:
    """An update, and at once a token of the policy as it then is."""
    handoff, wrong, server = [], 0, tenants.server

    def draw(digest: str) -> bool:
        """Returns true if other weights sampled a token."""
        how = {"max_tokens": 1, "temperature": 1.0, "stop_ids": ()}
        request = Request(tenants.prompt(), revision=digest, **how)
        return server.engine.submit(request).result(WAIT_S)[0].revision != digest

    for k in timing.counted("handoffs", range(config.handoffs + 1)):
        tenants.round(name)
        began = time.perf_counter()
        [id] = tenants.send(name, Save("sampler_weights", None, f"{tenants.session}:sample:{k}"))
        outcome = asyncio.run(tenants.durable.futures.wait(id, WAIT_S))
        assert outcome is not None
        result = decode_result(outcome.data)
        digest = server.book.sampler(server.book.owner(name), result["sampling_session_id"]).digest
        assert digest is not None
        wrong += draw(digest)
        drawn = time.perf_counter()
        wrong += draw(digest)
        handoff.append(drawn - began - (time.perf_counter() - drawn))
    del handoff[0]  # it compiled the write of its shapes
    return {
        "handoff_p50_ms": timing.percentile(handoff, 50, 1e3),
        "handoff_p95_ms": timing.percentile(handoff, 95, 1e3),
        "wrong_revisions": wrong,
    }


def _memory(config: Any, tenants: _Tenants, live: Trainer) -> dict[str, Any]:
    """Tenants beyond the slots, each of which trains once."""
    per: list[float] = []
    for _ in range(config.memory_tenants):
        before = host.rss_bytes()
        name = tenants.join()
        tenants.round(name)
        per.append(host.rss_bytes() - before)
    nbytes = live.read_state(name).nbytes
    return {"rss_a_tenant": timing.mean(x / nbytes for x in per)}


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    base = open_base(config)
    bucket = AdapterConfig(config.rank).bucket
    sizes = Sizes(
        slots={bucket: config.slots},
        adapters={bucket: 2},
        shapes=[BlockShape(*shape) for shape in config.shapes],
        max_rows=config.decode.rows,
        gap_s=config.gap_s,
    )
    with scratch(workdir / "server") as folder:
        server = Server(base, folder, sizes)
        server.compile(
            lambda what, done, total: Progress("compiling", total).update(done, what)
        ).wait()
        with server.running():
            tenants = _Tenants(config, server)
            names = [tenants.join() for _ in range(max(*config.tenants, 2))]
            found = _shared(config, tenants, names) | _flood(config, tenants, *names[:2])
            found |= _gaps(config, tenants, names)
            found |= _handoff(config, tenants, names[0]) | _memory(config, tenants, server.live)
    return {
        "base": config.base,
        "dtype": config.dtype,
        "weights": base.weights,
        "errors": tenants.errors,
        **found,
    }
