"""Many tenants train and sample over one base, in one process, through what the service stands on: journal, queues and loop.

- ``cpu_ratio_N``: seconds of CPU of N tenants' rounds one tenant after the other, over those of all at once. A round of a tenant is a
  forward and backward of its data and an update. ``wall_ratio_N``: the same of seconds. ``cpu_round_N``: CPU seconds of a round of all
  at once; ``flop_floor_round``: what the multiplications of a tenant's tokens alone cost, at the rate of a large matmul here.
- ``flood_p95_ratio``: the 95th percentile of one tenant's rounds while another sends rounds without waiting, over that alone.
- ``gap_p50_ms``, ``gap_p90_ms``: how long rows that decode wait for a slice of training, beside the bound that was asked for
  (``gap_bound_ms``) and the cheapest slice there is, below which no bound helps (``gap_least_ms``). ``decode_share``: tokens drawn a
  second beside training over those without.
- ``rss_a_tenant``: growth of resident memory for a tenant more than there are slots, over the bytes of its adapter and moments.
- ``handoff_p50_ms``, ``handoff_p95_ms``: from the answer to an update to the first token that these weights draw: a snapshot of the
  policy, its digest, its load into a slot and a prompt of 8 tokens. ``wrong_revisions``: answers that name another digest.
- ``errors``: requests that failed.
"""

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax import host
from mint_jax.bench import timing
from mint_jax.catalog.packed import unpack
from mint_jax.lora.tree import AdapterConfig
from mint_jax.metrics import Progress
from mint_jax.models.base import Base
from mint_jax.residency.admission import Admission
from mint_jax.residency.residency import Residency
from mint_jax.residency.slots import DeviceSlots
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.service.calls import Call, Create, ForwardBackward, Optim
from mint_jax.service.durable import Durable
from mint_jax.service.loop import Loop
from mint_jax.service.snapshots import Snapshots
from mint_jax.train.blocks import BlockShape, Datum
from mint_jax.train.live import NO_LOSS, Live
from mint_jax.train.state import OptimizerConfig

WAIT_S = 600.0


class _Tenants:
    """Clients of one server, each with a policy of its own."""

    def __init__(self, config: Any, base: Base, durable: Durable):
        self.config, self.base, self.durable = config, base, durable
        self.errors = 0
        self._rng = np.random.default_rng(config.seed)
        self._sent: dict[str, int] = {}
        self._lock = threading.Lock()

    def send(self, name: str, *calls: Call) -> list[str]:
        """Ids of a tenant's next calls."""
        ids = []
        for call in calls:
            with self._lock:
                self._sent[name] = number = self._sent.get(name, 0) + 1
            ids.append(self.durable.submit(name, number, call, wait_s=None))
        return ids

    def wait(self, ids: Sequence[str]) -> None:
        for id in ids:
            try:
                if self.durable.result(id, WAIT_S) is None:
                    raise TimeoutError(f"a request has no result within {WAIT_S:.0f} s: {self.durable.failed or 'the machine is too slow'}")
            except (RuntimeError, ValueError):
                self.errors += 1
        self.durable.futures.acknowledge(ids)

    def join(self, name: str) -> None:
        c = self.config
        self.wait(self.send(name, Create(AdapterConfig(c.rank, 2.0 * c.rank, tuple(c.targets)), len(self._sent))))

    def data(self) -> ForwardBackward:
        made = []
        for _ in range(self.config.sequences):
            with self._lock:
                tokens = self._rng.integers(0, self.base.cfg.vocab_size, self.config.tokens + 1).astype(np.int32)
            made.append(Datum(tokens[:-1], tokens[1:], np.ones(self.config.tokens, np.float32)))
        return ForwardBackward(made, NO_LOSS)

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


