"""Engines of ``benchmarks.fleet_simulation`` in real time: they decode nothing, and an answer comes
when the model says so.
"""

import asyncio
import time
from typing import Any

from benchmarks.fleet_simulation import Ask, Engine, Service
from mint_jax.fleet.engine import EngineReport


class Timed:
    """Timed engines: to ``Engine`` they are its fleet, with the real time."""

    def __init__(self, service: Service, count: int):
        self.busy, self.ends = [0] * count, dict[int, asyncio.Future]()
        self.engines = [Engine(service, self, i) for i in range(count)]  # type: ignore[arg-type]

    @property
    def now(self) -> float:
        return time.monotonic()

    def at(self, seconds: float, call: Any) -> None:
        asyncio.get_running_loop().call_later(seconds, call)

    def ended(self, i: int, ask: Ask) -> None:
        self.busy[i] -= 1
        self.ends.pop(ask.number).set_result(None)

    async def serve(self, i: int, ask: Ask) -> float:
        """Returns 0 when engine ``i`` has answered, or at once the seconds for which it refuses."""
        if not (wait := self.engines[i].offer(ask)):
            self.busy[i] += 1
            self.ends[ask.number] = end = asyncio.get_running_loop().create_future()
            await end
        return wait

    def report(self, i: int, url: str) -> EngineReport:
        one = self.engines[i]
        return EngineReport(
            url=url,
            ready=True,
            serving=True,
            rows=one.service.rows,
            running=len(one.rows),
            waiting=len(one.waiting) + sum(map(len, one.loads.values())),
            loads=len(one.loads),
            load_s=one.service.next_load_s,
            slots=frozenset(one.device.resident()),
            host=frozenset(one.host.resident()),
            places=one.service.slots,
        )
