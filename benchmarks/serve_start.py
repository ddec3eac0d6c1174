"""The first minutes of ``make serve``, from the command until every program is compiled.

``cold`` has an empty cache, ``warm`` follows. ``listening_s``, ``token_s``, ``step_s`` and
``ready_s``: seconds until the port is open, a completion has arrived, an update is done, and
``/ready`` is 200. ``..._cpu_s``: CPU time of the server and its compilers until then.
"""

import asyncio
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import timing
from benchmarks.service_client import Client, Policy, Served, forward_backward, optim

LOOK_S = 0.1


async def _first(config: Any, url: str, at: Any) -> None:
    """Requests the first token and the first step at once."""

    async def token() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http:
            while (await http.get("/v1/models")).status_code != 200:
                await asyncio.sleep(LOOK_S)
            asked = {"model": config.base, "prompt": "The capital of France is", "max_tokens": 1}
            (await http.post("/v1/completions", json=asked)).raise_for_status()
        at("token")

    async def step() -> None:
        async with Client(url) as client:
            policy = Policy(client, await client.session(), 0)
            await policy.create(config.base, config.rank, 0)
            await policy.do(
                "forward_backward", forward_backward([list(range(10, 10 + config.tokens))])
            )
            await policy.do("optim_step", optim(1e-4))
        at("step")

    await asyncio.gather(token(), step())


def _start(name: str, config: Any, folder: Path, cache: Path) -> dict[str, float]:
    began = time.perf_counter()
    options = {"base": config.base, "dtype": config.dtype, "port": 0, **config.server}
    served = Served(
        config.program, "configs/serve.py", folder, options, {"MINT_JAX_CACHE": str(cache)}
    )
    found: dict[str, float] = {}
    try:
        process = psutil.Process(served.process.pid)

        def at(what: str) -> None:
            times = process.cpu_times()
            found[f"{what}_s"] = round(time.perf_counter() - began, 1)
            found[f"{what}_cpu_s"] = round(
                times.user + times.system + times.children_user + times.children_system, 1
            )
            print(
                f"[serve_start] {name} start: {what} after {found[f'{what}_s']} s",
                file=sys.stderr,
                flush=True,
            )

        url = served.listening()
        at("listening")
        asyncio.run(_first(config, url, at))
        served.ready()
        at("ready")
        served.stop()
    finally:
        served.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return found


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report. What the servers made is removed."""
    with tempfile.TemporaryDirectory(dir=workdir) as cache:
        starts = {
            name: _start(name, config, workdir / "server", Path(cache)) for name in ("cold", "warm")
        }
    return {
        "base": config.base,
        "dtype": config.dtype,
        "load": round(os.getloadavg()[0], 1),
        "starts": {
            name: {what: timing.median([value]) for what, value in start.items()}
            for name, start in starts.items()
        },
    }
