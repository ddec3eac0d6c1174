"""Training requests made durable: through the journal of futures, and as a row each in the
catalog's database.

A client's thread sends a request, which is durable when it is accepted; the request is run, which
takes no time here; its result is durable when the client has it. Then the next. ``journal``:
``mint_jax.service.futures``, one thread that runs what is ready; requests and results of all
threads share syncs. ``sqlite``: ``begin_operation`` and ``finish_operation`` of the catalog, a
transaction each in SQLite's write-ahead log, synced at every commit; the thread that began a
request also finishes it.

The two run in turn, for several numbers of threads. ``per_s`` are requests a second, ``cpu_us``
microseconds of the process's CPU for a request, ``ratio`` is how many times longer a request takes
in the database. ``sync_ms``: what the disk takes to append and sync 8 KB, which no single client
can undercut.
"""

import base64
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timing
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.service.futures import Done, Futures
from mint_jax.service.server_db import ServerDatabase

WAIT_S = 60.0


class _Journal:
    """Clients of futures, and the thread that runs their requests."""

    def __init__(self, folder: Path, body: bytes, result: bytes):
        self._body, self._result, self._rounds = body, result, 0
        self._models: list[str] = []
        self._database = ServerDatabase(folder / "server.db")
        self._futures = Futures(self._database)
        self._stop = threading.Event()
        self._executor = threading.Thread(target=self._execute)
        self._executor.start()

    def _execute(self) -> None:
        while not self._stop.is_set():
            if (request := self._futures.take(0.1)) is not None:
                self._futures.finish(request.id, Done(self._result))

    def prepare(self) -> None:
        """Deletes what earlier rounds left."""
        for model in self._models:
            self._futures.forget(model)
        self._models.clear()
        self._rounds += 1

    def client(self, number: int, requests: int) -> None:
        model = f"{self._rounds}:{number}"
        self._models.append(model)
        for seq_id in range(1, requests + 1):
            id = self._futures.submit(model, seq_id, "forward_backward", self._body, wait_s=None)
            if self._futures.wait(id, WAIT_S) is None:
                raise TimeoutError(
                    f"request {seq_id} of {model} has no result within {WAIT_S:.0f} s"
                )
            self._futures.acknowledge([id])

    def close(self) -> None:
        self._stop.set()
        self._executor.join()
        self._futures.close()
        self._database.close()


class _Rows:
    """Clients of the catalog's table of operations."""

    def __init__(self, folder: Path, body: bytes, result: bytes):
        self._request, self._result, self._rounds = (
            base64.b64encode(body).decode(),
            base64.b64encode(result).decode(),
            0,
        )
        self._catalog = Catalog.open(folder, timeout_s=WAIT_S)

    def prepare(self) -> None:
        self._rounds += 1

    def client(self, number: int, requests: int) -> None:
        for seq_id in range(1, requests + 1):
            operation, _ = self._catalog.begin_operation(
                "forward_backward", f"{self._rounds}:{number}:{seq_id}", self._request
            )
            self._catalog.finish_operation(operation.id, self._result)

    def close(self) -> None:
        self._catalog.close()


def _clients(side: _Journal | _Rows, threads: int, requests: int) -> tuple[float, float]:
    """Seconds, and seconds of CPU, a request, of so many clients with so many requests each."""
    side.prepare()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            side.client(number, requests)
        except BaseException as error:
            errors.append(error)

    clients = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    began, cpu = time.perf_counter(), time.process_time()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    if errors:
        raise errors[0]
    count = requests * threads
    return seconds / count, cpu / count


def _sync(folder: Path, count: int) -> list[float]:
    """Seconds of appending 8 KB to a file and syncing it, as the journal does."""
    out = []
    with (folder / "sync").open("wb", buffering=0) as file:
        for _ in range(count):
            began = time.perf_counter()
            file.write(bytes(8192))
            os.fsync(file.fileno())
            out.append(time.perf_counter() - began)
    return out


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report. What it makes is removed."""
    folder = workdir / "journal"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rng = np.random.default_rng(config.seed)
    body, result = rng.bytes(config.body_bytes), rng.bytes(config.result_bytes)
    report: dict[str, Any] = {
        "bench": "journal",
        "device": timing.device(),
        "cores": os.cpu_count(),
    }
    report |= {"body_bytes": config.body_bytes, "result_bytes": config.result_bytes}
    sides: dict[str, _Journal | _Rows] = {}
    try:
        report["sync_ms"] = timing.median(_sync(folder, 50), 1e3)
        sides["journal"] = _Journal(folder / "futures", body, result)
        sides["sqlite"] = _Rows(folder / "catalog", body, result)
        for threads in config.threads:
            report |= _measure(sides, threads, config)
    finally:
        for side in sides.values():
            side.close()
        shutil.rmtree(folder, ignore_errors=True)
    return report


def _measure(sides: dict[str, _Journal | _Rows], threads: int, config: Any) -> dict[str, Any]:
    """Both sides with one number of threads, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}

    def call(name: str) -> Callable[[], None]:
        def measured() -> None:
            fewer = config.rows // threads if name == "sqlite" else config.requests
            a, b = _clients(sides[name], threads, max(1, min(config.requests, fewer)))
            seconds[name].append(a)
            cpu[name].append(b)

        return measured

    timing.in_turn(f"journal, {threads} threads", {name: call(name) for name in sides}, config.n)
    kept = {name: values[-config.n :] for name, values in seconds.items()}  # without the warm ones
    found = {f"ratio_{threads}": timing.ratio(kept, "sqlite", "journal")}
    for name in sides:
        found[f"{name}_per_s_{threads}"] = timing.median([1 / value for value in kept[name]])
        found[f"{name}_cpu_us_{threads}"] = timing.median(cpu[name][-config.n :], 1e6)
    return found
