"""Server state for operators: Prometheus metrics, whether it lives, whether it is ready, and
its state in JSON.

Routes are labelled by their templates in ``endpoints.TABLE`` and ``other``, so that no client can
add a series. Counts of other parts are read on request: a ``Source`` is a function, and
nothing is copied between."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

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

from mint_jax.errors import UserError, choice
from mint_jax.service.endpoints import TABLE, Table
from mint_jax.service.exchange import path_of

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
QUANTILES = (0.5, 0.95, 0.99, 1.0)


@dataclasses.dataclass(frozen=True)
class Source:
    """Numbers that another part of the server keeps.

    Attributes:
        name: of the metric, behind ``mint_``; a counter's gets ``_total``.
        read: gives the numbers by key, from any thread; a counter's only grow.
        label: of which the keys are values: one series for each, hence of keys that are few. Empty:
            each key is a metric of its own, ``mint_<name>_<key>``.
    """

    name: str
    kind: Literal["counter", "gauge"]
    what: str
    read: Callable[[], Mapping[str, float]]
    label: str = ""

    def __post_init__(self):
        if self.kind not in ("counter", "gauge"):
            raise choice(f"kind of source {self.name}", self.kind, ("counter", "gauge"))
        if not self.name.isidentifier():
            raise UserError(f"a source's name is {self.name!r}; expected letters, digits and '_'")

    def metrics(self) -> Iterator[Metric]:
        family = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        values = dict(self.read())  # in one step: its owner goes on counting
        if self.label:
            metric = family(f"mint_{self.name}", self.what, labels=[self.label])
            for key, value in sorted(values.items()):
                metric.add_metric([key], value)
            yield metric
            return
        for key, value in sorted(values.items()):
            yield family(f"mint_{self.name}_{key}", self.what, value=value)


def gaps_of(name: str, what: str, seconds: Callable[[], Iterable[float]]) -> Source:
    """Quantiles of the last durations, as gauges: half, 95 %, 99 % and all of them are not
    longer. None where there are none.

    Args:
        seconds: gives them, in any order; ``lambda: list(loop.gaps)``.
    """

    def read() -> dict[str, float]:
        found = sorted(seconds())
        return {str(q): found[math.ceil(q * len(found)) - 1] for q in QUANTILES} if found else {}

    return Source(name, "gauge", what, read, "quantile")


class _Sources:
    """Sources as a collector of Prometheus."""

    def __init__(self, sources: Iterable[Source]):
        self.sources = list(sources)

    def describe(self) -> list[Metric]:
        """Nothing: keys may appear later, so names are not checked beforehand."""
        return []

    def collect(self) -> Iterator[Metric]:
        for source in self.sources:
            yield from source.metrics()


class Watch:
    """The registry of a server's metrics and the routes that show it.

    Args:
        sources: what else is shown.
        ready: what ``/ready`` answers: 200 where its ``status`` is ``ready``, else 503.
        state: for ``/debug/state``: what can be written as JSON, called in a thread.
        registry: where metrics are registered; give the same one to ``residency.metrics.Metrics``
            and both are shown as one.
        table: the templates by which requests are labelled.
    """

    def __init__(
        self,
        sources: Iterable[Source] = (),
        ready: Callable[[], dict[str, Any]] = lambda: {"status": "ready"},
        state: Callable[[], Any] = dict,
        registry: CollectorRegistry | None = None,
        table: Table = TABLE,
    ):
        self.registry, self._ready, self._state, self.table = (
            registry or CollectorRegistry(),
            ready,
            state,
            table,
        )
        self.registry.register(_Sources(sources))
        labels = ["route", "status"]
        self.requests = Counter(
            "mint_http_requests", "Requests answered.", labels, registry=self.registry
        )
        self.seconds = Histogram(
            "mint_http_seconds",
            "Request to end of answer.",
            labels,
            buckets=SECONDS,
            registry=self.registry,
        )
        self.first_seconds = Histogram(
            "mint_http_first_byte_seconds",
            "Request to start of answer.",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "mint_http_in_flight", "Requests not answered.", ["route"], registry=self.registry
        )
        self.received = Counter(
            "mint_http_received_bytes",
            "Bytes of requests' bodies.",
            ["route"],
            registry=self.registry,
        )
        self.sent = Counter(
            "mint_http_sent_bytes", "Bytes of answers' bodies.", ["route"], registry=self.registry
        )

    def around(self, app: Any) -> Any:
        """An ASGI app that counts what passes; to be put around the gate, so that refusals are
        counted.
        """

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            found = self.table.find(scope["method"], path_of(scope))
            route = "other" if found is None else f"{scope['method']} {found.path}"
            began, status = time.perf_counter(), 0
            received, sent, first = (
                self.received.labels(route),
                self.sent.labels(route),
                self.first_seconds.labels(route),
            )

            async def counted_receive() -> Any:
                message = await receive()
                received.inc(len(message.get("body", b"")))
                return message

            async def counted_send(message: Any) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                    first.observe(time.perf_counter() - began)
                else:
                    sent.inc(len(message.get("body", b"")))
                await send(message)

            with self.in_flight.labels(route).track_inprogress():
                try:
                    await app(scope, counted_receive, counted_send)
                finally:
                    # 499: the client left before there was an answer
                    labels = (route, str(status or 499))
                    self.requests.labels(*labels).inc()
                    self.seconds.labels(*labels).observe(time.perf_counter() - began)

        return watched

    def routes(self) -> list[Route]:
        """``/metrics``, ``/health`` (the process lives), ``/ready`` (503 and why, while it is not)
        and ``/debug/state``.
        """

        async def metrics(_: Request) -> Response:
            return Response(
                await run_in_threadpool(generate_latest, self.registry),
                media_type=CONTENT_TYPE_LATEST,
            )

        async def health(_: Request) -> Response:
            return _json({"status": "ok"})

        async def ready(_: Request) -> Response:
            found = self._ready()
            return _json(found, 200 if found["status"] == "ready" else 503)

        async def state(_: Request) -> Response:
            return await run_in_threadpool(lambda: _json(self._state()))

        shown = {"/metrics": metrics, "/health": health, "/ready": ready, "/debug/state": state}
        return [Route(path, endpoint, methods=["GET"]) for path, endpoint in shown.items()]


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value) + "\n", status, media_type="application/json")
