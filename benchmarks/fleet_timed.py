"""MinT's row on timed engines behind the product's front, the same row simulated, and the same
engines behind Ray Serve, with its own router for multiplexed models and with the fleet's chooser.

Engines are those of ``timed_engines``, here behind HTTP. Front, gate, catalog, chooser, HTTP are
the product's. ``timed_over_simulated`` says what the simulation leaves out.
"""

import asyncio
import contextlib
import functools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from benchmarks import catalog_fill, timing
from benchmarks.fleet_simulation import Ask, Fleet, Service, Traffic
from benchmarks.ray_serve_peer import HEADER, running
from benchmarks.timed_engines import Timed
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.fleet.engine import EngineReport
from mint_jax.fleet.front import Front, make
from mint_jax.fleet.view import FleetEngine, FleetView
from mint_jax.metrics import Progress
from mint_jax.service import pins
from mint_jax.service.gate import Limits

COMPARED = "p50_s", "p95_s", "cold_loads"


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    service = Service(**config.service.to_dict(), slots=config.slots, host=config.host)
    traffic = Traffic(**config.row)
    plan = catalog_fill.Plan(traffic.names, 1, min(traffic.names, 512), config.seed)
    names = ("timed", "simulated", *(("ray_serve", "chooser") if config.ray_serve else ()))
    sides: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=workdir) as folder:
        catalog_fill.fill(Path(folder), plan)
        with catalog_fill.open_catalog(Path(folder)) as catalog:
            for seed in range(config.seed, config.seed + config.n):
                row = _timed(config, service, traffic, catalog, plan, seed)
                sides["timed"].append(asyncio.run(row))
                fleet = Fleet(service, config.engines, config.report_s, seed)
                sides["simulated"].append(fleet.run("chooser", traffic, seed))
                for name in names[2:]:
                    with running(service, config.engines, name == "chooser") as url:
                        sides[name].append(_ray_serve(url, traffic, plan, seed))
    report: dict[str, Any] = {"engines": config.engines, "requests": traffic.requests}
    for name in ("errors", *COMPARED):
        taken = {side: [one[name] for one in found] for side, found in sides.items()}
        report[name] = timing.medians_of(taken)
        if name in COMPARED:
            pairs = [("timed", "simulated"), ("timed", "ray_serve"), ("chooser", "ray_serve")]
            for one, other in pairs[: len(names) - 1]:
                report[name][f"{one}_over_{other}"] = timing.ratio(taken, one, other)
    return report


async def _answer(timed: Timed, i: int, scope: Any, receive: Any, send: Any) -> None:
    """Answers one request of engine ``i``, as an ASGI application."""
    header = Headers(scope=scope).get(pins.HEADER)
    pin, body = pins.split(header, (await receive())["body"])
    assert pin is not None
    ask = json.loads(body)
    # By the digest: the front looks for it in reports. By the name 64 engines loaded 15 % more.
    wait = await timed.serve(i, Ask(ask["seed"], pin.revision, ask["max_tokens"]))
    headers = {"retry-after-ms": str(int(1e3 * wait) + 1)} if wait else {}
    await JSONResponse({}, 429 if wait else 200, headers)(scope, receive, send)


async def _stays(home: str, here: bool) -> None:
    raise AssertionError(f"no engine is ever gone, {home} is")


async def _timed(
    config: Any,
    service: Service,
    traffic: Traffic,
    catalog: Catalog,
    plan: catalog_fill.Plan,
    seed: int,
) -> dict[str, Any]:
    """Returns shares, seconds and counts of the row on timed engines."""
    timed = Timed(service, config.engines)
    async with contextlib.AsyncExitStack() as serving:
        engines = []
        for i in range(config.engines):
            app = _served(functools.partial(_answer, timed, i))
            url = await serving.enter_async_context(app)
            report = functools.partial(_report, timed, i, url)
            engines.append(FleetEngine(f"e{i}", report, lambda digest: None, _stays))
        view = FleetView(engines)
        front = Front(view, catalog, CollectorRegistry())
        await serving.enter_async_context(view.watching())
        limits = Limits(tenant=1 << 20, total=1 << 20)
        url = await serving.enter_async_context(_served(make(front, keys=None, limits=limits)))
        await view.wait(lambda: len(view.up()) == config.engines, 60.0)
        row = await _clients(url, traffic, plan, seed)
    return row | {"cold_loads": sum(one.cold for one in timed.engines)}


def _ray_serve(url: str, traffic: Traffic, plan: catalog_fill.Plan, seed: int) -> dict[str, Any]:
    """Returns the same of Ray Serve."""
    cold = dict[str, int]()

    def read(body: bytes) -> None:
        cold.update(json.loads(body))

    row = asyncio.run(_clients(url, traffic, plan, seed, read))
    return row | {"cold_loads": sum(cold.values())}


async def _report(timed: Timed, i: int, url: str) -> EngineReport:
    return timed.report(i, url)


async def _clients(
    url: str,
    traffic: Traffic,
    plan: catalog_fill.Plan,
    seed: int,
    read: Callable[[bytes], object] = bytes,
) -> dict[str, Any]:
    """Sends all requests, the simulation's ones; returns shares and seconds. ``read`` gets the
    bodies of the answers.
    """
    _, asks = traffic.asks(seed)
    progress, seconds, errors, left = Progress("row", len(asks)), dict[int, float](), 0, iter(asks)
    unlimited = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(None)}
    async with aiohttp.ClientSession(**unlimited) as client:

        async def go_on() -> None:
            nonlocal errors
            for ask in left:
                name = plan.policy(int(ask.digest, 16))
                body = {"model": name, "max_tokens": ask.tokens, "seed": ask.number}
                began = time.monotonic()
                post = client.post(f"{url}/v1/completions", json=body, headers={HEADER: name})
                async with post as answer:
                    read(await answer.read())
                errors += answer.status != 200 and ask.number >= traffic.prewarm
                seconds[ask.number] = time.monotonic() - began
                if len(seconds) % 100 == 0:
                    progress.update(len(seconds), f"{errors} errors")

        await asyncio.gather(*(go_on() for _ in range(traffic.concurrency)))
    measured = [s for number, s in seconds.items() if number >= traffic.prewarm]
    return {
        "errors": errors / traffic.requests,
        "p50_s": float(np.quantile(measured, 0.5)),
        "p95_s": float(np.quantile(measured, 0.95)),
    }


@contextlib.asynccontextmanager
async def _served(app: Any) -> AsyncIterator[str]:
    """Yields the URL of an ASGI application on loopback."""
    options = {"log_config": None, "access_log": False, "ws": "none", "lifespan": "off"}
    options["interface"] = "asgi3"  # a partial function does not say so
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, backlog=2048, **options))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
