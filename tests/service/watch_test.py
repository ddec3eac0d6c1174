"""Metrics, health and state of a server."""

import asyncio
import collections
import re

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from mint_jax.errors import UserError
from mint_jax.residency.metrics import Metrics
from mint_jax.service.gate import Gate, Limits
from mint_jax.service.kernel_metrics import KernelMetrics
from mint_jax.service.keys import Keys, add
from mint_jax.service.watch import Source, Watch, gaps_of
from pallas_kernels import dispatch


def ask(app, *requests):
    async def all_of_them():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            return [await client.request(method, path, **more) for method, path, more in requests]

    return asyncio.run(all_of_them())


def values(text):
    """Each series of an exposition, which has to parse."""
    return {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


async def _answer(request):
    return Response(await request.body())


async def _streamed(_):
    async def parts():
        for _ in range(5):
            yield b"12345"

    return StreamingResponse(parts())


def served(watch, keys=None):
    routes = [
        Route("/api/v1/asample", _answer, methods=["POST"]),
        Route("/v1/models/{name:path}", _streamed),
        *watch.routes(),
    ]
    return watch.around(Gate(Starlette(routes=routes), keys))


def test_kernels_that_were_passed_over_are_counted_with_their_reason(monkeypatch):
    mine, others = (
        dispatch.Fall("slot_lora", "cpu", "cpu", 'rows are "bfloat16"'),
        dispatch.Fall("op", "x", "tpu", "no"),
    )
    fallen = collections.Counter({mine: 3, others: 1})
    monkeypatch.setattr(dispatch, "fallen", fallen)
    registry = CollectorRegistry()
    registry.register(KernelMetrics())
    series = (
        "mint_kernels_passed_over_total",
        ("implementation", "cpu"),
        ("op", "slot_lora"),
        ("reason", 'rows are "bfloat16"'),
    )
    assert values(generate_latest(registry).decode()) == {series: 3}


def test_requests_are_counted_by_template_and_status(tmp_path):
    _, secret = add(tmp_path, "alice", ["sample", "read", "admin"])
    watch = Watch()
    app = served(watch, Keys(tmp_path))
    key = {"headers": {"x-api-key": secret}}
    asked = [("POST", "/api/v1/asample", {"content": b"x" * 100, **key})] * 3 + [
        ("POST", "/api/v1/asample", {"content": b"x" * 7})
    ]
    asked += [("GET", f"/v1/models/tinker://{i}/sampler_weights/x", key) for i in range(4)] + [
        ("GET", f"/no/{i}", key) for i in range(20)
    ]
    ask(app, *asked)
    [got] = ask(app, ("GET", "/metrics", key))
    assert got.headers["content-type"].startswith("text/plain; version=")
    found = values(got.text)
    sample, models = ("route", "POST /api/v1/asample"), ("route", "GET /v1/models/{name:path}")
    assert found["mint_http_requests_total", sample, ("status", "200")] == 3
    assert found["mint_http_requests_total", sample, ("status", "401")] == 1
    assert found["mint_http_requests_total", models, ("status", "200")] == 4
    assert found["mint_http_requests_total", ("route", "other"), ("status", "404")] == 20
    assert found["mint_http_seconds_count", models, ("status", "200")] == 4
    assert found["mint_http_first_byte_seconds_count", models] == 4
    assert found["mint_http_received_bytes_total", sample] == 307
    assert found["mint_http_sent_bytes_total", models] == 100
    assert found["mint_http_in_flight", sample] == 0
    assert found["mint_http_in_flight", ("route", "GET /metrics")] == 1


def test_no_request_adds_a_series_of_its_own(rng):
    watch = Watch()
    app = served(watch)
    ask(app, *[("GET", f"/{'/'.join(map(str, rng.integers(0, 9, 4)))}", {}) for _ in range(5)])
    [before] = ask(app, ("GET", "/metrics", {}))
    ask(
        app,
        *[
            (
                "PATCH",
                f"/api/v1/{rng.integers(1 << 40)}?x={rng.integers(99)}",
                {"headers": {"x-request-id": "a"}},
            )
            for _ in range(50)
        ],
    )
    [after] = ask(app, ("GET", "/metrics", {}))
    names = {tuple(key) for key in values(after.text)}
    assert {
        key
        for key in names - {tuple(key) for key in values(before.text)}
        if "GET /metrics" not in str(key)
    } == set()


def test_a_client_that_left_is_counted():
    watch = Watch()

    async def leaves():
        async def receive():
            return {"type": "http.disconnect"}

        async def send(_):
            raise AssertionError("nobody is there")

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/api/v1/asample",
            "headers": [(b"host", b"localhost")],
            "query_string": b"",
        }
        await served(watch)(scope, receive, send)

    asyncio.run(leaves())
    assert (
        watch.registry.get_sample_value(
            "mint_http_requests_total", {"route": "POST /api/v1/asample", "status": "499"}
        )
        == 1
    )


