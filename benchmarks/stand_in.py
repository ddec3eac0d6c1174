"""Time to the first token of requests whose adapters are not loaded: waiting for them, and answered
by a stand-in meanwhile; compared with requests whose adapters stay loaded.

One server in this process, without HTTP; adapters are random, of one rank, and no host memory
caches them. The sides take turns: ``warm`` names as many policies as there are slots, less one that
the stand-in has; ``waits`` and ``stands_in`` name all policies at random.
"""

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timing
from benchmarks.bases import open_base
from mint_jax import params as params_lib
from mint_jax.catalog.packed import Schema, pack
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.metrics import Progress
from mint_jax.models import transformer
from mint_jax.rollout.request import Request
from mint_jax.service.server import Server, Sizes

STAND_IN = "family"
TENANT = "default"


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    base, rng = open_base(config), np.random.default_rng(config.seed)
    adapter = AdapterConfig(config.rank, 2.0 * config.rank)
    sizes = Sizes(
        slots={config.rank: 1},
        adapters={config.rank: config.slots},
        max_rows=config.clients,
        host_bytes=1 << 20,
    )
    with tempfile.TemporaryDirectory(dir=workdir) as folder:
        server = Server(base, Path(folder), sizes)
        nbytes = _fill(config, server, adapter, rng)
        server.compile().wait()
        with server.running():
            found = _rounds(config, server, rng)
    seconds = {side: [s for s, _ in rows] for side, rows in found.items()}
    report: dict[str, Any] = {name: config[name] for name in ("policies", "slots", "clients")}
    report |= {"adapter_bytes": nbytes, "requests": len(seconds["warm"])}
    report["first_token_ms"] = {side: timing.percentiles(rows) for side, rows in seconds.items()}
    for side in ("waits", "stands_in"):
        report[f"{side}_over_warm"] = timing.ratio(seconds, side, "warm", q=99)
    report["stood_in"] = float(np.mean([stood for _, stood in found["stands_in"]]))
    return report


def _fill(config: Any, server: Server, adapter: AdapterConfig, rng: np.random.Generator) -> int:
    """Makes the policies and their stand-in; returns the bytes of one."""
    specs = lora_tree.adapter_specs(transformer.abstract(server.base.cfg), adapter)
    names = [STAND_IN, *(f"policy-{i}" for i in range(config.policies))]
    for name in timing.counted("policies", names):
        made = params_lib.map_with_path(
            lambda _, spec: rng.normal(0, 0.02, spec.shape).astype(np.float32), specs
        )
        data = pack(made, Schema(server.base.fingerprint, adapter))
        server.catalog.export(name, data, 0, create=True)
    return len(data)


def _rounds(
    config: Any, server: Server, rng: np.random.Generator
) -> dict[str, list[tuple[float, bool]]]:
    """Returns seconds to the first token, and whether the stand-in answered, of all requests."""
    names = [f"policy-{i}" for i in range(config.policies)]
    found: dict[str, list[tuple[float, bool]]] = {"warm": [], "waits": [], "stands_in": []}
    progress = Progress("rounds", config.n * len(found))
    for number in range(config.n):
        for side, rows in found.items():
            some = names[: config.slots - 1] if side == "warm" else names
            for name in some:
                server.catalog.stand_in(name, STAND_IN if side == "stands_in" else None)
            _ask(server, STAND_IN, config.tokens)
            for name in some if side == "warm" else ():
                _ask(server, name, config.tokens)
            asked = rng.choice(some, config.requests).tolist()
            rows += _clients(config, server, asked)
            progress.update(1 + list(found).index(side) + number * len(found), side)
    return found


def _clients(config: Any, server: Server, asked: list[str]) -> list[tuple[float, bool]]:
    """Sends the requests from ``clients`` threads, each one after the other."""
    rows: list[tuple[float, bool]] = []
    left, lock = iter(asked), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                name = next(left, None)
            if name is None:
                return
            rows.append(_ask(server, name, config.tokens))

    threads = [threading.Thread(target=work) for _ in range(config.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows


def _ask(server: Server, name: str, tokens: int) -> tuple[float, bool]:
    """Returns the seconds to a request's first token, and whether the stand-in answered."""
    began, first = time.perf_counter(), list[float]()
    named = server.weights.resolve(name, TENANT)
    model = server.at_once(named, TENANT)
    request = Request((1, 2, 3, 4), max_tokens=tokens, revision=model.digest, tenant=TENANT)
    stream = server.submit(request)
    stream.listen(lambda piece: first.append(time.perf_counter()))
    stream.result()
    return first[0] - began, model.digest != named.digest
