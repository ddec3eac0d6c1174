"""Server state for operators: Prometheus metrics, health, readiness, state in JSON, and costs.

HTTP metrics are labelled by the route templates of ``endpoints.TABLE`` and ``other``, so that no
client can add a series. Counts that other parts keep are read by collectors when they are scraped.
"""

import collections
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import psutil
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mint_jax.errors import UserError
from mint_jax.residency.residency import Residency
from mint_jax.service.costs import BASE, COUNTED, KINDS, Costs
from mint_jax.service.endpoints import TABLE
from mint_jax.service.exchange import path_of
from mint_jax.service.handlers import CostsQuery, query_of
from mint_jax.service.server import Server
from pallas_kernels import dispatch

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
QUANTILES = (0.5, 0.95, 0.99, 1.0)
MAX_POLICIES = 200  # shown in ``/debug/state``; the busiest first

Collect = Callable[[], Iterable[Metric]]


class Monitor:
    """Registry of a server's metrics, and its routes. ``collectors`` yield the metrics of other
    parts at each scrape; ``readiness`` returns the answer of ``/ready``, ``state`` that of
    ``/debug/state``.
    """

    def __init__(
        self,
        *collectors: Collect,
        readiness: Callable[[], Mapping[str, Any]] = lambda: {"status": "ready"},
        state: Callable[[], Any] = dict,
        registry: CollectorRegistry | None = None,
    ):
        self.registry = registry or CollectorRegistry()
        self._collectors, self._readiness, self._state = collectors, readiness, state
        self.registry.register(self)  # type: ignore[arg-type]

        def make(kind: Any, name: str, help: str, *labels: str, **more: Any) -> Any:
            labels = ("route", *labels)
            return kind(f"mint_http_{name}", help, labels, registry=self.registry, **more)

        self.requests = make(Counter, "requests", "Completed requests.", "status")
        help = "Request to end of response."
        self.seconds = make(Histogram, "seconds", help, "status", buckets=SECONDS)
        help = "Request to start of response."
        self.first = make(Histogram, "first_byte_seconds", help, buckets=SECONDS)
        self.in_flight = make(Gauge, "in_flight", "Requests in flight.")
        self.received = make(Counter, "received_bytes", "Bytes of request bodies.")
        self.sent = make(Counter, "sent_bytes", "Bytes of response bodies.")

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of all collectors, for Prometheus' registry."""
        for collect in self._collectors:
            yield from collect()

    def around(self, app: Any) -> Any:
        """Returns an ASGI app that measures another one; wrap the gate, to count its refusals."""

        async def measured(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            found = TABLE.find(scope["method"], path_of(scope))
            route = "other" if found is None else f"{scope['method']} {found.path}"
            received, sent = self.received.labels(route), self.sent.labels(route)
            began, status = time.perf_counter(), 499  # the client disconnected before a response

            async def counted_receive() -> Any:
                message = await receive()
                received.inc(len(message.get("body", b"")))
                return message

            async def counted_send(message: Any) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                    self.first.labels(route).observe(time.perf_counter() - began)
                sent.inc(len(message.get("body", b"")))
                await send(message)

            with self.in_flight.labels(route).track_inprogress():
                try:
                    await app(scope, counted_receive, counted_send)
                finally:
                    self.requests.labels(route, str(status)).inc()
                    self.seconds.labels(route, str(status)).observe(time.perf_counter() - began)

        return measured

    def routes(self) -> list[Route]:
        """Returns the routes of metrics, health, readiness and state."""

        async def metrics(_: Request) -> Response:
            text = await run_in_threadpool(generate_latest, self.registry)
            return Response(text, media_type=CONTENT_TYPE_LATEST)

        async def health(_: Request) -> Response:
            return _json({"status": "ok"})

        async def ready(_: Request) -> Response:
            found = self._readiness()
            return _json(found, 200 if found["status"] == "ready" else 503)

        async def state(_: Request) -> Response:
            return await run_in_threadpool(lambda: _json(self._state()))

        shown = {"/metrics": metrics, "/health": health, "/ready": ready, "/debug/state": state}
        return [Route(path, endpoint, methods=["GET"]) for path, endpoint in shown.items()]


def monitor_of(server: Server) -> Monitor:
    """Returns the monitor of a server."""
    help = "Seconds that decoding rows waited for training."
    return Monitor(
        lambda: counts("engine", "Counts of the engine.", server.engine.counts),
        lambda: counts("training", "Counts of live training.", server.live.counts),
        lambda: quantiles("decode_gap_seconds", help, list(server.durable.gaps)),
        lambda: device_costs(server.costs),
        lambda: adapters(server.residency, server.weights.names_of),
        skipped_kernels,
        readiness=server.readiness,
        state=lambda: state_of(server),
        registry=server.metrics,
    )


def cost_route(costs: Costs) -> Route:
    """Returns ``GET /admin/costs?by=policy|tenant&tenant=T&limit=N&offset=N``."""

    async def listed(request: Request) -> Response:
        query = query_of(CostsQuery, request)
        if query.by == "tenant" and query.tenant is not None:
            raise UserError("tenant is given with by=tenant: leave one of them out")
        found = await run_in_threadpool(
            lambda: costs.listed(query.by, query.tenant, query.limit + 1, query.offset)
        )
        page = [{query.by: name} | cost.to_json() for name, cost in found.items()]
        return _json({"costs": page[: query.limit], "has_more": len(page) > query.limit})

    return Route("/admin/costs", listed, methods=["GET"])


# collectors


def counts(name: str, help: str, values: Mapping[str, float]) -> Iterator[Metric]:
    """Yields one counter ``mint_NAME_KEY_total`` per key."""
    for key, value in sorted(dict(values).items()):  # a copy: its owner goes on counting
        yield CounterMetricFamily(f"mint_{name}_{key}", help, value=value)


def quantiles(name: str, help: str, seconds: Iterable[float]) -> Iterator[Metric]:
    """Yields the ``QUANTILES`` of durations as a gauge; no series without durations."""
    gauge, ordered = GaugeMetricFamily(f"mint_{name}", help, labels=["quantile"]), sorted(seconds)
    for q in QUANTILES if ordered else ():
        gauge.add_metric([str(q)], ordered[math.ceil(q * len(ordered)) - 1])
    yield gauge


def device_costs(costs: Costs) -> Iterator[Metric]:
    """Yields seconds and tokens since the process started, by tenant and kind of work."""
    by_tenant = sorted(costs.since_start().items())
    for unit, suffix, kinds, help in (
        ("seconds", "s", KINDS, "Device seconds by tenant and kind of work."),
        ("tokens", "tokens", COUNTED, "Tokens processed in these seconds."),
    ):
        counter = CounterMetricFamily(f"mint_device_{unit}", help, labels=["tenant", "kind"])
        for tenant, cost in by_tenant:
            for kind in kinds:
                counter.add_metric([tenant, kind], getattr(cost, f"{kind}_{suffix}"))
        yield counter


def adapters(residency: Residency, names_of: Callable[[str], Iterable[str]]) -> Iterator[Metric]:
    """Yields ``vllm:lora_requests_info``, by which routers send requests to where their adapter is
    loaded. An adapter in a slot counts as running, one that is being loaded as waiting.
    """
    state = residency.state()
    resident = state["resident"]
    waiting = sorted(set(residency.loads.digests()) - set(resident))
    labels = ["running_lora_adapters", "waiting_lora_adapters", "max_lora"]
    help = "Adapters in slots, adapters being loaded, and slots."
    gauge = GaugeMetricFamily("vllm:lora_requests_info", help, labels=labels)
    named = [
        ",".join(name for digest in digests for name in names_of(digest))
        for digests in (resident, waiting)
    ]
    slots = sum(bucket["slots"] for bucket in state["slots"].values())
    gauge.add_metric([*named, str(slots)], time.time())
    yield gauge


def skipped_kernels() -> Iterator[Metric]:
    """Yields the kernels of this platform that were skipped while programs were traced."""
    labels, help = ["op", "implementation", "reason"], "Calls in traced programs served otherwise."
    counter = CounterMetricFamily("mint_kernels_passed_over", help, labels=labels)
    for one in dispatch.passed_over(collections.Counter(), dispatch.platform_here()):
        counter.add_metric([one[label] for label in labels], one["times"])
    yield counter


# ``/debug/state``


def state_of(server: Server) -> dict[str, Any]:
    """Returns the work, the policies and the costs of a server as JSON; call it in a thread."""
    live, engine, policies = server.live, server.engine, _policies(server)

    def order(name: str) -> tuple[int, bool, str]:
        one = policies[name]
        return -one["queued"] - one["sampling"], one["training"] != "slot", name

    shown = sorted(policies, key=order)[:MAX_POLICIES]
    costs = server.costs.of(shown)
    memory = [device.memory_stats() or {} for device in server.base.mesh.local_devices]
    return {
        "base": server.name,
        "fingerprint": server.base.fingerprint,
        "at": time.time(),
        "up_s": round(time.monotonic() - server.started, 1),
        "trouble": server.trouble(),
        "training": {
            "waiting": sum(server.durable.queued().values()),
            "policies": live.places(),
            "slots": live.capacity,
            "host_bytes": live.host_bytes_used,
            "counts": dict(live.counts),
        },
        "sampling": dict(engine.counts),
        "engine": engine.state(),
        "answers": len(server.answers),
        "residency": server.residency.state(),
        "tokens_in_flight": dict(server.quotas.tokens),
        "measured_s": server.costs.measured_s,
        "memory": {
            "rss": psutil.Process().memory_info().rss,
            "devices": [one.get("bytes_in_use") for one in memory],
        },
        "policies": [{"policy": name} | policies[name] | costs[name].to_json() for name in shown],
        "policies_left_out": len(policies) - len(shown),
    }


def _policies(server: Server) -> dict[str, dict[str, Any]]:
    """Returns the places of each policy's training state and nearest revision, and the numbers of
    its queued training requests and samples.
    """
    new = {"tenant": "", "training": "", "serving": "", "queued": 0, "sampling": 0}
    found: dict[str, dict[str, Any]] = collections.defaultdict(new.copy)
    for name, queued in server.durable.queued().items():
        found[name]["queued"] = queued
    for name in server.live.names():
        with contextlib.suppress(UserError):  # it left meanwhile
            found[name] |= {"training": server.live.where(name), "tenant": server.book.owner(name)}
    for digest in server.residency.state()["resident"]:
        found[server.checkpoints.policy_of(digest)]["serving"] = "slot"
    for (tenant, digest), count in server.engine.in_flight().items():
        one = found[server.checkpoints.policy_of(digest or BASE)]
        place = "host" if digest in server.residency.host else "store"
        one["tenant"] = one["tenant"] or tenant
        one["serving"] = one["serving"] or ("slot" if digest is None else place)
        one["sampling"] += count
    return found


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value) + "\n", status, media_type="application/json")
