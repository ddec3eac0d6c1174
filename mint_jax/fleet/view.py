"""The front's view of its engines: what each has last reported, and what was sent there since."""

import asyncio
import collections
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohttp

from mint_jax.fleet.chooser import Choice, Load, choose, homes_of
from mint_jax.fleet.engine import EngineReport

PERIOD_S = 0.25  # between two reports of an engine
REPORT_S = 5.0  # in which it must answer
ASSUMED_S = 0.05  # of a load until one is measured
_SMOOTH = 0.1  # weight of the newest request in the mean
HOLD_S = 30.0  # that a replica stays after the demand for it has ended
IDLE_S = 2.0  # of a connection: engines close idle ones after 5 s, and a request on it would fail
CONNECT_S = 2.0


class FleetEngine:
    """One engine.

    Args:
        ask: returns its next report.
        prefetch: loads a digest there.
        move: begins or ends to serve another engine's folder there, see ``EngineActor.move``.

    Attributes:
        alive_at: when its process was last known to live.
    """

    def __init__(
        self,
        name: str,
        ask: Callable[[], Awaitable[EngineReport]],
        prefetch: Callable[[str], Any],
        move: Callable[[str, bool], Awaitable[None]],
    ):
        self.name, self.ask, self.prefetch, self.move = name, ask, prefetch, move
        self.report, self.at, self.trouble = EngineReport(), -math.inf, ""
        self.alive_at = time.monotonic()
        self.in_flight, self.seconds, self.refused_until = 0, 0.0, 0.0
        self.sent = 0  # requests
        self._load: tuple[tuple, Load] | None = None
        self.sessions = 0  # opened there by this front
        self.digests: collections.Counter[str] = collections.Counter()  # of requests in flight
        self.client: aiohttp.ClientSession | None = None

    @property
    def is_up(self) -> bool:
        return self.report.serving

    def take(self, report: EngineReport, at: float) -> None:
        """Takes a report, made at a time of the monotonic clock."""
        self.report, self.at, self._load = report, at, None

    def load(self) -> Load:
        """Returns what the chooser needs. Requests of this front count from when they are sent."""
        state = self.sent, self.in_flight, self.refused_until
        if self._load is None or self._load[0] != state:  # made once for many requests elsewhere
            self._load = state, self._made_load()
        return self._load[1]

    def _made_load(self) -> Load:
        report = self.report
        samples = max(self.in_flight, report.running + report.waiting)
        ahead = max(0, samples + 1 - report.rows) / report.rows
        # A load waits for those before it; a sample of a loaded adapter does not. What is in flight
        # is loaded, or will be.
        load_s = (1 + report.loads) * (report.load_s or ASSUMED_S)
        slots = report.slots | self.digests.keys()
        wait_s = ahead * self.seconds
        return Load(self.at, samples, wait_s, load_s, slots, report.host, self.refused_until)


