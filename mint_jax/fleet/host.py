"""The front's actor: its HTTP server, and the engines' actors that it asks for reports."""

import asyncio
import functools
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from prometheus_client import CollectorRegistry

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.fleet import homes
from mint_jax.fleet.front import CACHE_BYTES, Front, make
from mint_jax.fleet.view import FleetEngine, FleetView
from mint_jax.harness.options import FleetSettings
from mint_jax.service.app import Web
from mint_jax.service.gate import Limits
from mint_jax.service.keys import Keys
from mint_jax.service.monitoring import HttpMetrics

STARTED_S = 60.0


class FrontActor:
    """The actor. Starts serving at once.

    Args:
        catalog: that of all engines.
        port: where the front listens, again if it is started again.
        limits: of requests.
        engines: names of their actors.
        folder: that has the engines' folders.
    """

    def __init__(
        self,
        config: FleetSettings,
        catalog: str,
        port: int,
        limits: Limits,
        engines: Sequence[str],
        folder: Path,
    ):
        self._started, self._url, self._failed = threading.Event(), "", ""
        self._web: Any = None
        self._view: Any = None
        given = config, catalog, port, limits, engines, folder
        self._thread = threading.Thread(target=self._serve, args=given)
        self._thread.start()

    def _serve(self, *given: Any) -> None:
        try:
            asyncio.run(self._main(*given))
        except BaseException as error:
            self._failed = "".join(traceback.format_exception(error))
        finally:
            self._started.set()

    async def _main(
        self,
        config: FleetSettings,
        place: str,
        port: int,
        limits: Limits,
        engines: Sequence[str],
        folder: Path,
    ) -> None:
        async def ask(actor: Any) -> Any:
            return await actor.report.remote()

        async def move(actor: Any, home: str, here: bool) -> None:
            await actor.move.remote(home, here)

        actors = {name: ray.get_actor(name) for name in engines}  # of this front's namespace
        self._view = FleetView(
            [
                FleetEngine(
                    name,
                    functools.partial(ask, actor),
                    actor.prefetch.remote,
                    functools.partial(move, actor),
                )
                for name, actor in actors.items()
            ]
        )
        # before the first request: one for a session elsewhere would find nothing
        self._view.folders = homes.homes_in(folder)
        keys = Keys(Path(config.api_keys)) if config.api_keys else None
        how: dict[str, Any] = {"actor": "fleet", "cache_bytes": CACHE_BYTES}
        with Catalog.open(place, config.payloads or None, **how) as catalog:
            metrics = CollectorRegistry()
            front = Front(self._view, catalog, metrics)
            app = make(
                front,
                keys=keys,
                limits=limits,
                hosts=config.hosts,
                metrics=HttpMetrics(metrics),
            )
            tls: dict[str, Any] = {}
            if config.certificate:
                key = config.private_key or None
                tls = {"ssl_certfile": config.certificate, "ssl_keyfile": key}
            kind = "https" if tls else "http"

            def started(port: int) -> None:
                where = f"[{config.host}]" if ":" in config.host else config.host
                self._url = f"{kind}://{where}:{port}"
                self._started.set()

            self._web = Web(front, app, config.host, port, started, **tls)
            async with self._view.watching():
                moving = asyncio.create_task(homes.keep(self._view, folder, config.move_after_s))
                await self._web.serve()
                moving.cancel()

    def url(self) -> str:
        """Returns the front's address once it listens. Raises ``RuntimeError`` if it cannot."""
        self._started.wait(STARTED_S)
        if not self._url:
            raise RuntimeError(self._failed or "the front did not start in time")
        return self._url

    def status(self) -> tuple[bool, str]:
        """Returns whether every engine has compiled all of its programs, and why the service of one
        has ended by itself.
        """
        reports = {name: one.report for name, one in self._view.members.items()}
        failed = [f"{name}: {one.failed}" for name, one in reports.items() if one.failed]
        return all(one.ready for one in reports.values()), "; ".join(failed)

    def stop(self) -> None:
        """Finishes the requests in flight and ends the front."""
        if self._web is not None:
            self._web.should_exit = True
        self._thread.join()
