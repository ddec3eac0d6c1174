"""``/debug/state``: what a server has under way, where its policies are, and what they cost; in
JSON.
"""

import collections
import contextlib
import time
from typing import Any

import psutil

from mint_jax.errors import UserError
from mint_jax.service.costs import BASE
from mint_jax.service.server import Server

MOST_SHOWN = 200  # policies; the busiest first


def state_of(server: Server) -> dict[str, Any]:
    """Returns the server's current state; call it in a thread."""
    live, engine = server.live, server.engine
    shown, left_out = policies_of(server)
    memory = [device.memory_stats() or {} for device in server.base.mesh.local_devices]
    return {
        "base": server.name,
        "fingerprint": server.base.fingerprint,
        "at": time.time(),
        "up_s": round(time.monotonic() - server.started, 1),
        "trouble": server.trouble(),
        "training": {
            "waiting": server.loop.training.waiting,
            "policies": live.places(),
            "slots": live.slots,
            "host_bytes": live.host_bytes_used,
            "counts": dict(live.counts),
        },
        "sampling": dict(engine.counts),
        "engine": engine.state(),
        "answers": len(server.answers),
        "residency": server.residency.state(),
        "tokens_in_flight": dict(server.quotas.tokens),
        "measured_s": server.costs.measured_s,
        "memory": {
            "rss": psutil.Process().memory_info().rss,
            "devices": [one.get("bytes_in_use") for one in memory],
        },
        "policies": shown,
        "policies_left_out": left_out,
    }


def policies_of(server: Server) -> tuple[list[dict[str, Any]], int]:
    """The policies that are in training, in slots or asked for, the busiest first, and how many
    more there are.

    Of each: ``training``, where its state is (slot, host, disk); ``serving``, where the nearest of
    its revisions is (slot, or host where one is asked for that is not in a slot yet); ``queued``
    training requests, ``sampling`` requests, and its costs since ever.
    """
    found: dict[str, dict[str, Any]] = collections.defaultdict(
        lambda: {"tenant": "", "training": "", "serving": "", "queued": 0, "sampling": 0}
    )
    for name, queued in server.loop.training.queued().items():
        found[name]["queued"] = queued
    for name in server.live.names():
        with contextlib.suppress(UserError):  # it left meanwhile
            found[name] |= {"training": server.live.where(name), "tenant": server.book.owner(name)}
    resident = set(server.residency.state()["resident"])
    for digest in resident:
        found[server.policy_of(digest)]["serving"] = "slot"
    for (tenant, digest), count in server.engine.in_flight().items():
        one = found[server.policy_of(digest or BASE)]
        one["tenant"] = one["tenant"] or tenant
        one["sampling"] += count
        one["serving"] = one["serving"] or (
            "slot" if digest is None else "host" if digest in server.residency.host else "store"
        )
    order = sorted(
        found,
        key=lambda name: (
            -found[name]["queued"] - found[name]["sampling"],
            found[name]["training"] != "slot",
            name,
        ),
    )
    shown = order[:MOST_SHOWN]
    costs = server.costs.of(shown)
    return [{"policy": name} | found[name] | costs[name].told() for name in shown], len(
        order
    ) - len(shown)
