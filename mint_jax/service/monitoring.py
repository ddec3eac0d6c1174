"""Server state for operators: Prometheus metrics, health, readiness, state in JSON, and costs.

HTTP metrics are labelled by the route templates of ``endpoints.TABLE`` and ``other``, so that no
client can add a series. Counts that other parts keep are read by collectors when they are scraped.
"""

import collections
import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import prometheus_client as prometheus
import psutil
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mint_jax.errors import UserError
from mint_jax.models.paged import PAGE
from mint_jax.residency.residency import Residency
from mint_jax.service.costs import BASE, COUNTED, KINDS
from mint_jax.service.endpoints import Endpoint
from mint_jax.service.exchange import Reply, Source
from mint_jax.service.server import Server
from mint_jax.service.validation import CostsQuery, query_of
from pallas_kernels import dispatch

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
QUANTILES = (0.5, 0.95, 0.99, 1.0)
MAX_POLICIES = 200  # shown in ``/debug/state``; the busiest first


class HttpMetrics:
    """Metrics of requests, which the gate records, by route template; ``other`` without one."""

    def __init__(self, registry: prometheus.CollectorRegistry):
        def make(kind: Any, name: str, help: str, *labels: str, **more: Any) -> Any:
            return kind(f"mint_http_{name}", help, labels, registry=registry, **more)

        buckets, on = {"buckets": SECONDS}, ("route", "status")
        time_of, count = prometheus.Histogram, prometheus.Counter
        self._seconds = make(time_of, "seconds", "Request to end of response.", *on, **buckets)
        help = "Request to start of response."
        self._first_byte = make(time_of, "first_byte_seconds", help, "route", **buckets)
        self._requests = make(count, "requests", "Completed requests.", *on)
        self._received = make(count, "received_bytes", "Bytes of request bodies.", "route")
        self._sent = make(count, "sent_bytes", "Bytes of response bodies.", "route")
        help = "Requests in flight, long polls left out."
        self.in_flight = make(prometheus.Gauge, "in_flight", help)

    def record(self, endpoint: Endpoint | None, source: Source, reply: Reply, began: float) -> None:
        """Records a request that has ended; ``began`` is on the clock of ``perf_counter``."""
        route = "other" if endpoint is None else f"{endpoint.method} {endpoint.path}"
        status = str(reply.status or 499)  # 499: the client left before a response
        self._requests.labels(route, status).inc()
        self._seconds.labels(route, status).observe(time.perf_counter() - began)
        if reply.first_byte is not None:
            self._first_byte.labels(route).observe(reply.first_byte - began)
        self._received.labels(route).inc(source.bytes)
        self._sent.labels(route).inc(reply.bytes)


class Operators:
    """The handlers of metrics, health, readiness, state and costs of one server."""

    def __init__(self, server: Server):
        self.server = server

    async def metrics(self, _: Request) -> Response:
        text = await run_in_threadpool(prometheus.generate_latest, self.server.metrics)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        found = self.server.readiness()
        return JSONResponse(found, 200 if found["status"] == "ready" else 503)

    async def state(self, _: Request) -> Response:
        return await run_in_threadpool(lambda: JSONResponse(state_of(self.server)))

    async def costs(self, request: Request) -> Response:
        query = query_of(CostsQuery, request)
        if query.by == "tenant" and query.tenant is not None:
            raise UserError("tenant is given with by=tenant: leave one of them out")
        wanted = query.by, query.tenant, query.limit + 1, query.offset
        found = await run_in_threadpool(self.server.costs.listed, *wanted)
        page = [{query.by: name} | cost.to_json() for name, cost in found.items()]
        return JSONResponse({"costs": page[: query.limit], "has_more": len(page) > query.limit})


