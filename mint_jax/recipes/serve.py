"""Serves one base: many tenants train adapters over it and sample from them, with Tinker's and
OpenAI's clients.

It prints ``{"listening": true, "url": ...}`` before it loads the base, and ``{"ready": true, "url":
...}`` when all is compiled. A request is served as soon as its own programs are compiled.
Everything acknowledged is in the workdir: the same command continues from there.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mint_jax import host
from mint_jax.errors import UserError
from mint_jax.harness import start, workdir
from mint_jax.harness.options import ServeSettings
from mint_jax.harness.workdir import WorkdirLock
from mint_jax.metrics import Progress
from mint_jax.train.config import BlockShape

# for a server that is still opening when it is stopped; its records are then as after a kill
STOP_S = 5.0
BUSY_S = 0.5  # between two attempts to open a folder that another engine serves


def sizes_of(config: ServeSettings) -> Any:
    """Returns ``service.server.Sizes`` of the settings."""
    from mint_jax.service.server import Sizes

    same = "experts", "max_rows", "speculative_tokens", "reuse_decoded"
    same = *same, "gap_s", "idle_gap_s", "session_s", "cache_bytes"
    return Sizes(
        slots={rank: config.slots for rank in config.ranks if rank},  # clients train LoRA
        adapters=dict.fromkeys(config.ranks, config.adapters),
        shapes=[BlockShape(*shape) for shape in config.shapes],
        host_bytes=int(config.host_gib * 2**30),
        every=config.snapshot_every,
        every_s=config.snapshot_s,
        wait_cost=config.wait_cost if config.routing else None,
        **{name: getattr(config, name) for name in same},
    )


def limits_of(config: ServeSettings) -> Any:
    """Returns ``service.gate.Limits`` of the settings."""
    from mint_jax.service.gate import Limits

    return Limits(
        body_bytes=config.body_mb << 20,
        tenant=config.tenant_requests,
        held_bytes=int(config.bodies_gib * 2**30),
    )


def say(event: dict[str, Any]) -> None:
    """Prints an event as a line of JSON."""
    print(json.dumps(event), flush=True)


def run(config: ServeSettings, folder: Path) -> dict[str, Any]:
    """Serves until a signal; ``precompile=only`` fills the compilation cache and returns."""
    return serve(config, folder)


def serve(
    config: ServeSettings,
    folder: Path,
    engine: str = "",
    say: Callable[[dict[str, Any]], None] = say,
    on_web: Callable[[Any], None] = lambda web: None,
    on_server: Callable[[Any], None] = lambda server: None,
) -> dict[str, Any]:
    """Serves in any thread; see ``run``.

    Args:
        engine: name of this engine of a fleet.
        say: called with ``{"listening": true, "url": ...}`` and ``{"ready": true, "url": ...}``;
            with ``{"waiting": true, "url": ...}`` while another engine of the fleet serves this
            one's folder.
        on_web, on_server: called with the web server and the ``Server`` once they exist.
    """
    # after the check of the extra's packages
    from mint_jax.service import app, binding
    from mint_jax.service.keys import Keys
    from mint_jax.service.quotas import Quota, Quotas
    from mint_jax.service.server import Server
    from mint_jax.service.starting import Starting

    key_folder = Path(config.api_keys) if config.api_keys else None
    keys = Keys(key_folder) if key_folder else None
    binding.check_binding(config.host, keys, bool(config.certificate) or config.behind_tls)
    binding.check_hosts(config.hosts)
    sizes, tenant_bytes = sizes_of(config), int(config.tenant_gib * 2**30) or None
    tokens, policies = config.tenant_tokens or None, config.tenant_policies or None
    default = Quota(tokens=tokens, policies=policies, bytes=tenant_bytes)
    limits = limits_of(config)
    bars: list[Progress] = []

    def compiling(name: str, done: int, total: int) -> None:
        starting.doing = f"compiling {name}: {done} of {total} programs are ready"
        bars[:] = bars or [Progress("compiling", total)]
        bars[0].update(done, name)

    def wait_for_folder() -> None:
        starting.doing = "waiting until another engine has left its folder"
        say({"waiting": True, "url": url})
        time.sleep(BUSY_S)
        if web.should_exit:
            raise UserError("stopped while another engine serves its folder")

    def open_server() -> Server:
        base = start.open_base(config)
        return Server(
            base,
            folder,
            sizes,
            config.catalog or None,
            config.payloads or None,
            name=config.name or None,
            tokenizer=config.tokenizer or None,
            peft_folder=Path(config.peft_folder) if config.peft_folder else None,
            adapter_uris=config.adapter_uris,
            quotas=Quotas(default, key_folder),
            engine=engine,
            on_busy=wait_for_folder if engine else None,
        )

    tls: dict[str, Any] = {}
    if config.certificate:
        tls = {"ssl_certfile": config.certificate, "ssl_keyfile": config.private_key or None}
    url = ""
    opening = threading.Lock()
    opened = contextlib.ExitStack()
    servers: list[Server] = []
    failed: list[BaseException] = []

    def open_and_serve() -> None:
        try:
            starting.doing = f"loading {config.base}"
            server = open_server()
            programs = server.compile(compiling)
            if config.precompile == "before":
                programs.wait()
            starting.doing = "reading its workdir"
            with opening:
                if web.should_exit:
                    return
                opened.enter_context(server.running())
                servers.append(server)
            on_server(server)
            made = app.make(server, keys, limits, config.hosts, config.openai_limits)
            starting.begin(made, server.end_waits)
            if programs.wait():
                say({"ready": True, "url": url})
            elif programs.failed is not None:
                raise programs.failed
        except BaseException as error:  # the main thread raises it below
            failed.append(error)
            web.should_exit = True

    starter = threading.Thread(target=open_and_serve, name="starter", daemon=True)

    def started(port: int) -> None:
        nonlocal url
        where = f"[{config.host}]" if ":" in config.host else config.host
        url = f"{'https' if tls else 'http'}://{where}:{port}"
        say({"listening": True, "url": url})
        host.may_abandon(starter)
        starter.start()

    starting = Starting()
    lock = WorkdirLock(folder)
    try:
        workdir.save_config(config, folder)
        if config.precompile == "only":
            with contextlib.closing(open_server()) as server:
                programs = server.compile(compiling)
                if not programs.wait() and programs.failed is not None:
                    raise programs.failed
                return {"job": "serve", "compiled": programs.total}
        web = app.Web(starting, starting, config.host, config.port, started, **tls)
        on_web(web)
        with contextlib.suppress(SystemExit):  # uvicorn raises it for a port in use
            web.run()
        if not web.started:
            raise UserError(
                f"port {config.port} of {config.host} cannot be used: choose another --config.port,"
                " or 0 for any that is free"
            )
        if opening.acquire(timeout=STOP_S):
            opened.close()
    finally:
        lock.release()
    if failed:
        raise failed[0]
    return {
        "job": "serve",
        "stopped_by": web.stopped_by,
        "tokens_sampled": sum(server.engine.counts["drawn_tokens"] for server in servers),
        "training_steps": sum(server.live.counts["steps"] for server in servers),
    }
