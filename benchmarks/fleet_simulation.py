"""A simulated fleet: discrete events of engines and their front, without devices.

An engine has device slots and a host cache (the product's ``Tier``), one loader, a limit of
unfinished loads as in ``residency.loads``, and rows that decode together. A request waits for its
adapter, then for a row. All times are simulated; of a router only its choices are real.
"""

import dataclasses
import functools
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.traffic import draws
from mint_jax.fleet.chooser import BOUND, Load, choose, homes_of
from mint_jax.residency.loads import HOST_SHARE
from mint_jax.residency.tier import Tier

FRONT_S = 0.005  # from a refusal to the client's next request
SMOOTH = 0.05  # weight of the newest sample in an engine's mean of tokens


# MinT's published probe of two replicas (arXiv 2605.13779)
MINT_ROW = {
    "kind": "uniform",
    "names": 2048,
    "zipf": 0.0,
    "requests": 7360,
    "tokens": 32,
    "concurrency": 230,
    "prewarm": 164,
}
SERVICES = {
    # SmolLM2 on two CPU cores. Steps: reports/cpu-2-cores/engine.json (1 and 8 rows) and
    # active_wave.json (32 rows of 32 adapters of rank 8). Loads: sweeps/cold_staircase, 13 MB, one
    # alone and each of 64.
    "cpu": {
        "rows": 32,
        "steps": ((1, 0.00373), (8, 0.00986), (32, 0.0373)),
        "load_s": 0.00746,
        "next_load_s": 0.00513,
    },
    # Qwen3-4B on an H200. Steps: reports/nvidia-h200/gpu.json (64 rows of 64 adapters). Loads were
    # not measured there: cpu-2-cores/packed_load.json, 105 MB, one alone and each of 16.
    "h200": {
        "rows": 64,
        "steps": ((1, 0.0041), (8, 0.00431), (64, 0.00778)),
        "load_s": 0.0367,
        "next_load_s": 0.03,
    },
}
# Loads as MinT published them (arXiv 2605.13779): one at a time, 1.36 s each.
SERVICES["published_loads"] = SERVICES["h200"] | {"load_s": 1.36, "next_load_s": 1.36}


