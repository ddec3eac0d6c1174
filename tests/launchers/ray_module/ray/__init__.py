"""Ray's calls that ``launch/ray_job.py`` makes, with actors as threads of the driver; ``RAY_NODES``
is how many nodes there are.
"""

import concurrent.futures
import os
from typing import Any

from ray import exceptions as exceptions
from ray import util as util


def init() -> None:
    pass


def nodes() -> list[dict[str, Any]]:
    return [
        {"Alive": True, "NodeManagerAddress": f"10.0.0.{i}", "Resources": {"CPU": 1.0}}
        for i in range(int(os.environ["RAY_NODES"]))
    ]


class _Method:
    def __init__(self, threads: concurrent.futures.Executor, method: Any):
        self._threads, self._method = threads, method

    def remote(self, *args: Any) -> concurrent.futures.Future:
        return self._threads.submit(self._method, *args)


class _Actor:
    def __init__(self, made: Any, threads: int):
        self._made, self._threads = made, concurrent.futures.ThreadPoolExecutor(threads)

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._threads, getattr(self._made, name))


class remote:
    def __init__(self, kind: type):
        self._kind, self._threads = kind, 1

    def options(
        self,
        *,
        num_cpus: float,
        num_gpus: float,
        resources: Any,
        max_concurrency: int,
        scheduling_strategy: Any,
    ) -> "remote":
        self._threads = max_concurrency
        return self

    def remote(self) -> _Actor:
        return _Actor(self._kind(), self._threads)


def get(ref: concurrent.futures.Future, timeout: float | None = None) -> Any:
    return ref.result(timeout)


def wait(refs: list[concurrent.futures.Future], *, timeout: float) -> tuple[list, list]:
    done, rest = concurrent.futures.wait(
        refs, timeout, return_when=concurrent.futures.FIRST_COMPLETED
    )
    return list(done)[:1], [*list(done)[1:], *rest]
