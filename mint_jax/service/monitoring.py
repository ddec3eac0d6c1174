"""Server state for operators: Prometheus metrics, health, readiness, state in JSON, and costs.

HTTP metrics are labelled by the route templates of ``endpoints.TABLE`` and ``other``, so that no
client can add a series. Counts that other parts keep are read by collectors when they are scraped.
"""

import collections
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from mint_jax.service.costs import BASE, COUNTED, KINDS
from mint_jax.service.endpoints import TABLE
from mint_jax.service.exchange import path_of
from mint_jax.service.server import Server
from mint_jax.service.validation import CostsQuery, query_of
from pallas_kernels import dispatch

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
QUANTILES = (0.5, 0.95, 0.99, 1.0)
MAX_POLICIES = 200  # shown in ``/debug/state``; the busiest first


def measured(app: Any, registry: CollectorRegistry) -> Any:
    """Returns an ASGI app that measures another one; wrap the gate, to count its refusals."""

    def make(kind: Any, name: str, help: str, *labels: str, **more: Any) -> Any:
        return kind(f"mint_http_{name}", help, ("route", *labels), registry=registry, **more)

    requests = make(Counter, "requests", "Completed requests.", "status")
    help = "Request to end of response."
    seconds = make(Histogram, "seconds", help, "status", buckets=SECONDS)
    help = "Request to start of response."
    first_byte = make(Histogram, "first_byte_seconds", help, buckets=SECONDS)
    in_flight = make(Gauge, "in_flight", "Requests in flight.")
    received_bytes = make(Counter, "received_bytes", "Bytes of request bodies.")
    sent_bytes = make(Counter, "sent_bytes", "Bytes of response bodies.")

    async def call(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        found = TABLE.find(scope["method"], path_of(scope))
        route = "other" if found is None else f"{scope['method']} {found.path}"
        received, sent = received_bytes.labels(route), sent_bytes.labels(route)
        began, status = time.perf_counter(), "499"  # the client disconnected before a response

        async def counted_receive() -> Any:
            message = await receive()
            received.inc(len(message.get("body", b"")))
            return message

        async def counted_send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                first_byte.labels(route).observe(time.perf_counter() - began)
            sent.inc(len(message.get("body", b"")))
            await send(message)

        with in_flight.labels(route).track_inprogress():
            try:
                await app(scope, counted_receive, counted_send)
            finally:
                requests.labels(route, status).inc()
                seconds.labels(route, status).observe(time.perf_counter() - began)

    return call


def routes(server: Server) -> list[Route]:
    """Returns the routes of metrics, health, readiness, state and costs."""

    async def metrics(_: Request) -> Response:
        text = await run_in_threadpool(generate_latest, server.metrics)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(_: Request) -> Response:
        found = server.readiness()
        return _json(found, 200 if found["status"] == "ready" else 503)

    async def state(_: Request) -> Response:
        return await run_in_threadpool(lambda: _json(state_of(server)))

    async def costs(request: Request) -> Response:
        query = query_of(CostsQuery, request)
        if query.by == "tenant" and query.tenant is not None:
            raise UserError("tenant is given with by=tenant: leave one of them out")
        wanted = query.by, query.tenant, query.limit + 1, query.offset
        found = await run_in_threadpool(server.costs.listed, *wanted)
        page = [{query.by: name} | cost.to_json() for name, cost in found.items()]
        return _json({"costs": page[: query.limit], "has_more": len(page) > query.limit})

    shown: dict[str, Any] = {"/metrics": metrics, "/health": health, "/ready": ready}
    shown |= {"/debug/state": state, "/admin/costs": costs}
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in shown.items()]


class Collector:
    """Metrics that a server's parts keep, collected at each scrape by Prometheus' registry."""

    def __init__(self, server: Server):
        self._server = server

    def collect(self) -> Iterator[Metric]:
        server = self._server
        for part, help, counts in (
            ("engine", "Counts of the engine.", server.engine.counts),
            ("training", "Counts of live training.", server.live.counts),
        ):
            for key, value in sorted(dict(counts).items()):  # a copy: its owner goes on counting
                yield _family(CounterMetricFamily, f"mint_{part}_{key}", help, (), {(): value})
        help, name = "Seconds that decoding rows waited for training.", "mint_decode_gap_seconds"
        quantiles = {(q,): seconds for q, seconds in gap_quantiles(server).items()}
        yield _family(GaugeMetricFamily, name, help, ["quantile"], quantiles)
        by_tenant = sorted(server.costs.since_start().items())
        for unit, suffix, kinds, help in (
            ("seconds", "s", KINDS, "Device seconds by tenant and kind of work."),
            ("tokens", "tokens", COUNTED, "Tokens processed in these seconds."),
        ):
            spent = {
                (tenant, kind): getattr(cost, f"{kind}_{suffix}")
                for tenant, cost in by_tenant
                for kind in kinds
            }
            name, labels = f"mint_device_{unit}", ["tenant", "kind"]
            yield _family(CounterMetricFamily, name, help, labels, spent)
        yield adapters(server.residency, server.weights.names_of)
        skipped = dispatch.passed_over(collections.Counter(), dispatch.platform_here())
        labels = ["op", "implementation", "reason"]
        times = {tuple(one[label] for label in labels): one["times"] for one in skipped}
        help, name = "Calls in traced programs served otherwise.", "mint_kernels_passed_over"
        yield _family(CounterMetricFamily, name, help, labels, times)


def gap_quantiles(server: Server) -> dict[str, float]:
    """Returns quantiles of the seconds that decoding rows waited for training, if any did."""
    gaps = sorted([*server.durable.gaps])
    return {str(q): gaps[math.ceil(q * len(gaps)) - 1] for q in QUANTILES if gaps}


def adapters(residency: Residency, names_of: Callable[[str], Iterable[str]]) -> Metric:
    """Returns ``vllm:lora_requests_info``, by which routers choose a server: loading is waiting."""
    state = residency.state()
    resident = state["resident"]
    waiting = sorted(set(residency.loads.digests()) - set(resident))
    labels = ["running_lora_adapters", "waiting_lora_adapters", "max_lora"]
    help = "Adapters in slots, adapters being loaded, and slots."
    named = [
        ",".join(name for digest in digests for name in names_of(digest))
        for digests in (resident, waiting)
    ]
    slots = sum(bucket["slots"] for bucket in state["slots"].values())
    samples = {(*named, str(slots)): time.time()}
    return _family(GaugeMetricFamily, "vllm:lora_requests_info", help, labels, samples)


def _family(
    kind: Any, name: str, help: str, labels: Sequence[str], samples: Mapping[Any, float]
) -> Metric:
    family = kind(name, help, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


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
            "gap_s": gap_quantiles(server),
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
    """Returns places of training state and revision, and queued requests, by policy."""
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
        one["tenant"] = one["tenant"] or tenant
        one["serving"] = one["serving"] or (
            "slot" if digest is None else "host" if digest in server.residency.host else "store"
        )
        one["sampling"] += count
    return found


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value) + "\n", status, media_type="application/json")
