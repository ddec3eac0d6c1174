"""Serves one base with several engines behind one address: see docs/fleet.md.

Starts Ray, or joins the cluster at ``RAY_ADDRESS``, with an actor for each engine and one for the
front. It prints ``{"listening": true, "url": ...}`` and, when every engine has compiled all of its
programs, ``{"ready": true, "url": ...}``. Ray starts an actor again whose process dies. Everything
acknowledged is in the workdir: the same command continues from there.
"""

import contextlib
import dataclasses
import logging
import os
import queue
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mint_jax import interrupts
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.harness import start, workdir
from mint_jax.harness.options import FleetSettings, ServeSettings
from mint_jax.harness.workdir import WorkdirLock
from mint_jax.recipes import serve

STOP_S = 45.0  # for requests in flight
PERIOD_S = 0.5  # between two looks at the front
STORE_BYTES = 128 << 20  # nothing large goes through Ray
THREADS = 8  # of an actor, for calls that wait


def engine_settings(config: FleetSettings, folder: Path) -> ServeSettings:
    """Returns the settings of each engine's service."""
    same = {field.name: getattr(config, field.name) for field in dataclasses.fields(ServeSettings)}
    own = {"job": "serve", "port": 0, "host": config.engine_host or "127.0.0.1"}
    own |= {"catalog": config.catalog or str(folder / "catalog")}
    # the front encrypts; engines are reached over loopback or a private network
    own |= {"certificate": "", "private_key": "", "behind_tls": bool(config.engine_host)}
    return ServeSettings(**same | own)


def free_port(host: str) -> int:
    """Returns a port that is free now: the front listens there again after a restart."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.bind((host, 0))
        return one.getsockname()[1]


def run(config: FleetSettings, folder: Path) -> dict[str, Any]:
    """Serves until a signal."""
    from mint_jax.service import binding
    from mint_jax.service.keys import Keys

    keys = Keys(Path(config.api_keys)) if config.api_keys else None
    binding.check_binding(config.host, keys, bool(config.certificate) or config.behind_tls)
    binding.check_hosts(config.hosts)
    lock, signals = WorkdirLock(folder), queue.SimpleQueue[int]()
    try:
        workdir.save_config(config, folder)
        with interrupts.grace(STOP_S + interrupts.GRACE_S), _joined(folder.resolve()) as ray:
            for number in interrupts.SIGNALS:
                signal.signal(number, lambda number, _: signals.put(number))
            front, engines = _start(ray, config, folder.resolve())
            stopped_by = _watch(ray, front, signals)
            ending = [one.stop.remote() for one in (front, *engines)]
            ray.wait(ending, num_returns=len(ending), timeout=STOP_S)
    finally:
        lock.release()
    return {"job": "fleet", "stopped_by": stopped_by, "engines": config.engines}


@contextlib.contextmanager
def _joined(folder: Path) -> Iterator[Any]:
    """Yields the module ``ray``, which has joined or started a cluster. Actors' names are of this
    workdir.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports this to its makers
    import ray

    # without "local" Ray joins a cluster that somebody else has started on this machine
    own: dict[str, Any] = {"address": "local", "object_store_memory": STORE_BYTES}
    own |= {"include_dashboard": False}
    if address := os.environ.get("RAY_ADDRESS"):  # nodes have this environment at the same path
        own = {"runtime_env": {"py_executable": sys.executable}}
    space = f"mint_jax-{blake3_of(str(folder).encode())[:16]}"
    try:
        ray.init(namespace=space, log_to_driver=False, logging_level=logging.ERROR, **own)
        yield ray
    except ConnectionError as error:
        raise UserError(
            f"RAY_ADDRESS is {address!r} ({error}); expected 'auto', on a node of a cluster that"
            " runs: start Ray there, or unset the variable to start Ray here"
        ) from None
    finally:
        ray.shutdown()


def _start(ray: Any, config: FleetSettings, folder: Path) -> tuple[Any, list[Any]]:
    """Starts the actors of the front and of the engines."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from mint_jax.fleet.engine import EngineActor
    from mint_jax.fleet.host import FrontActor

    settings, port = engine_settings(config, folder), config.port or free_port(config.host)
    again = {"max_restarts": -1, "max_concurrency": THREADS, "num_cpus": 0}
    needs = {"num_gpus": config.gpus, "scheduling_strategy": "SPREAD"}
    needs |= {"resources": {"TPU": config.tpus}} if config.tpus else {}
    names = [f"e{i}" for i in range(config.engines)]
    folders = folder / "engines"
    engines = [
        ray.remote(EngineActor)
        .options(name=name, **again, **needs)
        .remote(name, settings, folders / name, start.prepare, serve.serve)
        for name in names
    ]
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    front = ray.remote(FrontActor).options(**again, scheduling_strategy=here)
    given = settings.catalog, port, serve.limits_of(config), names, folders
    return front.remote(config, *given), engines


def _watch(ray: Any, front: Any, signals: "queue.SimpleQueue[int]") -> str:
    """Says where the front is and when all engines are ready; returns the signal that ends it."""
    url, said = ray.get(front.url.remote()), False
    serve.say({"listening": True, "url": url})
    while True:
        with contextlib.suppress(queue.Empty):
            return signal.Signals(signals.get(timeout=PERIOD_S)).name
        with contextlib.suppress(ray.exceptions.RayActorError):  # it is started again
            ready, failed = ray.get(front.status.remote())
            if failed:
                raise UserError(f"an engine has ended by itself, {failed}")
            if ready and not said:
                said = True
                serve.say({"ready": True, "url": url})
