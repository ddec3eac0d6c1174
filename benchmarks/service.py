"""Many tenants train and sample over one base in one process, below HTTP: database, queues, loop.

``cpu_ratio_N``: CPU seconds of N tenants' rounds one after another over all at once.
``flood_p95_ratio``: a tenant's rounds while another floods the queue, over that alone. ``gap_...``:
wait of decoding rows for a training slice. ``rss_a_tenant``: growth of memory per tenant without a
slot, over the bytes of its adapter and moments. ``handoff_...``: from an update's response until
its weights can be sampled.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
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
        threads = [threading.Thread(target=self.round, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def one_by_one(self, names: Sequence[str]) -> None:
        for name in names:
            self.round(name)


def _shared(config: Any, tenants: _Tenants, names: Sequence[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for count in config.tenants:
        chosen = names[:count]
        sides = {
            "alone": lambda m=chosen: tenants.one_by_one(m),
            "together": lambda m=chosen: tenants.together(m),
        }
        cpu = timing.in_turn(f"{count} tenants", sides, config.n, clock=time.process_time)
        out[f"cpu_ratio_{count}"] = timing.ratio(cpu, "alone", "together")
    return out


def _flood(config: Any, tenants: _Tenants, small: str, large: str) -> dict[str, Any]:
    """Times one tenant's rounds, alone and while another floods the queue."""

    def times(what: str, count: int) -> list[float]:
        out, progress = [], Progress(f"rounds {what}", count)
        for k in range(count):
            began = time.perf_counter()
            tenants.round(small)
            out.append(time.perf_counter() - began)
            progress.update(k + 1)
        return out

    times("alone", 1)
    alone = times("alone", config.flood_rounds)
    ended = threading.Event()

    def flood() -> None:
        waiting: list[list[str]] = []
        while not ended.is_set():
            waiting.append(tenants.send(large, tenants.data(), Optim(OptimizerConfig(1e-4))))
            if len(waiting) > config.flood_depth:
                tenants.wait(waiting.pop(0))
        for ids in waiting:
            tenants.wait(ids)

    thread = threading.Thread(target=flood)
    thread.start()
    flooded = times("during a flood", config.flood_rounds + 1)[1:]
    ended.set()
    thread.join()
    both = {"flooded": flooded, "alone": alone}
    return {
        "flood_p95_ratio": timing.ratio(both, "flooded", "alone", q=95),
    }


def _gaps(config: Any, tenants: _Tenants, names: Sequence[str]) -> dict[str, Any]:
    """Waits of decoding rows while two tenants train."""
    rng = np.random.default_rng(config.seed)

    def decode() -> None:
        prompts = [
            tuple(rng.integers(0, tenants.base.cfg.vocab_size, 8).tolist())
            for _ in range(config.decode.rows)
        ]
        most = config.decode.tokens
        tenants.server.engine.generate(
            [Request(p, max_tokens=most, temperature=1.0, seed=i) for i, p in enumerate(prompts)]
        )

    def train(name: str, ended: threading.Event) -> None:
        while not ended.is_set():
            tenants.round(name)

    decode()
    durable, done = tenants.durable, 0
    durable.gaps.clear()
    progress = Progress("decoding while tenants train", config.n)
    while done < config.n or (not durable.gaps and done < 20 * config.n):
        ended = threading.Event()
        threads = [threading.Thread(target=train, args=(name, ended)) for name in names[:2]]
        for thread in threads:
            thread.start()
        decode()
        ended.set()
        for thread in threads:
            thread.join()
        done += 1
        progress.update(min(config.n, done))
    return {
        "gap_p50_ms": timing.percentile(durable.gaps, 50, 1e3),
        "gap_p90_ms": timing.percentile(durable.gaps, 90, 1e3),
        "gap_bound_ms": 1e3 * durable.gap_s,
    }


def _handoff(config: Any, tenants: _Tenants, name: str) -> dict[str, Any]:
    """An update, and at once a token of the policy as it then is."""
    first, prefill, wrong, server = [], [], 0, tenants.server
    rng = np.random.default_rng(config.seed)

    def draw(digest: str) -> int:
        """Returns True if other weights sampled a token."""
        prompt = tuple(rng.integers(0, tenants.base.cfg.vocab_size, 8).tolist())
        [answer] = server.engine.submit(
            Request(prompt, revision=digest, max_tokens=1, temperature=1.0, stop_ids=())
        ).result(WAIT_S)
        return answer.revision != digest

    progress = Progress("handoffs", config.handoffs + 1)
    for k in range(config.handoffs + 1):  # the first compiles the write of its shapes
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
        first += [drawn - began][: k > 0]
        prefill += [time.perf_counter() - drawn][: k > 0]
        progress.update(k + 1)
    handoff = [x - y for x, y in zip(first, prefill)]
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
            found = (
                _shared(config, tenants, names)
                | _flood(config, tenants, *names[:2])
                | _gaps(config, tenants, names)
            )
            found |= _handoff(config, tenants, names[0]) | _memory(config, tenants, server.live)
    return {
        "base": config.base,
        "dtype": config.dtype,
        "weights": base.weights,
        "errors": tenants.errors,
        **found,
    }