@dataclasses.dataclass(frozen=True)
class Service:
    """One engine: ``rows`` that decode at once, ``steps`` of (rows, seconds), linear in between;
    seconds of a cold load alone and of each one of a queue; adapters in ``slots`` and in ``host``
    memory; the most unfinished loads, ``depth``.
    """

    rows: int
    steps: tuple[tuple[float, float], ...]
    load_s: float
    next_load_s: float
    slots: int
    host: int
    depth: int = 256


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Requests: ``concurrency`` clients send one after the other; if 0, ``rate`` a second arrive at
    random. Not measured are the first ``prewarm``, of as many names, and ``warm`` more.
    """

    kind: str
    names: int
    zipf: float
    requests: int
    tokens: int
    concurrency: int = 0
    rate: float = 0.0
    prewarm: int = 0
    warm: int = 0

    def asks(self, seed: int) -> tuple[np.random.Generator, list["Ask"]]:
        """Returns all requests of a seed, and the generator that drew them."""
        rng = np.random.default_rng(seed)
        found = draws(self.kind, self.names, self.warm + self.requests, self.zipf, rng).tolist()
        names = [*range(self.prewarm), *found]
        tokens = rng.geometric(1 / self.tokens, len(names)).tolist()
        return rng, [Ask(k, f"{n:016x}", t) for k, (n, t) in enumerate(zip(names, tokens))]


@dataclasses.dataclass(eq=False, slots=True)
class Ask:
    number: int
    digest: str
    tokens: int
    sent: float = 0.0


class Engine:
    def __init__(self, service: Service, fleet: "Fleet", index: int):
        self.service, self.fleet, self.index = service, fleet, index
        self.device = Tier(service.slots, clock=lambda: fleet.now)
        self.host = Tier(service.host, clock=lambda: fleet.now)
        rows, seconds = zip(*service.steps)
        self.step_s = np.interp(np.arange(service.rows + 1), rows, seconds).tolist()
        self.loads: dict[str, list[Ask]] = {}
        self.queue: tuple[deque[str], deque[str]] = deque(), deque()  # warm loads, cold loads
        self.parked: deque[str] = deque()  # loads that wait for a slot
        self.loading = False
        self.waiting: deque[Ask] = deque()
        self.rows: list[tuple[float, int, Ask]] = []  # heap by the token at which a row ends
        self.tokens, self.since, self.version = 0.0, 0.0, 0  # of each row, up to a time
        self.mean_tokens = 0.0
        self.cold = self.warm = 0

    def offer(self, ask: Ask) -> float:
        """Admits a request (0), or refuses it for the returned seconds."""
        if self.device.lease(ask.digest) is not None:
            self.waiting.append(ask)
            self._decode()
        elif ask.digest in self.loads:
            self.loads[ask.digest].append(ask)
        elif len(self.loads) >= self.service.depth:
            return max(0.001, len(self.loads) * self.service.next_load_s / 2)
        else:
            self.loads[ask.digest] = [ask]
            self.queue[ask.digest not in self.host].append(ask.digest)
            self._next_load()
        return 0.0

    def wait_s(self) -> float:
        """Returns the estimate of the time until a sample of a resident adapter has a row."""
        over = len(self.waiting) + 1 - (self.service.rows - len(self.rows))
        return max(0, over) * self.mean_tokens * self.step_s[-1] / self.service.rows

    def load_s(self) -> float:
        """Returns the estimate of a cold load now, after the loads and slots others wait for."""
        warm, cold = map(len, self.queue)
        ahead = (HOST_SHARE * warm + cold + self.loading) * self.service.next_load_s
        slot = len(self.parked) * self.mean_tokens * self.step_s[-1] / self.service.slots
        return self.service.load_s + ahead + slot

    def report(self) -> Load:
        busy, device, host = self.fleet.busy[self.index], set(self.device.copies), self.host.copies
        return Load(self.fleet.now, busy, self.wait_s(), self.load_s(), device, set(host))

    def _next_load(self) -> None:
        while not self.loading and (queue := self.queue[0] or self.queue[1]):
            digest = queue.popleft()
            if self.device.reserve(digest, 1) is None:
                self.parked.append(digest)
                continue
            seconds = self.service.next_load_s if len(self.loads) > 1 else self.service.load_s
            if self.host.lease(digest) is not None:
                self.warm += 1
                seconds *= HOST_SHARE
            else:
                self.cold += 1
                if self.host.reserve(digest, 1) is not None:
                    self.host.confirm(digest, seconds)
            self.loading = True
            self.fleet.at(seconds, functools.partial(self._loaded, digest, seconds))

    def _loaded(self, digest: str, seconds: float) -> None:
        self.loading = False
        self.device.confirm(digest, seconds)
        if digest in self.host:
            self.host.release(digest)
        for ask in self.loads.pop(digest):
            self.device.lease(digest)
            self.waiting.append(ask)
        self._release(digest)
        self._decode()

    def _release(self, digest: str) -> None:
        if self.device.release(digest) and self.parked:
            self.queue[0].appendleft(self.parked.popleft())

    def _decode(self) -> None:
        """Starts waiting rows and plans the end of the next one."""
        now = self.fleet.now
        if self.rows:
            self.tokens += (now - self.since) / self.step_s[len(self.rows)]
        self.since = now
        while self.rows and self.rows[0][0] <= self.tokens + 1e-6:
            _, _, ask = heapq.heappop(self.rows)
            self.mean_tokens += SMOOTH * (ask.tokens - self.mean_tokens)
            self._release(ask.digest)
            self.fleet.ended(self.index, ask)
        while self.waiting and len(self.rows) < self.service.rows:
            ask = self.waiting.popleft()
            heapq.heappush(self.rows, (self.tokens + ask.tokens, ask.number, ask))
        if self.rows:
            self.version += 1
            seconds = (self.rows[0][0] - self.tokens) * self.step_s[len(self.rows)]
            self.fleet.at(seconds, functools.partial(self._step, self.version))
        self._next_load()

    def _step(self, version: int) -> None:
        if version == self.version:  # else rows have changed since
            self._decode()


class Fleet:
    """Simulated engines, and the front that offers each request in its router's order."""

    def __init__(self, service: Service, engines: int, report_s: float, seed: int):
        self.now, self.report_s = 0.0, report_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.rng = np.random.default_rng(seed)
        self.names = tuple(f"engine-{i:03d}" for i in range(engines))
        self.busy = [0] * engines  # samples in flight, as the front counts them
        self.flights: dict[str, Counter[int]] = {}  # digest -> samples in flight by engine
        self.moved: set[str] = set()  # digests away from home, for hysteresis
        self.engines = [Engine(service, self, i) for i in range(engines)]
        self.view: dict[str, Load] = {}

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def run(self, router: str, traffic: Traffic, seed: int) -> dict[str, Any]:
        """Serves all requests, the same ones for one seed; returns shares, seconds and counts."""
        rng, requests = traffic.asks(seed)
        asks, unmeasured, left = iter(requests), traffic.prewarm + traffic.warm, len(requests)
        order, once = ROUTERS[router]
        seconds, errors, refused, loads = {}, [], [], (0, 0)

        def loaded() -> tuple[int, int]:
            return sum(e.cold for e in self.engines), sum(e.warm for e in self.engines)

        def again(after_s: float) -> None:
            nonlocal left
            left -= 1
            if traffic.concurrency:
                self.at(after_s, send)

        def send() -> None:
            nonlocal loads
            if (ask := next(asks, None)) is None:
                return
            if traffic.warm and ask.number == unmeasured:
                loads = loaded()
            ask.sent = self.now
            for place, i in enumerate(order(self, ask)):
                if not (wait := self.engines[i].offer(ask)):
                    self._count(i, ask, 1)
                    self.view[self.names[i]].slots.add(ask.digest)  # type: ignore[attr-defined]
                    return
                self._report(i, refused_until=self.now + wait)
                if not place:
                    refused.append(ask.number)
                if once:
                    break
            errors.append(ask.number)
            again(FRONT_S)

        def ended(i: int, ask: Ask) -> None:
            self._count(i, ask, -1)
            seconds[ask.number] = self.now - ask.sent
            again(0.0)

        def report() -> None:
            self.view |= {name: engine.report() for name, engine in zip(self.names, self.engines)}
            if left:
                self.at(self.report_s, report)

        self.ended = ended
        report()
        times = np.zeros(traffic.concurrency)
        if traffic.rate:
            times = np.cumsum(rng.exponential(1 / traffic.rate, len(requests)))
        for time in times.tolist():
            self.at(time, send)
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()
        if len(seconds) + len(errors) != len(requests):
            raise RuntimeError(f"{len(seconds)} answers, {len(errors)} errors of {len(requests)}")
        names = {ask.digest for ask in requests}
        p50, p95 = np.quantile([s for k, s in seconds.items() if k >= unmeasured], (0.5, 0.95))
        return {
            "errors": sum(k >= unmeasured for k in errors) / traffic.requests,
            "refused_first": sum(k >= unmeasured for k in refused) / traffic.requests,
            "p50_s": float(p50),
            "p95_s": float(p95),
            "cold_loads": loaded()[0] - loads[0],
            "host_loads": loaded()[1] - loads[1],
            "distinct": len(names - {ask.digest for ask in requests[traffic.prewarm : unmeasured]}),
        }

    def _count(self, i: int, ask: Ask, one: int) -> None:
        self.busy[i] += one
        self.flights.setdefault(ask.digest, Counter())[i] += one
        self._report(i, in_flight=self.busy[i])

    def _report(self, i: int, **changes: float) -> None:
        self.view[self.names[i]] = dataclasses.replace(self.view[self.names[i]], **changes)