def _costs(sides: dict[str, Callable[[], None]], n: int, what: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds, and seconds of CPU, of every side in turn; the first round is not counted."""
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    progress = Progress(what, n + 1)
    for k in range(n + 1):
        for name, call in sides.items():
            began, used = time.perf_counter(), time.process_time()
            call()
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - used)
        progress.update(k + 1, " ".join(f"{name} {values[-1]:.2f} s" for name, values in wall.items()))
    return {k: v[1:] for k, v in wall.items()}, {k: v[1:] for k, v in cpu.items()}


def _shared(config: Any, tenants: _Tenants, names: Sequence[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for count in config.tenants:
        mine = names[:count]
        sides = {"alone": lambda m=mine: tenants.one_by_one(m), "together": lambda m=mine: tenants.together(m)}
        wall, cpu = _costs(sides, config.n, f"{count} tenants")
        out |= {
            f"cpu_ratio_{count}": timing.ratio(cpu, "alone", "together"),
            f"wall_ratio_{count}": timing.ratio(wall, "alone", "together"),
        }
        out[f"cpu_round_{count}"] = timing.median(cpu["together"])
    return out


def _flood(config: Any, tenants: _Tenants, small: str, large: str) -> dict[str, Any]:
    """One tenant's rounds, in turn alone and beside another whose queue never ends."""

    def times(count: int) -> list[float]:
        out = []
        for _ in range(count):
            began = time.perf_counter()
            tenants.round(small)
            out.append(time.perf_counter() - began)
        return out

    times(1)
    alone = times(config.flood_rounds)
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
    beside = times(config.flood_rounds + 1)[1:]
    ended.set()
    thread.join()
    both = {"beside": beside, "alone": alone}
    return {
        "flood_p95_ratio": timing.percentile_ratio(both, "beside", "alone", 95),
        "flood_p50_ratio": timing.ratio(both, "beside", "alone"),
        "flood_rounds": config.flood_rounds,
    }


def _gaps(config: Any, tenants: _Tenants, loop: Loop, names: Sequence[str]) -> dict[str, Any]:
    """Rows decode, in turn with and without training beside them."""
    rng = np.random.default_rng(config.seed)

    def decode() -> float:
        prompts = [tuple(rng.integers(0, tenants.base.cfg.vocab_size, 8).tolist()) for _ in range(config.decode.rows)]
        began = time.perf_counter()
        loop.engine.generate([Request(p, max_tokens=config.decode.tokens, temperature=1.0, seed=i) for i, p in enumerate(prompts)])
        return config.decode.rows * config.decode.tokens / (time.perf_counter() - began)

    def train(name: str, ended: threading.Event) -> None:
        while not ended.is_set():
            tenants.round(name)

    decode()
    rates: dict[str, list[float]] = {"quiet": [], "beside": []}
    loop.gaps.clear()
    while len(rates["quiet"]) < config.n or (not loop.gaps and len(rates["quiet"]) < 20 * config.n):
        rates["quiet"].append(decode())
        ended = threading.Event()
        threads = [threading.Thread(target=train, args=(name, ended)) for name in names[:2]]
        for thread in threads:
            thread.start()
        rates["beside"].append(decode())
        ended.set()
        for thread in threads:
            thread.join()
    least = min(cost for (_, backward), cost in loop.training.live.costs.items() if backward)
    return {
        "gap_p50_ms": timing.percentile(loop.gaps, 50, 1e3),
        "gap_p90_ms": timing.percentile(loop.gaps, 90, 1e3),
        "gap_bound_ms": 1e3 * loop.gap_s,
        "gap_least_ms": round(1e3 * least, 1),
        "decode_share": timing.ratio(rates, "beside", "quiet"),
        "decode_tokens_per_s": timing.medians_of(rates),
    }


def _handoff(config: Any, tenants: _Tenants, loop: Loop, snapshots: Snapshots, name: str) -> dict[str, Any]:
    """An update, and at once a token of the policy as it then is."""
    seconds, wrong, prompt = [], 0, tuple(range(8))
    for k in range(config.handoffs + 1):  # the first compiles the write of its shapes
        tenants.round(name)
        began = time.perf_counter()
        digest = snapshots.take(name, name).result(WAIT_S)
        [answer] = loop.engine.submit(Request(prompt, revision=digest, max_tokens=1, temperature=1.0, stop_ids=())).result(WAIT_S)
        seconds += [time.perf_counter() - began][: k > 0]
        wrong += answer.revision != digest
        snapshots.drop(digest)
    return {
        "handoff_p50_ms": timing.percentile(seconds, 50, 1e3),
        "handoff_p95_ms": timing.percentile(seconds, 95, 1e3),
        "wrong_revisions": wrong,
    }


def _memory(config: Any, tenants: _Tenants, live: Live) -> dict[str, Any]:
    """Tenants beyond the slots, each of which trains once."""
    per: list[float] = []
    for i in range(config.memory_tenants):
        before = host.rss_bytes()
        tenants.join(f"memory {i}")
        tenants.round(f"memory {i}")
        per.append(host.rss_bytes() - before)
    one = live.held("memory 0")
    return {"rss_a_tenant": timing.mean(x / one.nbytes for x in per), "tenant_mb": round(one.nbytes / 1e6, 1)}


def run(config: Any, workdir: Path, open_base: Callable[[Any], Base], **_: Any) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    base = open_base(config)
    shapes = [BlockShape(*shape) for shape in config.shapes]
    bucket, targets = AdapterConfig(config.rank).bucket, tuple(config.targets)
    live = Live(base, {bucket: config.slots}, targets, shapes, folder=workdir / "spilled")
    slots = DeviceSlots(live.specs, {bucket: 2}, targets)
    admission = Admission(base.fingerprint, live.specs, {bucket: slots.targets(bucket)})
    residency = Residency(lambda digest: snapshots.fetch(digest), unpack, admission, slots, 1 << 30)
    loop = Loop(Engine(base, rows=(config.decode.rows,)), live, residency, gap_s=config.gap_s)
    snapshots = Snapshots(loop.training)
    progress = Progress("compiling", 2)
    live.warm()
    progress.update(1)
    loop.engine.warm(residency.stacks)
    progress.update(2)
    durable = Durable(workdir / "server", loop.training)
    try:
        with loop.running():
            tenants = _Tenants(config, base, durable)
            names = [f"tenant {i}" for i in range(max(*config.tenants, 2))]
            for name in names:
                tenants.join(name)
            found = _shared(config, tenants, names) | _flood(config, tenants, *names[:2]) | _gaps(config, tenants, loop, names)
            found |= _handoff(config, tenants, loop, snapshots, names[0]) | _memory(config, tenants, live)
    finally:
        durable.close()
        snapshots.close()
        residency.close()
        for folder in ("server", "spilled"):
            shutil.rmtree(workdir / folder, ignore_errors=True)
    multiply = timing.Matmul()
    seconds = timing.medians(timing.in_turn("matmul", {"matmul": multiply}, config.n))["matmul"]
    tokens = config.sequences * config.tokens
    floor = 3 * 2 * base.nbytes / 4 * tokens / (multiply.flops / seconds)  # forward, and gradients of activations twice as much at most
    return {
        "bench": "service",
        "base": config.base,
        "dtype": config.dtype,
        "device": timing.device(),
        "n": config.n,
        "errors": tenants.errors,
        **found,
        "tokens_a_round": tokens,
        "flop_floor_round": float(f"{floor:.3g}"),
        "steps": live.counts["steps"],
        "tokens_over_padded": round(live.counts["tokens"] / max(1, live.counts["padded_tokens"]), 3),
        "costs_s": {f"{s.blocks} x {s.rows} x {s.tokens}{'' if b else ' forward'}": round(c, 3) for (s, b), c in live.costs.items()},
    }