def test_what_others_count_is_shown_as_it_is_now():
    counts, seconds, gaps = (
        collections.Counter(prefills=3),
        {"alice": 1.5},
        collections.deque([0.1] * 98 + [0.2, 7.0]),
    )
    registry = CollectorRegistry()
    residency = Metrics(registry)
    watch = Watch(
        [
            Source("engine", "counter", "What the engine did.", lambda: counts),
            Source(
                "device_seconds", "counter", "Seconds of the device.", lambda: seconds, "tenant"
            ),
            Source("futures", "gauge", "Requests not settled.", lambda: {"waiting": 2}),
            gaps_of("loop_gap_seconds", "Rows that decode waited.", lambda: list(gaps)),
        ],
        registry=registry,
    )
    app = served(watch)
    residency.joined.inc(4)
    counts["prefills"] += 1
    counts["decodes"] += 1
    [got] = ask(app, ("GET", "/metrics", {}))
    found = values(got.text)
    assert found[("mint_engine_prefills_total",)] == 4
    assert found[("mint_engine_decodes_total",)] == 1
    assert found["mint_device_seconds_total", ("tenant", "alice")] == 1.5
    assert found[("mint_futures_waiting",)] == 2
    assert found[("mint_residency_joined_total",)] == 4
    assert [
        found["mint_loop_gap_seconds", ("quantile", q)] for q in ("0.5", "0.95", "0.99", "1.0")
    ] == [0.1, 0.1, 0.2, 7.0]
    gaps.clear()
    [got] = ask(app, ("GET", "/metrics", {}))
    assert not re.search("^mint_loop_gap_seconds{", got.text, re.MULTILINE)


def test_a_source_that_is_wrong_is_told():
    with pytest.raises(UserError, match="counter, gauge"):
        Source("a", "histogram", "", dict)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="letters, digits"):
        Source("a-b", "gauge", "", dict)


def test_health_readiness_and_state():
    reason = "ready"
    watch = Watch(ready=lambda: {"status": reason}, state=lambda: {"rows": [1, 2]})
    app = served(watch)
    asked = [("GET", path, {}) for path in ("/health", "/ready", "/debug/state")]
    health, ready, state = ask(app, *asked)
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
    assert state.json() == {"rows": [1, 2]}
    reason = "the base is being loaded"
    health, ready, _ = ask(app, *asked)
    assert health.status_code == 200
    assert (ready.status_code, ready.json()) == (503, {"status": reason})


def test_health_is_for_everybody_and_answers_under_full_load(tmp_path):
    _, secret = add(tmp_path, "alice", ["admin"])
    watch = Watch()
    gate = Gate(Starlette(routes=watch.routes()), Keys(tmp_path), Limits(total=1))
    gate.in_flight["bob"] += 1
    app = watch.around(gate)
    key = {"headers": {"authorization": f"Bearer {secret}"}}
    got = ask(
        app,
        ("GET", "/health", {}),
        ("GET", "/ready", {}),
        ("GET", "/metrics", {}),
        ("GET", "/metrics", key),
        ("GET", "/debug/state", key),
    )
    assert [answer.status_code for answer in got] == [200, 200, 401, 429, 429]