def _chooser(fleet: Fleet, ask: Ask) -> Iterable[int]:
    found = choose(ask.digest, fleet.names, fleet.view, fleet.now, 1, ask.number)
    return (int(choice.engine[7:]) for choice in found)


def _by(fleet: Fleet, ask: Ask, key: Callable[[int], Any]) -> list[int]:
    """Engines by key, equals from another one on for each request."""
    n = len(fleet.names)
    return sorted(range(n), key=lambda i: (key(i), (i - ask.number) % n))


def _activity(fleet: Fleet, ask: Ask) -> list[int]:
    """Engines that have requests of this adapter in flight, then the least loaded."""
    flights = fleet.flights.get(ask.digest, {})
    return _by(fleet, ask, lambda i: (not flights.get(i), fleet.busy[i]))


def _hysteresis(fleet: Fleet, ask: Ask) -> list[int]:
    """The first home; the next one from 1.5 times the mean load there until it is 1.1 times."""
    homes = [int(name[7:]) for name in homes_of(ask.digest, fleet.names, 2)]
    mean, home = sum(fleet.busy) / len(fleet.busy), fleet.busy[homes[0]]
    if home > (1.1 if ask.digest in fleet.moved else 1.5) * mean + 1:
        fleet.moved.add(ask.digest)
    else:
        fleet.moved.discard(ask.digest)
    first = homes[-1] if ask.digest in fleet.moved else homes[0]
    return _by(fleet, ask, lambda i: (i != first, fleet.busy[i]))


def _oracle(fleet: Fleet, ask: Ask) -> list[int]:
    """The chooser's rule for all engines, with what they know at this moment."""
    limit = BOUND * sum(fleet.busy) / len(fleet.busy) + 1

    def cost(i: int) -> tuple[bool, float]:
        engine = fleet.engines[i]
        if ask.digest in engine.device or ask.digest in engine.loads:
            eta = engine.wait_s()
        elif ask.digest in engine.host:
            eta = engine.wait_s() + HOST_SHARE * engine.load_s()
        else:
            eta = 2 * (engine.wait_s() + engine.load_s())
        return fleet.busy[i] > limit, eta

    return _by(fleet, ask, cost)


# name -> (order of engines, the first alone is offered the request)
ROUTERS: dict[str, tuple[Callable[[Fleet, Ask], Iterable[int]], bool]] = {
    "chooser": (_chooser, False),
    "random": (lambda fleet, ask: fleet.rng.permutation(len(fleet.names)).tolist(), False),
    "round_robin": (lambda fleet, ask: _by(fleet, ask, lambda i: 0), False),
    "sticky": (lambda fleet, ask: [int(homes_of(ask.digest, fleet.names, 1)[0][7:])], True),
    "least_loaded": (lambda fleet, ask: _by(fleet, ask, lambda i: fleet.busy[i]), False),
    "activity": (_activity, False),
    "hysteresis": (_hysteresis, False),
    "oracle": (_oracle, False),
}
