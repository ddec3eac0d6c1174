"""Metrics, health and state of a server."""

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from mint_jax.service import endpoints, monitoring
from mint_jax.service.gate import Gate, Limits
from mint_jax.service.keys import Keys, add
from tests.service.gate_test import ask


def series(app, **headers):
    """Returns the value of each series of ``/metrics``, which must parse."""
    got = ask(app, "GET", "/metrics", headers=headers)
    assert got.headers["content-type"].startswith("text/plain; version=")
    return {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(got.text)
        for s in family.samples
    }


def app_of(keys=None, limits=None):
    ready = {"status": "ready"}
    server: Any = SimpleNamespace(metrics=CollectorRegistry(), readiness=lambda: ready)

    async def echo(request):
        return Response(await request.body())

    async def streamed(_):
        return StreamingResponse(iter([b"12345"] * 5))

    handlers = SimpleNamespace(openapi=echo), monitoring.Operators(server)
    routes = endpoints.routes(endpoints.operators(), *handlers)
    routes.append(Route("/api/v1/asample", echo, methods=["POST"]))
    routes.append(Route("/v1/models/{name:path}", streamed))
    metrics = monitoring.HttpMetrics(server.metrics)
    return Gate(Starlette(routes=routes), keys, limits, metrics=metrics)


def test_requests_are_counted_by_template_and_status(tmp_path, rng):
    _, secret = add(tmp_path, "alice", ["sample", "read", "admin"])
    app = app_of(Keys(tmp_path))
    key = {"x-api-key": secret}
    for _ in range(3):
        ask(app, "POST", "/api/v1/asample", content=b"x" * 100, headers=key)
    ask(app, "POST", "/api/v1/asample", content=b"x" * 7)
    for method, path in ("GET", "/no"), ("PATCH", "/api/v1/no"):
        ask(app, method, path, headers=key)
    for i in range(4):
        ask(app, "GET", f"/v1/models/tinker://{i}/sampler_weights/x", headers=key)
    found = series(app, **key)
    sample, models = ("route", "POST /api/v1/asample"), ("route", "GET /v1/models/{name:path}")
    assert found["mint_http_requests_total", sample, ("status", "200")] == 3
    assert found["mint_http_requests_total", sample, ("status", "401")] == 1
    assert found["mint_http_requests_total", models, ("status", "200")] == 4
    assert found["mint_http_requests_total", ("route", "other"), ("status", "404")] == 2
    assert found["mint_http_seconds_count", models, ("status", "200")] == 4
    assert found["mint_http_first_byte_seconds_count", models] == 4
    assert found["mint_http_received_bytes_total", sample] == 307
    assert found["mint_http_sent_bytes_total", models] == 100
    for _ in range(20):
        path = f"/{rng.integers(1 << 40)}?x={rng.integers(99)}"
        ask(app, "GET", path, headers=key | {"x-request-id": "a"})
    more = series(app, **key).keys() - found.keys()
    assert all("GET /metrics" in str(one) for one in more), "no client adds a series"


def test_health_responds_under_full_load(tmp_path):
    _, secret = add(tmp_path, "alice", ["admin"])
    app = app_of(Keys(tmp_path), limits=Limits(total=1))
    app.in_flight["bob"] += 1
    key = {"authorization": f"Bearer {secret}"}
    for path, headers, status in (
        ("/health", {}, 200),
        ("/ready", {}, 200),
        ("/metrics", {}, 401),
        ("/metrics", key, 429),
    ):
        assert ask(app, "GET", path, headers=headers).status_code == status
