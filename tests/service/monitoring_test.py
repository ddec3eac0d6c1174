"""Metrics, health and state of a server."""

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from mint_jax.service import endpoints, monitoring
from mint_jax.service.gate import Gate, Limits
from mint_jax.service.keys import Keys, add


def send(app, *requests):
    """Returns the responses to (method, path, options of the request)."""

    async def all_of_them():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            return [await client.request(method, path, **more) for method, path, more in requests]

    return asyncio.run(all_of_them())


def series(app, **headers):
    """Returns the value of each series of ``/metrics``, which must parse."""
    [got] = send(app, ("GET", "/metrics", {"headers": headers}))
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
    key = {"headers": {"x-api-key": secret}}
    requests = [("POST", "/api/v1/asample", {"content": b"x" * 100, **key})] * 3
    requests += [("POST", "/api/v1/asample", {"content": b"x" * 7})]
    requests += [("GET", f"/v1/models/tinker://{i}/sampler_weights/x", key) for i in range(4)]
    requests += [("GET", "/no", key), ("PATCH", "/api/v1/no", key)]
    send(app, *requests)
    found = series(app, **{"x-api-key": secret})
    sample, models = ("route", "POST /api/v1/asample"), ("route", "GET /v1/models/{name:path}")
    assert found["mint_http_requests_total", sample, ("status", "200")] == 3
    assert found["mint_http_requests_total", sample, ("status", "401")] == 1
    assert found["mint_http_requests_total", models, ("status", "200")] == 4
    assert found["mint_http_requests_total", ("route", "other"), ("status", "404")] == 2
    assert found["mint_http_seconds_count", models, ("status", "200")] == 4
    assert found["mint_http_first_byte_seconds_count", models] == 4
    assert found["mint_http_received_bytes_total", sample] == 307
    assert found["mint_http_sent_bytes_total", models] == 100
    paths = [f"/{rng.integers(1 << 40)}?x={rng.integers(99)}" for _ in range(20)]
    send(
        app, *[("GET", path, {"headers": key["headers"] | {"x-request-id": "a"}}) for path in paths]
    )
    more = series(app, **{"x-api-key": secret}).keys() - found.keys()
    assert all("GET /metrics" in str(one) for one in more), "no client adds a series"


def test_health_responds_under_full_load(tmp_path):
    _, secret = add(tmp_path, "alice", ["admin"])
    app = app_of(Keys(tmp_path), limits=Limits(total=1))
    app.in_flight["bob"] += 1
    key = {"headers": {"authorization": f"Bearer {secret}"}}
    paths = ("/health", {}), ("/ready", {}), ("/metrics", {}), ("/metrics", key)
    got = send(app, *[("GET", *one) for one in paths])
    assert [one.status_code for one in got] == [200, 200, 401, 429]
