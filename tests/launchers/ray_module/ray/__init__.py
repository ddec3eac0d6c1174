"""The calls of Ray that ``launch/ray_job.py`` makes, with actors as threads of the driver;
``RAY_NODES`` is the number of nodes.
"""

import os
import sys
import time
import types
from concurrent import futures
from typing import Any


def init() -> None: ...


def nodes() -> list[dict[str, Any]]:
    one = {"Alive": True, "Resources": {"CPU": 1.0}}
    return [
        one | {"NodeManagerAddress": f"10.0.0.{i}"} for i in range(int(os.environ["RAY_NODES"]))
    ]


class _Actor:
    def __init__(self, made: Any, threads: int):
        self._made, self._threads = made, futures.ThreadPoolExecutor(threads)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._made, name)
        return types.SimpleNamespace(remote=lambda *args: self._threads.submit(method, *args))


class remote:
    def __init__(self, kind: type):
        self._kind, self._threads = kind, 1

    def options(self, *, max_concurrency: int, **taken: Any) -> "remote":
        assert set(taken) == {"num_cpus", "num_gpus", "resources", "scheduling_strategy"}
        self._threads = max_concurrency
        return self

    def remote(self) -> _Actor:
        return _Actor(self._kind(), self._threads)


def get(ref: futures.Future, timeout: float | None = None) -> Any:
    return ref.result(timeout)


def wait(refs: list[futures.Future], *, timeout: float) -> tuple[list, list]:
    done, rest = futures.wait(refs, timeout, return_when=futures.FIRST_COMPLETED)
    return list(done)[:1], [*list(done)[1:], *rest]


class _Group:
    def __init__(self, bundles: list[dict[str, float]], *, strategy: str):
        assert strategy == "STRICT_SPREAD"
        self._fits = len(bundles) <= int(os.environ["RAY_NODES"])

    def wait(self, timeout_seconds: float) -> bool:
        time.sleep(0 if self._fits else timeout_seconds)
        return self._fits


def _module(name: str, **names: Any) -> Any:
    sys.modules[f"ray.{name}"] = module = types.ModuleType(f"ray.{name}")
    vars(module).update(names)
    return module


def _strategy(group: object, *, placement_group_bundle_index: int) -> None: ...


exceptions = _module("exceptions", RayError=type("RayError", (Exception,), {}))
util = _module("util", get_node_ip_address=lambda: "127.0.0.1", __path__=[])
_module("util.placement_group", placement_group=_Group, remove_placement_group=lambda group: None)
_module("util.scheduling_strategies", PlacementGroupSchedulingStrategy=_strategy)