class PartsCollector(Collector):
    """Metrics that a server's parts keep, read at each scrape."""

    def __init__(self, server: Server):
        self._server = server

    def collect(self) -> Iterator[Metric]:
        server = self._server
        for part, help, counts in (
            ("engine", "Counts of the engine.", server.engine.counts),
            ("training", "Counts of live training.", server.live.counts),
        ):
            for key, value in sorted(dict(counts).items()):  # a copy: its owner goes on counting
                yield _counter(f"mint_{part}_{key}", help, {(): value})
        gaps = {(q,): seconds for q, seconds in gap_quantiles(server).items()}
        help = "Seconds that decoding rows waited for training."
        yield _gauge("mint_decode_gap_seconds", help, gaps, "quantile")
        servers = server, *server.guests.values()
        by_tenant = [one for each in servers for one in each.costs.since_start().items()]
        for unit, suffix, kinds, help in (
            ("seconds", "s", KINDS, "Device seconds by tenant and kind of work."),
            ("tokens", "tokens", COUNTED, "Tokens processed in these seconds."),
        ):
            spent = collections.Counter[tuple[str, str]]()
            for tenant, cost in by_tenant:
                for kind in kinds:
                    spent[tenant, kind] += getattr(cost, f"{kind}_{suffix}")
            yield _counter(f"mint_device_{unit}", help, spent, "tenant", "kind")
        yield from adapters(server.residency, server.weights.names_of)
        yield from load(server.engine.state())
        skipped = dispatch.passed_over(collections.Counter(), dispatch.platform_here())
        labels = "op", "implementation", "reason"
        times = {tuple(one[label] for label in labels): one["times"] for one in skipped}
        help = "Calls in traced programs served otherwise."
        yield _counter("mint_kernels_passed_over", help, times, *labels)


def gap_quantiles(server: Server) -> dict[str, float]:
    """Returns quantiles of the seconds that decoding rows waited for training, if any did."""
    gaps = sorted([*server.durable.gaps])
    return {str(q): gaps[math.ceil(q * len(gaps)) - 1] for q in QUANTILES if gaps}


def adapters(residency: Residency, names_of: Callable[[str], Iterable[str]]) -> Iterator[Metric]:
    """Yields ``vllm:lora_requests_info``, by which routers choose a server (loading is waiting),
    and the gauges of loaded adapters that vLLM's pull request 45411 proposes for it.
    """
    state = residency.state()
    resident = state["resident"]
    waiting = sorted(set(residency.loads.digests()) - set(resident))
    labels = "running_lora_adapters", "waiting_lora_adapters", "max_lora"
    named = [
        ",".join(name for digest in digests for name in names_of(digest))
        for digests in (resident, waiting)
    ]
    slots = sum(bucket["slots"] for bucket in state["slots"].values())
    help, samples = "Adapters in slots, adapters being loaded, and slots.", (*named, str(slots))
    yield _gauge("vllm:lora_requests_info", help, {samples: time.time()}, *labels)
    own = {(name, "gpu", "false"): 1 for digest in resident for name in names_of(digest)}
    labels = "adapter_name", "level", "pinned"
    yield _gauge("vllm:lora_adapter_loaded", "Adapters in slots.", own, *labels)
    for level, count in ("gpu", len(resident)), ("cpu", state["host"]["entries"]):
        name = f"vllm:num_{level}_loaded_lora_adapters"
        yield _gauge(name, "Adapters that are loaded.", {(): count})


def load(state: Mapping[str, Any]) -> Iterator[Metric]:
    """Yields vLLM's metrics of rows and pages (``Engine.state``), which llm-d's scorers read."""
    rows, pages = state["rows"], state["pages"]
    used = 1 - pages["available"] / pages["count"]
    waiting = rows["waiting"] + rows["swapped"]
    for name, help, value in (
        ("num_requests_running", "Rows that are decoded.", rows["running"]),
        ("num_requests_waiting", "Rows that wait for pages or a place.", waiting),
        ("kv_cache_usage_perc", "Share of pages in use, from 0 to 1.", used),
    ):
        yield _gauge(f"vllm:{name}", help, {(): value})
    sizes, labels = {(str(PAGE), str(pages["count"])): 1}, ("block_size", "num_gpu_blocks")
    yield _gauge("vllm:cache_config_info", "Tokens of a page, and pages.", sizes, *labels)


def _family(kind: Any, name: str, help: str, samples: Mapping[Any, float], *labels: str) -> Metric:
    family = kind(name, help, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


_counter = functools.partial(_family, CounterMetricFamily)
_gauge = functools.partial(_family, GaugeMetricFamily)


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
        "guests": sorted(server.guests),
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
