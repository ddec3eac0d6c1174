"""Timed engines behind Ray Serve: with its own router for multiplexed models, or with the fleet's
chooser in its place.

A replica is one engine of ``timed_engines``. Its models are names, as many as it has slots. Ray
Serve knows which ones a replica has, and routes by the name in a request's header, as for LoRA.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.requests import Request
from starlette.responses import JSONResponse

from benchmarks.fleet_simulation import Ask, Service
from benchmarks.postgres_server import free_port
from benchmarks.timed_engines import Timed
from mint_jax import stamp

HEADER = "serve_multiplexed_model_id"
STATS_S = 1.0  # between two reports of a replica
STATS = ("rows", "running", "waiting", "loads", "load_s", "slots", "host", "places")


def _replica(service: Service) -> Any:
    class Replica:
        """An engine; its answers say how many loads from storage it has had."""

        def __init__(self) -> None:
            self.timed = Timed(service, 1)

        @serve.multiplexed(max_num_models_per_replica=service.slots)
        async def model(self, name: str) -> str:
            return name  # the engine loads it

        async def __call__(self, request: Request) -> JSONResponse:
            body = json.loads(await request.body())
            name = await self.model(serve.get_multiplexed_model_id())  # type: ignore[operator]
            wait = await self.timed.serve(0, Ask(body["seed"], name, body["max_tokens"]))
            replica = serve.get_replica_context().replica_id.unique_id
            answer = {replica: self.timed.engines[0].cold}
            return JSONResponse(answer, 429 if wait else 200)

        def record_routing_stats(self) -> dict[str, Any]:
            report = self.timed.report(0, "")
            return {name: getattr(report, name) for name in STATS}

    return Replica


@contextlib.contextmanager
def running(service: Service, count: int, chooser: bool = False) -> Iterator[str]:
    """Yields the URL of ``count`` replicas. No replica refuses what its engine would take.

    Args:
        chooser: the fleet's chooser routes.
    """
    routing: dict[str, Any] = {"request_routing_stats_period_s": STATS_S}
    if chooser:
        routing["request_router_class"] = "mint_jax.fleet.serve_router:RevisionRouter"
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # of a machine that is busy
    environment = {"env_vars": {"PYTHONPATH": str(stamp.ROOT)}}
    ray.init(
        "local",
        num_cpus=count,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env=environment,
    )
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        deployment = serve.deployment(
            _replica(service),
            num_replicas=count,
            max_ongoing_requests=1 << 20,
            ray_actor_options={"num_cpus": 0},
            request_router_config=RequestRouterConfig(**routing),
        )
        serve.run(deployment.bind(), name="timed", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
