"""The chooser as a request router of Ray Serve, in a real one: three replicas of a deployment."""

import asyncio
import collections
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from benchmarks.postgres_server import free_port
from benchmarks.ray_serve_peer import HEADER
from mint_jax import stamp
from mint_jax.fleet.chooser import BOUND, homes_of
from mint_jax.fleet.serve_router import RevisionRouter
from tests.docs_commands_test import blocks

DIGESTS = [f"{k:016x}" for k in range(12)]


@pytest.fixture(scope="module")
def url():
    import ray
    from ray import serve
    from starlette.requests import Request

    class Replica:
        def __init__(self) -> None:
            self.slots: set[str] = set()

        async def __call__(self, request: Request) -> dict:
            if digest := serve.get_multiplexed_model_id():
                self.slots.add(digest)
            await asyncio.sleep(float(request.query_params.get("seconds", 0)))
            return {"name": serve.get_replica_context().replica_id.unique_id, "pid": os.getpid()}

        def record_routing_stats(self) -> dict:
            return {"rows": 1, "load_s": 1.0, "slots": frozenset(self.slots)}

    environment = {"env_vars": {"PYTHONPATH": str(stamp.ROOT)}}
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_raylet_start_wait_time_s", "300")
    ray.init("local", num_cpus=3, include_dashboard=False, runtime_env=environment)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": (port := free_port())})
        page: dict = {}
        [code] = [text for kind, text in blocks("docs/fleet.md", {}) if kind == "python"]
        exec(code, page)
        deployment = serve.deployment(
            Replica,
            num_replicas=3,
            max_ongoing_requests=100,
            ray_actor_options={"num_cpus": 0},
            request_router_config=page["router"],
        )
        serve.run(deployment.bind())
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        patch.undo()


async def asked(url: str, digests: list[str | None], seconds: float = 0.0) -> list[dict]:
    """Sends requests at once; returns the answers."""
    async with httpx.AsyncClient(base_url=url, timeout=120, params={"seconds": seconds}) as client:
        calls = (client.get("/", headers={HEADER: one} if one else {}) for one in digests)
        answers = await asyncio.gather(*calls)
    return [answer.raise_for_status().json() for answer in answers]


def test_an_idle_replicas_report_is_never_old(monkeypatch):
    """Its adapters count as loaded an hour later, until its report changes."""
    own = DeploymentID("adapters", "app")
    stats = {"rows": 1, "load_s": 1.0, "slots": frozenset(DIGESTS)}
    replicas: Any = [
        SimpleNamespace(replica_id=ReplicaID(name, own), routing_stats=stats if name == "b" else {})
        for name in "abc"
    ]

    async def order() -> None:
        router = RevisionRouter(own, DeploymentHandleSource.REPLICA)
        monkeypatch.setattr(router, "_probe_queue_lens", nothing)
        router.update_replicas(replicas)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 3600)

        def etas(digest: str) -> dict[str, float]:
            return {one.engine: one.eta_s for one in router._view.choices(digest, 0)}

        for digest in DIGESTS:
            assert etas(digest)["b"] == 0 < min(etas(digest)["a"], etas(digest)["c"])
        replicas[1].routing_stats = stats | {"slots": frozenset()}
        router.update_replicas(replicas)
        assert etas(DIGESTS[0])["b"] == 1
        router.update_replicas(replicas[:1])
        assert list(etas(DIGESTS[0])) == ["a"]

    async def nothing(*_: object) -> list:
        return []

    asyncio.run(order())


@pytest.mark.long
def test_a_digest_goes_to_its_home_and_the_base_to_all_until_a_replica_dies(url):
    names = {one["name"] for one in asyncio.run(asked(url, [None] * 30, 0.2))}
    assert len(names) == 3
    time.sleep(2)  # those of before have ended, and replicas have reported
    at_home = 0
    for digest in DIGESTS * 3:
        [answer] = asyncio.run(asked(url, [digest]))
        at_home += answer["name"] == homes_of(digest, tuple(names), 1)[0]
    assert at_home >= 30, "of 36; a busy machine reports late, and a digest goes elsewhere"
    spread = collections.Counter(one["name"] for one in asyncio.run(asked(url, [None] * 30, 1.0)))
    assert max(spread.values()) <= BOUND * 10 + 2, "those in flight count"
    crowd = collections.Counter(
        one["name"] for one in asyncio.run(asked(url, DIGESTS[:1] * 30, 1.0))
    )
    assert len(crowd) > 1, "a crowded home is passed over"
    os.kill(answer["pid"], signal.SIGKILL)
    again = asyncio.run(asked(url, DIGESTS * 3))  # raises if one was lost
    assert answer["name"] not in {one["name"] for one in again}
