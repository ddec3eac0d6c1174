"""Places of sessions: an engine serves its own, and those of engines that are gone.

All that an engine keeps is in its folder, its *home*, which one process at a time has open. When an
engine's process does not come back, because its machine is gone or the fleet has become smaller,
another engine adopts the home; when it is back, it gets its home again.
"""

import asyncio
import logging
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from mint_jax.fleet.engine import EngineReport
from mint_jax.fleet.view import FleetView

log = logging.getLogger("mint_jax.fleet")
PERIOD_S = 1.0  # between two looks
MOVE_S = 60.0  # for one move: an engine that hangs does not delay the others' for longer
NAME = re.compile("e[0-9]{1,4}")


class HomeMove(NamedTuple):
    """Engine ``engine`` begins to serve a home, or ends it."""

    home: str
    engine: str
    here: bool


def moves(
    homes: Collection[str], reports: Mapping[str, EngineReport], gone_s: Mapping[str, float]
) -> list[HomeMove]:
    """Returns what is to be moved.

    Args:
        homes: that have a folder.
        reports: of the engines.
        gone_s: seconds since the process of an engine was last known to live, as far as they are
            more than it may be gone for.
    """
    up = {name: report for name, report in reports.items() if report.serving}
    at = {home: name for name, report in up.items() for home in report.homes}
    found = [
        HomeMove(home, at[home], False) for home in at if home in reports and reports[home].waits
    ]
    policies = {name: report.policies for name, report in up.items()}
    for home in sorted(homes - at.keys()):
        if up and (home not in reports or home in gone_s):
            engine = min(policies, key=lambda name: (policies[name], name))
            policies[engine] += 1  # a home's policies are not known yet
            found.append(HomeMove(home, engine, True))
    return found


def homes_in(folder: Path) -> set[str]:
    """Returns the engines that have a folder there."""
    found = (path.parent.name for path in folder.glob("*/server.db"))
    return {name for name in found if NAME.fullmatch(name)}


async def keep(view: FleetView, folder: Path, after_s: float) -> None:
    """Moves homes as long as it runs; an engine may be gone for ``after_s`` seconds."""
    while True:
        await asyncio.sleep(PERIOD_S)
        try:
            view.folders = await asyncio.to_thread(homes_in, folder)
        except OSError as error:  # of a shared file system, for a while
            log.warning("%s cannot be read: %s", folder, error)
        now = time.monotonic()
        gone_s = {name: now - one.alive_at for name, one in view.members.items()}
        gone_s = {name: seconds for name, seconds in gone_s.items() if seconds > after_s}
        reports = {name: one.report for name, one in view.members.items()}
        for move in moves(view.folders, reports, gone_s):
            verb = "serves" if move.here else "gives back"
            log.warning("engine %s %s the sessions of %s", move.engine, verb, move.home)
            try:
                moving = view.members[move.engine].move(move.home, move.here)
                await asyncio.wait_for(moving, MOVE_S)
            except Exception as error:  # its process lives after all, or the other one has died
                log.warning("the sessions of %s stay: %s", move.home, error)