class FleetView:
    """All engines of a fleet; for one event loop. ``changed`` is notified by every report;
    ``folders`` are the engines that have had sessions, those of a larger fleet too.
    """

    def __init__(self, members: list[FleetEngine]):
        self.members = {member.name: member for member in members}
        self.folders: set[str] = set()
        self.changed = asyncio.Condition()
        self._by_digest: collections.Counter[str] = collections.Counter()  # requests in flight
        # number of engines that a digest needs, and until when at least
        self._wanted: dict[str, tuple[int, float]] = {}
        self._warming: set[tuple[str, str]] = set()

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator["FleetView"]:
        """Asks all engines for reports until the block ends."""
        tasks = [asyncio.create_task(self._watch(one)) for one in self.members.values()]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            for member in self.members.values():
                if member.client is not None:
                    await member.client.close()

    async def _watch(self, member: FleetEngine) -> None:
        while True:
            try:
                report = await asyncio.wait_for(member.ask(), REPORT_S)
                await self._take(member, report)
            except Exception as error:  # its process has died: Ray starts another one
                await self._take(member, EngineReport(), f"{type(error).__name__}: {error}")
            await asyncio.sleep(PERIOD_S)

    async def _take(self, member: FleetEngine, report: EngineReport, trouble: str = "") -> None:
        if report.url and (member.client is None or report.url != member.report.url):
            old = member.client  # of a process that has died
            # not httpx: its pool looks at all connections for every request, 20 ms at 200 of them
            member.client = aiohttp.ClientSession(
                report.url,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
            if old is not None:
                await old.close()
        member.take(report, time.monotonic())
        member.trouble = trouble
        if not trouble:
            member.alive_at = member.at
        async with self.changed:
            self.changed.notify_all()

    def lose(self, member: FleetEngine) -> None:
        """Notes that an engine's connections break; its next report says whether it lives."""
        member.report = member.report._replace(serving=False)

    async def wait(self, found: Callable[[], Any], seconds: float) -> Any:
        """Returns what ``found`` returns once that is true; None after ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self.changed:
                await self.changed.wait_for(lambda: bool(found()))
        return found() or None

    def homes(self) -> list[str]:
        """Returns the engines that may have sessions."""
        return sorted(self.members.keys() | self.folders)

    def at(self, home: str) -> FleetEngine | None:
        """Returns the engine that serves another one's sessions, or its own; None: none does."""
        serving = [one for one in self.up() if home in one.report.homes]
        return min(serving, key=lambda one: one.name != home, default=None)

    def up(self) -> list[FleetEngine]:
        return [member for member in self.members.values() if member.is_up]

    def names(self) -> set[str]:
        """Returns the names of the bare base."""
        return {name for member in self.up() for name in member.report.names}

    def choices(self, key: str | None, number: int) -> Iterator[Choice]:
        """Yields the engines that are up, in the order to offer request ``number``."""
        now, view = time.monotonic(), {member.name: member.load() for member in self.up()}
        replicas = 1 if key is None else self._replicas(key, view, now)
        return choose(key, list(view), view, now, replicas, number)

    @contextlib.contextmanager
    def sending(self, member: FleetEngine, key: str | None) -> Iterator[None]:
        """Counts a request as in flight at an engine."""
        began = time.monotonic()
        member.in_flight, member.sent = member.in_flight + 1, member.sent + 1
        for counter in (member.digests, self._by_digest):
            counter[key or ""] += 1
        try:
            yield
        finally:
            member.in_flight -= 1
            for counter in (member.digests, self._by_digest):
                counter[key or ""] -= 1
                if not counter[key or ""]:
                    del counter[key or ""]
            seconds = time.monotonic() - began
            member.seconds += (_SMOOTH if member.seconds else 1.0) * (seconds - member.seconds)

    # -- replicas by demand

    def _replicas(self, key: str, view: dict[str, Load], now: float) -> int:
        """Returns the number of engines that have a digest or may load it for this request. More
        demand loads it on further homes, which count once they have it.
        """
        wanted = self._demand(key, now)
        homes = homes_of(key, tuple(view), wanted)
        has = [home for home in homes if key in self.members[home].report.slots]
        for home in homes:
            if home not in has and has and (home, key) not in self._warming:
                self._warming.add((home, key))
                self.members[home].prefetch(key)
        self._warming -= {(home, key) for home in has}
        return max(1, len(has))

    def _demand(self, key: str, now: float) -> int:
        """Returns the number of engines that a digest needs: more at once, fewer after ``HOLD_S``.
        All digests in use together need no more than there are slots.
        """
        members = self.up()
        rows = min((member.report.rows for member in members), default=1)
        places = sum(member.report.places for member in members)
        most = min(len(members), max(1, places // max(1, len(self._by_digest))))
        needed = min(most, max(1, math.ceil(self._by_digest[key] / rows)))
        count, until = self._wanted.get(key, (1, 0.0))
        if needed >= count or now > until:
            count, until = needed, now + HOLD_S
        self._wanted[key] = count, until
        if count == 1:
            del self._wanted[key]
        return min(count, most)
