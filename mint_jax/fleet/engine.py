"""One engine of a fleet: the service of ``recipes/serve.py`` in a Ray actor's process, over its own
folder. Ray starts the actor again when its process dies; everything acknowledged is in the folder.
"""

import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ray

from mint_jax.errors import UserError
from mint_jax.harness.options import ServeSettings


class EngineReport(NamedTuple):
    """State of an engine, as it reports it.

    Attributes:
        pid: of its process.
        url: of its HTTP doors; empty: it does not listen yet.
        ready: every program is compiled.
        serving: it accepts requests; each waits for its own programs only.
        rows: samples that one step can have.
        running, waiting: samples in rows, and those that wait for one.
        loads: unfinished loads of adapters.
        load_s: seconds of a load from storage, a moving average; 0: none was measured.
        slots, host: digests in device slots and in host memory.
        places: number of device slots.
        policies: number of policies in training.
        homes: engines whose folders it serves: its own one, and those that it has adopted.
        waits: its own folder is served by another engine.
        names: of the bare base.
        failed: why the service has ended by itself.
    """

    pid: int = 0
    url: str = ""
    ready: bool = False
    serving: bool = False
    rows: int = 1
    running: int = 0
    waiting: int = 0
    loads: int = 0
    load_s: float = 0.0
    slots: frozenset[str] = frozenset()
    host: frozenset[str] = frozenset()
    places: int = 1
    policies: int = 0
    homes: tuple[str, ...] = ()
    waits: bool = False
    names: tuple[str, ...] = ()
    failed: str = ""


class EngineActor:
    """The actor. Starts serving at once.

    Args:
        name: of the engine, in all ids that it makes.
        config: of the service; its port may be 0.
        folder: of this engine, next to those of the others.
        prepare: sets up the process for JAX.
        serve: ``recipes.serve.serve``.
    """

    def __init__(
        self,
        name: str,
        config: ServeSettings,
        folder: Path,
        prepare: Callable[[], None],
        serve: Callable[..., Any],
    ):
        prepare()
        self._name, self._url, self._ready, self._waits = name, "", False, False
        self._web: Any = None
        self._server: Any = None
        self._failed = ""
        self._thread = threading.Thread(target=self._serve, args=(serve, name, config, folder))
        self._thread.start()

    def _serve(
        self, serve: Callable[..., Any], name: str, config: ServeSettings, folder: Path
    ) -> None:
        def hear(event: dict[str, Any]) -> None:
            url = event["url"].replace("//0.0.0.0:", f"//{ray.util.get_node_ip_address()}:")
            self._url, self._ready = url, event.get("ready", False)
            self._waits = event.get("waiting", False)

        def hold(**parts: Any) -> None:
            vars(self).update(parts)

        try:
            serve(
                config,
                folder,
                engine=name,
                say=hear,
                on_web=lambda web: hold(_web=web),
                on_server=lambda server: hold(_server=server),
            )
        except UserError as error:
            self._failed = str(error)
        except BaseException as error:
            self._failed = "".join(traceback.format_exception(error))
        finally:
            self._url, self._ready, self._server = "", False, None

    def report(self) -> EngineReport:
        """Returns the present state."""
        if (server := self._server) is None or not server.ready:
            return EngineReport(os.getpid(), self._url, waits=self._waits, failed=self._failed)
        rows, residency = server.engine.state()["rows"], server.residency
        return EngineReport(
            pid=os.getpid(),
            url=self._url,
            ready=self._ready,
            serving=True,
            rows=rows["most"],
            running=rows["running"],
            waiting=rows["waiting"] + rows["swapped"],
            loads=len(residency.loads),
            load_s=residency.loads.mean_s,
            slots=frozenset(d for tier in residency.device.values() for d in tier.resident()),
            host=frozenset(residency.host.resident()),
            places=sum(tier.capacity for tier in residency.device.values()),
            policies=len(server.live.names()),
            homes=(self._name, *server.guests),
            names=server.weights.names,
        )

    def prefetch(self, digest: str) -> bool:
        """Loads a revision, into a slot if one is free; see ``Residency.prefetch``."""
        server = self._server
        return server is not None and server.residency.prefetch(digest)

    def move(self, home: str, here: bool) -> None:
        """Begins or ends to serve another engine's folder, see ``Server.adopt``."""
        if (server := self._server) is not None:
            (server.adopt if here else server.release)(home)

    def stop(self) -> None:
        """Finishes the requests in flight and ends the service."""
        if self._web is not None:
            self._web.should_exit = True
        self._thread.join()
